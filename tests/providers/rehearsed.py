"""What tests against a rehearsed provider share: a clock of their own, a harness, a look at this host's processes."""

from __future__ import annotations

import os
import secrets
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest

from providers.conformance import AnyProvider, Harness
from providers.contract import ProviderError, Resource
from providers.registry import open_provider
from providers.rehearsing import Fault, Kind, Rehearsal, running

KEY = "rehearsed-key"


class Clock:
    """Time that a test owns."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


def refused(call: Callable[[], object]) -> ProviderError:
    """Check that a call fails, and return its error."""
    with pytest.raises(ProviderError) as caught:
        call()
    return caught.value


def executing(tag: str) -> list[int]:
    """Return the processes of this host that have this text on their command line, zombies left out."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with suppress(OSError):
                if tag.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    return found


class RehearsedHarness(Harness):
    """A provider at its rehearsal. What is switched is the account behind a key."""

    rehearsal: ClassVar[type[Rehearsal[Any]]]
    absent: ClassVar[str]
    """A well-formed id that no sandbox has."""

    def __init__(self, server: Rehearsal[Any]) -> None:
        self.server = server

    @abstractmethod
    def endpoint_of(self, server: Rehearsal[Any]) -> dict[str, Any]:
        """Return the endpoint at a rehearsal, as JSON data."""

    def endpoint_data(self) -> dict[str, Any]:
        return self.endpoint_of(self.server)

    def config_data(self) -> dict[str, Any]:
        return {}

    def secret(self) -> str | None:
        return KEY

    def executes(self, resource: Resource, tag: str) -> bool:
        return bool(executing(tag))

    @contextmanager
    def switchable(self) -> Iterator[tuple[AnyProvider, Callable[[], None]]]:
        key = f"switched-{secrets.token_hex(8)}"
        accounts = [self.server.world.add_key(key), self.server.world.add_key(KEY + "other")]

        def switch() -> None:
            accounts.reverse()
            self.server.world.add_key(key, accounts[0])

        yield open_provider(self.key, self.endpoint_data(), key), switch

    @contextmanager
    def trickling(self) -> Iterator[tuple[AnyProvider, str]]:
        with running(self.rehearsal) as slow:
            slow.world.add_key(KEY)
            slow.will(Fault("*", Kind.TRICKLE, times=100))
            yield open_provider(self.key, self.endpoint_of(slow), KEY), self.absent

    @contextmanager
    def echoing(self, secret: str) -> Iterator[AnyProvider]:
        with running(self.rehearsal) as echo:
            echo.echoes = True
            yield open_provider(self.key, self.endpoint_of(echo), secret)
