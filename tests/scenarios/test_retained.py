"""P: retained orphans, and every other kept sandbox. What is needed is not destroyed, and nothing is kept for ever."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import connection, transaction

import leases
from cleanup.engine import Engine, Tally
from leases import holds, keeping, transitions
from leases.errors import LeaseError
from leases.models import Environment, Hold, Lease, Obligation, Run
from tests import factories
from tests.concurrency import elsewhere, together
from tests.scenarios.steps import acquired, audited, due_in, evidence, falls_due, owed, released, snapshot, state
from tests.scenarios.steps import sweep_lane as settle
from tests.stage import Rehearsal

DAY = 86_400.0


def sweep(rehearsal: Rehearsal) -> dict[str, int]:
    """Pay what the account owes and nothing else, so that each test says when its settles look."""
    total = Tally()
    while (tally := Engine().sweep(rehearsal.account.pk)).claimed:
        total.add(tally)
    return dict(total.outcomes)


def orphan(rehearsal: Rehearsal, *, settled: bool = True) -> Lease:
    """A lease that nobody held any more: stopped, kept, marked (S-220); its run is over."""
    Run.objects.filter(pk=rehearsal.run.pk).update(issue=factories.issue(rehearsal.company))
    lease = acquired(rehearsal)
    with transaction.atomic():
        transitions.orphan(Lease.objects.select_for_update(no_key=True, of=("self",)).get(pk=lease.pk))
    Run.objects.filter(pk=rehearsal.run.pk).update(status=Run.Status.FAILED)
    sweep(rehearsal)
    if settled:
        settle()
    lease.refresh_from_db()
    return lease


def disposal(lease: Lease) -> Obligation:
    return lease.obligations.filter(kind=Obligation.Kind.DISPOSE).latest("pk")


def test_an_ownership_settle_stops_keeps_and_marks(rehearsal: Rehearsal) -> None:
    """S-220."""
    Run.objects.filter(pk=rehearsal.run.pk).update(status=Run.Status.RUNNING)
    lease = acquired(rehearsal)
    with transaction.atomic():
        transitions.orphan(Lease.objects.select_for_update(no_key=True, of=("self",)).get(pk=lease.pk))
    assert sweep(rehearsal) == {"proven": 1}
    assert (state(lease), evidence(lease)) == ("released", ["stopped"])
    assert lease.orphaned_at is not None
    assert rehearsal.world.of(lease.resource_id).state == "stopped"


def test_one_that_nothing_refers_to_is_destroyed_at_once(rehearsal: Rehearsal) -> None:
    """S-221: the settle owes it, ephemeral from then on, and asks no provider; the engine destroys it by its record."""
    lease = orphan(rehearsal, settled=False)
    calls = len(rehearsal.world.calls)
    Environment.objects.filter(pk=rehearsal.environment.pk).delete()
    settle()
    assert len(rehearsal.world.calls) == calls
    assert (state(lease), lease.policy, owed(lease).verb) == ("pending_cleanup", "ephemeral", "delete")
    assert due_in(owed(lease)) <= 0
    assert sweep(rehearsal) == {"proven": 1}
    assert (state(lease), evidence(lease)) == ("failed", ["stopped", "destroyed"])
    assert rehearsal.world.count("delete") == 1


def test_an_open_recovery_action_keeps_it_while_the_window_is_open(rehearsal: Rehearsal) -> None:
    """S-222, S-227, S-226: due exactly when the window ends, and destroyed then, whatever still refers to it."""
    lease = orphan(rehearsal, settled=False)
    window = factories.at(3600)
    Lease.objects.filter(pk=lease.pk).update(expires_at=window)
    factories.hold(lease.issue, Hold.Kind.RECOVERY_ACTION)
    settle()
    assert state(lease) == Lease.State.RELEASED
    assert disposal(lease).due_at == window
    Lease.objects.filter(pk=lease.pk).update(expires_at=factories.at(-1))
    settle()
    assert state(lease) == Lease.State.PENDING_CLEANUP


def test_a_scheduled_retry_of_its_issue_keeps_it(rehearsal: Rehearsal) -> None:
    """S-224, S-231: without a window until the reference clears, whose write wakes the settle."""
    lease = orphan(rehearsal, settled=False)
    retry = factories.run(rehearsal.company, issue=lease.issue, status=Run.Status.SCHEDULED_RETRY)
    settle()
    row = disposal(lease)
    assert (row.due_at, row.quiet) == (None, "waiting")
    Run.objects.filter(pk=retry.pk).update(status=Run.Status.CANCELLED)
    settle()
    assert state(lease) == Lease.State.PENDING_CLEANUP


@pytest.mark.parametrize("kind", sorted(set(Hold.Kind.values) - set(Hold.SOFT_KINDS)))
def test_an_always_hold_keeps_it_after_the_window_too(rehearsal: Rehearsal, kind: str) -> None:
    """S-228."""
    lease = orphan(rehearsal, settled=False)
    Lease.objects.filter(pk=lease.pk).update(expires_at=factories.at(-1))
    row = factories.hold(lease, kind, until_in=None)
    settle()
    assert state(lease) == Lease.State.RELEASED
    assert disposal(lease).due_at == row.until
    Hold.objects.filter(pk=row.pk).update(ended_at=factories.database_now(), ended_by="tester")
    settle()
    assert state(lease) == Lease.State.PENDING_CLEANUP


def test_without_the_mark_this_path_leaves_it_alone(rehearsal: Rehearsal) -> None:
    """S-229: until its own time is over; a command marks old ones on an operator's word."""
    lease = orphan(rehearsal, settled=False)
    Lease.objects.filter(pk=lease.pk).update(orphaned_at=None, kept_until=factories.at(30 * DAY))
    settle()
    assert state(lease) == Lease.State.RELEASED
    assert 29 * DAY < due_in(disposal(lease)) <= 30 * DAY
    keeping.mark_orphaned(lease.pk, company_id=lease.company_id, actor="operator", reason="nobody's since spring")
    settle()
    assert state(lease) == Lease.State.PENDING_CLEANUP
    assert audited("lease.marked_orphaned", lease) == 1


