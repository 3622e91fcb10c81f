"""What `prune` removes, what it never does, and under which role the database lets it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from django.db import IntegrityError, ProgrammingError, connection, transaction

import leases
from leases import audit, pruning
from leases.errors import LeaseError
from leases.models import (
    ActivityEntry,
    Archive,
    Attempt,
    BridgeActivity,
    Continuation,
    Environment,
    Hold,
    Lease,
    Obligation,
    Operation,
    Receipt,
    Recovery,
    RecoveryAction,
    Run,
)
from tests import factories
from tests.cleanup.test_decision_commands import _json, _run
from tests.concurrency import elsewhere
from tests.leases.test_deleting import ended, given_up, over, sought
from tests.scenarios.steps import snapshot

pytestmark = pytest.mark.django_db(transaction=True)

WHY: dict[str, Any] = {"actor": "olga", "reason": "a year is enough"}


@pytest.fixture(autouse=True)
def _any_age(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is made here is old enough a moment later: history cannot be written with another date."""
    monkeypatch.setattr(pruning, "YOUNGEST", timedelta(0))


def now() -> datetime:
    return factories.database_now()


def used_up(where: Environment | None = None, **values: Any) -> Lease:
    """A lease of the past with all that hangs on it: journal, attempts, work, a hold, a receipt."""
    lease = ended(where, **values)
    owed = lease.obligations.get(kind="teardown")
    factories.attempt(owed, outcome="proven")
    factories.operation(
        lease.environment,
        state=Operation.State.RESOLVED,
        resolved_at=now(),
        lease=lease,
        lease_uuid=lease.pk,
        resource_id=lease.resource_id,
        run_uuid=lease.run_id,
    )
    BridgeActivity.objects.create(
        company_id=lease.company_id, lease=lease, deadline=now(), ended_at=now(), outcome="completed"
    )
    Hold.objects.create(
        company_id=lease.company_id,
        lease=lease,
        kind="export",
        strength="soft",
        holder="x",
        ended_at=now(),
        ended_by="x",
    )
    audit.record("lease.acquired", lease, company_id=lease.company_id)
    return lease


WHOLE = {"attempts": 1, "activities": 1, "holds": 1, "obligations": 1, "receipts": 1, "operations": 1, "leases": 1}


def prune(before: datetime | None = None, **how: Any) -> dict[str, int]:
    """Prune, and see that a rehearsal said the same beforehand and wrote nothing."""
    date = before or now()
    told, state = pruning.what_is_over(date), snapshot()
    assert snapshot() == state
    done = pruning.prune(date, **WHY, **how)
    if not how.get("log") and not done.stopped:
        assert told.rows == done.rows
    return done.rows


def test_a_sandbox_of_the_past_goes_with_all_that_hangs_on_it() -> None:
    used_up()
    assert prune() == WHOLE
    for model in (Lease, Operation, Receipt, Obligation, Attempt, BridgeActivity, Hold):
        assert not model.objects.exists()
    entries = ActivityEntry.objects.filter(action="history.pruned")
    assert {(entry.actor, entry.reason) for entry in entries} == {("olga", "a year is enough")}
    assert sum(entry.details.get("leases", 0) for entry in entries) == 1
    assert ActivityEntry.objects.filter(action="lease.acquired").exists(), "the log stays unless it is asked for"
    assert prune() == {}


def test_what_is_younger_than_the_date_stays() -> None:
    date = now()
    used_up()
    before = snapshot()
    assert prune(date) == {}
    assert snapshot() == before


def _live_run(lease: Lease) -> None:
    Run.objects.filter(lease=lease).update(status=Run.Status.RUNNING)


def _startup(lease: Lease) -> None:
    factories.startup(lease.run)


def _cancellation(lease: Lease) -> None:
    """It is confirmed by the receipts."""
    factories.cancelled(lease.run)


def _waiting_continuation(lease: Lease) -> None:
    """It is admitted by the receipts of its issue's runs, when an approval comes, however late."""
    assert lease.run is not None
    Run.objects.filter(pk=lease.run.pk).update(issue=factories.issue(lease.company))
    lease.run.refresh_from_db()
    factories.continuation(lease.run)


