"""The end of shutdown fences: their holds, and the obligations that would have ended them. One function writes it.

Whose fence may be ended by whom is the business of `leases.fencing`; that a controller which takes a run over ends all
of that run's, of `leases.controllers`.
"""

from __future__ import annotations

from uuid import UUID

from django.db.models.functions import Now

from leases import audit, transitions
from leases.models import Attempt, Hold, Lease, Obligation


def end(lease: Lease, fence: Hold, *, actor: str) -> bool:
    """End a fence on a locked lease, and what is owed for it. An attempt that holds that has lost its row.

    Returns whether it still stood.
    """
    owed = Obligation.objects.select_for_update(no_key=True).filter(
        lease=lease, kind=Obligation.Kind.END_FENCE, closed_at__isnull=True
    )
    for row in owed:
        if row.attempt_id is not None:
            Attempt.objects.filter(pk=row.attempt_id, finished_at__isnull=True).update(
                finished_at=Now(), outcome=Attempt.Outcome.NOTHING_OWED
            )
        transitions.close(row, Obligation.ClosedAs.NOTHING_OWED)
    ended = Hold.objects.filter(pk=fence.pk, ended_at__isnull=True).update(ended_at=Now(), ended_by=actor)
    if ended:
        audit.record("lease.fence_ended", lease, company_id=lease.company_id, actor=actor, holder=fence.holder)
    return bool(ended)


def end_all_of(run_id: UUID, *, actor: str) -> int:
    """End every fence on the leases of a locked run, and return how many. Locks the leases, by id, and waits for them.

    Nobody fences one of them meanwhile: that takes the run's lock.
    """
    standing = Hold.objects.filter(kind=Hold.Kind.SHUTDOWN_FENCE, ended_at__isnull=True, lease__run_id=run_id)
    fenced = list(standing.values_list("lease_id", flat=True))
    ended = 0
    for lease in list(Lease.objects.select_for_update(no_key=True).filter(pk__in=fenced).order_by("pk")):
        for fence in standing.filter(lease=lease):  # read again under the lock, which every other end of it takes too
            ended += end(lease, fence, actor=actor)
    return ended
