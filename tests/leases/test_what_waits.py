"""What wakes a recovery, who watches a restart, a continuation and a cancellation: every write that may end their wait.

In SQL, past the ORM, under the role of an application and that of a replica: whoever writes. Each write wakes exactly
those who wait for it, and nobody of another run or issue.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from django.db import connection

from leases.models import Issue, Lease, Obligation, Run
from tests import factories
from tests.leases.test_constraints import NOW, Writes, another, change, close, committed, execute, gone

ROLES = pytest.mark.parametrize("role", ["origin", "replica"])
OVER = {"state": "exhausted", "finished_at": NOW, "failure": "stopped", "disposition": "use_alternative_strategy"}


def quieted(*rows: Obligation) -> None:
    committed()
    for row in rows:
        Obligation.objects.filter(pk=row.pk).update(quiet=Obligation.Quiet.WAITING, due_at=None, wakes=0)


def written(writes: Writes, role: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(f"SET LOCAL session_replication_role = {role}")
    execute(writes)


def are_woken(*rows: Obligation) -> list[bool]:
    for row in rows:
        row.refresh_from_db()
        assert (row.wakes > 0) == (row.quiet == "") == (row.due_at is not None)
    return [row.wakes > 0 for row in rows]


# The end of a run, as its rows say it


def _lease_of(run: Run) -> Lease:
    return factories.lease(factories.environment(factories.account(run.company)), run=run)


def _a_lease_settles(run: Run) -> Writes:
    lease = factories.teardown(_lease_of(run)).lease
    assert lease is not None
    factories.receipt(lease)
    return [change(lease, state="expired"), close(lease.obligations.get(kind="teardown"))]


def _a_lease_goes_on_in_another(run: Run) -> Writes:
    before = factories.stopped(_lease_of(run))
    after = factories.lease(before.environment, resource_id=before.resource_id)
    return [change(before, state="expired", successor_id=after.pk)]


def _a_receipt_is_written(run: Run) -> Writes:
    return [another(factories.receipt(factories.teardown(_lease_of(run)).lease), evidence="absent")]


def _a_creation_ends(run: Run) -> Writes:
    where = factories.environment(factories.account(run.company))
    operation = factories.operation(where, run_uuid=run.pk)
    return [change(operation, state="resolved", resolved_at=NOW), close(operation.obligations.get())]


def _a_start_of_its_sandbox_by_another_run_ends(run: Run) -> Writes:
    source = factories.stopped(_lease_of(run))
    operation = factories.start(source, run_uuid=factories.run(run.company).pk)
    return [change(operation, state="resolved", resolved_at=NOW), close(operation.obligations.get())]


def _its_startup_ends(run: Run) -> Writes:
    owed = factories.startup(run)
    return [close(owed, closed_as="nothing_owed", quiet="")]


def _it_ends(run: Run) -> Writes:
    return [change(run, status="cancelled", finished_at=NOW)]


def _its_end_is_dated(run: Run) -> Writes:
    return [change(run, finished_at=NOW)]


def _its_agent_is_told(run: Run) -> Writes:
    return [change(run, agent="agent-1")]


def _its_adapter_is_told(run: Run) -> Writes:
    return [change(run, adapter="claude")]


def _a_generation_begins(run: Run) -> Writes:
    row = factories.recovery(factories.stopped(_lease_of(run)), state="complete")
    return [another(row, generation=2)]


def _a_generation_ends(run: Run) -> Writes:
    row = factories.recovery(factories.stopped(_lease_of(run)))
    owed = row.lease.obligations.filter(kind__in=["recover_workspace", "end_recovery"])
    return [change(row, **OVER), *map(close, owed)]


def _a_fence_on_its_sandbox_ends(run: Run) -> Writes:
    fence = factories.hold(factories.stopped(_lease_of(run)), "shutdown_fence")
    return [change(fence, ended_at=NOW, ended_by="somebody")]


OF_THE_RUN = [
    _a_fence_on_its_sandbox_ends,
    _a_lease_settles,
    _a_lease_goes_on_in_another,
    _a_receipt_is_written,
    _a_creation_ends,
    _a_start_of_its_sandbox_by_another_run_ends,
    _its_startup_ends,
    _it_ends,
    _its_end_is_dated,
    _its_agent_is_told,
    _its_adapter_is_told,
    _a_generation_begins,
    _a_generation_ends,
]


@pytest.mark.django_db
@ROLES
@pytest.mark.parametrize("write", OF_THE_RUN)
def test_whatever_may_end_an_execution_wakes_its_cancellation_and_the_continuations_of_its_issue(
    write: Callable[[Run], Writes], role: str
) -> None:
    """Triggers `lease_state_`, `operation_state_`, `receipt_`, `startup_end_`, `run_written_`, `recovery_begun_` and
    `recovery_ended_wakes_what_waits`, and `fence_end_wakes_continuations`.
    """
    issue = factories.issue()
    run = factories.run(issue.company, issue=issue)
    cancellation = factories.cancelled(run)
    # Of the issue, whichever run each of them continues: another live run of it is a gate too.
    continuation = factories.continuation(factories.failed_run(issue.company, issue=issue)).obligations.get()
    elsewhere = factories.continuation(factories.failed_run(issue.company)).obligations.get()
    another_run = factories.cancelled(factories.run(issue.company))
    writes = write(run)
    quieted(cancellation, continuation, elsewhere, another_run)
    written(writes, role)
    assert are_woken(cancellation, continuation, elsewhere, another_run) == [True, True, False, False]


@pytest.mark.django_db
@ROLES
def test_a_run_that_moves_to_another_issue_or_is_deleted_wakes_whoever_waited_for_it(role: str) -> None:
    """Triggers `run_written_wakes_what_waits` and `run_deleted_wakes_what_waits`."""
    issue, other = (factories.issue(factories.company()) for _ in range(2))
    first = factories.run(issue.company, issue=issue)
    second = factories.run(issue.company, issue=issue)
    other.company_id = issue.company_id
    other.save()
    owed = [factories.continuation(factories.failed_run(one.company, issue=one)) for one in (issue, other)]
    rows = [one.obligations.get() for one in owed]
    quieted(*rows)
    written([change(first, issue_id=other.pk)], role)
    assert are_woken(*rows) == [True, True]
    quieted(*rows)
    written([gone(second)], role)
    assert are_woken(*rows) == [True, False]


# The facts of the control plane


def _facts_of_the_issue(issue: Issue, run: Run) -> list[Writes]:
    row = factories.issue_facts(issue)
    return [[change(row, decisions_pending=1)], [gone_facts("leases_issuefacts", "issue_id", issue.pk)]]


def _facts_of_the_run(issue: Issue, run: Run) -> list[Writes]:
    row = factories.run_facts(run)
    return [[change(row, adapter_attached=True)], [gone_facts("leases_runfacts", "run_id", run.pk)]]


def _recovery_action(issue: Issue, run: Run) -> list[Writes]:
    row, open_one = factories.recovery_action(run), factories.recovery_action(run)
    return [[another(row)], [change(row, closed_at=NOW, closed_by="user:test")], [gone(open_one)]]


def gone_facts(table: str, column: str, of: object) -> tuple[str, list[object]]:
    return f"DELETE FROM {table} WHERE {column} = %s", [of]  # noqa: S608 - names of this file


@pytest.mark.django_db
@ROLES
@pytest.mark.parametrize("tell", [_facts_of_the_issue, _facts_of_the_run, _recovery_action])
def test_every_fact_that_is_told_changed_or_taken_back_wakes_the_continuations_of_its_issue(
    tell: Callable[[Issue, Run], list[Writes]], role: str
) -> None:
    """Triggers `issue_facts_`, `run_facts_`, `recovery_action_` and `recovery_action_taken_back_wakes_...`."""
    issue = factories.issue()
    run = factories.failed_run(issue.company, issue=issue)
    row = factories.continuation(run).obligations.get()
    other = factories.continuation(factories.failed_run(issue.company)).obligations.get()
    quieted(row, other)
    writes = tell(issue, run)  # tells it: by an INSERT
    assert are_woken(row, other) == [True, False]
    for write in writes:
        quieted(row, other)
        written(write, role)
        assert are_woken(row, other) == [True, False], write


@pytest.mark.django_db
def test_a_continuation_that_is_over_is_woken_by_nothing() -> None:
    run = factories.failed_run()
    row = factories.continuation(run).obligations.get()
    execute([change(row.continuation, state="withdrawn", withdrawn_by="u", ended_at=NOW), close(row)])
    factories.issue_facts(run.issue)
    execute([change(run, finished_at=NOW)])
    row.refresh_from_db()
    assert (row.wakes, row.due_at) == (0, None)


# What a recovery waits for, and who watches a restart


def _it_is_reopened(lease: Lease) -> Writes:
    of_another = factories.teardown(factories.lease(lease.environment)).pk
    copied = another(Obligation.objects.get(pk=of_another), lease_id=lease.pk)
    return [change(lease, state="pending_cleanup", kept_until=None, epoch=2), copied]


def _its_end_is_proven_again(lease: Lease) -> Writes:
    return [another(lease.receipts.get(), attempt_id=lease.pk)]


def _its_start_ends(lease: Lease) -> Writes:
    operation = factories.start(lease)
    return [change(operation, state="resolved", resolved_at=NOW), close(operation.obligations.get())]


@pytest.mark.django_db
@ROLES
@pytest.mark.parametrize("write", [_it_is_reopened, _its_end_is_proven_again, _its_start_ends])
def test_what_becomes_of_a_sandbox_wakes_its_recovery_and_who_watches_it(
    write: Callable[[Lease], Writes], role: str
) -> None:
    """Triggers `lease_state_`, `receipt_` and `operation_state_wakes_what_waits`."""
    lease, other = factories.stopped(), factories.stopped()
    rows: list[Obligation] = []
    for one in (lease, other):
        factories.recovery(factories.may_be_running(one))
        kinds = ["recover_workspace", "end_recovery", "watch_restart"]
        rows += one.obligations.filter(kind__in=kinds).order_by("pk")
    writes = write(lease)
    quieted(*rows)
    written(writes, role)
    assert are_woken(*rows) == [True] * 3 + [False] * 3


@pytest.mark.django_db
@ROLES
def test_a_generation_that_begins_or_ends_wakes_the_disposal_that_it_holds(role: str) -> None:
    """Triggers `recovery_begun_wakes_what_waits` and `recovery_ended_wakes_what_waits`."""
    lease, other = factories.stopped(), factories.stopped()
    rows = [one.obligations.get(kind="dispose") for one in (lease, other)]
    over = factories.recovery(lease, state="complete")
    quieted(*rows)
    written([another(over, generation=2)], role)
    assert are_woken(*rows) == [True, False]
    running = factories.recovery(lease, generation=3)
    owed = lease.obligations.filter(kind__in=["recover_workspace", "end_recovery"])
    quieted(*rows)
    written([change(running, **OVER), *map(close, owed)], role)
    assert are_woken(*rows) == [True, False]


@pytest.mark.django_db
@ROLES
def test_whether_the_files_are_wanted_wakes_its_continuation(role: str) -> None:
    """Trigger `continuation_changed_wakes_it`: it opens or closes the last gate, of this one and no other."""
    row, other = factories.continuation(), factories.continuation()
    mine, theirs = row.obligations.get(), other.obligations.get()
    quieted(mine, theirs)
    written([change(row, recovers_files=False)], role)
    assert are_woken(mine, theirs) == [True, False]
