"""Creating a sandbox for a journalled operation: ask once, save the id first of all, wait, set it up, attach.

None of the short transactions spans a call. While this process lives it keeps the recovery off the operation, one call
at a time; die anywhere, and the recovery falls due behind the bound of the call that was under way.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from uuid import uuid4

from django.db import transaction
from django.db.models.functions import Now

from leases import audit, bounds, companies, journal, transitions
from leases.connections import persistently
from leases.errors import AcquireFailed, AcquireRejected, AcquireUncertain
from leases.models import BridgeActivity, Lease, Operation
from leases.patience import TRANSIENT, Patience
from leases.planning import Request
from providers.contract import (
    Busy,
    Command,
    Created,
    ErrorKind,
    Gone,
    ProviderError,
    Resource,
    Running,
    Stopped,
    Unknown,
    usable,
)
from providers.registry import AnyProvider

_LOST_ANSWER = frozenset({ErrorKind.CONNECTION, ErrorKind.SERVER})

_REFUSABLE = frozenset({Operation.State.PENDING, Operation.State.RESOLVED})
"""States in which a creation without an id is one of which nothing was allocated, or is resolved as that."""

_MISSING_LOOKS = 10
"""Looks in a row that may miss a sandbox that was just created: a read may be older than the creation."""


class _NotUsable(Exception):
    """The new sandbox exists and cannot be given to its caller."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


def create(
    operation: Operation,
    provider: AnyProvider,
    config: Any,
    request: Request,
    *,
    journalled_at: float,
    patience: Patience,
) -> Lease:
    """Create the sandbox of a journalled operation and return its active lease.

    `journalled_at` is the moment before the journal's commit, by the patience's clock. Raises what
    `leases.acquisition.acquire` says of a creation.
    """
    if patience.clock() - journalled_at > bounds.CREATE_MARGIN:
        # The process was suspended: the recovery may have looked already, and must not be outrun by a late create.
        late = ProviderError(ErrorKind.NOT_READY, "too late to be sent")
        raise persistently(lambda: _not_created(operation, late))
    try:
        created = _ask(operation, provider, config, patience)
        resource = usable(created.resource)
    except ProviderError as error:
        failure = error
        raise persistently(lambda: _not_created(operation, failure)) from error
    # Each is safe to repeat after a commit whose reply was lost: the id is written once, the operation attached once.
    persistently(lambda: journal.save_answered_id(operation, resource.resource_id))
    try:
        if not created.ready:
            resource = _until_it_runs(operation, provider, resource, patience)
        for argv in request.setup:
            _set_up(operation, provider, resource, argv)
    except (_NotUsable, journal.TakenOver) as why:
        problem, code = str(why), getattr(why, "code", AcquireRejected.code)
        persistently(lambda: _give_back(operation, resource.resource_id, code, request.actor))
        raise AcquireRejected(f"the new sandbox cannot be used: {problem}; it is being destroyed", code=code) from why
    ready = resource
    return persistently(lambda: _attach(operation, ready, request))


def _ask(operation: Operation, provider: AnyProvider, config: Any, patience: Patience) -> Created:
    """Ask for the sandbox; once more where the answer was lost and the provider answers a repeated create the same.

    Only this living caller may repeat it, within the bound that the recovery waits for. A recovery never does. Whatever
    a repeat is refused with proves nothing about the first one, whose answer stays lost.
    """
    until = patience.clock() + bounds.CREATE
    try:
        return provider.create(operation.name, operation.marks, config, within=bounds.CREATE)
    except ProviderError as error:
        left = until - patience.clock()
        if not provider.capabilities.idempotent_create or error.kind not in _LOST_ANSWER or left < 1.0:
            raise
        lost = error
    try:
        persistently(lambda: journal.keep_off_recovery(operation, left + bounds.CREATE_MARGIN))
    except journal.TakenOver:
        raise lost from None
    left = until - patience.clock()
    try:
        return provider.create(operation.name, operation.marks, config, within=left)
    except ProviderError:
        raise lost from None


def _not_created(operation: Operation, error: ProviderError) -> AcquireFailed | AcquireUncertain:
    """Decide what a failed create leaves owed. Only proof by the recorded contract resolves the operation."""
    with transaction.atomic():
        locked = journal.locked(operation)
        # The name is this operation's own: one that is taken was taken by a create of ours whose reply was lost.
        unsent = error.kind == ErrorKind.NOT_READY
        proof = error.nothing_allocated and error.kind in locked.proves_no_allocation
        refused = proof and error.kind != ErrorKind.NAME_TAKEN
        if (unsent or refused) and not locked.resource_id and locked.state in _REFUSABLE:
            if locked.state == Operation.State.PENDING:  # else the reply of this very commit was lost
                transitions.refuse_operation(locked)
                audit.record("operation.refused", locked, company_id=locked.company_id, kind=error.kind.value)
            return AcquireFailed(f"the provider refused to create a sandbox: {error}", code=error.kind.value)
        journal.give_up(locked, "operation.answer_lost", under_way=True, kind=error.kind.value)
    return AcquireUncertain(
        f"the provider did not say whether a sandbox was created ({error}); what exists will be found and destroyed",
        code=error.kind.value,
    )


