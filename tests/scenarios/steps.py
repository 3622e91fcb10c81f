"""The steps that scenarios are told in: what is given, what time passes, and what is seen afterwards."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.db import connection

import leases
from cleanup.claims import LANE, Selection
from cleanup.engine import Engine, Tally
from leases.models import ActivityEntry, Attempt, Environment, Lease, Obligation, Operation, Receipt
from leases.models.environments import Policy
from providers.contract import ErrorKind, ProviderError
from tests import factories
from tests.stage import Rehearsal


def acquired(rehearsal: Rehearsal, policy: str = Policy.EPHEMERAL, *, ad_hoc: bool = False) -> Lease:
    """An active lease of the rehearsal's run, or of nobody's, under this policy."""
    Environment.objects.filter(pk=rehearsal.environment.pk).update(policy=policy)
    run = None if ad_hoc else rehearsal.run.pk
    return leases.acquire(rehearsal.environment.pk, company_id=rehearsal.company.pk, run_id=run)


def released(rehearsal: Rehearsal, policy: str = Policy.EPHEMERAL, **how: Any) -> Lease:
    """A lease that was released, with nothing in flight."""
    return leases.release(acquired(rehearsal, policy).pk, **how)


def stop(rehearsal: Rehearsal) -> int:
    """The user's explicit Stop of the run."""
    return leases.stop(company_id=rehearsal.company.pk, run_id=rehearsal.run.pk, actor="user")


def retry(rehearsal: Rehearsal) -> int:
    """The user's explicit Retry of what the run owes."""
    return leases.retry(company_id=rehearsal.company.pk, run_id=rehearsal.run.pk, actor="user", reason="please")


def sweep(rehearsal: Rehearsal) -> dict[str, int]:
    """Sweep until nothing is due of the account and of what calls no provider, by engines of their own.

    Returns what came of the account's rows. What is in the built-in lane only looks at rows, each time that one
    changes; it is swept, and not counted here.
    """
    total = Tally()
    while (tally := Engine().sweep(rehearsal.account.pk)).claimed + sweep_lane().claimed:
        total.add(tally)
    return dict(total.outcomes)


def sweep_lane(*kinds: Obligation.Kind, limit: int | None = None) -> Tally:
    """Sweep what calls no provider: all that is due, or only of these kinds."""
    return Engine().sweep(LANE, selection=Selection(kinds=kinds), limit=limit)


def owed(subject: Lease | Operation) -> Obligation:
    """The newest obligation of a lease or an operation but the end of what is kept, as the database has it now."""
    return subject.obligations.exclude(kind=Obligation.Kind.DISPOSE).latest("pk")


def is_due(row: Obligation) -> bool:
    return Obligation.objects.filter(pk=row.pk, due_at__lte=factories.database_now()).exists()


def due_in(row: Obligation) -> float:
    """Seconds from now until the row is due, by the database's clock."""
    row.refresh_from_db()
    assert row.due_at is not None
    return float((row.due_at - factories.database_now()).total_seconds())


def falls_due(row: Obligation) -> None:
    """Let the time until the row's `due_at` pass, by moving the row: its drain's end comes as much nearer."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            UPDATE leases_obligation
               SET drain_until = drain_until - (greatest(due_at, now()) - now()) - interval '1 s',
                   due_at = least(due_at, now()) - interval '1 s'
             WHERE id = %s
            """,
            [row.pk],
        )


def owed_for(row: Obligation, seconds: float) -> None:
    """Let the row have been owed for so long."""
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE leases_obligation SET owed_since = now() - %s * interval '1 s' WHERE id = %s", [seconds, row.pk]
        )


def state(lease: Lease) -> str:
    lease.refresh_from_db()
    return str(lease.state)


def evidence(lease: Lease) -> list[str]:
    """What receipts of the lease say, oldest first."""
    return list(Receipt.objects.filter(lease=lease).order_by("pk").values_list("evidence", flat=True))


def attempts(row: Obligation) -> list[str]:
    """How the attempts at an obligation ended, oldest first."""
    return list(Attempt.objects.filter(obligation=row).order_by("claimed_at").values_list("outcome", flat=True))


def audited(action: str, subject: Any) -> int:
    return ActivityEntry.objects.filter(action=action, subject_id=str(subject.pk)).count()


def fails(kind: ErrorKind, **details: Any) -> Any:
    """A hook with which every call fails like this."""

    def raise_it(_: str) -> None:
        raise ProviderError(kind, **details)

    return raise_it


def snapshot() -> dict[str, list[Any]]:
    """Everything in our tables, to compare with later."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT tablename FROM pg_tables WHERE tablename LIKE 'leases\\_%' ORDER BY tablename")
        tables = [name for (name,) in cursor.fetchall()]
        contents = {}
        for table in tables:
            cursor.execute(f"SELECT to_jsonb(t)::text FROM {table} t ORDER BY 1")  # noqa: S608 - our tables' names
            contents[table] = cursor.fetchall()
    return contents


def moment(value: datetime | None) -> datetime:
    assert value is not None
    return value
