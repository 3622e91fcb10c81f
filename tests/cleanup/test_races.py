"""The engine under concurrency, on real connections: who may write, who may call, and what is never lost."""

from __future__ import annotations

import threading
import time

import pytest
from django.db import connection, transaction

import leases
from cleanup import claims
from cleanup.claims import claim, new_ids
from cleanup.engine import Engine
from leases.clock import boottime
from leases.models import ActivityEntry, Attempt, Lease, Obligation, Receipt
from leases.waking import wake
from providers.contract import ErrorKind, ProviderError
from tests import factories
from tests.concurrency import Background, Gate, elsewhere, lost_commit_reply, together
from tests.stage import Rehearsal


def _released(rehearsal: Rehearsal) -> Lease:
    lease = leases.acquire(rehearsal.environment.pk, company_id=rehearsal.company.pk, run_id=rehearsal.run.pk)
    return leases.release(lease.pk)


def _owed(lease: Lease) -> Obligation:
    return Obligation.objects.filter(lease=lease, kind="teardown").latest("pk")


def _protection_ends(row: Obligation) -> None:
    """The passing of time, by moving the row: its attempt's protection is over."""
    with connection.cursor() as cursor:
        cursor.execute("UPDATE leases_obligation SET due_at = now() - interval '1 s' WHERE id = %s", [row.pk])


def test_two_sweeps_on_one_lease_make_one_teardown(rehearsal) -> None:
    """S-163, S-164."""
    lease = _released(rehearsal)
    account = rehearsal.account.pk
    tallies = together(*[lambda: Engine().sweep(account) for _ in range(4)])
    assert sum(tally.claimed for tally in tallies) == 1
    assert rehearsal.world.count("delete") == 1
    assert Attempt.objects.filter(obligation=_owed(lease)).count() == 1
    lease.refresh_from_db()
    assert lease.state == Lease.State.EXPIRED


def test_two_claimers_at_a_full_account_do_not_pass_its_limit(rehearsal) -> None:
    rehearsal.account.concurrency_limit = 3
    rehearsal.account.save()
    for _ in range(8):
        _released(rehearsal)
    account = rehearsal.account.pk
    claimed = together(*[lambda: claim(account, new_ids(3), worker="w", clock=boottime) for _ in range(4)])
    assert sum(len(rows) for rows in claimed) == 3
    assert Obligation.objects.filter(attempt_id__isnull=False).count() == 3
    assert claim(account, new_ids(3), worker="w", clock=boottime) == []


def test_a_row_whose_protection_ended_frees_its_place_and_is_due(rehearsal) -> None:
    """S-168, S-188: a crash after the claim needs no detector."""
    rehearsal.account.concurrency_limit = 1
    rehearsal.account.save()
    lease = _released(rehearsal)
    (dead,) = claim(rehearsal.account.pk, new_ids(1), worker="dead", clock=boottime)
    assert Engine().sweep(rehearsal.account.pk).claimed == 0
    _protection_ends(_owed(lease))
    assert Engine().sweep(rehearsal.account.pk).outcomes == {"proven": 1}
    assert Attempt.objects.get(pk=dead.attempt_id).outcome == "superseded"


def test_a_wake_between_evaluation_and_settle_makes_the_row_due_at_once(rehearsal) -> None:
    lease = _released(rehearsal)
    box, row = rehearsal.world.of(lease.resource_id), _owed(lease)
    box.state = "busy"

    def wake_after_the_first_look(_: str) -> None:
        if rehearsal.world.count("inspect") == 1:
            elsewhere(lambda: wake(row.pk))

    def the_transition_ends(_: str) -> None:
        if rehearsal.world.count("inspect") == 1:
            box.state = "running"

    rehearsal.world.after["inspect"] = wake_after_the_first_look
    rehearsal.world.hooks["identify"] = the_transition_ends
    tally = Engine().sweep(rehearsal.account.pk)
    # The first attempt found a transition; the wake made the row due now, so the same sweep found it again.
    assert tally.outcomes == {"busy": 1, "proven": 1}


