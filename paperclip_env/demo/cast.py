"""Who plays in the demo: the company, its accounts, and some 25 leases, each with work of its own."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from django.db import connection

import leases
from leases import bounds
from leases.errors import LeaseError
from leases.models import Company, Credential, Environment, Installation, Issue, Lease, ProviderAccount, Run
from paperclip_env.demo.engines import Engine
from paperclip_env.demo.machinery import wait_until
from paperclip_env.demo.services import Service, Services
from providers.contract import MARK_INSTALLATION, ProviderError
from providers.registry import open_provider
from providers.rehearsing import Kind

_DAEMON = "(setsid sh -c 'trap \"\" HUP TERM; while :; do sleep 1; done' >/dev/null 2>&1 &) ; echo started"
LINES = 5
"""How many lines the work writes into `work.txt`."""
WORK = "for i in 1 2 3 4 5; do echo line $i; done > work.txt && wc -l < work.txt"


@dataclass
class Part:
    """One lease and how it is played. `outcome` is what its holder says at the end; `over`: it was released."""

    title: str
    lease: Lease
    run: Run
    outcome: str = "succeeded"
    stops: bool = False
    over: bool = False
    threads: list[threading.Thread] = field(default_factory=list)

    def release(self) -> None:
        if self.stops:
            leases.stop(company_id=self.lease.company_id, run_id=self.run.pk, actor="demo")
        else:
            leases.release(self.lease.pk, outcome=self.outcome, actor="demo")  # type: ignore[arg-type]
        self.over = True


class Cast:
    """Makes the rows and the sandboxes."""

    def __init__(self, directory: Path, engine: Engine | None, services: Services) -> None:
        self.services = services
        self._secrets: dict[ProviderAccount, str] = {}
        self.company = Company.objects.create(name="Demo company")
        self.issue = Issue.objects.create(company=self.company, title="Tidy up after the agents")
        self.workshop = self._account("workshop", directory / "workshop")
        self.flaky_directory = directory / "flaky"
        self.flaky = self._account("flaky", self.flaky_directory)
        self.containers = None
        if engine is not None:
            self.containers = ProviderAccount.objects.create(
                company=self.company, name="containers", provider="docker", endpoint={"base_url": engine.base_url}
            )
        self.e2b = self._rented(services.e2b)
        self.daytona = self._rented(services.daytona)
        self.image = engine.image if engine is not None else ""
        self.parts: list[Part] = []
        self.lossy = self._environment("at E2B", self.e2b)
        self._reused = self._environment("at Daytona, used again", self.daytona, policy="reuse_by_environment")

    def enter(self, say: Callable[[str], None]) -> None:
        """Acquire the leases on this machine and begin their work; one at Daytona does its work and is released."""
        earlier = self._part("is at Daytona, and was stopped for the next run", self._reused)
        self._works(earlier)
        earlier.release()
        once = self._environment("once", self.workshop)
        kept = self._environment("kept for the next run", self.workshop, policy="reuse_by_environment")
        precious = self._environment("kept when it failed", self.workshop, policy="retain_on_failure")
        hasty = self._environment("drains for 4 s", self.workshop, drain_seconds=4)
        shaky = self._environment("shaky", self.flaky)

        for number in range(1, 7):
            self._works(self._part(f"ends cleanly ({number})", once))
        for number in range(1, 3):
            self._works(self._part(f"is kept for reuse ({number})", kept))
        self._works(self._part("failed, and is retained", precious, outcome="failed"))
        self._never_returns(self._part("has a command that never returns", hasty))
        self._daemonises(self._part("left a daemonised child that ignores TERM", once))
        stopped = self._part("is stopped by its user in the middle", hasty, stops=True)
        self._never_returns(stopped)
        self._works(self._part("refuses to stop at first", kept))
        for number in range(1, 6):
            self._works(self._part(f"is at the flaky account ({number})", shaky))
        if self.containers is not None:
            boxes = self._environment("boxes", self.containers, config={"image": self.image})
            for number in range(1, 4):
                self._works(self._part(f"is a container ({number})", boxes))
            self._daemonises(self._part("is a container with a daemonised child", boxes))
        say(f"{len(self.active())} leases are active, with real work in their sandboxes.")

    def rent(self, say: Callable[[str], None]) -> None:
        """Acquire at the services: once more what was stopped, and one whose reply is lost and asked for again."""
        (earlier,) = (part for part in self.parts if part.over)
        released = Lease.objects.filter(pk=earlier.lease.pk, state=Lease.State.RELEASED)
        wait_until("the receipt of the sandbox that is used again", released.exists, seconds=60)
        successor = self._part("is at Daytona, with the sandbox and the files of an earlier run", self._reused)
        found = leases.bridge(successor.lease.pk).execute(["cat", "work.txt"]).stdout.count(b"\n")
        if successor.lease.resource_id != earlier.lease.resource_id or found != LINES:
            raise RuntimeError("the next run did not get the stopped sandbox with its files")
        say(f"A run at {self.services.daytona.label} got the stopped sandbox of an earlier one, with its files.")

        self.services.e2b.will(Kind.LOST)
        kept = self._environment("at E2B, kept", self.e2b, policy="reuse_by_environment")
        self._works(self._part("is at E2B, where one reply was lost", kept))
        say(f"A create at {self.services.e2b.label} loses its reply once: asked again, it answers the same sandbox.")

    def active(self) -> list[Part]:
        return [part for part in self.parts if not part.over]

    def run(self) -> Run:
        return Run.objects.create(company=self.company, issue=self.issue, status=Run.Status.RUNNING)

    def tidy(self) -> None:
        """Destroy whatever sandbox is left: a demo that was interrupted leaves nothing running either.

        Found at the providers and not in the database, so that one whose creation was interrupted is among them.
        """
        ours = {MARK_INSTALLATION: str(Installation.current().mark)}
        for account in filter(None, (self.workshop, self.flaky, self.containers, self.e2b, self.daytona)):
            try:
                provider = open_provider(account.provider, account.endpoint, self._secrets.get(account))
                for left in provider.list(ours, within=bounds.FIND).resources:
                    provider.delete(left.resource_id, within=bounds.DELETE)
            except ProviderError as error:
                sys.stderr.write(f"account {account.name} could not be cleaned up: {error}\n")

    def part(self, title: str) -> Part:
        return next(part for part in self.parts if part.title.startswith(title))

    def _account(self, name: str, directory: Path) -> ProviderAccount:
        return ProviderAccount.objects.create(
            company=self.company, name=name, provider="local", endpoint={"state_dir": str(directory)}
        )

    def _rented(self, service: Service) -> ProviderAccount:
        """Make an account at a service, with the credential that it is called with."""
        credential = Credential.objects.create(
            company=self.company, name=f"key of {service.label}", reference=service.reference
        )
        account = ProviderAccount(
            company=self.company,
            name=f"account at {service.label}",
            provider=service.server.key,
            endpoint=service.endpoint,
            credential=credential,
        )
        account.full_clean()
        account.save()
        self._secrets[account] = service.key
        return account

    def _environment(self, name: str, account: ProviderAccount, **values: Any) -> Environment:
        environment = Environment(company=self.company, name=name, account=account, **values)
        environment.full_clean()
        environment.save()
        return environment

    def _part(self, title: str, environment: Environment, **values: Any) -> Part:
        run = self.run()
        lease = leases.acquire(environment.pk, company_id=self.company.pk, run_id=run.pk, actor="demo")
        part = Part(title, lease, run, **values)
        self.parts.append(part)
        return part

    def _works(self, part: Part) -> None:
        done = leases.bridge(part.lease.pk).execute(["sh", "-c", WORK])
        if done.exit_code != 0 or int(done.stdout or 0) != LINES:
            raise RuntimeError(f"the work of {part.title!r} came out wrong: {done}")

    def _daemonises(self, part: Part) -> None:
        done = leases.bridge(part.lease.pk).execute(["sh", "-c", _DAEMON])
        if done.exit_code != 0:
            raise RuntimeError(f"the child of {part.title!r} did not start: {done}")

    def _never_returns(self, part: Part) -> None:
        """Start a command that only the end of its sandbox ends, and go on when it is in flight."""

        def work() -> None:
            try:
                leases.bridge(part.lease.pk).execute(["sh", "-c", "while :; do sleep 1; done"], timeout=3600)
            except LeaseError:
                pass  # its sandbox was taken away from under it, as it should be
            finally:
                connection.close()

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        part.threads.append(thread)
