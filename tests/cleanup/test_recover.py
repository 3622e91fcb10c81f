"""Recovering a sandbox in error, to stop it with its files: a start, whose epoch begins at its announcement."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

import leases
from cleanup.engine import Engine
from leases.models import Attempt, Lease, Receipt
from providers.contract import ErrorKind
from tests import factories
from tests.concurrency import Background, Gate, elsewhere
from tests.rehearsal import Box
from tests.scenarios.steps import attempts, audited, evidence, fails, falls_due, owed, released, state, sweep
from tests.stage import Rehearsal

KEEPS = {"stop_only": "retain_on_failure", "stop_or_delete": "reuse_by_environment"}


def _errored(stage: Rehearsal, verb: str = "stop_only") -> Lease:
    lease = released(stage, KEEPS[verb], outcome="failed")
    stage.world.of(lease.resource_id).state = "recoverable"
    stage.world.calls.clear()
    return lease


def _changes(stage: Rehearsal) -> list[str]:
    return [name for name, _ in stage.world.calls if name not in ("identify", "inspect")]


@pytest.mark.parametrize("verb", KEEPS)
def test_it_is_recovered_and_then_stopped_and_the_receipt_is_of_the_new_epoch(rehearsal: Rehearsal, verb: str) -> None:
    lease = _errored(rehearsal, verb)
    assert sweep(rehearsal) == {"proven": 1}
    assert _changes(rehearsal) == ["recover", "stop"]
    lease.refresh_from_db()
    receipt = Receipt.objects.get(lease=lease)
    assert (lease.epoch, receipt.epoch, receipt.evidence) == (2, 2, "stopped")
    assert audited("lease.recovering", lease) == 1


def test_the_epoch_has_risen_before_the_provider_is_asked(rehearsal: Rehearsal) -> None:
    """The reply may be lost, and the process: from the announcement's commit on, nothing older is proof."""
    lease = _errored(rehearsal)
    seen = []

    def look() -> None:
        attempt = Attempt.objects.get(obligation=owed(lease))
        seen.append((Lease.objects.get(pk=lease.pk).epoch, attempt.announced_call, attempt.announced_epoch))

    rehearsal.world.hooks["recover"] = lambda _: elsewhere(look)
    assert sweep(rehearsal) == {"proven": 1}
    assert seen == [(2, "recover", 2)]


def test_a_stop_that_was_seen_before_the_recovery_and_is_told_after_it_proves_nothing(rehearsal: Rehearsal) -> None:
    lease = released(rehearsal, "retain_on_failure", outcome="failed")
    row, box = owed(lease), rehearsal.world.of(lease.resource_id)
    box.state = "stopped"
    answer, sending = Gate(), Gate()
    rehearsal.world.after["inspect"] = answer
    slow = Background(lambda: Engine().sweep(rehearsal.account.pk))
    answer.wait()
    rehearsal.world.after.clear()
    falls_due(row)
    rehearsal.world.boxes[lease.resource_id] = Box(box.resource, "recoverable")  # the answer on its way says "stopped"
    rehearsal.world.after["recover"] = sending
    current = Background(lambda: Engine().sweep(rehearsal.account.pk))
    sending.wait()
    answer.open()
    assert slow.result().outcomes == {"superseded": 1}
    assert list(Receipt.objects.filter(lease=lease).values_list("epoch", flat=True)) == [1]
    rehearsal.world.after.clear()
    rehearsal.world.hooks["stop"] = fails(ErrorKind.REFUSED)
    sending.open()
    assert current.result().outcomes == {"failed": 1}
    assert state(lease) == "pending_cleanup"
    rehearsal.world.hooks.clear()
    falls_due(row)
    assert sweep(rehearsal) == {"proven": 1}
    assert Receipt.objects.filter(lease=lease, epoch=2).count() == 1


def test_a_recovery_whose_reply_was_lost_is_looked_at(rehearsal: Rehearsal) -> None:
    lease = _errored(rehearsal)
    rehearsal.world.after["recover"] = fails(ErrorKind.TIMEOUT)
    assert sweep(rehearsal) == {"proven": 1}
    assert _changes(rehearsal) == ["recover", "stop"]
    assert evidence(lease) == ["stopped"]


