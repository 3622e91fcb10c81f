"""Sandboxes at a provider beside our rows: whose is it, and how does a leak get an owner that destroys it.

`judge` says what a sandbox is, from what the rows say about it; in doubt it is not ours to touch. A sandbox that a
lease in use or kept knows, or a creation that is not answered or may still appear, is never a leak, whatever its marks
say. `destroy` never deletes: it gives a confirmed leak a lease that owes its teardown, which the ordinary engine pays,
with its fences, holds and receipts. Listing accounts is the business of `cleanup.inventory`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from types import SimpleNamespace
from typing import cast
from uuid import UUID, uuid4, uuid5

from django.db import IntegrityError, OperationalError, connection, transaction
from django.db.models import Q
from django.db.models.functions import Now
from psycopg.errors import DeadlockDetected, LockNotAvailable

from leases import arguments, audit, bounds, companies, deciding, transitions, trust
from leases.calling import Snapshot, open_recorded
from leases.clock import database_now
from leases.credentials import SecretUnavailable
from leases.errors import DecisionRefused, NotFound
from leases.models import (
    Environment,
    Installation,
    InventoryFinding,
    Lease,
    Obligation,
    Operation,
    ProviderAccount,
    Run,
)
from leases.models.environments import Policy
from leases.planning import MARK_OPERATION, name_of
from providers.contract import MARK_INSTALLATION, MARK_PREFIX, ErrorKind, Gone, ProviderError, Resource, is_name
from providers.registry import AnyProvider, ConfigurationError, ProviderUnavailable, load

Verdict = InventoryFinding.Verdict

NEEDED = (*Lease.LIVE, Lease.State.RELEASED)
"""States in which a lease has, or should have, a sandbox."""

_MARK_COMPANY, _MARK_ENVIRONMENT, _MARK_LEASE, _MARK_RUN = (
    MARK_PREFIX + name for name in ("company", "environment", "lease", "run")
)
_BATCH = 100
"""Sandboxes looked up at once: of longer lists PostgreSQL does not see that a partial index covers them."""


class Standing(StrEnum):
    """What a sandbox is that is neither a leak nor for a person."""

    ALIVE = "alive"
    FOREIGN = "foreign"
    UNMARKED = "unmarked"


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of ours that name one sandbox, by its id, its name or its marks."""

    leases: tuple[Lease, ...] = ()
    """By its id, oldest first."""
    operations: tuple[Operation, ...] = ()
    marked: Lease | None = None
    """The lease that its mark names."""
    creation_of: Mapping[UUID, str] = field(default_factory=dict)
    """The mark of the creation that each of these leases came from."""


@dataclass(frozen=True, slots=True)
class Judgement:
    verdict: Verdict | Standing
    lease: Lease | None = None
    """Of a settled one: the lease whose sandbox it was."""
    operation: Operation | None = None
    """Of an unknown one: the creation that it is of, where there is a row of it."""


def judge(resource: Resource, rows: Rows, *, installation: str, now: datetime) -> Judgement:
    """Say what a listed sandbox is. Pure; the table is in `docs/inventory.md`."""
    if _is_alive(resource, rows, now):
        return Judgement(Standing.ALIVE)
    whose = resource.marks.get(MARK_INSTALLATION)
    if whose != installation:
        return Judgement(Standing.FOREIGN if whose else Standing.UNMARKED)
    creation = resource.marks.get(MARK_OPERATION, "")
    over = [lease for lease in rows.leases if lease.successor_id is None]
    if over:
        lease = over[-1]
        if creation and rows.creation_of.get(lease.pk, creation) != creation:
            return Judgement(Verdict.AMBIGUOUS)
        return Judgement(Verdict.SETTLED, lease=lease)
    of_it = [operation for operation in rows.operations if operation.resource_id == resource.resource_id]
    if of_it:
        return Judgement(Verdict.UNKNOWN, operation=of_it[-1])
    if any(operation.resource_id for operation in rows.operations) or rows.marked is not None:
        return Judgement(Verdict.AMBIGUOUS)
    # A fork has its parent's marks, and a name of its own; the parent's rows may be pruned by now.
    root = _uuid(creation)
    if root is None or resource.name != name_of(root):
        return Judgement(Verdict.AMBIGUOUS)
    return Judgement(Verdict.UNKNOWN, operation=rows.operations[-1] if rows.operations else None)


