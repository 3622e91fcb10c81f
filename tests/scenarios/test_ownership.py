"""Whatever comes in whatever order: what is needed is not destroyed, and what nobody needs is.

A model of runs, controllers, leases, holds, settles, time and outages, run against the real system over a rehearsal
provider. What is needed is said a second time here, in the plainest words, and asked at the very moment of each
destroying call; the code under test is not asked.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.db.models import Q
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule, run_state_machine_as_test

import leases
from cleanup.alarm import next_alarm
from cleanup.claims import LANE
from cleanup.engine import Engine
from leases import holds
from leases.controllers import Controller
from leases.errors import LeaseError
from leases.models import Environment, Hold, Installation, Issue, Lease, Obligation, Run
from leases.models.environments import Policy
from tests import factories
from tests.fleet import a_server_that_was_always_there
from tests.scenarios.passing import next_due_in, passes, shift
from tests.stage import Rehearsal

DAY = 86_400.0
KINDS = [Hold.Kind.RESTORE_RECOVERY, Hold.Kind.OPERATOR, Hold.Kind.EXPORT, Hold.Kind.RECOVERY_ACTION]


class Ownership(RuleBasedStateMachine):
    runs, kept_leases, placed = Bundle("runs"), Bundle("leases"), Bundle("placed")

    def __init__(self) -> None:
        super().__init__()
        self.stage = Rehearsal()
        Environment.objects.filter(pk=self.stage.environment.pk).update(
            reuse_idle_for=timedelta(days=2), retain_for=timedelta(days=5)
        )
        self.world = self.stage.world
        self.world.hooks["delete"] = self.nobody_needs
        self.controllers: dict[object, Controller] = {}
        self.silent: set[object] = set()
        self.wrongly_destroyed: list[str] = []

    # What is needed, in the plainest words

    def nobody_needs(self, resource_id: str) -> None:
        """Called when the provider is asked to destroy: whoever needs it by then was passed over."""
        try:
            self._ask_who_needs(resource_id)
        finally:
            connection.close()  # the call has a thread of its own

    def _ask_who_needs(self, resource_id: str) -> None:
        lease = Lease.objects.get(resource_id=resource_id, state=Lease.State.PENDING_CLEANUP)
        now = factories.database_now()
        on_it = Hold.objects.filter(Q(until=None) | Q(until__gt=now), lease=lease, ended_at=None)
        needed = list(on_it.values_list("kind", flat=True))
        if lease.orphaned_at is not None:
            on_issue = Hold.objects.filter(Q(until=None) | Q(until__gt=now), issue=lease.issue, ended_at=None)
            needed += on_issue.values_list("kind", flat=True)
            needed += Run.objects.filter(issue=lease.issue, status__in=Run.LIVE).values_list("status", flat=True)
        if needed:
            self.wrongly_destroyed.append(f"{lease} is needed: {needed}")

    # What happens

    @rule(target=runs, on_issue=st.booleans(), controlled=st.booleans())
    def a_run_begins(self, on_issue: bool, controlled: bool) -> Any:  # noqa: FBT001
        issue = Issue.objects.filter(company=self.stage.company).first() if on_issue else None
        issue = issue or factories.issue(self.stage.company)
        run = factories.run(self.stage.company, issue=issue)
        if controlled:
            self.controllers[run.pk] = leases.take_control(run.pk, run.company_id, "controller", 60)
        return run.pk

    @rule(target=kept_leases, run=runs, policy=st.sampled_from(sorted(Policy.values)))
    def it_acquires(self, run: object, policy: str) -> Any:
        Environment.objects.filter(pk=self.stage.environment.pk).update(policy=policy)
        try:
            lease = leases.acquire(
                self.stage.environment.pk,
                company_id=self.stage.company.pk,
                run_id=run,
                controller=self.controllers.get(run),
            )
        except LeaseError:
            return multiple()  # its run is over, or its sandbox is being worked on
        return lease.pk

    @rule(lease=kept_leases, outcome=st.sampled_from(["succeeded", "failed"]))
    def it_is_released(self, lease: Any, outcome: Any) -> None:
        leases.release(lease, outcome=outcome)

    @rule(run=runs, status=st.sampled_from(["succeeded", "failed", "cancelled"]))
    def a_run_ends(self, run: object, status: str) -> None:
        Run.objects.filter(pk=run, status__in=Run.LIVE).update(status=status, finished_at=factories.database_now())

    @rule(run=runs)
    def a_controller_falls_silent(self, run: object) -> None:
        if run in self.controllers:
            self.silent.add(run)

    @rule(target=placed, lease=kept_leases, kind=st.sampled_from(KINDS), on_issue=st.booleans(), days=st.integers(1, 9))
    def somebody_needs_it(self, lease: Any, kind: str, on_issue: bool, days: int) -> Any:  # noqa: FBT001
        row = Lease.objects.get(pk=lease)
        where: dict[str, Any] = {"issue_id": row.issue_id} if on_issue and row.issue_id else {"lease_id": lease}
        until = factories.at(days * DAY) if kind == Hold.Kind.OPERATOR else None
        try:
            placed = holds.hold(company_id=row.company_id, kind=kind, holder="somebody", until=until, **where)
        except LeaseError as refused:
            if refused.code not in ("too_late", "gone"):
                raise
            return multiple()
        return placed.pk

    @rule(hold=placed)
    def nobody_needs_it_any_more(self, hold: Any) -> None:
        holds.end(hold, company_id=self.stage.company.pk, actor="somebody")

    @rule(seconds=st.sampled_from([1, 30, 90, 3600, 2 * DAY, 6 * DAY]))
    def time_passes(self, seconds: float) -> None:
        passes(seconds, self.work, renewing=self.renewing)

    @rule(seconds=st.sampled_from([30, 85, 300, 7200]))
    def we_are_away_and_come_back(self, seconds: float) -> None:
        """Nobody could renew. Whoever does when we are back holds its run still."""
        self.work()
        speaking = self.renewing()
        before = set(Run.objects.filter(pk__in=speaking, status__in=Run.LIVE).values_list("pk", flat=True))
        shift(seconds)
        self.work()
        assert set(Run.objects.filter(pk__in=before, status__in=Run.LIVE).values_list("pk", flat=True)) == before
        for run in before:
            leases.renew(self.controllers[run])

    @rule()
    def what_is_due_is_worked_on(self) -> None:
        self.work()

    def renewing(self) -> list[Any]:
        return [run for run in self.controllers if run not in self.silent]

    def work(self) -> None:
        """What workers do until nothing is due."""
        while Engine().sweep(LANE).claimed + Engine().sweep(self.stage.account.pk).claimed:
            pass

    # What is always so

    @invariant()
    def what_is_needed_was_not_destroyed(self) -> None:
        assert self.wrongly_destroyed == []

    @invariant()
    def no_kept_sandbox_is_without_an_end_and_the_next_look_is_when_it_is_said(self) -> None:
        for standing in holds.kept(self.stage.company.pk):
            row = Obligation.objects.get(lease_id=standing.lease_id, kind="dispose", closed_at=None)
            due_now = row.due_at is not None and row.due_at <= factories.database_now()
            at = standing.releasable_at
            if due_now or (at is not None and at <= standing.at):
                assert row.due_at is not None  # to be looked at, or just about to be
            elif at == holds.FOREVER:
                # Before its time is over nobody has to look what holds it.
                assert row.quiet == "waiting" or row.due_at == standing.kept_until
            elif at is None:
                assert row.quiet == "operator_decides"
            else:
                assert row.due_at is not None
                assert row.due_at <= at  # never later than it says

    def teardown(self) -> None:
        """When nobody needs anything any more, everything comes to its end, and then nothing is owed."""
        Run.objects.filter(company=self.stage.company, status__in=Run.LIVE).update(
            status=Run.Status.CANCELLED, finished_at=factories.database_now()
        )
        for row in Hold.objects.filter(company=self.stage.company, ended_at=None):
            holds.end(row.pk, company_id=row.company_id, actor="somebody")
        passes(40 * DAY, self.work)
        self.what_is_needed_was_not_destroyed()
        assert set(Lease.objects.filter(company=self.stage.company).values_list("state", flat=True)) <= {
            "expired",
            "failed",
        }
        assert [box.state for box in self.world.boxes.values() if box.state == "running"] == []
        assert not Obligation.objects.filter(company=self.stage.company, closed_at=None).exists()
        # Idle: nothing is due, nothing will be, and looking claims nothing.
        assert next_due_in() is None
        assert next_alarm() is None
        assert Engine().sweep(LANE).claimed == Engine().sweep(self.stage.account.pk).claimed == 0


@pytest.mark.django_db(transaction=True)
@pytest.mark.timeout(600)
def test_whatever_comes_in_whatever_order() -> None:
    Installation.current()
    with a_server_that_was_always_there():  # type: ignore[attr-defined]
        run_state_machine_as_test(  # type: ignore[no-untyped-call]
            Ownership,
            settings=settings(
                max_examples=10, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
            ),
        )
