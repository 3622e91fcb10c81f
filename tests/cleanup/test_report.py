"""The ownership report: whose each sandbox is, what keeps it until when, what that costs; and that it only reads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime, timedelta
from decimal import Decimal
from io import StringIO
from random import Random
from typing import Any
from uuid import uuid4

import pytest
from django.core.management import call_command
from django.db import connection, transaction
from django.db.models.functions import Now

from cleanup import report
from leases import fencing, holds, transitions
from leases.controllers import Controller
from leases.models import Company, Hold, Installation, Lease, Obligation, ProviderAccount, Run
from leases.ownership import Group, Kind, Sandbox, ownership
from tests import factories, fleet
from tests.scenarios.steps import sweep_lane

pytestmark = pytest.mark.django_db(transaction=True)


def _kept(state: str = Lease.State.RELEASED, *, hours: float | None = 24.0, **values: Any) -> Lease:
    """A stopped sandbox that is kept for so many hours from now; None: until an operator decides."""
    lease = factories.stopped(factories.lease(**values), state=state)
    return _until(lease, hours)


def _until(lease: Lease, hours: float | None) -> Lease:
    Lease.objects.filter(pk=lease.pk).update(kept_until=None if hours is None else factories.at(hours * 3600))
    _settle(lease)
    lease.refresh_from_db()
    return lease


def _settle(lease: Lease) -> None:
    """Leave the lease's disposal as its settle does: due when it ends, or quiet."""
    at = holds.standing([lease.pk])[lease.pk].releasable_at
    quiet = Obligation.Quiet.OPERATOR_DECIDES if at is None else Obligation.Quiet.WAITING if at == holds.FOREVER else ""
    Obligation.objects.filter(lease=lease, kind="dispose", closed_at=None).update(
        due_at=None if quiet else at, quiet=quiet
    )


def _orphaned(lease: Lease) -> Lease:
    with transaction.atomic():
        transitions.mark_orphaned(Lease.objects.select_for_update().get(pk=lease.pk), actor="olga", reason="nobody's")
    _settle(lease)
    return lease


def _run(status: str = Run.Status.RUNNING, *, of: Lease | None = None, **values: Any) -> Run:
    company = of.company if of else factories.company()
    return factories.run(company, status=status, **values)


def _hold(lease: Lease, kind: str = Hold.Kind.OPERATOR, *, hours: float | None = 48.0) -> Hold:
    placed = holds.hold(
        company_id=lease.company_id,
        kind=kind,
        holder="olga",
        lease_id=lease.pk,
        until=None if hours is None else factories.at(hours * 3600),
        reason="still needed",
    )
    _settle(lease)
    return placed


def _of(kind: Kind) -> Group:
    return ownership().of(kind)


def _one(kind: Kind) -> Sandbox:
    (sandbox,) = _of(kind).sandboxes
    return sandbox


def _reasons(kind: Kind) -> list[str]:
    return [reason.name for reason in _one(kind).reasons]


def _near(told: datetime | None, expected: datetime | None, *, seconds: float = 5.0) -> bool:
    assert told is not None
    assert expected is not None
    return abs(told - expected) < timedelta(seconds=seconds)


# Every kind


def test_every_lease_whose_sandbox_is_not_gone_is_of_one_kind() -> None:
    company = factories.company()
    where = factories.environment(factories.account(company))
    factories.lease(where)
    _kept(environment_=where, scope="workspace", run=_run("succeeded", of=factories.lease(where)))
    _kept(Lease.State.RETAINED, environment_=where)
    _orphaned(_kept(environment_=where))
    factories.teardown(factories.lease(where))
    told = ownership()
    assert {group.kind: group.count for group in told.groups} == {
        Kind.IN_USE: 2,
        Kind.FENCED: 0,
        Kind.ORPHAN: 0,
        Kind.REUSABLE: 1,
        Kind.RETAINED: 1,
        Kind.RETAINED_ORPHAN: 1,
        Kind.TEARDOWN: 1,
    }
    settled = factories.teardown(factories.lease(where)).lease
    with transaction.atomic():
        transitions.settle_unverified(settled, settled.obligations.get(), actor="olga", reason="gone")
    assert sum(group.count for group in ownership().groups) == 6


