"""Archives of workspaces: which are being written, which may be used, and when their files are removed.

Answers for: an archive is offered only when it is whole, and sealed by the receipt of the stop after it was read; what
is half-written is never offered, whatever crashed when, and always has a row that says so. How bytes are written and
verified is the business of `leases.archive_storage`.

A row goes before its file, both ways: it is there before the first byte, and says that the file is removed before it
is. So between any two writes a crash leaves a file too much, which its row names, and never a row that offers what is
not there.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from typing import Any, BinaryIO
from uuid import UUID, uuid4

from django.db import transaction
from django.db.models import Exists, OuterRef, Q, QuerySet
from django.db.models.functions import Now

from leases import archive_storage, arguments, audit
from leases.archive_storage import ArchiveDamaged, Saved, StorageFailed, TooLarge, probe
from leases.blockers import require_trust
from leases.errors import LeaseError, NotFound
from leases.models import Archive, Continuation, Lease, Obligation, Receipt, Recovery

__all__ = [
    "ArchiveDamaged",
    "Saved",
    "StorageFailed",
    "TooLarge",
    "begin",
    "is_offered",
    "offered",
    "open_archive",
    "probe",
    "remove_leftovers",
    "remove_older_than",
    "remove_unfinished",
    "saved",
    "seal",
    "write",
]

log = logging.getLogger(__name__)

BATCH = 100
"""Archives that are removed in one transaction."""

PATH_LIMIT = 1000
"""Characters of the path of a workspace."""

UNFINISHED = "never to be offered"
"""The reason in the log for what is removed without anybody's decision."""

OFFERED = Q(saved_at__isnull=False, receipt__isnull=False, removed_at__isnull=True)


def begin(lease: Lease, recovery: Recovery, *, attempt_id: UUID, path: str) -> Archive:
    """Insert the row of an archive that this attempt is about to write, in the caller's transaction (lease locked).

    Commit before the first byte is written. One for each attempt: repeated after a COMMIT whose reply was lost, it
    returns the row that is there. The name is made of ids alone.
    """
    if not arguments.is_storable(path) or not 0 < len(path) <= PATH_LIMIT:
        raise LeaseError(f"the path of a workspace is 1 to {PATH_LIMIT} characters, without NUL", code="invalid")
    archive_id = uuid4()
    archive, _ = Archive.objects.get_or_create(
        attempt_id=attempt_id,
        defaults={
            "id": archive_id,
            "company_id": lease.company_id,
            "lease": lease,
            "recovery": recovery,
            "epoch": lease.epoch,
            "path": path,
            "name": archive_storage.name_of(archive_id, lease.company_id),
        },
    )
    return archive


def write(archive: Archive, pieces: Iterator[bytes], *, limit: int | None = None) -> Saved:
    """Stream the tar archive that a provider hands over to the storage. Touches no database; see `archive_storage`.

    Raises `TooLarge`, `StorageFailed`, and what `pieces` raise. Leaves nothing behind then, as far as that can be.
    """
    return archive_storage.write(archive.name, pieces, limit=limit)


def saved(archive: Archive, written: Saved) -> bool:
    """Write that an archive is whole, in the caller's transaction (lease locked). Returns whether it is.

    Fenced: only while the attempt that wrote it still holds its obligation, so before it settles. An attempt id that
    left its obligation never comes back, so whoever finds it gone may remove the file, and this cannot pass any more.
    When it does not pass, the file is removed after the commit. Safe to repeat.
    """
    holds = Exists(Obligation.objects.filter(attempt_id=OuterRef("attempt_id")))
    unwritten = Archive.objects.filter(holds, pk=archive.pk, saved_at__isnull=True, removed_at__isnull=True)
    if not unwritten.update(size=written.size, sha256=written.sha256, saved_at=Now()):
        archive.refresh_from_db()
        if archive.saved_at is not None and archive.removed_at is None:
            return archive.sha256 == written.sha256
        transaction.on_commit(partial(_delete_soon, [archive.name]))
        return False
    archive.refresh_from_db()
    audit.record(
        "archive.saved",
        archive,
        company_id=archive.company_id,
        lease=str(archive.lease_id),
        size=written.size,
        sha256=written.sha256,
    )
    return True


