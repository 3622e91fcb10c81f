"""What the database itself refuses, whoever writes: every constraint and trigger, in SQL, past the ORM.

A case builds legal rows and says two writes that differ in little: the forbidden one, which must be refused by the
constraint of that name, and its legal neighbour, which must pass. The last test asks the catalogue for all names that
are ours, so that a new constraint without a case fails.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import uuid4

import pytest
from django.db import IntegrityError, OperationalError, connection, models, transaction
from psycopg import sql
from psycopg.types.json import Jsonb

from leases.models import (
    ActivityEntry,
    Archive,
    Attempt,
    BridgeActivity,
    Company,
    Continuation,
    Credential,
    Hold,
    Installation,
    Lease,
    Obligation,
    Operation,
    Receipt,
    Recovery,
    Run,
)
from tests import factories
from tests.concurrency import elsewhere

Statement = tuple[Any, list[Any]]
Writes = list[Statement]


@dataclass(frozen=True)
class Case:
    refused_by: str
    """The constraint's name in the error."""
    trigger: str
    """The trigger that raises it, or an empty string."""
    build: Callable[[], tuple[Writes, Writes]]
    """Make the rows; return the forbidden and the allowed writes."""


CASES: list[Case] = []


def refuses(constraint: str, *, trigger: str = "") -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Register a case. Its function returns (forbidden, allowed), each one statement or a list of them."""

    def register(build: Callable[[], Any]) -> Callable[[], Any]:
        def writes() -> tuple[Writes, Writes]:
            forbidden, allowed = build()
            committed()
            return _listed(forbidden), _listed(allowed)

        CASES.append(Case(constraint, trigger, writes))
        return build

    return register


def _listed(writes: Statement | Writes) -> Writes:
    return writes if isinstance(writes, list) else [writes]


# Writing SQL


def change(row: models.Model, **values: Any) -> Statement:
    """Return the UPDATE of these columns of one row. A value may be an SQL expression (`sql.SQL`)."""
    pairs = [sql.SQL("{} = {}").format(sql.Identifier(name), _value(value)) for name, value in values.items()]
    query = sql.SQL("UPDATE {} SET {} WHERE {} = {}").format(
        sql.Identifier(row._meta.db_table),
        sql.SQL(", ").join(pairs),
        sql.Identifier(row._meta.pk.column),
        sql.Literal(row.pk),
    )
    return query, []


def another(row: models.Model, **values: Any) -> Statement:
    """Return the INSERT of a copy of a row with other values in these columns, and an id of its own."""
    columns = [field.column for field in row._meta.concrete_fields]
    if isinstance(row._meta.pk, models.BigAutoField):
        columns.remove("id")
    else:
        values.setdefault("id", uuid4())
    assert set(values) <= set(columns), set(values) - set(columns)
    sources = [_value(values[c]) if c in values else sql.Identifier(c) for c in columns]
    table = sql.Identifier(row._meta.db_table)
    query = sql.SQL("INSERT INTO {} ({}) SELECT {} FROM {} WHERE id = {}").format(
        table,
        sql.SQL(", ").join(map(sql.Identifier, columns)),
        sql.SQL(", ").join(sources),
        table,
        sql.Literal(row.pk),
    )
    return query, []


def gone(row: models.Model) -> Statement:
    query = sql.SQL("DELETE FROM {} WHERE id = {}").format(sql.Identifier(row._meta.db_table), sql.Literal(row.pk))
    return query, []


def _value(value: Any) -> sql.Composable:
    if isinstance(value, sql.Composable):
        return value
    return sql.Literal(Jsonb(value) if isinstance(value, dict) else value)


NOW = sql.SQL("now()")
CLOSED = {"closed_at": NOW, "closed_as": "nothing_owed", "due_at": None}
LATER = sql.SQL("now() + interval '1 hour'")
CLAIM = {"worker": "somebody", "claimed_at": NOW}


def execute(writes: Writes) -> None:
    """Run the writes as one transaction would, with what is checked at commit checked at its end."""
    with transaction.atomic(), connection.cursor() as cursor:
        for query, params in writes:
            cursor.execute(query, params)
        cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")
        cursor.execute("SET CONSTRAINTS ALL DEFERRED")


def committed() -> None:
    """Run the deferred checks of what was written so far, so that what is refused later is refused for its own sake."""
    execute([])


@contextmanager
def refused(constraint: str) -> Iterator[None]:
    with pytest.raises(IntegrityError) as caught:
        yield
    assert caught.value.__cause__.diag.constraint_name == constraint, caught.value


# Rows that the factories do not make


def activity(lease: Lease | None = None) -> BridgeActivity:
    subject = lease or factories.lease()
    return BridgeActivity.objects.create(
        company_id=subject.company_id, lease=subject, deadline=factories.at(60), kind="execute"
    )


def attempt(obligation: Obligation | None = None, **values: Any) -> Attempt:
    subject = obligation or factories.teardown()
    return Attempt.objects.create(company_id=subject.company_id, obligation=subject, worker="test", **values)


def receipt(lease: Lease | None = None, **values: Any) -> Receipt:
    return factories.receipt(lease or factories.teardown(leased()).lease, **values)


def leased(**values: Any) -> Lease:
    """A lease with a run, an issue and an environment, all of one company."""
    environment = factories.environment()
    return factories.lease(
        environment,
        run=factories.run(environment.company),
        issue=factories.issue(environment.company),
        **values,
    )


def credential(company: Company | None = None) -> Credential:
    return Credential.objects.create(company=company or factories.company(), name=f"key-{uuid4()}", reference="env:KEY")


def close(row: Obligation, **values: Any) -> Statement:
    return change(row, **{"closed_at": NOW, "closed_as": "proven", "due_at": None, **values})


def watch() -> Obligation:
    """What the whole fleet owes."""
    installation = Installation.current()
    row, _ = Obligation.objects.get_or_create(
        kind="watch_controllers", installation=installation, closed_at=None, defaults={"due_at": factories.at(60)}
    )
    return row


# 1. Values that are known, names that are unique


@refuses("installation_is_one_row")
def _() -> Any:
    row = Installation.current()
    return change(row, only=False), change(row, only=True)


@refuses("leases_installation_only_key")
def _() -> Any:
    row = Installation.current()
    return another(row), change(row, id=uuid4())


@refuses("installation_observes_for_a_reason")
def _() -> Any:
    row = Installation.current()
    observed = {"observing_since": NOW, "observed_mark_at": NOW}
    return change(row, **observed), change(row, **observed, observing_why="behind")


@refuses("installation_watermark_is_whole")
def _() -> Any:
    row = Installation.current()
    moved = {"watermark_position": 1, "watermark_timeline": 1}
    return change(row, **moved), change(row, **moved, watermark_at=NOW)


@refuses("installation_watermark_moves_forward", trigger="watermark_moves_forward")
def _() -> Any:
    row = Installation.current()
    Installation.objects.update(watermark_position=8, watermark_timeline=1, watermark_at=factories.at(0))
    return change(row, watermark_position=7), change(row, watermark_position=7, watermark_generation=1)


@refuses("installation_watermark_moves_forward", trigger="watermark_moves_forward")
def _() -> Any:
    row = Installation.current()
    Installation.objects.update(watermark_generation=2)
    return change(row, watermark_generation=1), change(row, watermark_generation=3)


@refuses("run_status_is_known")
def _() -> Any:
    row = factories.run()
    return change(row, status="paused"), change(row, status="timed_out")


@refuses("credential_name_is_unique")
def _() -> Any:
    row = credential()
    return another(row), another(row, company_id=factories.company().pk)


@refuses("credential_is_a_reference")
def _() -> Any:
    row = credential()
    return change(row, reference="dtn_0123456789abcdef"), change(row, reference="file:/run/secrets/key")


@refuses("credential_status_is_known")
def _() -> Any:
    row = credential()
    return change(row, status="expired"), change(row, status="disabled")


@refuses("account_name_is_unique")
def _() -> Any:
    row = factories.account()
    return another(row), another(row, name="another")


@refuses("account_limit_is_positive")
def _() -> Any:
    row = factories.account()
    return change(row, concurrency_limit=0), change(row, concurrency_limit=1)


@refuses("account_circuit_is_known")
def _() -> Any:
    row = factories.account()
    return change(row, circuit="half_open"), change(row, circuit="open")


@refuses("environment_name_is_unique")
def _() -> Any:
    row = factories.environment()
    return another(row), another(row, name="another")


@refuses("environment_status_is_known")
def _() -> Any:
    row = factories.environment()
    return change(row, status="deleted"), change(row, status="archived")


@refuses("environment_policy_is_known")
def _() -> Any:
    row = factories.environment()
    return change(row, policy="forget"), change(row, policy="retain_on_failure")


@refuses("environment_drain_is_bounded")
def _() -> Any:
    row = factories.environment()
    return change(row, drain_seconds=3601), change(row, drain_seconds=3600)


# 2. The journal


@refuses("operation_name_is_unique")
def _() -> Any:
    row = factories.operation()
    return (
        [another(row, lease_uuid=uuid4(), state="resolved", resolved_at=NOW)],
        [another(row, lease_uuid=uuid4(), state="resolved", resolved_at=NOW, name="another")],
    )


@refuses("operation_name_is_unique")
def _() -> Any:
    """A sandbox is started under the name that it was created with; only creations need names of their own."""
    row, begun = factories.operation(), factories.start()
    over = {"state": "resolved", "resolved_at": NOW}
    return another(row, **over, lease_uuid=uuid4()), another(begun, **over)


@refuses("operation_creates_one_lease")
def _() -> Any:
    row = factories.operation()
    return (
        another(row, name="another", state="resolved", resolved_at=NOW),
        another(row, name="another", state="resolved", resolved_at=NOW, lease_uuid=uuid4()),
    )


@refuses("operation_serves_a_request_once")
def _() -> Any:
    """S-052: a request that is made twice finds the operation of its first time."""
    row = factories.operation(request_key="try 1")
    over = {"name": "another", "lease_uuid": uuid4(), "state": "resolved", "resolved_at": NOW}
    return another(row, **over), another(row, **over, request_key="try 2")


@refuses("operation_serves_a_request_once")
def _() -> Any:
    """Keys are the caller's own: another company's are no conflict, and who names no request shares none."""
    row = factories.operation(request_key="try 1")
    nameless = factories.operation(factories.environment(row.account))
    stranger = factories.operation(state="resolved", resolved_at=factories.at(0))
    over = {"name": "another", "state": "resolved", "resolved_at": NOW}
    return (
        another(row, **over, lease_uuid=uuid4()),
        [
            another(stranger, **over, lease_uuid=uuid4(), request_key="try 1"),
            another(nameless, **over, lease_uuid=uuid4(), request_key=None),
        ],
    )


@refuses("operation_is_the_only_start_of_its_sandbox")
def _() -> Any:
    """Two that start one sandbox at the same time: one of them does."""
    row = factories.start()
    owed = row.obligations.get()
    second = uuid4()
    recovery = another(owed, operation_id=second)
    return (
        [another(row, id=second), recovery],
        [change(row, state="resolved", resolved_at=NOW), close(owed), another(row, id=second), recovery],
    )


@refuses("operation_kind_is_known")
def _() -> Any:
    row = factories.operation(state="resolved", resolved_at=factories.at(0))
    over = {"name": "another", "lease_uuid": uuid4()}
    return another(row, **over, kind="resume"), another(row, **over, kind="create")


@refuses("operation_start_names_its_sandbox")
def _() -> Any:
    row = factories.start()
    over = {"state": "resolved", "resolved_at": NOW}
    return another(row, **over, resource_id=""), another(row, **over)


@refuses("operation_start_names_its_sandbox")
def _() -> Any:
    row = factories.start()
    over = {"state": "resolved", "resolved_at": NOW}
    return another(row, **over, source_id=None), another(row, **over)


@refuses("operation_start_names_its_sandbox")
def _() -> Any:
    row = factories.operation(state="resolved", resolved_at=factories.at(0))
    lease = factories.lease(factories.environment(row.account))
    over = {"name": "another", "lease_uuid": uuid4()}
    return another(row, **over, source_id=lease.pk), another(row, **over, lease_id=lease.pk)


@refuses("operation_created_its_lease")
def _() -> Any:
    """Of two creations at most one is a lease's."""
    lease = factories.lease()
    first, other = (
        factories.operation(lease.environment, state="resolved", resolved_at=factories.at(0)) for _ in range(2)
    )
    execute([change(first, lease_id=lease.pk)])
    return change(other, lease_id=lease.pk), change(other, lease_id=factories.lease(lease.environment).pk)


@refuses("operation_state_is_known")
def _() -> Any:
    row = factories.operation(state="resolved", resolved_at=factories.at(0))
    unowned = factories.operation()
    recovery = unowned.obligations.get()
    return (
        another(row, name="another", lease_uuid=uuid4(), state="lost", resolved_at=None),
        [change(unowned, state="resolved", resolved_at=NOW), close(recovery, closed_as="nothing_owed")],
    )


@refuses("operation_attached_has_a_lease")
def _() -> Any:
    row = factories.operation()
    recovery = row.obligations.get()
    lease = factories.lease(factories.environment(row.account))
    handed_over = close(recovery, closed_as="handed_over")
    return (
        [change(row, state="attached"), handed_over],
        [change(row, state="attached", lease_id=lease.pk), handed_over],
    )


@refuses("operation_resolved_says_when")
def _() -> Any:
    row = factories.operation()
    handed_over = close(row.obligations.get(), closed_as="nothing_owed")
    return (
        [change(row, state="resolved"), handed_over],
        [change(row, state="resolved", resolved_at=NOW), handed_over],
    )


@refuses("operation_resolved_says_when")
def _() -> Any:
    row = factories.operation()
    return change(row, resolved_at=NOW), change(row, cancelled_at=NOW)


@refuses("operation_resolved_says_when")
def _() -> Any:
    """Ended unverified is an end too, and says when."""
    row = factories.operation()
    ended = close(row.obligations.get(), closed_as="unverified")
    return (
        [change(row, state="unverified"), ended],
        [change(row, state="unverified", resolved_at=NOW), ended],
    )


