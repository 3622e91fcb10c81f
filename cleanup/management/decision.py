"""What the commands of an operator's decisions have in common: the reason, who decides, a dry run, and how each ends.

Exit status 0: done, or with `--dry-run` it could be. 1: refused by what was found, or by where the row stands; nothing
was written. 2: wrong arguments.
"""

from __future__ import annotations

import getpass
import json
import sys
from abc import abstractmethod
from argparse import ArgumentParser
from typing import Any
from uuid import UUID

from django.core.management.base import BaseCommand, CommandError

from leases.errors import LeaseError, NotFound
from leases.models import Run


class Wrong(CommandError):
    """A wrong argument: exit status 2, as argparse gives."""

    def __init__(self, message: str) -> None:
        super().__init__(message, returncode=2)


class DecisionCommand(BaseCommand):
    """A decision: `decide` makes it, or with `dry_run` says what it would do, and returns what is printed as JSON.

    The key `told` of what it returns is the sentence for people.
    """

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--reason", default="", help="why; goes into the log (required, but for a dry run)")
        parser.add_argument("--actor", default="", help="who decides; the user of this process unless given")
        parser.add_argument("--dry-run", action="store_true", help="verify all that is verified, and write nothing")
        parser.add_argument("--json", action="store_true", help="print one JSON object")

    def handle(self, *_: Any, **options: Any) -> None:
        if not options["dry_run"] and not options["reason"].strip():
            raise Wrong("--reason is required: it goes into the log")
        try:
            told = self.decide(options, actor=options["actor"] or operator_name(), dry_run=options["dry_run"])
        except LeaseError as refusal:
            self._refuse(refusal, as_json=options["json"])
            return
        if options["json"]:
            self.stdout.write(json.dumps({"dry_run": options["dry_run"], **told}, indent=2))
        else:
            self.stdout.write(told["told"])

    @abstractmethod
    def decide(self, options: dict[str, Any], *, actor: str, dry_run: bool) -> dict[str, Any]:
        """Make the decision. Raises `LeaseError` where it is refused."""

    def _refuse(self, refusal: LeaseError, *, as_json: bool) -> None:
        refuse(self, refusal, as_json=as_json)


def refuse(command: BaseCommand, refusal: LeaseError, *, as_json: bool) -> None:
    """End a command that was refused, with its exit status: a wrong argument, or what was found."""
    status = 2 if isinstance(refusal, NotFound) or refusal.code == "invalid" else 1
    if not as_json:
        raise CommandError(f"refused: {refusal}", returncode=status) from refusal
    command.stdout.write(json.dumps({"refused": refusal.code, "told": str(refusal)}, indent=2))
    sys.exit(status)


def run_named(text: str) -> Run:
    """Return the run that an argument names. Raises `Wrong` where there is none."""
    try:
        run = Run.objects.filter(pk=UUID(text)).first()
    except ValueError:
        raise Wrong(f"{text!r} is no id") from None
    if run is None:
        raise Wrong(f"there is no run {text}")
    return run


def operator_name() -> str:
    try:
        return f"{getpass.getuser()} (manage.py)"
    except (KeyError, OSError, ImportError):  # a process whose user has no name
        return "manage.py"
