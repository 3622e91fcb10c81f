"""`execution_ended`: what counts as the end of a run's execution, what is missing otherwise, and what asking costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

import leases
from leases import ending
from leases.ending import What, execution_ended
from leases.errors import LeaseError, NotFound
from leases.models import Lease, Obligation, Operation, Receipt, Run, RunFacts
from tests import factories

pytestmark = pytest.mark.django_db(transaction=True)

State = Lease.State
ClosedAs = Obligation.ClosedAs


def over(**values: Any) -> Run:
    """A run that is over."""
    return factories.run(**{"status": Run.Status.FAILED, "finished_at": factories.at(0), **values})


def where(run: Run) -> Any:
    """An environment of the run's company."""
    return factories.environment(factories.account(run.company))


def proven(run: Run, **values: Any) -> Lease:
    """A lease of the run that was stopped and kept, with the receipt of that."""
    return factories.stopped(factories.lease(where(run), run=run), **values)


def missing(run: Run) -> list[str]:
    """What is missing, in words of code; empty: it has ended."""
    found = execution_ended(run.pk, run.company_id)
    assert found.ended == (not found.missing)
    return [one.what.value for one in found.missing]


@transaction.atomic
def seen_running(lease: Lease) -> None:
    """A kept sandbox was seen running: its stop is owed again, in an epoch of its own."""
    lease.epoch += 1
    lease.save(update_fields=["epoch"])
    factories.teardown(lease, verb=Obligation.Verb.STOP_ONLY)


@transaction.atomic
def closed(row: Obligation, closed_as: str = ClosedAs.PROVEN) -> None:
    Obligation.objects.filter(pk=row.pk).update(closed_at=factories.at(0), closed_as=closed_as, due_at=None, quiet="")


@transaction.atomic
def ended(operation: Operation, state: str, closed_as: str = ClosedAs.NOTHING_OWED) -> Operation:
    """End an operation, with the recovery that looked for it."""
    Operation.objects.filter(pk=operation.pk).update(state=state, resolved_at=factories.at(0))
    closed(Obligation.objects.get(operation=operation), closed_as)
    return operation


def creation(run: Run, **values: Any) -> Operation:
    return factories.operation(where(run), run_uuid=run.pk, **values)


# The run


def test_a_run_of_another_company_or_of_none_is_not_found() -> None:
    run = over()
    for company in (factories.company().pk, uuid4()):
        with pytest.raises(NotFound):
            execution_ended(run.pk, company)
    with pytest.raises(NotFound):
        execution_ended(uuid4())
    with pytest.raises(LeaseError, match="run_id is not an id"):
        execution_ended("7")  # type: ignore[arg-type]


@pytest.mark.parametrize("status", Run.Status.values)
def test_a_live_run_has_not_ended_whatever_its_receipts_say(status: str) -> None:
    run = over(status=status)
    proven(run)
    assert missing(run) == ([What.RUN_LIVE] if status in Run.LIVE else [])
    assert (status in execution_ended(run.pk).sentence) == (status in Run.LIVE)


def test_a_run_of_which_there_is_nothing_has_not_ended() -> None:
    assert missing(over()) == [What.NOTHING_STARTED]


# Leases


@pytest.mark.parametrize("state", [State.RELEASED, State.RETAINED])
def test_a_stop_that_was_settled_is_the_end(state: str) -> None:
    run = over()
    proven(run, state=state)
    assert missing(run) == []
    assert execution_ended(run.pk).sentence == "the execution of the run is proven ended"


@pytest.mark.parametrize(
    ("state", "evidence"),
    [
        *((state, evidence) for state in (State.RELEASED, State.RETAINED) for evidence in Receipt.Evidence.values),
        *((state, evidence) for state in (State.EXPIRED, State.FAILED) for evidence in ("destroyed", "absent")),
    ],
)
def test_any_evidence_in_any_settled_state_is_the_end(state: str, evidence: str) -> None:
    run = over()
    owed = factories.teardown(factories.lease(where(run), run=run))
    assert owed.lease is not None
    with transaction.atomic():
        factories.receipt(owed.lease, evidence=evidence)
        Lease.objects.filter(pk=owed.lease.pk).update(state=state, kept_until=factories.at(60))
        closed(owed)
    assert missing(run) == []


