"""Several real processes at the same rows: what one lacks is its own affair, and what they find has one owner."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import connection, transaction

import leases
from cleanup import tasks
from leases import credentials
from leases.models import Attempt, Credential, Environment, Installation, Lease, Obligation, Operation, ProviderAccount
from providers.contract import MARK_INSTALLATION, MARK_PREFIX
from providers.registry import AnyProvider, open_provider
from tests import factories
from tests.beats import BOUND, CHECKOUT, Queue, database_url, eventually
from tests.workers import Worker, workers

pytestmark = pytest.mark.django_db(transaction=True)

SECRET = "A_SECRET_OF_SOME_WORKERS"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    queue = Queue()
    with workers(tmp_path) as starter:
        yield starter
    queue.close()


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[Environment]:
    """An environment of `local`, which sends no secret and so shows that it is not even opened without one."""
    endpoint = {"state_dir": str(tmp_path / "state")}
    account = factories.account(endpoint=endpoint, attested_identity="")
    account.credential = Credential.objects.create(company=account.company, name="key", reference=f"env:{SECRET}")
    account.save()
    provider = open_provider("local", endpoint)
    account.attested_identity = provider.identify(within=20)
    account.save()
    yield factories.environment(account)
    for left in provider.list({}, within=20).resources:
        provider.delete(left.resource_id, within=20)


def _named(environment: Environment, **values: Any) -> dict[str, Any]:
    credential = environment.account.credential
    assert credential is not None
    return {"credential_uuid": credential.pk, "credential_reference": credential.reference, **values}


def _lost(environment: Environment) -> Operation:
    """A creation that the provider carried out, and whose process died."""
    operation = factories.operation(
        environment, due_in=-5, **_named(environment, credential_digest=credentials.digest("hunter2"))
    )
    marks = {MARK_INSTALLATION: str(Installation.current().mark), f"{MARK_PREFIX}operation": str(operation.pk)}
    Operation.objects.filter(pk=operation.pk).update(marks=marks)
    provider: AnyProvider = open_provider("local", operation.endpoint)
    provider.create(operation.name, marks, provider.Config(command=[], env={}), within=20)
    return operation


def _released(environment: Environment, monkeypatch: pytest.MonkeyPatch) -> Lease:
    monkeypatch.setenv(SECRET, "hunter2")
    lease = leases.acquire(environment.pk, company_id=environment.company_id)
    monkeypatch.delenv(SECRET)
    Lease.objects.filter(pk=lease.pk).update(**_named(environment))
    return leases.release(lease.pk)


@pytest.mark.parametrize("other", [{}, {SECRET: "hunter1"}], ids=["without it", "with an old one"])
def test_a_worker_without_the_secret_beside_one_that_has_it_asks_no_person_for_anything(
    start: Callable[..., Worker], environment: Environment, monkeypatch: pytest.MonkeyPatch, other: dict[str, str]
) -> None:
    """Issue B: what one worker lacks is never the fleet's."""
    account = environment.account
    torn_down = _released(environment, monkeypatch)
    operation = _lost(environment)
    lacking = start(**other).is_ready()
    seen_quiet: list[int] = []

    def hinted(done: Callable[[], bool]) -> Callable[[], bool]:
        def look() -> bool:
            seen_quiet.extend(Obligation.objects.exclude(quiet="").values_list("pk", flat=True))
            if not Obligation.objects.filter(attempt_id__isnull=False).exists():
                tasks.sweep.delay(str(account.pk))
            return done()

        return look

    eventually(hinted(lambda: "is not ready for account" in lacking.told()), "the worker says what it lacks")
    assert operation.obligations.get().is_open
    start(**{SECRET: "hunter2"}).is_ready()
    closed = Obligation.objects.filter(closed_at__isnull=False)
    eventually(hinted(lambda: closed.filter(operation=operation).exists()), "the creation has an owner")
    eventually(hinted(lambda: not Obligation.objects.filter(closed_at__isnull=True).exists()), "all is paid")
    assert seen_quiet == []
    assert not Obligation.objects.filter(failures__gt=0).exists()
    assert set(Lease.objects.values_list("pk", flat=True)) == {torn_down.pk, operation.lease_uuid}
    excerpts = Attempt.objects.exclude(error_excerpt="").values_list("error_excerpt", flat=True)
    assert not any("hunter" in excerpt for excerpt in excerpts)


def test_three_processes_that_recover_at_once_make_one_owner(environment: Environment, tmp_path: Path) -> None:
    """S-056, S-057: three fresh processes with nothing but the database, let go at the same moment."""
    operation = _lost(environment)
    logs = [tmp_path / f"sweep-{number}.log" for number in range(3)]
    sweeps: list[subprocess.Popen[bytes]] = []
    try:
        with transaction.atomic():
            # Whoever claims locks the account first; all three wait for that.
            ProviderAccount.objects.select_for_update(no_key=True).get(pk=environment.account_id)
            sweeps.extend(_sweep(log) for log in logs)
            eventually(lambda: _waiting() == 3, "all three wait to claim")
        ended = [process.wait(BOUND) for process in sweeps]
        assert ended == [0, 0, 0], [log.read_text() for log in logs]
    finally:
        for process in sweeps:
            process.kill()
            process.wait(BOUND)
    lease = Lease.objects.get()
    assert (lease.pk, lease.state, lease.reason) == (operation.lease_uuid, "failed", "creation_recovered")
    recovery = operation.obligations.get()
    assert Attempt.objects.filter(obligation=recovery).count() == 1
    assert lease.obligations.count() == 1


def _sweep(log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "manage.py", "sweep"],
            cwd=CHECKOUT,
            env={
                **os.environ,
                "DATABASE_URL": database_url(),
                "DATABASE_LOCK_TIMEOUT_MS": "0",
                "APPLICATION_NAME": log.stem,
                SECRET: "hunter2",
            },
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def _waiting() -> int:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_stat_clear_snapshot()")  # which a transaction otherwise keeps
        cursor.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
            " AND application_name LIKE 'sweep-%' AND wait_event_type = 'Lock'"
        )
        (number,) = cursor.fetchone()
    return int(number)
