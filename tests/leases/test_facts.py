"""What a control plane tells: only what it names changes, nonsense is refused whole, and each change is told on."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest
from django.db import transaction

import leases
from leases import facts, holds
from leases.errors import LeaseError, NotFound
from leases.models import ActivityEntry, Hold, Issue, IssueFacts, Lease, RecoveryAction, Run, RunFacts
from leases.models.environments import Policy
from tests import factories
from tests.concurrency import Background, Gate, together
from tests.failed_task import FailedTask
from tests.scenarios.steps import audited, released, snapshot, state, sweep
from tests.stage import Rehearsal

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def issue() -> Issue:
    return factories.issue()


@pytest.fixture
def run() -> Run:
    company = factories.company()
    return factories.run(company, issue=factories.issue(company))


def of_issue(issue: Issue, **told: Any) -> IssueFacts:
    return leases.tell_issue(issue.pk, issue.company_id, actor="control plane", **told)


def of_run(run: Run, **told: Any) -> RunFacts:
    return leases.tell_run(run.pk, run.company_id, actor="control plane", **told)


def values(row: Any, *names: str) -> tuple[Any, ...]:
    row.refresh_from_db()
    return tuple(getattr(row, name) for name in names)


# What is told


def test_only_what_is_named_changes_and_none_takes_it_back(issue: Issue) -> None:
    told = of_issue(issue, is_open=True, assignee="ada")
    assert values(told, "is_open", "assignee", "decisions_pending") == (True, "ada", None)
    of_issue(issue, decisions_pending=2)
    assert values(told, "is_open", "assignee", "decisions_pending") == (True, "ada", 2)
    of_issue(issue, is_open=None, assignee="")
    assert values(told, "is_open", "assignee", "decisions_pending") == (None, "", 2)


def test_the_facts_of_a_run_likewise(run: Run) -> None:
    names = (
        "adapter_attached",
        "coordinator",
        "coordinator_owner",
        "accepted_failed_result",
        "history_available",
        "process_id",
    )
    told = of_run(run, adapter_attached=True, coordinator="committed", coordinator_owner="w1", process_id=7)
    assert values(told, *names) == (True, "committed", "w1", None, None, 7)
    of_run(run, accepted_failed_result=True, history_available=False, coordinator_owner="")
    assert values(told, *names) == (True, "committed", "", True, False, 7)
    of_run(run, **dict.fromkeys(names, None))
    assert values(told, *names) == (None, "", None, None, None, None)


def test_whose_run_it_is_and_how_it_is_run_are_final(run: Run) -> None:
    of_run(run, agent="ada", adapter="process")
    assert values(run, "agent", "adapter") == ("ada", "process")
    of_run(run, agent="ada", adapter="process", process_id=1)  # the same again
    before = snapshot()
    for told in ({"agent": "bob"}, {"adapter": "conversation"}, {"agent": None}, {"adapter": None}):
        with pytest.raises(LeaseError) as refused:
            of_run(run, **told, process_id=2)
        assert refused.value.code == "final"
    assert snapshot() == before


def test_each_change_is_audited_with_what_changed_and_the_same_again_writes_nothing(issue: Issue, run: Run) -> None:
    of_issue(issue, is_open=True, assignee="ada")
    of_run(run, agent="ada", coordinator="settling")
    before = snapshot()
    of_issue(issue, is_open=True, assignee="ada")
    of_run(run, agent="ada", coordinator="settling")
    of_issue(issue)
    assert snapshot() == before
    of_issue(issue, is_open=True, assignee="bob")
    entries = ActivityEntry.objects.filter(action="issue.told").order_by("pk")
    assert [entry.details for entry in entries] == [{"is_open": True, "assignee": "ada"}, {"assignee": "bob"}]
    assert {entry.actor for entry in entries} == {"control plane"}
    (of_the_run,) = ActivityEntry.objects.filter(action="run.told")
    assert of_the_run.details == {"agent": "ada", "coordinator": "settling"}


# Nonsense


ISSUE_NONSENSE: dict[str, tuple[Any, ...]] = {
    "is_open": (1, "yes"),
    "assignee": (7, "x" * 201, "a\nb", "a\x00"),
    "decisions_pending": (-1, 2**31, 1.0, True, "1"),
    "actor": ("", None, "a\nb"),
}
RUN_NONSENSE: dict[str, tuple[Any, ...]] = {
    "agent": ("", 7, "x" * 201, "a\x00"),
    "adapter": ("", 7, "x" * 51),
    "adapter_attached": (0, "no"),
    "coordinator": ("", "done", 7, "TERMINAL_FAILURE"),
    "coordinator_owner": (7, "x" * 201),
    "accepted_failed_result": (1,),
    "history_available": ("yes",),
    "process_id": (-1, 2**31, True, "1", 1.5),
    "actor": ("", None),
}


def _each(table: dict[str, tuple[Any, ...]]) -> list[tuple[str, Any]]:
    return [(name, value) for name, values in table.items() for value in values]


@pytest.mark.parametrize(("name", "value"), _each(ISSUE_NONSENSE), ids=repr)
def test_nonsense_about_a_task_is_refused_whole(issue: Issue, name: str, value: Any) -> None:
    before = snapshot()
    told = {"is_open": True, "actor": "control plane", name: value}
    with pytest.raises(LeaseError) as refused:
        leases.tell_issue(issue.pk, issue.company_id, **told)
    assert refused.value.code == "invalid"
    assert snapshot() == before


@pytest.mark.parametrize(("name", "value"), _each(RUN_NONSENSE), ids=repr)
def test_nonsense_about_a_run_is_refused_whole(run: Run, name: str, value: Any) -> None:
    before = snapshot()
    told = {"adapter_attached": True, "agent": "ada", "actor": "control plane", name: value}
    with pytest.raises(LeaseError) as refused:
        leases.tell_run(run.pk, run.company_id, **told)
    assert refused.value.code == "invalid"
    assert snapshot() == before


def test_what_another_company_has_is_not_there(issue: Issue, run: Run) -> None:
    other = factories.company().pk
    action = leases.open_recovery_action(run.issue_id, run.company_id, run_id=run.pk, cause="failed")
    before = snapshot()
    for ask in (
        lambda: leases.tell_issue(issue.pk, other, is_open=True),
        lambda: leases.tell_issue(uuid4(), issue.company_id, is_open=True),
        lambda: leases.tell_run(run.pk, other, adapter_attached=True),
        lambda: leases.open_recovery_action(issue.pk, other, run_id=None, cause="x"),
        lambda: leases.open_recovery_action(issue.pk, issue.company_id, run_id=run.pk, cause="x"),
        lambda: leases.close_recovery_action(action.pk, other),
        lambda: leases.close_recovery_action(uuid4(), run.company_id),
    ):
        with pytest.raises(NotFound):
            ask()
    for nonsense in (
        lambda: leases.tell_issue("an issue", issue.company_id, is_open=True),  # type: ignore[arg-type]
        lambda: leases.open_recovery_action(issue.pk, issue.company_id, run_id=None, cause=""),
        lambda: leases.close_recovery_action(action.pk, run.company_id, reason="x" * 501),
    ):
        with pytest.raises(LeaseError) as refused:
            nonsense()
        assert refused.value.code == "invalid"
    assert snapshot() == before


# Recovery actions


def test_an_action_is_opened_and_closed_once(run: Run) -> None:
    opened = together(*[lambda: _opened(run)] * 3)
    assert len({action.pk for action in opened}) == 1
    action = opened[0]
    assert audited("recovery_action.opened", action) == 1
    for _ in range(2):
        closed = leases.close_recovery_action(action.pk, run.company_id, actor="control plane", reason="resolved")
        assert closed.closed_by == "control plane"
    assert audited("recovery_action.closed", action) == 1
    assert _opened(run).pk != action.pk  # it failed once more


def _opened(run: Run) -> RecoveryAction:
    return leases.open_recovery_action(run.issue_id, run.company_id, run_id=run.pk, cause="failed")


def test_while_it_is_open_the_kept_sandboxes_of_the_task_are_held(rehearsal: Rehearsal) -> None:
    """Also one that is nobody's, which would be destroyed at once: a user has not read by then that the run failed."""
    Run.objects.filter(pk=rehearsal.run.pk).update(issue=factories.issue(rehearsal.company))
    rehearsal.run.refresh_from_db()
    lease = released(rehearsal, Policy.RETAIN_ON_FAILURE, outcome="failed")
    Run.objects.filter(pk=rehearsal.run.pk).update(status="failed", finished_at=factories.at(0))
    action = _opened(rehearsal.run)
    sweep(rehearsal)
    assert state(lease) == "retained"
    Lease.objects.filter(pk=lease.pk).update(orphaned_at=factories.at(0))
    sweep(rehearsal)
    assert (state(lease), [reason.name for reason in holds.of(lease).reasons]) == ("retained", ["recovery_action"])
    leases.close_recovery_action(action.pk, rehearsal.company.pk)
    assert not Hold.objects.filter(ended_at=None).exists()
    sweep(rehearsal)
    assert state(lease) == "failed"  # as its use was; its sandbox is destroyed


