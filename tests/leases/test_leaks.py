"""What a listed sandbox is, from what the rows say about it: the table of `docs/inventory.md`, without a database."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from leases.leaks import NEEDED, Rows, Standing, judge
from leases.models import InventoryFinding, Lease, Operation
from leases.planning import MARK_OPERATION, name_of
from providers.contract import MARK_INSTALLATION, Resource
from tests.tables import rows_of

OURS, NOW, ID, CREATION = "us", datetime(2026, 1, 1, tzinfo=UTC), "sandbox-1", uuid4()
LONG_AGO = NOW - timedelta(days=1)


def sandbox(*, installation: str = OURS, creation: str = str(CREATION), name: str = name_of(CREATION)) -> Resource:
    marks = {MARK_INSTALLATION: installation, MARK_OPERATION: creation}
    return Resource(ID, name, {key: value for key, value in marks.items() if value})


def lease(state: str, **values: Any) -> Lease:
    return Lease(**{"id": uuid4(), "state": state, "resource_id": ID, **values})


def operation(state: str, **values: Any) -> Operation:
    return Operation(
        **{"id": CREATION, "state": state, "kind": "create", "created_at": LONG_AGO, "creation_window": 60.0, **values}
    )


def verdict(resource: Resource, **rows: Any) -> str:
    return str(judge(resource, Rows(**rows), installation=OURS, now=NOW).verdict)


WRONG_MARKS = [sandbox(), sandbox(installation="them"), sandbox(installation=""), sandbox(creation=str(uuid4()))]


def test_the_document_has_every_verdict_and_no_other() -> None:
    page = Path(__file__).parents[2] / "docs" / "inventory.md"
    told = [row["verdict"] for row in rows_of(page, "What a sandbox is")]
    assert sorted(told) == sorted([*InventoryFinding.Verdict.values, *(standing.value for standing in Standing)])


@pytest.mark.parametrize("resource", WRONG_MARKS)
@pytest.mark.parametrize("state", Lease.State.values)
def test_a_lease_that_needs_its_sandbox_makes_it_alive_whatever_the_marks_say(resource: Resource, state: str) -> None:
    found = verdict(resource, leases=(lease("expired"), lease(state)))
    assert (found == "alive") == (state in NEEDED)


@pytest.mark.parametrize("resource", WRONG_MARKS)
@pytest.mark.parametrize(
    "row",
    [
        operation("pending"),
        operation("pending", resource_id=ID),
        operation("pending", kind="start", resource_id=ID),
        operation("unverified", created_at=NOW - timedelta(seconds=179)),
        operation("resolved", created_at=NOW - timedelta(seconds=179)),
    ],
)
def test_an_operation_that_may_bring_it_forth_makes_it_alive(resource: Resource, row: Operation) -> None:
    assert verdict(resource, operations=(row,)) == "alive"


def test_without_rows_the_mark_of_the_installation_says_whose_it_is() -> None:
    assert [verdict(resource) for resource in WRONG_MARKS] == ["unknown", "foreign", "unmarked", "ambiguous"]


@pytest.mark.parametrize("state", ["expired", "failed"])
def test_one_whose_lease_is_over_is_settled_and_the_last_lease_speaks_for_it(state: str) -> None:
    last = lease(state)
    rows = Rows(leases=(lease("expired", successor_id=last.pk), last), creation_of={last.pk: str(CREATION)})
    judged = judge(sandbox(), rows, installation=OURS, now=NOW)
    assert (judged.verdict, judged.lease) == ("settled", last)
    for other in (sandbox(installation="them"), sandbox(installation="")):
        assert judge(other, rows, installation=OURS, now=NOW).verdict in Standing


def test_one_with_the_id_of_a_settled_lease_and_the_marks_of_another_creation_is_ambiguous() -> None:
    over = lease("expired")
    rows = {"leases": (over,), "creation_of": {over.pk: str(CREATION)}}
    assert verdict(sandbox(creation=str(uuid4())), **rows) == "ambiguous"
    assert verdict(sandbox(creation=""), **rows) == "settled"


@pytest.mark.parametrize("state", ["unverified", "resolved", "attached", "pending"])
def test_one_with_the_marks_of_a_creation_whose_sandbox_is_another_is_ambiguous(state: str) -> None:
    """A fork, or a second sandbox: whatever became of the first."""
    assert verdict(sandbox(), operations=(operation(state, resource_id="sandbox-0"),)) == "ambiguous"


@pytest.mark.parametrize("state", Lease.State.values)
def test_one_with_the_mark_of_a_lease_whose_sandbox_is_another_is_ambiguous(state: str) -> None:
    assert verdict(sandbox(), marked=lease(state, resource_id="sandbox-0")) == "ambiguous"


@pytest.mark.parametrize(
    "row", [operation("unverified"), operation("resolved"), operation("unverified", resource_id=ID)]
)
def test_one_of_a_creation_that_was_given_up_is_unknown_and_that_creations(row: Operation) -> None:
    judged = judge(sandbox(), Rows(operations=(row,)), installation=OURS, now=NOW)
    assert (judged.verdict, judged.operation) == ("unknown", row)


@pytest.mark.parametrize(
    "resource", [sandbox(name="fork"), sandbox(name=""), sandbox(creation=""), sandbox(creation="x")]
)
def test_one_whose_name_is_not_the_one_that_its_marks_say_is_ambiguous(resource: Resource) -> None:
    assert verdict(resource) == "ambiguous"
    assert verdict(resource, operations=(operation("unverified"),)) == "ambiguous"
