"""Retries and saved messages: what is asked for at the edge, and each gate between it and the run that it starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from django.db import transaction
from django.db.models.functions import Now

import leases
from cleanup.engine import Engine
from leases import facts, gates, recovering, transitions, unfencing
from leases.controllers import Controller
from leases.errors import ContinuationRefused, LeaseError, NotFound
from leases.models import (
    ActivityEntry,
    Company,
    Continuation,
    Environment,
    Lease,
    Obligation,
    Recovery,
    RecoveryAction,
    Run,
    RunFacts,
)
from leases.models.environments import Policy
from leases.signals import continuation_started
from providers.contract import ErrorKind
from tests import factories
from tests.concurrency import together
from tests.failed_task import AGENT, FailedTask, owed_by, seen
from tests.scenarios.steps import attempts, audited, due_in, fails, falls_due, is_due, owed, snapshot, sweep, sweep_lane
from tests.stage import Rehearsal
from tests.tables import rows_of

START = Obligation.Kind.START_CONTINUATION
CONTINUING = Path(__file__).parents[2] / "docs" / "continuing.md"

Did = dict[str, Any]
"""What a case made, for the write that opens its gate."""


@dataclass(frozen=True)
class Case:
    """One gate that is closed alone: how, and the one write that opens it. `told` is what its sentence speaks of."""

    code: str
    name: str
    close: Callable[[FailedTask, Did], None]
    open: Callable[[FailedTask, Did], None]
    comments: bool = False


def _case(code: str, name: str, close: Any, open: Any, *, comments: bool = False) -> Case:  # noqa: A002
    return Case(code, name, close, open, comments)


def _other_run(task: FailedTask, did: Did, **values: Any) -> Run:
    """Another run of the task, whose execution ended and of which all is told, and which blocks it as well."""
    did["run"] = run = factories.failed_run(task.company, **{"issue": task.issue, "agent": AGENT, **values})
    factories.operation(task.rehearsal.environment, run_uuid=run.pk, state="resolved", resolved_at=factories.at(0))
    if run.status == Run.Status.FAILED:
        task.tell_run(
            run, adapter_attached=False, coordinator="terminal_failure", coordinator_owner="", history_available=True
        )
    return run


def _blocked_by(task: FailedTask, did: Did, **values: Any) -> None:
    did["action"] = task.opens_action(_other_run(task, did, **values), "another one failed")


def _blocked_by_nobody_knows_what(task: FailedTask, did: Did) -> None:
    did["action"] = facts.open_recovery_action(task.issue.pk, task.company.pk, run_id=None, cause="something failed")


def _that_is_resolved(task: FailedTask, did: Did) -> None:
    facts.close_recovery_action(did["action"].pk, task.company.pk, actor="control plane")


def _when_it_ended_is_not_known(task: FailedTask, _: Did) -> None:
    Run.objects.filter(pk=task.run.pk).update(finished_at=None)


def _it_ended(task: FailedTask, _: Did) -> None:
    Run.objects.filter(pk=task.run.pk).update(finished_at=Now())


def _another_run_is_live(task: FailedTask, did: Did, status: str = Run.Status.RUNNING) -> None:
    did["run"] = factories.run(task.company, issue=task.issue, status=status)


def _that_is_over(task: FailedTask, did: Did) -> None:
    task.fails(did["run"])


def _it_ended_earlier(task: FailedTask, _: Did) -> None:
    Run.objects.filter(pk=task.run.pk).update(finished_at=factories.at(-86_400))


def _fenced(task: FailedTask, did: Did) -> None:
    lease = factories.lease(task.rehearsal.environment, run=task.run, issue=task.issue, scope="a scope")
    did["lease"] = lease = factories.stopped(lease)
    factories.hold(lease, "shutdown_fence", holder="controller 7")


def _fence_ended(_: FailedTask, did: Did) -> None:
    with transaction.atomic():
        unfencing.end(did["lease"], did["lease"].holds.get(), actor="controller 7")


def _its_end_is_not_proven(task: FailedTask, did: Did) -> None:
    did["owed"] = factories.teardown(factories.lease(task.rehearsal.environment, run=task.run))


def _it_is_proven(_: FailedTask, did: Did) -> None:
    row = did["owed"]
    with transaction.atomic():
        transitions.settle(row.lease, row, factories.receipt(row.lease))


def _its_files_are_being_saved(task: FailedTask, did: Did) -> None:
    lease = factories.stopped(factories.lease(task.rehearsal.environment, run=task.run), state="retained")
    did["recovery"] = factories.recovery(lease)


def _they_are_saved(_: FailedTask, did: Did) -> None:
    _ends(did["recovery"], Recovery.State.EXHAUSTED)


def _issue(**told: Any) -> Callable[[FailedTask, Did], None]:
    return lambda task, _: (task.tell_issue(**told), None)[1]


def _run(**told: Any) -> Callable[[FailedTask, Did], None]:
    return lambda task, _: (task.tell_run(**told), None)[1]


def _of_source(**told: Any) -> Callable[[FailedTask, Did], None]:
    def tell(task: FailedTask, did: Did) -> None:
        if "action" not in did:
            _blocked_by(task, did)
        task.tell_run(did["run"], **told)

    return tell


CASES = [
    _case("task_closed", "the task is closed", _issue(is_open=False), _issue(is_open=True)),
    _case("task_reassigned", "another agent's", _issue(assignee="bob"), _issue(assignee=AGENT)),
    _case("task_reassigned", "nobody's", _issue(assignee=""), _issue(assignee=AGENT)),
    _case(
        "action_missing",
        "nothing blocks it",
        lambda task, _: facts.close_recovery_action(task.action.pk, task.company.pk),
        lambda task, _: task.opens_action(),
    ),
    _case("decision_pending", "a question", _issue(decisions_pending=1), _issue(decisions_pending=0)),
    _case("source_missing", "of no run", _blocked_by_nobody_knows_what, _that_is_resolved),
    _case("source_running", "no end", _when_it_ended_is_not_known, _it_ended),
    _case(
        "source_mismatch",
        "another agent's run",
        lambda task, did: _blocked_by(task, did, agent="bob"),
        _that_is_resolved,
    ),
    _case(
        "source_mismatch",
        "another task's run",
        lambda task, did: _blocked_by(task, did, issue=factories.issue(task.company)),
        _that_is_resolved,
    ),
    _case(
        "message_predates_stop",
        "written before the end",
        lambda *_: None,
        _it_ended_earlier,
        comments=True,
    ),
    _case("controller_settling", "its adapter", _run(adapter_attached=True), _run(adapter_attached=False)),
    _case(
        "controller_settling",
        "the adapter of another run that blocks",
        _of_source(adapter_attached=True),
        _of_source(adapter_attached=False),
    ),
    _case("controller_settling", "a fence", _fenced, _fence_ended),
    _case("execution_settling", "settling", _run(coordinator="settling"), _run(coordinator="terminal_failure")),
    _case(
        "execution_settling",
        "to be tried again",
        _run(coordinator="retryable_failure"),
        _run(coordinator="terminal_failure"),
    ),
    _case("execution_settling", "somebody is at it", _run(coordinator_owner="w"), _run(coordinator_owner="")),
    _case(
        "execution_settling",
        "committed, and not as failed",
        _run(coordinator="committed", accepted_failed_result=False),
        _run(accepted_failed_result=True),
    ),
    _case("remote_cleanup", "a teardown is owed", _its_end_is_not_proven, _it_is_proven),
    *(
        _case(
            "execution_active",
            status,
            lambda task, did, status=status: _another_run_is_live(task, did, status),
            _that_is_over,
        )
        for status in Run.LIVE
    ),
    _case(
        "execution_active",
        "gone without an end",
        _another_run_is_live,
        lambda _, did: Run.objects.filter(pk=did["run"].pk).delete(),
    ),
    _case("source_unavailable", "no history", _run(history_available=False), _run(history_available=True)),
    _case("workspace_repair_required", "files are being saved", _its_files_are_being_saved, _they_are_saved),
]

UNTOLD = [
    _case("task_closed", "is_open", _issue(is_open=None), _issue(is_open=True)),
    _case("task_reassigned", "assignee", _issue(assignee=None), _issue(assignee=AGENT)),
    _case("decision_pending", "decisions_pending", _issue(decisions_pending=None), _issue(decisions_pending=0)),
    _case(
        "source_mismatch",
        "agent of a run that blocks",
        lambda task, did: _blocked_by(task, did, agent=""),
        lambda task, did: task.tell_run(did["run"], agent=AGENT),
    ),
    _case("controller_settling", "adapter_attached", _run(adapter_attached=None), _run(adapter_attached=False)),
    _case("execution_settling", "coordinator", _run(coordinator=None), _run(coordinator="terminal_failure")),
    _case("execution_settling", "coordinator_owner", _run(coordinator_owner=None), _run(coordinator_owner="")),
    _case(
        "execution_settling",
        "accepted_failed_result",
        _run(coordinator="committed", accepted_failed_result=None),
        _run(accepted_failed_result=True),
    ),
    _case("source_unavailable", "history_available", _run(history_available=None), _run(history_available=True)),
    _case(
        "source_unavailable",
        "history_available of another run that blocks",
        _of_source(history_available=None),
        _of_source(history_available=True),
    ),
]


def _name(case: Case) -> str:
    return f"{case.code}-{case.name}".replace(" ", "_")


# The gates, each alone


def _asked(task: FailedTask, case: Case) -> Continuation:
    return task.commented(authored_in=-3600) if case.comments else task.retried()


@pytest.mark.parametrize("case", [*CASES, *UNTOLD], ids=_name)
def test_a_gate_that_is_closed_alone_holds_and_the_write_that_opens_it_starts_the_run(
    rehearsal: Rehearsal, case: Case
) -> None:
    task, did = FailedTask(rehearsal), Did()
    case.close(task, did)
    row = _asked(task, case)
    sweep_lane(START)
    assert seen(row) == ("waiting", case.code)
    gate = next(gate for gate in gates.GATES if gate.code == case.code)
    assert row.hold_sentence.startswith(gate.untold if case in UNTOLD else gate.closed)
    # Quiet: nothing looks again by itself, and a write that opens nothing changes nothing.
    assert (owed_by(row).quiet, owed_by(row).due_at) == ("waiting", None)
    task.tell_run(process_id=77)
    sweep_lane(START)
    assert (seen(row)[0], row.hold, owed_by(row).due_at) == ("waiting", case.code, None)
    case.open(task, did)
    assert is_due(owed_by(row))
    sweep_lane(START)
    assert seen(row) == ("started", "")
    assert len(task.started()) == 1


def test_every_gate_that_a_stored_continuation_can_meet_is_closed_by_a_case() -> None:
    at_the_edge = {"not_a_user", "kind_unknown"}  # no row is made without
    assert {case.code for case in CASES} == {gate.code for gate in gates.GATES} - at_the_edge


@pytest.mark.parametrize("gate", gates.GATES[:2], ids=lambda gate: gate.code)
def test_what_no_row_can_say_is_refused_by_the_gates_too(rehearsal: Rehearsal, gate: gates.Gate) -> None:
    task = FailedTask(rehearsal)
    row = task.retried()
    task.run.refresh_from_db()
    known = gates.read(row, actions=[task.action], sources=[task.run], files=gates.Files())
    assert gates.first_closed(known) is None
    wrong = replace(known, by_user=False) if gate.code == "not_a_user" else replace(known, kind="a wish")
    shut = gates.first_closed(wrong)
    assert shut is not None
    assert shut[0] is gate


@pytest.mark.parametrize(("told", "hold"), [("nothing", "task_closed"), ("of the task only", "controller_settling")])
def test_a_control_plane_that_told_nothing_starts_nothing(rehearsal: Rehearsal, told: str, hold: str) -> None:
    task = FailedTask(rehearsal, told=False)
    if told == "of the task only":
        task.tell_issue(is_open=True, assignee=AGENT, decisions_pending=0)
        Run.objects.filter(pk=task.run.pk).update(agent=AGENT)
    task.opens_action()
    row = task.retried()
    sweep_lane(START)
    assert seen(row) == ("waiting", hold)
    task.tell_run(agent=AGENT)
    task.tell_all()
    sweep_lane(START)
    assert seen(row) == ("started", "")


def test_whose_run_it_was_has_to_be_told(rehearsal: Rehearsal) -> None:
    task = FailedTask(rehearsal, told=False)
    task.tell_all()
    row = task.retried()
    sweep_lane(START)
    assert seen(row) == ("waiting", "task_reassigned")
    assert "not told" in row.hold_sentence
    task.tell_run(agent=AGENT)
    sweep_lane(START)
    assert seen(row) == ("started", "")


def test_the_first_closed_gate_of_the_list_is_the_hold(rehearsal: Rehearsal) -> None:
    """Opened one after the other, from the first to the last. Without those that another one's facts speak for."""
    apart = ("of no run", "nothing blocks it", "files are being saved")
    cases = [case for case in CASES if case.name not in apart and not case.comments]
    by_code = {case.code: case for case in reversed(cases)}
    order = [gate.code for gate in gates.GATES if gate.code in by_code]
    task, did = FailedTask(rehearsal), {code: Did() for code in order}
    for code in order:
        by_code[code].close(task, did[code])
    row = task.retried()
    held = []
    for code in order:
        sweep_lane(START)
        assert seen(row)[0] == "waiting"
        held.append(row.hold)
        by_code[code].open(task, did[code])
    sweep_lane(START)
    assert (held, seen(row)) == (order, ("started", ""))


