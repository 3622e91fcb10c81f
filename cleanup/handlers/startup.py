"""A startup that outlived its caller: see whether everything of it has come to its end. Asks no provider.

What may end it wakes the row, unconditionally and in the database, so that two ends at once cannot hide each other;
whoever holds the row evaluates. In between it waits, quiet and without a deadline, and burns nothing.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from django.db import transaction
from django.db.models import Min

from cleanup.claims import Claim, fenced, finish_attempt
from cleanup.work import Call, Context, Done, Draining, Outcome, Waiting
from leases import audit, startup, transitions
from leases.models import Attempt, Obligation, Run


def startup_of(claim: Claim, _: Context) -> Generator[Call, Any, Outcome]:
    """Close the startup of a run when it is over; else wait for the next fact, or for the deadline of lost work."""
    yield from ()
    # On its own: it locks the work before this row, as the end of that work does by its trigger.
    startup.end_lost_work(claim.run)
    with transaction.atomic():
        run = Run.objects.select_for_update(no_key=True).get(pk=claim.run)
        row = fenced(claim)
        if row is None:
            return Done(proven=False)
        claim.wakes = row.wakes  # what those wakes told of is evaluated here, under the lock
        if startup.is_over(run.pk):
            transitions.close(row, Obligation.ClosedAs.PROVEN)
            finish_attempt(claim, Attempt.Outcome.PROVEN)
            audit.record("run.startup_ended", run, company_id=run.company_id)
            return Done(proven=True)
        until = startup.open_work(run.pk).aggregate(first=Min("deadline"))["first"]
    return Draining(until) if until is not None else Waiting()