def test_a_lease_in_use_is_its_controllers_until_its_time_is_over() -> None:
    until = factories.at(90)
    run = _run(controller_id="server-1", controller_seconds=90, controller_expires_at=until)
    factories.lease(factories.environment(factories.account(run.company)), run=run)
    sandbox = _one(Kind.IN_USE)
    assert [(reason.name, reason.until) for reason in sandbox.reasons] == [("controller", until)]
    settled = until + timedelta(seconds=30)  # a third of its length later, until when it may be renewed
    assert (sandbox.due_at, sandbox.is_releasable(factories.at(0))) == (settled, False)
    assert _of(Kind.IN_USE).held == 1


def _in_use(runs: list[Controller]) -> None:
    where = factories.environment(factories.account(Run.objects.get(pk=runs[0].run_id).company))
    for one in runs:
        factories.lease(where, run=Run.objects.get(pk=one.run_id))


@pytest.fixture
def old_server(transactional_db: None) -> Iterator[None]:
    with fleet.a_server_that_was_always_there():
        yield


@pytest.mark.usefixtures("old_server")
def test_a_controllers_lease_is_due_when_the_watch_settles_its_hold() -> None:
    (one,) = runs = fleet.fleet(1)
    _in_use(runs)
    fleet.passes(65, one)  # ended 5 s ago, and may be renewed for a while
    fleet.look()
    group, watch = _of(Kind.IN_USE), fleet.watch()
    assert watch is not None
    assert (group.next_due, group.releasable, group.undecided) == (watch.due_at, 0, 0)
    fleet.passes(20, one)
    assert _of(Kind.IN_USE).releasable == 1
    Obligation.objects.filter(pk=watch.pk).update(due_at=factories.at(40))  # put off
    assert _near(_one(Kind.IN_USE).due_at, factories.at(40))
    calm = factories.at(600)
    Installation.objects.update(calm_until=calm)
    assert (_one(Kind.IN_USE).due_at, _of(Kind.IN_USE).releasable) == (calm, 0)
    Installation.objects.update(calm_until=None)
    Obligation.objects.filter(pk=watch.pk).update(due_at=factories.at(0))
    fleet.falls_due()
    fleet.look()
    assert fleet.statuses(runs) == ["interrupted"]


@pytest.mark.usefixtures("old_server")
def test_what_lapsed_controllers_use_has_no_time_while_a_person_is_asked_about_them() -> None:
    runs = fleet.fleet(20)
    _in_use(runs)
    fleet.passes(90, *runs[:11])
    fleet.look()
    group = _of(Kind.IN_USE)
    assert (group.releasable, group.undecided, group.held, group.next_due) == (0, 11, 9, None)
    assert {sandbox.person for sandbox in group.sandboxes} == {"", "mass_lapse"}


@pytest.mark.usefixtures("old_server")
def test_what_is_in_use_does_not_end_while_this_database_observes_but_what_it_began_since() -> None:
    runs = fleet.fleet(1)
    _in_use(runs)
    fleet.passes(90)
    old, new = factories.lease(ends_at=factories.at(60)), factories.lease(ends_at=factories.at(60))
    for lease, acquired in ((old, -60), (new, 0)):
        Lease.objects.filter(pk=lease.pk).update(acquired_at=factories.at(acquired))
    mark = factories.at(-30)
    Installation.objects.update(observing_since=mark, observing_why="behind", observed_mark_at=mark)
    told = {sandbox.lease: (sandbox.person, sandbox.due_at) for sandbox in _of(Kind.IN_USE).sandboxes}
    assert (told.pop(old.pk), told.pop(new.pk)) == (("", None), ("", new.ends_at))
    assert list(told.values()) == [("observing", None)]


@pytest.mark.parametrize(
    ("status", "ends_in", "name"),
    [("running", None, "run"), ("", 600, "ad_hoc")],
)
def test_who_uses_a_lease_is_told(status: str, ends_in: float | None, name: str) -> None:
    account = factories.account()
    run = factories.run(account.company, status=status) if status else None
    ends_at = factories.at(ends_in) if ends_in else None
    factories.lease(factories.environment(account), run=run, ends_at=ends_at)
    assert _reasons(Kind.IN_USE) == [name]
    assert _one(Kind.IN_USE).due_at == ends_at


