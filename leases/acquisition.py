"""Acquire: ownership of a sandbox is recorded before the provider is asked for it, and is never lost afterwards.

Three short transactions and one call, none of which spans the call: (1) commit the `Operation` with its recovery
obligation, due after the call's bound; (2) *create*; (3) save the returned id, first of all; (4) attach the lease, with
the authority checks repeated under locks. Die anywhere, and the recovery falls due, finds the sandbox by its name, and
has it torn down. Whether the attach or the recovery owns the sandbox is decided by the operation's row lock: both
take it and require `pending`, so exactly one of them makes the lease (`Operation.lease` is one-to-one and final).
"""

from __future__ import annotations

from datetime import timedelta
from uuid import UUID, uuid4

from django.db import IntegrityError, transaction
from django.db.models.functions import Now

from leases import audit, bounds, transitions
from leases.calling import open_recorded
from leases.clock import Clock, boottime
from leases.connections import persistently
from leases.credentials import SecretUnavailable
from leases.errors import AcquireFailed, AcquireRefused, AcquireRejected, AcquireUncertain, NotFound
from leases.models import (
    Company,
    Credential,
    Environment,
    Installation,
    Lease,
    Obligation,
    Operation,
    ProviderAccount,
    Run,
)
from leases.waking import wake
from providers.contract import MARK_INSTALLATION, MARK_PREFIX, Created, ErrorKind, ProviderError, usable
from providers.registry import AnyProvider, ConfigurationError, ProviderUnavailable, load, validate


def acquire(
    environment_id: UUID,
    *,
    company_id: UUID,
    run_id: UUID | None = None,
    actor: str = "api",
    clock: Clock = boottime,
) -> Lease:
    """Create a sandbox as the environment says and return its active lease.

    Blocks for as long as the provider needs to create it (at most `bounds.CREATE` seconds and some). Without a run the
    lease is ad hoc and always ephemeral (domain I-12). Must not be called inside a transaction: the journal has to be
    committed before the provider is asked (`RuntimeError`).

    Raises `NotFound`, `AcquireRefused` (nothing was asked), `AcquireFailed` (the provider proved that nothing was
    allocated), `AcquireUncertain` (its answer was lost; the operation owns what may exist), `AcquireRejected` (it
    came to be too late; it is being destroyed).
    """
    environment = _environment(environment_id, company_id)
    credential = environment.account.credential
    if credential is not None and credential.status != Credential.Status.ACTIVE:
        raise AcquireRefused(f"the credential {credential.name} is {credential.status}", code="credential_inactive")
    operation = _plan(environment, run_id)
    try:
        provider = open_recorded(operation)
        config = validate(load(operation.provider).Config, operation.config)
    except (ProviderUnavailable, SecretUnavailable, ConfigurationError) as error:
        raise AcquireRefused(str(error)) from error
    operation.account_identity = attest(environment.account, provider, endpoint=operation.endpoint)
    journalled_at = clock()
    _journal(operation, environment, run_id, actor)

    if clock() - journalled_at > bounds.CREATE_MARGIN:
        # The process was suspended: the recovery may have looked already, and must not be outrun by a late create.
        raise _not_created(operation, ProviderError(ErrorKind.TIMEOUT, "too late to be sent", nothing_allocated=True))
    try:
        created = provider.create(operation.name, operation.marks, config, within=bounds.CREATE)
        usable(created.resource)
    except ProviderError as error:
        failure = error
        raise persistently(lambda: _not_created(operation, failure)) from error
    # Each is safe to repeat after a commit whose reply was lost: the id is written once, the operation attached once.
    persistently(lambda: _save_answered_id(operation, created.resource.resource_id))
    return persistently(lambda: _attach(operation, created, actor))


def attest(account: ProviderAccount, provider: AnyProvider, *, endpoint: object) -> str:
    """Return the identity that the provider attests, recording it on the account the first time.

    Only while the account still has the `endpoint` that was asked; an edit in between makes it nobody's word. Raises
    `AcquireRefused` when it cannot be asked, or when somebody else answers than the one recorded.
    """
    try:
        identity = provider.identify(within=bounds.IDENTIFY)
    except ProviderError as error:
        raise AcquireRefused(f"the provider account cannot be reached: {error}", code=error.kind.value) from error
    if not identity:
        raise AcquireRefused("the provider does not say which account this is", code=ErrorKind.IDENTITY.value)
    if not account.attested_identity:
        unattested = ProviderAccount.objects.filter(pk=account.pk, attested_identity="", endpoint=endpoint)
        unattested.update(attested_identity=identity)
        account.refresh_from_db(fields=["attested_identity"])
    if account.attested_identity != identity:
        raise AcquireRefused(
            "another account answers at this endpoint than the one recorded", code=ErrorKind.IDENTITY.value
        )
    return identity


