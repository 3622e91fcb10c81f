"""Which tar streams pass for whole: those whose end was seen, and that stay inside of their directory."""

from __future__ import annotations

import io
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from providers import archiving
from providers.contract import ErrorKind, ProviderError

FORMATS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]


def packed(*members: tuple[tarfile.TarInfo, bytes], form: int = tarfile.PAX_FORMAT) -> bytes:
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w", format=form) as tar:
        for member, data in members:
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return whole.getvalue()


def usual(form: int = tarfile.PAX_FORMAT, length: int = 180) -> bytes:
    link = tarfile.TarInfo("./link")
    link.type, link.linkname = tarfile.SYMTYPE, "/somewhere/" + "x" * (80 if form == tarfile.USTAR_FORMAT else 200)
    long = tarfile.TarInfo("/".join(["./d", "n" * (length // 2), "m" * (length // 2 - 20)]))
    return packed(
        (tarfile.TarInfo("./a"), b"x" * 1000),
        (long, b"y" * 512),
        (link, b""),
        (tarfile.TarInfo("./z"), b""),
        form=form,
    )


def read(data: bytes, size: int) -> bytes:
    return b"".join(archiving.whole(data[start : start + size] for start in range(0, len(data), size)))


def refused(data: bytes, size: int = 4096) -> ErrorKind:
    with pytest.raises(ProviderError) as caught:
        read(data, size)
    return caught.value.kind


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("size", [1, 7, 512, 513, 1 << 20])
def test_a_whole_archive_is_passed_on_as_it_is(form: int, size: int) -> None:
    data = usual(form)
    assert read(data, size) == data


@pytest.mark.parametrize("form", FORMATS)
def test_an_archive_that_was_cut_anywhere_is_noticed(form: int) -> None:
    data = usual(form)
    end = len(data.rstrip(b"\0"))
    # Its own end is two blocks of zeros behind the last member, itself padded to whole blocks.
    last = end + -end % 512 + 512
    for cut in [*range(0, last, 97), *(block + 512 for block in range(0, last - 512, 512)), last]:
        assert refused(data[:cut]) is ErrorKind.CONNECTION, cut
    assert read(data[: last + 512], 512)


def test_what_is_no_archive_is_not_understood() -> None:
    assert refused(b"tar: no such file\n" * 100) is ErrorKind.PROTOCOL
    assert refused(usual() + usual()) is ErrorKind.PROTOCOL
    damaged = bytearray(usual())
    damaged[10] ^= 1
    assert refused(bytes(damaged)) is ErrorKind.PROTOCOL


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", ["/etc/passwd", "../outside", "a/../../outside", "./..", "x" * 90 + "/../" + "y" * 90])
def test_a_name_that_leads_out_of_the_archive_is_refused(form: int, name: str) -> None:
    assert refused(packed((tarfile.TarInfo(name), b"x"), form=form)) is ErrorKind.PROTOCOL


def test_a_size_that_only_the_extended_header_tells_is_heeded() -> None:
    member = tarfile.TarInfo("./large")
    member.pax_headers = {"size": "1024"}
    data = packed((member, b"z" * 1024), (tarfile.TarInfo("./next"), b"n"))
    # As Go's writer does for what a plain header cannot say: its field of the size holds nothing.
    at = data.index(b"./large\0")
    header = tarfile.TarInfo.frombuf(data[at : at + 512], "utf-8", "strict")
    header.size = 0
    forged = data[:at] + header.tobuf(tarfile.USTAR_FORMAT) + data[at + 512 :]
    assert read(forged, 100) == forged


@pytest.mark.parametrize("name", [b"5 size=\n", b"99 size=1\n", b"x size=1\n", b"11 size=-1\n", b"9 nothing"])
def test_an_extended_header_that_is_damaged_is_not_understood(name: bytes) -> None:
    header = tarfile.TarInfo("header")
    header.type, header.size = tarfile.XHDTYPE, len(name)
    data = header.tobuf(tarfile.USTAR_FORMAT) + name.ljust(512, b"\0")
    assert refused(data + packed((tarfile.TarInfo("./a"), b""))) is ErrorKind.PROTOCOL


def test_a_name_without_end_is_not_kept() -> None:
    header = tarfile.TarInfo("header")
    header.type, header.size = tarfile.GNUTYPE_LONGNAME, 1 << 40
    assert refused(header.tobuf(tarfile.GNU_FORMAT)) is ErrorKind.PROTOCOL


@pytest.mark.parametrize("program", [["tar"], ["busybox", "tar"]])
def test_what_the_programs_of_an_image_write_passes(tmp_path: Path, program: list[str]) -> None:
    if shutil.which(program[0]) is None:
        pytest.skip(f"no {program[0]} here")
    deep = tmp_path / ("d" * 120) / ("e" * 120)
    deep.mkdir(parents=True)
    (deep / "file").write_bytes(b"x" * 5000)
    (deep / "link").symlink_to("f" * 150)
    (deep / "hard").hardlink_to(deep / "file")
    data = subprocess.run([*program, "-cf", "-", "."], cwd=tmp_path, check=True, capture_output=True).stdout
    assert read(data, 333) == data
    assert refused(data[: len(data) // 2]) is ErrorKind.CONNECTION


@pytest.mark.parametrize(
    ("path", "fits"),
    [(".", True), ("work", True), ("/work", True), ("./work", True), ("", False), ("/", False), ("..", False)],
)
def test_a_workspace_is_a_directory_below_the_root(path: str, fits: bool) -> None:  # noqa: FBT001
    if fits:
        archiving.check(path)
        return
    with pytest.raises(ProviderError) as caught:
        archiving.check(path)
    assert caught.value.kind is ErrorKind.INVALID


def test_nothing_is_read_ahead() -> None:
    """A reader that stops at its own limit has taken no more than it was given."""
    given: list[int] = []

    def pieces() -> Iterator[bytes]:
        data = usual()
        for start in range(0, len(data), 512):
            given.append(start)
            yield data[start : start + 512]

    take: Callable[[], bytes] = archiving.whole(pieces()).__next__
    take()
    take()
    assert given == [0, 512]
