"""H and the known cases about proof: only the provider's own word about the end, about this sandbox, counts."""

from __future__ import annotations

from itertools import pairwise

import pytest

import leases
from cleanup.engine import Engine
from leases.models import Attempt, Lease, Obligation
from providers.contract import MARK_INSTALLATION, ErrorKind, Resource
from tests import factories
from tests.concurrency import elsewhere
from tests.scenarios.steps import (
    acquired,
    attempts,
    audited,
    due_in,
    evidence,
    fails,
    falls_due,
    is_due,
    owed,
    owed_for,
    released,
    retry,
    state,
    sweep,
)
from tests.stage import Rehearsal

FAILURES = sorted(set(ErrorKind) - {ErrorKind.RATE_LIMITED, ErrorKind.BUSY, ErrorKind.NOT_READY})
"""Kinds of error that are counted against a row."""


def test_a_404_after_an_accepted_delete_is_no_proof(rehearsal: Rehearsal) -> None:
    """K-01: the second source does not agree (`inspect` does not say gone), so it is asked again, without end."""
    lease = released(rehearsal)
    rehearsal.world.hooks["delete"] = lambda _: rehearsal.world.hooks.update(inspect=fails(ErrorKind.NOT_FOUND))
    rehearsal.world.after["delete"] = lambda _: None
    for number in range(1, 6):
        falls_due(owed(lease))
        assert sweep(rehearsal) == {"failed": 1}
        assert owed(lease).failures == number
    assert evidence(lease) == []
    assert state(lease) == Lease.State.PENDING_CLEANUP
    assert audited("obligation.escalated", owed(lease)) == 1


@pytest.mark.parametrize("kind", FAILURES)
def test_no_error_of_a_delete_counts_as_destroyed(rehearsal: Rehearsal, kind: ErrorKind) -> None:
    """K-02, S-119."""
    lease = released(rehearsal)
    rehearsal.world.hooks["delete"] = fails(kind)
    assert sweep(rehearsal) == {"failed": 1}
    assert (evidence(lease), owed(lease).last_error_kind) == ([], kind.value)
    del rehearsal.world.hooks["delete"]
    falls_due(owed(lease))
    assert sweep(rehearsal) == {"proven": 1}
    assert evidence(lease) == ["destroyed"]


def test_a_delete_whose_reply_was_lost_is_looked_at_and_not_believed(rehearsal: Rehearsal) -> None:
    """It took effect: what proves it is the look, and the announcement says that it was ours."""
    lease = released(rehearsal)
    rehearsal.world.after["delete"] = fails(ErrorKind.TIMEOUT)
    assert sweep(rehearsal) == {"proven": 1}
    assert evidence(lease) == ["destroyed"]


def test_a_delete_that_was_accepted_and_did_nothing_is_not_believed(rehearsal: Rehearsal) -> None:
    """K-27: 204, and the pod stays. It is asked again soon, which is no failure; it escalates by its age."""
    lease = released(rehearsal)
    box = rehearsal.world.of(lease.resource_id)

    def bring_back(subject: str) -> None:
        rehearsal.world.boxes[subject] = box

    rehearsal.world.after["delete"] = bring_back
    row = owed(lease)
    for _ in range(3):
        falls_due(row)
        assert sweep(rehearsal) == {"busy": 1}
    assert (evidence(lease), owed(lease).failures, owed(lease).busy_count) == ([], 0, 3)
    owed_for(row, 31 * 60)
    falls_due(row)
    sweep(rehearsal)
    assert audited("obligation.escalated", row) == 1
    rehearsal.world.after.clear()
    falls_due(row)
    assert sweep(rehearsal) == {"proven": 1}


@pytest.mark.parametrize("policy", ["ephemeral", "reuse_by_environment", "retain_on_failure"])
def test_a_state_change_in_progress_is_waited_for_and_is_no_failure(rehearsal: Rehearsal, policy: str) -> None:
    """K-04: as an error of the call, whatever number the provider gives it."""
    lease = released(rehearsal, policy, outcome="failed")
    busy = fails(ErrorKind.BUSY)
    rehearsal.world.hooks.update(stop=busy, delete=busy)
    assert sweep(rehearsal) == {"busy": 1}
    row = owed(lease)
    assert (row.failures, row.busy_count, evidence(lease)) == (0, 1, [])
    assert due_in(row) <= 3
    rehearsal.world.hooks.clear()
    falls_due(row)
    assert sweep(rehearsal) == {"proven": 1}


def test_a_transition_is_looked_at_ever_more_rarely_and_never_given_up(rehearsal: Rehearsal) -> None:
    """K-05: 2 s to 5 min, on a counter of its own, and deleted when the state moves."""
    lease = released(rehearsal)
    box = rehearsal.world.of(lease.resource_id)
    box.state = "busy"
    row = owed(lease)
    waits = []
    for _ in range(12):
        falls_due(row)
        assert sweep(rehearsal) == {"busy": 1}
        waits.append(due_in(row))
    assert waits[0] <= 2.6
    assert all(later > earlier for earlier, later in pairwise(waits[:7]))
    assert waits[-1] == pytest.approx(300, abs=5)
    assert owed(lease).failures == 0
    assert rehearsal.world.count("delete") == 0
    box.state = "running"
    falls_due(row)
    assert sweep(rehearsal) == {"proven": 1}
    assert evidence(lease) == ["destroyed"]