@refuses("operation_is_kept", trigger="operation_is_kept")
def _() -> Any:
    row = factories.operation(state="resolved", resolved_at=factories.at(0))
    return gone(row), change(row, looks=1)


@refuses("operation_facts_are_final", trigger="operation_is_monotone")
def _() -> Any:
    """A returned id is written only where it is missing or equal (S-051, S-073)."""
    row = factories.operation(resource_id="the first")
    return change(row, resource_id="a second"), change(row, resource_id="the first")


@refuses("operation_facts_are_final", trigger="operation_is_monotone")
def _() -> Any:
    row = factories.operation(resource_id="the first")
    return change(row, resource_id=""), change(factories.operation(), resource_id="one")


@refuses("operation_facts_are_final", trigger="operation_is_monotone")
def _() -> Any:
    lease = factories.lease()
    row = factories.operation(lease.environment, lease=lease, state="attached")
    return change(row, lease_id=factories.lease(lease.environment).pk), change(row, lease_id=lease.pk)


@refuses("operation_facts_are_final", trigger="operation_is_monotone")
def _() -> Any:
    row = factories.operation(state="resolved", resolved_at=factories.at(0), lease=None)
    lease = factories.lease(factories.environment(row.account))
    return change(row, state="attached", lease_id=lease.pk, resolved_at=None), change(row, lease_id=lease.pk)


@refuses("operation_facts_are_final", trigger="operation_is_monotone")
def _() -> Any:
    row = factories.operation()
    return change(row, name="another"), change(row, name=row.name)


@refuses("operation_facts_are_final", trigger="operation_is_monotone")
def _() -> Any:
    row = factories.operation()
    elsewhere_ = factories.account(row.company)
    return (
        [change(row, account_id=elsewhere_.pk), change(row.obligations.get(), account_id=elsewhere_.pk)],
        change(row, account_id=row.account_id),
    )


@refuses("operation_facts_are_final", trigger="operation_is_monotone")
def _() -> Any:
    row = factories.operation()
    return change(row, company_id=factories.company().pk), change(row, company_id=row.company_id)


@refuses("operation_facts_are_final", trigger="operation_is_monotone")
def _() -> Any:
    """What a start was of never changes."""
    row = factories.start()
    other = factories.stopped(factories.lease(row.source.environment))
    return change(row, source_id=other.pk), change(row, source_id=row.source_id)


@refuses("operation_facts_are_final", trigger="operation_is_monotone")
def _() -> Any:
    row = factories.start(state="resolved", resolved_at=factories.at(0))
    return change(row, kind="create", source_id=None), change(row, kind="start")


@refuses("operation_facts_are_final", trigger="operation_is_monotone")
def _() -> Any:
    """A request's name may be given up (for the operation that replaces this one), and never be another."""
    row = factories.operation(request_key="try 1")
    return change(row, request_key="try 2"), change(row, request_key=None)


@refuses("operation_facts_are_final", trigger="operation_is_monotone")
def _() -> Any:
    """What an operator ended unverified is never pending again; what turns up late is owned."""
    row = factories.operation(state="unverified", resolved_at=factories.at(0))
    lease = factories.lease(factories.environment(row.account))
    template = factories.operation(factories.environment(row.account)).obligations.get()
    return (
        [change(row, state="pending", resolved_at=None), another(template, operation_id=row.pk)],
        change(row, state="attached", lease_id=lease.pk, resolved_at=None),
    )


RECOVERY = "operation_is_pending_exactly_while_recovery_is_open"


@refuses(RECOVERY, trigger="operation_at_commit")
def _() -> Any:
    """A start is owned by the recovery of its own kind, and by no other."""
    row = factories.start()
    owed = row.obligations.get()
    ended = close(owed, closed_as="nothing_owed")
    return (
        [ended, another(owed, **OPEN, kind="recover_creation")],
        [ended, another(owed, **OPEN, kind="recover_start")],
    )


@refuses(RECOVERY, trigger="obligation_closed_at_commit")
def _() -> Any:
    """S-149: the recovery of a start is not closed while its receipts are suspended."""
    row = factories.start()
    ended = close(row.obligations.get(), closed_as="nothing_owed")
    return ended, [ended, change(row, state="resolved", resolved_at=NOW)]


ALONE = "start_is_alone_with_its_sandbox"


@refuses(ALONE, trigger="operation_at_commit")
def _() -> Any:
    """No sandbox is started under whoever uses it."""
    row = factories.start(state="resolved", resolved_at=factories.at(0))
    used = factories.lease(row.source.environment)
    template = factories.start().obligations.get()

    def begin(resource_id: str) -> Writes:
        begun = uuid4()
        own = {"company_id": row.company_id, "account_id": row.account_id, "operation_id": begun}
        pending = {"state": "pending", "resolved_at": None, "resource_id": resource_id}
        return [another(row, id=begun, **pending), another(template, **own)]

    return begin(used.resource_id), begin(row.resource_id)


@refuses(ALONE, trigger="operation_at_commit")
def _() -> Any:
    """Nor while its teardown is owed, which would race with the start."""
    row = factories.start(state="resolved", resolved_at=factories.at(0))
    owed = factories.teardown(factories.lease(row.source.environment)).lease
    template = factories.start().obligations.get()

    def begin(resource_id: str) -> Writes:
        begun = uuid4()
        own = {"company_id": row.company_id, "account_id": row.account_id, "operation_id": begun}
        pending = {"state": "pending", "resolved_at": None, "resource_id": resource_id}
        return [another(row, id=begun, **pending), another(template, **own)]

    return begin(owed.resource_id), begin(row.resource_id)


@refuses(ALONE, trigger="lease_at_commit")
def _() -> Any:
    """Nobody takes a sandbox while it is being started, but who started it and ends the start."""
    row = factories.start()
    taken = another(row.source, state="active", released_at=None)
    ended = [change(row, state="resolved", resolved_at=NOW), close(row.obligations.get())]
    return taken, [taken, *ended]


@refuses(ALONE, trigger="lease_at_commit")
def _() -> Any:
    """Seen running while a start is pending: its teardown and the end of the start are one write."""
    row = factories.start()
    lease = row.source
    teardown = lease.obligations.get(kind="teardown")
    pend = [change(lease, state="pending_cleanup", epoch=2), another(teardown, **OPEN)]
    ended = [change(row, state="resolved", resolved_at=NOW), close(row.obligations.get())]
    return pend, [*pend, *ended]


@refuses(RECOVERY, trigger="operation_at_commit")
def _() -> Any:
    """S-055: no creation is on record without whoever is to find it again."""
    row = factories.operation()
    lone = another(row, name="another", lease_uuid=uuid4())
    resolved = another(row, name="another", lease_uuid=uuid4(), state="resolved", resolved_at=NOW)
    return lone, resolved


@refuses(RECOVERY, trigger="operation_at_commit")
def _() -> Any:
    row = factories.operation()
    resolve = change(row, state="resolved", resolved_at=NOW)
    return resolve, [resolve, close(row.obligations.get(), closed_as="nothing_owed")]


@refuses(RECOVERY, trigger="obligation_closed_at_commit")
def _() -> Any:
    row = factories.operation()
    handed_over = close(row.obligations.get(), closed_as="handed_over")
    return handed_over, [handed_over, change(row, state="resolved", resolved_at=NOW)]


@refuses(RECOVERY, trigger="obligation_created_at_commit")
def _() -> Any:
    pending = factories.operation()
    settled = factories.operation(state="resolved", resolved_at=factories.at(0))
    template = pending.obligations.get()
    owed = {"company_id": settled.company_id, "account_id": settled.account_id, "operation_id": settled.pk}
    return another(template, **owed), another(template, **owed, **CLOSED)


# 3. Leases and the work in them


@refuses("lease_state_is_known")
def _() -> Any:
    row = factories.teardown().lease
    return change(row, state="zombie"), change(row, state="pending_cleanup")


@refuses("lease_policy_is_known")
def _() -> Any:
    row = factories.lease()
    return change(row, policy="forget"), change(row, policy="reuse_by_environment")


@refuses("lease_outcome_is_known")
def _() -> Any:
    row = factories.lease()
    return change(row, outcome="unclear"), change(row, outcome="failed")


@refuses("lease_is_active_until_released")
def _() -> Any:
    row = factories.lease()
    return change(row, released_at=NOW), change(row, expires_at=LATER)


@refuses("lease_is_active_until_released")
def _() -> Any:
    row = factories.teardown().lease
    return change(row, released_at=None), change(row, released_at=NOW)


@refuses("lease_names_its_sandbox")
def _() -> Any:
    row = factories.lease()
    return another(row, resource_id=""), another(row, resource_id="another")


@refuses("lease_names_its_account")
def _() -> Any:
    row = factories.lease()
    return another(row, account_identity="", resource_id="another"), another(row, resource_id="another")


@refuses("operation_names_its_account")
def _() -> Any:
    row = factories.operation(state="resolved", resolved_at=factories.at(0))
    new = {"name": "another", "lease_uuid": uuid4()}
    return another(row, account_identity="", **new), another(row, **new)


@refuses("lease_epoch_is_positive")
def _() -> Any:
    row = factories.lease()
    return another(row, resource_id="another", epoch=0), another(row, resource_id="another", epoch=1)


ONLY_LIVE = "lease_is_the_only_live_one_of_its_sandbox"


@refuses(ONLY_LIVE)
def _() -> Any:
    row = factories.lease()
    return another(row), another(row, account_id=factories.account(row.company).pk)


@refuses(ONLY_LIVE)
def _() -> Any:
    """A lease that owes a teardown is still the owner of its sandbox."""
    row = factories.teardown().lease
    return (
        another(row, state="active", released_at=None),
        another(row, state="active", released_at=None, resource_id="another"),
    )


@refuses(ONLY_LIVE)
def _() -> Any:
    """A retained sandbox has an owner; one that was released stopped has none, so that the next lease can take it."""
    owed = factories.teardown(verb="stop_only")
    row = owed.lease
    receipt(row, evidence="stopped")
    settle = close(owed)
    new = another(row, state="active", released_at=None)
    return (
        [change(row, state="retained"), settle, new],
        [change(row, state="released"), settle, new],
    )


@refuses("lease_is_kept", trigger="lease_is_kept")
def _() -> Any:
    row = factories.lease()
    return gone(row), change(row, reason="-")


@refuses("lease_epoch_only_rises", trigger="lease_is_monotone")
def _() -> Any:
    row = factories.lease(epoch=3)
    return change(row, epoch=2), change(row, epoch=4)


@refuses("lease_epoch_only_rises", trigger="lease_is_monotone")
def _() -> Any:
    """The provider's own time of a start goes forward too; what is older is stale."""
    row = factories.lease(started_as_of=factories.at(0))
    return (
        change(row, started_as_of=sql.SQL("started_as_of - interval '1 s'")),
        change(row, started_as_of=sql.SQL("started_as_of + interval '1 s'")),
    )


@refuses("lease_epoch_only_rises", trigger="lease_is_monotone")
def _() -> Any:
    row = factories.lease(started_as_of=factories.at(0))
    return change(row, started_as_of=None), change(factories.lease(), started_as_of=NOW)


def succession(**values: Any) -> tuple[Lease, Lease]:
    """A stopped lease, and an active one that took its sandbox over."""
    before = factories.stopped()
    return before, factories.lease(before.environment, resource_id=before.resource_id, **values)


@refuses("lease_succeeded_is_expired")
def _() -> Any:
    before, after = succession()
    return (
        change(before, successor_id=after.pk),
        change(before, successor_id=after.pk, state="expired"),
    )


@refuses("leases_lease_successor_id_key")
def _() -> Any:
    """A sandbox has one history: no two leases had the same successor."""
    before, after = succession()
    other = factories.stopped(factories.lease(before.environment))
    execute([change(before, successor_id=after.pk, state="expired")])
    third = factories.lease(before.environment)
    return (
        change(other, successor_id=after.pk, state="expired"),
        change(other, successor_id=third.pk, state="expired"),
    )


@refuses("lease_bindings_are_final", trigger="lease_is_monotone")
def _() -> Any:
    before, after = succession()
    other = factories.lease(before.environment)
    execute([change(before, successor_id=after.pk, state="expired")])
    return change(before, successor_id=other.pk), change(before, successor_id=after.pk)


@refuses("lease_of_no_run_is_not_reused")
def _() -> Any:
    """Domain I-12."""
    row, adhoc = leased(), factories.lease()
    return change(adhoc, scope="environment"), change(row, scope="environment")


@refuses("lease_that_ends_by_itself_is_ad_hoc")
def _() -> Any:
    row, adhoc = leased(), factories.lease()
    return change(row, ends_at=LATER), change(adhoc, ends_at=LATER)


for _column in ("company_id", "account_id", "resource_id", "account_identity", "run_id"):

    @refuses("lease_bindings_are_final", trigger="lease_is_monotone")
    def _(column: str = _column) -> Any:
        row = leased()
        others = {
            "company_id": factories.company().pk,
            "account_id": factories.account(row.company).pk,
            "resource_id": "another",
            "account_identity": "another",
            "run_id": factories.run(row.company).pk,
        }
        return change(row, **{column: others[column]}), change(row, **{column: getattr(row, column)})


@refuses("lease_bindings_are_final", trigger="lease_is_monotone")
def _() -> Any:
    """Neither is a lease given a run later nor taken from it: NULL is a value here."""
    row = leased()
    return change(row, run_id=None), change(row, issue_id=None)


@refuses("lease_bindings_are_final", trigger="lease_is_monotone")
def _() -> Any:
    row = factories.lease(ends_at=None)
    return change(row, run_id=factories.run(row.company).pk), change(row, run_id=None)


PENDING = "lease_is_pending_exactly_while_teardown_is_open"


@refuses(PENDING, trigger="lease_at_commit")
def _() -> Any:
    """S-029, domain I-2: nothing is pending clean-up that no obligation owns."""
    row = factories.lease()
    template = factories.teardown()
    pend = change(row, state="pending_cleanup", released_at=NOW)
    owe = another(template, company_id=row.company_id, account_id=row.account_id, lease_id=row.pk)
    return pend, [pend, owe]