def test_an_active_lease_of_a_run_that_is_over_has_not_ended_with_a_receipt_either() -> None:
    run = over()
    lease = factories.lease(where(run), run=run)
    assert missing(run) == [What.LEASE_UNPROVEN]
    factories.receipt(lease)
    assert missing(run) == [What.LEASE_UNPROVEN]


@pytest.mark.parametrize("verb", Obligation.Verb.values)
def test_a_receipt_in_a_teardown_that_is_open_is_ignored_until_it_settles(verb: str) -> None:
    run = over()
    owed = factories.teardown(factories.lease(where(run), run=run), verb=verb)
    assert owed.lease is not None
    factories.receipt(owed.lease, evidence="stopped")
    factories.receipt(owed.lease, evidence="destroyed")
    assert missing(run) == [What.LEASE_UNPROVEN]
    assert f"lease {owed.lease.pk} (pending_cleanup)" in execution_ended(run.pk).sentence


def test_what_was_proven_before_its_disposal_was_owed_stays_proven() -> None:
    run = over()
    lease = proven(run)
    factories.teardown(lease)
    assert missing(run) == []
    Lease.objects.filter(pk=lease.pk).update(epoch=2)  # seen running
    assert missing(run) == [What.LEASE_UNPROVEN]


def test_each_lease_needs_its_own() -> None:
    run = over()
    proven(run)
    other = factories.lease(where(run), run=run)
    assert [one.subject for one in execution_ended(run.pk).missing] == [str(other.pk)]


def test_a_receipt_of_another_run_or_sandbox_is_nobody_elses() -> None:
    run = over()
    proven(over(company=run.company))
    owed = factories.teardown(factories.lease(where(run), run=run))
    assert owed.lease is not None
    factories.receipt(factories.lease(owed.lease.environment, run=run))
    assert missing(run) == [What.LEASE_UNPROVEN, What.LEASE_UNPROVEN]


def test_a_start_that_is_pending_suspends_it_and_a_newer_epoch_ends_it() -> None:
    run = over()
    lease = proven(run)
    start = factories.start(lease)
    assert missing(run) == [What.LEASE_UNPROVEN]
    ended(start, "resolved")
    assert missing(run) == []
    seen_running(lease)
    assert missing(run) == [What.LEASE_UNPROVEN]


def test_a_sandbox_that_may_run_again_with_a_receipt_that_stands_has_ended() -> None:
    """Issue D.1: the earlier receipt still admits the task, and an obligation of its own keeps looking."""
    run = over()
    lease = proven(run)
    with transaction.atomic():
        Lease.objects.filter(pk=lease.pk).update(may_be_running_since=factories.at(0))
        Obligation.objects.create(
            company=run.company, kind="watch_restart", account=lease.account, lease=lease, due_at=factories.at(0)
        )
    assert missing(run) == []


def succeeded(run: Run) -> tuple[Lease, Lease]:
    """A lease of the run whose sandbox a later run took over, and that run's lease."""
    lease = proven(run)
    with transaction.atomic():
        later = factories.lease(
            lease.environment, run=factories.run(run.company), resource_id=lease.resource_id, epoch=2
        )
        Lease.objects.filter(pk=lease.pk).update(state="expired", successor=later, kept_until=None)
    return lease, later


def test_one_whose_sandbox_a_successor_has_ended_in_its_own_epoch() -> None:
    run = over()
    _, later = succeeded(run)
    assert missing(run) == []
    assert missing(later.run) == [What.RUN_LIVE, What.LEASE_UNPROVEN]


def test_a_start_on_the_successors_side_takes_nothing_back() -> None:
    run = over()
    _, later = succeeded(run)
    factories.stopped(later)
    assert missing(run) == []
    start = factories.start(later)
    assert missing(run) == []
    ended(start, "unverified", ClosedAs.UNVERIFIED)
    assert missing(run) == []


