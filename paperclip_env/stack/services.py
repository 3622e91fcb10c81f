"""The project's own processes under `make up`.

Answers for: each writes a log of its own, the end of any one is noticed at once and told, and all are stopped in the
reverse order of their start.
"""

import os
import select
import signal
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from paperclip_env.stack import process
from paperclip_env.stack.problem import Problem
from paperclip_env.stack.state import CHECKOUT

# A worker ends when the provider calls that it has in flight have ended.
_PATIENCE_S = 60.0


class Services:
    """Processes that run until one ends; `servers` are watched too, and stopped by their owner."""

    def __init__(
        self, logs: Path, environment: Mapping[str, str], servers: Mapping[str, subprocess.Popen[bytes]]
    ) -> None:
        self._logs = logs
        self._environment = environment
        self._servers = servers
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        logs.mkdir(exist_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _at: TracebackType | None
    ) -> None:
        for name, running in reversed(self._running.items()):
            if running.poll() is None:
                print(f"Stopping {name} ...", flush=True)
            process.stop(running, signal.SIGTERM, _PATIENCE_S)

    def log(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    def complete(
        self,
        name: str,
        command: Sequence[str | Path],
        extra: Mapping[str, str] | None = None,
        accepted: Iterable[int] = (0,),
    ) -> int:
        """Run `command` to its end and return its exit code. Raises `Problem` for one that is not accepted."""
        running = self._start(name, command, extra or {})
        try:
            code = running.wait()
        finally:
            process.stop(running, signal.SIGTERM, _PATIENCE_S)
        if code not in accepted:
            raise Problem(f"The step `{name}` failed; the end of {self.log(name)}:{process.last_lines(self.log(name))}")
        return code

    def start(self, name: str, command: Sequence[str | Path]) -> None:
        """Start a process that has to run until we stop it."""
        self._running[name] = self._start(name, command, {})

    def wait(self) -> str:
        """Sleep until a process ends, and return a sentence about it."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        before = signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.set_wakeup_fd(writer)
        try:
            while (sentence := self.ended()) is None:
                select.select([reader], [], [])
                os.read(reader, 4096)
            return sentence
        finally:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, before)
            os.close(reader)
            os.close(writer)

    def ended(self) -> str | None:
        """Return a sentence about a process that has ended, if one has."""
        for name, running in {**self._servers, **self._running}.items():
            if (code := running.poll()) is not None:
                how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
                end = process.last_lines(self.log(name))
                return f"{name} ended by itself ({how}); the end of {self.log(name)}:{end}\n"
        return None

    def _start(self, name: str, command: Sequence[str | Path], extra: Mapping[str, str]) -> subprocess.Popen[bytes]:
        log = self.log(name)
        if log.exists():
            log.replace(log.with_suffix(".log.1"))
        return process.start(command, environment={**self._environment, **extra}, log=log, directory=CHECKOUT)
