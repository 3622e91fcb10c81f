"""Two that lock the same rows at the same time: both succeed, in either order, and nothing that was said is lost.

Each test stops one of the two inside its transaction, lets the other come until it waits for a lock (or needs none),
and then lets go. PostgreSQL ends a deadlock by failing one of them, which its `result` would raise.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest
from django.db import connection, transaction
from django.db.models import F
from django.db.models.functions import Now

import leases
from cleanup import claims
from cleanup.claims import claim
from cleanup.engine import Engine
from leases import creating, journal, releasing, retrying, transitions
from leases.clock import boottime
from leases.errors import AcquireRejected
from leases.models import BridgeActivity, Lease, Obligation, Operation, ProviderAccount
from leases.waking import wake
from tests import factories
from tests.concurrency import BOUND, Background, Gate
from tests.scenarios.steps import (
    acquired,
    attempts,
    audited,
    falls_due,
    is_due,
    owed,
    owed_for,
    released,
    retry,
    state,
    stop,
    sweep,
)
from tests.stage import Rehearsal


@pytest.fixture(autouse=True)
def _shows_deadlocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tried again after a deadlock would hide one among ourselves."""
    if "others" not in request.node.name:
        for module in (releasing, retrying):
            monkeypatch.setattr(module, "despite_deadlocks", lambda work: work())


def _comes_to_a_lock(background: Background) -> bool:
    """Wait until some session of this database waits for a lock, or the work is over; return whether it waits."""
    pause, until = threading.Event(), time.monotonic() + BOUND
    while background._thread.is_alive():
        with connection.cursor() as cursor:
            cursor.execute(
                """
                SELECT EXISTS (SELECT 1 FROM pg_stat_activity
                                WHERE datname = current_database() AND wait_event_type = 'Lock')
                """
            )
            if cursor.fetchone()[0]:
                return True
        assert time.monotonic() < until, "it neither ended nor came to a lock"
        pause.wait(0.005)
    return False


def _stops_before(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, *, after: bool = False) -> Gate:
    """Stop whoever calls this function first, right before it, or right after it."""
    gate, real = Gate(), getattr(module, name)

    def stopped(*args: Any, **options: Any) -> Any:
        first = not gate.reached.is_set()
        if first and not after:
            gate()
        value = real(*args, **options)
        if first and after:
            gate()
        return value

    monkeypatch.setattr(module, name, stopped)
    return gate


def _meet(first: Callable[[], Any], gate: Gate, second: Callable[[], Any], *, waits: bool = True) -> tuple[Any, Any]:
    """Run `first` up to its gate, then `second` until it waits for `first`, then both to their ends."""
    one = Background(first)
    gate.wait()
    two = Background(second)
    assert _comes_to_a_lock(two) is waits
    gate.open()
    return one.result(), two.result()


def _refused(work: Callable[[], Any]) -> Callable[[], str]:
    """An acquire that comes too late: the sentence with which it is rejected."""

    def run() -> str:
        with pytest.raises(AcquireRejected) as caught:
            work()
        return str(caught.value)

    return run


def _abandoned(rehearsal: Rehearsal) -> Operation:
    """A creation whose process died when the sandbox existed; its recovery is due."""

    def die(_: str) -> None:
        raise KeyboardInterrupt

    rehearsal.world.after["create"] = die
    with pytest.raises(KeyboardInterrupt):
        acquired(rehearsal)
    del rehearsal.world.after["create"]
    operation = Operation.objects.get()
    falls_due(owed(operation))
    return operation


def _two_owed(rehearsal: Rehearsal) -> list[Lease]:
    """Two leases by id, whose teardowns came to be (and lie in the table) the other way round."""
    first, second = sorted((acquired(rehearsal), acquired(rehearsal)), key=lambda lease: lease.pk)
    leases.release(second.pk)
    leases.release(first.pk)
    assert owed(second).pk < owed(first).pk
    return [first, second]


def _destroyed(rehearsal: Rehearsal) -> None:
    """What follows pays everything, and nothing is left."""
    sweep(rehearsal)
    assert rehearsal.world.boxes == {}
    assert not Obligation.objects.filter(closed_at__isnull=True).exists()
    assert not Obligation.objects.filter(failures__gt=0).exists()


