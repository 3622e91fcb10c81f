"""O: active orphans, and what of a startup keeps their settle off (S-099, S-100)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connection, transaction

import leases
from cleanup import tasks
from cleanup.claims import LANE
from cleanup.dispositions import CONTENDED
from cleanup.engine import Engine
from leases import holds, transitions
from leases.errors import ControlRefused
from leases.models import Hold, Issue, Lease, Obligation, Operation, Run
from tests import factories, fleet
from tests.concurrency import BOUND, Background, Gate, elsewhere, together
from tests.scenarios.steps import acquired, attempts, audited, evidence, state, stop, sweep, sweep_lane
from tests.stage import Rehearsal

pytestmark = pytest.mark.django_db(transaction=True)

SETTLE = Obligation.Kind.SETTLE_ORPHAN


def ends(run: Run, status: str = "failed") -> None:
    """The control plane writes how the run ended, and leaves its sandboxes as they are."""
    Run.objects.filter(pk=run.pk).update(status=status, finished_at=factories.database_now())


def settles(lease: Lease) -> list[Obligation]:
    return list(Obligation.objects.filter(lease=lease, kind=SETTLE).order_by("pk"))


def settle(lease: Lease) -> Obligation:
    return settles(lease)[-1]


def closed_as(lease: Lease) -> str:
    return settle(lease).closed_as


# --- Settled ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", ["succeeded", "failed", "cancelled", "timed_out", "interrupted"])
def test_what_a_run_leaves_active_is_stopped_and_kept_as_nobodys(rehearsal: Rehearsal, status: str) -> None:
    """S-212: with a reason, and whatever its policy says of a release."""
    lease = acquired(rehearsal)
    ends(rehearsal.run, status)
    sweep_lane(SETTLE)
    lease.refresh_from_db()
    assert (lease.state, lease.reason) == ("pending_cleanup", "orphaned_active_lease_recovered")
    assert lease.orphaned_at is not None
    teardown = lease.obligations.get(kind=Obligation.Kind.TEARDOWN)
    assert (teardown.verb, closed_as(lease)) == ("stop_only", "handed_over")
    Engine().sweep(rehearsal.account.pk)
    assert (state(lease), evidence(lease)) == ("released", ["stopped"])
    assert rehearsal.world.count("delete") == 0
    sweep(rehearsal)  # and when nothing needs its files, it is destroyed
    assert (state(lease), lease.resource_id in rehearsal.world.boxes) == ("failed", False)


def test_the_stop_and_the_mark_are_one_commit(rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    """And where it fails in the middle, nothing of it is there, and it is owed still."""
    lease = acquired(rehearsal)
    ends(rehearsal.run)

    def orphan(*_: Any, **__: Any) -> None:
        raise RuntimeError("died in the middle")

    with monkeypatch.context() as patch:
        patch.setattr(transitions, "orphan", orphan)
        assert sweep_lane(SETTLE).outcomes == {"failed": 1}
    lease.refresh_from_db()
    assert (lease.state, lease.orphaned_at) == ("active", None)
    assert settle(lease).is_open


def test_it_happens_at_once_and_asks_no_provider(rehearsal: Rehearsal) -> None:
    """S-218: there is no window of staleness. The write that ends the run owes the settle, due now."""
    lease = acquired(rehearsal)
    rehearsal.world.calls.clear()
    ends(rehearsal.run)
    row = settle(lease)
    assert row.due_at is not None
    assert row.due_at <= factories.database_now()
    assert row.account_id is None
    sweep_lane(SETTLE)
    assert (state(lease), rehearsal.world.calls) == ("pending_cleanup", [])


def test_one_of_no_run_and_without_an_end_is_nobodys(rehearsal: Rehearsal) -> None:
    """S-214. Nothing of ours makes such a lease; other hands may."""
    lease = acquired(rehearsal, ad_hoc=True)
    assert not settles(lease)
    Lease.objects.filter(pk=lease.pk).update(ends_at=None)
    sweep_lane(SETTLE)
    lease.refresh_from_db()
    assert (lease.state, lease.orphaned_at is not None) == ("pending_cleanup", True)


def test_one_of_no_run_with_an_end_is_released_by_itself_and_not_settled(rehearsal: Rehearsal) -> None:
    lease = acquired(rehearsal, ad_hoc=True)
    Lease.objects.filter(pk=lease.pk).update(ends_at=None)
    Lease.objects.filter(pk=lease.pk).update(ends_at=factories.at(60))
    sweep_lane(SETTLE)
    assert (state(lease), closed_as(lease)) == ("active", "nothing_owed")


def test_a_lease_that_becomes_active_for_a_run_that_is_over_is_nobodys() -> None:
    """By other hands: nothing of ours attaches to such a run."""
    run = factories.run(status="failed")
    lease = factories.lease(factories.environment(factories.account(run.company)), run=run)
    assert settle(lease).is_open


# --- Left alone -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", Run.LIVE)
def test_the_lease_of_a_live_run_is_left_alone(rehearsal: Rehearsal, status: str) -> None:
    """S-213."""
    lease = acquired(rehearsal)
    Run.objects.filter(pk=rehearsal.run.pk).update(status=status)
    assert not settles(lease)
    assert sweep_lane().claimed == 0
    assert state(lease) == Lease.State.ACTIVE


def test_a_run_that_is_live_again_holds_what_is_its_own(rehearsal: Rehearsal) -> None:
    lease = acquired(rehearsal)
    ends(rehearsal.run)
    Run.objects.filter(pk=rehearsal.run.pk).update(status="scheduled_retry", finished_at=None)
    sweep_lane(SETTLE)
    assert (state(lease), closed_as(lease)) == ("active", "nothing_owed")
    ends(rehearsal.run)  # and its next end owes it anew
    sweep_lane(SETTLE)
    assert (state(lease), len(settles(lease))) == ("pending_cleanup", 2)


def test_a_retained_lease_is_left_alone(rehearsal: Rehearsal) -> None:
    """S-216: kept on purpose, with an end of its own, and nobody's mark on it."""
    lease = acquired(rehearsal, "retain_on_failure")
    leases.release(lease.pk, outcome="failed")
    sweep(rehearsal)
    assert state(lease) == Lease.State.RETAINED
    ends(rehearsal.run)
    sweep(rehearsal)
    lease.refresh_from_db()
    assert (lease.state, lease.orphaned_at, settles(lease)) == ("retained", None, [])


