"""The end of a recovery of files whose time is over. Asks no provider, so that a dead account cannot keep it running.

Whoever waits for the files goes on without them then. An attempt that is at work, or whose start nobody answered for
yet, is left its bound first. What is already saved waits for the receipt of its stop, and is not given up.
"""

from __future__ import annotations

from collections.abc import Generator
from datetime import timedelta
from typing import Any

from cleanup.claims import Claim, fenced, finish_attempt
from cleanup.locking import without_waiting
from cleanup.work import Call, Context, Done, Held, Outcome, Waiting
from leases import bounds, recovering, reuse
from leases.clock import database_now
from leases.models import Attempt, Lease, Obligation, Operation

_AT_WORK = timedelta(seconds=30)


def end_recovery(claim: Claim, _: Context) -> Generator[Call, Any, Outcome]:
    """End a generation when no attempt of it may begin any more, and none is under way."""
    yield from ()
    return without_waiting(lambda: _settle(claim))


def _settle(claim: Claim) -> Outcome:
    lease = Lease.objects.select_for_update(no_key=True, nowait=True, of=("self",)).get(pk=claim.lease)
    # A start is locked before any obligation.
    starts = Operation.objects.select_for_update(no_key=True, nowait=True, of=("self",))
    pending = list(starts.filter(source=lease, recovery__state="running", state=Operation.State.PENDING))
    row = fenced(claim)
    recovery = recovering.running(lease)
    if row is None or recovery is None:
        return Done(proven=False)
    claim.wakes = row.wakes  # what those wakes told of is evaluated here, under the locks
    now = database_now()
    if now < recovery.ends_at:
        return Held(recovery.ends_at)
    if recovery.archives.filter(saved_at__isnull=False).exists():
        return Waiting()
    at_work = Obligation.objects.filter(
        lease=lease, kind=Obligation.Kind.RECOVER_WORKSPACE, attempt_id__isnull=False, due_at__gt=now
    )
    if at_work.exists() or recovering.is_saving(lease, recovery):
        return Held(now + _AT_WORK)
    for operation in pending:
        if not reuse.calls_are_over(operation):
            return Held(operation.created_at + timedelta(seconds=bounds.START_OVER))
    # Nobody saw it running, and nobody could see it stopped: the earlier receipt stands, and somebody goes on looking.
    for operation in pending:
        recovering.withdraw(lease, operation, may_run=True, reason="workspace_recovery")
    finish_attempt(claim, Attempt.Outcome.NOTHING_OWED)
    recovering.exhaust(recovery)
    return Done(proven=True)
