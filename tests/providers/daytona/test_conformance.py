"""The Daytona provider against the rehearsal server: the contract, and what is Daytona's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from providers import rehearsing
from providers.conformance import Harness, ProviderConformance
from providers.daytona.rehearsal import Rehearsal
from providers.rehearsing import running
from tests.providers.rehearsed import KEY, RehearsedHarness


@pytest.fixture(scope="module")
def server() -> Iterator[Rehearsal]:
    with running(Rehearsal, transition=0.02) as server:
        server.world.add_key(KEY)
        yield server


class DaytonaHarness(RehearsedHarness):
    key: ClassVar[str] = "daytona"
    rehearsal = Rehearsal
    absent = "00000000-0000-4000-8000-000000000000"

    def endpoint_of(self, server: rehearsing.Rehearsal[Any]) -> dict[str, Any]:
        return {"url": server.url}

    def deadline_config_data(self, seconds: int) -> dict[str, Any]:
        return {"lifetime_seconds": seconds}


class TestDaytonaConforms(ProviderConformance):
    @pytest.fixture
    def harness(self, server: Rehearsal) -> Harness:
        return DaytonaHarness(server)
