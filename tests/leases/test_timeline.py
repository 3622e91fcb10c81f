"""A lease's timeline: one order, complete or said not to be, and a bounded number of statements."""

from __future__ import annotations

from datetime import timedelta
from uuid import uuid4

import pytest
from django.db import transaction
from pytest_django import DjangoAssertNumQueries

from leases import audit, recovering, transitions
from leases.models import Attempt, BridgeActivity, Lease, Obligation, Operation, Receipt
from leases.timeline import Source, Tone, timeline
from tests import factories

pytestmark = pytest.mark.django_db


def attempt(obligation: Obligation, **values: object) -> Attempt:
    return Attempt.objects.create(
        **{"id": uuid4(), "company_id": obligation.company_id, "obligation": obligation, "worker": "w", **values}
    )


def receipt(lease: Lease, **values: object) -> Receipt:
    return Receipt.objects.create(
        **{
            "lease": lease,
            "account_id": lease.account_id,
            "company_uuid": lease.company_id,
            "run_uuid": lease.run_id,
            "resource_id": lease.resource_id,
            "account_identity": lease.account_identity,
            "epoch": lease.epoch,
            "evidence": Receipt.Evidence.DESTROYED,
            "attempt_id": uuid4(),
            **values,
        }
    )


@pytest.mark.django_db(transaction=True)
def test_it_tells_the_whole_life_in_one_order() -> None:
    operation = factories.operation()
    with transaction.atomic():
        locked = Operation.objects.select_for_update().get(pk=operation.pk)
        lease = transitions.attach(locked, resource_id="box", expires_at=None, actor="api")
    BridgeActivity.objects.create(
        company_id=lease.company_id,
        lease=lease,
        deadline=factories.at(60),
        ended_at=factories.at(1),
        outcome="completed",
    )
    owed = factories.teardown(lease)
    tried = attempt(owed, announced_call="delete", announced_at=factories.at(1), announced_epoch=1)
    with transaction.atomic():
        proof = receipt(lease, attempt_id=tried.pk)
        transitions.settle(lease, Obligation.objects.get(pk=owed.pk), proof)

    told = timeline(lease)

    assert told.complete
    assert [event.at for event in told.events] == sorted(event.at for event in told.events)
    assert [(event.source.value, event.title) for event in told.events] == [
        ("journal", "Creation recorded, before the provider was asked"),
        ("intent", "Owed: find out what became of a creation"),
        ("closed", "No longer owed: find out what became of a creation"),
        ("audit", "lease.acquired"),
        ("activity", "Work in the sandbox, execute: completed"),
        ("intent", "Owed: stop or destroy a lease's sandbox, proven"),
        ("attempt", f"Attempt at teardown #{owed.pk}: in flight"),
        ("receipt", "Proof from the provider: destroyed"),
        ("closed", "No longer owed: stop or destroy a lease's sandbox, proven"),
        ("journal", "Creation resolved: nothing is owned any more"),
        ("audit", "lease.teardown.confirmed"),
    ]


def test_it_tells_the_announcement_and_the_outcome_of_an_attempt() -> None:
    owed = factories.teardown()
    begun = factories.database_now()
    attempt(
        owed,
        announced_call="stop",
        announced_at=begun + timedelta(seconds=2),
        announced_epoch=3,
        finished_at=begun + timedelta(seconds=9),
        outcome=Attempt.Outcome.FAILED,
        error_kind="timeout",
        error_excerpt="no answer",
    )
    Attempt.objects.filter(finished_at=None).update(claimed_at=begun)
    event = next(event for event in timeline(owed.lease).events if event.source == Source.ATTEMPT)
    facts = dict(event.facts)
    assert event.tone == Tone.BAD
    assert event.lasted is not None
    assert facts["announced"].startswith("stop (after ")
    assert facts["announced"].endswith("epoch 3)")
    assert facts["error"] == "timeout"
    assert facts["provider said"] == "no answer"


def test_a_debt_closed_without_proof_is_told_as_bad() -> None:
    owed = factories.given_up()
    closed = next(event for event in timeline(owed.lease).events if event.source == Source.CLOSED)
    assert closed.tone == Tone.BAD


@pytest.mark.django_db(transaction=True)
def test_a_sandbox_that_is_used_again_is_told_as_an_end_and_as_a_beginning() -> None:
    run = factories.run()
    environment = factories.environment(factories.account(run.company))
    before = factories.stopped(factories.lease(environment, resource_id="box"))
    start = factories.start(before, run_uuid=run.pk, request_key="try 1")
    BridgeActivity.objects.create(company_id=start.company_id, operation=start, deadline=factories.at(60))
    startup = factories.startup(run)
    with transaction.atomic():
        after = factories.lease(
            environment, id=start.lease_uuid, resource_id="box", run=run, epoch=2, acquired_at=factories.at(0)
        )
        Lease.objects.filter(pk=before.pk).update(state=Lease.State.EXPIRED, successor=after)
        transitions.close(start.obligations.get(), Obligation.ClosedAs.HANDED_OVER)
        Operation.objects.filter(pk=start.pk).update(state=Operation.State.ATTACHED, lease=after)
        audit.record("lease.succeeded", before, company_id=before.company_id)
        audit.record("lease.acquired", after, company_id=after.company_id)

    told = timeline(after).events
    assert [(event.source.value, event.title) for event in told] == [
        ("journal", "Start recorded, before the provider was asked"),
        ("intent", "Owed: find out what became of a start"),
        ("activity", "Work in the sandbox, execute: open"),
        ("intent", "Owed: see what a startup of a run left behind to its end"),
        ("takeover", "Takes the sandbox over from its predecessor"),
        ("closed", "No longer owed: find out what became of a start"),
        ("audit", "lease.acquired"),
    ]
    facts = dict(told[0].facts)
    assert (facts["request"], facts["of the sandbox of lease"]) == ("try 1", str(before.pk))
    assert dict(told[3].facts)["obligation"] == f"#{startup.pk}"
    assert dict(told[4].facts) == {"predecessor": str(before.pk)}

    told = timeline(before).events
    titles = [event.title for event in told]
    assert titles.index("Proof from the provider: stopped") < titles.index(
        "Start recorded, before the provider was asked"
    )
    assert titles[-3:] == [
        "The sandbox was taken over by a successor",
        "No longer owed: find out what became of a start",
        "lease.succeeded",
    ]
    assert dict(next(event for event in told if event.title.startswith("Start recorded")).facts)["for lease"] == str(
        after.pk
    )


