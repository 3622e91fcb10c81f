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
RECOVER = min(60.0, _LONGEST)
EXTEND = min(30.0, _LONGEST)
LIST = min(60.0, _LONGEST)
CREATE = 120.0
START = min(60.0, _LONGEST)
LONGEST_CALL = max(READ_SECRET, IDENTIFY, FIND, INSPECT, START, STOP, DELETE, RECOVER, EXTEND, LIST)

EXECUTE_OVERHEAD = 15.0
"""Added to a command's own timeout: what the provider may need to start it, to kill it, and to answer."""

SEND_MARGIN = LONGEST_CALL / 4
"""What must be left of a claim's protection, beyond the call's bound, when a call is sent."""

CREATE_MARGIN = 30.0
"""How long after the bound of a create its operation falls due, when nobody was heard of."""

READY = 300.0
"""For how long a created sandbox may go on starting before it is given up and destroyed."""

RESUME = 60.0
"""For how long the start of a stopped sandbox is tried (domain 6.1, 11.3); the pauses in between follow."""
RESUME_FIRST_PAUSE, RESUME_LONGEST_PAUSE = 0.25, 5.0

SAVE = min(settings.PAPERCLIP_SAVE_SECONDS, settings.PAPERCLIP_PROTECTION_SECONDS / 2)
"""For how long the files of one sandbox are read and written away at most."""
SAVING = SAVE + LONGEST_CALL + CREATE_MARGIN
"""How long the stop of a restarted sandbox waits for the saving of its files, whoever is heard of no more."""

START_OVER = RESUME + START + CREATE_MARGIN
"""Seconds after the journal of a start by which no call of it can be under way any more: the last is sent within its
patience, and bounded."""

SETUP_COMMAND = 300.0
"""The timeout of each set-up command of an acquire."""

WORK_LONGEST = 86_400.0
"""The longest timeout of one piece of work: past it, work whose worker died keeps its sandbox from nobody any more."""

AD_HOC_DEFAULT, AD_HOC_LONGEST = 3600.0, 86_400.0
"""When a lease without a run is released by itself, and the longest that a caller may ask for."""

HOLD_SHORTEST, HOLD_LONGEST = 10.0, 3600.0
"""How long a controller may hold a run without renewing."""

HISTORY_FIRST, HISTORY_LAST = 300.0, 6 * 3600.0
"""Seconds between two looks for the proof of an end that was never proven: as long as it was owed, within these."""

HISTORY_FOR = 7 * 86_400.0
"""Seconds after which a person is asked about an end that no look proved, and nothing looks any more by itself."""