def test_two_holds_that_end_at_the_same_time_do_not_hide_each_other(rehearsal: Rehearsal) -> None:
    lease = orphan(rehearsal, settled=False)
    rows = [factories.hold(lease, Hold.Kind.EXPORT_RESUME), factories.hold(lease, Hold.Kind.RECOVERY_SOURCE)]
    settle()
    assert disposal(lease).quiet == "waiting"

    def end(row: Hold) -> object:
        return lambda: holds.end(row.pk, company_id=row.company_id, actor="tester")

    together(*(end(row) for row in rows))  # type: ignore[arg-type]
    settle()
    assert state(lease) == Lease.State.PENDING_CLEANUP


def test_a_hold_that_comes_after_the_settle_and_before_the_call_saves_it(rehearsal: Rehearsal) -> None:
    """The settle's decision is looked at again right before the destroying call; no second stop is needed."""
    lease = orphan(rehearsal)
    assert state(lease) == Lease.State.PENDING_CLEANUP
    row = holds.hold(company_id=lease.company_id, lease_id=lease.pk, kind="recovery_source", holder="recovery")
    calls = len(rehearsal.world.calls)
    sweep(rehearsal)
    assert state(lease) == Lease.State.RELEASED
    assert rehearsal.world.count("delete") == 0
    assert "stop" not in [call[0] for call in rehearsal.world.calls[calls:]]
    settle()
    assert disposal(lease).quiet == "waiting"
    holds.end(row.pk, company_id=lease.company_id, actor="recovery")
    settle()
    sweep(rehearsal)
    assert evidence(lease)[-1] == "destroyed"


def test_a_run_that_needs_the_files_by_then_saves_it_too(rehearsal: Rehearsal) -> None:
    """Not a row of ours, but the same list: a soft hold that came about after the settle."""
    lease = orphan(rehearsal)
    factories.run(rehearsal.company, issue=lease.issue, status=Run.Status.QUEUED)
    sweep(rehearsal)
    assert state(lease) == Lease.State.RELEASED
    assert rehearsal.world.count("delete") == 0


