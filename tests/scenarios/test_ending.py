"""H, and what of D and G is about the end of a run: proof of a whole run, and the cancellation that waits for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest
from django.db import IntegrityError, connection, transaction
from django.db.utils import OperationalError

import leases
from cleanup.claims import LANE, Selection
from cleanup.engine import Engine
from leases import cancelling, deciding, ending, proof, startup, transitions
from leases.ending import What, execution_ended
from leases.errors import AcquireFailed, AcquireRefused, AcquireRejected, AcquireUncertain, LeaseError, NotFound
from leases.fencing import Fenced
from leases.models import Lease, Obligation, Operation, Run, RunFacts
from leases.models.environments import Policy
from leases.signals import cancellation_confirmed
from providers.contract import ErrorKind, Resource
from tests import factories
from tests.concurrency import Background, Gate, elsewhere, lost_commit_reply, together
from tests.scenarios.steps import (
    acquired,
    audited,
    evidence,
    fails,
    falls_due,
    owed,
    snapshot,
    state,
    sweep,
    sweep_lane,
)
from tests.scenarios.test_reuse import Time
from tests.stage import Rehearsal

pytestmark = pytest.mark.django_db(transaction=True)

Kind = Obligation.Kind
REUSED = Policy.REUSE_BY_ENVIRONMENT


@pytest.fixture
def rehearsal() -> Rehearsal:
    return Rehearsal()


def acquire(rehearsal: Rehearsal, run: Run | None = None, **how: Any) -> Lease:
    how.setdefault("patience", Time().patience())
    return leases.acquire(
        rehearsal.environment.pk, company_id=rehearsal.company.pk, run_id=(run or rehearsal.run).pk, **how
    )


def another_run(rehearsal: Rehearsal) -> Run:
    return factories.run(rehearsal.company)


def ends(run: Run) -> None:
    """The run is over, as its control plane says."""
    Run.objects.filter(pk=run.pk).update(status=Run.Status.FAILED, finished_at=factories.database_now())


def missing(run: Run) -> list[str]:
    return [one.what.value for one in execution_ended(run.pk, run.company_id).missing]


def cancel(run: Run) -> Run:
    return leases.request_cancellation(run.pk, run.company_id, actor="user", reason="not needed any more")


def cancellation(run: Run) -> str:
    run.refresh_from_db()
    return str(leases.cancellation(run))


def confirmation(run: Run) -> Obligation:
    return Obligation.objects.get(kind=Kind.CONFIRM_CANCEL, run=run)


def look(run: Run) -> dict[str, int]:
    """One look at the confirmation of this run's cancellation, if it is due."""
    return Engine().sweep(LANE, selection=Selection(obligation_id=confirmation(run).pk)).outcomes


@pytest.fixture
def told() -> Iterator[list[Any]]:
    """Who was told that a cancellation is confirmed."""
    heard: list[Any] = []

    def hear(**said: Any) -> None:
        heard.append(said["run_id"])

    cancellation_confirmed.connect(hear, weak=False, dispatch_uid="told")
    yield heard
    cancellation_confirmed.disconnect(dispatch_uid="told")


# H: the proof of a whole run


@pytest.mark.parametrize("policy", [Policy.EPHEMERAL, REUSED, Policy.RETAIN_ON_FAILURE])
def test_a_run_has_ended_when_all_its_leases_have_receipts(rehearsal: Rehearsal, policy: str) -> None:
    """S-148: whatever becomes of the sandboxes; not while one is active, and not before the first receipt."""
    for lease in (acquired(rehearsal, policy), acquired(rehearsal, policy)):
        assert What.LEASE_UNPROVEN in missing(rehearsal.run)
        leases.release(lease.pk, outcome="failed")
    ends(rehearsal.run)
    assert missing(rehearsal.run) == [What.LEASE_UNPROVEN] * 2
    sweep(rehearsal)
    assert missing(rehearsal.run) == []


def test_a_run_without_a_lease_has_not_ended_but_one_whose_creation_was_refused_has(rehearsal: Rehearsal) -> None:
    """S-149: that there is nothing proves nothing; the provider's word that nothing was allocated does."""
    ends(rehearsal.run)
    assert missing(rehearsal.run) == [What.NOTHING_STARTED]
    run = another_run(rehearsal)
    rehearsal.world.hooks["create"] = fails(ErrorKind.INVALID, nothing_allocated=True)
    with pytest.raises(AcquireFailed):
        acquire(rehearsal, run)
    ends(run)
    assert missing(run) == []


