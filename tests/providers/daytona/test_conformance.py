"""The Daytona provider against the rehearsal server: the contract, and what is Daytona's own."""

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
from providers.daytona.rehearsal import Fault, Kind, Rehearsal, rehearsing
from providers.registry import open_provider
from tests.providers.daytona.conftest import KEY


@pytest.fixture(scope="module")
def server() -> Iterator[Rehearsal]:
    with rehearsing(transition=0.02) as server:
        server.world.add_key(KEY)
        yield server


def executing(tag: str) -> list[int]:
    """Return the processes of this host that have this text on their command line, zombies left out."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with suppress(OSError):
                if tag.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    return found


class DaytonaHarness(Harness):
    key: ClassVar[str] = "daytona"

    def __init__(self, server: Rehearsal) -> None:
        self.server = server

    def endpoint_data(self) -> dict[str, Any]:
        return {"url": self.server.url}

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
        """What is switched is the organisation behind the key."""
        key = f"switched-{secrets.token_hex(8)}"
        organizations = [self.server.world.add_key(key), self.server.world.add_key(KEY + "other")]

        def switch() -> None:
            organizations.reverse()
            self.server.world.add_key(key, organizations[0])

        yield open_provider("daytona", self.endpoint_data(), key), switch

    @contextmanager
    def trickling(self) -> Iterator[tuple[AnyProvider, str]]:
        with rehearsing() as slow:
            slow.world.add_key(KEY)
            slow.will(Fault("*", Kind.TRICKLE, times=100))
            yield open_provider("daytona", {"url": slow.url}, KEY), "0" * 8 + "-0000-4000-8000-" + "0" * 12

    @contextmanager
    def echoing(self, secret: str) -> Iterator[AnyProvider]:
        with rehearsing() as echo:
            echo.echoes = True
            yield open_provider("daytona", {"url": echo.url}, secret)


class TestDaytonaConforms(ProviderConformance):
    @pytest.fixture
    def harness(self, server: Rehearsal) -> Harness:
        return DaytonaHarness(server)