@pytest.mark.parametrize("who", ["issue", "run", "lease"])
def test_a_settle_that_meets_a_lock_comes_back_and_writes_nothing(rehearsal: Rehearsal, who: str) -> None:
    lease = orphan(rehearsal, settled=False)
    table = {
        "issue": ("leases_issue", lease.issue_id),
        "run": ("leases_run", lease.run_id),
        "lease": ("leases_lease", lease.pk),
    }
    name, pk = table[who]
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(f"SELECT 1 FROM {name} WHERE id = %s FOR UPDATE", [pk])  # noqa: S608 - a constant
        tally = elsewhere(settle)
    assert tally.outcomes == {"contended": 1}
    assert state(lease) == Lease.State.RELEASED
    assert 0 < due_in(disposal(lease)) <= 30
    falls_due(disposal(lease))
    settle()
    assert state(lease) == Lease.State.PENDING_CLEANUP


# No sandbox without an end


def test_an_idle_reusable_sandbox_is_destroyed_when_its_time_is_over(rehearsal: Rehearsal) -> None:
    Environment.objects.filter(pk=rehearsal.environment.pk).update(reuse_idle_for=timedelta(hours=2))
    lease = released(rehearsal, "reuse_by_environment")
    sweep(rehearsal)
    assert 7190 < due_in(disposal(lease)) <= 7200
    Run.objects.filter(pk=rehearsal.run.pk).update(status=Run.Status.SUCCEEDED)
    settle()
    assert state(lease) == Lease.State.RELEASED
    Lease.objects.filter(pk=lease.pk).update(kept_until=factories.at(-1))
    settle()
    assert (state(lease), lease.reason, lease.scope) == ("pending_cleanup", "idle_too_long", "")
    sweep(rehearsal)
    assert state(lease) == Lease.State.EXPIRED


def test_a_retained_sandbox_is_destroyed_when_its_time_is_over(rehearsal: Rehearsal) -> None:
    lease = released(rehearsal, "retain_on_failure", outcome="failed")
    Run.objects.filter(pk=rehearsal.run.pk).update(status=Run.Status.FAILED)
    sweep(rehearsal)
    assert state(lease) == Lease.State.RETAINED
    assert 29 * DAY < due_in(disposal(lease)) <= 30 * DAY
    Lease.objects.filter(pk=lease.pk).update(kept_until=factories.at(-1))
    settle()
    sweep(rehearsal)
    assert (state(lease), evidence(lease)) == ("failed", ["stopped", "destroyed"])


def test_one_that_is_used_again_has_no_end_until_it_is_kept_again(rehearsal: Rehearsal) -> None:
    lease = released(rehearsal, "reuse_by_environment")
    sweep(rehearsal)
    again = acquired(rehearsal, "reuse_by_environment")
    assert again.pk == lease.pk
    assert not disposal(lease).is_open
    again.refresh_from_db()
    assert again.kept_until is None
    other = factories.run(rehearsal.company)
    leases.release(again.pk)
    sweep(rehearsal)
    taken = leases.acquire(rehearsal.environment.pk, company_id=rehearsal.company.pk, run_id=other.pk)
    assert taken.resource_id == lease.resource_id
    assert not lease.obligations.filter(closed_at=None).exists()


def test_an_environment_may_leave_it_to_an_operator(rehearsal: Rehearsal) -> None:
    Environment.objects.filter(pk=rehearsal.environment.pk).update(retain_for=None)
    lease = released(rehearsal, "retain_on_failure", outcome="failed")
    Run.objects.filter(pk=rehearsal.run.pk).update(status=Run.Status.FAILED)
    sweep(rehearsal)
    settle()
    assert (state(lease), disposal(lease).quiet) == ("retained", "operator_decides")
    until = factories.at(3600)
    keeping.keep_until(lease.pk, until, company_id=lease.company_id, actor="operator", reason="look at it tomorrow")
    settle()
    assert disposal(lease).due_at == until
    keeping.destroy_now(lease.pk, company_id=lease.company_id, actor="operator", reason="looked at it")
    sweep(rehearsal)
    assert evidence(lease)[-1] == "destroyed"


def test_an_operator_cannot_destroy_what_is_held_and_is_told_by_whom(rehearsal: Rehearsal) -> None:
    lease = orphan(rehearsal, settled=False)
    factories.hold(lease, Hold.Kind.RESTORE_RECOVERY)
    with pytest.raises(keeping.Held, match="files are still to be restored") as refused:
        keeping.destroy_now(lease.pk, company_id=lease.company_id, actor="operator", reason="space")
    assert refused.value.code == "held"
    assert state(lease) == Lease.State.RELEASED