def test_a_worker_that_dies_after_the_recovery_leaves_a_running_sandbox_to_the_next(rehearsal: Rehearsal) -> None:
    lease = _errored(rehearsal)
    gate = Gate()
    rehearsal.world.after["recover"] = gate
    dead = Background(lambda: Engine().sweep(rehearsal.account.pk))
    gate.wait()
    falls_due(owed(lease))
    assert sweep(rehearsal) == {"proven": 1}
    assert _changes(rehearsal) == ["recover", "stop"]
    gate.open()
    dead.result()
    lease.refresh_from_db()
    assert (lease.state, lease.epoch) == ("retained", 2)


@pytest.mark.parametrize("kind", [ErrorKind.REFUSED, ErrorKind.INVALID, ErrorKind.TIMEOUT])
def test_what_cannot_be_recovered_is_deleted_unless_it_is_to_be_stopped_only(
    rehearsal: Rehearsal, kind: ErrorKind
) -> None:
    """K-07, K-56."""
    lease = _errored(rehearsal, "stop_or_delete")
    rehearsal.world.hooks["recover"] = fails(kind)
    assert sweep(rehearsal) == {"proven": 1}
    assert _changes(rehearsal) == ["recover", "delete"]
    assert evidence(lease) == ["destroyed"]


def test_stop_only_that_cannot_be_recovered_fails_and_escalates_and_is_never_deleted(rehearsal: Rehearsal) -> None:
    lease = _errored(rehearsal)
    rehearsal.world.hooks["recover"] = fails(ErrorKind.REFUSED)
    row = owed(lease)
    for _ in range(5):
        falls_due(row)
        assert sweep(rehearsal) == {"failed": 1}
    assert (rehearsal.world.count("recover"), rehearsal.world.count("delete")) == (5, 0)
    assert audited("obligation.escalated", row) == 1
    assert owed(lease).last_error_kind == "refused"


def test_delete_deletes_and_does_not_start_what_it_deletes(rehearsal: Rehearsal) -> None:
    lease = released(rehearsal)
    rehearsal.world.of(lease.resource_id).state = "recoverable"
    assert sweep(rehearsal) == {"proven": 1}
    assert (rehearsal.world.count("recover"), rehearsal.world.count("delete")) == (0, 1)
    lease.refresh_from_db()
    assert lease.epoch == 1


@pytest.mark.parametrize(("verb", "last"), [("stop_or_delete", "proven"), ("stop_only", "failed")])
def test_recoveries_that_lead_to_nothing_are_waited_for_three_times(rehearsal: Rehearsal, verb: str, last: str) -> None:
    lease = _errored(rehearsal, verb)
    box = rehearsal.world.of(lease.resource_id)
    rehearsal.world.after["recover"] = lambda _: setattr(box, "state", "recoverable")
    row = owed(lease)
    for _ in range(3):
        falls_due(row)
        assert sweep(rehearsal) == {"busy": 1}
    falls_due(row)
    assert sweep(rehearsal) == {last: 1}
    assert rehearsal.world.count("delete") == (1 if verb == "stop_or_delete" else 0)
    assert attempts(row) == ["busy"] * 3 + [last]


def test_a_demand_that_arrives_between_announcement_and_call_is_heeded_after_it(rehearsal: Rehearsal) -> None:
    """The call that was announced is made, and the next one is decided by what is demanded by then."""
    lease = _errored(rehearsal, "stop_or_delete")
    rehearsal.world.hooks["recover"] = lambda _: elsewhere(lambda: leases.release(lease.pk, disposition="destroy"))
    assert sweep(rehearsal) == {"proven": 1}
    assert _changes(rehearsal) == ["recover", "delete"]
    assert evidence(lease) == ["destroyed"]


def test_a_demand_that_arrives_before_the_announcement_prevents_the_call(rehearsal: Rehearsal) -> None:
    lease = _errored(rehearsal, "stop_or_delete")

    def demand(_: str) -> None:
        rehearsal.world.after.clear()
        elsewhere(lambda: leases.release(lease.pk, disposition="destroy"))

    rehearsal.world.after["inspect"] = demand
    assert sweep(rehearsal) == {"proven": 1}
    assert _changes(rehearsal) == ["delete"]
    lease.refresh_from_db()
    assert lease.epoch == 1


# What is out of date


def test_a_stop_from_before_the_last_start_is_asked_about_again_soon(rehearsal: Rehearsal) -> None:
    lease = released(rehearsal, "reuse_by_environment")
    started = factories.database_now()
    Lease.objects.filter(pk=lease.pk).update(started_as_of=started)
    box = rehearsal.world.of(lease.resource_id)
    box.state, box.resource = "stopped", replace(box.resource, as_of=started - timedelta(seconds=1))
    assert sweep(rehearsal) == {"busy": 1}
    assert (evidence(lease), owed(lease).failures) == ([], 0)
    box.resource = replace(box.resource, as_of=started)
    falls_due(owed(lease))
    assert sweep(rehearsal) == {"proven": 1}


