"""Inventory: what it calls a leak, what confirms one, what is never touched, and how one is destroyed.

Time passes by moving what was written into the past (`passes`).
"""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import import_module
from typing import Any
from uuid import UUID, uuid4

import pytest
from celery import current_app
from django.apps import apps
from django.db import connection
from django_celery_beat.models import PeriodicTask

from cleanup import inventory, tasks
from cleanup.inventory import Destroyed, Report
from leases import closing, holds, journal, leaks
from leases.errors import DecisionRefused
from leases.models import (
    Installation,
    InventoryFinding,
    InventoryListing,
    Lease,
    Obligation,
    Operation,
)
from leases.models.environments import Policy
from leases.models.inventory import GRACE
from leases.planning import MARK_OPERATION, name_of
from providers.contract import MARK_INSTALLATION, ErrorKind, Listing, Resource
from tests import factories
from tests.concurrency import Background, Gate, together
from tests.rehearsal import Box, RehearsalProvider
from tests.scenarios.steps import acquired, audited, evidence, fails, owed, released, snapshot, state, sweep
from tests.stage import Rehearsal

PAST_GRACE = GRACE.total_seconds() + 1
LONG = 3600
Verdict = InventoryFinding.Verdict


def passes(seconds: float) -> None:
    """Let so much time pass: listings, findings, creations and acquisitions are that much older."""
    with connection.cursor() as cursor:
        for table, columns in {
            "leases_inventorylisting": ("began_at",),
            "leases_inventoryfinding": ("first_seen_at", "last_seen_at", "confirmed_at"),
            "leases_operation": ("created_at",),
            "leases_lease": ("acquired_at",),
        }.items():
            moved = ", ".join(f"{column} = {column} - %(s)s * interval '1 s'" for column in columns)
            cursor.execute(f"UPDATE {table} SET {moved}", {"s": seconds})  # noqa: S608


def take(rehearsal: Rehearsal, **how: Any) -> Report:
    (identity,) = inventory.identities([rehearsal.account.pk])
    return inventory.take(identity, **how)


def counted(report: Report) -> dict[str, int]:
    return {name: number for name, number in report.counts.items() if number}


def findings(report: Report) -> dict[str, str]:
    return {finding.resource_id: str(finding.verdict) for finding in report.findings}


def destroy(report: Report, most: int = 10) -> Destroyed:
    return inventory.destroy_leaks([report], most, actor="test", reason="a leak")


def confirmed(rehearsal: Rehearsal) -> Report:
    """Two complete listings, more than the grace apart."""
    take(rehearsal)
    passes(PAST_GRACE)
    return take(rehearsal)


def settled_leak(rehearsal: Rehearsal) -> Lease:
    """A lease whose end was proven, and whose sandbox is there all the same: the provider said so and was wrong."""
    lease = released(rehearsal)
    box = rehearsal.world.of(lease.resource_id)
    sweep(rehearsal)
    rehearsal.world.boxes[lease.resource_id] = box
    passes(LONG)
    lease.refresh_from_db()
    assert lease.state in (Lease.State.EXPIRED, Lease.State.FAILED)
    return lease


def marked(rehearsal: Rehearsal, **marks: str) -> Resource:
    """A sandbox of ours that no row of ours names: what a database from yesterday would find."""
    everything = {
        MARK_INSTALLATION: str(Installation.current().mark),
        MARK_OPERATION: str(uuid4()),
        "paperclip-env.company": str(rehearsal.company.pk),
        "paperclip-env.environment": str(rehearsal.environment.pk),
        "paperclip-env.lease": str(uuid4()),
        "paperclip-env.run": str(rehearsal.run.pk),
    } | marks
    return put(rehearsal, everything, name=name_of(UUID(everything[MARK_OPERATION])))


def put(rehearsal: Rehearsal, marks: dict[str, str], state: str = "running", *, name: str = "") -> Resource:
    resource = Resource(uuid4().hex, name or f"fork-{uuid4().hex}", marks)
    rehearsal.world.boxes[resource.resource_id] = Box(resource, state)
    return resource


