"""A stream that broke off is told from a whole archive, however it was made and wherever it was cut."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from pathlib import Path

import pytest

from leases.tar_stream import BLOCK, TarStream
from providers.contract import ErrorKind, ProviderError


def follow(content: bytes, size: int = 700) -> None:
    stream = TarStream()
    for at in range(0, len(content), size):
        stream.feed(content[at : at + size])
    stream.end()


def refused(content: bytes, size: int = 700) -> str:
    with pytest.raises(ProviderError) as told:
        follow(content, size)
    assert told.value.kind == ErrorKind.PROTOCOL
    return told.value.excerpt


def made(format_: int) -> bytes:
    """Return an archive with every kind of member, long names, and content that looks like headers and ends."""
    inner = io.BytesIO()
    target = io.BytesIO()
    with tarfile.open(fileobj=inner, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("inner"))
    with tarfile.open(fileobj=target, mode="w", format=format_) as archive:
        for number, content in enumerate((b"", b"x", bytes(2 * BLOCK), inner.getvalue(), os.urandom(5 * BLOCK + 1))):
            member = tarfile.TarInfo(f"./{'d' * 90}/{'f' * 150}-{number}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        for kind in (tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE):
            member = tarfile.TarInfo(f"./{kind.decode()}")
            member.type, member.linkname = kind, f"./{'d' * 90}/{'f' * 150}-0"
            archive.addfile(member)
    return target.getvalue()


FORMATS = {"pax": tarfile.PAX_FORMAT, "gnu": tarfile.GNU_FORMAT}


@pytest.mark.parametrize("format_", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("size", [1, 511, 512, 513, 1 << 20])
def test_a_whole_archive_passes_in_pieces_of_any_size(format_: int, size: int) -> None:
    follow(made(format_), size)


@pytest.mark.parametrize("format_", FORMATS.values(), ids=FORMATS)
def test_an_archive_that_is_cut_anywhere_before_its_end_is_not_whole(format_: int) -> None:
    content = made(format_)
    end = len(content.rstrip(b"\0"))
    end += -end % BLOCK + 2 * BLOCK
    follow(content[:end])  # padding behind the end may be missing
    for cut in [*range(0, end, BLOCK), end - 1, end - BLOCK - 1, 1, 100]:
        assert "breaks off" in refused(content[:cut])


def test_an_empty_archive_is_two_blocks_of_zeros() -> None:
    follow(bytes(2 * BLOCK))
    assert "breaks off" in refused(bytes(BLOCK))
    assert "breaks off" in refused(b"")


def test_what_is_no_archive_is_refused_at_its_first_block() -> None:
    stream = TarStream()
    with pytest.raises(ProviderError, match="not an archive"):
        stream.feed(b'{"message": "no such container"}'.ljust(BLOCK))
    assert "not an archive" in refused(os.urandom(BLOCK))


def test_what_follows_the_end_is_refused() -> None:
    content = made(tarfile.PAX_FORMAT)
    assert "follows the end" in refused(content + content)
    assert "follows the end" in refused(content + b"x".ljust(BLOCK))
    assert "breaks off" in refused(content + b"x")


def test_a_size_that_only_the_extended_header_states_counts() -> None:
    member = tarfile.TarInfo("./large")
    member.size = 8 * 1024**3  # as large as the plain header cannot say
    header = member.tobuf(tarfile.PAX_FORMAT)
    stream = TarStream()
    stream.feed(header)
    piece = bytes(1 << 20)
    for _ in range(8 * 1024):
        stream.feed(piece)
    stream.feed(bytes(2 * BLOCK))
    stream.end()
    short = TarStream()
    short.feed(header)
    short.feed(bytes(2 * BLOCK))  # would be an end, were the file not said to go on
    with pytest.raises(ProviderError, match="breaks off"):
        short.end()


def test_a_size_in_binary_counts() -> None:
    member = tarfile.TarInfo("./large")
    member.size = 8 * 1024**3
    stream = TarStream()
    stream.feed(member.tobuf(tarfile.GNU_FORMAT))
    stream.feed(bytes(2 * BLOCK))
    with pytest.raises(ProviderError, match="breaks off"):
        stream.end()


@pytest.mark.parametrize("size", [b"-0000000001\0", b"0000000001x\0", b"\xff" * 12])
def test_a_header_with_an_impossible_size_is_refused(size: bytes) -> None:
    header = bytearray(tarfile.TarInfo("./a").tobuf(tarfile.USTAR_FORMAT))
    header[124:136] = size
    header[148:156] = b" " * 8
    header[148:156] = f"{sum(header):06o}\0 ".encode()
    assert "not an archive" in refused(bytes(header) + bytes(2 * BLOCK))


@pytest.mark.parametrize("records", [b"no length", b"3 a=b\n", b"99999999999999999999 a=b\n" * 40, b"12 size=-11\n"])
def test_an_extended_header_that_cannot_be_read_never_hangs_or_breaks(records: bytes) -> None:
    extended = tarfile.TarInfo("./x")
    extended.type, extended.size = b"x", len(records)
    content = extended.tobuf(tarfile.USTAR_FORMAT) + records.ljust(-(-len(records) // BLOCK) * BLOCK, b"\0")
    content += tarfile.TarInfo("./a").tobuf(tarfile.USTAR_FORMAT) + bytes(2 * BLOCK)
    try:
        follow(content)
    except ProviderError as error:
        assert error.kind == ErrorKind.PROTOCOL  # noqa: PT017 - either is right, anything else is not


@pytest.mark.parametrize("options", [[], ["--format=v7"], ["--format=gnu", "--sparse"], ["--format=pax", "--sparse"]])
def test_what_the_systems_tar_makes_passes_and_its_halves_do_not(tmp_path: Path, options: list[str]) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").write_bytes(os.urandom(70_000))
    (tmp_path / "a" / "link").symlink_to("file")
    with (tmp_path / "a" / "sparse").open("wb") as sparse:
        for number in range(60):  # more holes than one block's map holds
            sparse.seek(number * 1_000_000)
            sparse.write(b"data")
        sparse.truncate(80_000_000)
    done = subprocess.run(
        ["/usr/bin/env", "tar", "-C", str(tmp_path / "a"), *options, "-cf", "-", "."], capture_output=True, check=True
    )
    follow(done.stdout, 8192)
    assert "breaks off" in refused(done.stdout[: len(done.stdout) // 2 // BLOCK * BLOCK], 8192)
