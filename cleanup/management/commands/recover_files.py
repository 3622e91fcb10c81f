"""`manage.py recover_files`: reopen a kept sandbox once more to save its files, on an operator's word."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any
from uuid import UUID

from cleanup.management.decision import DecisionCommand, Wrong
from leases import recovering
from leases.errors import NotFound
from leases.models import Lease


class Command(DecisionCommand):
    help = (
        "Begin a new recovery of the files of a kept sandbox: it is started, its workspace is saved as an archive, and "
        "it is stopped again. For after making room, or when its provider works again."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("lease", help="the lease's id")
        parser.add_argument(
            "--workspace",
            default="",
            metavar="PATH",
            help="the directory to save, where the one that the lease recorded is not the right one",
        )
        super().add_arguments(parser)

    def decide(self, options: dict[str, Any], *, actor: str, dry_run: bool) -> dict[str, Any]:
        try:
            lease_id = UUID(options["lease"])
        except ValueError:
            raise Wrong(f"{options['lease']!r} is not an id") from None
        lease = Lease.objects.filter(pk=lease_id).first()
        if lease is None:
            raise NotFound(f"no lease {lease_id}")
        about = {"lease": str(lease.pk), "resource_id": lease.resource_id}
        if dry_run:
            recovering.require_recoverable(lease)
            last = recovering.newest(lease)
            number = last.generation + 1 if last else 1
            told = f"Generation {number} of sandbox {lease.resource_id} would begin.\nNothing was written."
            return {**about, "generation": number, "told": told}
        begun = recovering.recover_workspace(
            lease.pk, lease.company_id, actor=actor, reason=options["reason"], workspace=options["workspace"]
        )
        told = f"Generation {begun.generation} of sandbox {lease.resource_id} is begun: its first attempt is due now."
        return {
            **about,
            "recovery": str(begun.pk),
            "generation": begun.generation,
            "ends_at": begun.ends_at.isoformat(),
            "told": told,
        }
