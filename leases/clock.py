"""The two clocks: the database's for every deadline, and the process's own for whether a call may still be sent."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime

from django.db import connection

Clock = Callable[[], float]

_BOOTTIME = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def boottime() -> float:
    """Return seconds since some fixed moment; never goes backwards.

    It counts the time in which the process was stopped or the machine slept, so that a process that was suspended
    knows how old its protection is. Injected where it decides something, so that tests own it.
    """
    return time.clock_gettime(_BOOTTIME)


def database_now() -> datetime:
    """Return the database's time at this moment (not at the start of the transaction)."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT clock_timestamp()")
        row = cursor.fetchone()
    now: datetime = row[0]
    return now