def gave_up(rehearsal: Rehearsal, **values: Any) -> Operation:
    """A creation whose search an operator ended."""
    pk = uuid4()
    ended = {"state": Operation.State.UNVERIFIED, "resolved_at": factories.at(-1)}
    return factories.operation(rehearsal.environment, id=pk, name=name_of(pk), **ended, **values)


@pytest.fixture
def used(rehearsal: Rehearsal) -> Rehearsal:
    """A stage whose account has attested who it is."""
    rehearsal.account.attested_identity = rehearsal.world.identity
    rehearsal.account.save()
    return rehearsal


# What is a leak, and what is not


def test_what_is_in_use_kept_or_being_made_is_alive(used: Rehearsal) -> None:
    """K-19: sandboxes of every state are listed, and each is somebody's."""
    acquired(used)
    kept = released(used, Policy.REUSE_BY_ENVIRONMENT)
    sweep(used)
    assert state(kept) == "released"
    pending = factories.operation(used.environment, marks={MARK_OPERATION: "x"})
    put(used, {MARK_INSTALLATION: str(Installation.current().mark), MARK_OPERATION: str(pending.pk)}, "busy")
    report = confirmed(used)
    assert (counted(report), report.findings) == ({"alive": 3}, [])


def test_a_sandbox_whose_lease_is_over_is_a_leak_once_two_listings_and_the_grace_say_so(used: Rehearsal) -> None:
    lease = settled_leak(used)
    first = take(used)
    assert findings(first) == {lease.resource_id: "settled"}
    assert first.leaks == []
    passes(60)
    assert take(used).leaks == []
    passes(PAST_GRACE)
    report = take(used)
    (leak,) = report.leaks
    assert (leak.lease, leak.company, leak.sightings) == (lease, used.company, 3)
    assert inventory.left([report]) == 1


def test_what_carries_our_marks_and_no_row_names_is_a_leak(used: Rehearsal) -> None:
    stray = marked(used)
    report = confirmed(used)
    (leak,) = report.leaks
    assert (leak.resource_id, leak.verdict, leak.company) == (stray.resource_id, "unknown", used.company)


def test_foreign_and_unmarked_ones_are_counted_and_never_a_finding(used: Rehearsal) -> None:
    theirs = marked(used, **{MARK_INSTALLATION: str(uuid4())})
    put(used, {})
    put(used, {"team": "other"})
    report = confirmed(used)
    assert (counted(report), report.findings) == ({"foreign": 1, "unmarked": 2}, [])
    assert report.foreign == [theirs.resource_id]
    assert destroy(report).owned == []
    assert len(used.world.boxes) == 3


@pytest.mark.parametrize("marks", [{}, {MARK_INSTALLATION: "another"}, {MARK_INSTALLATION: "", MARK_OPERATION: "odd"}])
def test_what_a_lease_in_use_knows_is_alive_whatever_its_marks_say(used: Rehearsal, marks: dict[str, str]) -> None:
    lease = acquired(used)
    box = used.world.of(lease.resource_id)
    box.resource = replace(box.resource, marks=marks)
    passes(LONG)
    report = confirmed(used)
    assert (counted(report), report.findings) == ({"alive": 1}, [])


def test_a_creation_that_may_still_appear_is_no_leak(used: Rehearsal) -> None:
    """Even where the operation is over: what was asked for may still come to be."""
    given_up = gave_up(used, creation_window=600)
    marked(used, **{MARK_OPERATION: str(given_up.pk)})
    assert counted(take(used)) == {"alive": 1}
    passes(LONG)
    assert counted(take(used)) == {"unknown": 1}


