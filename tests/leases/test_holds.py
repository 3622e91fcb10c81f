"""What holds a sandbox: every condition, every combination, and that whoever asks gets the same answer."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from itertools import combinations
from pathlib import Path
from uuid import uuid4

import pytest
from django.db import transaction
from django.db.models.functions import Now

from cleanup import evidence
from leases import holds, recovering, transitions
from leases.errors import LeaseError, NotFound
from leases.models import ActivityEntry, Hold, Lease, Obligation, Operation, Recovery, Run
from leases.timeline import timeline
from tests import factories
from tests.tables import rows_of

pytestmark = pytest.mark.django_db(transaction=True)

HOUR = 3600.0


def kept(**values: object) -> Lease:
    """A stopped sandbox of a run that is over, on an issue; it is nobody's."""
    company = factories.company()
    where = factories.environment(factories.account(company))
    issue = factories.issue(company)
    run = factories.run(company, status=Run.Status.FAILED, issue=issue)
    lease = factories.stopped(factories.lease(where, run=run, issue=issue))
    Lease.objects.filter(pk=lease.pk).update(**{"orphaned_at": factories.database_now(), **values})
    lease.refresh_from_db()
    return lease


def _run_live(lease: Lease) -> None:
    assert lease.run is not None
    Run.objects.filter(pk=lease.run_id).update(status=Run.Status.RUNNING)


def _in_flight(lease: Lease) -> None:
    Obligation.objects.create(
        company_id=lease.company_id,
        kind=Obligation.Kind.EXTEND,
        account_id=lease.account_id,
        lease=lease,
        due_at=factories.at(600),
        attempt_id=uuid4(),
        worker="w",
        claimed_at=factories.database_now(),
    )


def _other_lease(lease: Lease) -> None:
    # The same sandbox through another of our accounts, which is the same account at the provider.
    twin = factories.account(lease.company, attested_identity=lease.account_identity)
    factories.lease(factories.environment(twin), resource_id=lease.resource_id)


def _run_on_issue(lease: Lease) -> None:
    factories.run(lease.company, status=Run.Status.QUEUED, issue=lease.issue)


def _row(kind: str) -> Callable[[Lease], None]:
    def place(lease: Lease) -> None:
        factories.hold(lease, kind)

    return place


PLACED: dict[str, Callable[[Lease], None]] = {
    "run_live": _run_live,
    "attempt_in_flight": _in_flight,
    "being_started": lambda lease: factories.start(lease) and None,
    "recovering": lambda lease: factories.recovery(lease) and None,
    "other_lease": _other_lease,
    "run_on_issue": _run_on_issue,
    **{kind: _row(kind) for kind in Hold.Kind.values},
}
"""How each condition of a kept sandbox comes about. (`stop_and_retain` is one of a sandbox that is being stopped.)"""

SOFT = {condition.name for condition in holds.CONDITIONS if condition.strength == "soft"}


def names(standing: holds.Standing) -> set[str]:
    return {reason.name for reason in standing.reasons}


def test_every_condition_is_tried_here() -> None:
    assert set(PLACED) | {"stop_and_retain"} == {condition.name for condition in holds.CONDITIONS}


@pytest.mark.parametrize("name", PLACED)
def test_each_alone_holds_and_is_named(name: str) -> None:
    lease = kept()
    assert not holds.of(lease).is_held
    PLACED[name](lease)
    # A pending start's run is live on nothing of this lease; a row-derived hold may bring its neighbour along.
    assert name in names(holds.of(lease))


@pytest.mark.parametrize("name", PLACED)
def test_past_the_window_only_the_always_ones_hold(name: str) -> None:
    """S-226, S-228, S-143: a stop whose window passed is no usable source, and holds nothing by a soft reference."""
    lease = kept(expires_at=factories.at(HOUR))
    PLACED[name](lease)
    standing = holds.of(lease)
    if name in SOFT:
        assert standing.soft_until == lease.expires_at  # S-227: exactly the end of the window
    Lease.objects.filter(pk=lease.pk).update(expires_at=factories.at(-1))
    assert (name in names(holds.of(lease))) == (name not in SOFT)


