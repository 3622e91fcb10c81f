"""Whatever a provider does to the starts and stops of a recovery, in whatever order: one run goes on, nothing is lost.

A model of failed runs, retries, operators' requests, faults (refused, lost before or after it was done, a full disk, a
cut archive), Stop, time and workers, run against the real system over a rehearsal provider. What must be so is said
here once more, in the plainest words: by what the provider's sandboxes really are, and not by our rows.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import Any

import pytest
from django.db import connection
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule, run_state_machine_as_test

import leases
from cleanup.claims import LANE
from cleanup.engine import Engine
from leases import recovering
from leases.errors import LeaseError
from leases.models import (
    Archive,
    Continuation,
    Environment,
    Installation,
    Issue,
    Lease,
    Obligation,
    Operation,
    ProviderAccount,
    Recovery,
    Run,
)
from leases.models.environments import Policy
from providers.contract import ErrorKind, ProviderError
from tests import factories
from tests.fleet import a_server_that_was_always_there
from tests.scenarios.passing import passes
from tests.stage import Rehearsal

AGENT = "agent"
FILES = {"work.txt": b"line\n" * 3000}
FAULTS = [
    ("start", "before", ErrorKind.DISK_FULL),
    ("start", "before", ErrorKind.REFUSED),
    ("start", "before", ErrorKind.TIMEOUT),
    ("start", "after", ErrorKind.TIMEOUT),
    ("start", "after", ErrorKind.SERVER),
    ("stop", "before", ErrorKind.REFUSED),
    ("stop", "before", ErrorKind.CONNECTION),
    ("stop", "after", ErrorKind.TIMEOUT),
    ("inspect", "before", ErrorKind.SERVER),
    ("archive", "before", ErrorKind.MISSING_PATH),
    ("archive", "before", ErrorKind.DISK_FULL),
    ("archive", "after", ErrorKind.CONNECTION),
]
DAY = 86_400.0


class Recovered(RuleBasedStateMachine):
    failed = Bundle("failed")

    def __init__(self) -> None:
        super().__init__()
        self.stage = Rehearsal()
        Environment.objects.filter(pk=self.stage.environment.pk).update(policy=Policy.RETAIN_ON_FAILURE)
        self.world = self.stage.world
        self.working: set[str] = set()
        """Sandboxes in which the run that rented them may still be at work: not stopped since."""
        self.wrong: list[str] = []
        self.starts: Counter[str] = Counter()
        self.world.hooks["start"] = self._starts
        self.world.after["stop"] = self._stopped

    # The provider

    def _starts(self, resource_id: str) -> None:
        self.starts[resource_id] += 1

    def _stopped(self, resource_id: str) -> None:
        self.working.discard(resource_id)

    @rule(fault=st.sampled_from(FAULTS), times=st.integers(1, 4))
    def the_provider_misbehaves(self, fault: tuple[str, str, ErrorKind], times: int) -> None:
        """The next so many calls of a kind fail, before or after they have taken effect."""
        name, when, kind = fault
        hooks = self.world.hooks if when == "before" else self.world.after
        usual = {("start", "before"): self._starts, ("stop", "after"): self._stopped}.get((name, when))
        left = [times]

        def hook(resource_id: str) -> None:
            if usual is not None:
                usual(resource_id)
            left[0] -= 1
            if left[0] >= 0:
                raise ProviderError(kind, "no space left on device" if kind == ErrorKind.DISK_FULL else "")

        hooks[name] = hook

    @rule(lease=failed)
    def a_sandbox_starts_by_itself(self, lease: Any) -> None:
        """Somebody does it, or a call that was lost long ago: what our rows watch is seen, the rest is not ours."""
        row = Lease.objects.get(pk=lease)
        if row.may_be_running_since is not None and row.resource_id in self.world.boxes:
            self.world.of(row.resource_id).state = "running"

    # The control plane

    @rule(target=failed, told=st.booleans())
    def a_run_fails(self, told: bool) -> Any:  # noqa: FBT001
        issue = factories.issue(self.stage.company)
        run = factories.run(self.stage.company, issue=issue, agent=AGENT)
        try:
            lease = leases.acquire(self.stage.environment.pk, company_id=self.stage.company.pk, run_id=run.pk)
        except LeaseError:
            Run.objects.filter(pk=run.pk).update(status="failed", finished_at=factories.database_now())
            return multiple()
        self.world.of(lease.resource_id).files.update(FILES)
        self.working.add(lease.resource_id)
        leases.release(lease.pk, outcome="failed")
        Run.objects.filter(pk=run.pk).update(status="failed", finished_at=factories.database_now())
        leases.open_recovery_action(issue.pk, run.company_id, run_id=run.pk, cause="it failed")
        if told:
            self.tell(run, issue)
        return lease.pk

    def tell(self, run: Run, issue: Issue) -> None:
        leases.tell_issue(issue.pk, run.company_id, is_open=True, assignee=AGENT, decisions_pending=0)
        leases.tell_run(
            run.pk,
            run.company_id,
            adapter_attached=False,
            coordinator="terminal_failure",
            coordinator_owner="",
            history_available=True,
        )

    @rule(lease=failed)
    def the_rest_is_told(self, lease: Any) -> None:
        row = Lease.objects.select_related("run", "issue").get(pk=lease)
        assert row.run is not None
        assert row.issue is not None
        self.tell(row.run, row.issue)

    @rule(lease=failed, recovers_files=st.booleans())
    def its_user_retries(self, lease: Any, recovers_files: bool) -> None:  # noqa: FBT001
        run = Lease.objects.get(pk=lease).run_id
        assert run is not None
        company = self.stage.company.pk
        leases.request_retry(run, company, actor="user", by_user=True, reason="go on", recovers_files=recovers_files)

    @rule(lease=failed, number=st.integers(1, 3))
    def its_user_writes(self, lease: Any, number: int) -> None:
        row = Lease.objects.select_related("run").get(pk=lease)
        assert row.run is not None
        assert row.run.finished_at is not None
        if Run.objects.filter(continues=row.run).exists():
            return  # there is nothing to continue any more: that is the next run's
        message = Continuation.objects.filter(message_id=f"{lease} {number}").first()
        written = message.authored_at if message else factories.database_now()
        assert written is not None
        leases.save_message(
            row.run.pk,
            row.company_id,
            message_id=f"{lease} {number}",
            authored_at=written,
            actor="user",
            by_user=True,
        )

    @rule(lease=failed)
    def an_operator_recovers_the_files_again(self, lease: Any) -> None:
        with suppress(recovering.CannotRecover):  # it is not kept at this moment, or one runs
            recovering.recover_workspace(lease, self.stage.company.pk, actor="operator", reason="once more")

    @rule(lease=failed)
    def somebody_stops_it(self, lease: Any) -> None:
        leases.stop(company_id=self.stage.company.pk, lease_id=lease, actor="user")

    # Time and workers

    @rule(seconds=st.sampled_from([1, 35, 70, 200, 500, 2000]))
    def time_passes(self, seconds: float) -> None:
        passes(seconds, self.work)

    @rule()
    def what_is_due_is_worked_on(self) -> None:
        self.work()

    def work(self) -> None:
        while Engine().sweep(LANE).claimed + Engine().sweep(self.stage.account.pk).claimed:
            pass

    # What is always so

    @invariant()
    def nothing_runs_unowned(self) -> None:
        """Each sandbox that really runs is somebody's: in use, owed a stop, journalled as starting, or watched."""
        for resource_id, box in self.world.boxes.items():
            if box.state != "running":
                continue
            owners = Lease.objects.filter(resource_id=resource_id).order_by("-acquired_at")
            lease = owners.first()
            if lease is None:
                assert Operation.objects.filter(name=box.resource.name, state="pending").exists()
                continue
            owed = set(lease.obligations.filter(closed_at=None).values_list("kind", flat=True))
            pending = Operation.objects.filter(resource_id=resource_id, state="pending").exists()
            assert lease.state == "active" or "teardown" in owed or pending or "watch_restart" in owed, (lease, owed)

    @invariant()
    def what_went_on_went_on_once_and_after_the_end(self) -> None:
        for run in Run.objects.filter(company=self.stage.company, continues__isnull=False):
            assert Run.objects.filter(continues=run.continues_id).count() == 1
        for one in Continuation.objects.filter(company=self.stage.company, state="started"):
            for lease in Lease.objects.filter(run=one.run_id):
                assert lease.resource_id not in self.working, "its run was still at work"
                fresh = lease.recoveries.filter(pk=one.recovery_id, state="exhausted").exists()
                assert one.started_run is not None
                assert not fresh or one.started_run.fresh_workspace

    @invariant()
    def what_is_offered_is_whole(self) -> None:
        for archive in Archive.objects.filter(company=self.stage.company, receipt__isnull=False):
            assert archive.recovery.state == "complete"
            with leases.open_archive(archive.pk, company_id=archive.company_id) as file:
                assert b"line\n" * 3000 in file.read()

    @invariant()
    def nobody_starts_it_more_often_than_its_generations_allow(self) -> None:
        for resource_id, starts in self.starts.items():
            attempts = sum(Recovery.objects.filter(lease__resource_id=resource_id).values_list("attempts", flat=True))
            assert starts <= attempts
        assert not Recovery.objects.filter(company=self.stage.company, attempts__gt=6).exists()

    def teardown(self) -> None:
        """When the provider behaves again and all is told, everything that waits goes on, and nothing is owed."""
        for hooks in (self.world.hooks, self.world.after):
            hooks.clear()
        self.world.hooks["start"], self.world.after["stop"] = self._starts, self._stopped
        for lease in Lease.objects.filter(company=self.stage.company).exclude(state="active"):
            self.the_rest_is_told(lease.pk)
        ProviderAccount.objects.filter(pk=self.stage.account.pk).update(circuit="closed", blocked_until=None)
        passes(4 * 3600, self.work)
        waiting = Continuation.objects.filter(company=self.stage.company, state="waiting")
        assert [(one.hold, one.hold_sentence) for one in waiting] == []
        assert [box.state for box in self.world.boxes.values() if box.state == "running"] == []
        assert not Recovery.objects.filter(company=self.stage.company, state="running").exists()
        owed = Obligation.objects.filter(company=self.stage.company, closed_at=None)
        assert set(owed.values_list("kind", flat=True)) <= {"dispose"}
        self.what_went_on_went_on_once_and_after_the_end()
        connection.close()


@pytest.mark.django_db(transaction=True)
@pytest.mark.timeout(900)
def test_whatever_the_provider_does_in_whatever_order() -> None:
    Installation.current()
    with a_server_that_was_always_there():  # type: ignore[attr-defined]
        run_state_machine_as_test(  # type: ignore[no-untyped-call]
            Recovered,
            settings=settings(
                max_examples=12,
                stateful_step_count=20,
                deadline=None,
                suppress_health_check=list(HealthCheck),
                phases=(Phase.explicit, Phase.reuse, Phase.generate),  # shrinking one of these takes many minutes
            ),
        )
