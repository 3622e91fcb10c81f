"""An active lease that nobody holds: its run is over, or it has none and no end of its own. Asks no provider.

It becomes stop-only and is marked as nobody's, in one transaction; the ordinary engine then stops and keeps it, and its
disposal destroys it when nothing needs it (domain 8.1). That its run is over is a row, and is never inferred: a process
that is missing, a server that was restarted or a connection that was lost proves nothing. Row locks are taken without
waiting, and everything is re-checked under them. Whatever ends what it waits for wakes it (triggers).
"""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from typing import Any
from uuid import UUID

from cleanup.claims import Claim, fenced, finish_attempt
from cleanup.locking import locked_in_order, without_waiting
from cleanup.work import Call, Contended, Context, Done, Held, NeedsOperator, Outcome, Waiting
from leases import deadlines, fencing, holds, startup, transitions
from leases.clock import database_now
from leases.models import Attempt, Lease, Obligation, Run

ClosedAs = Obligation.ClosedAs


def settle_orphan(claim: Claim, _: Context) -> Generator[Call, Any, Outcome]:
    """Stop and keep what one lease holds that nobody does, or say what that waits for."""
    yield from ()
    return without_waiting(lambda: _settle(claim))


def _settle(claim: Claim) -> Outcome:
    lease = locked_in_order(claim.lease)
    deadlines.locked(lease)  # all that is closed below, in their order, before the one that is ours
    row = fenced(claim)
    if row is None:
        return Done(proven=False)
    claim.wakes = row.wakes  # what those wakes told of is evaluated here, under the locks
    run = Run.objects.get(pk=lease.run_id) if lease.run_id is not None else None
    if not _is_orphan(lease, run):
        transitions.close(row, ClosedAs.NOTHING_OWED)
        finish_attempt(claim, Attempt.Outcome.NOTHING_OWED)
        return Done(proven=True)
    if run is not None and startup.is_open(run.pk):
        return Waiting()
    if run is not None and startup.is_unacknowledged(run):
        return NeedsOperator(Obligation.Quiet.UNACKNOWLEDGED, partial(_is_still_unacknowledged, run.pk))
    if fence := fencing.of(lease):
        if fence.until is not None and fence.until > database_now():
            return Held(fence.until)
        return Contended()  # its own obligation ends it, which is due by now, and marks the run: that comes first
    if any(reason.name == holds.OTHER_LEASE for reason in holds.of(lease).reasons):
        # The end of the other wakes this; where that one will not end by itself either, a person is asked.
        return NeedsOperator(Obligation.Quiet.IDENTITY_CONFLICT) if holds.is_contested(lease) else Waiting()
    transitions.close(row, ClosedAs.HANDED_OVER)
    finish_attempt(claim, Attempt.Outcome.HANDED_OVER)
    transitions.orphan(lease)
    return Done(proven=True)


def _is_orphan(lease: Lease, run: Run | None) -> bool:
    """Return whether a lease is in use and nobody uses it. A run that is live again holds what is its own."""
    if lease.state != Lease.State.ACTIVE:
        return False
    return not run.is_live if run is not None else lease.ends_at is None


def _is_still_unacknowledged(run_id: UUID) -> bool:
    run = Run.objects.select_for_update(no_key=True).get(pk=run_id)
    return not startup.is_open(run_id) and startup.is_unacknowledged(run)