def _is_alive(resource: Resource, rows: Rows, now: datetime) -> bool:
    """Whether a lease in use or kept knows it, or an operation that is pending or may still bring it forth."""
    if any(lease.state in NEEDED for lease in rows.leases):
        return True
    return any(
        operation.resource_id in ("", resource.resource_id)
        and (operation.state == Operation.State.PENDING or now < window_end(operation))
        for operation in rows.operations
    )


def window_end(operation: Operation) -> datetime:
    """Return until when what an operation asked for may still appear."""
    return operation.created_at + timedelta(seconds=bounds.CREATE + operation.creation_window)


def rows_of(resources: Sequence[Resource], *, provider: str, lock: bool = False) -> dict[str, Rows]:
    """Return what our rows say about each of these sandboxes of one provider, by its id.

    Over all accounts: two of them may be one at the provider, and what any lease knows is protected. With `lock` the
    rows are locked, leases by id and then operations by id. Otherwise operations are read first: what one hands over to
    a lease meanwhile is seen at either.
    """
    found: dict[str, Rows] = {}
    for start in range(0, len(resources), _BATCH):
        batch = resources[start : start + _BATCH]
        if lock:
            leases = _leases(batch, provider, lock=True)
            operations = _operations(batch, provider, lock=True)
        else:
            operations = _operations(batch, provider, lock=False)
            leases = _leases(batch, provider, lock=False)
        found |= _joined(batch, leases, operations)
    return found


def _leases(batch: Sequence[Resource], provider: str, *, lock: bool) -> list[Lease]:
    marked = {pk for resource in batch if (pk := _uuid(resource.marks.get(_MARK_LEASE)))}
    rows = Lease.objects.filter(Q(resource_id__in=[r.resource_id for r in batch], provider=provider) | Q(pk__in=marked))
    if lock:
        rows = rows.select_for_update(no_key=True)
    return list(rows.order_by("pk"))


def _operations(batch: Sequence[Resource], provider: str, *, lock: bool) -> list[Operation]:
    accounts = list(ProviderAccount.objects.filter(provider=provider).values_list("pk", flat=True))
    pks = set()
    for resource in batch:
        if (creation := _uuid(resource.marks.get(MARK_OPERATION))) is not None:
            # A second sandbox of one creation has an operation of its own (`leases.journal`).
            pks |= {creation, uuid5(creation, resource.resource_id)}
    rows = Operation.objects.filter(
        Q(pk__in=pks)
        | Q(account_id__in=accounts, resource_id__in=[r.resource_id for r in batch])
        | Q(account_id__in=accounts, kind=Operation.Kind.CREATE, name__in=[r.name for r in batch if r.name])
    )
    if lock:
        rows = rows.select_for_update(no_key=True)
    return list(rows.order_by("pk"))


def _joined(batch: Sequence[Resource], leases: Sequence[Lease], operations: Sequence[Operation]) -> dict[str, Rows]:
    by_resource: dict[str, list[Lease]] = defaultdict(list)
    for lease in sorted(leases, key=lambda lease: lease.acquired_at):
        by_resource[lease.resource_id].append(lease)
    by_key: dict[str, list[Operation]] = defaultdict(list)
    for operation in sorted(operations, key=lambda operation: operation.created_at):
        for key in {operation.resource_id, operation.name, str(operation.pk)} - {""}:
            by_key[key].append(operation)
    creations = {
        lease_id: str((marks or {}).get(MARK_OPERATION, ""))
        for lease_id, marks in Operation.objects.filter(
            kind=Operation.Kind.CREATE, lease_id__in=[lease.pk for lease in leases]
        ).values_list("lease_id", "marks")
    }
    by_pk = {lease.pk: lease for lease in leases}
    found = {}
    for resource in batch:
        creation = _uuid(resource.marks.get(MARK_OPERATION))
        keys = {resource.resource_id, resource.name}
        if creation is not None:
            keys |= {str(creation), str(uuid5(creation, resource.resource_id))}
        of_it = {operation.pk: operation for key in keys for operation in by_key.get(key, ())}
        marked = by_pk.get(_uuid(resource.marks.get(_MARK_LEASE)) or UUID(int=0))
        found[resource.resource_id] = Rows(
            leases=tuple(by_resource.get(resource.resource_id, ())),
            operations=tuple(sorted(of_it.values(), key=lambda operation: operation.created_at)),
            marked=marked,
            creation_of={pk: creation for pk, creation in creations.items() if creation},
        )
    return found


