"""The table of the README names every scenario once, and only tests that there are, which say the number themselves."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.tables import rows_of

ROOT = Path(__file__).parents[2]
README = Path(__file__).parent / "README.md"
SECTIONS = (
    "Scenarios A and B",
    "Scenarios C and D",
    "Scenarios E to O",
    "Scenarios P",
    "Scenarios Q and T",
    "Scenarios R",
    "Scenarios S",
    "Scenarios U",
    "Scenarios V",
)
SCENARIOS, CASES = [row for section in SECTIONS for row in rows_of(README, section)], rows_of(README, "Known cases")
NAMED = re.compile(r"([\w/]+\.py)::(test_\w+)")
NUMBER = re.compile(r"\b[SK]-\d+\b")

A_AND_B = {
    *(1, 3, 4, 6, 7, 8, 9, 10, 12, 13, 14, 15, 16, 17, 18, 20, 21, 22, 23, 24),
    *(25, 26, 28, 29, 30, 31, 32, 33, 35, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47, 49, 50, 51, 52, 54),
}
P = {220, 221, 222, 224, 226, 227, 228, 229, 230, 231, 232}
Q_AND_T = {233, 235, 236, 237, 238, 239, 240, 258, 259, 260, 261, 263, 264}
R = {241, 242, 243, 244, 246, 247, 248, 249}
S = {251, 252, 254, 255, 256, 257}
U = {265, *range(268, 277)}
V = {277, 278, 279, 280, 281, 282, 283, 284, 285, 288}
C_AND_D = {
    *(55, 56, 57, 58, 59, 60, 61, 62, 63, 64, 65, 66, 67, 68, 69, 70, 71, 72, 73, 74, 77, 79),
    *(82, 83, 84, 85, 88, 89, 91, 92, 93, 94, 95, 96, 97, 98, 99, 100, 101),
}
E_TO_O = {
    *(
        102,
        104,
        105,
        106,
        107,
        108,
        109,
        110,
        111,
        114,
        115,
        116,
        117,
        118,
        119,
        121,
        123,
        124,
        125,
        126,
        127,
        128,
        129,
    ),
    *(
        131,
        132,
        134,
        135,
        137,
        138,
        139,
        140,
        141,
        142,
        143,
        145,
        146,
        147,
        148,
        149,
        150,
        151,
        152,
        153,
        154,
        155,
        158,
    ),
    *(
        159,
        161,
        163,
        164,
        165,
        166,
        167,
        168,
        169,
        170,
        171,
        172,
        173,
        174,
        175,
        176,
        177,
        179,
        180,
        181,
        183,
        184,
        186,
    ),
    *(
        187,
        188,
        189,
        190,
        191,
        193,
        194,
        195,
        196,
        198,
        199,
        200,
        201,
        202,
        203,
        205,
        206,
        207,
        208,
        210,
        211,
        212,
        213,
    ),
    *(214, 216, 217, 218, 219),
}


@cache
def _tests_of(path: Path) -> dict[str, str]:
    """Return the docstring of each test in a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {
        node.name: ast.get_docstring(node) or ""
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def _named(row: dict[str, str]) -> list[tuple[str, str]]:
    return NAMED.findall(row["proven by"])


def test_every_scenario_of_the_sections_is_there_once_and_in_order() -> None:
    numbers = [int(row["number"].removeprefix("S-")) for row in SCENARIOS]
    assert numbers == [
        *sorted(A_AND_B),
        *sorted(C_AND_D),
        *sorted(E_TO_O),
        *sorted(P),
        *sorted(Q_AND_T),
        *sorted(R),
        *sorted(S),
        *sorted(U),
        *sorted(V),
    ]


@pytest.mark.parametrize("row", [*SCENARIOS, *CASES], ids=lambda row: row["number"])
def test_a_scenario_is_proven_superseded_or_a_later_issues(row: dict[str, str]) -> None:
    for path, name in _named(row):
        assert name in _tests_of(ROOT / path), f"{path} has no {name}"
    told = f"{row['proven by']} {row['remark']}"
    assert _named(row) or "superseded" in told or re.search(r"issues? [B-D]", told)


def test_a_test_that_says_a_number_is_named_for_it() -> None:
    named = {row["number"]: {name for _, name in _named(row)} for row in [*SCENARIOS, *CASES]}
    missing = [
        (number, name)
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for name, docstring in _tests_of(path).items()
        for number in NUMBER.findall(docstring)
        if number in named and name not in named[number]
    ]
    assert missing == []


def test_a_test_that_is_named_for_a_scenario_says_its_number() -> None:
    silent = [
        (row["number"], name)
        for row in SCENARIOS
        for path, name in _named(row)
        if path.startswith("tests/") and row["number"] not in NUMBER.findall(_tests_of(ROOT / path)[name])
    ]
    assert silent == []
