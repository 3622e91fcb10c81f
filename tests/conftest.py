"""Fixtures of the whole suite. Read before Django is set up, so models are imported inside."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from providers import registry

if TYPE_CHECKING:
    from tests.stage import Rehearsal

registry._BUILT_IN["rehearsal"] = "tests.rehearsal:RehearsalProvider"


@pytest.fixture
def rehearsal(transactional_db: None) -> Rehearsal:
    from tests.stage import Rehearsal

    return Rehearsal()
