"""K-01: where a provider hides what it may not have ended, not being found proves an end only when two looks agree."""

from __future__ import annotations

import pytest
from django.db import connection

from cleanup.claims import claim, new_ids
from cleanup.engine import Engine
from leases.clock import boottime
from leases.models import Lease, Obligation
from providers.contract import ErrorKind
from tests.concurrency import Background, Gate, elsewhere
from tests.scenarios.steps import (
    attempts,
    audited,
    due_in,
    evidence,
    fails,
    falls_due,
    owed,
    owed_for,
    released,
    retry,
    state,
    sweep,
)
from tests.stage import Rehearsal


def _passes(row: Obligation, seconds: float) -> None:
    """Let time pass for one row, by moving what it says about the past and the future."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            UPDATE leases_obligation SET due_at = due_at - %(s)s * interval '1 s',
                   absent_since = absent_since - %(s)s * interval '1 s' WHERE id = %(id)s
            """,
            {"s": seconds, "id": row.pk},
        )


def _hidden(stage: Rehearsal, policy: str = "ephemeral", **how: object) -> Lease:
    lease = released(stage, policy, **how)
    stage.world.of(lease.resource_id).state = "hidden"
    return lease


def test_one_look_that_finds_nothing_proves_nothing_and_another_is_owed(limited: Rehearsal) -> None:
    lease = _hidden(limited)
    assert sweep(limited) == {"not_seen": 1}
    row = owed(lease)
    assert (state(lease), evidence(lease)) == ("pending_cleanup", [])
    assert (row.failures, row.busy_count, row.last_error_kind) == (0, 0, "")
    assert row.absent_since is not None
    assert (row.due_at - row.absent_since).total_seconds() == pytest.approx(120)
    assert 115 < due_in(row) <= 120


def test_a_second_look_far_enough_from_the_first_proves_absence(limited: Rehearsal) -> None:
    """Also after a worker that claimed the row in between and died: whoever comes next finishes it."""
    lease = _hidden(limited)
    sweep(limited)
    row = owed(lease)
    _passes(row, 121)
    (dead,) = claim(limited.account.pk, new_ids(1), worker="dead", clock=boottime)
    falls_due(row)
    assert sweep(limited) == {"proven": 1}
    assert (evidence(lease), state(lease)) == (["absent"], "expired")
    assert sorted(attempts(row)) == ["not_seen", "proven", "superseded"]
    assert dead.obligation_id == row.pk


@pytest.mark.parametrize("verb", ["ephemeral", "reuse_by_environment", "retain_on_failure"])
def test_wakes_and_retries_in_between_make_it_count_no_earlier(limited: Rehearsal, verb: str) -> None:
    lease = _hidden(limited, verb, outcome="failed")
    sweep(limited)
    row = owed(lease)
    for _ in range(3):
        _passes(row, 35)
        assert retry(limited) == 1
        assert sweep(limited) == {"not_seen": 1}
        assert (row.absent_since is None, evidence(lease)) == (False, [])
    # 105 s have passed: the same row is due at the same time as if nobody had asked.
    assert due_in(row) == pytest.approx(15, abs=5)
    _passes(row, 16)
    assert sweep(limited) == {"proven": 1}
    assert evidence(lease) == ["absent"]


def test_what_was_deleted_and_is_not_found_is_absent_and_not_destroyed(limited: Rehearsal) -> None:
    """The provider accepted the delete and answers 404 at once, while the sandbox may go on running."""
    lease = released(limited)
    assert sweep(limited) == {"not_seen": 1}
    assert limited.world.count("delete") == 1
    assert evidence(lease) == []
    _passes(owed(lease), 121)
    assert sweep(limited) == {"proven": 1}
    assert evidence(lease) == ["absent"]


def test_what_the_provider_itself_calls_destroyed_is_proof_at_once(limited: Rehearsal) -> None:
    lease = released(limited)
    box = limited.world.of(lease.resource_id)

    def tell(subject: str) -> None:
        box.state = "destroyed"
        limited.world.boxes[subject] = box

    limited.world.after["delete"] = tell
    assert sweep(limited) == {"proven": 1}
    assert evidence(lease) == ["destroyed"]


