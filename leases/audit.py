"""Writing the audit log. Names are dotted: what it happened to, then what happened."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.db.models import Model

from leases.models import ActivityEntry

SYSTEM = "system"


def record(
    action: str, subject: Model, *, company_id: UUID | None, actor: str = SYSTEM, reason: str = "", **details: Any
) -> None:
    """Append an entry, in the caller's transaction. `details` must be JSON values and never hold provider text.

    `company_id` is None for what concerns the whole installation.
    """
    ActivityEntry.objects.create(
        company_id=company_id,
        actor=actor,
        action=action,
        subject_type=subject._meta.model_name or "",  # noqa: SLF001 - documented API of Django
        subject_id=str(subject.pk),
        reason=reason,
        details=details,
    )
