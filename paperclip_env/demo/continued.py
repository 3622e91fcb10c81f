"""What goes on after it failed: a run's files are saved, and the next run of its task starts by itself."""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from dataclasses import dataclass

import leases
from leases.models import Archive, Continuation, Issue, Lease, Run, RunFacts
from paperclip_env.demo.cast import LINES, WORK, Cast
from paperclip_env.demo.machinery import wait_until

_AGENT = "agent of the demo"


@dataclass(slots=True)
class Continued:
    """One lease of a run that failed, and the retry that its user asked for at once."""

    lease: Lease
    run: Run
    retry: Continuation

    @classmethod
    def after_a_failure(cls, cast: Cast, say: Callable[[str], None]) -> Continued:
        """A run works, fails, and is retried before anything of it is stopped."""
        issue = Issue.objects.create(company=cast.company, title="Failed, and goes on")
        run = Run.objects.create(company=cast.company, issue=issue, status=Run.Status.RUNNING, agent=_AGENT)
        environment = cast.workshop.environment_set.get(name="kept when it failed")
        lease = leases.acquire(environment.pk, company_id=run.company_id, run_id=run.pk, actor="demo")
        leases.bridge(lease.pk).execute(["sh", "-c", WORK])
        leases.release(lease.pk, outcome="failed", actor="demo")
        run.refresh_from_db()
        run.status, run.finished_at = Run.Status.FAILED, lease.acquired_at
        run.save(update_fields=["status", "finished_at"])
        leases.tell_issue(issue.pk, run.company_id, is_open=True, assignee=_AGENT, decisions_pending=0, actor="demo")
        leases.open_recovery_action(issue.pk, run.company_id, run_id=run.pk, cause="it failed", actor="demo")
        retry = leases.request_retry(run.pk, run.company_id, actor="user of the demo", by_user=True, reason="go on")
        say("A run failed, and its user asks for a retry at once. Nothing of it is stopped yet, so the retry waits.")
        return cls(lease, run, retry)

    def comes_to_its_end(self, say: Callable[[str], None]) -> None:
        """Wait for each gate in turn, and open the last one: what the control plane tells of the run."""

        def held(code: str) -> bool:
            self.retry.refresh_from_db()
            return self.retry.hold == code

        wait_until("the gate that only the control plane opens", lambda: held("controller_settling"), seconds=60)
        say(f"It waits ({self.retry.hold}): {self.retry.hold_sentence}.")
        leases.tell_run(
            self.run.pk,
            self.run.company_id,
            adapter_attached=False,
            coordinator=RunFacts.Coordinator.TERMINAL_FAILURE,
            coordinator_owner="",
            history_available=True,
            actor="demo",
        )

        def started() -> bool:
            self.retry.refresh_from_db()
            return self.retry.state == Continuation.State.STARTED

        wait_until("the run that goes on", started, seconds=60)
        archive = self.archive
        say(
            f"Stopped, reopened, saved ({archive.size if archive else 0} bytes), stopped again, each with its receipt: "
            f"the next run is {self.retry.started_run.status if self.retry.started_run else 'missing'}, by itself."
        )

    @property
    def archive(self) -> Archive | None:
        return leases.offered_archives(company_id=self.run.company_id, run_id=self.run.pk).first()

    def saved_lines(self) -> int:
        """Return how many lines of the failed run's work are in its archive."""
        archive = self.archive
        if archive is None:
            return 0
        with (
            leases.open_archive(archive.pk, company_id=archive.company_id) as file,
            tarfile.open(fileobj=file, mode="r|") as tar,
        ):
            for member in tar:
                if member.name == "./work.txt" and (work := tar.extractfile(member)) is not None:
                    return work.read().count(b"\n")
        return 0

    def is_right(self) -> bool:
        """Whether exactly one run goes on from the failed one, and all lines of its work were saved."""
        return Run.objects.filter(continues=self.run).count() == 1 and self.saved_lines() == LINES