def test_a_recovery_makes_older_answers_out_of_date(rehearsal: Rehearsal) -> None:
    """The state that was recovered from came before the start, and so did every stop that is older than it."""
    lease = _errored(rehearsal)
    box = rehearsal.world.of(lease.resource_id)
    now = factories.database_now()
    box.resource = replace(box.resource, as_of=now)

    def lags(_: str) -> None:
        box.state, box.resource = "stopped", replace(box.resource, as_of=now - timedelta(hours=1))

    rehearsal.world.after["recover"] = lags
    assert sweep(rehearsal) == {"busy": 1}
    lease.refresh_from_db()
    assert (lease.started_as_of, evidence(lease)) == (now, [])


def test_a_sighting_of_a_restart_says_as_of_when_and_the_time_never_falls(rehearsal: Rehearsal) -> None:
    lease = _errored(rehearsal)
    box = rehearsal.world.of(lease.resource_id)
    now = factories.database_now()

    def started(_: str) -> None:
        box.resource = replace(box.resource, as_of=now + timedelta(seconds=2))

    box.resource = replace(box.resource, as_of=now)
    rehearsal.world.after["recover"] = started
    rehearsal.world.hooks["stop"] = fails(ErrorKind.REFUSED)
    assert sweep(rehearsal) == {"failed": 1}
    lease.refresh_from_db()
    assert lease.started_as_of == now + timedelta(seconds=2)
    box.resource = replace(box.resource, as_of=now)  # an answer that lags
    falls_due(owed(lease))
    assert sweep(rehearsal) == {"failed": 1}
    lease.refresh_from_db()
    assert (lease.started_as_of, lease.epoch) == (now + timedelta(seconds=2), 2)


def test_an_answer_that_lags_behind_what_this_attempt_saw_is_no_proof(rehearsal: Rehearsal) -> None:
    lease = released(rehearsal, "reuse_by_environment")
    box = rehearsal.world.of(lease.resource_id)
    now = factories.database_now()
    box.resource = replace(box.resource, as_of=now)
    rehearsal.world.after["stop"] = lambda _: setattr(
        box, "resource", replace(box.resource, as_of=now - timedelta(seconds=1))
    )
    assert sweep(rehearsal) == {"busy": 1}
    assert evidence(lease) == []


# The provider's deadline at the end


def test_a_settled_lease_has_the_deadline_that_its_stop_read_back(limited: Rehearsal) -> None:
    lease = released(limited, "reuse_by_environment")
    lease.refresh_from_db()
    assert lease.expires_at is not None
    assert sweep(limited) == {"proven": 1}
    lease.refresh_from_db()
    assert (lease.state, lease.expires_at) == ("released", None)


def test_a_stopped_sandbox_that_keeps_a_deadline_says_which(limited: Rehearsal) -> None:
    lease = released(limited, "reuse_by_environment")
    box = limited.world.of(lease.resource_id)
    ends = factories.at(7200)
    limited.world.after["stop"] = lambda _: setattr(box, "resource", replace(box.resource, expires_at=ends))
    assert sweep(limited) == {"proven": 1}
    lease.refresh_from_db()
    assert lease.expires_at == ends


def test_stop_only_turns_off_the_deadline_of_what_is_stopped_already(limited: Rehearsal) -> None:
    """Otherwise the provider would delete at its deadline what a person wanted kept."""
    lease = released(limited, "retain_on_failure", outcome="failed")
    limited.world.of(lease.resource_id).state = "stopped"
    assert sweep(limited) == {"proven": 1}
    assert limited.world.count("stop") == 1
    lease.refresh_from_db()
    assert (lease.state, lease.expires_at) == ("retained", None)


def test_a_deadline_that_cannot_be_turned_off_costs_no_proof(limited: Rehearsal) -> None:
    lease = released(limited, "retain_on_failure", outcome="failed")
    box = limited.world.of(lease.resource_id)
    box.state = "stopped"
    limited.world.hooks["stop"] = fails(ErrorKind.REFUSED)
    assert sweep(limited) == {"proven": 1}
    lease.refresh_from_db()
    assert (lease.state, lease.expires_at) == ("retained", box.resource.expires_at)