@refuses(PENDING, trigger="lease_at_commit")
def _() -> Any:
    row = factories.lease()
    inserted = {"id": uuid4(), "resource_id": "another"}
    return (
        another(row, **inserted, state="pending_cleanup", released_at=NOW),
        another(row, **inserted),
    )


@refuses(PENDING, trigger="lease_at_commit")
def _() -> Any:
    """A teardown that is owed does not go back into use."""
    owed = factories.teardown()
    back = change(owed.lease, state="active", released_at=None)
    return back, [back, close(owed, closed_as="nothing_owed")]


@refuses(PENDING, trigger="obligation_created_at_commit")
def _() -> Any:
    row, template = factories.lease(), factories.teardown()
    owed = {"company_id": row.company_id, "account_id": row.account_id, "lease_id": row.pk}
    return another(template, **owed), another(template, **owed, closed_at=NOW, closed_as="proven", due_at=None)


@refuses(PENDING, trigger="obligation_closed_at_commit")
def _() -> Any:
    owed = factories.teardown()
    receipt(owed.lease)
    return close(owed), [close(owed), change(owed.lease, state="expired")]


SETTLED = "lease_settles_with_proof"


def _settle(state: str, evidence: str | None, *, closed_as: str = "proven", epoch: int = 1) -> Writes:
    owed = factories.teardown(factories.lease(epoch=epoch))
    if evidence is not None:
        receipt(owed.lease, evidence=evidence)
    return [close(owed, closed_as=closed_as), change(owed.lease, state=state)]


for _state, _insufficient, _sufficient in (
    ("released", None, "stopped"),
    ("retained", None, "stopped"),
    ("expired", None, "destroyed"),
    ("expired", "stopped", "absent"),
    ("failed", None, "absent"),
    ("failed", "stopped", "destroyed"),
):

    @refuses(SETTLED, trigger="lease_at_commit")
    def _(state: str = _state, insufficient: str | None = _insufficient, sufficient: str = _sufficient) -> Any:
        return _settle(state, insufficient), _settle(state, sufficient)


@refuses(SETTLED, trigger="lease_at_commit")
def _() -> Any:
    """A receipt proves its own epoch and no later one."""

    def settle(*, of_this_epoch: bool) -> Writes:
        owed = factories.teardown(factories.lease(epoch=2))
        receipt(owed.lease, epoch=2 if of_this_epoch else 1)
        return [close(owed), change(owed.lease, state="expired")]

    return settle(of_this_epoch=False), settle(of_this_epoch=True)


@refuses(SETTLED, trigger="lease_at_commit")
def _() -> Any:
    """Seen running again: the epoch rises only together with a new teardown."""
    owed = factories.teardown(verb="stop_only")
    receipt(owed.lease, evidence="stopped")
    execute([close(owed), change(owed.lease, state="released")])
    risen = change(owed.lease, epoch=2)
    return risen, [risen, change(owed.lease, state="pending_cleanup"), another(owed, **OPEN)]


OPEN = {"closed_at": None, "closed_as": "", "due_at": NOW}


@refuses(SETTLED, trigger="lease_at_commit")
def _() -> Any:
    """K-32: what ends without proof ends as unverified, by name, and in no other way."""

    def ends(closed_as: str) -> Writes:
        owed = factories.teardown()
        search = another(owed, kind="verify_end")
        return [search, close(owed, closed_as=closed_as), change(owed.lease, state="failed")]

    return ends("nothing_owed"), ends("unverified")


@refuses(SETTLED, trigger="history_closed_at_commit")
def _() -> Any:
    """What ended without proof owes the search for it until there is a receipt, whoever closes it."""

    def ends(found: str | None) -> Writes:
        search = factories.given_up()
        if found:
            receipt(search.lease, evidence=found)
        return [close(search)]

    return ends("stopped"), ends("destroyed")


@refuses(SETTLED, trigger="lease_at_commit")
def _() -> Any:
    """Ended unverified by name is not enough: the proof is owed from then on. An import owes it too."""

    def imported(*, sought: bool) -> Writes:
        old, search = factories.lease(), factories.given_up()
        lease_id = uuid4()
        values = {"id": lease_id, "state": "failed", "outcome": "failed", "released_at": NOW}
        insert = another(old, **values, resource_id=search.lease.resource_id)
        owes = another(search, lease_id=lease_id, company_id=old.company_id, account_id=old.account_id, wakes=0)
        return [insert, owes] if sought else [insert]

    return imported(sought=False), imported(sought=True)


@refuses("history_is_of_an_ended_lease", trigger="history_opened_at_commit")
def _() -> Any:
    """What is kept has not ended: its disposal is owed, and no proof is looked for. What is over may be asked about."""
    search, kept = factories.given_up(), factories.stopped()
    over = factories.teardown()
    receipt(over.lease)
    execute([close(over), change(over.lease, state="expired")])

    def of(lease: Lease | None) -> Statement:
        assert lease is not None
        return another(search, lease_id=lease.pk, company_id=lease.company_id, account_id=lease.account_id)

    return of(kept), of(over.lease)


@refuses(SETTLED, trigger="lease_at_commit")
def _() -> Any:
    """A lease whose sandbox lives on under its successor ended when it was stopped; it was not destroyed."""
    before, after = succession()
    return change(before, state="expired"), change(before, state="expired", successor_id=after.pk)


@refuses(SETTLED, trigger="lease_at_commit")
def _() -> Any:
    """A successor is no proof: the lease that it takes over from was stopped in its own epoch."""

    def succeed(*, stopped: bool) -> Writes:
        owed = factories.teardown(verb="stop_only")
        if stopped:
            receipt(owed.lease, evidence="stopped")
        after = factories.lease(owed.lease.environment)
        return [close(owed), change(owed.lease, state="expired", successor_id=after.pk)]

    return succeed(stopped=False), succeed(stopped=True)


def startup_activity() -> BridgeActivity:
    operation = factories.operation(run_uuid=uuid4())
    return BridgeActivity.objects.create(
        company_id=operation.company_id, operation=operation, deadline=factories.at(60), kind="execute"
    )


@refuses("activity_is_of_a_lease_or_a_startup")
def _() -> Any:
    row, during = activity(), startup_activity()
    return another(row, lease_id=None), another(during)


@refuses("activity_is_of_a_lease_or_a_startup")
def _() -> Any:
    row = activity()
    operation = factories.operation(row.lease.environment)
    return another(row, operation_id=operation.pk), another(row, operation_id=operation.pk, lease_id=None)


@refuses("activity_ends_with_an_outcome")
def _() -> Any:
    row = activity()
    return change(row, ended_at=NOW), change(row, ended_at=NOW, outcome="completed")


@refuses("activity_ends_with_an_outcome")
def _() -> Any:
    row = activity()
    return change(row, outcome="failed"), change(row, ended_at=NOW, outcome="backed_out")


@refuses("activity_ends_with_an_outcome")
def _() -> Any:
    row = activity()
    return change(row, ended_at=NOW, outcome="vanished"), change(row, ended_at=NOW, outcome="failed")


# 4. Obligations and attempts

SUBJECT = "obligation_has_the_subject_of_its_kind"


@refuses(SUBJECT)
def _() -> Any:
    owed = factories.teardown()
    made = factories.operation(owed.lease.environment)
    return another(owed, **CLOSED, operation_id=made.pk), another(owed, **CLOSED)


@refuses(SUBJECT)
def _() -> Any:
    owed = factories.teardown()
    return another(owed, lease_id=None), change(owed, verb="stop_only")


@refuses(SUBJECT)
def _() -> Any:
    recovery = factories.operation().obligations.get()
    return another(recovery, operation_id=None), change(recovery, due_at=LATER)


@refuses(SUBJECT)
def _() -> Any:
    probe = factories.probe()
    other = factories.account(probe.company)
    return another(probe, probed_account_id=other.pk), another(probe, probed_account_id=other.pk, account_id=other.pk)


@refuses(SUBJECT)
def _() -> Any:
    probe = factories.probe()
    return another(probe, **CLOSED, kind="gossip"), another(probe, **CLOSED)


@refuses(SUBJECT)
def _() -> Any:
    """A startup is of a run; what else is owed is not."""
    owed = factories.startup()
    return another(owed, **{**CLOSED, "quiet": ""}, run_id=None), another(owed, **{**CLOSED, "quiet": ""})


@refuses(SUBJECT)
def _() -> Any:
    owed = factories.teardown()
    run = factories.run(owed.company)
    return another(owed, **CLOSED, run_id=run.pk), another(owed, **CLOSED)


@refuses(SUBJECT)
def _() -> Any:
    """What the whole fleet owes is of the installation."""
    row, kept = watch(), factories.stopped().obligations.get(kind="dispose")
    return another(kept, installation_id=row.installation_id, **CLOSED), another(row, **CLOSED)


for _kind in ("extend", "end_lease", "settle_orphan", "dispose", "end_fence", "verify_end"):

    @refuses(SUBJECT)
    def _(kind: str = _kind) -> Any:
        owed, probe = factories.teardown(), factories.probe()
        verb = {"verb": "delete" if kind == "verify_end" else ""}
        return another(probe, **CLOSED, kind=kind, **verb), another(owed, **CLOSED, kind=kind, **verb)


@refuses(SUBJECT)
def _() -> Any:
    owed, begun = factories.startup(), factories.start()
    closed = {**CLOSED, "quiet": ""}
    return another(owed, **closed, kind="recover_start"), another(begun.obligations.get(), **closed)


BOUND = "obligation_bindings_are_final"


@refuses(BOUND, trigger="obligation_is_bound")
def _() -> Any:
    owed = factories.startup()
    return change(owed, run_id=factories.run(owed.company).pk), change(owed, run_id=owed.run_id)


@refuses(BOUND, trigger="obligation_is_bound")
def _() -> Any:
    """Moved to another lease, nobody would own the first, which stays pending clean-up (design 4)."""
    owed = factories.teardown()
    other = factories.lease(owed.lease.environment)
    pend = change(other, state="pending_cleanup", released_at=NOW)
    return [change(owed, lease_id=other.pk), pend], change(owed, lease_id=owed.lease_id)


@refuses(BOUND, trigger="obligation_is_bound")
def _() -> Any:
    recovery = factories.operation().obligations.get()
    other = factories.operation(factories.environment(recovery.account), state="resolved", resolved_at=factories.at(0))
    return change(recovery, operation_id=other.pk), change(recovery, operation_id=recovery.operation_id)


@refuses(BOUND, trigger="obligation_is_bound")
def _() -> Any:
    probe = factories.probe()
    other = factories.account(probe.company)
    moved = change(probe, account_id=other.pk, probed_account_id=other.pk)
    return moved, change(probe, account_id=probe.account_id, probed_account_id=probe.account_id)


@refuses(BOUND, trigger="obligation_is_bound")
def _() -> Any:
    owed = factories.teardown()
    return change(owed, account_id=factories.account(owed.company).pk), change(owed, account_id=owed.account_id)


@refuses(BOUND, trigger="obligation_is_bound")
def _() -> Any:
    probe = factories.probe()
    return change(probe, company_id=factories.company().pk), change(probe, company_id=probe.company_id)


@refuses(BOUND, trigger="obligation_is_bound")
def _() -> Any:
    probe = factories.probe()
    lease = factories.lease(factories.environment(probe.account))
    teardown = {"kind": "teardown", "probed_account_id": None, "lease_id": lease.pk, "verb": "delete"}
    return change(probe, **teardown), change(probe, kind="probe_account")


for _never in ("infinity", "-infinity"):

    @refuses("obligation_is_due_at_a_time")
    def _(never: str = _never) -> Any:
        row = factories.teardown()
        return change(row, due_at=never), change(row, due_at=NOW)


@refuses("operation_facts_are_final", trigger="operation_is_monotone")
def _() -> Any:
    row = factories.operation()
    return change(row, account_identity="another"), change(row, account_identity=row.account_identity)


@refuses("operation_facts_are_final", trigger="operation_is_monotone")
def _() -> Any:
    row = factories.operation()
    return change(row, lease_uuid=uuid4()), change(row, lease_uuid=row.lease_uuid)


@refuses("operation_facts_are_final", trigger="operation_is_monotone")
def _() -> Any:
    row = factories.operation()
    return change(row, run_uuid=uuid4()), change(row, run_uuid=row.run_uuid)


CLAIM_IS_WHOLE = "obligation_claim_is_whole"
for _missing in ("attempt_id", "worker", "claimed_at"):

    @refuses(CLAIM_IS_WHOLE)
    def _(missing: str = _missing) -> Any:
        row = factories.teardown()
        whole = {"attempt_id": uuid4(), **CLAIM}
        return change(row, **{**whole, missing: None}), change(row, **whole)


DUE = "obligation_is_due_unless_quiet_or_closed"


@refuses(DUE)
def _() -> Any:
    row = factories.teardown()
    return change(row, due_at=None), change(row, due_at=None, quiet="no_lookup")


@refuses(DUE)
def _() -> Any:
    row = factories.teardown()
    return change(row, quiet="foreign_marks"), change(row, quiet="foreign_marks", due_at=None)


@refuses(DUE)
def _() -> Any:
    probe = factories.probe()
    return close(probe, due_at=NOW), close(probe)


@refuses("obligation_claimed_only_while_due")
def _() -> Any:
    row = factories.teardown()
    held = {"attempt_id": uuid4(), **CLAIM}
    return change(row, **held, due_at=None, quiet="no_lookup"), change(row, **held, due_at=LATER)


@refuses("obligation_claimed_only_while_due")
def _() -> Any:
    """Closing ends the claim."""
    probe = factories.claimed(factories.probe())
    return close(probe), close(probe, attempt_id=None, worker=None, claimed_at=None)


@refuses("obligation_closes_as_something")
def _() -> Any:
    probe = factories.probe()
    return close(probe, closed_as=""), close(probe)


@refuses("obligation_closes_as_something")
def _() -> Any:
    probe = factories.probe()
    return change(probe, closed_as="proven"), change(probe, closed_as="")


VERB = "obligation_verb_is_a_teardowns"


@refuses(VERB)
def _() -> Any:
    row = factories.teardown()
    return change(row, verb=""), change(row, verb="stop_or_delete")


