"""Which of several beats works: the one whose session holds an advisory lock.

Answers for: at most one leader per database, at any time, by the database's word; a leader that dies is followed
within milliseconds (its session ends, the lock is free, the server wakes who waits); one that hangs with its session
alive is followed within a minute and a half. Whatever a leader writes, it writes on the session that holds the lock,
so that losing leadership is losing the power to write.
"""

from __future__ import annotations

import hashlib
import logging
from typing import Any

import psycopg

from cleanup import alarm

logger = logging.getLogger(__name__)

LOCK = "paperclip_env beat"
"""What the key of the lock is derived from: the first eight bytes of its SHA-256, as a signed number."""

KEY = int.from_bytes(hashlib.sha256(LOCK.encode()).digest()[:8], "big", signed=True)

# A session that waits for a lock holds a snapshot, which keeps dead rows from being removed; so it waits in turns.
TURN = "30s"

_HOLDERS = """
SELECT pid FROM pg_locks
 WHERE locktype = 'advisory' AND granted AND objsubid = 1
   AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
   AND ((classid::bigint << 32) | objid::bigint) = %(key)s
"""


def take(session: psycopg.Connection[Any]) -> bool:
    """Take the lock if it is free, without waiting."""
    row = session.execute("SELECT pg_try_advisory_lock(%s)", [KEY]).fetchone()
    return bool(row and row[0])


def wait(session: psycopg.Connection[Any]) -> bool:
    """Wait one turn for the lock; return whether it is ours. Between turns, look whether the leader still works."""
    session.execute(f"SET lock_timeout = '{TURN}'")
    try:
        session.execute("SELECT pg_advisory_lock(%s)", [KEY])
    except psycopg.errors.LockNotAvailable:
        _be_quick_again(session)
        overthrow_if_deaf(session)
        return False
    # Not in a `finally`: a process that is told to end leaves the wait with its statement still open.
    _be_quick_again(session)
    return True


def _be_quick_again(session: psycopg.Connection[Any]) -> None:
    session.execute("SET lock_timeout = '5s'")


def overthrow_if_deaf(session: psycopg.Connection[Any]) -> None:
    """End the leader's session when an alarm has long been due: it is connected, and hangs.

    It may come back at any moment; by then its session is gone, and with it the power to hint.
    """
    if not alarm.is_unheard(session):
        return
    for (pid,) in session.execute(_HOLDERS, {"key": KEY}).fetchall():
        logger.error("The leading beat hears no alarm (server process %s): ending its session.", pid)
        session.execute("SELECT pg_terminate_backend(%s)", [pid])