def _verification(lease: Lease) -> None:
    sought(lease)


def _hold(lease: Lease) -> None:
    Hold.objects.create(
        company_id=lease.company_id, lease=lease, kind="operator", strength="always", holder="x", until=factories.at(60)
    )


def _work(lease: Lease) -> None:
    BridgeActivity.objects.create(company_id=lease.company_id, lease=lease, deadline=factories.at(60))


def _second_start(lease: Lease) -> None:
    """The creation is what a live successor of its sandbox is started again from."""
    factories.lease(lease.environment, resource_id=lease.resource_id, resource_name=lease.resource_name)


def _recovery(lease: Lease) -> None:
    factories.operation(lease.environment, resource_id=lease.resource_id)


@pytest.mark.parametrize(
    "needs",
    [_live_run, _startup, _cancellation, _waiting_continuation, _verification, _hold, _work, _second_start, _recovery],
)
def test_what_something_live_needs_stays_whole(needs: Any) -> None:
    where = factories.environment()
    lease = used_up(where, run=over(where.company))
    needs(lease)
    prune()
    assert Lease.objects.filter(pk=lease.pk).exists()
    assert lease.receipts.exists()
    assert lease.operations.filter(state="resolved").exists()


def test_a_debt_without_proof_stays_until_it_is_paid() -> None:
    lease = given_up()
    assert prune() == {}
    factories.receipt(lease)
    assert prune() == {}  # what looks for the proof has not seen it yet
    lease.obligations.filter(kind="verify_end").update(closed_at=now(), closed_as="proven", due_at=None)
    assert prune() == {"obligations": 2, "receipts": 1, "leases": 1}


def test_a_chain_of_leases_on_one_sandbox_goes_together_or_not_at_all() -> None:
    where = factories.environment()
    second = used_up(where)
    with transaction.atomic():
        first = factories.stopped(factories.lease(where, resource_id=second.resource_id))
        Obligation.objects.filter(lease=first, kind="dispose").update(
            closed_at=now(), closed_as="nothing_owed", due_at=None
        )
        first.state, first.successor = Lease.State.EXPIRED, second
        first.save(update_fields=["state", "successor"])
    _hold(second)
    prune()
    assert Lease.objects.count() == 2
    Hold.objects.filter(ended_at=None).update(ended_at=now(), ended_by="x")
    prune()
    assert not Lease.objects.exists()


def test_history_of_what_lives_goes_and_what_its_next_attempt_reads_stays() -> None:
    lease = factories.lease()
    owed = factories.teardown(lease)
    factories.attempt(owed, announced_call="recover")
    standing = Obligation.objects.create(
        company_id=lease.company_id, kind="extend", account=lease.account, lease=lease, due_at=factories.at(60)
    )
    for _ in range(3):
        factories.attempt(standing, outcome="extended")
    probe = factories.probe(lease.account)
    factories.attempt(probe)
    Obligation.objects.filter(pk=probe.pk).update(closed_at=now(), closed_as="proven", due_at=None)
    assert prune() == {"attempts": 4, "obligations": 1}
    assert owed.attempts.count() == 1


def test_a_creation_that_came_to_nothing_goes_and_one_that_is_not_known_stays() -> None:
    factories.operation(state=Operation.State.RESOLVED, resolved_at=now())
    factories.operation()
    factories.operation(state=Operation.State.UNVERIFIED, resolved_at=now())
    assert prune() == {"operations": 1}
    assert set(Operation.objects.values_list("state", flat=True)) == {"pending", "unverified"}


def test_the_log_of_what_is_gone_goes_only_when_it_is_asked_for() -> None:
    gone, there = used_up(), factories.lease()
    audit.record("lease.acquired", there, company_id=there.company_id)
    audit.record("company.noted", gone.company, company_id=gone.company_id)
    told = ActivityEntry.objects.filter(subject_id=str(gone.pk)).count()
    assert prune(log=True)["entries"] == told == 3
    kept = set(ActivityEntry.objects.exclude(action="history.pruned").values_list("action", "subject_id"))
    assert kept == {("lease.acquired", str(there.pk)), ("company.noted", str(gone.company_id))}