def _fenced(seconds: float) -> Lease:
    """A lease whose controller went down and fenced it until so many seconds from now."""
    run = _run(controller_id="server-1", controller_seconds=60, controller_expires_at=factories.at(60))
    lease = factories.lease(factories.environment(factories.account(run.company)), run=run)
    fencing.fence(Controller(run.pk, "server-1", run.controller_generation, factories.at(60)), seconds=600)
    until = factories.at(seconds)
    Hold.objects.filter(lease=lease).update(until=until)
    Obligation.objects.filter(lease=lease, kind="end_fence").update(due_at=until)
    return lease


def test_a_fenced_lease_is_left_alone_until_its_fence_ends() -> None:
    lease = _fenced(300)
    sandbox = _one(Kind.FENCED)
    assert sandbox.due_at == Hold.objects.get(lease=lease).until == report.next_due("end_fence")
    assert [reason.name for reason in sandbox.reasons] == ["shutdown_fence"]


def test_a_fence_whose_time_is_over_is_to_be_ended_now() -> None:
    """It holds the sandbox until what ends it did so, which says nothing about when that is due."""
    _fenced(-5)
    assert _one(Kind.FENCED).is_releasable(ownership().at)


def _orphan(**values: Any) -> Lease:
    """An active lease that nobody uses, and what its settle is (a trigger owes it)."""
    lease = factories.lease(ends_at=None)
    Obligation.objects.filter(lease=lease, kind="settle_orphan").update(**values)
    return lease


def test_an_orphan_is_releasable_unless_its_row_waits_or_asks_a_person() -> None:
    _orphan(due_at=factories.at(-1))
    _orphan(due_at=None, quiet="waiting")
    _orphan(due_at=None, quiet="unacknowledged")
    orphans = _of(Kind.ORPHAN)
    assert (orphans.count, orphans.releasable, orphans.held, orphans.undecided) == (3, 1, 1, 1)
    assert {row.person for row in orphans.sandboxes} == {"", "unacknowledged"}


def test_an_orphan_whose_sandbox_another_lease_uses_is_not_due() -> None:
    """S-217."""
    account = factories.account()
    lease = factories.lease(factories.environment(account), ends_at=None)
    twin = factories.account(account.company, attested_identity=account.attested_identity)
    factories.lease(factories.environment(twin), resource_id=lease.resource_id)
    sandbox = _one(Kind.ORPHAN)
    assert ([reason.name for reason in sandbox.reasons], sandbox.due_at) == (["other_lease"], None)
    assert report.next_due("settle_orphan") is None


def test_a_teardown_says_what_it_waits_for() -> None:
    drain_until = factories.at(60)
    factories.teardown(due_at=drain_until, drain_until=drain_until)
    assert _reasons(Kind.TEARDOWN) == ["drain"]
    assert (_of(Kind.TEARDOWN).releasable, _of(Kind.TEARDOWN).held) == (0, 1)
    row = factories.teardown(due_at=None, quiet="foreign_marks")
    assert {sandbox.person for sandbox in _of(Kind.TEARDOWN).sandboxes if sandbox.obligation == row.pk} == {
        "foreign_marks"
    }
    assert _of(Kind.TEARDOWN).undecided == 1


def test_a_teardown_waits_for_its_account() -> None:
    row = factories.teardown(due_in=-5)
    assert (_of(Kind.TEARDOWN).releasable, _reasons(Kind.TEARDOWN)) == (1, [])
    until = factories.at(900)
    ProviderAccount.objects.filter(pk=row.account_id).update(blocked_until=until)
    assert (_one(Kind.TEARDOWN).due_at, _reasons(Kind.TEARDOWN)) == (until, ["account_blocked"])
    assert report.next_due("teardown") == until
    ProviderAccount.objects.filter(pk=row.account_id).update(blocked_until=None, circuit="open")
    group = _of(Kind.TEARDOWN)
    assert (group.releasable, group.held, group.next_due) == (0, 1, None)
    assert _reasons(Kind.TEARDOWN) == ["circuit_open"]
    assert report.next_due("teardown") is None
    probe = factories.probe(row.account, due_in=60)
    assert report.next_due("probe_account") == probe.due_at


# Kept sandboxes: until when, and by what


def test_a_kept_sandbox_is_held_until_its_time_is_over() -> None:
    lease = _kept(Lease.State.RETAINED, hours=2)
    group = _of(Kind.RETAINED)
    assert (group.releasable, group.held, group.next_due) == (0, 1, lease.kept_until)
    assert [(because.name, because.last_until) for because in group.because] == [("kept_until", lease.kept_until)]
    _until(lease, -1)
    assert (_of(Kind.RETAINED).releasable, _of(Kind.RETAINED).because) == (1, ())


