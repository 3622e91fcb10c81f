"""Living through a broken database connection: what is written here is written again on a new one.

Only for statements that are safe to repeat when the COMMIT succeeded and its reply was lost; each caller says why.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from django.db import InterfaceError, OperationalError, connection
from psycopg.errors import DeadlockDetected

log = logging.getLogger(__name__)

T = TypeVar("T")

PATIENCE = 60.0
"""Seconds for which a restarting database is waited for. Far below a claim's protection."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0

LOST = (OperationalError, InterfaceError)


def persistently(work: Callable[[], T], *, patience: float = PATIENCE) -> T:
    """Do `work`, again on a new connection while the database is away, for at most `patience` seconds.

    Raises the last error when the patience ends, and at once one that is not about the connection (a lock timeout, a
    deadlock is tried again as well: nothing was written).
    """
    until = time.monotonic() + patience
    pause = _FIRST_PAUSE
    while True:
        try:
            return work()
        except LOST as error:
            if connection.in_atomic_block or time.monotonic() + pause > until:
                raise
            log.warning("database connection lost (%s); trying again in %.2f s", type(error).__name__, pause)
            connection.close()
            time.sleep(pause)
            pause = min(_LONGEST_PAUSE, pause * 2)


def despite_deadlocks(work: Callable[[], T], *, times: int = 3) -> T:
    """Do `work`, again where the database chose it as a deadlock's victim: nothing of it was written then.

    The order of locks leaves none among ourselves (`docs/model.md`); other hands lock rows too, a script or `psql`.
    Inside a caller's transaction there is nothing to repeat. Raises the last error after so many `times`.
    """
    for left in reversed(range(times)):
        try:
            return work()
        except OperationalError as error:
            if not left or connection.in_atomic_block or not isinstance(error.__cause__, DeadlockDetected):
                raise
            log.warning("a deadlock was broken at our cost; trying again")
    raise AssertionError("unreachable")