def test_one_that_was_released_before_the_settle_came_is_its_release(rehearsal: Rehearsal) -> None:
    lease = acquired(rehearsal)
    ends(rehearsal.run, "succeeded")
    leases.release(lease.pk)
    sweep_lane(SETTLE)
    lease.refresh_from_db()
    assert (closed_as(lease), lease.orphaned_at, lease.reason) == ("nothing_owed", None, "released")
    assert lease.obligations.get(kind=Obligation.Kind.TEARDOWN).verb == "delete"


@pytest.mark.parametrize("other", ["active", "retained", "pending_cleanup"])
def test_one_whose_sandbox_another_live_lease_is_on_waits_for_the_end_of_that(rehearsal: Rehearsal, other: str) -> None:
    """S-217. By the provider's own names: two accounts of ours may be one there."""
    lease = acquired(rehearsal)
    twin = factories.lease(
        factories.environment(factories.account(rehearsal.company, provider="rehearsal")),
        resource_id=lease.resource_id,
        account_identity=lease.account_identity,
    )
    if other == "retained":
        factories.stopped(twin, state="retained")
    elif other == "pending_cleanup":
        factories.teardown(twin, due_in=3600)
    ends(rehearsal.run)
    sweep_lane(SETTLE)
    # The one that is torn down ends by itself; of the others nobody knows.
    assert state(lease) == Lease.State.ACTIVE
    assert settle(lease).quiet == ("identity_conflict" if other == "retained" else "waiting")
    if other == "active":
        factories.teardown(twin, due_in=3600)
        assert sweep_lane(SETTLE).outcomes in ({}, {"waiting": 1})
    if other != "retained":
        _end(twin)
        assert sweep_lane(SETTLE).outcomes == {"proven": 1}
        assert state(lease) == Lease.State.PENDING_CLEANUP


def _end(lease: Lease) -> None:
    """Its sandbox, as far as it goes, is proven gone."""
    lease.refresh_from_db()
    with transaction.atomic():
        factories.receipt(lease)
        Obligation.objects.filter(lease=lease, kind="teardown").update(
            closed_at=factories.database_now(), closed_as="proven", due_at=None
        )
        Lease.objects.filter(pk=lease.pk).update(state="expired")