def test_a_successor_is_no_proof() -> None:
    run = over()
    lease = factories.given_up(factories.lease(where(run), run=run)).lease
    assert lease is not None
    later = factories.lease(lease.environment, run=over(company=run.company), resource_id=lease.resource_id, epoch=2)
    factories.stopped(later)
    Lease.objects.filter(pk=lease.pk).update(state="expired", successor=later)
    assert missing(later.run) == []
    assert missing(run) == [What.LEASE_UNPROVEN, What.LEASE_GIVEN_UP]


def test_what_an_operator_ended_without_proof_opens_no_gate_until_it_is_paid() -> None:
    run = over()
    lease = factories.given_up(factories.lease(where(run), run=run)).lease
    assert lease is not None
    assert missing(run) == [What.LEASE_UNPROVEN, What.LEASE_GIVEN_UP]
    factories.receipt(lease, evidence="stopped")  # its destruction was demanded
    assert missing(run) == [What.LEASE_GIVEN_UP]
    factories.receipt(lease, evidence="destroyed")
    assert missing(run) == []


# Operations


def test_a_creation_that_is_pending_is_unresolved_beside_any_number_of_proofs() -> None:
    run = over()
    proven(run)
    operation = creation(run)
    assert missing(run) == [What.OPERATION_PENDING]
    assert execution_ended(run.pk).sentence == f"it is not known yet what became of creation {operation.pk}"
    ended(operation, "resolved")
    assert missing(run) == []


def test_a_run_whose_every_creation_was_refused_has_ended() -> None:
    run = over()
    first, second = creation(run), creation(run)
    assert missing(run) == [What.NOTHING_STARTED, What.OPERATION_PENDING, What.OPERATION_PENDING]
    ended(first, "resolved")
    assert missing(run) == [What.OPERATION_PENDING]
    ended(second, "resolved")
    assert missing(run) == []


def test_a_creation_that_was_given_up_is_a_debt() -> None:
    run = over()
    proven(run)
    ended(creation(run), "unverified", ClosedAs.UNVERIFIED)
    assert missing(run) == [What.OPERATION_UNVERIFIED]


def test_a_start_that_was_given_up_is_paid_by_a_proof_of_a_later_epoch() -> None:
    run = over()
    source = proven(over(company=run.company))
    proven(run)
    ended(factories.start(source, run_uuid=run.pk), "unverified", ClosedAs.UNVERIFIED)
    assert missing(run) == [What.OPERATION_UNVERIFIED]
    seen_running(source)
    assert missing(run) == [What.OPERATION_UNVERIFIED]
    factories.receipt(source, evidence="stopped")
    assert missing(run) == []


def test_what_is_another_installations_proves_nothing_here() -> None:
    run = over()
    ended(creation(run), "resolved", ClosedAs.DISOWNED)
    assert missing(run) == [What.OPERATION_DISOWNED]


# Startups


def test_an_open_startup_is_missing_and_one_that_was_proven_is_not() -> None:
    run = over()
    proven(run)
    row = factories.startup(run)
    assert missing(run) == [What.STARTUP_OPEN]
    closed(row)
    assert missing(run) == []


# What decides nothing


def test_a_process_id_that_is_alive_here_decides_nothing() -> None:
    run = over()
    RunFacts.objects.create(run=run, process_id=1)
    lease = factories.lease(where(run), run=run)
    assert missing(run) == [What.LEASE_UNPROVEN]
    factories.stopped(lease)
    assert missing(run) == []
    RunFacts.objects.filter(run=run).update(process_id=None)
    assert missing(run) == []


# How it is told, and what it costs


def test_a_sentence_tells_the_first_and_counts_the_rest() -> None:
    run = over()
    account = where(run)
    for _ in range(5):
        factories.lease(account, run=run)
    sentence = execution_ended(run.pk).sentence
    assert sentence.endswith("; and 2 more")
    assert len(sentence) < 500


