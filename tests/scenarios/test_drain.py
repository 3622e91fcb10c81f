"""F: work between host and sandbox at the end of a lease. A drain is bounded, proves nothing, and Stop never drains."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connection

import leases
from cleanup import dispositions, tasks
from cleanup.claims import claim, new_ids
from cleanup.engine import Engine
from leases import bridging
from leases.clock import boottime
from leases.errors import AcquireRejected, AdmissionClosed
from leases.models import BridgeActivity, Environment, Lease, Obligation, Operation, Run
from leases.waking import wake
from providers.contract import ErrorKind
from tests import factories
from tests.concurrency import Background, Gate, together
from tests.scenarios.steps import (
    acquired,
    attempts,
    audited,
    due_in,
    evidence,
    fails,
    falls_due,
    is_due,
    moment,
    owed,
    released,
    state,
    stop,
    sweep,
)
from tests.stage import Rehearsal

# Waiting for work in flight


def test_a_release_with_work_in_flight_owes_the_teardown_unclaimed_at_the_end_of_the_drain(
    rehearsal: Rehearsal,
) -> None:
    lease = acquired(rehearsal)
    with leases.bridge(lease.pk).activity(timeout=600):
        leases.release(lease.pk)
        row = owed(lease)
        assert row.due_at == row.drain_until
        assert 25 < due_in(row) <= lease.drain_seconds == 30
        assert (row.attempt_id, row.worker, row.claimed_at) == (None, None, None)
        assert sweep(rehearsal) == {}
    assert state(lease) == Lease.State.PENDING_CLEANUP
    assert rehearsal.world.count("inspect") == 0


def test_a_release_with_nothing_in_flight_owes_it_now(rehearsal: Rehearsal) -> None:
    lease = acquired(rehearsal)
    with leases.bridge(lease.pk).activity(timeout=600):
        pass
    leases.release(lease.pk)
    assert owed(lease).drain_until is None
    assert is_due(owed(lease))


def test_work_past_its_own_deadline_is_not_drained(rehearsal: Rehearsal) -> None:
    lease = acquired(rehearsal)
    with leases.bridge(lease.pk).activity(timeout=600) as work:
        BridgeActivity.objects.filter(pk=work.pk).update(deadline=factories.at(-1))
        leases.release(lease.pk)
        assert owed(lease).drain_until is None
        assert sweep(rehearsal) == {"proven": 1}


def test_the_end_of_the_drain_is_written_once(rehearsal: Rehearsal) -> None:
    lease = acquired(rehearsal)
    with leases.bridge(lease.pk).activity(timeout=600):
        leases.release(lease.pk)
        row = owed(lease)
        written = moment(row.drain_until)
        Obligation.objects.filter(pk=row.pk).update(drain_until=factories.at(3))
        nearer = moment(owed(lease).drain_until)
        leases.release(lease.pk)
        leases.release(lease.pk, outcome="failed", disposition="destroy")
        assert owed(lease).drain_until == nearer < written
        falls_due(row)
        passed = owed(lease).drain_until
        leases.release(lease.pk)
        assert owed(lease).drain_until == passed
        assert owed(lease).pk == row.pk


def test_the_end_of_the_last_activity_wakes_the_teardown(rehearsal: Rehearsal) -> None:
    lease = acquired(rehearsal)
    bridge = leases.bridge(lease.pk)
    with bridge.activity(timeout=600):
        with bridge.activity(timeout=600):
            leases.release(lease.pk)
        # Woken, looked at, and put back: one is still open, and the provider was not asked.
        assert is_due(owed(lease))
        assert sweep(rehearsal) == {"draining": 1}
        row = owed(lease)
        assert row.due_at == row.drain_until
        assert (row.failures, row.busy_count) == (0, 0)
        assert rehearsal.world.count("inspect") == 0
    assert is_due(owed(lease))
    assert sweep(rehearsal) == {"proven": 1}


def test_of_two_activities_that_end_at_the_same_time_neither_leaves_the_teardown_asleep(rehearsal: Rehearsal) -> None:
    """Each transaction sees the other's activity as open; so each wakes, and the settle evaluates."""
    lease = acquired(rehearsal)
    gates = [Gate(), Gate()]

    def work(gate: Gate) -> None:
        with leases.bridge(lease.pk).activity(timeout=600):
            gate()

    working = [Background(lambda gate=gate: work(gate)) for gate in gates]
    for gate in gates:
        gate.wait()
    leases.release(lease.pk)
    row = owed(lease)
    open_work = list(BridgeActivity.objects.filter(lease=lease, ended_at__isnull=True).values_list("pk", flat=True))
    assert len(open_work) == 2

    def end(pk: Any) -> None:
        BridgeActivity.objects.filter(pk=pk).update(ended_at=factories.database_now(), outcome="completed")

    together(*[lambda pk=pk: end(pk) for pk in open_work])
    for gate, one in zip(gates, working, strict=True):
        gate.open()
        one.result()
    row.refresh_from_db()
    assert row.wakes == 2
    assert sweep(rehearsal) == {"proven": 1}


