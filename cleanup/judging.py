"""Judging the database before anything is changed, and moving its high-water mark on.

A process judges a server once for each connection that it opens, and asks outside only where that start of the server
was not judged before: so never periodically, and after every failover or restore, since both start a server. What comes
of it is written to the installation's row, where everybody reads it (`leases.trust`). The beat alone moves the mark on,
at each of its looks: in the database first, so that what is kept outside is never ahead of what the database knows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any
from uuid import UUID
from weakref import WeakSet

import psycopg
from django.db import connection

from cleanup import outside
from cleanup.watermark import UNKNOWN_SYSTEM, Facts, Failover, Fresh, Mark, Observe, Same, Unclear, Verdict, judge
from leases import trust
from leases.models import Installation

log = logging.getLogger(__name__)

CALM = timedelta(minutes=10)
"""After a failover: for so long no hold of a controller lapses, and no inventory deletes."""

Execute = Callable[[str, Mapping[str, Any]], tuple[Any, ...] | None]
"""Runs one statement, on the beat's session or on Django's connection, and returns its first row."""


@dataclass(frozen=True, slots=True)
class Known:
    """What the installation's row says, and the server that said it."""

    mark: UUID
    facts: Facts


_MAY_ASK = "SELECT has_function_privilege('pg_control_system()', 'EXECUTE')"
_SYSTEM = "(SELECT system_identifier::text FROM pg_control_system())"

_MADE = """
INSERT INTO leases_installation (id, "only", mark) VALUES (gen_random_uuid(), true, gen_random_uuid())
ON CONFLICT ("only") DO NOTHING
"""

_KNOWN = f"""
SELECT i.mark, i.watermark_generation, i.watermark_identity, i.watermark_timeline, i.watermark_position,
       i.watermark_at, i.watermark_outside, i.judged_server, i.observing_why,
       {{system}} || '/' || (SELECT oid FROM pg_database WHERE datname = current_database()),
       ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::bigint,
       (pg_current_wal_lsn() - '0/0')::bigint, clock_timestamp(), {trust.SERVER}
  FROM leases_installation i
"""  # noqa: S608 - constants

# Whoever judges first says so. What observes stays so: only a person ends it.
_JUDGED = """
UPDATE leases_installation
   SET judged_server = %(server)s, calm_until = now() + %(calm)s, gap_ended_at = now()
 WHERE observing_since IS NULL AND watermark_generation = %(generation)s AND judged_server <> %(server)s
RETURNING id
"""
_BEGUN = """
UPDATE leases_installation SET judged_server = %(server)s
 WHERE observing_since IS NULL AND watermark_generation = %(generation)s AND judged_server <> %(server)s
RETURNING id
"""
_OBSERVED = """
UPDATE leases_installation
   SET judged_server = %(server)s, observing_since = clock_timestamp(), observing_why = %(why)s,
       observed_mark_at = coalesce(%(mark_at)s::timestamptz, clock_timestamp())
 WHERE observing_since IS NULL AND watermark_generation = %(generation)s
RETURNING id
"""
# A server that an observing database is moved to was judged with it.
_SEEN = """
UPDATE leases_installation SET judged_server = %(server)s
 WHERE observing_since IS NOT NULL AND judged_server <> %(server)s
RETURNING id
"""

# SKIP LOCKED: a claim that holds the row at this moment delays no look; the next one moves the mark on. `greatest`,
# because the position is read once more by whoever comes second.
_ADVANCED = f"""
WITH mine AS (
    SELECT id FROM leases_installation
     WHERE observing_since IS NULL AND judged_server = {trust.SERVER}
       FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE leases_installation i
   SET watermark_identity = %(identity)s, watermark_timeline = %(timeline)s,
       watermark_position = greatest((pg_current_wal_lsn() - '0/0')::bigint, i.watermark_position),
       watermark_at = clock_timestamp(), watermark_outside = i.watermark_outside OR %(outside)s
  FROM mine WHERE i.id = mine.id
RETURNING i.mark, i.watermark_generation, i.watermark_identity, i.watermark_timeline, i.watermark_position,
          i.watermark_at
"""  # noqa: S608 - constants


# What every process does


def is_cleared() -> bool:
    """Judge the server of this thread's connection, once; return whether this process may work on it.

    True also where it observes, which `leases.trust` tells each step. False where this process cannot tell what the
    database is, and another has to: it is asked again the next time. Raises Django's `DatabaseError`.
    """
    connection.ensure_connection()
    server = connection.connection
    if server in _JUDGED_CONNECTIONS:
        return True
    if connection.in_atomic_block:
        return False  # a verdict is not a part of anybody's transaction
    verdict = pronounce(on_django, keeps=False)
    if isinstance(verdict, Unclear):
        return False
    _JUDGED_CONNECTIONS.add(server)
    return True


