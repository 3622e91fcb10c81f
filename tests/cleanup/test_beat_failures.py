"""How real beat processes outlive sessions, servers, brokers and each other."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

import psycopg
import pytest
from django_celery_beat.models import IntervalSchedule, PeriodicTask

from cleanup import leadership, listening
from leases.models import Obligation, ProviderAccount
from tests import factories
from tests.beats import (
    Beat,
    Queue,
    beat_sessions,
    beats,
    broker_url,
    database_url,
    eventually,
    leader_session,
    leader_sleeps,
    owed,
    terminate,
)
from tests.factories import at
from tests.relay import Relay

pytestmark = pytest.mark.django_db(transaction=True)

Start = Callable[..., Beat]


@pytest.fixture
def hints(transactional_db: None) -> Iterator[Queue]:
    queue = Queue()
    yield queue
    queue.close()


@pytest.fixture
def beat(hints: Queue, tmp_path: Path) -> Iterator[Start]:
    with beats(tmp_path) as start:
        yield start


def test_what_is_due_when_it_starts_is_hinted(beat: Start, hints: Queue) -> None:
    accounts = {factories.account().pk for _ in range(3)}
    for account in ProviderAccount.objects.all():
        owed(account, -5)
    beat()
    assert hints.hints(3) == accounts


# --- Sessions and servers -------------------------------------------------------------------------------------------


def test_a_row_inserted_while_the_listener_is_cut_off_is_found(beat: Start, hints: Queue) -> None:
    beat().leads()
    for _ in range(5):
        pid = leader_session()
        assert pid is not None
        account = factories.account()
        terminate(pid)
        owed(account)
        assert hints.hint(8) == account.pk
        eventually(leader_sleeps, "it leads again")


@pytest.fixture
def server() -> Iterator[Relay]:
    target = urlsplit(os.environ["DATABASE_URL"])
    with Relay((target.hostname or "127.0.0.1", target.port or 5432)) as relay:
        yield relay


def _through(relay: Relay) -> str:
    login, _, _ = urlsplit(os.environ["DATABASE_URL"]).netloc.rpartition("@")
    return database_url(netloc=f"{login}@127.0.0.1:{relay.port}", query="sslmode=disable&gssencmode=disable")


def test_it_outlasts_a_server_that_is_away_and_reads_again_afterwards(beat: Start, hints: Queue, server: Relay) -> None:
    started = beat(DATABASE_URL=_through(server)).leads()
    server.cut()
    account = factories.account()
    owed(account, -5)
    started.waits_for("The database does not serve the beat")
    eventually(lambda: not beat_sessions(), "the server has noticed")
    server.mend()
    assert hints.hint() == account.pk


def test_it_waits_for_a_server_that_is_not_there_yet(beat: Start, hints: Queue, server: Relay) -> None:
    server.cut()
    started = beat(DATABASE_URL=_through(server))
    started.waits_for("The database does not serve the beat")
    account = factories.account()
    owed(account)
    server.mend()
    assert hints.hint() == account.pk


def test_both_ends_notice_a_peer_that_vanished(hints: Queue) -> None:
    """A vanished machine cannot be made here; what makes TCP notice it is set on both ends, a minute or so."""
    session = listening.Session(lambda _channel, _payload: None)
    try:
        session.prepare(prove=False)
        parameters = session.connection.info.get_parameters()
        ours = {name: parameters[name] for name in ("keepalives_idle", "keepalives_interval", "keepalives_count")}
        assert ours == {"keepalives_idle": "30", "keepalives_interval": "10", "keepalives_count": "3"}
        assert parameters["tcp_user_timeout"] == "60000"
        rows = session.connection.execute("SELECT name, setting FROM pg_settings WHERE name LIKE 'tcp_%'").fetchall()
        assert dict(rows) == {
            "tcp_keepalives_idle": "30",
            "tcp_keepalives_interval": "10",
            "tcp_keepalives_count": "3",
            "tcp_user_timeout": "60000",
        }
    finally:
        session.close()


def test_it_refuses_a_proxy_that_swallows_notifications(beat: Start, hints: Queue) -> None:
    target = urlsplit(os.environ["DATABASE_URL"])
    with Relay((target.hostname or "127.0.0.1", target.port or 5432), swallows_notifications=True) as proxy:
        started = beat(BEAT_DATABASE_URL=_through(proxy))
        assert started.end() != 0
    assert "Set BEAT_DATABASE_URL to the PostgreSQL server itself." in started.told()


def test_it_refuses_another_database_than_the_one_that_is_written_to(beat: Start, hints: Queue) -> None:
    started = beat(BEAT_DATABASE_URL=database_url(path="/postgres"))
    assert started.end() != 0
    assert "or to another database than DATABASE_URL" in " ".join(started.told().split())


def test_a_session_answered_by_two_server_processes_is_refused(hints: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    session = listening.Session(lambda _channel, _payload: None)
    other = psycopg.connect(**listening.address(), autocommit=True)
    direct = session.connection

    class Pooled:
        """Two servers take turns."""

        turns = iter([direct, other] * 10)

        def execute(self, *given: Any) -> Any:
            return next(self.turns).execute(*given)

    monkeypatch.setattr(session, "connection", Pooled())
    with pytest.raises(listening.NotDirect, match="two server processes"):
        session.prepare(prove=True)
    direct.close()
    other.close()


def _every_second(**values: Any) -> PeriodicTask:
    second = IntervalSchedule.objects.create(every=1, period=IntervalSchedule.SECONDS)
    return PeriodicTask.objects.create(
        **{"name": "each second", "task": "test.tick", "interval": second, "queue": "paperclip-test", **values}
    )


@pytest.fixture
def ticks(transactional_db: None) -> Iterator[Queue]:
    queue = Queue("paperclip-test")
    yield queue
    queue.close()


# --- The broker -----------------------------------------------------------------------------------------------------


@pytest.fixture
def broker() -> Iterator[Relay]:
    target = urlsplit(broker_url())
    with Relay((target.hostname or "127.0.0.1", target.port or 6379)) as relay:
        yield relay


def _broker_through(relay: Relay) -> str:
    url = urlsplit(broker_url())
    login, _, _ = url.netloc.rpartition("@")
    return url._replace(netloc=f"{login}@127.0.0.1:{relay.port}").geturl()


def _hint_lapses(account: ProviderAccount) -> None:
    """Wait for the mark of a hint, and move it back: ten seconds pass."""
    eventually(
        lambda: ProviderAccount.objects.filter(pk=account.pk, hinted_until__gt=at(0)).exists(), "a hint is marked"
    )
    ProviderAccount.objects.filter(pk=account.pk).update(hinted_until=at(-1))


def test_a_hint_that_the_broker_did_not_take_is_sent_when_it_is_back(beat: Start, hints: Queue, broker: Relay) -> None:
    started = beat(CELERY_BROKER_URL=_broker_through(broker)).leads()
    account = factories.account()
    broker.cut()
    owed(account)
    started.waits_for("The broker does not take messages")
    broker.mend()
    _hint_lapses(account)
    assert hints.hint() == account.pk


def test_a_connection_that_the_broker_dropped_costs_no_hint(beat: Start, hints: Queue, broker: Relay) -> None:
    beat(CELERY_BROKER_URL=_broker_through(broker)).leads()
    first, second = factories.account(), factories.account()
    row = owed(first)
    assert hints.hint() == first.pk
    Obligation.objects.filter(pk=row.pk).update(due_at=at(3600))
    broker.cut()
    broker.mend()
    owed(second)
    # The first may come twice: its reply may have been on its way when the connection went. A lost hint for the second
    # would come only when its mark lapses, after 10 s.
    assert hints.hint(8) == second.pk or hints.hint(8) == second.pk


def test_a_broker_that_hangs_delays_it_by_seconds_and_not_for_ever(beat: Start, hints: Queue, broker: Relay) -> None:
    started = beat(CELERY_BROKER_URL=_broker_through(broker)).leads()
    first, second = factories.account(), factories.account()
    row = owed(first)
    assert hints.hint() == first.pk
    Obligation.objects.filter(pk=row.pk).update(due_at=at(3600))
    broker.hang()
    owed(second)
    started.waits_for("The broker does not take messages", bound=20)
    broker.cut()
    broker.mend()
    hints.take(0.1)  # what the relay had taken in may have arrived after all
    _hint_lapses(second)
    assert hints.hint() == second.pk


def test_a_periodic_task_that_the_broker_did_not_take_stays_due(
    beat: Start, hints: Queue, ticks: Queue, broker: Relay
) -> None:
    task = _every_second(one_off=True)
    broker.cut()
    started = beat(CELERY_BROKER_URL=_broker_through(broker))
    started.waits_for("The broker does not take messages")
    assert PeriodicTask.objects.get(pk=task.pk).total_run_count == 0
    broker.mend()
    assert ticks.take() is not None


# --- Several beats --------------------------------------------------------------------------------------------------


def test_two_beats_hint_once(beat: Start, hints: Queue) -> None:
    beat().leads()
    beat().stands_by()
    accounts = {factories.account().pk for _ in range(10)}
    for account in ProviderAccount.objects.all():
        owed(account)
    assert hints.hints(10) == accounts
    assert hints.is_silent(1)


def test_a_killed_leader_is_followed_within_a_second(beat: Start, hints: Queue) -> None:
    leader = beat().leads()
    standby = beat().stands_by()
    account = factories.account()
    leader.send(signal.SIGKILL)
    began = time.monotonic()
    owed(account)
    assert hints.hint(8) == account.pk
    assert time.monotonic() - began < 8
    assert "Leading." in standby.told()


def test_a_leader_that_is_told_to_end_ends_at_once_and_hands_over(beat: Start, hints: Queue) -> None:
    leader = beat().leads()
    standby = beat().stands_by()
    began = time.monotonic()
    leader.send(signal.SIGTERM)
    assert leader.end(15) == 0
    assert time.monotonic() - began < 15
    standby.waits_for("Leading.", bound=15)
    standby.send(signal.SIGTERM)
    assert standby.end(15) == 0  # its turn at the lock is 30 s


def test_a_standby_that_is_told_to_end_ends_at_once(beat: Start, hints: Queue) -> None:
    beat().leads()
    standby = beat().stands_by()
    standby.send(signal.SIGTERM)
    assert standby.end(15) == 0  # its turn at the lock is 30 s
    assert "Traceback" not in standby.told()


def test_a_leader_that_hangs_with_its_session_alive_is_overthrown(
    beat: Start, hints: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The standby here is this test, with short turns; the row is overdue by more than the minute that is granted."""
    monkeypatch.setattr(leadership, "TURN", "100ms")
    leader = beat().leads()
    hung = leader_session()
    leader.send(signal.SIGSTOP)
    with psycopg.connect(**listening.address(), autocommit=True) as session:
        assert not leadership.wait(session)
        assert leader_session() == hung, "nothing is overdue: it may sleep as long as it likes"
        owed(factories.account(), -61)
        assert not leadership.wait(session)
        eventually(lambda: leadership.wait(session), "the lock is free")
        leader.send(signal.SIGCONT)
        leader.waits_for("standing by")
        assert leader_session() == session.info.backend_pid


def test_it_stays_the_leader_over_a_broken_session(beat: Start, hints: Queue) -> None:
    """Whoever gets the lock first; in either case one beat leads and hints."""
    beat().leads()
    beat().stands_by()
    pid = leader_session()
    assert pid is not None
    terminate(pid)
    accounts: set[UUID] = set()
    for _ in range(5):
        account = factories.account()
        owed(account)
        accounts.add(account.pk)
    assert hints.hints(5) == accounts
    assert hints.is_silent(0.5)
    eventually(lambda: len(beat_sessions()) == 2, "both are connected again")