def test_work_that_ends_while_an_attempt_evaluates_makes_the_row_due_at_once(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wake falls between evaluation and settle: the settle sees that `wakes` moved."""
    lease = acquired(rehearsal)
    working = Gate()

    def work() -> None:
        with leases.bridge(lease.pk).activity(timeout=600):
            working()

    background = Background(work)
    working.wait()
    leases.release(lease.pk)
    wake(owed(lease).pk)
    write = dispositions.write

    def write_late(*args: Any, **options: Any) -> dispositions.Written:
        working.open()
        background.result()
        return write(*args, **options)

    monkeypatch.setattr("cleanup.engine.write", write_late)
    Engine().sweep(rehearsal.account.pk)
    monkeypatch.undo()
    sweep(rehearsal)
    assert attempts(owed(lease)) == ["draining", "proven"]


# The bound passes


def test_a_drain_that_timed_out_permits_the_termination(rehearsal: Rehearsal) -> None:
    """S-117: a command whose promise never resolves holds a release for the drain bound, and no longer."""
    lease = acquired(rehearsal)
    with leases.bridge(lease.pk).activity(timeout=3600):
        leases.release(lease.pk)
        falls_due(owed(lease))
        assert sweep(rehearsal) == {"proven": 1}
        assert rehearsal.world.count("delete") == 1


def test_the_receipt_comes_from_the_stop_and_not_from_the_timeout(rehearsal: Rehearsal) -> None:
    """S-118."""
    lease = acquired(rehearsal, "reuse_by_environment")
    with leases.bridge(lease.pk).activity(timeout=3600):
        leases.release(lease.pk)
        falls_due(owed(lease))
        assert evidence(lease) == []
        assert sweep(rehearsal) == {"proven": 1}
    assert evidence(lease) == ["stopped"]
    assert rehearsal.world.count("stop") == 1


@pytest.mark.parametrize("policy", ["ephemeral", "reuse_by_environment"])
def test_a_drain_that_timed_out_proves_nothing_when_the_provider_fails_too(rehearsal: Rehearsal, policy: str) -> None:
    """S-119."""
    lease = acquired(rehearsal, policy)
    rehearsal.world.hooks.update(stop=fails(ErrorKind.REFUSED), delete=fails(ErrorKind.REFUSED))
    with leases.bridge(lease.pk).activity(timeout=3600):
        leases.release(lease.pk)
        falls_due(owed(lease))
        assert sweep(rehearsal) == {"failed": 1}
    assert evidence(lease) == []
    assert state(lease) == Lease.State.PENDING_CLEANUP


# Admission


@pytest.mark.parametrize("when", ["drains", "waits", "is worked on", "is settled"])
def test_work_that_arrives_during_the_teardown_is_refused(rehearsal: Rehearsal, when: str) -> None:
    """S-123. It is refused at once and need not wait: admission closed in the transaction that owed the teardown."""
    lease = acquired(rehearsal)
    bridge = leases.bridge(lease.pk)
    if when == "drains":
        with bridge.activity(timeout=600):
            leases.release(lease.pk)
    else:
        leases.release(lease.pk)
    if when == "is worked on":
        claim(rehearsal.account.pk, new_ids(1), worker="w", clock=boottime)
    if when == "is settled":
        sweep(rehearsal)
    known = BridgeActivity.objects.count()
    with pytest.raises(AdmissionClosed):
        bridge.execute(["true"])
    with pytest.raises(AdmissionClosed), bridge.activity(timeout=1):
        pytest.fail("it was admitted")
    assert BridgeActivity.objects.count() == known
    assert rehearsal.world.count("execute") == 0


def test_work_that_was_admitted_just_before_backs_out(rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-124."""
    lease = acquired(rehearsal)
    gate = Gate()
    original = bridging.open_recorded

    def slowly(snapshot: Any) -> Any:
        gate()
        return original(snapshot)

    monkeypatch.setattr(bridging, "open_recorded", slowly)
    working = Background(lambda: leases.bridge(lease.pk).execute(["rm", "-rf", "files"]))
    gate.wait()
    leases.release(lease.pk)
    assert owed(lease).drain_until is not None
    gate.open()
    with pytest.raises(AdmissionClosed, match="backed out"):
        working.result()
    assert rehearsal.world.count("execute") == 0
    assert BridgeActivity.objects.get(lease=lease).outcome == "backed_out"
    assert is_due(owed(lease))  # and its end woke the teardown


def test_admission_and_release_exclude_each_other(rehearsal: Rehearsal) -> None:
    """Whichever commits first: what was admitted is drained, or it was not admitted."""
    for _ in range(5):
        lease = acquired(rehearsal)
        gate = Gate()

        def work(lease: Lease = lease, gate: Gate = gate) -> str:
            try:
                with leases.bridge(lease.pk).activity(timeout=600):
                    gate()
                    return "worked"
            except AdmissionClosed:
                return "refused"
            finally:
                gate.reached.set()

        working = Background(work)
        leases.release(lease.pk)
        gate.wait()
        admitted = BridgeActivity.objects.filter(lease=lease, outcome="").exists()
        assert (owed(lease).drain_until is not None) or not admitted
        gate.open()
        assert working.result() in {"worked", "refused"}


# Explicit Stop


def test_stop_does_not_wait_for_the_command_that_it_cancels(rehearsal: Rehearsal) -> None:
    lease = acquired(rehearsal)
    with leases.bridge(lease.pk).activity(timeout=3600):
        assert stop(rehearsal) == 1
        assert owed(lease).drain_until is None
        assert sweep(rehearsal) == {"proven": 1}
    assert evidence(lease) == ["destroyed"]


def test_stop_ends_a_drain_that_is_running(rehearsal: Rehearsal) -> None:
    lease = acquired(rehearsal)
    with leases.bridge(lease.pk).activity(timeout=3600):
        leases.release(lease.pk)
        assert sweep(rehearsal) == {}
        assert stop(rehearsal) == 1
        assert owed(lease).drain_until is None
        assert sweep(rehearsal) == {"proven": 1}


def test_a_release_after_a_stop_does_not_begin_to_drain(rehearsal: Rehearsal) -> None:
    lease = acquired(rehearsal)
    with leases.bridge(lease.pk).activity(timeout=3600):
        stop(rehearsal)
        leases.release(lease.pk)
        assert owed(lease).drain_until is None
        assert is_due(owed(lease))


def test_stop_goes_before_what_is_due_longer(rehearsal: Rehearsal) -> None:
    rehearsal.account.concurrency_limit = 1
    rehearsal.account.save()
    waiting = released(rehearsal)
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE leases_obligation SET due_at = now() - interval '1 hour' WHERE id = %s", [owed(waiting).pk]
        )
    rehearsal.run = factories.run(rehearsal.company)
    urgent = acquired(rehearsal)
    stop(rehearsal)
    (first,) = claim(rehearsal.account.pk, new_ids(1), worker="w", clock=boottime)
    assert first.lease_id == urgent.pk != waiting.pk


