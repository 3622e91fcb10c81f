"""A rehearsed Daytona for each test, whose clock the test owns, and the adapter that talks to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from providers.contract import MARK_INSTALLATION, Command
from providers.daytona import DaytonaProvider
from providers.daytona.rehearsal import Rehearsal, rehearsing
from providers.daytona.schemas import DaytonaConfig, DaytonaEndpoint
from tests.providers.rehearsed import KEY, Clock

WITHIN = 20.0
MARKS = {MARK_INSTALLATION: "daytona-tests"}


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def server(clock: Clock) -> Iterator[Rehearsal]:
    """A service whose transitions take no time, unless a test says otherwise."""
    with rehearsing(clock=clock, transition=0.0) as server:
        server.world.add_key(KEY)
        yield server


@pytest.fixture
def daytona(server: Rehearsal) -> DaytonaProvider:
    return DaytonaProvider(DaytonaEndpoint(url=server.url), KEY)


@pytest.fixture
def create(daytona: DaytonaProvider) -> Callable[..., str]:
    def create(name: str = "box", **config: Any) -> str:
        return daytona.create(name, MARKS, DaytonaConfig(**config), within=WITHIN).resource.resource_id

    return create


def busy_with_work(daytona: DaytonaProvider, server: Rehearsal, sandbox: str) -> None:
    """Start a daemon in a sandbox."""
    script = "(setsid sleep 5000 </dev/null >/dev/null 2>&1 &) ; exit 0"
    daytona.execute(sandbox, Command(("sh", "-c", script), timeout=5), within=WITHIN)
    assert server.world.executing(sandbox)
