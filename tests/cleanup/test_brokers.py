"""The whole machinery over other brokers than the embedded one: a hint is a hint, whoever carries it."""

from __future__ import annotations

from pathlib import Path

import pytest

import leases
from leases.models import Lease
from providers.registry import open_provider
from tests import factories
from tests.beats import beats, eventually
from tests.brokers import broker
from tests.workers import workers


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("kind", ["redis", "rabbitmq"])
def test_a_released_lease_is_torn_down_by_beat_and_worker_over(kind: str, tmp_path: Path) -> None:
    endpoint = {"state_dir": str(tmp_path / "state")}
    account = factories.account(endpoint=endpoint, attested_identity="")
    environment = factories.environment(account)
    (tmp_path / "broker").mkdir()
    with broker(kind, tmp_path / "broker") as address, beats(tmp_path) as beat, workers(tmp_path) as worker:
        beat(CELERY_BROKER_URL=address).leads()
        worker(CELERY_BROKER_URL=address).is_ready()
        lease = leases.acquire(environment.pk, company_id=account.company_id)
        leases.release(lease.pk)
        eventually(lambda: Lease.objects.get(pk=lease.pk).state == Lease.State.EXPIRED, "it is torn down", bound=60)
    assert open_provider("local", endpoint).list({}, within=20).resources == ()