def test_without_a_wake_a_transition_is_looked_at_later(rehearsal) -> None:
    """The control of the test above: the row is not due at once by itself."""
    lease = _released(rehearsal)
    rehearsal.world.of(lease.resource_id).state = "busy"
    assert Engine().sweep(rehearsal.account.pk).outcomes == {"busy": 1}
    row = _owed(lease)
    assert row.failures == 0
    assert row.busy_count == 1
    assert not Obligation.objects.filter(pk=row.pk, due_at__lte=factories.database_now()).exists()


@pytest.mark.parametrize(("explicit", "outcomes"), [(False, {"failed": 1}), (True, {"failed": 1, "proven": 1})])
def test_a_failure_keeps_its_cooldown_unless_a_person_asked(rehearsal, explicit, outcomes) -> None:
    lease = _released(rehearsal)
    row = _owed(lease)

    def fail_once(_: str) -> None:
        del rehearsal.world.hooks["inspect"]
        elsewhere(lambda: wake(row.pk, explicit=explicit))
        raise ProviderError(ErrorKind.REFUSED)

    rehearsal.world.hooks["inspect"] = fail_once
    assert Engine().sweep(rehearsal.account.pk).outcomes == outcomes


def test_a_superseded_attempt_that_succeeds_late_undoes_nothing(rehearsal) -> None:
    """S-171."""
    lease = _released(rehearsal)
    row = _owed(lease)
    gate = Gate()
    rehearsal.world.after["delete"] = gate
    slow = Background(lambda: Engine().sweep(rehearsal.account.pk))
    gate.wait()
    del rehearsal.world.after["delete"]
    _protection_ends(row)
    assert Engine().sweep(rehearsal.account.pk).outcomes == {"proven": 1}
    lease.refresh_from_db()
    before = (lease.state, _owed(lease).closed_at)
    gate.open()
    assert slow.result().outcomes == {"superseded": 1}
    lease.refresh_from_db()
    assert (lease.state, _owed(lease).closed_at) == before
    # Both learned it, and both say so; the lease was settled by the newer attempt's receipt, once.
    assert list(Receipt.objects.filter(lease=lease).values_list("evidence", flat=True)) == ["destroyed", "destroyed"]
    assert ActivityEntry.objects.filter(action="lease.teardown.confirmed", subject_id=str(lease.pk)).count() == 1


def test_a_superseded_attempt_that_fails_late_changes_nothing(rehearsal) -> None:
    """S-172."""
    lease = _released(rehearsal)
    gate = Gate()

    def fail_late(_: str) -> None:
        gate()
        raise ProviderError(ErrorKind.SERVER)

    rehearsal.world.hooks["delete"] = fail_late
    slow = Background(lambda: Engine().sweep(rehearsal.account.pk))
    gate.wait()
    del rehearsal.world.hooks["delete"]
    _protection_ends(_owed(lease))
    assert Engine().sweep(rehearsal.account.pk).outcomes == {"proven": 1}
    gate.open()
    slow.result()
    rehearsal.account.refresh_from_db()
    assert rehearsal.account.circuit_failures == 0
    lease.refresh_from_db()
    assert lease.state == Lease.State.EXPIRED