def test_a_creation_whose_reply_was_lost_is_no_refusal(rehearsal: Rehearsal) -> None:
    """S-149: not though the provider says that there is no such sandbox, until somebody owned it and proved its end."""
    rehearsal.world.after["create"] = fails(ErrorKind.CONNECTION)
    with pytest.raises(AcquireUncertain):
        acquire(rehearsal)
    ends(rehearsal.run)
    assert missing(rehearsal.run) == [What.NOTHING_STARTED, What.OPERATION_PENDING, What.STARTUP_OPEN]
    hidden = dict(rehearsal.world.boxes)
    rehearsal.world.boxes.clear()
    sweep(rehearsal)
    assert What.OPERATION_PENDING in missing(rehearsal.run)
    rehearsal.world.boxes.update(hidden)
    falls_due(owed(Operation.objects.get()))
    sweep(rehearsal)
    assert missing(rehearsal.run) == []
    assert evidence(Lease.objects.get()) == ["destroyed"]


def test_of_two_leases_the_one_without_a_receipt_is_named(rehearsal: Rehearsal) -> None:
    """S-150, S-152: its cleanup failed, and it was released."""
    one, two = acquired(rehearsal), acquired(rehearsal)
    for lease in (one, two):
        leases.release(lease.pk)
    ends(rehearsal.run)
    rehearsal.world.hooks["delete"] = lambda subject: (
        fails(ErrorKind.SERVER)(subject) if subject == two.resource_id else None
    )
    sweep(rehearsal)
    two.refresh_from_db()
    assert (evidence(one), evidence(two), two.released_at is not None) == (["destroyed"], [], True)
    found = execution_ended(rehearsal.run.pk)
    assert [(one.what, one.subject) for one in found.missing] == [(What.LEASE_UNPROVEN, str(two.pk))]
    assert str(two.pk) in found.sentence
    del rehearsal.world.hooks["delete"]
    falls_due(owed(two))
    sweep(rehearsal)
    assert missing(rehearsal.run) == []


def test_a_receipt_in_a_teardown_that_goes_on_is_ignored(rehearsal: Rehearsal) -> None:
    """S-151: it was seen stopped by a late attempt, and its destruction is still owed. What settled it counts."""
    lease = leases.release(acquired(rehearsal).pk)
    ends(rehearsal.run)
    factories.receipt(lease, evidence="stopped")
    rehearsal.world.hooks["delete"] = fails(ErrorKind.SERVER)
    sweep(rehearsal)
    assert (state(lease), evidence(lease)) == ("pending_cleanup", ["stopped"])
    assert missing(rehearsal.run) == [What.LEASE_UNPROVEN]
    del rehearsal.world.hooks["delete"]
    falls_due(owed(lease))
    sweep(rehearsal)
    assert missing(rehearsal.run) == []


def test_what_settled_a_kept_sandbox_stays_proof_while_it_is_disposed_of(rehearsal: Rehearsal) -> None:
    """S-151: of that teardown nothing is needed but the destruction; until it is seen running."""
    lease = leases.release(acquired(rehearsal, REUSED).pk)
    ends(rehearsal.run)
    sweep(rehearsal)
    with transaction.atomic():
        transitions.dispose(Lease.objects.select_for_update().get(pk=lease.pk), reason="idle_too_long", actor="test")
    rehearsal.world.hooks["delete"] = fails(ErrorKind.SERVER)
    sweep(rehearsal)
    assert (state(lease), missing(rehearsal.run)) == ("pending_cleanup", [])
    rehearsal.world.of(lease.resource_id).state = "running"
    falls_due(owed(lease))
    sweep(rehearsal)
    assert missing(rehearsal.run) == [What.LEASE_UNPROVEN]


def test_an_answer_about_another_sandbox_leaves_the_run_unproven(rehearsal: Rehearsal) -> None:
    """S-153: the provider answers to the id with another one's state."""
    lease = leases.release(acquired(rehearsal).pk)
    ends(rehearsal.run)
    box = rehearsal.world.of(lease.resource_id)
    own, box.resource = box.resource, Resource("another", box.resource.name, box.resource.marks)
    box.state = "stopped"
    sweep(rehearsal)
    assert (evidence(lease), missing(rehearsal.run)) == ([], [What.LEASE_UNPROVEN])
    box.resource = own
    falls_due(owed(lease))
    sweep(rehearsal)
    assert missing(rehearsal.run) == []


