"""A task whose run failed, with all that a control plane tells of it: the stage of what continues it.

Everything is told through the functions that a control plane calls. `told=False` leaves all of it out; each test then
tells what it is about.
"""

from __future__ import annotations

from typing import Any

from django.db.models.functions import Now

import leases
from leases import facts
from leases.models import Continuation, Issue, IssueFacts, Lease, Obligation, RecoveryAction, Run, RunFacts
from leases.models.environments import Policy
from tests import factories
from tests.scenarios.steps import acquired, sweep
from tests.stage import Rehearsal

AGENT = "ada"
ADAPTER = "process"


class FailedTask:
    """One issue with one failed run. Its lease is released and, unless `owed`, its sandbox proven ended."""

    def __init__(
        self,
        rehearsal: Rehearsal,
        policy: str = Policy.EPHEMERAL,
        *,
        owed: bool = False,
        told: bool = True,
        leased: bool = True,
    ) -> None:
        self.rehearsal = rehearsal
        self.company = rehearsal.company
        self.issue: Issue = factories.issue(self.company)
        self.run: Run = rehearsal.run
        Run.objects.filter(pk=self.run.pk).update(issue=self.issue)
        self.lease: Lease | None = acquired(rehearsal, policy) if leased else None
        if told:
            self.tell_run(agent=AGENT, adapter=ADAPTER, process_id=1)
        if self.lease is not None:
            leases.release(self.lease.pk, outcome="failed")
        self.fails()
        if not owed:
            sweep(rehearsal)
        if told:
            self.tell_all()

    def fails(self, run: Run | None = None) -> None:
        failed = run or self.run
        Run.objects.filter(pk=failed.pk).update(status=Run.Status.FAILED, finished_at=Now())
        failed.refresh_from_db()

    def tell_all(self) -> None:
        self.tell_issue(is_open=True, assignee=AGENT, decisions_pending=0)
        self.tell_run(
            adapter_attached=False, coordinator="terminal_failure", coordinator_owner="", history_available=True
        )
        self.action: RecoveryAction = self.opens_action()

    def tell_issue(self, **told: Any) -> IssueFacts:
        return facts.tell_issue(self.issue.pk, self.company.pk, actor="control plane", **told)

    def tell_run(self, run: Run | None = None, **told: Any) -> RunFacts:
        return facts.tell_run((run or self.run).pk, self.company.pk, actor="control plane", **told)

    def opens_action(self, run: Run | None = None, cause: str = "the run failed") -> RecoveryAction:
        return facts.open_recovery_action(
            self.issue.pk, self.company.pk, run_id=(run or self.run).pk, cause=cause, actor="control plane"
        )

    def retried(self, run: Run | None = None, **how: Any) -> Continuation:
        asked: dict[str, Any] = {"actor": "a user", "by_user": True, "reason": "try again", **how}
        return leases.request_retry((run or self.run).pk, self.company.pk, **asked)

    def commented(self, message_id: str = "m1", *, authored_in: float = 1.0, **how: Any) -> Continuation:
        """A comment, written `authored_in` seconds from now by the database's clock."""
        asked: dict[str, Any] = {
            "message_id": message_id,
            "authored_at": factories.at(authored_in),
            "actor": "a user",
            "by_user": True,
            **how,
        }
        return leases.save_message(self.run.pk, self.company.pk, **asked)

    def started(self) -> list[Run]:
        """The runs that continuations of this task started, in any number."""
        return list(Run.objects.filter(issue=self.issue, continues__isnull=False).order_by("created_at"))


def seen(row: Continuation) -> tuple[str, str]:
    """The state and the hold of a continuation, as the database has them now."""
    row.refresh_from_db()
    return row.state, row.hold


def owed_by(row: Continuation) -> Obligation:
    return Obligation.objects.filter(continuation=row).latest("pk")