def test_many_that_wait_keep_none_behind_them_from_being_settled(rehearsal: Rehearsal) -> None:
    """S-219: there are no pages. What waits is quiet, and is read by nobody until it is woken."""
    waiting = []
    for _ in range(3):
        run = factories.run(rehearsal.company)
        lease = leases.acquire(rehearsal.environment.pk, company_id=rehearsal.company.pk, run_id=run.pk)
        _fence(lease, 600)
        ends(run)
        waiting.append(lease)
    last = acquired(rehearsal)
    ends(rehearsal.run)
    assert sweep_lane(SETTLE, limit=1).claimed == 1
    while sweep_lane(SETTLE, limit=1).claimed:
        pass
    assert [state(lease) for lease in waiting] == ["active"] * 3
    assert state(last) == Lease.State.PENDING_CLEANUP


def _fence(lease: Lease, seconds: float) -> Hold:
    return Hold.objects.create(
        company_id=lease.company_id,
        lease=lease,
        kind=Hold.Kind.SHUTDOWN_FENCE,
        strength=Hold.Strength.ALWAYS,
        holder="control plane 1",
        until=factories.at(seconds),
    )


def test_a_fenced_one_is_left_alone_until_its_deadline(rehearsal: Rehearsal) -> None:
    lease = acquired(rehearsal)
    fence = _fence(lease, 600)
    ends(rehearsal.run, "interrupted")
    assert sweep_lane(SETTLE).outcomes == {"held": 1}
    assert (state(lease), settle(lease).due_at) == ("active", fence.until)
    holds.end(fence.pk, company_id=lease.company_id, actor="control plane 1")
    sweep_lane(SETTLE)
    assert state(lease) == Lease.State.PENDING_CLEANUP


# --- Startups ---------------------------------------------------------------------------------------------------------


def test_a_startup_that_is_pending_keeps_the_settle_off(rehearsal: Rehearsal) -> None:
    """S-099: found out in its final write, under the run's lock."""
    lease = acquired(rehearsal)
    operation = factories.operation(rehearsal.environment, run_uuid=rehearsal.run.pk)
    ends(rehearsal.run)
    assert sweep_lane(SETTLE).outcomes == {"waiting": 1}
    assert state(lease) == Lease.State.ACTIVE
    with transaction.atomic():
        Obligation.objects.filter(operation=operation).update(
            closed_at=factories.database_now(), closed_as="nothing_owed", due_at=None
        )
        Operation.objects.filter(pk=operation.pk).update(state="resolved", resolved_at=factories.database_now())
    sweep_lane(SETTLE)
    assert state(lease) == Lease.State.PENDING_CLEANUP


def test_a_startup_that_is_owed_keeps_it_off_until_it_is_over(rehearsal: Rehearsal) -> None:
    """S-099."""
    lease = acquired(rehearsal)
    owed = factories.startup(rehearsal.run)
    ends(rehearsal.run)
    assert sweep_lane(SETTLE).outcomes == {"waiting": 1}
    Obligation.objects.filter(pk=owed.pk).update(closed_at=factories.database_now(), closed_as="proven", quiet="")
    sweep_lane(SETTLE)
    assert state(lease) == Lease.State.PENDING_CLEANUP


def _cancelled_startup(rehearsal: Rehearsal) -> None:
    """A second sandbox of the run was being made when the user stopped it; it came, and was destroyed."""
    rehearsal.world.hooks["create"] = lambda _: elsewhere(lambda: stop(rehearsal))
    with pytest.raises(leases.errors.AcquireRejected):
        leases.acquire(rehearsal.environment.pk, company_id=rehearsal.company.pk, run_id=rehearsal.run.pk)
    rehearsal.world.hooks.clear()


def test_a_cancelled_startup_keeps_it_off_until_its_end_is_acknowledged(rehearsal: Rehearsal) -> None:
    """S-100."""
    _cancelled_startup(rehearsal)
    lease = leases.acquire(rehearsal.environment.pk, company_id=rehearsal.company.pk, run_id=rehearsal.run.pk)
    ends(rehearsal.run)
    sweep(rehearsal)
    assert (state(lease), settle(lease).quiet) == ("active", Obligation.Quiet.UNACKNOWLEDGED)
    leases.acknowledge_cancellation(rehearsal.run.pk, rehearsal.company.pk, "control plane")
    assert audited("run.cancellation_acknowledged", rehearsal.run) == 1
    sweep_lane(SETTLE)
    assert state(lease) == Lease.State.PENDING_CLEANUP


