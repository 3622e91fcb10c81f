"""`manage.py owed`: what is owed per kind, and whose each sandbox is, until when, and what it costs. Read-only."""

from __future__ import annotations

import json
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from django.core.management.base import BaseCommand
from django.core.serializers.json import DjangoJSONEncoder

from cleanup import report
from leases import trust
from leases.holds import FOREVER
from leases.models import Obligation
from leases.ownership import SHOWN, Because, Cost, Group, Ownership, Sandbox
from leases.unfinished import Unfinished


class Command(BaseCommand):
    help = (
        "Show what is owed: open, in flight, cooling, due, escalated, quiet and why, waiting; then whose each sandbox "
        "is, what keeps it until when, when the next is let go, and what that costs. Read-only, one snapshot."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true", help="print one JSON object")
        parser.add_argument(
            "--list",
            nargs="?",
            const=SHOWN,
            type=_number,
            metavar="N",
            help=f"also name the first N sandboxes of each kind ({SHOWN} unless told), or `all`",
        )

    def handle(self, *_: Any, **options: Any) -> None:
        listed = options["list"]
        owed = report.owed(shown=SHOWN if listed is None else listed or None)
        if options["json"]:
            self.stdout.write(json.dumps(owed.as_json(), cls=DjangoJSONEncoder, indent=2))
            return
        if owed.trust["observing"]:
            self.stdout.write(trust.sentence(owed.trust["why"], owed.trust["since"]))
        self._obligations(owed)
        self._sandboxes(owed.ownership, named=listed is not None)
        self._unfinished(owed.unfinished, owed.at)
        if not any(k.open for k in owed.kinds):
            self.stdout.write("Nothing is owed.")

    def _obligations(self, owed: report.Report) -> None:
        head = ("kind", "open", "in flight", "cooling", "due", "escalated", "quiet", "waiting", "oldest", "next due")
        rows = [
            (
                k.kind,
                *(str(n) for n in (k.open, k.in_flight, k.cooling, k.due, k.escalated, k.quiet, k.waiting)),
                _ago(k.oldest, owed.at),
                _ahead(k.next_due, owed.at),
            )
            for k in owed.kinds
        ]
        self._table(head, rows)
        for kind in owed.kinds:
            for why, count in kind.quiet_because.items():
                self.stdout.write(f"{count} {kind.kind} need a person: {Obligation.Quiet(why).label}")
        for account in owed.blocked_accounts:
            until = f" until {account['blocked_until']:%H:%M:%S} UTC" if account["blocked_until"] else ""
            self.stdout.write(
                f"account {account['name']} ({account['provider']}) is blocked{until}; {account['open']} wait behind it"
            )
        if owed.unverified:
            self.stdout.write(f"{owed.unverified} ended unverified: no provider ever confirmed these")
            for debt in owed.debts:
                whose = next(f"{name} {debt[name]}" for name in ("lease", "operation", "run") if debt[name])
                self.stdout.write(
                    f"  #{debt['obligation']} {debt['kind']} of {whose}, {_ago(debt['closed_at'], owed.at)}"
                )
            if owed.unverified > len(owed.debts):
                self.stdout.write(f"  and {owed.unverified - len(owed.debts)} older ones")

    def _sandboxes(self, kept: Ownership, *, named: bool) -> None:
        groups = [group for group in kept.groups if group.count]
        if groups:
            head = ("sandboxes", "count", "releasable", "held", "undecided", "next due", "per hour", "so far")
            rows = [
                (
                    group.label,
                    *(str(n) for n in (group.count, group.releasable, group.held, group.undecided)),
                    _ahead(group.next_due, kept.at),
                    *_cells(group.cost),
                )
                for group in groups
            ]
            if len(groups) > 1:
                rows.append(("all", str(sum(group.count for group in groups)), *[""] * 4, *_cells(kept.total)))
            self.stdout.write("")
            self._table(head, rows)
        for group in groups:
            self._group(group, kept.at, named=named)
        for ends in kept.history:
            decide = f", {ends.undecided} for a person" if ends.undecided else ""
            per_hour, _ = _cells(ends.cost)
            self.stdout.write(
                f"account {ends.name} ({ends.provider}): {ends.open} ended without proof and looked for{decide}, "
                f"next {_ahead(ends.next_due, kept.at)}, {per_hour} per hour if they run"
            )
        if kept.mass_lapse is not None:
            self.stdout.write(
                f"{kept.mass_lapse.runs} runs are past their controllers' time, which is unlikely many at once: "
                "decide whether that was an outage"
            )

    def _unfinished(self, after: Unfinished, at: datetime) -> None:
        """What may run unseen is always named, whatever was asked for: it may cost."""
        if after.may_run_count:
            price = f"{_money(after.per_hour)} per hour"
            more = f", and {after.unknown_prices} of unknown price" if after.unknown_prices else ""
            self.stdout.write(
                f"{after.may_run_count} may be running although their end is proven, counted as costing: {price}{more}"
            )
            for one in after.may_run:
                self.stdout.write(
                    f"  {one.lease} {one.resource_id} ({one.provider}): a restart was never answered, since "
                    f"{_ago(one.since, at)}; next look {_ahead(one.next_look, at)}"
                )
            self._left_out(after.may_run_count - len(after.may_run))
        if after.recovery_count:
            self.stdout.write(f"{after.recovery_count} recoveries of files are running")
            for row in after.recoveries:
                failed = f"; last: {row.failure}" if row.failure else ""
                self.stdout.write(
                    f"  {row.lease} {row.resource_id}: generation {row.generation}, {row.attempts} attempts, next "
                    f"{_ahead(row.next_attempt_at, at)}, ends {_ahead(row.ends_at, at)} at the latest{failed}"
                )
            self._left_out(after.recovery_count - len(after.recoveries))
        if after.continuation_count:
            self.stdout.write(f"{after.continuation_count} continuations wait")
            for held in after.held_by:
                self.stdout.write(
                    f"  {held.count} {held.hold or 'not looked at yet'}, the oldest since {_ago(held.since, at)}"
                )
            for waiting in after.continuations:
                self.stdout.write(
                    f"  {waiting.continuation} of run {waiting.run} ({waiting.requested_by}): {waiting.sentence}"
                )
            self._left_out(after.continuation_count - len(after.continuations))

    def _left_out(self, count: int) -> None:
        if count:
            self.stdout.write(f"  and {count} more")

    def _group(self, group: Group, at: datetime, *, named: bool) -> None:
        if named:
            self.stdout.write(f"{group.label}:")
            for sandbox in group.sandboxes:
                self.stdout.write(f"  {_line(sandbox, at)}")
            if not group.left_out:
                return
            self.stdout.write(f"  and {group.left_out} more")
        for because in group.because:
            self.stdout.write(
                f"{because.count} {group.label}: {because.sentence}{_strength(because)}, {_until(because)}"
            )

    def _table(self, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
        for row in [head, *rows]:
            self.stdout.write("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _number(text: str) -> int:
    """Return how many are named, 0 for all."""
    if text == "all":
        return 0
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ArgumentTypeError("a number from 1 on, or all")
    return int(text)


def _line(sandbox: Sandbox, at: datetime) -> str:
    whose = f" of {sandbox.environment}" if sandbox.environment else ""
    parts = [f"{sandbox.lease} {sandbox.resource_id} ({sandbox.provider}{whose})"]
    parts += [f"{reason.sentence}, {_moment(reason.until)}" for reason in sandbox.reasons]
    if sandbox.person:
        parts.append(Obligation.Quiet(sandbox.person).label)
    parts.append(f"next {_ahead(sandbox.due_at, at)}" if sandbox.due_at else "not by itself")
    if sandbox.may_run_since is not None:
        parts.append(f"may be running, since {_ago(sandbox.may_run_since, at)}")
    parts.append("price unknown" if sandbox.so_far is None else f"{_money(sandbox.so_far)} so far")
    return "; ".join(parts)


def _strength(because: Because) -> str:
    return ", as long as its files can be read" if because.strength == "soft" else ""


def _until(because: Because) -> str:
    if because.last_until is None:
        return "until it is ended"
    if because.first_until == because.last_until:
        return _moment(because.last_until)
    return f"{_moment(because.last_until)} at the latest"


def _moment(until: datetime) -> str:
    return "until it is ended" if until == FOREVER else f"until {until:%Y-%m-%d %H:%M} UTC"


def _cells(cost: Cost) -> tuple[str, str]:
    """Return what it costs an hour, and what it did until now."""
    at_most = "at most " if cost.at_most else ""
    unknown = f" + {cost.unknown} of unknown price" if cost.unknown else ""
    return f"{at_most}{_money(cost.per_hour)}{unknown}", f"{at_most}{_money(cost.so_far)}"


def _money(amount: Any) -> str:
    return f"{amount:.2f}"


def _ago(then: Any, now: Any) -> str:
    return _span((now - then).total_seconds()) + " ago" if then else "-"


def _ahead(then: Any, now: Any) -> str:
    if then is None:
        return "-"
    seconds = (then - now).total_seconds()
    return "now" if seconds <= 0 else "in " + _span(seconds)


def _span(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
