"""E: the end of a use. A release owes the teardown in its own transaction and asks no provider; only proof settles."""

from __future__ import annotations

import pytest

import leases
from leases.errors import LeaseError, NotFound
from leases.models import ActivityEntry, Lease, Obligation, Receipt, Run
from providers.contract import ErrorKind, Resource
from tests import factories
from tests.concurrency import elsewhere
from tests.scenarios.steps import acquired, audited, evidence, fails, is_due, owed, released, state, stop, sweep
from tests.stage import Rehearsal


def test_a_release_with_a_matching_receipt_settles_and_keeps_it(rehearsal: Rehearsal) -> None:
    """S-102."""
    lease = released(rehearsal)
    assert sweep(rehearsal) == {"proven": 1}
    assert state(lease) == Lease.State.EXPIRED
    receipt = Receipt.objects.get()
    assert (receipt.lease_id, receipt.company_uuid, receipt.run_uuid) == (lease.pk, lease.company_id, lease.run_id)
    assert (receipt.account_id, receipt.account_identity) == (lease.account_id, rehearsal.world.identity)
    assert (receipt.resource_id, receipt.epoch, receipt.ended) == (lease.resource_id, 1, "killed")


def test_an_answer_about_another_sandbox_is_no_receipt(rehearsal: Rehearsal) -> None:
    """S-104, S-280: a receipt is about exactly this resource. An adapter that mixes handles up proves nothing."""
    lease = released(rehearsal, "reuse_by_environment")
    mine = rehearsal.world.of(lease.resource_id)
    mine.state = "stopped"
    mine.resource = Resource("another sandbox", mine.resource.name, mine.resource.marks)
    sweep(rehearsal)
    assert evidence(lease) == []
    assert state(lease) == Lease.State.PENDING_CLEANUP


def test_a_release_asks_no_provider_and_is_committed_before_anyone_does(rehearsal: Rehearsal) -> None:
    """S-106, domain I-8: a provider that is down cannot fail a release; what is owed is a row."""
    lease = acquired(rehearsal)
    rehearsal.world.calls.clear()
    leases.release(lease.pk)
    assert rehearsal.world.calls == []
    assert state(lease) == Lease.State.PENDING_CLEANUP
    assert is_due(owed(lease))


@pytest.mark.parametrize("policy", ["ephemeral", "reuse_by_environment", "retain_on_failure"])
@pytest.mark.parametrize("kind", [ErrorKind.SERVER, ErrorKind.TIMEOUT, ErrorKind.REFUSED, ErrorKind.NOT_FOUND])
def test_an_explicit_stop_without_proof_leaves_it_owed(rehearsal: Rehearsal, policy: str, kind: ErrorKind) -> None:
    """S-105, S-043, K-02: whatever the provider answers but the end itself, the lease stays pending clean-up."""
    lease = acquired(rehearsal, policy)
    rehearsal.world.hooks.update(stop=fails(kind), delete=fails(kind))
    assert stop(rehearsal) == 1
    assert sweep(rehearsal) == {"failed": 1}
    assert state(lease) == Lease.State.PENDING_CLEANUP
    assert evidence(lease) == []
    row = owed(lease)
    assert (row.is_open, row.failures) == (True, 1)


@pytest.mark.parametrize(
    ("outcome", "receipt", "ends"), [("failed", "stopped", "retained"), ("succeeded", "destroyed", "expired")]
)
def test_a_policy_keeps_the_sandbox_of_a_failed_run_and_only_of_one(
    rehearsal: Rehearsal, outcome: str, receipt: str, ends: str
) -> None:
    """S-108, but for "even if release failed": kept means proven stopped."""
    lease = released(rehearsal, "retain_on_failure", outcome=outcome)
    assert sweep(rehearsal) == {"proven": 1}
    assert (state(lease), evidence(lease)) == (ends, [receipt])
    assert (lease.resource_id in rehearsal.world.boxes) == (outcome == "failed")