BINDINGS: dict[str, Callable[[], Any]] = {
    "company_uuid": lambda: factories.company().pk,
    "run_uuid": lambda: factories.run().pk,
    "account_id": lambda: factories.account().pk,
    "resource_id": lambda: "another",
    "account_identity": lambda: "another",
    "epoch": lambda: 2,
}


@pytest.mark.parametrize("binding", BINDINGS)
def test_a_receipt_that_is_not_bound_in_everything_cannot_be_written(rehearsal: Rehearsal, binding: str) -> None:
    """S-153, S-155: so none such is ever there to be believed."""
    lease = leases.release(acquired(rehearsal).pk)
    with pytest.raises(IntegrityError, match="receipt does not bind"), transaction.atomic():
        factories.receipt(lease, **{binding: BINDINGS[binding]()})
    factories.receipt(lease)


@pytest.mark.parametrize("seen", ["stopped", "destroyed", "gone"])
def test_every_evidence_with_all_bindings_right_is_the_end(rehearsal: Rehearsal, seen: str) -> None:
    """S-155."""
    lease = leases.release(acquired(rehearsal, Policy.EPHEMERAL if seen == "destroyed" else REUSED).pk)
    ends(rehearsal.run)
    if seen == "gone":
        rehearsal.world.boxes.clear()
    sweep(rehearsal)
    assert evidence(lease) == ["absent" if seen == "gone" else seen]
    assert missing(rehearsal.run) == []


@pytest.mark.parametrize("process_id", [None, 1, os.getpid()], ids=["none", "init", "this very process"])
def test_a_process_id_of_a_remote_run_is_not_looked_at(rehearsal: Rehearsal, process_id: int | None) -> None:
    """S-154: it is alive here, and is another machine's; nor does one that is gone prove anything."""
    RunFacts.objects.create(run=rehearsal.run, process_id=process_id)
    lease = leases.release(acquired(rehearsal).pk)
    ends(rehearsal.run)
    assert missing(rehearsal.run) == [What.LEASE_UNPROVEN]
    sweep(rehearsal)
    assert (evidence(lease), missing(rehearsal.run)) == (["destroyed"], [])


def test_a_kept_sandbox_that_another_run_took_over_counts_by_its_own_receipt_alone(rehearsal: Rehearsal) -> None:
    """S-158: that it was replaced is no proof, and neither is the successor's end. What the successor does with the
    sandbox takes nothing back.
    """
    lease = leases.release(acquired(rehearsal, REUSED).pk)
    ends(rehearsal.run)
    sweep(rehearsal)
    later, third = another_run(rehearsal), another_run(rehearsal)
    successor = acquire(rehearsal, later)
    lease.refresh_from_db()
    assert (lease.state, lease.successor) == ("expired", successor)
    assert missing(rehearsal.run) == []
    leases.release(successor.pk)
    ends(later)
    sweep(rehearsal)
    seen: list[list[list[str]]] = []
    rehearsal.world.hooks["start"] = lambda _: seen.append(elsewhere(lambda: [missing(rehearsal.run), missing(later)]))
    acquire(rehearsal, third)
    assert seen == [[[], [What.LEASE_UNPROVEN]]]  # the start was pending
    assert (missing(rehearsal.run), missing(later)) == ([], [])


def test_a_sandbox_that_is_kept_for_unsaved_files_is_taken_over_by_nobody(rehearsal: Rehearsal) -> None:
    """S-158: so a retained one that was replaced is never there."""
    lease = leases.release(acquired(rehearsal, Policy.RETAIN_ON_FAILURE).pk, outcome="failed")
    ends(rehearsal.run)
    sweep(rehearsal)
    assert (state(lease), missing(rehearsal.run)) == ("retained", [])
    with pytest.raises(ValueError, match="is retained, not released"), transaction.atomic():
        transitions.succeed(
            factories.start(lease), lease, Resource(lease.resource_id, lease.resource_name), expires_at=None, actor="t"
        )
    other = factories.lease(rehearsal.environment, run=another_run(rehearsal))
    with pytest.raises(IntegrityError, match="lease_succeeded_is_expired"):
        Lease.objects.filter(pk=lease.pk).update(successor=other)


# S-159: the cancellation


