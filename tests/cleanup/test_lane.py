"""The built-in lane: what calls no provider is hinted, claimed and settled, and no account's trouble holds it up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pytest
from celery.exceptions import Retry
from django.db import connection, transaction

import leases
from cleanup import alarm, claims, engine, listening, tasks, work
from cleanup.claims import LANE, LANE_LIMIT, Claim, Selection, claim, new_ids
from cleanup.dispositions import CONTENDED_DELAY
from cleanup.engine import Engine
from cleanup.handlers import HANDLERS
from leases.clock import boottime
from leases.models import ActivityEntry, Attempt, Installation, Lease, Obligation, ProviderAccount, Run
from providers.contract import ErrorKind, ProviderError
from tests import factories
from tests.beats import BOUND, CHECKOUT, Queue, beats, database_url, eventually
from tests.concurrency import elsewhere, together
from tests.factories import at, claimed
from tests.scenarios.steps import acquired, attempts, due_in, fails, falls_due, owed, released, state, sweep_lane
from tests.stage import Rehearsal

pytestmark = pytest.mark.django_db(transaction=True)

Kind = Obligation.Kind


@pytest.fixture
def session(transactional_db: None) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(**listening.address(), autocommit=True) as made:
        yield made


def inner(due_in: float = 0.0, **values: Any) -> Obligation:
    """A row of the lane: the startup of a run, due in `due_in` seconds."""
    return factories.startup(**{"quiet": "", "due_at": at(due_in), **values})


def many(number: int, due_in: float = -5.0) -> list[Obligation]:
    company = factories.company()
    runs = Run.objects.bulk_create([Run(company=company, status=Run.Status.FAILED) for _ in range(number)])
    due_at = at(due_in)
    rows = [Obligation(company=company, kind=Kind.STARTUP, run=run, due_at=due_at) for run in runs]
    return Obligation.objects.bulk_create(rows)


def hint(seconds: float | None) -> None:
    Installation.current()
    Installation.objects.update(hinted_until=None if seconds is None else at(seconds))


def take(number: int = 100, selection: Selection = claims.ALL) -> list[Claim]:
    return claim(LANE, new_ids(number), worker="w", clock=boottime, selection=selection)


def handles(monkeypatch: pytest.MonkeyPatch, outcome: work.Outcome | Callable[[], work.Outcome]) -> None:
    """Give the startup of runs another handler, which reads nothing and comes to this outcome."""

    def handler(_claim: Claim, _context: work.Context) -> Iterator[work.Call]:
        yield from ()
        return outcome() if callable(outcome) else outcome  # type: ignore[return-value]

    monkeypatch.setitem(HANDLERS, Kind.STARTUP, handler)


# Which rows are in it


def test_what_calls_no_provider_names_no_account(rehearsal: Rehearsal) -> None:
    acquired(rehearsal, ad_hoc=True)
    rehearsal.world.after["create"] = fails(ErrorKind.CONNECTION)
    with pytest.raises(leases.errors.LeaseError):
        acquired(rehearsal)
    found = dict(Obligation.objects.filter(account__isnull=True).values_list("kind", "attempt_id"))
    assert set(found) == {Kind.END_LEASE, Kind.STARTUP} <= set(Obligation.INNER)
    assert not Obligation.objects.filter(kind__in=Obligation.INNER, account__isnull=False).exists()


def test_one_of_an_older_version_keeps_its_account_and_is_paid_there(rehearsal: Rehearsal) -> None:
    lease = acquired(rehearsal, ad_hoc=True)
    Lease.objects.filter(pk=lease.pk).update(ends_at=at(-1))
    with transaction.atomic():
        old = Obligation.objects.get(lease=lease, kind=Kind.END_LEASE)
        Obligation.objects.filter(pk=old.pk).update(closed_at=at(0), closed_as="handed_over", due_at=None)
        Obligation.objects.create(
            company=lease.company, kind=Kind.END_LEASE, account=lease.account, lease=lease, due_at=at(-1)
        )
    assert Engine().sweep(rehearsal.account.pk, limit=1).outcomes == {"proven": 1}
    assert state(lease) == "pending_cleanup"


def test_the_first_row_of_it_makes_the_installation_and_no_later_one_does() -> None:
    assert not Installation.objects.exists()
    together(*[lambda: inner(60) for _ in range(4)])
    row = Installation.objects.get()
    inner(60)
    assert Installation.objects.get() == row == Installation.current()
    assert row.mark


# When it rings

FORMULA: dict[str, tuple[float | None, Callable[[], object], float | None, float | None]] = {
    "it owes nothing": (None, lambda: None, None, None),
    "it owes only what waits for another row": (None, factories.startup, None, None),
    "an account owes something": (None, lambda: factories.teardown(due_in=-5), None, None),
    "a row is due later": (None, lambda: inner(100), 100, 100),
    "the earliest of several rows counts": (None, lambda: [inner(300), inner(100)], 100, 100),
    "a row is overdue": (None, lambda: inner(-50), -50, -50),
    "a claimed row counts by the end of its protection": (None, lambda: claimed(inner(-50)), 900, 900),
    "a crashed attempt": (None, lambda: claimed(inner(-50), protected_for=-5), -5, -5),
    "a hint is on its way": (8, lambda: inner(-50), 8, 8),
    "a hint was lost": (-8, lambda: inner(-50), -8, -8),
    "it is not full": (None, lambda: [*(claimed(inner()) for _ in range(3)), inner(-50)], -50, -50),
    "it is full": (
        None,
        lambda: [*(claimed(row, protected_for=700) for row in many(LANE_LIMIT)), inner(-50)],
        700,
        30,
    ),
}


@pytest.mark.parametrize("case", FORMULA)
def test_it_rings_when(case: str) -> None:
    hinted, rows, rings_in, looks_in = FORMULA[case]
    hint(hinted)
    rows()
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT extract(epoch FROM alarm - now())::float8, extract(epoch FROM look_at - now())::float8"  # noqa: S608
            f" FROM ({alarm.ALARMS}) alarms WHERE id = %(lane)s",
            alarm.VALUES,
        )
        found = cursor.fetchone()
    if rings_in is None:
        assert found is None
    else:
        assert found == (pytest.approx(rings_in, abs=2), pytest.approx(looks_in, abs=2))


def test_a_look_hints_it_once_in_the_order_of_what_is_due_longest(session: psycopg.Connection[Any]) -> None:
    late, later = factories.teardown(due_in=-100), factories.teardown(due_in=-10)
    inner(-50)
    rung = alarm.hint_due(session)
    assert rung.hinted == (late.account_id, LANE, later.account_id)
    assert rung.look_at == pytest.approx(rung.now + 10, abs=1)
    assert Installation.current().hinted_until == pytest.approx(at(10), abs=timedelta(seconds=2))
    assert alarm.hint_due(session).hinted == ()
    hint(-0.001)
    assert alarm.hint_due(session).hinted == (LANE,)


def test_a_claim_in_it_delays_no_account_and_a_claim_of_an_account_does_not_delay_it(
    session: psycopg.Connection[Any],
) -> None:
    row = factories.teardown(due_in=-100)
    inner(-50)
    with psycopg.connect(**listening.address()) as claimer:
        claimer.execute("SELECT 1 FROM leases_installation FOR NO KEY UPDATE")
        rung = alarm.hint_due(session)
        assert rung.hinted == (row.account_id,)
        assert rung.look_at is not None
        assert rung.look_at < rung.now, "it must look again soon"
        assert not alarm.is_unheard(session), "no other leader could hint it either"
    ProviderAccount.objects.update(hinted_until=None)
    with psycopg.connect(**listening.address()) as claimer:
        claimer.execute("SELECT 1 FROM leases_provideraccount FOR NO KEY UPDATE")
        assert alarm.hint_due(session).hinted == (LANE,)


def test_of_many_that_look_at_once_one_hints_it() -> None:
    inner(-10)
    hinted: list[UUID] = []

    def look() -> None:
        with psycopg.connect(**listening.address(), autocommit=True) as own:
            for _ in range(5):
                hinted.extend(alarm.hint_due(own).hinted)

    together(*[look for _ in range(6)])
    assert hinted == [LANE]


def test_an_alarm_of_more_than_a_minute_is_unheard(session: psycopg.Connection[Any]) -> None:
    inner(-50)
    assert not alarm.is_unheard(session)
    inner(-70)
    assert alarm.is_unheard(session)
    alarm.hint_due(session)
    assert not alarm.is_unheard(session)


def test_the_next_alarm_is_its_own_where_nothing_is_earlier() -> None:
    factories.teardown(due_in=500)
    inner(100)
    assert alarm.next_alarm() == pytest.approx(at(100), abs=timedelta(seconds=2))


def test_a_beat_sends_a_message_of_its_own_for_it_and_a_worker_pays_by_it(tmp_path: Path) -> None:
    queue = Queue()
    try:
        with beats(tmp_path) as start:
            start().leads()
            row = inner()
            message = queue.take()
            assert message == {"task": "cleanup.tasks.settle_ownership", "args": []}
            tasks.settle_ownership()
            row.refresh_from_db()
            assert row.closed_as == "proven"
    finally:
        queue.close()


def test_a_sweep_of_it_that_did_something_takes_its_hint_back(monkeypatch: pytest.MonkeyPatch) -> None:
    inner()
    hint(9)
    tasks.settle_ownership()
    assert Installation.current().hinted_until is None
    hint(9)
    tasks.settle_ownership()
    assert Installation.current().hinted_until is not None, "nothing was done: that would send hints in a circle"


# What is claimed


def test_claimers_at_once_do_not_pass_its_limit_and_take_no_row_twice() -> None:
    rows = many(LANE_LIMIT + 30)
    taken = [one for some in together(*[lambda: take(20) for _ in range(6)]) for one in some]
    assert len(taken) == LANE_LIMIT
    assert len({one.obligation_id for one in taken}) == LANE_LIMIT
    assert {one.account_id for one in taken} == {LANE}
    assert {one.company for one in taken} == {rows[0].company_id}
    assert take() == []
    claims.postpone(taken[0], Attempt.Outcome.HANDED_BACK, delay=60)
    assert len(take()) == 1, "one place is free again"


def test_processes_at_once_pay_each_row_once(tmp_path: Path) -> None:
    rows, number = many(LANE_LIMIT * 2), 3
    logs = [tmp_path / f"sweep-{index}.log" for index in range(number)]
    sweeps: list[subprocess.Popen[bytes]] = []
    try:
        with transaction.atomic():
            Installation.objects.select_for_update(no_key=True).get()  # whoever claims here waits for this
            sweeps.extend(_sweep(log) for log in logs)
            eventually(lambda: _waiting() == number, "all wait to claim")
        ended = {process.wait(BOUND) for process in sweeps}
        assert {0} <= ended <= {0, 1}, [log.read_text() for log in logs]  # 1: it found no place, and something due
    finally:
        for process in sweeps:
            process.kill()
            process.wait(BOUND)
    assert Obligation.objects.filter(closed_as="proven").count() == len(rows)
    assert Attempt.objects.count() == len(rows)


def _sweep(log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "manage.py", "sweep"],
            cwd=CHECKOUT,
            env={
                **os.environ,
                "DATABASE_URL": database_url(),
                "DATABASE_LOCK_TIMEOUT_MS": "0",
                "APPLICATION_NAME": log.stem,
            },
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def _waiting() -> int:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_stat_clear_snapshot()")
        cursor.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
            " AND application_name LIKE 'sweep-%' AND wait_event_type = 'Lock'"
        )
        (number,) = cursor.fetchone()
    return int(number)


def test_an_account_claims_none_of_it_and_it_claims_none_of_an_account() -> None:
    row, lane = factories.teardown(due_in=-5), inner(-5)
    assert [one.obligation_id for one in take()] == [lane.pk]
    assert row.account_id is not None
    taken = claim(row.account_id, new_ids(5), worker="w", clock=boottime)
    assert [one.obligation_id for one in taken] == [row.pk]


def test_a_claim_is_selected_in_it_like_in_an_account() -> None:
    rows = [inner(-5), inner(-4), inner(-3)]
    assert take(selection=Selection(company_id=factories.company().pk)) == []
    assert take(selection=Selection(kinds=(Kind.END_LEASE,))) == []
    assert [one.obligation_id for one in take(selection=Selection(company_id=rows[1].company_id))] == [rows[1].pk]
    assert [one.obligation_id for one in take(selection=Selection(obligation_id=rows[2].pk))] == [rows[2].pk]


def test_what_is_the_whole_installations_is_claimed_and_has_no_company() -> None:
    owner = Installation.current()
    row = Obligation.objects.create(kind=Kind.WATCH_CONTROLLERS, installation=owner, due_at=at(-1))
    (taken,) = take()
    assert (taken.installation, taken.company_id, taken.account_id) == (owner.pk, None, LANE)
    with pytest.raises(TypeError, match="has no company"):
        _ = taken.company
    assert Attempt.objects.get(obligation=row).company_id is None
    assert claims.quiet_down(taken, Obligation.Quiet.MASS_LAPSE)
    assert ActivityEntry.objects.get(action="obligation.quieted").company_id is None


def test_after_a_lost_reply_its_claims_are_found_like_others() -> None:
    row = inner(-1)
    ids = new_ids(3)
    claim(LANE, ids, worker="w", clock=boottime)
    (found,) = claims.reclaim(ids, clock=boottime)
    assert (found.obligation_id, found.account_id, found.run) == (row.pk, LANE, row.run_id)


def _plan(statement: str, values: dict[str, Any]) -> set[tuple[str, str]]:
    """Explain, and return what it reads and by which index ("" for a whole table)."""

    def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield plan
        for child in plan.get("Plans", []):
            yield from nodes(child)

    with connection.cursor() as cursor:
        cursor.execute(f"EXPLAIN (FORMAT JSON) {statement}", values)
        row = cursor.fetchone()
    assert row is not None
    plan = (row[0] if isinstance(row[0], list) else json.loads(row[0]))[0]["Plan"]
    found = nodes(plan)
    return {
        (node.get("Relation Name", "leases_obligation"), node.get("Index Name", ""))
        for node in found
        if node["Node Type"] in ("Seq Scan", "Index Scan", "Index Only Scan", "Bitmap Index Scan")
    }


def test_a_claim_reads_open_rows_through_their_indexes() -> None:
    """Among 20,000 closed rows, a few open ones, and much history to be verified."""
    many(20)
    account = factories.account()
    for _ in range(3):
        factories.teardown(factories.lease(factories.environment(account)), due_in=-1)
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO leases_obligation (company_id, kind, account_id, probed_account_id, verb, held_verb, wakes,"
            " requests, requests_served, failures, busy_count, last_error_kind, quiet, closed_at, closed_as)"
            " SELECT company_id, 'probe_account', id, id, '', '', 0, 0, 0, 0, 0, '', '', now(), 'proven'"
            " FROM leases_provideraccount, generate_series(1, 20000)"
        )
        cursor.execute("ANALYZE leases_obligation, leases_attempt")
    values = {
        "account": account.pk,
        "want": 100,
        "limit": 50,
        "verifying": 5,
        "ahead": timedelta(0),
        "blocked": False,
        "broken": False,
        "kinds": None,
        "company": None,
        "lease": None,
        "obligation": None,
        "worker": "w",
        "protection": timedelta(seconds=900),
        "ids": new_ids(100),
    }
    for whose in (LANE, account.pk):
        read = {index for table, index in _plan(claims.claiming(whose), values) if table == "leases_obligation"}
        assert {"obligation_due", "obligation_claimed", "obligation_verified"} <= read, whose
        assert "" not in read, f"{whose}: a whole table is read"


# What holds up an account holds up nothing of it


@pytest.fixture
def in_trouble(rehearsal: Rehearsal) -> Rehearsal:
    """An account behind an open circuit, told to wait by its provider, and full."""
    factories.claimed(released_row(rehearsal))
    ProviderAccount.objects.filter(pk=rehearsal.account.pk).update(
        circuit="open", circuit_failures=5, blocked_until=at(3600), concurrency_limit=1, hinted_until=at(3600)
    )
    return rehearsal


def released_row(rehearsal: Rehearsal) -> Obligation:
    return owed(released(rehearsal))


def test_the_end_of_an_ad_hoc_lease_waits_for_no_account(rehearsal: Rehearsal) -> None:
    """The gap of version 0.3: `end_lease` stood behind the account's circuit."""
    lease = acquired(rehearsal, ad_hoc=True)
    ProviderAccount.objects.filter(pk=rehearsal.account.pk).update(circuit="open", blocked_until=at(3600))
    Lease.objects.filter(pk=lease.pk).update(ends_at=at(-1))
    falls_due(Obligation.objects.get(lease=lease, kind=Kind.END_LEASE))
    assert sweep_lane().outcomes == {"proven": 1}
    assert state(lease) == "pending_cleanup"