def ours_alone(marks: Mapping[str, str]) -> dict[str, str]:
    """Return the marks that this system writes, bounded: what else a sandbox carries is nobody's business here."""
    return {name[:100]: value[:100] for name, value in marks.items() if name.startswith(MARK_PREFIX)}


def company_of(resource_marks: Mapping[str, str], accounts: Iterable[ProviderAccount]) -> ProviderAccount | None:
    """Return the account, of those that are one at the provider, whose company the marks name; None where none is."""
    company = _uuid(resource_marks.get(_MARK_COMPANY))
    return next((account for account in accounts if account.company_id == company), None)


# Giving a leak an owner


def destroy(finding_id: int, *, actor: str, reason: str, by_person: bool = False) -> Lease:
    """Give a confirmed finding an owner for its teardown, which destroys it; returns that lease, `pending_cleanup`.

    Asks the provider first (`bounds.IDENTIFY`, `INSPECT`, and `FIND` where the look shows no marks): the same account,
    the sandbox there, our marks and those of its creation. Then all rows that name it are read again under their locks,
    and must still say the same. Nothing is deleted here: the teardown is an obligation before any provider is called
    for a change, and a hold turns it into a stop.

    `by_person`: somebody decides about this very sandbox. Only then an ambiguous one, or one of a closed company, may
    be destroyed. Must not be called inside a transaction. Raises `NotFound`, and `DecisionRefused` with a sentence.
    """
    arguments.actor(actor)
    arguments.reason(reason, "a decision")
    if connection.in_atomic_block:
        raise RuntimeError("a provider is not asked inside a transaction")
    finding = InventoryFinding.objects.select_related("account__credential").filter(pk=finding_id).first()
    if finding is None:
        raise NotFound(f"no finding {finding_id}")
    require_destroyable(finding, by_person=by_person)
    resource, provider = _seen_again(finding)
    try:
        with transaction.atomic():
            return _own(finding, resource, provider, actor=actor, reason=reason, by_person=by_person)
    except IntegrityError as error:
        if getattr(getattr(error.__cause__, "diag", None), "constraint_name", "") == deciding.ONLY_OWNER:
            raise _changed("a lease of another creation became its owner meanwhile") from error
        raise
    except OperationalError as error:
        if isinstance(error.__cause__, LockNotAvailable | DeadlockDetected):
            raise DecisionRefused("somebody else is at work on its rows; try again", code="contended") from error
        raise


def require_calm(*, locked: bool = False) -> None:
    """Raise `DecisionRefused` while nothing may be destroyed on the strength of a listing (`trust.may_lapse`).

    Not while the database may be a restored or copied one, whose rows know too little; and not for one grace period
    after a failover.
    """
    if trust.may_lapse(locked=locked):
        return
    if trust.is_observing():
        raise DecisionRefused(
            "this database is observing: what it does not know may be somebody's; see manage.py trust_database",
            code="observing",
        )
    raise DecisionRefused(
        "the database was failed over a short while ago: no inventory destroys anything now", code="calm"
    )