def used_up_by_failed_run() -> Lease:
    where = factories.environment()
    return used_up(where, run=factories.failed_run(where.company))


def recovered(**of_archive: Any) -> Recovery:
    """A recovery of the past of a sandbox of the past: its start, its work, its archive, and what continued from it."""
    lease = used_up_by_failed_run()
    activity = BridgeActivity.objects.create(
        company_id=lease.company_id, lease=lease, deadline=now(), ended_at=now(), outcome="completed"
    )
    recovery = factories.recovery(lease, state="complete", activity=activity)
    factories.start(lease, recovery=recovery, state="resolved", resolved_at=now())
    factories.archive(recovery, **{"removed_at": now(), **of_archive})
    continuation = factories.continuation(lease.run, state="started", recovery=recovery)
    Run.objects.filter(pk=continuation.started_run_id).update(status=Run.Status.SUCCEEDED)
    owed = Obligation.objects.create(
        company_id=lease.company_id,
        kind="start_continuation",
        continuation=continuation,
        closed_at=now(),
        closed_as="proven",
    )
    factories.attempt(owed, outcome="proven")
    action = factories.recovery_action(lease.run, closed_at=now(), closed_by="user:test")
    for row in (recovery, continuation, action):
        audit.record(f"{row._meta.model_name}.noted", row, company_id=row.company_id)
    return recovery


def test_recoveries_their_archives_and_what_continued_go_with_their_sandbox() -> None:
    recovered()
    assert prune() == {
        **WHOLE,
        "actions": 1,
        "activities": 2,
        "archives": 1,
        "attempts": 2,
        "continuations": 1,
        "obligations": 3,
        "operations": 2,
        "recoveries": 1,
    }
    for model in (Recovery, Archive, Continuation, RecoveryAction, Lease, Obligation):
        assert not model.objects.exists()
    prune(log=True)
    assert not ActivityEntry.objects.exclude(action__in=["history.pruned", "run.noted"]).exists()
    assert Run.objects.count() == 2, "the control plane's own rows are not ours to remove"


def _file(recovery: Recovery) -> None:
    """Nobody else knows whose the file in the storage is."""
    archive = recovery.archives.get()
    factories.archive(recovery, epoch=archive.epoch, removed_at=None)


def _waits(recovery: Recovery) -> None:
    run = factories.failed_run(recovery.company)
    factories.continuation(run, recovery=recovery)


def _runs(recovery: Recovery) -> None:
    """Not that it could: a lease that is over is not reopened."""
    factories.recovery(recovery.lease)


@pytest.mark.parametrize("needs", [_file, _waits, _runs])
def test_a_sandbox_whose_files_may_still_be_asked_for_stays_whole(needs: Any) -> None:
    recovery = recovered()
    needs(recovery)
    prune()
    assert Lease.objects.filter(pk=recovery.lease_id).exists()
    assert recovery.operations.exists()
    assert recovery.archives.exists()
    assert Recovery.objects.get(pk=recovery.pk).activity is not None
    assert recovery.continuations.filter(state="started").exists()


def test_a_continuation_without_a_recovery_goes_when_its_run_is_over_as_a_whole() -> None:
    """Until then, asking again returns the row, and starts nothing twice."""
    lease, withdrawn = used_up_by_failed_run(), factories.continuation(state="withdrawn")
    kept = factories.lease(lease.environment, run=factories.failed_run(lease.company))
    waiting = factories.continuation()
    for run in (lease.run, kept.run):
        factories.continuation(run, state="withdrawn")
    assert prune() == {**WHOLE, "obligations": 2, "continuations": 2}
    assert set(Continuation.objects.values_list("run_id", flat=True)) == {kept.run_id, waiting.run_id}
    assert not Continuation.objects.filter(pk=withdrawn.pk).exists()


def test_it_goes_in_batches_each_with_its_entry_and_stops_between_them() -> None:
    for _ in range(5):
        used_up()
    batches: list[int] = []
    done = pruning.prune(now(), **WHY, batch=2, stopping=lambda: len(batches) == 2, on_batch=batches.append)
    assert (done.stopped, batches) == (True, [2, 2])
    assert ActivityEntry.objects.filter(action="history.pruned").count() == 2
    assert Lease.objects.count() == 5
    rest = prune(batch=2)
    assert rest == {name: (1 if name == "activities" else 5) for name in WHOLE}


