"""The Celery tasks: thin, idempotent, late-acknowledged. A message only says where to look; the rows say what is owed.

Losing, repeating or reordering any of them changes nothing but speed. Countdowns are seconds, bounded in number, and
have a `due_at` behind them, so deleting every message delays nothing beyond that.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any
from uuid import UUID

from celery import Task, shared_task
from celery.signals import worker_ready, worker_shutting_down
from django.db import connection
from django.db.models.functions import Now

from cleanup import engine, judging
from cleanup import inventory as inventories
from cleanup.claims import LANE, Claim, Selection, lane_of
from cleanup.dispositions import CONTENDED, CONTENDED_DELAY
from leases import audit, trust
from leases.connections import LOST
from leases.models import Attempt, Obligation
from leases.signals import lease_draining
from leases.waking import wake

log = logging.getLogger(__name__)

SWEEP_SECONDS = 60.0
"""How long one sweep claims before it hands on."""

DRAIN_EVERY = 2
SETTLE_AFTER = 5
SETTLE_FROM = 2
"""Busy looks before the one that begins a chain: the next would be due in 8 s (2, 4, 8, ...)."""
SETTLE_TIMES = 5

AGAIN_AFTER = 2
AGAIN_TIMES = 5
"""Looks at a row whose settle met a lock. A transaction that holds one lasts milliseconds."""

INVENTORY_SECONDS = 90.0
"""For how long one run of the inventory begins listings and deletions before it hands on."""

_stopping = threading.Event()


@worker_shutting_down.connect
def _stop_claiming(**_: Any) -> None:
    """On TERM: sweeps in this process (the worker's pool is threads) hand back what they have not sent, and end."""
    _stopping.set()


@worker_ready.connect
def _judge_the_database(**_: Any) -> None:
    """At its start a worker says whether the database is to be trusted. A task finds it out for itself all the same."""
    try:
        judging.is_cleared()
    except LOST as error:
        log.warning("the database does not serve this worker yet: %s", type(error).__name__)
    finally:
        connection.close()


@shared_task(ignore_result=True)
def sweep(account_id: str) -> None:
    """Work on what one account owes now."""
    _sweep(UUID(account_id))


@shared_task(ignore_result=True)
def settle_ownership() -> None:
    """Work on what calls no provider: who holds what, what has ended, what is to be kept and what to be destroyed."""
    _sweep(LANE)


def _sweep(account_id: UUID) -> None:
    worker = engine.Engine(stopping=_stopping.is_set, on_busy=_look_again_soon, on_contended=_look_at_again_soon)
    tally = worker.sweep(account_id, seconds=SWEEP_SECONDS)
    if tally.out_of_time or tally.hands_on or _stopping.is_set():
        engine.hand_on(account_id)


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
    tally = engine.Engine(stopping=_stopping.is_set).sweep(lane_of(row), seconds=SWEEP_SECONDS, selection=selection)
    if tally.outcomes.get("busy") and self.request.retries < SETTLE_TIMES:
        raise self.retry(countdown=SETTLE_AFTER * (self.request.retries + 1))


@shared_task(bind=True, ignore_result=True, max_retries=AGAIN_TIMES)
def look_at_again(self: Task[..., None], obligation_id: int) -> None:
    """Look again at a row whose settle met a lock, earlier than the row is due; at most `AGAIN_TIMES` more.

    Wakes nothing, and so writes and notifies nothing where somebody else came first: it claims this row although it is
    due a little later, and only while its last attempt is that hand-back. So no cooldown is cut short, and a sweep that
    meets the lock anew begins the next chain no earlier than the row's own due time.
    """
    row = Obligation.objects.filter(pk=obligation_id, closed_at__isnull=True, attempt_id__isnull=True, quiet="").first()
    last = row.attempts.order_by("-claimed_at").first() if row is not None else None
    if row is None or last is None or last.outcome != Attempt.Outcome.HANDED_BACK:
        return
    selection = Selection(obligation_id=row.pk, ahead=CONTENDED_DELAY)
    worker = engine.Engine(stopping=_stopping.is_set)
    # Once: given back, it would be within reach again.
    tally = worker.sweep(lane_of(row), seconds=SWEEP_SECONDS, selection=selection, limit=1)
    if tally.outcomes.get(CONTENDED) and self.request.retries < AGAIN_TIMES:
        raise self.retry(countdown=AGAIN_AFTER)


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


@shared_task(ignore_result=True)
def inventory(accounts: list[str] | None = None, delete: int = 0) -> None:
    """List what provider accounts hold, beside our rows; all of them, unless some are named by their ids.

    `delete`: at most so many leaks are given an owner that destroys them (and never more than
    `cleanup.inventory.MOST_DESTROYED`). Nothing starts this by itself: its periodic task is disabled until somebody
    enables it. A run works for `INVENTORY_SECONDS` and hands on the accounts that are left; the leaks that are left
    wait for the next run. Lost or repeated it changes nothing: what counts is in the database.
    """
    delete = min(delete, inventories.MOST_DESTROYED)
    until = time.monotonic() + INVENTORY_SECONDS
    wanted = None if accounts is None else [UUID(account) for account in accounts]
    identities = inventories.identities(wanted)
    reports = []
    while identities and time.monotonic() < until and not _stopping.is_set():
        reports.append(inventories.take(identities.pop(0)))
    destroyed = inventories.Destroyed()
    if delete > 0 and trust.may_lapse():
        inventories.destroy_leaks(
            reports,
            delete,
            actor=audit.SYSTEM,
            reason="leak found by the periodic inventory",
            into=destroyed,
            stopping=lambda: time.monotonic() >= until or _stopping.is_set(),
        )
    inventories.log_of(reports, destroyed)
    if identities:
        rest = [str(identity.accounts[0].pk) for identity in identities]
        inventory.apply_async((rest, max(0, delete - len(destroyed.owned))))


def _look_again_soon(claim: Claim, due_in: float) -> None:
    """Begin one chain of early looks, when a transition first lasts longer than they take."""
    if due_in > SETTLE_AFTER and claim.busy_count == SETTLE_FROM:
        settle.apply_async((claim.obligation_id,), countdown=SETTLE_AFTER)


def _look_at_again_soon(claim: Claim) -> None:
    look_at_again.apply_async((claim.obligation_id,), countdown=AGAIN_AFTER)


def _look_whether_drained(obligation_id: int, drain_seconds: int, **_: Any) -> None:
    drain.apply_async((obligation_id, drain_seconds // DRAIN_EVERY), countdown=DRAIN_EVERY)


lease_draining.connect(_look_whether_drained, dispatch_uid="cleanup.tasks.drain")