def test_one_that_an_operator_decides_about_is_never_due() -> None:
    _kept(hours=None, hourly_price=Decimal(2))
    group = _of(Kind.RETAINED)
    assert (group.undecided, group.held, group.releasable, group.next_due) == (1, 0, 0, None)
    assert group.sandboxes[0].person == "operator_decides"
    assert report.next_due("dispose") is None


def test_a_soft_hold_ends_with_the_window_and_the_report_says_when() -> None:
    """S-227."""
    window = factories.at(3600)
    lease = _kept(hours=0, expires_at=window)
    _orphaned(lease)
    _hold(lease, Hold.Kind.PRESERVATION, hours=None)
    assert report.next_due("dispose") == window
    (because,) = _of(Kind.RETAINED_ORPHAN).because
    assert (because.name, because.strength, because.last_until) == ("preservation", "soft", window)


def test_an_always_held_one_is_not_due_and_is_held_until_that_is_ended() -> None:
    run = _run()
    lease = factories.lease(factories.environment(factories.account(run.company)), run=run)
    _orphaned(_until(factories.stopped(lease), 0))
    group = _of(Kind.RETAINED_ORPHAN)
    assert (group.held, group.next_due) == (1, None)
    assert [(because.name, because.last_until) for because in group.because] == [("run_live", None)]
    assert report.next_due("dispose") is None
    Run.objects.filter(pk=run.pk).update(status="failed", finished_at=Now())
    assert _of(Kind.RETAINED_ORPHAN).releasable == 1


def test_the_last_of_several_holds_counts() -> None:
    lease = _orphaned(_kept(hours=0))
    first, last = _hold(lease, hours=1), _hold(lease, Hold.Kind.EXPORT_RESUME, hours=5)
    assert report.next_due("dispose") == last.until
    assert {because.name: because.last_until for because in _of(Kind.RETAINED_ORPHAN).because} == {
        "operator": first.until,
        "export_resume": last.until,
    }
    holds.end(last.pk, company_id=lease.company_id, actor="olga")
    assert report.next_due("dispose") == first.until
    holds.end(first.pk, company_id=lease.company_id, actor="olga")
    assert _of(Kind.RETAINED_ORPHAN).releasable == 1


def test_a_hold_on_the_issue_is_told_of_each_of_its_sandboxes() -> None:
    issue = factories.issue()
    where = factories.environment(factories.account(issue.company))
    leases = [_orphaned(_kept(environment_=where, issue=issue, hours=0)) for _ in range(2)]
    until = factories.at(7200)
    holds.hold(company_id=issue.company_id, kind="operator", holder="olga", issue_id=issue.pk, until=until, reason="r")
    for lease in leases:
        _settle(lease)
    (because,) = _of(Kind.RETAINED_ORPHAN).because
    assert (because.name, because.count, because.first_until, because.last_until) == ("operator", 2, until, until)


def test_a_row_that_was_woken_is_told_with_the_time_that_its_settle_computes() -> None:
    """A look is no event: the row is due now, and its settle would only say until when it waits."""
    lease = _kept(hours=3)
    Obligation.objects.filter(lease=lease, kind="dispose").update(due_at=factories.at(-1))
    assert report.next_due("dispose") == lease.kept_until
    disposals = next(kind for kind in report.owed().kinds if kind.kind == "dispose")
    assert disposals.next_due == lease.kept_until


def test_a_row_that_cools_down_after_a_failure_is_told_with_its_cooldown() -> None:
    _kept(hours=-1)
    later = factories.at(120)
    Obligation.objects.filter(kind="dispose").update(due_at=later, failures=1)
    assert report.next_due("dispose") == later
    assert _of(Kind.RETAINED).releasable == 0


def test_a_settle_that_is_at_work_is_not_told_with_the_end_of_its_protection() -> None:
    lease = _kept(hours=-1)
    factories.claimed(Obligation.objects.get(lease=lease, kind="dispose"))
    assert _near(report.next_due("dispose"), factories.at(0))


