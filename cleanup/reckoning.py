"""The database's clock, reckoned between looks at it, so that waiting for its deadlines takes no statement.

Answers for: a deadline of the database turned into seconds to wait. Two local clocks carry the last reading on: the
wall clock, which a correction of time moves together with a database on the same or a well-kept machine, and the one
that only counts (suspension included). A deadline has come when either says so: to look too early costs one
statement, which reads the database's clock again.
"""

from __future__ import annotations

import time

from leases.clock import boottime


class Reckoning:
    def __init__(self) -> None:
        self._wall = 0.0
        self._counted = 0.0

    def observe(self, now: float) -> None:
        """Take the database's time, right after it was received: late by the way back, so never ahead of it."""
        self._wall = now - time.time()
        self._counted = now - boottime()

    def until(self, moment: float) -> float:
        """Return the seconds until a moment of the database's clock; zero or less when it has come."""
        return min(moment - self._wall - time.time(), moment - self._counted - boottime())
