"""`manage.py acknowledge_cancellation`: take note that the cancelled startups of a run came to their end."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any
from uuid import UUID

from cleanup.management.decision import DecisionCommand, Wrong
from leases import controllers, startup
from leases.errors import ControlRefused
from leases.models import Run


class Command(DecisionCommand):
    help = (
        "Take note that the cancelled startups of a run came to their end, where its control plane does not do so"
        " itself. What the run left active is then stopped and kept."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("run", help="the run's id")
        super().add_arguments(parser)

    def decide(self, options: dict[str, Any], *, actor: str, dry_run: bool) -> dict[str, Any]:
        try:
            run = Run.objects.filter(pk=UUID(options["run"])).first()
        except ValueError:
            raise Wrong(f"{options['run']!r} is no id") from None
        if run is None:
            raise Wrong(f"there is no run {options['run']}")
        if dry_run:
            if startup.is_open(run.pk):
                raise ControlRefused("a startup of the run has not come to its end yet", code="startup_open")
            return {"run": str(run.pk), "told": f"It would be noted for {run}. Nothing was written."}
        controllers.acknowledge_cancellation(run.pk, run.company_id, actor, reason=options["reason"])
        return {"run": str(run.pk), "told": f"Noted for {run}: what it left active is settled now."}
