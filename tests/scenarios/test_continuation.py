"""S: what a user asks for after a run failed starts one run, by itself, when the last gate opens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from django.db import IntegrityError, connection, transaction
from django.db.models import QuerySet

import leases
from cleanup import claims
from cleanup.claims import LANE, Selection
from cleanup.engine import Engine, Tally, hand_on
from leases import archives, continuing, keeping, recovering
from leases.errors import ContinuationRefused, LeaseError
from leases.models import (
    Archive,
    Attempt,
    Continuation,
    Installation,
    Issue,
    Lease,
    Obligation,
    Operation,
    Receipt,
    RecoveryAction,
    Run,
)
from leases.models.environments import Policy
from providers.contract import ErrorKind
from tests import factories
from tests.beats import CHECKOUT, Queue, beats, database_url, eventually, leader_sleeps
from tests.concurrency import Background, Gate, elsewhere, lost_commit_reply, together
from tests.failed_task import ADAPTER, AGENT, FailedTask, owed_by, seen
from tests.scenarios.steps import attempts, evidence, fails, falls_due, is_due, owed, snapshot, sweep, sweep_lane
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


# Exactly one run, whoever looks and asks


def _alone(task: FailedTask) -> None:
    """At no time were there two live runs: one was started, and it is the only live one."""
    assert len(task.started()) <= 1
    assert Run.objects.filter(issue=task.issue, status__in=Run.LIVE).count() <= 1


@pytest.mark.parametrize("times", range(3))
def test_many_requests_and_engines_at_once_start_one_run(rehearsal: Rehearsal, times: int) -> None:
    task = FailedTask(rehearsal)

    def sweeps() -> None:
        Engine().sweep(LANE, selection=Selection(kinds=(START,), ahead=60.0))

    asks = [lambda name=name: task.commented(name) for name in ("m1", "m2", "m3")]
    rows = [row for row in together(task.retried, sweeps, *asks, sweeps, task.retried, sweeps) if row is not None]
    while Engine().sweep(LANE, selection=Selection(kinds=(START,), ahead=60.0)).claimed:
        pass
    (run,) = task.started()
    for row in rows:
        state, _ = seen(row)
        assert row.started_run_id == (run.pk if state == "started" else None)
    started = Continuation.objects.filter(state="started")
    waiting = Continuation.objects.filter(state="waiting")
    assert started.exists()
    # What came when the run was there waits; nothing blocks the task any more.
    assert set(waiting.values_list("hold", flat=True)) <= {"action_missing"}
    assert started.count() + waiting.count() == len({row.pk for row in rows})
    _alone(task)


def test_an_admission_keeps_off_another_of_the_same_task(rehearsal: Rehearsal) -> None:
    task, gate, claimed = FailedTask(rehearsal), Gate(), Gate()
    retry, comment = task.retried(), task.commented()
    second = Background(lambda: Engine(on_claimed=claimed).sweep(LANE, selection=_only(comment), limit=1))
    claimed.wait()
    with _stopped_before_its_commit(gate):
        first = Background(lambda: _sweep_only(retry))
        gate.wait()
        claimed.open()
        eventually(_waits_for_a_lock, "the second one, which started nothing, waits to give its row back")
        gate.open()
        assert first.result().outcomes == {"proven": 1}
    assert second.result().outcomes == {"superseded": 1}  # its row was closed by the first
    assert attempts(owed_by(comment)) == ["proven"]
    assert seen(retry) == seen(comment) == ("started", "")
    assert sweep_lane(START).claimed == 0
    _alone(task)


@pytest.mark.parametrize("comes_to_life", ["inserted", "scheduled again", "moved here"])
def test_a_run_that_comes_to_life_first_is_met_as_a_lock_and_then_seen(
    rehearsal: Rehearsal, comes_to_life: str
) -> None:
    """S-254."""
    task, gate = FailedTask(rehearsal), Gate()
    live = _coming_to_life(task, comes_to_life)
    row = task.retried()

    def begin() -> None:
        with transaction.atomic():
            live()
            gate()

    other = Background(begin)
    gate.wait()
    # What wakes the row holds it too, so that it is not even claimed; an insert wakes nobody.
    assert _sweep_only(row).outcomes == ({"contended": 1} if comes_to_life == "inserted" else {})
    assert task.started() == []
    gate.open()
    other.result()
    falls_due(owed_by(row))
    sweep_lane(START)
    assert seen(row) == ("waiting", "execution_active")
    _alone(task)


@pytest.mark.parametrize("comes_to_life", ["inserted", "scheduled again", "moved here"])
def test_a_run_that_comes_to_life_second_waits_and_is_refused(rehearsal: Rehearsal, comes_to_life: str) -> None:
    """S-254."""
    task, gate = FailedTask(rehearsal), Gate()
    live = _coming_to_life(task, comes_to_life)
    row = task.retried()
    with _stopped_before_its_commit(gate):
        admission = Background(lambda: _sweep_only(row))
        gate.wait()
        other = Background(live)
        eventually(_waits_for_a_lock, "the other run waits for the task")
        gate.open()
        assert admission.result().outcomes == {"proven": 1}
        with pytest.raises(IntegrityError, match="the only live one"):
            other.result()
    assert len(task.started()) == 1
    _alone(task)


@pytest.mark.parametrize("times", range(6))
def test_a_run_that_is_inserted_at_the_same_moment_makes_no_second_one(rehearsal: Rehearsal, times: int) -> None:
    task = FailedTask(rehearsal)
    row = task.retried()

    def insert() -> None:
        with suppress(IntegrityError):
            factories.run(task.company, issue=task.issue)

    together(insert, lambda: _sweep_only(row))
    _alone(task)
    assert Run.objects.filter(issue=task.issue, status__in=Run.LIVE).count() == 1


def test_runs_of_which_none_continues_another_do_not_exclude_each_other(rehearsal: Rehearsal) -> None:
    task = FailedTask(rehearsal)
    together(*[lambda: factories.run(task.company, issue=task.issue)] * 2)
    assert Run.objects.filter(issue=task.issue, status__in=Run.LIVE).count() == 2


@pytest.mark.parametrize("locked", ["issue", "run", "lease", "action", "obligation", "disposal"])
def test_an_admission_that_meets_a_lock_writes_nothing_and_comes_back(rehearsal: Rehearsal, locked: str) -> None:
    task, gate = FailedTask(rehearsal, Policy.REUSE_BY_ENVIRONMENT), Gate()
    row, other = task.retried(), task.commented()
    rows: QuerySet[Any] = {
        "issue": Issue.objects.filter(pk=task.issue.pk),
        "run": Run.objects.filter(pk=task.run.pk),
        "lease": Lease.objects.filter(pk=lease_of(task).pk),
        "action": RecoveryAction.objects.filter(pk=task.action.pk),
        "obligation": Obligation.objects.filter(continuation=other),
        "disposal": Obligation.objects.filter(lease=lease_of(task), kind="dispose"),
    }[locked]

    def hold() -> None:
        with transaction.atomic():
            assert list(rows.select_for_update(no_key=True))
            gate()

    holding = Background(hold)
    gate.wait()
    assert _sweep_only(row).outcomes == {"contended": 1}
    assert seen(row)[0] == "waiting"
    assert task.started() == []
    gate.open()
    holding.result()
    falls_due(owed_by(row))
    sweep_lane(START)
    assert seen(row) == ("started", "")


def test_a_fact_that_is_told_while_the_gates_are_looked_at_is_not_lost(rehearsal: Rehearsal) -> None:
    """The wake comes between the look and the settle: then the row is due instead of quiet."""
    task = FailedTask(rehearsal)
    task.tell_issue(is_open=False)
    row = task.retried()

    def told(_: Any) -> None:
        elsewhere(lambda: task.tell_issue(is_open=True))

    assert Engine(on_finished=None).sweep(LANE, selection=_only(row)).outcomes == {"waiting": 1}
    task.tell_run(process_id=2)
    with _after_the_look(told):
        Engine().sweep(LANE, selection=_only(row), limit=1)
    assert is_due(owed_by(row))
    sweep_lane(START)
    assert seen(row) == ("started", "")


# Crashes


@pytest.mark.parametrize("dies", ["before", "after"])
def test_a_process_that_is_killed_at_the_commit_starts_one_run_all_the_same(rehearsal: Rehearsal, dies: str) -> None:
    task = FailedTask(rehearsal)
    rows = [task.retried(), task.commented()]
    Installation.current()
    killed = subprocess.run(
        [sys.executable, "-c", _KILLED, dies],
        cwd=CHECKOUT,
        env={**os.environ, "DATABASE_URL": database_url()},
        timeout=60,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    if dies == "before":
        assert task.started() == []
        assert {owed_by(row).attempt_id is None for row in rows} == {False}  # claimed, and protected
        for row in rows:
            assert not is_due(owed_by(row))
            falls_due(owed_by(row))
    else:
        assert len(task.started()) == 1
    sweep_lane(START)
    assert [seen(row) for row in rows] == [("started", "")] * 2
    assert len({row.started_run_id for row in rows}) == len(task.started()) == 1
    assert sweep_lane(START).claimed == 0


_KILLED = """
import os, signal, sys
import django
django.setup()
from django.db import connection
from cleanup.claims import LANE
from cleanup.engine import Engine
from leases import archives, continuing, keeping, recovering

