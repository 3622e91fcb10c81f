"""A rehearsal of E2B: its HTTP API from memory, with real states, real processes, and faults on demand.

It answers as the `e2b` SDK 2.63 and the public server source describe the service, to the extent that owning sandboxes
needs it, and stands for the agents in its sandboxes too. What a rehearsal is: `providers.rehearsing`.

    python manage.py rehearse e2b --port 8971
"""

from providers.e2b.rehearsal.server import Rehearsal
from providers.e2b.rehearsal.world import World

__all__ = ["Rehearsal", "World"]