@refuses(VERB)
def _() -> Any:
    """S-138: a demand that nobody can read cannot be stored."""
    row = factories.teardown(verb="stop_only")
    return change(row, verb="stop_onyl"), change(row, verb="delete")


@refuses(VERB)
def _() -> Any:
    probe = factories.probe()
    return change(probe, verb="delete"), change(probe, verb="")


@refuses(VERB)
def _() -> Any:
    probe, row = factories.probe(), factories.teardown()
    return change(probe, drain_until=LATER), change(row, drain_until=LATER)


@refuses("obligation_absence_is_a_teardowns")
def _() -> Any:
    probe, row = factories.probe(), factories.teardown()
    return change(probe, absent_since=NOW), change(row, absent_since=NOW)


@refuses("obligation_absence_is_a_teardowns")
def _() -> Any:
    """History is looked for twice, too, where one look is not enough."""
    probe, row = factories.probe(), factories.given_up()
    return change(probe, absent_since=NOW), change(row, absent_since=NOW)


@refuses(VERB)
def _() -> Any:
    """History knows what was demanded when it ended unproven, should it be found alive; it drains nothing."""
    row = factories.given_up()
    return change(row, verb=""), change(row, verb="stop_only")


@refuses(VERB)
def _() -> Any:
    row = factories.given_up()
    return change(row, drain_until=LATER), change(row, absent_since=NOW)


@refuses("obligation_serves_what_was_requested")
def _() -> Any:
    row = factories.teardown(requests=1)
    return change(row, requests_served=2), change(row, requests_served=1)


@refuses("obligation_is_one_per_lease_and_kind")
def _() -> Any:
    row = factories.teardown()
    return another(row), another(row, **CLOSED)


@refuses("obligation_is_one_per_operation_and_kind")
def _() -> Any:
    row = factories.operation().obligations.get()
    return another(row), another(row, **CLOSED)


@refuses("obligation_is_one_per_account_and_kind")
def _() -> Any:
    row = factories.probe()
    return another(row), another(row, closed_at=NOW, closed_as="proven", due_at=None)


@refuses("obligation_is_one_per_run_and_kind")
def _() -> Any:
    row = factories.startup()
    return another(row), another(row, **{**CLOSED, "quiet": ""})


@refuses("obligation_is_one_per_installation_and_kind")
def _() -> Any:
    row = watch()
    return another(row), another(row, **CLOSED)


@refuses("obligation_names_whom_it_calls")
def _() -> Any:
    owed, kept = factories.teardown(), factories.stopped().obligations.get(kind="dispose")
    return another(owed, account_id=None, **CLOSED), another(kept, account_id=None, **CLOSED)


@refuses("obligation_names_its_company")
def _() -> Any:
    row = watch()
    kept = factories.stopped().obligations.get(kind="dispose")
    return another(kept, company_id=None, **CLOSED), another(row, **CLOSED)


@refuses("obligation_attempt_is_its_own")
def _() -> Any:
    """An attempt id is a fence: two rows never carry the same."""
    first, other = factories.claimed(factories.teardown()), factories.teardown()
    return change(other, attempt_id=first.attempt_id, **CLAIM), change(other, attempt_id=uuid4(), **CLAIM)


@refuses("obligation_is_kept", trigger="obligation_is_kept")
def _() -> Any:
    probe = factories.probe()
    return gone(probe), close(probe)


@refuses("obligation_stays_closed", trigger="obligation_stays_closed")
def _() -> Any:
    probe = factories.probe()
    execute([close(probe)])
    return change(probe, **OPEN), another(probe, **OPEN)


@refuses("obligation_stays_closed", trigger="obligation_stays_closed")
def _() -> Any:
    """K-32: what was closed without proof stays so for ever."""
    row = factories.given_up().lease.obligations.get(kind="teardown")
    open_one = factories.probe()
    return change(row, closed_as="proven"), change(open_one, failures=1)


@refuses("attempt_finishes_with_an_outcome")
def _() -> Any:
    row = attempt()
    return change(row, finished_at=NOW), change(row, finished_at=NOW, outcome="failed")


@refuses("attempt_finishes_with_an_outcome")
def _() -> Any:
    row = attempt()
    return change(row, outcome="proven"), change(row, announced_call="stop")


@refuses("attempt_is_history", trigger="attempt_is_history")
def _() -> Any:
    finished = attempt(finished_at=factories.at(0), outcome="failed")
    return change(finished, outcome="proven"), change(attempt(), outcome="proven", finished_at=NOW)


@refuses("attempt_is_kept", trigger="attempt_is_kept")
def _() -> Any:
    row = attempt()
    return gone(row), change(row, worker="-")


# 5. Receipts and the audit log


@refuses("receipt_evidence_is_known")
def _() -> Any:
    row = receipt()
    return another(row, attempt_id=uuid4(), evidence="accepted"), another(row, attempt_id=uuid4(), evidence="absent")


@refuses("receipt_only_a_stopped_sandbox_is_suspended")
def _() -> Any:
    row = receipt()
    suspended = {"attempt_id": uuid4(), "ended": "suspended"}
    return another(row, **suspended, evidence="destroyed"), another(row, **suspended, evidence="stopped")


@refuses("receipt_is_one_per_finding")
def _() -> Any:
    row = receipt()
    return another(row), another(row, evidence="absent")


# 6. What is kept, and what holds it

KEPT = "lease_is_kept_exactly_while_disposal_is_open"


@refuses(KEPT, trigger="obligation_closed_at_commit")
def _() -> Any:
    """No sandbox without an end."""
    row = factories.stopped()
    disposal = row.obligations.get(kind="dispose")
    execute([change(factories.stopped(), reason="kept")])
    return close(disposal), change(disposal, due_at=LATER)


@refuses(KEPT, trigger="obligation_created_at_commit")
def _() -> Any:
    disposal = factories.stopped().obligations.get(kind="dispose")
    used = factories.lease()
    of_used = {"lease_id": used.pk, "company_id": used.company_id}
    return another(disposal, **of_used), another(disposal, **of_used, **CLOSED)


@refuses("environment_keeps_for_a_time")
def _() -> Any:
    row = factories.environment()
    return change(row, reuse_idle_for=sql.SQL("interval '0'")), change(row, reuse_idle_for=sql.SQL("interval '1 hour'"))


@refuses("environment_keeps_for_a_time")
def _() -> Any:
    row = factories.environment()
    return change(row, retain_for=sql.SQL("interval '-1 day'")), change(row, retain_for=None)


@refuses("run_hold_names_its_controller")
def _() -> Any:
    row = factories.run()
    return (
        change(row, controller_expires_at=LATER, controller_id="one"),
        change(row, controller_expires_at=LATER, controller_id="one", controller_seconds=60),
    )


@refuses("run_generation_only_rises", trigger="run_is_monotone")
def _() -> Any:
    """One that was used is a fence, and never given out again."""
    row = factories.run(controller_generation=3)
    return change(row, controller_generation=2), change(row, controller_generation=4)


@refuses("hold_is_on_a_lease_or_an_issue")
def _() -> Any:
    row = factories.hold(leased())
    return another(row, issue_id=row.lease.issue_id), another(row, lease_id=None, issue_id=row.lease.issue_id)


@refuses("hold_is_on_a_lease_or_an_issue")
def _() -> Any:
    row = factories.hold(leased())
    return another(row, lease_id=None), another(row, kind="export_resume")


@refuses("hold_has_the_strength_of_its_kind")
def _() -> Any:
    row = factories.hold(leased())
    return another(row, kind="export"), another(row, kind="export", strength="soft")


@refuses("hold_has_the_strength_of_its_kind")
def _() -> Any:
    row = factories.hold(leased())
    return another(row, kind="whim"), another(row, kind="recovery_source")


@refuses("hold_is_reviewed_or_ended")
def _() -> Any:
    row = factories.hold(leased())
    return change(row, until=None), change(row, until=LATER)


@refuses("hold_that_fences_is_on_a_lease")
def _() -> Any:
    row = factories.hold(leased(), "shutdown_fence")
    return another(row, lease_id=None, issue_id=row.lease.issue_id), change(row, until=LATER)


@refuses("hold_is_ended_by_somebody")
def _() -> Any:
    row = factories.hold(leased())
    return change(row, ended_at=NOW), change(row, ended_at=NOW, ended_by="somebody")


@refuses("hold_is_one_per_lease_kind_and_holder")
def _() -> Any:
    row = factories.hold(leased())
    return another(row), another(row, ended_at=NOW, ended_by="somebody")


@refuses("hold_is_one_per_issue_kind_and_holder")
def _() -> Any:
    row = factories.hold(factories.issue())
    return another(row), another(row, holder="another")


@refuses("hold_facts_are_final", trigger="hold_is_final")
def _() -> Any:
    row = factories.hold(leased())
    return change(row, holder="another"), change(row, reason="another")


@refuses("hold_facts_are_final", trigger="hold_is_final")
def _() -> Any:
    row = factories.hold(leased())
    execute([change(row, ended_at=NOW, ended_by="somebody")])
    return change(row, ended_at=None, ended_by=""), another(row, ended_at=None, ended_by="")


@refuses("hold_keeps_company_of_lease")
def _() -> Any:
    row = factories.hold(leased())
    return another(row, kind="export_resume", lease_id=leased().pk), another(row, kind="export_resume")


@refuses("hold_keeps_company_of_issue")
def _() -> Any:
    row = factories.hold(factories.issue())
    return another(row, kind="export_resume", issue_id=factories.issue().pk), another(row, kind="export_resume")


BINDS = "receipt_binds_to_its_lease"
for _column, _other in (
    ("company_uuid", uuid4),
    ("run_uuid", uuid4),
    ("run_uuid", lambda: None),
    ("account_id", lambda: factories.account().pk),
    ("account_identity", lambda: "somebody else"),
    ("resource_id", lambda: "another"),
    ("epoch", lambda: 2),
    ("epoch", lambda: 0),
):

    @refuses(BINDS, trigger=BINDS)
    def _(column: str = _column, other: Callable[[], Any] = _other) -> Any:
        """S-104, S-153, domain I-4: a receipt differs from its lease in nothing."""
        row = receipt()
        return another(row, attempt_id=uuid4(), **{column: other()}), another(row, attempt_id=uuid4())


@refuses(BINDS, trigger=BINDS)
def _() -> Any:
    """An ad-hoc lease has no run, and its receipt names none: NULL equals NULL here, and nothing else."""
    row = receipt(factories.teardown().lease)
    assert row.run_uuid is None
    return another(row, attempt_id=uuid4(), run_uuid=uuid4()), another(row, attempt_id=uuid4(), run_uuid=None)


@refuses(BINDS, trigger=BINDS)
def _() -> Any:
    """A receipt of an earlier epoch may come late; it proves that epoch only."""
    row = receipt(factories.teardown(factories.lease(epoch=3)).lease)
    return another(row, attempt_id=uuid4(), epoch=4), another(row, attempt_id=uuid4(), epoch=2)


@refuses(BINDS, trigger=BINDS)
def _() -> Any:
    row = receipt()
    other = factories.teardown(factories.lease(row.lease.environment, run=row.lease.run)).lease
    return (
        another(row, attempt_id=uuid4(), lease_id=other.pk),
        another(row, attempt_id=uuid4(), lease_id=other.pk, resource_id=other.resource_id),
    )


@refuses("receipt_is_append_only", trigger="receipt_is_append_only")
def _() -> Any:
    row = receipt()
    return change(row, evidence="absent"), another(row, attempt_id=uuid4())


@refuses("receipt_is_append_only", trigger="receipt_is_append_only")
def _() -> Any:
    row = receipt()
    return gone(row), another(row, attempt_id=uuid4())


# Emptying a table fires no row's trigger. An inventory's listings are no history that anything rests on.


def _emptied(table: str) -> Any:
    factories.teardown(factories.lease())
    cascade = sql.SQL("TRUNCATE {} CASCADE")
    return (cascade.format(sql.Identifier(table)), []), (sql.SQL("TRUNCATE leases_inventorylisting"), [])


for _table in (
    *("receipt", "activityentry", "attempt", "operation", "lease", "obligation"),
    *("recovery", "archive", "continuation"),
):
    _refused = f"{_table}_is_not_emptied"
    refuses(_refused, trigger=_refused)(partial(_emptied, f"leases_{_table}"))


def _entry() -> ActivityEntry:
    return ActivityEntry.objects.create(
        company=factories.company(), actor="somebody", action="lease.released", subject_type="lease", subject_id="1"
    )


@refuses("activityentry_is_append_only", trigger="activityentry_is_append_only")
def _() -> Any:
    row = _entry()
    return change(row, actor="nobody"), another(row, actor="nobody")


@refuses("activityentry_is_append_only", trigger="activityentry_is_append_only")
def _() -> Any:
    row = _entry()
    return gone(row), another(row)


# 6. No reference crosses a company, and an obligation's account is its subject's


@refuses("account_keeps_company_of_credential")
def _() -> Any:
    row = factories.account()
    return change(row, credential_id=credential().pk), change(row, credential_id=credential(row.company).pk)


@refuses("environment_keeps_company_of_account")
def _() -> Any:
    row = factories.environment()
    return change(row, account_id=factories.account().pk), change(row, account_id=factories.account(row.company).pk)


@refuses("run_keeps_company_of_issue")
def _() -> Any:
    row = factories.run()
    return change(row, issue_id=factories.issue().pk), change(row, issue_id=factories.issue(row.company).pk)


@refuses("lease_keeps_company_of_environment")
def _() -> Any:
    row = factories.lease()
    return (
        change(row, environment_id=factories.environment().pk),
        change(row, environment_id=factories.environment(row.account).pk),
    )


@refuses("lease_keeps_company_of_issue")
def _() -> Any:
    row = factories.lease()
    return change(row, issue_id=factories.issue().pk), change(row, issue_id=factories.issue(row.company).pk)


@refuses("lease_keeps_company_of_run")
def _() -> Any:
    row = factories.lease(ends_at=None)
    return (
        another(row, resource_id="another", run_id=factories.run().pk),
        another(row, resource_id="another", run_id=factories.run(row.company).pk),
    )


@refuses("lease_keeps_company_of_account")
def _() -> Any:
    row = factories.lease()
    return (
        another(row, account_id=factories.account().pk),
        another(row, account_id=factories.account(row.company).pk),
    )