def seal(archive: Archive, receipt: Receipt) -> bool:
    """Bind a whole archive to the proof that its sandbox ended after it was read: from the commit on it is offered.

    In the caller's transaction. Returns False for one that is not whole, or whose file was removed. Raises
    `IntegrityError` (by a trigger) for a receipt of another lease, or of an epoch before the one that was read.
    """
    ready = Archive.objects.filter(pk=archive.pk, saved_at__isnull=False, removed_at__isnull=True)
    if not ready.filter(receipt__isnull=True).update(receipt=receipt):
        return ready.filter(receipt__isnull=False).exists()
    archive.refresh_from_db()
    audit.record(
        "archive.sealed", archive, company_id=archive.company_id, lease=str(archive.lease_id), receipt=receipt.pk
    )
    return True


def offered(*, company_id: UUID, run_id: UUID | None = None, lease_id: UUID | None = None) -> QuerySet[Archive]:
    """Return the archives that may be used, of a company, of one run's leases, or of one lease; the newest first."""
    found = Archive.objects.filter(OFFERED, company_id=arguments.identity(company_id, "company_id"))
    if run_id is not None:
        found = found.filter(lease__run_id=arguments.identity(run_id, "run_id"))
    if lease_id is not None:
        found = found.filter(lease_id=arguments.identity(lease_id, "lease_id"))
    return found.order_by("-saved_at", "-pk")


def is_offered(archive: Archive) -> bool:
    """Return whether this row, as it was read, may be used."""
    return archive.saved_at is not None and archive.receipt_id is not None and archive.removed_at is None


def open_archive(archive_id: UUID, *, company_id: UUID) -> AbstractContextManager[BinaryIO]:
    """Open an archive, a tar stream, to be read once from its beginning, in a `with` block.

    Raises `NotFound`; `LeaseError` (`not_offered`) for one that is not whole, not sealed or removed; `StorageFailed`.
    Reading raises `ArchiveDamaged` instead of the last byte where the file is not what was saved, and never ends early.
    Leaving the block without an error verifies the rest.
    """
    identity = arguments.identity(archive_id, "archive_id")
    company_id = arguments.identity(company_id, "company_id")
    archive = Archive.objects.filter(pk=identity, company_id=company_id).first()
    if archive is None:
        raise NotFound(f"no archive {identity} in this company")
    if not is_offered(archive) or archive.size is None:
        raise LeaseError(f"archive {identity} is not offered: {standing(archive)}", code="not_offered")
    return archive_storage.reading(archive.name, Saved(archive.size, archive.sha256))


def standing(archive: Archive) -> str:
    """Return where an archive stands, in a few words."""
    if archive.saved_at is None:
        return "it is not whole, and never will be" if archive.removed_at is not None else "it is not whole"
    if archive.removed_at is not None:
        return "its file was removed"
    return "offered" if archive.receipt_id is not None else "its sandbox is not proven stopped since"


# Removal: the row first, then the file.


def remove_unfinished(recovery: Recovery | None = None, *, actor: str = audit.SYSTEM) -> int:
    """Remove what will never be offered, of one generation or of all. Returns how many archives.

    That is what attempts that are over left half-written, and what a generation that is over did not seal. Never what a
    live attempt writes: one whose id is on its obligation. Should a process still write although its attempt was
    superseded, its file goes all the same, for `saved` refuses it.

    Of one generation: in the caller's transaction (lease locked), and the files go after its commit, in a thread of
    their own, so that a storage that hangs holds nobody up. Of all: refused (`observing`) while this database may be a
    restored one.
    """
    if recovery is not None:
        return _remove_all(unfinished().filter(recovery=recovery), actor=actor, reason=UNFINISHED, soon=True)
    require_trust("removing archives")
    return _remove_all(unfinished(), actor=actor, reason=UNFINISHED)


