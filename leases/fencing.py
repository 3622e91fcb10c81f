"""The shutdown fence: a controller that goes down politely keeps others off its leases, to save their files.

A fence is an `always` hold on each lease and an obligation due at its end, written in one transaction under the locks
of the run and the leases. Until it ends nobody but its owner stops, releases or destroys the sandbox, whichever row of
ours names it (S-233, S-238); a release that others ask for meanwhile is refused with the code `fenced`, and asked again
by whoever wants it. The owner may stop and keep the sandbox under its fence, and ends it by any other release (S-236,
S-239). So may whoever holds the run by now; and a controller that takes the run ends its fences
(`controllers.take_control`), since somebody is there again for whom the sandbox runs. A fence that is not ended in time
leaves the sandbox stopped and kept, and its run marked as not restored (`transitions.fence_expired`,
`cleanup.handlers.end_fence`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from django.db import transaction
from django.db.models import Min, QuerySet
from django.db.models.functions import Now

from leases import arguments, audit, controllers, transitions, unfencing
from leases.clock import database_now
from leases.connections import despite_deadlocks
from leases.controllers import Controller, Lost
from leases.errors import ControlRefused, LeaseError, NotFound
from leases.models import Hold, Issue, Lease, Obligation, Run

LONGEST = 3600.0
"""Seconds: the longest time for which others are kept off."""

JOIN = 30.0
"""Seconds for which a controller that goes down waits for its own adapter before it gives the files up (S-240)."""

Kind = Obligation.Kind


class Fenced(LeaseError):
    """The controller of this lease went down and may still save its files. Others leave it alone until then."""

    code = "fenced"


@dataclass(frozen=True, slots=True)
class Fence:
    """Which leases were fenced by a call, and when the first of the run's fences ends, by the database's clock."""

    until: datetime | None
    """None where no fence stands: nothing was in use."""
    leases: tuple[UUID, ...]


def fence(controller: Controller, *, seconds: float, actor: str = "api") -> Fence:
    """Keep others off the active leases of a controller's run for `seconds` (at most an hour), and return which.

    What ended meanwhile is not fenced, whatever the caller remembers (S-235). Fencing again changes nothing about what
    is fenced, neither its time: `until` is what stands, also where that is sooner than was asked for now. Raises
    `NotFound`, `LeaseError` (`invalid`), and `ControlRefused` where the controller lost the run; one whose run is over
    may fence what it leaves.
    """
    arguments.actor(actor)
    arguments.seconds(seconds, "seconds", longest=LONGEST)
    with transaction.atomic():
        run = _locked_run(controller)
        lost = controllers.lost(run, controller)
        if lost in (Lost.REPLACED, Lost.LAPSED):
            raise ControlRefused(lost.sentence, code=lost.code)
        until = database_now() + timedelta(seconds=seconds)
        active = Lease.objects.select_for_update(no_key=True).filter(run=run, state=Lease.State.ACTIVE)
        fenced = []
        for lease in active.order_by("pk"):
            if of(lease) is not None:
                continue
            _place(lease, controller.controller_id, until, actor)
            fenced.append(lease.pk)
        stands = _standing(run, controller).aggregate(first=Min("until"))["first"]
    return Fence(stands, tuple(fenced))


def end(controller: Controller, *, actor: str = "api") -> int:
    """End the fences of a controller, or of the run that it holds by now: the files are saved. Returns how many.

    Raises `NotFound`.

    The leases stay as they are: released by their owner, or by whoever finds that nobody holds them.
    """
    arguments.actor(actor)
    with transaction.atomic():
        run = _locked_run(controller)
        return sum(unfencing.end(lease, fence, actor=actor) for lease, fence in _fenced_leases(run, controller))


def go_down(controller: Controller, *, seconds: float, join: Callable[[float], bool], actor: str = "api") -> bool:
    """Fence, wait for what still runs, and return whether it ended; the fence then stands until the files are saved.

    `join` waits for the adapter for at most so many seconds (`JOIN`) and returns whether it ended. Where it did not,
    nothing is waited for any more: the sandboxes are stopped and kept, which is recorded before anything is cleaned up
    (S-240). Raises what `fence` raises.
    """
    fence(controller, seconds=seconds, actor=actor)
    if join(JOIN):
        return True
    despite_deadlocks(lambda: _give_up(controller, actor))
    return False


def _give_up(controller: Controller, actor: str) -> None:
    with transaction.atomic():
        run = _locked_run(controller, with_issue=True)
        for lease, standing in _fenced_leases(run, controller):
            expire(lease, standing, actor=actor)


def of(lease: Lease) -> Hold | None:
    """Return the fence that keeps others off a lease's sandbox, whichever row of ours it was placed on (S-238).

    It stands until it is ended, also past its time: only the obligation behind it, or its owner, ends it.
    """
    return (
        Hold.objects.filter(
            kind=Hold.Kind.SHUTDOWN_FENCE,
            ended_at__isnull=True,
            lease__resource_id=lease.resource_id,
            lease__provider=lease.provider,
            lease__account_identity=lease.account_identity,
        )
        .order_by("created_at", "pk")
        .first()
    )


def owns(lease: Lease, controller: Controller | None) -> bool:
    """Return whether this controller fenced a lease, and so may go on with it although it lost the run since."""
    return controller is not None and fences_of(controller).filter(lease=lease).exists()


def fences_of(controller: Controller) -> QuerySet[Hold]:
    """Return the standing fences that a controller placed, on the leases of its run."""
    return _fences_on(controller.run_id).filter(holder=controller.controller_id)


def _fences_on(run_id: UUID) -> QuerySet[Hold]:
    return Hold.objects.filter(kind=Hold.Kind.SHUTDOWN_FENCE, ended_at__isnull=True, lease__run_id=run_id)


def _standing(run: Run, controller: Controller) -> QuerySet[Hold]:
    """Return the standing fences that a controller owns on the leases of a locked run.

    Those that it placed, also where it lost the run since; and all of them where it holds the run by now.
    """
    return _fences_on(run.pk) if controllers.lost(run, controller) is None else fences_of(controller)


def let_pass(lease: Lease, controller: Controller | None, *, run: Run | None, keeps: bool, actor: str) -> bool:
    """Let the owner of a fence have its way with a locked lease, and refuse everybody else.

    `run` is the controller's, locked or shared. `keeps` says that the sandbox is stopped and kept: then the fence
    stands on, since the files may still be saved. Anything else is the ordinary end, and ends it. Returns whether the
    caller owns a fence. Raises `Fenced`.
    """
    fence = of(lease)
    if fence is None:
        return False
    own = _standing(run, controller).filter(lease=lease).first() if controller is not None and run is not None else None
    if own is None:
        if lease.state in (Lease.State.ACTIVE, Lease.State.PENDING_CLEANUP):
            raise Fenced(
                f"{fence.holder} went down and may still save its files, until {fence.until:%Y-%m-%d %H:%M:%S} UTC"
            )
        return False
    if not keeps:
        unfencing.end(lease, own, actor=actor)
    return True


def expire(lease: Lease, fence: Hold, *, actor: str = audit.SYSTEM) -> None:
    """End the fence of a locked lease whose files were not saved, in the order issue, run, lease, which the caller has.

    The sandbox is stopped and kept, as after a failure, and so is every other row's hold on it; the run is marked. One
    that is stopped already stays so (S-237).
    """
    unfencing.end(lease, fence, actor=actor)
    kept = transitions.fence_expired(lease, actor=actor)
    if not kept:
        return  # its sandbox is gone: there was nothing left to save
    for other in others_of_its_sandbox(lease).select_for_update(no_key=True).order_by("pk"):
        transitions.fence_expired(other, actor=actor)
    if lease.run_id is not None and Run.objects.filter(pk=lease.run_id, restore_failed_at__isnull=True).update(
        restore_failed_at=Now()
    ):
        run = Run.objects.get(pk=lease.run_id)
        audit.record("run.restore_failed", run, company_id=run.company_id, actor=actor, lease=str(lease.pk))


def others_of_its_sandbox(lease: Lease) -> QuerySet[Lease]:
    """Return the other rows that keep the same sandbox, as the provider knows it."""
    return Lease.objects.filter(
        resource_id=lease.resource_id,
        provider=lease.provider,
        account_identity=lease.account_identity,
        state__in=Lease.KEPT,
    ).exclude(pk=lease.pk)


def _place(lease: Lease, holder: str, until: datetime, actor: str) -> None:
    Hold.objects.create(
        company_id=lease.company_id,
        lease=lease,
        kind=Hold.Kind.SHUTDOWN_FENCE,
        strength=Hold.Strength.ALWAYS,
        holder=holder,
        until=until,
    )
    Obligation.objects.create(
        company_id=lease.company_id, kind=Kind.END_FENCE, lease=lease, due_at=until, owed_since=until
    )
    audit.record(
        "lease.fenced", lease, company_id=lease.company_id, actor=actor, holder=holder, until=until.isoformat()
    )


def _fenced_leases(run: Run, controller: Controller) -> list[tuple[Lease, Hold]]:
    """Lock the leases of a locked run whose fences this controller owns, by id, and return each with its fence."""
    owned = _standing(run, controller)
    fenced = list(owned.values_list("lease_id", flat=True))
    leases = list(Lease.objects.select_for_update(no_key=True).filter(pk__in=fenced).order_by("pk"))
    fences = {fence.lease_id: fence for fence in owned.all()}  # under the locks, which their ends take too
    return [(lease, fences[lease.pk]) for lease in leases if lease.pk in fences]


def _locked_run(controller: Controller, *, with_issue: bool = False) -> Run:
    """Lock the run of a controller, and its issue before it where the run is written."""
    if with_issue:
        issue = Run.objects.filter(pk=controller.run_id).values("issue_id")
        list(Issue.objects.select_for_update(no_key=True).filter(pk__in=issue))
    run = Run.objects.select_for_update(no_key=True).filter(pk=controller.run_id).first()
    if run is None:
        raise NotFound(f"there is no run {controller.run_id}")
    return run
