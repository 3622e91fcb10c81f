"""The whole path, on the `local` provider: acquire, work, release, teardown, receipt."""

from __future__ import annotations

import pytest

import leases
from cleanup.engine import Engine
from leases.errors import AdmissionClosed
from leases.models import Lease, Receipt
from tests import factories


@pytest.mark.django_db(transaction=True)
def test_a_released_lease_is_torn_down_and_proven(tmp_path) -> None:
    account = factories.account(endpoint={"state_dir": str(tmp_path / "state")}, attested_identity="")
    environment = factories.environment(account)
    run = factories.run(account.company)
    lease = leases.acquire(environment.pk, company_id=account.company_id, run_id=run.pk)
    assert lease.state == Lease.State.ACTIVE
    assert leases.bridge(lease.pk).execute(["sh", "-c", "echo hello; exit 3"]).exit_code == 3

    lease = leases.release(lease.pk)
    assert lease.state == Lease.State.PENDING_CLEANUP
    with pytest.raises(AdmissionClosed):
        leases.bridge(lease.pk).execute(["true"])

    tally = Engine().sweep(account.pk)
    assert tally.outcomes == {"proven": 1}
    lease.refresh_from_db()
    assert lease.state == Lease.State.EXPIRED
    receipt = Receipt.objects.get(lease=lease)
    assert (receipt.evidence, receipt.epoch, receipt.resource_id) == ("destroyed", 1, lease.resource_id)
