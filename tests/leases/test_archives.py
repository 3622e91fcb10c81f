"""What is saved is whole or nothing, what is offered is whole and sealed, and what is read is what was saved."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import stat
import subprocess
import sys
import tarfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.core.files.storage import FileSystemStorage, InMemoryStorage, Storage
from django.db import IntegrityError, connection, transaction

import leases
from leases import archive_storage, archives, recovering
from leases.archives import ArchiveDamaged, Saved, StorageFailed, TooLarge
from leases.errors import LeaseError, NotFound
from leases.models import ActivityEntry, Archive, Continuation, Installation, Lease, Obligation, Recovery
from providers.contract import ErrorKind, ProviderError
from tests import factories
from tests.concurrency import BOUND, Background, Gate, elsewhere, together

pytestmark = pytest.mark.django_db(transaction=True)


def tar(**files: bytes) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"./{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return target.getvalue()


def in_pieces(content: bytes, size: int = 1000) -> Iterator[bytes]:
    for at in range(0, len(content), size):
        yield content[at : at + size]


@pytest.fixture
def directory(tmp_path: Path, settings: Any) -> Path:
    """A directory of its own for the archives of a test."""
    use(settings, FileSystemStorage, location=str(tmp_path / "archives"))
    return tmp_path / "archives"


def use(settings: Any, backend: type[Storage] | str, **options: Any) -> None:
    path = backend if isinstance(backend, str) else f"{backend.__module__}.{backend.__qualname__}"
    settings.STORAGES = {**settings.STORAGES, archive_storage.ALIAS: {"BACKEND": path, "OPTIONS": options}}


def files_in(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


def claimed(recovery: Recovery) -> UUID:
    """Have an attempt hold the recovery's obligation, and return its id."""
    owed = Obligation.objects.get(lease=recovery.lease, kind=Obligation.Kind.RECOVER_WORKSPACE)
    attempt_id = factories.claimed(owed).attempt_id
    assert attempt_id is not None
    return attempt_id


def begun(recovery: Recovery | None = None) -> Archive:
    """Begin an archive of a live attempt."""
    of = recovery or factories.recovery()
    with transaction.atomic():
        lease = Lease.objects.select_for_update(no_key=True).get(pk=of.lease_id)
        return archives.begin(lease, of, attempt_id=claimed(of), path="/workspace")


def test_a_saved_archive_is_offered_when_sealed_and_reads_back_as_it_was(directory: Path) -> None:
    content = tar(a=b"hello", b=os.urandom(200_000))
    archive = begun()
    written = archives.write(archive, in_pieces(content))
    assert written == Saved(len(content), hashlib.sha256(content).hexdigest())
    of = {"company_id": archive.company_id, "lease_id": archive.lease_id}
    assert not leases.offered_archives(**of).exists()
    with transaction.atomic():
        assert archives.saved(archive, written)
    assert not leases.offered_archives(**of).exists()
    receipt = archive.lease.receipts.get()
    with transaction.atomic():
        assert archives.seal(archive, receipt)
    assert leases.offered_archives(**of).get() == archive
    with leases.open_archive(archive.pk, company_id=archive.company_id) as file:
        assert file.read() == content


# Writing


def test_half_of_it_is_never_kept(directory: Path) -> None:
    content = tar(a=os.urandom(100_000))
    archive = begun()

    def breaks() -> Iterator[bytes]:
        yield from in_pieces(content[:50_000])
        raise ProviderError(ErrorKind.CONNECTION, "it broke")

    with pytest.raises(ProviderError) as told:
        archives.write(archive, breaks())
    assert told.value.kind == ErrorKind.CONNECTION
    assert files_in(directory) == []
    archive.refresh_from_db()
    assert archive.saved_at is None


@pytest.mark.parametrize("cut", [0, 1, 512, 50_000, -512, -10_240 + 1024])
def test_a_stream_that_ends_early_is_not_whole(directory: Path, cut: int) -> None:
    content = tar(a=os.urandom(102_400 - 512 * 3))
    assert len(content) % 10_240 == 0
    whole = content.rstrip(b"\0")
    whole += bytes(-len(whole) % 512 + 1024)
    with pytest.raises(ProviderError, match="breaks off") as told:
        archives.write(begun(), in_pieces(whole[: max(0, cut % len(whole))]))
    assert told.value.kind == ErrorKind.PROTOCOL
    assert files_in(directory) == []