@refuses("activity_keeps_company_of_lease")
def _() -> Any:
    row = activity()
    return change(row, company_id=factories.company().pk), change(row, company_id=row.lease.company_id)


@refuses("operation_keeps_company_of_account")
def _() -> Any:
    row = factories.operation(state="resolved", resolved_at=factories.at(0))
    copy = {"name": "another", "lease_uuid": uuid4()}
    return (
        another(row, **copy, account_id=factories.account().pk),
        another(row, **copy, account_id=factories.account(row.company).pk),
    )


@refuses("operation_keeps_company_of_lease")
def _() -> Any:
    row = factories.operation(state="resolved", resolved_at=factories.at(0))
    return (
        change(row, lease_id=factories.lease().pk),
        change(row, lease_id=factories.lease(factories.environment(row.account)).pk),
    )


@refuses("obligation_keeps_company_of_account")
def _() -> Any:
    row = factories.probe()
    return another(row, **CLOSED, company_id=factories.company().pk), another(row, **CLOSED)


@refuses("obligation_keeps_company_of_lease")
def _() -> Any:
    """The account is the other company's too, so nothing but the lease's company is wrong."""
    row = factories.teardown()
    stranger = factories.account()
    return (
        another(row, **CLOSED, company_id=stranger.company_id, account_id=stranger.pk),
        another(row, **CLOSED),
    )


@refuses("obligation_keeps_company_of_operation")
def _() -> Any:
    row = factories.operation().obligations.get()
    stranger = factories.account()
    return (
        another(row, **CLOSED, company_id=stranger.company_id, account_id=stranger.pk),
        another(row, **CLOSED),
    )


@refuses("obligation_keeps_account_of_lease")
def _() -> Any:
    """What is called with another account's credential would prove nothing, and burn the wrong limit."""
    row = factories.teardown()
    return another(row, **CLOSED, account_id=factories.account(row.company).pk), another(row, **CLOSED)


@refuses("obligation_keeps_account_of_operation")
def _() -> Any:
    row = factories.operation().obligations.get()
    return another(row, **CLOSED, account_id=factories.account(row.company).pk), another(row, **CLOSED)


@refuses("operation_keeps_company_of_source")
def _() -> Any:
    """The account is the other company's too, so nothing but the source's company is wrong."""
    row = factories.start(state="resolved", resolved_at=factories.at(0))
    stranger = factories.account()
    return (
        another(row, company_id=stranger.company_id, account_id=stranger.pk),
        another(row),
    )


@refuses("operation_keeps_account_of_source")
def _() -> Any:
    """A stopped sandbox is started in the account that it is in."""
    row = factories.start(state="resolved", resolved_at=factories.at(0))
    return another(row, account_id=factories.account(row.company).pk), another(row)


@refuses("lease_keeps_company_of_successor")
def _() -> Any:
    before, after = succession()
    return (
        change(before, state="expired", successor_id=factories.lease().pk),
        change(before, state="expired", successor_id=after.pk),
    )


@refuses("lease_keeps_account_of_successor")
def _() -> Any:
    before, after = succession()
    other = factories.lease(factories.environment(factories.account(before.company)))
    return (
        change(before, state="expired", successor_id=other.pk),
        change(before, state="expired", successor_id=after.pk),
    )


@refuses("activity_keeps_company_of_operation")
def _() -> Any:
    row = startup_activity()
    return change(row, company_id=factories.company().pk), change(row, company_id=row.operation.company_id)


@refuses("obligation_keeps_company_of_run")
def _() -> Any:
    """The account is the other company's too, so nothing but the run's company is wrong."""
    row = factories.startup()
    stranger = factories.account()
    closed = {**CLOSED, "quiet": ""}
    return (
        another(row, **closed, company_id=stranger.company_id, account_id=stranger.pk),
        another(row, **closed),
    )


@refuses("attempt_keeps_company_of_obligation")
def _() -> Any:
    row = attempt()
    return change(row, company_id=factories.company().pk), change(row, company_id=row.obligation.company_id)


# Inventories


CONFIRMED = sql.SQL("first_seen_at + interval '15 min'")


@refuses("listing_failed_says_why")
def _() -> Any:
    row = factories.listing()
    return change(row, outcome="failed"), change(row, outcome="failed", problem="timeout")


@refuses("finding_verdict_is_known")
def _() -> Any:
    row = factories.finding()
    return change(row, verdict="leak"), change(row, verdict="missing")


@refuses("finding_names_the_lease_it_is_about")
def _() -> Any:
    row = factories.finding()
    return change(row, lease_id=None), change(row, lease_id=None, verdict="unknown")


@refuses("finding_of_a_lease_names_its_company")
def _() -> Any:
    row = factories.finding()
    return change(row, company_id=None), change(row, company_id=None, lease_id=None, verdict="unknown")


@refuses("finding_is_confirmed_after_its_grace")
def _() -> Any:
    row = factories.finding()
    early = sql.SQL("first_seen_at + interval '14 min 59 s'")
    return change(row, confirmed_at=early), change(row, confirmed_at=CONFIRMED)


@refuses("finding_is_confirmed_after_its_grace")
def _() -> Any:
    row = factories.finding(sightings=1)
    return change(row, confirmed_at=CONFIRMED), change(row, confirmed_at=CONFIRMED, sightings=2)


@refuses("finding_is_owned_once_confirmed")
def _() -> Any:
    owed = factories.teardown()
    row = factories.finding(owed.lease)
    return change(row, obligation_id=owed.pk), change(row, obligation_id=owed.pk, confirmed_at=CONFIRMED)


@refuses("finding_resolves_as_something")
def _() -> Any:
    row = factories.finding()
    return change(row, resolved_at=NOW), change(row, resolved_at=NOW, resolution="known")


@refuses("finding_is_the_only_open_one_of_its_sandbox")
def _() -> Any:
    row = factories.finding()
    return another(row), another(row, resolved_at=NOW, resolution="known")


@refuses("finding_keeps_company_of_lease")
def _() -> Any:
    row, other = factories.finding(verdict="unknown"), factories.lease()
    mine = factories.lease(factories.environment(row.account))
    return change(row, lease_id=other.pk), change(row, lease_id=mine.pk)


@refuses("finding_keeps_company_of_account")
def _() -> Any:
    row, other = factories.finding(), factories.account()
    return change(row, account_id=other.pk), change(row, account_id=factories.account(row.company).pk)


@refuses("finding_keeps_company_of_obligation")
def _() -> Any:
    row, other = factories.finding(), factories.teardown()
    mine = factories.teardown(row.lease)
    return (
        change(row, obligation_id=other.pk, confirmed_at=CONFIRMED),
        change(row, obligation_id=mine.pk, confirmed_at=CONFIRMED),
    )


# 8. Recovery of files, continuation, cancellation


OVER = {"state": "exhausted", "finished_at": NOW, "failure": "stopped", "disposition": "use_alternative_strategy"}
WITHDRAWN = {"state": "withdrawn", "withdrawn_by": "user:test", "ended_at": NOW}


def owed_by(row: Recovery) -> list[Obligation]:
    """The two obligations of a running generation."""
    return list(row.lease.obligations.filter(kind__in=["recover_workspace", "end_recovery"]).order_by("kind"))


def beside(row: Lease) -> Lease:
    """Another stopped lease in the same environment."""
    return factories.stopped(factories.lease(row.environment))


def unsaved(**values: Any) -> Archive:
    """An archive that is not whole yet, of a lease with a receipt of its epoch."""
    return factories.archive(saved_at=None, **values)


@refuses("recovery_ends_in_a_state")
def _() -> Any:
    row = factories.recovery()
    closes = [close(owed) for owed in owed_by(row)]
    return [change(row, finished_at=NOW)], [change(row, state="complete", finished_at=NOW), *closes]


@refuses("recovery_ends_in_a_state")
def _() -> Any:
    row = factories.recovery(state="complete")
    return another(row, generation=2, state="given_up"), another(row, generation=2)


@refuses("recovery_failure_has_a_disposition")
def _() -> Any:
    row = factories.recovery()
    failure = {"failure": "provider_unavailable"}
    return change(row, **failure), change(row, **failure, disposition="retry")


@refuses("recovery_failure_has_a_disposition")
def _() -> Any:
    row = factories.recovery()
    return (
        change(row, failure="unlucky", disposition="retry"),
        change(row, failure="storage_unavailable", disposition="retry"),
    )


@refuses("recovery_exhausted_says_what_to_do")
def _() -> Any:
    """A continuation that is bound to it goes on without the files: so it has to say so."""
    row = factories.recovery()
    closes = [close(owed) for owed in owed_by(row)]
    return [change(row, **{**OVER, "disposition": "retry"}), *closes], [change(row, **OVER), *closes]


@refuses("recovery_tries_six_times")
def _() -> Any:
    row = factories.recovery()
    return change(row, attempts=7), change(row, attempts=6)


@refuses("recovery_generation_is_one")
def _() -> Any:
    row = factories.recovery(state="complete")
    return another(row), another(row, generation=2)


@refuses("recovery_is_one_per_lease")
def _() -> Any:
    row = factories.recovery()
    return another(row, generation=2), another(row, generation=2, **OVER)


RUNS = "recovery_runs_exactly_while_it_is_owed"


@refuses(RUNS, trigger="recovery_begun_at_commit")
def _() -> Any:
    row = factories.recovery(state="complete")
    return another(row, generation=2, state="running", finished_at=None), another(row, generation=2)


@refuses(RUNS, trigger="recovery_ended_at_commit")
def _() -> Any:
    row = factories.recovery()
    return change(row, **OVER), [change(row, **OVER), *(close(owed) for owed in owed_by(row))]


@refuses(RUNS, trigger="owed_closed_at_commit")
def _() -> Any:
    """A generation that nobody works on would hold its sandbox and its continuations for ever."""
    row = factories.recovery()
    _, attempts = owed_by(row)
    return close(attempts), change(attempts, due_at=LATER)


@refuses(RUNS, trigger="owed_closed_at_commit")
def _() -> Any:
    """Nor may one be without its end: a dead account could keep it running."""
    row = factories.recovery()
    end, _ = owed_by(row)
    return close(end), change(end, due_at=LATER)


@refuses(RUNS, trigger="owed_opened_at_commit")
def _() -> Any:
    row = factories.recovery()
    _, attempts = owed_by(row)
    other = beside(row.lease)
    return another(attempts, lease_id=other.pk), another(attempts, lease_id=other.pk, **CLOSED)


WATCHED = "lease_may_run_exactly_while_it_is_watched"


@refuses(WATCHED, trigger="lease_watched_at_commit")
def _() -> Any:
    """What may run costs money: somebody looks at it."""
    row = factories.may_be_running()
    owed = row.obligations.get(kind="watch_restart")
    other = beside(row)
    begun = change(other, may_be_running_since=NOW)
    return begun, [begun, another(owed, lease_id=other.pk)]


@refuses(WATCHED, trigger="lease_watched_at_commit")
def _() -> Any:
    row = factories.may_be_running()
    over = change(row, may_be_running_since=None)
    return over, [over, close(row.obligations.get(kind="watch_restart"))]


@refuses(WATCHED, trigger="lease_made_watched_at_commit")
def _() -> Any:
    row = factories.lease()
    return another(row, resource_id="another", may_be_running_since=NOW), another(row, resource_id="another")


@refuses(WATCHED, trigger="owed_closed_at_commit")
def _() -> Any:
    row = factories.may_be_running()
    owed = row.obligations.get(kind="watch_restart")
    return close(owed), [close(owed), change(row, may_be_running_since=None)]


@refuses(WATCHED, trigger="owed_opened_at_commit")
def _() -> Any:
    row = factories.may_be_running()
    owed = row.obligations.get(kind="watch_restart")
    other = beside(row)
    return another(owed, lease_id=other.pk), another(owed, lease_id=other.pk, **CLOSED)


@refuses("continuation_starts_one_run")
def _() -> Any:
    """That one was started, and which, is one fact."""
    row = factories.continuation(state="started")
    over = {"kind": "comment", "message_id": "m-1", "authored_at": NOW}
    return another(row, **over, started_run_id=None), another(row, **over)


@refuses("continuation_starts_one_run")
def _() -> Any:
    """What starts says in what workspace it begins."""
    row = factories.continuation(state="started")
    over = {"kind": "comment", "message_id": "m-1", "authored_at": NOW}
    return another(row, **over, readiness=""), another(row, **over, readiness="fresh_isolated_workspace")


@refuses("continuation_starts_one_run")
def _() -> Any:
    row = factories.continuation(state="withdrawn")
    following = factories.run(row.company)
    return another(row, started_run_id=following.pk), another(row)


@refuses("continuation_is_withdrawn_by_somebody")
def _() -> Any:
    row = factories.continuation(state="withdrawn")
    return another(row, withdrawn_by=""), another(row, withdrawn_by="user:another")


@refuses("continuation_message_says_when")
def _() -> Any:
    row = factories.continuation(state="withdrawn", kind="comment")
    return another(row, message_id="m-1", authored_at=None), another(row, message_id="m-1")


@refuses("continuation_message_says_when")
def _() -> Any:
    row = factories.continuation(state="withdrawn")
    return another(row, message_id="m-1"), another(row)


@refuses("continuation_message_says_when")
def _() -> Any:
    row = factories.continuation(state="withdrawn", kind="queued_message")
    return another(row, message_id="m-1", kind="timer"), another(row, message_id="m-1", kind="comment")


@refuses("continuation_retries_a_run_once")
def _() -> Any:
    """Two clicks are one retry; after the first was withdrawn another may be asked for."""
    row = factories.continuation()
    second = uuid4()
    owed = another(row.obligations.get(), continuation_id=second)
    withdrawn = [change(row, **WITHDRAWN), close(row.obligations.get())]
    return [another(row, id=second), owed], [*withdrawn, another(row, id=second, **WITHDRAWN)]


@refuses("continuation_is_one_per_message")
def _() -> Any:
    row = factories.continuation(state="withdrawn", kind="comment")
    return another(row), another(row, message_id="another")


WAITS = "continuation_waits_exactly_while_it_is_owed"


