"""Disks that really are full: small file systems in memory, and a container engine that has to live on one.

Nothing here can fill the machine's own disk: what is filled is first seen to be another file system, and a small one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from itertools import count
from pathlib import Path

from providers.conformance import AnyProvider
from providers.contract import Command, ErrorKind, ProviderError
from tests import engine
from tests.engine import PrivateEngine, short_directory

MEGABYTES = 32
_LARGEST = 256 << 20
_GIVEN_BACK = 1 << 16
"""Bytes that an engine has again when a command ended: less than a start needs, or not."""
_QUIET = 0.3
_PATIENCE = 30.0
_FILES = 8192


@cache
def unavailable() -> str | None:
    """Say why there can be no small file system here, or None when there can."""
    if os.geteuid() != 0:
        return "mounting a small file system needs root"
    with tempfile.TemporaryDirectory(prefix="pe-") as directory:
        mounted = _mount(Path(directory), 1)
        if mounted.returncode != 0:
            return f"no file system can be mounted here: {mounted.stderr.strip()}"
        _unmount(Path(directory))
    return None


@cache
def no_engine() -> str | None:
    """Say why there can be no engine on a small file system here, or None when there can."""
    return engine.available() or unavailable()


class SmallDisk:
    """A file system of a few megabytes, mounted at `place`."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self._ballast = place / ".ballast"
        self._numbers = count()

    def fill(self) -> None:
        """Take all the room that is left, from outside of any sandbox, and what others give back for a moment yet.

        An engine tidies up behind a container that was stopped, in a process of its own.
        """
        self.check()
        give_up, full_since = time.monotonic() + _PATIENCE, time.monotonic()
        while time.monotonic() - full_since < _QUIET:
            if self.room() or self._files() or self._tidying():
                self._take()
                full_since = time.monotonic()
            assert time.monotonic() < give_up, f"{self.room()} bytes of room come back again and again"
            time.sleep(0.01)

    def make_room(self) -> None:
        """Give back what `fill` took: the operator who frees the disk."""
        shutil.rmtree(self._ballast, ignore_errors=True)

    def _take(self) -> None:
        """Take the bytes, and the files too: who replaces a file by one of its size needs a file, and no bytes."""
        with suppress(OSError):
            self._ballast.mkdir(exist_ok=True)
            while True:
                (self._ballast / f"{next(self._numbers)}").touch()
        with suppress(OSError), next(self._ballast.iterdir()).open("ab", buffering=0) as bytes_:
            for size in (1 << 16, 1):
                with suppress(OSError):
                    while bytes_.write(bytes(size)):
                        pass

    def _tidying(self) -> bool:
        """Say whether a process of an engine whose storage this is tidies up behind a container."""
        below = f"{self.place}/".encode()
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                with suppress(OSError):
                    arguments = (entry / "cmdline").read_bytes().split(b"\0")
                    ours = any(below in argument for argument in arguments)
                    if ours and arguments[0].endswith(b"podman") and b"cleanup" in arguments:
                        return True
        return False

    def room(self) -> int:
        """Return how many bytes may still be written."""
        seen = os.statvfs(self.place)
        return seen.f_bavail * seen.f_frsize

    def _files(self) -> int:
        return os.statvfs(self.place).f_ffree

    def check(self) -> None:
        """Fail where this is not what it is taken for: then filling it would fill the machine's own disk."""
        seen, above = os.statvfs(self.place), self.place.parent.stat().st_dev
        assert self.place.stat().st_dev != above, "not a file system of its own"
        assert seen.f_frsize * seen.f_blocks <= _LARGEST, "not a small file system"


@contextmanager
def small_disk(place: Path, *, megabytes: int = MEGABYTES) -> Iterator[SmallDisk]:
    """Mount a small file system on a directory, and take it away at the end. Ask `unavailable` first."""
    place.mkdir(parents=True, exist_ok=True)
    _mount(place, megabytes).check_returncode()
    try:
        yield SmallDisk(place)
    finally:
        _unmount(place)


@contextmanager
def small_engine(*, megabytes: int = MEGABYTES) -> Iterator[tuple[PrivateEngine, SmallDisk]]:
    """Run a container engine whose disk (images, containers, its own notes) has so little room. Ask `no_engine` first.

    Its sandboxes share that room, as those of an engine without quotas do.
    """
    with (
        short_directory() as directory,
        small_disk(directory / "d", megabytes=megabytes) as disk,
        PrivateEngine(disk.place / "engine") as private,
    ):
        yield private, disk


def fill_from_inside(
    provider: AnyProvider, resource_id: str, disk: SmallDisk, file: str = "fill", *, within: float = 30.0
) -> None:
    """Have a running sandbox on a small disk write until that has no room left.

    Stopping it gives some of that back, for what the engine noted about its run: `SmallDisk.fill` takes it. The file is
    relative to the directory in which commands start.
    """
    disk.check()
    script = f'head -c {_LARGEST} /dev/zero >>"$1"; exit 0'  # bounded all the same
    try:
        provider.execute(resource_id, Command(("sh", "-c", script, "sh", file), timeout=within / 2), within=within)
    except ProviderError as error:
        # An engine notes how a command ended on the disk that the command has just filled.
        if error.kind not in {ErrorKind.PROTOCOL, ErrorKind.DISK_FULL}:
            raise
    assert disk.room() < _GIVEN_BACK, f"it left {disk.room()} bytes of room"


def _mount(place: Path, megabytes: int) -> subprocess.CompletedProcess[str]:
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m,nr_inodes={_FILES},mode=0700", "tmpfs", str(place)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _unmount(place: Path) -> None:
    # Lazily: whoever ends last lets go of it. An engine that was removed has taken its mounts along.
    command = ["umount", "-l", str(place)]
    subprocess.run(command, capture_output=True, check=False)
