"""Starts whose call ends after everybody gave them up, and runs that wait for the end of a sandbox of another run's.

Each of these once left a sandbox running that nobody owed anything about, or a row that nothing would ever wake.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from django.db import transaction

import leases
from cleanup.claims import Selection
from cleanup.engine import Engine
from leases import deciding, proof, startup, transitions
from leases.errors import AcquireRejected, LeaseError, ResumeFailed
from leases.models import Lease, Obligation, Operation, Run
from leases.planning import MARK_OPERATION
from providers.contract import ErrorKind, ProviderError
from tests import factories
from tests.concurrency import Background, Gate, elsewhere
from tests.rehearsal import RehearsalProvider
from tests.scenarios.steps import fails, falls_due, is_due, owed, state, sweep, sweep_lane
from tests.scenarios.test_reuse import BY_ENVIRONMENT, acquire, another_run, kept
from tests.stage import Rehearsal

pytestmark = pytest.mark.django_db(transaction=True)

Kind = Obligation.Kind


@pytest.fixture
def rehearsal() -> Rehearsal:
    return Rehearsal(policy=BY_ENVIRONMENT)


def start_of(lease: Lease) -> Operation:
    return Operation.objects.filter(kind=Operation.Kind.START, source=lease).latest("created_at")


def is_owned(lease: Lease) -> bool:
    """Whether anything is owed about the sandbox, or somebody uses it."""
    of_sandbox = {"account_id": lease.account_id, "resource_id": lease.resource_id}
    return (
        Lease.objects.filter(**of_sandbox, state__in=[Lease.State.ACTIVE, Lease.State.PENDING_CLEANUP]).exists()
        or Operation.objects.filter(**of_sandbox, state=Operation.State.PENDING).exists()
    )


def ends(rehearsal: Rehearsal, lease: Lease) -> None:
    """Whatever is owed, the sandbox is stopped in the end, with its files, and proven so."""
    start = start_of(lease)
    Operation.objects.filter(pk=start.pk).update(created_at=factories.at(-9999))
    for row in Obligation.objects.filter(closed_at__isnull=True, due_at__isnull=False):
        falls_due(row)
    sweep(rehearsal)
    lease.refresh_from_db()
    assert (rehearsal.world.of(lease.resource_id).state, lease.state) == ("stopped", "released")
    assert (proof.is_proven_ended(lease), rehearsal.world.count("delete")) == (True, 0)
    (kept,) = Obligation.objects.filter(closed_at__isnull=True)
    assert (kept.lease_id, kept.kind, is_due(kept)) == (lease.pk, Kind.DISPOSE, False)


def refused(call: Callable[[], Any]) -> Callable[[], str]:
    def run() -> str:
        with pytest.raises(LeaseError) as caught:
            call()
        return str(caught.value)

    return run


LOST = [ErrorKind.CONNECTION, ErrorKind.TIMEOUT, ErrorKind.SERVER, ErrorKind.PROTOCOL]


# The reply to the start was lost, and it takes effect later


@pytest.mark.parametrize("kind", LOST)
def test_a_start_whose_reply_was_lost_is_not_withdrawn_while_it_may_still_be_done(
    rehearsal: Rehearsal, kind: ErrorKind
) -> None:
    lease = kept(rehearsal)
    rehearsal.world.hooks["start"] = fails(kind)
    with pytest.raises(ResumeFailed):
        acquire(rehearsal, another_run(rehearsal))
    sweep(rehearsal)
    assert is_owned(lease)
    assert not proof.is_proven_ended(lease)
    rehearsal.world.of(lease.resource_id).state = "running"  # the provider does now what it was asked for
    ends(rehearsal, lease)


def test_a_start_that_was_accepted_and_is_not_seen_yet_is_not_withdrawn(rehearsal: Rehearsal) -> None:
    lease = kept(rehearsal)

    def late(resource_id: str) -> None:
        rehearsal.world.of(resource_id).state = "stopped"

    rehearsal.world.after["start"] = late
    with pytest.raises(ResumeFailed):
        acquire(rehearsal, another_run(rehearsal))
    sweep(rehearsal)
    assert is_owned(lease)
    rehearsal.world.of(lease.resource_id).state = "running"
    ends(rehearsal, lease)


def test_a_caller_that_is_interrupted_in_the_middle_of_the_call_says_nothing_about_its_end(
    rehearsal: Rehearsal,
) -> None:
    lease = kept(rehearsal)

    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    rehearsal.world.hooks["start"] = interrupt
    with pytest.raises(KeyboardInterrupt):
        acquire(rehearsal, another_run(rehearsal))
    sweep(rehearsal)
    assert is_owned(lease)
    rehearsal.world.of(lease.resource_id).state = "running"
    ends(rehearsal, lease)


# It was stopped, looked for, and stopped again, before its caller knew


def test_nothing_is_started_again_once_the_start_was_stopped(rehearsal: Rehearsal) -> None:
    """A Stop comes while the first call is under way. What it brought up is stopped; its caller does not try again."""
    lease, run, started = kept(rehearsal), another_run(rehearsal), Gate()

    def lose(_: str) -> None:
        started()
        raise ProviderError(ErrorKind.CONNECTION)

    rehearsal.world.after["start"] = lose
    acquiring = Background(refused(lambda: acquire(rehearsal, run)))
    started.wait()
    leases.stop(company_id=rehearsal.company.pk, run_id=run.pk)
    sweep(rehearsal)
    assert rehearsal.world.of(lease.resource_id).state == "stopped"
    started.open()
    acquiring.result()
    assert rehearsal.world.count("start") == 1
    ends(rehearsal, lease)


def test_a_stopped_answer_is_no_proof_while_a_call_of_a_start_is_under_way(rehearsal: Rehearsal) -> None:
    """The recovery could not tell what it saw, and handed over; the call it did not wait for is done afterwards."""
    lease, run, starting = kept(rehearsal), another_run(rehearsal), Gate()
    rehearsal.world.hooks["start"] = starting
    acquiring = Background(refused(lambda: acquire(rehearsal, run)))
    starting.wait()
    box = rehearsal.world.of(lease.resource_id)
    box.state = "unknown"
    leases.stop(company_id=rehearsal.company.pk, run_id=run.pk)
    Engine().sweep(rehearsal.account.pk, selection=Selection(kinds=(Kind.RECOVER_START,)))
    box.state = "stopped"
    sweep(rehearsal)
    lease.refresh_from_db()
    assert (lease.state, owed(lease).verb, proof.is_proven_ended(lease)) == ("pending_cleanup", "stop_only", False)
    starting.open()
    acquiring.result()
    ends(rehearsal, lease)


def test_what_its_caller_sees_running_after_its_withdrawal_is_stopped_again(rehearsal: Rehearsal) -> None:
    """Design 4: any later sighting of it as running raises the epoch and owes its stop, in the same transaction."""
    lease, run, starting = kept(rehearsal), another_run(rehearsal), Gate()
    rehearsal.world.hooks["start"] = starting
    acquiring = Background(refused(lambda: acquire(rehearsal, run)))
    starting.wait()
    start = start_of(lease)
    Operation.objects.filter(pk=start.pk).update(created_at=factories.at(-9999))  # frozen for longer than its bound
    falls_due(owed(start))
    sweep(rehearsal)
    assert proof.is_proven_ended(lease)
    starting.open()
    assert "took it over first" in acquiring.result()
    assert (rehearsal.world.of(lease.resource_id).state, is_owned(lease)) == ("running", True)
    lease.refresh_from_db()
    assert (lease.state, lease.epoch, lease.reason) == ("pending_cleanup", 2, "acquire_rejected")
    ends(rehearsal, lease)


def test_it_is_left_alone_while_another_run_has_it(rehearsal: Rehearsal) -> None:
    lease, run, starting = kept(rehearsal), another_run(rehearsal), Gate()
    rehearsal.world.hooks["start"] = starting
    acquiring = Background(refused(lambda: acquire(rehearsal, run)))
    starting.wait()
    Operation.objects.filter(pk=start_of(lease).pk).update(created_at=factories.at(-9999))
    falls_due(owed(start_of(lease)))
    sweep(rehearsal)
    del rehearsal.world.hooks["start"]
    other = acquire(rehearsal, another_run(rehearsal))
    assert other.resource_id == lease.resource_id
    starting.open()
    acquiring.result()
    sweep(rehearsal)
    assert (state(other), rehearsal.world.of(lease.resource_id).state, other.epoch) == ("active", "running", 2)
    assert not Obligation.objects.filter(closed_at__isnull=True, lease__isnull=False).exists()


def test_what_an_operator_gave_up_and_is_torn_down_by_now_may_still_be_seen_running(rehearsal: Rehearsal) -> None:
    """Its teardown is owed already, for another reason: the sighting takes its proof away, and owes nothing twice."""
    lease, run, starting = kept(rehearsal), another_run(rehearsal), Gate()
    rehearsal.world.hooks["start"] = starting
    acquiring = Background(refused(lambda: acquire(rehearsal, run)))
    starting.wait()
    deciding.settle_unverified(
        owed(start_of(lease)).pk,
        confirmation=lease.resource_id,
        company_id=rehearsal.company.pk,
        actor="operator",
        reason="it hangs",
    )
    rehearsal.environment.config = {"size": 2}
    rehearsal.environment.save()
    acquire(rehearsal, another_run(rehearsal))  # what fits no more owes its destruction
    lease.refresh_from_db()
    assert (lease.state, lease.epoch, owed(lease).verb) == ("pending_cleanup", 2, "delete")
    starting.open()
    assert "it is being stopped" in acquiring.result()
    lease.refresh_from_db()
    assert (lease.state, lease.epoch, lease.obligations.filter(closed_at__isnull=True).count()) == (
        "pending_cleanup",
        3,
        1,
    )
    sweep(rehearsal)
    assert (state(lease), lease.resource_id in rehearsal.world.boxes, proof.unproven().count()) == ("expired", False, 0)


# The run whose startup it was is not the run whose lease it is


def startup_of(run: Run) -> Obligation:
    return Obligation.objects.get(kind=Kind.STARTUP, run=run)


def test_a_disposal_believes_no_stop_while_a_start_that_was_given_up_may_be_done(rehearsal: Rehearsal) -> None:
    """The epoch is the old one: it is held, and so stopped instead of destroyed, and seen stopped too early."""
    lease = kept(rehearsal)
    rehearsal.world.hooks["start"] = fails(ErrorKind.TIMEOUT)
    with pytest.raises(ResumeFailed):
        acquire(rehearsal, another_run(rehearsal))
    deciding.settle_unverified(
        owed(start_of(lease)).pk,
        confirmation=lease.resource_id,
        company_id=rehearsal.company.pk,
        actor="operator",
        reason="it hangs",
    )
    with transaction.atomic():
        locked = Lease.objects.select_for_update(no_key=True).get(pk=lease.pk)
        transitions.dispose(locked, reason="test", actor="operator")
        transitions.hold_back(locked, held_by=["test"], actor="operator")
    sweep(rehearsal)
    assert state(lease) == "pending_cleanup"
    rehearsal.world.of(lease.resource_id).state = "running"  # the provider does now what it was asked for
    Operation.objects.update(created_at=factories.at(-9999))
    falls_due(owed(lease))
    sweep(rehearsal)
    assert (state(lease), rehearsal.world.of(lease.resource_id).state) == ("released", "stopped")
    assert proof.is_proven_ended(lease)


def test_a_startup_is_woken_by_the_end_of_a_sandbox_that_was_another_runs(rehearsal: Rehearsal) -> None:
    """The receipt names the run of the lease that is stopped again, and not the run that started it."""
    lease, run = kept(rehearsal), another_run(rehearsal)
    rehearsal.world.after["start"] = lambda _: elsewhere(
        lambda: Run.objects.filter(pk=run.pk).update(status=Run.Status.CANCELLED)
    )
    with pytest.raises(AcquireRejected):
        acquire(rehearsal, run)
    sweep_lane(Kind.STARTUP)
    sweep(rehearsal)
    assert (state(lease), proof.is_proven_ended(lease)) == ("released", True)
    assert (startup_of(run).closed_as, startup.is_unsettled(run.pk)) == ("proven", False)


def test_a_startup_is_woken_when_a_sandbox_it_waits_for_becomes_another_runs(rehearsal: Rehearsal) -> None:
    lease, run, starting = kept(rehearsal), another_run(rehearsal), Gate()
    rehearsal.world.hooks["start"] = fails(ErrorKind.REFUSED)
    with pytest.raises(ResumeFailed):
        acquire(rehearsal, run)
    Engine().sweep(rehearsal.account.pk, selection=Selection(kinds=(Kind.RECOVER_START,)))
    rehearsal.world.hooks["start"] = starting
    acquiring = Background(lambda: acquire(rehearsal, another_run(rehearsal)))
    starting.wait()
    sweep_lane(Kind.STARTUP)
    assert startup_of(run).quiet == "waiting"
    starting.open()
    assert acquiring.result().resource_id == lease.resource_id
    sweep(rehearsal)
    assert (startup_of(run).closed_as, startup.is_unsettled(run.pk)) == ("proven", False)


def test_what_an_operator_gave_up_of_a_start_is_paid_by_a_later_proof(rehearsal: Rehearsal) -> None:
    """It was destroyed, and proven so, after the operator's word: nothing of that start can be left."""
    lease, run = kept(rehearsal), another_run(rehearsal)
    rehearsal.world.hooks["start"] = fails(ErrorKind.CONNECTION)
    with pytest.raises(ResumeFailed):
        acquire(rehearsal, run)
    row = owed(start_of(lease))
    deciding.settle_unverified(
        row.pk, confirmation=lease.resource_id, company_id=rehearsal.company.pk, actor="operator", reason="lost"
    )
    del rehearsal.world.hooks["start"]
    sweep(rehearsal)
    assert (startup.is_unsettled(run.pk), proof.unproven().count()) == (True, 1)
    rehearsal.environment.config = {"size": 2}
    rehearsal.environment.save()
    acquire(rehearsal, another_run(rehearsal))  # what fits no more is destroyed
    sweep(rehearsal)
    assert (state(lease), lease.resource_id in rehearsal.world.boxes) == ("expired", False)
    assert (proof.unproven().count(), startup_of(run).closed_as, startup.is_unsettled(run.pk)) == (0, "proven", False)