def test_the_hold_of_a_controller_is_waited_for_until_its_time(rehearsal: Rehearsal) -> None:
    task = FailedTask(rehearsal)
    Run.objects.filter(pk=task.run.pk).update(
        controller_id="c7", controller_seconds=60, controller_expires_at=factories.at(60), controller_generation=1
    )
    row = task.retried()
    sweep_lane(START)
    assert seen(row) == ("waiting", "controller_settling")
    assert "c7 holds the run" in row.hold_sentence
    assert 55 < due_in(owed_by(row)) <= 60
    Run.objects.filter(pk=task.run.pk).update(controller_expires_at=factories.at(-1))
    falls_due(owed_by(row))
    sweep_lane(START)
    assert seen(row) == ("started", "")


def test_a_controller_that_gave_the_run_up_is_not_waited_for(rehearsal: Rehearsal) -> None:
    stage = rehearsal
    controller: Controller = leases.take_control(stage.run.pk, stage.company.pk, "c7", 3600)
    leases.give_up_control(controller)
    task = FailedTask(stage)
    row = task.retried()
    sweep_lane(START)
    assert seen(row) == ("started", "")


def test_process_ids_decide_nothing(rehearsal: Rehearsal) -> None:
    task = FailedTask(rehearsal)
    task.tell_run(process_id=1)  # a process that is certainly there
    row = task.retried()
    sweep_lane(START)
    assert seen(row) == ("started", "")


