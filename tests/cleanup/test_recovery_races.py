"""A recovery of files and everybody else at the same sandbox: who may act in its window, and who hears a reply late.

On real connections: one thread is inside a call of the provider, and others do what they do at that moment.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any

import pytest
from django.db import transaction

import leases
from cleanup.claims import Selection
from cleanup.engine import Engine
from leases import archives, bounds, holds, keeping, proof, recovering
from leases.errors import LeaseError
from leases.models import Archive, Attempt, Lease, Obligation, Operation, Recovery, Run
from leases.models.environments import Policy
from providers.contract import ErrorKind, ProviderError
from tests import factories
from tests.concurrency import Background, Gate, together
from tests.failure_table import open_kinds
from tests.scenarios.passing import shift
from tests.scenarios.steps import evidence, fails, falls_due, state, sweep, sweep_lane
from tests.scenarios.test_recovery import FILES, contents, failed, owed, recover
from tests.stage import Rehearsal

pytestmark = pytest.mark.django_db(transaction=True)

PROTECTION_AND_MORE = 16 * 60.0
CALLS = {"leases_operation", "leases_bridgeactivity", "leases_attempt"}
"""What says how long ago something was asked for."""


@pytest.fixture(autouse=True)
def starts_are_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes a minute until it is given up takes a moment."""
    monkeypatch.setattr(import_module("cleanup.handlers.recover_workspace"), "_PAUSES", (0.0, 0.01, 0.01))
    monkeypatch.setattr(bounds, "RESUME", 0.1)