def test_the_next_due_of_other_kinds_is_their_earliest_row_that_its_account_lets_through() -> None:
    early = factories.teardown(due_in=60)
    factories.teardown(due_in=300)
    assert report.next_due("teardown") == early.due_at
    blocked = factories.at(900)
    early.account.blocked_until = blocked
    early.account.save()
    assert _near(report.next_due("teardown"), factories.at(300))
    Obligation.objects.exclude(pk=early.pk).filter(kind="teardown").update(due_at=None, quiet="waiting")
    assert report.next_due("teardown") == blocked
    assert report.next_due("verify_end") is None


# What it says comes true


def _any_kept(random: Random, company: Company) -> Lease:
    """A kept sandbox whose end, mark, window, run, issue and holds are any."""
    issue = factories.issue(company) if random.random() < 0.6 else None
    status = random.choice([*Run.LIVE, "failed", "succeeded"])
    run = factories.run(company, status=status, issue=issue) if random.random() < 0.5 else None
    if issue and random.random() < 0.3:
        factories.run(company, status="queued", issue=issue)
    window = random.choice([None, -100, 400, 5000])
    lease = factories.lease(factories.environment(factories.account(company)), run=run, issue=issue)
    factories.stopped(lease, state=random.choice(Lease.KEPT))
    ends = random.choice([None, -50, 300, 4000])
    Lease.objects.filter(pk=lease.pk).update(
        expires_at=factories.at(window) if window else None,
        kept_until=factories.at(ends) if ends else None,
        orphaned_at=factories.at(-10) if random.random() < 0.4 else None,
    )
    for kind in random.sample(sorted(set(Hold.Kind.values) - {"shutdown_fence"}), random.choice([0, 0, 1, 2])):
        until = factories.at(random.choice([200, 6000])) if kind == "operator" or random.random() < 0.5 else None
        on = {"issue_id": issue.pk} if issue and random.random() < 0.5 else {"lease_id": lease.pk}
        holds.hold(company_id=company.pk, kind=kind, holder="somebody", until=until, reason="any", **on)
    return lease


@pytest.mark.parametrize("seed", range(3))
def test_what_the_report_says_of_each_sandbox_is_what_its_settle_then_does(seed: int) -> None:
    """Every row is woken, so nothing of the answer is in `due_at` yet."""
    random, company = Random(seed), factories.company()  # noqa: S311 - repeatable
    leases = [_kept(hours=None), *(_any_kept(random, company) for _ in range(40))]
    Obligation.objects.filter(kind="dispose").update(due_at=factories.at(-1), quiet="")
    told = {row.lease: row for group in ownership(shown=None).groups for row in group.sandboxes}
    sweep_lane(Obligation.Kind.DISPOSE)
    seen = set()
    for lease in leases:
        row, disposal = told[lease.pk], Obligation.objects.filter(lease=lease, kind="dispose").latest("pk")
        lease.refresh_from_db()
        if row.is_releasable(ownership().at):
            assert lease.state == "pending_cleanup"
            seen.add("releasable")
            continue
        assert (lease.state in Lease.KEPT, disposal.due_at) == (True, row.due_at)
        assert (disposal.quiet == "operator_decides") == bool(row.person)
        seen.add(disposal.quiet or "later")
        assert (disposal.quiet == "waiting") == (row.due_at is None and not row.person)
    assert seen == {"releasable", "operator_decides", "waiting", "later"}
    later = [row.due_at for row in told.values() if row.due_at is not None and row.due_at > ownership().at]
    assert report.next_due("dispose") == min(later)


def test_nothing_is_releasable_while_this_database_observes() -> None:
    _kept(hours=-1)
    _orphan()
    factories.teardown()
    factories.hold(factories.lease(), Hold.Kind.SHUTDOWN_FENCE, until=factories.at(60))
    Installation.current()
    now = factories.at(0)
    Installation.objects.update(observing_since=now, observing_why="behind", observed_mark_at=now)
    told = ownership()
    assert [group.releasable for group in told.groups] == [0] * len(told.groups)
    assert told.of(Kind.RETAINED).sandboxes[0].person == "observing"
    assert told.of(Kind.TEARDOWN).undecided == 1
    assert (told.of(Kind.FENCED).undecided, told.of(Kind.FENCED).next_due) == (1, None)
    assert (report.next_due("dispose"), report.next_due("settle_orphan")) == (None, None)


# What it costs