def test_nobody_acknowledges_what_has_not_come_to_its_end(rehearsal: Rehearsal) -> None:
    _cancelled_startup(rehearsal)
    with pytest.raises(ControlRefused) as refused:
        leases.acknowledge_cancellation(rehearsal.run.pk, rehearsal.company.pk)
    assert refused.value.code == "startup_open"


def test_what_was_cancelled_after_the_acknowledgement_takes_another(rehearsal: Rehearsal) -> None:
    leases.acknowledge_cancellation(rehearsal.run.pk, rehearsal.company.pk)
    _cancelled_startup(rehearsal)
    lease = leases.acquire(rehearsal.environment.pk, company_id=rehearsal.company.pk, run_id=rehearsal.run.pk)
    ends(rehearsal.run)
    sweep(rehearsal)
    assert settle(lease).quiet == Obligation.Quiet.UNACKNOWLEDGED


# --- Controllers ------------------------------------------------------------------------------------------------------


@pytest.fixture
def _server(transactional_db: None) -> Iterator[None]:
    with fleet.a_server_that_was_always_there():
        yield


@pytest.mark.usefixtures("_server")
def test_what_a_controller_that_is_gone_left_is_stopped_and_kept(rehearsal: Rehearsal) -> None:
    """S-212, from the lapse on: nobody wrote that the run ended."""
    one = leases.take_control(rehearsal.run.pk, rehearsal.company.pk, "one")
    lease = leases.acquire(
        rehearsal.environment.pk, company_id=rehearsal.company.pk, run_id=rehearsal.run.pk, controller=one
    )
    fleet.passes(61)
    sweep_lane()
    assert state(lease) == Lease.State.ACTIVE
    fleet.passes(20)
    sweep_lane()
    lease.refresh_from_db()
    rehearsal.run.refresh_from_db()
    assert (rehearsal.run.status, lease.state, lease.orphaned_at is not None) == (
        "interrupted",
        "pending_cleanup",
        True,
    )
    with pytest.raises(ControlRefused) as refused:
        leases.release(lease.pk, controller=one, disposition="destroy")
    assert refused.value.code == "controller_lapsed"
    assert lease.obligations.get(kind=Obligation.Kind.TEARDOWN).verb == "stop_only"


# --- Races ------------------------------------------------------------------------------------------------------------


def test_a_release_and_the_settle_at_once_are_one_after_the_other(rehearsal: Rehearsal) -> None:
    outcomes = set()
    for _ in range(6):
        run = factories.run(rehearsal.company)
        lease = leases.acquire(rehearsal.environment.pk, company_id=rehearsal.company.pk, run_id=run.pk)
        ends(run)
        together(lambda lease=lease: leases.release(lease.pk), lambda: Engine().sweep(LANE).outcomes)
        while sweep_lane(SETTLE).claimed:
            pass
        for _ in range(20):
            if not settle(lease).is_open:
                break
            tasks.look_at_again(settle(lease).pk)
        lease.refresh_from_db()
        teardown = lease.obligations.get(kind=Obligation.Kind.TEARDOWN)
        outcomes.add((lease.reason, teardown.verb, lease.orphaned_at is not None, closed_as(lease)))
    assert outcomes <= {
        ("released", "delete", False, "nothing_owed"),
        ("orphaned_active_lease_recovered", "stop_only", True, "handed_over"),
    }


def test_an_attach_and_the_end_of_its_run_at_once_leave_nothing_unowned(rehearsal: Rehearsal) -> None:
    """Either the end saw the lease, or the attach saw the end: whoever has the run's lock first."""
    for _ in range(6):
        run = factories.run(rehearsal.company)

        def acquire(run: Run = run) -> str:
            try:
                leases.acquire(rehearsal.environment.pk, company_id=rehearsal.company.pk, run_id=run.pk)
            except (leases.errors.AcquireRefused, leases.errors.AcquireRejected):
                return "refused"
            return "attached"

        became, _ = together(acquire, lambda run=run: ends(run))
        for lease in Lease.objects.filter(run=run):
            if lease.state == Lease.State.ACTIVE:
                assert became == "attached"
                assert settle(lease).is_open
            else:
                assert (became, lease.state) == ("refused", "pending_cleanup")


def test_an_attach_that_the_end_of_the_run_waits_for_is_seen_by_it(rehearsal: Rehearsal) -> None:
    gate = Gate()
    attach = transitions.attach

    def attached(*args: Any, **how: Any) -> Lease:
        lease = attach(*args, **how)
        gate()
        return lease

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transitions, "attach", attached)
        acquiring = Background(lambda: acquired(rehearsal))
        gate.wait()
        ending = Background(lambda: ends(rehearsal.run))
        gate.open()
        lease = acquiring.result()
        ending.result()
    assert settle(lease).is_open