def test_a_cancellation_is_requested_until_the_receipt_and_acknowledged_by_itself_then(
    rehearsal: Rehearsal, told: list[Any]
) -> None:
    """S-159."""
    lease = acquire(rehearsal)
    assert cancellation(rehearsal.run) == "none"
    rehearsal.world.hooks["delete"] = fails(ErrorKind.SERVER)
    run = cancel(rehearsal.run)
    assert (run.status, run.finished_at is not None, cancellation(run)) == ("cancelled", True, "requested")
    sweep(rehearsal)
    assert (cancellation(run), state(lease), told) == ("requested", "pending_cleanup", [])
    row = confirmation(run)
    assert (row.quiet, row.due_at, row.quiet in Obligation.FOR_PEOPLE) == ("waiting", None, False)
    del rehearsal.world.hooks["delete"]
    falls_due(owed(lease))
    sweep(rehearsal)
    assert (cancellation(run), evidence(lease), told) == ("acknowledged", ["destroyed"], [run.pk])
    assert (confirmation(run).closed_as, audited("run.cancellation_confirmed", run)) == ("proven", 1)
    assert audited("run.cancellation_requested", run) == 1


@pytest.mark.parametrize("status", Run.Status.values)
def test_a_run_that_is_over_is_cancelled_too_and_keeps_its_status(rehearsal: Rehearsal, status: str) -> None:
    """S-159: a terminal status proves nothing about what it left."""
    lease = acquire(rehearsal)
    finished = None if status in Run.LIVE else factories.at(-60)
    Run.objects.filter(pk=rehearsal.run.pk).update(status=status, finished_at=finished)
    run = cancel(rehearsal.run)
    assert run.status == ("cancelled" if status in Run.LIVE else status)
    if finished:
        assert run.finished_at == finished
    assert (cancellation(run), state(lease)) == ("requested", "pending_cleanup")
    sweep(rehearsal)
    assert cancellation(run) == "acknowledged"
    assert not Obligation.objects.filter(closed_at__isnull=True, kind=Kind.SETTLE_ORPHAN).exists()


def test_a_run_that_had_ended_is_confirmed_at_the_first_look(rehearsal: Rehearsal) -> None:
    leases.release(acquire(rehearsal).pk)
    sweep(rehearsal)
    cancel(rehearsal.run)
    rehearsal.world.calls.clear()
    assert look(rehearsal.run) == {"proven": 1}
    assert (cancellation(rehearsal.run), rehearsal.world.calls) == ("acknowledged", [])


def test_a_run_that_asked_for_nothing_is_acknowledged_once_it_may_ask_for_nothing(rehearsal: Rehearsal) -> None:
    """S-149, S-159: over and without a lease it has not ended; cancelled, the empty journal says so for good."""
    ends(rehearsal.run)
    assert missing(rehearsal.run) == [What.NOTHING_STARTED]
    cancel(rehearsal.run)
    assert look(rehearsal.run) == {"proven": 1}
    assert (cancellation(rehearsal.run), missing(rehearsal.run)) == ("acknowledged", [])
    Run.objects.filter(pk=rehearsal.run.pk).update(status=Run.Status.RUNNING)
    with pytest.raises(LeaseError):
        acquire(rehearsal)
    assert rehearsal.world.count("create") == 0


def test_a_run_whose_only_creation_is_unknown_is_not_acknowledged(rehearsal: Rehearsal) -> None:
    rehearsal.world.hooks["create"] = fails(ErrorKind.TIMEOUT)
    with pytest.raises(LeaseError):
        acquire(rehearsal)
    cancel(rehearsal.run)
    assert What.NOTHING_STARTED in missing(rehearsal.run)
    assert cancellation(rehearsal.run) == "requested"


def test_asking_twice_changes_nothing(rehearsal: Rehearsal) -> None:
    acquire(rehearsal)
    first = cancel(rehearsal.run)
    before = snapshot()
    assert cancel(rehearsal.run).cancel_requested_at == first.cancel_requested_at
    assert snapshot() == before
    sweep(rehearsal)
    before = snapshot()
    assert leases.cancellation(cancel(rehearsal.run)) == "acknowledged"
    assert snapshot() == before


def test_many_who_ask_at_once_make_one_request(rehearsal: Rehearsal) -> None:
    acquire(rehearsal)
    together(*[lambda: cancel(rehearsal.run) for _ in range(4)])
    assert Obligation.objects.filter(kind=Kind.CONFIRM_CANCEL).count() == 1
    assert audited("run.cancellation_requested", rehearsal.run) == 1
    sweep(rehearsal)
    assert cancellation(rehearsal.run) == "acknowledged"


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ({"run_id": "7"}, LeaseError),
        ({"run_id": uuid4()}, NotFound),
        ({"company_id": uuid4()}, NotFound),
        ({"actor": ""}, LeaseError),
        ({"reason": "x\x00"}, LeaseError),
        ({"reason": "x" * 501}, LeaseError),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_written(
    rehearsal: Rehearsal, how: dict[str, Any], error: type[LeaseError]
) -> None:
    acquire(rehearsal)
    before = snapshot()
    with pytest.raises(error):
        leases.request_cancellation(
            **{"run_id": rehearsal.run.pk, "company_id": rehearsal.company.pk, "actor": "user", **how}
        )
    assert snapshot() == before