@refuses(WAITS, trigger="continuation_begun_at_commit")
def _() -> Any:
    """One that nobody looks at would never start."""
    row = factories.continuation(state="withdrawn")
    return another(row, state="waiting", withdrawn_by="", ended_at=None), another(row)


@refuses(WAITS, trigger="continuation_ended_at_commit")
def _() -> Any:
    row = factories.continuation()
    return change(row, **WITHDRAWN), [change(row, **WITHDRAWN), close(row.obligations.get())]


@refuses(WAITS, trigger="owed_closed_at_commit")
def _() -> Any:
    owed = factories.continuation().obligations.get()
    return close(owed), change(owed, due_at=LATER)


@refuses(WAITS, trigger="owed_opened_at_commit")
def _() -> Any:
    owed = factories.continuation().obligations.get()
    other = factories.continuation(factories.failed_run(owed.company), state="withdrawn")
    return another(owed, continuation_id=other.pk), another(owed, continuation_id=other.pk, **CLOSED)


CANCELLATION = "cancellation_is_owed_until_confirmed"


@refuses("run_cancellation_is_requested_first")
def _() -> Any:
    row = factories.run()
    return change(row, cancel_confirmed_at=NOW), change(row, cancel_requested_at=NOW, cancel_confirmed_at=NOW)


@refuses(CANCELLATION, trigger="run_cancelled_at_commit")
def _() -> Any:
    owed = factories.cancelled()
    other = factories.run(owed.company)
    asked = change(other, cancel_requested_at=NOW)
    return asked, [asked, another(owed, run_id=other.pk)]


@refuses(CANCELLATION, trigger="run_made_cancelled_at_commit")
def _() -> Any:
    row = factories.run()
    return another(row, cancel_requested_at=NOW), another(row, cancel_requested_at=NOW, cancel_confirmed_at=NOW)


@refuses(CANCELLATION, trigger="owed_closed_at_commit")
def _() -> Any:
    """A cancellation is acknowledged when it is proven, or owed."""
    owed = factories.cancelled()
    return close(owed), [close(owed), change(owed.run, cancel_confirmed_at=NOW)]


@refuses(CANCELLATION, trigger="owed_opened_at_commit")
def _() -> Any:
    owed = factories.cancelled()
    other = factories.run(owed.company)
    return another(owed, run_id=other.pk), another(owed, run_id=other.pk, **CLOSED)


ALONE = "run_continuing_is_alone_on_its_issue"


@refuses(ALONE, trigger="run_is_born_alone")
def _() -> Any:
    """Two runs that continue one failed one would do its work twice."""
    failed = factories.failed_run()
    row = factories.run(failed.company, issue=failed.issue, continues=failed)
    return another(row), another(row, issue_id=factories.issue(row.company).pk)


@refuses(ALONE, trigger="run_is_born_alone")
def _() -> Any:
    """Nor does another run come beside the one that continues."""
    failed = factories.failed_run()
    factories.run(failed.company, issue=failed.issue, continues=failed)
    return another(failed, status="queued"), another(failed)


@refuses(ALONE, trigger="run_comes_to_life_alone")
def _() -> Any:
    failed = factories.failed_run()
    factories.run(failed.company, issue=failed.issue, continues=failed)
    return change(failed, status="running"), change(failed, status="timed_out")


@refuses("recovery_facts_are_final", trigger="recovery_facts_are_final")
def _() -> Any:
    """What a continuation was admitted by does not become something else."""
    row, running = factories.recovery(state="exhausted"), factories.recovery()
    return change(row, error_kind="timeout"), change(running, error_kind="timeout")


@refuses("recovery_facts_are_final", trigger="recovery_facts_are_final")
def _() -> Any:
    """One that was never sent is taken back, and no more than that."""
    row = factories.recovery(attempts=3)
    return change(row, attempts=1), change(row, attempts=2)


@refuses("recovery_facts_are_final", trigger="recovery_facts_are_final")
def _() -> Any:
    row = factories.recovery(restarted_epoch=3)
    return change(row, restarted_epoch=None), change(row, restarted_epoch=4)


@refuses("recovery_facts_are_final", trigger="recovery_facts_are_final")
def _() -> Any:
    row = factories.recovery()
    return change(row, generation=2), change(row, generation=1)


WHOLE = {"size": 1, "sha256": "a" * 64, "saved_at": NOW}


@refuses("archive_is_saved_whole")
def _() -> Any:
    """Half-written is never whole: when, how much and what are one fact."""
    row = unsaved()
    return change(row, **{**WHOLE, "sha256": ""}), change(row, **WHOLE)


@refuses("archive_is_saved_whole")
def _() -> Any:
    row = unsaved()
    return change(row, **{**WHOLE, "size": None}), change(row, **WHOLE)


@refuses("archive_is_sealed_when_saved")
def _() -> Any:
    row = unsaved()
    proof = row.lease.receipts.get()
    return change(row, receipt_id=proof.pk), change(row, receipt_id=proof.pk, **WHOLE)


@refuses("leases_archive_attempt_id_key")
def _() -> Any:
    row = factories.archive()
    return another(row, name="another"), another(row, name="another", attempt_id=uuid4())


@refuses("leases_archive_name_key")
def _() -> Any:
    """Two archives in one file would be one that nobody can vouch for."""
    row = factories.archive()
    return another(row, attempt_id=uuid4()), another(row, attempt_id=uuid4(), name="another")


@refuses("archive_facts_are_final", trigger="archive_facts_are_final")
def _() -> Any:
    row, other = factories.archive(receipt=None), unsaved()
    return change(row, sha256="b" * 64), change(other, **WHOLE)


@refuses("archive_facts_are_final", trigger="archive_facts_are_final")
def _() -> Any:
    row = factories.archive()
    return change(row, receipt_id=None), change(row, removed_at=NOW)


@refuses("archive_facts_are_final", trigger="archive_facts_are_final")
def _() -> Any:
    row = factories.archive(removed_at=factories.at(0))
    return change(row, removed_at=None), change(row, removed_at=row.removed_at)


@refuses("archive_facts_are_final", trigger="archive_facts_are_final")
def _() -> Any:
    row = unsaved()
    return change(row, epoch=7), change(row, epoch=row.epoch)


SEALED = "archive_is_sealed_by_its_own_receipt"


@refuses(SEALED, trigger=SEALED)
def _() -> Any:
    """A receipt from before the restart proves nothing of what was read after it."""
    row = unsaved(epoch=2)
    lease = row.lease
    before = lease.receipts.get()
    factories.teardown(lease)
    execute([change(lease, epoch=2)])
    lease.refresh_from_db()
    after = factories.receipt(lease, evidence="stopped")
    return change(row, **WHOLE, receipt_id=before.pk), change(row, **WHOLE, receipt_id=after.pk)


@refuses(SEALED, trigger=SEALED)
def _() -> Any:
    row = unsaved()
    theirs, mine = beside(row.lease).receipts.get(), row.lease.receipts.get()
    return change(row, **WHOLE, receipt_id=theirs.pk), change(row, **WHOLE, receipt_id=mine.pk)


@refuses("continuation_facts_are_final", trigger="continuation_facts_are_final")
def _() -> Any:
    """Once started it stays so, whatever is seen of the sandbox later."""
    row, waiting = factories.continuation(state="started"), factories.continuation()
    return change(row, recovers_files=False), change(waiting, recovers_files=False)


@refuses("continuation_facts_are_final", trigger="continuation_facts_are_final")
def _() -> Any:
    """When a message was written decides whether it is newer than the end of the run."""
    row = factories.continuation(kind="comment")
    return change(row, authored_at=NOW), change(row, hold="decision_pending")


@refuses("continuation_facts_are_final", trigger="continuation_facts_are_final")
def _() -> Any:
    row = factories.continuation()
    other = factories.failed_run(row.company, issue=row.issue)
    return change(row, run_id=other.pk), change(row, run_id=row.run_id)


@refuses("run_agent_is_final", trigger="run_agent_is_final")
def _() -> Any:
    row, unnamed = factories.run(agent="agent-1"), factories.run()
    return change(row, agent="agent-2"), change(unnamed, agent="agent-2")


@refuses("run_agent_is_final", trigger="run_agent_is_final")
def _() -> Any:
    row, unnamed = factories.run(adapter="claude"), factories.run()
    return change(row, adapter=""), change(unnamed, adapter="claude")


@refuses("run_agent_is_final", trigger="run_agent_is_final")
def _() -> Any:
    before = factories.run()
    row, fresh = factories.run(before.company, continues=before), factories.run(before.company)
    return change(row, continues_id=None), change(fresh, continues_id=before.pk)


@refuses("run_cancellation_is_final", trigger="run_cancellation_is_final")
def _() -> Any:
    row = factories.cancelled().run
    assert row is not None
    return change(row, cancel_requested_at="2026-01-01"), change(row, cancel_requested_at=row.cancel_requested_at)


@refuses("run_cancellation_is_final", trigger="run_cancellation_is_final")
def _() -> Any:
    owed = factories.cancelled()
    row = owed.run
    assert row is not None
    confirmed = [change(row, cancel_confirmed_at=NOW), change(owed, **CLOSED)]
    return [*confirmed, change(row, cancel_confirmed_at=None)], confirmed


@refuses("run_continuing_is_alone_on_its_issue", trigger="run_is_born_alone")
def _() -> Any:
    failed = factories.failed_run()
    factories.run(failed.company, issue=failed.issue)
    elsewhere = factories.issue(failed.company)
    allowed = another(failed, status="queued", finished_at=None, continues_id=failed.pk, issue_id=elsewhere.pk)
    return another(failed, status="queued", finished_at=None, continues_id=failed.pk), allowed


@refuses("run_continuing_is_alone_on_its_issue", trigger="run_is_born_alone")
def _() -> Any:
    failed = factories.failed_run()
    factories.run(failed.company, issue=failed.issue, continues=failed)
    return another(failed, status="running", finished_at=None), another(failed, status="cancelled")


@refuses("run_continuing_is_alone_on_its_issue", trigger="run_comes_to_life_alone")
def _() -> Any:
    failed = factories.failed_run()
    going_on = factories.run(failed.company, issue=failed.issue, continues=failed)
    return change(failed, status="scheduled_retry"), change(going_on, status="queued")


@refuses("run_continuing_is_alone_on_its_issue", trigger="run_comes_to_life_alone")
def _() -> Any:
    failed = factories.failed_run()
    factories.run(failed.company, issue=failed.issue, continues=failed)
    other = factories.run(failed.company, issue=factories.issue(failed.company))
    return change(other, issue_id=failed.issue_id), change(other, issue_id=None)


@refuses("run_continuing_is_alone_on_its_issue", trigger="run_comes_to_life_alone")
def _() -> Any:
    failed = factories.failed_run()
    one, _two = (factories.run(failed.company, issue=failed.issue) for _ in range(2))
    alone = factories.run(failed.company, issue=factories.issue(failed.company))
    return change(one, continues_id=failed.pk), change(alone, continues_id=failed.pk)


@refuses("operation_recovery_is_final", trigger="operation_recovery_is_final")
def _() -> Any:
    row = factories.recovery()
    begun = factories.start(row.lease, recovery=row)
    return change(begun, recovery_id=None), change(begun, recovery_id=row.pk)


@refuses("operation_of_a_recovery_is_a_start")
def _() -> Any:
    row = factories.recovery()
    over = {"recovery": row, "state": "resolved", "resolved_at": factories.at(0)}
    begun = factories.start(row.lease, **over)
    made = factories.operation(row.lease.environment, state="resolved", resolved_at=factories.at(0))
    anew = {"name": "another", "lease_uuid": uuid4()}
    return another(made, **anew, recovery_id=row.pk), [another(made, **anew), another(begun)]


@refuses("run_coordinator_is_known")
def _() -> Any:
    row = factories.run_facts()
    return change(row, coordinator="asleep"), change(row, coordinator="settling")


@refuses("recovery_action_is_closed_by_somebody")
def _() -> Any:
    row = factories.recovery_action()
    return change(row, closed_at=NOW), change(row, closed_at=NOW, closed_by="user:test")


@refuses("obligation_is_one_per_continuation_and_kind")
def _() -> Any:
    row = factories.continuation().obligations.get()
    return another(row), another(row, **CLOSED)


@refuses("obligation_has_the_subject_of_its_kind")
def _() -> Any:
    """What is owed of a continuation is of it alone."""
    row = factories.continuation().obligations.get()
    return another(row, **CLOSED, run_id=row.continuation.run_id), another(row, **CLOSED)


@refuses(BOUND, trigger="obligation_is_bound")
def _() -> Any:
    row = factories.continuation().obligations.get()
    other = factories.continuation(factories.failed_run(row.company), state="withdrawn")
    return change(row, continuation_id=other.pk), change(row, continuation_id=row.continuation_id)


@refuses("recovery_is_kept", trigger="recovery_is_kept")
def _() -> Any:
    row = factories.recovery(state="complete")
    return gone(row), another(row, generation=2)


@refuses("archive_is_kept", trigger="archive_is_kept")
def _() -> Any:
    """A file that no row names is nobody's to remove."""
    row = factories.archive()
    return gone(row), change(row, removed_at=NOW)


@refuses("continuation_is_kept", trigger="continuation_is_kept")
def _() -> Any:
    row = factories.continuation(state="withdrawn")
    return gone(row), another(row)


@refuses("recovery_keeps_company_of_lease")
def _() -> Any:
    row = factories.recovery(state="complete")
    return another(row, generation=2, company_id=factories.company().pk), another(row, generation=2)


@refuses("archive_keeps_company_of_lease")
def _() -> Any:
    """The generation is another company's too, so nothing but the lease's company is wrong."""
    row = unsaved()
    stranger = factories.recovery(state="complete")
    anew = {"name": "another", "attempt_id": uuid4()}
    return another(row, **anew, company_id=stranger.company_id, recovery_id=stranger.pk), another(row, **anew)


@refuses("archive_keeps_company_of_recovery")
def _() -> Any:
    row = unsaved()
    stranger = factories.stopped()
    anew = {"name": "another", "attempt_id": uuid4()}
    return another(row, **anew, company_id=stranger.company_id, lease_id=stranger.pk), another(row, **anew)