def test_why_it_waits_is_written_and_told_only_where_it_changed(rehearsal: Rehearsal) -> None:
    task = FailedTask(rehearsal)
    task.tell_issue(is_open=False)
    row = task.retried()
    sweep_lane(START)
    seen(row)
    looked = row.evaluated_at
    for _ in range(3):
        task.tell_run(process_id=RunFacts.objects.get(run=task.run).process_id + 1)  # type: ignore[operator]
        sweep_lane(START)
    seen(row)
    assert row.evaluated_at == looked
    assert audited("continuation.held", row) == 1


# The files


def _retained(rehearsal: Rehearsal) -> FailedTask:
    """A task whose failed run left a sandbox that is kept for its files."""
    task = FailedTask(rehearsal, Policy.RETAIN_ON_FAILURE)
    assert _lease(task).state == Lease.State.RETAINED
    return task


def _lease(task: FailedTask) -> Lease:
    assert task.lease is not None
    task.lease.refresh_from_db()
    return task.lease


def _ends(recovery: Recovery | None, state: str) -> None:
    assert recovery is not None
    with transaction.atomic():
        if state == Recovery.State.EXHAUSTED:
            recovering.exhaust(recovery)
        else:
            factories.archive(recovery)
            recovering.complete(recovery, recovery.lease.receipts.latest("pk"))