def test_a_sandbox_that_somebody_holds_is_left_for_the_next_time() -> None:
    first, second = used_up(), used_up()
    with transaction.atomic():
        Lease.objects.select_for_update(no_key=True).get(pk=first.pk)
        assert elsewhere(lambda: pruning.prune(now(), **WHY).rows)["leases"] == 1
    assert list(Lease.objects.values_list("pk", flat=True)) == [first.pk]
    assert prune()["leases"] == 1
    assert not Lease.objects.filter(pk=second.pk).exists()


def test_every_reference_to_what_is_removed_was_thought_of() -> None:
    """A new model that refers to history must say what becomes of it: else a batch would fail at commit."""
    refers = {
        (relation.related_model.__name__, model.__name__)
        for model in pruning.PRUNED
        for relation in model._meta.related_objects
    }
    assert refers == {
        ("Archive", "Lease"),
        ("Archive", "Receipt"),
        ("Archive", "Recovery"),
        ("Attempt", "Obligation"),
        ("BridgeActivity", "Lease"),
        ("BridgeActivity", "Operation"),
        ("Continuation", "Recovery"),
        ("Hold", "Lease"),
        ("InventoryFinding", "Lease"),
        ("InventoryFinding", "Obligation"),
        ("Lease", "Lease"),
        ("Obligation", "Continuation"),
        ("Obligation", "Lease"),
        ("Obligation", "Operation"),
        ("Operation", "Lease"),
        ("Operation", "Recovery"),
        ("Receipt", "Lease"),
        ("Recovery", "Lease"),
    }


# The role


def _refused(statement: str, values: list[Any]) -> str:
    with pytest.raises(IntegrityError) as error, transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(statement, values)
    return str(error.value.__cause__.diag.constraint_name)  # type: ignore[union-attr]  # psycopg's own


TABLES = {
    "leases_receipt": "receipt",
    "leases_activityentry": "activityentry",
    "leases_attempt": "attempt",
    "leases_operation": "operation",
    "leases_lease": "lease",
    "leases_obligation": "obligation",
    "leases_recovery": "recovery",
    "leases_archive": "archive",
    "leases_continuation": "continuation",
}


@pytest.mark.parametrize("table", TABLES)
def test_only_that_role_deletes_history_and_nobody_empties_a_table(table: str) -> None:
    """A superuser, as this session's user is, does not either: what counts is the current role."""
    recovered()
    assert _refused(f"DELETE FROM {table}", []) != ""  # noqa: S608 - a constant
    assert _refused(f"TRUNCATE {table} CASCADE", []).endswith("_is_not_emptied")
    with connection.cursor() as cursor:
        with transaction.atomic():
            cursor.execute(f"SET LOCAL ROLE {pruning.ROLE}")
            with pytest.raises(ProgrammingError, match="permission denied"), transaction.atomic():
                cursor.execute(f"TRUNCATE {table} CASCADE")
            with pytest.raises(ProgrammingError, match="permission denied"), transaction.atomic():
                cursor.execute(f"UPDATE {table} SET id = id")  # noqa: S608 - a constant
        cursor.execute("SELECT current_user, rolcanlogin, rolsuper FROM pg_roles WHERE rolname = %s", [pruning.ROLE])
        assert cursor.fetchone()[1:] == (False, False)


@pytest.fixture
def commoner() -> Iterator[str]:
    """A user of the database who is nobody's member, as a worker may be in production."""
    name = f"commoner_{uuid4().hex[:8]}"
    with connection.cursor() as cursor:
        cursor.execute(f"CREATE ROLE {name}")
        cursor.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {name}")
    yield name
    with connection.cursor() as cursor:
        cursor.execute("RESET SESSION AUTHORIZATION")
        cursor.execute(f"DROP OWNED BY {name}")
        cursor.execute(f"DROP ROLE {name}")