def _save_answered_id(operation: Operation, resource_id: str) -> None:
    """Save the id that `create` answered, or give a second sandbox of one creation an owner of its own.

    Names are unique, so this needs a provider that breaks its word; but then both sandboxes must be torn down.
    """
    try:
        with transaction.atomic():
            save_resource_id(operation, resource_id)
    except IntegrityError:
        with transaction.atomic():
            stray_id = uuid4()
            fields = (field.attname for field in Operation._meta.concrete_fields)  # noqa: SLF001 - Django's own API
            stray = Operation(**{name: getattr(operation, name) for name in fields if name not in _OF_ONE_SANDBOX})
            stray.id, stray.lease_uuid, stray.name = stray_id, uuid4(), f"pe-{stray_id.hex}"
            stray.resource_id, stray.cancelled_at = resource_id, Now()
            stray.save(force_insert=True)
            _owe_recovery(stray, due_in=0)
            audit.record("operation.second_sandbox", stray, company_id=stray.company_id, of=str(operation.pk))
        raise AcquireUncertain(
            "the provider answered with another sandbox than the one that was found; both are being destroyed",
            code="identity_conflict",
        ) from None


_OF_ONE_SANDBOX = {"id", "name", "lease_uuid", "lease_id", "resource_id", "state", "looks", "created_at", "resolved_at"}
"""What a second operation for the same creation does not take over."""


def save_resource_id(operation: Operation, resource_id: str) -> None:
    """Save the id that the provider returned, before anything that can fail. The same id again is fine.

    A different one is refused by the database (`operation_facts_are_final`).
    """
    Operation.objects.filter(pk=operation.pk).update(resource_id=resource_id)
    operation.resource_id = resource_id


def _environment(environment_id: UUID, company_id: UUID) -> Environment:
    try:
        return Environment.objects.select_related("account", "account__credential", "company").get(
            pk=environment_id, company_id=company_id
        )
    except Environment.DoesNotExist:
        raise NotFound(f"no environment {environment_id} in this company") from None


def _plan(environment: Environment, run_id: UUID | None) -> Operation:
    account = environment.account
    operation_id, lease_id = uuid4(), uuid4()
    marks = {
        MARK_INSTALLATION: str(Installation.current().pk),
        f"{MARK_PREFIX}company": str(environment.company_id),
        f"{MARK_PREFIX}environment": str(environment.pk),
        f"{MARK_PREFIX}lease": str(lease_id),
        f"{MARK_PREFIX}operation": str(operation_id),
    }
    if run_id is not None:
        marks[f"{MARK_PREFIX}run"] = str(run_id)
    adapter = _adapter(account.provider)
    return Operation(
        id=operation_id,
        company_id=environment.company_id,
        account=account,
        environment_uuid=environment.pk,
        run_uuid=run_id,
        lease_uuid=lease_id,
        name=f"pe-{operation_id.hex}",
        marks=marks,
        provider=account.provider,
        endpoint=account.endpoint,
        credential_reference=account.credential.reference if account.credential else "",
        config=environment.config,
        policy=environment.policy if run_id is not None else "ephemeral",
        drain_seconds=environment.drain_seconds,
        hourly_price=environment.hourly_price,
        finds_by_name=adapter.capabilities.finds_by_name,
        creation_window=adapter.capabilities.creation_window,
    )


def _adapter(key: str) -> type[AnyProvider]:
    try:
        return load(key)
    except ProviderUnavailable as error:
        raise AcquireRefused(str(error), code="provider_unavailable") from error


def _journal(operation: Operation, environment: Environment, run_id: UUID | None, actor: str) -> None:
    """Commit the operation and its recovery. If this fails, the provider is never called."""
    with transaction.atomic(durable=True):
        run = _live_run(run_id, operation.company_id)
        problem = _authority_problem(operation, run_id, run)
        if problem:
            raise AcquireRefused(problem)
        operation.issue_uuid = run.issue_id if run else None
        operation.save(force_insert=True)
        _owe_recovery(operation, due_in=bounds.CREATE + bounds.CREATE_MARGIN)
        audit.record(
            "operation.begun", operation, company_id=operation.company_id, actor=actor, environment=environment.name
        )


