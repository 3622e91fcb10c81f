"""The processes of the demo, worker and beat among them: really started, killed and started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from kombu import Connection

from paperclip_env.celery import app
from paperclip_env.stack.process import die_with_launcher

_CELERY = [sys.executable, "-m", "celery", "-A", "paperclip_env"]
_COMMANDS = {
    "worker": [
        *(*_CELERY, "worker", "-P", "threads", "-c", "8"),
        *("--without-gossip", "--without-mingle", "--without-heartbeat"),
    ],
    "beat": [*_CELERY, "beat"],
    "acquirer": [sys.executable, "-m", "paperclip_env.demo.acquirer"],
}


class Machinery:
    """Starts and ends processes, with a log each; ends all of them on exit."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in list(self._processes):
            self.end(name, signal.SIGTERM)

    def start(self, name: str, *arguments: str) -> int:
        """Start one of the processes and return its id."""
        process = subprocess.Popen(
            [*_COMMANDS[name], *arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._log(name),
            stderr=subprocess.STDOUT,
            env={**os.environ, "LOG_LEVEL": "INFO"},
            start_new_session=True,  # Ctrl-C is the demo's to hear; it ends these in order
            preexec_fn=die_with_launcher(signal.SIGKILL),  # noqa: PLW1509 - it takes no lock that a thread may hold
        )
        self._processes[name] = process
        return process.pid

    def end(self, name: str, number: signal.Signals) -> None:
        """Send a signal and wait for the end; a process that does not end in time is killed."""
        process = self._processes.pop(name)
        process.send_signal(number)
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def ended(self) -> list[str]:
        """Return the names of those that ended by themselves: always a fault."""
        return [name for name, process in self._processes.items() if process.poll() is not None]

    def log_tail(self, name: str, lines: int = 15) -> str:
        return "\n".join((self.directory / f"{name}.log").read_text(errors="replace").splitlines()[-lines:])

    def _log(self, name: str) -> IO[bytes]:
        return (self.directory / f"{name}.log").open("ab")


def empty_the_broker() -> int:
    """Delete every message, and with Redis everything else that the broker holds too. Returns how many messages."""
    with Connection(app.conf.broker_url) as connection:
        channel: Any = connection.default_channel
        count = _waiting(connection)
        if count:
            channel.queue_purge(app.conf.task_default_queue)
        client = getattr(channel, "client", None)
        if client is not None and hasattr(client, "flushdb"):
            client.flushdb()
    return count


def waiting_messages() -> int:
    """Return how many hints wait in the broker."""
    with Connection(app.conf.broker_url) as connection:
        return _waiting(connection)


def _waiting(connection: Connection) -> int:
    channel: Any = connection.default_channel
    try:
        return int(channel.queue_declare(app.conf.task_default_queue, passive=True).message_count)
    except connection.channel_errors:
        return 0  # the queue was never declared


def wait_until(what: str, reached: Callable[[], bool], *, seconds: float, every: float = 0.2) -> float:
    """Wait until `reached()` is true; returns the seconds it took. Raises `TimeoutError` naming what did not come."""
    started = time.monotonic()
    while not reached():
        if time.monotonic() - started > seconds:
            raise TimeoutError(f"{what} did not come within {seconds:.0f} s")
        time.sleep(every)
    return time.monotonic() - started
