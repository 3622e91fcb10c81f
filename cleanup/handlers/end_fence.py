"""The end of a shutdown fence whose controller did not save the files in time. Asks no provider.

In one transaction, in the order issue, run, lease: the fence ends, the sandbox is to be stopped and kept as after a
failure, and the run is marked as not restored (domain T-25, T-26). Row locks are taken without waiting. Whoever ends
the fence before takes the lease's lock too, so of the two one finds it ended.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from cleanup.claims import Claim, fenced, finish_attempt
from cleanup.locking import also_locked, locked_in_order, without_waiting
from cleanup.work import Call, Context, Done, Held, Outcome
from leases import deadlines, fencing, transitions
from leases.clock import database_now
from leases.models import Attempt, Hold, Obligation


def end_fence(claim: Claim, _: Context) -> Generator[Call, Any, Outcome]:
    """Give up on the files' being saved by their owner, once the fence's time is over."""
    yield from ()
    return without_waiting(lambda: _settle(claim))


def _settle(claim: Claim) -> Outcome:
    lease = locked_in_order(claim.lease)
    also_locked(fencing.others_of_its_sandbox(lease))
    deadlines.locked(lease)  # all that is closed below, in their order, before the one that is ours
    row = fenced(claim)
    if row is None:
        return Done(proven=False)
    fence = Hold.objects.filter(lease=lease, kind=Hold.Kind.SHUTDOWN_FENCE, ended_at__isnull=True).first()
    if fence is not None and fence.until is not None and fence.until > database_now():
        return Held(fence.until)  # a person asked for an attempt, which is no reason to end it before its time
    transitions.close(row, Obligation.ClosedAs.HANDED_OVER if fence else Obligation.ClosedAs.NOTHING_OWED)
    finish_attempt(claim, Attempt.Outcome.HANDED_OVER if fence else Attempt.Outcome.NOTHING_OWED)
    if fence is not None:
        fencing.expire(lease, fence)
    return Done(proven=True)
