"""A process from which tests fork real ones: an acquire that is killed at a point, and recoveries by fresh processes.

Forking one that has everything imported makes each a few milliseconds' work. It has no thread and no database
connection itself, so nothing of one process is left for the next but what is in the database and at the provider.
Orders come as lines of JSON, answered by the list of exit codes (negative: the signal); see `tests.crashing`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import django

django.setup()

from django.db import connection  # noqa: E402 - Django has to be set up before

import leases  # noqa: E402
from cleanup.claims import LANE  # noqa: E402
from cleanup.engine import Engine  # noqa: E402
from leases import archives  # noqa: E402
from leases.errors import LeaseError  # noqa: E402
from providers.contract import ErrorKind, ProviderError  # noqa: E402
from providers.daytona import DaytonaProvider  # noqa: E402
from providers.http_api import Conversation  # noqa: E402
from providers.local import client  # noqa: E402
from providers.local.provider import LocalProvider  # noqa: E402
from tests.tracing import Point, Trace  # noqa: E402

_PAUSE = 0.01
_PATIENCE = 30.0
_LIFE = 60


class Diary:
    """What all processes of a test did, in the order of time: one line of JSON for each point."""

    def __init__(self, path: str, role: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._role = role

    def write(self, point: Point) -> None:
        line = json.dumps({"pid": os.getpid(), "role": self._role, "point": point})
        os.write(self._file, line.encode() + b"\n")


def acquire(order: dict[str, Any]) -> None:
    """Acquire, and die at the point of the order, if it has one."""
    diary, dies_at = Diary(order["diary"], "acquire"), tuple(order["dies_at"] or ())

    def reached(point: Point) -> None:
        diary.write(point)
        if point == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)

    trace = _trace(reached)
    with trace.commits():
        try:
            lease = leases.acquire(order["environment"], **order["how"])
        except LeaseError as error:
            print(error.code, flush=True)
            raise
        with trace.step("reply"):
            print(lease.pk, flush=True)


def work(order: dict[str, Any]) -> None:
    """Sweep what the account owes until nothing is due, and die at the point of the order, if it has one.

    Its `faults` say what the provider answers to a call: an error of this kind, `done` or not before it.
    """
    diary, dies_at = Diary(order["diary"], "work"), tuple(order["dies_at"] or ())

    def reached(point: Point) -> None:
        diary.write(point)
        if point == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)

    for call, (kind, done) in order["faults"].items():
        _fail(call, ErrorKind(kind), done=done)
    trace = _trace(reached)
    trace.follow(archives, "write", "write of the archive")
    with trace.commits():
        while Engine().sweep(order["account"]).claimed + Engine().sweep(LANE).claimed:
            pass


def _fail(call: str, kind: ErrorKind, *, done: bool) -> None:
    original = getattr(LocalProvider, call)

    def fail(*args: Any, **kwargs: Any) -> Any:
        if done:
            original(*args, **kwargs)
        raise ProviderError(kind, "rehearsed")

    setattr(LocalProvider, call, fail)


def recover(order: dict[str, Any]) -> None:
    """Sweep what the account owes until nothing is due.

    With a `gate`, it first has to come to that point once, and waits there until the file of the gate exists.
    """
    diary, gate = Diary(order["diary"], "recover"), order.get("gate")
    arrived = []

    def reached(point: Point) -> None:
        diary.write(point)
        if gate and not arrived and point == tuple(gate["at"]):
            arrived.append(point)
            _until(Path(gate["file"]).exists)

    _trace(reached)
    until = time.monotonic() + _PATIENCE
    while Engine().sweep(order["account"]).claimed + Engine().sweep(LANE).claimed or (gate and not arrived):
        if time.monotonic() > until:
            raise TimeoutError("there is always something due")
        if gate and not arrived:
            time.sleep(_PAUSE)


def _trace(reached: Any) -> Trace:
    trace = Trace(reached)
    for adapter in (LocalProvider, DaytonaProvider):
        trace.follow_provider(adapter)
    trace.follow(client, "launch", "launch of its processes")
    original = Conversation.request

    def request(conversation: Conversation, method: str, path: str, **options: Any) -> Any:
        if method != "POST" or path.endswith("/execute"):
            return original(conversation, method, path, **options)
        with trace.step(f"POST {path.rpartition('/')[2]}"):
            return original(conversation, method, path, **options)

    Conversation.request = request  # type: ignore[method-assign]
    return trace


def _until(look: Any) -> None:
    until = time.monotonic() + _PATIENCE
    while not look():
        if time.monotonic() > until:
            raise TimeoutError
        time.sleep(_PAUSE)


def _fork(order: dict[str, Any], number: int, barrier: tuple[int, int]) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    signal.alarm(_LIFE)  # one that waits where nobody expected it ends, and is told by its exit code
    try:
        for descriptor, name in ((1, "out"), (2, "err")):
            file = os.open(f"{order['output']}-{number}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(file, descriptor)
        connection.ensure_connection()
        os.close(barrier[1])
        os.read(barrier[0], 1)  # ends when nobody holds the other end any more: all are ready
        {"acquire": acquire, "recover": recover, "work": work}[order["do"]](order)
        status = 0
    except BaseException:  # noqa: BLE001 - nothing may run on as a second parent
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    """Serve orders until there are none."""
    for line in sys.stdin:
        order = json.loads(line)
        barrier = os.pipe()
        pids = [_fork(order, number, barrier) for number in range(order["count"])]
        for end in barrier:
            os.close(end)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        print(json.dumps(codes), flush=True)


if __name__ == "__main__":
    main()
