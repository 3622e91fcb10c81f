"""Archives over a service that fails in the middle: nothing that was cut passes for whole, and nothing stays behind."""

from __future__ import annotations

import io
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from providers.contract import MARK_INSTALLATION, Command, ErrorKind
from providers.daytona import packing
from providers.registry import AnyProvider, load, open_provider, validate
from providers.rehearsing import Fault, Kind, Rehearsal, rehearsal, running
from tests.providers.rehearsed import KEY, executing, refused

WITHIN = 20.0
MARKS = {MARK_INSTALLATION: "archive-tests"}


class Rehearsed:
    """One sandbox of a rehearsed service, with files in it."""

    def __init__(self, server: Rehearsal[Any], provider: AnyProvider, config: dict[str, Any]) -> None:
        self.server = server
        self.provider = provider
        wanted = validate(load(server.key).Config, config)
        self.id = provider.create("box", MARKS, wanted, within=WITHIN).resource.resource_id
        self.run("mkdir -p work && head -c 3000000 /dev/urandom >work/large && echo saved >work/note")

    def run(self, script: str) -> bytes:
        done = self.provider.execute(self.id, Command(("sh", "-c", script), timeout=WITHIN / 2), within=WITHIN)
        assert done.exit_code == 0, done
        return done.stdout

    def archive(self, within: float = WITHIN) -> bytes:
        with closing(self.provider.archive(self.id, "work", within=within)) as pieces:
            return b"".join(pieces)

    def left(self) -> list[str]:
        """Return what is left of an archive: processes that pack, and what lies in the temporary directory."""
        home: Path = self.server.world.boxes[self.id].machine.home
        packing = [pid for pid in self.server.world.executing(self.id) if pid in executing("tar -cf - .")]
        return [*(str(pid) for pid in packing), *(str(path) for path in (home / ".tmp").iterdir())]

    def is_clean(self, within: float = 5.0) -> bool:
        until = time.monotonic() + within
        while self.left() and time.monotonic() < until:
            time.sleep(0.05)
        return not self.left()


@pytest.fixture(params=["daytona", "e2b"])
def service(request: pytest.FixtureRequest) -> Iterator[Callable[..., Rehearsed]]:
    with running(rehearsal(request.param), transition=0.0) as server:
        server.world.add_key(KEY)
        endpoint = {"url": server.url} | ({"sandbox_url": server.url} if request.param == "e2b" else {})
        provider = open_provider(request.param, endpoint, KEY)

        def made(**config: Any) -> Rehearsed:
            sandbox = Rehearsed(server, provider, config)
            server.asked.clear()
            return sandbox

        yield made


@pytest.fixture
def box(service: Callable[..., Rehearsed]) -> Rehearsed:
    return service()