def test_over_every_combination_listing_and_settle_cannot_differ() -> None:
    """S-232. By construction: one statement serves both. Shown over every pair, and all of them at once."""
    chosen = [*combinations(PLACED, 1), *combinations(PLACED, 2), tuple(PLACED)]
    expected: dict[object, set[str]] = {}
    for names_placed in chosen:
        lease = kept(expires_at=factories.at(HOUR))
        for name in names_placed:
            PLACED[name](lease)
        expected[lease.pk] = set(names_placed)
    listing = {standing.lease_id: standing for standing in holds.kept() if standing.lease_id in expected}
    assert set(listing) == set(expected)
    for pk, wanted in expected.items():
        lease = Lease.objects.get(pk=pk)
        with transaction.atomic():
            settled = holds.of(Lease.objects.select_for_update(no_key=True, of=("self",)).get(pk=pk))
        assert names(settled) == names(listing[pk]) == names(holds.standing([pk])[pk])
        assert settled.releasable_at == listing[pk].releasable_at
        assert wanted <= names(settled)
        soft_only = wanted <= SOFT
        assert settled.releasable_at == (lease.expires_at if soft_only else settled.held_until)


def test_a_kept_sandbox_without_the_mark_has_its_own_time() -> None:
    """S-229: nothing but its own time ends it."""
    until = factories.at(HOUR)
    lease = kept(orphaned_at=None, kept_until=until)
    assert holds.of(lease).releasable_at == until
    Lease.objects.filter(pk=lease.pk).update(kept_until=None)
    assert holds.of(lease).releasable_at is None
    factories.hold(lease, Hold.Kind.RESTORE_RECOVERY)
    assert holds.of(lease).releasable_at == holds.FOREVER


def test_a_hold_on_an_issue_holds_each_of_its_kept_sandboxes_and_no_other() -> None:
    lease, other = kept(), kept()
    assert lease.issue is not None
    factories.hold(lease.issue, Hold.Kind.RECOVERY_ACTION)
    assert names(holds.of(lease)) == {"recovery_action"}
    assert not holds.of(other).is_held


def test_a_hold_that_ended_or_whose_time_passed_holds_nothing() -> None:
    lease = kept()
    row = factories.hold(lease, Hold.Kind.OPERATOR, until_in=-1)
    assert not holds.of(lease).is_held
    row = factories.hold(lease, Hold.Kind.EXPORT_RESUME)
    assert holds.of(lease).is_held
    holds.end(row.pk, company_id=lease.company_id, actor="tester")
    assert not holds.of(lease).is_held


def test_the_release_of_a_live_run_is_not_held_by_that_run() -> None:
    run = factories.run(issue=None)
    lease = factories.lease(factories.environment(factories.account(run.company)), run=run)
    factories.teardown(lease)
    lease.refresh_from_db()
    assert not holds.of(lease).is_held


# Placing a hold


def place(lease: Lease, kind: str = Hold.Kind.RESTORE_RECOVERY, **how: object) -> Hold:
    return holds.hold(company_id=lease.company_id, lease_id=lease.pk, kind=kind, holder="control", **how)  # type: ignore[arg-type]


def test_a_hold_turns_an_owed_destruction_into_stop_only() -> None:
    owed = factories.teardown(verb=Obligation.Verb.DELETE)
    assert owed.lease is not None
    place(owed.lease)
    owed.refresh_from_db()
    assert (owed.verb, owed.held_verb) == ("stop_only", "delete")
    assert ActivityEntry.objects.filter(action="lease.held_back", subject_id=str(owed.lease_id)).exists()


def test_a_hold_after_a_destroying_call_was_announced_comes_too_late() -> None:
    owed = factories.teardown(verb=Obligation.Verb.DELETE, delete_announced_at=factories.database_now())
    assert owed.lease is not None
    with pytest.raises(holds.TooLate) as refused:
        place(owed.lease)
    assert refused.value.code == "too_late"
    owed.refresh_from_db()
    assert owed.verb == "delete"
    assert not Hold.objects.filter(lease=owed.lease).exists()


