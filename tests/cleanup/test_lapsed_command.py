"""`manage.py lapsed` and `acknowledge_cancellation`, as an operator at a shell uses them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from leases.models import ActivityEntry, Installation, Run
from tests import factories, fleet
from tests.scenarios.steps import snapshot

pytestmark = pytest.mark.django_db(transaction=True)

WHY = ("--reason", "the host burnt down", "--actor", "olga")


@pytest.fixture(autouse=True)
def _server(transactional_db: None) -> Iterator[None]:
    with fleet.a_server_that_was_always_there():
        yield


def run(command: str, *arguments: Any) -> tuple[int, str]:
    """Return the exit status and what was printed, or the sentence of the refusal."""
    out = StringIO()
    try:
        call_command(command, *map(str, arguments), stdout=out)
    except CommandError as refused:
        return refused.returncode, str(refused)
    except SystemExit as ended:
        return int(ended.code or 0), out.getvalue()
    return 0, out.getvalue()


def test_it_lists_those_that_lapsed_and_changes_nothing() -> None:
    one, two = fleet.fleet(2)
    fleet.passes(61, one)
    before = snapshot()
    status, told = run("lapsed")
    assert (status, str(one.run_id) in told, str(two.run_id) in told, "1 run lapsed." in told) == (1, True, False, True)
    status, text = run("lapsed", "--json")
    assert (status, [row["controller"] for row in json.loads(text)["runs"]]) == (1, [one.controller_id])
    assert snapshot() == before


def test_none_has_lapsed() -> None:
    fleet.fleet(2)
    assert run("lapsed") == (0, "0 runs lapsed.\n")


@pytest.mark.parametrize("decision", ["--settle", "--extend"])
def test_a_dry_run_writes_nothing(decision: str) -> None:
    fleet.fleet(2)
    fleet.passes(90)
    before = snapshot()
    status, told = run("lapsed", decision, "--dry-run")
    assert (status, told.startswith("2 runs would be")) == (0, True)
    assert snapshot() == before


def test_a_person_settles_them() -> None:
    runs = fleet.fleet(12)
    fleet.passes(90)
    fleet.look()
    status, told = run("lapsed", "--settle", *WHY)
    assert (status, told) == (0, "12 runs interrupted.\n")
    assert set(fleet.statuses(runs)) == {"interrupted"}
    entry = ActivityEntry.objects.filter(action="run.interrupted").latest("pk")
    assert (entry.actor, entry.reason) == ("olga", "the host burnt down")


def test_a_person_extends_them() -> None:
    runs = fleet.fleet(12)
    fleet.passes(90)
    fleet.look()
    status, told = run("lapsed", "--extend", *WHY)
    assert (status, told.endswith("12 runs had lapsed.\n")) == (0, True)
    fleet.look()
    assert set(fleet.statuses(runs)) == {"running"}
    assert ActivityEntry.objects.get(action="installation.gap_ended").actor == "olga"


def test_a_decision_needs_a_reason_and_only_a_decision_has_one() -> None:
    assert run("lapsed", "--settle")[0] == 2
    assert run("lapsed", "--reason", "x")[0] == 2


def test_nobody_settles_in_a_database_that_is_observing() -> None:
    runs = fleet.fleet(2)
    fleet.passes(90)
    Installation.objects.update(
        observing_since=factories.database_now(),
        observed_mark_at=factories.database_now(),
        observing_why=Installation.Observing.values[0],
    )
    status, told = run("lapsed", "--settle", *WHY)
    assert (status, "restored or copied" in told) == (1, True)
    assert set(fleet.statuses(runs)) == {"running"}


def test_a_cancellation_is_acknowledged_when_its_startups_are_over() -> None:
    subject = factories.run()
    owed = factories.startup(subject)
    assert run("acknowledge_cancellation", subject.pk, *WHY)[0] == 1
    assert run("acknowledge_cancellation", subject.pk, "--dry-run")[0] == 1
    type(owed).objects.filter(pk=owed.pk).update(closed_at=factories.database_now(), closed_as="proven", quiet="")
    assert run("acknowledge_cancellation", subject.pk, "--dry-run")[0] == 0
    assert Run.objects.get(pk=subject.pk).cancel_acknowledged_at is None
    assert run("acknowledge_cancellation", subject.pk, *WHY)[0] == 0
    assert Run.objects.get(pk=subject.pk).cancel_acknowledged_at is not None
    assert ActivityEntry.objects.get(action="run.cancellation_acknowledged").reason == "the host burnt down"


@pytest.mark.parametrize("subject", ["nonsense", "0f9f8bb7-5c5e-4b44-8a3c-6f2a0a4c3c55"])
def test_what_is_no_run_is_a_wrong_argument(subject: str) -> None:
    assert run("acknowledge_cancellation", subject, *WHY)[0] == 2
