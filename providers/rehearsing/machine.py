"""What a rehearsed sandbox runs on: a directory, and the processes that were started in it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_MARK = "PAPERCLIP_ENV_REHEARSAL"
_ROUNDS = 500
_PAUSE = 0.005


@dataclass(frozen=True, slots=True)
class Done:
    """What became of a program. `status` is as `Popen` gives it, or None where it took too long."""

    pid: int
    status: int | None
    stdout: bytes
    stderr: bytes


class Machine:
    """One sandbox's directory and processes. `token` is unlike any other sandbox's."""

    def __init__(self, root: Path, token: str, env: Mapping[str, str]) -> None:
        self._home = root / token
        self._mark = f"{_MARK}={token}".encode()
        self._env = {
            "PATH": os.environ.get("PATH", os.defpath),
            **env,
            "HOME": str(self._home),
            "TMPDIR": str(self._home / ".tmp"),
            _MARK: token,
        }
        # One that an earlier server began may have processes of its time.
        self._used = self._home.exists()
        (self._home / ".tmp").mkdir(parents=True, exist_ok=True)

    @property
    def home(self) -> Path:
        return self._home

    def path(self, given: str) -> Path:
        """Resolve a path as the sandbox's file API does: relative to the working directory."""
        return self._home / given

    def run(self, argv: Sequence[str], *, cwd: str | None, env: Mapping[str, str], timeout: float) -> Done:
        """Run a program to its end and keep its streams apart. It is killed, alone, when time is up."""
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            try:
                process = self._begin(argv, cwd, env, out, err)
            except OSError as error:
                return Done(0, 126, b"", f"{error.strerror}\n".encode())
            status = self._wait(process, timeout)
            out.seek(0)
            err.seek(0)
            return Done(process.pid, status, out.read(), err.read())

    def execute(
        self, command: str, *, cwd: str | None, env: Mapping[str, str], timeout: float
    ) -> tuple[int, str] | None:
        """Run a shell command and return its exit status and both streams as one text, or None when it took too long.

        Like the service, it waits for whoever holds the streams, and kills the shell alone when time is up.
        """
        with tempfile.TemporaryFile() as output:
            try:
                process = self._begin(["/bin/sh", "-c", command], cwd, env, output, output)
            except OSError as error:
                return 126, f"{error.strerror}\n"
            status = self._wait(process, timeout)
            if status is None:
                return None
            output.seek(0)
            # A shell's word for a death by signal, which `Popen` gives as a negative number.
            return status if status >= 0 else 128 - status, output.read().decode("utf-8", "replace")

    def end(self) -> None:
        """Kill all that runs, and wait until it is gone. Raises `OSError` when that does not help."""
        nothing = 0
        for _ in range(_ROUNDS):
            found = self.running()
            # One that is just becoming another program shows no environment: nothing counts when it is seen twice.
            nothing = 0 if found else nothing + 1
            if nothing == 2:  # noqa: PLR2004
                return
            self._signal(found, signal.SIGKILL)
            time.sleep(_PAUSE)
        raise OSError("processes of a sandbox cannot be killed")

    def freeze(self) -> None:
        self._signal(self.running(), signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(self.running(), signal.SIGCONT)

    def remove(self) -> None:
        self.end()
        shutil.rmtree(self._home, ignore_errors=True)

    def running(self) -> list[int]:
        """Return the PIDs of all that carries this sandbox's mark."""
        if not self._used:
            return []  # nothing was ever started in it, and a look at all processes takes its time
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                with suppress(OSError):  # it ended meanwhile, or belongs to somebody else
                    if self._mark in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
        return found

    def _begin(
        self, argv: Sequence[str], cwd: str | None, env: Mapping[str, str], out: IO[bytes], err: IO[bytes]
    ) -> subprocess.Popen[bytes]:
        self._used = True
        return subprocess.Popen(
            argv,
            cwd=self._home / (cwd or "."),
            env={**self._env, **env},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )

    @staticmethod
    def _wait(process: subprocess.Popen[bytes], timeout: float) -> int | None:
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return None

    @staticmethod
    def _signal(pids: list[int], number: signal.Signals) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