@refuses("continuation_keeps_company_of_issue")
def _() -> Any:
    row = factories.continuation(state="withdrawn")
    return another(row, issue_id=factories.issue().pk), another(row, issue_id=factories.issue(row.company).pk)


@refuses("continuation_keeps_company_of_run")
def _() -> Any:
    row = factories.continuation(state="withdrawn")
    return another(row, run_id=factories.run().pk), another(row, run_id=factories.run(row.company).pk)


@refuses("continuation_keeps_company_of_started_run")
def _() -> Any:
    row = factories.continuation(kind="comment", state="started")
    anew = {"message_id": "another"}
    return (
        another(row, **anew, started_run_id=factories.run().pk),
        another(row, **anew, started_run_id=factories.run(row.company).pk),
    )


@refuses("continuation_keeps_company_of_recovery")
def _() -> Any:
    row = factories.continuation()
    stranger = factories.recovery(state="complete")
    mine = factories.lease(factories.environment(factories.account(row.company)))
    generation = factories.recovery(factories.stopped(mine), state="complete")
    return change(row, recovery_id=stranger.pk), change(row, recovery_id=generation.pk)


@refuses("recovery_action_keeps_company_of_issue")
def _() -> Any:
    row = factories.recovery_action()
    return change(row, issue_id=factories.issue().pk), change(row, issue_id=factories.issue(row.company).pk)


@refuses("recovery_action_keeps_company_of_run")
def _() -> Any:
    row = factories.recovery_action()
    return change(row, run_id=factories.run().pk), change(row, run_id=factories.run(row.company).pk)


@refuses("obligation_keeps_company_of_continuation")
def _() -> Any:
    row = factories.continuation().obligations.get()
    return another(row, **CLOSED, company_id=factories.company().pk), another(row, **CLOSED)


@refuses("operation_keeps_company_of_recovery")
def _() -> Any:
    row = factories.recovery()
    over = {"state": "resolved", "resolved_at": factories.at(0)}
    begun = factories.start(row.lease, **over)
    return (
        another(begun, recovery_id=factories.recovery(state="complete").pk),
        another(begun, recovery_id=row.pk),
    )


@refuses("run_keeps_company_of_continued")
def _() -> Any:
    row = factories.run()
    return change(row, continues_id=factories.run().pk), change(row, continues_id=factories.run(row.company).pk)


def _name(case: Case) -> str:
    return f"{case.refused_by}-{CASES.index(case)}"


@pytest.mark.django_db
@pytest.mark.parametrize("case", CASES, ids=_name)
def test_the_database_refuses_it_and_lets_its_neighbour_pass(case: Case) -> None:
    forbidden, allowed = case.build()
    with refused(case.refused_by):
        execute(forbidden)
    execute(allowed)


@pytest.mark.django_db
@pytest.mark.parametrize("case", [case for case in CASES if case.trigger], ids=_name)
def test_a_replica_role_and_a_restore_switch_no_trigger_off(case: Case) -> None:
    """`ENABLE ALWAYS`: foreign keys rest under this role, our rules do not."""
    forbidden, allowed = case.build()
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL session_replication_role = replica")
        with refused(case.refused_by):
            execute(forbidden)
        execute(allowed)


@pytest.mark.django_db
@pytest.mark.parametrize("case", [case for case in CASES if case.trigger], ids=_name)
def test_it_is_that_trigger_which_refuses(case: Case) -> None:
    """With this one switched off the write passes, or another of ours refuses it; with all of them off it passes."""
    forbidden, _ = case.build()
    tables = {
        row._meta.db_table
        for row in (
            Receipt,
            ActivityEntry,
            Attempt,
            Operation,
            Lease,
            Obligation,
            Hold,
            Installation,
            Run,
            Recovery,
            Archive,
            Continuation,
        )
    }
    with connection.cursor() as cursor:
        for table in sorted(tables):
            cursor.execute(f"ALTER TABLE {table} DISABLE TRIGGER USER")
        cursor.execute("SET LOCAL session_replication_role = replica")
        execute(forbidden)


@pytest.mark.django_db(transaction=True)
def test_what_is_checked_at_commit_is_checked_by_a_commit() -> None:
    """The cases above ask for the check at their end; a real COMMIT asks by itself, and nothing of it stays."""
    lease = factories.lease()
    with refused(PENDING), transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(*change(lease, state="pending_cleanup", released_at=NOW))
        cursor.execute("SELECT state FROM leases_lease WHERE id = %s", [lease.pk])
        assert cursor.fetchone() == ("pending_cleanup",)
    lease.refresh_from_db()
    assert lease.state == Lease.State.ACTIVE


@pytest.mark.django_db(transaction=True)
def test_the_check_at_commit_waits_for_whoever_holds_the_lease() -> None:
    """Else two transactions that each see half of a change could both pass."""
    owed = factories.teardown()
    receipt(owed.lease)

    def settle_without_the_lease() -> None:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute("SET LOCAL lock_timeout = '100ms'")
            cursor.execute(*close(owed))
            cursor.execute("SELECT 1")  # the statement itself did not wait

    with transaction.atomic():
        Lease.objects.select_for_update(no_key=True).get(pk=owed.lease_id)
        with pytest.raises(OperationalError, match="lock timeout"):
            elsewhere(settle_without_the_lease)
    with refused(PENDING):
        elsewhere(settle_without_the_lease)


@pytest.mark.django_db
@pytest.mark.parametrize("role", ["origin", "replica"])
def test_the_end_of_work_wakes_the_teardown_whoever_writes_it(role: str) -> None:
    """Trigger `activity_end_wakes_teardown`."""
    owed = factories.teardown(due_in=600)
    work = activity(owed.lease)
    unrelated = factories.teardown(due_in=600)
    committed()
    with connection.cursor() as cursor:
        cursor.execute(f"SET LOCAL session_replication_role = {role}")
        cursor.execute(*change(work, deadline=LATER))
        owed.refresh_from_db()
        assert owed.wakes == 0
        cursor.execute(*change(work, ended_at=NOW, outcome="completed"))
        owed.refresh_from_db()
        assert owed.wakes == 1
        assert owed.due_at <= factories.database_now()
        unrelated.refresh_from_db()
        assert unrelated.wakes == 0


@pytest.mark.django_db
@pytest.mark.parametrize("role", ["origin", "replica"])
@pytest.mark.parametrize(
    ("verb", "evidence", "epoch", "pays"),
    [
        ("delete", "destroyed", 2, True),
        ("delete", "absent", 2, True),
        ("delete", "stopped", 2, False),
        ("stop_only", "stopped", 2, True),
        ("stop_or_delete", "stopped", 2, True),
        ("delete", "destroyed", 1, False),
    ],
)
def test_a_receipt_wakes_history_and_spares_it_the_wait_where_it_may_pay(
    role: str,
    verb: str,
    evidence: str,
    epoch: int,
    pays: bool,  # noqa: FBT001 - of the table
) -> None:
    """Trigger `receipt_wakes_history`."""
    owed = factories.given_up(factories.lease(epoch=2), verb=verb)
    other = factories.given_up()
    committed()
    with connection.cursor() as cursor:
        cursor.execute(f"SET LOCAL session_replication_role = {role}")
        receipt(owed.lease, evidence=evidence, epoch=epoch)
        owed.refresh_from_db()
        assert owed.wakes == 1
        assert (owed.due_at <= factories.database_now()) is pays
        other.refresh_from_db()
        assert other.wakes == 0


def _end_the_operation(run: Run) -> Writes:
    begun = factories.operation(run_uuid=run.pk)
    return [change(begun, state="resolved", resolved_at=NOW), close(begun.obligations.get(), closed_as="nothing_owed")]


def _prove_the_end(run: Run) -> Writes:
    environment = factories.environment(factories.account(run.company))
    proven = receipt(factories.teardown(factories.lease(environment, run=run)).lease)
    return [another(proven, attempt_id=uuid4())]


def _was_to_start(run: Run) -> Lease:
    """A stopped sandbox, of an earlier run's lease, whose start for this run is over."""
    environment = factories.environment(factories.account(run.company))
    source = factories.stopped(factories.lease(environment, run=factories.run(run.company)))
    factories.start(source, run_uuid=run.pk, state="resolved", resolved_at=factories.database_now())
    return source


def _prove_the_end_of_what_an_earlier_run_had(run: Run) -> Writes:
    return [another(_was_to_start(run).receipts.get(), attempt_id=uuid4())]


def _end_the_start_for_a_later_run(run: Run) -> Writes:
    """While it is pending, no receipt of the sandbox is proof for anybody."""
    later = factories.start(_was_to_start(run), run_uuid=factories.run(run.company).pk)
    return [change(later, state="resolved", resolved_at=NOW), close(later.obligations.get(), closed_as="nothing_owed")]


def _end_the_work(run: Run) -> Writes:
    begun = factories.operation(run_uuid=run.pk)
    work = BridgeActivity.objects.create(company_id=begun.company_id, operation=begun, deadline=factories.at(60))
    return [change(work, ended_at=NOW, outcome="failed")]


@pytest.mark.django_db
@pytest.mark.parametrize("role", ["origin", "replica"])
def test_the_end_of_a_starts_calls_wakes_the_teardown_of_its_sandbox_whoever_writes_it(role: str) -> None:
    """Trigger `start_calls_end_wakes_teardown`."""
    source, unrelated = factories.stopped(), factories.teardown(due_in=600)
    begun = factories.start(source, state="resolved", resolved_at=factories.database_now())
    Lease.objects.filter(pk=source.pk).update(epoch=2)
    owed = factories.teardown(source, due_in=600)
    committed()
    with connection.cursor() as cursor:
        cursor.execute(f"SET LOCAL session_replication_role = {role}")
    execute([change(begun, call_ended_at=NOW)])
    owed.refresh_from_db()
    unrelated.refresh_from_db()
    assert (owed.wakes, owed.due_at <= factories.database_now(), unrelated.wakes) == (1, True, 0)
    execute([change(begun, call_ended_at=NOW)])  # told once
    owed.refresh_from_db()
    assert owed.wakes == 1


@pytest.mark.django_db
@pytest.mark.parametrize("role", ["origin", "replica"])
def test_the_end_of_a_lease_wakes_the_recovery_that_its_sandbox_kept_waiting_whoever_writes_it(role: str) -> None:
    """Trigger `lease_end_wakes_conflicting_recovery`."""
    lease = factories.lease()
    told = factories.operation(lease.environment, resource_id=lease.resource_id)
    unrelated = factories.operation(lease.environment)
    Obligation.objects.filter(operation__in=[told, unrelated]).update(
        quiet=Obligation.Quiet.IDENTITY_CONFLICT, due_at=None
    )
    owed = factories.teardown(lease)
    receipt(lease)
    committed()
    with connection.cursor() as cursor:
        cursor.execute(f"SET LOCAL session_replication_role = {role}")
    execute([change(lease, state="expired"), close(owed, closed_as="proven")])
    rows = [operation.obligations.get() for operation in (told, unrelated)]
    assert [(row.wakes, row.quiet) for row in rows] == [(1, ""), (0, "identity_conflict")]


@pytest.mark.django_db
@pytest.mark.parametrize("role", ["origin", "replica"])
@pytest.mark.parametrize(
    "end",
    [
        _end_the_operation,
        _prove_the_end,
        _prove_the_end_of_what_an_earlier_run_had,
        _end_the_start_for_a_later_run,
        _end_the_work,
    ],
)
def test_whatever_may_end_a_startup_wakes_it_whoever_writes_it(end: Callable[[Run], Writes], role: str) -> None:
    """Triggers `operation_end_wakes_startup`, `receipt_wakes_startup` and `startup_work_end_wakes_startup`."""
    owed, unrelated = factories.startup(), factories.startup()
    writes = end(owed.run)
    committed()
    owed.refresh_from_db()
    before = owed.wakes  # building the rows may have woken it
    Obligation.objects.filter(pk=owed.pk).update(quiet=Obligation.Quiet.WAITING, due_at=None)
    with connection.cursor() as cursor:
        cursor.execute(f"SET LOCAL session_replication_role = {role}")
    execute(writes)
    owed.refresh_from_db()
    assert owed.wakes == before + 1
    assert (owed.quiet, owed.due_at <= factories.database_now()) == ("", True)
    unrelated.refresh_from_db()
    assert (unrelated.wakes, unrelated.quiet) == (0, "waiting")


@pytest.mark.django_db
def test_a_wake_leaves_a_held_row_to_its_attempt_and_counts() -> None:
    held = factories.claimed(factories.teardown())
    quiet = factories.teardown(due_at=None, quiet="foreign_marks")
    closed = factories.probe()
    execute([close(closed)])
    with connection.cursor() as cursor:
        for row in (held, quiet, closed):
            cursor.execute("SELECT leases_wake(%s)", [row.pk])
    protection = held.due_at
    for row in (held, quiet, closed):
        row.refresh_from_db()
    assert (held.wakes, held.due_at) == (1, protection)
    assert (quiet.wakes, quiet.quiet) == (1, "")
    assert quiet.due_at <= factories.database_now()
    assert (closed.wakes, closed.due_at) == (0, None)


def _heard(write: Callable[[], None]) -> list[str]:
    """Return what a listener of the beat's channel hears of a committed write."""
    with connection.cursor() as cursor:
        cursor.execute("LISTEN paperclip_due")
    try:
        write()
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
        return [note.payload for note in connection.connection.notifies(timeout=0)]
    finally:
        with connection.cursor() as cursor:
            cursor.execute("UNLISTEN *")


def _write(statement: Statement) -> Callable[[], None]:
    def run() -> None:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute("SET LOCAL session_replication_role = replica")
            cursor.execute(*statement)

    return run


