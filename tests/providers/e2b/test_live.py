"""The E2B provider at the real service, with small sandboxes. Only with a key in the environment: it costs money.

What it makes is deleted after each test, and has a deadline of five minutes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, ClassVar

import pytest

from providers.conformance import Harness, ProviderConformance, Sandboxes
from tests.providers.live import LiveHarness, live, lives_once

KEY = os.environ.get("E2B_API_KEY")
URL = os.environ.get("E2B_API_URL", "https://api.e2b.app")
SANDBOX_URL = os.environ.get("E2B_SANDBOX_URL")
pytestmark = live("E2B_API_KEY")


class E2BLiveHarness(LiveHarness):
    key: ClassVar[str] = "e2b"

    def endpoint_data(self) -> dict[str, Any]:
        return {"url": URL, "sandbox_url": SANDBOX_URL}

    def config_data(self) -> dict[str, Any]:
        return {"lifetime_seconds": 300}

    def deadline_config_data(self, seconds: int) -> dict[str, Any]:
        return {"lifetime_seconds": seconds}

    def secret(self) -> str | None:
        return KEY

    def options(self) -> dict[str, Any]:
        return {"api_key": KEY, "api_url": URL, "sandbox_url": SANDBOX_URL}

    def shell_status(self, resource_id: str, script: str) -> int | None:
        """Connecting to one that is paused would resume it, so its state is asked for first."""
        from e2b import CommandExitException, Sandbox, SandboxState

        if self.is_gone(resource_id):
            return None
        info = Sandbox.get_info(resource_id, **self.options())
        if info.state != SandboxState.RUNNING:
            return None
        left = max(60, int((info.end_at - datetime.now(UTC)).total_seconds()))
        try:
            done = Sandbox.connect(resource_id, timeout=left, **self.options()).commands.run(script)
        except CommandExitException as error:
            return int(error.exit_code)
        return int(done.exit_code)

    def is_gone(self, resource_id: str) -> bool:
        from e2b import Sandbox
        from e2b.exceptions import SandboxNotFoundException

        try:
            Sandbox.get_info(resource_id, **self.options())
        except SandboxNotFoundException:
            return True
        return False


class TestE2BConformsLive(ProviderConformance):
    @pytest.fixture
    def harness(self) -> Harness:
        return E2BLiveHarness()


@pytest.fixture
def sandboxes() -> Iterator[Sandboxes]:
    sandboxes = Sandboxes(E2BLiveHarness())
    yield sandboxes
    sandboxes.close()


def test_one_small_sandbox_lives_and_its_makers_own_client_finds_it_gone(sandboxes: Sandboxes) -> None:
    assert isinstance(sandboxes.harness, E2BLiveHarness)
    lives_once(sandboxes, sandboxes.harness.is_gone)