def test_what_is_not_kept_cannot_be_decided_about(rehearsal: Rehearsal) -> None:
    lease = acquired(rehearsal)
    before = snapshot()
    for decide in (
        lambda: keeping.destroy_now(lease.pk, company_id=lease.company_id, actor="o", reason="r"),
        lambda: keeping.mark_orphaned(lease.pk, company_id=lease.company_id, actor="o", reason="r"),
        lambda: keeping.keep_until(lease.pk, factories.at(60), company_id=lease.company_id, actor="o", reason="r"),
    ):
        with pytest.raises(LeaseError) as refused:
            decide()
        assert refused.value.code == "not_kept"
    assert snapshot() == before


def test_closing_an_issue_in_its_own_live_run_leaves_that_runs_sandbox(rehearsal: Rehearsal) -> None:
    """S-115."""
    issue = factories.issue(rehearsal.company)
    Run.objects.filter(pk=rehearsal.run.pk).update(issue=issue, status=Run.Status.RUNNING)
    mine = released(rehearsal, "reuse_by_environment")
    sweep(rehearsal)
    over = factories.run(rehearsal.company, issue=issue, status=Run.Status.FAILED)
    other = factories.stopped(factories.lease(rehearsal.environment, issue=issue, run=over))
    done = keeping.destroy_for_issue(issue.pk, company_id=rehearsal.company.pk, actor="control", reason="issue closed")
    assert done.destroyed == (other.pk,)
    assert [standing.lease_id for standing in done.held] == [mine.pk]
    assert (state(mine), state(other)) == ("released", "pending_cleanup")


# The provider's own deadline of what is held


def test_the_providers_deadline_of_a_held_sandbox_is_kept_ahead(limited: Rehearsal) -> None:
    lease = orphan(limited, settled=False)
    box = limited.world.of(lease.resource_id)
    ends = factories.at(600)
    Lease.objects.filter(pk=lease.pk).update(expires_at=ends)
    row = factories.hold(lease, Hold.Kind.RESTORE_RECOVERY)
    settle()
    extend = lease.obligations.get(kind="extend", closed_at=None)
    assert 0 < due_in(extend) <= 300
    falls_due(extend)
    sweep(limited)
    lease.refresh_from_db()
    assert lease.expires_at is not None
    assert lease.expires_at > ends
    assert box.resource.expires_at == lease.expires_at
    holds.end(row.pk, company_id=lease.company_id, actor="tester")
    settle()
    assert not lease.obligations.filter(kind="extend", closed_at=None).exists()
    assert state(lease) == Lease.State.PENDING_CLEANUP


def test_a_deadline_that_cannot_be_moved_is_shown_to_the_operator_before_the_files_are_gone(
    rehearsal: Rehearsal,
) -> None:
    lease = orphan(rehearsal, settled=False)
    Lease.objects.filter(pk=lease.pk).update(expires_at=factories.at(600))
    factories.hold(lease, Hold.Kind.RESTORE_RECOVERY)
    settle()
    extend = lease.obligations.get(kind="extend", closed_at=None)
    falls_due(extend)
    sweep(rehearsal)
    extend.refresh_from_db()
    assert extend.quiet == "deadline_fixed"


# What a hold is worth


@pytest.mark.parametrize("kind", ["recovery_source", "restore_recovery", "export_resume", "operator", "export"])
def test_a_held_sandbox_is_given_to_no_other_run(rehearsal: Rehearsal, kind: str) -> None:
    """Its next run would write over the files that somebody holds, and its end would destroy them."""
    lease = released(rehearsal, "reuse_by_environment")
    sweep(rehearsal)
    factories.hold(lease, kind)
    other = factories.run(rehearsal.company)
    taken = leases.acquire(rehearsal.environment.pk, company_id=rehearsal.company.pk, run_id=other.pk)
    assert taken.resource_id != lease.resource_id
    assert state(lease) == Lease.State.RELEASED


def test_what_another_run_is_getting_cannot_be_held_any_more(rehearsal: Rehearsal) -> None:
    lease = released(rehearsal, "reuse_by_environment")
    sweep(rehearsal)
    factories.start(lease, run_uuid=factories.run(rehearsal.company).pk)
    with pytest.raises(holds.TooLate, match="another run"):
        holds.hold(company_id=lease.company_id, lease_id=lease.pk, kind="recovery_source", holder="recovery")


