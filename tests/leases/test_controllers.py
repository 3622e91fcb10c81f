"""Holding a run: who may take it, what a renewal costs, and what a controller that lost it is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

import leases
from cleanup import listening
from leases import controllers
from leases.controllers import Controller
from leases.errors import AcquireRefused, AcquireRejected, AdmissionClosed, ControlRefused, LeaseError, NotFound
from leases.models import ActivityEntry, Lease, Run
from tests import factories, fleet
from tests.concurrency import Background, Gate, elsewhere, together
from tests.scenarios import steps
from tests.stage import Rehearsal

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def _server(transactional_db: None) -> Iterator[None]:
    with fleet.a_server_that_was_always_there():
        yield


def refused(call: Callable[[], Any], error: type[LeaseError] = ControlRefused) -> str:
    with pytest.raises(error) as raised:
        call()
    return raised.value.code


def lapses(controller: Controller) -> None:
    """Its hold runs out, and the run is interrupted."""
    fleet.passes(2 * 3600, controller)
    assert controllers.interrupt_lapsed(controller.run_id, linger=0.0)


def ends(controller: Controller, status: str = "succeeded") -> None:
    Run.objects.filter(pk=controller.run_id).update(status=status, finished_at=factories.database_now())


# --- Taking -----------------------------------------------------------------------------------------------------------


def test_a_run_is_taken_for_as_long_as_said_and_each_taking_is_a_generation() -> None:
    run = factories.run()
    first = leases.take_control(run.pk, run.company_id, "one", 30)
    second = leases.take_control(run.pk, run.company_id, "one", 30.5)
    assert (first.generation, second.generation) == (1, 2)
    run.refresh_from_db()
    assert (run.controller_id, run.controller_seconds, run.controller_expires_at) == ("one", 31, second.expires_at)
    assert 25 < (second.expires_at - factories.database_now()).total_seconds() <= 31
    assert ActivityEntry.objects.filter(action="run.control_taken", subject_id=str(run.pk)).count() == 2


def test_another_controller_takes_it_only_when_the_hold_is_over() -> None:
    one = fleet.held(by="one")
    run = Run.objects.get(pk=one.run_id)

    def take() -> Controller:
        return leases.take_control(run.pk, run.company_id, "two")

    assert refused(take) == "controlled"
    fleet.passes(61, one)
    assert take().generation == 2
    assert refused(lambda: leases.renew(one)) == "controller_replaced"


def test_a_hold_that_ran_out_while_we_were_away_still_keeps_others_off() -> None:
    one = fleet.held(by="one")
    run = Run.objects.get(pk=one.run_id)
    fleet.passes(100, one)
    with fleet.server_up_since("now() - interval '30 s'"):
        assert refused(lambda: leases.take_control(run.pk, run.company_id, "two")) == "controlled"


def test_one_that_gave_it_up_need_not_be_waited_for_and_may_do_nothing_more() -> None:
    one = fleet.held(by="one")
    run = Run.objects.get(pk=one.run_id)
    assert leases.give_up_control(one) == one.expires_at
    assert refused(lambda: leases.renew(one)) == "controller_replaced"
    assert refused(lambda: leases.give_up_control(one)) == "controller_replaced"
    two = leases.take_control(run.pk, run.company_id, "two")
    run.refresh_from_db()
    assert (run.controller_id, two.generation, run.controller_gave_up_at) == ("two", 3, None)


def test_what_was_given_up_and_taken_by_nobody_is_interrupted_when_the_hold_ends() -> None:
    one = fleet.held()
    leases.give_up_control(one)
    fleet.passes(81)
    fleet.look()
    assert fleet.statuses([one]) == ["interrupted"]


@pytest.mark.parametrize("seconds", [9.9, 3601, 0, float("nan"), True, "60"])
def test_a_hold_lasts_ten_seconds_to_an_hour(seconds: Any) -> None:
    run = factories.run()
    assert refused(lambda: leases.take_control(run.pk, run.company_id, "one", seconds), LeaseError) == "invalid"


@pytest.mark.parametrize("name", ["", "x" * 201, "a\nb", None])
def test_a_controller_has_a_printable_name(name: Any) -> None:
    run = factories.run()
    assert refused(lambda: leases.take_control(run.pk, run.company_id, name), LeaseError) == "invalid"


def test_a_run_of_another_company_or_one_that_is_over_is_refused() -> None:
    run = factories.run()
    assert refused(lambda: leases.take_control(run.pk, uuid4(), "one"), NotFound) == "not_found"
    Run.objects.filter(pk=run.pk).update(status="failed")
    assert refused(lambda: leases.take_control(run.pk, run.company_id, "one")) == "run_over"


def test_of_two_that_take_it_at_once_one_has_it() -> None:
    run = factories.run()

    def take(name: str) -> Callable[[], str]:
        def call() -> str:
            try:
                leases.take_control(run.pk, run.company_id, name)
            except ControlRefused as refusal:
                return refusal.code
            return "taken"

        return call

    assert sorted(together(take("one"), take("two"))) == ["controlled", "taken"]


# --- Renewing ---------------------------------------------------------------------------------------------------------


def test_a_renewal_is_one_indexed_statement_that_fires_no_trigger() -> None:
    one = fleet.held()
    fleet.passes(20, one)
    with CaptureQueriesContext(connection) as queries:
        until = leases.renew(one)
    assert len(queries) == 1
    assert 59 < (until - factories.database_now()).total_seconds() <= 60
    statement = queries[0]["sql"]
    with connection.cursor() as cursor:
        cursor.execute("SET enable_seqscan = off")
        cursor.execute(f"EXPLAIN (ANALYZE, COSTS OFF) {statement}")
        plan = "\n".join(row[0] for row in cursor.fetchall())
        cursor.execute("RESET enable_seqscan")
    assert "leases_run_pkey" in plan
    assert "Trigger" not in plan


def test_a_late_renewal_is_the_one_that_tells_the_watch() -> None:
    one = fleet.held()
    fleet.passes(61, one)
    with connection.cursor() as cursor:
        cursor.execute(
            f"EXPLAIN (ANALYZE, COSTS OFF) {controllers._RENEW}",
            [one.run_id, one.generation, one.controller_id],
        )
        plan = "\n".join(row[0] for row in cursor.fetchall())
    assert "Trigger run_lapse_healed_wakes_watch" in plan


def test_a_renewal_notifies_nobody_and_a_taking_only_where_it_is_the_first_to_end() -> None:
    def heard(session: psycopg.Connection[Any]) -> list[str]:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_notify('paperclip_due', 'marker')")
        found: list[str] = []
        for notify in session.notifies(timeout=20):
            if notify.payload == "marker":
                return found
            found.append(notify.payload)
        raise AssertionError("the marker did not come")

    with psycopg.connect(**listening.address(), autocommit=True) as session:
        for channel in listening.CHANNELS:
            session.execute(f"LISTEN {channel}")
        one = fleet.held(seconds=30)
        assert len(heard(session)) == 1  # the watch is owed
        fleet.held(seconds=60)
        assert heard(session) == []
        two = fleet.held(seconds=20)
        assert len(heard(session)) == 1
        for _ in range(3):
            leases.renew(one)
            leases.renew(two)
        assert heard(session) == []


def test_what_is_refused_says_why() -> None:
    over, lapsed, replaced, interrupted = fleet.fleet(4)
    ends(over)
    lapses(lapsed)
    leases.take_control(replaced.run_id, Run.objects.get(pk=replaced.run_id).company_id, replaced.controller_id)
    ends(interrupted, "interrupted")  # by the control plane, while the hold stands
    assert refused(lambda: leases.renew(over)) == "run_over"
    assert refused(lambda: leases.renew(lapsed)) == "controller_lapsed"
    assert refused(lambda: leases.renew(replaced)) == "controller_replaced"
    assert refused(lambda: leases.renew(interrupted)) == "run_over"
    assert refused(lambda: leases.renew(replace(over, run_id=uuid4())), NotFound) == "not_found"


# --- What a controller that lost the run may not do -------------------------------------------------------------------


LOSING: dict[str, tuple[Callable[[Controller], Any], str]] = {
    "lapsed": (lapses, "controller_lapsed"),
    "replaced": (
        lambda one: leases.take_control(one.run_id, Run.objects.get(pk=one.run_id).company_id, one.controller_id),
        "controller_replaced",
    ),
    "gave it up": (leases.give_up_control, "controller_replaced"),
    "run over": (ends, "run_over"),
}


def _controlled(rehearsal: Rehearsal) -> Controller:
    return leases.take_control(rehearsal.run.pk, rehearsal.company.pk, "one")


def _acquire(rehearsal: Rehearsal, controller: Controller, **how: Any) -> Lease:
    return leases.acquire(
        rehearsal.environment.pk,
        company_id=rehearsal.company.pk,
        run_id=controller.run_id,
        controller=controller,
        **how,
    )


def test_whoever_holds_the_run_acquires_works_and_releases(rehearsal: Rehearsal) -> None:
    one = _controlled(rehearsal)
    lease = _acquire(rehearsal, one)
    bridge = leases.bridge(lease.pk, controller=one)
    assert bridge.execute(["true"]).exit_code == 0
    with bridge.activity(timeout=10):
        pass
    assert leases.release(lease.pk, controller=one).state == Lease.State.PENDING_CLEANUP


@pytest.mark.parametrize("how", LOSING)
def test_it_does_not_acquire(rehearsal: Rehearsal, how: str) -> None:
    lose, code = LOSING[how]
    one = _controlled(rehearsal)
    lease = _acquire(rehearsal, one, request_key="before")
    lose(one)
    assert refused(lambda: _acquire(rehearsal, one), AcquireRefused) == code
    assert refused(lambda: _acquire(rehearsal, one, request_key="before"), AcquireRefused) == code
    assert list(Lease.objects.all()) == [lease]


@pytest.mark.parametrize("how", LOSING)
def test_it_does_not_work(rehearsal: Rehearsal, how: str) -> None:
    lose, code = LOSING[how]
    one = _controlled(rehearsal)
    lease = _acquire(rehearsal, one)
    lose(one)
    bridge = leases.bridge(lease.pk, controller=one)
    assert refused(lambda: bridge.execute(["true"]), AdmissionClosed) == code
    with pytest.raises(AdmissionClosed) as raised, bridge.activity(timeout=10):
        raise AssertionError("admitted")
    assert raised.value.code == code
    assert not lease.activities.exists()


@pytest.mark.parametrize("how", [how for how in LOSING if how != "run over"])
def test_it_does_not_release(rehearsal: Rehearsal, how: str) -> None:
    lose, code = LOSING[how]
    one = _controlled(rehearsal)
    lease = _acquire(rehearsal, one)
    lose(one)
    assert refused(lambda: leases.release(lease.pk, controller=one)) == code
    assert steps.state(lease) == Lease.State.ACTIVE


def test_whose_run_is_over_by_its_own_word_may_still_release(rehearsal: Rehearsal) -> None:
    one = _controlled(rehearsal)
    lease = _acquire(rehearsal, one)
    ends(one)
    assert leases.release(lease.pk, controller=one).state == Lease.State.PENDING_CLEANUP


@pytest.mark.parametrize("how", LOSING)
def test_what_was_being_made_for_it_is_not_given_to_it(rehearsal: Rehearsal, how: str) -> None:
    """It lost the run while the provider was at work: the attach, under the run's lock, refuses it."""
    lose, code = LOSING[how]
    one = _controlled(rehearsal)
    rehearsal.world.hooks["create"] = lambda _: elsewhere(lambda: lose(one))
    assert refused(lambda: _acquire(rehearsal, one), AcquireRejected) == code
    assert Lease.objects.get().state == Lease.State.PENDING_CLEANUP


