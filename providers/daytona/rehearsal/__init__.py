"""A rehearsal of Daytona: its HTTP API from memory, with real states, real processes, and faults on demand.

It answers as `daytona-api-client` 0.226 and the public server source describe the service, to the extent that owning
sandboxes needs it; the service's own client is driven against it in the tests. `manage.py rehearse daytona` serves it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from providers.daytona.rehearsal.server import Rehearsal
from providers.daytona.rehearsal.world import World
from providers.rehearsing import Fault, Kind, running


@contextmanager
def rehearsing(**options: Any) -> Iterator[Rehearsal]:
    """Run a rehearsal in a thread of this process, in a directory that is thrown away. Options are the world's."""
    with running(Rehearsal, **options) as server:
        yield server


__all__ = ["Fault", "Kind", "Rehearsal", "World", "rehearsing"]
