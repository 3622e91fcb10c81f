"""Waking an obligation: one statement in one place, the database function `leases_wake` (design 2.2).

It always counts the wake, and makes the row due now only where no attempt holds it; the settle of a held row compares
the count with the one its claim returned, so no wake is lost between evaluation and settle.
"""

from __future__ import annotations

from django.db import connection


def wake(obligation_id: int, *, explicit: bool = False) -> None:
    """Wake an open obligation. `explicit` says that a person asked for an attempt now (Stop, Retry)."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT leases_wake(%s, %s)", [obligation_id, explicit])
