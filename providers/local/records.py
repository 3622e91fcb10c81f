"""Small JSON files that are there as a whole or not at all, whenever the writer or the machine dies.

Used by the supervisor too: standard library only.
"""

# Descriptors and /proc are not for pathlib, which would also slow the start of the supervisor down.
# ruff: noqa: PTH123

from __future__ import annotations

import errno
import json
import os
from contextlib import suppress
from typing import Any

from providers.local.processes import ProcessId, World

SANDBOX = "sandbox.json"
"""Resource id, name, marks and configuration: never changes."""
RUN = "run.json"
"""The latest run: boot, PID namespace and process of its supervisor. Written before that starts anything."""
ENDED = "ended.json"
"""The same values once that run is over, written by who has the kernel's word that nothing of it was left."""
KNOWN = "known.json"
"""Descendants that the supervisor last saw: finds those that cleared their mark, should it be killed."""
SOCKET = "socket"
FILES = "files"


def is_full(error: BaseException) -> bool:
    """Say whether this is the kernel's word that a disk is full, or a quota used up."""
    return isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}


def write(directory: int, name: str, value: object, *, durable: bool = True) -> None:
    """Replace one record. `directory` is a descriptor of the directory it stands in."""
    temporary = f".{name}.{os.getpid()}"
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600, dir_fd=directory)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            json.dump(value, file)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=directory)
        raise
    if durable:
        os.fsync(directory)


def read(directory: int, name: str) -> Any:
    """Return a record, or None where there is none. Raises `ValueError` for one that is damaged."""
    try:
        handle = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=directory)
    except FileNotFoundError:
        return None
    with open(handle, encoding="utf-8") as file:
        return json.load(file)


def run(world: World, supervisor: ProcessId) -> dict[str, Any]:
    """Return the value of a run's record."""
    return {"boot": world.boot, "namespace": world.namespace, "pid": supervisor.pid, "started": supervisor.started}
