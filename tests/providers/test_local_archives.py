"""Archives of local sandboxes, whose processes may be hostile: nothing is read that is not the sandbox's own."""

from __future__ import annotations

import io
import os
import socket
import tarfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from providers.contract import ErrorKind
from providers.local import archiving
from tests.providers.local_harness import WITHIN, Local
from tests.providers.rehearsed import refused

SECRET = b"this is not the sandbox's"


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Local]:
    made = Local(tmp_path / "state")
    yield made
    made.close()


@pytest.fixture
def box(local: Local) -> str:
    return local.create().resource_id


@pytest.fixture
def files(local: Local, box: str) -> Path:
    return local.directory() / "files"


def archived(local: Local, box: str, path: str = ".") -> bytes:
    with closing(local.provider.archive(box, path, within=WITHIN)) as pieces:
        return b"".join(pieces)


def members(packed: bytes) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        return {member.name: member for member in tar}


def test_no_link_is_followed_out_of_a_sandbox(local: Local, box: str, files: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(SECRET)
    (files / "directory").symlink_to(outside)
    (files / "file").symlink_to(outside / "secret")
    (files / "own").symlink_to("../sandbox.json")
    packed = archived(local, box)
    assert SECRET not in packed
    assert {name for name, member in members(packed).items() if member.issym()} == {"./directory", "./file", "./own"}
    # Nor where the path leads over one, or out by itself.
    for path in ("directory", "directory/.", "file"):
        assert refused(lambda path=path: archived(local, box, path)).kind is ErrorKind.MISSING_PATH
    for path in ("../..", "a/../../..", str(outside)):
        assert refused(lambda path=path: archived(local, box, path)).kind is ErrorKind.INVALID


@pytest.mark.parametrize("replaced", ["directory", "file"])
def test_a_link_that_takes_a_files_place_at_the_last_moment_is_not_followed(
    local: Local, box: str, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replaced: str
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(SECRET)
    (files / "directory").mkdir()
    (files / "file").write_text("mine")
    opened = os.open

    def swapped(path: str, flags: int, *args: int, **options: int) -> int:
        if path == replaced and flags in {archiving._DIRECTORY, archiving._FILE}:
            (files / replaced).rename(files / "aside")
            (files / replaced).symlink_to(outside if replaced == "directory" else outside / "secret")
        return opened(path, flags, *args, **options)

    monkeypatch.setattr(archiving.os, "open", swapped)
    packed = archived(local, box)
    monkeypatch.undo()
    assert (files / replaced).is_symlink()
    assert SECRET not in packed
    assert f"./{replaced}" not in members(packed)


def test_what_is_no_file_is_left_out_and_nobody_waits_for_it(local: Local, box: str, files: Path) -> None:
    os.mkfifo(files / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        directory = os.open(files, os.O_RDONLY)
        listener.bind(f"/proc/self/fd/{directory}/socket")
        os.close(directory)
    if os.geteuid() == 0:
        os.mknod(files / "device", 0o600 | 0o020000, os.makedev(1, 5))  # /dev/zero has no end
    (files / "note").write_text("saved")
    started = time.monotonic()
    assert set(members(archived(local, box))) == {".", "./note"}
    assert time.monotonic() - started < 5


def test_files_that_change_their_length_while_they_are_read_make_no_crooked_archive(
    local: Local, box: str, files: Path
) -> None:
    shorter, longer, last = files / "a-shorter", files / "b-longer", files / "c-last"
    shorter.write_bytes(b"s" * 2_000_000)
    longer.write_bytes(b"l" * 1000)
    last.write_text("last")
    pieces = local.provider.archive(box, ".", within=WITHIN)
    with closing(pieces):
        packed = next(pieces)
        while b"./a-shorter" not in packed:
            packed += next(pieces)
        shorter.write_bytes(b"")
        packed += next(pieces)
        longer.write_bytes(b"L" * 5000)
        packed += b"".join(pieces)
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        assert tar.getmember("./a-shorter").size == 2_000_000
        read = tar.extractfile("./c-last")
        assert read is not None
        assert read.read() == b"last"


def test_files_that_come_and_go_do_not_break_an_archive(local: Local, box: str, files: Path) -> None:
    (files / "note").write_text("saved")
    ends = threading.Event()

    def churn() -> None:
        number = 0
        while not ends.is_set():
            number += 1
            name = files / f"d{number % 7}"
            if name.is_dir():
                (name / "file").unlink(missing_ok=True)
                name.rmdir()
            else:
                name.mkdir()
                (name / "file").write_bytes(os.urandom(number % 5000))

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(50):
            assert "./note" in members(archived(local, box))
    finally:
        ends.set()
        thread.join()


def test_names_of_any_bytes_come_back(local: Local, box: str, files: Path) -> None:
    name = b"\xff\xfe caf\xc3\xa9 \n" + b"x" * 200
    with (Path(os.fsencode(files).decode()) / os.fsdecode(name)).open("wb") as file:
        file.write(b"saved")
    packed = archived(local, box)
    with tarfile.open(fileobj=io.BytesIO(packed), errors="surrogateescape") as tar:
        assert f"./{os.fsdecode(name)}" in tar.getnames()


def test_a_sandbox_that_is_deleted_in_the_middle_has_no_archive(local: Local, box: str, files: Path) -> None:
    for number in range(200):
        (files / f"{number:03d}").write_bytes(b"x" * 1000)
    pieces = local.provider.archive(box, ".", within=WITHIN)
    with closing(pieces):
        next(pieces)
        local.provider.delete(box, within=WITHIN)
        assert refused(lambda: list(pieces)).kind is ErrorKind.NOT_FOUND


def test_a_stop_does_not_wait_for_a_reader_and_does_not_break_it(local: Local, box: str, files: Path) -> None:
    for number in range(50):
        (files / f"{number:03d}").write_bytes(b"x" * 1000)
    pieces = local.provider.archive(box, ".", within=WITHIN)
    with closing(pieces):
        packed = next(pieces)
        local.provider.stop(box, grace=0.2, within=WITHIN)
        packed += b"".join(pieces)
    assert len(members(packed)) == 51


def test_directories_without_end_are_refused(local: Local, box: str, files: Path) -> None:
    deep = files
    for _ in range(250):
        deep /= "d"
        deep.mkdir()
    error = refused(lambda: archived(local, box))
    assert error.kind is ErrorKind.REFUSED
    assert "nested" in error.excerpt


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_that_may_not_be_read_is_an_error_and_not_left_out(local: Local, box: str, files: Path) -> None:
    (files / "note").write_text("saved")
    (files / "note").chmod(0)
    assert refused(lambda: archived(local, box)).kind is ErrorKind.REFUSED


def test_no_descriptor_stays_open(local: Local, box: str, files: Path) -> None:
    (files / "a" / "b").mkdir(parents=True)
    (files / "a" / "b" / "note").write_text("saved")
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    archived(local, box)
    for reads in range(1, 6):
        pieces = local.provider.archive(box, ".", within=WITHIN)
        for _ in range(reads):
            next(pieces)
        pieces.close()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