def test_a_hold_on_an_issue_saves_a_kept_sandbox_whose_destruction_was_owed() -> None:
    lease = kept()
    with transaction.atomic():
        transitions.dispose(lease, reason="test", actor="tester")
    assert lease.issue_id is not None
    holds.hold(company_id=lease.company_id, issue_id=lease.issue_id, kind="recovery_action", holder="control")
    owed = Obligation.objects.get(lease=lease, kind="teardown", closed_at=None)
    assert (owed.verb, owed.held_verb) == ("stop_only", "delete")


def test_the_same_holder_says_it_again_and_moves_its_end() -> None:
    lease = kept()
    first = place(lease, Hold.Kind.OPERATOR, until=factories.at(HOUR))
    until = factories.at(2 * HOUR)
    second = place(lease, Hold.Kind.OPERATOR, until=until)
    assert first.pk == second.pk
    assert holds.of(lease).held_until == until


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ({"kind": "because"}, "invalid"),
        ({"kind": "operator"}, "invalid"),
        ({"kind": "shutdown_fence"}, "invalid"),
        ({"kind": "export", "until": "tomorrow"}, "invalid"),
    ],
)
def test_nonsense_is_refused_and_nothing_is_written(how: dict[str, object], code: str) -> None:
    lease = kept()
    with pytest.raises(LeaseError) as refused:
        place(lease, **how)  # type: ignore[arg-type]
    assert refused.value.code == code
    assert not Hold.objects.filter(lease=lease).exists()


def test_a_lease_of_another_company_or_one_that_is_gone_cannot_be_held() -> None:
    lease = kept()
    with pytest.raises(NotFound):
        holds.hold(company_id=factories.company().pk, lease_id=lease.pk, kind="export", holder="control")
    gone = factories.lease()
    owed = factories.teardown(gone)
    with transaction.atomic():
        receipt = factories.receipt(gone)
        transitions.settle(Lease.objects.get(pk=gone.pk), owed, receipt)
    with pytest.raises(LeaseError) as refused:
        place(gone)
    assert refused.value.code == "gone"


def test_what_is_held_is_stopped_and_kept_right_before_the_call() -> None:
    """The re-check of the engine: a hold row that got past every function counts all the same."""
    owed = factories.teardown(verb=Obligation.Verb.DELETE)
    assert owed.lease is not None
    factories.hold(owed.lease, Hold.Kind.EXPORT)  # as a writer of raw SQL would
    from cleanup import claims
    from leases.clock import boottime

    (claim,) = claims.claim(owed.account_id, claims.new_ids(1), worker="w", clock=boottime)  # type: ignore[arg-type]
    facts = evidence.standing(claim)
    assert facts is not None
    assert facts.verb == "stop_only"
    owed.refresh_from_db()
    assert owed.held_verb == "delete"


def test_the_time_of_what_is_kept_for_a_hold_alone_is_over_when_the_hold_ends() -> None:
    owed = factories.teardown(verb=Obligation.Verb.DELETE)
    lease = owed.lease
    assert lease is not None
    row = place(lease)
    owed.refresh_from_db()
    with transaction.atomic():
        receipt = factories.receipt(lease, evidence="stopped")
        transitions.settle(lease, owed, receipt)
    assert lease.state == Lease.State.RELEASED
    assert holds.of(lease).releasable_at == holds.FOREVER
    holds.end(row.pk, company_id=lease.company_id, actor="tester")
    lease.refresh_from_db()
    releasable = holds.of(lease).releasable_at
    assert releasable is not None
    assert releasable <= factories.database_now() + timedelta(seconds=1)


# The document

HOLDS = Path(__file__).parents[2] / "docs" / "holds.md"


def test_the_document_lists_every_condition_with_its_strength_and_no_other() -> None:
    documented = [(row["condition"], row["strength"]) for row in rows_of(HOLDS, "What holds a sandbox")]
    assert documented == [(condition.name, condition.strength) for condition in holds.CONDITIONS]