@pytest.mark.parametrize("kind", Obligation.INNER)
def test_no_kind_of_it_is_delayed_by_any_trouble_of_an_account(
    in_trouble: Rehearsal, session: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Each kind, whatever its handler does, is hinted and comes to its handler at its time."""
    row = _of_kind(kind, in_trouble)
    came: list[int] = []

    def handler(claim: Claim, _context: work.Context) -> Iterator[work.Call]:
        yield from ()
        came.append(claim.obligation_id)
        return work.Held(at(60))  # type: ignore[return-value]

    monkeypatch.setitem(HANDLERS, kind, handler)
    assert LANE in alarm.hint_due(session).hinted
    assert Engine().sweep(LANE, selection=Selection(kinds=(kind,))).outcomes == {"held": 1}
    assert came == [row.pk]


def _of_kind(kind: str, rehearsal: Rehearsal) -> Obligation:
    if kind == Kind.STARTUP:
        return inner(-5)
    if kind == Kind.WATCH_CONTROLLERS:
        return Obligation.objects.create(kind=kind, installation=Installation.current(), due_at=at(-5))
    if kind == Kind.DISPOSE:
        kept = factories.stopped(factories.lease(rehearsal.environment))
        row = Obligation.objects.get(lease=kept, kind=kind)
        falls_due(row)
        return row
    if kind == Kind.END_RECOVERY:
        recovered = factories.recovery(factories.stopped(factories.lease(rehearsal.environment))).lease
        Obligation.objects.filter(lease=recovered, kind=kind).update(due_at=at(-5))
        return Obligation.objects.get(lease=recovered, kind=kind)
    if kind == Kind.START_CONTINUATION:
        return factories.continuation(factories.failed_run(), due_in=-5).obligations.get()
    if kind == Kind.CONFIRM_CANCEL:
        return factories.cancelled(due_in=-5)
    lease = factories.lease(rehearsal.environment)
    return Obligation.objects.create(company_id=lease.company_id, kind=kind, lease=lease, due_at=at(-5))


@pytest.mark.parametrize("error", [ErrorKind.SERVER, ErrorKind.CONNECTION, ErrorKind.RATE_LIMITED, ErrorKind.IDENTITY])
def test_a_failure_in_it_is_counted_on_the_row_and_moves_no_circuit(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch, error: ErrorKind
) -> None:
    row = inner()
    handles(monkeypatch, work.Failed(error, about_account=True))
    Engine().sweep(LANE)
    row.refresh_from_db()
    assert (row.attempt_id, row.last_error_kind) == (None, error)
    assert row.due_at is not None
    assert 20 < due_in(row) < 40
    assert not ProviderAccount.objects.exclude(circuit_failures=0, blocked_until=None).exists()


def test_a_process_that_is_not_ready_for_one_of_its_rows_goes_on_with_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lacking, fine = inner(-2), inner(-1)

    def handler(claim: Claim, _context: work.Context) -> Iterator[work.Call]:
        yield from ()
        if claim.obligation_id == lacking.pk:
            raise ProviderError(ErrorKind.NOT_READY, "no adapter here")
        return work.Held(at(60))  # type: ignore[return-value]

    monkeypatch.setitem(HANDLERS, Kind.STARTUP, handler)
    assert Engine().sweep(LANE).outcomes == {"handed_back": 1, "held": 1}
    assert attempts(fine) == ["held"]
    assert due_in(lacking) == pytest.approx(engine.UNREADY_FOR, abs=5)
    inner()
    assert Engine().sweep(LANE).outcomes == {"held": 1}


# What stands for long


def test_what_stands_for_long_escalates_by_failures_and_not_by_its_age(monkeypatch: pytest.MonkeyPatch) -> None:
    old = at(-7200)
    standing = Obligation.objects.create(
        kind=Kind.WATCH_CONTROLLERS, installation=Installation.current(), due_at=at(-1), owed_since=old
    )
    ordinary = inner(-1, owed_since=old)
    claims.escalate_overdue(LANE)
    assert _escalated() == {ordinary.pk}
    (taken,) = take(selection=Selection(obligation_id=standing.pk))
    claims.postpone(taken, Attempt.Outcome.FAILED, failed=True)
    assert _escalated() == {ordinary.pk}
    Obligation.objects.filter(pk=standing.pk).update(failures=4, due_at=at(-1))
    (taken,) = take(selection=Selection(obligation_id=standing.pk))
    claims.postpone(taken, Attempt.Outcome.FAILED, failed=True)
    assert _escalated() == {ordinary.pk, standing.pk}
    entry = ActivityEntry.objects.get(action="obligation.escalated", subject_id=str(standing.pk))
    assert entry.company_id is None


def test_a_failure_of_what_does_not_stand_escalates_by_age_in_it_like_elsewhere() -> None:
    row = inner(-1, owed_since=at(-7200))
    (taken,) = take()
    claims.postpone(taken, Attempt.Outcome.HANDED_BACK, delay=60)
    assert _escalated() == {row.pk}


def _escalated() -> set[int]:
    return set(Obligation.objects.filter(escalated_at__isnull=False).values_list("pk", flat=True))


# Verification of history


def verification(account: ProviderAccount, due: float = -5.0, **values: Any) -> Obligation:
    """A lease of the account that was given up without proof, whose verification is due."""
    row = factories.given_up(factories.lease(factories.environment(account)))
    for name, value in {"due_at": at(due), **values}.items():
        setattr(row, name, value)
    row.save()
    return row


@pytest.mark.parametrize(("limit", "share"), [(1, 1), (5, 1), (19, 1), (20, 2), (40, 4)])
def test_history_gets_a_tenth_of_an_account_and_one_place_at_least(limit: int, share: int) -> None:
    account = factories.account(concurrency_limit=limit)
    for _ in range(share + 3):
        verification(account)
    taken = claim(account.pk, new_ids(100), worker="w", clock=boottime)
    assert [one.kind for one in taken] == [Kind.VERIFY_END] * share
    assert claim(account.pk, new_ids(100), worker="w", clock=boottime) == [], "as much is in flight as may be"
    claims.postpone(taken[0], Attempt.Outcome.NOT_SEEN, delay=600)
    assert len(claim(account.pk, new_ids(100), worker="w", clock=boottime)) == 1


def test_history_comes_after_all_that_is_due_whatever_it_is_and_however_long_it_waits() -> None:
    account = factories.account(concurrency_limit=3)
    verification(account, -5000)
    verification(account, -4000, requests=1)
    rows = [factories.teardown(factories.lease(factories.environment(account)), due_in=-1) for _ in range(3)]
    taken = claim(account.pk, new_ids(100), worker="w", clock=boottime)
    assert {one.obligation_id for one in taken} == {row.pk for row in rows}
    claims.postpone(taken[0], Attempt.Outcome.BUSY, delay=600)
    (last,) = claim(account.pk, new_ids(100), worker="w", clock=boottime)
    assert last.kind == Kind.VERIFY_END
    assert Obligation.objects.get(pk=last.obligation_id).requests == 1, "what a person asked for is the first of it"


def test_claimers_at_once_do_not_pass_the_share_of_history() -> None:
    account = factories.account(concurrency_limit=30)
    for _ in range(10):
        verification(account)
    taken = together(*[lambda: claim(account.pk, new_ids(5), worker="w", clock=boottime) for _ in range(4)])
    assert sum(len(some) for some in taken) == 3


@pytest.mark.parametrize("trouble", [{"circuit": "open"}, {"blocked": True}])
def test_history_waits_behind_the_trouble_of_its_account(trouble: dict[str, Any]) -> None:
    blocked = {"blocked_until": at(600)} if "blocked" in trouble else trouble
    account = factories.account(**blocked)
    verification(account)
    assert claim(account.pk, new_ids(5), worker="w", clock=boottime) == []


HISTORY: dict[str, tuple[Callable[[ProviderAccount], object], float]] = {
    "it is due": (lambda a: verification(a, -50), -50),
    "it is due later": (lambda a: verification(a, 50), 50),
    "as much of it is in flight as may be": (
        lambda a: [claimed(verification(a), protected_for=700), verification(a, -50)],
        700,
    ),
    "as much is in flight, and other work is due": (
        lambda a: [
            claimed(verification(a), protected_for=700),
            verification(a, -50),
            factories.teardown(factories.lease(factories.environment(a)), due_in=20),
        ],
        20,
    ),
    "its attempt crashed": (lambda a: [claimed(verification(a), protected_for=-5), verification(a, -2)], -5),
}


@pytest.mark.parametrize("case", HISTORY)
def test_an_account_rings_for_history_when_the_claim_would_take_it(case: str) -> None:
    rows, rings_in = HISTORY[case]
    rows(factories.account(concurrency_limit=10))
    assert alarm.next_alarm() == pytest.approx(at(rings_in), abs=timedelta(seconds=2))


# Coming back


def test_what_is_held_is_owed_again_then_with_nothing_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    row = inner(-1, failures=3, busy_count=2, last_error_kind="server", escalated_at=at(-5))
    until = at(3600)
    handles(monkeypatch, work.Held(until))
    assert Engine().sweep(LANE).outcomes == {"held": 1}
    row.refresh_from_db()
    assert (row.due_at, row.owed_since) == (until, until)
    assert (row.failures, row.busy_count, row.last_error_kind, row.escalated_at) == (0, 0, "", None)
    assert attempts(row) == ["held"]


def test_a_wake_while_it_was_held_makes_it_due_now(monkeypatch: pytest.MonkeyPatch) -> None:
    row = inner(-1)

    def woken() -> work.Outcome:
        if row.attempts.count() == 1:
            elsewhere(lambda: engine_wake(row.pk))
        return work.Held(at(3600))

    handles(monkeypatch, woken)
    assert Engine().sweep(LANE).outcomes == {"held": 2}
    assert due_in(row) > 3000


def engine_wake(pk: int) -> None:
    from leases.waking import wake

    wake(pk)


def test_a_settle_that_meets_a_lock_comes_back_in_half_a_minute_uncounted_and_is_told_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = inner(-1, busy_count=2)
    handles(monkeypatch, work.Contended())
    told: list[int] = []
    tally = Engine(on_contended=lambda claim: told.append(claim.obligation_id)).sweep(LANE)
    assert tally.outcomes == {"contended": 1}
    assert told == [row.pk]
    row.refresh_from_db()
    assert due_in(row) == pytest.approx(CONTENDED_DELAY, abs=3)
    assert (row.failures, row.busy_count, row.last_error_kind) == (0, 2, "")
    assert attempts(row) == ["handed_back"]


def test_a_message_that_cannot_be_sent_costs_only_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [inner(-2), inner(-1)]
    handles(monkeypatch, work.Contended())

    def no_broker(_: Claim) -> None:
        raise ConnectionError("the broker is away")

    assert Engine(on_contended=no_broker).sweep(LANE).outcomes == {"contended": 2}
    assert all(due_in(row) < 31 for row in rows)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, float]]:
    """The countdown messages of `look_at_again`, not sent."""
    messages: list[tuple[Any, float]] = []

    def note(arguments: tuple[int], countdown: float, **_: Any) -> None:
        messages.append((arguments, countdown))

    monkeypatch.setattr(tasks.look_at_again, "apply_async", note)
    return messages


def again(row: Obligation, retries: int = 0) -> bool:
    """Run the countdown task as its `retries`-th repetition; return whether it wants another."""
    wants: Retry | None = None
    tasks.look_at_again.push_request(retries=retries, called_directly=False, is_eager=True)
    try:
        tasks.look_at_again.run(row.pk)
    except Retry as retry:
        wants = retry
    finally:
        tasks.look_at_again.pop_request()
    assert wants is None or wants.when == tasks.AGAIN_AFTER
    return wants is not None


def test_a_chain_of_looks_settles_it_seconds_after_the_lock_is_free(
    monkeypatch: pytest.MonkeyPatch, sent: list[tuple[Any, float]]
) -> None:
    row = inner(-1)
    outcomes: list[work.Outcome] = [work.Contended(), work.Contended(), work.Held(at(600))]
    handles(monkeypatch, lambda: outcomes.pop(0))
    tasks.settle_ownership()
    assert sent == [((row.pk,), tasks.AGAIN_AFTER)]
    assert again(row), "the lock is still held"
    assert row.attempts.count() == 2, "it looks once"
    assert not again(row, 1)
    assert due_in(row) > 500
    assert len(sent) == 1
    assert not again(row, 2), "a message that is delivered twice finds nothing to do"
    assert row.attempts.count() == 3


def test_the_chain_is_bounded_and_its_row_due_behind_it(
    monkeypatch: pytest.MonkeyPatch, sent: list[tuple[Any, float]]
) -> None:
    row = inner(-1)
    handles(monkeypatch, work.Contended())
    tasks.settle_ownership()
    looks = 0
    while again(row, looks):
        looks += 1
    assert looks == tasks.AGAIN_TIMES
    assert len(sent) == 1, "its own looks begin no other chain"
    assert 0 < due_in(row) <= CONTENDED_DELAY
    assert alarm.next_alarm() is not None


def test_a_look_ahead_notifies_nobody_and_cuts_no_cooldown_short(
    monkeypatch: pytest.MonkeyPatch, sent: list[tuple[Any, float]]
) -> None:
    row = inner(-1)
    handles(monkeypatch, work.Failed(ErrorKind.PROTOCOL))
    Engine().sweep(LANE)
    Obligation.objects.filter(pk=row.pk).update(due_at=at(20))
    before = row.attempts.count()
    assert not again(row)
    assert row.attempts.count() == before, "it cools down after a failure"
    quiet = factories.startup()
    factories.attempt(quiet, outcome=Attempt.Outcome.HANDED_BACK)
    assert not again(quiet)
    assert quiet.attempts.count() == 1


def test_a_look_ahead_takes_no_row_from_an_attempt_whose_protection_ends_soon() -> None:
    row = claimed(inner(-1), protected_for=20)
    assert take(selection=Selection(obligation_id=row.pk, ahead=30)) == []
    other = inner(20)
    assert take(selection=Selection(obligation_id=other.pk)) == []
    assert len(take(selection=Selection(obligation_id=other.pk, ahead=30))) == 1