@pytest.mark.django_db(transaction=True)
def test_an_adoption_is_told_with_who_found_it_and_why() -> None:
    operation = factories.operation()
    with transaction.atomic():
        locked = Operation.objects.select_for_update().get(pk=operation.pk)
        transitions.end_unverified(locked, operation.obligations.get(), actor="olga", reason="not to be found")
    assert "Creation given up: what came of it is not known" in [
        event.title for event in timeline(Lease(pk=operation.lease_uuid)).events
    ]
    with transaction.atomic():
        locked = Operation.objects.select_for_update().get(pk=operation.pk)
        lease = transitions.own_for_teardown(locked, resource_id="box", reason="adopted", actor="olga")
        audit.record("operation.adopted", locked, company_id=locked.company_id, actor="olga", reason="found by hand")
    told = timeline(lease).events
    titles = [event.title for event in told]
    assert titles == [
        "Creation recorded, before the provider was asked",
        "Owed: find out what became of a creation",
        "No longer owed: find out what became of a creation",
        "operation.unverified",
        "Owed: stop or destroy a lease's sandbox, proven",
        "Creation outlived its caller",
        "lease.owned_for_teardown",
        "operation.adopted",
    ]
    assert told[2].tone == Tone.BAD
    assert dict(told[-1].facts) == {"by": "olga", "reason": "found by hand"}


def test_the_recovery_of_its_files_is_told_with_its_start_and_what_came_of_it() -> None:
    lease, other = factories.stopped(), factories.stopped()
    with transaction.atomic():
        recovery = recovering.begin(Lease.objects.get(pk=lease.pk), requested_by="olga", reason="room was made")
        factories.start(lease, recovery=recovery, state="resolved", resolved_at=factories.at(0))
        transitions.may_be_running(Lease.objects.get(pk=lease.pk))
        recovering.exhaust(recovery)
    factories.recovery(other)
    told = {event.title: event for event in timeline(lease).events}
    assert {
        "Start recorded, before the provider was asked",
        "Owed: reopen a stopped sandbox and save its files",
        "Owed: see whether a sandbox runs whose restart was never answered",
        "recovery.begun",
    } <= told.keys()
    assert dict(told["recovery.begun"].facts)["reason"] == "room was made"
    assert told["recovery.exhausted"].tone == told["lease.may_be_running"].tone == Tone.BAD
    assert "recovery.begun" not in {event.title for event in timeline(other).events}


def test_it_tells_only_of_its_own_lease() -> None:
    mine, other = factories.teardown(), factories.teardown()
    attempt(other)
    receipt(other.lease)
    audit.record("lease.released", other.lease, company_id=other.company_id)
    assert [event.source for event in timeline(mine.lease).events] == [Source.INTENT]


def test_it_keeps_the_newest_events_and_says_that_it_left_out_older_ones() -> None:
    owed = factories.teardown()
    for number in range(7):
        made = attempt(owed)
        Attempt.objects.filter(pk=made.pk).update(claimed_at=owed.owed_since + timedelta(minutes=number))
        audit.record("lease.noted", owed.lease, company_id=owed.company_id, number=number)
    everything = timeline(owed.lease)
    assert everything.complete
    newest = timeline(owed.lease, limit=5)
    assert not newest.complete
    assert newest.events == everything.events[-5:]


def test_it_takes_as_many_statements_for_a_long_life_as_for_a_short_one(
    django_assert_num_queries: DjangoAssertNumQueries,
) -> None:
    owed = factories.teardown()
    attempt(owed)
    with django_assert_num_queries(8):
        timeline(owed.lease)
    for _ in range(20):
        attempt(owed)
        factories.operation(owed.lease.environment, lease_uuid=uuid4())
        audit.record("lease.noted", owed.lease, company_id=owed.company_id)
    with django_assert_num_queries(8):
        timeline(owed.lease)


def test_details_of_an_entry_cannot_hide_who_wrote_it() -> None:
    owed = factories.teardown()
    audit.record("lease.noted", owed.lease, company_id=owed.company_id, actor="olga", by="somebody", lease="x")
    event = timeline(owed.lease).events[-1]
    assert event.facts == (("by", "olga"), ("by", "somebody"))