# Waking


def _end_run(lease: Lease) -> None:
    Run.objects.filter(pk=lease.run_id).update(status=Run.Status.SUCCEEDED)


def _end_attempt(lease: Lease) -> None:
    Obligation.objects.filter(lease=lease, kind="extend").update(attempt_id=None, worker=None, claimed_at=None)


def _end_start(lease: Lease) -> None:
    started = Operation.objects.get(source=lease, state="pending")
    with transaction.atomic():
        transitions.refuse_operation(started)


def _end_recovery(lease: Lease) -> None:
    with transaction.atomic():
        recovering.exhaust(Recovery.objects.get(lease=lease))


def _end_other_lease(lease: Lease) -> None:
    other = Lease.objects.exclude(pk=lease.pk).get(resource_id=lease.resource_id)
    owed = factories.teardown(other)
    with transaction.atomic():
        transitions.settle(Lease.objects.get(pk=other.pk), owed, factories.receipt(other))


def _end_issues_run(lease: Lease) -> None:
    Run.objects.filter(issue=lease.issue, status="queued").delete()


def _end_row(lease: Lease) -> None:
    Hold.objects.filter(lease=lease).update(ended_at=Now(), ended_by="somebody")


ENDED: dict[str, Callable[[Lease], None]] = {
    "run_live": _end_run,
    "attempt_in_flight": _end_attempt,
    "being_started": _end_start,
    "recovering": _end_recovery,
    "other_lease": _end_other_lease,
    "run_on_issue": _end_issues_run,
    **dict.fromkeys(Hold.Kind.values, _end_row),
}
"""How each condition of `PLACED` ends."""


@pytest.mark.parametrize("name", PLACED)
def test_every_write_that_can_end_a_hold_wakes_the_disposal(name: str) -> None:
    """Two holds that end at once must not hide each other: the trigger evaluates nothing, so another one may stand."""
    lease = kept()
    PLACED[name](lease)
    factories.hold(lease, Hold.Kind.RESTORE_RECOVERY)  # another that stands
    asleep = Obligation.objects.filter(lease=lease, kind="dispose", closed_at=None)
    asleep.update(due_at=None, quiet="waiting")
    before = asleep.get().wakes
    ENDED[name](lease)
    row = asleep.get()
    assert row.wakes > before
    assert row.due_at is not None
    assert row.quiet == ""


@pytest.mark.parametrize(
    "values", [{"expires_at": Now()}, {"orphaned_at": None}, {"kept_until": Now()}, {"issue": None}], ids=str
)
def test_what_changes_on_the_lease_itself_wakes_its_disposal(values: dict[str, object]) -> None:
    lease = kept()
    asleep = Obligation.objects.filter(lease=lease, kind="dispose", closed_at=None)
    asleep.update(due_at=None, quiet="waiting")
    Lease.objects.filter(pk=lease.pk).update(**values)
    assert asleep.get().due_at is not None


def test_a_hold_on_an_issue_tells_for_which_of_its_leases_it_comes_too_late() -> None:
    lease = kept()
    with transaction.atomic():
        owed = transitions.dispose(lease, reason="test", actor="tester")
    Obligation.objects.filter(pk=owed.pk).update(delete_announced_at=factories.database_now())
    assert lease.issue_id is not None
    row = holds.hold(company_id=lease.company_id, issue_id=lease.issue_id, kind="recovery_action", holder="control")
    entry = ActivityEntry.objects.get(action="hold.placed", subject_id=str(row.pk))
    assert entry.details["too_late_for"] == [str(lease.pk)]
    owed.refresh_from_db()
    assert owed.verb == "delete"


def test_a_hold_is_told_in_the_story_of_its_lease() -> None:
    lease = kept()
    row = place(lease)
    holds.end(row.pk, company_id=lease.company_id, actor="tester")
    assert {"hold.placed", "hold.ended"} <= {event.title for event in timeline(lease).events}