def unfinished() -> QuerySet[Archive]:
    """Return the archives that will never be offered: what `remove_unfinished` removes."""
    over = ~Q(Exists(Obligation.objects.filter(attempt_id=OuterRef("attempt_id"))))
    in_vain = Q(saved_at__isnull=False, receipt__isnull=True) & ~Q(recovery__state=Recovery.State.RUNNING)
    return Archive.objects.filter(Q(saved_at__isnull=True) & over | in_vain, removed_at__isnull=True)


def older_than(days: float) -> QuerySet[Archive]:
    """Return the whole archives that are older than this and that nothing waits for: what `remove_older_than` removes.

    A generation that is running may still seal them, and a continuation that waits may still bind to them.
    """
    waiting = Continuation.objects.filter(recovery=OuterRef("recovery"), state=Continuation.State.WAITING)
    whole = Archive.objects.filter(saved_at__lt=Now() - timedelta(days=days), removed_at__isnull=True)
    return whole.filter(~Q(Exists(waiting))).exclude(recovery__state=Recovery.State.RUNNING)


def remove_older_than(days: float, *, actor: str, reason: str) -> int:
    """Remove the files of whole archives that are older than this. Returns how many; their rows stay.

    Raises `LeaseError` (`invalid`, `observing`). Interrupted, what is left is found again.
    """
    arguments.actor(actor)
    arguments.reason(reason, "removing archives")
    arguments.seconds(days, "days", longest=100_000)
    require_trust("removing archives")
    return _remove_all(older_than(days), actor=actor, reason=reason)


def remove_leftovers() -> int:
    """Remove files whose row says that they were removed, which a crash or a storage left. Returns how many.

    Files that no row names are left alone: this database may be older than they are. Raises `StorageFailed`.
    """
    require_trust("removing archives")
    said = Archive.objects.filter(removed_at__isnull=False).order_by("pk").values_list("name", flat=True)
    removed = 0
    if not archive_storage.lists():
        return _delete_files(name for name in said.iterator() if archive_storage.holds(name))
    for names in _batches(archive_storage.names()):
        removed += _delete_files(said.filter(name__in=names))
    return removed


def _remove_all(rows: QuerySet[Archive], *, actor: str, reason: str, soon: bool = False) -> int:
    removed = 0
    while count := _remove_some(rows, actor=actor, reason=reason, soon=soon):
        removed += count
    return removed


def _remove_some(rows: QuerySet[Archive], *, actor: str, reason: str, soon: bool) -> int:
    """Write that a few of these are removed, under a lock of each, and have their files removed after the commit.

    What `rows` asks of an archive's own row still holds then (PostgreSQL asks again once it has the lock); what it asks
    of other rows never changes back. A row that somebody holds is passed over, and found again next time.
    """
    with transaction.atomic():
        found = list(rows.select_for_update(no_key=True, skip_locked=True, of=("self",)).order_by("pk")[:BATCH])
        Archive.objects.filter(pk__in=[row.pk for row in found]).update(removed_at=Now())
        for row in found:
            details: dict[str, Any] = {"lease": str(row.lease_id), "size": row.size}
            audit.record("archive.removed", row, company_id=row.company_id, actor=actor, reason=reason, **details)
        if found:
            delete = _delete_soon if soon else _delete_files
            transaction.on_commit(partial(delete, [row.name for row in found]))
    return len(found)


def _delete_files(names: Iterable[str]) -> int:
    """Remove these files and return how many. One that fails is told and left to `remove_leftovers`."""
    removed = 0
    for name in names:
        try:
            archive_storage.remove(name)
        except StorageFailed as failure:
            log.warning("archive %s is still in the storage: %s", name, failure)
        else:
            removed += 1
    return removed


def _delete_soon(names: list[str]) -> None:
    """Remove these files in a thread of its own. Should the process end before, they are left to `remove_leftovers`."""
    threading.Thread(target=_delete_files, args=(names,), name="remove-archives", daemon=True).start()


def _batches(names: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    for name in names:
        batch.append(name)
        if len(batch) == BATCH:
            yield batch
            batch = []
    if batch:
        yield batch
