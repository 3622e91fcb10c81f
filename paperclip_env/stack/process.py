"""Starting a process that cannot outlive the launcher, and ending one."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from paperclip_env.stack.account import Account
from paperclip_env.stack.problem import Problem

_PR_SET_PDEATHSIG = 1


def die_with_launcher(by: signal.Signals) -> Callable[[], None] | None:
    """Return what a child has to call before it becomes its program, so that the kernel ends it when the launcher dies.

    Linux only. Elsewhere a launcher that was killed leaves its servers behind, and the next start ends them.
    """
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    launcher = os.getpid()

    def ask_the_kernel() -> None:
        prctl(_PR_SET_PDEATHSIG, int(by), 0, 0, 0)
        if os.getppid() != launcher:  # it died before we asked
            os._exit(1)

    return ask_the_kernel


def start(
    command: Sequence[str | Path],
    *,
    environment: Mapping[str, str],
    log: Path,
    account: Account | None = None,
    directory: Path | None = None,
    if_orphaned: signal.Signals = signal.SIGTERM,
    text: str | None = None,
) -> subprocess.Popen[bytes]:
    """Start `command` in a session of its own with its output added to `log`; `text` becomes its standard input.

    A session of its own, because Ctrl-C must reach the launcher only, which then ends everything in order.
    """
    try:
        with log.open("ab") as output:
            process = subprocess.Popen(
                [str(part) for part in command],
                env=dict(environment),
                cwd=directory,
                stdin=subprocess.DEVNULL if text is None else subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_launcher(if_orphaned),  # noqa: PLW1509 -- the launcher has one thread
                **(account.identity if account else {}),
            )
        if text is not None:
            _write_all(process.stdin, text)
    except (OSError, subprocess.SubprocessError) as error:
        raise Problem(f"Cannot start {Path(command[0]).name}: {error}") from None
    return process


def _write_all(stdin: IO[bytes] | None, text: str) -> None:
    if stdin is not None:
        with contextlib.suppress(BrokenPipeError), stdin:  # a program that ended at once is reported by its exit code
            stdin.write(text.encode())


def stop(process: subprocess.Popen[bytes], by: signal.Signals, patience_s: float) -> None:
    """Ask a process to end, wait for up to `patience_s`, then kill whatever is left of its session."""
    if process.poll() is None:
        process.send_signal(by)
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def last_lines(log: Path, count: int = 15) -> str:
    """Return the end of a log, indented, to be shown after the sentence that says what failed."""
    try:
        lines = log.read_text(errors="replace").splitlines()[-count:]
    except OSError:
        return ""
    return "".join(f"\n    {line}" for line in lines)
