"""`manage.py archive_credential`: what could not be ended without it stands in the way."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any
from uuid import UUID

from cleanup.management.decision import Wrong
from cleanup.management.removal import RemovalCommand
from leases import archiving
from leases.blockers import Blockers
from leases.models import Credential


class Command(RemovalCommand):
    help = (
        "Archive a credential, or delete it. Exit status 1, with a list, while something unsettled depends on it; "
        "forced, that waits for a person from then on."
    )
    allowing = "--force"

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("credential", type=UUID, help="the credential's id")
        parser.add_argument("--delete", action="store_true", help="delete the row instead of archiving it")
        parser.add_argument("--force", action="store_true", help="although something unsettled depends on it")
        super().add_arguments(parser)

    def in_the_way(self, options: dict[str, Any]) -> tuple[Blockers, str]:
        row = _found(options["credential"])
        depending = archiving.what_depends_on(row.pk, company_id=row.company_id, delete=options["delete"])
        return depending, f"credential {row.name}"

    def end(self, options: dict[str, Any], *, actor: str) -> dict[str, Any]:
        row = _found(options["credential"])
        end = archiving.delete_credential if options["delete"] else archiving.archive_credential
        end(row.pk, company_id=row.company_id, actor=actor, reason=options["reason"], force=options["force"])
        done = "Deleted" if options["delete"] else "Archived"
        return {"credential": str(row.pk), "told": f"{done} {row.name}. No call is made with it any more."}


def _found(pk: UUID) -> Credential:
    row = Credential.objects.filter(pk=pk).first()
    if row is None:
        raise Wrong(f"there is no credential {pk}")
    return row
