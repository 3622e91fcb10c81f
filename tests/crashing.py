"""Acquires that are killed in processes of their own, and recoveries by fresh ones: the test's side of it.

A `Scene` is one environment at a provider with what was made of it. What its sandboxes did is asked of the provider and
of the operating system: the diary of all calls, and a file to which each start of a sandbox's main command adds a line.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from django.db import connection
from django.db.models import QuerySet

import leases
from cleanup.claims import LANE
from cleanup.engine import Engine
from leases import proof, startup
from leases.models import (
    ActivityEntry,
    Credential,
    Environment,
    Installation,
    Lease,
    Obligation,
    Operation,
    Receipt,
    Run,
)
from leases.models.environments import Policy
from providers.daytona.rehearsal import Rehearsal
from providers.registry import AnyProvider, open_provider
from tests import factories
from tests.beats import CHECKOUT, database_url, eventually
from tests.providers.local_harness import left_below
from tests.providers.rehearsed import KEY, Clock
from tests.tracing import Point

CALL_BOUNDS_PASS = 400.0
"""Seconds after which nobody waits any more for a caller that was not heard of, whatever it was about to do."""
CREATION_WINDOW_PASSES = 800.0


class Processes:
    """Forks processes that acquire or recover: one order at a time, begun and then ended."""

    def __init__(self) -> None:
        self._parent = subprocess.Popen(
            [sys.executable, "-m", "tests.crash_process"],
            cwd=CHECKOUT,
            env={**os.environ, "DATABASE_URL": database_url()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def begin(self, order: dict[str, Any]) -> None:
        assert self._parent.stdin is not None
        self._parent.stdin.write(json.dumps(order, default=str).encode() + b"\n")
        self._parent.stdin.flush()

    def end(self) -> list[int]:
        """Wait for the processes of the order, and return their exit codes."""
        assert self._parent.stdout is not None
        line = self._parent.stdout.readline()
        assert line, "the parent of the processes ended"
        codes: list[int] = json.loads(line)
        return codes

    def close(self) -> None:
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        self._parent.stdin.close()
        self._parent.wait(60.0)
        self._parent.stdout.close()


@contextmanager
def processes() -> Iterator[Processes]:
    """Serve a module's tests; their database has to be there already."""
    made = Processes()
    try:
        yield made
    finally:
        made.close()


