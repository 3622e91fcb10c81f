"""G: stop and retain. Whatever fails, a sandbox that may only be stopped is never deleted."""

from __future__ import annotations

import pytest

import leases
from cleanup.engine import Engine
from leases.models import Environment, Lease, Obligation, ProviderAccount
from providers.contract import ErrorKind
from tests.concurrency import Background, Gate
from tests.scenarios.steps import acquired, audited, evidence, fails, falls_due, owed, released, state, stop, sweep
from tests.stage import Rehearsal

FAILURES = sorted(set(ErrorKind) - {ErrorKind.RATE_LIMITED, ErrorKind.BUSY, ErrorKind.NOT_READY})
"""Kinds of error that are counted against a row."""


def _retained(rehearsal: Rehearsal) -> Lease:
    return released(rehearsal, "reuse_by_environment", disposition="stop_and_retain")


def test_the_intent_is_committed_before_any_call(rehearsal: Rehearsal) -> None:
    """S-132."""
    lease = acquired(rehearsal, "reuse_by_environment")
    rehearsal.world.calls.clear()
    leases.release(lease.pk, disposition="stop_and_retain")
    assert rehearsal.world.calls == []
    assert (state(lease), owed(lease).verb) == ("pending_cleanup", "stop_only")


def test_proof_of_the_stop_settles_it_and_the_intent_is_done(rehearsal: Rehearsal) -> None:
    """S-134."""
    lease = _retained(rehearsal)
    assert sweep(rehearsal) == {"proven": 1}
    assert (state(lease), evidence(lease)) == ("released", ["stopped"])
    assert not owed(lease).is_open
    assert not lease.files_lost
    assert rehearsal.world.of(lease.resource_id).state == "stopped"


@pytest.mark.parametrize("kind", FAILURES)
def test_a_stop_that_fails_for_whatever_reason_is_never_followed_by_a_delete(
    rehearsal: Rehearsal, kind: ErrorKind
) -> None:
    """Domain 5.4, I-6."""
    lease = _retained(rehearsal)
    rehearsal.world.hooks["stop"] = fails(kind)
    for _ in range(3):
        falls_due(owed(lease))
        assert sweep(rehearsal) == {"failed": 1}
    assert rehearsal.world.count("stop") == 3
    assert rehearsal.world.count("delete") == 0
    assert state(lease) == Lease.State.PENDING_CLEANUP


@pytest.mark.parametrize("box", ["unknown", "busy"])
def test_neither_is_a_sandbox_in_error_or_in_transition_deleted(rehearsal: Rehearsal, box: str) -> None:
    lease = _retained(rehearsal)
    rehearsal.world.of(lease.resource_id).state = box
    rehearsal.world.hooks["stop"] = fails(ErrorKind.REFUSED)
    for _ in range(3):
        falls_due(owed(lease))
        sweep(rehearsal)
    assert rehearsal.world.count("delete") == 0
    assert state(lease) == Lease.State.PENDING_CLEANUP


def test_it_stays_stop_only_through_a_stop_a_second_release_and_a_destroy(rehearsal: Rehearsal) -> None:
    lease = _retained(rehearsal)
    rehearsal.world.hooks["stop"] = fails(ErrorKind.REFUSED)
    leases.release(lease.pk)
    leases.release(lease.pk, disposition="destroy")
    stop(rehearsal)
    assert owed(lease).verb == "stop_only"
    sweep(rehearsal)
    assert rehearsal.world.count("delete") == 0


@pytest.mark.parametrize("how", ["gone before", "gone by the stop"])
def test_a_sandbox_that_is_destroyed_all_the_same_is_proven_ended_and_costs_its_files(
    rehearsal: Rehearsal, how: str
) -> None:
    """S-135, as the design has it: closed with that receipt, `files_lost`, and told."""
    lease = _retained(rehearsal)
    if how == "gone before":
        rehearsal.world.boxes.clear()
    else:
        rehearsal.world.after["stop"] = lambda _: rehearsal.world.boxes.clear()
    assert sweep(rehearsal) == {"proven": 1}
    assert (state(lease), evidence(lease), lease.files_lost) == ("expired", ["absent"], True)
    assert audited("lease.files_lost", lease) == 1
    assert rehearsal.world.count("delete") == 0