def names(packed: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        return tar.getnames()


def stand_in(tmp_path: Path, script: str) -> dict[str, str]:
    """Return variables with which the sandbox finds this script in the place of tar."""
    program = tmp_path / "tar"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return {"PATH": f"{tmp_path}:/usr/bin:/bin"}


@pytest.mark.parametrize("kind", [Kind.CUT, Kind.LOST, Kind.RESET])
def test_a_connection_that_ends_in_the_middle_is_an_error(box: Rehearsed, kind: Kind) -> None:
    box.server.will(Fault("execute", kind))
    assert refused(box.archive).kind in {ErrorKind.CONNECTION, ErrorKind.PROTOCOL}
    assert box.run("cat work/note") == b"saved\n"
    assert "./note" in names(box.archive())


def test_a_piece_that_is_lost_is_an_error_and_what_was_begun_is_ended(box: Rehearsed) -> None:
    pieces = box.provider.archive(box.id, "work", within=WITHIN)
    if box.server.key == "e2b":
        pytest.skip("it asks once")
    original = packing._run
    asked = []

    def lose(*arguments: Any) -> str:
        asked.append(arguments)
        if len(asked) == 2:
            box.server.will(Fault("execute", Kind.CUT))
        return original(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "_run", lose)
        assert refused(lambda: list(pieces)).kind in {ErrorKind.CONNECTION, ErrorKind.PROTOCOL}
    assert box.is_clean()


def test_a_tar_that_could_not_read_all_is_an_error(service: Callable[..., Rehearsed], tmp_path: Path) -> None:
    script = '/usr/bin/tar "$@"; echo "tar: ./secret: Cannot open: Permission denied" >&2; exit 2'
    box = service(env=stand_in(tmp_path, script))
    error = refused(box.archive)
    assert error.kind is ErrorKind.REFUSED
    assert "Permission denied" in error.excerpt
    assert box.is_clean()


def test_a_tar_that_dies_in_the_middle_is_an_error(service: Callable[..., Rehearsed], tmp_path: Path) -> None:
    box = service(env=stand_in(tmp_path, '/usr/bin/tar "$@" | head -c 100000; kill -9 $$'))
    assert refused(box.archive).kind is ErrorKind.REFUSED
    assert box.is_clean()


def test_a_tar_that_lies_about_its_end_is_an_error(service: Callable[..., Rehearsed], tmp_path: Path) -> None:
    box = service(env=stand_in(tmp_path, '/usr/bin/tar "$@" | head -c 100000; exit 0'))
    assert refused(box.archive).kind is ErrorKind.CONNECTION
    assert box.is_clean()


def test_a_tar_that_found_no_room_is_a_full_disk(service: Callable[..., Rehearsed], tmp_path: Path) -> None:
    box = service(env=stand_in(tmp_path, 'echo "tar: write error: No space left on device" >&2; exit 2'))
    assert refused(box.archive).kind is ErrorKind.DISK_FULL
    assert box.is_clean()


def test_a_file_that_changes_while_it_is_read_is_no_error(service: Callable[..., Rehearsed], tmp_path: Path) -> None:
    """What GNU tar's 1 says. Any other tar's 1 says that something is missing."""
    changing = 'if [ "$1" = --version ]; then echo "tar (GNU tar) 1.34"; exit; fi; /usr/bin/tar "$@"; exit 1'
    assert "./note" in names(service(env=stand_in(tmp_path, changing)).archive())


def test_another_tars_1_is_an_error(service: Callable[..., Rehearsed], tmp_path: Path) -> None:
    other = 'if [ "$1" = --version ]; then echo "tar (busybox) 1.35"; exit; fi; /usr/bin/tar "$@"; exit 1'
    assert refused(service(env=stand_in(tmp_path, other)).archive).kind is ErrorKind.REFUSED


def test_an_image_without_tar_is_told(service: Callable[..., Rehearsed], tmp_path: Path) -> None:
    error = refused(service(env=stand_in(tmp_path, "exit 127")).archive)
    assert error.kind is ErrorKind.REFUSED
    assert "tar" in error.excerpt


def test_a_tar_that_hangs_is_bounded_and_ended_in_the_sandbox_too(
    service: Callable[..., Rehearsed], tmp_path: Path
) -> None:
    box = service(env=stand_in(tmp_path, "sleep 3000"))
    started = time.monotonic()
    assert refused(lambda: box.archive(within=2.0)).kind is ErrorKind.TIMEOUT
    assert time.monotonic() - started < 3.0
    assert box.is_clean(10.0)


def test_several_pieces_make_one_archive(box: Rehearsed, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than one piece of Daytona's, with the end at every place in its last one."""
    monkeypatch.setattr(packing, "_PIECE", 1 << 16)
    for size in (1, 60_000, 64_000, 65_000, 130_000, 300_000):
        box.run(f"head -c {size} /dev/urandom >work/large")
        with tarfile.open(fileobj=io.BytesIO(box.archive())) as tar:
            assert tar.getmember("./large").size == size
    assert box.is_clean()


def test_two_archives_at_once_do_not_disturb_each_other(box: Rehearsed) -> None:
    first = box.provider.archive(box.id, "work", within=WITHIN)
    second: list[bytes] = []
    with closing(first):
        begun = next(first)
        other = threading.Thread(target=lambda: second.append(box.archive()))
        other.start()
        other.join(WITHIN)
        whole = begun + b"".join(first)
    assert whole == second[0]


def test_a_service_that_finds_no_room_says_that_the_disk_is_full(box: Rehearsed) -> None:
    if box.server.key == "e2b":
        pytest.skip("its agent says so to an upload only")
    box.server.will(Fault("execute", Kind.DISK_FULL))
    assert refused(box.archive).kind is ErrorKind.DISK_FULL
