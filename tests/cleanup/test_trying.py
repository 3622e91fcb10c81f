"""Trying an environment, as an operator does: on real processes, and with the faults of a rehearsal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from cleanup import trying
from leases.errors import NotFound
from leases.models import ActivityEntry, Environment, Lease, Obligation, Operation
from providers.contract import ErrorKind
from tests import factories
from tests.providers.local_harness import left_below
from tests.scenarios.steps import evidence, fails, state
from tests.stage import Rehearsal

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Environment]:
    """An environment of real processes; nothing of them is left."""
    account = factories.account(endpoint={"state_dir": str(tmp_path / "state")}, attested_identity="")
    yield factories.environment(account, config={"command": ["sleep", "1000"]})
    assert left_below(tmp_path / "state") == []


def told(environment: object, *argv: str, **options: Any) -> tuple[int, str]:
    """What the command printed, and its exit status."""
    out = StringIO()
    status = 0
    try:
        call_command("try_environment", str(environment), argv=list(argv), stdout=out, stderr=out, **options)
    except SystemExit as ended:
        status = int(ended.code or 0)
    return status, out.getvalue()


def test_each_step_is_told_and_the_end_is_proven(here: Environment) -> None:
    status, text = told(here.pk, "sh", "-c", "echo hello; echo oops >&2")
    lines = text.splitlines()
    assert (status, [line.split()[:2] for line in lines if not line.startswith(" ")]) == (
        0,
        [["ok", "acquire"], ["ok", "run"], ["ok", "release"], ["ok", "teardown"]],
    )
    assert [line.strip() for line in lines if "|" in line] == ["| hello", "| oops"]
    assert lines[-1].endswith("proven: destroyed")
    lease = Lease.objects.get()
    assert (state(lease), lease.run, evidence(lease), lease.ends_at is not None) == (
        "expired",
        None,
        ["destroyed"],
        True,
    )
    assert not Obligation.objects.filter(closed_at__isnull=True).exists()
    assert ActivityEntry.objects.filter(action="lease.acquired", actor__endswith="(manage.py)").count() == 1


def test_a_command_that_fails_fails_and_is_cleaned_up_all_the_same(here: Environment) -> None:
    status, text = told(here.name, "sh", "-c", "exit 3")
    assert (status, "FAILED  run" in text, "exit code 3" in text) == (1, True, True)
    assert "proven: destroyed" in text


def test_a_command_that_does_not_end_is_killed_at_its_timeout(here: Environment) -> None:
    status, text = told(here.pk, "sleep", "1000", timeout=1.0)
    assert (status, "killed at its timeout of 1 s" in text) == (1, True)


def test_machines_read_one_object_a_step(here: Environment) -> None:
    status, text = told(here.pk, "echo", "hello", json=True)
    steps = [json.loads(line) for line in text.splitlines()]
    assert (status, [(step["name"], step["ok"]) for step in steps]) == (
        0,
        [("acquire", True), ("run", True), ("release", True), ("teardown", True)],
    )
    assert steps[1]["execution"]["stdout"] == "hello\n"
    assert steps[0]["lease_id"] == str(Lease.objects.get().pk)


def test_a_dry_run_asks_nobody_and_writes_nothing() -> None:
    rehearsal = Rehearsal()
    status, text = told(rehearsal.environment.pk, "true", dry_run=True)
    assert (status, "Nobody was asked" in text) == (0, True)
    assert (rehearsal.world.calls, Operation.objects.count(), ActivityEntry.objects.count()) == ([], 0, 0)


def test_an_environment_that_nobody_has_is_a_wrong_argument(here: Environment) -> None:
    for name, options in [
        ("nothing", {}),
        (str(here.company_id), {}),
        (here.name, {"company": factories.company().pk}),
    ]:
        with pytest.raises(CommandError) as caught:
            told(name, "true", **options)
        assert caught.value.returncode == 2
    twin = factories.environment(name=here.name)
    with pytest.raises(CommandError, match="several"):
        told(here.name, "true")
    assert told(here.name, "true", company=here.company_id)[0] == 0
    assert twin.company_id != here.company_id
    with pytest.raises(NotFound):
        list(trying.try_environment(here.pk, company_id=twin.company_id, argv=["true"]))


def test_a_create_whose_answer_was_lost_is_told_found_and_destroyed() -> None:
    rehearsal = Rehearsal()
    rehearsal.world.after["create"] = fails(ErrorKind.CONNECTION)
    status, text = told(rehearsal.environment.pk, "true")
    assert (status, "FAILED  acquire" in text, "proven: destroyed" in text) == (1, True, True)
    assert rehearsal.world.boxes == {}


def test_what_cannot_be_torn_down_is_said_to_be_owed() -> None:
    rehearsal = Rehearsal()
    rehearsal.world.hooks["delete"] = fails(ErrorKind.SERVER)
    status, text = told(rehearsal.environment.pk, "true", within=1.0)
    assert (status, "FAILED  teardown" in text, "last error: server" in text) == (1, True, True)
    assert state(Lease.objects.get()) == "pending_cleanup"


def test_a_refused_environment_says_why() -> None:
    rehearsal = Rehearsal(status="archived")
    status, text = told(rehearsal.environment.pk, "true")
    assert (status, "archived" in text, len(text.splitlines())) == (1, True, 1)


def test_who_stops_listening_leaves_a_released_lease() -> None:
    rehearsal = Rehearsal()
    steps = trying.try_environment(rehearsal.environment.pk, company_id=rehearsal.company.pk, argv=["true"])
    assert next(steps).name == "acquire"
    steps.close()
    assert state(Lease.objects.get()) == "pending_cleanup"