def _once(rehearsal: Rehearsal) -> dict[str, int]:
    return dict(Engine().sweep(rehearsal.account.pk, limit=1).outcomes)


# A creation between those who want it


def test_a_stop_comes_while_a_recovery_hands_over(rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    operation = _abandoned(rehearsal)
    gate = _stops_before(monkeypatch, transitions, "own_for_teardown")
    recovered, reached = _meet(lambda: _once(rehearsal), gate, lambda: stop(rehearsal))
    # What the Stop wanted is what the recovery did: the start has no owner left to cancel, its sandbox is condemned.
    assert (recovered, reached) == ({"proven": 1}, 0)
    lease = Lease.objects.get()
    assert (lease.pk, lease.state, lease.run_id) == (operation.lease_uuid, "pending_cleanup", rehearsal.run.pk)
    assert owed(lease).verb == "delete"
    _destroyed(rehearsal)
    assert state(lease) == "failed"


def test_a_recovery_hands_over_while_a_stop_cancels(rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    operation = _abandoned(rehearsal)
    gate = _stops_before(monkeypatch, journal, "wake")
    reached, recovered = _meet(lambda: stop(rehearsal), gate, lambda: _once(rehearsal))
    assert (reached, recovered) == (1, {"proven": 1})
    operation.refresh_from_db()
    assert operation.cancelled_at is not None
    assert owed(operation).closed_as == "handed_over"
    _destroyed(rehearsal)
    assert state(Lease.objects.get()) == "failed"


def test_a_stop_comes_while_an_acquire_attaches(rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = _stops_before(monkeypatch, transitions, "attach")
    lease, reached = _meet(lambda: acquired(rehearsal), gate, lambda: stop(rehearsal))
    # It waited for the run, and so saw the lease that came to be meanwhile.
    assert reached == 1
    assert (state(lease), lease.reason, owed(lease).requests) == ("pending_cleanup", "stopped", 1)
    _destroyed(rehearsal)
    assert state(lease) == "failed"


def test_an_acquire_attaches_while_a_stop_cancels(rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    created = Gate()
    rehearsal.world.after["create"] = created
    acquiring = Background(_refused(lambda: acquired(rehearsal)))
    created.wait()
    gate = _stops_before(monkeypatch, journal, "wake")
    stopping = Background(lambda: stop(rehearsal))
    gate.wait()
    created.open()
    assert _comes_to_a_lock(acquiring)
    gate.open()
    assert stopping.result() == 1
    assert "the start was stopped" in acquiring.result()
    assert state(Lease.objects.get()) == "pending_cleanup"
    _destroyed(rehearsal)


@pytest.mark.parametrize(("module", "before"), [(journal, "save_answered_id"), (creating, "_attach")])
def test_an_acquire_comes_while_a_recovery_hands_over(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch, module: Any, before: str
) -> None:
    """The attach holds the run and waits for the operation; the recovery needs the run's key for its lease."""
    created = _stops_before(monkeypatch, module, before)
    acquiring = Background(_refused(lambda: acquired(rehearsal)))
    created.wait()
    falls_due(owed(Operation.objects.get()))
    gate = _stops_before(monkeypatch, transitions, "own_for_teardown")
    recovering = Background(lambda: _once(rehearsal))
    gate.wait()
    created.open()
    assert _comes_to_a_lock(acquiring)
    gate.open()
    assert recovering.result() == {"proven": 1}
    assert "its recovery took it over first" in acquiring.result()
    assert Lease.objects.count() == 1
    _destroyed(rehearsal)


def test_a_recovery_comes_while_an_acquire_attaches(rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = _stops_before(monkeypatch, transitions, "attach")
    acquiring = Background(lambda: acquired(rehearsal))
    gate.wait()
    operation = Operation.objects.get()
    falls_due(owed(operation))
    recovering = Background(lambda: _once(rehearsal))
    assert _comes_to_a_lock(recovering)
    gate.open()
    assert state(acquiring.result()) == "active"
    assert recovering.result() == {"superseded": 1}
    assert owed(operation).closed_as == "handed_over"
    assert attempts(owed(operation)) == ["handed_over"]
    assert sweep(rehearsal) == {}


# What is owed, between a Stop and a Retry


def test_a_retry_comes_while_a_stop_goes_through_the_leases(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = _two_owed(rehearsal)
    gate = _stops_before(monkeypatch, releasing, "_stop_lease", after=True)
    assert _meet(lambda: stop(rehearsal), gate, lambda: retry(rehearsal)) == (2, 2)
    assert [owed(lease).requests for lease in pair] == [2, 2]
    assert [audited("lease.stop_requested", lease) for lease in pair] == [1, 1]
    assert [audited("obligation.retry_requested", owed(lease)) for lease in pair] == [1, 1]
    _destroyed(rehearsal)


def test_a_stop_comes_while_a_retry_goes_through_the_rows(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = _two_owed(rehearsal)
    gate = _stops_before(monkeypatch, retrying, "wake", after=True)
    assert _meet(lambda: retry(rehearsal), gate, lambda: stop(rehearsal)) == (2, 2)
    assert [owed(lease).requests for lease in pair] == [2, 2]
    _destroyed(rehearsal)


def test_a_retry_of_a_lease_and_a_start_comes_while_a_stop_goes_through_both(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recovery's row is older than the teardown's; a Stop comes to it last."""
    operation = _abandoned(rehearsal)
    lease = released(rehearsal)
    assert owed(operation).pk < owed(lease).pk
    gate = _stops_before(monkeypatch, releasing, "_stop_lease", after=True)
    assert _meet(lambda: stop(rehearsal), gate, lambda: retry(rehearsal)) == (2, 2)
    assert [owed(subject).requests for subject in (lease, operation)] == [2, 2]
    _destroyed(rehearsal)


def test_a_stop_comes_while_another_goes_through_the_leases(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = _two_owed(rehearsal)
    gate = _stops_before(monkeypatch, releasing, "_stop_lease", after=True)
    assert _meet(lambda: stop(rehearsal), gate, lambda: stop(rehearsal)) == (2, 2)
    assert [owed(lease).requests for lease in pair] == [2, 2]
    _destroyed(rehearsal)


@pytest.mark.parametrize("which", [0, 1])
def test_a_stop_of_one_lease_comes_while_its_run_is_stopped(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch, which: int
) -> None:
    pair = _two_owed(rehearsal)
    one = pair[which]
    gate = _stops_before(monkeypatch, releasing, "_stop_lease", after=True)
    reached = _meet(
        lambda: stop(rehearsal),
        gate,
        lambda: leases.stop(company_id=rehearsal.company.pk, lease_id=one.pk),
        waits=which == 0,  # the second lease is not locked yet
    )
    assert reached == (2, 1)
    assert [owed(lease).requests for lease in pair] == ([2, 1] if which == 0 else [1, 2])
    _destroyed(rehearsal)


# Behind open circuits


def _blocked(rehearsal: Rehearsal) -> tuple[Lease, Obligation]:
    """A lease whose teardown waits behind the probe of its account, which is not due yet."""
    lease = released(rehearsal)
    ProviderAccount.objects.filter(pk=rehearsal.account.pk).update(circuit="open")
    return lease, factories.probe(rehearsal.account, due_in=600)


def test_two_retries_meet_behind_one_open_circuit(rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe's row lies between those of the two leases, in every order but the right one."""
    first, probe = _blocked(rehearsal)
    second = released(rehearsal)
    gate = _stops_before(monkeypatch, retrying, "wake", after=True)
    reached = _meet(
        lambda: retrying.retry_obligations([owed(second).pk], actor="a", reason="r"),
        gate,
        lambda: retrying.retry_obligations([owed(first).pk, owed(second).pk], actor="b", reason="r"),
    )
    assert reached == (1, 2)
    probe.refresh_from_db()
    assert (owed(first).requests, owed(second).requests, probe.requests) == (1, 2, 2)
    assert is_due(probe)
    _destroyed(rehearsal)


def test_two_retries_meet_behind_two_open_circuits(rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Rehearsal()
    (mine, my_probe), (theirs, their_probe) = _blocked(rehearsal), _blocked(other)
    both = [owed(mine).pk, owed(theirs).pk]
    gate = _stops_before(monkeypatch, retrying, "wake", after=True)
    reached = _meet(
        lambda: retrying.retry_obligations(both, actor="a", reason="r"),
        gate,
        lambda: retrying.retry_obligations(both[::-1], actor="b", reason="r"),
    )
    assert reached == (2, 2)
    for row in (owed(mine), owed(theirs), my_probe, their_probe):
        row.refresh_from_db()
        assert row.requests == 2
        assert is_due(row)
    assert [sweep(one) for one in (rehearsal, other)] == [{"proven": 2}, {"proven": 2}]


def test_a_retry_of_a_probe_itself_meets_one_of_what_waits_behind_it(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A person may choose the probe of one account together with a row behind another's (the admin lists both)."""
    other = Rehearsal()
    (mine, my_probe), (theirs, their_probe) = _blocked(rehearsal), _blocked(other)
    another = released(rehearsal)
    assert my_probe.pk < their_probe.pk
    # The first holds the later probe, which was asked for by name, when it comes to the probes behind its rows.
    gate = _stops_before(monkeypatch, retrying, "_probes_of")
    reached = _meet(
        lambda: retrying.retry_obligations([owed(another).pk, their_probe.pk], actor="a", reason="r"),
        gate,
        lambda: retrying.retry_obligations([owed(mine).pk, owed(theirs).pk], actor="b", reason="r"),
        waits=False,  # probes are taken last by both, so the first holds nothing that the second wants
    )
    assert reached == (2, 2)
    for row in (my_probe, their_probe):
        row.refresh_from_db()
        assert row.requests >= 2
        assert is_due(row)


# The engine's own statements


def test_escalating_waits_for_nobody_who_retries(rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = _two_owed(rehearsal)
    for lease in (first, second):
        owed_for(owed(lease), 3600)
    Obligation.objects.filter(pk=owed(second).pk).update(wakes=F("wakes"))  # lies behind the other's newest version
    gate = _stops_before(monkeypatch, retrying, "wake", after=True)
    retrying_ = Background(lambda: retry(rehearsal))
    gate.wait()
    Background(lambda: claims.escalate_overdue(rehearsal.account.pk)).result()
    gate.open()
    assert retrying_.result() == 2
    # What was locked escalates by its own settle, or with the next sweep.
    assert [owed(lease).escalated_at is not None for lease in (first, second)] == [False, True]
    claims.escalate_overdue(rehearsal.account.pk)
    assert [audited("obligation.escalated", owed(lease)) for lease in (first, second)] == [1, 1]
    _destroyed(rehearsal)


def test_a_claim_is_asked_about_again_while_a_stop_goes_through_the_leases(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a lost reply a worker asks for what it claimed, several rows at once, in no order that a Stop knows."""
    first, second = _two_owed(rehearsal)
    Obligation.objects.filter(pk=owed(second).pk).update(due_at=factories.at(-60))  # gets the lower attempt id
    ids = sorted(uuid4() for _ in range(2))
    assert len(claim(rehearsal.account.pk, ids, worker="w", clock=boottime)) == 2
    assert owed(second).attempt_id == ids[0]
    # Whether the table or the index is read, the second lease's row comes before the first's.
    Obligation.objects.filter(pk=owed(first).pk).update(wakes=F("wakes"))
    gate = _stops_before(monkeypatch, releasing, "_stop_lease", after=True)
    stopping = Background(lambda: stop(rehearsal))
    gate.wait()
    asking = Background(lambda: claims.reclaim(ids, clock=boottime))
    _comes_to_a_lock(asking)
    gate.open()
    assert stopping.result() == 2
    assert {one.attempt_id for one in asking.result()} == set(ids)


# The end of work, and the release that may not see it


@pytest.fixture
def working(rehearsal: Rehearsal) -> tuple[Lease, BridgeActivity]:
    """A lease with work in flight that a release would wait for, for an hour."""
    rehearsal.environment.drain_seconds = 3600
    rehearsal.environment.save()
    lease = acquired(rehearsal)
    activity = BridgeActivity.objects.create(
        company_id=lease.company_id, lease=lease, kind="execute", deadline=factories.at(7200)
    )
    return lease, activity


def _end(activity: BridgeActivity) -> None:
    BridgeActivity.objects.filter(pk=activity.pk).update(ended_at=Now(), outcome="completed")


def test_a_release_comes_while_the_end_of_work_is_not_committed(
    rehearsal: Rehearsal, working: tuple[Lease, BridgeActivity]
) -> None:
    """Without waiting, it would see the work in flight, drain for an hour, and the wake would have met no row."""
    lease, activity = working
    gate = Gate()

    def end() -> None:
        with transaction.atomic():
            _end(activity)
            gate()

    _meet(end, gate, lambda: leases.release(lease.pk))
    row = owed(lease)
    assert (row.drain_until, is_due(row)) == (None, True)
    _destroyed(rehearsal)


def test_work_ends_while_its_release_is_not_committed(
    rehearsal: Rehearsal, working: tuple[Lease, BridgeActivity], monkeypatch: pytest.MonkeyPatch
) -> None:
    lease, activity = working
    gate = _stops_before(monkeypatch, transitions, "begin_teardown", after=True)
    _meet(lambda: leases.release(lease.pk), gate, lambda: _end(activity))
    row = owed(lease)
    assert row.drain_until is not None
    assert (row.wakes, is_due(row)) == (1, True)
    assert attempts(row) == []
    _destroyed(rehearsal)


def test_work_ends_while_a_stop_of_its_run_is_not_committed(
    rehearsal: Rehearsal, working: tuple[Lease, BridgeActivity], monkeypatch: pytest.MonkeyPatch
) -> None:
    lease, activity = working
    gate = _stops_before(monkeypatch, releasing, "_stop_lease", after=True)
    reached, _ = _meet(lambda: stop(rehearsal), gate, lambda: _end(activity))
    assert reached == 1
    row = owed(lease)
    assert (row.drain_until, row.requests, is_due(row)) == (None, 1, True)
    assert row.wakes == 2
    _destroyed(rehearsal)


def test_a_retry_and_the_end_of_an_ad_hoc_lease(limited: Rehearsal) -> None:
    """Both come to the lease's two deadlines, the retry without the lease's lock: by id, whoever comes first."""
    lease = acquired(limited, ad_hoc=True)
    Lease.objects.filter(pk=lease.pk).update(ends_at=factories.at(-1))
    falls_due(lease.obligations.get(kind="end_lease"))
    extends, ends = Obligation.objects.filter(lease=lease).order_by("pk")
    gate = Gate()

    def retries() -> None:
        with transaction.atomic():
            wake(extends.pk, explicit=True)
            gate()
            wake(ends.pk, explicit=True)

    selection = claims.Selection(obligation_id=ends.pk)
    _, tally = _meet(retries, gate, lambda: Engine().sweep(claims.LANE, selection=selection))
    assert tally.outcomes == {"proven": 1}
    assert state(lease) == "pending_cleanup"
    for row in (extends, ends):
        row.refresh_from_db()
        assert not row.is_open


def test_a_stop_that_is_the_victim_of_others_locks_is_done_all_the_same(rehearsal: Rehearsal) -> None:
    """A script that locks leases in an order of its own. Who waited first finds the deadlock, and is its victim."""
    first, second = sorted((acquired(rehearsal).pk, acquired(rehearsal).pk))
    holds = Gate()

    def script() -> None:
        with transaction.atomic():
            list(Lease.objects.select_for_update().filter(pk=second))
            holds()
            list(Lease.objects.select_for_update().filter(pk=first))

    other = Background(script)
    holds.wait()
    stopping = Background(lambda: stop(rehearsal))
    assert _comes_to_a_lock(stopping)
    holds.open()
    other.result()
    assert stopping.result() == 2
    assert {state(lease) for lease in Lease.objects.all()} == {"pending_cleanup"}
