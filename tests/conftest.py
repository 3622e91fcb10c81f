"""Fixtures of the whole suite. Read before Django is set up, so models are imported inside."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

# Before anything imports it: its assertions are to tell what they saw.
pytest.register_assert_rewrite("providers.conformance", "tests.crashing")

from providers import registry  # noqa: E402
from tests import emptying  # noqa: E402

if TYPE_CHECKING:
    from tests.stage import Rehearsal

registry._BUILT_IN["rehearsal"] = "tests.rehearsal:RehearsalProvider"
registry._BUILT_IN["limited"] = "tests.rehearsal:LimitedProvider"

emptying.allow()


@pytest.fixture
def rehearsal(transactional_db: None) -> Rehearsal:
    from tests.stage import Rehearsal

    return Rehearsal()


@pytest.fixture
def limited(transactional_db: None) -> Rehearsal:
    """A stage whose provider has deadlines of its own, and hides what it may not have ended."""
    from tests.stage import Rehearsal

    return Rehearsal("limited")
