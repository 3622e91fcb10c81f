"""When somebody has to look at obligations again: one statement, and the hint that goes with it.

Answers for: which accounts have work that a claim would take now, the built-in lane among them, and the earliest
moment at which that changes by time alone. What changes it earlier is a write, and writes notify (`docs/idle.md`).
Compares by the database's clock only; reads open rows only, through partial indexes, so that closed history costs
nothing.

The alarm of an account is `greatest(earliest, flight, blocked_until, hinted_until)`:

- `earliest` is the earliest `due_at` of its open rows. A claimed row's `due_at` is the end of its protection, so a
  crashed worker needs no case of its own. An account whose circuit is open is asked by its probe alone: only that row
  counts, as in the claim; without an open probe it has no alarm. Verification of history counts from the first end of
  a protection, while as much of it is in flight as the claim allows.
- `flight` is the earliest end of a protection in flight, and counts only while the account is full (as many protected
  claims as its limit): a claim made before would find no room.
- `blocked_until` holds the probe too. It is the provider's own Retry-After; a probe is a call like any other, and
  calling before it prolongs the block at providers that count refused calls.
- `hinted_until` says that a hint is on its way. A lost hint is repeated when it lapses, a delivered one does not
  spin.

The built-in lane, of the rows that name no account, has the same alarm without what only an account has: no circuit
and no `blocked_until`. Its hint is on the row of the installation, and it stands as `LANE` among the accounts. While
that row is not there, nothing is owed in the lane (`obligation_of_lane_makes_it`).

An alarm is never earlier than the claim's own rule, so a hint that rings finds something to claim, or another took
it.

A full account may get room before `flight`, when its claims settle, and closing a row notifies nobody (it would
serialise commits for a case that is rare). The sweep that settles goes on claiming by itself; should it die first,
`look_at` says when to look without hinting: while something waits behind a full account, `RECHECK` after the last
look. Nothing waits, nothing looks.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import psycopg
from django.db import connection

from cleanup.claims import LANE, LANE_LIMIT, VERIFICATION_SHARE

HINT_LASTS = timedelta(seconds=10)
"""How long a hint is given before it counts as lost."""

RECHECK = timedelta(seconds=30)
"""How soon room behind a full account is found when nobody told."""

OVERDUE = timedelta(seconds=60)
"""An alarm this old has not been heard: a leader moves each one on by `HINT_LASTS`, even while the broker is away."""

# One probe of `obligation_due`, of `obligation_verified` and of `obligation_claimed` per account. The circuit excludes
# two branches or the last (a one-time filter), and the last reads `obligation_is_one_per_account_and_kind`, so that a
# thousand rows behind an open circuit are not read to find its probe.
_OF_ACCOUNTS = """
    SELECT a.id,
           greatest(work.due_at, flight.ends_at, a.blocked_until, a.hinted_until) AS alarm,
           CASE WHEN flight.ends_at IS NULL
                THEN greatest(work.due_at, a.blocked_until, a.hinted_until)
                ELSE greatest(least(flight.ends_at, greatest(work.due_at, now() + %(recheck)s::interval)),
                              a.blocked_until, a.hinted_until)
           END AS look_at
      FROM leases_provideraccount a
     CROSS JOIN LATERAL (
         SELECT min(due_at) AS due_at FROM (
             (SELECT o.due_at
                FROM leases_obligation o
               WHERE a.circuit = 'closed' AND o.account_id = a.id AND o.due_at IS NOT NULL AND o.kind <> 'verify_end'
               ORDER BY o.due_at
               LIMIT 1)
             UNION ALL
             (SELECT greatest(v.due_at, (
                         SELECT min(w.due_at)
                           FROM leases_obligation w
                          WHERE w.account_id = a.id AND w.attempt_id IS NOT NULL AND w.due_at > now()
                            AND w.kind = 'verify_end'
                         HAVING count(*) >= greatest(1, a.concurrency_limit / %(share)s)))
                FROM leases_obligation v
               WHERE a.circuit = 'closed' AND v.account_id = a.id AND v.due_at IS NOT NULL AND v.kind = 'verify_end'
               ORDER BY v.due_at
               LIMIT 1)
             UNION ALL
             (SELECT p.due_at
                FROM leases_obligation p
               WHERE a.circuit = 'open' AND p.probed_account_id = a.id AND p.kind = 'probe_account'
                 AND p.closed_at IS NULL AND p.due_at IS NOT NULL)
         ) kinds
     ) work
      LEFT JOIN LATERAL (
         SELECT min(f.due_at) AS ends_at
           FROM leases_obligation f
          WHERE a.circuit = 'closed' AND f.account_id = a.id AND f.attempt_id IS NOT NULL AND f.due_at > now()
            AND f.kind <> 'probe_account'
         HAVING count(*) >= a.concurrency_limit
     ) flight ON true
     WHERE work.due_at IS NOT NULL
"""  # greatest(), least() and min() ignore NULL

_OF_LANE = """
    SELECT %(lane)s::uuid,
           greatest(work.due_at, flight.ends_at, i.hinted_until) AS alarm,
           CASE WHEN flight.ends_at IS NULL
                THEN greatest(work.due_at, i.hinted_until)
                ELSE greatest(least(flight.ends_at, greatest(work.due_at, now() + %(recheck)s::interval)),
                              i.hinted_until)
           END AS look_at
      FROM leases_installation i
     CROSS JOIN LATERAL (
         SELECT o.due_at
           FROM leases_obligation o
          WHERE o.account_id IS NULL AND o.due_at IS NOT NULL AND o.kind <> 'verify_end'
          ORDER BY o.due_at
          LIMIT 1
     ) work
      LEFT JOIN LATERAL (
         SELECT min(f.due_at) AS ends_at
           FROM leases_obligation f
          WHERE f.account_id IS NULL AND f.attempt_id IS NOT NULL AND f.due_at > now()
         HAVING count(*) >= %(lane_limit)s
     ) flight ON true
