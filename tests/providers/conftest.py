"""Providers are tested without Django: a contract that outside packages implement must not need it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left_behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    from tests.providers.local_harness import left_below

    yield
    assert left_below(tmp_path_factory.getbasetemp()) == []
