"""The clock by which a worker decides whether a call may still be sent.

It counts the time in which the process was stopped or the machine slept (`CLOCK_BOOTTIME`), so that a worker that was
suspended knows how old its protection is. Injected, so that tests own it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]

_BOOTTIME = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def boottime() -> float:
    """Return seconds since some fixed moment; never goes backwards."""
    return time.clock_gettime(_BOOTTIME)