@pytest.mark.parametrize("who", ["its own run", "a run of its issue"])
def test_what_comes_to_need_it_while_its_destruction_waits_is_heeded_for_every_kept_sandbox(
    rehearsal: Rehearsal, who: str
) -> None:
    """Whatever ended its time: the account was away for hours, and meanwhile the run is tried again."""
    issue = factories.issue(rehearsal.company)
    Run.objects.filter(pk=rehearsal.run.pk).update(issue=issue)
    lease = released(rehearsal, "retain_on_failure", outcome="failed")
    Run.objects.filter(pk=rehearsal.run.pk).update(status=Run.Status.FAILED)
    sweep(rehearsal)
    Lease.objects.filter(pk=lease.pk).update(kept_until=factories.at(-1))
    settle()
    assert (state(lease), owed(lease).verb) == ("pending_cleanup", "delete")
    if who == "its own run":
        Run.objects.filter(pk=rehearsal.run.pk).update(status=Run.Status.SCHEDULED_RETRY, issue=None)
    else:
        factories.run(rehearsal.company, issue=issue, status=Run.Status.QUEUED)
    sweep(rehearsal)
    assert state(lease) == Lease.State.RELEASED
    assert rehearsal.world.count("delete") == 0


def test_a_reusable_sandbox_that_was_held_while_it_stopped_still_waits_for_its_next_run(rehearsal: Rehearsal) -> None:
    """Nobody had owed its destruction: a delete was what a stop that fails falls back to."""
    lease = acquired(rehearsal, "reuse_by_environment")
    row = factories.hold(lease, Hold.Kind.EXPORT_RESUME)
    leases.release(lease.pk)
    Run.objects.filter(pk=rehearsal.run.pk).update(status=Run.Status.SUCCEEDED)
    sweep(rehearsal)
    assert (state(lease), owed(lease).held_verb) == ("released", "stop_or_delete")
    Hold.objects.filter(pk=row.pk).update(ended_at=factories.database_now(), ended_by="tester")
    settle()
    assert state(lease) == Lease.State.RELEASED
    assert 6 * DAY < due_in(disposal(lease)) <= 7 * DAY


def test_a_destruction_demanded_while_it_is_held_is_owed_when_nothing_holds_it(rehearsal: Rehearsal) -> None:
    lease = acquired(rehearsal, "reuse_by_environment")
    row = factories.hold(lease, Hold.Kind.EXPORT_RESUME)
    leases.release(lease.pk)
    Engine().sweep(rehearsal.account.pk, limit=0)
    with transaction.atomic():
        held = Lease.objects.select_for_update(no_key=True, of=("self",)).get(pk=lease.pk)
        transitions.hold_back(held, held_by=["export_resume"], actor="tester")
    leases.release(lease.pk, disposition="destroy")
    assert (owed(lease).verb, owed(lease).held_verb) == ("stop_only", "delete")
    Run.objects.filter(pk=rehearsal.run.pk).update(status=Run.Status.SUCCEEDED)
    sweep(rehearsal)
    holds.end(row.pk, company_id=lease.company_id, actor="tester")
    settle()
    sweep(rehearsal)
    assert evidence(lease)[-1] == "destroyed"


def test_two_leases_of_one_sandbox_that_nobody_holds_are_for_a_person(rehearsal: Rehearsal) -> None:
    """Else each would wait for the other's end for ever."""
    lease = released(rehearsal, "retain_on_failure", outcome="failed")
    Run.objects.filter(pk=rehearsal.run.pk).update(status=Run.Status.FAILED)
    sweep(rehearsal)
    twin = factories.lease(
        factories.environment(factories.account(rehearsal.company, provider="rehearsal")),
        resource_id=lease.resource_id,
        account_identity=lease.account_identity,
    )
    factories.stopped(twin, state="retained")
    Lease.objects.filter(pk__in=[lease.pk, twin.pk]).update(orphaned_at=factories.database_now())
    settle()
    assert {disposal(lease).quiet, disposal(twin).quiet} == {"identity_conflict"}
