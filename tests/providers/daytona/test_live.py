"""The Daytona provider at the real service, with small sandboxes. Only with a key in the environment: it costs money.

`DAYTONA_API_KEY`, and optionally `DAYTONA_API_URL` and `DAYTONA_TARGET` as the service's own client reads them. What it
makes is deleted after each test, and the service destroys it after twenty minutes whatever happens here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from providers.conformance import Harness, ProviderConformance, Sandboxes
from tests.providers.live import LiveHarness, live, lives_once

if TYPE_CHECKING:
    from daytona import Daytona

KEY = os.environ.get("DAYTONA_API_KEY")
URL = os.environ.get("DAYTONA_API_URL", "https://app.daytona.io/api")
TARGET = os.environ.get("DAYTONA_TARGET")
pytestmark = live("DAYTONA_API_KEY")


class DaytonaLiveHarness(LiveHarness):
    key: ClassVar[str] = "daytona"

    @cached_property
    def client(self) -> Daytona:
        from daytona import Daytona, DaytonaConfig

        return Daytona(DaytonaConfig(api_key=KEY, api_url=URL, target=TARGET))

    def endpoint_data(self) -> dict[str, Any]:
        return {"url": URL}

    def config_data(self) -> dict[str, Any]:
        return {"lifetime_seconds": 1200, **({"target": TARGET} if TARGET else {})}

    def deadline_config_data(self, seconds: int) -> dict[str, Any]:
        return {**self.config_data(), "lifetime_seconds": seconds}

    def secret(self) -> str | None:
        return KEY

    def shell_status(self, resource_id: str, script: str) -> int | None:
        from daytona import DaytonaNotFoundError

        try:
            sandbox = self.client.get(resource_id)
        except DaytonaNotFoundError:
            return None
        if sandbox.state != "started":
            return None
        return int(sandbox.process.exec(script).exit_code)

    def is_gone(self, resource_id: str) -> bool:
        from daytona import DaytonaNotFoundError

        try:
            return self.client.get(resource_id).state == "destroyed"
        except DaytonaNotFoundError:
            return True


class TestDaytonaConformsLive(ProviderConformance):
    @pytest.fixture
    def harness(self) -> Harness:
        return DaytonaLiveHarness()


@pytest.fixture
def sandboxes() -> Iterator[Sandboxes]:
    sandboxes = Sandboxes(DaytonaLiveHarness())
    yield sandboxes
    sandboxes.close()


def test_one_small_sandbox_lives_and_its_makers_own_client_finds_it_gone(sandboxes: Sandboxes) -> None:
    assert isinstance(sandboxes.harness, DaytonaLiveHarness)
    lives_once(sandboxes, sandboxes.harness.is_gone)
