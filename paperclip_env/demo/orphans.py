"""What nobody holds any more: a controller falls silent, and what its run rented comes to its end all the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import leases
from leases import holds
from leases.models import Hold, Issue, Lease, Run
from paperclip_env.demo.cast import Cast
from paperclip_env.demo.machinery import wait_until

_HOLD_SECONDS = 10


@dataclass(slots=True)
class Orphan:
    """One lease whose controller never renews, and the hold of somebody who still needs its files."""

    lease: Lease
    run: Run
    hold: Hold

    @classmethod
    def left_by_its_controller(cls, cast: Cast, say: Callable[[str], None]) -> Orphan:
        """A controller takes a run for ten seconds, acquires a sandbox for it, and is never heard of again."""
        issue = Issue.objects.create(company=cast.company, title="Begun and never finished")
        run = Run.objects.create(company=cast.company, issue=issue, status=Run.Status.RUNNING)
        controller = leases.take_control(run.pk, run.company_id, "controller of the demo", _HOLD_SECONDS, actor="demo")
        environment = cast.workshop.environment_set.order_by("created_at").first()
        if environment is None:
            raise RuntimeError("the demo has no environment at its workshop")
        lease = leases.acquire(
            environment.pk, company_id=run.company_id, run_id=run.pk, controller=controller, actor="demo"
        )
        leases.bridge(lease.pk).execute(["sh", "-c", "echo half done > work.txt"])
        hold = holds.hold(
            company_id=run.company_id,
            lease_id=lease.pk,
            kind=Hold.Kind.RESTORE_RECOVERY,
            holder="demo",
            reason="its files are still to be saved",
        )
        say("A controller holds a run for ten seconds, and falls silent with a lease in use.")
        return cls(lease, run, hold)

    def comes_to_its_end(self, say: Callable[[str], None]) -> None:
        """Wait until it is stopped and kept for who needs it, and, once nobody does, destroyed."""

        def reached(state: str) -> bool:
            self.lease.refresh_from_db()
            return self.lease.state == state

        wait_until("the sandbox that nobody holds, stopped and kept", lambda: reached("released"), seconds=60)
        self.run.refresh_from_db()
        say(f"Its hold lapsed: the run is {self.run.status}, and its sandbox is stopped, kept, and nobody's.")
        (standing,) = holds.standing([self.lease.pk]).values()
        say(f"It is not destroyed yet: {'; '.join(reason.sentence for reason in standing.reasons)}.")
        holds.end(self.hold.pk, company_id=self.lease.company_id, actor="demo")
        wait_until("the end of the sandbox that nobody needs", lambda: reached("failed"), seconds=60)
        say("Nobody needs its files any more: it is destroyed, by the lease's own record.")
