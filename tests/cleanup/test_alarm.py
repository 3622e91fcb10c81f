"""When an account rings: the formula row by row, what one look does, and that history costs nothing."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from django.db import connection

from cleanup import alarm, listening
from leases.models import Obligation, ProviderAccount
from tests import factories
from tests.beats import owed
from tests.factories import at, claimed, probe

pytestmark = pytest.mark.django_db(transaction=True)

Rows = Callable[[ProviderAccount], object]


@pytest.fixture
def session() -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(**listening.address(), autocommit=True) as made:
        yield made


def quiet(account: ProviderAccount) -> Obligation:
    return owed(account, 0, due_at=None, quiet=Obligation.Quiet.FOREIGN_MARKS)


# What an account has, and in how many seconds it rings and is to be looked at; None: never.
FORMULA: dict[str, tuple[dict[str, float | str], Rows, float | None, float | None]] = {
    "it owes nothing": ({}, lambda _: None, None, None),
    "it owes only what waits for a person": ({}, quiet, None, None),
    "a row is due later": ({}, lambda a: owed(a, 100), 100, 100),
    "the earliest of several rows counts": ({}, lambda a: [owed(a, 300), owed(a, 100), owed(a, 200)], 100, 100),
    "a row is overdue": ({}, lambda a: owed(a, -50), -50, -50),
    "a claimed row counts by the end of its protection": ({}, lambda a: claimed(owed(a, -50)), 900, 900),
    "a crashed attempt's row is due when its protection ended": (
        {},
        lambda a: claimed(owed(a, -50), protected_for=-5),
        -5,
        -5,
    ),
    "the provider said Retry-After": ({"blocked_until": 200}, lambda a: owed(a, -50), 200, 200),
    "Retry-After is over before the row is due": ({"blocked_until": 20}, lambda a: owed(a, 100), 100, 100),
    "Retry-After is past": ({"blocked_until": -20}, lambda a: owed(a, 100), 100, 100),
    "a hint is on its way": ({"hinted_until": 8}, lambda a: owed(a, -50), 8, 8),
    "a hint was lost": ({"hinted_until": -8}, lambda a: owed(a, -50), -8, -8),
    "an account that is not full rings for the next row": (
        {"concurrency_limit": 2},
        lambda a: [claimed(owed(a, 0)), owed(a, -50)],
        -50,
        -50,
    ),
    "a full account rings at the first end of a protection, and is looked at before for what waits": (
        {"concurrency_limit": 2},
        lambda a: [claimed(owed(a, 0), protected_for=700), claimed(owed(a, 0), protected_for=800), owed(a, -50)],
        700,
        30,
    ),
    "a full account with a row that is due later is looked at then": (
        {"concurrency_limit": 1},
        lambda a: [claimed(owed(a, 0), protected_for=700), owed(a, 100)],
        700,
        100,
    ),
    "behind a full account nothing waits, so nothing looks": (
        {"concurrency_limit": 1},
        lambda a: claimed(owed(a, 0), protected_for=700),
        700,
        700,
    ),
    "a protection that ended does not fill an account": (
        {"concurrency_limit": 1},
        lambda a: [claimed(owed(a, 0), protected_for=-1), owed(a, -50)],
        -50,
        -50,
    ),
    "a full account whose provider said Retry-After": (
        {"concurrency_limit": 1, "blocked_until": 800},
        lambda a: [claimed(owed(a, 0), protected_for=700), owed(a, -50)],
        800,
        800,
    ),
    "behind an open circuit only the probe counts": (
        {"circuit": "open"},
        lambda a: [owed(a, -50), probe(a, due_in=60)],
        60,
        60,
    ),
    "an open circuit without a probe never rings": ({"circuit": "open"}, lambda a: owed(a, -50), None, None),
    "Retry-After holds the probe too": (
        {"circuit": "open", "blocked_until": 90},
        lambda a: [owed(a, -50), probe(a, due_in=-5)],
        90,
        90,
    ),
    "a hinted probe": ({"circuit": "open", "hinted_until": 9}, lambda a: probe(a, due_in=-5), 9, 9),
    "a probe behind calls that still fill the account": (
        {"circuit": "open", "concurrency_limit": 1},
        lambda a: [claimed(owed(a, 0), protected_for=700), probe(a, due_in=-5)],
        -5,
        -5,
    ),
}


@pytest.mark.django_db
@pytest.mark.parametrize("case", FORMULA)
def test_it_rings_when(case: str) -> None:
    columns, rows, rings_in, looks_in = FORMULA[case]
    values: dict[str, Any] = {key: at(float(value)) if "until" in key else value for key, value in columns.items()}
    account = factories.account(**values)
    rows(account)
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT extract(epoch FROM alarm - now())::float8, extract(epoch FROM look_at - now())::float8"  # noqa: S608
            f" FROM ({alarm.ALARMS}) alarms WHERE id = %(account)s",
            {"account": account.pk, **alarm.VALUES},
        )
        found = cursor.fetchone()
    if rings_in is None:
        assert found is None
    else:
        assert found == (pytest.approx(rings_in, abs=2), pytest.approx(looks_in, abs=2))


@pytest.mark.django_db
def test_the_next_alarm_is_the_earliest_of_all_accounts() -> None:
    assert alarm.next_alarm() is None
    owed(factories.account(), 500)
    owed(factories.account(), 100)
    owed(factories.account(blocked_until=at(900)), 10)
    rings = alarm.next_alarm()
    assert rings is not None
    assert rings == pytest.approx(at(100), abs=timedelta(seconds=2))


def test_a_look_hints_every_due_account_once_the_longest_due_first(session: psycopg.Connection[Any]) -> None:
    late, later, future = factories.account(), factories.account(), factories.account()
    owed(late, -100)
    owed(later, -50)
    owed(later, -20)
    owed(future, 300)
    rung = alarm.hint_due(session)
    assert rung.hinted == (late.pk, later.pk)
    assert rung.look_at == pytest.approx(rung.now + 10, abs=1)
    late.refresh_from_db()
    assert late.hinted_until == pytest.approx(at(10), abs=timedelta(seconds=2))
    again = alarm.hint_due(session)
    assert again.hinted == ()
    assert again.look_at == pytest.approx(rung.look_at, abs=1)


def test_a_hint_that_lapsed_is_repeated(session: psycopg.Connection[Any]) -> None:
    account = factories.account()
    owed(account, -100)
    assert alarm.hint_due(session).hinted == (account.pk,)
    account.hinted_until = at(-0.001)
    account.save(update_fields=["hinted_until"])
    assert alarm.hint_due(session).hinted == (account.pk,)


def test_a_look_that_finds_nothing_owed_says_so_and_writes_nothing(session: psycopg.Connection[Any]) -> None:
    factories.account()
    rung = alarm.hint_due(session)
    assert (rung.hinted, rung.look_at) == ((), None)
    assert rung.now == pytest.approx(factories.database_now().timestamp(), abs=2)


def test_an_account_that_a_claim_has_locked_delays_no_other(session: psycopg.Connection[Any]) -> None:
    locked, free = factories.account(), factories.account()
    owed(locked, -100)
    owed(free, -50)
    with psycopg.connect(**listening.address()) as claimer:
        claimer.execute("SELECT 1 FROM leases_provideraccount WHERE id = %s FOR NO KEY UPDATE", [locked.pk])
        rung = alarm.hint_due(session)
        assert rung.hinted == (free.pk,)
        assert rung.look_at is not None
        assert rung.look_at < rung.now, "it must look again soon"
        assert not alarm.is_unheard(session), "no other leader could hint it either"
    assert alarm.hint_due(session).hinted == (locked.pk,)


def test_of_many_that_look_at_once_one_hints() -> None:
    for _ in range(10):
        owed(factories.account(), -10)
    barrier = threading.Barrier(8)
    hinted: list[object] = []

    def look() -> None:
        with psycopg.connect(**listening.address(), autocommit=True) as own:
            barrier.wait(20)
            for _ in range(5):
                hinted.extend(alarm.hint_due(own).hinted)

    threads = [threading.Thread(target=look) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(hinted) == len(set(hinted)) == 10


def test_an_alarm_of_more_than_a_minute_is_unheard(session: psycopg.Connection[Any]) -> None:
    account = factories.account()
    row = owed(account, -50)
    assert not alarm.is_unheard(session)
    row.due_at = at(-70)
    row.save(update_fields=["due_at"])
    assert alarm.is_unheard(session)
    alarm.hint_due(session)
    assert not alarm.is_unheard(session)


def _history(number: int) -> None:
    """Insert closed obligations, spread over the accounts."""
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO leases_obligation (company_id, kind, account_id, probed_account_id, verb, held_verb, wakes,"
            " requests, requests_served, failures, busy_count, last_error_kind, quiet, closed_at, closed_as)"
            " SELECT a.company_id, 'probe_account', a.id, a.id, '', '', 0, 0, 0, 0, 0, '', '', now(), 'proven'"
            " FROM leases_provideraccount a,"
            " generate_series(1, %s / (SELECT count(*)::int FROM leases_provideraccount))",
            [number],
        )


def _nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", []):
        yield from _nodes(child)


# The partial indexes over open rows, and the accounts themselves.
OPEN_ONLY = {
    "obligation_due",
    "obligation_verified",
    "obligation_claimed",
    "obligation_is_one_per_account_and_kind",
    "obligation_open",
}


def test_closed_history_costs_nothing() -> None:
    """A look reads the few open rows through partial indexes, whatever 100,000 closed rows lie beside them.

    Also while the table was never analysed, as after a restore or a sudden growth.
    """
    with connection.cursor() as cursor:  # as if no test had been here: without the dead rows of those before
        cursor.execute("ALTER TABLE leases_obligation ALTER COLUMN busy_count TYPE integer USING busy_count + 0")
    accounts = [factories.account() for _ in range(20)]
    for account in accounts:
        owed(account, 500)
        claimed(owed(account, 0))
    accounts[0].circuit = ProviderAccount.Circuit.OPEN
    accounts[0].save()
    probe(accounts[0], due_in=60)
    for _ in range(3):
        factories.startup(quiet="", due_at=at(700))
    _history(100_000)
    for statistics in ("none", "fresh"):
        with connection.cursor() as cursor:
            if statistics == "fresh":
                cursor.execute("ANALYZE leases_obligation, leases_provideraccount")
            cursor.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {alarm.RING}", alarm.VALUES)
            row = cursor.fetchone()
        assert row is not None
        plan = (row[0] if isinstance(row[0], list) else json.loads(row[0]))[0]["Plan"]
        nodes = list(_nodes(plan))
        indexes = {node["Index Name"] for node in nodes if "Index Name" in node}
        assert {"obligation_due", "obligation_claimed"} <= indexes <= OPEN_ONLY | {"leases_provideraccount_pkey"}
        scanned = {node["Relation Name"] for node in nodes if node["Node Type"] == "Seq Scan"}
        assert scanned <= {"leases_provideraccount", "leases_installation"}
        pages = plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]
        assert pages < 10 * len(accounts), f"{pages} pages for {len(accounts)} accounts ({statistics} statistics)"