# A Stop of a lease that is coming to be, while it comes to be


def test_a_stop_reaches_a_lease_that_is_attached_at_that_moment(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    created, cancelling = Gate(), Gate()
    rehearsal.world.after["create"] = created
    acquiring = Background(lambda: acquire(rehearsal))  # ad hoc: there is no run to stop it by
    created.wait()
    lease_id, real = Operation.objects.get().lease_uuid, leases.releasing.cancel_starts

    def cancel(*args: Any) -> int:
        if not cancelling.reached.is_set():
            cancelling()
        return real(*args)

    monkeypatch.setattr(leases.releasing, "cancel_starts", cancel)
    stopping = Background(lambda: leases.stop(company_id=rehearsal.company.pk, lease_id=lease_id))
    cancelling.wait()
    created.open()
    lease = acquiring.result()
    cancelling.open()
    assert stopping.result() == 1
    assert (lease.pk, state(lease)) == (lease_id, "pending_cleanup")


# A creation is not repeated once it was taken over


def test_a_create_is_not_repeated_once_it_was_stopped(rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sandbox was found and destroyed: the same request again would make another, under a name nobody looks for."""
    monkeypatch.setattr(
        RehearsalProvider, "capabilities", replace(RehearsalProvider.capabilities, idempotent_create=True)
    )
    created = Gate()

    def lose(_: str) -> None:
        if not created.reached.is_set():
            created()
            raise ProviderError(ErrorKind.CONNECTION)

    rehearsal.world.after["create"] = lose
    acquiring = Background(refused(lambda: acquire(rehearsal, rehearsal.run)))
    created.wait()
    leases.stop(company_id=rehearsal.company.pk, run_id=rehearsal.run.pk)
    sweep(rehearsal)
    assert rehearsal.world.boxes == {}
    created.open()
    acquiring.result()
    assert (rehearsal.world.count("create"), rehearsal.world.boxes) == (1, {})


# What answers to the id is another creation's of ours


def _becomes_another_creations(rehearsal: Rehearsal, lease: Lease) -> None:
    box = rehearsal.world.of(lease.resource_id)
    box.resource = replace(box.resource, marks=dict(box.resource.marks) | {MARK_OPERATION: "another"})


def test_what_carries_the_mark_of_another_creation_is_not_destroyed_in_its_place(rehearsal: Rehearsal) -> None:
    """It may be what another run is just starting: a person decides whose it is."""
    lease = kept(rehearsal)
    _becomes_another_creations(rehearsal, lease)
    assert acquire(rehearsal, another_run(rehearsal)).resource_id != lease.resource_id
    assert sweep(rehearsal) == {"quieted": 1}
    assert (owed(lease).quiet, lease.resource_id in rehearsal.world.boxes) == ("foreign_marks", True)


def test_nor_is_it_stopped_by_a_teardown_or_the_recovery_of_a_start(rehearsal: Rehearsal) -> None:
    source = kept(rehearsal, another_run(rehearsal))
    started = factories.start(source, account_identity=rehearsal.world.identity, due_in=0)
    lease = leases.release(acquire(rehearsal, rehearsal.run).pk)
    created = Operation.objects.get(kind="create", lease=source)
    Operation.objects.filter(pk=started.pk).update(marks=created.marks)
    for one in (lease, source):
        _becomes_another_creations(rehearsal, one)
        rehearsal.world.of(one.resource_id).state = "running"
    before = rehearsal.world.count("stop")
    assert sweep(rehearsal) == {"quieted": 2}
    assert (owed(lease).quiet, owed(started).quiet) == ("foreign_marks", "foreign_marks")
    assert rehearsal.world.count("stop") == before


# What a person was asked about is over


def test_a_conflict_about_a_sandbox_ends_with_the_lease_that_owned_it(rehearsal: Rehearsal) -> None:
    """Design 7: a quiet row names the fact that quieted it, and the write that ends the fact wakes it."""
    lease = acquire(rehearsal)
    other = factories.operation(
        rehearsal.environment,
        resource_id=lease.resource_id,
        account_identity=rehearsal.world.identity,
        due_in=0,
    )
    sweep(rehearsal)
    assert owed(other).quiet == "identity_conflict"
    leases.release(lease.pk)
    sweep(rehearsal)
    other.refresh_from_db()
    assert (other.state, state(lease)) == ("resolved", "expired")
    assert not Obligation.objects.filter(closed_at__isnull=True).exists()
