"""I: what a sweep claims, and what it leaves alone."""

from __future__ import annotations

import pytest

from cleanup import claims
from cleanup.claims import Selection, claim, new_ids
from cleanup.engine import Engine
from leases.clock import boottime
from leases.models import Attempt, Lease, Obligation
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
    owed,
    released,
    state,
    sweep,
)
from tests.stage import Rehearsal


def test_a_row_in_its_cooldown_is_left_alone_and_unrelated_writes_do_not_move_it(rehearsal: Rehearsal) -> None:
    """S-161, G-23: the cooldown is a column of its own."""
    lease = released(rehearsal)
    rehearsal.world.hooks["inspect"] = fails(ErrorKind.REFUSED)
    assert sweep(rehearsal) == {"failed": 1}
    row = owed(lease)
    before = row.due_at
    Lease.objects.filter(pk=lease.pk).update(hourly_price=1)
    assert sweep(rehearsal) == {}
    assert owed(lease).due_at == before
    falls_due(row)
    assert sweep(rehearsal) == {"failed": 1}


def test_two_sweeps_at_the_fifth_failure_make_one_call_and_one_escalation(rehearsal: Rehearsal) -> None:
    """S-165."""
    lease = released(rehearsal)
    Obligation.objects.filter(lease=lease).update(failures=4)
    rehearsal.world.hooks["inspect"] = fails(ErrorKind.REFUSED)
    account = rehearsal.account.pk
    together(*[lambda: Engine().sweep(account) for _ in range(2)])
    row = owed(lease)
    assert rehearsal.world.count("inspect") == 1
    assert (row.failures, audited("obligation.escalated", row)) == (5, 1)


def test_a_claimed_row_is_protected_for_a_quarter_of_an_hour_whatever_happened_to_its_worker(
    rehearsal: Rehearsal,
) -> None:
    """S-167, S-188."""
    lease = released(rehearsal)
    (dead,) = claim(rehearsal.account.pk, new_ids(1), worker="dead", clock=boottime)
    row = owed(lease)
    assert 14 * 60 < due_in(row) <= 15 * 60
    assert sweep(rehearsal) == {}
    assert owed(lease).attempt_id == dead.attempt_id
    falls_due(row)
    assert sweep(rehearsal) == {"proven": 1}
    assert attempts(row) == ["superseded", "proven"]


def test_a_column_that_somebody_else_wrote_meanwhile_survives_the_settle(rehearsal: Rehearsal) -> None:
    """S-169, domain I-9: every write names its columns."""
    lease = released(rehearsal)
    gate = Gate()
    rehearsal.world.hooks["delete"] = gate
    working = Background(lambda: Engine().sweep(rehearsal.account.pk))
    gate.wait()
    Lease.objects.filter(pk=lease.pk).update(hourly_price="1.5", reason="noted")
    Obligation.objects.filter(lease=lease).update(requests=3)
    gate.open()
    assert working.result().outcomes == {"proven": 1}
    lease.refresh_from_db()
    assert (str(lease.hourly_price), lease.reason, lease.state) == ("1.5000", "noted", "expired")
    assert owed(lease).requests == 3


def test_a_row_that_was_settled_before_the_claim_is_not_claimed(rehearsal: Rehearsal) -> None:
    """S-170."""
    lease = released(rehearsal)
    row = owed(lease)
    sweep(rehearsal)
    calls = len(rehearsal.world.calls)
    selection = Selection(obligation_id=row.pk)
    assert Engine().sweep(rehearsal.account.pk, selection=selection).claimed == 0
    assert len(rehearsal.world.calls) == calls
    assert audited("obligation.escalated", row) == 0


@pytest.mark.parametrize("duplicates", [2, 5])
def test_duplicate_hints_hit_the_fence(rehearsal: Rehearsal, duplicates: int) -> None:
    """K-38: however often a message is delivered, exactly one call that changes something is made."""
    lease = released(rehearsal)
    account = rehearsal.account.pk
    together(*[lambda: Engine().sweep(account) for _ in range(duplicates)])
    assert rehearsal.world.count("delete") == 1
    assert attempts(owed(lease)) == ["proven"]


