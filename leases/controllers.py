"""Controllers: which control plane holds a run, for how long, and what it may not do any more once it lost it.

A hold is a generation and a time on the run's row. A renewal, a takeover and the end of a lapsed hold are all decided
by that row's lock, so of two that come at once one wins and the other is told. A hold lapses only over time in which it
could have been renewed (`ENDS`): a missing process, a restarted server or a lost connection proves nothing. Who
interrupts the runs whose holds lapsed, and when nobody may, is the business of `cleanup.handlers.watch_controllers`.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db import connection, transaction
from django.db.models.functions import Now

from leases import arguments, audit, bounds, startup, trust, unfencing
from leases.errors import ControlRefused, DecisionRefused, LeaseError, NotFound
from leases.models import Installation, Obligation, Run
from leases.waking import wake

GAP_ENDED = "greatest(i.gap_ended_at, leases_up_since())"
"""SQL: when the last outage of ours ended that could have kept a controller from renewing. `i` is the installation."""

ENDS = f"greatest(r.controller_expires_at, {GAP_ENDED} + r.controller_seconds * interval '1 s')"
"""SQL: when the hold on run `r` really ends: never before one full length has passed since the last gap."""

LINGER = 1 / 3
"""How long after its end a hold is settled, in its own lengths. Controllers renew at a third of it: when a process is
cut off, its holds end spread over a third of a length, and are all seen to have ended before the first is settled."""

LIVE = "('queued', 'scheduled_retry', 'running')"
"""SQL: the statuses of a live run, as the indices and triggers spell them."""


@dataclass(frozen=True, slots=True)
class Controller:
    """That `controller_id` holds a run in this generation. `expires_at` is as it was when it was taken."""

    run_id: UUID
    controller_id: str
    generation: int
    expires_at: datetime


class Lost(enum.Enum):
    """Why a controller may not act for its run any more: the code of the refusal, and the sentence."""

    REPLACED = ("controller_replaced", "another controller took the run, or this one gave it up")
    LAPSED = ("controller_lapsed", "the controller's hold lapsed, and the run was interrupted")
    OVER = ("run_over", "the run is over")

    @property
    def code(self) -> str:
        return self.value[0]

    @property
    def sentence(self) -> str:
        return self.value[1]


def take_control(
    run_id: UUID, company_id: UUID, controller_id: str, seconds: float = 60.0, *, actor: str = "api"
) -> Controller:
    """Hold a live run for `seconds` (10 s to 1 h, whole ones; a fraction counts as one more), to be renewed before.

    The same `controller_id` may take it at any time, another one only once the hold has lapsed or was given up. Each
    taking begins a generation: what an earlier one still asks for is refused, and the shutdown fences on the run's
    leases end, since somebody is there again for whom they run. Raises `NotFound`, and `ControlRefused`
    with the code `run_over` or `controlled` (another controller holds it).
    """
    run_id = arguments.identity(run_id, "run_id")
    company_id = arguments.identity(company_id, "company_id")
    arguments.actor(actor)
    name: object = controller_id
    if not (isinstance(name, str) and 0 < len(name) <= arguments.ACTOR_LIMIT and name.isprintable()):
        raise LeaseError(f"a controller is named by 1 to {arguments.ACTOR_LIMIT} printable characters", code="invalid")
    arguments.seconds(seconds, "seconds", longest=bounds.HOLD_LONGEST)
    if seconds < bounds.HOLD_SHORTEST:
        raise LeaseError(f"seconds is at least {bounds.HOLD_SHORTEST:.0f} s", code="invalid")
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(
            f"""
            SELECT r.status, r.controller_id,
                   coalesce({ENDS} > clock_timestamp() AND r.controller_gave_up_at IS NULL, false)
              FROM leases_run r LEFT JOIN leases_installation i ON true
             WHERE r.id = %s AND r.company_id = %s
               FOR NO KEY UPDATE OF r
            """,  # noqa: S608 - constants
            [run_id, company_id],
        )
        row = cursor.fetchone()
        if row is None:
            raise NotFound(f"no run {run_id} in this company")
        status, holder, stands = row
        if status not in Run.LIVE:
            raise ControlRefused(f"the run is over ({status})", code=Lost.OVER.code)
        if stands and holder != controller_id:
            raise ControlRefused(f"the controller {holder} holds the run", code="controlled")
        # Before the write below, whose trigger asks for the watch: leases come before obligations.
        unfencing.end_all_of(run_id, actor=actor)
        cursor.execute(
            """
            UPDATE leases_run
               SET controller_id = %s, controller_generation = controller_generation + 1, controller_seconds = %s,
                   controller_expires_at = clock_timestamp() + %s * interval '1 s', controller_gave_up_at = NULL
             WHERE id = %s
            RETURNING controller_generation, controller_expires_at
            """,
            [controller_id, math.ceil(seconds), math.ceil(seconds), run_id],
        )
        generation, expires_at = cursor.fetchone()
        audit.record(
            "run.control_taken",
            Run(pk=run_id),
            company_id=company_id,
            actor=actor,
            controller=controller_id,
            generation=generation,
            seconds=math.ceil(seconds),
        )
    return Controller(run_id, controller_id, generation, expires_at)


# One statement, found by the primary key, and no trigger fires (the conditions of `run_hold_needs_watch` are about what
# a plain renewal does not do). A hold that ran out and was not ended yet may still be renewed: whoever has the row's
# lock first decides.
_RENEW = f"""
UPDATE leases_run SET controller_expires_at = clock_timestamp() + controller_seconds * interval '1 s'
 WHERE id = %s AND status IN {LIVE} AND controller_generation = %s AND controller_id = %s
