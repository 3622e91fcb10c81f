"""The local provider keeps the contract."""

from __future__ import annotations

from pathlib import Path

import pytest

from providers.conformance import Harness, ProviderConformance
from tests.providers.local_harness import LocalHarness


class TestLocalConforms(ProviderConformance):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> Harness:
        return LocalHarness(tmp_path)