# Stop while the sandbox is being created (S-121, S-092, K-10)


def _starting(rehearsal: Rehearsal, when: str) -> tuple[Background, Gate]:
    """Begin an acquire and hold it inside the provider's create call: before it took effect, or before its reply."""
    gate = Gate()
    hooks = rehearsal.world.hooks if when == "not yet allocated" else rehearsal.world.after
    hooks["create"] = gate
    starting = Background(
        lambda: leases.acquire(rehearsal.environment.pk, company_id=rehearsal.company.pk, run_id=rehearsal.run.pk)
    )
    gate.wait()
    return starting, gate


def _one_sandbox_was_owned_once_and_is_gone(rehearsal: Rehearsal) -> None:
    operation = Operation.objects.get()
    lease = Lease.objects.get()
    assert operation.lease_id == lease.pk == operation.lease_uuid
    assert rehearsal.world.count("create") == 1
    assert rehearsal.world.boxes == {}
    assert state(lease) == Lease.State.FAILED
    assert evidence(lease) == ["destroyed"]
    assert not Obligation.objects.filter(closed_at__isnull=True).exists()


@pytest.mark.parametrize("when", ["not yet allocated", "allocated, reply under way"])
def test_a_stop_during_the_startup_is_not_held_up_by_it_and_its_sandbox_is_destroyed(
    rehearsal: Rehearsal, when: str
) -> None:
    """S-121: the reply comes before anybody looked."""
    starting, gate = _starting(rehearsal, when)
    assert stop(rehearsal) == 1  # returns while the create call hangs
    gate.open()
    with pytest.raises(AcquireRejected, match="stopped"):
        starting.result()
    assert sweep(rehearsal) == {"proven": 1}
    _one_sandbox_was_owned_once_and_is_gone(rehearsal)


