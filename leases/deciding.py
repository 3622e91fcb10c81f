"""What a machine cannot decide, decided by an operator: adopt this sandbox, look again now, settle without proof.

Each decision has an actor and a reason, is in the log, and is written whole or not at all. None of them is proof: an
adopted sandbox is torn down like any other, and what is settled unverified stays a debt (`leases.proof.unproven`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast
from uuid import UUID

from django.db import IntegrityError, connection, transaction
from django.db.models import Q

from leases import arguments, audit, bounds, credentials, transitions
from leases.calling import open_recorded
from leases.clock import database_now
from leases.credentials import SecretUnavailable
from leases.errors import DecisionRefused, LeaseError, NotFound
from leases.journal import is_owned
from leases.models import Installation, Lease, Obligation, Operation, Run
from leases.planning import MARK_OPERATION
from leases.retrying import retry_obligations
from leases.waking import wake
from providers.contract import (
    MARK_INSTALLATION,
    Busy,
    ErrorKind,
    Gone,
    ProviderError,
    Resource,
    Running,
    Sighting,
    Stopped,
    Unknown,
    usable,
)
from providers.registry import AnyProvider, ConfigurationError, ProviderUnavailable

Seen = Running | Stopped | Busy | Unknown

Kind = Obligation.Kind
ONLY_OWNER = "lease_is_the_only_live_one_of_its_sandbox"
SETTLEABLE = (Kind.TEARDOWN, Kind.RECOVER_CREATION, Kind.RECOVER_START, Kind.STARTUP)
"""The kinds that can be settled without proof: those that only proof ends otherwise."""

_NOT_SETTLEABLE = {
    Kind.EXTEND: "it ends by itself, with its lease",
    Kind.END_LEASE: "release the lease instead",
    Kind.PROBE_ACCOUNT: "it asks nothing but whether the account works again",
    Kind.SETTLE_ORPHAN: "it stops and keeps what nobody holds, and asks no provider",
    Kind.DISPOSE: "it ends with the sandbox; say until when that is kept instead",
    Kind.END_FENCE: "it ends at the fence's own time",
    Kind.WATCH_CONTROLLERS: "it watches the whole fleet for as long as there is one",
    Kind.RECOVER_WORKSPACE: "it ends by itself within half an hour; stop the lease's run to end it now",
    Kind.END_RECOVERY: "it ends a recovery of files at its time",
    Kind.WATCH_RESTART: "its sandbox's earlier end is proven; destroy that sandbox to be rid of it",
    Kind.START_CONTINUATION: "withdraw the continuation instead",
    Kind.CONFIRM_CANCEL: "it confirms what is proven; settle what it waits for",
    Kind.VERIFY_END: "its lease ended without proof already, which is what it looks for",
}


# Adopting


@dataclass(frozen=True, slots=True)
class Finding:
    """What the provider said about a sandbox that may be adopted."""

    operation: Operation
    resource_id: str
    seen: str
    """What the look saw, in a word: `running`, `stopped`, `busy` or `unknown`."""


def examine(operation_id: UUID, resource_id: str, *, company_id: UUID) -> Finding:
    """Ask the provider whether this sandbox is the one that this creation allocated. Reads only.

    Asks at most three times: who the account is, what the sandbox is, and, where the look shows no marks, which
    sandboxes carry this operation's (`bounds.IDENTIFY`, `INSPECT` and `FIND` seconds). It must not be called inside a
    transaction (`RuntimeError`). Raises `NotFound`, and `DecisionRefused` with a sentence: another account, gone,
    foreign marks or none, owned already, not to be asked from this process.
    """
    if connection.in_atomic_block:
        raise RuntimeError("a provider is not asked inside a transaction")
    operation = Operation.objects.filter(pk=operation_id, company_id=company_id).first()
    if operation is None:
        raise NotFound(f"no operation {operation_id} in this company")
    _require_adoptable(operation, resource_id)
    provider = _open(operation)
    try:
        if provider.identify(within=bounds.IDENTIFY) != operation.account_identity:
            raise DecisionRefused(
                "another account answers than the one that the creation was asked at", code=ErrorKind.IDENTITY.value
            )
        sighting = _about(resource_id, provider.inspect(resource_id, within=bounds.INSPECT))
        # A second sandbox of one creation has an operation of its own, and carries the marks of the first.
        require_marks(provider, sighting.resource, creation=str(operation.marks.get(MARK_OPERATION, operation.pk)))
    except ProviderError as error:
        raise DecisionRefused(f"the provider could not be asked: {error}", code=error.kind.value) from error
    return Finding(operation, resource_id, type(sighting).__name__.lower())


def adopt(operation_id: UUID, resource_id: str, *, company_id: UUID, actor: str, reason: str) -> Lease:
    """Give a sandbox that an operator found an owner for its teardown; returns that lease, `pending_cleanup`.

    For a creation that is pending, whatever made it quiet, or that was ended unverified. The provider is asked first,
    as `examine` says and with its errors. Then, under the operation's lock, all is checked again that others may have
    changed meanwhile: of two that adopt at once, of an adoption and a recovery, of an adoption and the late reply of
    the acquire itself, one makes the lease and the others find it made (each takes that lock, and an operation gets
    one lease, once). Raises `LeaseError` without a reason.
    """
    arguments.actor(actor)
    arguments.reason(reason, "a decision")
    found = examine(operation_id, resource_id, company_id=company_id)
    try:
        with transaction.atomic():
            operation = Operation.objects.select_for_update(no_key=True).get(pk=operation_id)
            _require_adoptable(operation, resource_id)
            before = operation.state
            lease = transitions.own_for_teardown(operation, resource_id=resource_id, reason="adopted", actor=actor)
            audit.record(
                "operation.adopted",
                operation,
                company_id=company_id,
                actor=actor,
                reason=reason,
                resource=resource_id,
                seen=found.seen,
                state_before=before,
                lease=str(lease.pk),
            )
    except IntegrityError as error:
        if getattr(getattr(error.__cause__, "diag", None), "constraint_name", "") == ONLY_OWNER:
            # A lease of another creation became the owner of this sandbox between the check and the insert.
            raise _owned(resource_id) from error
        raise
    return lease


def _require_adoptable(operation: Operation, resource_id: str) -> None:
    try:
        usable(Resource(resource_id, operation.name))
    except ProviderError as error:
        raise DecisionRefused(error.excerpt, code="invalid") from error
    if operation.kind != Operation.Kind.CREATE:
        raise DecisionRefused("a start's sandbox is known: there is nothing to adopt", code="invalid")
    if operation.state == Operation.State.ATTACHED:
        raise DecisionRefused(f"lease {operation.lease_id} owns its sandbox already", code="already_owned")
    if operation.state == Operation.State.RESOLVED:
        raise DecisionRefused("it is resolved: nothing of it is owned any more, or nothing ever was", code="resolved")
    if operation.resource_id not in ("", resource_id):
        raise DecisionRefused(
            f"its sandbox is known to be another one, {operation.resource_id}", code=ErrorKind.IDENTITY.value
        )
    if is_owned(operation, resource_id):
        raise _owned(resource_id)


def _owned(resource_id: str) -> DecisionRefused:
    return DecisionRefused(f"a live lease of another creation owns {resource_id}", code="already_owned")


def _open(operation: Operation) -> AnyProvider:
    try:
        return open_recorded(operation)
    except SecretUnavailable as error:
        raise DecisionRefused(
            f"the provider cannot be asked from this process: {error}", code="credential_unavailable"
        ) from error
    except ProviderUnavailable as error:
        raise DecisionRefused(
            f"the provider cannot be asked from this process: {error}", code="provider_unavailable"
        ) from error
    except ConfigurationError as error:
        raise DecisionRefused(f"the recorded endpoint no longer fits: {error}", code="invalid_snapshot") from error


def _about(resource_id: str, answer: Sighting) -> Seen:
    if isinstance(answer, Gone):
        raise DecisionRefused(
            "the provider has no such sandbox: there is nothing to adopt, and that proves nothing about another one",
            code="gone",
        )
    if answer.resource.resource_id != resource_id:
        raise DecisionRefused("the provider answered about another sandbox", code=ErrorKind.PROTOCOL.value)
    return answer


def require_marks(provider: AnyProvider, resource: Resource, *, creation: str) -> None:
    """Refuse a sandbox that does not carry this installation's mark and that of this very creation ("": of none).

    A look may show no marks at all (a state that the provider does not describe). Then the provider's own list by these
    marks is asked: one that names this id says the same. What neither shows is refused, whoever vouches for it. Raises
    `DecisionRefused`, and `ProviderError` where the list cannot be had.
    """
    ours = {MARK_INSTALLATION: str(Installation.current().mark)}
    if creation:
        ours[MARK_OPERATION] = creation
    marks = dict(resource.marks)
    if ours.items() <= marks.items():
        return
    if MARK_INSTALLATION not in marks and MARK_OPERATION not in marks:
        listed = provider.list(ours, within=bounds.FIND)
        if any(one.resource_id == resource.resource_id for one in listed.resources):
            return
        raise DecisionRefused(
            "the sandbox shows no marks of ours; whose it is cannot be verified", code="foreign_marks"
        )
    if marks.get(MARK_INSTALLATION) != ours[MARK_INSTALLATION]:
        raise DecisionRefused("the sandbox carries another installation's mark", code="foreign_marks")
    raise DecisionRefused("the sandbox carries the mark of another operation", code="foreign_marks")


# Looking again


def recheck(
    *,
    company_id: UUID | None,
    obligation_id: int | None = None,
    operation_id: UUID | None = None,
    actor: str,
    reason: str,
) -> Obligation:
    """Ask for one attempt now at an open obligation, or at the recovery of an operation; returns it.

    An explicit retry (`leases.retrying`) of what may be quiet. Where the secret changed since the creation was asked
    for, it also says that the one of today will do. `company_id` is None for what is the whole installation's. Raises
    `NotFound`, `DecisionRefused` when it is not owed any more, `LeaseError` without a reason or with not exactly one of
    the two ids.
    """
    if (obligation_id is None) == (operation_id is None):
        raise LeaseError("name either an obligation or an operation", code="invalid")
    arguments.actor(actor)
    arguments.reason(reason, "a decision")
    row = (
        open_obligation(obligation_id, company_id=company_id)
        if obligation_id is not None
        else open_recovery(cast("UUID", operation_id), company_id=cast("UUID", company_id))
    )
    with transaction.atomic():
        if row.operation_id is not None and row.quiet == Obligation.Quiet.CREDENTIAL_CHANGED:
            operation = Operation.objects.select_for_update(no_key=True).get(pk=row.operation_id)
            credentials.accept(operation)
            audit.record("operation.credential_accepted", operation, company_id=company_id, actor=actor, reason=reason)
        if not retry_obligations([row.pk], actor=actor, reason=reason):
            row.refresh_from_db()
            raise _not_owed(row)
    row.refresh_from_db()
    return row


def open_obligation(obligation_id: int, *, company_id: UUID | None) -> Obligation:
    """Return an obligation that is owed. Raises `NotFound`, and `DecisionRefused` when it is closed.

    `company_id` is None for what is the whole installation's, and finds nothing else.
    """
    row = (
        Obligation.objects.select_related("account", "lease", "operation", "run")
        .filter(Q(company_id__isnull=True) if company_id is None else Q(company_id=company_id), pk=obligation_id)
        .first()
    )
    if row is None:
        raise NotFound(f"no obligation {obligation_id} in this company")
    if not row.is_open:
        raise _not_owed(row)
    return row


def open_recovery(operation_id: UUID, *, company_id: UUID) -> Obligation:
    """Return the open recovery of an operation. Raises `NotFound`, and `DecisionRefused` when there is none."""
    operation = Operation.objects.filter(pk=operation_id, company_id=company_id).first()
    if operation is None:
        raise NotFound(f"no operation {operation_id} in this company")
    row = Obligation.objects.filter(operation=operation, closed_at__isnull=True).first()
    if row is None:
        raise DecisionRefused(f"the operation is {operation.state}: nothing looks for it any more", code="not_owed")
    return row


def _not_owed(row: Obligation) -> DecisionRefused:
    return DecisionRefused(f"{row} is not owed any more: {row.get_closed_as_display()}", code="not_owed")


# Settling without proof


def confirmation_of(obligation: Obligation) -> str:
    """Return what an operator must type to settle this obligation without proof: the exact name of what it is about."""
    match obligation.kind:
        case Kind.TEARDOWN if obligation.lease is not None:
            return obligation.lease.resource_id
        case Kind.RECOVER_CREATION if obligation.operation is not None:
            return obligation.operation.name
        case Kind.RECOVER_START if obligation.operation is not None:
            return obligation.operation.resource_id
        case Kind.STARTUP:
            return str(obligation.run_id)
        case _:
            raise _refusal_of_kind(obligation)


def settle_unverified(
    obligation_id: int, *, confirmation: str, company_id: UUID | None, actor: str, reason: str
) -> Obligation:
    """End the retries of an obligation without proof, and not its debt (design 2.3); returns the closed row.

    A teardown leaves its lease `failed` without a receipt; the recovery of a creation or start leaves its operation
    `unverified`, and a sandbox that a recovery of files started is watched; the startup of a run is no longer waited
    for. `confirmation` is what `confirmation_of` says. No gate opens by it, and what comes late still counts: a receipt
    is kept, an id that turns up is owned and torn down. Raises
    `NotFound`, `LeaseError` without a reason, and `DecisionRefused`: closed, held by an attempt (until when is said),
    of a kind that needs no proof, or confirmed with another text.
    """
    arguments.actor(actor)
    arguments.reason(reason, "a decision")
    row = open_obligation(obligation_id, company_id=company_id)
    if confirmation.strip() != confirmation_of(row):
        raise DecisionRefused(
            "what was typed is not the exact name of what is given up; nothing was written", code="confirmation"
        )
    with transaction.atomic():
        # In the lock order: run, lease, operation, then the obligation, whose claim is refused while this is written.
        if row.run_id is not None:
            Run.objects.select_for_update(no_key=True).get(pk=row.run_id)
        lease_id = row.lease_id or (row.operation.source_id if row.operation else None)
        lease = Lease.objects.select_for_update(no_key=True).get(pk=lease_id) if lease_id else None
        operation = (
            Operation.objects.select_for_update(no_key=True).get(pk=row.operation_id) if row.operation_id else None
        )
        row = Obligation.objects.select_for_update(no_key=True).get(pk=row.pk)
        require_settleable(row)
        if row.kind == Kind.TEARDOWN and lease is not None:
            transitions.settle_unverified(lease, row, actor=actor, reason=reason)
            _wake_startup(lease.run_id)
        elif operation is not None:
            transitions.end_unverified(operation, row, actor=actor, reason=reason)
            if operation.recovery_id is not None and lease is not None and lease.state in Lease.KEPT:
                # Whether it runs is not known, and no teardown asks: it is watched, so that it does not run unseen.
                transitions.may_be_running(lease)
        else:
            transitions.close_unverified(row)
            audit.record("startup.unverified", row, company_id=company_id, actor=actor, reason=reason, quiet=row.quiet)
    row.refresh_from_db()
    return row


def require_settleable(row: Obligation) -> None:
    """Raise `DecisionRefused` where an obligation cannot be settled without proof now: its kind, closed, or held."""
    if row.kind not in SETTLEABLE:
        raise _refusal_of_kind(row)
    if not row.is_open:
        raise _not_owed(row)
    now = database_now()
    if row.attempt_id is not None and row.due_at is not None and row.due_at > now:
        raise DecisionRefused(
            f"{row.worker} works on it, and is protected until {row.due_at:%Y-%m-%d %H:%M:%S} UTC; wait for its end",
            code="in_flight",
        )


def is_settleable(row: Obligation) -> bool:
    """Return whether an open obligation is of a kind that an operator may settle without proof."""
    return row.is_open and row.kind in SETTLEABLE


def _refusal_of_kind(row: Obligation) -> DecisionRefused:
    why = _NOT_SETTLEABLE.get(Kind(row.kind), "it names nothing")
    return DecisionRefused(f"{row} needs no proof and cannot be settled without: {why}", code="invalid")


def _wake_startup(run_id: UUID | None) -> None:
    """What a startup waited for will not come: its next attempt says what to do about that."""
    if run_id is None:
        return
    for startup in Obligation.objects.filter(run_id=run_id, kind=Kind.STARTUP, closed_at__isnull=True):
        wake(startup.pk)
