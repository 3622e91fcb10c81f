"""How many provider calls this process may have in flight, shared out so that one account cannot take all of them."""

from __future__ import annotations

import threading

from django.conf import settings

SHARES = 4
"""No sweep holds more than one part in this many, so that a slow account leaves room for the others."""


class Slots:
    """A count of free places. Thread-safe."""

    def __init__(self, count: int) -> None:
        self._free = count
        self.share = max(1, count // SHARES)
        self._lock = threading.Lock()

    def take(self, want: int) -> int:
        """Take up to `want` and return how many."""
        with self._lock:
            taken = max(0, min(want, self._free))
            self._free -= taken
            return taken

    def give_back(self, count: int = 1) -> None:
        with self._lock:
            self._free += count


SLOTS = Slots(settings.PAPERCLIP_CALLS_IN_FLIGHT)
"""The process's own."""
