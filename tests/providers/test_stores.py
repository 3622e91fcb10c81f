"""Secret stores: how they are found, what they may answer, and that nothing they say leaks a secret."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from providers import stores
from providers.stores import Failed, Inactive, InvalidReference, NotFound, StoreUnavailable, Value
from tests.vault import Vault, installed

_MODULE = """
from tests.vault import Vault

class Elsewhere(Vault):
    pass

class Silent(Vault):
    shared = None

class Broken(Vault):
    def __init__(self):
        raise RuntimeError("hunter2")

class NoStore:
    shared = True
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Vault]]:
    (tmp_path / "some_stores.py").write_text(_MODULE)
    names = {"vault": "Elsewhere", "env": "Elsewhere", "silent": "Silent", "broken": "Broken", "none": "NoStore"}
    targets = {name: f"some_stores:{target}" for name, target in names.items()}
    with installed(tmp_path, monkeypatch, **targets, gone="some_stores:Nothing") as vault:
        yield vault


def test_a_store_of_another_package_is_found_by_its_entry_point(package: type[Vault]) -> None:
    package.answers["a/b:c"] = Value("hunter2")
    assert stores.parse("vault:a/b:c") == ("vault", "a/b:c")
    assert stores.ask("vault:a/b:c", within=1) == Value("hunter2")
    assert package.reads == ["a/b:c"]
    assert stores.load("vault") is stores.load("vault")


@pytest.mark.usefixtures("package")
def test_a_built_in_store_cannot_be_replaced_by_a_package() -> None:
    assert isinstance(stores.load("env"), stores.EnvironmentStore)


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("store", ["unheard", "gone", "silent", "broken", "none"])
def test_a_store_that_cannot_be_had_here_is_told_apart_from_one_that_fails(store: str) -> None:
    with pytest.raises(StoreUnavailable) as told:
        stores.ask(f"{store}:name", within=1)
    assert store in str(told.value)
    assert "hunter2" not in str(told.value)
    with pytest.raises(InvalidReference):
        stores.parse(f"{store}:name")


@pytest.mark.parametrize(
    "text",
    ["hunter2", "env:", ":hunter2", "env:hunter-2", "env:hunter2 x", "file:hunter2", "Env:hunter2", "vault:hunter2"],
)
def test_what_is_no_reference_is_refused_in_a_sentence_that_does_not_repeat_it(text: str) -> None:
    """It may be the secret itself, pasted into the wrong field."""
    with pytest.raises(InvalidReference) as told:
        stores.parse(text)
    assert "hunter" not in str(told.value)


def _raises() -> Any:
    raise RuntimeError("the token hunter2 was refused")


@pytest.mark.parametrize("answer", [_raises, lambda: None, lambda: "hunter2", Value(""), lambda: Value(b"hunter2")])  # type: ignore[arg-type]
def test_whatever_is_not_of_the_closed_list_is_a_failure(package: type[Vault], answer: Any) -> None:
    package.answers["name"] = answer
    got = stores.ask("vault:name", within=1)
    assert isinstance(got, Failed)
    assert "hunter2" not in got.excerpt


@pytest.mark.parametrize("answer", [NotFound(), Inactive(), Failed("answered 503"), Value("hunter2")])
def test_what_is_of_the_closed_list_is_handed_on(package: type[Vault], answer: Any) -> None:
    package.answers["name"] = answer
    assert stores.ask("vault:name", within=1) == answer
    assert "hunter2" not in repr(answer)


def test_the_text_of_a_failure_is_redacted(package: type[Vault]) -> None:
    package.answers["name"] = Failed("denied, token=hunter2\n" + "x" * 1000)
    got = stores.ask("vault:name", within=1)
    assert isinstance(got, Failed)
    assert "hunter2" not in got.excerpt
    assert len(got.excerpt) <= 300


def test_a_variable_and_a_file_are_this_processs_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret"
    assert not stores.load("env").shared
    assert not stores.load("file").shared
    monkeypatch.setenv("A_SECRET_FOR_THE_STORES", "hunter2")
    assert stores.ask("env:A_SECRET_FOR_THE_STORES", within=1) == Value("hunter2")
    for empty in ("", None):
        monkeypatch.setenv("A_SECRET_FOR_THE_STORES", empty) if empty is not None else monkeypatch.undo()
        assert stores.ask("env:A_SECRET_FOR_THE_STORES", within=1) == NotFound()
    assert stores.ask(f"file:{path}", within=1) == NotFound()
    path.write_text("hunter2\n")
    assert stores.ask(f"file:{path}", within=1) == Value("hunter2")
    path.write_text("\n")
    assert stores.ask(f"file:{path}", within=1) == NotFound()
    path.unlink()
    path.mkdir()
    assert isinstance(stores.ask(f"file:{path}", within=1), Failed)
    path.rmdir()
    path.write_bytes(b"\xff\xfe")
    assert isinstance(stores.ask(f"file:{path}", within=1), Failed)
