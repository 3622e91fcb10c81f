"""Leases of Daytona's sandboxes, from acquire to receipt, over HTTP at the rehearsal of the service."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import leases
from leases.errors import AcquireRejected
from leases.models import Credential, Environment, Lease, Obligation, Operation, Run
from leases.patience import Patience
from providers.daytona.rehearsal import Fault, Kind, Rehearsal, rehearsing
from providers.daytona.schemas import DaytonaConfig
from providers.registry import ConfigurationError, validate
from tests import factories
from tests.scenarios.steps import evidence, falls_due, owed, state
from tests.scenarios.steps import sweep as sweep_account

pytestmark = pytest.mark.django_db(transaction=True)

KEY, ANOTHER_KEY = "a-key-of-this-test", "another-key-of-this-test"


class Clock:
    """The service's clock: it passes when the caller pauses, so that transitions take no time of the test."""

    def __init__(self) -> None:
        self.now = datetime.now(UTC).timestamp()

    def __call__(self) -> float:
        return self.now

    def pause(self, seconds: float) -> None:
        self.now += max(seconds, 0.01)


class Place:
    """An account at the rehearsal, an environment of it and a run."""

    def __init__(self, server: Rehearsal, clock: Clock, monkeypatch: pytest.MonkeyPatch, **environment: Any) -> None:
        self.server, self.clock = server, clock
        monkeypatch.setenv("DAYTONA_OF_THIS_TEST", KEY)
        self.company = factories.company()
        self.credential = Credential.objects.create(
            company=self.company, name="key", reference="env:DAYTONA_OF_THIS_TEST"
        )
        self.account = factories.account(
            self.company,
            provider="daytona",
            endpoint={"url": server.url},
            credential=self.credential,
            attested_identity="",
        )
        self.environment: Environment = factories.environment(self.account, **environment)
        self.run: Run = factories.run(self.company)

    def acquire(self, run: Run | None = None, **how: Any) -> Lease:
        return leases.acquire(
            self.environment.pk,
            company_id=self.company.pk,
            run_id=(run or self.run).pk,
            patience=Patience(clock=self.clock, pause=self.clock.pause),
            **how,
        )

    def sweep(self) -> dict[str, int]:
        return sweep_account(self)  # type: ignore[arg-type] - it asks for no more than an account

    def states(self) -> dict[str, str]:
        return {key: box.state for key, box in self.server.world.boxes.items()}


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def server(clock: Clock) -> Iterator[Rehearsal]:
    with rehearsing(clock=clock, transition=3.0) as running:
        running.world.add_key(KEY)
        yield running


@pytest.fixture
def place(server: Rehearsal, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Place:
    return Place(server, clock, monkeypatch)


def test_a_slow_start_is_waited_for_with_the_id_saved(place: Place) -> None:
    """K-10: the create answers at once; nobody gets the sandbox before it runs."""
    began = place.clock.now
    lease = place.acquire()
    assert (state(lease), place.states()) == ("active", {lease.resource_id: "started"})
    assert place.clock.now - began >= 3
    assert leases.bridge(lease.pk).execute(["echo", "hello"]).stdout == b"hello\n"


@pytest.mark.parametrize(("seconds", "minutes"), [(59, None), (3600, 60)])
def test_the_deadline_of_a_lease_is_the_services_own(
    server: Rehearsal, clock: Clock, monkeypatch: pytest.MonkeyPatch, seconds: int, minutes: int | None
) -> None:
    """S-020, S-279: never our wish."""
    place = Place(server, clock, monkeypatch, config={"lifetime_seconds": seconds})
    lease = place.acquire()
    if minutes is None:
        assert lease.expires_at is None
    else:
        created = datetime.fromtimestamp(clock.now, UTC)
        assert lease.expires_at is not None
        assert abs(lease.expires_at - created - timedelta(minutes=minutes)) < timedelta(seconds=30)


def test_one_that_starts_into_an_error_is_owned_and_destroyed(place: Place) -> None:
    place.server.world.script.add(Fault("create", Kind.ERROR))
    with pytest.raises(AcquireRejected):
        place.acquire()
    lease = Lease.objects.get()
    assert state(lease) == "pending_cleanup"
    assert "error" in place.states().values()


def test_a_rotated_key_of_the_same_organisation_is_the_same_account(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-281: no handle and no key is kept between two calls."""
    lease = place.acquire()
    place.server.world.add_key(ANOTHER_KEY, place.server.world.keys[KEY])
    monkeypatch.setenv("DAYTONA_OF_THIS_TEST", ANOTHER_KEY)
    del place.server.world.keys[KEY]
    leases.release(lease.pk)
    _until_settled(place, lease)
    assert evidence(lease)[-1] in ("destroyed", "absent")


def test_a_sandbox_that_is_used_again_keeps_its_files_and_gets_its_deadline_back(
    server: Rehearsal, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop turns the service's own deadline off, so that the files are kept; the start sets it again."""
    place = Place(server, clock, monkeypatch, policy="reuse_by_environment", config={"lifetime_seconds": 3600})
    first = place.acquire()
    leases.bridge(first.pk).execute(["sh", "-c", "echo kept > file"])
    leases.release(first.pk)
    _until_settled(place, first)
    assert (state(first), evidence(first)) == ("released", ["stopped"])
    first.refresh_from_db()
    assert first.expires_at is None
    second = place.acquire(factories.run(place.company))
    assert (second.resource_id, second.epoch) == (first.resource_id, 2)
    assert second.expires_at is not None
    assert leases.bridge(second.pk).execute(["cat", "file"]).stdout == b"kept\n"
    assert second.started_as_of is not None
    assert Operation.objects.filter(kind="start").get().state == "attached"
    assert Obligation.objects.filter(lease=second, kind="extend", closed_at__isnull=True).exists()


def test_a_deletion_that_failed_and_hides_is_never_taken_for_the_end(place: Place) -> None:
    """K-01: a 404, while it may still run; the list that includes what was errored and deleted shows it."""
    lease = place.acquire()
    place.server.world.script.add(Fault("delete", Kind.HIDDEN))
    leases.release(lease.pk)
    for _ in range(4):
        place.sweep()
        place.clock.now += 600
        falls_due(owed(lease))
    assert (state(lease), evidence(lease)) == ("pending_cleanup", [])
    assert place.states() == {lease.resource_id: "error"}


def test_a_configuration_that_does_not_fit_is_refused_with_the_fields_name() -> None:
    """S-277, S-278."""
    with pytest.raises(ConfigurationError) as caught:
        validate(DaytonaConfig, {"image": "debian:12", "snapshot": "base"})
    assert caught.value.errors == {"snapshot": "give an image or a snapshot, not both"}
    with pytest.raises(ConfigurationError) as caught:
        validate(DaytonaConfig, {"cpu": 2})
    assert caught.value.errors == {"cpu": "needs an image: a snapshot brings its own"}


def _until_settled(place: Place, lease: Lease) -> None:
    for _ in range(12):
        place.sweep()
        if state(lease) != "pending_cleanup":
            return
        place.clock.now += 130
        row = owed(lease)
        Obligation.objects.filter(pk=row.pk, absent_since__isnull=False).update(absent_since=factories.at(-130))
        falls_due(row)
    raise AssertionError(f"not settled: {owed(lease).last_error_kind}, {place.states()}")
