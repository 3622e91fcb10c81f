"""A rehearsal of Daytona: its HTTP API from memory, with real states, real processes, and faults on demand.

It answers as `daytona-api-client` 0.226 and the public server source describe the service, to the extent that owning
sandboxes needs it. Each sandbox is a directory and the processes started in it: files survive a stop, processes do not.
**It isolates nothing**: commands run as the user who runs this server.

    python -m providers.daytona.rehearsal --port 8970

It needs the standard library and nothing else. Its own processes are found by a mark in their environment, so what
clears its environment on purpose escapes it; that is enough for a rehearsal, and not for a provider.
"""

from providers.daytona.rehearsal.faults import Fault, Kind
from providers.daytona.rehearsal.server import Rehearsal, rehearsing
from providers.daytona.rehearsal.world import World

__all__ = ["Fault", "Kind", "Rehearsal", "World", "rehearsing"]
