"""The embedded broker, a Valkey.

Answers for: loopback only and with a password, which is never on a command line; ready when `start` returns; it never
evicts a message, and with `durable` it keeps them over a restart.
"""

import contextlib
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import redis

from paperclip_env.stack import process
from paperclip_env.stack.ports import LOOPBACK, free_port
from paperclip_env.stack.problem import Problem
from paperclip_env.stack.programs import VALKEY, program
from paperclip_env.stack.state import State

# One database for each parallel test process, and more than enough.
DATABASES = 64

_START_S = 30.0
_STOP_S = 10.0
_TRIES = 5
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "TZ": "UTC"}


@dataclass
class Broker:
    """One Valkey server."""

    state: State
    durable: bool
    port: int = 0
    _server: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @property
    def url(self) -> str:
        return f"redis://:{self.state.secret('broker')}@{LOOPBACK}:{self.port}/0"

    @property
    def log(self) -> Path:
        return self.state.logs / "broker.log"

    def start(self) -> subprocess.Popen[bytes]:
        """Start the server and return it when it answers. Raises `Problem`."""
        valkey = program(VALKEY, self.state.account, self.state.root)
        for _ in range(_TRIES):
            self.port = free_port()
            self._server = process.start(
                [valkey, "-"],
                environment=_ENVIRONMENT,
                log=self.log,
                account=self.state.account,
                directory=self.state.directory("broker"),
                text=self._configuration(),
            )
            if self._answers(self._server):
                return self._server
        raise Problem(f"The broker does not start; the end of {self.log}:{process.last_lines(self.log)}")

    def stop(self) -> None:
        """Stop the server."""
        if self._server is not None:
            process.stop(self._server, signal.SIGTERM if self.durable else signal.SIGKILL, _STOP_S)

    def _configuration(self) -> str:
        return "\n".join(
            [
                f"bind {LOOPBACK}",
                f"port {self.port}",
                f"requirepass {self.state.secret('broker')}",
                f"databases {DATABASES}",
                'save ""',
                f"appendonly {'yes' if self.durable else 'no'}",
                "maxmemory-policy noeviction",
                "",
            ]
        )

    def _answers(self, server: subprocess.Popen[bytes]) -> bool:
        until = time.monotonic() + _START_S
        with contextlib.closing(
            redis.Redis(host=LOOPBACK, port=self.port, password=self.state.secret("broker"), socket_connect_timeout=5)
        ) as client:
            while server.poll() is None:
                with contextlib.suppress(redis.ConnectionError):
                    if client.ping():
                        return True
                if time.monotonic() > until:
                    process.stop(server, signal.SIGKILL, _STOP_S)
                    break
                time.sleep(0.02)
        return False
