"""Time that passes: every deadline in the database is moved into the past, past the triggers, as time does it.

`passes` lets it pass as it does while the system is up: up to each deadline, and what falls due is worked on then.
`outage` lets it pass with everything of ours away. Tables are altered, so nobody else may be at work on them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from uuid import UUID

from django.db import connection, transaction
from django.db.models import Min

from leases.models import Obligation

_DEADLINES = {
    "leases_run": ("controller_expires_at", "finished_at", "controller_gave_up_at"),
    "leases_lease": ("kept_until", "expires_at", "ends_at", "released_at", "may_be_running_since"),
    "leases_hold": ("until",),
    "leases_obligation": ("due_at", "owed_since", "not_before", "drain_until", "claimed_at", "absent_since"),
    "leases_installation": ("gap_ended_at", "calm_until"),
    "leases_bridgeactivity": ("deadline",),
    "leases_operation": ("created_at",),
    "leases_recovery": ("next_attempt_at", "ends_at"),
    "leases_attempt": ("announced_at",),
}
_OPEN = {"leases_obligation": "closed_at IS NULL", "leases_hold": "ended_at IS NULL"}


def shift(seconds: float, *, renewing: Collection[UUID] = (), only: Collection[str] = tuple(_DEADLINES)) -> None:
    """Move every deadline so much nearer, or those of `only` these tables.

    The runs of `renewing` are held by controllers that go on renewing.
    """
    with _without_triggers(), connection.cursor() as cursor:
        for table, columns in _DEADLINES.items():
            if table not in only:
                continue
            sets = ", ".join(f"{column} = {column} - %(s)s * interval '1 s'" for column in columns)
            where = _OPEN.get(table, "true")
            if table == "leases_run":
                where = "NOT (id = ANY(%(renewing)s::uuid[]))"
            cursor.execute(
                f"UPDATE {table} SET {sets} WHERE {where}",  # noqa: S608 - constants
                {"s": seconds, "renewing": [str(pk) for pk in renewing]},
            )


def passes(seconds: float, work: Callable[[], None], *, renewing: Callable[[], Collection[UUID]] = tuple) -> None:
    """Let time pass with the system up: at each deadline `work` is called, which works on what is due."""
    left = seconds
    work()
    while (due_in := next_due_in()) is not None and due_in <= left:
        shift(max(due_in, 0.0) + 0.001, renewing=renewing())
        left -= max(due_in, 0.0)
        work()
    shift(left, renewing=renewing())
    work()


def next_due_in() -> float | None:
    """Return the seconds until the next open obligation is due, None where none has a deadline."""
    first = Obligation.objects.filter(closed_at__isnull=True).aggregate(at=Min("due_at"))["at"]
    if first is None:
        return None
    with connection.cursor() as cursor:
        cursor.execute("SELECT extract(epoch FROM %s - clock_timestamp())::float8", [first])
        return float(cursor.fetchone()[0])


@contextmanager
def _without_triggers() -> Iterator[None]:
    with transaction.atomic(), connection.cursor() as cursor:
        for table in _DEADLINES:
            cursor.execute(f"ALTER TABLE {table} DISABLE TRIGGER USER")
        yield
        for table in _DEADLINES:
            # One by one: `ENABLE ALWAYS TRIGGER USER` does not exist.
            cursor.execute("SELECT tgname FROM pg_trigger WHERE tgrelid = %s::regclass AND NOT tgisinternal", [table])
            for (name,) in cursor.fetchall():
                cursor.execute(f'ALTER TABLE {table} ENABLE ALWAYS TRIGGER "{name}"')