def test_the_control_losing_a_sandbox_that_was_to_be_destroyed_costs_nothing(rehearsal: Rehearsal) -> None:
    lease = released(rehearsal)
    rehearsal.world.boxes.clear()
    sweep(rehearsal)
    lease.refresh_from_db()
    assert not lease.files_lost
    assert audited("lease.files_lost", lease) == 0


def test_another_process_finishes_the_same_intent(rehearsal: Rehearsal) -> None:
    """S-140, S-141: after a restart there is nothing but the row; what the first learns late settles nothing."""
    lease = _retained(rehearsal)
    gate = Gate()
    rehearsal.world.hooks["stop"] = gate
    dying = Background(lambda: Engine().sweep(rehearsal.account.pk))
    gate.wait()
    del rehearsal.world.hooks["stop"]
    falls_due(owed(lease))
    assert sweep(rehearsal) == {"proven": 1}
    assert (state(lease), evidence(lease)) == ("released", ["stopped"])
    closed_at = owed(lease).closed_at
    gate.open()
    assert dying.result().outcomes == {"superseded": 1}
    assert (state(lease), owed(lease).closed_at) == ("released", closed_at)
    assert rehearsal.world.count("delete") == 0


def test_it_works_from_what_the_lease_recorded_and_never_from_the_environment_of_the_day(rehearsal: Rehearsal) -> None:
    """S-042, S-139, S-173, S-177, domain I-7: re-pointed, re-configured or deleted, the first provider is asked."""
    elsewhere = Rehearsal()
    lease = _retained(rehearsal)
    ProviderAccount.objects.filter(pk=rehearsal.account.pk).update(endpoint=elsewhere.account.endpoint)
    Environment.objects.filter(pk=rehearsal.environment.pk).update(policy="ephemeral", config={"size": 9})
    assert sweep(rehearsal) == {"proven": 1}
    assert elsewhere.world.calls == []
    assert (state(lease), evidence(lease)) == ("released", ["stopped"])


@pytest.mark.parametrize("fault", [None, ErrorKind.REFUSED])
def test_a_lease_whose_environment_was_deleted_is_torn_down_like_any_other(rehearsal: Rehearsal, fault: str) -> None:
    """S-173, S-174."""
    lease = released(rehearsal)
    Environment.objects.filter(pk=rehearsal.environment.pk).delete()
    if fault is None:
        assert sweep(rehearsal) == {"proven": 1}
        assert state(lease) == Lease.State.EXPIRED
    else:
        rehearsal.world.hooks["delete"] = fails(fault)
        assert sweep(rehearsal) == {"failed": 1}
        assert (state(lease), owed(lease).failures) == ("pending_cleanup", 1)
    assert Lease.objects.get(pk=lease.pk).environment_id is None


def test_a_suspended_sandbox_is_kept_as_such(rehearsal: Rehearsal) -> None:
    """Design 2.3: it would resume its old processes, so the receipt says how execution ended."""
    lease = _retained(rehearsal)
    rehearsal.world.of(lease.resource_id).state = "suspended"
    assert sweep(rehearsal) == {"proven": 1}
    assert lease.receipts.get().ended == "suspended"


def test_a_sandbox_that_somebody_else_started_meanwhile_is_stopped_again_in_a_new_epoch(rehearsal: Rehearsal) -> None:
    """Design 4: any later sighting as running raises the epoch, and the old receipt proves nothing about it."""
    lease = _retained(rehearsal)
    # An attempt learned that it had stopped, and died before it could settle; then a person started the sandbox.
    row = owed(lease)
    lease.receipts.create(
        account_id=lease.account_id,
        company_uuid=lease.company_id,
        run_uuid=lease.run_id,
        resource_id=lease.resource_id,
        account_identity=lease.account_identity,
        epoch=1,
        evidence="stopped",
        attempt_id=row.lease_id,
    )
    leases.release(lease.pk)
    Obligation.objects.filter(pk=row.pk).update(verb="delete")
    rehearsal.world.hooks["delete"] = fails(ErrorKind.REFUSED)
    assert sweep(rehearsal) == {"failed": 1}
    lease.refresh_from_db()
    assert lease.epoch == 2
    assert audited("lease.sighted_running", lease) == 1
    Obligation.objects.filter(pk=row.pk).update(verb="stop_only")
    falls_due(row)
    assert sweep(rehearsal) == {"proven": 1}
    assert list(lease.receipts.order_by("pk").values_list("epoch", "evidence")) == [(1, "stopped"), (2, "stopped")]
