"""Everything at once: users, Stops and sweeps at a provider that loses replies and does some starts late.

What happens differs from run to run; what holds in the end does not. A failure names the seed of what was drawn.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from django.db import connection

import leases
from cleanup.claims import LANE
from cleanup.engine import Engine
from leases import proof
from leases.errors import LeaseError
from leases.models import Lease, Obligation, Operation, ProviderAccount
from leases.models.environments import Policy
from leases.patience import Patience
from providers.contract import ErrorKind, ProviderError
from tests import factories
from tests.concurrency import Background
from tests.rehearsal import RehearsalProvider
from tests.stage import Rehearsal

pytestmark = pytest.mark.django_db(transaction=True)

LASTS, CALM = 4.0, 1.5
"""Seconds: the last of the storm is calm for sweeps alone, so that nobody uses again what comes up late."""

LOST = [ErrorKind.CONNECTION, ErrorKind.TIMEOUT, ErrorKind.SERVER, ErrorKind.PROTOCOL]


class Storm:
    """Makes calls fail before or after their effect, and some starts take effect when nobody expects it any more."""

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.random, self.lock = Random(seed), threading.Lock()  # noqa: S311 - a seed to repeat it by
        self.late: list[tuple[float, Callable[[], Any]]] = []
        self.ends = time.monotonic() + LASTS
        for name in ("create", "start", "stop", "delete", "inspect", "find"):
            monkeypatch.setattr(RehearsalProvider, name, self._wrapped(name, getattr(RehearsalProvider, name)))

    @property
    def rages(self) -> bool:
        return time.monotonic() < self.ends

    @property
    def is_busy(self) -> bool:
        return time.monotonic() < self.ends - CALM

    def draw(self) -> float:
        with self.lock:
            return self.random.random()

    def choose(self, of: list[Any]) -> Any:
        with self.lock:
            return self.random.choice(of)

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **how: Any) -> Any:
            luck = self.draw() if self.rages else 1.0
            if luck < 0.08:
                raise ProviderError(self.choose([*LOST, ErrorKind.REFUSED, ErrorKind.BUSY]))
            if name == "start" and luck < 0.4:
                with self.lock:
                    self.late.append((time.monotonic() + 1.2 * self.random.random(), lambda: real(*args, **how)))
                raise ProviderError(self.choose(LOST))
            answer = real(*args, **how)
            if luck < 0.16:
                raise ProviderError(self.choose(LOST))
            return answer

        return call

    def comes_late(self) -> None:
        while self.rages or self.late:
            with self.lock:
                due = [one for one in self.late if one[0] <= time.monotonic()]
                self.late = [one for one in self.late if one not in due]
            for _, effect in due:
                try:
                    effect()
                except ProviderError:
                    continue  # it was destroyed meanwhile
            threading.Event().wait(0.01)


def _everything_falls_due() -> None:
    """Every bound and delay passes; accounts are asked again."""
    with connection.cursor() as cursor:
        cursor.execute("UPDATE leases_operation SET created_at = created_at - interval '1000 s'")
        cursor.execute("UPDATE leases_obligation SET due_at = now() WHERE closed_at IS NULL AND due_at IS NOT NULL")
    ProviderAccount.objects.update(blocked_until=None, circuit=ProviderAccount.Circuit.CLOSED, circuit_failures=0)


@pytest.mark.parametrize("seed", [1, 2])
def test_nothing_runs_without_an_owner_and_nobody_loses_what_he_uses(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, storm = Rehearsal(policy=Policy.REUSE_BY_ENVIRONMENT), Storm(seed, monkeypatch)
    runs = [factories.run(stage.company).pk for _ in range(3)]
    lost: list[str] = []

    def use() -> None:
        while storm.is_busy:
            hurried = Patience(pause=lambda seconds: threading.Event().wait(seconds / 50))
            try:
                run = storm.choose(runs)
                lease = leases.acquire(stage.environment.pk, company_id=stage.company.pk, run_id=run, patience=hurried)
            except LeaseError:
                continue
            box = stage.world.boxes.get(lease.resource_id)
            runs_still = box is not None and box.state == "running"
            lease.refresh_from_db()
            if lease.state == Lease.State.ACTIVE and not runs_still:
                lost.append(lease.resource_id)
            leases.release(lease.pk)

    def stop() -> None:
        while storm.is_busy:
            threading.Event().wait(storm.draw() / 7)
            leases.stop(company_id=stage.company.pk, run_id=storm.choose(runs))

    def sweep() -> None:
        while storm.rages:
            Engine().sweep(stage.account.pk, seconds=1.0)
            waiting = Obligation.objects.filter(kind="teardown", closed_at__isnull=True, attempt_id__isnull=True)
            for pk in waiting.values_list("pk", flat=True):  # one by one: several at once would break the lock order
                waiting.filter(pk=pk).update(due_at=factories.database_now(), quiet="")

    for background in [Background(work) for work in (use, use, use, stop, sweep, sweep, storm.comes_late)]:
        background.result()
    for _ in range(10):
        _everything_falls_due()
        Engine().sweep(stage.account.pk)
        Engine().sweep(LANE)

    assert lost == []
    assert [box for box in stage.world.boxes.values() if box.state == "running"] == []
    assert Operation.objects.filter(kind="create").count() > 1
    # What is left is what only a person can tell: creations that were never there, and the startups of their runs. And
    # the ends of what is kept, in a week.
    left = Obligation.objects.filter(closed_at__isnull=True).exclude(kind="dispose")
    assert set(left.values_list("quiet", flat=True)) <= {"creation_not_found", "waiting"}
    assert not Lease.objects.filter(state__in=[Lease.State.ACTIVE, Lease.State.PENDING_CLEANUP]).exists()
    assert all(proof.is_proven_ended(lease) for lease in Lease.objects.all())
