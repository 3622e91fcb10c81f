"""Archives of containers at engines that fail: what was cut passes for whole nowhere, however well HTTP ends."""

from __future__ import annotations

import base64
import io
import json
import tarfile
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from providers.contract import ErrorKind, ProviderError
from tests.providers.fake_engine import CONTAINER, Answer, FakeEngine, fake_engine

WITHIN = 20.0


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with fake_engine() as engine:
        yield engine


STAT = base64.b64encode(json.dumps({"name": ".", "mode": 0o755 | 1 << 31}).encode()).decode()
OF_A_FILE = base64.b64encode(json.dumps({"name": ".", "mode": 0o644}).encode()).decode()
ARCHIVE = r"GET /containers/\w+/archive"


def tar_of(**files: bytes) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(f"./{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return packed.getvalue()


def chunked(*pieces: bytes, stat: str = STAT, ends: bool = True) -> Answer:
    head = f"HTTP/1.1 200 OK\r\nX-Docker-Container-Path-Stat: {stat}\r\nTransfer-Encoding: chunked\r\n\r\n"
    body = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    return Answer(raw=head.encode() + body + (b"0\r\n\r\n" if ends else b""), then_close=True)


def described(workdir: str = "/work", status: str = "running") -> dict[str, Any]:
    state = {"Status": status, "Running": status == "running", "Pid": 12 if status == "running" else 0}
    config = {"Labels": {}, "WorkingDir": workdir}
    return {"Id": CONTAINER, "Name": "/box", "State": state, "Config": config, "HostConfig": {"PidMode": ""}}


def archived(engine: FakeEngine, answer: Answer, path: str = ".", *, workdir: str = "/work") -> bytes:
    engine.answers(r"GET /containers/\w+/json", Answer(200, described(workdir)))
    engine.answers(ARCHIVE, answer)
    return b"".join(engine.provider.archive(CONTAINER, path, within=WITHIN))


def unarchived(engine: FakeEngine, answer: Answer, path: str = ".", *, workdir: str = "/work") -> ErrorKind:
    with pytest.raises(ProviderError) as caught:
        archived(engine, answer, path, workdir=workdir)
    return caught.value.kind


@pytest.mark.parametrize(
    ("path", "workdir", "asked"),
    [
        (".", "/work", "/work/."),
        ("sub", "/work", "/work/sub/."),
        ("/elsewhere/", "/work", "/elsewhere/."),
        ("./a/./b", "", "/a/b/."),
    ],
)
def test_a_directory_is_asked_for_so_that_names_are_relative_to_it(
    engine: FakeEngine, path: str, workdir: str, asked: str
) -> None:
    packed = tar_of(note=b"saved")
    assert archived(engine, chunked(packed[:700], packed[700:]), path, workdir=workdir) == packed
    assert parse_qs(urlsplit(engine.requests[-1].path).query)["path"] == [asked]
    assert "accept-encoding: identity" in engine.requests[-1].head.lower()


@pytest.mark.parametrize("workdir", ["", "/"])
def test_an_image_without_a_working_directory_has_no_workspace(engine: FakeEngine, workdir: str) -> None:
    assert unarchived(engine, chunked(tar_of()), workdir=workdir) is ErrorKind.MISSING_PATH
    assert not any("archive" in asked for asked in engine.asked)


def test_an_archive_whose_answer_ends_well_and_whose_tar_does_not_is_an_error(engine: FakeEngine) -> None:
    """What engines do where reading failed in the middle: the head went out long ago, and HTTP ends as it should."""
    packed = tar_of(large=b"x" * 100_000, note=b"saved")
    for cut in (0, 100, 512, 50_000, 100_864, 102_400):
        assert unarchived(engine, chunked(packed[:cut])) is ErrorKind.CONNECTION, cut


def test_an_archive_whose_answer_breaks_off_is_an_error(engine: FakeEngine) -> None:
    packed = tar_of(large=b"x" * 100_000)
    assert unarchived(engine, chunked(packed[:50_000], ends=False)) is ErrorKind.CONNECTION
    assert unarchived(engine, chunked(packed, ends=False)) is ErrorKind.CONNECTION


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        # Docker's words, and podman's.
        (Answer(404, {"message": "Could not find the file /work/. in container cccc"}), ErrorKind.MISSING_PATH),
        (Answer(404, {"message": "no such file or directory"}), ErrorKind.MISSING_PATH),
        (Answer(400, {"message": "lstat /work/a/.: not a directory"}), ErrorKind.MISSING_PATH),
        (chunked(tar_of(file=b"x"), stat=OF_A_FILE), ErrorKind.MISSING_PATH),
        (Answer(404, {"message": f"No such container: {CONTAINER}"}), ErrorKind.NOT_FOUND),
        (Answer(404, {"message": "page not found"}), ErrorKind.PROTOCOL),
        (Answer(500, {"message": "mkdir /x/merged: no space left on device"}), ErrorKind.DISK_FULL),
        (Answer(500, {"message": "database is locked"}), ErrorKind.SERVER),
        (chunked(b"<html>" * 1000), ErrorKind.PROTOCOL),
        (chunked(tar_of(), stat="?"), ErrorKind.PROTOCOL),
        (chunked(tar_of(), stat=base64.b64encode(b"[]").decode()), ErrorKind.PROTOCOL),
    ],
)
def test_what_an_engine_answers_instead_of_an_archive(engine: FakeEngine, answer: Answer, kind: ErrorKind) -> None:
    assert unarchived(engine, answer) is kind


@pytest.mark.parametrize("status", ["exited", "paused", "created", "dead"])
def test_nothing_is_read_of_a_container_that_does_not_run(engine: FakeEngine, status: str) -> None:
    engine.answers(r"GET /containers/\w+/json", Answer(200, described(status=status)))
    with pytest.raises(ProviderError) as caught:
        list(engine.provider.archive(CONTAINER, ".", within=WITHIN))
    assert caught.value.kind is ErrorKind.REFUSED
    assert not any("archive" in asked for asked in engine.asked)


def test_a_reader_that_goes_away_closes_the_connection(engine: FakeEngine) -> None:
    packed = tar_of(large=b"x" * 1_000_000)
    engine.answers(r"GET /containers/\w+/json", Answer(200, described()))
    engine.answers(ARCHIVE, chunked(packed, ends=False))
    pieces = engine.provider.archive(CONTAINER, ".", within=WITHIN)
    assert next(pieces)
    pieces.close()
    with pytest.raises(StopIteration):
        next(pieces)
