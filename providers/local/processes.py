"""What the kernel says about processes, and the only place that signals one.

A PID alone names nothing: the kernel hands it out again. A process is named by PID and start time, valid within one
boot and one PID namespace, and is signalled only through a pidfd whose start time was compared after it was opened.
The supervisor imports this module at its start: standard library only, and little of it.
"""

# Descriptors and /proc are not for pathlib, which would also slow the start of the supervisor down.
# ruff: noqa: PTH115, PTH123, PTH208

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import NamedTuple

PROC = "/proc"
KERNEL_THREAD = 0x00200000
_ENDED = "ZXx"


class ProcessId(NamedTuple):
    """A process of this boot and PID namespace. `started` is in clock ticks since boot (`/proc/PID/stat`, field 22)."""

    pid: int
    started: int


class Stat(NamedTuple):
    """One look at `/proc/PID/stat`."""

    pid: int
    started: int
    state: str
    parent: int
    session: int
    flags: int

    @property
    def id(self) -> ProcessId:
        return ProcessId(self.pid, self.started)


class World(NamedTuple):
    """Where a PID means something: one boot of one kernel, and one PID namespace of it."""

    boot: str
    namespace: str


def world() -> World:
    """Return the boot and PID namespace that this process lives in."""
    with open(f"{PROC}/sys/kernel/random/boot_id", encoding="ascii") as file:
        return World(file.read().strip(), os.readlink(f"{PROC}/self/ns/pid"))


def pids() -> Iterator[int]:
    """List all processes at once, and yield their PIDs."""
    return (int(name) for name in os.listdir(PROC) if name.isdigit())


def last_pid() -> int:
    """Return the PID that this namespace gave out last: it stands still exactly while nothing is forked."""
    with open(f"{PROC}/loadavg", encoding="ascii") as file:
        return int(file.read().rsplit(None, 1)[1])


def stat(pid: int) -> Stat | None:
    """Look at a process, executing or not; None when there is none of this PID."""
    return _stat(f"{PROC}/{pid}/stat")


def _stat(path: str) -> Stat | None:
    try:
        with open(path, "rb") as file:
            text = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    pid, _, rest = text.partition(b" (")
    fields = rest[rest.rindex(b")") + 2 :].split()  # the command's name may itself hold spaces and parentheses
    return Stat(int(pid), int(fields[19]), fields[0].decode(), int(fields[1]), int(fields[3]), int(fields[6]))


def executes(seen: Stat) -> bool:
    """Say whether any thread of this process may still execute: a zombie whose other threads live on does."""
    return seen.state not in _ENDED or _live_thread(seen.pid) is not None


def _live_thread(pid: int) -> int | None:
    try:
        threads = os.listdir(f"{PROC}/{pid}/task")
    except (FileNotFoundError, ProcessLookupError):
        return None
    for thread in threads:
        seen = _stat(f"{PROC}/{pid}/task/{thread}/stat")
        if seen is not None and seen.state not in _ENDED:
            return int(thread)
    return None


def environment(seen: Stat) -> bytes:
    """Return the environment block of a process: empty for one without memory of its own, or in the middle of exec.

    Raises `PermissionError` where it may not be read.
    """
    path = f"{PROC}/{seen.pid}/environ"
    if seen.state in _ENDED:  # the first thread has given its memory back; the others still hold it
        thread = _live_thread(seen.pid)
        if thread is None:
            return b""
        path = f"{PROC}/{seen.pid}/task/{thread}/environ"
    try:
        with open(path, "rb") as file:
            return file.read()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def has_command(seen: Stat) -> bool:
    """Say whether a process shows a command line: one in the middle of exec or exit does not, any other one does."""
    try:
        with open(f"{PROC}/{seen.pid}/cmdline", "rb") as file:
            return bool(file.read(1))
    except (FileNotFoundError, ProcessLookupError):
        return False


def owners(pid: int) -> frozenset[int]:
    """Return real, effective, saved and file-system user of a process, from what everyone may read."""
    try:
        with open(f"{PROC}/{pid}/status", "rb") as file:
            for line in file:
                if line.startswith(b"Uid:"):
                    return frozenset(int(number) for number in line.split()[1:])
    except (FileNotFoundError, ProcessLookupError):
        pass
    return frozenset()


def is_alive(process: ProcessId) -> bool:
    """Say whether exactly this process still executes."""
    seen = stat(process.pid)
    return seen is not None and seen.started == process.started and executes(seen)


def open_process(process: ProcessId) -> int | None:
    """Return a pidfd of exactly this process, or None when it has ended. The caller closes it."""
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    # Compared after opening: from here on the handle cannot come to mean another process.
    seen = stat(process.pid)
    if seen is None or seen.started != process.started:
        os.close(handle)
        return None
    return handle


def send(process: ProcessId, number: signal.Signals) -> bool:
    """Signal exactly this process; False when it had ended. Raises `PermissionError` when it may not be signalled."""
    handle = open_process(process)
    if handle is None:
        return False
    try:
        signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True


def with_descendants(roots: set[int], seen: dict[int, Stat]) -> set[int]:
    """Return the PIDs of `roots` and of everything below them, as far as `seen` holds them."""
    children: dict[int, list[int]] = {}
    for one in seen.values():
        children.setdefault(one.parent, []).append(one.pid)
    found: set[int] = set()
    pending = [pid for pid in roots if pid in seen]
    while pending:
        pid = pending.pop()
        if pid not in found:
            found.add(pid)
            pending.extend(children.get(pid, ()))
    return found


def table() -> dict[int, Stat]:
    """Return one look at all processes, not at one instant: enough to find work, never to prove that there is none."""
    return {one.pid: one for pid in pids() if (one := stat(pid)) is not None}
