"""The bound on one call's total time, by the monotonic clock."""

from __future__ import annotations

import time

from providers.contract import ErrorKind, ProviderError


class Deadline:
    """Made when a call begins; asked before every step that may take time."""

    def __init__(self, within: float) -> None:
        self.at = time.monotonic() + within

    @property
    def left(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.at - time.monotonic())

    @property
    def passed(self) -> bool:
        return time.monotonic() >= self.at

    def check(self, doing: str) -> None:
        """Raise `TIMEOUT` when the bound has passed."""
        if self.passed:
            raise ProviderError(ErrorKind.TIMEOUT, f"the bound on the call passed while {doing}")
