"""The state directory: how a sandbox stands on disk, and who may change it.

    sandboxes/NAME/   a sandbox; appears and disappears by one rename
        sandbox.json  resource id, marks, configuration: never changes
        lock          flock: exclusive for whoever changes the sandbox, shared for whoever answers about it
        run.json ...  see `records`
        files/        what is the sandbox's own
    staging/          sandboxes that are being made; nothing of them runs yet
    trash/ID/         sandboxes that are being removed; nothing of them runs any more

The rename into `sandboxes` is what makes a name unique: it fails where a sandbox of that name stands. A resource id is
`NAME.` and 128 random bits, so that it leads to its directory and to none of an earlier or later incarnation.
"""

# Descriptors and /proc are not for pathlib, which would also slow the start of the supervisor down.
# ruff: noqa: PTH103, PTH123, PTH208

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from providers.contract import ErrorKind, ProviderError, Resource, is_name, require_name
from providers.local import identity, records, removal
from providers.local.deadline import Deadline

LOCK = "lock"
_ID = re.compile(r"([a-z0-9-]{1,63})\.[0-9a-f]{32}")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
_LOCK_PAUSE = 0.01
_ABANDONED = 3600.0


class Sandbox:
    """An open sandbox directory. It stays the same one when it is renamed, and outlives its name."""

    def __init__(self, directory: int, record: dict[str, Any]) -> None:
        self.directory = directory
        self.resource = Resource(record["resource_id"], record["name"], dict(record["marks"]))
        self.config: dict[str, Any] = record["config"]
        self.lock: int | None = None

    def path(self, name: str) -> str:
        """Return a short path to an entry, whatever the length of the state directory's own."""
        return f"/proc/self/fd/{self.directory}/{name}"

    def close(self) -> None:
        self.unlock()
        os.close(self.directory)

    def unlock(self) -> None:
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None

    def holder(self) -> str:
        """Return what the latest exclusive holder of the lock said it was doing."""
        with suppress(OSError), open(self.path(LOCK), encoding="ascii") as file:
            return file.read(40)
        return ""

    def acquire(self, doing: str | None, *, until: float) -> bool:
        """Lock the sandbox, exclusively when `doing` something to it; False when others held it until then."""
        mode = fcntl.LOCK_SH if doing is None else fcntl.LOCK_EX
        handle = os.open(LOCK, os.O_RDWR | os.O_CLOEXEC, dir_fd=self.directory)
        try:
            while not _try_lock(handle, mode):
                if time.monotonic() >= until:
                    os.close(handle)
                    return False
                time.sleep(_LOCK_PAUSE)
            if doing is not None:
                os.truncate(handle, 0)
                try:
                    os.pwrite(handle, doing.encode("ascii"), 0)
                except OSError as error:
                    if not records.is_full(error):  # for people only, and a full disk must not keep a stop from it
                        raise
        except OSError:
            os.close(handle)
            raise
        self.lock = handle
        return True