class Scene:
    """An environment of the provider `local` in a directory of its own, a run, and a request with a key."""

    KEY = "the request"

    def __init__(self, base: Path, processes: Processes, *, policy: str = Policy.EPHEMERAL) -> None:
        self.base, self.processes = base, processes
        Installation.current()  # a row that is there after the first acquire of all
        self.account = self.make_account()
        self.environment: Environment = factories.environment(self.account, policy=policy, config=self.config())
        self.run: Run = factories.run(self.account.company)
        self.setup: list[list[str]] = []
        self._orders = 0

    # What is different at another provider.

    def make_account(self) -> Any:
        return factories.account(endpoint={"state_dir": str(self.base / "state")}, attested_identity="")

    def config(self) -> dict[str, Any]:
        return {"command": ["sh", "-c", f"echo started >> {self.base}/starts; exec sleep 1000"]}

    @property
    def provider(self) -> AnyProvider:
        return open_provider("local", {"state_dir": str(self.base / "state")})

    def executing(self) -> list[str]:
        """What runs in sandboxes of this scene, by the word of the operating system."""
        return left_below(self.base)

    def starts(self) -> int:
        """How often a sandbox of this scene was started, by its own word."""
        file = self.base / "starts"
        return len(file.read_text().splitlines()) if file.exists() else 0

    # What is done.

    def acquire(self, dies_at: Point | None = None, **how: Any) -> Lease | None:
        """Acquire in a process that dies at this point. Returns the lease that its caller was told of, if it was."""
        request = {
            "company_id": self.account.company_id,
            "run_id": self.run.pk,
            "request_key": self.KEY,
            "setup": self.setup,
            **how,
        }
        code = self._order(1, {"do": "acquire", "environment": self.environment.pk, "how": request, "dies_at": dies_at})
        told = self._output(0, "out").strip()
        assert code == [-signal.SIGKILL if dies_at else 0], (code, self._output(0, "err"))
        return Lease.objects.get(pk=told) if told else None

    def acquire_here(self, run: Run | None = None, **how: Any) -> Lease:
        how.setdefault("request_key", self.KEY)
        return leases.acquire(
            self.environment.pk, company_id=self.account.company_id, run_id=(run or self.run).pk, **how
        )

    def work(self, dies_at: Point | None = None, **faults: tuple[str, bool]) -> None:
        """Let a process do all that is due, with these faults of the provider, until it dies at this point."""
        order = {"do": "work", "account": self.account.pk, "faults": faults, "dies_at": dies_at}
        code = self._order(1, order)
        assert code == [-signal.SIGKILL if dies_at else 0], (code, self._output(0, "err"))

    def recover(self, count: int = 3, **how: Any) -> None:
        """Let fresh processes, at the same time, do all that is due."""
        codes = self._order(count, {"do": "recover", "account": self.account.pk, **how})
        assert codes == [0] * count, [self._output(number, "err") for number in range(count)]

    def recover_together(self, at: Point, count: int = 3) -> None:
        """Let fresh processes recover the same: each takes the row of the one before, and all go on from this point."""
        gate = self.base / "gate"
        self._begin(count, {"do": "recover", "account": self.account.pk, "gate": {"at": at, "file": gate}})
        for arrived in range(1, count + 1):
            eventually(lambda number=arrived: self._arrivals(at) >= number, f"{arrived} are there")  # type: ignore[misc]
            if arrived < count:
                self.protection_ends()
        gate.touch()
        codes = self.processes.end()
        assert codes == [0] * count, [self._output(number, "err") for number in range(count)]

    def sweep(self) -> int:
        """Do what is due in this process; return how much it was."""
        done = 0
        while tally := Engine().sweep(self.account.pk).claimed + Engine().sweep(LANE).claimed:
            done += tally
        return done

    def time_passes(self, seconds: float) -> None:
        """Move into the past what is still open: starts and creations, looks, deadlines, and work."""
        with connection.cursor() as cursor:
            for table, column, which in (
                ("operation", "created_at", "state = 'pending'"),
                ("obligation", "due_at", "closed_at IS NULL AND due_at IS NOT NULL"),
                ("obligation", "absent_since", "closed_at IS NULL AND absent_since IS NOT NULL"),
                ("bridgeactivity", "deadline", "ended_at IS NULL"),
            ):
                cursor.execute(
                    f"UPDATE leases_{table} SET {column} = {column} - %s * interval '1 s' WHERE {which}",  # noqa: S608 - ours
                    [seconds],
                )

    def protection_ends(self) -> None:
        """Whoever holds a row has held it for too long: the next one may have it."""
        Obligation.objects.filter(attempt_id__isnull=False).update(due_at=factories.at(-1))

    # What is seen.

    def sandboxes(self) -> list[str]:
        return [resource.resource_id for resource in self.provider.list({}, within=30.0).resources]

    def diary(self, role: str | None = None) -> list[tuple[str, str]]:
        """The points that were reached, oldest first."""
        file = self.base / "diary"
        lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return [(*line["point"],) for line in lines if role in (None, line["role"])]  # type: ignore[misc]

    def _arrivals(self, point: Point) -> int:
        return sum(seen == point for seen in self.diary("recover"))

    def operation(self, kind: str) -> Operation:
        return Operation.objects.get(kind=kind, request_key=self.KEY)

    def audited(self, *actions: str) -> int:
        return ActivityEntry.objects.filter(action__in=actions).count()

    def close(self) -> None:
        for resource_id in self.sandboxes():
            self.provider.delete(resource_id, within=30.0)

    def _order(self, count: int, order: dict[str, Any]) -> list[int]:
        self._begin(count, order)
        return self.processes.end()

    def _begin(self, count: int, order: dict[str, Any]) -> None:
        self._orders += 1
        self.processes.begin(
            {"count": count, "diary": self.base / "diary", "output": self.base / f"order-{self._orders}", **order}
        )

    def _output(self, number: int, name: str) -> str:
        return (self.base / f"order-{self._orders}-{number}.{name}").read_text()


