"""An inventory finds what was given up without proof: what was demanded of it is demanded again, and nothing more."""

from __future__ import annotations

import pytest

from leases.models import Lease
from tests.cleanup.test_inventory import confirmed, destroy, passes, used  # noqa: F401 - a fixture
from tests.scenarios.steps import owed, state, sweep
from tests.scenarios.test_history import falls_due, given_up
from tests.stage import Rehearsal

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize("seen", ["running", "unknown"])
def test_what_was_to_be_stopped_and_kept_is_not_destroyed_as_a_leak(used: Rehearsal, seen: str) -> None:  # noqa: F811
    lease = given_up(used, "retain_on_failure", outcome="failed")
    assert (owed(lease).kind, owed(lease).verb) == ("verify_end", "stop_only")
    used.world.of(lease.resource_id).state = seen
    if seen == "unknown":  # the look at history can decide nothing, for days
        falls_due(owed(lease))
        sweep(used)
        assert owed(lease).is_open
    passes(3600)
    destroy(confirmed(used))
    assert (owed(lease).kind, owed(lease).verb) == ("teardown", "stop_only")
    sweep(used)
    assert lease.resource_id in used.world.boxes
    assert state(lease) in (Lease.State.PENDING_CLEANUP, Lease.State.RETAINED, Lease.State.RELEASED)
    assert used.world.count("delete") == 0
