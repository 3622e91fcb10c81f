"""U, history: leases that ended without proof are looked at now and then, and never instead of anything else."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from io import StringIO
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from django.core.management import CommandError, call_command
from django.db import IntegrityError, connection, transaction

import leases
from cleanup import claims
from cleanup import evidence as evidence_of
from cleanup.claims import Selection, claim, new_ids
from cleanup.engine import Engine
from leases import deciding, history, holds, proof, retrying, transitions
from leases.clock import boottime
from leases.models import Attempt, Environment, Lease, Obligation, Receipt
from leases.waking import wake
from providers.contract import ErrorKind, Gone, Running
from providers.registry import open_provider
from tests import factories
from tests.concurrency import Background, Gate, elsewhere
from tests.providers.local_harness import left_below
from tests.scenarios.steps import (
    attempts,
    audited,
    due_in,
    evidence,
    fails,
    owed,
    owed_for,
    released,
    snapshot,
    state,
    sweep,
)
from tests.stage import Rehearsal

(MIGRATION,) = (path.stem for path in (Path(leases.__file__).parent / "migrations").glob("*_history.py"))
MINUTES = 60.0
DAYS = 86_400.0
WHO: dict[str, Any] = {"actor": "olga", "reason": "the provider is no more"}


def given_up(stage: Rehearsal, policy: str = "ephemeral", **how: Any) -> Lease:
    """A lease whose teardown an operator settled without proof; its sandbox runs on."""
    lease = released(stage, policy, **how)
    row = owed(lease)
    deciding.settle_unverified(row.pk, confirmation=deciding.confirmation_of(row), company_id=row.company_id, **WHO)
    stage.world.calls.clear()
    return lease


def passes(row: Obligation, seconds: float) -> None:
    """Let time pass for one row, by moving everything that it says about the past and the future."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            UPDATE leases_obligation
               SET due_at = due_at - %(s)s * interval '1 s', not_before = not_before - %(s)s * interval '1 s',
                   owed_since = owed_since - %(s)s * interval '1 s',
                   absent_since = absent_since - %(s)s * interval '1 s'
             WHERE id = %(id)s
            """,
            {"s": seconds, "id": row.pk},
        )


def falls_due(row: Obligation) -> None:
    """Let the time until the next look pass."""
    passes(row, due_in(row) + 1)


def looks(stage: Rehearsal) -> int:
    return stage.world.count("inspect")


# --- When it is looked at -------------------------------------------------------------------------------------------


def test_what_is_given_up_is_looked_at_five_minutes_later_and_nothing_is_done_before(rehearsal: Rehearsal) -> None:
    lease = given_up(rehearsal)
    row = owed(lease)
    assert (row.kind, row.verb, row.account_id) == ("verify_end", "delete", rehearsal.account.pk)
    assert due_in(row) == pytest.approx(5 * MINUTES, abs=20)
    assert sweep(rehearsal) == {}
    assert rehearsal.world.calls == []


def test_each_wait_is_twice_the_last_one_up_to_six_hours(rehearsal: Rehearsal) -> None:
    """S-271 (superseded: it backs off)."""
    lease = given_up(rehearsal)
    rehearsal.world.of(lease.resource_id).state = "unknown"
    row, waits = owed(lease), []
    for _ in range(9):
        falls_due(row)
        assert sweep(rehearsal) == {"not_seen": 1}
        waits.append(due_in(row) / MINUTES)
    assert waits == pytest.approx([5, 10, 20, 40, 80, 160, 320, 360, 360], rel=0.02)
    row.refresh_from_db()
    assert (row.escalated_at, row.failures, row.quiet) == (None, 0, "")


def test_a_hundred_writes_make_it_no_more_than_one_look(rehearsal: Rehearsal) -> None:
    """S-270: at least five minutes apart, however many wakes there are, at rest and during a look."""
    lease = given_up(rehearsal)
    rehearsal.world.of(lease.resource_id).state = "unknown"
    row = owed(lease)

    def wake_it(times: int) -> None:
        for _ in range(times):
            wake(row.pk)

    wake_it(50)
    assert sweep(rehearsal) == {}
    falls_due(row)
    rehearsal.world.hooks["inspect"] = lambda _: elsewhere(lambda: wake_it(20))
    assert sweep(rehearsal) == {"not_seen": 1}
    assert 3 * MINUTES < due_in(row) <= 5 * MINUTES + 30
    due_at = row.due_at
    for _ in range(50):
        wake_it(1)
        assert sweep(rehearsal) == {}
    assert looks(rehearsal) == 1
    row.refresh_from_db()
    assert row.due_at == due_at


@pytest.mark.parametrize("call", ["identify", "inspect"])
@pytest.mark.parametrize(
    "kind", [ErrorKind.SERVER, ErrorKind.TIMEOUT, ErrorKind.BUSY, ErrorKind.NOT_READY, ErrorKind.RATE_LIMITED]
)
def test_whatever_the_provider_answers_the_next_look_is_as_far_away(
    rehearsal: Rehearsal, call: str, kind: ErrorKind
) -> None:
    """S-271 (superseded: it backs off): uncertainty keeps it going, and is no reason to ask more often."""
    lease = given_up(rehearsal)
    row = owed(lease)
    rehearsal.world.hooks[call] = fails(kind)
    falls_due(row)
    assert Engine().sweep(rehearsal.account.pk).claimed == 1
    assert due_in(row) >= 5 * MINUTES - 1
    row.refresh_from_db()
    assert (row.closed_at, row.quiet, row.escalated_at) == (None, "", None)
    assert state(lease) == "failed"


def test_it_escalates_neither_by_its_age_nor_by_its_failures(rehearsal: Rehearsal) -> None:
    lease = given_up(rehearsal)
    row = owed(lease)
    rehearsal.world.hooks["inspect"] = fails(ErrorKind.PROTOCOL)
    for _ in range(7):
        falls_due(row)
        assert sweep(rehearsal) == {"failed": 1}
    row.refresh_from_db()
    assert (row.failures, row.escalated_at) == (7, None)
    assert audited("obligation.escalated", row) == 0


def test_a_worker_that_dies_while_it_looks_costs_one_protection_and_no_second_look_at_once(
    rehearsal: Rehearsal,
) -> None:
    lease = given_up(rehearsal)
    row = owed(lease)
    falls_due(row)
    (dead,) = claim(rehearsal.account.pk, new_ids(1), worker="dead", clock=boottime)
    assert sweep(rehearsal) == {}
    rehearsal.world.boxes.clear()
    falls_due(row)
    assert sweep(rehearsal) == {"proven": 1}
    assert sorted(attempts(row)) == ["proven", "superseded"]
    assert dead.obligation_id == row.pk


def test_history_comes_last_and_takes_a_tenth_of_the_account_at_most(rehearsal: Rehearsal) -> None:
    rehearsal.account.concurrency_limit = 20
    rehearsal.account.save()
    for _ in range(5):
        falls_due(owed(given_up(rehearsal)))
    fresh = [owed(released(rehearsal)).pk for _ in range(3)]

    def claimed(count: int) -> list[str]:
        return [one.kind for one in claim(rehearsal.account.pk, new_ids(count), worker="test", clock=boottime)]

    assert claimed(3) == ["teardown"] * len(fresh)  # although history was due earlier
    assert claimed(17) == ["verify_end"] * 2
    assert claimed(15) == []
    Obligation.objects.filter(attempt_id__isnull=False, kind="verify_end").update(due_at=factories.at(-1))
    assert claimed(15) == ["verify_end"] * 2


@pytest.mark.parametrize("call", ["identify", "inspect"])
def test_a_worker_that_is_told_to_stop_ends_the_look_in_flight_and_gives_the_row_back(
    rehearsal: Rehearsal, call: str
) -> None:
    """S-274: a call in flight is joined, and its row is not due before its time."""
    row = owed(given_up(rehearsal))
    falls_due(row)
    stop, gate = threading.Event(), Gate()
    rehearsal.world.hooks[call] = gate
    stopping = Background(lambda: Engine(stopping=stop.is_set).sweep(rehearsal.account.pk))
    gate.wait()
    stop.set()
    gate.open()
    assert stopping.result().outcomes == {"handed_back" if call == "identify" else "proven": 1}
    row.refresh_from_db()
    assert row.attempt_id is None
    if call == "identify":
        assert due_in(row) == pytest.approx(5 * MINUTES, abs=20)


# --- What a look finds ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("box", "found"), [("hidden", "absent"), ("destroyed", "destroyed")])
def test_what_is_gone_is_proven_and_paid_and_nothing_is_owed_any_more(
    rehearsal: Rehearsal, box: str, found: str
) -> None:
    """S-265, S-272: verified history schedules nothing."""
    lease = given_up(rehearsal)
    rehearsal.world.of(lease.resource_id).state = box
    row = owed(lease)
    falls_due(row)
    assert sweep(rehearsal) == {"proven": 1}
    assert (state(lease), evidence(lease)) == ("failed", [found])
    row.refresh_from_db()
    assert (row.closed_as, row.due_at) == ("proven", None)
    receipt = Receipt.objects.get()
    assert (receipt.lease_id, receipt.epoch, receipt.attempt_id) == (
        lease.pk,
        1,
        Attempt.objects.get(obligation=row).pk,
    )
    assert not proof.unproven().exists()
    assert proof.is_proven_ended(lease)
    assert not Obligation.objects.filter(due_at__isnull=False).exists()
    assert rehearsal.world.count("delete") == rehearsal.world.count("stop") == 0


def test_where_one_look_is_not_enough_it_takes_two(limited: Rehearsal) -> None:
    lease = given_up(limited)
    limited.world.of(lease.resource_id).state = "hidden"
    row = owed(lease)
    falls_due(row)
    assert sweep(limited) == {"not_seen": 1}
    assert evidence(lease) == []
    assert due_in(row) >= 5 * MINUTES - 1
    falls_due(row)
    assert sweep(limited) == {"proven": 1}
    assert evidence(lease) == ["absent"]


def test_a_look_in_between_that_sees_it_unsays_the_first(limited: Rehearsal) -> None:
    lease = given_up(limited)
    box, row = limited.world.of(lease.resource_id), owed(lease)
    for seen, result in (("hidden", "not_seen"), ("unknown", "not_seen"), ("hidden", "not_seen"), ("hidden", "proven")):
        box.state = seen
        falls_due(row)
        assert sweep(limited) == {result: 1}


def test_another_account_behind_the_key_proves_nothing(rehearsal: Rehearsal) -> None:
    lease = given_up(rehearsal)
    rehearsal.world.boxes.clear()
    row, ours = owed(lease), rehearsal.world.identity
    rehearsal.world.identity = "another"
    falls_due(row)
    assert sweep(rehearsal) == {"failed": 1}
    rehearsal.world.identity = ours
    rehearsal.world.after["inspect"] = lambda _: setattr(rehearsal.world, "identity", "another")
    falls_due(row)
    assert sweep(rehearsal) == {"failed": 1}
    assert evidence(lease) == []


@pytest.mark.parametrize(
    ("policy", "ends"),
    [("ephemeral", "failed"), ("reuse_by_environment", "released"), ("retain_on_failure", "retained")],
)
def test_what_runs_is_no_history_its_teardown_is_owed_again_as_it_was_demanded(
    rehearsal: Rehearsal, policy: str, ends: str
) -> None:
    lease = given_up(rehearsal, policy, outcome="failed")
    row = owed(lease)
    falls_due(row)
    assert Engine().sweep(rehearsal.account.pk, limit=1).outcomes == {"proven": 1}
    row.refresh_from_db()
    assert (row.closed_as, attempts(row)) == ("handed_over", ["handed_over"])
    teardown = owed(lease)
    assert (teardown.kind, teardown.verb) == ("teardown", row.verb)
    lease.refresh_from_db()
    assert (lease.state, lease.epoch, lease.reason) == ("pending_cleanup", 2, "found_running")
    assert sweep(rehearsal) == {"proven": 1}
    assert state(lease) == ends
    assert not proof.unproven().exists()


def test_what_was_to_be_destroyed_and_is_stopped_is_destroyed(rehearsal: Rehearsal) -> None:
    lease = given_up(rehearsal)
    rehearsal.world.of(lease.resource_id).state = "stopped"
    falls_due(owed(lease))
    assert sweep(rehearsal) == {"proven": 2}
    lease.refresh_from_db()
    assert (lease.state, lease.epoch, evidence(lease)) == ("expired", 1, ["destroyed"])
    assert rehearsal.world.boxes == {}


def test_what_was_to_be_stopped_and_is_gets_its_receipt_and_an_end(rehearsal: Rehearsal) -> None:
    """It is kept by then, so it owes its disposal: no sandbox is kept without an end."""
    lease = given_up(rehearsal, "reuse_by_environment")
    rehearsal.world.of(lease.resource_id).state = "stopped"
    falls_due(owed(lease))
    assert sweep(rehearsal) == {"proven": 2}
    assert (state(lease), evidence(lease)) == ("released", ["stopped"])
    assert rehearsal.world.count("stop") == rehearsal.world.count("delete") == 0
    assert lease.obligations.filter(kind="dispose", closed_at__isnull=True).exists()
    assert not proof.unproven().exists()


def test_a_held_one_that_is_found_is_stopped_and_kept(rehearsal: Rehearsal) -> None:
    """Destroying it was demanded and forbidden by a hold before it was given up: what was demanded is owed again."""
    lease = released(rehearsal)
    holds.hold(company_id=lease.company_id, kind="recovery_source", holder="a recovery", lease_id=lease.pk)
    row = owed(lease)
    assert (row.verb, row.held_verb) == ("stop_only", "delete")
    deciding.settle_unverified(row.pk, confirmation=lease.resource_id, company_id=row.company_id, **WHO)
    assert owed(lease).verb == "delete"
    falls_due(owed(lease))
    assert sweep(rehearsal) == {"proven": 2}
    assert rehearsal.world.count("delete") == 0
    assert (state(lease), evidence(lease)) == ("released", ["stopped"])


@pytest.mark.parametrize("box", ["running", "stopped", "busy", "unknown"])
def test_what_carries_foreign_marks_is_not_touched_and_a_person_is_asked(rehearsal: Rehearsal, box: str) -> None:
    lease = given_up(rehearsal)
    there = rehearsal.world.of(lease.resource_id)
    there.state = box
    there.resource.marks["paperclip-env.installation"] = "another"  # type: ignore[index]  # a test's world
    row = owed(lease)
    falls_due(row)
    assert sweep(rehearsal) == {"quieted": 1}
    row.refresh_from_db()
    assert (row.quiet, row.due_at, state(lease)) == ("foreign_marks", None, "failed")
    assert {call for call, _ in rehearsal.world.calls} == {"identify", "inspect"}


@pytest.mark.parametrize("box", ["busy", "unknown", "recoverable"])
def test_what_cannot_be_told_is_looked_at_again(rehearsal: Rehearsal, box: str) -> None:
    lease = given_up(rehearsal)
    rehearsal.world.of(lease.resource_id).state = box
    row = owed(lease)
    falls_due(row)
    assert sweep(rehearsal) == {"not_seen": 1}
    assert (state(lease), evidence(lease)) == ("failed", [])
    assert {call for call, _ in rehearsal.world.calls} == {"identify", "inspect"}


# --- Proof from elsewhere -------------------------------------------------------------------------------------------


def _late(stage: Rehearsal, policy: str = "ephemeral") -> tuple[Lease, Any]:
    """A lease that was given up while a frozen worker holds an attempt at its teardown."""
    lease = released(stage, policy)
    (held,) = claim(stage.account.pk, new_ids(1), worker="frozen", clock=boottime)
    Obligation.objects.filter(pk=held.obligation_id).update(due_at=factories.at(-1))
    row = Obligation.objects.get(pk=held.obligation_id)
    deciding.settle_unverified(row.pk, confirmation=lease.resource_id, company_id=row.company_id, **WHO)
    stage.world.calls.clear()
    return lease, held


def test_a_receipt_that_comes_late_pays_it_at_once_and_without_a_call(rehearsal: Rehearsal) -> None:
    lease, held = _late(rehearsal)
    assert evidence_of.settle_with(held, Receipt.Evidence.DESTROYED, epoch=1) is False
    assert not proof.unproven().exists()
    row = owed(lease)
    assert due_in(row) <= 0
    assert sweep(rehearsal) == {"proven": 1}
    assert (state(lease), rehearsal.world.calls) == ("failed", [])


def test_a_late_stop_pays_what_demanded_no_more_and_gives_it_an_end(rehearsal: Rehearsal) -> None:
    lease, held = _late(rehearsal, "reuse_by_environment")
    evidence_of.settle_with(held, Receipt.Evidence.STOPPED, epoch=1)
    assert sweep(rehearsal) == {"proven": 2}
    assert (state(lease), rehearsal.world.calls) == ("released", [])


def test_a_late_stop_of_what_was_to_be_destroyed_changes_neither_the_debt_nor_the_time(rehearsal: Rehearsal) -> None:
    lease, held = _late(rehearsal)
    evidence_of.settle_with(held, Receipt.Evidence.STOPPED, epoch=1)
    assert sweep(rehearsal) == {}
    assert due_in(owed(lease)) > 4 * MINUTES
    assert proof.unproven().exists()


def test_a_receipt_that_comes_while_it_is_looked_at_is_newer_than_a_sandbox_seen_stopped(rehearsal: Rehearsal) -> None:
    lease, held = _late(rehearsal)
    rehearsal.world.of(lease.resource_id).state = "stopped"
    falls_due(owed(lease))
    rehearsal.world.after["inspect"] = lambda _: elsewhere(
        lambda: evidence_of.settle_with(held, Receipt.Evidence.DESTROYED, epoch=1)
    )
    assert Engine().sweep(rehearsal.account.pk).outcomes == {"handed_back": 1, "proven": 1}
    row = owed(lease)
    assert (row.kind, row.closed_as, state(lease)) == ("verify_end", "proven", "failed")
    assert looks(rehearsal) == 1


def test_what_a_superseded_look_proved_is_kept_and_closes_the_row(rehearsal: Rehearsal) -> None:
    lease = given_up(rehearsal)
    row = owed(lease)
    falls_due(row)
    rehearsal.world.boxes.clear()

    def loses_its_row(_: str) -> None:
        rehearsal.world.hooks.clear()
        elsewhere(lambda: Obligation.objects.filter(pk=row.pk).update(due_at=factories.at(-1)))
        elsewhere(lambda: claim(rehearsal.account.pk, new_ids(1), worker="another", clock=boottime))

    rehearsal.world.hooks["inspect"] = loses_its_row
    assert Engine().sweep(rehearsal.account.pk).outcomes == {"superseded": 1}
    assert evidence(lease) == ["absent"]
    assert owed(lease).is_open
    Obligation.objects.filter(pk=row.pk).update(due_at=factories.at(-1))
    assert sweep(rehearsal) == {"proven": 1}
    assert looks(rehearsal) == 1


def test_an_inventory_that_owes_the_teardown_first_ends_the_search_and_what_it_learns_late_proves_nothing_new(
    rehearsal: Rehearsal,
) -> None:
    lease = given_up(rehearsal)
    row = owed(lease)
    falls_due(row)
    rehearsal.world.boxes.clear()

    def owe_again(_: str) -> None:
        rehearsal.world.hooks.clear()

        def found() -> None:
            with transaction.atomic():
                locked = Lease.objects.select_for_update(no_key=True).get(pk=lease.pk)
                transitions.owe_again(locked, reason="leaked", actor="inventory")

        elsewhere(found)

    rehearsal.world.hooks["inspect"] = owe_again
    outcomes = Engine().sweep(rehearsal.account.pk, limit=1).outcomes
    assert outcomes == {"superseded": 1}
    row.refresh_from_db()
    assert (row.closed_as, attempts(row)) == ("handed_over", ["handed_over"])
    lease.refresh_from_db()
    assert (lease.state, lease.epoch) == ("pending_cleanup", 2)
    assert [receipt.epoch for receipt in Receipt.objects.all()] == [1]
    assert not proof.is_proven_ended(lease)
    assert sweep(rehearsal) == {"proven": 1}
    assert proof.is_proven_ended(lease)


# --- People ---------------------------------------------------------------------------------------------------------


def _stale(stage: Rehearsal) -> tuple[Lease, Obligation]:
    lease = given_up(stage)
    stage.world.of(lease.resource_id).state = "unknown"
    row = owed(lease)
    owed_for(row, 8 * DAYS)
    falls_due(row)
    return lease, row


@pytest.mark.parametrize("trouble", [None, ErrorKind.SERVER, ErrorKind.NOT_READY, ErrorKind.BUSY])
def test_after_seven_days_in_vain_a_person_is_asked_and_nothing_looks_any_more(
    rehearsal: Rehearsal, trouble: ErrorKind | None
) -> None:
    _, row = _stale(rehearsal)
    if trouble:
        rehearsal.world.hooks["identify"] = fails(trouble)
    assert Engine().sweep(rehearsal.account.pk).outcomes == {"quieted": 1}
    row.refresh_from_db()
    assert (row.quiet, row.due_at) == ("history_unverified", None)
    assert audited("obligation.quieted", row) == 1
    assert not Obligation.objects.filter(due_at__isnull=False).exists()


def test_before_seven_days_nobody_is_asked(rehearsal: Rehearsal) -> None:
    lease = given_up(rehearsal)
    rehearsal.world.of(lease.resource_id).state = "unknown"
    row = owed(lease)
    passes(row, 7 * DAYS - 60)
    assert sweep(rehearsal) == {"not_seen": 1}
    assert due_in(row) == pytest.approx(6 * 3600, abs=20)


def test_what_is_woken_while_its_last_look_is_written_gets_another_look_first(rehearsal: Rehearsal) -> None:
    _, row = _stale(rehearsal)
    rehearsal.world.hooks["inspect"] = lambda _: elsewhere(lambda: wake(row.pk))
    assert sweep(rehearsal) == {"not_seen": 1}
    assert due_in(row) == pytest.approx(6 * 3600, abs=20)


def test_people_are_shown_one_group_per_account_and_a_retry_of_it_looks_once_more(rehearsal: Rehearsal) -> None:
    rows = [_stale(rehearsal)[1] for _ in range(3)]
    recent = given_up(rehearsal)
    assert sweep(rehearsal) == {"quieted": 3}
    other = Rehearsal()
    given_up(other)
    groups = {group["account_id"]: group for group in history.by_account()}
    assert set(groups) == {rehearsal.account.pk, other.account.pk}
    group = groups[rehearsal.account.pk]
    assert (group["unverified"], group["asking"]) == (4, 3)
    assert group["next_look"] == owed(recent).due_at
    assert group["oldest"] == min(Obligation.objects.get(pk=row.pk).owed_since for row in rows)

    assert history.look_again(rehearsal.account.pk, company_id=rehearsal.company.pk, **WHO) == 3
    rehearsal.world.boxes.pop(rows[0].lease.resource_id)  # type: ignore[union-attr]  # it has one
    assert sweep(rehearsal) == {"proven": 1, "quieted": 2}
    assert looks(rehearsal) == 6


def test_an_operator_looks_once_more_at_all_of_an_account(rehearsal: Rehearsal) -> None:
    rows = [_stale(rehearsal)[1] for _ in range(2)]
    sweep(rehearsal)
    out = StringIO()
    call_command("recheck_history", str(rehearsal.account.pk), "--dry-run", stdout=out)
    assert out.getvalue() == "2 would be looked at now. Nothing was written.\n"
    with pytest.raises(CommandError, match="--reason is required"):
        call_command("recheck_history", str(rehearsal.account.pk))
    call_command("recheck_history", str(rehearsal.account.pk), "--reason", "mended", "--actor", "olga", stdout=out)
    assert out.getvalue().endswith("Asked for one look at each of 2.\n")
    assert [audited("obligation.retry_requested", row) for row in rows] == [1, 1]
    rehearsal.world.boxes.clear()
    assert sweep(rehearsal) == {"proven": 2}


def test_a_person_who_asks_does_not_wait_for_the_time_of_the_next_look(rehearsal: Rehearsal) -> None:
    lease = given_up(rehearsal)
    row = owed(lease)
    assert retrying.retry(company_id=rehearsal.company.pk, lease_id=lease.pk, **WHO) == 1
    rehearsal.world.boxes.clear()
    assert sweep(rehearsal) == {"proven": 1}
    row.refresh_from_db()
    assert row.closed_as == "proven"


def test_history_cannot_be_settled_without_proof_a_second_time(rehearsal: Rehearsal) -> None:
    row = owed(given_up(rehearsal))
    with pytest.raises(deciding.DecisionRefused, match="ended without proof already"):
        deciding.settle_unverified(row.pk, confirmation="x", company_id=row.company_id, **WHO)


def test_what_is_given_up_again_is_history_again_with_one_debt(rehearsal: Rehearsal) -> None:
    lease = given_up(rehearsal)
    falls_due(owed(lease))
    assert Engine().sweep(rehearsal.account.pk, limit=1).outcomes == {"proven": 1}
    assert not proof.unproven().exists()  # it is owed as a teardown again
    row = owed(lease)
    deciding.settle_unverified(row.pk, confirmation=lease.resource_id, company_id=row.company_id, **WHO)
    assert [debt.pk for debt in proof.unproven()] == [row.pk]
    again = owed(lease)
    assert (again.kind, again.verb) == ("verify_end", "delete")
    assert due_in(again) == pytest.approx(5 * MINUTES, abs=20)


# --- Imports --------------------------------------------------------------------------------------------------------


def ended(stage: Rehearsal, **values: Any) -> history.Ended:
    at = factories.at(-DAYS)
    return history.Ended.model_validate(
        {
            "id": uuid4(),
            "account": stage.account.pk,
            "resource_id": "of-old",
            "acquired_at": at - timedelta(hours=1),
            "released_at": at,
            **values,
        }
    )


@pytest.fixture
def attested(rehearsal: Rehearsal) -> Rehearsal:
    """A stage whose account was used before."""
    lease = released(rehearsal)
    assert sweep(rehearsal) == {"proven": 1}
    assert state(lease) == "expired"
    rehearsal.world.calls.clear()
    return rehearsal


@pytest.mark.parametrize(("outcome", "ends"), [("failed", "failed"), ("succeeded", "expired")])
def test_an_import_is_history_from_its_first_moment_on(attested: Rehearsal, outcome: str, ends: str) -> None:
    lease = history.import_ended(ended(attested, outcome=outcome), actor="olga")
    assert lease is not None
    assert state(lease) == ends
    row = owed(lease)
    assert (row.kind, row.verb) == ("verify_end", "delete")
    assert due_in(row) == pytest.approx(5 * MINUTES, abs=20)
    assert not proof.is_proven_ended(lease)
    assert audited("lease.imported", lease) == 1
    falls_due(row)
    assert sweep(attested) == {"proven": 1}
    assert evidence(lease) == ["absent"]


def test_importing_it_again_changes_nothing(attested: Rehearsal) -> None:
    record = ended(attested)
    assert history.import_ended(record, actor="olga") is not None
    before = snapshot()
    assert history.import_ended(record, actor="olga") is None
    assert snapshot() == before


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"account": uuid4()}, "there is no"),
        ({"account_identity": "another"}, "is not what the account's provider says"),
        ({"environment": uuid4()}, "there is no"),
        ({"run": uuid4()}, "there is no"),
        ({"issue": uuid4()}, "there is no"),
        ({"released_at": datetime.fromisoformat("2999-01-01T00:00:00+00:00")}, "has not come yet"),
        ({"released_at": datetime.fromisoformat("1999-01-01T00:00:00+00:00")}, "before acquired_at"),
    ],
)
def test_an_import_that_contradicts_what_is_known_is_refused(
    attested: Rehearsal, values: dict[str, Any], why: str
) -> None:
    before = snapshot()
    with pytest.raises(history.LeaseError, match=why):
        history.import_ended(ended(attested, **values), actor="olga")
    assert snapshot() == before


def test_an_account_that_nobody_attested_cannot_prove_anything(rehearsal: Rehearsal) -> None:
    with pytest.raises(history.LeaseError, match="no provider ever said who it is"):
        history.import_ended(ended(rehearsal), actor="olga")


def test_a_sandbox_that_a_lease_has_now_is_no_history(attested: Rehearsal) -> None:
    kept = released(attested, "reuse_by_environment")
    sweep(attested)
    with pytest.raises(history.LeaseError, match="has this sandbox now"):
        history.import_ended(ended(attested, resource_id=kept.resource_id), actor="olga")


def test_history_of_a_sandbox_that_another_lease_got_waits_for_that_ones_end(attested: Rehearsal) -> None:
    lease = history.import_ended(ended(attested, resource_id="shared"), actor="olga")
    assert lease is not None
    owner = factories.lease(
        attested.environment, resource_id="shared", account_identity=lease.account_identity, provider=lease.provider
    )
    row = owed(lease)
    falls_due(row)
    assert sweep(attested) == {"waiting": 1}
    assert attested.world.calls == []
    row.refresh_from_db()
    assert (row.quiet, row.due_at) == ("waiting", None)
    factories.teardown(owner)
    assert sweep(attested) == {"proven": 2}  # the owner's end, and the look that it woke
    row.refresh_from_db()
    assert row.closed_as == "proven"


@pytest.mark.parametrize("became", [Lease.State.PENDING_CLEANUP, Lease.State.RELEASED, Lease.State.RETAINED])
def test_nobody_is_asked_about_history_while_another_lease_has_the_sandbox(
    rehearsal: Rehearsal, became: Lease.State
) -> None:
    """Through another account that is the same at the provider, and for longer than history is looked for."""
    lease = given_up(rehearsal)
    twin = factories.account(
        rehearsal.company,
        provider=lease.provider,
        endpoint=rehearsal.account.endpoint,
        attested_identity=lease.account_identity,
    )
    owner = factories.lease(factories.environment(twin), resource_id=lease.resource_id)
    if became == Lease.State.PENDING_CLEANUP:
        factories.teardown(owner)
    else:
        factories.stopped(owner, state=became)
    row = owed(lease)
    owed_for(row, 8 * DAYS)
    falls_due(row)
    assert sweep(rehearsal) == {"waiting": 1}
    wake(row.pk)  # by anything else: it waits on
    assert sweep(rehearsal) == {"waiting": 1}
    row.refresh_from_db()
    assert (row.quiet, row.due_at, looks(rehearsal)) == ("waiting", None, 0)
    if became != Lease.State.PENDING_CLEANUP:
        with transaction.atomic():
            locked = Lease.objects.select_for_update().get(pk=owner.pk)
            transitions.dispose(locked, reason="its time is over", actor="olga")
    assert Engine().sweep(twin.pk).outcomes == {"proven": 1}
    assert state(owner) == "expired"
    assert sweep(rehearsal) == {"proven": 1}
    row.refresh_from_db()
    assert row.closed_as == "proven"


def test_an_owner_that_ends_while_history_is_about_to_wait_for_it_is_not_missed(
    attested: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = history.import_ended(ended(attested, resource_id="shared"), actor="olga")
    assert lease is not None
    owner = factories.lease(
        attested.environment, resource_id="shared", account_identity=lease.account_identity, provider=lease.provider
    )
    factories.teardown(owner)
    falls_due(owed(lease))
    wait = claims.wait

    def waits(claimed: claims.Claim) -> bool:
        monkeypatch.setattr(claims, "wait", wait)
        elsewhere(lambda: Engine().sweep(attested.account.pk, selection=Selection(kinds=("teardown",))))
        return wait(claimed)

    monkeypatch.setattr(claims, "wait", waits)
    Engine().sweep(attested.account.pk, selection=Selection(kinds=("verify_end",)), limit=1)
    row = owed(lease)
    assert (state(owner), row.quiet) == ("expired", "")
    assert row.due_at is not None
    assert sweep(attested) == {"proven": 1}


def test_an_imported_sandbox_without_our_marks_is_left_alone(attested: Rehearsal) -> None:
    theirs = released(attested)
    box = attested.world.of(theirs.resource_id)
    sweep(attested)
    attested.world.boxes["of-old"] = replace(box, resource=replace(box.resource, resource_id="of-old", marks={}))
    attested.world.boxes["of-old"].state = "running"
    lease = history.import_ended(ended(attested), actor="olga")
    assert lease is not None
    attested.world.calls.clear()
    falls_due(owed(lease))
    assert sweep(attested) == {"quieted": 1}
    assert owed(lease).quiet == "foreign_marks"
    assert attested.world.of("of-old").state == "running"


def test_what_was_imported_as_over_and_runs_is_owed_again(attested: Rehearsal) -> None:
    """Ours by its marks: this installation made it, and lost its lease to a restore."""
    made = released(attested)
    box = attested.world.of(made.resource_id)
    sweep(attested)
    lease = history.import_ended(ended(attested, outcome="succeeded", verb=Obligation.Verb.STOP_ONLY), actor="olga")
    assert lease is not None
    attested.world.boxes["of-old"] = replace(box, resource=replace(box.resource, resource_id="of-old"), state="running")
    falls_due(owed(lease))
    assert Engine().sweep(attested.account.pk, limit=1).outcomes == {"proven": 1}
    assert (state(lease), owed(lease).verb) == ("pending_cleanup", "stop_only")
    assert sweep(attested) == {"proven": 1}
    assert (state(lease), evidence(lease), attested.world.of("of-old").state) == ("released", ["stopped"], "stopped")


# --- Real processes -------------------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Environment]:
    """An environment of real processes; nothing of them is left."""
    account = factories.account(endpoint={"state_dir": str(tmp_path / "state")}, attested_identity="")
    yield factories.environment(account, config={"command": ["sleep", "1000"]})
    assert left_below(tmp_path / "state") == []


def _given_up_here(here: Environment) -> tuple[Lease, Obligation]:
    lease = leases.release(leases.acquire(here.pk, company_id=here.company_id).pk)
    row = owed(lease)
    deciding.settle_unverified(row.pk, confirmation=lease.resource_id, company_id=row.company_id, **WHO)
    search = owed(lease)
    falls_due(search)
    return lease, search


@pytest.mark.django_db(transaction=True)
def test_real_processes_that_were_given_up_are_found_running_and_ended(here: Environment) -> None:
    lease, search = _given_up_here(here)
    provider = open_provider("local", here.account.endpoint)
    assert isinstance(provider.inspect(lease.resource_id, within=10), Running)
    assert Engine().sweep(here.account_id).outcomes == {"proven": 2}
    lease.refresh_from_db()
    assert (lease.state, lease.epoch) == ("expired", 2)
    assert isinstance(provider.inspect(lease.resource_id, within=10), Gone)
    search.refresh_from_db()
    assert search.closed_as == "handed_over"


@pytest.mark.django_db(transaction=True)
def test_real_processes_that_ended_meanwhile_are_proven_gone(here: Environment) -> None:
    lease, search = _given_up_here(here)
    provider = open_provider("local", here.account.endpoint)
    provider.stop(lease.resource_id, grace=1, within=10)
    provider.delete(lease.resource_id, within=10)
    assert Engine().sweep(here.account_id).outcomes == {"proven": 1}
    assert (state(lease), proof.is_proven_ended(lease)) == ("failed", True)
    search.refresh_from_db()
    assert search.closed_as == "proven"


# --- An older version -----------------------------------------------------------------------------------------------


@pytest.mark.django_db(transaction=True)
def test_what_an_older_version_ended_without_proof_owes_it_from_the_upgrade_on() -> None:
    """The statement of the migration, on rows as the older rules left them; all is checked when it commits."""
    sql = (Path(leases.__file__).parent / "migrations" / "sql" / f"{MIGRATION}.sql").read_text(encoding="utf-8")
    upgrade = sql[sql.index("INSERT INTO leases_obligation") :]
    with transaction.atomic():
        old = {}
        for verb in ("delete", "stop_only"):
            row = factories.teardown(verb=verb)
            Lease.objects.filter(pk=row.lease_id).update(state="failed")
            Obligation.objects.filter(pk=row.pk).update(
                closed_at=factories.database_now(), closed_as="unverified", due_at=None
            )
            old[row.lease_id] = verb
        paid = factories.teardown()
        assert paid.lease is not None
        factories.receipt(paid.lease)
        Lease.objects.filter(pk=paid.lease_id).update(state="failed")
        Obligation.objects.filter(pk=paid.pk).update(
            closed_at=factories.database_now(), closed_as="unverified", due_at=None
        )
        factories.stopped()
        factories.lease()
        with connection.cursor() as cursor:
            cursor.execute(upgrade)
    rows = {row.lease_id: row for row in history.unverified()}
    assert {pk: row.verb for pk, row in rows.items()} == old
    for row in rows.values():
        assert due_in(row) == pytest.approx(5 * MINUTES, abs=20)
        assert row.not_before == row.due_at


# --- What the database holds ----------------------------------------------------------------------------------------


def test_an_ended_lease_without_a_receipt_and_without_its_debt_is_refused(rehearsal: Rehearsal) -> None:
    lease = given_up(rehearsal)
    row = owed(lease)
    with pytest.raises(IntegrityError, match="without a receipt"), transaction.atomic():
        Obligation.objects.filter(pk=row.pk).update(
            closed_at=factories.database_now(), closed_as="nothing_owed", due_at=None
        )
