"""Cancellation of a run: asked for, and confirmed when its execution is proven ended, by itself and not before.

Between the two the run owes a `confirm_cancel` (rule of the database: exactly so long). Who looks is
`cleanup.handlers.confirm_cancel`; what it asks is `leases.ending`, which admission asks too. A caller that polls, a
timeout or a terminal status never confirms.
"""

from __future__ import annotations

from typing import Literal
from uuid import UUID

from django.db import transaction
from django.db.models import QuerySet
from django.db.models.functions import Now

from leases import arguments, audit, releasing
from leases.connections import despite_deadlocks
from leases.errors import NotFound
from leases.models import Obligation, Run
from leases.signals import cancellation_confirmed

Cancellation = Literal["none", "requested", "acknowledged"]


def cancellation(run: Run) -> Cancellation:
    """Return how far the cancellation of a run is, by its row: `acknowledged` once its execution was proven ended."""
    if run.cancel_requested_at is None:
        return "none"
    return "acknowledged" if run.cancel_confirmed_at is not None else "requested"


def request_cancellation(run_id: UUID, company_id: UUID, *, actor: str, reason: str = "") -> Run:
    """End a run and all that it has, and owe the confirmation; returns the run, whose cancellation is `requested`.

    One that is live becomes `cancelled`; one that is over keeps its status. Its leases and starts are stopped as `stop`
    does it, and nothing new is started for it whatever its status says later. Asking again changes nothing. Raises
    `NotFound`; `Fenced` while a shutdown fence keeps others off one of its leases, then nothing is written; and
    `LeaseError` with the code `invalid` for what is no actor or reason.
    """
    run_id = arguments.identity(run_id, "run_id")
    company_id = arguments.identity(company_id, "company_id")
    arguments.actor(actor)
    if reason:
        arguments.reason(reason, "a cancellation")
    return despite_deadlocks(lambda: _request(run_id, company_id, actor, reason))


def _request(run_id: UUID, company_id: UUID, actor: str, reason: str) -> Run:
    """In the order of locks: the run, its leases and starts, then what they owe; the run's row is written last.

    Its lock is held from the beginning, so an acquire that would attach to it either did, and its lease is stopped
    here, or finds the run over. That its status is written behind the leases leaves none of them active by then, so
    nothing is owed a settle as nobody's.
    """
    with transaction.atomic():
        run = Run.objects.select_for_update(no_key=True).filter(pk=run_id, company_id=company_id).first()
        if run is None:
            raise NotFound(f"no run {run_id} in this company")
        first = run.cancel_requested_at is None
        if not first and not run.is_live:
            return run
        reached = releasing.stop(company_id=company_id, run_id=run_id, actor=actor)
        before = run.status
        if run.is_live:
            Run.objects.filter(pk=run_id).update(status=Run.Status.CANCELLED, finished_at=Now())
        if first:
            Run.objects.filter(pk=run_id).update(cancel_requested_at=Now())
            Obligation.objects.create(company_id=company_id, kind=Obligation.Kind.CONFIRM_CANCEL, run=run, due_at=Now())
        audit.record(
            "run.cancellation_requested",
            run,
            company_id=company_id,
            actor=actor,
            reason=reason,
            status_before=before,
            reached=reached,
        )
        run.refresh_from_db()
    return run


def confirm(run: Run) -> None:
    """Write that the execution of a cancelled run is proven ended, and tell whoever listens after the commit.

    The run is locked, its `confirm_cancel` is closed in the same transaction, and `ending.execution_ended` said so
    under the locks of `ending.locked_for`. The write wakes `woken_by` (trigger).
    """
    Run.objects.filter(pk=run.pk).update(cancel_confirmed_at=Now())
    audit.record("run.cancellation_confirmed", run, company_id=run.company_id)
    run_id, company_id = run.pk, run.company_id
    transaction.on_commit(lambda: cancellation_confirmed.send_robust(Run, run_id=run_id, company_id=company_id))


def woken_by(run: Run) -> QuerySet[Obligation]:
    """Return what the confirmation of a run's cancellation wakes: the continuations of its issue."""
    rows = Obligation.objects.filter(kind=Obligation.Kind.START_CONTINUATION)
    return rows.filter(continuation__issue_id=run.issue_id) if run.issue_id is not None else rows.none()
