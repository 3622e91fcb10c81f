"""The E2B provider against the rehearsal server: the contract."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from providers import rehearsing
from providers.conformance import Harness, ProviderConformance
from providers.e2b.rehearsal import Rehearsal
from providers.rehearsing import running
from tests.providers.rehearsed import KEY, RehearsedHarness


@pytest.fixture(scope="module")
def server() -> Iterator[Rehearsal]:
    with running(Rehearsal, transition=0.02) as server:
        server.world.add_key(KEY)
        yield server


class E2BHarness(RehearsedHarness):
    key: ClassVar[str] = "e2b"
    rehearsal = Rehearsal
    absent = "i" + "0" * 19

    def endpoint_of(self, server: rehearsing.Rehearsal[Any]) -> dict[str, Any]:
        return {"url": server.url, "sandbox_url": server.url}

    def deadline_config_data(self, seconds: int) -> dict[str, Any]:
        return {"lifetime_seconds": seconds}


class TestE2BConforms(ProviderConformance):
    @pytest.fixture
    def harness(self, server: Rehearsal) -> Harness:
        return E2BHarness(server)
