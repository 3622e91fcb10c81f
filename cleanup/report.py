"""What is owed, as one consistent snapshot: read-only, and changes nothing."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any

from django.db import connection

from leases import holds, proof, trust
from leases.models import Obligation
from leases.ownership import SHOWN, Ownership, next_due, ownership
from leases.snapshot import snapshot
from leases.unfinished import Unfinished, unfinished

__all__ = ["DEBTS_SHOWN", "KindReport", "Report", "next_due", "owed"]

_PER_KIND = """
SELECT kind,
       count(*) AS open,
       count(*) FILTER (WHERE attempt_id IS NOT NULL AND due_at > now()) AS in_flight,
       count(*) FILTER (WHERE attempt_id IS NULL AND due_at > now() AND failures + busy_count > 0) AS cooling,
       count(*) FILTER (WHERE due_at <= now()) AS due,
       count(*) FILTER (WHERE escalated_at IS NOT NULL) AS escalated,
       count(*) FILTER (WHERE quiet NOT IN ('', 'waiting')) AS quiet,
       count(*) FILTER (WHERE quiet = 'waiting') AS waiting,
       -- What is owed at a later time (a deadline that is to be moved) is not old yet.
       min(owed_since) FILTER (WHERE owed_since <= now()) AS oldest,
       min(due_at) FILTER (WHERE attempt_id IS NULL) AS next_due
  FROM leases_obligation WHERE closed_at IS NULL GROUP BY kind
"""

_QUIET = """
SELECT kind, quiet, count(*) FROM leases_obligation WHERE closed_at IS NULL AND quiet NOT IN ('', 'waiting')
GROUP BY kind, quiet ORDER BY kind, quiet
"""

_ACCOUNTS = """
SELECT a.id, a.name, a.provider, a.circuit, a.blocked_until, count(o.id)
  FROM leases_provideraccount a
  JOIN leases_obligation o ON o.account_id = a.id AND o.closed_at IS NULL AND o.kind <> 'probe_account'
 WHERE a.circuit = 'open' OR a.blocked_until > now()
 GROUP BY a.id ORDER BY a.name
"""

DEBTS_SHOWN = 10
"""Debts without proof that a report names, the newest."""


@dataclass(frozen=True, slots=True)
class KindReport:
    """One kind of obligation. Times are the database's; None where there is none."""

    kind: str
    open: int = 0
    in_flight: int = 0
    cooling: int = 0
    due: int = 0
    escalated: int = 0
    quiet: int = 0
    """Needs a person."""
    waiting: int = 0
    """Woken when what it waits for ends; nothing to decide."""
    oldest: datetime | None = None
    next_due: datetime | None = None
    quiet_because: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Report:
    at: datetime
    kinds: tuple[KindReport, ...]
    blocked_accounts: tuple[dict[str, Any], ...]
    unverified: int
    """Obligations that an operator ended and that nothing proved since: the debt that stays visible."""
    debts: tuple[dict[str, Any], ...]
    """The newest of these."""
    trust: dict[str, Any]
    """Whether this database observes, since when and why: then most of what is owed waits for a person's word."""
    ownership: Ownership
    """Whose each sandbox is, what keeps it until when, and what that costs."""
    unfinished: Unfinished
    """What may run unseen, which recoveries of files run, and which continuations wait for what."""

    def as_json(self) -> dict[str, Any]:
        """Return plain values. What only a write ends has no `until` (null)."""
        told = asdict(self)
        for group in told["ownership"]["groups"]:
            for sandbox in group["sandboxes"]:
                sandbox["releasable"] = sandbox["due_at"] is not None and sandbox["due_at"] <= self.at
                for reason in sandbox["reasons"]:
                    reason["until"] = None if reason["until"] == holds.FOREVER else reason["until"]
        return told


def owed(*, shown: int | None = SHOWN) -> Report:
    """Return what is owed now, and of each kind of sandbox the first `shown` (None: all) by name.

    Raises Django's `DatabaseError` only.
    """
    with snapshot(), connection.cursor() as cursor:
        cursor.execute("SELECT now()")
        (at,) = cursor.fetchone()
        cursor.execute(_QUIET)
        because: dict[str, dict[str, int]] = {}
        for kind, why, count in cursor.fetchall():
            because.setdefault(kind, {})[why] = count
        cursor.execute(_PER_KIND)
        rows = {row[0]: KindReport(*(*row, because.get(row[0], {}))) for row in cursor.fetchall()}
        cursor.execute(_ACCOUNTS)
        blocked = tuple(
            {
                "id": str(pk),
                "name": name,
                "provider": provider,
                "circuit": circuit,
                "blocked_until": until,
                "open": count,
            }
            for pk, name, provider, circuit, until, count in cursor.fetchall()
        )
        unproven = proof.unproven()
        unverified = unproven.count()
        debts = tuple(
            {
                "obligation": row.pk,
                "kind": row.kind,
                "lease": str(row.lease_id) if row.lease_id else None,
                "operation": str(row.operation_id) if row.operation_id else None,
                "run": str(row.run_id) if row.run_id else None,
                "closed_at": row.closed_at,
            }
            for row in unproven.order_by("-closed_at")[:DEBTS_SHOWN]
        )
        for kind in _SETTLED:  # a look at one of these is no event: what it leads to is
            if kind in rows:
                rows[kind] = replace(rows[kind], next_due=next_due(kind))
        standing = trust.read()
        trusted = {
            "observing": standing.is_observing,
            "since": standing.observing_since,
            "why": standing.why,
            "mark_at": standing.mark_at,
        }
        kept = ownership(shown=shown)
        after = unfinished(shown=shown)
    kinds = tuple(rows.get(kind, KindReport(kind)) for kind in Obligation.Kind.values)
    return Report(at, kinds, blocked, unverified, debts, trusted, kept, after)


_SETTLED = (Obligation.Kind.DISPOSE, Obligation.Kind.SETTLE_ORPHAN)