@pytest.mark.parametrize("seen", ["unknown", "busy", "running", "stopped"])
def test_a_look_in_between_that_sees_it_begins_the_row_of_looks_anew(limited: Rehearsal, seen: str) -> None:
    lease = _hidden(limited)
    sweep(limited)
    row, box = owed(lease), limited.world.of(lease.resource_id)
    _passes(row, 121)
    box.state = seen
    limited.world.hooks["delete"] = fails(ErrorKind.BUSY)
    assert sweep(limited) == {"busy": 1}
    assert owed(lease).absent_since is None
    box.state = "hidden"
    falls_due(row)
    assert sweep(limited) == {"not_seen": 1}
    assert evidence(lease) == []
    assert due_in(row) > 115


def test_a_look_in_between_that_fails_leaves_the_first_one_as_it_is(limited: Rehearsal) -> None:
    lease = _hidden(limited)
    sweep(limited)
    row = owed(lease)
    _passes(row, 121)
    limited.world.hooks["inspect"] = fails(ErrorKind.PROTOCOL)
    since = owed(lease).absent_since
    assert sweep(limited) == {"failed": 1}
    assert owed(lease).absent_since == since
    limited.world.hooks.clear()
    falls_due(row)
    assert sweep(limited) == {"proven": 1}


def test_time_that_passes_during_the_second_look_does_not_count(limited: Rehearsal) -> None:
    """A look is at some moment between question and answer, so the distance is measured to before the question."""
    lease = _hidden(limited)
    sweep(limited)
    row = owed(lease)
    falls_due(row)

    def lasts_long(_: str) -> None:
        limited.world.hooks.clear()
        elsewhere(lambda: _passes(row, 200))

    limited.world.hooks["inspect"] = lasts_long
    assert sweep(limited) == {"not_seen": 1, "proven": 1}  # it fell due meanwhile, and then it did count
    assert attempts(row) == ["not_seen", "not_seen", "proven"]


def test_another_account_behind_the_key_is_no_witness_of_absence(limited: Rehearsal) -> None:
    lease = _hidden(limited)
    ours = limited.world.identity
    limited.world.after["inspect"] = lambda _: setattr(limited.world, "identity", "another")
    assert sweep(limited) == {"failed": 1}
    assert (owed(lease).absent_since, owed(lease).last_error_kind) == (None, "identity")
    limited.world.after.clear()
    limited.world.identity = ours
    falls_due(owed(lease))
    sweep(limited)
    _passes(owed(lease), 121)
    limited.world.after["inspect"] = lambda _: setattr(limited.world, "identity", "another")
    assert sweep(limited) == {"failed": 1}
    assert evidence(lease) == []


def test_what_a_superseded_attempt_saw_makes_absence_harder_to_prove_and_never_easier(limited: Rehearsal) -> None:
    lease = released(limited)
    row, box = owed(lease), limited.world.of(lease.resource_id)
    gate = Gate()
    limited.world.after["inspect"] = gate
    box.state = "busy"
    slow = Background(lambda: Engine().sweep(limited.account.pk))
    gate.wait()
    limited.world.after.clear()
    falls_due(row)
    first = {"not_seen": 1}

    def look(_: str) -> None:
        box.state = "hidden"

    limited.world.hooks["inspect"] = look
    assert sweep(limited) == first
    assert owed(lease).absent_since is not None
    box.state = "busy"
    gate.open()
    assert slow.result().outcomes == {"busy": 1}  # what it says of the row is not written: see the attempts
    assert owed(lease).absent_since is None
    assert sorted(attempts(row)) == ["not_seen", "superseded"]


def test_absence_that_somebody_doubted_while_it_was_settled_is_not_settled(limited: Rehearsal) -> None:
    lease = _hidden(limited)
    sweep(limited)
    row = owed(lease)
    _passes(row, 121)

    def seen_by_another(_: str) -> None:
        if limited.world.calls[-2][0] == "inspect":  # identify, the second one
            elsewhere(lambda: Obligation.objects.filter(pk=row.pk).update(absent_since=None))

    limited.world.hooks["identify"] = seen_by_another
    assert Engine().sweep(limited.account.pk).outcomes == {"handed_back": 1}
    assert (evidence(lease), state(lease)) == ([], "pending_cleanup")


def test_while_absence_is_unproven_the_row_escalates_by_its_age(limited: Rehearsal) -> None:
    lease = _hidden(limited)
    row = owed(lease)
    owed_for(row, 31 * 60)
    assert sweep(limited) == {"not_seen": 1}
    assert audited("obligation.escalated", row) == 1


def test_where_one_look_is_enough_one_look_is_enough(rehearsal: Rehearsal) -> None:
    lease = _hidden(rehearsal)
    assert sweep(rehearsal) == {"proven": 1}
    assert (evidence(lease), owed(lease).absent_since) == (["absent"], None)
