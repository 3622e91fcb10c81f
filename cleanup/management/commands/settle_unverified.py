"""`manage.py settle_unverified`: end the retries of what cannot be proven. It ends no debt and opens no gate."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from cleanup.management.decision import DecisionCommand, Wrong
from leases import deciding
from leases.models import Obligation


class Command(DecisionCommand):
    help = (
        "End the retries of an obligation without proof. It stays visible as a debt. `--confirm` must be the exact "
        "name of what is given up; a dry run says what that is."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("obligation", type=int, help="the obligation's number")
        parser.add_argument("--confirm", default="", help="the sandbox's id, the creation's name, or the run's id")
        super().add_arguments(parser)

    def decide(self, options: dict[str, Any], *, actor: str, dry_run: bool) -> dict[str, Any]:
        row = Obligation.objects.filter(pk=options["obligation"]).first()
        if row is None:
            raise Wrong(f"there is no obligation {options['obligation']}")
        row = deciding.open_obligation(row.pk, company_id=row.company_id)
        confirmation = deciding.confirmation_of(row)
        facts = {"obligation": row.pk, "kind": row.kind, "quiet": row.quiet, "confirm": confirmation}
        if dry_run:
            deciding.require_settleable(row)
            told = f"{row} would end unproven; confirm with --confirm {confirmation}. Nothing was written."
            return facts | {"told": told}
        deciding.settle_unverified(
            row.pk,
            confirmation=options["confirm"],
            company_id=row.company_id,
            actor=actor,
            reason=options["reason"],
        )
        told = f"{row} is not tried any more. Nothing proves that {confirmation} ended: the debt stays visible."
        return facts | {"told": told}
