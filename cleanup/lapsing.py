"""When the holds of controllers have lapsed, and when nobody may say so: a pure function of facts, and their reader.

A controller that does not renew may be gone. It may as well be us who were away: then none of the fleet could renew,
and all of them seem to have lapsed at once. So a hold ends only a full length after the last gap of ours
(`leases.controllers.ENDS`); it is settled only some time after its end, so that what one cause ended is seen together;
and when that is an unlikely share of the fleet, nothing is settled and a person is asked. The table is in
`docs/controllers.md`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from django.db import connection

from leases.controllers import ENDS, LINGER, LIVE

MASS_LAPSE_FLOOR = 10
MASS_LAPSE_SHARE = 0.2
"""More than so many, and more than such a share of the controlled runs, within one length: not settled unasked."""

_PAGE = 100
"""Runs settled between two looks at the facts."""


@dataclass(frozen=True, slots=True)
class Facts:
    """The fleet at one moment, by the database's clock."""

    live: int
    """Live runs that a controller holds, or held."""
    lapsed: int
    """Those of them whose hold has ended."""
    lately: int = 0
    """Runs interrupted because their hold lapsed, at most one length of it ago, and since a person last decided."""
    due: tuple[UUID, ...] = ()
    """Those whose hold ended so long ago that they are to be settled now, the oldest first; not all where many are."""
    next_at: datetime | None = None
    """When the next is to be settled, None where none is controlled."""
    calm_until: datetime | None = None
    """Until then nothing lapses (after a failover); None where that is over."""
    asked: bool = False
    """A person has been asked about a mass lapse, and some of those runs are lapsed still."""


@dataclass(frozen=True, slots=True)
class Idle:
    """No live run is controlled."""


@dataclass(frozen=True, slots=True)
class Wait:
    until: datetime


@dataclass(frozen=True, slots=True)
class AskPerson:
    """An unlikely share lapsed at once. An outage of ours, or of theirs: a person says."""

    lapsed: int
    of: int


@dataclass(frozen=True, slots=True)
class Settle:
    runs: tuple[UUID, ...]


Decision = Idle | Wait | AskPerson | Settle


def decide(facts: Facts) -> Decision:
    """Return what to do about the fleet's holds."""
    if facts.live == 0 or facts.next_at is None:
        return Idle()
    if facts.calm_until is not None:
        return Wait(facts.calm_until)
    fleet, lapsed = facts.live + facts.lately, facts.lapsed + facts.lately
    if facts.lapsed and (facts.asked or is_unlikely(lapsed, fleet)):
        return AskPerson(lapsed, fleet)
    if facts.due:
        return Settle(facts.due)
    return Wait(facts.next_at)


def is_unlikely(lapsed: int, fleet: int) -> bool:
    """Return whether so many of a fleet hardly lapse at once each for a reason of its own."""
    return lapsed > max(MASS_LAPSE_FLOOR, MASS_LAPSE_SHARE * fleet)


# One look over the live runs that have a controller (`run_controlled`) and the few that lapsed lately (`run_lapsed`).
_READ = f"""
WITH fleet AS MATERIALIZED (
    SELECT r.id, ends.at AS ends_at, ends.at + %(linger)s * r.controller_seconds * interval '1 s' AS settles_at
      FROM leases_run r LEFT JOIN leases_installation i ON true
     CROSS JOIN LATERAL (SELECT {ENDS} AS at) ends
     WHERE r.status IN {LIVE} AND r.controller_expires_at IS NOT NULL
), due AS (
    SELECT id FROM fleet WHERE settles_at <= clock_timestamp() ORDER BY settles_at, id LIMIT %(page)s
)
SELECT count(*), count(*) FILTER (WHERE ends_at <= clock_timestamp()),
       (SELECT count(*) FROM leases_run r
         WHERE r.status = 'interrupted' AND r.controller_expires_at IS NOT NULL
           AND r.finished_at > now() - %(longest)s * interval '1 s'
           AND r.finished_at > now() - r.controller_seconds * interval '1 s'
           AND r.controller_expires_at <= r.finished_at
           AND r.finished_at > (SELECT coalesce(max(lapse_answered_at), '-infinity') FROM leases_installation)),
       array(SELECT id FROM due), min(settles_at),
       (SELECT max(calm_until) FROM leases_installation WHERE calm_until > clock_timestamp()),
       EXISTS (SELECT 1 FROM leases_installation WHERE lapse_asked_at IS NOT NULL)
  FROM fleet
"""  # noqa: S608 - constants


def read(*, longest: float) -> Facts:
    """Read the facts. `longest` is the longest hold there is, in seconds."""
    with connection.cursor() as cursor:
        cursor.execute(_READ, {"linger": LINGER, "longest": longest, "page": _PAGE})
        live, lapsed, lately, due, next_at, calm_until, asked = cursor.fetchone()
    return Facts(live, lapsed, lately, tuple(due), next_at, calm_until, asked)
