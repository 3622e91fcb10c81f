"""Recovery of a creation nobody answered for: find the sandbox, and give it an owner for its teardown.

It only looks. It never repeats a create, and what it finds authorises nothing and proves no stop: the ordinary teardown
follows. The attach of a living acquire and this hand-over exclude each other by the operation's row lock (see
`leases.acquisition`). Absence by name proves nothing; after the provider's creation window a person is asked.

Every reason for a person is looked at again under the locks of the company and the operation when it is written, so an
id that comes late, or a company that is reopened, is never slept through.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from datetime import timedelta
from random import Random
from typing import Any

from django.db import transaction
from django.db.models import F
from django.db.models.functions import Now

from cleanup import backoff
from cleanup.claims import Claim, fenced
from cleanup.work import Call, Context, Done, Failed, NeedsOperator, NotSeen, Outcome, identify
from leases import audit, bounds, companies, transitions
from leases.credentials import CredentialUnusable
from leases.journal import is_owned, save_resource_id
from leases.models import Obligation, Operation
from leases.planning import MARK_OPERATION
from providers.contract import MARK_INSTALLATION, ErrorKind, ProviderError, Resource, usable
from providers.registry import ConfigurationError, ProviderUnavailable, load

Quiet = Obligation.Quiet


def recover_creation(claim: Claim, context: Context) -> Generator[Call, Any, Outcome]:
    """Work on one operation whose reply was lost, or whose process died."""
    operation = Operation.objects.get(pk=claim.operation)
    try:
        outcome = yield from _recover(claim, operation, context)
    except CredentialUnusable as error:
        outcome = NeedsOperator(error.why, error.still)
    except ConfigurationError:
        outcome = NeedsOperator(Quiet.INVALID_SNAPSHOT)
    if isinstance(outcome, NeedsOperator):
        return replace(outcome, still=_still(operation, outcome))
    return outcome


def _recover(claim: Claim, operation: Operation, context: Context) -> Generator[Call, Any, Outcome]:
    if companies.is_closed(operation.company_id):
        return NeedsOperator(Quiet.COMPANY_CLOSED)
    if operation.resource_id:
        return _own(claim, operation.resource_id)
    if not operation.finds_by_name:
        return NeedsOperator(Quiet.NO_LOOKUP)
    if load(operation.provider).binding != operation.binding:
        # Another worker may still have the adapter that wrote the name and the marks.
        raise ProviderUnavailable(f"the adapter of {operation.provider} here is not the one that asked for the sandbox")
    try:
        outcome = yield from _look(claim, operation, context)
    except ProviderError:
        if companies.is_closed(operation.company_id):
            return NeedsOperator(Quiet.COMPANY_CLOSED)
        raise
    if isinstance(outcome, NotSeen) and companies.is_closed(operation.company_id):
        return NeedsOperator(Quiet.COMPANY_CLOSED)
    return outcome


def _look(claim: Claim, operation: Operation, context: Context) -> Generator[Call, Any, Outcome]:
    provider = yield from context.open_recorded(operation, expected_digest=operation.credential_digest)
    if (yield identify(provider)) != operation.account_identity:
        return Failed(ErrorKind.IDENTITY, "another account answers than the one recorded on the operation")
    found: Resource | None = yield Call(
        "find", lambda: provider.find(operation.name, operation.marks, within=bounds.FIND), bounds.FIND
    )
    if found is None:
        return _not_found(operation)
    if not _is_ours(usable(found), operation, context.installation):
        return NeedsOperator(Quiet.FOREIGN_MARKS)
    save_resource_id(operation, found.resource_id)
    return _own(claim, found.resource_id)


def _own(claim: Claim, resource_id: str) -> Outcome:
    """Make the lease that owes the teardown: exactly one, and none for a company that is closed by then."""
    with transaction.atomic():
        if companies.hold(claim.company):
            return NeedsOperator(Quiet.COMPANY_CLOSED)
        operation = Operation.objects.select_for_update(no_key=True).get(pk=claim.operation)
        if operation.state != Operation.State.PENDING or fenced(claim) is None:
            return Done(proven=False)
        if is_owned(operation, resource_id):
            return NeedsOperator(Quiet.IDENTITY_CONFLICT)
        lease = transitions.own_for_teardown(
            operation, resource_id=resource_id, reason="creation_recovered", actor=audit.SYSTEM
        )
        audit.record("operation.recovered", operation, company_id=operation.company_id, lease=str(lease.pk))
    return Done(proven=True)


def _not_found(operation: Operation) -> Outcome:
    Operation.objects.filter(pk=operation.pk).update(looks=F("looks") + 1)
    window = timedelta(seconds=bounds.CREATE + operation.creation_window)
    if Operation.objects.filter(pk=operation.pk, created_at__lte=Now() - window).exists():
        return NeedsOperator(Quiet.CREATION_NOT_FOUND)
    return NotSeen(backoff.busy(operation.looks + 1, Random()))  # noqa: S311 - jitter


def _is_ours(found: Resource, operation: Operation, installation: str) -> bool:
    return found.marks.get(MARK_INSTALLATION) == installation and found.marks.get(MARK_OPERATION) == str(operation.pk)


def _still(operation: Operation, outcome: NeedsOperator) -> Callable[[], bool]:
    """Return the check that nothing was learned meanwhile which this attempt did not know.

    Late evidence wakes a row that *is* quiet (trigger `resource_learned_wakes_recovery`). One that is about to be must
    see it here: whoever saves the id waits for the operation's lock, and then finds the row quiet.
    """

    def still() -> bool:
        closed = companies.hold(operation.company_id)
        if closed != (outcome.why == Quiet.COMPANY_CLOSED):
            return False
        if outcome.still is not None and not outcome.still():
            return False
        known = Operation.objects.select_for_update(no_key=True).values_list("resource_id", flat=True)
        return bool(known.get(pk=operation.pk) == operation.resource_id)

    return still
