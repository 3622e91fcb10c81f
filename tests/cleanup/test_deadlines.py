"""The deadlines of a lease in use: the provider's is moved ahead, an ad-hoc lease's is heeded; a release ends both."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db import transaction

import leases
from cleanup import claims
from cleanup.claims import claim, new_ids
from cleanup.engine import Engine
from leases import deadlines
from leases.clock import boottime
from leases.models import Attempt, Environment, Lease, Obligation
from leases.timeline import timeline
from leases.waking import wake
from providers.contract import ErrorKind
from tests import factories
from tests.concurrency import Background, Gate, elsewhere, together
from tests.scenarios.steps import (
    acquired,
    attempts,
    audited,
    due_in,
    evidence,
    fails,
    falls_due,
    is_due,
    owed_for,
    state,
    sweep,
    sweep_lane,
)
from tests.stage import Rehearsal

HOUR = 3600


def _row(lease: Lease, kind: str = "extend") -> Obligation:
    return Obligation.objects.filter(lease=lease, kind=kind).latest("pk")


def _leased(stage: Rehearsal, policy: str = "ephemeral") -> Lease:
    """An active lease whose deadline is to be moved now."""
    lease = acquired(stage, policy)
    falls_due(_row(lease))
    stage.world.calls.clear()
    return lease


# The provider's deadline


def test_a_lease_with_a_deadline_owes_to_move_it_at_half_its_time(limited: Rehearsal) -> None:
    lease = acquired(limited)
    row = _row(lease)
    assert due_in(row) == pytest.approx(HOUR / 2, abs=5)
    assert row.owed_since == row.due_at  # so its age is nothing while it waits
    assert sweep(limited) == {}


def test_a_lease_without_one_owes_nothing_of_the_kind(limited: Rehearsal, rehearsal: Rehearsal) -> None:
    Environment.objects.filter(pk=limited.environment.pk).update(config={"lifetime": None})
    for stage in (limited, rehearsal):
        assert not Obligation.objects.filter(lease=acquired(stage), kind="extend").exists()


def test_the_deadline_is_moved_and_owed_again_at_half_of_what_was_read_back(limited: Rehearsal) -> None:
    lease = _leased(limited)
    before = lease.expires_at
    assert before is not None
    assert sweep(limited) == {"extended": 1}
    assert [name for name, _ in limited.world.calls] == ["identify", "extend"]
    lease.refresh_from_db()
    assert lease.expires_at == limited.world.of(lease.resource_id).resource.expires_at
    assert lease.expires_at > before
    row = _row(lease)
    assert due_in(row) == pytest.approx(HOUR / 2, abs=5)
    assert (row.is_open, row.owed_since, attempts(row)) == (True, row.due_at, ["extended"])
    assert sweep(limited) == {}


def test_a_lease_in_use_for_long_does_not_escalate_by_its_age(limited: Rehearsal) -> None:
    lease = acquired(limited)
    for _ in range(3):
        owed_for(_row(lease), 0)
        falls_due(_row(lease))
        assert sweep(limited) == {"extended": 1}
    assert audited("obligation.escalated", _row(lease)) == 0


def test_the_story_of_a_lease_tells_no_future(limited: Rehearsal) -> None:
    lease = _leased(limited)
    assert sweep(limited) == {"extended": 1}
    events = timeline(lease).events
    assert max(event.at for event in events) <= factories.database_now()
    assert any("the provider's deadline was moved" in event.title for event in events)


def test_a_deadline_that_nobody_came_to_move_escalates(limited: Rehearsal) -> None:
    lease = _leased(limited)
    owed_for(_row(lease), 31 * 60)
    claims.escalate_overdue(limited.account.pk)
    assert audited("obligation.escalated", _row(lease)) == 1


@pytest.mark.parametrize("kind", [ErrorKind.NOT_FOUND, ErrorKind.REFUSED, ErrorKind.TIMEOUT])
def test_a_failure_is_counted_tried_again_soon_and_escalates_and_ends_no_lease(
    limited: Rehearsal, kind: ErrorKind
) -> None:
    """A 404 that flaps is one of them."""
    lease = _leased(limited)
    limited.world.hooks["extend"] = fails(kind)
    row = _row(lease)
    for number in range(1, 7):
        falls_due(row)
        assert sweep(limited) == {"failed": 1}
        row.refresh_from_db()
        assert (row.failures, row.last_error_kind) == (number, kind.value)
        assert due_in(row) <= 60  # the provider's clock does not wait for a cooldown
    assert audited("obligation.escalated", row) == 1
    assert state(lease) == "active"
    limited.world.hooks.clear()
    falls_due(row)
    assert sweep(limited) == {"extended": 1}
    row.refresh_from_db()
    assert (row.failures, row.last_error_kind, row.escalated_at) == (0, "", None)


def test_another_account_behind_the_key_moves_nothing(limited: Rehearsal) -> None:
    _leased(limited)
    limited.world.identity = "another"
    assert sweep(limited) == {"failed": 1}
    assert limited.world.count("extend") == 0


@pytest.mark.parametrize("answer", [None, datetime(2030, 1, 1)])  # noqa: DTZ001 - that is the point
def test_an_answer_that_is_no_deadline_is_not_written(
    limited: Rehearsal, monkeypatch: pytest.MonkeyPatch, answer: Any
) -> None:
    lease = _leased(limited)
    before = lease.expires_at
    monkeypatch.setattr("tests.rehearsal.LimitedProvider.extend", lambda *_, **__: answer)
    assert sweep(limited) == {"failed": 1}
    lease.refresh_from_db()
    assert (lease.expires_at, _row(lease).last_error_kind) == (before, "protocol")


def test_a_deadline_that_is_read_back_as_past_is_not_moved_in_a_circle(
    limited: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = _leased(limited)
    past = factories.at(-HOUR)
    monkeypatch.setattr("tests.rehearsal.LimitedProvider.extend", lambda *_, **__: past)
    assert sweep(limited) == {"extended": 1}
    assert 25 < due_in(_row(lease)) <= 30


def test_half_way_is_half_the_remaining_time_and_never_sooner_than_the_shortest() -> None:
    now = datetime(2030, 1, 1, tzinfo=None)  # noqa: DTZ001 - pure arithmetic
    assert deadlines.half_way(now + timedelta(hours=1), now) == now + timedelta(minutes=30)
    assert deadlines.half_way(now + timedelta(seconds=50), now) == now + timedelta(seconds=30)
    assert deadlines.half_way(now - timedelta(hours=1), now) == now + timedelta(seconds=30)


def test_a_row_whose_configuration_keeps_no_deadline_is_closed_by_its_handler(limited: Rehearsal) -> None:
    """Where the process that attached could not tell, the row was opened all the same."""
    lease = _leased(limited)
    Lease.objects.filter(pk=lease.pk).update(config={"lifetime": None})
    assert sweep(limited) == {"proven": 1}
    row = _row(lease)
    assert (row.closed_as, attempts(row)) == ("nothing_owed", ["nothing_owed"])
    assert limited.world.calls == []


def test_a_process_that_cannot_tell_opens_the_row(limited: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = factories.lease(limited.environment, expires_at=factories.at(HOUR), provider="limited")
    monkeypatch.setitem(deadlines.load.__globals__["_BUILT_IN"], "limited", "no.such:Module")
    with transaction.atomic():
        deadlines.open_for(lease)
    assert _row(lease).is_open


@pytest.mark.parametrize("same_run", [True, False])
def test_a_sandbox_that_is_used_again_has_its_deadline_kept_ahead_again(
    limited: Rehearsal,
    same_run: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    first = acquired(limited, "reuse_by_environment")
    leases.release(first.pk)
    assert sweep(limited) == {"proven": 1}
    run = limited.run if same_run else factories.run(limited.company)
    again = leases.acquire(limited.environment.pk, company_id=limited.company.pk, run_id=run.pk)
    assert (again.pk == first.pk, again.resource_id) == (same_run, first.resource_id)
    again.refresh_from_db()
    assert again.expires_at is not None
    assert (_row(again).is_open, again.obligations.filter(kind="extend", closed_at=None).count()) == (True, 1)
    assert due_in(_row(again)) == pytest.approx(HOUR / 2, abs=5)


# ... and a release


def test_a_release_ends_it(limited: Rehearsal) -> None:
    lease = _leased(limited)
    leases.release(lease.pk)
    row = _row(lease)
    assert (row.closed_as, row.due_at) == ("nothing_owed", None)
    limited.world.hooks["delete"] = fails(ErrorKind.REFUSED)
    assert sweep(limited) == {"failed": 1}
    assert limited.world.count("extend") == 0


def test_a_release_supersedes_an_attempt_that_holds_it(limited: Rehearsal) -> None:
    lease = _leased(limited)
    (held,) = claim(limited.account.pk, new_ids(1), worker="w", clock=boottime)
    leases.release(lease.pk)
    assert Attempt.objects.get(pk=held.attempt_id).outcome == "nothing_owed"
    assert not claims.owe_again(held, Attempt.Outcome.EXTENDED, at=factories.at(60))
    assert not _row(lease).is_open


def test_a_release_that_comes_before_the_announcement_prevents_the_call(limited: Rehearsal) -> None:
    lease = _leased(limited)

    def release(_: str) -> None:
        limited.world.hooks.clear()
        elsewhere(lambda: leases.release(lease.pk))

    limited.world.hooks["identify"] = release
    assert Engine().sweep(limited.account.pk, limit=1).outcomes == {"superseded": 1}
    assert limited.world.count("extend") == 0


@pytest.mark.parametrize("policy", ["reuse_by_environment", "ephemeral"])
def test_a_teardown_lets_a_call_that_moves_the_deadline_end_before_it_turns_the_deadline_off(
    limited: Rehearsal, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """The call was announced while the lease was in use, and lands after its release. A delete need not wait for it."""
    lease = _leased(limited, policy)
    gate = Gate()
    limited.world.hooks["extend"] = gate
    moving = Background(lambda: Engine().sweep(limited.account.pk, limit=1))
    gate.wait()
    leases.release(lease.pk)
    if policy == "ephemeral":
        limited.world.boxes[lease.resource_id].state = "destroyed"
        assert sweep(limited) == {"proven": 1}
        gate.open()
        moving.result()
        return
    assert sweep(limited) == {"busy": 1}
    assert limited.world.count("stop") == 0
    gate.open()
    assert moving.result().outcomes == {"superseded": 1}
    lease.refresh_from_db()
    assert lease.expires_at == limited.world.of(lease.resource_id).resource.expires_at
    monkeypatch.setattr("leases.bounds.EXTEND", 0.0)  # the bound of the call passes
    falls_due(lease.obligations.get(kind="teardown"))
    assert sweep(limited) == {"proven": 1}
    lease.refresh_from_db()
    assert (lease.expires_at, limited.world.of(lease.resource_id).resource.expires_at) == (None, None)


def test_an_answer_that_comes_after_the_settle_changes_nothing(limited: Rehearsal) -> None:
    lease = _leased(limited)
    gate = Gate()
    limited.world.after["extend"] = gate
    moving = Background(lambda: Engine().sweep(limited.account.pk, limit=1))
    gate.wait()
    leases.release(lease.pk)
    limited.world.of(lease.resource_id).state = "destroyed"
    assert sweep(limited) == {"proven": 1}
    lease.refresh_from_db()
    before = lease.expires_at
    gate.open()
    moving.result()
    lease.refresh_from_db()
    assert (lease.state, lease.expires_at) == ("expired", before)


@pytest.mark.parametrize("number", range(5))
def test_a_release_and_a_move_at_the_same_time_leave_one_teardown_and_no_open_deadline(
    limited: Rehearsal, number: int
) -> None:
    lease = _leased(limited)
    together(
        lambda: Engine().sweep(limited.account.pk, limit=1),
        lambda: leases.release(lease.pk),
        lambda: wake(_row(lease).pk),
    )
    assert not _row(lease).is_open
    assert Obligation.objects.filter(lease=lease, kind="teardown").count() == 1
    assert limited.world.count("extend") <= 1
    lease.refresh_from_db()
    assert lease.state in ("pending_cleanup", "expired")


def test_an_older_answer_does_not_bring_the_deadline_nearer(limited: Rehearsal) -> None:
    """A superseded attempt whose answer is late."""
    lease = _leased(limited)
    gate = Gate()
    limited.world.after["extend"] = gate
    slow = Background(lambda: Engine().sweep(limited.account.pk, limit=1))
    gate.wait()
    limited.world.after.clear()
    falls_due(_row(lease))
    assert sweep(limited) == {"extended": 1}
    lease.refresh_from_db()
    newer = lease.expires_at
    gate.open()
    assert slow.result().outcomes == {"superseded": 1}
    lease.refresh_from_db()
    assert lease.expires_at == newer


def test_a_suspended_worker_does_not_move_it_late(limited: Rehearsal) -> None:
    lease = _leased(limited)
    late = 0.0

    def clock() -> float:
        return boottime() + late

    def suspend(_: Any) -> None:
        nonlocal late
        late = 16 * 60.0

    engine = Engine(clock=clock)
    original = engine._send

    def send(task: Any, call: Any) -> None:
        if call.name == "extend":
            suspend(None)
        original(task, call)

    engine._send = send  # type: ignore[method-assign]
    assert engine.sweep(limited.account.pk, limit=1).outcomes == {"handed_back": 1}
    assert limited.world.count("extend") == 0
    assert state(lease) == "active"


# Whose turn it is


def test_a_person_goes_first_then_deadlines_then_what_is_due_longest(limited: Rehearsal) -> None:
    leased = _leased(limited)
    longest = factories.teardown(factories.lease(limited.environment), due_in=-HOUR)
    asked = factories.teardown(factories.lease(limited.environment), due_in=-1)
    wake(asked.pk, explicit=True)
    order = [claim(limited.account.pk, new_ids(1), worker="w", clock=boottime)[0].obligation_id for _ in range(3)]
    assert order == [asked.pk, _row(leased).pk, longest.pk]


# An ad-hoc lease's own deadline


def _ending(stage: Rehearsal, seconds: float) -> Lease:
    """An ad-hoc lease that ends so many seconds from now."""
    lease = acquired(stage, ad_hoc=True)
    ends_at = factories.at(seconds)
    Lease.objects.filter(pk=lease.pk).update(ends_at=ends_at)
    Obligation.objects.filter(lease=lease, kind="end_lease").update(due_at=ends_at, owed_since=ends_at)
    lease.refresh_from_db()
    return lease


def test_an_ad_hoc_lease_owes_its_end_from_its_deadline_on(rehearsal: Rehearsal) -> None:
    lease = acquired(rehearsal, ad_hoc=True)
    assert lease.ends_at is not None
    row = _row(lease, "end_lease")
    assert (row.due_at, row.owed_since) == (lease.ends_at, lease.ends_at)
    assert not Obligation.objects.filter(lease=acquired(rehearsal), kind="end_lease").exists()


def test_an_ad_hoc_lease_is_released_at_its_deadline(rehearsal: Rehearsal) -> None:
    lease = _ending(rehearsal, 600)
    row = _row(lease, "end_lease")
    assert sweep(rehearsal) == {}
    Lease.objects.filter(pk=lease.pk).update(ends_at=factories.at(-1))
    falls_due(row)
    with leases.bridge(lease.pk).activity(timeout=600):  # its holder knew the deadline: nothing is drained
        rehearsal.world.calls.clear()
        assert sweep_lane().outcomes == {"proven": 1}
        assert rehearsal.world.calls == []
        lease.refresh_from_db()
        teardown = _row(lease, "teardown")
        assert (lease.state, lease.reason, teardown.verb, teardown.drain_until) == (
            "pending_cleanup",
            "deadline_passed",
            "delete",
            None,
        )
    assert (_row(lease, "end_lease").closed_as, attempts(row)) == ("handed_over", ["handed_over"])
    assert sweep(rehearsal) == {"proven": 1}
    assert evidence(lease) == ["destroyed"]


def test_a_retry_does_not_end_it_before_its_time(rehearsal: Rehearsal) -> None:
    lease = _ending(rehearsal, 600)
    row = _row(lease, "end_lease")
    wake(row.pk, explicit=True)
    assert sweep_lane().outcomes == {"handed_back": 1}
    assert (state(lease), is_due(row)) == ("active", False)
    assert due_in(row) == pytest.approx(600, abs=5)


def test_a_release_before_its_time_ends_what_it_owes(rehearsal: Rehearsal) -> None:
    lease = _ending(rehearsal, 600)
    leases.release(lease.pk)
    assert _row(lease, "end_lease").closed_as == "nothing_owed"


@pytest.mark.parametrize("number", range(5))
def test_a_release_at_the_moment_of_the_deadline_makes_one_teardown(rehearsal: Rehearsal, number: int) -> None:
    lease = _ending(rehearsal, -1)
    together(sweep_lane, lambda: leases.release(lease.pk))
    sweep(rehearsal)
    assert Obligation.objects.filter(lease=lease, kind="teardown").count() == 1
    assert _row(lease, "end_lease").closed_as in ("handed_over", "nothing_owed")
    assert state(lease) in ("expired", "failed")
