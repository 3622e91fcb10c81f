"""The documents say what the code says: variables, rules, numbers and words that a page lists are compared with it.

The tables of decisions, states and wake-ups are compared by the tests of their own modules.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from datetime import timedelta
from importlib import import_module
from pathlib import Path

import pytest
from django.apps import apps

from leases.models import Obligation
from providers import registry
from providers.contract import ErrorKind
from tests.tables import rows_of

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *DOCS.rglob("*.md")])
PRODUCTION = "Web, worker, beat and commands"

_FENCE = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def _text(page: Path) -> str:
    """Return a page without its blocks of code, in which a bracket is no link and a # no heading."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def _anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ +(.+)$", _text(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_within_the_repository_leads_somewhere(page: Path) -> None:
    broken = []
    for link in _LINK.findall(_text(page)):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or not target.is_relative_to(ROOT):
            broken.append(link)
        elif anchor and anchor not in _anchors(target):
            broken.append(f"{link} (no such heading)")
    assert not broken


# --- Settings ---------------------------------------------------------------------------------------------------------


def _read_from_the_environment(source: Path, *own: str) -> Iterator[tuple[str, ast.AST]]:
    """Yield each variable that a module reads by name: through `env`, `os.environ`, or one of its `own` functions."""
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="env")), args=[ast.Constant(value=str(name)), *_]):
                yield name, node
            case ast.Call(func=ast.Name(id=function), args=[ast.Constant(value=str(name)), *_]) if function in own:
                yield name, node
            case ast.Call(func=ast.Attribute(value=ast.Attribute(attr="environ"), attr="get"), args=[first, *_]):
                if isinstance(first, ast.Constant):
                    yield str(first.value), node
            case ast.Subscript(value=ast.Attribute(attr="environ"), slice=ast.Constant(value=str(name))):
                yield name, node


SETTINGS = ROOT / "paperclip_env" / "settings.py"


def _settings_read() -> set[str]:
    return {
        name
        for name, _ in _read_from_the_environment(SETTINGS, "_required", "_whole_number", "_switch", "_json_object")
    }


def _documented(heading: str) -> dict[str, str]:
    return {row["variable"]: row["default"] for row in rows_of(DOCS / "settings.md", heading)}


def test_every_variable_that_the_settings_read_is_documented_and_no_other() -> None:
    assert set(_documented(PRODUCTION)) == _settings_read()


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return _number(node.left) * _number(node.right)
    assert isinstance(node, ast.Constant)
    assert isinstance(node.value, int)
    return node.value


def test_the_documented_defaults_of_numbers_are_those_of_the_settings() -> None:
    asked = [node for node in ast.walk(ast.parse(SETTINGS.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    numbers = [node.args for node in asked if isinstance(node.func, ast.Name) and node.func.id == "_whole_number"]
    defaults = {ast.literal_eval(args[0]): str(_number(args[1])) for args in numbers}
    documented = _documented(PRODUCTION)
    assert defaults
    assert {name: documented[name] for name in defaults} == defaults


def test_every_variable_that_the_launcher_and_the_demo_read_is_documented() -> None:
    sources = [path for part in ("stack", "demo") for path in (ROOT / "paperclip_env" / part).glob("*.py")]
    read = {name for source in sources for name, _ in _read_from_the_environment(source)}
    assert {"PORT", "PAPERCLIP_LOCAL_DIR"} <= read
    assert read <= set(_documented("make and the embedded stack")) | set(_documented(PRODUCTION))


def test_every_variable_of_the_compose_file_is_documented() -> None:
    read = set(re.findall(r"\$\{([A-Z_]+)", (ROOT / "compose.yaml").read_text(encoding="utf-8")))
    assert read <= set(_documented("compose.yaml")) | set(_documented(PRODUCTION))


# --- The model --------------------------------------------------------------------------------------------------------


def _rules() -> set[str]:
    """Return the names of all rules: the models' constraints, and what the SQL of the migrations adds or raises."""
    named = {rule.name for model in apps.get_app_config("leases").get_models() for rule in model._meta.constraints}
    for source in (ROOT / "leases" / "migrations").rglob("*.sql"):
        text = source.read_text(encoding="utf-8")
        named |= set(re.findall(r"\bCONSTRAINT = '(\w+)'", text))
        named |= set(re.findall(r"\bADD CONSTRAINT (\w+)", text))
        named |= set(re.findall(r"\bCREATE (?:CONSTRAINT )?TRIGGER (\w+)", text))
    return named


def test_every_rule_of_the_database_has_its_place_in_the_documents() -> None:
    told = (DOCS / "model.md").read_text(encoding="utf-8") + (DOCS / "idle.md").read_text(encoding="utf-8")
    assert {rule for rule in _rules() if f"`{rule}`" not in told} == set()


def test_every_table_is_described() -> None:
    told = " ".join(row["table"] for row in rows_of(DOCS / "model.md", "Tables"))
    assert {model.__name__ for model in apps.get_app_config("leases").get_models()} <= set(re.findall(r"\w+", told))


# --- The engine -------------------------------------------------------------------------------------------------------

NUMBERS = rows_of(DOCS / "engine.md", "Numbers")


@pytest.mark.parametrize("row", NUMBERS, ids=[row["where"] for row in NUMBERS])
def test_each_number_is_the_codes(row: dict[str, str]) -> None:
    module, _, name = row["where"].rpartition(".")
    value = getattr(import_module(module), name)
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    assert seconds == float(row["value"])


def test_every_reason_for_a_person_says_what_to_do() -> None:
    told = {row["reason"] for row in rows_of(DOCS / "operating.md", "What needs a person")}
    assert told == set(Obligation.Quiet.values)


# --- Providers --------------------------------------------------------------------------------------------------------


def test_every_error_kind_is_described() -> None:
    assert {row["kind"] for row in rows_of(DOCS / "providers.md", "Error kinds")} == {kind.value for kind in ErrorKind}


@pytest.mark.parametrize("key", ["local", "docker", "daytona", "e2b"])
def test_every_field_of_a_built_in_provider_is_described(key: str) -> None:
    adapter = registry.load(key)
    section = (DOCS / "providers.md").read_text(encoding="utf-8").split(f"\n## `{key}`\n")[1].split("\n## ")[0]
    fields = {*adapter.Endpoint.model_fields, *adapter.Config.model_fields}
    assert {field for field in fields if f"`{field}`" not in section} == set()


# --- Words and decisions ----------------------------------------------------------------------------------------------


def test_the_glossary_is_in_the_order_of_the_alphabet_and_explains_each_word_once() -> None:
    words = [word.lower() for word in re.findall(r"^\*\*([^*]+)\*\*", _text(DOCS / "glossary.md"), re.MULTILINE)]
    assert words == sorted(set(words))


def test_every_decision_is_listed_under_its_number() -> None:
    pages = sorted(path.name for path in (DOCS / "decisions").glob("[0-9]*.md"))
    assert [name[:4] for name in pages] == [f"{number:04d}" for number in range(1, len(pages) + 1)]
    listed = re.findall(r"\| \[(\d+)\]\((\S+)\)", _text(DOCS / "decisions" / "README.md"))
    assert [name for _, name in listed] == pages
    for number, name in listed:
        assert int(number) == int(name[:4])
        assert _text(DOCS / "decisions" / name).startswith(f"# {number}. ")
