"""The confirmation of a cancellation: whether the execution of a run is proven ended. Asks no provider.

What may end it wakes the row, unconditionally and in the database (0020, 0024); whoever holds the row evaluates. In
between it waits, quiet and without a deadline, for as long as it takes: no time that passes confirms anything.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from cleanup.claims import Claim, fenced, finish_attempt
from cleanup.locking import own_rows, without_waiting
from cleanup.work import Call, Context, Done, Outcome, Waiting
from leases import cancelling, ending, transitions
from leases.models import Attempt, Obligation


def confirm_cancel(claim: Claim, _: Context) -> Generator[Call, Any, Outcome]:
    """Confirm the cancellation of a run exactly when its execution has ended; else wait for the next fact."""
    yield from ()
    return without_waiting(lambda: _settle(claim))


def _settle(claim: Claim) -> Outcome:
    """Decide under the locks of run and leases: each fact that counts is written under one of them, or wakes this row.

    So none is missed that is being written while this looks. Its writer holds a lease, or by its wake this row, and
    this comes back; or it wakes the row later, which the wait finds by the count.
    """
    run = ending.locked_for(claim.run, nowait=True)
    if run is None:
        return Done(proven=False)
    own_rows(claim, cancelling.woken_by(run))
    row = fenced(claim)
    if row is None:
        return Done(proven=False)
    claim.wakes = row.wakes  # what those wakes told of is evaluated here, under the locks
    if not ending.execution_ended(run.pk).ended:
        return Waiting()
    transitions.close(row, Obligation.ClosedAs.PROVEN)
    finish_attempt(claim, Attempt.Outcome.PROVEN)
    cancelling.confirm(run)
    return Done(proven=True)
