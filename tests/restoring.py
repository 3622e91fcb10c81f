"""A whole installation beside the test's own: its PostgreSQL is stopped, copied, restored and failed over for real.

Everything of the system runs in processes of its own, as an operator would run it; the test looks from outside.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg

from paperclip_env.stack.account import server_account
from paperclip_env.stack.broker import Broker
from paperclip_env.stack.postgres import Postgres
from paperclip_env.stack.programs import POSTGRES, program
from paperclip_env.stack.state import State, temporary_state
from tests.beats import BOUND, CHECKOUT, eventually

_PRELUDE = """
import json, os, django
django.setup()
import leases
from leases.models import *
from providers.registry import open_provider
told = None
"""


class Site:
    """One installation: a PostgreSQL, a broker, and a place for the beat's state. Sandboxes are `local`'s."""

    def __init__(self, state: State, directory: Path) -> None:
        self.state = state
        self.directory = directory
        self.postgres = Postgres(state, durable=True)
        self.broker = Broker(state, durable=False)
        self.broker.start()
        self.database = ""
        self.broker_url = self.broker.url
        self.kept = directory / "kept"

    # --- Its servers --------------------------------------------------------------------------------------------------

    @property
    def data(self) -> Path:
        return self.state.root / "postgres"

    @property
    def url(self) -> str:
        url = urlsplit(self.postgres.url)
        return url._replace(path=f"/{self.database}").geturl() if self.database else url.geturl()

    def execute(self, *statements: str) -> Any:
        """Run statements, each on its own; returns the first column of the last one's first row."""
        with psycopg.connect(self.url, autocommit=True) as session:
            for statement in statements:
                answer = session.execute(statement)
            row = answer.fetchone() if answer.description else None
            return row[0] if row else None

    def copy_to(self, place: Path) -> None:
        """Stop the server in good order, copy its data directory, and start it again: a backup."""
        self.postgres.stop()
        self._replace(place, self.data)
        self.postgres.start()

    def restore_from(self, place: Path) -> None:
        """Stop the server, put this copy into the place of its data directory, and start it."""
        self.postgres.stop()
        self._replace(self.data, place)
        self.postgres.start()

    def restart(self) -> None:
        self.postgres.stop()
        self.postgres.start()

    def fail_over(self) -> None:
        """Recover to the end of the log and go on, on the next timeline: what the promotion of a standby does."""
        self.postgres.stop()
        settings = self.data / "postgresql.auto.conf"
        settings.write_text(settings.read_text() + "restore_command = '/bin/false'\n")
        signal_file = self.data / "recovery.signal"
        signal_file.touch()
        self.state.account.give(signal_file)
        self.postgres.start()
        eventually(lambda: self.execute("SELECT NOT pg_is_in_recovery()"), "the server was promoted")

    def dump_into(self, other: Site) -> None:
        """Copy the database by a dump, as one would into another server, or under another name in this one."""
        binaries = program(POSTGRES, self.state.account, self.state.root).parent
        file = self.directory / "dump.sql"
        for command in (
            [binaries / "pg_dump", "--no-owner", "--no-privileges", "--file", file, "--dbname", self.url],
            [binaries / "psql", "--quiet", "--set", "ON_ERROR_STOP=1", "--file", file, "--dbname", other.url],
        ):
            done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=4 * BOUND)
            assert done.returncode == 0, done.stderr

    def stop(self) -> None:
        self.postgres.stop()
        self.broker.stop()

    @staticmethod
    def _replace(place: Path, by: Path) -> None:
        shutil.rmtree(place, ignore_errors=True)
        subprocess.run(["/bin/cp", "-a", by, place], check=True, timeout=4 * BOUND)

    # --- Its processes ------------------------------------------------------------------------------------------------

    @property
    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "DATABASE_URL": self.url,
            "CELERY_BROKER_URL": self.broker_url,
            "PAPERCLIP_STATE_DIR": str(self.kept),
            "DJANGO_SETTINGS_MODULE": "paperclip_env.settings",
            "DEBUG": "1",
        }

    def manage(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "manage.py", *arguments],
            cwd=CHECKOUT,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=8 * BOUND,
        )

    def told(self, *arguments: str) -> Any:
        """Run a command that succeeds, and return what it prints as JSON."""
        done = self.manage(*arguments, "--json")
        assert done.returncode == 0, done.stderr + done.stdout
        return json.loads(done.stdout)

    def python(self, code: str) -> Any:
        """Run code in a process of this installation, and return what it assigns to `told`."""
        done = subprocess.run(
            [sys.executable, "-c", f"{_PRELUDE}{code}\nprint(json.dumps(told, default=str))"],
            cwd=CHECKOUT,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=8 * BOUND,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    def beat(self) -> str:
        """Run a beat until it has judged the database and looked once, and return what it logged."""
        log = self.directory / "beat.log"
        command = [sys.executable, "-m", "celery", "-A", "paperclip_env", "beat", "--loglevel", "INFO"]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, cwd=CHECKOUT, env=self.environment, stdout=output, stderr=subprocess.STDOUT
            )
        try:

            def has_judged() -> bool:
                assert process.poll() is None, log.read_text()
                return bool(self.execute(_BEAT_HAS_LOOKED)) or "cannot tell" in log.read_text()

            eventually(has_judged, "the beat has judged and looked", 2 * BOUND)
            if "OBSERVING" not in log.read_text() and "cannot tell" not in log.read_text():
                eventually(self._is_kept, "the mark is kept in the file")
        finally:
            # Celery's handler raises SystemExit wherever it is; within a destructor Python swallows that.
            for _ in range(3):
                process.send_signal(signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(BOUND / 2)
                    break
            else:
                process.kill()
                process.wait(BOUND)
                raise AssertionError(f"the beat did not end: {log.read_text()}")
        return log.read_text()

    def _is_kept(self) -> bool:
        found = [json.loads(path.read_text())["position"] for path in self.kept.glob("watermark-*.json")]
        position = self.execute("SELECT watermark_position FROM leases_installation")
        return max(found, default=0) >= position

    def installation(self) -> dict[str, Any]:
        """Return the installation's row."""
        row = self.execute("SELECT to_jsonb(i) FROM leases_installation i")
        assert isinstance(row, dict)
        return row


_BEAT_HAS_LOOKED = """
SELECT count(*) FROM pg_stat_activity
 WHERE datname = current_database() AND application_name = 'paperclip_env beat'
   AND state = 'idle' AND query LIKE '%hinted_until%'
"""


@contextmanager
def site(directory: Path) -> Iterator[Site]:
    """Run an installation with an empty, migrated database."""
    with temporary_state(server_account()) as state:
        made = Site(state, directory)
        try:
            made.postgres.start()
            done = made.manage("migrate", "--verbosity", "0")
            assert done.returncode == 0, done.stderr
            yield made
        finally:
            made.stop()


@contextmanager
def another(of: Site, directory: Path) -> Iterator[Site]:
    """Run another server, with an empty database, for a copy of `of`: a broker database and a state of its own."""
    with temporary_state(server_account()) as state:
        directory.mkdir()
        made = Site(state, directory)
        try:
            made.postgres.start()
            yield made
        finally:
            made.stop()


def under_another_name(of: Site, directory: Path) -> Site:
    """Return a copy's place in the same server: another database, another broker, and a state of its own."""
    directory.mkdir()
    of.execute("CREATE DATABASE copy")
    made = Site.__new__(Site)
    made.__dict__ |= of.__dict__
    made.directory, made.kept, made.database = directory, directory / "kept", "copy"
    made.broker_url = urlsplit(of.broker_url)._replace(path="/5").geturl()
    return made
