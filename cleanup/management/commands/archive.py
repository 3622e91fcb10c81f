"""`manage.py archive`: list the archives of workspaces, write one out, remove old ones, try their storage."""

from __future__ import annotations

import json
import os
import sys
from argparse import ArgumentParser
from collections.abc import Callable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any
from uuid import UUID, uuid4

from django.core.management.base import BaseCommand, CommandError
from django.db.models import QuerySet
from tqdm import tqdm

from cleanup.management.decision import Wrong, operator_name, refuse
from leases import archives, audit
from leases.errors import LeaseError, NotFound
from leases.models import Archive

_PIECE = 1 << 16


class Command(BaseCommand):
    help = (
        "List the archives of workspaces, or with one of the options below write one out (verified), remove old ones, "
        "or try their storage. Exit status 1 when it is refused or fails, 2 for wrong arguments, 130 when interrupted."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        what = parser.add_mutually_exclusive_group()
        what.add_argument("--save", nargs=2, metavar=("ID", "FILE"), help="write one out; - is standard output")
        what.add_argument(
            "--remove-older-than",
            type=float,
            metavar="DAYS",
            help="remove the files of whole archives that are older than this and that nothing waits for",
        )
        what.add_argument("--clean", action="store_true", help="remove what attempts and removals left half-done")
        what.add_argument("--check", action="store_true", help="write, read and remove a small file in the storage")
        parser.add_argument("--company", type=UUID, metavar="ID", help="only of this company")
        parser.add_argument("--run", type=UUID, metavar="ID", help="only of the leases of this run")
        parser.add_argument("--lease", type=UUID, metavar="ID", help="only of this lease")
        parser.add_argument("--offered", action="store_true", help="only those that may be used")
        parser.add_argument("--reason", default="", help="why; goes into the log (to remove old ones)")
        parser.add_argument("--actor", default="", help="who decides; the user of this process unless given")
        parser.add_argument("--dry-run", action="store_true", help="only count what would be removed")
        parser.add_argument("--json", action="store_true", help="print one JSON object")

    def handle(self, *_: Any, **options: Any) -> None:
        options["actor"] = options["actor"] or operator_name()
        try:
            told = self._work(options)
        except LeaseError as refusal:
            refuse(self, refusal, as_json=options["json"])
        except KeyboardInterrupt:
            sys.exit(130)
        else:
            self._say(told, as_json=options["json"])

    def _work(self, options: dict[str, Any]) -> dict[str, Any]:
        if options["save"]:
            return _save(*options["save"], actor=options["actor"], as_json=options["json"])
        if options["remove_older_than"] is not None:
            return _remove(options["remove_older_than"], options)
        if options["clean"]:
            return _clean(options)
        if options["check"]:
            archives.probe()
            return {"usable": True, "told": "The storage of archives works."}
        return _list(options)

    def _say(self, told: dict[str, Any], *, as_json: bool) -> None:
        sentence = told.pop("told")
        if as_json:
            self.stdout.write(json.dumps(told, indent=2))
        elif sentence:
            self.stdout.write(sentence)


# Listing


def _list(options: dict[str, Any]) -> dict[str, Any]:
    rows = _chosen(options).order_by("-begun_at", "-pk")
    found = [_as_json(row) for row in rows]
    lines = [
        f"{one['id']}  {one['begun_at']:%Y-%m-%d %H:%M}  {_bytes(one['size']):>12}  lease {one['lease']}  "
        f"{one['standing']}"
        for one in found
    ]
    total = sum(one["size"] or 0 for one in found if one["removed_at"] is None)
    told = [*lines, f"{len(found)} archives, {_bytes(total)} in the storage."]
    for one in found:
        for name in ("begun_at", "saved_at", "removed_at"):
            one[name] = one[name].isoformat() if one[name] else None
    return {"archives": found, "bytes": total, "told": "\n".join(told)}


def _chosen(options: dict[str, Any]) -> QuerySet[Archive]:
    rows = Archive.objects.select_related("lease")
    for option, column in (("company", "company_id"), ("run", "lease__run_id"), ("lease", "lease_id")):
        if options[option] is not None:
            rows = rows.filter(**{column: options[option]})
    return rows.filter(archives.OFFERED) if options["offered"] else rows


def _as_json(row: Archive) -> dict[str, Any]:
    return {
        "id": str(row.pk),
        "company": str(row.company_id),
        "lease": str(row.lease_id),
        "run": str(row.lease.run_id) if row.lease.run_id else None,
        "path": row.path,
        "offered": archives.is_offered(row),
        "standing": archives.standing(row),
        "size": row.size,
        "sha256": row.sha256,
        "begun_at": row.begun_at,
        "saved_at": row.saved_at,
        "removed_at": row.removed_at,
    }


def _bytes(size: int | None) -> str:
    return "–" if size is None else f"{size:,} B"  # noqa: RUF001 - the dash of the admin's lists


# Writing one out


def _save(archive_id: str, target: str, *, actor: str, as_json: bool) -> dict[str, Any]:
    try:
        row = Archive.objects.filter(pk=UUID(archive_id)).first()
    except ValueError:
        raise Wrong(f"{archive_id!r} is not an id") from None
    if row is None:
        raise NotFound(f"no archive {archive_id}")
    if target == "-" and as_json:
        raise Wrong("--json and the archive itself cannot both go to standard output")
    with archives.open_archive(row.pk, company_id=row.company_id) as source, _target(target) as file:
        audit.record("archive.read", row, company_id=row.company_id, actor=actor, lease=str(row.lease_id))
        hidden = as_json or not sys.stderr.isatty()
        with tqdm(total=row.size, unit="B", unit_scale=True, desc="archive", disable=hidden) as bar:
            while piece := source.read(_PIECE):
                file.write(piece)
                bar.update(len(piece))
    told = "" if target == "-" else f"{_bytes(row.size)} in {target}; size and checksum are those that were saved."
    return {"id": str(row.pk), "file": target, "size": row.size, "sha256": row.sha256, "told": told}


@contextmanager
def _target(target: str) -> Any:
    """Open what to write to. A file appears under its name only when all of it is there and right."""
    if target == "-":
        if sys.stdout.isatty():
            raise Wrong("an archive is not for a terminal: redirect the output, or name a file")
        with _telling(lambda: None):
            yield sys.stdout.buffer
            sys.stdout.buffer.flush()
        return
    path = Path(target)
    if path.exists():
        raise Wrong(f"{target} is there already")
    half = path.with_name(f".{path.name}.{uuid4().hex[:8]}")
    with _telling(lambda: half.unlink(missing_ok=True)):
        with _private(half) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        half.rename(path)


def _private(path: Path) -> IO[bytes]:
    """Make a file that its owner alone reads: what is in it may be secret."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")


@contextmanager
def _telling(undo: Callable[[], None]) -> Any:
    """Have what was half-written removed, whatever ends it, and an error of the file told as one of the command."""
    try:
        yield
    except BaseException as error:
        with suppress(OSError):
            undo()
        if isinstance(error, OSError):
            raise CommandError(f"it could not be written: {error.strerror or type(error).__name__}") from error
        raise


# Removing


def _remove(days: float, options: dict[str, Any]) -> dict[str, Any]:
    if options["dry_run"]:
        count = archives.older_than(days).count()
        return {"dry_run": True, "removed": count, "told": f"{count} would be removed. Nothing was written."}
    if not options["reason"].strip():
        raise Wrong("--reason is required: it goes into the log")
    count = archives.remove_older_than(days, actor=options["actor"], reason=options["reason"])
    return {"dry_run": False, "removed": count, "told": f"{count} removed; their rows stay."}


def _clean(options: dict[str, Any]) -> dict[str, Any]:
    if options["dry_run"]:
        count = archives.unfinished().count()
        told = f"{count} that will never be offered would be removed. Nothing was written."
        return {"dry_run": True, "unfinished": count, "told": told}
    unfinished = archives.remove_unfinished(actor=options["actor"])
    files = archives.remove_leftovers()
    told = f"{unfinished} that will never be offered removed, and {files} files whose removal was not finished."
    return {"dry_run": False, "unfinished": unfinished, "files": files, "told": told}
