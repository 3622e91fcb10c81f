"""Whether a company is closed, asked in passing or held under its lock, which is the first in the order of locks."""

from __future__ import annotations

from uuid import UUID

from django.db import connection

from leases.models import Company


def is_closed(company_id: UUID) -> bool:
    """Return whether the company is closed, as it is at this moment."""
    return Company.objects.filter(pk=company_id, closed_at__isnull=False).exists()


def hold(company_id: UUID) -> bool:
    """Lock the company, shared, until the caller's transaction ends, and return whether it is closed.

    While it is held nobody closes or reopens the company, and no credential of it is written (whose triggers take the
    same lock, exclusively). Taken before every other lock.
    """
    with connection.cursor() as cursor:
        cursor.execute("SELECT closed_at IS NOT NULL FROM leases_company WHERE id = %s FOR SHARE", [company_id])
        row = cursor.fetchone()
    if row is None:
        raise Company.DoesNotExist(f"no company {company_id}")
    return bool(row[0])
