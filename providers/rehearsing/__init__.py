"""What a rehearsal of a provider's service is made of: a server that speaks its API from memory, and fails on demand.

A rehearsal of one service lives in `providers/<key>/rehearsal/`, subclasses `Rehearsal` and `World`, and is found by
that place (`catalogue`). Each sandbox is a directory and the processes started in it: files survive a stop, processes
do not. **It isolates nothing**: commands run as the user who runs the server.

All of it needs the standard library and nothing else. Processes are found by a mark in their environment, so what
clears its environment on purpose escapes; that is enough for a rehearsal, and not for a provider.
"""

from providers.rehearsing.catalogue import rehearsal, rehearsals
from providers.rehearsing.faults import Fault, Kind, Script
from providers.rehearsing.machine import Machine
from providers.rehearsing.server import Answer, Rehearsal, Request, Route, in_json, running
from providers.rehearsing.world import Box, Outcome, Refused, World, iso

__all__ = [
    "Answer",
    "Box",
    "Fault",
    "Kind",
    "Machine",
    "Outcome",
    "Refused",
    "Rehearsal",
    "Request",
    "Route",
    "Script",
    "World",
    "in_json",
    "iso",
    "rehearsal",
    "rehearsals",
    "running",
]
