"""The bytes of archives: into Django's file storage, counted and hashed on the way, and out of it, verified.

Answers for: what is saved is what the provider sent, whole, or nothing is; what is read is what was saved, or an error.
Nothing here touches the database, for `write` runs inside a provider call. Which archive may be used is the business of
`leases.archives`. Names are made there, of ids alone: nothing that a sandbox says becomes a path, and no archive is
unpacked.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, cast
from uuid import UUID, uuid4

from django.conf import settings
from django.core.files.base import ContentFile
from django.core.files.storage import FileSystemStorage, Storage, storages

from leases.errors import LeaseError
from leases.tar_stream import TarStream

log = logging.getLogger(__name__)

ALIAS = "workspace_archives"
"""The storage's name in `STORAGES`."""

SUFFIX = ".tar"

PIECE = 1 << 16
"""Bytes that are read at once from the storage."""

_PROBED = 512
"""Bytes of the file that `probe` writes."""


class TooLarge(LeaseError):
    """The workspace is larger than an archive may be. Another attempt can only repeat it."""

    code = "archive_too_large"


class StorageFailed(LeaseError):
    """The storage of archives could not do it: full, not writable, not there. Says nothing about the provider."""

    code = "storage_unavailable"


class ArchiveDamaged(LeaseError):
    """What the storage holds is not what was saved. Nothing that was read of it may be used."""

    code = "archive_damaged"


@dataclass(frozen=True, slots=True)
class Saved:
    """What was saved: bytes, and their SHA-256 in hexadecimal."""

    size: int
    sha256: str


def storage() -> Storage:
    """Return the storage of archives. Raises `StorageFailed` where the settings name none that can be made."""
    try:
        return storages[ALIAS]
    except Exception as error:
        raise StorageFailed(f"the storage of archives cannot be made: {_told(error)}") from error


def name_of(archive_id: UUID, company_id: UUID) -> str:
    """Return the name of an archive's file: of ids alone."""
    return f"{company_id}/{archive_id}{SUFFIX}"


def write(name: str, pieces: Iterator[bytes], *, limit: int | None = None) -> Saved:
    """Stream `pieces`, an uncompressed tar archive, to the storage, keeping no more than one of them in memory.

    `limit` is in bytes (`PAPERCLIP_ARCHIVE_MAX_BYTES` unless given): reached is fine, and the first piece beyond it is
    not written. A storage that is a directory has the file on disk when this returns. `pieces` are closed, in this
    thread, which is the only one that reads them.

    Raises `TooLarge`; `StorageFailed`; `ProviderError` (`PROTOCOL`) for a stream that ends before the archive does; and
    unchanged whatever `pieces` raise. Then what was written is removed, as far as the storage does that.
    """
    stream = _Incoming(name, pieces, settings.PAPERCLIP_ARCHIVE_MAX_BYTES if limit is None else limit)
    try:
        where = storage()
        _require_free(where, name)
        try:
            return _save(where, name, stream)
        except BaseException:
            _remove_half(where, stream.given)
            raise
    finally:
        stream.close_pieces()


def remove(name: str) -> None:
    """Remove a file; one that is not there is removed already. Raises `StorageFailed`."""
    try:
        storage().delete(name)
    except FileNotFoundError:
        return
    except Exception as error:
        raise StorageFailed(f"the archive could not be removed: {_told(error)}") from error


@contextmanager
def reading(name: str, saved: Saved) -> Iterator[BinaryIO]:
    """Open what was saved, to be read from its beginning; no seeking.

    Raises `ArchiveDamaged` at the latest instead of the last byte, where size or checksum are not those of `saved`, and
    `StorageFailed`. Whoever leaves the block early without an error has the rest verified too (a reader of tar stops
    before the padding): left without an error, everything that was read was right.
    """
    try:
        file = storage().open(name, "rb")
    except FileNotFoundError as error:
        raise ArchiveDamaged("the archive is not in the storage any more") from error
    except StorageFailed:
        raise
    except Exception as error:
        raise StorageFailed(f"the archive could not be opened: {_told(error)}") from error
    with file:
        verified = _Verified(file, saved)
        reader = io.BufferedReader(verified, PIECE)
        yield cast("BinaryIO", reader)
        while verified.read(PIECE):
            pass


