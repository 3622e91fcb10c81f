"""Since when a database server has been there to be renewed at, by real restarts and a real crash of one."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import psycopg
import pytest

from paperclip_env.stack.account import server_account
from paperclip_env.stack.postgres import Postgres
from paperclip_env.stack.state import temporary_state
from tests.concurrency import BOUND

MIGRATION = next((Path(__file__).parents[2] / "leases" / "migrations" / "sql").glob("*_controllers.sql"))
FUNCTION = re.search(r"CREATE FUNCTION leases_up_since\(\).*?\$\$;", MIGRATION.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture
def server() -> Iterator[Postgres]:
    with temporary_state(server_account()) as state:
        postgres = Postgres(state, durable=True)
        postgres.start()
        try:
            assert FUNCTION is not None
            with _session(postgres) as session:
                session.execute(FUNCTION.group().encode())
            yield postgres
        finally:
            postgres.stop()


def _session(postgres: Postgres) -> psycopg.Connection:
    return psycopg.connect(postgres.url, autocommit=True, connect_timeout=5)


def _read(postgres: Postgres) -> tuple[datetime, datetime, datetime]:
    """Since when it is up, when its first process started, and the time; waits until it answers."""
    until = time.monotonic() + BOUND
    while True:
        try:
            with _session(postgres) as session:
                row = session.execute(
                    "SELECT leases_up_since(), pg_postmaster_start_time(), clock_timestamp()"
                ).fetchone()
        except psycopg.OperationalError:
            assert time.monotonic() < until, "the server did not come back"
            time.sleep(0.05)
        else:
            assert row is not None
            return row


def test_a_restart_and_a_crash_both_begin_it_anew(server: Postgres) -> None:
    up, started, _ = _read(server)
    assert up >= started

    with _session(server) as session:
        crashed_at = session.execute("SELECT clock_timestamp()").fetchone()
        os.kill(session.info.backend_pid, signal.SIGKILL)  # all sessions end, and the server recovers
        with pytest.raises(psycopg.OperationalError):
            session.execute("SELECT pg_sleep(30)")
    assert crashed_at is not None
    after_crash, still_started, now = _read(server)
    assert still_started == started  # which is why that is not asked alone
    assert crashed_at[0] <= after_crash <= now

    server.stop()
    server.start()
    after_restart, restarted, now = _read(server)
    assert after_crash < restarted <= after_restart <= now


def test_who_may_not_see_the_servers_processes_has_the_start_of_the_first_of_them(server: Postgres) -> None:
    with _session(server) as session:
        session.execute("CREATE ROLE somebody")
        session.execute("SET ROLE somebody")
        row = session.execute("SELECT leases_up_since() = pg_postmaster_start_time()").fetchone()
    assert row == (True,)
