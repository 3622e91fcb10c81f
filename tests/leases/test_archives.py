"""What is saved is whole or nothing, what is offered is whole and sealed, and what is read is what was saved."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from django.core.files.storage import FileSystemStorage, Storage
from django.db import transaction

import leases
from leases import archive_storage, archives
from leases.archives import Saved
from leases.models import Archive, Lease, Obligation, Recovery
from tests import factories

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