def trouble() -> str:
    """Return a sentence about what keeps archives from being written, as far as looking tells; empty for nothing.

    Changes nothing: a directory that is not there yet is made with the first archive, where that can be.
    """
    try:
        where = storage()
    except StorageFailed as failure:
        return f"{failure}; see PAPERCLIP_ARCHIVE_STORAGE and PAPERCLIP_ARCHIVE_STORAGE_OPTIONS."
    if not isinstance(where, FileSystemStorage):
        return ""
    there = Path(where.location)
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        return f"{there} is no directory, and archives of workspaces are kept in {where.location}."
    if not os.access(there, os.W_OK | os.X_OK):
        return f"{there} cannot be written to, and archives of workspaces are kept in {where.location}."
    return ""


def probe() -> None:
    """Write, read and remove a small file, as an archive is. Raises `StorageFailed` with what was wrong."""
    where, name, content = storage(), f"probe/{uuid4()}", os.urandom(_PROBED)
    try:
        given = where.save(name, ContentFile(content))
        try:
            _sync(where, given)
            with where.open(given, "rb") as file:
                found = file.read()
        finally:
            where.delete(given)
    except Exception as error:
        raise StorageFailed(f"the storage of archives does not work: {_told(error)}") from error
    if found != content:
        raise StorageFailed("the storage of archives does not give back what it was given")


def lists() -> bool:
    """Return whether the storage can say what it holds. Raises `StorageFailed`."""
    try:
        _listed(storage(), "")
    except NotImplementedError:
        return False
    return True


def holds(name: str) -> bool:
    """Return whether the storage has a file of this name. Raises `StorageFailed`."""
    return _has(storage(), name)


def names() -> Iterator[str]:
    """Yield the names of the files in the storage that are named like archives. Raises `StorageFailed`."""
    where = storage()
    for directory in _listed(where, "")[0]:
        if _is_id(directory):
            for file in _listed(where, directory)[1]:
                if file.endswith(SUFFIX) and _is_id(file.removesuffix(SUFFIX)):
                    yield f"{directory}/{file}"


def _listed(where: Storage, directory: str) -> tuple[list[str], list[str]]:
    try:
        return where.listdir(directory)
    except FileNotFoundError:  # nothing was ever saved, or the directory went meanwhile
        return [], []
    except NotImplementedError:
        raise
    except Exception as error:
        raise StorageFailed(f"the storage of archives cannot be listed: {_told(error)}") from error


def _is_id(text: str) -> bool:
    try:
        return str(UUID(text)) == text
    except ValueError:
        return False


class _Stopped(Exception):
    """Ends the storage's work from within its reading; the cause is raised in its place."""


class _Incoming(io.RawIOBase):
    """The pieces as the file that a storage saves: read in pieces, or by any size; counted, hashed, followed as tar."""

    def __init__(self, name: str, pieces: Iterator[bytes], limit: int) -> None:
        super().__init__()
        self.name = self.given = name
        self.cause: BaseException | None = None
        self.is_whole = False
        self.taken = 0
        self._pieces = pieces
        self._limit = limit
        self._rest = memoryview(b"")
        self._hash = hashlib.sha256()
        self._tar = TarStream()
        self._thread = threading.get_ident()

    def saved(self) -> Saved:
        return Saved(self.taken, self._hash.hexdigest())

    def close_pieces(self) -> None:
        close = getattr(self._pieces, "close", None)
        if close is not None:
            close()

    def chunks(self, chunk_size: int | None = None) -> Iterator[bytes]:  # noqa: ARG002 - they have the size they have
        if self._rest:
            yield bytes(self._rest)
        while piece := self._take():
            yield piece

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._rest:
            self._rest = memoryview(self._take())
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to the beginning, where this is still the beginning: some storages ask for it before they read."""
        if (offset, whence) == (0, os.SEEK_SET) and not self.taken:
            return 0
        raise io.UnsupportedOperation("an archive is read once, from its beginning")

    def _take(self) -> bytes:
        """Return the next piece that is not empty, or b"" at the end of a whole archive. Raises `_Stopped`."""
        if self.cause is not None:
            raise _Stopped from self.cause
        if self.is_whole:
            return b""
        if threading.get_ident() != self._thread:
            why = "the storage reads in threads of its own; configure it not to"
            raise self._stop(StorageFailed(why))
        try:
            piece = next((piece for piece in self._pieces if piece), b"")
            if self.taken + len(piece) > self._limit:
                raise TooLarge(f"the workspace is larger than {self._limit} bytes")  # noqa: TRY301 - as the pieces' own
            if piece:
                self._tar.feed(piece)
            else:
                self._tar.end()
                self.is_whole = True
        except BaseException as error:  # raised by `write`, whatever the storage makes of it
            raise self._stop(error) from error
        self.taken += len(piece)
        self._hash.update(piece)
        return piece

    def _stop(self, cause: BaseException) -> _Stopped:
        self.cause = cause
        return _Stopped()


def _require_free(where: Storage, name: str) -> None:
    """Refuse a name that is taken: what is there is another's, and is not to be removed when this one fails."""
    if _has(where, name):
        raise StorageFailed("the storage has a file of this name already")


