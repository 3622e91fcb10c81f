"""Whether a stream of bytes is a whole tar archive, told while it passes: to its end, with the end-of-archive mark.

A stream that broke off looks like one that ended, wherever nobody counts: a chunked reply through a proxy, a pipe whose
writer was killed. The format says itself where it ends. Only the headers are read, and nothing is unpacked: what the
archive holds is a sandbox's word, and decides nothing here.
"""

from __future__ import annotations

from typing import NoReturn

from providers.contract import ErrorKind, ProviderError

BLOCK = 512
_ZEROS = bytes(BLOCK)
_NO_DATA = frozenset(b"123456")
"""Types of members (links, devices, directories, pipes) that no data follows, whatever size they state."""
_PAX, _SPARSE = ord("x"), ord("S")
_PAX_LONGEST = 1 << 20
"""Bytes of an extended header that are kept to be read; the one number sought in it is never behind that much."""
_DIGITS = 20
"""Characters of a number in an extended header: no file is longer."""


class TarStream:
    """Follows an uncompressed tar stream, piece by piece. Keeps one block and at most one extended header."""

    def __init__(self) -> None:
        self._partial = b""
        self._skip = 0
        self._zeros = 0
        self._sparse = False
        self._extended: bytearray | None = None
        self._size: int | None = None

    def feed(self, piece: bytes) -> None:
        """Follow the next piece. Raises `ProviderError` (`PROTOCOL`) where this is no tar stream."""
        at, length = 0, len(piece)
        while at < length:
            if self._skip and not self._sparse:  # the map of a sparse file comes before its data
                step = min(self._skip, length - at)
                if self._extended is not None and len(self._extended) < _PAX_LONGEST:
                    self._extended += piece[at : at + step]
                self._skip -= step
            else:
                step = min(BLOCK - len(self._partial), length - at)
                self._partial += piece[at : at + step]
                if len(self._partial) == BLOCK:
                    block, self._partial = self._partial, b""
                    self._block(block)
            at += step

    def end(self) -> None:
        """Say that no more comes. Raises `ProviderError` (`PROTOCOL`) unless the archive is whole."""
        if self._skip or self._partial or self._sparse or self._zeros < 2:  # noqa: PLR2004 - POSIX: two blocks of zeros
            _refuse("the archive breaks off before its end")

    def _block(self, block: bytes) -> None:
        if self._sparse:  # the map of a sparse file goes on in this block, and says whether in another one
            self._sparse = block[504] != 0
        elif block == _ZEROS:
            self._zeros += 1
        elif self._zeros:
            _refuse("something follows the end of the archive")
        else:
            self._header(block)

    def _header(self, block: bytes) -> None:
        stated = _number(block[148:156])
        if stated != sum(block) - sum(block[148:156]) + 8 * ord(" "):
            _refuse("not an archive: the checksum of a header is wrong")
        kind, size = block[156], _number(block[124:136])
        if self._extended is not None:  # the extended header that ended here is about this member
            self._size = _size_of(bytes(self._extended))
            self._extended = None
        if kind == _PAX:
            self._extended = bytearray()
        elif kind not in b"gKL":  # those are about a later member, too, and state no size
            size = size if self._size is None else self._size
            self._size = None
        if kind in _NO_DATA:
            size = 0
        self._sparse = kind == _SPARSE and block[482] != 0
        self._skip = -(-size // BLOCK) * BLOCK


def _number(field: bytes) -> int:
    """Return a number of a header: octal, or binary where the first bit says so."""
    if field[0] & 0x80:
        number = int.from_bytes(field, "big", signed=True) + (1 << (8 * len(field) - 1))
        if field[0] & 0x40:
            _refuse("not an archive: a negative number in a header")
        return number
    digits = field.split(b"\0", 1)[0].strip() or b"0"
    if digits.strip(b"01234567"):
        _refuse("not an archive: a number of a header cannot be read")
    return int(digits, 8)


def _size_of(extended: bytes) -> int | None:
    """Return the size that an extended header states, if it does: lines of `LENGTH NAME=VALUE`."""
    found, at = None, 0
    while at < len(extended) and extended[at : at + 1] != b"\0":
        length, space, _ = extended[at : at + _DIGITS].partition(b" ")
        if not space and len(extended) >= _PAX_LONGEST:
            break  # cut off by us
        if not space or not length.isdigit() or int(length) <= len(length) + 1:
            _refuse("not an archive: an extended header cannot be read")
        name, _, value = extended[at + len(length) + 1 : at + int(length)].rstrip(b"\n").partition(b"=")
        if name == b"size":
            if not value.isdigit() or len(value) > _DIGITS:
                _refuse("not an archive: an extended header states no usable size")
            found = int(value)
        at += int(length)
    return found


def _refuse(what: str) -> NoReturn:
    raise ProviderError(ErrorKind.PROTOCOL, what)