def require_destroyable(finding: InventoryFinding, *, by_person: bool) -> None:
    """Raise `DecisionRefused` where a finding does not stand so that its sandbox may be destroyed."""
    require_calm()
    if not finding.is_open:
        raise DecisionRefused(f"the finding is over: {finding.get_resolution_display()}", code="not_owed")
    if finding.obligation_id is not None:
        raise DecisionRefused(f"lease {finding.lease_id} owns it already and owes its teardown", code="not_owed")
    allowed = (*InventoryFinding.AUTOMATIC, Verdict.AMBIGUOUS) if by_person else InventoryFinding.AUTOMATIC
    if finding.verdict not in allowed:
        raise DecisionRefused(f"a {finding.verdict} one is not destroyed like this", code="verdict")
    if finding.confirmed_at is None:
        raise DecisionRefused(
            "not confirmed yet: a complete listing that begins 15 min after the first one has to see the same",
            code="unconfirmed",
        )
    if finding.company_id is None:
        raise DecisionRefused("its marks name no company that has this account here", code="company")


def _seen_again(finding: InventoryFinding) -> tuple[Resource, AnyProvider]:
    provider = opened(finding.account)
    try:
        if provider.identify(within=bounds.IDENTIFY) != finding.account_identity:
            raise DecisionRefused("another account answers than the one that was listed", code=ErrorKind.IDENTITY.value)
        sighting = provider.inspect(finding.resource_id, within=bounds.INSPECT)
        if isinstance(sighting, Gone):
            raise DecisionRefused("the provider has no such sandbox any more", code="gone")
        if sighting.resource.resource_id != finding.resource_id:
            raise DecisionRefused("the provider answered about another sandbox", code=ErrorKind.PROTOCOL.value)
        deciding.require_marks(provider, sighting.resource, creation=finding.marks.get(MARK_OPERATION, ""))
    except ProviderError as error:
        raise DecisionRefused(f"the provider could not be asked: {error}", code=error.kind.value) from error
    # A look that shows no marks was vouched for by the list, by the marks of the finding.
    return Resource(finding.resource_id, sighting.resource.name or finding.resource_name, finding.marks), provider


def _own(
    finding: InventoryFinding,
    resource: Resource,
    provider: AnyProvider,
    *,
    actor: str,
    reason: str,
    by_person: bool,
) -> Lease:
    """Decide again under the locks, in their order: company, finding, leases by id, operations by id.

    Of two inventories that destroy at once the second waits for the finding and sees its teardown. An acquire that
    starts a kept sandbox, and a recovery that takes one over, hold the lease or the operation: either is seen here, or
    finds the lease made. What has no row to lock yet cannot carry these marks: its operation is committed before its
    sandbox can exist.
    """
    company_id = cast("UUID", finding.company_id)
    closed = companies.hold(company_id)
    if closed and not by_person:
        raise DecisionRefused("its company is closed: a person decides about its sandbox", code="company_closed")
    locked = InventoryFinding.objects.select_for_update(no_key=True).get(pk=finding.pk)
    require_destroyable(locked, by_person=by_person)
    rows = rows_of([resource], provider=finding.provider, lock=True)[resource.resource_id]
    judged = judge(resource, rows, installation=str(Installation.current().mark), now=database_now())
    if judged.verdict != locked.verdict:
        raise _changed(f"it is {judged.verdict} now")
    if judged.lease is not None:
        lease = judged.lease
        if lease.company_id != company_id:
            raise _changed("its lease is another company's")
        transitions.owe_again(lease, reason="leaked", actor=actor)
    else:
        operation = judged.operation
        if operation is None or not _may_own(operation):
            operation = _journal(locked, resource, provider, operation)
        elif operation.company_id != company_id:
            raise _changed("its creation is another company's")
        lease = transitions.own_for_teardown(operation, resource_id=resource.resource_id, reason="leaked", actor=actor)
        # Nobody's from the beginning: a run that is live, or a hold, makes a stop of its destruction.
        lease.orphaned_at = Now()
        lease.save(update_fields=["orphaned_at"])
    locked.lease = lease
    locked.obligation = lease.obligations.get(kind=Obligation.Kind.TEARDOWN, closed_at__isnull=True)
    locked.save(update_fields=["lease", "obligation"])
    # Last in the order of locks: a verdict on the database that comes now comes after this owner, or before it.
    require_calm(locked=True)
    audit.record(
        "inventory.owned",
        locked,
        company_id=company_id,
        actor=actor,
        reason=reason,
        verdict=locked.verdict,
        resource=resource.resource_id,
        lease=str(lease.pk),
    )
    return lease


