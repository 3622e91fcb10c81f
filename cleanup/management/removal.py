"""What the commands that delete, close and archive have in common: they list what stands in the way.

Exit status as for decisions: 0 done, or with `--dry-run` it could be; 1 something stands in the way; 2 wrong arguments.
"""

from __future__ import annotations

import json
import sys
from abc import abstractmethod
from typing import Any

from django.core.management.base import CommandError

from cleanup.management.decision import DecisionCommand
from leases.blockers import Blockers, Refused, lines
from leases.errors import LeaseError


class RemovalCommand(DecisionCommand):
    """Ends a row that people configured. `in_the_way` looks, `end` does it."""

    allowing = ""
    """The option before which what `yields` gives way, if there is one."""

    def decide(self, options: dict[str, Any], *, actor: str, dry_run: bool) -> dict[str, Any]:
        if not dry_run:
            return self.end(options, actor=actor)
        blockers, subject = self.in_the_way(options)
        allowed = bool(self.allowing) and options[self.allowing.lstrip("-")]
        if blockers.unyielding or (blockers and not allowed):
            raise Refused(f"{subject} would be refused", blockers)
        told = "Nothing stands in the way" if not blockers else "Would go all the same: " + blockers.sentence()
        told = "\n".join((f"{subject}: {told}. Nothing was written.", *lines(blockers)))
        return {"told": told, **blockers.as_json()}

    @abstractmethod
    def in_the_way(self, options: dict[str, Any]) -> tuple[Blockers, str]:
        """Return what stands in the way, and the name of what would be ended. Raises `LeaseError`."""

    @abstractmethod
    def end(self, options: dict[str, Any], *, actor: str) -> dict[str, Any]:
        """End it. Raises `LeaseError`."""

    def _refuse(self, refusal: LeaseError, *, as_json: bool) -> None:
        if not isinstance(refusal, Refused):
            super()._refuse(refusal, as_json=as_json)
            return
        if as_json:
            told = {"refused": refusal.code, "told": str(refusal), **refusal.blockers.as_json()}
            self.stdout.write(json.dumps(told, indent=2))
            sys.exit(1)
        hint = ""
        if self.allowing and not refusal.blockers.unyielding and refusal.code != "used_again":
            hint = f"\nWith {self.allowing} it goes all the same."
        listed = "\n".join(("", *lines(refusal.blockers)))
        raise CommandError(f"refused: {refusal}{listed}{hint}", returncode=1) from refusal
