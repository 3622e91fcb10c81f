"""Whether this database is to be trusted: what is left undone while it may be a restored or copied one.

Read by everything that would change something at a provider or settle something on time alone. The verdict is made and
written by `cleanup.judging`, before anything is changed; here it is only read. A server that was started since the last
verdict is not trusted yet: restoring a database takes starting a server, and judging one takes a moment.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from django.db import connection

from leases.models import Installation, Lease, Obligation, Operation

Kind = Obligation.Kind

SERVER = (
    "(SELECT oid FROM pg_database WHERE datname = current_database()) || '/'"
    " || left(pg_walfile_name(pg_current_wal_lsn()), 8) || '/'"
    " || to_char(extract(epoch FROM pg_postmaster_start_time()), 'FM999999999990.000000')"
)
"""SQL: this database, its timeline, and the start of its server. Any role may ask. Whatever is restored starts anew."""

_READ = f"""
SELECT observing_since, observing_why, observed_mark_at, coalesce(calm_until > now(), false),
       judged_server IN ('', {SERVER})
  FROM leases_installation
"""  # noqa: S608 - constants


@dataclass(frozen=True, slots=True)
class Trust:
    """The verdict as the database has it. Times are the database's."""

    observing_since: datetime | None = None
    why: str = ""
    mark_at: datetime | None = None
    """What was released or made after it is this database's own doing."""
    is_calm: bool = False
    is_judged: bool = True
    """False: the server was started since the last verdict, and nobody has judged it yet."""

    @property
    def is_observing(self) -> bool:
        return self.observing_since is not None or not self.is_judged


class Observing(Exception):
    """Not done: this database is observing, or its server has not been judged yet."""


def read() -> Trust:
    """Return the verdict on this database. One statement; an installation that is yet to be made is trusted."""
    return _read("")


def is_observing() -> bool:
    """Return whether nothing of before the mark may be changed, settled or used again (issue: *observe*)."""
    return read().is_observing


def may_lapse(*, locked: bool = False) -> bool:
    """Return whether anything may end by the passing of time alone: a controller's hold, a leak's grace.

    Not for a while after a failover (`Installation.calm_until`), and not while observing. `locked`: and that stays so
    until the transaction ends (the row is the last in the order of locks).
    """
    trust = _read(" FOR SHARE") if locked else read()
    return not (trust.is_calm or trust.is_observing)


def forbids(trust: Trust, kind: str, *, lease: Lease | None = None, operation: Operation | None = None) -> bool:
    """Return whether an obligation of this kind is left alone by this verdict (the table is in `docs/operating.md`).

    Reads are not: probes, and the proof of old ends. What this database began by itself after the mark goes on: the
    teardown of a lease released since, the recovery of a creation asked for since, the deadlines of a lease acquired
    since. Everything else waits for a person's word.
    """
    if not trust.is_observing or kind in _READS:
        return False
    match kind:
        case Kind.TEARDOWN:
            since = lease.released_at if lease else None
        case Kind.EXTEND | Kind.END_LEASE:
            since = lease.acquired_at if lease else None
        case Kind.RECOVER_CREATION:
            since = operation.created_at if operation else None
        case _:
            return True
    return trust.mark_at is None or since is None or since <= trust.mark_at


def still_forbids(kind: str, *, lease: Lease | None = None, operation: Operation | None = None) -> bool:
    """Return what `forbids` says, with the verdict locked until the transaction ends: trust then comes after it.

    Locked before any obligation, as whoever gives trust does (the trigger wakes what is quiet by then).
    """
    return forbids(_read(" FOR SHARE"), kind, lease=lease, operation=operation)


def observing_label(why: str) -> str:
    """Return why this database is observing, as a clause for people."""
    return str(Installation.Observing(why).label) if why else "its server was started anew, and is still to be judged"


def sentence(why: str, since: datetime | None) -> str:
    """Return what everybody is told while this database observes."""
    told = f" since {since:%Y-%m-%d %H:%M:%S} UTC" if since else ""
    return (
        f"OBSERVING{told}: {observing_label(why)}. Nothing of before is stopped, destroyed, started or extended until "
        "a person says what this database is: manage.py trust_database"
    )


def _read(locking: str) -> Trust:
    with connection.cursor() as cursor:
        cursor.execute(_READ + locking)
        row = cursor.fetchone()
    return Trust(*row) if row else Trust()


_READS = frozenset({Kind.PROBE_ACCOUNT, Kind.VERIFY_END, Kind.STARTUP})
