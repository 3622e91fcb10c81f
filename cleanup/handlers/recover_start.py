"""Recovery of a start nobody answered for: look at the sandbox, and let what is seen decide.

It never repeats the start, and only looks, but for a recovery of files whose attempt died: what is then seen neither to
run nor to be stopped is stopped first, as that attempt would have done (domain 9.2). Seen running, the start was done:
the epoch rises and the sandbox is stopped again, its files kept. Seen stopped when no call of the start can be under
way any more, the start is withdrawn, and the receipt from before it is proof again (design 4, *Epochs*); never a
receipt of a suspension, since resuming goes on with the old processes. The attach of a living caller and this exclude
each other by the locks of lease and operation.
"""

from __future__ import annotations

from collections.abc import Generator
from random import Random
from typing import Any

from django.db import transaction
from django.db.models import F

from cleanup import backoff, evidence, sightings
from cleanup.claims import Claim, fenced, finish_attempt
from cleanup.work import (
    Call,
    Context,
    Done,
    Failed,
    InTransition,
    NeedsOperator,
    NotSeen,
    Outcome,
    identify,
    is_foreign,
)
from leases import audit, bounds, journal, recovering, reuse
from leases.models import Attempt, Lease, Obligation, Operation, Receipt
from leases.planning import MARK_OPERATION
from providers.contract import Busy, ErrorKind, Gone, ProviderError, Resource, Running, Sighting, Stopped
from providers.registry import AnyProvider


def recover_start(claim: Claim, context: Context) -> Generator[Call, Any, Outcome]:
    """Work on one start whose answer was lost, whose caller died, or that was stopped."""
    operation = Operation.objects.get(pk=claim.operation)
    provider = yield from context.open_recorded(operation)
    if (yield identify(provider)) != operation.account_identity:
        return Failed(ErrorKind.IDENTITY, "another account answers than the one recorded on the operation")
    # Asked before the look: what is seen stopped after it stays so, unless somebody else starts it.
    calls_were_over = reuse.calls_are_over(operation)
    resource_id = operation.resource_id
    sighting = yield Call("inspect", lambda: provider.inspect(resource_id, within=bounds.INSPECT), bounds.INSPECT)
    match sighting:
        case Gone():
            return _stop_again(claim, None, reason="not_found")
        case Running() | Stopped() | Busy() if sighting.resource.resource_id != resource_id:
            raise ProviderError(ErrorKind.PROTOCOL, "inspect answered about another sandbox")
        case Running() | Stopped() | Busy() if is_foreign(
            sighting.resource, installation=context.installation, creation=operation.marks.get(MARK_OPERATION, "")
        ):
            return NeedsOperator(Obligation.Quiet.FOREIGN_MARKS)
        case Busy(transition=transition):
            return InTransition(transition or "transition")
        case Running(resource=resource):
            return _stop_again(claim, resource, reason="start_recovered")
        case Stopped() if not calls_were_over:
            Operation.objects.filter(pk=operation.pk).update(looks=F("looks") + 1)
            return NotSeen(backoff.busy(operation.looks + 1, Random()))  # noqa: S311 - jitter
        case Stopped():
            return _withdraw(claim, sighting)
        case _ if operation.recovery_id is None:
            return _stop_again(claim, None, reason="start_unclear")
        case _ if not calls_were_over:
            return NotSeen(backoff.busy(1, Random()))  # noqa: S311 - jitter
        case _:
            return (yield from _stop_unclear(claim, context, provider, resource_id))


def _withdraw(claim: Claim, sighting: Sighting | None, *, may_run: bool = False) -> Outcome:
    """The start was not done, or nobody can tell: the receipt from before it is proof again, where it still is one."""
    with transaction.atomic():
        locked = _locked(claim)
        if locked is None:
            return Done(proven=False)
        source, operation = locked
        finish_attempt(claim, Attempt.Outcome.PROVEN)
        if operation.recovery_id is not None and isinstance(sighting, Stopped):
            evidence.record(claim, source, Receipt.Evidence.STOPPED, epoch=source.epoch, ended=sighting.ended)
        recovering.withdraw(source, operation, may_run=may_run, reason="start_recovered")
    return Done(proven=True)


def _stop_unclear(
    claim: Claim, context: Context, provider: AnyProvider, resource_id: str
) -> Generator[Call, Any, Outcome]:
    """Stop what a recovery of files started, and nobody can tell whether it runs; then settle what is seen of it."""
    at = context.clock()
    with transaction.atomic():
        source, operation = journal.locked_start(Operation(pk=claim.operation))
        row = fenced(claim)
        if operation.state != Operation.State.PENDING or row is None:
            return Done(proven=False)
        evidence.note(claim, row, "stop", epoch=source.epoch)
    claim.renewed_at = max(claim.renewed_at, at)

    def stop() -> None:
        # Whoever settles the start meanwhile expects no call of this attempt any more by then (`reuse.is_disturbed`).
        if context.clock() > at + bounds.SEND_MARGIN:
            raise ProviderError(ErrorKind.TIMEOUT, "the stop was not sent in time")
        provider.stop(resource_id, grace=bounds.STOP_GRACE, within=bounds.STOP)

    sighting: Sighting | None = None
    try:
        yield Call("stop", stop, bounds.STOP, changes=True)
        sighting = sightings.about(source, (yield sightings.inspect(provider, source)))
    except ProviderError:
        sighting = None  # it was not stopped, or not seen to be: the earlier receipt stands, and somebody watches
    if isinstance(sighting, Running):
        return _stop_again(claim, sighting.resource, reason="start_recovered")
    return _withdraw(claim, sighting, may_run=not isinstance(sighting, Stopped))


def _stop_again(claim: Claim, resource: Resource | None, *, reason: str) -> Outcome:
    with transaction.atomic():
        locked = _locked(claim)
        if locked is None:
            return Done(proven=False)
        source, operation = locked
        finish_attempt(claim, Attempt.Outcome.HANDED_OVER)
        reuse.stop_again(operation, source, resource, reason=reason, actor=audit.SYSTEM)
        audit.record("operation.recovered", operation, company_id=operation.company_id, lease=str(source.pk))
    return Done(proven=True)


def _locked(claim: Claim) -> tuple[Lease, Operation] | None:
    """Lock the lease, the operation and the row, if the operation is still pending and the row this attempt's."""
    source, operation = journal.locked_start(Operation(pk=claim.operation))
    if operation.state != Operation.State.PENDING or fenced(claim) is None:
        return None
    return source, operation
