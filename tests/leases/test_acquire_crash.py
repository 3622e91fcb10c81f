"""Acquire, killed with SIGKILL at each of its steps in a real process, on real sandboxes: each stays owned.

K-16, K-21, S-056, S-058. The recovery is made due by moving its row; a sweep by another process (this one) does the
rest. What runs and what is left is asked of the operating system, not of the adapter alone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from django.db import connection

import leases
from cleanup.engine import Engine, Tally
from leases.models import Environment, Lease, Obligation, Operation, Receipt, Run
from providers.registry import AnyProvider, open_provider
from tests import factories
from tests.providers.local_harness import left_below

pytestmark = pytest.mark.django_db(transaction=True)

CHILD = """
import os, signal, sys
import django
django.setup()
import leases
from leases import creating, journal, transitions
from providers.local import client
from providers.local.provider import LocalProvider

def dies(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

def dies_after(original):
    def run(*args, **kwargs):
        original(*args, **kwargs)
        dies()
    return run

step, environment, company, run = sys.argv[1:]
match step:
    case "journal committed":
        LocalProvider.create = dies
    case "half created":
        client.launch = dies
    case "created, before the reply":
        client.launch = dies_after(client.launch)
    case "create returned":
        journal.save_resource_id = dies
    case "id saved":
        creating._attach = dies
    case "middle of attach":
        transitions._hand_over = dies_after(transitions._hand_over)
    case "attached":
        creating._attach = dies_after(creating._attach)
leases.acquire(environment, company_id=company, run_id=run)
print("acquired")
"""


class Place:
    """A state directory of the local provider, and an environment of it."""

    def __init__(self, base: Path) -> None:
        self.base = base
        endpoint = {"state_dir": str(base / "state")}
        self.provider: AnyProvider = open_provider("local", endpoint)
        self.account = factories.account(endpoint=endpoint, attested_identity="")
        self.environment: Environment = factories.environment(self.account, config={"command": ["sleep", "1000"]})
        self.run: Run = factories.run(self.account.company)

    def acquire_and_die(self, step: str) -> None:
        child = self._start(step)
        assert child.returncode == -signal.SIGKILL, child.stderr.decode()
        assert child.stdout == b""

    def acquire(self) -> None:
        child = self._start("never")
        assert (child.returncode, child.stdout) == (0, b"acquired\n"), child.stderr.decode()

    def _start(self, step: str) -> subprocess.CompletedProcess[bytes]:
        url = urlsplit(os.environ["DATABASE_URL"])._replace(path=f"/{connection.settings_dict['NAME']}").geturl()
        identities = [str(self.environment.pk), str(self.account.company_id), str(self.run.pk)]
        return subprocess.run(
            [sys.executable, "-c", CHILD, step, *identities],
            env={**os.environ, "DATABASE_URL": url},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            timeout=60,
            check=False,
        )

    def sandboxes(self) -> list[str]:
        return [resource.resource_id for resource in self.provider.list({}, within=30.0).resources]

    def processes(self) -> list[str]:
        return left_below(self.base)

    def sweep(self) -> dict[str, int]:
        """Sweep until nothing is due, and return what came of it all."""
        total = Tally()
        while (tally := Engine().sweep(self.account.pk)).claimed:
            total.add(tally)
        return total.outcomes


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    try:
        yield made
    finally:
        for resource_id in made.sandboxes():
            made.provider.delete(resource_id, within=30.0)


def _time_passes(operation: Operation, seconds: int) -> None:
    """Move the creation and its recovery into the past."""
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE leases_operation SET created_at = created_at - %s * interval '1 s' WHERE id = %s",
            [seconds, operation.pk],
        )
        cursor.execute(
            "UPDATE leases_obligation SET due_at = due_at - %s * interval '1 s' WHERE operation_id = %s"
            " AND closed_at IS NULL AND due_at IS NOT NULL",
            [seconds, operation.pk],
        )


CALL_BOUND_PASSES = 151
CREATION_WINDOW_PASSES = 800


def test_the_control_of_these_tests_an_acquire_that_nobody_kills(place: Place) -> None:
    place.acquire()
    assert Lease.objects.get().state == Lease.State.ACTIVE
    assert len(place.sandboxes()) == 1
    assert place.processes()


@pytest.mark.parametrize(
    "step", ["half created", "created, before the reply", "create returned", "id saved", "middle of attach"]
)
def test_a_sandbox_whose_acquire_was_killed_is_found_owned_once_and_destroyed(place: Place, step: str) -> None:
    place.acquire_and_die(step)
    operation = Operation.objects.get()
    assert operation.state == Operation.State.PENDING
    assert Lease.objects.count() == 0
    assert len(place.sandboxes()) == 1
    (owner,) = operation.obligations.all()
    assert owner.is_open
    assert place.sweep() == {}  # the call's bound has not passed: the acquire might still be alive

    _time_passes(operation, CALL_BOUND_PASSES)
    assert place.sweep() == {"proven": 3}  # the recovery, the teardown that it owed, and the end of the startup
    lease = Lease.objects.get()
    assert (lease.state, lease.pk) == (Lease.State.FAILED, operation.lease_uuid)
    operation.refresh_from_db()
    assert (operation.state, operation.lease_id) == (Operation.State.RESOLVED, lease.pk)
    receipt = Receipt.objects.get()
    assert (receipt.lease_id, receipt.evidence, receipt.resource_id) == (lease.pk, "destroyed", operation.resource_id)
    assert place.sandboxes() == []
    assert place.processes() == []
    assert not Obligation.objects.filter(closed_at__isnull=True).exists()


def test_an_acquire_that_was_killed_before_it_asked_leaves_a_question_and_no_lease(place: Place) -> None:
    """S-079: a name that is absent proves nothing; after the provider's creation window a person is asked, quietly."""
    place.acquire_and_die("journal committed")
    operation = Operation.objects.get()
    _time_passes(operation, CALL_BOUND_PASSES)
    assert place.sweep() == {"not_seen": 1}
    _time_passes(operation, CREATION_WINDOW_PASSES)
    assert place.sweep() == {"quieted": 1}
    owner = operation.obligations.get()
    assert (owner.quiet, owner.due_at, owner.is_open) == ("creation_not_found", None, True)
    assert place.sweep() == {}
    assert Lease.objects.count() == 0
    assert (place.sandboxes(), place.processes()) == ([], [])


def test_an_acquire_that_was_killed_after_it_attached_left_an_ordinary_lease(place: Place) -> None:
    """Its caller never heard of it; the run's own Stop reaches it, and nothing recovers it a second time."""
    place.acquire_and_die("attached")
    lease, operation = Lease.objects.get(), Operation.objects.get()
    assert lease.state == Lease.State.ACTIVE
    assert operation.state == Operation.State.ATTACHED
    assert operation.obligations.get().closed_as == Obligation.ClosedAs.HANDED_OVER
    _time_passes(operation, CREATION_WINDOW_PASSES)
    assert place.sweep() == {}
    assert leases.stop(company_id=place.account.company_id, run_id=place.run.pk) == 1
    assert place.sweep() == {"proven": 1}
    assert Lease.objects.count() == 1
    assert (place.sandboxes(), place.processes()) == ([], [])


def test_the_next_acquire_after_a_kill_makes_its_own_sandbox_and_meets_no_name_of_the_first(place: Place) -> None:
    """K-21: the second incarnation's name is its own, so it neither adopts the first nor trips over it."""
    place.acquire_and_die("create returned")
    place.acquire()
    assert len(place.sandboxes()) == 2
    first = Operation.objects.get(state=Operation.State.PENDING)
    _time_passes(first, CALL_BOUND_PASSES)
    assert place.sweep() == {"proven": 3}
    lease = Lease.objects.get(state=Lease.State.ACTIVE)
    assert place.sandboxes() == [lease.resource_id]
    assert leases.bridge(lease.pk).execute(["true"]).exit_code == 0
