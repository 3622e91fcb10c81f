"""The creations nobody is told about: one whose reply is lost, and one whose caller is killed.

Answers for playing them and for what became of them. A sandbox exists at the service, and no lease and no process of
ours knows its id: only the journal, which was committed before, and the marks that the sandbox carries.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass

import leases
from leases import deciding
from leases.errors import AcquireUncertain
from leases.models import Environment, Lease, Operation, Run
from paperclip_env.demo.cast import Cast
from paperclip_env.demo.machinery import Machinery, wait_until
from paperclip_env.demo.services import Service
from providers.rehearsing import Kind

_ACQUIRER = "acquirer"


@dataclass(frozen=True, slots=True)
class Loss:
    """One creation nobody was told about, and the sandbox that it made at the service."""

    title: str
    operation: Operation
    sandbox: str

    @property
    def lease(self) -> Lease | None:
        """The lease that owns the sandbox by now, if one does."""
        return Lease.objects.filter(pk=self.operation.lease_uuid).first()


class Losses:
    """Plays the losses at one service, in an environment of its own."""

    def __init__(self, cast: Cast, service: Service, environment: Environment) -> None:
        self.all: list[Loss] = []
        self._cast = cast
        self._service = service
        self._environment = environment
        self._doomed: Run | None = None

    def begin(self, machinery: Machinery) -> None:
        """Let a process acquire a sandbox, whose reply comes at one byte a second: it will not live to read it."""
        self._doomed = self._cast.run()
        self._service.will(Kind.TRICKLE)
        ids = (self._environment.pk, self._cast.company.pk, self._doomed.pk)
        machinery.start(_ACQUIRER, *map(str, ids))

    def kill_the_caller(self, machinery: Machinery, say: Callable[[str], None]) -> None:
        """Kill that process as soon as the service has made its sandbox, and ask for its recovery as an operator does.

        By itself it is due when the call's bound has passed, which the demo has no time for.
        """
        if self._doomed is None:
            raise RuntimeError("no process was started to be killed")

        def made() -> bool:
            if ended := machinery.ended():
                raise RuntimeError(f"the {ended[0]} ended by itself:\n{machinery.log_tail(ended[0])}")
            return any(box.state == "running" for box in self._service.sandboxes())

        wait_until("the sandbox of the process to be killed", made, seconds=60, every=0.05)
        machinery.end(_ACQUIRER, signal.SIGKILL)
        loss = self._lost("was left behind by a process that was killed", self._doomed, set())
        if loss.sandbox not in self._service.executing():
            raise RuntimeError("nothing executes in the sandbox of the process that was killed")
        say(
            f"A process is killed with SIGKILL in the middle of its acquire; its sandbox at {self._service.label} runs."
        )
        deciding.recheck(
            company_id=self._cast.company.pk,
            operation_id=loss.operation.pk,
            actor="demo's operator",
            reason="its process was killed",
        )
        say("An operator asks to look for it now, and not when the call's bound has passed, in two and a half minutes.")

    def lose_the_reply(self, say: Callable[[str], None]) -> None:
        """Lose the reply of a creation, and of the one repetition that its caller is allowed."""
        before = {box.id for box in self._service.sandboxes()}
        self._service.will(Kind.LOST, times=2)
        run = self._cast.run()
        try:
            leases.acquire(self._environment.pk, company_id=self._cast.company.pk, run_id=run.pk, actor="demo")
        except AcquireUncertain:
            self._lost("was created, and both replies were lost", run, before)
        else:
            raise RuntimeError("an acquire whose replies were lost returned a lease")
        say(f"A create at {self._service.label} loses its reply, twice: acquire says that it is uncertain.")

    def wait_until_destroyed(self, say: Callable[[str], None]) -> None:
        """Wait until each has an owner, and the service says that none of them executes any more."""

        def destroyed() -> bool:
            states = {box.id: box.state for box in self._service.sandboxes()}
            return all(loss.lease is not None and states[loss.sandbox] == "killed" for loss in self.all)

        wait_until("the end of the sandboxes nobody was told of", destroyed, seconds=60)
        say(f"Both were found by their marks, owned and destroyed. Proof of it takes {self._service.label} 30 s more.")

    def _lost(self, title: str, run: Run, before: set[str]) -> Loss:
        made = [box.id for box in self._service.sandboxes() if box.id not in before]
        if len(made) != 1:
            raise RuntimeError(f"the sandbox that {title}: there are {len(made)} at the service")
        loss = Loss(title, Operation.objects.get(run_uuid=run.pk), made[0])
        self.all.append(loss)
        return loss