# What must be so at the end, whatever was killed.


def owed() -> QuerySet[Obligation]:
    """What is owed but the end of what is kept, which comes in its time."""
    return Obligation.objects.filter(closed_at__isnull=True).exclude(kind=Obligation.Kind.DISPOSE)


def started(scene: Scene, times: int) -> None:
    """Wait until the sandboxes have told of so many starts."""
    eventually(lambda: scene.starts() >= times, f"the sandbox has started {times} times")
    assert scene.starts() == times


def nothing_is_left(scene: Scene, *, starts: int, sandboxes: int = 0) -> None:
    """Nothing runs, nothing is owed, and nobody but the one that was killed ever created or started anything."""
    assert scene.executing() == []
    assert len(scene.sandboxes()) == sandboxes
    assert scene.starts() == starts
    assert not owed().exists()
    assert not startup.is_unsettled(scene.run.pk)
    assert not {step.partition(" (")[0] for _, step in scene.diary("recover")} & BRINGS_FORTH


BRINGS_FORTH = {"call create", "call start", "launch of its processes", "POST sandbox", "POST start"}
"""Steps that no recovery may take."""


def proven(lease: Lease, *evidence: str) -> None:
    """The receipts of a lease, oldest first, the last of which proves its epoch."""
    lease.refresh_from_db()
    assert list(Receipt.objects.filter(lease=lease).order_by("pk").values_list("evidence", flat=True)) == [*evidence]
    assert proof.is_proven_ended(lease)


def one_owner() -> None:
    """Exactly one attempt recovered something, and it brought forth exactly one owner."""
    assert ActivityEntry.objects.filter(action="operation.recovered").count() == 1
    assert ActivityEntry.objects.filter(action__in=["lease.owned_for_teardown", "lease.reopened"]).count() == 1


class DaytonaScene(Scene):
    """The same at a rehearsed Daytona, over HTTP. Its transitions take time by a clock that the test owns."""

    def __init__(
        self, base: Path, processes: Processes, server: Rehearsal, clock: Clock, *, policy: str = Policy.EPHEMERAL
    ) -> None:
        self.server, self.clock = server, clock
        super().__init__(base, processes, policy=policy)

    def make_account(self) -> Any:
        key = self.base / "key"
        key.write_text(KEY)
        self.server.world.add_key(KEY)
        company = factories.company()
        credential = Credential.objects.create(company=company, name="key", reference=f"file:{key}")
        return factories.account(
            company, provider="daytona", endpoint={"url": self.server.url}, credential=credential, attested_identity=""
        )

    def config(self) -> dict[str, Any]:
        return {"lifetime_seconds": 3600}

    @property
    def provider(self) -> AnyProvider:
        return open_provider("daytona", {"url": self.server.url}, KEY)

    def executing(self) -> list[str]:
        return [str(pid) for box in list(self.server.world.boxes) for pid in self.server.world.executing(box)]

    def starts(self) -> int:
        """How often the service was asked for a sandbox, or for the start of one."""
        return sum(call in ("create", "start", "recover") for call, _ in self.server.asked)

    def comes_to_rest(self) -> None:
        """Let the service finish what it began, and recover, until nothing is owed any more."""
        for _ in range(6):
            self.clock.now += 60.0
            self.time_passes(CALL_BOUNDS_PASS)
            self.recover(1)
            if not owed().exists():
                return
        raise AssertionError([*owed().values()])
