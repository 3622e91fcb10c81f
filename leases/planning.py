"""What is recorded before a provider is asked: snapshot, name and marks, and who may use the sandbox again.

Nothing here writes or asks; `leases.journal` writes it.

A sandbox may serve another run only within its *scope* (who may have it) and with an equal *fingerprint* (what it was
made from). A lease of no run has no scope, so it is never used again (domain I-12).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID, uuid4

from leases import arguments, bounds, controllers
from leases.clock import database_now
from leases.controllers import Controller
from leases.errors import AcquireRefused
from leases.models import Environment, Installation, Lease, Operation, Recovery, Run
from leases.models.environments import Policy
from providers.contract import MARK_INSTALLATION, MARK_PREFIX
from providers.registry import AnyProvider, ProviderUnavailable, load

MARK_OPERATION = f"{MARK_PREFIX}operation"
"""Which creation a sandbox is of."""

_SCOPE_LIMIT = 200
_KEY_LIMIT = 200
_REUSING = (Policy.REUSE_BY_ENVIRONMENT, Policy.REUSE_BY_EXECUTION_WORKSPACE)


@dataclass(frozen=True, slots=True)
class Request:
    """What a caller of acquire asked for. Refuses nonsense before anything is read or written."""

    environment_id: UUID
    company_id: UUID
    run_id: UUID | None = None
    workspace: str = ""
    agent: str = ""
    key: str | None = None
    setup: Sequence[Sequence[str]] = ()
    ends_in: float | None = None
    actor: str = "api"
    controller: Controller | None = None

    def __post_init__(self) -> None:
        for name in ("environment_id", "company_id", "run_id"):
            value = getattr(self, name)
            if value is not None or name != "run_id":
                object.__setattr__(self, name, arguments.identity(value, name, error=AcquireRefused))
        arguments.actor(self.actor, error=AcquireRefused)
        controllers.of_its_run(self.controller, self.run_id, error=AcquireRefused)
        key: object = self.key
        if key is not None and not (isinstance(key, str) and 0 < len(key) <= _KEY_LIMIT and key.isprintable()):
            raise AcquireRefused(f"a request key is 1 to {_KEY_LIMIT} printable characters", code="invalid")
        for name in ("workspace", "agent"):
            value = getattr(self, name)
            if not (isinstance(value, str) and value.isprintable()):
                raise AcquireRefused(f"{name} must be printable text", code="invalid")
        if not isinstance(self.setup, list | tuple) or not all(arguments.is_argv(argv) for argv in self.setup):
            raise AcquireRefused("each set-up command is a program and its arguments, one text each", code="invalid")
        if self.ends_in is not None:
            if self.run_id is not None:
                raise AcquireRefused("only a lease without a run ends at a time of its own", code="invalid")
            arguments.seconds(self.ends_in, "ends_in", longest=bounds.AD_HOC_LONGEST, error=AcquireRefused)


def adapter(key: str) -> type[AnyProvider]:
    """Return a provider's adapter. Raises `AcquireRefused` where this process has none."""
    try:
        return load(key)
    except ProviderUnavailable as error:
        raise AcquireRefused(str(error), code="provider_unavailable") from error


def name_of(operation_id: UUID) -> str:
    """Return the name under which the sandbox of a creation is asked for: no two creations share one."""
    return f"pe-{operation_id.hex}"


def creation(environment: Environment, request: Request) -> Operation:
    """Return the unsaved operation of a creation. Identity, digest and fingerprint follow once the account answered."""
    account = environment.account
    operation_id, lease_id = uuid4(), uuid4()
    marks = {
        MARK_INSTALLATION: str(Installation.current().mark),
        f"{MARK_PREFIX}company": str(environment.company_id),
        f"{MARK_PREFIX}environment": str(environment.pk),
        f"{MARK_PREFIX}lease": str(lease_id),
        MARK_OPERATION: str(operation_id),
    }
    if request.run_id is not None:
        marks[f"{MARK_PREFIX}run"] = str(request.run_id)
    cls = adapter(account.provider)
    policy = environment.policy if request.run_id is not None else Policy.EPHEMERAL
    if policy in _REUSING and not cls.capabilities.keeps_files:
        policy = Policy.EPHEMERAL  # nothing would be left to use again
    return Operation(
        id=operation_id,
        kind=Operation.Kind.CREATE,
        company_id=environment.company_id,
        account=account,
        environment_uuid=environment.pk,
        run_uuid=request.run_id,
        lease_uuid=lease_id,
        request_key=request.key,
        name=name_of(operation_id),
        marks=marks,
        provider=account.provider,
        endpoint=account.endpoint,
        credential_uuid=account.credential_id,
        credential_reference=account.credential.reference if account.credential else "",
        config=environment.config,
        policy=policy,
        scope=_scope(environment, policy, request),
        drain_seconds=environment.drain_seconds,
        reuse_idle_for=environment.reuse_idle_for,
        retain_for=environment.retain_for,
        hourly_price=environment.hourly_price,
        ends_at=_end(request),
        finds_by_name=cls.capabilities.finds_by_name,
        creation_window=cls.capabilities.creation_window,
        proves_no_allocation=sorted(cls.capabilities.proves_no_allocation),
        binding=cls.binding,
    )


