"""Nothing polls: which writes are heard, that the document says so, and that a fleet at rest sends no statement."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.db import DatabaseError, connection, transaction
from django_celery_beat.models import CrontabSchedule, IntervalSchedule, PeriodicTask

from cleanup import listening, outside
from leases.models import BridgeActivity, Installation, Obligation, ProviderAccount
from leases.waking import wake
from tests import factories
from tests.beats import Beat, Queue, beats, eventually, leader_session, owed
from tests.factories import at, claimed
from tests.tables import rows_of

pytestmark = pytest.mark.django_db(transaction=True)

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "idle.md"


# --- The document ---------------------------------------------------------------------------------------------------


def _triggers(condition: str) -> set[str]:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT t.tgname FROM pg_trigger t JOIN pg_proc p ON p.oid = t.tgfoid"  # noqa: S608 -- constants
            f" WHERE NOT t.tgisinternal AND {condition}"
        )
        return {row[0] for row in cursor.fetchall()}


def test_the_document_names_every_trigger_that_notifies_and_no_other() -> None:
    named = {row["trigger"] for row in rows_of(DOCUMENT, "What wakes the beat")}
    assert named == _triggers("p.prosrc ILIKE '%pg_notify%'")


def test_every_trigger_that_the_document_mentions_exists() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    mentioned = set(re.findall(r"`(\w+_(?:notifies|wakes_\w+))`", text))
    assert mentioned <= _triggers("true")
    assert "activity_end_wakes_teardown" in mentioned


def test_no_setting_of_a_session_silences_them() -> None:
    assert not _triggers("p.prosrc ILIKE '%pg_notify%' AND t.tgenabled <> 'A'")


# --- What is heard --------------------------------------------------------------------------------------------------


@pytest.fixture
def heard(transactional_db: None) -> Iterator[Callable[[], list[str]]]:
    """A function that returns the payloads of what was notified since it was last called, and by which channel."""
    with psycopg.connect(**listening.address(), autocommit=True) as session:
        for channel in listening.CHANNELS:
            session.execute(f"LISTEN {channel}")

        def since() -> list[str]:
            # A marker that is notified last comes last: everything before it has arrived then.
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_notify('paperclip_due', 'marker')")
            found: list[str] = []
            for notify in session.notifies(timeout=20):
                if notify.payload == "marker":
                    return found
                found.append(notify.channel.removeprefix("paperclip_") + ":" + notify.payload)
            raise AssertionError("the marker did not come")

        yield since


def _update(row: Obligation | ProviderAccount, **values: Any) -> None:
    for name, value in values.items():
        setattr(row, name, value)
    row.save(update_fields=list(values))


Write = Callable[[Obligation, ProviderAccount], object]

LOUD: dict[str, tuple[dict[str, Any], Write]] = {
    "an obligation is created": ({}, lambda _, account: owed(account, 60)),
    "it moves earlier": ({}, lambda row, _: _update(row, due_at=at(10))),
    "it is woken": ({}, lambda row, _: wake(row.pk)),
    "a person asks for an attempt": ({}, lambda row, _: wake(row.pk, explicit=True)),
    "an attempt fails": (
        {},
        lambda row, _: _update(claimed(row), attempt_id=None, worker=None, claimed_at=None, due_at=at(30)),
    ),
    "an account is unblocked": ({"blocked_until": 600}, lambda _, account: _update(account, blocked_until=None)),
    "an account is blocked less long": (
        {"blocked_until": 600},
        lambda _, account: _update(account, blocked_until=at(5)),
    ),
    "a hint is cleared": ({"hinted_until": 9}, lambda _, account: _update(account, hinted_until=None)),
    "a limit is raised": ({"concurrency_limit": 3}, lambda _, account: _update(account, concurrency_limit=4)),
    "a circuit closes": ({"circuit": "open"}, lambda _, account: _update(account, circuit="closed")),
    "the hint of the built-in lane is cleared": (
        {},
        lambda *_: [Installation.objects.update(hinted_until=at(9)), Installation.objects.update(hinted_until=None)],
    ),
    "what calls no provider is owed": ({}, lambda *_: factories.startup(quiet="", due_at=at(60))),
}

SILENT: dict[str, tuple[dict[str, Any], Write]] = {
    "it moves later": ({}, lambda row, _: _update(row, due_at=at(7200))),
    "it is claimed": ({}, lambda row, _: claimed(row, protected_for=7200)),
    "it becomes quiet": ({}, lambda row, _: _update(row, due_at=None, quiet="foreign_marks")),
    "its columns change but not its deadline": ({}, lambda row, _: _update(row, failures=3)),
    "an account is blocked": ({}, lambda _, account: _update(account, blocked_until=at(600))),
    "an account is blocked longer": ({"blocked_until": 5}, lambda _, account: _update(account, blocked_until=at(600))),
    "an account is hinted": ({}, lambda _, account: _update(account, hinted_until=at(10))),
    "a circuit opens": ({}, lambda _, account: _update(account, circuit="open")),
    "a limit is lowered": ({"concurrency_limit": 3}, lambda _, account: _update(account, concurrency_limit=2)),
    "an account is renamed": ({}, lambda _, account: _update(account, name="another")),
    "the built-in lane is hinted": ({}, lambda *_: Installation.objects.update(hinted_until=at(10))),
}


def _given(columns: dict[str, Any]) -> tuple[Obligation, ProviderAccount]:
    Installation.current()
    values: dict[str, Any] = {key: at(value) if key.endswith("until") else value for key, value in columns.items()}
    account = factories.account(**values)
    return owed(account, 3600), account


@pytest.mark.parametrize("case", LOUD)
def test_it_is_heard_when(case: str, heard: Callable[[], list[str]]) -> None:
    columns, write = LOUD[case]
    given = _given(columns)
    heard()
    write(*given)
    assert heard()


@pytest.mark.parametrize("case", SILENT)
def test_nothing_is_heard_when(case: str, heard: Callable[[], list[str]]) -> None:
    columns, write = SILENT[case]
    given = _given(columns)
    heard()
    write(*given)
    assert heard() == []


def test_the_end_of_work_in_a_sandbox_is_heard(heard: Callable[[], list[str]]) -> None:
    row, _ = _given({})
    assert row.lease is not None
    work = BridgeActivity.objects.create(company_id=row.company_id, lease=row.lease, deadline=at(600))
    heard()
    work.ended_at, work.outcome = at(0), BridgeActivity.Outcome.COMPLETED
    work.save()
    assert len(heard()) == 1


def test_what_is_rolled_back_is_not_heard(heard: Callable[[], list[str]]) -> None:
    account = factories.account()
    heard()
    with transaction.atomic():
        owed(account)
        transaction.set_rollback(True)
    assert heard() == []


def test_the_deadline_itself_is_told(heard: Callable[[], list[str]]) -> None:
    row = owed(factories.account(), 600)
    assert row.due_at is not None
    (said,) = heard()
    assert float(said.removeprefix("due:")) == pytest.approx(row.due_at.timestamp(), abs=1e-3)


def test_edits_of_periodic_tasks_are_heard_and_their_runs_are_not(heard: Callable[[], list[str]]) -> None:
    crontab = CrontabSchedule.objects.create(minute="5")
    assert heard() == [], "a schedule that no task has"
    task = PeriodicTask.objects.create(name="t", task="t", crontab=crontab)
    assert heard() == ["schedule:"]
    task.last_run_at, task.total_run_count = at(0), 1
    task.save()
    assert heard() == [], "it ran"
    PeriodicTask.objects.update(description="another")
    assert heard() == ["schedule:"]
    PeriodicTask.objects.update(description="another")
    assert heard() == [], "nothing changed"
    CrontabSchedule.objects.update(minute="6")
    assert heard() == ["schedule:"]
    task.delete()
    assert heard() == ["schedule:"]


# --- Silence --------------------------------------------------------------------------------------------------------


@pytest.fixture
def statements(transactional_db: None) -> Callable[[], dict[str, int]]:
    """A function that returns how often each statement ran in this database, without its own."""
    try:
        with connection.cursor() as cursor:
            cursor.execute("CREATE EXTENSION IF NOT EXISTS pg_stat_statements")
            cursor.execute("SELECT count(*) FROM pg_stat_statements")
    except DatabaseError as error:
        pytest.skip(f"pg_stat_statements is not available: {error}")

    def count() -> dict[str, int]:
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT query, sum(calls)::bigint FROM pg_stat_statements"
                " WHERE dbid = (SELECT oid FROM pg_database WHERE datname = current_database())"
                " AND query NOT LIKE '%pg_stat_statements%' GROUP BY query"
            )
            return dict(cursor.fetchall())

    return count


@pytest.fixture
def hints(transactional_db: None) -> Iterator[Queue]:
    queue = Queue()
    yield queue
    queue.close()


@pytest.fixture
def beat(hints: Queue, tmp_path: Path) -> Iterator[Callable[..., Beat]]:
    with beats(tmp_path) as start:
        yield start


def _switches(beat: Beat) -> int:
    """Return how often the process gave up the processor: each time it slept."""
    status = Path(f"/proc/{beat.process.pid}/status")
    if not status.exists():
        pytest.skip("no /proc on this system")
    (line,) = [line for line in status.read_text().splitlines() if line.startswith("voluntary_ctxt_switches")]
    return int(line.split()[1])


def _is_done(beat: Beat) -> None:
    """Wait until the mark of its look is kept outside, too: the last thing that it does before it sleeps."""

    def look() -> bool:
        mark, position = Installation.objects.values_list("mark", "watermark_position").get()
        kept = outside.in_broker(mark)
        return kept is not None and kept.position == position

    eventually(look, "the mark is kept in the broker")
    eventually(lambda: _sleeps(beat), "it sleeps")


def _sleeps(beat: Beat) -> bool:
    """Return whether the process waits for something, and did nothing else in between two looks at it."""
    first = _switches(beat)
    asleep = Path(f"/proc/{beat.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"
    threading.Event().wait(0.2)
    return asleep and _switches(beat) == first


def _fleet_that_waits() -> None:
    owed(factories.account(), 3600)
    claimed(owed(factories.account(concurrency_limit=1), 0))
    owed(factories.account(), due_at=None, quiet=Obligation.Quiet.FOREIGN_MARKS)
    owed(factories.account(blocked_until=at(3600)), -5)
    owed(factories.account(circuit="open"), -5)
    factories.given_up()
    quiet = factories.given_up()
    quiet.due_at, quiet.quiet = None, Obligation.Quiet.HISTORY_UNVERIFIED
    quiet.save(update_fields=["due_at", "quiet"])
    factories.startup(quiet="", due_at=at(3600))  # the built-in lane waits for a time, for another row, for its worker
    factories.startup()
    claimed(factories.startup(quiet="", due_at=at(0)))
    hour = IntervalSchedule.objects.create(every=1, period=IntervalSchedule.HOURS)
    PeriodicTask.objects.create(name="hourly", task="test.hourly", interval=hour)


@pytest.mark.parametrize("fleet", ["owes nothing", "waits"])
def test_a_leader_at_rest_sends_no_statement_and_does_not_run(
    beat: Callable[..., Beat], hints: Queue, statements: Callable[[], dict[str, int]], fleet: str
) -> None:
    """S-265, S-272: also where history waits for its next look, or for a person."""
    if fleet == "waits":
        _fleet_that_waits()
    leader = beat().leads()
    _is_done(leader)
    before, switches = statements(), _switches(leader)
    assert hints.is_silent(4)
    assert _switches(leader) == switches
    assert statements() == before


def test_a_beat_that_starts_finds_what_is_due_and_what_will_be(beat: Callable[..., Beat], hints: Queue) -> None:
    """S-273: everything is a row, so a restart of all processes forgets nothing; history as little as a teardown."""
    first, second = owed(factories.account(), -3600), factories.given_up()
    Obligation.objects.filter(pk=second.pk).update(due_at=at(6))
    beat().leads()
    assert hints.hint() == first.account_id
    assert hints.hint() == second.account_id


def test_comparing_its_clocks_takes_no_statement(
    beat: Callable[..., Beat], hints: Queue, statements: Callable[[], dict[str, int]]
) -> None:
    """With `--max-interval` it wakes up every second instead of every five minutes."""
    _fleet_that_waits()
    leader = beat("--max-interval", "1").leads()
    before, switches = statements(), _switches(leader)
    assert hints.is_silent(3)
    assert _switches(leader) > switches
    assert statements() == before


def test_the_leader_has_one_session_and_holds_no_snapshot(beat: Callable[..., Beat], hints: Queue) -> None:
    _fleet_that_waits()
    beat().leads()
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pid, state, backend_xmin IS NULL AND backend_xid IS NULL FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
        )
        assert cursor.fetchall() == [(leader_session(), "idle", True)]