def test_the_holds_of_two_actions_do_not_end_each_other(run: Run) -> None:
    first, second = _opened(run), facts.open_recovery_action(run.issue_id, run.company_id, run_id=None, cause="else")  # type: ignore[arg-type]
    leases.close_recovery_action(first.pk, run.company_id)
    (standing,) = Hold.objects.filter(ended_at=None)
    assert standing.holder == f"recovery action {second.pk}"


# At the same time


def test_what_is_told_at_once_is_all_there(rehearsal: Rehearsal) -> None:
    task = FailedTask(rehearsal, told=False)
    together(
        lambda: task.tell_issue(is_open=True),
        lambda: task.tell_issue(assignee="ada"),
        lambda: task.tell_issue(decisions_pending=0),
        lambda: task.tell_run(agent="ada"),
        lambda: task.tell_run(adapter_attached=False),
    )
    issue = IssueFacts.objects.get(issue=task.issue)
    assert (issue.is_open, issue.assignee, issue.decisions_pending) == (True, "ada", 0)
    run = RunFacts.objects.select_related("run").get(run=task.run)
    assert (run.run.agent, run.adapter_attached) == ("ada", False)


def test_telling_waits_for_whoever_decides_about_the_task(run: Run) -> None:
    gate = Gate()

    def decide() -> None:
        with transaction.atomic():
            Issue.objects.select_for_update().get(pk=run.issue_id)
            gate()

    deciding = Background(decide)
    gate.wait()
    telling = Background(lambda: of_run(run, adapter_attached=False))
    assert not RunFacts.objects.exists()
    gate.open()
    deciding.result()
    assert telling.result().adapter_attached is False
