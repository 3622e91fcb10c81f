"""`manage.py recheck_history`: look once more at the ends of an account that nothing proved in seven days."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any
from uuid import UUID

from cleanup.management.decision import DecisionCommand, Wrong
from leases import history
from leases.models import ProviderAccount


class Command(DecisionCommand):
    help = (
        "Ask for one look now at all of an account's history that waits for a person. Only looks; changes no sandbox."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("account", type=UUID, help="the provider account's id")
        super().add_arguments(parser)

    def decide(self, options: dict[str, Any], *, actor: str, dry_run: bool) -> dict[str, Any]:
        account = ProviderAccount.objects.filter(pk=options["account"]).first()
        if account is None:
            raise Wrong(f"there is no account {options['account']}")
        if dry_run:
            count = history.asking(account.pk).count()
            return {"looks": count, "told": f"{count} would be looked at now. Nothing was written."}
        count = history.look_again(account.pk, company_id=account.company_id, actor=actor, reason=options["reason"])
        return {"looks": count, "told": f"Asked for one look at each of {count}."}