def test_work_that_was_admitted_before_backs_out_if_it_has_not_begun(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = _controlled(rehearsal)
    lease = _acquire(rehearsal, one)
    bridge = leases.bridge(lease.pk, controller=one)
    still_open = bridge._still_open

    def late() -> bool:
        elsewhere(lambda: leases.give_up_control(one))
        return still_open()

    monkeypatch.setattr(bridge, "_still_open", late)
    assert refused(lambda: bridge.execute(["true"]), AdmissionClosed) == "admission_closed"
    assert lease.activities.get().outcome == "backed_out"


def test_a_controller_of_another_run_is_refused(rehearsal: Rehearsal) -> None:
    one, other = _controlled(rehearsal), fleet.held(rehearsal.company)
    lease = _acquire(rehearsal, one)

    def acquire() -> Lease:
        return leases.acquire(
            rehearsal.environment.pk, company_id=rehearsal.company.pk, run_id=one.run_id, controller=other
        )

    assert refused(acquire, AcquireRefused) == "invalid"
    assert refused(lambda: leases.bridge(lease.pk, controller=other).execute(["true"]), LeaseError) == "invalid"
    assert refused(lambda: leases.release(lease.pk, controller=other), LeaseError) == "invalid"


def test_a_release_and_a_takeover_at_once_are_decided_by_the_runs_lock(rehearsal: Rehearsal) -> None:
    one = _controlled(rehearsal)
    lease = _acquire(rehearsal, one)
    gate = Gate()

    def take_over() -> None:
        with transaction.atomic():
            leases.take_control(one.run_id, rehearsal.company.pk, "one")
            gate()

    taking = Background(take_over)
    gate.wait()
    releasing = Background(lambda: leases.release(lease.pk, controller=one))
    gate.open()
    taking.result()
    assert refused(releasing.result) == "controller_replaced"
