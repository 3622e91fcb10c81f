"""A secret store of another package, shared by all workers, that answers what a test told it to."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest

from providers import stores
from providers.stores import Answer, NotFound, SecretStore


class Vault(SecretStore):
    shared: ClassVar[bool] = True
    answers: ClassVar[dict[str, Any]] = {}
    """By name: an answer, or a function that is called and answers or raises."""
    reads: ClassVar[list[str]] = []

    def read(self, name: str, *, within: float) -> Answer:
        self.reads.append(name)
        answer = self.answers.get(name, NotFound())
        return answer() if isinstance(answer, Callable) else answer  # type: ignore[arg-type,no-any-return]


class Own(Vault):
    """The same, but of this process alone."""

    shared: ClassVar[bool] = False


@contextmanager
def installed(where: Path, patch: pytest.MonkeyPatch, **targets: str) -> Iterator[type[Vault]]:
    """An installed package that announces these stores (`vault` and `own` where none are given)."""
    targets = targets or {"vault": "tests.vault:Vault", "own": "tests.vault:Own"}
    metadata = where / "some_stores-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: some-stores\nVersion: 1.0\n")
    announced = "".join(f"{name} = {target}\n" for name, target in targets.items())
    (metadata / "entry_points.txt").write_text(f"[{stores.ENTRY_POINT_GROUP}]\n{announced}")
    patch.syspath_prepend(str(where))
    _forget()
    yield Vault
    _forget()
    sys.modules.pop("some_stores", None)


def _forget() -> None:
    stores._announced.cache_clear()
    stores.load.cache_clear()
    Vault.answers.clear()
    Vault.reads.clear()