def _until_it_runs(operation: Operation, provider: AnyProvider, resource: Resource, patience: Patience) -> Resource:
    """Look at a sandbox that is still starting until it runs."""
    patience.begin(bounds.READY)
    last, missing = "it did not start in time", 0
    while not patience.is_over:
        persistently(lambda: journal.keep_off_recovery(operation, bounds.INSPECT + bounds.CREATE_MARGIN))
        try:
            match provider.inspect(resource.resource_id, within=bounds.INSPECT):
                case Running(resource=seen):
                    return seen
                case Busy():
                    missing = 0
                case Gone(stated=stated):
                    missing += 1
                    if stated or missing > _MISSING_LOOKS:
                        raise _NotUsable("it vanished before anybody used it", "start_failed")
                case Unknown(reason=why):
                    raise _NotUsable(why or "its state is not clear", "start_failed")
                case Stopped():
                    raise _NotUsable("it stopped before anybody used it", "start_failed")
        except ProviderError as error:
            if error.kind not in TRANSIENT:
                raise _NotUsable(str(error), error.kind.value) from error
            last = str(error)
        patience.wait()
    raise _NotUsable(last, ErrorKind.TIMEOUT.value)


def _set_up(operation: Operation, provider: AnyProvider, resource: Resource, argv: Sequence[str]) -> None:
    """Run one set-up command. It is admitted as work of the startup, so its end and result outlive this process.

    A Stop waits for none of it: it takes the operation over, and the command fails with its sandbox.
    """
    within = bounds.SETUP_COMMAND + bounds.EXECUTE_OVERHEAD
    activity_id = uuid4()

    def admit() -> None:
        with transaction.atomic():
            journal.keep_off_recovery(operation, within + bounds.CREATE_MARGIN)
            deadline = Now() + timedelta(seconds=within)
            if not BridgeActivity.objects.filter(pk=activity_id).update(deadline=deadline):
                BridgeActivity.objects.create(
                    id=activity_id, company_id=operation.company_id, operation=operation, deadline=deadline
                )

    persistently(admit)  # its own row again where the reply of the commit was lost
    outcome, exit_code, kind = BridgeActivity.Outcome.FAILED, None, ""
    try:
        command = Command(tuple(argv), timeout=bounds.SETUP_COMMAND)
        execution = provider.execute(resource.resource_id, command, within=within)
        outcome, exit_code = BridgeActivity.Outcome.COMPLETED, execution.exit_code
    except ProviderError as error:
        kind = error.kind.value
        raise _NotUsable(f"its set-up could not be run: {error}", kind) from error
    finally:
        ended = BridgeActivity.objects.filter(pk=activity_id, ended_at__isnull=True)
        persistently(lambda: ended.update(ended_at=Now(), outcome=outcome, exit_code=exit_code, error_kind=kind))
    if exit_code != 0:
        how = "was killed at its timeout" if execution.timed_out else f"ended with {exit_code}"
        raise _NotUsable(f"its set-up {how}", "setup_failed")


def _give_back(operation: Operation, resource_id: str, reason: str, actor: str) -> None:
    """Own the teardown of a sandbox that is no use to its caller, unless the recovery owns it. Safe to repeat."""
    with transaction.atomic():
        locked = journal.locked(operation)
        if locked.state in Operation.UNOWNED and not journal.is_owned(locked, resource_id):
            transitions.own_for_teardown(locked, resource_id=resource_id, reason=reason, actor=actor)


def _attach(operation: Operation, resource: Resource, request: Request) -> Lease:
    actor = request.actor
    resource_id = resource.resource_id
    with transaction.atomic():
        companies.hold(operation.company_id)
        run = journal.live_run(operation.run_uuid, operation.company_id)
        locked = journal.locked(operation)
        if attached := journal.already_attached(locked, resource_id):
            return attached
        if journal.is_owned(locked, resource_id):
            raise AcquireRejected(
                "the provider answered with a sandbox that a live lease owns; a person must decide whose it is",
                code="identity_conflict",
            )
        problem = journal.why_not(locked, run, request.controller)
        if problem is None:
            return transitions.attach(
                locked, resource_id=resource_id, expires_at=resource.expires_at, as_of=resource.as_of, actor=actor
            )
        if locked.lease_id is None and locked.state in Operation.UNOWNED:
            # Also what an operator had given up: late evidence takes it back into ordinary teardown.
            transitions.own_for_teardown(locked, resource_id=resource_id, reason="acquire_rejected", actor=actor)
    raise AcquireRejected(f"the new sandbox may not be used: {problem}; it is being destroyed", code=problem.code)