@pytest.mark.parametrize(
    ("state", "readiness"),
    [
        (Recovery.State.COMPLETE, Continuation.Readiness.FILES_RECOVERED),
        (Recovery.State.EXHAUSTED, Continuation.Readiness.FRESH_ISOLATED_WORKSPACE),
    ],
)
def test_the_files_of_a_retained_sandbox_are_saved_first(rehearsal: Rehearsal, state: str, readiness: str) -> None:
    task = _retained(rehearsal)
    row = task.retried()
    sweep_lane(START)
    assert seen(row) == ("waiting", "workspace_repair_required")
    assert row.recovery is not None
    assert (row.recovery.lease_id, row.recovery.generation, row.recovery.state) == (_lease(task).pk, 1, "running")
    sweep_lane(START)  # it was woken by the generation that it began, and begins no other
    assert Recovery.objects.count() == 1
    assert owed_by(row).due_at is None
    _ends(row.recovery, state)
    assert is_due(owed_by(row))
    sweep_lane(START)
    assert seen(row) == ("started", "")
    (run,) = task.started()
    assert (row.readiness, run.fresh_workspace) == (
        readiness,
        state == Recovery.State.EXHAUSTED,
    )
    assert Recovery.objects.count() == 1


def test_nothing_is_saved_before_every_other_gate_is_open(rehearsal: Rehearsal) -> None:
    task = _retained(rehearsal)
    task.tell_run(history_available=False)
    row = task.retried()
    sweep_lane(START)
    assert seen(row) == ("waiting", "source_unavailable")
    assert not Recovery.objects.exists()
    task.tell_run(history_available=True)
    sweep_lane(START)
    assert seen(row) == ("waiting", "workspace_repair_required")


