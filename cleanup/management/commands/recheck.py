"""`manage.py recheck`: ask for an attempt now at what waits for a person, and accept a secret that changed."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any
from uuid import UUID

from cleanup.management.decision import DecisionCommand, Wrong
from leases import deciding
from leases.models import Obligation, Operation


class Command(DecisionCommand):
    help = (
        "Ask for one attempt now at an obligation, or at the recovery of an operation. Where the secret changed since "
        "the creation was asked for, this accepts the one of today."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("subject", help="the obligation's number, or the operation's id")
        super().add_arguments(parser)

    def decide(self, options: dict[str, Any], *, actor: str, dry_run: bool) -> dict[str, Any]:
        row = _row(options["subject"])
        facts = {"obligation": row.pk, "kind": row.kind, "quiet": row.quiet}
        why = f" ({row.get_quiet_display()})" if row.quiet else ""
        if dry_run:
            return facts | {"told": f"{row}{why} would be tried now. Nothing was written."}
        deciding.recheck(obligation_id=row.pk, company_id=row.company_id, actor=actor, reason=options["reason"])
        return facts | {"told": f"Asked for one attempt at {row}{why}. A live attempt is not interrupted."}


def _row(subject: str) -> Obligation:
    if subject.isascii() and subject.isdigit() and len(subject) <= 18:  # noqa: PLR2004 - fits bigint
        row = Obligation.objects.filter(pk=int(subject)).first()
        if row is None:
            raise Wrong(f"there is no obligation {subject}")
        return deciding.open_obligation(row.pk, company_id=row.company_id)
    try:
        operation = Operation.objects.filter(pk=UUID(subject)).first()
    except ValueError:
        raise Wrong(f"{subject!r} is neither the number of an obligation nor the id of an operation") from None
    if operation is None:
        raise Wrong(f"there is no operation {subject}")
    return deciding.open_recovery(operation.pk, company_id=operation.company_id)