_JUDGED_CONNECTIONS: WeakSet[Any] = WeakSet()


def forget() -> None:
    """Judge every connection anew. For whoever has just given trust, and for tests."""
    _JUDGED_CONNECTIONS.clear()


def on_django(statement: str, values: Mapping[str, Any]) -> tuple[Any, ...] | None:
    with connection.cursor() as cursor:
        cursor.execute(statement, values)
        return cursor.fetchone() if cursor.description else None


def on_session(session: psycopg.Connection[Any]) -> Execute:
    """Return how the beat's session runs a statement."""

    def execute(statement: str, values: Mapping[str, Any]) -> tuple[Any, ...] | None:
        cursor = session.execute(statement, values)
        return cursor.fetchone() if cursor.description else None

    return execute


# The verdict


def pronounce(execute: Execute, *, keeps: bool) -> Verdict:
    """Judge the server and write the verdict. `keeps` says that this is the process that keeps the marks outside.

    The places outside are asked only for a start of the server that was not judged before, and by who keeps them.
    """
    known = read(execute)
    if known.facts.observing is None and (keeps or known.facts.server != known.facts.judged_server):
        known = _with_outside(known, keeps=keeps)
    verdict = judge(known.facts)
    _write(execute, known.facts, verdict)
    return verdict


def read(execute: Execute) -> Known:
    """Return what the database says of itself and of its server, without asking outside."""
    may_ask = execute(_MAY_ASK, {})
    system = _SYSTEM if may_ask and may_ask[0] else f"'{UNKNOWN_SYSTEM}'"
    statement = _KNOWN.format(system=system)
    row = execute(statement, {})
    if row is None:
        execute(_MADE, {})
        row = execute(statement, {})
    if row is None:
        raise AssertionError("an installation that was made is there")
    (mark, generation, identity, timeline, position, at, kept_outside, judged, why, *server) = row
    kept = None if position is None else Mark(generation, identity, timeline, position, at)
    return Known(
        mark,
        Facts(
            now=Mark(generation, *server[:4]),
            server=server[4],
            judged_server=judged,
            kept=kept,
            kept_outside=kept_outside,
            observing=Installation.Observing(why) if why else None,
        ),
    )


def _with_outside(known: Known, *, keeps: bool) -> Known:
    facts, heard_all = known.facts, True
    found: list[Mark] = []
    for ask in (outside.in_file, outside.in_broker):
        try:
            mark = ask(known.mark)
        except outside.Garbled as garbled:
            log.warning("the high-water mark: %s", garbled)  # it tells nothing, as if it were not there
        except outside.Silent as silent:
            log.warning("the high-water mark: %s", silent)
            # The file is the beat's. Who else cannot read it has the broker to go by, or waits for the beat.
            heard_all = heard_all and ask is outside.in_file and not keeps
        else:
            found += [mark] if mark is not None else []
    return Known(known.mark, replace(facts, outside=tuple(found), heard_all=heard_all, keeps=keeps))


def _write(execute: Execute, facts: Facts, verdict: Verdict) -> None:
    values = {"server": facts.server, "generation": facts.now.generation, "calm": CALM}
    match verdict:
        case Fresh():
            execute(_BEGUN, values)
        case Failover():
            if execute(_JUDGED, values):
                log.warning("the database's server was started anew or taken over; no hold lapses for %s", CALM)
        case Observe(why=why, mark_at=mark_at):
            execute(_OBSERVED, values | {"why": why.value, "mark_at": mark_at})
            execute(_SEEN, values)
            log.error("%s", trust.sentence(why.value, None))
        case Unclear() if not facts.keeps:  # the beat, which asks again soon, says it once
            log.error(
                "this process cannot tell whether the database is a restored or copied one: no high-water mark is in "
                "its reach. Nothing is done here until the beat has judged it (or `manage.py trust_database`)"
            )
        case Same() | Unclear():
            pass


# The mark


def advance(execute: Execute, identity: str, timeline: int, *, kept_outside: bool) -> tuple[UUID, Mark] | None:
    """Move the mark on in the database and return it, to be kept outside; None while observing or where it is locked.

    `kept_outside` says that an earlier one was kept there.
    """
    row = execute(_ADVANCED, {"identity": identity, "timeline": timeline, "outside": kept_outside})
    return None if row is None else (row[0], Mark(*row[1:]))


def gap_ended(execute: Execute) -> None:
    """Note that nobody may have been there until now: holds stand one full length from here (design 5)."""
    execute("UPDATE leases_installation SET gap_ended_at = now()", {})
