"""Startups that outlived their caller: what a run is still answerable for after an acquire of it was lost or stopped.

The journal row is there before anything is started, so responsibility never hangs on the write of the obligation here:
a pending operation counts by itself. The obligation stands on the run until every sandbox of such a startup is proven
ended and no work accepted during it is without an outcome (domain 7.4). What may end it wakes it, in the database.
"""

from __future__ import annotations

from uuid import UUID

from django.db.models import Exists, OuterRef, Q, QuerySet
from django.db.models.functions import Now

from leases import audit, proof
from leases.models import BridgeActivity, Obligation, Operation, Run


def owe(operation: Operation) -> None:
    """Its caller does not get the sandbox of this locked operation: its run owes the end of the startup."""
    Operation.objects.filter(pk=operation.pk, outlived_at__isnull=True).update(outlived_at=Now())
    if operation.run_uuid is None or not Run.objects.filter(pk=operation.run_uuid).exists():
        return
    _, created = Obligation.objects.get_or_create(
        kind=Obligation.Kind.STARTUP,
        run_id=operation.run_uuid,
        closed_at=None,
        defaults={
            "company_id": operation.company_id,
            "quiet": Obligation.Quiet.WAITING,
        },
    )
    if created:
        audit.record("run.startup_owed", operation, company_id=operation.company_id, run=str(operation.run_uuid))


def is_unsettled(run_id: UUID) -> bool:
    """Return whether a run may not be treated as cleanly ended, because something of a startup of it is still owned.

    What an operator ended without proof still counts: that opens no gate.
    """
    given_up = proof.unproven().filter(Q(run_id=run_id) | Q(operation__run_uuid=run_id))
    return is_open(run_id) or given_up.exists()


def is_open(run_id: UUID) -> bool:
    """Return whether a startup of this run has not come to its end: one is pending, or owed.

    The ends of both wake what waits for them (`operation_over_wakes_orphans`, `startup_end_wakes_orphans`).
    """
    pending = Operation.objects.filter(run_uuid=run_id, state=Operation.State.PENDING)
    owed = Obligation.objects.filter(run_id=run_id, kind=Obligation.Kind.STARTUP, closed_at__isnull=True)
    return pending.exists() or owed.exists()


def is_unacknowledged(run: Run) -> bool:
    """Return whether a startup of this run was cancelled, and its end not taken note of since (S-100).

    Meant for one whose startups are not open any more. Who had the whole run cancelled has nothing left to take note
    of: that is told by its confirmation, which waits for the end of all that this would keep (`leases.cancelling`).
    """
    if run.cancel_requested_at is not None:
        return False
    cancelled = Operation.objects.filter(run_uuid=run.pk, cancelled_at__isnull=False)
    if run.cancel_acknowledged_at is not None:
        cancelled = cancelled.filter(cancelled_at__gt=run.cancel_acknowledged_at)
    return cancelled.exists()


def is_over(run_id: UUID) -> bool:
    """Return whether nothing of this run's startups is pending, running or unproven. Evaluated by the settle.

    What an operator gave up unverified keeps the startup open, until it is paid (`proof.unended`).
    """
    return not open_work(run_id).exists() and not proof.unended(run_id).exists()


def open_work(run_id: UUID) -> QuerySet[BridgeActivity]:
    """Return the work accepted during startups of this run that has no outcome yet."""
    of_run = Operation.objects.filter(pk=OuterRef("operation_id"), run_uuid=run_id)
    return BridgeActivity.objects.filter(Exists(of_run), ended_at__isnull=True)


def end_lost_work(run_id: UUID) -> int:
    """Give an outcome to startup work past its deadline, whose worker is heard of no more. Returns how much there was.

    Its own end, should it still come, finds the row ended and changes nothing.
    """
    lost = open_work(run_id).filter(deadline__lte=Now())
    return lost.update(ended_at=Now(), outcome=BridgeActivity.Outcome.LOST)