def test_a_superseded_attempt_that_learns_a_receipt_leaves_it_for_the_next(rehearsal) -> None:
    """Evidence is never fenced away: the row is woken, and its next attempt settles without asking the provider."""
    lease = _released(rehearsal)
    row = _owed(lease)
    gate = Gate()
    rehearsal.world.after["inspect"] = lambda _: gate() if not rehearsal.world.boxes else None
    slow = Background(lambda: Engine().sweep(rehearsal.account.pk))
    gate.wait()  # deleted, and seen to be gone; the answer is on its way
    rehearsal.world.after.clear()
    _protection_ends(row)
    (current,) = claim(rehearsal.account.pk, new_ids(1), worker="current", clock=boottime)
    gate.open()
    assert slow.result().outcomes == {"superseded": 1}
    assert Receipt.objects.filter(lease=lease).count() == 1
    row.refresh_from_db()
    assert row.attempt_id == current.attempt_id
    assert row.wakes > current.wakes
    calls = len(rehearsal.world.calls)
    claims.postpone(current, Attempt.Outcome.BUSY, delay=300, busy=True)  # due now instead, because of the wake
    assert Engine().sweep(rehearsal.account.pk).outcomes == {"proven": 1}
    assert len(rehearsal.world.calls) == calls
    assert Receipt.objects.filter(lease=lease).count() == 1


@pytest.mark.parametrize("call", ["stop", "delete"])
def test_a_suspended_worker_does_not_send_late(rehearsal, call) -> None:
    """A fence stops writes, not calls: sent only while the protection still covers the call's bound."""
    rehearsal.environment.policy = "reuse_by_environment" if call == "stop" else "ephemeral"
    rehearsal.environment.save()
    lease = _released(rehearsal)
    suspended = 0.0

    def clock() -> float:
        # The process is stopped between the announcement's commit and the sending, in the thread of the call.
        nonlocal suspended
        if threading.current_thread().name == f"call-{call}":
            suspended = 16 * 60.0
        return boottime() + suspended

    stop = threading.Event()
    engine = Engine(clock=clock, stopping=stop.is_set, on_finished=lambda _: stop.set())
    assert engine.sweep(rehearsal.account.pk).outcomes == {"handed_back": 1}
    assert rehearsal.world.count(call) == 0
    attempt = Attempt.objects.get(obligation=_owed(lease))
    assert attempt.announced_call == call
    _protection_ends(_owed(lease))  # it is due again in a moment
    assert Engine().sweep(rehearsal.account.pk).outcomes == {"proven": 1}


def test_a_claim_whose_commit_reply_is_lost_is_still_worked(rehearsal, monkeypatch) -> None:
    lease = _released(rehearsal)
    engine = Engine()
    monkeypatch.setattr(claims, "escalate_overdue", lambda _: None)  # so that the next commit is the claim's
    with lost_commit_reply() as happened:
        tally = engine.sweep(rehearsal.account.pk)
    assert happened
    assert tally.outcomes == {"proven": 1}
    assert Attempt.objects.filter(obligation=_owed(lease)).count() == 1


def test_a_settle_whose_commit_reply_is_lost_is_written_once(rehearsal) -> None:
    lease = _released(rehearsal)
    engine = Engine()
    context = lost_commit_reply()
    happened = []
    original_send = engine._send

    def send(task, call) -> None:
        original_send(task, call)
        if call.name == "identify" and not rehearsal.world.boxes:
            happened.append(context.__enter__())  # the next commit of this thread is the settle's

    engine._send = send
    try:
        engine.sweep(rehearsal.account.pk)
    finally:
        context.__exit__(None, None, None)
    assert happened
    assert happened[0]
    lease.refresh_from_db()
    assert lease.state == Lease.State.EXPIRED
    assert Receipt.objects.filter(lease=lease).count() == 1
    assert Attempt.objects.get(obligation=_owed(lease)).outcome == "proven"


def test_a_terminated_backend_costs_no_attempt(rehearsal) -> None:
    """K-40: PostgreSQL restarts in the middle; the worker goes on with a new connection."""
    lease = _released(rehearsal)
    pids = []

    def terminate(_: str) -> None:
        del rehearsal.world.hooks["inspect"]

        def kill() -> None:
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_terminate_backend(%s)", [pids[0]])

        elsewhere(kill)

    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        pids.append(cursor.fetchone()[0])
    rehearsal.world.hooks["inspect"] = terminate
    assert Engine().sweep(rehearsal.account.pk).outcomes == {"handed_back": 1}
    _protection_ends(_owed(lease))  # it is due again in a moment
    Engine().sweep(rehearsal.account.pk)
    lease.refresh_from_db()
    assert lease.state == Lease.State.EXPIRED
    assert _owed(lease).failures == 0


