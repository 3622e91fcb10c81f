"""The beat's one database session: what it hears, and how it sleeps.

Answers for: a direct session of its own, outside Django, in autocommit; no notification is lost between statements
and sleep; a session that is dead is noticed, also when the other side vanished without a word; one that leads through
a proxy which swallows notifications is refused with a sentence.

Not psycopg's `notifies()`: it wakes ten times a second to look. This sleeps in `select()` on the socket of libpq.
"""

from __future__ import annotations

import select
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import psycopg
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db import connection
from psycopg.conninfo import conninfo_to_dict

from leases.clock import boottime

CHANNELS = ("paperclip_due", "paperclip_schedule")

APPLICATION_NAME = "paperclip_env beat"
"""How `pg_stat_activity` shows the session."""

# Both ends notice a peer that vanished in about a minute, by TCP alone, without a statement. Ours, through libpq:
_KEEPALIVE: dict[str, Any] = {
    "keepalives": 1,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
    "connect_timeout": 5,
}
# And the server's, which then lets go of the lock of a leader whose machine is gone. `lock_timeout` bounds the wait
# of a hint for an account row; the waiting for leadership sets its own.
_SESSION = {
    "tcp_keepalives_idle": "30",
    "tcp_keepalives_interval": "10",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "60000",
    "statement_timeout": "60s",
    "lock_timeout": "5s",
    "idle_session_timeout": "0",  # a session that only listens is idle for its whole life
}

_ROUND_TRIP_S = 5.0


class NotDirect(ImproperlyConfigured):
    """What the database notifies does not reach this session, and never will."""


def address() -> dict[str, Any]:
    """Return libpq parameters of the database: BEAT_DATABASE_URL where set, else those of Django's default database."""
    if settings.BEAT_DATABASE_URL:
        given: dict[str, Any] = dict(conninfo_to_dict(settings.BEAT_DATABASE_URL))
    else:
        database = settings.DATABASES["default"]
        options = {key: value for key, value in database.get("OPTIONS", {}).items() if isinstance(value, str | int)}
        named = {
            "dbname": database["NAME"],
            "user": database.get("USER"),
            "password": database.get("PASSWORD"),
            "host": database.get("HOST"),
            "port": database.get("PORT"),
        }
        given = {**options, **{key: value for key, value in named.items() if value}}
    return {**_KEEPALIVE, **given, "application_name": APPLICATION_NAME}


class Session:
    """One connection. `heed(channel, payload)` is called for every notification, whenever it arrives."""

    def __init__(self, heed: Callable[[str, str], None]) -> None:
        self._heed = heed
        self._checking = ""
        self._checked = False
        self.connection: psycopg.Connection[Any] = psycopg.connect(**address(), autocommit=True)
        # A notification that arrives while a statement runs is read together with its result and never makes the socket
        # readable again; psycopg hands it to a handler, or else keeps it where nobody who sleeps would look.
        self.connection.add_notify_handler(lambda notify: self._hear(notify.channel, notify.payload))

    def prepare(self, *, prove: bool) -> None:
        """Set the session up and, where asked, prove that it is direct. Raises `NotDirect`."""
        if prove:
            self._refuse_a_changing_server()
        self.connection.execute(
            "SELECT set_config(name, value, false) FROM unnest(%s::text[], %s::text[]) AS given (name, value)",
            [list(_SESSION), list(_SESSION.values())],
        )
        if prove:
            self._refuse_a_deaf_ear()

    def listen(self) -> None:
        """Begin to hear. Whatever commits from here on is heard; whatever committed before can be read from here on."""
        for channel in CHANNELS:
            self.connection.execute(f"LISTEN {channel}")

    def sleep(self, seconds: float) -> None:
        """Sleep until something is heard, for at most `seconds`. Raises `psycopg.OperationalError` when it is dead."""
        if not self._drain():
            select.select([self.connection.fileno()], [], [], max(0.0, seconds))
            self._drain()

    def close(self) -> None:
        self.connection.close()

    def _drain(self) -> bool:
        """Hear what has arrived; return whether there was something.

        Reads the socket without waiting, and libpq's own buffer: a notification right behind the end of a result may
        have come in with it.
        """
        libpq = self.connection.pgconn
        libpq.consume_input()
        heard = False
        while (notify := libpq.notifies()) is not None:
            heard = True
            self._hear(notify.relname.decode(), notify.extra.decode())
        return heard

    def _hear(self, channel: str, payload: str) -> None:
        if channel == self._checking:
            self._checked = True
        else:
            self._heed(channel, payload)

    def _refuse_a_changing_server(self) -> None:
        first, second = (self.connection.execute("SELECT pg_backend_pid()").fetchone() for _ in range(2))
        if first != second:
            raise NotDirect(
                "Two statements of the beat's database session were answered by two server processes, so it leads "
                f"through a pooling proxy, where neither LISTEN nor a session lock holds. {_REMEDY}"
            )

    def _refuse_a_deaf_ear(self) -> None:
        """Have another connection notify, the one that writers use: it proves both the way and that it is one database.

        Our own session must not be the one that notifies: its notification would come back inside the statement,
        where a proxy lets it through.
        """
        self._checking = f"paperclip_check_{uuid4().hex}"
        self.connection.execute(f"LISTEN {self._checking}")
        try:
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_notify(%s, '')", [self._checking])
        finally:
            connection.close()
        until = boottime() + _ROUND_TRIP_S
        while not self._checked and (left := until - boottime()) > 0:
            self.sleep(left)
        if not self._checked:
            raise NotDirect(
                "The beat's database session does not hear notifications: what another connection notified did not "
                "arrive within 5 s. Most likely it leads through a transaction-pooling proxy such as pgbouncer, or to "
                f"another database than DATABASE_URL. {_REMEDY}"
            )
        self.connection.execute(f"UNLISTEN {self._checking}")
        self._checking = ""


_REMEDY = "Set BEAT_DATABASE_URL to the PostgreSQL server itself."
