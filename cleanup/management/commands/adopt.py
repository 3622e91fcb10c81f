"""`manage.py adopt`: give a sandbox that an operator found at the provider an owner, which tears it down."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any
from uuid import UUID

from cleanup.management.decision import DecisionCommand, Wrong
from leases import deciding
from leases.models import Operation


class Command(DecisionCommand):
    help = (
        "Adopt a sandbox for a creation whose own is not known: the provider is asked whether it is this one, and it "
        "is torn down. Exit status 1 when it is not, or cannot be asked."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("operation", type=UUID, help="the creation's id")
        parser.add_argument("resource_id", help="the sandbox's id, exactly as the provider names it")
        super().add_arguments(parser)

    def decide(self, options: dict[str, Any], *, actor: str, dry_run: bool) -> dict[str, Any]:
        operation = Operation.objects.filter(pk=options["operation"]).first()
        if operation is None:
            raise Wrong(f"there is no operation {options['operation']}")
        resource_id: str = options["resource_id"]
        found = {"operation": str(operation.pk), "resource_id": resource_id}
        if dry_run:
            seen = deciding.examine(operation.pk, resource_id, company_id=operation.company_id).seen
            told = f"{resource_id} ({seen}) is this creation's sandbox; it could be adopted. Nothing was written."
            return found | {"seen": seen, "told": told}
        lease = deciding.adopt(
            operation.pk, resource_id, company_id=operation.company_id, actor=actor, reason=options["reason"]
        )
        told = f"Lease {lease.pk} owns {resource_id} now, and owes its teardown."
        return found | {"lease": str(lease.pk), "told": told}