RETURNING controller_expires_at
"""  # noqa: S608 - constants


def renew(controller: Controller) -> datetime:
    """Hold the run for one full length from now, and return until when. Renew at a third of the length.

    Costs one statement. Raises `ControlRefused` with the code `controller_replaced`, `controller_lapsed` or
    `run_over`, and `NotFound` where the run is gone.
    """
    check(controller)
    expires_at = _one(_RENEW, [controller.run_id, controller.generation, controller.controller_id])
    if expires_at is None:
        raise _refusal(controller)
    return expires_at


# The generation rises, so that whoever gave it up may do nothing for it any more. The time stands: until then another
# may take the run, and then it is interrupted.
_GIVE_UP = f"""
UPDATE leases_run
   SET controller_generation = controller_generation + 1, controller_gave_up_at = clock_timestamp()
 WHERE id = %s AND status IN {LIVE} AND controller_generation = %s AND controller_id = %s
RETURNING controller_expires_at
"""  # noqa: S608 - constants


def give_up_control(controller: Controller, *, actor: str = "api") -> datetime:
    """Let any controller take the run from now on, and return until when it may: then the run is interrupted.

    For a controller that goes down and knows that another takes over. Raises what `renew` raises.
    """
    arguments.actor(actor)
    check(controller)
    with transaction.atomic():
        until = _one(_GIVE_UP, [controller.run_id, controller.generation, controller.controller_id])
        if until is None:
            raise _refusal(controller)
        run = Run.objects.get(pk=controller.run_id)
        audit.record(
            "run.control_given_up",
            run,
            company_id=run.company_id,
            actor=actor,
            controller=controller.controller_id,
            generation=controller.generation,
        )
    return until


def lost(run: Run, controller: Controller | None) -> Lost | None:
    """Return why this controller may not act for a run any more; None where it may, or where none is named.

    It decides for good only while the run is locked.
    """
    if controller is None:
        return None
    if run.controller_generation != controller.generation or run.controller_id != controller.controller_id:
        return Lost.REPLACED
    if run.is_live:
        return None
    ended, held_until = run.finished_at, run.controller_expires_at
    if run.status == Run.Status.INTERRUPTED and ended is not None and held_until is not None and held_until <= ended:
        return Lost.LAPSED
    return Lost.OVER


def shared(controller: Controller) -> Run:
    """Lock the run of a controller, shared, until the caller's transaction ends. Raises `NotFound`.

    What is done under it is seen by whoever ends the run or takes it over, and does not exclude other work.
    """
    runs = Run.objects.raw("SELECT * FROM leases_run WHERE id = %s FOR SHARE", [controller.run_id])
    for run in runs:
        return run
    raise NotFound(f"there is no run {controller.run_id}")


def check(controller: object, *, error: type[LeaseError] = LeaseError) -> None:
    """Refuse what no `take_control` returned."""
    if not isinstance(controller, Controller):
        raise error("controller is what take_control returned", code="invalid")


def of_its_run(controller: Controller | None, run_id: UUID | None, *, error: type[LeaseError] = LeaseError) -> None:
    """Refuse a controller that is another run's than `run_id`."""
    if controller is None:
        return
    check(controller, error=error)
    if controller.run_id != run_id:
        raise error("this controller holds another run", code="invalid")