def _has(where: Storage, name: str) -> bool:
    try:
        return where.exists(name)
    except Exception as error:
        raise StorageFailed(f"the storage of archives could not be asked: {_told(error)}") from error


def _save(where: Storage, name: str, stream: _Incoming) -> Saved:
    try:
        given = where.save(name, cast("IO[Any]", stream))
        stream.given = given
        _sync(where, given)
        kept = where.size(given)
    except Exception as error:
        if stream.cause is not None:
            raise stream.cause from None
        raise StorageFailed(f"the archive could not be written: {_told(error)}") from error
    if stream.cause is not None:  # the storage made light of it
        raise stream.cause
    if given != name:
        raise StorageFailed(f"the storage gave the archive another name than {name}")
    if not stream.is_whole or kept != stream.taken:
        raise StorageFailed(f"the storage kept {kept} bytes, and {stream.taken} were sent")
    return stream.saved()


def _sync(where: Storage, name: str) -> None:
    """Have a file on disk, with the directories that lead to it, where the storage is a directory."""
    try:
        path, root = where.path(name), where.path("")
    except NotImplementedError:
        return
    if not os.path.isfile(path):  # noqa: PTH113 - what a storage that keeps no files calls a path
        return
    _sync_path(path)
    while path != root and len(path) > len(root):
        path = os.path.dirname(path)  # noqa: PTH120 - paths are the storage's text
        _sync_path(path)


def _sync_path(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_half(where: Storage, name: str) -> None:
    """Remove what was half-written. Where that fails too, its row, which is not whole, has it removed later."""
    try:
        where.delete(name)
    except FileNotFoundError:
        return
    except Exception as error:  # noqa: BLE001 - the error that led here is the one to tell
        log.warning("the half-written archive %s could not be removed now: %s", name, _told(error))


def _told(error: Exception) -> str:
    """Return what an error says without its text, in which a storage may put addresses and keys."""
    if isinstance(error, OSError) and error.errno:
        return f"{os.strerror(error.errno)} ({type(error).__name__})"
    return type(error).__name__


class _Verified(io.RawIOBase):
    """A file of the storage: every byte is counted and hashed, and the last ones come only if all was right."""

    def __init__(self, file: IO[bytes], saved: Saved) -> None:
        super().__init__()
        self._file = file
        self._saved = saved
        self._seen = 0
        self._hash = hashlib.sha256()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self._seen == self._saved.size:
            return 0  # verified before the last byte was handed out
        piece = self._read(len(buffer))
        if not piece:
            raise ArchiveDamaged(f"the archive is {self._saved.size} bytes, and the storage has {self._seen}")
        self._seen += len(piece)
        self._hash.update(piece)
        if self._seen >= self._saved.size:
            self._verify()
        buffer[: len(piece)] = piece
        return len(piece)

    def _verify(self) -> None:
        if self._seen > self._saved.size or self._read(1):
            raise ArchiveDamaged(f"the archive is {self._saved.size} bytes, and the storage has more")
        if self._hash.hexdigest() != self._saved.sha256:
            raise ArchiveDamaged("the archive is not what was saved: its checksum is another one")

    def _read(self, size: int) -> bytes:
        try:
            return self._file.read(size)
        except Exception as error:
            raise StorageFailed(f"the archive could not be read: {_told(error)}") from error
