"""`manage.py cancel_run`, as an operator at a shell uses it."""

from __future__ import annotations

import json

import pytest

from leases.models import ActivityEntry, Run
from tests import factories
from tests.cleanup.test_lapsed_command import WHY, run
from tests.scenarios.steps import acquired, snapshot, sweep
from tests.stage import Rehearsal

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def rehearsal() -> Rehearsal:
    return Rehearsal()


def test_it_cancels_a_run_and_says_what_that_waits_for(rehearsal: Rehearsal) -> None:
    lease = acquired(rehearsal)
    status, told = run("cancel_run", rehearsal.run.pk, *WHY)
    assert status == 0
    assert "is requested since" in told
    assert f"lease {lease.pk} (pending_cleanup) has no proof" in told
    entry = ActivityEntry.objects.get(action="run.cancellation_requested")
    assert (entry.actor, entry.reason) == ("olga", "the host burnt down")
    sweep(rehearsal)
    status, told = run("cancel_run", rehearsal.run.pk, *WHY)
    assert (status, "is acknowledged" in told) == (0, True)


def test_as_json_it_names_what_is_missing(rehearsal: Rehearsal) -> None:
    lease = acquired(rehearsal)
    told = json.loads(run("cancel_run", rehearsal.run.pk, "--json", *WHY)[1])
    assert (told["status"], told["cancellation"]) == ("cancelled", "requested")
    assert told["missing"] == [{"what": "lease_unproven", "subject": str(lease.pk)}]


def test_a_dry_run_writes_nothing(rehearsal: Rehearsal) -> None:
    acquired(rehearsal)
    before = snapshot()
    status, told = run("cancel_run", rehearsal.run.pk, "--dry-run")
    assert (status, told.strip().endswith("would be cancelled; 1 of its leases are in use. Nothing was written.")) == (
        0,
        True,
    )
    assert snapshot() == before


def test_it_is_refused_while_somebody_may_still_save_the_files(rehearsal: Rehearsal) -> None:
    factories.hold(acquired(rehearsal), "shutdown_fence", until_in=60)
    assert run("cancel_run", rehearsal.run.pk, *WHY)[0] == 1
    assert Run.objects.get(pk=rehearsal.run.pk).cancel_requested_at is None


@pytest.mark.parametrize("subject", ["nonsense", "0f9f8bb7-5c5e-4b44-8a3c-6f2a0a4c3c55"])
def test_what_is_no_run_is_a_wrong_argument(subject: str) -> None:
    assert run("cancel_run", subject, *WHY)[0] == 2


def test_it_needs_a_reason(rehearsal: Rehearsal) -> None:
    assert run("cancel_run", rehearsal.run.pk)[0] == 2
