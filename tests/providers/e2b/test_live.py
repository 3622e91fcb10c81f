"""The E2B provider at the real service, with small sandboxes. Only with a key in the environment: it costs money.

What it makes is deleted after each test, and has a deadline of five minutes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from e2b import Sandbox
from e2b.exceptions import SandboxNotFoundException

from providers.conformance import Harness, ProviderConformance, Sandboxes
from providers.contract import Command, Gone, Resource, Running, Stopped

KEY = os.environ.get("E2B_API_KEY")
URL = os.environ.get("E2B_API_URL", "https://api.e2b.app")
SANDBOX_URL = os.environ.get("E2B_SANDBOX_URL")
pytestmark = [
    pytest.mark.skipif(not KEY, reason="E2B_API_KEY is not in the environment: nothing of the real service is tested"),
    pytest.mark.timeout(600),
]


class LiveHarness(Harness):
    """The real service. It lets nobody look at its machines, so what executes is asked of the sandbox itself."""

    key: ClassVar[str] = "e2b"
    within: ClassVar[float] = 90.0

    def endpoint_data(self) -> dict[str, Any]:
        return {"url": URL, "sandbox_url": SANDBOX_URL}

    def config_data(self) -> dict[str, Any]:
        return {"lifetime_seconds": 300}

    def deadline_config_data(self, seconds: int) -> dict[str, Any]:
        return {"lifetime_seconds": seconds}

    def secret(self) -> str | None:
        return KEY

    def executes(self, resource: Resource, tag: str) -> bool:
        """A sandbox that is not running executes nothing, by the word that is being tested: there is no other."""
        sighting = self.provider().inspect(resource.resource_id, within=self.within)
        if not isinstance(sighting, Running):
            return False
        look = Command(("sh", "-c", f"cat /proc/[0-9]*/cmdline | tr '\\0' '\\n' | grep -qx -- {tag}"), timeout=20)
        return self.provider().execute(resource.resource_id, look, within=self.within).exit_code == 0


@pytest.fixture
def harness() -> Harness:
    return LiveHarness()


@pytest.fixture
def sandboxes(harness: Harness) -> Iterator[Sandboxes]:
    sandboxes = Sandboxes(harness)
    yield sandboxes
    sandboxes.close()


class TestE2BConformsLive(ProviderConformance):
    @pytest.fixture
    def harness(self) -> Harness:
        return LiveHarness()


def test_one_small_sandbox_lives_and_its_makers_own_client_finds_it_gone(
    harness: Harness, sandboxes: Sandboxes
) -> None:
    resource, tag = sandboxes.create(), sandboxes.tag()
    sandboxes.becomes(resource, Running)
    sandboxes.execute(resource, harness.daemon(tag))
    assert sandboxes.executes(resource, tag)
    sandboxes.run(resource, "echo saved > note")
    sandboxes.stop(resource)
    sandboxes.becomes(resource, Stopped)
    sandboxes.start(resource)
    sandboxes.becomes(resource, Running)
    assert sandboxes.run(resource, "cat note").stdout == b"saved\n"
    assert not harness.executes(resource, tag)
    sandboxes.delete(resource)
    sandboxes.becomes(resource, Gone)
    with pytest.raises(SandboxNotFoundException):
        Sandbox.get_info(resource.resource_id, api_key=KEY, api_url=URL)
