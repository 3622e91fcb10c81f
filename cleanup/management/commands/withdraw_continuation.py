"""`manage.py withdraw_continuation`: a saved message or a retry that waits is not wanted any more."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any
from uuid import UUID

from cleanup.management.decision import DecisionCommand, Wrong
from leases import continuing
from leases.errors import ContinuationRefused, NotFound
from leases.models import Continuation


class Command(DecisionCommand):
    help = "Withdraw a continuation that waits: no run is started for it. `manage.py owed` names those that wait."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("continuation", help="its id")
        super().add_arguments(parser)

    def decide(self, options: dict[str, Any], *, actor: str, dry_run: bool) -> dict[str, Any]:
        try:
            pk = UUID(options["continuation"])
        except ValueError:
            raise Wrong(f"{options['continuation']!r} is not an id") from None
        row = Continuation.objects.filter(pk=pk).first()
        if row is None:
            raise NotFound(f"no continuation {pk}")
        if row.state == Continuation.State.STARTED:
            raise ContinuationRefused(f"it started the run {row.started_run_id} already", code="started")
        about = {"continuation": str(pk), "run": str(row.run_id), "hold": row.hold, "waited_because": row.hold_sentence}
        if dry_run:
            return {**about, "told": "It would be withdrawn.\nNothing was written."}
        continuing.withdraw(pk, row.company_id, actor=actor, reason=options["reason"])
        return {**about, "told": "It is withdrawn."}