def test_a_hanging_adapter_delays_nobody_and_is_given_up_on(rehearsal, monkeypatch) -> None:
    """S-127, K-24: the engine has a bound of its own over an adapter that breaks its contract."""
    monkeypatch.setattr("cleanup.engine.HANG_MARGIN", 0.2)
    monkeypatch.setattr("leases.bounds.INSPECT", 0.1)
    hanging, good = _released(rehearsal), _released(rehearsal)
    forever = threading.Event()
    rehearsal.world.hooks["inspect"] = lambda subject: forever.wait(60) if subject == hanging.resource_id else None
    started = time.monotonic()
    tally = Engine().sweep(rehearsal.account.pk)
    assert time.monotonic() - started < 30
    forever.set()
    assert tally.outcomes == {"failed": 1, "proven": 1}
    good.refresh_from_db()
    assert good.state == Lease.State.EXPIRED
    assert _owed(hanging).last_error_kind == "timeout"


def test_renewal_touches_only_its_own_attempt(rehearsal) -> None:
    """S-179, S-181, S-183, domain I-13."""
    lease = _released(rehearsal)
    (old,) = claim(rehearsal.account.pk, new_ids(1), worker="old", clock=boottime)
    row = _owed(lease)
    with connection.cursor() as cursor:
        cursor.execute("UPDATE leases_obligation SET due_at = now() + interval '1 min' WHERE id = %s", [row.pk])
    claims.renew([old], clock=boottime)
    row.refresh_from_db()
    assert (row.due_at - factories.database_now()).total_seconds() > 14 * 60
    claims.postpone(old, Attempt.Outcome.FAILED, delay=60, failed=True, error_kind="refused")
    row.refresh_from_db()
    cooling = row.due_at
    claims.renew([old], clock=boottime)
    row.refresh_from_db()
    assert row.due_at == cooling
    assert old.lost


def test_a_renewal_skips_a_row_that_is_being_written(rehearsal) -> None:
    """It neither waits (a deadlock with a Stop that locks several rows) nor takes the row for lost."""
    _released(rehearsal)
    (mine,) = claim(rehearsal.account.pk, new_ids(1), worker="mine", clock=boottime)
    gate = Gate()

    def hold() -> None:
        with transaction.atomic():
            Obligation.objects.select_for_update().get(pk=mine.obligation_id)
            gate()

    holder = Background(hold)
    gate.wait()
    claims.renew([mine], clock=boottime)
    gate.open()
    holder.result()
    assert not mine.lost


def test_a_wake_is_never_lost_between_racing_writers(rehearsal) -> None:
    """Three connections wake one row while attempts at it are settled again and again: no wake goes unseen."""
    lease = _released(rehearsal)
    row = _owed(lease)
    seen = []

    def attempts() -> None:
        while not done.is_set() or claimable():
            for one in claim(rehearsal.account.pk, new_ids(1), worker="w", clock=boottime):
                seen.append(one.wakes)
                claims.postpone(one, Attempt.Outcome.BUSY, delay=300, busy=True)

    def claimable() -> bool:
        return Obligation.objects.filter(pk=row.pk, due_at__lte=factories.database_now()).exists()

    done = threading.Event()
    settling = Background(attempts)
    together(*[lambda: [wake(row.pk) for _ in range(25)] for _ in range(3)])
    done.set()
    settling.result()
    row.refresh_from_db()
    # The row sleeps now, and the last attempt was claimed when all wakes had been counted.
    assert row.wakes == 75
    assert seen[-1] == 75