def _acquired(lease: Lease, *, hours_ago: float) -> None:
    Lease.objects.filter(pk=lease.pk).update(acquired_at=factories.at(-hours_ago * 3600))


def test_what_runs_costs_its_price_since_it_was_acquired() -> None:
    _acquired(factories.lease(hourly_price=Decimal("0.5")), hours_ago=4)
    cost = _of(Kind.IN_USE).cost
    assert (cost.per_hour, round(cost.so_far, 2), cost.unknown, cost.at_most) == (Decimal("0.5"), 2, 0, False)


def test_what_is_kept_costs_at_most_its_price_since_it_was_proven_stopped() -> None:
    with transaction.atomic():
        owed = factories.teardown(factories.lease(hourly_price=Decimal("0.5")), verb="stop_only")
        lease = owed.lease
        proof = factories.receipt(lease, evidence="stopped", confirmed_at=factories.at(-2 * 3600))
        transitions.settle(lease, owed, proof)
    _acquired(lease, hours_ago=400)
    told = ownership()
    cost = told.of(Kind.RETAINED).cost
    assert (cost.per_hour, round(cost.so_far, 2), cost.at_most) == (Decimal("0.5"), 1, True)
    assert told.total == cost


def test_an_unknown_price_is_said_and_not_counted_as_nothing() -> None:
    factories.lease(hourly_price=None)
    factories.lease(hourly_price=Decimal(0))
    factories.lease(hourly_price=Decimal(3))
    cost = _of(Kind.IN_USE).cost
    assert (cost.per_hour, cost.unknown) == (3, 1)
    assert sorted(str(row.so_far is None) for row in _of(Kind.IN_USE).sandboxes) == ["False", "False", "True"]


# History, and a mass lapse


def test_ends_without_proof_are_one_line_for_each_account() -> None:
    account = factories.account()
    later = factories.at(600)
    for values in ({"due_at": later}, {"due_at": None, "quiet": "history_unverified"}):
        lease = factories.teardown(factories.lease(factories.environment(account), hourly_price=Decimal(1))).lease
        with transaction.atomic():
            transitions.settle_unverified(lease, lease.obligations.get(), actor="olga", reason="gone")
        Obligation.objects.filter(lease=lease, kind="verify_end").update(**values)
    (history,) = ownership().history
    assert (history.name, history.open, history.undecided, history.next_due) == (account.name, 2, 1, later)
    assert (history.cost.per_hour, history.cost.at_most) == (2, True)
    assert "2 ended without proof and looked for, 1 for a person" in _text()
    ProviderAccount.objects.filter(pk=account.pk).update(circuit="open")
    assert ownership().history[0].next_due is None


def test_a_mass_lapse_is_told_with_how_many_runs_it_is_about() -> None:
    for seconds in (-5, -5, 60):  # one second long: the server of the tests has not been up for much longer
        _run(controller_id="s", controller_seconds=1, controller_expires_at=factories.at(seconds))
    assert ownership().mass_lapse is None
    Obligation.objects.filter(kind="watch_controllers").update(due_at=None, quiet="mass_lapse")
    lapse = ownership().mass_lapse
    assert lapse is not None
    assert lapse.runs == 2
    assert "2 runs are past their controllers' time" in _text()


# The command


def _text(*options: str) -> str:
    out = StringIO()
    call_command("owed", *options, stdout=out)
    return out.getvalue()


def test_the_command_tells_it_in_sentences() -> None:
    lease = _kept(Lease.State.RETAINED, hours=72, hourly_price=Decimal("0.25"))
    _hold(lease, hours=90)
    run = _run()
    factories.lease(factories.environment(factories.account(run.company)), run=run)
    text = _text()
    line = next(line for line in text.splitlines() if line.startswith("kept for its files"))
    assert line.split()[4:] == ["1", "0", "1", "0", "in", "4", "d", "at", "most", "0.25", "at", "most", "0.00"]
    assert "1 kept for its files: an operator keeps it, until " in text
    assert "1 kept for its files: the time for which it is kept is not over, until " in text
    assert "1 in use: its run is not over, and no controller holds it, until it is ended" in text
    assert "0.00 + 1 of unknown price" in text
    assert str(lease.pk) not in text
    named = _text("--list")
    assert f"  {lease.pk} {lease.resource_id} (local of {lease.environment}); " in named


