"""Writing the journal: what is committed before a provider is asked, and what is learned right after.

An operation and its recovery are one commit; if it fails, the provider is never called. Whether the caller or the
recovery gives the sandbox its owner is decided by the operation's row lock: both take it and require `pending`.
Locks, in order: company (shared: nobody closes it meanwhile), run, lease (of a start), operation, obligation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from uuid import UUID, uuid4, uuid5

from django.db import IntegrityError, transaction
from django.db.models import F
from django.db.models.functions import Greatest, Now

from leases import audit, companies, controllers, startup, transitions
from leases.controllers import Controller
from leases.errors import AcquireInProgress, AcquireRefused, AcquireRejected, AcquireUncertain
from leases.models import Credential, Environment, Lease, Obligation, Operation, Run
from leases.planning import Request, name_of
from leases.waking import wake

RECOVERY_OF = {
    Operation.Kind.CREATE: Obligation.Kind.RECOVER_CREATION,
    Operation.Kind.START: Obligation.Kind.RECOVER_START,
}


class TakenOver(Exception):
    """The operation is not its caller's any more: it was stopped, or its recovery is at work on it."""


def begin(
    request: Request, decide: Callable[[Run | None], tuple[Operation, float]], ids: tuple[UUID, ...]
) -> Operation:
    """Commit what `decide` returns: the operation, and in how many seconds its recovery is due.

    `ids` are those that `decide` may give it: repeated after a commit whose reply was lost, this finds its own row.
    Raises `AcquireRefused`; what an earlier call with the same request key met is raised by `served_before`.
    """
    with transaction.atomic(durable=True):
        if mine := Operation.objects.filter(pk__in=ids).first():
            return mine
        companies.hold(request.company_id)
        run = live_run(request.run_id, request.company_id)
        if run is not None and (lost := controllers.lost(run, request.controller)):
            raise AcquireRefused(lost.sentence, code=lost.code)
        problem = authority_problem(request.company_id, request.environment_id, request.run_id, run)
        if problem:
            raise AcquireRefused(problem)
        operation, due_in = decide(run)
        _require_credential(operation)
        write(operation, due_in=due_in, run=run, actor=request.actor)
        return operation


def _require_credential(operation: Operation) -> None:
    """Refuse a start whose credential ended since it was planned; under the company's lock, as whoever ends one is.

    So a start is seen by whoever archives or deletes its credential, or sees that it was.
    """
    if operation.credential_uuid is None:
        return
    active = Credential.objects.filter(pk=operation.credential_uuid, status=Credential.Status.ACTIVE)
    if not active.exists():
        raise AcquireRefused("the credential was disabled, archived or deleted meanwhile", code="credential_inactive")


def write(operation: Operation, *, due_in: float, run: Run | None, actor: str) -> None:
    """Insert an operation with its recovery, in the caller's transaction."""
    operation.issue_uuid = run.issue_id if run else None
    operation.save(force_insert=True)
    _owe_recovery(operation, due_in=due_in)
    audit.record(
        "operation.begun",
        operation,
        company_id=operation.company_id,
        actor=actor,
        kind=operation.kind,
        environment=str(operation.environment_uuid),
    )


def served_before(request: Request) -> Lease | None:
    """Return the lease that an earlier call with this request key got; None where there was no such call.

    Raises `AcquireInProgress` while it is being served, `AcquireRefused` where the key named another request, and
    `AcquireRejected` where what came of it is over. Asks no provider and changes nothing.
    """
    if request.key is None:
        return None
    operation = Operation.objects.filter(company_id=request.company_id, request_key=request.key).first()
    if operation is None:
        return None
    if request.controller is not None:
        run = Run.objects.filter(pk=request.controller.run_id, company_id=request.company_id).first()
        if run is not None and (lost := controllers.lost(run, request.controller)):
            raise AcquireRefused(lost.sentence, code=lost.code)
    asked = (request.environment_id, request.run_id)
    if (operation.environment_uuid, operation.run_uuid) != asked:
        raise AcquireRefused("this request key named another request", code="request_key_reused")
    if operation.state == Operation.State.PENDING:
        raise AcquireInProgress("this request is being served; ask again")
    lease = operation.lease
    if lease is not None and lease.state == Lease.State.ACTIVE:
        return lease
    raise AcquireRejected("this request was served before, and what came of it is over", code="request_over")