def dies(*_):
    os.kill(os.getpid(), signal.SIGKILL)

original = continuing.start

def start(*args, **kwargs):
    run = original(*args, **kwargs)
    commit = connection._commit
    def at_commit():
        if sys.argv[1] == "after":
            commit()
        dies()
    connection._commit = at_commit
    return run

continuing.start = start
Engine().sweep(LANE)
"""
"""Sweeps the lane, and is killed right before, or right after, the commit of the first admission."""


def test_a_commit_whose_reply_was_lost_starts_one_run(rehearsal: Rehearsal) -> None:
    task = FailedTask(rehearsal)
    row = task.retried()
    lost: list[int] = []
    original = continuing.start

    with ExitStack() as stack:

        def start(*args: Any, **how: Any) -> Run:
            run = original(*args, **how)
            lost.append(len(stack.enter_context(lost_commit_reply())))
            return run

        stack.enter_context(pytest.MonkeyPatch.context()).setattr(continuing, "start", start)
        sweep_lane(START)
    assert lost == [0]
    sweep_lane(START)
    assert seen(row) == ("started", "")
    assert len(task.started()) == 1
    assert owed_by(row).closed_as == "proven"


# By itself: the beat


def test_the_beat_hints_when_the_last_gate_opens_and_at_no_other_time(rehearsal: Rehearsal, tmp_path: Path) -> None:
    """S-251. Nothing polls: between a look and the write that opens a gate no hint comes; then one comes at once."""
    queue = Queue()
    try:
        with beats(tmp_path) as beat:
            task = FailedTask(rehearsal, owed=True)
            task.tell_issue(is_open=False, decisions_pending=1)
            rehearsal.world.hooks["inspect"] = fails(ErrorKind.REFUSED)
            Engine().sweep(rehearsal.account.pk)  # its teardown cools down, and is due in half a minute and more
            row = task.retried(reason="try again")
            Engine().sweep(rehearsal.account.pk)
            sweep_lane()
            assert seen(row) == ("waiting", "task_closed")
            beat().leads()
            assert queue.is_silent(1.0)
            for tell, hold in (
                (lambda: task.tell_issue(is_open=True), "decision_pending"),
                (lambda: task.tell_issue(decisions_pending=0), "remote_cleanup"),
            ):
                tell()
                assert queue.hint() == LANE
                sweep_lane()
                hand_on(LANE)
                assert seen(row) == ("waiting", hold)
                eventually(leader_sleeps, "the leader sleeps")
                assert queue.is_silent(0.5)
            rehearsal.world.hooks.clear()
            task.retried()
            assert queue.hint() == rehearsal.account.pk
            Engine().sweep(rehearsal.account.pk)
            assert queue.hint() == LANE
            sweep_lane()
            assert seen(row) == ("started", "")
            assert len(task.started()) == 1
    finally:
        queue.close()


def _coming_to_life(task: FailedTask, how: str) -> Callable[[], Any]:
    """Return what makes another run live on the task. What that starts from is there before."""
    match how:
        case "inserted":
            return lambda: factories.run(task.company, issue=task.issue)
        case "scheduled again":
            old = factories.failed_run(task.company, issue=task.issue)
            return lambda: Run.objects.filter(pk=old.pk).update(status=Run.Status.SCHEDULED_RETRY)
        case _:
            elsewhere_live = factories.run(task.company)
            return lambda: Run.objects.filter(pk=elsewhere_live.pk).update(issue=task.issue)


def _only(row: Continuation) -> Selection:
    return Selection(obligation_id=owed_by(row).pk)


def _sweep_only(row: Continuation) -> Tally:
    return Engine().sweep(LANE, selection=_only(row), limit=1)


@contextmanager
def _stopped_before_its_commit(gate: Gate) -> Iterator[None]:
    """The next admission stops when all of it is written, before its commit."""
    original = continuing.start

    def start(*args: Any, **how: Any) -> Run:
        run = original(*args, **how)
        gate()
        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(continuing, "start", start)
        yield


@contextmanager
def _after_the_look(then: Callable[[Any], None]) -> Iterator[None]:
    """Do something on another connection when a look has committed why it waits, before its row becomes quiet."""
    original = claims.wait

    def wait(claim: Any) -> bool:
        then(claim)
        return original(claim)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(claims, "wait", wait)
        yield


def _waits_for_a_lock() -> bool:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        )
        return bool(cursor.fetchone()[0])


def _cooling(rehearsal: Rehearsal) -> FailedTask:
    """A task whose lease's teardown failed, and waits."""
    rehearsal.world.hooks["inspect"] = fails(ErrorKind.REFUSED)
    return FailedTask(rehearsal)