def test_an_exhausted_generation_is_bound_and_never_begun_again(rehearsal: Rehearsal) -> None:
    task = _retained(rehearsal)
    spent = factories.recovery(_lease(task), state=Recovery.State.EXHAUSTED)
    rows = [task.retried(), task.commented()]
    sweep_lane(START)
    assert [seen(row) for row in rows] == [("started", "")] * 2
    assert {row.recovery_id for row in rows} == {spent.pk}
    assert Recovery.objects.count() == 1
    assert [run.fresh_workspace for run in task.started()] == [True]


def test_an_operators_later_generation_is_waited_for(rehearsal: Rehearsal) -> None:
    """What was bound to an exhausted one while another gate was closed is bound to the newest."""
    task = _retained(rehearsal)
    spent = factories.recovery(_lease(task), state=Recovery.State.EXHAUSTED)
    task.tell_issue(decisions_pending=1)
    row = task.retried()
    sweep_lane(START)
    assert (seen(row), row.recovery_id) == (("waiting", "decision_pending"), spent.pk)
    newer = leases.recover_workspace(_lease(task).pk, task.company.pk, actor="operator", reason="disk was freed")
    sweep_lane(START)
    assert (seen(row), row.recovery_id) == (("waiting", "decision_pending"), newer.pk)
    task.tell_issue(decisions_pending=0)
    sweep_lane(START)
    assert seen(row) == ("waiting", "workspace_repair_required")
    newer.refresh_from_db()
    _ends(newer, Recovery.State.COMPLETE)
    sweep_lane(START)
    assert (seen(row), row.readiness) == (("started", ""), "files_recovered")


def test_while_the_sandbox_is_restarted_it_is_the_saving_that_is_waited_for(rehearsal: Rehearsal) -> None:
    """Proof is gone for as long; nothing starts in that window, and the hold says what it is about."""
    task = _retained(rehearsal)
    row = task.retried()
    sweep_lane(START)
    factories.start(_lease(task))
    leases.retrying.wake(owed_by(row).pk)
    sweep_lane(START)
    assert seen(row) == ("waiting", "workspace_repair_required")
    assert not leases.execution_ended(task.run.pk).ended


def test_who_does_not_want_the_files_waits_for_none(rehearsal: Rehearsal) -> None:
    task = _retained(rehearsal)
    row = task.retried(recovers_files=False)
    sweep_lane(START)
    assert (seen(row), row.readiness) == (("started", ""), "same_workspace")
    assert not Recovery.objects.exists()


def test_the_last_word_on_the_files_counts_while_it_waits(rehearsal: Rehearsal) -> None:
    task = _retained(rehearsal)
    row = task.retried()
    sweep_lane(START)
    assert seen(row) == ("waiting", "workspace_repair_required")
    assert task.retried(recovers_files=False).pk == row.pk
    sweep_lane(START)
    assert (seen(row), row.readiness, row.recovery_id) == (("started", ""), "same_workspace", None)


def test_a_reusable_sandbox_brings_its_files_along(rehearsal: Rehearsal) -> None:
    task = FailedTask(rehearsal, Policy.REUSE_BY_ENVIRONMENT)
    assert _lease(task).state == Lease.State.RELEASED
    row = task.retried()
    sweep_lane(START)
    assert (seen(row), row.readiness) == (("started", ""), "same_workspace")
    assert not Recovery.objects.exists()
    (run,) = task.started()
    got = leases.acquire(rehearsal.environment.pk, company_id=task.company.pk, run_id=run.pk)
    assert got.resource_id == _lease(task).resource_id  # and the recovery action held it no longer


