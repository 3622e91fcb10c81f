"""Reading several statements' worth of one moment, with no way to change anything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from django.db import connection, transaction


@contextmanager
def snapshot() -> Iterator[None]:
    """One read-only REPEATABLE READ transaction: all numbers are of one moment, and nothing can be changed.

    Inside somebody's transaction (a test's) the isolation is theirs.
    """
    nested = connection.in_atomic_block
    with transaction.atomic():
        if not nested:
            with connection.cursor() as cursor:
                cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        yield