def start(planned: Operation, source: Lease, start_id: UUID) -> Operation:
    """Return the unsaved operation that starts the stopped sandbox of `source` for the request behind `planned`.

    The same run gets its own lease back, another one a successor.
    """
    created = Operation.objects.get(account_id=source.account_id, kind=Operation.Kind.CREATE, name=source.resource_name)
    fields = {field.attname: getattr(planned, field.attname) for field in Operation._meta.concrete_fields}  # noqa: SLF001 - documented API of Django
    same_run = source.run_id is not None and source.run_id == planned.run_uuid
    return Operation(
        **fields
        | {
            "id": start_id,
            "kind": Operation.Kind.START,
            "source_id": source.pk,
            "lease_uuid": source.pk if same_run else uuid4(),
            "name": source.resource_name,
            "resource_id": source.resource_id,
            "marks": created.marks,
            "binding": created.binding,
        }
    )


def restart(source: Lease, recovery: Recovery) -> Operation:
    """Return the unsaved operation with which a recovery starts the stopped sandbox of `source`, by its own record."""
    created = Operation.objects.get(account_id=source.account_id, kind=Operation.Kind.CREATE, name=source.resource_name)
    return Operation(
        kind=Operation.Kind.START,
        recovery=recovery,
        company_id=source.company_id,
        account_id=source.account_id,
        environment_uuid=source.environment_id or created.environment_uuid,
        run_uuid=source.run_id,
        lease_uuid=source.pk,
        source=source,
        name=source.resource_name,
        marks=created.marks,
        provider=source.provider,
        endpoint=source.endpoint,
        credential_uuid=source.credential_uuid,
        credential_reference=source.credential_reference,
        credential_digest=created.credential_digest,
        account_identity=source.account_identity,
        config=source.config,
        policy=source.policy,
        drain_seconds=source.drain_seconds,
        reuse_idle_for=source.reuse_idle_for,
        retain_for=source.retain_for,
        hourly_price=source.hourly_price,
        finds_by_name=created.finds_by_name,
        creation_window=created.creation_window,
        proves_no_allocation=created.proves_no_allocation,
        binding=created.binding,
        resource_id=source.resource_id,
    )


def fingerprint(operation: Operation) -> str:
    """Return a digest of everything that a sandbox is made from; equal for two that are interchangeable.

    Where in it the work lies (`workspace`) it is not made from: naming that costs no kept sandbox its files.
    """
    parts = [
        operation.provider,
        operation.endpoint,
        operation.account_identity,
        {key: value for key, value in operation.config.items() if key != "workspace"},
        operation.binding,
        str(operation.environment_uuid),
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _scope(environment: Environment, policy: str, request: Request) -> str:
    """Return who may use the sandbox again: the environment's next run, or the next one of its workspace or issue."""
    if policy not in _REUSING or request.run_id is None:
        return ""
    scope = f"environment:{environment.pk}"
    if policy == Policy.REUSE_BY_EXECUTION_WORKSPACE:
        if request.workspace:
            scope += f"/workspace:{request.workspace}"
        else:  # a task without a workspace: the same issue and agent (S-010)
            run = Run.objects.filter(pk=request.run_id, company_id=environment.company_id).first()
            if run is None or run.issue_id is None:
                return ""
            scope += f"/issue:{run.issue_id}"
    scope += f"/agent:{request.agent}"
    return scope if len(scope) <= _SCOPE_LIMIT else "sha256:" + hashlib.sha256(scope.encode()).hexdigest()


def _end(request: Request) -> datetime | None:
    if request.run_id is not None:
        return None
    return database_now() + timedelta(seconds=request.ends_in or bounds.AD_HOC_DEFAULT)
