"""`manage.py inventory`: what the provider accounts hold with our marks, beside our rows; deletes nothing by itself."""

from __future__ import annotations

import json
import signal
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from uuid import UUID

from django.core.management.base import BaseCommand
from tqdm import tqdm

from cleanup import inventory
from cleanup.inventory import Destroyed, Report
from cleanup.management.decision import Wrong, operator_name
from leases import leaks
from leases.clock import database_now
from leases.errors import DecisionRefused
from leases.models import InventoryFinding, ProviderAccount


class Command(BaseCommand):
    help = (
        "List what provider accounts hold with our marks, beside our leases and operations. Two complete listings a "
        "quarter of an hour apart confirm a leak. Report-only without --delete. Exit status 1 when an account could "
        "not be listed, or leaks are left that nobody deals with."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        which = parser.add_mutually_exclusive_group()
        which.add_argument(
            "--account", action="append", default=[], help="only this account: its name or id (may be given again)"
        )
        which.add_argument("--all", action="store_true", help="all accounts that were ever used (the default)")
        parser.add_argument("--dry-run", action="store_true", help="list and compare, and write nothing")
        parser.add_argument(
            "--delete",
            type=int,
            default=0,
            metavar="N",
            help=f"give at most N confirmed leaks an owner that destroys them (up to {inventory.MOST_DESTROYED})",
        )
        parser.add_argument("--actor", default="", help="who asks; the user of this process unless given")
        parser.add_argument("--json", action="store_true", help="print one JSON object")

    def handle(self, *_: Any, **options: Any) -> None:
        if not 0 <= options["delete"] <= inventory.MOST_DESTROYED:
            raise Wrong(f"--delete: from 0 to {inventory.MOST_DESTROYED}")
        if options["delete"] and options["dry_run"]:
            raise Wrong("--delete and --dry-run exclude each other")
        identities = inventory.identities(_accounts(options["account"]) if options["account"] else None)
        reports: list[Report] = []
        destroyed = Destroyed()
        interrupted = False
        with _bar(len(identities), "account", options) as bar, _term_is_an_interrupt():
            try:
                for identity in identities:
                    reports.append(inventory.take(identity, dry_run=options["dry_run"]))
                    bar.update()
            except KeyboardInterrupt:  # each listing is written in one transaction, or not at all
                interrupted = True
        if options["delete"] and not interrupted:
            interrupted = self._destroy(reports, destroyed, options)
        self._say(reports, destroyed, options)
        if interrupted:
            sys.exit(130)
        if inventory.left(reports) or any(report.outcome == inventory.Outcome.FAILED for report in reports):
            sys.exit(1)

    def _destroy(self, reports: list[Report], destroyed: Destroyed, options: dict[str, Any]) -> bool:
        """Fill `destroyed`; returns whether that was interrupted: then what was owned already stays so."""
        try:
            leaks.require_calm()
        except DecisionRefused as refused:
            self.stderr.write(f"Nothing is destroyed: {refused}.")
            return False
        with _bar(options["delete"], "leak", options) as bar, _term_is_an_interrupt():
            try:
                inventory.destroy_leaks(
                    reports,
                    options["delete"],
                    actor=options["actor"] or operator_name(),
                    reason="leak found by manage.py inventory",
                    into=destroyed,
                    on_done=bar.update,
                )
            except KeyboardInterrupt:
                return True
        return False

    def _say(self, reports: list[Report], destroyed: Destroyed, options: dict[str, Any]) -> None:
        if options["json"]:
            told = inventory.as_json(reports, destroyed, dry_run=options["dry_run"])
            self.stdout.write(json.dumps(told, indent=2))
            return
        for report in reports:
            self._say_account(report)
        for finding, lease in destroyed.owned:
            self.stdout.write(f"{finding.resource_id}: lease {lease.pk} owns it now, and owes its teardown.")
        for finding, refused in destroyed.refused:
            self.stdout.write(f"{finding.resource_id}: left alone: {refused}.")
        for finding in (finding for report in reports for finding in report.missing_in_use):
            self.stdout.write(
                f"Lease {finding.lease_id} is in use, and its sandbox {finding.resource_id} is not listed: look at the "
                "provider, and release the lease if it is gone."
            )
        leaking = inventory.left(reports)
        self.stdout.write(f"{leaking} confirmed leaks are left." if leaking else "No confirmed leak is left.")
        if options["dry_run"]:
            self.stdout.write("Nothing was written: this listing confirms nothing.")

    def _say_account(self, report: Report) -> None:
        names = ", ".join(account.name for account in report.identity.accounts)
        head = f"{names} ({report.identity.provider})"
        if not report.is_complete:
            why = report.problem or report.outcome.label
            self.stdout.write(f"{head}: NOT LISTED: {why}. Nothing follows from it.")
            return
        told = ", ".join(f"{report.counts[name]} {name}" for name in _TOLD if report.counts[name]) or "nothing"
        self.stdout.write(f"{head}: {told}")
        now = database_now()
        for finding in report.findings:
            self.stdout.write("  " + _line(finding, f"{(now - finding.first_seen_at).total_seconds() / 60:.0f} min"))


_TOLD = ("alive", *InventoryFinding.Verdict.values, "foreign", "unmarked")


def _line(finding: InventoryFinding, seen_for: str) -> str:
    parts = [f"{finding.verdict} {finding.resource_id}"]
    if finding.lease is not None:
        parts.append(f"lease {finding.lease_id} ({finding.lease.get_state_display()})")
    if finding.obligation_id is not None:
        parts.append("owes its teardown")
    else:
        parts.append("confirmed" if finding.confirmed_at else "not confirmed yet")
    parts.append(f"seen so for {seen_for}")
    if finding.hourly_price is not None:
        parts.append(f"{finding.hourly_price} an hour")
    return ", ".join(parts)


def _accounts(named: list[str]) -> list[UUID]:
    found = []
    for name in named:
        rows = ProviderAccount.objects.filter(name=name)
        with suppress(ValueError):  # a name
            rows |= ProviderAccount.objects.filter(pk=UUID(name))
        if not rows:
            raise Wrong(f"--account: there is no account {name!r}")
        if len(rows) > 1:
            raise Wrong(f"--account: several companies have an account {name!r}; give its id")
        if not rows[0].attested_identity:
            raise Wrong(f"--account: {name} was never used, so that nothing at it can be ours")
        found.append(rows[0].pk)
    return found


@contextmanager
def _bar(total: int, unit: str, options: dict[str, Any]) -> Iterator[tqdm[Any]]:
    with tqdm(total=total, unit=unit, desc="inventory", disable=options["json"] or not sys.stderr.isatty()) as bar:
        yield bar


@contextmanager
def _term_is_an_interrupt() -> Iterator[None]:
    """TERM ends it as Ctrl-C does."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