def test_the_limit_itself_fits_and_one_byte_more_does_not(directory: Path) -> None:
    content = tar(a=os.urandom(5000))
    assert archives.write(begun(), in_pieces(content), limit=len(content)).size == len(content)
    assert len(files_in(directory)) == 1
    taken: list[int] = []

    def counted() -> Iterator[bytes]:
        for piece in in_pieces(content, 1):
            taken.append(1)
            yield piece

    with pytest.raises(TooLarge) as told:
        archives.write(begun(), counted(), limit=len(content) - 1)
    assert told.value.code == Recovery.Failure.ARCHIVE_TOO_LARGE
    assert len(taken) == len(content)  # given up at the first byte beyond, which nothing was asked for after
    assert len(files_in(directory)) == 1


def test_the_limit_is_the_settings(directory: Path, settings: Any) -> None:
    settings.PAPERCLIP_ARCHIVE_MAX_BYTES = 10_239
    with pytest.raises(TooLarge, match="10239 bytes"):
        archives.write(begun(), in_pieces(tar(a=b"a")))


def test_an_endless_stream_is_given_up_at_the_limit(directory: Path) -> None:
    member = tarfile.TarInfo("./endless")
    member.size = 8**11 - 1

    def endless() -> Iterator[bytes]:
        yield member.tobuf(tarfile.USTAR_FORMAT)
        while True:
            yield bytes(1 << 16)

    with pytest.raises(TooLarge):
        archives.write(begun(), endless(), limit=1 << 20)
    assert files_in(directory) == []


def test_whatever_the_pieces_raise_passes_unchanged_and_they_are_closed(directory: Path) -> None:
    closed: list[int] = []

    def raising(error: BaseException) -> Iterator[bytes]:
        try:
            yield tar(a=b"a")[:512]
            raise error
        finally:
            closed.append(threading.get_ident())

    # The second is what a directory takes for a name that is taken, the third what one that is full raises.
    errors: list[BaseException] = [ValueError("x"), FileExistsError(), OSError(errno.ENOSPC, "x"), KeyboardInterrupt()]
    for error in errors:
        with pytest.raises(type(error)) as told:
            archives.write(begun(), raising(error))
        assert told.value is error
    assert closed == [threading.get_ident()] * len(errors)
    assert files_in(directory) == []


def test_pieces_of_whoever_fails_otherwise_are_closed_too(settings: Any, directory: Path) -> None:
    closed: list[int] = []

    def pieces() -> Iterator[bytes]:
        try:
            yield from in_pieces(tar(a=b"a"))
        finally:
            closed.append(1)

    with pytest.raises(TooLarge):
        archives.write(begun(), pieces(), limit=1)
    assert closed == [1]


class BrokenAfter(FileSystemStorage):
    """A directory on a disk that takes so many bytes and no more; `how` says what it does then."""

    def __init__(self, *, after: int, how: str, **options: Any) -> None:
        super().__init__(**options)
        self.after, self.how = after, how

    def _save(self, name: str, content: Any) -> str:
        full = Path(self.path(name))
        full.parent.mkdir(parents=True, exist_ok=True)
        written = 0
        with full.open("wb") as file:
            for chunk in content.chunks():
                room = self.after - written
                file.write(chunk[:room])
                written += len(chunk)
                if len(chunk) > room:
                    if self.how == "raises":
                        raise OSError(errno.EIO, "Input/output error at /secret/place")
                    if self.how == "goes on":
                        return name
        return name


@pytest.mark.parametrize("how", ["raises", "goes on", "keeps quiet"])
@pytest.mark.parametrize("after", [0, 1, 512, 20_000, -1])
def test_a_storage_that_fails_at_any_byte_is_told_from_the_provider(
    settings: Any, tmp_path: Path, how: str, after: int
) -> None:
    content = tar(a=os.urandom(30_000))
    use(settings, BrokenAfter, location=str(tmp_path), after=after % len(content), how=how)
    with pytest.raises(StorageFailed) as told:
        archives.write(begun(), in_pieces(content))
    assert told.value.code == Recovery.Failure.STORAGE_UNAVAILABLE
    assert "secret" not in str(told.value)
    assert files_in(tmp_path) == []


class Swallowing(FileSystemStorage):
    """One that takes any error of its content for the end of it."""

    def _save(self, name: str, content: Any) -> str:
        full = Path(self.path(name))
        full.parent.mkdir(parents=True, exist_ok=True)
        with full.open("wb") as file, suppress(Exception):
            for chunk in content.chunks():
                file.write(chunk)
        return name


