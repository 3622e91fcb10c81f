"""The worker's side of a supervisor: starting one, and asking one over its socket within a bound."""

# Descriptors and /proc are not for pathlib, which would also slow the start of the supervisor down.
# ruff: noqa: PTH123

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import providers
from providers.contract import OUTPUT_LIMIT, Command, ErrorKind, Execution, ProviderError
from providers.local import evidence, records
from providers.local.census import SANDBOX_VARIABLE
from providers.local.deadline import Deadline
from providers.local.disk import Sandbox
from providers.local.supervisor import PATH

_ROOT = str(Path(providers.__file__).resolve().parent.parent)
# Isolated and without site: starts in a few milliseconds, and nothing in the worker's environment changes what it runs.
_PROGRAM = "import sys; sys.path.append(sys.argv.pop(1)); from providers.local.supervisor import main; main()"
_ANSWER_LIMIT = 2 * OUTPUT_LIMIT + (1 << 16)


def launch(sandbox: Sandbox, deadline: Deadline) -> None:
    """Start the supervisor of a sandbox that the caller holds exclusively, and wait until it is ready.

    The supervisor inherits the lock and lets go of it only when its record is written, so that nobody can take the
    sandbox for stopped in between, even if the caller is killed. Raises `TIMEOUT`, `SERVER`, `DISK_FULL`, and `INVALID`
    when the main command cannot be started (the sandbox runs then).
    """
    if sandbox.lock is None:
        raise ValueError("the sandbox is not locked")
    told, ready = os.pipe()
    try:
        with open(
            os.open("supervisor.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600, dir_fd=sandbox.directory), "ab"
        ) as log:
            started = subprocess.Popen(
                [
                    *(sys.executable or "python3", "-I", "-S", "-c", _PROGRAM, _ROOT),
                    *(sandbox.resource.resource_id, str(sandbox.lock), str(ready)),
                ],
                cwd=f"/proc/self/fd/{sandbox.directory}",
                # The mark from its first instruction on, and nothing of the worker's own environment.
                env={SANDBOX_VARIABLE: sandbox.resource.resource_id, "PATH": PATH, "LANG": "C.UTF-8"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(sandbox.lock, ready),
                start_new_session=True,
            )
        os.close(ready)
        ready = -1
        text = _read_word(told, deadline)
        started.wait(deadline.left + 1.0)  # the first process ends as soon as it has detached the second
    except (OSError, subprocess.SubprocessError) as error:
        kind = ErrorKind.DISK_FULL if records.is_full(error) else ErrorKind.SERVER
        raise ProviderError(kind, f"the supervisor cannot be started: {error}") from None
    finally:
        os.close(told)
        if ready >= 0:
            os.close(ready)
    try:
        word = json.loads(text)
        full, failure = word.get("disk_full"), word.get("failure")
    except (ValueError, AttributeError):
        raise ProviderError(
            ErrorKind.SERVER, "the supervisor did not start; its log is in the sandbox's directory"
        ) from None
    if full:
        raise ProviderError(ErrorKind.DISK_FULL, f"the supervisor cannot be started: {full}")
    if failure:
        raise ProviderError(ErrorKind.INVALID, f"the main command cannot be started: {failure}")


def _read_word(told: int, deadline: Deadline) -> bytes:
    text = b""
    poll = select.poll()
    poll.register(told, select.POLLIN)
    while True:
        if not poll.poll(deadline.left * 1000):
            raise ProviderError(ErrorKind.TIMEOUT, "the supervisor was not ready within the bound")
        chunk = os.read(told, 65536)
        if not chunk:
            return text
        text += chunk


def execute(sandbox: Sandbox, command: Command, deadline: Deadline) -> Execution:
    """Have the supervisor run a command."""
    request = {
        "op": "execute",
        "argv": list(command.argv),
        "cwd": command.cwd,
        "env": dict(command.env),
        "timeout": command.timeout,
        "limit": OUTPUT_LIMIT,
        "stdin": len(command.stdin),
    }
    header, body = _ask(sandbox, request, command.stdin, deadline)
    try:
        out = header["stdout"]
        return Execution(
            exit_code=header["exit_code"],
            stdout=body[:out],
            stderr=body[out:],
            timed_out=header["timed_out"],
            signal=header["signal"],
            truncated=header["truncated"],
        )
    except (KeyError, TypeError):
        raise ProviderError(ErrorKind.PROTOCOL, "the supervisor's answer is not understood") from None


def check_serving(sandbox: Sandbox, deadline: Deadline) -> None:
    """Raise `REFUSED` for a supervisor that is being stopped, and the errors of asking for one that does not answer."""
    _ask(sandbox, {"op": "ping"}, b"", deadline)


def _ask(sandbox: Sandbox, request: dict[str, Any], stdin: bytes, deadline: Deadline) -> tuple[dict[str, Any], bytes]:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
            answer = _exchange(peer, sandbox, json.dumps(request).encode() + b"\n" + stdin, deadline)
    except TimeoutError:
        raise ProviderError(ErrorKind.TIMEOUT, "the supervisor did not answer within the bound") from None
    except (ConnectionRefusedError, FileNotFoundError) as error:
        if evidence.supervisor_of(sandbox) is None:
            raise ProviderError(ErrorKind.REFUSED, "the sandbox is not running") from None
        raise ProviderError(ErrorKind.CONNECTION, error) from None
    except OSError as error:
        raise ProviderError(ErrorKind.CONNECTION, error) from None
    line, newline, body = answer.partition(b"\n")
    if not newline:
        raise ProviderError(ErrorKind.CONNECTION, "the supervisor ended before it answered")
    try:
        header: dict[str, Any] = json.loads(line)
        size = header.get("stdout", 0) + header.get("stderr", 0)
    except (ValueError, AttributeError, TypeError):
        raise ProviderError(ErrorKind.PROTOCOL, "the supervisor's answer is not understood") from None
    for word, kind in (
        ("refused", ErrorKind.REFUSED),
        ("invalid", ErrorKind.INVALID),
        ("failed", ErrorKind.SERVER),
    ):
        if word in header:
            raise ProviderError(kind, header[word])
    if len(body) != size:
        raise ProviderError(ErrorKind.CONNECTION, "the supervisor ended before it answered in full")
    return header, body


def _exchange(peer: socket.socket, sandbox: Sandbox, request: bytes, deadline: Deadline) -> bytes:
    peer.settimeout(max(deadline.left, 0.001))
    peer.connect(sandbox.path(records.SOCKET))
    unsent = memoryview(request)
    while unsent:
        peer.settimeout(max(deadline.left, 0.001))
        try:
            unsent = unsent[peer.send(unsent) :]
        except (BrokenPipeError, ConnectionResetError):
            break  # refused before it was read in full: the answer says why
    answer = bytearray()
    while True:
        if deadline.passed:
            raise TimeoutError
        peer.settimeout(max(deadline.left, 0.001))
        chunk = peer.recv(65536)
        if not chunk:
            return bytes(answer)
        answer += chunk
        if len(answer) > _ANSWER_LIMIT:
            raise ProviderError(ErrorKind.PROTOCOL, "the supervisor's answer has no end")
