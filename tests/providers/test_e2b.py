"""The E2B provider against the rehearsal server: the contract, and what is E2B's own."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest

from providers.conformance import AnyProvider, Harness, ProviderConformance
from providers.contract import Resource
from providers.e2b.rehearsal import Rehearsal
from providers.registry import open_provider
from providers.rehearsing import Fault, Kind, running

KEY = "rehearsed-key"


@pytest.fixture(scope="module")
def server() -> Iterator[Rehearsal]:
    with running(Rehearsal, transition=0.02) as server:
        server.world.add_key(KEY)
        yield server


def endpoint(server: Rehearsal) -> dict[str, Any]:
    return {"url": server.url, "sandbox_url": server.url}


def executing(tag: str) -> list[int]:
    """Return the processes of this host that have this text on their command line, zombies left out."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with suppress(OSError):
                if tag.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    return found


class E2BHarness(Harness):
    key: ClassVar[str] = "e2b"

    def __init__(self, server: Rehearsal) -> None:
        self.server = server

    def endpoint_data(self) -> dict[str, Any]:
        return endpoint(self.server)

    def config_data(self) -> dict[str, Any]:
        return {}

    def deadline_config_data(self, seconds: int) -> dict[str, Any]:
        return {"lifetime_seconds": seconds}

    def secret(self) -> str | None:
        return KEY

    def executes(self, resource: Resource, tag: str) -> bool:
        return bool(executing(tag))

    @contextmanager
    def switchable(self) -> Iterator[tuple[AnyProvider, Callable[[], None]]]:
        """What is switched is the team behind the key."""
        key = f"switched-{secrets.token_hex(8)}"
        teams = [self.server.world.add_key(key), self.server.world.add_key(KEY + "other")]

        def switch() -> None:
            teams.reverse()
            self.server.world.add_key(key, teams[0])

        yield open_provider("e2b", self.endpoint_data(), key), switch

    @contextmanager
    def trickling(self) -> Iterator[tuple[AnyProvider, str]]:
        with running(Rehearsal) as slow:
            slow.world.add_key(KEY)
            slow.will(Fault("*", Kind.TRICKLE, times=100))
            yield open_provider("e2b", endpoint(slow), KEY), "i" + "0" * 19

    @contextmanager
    def echoing(self, secret: str) -> Iterator[AnyProvider]:
        with running(Rehearsal) as echo:
            echo.echoes = True
            yield open_provider("e2b", endpoint(echo), secret)


class TestE2BConforms(ProviderConformance):
    @pytest.fixture
    def harness(self, server: Rehearsal) -> Harness:
        return E2BHarness(server)
