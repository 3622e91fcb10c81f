"""The one watch over the holds of all controllers: interrupts the runs whose controllers are gone. Asks no provider.

It is due when the first hold of the fleet is to be settled, so a fleet that renews costs one look per length of hold,
however large it is. What it decides is `cleanup.lapsing`; each run is decided anew under its own lock, which a renewal
takes too (`controllers.interrupt_lapsed`). What a run leaves behind is owed by the write that ends it (trigger).
"""

from __future__ import annotations

from collections.abc import Generator
from datetime import timedelta
from typing import Any
from uuid import UUID

from django.db import transaction
from django.db.models import Max
from django.db.models.functions import Now

from cleanup import lapsing
from cleanup.claims import Claim, fenced
from cleanup.work import Call, Context, Done, Held, NeedsOperator, Outcome, Waiting
from leases import audit, bounds, controllers
from leases.clock import database_now
from leases.models import Installation, Obligation, Run

LATE = 10.0
"""Seconds between the time that the watch was due and its claim after which we were away (host, database, beat or
workers): no hint and no claim takes so long. Then the controllers may have been cut off too, and the gap ends now."""

PROMPT = 1.0
"""Seconds after its time by which a look comes when nothing was away. One between this and `LATE` may come right after
an outage whose end only just met it: then nobody had a moment to renew since."""

LOCKED_FOR = 5.0
"""Seconds after which a run is looked at again whose row somebody had locked."""


def watch_controllers(claim: Claim, _: Context) -> Generator[Call, Any, Outcome]:
    """Settle the holds that lapsed, or say when to look again, or ask a person."""
    yield from ()
    late = _late_by(claim)
    if late is None:
        return Done(proven=False)
    if late > LATE:
        controllers.note_gap()
    while True:
        with transaction.atomic():
            row = fenced(claim)
            if row is None:
                return Done(proven=False)
            claim.wakes = row.wakes  # what those wakes told of is in the facts that are read from here on
        facts = lapsing.read(longest=bounds.HOLD_LONGEST)
        match lapsing.decide(facts):
            case lapsing.Settle(runs=runs):
                if late > PROMPT and _put_off():
                    return Held(database_now() + _time_to_renew(runs))
                if not _settle(runs):
                    return Held(database_now() + timedelta(seconds=LOCKED_FOR))
            case lapsing.AskPerson(lapsed=lapsed, of=of):
                _note_asked(lapsed, of)
                return NeedsOperator(Obligation.Quiet.MASS_LAPSE)
            case lapsing.Wait(until=until):
                _forget(facts)
                return Held(until)
            case lapsing.Idle():
                _forget(facts)
                return Waiting()


def _late_by(claim: Claim) -> float | None:
    """Return how many seconds after its time the row was claimed, None where it is not this attempt's any more.

    The time is `owed_since`, which is written with `due_at` (by the triggers, by a wake of what was not overdue, and
    with `Held`) and which no claim and no protection moves.
    """
    row = Obligation.objects.filter(pk=claim.obligation_id, attempt_id=claim.attempt_id).first()
    if row is None or row.claimed_at is None:
        return None
    late = (row.claimed_at - row.owed_since).total_seconds()
    return (
        min(late, LATE) if row.failures else late
    )  # after a look that failed it is our own cooldown that made it late


def _put_off() -> bool:
    """Let one look that came a little late settle nothing. Returns whether this one is it; the next settles."""
    return bool(Installation.objects.filter(lapse_put_off_at__isnull=True).update(lapse_put_off_at=Now()))


def _time_to_renew(runs: tuple[UUID, ...]) -> timedelta:
    """Return how long whoever is alive needs to renew: the share of its length at which a controller does."""
    longest = Run.objects.filter(pk__in=runs).aggregate(longest=Max("controller_seconds"))["longest"] or 0
    return timedelta(seconds=controllers.LINGER * longest)


def _settle(runs: tuple[UUID, ...]) -> bool:
    """Interrupt each of these runs that has lapsed still. Returns whether there was any that nobody had locked."""
    Installation.objects.filter(lapse_put_off_at__isnull=False).update(lapse_put_off_at=None)
    decided = False
    for run_id in runs:
        try:
            controllers.interrupt_lapsed(run_id, linger=controllers.LINGER)
        except controllers.Contended:
            continue
        decided = True
    return decided


def _note_asked(lapsed: int, of: int) -> None:
    """Remember that a person was asked: what comes back makes the rest of them no likelier to be gone."""
    with transaction.atomic():
        if Installation.objects.filter(lapse_asked_at__isnull=True).update(lapse_asked_at=Now()):
            audit.record("installation.mass_lapse", Installation.current(), company_id=None, lapsed=lapsed, of=of)


def _forget(facts: lapsing.Facts) -> None:
    """A person need not be asked any more: those who lapsed renewed, or ended, or somebody decided."""
    Installation.objects.filter(lapse_put_off_at__isnull=False).update(lapse_put_off_at=None)
    if facts.asked and not facts.lapsed:
        Installation.objects.filter(lapse_asked_at__isnull=False).update(lapse_asked_at=None)
