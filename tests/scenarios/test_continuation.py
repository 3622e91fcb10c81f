"""S: what a user asks for after a run failed starts one run, by itself, when the last gate opens."""

from __future__ import annotations

import pytest

import leases
from cleanup.claims import LANE
from cleanup.engine import Engine
from leases.errors import ContinuationRefused, LeaseError
from leases.models import Attempt, Lease, Obligation, Operation, Receipt, Run
from providers.contract import ErrorKind
from tests import factories
from tests.concurrency import together
from tests.failed_task import ADAPTER, AGENT, FailedTask, owed_by, seen
from tests.scenarios.steps import attempts, evidence, fails, owed, snapshot, sweep, sweep_lane
from tests.stage import Rehearsal

START = Obligation.Kind.START_CONTINUATION


def test_a_retry_starts_one_queued_run_that_goes_on_from_the_failed_one(rehearsal: Rehearsal) -> None:
    task = FailedTask(rehearsal)
    row = task.retried()
    sweep(rehearsal)
    assert seen(row) == ("started", "")
    (run,) = task.started()
    assert (run.status, run.continues_id, run.agent, run.adapter, run.fresh_workspace) == (
        Run.Status.QUEUED,
        task.run.pk,
        AGENT,
        "",
        False,
    )
    assert row.started_run_id == run.pk
    assert owed_by(row).closed_as == "proven"


# S-251, S-252, S-254 to S-257


def test_a_comment_waits_for_the_cleanup_and_starts_by_itself_after_it(rehearsal: Rehearsal) -> None:
    """S-251."""
    task = FailedTask(rehearsal, owed=True)
    row = task.commented()
    sweep_lane(START)
    assert seen(row) == ("waiting", "remote_cleanup")
    assert str(lease_of(task).pk) in row.hold_sentence
    assert owed_by(row).quiet == "waiting"
    sweep(rehearsal)
    assert seen(row) == ("started", "")
    assert len(task.started()) == 1


def test_a_message_older_than_the_runs_end_is_held_and_a_newer_one_or_a_queued_one_starts(rehearsal: Rehearsal) -> None:
    """S-252."""
    task = FailedTask(rehearsal)
    old = task.commented("old", authored_in=-3600)
    sweep_lane(START)
    assert seen(old) == ("waiting", "message_predates_stop")
    queued = task.commented("queued", authored_in=-3600, queued=True)
    sweep_lane(START)
    assert seen(queued) == ("started", "")
    assert seen(old)[0] == "waiting"  # joins no run that it may not start
    leases.withdraw_continuation(old.pk, task.company.pk, actor="a user")
    assert not Obligation.objects.filter(kind=START, closed_at=None).exists()


def test_another_live_run_of_the_task_holds_it_until_it_is_over(rehearsal: Rehearsal) -> None:
    """S-254."""
    task = FailedTask(rehearsal)
    other = factories.run(task.company, issue=task.issue)
    row = task.retried()
    sweep_lane(START)
    assert seen(row) == ("waiting", "execution_active")
    task.fails(other)
    sweep_lane(START)
    assert seen(row) == ("started", "")


def test_nobody_but_a_user_continues_a_run(rehearsal: Rehearsal) -> None:
    """S-255."""
    task = FailedTask(rehearsal)
    before = snapshot()
    for ask in (task.retried, task.commented):
        with pytest.raises(ContinuationRefused, match="only a user") as refused:
            ask(by_user=False, actor="an agent")
        assert refused.value.code == "not_a_user"
    assert snapshot() == before


def test_an_agent_that_is_run_differently_by_now_makes_no_other_run_of_an_old_one(rehearsal: Rehearsal) -> None:
    """S-256."""
    task = FailedTask(rehearsal)
    with pytest.raises(LeaseError, match="for good") as refused:
        task.tell_run(adapter="conversation")
    assert refused.value.code == "final"
    row = task.retried()
    sweep_lane(START)
    (run,) = task.started()
    task.tell_run(run, adapter="conversation")
    for one in (run, task.run):
        one.refresh_from_db()
    assert (run.adapter, task.run.adapter, task.run.status) == ("conversation", ADAPTER, "failed")
    assert seen(row) == ("started", "")


def test_after_a_startup_that_failed_a_comment_and_a_retry_start_the_same_run_and_history_stays(
    rehearsal: Rehearsal,
) -> None:
    """S-257."""
    task = FailedTask(rehearsal)
    assert evidence(lease_of(task)) == ["destroyed"]
    history = (Lease, Receipt, Attempt, Operation)
    before = {model: list(model.objects.order_by("pk").values()) for model in history}
    comment, retry = task.commented(), task.retried()
    sweep_lane(START)
    assert seen(comment) == seen(retry) == ("started", "")
    assert comment.started_run_id == retry.started_run_id
    assert len(task.started()) == 1
    task.action.refresh_from_db()
    assert task.action.closed_by == f"run {comment.started_run_id}"
    for model in (Lease, Receipt, Operation):
        assert list(model.objects.order_by("pk").values()) == before[model]
    kept = {row["id"]: row for row in Attempt.objects.values()}
    assert all(kept[row["id"]] == row for row in before[Attempt])


# K: the clicks of a retry, and the run that they start


def test_two_clicks_are_one_teardown_and_one_run_and_a_third_adopts_it(rehearsal: Rehearsal) -> None:
    """S-193."""
    task = _cooling(rehearsal)
    rehearsal.world.hooks.clear()
    first, second = together(task.retried, task.retried)
    assert first.pk == second.pk
    together(*[lambda: Engine().sweep(rehearsal.account.pk)] * 2)
    together(*[lambda: Engine().sweep(LANE)] * 2)
    assert rehearsal.world.count("delete") == 1
    assert attempts(owed(lease_of(task))) == ["failed", "proven"]
    third = task.retried()
    (run,) = task.started()
    assert (third.pk, third.state, third.started_run_id) == (first.pk, "started", run.pk)


def test_each_failing_click_is_one_attempt_and_the_third_starts_the_run(rehearsal: Rehearsal) -> None:
    """S-194."""
    task = _cooling(rehearsal)
    teardown = owed(lease_of(task))
    for clicks in range(1, 3):
        row = task.retried()
        sweep(rehearsal)
        assert attempts(teardown) == ["failed"] * (1 + clicks)
        assert sweep(rehearsal) == {}
        assert seen(row) == ("waiting", "remote_cleanup")
    rehearsal.world.hooks.clear()
    assert task.retried().pk == row.pk
    sweep(rehearsal)
    assert attempts(teardown) == ["failed"] * 3 + ["proven"]
    assert seen(row) == ("started", "")
    assert len(task.started()) == 1


def _cooling(rehearsal: Rehearsal) -> FailedTask:
    """A task whose lease's teardown failed, and waits."""
    rehearsal.world.hooks["inspect"] = fails(ErrorKind.REFUSED)
    return FailedTask(rehearsal)


def lease_of(task: FailedTask) -> Lease:
    assert task.lease is not None
    return task.lease
