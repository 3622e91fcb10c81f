"""What wakes a real beat process, and what it sends. One process serves all tests of this module, as in life."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from celery import current_app
from django.db import connection
from django_celery_beat.models import IntervalSchedule, PeriodicTask
from pytest_django.plugin import DjangoDbBlocker

from cleanup import listening
from cleanup.beat import Entry
from leases.models import Obligation, ProviderAccount
from leases.waking import wake
from tests import factories
from tests.beats import Beat, Queue, beats, eventually, leader_sleeps, owed
from tests.factories import at, claimed, probe

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(scope="module")
def running(
    django_db_setup: None, django_db_blocker: DjangoDbBlocker, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Beat]:
    with django_db_blocker.unblock(), beats(tmp_path_factory.mktemp("beat")) as start:
        yield start().leads()


@pytest.fixture
def leader(running: Beat, hints: Queue) -> Beat:
    assert running.process.poll() is None, running.told()
    eventually(leader_sleeps, "the leader sleeps")
    return running


@pytest.fixture
def hints(transactional_db: None) -> Iterator[Queue]:
    queue = Queue()
    yield queue
    queue.close()


def moved(row: Obligation, due_in: float) -> None:
    Obligation.objects.filter(pk=row.pk).update(due_at=at(due_in))


# --- Deadlines ------------------------------------------------------------------------------------------------------


def test_a_row_that_falls_due_is_hinted_at_its_time_and_not_before(leader: Beat, hints: Queue) -> None:
    account = factories.account()
    row = owed(account, 1.5)
    assert hints.hint() == account.pk
    assert row.due_at is not None
    late = (factories.database_now() - row.due_at).total_seconds()
    assert 0 <= late < 1


def test_a_new_row_wakes_it(leader: Beat, hints: Queue) -> None:
    account = factories.account()
    began = time.monotonic()
    owed(account)
    assert hints.hint() == account.pk
    assert time.monotonic() - began < 8


def test_an_earlier_deadline_wakes_it(leader: Beat, hints: Queue) -> None:
    account = factories.account()
    row = owed(account, 3600)
    moved(row, 0)
    assert hints.hint(8) == account.pk


def test_a_quiet_row_counts_as_never_and_its_wake_is_heard(leader: Beat, hints: Queue) -> None:
    account = factories.account()
    row = owed(account, due_at=None, quiet=Obligation.Quiet.FOREIGN_MARKS)
    assert hints.is_silent(0.5)
    wake(row.pk)
    assert hints.hint(8) == account.pk


def test_a_row_that_moved_later_is_not_hinted_early(leader: Beat, hints: Queue) -> None:
    account = factories.account()
    row = owed(account, 1)
    moved(row, 3600)
    assert hints.is_silent(2)


@pytest.mark.parametrize(
    ("before", "opening"),
    [
        ({"blocked_until": 3600}, {"blocked_until": None}),
        ({"hinted_until": 3600}, {"hinted_until": None}),
        ({"circuit": "open"}, {"circuit": "closed"}),
    ],
    ids=["unblocked", "hint cleared", "circuit closed"],
)
def test_an_account_that_opens_is_hinted_at_once(
    leader: Beat, hints: Queue, before: dict[str, Any], opening: dict[str, Any]
) -> None:
    values: dict[str, Any] = {key: at(value) if "until" in key else value for key, value in before.items()}
    account = factories.account(**values)
    owed(account, -5)
    assert hints.is_silent(0.3)
    ProviderAccount.objects.filter(pk=account.pk).update(**opening)
    assert hints.hint(8) == account.pk


def test_a_full_account_is_hinted_when_its_limit_is_raised(leader: Beat, hints: Queue) -> None:
    account = factories.account(concurrency_limit=1)
    claimed(owed(account, 3600))
    owed(account, -5)
    assert hints.is_silent(0.3)
    ProviderAccount.objects.filter(pk=account.pk).update(concurrency_limit=2)
    assert hints.hint(8) == account.pk


def test_behind_an_open_circuit_only_the_probe_is_hinted(leader: Beat, hints: Queue) -> None:
    account = factories.account(circuit="open")
    owed(account, -5)
    assert hints.is_silent(0.3)
    probe(account, due_in=0.3)
    assert hints.hint(8) == account.pk


def test_one_alarm_is_one_hint_until_the_hint_lapses(leader: Beat, hints: Queue) -> None:
    """A lost hint costs ten seconds; they pass here by moving the row back."""
    account = factories.account()
    owed(account)
    assert hints.hint() == account.pk
    assert hints.is_silent(1)
    ProviderAccount.objects.filter(pk=account.pk).update(hinted_until=at(-1))
    assert hints.hint(8) == account.pk


def test_racing_writers_lose_no_wake_up(leader: Beat, hints: Queue) -> None:
    """Four commits at once, round after round; each must be answered before the next round could cover it up."""
    rounds, writers = 40, 4
    rows = [[owed(factories.account(), 3600) for _ in range(rounds)] for _ in range(writers)]
    barrier = threading.Barrier(writers + 1)

    def write(own: list[Obligation]) -> None:
        with psycopg.connect(**listening.address(), autocommit=True) as session:
            for row in own:
                barrier.wait(30)
                session.execute("UPDATE leases_obligation SET due_at = now() WHERE id = %s", [row.pk])

    threads = [threading.Thread(target=write, args=(own,)) for own in rows]
    for thread in threads:
        thread.start()
    for turn in range(rounds):
        barrier.wait(30)
        assert hints.hints(writers) == {own[turn].account_id for own in rows}
    for thread in threads:
        thread.join(20)


# --- Periodic tasks -------------------------------------------------------------------------------------------------


def _every(seconds: int, **values: Any) -> PeriodicTask:
    interval = IntervalSchedule.objects.create(every=seconds, period=IntervalSchedule.SECONDS)
    return PeriodicTask.objects.create(
        **{"name": "tick", "task": "test.tick", "interval": interval, "queue": "paperclip-test", **values}
    )


@pytest.fixture
def ticks(transactional_db: None) -> Iterator[Queue]:
    queue = Queue("paperclip-test")
    yield queue
    queue.close()


def test_a_periodic_task_runs_and_its_own_counters_do_not_wake_the_beat(
    leader: Beat, hints: Queue, ticks: Queue
) -> None:
    task = _every(1)
    with psycopg.connect(**listening.address(), autocommit=True) as session:
        session.execute("LISTEN paperclip_schedule")
        for _ in range(3):
            assert ticks.take() == {"task": "test.tick", "args": []}
        eventually(lambda: PeriodicTask.objects.get(pk=task.pk).total_run_count >= 2, "its runs are counted")
        assert not list(session.notifies(timeout=0, stop_after=1)), "saving the counters must not notify"


@pytest.mark.parametrize("how", ["admin", "update", "raw SQL", "schedule", "delete", "truncate"])
def test_an_edit_wakes_it(leader: Beat, hints: Queue, ticks: Queue, how: str) -> None:
    """Whoever edits, however: the task that ran every second stops, or the one that did not runs."""
    task = _every(3600 if how == "schedule" else 1, enabled=how not in {"admin", "raw SQL"})
    if how in {"update", "delete", "truncate"}:
        assert ticks.take() is not None
    else:
        assert ticks.is_silent(1.2)
    if how == "admin":
        task.enabled = True
        task.save()
    elif how == "update":
        PeriodicTask.objects.filter(pk=task.pk).update(enabled=False)
    elif how == "schedule":
        IntervalSchedule.objects.update(every=1)
    elif how == "delete":
        task.delete()
    else:
        with connection.cursor() as cursor:
            cursor.execute(
                "TRUNCATE django_celery_beat_periodictask"
                if how == "truncate"
                else "UPDATE django_celery_beat_periodictask SET enabled = true"
            )
    if how in {"update", "delete", "truncate"}:
        eventually(lambda: ticks.is_silent(1.5), "it has stopped")
    else:
        assert ticks.take(5) is not None


def test_saving_that_a_task_ran_undoes_no_edit_and_brings_nothing_back(transactional_db: None) -> None:
    task = _every(3600, enabled=False)
    read = Entry(PeriodicTask.objects.get(pk=task.pk), app=current_app)
    PeriodicTask.objects.update(description="edited meanwhile", enabled=True)
    next(read).save()
    task.refresh_from_db()
    assert (task.description, task.enabled, task.total_run_count) == ("edited meanwhile", True, 1)
    assert task.last_run_at is not None
    PeriodicTask.objects.all().delete()
    next(read).save()
    assert not PeriodicTask.objects.exists()


def test_a_periodic_task_that_cannot_be_understood_costs_the_others_nothing(
    leader: Beat, hints: Queue, ticks: Queue
) -> None:
    _every(1)
    PeriodicTask.objects.create(name="broken", task="test.broken", interval=IntervalSchedule.objects.get(), args="[]")
    PeriodicTask.objects.filter(name="broken").update(interval=None)
    assert ticks.take() is not None
    assert "The periodic task broken is left out" in leader.told()