def _owe_recovery(operation: Operation, *, due_in: float) -> None:
    Obligation.objects.create(
        company_id=operation.company_id,
        kind=Obligation.Kind.RECOVER_CREATION,
        account_id=operation.account_id,
        operation=operation,
        due_at=Now() + timedelta(seconds=due_in),
    )


def _live_run(run_id: UUID | None, company_id: UUID) -> Run | None:
    """Lock and return the run (first in the lock order), or None for an ad-hoc lease or a missing run."""
    if run_id is None:
        return None
    return Run.objects.select_for_update(no_key=True).filter(pk=run_id, company_id=company_id).first()


def _authority_problem(operation: Operation, run_id: UUID | None, run: Run | None) -> str:
    """Return why this company, run and environment may not have this sandbox, or an empty string."""
    if run_id is not None and run is None:
        return "there is no such run in this company"
    if run is not None and not run.is_live:
        return f"the run is over ({run.status})"
    if Company.objects.filter(pk=operation.company_id, closed_at__isnull=False).exists():
        return "the company is closed"
    environment = Environment.objects.filter(pk=operation.environment_uuid, company_id=operation.company_id).first()
    if environment is None:
        return "the environment was deleted or belongs to another company"
    if environment.status != Environment.Status.ACTIVE:
        return "the environment is archived"
    return ""


def _not_created(operation: Operation, error: ProviderError) -> AcquireFailed | AcquireUncertain:
    """Decide what a failed create leaves owed. Only the contract's own proof resolves the operation."""
    with transaction.atomic():
        locked = Operation.objects.select_for_update(no_key=True).get(pk=operation.pk)
        # The name is this operation's own: one that is taken was taken by a create of ours whose reply was lost.
        unsent = error.kind == ErrorKind.NOT_READY
        refused = error.nothing_allocated and error.kind != ErrorKind.NAME_TAKEN
        proves_nothing = (unsent or refused) and not locked.resource_id
        if proves_nothing and locked.state == Operation.State.PENDING:
            transitions.refuse_operation(locked)
            audit.record("operation.refused", locked, company_id=locked.company_id, kind=error.kind.value)
            return AcquireFailed(f"the provider refused to create a sandbox: {error}", code=error.kind.value)
        if locked.state == Operation.State.PENDING:
            recovery = Obligation.objects.get(
                operation=locked, kind=Obligation.Kind.RECOVER_CREATION, closed_at__isnull=True
            )
            wake(recovery.pk)
        audit.record("operation.answer_lost", locked, company_id=locked.company_id, kind=error.kind.value)
    return AcquireUncertain(
        f"the provider did not say whether a sandbox was created ({error}); what exists will be found and destroyed",
        code=error.kind.value,
    )


def _attach(operation: Operation, created: Created, actor: str) -> Lease:
    resource_id = created.resource.resource_id
    with transaction.atomic():
        run = _live_run(operation.run_uuid, operation.company_id)
        locked = Operation.objects.select_for_update(no_key=True).get(pk=operation.pk)
        if attached := _already_attached(locked, resource_id):
            return attached
        if is_owned(locked, resource_id):
            raise AcquireRejected(
                "the provider answered with a sandbox that a live lease owns; a person must decide whose it is",
                code="identity_conflict",
            )
        if locked.lease_id is not None or locked.state != Operation.State.PENDING:
            problem = "its recovery took it over first"
        else:
            problem = _authority_problem(locked, locked.run_uuid, run)
            if locked.cancelled_at is not None:
                problem = "the start was stopped"
            if not problem:
                return transitions.attach(
                    locked, resource_id=resource_id, expires_at=created.resource.expires_at, actor=actor
                )
            transitions.own_for_teardown(locked, resource_id=resource_id, reason="acquire_rejected", actor=actor)
    raise AcquireRejected(f"the new sandbox may not be used: {problem}; it is being destroyed")


def is_owned(operation: Operation, resource_id: str) -> bool:
    """Return whether a live lease of another creation owns this sandbox already."""
    live = Lease.objects.filter(account_id=operation.account_id, resource_id=resource_id, state__in=Lease.LIVE)
    return live.exclude(pk=operation.lease_uuid).exists()


def _already_attached(operation: Operation, resource_id: str) -> Lease | None:
    """Return the lease that this very call attached, when the reply of its commit was lost."""
    if operation.lease_id is None:
        return None
    return Lease.objects.filter(
        pk=operation.lease_id, state=Lease.State.ACTIVE, resource_id=resource_id, operations__state="attached"
    ).first()