def test_a_storage_that_swallows_the_error_of_the_stream_keeps_nothing(settings: Any, tmp_path: Path) -> None:
    use(settings, Swallowing, location=str(tmp_path))
    with pytest.raises(ProviderError, match="breaks off"):
        archives.write(begun(), in_pieces(tar(a=os.urandom(9000))[:5000]))
    assert files_in(tmp_path) == []


class ByReading(FileSystemStorage):
    """One that goes to the beginning and reads what it likes, as those that upload do, here or in another thread."""

    def __init__(self, *, elsewhere: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.elsewhere = elsewhere

    def _save(self, name: str, content: Any) -> str:
        full = Path(self.path(name))
        full.parent.mkdir(parents=True, exist_ok=True)
        content.seek(0)

        def copy() -> None:
            with full.open("wb") as file:
                while piece := content.read(777):
                    file.write(piece)

        Background(copy).result() if self.elsewhere else copy()
        return name


def test_a_storage_may_read_instead_of_iterating(settings: Any, tmp_path: Path) -> None:
    use(settings, ByReading, location=str(tmp_path))
    content = tar(a=os.urandom(9000))
    archives.write(begun(), in_pieces(content))
    assert [path.read_bytes() for path in files_in(tmp_path)] == [content]


def test_a_storage_that_reads_in_another_thread_is_refused_with_what_to_do(settings: Any, tmp_path: Path) -> None:
    use(settings, ByReading, location=str(tmp_path), elsewhere=True)
    with pytest.raises(StorageFailed, match="threads of its own; configure it not to"):
        archives.write(begun(), in_pieces(tar(a=b"a")))
    assert files_in(tmp_path) == []


def test_a_storage_in_memory_will_do(settings: Any) -> None:
    use(settings, InMemoryStorage)
    archives.probe()
    content = tar(a=os.urandom(9000))
    kept, broken = whole(begun(), content), begun()
    seal(kept)
    with leases.open_archive(kept.pk, company_id=kept.company_id) as file:
        assert file.read() == content
    with pytest.raises(ProviderError):
        archives.write(broken, in_pieces(content[:600]))
    assert list(archive_storage.names()) == [kept.name]
    archive_storage.remove(kept.name)
    archive_storage.remove(kept.name)
    assert list(archive_storage.names()) == []


def test_a_directory_that_is_really_full_is_a_failed_storage(settings: Any, small_disk: Path) -> None:
    use(settings, FileSystemStorage, location=str(small_disk / "archives"))
    fits, beyond = begun(), begun()
    archives.write(fits, in_pieces(tar(a=os.urandom(100_000))))
    with pytest.raises(StorageFailed, match="No space left on device"):
        archives.write(beyond, in_pieces(tar(a=os.urandom(2_000_000)), 64_000))
    assert [path.name for path in files_in(small_disk)] == [f"{fits.pk}.tar"]
    archives.write(begun(), in_pieces(tar(a=os.urandom(500_000))))  # and what it had taken is free again


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of one mebibyte."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["/usr/bin/env", "mount", "-t", "tmpfs", "-o", "size=1m", "none", str(place)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"this user may not mount a filesystem: {mounted.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["/usr/bin/env", "umount", str(place)], check=True)


def test_a_directory_that_cannot_be_written_is_a_failed_storage(settings: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    use(settings, FileSystemStorage, location=str(tmp_path / "file" / "archives"))
    with pytest.raises(StorageFailed, match=r"Not a directory|File exists"):
        archives.write(begun(), in_pieces(tar(a=b"a")))
    with pytest.raises(StorageFailed):
        archives.probe()


def test_a_storage_that_does_not_exist_is_a_failed_storage(settings: Any) -> None:
    use(settings, "nowhere.Storage")
    pieces = in_pieces(tar(a=b"a"))
    with pytest.raises(StorageFailed, match="cannot be made"):
        archives.write(begun(), pieces)
    assert list(pieces) == []  # closed, unread


def test_a_file_of_that_name_is_not_touched(directory: Path) -> None:
    archive = begun()
    archives.write(archive, in_pieces(tar(a=b"first")))
    with pytest.raises(StorageFailed, match="already"):
        archives.write(archive, in_pieces(tar(a=b"second")))
    assert [path.read_bytes() for path in files_in(directory)] == [tar(a=b"first")]


def test_files_and_directories_are_for_their_owner_alone() -> None:
    archive = begun()
    archives.write(archive, in_pieces(tar(a=b"a")))
    where = archive_storage.storage()
    path = Path(where.path(archive.name))
    modes = {stat.S_IMODE(one.stat().st_mode) for one in (path, path.parent, path.parent.parent)}
    assert (stat.S_IMODE(path.stat().st_mode), modes) == (0o600, {0o600, 0o700})


def test_a_file_is_on_disk_before_it_counts_as_written(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = begun()
    synced: list[str] = []
    real = os.fsync

    def noted(descriptor: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    archives.write(archive, in_pieces(tar(a=b"a")))
    assert synced == [str(directory / archive.name), str((directory / archive.name).parent), str(directory)]

    def failing(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", failing)
    other = begun()
    with pytest.raises(StorageFailed, match="Input/output error"):
        archives.write(other, in_pieces(tar(a=b"a")))
    assert not (directory / other.name).exists()


def test_writing_asks_no_database(directory: Path) -> None:
    archive = begun()
    content = tar(a=os.urandom(10_000))

    def work() -> Saved:
        with connection.execute_wrapper(_refuse_queries):
            return archives.write(archive, in_pieces(content))

    assert elsewhere(work).size == len(content)


def _refuse_queries(*_: Any) -> Any:
    raise AssertionError("the database was asked")


def test_memory_does_not_grow_with_the_archive(directory: Path) -> None:
    size = 64 << 20
    member = tarfile.TarInfo("./large")
    member.size = size
    piece = os.urandom(1 << 16)

    def pieces() -> Iterator[bytes]:
        yield member.tobuf(tarfile.USTAR_FORMAT)
        for _ in range(size // len(piece)):
            yield piece
        yield bytes(1024)

    archive = begun()
    tracemalloc.start()
    try:
        written = archives.write(archive, pieces())
        peak = tracemalloc.get_traced_memory()[1]
        with archive_storage.reading(archive.name, written) as file:
            while file.read(1 << 16):
                pass
        peak = max(peak, tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()
    assert written.size == size + 512 + 1024
    assert peak < 2 << 20


def test_one_that_hangs_holds_up_nobody_else_and_leaves_nothing(directory: Path) -> None:
    hanging, content, gate = begun(), tar(a=os.urandom(9000)), Gate()

    def hangs() -> Iterator[bytes]:
        yield content[:5000]
        gate()
        raise ProviderError(ErrorKind.TIMEOUT, "the bound passed")  # what bounds the call ends it

    work = Background(lambda: archives.write(hanging, hangs()))
    gate.wait()
    kept = whole(begun(), content)
    assert kept.saved_at is not None
    gate.open()
    with pytest.raises(ProviderError) as told:
        work.result()
    assert told.value.kind == ErrorKind.TIMEOUT
    assert [path.name for path in files_in(directory)] == [f"{kept.pk}.tar"]


# Names


def test_nothing_that_a_sandbox_says_decides_a_path(directory: Path, tmp_path: Path) -> None:
    recovery = factories.recovery()
    evil = io.BytesIO()
    with tarfile.open(fileobj=evil, mode="w") as target:
        target.addfile(tarfile.TarInfo("../../../../escaped"))
        target.addfile(tarfile.TarInfo("/tmp/escaped"))
    lease = recovery.lease
    archive = archives.begin(lease, recovery, attempt_id=claimed(recovery), path="../../../../../tmp/escaped")
    archives.write(archive, in_pieces(evil.getvalue()))
    assert archive.name == f"{lease.company_id}/{archive.pk}.tar"
    assert files_in(tmp_path) == [directory / archive.name]


@pytest.mark.parametrize("path", ["", "a\0b", "x" * 1001])
def test_a_path_that_cannot_be_kept_is_refused(path: str) -> None:
    recovery = factories.recovery()
    with pytest.raises(LeaseError) as told:
        archives.begin(recovery.lease, recovery, attempt_id=claimed(recovery), path=path)
    assert told.value.code == "invalid"
    assert not Archive.objects.exists()


# What a row says


def test_one_attempt_begins_one_archive() -> None:
    recovery = factories.recovery()
    attempt_id = claimed(recovery)
    first = archives.begin(recovery.lease, recovery, attempt_id=attempt_id, path="/workspace")
    again = archives.begin(recovery.lease, recovery, attempt_id=attempt_id, path="/workspace")
    assert first == again
    assert first.epoch == recovery.lease.epoch


def whole(archive: Archive, content: bytes | None = None) -> Archive:
    """Write an archive, and that it is whole."""
    written = archives.write(archive, in_pieces(content or tar(a=b"a")))
    with transaction.atomic():
        assert archives.saved(archive, written)
    return archive


def seal(archive: Archive) -> Archive:
    with transaction.atomic():
        assert archives.seal(archive, archive.lease.receipts.order_by("-pk")[0])
    return archive


def is_offered(archive: Archive) -> bool:
    archive.refresh_from_db()
    found = archives.offered(company_id=archive.company_id, lease_id=archive.lease_id).filter(pk=archive.pk).exists()
    assert found == archives.is_offered(archive)
    if not found:
        with pytest.raises(LeaseError) as told:
            leases.open_archive(archive.pk, company_id=archive.company_id)
        assert told.value.code == "not_offered"
    return found


def test_it_is_offered_only_after_every_step_and_only_until_removed(directory: Path) -> None:
    archive = begun()
    assert not is_offered(archive)  # a crash before the first byte
    written = archives.write(archive, in_pieces(tar(a=b"a")))
    assert not is_offered(archive)  # a crash after the last byte
    archives.saved(archive, written)
    assert not is_offered(archive)  # a crash before the stop
    seal(archive)
    assert is_offered(archive)
    Archive.objects.filter(pk=archive.pk).update(removed_at=factories.database_now())
    assert not is_offered(archive)


def test_saying_it_twice_says_it_once(directory: Path) -> None:
    archive = begun()
    written = archives.write(archive, in_pieces(tar(a=b"a")))
    assert archives.saved(archive, written)
    assert archives.saved(archive, written)
    assert not archives.saved(archive, Saved(1, "f" * 64))
    seal(archive)
    seal(archive)
    actions = ActivityEntry.objects.filter(subject_id=str(archive.pk)).values_list("action", flat=True)
    assert sorted(actions) == ["archive.saved", "archive.sealed"]
    assert is_offered(archive)


def test_an_attempt_that_lost_its_row_makes_no_archive_whole(directory: Path) -> None:
    recovery = factories.recovery()
    late = begun(recovery)
    written = archives.write(late, in_pieces(tar(a=b"late")))
    newer = begun(recovery)  # the row was claimed anew
    with transaction.atomic():
        assert not archives.saved(late, written)
    gone(directory / late.name)
    assert not is_offered(late)
    assert is_offered(seal(whole(newer)))


def gone(path: Path) -> None:
    """Wait for the end of a file that is removed in another thread."""
    until = time.monotonic() + BOUND
    while path.exists():
        assert time.monotonic() < until, f"{path} was not removed"
        time.sleep(0.01)


def test_what_is_not_whole_is_not_sealed() -> None:
    archive = begun()
    assert not archives.seal(archive, archive.lease.receipts.get())
    assert not is_offered(archive)


def test_a_receipt_of_another_lease_or_an_earlier_epoch_seals_nothing(directory: Path) -> None:
    other = factories.stopped().receipts.get()
    recovery = factories.recovery()
    earlier = recovery.lease.receipts.get()
    with transaction.atomic():
        Lease.objects.filter(pk=recovery.lease_id).update(epoch=2)
        recovery.refresh_from_db()
        factories.receipt(recovery.lease, evidence="stopped")
    archive = whole(begun(recovery))
    for receipt in (other, earlier):
        with pytest.raises(IntegrityError, match="does not prove"), transaction.atomic():
            archives.seal(archive, receipt)
    assert not is_offered(archive)


def test_archives_are_offered_to_their_company_alone(directory: Path) -> None:
    archive = seal(whole(begun(factories.recovery(factories.stopped(in_a_run())))))
    run_id, stranger = archive.lease.run_id, factories.company()
    assert run_id is not None
    assert archives.offered(company_id=archive.company_id, run_id=run_id).get() == archive
    assert not archives.offered(company_id=stranger.pk, run_id=run_id).exists()
    assert not archives.offered(company_id=archive.company_id, run_id=factories.run().pk).exists()
    with pytest.raises(NotFound):
        leases.open_archive(archive.pk, company_id=stranger.pk)
    with pytest.raises(LeaseError):
        leases.open_archive("no id", company_id=stranger.pk)  # type: ignore[arg-type]


def in_a_run() -> Lease:
    environment = factories.environment()
    return factories.lease(environment, run=factories.run(environment.company))


# Reading


def spoiled(directory: Path, archive: Archive, how: Callable[[bytes], bytes | None]) -> None:
    path = directory / archive.name
    content = how(path.read_bytes())
    path.unlink()
    if content is not None:
        path.write_bytes(content)


DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "a bit flipped at the beginning": lambda content: bytes([content[0] ^ 1]) + content[1:],
    "a bit flipped at the end": lambda content: content[:-1] + bytes([content[-1] ^ 1]),
    "a byte short": lambda content: content[:-1],
    "empty": lambda _: b"",
    "a byte too much": lambda content: content + b"\0",
    "gone": lambda _: None,
}


@pytest.mark.parametrize("how", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("size", [1, 4096, -1])
def test_a_damaged_file_is_an_error_and_never_a_short_read(
    directory: Path, how: Callable[[bytes], bytes | None], size: int
) -> None:
    content = tar(a=os.urandom(3000))
    archive = seal(whole(begun(), content))
    spoiled(directory, archive, how)
    read = bytearray()

    def read_all() -> None:
        with leases.open_archive(archive.pk, company_id=archive.company_id) as file:
            while piece := file.read(size):
                read.extend(piece)

    with pytest.raises(ArchiveDamaged) as told:
        read_all()
    assert told.value.code == "archive_damaged"
    assert len(read) < len(content)


@pytest.mark.parametrize("how", DAMAGES.values(), ids=DAMAGES)
def test_whoever_leaves_before_the_end_is_told_too(directory: Path, how: Callable[[bytes], bytes | None]) -> None:
    archive = seal(whole(begun(), tar(a=os.urandom(300_000))))
    spoiled(directory, archive, how)
    with pytest.raises(ArchiveDamaged), leases.open_archive(archive.pk, company_id=archive.company_id) as file:
        file.read(1)


def test_a_reader_of_tar_reads_it_as_it_is(directory: Path) -> None:
    archive = seal(whole(begun(), tar(a=b"hello", b=b"world" * 10_000)))
    with (
        leases.open_archive(archive.pk, company_id=archive.company_id) as file,
        tarfile.open(fileobj=file, mode="r|") as target,
    ):
        members = {member.name: target.extractfile(member) for member in target if member.isfile()}
        assert list(members) == ["./a", "./b"]


def test_an_error_of_the_readers_own_passes(directory: Path) -> None:
    archive = seal(whole(begun()))
    with pytest.raises(ZeroDivisionError), leases.open_archive(archive.pk, company_id=archive.company_id):
        raise ZeroDivisionError


# Removing


def test_what_dead_attempts_left_is_removed_and_what_a_live_one_writes_is_not(directory: Path) -> None:
    recovery = factories.recovery()
    dead, content, gate = begun(recovery), tar(a=os.urandom(9000)), Gate()
    archives.write(dead, in_pieces(content))  # and its worker was killed before it said so
    live = begun(recovery)

    def slowly() -> Iterator[bytes]:
        yield content[:600]
        gate()
        yield content[600:]

    work = Background(lambda: archives.write(live, slowly()))
    gate.wait()
    assert archives.remove_unfinished() == 1
    assert not (directory / dead.name).exists()
    assert (directory / live.name).exists()
    gate.open()
    assert archives.saved(live, work.result())
    assert is_offered(seal(live))
    assert archives.remove_unfinished() == 0
    dead.refresh_from_db()
    assert (dead.removed_at is not None, is_offered(dead)) == (True, False)


_SLOWLY = """
import sys, time, django
django.setup()
from leases import archive_storage
content = sys.stdin.buffer.read()
def pieces():
    for at in range(0, len(content), 10_000):
        yield content[at : at + 10_000]
        if at == 300_000:
            print("half", flush=True)
            time.sleep(600)
archive_storage.write(sys.argv[1], pieces())
"""


def test_a_process_that_is_killed_while_it_writes_leaves_what_is_never_offered(directory: Path) -> None:
    recovery = factories.recovery()
    archive, content = begun(recovery), tar(a=os.urandom(600_000))
    settings = {"DJANGO_SETTINGS_MODULE": "paperclip_env.settings_static", "PAPERCLIP_ARCHIVE_DIR": str(directory)}
    with subprocess.Popen(
        [sys.executable, "-c", _SLOWLY, archive.name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **settings},
    ) as writer:
        assert writer.stdin is not None and writer.stdout is not None
        writer.stdin.write(content)
        writer.stdin.close()
        assert writer.stdout.readline() == b"half\n"
        writer.kill()
    assert 0 < (directory / archive.name).stat().st_size < len(content)
    assert not is_offered(archive)
    assert archives.remove_unfinished() == 0  # its row is claimed still: nobody knows that it died
    newer = begun(recovery)
    assert archives.remove_unfinished() == 1
    assert files_in(directory) == []
    assert is_offered(seal(whole(newer, content)))


def test_one_that_still_writes_although_its_attempt_is_over_comes_to_nothing(directory: Path) -> None:
    recovery = factories.recovery()
    given_up, content, gate = begun(recovery), tar(a=os.urandom(9000)), Gate()

    def slowly() -> Iterator[bytes]:
        yield content[:600]
        gate()
        yield content[600:]

    work = Background(lambda: archives.write(given_up, slowly()))
    gate.wait()
    newer = begun(recovery)
    assert archives.remove_unfinished() == 1
    gate.open()
    with pytest.raises(StorageFailed):  # its file is there no more
        work.result()
    with transaction.atomic():
        assert not archives.saved(given_up, Saved(len(content), "f" * 64))
    assert files_in(directory) == []
    assert is_offered(seal(whole(newer)))


def test_two_attempts_write_side_by_side(directory: Path) -> None:
    recovery = factories.recovery()
    contents = [tar(a=os.urandom(200_000)) for _ in range(2)]
    both = [begun(recovery), begun(recovery)]
    written = together(
        *(partial(archives.write, one, in_pieces(content)) for one, content in zip(both, contents, strict=True))
    )
    with transaction.atomic():
        assert [archives.saved(*pair) for pair in zip(both, written, strict=True)] == [False, True]
    seal(both[1])
    with leases.open_archive(both[1].pk, company_id=both[1].company_id) as file:
        assert file.read() == contents[1]
    gone(directory / both[0].name)


def test_a_removal_and_the_end_of_a_write_never_both_win(directory: Path) -> None:
    for _ in range(5):
        recovery = factories.recovery()
        archive = begun(recovery)
        written = archives.write(archive, in_pieces(tar(a=b"a")))

        def settle(archive: Archive = archive, written: Saved = written) -> bool:
            with transaction.atomic():
                Lease.objects.select_for_update(no_key=True).get(pk=archive.lease_id)
                return archives.saved(archive, written)

        def take_over(recovery: Recovery = recovery) -> int:
            with transaction.atomic():
                Lease.objects.select_for_update(no_key=True).get(pk=recovery.lease_id)
                claimed(recovery)
                return archives.remove_unfinished(recovery)

        is_whole, removed = together(settle, take_over)
        archive.refresh_from_db()
        assert (archive.saved_at is not None, archive.removed_at is not None) == (is_whole, bool(removed))
        assert is_whole != bool(removed)
        if is_whole:
            assert (directory / archive.name).exists()
        else:
            gone(directory / archive.name)


def test_a_generation_that_is_over_leaves_only_what_it_sealed(directory: Path) -> None:
    recovery = factories.recovery()
    vain, sealed, half = whole(begun(recovery)), seal(whole(begun(recovery))), begun(recovery)
    archives.write(half, in_pieces(tar(a=b"a")))
    assert archives.remove_unfinished() == 0  # it may still be sealed, and the other one is being written
    with transaction.atomic():
        Lease.objects.select_for_update(no_key=True).get(pk=recovery.lease_id)
        recovering.exhaust(recovery)
    gone(directory / vain.name)
    gone(directory / half.name)
    assert is_offered(sealed)
    assert [path.name for path in files_in(directory)] == [f"{sealed.pk}.tar"]


def test_a_file_is_removed_only_when_the_row_that_says_so_is_committed(directory: Path) -> None:
    recovery = factories.recovery()
    archive = begun(recovery)
    archives.write(archive, in_pieces(tar(a=b"a")))
    claimed(recovery)
    with transaction.atomic():
        assert archives.remove_unfinished() == 1
        transaction.set_rollback(True)
    archive.refresh_from_db()
    assert archive.removed_at is None
    assert (directory / archive.name).exists()


def test_what_a_crash_in_the_middle_of_a_removal_left_is_removed_later(directory: Path) -> None:
    removed, kept, unknown = seal(whole(begun())), seal(whole(begun())), directory / str(uuid4()) / f"{uuid4()}.tar"
    unknown.parent.mkdir()
    unknown.write_bytes(b"of a newer database, perhaps")
    (directory / "README").write_text("a person's")
    Archive.objects.filter(pk=removed.pk).update(removed_at=factories.database_now())
    assert archives.remove_leftovers() == 1
    assert set(files_in(directory)) == {directory / kept.name, unknown, directory / "README"}
    assert archives.remove_leftovers() == 0


class Mute(FileSystemStorage):
    def listdir(self, path: str) -> Any:
        raise NotImplementedError


def test_a_storage_that_cannot_list_is_asked_name_by_name(settings: Any, directory: Path) -> None:
    use(settings, Mute, location=str(directory))
    removed, kept = seal(whole(begun())), seal(whole(begun()))
    Archive.objects.filter(pk=removed.pk).update(removed_at=factories.database_now())
    assert archives.remove_leftovers() == 1
    assert archives.remove_leftovers() == 0
    assert files_in(directory) == [directory / kept.name]


def test_a_storage_without_anything_has_no_leftovers(directory: Path) -> None:
    assert archives.remove_leftovers() == 0


class Undeletable(FileSystemStorage):
    def delete(self, name: str) -> None:
        raise OSError(errno.EROFS, "Read-only file system")


def test_a_file_that_cannot_be_removed_is_told_and_left_for_later(
    settings: Any, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recovery = factories.recovery()
    archive = begun(recovery)
    archives.write(archive, in_pieces(tar(a=b"a")))
    claimed(recovery)
    use(settings, Undeletable, location=str(directory))
    assert archives.remove_unfinished() == 1
    assert "still in the storage: the archive could not be removed: Read-only file system" in caplog.text
    assert not is_offered(archive)
    with pytest.raises(ProviderError, match="breaks off"):  # of two errors, that of the stream is told
        archives.write(begun(), in_pieces(b""))
    use(settings, FileSystemStorage, location=str(directory))
    assert archives.remove_leftovers() == 1


def aged(archive: Archive, days: float) -> Archive:
    """Make an archive older: past the trigger that says its facts are final, which is what a test of time has to do."""
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE leases_archive DISABLE TRIGGER archive_facts_are_final")
        cursor.execute(
            "UPDATE leases_archive SET saved_at = saved_at - make_interval(secs => %s) WHERE id = %s",
            [days * 86_400, archive.pk],
        )
        cursor.execute("ALTER TABLE leases_archive ENABLE ALWAYS TRIGGER archive_facts_are_final")
    return archive


def over(recovery: Recovery) -> None:
    with transaction.atomic():
        lease = Lease.objects.select_for_update(no_key=True).get(pk=recovery.lease_id)
        recovering.complete(recovery, lease.receipts.order_by("-pk")[0])


def test_old_archives_are_removed_and_their_rows_stay(directory: Path) -> None:
    old, young, running = (seal(whole(begun())) for _ in range(3))
    for archive in (old, young):
        over(archive.recovery)
    aged(old, 31)
    aged(young, 29)
    aged(running, 31)
    assert archives.remove_older_than(30, actor="test", reason="room") == 1
    assert [is_offered(archive) for archive in (old, young, running)] == [False, True, True]
    assert not (directory / old.name).exists()
    entry = ActivityEntry.objects.get(action="archive.removed")
    assert (entry.actor, entry.reason, entry.subject_id) == ("test", "room", str(old.pk))
    assert (old.size, old.sha256) != (None, "")


def test_what_a_waiting_continuation_may_be_given_is_kept(directory: Path) -> None:
    archive = aged(seal(whole(begun(factories.recovery(factories.stopped(in_a_run()))))), 400)
    over(archive.recovery)
    run = archive.lease.run
    assert run is not None
    with transaction.atomic():
        waiting = Continuation.objects.create(
            company_id=run.company_id,
            issue=factories.issue(run.company),
            run=run,
            kind="retry",
            requested_by="user",
            recovery=archive.recovery,
        )
        Obligation.objects.create(
            company_id=run.company_id,
            kind=Obligation.Kind.START_CONTINUATION,
            continuation=waiting,
            quiet=Obligation.Quiet.WAITING,
        )
    assert archives.remove_older_than(30, actor="test", reason="room") == 0
    assert is_offered(archive)


@pytest.mark.parametrize(("days", "actor", "reason"), [(0, "a", "r"), (-1, "a", "r"), (1, "", "r"), (1, "a", " ")])
def test_nothing_is_removed_on_nonsense(days: float, actor: str, reason: str) -> None:
    with pytest.raises(LeaseError) as told:
        archives.remove_older_than(days, actor=actor, reason=reason)
    assert told.value.code == "invalid"


def test_a_database_that_may_be_a_copy_removes_no_archive(directory: Path) -> None:
    seal(whole(begun()))
    Installation.current()
    Installation.objects.update(
        observing_since=factories.database_now(),
        observed_mark_at=factories.database_now(),
        observing_why=Installation.Observing.BEHIND,
    )
    removals: list[Callable[[], int]] = [
        archives.remove_unfinished,
        archives.remove_leftovers,
        lambda: archives.remove_older_than(1, actor="test", reason="room"),
    ]
    for removal in removals:
        with pytest.raises(LeaseError) as told:
            removal()
        assert told.value.code == "observing"
