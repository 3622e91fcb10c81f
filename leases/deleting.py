"""Deleting an environment: its leases owe their end first, each from its own record, and then outlive it.

Three steps, each of which may be repeated. (1) In one transaction, under the locks of the company, the runs and the
leases: look, refuse or archive, and make what is kept or left behind owe its teardown. No provider is asked. (2) Let
go of the leases of the past in batches. (3) Under the company's lock again: delete the row.

The company's lock, taken exclusively, decides the races: whoever starts or attaches a sandbox holds it shared
(`companies.hold`). A resume that was first is seen as a start under way or as the lease of a live run, and the deletion
refuses; one that comes later finds the environment archived and its lease owing its teardown.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from uuid import UUID

from django.db import transaction
from django.db.models import QuerySet

from leases import arguments, audit, holds, transitions
from leases.blockers import Blockers, Gathered, Refused, require_trust
from leases.connections import despite_deadlocks
from leases.demands import Demand, Verb
from leases.errors import NotFound
from leases.models import Company, Environment, Lease, Obligation, Operation, Run
from leases.releasing import cancel_starts

REASON = "environment_deleted"

_UNLINKED = 500
"""Leases that are let go of in one transaction."""

_DELETE = Demand(Verb.DELETE)
_STOPPING: dict[str, str] = {
    Verb.STOP_OR_DELETE: "it is being stopped to be used again; with consent its sandbox is destroyed",
    Verb.STOP_ONLY: "it is being stopped and kept; with consent it goes on by its own record, without the environment",
}
_UNSETTLED = (Lease.State.ACTIVE, *Lease.KEPT, Lease.State.PENDING_CLEANUP)


@dataclass(frozen=True, slots=True)
class Deleted:
    """What deleting an environment did: the leases that owe their teardown because of it, and starts cancelled."""

    environment_id: UUID
    name: str
    owing: tuple[UUID, ...]
    cancelled: int


@dataclass(frozen=True, slots=True)
class _Plan:
    blockers: Blockers
    kept: tuple[Lease, ...]
    left_behind: tuple[Lease, ...]
    stopping: tuple[Lease, ...]


def what_stands_in_the_way(environment_id: UUID, *, company_id: UUID) -> Blockers:
    """Return what keeps an environment from being deleted. What `yields` gives way to consent. Raises `NotFound`."""
    environment = Environment.objects.filter(pk=environment_id, company_id=company_id).first()
    if environment is None:
        raise _missing(environment_id)
    return _look(environment)


def _look(environment: Environment) -> Blockers:
    leases = _unsettled(environment).order_by("pk")
    return _plan(environment, leases, _by_id(Run.objects.filter(pk__in=leases.order_by().values("run_id")))).blockers


def delete_environment(
    environment_id: UUID, *, company_id: UUID, actor: str, reason: str, consent: bool = False
) -> Deleted:
    """Delete an environment whose leases are settled or owe their teardown; with `consent` they are made to owe it.

    Consent is for the destruction of what is kept for its files, of what an ended run left active, and of what pending
    creations of ended runs bring forth. Whatever the consent: a lease of a live run, a start under way, and a kept
    sandbox that something holds stand in the way. Teardowns are only owed here; the engine pays them, and what fails
    stays owed.

    Raises `NotFound`, `LeaseError` (`invalid`, `observing`), and `Refused` with what stands in the way. Refused at
    first, nothing is written. Refused at the end, because the environment was made active again meanwhile, what owes
    its teardown does.
    """
    environment_id = arguments.identity(environment_id, "environment_id")
    company_id = arguments.identity(company_id, "company_id")
    arguments.actor(actor)
    arguments.reason(reason, "deleting an environment")
    require_trust("deleting an environment")
    done = despite_deadlocks(lambda: _owe(environment_id, company_id, actor, reason, consent=consent))
    while despite_deadlocks(lambda: _let_go(environment_id, limit=_UNLINKED)):
        pass
    despite_deadlocks(lambda: _delete(environment_id, company_id, actor, reason, done))
    return done


def _owe(environment_id: UUID, company_id: UUID, actor: str, reason: str, *, consent: bool) -> Deleted:
    with transaction.atomic():
        environment = _locked(environment_id, company_id)
        found = _unsettled(environment)
        run_ids = found.filter(run__isnull=False).order_by().values_list("run_id", flat=True)
        runs = _by_id(Run.objects.select_for_update(no_key=True).filter(pk__in=list(run_ids)).order_by("pk"))
        leases = list(found.select_for_update(no_key=True).order_by("pk"))
        plan = _plan(environment, leases, runs)
        if plan.blockers.unyielding or (plan.blockers and not consent):
            raise Refused("the environment cannot be deleted", plan.blockers)
        environment.status = Environment.Status.ARCHIVED
        environment.save(update_fields=["status"])
        for lease in plan.kept:
            transitions.dispose(lease, reason=REASON, actor=actor)
        for lease in plan.left_behind:
            transitions.orphan(lease, actor=actor)  # as its settle would: what needs its files from now on is heard
        for lease in plan.stopping:
            transitions.merge_demand(lease, _DELETE, actor=actor, reason=REASON)
        cancelled = cancel_starts(_pending(environment), actor)
        owing = tuple(sorted(lease.pk for lease in (*plan.kept, *plan.left_behind)))
        audit.record(
            "environment.deletion_begun",
            environment,
            company_id=company_id,
            actor=actor,
            reason=reason,
            owing=[str(pk) for pk in owing],
            cancelled=cancelled,
        )
    return Deleted(environment.pk, environment.name, owing, cancelled)


def _let_go(environment_id: UUID, *, limit: int | None) -> int:
    """Unlink leases from the environment, by id, and return how many. They have their own record of it."""
    with transaction.atomic():
        linked = Lease.objects.filter(environment_id=environment_id).exclude(state=Lease.State.ACTIVE).order_by("pk")
        ids = list(linked.select_for_update(no_key=True).values_list("pk", flat=True)[:limit])
        return Lease.objects.filter(pk__in=ids).update(environment=None)


def _delete(environment_id: UUID, company_id: UUID, actor: str, reason: str, done: Deleted) -> None:
    """Delete the row. Nobody could be admitted since it was archived, unless somebody made it active again.

    What is pending or kept by now does not need it: each has its own record of all that its end takes.
    """
    with transaction.atomic():
        try:
            environment = _locked(environment_id, company_id)
        except NotFound:
            return  # another deletion of it was faster, or the reply of this very commit was lost
        in_use = Lease.objects.filter(environment=environment, state=Lease.State.ACTIVE)
        starting = _pending(environment).filter(cancelled_at__isnull=True)
        if environment.status != Environment.Status.ARCHIVED or in_use.exists() or starting.exists():
            raise Refused("it was used again meanwhile, and stays", _look(environment), code="used_again")
        _let_go(environment_id, limit=None)
        audit.record(
            "environment.deleted",
            environment,
            company_id=company_id,
            actor=actor,
            reason=reason,
            name=environment.name,
            owing=len(done.owing),
        )
        Environment.objects.filter(pk=environment_id).delete()


def _locked(environment_id: UUID, company_id: UUID) -> Environment:
    """Lock the company, exclusively: nobody starts or attaches anything in it. Then the environment."""
    list(Company.objects.select_for_update(no_key=True).filter(pk=company_id))
    environment = (
        Environment.objects.select_for_update(no_key=True).filter(pk=environment_id, company_id=company_id).first()
    )
    if environment is None:
        raise _missing(environment_id)
    return environment


def _plan(environment: Environment, leases: Iterable[Lease], runs: dict[UUID, Run]) -> _Plan:
    """Judge leases that were read, and the pending operations. Decides something only under their locks.

    What a run left in use, and what is being stopped, is held by what will hold it once it is kept: so the answer is
    the same before its settle, before its stop, and after.
    """
    leases = list(leases)
    kept_ones = [lease.pk for lease in leases if lease.state in Lease.KEPT]
    held = {pk: standing.reasons for pk, standing in holds.standing(kept_ones).items()}
    held |= holds.once_kept(lease.pk for lease in leases if lease.state not in Lease.KEPT)
    verbs = _verbs(leases)
    found = Gathered()
    kept, left_behind, stopping = [], [], []
    for lease in leases:
        run = runs.get(lease.run_id) if lease.run_id is not None else None
        is_live = run is not None and run.is_live
        verb = verbs.get(lease.pk, Verb.DELETE)  # none: it settled since, where this only looks
        if lease.state == Lease.State.PENDING_CLEANUP and (is_live or verb == Verb.DELETE):
            continue  # it owes its end already; by its own record, wherever it leads
        if run is not None and is_live and lease.state == Lease.State.ACTIVE:
            found.row("live_run", lease, f"its run {run.pk} is {run.get_status_display()}")
        elif any(reason.name == "run_live" for reason in held[lease.pk]):
            found.row("live_run", lease, f"its run {lease.run_id} is not over, and may have it again")
        elif held[lease.pk]:
            found.row("held", lease, _held(held[lease.pk]))
        elif lease.state == Lease.State.ACTIVE:
            whose = "it is in use by nobody's run" if run is None else f"its run is over ({run.status})"
            told = f"{whose}; with consent its sandbox is stopped, and destroyed as soon as nothing needs it"
            found.row("active", lease, told, yields=True)
            left_behind.append(lease)
        elif lease.state == Lease.State.PENDING_CLEANUP:
            found.row("stopping", lease, _STOPPING[verb], yields=True)
            stopping.append(lease)
        else:
            found.row("kept", lease, "stopped and kept; with consent its sandbox is destroyed", yields=True)
            kept.append(lease)
    for operation in _pending(environment).order_by("pk"):
        if operation.kind == Operation.Kind.START:
            found.row("being_started", operation, f"the {operation} is under way; wait for its end")
        elif operation.run_uuid and Run.objects.filter(pk=operation.run_uuid, status__in=Run.LIVE).exists():
            found.row("live_run", operation, f"the {operation} is for run {operation.run_uuid}, which is live")
        else:
            told = f"what became of the {operation} is not known yet; with consent what exists is destroyed"
            found.row("pending_creation", operation, told, yields=True)
    return _Plan(found.all(), tuple(kept), tuple(left_behind), tuple(stopping))


def _verbs(leases: Iterable[Lease]) -> dict[UUID | None, str]:
    """Return what the open teardowns of leases are to do. It changes under their locks alone, as does their end."""
    owed = Obligation.objects.filter(
        kind=Obligation.Kind.TEARDOWN, closed_at__isnull=True, lease__in=[lease.pk for lease in leases]
    )
    return dict(owed.values_list("lease_id", "verb"))


def _unsettled(environment: Environment) -> QuerySet[Lease]:
    return Lease.objects.filter(environment=environment, state__in=_UNSETTLED)


def _pending(environment: Environment) -> QuerySet[Operation]:
    """The creations and starts that may still bring forth a lease of this environment."""
    return Operation.objects.filter(
        company_id=environment.company_id, environment_uuid=environment.pk, state=Operation.State.PENDING
    )


def _by_id(runs: Iterable[Run]) -> dict[UUID, Run]:
    return {run.pk: run for run in runs}


def _held(reasons: Iterable[holds.Reason]) -> str:
    told = (
        reason.sentence
        if reason.until == holds.FOREVER
        else f"{reason.sentence} (until {reason.until:%Y-%m-%d %H:%M} UTC)"
        for reason in reasons
    )
    return "something needs it: " + "; ".join(told)


def _missing(environment_id: UUID) -> NotFound:
    return NotFound(f"no environment {environment_id} in this company")
