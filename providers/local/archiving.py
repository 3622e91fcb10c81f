"""A tar stream of a directory in a sandbox's files, which its processes may be changing meanwhile.

No link is followed, not even one that takes a directory's place at the last moment: each entry is opened by its name in
the directory that holds it, and looked at once it is open. So nothing is read that is not below the sandbox's files.
"""

# Descriptors are not for pathlib.

from __future__ import annotations

import errno
import os
import stat
import tarfile
from collections.abc import Generator

from providers import archiving
from providers.contract import ErrorKind, ProviderError
from providers.local import records
from providers.local.deadline import Deadline
from providers.local.disk import Sandbox

_CHUNK = 1 << 18
_DEEPEST = 200
"""Directories within each other: each one is held open while what is in it is read."""
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Opening a pipe or a device must not wait, and have no effect.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_VANISHED = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.ENODEV})
"""What an entry is answered with that was removed, or replaced by something else, since it was listed."""


def pack(sandbox: Sandbox, path: str, deadline: Deadline) -> Generator[bytes, None, None]:
    """Yield the directory `path`, relative to the sandbox's files. Raises `MISSING_PATH` where there is none."""
    parts = [part for part in path.split("/") if part not in {"", "."}]
    if path.startswith("/") or ".." in parts:
        raise ProviderError(ErrorKind.INVALID, "a path in a local sandbox is relative, and does not lead out of it")
    top = os.open(records.FILES, _DIRECTORY, dir_fd=sandbox.directory)
    try:
        for part in parts:
            try:
                below = os.open(part, _DIRECTORY, dir_fd=top)
            except OSError as error:
                if error.errno in _VANISHED:
                    raise archiving.missing(path) from None
                raise
            os.close(top)
            top = below
        yield _header(".", os.fstat(top))
        yield from _contents(top, ".", deadline, 1)
    except PermissionError as error:
        raise ProviderError(ErrorKind.REFUSED, f"a file of the sandbox may not be read: {error.filename}") from None
    finally:
        os.close(top)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _contents(directory: int, name: str, deadline: Deadline, depth: int) -> Generator[bytes, None, None]:
    if depth > _DEEPEST:
        raise ProviderError(ErrorKind.REFUSED, f"directories are nested deeper than {_DEEPEST}")
    for entry in sorted(os.listdir(directory)):
        deadline.check("its files were read")
        try:
            seen = os.stat(entry, dir_fd=directory, follow_symlinks=False)
            if stat.S_ISDIR(seen.st_mode):
                yield from _directory(directory, entry, f"{name}/{entry}", deadline, depth)
            elif stat.S_ISREG(seen.st_mode):
                yield from _file(directory, entry, f"{name}/{entry}", deadline)
            elif stat.S_ISLNK(seen.st_mode):
                yield _header(f"{name}/{entry}", seen, os.readlink(entry, dir_fd=directory))
        except OSError as error:
            if error.errno not in _VANISHED and error.errno != errno.EINVAL:
                raise


def _directory(above: int, entry: str, name: str, deadline: Deadline, depth: int) -> Generator[bytes, None, None]:
    directory = os.open(entry, _DIRECTORY, dir_fd=above)
    try:
        yield _header(name, os.fstat(directory))
        yield from _contents(directory, name, deadline, depth + 1)
    finally:
        os.close(directory)


def _file(above: int, entry: str, name: str, deadline: Deadline) -> Generator[bytes, None, None]:
    handle = os.open(entry, _FILE, dir_fd=above)
    try:
        seen = os.fstat(handle)
        if not stat.S_ISREG(seen.st_mode):
            return
        yield _header(name, seen)
        left = seen.st_size
        while left:
            deadline.check("its files were read")
            # One that became shorter is filled up with zeros, one that became longer is cut, as tar does.
            chunk = os.read(handle, min(left, _CHUNK)) or bytes(min(left, _CHUNK))
            left -= len(chunk)
            yield chunk
        yield bytes(-seen.st_size % tarfile.BLOCKSIZE)
    finally:
        os.close(handle)


def _header(name: str, seen: os.stat_result, link: str | None = None) -> bytes:
    member = tarfile.TarInfo(name)
    member.mode, member.mtime = stat.S_IMODE(seen.st_mode), int(seen.st_mtime)
    member.uid, member.gid = seen.st_uid, seen.st_gid
    if link is not None:
        member.type, member.linkname = tarfile.SYMTYPE, link
    elif stat.S_ISDIR(seen.st_mode):
        member.type = tarfile.DIRTYPE
    else:
        member.size = seen.st_size
    return member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
