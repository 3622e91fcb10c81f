"""`manage.py import_history`: take over leases that ended elsewhere without proof, which is looked for from then on.

All of a file or nothing: every line is checked, and a single bad one leaves nothing written. Exit status 0: done, or
with `--dry-run` it could be. 1: refused, with each bad line's number. 2: wrong arguments. 130: interrupted, nothing was
written.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand
from django.db import IntegrityError, connection, transaction
from tqdm import tqdm

from cleanup.management.decision import Wrong, operator_name
from leases import history
from leases.errors import LeaseError

SHOWN = 20
"""Bad lines that are told one by one."""


class Command(BaseCommand):
    help = (
        "Import leases that ended elsewhere without proof, one JSON object a line (docs/operating.md). Their sandboxes "
        "are looked for from then on; what is found alive and ours is torn down."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("file", help="the file; - for standard input")
        parser.add_argument("--actor", default="", help="who imports; the user of this process unless given")
        parser.add_argument("--dry-run", action="store_true", help="check every line, and write nothing")
        parser.add_argument("--json", action="store_true", help="print one JSON object")

    def handle(self, *_: Any, **options: Any) -> None:
        lines = _lines(options["file"])
        quiet = options["json"] or not sys.stderr.isatty()
        try:
            with transaction.atomic():
                result = _import(tqdm(lines, unit="line", desc="import", disable=quiet), _actor(options))
                if result["refused"] or options["dry_run"]:
                    transaction.set_rollback(True)
        except KeyboardInterrupt:
            self.stderr.write("Interrupted; nothing was written.")
            sys.exit(130)
        self._say(result, options)
        if result["refused"]:
            sys.exit(1)

    def _say(self, result: dict[str, Any], options: dict[str, Any]) -> None:
        if options["json"]:
            self.stdout.write(json.dumps({"dry_run": options["dry_run"], **result}, indent=2))
            return
        bad = result["refused"]
        for one in bad[:SHOWN]:
            self.stdout.write(f"line {one['line']}: {one['told']}")
        if len(bad) > SHOWN:
            self.stdout.write(f"and {len(bad) - SHOWN} more bad lines")
        if bad:
            self.stdout.write(f"Refused: {len(bad)} bad line{'s' if len(bad) > 1 else ''}. Nothing was written.")
        elif options["dry_run"]:
            self.stdout.write(f"{result['imported']} would be imported, {result['known']} are there already.")
        else:
            self.stdout.write(
                f"{result['imported']} imported, {result['known']} were there already. "
                "Their sandboxes are looked for from now on."
            )


def _actor(options: dict[str, Any]) -> str:
    return options["actor"] or operator_name()


def _lines(name: str) -> list[bytes]:
    if name == "-":
        return sys.stdin.buffer.read().splitlines()
    try:
        return Path(name).read_bytes().splitlines()
    except OSError as error:
        raise Wrong(f"{name} cannot be read: {error.strerror}") from error


def _import(lines: Iterator[bytes] | Any, actor: str) -> dict[str, Any]:
    """Import every line in the caller's transaction, and say what was refused and why."""
    imported = known = 0
    refused: list[dict[str, Any]] = []
    for number, raw in enumerate(lines, start=1):
        if not raw.strip():
            continue
        try:
            with transaction.atomic():
                made = history.import_ended(history.parse(raw.decode()), actor=actor)
                _check()
            known += made is None
            imported += made is not None
        except UnicodeDecodeError:
            refused.append({"line": number, "code": "invalid", "told": "is no UTF-8 text"})
        except LeaseError as refusal:
            refused.append({"line": number, "code": refusal.code, "told": str(refusal)})
        except IntegrityError as error:
            rule = getattr(getattr(error.__cause__, "diag", None), "constraint_name", "") or "a constraint"
            refused.append({"line": number, "code": "refused", "told": f"the database refuses it ({rule})"})
    return {"imported": imported, "known": known, "refused": refused}


def _check() -> None:
    """Check now what is otherwise checked at commit, so that a refusal names its line."""
    with connection.cursor() as cursor:
        cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")
        cursor.execute("SET CONSTRAINTS ALL DEFERRED")
