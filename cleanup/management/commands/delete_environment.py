"""`manage.py delete_environment`: its leases owe their end first, and outlive it."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any
from uuid import UUID

from cleanup.management.decision import Wrong
from cleanup.management.removal import RemovalCommand
from leases import deleting
from leases.blockers import Blockers
from leases.models import Environment


class Command(RemovalCommand):
    help = (
        "Delete an environment. Its leases survive it and are torn down from their own record. Exit status 1, with a "
        "list, while something stands in the way."
    )
    allowing = "--consent"

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("environment", type=UUID, help="the environment's id")
        parser.add_argument("--consent", action="store_true", help="destroy what is kept or was left behind")
        super().add_arguments(parser)

    def in_the_way(self, options: dict[str, Any]) -> tuple[Blockers, str]:
        row = _found(options["environment"])
        return deleting.what_stands_in_the_way(row.pk, company_id=row.company_id), f"environment {row.name}"

    def end(self, options: dict[str, Any], *, actor: str) -> dict[str, Any]:
        row = _found(options["environment"])
        done = deleting.delete_environment(
            row.pk, company_id=row.company_id, actor=actor, reason=options["reason"], consent=options["consent"]
        )
        told = f"Deleted {done.name}. {len(done.owing)} leases owe their teardown because of it."
        return {
            "environment": str(row.pk),
            "owing": [str(pk) for pk in done.owing],
            "cancelled": done.cancelled,
            "told": told,
        }


def _found(pk: UUID) -> Environment:
    row = Environment.objects.filter(pk=pk).first()
    if row is None:
        raise Wrong(f"there is no environment {pk}")
    return row