def test_a_copy_of_a_creations_sandbox_is_for_a_person(used: Rehearsal) -> None:
    """A fork carries the marks of the sandbox that it was made from (decision 20)."""
    lease = acquired(used)
    fork = put(used, dict(used.world.of(lease.resource_id).resource.marks))
    passes(LONG)
    report = confirmed(used)
    assert findings(report) == {fork.resource_id: "ambiguous"}
    assert destroy(report).owned == []
    made = leaks.destroy(report.findings[0].pk, actor="olga", reason="nobody needs the fork", by_person=True)
    assert (made.resource_id, made.state) == (fork.resource_id, "pending_cleanup")
    sweep(used)
    assert fork.resource_id not in used.world.boxes
    assert state(lease) == "active"
    assert lease.resource_id in used.world.boxes


def test_a_copy_of_what_the_books_do_not_know_is_for_a_person_too(used: Rehearsal) -> None:
    """Its marks may be those of a creation whose rows were pruned: the name is not that creation's."""
    marks = dict(marked(used).marks)
    fork = put(used, marks)
    assert findings(take(used))[fork.resource_id] == "ambiguous"


def test_a_lease_without_its_sandbox_is_missing_and_nothing_follows_from_that(used: Rehearsal) -> None:
    lease = acquired(used)
    del used.world.boxes[lease.resource_id]
    assert counted(take(used)) == {"missing": 1}
    passes(PAST_GRACE)
    before = snapshot()
    report = take(used)
    assert findings(report) == {lease.resource_id: "missing"}
    assert [finding.lease for finding in report.missing_in_use] == [lease]
    assert report.leaks == []
    assert destroy(report).owned == []
    after = snapshot()
    changed = {table for table, rows in after.items() if rows != before[table]}
    assert changed == {"leases_inventorylisting", "leases_inventoryfinding"}