def test_a_failed_stop_does_not_make_a_lease_retained(rehearsal: Rehearsal) -> None:
    lease = released(rehearsal, "retain_on_failure", outcome="failed")
    rehearsal.world.hooks["stop"] = fails(ErrorKind.REFUSED)
    sweep(rehearsal)
    assert state(lease) == Lease.State.PENDING_CLEANUP
    assert rehearsal.world.count("delete") == 0


def test_of_two_leases_one_that_cannot_be_stopped_holds_the_other_up_in_nothing(rehearsal: Rehearsal) -> None:
    """S-111: each is its own row; the error is on the row of its lease."""
    bad, good = acquired(rehearsal), acquired(rehearsal)
    rehearsal.world.hooks["delete"] = lambda subject: (
        fails(ErrorKind.REFUSED)(subject) if subject == bad.resource_id else None
    )
    assert stop(rehearsal) == 2
    assert sweep(rehearsal) == {"failed": 1, "proven": 1}
    assert (state(bad), state(good)) == ("pending_cleanup", "failed")
    assert (owed(bad).last_error_kind, owed(good).last_error_kind) == ("refused", "")


def test_a_reusable_lease_is_destroyed_when_that_is_asked_for(rehearsal: Rehearsal) -> None:
    """S-114."""
    lease = released(rehearsal, "reuse_by_environment", disposition="destroy")
    assert sweep(rehearsal) == {"proven": 1}
    assert (rehearsal.world.count("stop"), evidence(lease)) == (0, ["destroyed"])


def test_a_reusable_lease_whose_destruction_fails_stays_owed(rehearsal: Rehearsal) -> None:
    """S-116."""
    lease = released(rehearsal, "reuse_by_environment", disposition="destroy")
    rehearsal.world.hooks["delete"] = fails(ErrorKind.REFUSED)
    assert sweep(rehearsal) == {"failed": 1}
    assert state(lease) == Lease.State.PENDING_CLEANUP
    assert lease.resource_id in rehearsal.world.boxes


def test_a_reusable_lease_is_stopped_and_its_sandbox_kept(rehearsal: Rehearsal) -> None:
    lease = released(rehearsal, "reuse_by_environment")
    assert sweep(rehearsal) == {"proven": 1}
    assert (state(lease), evidence(lease)) == ("released", ["stopped"])
    assert rehearsal.world.of(lease.resource_id).state == "stopped"


def test_the_live_state_is_read_before_a_stop_is_believed(rehearsal: Rehearsal) -> None:
    """S-126: what was stopped when the work began may run by now."""
    lease = acquired(rehearsal, "reuse_by_environment")
    rehearsal.world.of(lease.resource_id).state = "stopped"
    leases.release(lease.pk)
    rehearsal.world.of(lease.resource_id).state = "running"
    rehearsal.world.calls.clear()
    assert sweep(rehearsal) == {"proven": 1}
    assert [call for call, _ in rehearsal.world.calls] == ["identify", "inspect", "stop", "inspect"]


def test_a_sandbox_that_is_stopped_already_is_not_stopped_again(rehearsal: Rehearsal) -> None:
    lease = released(rehearsal, "reuse_by_environment")
    rehearsal.world.of(lease.resource_id).state = "stopped"
    assert sweep(rehearsal) == {"proven": 1}
    assert rehearsal.world.count("stop") == 0
    assert evidence(lease) == ["stopped"]


def test_a_release_that_is_repeated_owes_nothing_twice(rehearsal: Rehearsal) -> None:
    lease = released(rehearsal)
    leases.release(lease.pk)
    assert Obligation.objects.filter(lease=lease).count() == 1
    sweep(rehearsal)
    assert leases.release(lease.pk).state == Lease.State.EXPIRED
    assert Obligation.objects.filter(lease=lease).count() == 1
    assert audited("lease.released", lease) == 1