class Once(Gate):
    """A gate through which the first that comes has to wait, and nobody else. What it then does is `then`."""

    def __init__(self, then: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._then, self._lock = then, threading.Lock()

    def __call__(self, *_: Any) -> None:
        with self._lock:
            if self.reached.is_set():
                return
            self.reached.set()
        super().__call__()
        if self._then is not None:
            self._then()


def no_reply() -> None:
    raise ProviderError(ErrorKind.CONNECTION)


def working(rehearsal: Rehearsal) -> Background:
    """Another worker, that works on what is due of the account."""
    return Background(lambda: Engine().sweep(rehearsal.account.pk))


def refused(work: Callable[[], Any]) -> Any:
    """Return the error that refuses it, or None."""
    try:
        work()
    except LeaseError as error:
        return error
    return None


PLACES = {
    "the start": ("hooks", "start"),
    "the reply of the start": ("after", "start"),
    "the saving": ("hooks", "archive"),
    "the last piece of the saving": ("after", "archive"),
    "the stop behind it": ("hooks", "stop"),
    "the reply of the stop": ("after", "stop"),
}
"""Where an attempt can be while others act: between which writes, by the call that it waits for."""


def inside(rehearsal: Rehearsal, place: str) -> Once:
    when, call = PLACES[place]
    gate = Once()
    getattr(rehearsal.world, when)[call] = gate
    return gate


@pytest.fixture
def reusable(rehearsal: Rehearsal) -> Lease:
    """A released sandbox that the next run of the environment would get."""
    return failed(rehearsal, Policy.REUSE_BY_ENVIRONMENT)


def another_run(rehearsal: Rehearsal) -> Run:
    return factories.run(rehearsal.company)


def acquire(rehearsal: Rehearsal) -> Lease:
    return leases.acquire(rehearsal.environment.pk, company_id=rehearsal.company.pk, run_id=another_run(rehearsal).pk)


# The window


@pytest.mark.parametrize("place", PLACES)
def test_in_its_window_nobody_gets_it_destroys_it_or_takes_it_for_ended(
    rehearsal: Rehearsal, reusable: Lease, place: str
) -> None:
    """S-247: from the first write of an attempt to the receipt of its stop."""
    lease, gate = reusable, inside(rehearsal, place)
    recovery = recover(lease)
    at_work = working(rehearsal)
    gate.wait()

    lease.refresh_from_db()
    assert not proof.is_proven_ended(lease)
    assert not proof.receipts(lease).exists()
    other = acquire(rehearsal)
    assert other.resource_id != lease.resource_id
    with suppress(LeaseError):
        keeping.destroy_now(lease.pk, company_id=lease.company_id, actor="operator", reason="away with it")
    error = refused(lambda: recover(lease))
    assert error is not None
    assert error.code == "recovery_running"
    Lease.objects.filter(pk=lease.pk, kept_until__isnull=False).update(kept_until=factories.at(-1))
    Obligation.objects.filter(kind="dispose", lease=lease, closed_at=None).update(due_at=factories.at(-1))
    sweep(rehearsal)
    assert rehearsal.world.count("delete") == 0
    assert not archives.offered(company_id=lease.company_id, lease_id=lease.pk).exists()

    gate.open()
    at_work.result()
    sweep(rehearsal)
    recovery.refresh_from_db()
    assert (recovery.state, recovery.attempts) == ("complete", 1)
    assert rehearsal.world.count("start") == 1
    assert contents(Archive.objects.get(receipt__isnull=False)) == FILES
    assert lease.resource_id != other.resource_id


def test_while_it_is_started_it_is_held_by_name(rehearsal: Rehearsal, reusable: Lease) -> None:
    """S-247: whoever asks is told why."""
    gate = inside(rehearsal, "the start")
    recover(reusable)
    at_work = working(rehearsal)
    gate.wait()
    reusable.refresh_from_db()
    with pytest.raises(keeping.Held) as caught:
        keeping.destroy_now(reusable.pk, company_id=reusable.company_id, actor="operator", reason="away with it")
    assert "recovering" in str(caught.value.__dict__) or "recovering" in {
        reason.name for reason in holds.of(reusable).reasons
    }
    gate.open()
    at_work.result()
    sweep(rehearsal)
    assert (state(reusable), reusable.epoch) == ("released", 2)


@pytest.mark.parametrize("turn", range(4))
def test_an_acquire_and_the_begin_of_a_recovery_exclude_each_other(
    rehearsal: Rehearsal, reusable: Lease, turn: int
) -> None:
    got, error = together(lambda: acquire(rehearsal), lambda: refused(lambda: recover(reusable)))
    sweep(rehearsal)
    reusable.refresh_from_db()
    if error is None:
        assert got.resource_id != reusable.resource_id
        assert (reusable.state, reusable.epoch) == ("released", 2)
    else:
        assert got.resource_id == reusable.resource_id
        assert error.code in {"not_kept", "not_proven"}
        assert not Recovery.objects.exists()
    assert rehearsal.world.of(got.resource_id).state == "running"


@pytest.mark.parametrize("turn", range(4))
def test_an_operators_destroy_and_the_begin_of_a_recovery_exclude_each_other(rehearsal: Rehearsal, turn: int) -> None:
    lease = failed(rehearsal)
    away, error = together(
        lambda: refused(
            lambda: keeping.destroy_now(lease.pk, company_id=lease.company_id, actor="operator", reason="away")
        ),
        lambda: refused(lambda: recover(lease)),
    )
    assert (away is None) != (error is None)
    sweep(rehearsal)
    if error is None:
        assert isinstance(away, keeping.Held)
        assert (state(lease), evidence(lease)) == ("retained", ["stopped", "stopped"])
    else:
        assert error.code == "not_kept"
        assert lease.resource_id not in rehearsal.world.boxes


@pytest.mark.parametrize("turn", range(3))
def test_many_that_ask_at_once_begin_one_generation(rehearsal: Rehearsal, turn: int) -> None:
    lease = failed(rehearsal)
    errors = together(*[lambda: refused(lambda: recover(lease))] * 4)
    assert sorted(error.code if error else "" for error in errors) == ["", *["recovery_running"] * 3]
    assert Recovery.objects.count() == 1


@pytest.mark.parametrize("turn", range(3))
def test_engines_that_come_at_once_make_one_attempt(rehearsal: Rehearsal, turn: int) -> None:
    lease = failed(rehearsal)
    recovery = recover(lease)
    together(*[lambda: Engine().sweep(rehearsal.account.pk)] * 4)
    sweep(rehearsal)
    recovery.refresh_from_db()
    assert (recovery.state, recovery.attempts, rehearsal.world.count("start")) == ("complete", 1, 1)
    assert (state(lease), evidence(lease)) == ("retained", ["stopped", "stopped"])


@pytest.mark.parametrize("turn", range(3))
def test_who_watches_and_who_tries_again_do_not_disturb_each_other(rehearsal: Rehearsal, turn: int) -> None:
    """An attempt and the look at what may be running are due at the same moment, for several workers."""
    lease = failed(rehearsal)
    rehearsal.world.hooks["start"] = fails(ErrorKind.CONNECTION)
    recovery = recover(lease)
    sweep(rehearsal)
    assert open_kinds(lease) == {"dispose", "end_recovery", "recover_workspace", "watch_restart"}
    rehearsal.world.hooks.clear()
    shift(bounds.START_OVER + 1)
    together(*[lambda: Engine().sweep(rehearsal.account.pk)] * 4)
    for _ in range(3):
        for row in lease.obligations.filter(closed_at=None).exclude(kind__in=["dispose", "end_recovery"]):
            falls_due(row)
        sweep(rehearsal)
    recovery.refresh_from_db()
    lease.refresh_from_db()
    assert (recovery.state, recovery.attempts) == ("complete", 2)
    assert (lease.state, lease.epoch, lease.may_be_running_since) == ("retained", 2, None)
    assert proof.is_proven_ended(lease)
    assert rehearsal.world.of(lease.resource_id).state == "stopped"


# A Stop


@pytest.mark.parametrize("place", PLACES)
def test_a_stop_ends_it_wherever_it_is(rehearsal: Rehearsal, place: str) -> None:
    lease, gate = failed(rehearsal), inside(rehearsal, place)
    recovery = recover(lease)
    at_work = working(rehearsal)
    gate.wait()
    assert leases.stop(company_id=lease.company_id, lease_id=lease.pk, actor="user") >= 1
    recovery.refresh_from_db()
    if place not in ("the stop behind it", "the reply of the stop"):
        assert recovery.failure == "stopped"
    gate.open()
    at_work.result()
    sweep(rehearsal)
    comes_to_rest(rehearsal, lease)
    recovery.refresh_from_db()
    saved = place in ("the stop behind it", "the reply of the stop")
    assert (recovery.state, recovery.failure) in {("exhausted", "stopped"), ("complete" if saved else "exhausted", "")}
    assert saved or recovery.failure == "stopped"
    assert rehearsal.world.of(lease.resource_id).state == "stopped"
    assert proof.is_proven_ended(lease)
    assert open_kinds(lease) == {"dispose"}
    offered = archives.offered(company_id=lease.company_id, lease_id=lease.pk).exists()
    assert offered == (recovery.state == "complete")


def comes_to_rest(rehearsal: Rehearsal, lease: Lease, *, attempts_too: bool = False) -> None:
    """Let time pass, past every bound of a call and every protection, and work on what falls due."""
    kinds = ["dispose", "end_recovery", *([] if attempts_too else ["recover_workspace"])]
    for _ in range(6):
        Recovery.objects.filter(next_attempt_at__isnull=False).update(next_attempt_at=factories.at(0))
        shift(PROTECTION_AND_MORE, only=CALLS)
        rows = Obligation.objects.filter(lease=lease) | Obligation.objects.filter(operation__source=lease)
        for row in rows.filter(closed_at=None, due_at__isnull=False).exclude(kind__in=kinds):
            falls_due(row)
        sweep(rehearsal)


# An attempt that was superseded, and hears its reply late


def superseded(lease: Lease) -> None:
    """Time passes with the worker suspended: what it holds is anybody's, and no call of it counts any more."""
    shift(PROTECTION_AND_MORE, only=CALLS)
    rows = Obligation.objects.filter(lease=lease) | Obligation.objects.filter(operation__source=lease)
    rows = rows.filter(closed_at=None, due_at__isnull=False).exclude(kind__in=["dispose", "end_recovery"])
    rows.update(due_at=factories.at(-1))
    Recovery.objects.filter(next_attempt_at__isnull=False).update(next_attempt_at=factories.at(0))


def nothing_is_lost(rehearsal: Rehearsal, lease: Lease) -> None:
    """It is stopped and proven so, nothing but its end is owed, and no archive is offered that is not whole."""
    comes_to_rest(rehearsal, lease, attempts_too=True)
    lease.refresh_from_db()
    assert rehearsal.world.of(lease.resource_id).state == "stopped"
    assert (lease.state, proof.is_proven_ended(lease), lease.may_be_running_since) == ("retained", True, None)
    assert open_kinds(lease) == {"dispose"}
    assert not Operation.objects.filter(state="pending").exists()
    assert not Attempt.objects.filter(obligation__lease=lease, finished_at=None).exists()
    for archive in archives.offered(company_id=lease.company_id, lease_id=lease.pk):
        assert contents(archive) == FILES
        assert archive.receipt is not None
        assert archive.receipt.epoch >= archive.epoch


@pytest.mark.parametrize("when", ["not done until then", "done before"])
@pytest.mark.parametrize("reply", ["answered", "lost"])
@pytest.mark.parametrize("meanwhile", ["nothing", "settled", "saved"])
def test_a_restart_that_is_confirmed_late_is_stopped(
    rehearsal: Rehearsal, when: str, reply: str, meanwhile: str
) -> None:
    """Its start was withdrawn, or taken for somebody's, before its worker heard; it may even take effect after that."""
    lease = failed(rehearsal)
    gate = Once(no_reply if reply == "lost" and when == "done before" else None)
    if when == "done before":
        rehearsal.world.after["start"] = gate
    else:
        rehearsal.world.hooks["start"] = gate
        if reply == "lost":
            rehearsal.world.after["start"] = lost_after(gate)
    recover(lease)
    late = working(rehearsal)
    gate.wait()
    superseded(lease)
    if meanwhile == "settled":
        Engine().sweep(rehearsal.account.pk, selection=Selection(kinds=("recover_start",)))
    elif meanwhile == "saved":
        for _ in range(3):
            sweep(rehearsal)
            superseded(lease)
    gate.open()
    late.result()
    nothing_is_lost(rehearsal, lease)
    assert Recovery.objects.get().state == "complete"


def lost_after(gate: Gate) -> Callable[[str], None]:
    """Lose the reply of the first call that went through the gate."""
    lost: list[str] = []

    def hook(subject: str) -> None:
        if gate.opened.is_set() and not lost:
            lost.append(subject)
            no_reply()

    return hook


@pytest.mark.parametrize("meanwhile", ["nothing", "settled", "saved"])
@pytest.mark.parametrize("seen", ["stopped", "not seen", "running"])
def test_a_stop_that_is_answered_late_changes_nothing_that_is_newer(
    rehearsal: Rehearsal, meanwhile: str, seen: str
) -> None:
    """The stop of a restart that failed: what it saw is written, and bound to what it was asked about."""
    lease, gate = failed(rehearsal), Once()
    rehearsal.world.hooks["start"] = once(fails(ErrorKind.CONNECTION))
    rehearsal.world.after["stop"] = gate
    recover(lease)
    late = working(rehearsal)
    gate.wait()
    superseded(lease)
    if meanwhile == "settled":
        Engine().sweep(rehearsal.account.pk, selection=Selection(kinds=("recover_start",)))
    elif meanwhile == "saved":
        for _ in range(3):
            sweep(rehearsal)
            superseded(lease)
    if seen == "running":
        rehearsal.world.of(lease.resource_id).state = "running"
    elif seen == "not seen":
        rehearsal.world.hooks["inspect"] = once(fails(ErrorKind.SERVER))
    gate.open()
    late.result()
    nothing_is_lost(rehearsal, lease)
    assert Recovery.objects.get().state == "complete"


def once(hook: Callable[[str], None]) -> Callable[[str], None]:
    """Let the first call meet this, and no other."""
    met: list[str] = []

    def first(subject: str) -> None:
        if not met:
            met.append(subject)
            hook(subject)

    return first


@pytest.mark.parametrize("place", ["the saving", "the last piece of the saving"])
@pytest.mark.parametrize("meanwhile", ["nothing", "stopped", "saved"])
def test_a_saving_that_ends_late_offers_nothing_that_its_stop_may_have_cut(
    rehearsal: Rehearsal, place: str, meanwhile: str
) -> None:
    lease, gate = failed(rehearsal), inside(rehearsal, place)
    recover(lease)
    late = working(rehearsal)
    gate.wait()
    superseded(lease)
    if meanwhile == "stopped":
        Engine().sweep(rehearsal.account.pk, selection=Selection(kinds=("teardown",)))
    elif meanwhile == "saved":
        for _ in range(3):
            sweep(rehearsal)
            superseded(lease)
    gate.open()
    late.result()
    nothing_is_lost(rehearsal, lease)
    assert Recovery.objects.get().state == "complete"
    assert archives.offered(company_id=lease.company_id, lease_id=lease.pk).count() == 1


def test_the_end_of_its_time_waits_for_an_attempt_at_work(rehearsal: Rehearsal) -> None:
    lease, gate = failed(rehearsal), inside(rehearsal, "the start")
    recovery = recover(lease)
    at_work = working(rehearsal)
    gate.wait()
    shift(recovering.WINDOW, only={"leases_recovery"})
    falls_due(owed(lease, "end_recovery"))
    sweep(rehearsal)
    recovery.refresh_from_db()
    assert recovery.state == "running"
    gate.open()
    at_work.result()
    sweep(rehearsal)
    recovery.refresh_from_db()
    assert recovery.state == "complete", "what it saved by then is not given up"


@pytest.mark.parametrize("turn", range(3))
def test_the_end_of_its_time_and_its_last_attempt_settle_it_once(rehearsal: Rehearsal, turn: int) -> None:
    lease = failed(rehearsal)
    rehearsal.world.hooks["start"] = fails(ErrorKind.REFUSED)
    recovery = recover(lease)
    sweep(rehearsal)
    shift(recovering.WINDOW + 1)
    account = rehearsal.account.pk
    together(lambda: Engine().sweep(account), sweep_lane, lambda: Engine().sweep(account))
    sweep(rehearsal)
    recovery.refresh_from_db()
    assert (recovery.state, recovery.attempts, recovery.failure) == ("exhausted", 1, "provider_unavailable")
    assert rehearsal.world.count("start") == 1
    assert (state(lease), open_kinds(lease)) == ("retained", {"dispose"})


def test_nobody_gets_a_sandbox_that_a_recovery_of_its_start_may_still_stop(
    rehearsal: Rehearsal, reusable: Lease
) -> None:
    """Its stop is under way when others settle that start: its generation ends, and an operator begins another."""
    lease, recovery = reusable, recover(reusable)
    with transaction.atomic():  # an attempt that died behind its journal
        locked = Lease.objects.select_for_update(no_key=True).get(pk=lease.pk)
        operation = recovering.journal_start(locked, recovery)
    shift(bounds.START_OVER + 1)
    box, gate = rehearsal.world.of(lease.resource_id), inside(rehearsal, "the stop behind it")
    box.state = "unknown"
    row = Obligation.objects.get(operation=operation)
    selection = Selection(obligation_id=row.pk)
    at_work = Background(lambda: Engine().sweep(rehearsal.account.pk, selection=selection))
    gate.wait()
    box.state = "stopped"
    Recovery.objects.filter(pk=recovery.pk).update(ends_at=factories.at(0))
    falls_due(owed(lease, "end_recovery"))
    sweep(rehearsal)
    recovery.refresh_from_db()
    assert recovery.state == "exhausted"

    second = recover(lease)
    sweep(rehearsal)
    assert rehearsal.world.count("start") == 0
    gate.open()
    at_work.result()
    shift(bounds.LONGEST_CALL + bounds.SEND_MARGIN, only=CALLS)
    falls_due(owed(lease, "recover_workspace"))
    sweep(rehearsal)
    second.refresh_from_db()
    assert (second.state, rehearsal.world.count("start")) == ("complete", 1)
    other = acquire(rehearsal)
    assert (other.resource_id, box.state) == (lease.resource_id, "running")
