"""For how long, by which clock and with which pauses a living caller waits for a provider."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from leases import bounds
from leases.clock import Clock, boottime
from providers.contract import ErrorKind

TRANSIENT = frozenset(
    {ErrorKind.RATE_LIMITED, ErrorKind.SERVER, ErrorKind.CONNECTION, ErrorKind.TIMEOUT, ErrorKind.BUSY}
)
"""Failures that may pass, so that the same is asked again within the patience (domain 11.3)."""


@dataclass(slots=True)
class Patience:
    """`begin`, then `wait` while it is not over: 250 ms, doubling to 5 s, each times 0.75 to 1.25 (domain 6.1)."""

    clock: Clock = boottime
    pause: Callable[[float], None] = time.sleep
    random: Random = field(default_factory=Random)
    until: float = 0.0
    _next: float = bounds.RESUME_FIRST_PAUSE

    def begin(self, seconds: float, *, since: float | None = None) -> None:
        """Be patient for so many seconds from now, or from the moment `since`, by the same clock."""
        self.until = (self.clock() if since is None else since) + seconds
        self._next = bounds.RESUME_FIRST_PAUSE

    @property
    def is_over(self) -> bool:
        return self.clock() >= self.until

    def wait(self) -> None:
        """Pause once, and never beyond the end."""
        seconds = self._next * self.random.uniform(0.75, 1.25)
        self._next = min(2 * self._next, bounds.RESUME_LONGEST_PAUSE)
        self.pause(max(0.0, min(seconds, self.until - self.clock())))