@pytest.mark.parametrize("why", ["orphaned", "archived", "another policy", "retained"])
def test_what_no_later_run_gets_has_its_files_saved(rehearsal: Rehearsal, why: str) -> None:
    task = FailedTask(rehearsal, Policy.REUSE_BY_ENVIRONMENT)
    environment = Environment.objects.filter(pk=rehearsal.environment.pk)
    lease = Lease.objects.filter(pk=_lease(task).pk)
    match why:
        case "orphaned":
            lease.update(orphaned_at=Now())
        case "archived":
            environment.update(status="archived")
        case "another policy":
            environment.update(policy=Policy.EPHEMERAL)
        case "retained":
            lease.update(state=Lease.State.RETAINED)
    row = task.retried()
    sweep_lane(START)
    assert seen(row) == ("waiting", "workspace_repair_required")
    assert Recovery.objects.get().lease_id == _lease(task).pk


def test_where_the_provider_hands_no_files_over_the_work_goes_on_without(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = _retained(rehearsal)
    monkeypatch.setattr(recovering, "_hands_files_over", lambda _: False)
    row = task.retried()
    sweep_lane(START)
    assert (seen(row), row.readiness) == (("started", ""), "fresh_isolated_workspace")
    assert [run.fresh_workspace for run in task.started()] == [True]


def test_files_that_were_lost_are_not_waited_for(rehearsal: Rehearsal) -> None:
    task = FailedTask(rehearsal)
    Lease.objects.filter(pk=_lease(task).pk).update(files_lost=True)
    row = task.retried()
    sweep_lane(START)
    assert (seen(row), row.readiness) == (("started", ""), "fresh_isolated_workspace")


# What is asked for


NONSENSE: dict[str, tuple[Any, ...]] = {
    "actor": ("", "x" * 201, "a\nb", None, 7),
    "by_user": (None, 1, "yes"),
    "recovers_files": (None, 0, "no"),
}
OF_RETRIES: dict[str, tuple[Any, ...]] = {"reason": ("", "  ", "x" * 501, "a\x00", None)}
OF_MESSAGES: dict[str, tuple[Any, ...]] = {
    "message_id": ("", "x" * 201, "a\x00b", None, 7),
    "authored_at": (
        None,
        "2026-01-01",
        datetime(2026, 1, 1),  # noqa: DTZ001 - the nonsense itself
        datetime(9999, 1, 1, tzinfo=UTC),
        datetime.min.replace(tzinfo=timezone(timedelta(hours=14))),
    ),
    "queued": (None, 1, "no"),
}


def _each(table: dict[str, tuple[Any, ...]]) -> list[tuple[str, Any]]:
    return [(name, value) for name, values in table.items() for value in values]


@pytest.mark.parametrize(("name", "value"), _each(NONSENSE | OF_RETRIES), ids=repr)
def test_a_retry_that_makes_no_sense_is_refused_with_nothing_written(
    rehearsal: Rehearsal, name: str, value: Any
) -> None:
    task = FailedTask(rehearsal)
    before = snapshot()
    with pytest.raises(LeaseError) as refused:
        task.retried(**{name: value})
    assert refused.value.code == "invalid"
    assert snapshot() == before


@pytest.mark.parametrize(("name", "value"), _each(NONSENSE | OF_MESSAGES), ids=repr)
def test_a_message_that_makes_no_sense_is_refused_with_nothing_written(
    rehearsal: Rehearsal, name: str, value: Any
) -> None:
    task = FailedTask(rehearsal)
    before = snapshot()
    with pytest.raises(LeaseError) as refused:
        task.commented(**{name: value})
    assert refused.value.code == "invalid"
    assert snapshot() == before


@pytest.mark.parametrize("whose", ["nobody", "another company", "no task", "closed company", "no id"])
def test_a_run_that_cannot_be_continued_is_refused_with_nothing_written(rehearsal: Rehearsal, whose: str) -> None:
    task = FailedTask(rehearsal)
    run_id: Any = task.run.pk
    company_id = task.company.pk
    expected: tuple[type[LeaseError], str] = (NotFound, "not_found")
    match whose:
        case "nobody":
            run_id = uuid4()
        case "another company":
            company_id = factories.company().pk
        case "no task":
            run_id = factories.run(task.company, status="failed", finished_at=factories.at(0)).pk
            expected = (ContinuationRefused, "no_issue")
        case "closed company":
            Company.objects.filter(pk=company_id).update(closed_at=Now())
            expected = (ContinuationRefused, "company_closed")
        case "no id":
            run_id = "a run"
            expected = (ContinuationRefused, "invalid")
    before = snapshot()
    message = {"message_id": "m", "authored_at": factories.at(0)}
    for ask, how in ((leases.request_retry, {"reason": "again"}), (leases.save_message, message)):
        with pytest.raises(expected[0]) as refused:
            ask(run_id, company_id, actor="a user", by_user=True, **how)  # type: ignore[operator]
        assert refused.value.code == expected[1]
    assert snapshot() == before


def test_the_same_message_is_saved_once_whatever_became_of_it(rehearsal: Rehearsal) -> None:
    task = FailedTask(rehearsal)
    written = factories.at(1)
    rows = together(*[lambda: task.commented(authored_at=written)] * 4)
    assert len({row.pk for row in rows}) == 1
    sweep_lane(START)
    again = task.commented(authored_at=written)
    assert (again.pk, again.state) == (rows[0].pk, "started")
    assert audited("continuation.requested", again) == 1
    assert len(task.started()) == 1


@pytest.mark.parametrize("differs", ["authored_at", "queued", "actor", "run"])
def test_another_message_under_the_same_name_is_refused(rehearsal: Rehearsal, differs: str) -> None:
    task, written = FailedTask(rehearsal), factories.at(1)
    task.commented(authored_at=written)
    other: dict[str, Any] = {
        "authored_at": {"authored_at": factories.at(2)},
        "queued": {"queued": True},
        "actor": {"actor": "another user"},
        "run": {},
    }[differs]
    run = factories.failed_run(task.company) if differs == "run" else task.run
    before = snapshot()
    with pytest.raises(ContinuationRefused) as refused:
        leases.save_message(
            run.pk,
            task.company.pk,
            **{"message_id": "m1", "authored_at": written, "actor": "a user", "by_user": True, **other},
        )
    assert refused.value.code == "different_message"
    assert snapshot() == before


def test_two_tasks_that_save_one_message_at_once_make_one_row(rehearsal: Rehearsal) -> None:
    task, written = FailedTask(rehearsal), factories.at(1)
    run = factories.failed_run(task.company)

    def save(run_id: Any) -> str:
        try:
            leases.save_message(
                run_id, task.company.pk, message_id="m1", authored_at=written, actor="a user", by_user=True
            )
        except ContinuationRefused as refused:
            return refused.code
        return "saved"

    assert sorted(together(lambda: save(task.run.pk), lambda: save(run.pk))) == ["different_message", "saved"]
    assert Continuation.objects.count() == 1


def test_a_retry_asks_for_an_attempt_at_the_end_of_the_run_and_at_no_more_of_its_files(rehearsal: Rehearsal) -> None:
    task = _retained(rehearsal)
    recovery = factories.recovery(_lease(task), due_in=400.0)
    rehearsal.world.hooks["inspect"] = fails(ErrorKind.REFUSED)
    owing = factories.teardown(factories.lease(rehearsal.environment, run=task.run), due_in=600.0)
    for clicks in (1, 2):
        task.retried()
        owing.refresh_from_db()
        assert owing.requests == clicks
        assert is_due(owing)
        Engine().sweep(rehearsal.account.pk)
    assert attempts(owing) == ["failed"] * 2
    owed_by_recovery = Obligation.objects.filter(lease=recovery.lease, kind__in=["recover_workspace", "end_recovery"])
    assert set(owed_by_recovery.values_list("requests", flat=True)) == {0}
    recovery.refresh_from_db()
    assert recovery.attempts == 0


def test_a_retry_is_as_it_was_whoever_asks_again(rehearsal: Rehearsal) -> None:
    task = FailedTask(rehearsal)
    first = task.retried()
    second = task.retried(actor="another user", reason="me too")
    assert (second.pk, second.requested_by) == (first.pk, "a user")
    assert Continuation.objects.count() == 1


# Withdrawing


def test_what_is_withdrawn_starts_nothing_and_a_retry_may_be_asked_for_anew(rehearsal: Rehearsal) -> None:
    task = FailedTask(rehearsal)
    task.tell_issue(is_open=False)
    row = task.retried()
    sweep_lane(START)
    for _ in range(2):
        withdrawn = leases.withdraw_continuation(row.pk, task.company.pk, actor="a user", reason="never mind")
        assert (withdrawn.state, withdrawn.withdrawn_by, withdrawn.hold) == ("withdrawn", "a user", "")
    assert audited("continuation.withdrawn", row) == 1
    task.tell_issue(is_open=True)
    sweep_lane(START)
    assert task.started() == []
    again = task.retried()
    assert again.pk != row.pk
    sweep_lane(START)
    assert seen(again) == ("started", "")
    with pytest.raises(ContinuationRefused) as refused:
        leases.withdraw_continuation(again.pk, task.company.pk, actor="a user")
    assert refused.value.code == "started"
    with pytest.raises(NotFound):
        leases.withdraw_continuation(again.pk, factories.company().pk, actor="a user")


# What starts


def test_all_that_may_start_join_one_run_and_the_rest_waits(rehearsal: Rehearsal) -> None:
    task = FailedTask(rehearsal)
    old = task.commented("old", authored_in=-3600)
    rows = [task.retried(), *[task.commented(name) for name in ("m1", "m2", "m3")]]
    told: list[dict[str, Any]] = []

    def listen(**about: Any) -> None:
        told.append(about)
        raise RuntimeError("a listener that fails costs nobody anything")

    continuation_started.connect(listen)
    try:
        sweep_lane(START)  # all are claimed at once; what the first look closes is lost to the others
    finally:
        continuation_started.disconnect(listen)
    (run,) = task.started()
    assert {seen(row) for row in rows} == {("started", "")}
    assert {row.started_run_id for row in rows} == {run.pk}
    sweep_lane(START)
    assert seen(old)[0] == "waiting"
    assert not Obligation.objects.filter(continuation__in=rows, closed_at=None).exists()
    assert ActivityEntry.objects.filter(action="continuation.started").count() == 4
    (about,) = told
    assert about["run_id"] == run.pk
    assert set(about["continuation_ids"]) == {row.pk for row in rows}


def test_a_retry_of_what_a_message_started_already_adopts_that_run(rehearsal: Rehearsal) -> None:
    task = FailedTask(rehearsal)
    message = task.commented()
    sweep_lane(START)
    assert seen(message) == ("started", "")
    assert task.retried().pk == message.pk
    sweep_lane(START)
    assert len(task.started()) == Continuation.objects.count() == 1


def test_who_waits_for_nothing_but_the_files_goes_along_with_who_does_not_want_them(rehearsal: Rehearsal) -> None:
    task = _retained(rehearsal)
    message = task.commented()
    sweep_lane(START)
    assert seen(message) == ("waiting", "workspace_repair_required")
    retry = task.retried(recovers_files=False)
    sweep_lane(START)
    assert seen(message) == seen(retry) == ("started", "")
    assert message.started_run_id == retry.started_run_id
    assert message.recovery_id == Recovery.objects.get().pk  # which still runs: the files are saved all the same


def test_it_resolves_what_blocked_the_task_and_what_that_held(rehearsal: Rehearsal) -> None:
    task, did = FailedTask(rehearsal), Did()
    _blocked_by(task, did)
    assert task.issue.holds.filter(ended_at=None).count() == 2
    task.retried()
    sweep_lane(START)
    (run,) = task.started()
    assert set(RecoveryAction.objects.values_list("closed_by", flat=True)) == {f"run {run.pk}"}
    assert not task.issue.holds.filter(ended_at=None).exists()


def test_a_run_that_was_continued_may_fail_and_be_continued_itself(rehearsal: Rehearsal) -> None:
    task = FailedTask(rehearsal)
    task.retried()
    sweep_lane(START)
    (first,) = task.started()
    lease = leases.acquire(rehearsal.environment.pk, company_id=task.company.pk, run_id=first.pk)
    leases.release(lease.pk, outcome="failed")
    task.fails(first)
    sweep(rehearsal)
    task.tell_run(
        first, adapter_attached=False, coordinator="terminal_failure", coordinator_owner="", history_available=True
    )
    task.opens_action(first)
    row = task.retried(first)
    sweep_lane(START)
    assert seen(row) == ("started", "")
    assert [run.continues_id for run in task.started()] == [task.run.pk, first.pk]


# The document


def test_the_document_says_what_the_gates_say() -> None:
    told = [(row["code"], row["open when"], row["closed"], row["not told"]) for row in rows_of(CONTINUING, "The gates")]
    assert told == [(gate.code, gate.opens, gate.closed, gate.untold) for gate in gates.GATES]


def test_a_task_whose_cleanup_is_owed_says_for_what_it_waits(rehearsal: Rehearsal) -> None:
    task = FailedTask(rehearsal, owed=True)
    row = task.retried()
    sweep_lane(START)
    seen(row)
    assert leases.execution_ended(task.run.pk).sentence in row.hold_sentence
    assert owed(_lease(task)).requests == 1
