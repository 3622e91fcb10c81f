"""Finding adapters: the built-in ones, and those that packages outside this repository announce."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from providers import registry
from providers.contract import Schema
from providers.local import LocalProvider

_MODULE = """
from providers.contract import Schema
from providers.local import LocalProvider

class Elsewhere(LocalProvider):
    key = "elsewhere"
    label = "A provider of another package"

class NoProvider:
    pass
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installed package that announces adapters."""
    (tmp_path / "elsewhere_adapter.py").write_text(_MODULE)
    metadata = tmp_path / "elsewhere_adapter-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere-adapter\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        f"[{registry.ENTRY_POINT_GROUP}]\n"
        "elsewhere = elsewhere_adapter:Elsewhere\n"
        "local = elsewhere_adapter:Elsewhere\n"
        "missing = elsewhere_adapter:Nothing\n"
        "wrong = elsewhere_adapter:NoProvider\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    registry._announced.cache_clear()
    yield tmp_path
    registry._announced.cache_clear()
    sys.modules.pop("elsewhere_adapter", None)


@pytest.mark.usefixtures("package")
def test_an_adapter_of_another_package_is_found_by_its_entry_point(tmp_path: Path) -> None:
    assert "elsewhere" in registry.known()
    provider = registry.open_provider("elsewhere", {"state_dir": str(tmp_path / "state")})
    assert provider.label == "A provider of another package"
    assert provider.find("nothing", {}, within=5) is None


@pytest.mark.usefixtures("package")
def test_a_built_in_adapter_cannot_be_replaced_by_a_package() -> None:
    assert registry.load("local") is LocalProvider


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("key", "words"), [("missing", "cannot be loaded"), ("wrong", "is not a Provider"), ("unheard", "known are: ")]
)
def test_an_adapter_that_cannot_be_had_is_told_apart_from_one_that_fails(key: str, words: str) -> None:
    with pytest.raises(registry.ProviderUnavailable, match=words):
        registry.load(key)


class _Numbers(Schema):
    count: int
    name: str = ""


@pytest.mark.parametrize(
    ("data", "field"),
    [
        ({}, "count"),
        ({"count": "3"}, "count"),
        ({"count": 3, "size": 1}, "size"),
        ({"count": 3, "name": None}, "name"),
        ([], "configuration"),
        ({"count": {1}}, "configuration"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused_with_the_fields_name(data: object, field: str) -> None:
    with pytest.raises(registry.ConfigurationError) as caught:
        registry.validate(_Numbers, data)
    assert set(caught.value.errors) == {field}