def test_a_sandbox_in_error_that_cannot_be_stopped_is_deleted_and_has_its_own_receipt(rehearsal: Rehearsal) -> None:
    """K-07, K-56, G-08: it still bills."""
    lease = released(rehearsal, "reuse_by_environment")
    rehearsal.world.of(lease.resource_id).state = "unknown"
    rehearsal.world.hooks["stop"] = fails(ErrorKind.REFUSED)
    assert sweep(rehearsal) == {"proven": 1}
    assert (rehearsal.world.count("stop"), evidence(lease)) == (1, ["destroyed"])
    assert state(lease) == Lease.State.EXPIRED


def test_a_stop_that_left_the_sandbox_in_error_is_no_stop(rehearsal: Rehearsal) -> None:
    """S-283."""
    lease = released(rehearsal, "retain_on_failure", outcome="failed")
    rehearsal.world.after["stop"] = lambda subject: setattr(rehearsal.world.of(subject), "state", "unknown")
    assert sweep(rehearsal) == {"failed": 1}
    assert (evidence(lease), state(lease)) == ([], "pending_cleanup")


def test_a_foreign_sandbox_is_never_touched_and_a_person_is_asked(rehearsal: Rehearsal) -> None:
    lease = released(rehearsal)
    box = rehearsal.world.of(lease.resource_id)
    box.resource = Resource(box.resource.resource_id, box.resource.name, {MARK_INSTALLATION: "another installation"})
    assert sweep(rehearsal) == {"quieted": 1}
    assert (rehearsal.world.count("stop"), rehearsal.world.count("delete")) == (0, 0)
    row = owed(lease)
    assert (row.quiet, row.due_at, row.failures) == ("foreign_marks", None, 0)
    assert sweep(rehearsal) == {}
    assert retry(rehearsal) == 1
    assert sweep(rehearsal) == {"quieted": 1}


def test_a_receipt_that_is_there_already_settles_without_asking(rehearsal: Rehearsal) -> None:
    """Evidence counts whoever learned it, and of an attempt that lost its row too."""
    lease = released(rehearsal)
    lease.receipts.create(
        account_id=lease.account_id,
        company_uuid=lease.company_id,
        run_uuid=lease.run_id,
        resource_id=lease.resource_id,
        account_identity=lease.account_identity,
        epoch=1,
        evidence="destroyed",
        attempt_id=factories.claimed(factories.probe()).attempt_id,
    )
    rehearsal.world.calls.clear()
    assert sweep(rehearsal) == {"proven": 1}
    assert rehearsal.world.calls == []
    assert state(lease) == Lease.State.EXPIRED


@pytest.mark.parametrize(("verb", "ends"), [("delete", "expired"), ("stop_only", "released")])
def test_a_receipt_settles_only_what_it_proves(rehearsal: Rehearsal, verb: str, ends: str) -> None:
    """S-151: stopped is not destroyed."""
    lease = released(rehearsal, "reuse_by_environment")
    Obligation.objects.filter(lease=lease).update(verb=verb)
    lease.receipts.create(
        account_id=lease.account_id,
        company_uuid=lease.company_id,
        run_uuid=lease.run_id,
        resource_id=lease.resource_id,
        account_identity=lease.account_identity,
        epoch=1,
        evidence="stopped",
        attempt_id=lease.pk,
    )
    rehearsal.world.calls.clear()
    assert sweep(rehearsal) == {"proven": 1}
    assert (rehearsal.world.calls == []) == (ends == "released")
    assert state(lease) == ends


def test_the_attempt_that_proved_it_says_what_it_was_about_to_do(rehearsal: Rehearsal) -> None:
    """The announcement: call, time and epoch, committed before the call."""
    lease = released(rehearsal)
    seen = []

    def look() -> None:
        attempt = Attempt.objects.get(obligation=owed(lease))
        seen.append((attempt.announced_call, attempt.announced_epoch, owed(lease).delete_announced_at is not None))

    rehearsal.world.hooks["delete"] = lambda _: elsewhere(look)
    assert sweep(rehearsal) == {"proven": 1}
    assert seen == [("delete", 1, True)]
    assert attempts(owed(lease)) == ["proven"]


def test_a_lease_is_not_settled_by_the_wish_of_its_holder(rehearsal: Rehearsal) -> None:
    """S-152: released_at is set, and the lease still counts as running until proof."""
    lease = released(rehearsal)
    rehearsal.world.hooks["delete"] = fails(ErrorKind.REFUSED)
    sweep(rehearsal)
    lease.refresh_from_db()
    assert lease.released_at is not None
    assert (lease.state, evidence(lease)) == ("pending_cleanup", [])


@pytest.mark.parametrize("verdict", ["gone", "stopped", "running"])
def test_an_answer_that_comes_with_the_last_look_decides(rehearsal: Rehearsal, verdict: str) -> None:
    """S-128, S-153: whatever a call said, the look after it says how it ended."""
    lease = acquired(rehearsal, "reuse_by_environment")
    leases.release(lease.pk)
    world = rehearsal.world

    def after_stop(subject: str) -> None:
        if verdict == "gone":
            world.boxes.clear()
        else:
            world.of(subject).state = verdict

    world.after["stop"] = after_stop
    outcome = Engine().sweep(rehearsal.account.pk).outcomes
    if verdict == "running":
        assert (outcome, evidence(lease)) == ({"busy": 1}, [])
        assert not is_due(owed(lease))
    else:
        assert (outcome, evidence(lease)) == ({"proven": 1}, ["absent" if verdict == "gone" else "stopped"])