def authority_problem(company_id: UUID, environment_id: UUID, run_id: UUID | None, run: Run | None) -> str:
    """Return why this company, run and environment may not have this sandbox, or an empty string."""
    if run_id is not None and run is None:
        return "there is no such run in this company"
    if run is not None and not run.is_live:
        return f"the run is over ({run.status})"
    if run is not None and run.cancel_requested_at is not None:
        return "the cancellation of the run was asked for"  # whatever its status says since
    if companies.is_closed(company_id):
        return "the company is closed"
    environment = Environment.objects.filter(pk=environment_id, company_id=company_id).first()
    if environment is None:
        return "the environment was deleted or belongs to another company"
    if environment.status != Environment.Status.ACTIVE:
        return "the environment is archived"
    return ""


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a caller may not have a sandbox; `code` is its own where the controller lost the run."""

    sentence: str
    code: str | None = None

    def __str__(self) -> str:
        return self.sentence


def why_not(operation: Operation, run: Run | None, controller: Controller | None) -> Problem | None:
    """Return why the caller of a locked operation may not have its sandbox, None where it may. The run is locked."""
    if run is not None and (lost := controllers.lost(run, controller)):
        return Problem(lost.sentence, lost.code)
    sentence = _why_not(operation, run)
    return Problem(sentence) if sentence else None


def _why_not(operation: Operation, run: Run | None) -> str:
    if operation.lease_id is not None or operation.state != Operation.State.PENDING:
        return "its recovery took it over first"
    if operation.cancelled_at is not None:
        return "the start was stopped"
    return authority_problem(operation.company_id, operation.environment_uuid, operation.run_uuid, run)


def live_run(run_id: UUID | None, company_id: UUID) -> Run | None:
    """Lock and return the run (first in the lock order), or None for an ad-hoc lease or a missing run."""
    if run_id is None:
        return None
    return Run.objects.select_for_update(no_key=True).filter(pk=run_id, company_id=company_id).first()


def locked(operation: Operation) -> Operation:
    return Operation.objects.select_for_update(no_key=True).get(pk=operation.pk)


def locked_start(operation: Operation) -> tuple[Lease, Operation]:
    """Lock and return the lease whose sandbox is started, then the operation."""
    source = Lease.objects.select_for_update(no_key=True).get(starts=operation.pk)
    return source, locked(operation)


def save_answered_id(operation: Operation, resource_id: str) -> None:
    """Save the id that `create` answered, or give a second sandbox of one creation an owner of its own.

    Names are unique, so this needs a provider that breaks its word; but then both sandboxes must be torn down.
    """
    try:
        save_resource_id(operation, resource_id)
    except IntegrityError:
        # The same id for the same sandbox, so that this is found again where the reply of its commit was lost.
        stray_id = uuid5(operation.pk, resource_id)
        with transaction.atomic():
            fields = (field.attname for field in Operation._meta.concrete_fields)  # noqa: SLF001 - Django's own API
            stray = Operation(**{name: getattr(operation, name) for name in fields if name not in _OF_ONE_SANDBOX})
            stray.id, stray.lease_uuid, stray.name = stray_id, uuid4(), name_of(stray_id)
            stray.resource_id, stray.cancelled_at = resource_id, Now()
            if not Operation.objects.filter(pk=stray_id).exists():
                stray.save(force_insert=True)
                _owe_recovery(stray, due_in=0)
                audit.record("operation.second_sandbox", stray, company_id=stray.company_id, of=str(operation.pk))
        raise AcquireUncertain(
            "the provider answered with another sandbox than the one that was found; both are being destroyed",
            code="identity_conflict",
        ) from None


_OF_ONE_SANDBOX = {
    "id",
    "name",
    "lease_uuid",
    "lease_id",
    "resource_id",
    "state",
    "looks",
    "request_key",
    "created_at",
    "call_ended_at",
    "outlived_at",
    "resolved_at",
}
"""What a second operation for the same creation does not take over."""


def save_resource_id(operation: Operation, resource_id: str) -> None:
    """Save the id that the provider returned, before anything that can fail. The same id again is fine.

    A different one is refused by the database (`operation_facts_are_final`). What an operator had given up has nobody
    who would look at the id later, so its sandbox gets an owner for its teardown here and now.
    """
    with transaction.atomic():
        Operation.objects.filter(pk=operation.pk).update(resource_id=resource_id)
    operation.resource_id = resource_id
    if Operation.objects.filter(pk=operation.pk, state=Operation.State.UNVERIFIED).exists():
        _own_what_was_given_up(operation, resource_id)


def _own_what_was_given_up(operation: Operation, resource_id: str) -> None:
    with transaction.atomic():
        if companies.hold(operation.company_id):
            return  # a person's to decide, who may adopt it; the id is there now
        row = locked(operation)
        if row.state == Operation.State.UNVERIFIED and not is_owned(row, resource_id):
            transitions.own_for_teardown(row, resource_id=resource_id, reason="turned_up", actor=audit.SYSTEM)
            audit.record("operation.turned_up", row, company_id=row.company_id, resource=resource_id)


def is_owned(operation: Operation, resource_id: str) -> bool:
    """Return whether a live lease of another creation owns this sandbox already."""
    live = Lease.objects.filter(account_id=operation.account_id, resource_id=resource_id, state__in=Lease.LIVE)
    return live.exclude(pk=operation.lease_uuid).exists()


def already_attached(operation: Operation, resource_id: str) -> Lease | None:
    """Return the lease that this very call attached, when the reply of its commit was lost."""
    if operation.lease_id is None or operation.state != Operation.State.ATTACHED:
        return None
    return Lease.objects.filter(pk=operation.lease_id, state=Lease.State.ACTIVE, resource_id=resource_id).first()


def keep_off_recovery(operation: Operation, seconds: float) -> None:
    """Move the recovery behind the next call of this living caller. Raises `TakenOver` where that is too late.

    Asked before each call but the first create: what was stopped or looked for meanwhile is not asked for again, since
    what came of it may be torn down by now.

    Decided under the operation's lock, which a Stop takes too: a start that was stopped is not put off any more.
    """
    with transaction.atomic():
        row = locked(operation)
        if row.state != Operation.State.PENDING:
            raise TakenOver("its recovery took it over first")
        if row.cancelled_at is not None:
            raise TakenOver("the start was stopped")
        later = Greatest(F("due_at"), Now() + timedelta(seconds=seconds))
        unclaimed = Obligation.objects.filter(operation=row, closed_at__isnull=True, attempt_id__isnull=True)
        if not unclaimed.update(due_at=later, quiet=""):
            raise TakenOver("its recovery is at work on it")


def calls_ended(operation: Operation) -> None:
    """Note that no call of a locked operation is under way any more; wakes a teardown that waits for it (trigger).

    Only for a caller that had an answer to each of them. One whose reply was lost may still be done, and is over only
    when its bound is (`bounds.START_OVER`).
    """
    Operation.objects.filter(pk=operation.pk, call_ended_at__isnull=True).update(call_ended_at=Now())


def give_up(operation: Operation, action: str, *, under_way: bool, **details: str) -> None:
    """Its caller asks the provider for nothing any more, and does not get the sandbox: the recovery looks now.

    `under_way`: something that it asked for may still be done, since the reply was lost. Safe to repeat. The run owes
    the end of the startup.
    """
    with transaction.atomic():
        row = locked(operation)
        if not under_way:
            calls_ended(row)
        if row.state == Operation.State.PENDING:
            startup.owe(row)
            wake_recovery(row)
        audit.record(action, row, company_id=row.company_id, **details)


def wake_recovery(operation: Operation, *, explicit: bool = False) -> None:
    """Wake the recovery of a locked, pending operation."""
    recovery = Obligation.objects.get(
        operation=operation, kind=RECOVERY_OF[Operation.Kind(operation.kind)], closed_at__isnull=True
    )
    wake(recovery.pk, explicit=explicit)


def _owe_recovery(operation: Operation, *, due_in: float) -> None:
    Obligation.objects.create(
        company_id=operation.company_id,
        kind=RECOVERY_OF[Operation.Kind(operation.kind)],
        account_id=operation.account_id,
        operation=operation,
        due_at=Now() + timedelta(seconds=due_in),
    )
