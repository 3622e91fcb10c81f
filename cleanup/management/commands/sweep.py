"""`manage.py sweep`: pay everything that is due now, in this process. No worker, no broker and no beat are needed."""

from __future__ import annotations

import json
import signal
import sys
import threading
from argparse import ArgumentParser
from typing import Any
from uuid import UUID

from django.core.management.base import BaseCommand
from django.db.models import QuerySet
from tqdm import tqdm

from cleanup.claims import LANE, Selection
from cleanup.dispositions import CONTENDED
from cleanup.engine import Engine, Tally, accounts_with_due_work, due
from cleanup.management.decision import Wrong
from leases.models import Company, Lease, Obligation
from providers import registry


class Command(BaseCommand):
    help = "Pay everything that is due now, in this process. Exit status 1 when something due stayed unpaid."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--dry-run", action="store_true", help="only show what is due; ask no provider")
        parser.add_argument("--kind", action="append", default=[], help="only this kind (may be given again)")
        parser.add_argument("--company", type=UUID, help="only this company (its id)")
        parser.add_argument("--provider", help="only accounts of this provider")
        parser.add_argument("--lease", type=UUID, help="only this lease (its id)")
        parser.add_argument("--limit", type=int, help="work on at most so many")
        parser.add_argument("--json", action="store_true", help="print one JSON object")

    def handle(self, *_: Any, **options: Any) -> None:
        selection = self._selection(options)
        rows = due(selection, provider=options["provider"])
        found = rows.count()
        if options["dry_run"]:
            self._show_due(rows, found, options)
            return
        tally, interrupted = self._work(selection, options, found)
        left = due(selection, provider=options["provider"]).count()
        unpaid = left + sum(n for outcome, n in tally.outcomes.items() if outcome in _UNPAID)
        self._say(tally, found, left, as_json=options["json"])
        if interrupted:
            sys.exit(130)
        if unpaid:
            sys.exit(1)

    def _work(self, selection: Selection, options: dict[str, Any], found: int) -> tuple[Tally, bool]:
        stop = threading.Event()
        previous = {s: signal.signal(s, lambda *_: stop.set()) for s in (signal.SIGINT, signal.SIGTERM)}
        total = Tally()
        bar = tqdm(total=found, unit="row", desc="sweep", disable=options["json"] or not sys.stderr.isatty())

        def owing() -> list[UUID]:
            return accounts_with_due_work(selection, provider=options["provider"])

        def sweep(account_id: UUID) -> int:
            left = None if options["limit"] is None else options["limit"] - total.claimed
            if stop.is_set() or left == 0:
                return 0
            engine = Engine(stopping=stop.is_set, on_finished=lambda _: _advance(bar))
            tally = engine.sweep(account_id, seconds=float("inf"), selection=selection, limit=left)
            total.add(tally)
            return tally.claimed

        try:
            again = True
            while again:
                # What the built-in lane settles brings forth what accounts owe, so it comes first; and what is proven
                # there ends what the lane waits for, so it comes again.
                if LANE in owing():
                    sweep(LANE)
                claimed = sum(sweep(account_id) for account_id in owing() if account_id != LANE)
                again = claimed > 0 and LANE in owing()
        finally:
            bar.close()
            for number, handler in previous.items():
                signal.signal(number, handler)
        return total, stop.is_set()

    def _selection(self, options: dict[str, Any]) -> Selection:
        for kind in options["kind"]:
            if kind not in Obligation.Kind.values:
                raise Wrong(f"--kind: {kind!r} is none of {', '.join(Obligation.Kind.values)}")
        if options["provider"] and options["provider"] not in registry.known():
            raise Wrong(f"--provider: {options['provider']!r} is none of {', '.join(registry.known())}")
        if options["company"] and not Company.objects.filter(pk=options["company"]).exists():
            raise Wrong(f"--company: there is no company {options['company']}")
        if options["lease"] and not Lease.objects.filter(pk=options["lease"]).exists():
            raise Wrong(f"--lease: there is no lease {options['lease']}")
        if options["limit"] is not None and options["limit"] < 1:
            raise Wrong("--limit: must be at least 1")
        return Selection(kinds=tuple(options["kind"]), company_id=options["company"], lease_id=options["lease"])

    def _show_due(self, owed: QuerySet[Obligation], found: int, options: dict[str, Any]) -> None:
        rows = list(owed.select_related("account").order_by("due_at")[: options["limit"] or 1000])
        if options["json"]:
            rows_out = [
                {
                    "obligation": row.pk,
                    "kind": row.kind,
                    "verb": row.verb,
                    "lease": str(row.lease_id) if row.lease_id else None,
                    "account": row.account.name if row.account else None,
                    "due_at": row.due_at.isoformat() if row.due_at else None,
                }
                for row in rows
            ]
            self.stdout.write(json.dumps({"dry_run": True, "due": found, "rows": rows_out}, indent=2))
            return
        for row in rows:
            where = f"at {row.account.name}" if row.account else "(built-in: asks no provider)"
            self.stdout.write(f"#{row.pk} {row.kind} of {_subject(row)} {where}")
        self.stdout.write(f"{found} due; nothing was asked or changed.")

    def _say(self, tally: Tally, found: int, left: int, *, as_json: bool) -> None:
        if as_json:
            summary = {"due": found, "claimed": tally.claimed, "outcomes": tally.outcomes, "still_due": left}
            self.stdout.write(json.dumps(summary, indent=2))
            return
        outcomes = ", ".join(f"{number} {name}" for name, number in sorted(tally.outcomes.items())) or "nothing to do"
        self.stdout.write(f"{found} due, {tally.claimed} claimed: {outcomes}; {left} still due.")


_UNPAID = frozenset({"failed", "busy", "quieted", "not_seen", "handed_back", CONTENDED, "unwritten"})
"""Outcomes after which something that was due is still owed."""


def _subject(row: Obligation) -> str:
    if row.lease_id:
        return f"lease {row.lease_id} ({row.verb})" if row.verb else f"lease {row.lease_id}"
    if row.operation_id:
        return f"operation {row.operation_id}"
    if row.run_id:
        return f"run {row.run_id}"
    return "the whole fleet" if row.installation_id else "the account"


def _advance(bar: tqdm[Any]) -> None:
    bar.update()
