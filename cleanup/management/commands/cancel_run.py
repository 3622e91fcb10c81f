"""`manage.py cancel_run`: end a run and all that it has, and have that confirmed when it is proven."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from cleanup.management.decision import DecisionCommand, run_named
from leases import cancelling, ending
from leases.models import Lease, Run


class Command(DecisionCommand):
    help = (
        "Cancel a run: it is over, its sandboxes are stopped at once, and nothing new is started for it. It is"
        " acknowledged by itself when its execution is proven ended; asked again, this says what that still waits for."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("run", help="the run's id")
        super().add_arguments(parser)

    def decide(self, options: dict[str, Any], *, actor: str, dry_run: bool) -> dict[str, Any]:
        run = run_named(options["run"])
        asked = cancelling.cancellation(run) != "none"
        if not dry_run:
            run = cancelling.request_cancellation(run.pk, run.company_id, actor=actor, reason=options["reason"].strip())
        ended = ending.execution_ended(run.pk)
        facts = {
            "run": str(run.pk),
            "status": run.status,
            "cancellation": cancelling.cancellation(run),
            "missing": [{"what": one.what.value, "subject": one.subject} for one in ended.missing],
        }
        return facts | {"told": _told(run, ended, asked=asked, dry_run=dry_run)}


def _told(run: Run, ended: ending.Ending, *, asked: bool, dry_run: bool) -> str:
    if cancelling.cancellation(run) == "acknowledged":
        return f"The cancellation of {run} is acknowledged: its execution is proven ended."
    if dry_run and not asked:
        active = Lease.objects.filter(run=run, state=Lease.State.ACTIVE).count()
        return f"{run} would be cancelled; {active} of its leases are in use. Nothing was written."
    since = f" since {run.cancel_requested_at:%Y-%m-%d %H:%M:%S} UTC" if run.cancel_requested_at else ""
    waits = "" if ended.ended else f" Until it is acknowledged: {ended.sentence}."
    return f"The cancellation of {run} is requested{since}.{waits}"
