"""`manage.py acknowledge_cancellation`: take note that the cancelled startups of a run came to their end."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from cleanup.management.decision import DecisionCommand, run_named
from leases import controllers, startup
from leases.errors import ControlRefused


class Command(DecisionCommand):
    help = (
        "Take note that the cancelled startups of a run came to their end, where its control plane does not do so"
        " itself. What the run left active is then stopped and kept."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("run", help="the run's id")
        super().add_arguments(parser)

    def decide(self, options: dict[str, Any], *, actor: str, dry_run: bool) -> dict[str, Any]:
        run = run_named(options["run"])
        if dry_run:
            if startup.is_open(run.pk):
                raise ControlRefused("a startup of the run has not come to its end yet", code="startup_open")
            return {"run": str(run.pk), "told": f"It would be noted for {run}. Nothing was written."}
        controllers.acknowledge_cancellation(run.pk, run.company_id, actor, reason=options["reason"])
        return {"run": str(run.pk), "told": f"Noted for {run}: what it left active is settled now."}