def _try_lock(handle: int, mode: int) -> bool:
    try:
        fcntl.flock(handle, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class StateDirectory:
    """An open state directory whose identity was read."""

    def __init__(self, path: str) -> None:
        with suppress(FileExistsError):
            os.makedirs(path, mode=0o700)
        self._state = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.identity = identity.of(self._state)
        except BaseException:
            os.close(self._state)
            raise

    def close(self) -> None:
        os.close(self._state)

    # Reading.

    def by_name(self, name: str) -> Sandbox | None:
        """Open the sandbox of this name."""
        if not is_name(name):
            return None
        return self._open(identity.SANDBOXES, name)

    def by_id(self, resource_id: str) -> Sandbox | None:
        """Open exactly this sandbox, unless it is absent or only waits for its removal."""
        match = _ID.fullmatch(resource_id)
        sandbox = self.by_name(match[1]) if match else None
        if sandbox is not None and sandbox.resource.resource_id != resource_id:
            sandbox.close()
            return None
        return sandbox

    def in_trash(self, resource_id: str) -> bool:
        """Say whether files of this sandbox still wait for their removal."""
        return _ID.fullmatch(resource_id) is not None and _exists(self._state, f"{identity.TRASH}/{resource_id}")

    def resources(self) -> Iterator[Resource]:
        """Yield every sandbox, and those whose removal was interrupted."""
        # In this order: what moves to the trash meanwhile is met there.
        seen = set()
        for part in (identity.SANDBOXES, identity.TRASH):
            for entry in self._entries(part):
                sandbox = self._open(part, entry)
                if sandbox is not None:
                    sandbox.close()
                    if sandbox.resource.resource_id not in seen:
                        seen.add(sandbox.resource.resource_id)
                        yield sandbox.resource

    def _entries(self, part: str) -> list[str]:
        try:
            handle = os.open(part, _DIRECTORY, dir_fd=self._state)
        except FileNotFoundError:
            return []
        try:
            return sorted(os.listdir(handle))
        finally:
            os.close(handle)

    def _open(self, part: str, entry: str) -> Sandbox | None:
        try:
            directory = os.open(f"{part}/{entry}", _DIRECTORY, dir_fd=self._state)
        except FileNotFoundError:
            return None
        try:
            record = records.read(directory, records.SANDBOX)
            if record is None and part == identity.SANDBOXES and self._stands(directory, entry):
                raise ValueError("it has lost its record")  # noqa: TRY301
            if record is not None:
                return Sandbox(directory, record)
        except (ValueError, KeyError, TypeError) as error:
            os.close(directory)
            raise ProviderError(ErrorKind.PROTOCOL, f"the sandbox {entry} is damaged on disk: {error}") from None
        except BaseException:
            os.close(directory)
            raise
        os.close(directory)
        return None

    def stands(self, sandbox: Sandbox) -> bool:
        """Say whether an open sandbox still has its name, so that nobody has discarded it meanwhile."""
        return self._stands(sandbox.directory, sandbox.resource.name)

    def _stands(self, directory: int, name: str) -> bool:
        try:
            there = os.stat(f"{identity.SANDBOXES}/{name}", dir_fd=self._state, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(there, os.fstat(directory))

    # Changing.

    @contextmanager
    def new(
        self, name: str, marks: Mapping[str, str], config: Mapping[str, Any], deadline: Deadline
    ) -> Iterator[Sandbox]:
        """Make the sandbox of this name, locked by the caller from its first instant; it runs nothing yet.

        Raises `NAME_TAKEN` and `INVALID`, and for a disk that is full or broken `SERVER`; nothing is allocated then.
        """
        require_name(name)
        record = {
            "resource_id": f"{name}.{secrets.token_hex(16)}",
            "name": name,
            "marks": dict(marks),
            "config": dict(config),
        }
        try:
            self._clear_staging()
            sandbox = self._stage(record, deadline)
        except OSError as error:
            raise ProviderError(ErrorKind.SERVER, error, nothing_allocated=True) from None
        try:
            yield sandbox
        finally:
            sandbox.close()

    def _stage(self, record: dict[str, Any], deadline: Deadline) -> Sandbox:
        part = f"{identity.STAGING}/{secrets.token_hex(8)}"
        target = f"{identity.SANDBOXES}/{record['name']}"
        for parent in (identity.STAGING, identity.SANDBOXES, identity.TRASH):
            with suppress(FileExistsError):
                os.mkdir(parent, 0o700, dir_fd=self._state)
                os.fsync(self._state)
        os.mkdir(part, 0o700, dir_fd=self._state)
        sandbox = Sandbox(os.open(part, _DIRECTORY, dir_fd=self._state), record)
        try:
            os.mkdir(records.FILES, 0o700, dir_fd=sandbox.directory)
            os.close(os.open(LOCK, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=sandbox.directory))
            sandbox.acquire("creating", until=0.0)
            records.write(sandbox.directory, records.SANDBOX, record)
            if deadline.passed:
                raise TimeoutError
            # The directory is never empty, so this cannot replace another sandbox, running or not.
            os.rename(part, target, src_dir_fd=self._state, dst_dir_fd=self._state)
        except OSError as error:
            sandbox.close()
            removal.remove(self._state, part, Deadline(60.0))
            if error.errno in {errno.ENOTEMPTY, errno.EEXIST}:
                raise ProviderError(
                    ErrorKind.NAME_TAKEN, f"a sandbox named {record['name']} exists", nothing_allocated=True
                ) from None
            raise
        try:
            self._sync(identity.SANDBOXES)
        except OSError as error:
            sandbox.close()
            # It has its name by now, and is found by it.
            raise ProviderError(ErrorKind.SERVER, error) from None
        return sandbox

    def _clear_staging(self) -> None:
        """Remove what creators left behind that died before their sandbox had a name."""
        for entry in self._entries(identity.STAGING):
            part = f"{identity.STAGING}/{entry}"
            with suppress(OSError, ProviderError):
                if time.time() - os.stat(part, dir_fd=self._state).st_mtime > _ABANDONED:
                    removal.remove(self._state, part, Deadline(5.0))

    def discard(self, sandbox: Sandbox) -> None:
        """Free the name of a locked sandbox that runs nothing: it moves to the trash as a whole."""
        os.rename(
            f"{identity.SANDBOXES}/{sandbox.resource.name}",
            f"{identity.TRASH}/{sandbox.resource.resource_id}",
            src_dir_fd=self._state,
            dst_dir_fd=self._state,
        )
        self._sync(identity.SANDBOXES)
        self._sync(identity.TRASH)

    def empty_trash(self, resource_id: str, deadline: Deadline) -> None:
        """Remove the files of a discarded sandbox. Safe to repeat, and to do from several processes at once."""
        if _ID.fullmatch(resource_id):  # anything else could lead out of the trash
            removal.remove(self._state, f"{identity.TRASH}/{resource_id}", deadline, last=records.SANDBOX)

    def _sync(self, part: str) -> None:
        handle = os.open(part, _DIRECTORY, dir_fd=self._state)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _exists(directory: int, path: str) -> bool:
    try:
        os.stat(path, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True