def _may_own(operation: Operation) -> bool:
    """Return whether a creation may still be given a lease: one whose search an operator ended."""
    return operation.kind == Operation.Kind.CREATE and operation.state == Operation.State.UNVERIFIED


def _journal(
    finding: InventoryFinding, resource: Resource, provider: AnyProvider, creation: Operation | None
) -> Operation:
    """Write the operation that a sandbox without one should have had, from its marks and its account.

    Its id follows from the sandbox's, so that two cannot be made of one. It is handed over to a lease by the caller, in
    the same transaction, and was never pending for anybody to recover.
    """
    account = ProviderAccount.objects.select_related("credential").get(pk=finding.account_id)
    marks = finding.marks
    root = _uuid(marks.get(MARK_OPERATION)) or account.pk
    pk = uuid5(root, resource.resource_id)
    if Operation.objects.filter(pk=pk).exists():
        raise _changed("a creation of this very sandbox is journalled already")
    environment = creation.environment_uuid if creation else _uuid(marks.get(_MARK_ENVIRONMENT)) or UUID(int=0)
    row = Environment.objects.filter(pk=environment, company_id=account.company_id).first()
    taken = Operation.objects.filter(account=account, kind=Operation.Kind.CREATE, name=resource.name).exists()
    operation = Operation(
        id=pk,
        kind=Operation.Kind.CREATE,
        company_id=account.company_id,
        account=account,
        environment_uuid=environment,
        # A copy of a creation's sandbox is no business of the run that the creation was for.
        run_uuid=None if finding.verdict == Verdict.AMBIGUOUS else _run(marks, account.company_id),
        lease_uuid=uuid4(),
        name=resource.name if is_name(resource.name) and not taken else name_of(pk),
        marks=marks,
        provider=finding.provider,
        endpoint=account.endpoint,
        credential_uuid=account.credential_id,
        credential_reference=account.credential.reference if account.credential else "",
        account_identity=finding.account_identity,
        config={},
        policy=Policy.EPHEMERAL,
        hourly_price=row.hourly_price if row else None,
        finds_by_name=provider.capabilities.finds_by_name,
        creation_window=provider.capabilities.creation_window,
        binding=load(finding.provider).binding,
        resource_id=resource.resource_id,
        cancelled_at=Now(),
    )
    operation.save(force_insert=True)
    audit.record("operation.of_a_leak", operation, company_id=account.company_id, finding=finding.pk)
    return operation


def _run(marks: Mapping[str, str], company_id: UUID) -> UUID | None:
    run = _uuid(marks.get(_MARK_RUN))
    return run if run is not None and Run.objects.filter(pk=run, company_id=company_id).exists() else None


def opened(account: ProviderAccount) -> AnyProvider:
    """Return the adapter for an account as it is today. Raises `DecisionRefused` where it cannot be asked from here."""
    snapshot = SimpleNamespace(
        company_id=account.company_id,
        provider=account.provider,
        endpoint=account.endpoint,
        credential_uuid=account.credential_id,
        credential_reference=account.credential.reference if account.credential else "",
    )
    try:
        return open_recorded(cast("Snapshot", snapshot))
    except SecretUnavailable as error:
        raise DecisionRefused(
            f"it cannot be asked from this process: {error}", code="credential_unavailable"
        ) from error
    except ProviderUnavailable as error:
        raise DecisionRefused(f"it cannot be asked from this process: {error}", code="provider_unavailable") from error
    except ConfigurationError as error:
        raise DecisionRefused(f"its endpoint does not fit: {error}", code="invalid_snapshot") from error


def _changed(how: str) -> DecisionRefused:
    return DecisionRefused(f"it is not as it was listed: {how}", code="changed")


def _uuid(text: str | None) -> UUID | None:
    try:
        return UUID(text) if text else None
    except ValueError:
        return None