@pytest.mark.parametrize("what", list(What))
def test_every_thing_that_may_be_missing_has_its_sentence(what: What) -> None:
    said = ending.Missing(what, "the-id", "create").sentence
    assert "{" not in said
    assert said[0].islower()


def test_it_costs_one_statement_however_many_leases_and_reads_them_through_indexes() -> None:
    run = over()
    place = where(run)
    for _ in range(3):
        factories.stopped(factories.lease(place, run=run))
    ended(creation(run), "resolved")
    with CaptureQueriesContext(connection) as captured:
        assert execution_ended(run.pk).ended
    assert len(captured) == 1
    with connection.cursor() as cursor:
        cursor.execute("SET enable_seqscan = off")  # as where there are many rows of others
        cursor.execute("EXPLAIN " + captured[0]["sql"])
        plan = [row[0] for row in cursor.fetchall()]
        cursor.execute("RESET enable_seqscan")
    assert [line for line in plan if "Seq Scan" in line] == []
    assert any("operation_of_run" in line for line in plan)


def test_it_is_one_of_the_public_functions() -> None:
    asked: Callable[..., Any] = leases.execution_ended
    assert asked is execution_ended


# What wakes whoever waits for it, beside what tests/leases/test_what_waits.py has


def confirmation(run: Run) -> Obligation:
    """The quiet confirmation of the run's cancellation."""
    row = factories.cancelled(run)
    Obligation.objects.filter(pk=row.pk).update(quiet="waiting", due_at=None, wakes=0)
    return row


def is_woken(row: Obligation) -> bool:
    row.refresh_from_db()
    return row.wakes > 0 and row.due_at is not None


def test_the_proof_of_a_lease_wakes_the_run_that_had_asked_for_a_start_of_its_sandbox() -> None:
    source, run = proven(over()), over()
    Run.objects.filter(pk=run.pk).update(company=source.company_id)
    start = ended(factories.start(source, run_uuid=run.pk), "unverified", ClosedAs.UNVERIFIED)
    rows = [confirmation(Run.objects.get(pk=pk)) for pk in (start.run_uuid, source.run_id)]
    bystander = confirmation(over())
    factories.receipt(source, evidence="stopped")
    assert [is_woken(row) for row in (*rows, bystander)] == [True, True, False]


def test_the_successor_of_a_lease_wakes_that_run_too() -> None:
    source = proven(over())
    run = over(company=source.company)
    ended(factories.start(source, run_uuid=run.pk), "unverified", ClosedAs.UNVERIFIED)
    row = confirmation(run)
    with transaction.atomic():
        later = factories.lease(source.environment, run=factories.run(run.company), resource_id=source.resource_id)
        Lease.objects.filter(pk=source.pk).update(state="expired", successor=later, kept_until=None)
    assert is_woken(row)


def test_the_end_of_a_start_wakes_the_run_of_every_lease_of_that_sandbox() -> None:
    """Its receipts were no proof while that start was pending."""
    source = proven(over())
    other = factories.stopped(
        factories.lease(source.environment, run=over(company=source.company), resource_id=source.resource_id)
    )
    start = factories.start(source)
    assert other.run is not None
    assert missing(other.run) == [What.LEASE_UNPROVEN]
    row = confirmation(other.run)
    ended(start, "resolved")
    assert is_woken(row)
    assert missing(other.run) == []


@pytest.mark.parametrize("column", ["cancel_requested_at", "cancel_confirmed_at"])
def test_a_cancellation_that_is_asked_for_or_confirmed_wakes_the_continuations_of_its_issue(column: str) -> None:
    run = factories.failed_run()
    waiting = factories.continuation(run).obligations.get()
    owed = confirmation(run) if column == "cancel_confirmed_at" else None
    Obligation.objects.filter(pk=waiting.pk).update(quiet="waiting", due_at=None, wakes=0)
    with transaction.atomic():
        if owed is None:
            factories.cancelled(run)
        else:
            Run.objects.filter(pk=run.pk).update(cancel_confirmed_at=factories.at(0))
            closed(owed)
    assert is_woken(waiting)
