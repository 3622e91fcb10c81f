"""The Celery tasks: thin, idempotent, late-acknowledged. A message only says where to look; the rows say what is owed.

Losing, repeating or reordering any of them changes nothing but speed. Countdowns are seconds, bounded in number, and
have a `due_at` behind them, so deleting every message delays nothing beyond that.
"""

from __future__ import annotations

import threading
from typing import Any
from uuid import UUID

from celery import Task, shared_task
from celery.signals import worker_shutting_down
from django.db.models.functions import Now

from cleanup import engine
from cleanup.claims import Claim, Selection
from leases.models import Obligation
from leases.signals import lease_draining
from leases.waking import wake

SWEEP_SECONDS = 60.0
"""How long one sweep claims before it hands on."""

DRAIN_EVERY = 2
SETTLE_AFTER = 5
SETTLE_FROM = 2
"""Busy looks before the one that begins a chain: the next would be due in 8 s (2, 4, 8, ...)."""
SETTLE_TIMES = 5

_stopping = threading.Event()


@worker_shutting_down.connect
def _stop_claiming(**_: Any) -> None:
    """On TERM: sweeps in this process (the worker's pool is threads) hand back what they have not sent, and end."""
    _stopping.set()


@shared_task(ignore_result=True)
def sweep(account_id: str) -> None:
    """Work on what one account owes now."""
    account = UUID(account_id)
    tally = engine.Engine(stopping=_stopping.is_set, on_busy=_look_again_soon).sweep(account, seconds=SWEEP_SECONDS)
    if tally.out_of_time or tally.hands_on or _stopping.is_set():
        engine.hand_on(account)


@shared_task(bind=True, ignore_result=True, max_retries=SETTLE_TIMES)
def settle(self: Task[..., None], obligation_id: int) -> None:
    """Look again at a sandbox in transition, earlier than its row is due, a few times."""
    row = Obligation.objects.filter(
        pk=obligation_id, closed_at__isnull=True, attempt_id__isnull=True, busy_count__gt=0, quiet=""
    ).first()
    if row is None:
        return
    wake(row.pk)
    selection = Selection(obligation_id=row.pk)
    tally = engine.Engine(stopping=_stopping.is_set).sweep(row.account_id, seconds=SWEEP_SECONDS, selection=selection)
    if tally.outcomes.get("busy") and self.request.retries < SETTLE_TIMES:
        raise self.retry(countdown=SETTLE_AFTER * (self.request.retries + 1))


@shared_task(bind=True, ignore_result=True, max_retries=None)
def drain(self: Task[..., None], obligation_id: int, looks: int) -> None:
    """See every few seconds whether the work that a teardown waits for is over before its bound; at most `looks` times.

    The end of work wakes the row by itself (trigger). This finds what no write tells: work past its own deadline.
    """
    row = Obligation.objects.filter(
        pk=obligation_id, closed_at__isnull=True, attempt_id__isnull=True, drain_until__gt=Now()
    ).first()
    if row is None or row.lease is None:
        return
    if not row.lease.activities.filter(ended_at__isnull=True, deadline__gt=Now()).exists():
        wake(row.pk)
    elif self.request.retries < looks:
        raise self.retry(countdown=DRAIN_EVERY)


def _look_again_soon(claim: Claim, due_in: float) -> None:
    """Begin one chain of early looks, when a transition first lasts longer than they take."""
    if due_in > SETTLE_AFTER and claim.busy_count == SETTLE_FROM:
        settle.apply_async((claim.obligation_id,), countdown=SETTLE_AFTER)


def _look_whether_drained(obligation_id: int, drain_seconds: int, **_: Any) -> None:
    drain.apply_async((obligation_id, drain_seconds // DRAIN_EVERY), countdown=DRAIN_EVERY)


lease_draining.connect(_look_whether_drained, dispatch_uid="cleanup.tasks.drain")
