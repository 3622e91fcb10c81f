"""An engine that is told to stop: what was not sent goes back at once, what is in flight gets one call bound."""

from __future__ import annotations

import threading

import pytest

from cleanup.engine import Engine, Slots
from cleanup.keeper import Keeper
from leases.models import Lease, Obligation
from providers.contract import ErrorKind
from tests import factories
from tests.concurrency import Background, Gate
from tests.scenarios.steps import attempts, due_in, evidence, fails, falls_due, is_due, owed, released, state, sweep
from tests.stage import Rehearsal


def _is_unharmed(lease: Lease) -> None:
    """Handed back: unclaimed, due now, and nothing counted."""
    row = owed(lease)
    assert (row.attempt_id, row.failures, row.busy_count, row.escalated_at) == (None, 0, 0, None)
    assert is_due(row)


def test_it_claims_nothing_when_told_before(rehearsal: Rehearsal) -> None:
    lease = released(rehearsal)
    tally = Engine(stopping=lambda: True).sweep(rehearsal.account.pk)
    assert (tally.claimed, attempts(owed(lease))) == (0, [])


def test_rows_whose_call_was_not_sent_are_handed_back_at_once(rehearsal: Rehearsal) -> None:
    made = [released(rehearsal) for _ in range(4)]
    stop = threading.Event()
    rehearsal.world.calls.clear()
    engine = Engine(stopping=stop.is_set, on_claimed=lambda _: stop.set())
    assert engine.sweep(rehearsal.account.pk).outcomes == {"handed_back": 4}
    assert rehearsal.world.calls == []
    for lease in made:
        _is_unharmed(lease)
        assert attempts(owed(lease)) == ["handed_back"]
    assert sweep(rehearsal) == {"proven": 4}


@pytest.mark.parametrize("call", ["identify", "inspect", "delete"])
def test_a_call_in_flight_may_answer_and_its_row_is_handed_back_after_it(rehearsal: Rehearsal, call: str) -> None:
    lease = released(rehearsal)
    stop, gate = threading.Event(), Gate()
    rehearsal.world.hooks[call] = gate
    stopping = Background(lambda: Engine(stopping=stop.is_set).sweep(rehearsal.account.pk))
    gate.wait()
    stop.set()
    calls = len(rehearsal.world.calls)
    gate.open()
    assert stopping.result().outcomes == {"handed_back": 1}
    assert len(rehearsal.world.calls) == calls  # what it would have asked next was not asked
    _is_unharmed(lease)
    del rehearsal.world.hooks[call]
    assert sweep(rehearsal) == {"proven": 1}
    # A delete that was sent and not looked at again is remembered by its announcement.
    assert evidence(lease) == ["destroyed"]


def test_an_answer_that_is_the_last_one_needed_settles(rehearsal: Rehearsal) -> None:
    lease = released(rehearsal)
    stop, gate = threading.Event(), Gate()
    rehearsal.world.hooks["identify"] = lambda _: None if rehearsal.world.boxes else gate()
    stopping = Background(lambda: Engine(stopping=stop.is_set).sweep(rehearsal.account.pk))
    gate.wait()  # deleted, seen to be gone, and about to be attested
    stop.set()
    gate.open()
    assert stopping.result().outcomes == {"proven": 1}
    assert state(lease) == Lease.State.EXPIRED


def test_a_call_in_flight_that_fails_is_counted_as_ever(rehearsal: Rehearsal) -> None:
    lease = released(rehearsal)
    stop, gate = threading.Event(), Gate()

    def fail_late(_: str) -> None:
        gate()
        fails(ErrorKind.REFUSED)(_)

    rehearsal.world.hooks["inspect"] = fail_late
    stopping = Background(lambda: Engine(stopping=stop.is_set).sweep(rehearsal.account.pk))
    gate.wait()
    stop.set()
    gate.open()
    assert stopping.result().outcomes == {"failed": 1}
    assert owed(lease).failures == 1


def test_a_call_that_outlives_the_bound_keeps_its_protection_and_falls_due_by_itself(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K-25: the process may be killed now; what it owed belongs to the row."""
    monkeypatch.setattr("leases.bounds.LONGEST_CALL", 0.2)
    monkeypatch.setattr("cleanup.engine.HANG_MARGIN", 0.1)
    hanging, sent_later = released(rehearsal), released(rehearsal)
    stop, gate = threading.Event(), Gate()
    rehearsal.world.hooks["inspect"] = lambda subject: gate() if subject == hanging.resource_id else None
    slots, keeper = Slots(10), Keeper()
    engine = Engine(stopping=stop.is_set, slots=slots, keeper=keeper)
    stopping = Background(lambda: engine.sweep(rehearsal.account.pk))
    gate.wait()
    stop.set()
    stopping.result()
    row = owed(hanging)
    assert row.attempt_id is not None
    assert 14 * 60 < due_in(row) <= 15 * 60
    assert attempts(row) == [""]
    assert owed(sent_later).attempt_id is None
    assert keeper._held == {}  # nobody renews it any more
    assert slots.take(10) == 10
    del rehearsal.world.hooks["inspect"]
    gate.open()
    falls_due(row)
    assert sweep(rehearsal)["proven"] >= 1
    assert attempts(row) == ["superseded", "proven"]


def test_stopping_while_a_claim_is_limited_gives_every_place_back(rehearsal: Rehearsal) -> None:
    for _ in range(3):
        released(rehearsal)
    stop, slots = threading.Event(), Slots(2)
    engine = Engine(stopping=stop.is_set, slots=slots, on_claimed=lambda _: stop.set())
    engine.sweep(rehearsal.account.pk)
    assert slots.take(3) == 2
    assert not Obligation.objects.filter(attempt_id__isnull=False).exists()
    assert Obligation.objects.filter(due_at__lte=factories.database_now()).count() == 3
