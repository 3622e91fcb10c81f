"""`manage.py owed`: what is owed, per kind. Read-only."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand
from django.core.serializers.json import DjangoJSONEncoder

from cleanup import report
from leases.models import Obligation


class Command(BaseCommand):
    help = (
        "Show what is owed: open, in flight, cooling, due, escalated, quiet and why, waiting; read-only, one snapshot."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true", help="print one JSON object")

    def handle(self, *_: Any, **options: Any) -> None:
        owed = report.owed()
        if options["json"]:
            self.stdout.write(json.dumps(owed.as_json(), cls=DjangoJSONEncoder, indent=2))
            return
        head = ("kind", "open", "in flight", "cooling", "due", "escalated", "quiet", "waiting", "oldest", "next due")
        rows = [head] + [
            (
                k.kind,
                *(str(n) for n in (k.open, k.in_flight, k.cooling, k.due, k.escalated, k.quiet, k.waiting)),
                _ago(k.oldest, owed.at),
                _ahead(k.next_due, owed.at),
            )
            for k in owed.kinds
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        for row in rows:
            self.stdout.write("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
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
        if not any(k.open for k in owed.kinds):
            self.stdout.write("Nothing is owed.")


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