def as_user(name: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(f"SET SESSION AUTHORIZATION {name}")


def test_an_ordinary_user_who_was_given_the_role_removes_history_and_still_cannot_by_hand(commoner: str) -> None:
    used_up()
    date = now()
    with connection.cursor() as cursor:
        cursor.execute(f"GRANT INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO {commoner}")
        cursor.execute(f"GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO {commoner}")
        cursor.execute(f"GRANT {pruning.ROLE} TO {commoner}")
    as_user(commoner)
    assert _refused("DELETE FROM leases_receipt", []) == "receipt_is_append_only"
    assert pruning.prune(date, **WHY).rows == WHOLE


@pytest.mark.parametrize("may", [False, True])
def test_the_migration_makes_the_role_where_it_may_and_else_goes_on(commoner: str, *, may: bool) -> None:
    source = (Path(leases.__file__).parent / "migrations" / "sql" / "0012_prune.sql").read_text(encoding="utf-8")
    role = f"prune_{uuid4().hex[:8]}"
    block = source[source.index("DO $$") : source.index("CREATE FUNCTION")].replace(pruning.ROLE, role)
    with connection.cursor() as cursor:
        cursor.execute(f"ALTER ROLE {commoner} {'CREATEROLE' if may else 'NOCREATEROLE'}")
    as_user(commoner)
    with connection.cursor() as cursor:
        cursor.execute(block)
        cursor.execute(block)  # a second database of the server
        cursor.execute("SELECT count(*) FROM pg_roles WHERE rolname = %s", [role])
        assert cursor.fetchone()[0] == may
        if may:
            with transaction.atomic():
                cursor.execute(f"SET LOCAL ROLE {role}")
        cursor.execute("RESET SESSION AUTHORIZATION")
        cursor.execute(f"DROP ROLE IF EXISTS {role}")


def test_a_user_who_may_not_take_the_role_is_told_what_it_takes(commoner: str) -> None:
    used_up()
    date = now()
    as_user(commoner)
    with pytest.raises(LeaseError, match=r"CREATE ROLE paperclip_prune NOLOGIN; GRANT paperclip_prune TO ") as error:
        pruning.prune(date, **WHY)
    assert error.value.code == "role_missing"
    assert pruning.what_is_over(date).rows["leases"] == 1  # a rehearsal needs no role
    with connection.cursor() as cursor:
        cursor.execute("RESET SESSION AUTHORIZATION")
    assert Lease.objects.count() == 1


def test_a_role_without_its_rights_is_told_before_anything_is_removed() -> None:
    used_up()
    with connection.cursor() as cursor:
        cursor.execute(f"REVOKE DELETE ON leases_receipt FROM {pruning.ROLE}")
    try:
        with pytest.raises(LeaseError, match="leases_receipt; the owner of the tables runs: SELECT leases_grant_prune"):
            pruning.prune(now(), **WHY)
        assert Lease.objects.count() == 1
    finally:
        with connection.cursor() as cursor:
            cursor.execute("SELECT leases_grant_prune()")
    assert prune() == WHOLE


def test_a_role_that_is_missing_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pruning, "ROLE", "nobody_at_all")
    with pytest.raises(LeaseError, match="the database role nobody_at_all does not exist"):
        pruning.prune(now(), **WHY)


# The command


def test_the_command_counts_first_and_removes_with_a_reason() -> None:
    used_up()
    date = now().isoformat()
    before = snapshot()
    status, told = _run("prune", "--before", date, "--dry-run")
    assert (status, "would be removed; nothing was written" in told) == (0, True)
    assert _json("prune", "--before", date, "--dry-run")[1]["rows"] == WHOLE
    assert snapshot() == before
    assert _run("prune", "--before", date)[0] == 2
    status, found = _json("prune", "--before", date, "--reason", "a year is enough", "--actor", "olga", "--batch", "2")
    assert (status, found["rows"], found["total"]) == (0, WHOLE, 7)


def test_the_command_refuses_what_is_too_young_or_no_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pruning, "YOUNGEST", timedelta(days=1))
    status, told = _json("prune", "--before", now().isoformat(), "--reason", "x")
    assert (status, told["refused"]) == (2, "invalid")
    assert json.dumps(told)
    assert _run("prune", "--before", "2026-01-01", "--batch", "0", "--reason", "x")[0] == 2
    assert _run("prune", "--before", "2020-01-01", "--reason", "x")[0] == 0
