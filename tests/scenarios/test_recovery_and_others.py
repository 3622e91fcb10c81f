"""A recovery of files, a wait for a continuation and a cancellation, met by what ends everything else.

A clone disowns them, a closed company drops them, an environment with a recovery is not deleted, what an operator
gives up strands none of them, and an observing database leaves them alone.
"""

from __future__ import annotations

import pytest
from django.db import transaction

from cleanup import judging, trusting
from leases import closing, deciding, deleting, proof, transitions, trust
from leases.blockers import Refused
from leases.errors import DecisionRefused
from leases.models import ActivityEntry, Continuation, Installation, Lease, Obligation, Operation, Recovery
from providers.contract import ErrorKind
from tests import factories
from tests.scenarios.steps import fails, falls_due, snapshot, state, sweep
from tests.scenarios.test_recovery import failed, open_kinds, owed, recover
from tests.stage import Rehearsal

pytestmark = pytest.mark.django_db(transaction=True)

Kind = Obligation.Kind
NEW = (
    Kind.RECOVER_WORKSPACE,
    Kind.END_RECOVERY,
    Kind.WATCH_RESTART,
    Kind.START_CONTINUATION,
    Kind.CONFIRM_CANCEL,
)


@pytest.fixture(autouse=True)
def _judged_anew() -> None:
    judging.forget()


def observe() -> str:
    """Let this database observe, and return its mark."""
    assert judging.is_cleared()
    at = factories.database_now()
    Installation.objects.update(observing_since=at, observing_why="behind", observed_mark_at=at)
    return str(Installation.current().mark)


def test_a_clone_has_no_part_in_the_recoveries_continuations_and_cancellations_of_its_original() -> None:
    watched = factories.may_be_running()
    recovery = factories.recovery(factories.stopped(factories.lease(watched.environment)))
    factories.start(recovery.lease, recovery=recovery)
    archive = factories.archive(recovery, saved_at=None)
    continuation = factories.continuation(recovery=None)
    cancellation = factories.cancelled()
    trusting.as_clone(actor="ann", reason="staging", confirmation=observe())
    assert not Obligation.objects.filter(closed_at__isnull=True).exclude(kind="watch_controllers").exists()
    for row in (watched, recovery, continuation, cancellation, archive):
        row.refresh_from_db()
    assert (watched.state, watched.may_be_running_since) == ("failed", None)
    assert (recovery.state, recovery.failure, recovery.disposition) == (
        "exhausted",
        "stopped",
        "use_alternative_strategy",
    )
    assert (continuation.state, continuation.withdrawn_by) == ("withdrawn", "ann")
    assert continuation.obligations.get().closed_as == cancellation.closed_as == "disowned"
    assert cancellation.run.cancel_confirmed_at is None, "nothing proves the end of what is the original's"
    assert archive.removed_at is None, "the original may be writing that file at this moment"


def test_closing_a_company_withdraws_what_waits_and_drops_a_cancellation_that_nothing_can_confirm() -> None:
    cancellation = factories.cancelled(factories.run(status="cancelled"))
    company = cancellation.company
    continuation = factories.continuation(factories.failed_run(company))
    before = snapshot()
    with pytest.raises(Refused) as refused:  # nobody has looked at it yet: it may be confirmed
        closing.close_company(company.pk, actor="olga", reason="left")
    assert dict(refused.value.blockers.counts) == {"open_obligation": 1}
    assert snapshot() == before
    Obligation.objects.filter(pk=cancellation.pk).update(quiet="waiting", due_at=None)
    closing.close_company(company.pk, actor="olga", reason="left")
    continuation.refresh_from_db()
    assert (continuation.state, continuation.withdrawn_by) == ("withdrawn", "olga")
    assert not Obligation.objects.filter(company=company, closed_at__isnull=True).exists()
    assert ActivityEntry.objects.get(action="company.closed").details["continuations"] == 1
    assert ActivityEntry.objects.filter(action="run.cancellation_dropped").count() == 1


def test_an_environment_in_which_files_are_being_recovered_is_not_deleted_even_with_consent(
    rehearsal: Rehearsal,
) -> None:
    lease = failed(rehearsal)
    recover(lease)
    assert lease.environment is not None
    with pytest.raises(Refused) as refused:
        deleting.delete_environment(
            lease.environment.pk, company_id=lease.company_id, consent=True, actor="olga", reason="old"
        )
    assert [one.told for one in refused.value.blockers.listed if "recovered" in one.told]
    assert state(lease) == "retained"