def lease_of(task: FailedTask) -> Lease:
    assert task.lease is not None
    return task.lease


@pytest.mark.parametrize("kept", [True, False])
def test_files_that_were_saved_and_removed_since_are_not_said_to_be_there(rehearsal: Rehearsal, *, kept: bool) -> None:
    task = FailedTask(rehearsal, Policy.RETAIN_ON_FAILURE)
    lease = task.lease
    assert lease is not None
    recovering.recover_workspace(lease.pk, lease.company_id, actor="operator", reason="the files are needed")
    sweep(rehearsal)
    removed = archives.offered(company_id=task.company.pk, lease_id=lease.pk).get()
    Archive.objects.filter(pk=removed.pk).update(removed_at=factories.at(0))
    if not kept:
        task.action.refresh_from_db()
        leases.close_recovery_action(task.action.pk, task.company.pk, actor="control plane")
        keeping.destroy_now(lease.pk, company_id=lease.company_id, actor="operator", reason="room")
        sweep(rehearsal)
        task.opens_action()
    row = task.retried()
    sweep(rehearsal)
    assert seen(row) == ("started", "")
    assert archives.offered(company_id=task.company.pk, lease_id=lease.pk).exists() is kept
    assert row.readiness == ("files_recovered" if kept else "fresh_isolated_workspace")