def test_a_recovery_that_looks_before_the_sandbox_exists_leaves_it_to_the_late_reply(rehearsal: Rehearsal) -> None:
    """S-082."""
    starting, gate = _starting(rehearsal, "not yet allocated")
    stop(rehearsal)
    assert Engine().sweep(rehearsal.account.pk).outcomes == {"not_seen": 1}
    assert Lease.objects.count() == 0
    gate.open()
    with pytest.raises(AcquireRejected, match="stopped"):
        starting.result()
    assert sweep(rehearsal) == {"proven": 1}
    _one_sandbox_was_owned_once_and_is_gone(rehearsal)


def test_a_recovery_that_finds_the_sandbox_first_destroys_it_and_the_late_reply_changes_nothing(
    rehearsal: Rehearsal,
) -> None:
    """S-083."""
    starting, gate = _starting(rehearsal, "allocated, reply under way")
    stop(rehearsal)
    assert sweep(rehearsal) == {"proven": 2}
    _one_sandbox_was_owned_once_and_is_gone(rehearsal)
    gate.open()
    with pytest.raises(AcquireRejected, match="recovery took it over"):
        starting.result()
    assert sweep(rehearsal) == {}
    _one_sandbox_was_owned_once_and_is_gone(rehearsal)


def test_a_recovery_that_is_looking_when_the_reply_comes_hands_over(rehearsal: Rehearsal) -> None:
    starting, reply = _starting(rehearsal, "allocated, reply under way")
    stop(rehearsal)
    look = Gate()
    rehearsal.world.hooks["find"] = look
    looking = Background(lambda: Engine().sweep(rehearsal.account.pk))
    look.wait()
    reply.open()
    with pytest.raises(AcquireRejected):
        starting.result()
    del rehearsal.world.hooks["find"]
    look.open()
    looking.result()
    sweep(rehearsal)
    assert attempts(owed(Operation.objects.get())) == ["handed_over"]
    _one_sandbox_was_owned_once_and_is_gone(rehearsal)


def test_a_startup_that_nobody_stopped_is_attached_though_its_recovery_was_looking(rehearsal: Rehearsal) -> None:
    """The control: both take the operation's lock, and the one that comes first makes the only lease."""
    starting, reply = _starting(rehearsal, "allocated, reply under way")
    falls_due(owed(Operation.objects.get()))
    look = Gate()
    rehearsal.world.hooks["find"] = look
    looking = Background(lambda: Engine().sweep(rehearsal.account.pk))
    look.wait()
    reply.open()
    lease = starting.result()
    look.open()
    looking.result()
    assert state(lease) == Lease.State.ACTIVE
    assert Lease.objects.count() == 1
    assert len(rehearsal.world.boxes) == 1
    assert sweep(rehearsal) == {}


def _the_run_ends(rehearsal: Rehearsal) -> None:
    Run.objects.filter(pk=rehearsal.run.pk).update(status=Run.Status.CANCELLED)


def _the_environment_is_archived(rehearsal: Rehearsal) -> None:
    Environment.objects.filter(pk=rehearsal.environment.pk).update(status=Environment.Status.ARCHIVED)


def _the_company_is_closed(rehearsal: Rehearsal) -> None:
    type(rehearsal.company).objects.filter(pk=rehearsal.company.pk).update(closed_at=factories.database_now())


def _the_environment_is_deleted(rehearsal: Rehearsal) -> None:
    Environment.objects.filter(pk=rehearsal.environment.pk).delete()


