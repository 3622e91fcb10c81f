"""Bounds on the total time of provider calls, in seconds, and the margins around them.

Any call of a worker ends within `LONGEST_CALL`. The protection of a claim (15 min) is far above it; the Celery time
limits and the broker's visibility timeout are derived from it in the settings.
"""

from __future__ import annotations

from django.conf import settings

_LONGEST: float = settings.PAPERCLIP_CALL_SECONDS

READ_SECRET = min(10.0, _LONGEST)
IDENTIFY = min(10.0, _LONGEST)
FIND = min(20.0, _LONGEST)
INSPECT = min(30.0, _LONGEST)  # the domain's liveness bound (5.1)
STOP = min(30.0, _LONGEST)  # the domain's bound on an explicit stop (5.1)
STOP_GRACE = min(10.0, STOP / 3)
DELETE = min(60.0, _LONGEST)
CREATE = 120.0
LONGEST_CALL = max(READ_SECRET, IDENTIFY, FIND, INSPECT, STOP, DELETE)

EXECUTE_OVERHEAD = 15.0
"""Added to a command's own timeout: what the provider may need to start it, to kill it, and to answer."""

SEND_MARGIN = LONGEST_CALL / 4
"""What must be left of a claim's protection, beyond the call's bound, when a call is sent."""

CREATE_MARGIN = 30.0
"""How long after the bound of a create its operation falls due, when nobody was heard of."""
