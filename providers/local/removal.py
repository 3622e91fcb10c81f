"""Removing a tree that its owner may have made hard to remove.

Works relative to descriptors and never through a symbolic link, so that nothing outside the tree is touched; opens
directories without permissions; and flattens instead of descending, so that depth costs neither stack nor descriptors.
Safe to interrupt, to repeat, and to run from several processes at once.
"""

# Descriptors and /proc are not for pathlib, which would also slow the start of the supervisor down.
# ruff: noqa: PTH101, PTH208

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress

from providers.contract import ErrorKind, ProviderError
from providers.local.deadline import Deadline

_INSIDE = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove(parent: int, path: str, deadline: Deadline, *, last: str | None = None) -> None:
    """Remove the directory at `path` below `parent`, its entry `last` after all others. An absent one is removed.

    Raises `TIMEOUT`, and `REFUSED` for what the system does not let go (a mount, an immutable file).
    """
    try:
        root = _open(parent, path)
        if root is None:
            return
        try:
            while entries := [entry for entry in os.listdir(root) if entry != last]:
                for entry in entries:
                    _remove_entry(root, entry, deadline)
            if last is not None:
                _remove_entry(root, last, deadline)
        finally:
            os.close(root)
        with suppress(FileNotFoundError):
            os.rmdir(path, dir_fd=parent)
    except OSError as error:
        raise ProviderError(ErrorKind.REFUSED, f"cannot be removed: {error}") from None


def _remove_entry(root: int, entry: str, deadline: Deadline) -> None:
    with suppress(FileNotFoundError):
        if not _is_directory(root, entry):
            deadline.check("removing files")
            os.unlink(entry, dir_fd=root)
            return
        inside = _open(root, entry)
        if inside is None:
            return
        try:
            for deeper in os.listdir(inside):
                deadline.check("removing files")
                _lift(root, inside, deeper)
        finally:
            os.close(inside)
        os.rmdir(entry, dir_fd=root)


def _lift(root: int, inside: int, entry: str) -> None:
    """Unlink a file; move a directory up to the root of the removal, to be emptied there in its turn."""
    with suppress(FileNotFoundError):
        if not _is_directory(inside, entry):
            os.unlink(entry, dir_fd=inside)
            return
        opened = _open(inside, entry)  # a directory must be writable to change its parent
        if opened is not None:
            os.close(opened)
        os.rename(entry, f".{secrets.token_hex(8)}", src_dir_fd=inside, dst_dir_fd=root)


def _is_directory(directory: int, entry: str) -> bool:
    return stat.S_ISDIR(os.stat(entry, dir_fd=directory, follow_symlinks=False).st_mode)


def _open(parent: int, path: str) -> int | None:
    """Open a directory for reading, giving its owner the permissions first; None where there is none."""
    try:
        inside = os.open(path, _INSIDE, dir_fd=parent)
    except FileNotFoundError:
        return None
    try:
        # Through the descriptor: this changes exactly the directory that was opened, and no link's target.
        magic = f"/proc/self/fd/{inside}"
        if os.fstat(inside).st_mode & stat.S_IRWXU != stat.S_IRWXU:
            os.chmod(magic, 0o700)
        return os.open(magic, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    finally:
        os.close(inside)
