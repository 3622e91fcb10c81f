"""A rehearsed E2B for each test, whose changes take no time and whose clock the test owns."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from providers.e2b.rehearsal import Rehearsal
from providers.rehearsing import running
from tests.providers.rehearsed import KEY, Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def server(clock: Clock) -> Iterator[Rehearsal]:
    with running(Rehearsal, clock=clock, transition=0.0) as server:
        server.world.add_key(KEY)
        yield server
