"""Recovery of a start nobody answered for: look at the sandbox, and let what is seen decide.

It only looks, and never repeats the start. Seen running, the start was done: the epoch rises and the sandbox is stopped
again, its files kept. Seen stopped when no call of the start can be under way any more, the start is withdrawn, and the
receipt from before it is proof again (design 4, *Epochs*); never a receipt of a suspension, since resuming goes on with
the old processes. The attach of a living caller and this exclude each other by the locks of lease and operation.
"""

from __future__ import annotations

from collections.abc import Generator
from random import Random
from typing import Any

from django.db import transaction
from django.db.models import F

from cleanup import backoff
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
from leases import audit, bounds, journal, reuse, transitions
from leases.models import Attempt, Lease, Obligation, Operation, Receipt
from leases.planning import MARK_OPERATION
from providers.contract import Busy, ErrorKind, Gone, ProviderError, Resource, Running, Stopped


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
            return _withdraw(claim)
        case _:
            return _stop_again(claim, None, reason="start_unclear")


def _withdraw(claim: Claim) -> Outcome:
    with transaction.atomic():
        locked = _locked(claim)
        if locked is None:
            return Done(proven=False)
        source, operation = locked
        receipts = source.receipts.filter(epoch=source.epoch)
        if not receipts.exclude(ended=Receipt.Ended.SUSPENDED).exists():
            reuse.stop_again(operation, source, None, reason="start_recovered", actor=audit.SYSTEM)
        else:
            transitions.refuse_operation(operation)
            audit.record("operation.withdrawn", operation, company_id=operation.company_id, lease=str(source.pk))
        finish_attempt(claim, Attempt.Outcome.PROVEN)
    return Done(proven=True)


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
