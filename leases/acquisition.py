"""Acquire: ownership of a sandbox is recorded before the provider is asked for it, and is never lost afterwards.

A few short transactions and calls, none of which spans a call: (1) commit the `Operation` with its recovery obligation,
due after the call's bound (`leases.journal`); (2) ask to create (`leases.creating`) or to start (`leases.reuse`); (3)
save the returned id, first of all; (4) attach the lease, with the authority checks repeated under locks. Die anywhere,
and the recovery falls due, finds the sandbox, and has it torn down. Whether the attach or the recovery owns the sandbox
is decided by the operation's row lock: both take it and require `pending`, so exactly one of them makes the lease.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from uuid import UUID, uuid4

from django.db import IntegrityError

from leases import bounds, creating, credentials, journal, planning, reuse
from leases.calling import open_recorded
from leases.connections import LOST, persistently
from leases.controllers import Controller
from leases.credentials import SecretUnavailable
from leases.errors import AcquireRefused, LeaseError, NotFound
from leases.models import Credential, Environment, Lease, Operation, ProviderAccount, Run
from leases.patience import Patience
from leases.planning import Request
from leases.reuse import CannotResume, Disturbed
from providers.contract import ErrorKind, ProviderError
from providers.registry import AnyProvider, ConfigurationError, ProviderUnavailable, load, validate

log = logging.getLogger(__name__)


def acquire(  # noqa: PLR0913 - all but two have defaults, and none may be taken for another
    environment_id: UUID,
    *,
    company_id: UUID,
    run_id: UUID | None = None,
    workspace: str = "",
    agent: str = "",
    request_key: str | None = None,
    setup: Sequence[Sequence[str]] = (),
    ends_in: float | None = None,
    actor: str = "api",
    controller: Controller | None = None,
    patience: Patience | None = None,
) -> Lease:
    """Return an active lease of a running sandbox: the stopped one that this run may have again, or a new one.

    Blocks for as long as the provider needs (creating: at most `bounds.CREATE` seconds and `bounds.READY` until it
    runs; starting: `bounds.RESUME`). `workspace` and `agent` narrow what is used again, as the environment's policy
    says. `setup` are commands, each a program and its arguments, that must succeed in a new sandbox before anybody gets
    it. A `request_key` names the caller's request: the same one again returns the same lease and asks no provider.
    Without a run the lease is ad hoc: always ephemeral (domain I-12), and released by itself after `ends_in` seconds
    (an hour unless said). With a `controller` only while that one holds the run, at the end too: refused with the codes
    of `renew`. Must not be called inside a transaction: the journal has to be committed before the provider is asked
    (`RuntimeError`).

    Raises `NotFound`, `AcquireRefused` (nothing was asked), `AcquireInProgress` (the same request is being served),
    `AcquireFailed` (the provider proved that nothing was allocated), `AcquireUncertain` (its answer was lost; the
    operation owns what may exist), `AcquireRejected` (it came to be and cannot be had; it is being destroyed),
    `ResumeFailed` (the sandbox to be used again could not be started now; it is kept).
    """
    request = Request(
        environment_id, company_id, run_id, workspace, agent, request_key, setup, ends_in, actor, controller
    )
    if served := journal.served_before(request):
        return served
    patience = patience or Patience()
    environment = _environment(request)
    credential = environment.account.credential
    if credential is not None and credential.status != Credential.Status.ACTIVE:
        raise AcquireRefused(f"the credential {credential.name} is {credential.status}", code="credential_inactive")
    planned = planning.creation(environment, request)
    try:
        provider = open_recorded(planned)
        config = validate(load(planned.provider).Config, planned.config)
    except (ProviderUnavailable, SecretUnavailable, ConfigurationError) as error:
        raise AcquireRefused(str(error)) from error
    planned.account_identity = attest(environment.account, provider, endpoint=planned.endpoint)
    if planned.credential_uuid is not None and provider.secret is not None:
        planned.credential_digest = credentials.learned(planned.credential_uuid, provider.secret)
    planned.fingerprint = planning.fingerprint(planned)
    try:
        operation, journalled_at = _journal(planned, request, patience)
    except _Duplicate:
        if served := journal.served_before(request):
            return served
        raise
    try:
        if operation.kind == Operation.Kind.START:
            try:
                return reuse.resume(operation, provider, config, request, patience=patience)
            except CannotResume as why:
                cannot = why
            journalled_at = patience.clock()
            persistently(lambda: reuse.replace(operation, planned, request, cannot))
            operation = planned
        return creating.create(operation, provider, config, request, journalled_at=journalled_at, patience=patience)
    except LeaseError:
        raise
    except BaseException:
        # Ctrl-C, an exit, a fault of ours: whatever the provider was asked for stays owned, and is looked for now.
        _abandon(operation)
        raise


class _Duplicate(Exception):
    """Another call with the same request key was journalled first."""


def _journal(planned: Operation, request: Request, patience: Patience) -> tuple[Operation, float]:
    """Commit the start of a sandbox that may be used again, or else the creation `planned`.

    Returns the operation with the moment before its commit, by the patience's clock. Waits while an attempt may still
    be at work on that sandbox (design 2.2: no start on a resource while one is).
    """
    start_id = uuid4()

    def decide(_: Run | None) -> tuple[Operation, float]:
        source = reuse.choose(planned, actor=request.actor)
        if source is None:
            return planned, bounds.CREATE + bounds.CREATE_MARGIN
        return planning.start(planned, source, start_id), bounds.RESUME + bounds.START + bounds.CREATE_MARGIN

    patience.begin(bounds.RESUME)
    while True:
        at = patience.clock()
        try:
            operation = persistently(lambda: journal.begin(request, decide, (planned.pk, start_id)))
        except Disturbed:
            if patience.is_over:
                raise AcquireRefused(
                    "the sandbox to be used again is still being worked on; try again", code=ErrorKind.BUSY.value
                ) from None
            patience.wait()
        except IntegrityError as error:
            if (
                request.key is None
                or not Operation.objects.filter(company_id=request.company_id, request_key=request.key).exists()
            ):
                raise
            raise _Duplicate from error
        else:
            # Counted from before the commit, as the recovery counts: who was suspended since does not start it late.
            patience.begin(bounds.RESUME, since=at)
            return operation, at


def _abandon(operation: Operation) -> None:
    try:
        # Whoever leaves in the middle of a call knows nothing about its end.
        journal.give_up(operation, "operation.abandoned", under_way=True)
    except LOST as error:
        # Its recovery is due behind the call's bound in any case.
        log.warning("operation %s could not be given up at once (%s)", operation.pk, type(error).__name__)


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


def _environment(request: Request) -> Environment:
    try:
        return Environment.objects.select_related("account", "account__credential", "company").get(
            pk=request.environment_id, company_id=request.company_id
        )
    except Environment.DoesNotExist:
        raise NotFound(f"no environment {request.environment_id} in this company") from None