# What an operator ends


def unanswered(rehearsal: Rehearsal) -> tuple[Lease, Recovery, Operation]:
    """A recovery whose worker died when it had journalled its start."""
    lease = failed(rehearsal)
    recovery = recover(lease)
    return lease, recovery, factories.start(lease, recovery=recovery, created_at=factories.at(-9999))


def give_up(row: Obligation) -> None:
    deciding.settle_unverified(
        row.pk,
        confirmation=deciding.confirmation_of(row),
        company_id=row.company_id,
        actor="olga",
        reason="its provider is gone",
    )


def test_a_start_of_a_recovery_that_is_given_up_opens_no_gate_and_runs_nothing_unseen(rehearsal: Rehearsal) -> None:
    lease, recovery, operation = unanswered(rehearsal)
    give_up(operation.obligations.get())
    lease.refresh_from_db()
    assert not proof.is_proven_ended(lease), "a receipt from before says nothing about what was started since"
    assert lease.may_be_running_since is not None
    Recovery.objects.filter(pk=recovery.pk).update(ends_at=factories.at(0))
    falls_due(owed(lease, "end_recovery"))
    rehearsal.world.hooks["inspect"] = fails(ErrorKind.SERVER)
    sweep(rehearsal)
    recovery.refresh_from_db()
    assert recovery.state == "exhausted"
    assert open_kinds(lease) == {"dispose", "watch_restart"}
    assert not proof.is_proven_ended(lease)


@pytest.mark.parametrize("seen", ["running", "stopped"])
def test_who_watches_it_finds_the_proof_that_was_given_up(rehearsal: Rehearsal, seen: str) -> None:
    lease, _, operation = unanswered(rehearsal)
    give_up(operation.obligations.get())
    rehearsal.world.of(lease.resource_id).state = seen
    falls_due(owed(lease, "watch_restart"))
    sweep(rehearsal)
    lease.refresh_from_db()
    assert lease.may_be_running_since is None
    assert "watch_restart" not in open_kinds(lease)
    assert rehearsal.world.of(lease.resource_id).state == "stopped"


def test_a_teardown_that_is_given_up_leaves_nobody_watching_its_sandbox(rehearsal: Rehearsal) -> None:
    lease = factories.may_be_running(failed(rehearsal))
    with pytest.raises(DecisionRefused, match="destroy that sandbox"):
        deciding.require_settleable(owed(lease, "watch_restart"))
    with transaction.atomic():
        row = Lease.objects.select_for_update(no_key=True).get(pk=lease.pk)
        transitions.dispose(row, reason="test", actor="olga")
    give_up(owed(lease, "teardown"))
    lease.refresh_from_db()
    assert (lease.state, lease.may_be_running_since) == ("failed", None)
    assert open_kinds(lease) == {"verify_end"}


@pytest.mark.parametrize("make", [factories.recovery, factories.may_be_running, factories.continuation])
def test_what_needs_no_proof_is_not_settled_without(make: object) -> None:
    make()  # type: ignore[operator]
    for row in Obligation.objects.filter(kind__in=NEW):
        before = snapshot()
        with pytest.raises(DecisionRefused, match="needs no proof and cannot be settled without"):
            deciding.confirmation_of(row)
        assert snapshot() == before


@pytest.mark.parametrize("kind", NEW)
def test_an_observing_database_starts_nothing_and_ends_nothing_by_time(kind: str) -> None:
    """What it does not know of may have been started, saved or stopped since."""
    lease = factories.stopped()
    observe()
    assert trust.forbids(trust.read(), kind, lease=lease)
    assert trust.forbids(trust.read(), kind)


def test_a_recovery_waits_while_the_database_observes_and_ends_by_its_time_afterwards(rehearsal: Rehearsal) -> None:
    lease = failed(rehearsal)
    recovery = recover(lease)
    calls = len(rehearsal.world.calls)
    observe()
    sweep(rehearsal)
    assert len(rehearsal.world.calls) == calls
    assert {owed(lease, kind).quiet for kind in ("recover_workspace",)} == {"observing"}
    Recovery.objects.filter(pk=recovery.pk).update(ends_at=factories.at(0))
    falls_due(owed(lease, "end_recovery"))
    sweep(rehearsal)
    recovery.refresh_from_db()
    assert recovery.state == "running"
    trusting.as_restore(actor="ann", reason="the only one")
    sweep(rehearsal)
    recovery.refresh_from_db()
    assert recovery.state == "exhausted"
    assert not Continuation.objects.exists()
