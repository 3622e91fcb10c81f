"""Which machine and which state directory this is: the identity that makes a missing sandbox mean something.

A state directory is named by a random id in a file inside it, so that a swapped, wiped or unmounted directory is
another one. A directory that holds sandboxes and has lost its id is refused, never silently named anew.
"""

# Descriptors and /proc are not for pathlib, which would also slow the start of the supervisor down.
# ruff: noqa: PTH123, PTH208

from __future__ import annotations

import os
import secrets
from contextlib import suppress

from providers.contract import ErrorKind, ProviderError

SANDBOXES = "sandboxes"
TRASH = "trash"
STAGING = "staging"
_DIRECTORY_ID = "directory-id"
_MACHINE_ID = "machine-id"
_HOST_MACHINE_ID = "/etc/machine-id"


def of(state: int) -> str:
    """Return the identity of a state directory (a descriptor of it), naming the directory at its first use."""
    directory = _read(state, _DIRECTORY_ID)
    if directory is None:
        if any(_holds_something(state, part) for part in (SANDBOXES, TRASH)):
            raise ProviderError(ErrorKind.IDENTITY, "the state directory holds sandboxes and has lost its id file")
        directory = _name_once(state, _DIRECTORY_ID)
    return f"local:{_machine(state)}:{directory}"


def _machine(state: int) -> str:
    # A machine id that this directory once had to make up stays, even when the host is given one later.
    made_up = _read(state, _MACHINE_ID)
    if made_up is not None:
        return made_up
    with suppress(OSError):
        with open(_HOST_MACHINE_ID, encoding="ascii") as file:
            text = file.read().strip()
        if text and text != "uninitialized":
            return text
    return _name_once(state, _MACHINE_ID)


def _read(state: int, name: str) -> str | None:
    try:
        handle = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=state)
    except FileNotFoundError:
        return None
    with open(handle, encoding="ascii", errors="replace") as file:
        text = file.read().strip()
    if not text.isalnum():
        raise ProviderError(ErrorKind.IDENTITY, f"the file {name} of the state directory is damaged")
    return text


def _name_once(state: int, name: str) -> str:
    """Write a random id, or return the one that another process wrote first."""
    text = secrets.token_hex(16)
    temporary = f".{name}.{text}"
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644, dir_fd=state)
    try:
        with open(handle, "w", encoding="ascii") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        # A link never replaces: of several processes exactly one names the directory.
        with suppress(FileExistsError):
            os.link(temporary, name, src_dir_fd=state, dst_dir_fd=state)
    finally:
        os.unlink(temporary, dir_fd=state)
    os.fsync(state)
    return _read(state, name) or text


def _holds_something(state: int, part: str) -> bool:
    try:
        handle = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=state)
    except FileNotFoundError:
        return False
    try:
        return bool(os.listdir(handle))
    finally:
        os.close(handle)