@pytest.mark.django_db(transaction=True)
def test_the_beat_is_notified_of_a_deadline_that_is_new_or_earlier_and_of_no_other() -> None:
    """Triggers `obligation_created_notifies` and `obligation_earlier_notifies`, on commit, NULL being infinity."""
    row = factories.probe(due_in=600)
    quiet = factories.probe(due_at=None, quiet="invalid_snapshot")
    fresh = factories.account(row.company)
    of_fresh = {"account_id": fresh.pk, "probed_account_id": fresh.pk}
    assert _heard(_write(another(row, **of_fresh, due_at=None, quiet="invalid_snapshot"))) == []
    fresh = factories.account(row.company)
    of_fresh = {"account_id": fresh.pk, "probed_account_id": fresh.pk}
    assert _heard(_write(another(row, **of_fresh))) == [_seconds(row, 0)]
    earlier = sql.SQL("due_at - interval '1 s'")
    later = sql.SQL("due_at + interval '1 s'")
    row.refresh_from_db()
    assert _heard(_write(change(row, due_at=earlier))) == [_seconds(row, -1)]
    assert _heard(_write(change(row, due_at=later))) == []
    assert _heard(_write(change(row, failures=3))) == []
    assert _heard(_write(change(row, due_at=None, quiet="invalid_snapshot"))) == []
    assert len(_heard(_write(change(quiet, due_at=LATER, quiet="")))) == 1
    assert _heard(_write(close(quiet))) == []


def _seconds(row: Obligation, shift: float) -> str:
    with connection.cursor() as cursor:
        cursor.execute("SELECT extract(epoch FROM %s::timestamptz + %s * interval '1 s')::text", [row.due_at, shift])
        return str(cursor.fetchone()[0])


@pytest.mark.django_db(transaction=True)
def test_an_account_notifies_when_more_of_it_can_be_claimed_and_at_no_other_time() -> None:
    """Trigger `account_opened_notifies`."""
    row = factories.account(blocked_until=factories.at(600), circuit="open", hinted_until=factories.at(600))
    for silent in (
        {"blocked_until": sql.SQL("blocked_until + interval '1 s'")},
        {"hinted_until": sql.SQL("hinted_until + interval '1 s'")},
        {"circuit_failures": 7},
        {"concurrency_limit": 10},
        {"circuit": "open"},
    ):
        assert _heard(_write(change(row, **silent))) == [], silent
    for telling in (
        {"blocked_until": sql.SQL("blocked_until - interval '1 s'")},
        {"blocked_until": None},
        {"hinted_until": None},
        {"concurrency_limit": 11},
        {"circuit": "closed"},
    ):
        assert _heard(_write(change(row, **telling))) == ["0"], telling


# 7. Nothing of ours is without a case


def _quiet_for(why: str, **named: Any) -> Obligation:
    """A teardown that is quiet for this reason, of a lease with these columns."""
    lease = factories.lease(**named)
    return factories.teardown(lease, due_at=None, quiet=why)


def _woken(*rows: Obligation) -> list[bool]:
    for row in rows:
        row.refresh_from_db()
    return [row.quiet == "" and row.due_at is not None and row.wakes > 0 for row in rows]


CREDENTIAL_REASONS = ["credential_inactive", "credential_missing", "credential_changed"]


@pytest.mark.django_db
@pytest.mark.parametrize("role", ["origin", "replica"])
@pytest.mark.parametrize("why", CREDENTIAL_REASONS)
@pytest.mark.parametrize("written", ["status", "reference", "digest"])
def test_a_write_to_a_credential_wakes_what_waits_for_it_whoever_writes_it(role: str, why: str, written: str) -> None:
    """Trigger `credential_written_wakes_who_waits`: a lease's, an operation's and a probe's, and nobody else's."""
    row = credential()
    account = factories.account(row.company, credential=row)
    where = factories.environment(account)
    lease = _quiet_for(why, environment_=where, credential_uuid=row.pk)
    operation = factories.operation(where, credential_uuid=row.pk).obligations.get()
    probe = factories.probe(account, due_at=None, quiet=why)
    of_another = _quiet_for(why, environment_=where, credential_uuid=uuid4(), credential_reference="env:OTHER")
    elsewhere_ = _quiet_for(why, credential_uuid=row.pk)
    for_another_reason = _quiet_for("foreign_marks", environment_=where, credential_uuid=row.pk)
    execute([change(operation, due_at=None, quiet=why)])
    with connection.cursor() as cursor:
        cursor.execute(f"SET LOCAL session_replication_role = {role}")
        cursor.execute(*change(row, name="renamed"))
        assert _woken(lease, operation, probe) == [False] * 3
        # Unconditional: the same value again is a write too, and whoever evaluates decides what it means.
        cursor.execute(*change(row, **{written: getattr(row, written)}))
        assert _woken(lease, operation, probe) == [True] * 3
        assert _woken(of_another, elsewhere_, for_another_reason) == [False] * 3


@pytest.mark.django_db
@pytest.mark.parametrize("role", ["origin", "replica"])
def test_a_credential_that_is_made_or_deleted_wakes_what_its_reference_stands_in_for(role: str) -> None:
    """Triggers `credential_made_wakes_who_waits` and `credential_deleted_wakes_who_waits`."""
    where = factories.environment()
    named = {"environment_": where, "credential_uuid": uuid4(), "credential_reference": "env:KEY"}
    first, other = (
        _quiet_for("credential_missing", **named),
        _quiet_for("credential_missing", **{**named, "credential_reference": "env:ANOTHER"}),
    )
    made = Credential(company_id=where.company_id, name="again", reference="env:KEY")
    with connection.cursor() as cursor:
        cursor.execute(f"SET LOCAL session_replication_role = {role}")
        made.save(force_insert=True)
        assert _woken(first, other) == [True, False]
        second = _quiet_for("credential_inactive", **named)
        cursor.execute(*gone(made))
        assert _woken(second, other) == [True, False]


@pytest.mark.django_db
@pytest.mark.parametrize("role", ["origin", "replica"])
def test_another_credential_for_an_account_wakes_its_probe_and_nothing_else(role: str) -> None:
    """Trigger `account_credential_wakes_probe`."""
    account = factories.account()
    probe = factories.probe(account, due_at=None, quiet="credential_inactive")
    other = _quiet_for("credential_inactive", environment_=factories.environment(account), credential_uuid=uuid4())
    row = credential(account.company)
    with connection.cursor() as cursor:
        cursor.execute(f"SET LOCAL session_replication_role = {role}")
        cursor.execute(*change(account, name="renamed"))
        assert _woken(probe) == [False]
        cursor.execute(*change(account, credential_id=row.pk))
        assert _woken(probe, other) == [True, False]


@pytest.mark.django_db
@pytest.mark.parametrize("role", ["origin", "replica"])
def test_a_company_that_is_opened_again_wakes_what_waited_for_that(role: str) -> None:
    """Trigger `company_reopened_wakes_who_waits`."""
    where = factories.environment()
    recovery = factories.operation(where).obligations.get()
    other = _quiet_for("foreign_marks", environment_=where)
    execute([change(recovery, due_at=None, quiet="company_closed"), change(where.company, closed_at=NOW)])
    with connection.cursor() as cursor:
        cursor.execute(f"SET LOCAL session_replication_role = {role}")
        cursor.execute(*change(where.company, name="still closed"))
        assert _woken(recovery) == [False]
        cursor.execute(*change(where.company, closed_at=None))
        assert _woken(recovery, other) == [True, False]


ACTING = {
    "obligation_of_lane_makes_it": "makes; tests/cleanup/test_lane.py::test_the_first_row_of_it_makes_...",
    "trust_wakes_what_observed": "wakes; tests/scenarios/test_observing.py::test_trust_wakes_what_was_left_alone_...",
    "credential_made_wakes_who_waits": "wakes; test_a_credential_that_is_made_or_deleted_wakes_...",
    "credential_deleted_wakes_who_waits": "wakes; test_a_credential_that_is_made_or_deleted_wakes_...",
    "credential_written_wakes_who_waits": "wakes; test_a_write_to_a_credential_wakes_what_waits_for_it_...",
    "account_credential_wakes_probe": "wakes; test_another_credential_for_an_account_wakes_its_probe_...",
    "company_reopened_wakes_who_waits": "wakes; test_a_company_that_is_opened_again_wakes_...",
    "activity_end_wakes_teardown": "wakes; test_the_end_of_work_wakes_the_teardown_whoever_writes_it",
    "resource_learned_wakes_recovery": "wakes; tests/scenarios/test_creation.py::test_an_id_that_comes_late_wakes_...",
    "start_calls_end_wakes_teardown": "wakes; test_the_end_of_a_starts_calls_wakes_the_teardown_...",
    "lease_end_wakes_conflicting_recovery": "wakes; test_the_end_of_a_lease_wakes_the_recovery_...",
    "continuation_changed_wakes_it": "wakes; test_what_waits.test_whether_the_files_are_wanted_wakes_its_continuation",
    "operation_end_wakes_startup": "wakes; test_whatever_may_end_a_startup_wakes_it_...",
    "receipt_wakes_history": "wakes; test_a_receipt_wakes_history_and_spares_it_the_wait_...",
    "receipt_wakes_startup": "wakes; test_whatever_may_end_a_startup_wakes_it_...",
    "startup_work_end_wakes_startup": "wakes; test_whatever_may_end_a_startup_wakes_it_...",
    "lease_kept_owes_its_disposal": "opens; tests/scenarios/test_retained.py",
    "lease_made_kept_owes_its_disposal": "opens; tests/scenarios/test_retained.py",
    "lease_kept_no_more_owes_no_disposal": "closes; tests/scenarios/test_retained.py",
    "hold_written_wakes_settles": "wakes; test_every_write_that_can_end_a_hold_wakes_the_disposal",
    "run_written_wakes_settles": "wakes; test_every_write_that_can_end_a_hold_wakes_the_disposal",
    "run_deleted_wakes_settles": "wakes; test_every_write_that_can_end_a_hold_wakes_the_disposal",
    "lease_written_wakes_settles": "wakes; test_every_write_that_can_end_a_hold_wakes_the_disposal",
    "lease_end_wakes_settles": "wakes; test_every_write_that_can_end_a_hold_wakes_the_disposal",
    "start_end_wakes_settles": "wakes; test_every_write_that_can_end_a_hold_wakes_the_disposal",
    "attempt_end_wakes_settles": "wakes; test_every_write_that_can_end_a_hold_wakes_the_disposal",
    "run_made_held_wakes_watch": "opens; tests/cleanup/test_lapsing.py",
    "run_held_wakes_watch": "opens; tests/cleanup/test_lapsing.py",
    "run_lapse_healed_wakes_watch": "wakes; tests/cleanup/test_lapsing.py",
    "run_lapsed_end_wakes_watch": "wakes; tests/cleanup/test_lapsing.py",
    "run_end_owes_settles": "opens; tests/scenarios/test_orphans.py",
    "lease_made_unheld_owes_its_settle": "opens; tests/scenarios/test_orphans.py",
    "lease_unheld_owes_its_settle": "opens; tests/scenarios/test_orphans.py",
    "startup_end_wakes_orphans": "wakes; tests/scenarios/test_orphans.py",
    "operation_over_wakes_orphans": "wakes; tests/scenarios/test_orphans.py",
    "acknowledgement_wakes_orphans": "wakes; tests/scenarios/test_orphans.py",
    "lease_state_wakes_what_waits": "wakes; tests/leases/test_what_waits.py",
    "operation_state_wakes_what_waits": "wakes; tests/leases/test_what_waits.py",
    "receipt_wakes_what_waits": "wakes; tests/leases/test_what_waits.py",
    "startup_end_wakes_what_waits": "wakes; tests/leases/test_what_waits.py",
    "run_written_wakes_what_waits": "wakes; tests/leases/test_what_waits.py",
    "run_deleted_wakes_what_waits": "wakes; tests/leases/test_what_waits.py",
    "recovery_begun_wakes_what_waits": "wakes; tests/leases/test_what_waits.py",
    "recovery_ended_wakes_what_waits": "wakes; tests/leases/test_what_waits.py",
    "issue_facts_wake_continuations": "wakes; tests/leases/test_what_waits.py",
    "run_facts_wake_continuations": "wakes; tests/leases/test_what_waits.py",
    "recovery_action_wakes_continuations": "wakes; tests/leases/test_what_waits.py",
    "recovery_action_taken_back_wakes_continuations": "wakes; tests/leases/test_what_waits.py",
    "fence_end_wakes_continuations": "wakes; tests/leases/test_what_waits.py",
    "lane_opened_notifies": "notifies; tests/cleanup/test_alarm.py",
    "obligation_created_notifies": "notifies; test_the_beat_is_notified_of_a_deadline_...",
    "obligation_earlier_notifies": "notifies; test_the_beat_is_notified_of_a_deadline_...",
    "account_opened_notifies": "notifies; test_an_account_notifies_when_more_of_it_can_be_claimed_...",
}
"""Triggers that refuse nothing."""

IMPLIED = re.compile(
    r"^(credential|account|environment|issue|run|lease|operation|obligation|recovery|continuation)_of_(company|account)$"
)
"""Unique keys over (company or account, id) that are there as targets of foreign keys: the id alone is unique."""

OF_DJANGO = re.compile(r"_pkey$|_fk_|_check$|_not_null$")
"""What Django makes for a primary key, a foreign key of one column and a positive integer."""


@pytest.mark.django_db
def test_every_constraint_and_trigger_of_ours_has_a_case() -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT conname FROM pg_constraint WHERE conrelid::regclass::text LIKE 'leases\\_%' AND contype <> 't'
            UNION
            SELECT indexrelid::regclass::text FROM pg_index
             WHERE indisunique AND indrelid::regclass::text LIKE 'leases\\_%'
            """
        )
        constraints = {name for (name,) in cursor.fetchall() if not (OF_DJANGO.search(name) or IMPLIED.match(name))}
        cursor.execute(
            "SELECT tgname FROM pg_trigger WHERE tgrelid::regclass::text LIKE 'leases\\_%' AND NOT tgisinternal"
        )
        triggers = {name for (name,) in cursor.fetchall()}
    assert constraints - {case.refused_by for case in CASES} == set()
    assert triggers - {case.trigger for case in CASES} - ACTING.keys() == set()
    assert ACTING.keys() <= triggers


@pytest.mark.django_db
def test_every_trigger_of_ours_is_always_enabled() -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT tgrelid::regclass::text, tgname FROM pg_trigger WHERE NOT tgisinternal AND tgenabled <> 'A'"
        )
        assert cursor.fetchall() == []