def acknowledge_cancellation(run_id: UUID, company_id: UUID, actor: str = "api", *, reason: str = "") -> datetime:
    """Take note that the cancelled startups of a run came to their end, and return when that was noted.

    Until somebody does, a lease that the run left behind is not touched (S-100): its control plane may not know yet
    what became of what it cancelled. Raises `NotFound`, and `ControlRefused` with the code `startup_open` while
    something of a startup is still owed.
    """
    run_id = arguments.identity(run_id, "run_id")
    company_id = arguments.identity(company_id, "company_id")
    arguments.actor(actor)
    if reason:
        arguments.reason(reason, "an acknowledgement")
    with transaction.atomic():
        run = Run.objects.select_for_update(no_key=True).filter(pk=run_id, company_id=company_id).first()
        if run is None:
            raise NotFound(f"no run {run_id} in this company")
        if startup.is_open(run_id):
            raise ControlRefused("a startup of the run has not come to its end yet", code="startup_open")
        Run.objects.filter(pk=run_id).update(cancel_acknowledged_at=Now())
        audit.record("run.cancellation_acknowledged", run, company_id=company_id, actor=actor, reason=reason)
        run.refresh_from_db(fields=["cancel_acknowledged_at"])
    assert run.cancel_acknowledged_at is not None  # noqa: S101 - narrows for the type checker
    return run.cancel_acknowledged_at


# The end of holds that lapsed


class Contended(Exception):
    """Somebody holds the run's row: whoever it is may be renewing. Nothing was decided; look again soon."""


def interrupt_lapsed(run_id: UUID, *, linger: float, actor: str = audit.SYSTEM, reason: str = "") -> bool:
    """Interrupt a live run whose hold ended `linger` of its length ago, or longer. Returns whether it was.

    Decided under the run's lock, which is not waited for: raises `Contended`. A renewal that is under way holds that
    lock, or waits for it and finds the run over. The trigger `run_end_owes_settles` owes the rest.
    """
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(
            f"""
            SELECT r.company_id, r.controller_id, r.controller_generation, r.controller_expires_at,
                   r.status IN {LIVE}
                   AND coalesce({ENDS} + %s * r.controller_seconds * interval '1 s' <= clock_timestamp(), false)
              FROM leases_run r LEFT JOIN leases_installation i ON true
             WHERE r.id = %s
               FOR NO KEY UPDATE OF r SKIP LOCKED
            """,  # noqa: S608 - constants
            [linger, run_id],
        )
        row = cursor.fetchone()
        if row is None:
            raise Contended
        company_id, controller_id, generation, expires_at, has_lapsed = row
        if not has_lapsed:
            return False
        Run.objects.filter(pk=run_id).update(status=Run.Status.INTERRUPTED, finished_at=Now())
        audit.record(
            "run.interrupted",
            Run(pk=run_id),
            company_id=company_id,
            actor=actor,
            reason=reason,
            controller=controller_id,
            generation=generation,
            expired_at=expires_at.isoformat(),
        )
    return True