"""

ALARMS = f"{_OF_ACCOUNTS} UNION ALL {_OF_LANE}"

NEXT_ALARM = f"SELECT min(alarm) FROM ({ALARMS}) alarms"  # noqa: S608 -- constants

# Hint what is due and say when to look next, in one statement and so from one snapshot.
#
# SKIP LOCKED: an account row that a claim holds at this moment delays no other account; its alarm stays in the past and
# is met at the next look. `hinted_until` is compared once more on the locked row: PostgreSQL evaluates that condition
# again on the newest version, so of two that ring at once only one hints, whatever the lock of the leader says.
RING = f"""
WITH alarms AS MATERIALIZED ({ALARMS}),
due AS (
    SELECT a.id, alarms.alarm
      FROM alarms JOIN leases_provideraccount a ON a.id = alarms.id
     WHERE alarms.alarm <= now() AND (a.hinted_until IS NULL OR a.hinted_until <= now())
       FOR NO KEY UPDATE OF a SKIP LOCKED
), due_lane AS (
    SELECT i.id, alarms.alarm
      FROM alarms JOIN leases_installation i ON alarms.id = %(lane)s::uuid
     WHERE alarms.alarm <= now() AND (i.hinted_until IS NULL OR i.hinted_until <= now())
       FOR NO KEY UPDATE OF i SKIP LOCKED
), hinted_accounts AS (
    UPDATE leases_provideraccount a SET hinted_until = now() + %(lasts)s::interval
      FROM due WHERE a.id = due.id
    RETURNING a.id, due.alarm
), hinted_lane AS (
    UPDATE leases_installation i SET hinted_until = now() + %(lasts)s::interval
      FROM due_lane WHERE i.id = due_lane.id
    RETURNING %(lane)s::uuid AS id, due_lane.alarm
), hinted AS (
    SELECT id, alarm FROM hinted_accounts UNION ALL SELECT id, alarm FROM hinted_lane
)
SELECT array(SELECT id FROM hinted ORDER BY alarm),
       extract(epoch FROM (
           SELECT min(CASE WHEN hinted.id IS NULL THEN alarms.look_at ELSE now() + %(lasts)s::interval END)
             FROM alarms LEFT JOIN hinted ON hinted.id = alarms.id
       ))::float8,
       extract(epoch FROM clock_timestamp())::float8
"""  # noqa: S608 -- constants

# Is there an alarm that nobody heard? An account row that somebody holds locked is left out: its alarm is old because
# RING skips it, and no new leader would change that.
_UNHEARD = f"""
WITH old AS MATERIALIZED (
    SELECT id FROM ({ALARMS}) alarms WHERE alarm < now() - %(overdue)s::interval
), accounts AS (
    SELECT a.id FROM old JOIN leases_provideraccount a ON a.id = old.id FOR NO KEY UPDATE OF a SKIP LOCKED
), lane AS (
    SELECT i.id FROM old JOIN leases_installation i ON old.id = %(lane)s::uuid FOR NO KEY UPDATE OF i SKIP LOCKED
)
SELECT EXISTS (SELECT 1 FROM accounts) OR EXISTS (SELECT 1 FROM lane)
"""  # noqa: S608 -- constants

VALUES: dict[str, Any] = {
    "recheck": RECHECK,
    "lasts": HINT_LASTS,
    "overdue": OVERDUE,
    "lane": LANE,
    "lane_limit": LANE_LIMIT,
    "share": VERIFICATION_SHARE,
}


@dataclass(frozen=True, slots=True)
class Rung:
    """What one look found. Times are seconds since 1970 by the database's clock."""

    hinted: tuple[UUID, ...]
    """Accounts to send a hint for, the longest due first, with `LANE` among them; their `hinted_until` is committed."""
    look_at: float | None
    """When to look again, None: nothing is owed. In the past where an account row was locked."""
    now: float


def hint_due(session: psycopg.Connection[Any]) -> Rung:
    """Mark every account whose alarm has come as hinted, and return them and the next alarm.

    `session` is in autocommit: what is returned is committed, and a crash before the hint is sent costs `HINT_LASTS`.
    """
    row = session.execute(RING, VALUES).fetchone()
    if row is None:
        raise AssertionError("a SELECT without FROM returns a row")
    return Rung(hinted=tuple(row[0]), look_at=row[1], now=row[2])


def is_unheard(session: psycopg.Connection[Any]) -> bool:
    """Return whether an alarm has been due for longer than `OVERDUE`: whoever should ring does not."""
    row = session.execute(_UNHEARD, VALUES).fetchone()
    return bool(row and row[0])


def next_alarm() -> datetime | None:
    """Return the earliest alarm over all accounts and the built-in lane, or None when nothing is owed.

    For reports; the beat has its own.
    """
    with connection.cursor() as cursor:
        cursor.execute(NEXT_ALARM, VALUES)
        row = cursor.fetchone()
    return row[0] if row else None
