"""Emptying the tables between tests, which the database refuses to everybody (triggers `..._is_not_emptied`).

Answers for: a test that commits leaves nothing behind. The triggers are off for the statement that empties, in its
transaction, and on for everything that a test does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from django.db.backends.base.operations import BaseDatabaseOperations
from django.db.backends.postgresql.operations import DatabaseOperations

GUARDED = (
    ("leases_receipt", "receipt_is_not_emptied"),
    ("leases_activityentry", "activityentry_is_not_emptied"),
    ("leases_attempt", "attempt_is_not_emptied"),
    ("leases_operation", "operation_is_not_emptied"),
    ("leases_lease", "lease_is_not_emptied"),
    ("leases_obligation", "obligation_is_not_emptied"),
    ("leases_recovery", "recovery_is_not_emptied"),
    ("leases_archive", "archive_is_not_emptied"),
    ("leases_continuation", "continuation_is_not_emptied"),
)

_execute: Callable[[Any, Iterable[str]], None] = DatabaseOperations.execute_sql_flush


def _empty(self: BaseDatabaseOperations, sql_list: Iterable[str]) -> None:
    off = [f"ALTER TABLE {table} DISABLE TRIGGER {trigger};" for table, trigger in GUARDED]
    on = [f"ALTER TABLE {table} ENABLE ALWAYS TRIGGER {trigger};" for table, trigger in GUARDED]
    _execute(self, [*off, *sql_list, *on])


def allow() -> None:
    """Let Django's flush empty the tables, in this process."""
    DatabaseOperations.execute_sql_flush = _empty  # type: ignore[method-assign]
