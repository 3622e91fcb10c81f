"""The embedded PostgreSQL.

Answers for: loopback only and with a password; ready when `start` returns; data that a crash of the launcher left is
used again; never a program, a setting or a socket of a PostgreSQL that this machine may have besides.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
from psycopg import sql

from paperclip_env.stack import process
from paperclip_env.stack.ports import LOOPBACK, free_port
from paperclip_env.stack.problem import Problem
from paperclip_env.stack.programs import POSTGRES, program
from paperclip_env.stack.state import State

DATABASE = "paperclip"
ROLE = "paperclip"

_START_S = 60.0
_STOP_S = 30.0
_TRIES = 5
# Nothing of the caller's environment: PGDATA, PGPORT and the like would reach the server.
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "TZ": "UTC"}


@dataclass
class Postgres:
    """One PostgreSQL server. `durable` off trades crash safety for speed, for data that is thrown away."""

    state: State
    durable: bool
    port: int = 0
    _server: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @property
    def url(self) -> str:
        return f"postgres://{ROLE}:{self.state.secret('postgres')}@{LOOPBACK}:{self.port}/{DATABASE}"

    @property
    def log(self) -> Path:
        return self.state.logs / "postgres.log"

    @property
    def _data(self) -> Path:
        return self.state.root / "postgres"

    def start(self) -> subprocess.Popen[bytes]:
        """Start the server and return it when it answers. Raises `Problem`."""
        postgres = program(POSTGRES, self.state.account, self.state.root)
        if self._data.exists():
            self._require_version(postgres)
            end_leftover(self._data)
        else:
            self._initialise(postgres.with_name("initdb"))
        for _ in range(_TRIES):
            self.port = free_port()
            self._server = process.start(
                [postgres, "-D", self._data, *self._settings()],
                environment=_ENVIRONMENT,
                log=self.log,
                account=self.state.account,
                directory=self.state.root,
                if_orphaned=signal.SIGINT,
            )
            if self._answers(self._server):
                self._create_database()
                return self._server
        raise Problem(f"PostgreSQL does not start; the end of {self.log}:{process.last_lines(self.log)}")

    def stop(self) -> None:
        """Stop the server: in good order, or at once if its data is thrown away."""
        if self._server is not None:
            process.stop(self._server, signal.SIGINT if self.durable else signal.SIGQUIT, _STOP_S)

    def _settings(self) -> list[str]:
        settings = {
            "listen_addresses": LOOPBACK,
            "port": str(self.port),
            # No socket file: its path may not exceed 107 bytes, and nobody needs it.
            "unix_socket_directories": "",
            "shared_preload_libraries": "pg_stat_statements",
            "max_connections": "200",
            "logging_collector": "off",
            "log_destination": "stderr",
        }
        if not self.durable:
            settings |= {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
        return [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]

    def _initialise(self, initdb: Path) -> None:
        unfinished = self.state.root / "postgres.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        data = self.state.directory(unfinished.name)
        password = self.state.directory("initdb") / "password"
        password.write_text(self.state.secret("postgres"))
        self.state.account.give(password)
        try:
            done = process.start(
                [
                    initdb,
                    *("-D", data, "-U", ROLE, "-E", "UTF8", "--locale=C", "--locale-provider=builtin"),
                    *("--builtin-locale=C.UTF-8", "--no-instructions", "-A", "scram-sha-256", f"--pwfile={password}"),
                    *(() if self.durable else ("--no-sync",)),
                ],
                environment=_ENVIRONMENT,
                log=self.log,
                account=self.state.account,
                directory=self.state.root,
                if_orphaned=signal.SIGKILL,
            )
            if done.wait() != 0:
                raise Problem(f"PostgreSQL cannot make its database; {self.log} ends:{process.last_lines(self.log)}")
        finally:
            shutil.rmtree(password.parent, ignore_errors=True)
        data.rename(self._data)

    def _require_version(self, postgres: Path) -> None:
        made_by = (self._data / "PG_VERSION").read_text().strip()
        told = subprocess.run([postgres, "--version"], capture_output=True, text=True, check=False).stdout.split()
        ours = told[2].partition(".")[0] if len(told) > 2 else "unknown"  # noqa: PLR2004 -- "postgres (PostgreSQL) 18.6"
        if made_by != ours:
            raise Problem(
                f"The data in {self._data} was made by PostgreSQL {made_by}, and the installed one is {ours}. "
                "Start again with the older release of this project and take a dump, or remove the data (`make clean`)."
            )

    def _answers(self, server: subprocess.Popen[bytes]) -> bool:
        """Wait until the server answers; False if it ended."""
        until = time.monotonic() + _START_S
        while server.poll() is None:
            with contextlib.suppress(psycopg.OperationalError), self._connect():
                return True
            if time.monotonic() > until:
                process.stop(server, signal.SIGQUIT, _STOP_S)
                raise Problem(f"PostgreSQL does not answer; the end of {self.log}:{process.last_lines(self.log)}")
            time.sleep(0.02)
        return False

    def _connect(self) -> psycopg.Connection:
        return psycopg.connect(
            host=LOOPBACK,
            port=self.port,
            user=ROLE,
            password=self.state.secret("postgres"),
            dbname="postgres",
            connect_timeout=5,
            autocommit=True,
        )

    def _create_database(self) -> None:
        with self._connect() as connection:
            if connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [DATABASE]).fetchone() is None:
                connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(DATABASE)))


def end_leftover(data: Path) -> None:
    """End a server that a killed launcher left running on `data`, and remove a pid file that names somebody else.

    The caller holds the lock of the state, so no other launcher can own that server.
    """
    pid_file = data / "postmaster.pid"
    try:
        pid = int(pid_file.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return
    command = command_of(pid)
    if command is None:
        return  # dead: PostgreSQL sees that by itself, and also checks for children that outlived it
    if str(data) not in command:
        pid_file.unlink(missing_ok=True)  # the number was given to another program; PostgreSQL would refuse to start
        return
    until = time.monotonic() + _STOP_S
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGINT)
        while time.monotonic() < until:
            os.kill(pid, 0)
            time.sleep(0.02)
        os.kill(pid, signal.SIGKILL)


def command_of(pid: int) -> str | None:
    """Return the command line of a process, or None if there is none."""
    if Path("/proc/self").exists():
        try:
            return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace") or None
        except OSError:
            return None
    ask = ["/bin/ps", "-o", "command=", "-p", str(pid)]
    return subprocess.run(ask, capture_output=True, text=True, check=False).stdout or None
