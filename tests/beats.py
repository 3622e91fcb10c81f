"""Real beat processes on the test's database, and what reaches the broker.

Everything waits for an event with a bound: for a message in the broker, or for a state that the server shows.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit
from uuid import UUID

import redis
from django.db import connection

from cleanup import leadership, listening
from cleanup.claims import LANE
from leases.models import Obligation, ProviderAccount
from tests import factories

CHECKOUT = Path(__file__).resolve().parent.parent

BOUND = 30.0
"""How long an event may take before the test fails; far above what it takes, because the machine may be busy."""

T = TypeVar("T")


def eventually(look: Callable[[], T], what: str, bound: float = BOUND) -> T:
    """Return the first true answer of `look`; fail after `bound` seconds."""
    until = time.monotonic() + bound
    while not (answer := look()):
        assert time.monotonic() < until, f"waited {bound:g} s in vain until {what}"
        time.sleep(0.01)
    return answer


def database_url(**changes: str) -> str:
    """Return the address of the test's database; `netloc` or `path` may be replaced."""
    url = urlsplit(os.environ["DATABASE_URL"])._replace(path=f"/{quote(connection.settings_dict['NAME'])}")
    return url._replace(**changes).geturl()


def broker_url() -> str:
    """Return the address of the test process's own broker database.

    From the environment, as `conftest.py` set it: the settings may have been read before that.
    """
    return os.environ["CELERY_BROKER_URL"]


class Queue:
    """The messages in one queue of the test's broker."""

    def __init__(self, name: str = "paperclip") -> None:
        self.name = name
        self._broker = redis.Redis.from_url(broker_url(), socket_timeout=None)
        self._broker.delete(name)

    def take(self, bound: float = BOUND) -> dict[str, Any] | None:
        """Take the next message, waiting for it; None when none came within `bound`."""
        taken = self._broker.blpop([self.name], timeout=bound)
        if taken is None:
            return None
        message: dict[str, Any] = json.loads(taken[1])
        args, _kwargs, _embedded = json.loads(base64.b64decode(message["body"]))
        return {"task": message["headers"]["task"], "args": args}

    def hint(self, bound: float = BOUND) -> UUID:
        """Take the next message, which must be a hint, and return its account, or `LANE`."""
        message = self.take(bound)
        assert message is not None, f"no hint came within {bound:g} s"
        if message == {"task": "cleanup.tasks.settle_ownership", "args": []}:
            return LANE
        assert message["task"] == "cleanup.tasks.sweep"
        (account,) = message["args"]
        return UUID(account)

    def hints(self, number: int) -> set[UUID]:
        return {self.hint() for _ in range(number)}

    def is_silent(self, seconds: float) -> bool:
        """Return whether nothing comes for `seconds`."""
        return self.take(seconds) is None

    def close(self) -> None:
        self._broker.delete(self.name)
        self._broker.close()


class Beat:
    """One process of `celery beat`."""

    def __init__(self, log: Path, *options: str, **environment: str) -> None:
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "celery", "-A", "paperclip_env", "beat", "--loglevel", "INFO", *options],
                cwd=CHECKOUT,
                env={
                    **os.environ,
                    "DATABASE_URL": database_url(),
                    "CELERY_BROKER_URL": broker_url(),
                    **environment,
                },
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def told(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def waits_for(self, words: str, bound: float = BOUND) -> None:
        def look() -> bool:
            assert self.process.poll() is None, f"the beat ended ({self.process.returncode}):\n{self.told()}"
            return words in self.told()

        eventually(look, f"the beat says {words!r}; it said:\n{self.told()}", bound)

    def leads(self) -> Beat:
        """Wait until this beat leads and sleeps, everything read."""
        self.waits_for("Leading.")
        eventually(leader_sleeps, "the leader sleeps")
        return self

    def stands_by(self) -> Beat:
        self.waits_for("standing by")
        eventually(lambda: waiting_sessions() > 0, "the standby waits for the lock")
        return self

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self, bound: float = BOUND) -> int:
        """Wait for the end and return the exit code."""
        return self.process.wait(bound)


@contextmanager
def beats(directory: Path) -> Iterator[Callable[..., Beat]]:
    """Give a function that starts beats; whatever still runs at the end is killed, before the database is emptied."""
    started: list[Beat] = []

    def start(*options: str, **environment: str) -> Beat:
        beat = Beat(directory / f"beat-{len(started)}.log", *options, **environment)
        started.append(beat)
        return beat

    try:
        yield start
    finally:
        for beat in started:
            if beat.process.poll() is None:
                beat.process.kill()
            beat.process.wait(BOUND)
        eventually(lambda: not beat_sessions(), "the server has ended the sessions of the killed beats")


def owed(account: ProviderAccount, due_in: float = 0.0, **values: Any) -> Obligation:
    """Owe the teardown of a new lease of the account."""
    return factories.teardown(factories.lease(factories.environment(account)), due_in=due_in, **values)


def _rows(statement: str, parameters: list[Any]) -> list[Any]:
    with connection.cursor() as cursor:
        cursor.execute(statement, parameters)
        return list(cursor.fetchall())


def beat_sessions() -> list[int]:
    """Return the server processes of all beats on this database."""
    rows = _rows(
        "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name = %s",
        [listening.APPLICATION_NAME],
    )
    return [row[0] for row in rows]


def leader_session() -> int | None:
    """Return the server process that holds the leader's lock."""
    rows = _rows(
        "SELECT l.pid FROM pg_locks l JOIN pg_database d ON d.oid = l.database"
        " WHERE l.locktype = 'advisory' AND l.granted AND d.datname = current_database()"
        " AND ((l.classid::bigint << 32) | l.objid::bigint) = %s",
        [leadership.KEY],
    )
    return rows[0][0] if rows else None


def leader_sleeps() -> bool:
    """Whether the leader's session is idle, its last statement having been a look at the alarms."""
    pid = leader_session()
    rows = _rows("SELECT state = 'idle' AND query LIKE '%%hinted_until%%' FROM pg_stat_activity WHERE pid = %s", [pid])
    return bool(rows and rows[0][0])


def waiting_sessions() -> int:
    """Return how many sessions wait for an advisory lock in this database."""
    rows = _rows(
        "SELECT count(*) FROM pg_stat_activity"
        " WHERE datname = current_database() AND wait_event_type = 'Lock' AND wait_event = 'advisory'",
        [],
    )
    return int(rows[0][0])


def terminate(pid: int) -> None:
    _rows("SELECT pg_terminate_backend(%s)", [pid])