def test_a_fence_refuses_it_whole(rehearsal: Rehearsal) -> None:
    """Like Stop: the controller that went down may still save the files. Asked again after it, it is done."""
    one, two = acquire(rehearsal), acquire(rehearsal)
    factories.hold(two, "shutdown_fence", until_in=60)
    before = snapshot()
    with pytest.raises(Fenced):
        cancel(rehearsal.run)
    assert (snapshot(), state(one)) == (before, "active")


def test_a_commit_whose_reply_was_lost_is_found_done_by_asking_again(rehearsal: Rehearsal) -> None:
    acquire(rehearsal)
    with lost_commit_reply() as happened, pytest.raises(OperationalError):
        cancel(rehearsal.run)
    assert happened
    assert leases.cancellation(cancel(rehearsal.run)) == "requested"
    assert Obligation.objects.filter(kind=Kind.CONFIRM_CANCEL).count() == 1


def test_nobody_is_told_of_a_confirmation_that_is_taken_back(
    rehearsal: Rehearsal, told: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    leases.release(acquire(rehearsal).pk)
    sweep(rehearsal)
    cancel(rehearsal.run)
    real = cancelling.confirm

    def fail(run: Run) -> None:
        real(run)
        raise RuntimeError("and then it broke")

    with monkeypatch.context() as patch:
        patch.setattr(cancelling, "confirm", fail)
        look(rehearsal.run)
    assert (told, cancellation(rehearsal.run), confirmation(rehearsal.run).closed_at) == ([], "requested", None)
    falls_due(confirmation(rehearsal.run))
    look(rehearsal.run)
    assert (told, cancellation(rehearsal.run)) == ([rehearsal.run.pk], "acknowledged")


def test_who_is_told_and_fails_takes_nothing_back(rehearsal: Rehearsal) -> None:
    def fail(**_: Any) -> None:
        raise RuntimeError("a listener's mistake")

    cancellation_confirmed.connect(fail, weak=False, dispatch_uid="fails")
    leases.release(acquire(rehearsal).pk)
    sweep(rehearsal)
    cancel(rehearsal.run)
    try:
        assert look(rehearsal.run) == {"proven": 1}
    finally:
        cancellation_confirmed.disconnect(dispatch_uid="fails")
    assert cancellation(rehearsal.run) == "acknowledged"


def test_nothing_new_is_started_for_it_whatever_its_status_says_later(rehearsal: Rehearsal) -> None:
    """So what was acknowledged stays true: a control plane that lost the answer may write the status back."""
    leases.release(acquire(rehearsal).pk)
    sweep(rehearsal)
    cancel(rehearsal.run)
    sweep(rehearsal)
    Run.objects.filter(pk=rehearsal.run.pk).update(status=Run.Status.RUNNING, finished_at=None)
    with pytest.raises(AcquireRefused, match="cancellation of the run was asked for"):
        acquire(rehearsal)
    assert rehearsal.world.boxes == {}
    assert cancel(rehearsal.run).status == "cancelled"
    assert cancellation(rehearsal.run) == "acknowledged"


# At the same time


def test_a_sandbox_that_comes_to_be_meanwhile_is_destroyed_before_it_is_acknowledged(rehearsal: Rehearsal) -> None:
    """S-092, S-159: its create was on its way when the run was cancelled."""
    created = Gate()
    rehearsal.world.after["create"] = created

    def acquiring() -> str:
        with pytest.raises(AcquireRejected) as caught:
            acquire(rehearsal)
        return str(caught.value)

    background = Background(acquiring)
    created.wait()
    rehearsal.world.hooks["find"] = fails(ErrorKind.CONNECTION)
    cancel(rehearsal.run)
    sweep(rehearsal)
    assert (cancellation(rehearsal.run), look(rehearsal.run)) == ("requested", {})
    created.open()
    assert "is being destroyed" in background.result() or rehearsal.world.boxes
    assert cancellation(rehearsal.run) == "requested"
    del rehearsal.world.hooks["find"]
    for row in Obligation.objects.filter(closed_at__isnull=True, due_at__isnull=False):
        falls_due(row)
    sweep(rehearsal)
    assert (rehearsal.world.boxes, cancellation(rehearsal.run)) == ({}, "acknowledged")


def test_an_attach_that_has_the_run_first_is_stopped_and_one_that_comes_second_is_refused(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two connections: the attach holds the run's lock, uncommitted, when the cancellation is asked for."""
    attached, real = Gate(), transitions.attach

    def attach(*args: Any, **how: Any) -> Lease:
        lease = real(*args, **how)
        attached()
        return lease

    with monkeypatch.context() as patch:
        patch.setattr(transitions, "attach", attach)
        acquiring = Background(lambda: acquire(rehearsal))
        attached.wait()
        cancelling_ = Background(lambda: cancel(rehearsal.run))
        attached.open()
        lease = acquiring.result()
        assert cancelling_.result().status == "cancelled"
    assert (state(lease), cancellation(rehearsal.run)) == ("pending_cleanup", "requested")
    assert look(rehearsal.run) == {"waiting": 1}
    sweep(rehearsal)
    assert (rehearsal.world.boxes, cancellation(rehearsal.run)) == ({}, "acknowledged")


def kept_and_cancelled(rehearsal: Rehearsal) -> Lease:
    """A lease whose sandbox was stopped and kept, of a run whose cancellation was asked for and not looked at yet."""
    lease = leases.release(acquired(rehearsal, REUSED).pk)
    sweep(rehearsal)
    cancel(rehearsal.run)
    return lease


def test_a_start_that_is_being_journalled_is_seen_by_the_confirmation(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two connections: the start holds the lease's lock, uncommitted. The confirmation does not wait for it."""
    kept_and_cancelled(rehearsal)
    journalled, real = Gate(), leases.journal.write

    def write(*args: Any, **how: Any) -> None:
        real(*args, **how)
        journalled()

    started = Gate()
    rehearsal.world.hooks["start"] = started
    with monkeypatch.context() as patch:
        patch.setattr(leases.journal, "write", write)
        starting = Background(lambda: acquire(rehearsal, another_run(rehearsal)))
        journalled.wait()
        assert look(rehearsal.run) == {"contended": 1}
        journalled.open()
    started.wait()
    falls_due(confirmation(rehearsal.run))
    assert look(rehearsal.run) == {"waiting": 1}
    assert cancellation(rehearsal.run) == "requested"
    started.open()
    starting.result()
    sweep_lane()
    assert cancellation(rehearsal.run) == "acknowledged"  # it ended in its own epoch, and the sandbox is another's now


def test_a_start_waits_for_a_confirmation_that_is_being_written(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two connections: the confirmation has evaluated, and is not committed. No start comes in between."""
    lease = kept_and_cancelled(rehearsal)
    evaluated, real = Gate(), ending.execution_ended

    def evaluate(*args: Any) -> Any:
        found = real(*args)
        evaluated()
        return found

    monkeypatch.setattr(ending, "execution_ended", evaluate)
    looking = Background(lambda: look(rehearsal.run))
    evaluated.wait()
    run = another_run(rehearsal)
    starting = Background(lambda: acquire(rehearsal, run))
    waits_for_a_lock()
    assert not Operation.objects.filter(source=lease).exists()
    evaluated.open()
    assert looking.result() == {"proven": 1}
    assert starting.result().run_id == run.pk
    assert cancellation(rehearsal.run) == "acknowledged"


def waits_for_a_lock() -> None:
    """Wait until some session of this database waits for a lock."""
    for _ in range(2000):
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT pg_sleep(0.01), count(*) FROM pg_stat_activity"
                " WHERE datname = current_database() AND wait_event_type = 'Lock'"
            )
            row = cursor.fetchone()
        if row is not None and row[1]:
            return
    raise AssertionError("nobody waits")


def test_two_last_facts_at_once_do_not_hide_each_other(rehearsal: Rehearsal) -> None:
    one, two = acquire(rehearsal), acquire(rehearsal)
    cancel(rehearsal.run)
    together(
        *[
            lambda lease=lease: Engine().sweep(rehearsal.account.pk, selection=Selection(lease_id=lease.pk))  # type: ignore[misc]
            for lease in (one, two)
        ],
        lambda: look(rehearsal.run),
    )
    for row in Obligation.objects.filter(closed_at__isnull=True, due_at__isnull=False):
        falls_due(row)
    sweep(rehearsal)
    assert cancellation(rehearsal.run) == "acknowledged"


def test_a_receipt_between_the_look_and_its_wait_makes_it_look_again(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    acquire(rehearsal)
    cancel(rehearsal.run)
    evaluated, real = Gate(), ending.execution_ended

    def evaluate(*args: Any) -> Any:
        found = real(*args)
        if not evaluated.reached.is_set():
            evaluated()
        return found

    monkeypatch.setattr(ending, "execution_ended", evaluate)
    looking = Background(sweep_lane)
    evaluated.wait()
    paying = Background(lambda: Engine().sweep(rehearsal.account.pk).outcomes)
    evaluated.open()
    looking.result()
    assert paying.result() == {"proven": 1}
    sweep_lane()
    assert cancellation(rehearsal.run) == "acknowledged"


# What would wait for each other


def test_a_cancelled_run_waits_for_no_acknowledgement_of_its_startups(rehearsal: Rehearsal) -> None:
    """S-100 is about a control plane that cancelled a startup and may not know what became of it. The one that had the
    run cancelled is told by the confirmation: were that waited for, neither would ever come.
    """
    rehearsal.world.hooks["create"] = lambda _: elsewhere(
        lambda: leases.stop(company_id=rehearsal.company.pk, run_id=rehearsal.run.pk)
    )
    with pytest.raises(AcquireRejected):
        acquire(rehearsal)
    rehearsal.world.hooks.clear()
    lease = acquire(rehearsal)
    ends(rehearsal.run)
    sweep(rehearsal)
    orphan = Obligation.objects.get(lease=lease, kind=Kind.SETTLE_ORPHAN)
    assert (state(lease), orphan.quiet) == ("active", "unacknowledged")
    cancel(rehearsal.run)
    sweep(rehearsal)
    assert (cancellation(rehearsal.run), rehearsal.world.boxes) == ("acknowledged", {})
    rehearsal.run.refresh_from_db()
    assert rehearsal.run.cancel_acknowledged_at is None


def test_nor_does_a_lease_that_other_hands_leave_active_after_the_request(rehearsal: Rehearsal) -> None:
    operation = factories.operation(
        rehearsal.environment, run_uuid=rehearsal.run.pk, cancelled_at=factories.at(60), outlived_at=factories.at(0)
    )
    ends(rehearsal.run)
    lease = factories.lease(rehearsal.environment, run=rehearsal.run)
    with transaction.atomic():
        Operation.objects.filter(pk=operation.pk).update(state="resolved", resolved_at=factories.at(0))
        Obligation.objects.filter(operation=operation).update(
            closed_at=factories.at(0), closed_as="nothing_owed", due_at=None
        )
    sweep_lane()
    orphan = Obligation.objects.get(lease=lease, kind=Kind.SETTLE_ORPHAN)
    assert orphan.quiet == "unacknowledged"
    with transaction.atomic():  # asked for by a row, and not by the function that stops what there is
        Run.objects.filter(pk=rehearsal.run.pk).update(cancel_requested_at=factories.at(0))
        Obligation.objects.create(
            company=rehearsal.company, kind=Kind.CONFIRM_CANCEL, run=rehearsal.run, due_at=factories.at(0)
        )
    sweep_lane()
    assert (state(lease), cancellation(rehearsal.run)) == ("pending_cleanup", "requested")


# What was given up, and proven later


def give_up(row: Obligation) -> None:
    deciding.settle_unverified(
        row.pk,
        confirmation=deciding.confirmation_of(row),
        company_id=row.company_id,
        actor="operator",
        reason="nobody can tell any more",
    )


def lost(rehearsal: Rehearsal) -> Lease:
    """A creation whose reply was lost; its sandbox was found, and is owned for its teardown, which fails."""
    rehearsal.world.after["create"] = fails(ErrorKind.CONNECTION)
    with pytest.raises(AcquireUncertain):
        acquire(rehearsal)
    del rehearsal.world.after["create"]
    rehearsal.world.hooks["delete"] = fails(ErrorKind.SERVER)
    sweep(rehearsal)
    return Lease.objects.latest("acquired_at")


def test_a_startup_that_was_given_up_is_paid_when_it_is_proven_after_all(rehearsal: Rehearsal) -> None:
    """It once stayed a debt for ever, and kept its run from having ended."""
    lease = lost(rehearsal)
    give_up(Obligation.objects.get(kind=Kind.STARTUP, run=rehearsal.run))
    cancel(rehearsal.run)
    sweep(rehearsal)
    assert (proof.unproven().count(), startup.is_unsettled(rehearsal.run.pk)) == (1, True)
    assert missing(rehearsal.run) == [What.LEASE_UNPROVEN, What.STARTUP_UNVERIFIED]
    del rehearsal.world.hooks["delete"]
    falls_due(owed(lease))
    sweep(rehearsal)
    assert (evidence(lease), proof.unproven().count()) == (["destroyed"], 0)
    assert (startup.is_unsettled(rehearsal.run.pk), missing(rehearsal.run)) == (False, [])
    assert cancellation(rehearsal.run) == "acknowledged"


def test_a_lease_that_was_given_up_is_a_debt_that_confirms_nothing_until_it_is_found_gone(
    rehearsal: Rehearsal,
) -> None:
    lease = acquire(rehearsal)
    rehearsal.world.hooks["delete"] = fails(ErrorKind.SERVER)
    cancel(rehearsal.run)
    sweep(rehearsal)
    falls_due(owed(lease))
    give_up(owed(lease))
    sweep(rehearsal)
    assert (state(lease), cancellation(rehearsal.run)) == ("failed", "requested")
    assert missing(rehearsal.run) == [What.LEASE_UNPROVEN, What.LEASE_GIVEN_UP]
    rehearsal.world.boxes.clear()
    row = owed(lease)
    Obligation.objects.filter(pk=row.pk).update(due_at=factories.at(-1), not_before=factories.at(-1))
    sweep(rehearsal)
    assert (evidence(lease), cancellation(rehearsal.run)) == (["absent"], "acknowledged")


def test_a_start_that_was_given_up_is_paid_by_the_proof_of_another_runs_lease(rehearsal: Rehearsal) -> None:
    """The receipt names the run whose lease it is; the one that had asked for the start is woken all the same."""
    lease = leases.release(acquired(rehearsal, REUSED).pk)
    ends(rehearsal.run)
    sweep(rehearsal)
    run = another_run(rehearsal)
    rehearsal.world.hooks["start"] = fails(ErrorKind.CONNECTION)
    with pytest.raises(leases.errors.ResumeFailed):
        acquire(rehearsal, run)
    cancel(run)
    give_up(owed(Operation.objects.get(source=lease)))
    sweep(rehearsal)
    assert What.OPERATION_UNVERIFIED in missing(run)
    for row in Obligation.objects.filter(kind=Kind.STARTUP, run=run, closed_at__isnull=True):
        give_up(row)
    sweep(rehearsal)
    assert cancellation(run) == "requested"
    with transaction.atomic():
        transitions.dispose(Lease.objects.select_for_update().get(pk=lease.pk), reason="idle_too_long", actor="test")
    Operation.objects.filter(source=lease).update(call_ended_at=factories.at(0))
    sweep(rehearsal)
    assert evidence(lease)[-1] == "destroyed"
    assert (missing(run), proof.unproven().count(), cancellation(run)) == ([], 0, "acknowledged")


# G


def test_a_kept_sandbox_past_its_own_deadline_is_no_source(rehearsal: Rehearsal) -> None:
    """S-143: the provider ends it at any moment now; that it is still there is no reason to build on it."""
    lease = leases.release(acquired(rehearsal, REUSED).pk)
    sweep(rehearsal)
    Lease.objects.filter(pk=lease.pk).update(expires_at=factories.at(-1))
    assert acquire(rehearsal, another_run(rehearsal)).resource_id != lease.resource_id
    assert (state(lease), rehearsal.world.count("start")) == ("released", 0)
    Lease.objects.filter(pk=lease.pk).update(expires_at=factories.at(3600))
    assert acquire(rehearsal, another_run(rehearsal)).resource_id == lease.resource_id


def test_a_kept_sandbox_whose_time_is_over_is_nobodys_source_any_more(rehearsal: Rehearsal) -> None:
    """S-143: its stop stays proof of the end; its files are not to be had by anybody."""
    lease = leases.release(acquired(rehearsal, REUSED).pk)
    ends(rehearsal.run)
    sweep(rehearsal)
    Lease.objects.filter(pk=lease.pk).update(kept_until=factories.at(-1), expires_at=factories.at(-1))
    Obligation.objects.filter(lease=lease, kind=Kind.DISPOSE).update(due_at=factories.at(-1))
    rehearsal.world.hooks["delete"] = fails(ErrorKind.SERVER)
    sweep(rehearsal)
    assert state(lease) == "pending_cleanup"
    with pytest.raises(leases.recovering.CannotRecover) as refused:
        leases.recover_workspace(lease.pk, rehearsal.company.pk, actor="operator", reason="the files, please")
    assert refused.value.code == "not_kept"
    another = acquire(rehearsal, another_run(rehearsal))
    assert another.resource_id != lease.resource_id
    assert missing(rehearsal.run) == []