@pytest.mark.parametrize(
    "meanwhile",
    [_the_run_ends, _the_environment_is_archived, _the_company_is_closed, _the_environment_is_deleted],
    ids=lambda step: step.__name__.strip("_"),
)
def test_a_sandbox_that_came_too_late_is_not_attached_and_has_an_owner_from_the_start(
    rehearsal: Rehearsal, meanwhile: Any
) -> None:
    """S-025, S-026, S-028, S-029, S-040, S-062: authority is asked again under the locks of the attach."""
    starting, reply = _starting(rehearsal, "allocated, reply under way")
    meanwhile(rehearsal)
    reply.open()
    with pytest.raises(AcquireRejected):
        starting.result()
    lease = Lease.objects.get()
    assert (lease.state, lease.policy, lease.reason) == ("pending_cleanup", "ephemeral", "acquire_rejected")
    assert audited("lease.acquired", lease) == 0
    assert sweep(rehearsal) == {"proven": 1}
    _one_sandbox_was_owned_once_and_is_gone(rehearsal)


# The drain's own messages are an optimisation


def _messages(monkeypatch: pytest.MonkeyPatch, task: Any) -> list[tuple[Any, Any]]:
    sent: list[tuple[Any, Any]] = []
    monkeypatch.setattr(task, "apply_async", lambda args, countdown: sent.append((args, countdown)))
    return sent


def test_a_drain_sends_one_message_of_seconds_with_a_row_behind_it(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = _messages(monkeypatch, tasks.drain)
    lease = acquired(rehearsal)
    with leases.bridge(lease.pk).activity(timeout=600):
        leases.release(lease.pk)
    assert sent == [((owed(lease).pk, lease.drain_seconds // tasks.DRAIN_EVERY), tasks.DRAIN_EVERY)]
    assert max(countdown for _, countdown in sent) < 300


def test_a_release_with_nothing_to_drain_sends_none(rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = _messages(monkeypatch, tasks.drain)
    released(rehearsal)
    assert sent == []


def test_a_broker_that_is_away_fails_no_release(rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: Any, **__: Any) -> None:
        raise ConnectionError("the broker is away")

    monkeypatch.setattr(tasks.drain, "apply_async", away)
    lease = acquired(rehearsal)
    with leases.bridge(lease.pk).activity(timeout=600):
        assert leases.release(lease.pk).state == Lease.State.PENDING_CLEANUP
    assert sweep(rehearsal) == {"proven": 1}


def test_the_message_finds_work_that_outlived_its_own_deadline(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No write tells that a deadline passed; without the message the row would wait for the drain's bound."""
    _messages(monkeypatch, tasks.drain)
    lease = acquired(rehearsal)
    with leases.bridge(lease.pk).activity(timeout=600) as work:
        leases.release(lease.pk)
        BridgeActivity.objects.filter(pk=work.pk).update(deadline=factories.at(-1))
        assert sweep(rehearsal) == {}
        tasks.drain(owed(lease).pk, 5)
        assert is_due(owed(lease))
        assert sweep(rehearsal) == {"proven": 1}


def test_the_message_looks_a_bounded_number_of_times(rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    _messages(monkeypatch, tasks.drain)
    lease = acquired(rehearsal)
    looks: list[int] = []

    class Again(Exception):
        pass

    def again(countdown: int) -> Again:
        looks.append(countdown)
        return Again()

    with leases.bridge(lease.pk).activity(timeout=600):
        leases.release(lease.pk)
        row = owed(lease)
        monkeypatch.setattr(tasks.drain, "retry", again)
        for retries in range(5):
            tasks.drain.push_request(retries=retries)
            try:
                tasks.drain.run(row.pk, 3)
            except Again:
                pass
            finally:
                tasks.drain.pop_request()
        assert looks == [tasks.DRAIN_EVERY] * 3
        assert not is_due(row)


@pytest.mark.parametrize("meanwhile", ["settled", "claimed", "past its drain"])
def test_a_message_about_a_row_that_needs_none_changes_nothing(rehearsal: Rehearsal, meanwhile: Any) -> None:
    lease = acquired(rehearsal)
    with leases.bridge(lease.pk).activity(timeout=600):
        leases.release(lease.pk)
        row = owed(lease)
        if meanwhile == "settled":
            falls_due(row)
            sweep(rehearsal)
        elif meanwhile == "claimed":
            factories.claimed(row)
        else:
            falls_due(row)
        before = Obligation.objects.filter(pk=row.pk).values().get()
        tasks.drain(row.pk, 5)
        assert Obligation.objects.filter(pk=row.pk).values().get() == before