def test_a_lost_hint_costs_nothing_but_time(rehearsal: Rehearsal) -> None:
    """K-36, K-46: there is nothing in the broker that the rows do not say. A real FLUSHALL is the demo's."""
    held, lease = acquired(rehearsal), released(rehearsal)
    type(rehearsal.account).objects.filter(pk=rehearsal.account.pk).update(hinted_until=factories.at(600))
    assert sweep(rehearsal) == {"proven": 1}
    assert (state(held), state(lease)) == ("active", "expired")
    assert rehearsal.world.count("delete") == 1


def test_what_is_due_longest_goes_first(rehearsal: Rehearsal) -> None:
    made = [released(rehearsal) for _ in range(3)]
    for lease, minutes in zip(made, (5, 50, 20), strict=True):
        Obligation.objects.filter(lease=lease).update(due_at=factories.at(-60 * minutes))
    claimed = claim(rehearsal.account.pk, new_ids(2), worker="w", clock=boottime)
    assert {one.lease_id for one in claimed} == {made[1].pk, made[2].pk}


def test_one_that_is_due_is_reached_behind_any_number_in_their_cooldown(rehearsal: Rehearsal) -> None:
    """S-189, S-198: there are no pages that others fill."""
    account = rehearsal.account
    for _ in range(40):
        factories.teardown(factories.lease(rehearsal.environment), due_in=600, failures=1)
    lease = released(rehearsal)
    assert Engine().sweep(account.pk, limit=1).outcomes == {"proven": 1}
    assert state(lease) == Lease.State.EXPIRED


def test_a_fault_of_one_row_does_not_end_the_sweep(rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-176: an error of our own is counted against its row, which is tried again."""
    bad, good = released(rehearsal), released(rehearsal)
    original = claims.fenced

    def fault(one: claims.Claim) -> Obligation | None:
        if one.lease_id == bad.pk:
            raise KeyError("a mistake of ours")
        return original(one)

    monkeypatch.setattr("cleanup.evidence.fenced", fault)
    assert sweep(rehearsal) == {"failed": 1, "proven": 1}
    assert (owed(bad).failures, owed(bad).last_error_kind) == (1, "protocol")
    assert state(good) == Lease.State.EXPIRED
    monkeypatch.undo()
    falls_due(owed(bad))
    assert sweep(rehearsal) == {"proven": 1}


def test_a_provider_that_recovers_is_found_by_another_process_after_the_cooldown(rehearsal: Rehearsal) -> None:
    """S-186."""
    lease = released(rehearsal)
    rehearsal.world.hooks["inspect"] = fails(ErrorKind.REFUSED)
    for _ in range(6):
        falls_due(owed(lease))
        sweep(rehearsal)
    rehearsal.world.hooks.clear()
    assert sweep(rehearsal) == {}
    falls_due(owed(lease))
    assert elsewhere(lambda: Engine().sweep(rehearsal.account.pk).outcomes) == {"proven": 1}
    assert (state(lease), evidence(lease)) == ("expired", ["destroyed"])


def test_every_attempt_is_history(rehearsal: Rehearsal) -> None:
    """G-03."""
    lease = released(rehearsal)
    rehearsal.world.hooks["delete"] = fails(ErrorKind.REFUSED, message="quota of the project exceeded")
    for _ in range(7):
        falls_due(owed(lease))
        sweep(rehearsal)
    rehearsal.world.hooks.clear()
    falls_due(owed(lease))
    sweep(rehearsal)
    history = Attempt.objects.filter(obligation=owed(lease)).order_by("claimed_at")
    assert [(one.outcome, one.error_kind) for one in history] == [("failed", "refused")] * 7 + [("proven", "")]
    assert all(one.finished_at and one.finished_at >= one.claimed_at for one in history)