@dataclass(frozen=True, slots=True)
class Lapsed:
    """A live run whose hold ended, and when it really did."""

    run_id: UUID
    company_id: UUID
    controller_id: str
    generation: int
    ended_at: datetime


def lapsed() -> list[Lapsed]:
    """Return the live runs whose holds have ended, those that ended first in front. Changes nothing."""
    with connection.cursor() as cursor:
        cursor.execute(
            f"""
            SELECT r.id, r.company_id, r.controller_id, r.controller_generation, {ENDS} AS ends_at
              FROM leases_run r LEFT JOIN leases_installation i ON true
             WHERE r.status IN {LIVE} AND r.controller_expires_at <= clock_timestamp()
               AND {ENDS} <= clock_timestamp()
             ORDER BY ends_at, r.id
            """  # noqa: S608 - constants
        )
        return [Lapsed(*row) for row in cursor.fetchall()]


def settle_lapsed(*, actor: str, reason: str) -> tuple[list[Lapsed], list[Lapsed]]:
    """Interrupt every run whose hold has lapsed, on a person's word. Returns those interrupted, and those left.

    Left are runs that somebody has locked at this moment, or that were renewed meanwhile; ask again. Raises
    `DecisionRefused` while this database is observing: what it does not know of may have renewed.
    """
    arguments.actor(actor)
    arguments.reason(reason, "settling lapsed controllers")
    if trust.is_observing():
        raise DecisionRefused("this database may be a restored or copied one: say which first", code="observing")
    done: list[Lapsed] = []
    left: list[Lapsed] = []
    for one in lapsed():
        try:
            settled = interrupt_lapsed(one.run_id, linger=0.0, actor=actor, reason=reason)
        except Contended:
            settled = False
        (done if settled else left).append(one)
    Installation.objects.update(lapse_answered_at=Now())
    _wake_watch()
    return done, left


def extend_lapsed(*, actor: str, reason: str) -> datetime:
    """Say that an outage of ours ended now: every hold stands one full length from now. Returns that time."""
    arguments.actor(actor)
    arguments.reason(reason, "extending lapsed controllers")
    with transaction.atomic():
        installation = Installation.current()
        ended = note_gap()
        Installation.objects.update(lapse_answered_at=Now())
        audit.record("installation.gap_ended", installation, company_id=None, actor=actor, reason=reason)
        _wake_watch()
    return ended


def note_gap() -> datetime:
    """Write that an outage of ours ended now, and return when that is."""
    ended = _one(
        "UPDATE leases_installation SET gap_ended_at = clock_timestamp() RETURNING gap_ended_at",
        [],
    )
    if ended is None:
        raise LookupError("there is no installation yet")
    return ended


def _wake_watch() -> None:
    watch = Obligation.objects.filter(kind=Obligation.Kind.WATCH_CONTROLLERS, closed_at__isnull=True)
    for pk in watch.values_list("pk", flat=True):
        wake(pk)


def _one(statement: str, values: Sequence[Any]) -> datetime | None:
    with connection.cursor() as cursor:
        cursor.execute(statement, values)
        row = cursor.fetchone()
    return row[0] if row else None


def _refusal(controller: Controller) -> LeaseError:
    """Return why nothing was written. Asked only then, so that a renewal that succeeds is one statement."""
    run = Run.objects.filter(pk=controller.run_id).first()
    if run is None:
        return NotFound(f"there is no run {controller.run_id}")
    why = lost(run, controller) or Lost.REPLACED
    return ControlRefused(why.sentence, code=why.code)
