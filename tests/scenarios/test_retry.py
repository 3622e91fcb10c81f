"""K: an explicit Retry. It skips the cooldown, takes over no live attempt, and each request is one attempt."""

from __future__ import annotations

from uuid import uuid4

import pytest

import leases
from cleanup.claims import claim, new_ids
from cleanup.engine import Engine
from leases.clock import boottime
from leases.errors import LeaseError, NotFound
from leases.models import ActivityEntry, Lease, Obligation
from providers.contract import ErrorKind
from tests.concurrency import Background, Gate, together
from tests.scenarios.steps import (
    acquired,
    attempts,
    audited,
    due_in,
    fails,
    is_due,
    owed,
    released,
    retry,
    snapshot,
    state,
    sweep,
)
from tests.stage import Rehearsal


def _cooling(rehearsal: Rehearsal, failures: int = 0) -> Lease:
    lease = released(rehearsal)
    Obligation.objects.filter(lease=lease).update(failures=failures)
    rehearsal.world.hooks["inspect"] = fails(ErrorKind.REFUSED)
    assert sweep(rehearsal) == {"failed": 1}
    assert not is_due(owed(lease))
    return lease


def test_it_skips_the_cooldown_and_is_one_attempt(rehearsal: Rehearsal) -> None:
    """S-190."""
    lease = _cooling(rehearsal)
    rehearsal.world.hooks.clear()
    assert retry(rehearsal) == 1
    assert sweep(rehearsal) == {"proven": 1}
    row = owed(lease)
    assert attempts(row) == ["failed", "proven"]
    entry = ActivityEntry.objects.get(action="obligation.retry_requested")
    assert (entry.subject_id, entry.actor, entry.reason) == (str(row.pk), "user", "please")
    assert entry.details["lease"] == str(lease.pk)


def test_it_cannot_take_over_a_live_attempt(rehearsal: Rehearsal) -> None:
    """S-191."""
    lease = released(rehearsal)
    (live,) = claim(rehearsal.account.pk, new_ids(1), worker="live", clock=boottime)
    protection = owed(lease).due_at
    assert retry(rehearsal) == 1
    row = owed(lease)
    assert (row.attempt_id, row.due_at) == (live.attempt_id, protection)
    assert sweep(rehearsal) == {}
    assert rehearsal.world.count("delete") == 0


def test_a_request_during_a_live_attempt_is_served_after_it(rehearsal: Rehearsal) -> None:
    lease = released(rehearsal)
    gate = Gate()

    def fail_late(_: str) -> None:
        gate()
        del rehearsal.world.hooks["inspect"]
        fails(ErrorKind.REFUSED)("")

    rehearsal.world.hooks["inspect"] = fail_late
    working = Background(lambda: Engine().sweep(rehearsal.account.pk))
    gate.wait()
    retry(rehearsal)
    gate.open()
    working.result()
    sweep(rehearsal)
    assert attempts(owed(lease)) == ["failed", "proven"]


def test_two_clicks_at_the_same_time_make_one_teardown(rehearsal: Rehearsal) -> None:
    """S-193: the teardown; `test_continuation.py` has the run that they start."""
    lease = _cooling(rehearsal)
    rehearsal.world.hooks.clear()
    together(*[lambda: retry(rehearsal) for _ in range(2)])
    account = rehearsal.account.pk
    together(*[lambda: Engine().sweep(account) for _ in range(2)])
    assert rehearsal.world.count("delete") == 1
    assert attempts(owed(lease)) == ["failed", "proven"]
    assert audited("obligation.retry_requested", owed(lease)) == 2


def test_each_failing_click_is_one_attempt_and_the_sweeps_between_do_nothing(rehearsal: Rehearsal) -> None:
    """S-194."""
    lease = _cooling(rehearsal)
    for clicks in range(1, 3):
        retry(rehearsal)
        assert sweep(rehearsal) == {"failed": 1}
        assert sweep(rehearsal) == {}
        assert owed(lease).failures == 1 + clicks
    rehearsal.world.hooks.clear()
    retry(rehearsal)
    assert sweep(rehearsal) == {"proven": 1}
    assert attempts(owed(lease)) == ["failed"] * 3 + ["proven"]


def test_it_does_not_reset_the_count(rehearsal: Rehearsal) -> None:
    """S-195: the next cooldown is half an hour again, and the escalation stands."""
    lease = _cooling(rehearsal, failures=4)
    assert owed(lease).escalated_at is not None
    escalated = owed(lease).escalated_at
    retry(rehearsal)
    assert sweep(rehearsal) == {"failed": 1}
    row = owed(lease)
    assert (row.failures, row.escalated_at) == (6, escalated)
    assert 29 * 60 < due_in(row) <= 30 * 60
    assert audited("obligation.escalated", row) == 1


def test_it_goes_before_what_is_due_longer(rehearsal: Rehearsal) -> None:
    lease = _cooling(rehearsal)
    others = Rehearsal()
    del others
    first = released(rehearsal)
    Obligation.objects.filter(lease=first).update(due_at="2020-01-01T00:00:00Z")
    leases.retrying.retry_obligations([owed(lease).pk], actor="user", reason="now")
    (claimed,) = claim(rehearsal.account.pk, new_ids(1), worker="w", clock=boottime)
    assert claimed.lease_id == lease.pk


def test_it_asks_for_what_the_run_owes_and_for_nothing_else(rehearsal: Rehearsal) -> None:
    other = Rehearsal()
    mine, strangers = _cooling(rehearsal), _cooling(other)
    held = acquired(rehearsal)
    assert retry(rehearsal) == 1
    assert (is_due(owed(mine)), is_due(owed(strangers))) == (True, False)
    assert state(held) == "active"


def test_what_is_settled_is_not_tried_again(rehearsal: Rehearsal) -> None:
    released(rehearsal)
    sweep(rehearsal)
    before = snapshot()
    assert retry(rehearsal) == 0
    assert snapshot() == before


@pytest.mark.parametrize("reason", ["", "  ", "\n"])
def test_it_needs_a_reason(rehearsal: Rehearsal, reason: str) -> None:
    _cooling(rehearsal)
    before = snapshot()
    with pytest.raises(LeaseError, match="reason"):
        leases.retry(company_id=rehearsal.company.pk, run_id=rehearsal.run.pk, actor="user", reason=reason)
    assert snapshot() == before


def test_another_companys_run_is_not_there(rehearsal: Rehearsal) -> None:
    other = Rehearsal()
    _cooling(rehearsal)
    before = snapshot()
    with pytest.raises(NotFound):
        leases.retry(company_id=other.company.pk, run_id=rehearsal.run.pk, actor="user", reason="mine")
    assert snapshot() == before


def test_an_ad_hoc_lease_is_retried_by_its_own_name(rehearsal: Rehearsal) -> None:
    lease = leases.acquire(rehearsal.environment.pk, company_id=rehearsal.company.pk)
    leases.release(lease.pk)
    asked = {"company_id": rehearsal.company.pk, "actor": "a person", "reason": "it is late"}
    assert leases.retry(lease_id=lease.pk, **asked) == 1
    with pytest.raises(NotFound):
        leases.retry(lease_id=uuid4(), **asked)
    with pytest.raises(LeaseError):
        leases.retry(**asked)
