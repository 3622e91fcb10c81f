"""What all archives of a workspace have in common: which directories may be asked for, and when one is whole.

A service that breaks off in the middle of an archive often ends its answer as if all were well: what was sent by then
is a head of a tar stream. So each stream is taken apart on its way, and passes for whole only once its own end was
seen. Nothing is kept but names and headers, however long the stream is.
"""

from __future__ import annotations

import tarfile
from collections.abc import Generator, Iterable

from providers.contract import ErrorKind, ProviderError
from providers.failures import FULL_DISK
from providers.reading import not_understood

_BLOCK = 512
_MOST_OF_A_NAME = 1 << 20
_NAMED = frozenset({tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME})
"""Members whose data is about the next one: its name, or its size."""
_DATALESS = frozenset(
    {tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE}
)

PACK = """
cd -- "$directory" 2>/dev/null || exit 67
tar -cf - .
packed=$?
if [ "$packed" = 1 ] && tar --version 2>/dev/null | grep -q GNU; then packed=0; fi
"""
"""A piece of a shell script that writes the directory `$directory` as a tar stream, and sets `packed` to how it went.

GNU tar's 1 says that a file changed while it was read: files of a sandbox that runs do. Any other tar's 1, and every 2,
says that something is missing.
"""
MISSING, CLOSED = 66, 67
"""Exit statuses of such a script: there is no such directory, or it may not be entered."""
_NOT_FOUND = 127


def check(path: str) -> None:
    """Raise `INVALID` for what names no directory, or names all of a sandbox with what its kernel shows in it."""
    if not path or "\0" in path or not path.strip("/."):
        if path == ".":
            return
        raise ProviderError(ErrorKind.INVALID, "not the path of a workspace")


def missing(path: str) -> ProviderError:
    """Return what is raised where the sandbox has no directory of that name."""
    return ProviderError(ErrorKind.MISSING_PATH, f"the sandbox has no directory {path}")


def judge(status: int | None, path: str, complaint: bytes) -> None:
    """Raise what the exit status of a script with `PACK` in it means. None is one that was not told."""
    said = complaint.decode("utf-8", "replace").strip()
    if any(words in said.lower() for words in FULL_DISK):
        raise ProviderError(ErrorKind.DISK_FULL, f"the archive found no room: {said}")
    match status:
        case 0:
            return
        case None:
            raise ProviderError(ErrorKind.CONNECTION, "the archive broke off before its end was told")
        case _ if status == MISSING:
            raise missing(path)
        case _ if status == CLOSED:
            raise ProviderError(ErrorKind.REFUSED, "the directory may not be entered")
        case _ if status == _NOT_FOUND:
            raise ProviderError(ErrorKind.REFUSED, "the sandbox lacks a program that archives need: tar")
    raise ProviderError(ErrorKind.REFUSED, f"not all could be read, tar ended with {status}: {said}")


def whole(pieces: Iterable[bytes]) -> Generator[bytes, None, None]:
    """Pass a tar stream on. Raises `CONNECTION` where it ends before its own end, `PROTOCOL` where it is none."""
    walk = Walk()
    for piece in pieces:
        walk.feed(piece)
        yield piece
    if not walk.ended:
        raise ProviderError(ErrorKind.CONNECTION, "the archive broke off")


class Walk:
    """Takes a tar stream apart, as it comes, and knows whether its end was seen."""

    def __init__(self) -> None:
        self._header = bytearray()
        self._about: bytearray | None = None
        """The data of a member that is about the next one."""
        self._kind = b""
        self._data = self._padding = self._zeros = 0
        self._size: int | None = None

    @property
    def ended(self) -> bool:
        """Whether the two blocks of zeros that end an archive were seen."""
        return self._zeros > 1

    def feed(self, piece: bytes) -> None:
        """Take the next bytes. Raises `PROTOCOL` for what is no archive, or leads out of its directory."""
        rest = memoryview(piece)
        while rest:
            if self._data:
                taken = min(self._data, len(rest))
                if self._about is not None:
                    self._about += rest[:taken]
                self._data -= taken
                if not self._data and self._about is not None:
                    self._tell(bytes(self._about))
            elif self._padding:
                taken = min(self._padding, len(rest))
                self._padding -= taken
            else:
                taken = min(_BLOCK - len(self._header), len(rest))
                self._header += rest[:taken]
                if len(self._header) == _BLOCK:
                    block = bytes(self._header)
                    self._header.clear()
                    self._open(block)
            rest = rest[taken:]

    def _open(self, block: bytes) -> None:
        if not any(block):
            self._zeros += 1
            return
        if self._zeros:
            raise not_understood("an archive that goes on behind its end")
        try:
            member = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError:
            raise not_understood("an archive") from None
        if member.type == tarfile.GNUTYPE_SPARSE or member.size < 0:
            raise not_understood("a member of an archive")
        self._kind, size = member.type, member.size
        if member.type in _NAMED or member.type == tarfile.GNUTYPE_LONGLINK:
            if size > _MOST_OF_A_NAME:
                raise not_understood("a name in an archive")
            self._about = bytearray()
        else:
            _stay_inside(member.name)
            size = 0 if member.type in _DATALESS else size if self._size is None else self._size
            self._about = self._size = None
        self._data, self._padding = size, -size % _BLOCK

    def _tell(self, about: bytes) -> None:
        """Read what a member says about the next one."""
        self._about = None
        if self._kind == tarfile.GNUTYPE_LONGNAME:
            _stay_inside(about.rstrip(b"\0").decode("utf-8", "surrogateescape"))
        elif self._kind in _NAMED:
            for key, value in _records(about):
                if key == b"path":
                    _stay_inside(value.decode("utf-8", "surrogateescape"))
                elif key == b"size" and self._kind != tarfile.XGLTYPE:
                    self._size = _number(value)


def _records(about: bytes) -> Generator[tuple[bytes, bytes], None, None]:
    """Yield the records of an extended header: each has its own length in front, and `key=value` and a newline."""
    while about.strip(b"\0"):
        digits, space, _ = about.partition(b" ")
        length = _number(digits)
        record, about, there = about[len(digits) + 1 : length], about[length:], len(about)
        key, equals, value = record.partition(b"=")
        if not (space and equals and value.endswith(b"\n") and length <= there):
            raise not_understood("an extended header of an archive")
        yield key, value[:-1]


def _number(digits: bytes) -> int:
    if not (digits.isdigit() and len(digits) < 20):  # noqa: PLR2004 - more than any file has bytes
        raise not_understood("a number in an archive")
    return int(digits)


def _stay_inside(name: str) -> None:
    if name.startswith("/") or ".." in name.split("/"):
        raise not_understood("an archive with a name that leads out of it")
