"""Recovery of a creation nobody answered for: find the sandbox, and give it an owner for its teardown.

It only looks. It never repeats a create, and what it finds authorises nothing and proves no stop: the ordinary teardown
follows. The attach of a living acquire and this hand-over exclude each other by the operation's row lock (see
`leases.acquisition`). Absence by name proves nothing; after the provider's creation window a person is asked.
"""

from __future__ import annotations

from collections.abc import Generator
from datetime import timedelta
from random import Random
from typing import Any

from django.db import transaction
from django.db.models import F
from django.db.models.functions import Now

from cleanup import backoff
from cleanup.claims import Claim, fenced
from cleanup.work import Call, Context, Done, Failed, NeedsOperator, NotSeen, Outcome, identify
from leases import audit, bounds, transitions
from leases.acquisition import is_owned, save_resource_id
from leases.models import Obligation, Operation
from providers.contract import MARK_INSTALLATION, MARK_PREFIX, ErrorKind, Resource, usable


def recover_creation(claim: Claim, context: Context) -> Generator[Call, Any, Outcome]:
    """Work on one operation whose reply was lost, or whose process died."""
    operation = Operation.objects.get(pk=claim.operation)
    if operation.resource_id:
        return _own(claim, operation.resource_id)
    if not operation.finds_by_name:
        return NeedsOperator(Obligation.Quiet.NO_LOOKUP)
    provider = context.open_recorded(operation)
    if (yield identify(provider)) != operation.account_identity:
        return Failed(ErrorKind.IDENTITY, "another account answers than the one recorded on the operation")
    found: Resource | None = yield Call(
        "find", lambda: provider.find(operation.name, operation.marks, within=bounds.FIND), bounds.FIND
    )
    if found is None:
        return _not_found(operation)
    if not _is_ours(usable(found), operation, context.installation):
        return NeedsOperator(Obligation.Quiet.FOREIGN_MARKS)
    save_resource_id(operation, found.resource_id)
    return _own(claim, found.resource_id)


def _own(claim: Claim, resource_id: str) -> Outcome:
    with transaction.atomic():
        operation = Operation.objects.select_for_update(no_key=True).get(pk=claim.operation)
        if operation.state != Operation.State.PENDING or fenced(claim) is None:
            return Done(proven=False)
        if is_owned(operation, resource_id):
            return NeedsOperator(Obligation.Quiet.IDENTITY_CONFLICT)
        lease = transitions.own_for_teardown(
            operation, resource_id=resource_id, reason="creation_recovered", actor=audit.SYSTEM
        )
        audit.record("operation.recovered", operation, company_id=operation.company_id, lease=str(lease.pk))
    return Done(proven=True)


def _not_found(operation: Operation) -> Outcome:
    Operation.objects.filter(pk=operation.pk).update(looks=F("looks") + 1)
    window = timedelta(seconds=bounds.CREATE + operation.creation_window)
    if Operation.objects.filter(pk=operation.pk, created_at__lte=Now() - window).exists():
        return NeedsOperator(Obligation.Quiet.CREATION_NOT_FOUND)
    return NotSeen(backoff.busy(operation.looks + 1, Random()))  # noqa: S311 - jitter


def _is_ours(found: Resource, operation: Operation, installation: str) -> bool:
    return found.marks.get(MARK_INSTALLATION) == installation and found.marks.get(f"{MARK_PREFIX}operation") == str(
        operation.pk
    )
