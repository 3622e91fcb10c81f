"""How long until something is tried again. Pure; the numbers are the design's (section 5)."""

from __future__ import annotations

from random import Random

from django.conf import settings

from leases.models.obligations import Obligation

PROTECTION: float = settings.PAPERCLIP_PROTECTION_SECONDS
"""Seconds for which a claimed row is left to its attempt, from the claim or its last renewal (15 min by default)."""
RENEW_EVERY = min(30.0, PROTECTION / 4)

COOLDOWN_FIRST = 30.0
COOLDOWN_LAST = 30 * 60.0
EXTEND_LAST = 60.0
"""Longest wait between two tries to move a provider's deadline: it does not wait for us."""
ESCALATE_AT_FAILURES = 5
ESCALATE_AFTER = 30 * 60.0
"""Seconds owed after which an obligation escalates, whatever the reason that it was not tried."""

BUSY_FIRST = 2.0
BUSY_LAST = 5 * 60.0

RATE_LIMIT_DEFAULT = 30.0
RATE_LIMIT_SHORTEST = 1.0
RATE_LIMIT_LONGEST = 60 * 60.0
"""A provider that names a longer wait is asked again after this; one answer must not close an account for a day."""

CIRCUIT_OPENS_AT = 5
"""Failures of the account in a row, of whatever rows, that open its circuit."""


def cooldown(failures: int, random: Random) -> float:
    """Return the seconds to wait after the failure that made the count `failures` (1 is the first).

    Exponential with jitter between 30 s and 30 min; exactly 30 min from the fifth on, without end.
    """
    if failures >= ESCALATE_AT_FAILURES:
        return COOLDOWN_LAST
    step: float = (COOLDOWN_LAST / COOLDOWN_FIRST) ** (1 / (ESCALATE_AT_FAILURES - 1))
    base: float = COOLDOWN_FIRST * step ** (max(failures, 1) - 1)
    return min(COOLDOWN_LAST, max(COOLDOWN_FIRST, base * random.uniform(0.75, 1.25)))


def busy(count: int, random: Random) -> float:
    """Return the seconds to wait after the `count`-th look (1 is the first) that found a transition in progress."""
    base = min(BUSY_LAST, BUSY_FIRST * 2.0 ** min(max(count, 1) - 1, 16))
    return min(BUSY_LAST, base * random.uniform(1.0, 1.25))


def longest(kind: str) -> float:
    """Return the seconds that an obligation of this kind waits at most between two tries, failed or busy."""
    return EXTEND_LAST if kind == Obligation.Kind.EXTEND else COOLDOWN_LAST
