"""Real worker processes, signalled: what a death costs, what an order to stop costs, and what a message is worth."""

from __future__ import annotations

import fcntl
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from django.db import connection
from django.db.models import Count

import leases
from cleanup import tasks
from leases.models import Attempt, Environment, Lease, Obligation, ProviderAccount
from providers.registry import open_provider
from tests import factories
from tests.beats import BOUND, Queue, eventually, terminate
from tests.workers import Worker, workers

pytestmark = pytest.mark.django_db(transaction=True)

Start = Callable[..., Worker]

QUICK = {"PAPERCLIP_CALL_SECONDS": "5", "PAPERCLIP_PROTECTION_SECONDS": "60"}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    queue = Queue()
    with workers(tmp_path) as starter:
        yield starter
    queue.close()


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[Environment]:
    endpoint = {"state_dir": str(tmp_path / "state")}
    account = factories.account(endpoint=endpoint, attested_identity="")
    yield factories.environment(account)
    provider = open_provider("local", endpoint)
    for left in provider.list({}, within=20).resources:
        provider.delete(left.resource_id, within=20)


@pytest.fixture
def deaf() -> Iterator[socket.socket]:
    """An engine that takes connections and never answers. `accept` returns when a call is in flight."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        server.settimeout(BOUND)
        yield server


def _released(environment: Environment) -> Lease:
    lease = leases.acquire(environment.pk, company_id=environment.company_id)
    return leases.release(lease.pk)


def _hint(account: ProviderAccount) -> None:
    tasks.sweep.delay(str(account.pk))


def _state(lease: Lease) -> str:
    return Lease.objects.get(pk=lease.pk).state


def _at_a_deaf_engine(server: socket.socket) -> Obligation:
    address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
    account = factories.account(provider="docker", endpoint={"base_url": address})
    return factories.teardown(factories.lease(factories.environment(account, config={"image": "busybox"})))


def test_a_hint_is_enough_and_its_duplicates_change_nothing(start: Start, environment: Environment) -> None:
    """K-38: duplicates hit the fence."""
    released = [_released(environment) for _ in range(3)]
    for _ in range(5):
        _hint(environment.account)
    start().is_ready()
    eventually(lambda: all(_state(lease) == "expired" for lease in released), "all are torn down")
    counts = Attempt.objects.values("obligation").annotate(n=Count("id")).values_list("n", flat=True)
    assert list(counts) == [1, 1, 1]


def test_a_worker_heals_when_its_database_sessions_are_terminated(start: Start, environment: Environment) -> None:
    """K-40, tech.md section 3: connections are kept between tasks, and no task fails after a restart of PostgreSQL."""
    worker = start().is_ready()
    first = _released(environment)
    _hint(environment.account)
    eventually(lambda: _state(first) == "expired", "the first is torn down")
    kept = worker.sessions()
    assert kept, "the connection is kept between tasks"
    for pid in kept:
        terminate(pid)
    eventually(lambda: not set(kept) & set(worker.sessions()), "the sessions are gone")
    later = [_released(environment) for _ in range(6)]
    for _ in later:
        _hint(environment.account)
    eventually(lambda: all(_state(lease) == "expired" for lease in later), "the later ones are torn down")
    assert not Obligation.objects.filter(failures__gt=0).exists()
    assert "Traceback" not in worker.told()


def test_a_killed_worker_leaves_its_row_protected_and_the_next_one_pays(
    start: Start, deaf: socket.socket, tmp_path: Path
) -> None:
    """S-188, K-25: no detector; the row falls due again, and nobody acts on it before."""
    row = _at_a_deaf_engine(deaf)
    worker = start().is_ready()
    _hint(row.account)
    eventually(lambda: Obligation.objects.filter(pk=row.pk, attempt_id__isnull=False).exists(), "it is claimed")
    worker.send(signal.SIGKILL)
    worker.end()
    row.refresh_from_db()
    dead = row.attempt_id
    assert row.due_at is not None
    assert 14 * 60 < (row.due_at - factories.database_now()).total_seconds() <= 15 * 60
    second = start(**QUICK).is_ready()
    _hint(row.account)
    with connection.cursor() as cursor:
        cursor.execute("UPDATE leases_obligation SET due_at = now() WHERE id = %s", [row.pk])
    _hint(row.account)
    eventually(
        lambda: Obligation.objects.filter(pk=row.pk, attempt_id__isnull=True, failures=1).exists(),
        f"the next worker's attempt ends; it said:\n{second.told()}",
    )
    assert Attempt.objects.get(pk=dead).outcome == "superseded"
    assert Attempt.objects.filter(obligation=row).count() == 2


def test_on_term_a_call_in_flight_gets_its_bound_and_the_row_is_given_back(start: Start, deaf: socket.socket) -> None:
    row = _at_a_deaf_engine(deaf)
    worker = start(**QUICK).is_ready()
    _hint(row.account)
    in_flight, _ = deaf.accept()
    worker.send(signal.SIGTERM)
    assert worker.end() == 0, worker.told()
    row.refresh_from_db()
    in_flight.close()
    assert row.attempt_id is None
    assert row.last_error_kind == "timeout"
    attempt = Attempt.objects.get(obligation=row)
    assert attempt.outcome == "failed"


def test_on_term_what_is_between_two_calls_is_handed_back_at_once(
    start: Start, environment: Environment, tmp_path: Path
) -> None:
    """The next call is not sent: the row is due now, for whoever comes, and nothing is counted."""
    lease = _released(environment)
    lock = (tmp_path / "state" / "sandboxes" / lease.resource_name / "lock").open("r+")
    fcntl.flock(lock, fcntl.LOCK_EX)  # the look at it waits for this
    worker = start().is_ready()
    _hint(environment.account)
    eventually(lambda: Obligation.objects.filter(lease=lease, attempt_id__isnull=False).exists(), "it is claimed")
    worker.send(signal.SIGTERM)
    eventually(lambda: "Warm shutdown" in worker.told() or "shutdown" in worker.told().lower(), "it heard")
    lock.close()
    assert worker.end() == 0, worker.told()
    row = Obligation.objects.get(lease=lease, kind="teardown")
    assert (row.attempt_id, row.failures) == (None, 0)
    if row.closed_at is None:
        assert row.due_at is not None
        assert Attempt.objects.get(obligation=row).outcome in ("handed_back", "busy")
    assert Obligation.objects.filter(pk=row.pk, attempt_id__isnull=False).count() == 0