def test_a_lease_that_came_after_the_listing_began_is_not_missing(
    used: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list was read before it, its rows are read after it."""
    listed = RehearsalProvider.list

    def then_acquire(self: RehearsalProvider, marks: Any, *, within: float) -> Listing:
        before = listed(self, marks, within=within)
        acquired(used)
        return before

    monkeypatch.setattr(RehearsalProvider, "list", then_acquire)
    assert counted(take(used)) == {}
    assert Lease.objects.get().state == "active"


# What changes nothing


def _incomplete(monkeypatch: pytest.MonkeyPatch, used: Rehearsal) -> None:
    listed = RehearsalProvider.list
    monkeypatch.setattr(
        RehearsalProvider,
        "list",
        lambda self, marks, *, within: Listing(listed(self, marks, within=within).resources[:0], complete=False),
    )


def _fails(monkeypatch: pytest.MonkeyPatch, used: Rehearsal) -> None:
    used.world.hooks["list"] = fails(ErrorKind.SERVER)


def _is_another(monkeypatch: pytest.MonkeyPatch, used: Rehearsal) -> None:
    used.world.identity = "another"


def _becomes_another(monkeypatch: pytest.MonkeyPatch, used: Rehearsal) -> None:
    used.world.hooks["list"] = lambda _: setattr(used.world, "identity", "another")


def _has_a_gap(monkeypatch: pytest.MonkeyPatch, used: Rehearsal) -> None:
    odd = Resource("", "x")
    used.world.boxes["odd"] = Box(odd)


def _breaks_its_word(monkeypatch: pytest.MonkeyPatch, used: Rehearsal) -> None:
    def broken(_: str) -> None:
        raise KeyError("pages")

    used.world.hooks["list"] = broken


FAULTS = [_incomplete, _fails, _is_another, _becomes_another, _has_a_gap, _breaks_its_word]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_listing_that_is_not_complete_advances_and_resolves_nothing(
    used: Rehearsal, monkeypatch: pytest.MonkeyPatch, fault: Any
) -> None:
    settled_leak(used)
    gone = marked(used)
    take(used)
    passes(PAST_GRACE)
    del used.world.boxes[gone.resource_id]
    before = snapshot()
    fault(monkeypatch, used)
    report = take(used)
    assert report.outcome == InventoryListing.Outcome.FAILED
    assert report.problem
    after = snapshot()
    assert {table for table in after if after[table] != before[table]} == {"leases_inventorylisting"}
    assert destroy(report).owned == []


def test_an_older_view_undoes_no_newer_one(used: Rehearsal) -> None:
    """Two listings at once: the one that began first and comes last changes nothing."""
    lease = settled_leak(used)
    gate = Gate()
    used.world.hooks["list"] = gate
    slow = Background(lambda: take(used))
    gate.wait()
    del used.world.hooks["list"]
    assert findings(take(used)) == {lease.resource_id: "settled"}
    used.world.boxes.clear()
    gate.open()
    assert slow.result().outcome == InventoryListing.Outcome.OVERTAKEN
    assert InventoryFinding.objects.get().is_open


def test_a_dry_run_writes_nothing(used: Rehearsal) -> None:
    lease = settled_leak(used)
    before = snapshot()
    assert findings(take(used, dry_run=True)) == {lease.resource_id: "settled"}
    assert snapshot() == before


def test_two_accounts_that_attest_the_same_identity_are_one(used: Rehearsal) -> None:
    """A lease under one protects what the other one lists, and the account is listed once."""
    other = factories.company()
    factories.account(
        other, provider="rehearsal", endpoint=used.account.endpoint, attested_identity=used.world.identity
    )
    acquired(used)
    passes(LONG)
    (identity,) = inventory.identities()
    assert len(identity.accounts) == 2
    assert counted(inventory.take(identity)) == {"alive": 1}
    stray = marked(used, **{"paperclip-env.company": str(other.pk)})
    inventory.take(identity)
    passes(PAST_GRACE)
    (leak,) = inventory.take(identity).leaks
    assert (leak.resource_id, leak.company) == (stray.resource_id, other)
    owner = leaks.destroy(leak.pk, actor="test", reason="a leak")
    assert owner.company == other


def test_where_one_account_cannot_be_asked_another_of_the_same_identity_is(used: Rehearsal) -> None:
    used.account.blocked_until = factories.at(60)
    used.account.save()
    factories.account(
        used.company, provider="rehearsal", endpoint=used.account.endpoint, attested_identity=used.world.identity
    )
    assert take(used).is_complete


def test_an_account_that_was_never_used_is_not_asked(rehearsal: Rehearsal) -> None:
    assert inventory.identities() == []


def test_an_account_of_a_closed_company_is_asked_only_by_name(used: Rehearsal) -> None:
    """Its credential went with the company: it would fail for ever."""
    used.company.closed_at = factories.database_now()
    used.company.save()
    assert inventory.identities() == []
    assert len(inventory.identities([used.account.pk])) == 1
    factories.account(provider="rehearsal", endpoint=used.account.endpoint, attested_identity=used.world.identity)
    (identity,) = inventory.identities()
    assert inventory.take(identity).account.company != used.company


# How a finding ends


def test_a_finding_ends_when_a_lease_takes_the_sandbox_over(used: Rehearsal) -> None:
    given_up = gave_up(used)
    stray = marked(used, **{MARK_OPERATION: str(given_up.pk)})
    passes(LONG)
    (leak,) = confirmed(used).leaks
    factories.lease(
        used.environment,
        resource_id=stray.resource_id,
        account_identity=used.world.identity,
        acquired_at=factories.at(-9),
    )
    with pytest.raises(DecisionRefused, match="it is alive now"):
        leaks.destroy(leak.pk, actor="test", reason="a leak")
    assert take(used).findings == []
    leak.refresh_from_db()
    assert leak.resolution == InventoryFinding.Resolution.KNOWN


def test_one_that_comes_back_begins_anew(used: Rehearsal) -> None:
    stray = marked(used)
    box = used.world.boxes[stray.resource_id]
    take(used)
    del used.world.boxes[stray.resource_id]
    passes(PAST_GRACE)
    take(used)
    assert InventoryFinding.objects.get().resolution == InventoryFinding.Resolution.NOT_LISTED
    used.world.boxes[stray.resource_id] = box
    passes(1)
    assert take(used).leaks == []


# Destroying


def test_a_settled_leak_owes_its_teardown_again_and_is_destroyed_with_a_receipt(used: Rehearsal) -> None:
    lease = settled_leak(used)
    report = confirmed(used)
    used.world.calls.clear()
    done = destroy(report)
    assert [(finding.resource_id, owner.pk) for finding, owner in done.owned] == [(lease.resource_id, lease.pk)]
    assert "delete" not in {name for name, _ in used.world.calls}  # it owes it: an obligation before any call
    assert (state(lease), lease.epoch, owed(lease).verb) == ("pending_cleanup", 2, "delete")
    assert audited("lease.owed_again", lease) == 1
    assert report.leaks == []
    sweep(used)
    assert state(lease) == "expired"
    assert evidence(lease) == ["destroyed", "destroyed"]
    assert used.world.boxes == {}
    passes(1)
    assert take(used).findings == []


def test_an_unknown_leak_gets_a_journal_and_a_lease(used: Rehearsal) -> None:
    used.run.status = "succeeded"
    used.run.save()
    stray = marked(used)
    ((_, lease),) = destroy(confirmed(used)).owned
    operation = Operation.objects.get()
    assert (operation.resource_id, operation.state, operation.lease) == (stray.resource_id, "attached", lease)
    assert (lease.company, lease.environment, lease.run) == (used.company, used.environment, used.run)
    assert sweep(used) == {"proven": 1}
    assert used.world.boxes == {}
    assert evidence(lease) == ["destroyed"]


def test_an_unknown_leak_of_a_creation_that_was_given_up_is_that_creations(used: Rehearsal) -> None:
    given_up = gave_up(used)
    marked(used, **{MARK_OPERATION: str(given_up.pk)})
    passes(LONG)
    ((_, lease),) = destroy(confirmed(used)).owned
    given_up.refresh_from_db()
    assert (given_up.lease, lease.pk) == (lease, given_up.lease_uuid)
    assert Operation.objects.count() == 1


def test_a_live_run_makes_a_stop_of_the_destruction(used: Rehearsal) -> None:
    """What a run that is still going may need is stopped and kept, as everywhere (design 4)."""
    stray = marked(used)
    ((_, lease),) = destroy(confirmed(used)).owned
    sweep(used)
    assert (state(lease), used.world.of(stray.resource_id).state) == ("released", "stopped")
    assert holds.of(lease).is_held


def test_at_most_so_many_are_destroyed_the_oldest_first(used: Rehearsal) -> None:
    old = marked(used)
    take(used)
    passes(60)
    for _ in range(3):
        marked(used)
    take(used)
    passes(PAST_GRACE)
    report = take(used)
    done = destroy(report, 2)
    assert len(done.owned) == 2
    assert done.owned[0][0].resource_id == old.resource_id
    assert inventory.left([report]) == 2
    assert inventory.MOST_DESTROYED >= 2


def test_no_run_destroys_more_than_the_constant(used: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "MOST_DESTROYED", 1)
    marked(used)
    marked(used)
    assert len(destroy(confirmed(used), 10**6).owned) == 1


def test_each_is_looked_at_again_right_before(used: Rehearsal) -> None:
    gone, taken, renamed = marked(used), marked(used), marked(used)
    report = confirmed(used)
    del used.world.boxes[gone.resource_id]
    for resource, marks in ((taken, {MARK_INSTALLATION: str(uuid4())}), (renamed, {MARK_OPERATION: str(uuid4())})):
        box = used.world.of(resource.resource_id)
        box.resource = replace(resource, marks={**resource.marks, **marks})
    done = destroy(report)
    assert done.owned == []
    assert sorted(refused.code for _, refused in done.refused) == ["foreign_marks", "foreign_marks", "gone"]
    assert Lease.objects.count() == 0


def test_another_account_behind_the_address_is_never_believed(used: Rehearsal) -> None:
    marked(used)
    report = confirmed(used)
    used.world.identity = "another"
    ((_, refused),) = destroy(report).refused
    assert refused.code == "identity"


def test_nothing_is_destroyed_while_it_is_calm(used: Rehearsal) -> None:
    marked(used)
    report = confirmed(used)
    Installation.objects.update(calm_until=factories.at(60))
    ((_, refused),) = destroy(report).refused
    assert refused.code == "calm"
    assert Lease.objects.count() == 0


def test_nothing_is_confirmed_or_destroyed_by_a_database_that_observes(used: Rehearsal) -> None:
    marked(used)
    take(used)
    passes(PAST_GRACE)
    observing = {"observing_since": factories.at(-1), "observed_mark_at": factories.at(-2), "observing_why": "behind"}
    Installation.objects.update(**observing)
    assert take(used).leaks == []
    Installation.objects.update(observing_since=None, observed_mark_at=None, observing_why="")
    passes(1)
    report = take(used)
    assert len(report.leaks) == 1
    Installation.objects.update(**observing)
    ((_, refused),) = destroy(report).refused
    assert refused.code == "observing"
    assert Lease.objects.count() == 0


def test_a_verdict_that_comes_between_the_look_and_the_owner_keeps_it_from_having_one(used: Rehearsal) -> None:
    marked(used)
    (leak,) = confirmed(used).leaks
    used.world.after["inspect"] = lambda _: Installation.objects.update(calm_until=factories.at(60))
    with pytest.raises(DecisionRefused) as refused:
        leaks.destroy(leak.pk, actor="test", reason="a leak")
    assert (refused.value.code, Lease.objects.count(), Operation.objects.count()) == ("calm", 0, 0)


def test_a_company_with_a_leak_is_not_closed(used: Rehearsal) -> None:
    used.run.status = "succeeded"
    used.run.save()
    marked(used)
    report = confirmed(used)
    assert dict(closing.what_stands_in_the_way(used.company.pk).counts) == {"leak": 1}
    destroy(report)
    sweep(used)
    assert dict(closing.what_stands_in_the_way(used.company.pk).counts) == {}


def test_a_closed_companys_leak_is_for_a_person(used: Rehearsal) -> None:
    marked(used)
    report = confirmed(used)
    used.company.closed_at = factories.database_now()
    used.company.save()
    ((finding, refused),) = destroy(report).refused
    assert refused.code == "company_closed"
    leaks.destroy(finding.pk, actor="olga", reason="closed long ago", by_person=True)


def test_marks_of_a_company_that_has_no_account_here_are_for_a_person_at_the_provider(used: Rehearsal) -> None:
    marked(used, **{"paperclip-env.company": str(uuid4())})
    report = confirmed(used)
    ((_, refused),) = destroy(report).refused
    assert refused.code == "company"


def test_an_unconfirmed_finding_is_not_destroyed_by_anybody(used: Rehearsal) -> None:
    marked(used)
    (finding,) = take(used).findings
    for by_person in (False, True):
        with pytest.raises(DecisionRefused) as refused:
            leaks.destroy(finding.pk, actor="olga", reason="hurry", by_person=by_person)
        assert refused.value.code == "unconfirmed"


# Several at once


def test_two_inventories_at_once_own_nothing_twice(used: Rehearsal) -> None:
    """Real connections: both confirm, both destroy; every leak gets one owner and one teardown."""
    lease = settled_leak(used)
    strays = [marked(used) for _ in range(3)]
    take(used)
    passes(PAST_GRACE)

    def run() -> int:
        return len(destroy(take(used)).owned)

    first, second = together(run, run)
    assert first + second == 4
    assert Obligation.objects.filter(kind="teardown", closed_at__isnull=True).count() == 4
    assert Lease.objects.filter(resource_id__in=[one.resource_id for one in strays]).count() == 3
    before = used.world.count("delete")
    sweep(used)
    # The strays' run is live, so they are stopped and kept; the settled one is deleted, once.
    assert used.world.count("delete") == before + 1
    assert state(lease) == "expired"
    assert {box.state for box in used.world.boxes.values()} == {"stopped"}


def test_two_that_destroy_the_same_one_at_the_same_moment_make_one_owner(used: Rehearsal) -> None:
    marked(used)
    (leak,) = confirmed(used).leaks
    gate = Gate()
    used.world.hooks["inspect"] = gate

    def run() -> str:
        try:
            leaks.destroy(leak.pk, actor="test", reason="a leak")
        except DecisionRefused as refused:
            return refused.code
        return "owned"

    both = [Background(run), Background(run)]
    gate.wait()
    gate.open()
    assert sorted(one.result() for one in both) == ["not_owed", "owned"]
    assert Lease.objects.count() == 1


def test_a_recovery_that_finds_the_sandbox_first_leaves_nothing_to_own(used: Rehearsal) -> None:
    """What a late answer attaches between the look and the locks is seen under the operation's lock."""
    given_up = gave_up(used)
    stray = marked(used, **{MARK_OPERATION: str(given_up.pk)})
    passes(LONG)
    (leak,) = confirmed(used).leaks

    def late_answer(_: str) -> None:
        journal.save_resource_id(given_up, stray.resource_id)

    used.world.after["inspect"] = late_answer
    with pytest.raises(DecisionRefused) as refused:
        leaks.destroy(leak.pk, actor="test", reason="a leak")
    assert refused.value.code == "changed"
    assert Lease.objects.get().state == "pending_cleanup"


def test_an_emptied_broker_starts_no_destruction(used: Rehearsal) -> None:
    """K-36: live leases stay as they are, whatever the broker lost; nothing here asks it."""
    lease = acquired(used)
    kept = factories.stopped(acquired(used, Policy.REUSE_BY_ENVIRONMENT))
    passes(LONG)
    with current_app.connection_for_write() as broker:
        broker.default_channel.client.flushdb()
    used.world.calls.clear()
    tasks.inventory(delete=20)
    sweep(used)
    assert (state(lease), state(kept)) == ("active", "released")
    assert {name for name, _ in used.world.calls} <= {"identify", "list"}
    assert InventoryListing.objects.get().alive == 2


# The task


def test_the_task_reports_and_destroys_only_what_it_is_told_to(used: Rehearsal) -> None:
    marked(used)
    marked(used)
    tasks.inventory()
    passes(PAST_GRACE)
    tasks.inventory()
    assert InventoryFinding.objects.filter(confirmed_at__isnull=False).count() == 2
    assert Lease.objects.count() == 0
    passes(1)
    tasks.inventory(delete=1)
    assert Lease.objects.count() == 1


def test_a_run_that_takes_too_long_hands_the_rest_on(used: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    handed: list[Any] = []
    monkeypatch.setattr(tasks, "INVENTORY_SECONDS", 0.0)
    monkeypatch.setattr(tasks.inventory, "apply_async", handed.append)
    tasks.inventory(delete=3)
    assert handed == [([str(used.account.pk)], 3)]
    assert used.world.calls == []


def test_the_periodic_inventory_is_there_disabled_and_deletes_nothing(transactional_db: None) -> None:
    PeriodicTask.objects.filter(name="inventory").delete()
    make = import_module("cleanup.migrations.0002_inventory_task").make
    make(apps)
    row = PeriodicTask.objects.get(name="inventory")
    assert (row.enabled, row.task, json.loads(row.kwargs)) == (False, tasks.inventory.name, {"delete": 0})
    row.enabled = True
    row.save()
    make(apps)
    assert PeriodicTask.objects.get(name="inventory").enabled