def test_the_command_names_as_many_as_are_asked_for() -> None:
    for _ in range(3):
        factories.lease()
    assert "and 1 more" in _text("--list", "2")
    assert "more" not in _text("--list", "all")
    assert len(json.loads(_text("--json", "--list", "2"))["ownership"]["groups"][0]["sandboxes"]) == 2


def test_json_says_null_for_what_only_a_write_ends() -> None:
    run = _run()
    factories.lease(factories.environment(factories.account(run.company)), run=run)
    group = json.loads(_text("--json"))["ownership"]["groups"][0]
    assert group["sandboxes"][0]["reasons"][0]["until"] is None
    assert (group["because"][0]["last_until"], group["kind"], group["count"]) == (None, "in_use", 1)


# It only reads


_DIGEST = """
SELECT count(*), md5(string_agg(md5(t.xmin::text || t::text), '' ORDER BY md5(t.xmin::text || t::text))) FROM {table} t
"""


def _hashes() -> dict[str, Any]:
    """A digest of each table of the database; a row that was written as it was counts as changed."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT format('%I.%I', schemaname, tablename) FROM pg_tables WHERE schemaname = 'public'")
        tables = sorted(name for (name,) in cursor.fetchall())
        found = {}
        for table in tables:
            cursor.execute(_DIGEST.format(table=table))
            found[table] = cursor.fetchone()
    return found


def test_the_report_changes_nothing_in_any_table() -> None:
    """S-230."""
    _everything()
    before = _hashes()
    assert any(count for count, _ in before.values())
    ownership(shown=None)
    for kind in Obligation.Kind.values:
        report.next_due(kind)
    _text("--list", "all")
    _text("--json")
    assert _hashes() == before


def test_a_role_that_may_only_read_gets_the_whole_report() -> None:
    _everything()
    role = f"reader_{uuid4().hex[:8]}"
    with connection.cursor() as cursor:
        cursor.execute(f"CREATE ROLE {role}")
        cursor.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {role}")
        try:
            cursor.execute(f"SET ROLE {role}")
            told = json.loads(_text("--json"))
            cursor.execute("RESET ROLE")
        finally:
            cursor.execute("RESET ROLE")
            cursor.execute(f"DROP OWNED BY {role}")
            cursor.execute(f"DROP ROLE {role}")
    assert all(group["count"] for group in told["ownership"]["groups"])


def test_every_statement_of_the_report_runs_in_one_read_only_snapshot() -> None:
    _everything()
    modes = []

    def ask(execute: Any, query: Any, params: Any, many: Any, context: Any) -> Any:
        if "leases_" in str(query):
            for setting in ("transaction_read_only", "transaction_isolation"):
                context["cursor"].execute(f"SHOW {setting}")
                modes.append(context["cursor"].fetchone()[0])
            context["cursor"].execute("SELECT now()")
            modes.append(context["cursor"].fetchone()[0])
        return execute(query, params, many, context)

    with connection.execute_wrapper(ask):
        report.owed()
    assert {"on", "repeatable read"} < set(modes)
    assert len(set(modes)) == 3, "one transaction has one time"


def _everything() -> None:
    """At least one sandbox of each kind, and what is told beside them."""
    where = factories.environment(factories.account(), hourly_price=Decimal(1))
    run = _run(controller_id="s", controller_seconds=1, controller_expires_at=factories.at(-5))
    factories.lease(where)
    factories.lease(factories.environment(factories.account(run.company)), run=run)
    fenced = factories.lease(where)
    Hold.objects.create(
        company_id=fenced.company_id, lease=fenced, kind="shutdown_fence", strength="always", holder="s",
        until=factories.at(300),
    )  # fmt: skip
    _orphan()
    _kept(environment_=where, scope="workspace", run=factories.run(fenced.company, status="succeeded"))
    _hold(_kept(Lease.State.RETAINED, environment_=where))
    _kept(environment_=where, hours=None)
    _orphaned(_kept(environment_=where))
    factories.teardown(factories.lease(where))
    ended = factories.teardown(factories.lease(where)).lease
    with transaction.atomic():
        transitions.settle_unverified(ended, ended.obligations.get(), actor="olga", reason="gone")
    Obligation.objects.filter(kind="watch_controllers").update(due_at=None, quiet="mass_lapse")
    told = ownership()
    assert all(group.count for group in told.groups)
    assert (len(told.history), told.mass_lapse is not None) == (1, True)