def test_a_stronger_second_demand_wakes_the_row(rehearsal: Rehearsal) -> None:
    lease = released(rehearsal, "reuse_by_environment")
    rehearsal.world.hooks["stop"] = fails(ErrorKind.SERVER)
    sweep(rehearsal)
    assert not is_due(owed(lease))
    del rehearsal.world.hooks["stop"]
    leases.release(lease.pk, disposition="destroy")
    assert is_due(owed(lease))
    assert sweep(rehearsal) == {"proven": 1}
    assert evidence(lease) == ["destroyed"]
    assert audited("lease.teardown.changed", lease) == 1


def test_a_demand_that_becomes_stronger_while_a_call_is_in_flight_is_decided_on_before_the_next(
    rehearsal: Rehearsal,
) -> None:
    """The stop was sent; by the time it answers, stopped is not enough any more."""
    lease = released(rehearsal, "reuse_by_environment")
    rehearsal.world.after["stop"] = lambda _: elsewhere(lambda: leases.release(lease.pk, disposition="destroy"))
    sweep(rehearsal)
    assert owed(lease).attempt_id is None, "the row is left to an attempt that is over"
    assert evidence(lease)[-1] == "destroyed"
    assert state(lease) == Lease.State.EXPIRED


@pytest.mark.parametrize("policy", ["reuse_by_environment", "retain_on_failure"])
def test_an_ad_hoc_lease_is_always_destroyed(rehearsal: Rehearsal, policy: str) -> None:
    """Domain I-12: without a run nobody could ever resume it; its receipt names no run."""
    lease = acquired(rehearsal, policy, ad_hoc=True)
    leases.release(lease.pk, outcome="failed")
    assert sweep(rehearsal) == {"proven": 1}
    assert evidence(lease) == ["destroyed"]
    assert Receipt.objects.get().run_uuid is None


def test_a_terminal_run_proves_nothing_about_its_sandbox(rehearsal: Rehearsal) -> None:
    """Domain I-5."""
    lease = released(rehearsal)
    Run.objects.filter(pk=rehearsal.run.pk).update(status=Run.Status.SUCCEEDED)
    assert state(lease) == Lease.State.PENDING_CLEANUP
    assert evidence(lease) == []
    assert sweep(rehearsal) == {"proven": 1}
    assert rehearsal.world.count("delete") == 1


# Whose it is


def test_nobody_releases_or_stops_what_is_another_companys(rehearsal: Rehearsal) -> None:
    other = Rehearsal()
    lease = acquired(rehearsal)
    entries = ActivityEntry.objects.count()
    with pytest.raises(NotFound):
        leases.release(lease.pk, company_id=other.company.pk)
    with pytest.raises(NotFound):
        leases.stop(company_id=other.company.pk, lease_id=lease.pk)
    with pytest.raises(NotFound):
        leases.stop(company_id=other.company.pk, run_id=rehearsal.run.pk)
    with pytest.raises(NotFound):
        leases.bridge(lease.pk, company_id=other.company.pk).execute(["true"])
    assert state(lease) == Lease.State.ACTIVE
    assert ActivityEntry.objects.count() == entries


@pytest.mark.parametrize("how", [{"outcome": "unclear"}, {"disposition": "keep_forever"}])
def test_a_release_that_says_nonsense_is_refused_with_nothing_written(rehearsal, how: dict[str, str]) -> None:
    lease = acquired(rehearsal)
    with pytest.raises(LeaseError):
        leases.release(lease.pk, **how)
    assert state(lease) == Lease.State.ACTIVE
    assert not Obligation.objects.filter(lease=lease).exists()


def test_a_stop_names_a_run_or_a_lease(rehearsal: Rehearsal) -> None:
    for wrong in ({}, {"run_id": rehearsal.run.pk, "lease_id": factories.lease().pk}):
        with pytest.raises(LeaseError, match="either a run or a lease"):
            leases.stop(company_id=rehearsal.company.pk, **wrong)


def test_a_command_line_in_one_string_is_refused_before_anything_is_admitted(rehearsal: Rehearsal) -> None:
    lease = acquired(rehearsal)
    with pytest.raises(TypeError, match="one string each"):
        leases.bridge(lease.pk).execute("echo hi")
    assert lease.activities.count() == 0