def _held(rows: Callable[[], Any]) -> tuple[Gate, Background]:
    gate = Gate()

    def hold() -> None:
        with transaction.atomic():
            rows()
            gate()

    holding = Background(hold)
    gate.wait()
    return gate, holding


@pytest.mark.parametrize("what", ["issue", "run", "lease"])
def test_a_lock_that_somebody_holds_is_not_waited_for_and_looked_at_again(
    rehearsal: Rehearsal, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a few seconds, by a countdown; the row's own due time is behind it."""
    sent: list[tuple[Any, ...]] = []
    monkeypatch.setattr(tasks.look_at_again, "apply_async", lambda args, countdown: sent.append((args, countdown)))
    issue = factories.issue(rehearsal.company)
    Run.objects.filter(pk=rehearsal.run.pk).update(issue=issue)
    lease = acquired(rehearsal)
    ends(rehearsal.run)
    locked: dict[str, Callable[[], Any]] = {
        "issue": lambda: Issue.objects.select_for_update().get(pk=issue.pk),
        "run": lambda: Run.objects.select_for_update().get(pk=rehearsal.run.pk),
        "lease": lambda: Lease.objects.select_for_update(of=("self",)).get(pk=lease.pk),
    }
    gate, holding = _held(locked[what])
    tasks.settle_ownership()
    row = settle(lease)
    assert (row.is_open, attempts(row)) == (True, ["handed_back"])
    assert row.due_at is not None
    assert 25 < (row.due_at - factories.database_now()).total_seconds() <= 30
    assert sent == [((row.pk,), tasks.AGAIN_AFTER)]
    gate.open()
    holding.result()
    tasks.look_at_again(row.pk)
    assert (state(lease), closed_as(lease)) == ("pending_cleanup", "handed_over")
    assert CONTENDED not in Engine().sweep(LANE).outcomes


def test_the_ends_of_a_startup_and_of_an_operation_lock_in_one_order(rehearsal: Rehearsal) -> None:
    """The startup, then what waits for it. The other way round in one of them would be a deadlock."""
    lease = acquired(rehearsal)
    operation = factories.operation(rehearsal.environment, run_uuid=rehearsal.run.pk)
    startup = factories.startup(rehearsal.run)
    ends(rehearsal.run)
    sweep_lane(SETTLE)
    gate = Gate()

    def end_startup() -> None:
        with transaction.atomic():
            row = Obligation.objects.select_for_update(no_key=True).get(pk=startup.pk)
            gate()
            row.closed_at, row.closed_as, row.quiet = factories.database_now(), "proven", ""
            row.save(update_fields=["closed_at", "closed_as", "quiet"])

    def end_operation() -> None:
        with transaction.atomic():
            Obligation.objects.filter(operation=operation).update(
                closed_at=factories.database_now(), closed_as="nothing_owed", due_at=None
            )
            Operation.objects.filter(pk=operation.pk).update(state="resolved", resolved_at=factories.database_now())

    ending = Background(end_startup)
    gate.wait()
    other = Background(end_operation)
    _comes_to_a_lock()
    gate.open()
    ending.result()
    other.result()
    sweep_lane(SETTLE)
    assert state(lease) == Lease.State.PENDING_CLEANUP


def _comes_to_a_lock() -> None:
    until = time.monotonic() + BOUND
    while time.monotonic() < until:
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
            )
            if cursor.fetchone()[0]:
                return
        time.sleep(0.005)
    raise AssertionError("it came to no lock")


def test_two_runs_that_end_at_once_owe_each_their_own(rehearsal: Rehearsal) -> None:
    runs = [factories.run(rehearsal.company) for _ in range(4)]
    made = [leases.acquire(rehearsal.environment.pk, company_id=rehearsal.company.pk, run_id=run.pk) for run in runs]
    together(*[lambda run=run: ends(run) for run in runs])
    assert all(settle(lease).is_open for lease in made)


def test_whoever_ends_the_run_counts(rehearsal: Rehearsal) -> None:
    lease = acquired(rehearsal)
    with connection.cursor() as cursor:
        cursor.execute("UPDATE leases_run SET status = 'failed' WHERE id = %s", [rehearsal.run.pk])
    assert settle(lease).is_open
