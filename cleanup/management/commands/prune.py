"""`manage.py prune`: remove history that was over before a date, in batches, under a database role of its own."""

from __future__ import annotations

import json
import signal
import sys
import threading
from argparse import ArgumentParser, ArgumentTypeError
from datetime import UTC, datetime
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError
from tqdm import tqdm

from cleanup.management.decision import Wrong, operator_name
from leases import archives, pruning
from leases.errors import LeaseError
from leases.models import Archive


def _moment(text: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise ArgumentTypeError(f"{text!r} is no date, such as 2026-01-31 or 2026-01-31T12:00+00:00") from error
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


class Command(BaseCommand):
    help = (
        "Remove closed history that was over before a date: attempts, ended work and holds, closed obligations, and "
        "sandboxes of which nothing is owed, held, live or unproven, with their leases, receipts and journal. Also the "
        "files of archives that are older than PAPERCLIP_ARCHIVE_DAYS, whose rows stay. Exit status 1 when it is "
        "refused, 130 when it was interrupted."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--before", type=_moment, required=True, metavar="DATE", help="older than this (UTC unless it says)"
        )
        parser.add_argument("--batch", type=int, default=pruning.BATCH, help="rows in one transaction")
        parser.add_argument("--log", action="store_true", help="also the log of what is there no more")
        parser.add_argument("--reason", default="", help="why; goes into the log (required, but for a dry run)")
        parser.add_argument("--actor", default="", help="who decides; the user of this process unless given")
        parser.add_argument("--dry-run", action="store_true", help="only count, and write nothing")
        parser.add_argument("--json", action="store_true", help="print one JSON object")

    def handle(self, *_: Any, **options: Any) -> None:
        before: datetime = options["before"]
        if options["batch"] < 1:
            raise Wrong("--batch: must be at least 1")
        if not options["dry_run"] and not options["reason"].strip():
            raise Wrong("--reason is required: it goes into the log")
        try:
            if not options["dry_run"] and Archive.objects.filter(removed_at__isnull=False).exists():
                archives.remove_leftovers()  # while their rows still name them
            removed = (
                pruning.what_is_over(before, log=options["log"]) if options["dry_run"] else self._prune(before, options)
            )
            files = 0 if removed.stopped else _remove_archives(options)
        except LeaseError as refusal:
            self._refuse(refusal, as_json=options["json"])
            return
        self._say(removed, files, options)
        if removed.stopped:
            sys.exit(130)

    def _prune(self, before: datetime, options: dict[str, Any]) -> pruning.Removed:
        stop = threading.Event()
        previous = {s: signal.signal(s, lambda *_: stop.set()) for s in (signal.SIGINT, signal.SIGTERM)}
        bar = tqdm(unit="row", desc="prune", disable=options["json"] or not sys.stderr.isatty())
        try:
            return pruning.prune(
                before,
                actor=options["actor"] or operator_name(),
                reason=options["reason"],
                batch=options["batch"],
                log=options["log"],
                stopping=stop.is_set,
                on_batch=lambda count: _advance(bar, count),
            )
        finally:
            bar.close()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _say(self, removed: pruning.Removed, files: int, options: dict[str, Any]) -> None:
        if options["json"]:
            found = {
                "dry_run": options["dry_run"],
                "before": removed.before.isoformat(),
                "rows": removed.rows,
                "total": removed.total,
                "archive_files": files,
                "interrupted": removed.stopped,
            }
            self.stdout.write(json.dumps(found, indent=2))
            return
        for name, count in removed.rows.items():
            self.stdout.write(f"{count:>10} {name}")
        if files:
            self.stdout.write(f"{files:>10} files of archives, whose rows stay")
        would = "would be removed; nothing was written" if options["dry_run"] else "removed"
        told = f"{removed.total} rows of before {removed.before:%Y-%m-%d %H:%M} UTC {would}."
        self.stdout.write(told + (" Interrupted: the rest is left." if removed.stopped else ""))

    def _refuse(self, refusal: LeaseError, *, as_json: bool) -> None:
        status = 2 if refusal.code == "invalid" else 1
        if not as_json:
            raise CommandError(f"refused: {refusal}", returncode=status) from refusal
        self.stdout.write(json.dumps({"refused": refusal.code, "told": str(refusal)}, indent=2))
        sys.exit(status)


def _remove_archives(options: dict[str, Any]) -> int:
    """Remove the files of archives that are older than the setting says, or count them. 0 days: none is."""
    days = settings.PAPERCLIP_ARCHIVE_DAYS
    if not days:
        return 0
    if options["dry_run"]:
        return archives.older_than(days).count()
    actor = options["actor"] or operator_name()
    return archives.remove_older_than(days, actor=actor, reason=options["reason"])


def _advance(bar: Any, count: int) -> None:
    bar.update(count)
