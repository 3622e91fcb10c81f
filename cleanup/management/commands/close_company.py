"""`manage.py close_company`: for good, and only when nothing of it is owed, held or unproven."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any
from uuid import UUID

from cleanup.management.decision import Wrong
from cleanup.management.removal import RemovalCommand
from leases import closing
from leases.blockers import Blockers
from leases.errors import LeaseError
from leases.models import Company


class Command(RemovalCommand):
    help = (
        "Close a company for good. Its names are erased; its id, journal, receipts and log stay. Exit status 1, with a "
        "list, while something stands in the way."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("company", type=UUID, help="the company's id")
        super().add_arguments(parser)

    def in_the_way(self, options: dict[str, Any]) -> tuple[Blockers, str]:
        row = Company.objects.filter(pk=options["company"]).first()
        if row is None:
            raise Wrong(f"there is no company {options['company']}")
        if row.closed_at is not None:
            raise LeaseError("the company is closed already", code="already_closed")
        return closing.what_stands_in_the_way(row.pk), f"company {row.name}"

    def end(self, options: dict[str, Any], *, actor: str) -> dict[str, Any]:
        tombstone = closing.close_company(options["company"], actor=actor, reason=options["reason"])
        return {"company": str(tombstone.pk), "told": f"Closed. What is left is its tombstone, {tombstone}."}
