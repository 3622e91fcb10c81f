"""`manage.py mark_orphans`: kept sandboxes from before the mark existed become nobody's, on an operator's word."""

from __future__ import annotations

from argparse import ArgumentParser
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from django.utils.dateparse import parse_date, parse_datetime

from cleanup.management.decision import DecisionCommand, Wrong
from leases import holds, keeping
from leases.clock import database_now
from leases.errors import LeaseError
from leases.models import Company


class Command(DecisionCommand):
    help = (
        "Mark kept sandboxes of runs that are over as nobody's: each is destroyed as soon as nothing holds it. Only "
        "those released before the given day, and none that waits for its next run. Look with --dry-run first."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--before", required=True, help="a day (2026-11-30, in UTC) or a moment with a time zone")
        parser.add_argument("--company", default="", help="only this company's (its id)")
        super().add_arguments(parser)

    def decide(self, options: dict[str, Any], *, actor: str, dry_run: bool) -> dict[str, Any]:
        before = _moment(options["before"])
        try:
            company_id = UUID(options["company"]) if options["company"] else None
        except ValueError:
            raise Wrong(f"{options['company']!r} is not an id") from None
        if company_id is not None and not Company.objects.filter(pk=company_id).exists():
            raise Wrong(f"there is no company {company_id}")
        found = list(keeping.unmarked(before, company_id=company_id).values_list("pk", "company_id"))
        standings = holds.standing(pk for pk, _ in found)
        marked: list[dict[str, Any]] = []
        changed: list[dict[str, str]] = []
        for pk, owner in found:
            if not dry_run:
                try:
                    keeping.mark_orphaned(pk, company_id=owner, actor=actor, reason=options["reason"])
                except LeaseError as refusal:  # it is used again, or destroyed, since it was looked at
                    changed.append({"lease": str(pk), "why": str(refusal)})
                    continue
            held = standings[pk]
            marked.append({"lease": str(pk), "held_by": [reason.name for reason in held.reasons], "held": held.is_held})
        held_count = sum(1 for one in marked if one["held"])
        verb = "would be marked" if dry_run else "marked"
        told = f"{len(marked)} kept sandboxes {verb} as nobody's; {held_count} of them are held for now."
        for one in marked:
            told += f"\n  {one['lease']}" + (f"  held: {', '.join(one['held_by'])}" if one["held_by"] else "")
        for other in changed:
            told += f"\n  {other['lease']}  left alone: {other['why']}"
        if dry_run:
            told += "\nNothing was written."
        return {"before": before.isoformat(), "leases": marked, "left_alone": changed, "told": told}


def _moment(text: str) -> datetime:
    """Return the moment that a day or a time names; one that is to come would reach what was just released."""
    try:
        moment = parse_datetime(text)
        if moment is None or (moment.tzinfo is None and parse_date(text) is not None):
            day = parse_date(text)
            moment = datetime(day.year, day.month, day.day, tzinfo=UTC) if day else None
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise Wrong(f"{text!r} is neither a day (2026-11-30) nor a moment with a time zone")
    if moment > database_now() + timedelta(seconds=1):
        raise Wrong("--before is a day or a moment that has come")
    return moment
