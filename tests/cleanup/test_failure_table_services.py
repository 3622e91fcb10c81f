"""The failure table of a recovery of files at real containers, at processes of this host, and at Daytona over HTTP.

Every row to which each can really be brought: replies are lost by a relay that breaks the connection, disks are small
ones that are full, and a sandbox that does not come to run is one whose first process ends. What runs in the end is
asked of the engine or the operating system.
"""

from __future__ import annotations

import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from pytest_django import Settings

import leases
from leases import bounds
from leases.models import Credential, Environment, Lease, Receipt, Run
from providers.daytona.rehearsal import Fault, Kind, rehearsing
from providers.daytona.rehearsal import Rehearsal as Daytona
from providers.registry import AnyProvider, open_provider
from tests import disk_full, factories
from tests import failure_table as table
from tests.cleanup.test_failure_table import no_directory
from tests.disk_full import SmallDisk, small_disk, small_engine
from tests.engine import IMAGE, PrivateEngine, available, private_engine
from tests.failed_task import FailedTask
from tests.failure_table import ATTEMPTS, Attempt, seen
from tests.providers.local_harness import left_below
from tests.providers.rehearsed import KEY
from tests.scenarios.steps import falls_due, sweep
from tests.scenarios.test_recovery import owed

pytestmark = pytest.mark.django_db(transaction=True)

needs_engine = pytest.mark.skipif(available() is not None, reason=f"no engine: {available()}")
needs_small_engine = pytest.mark.skipif(disk_full.no_engine() is not None, reason=f"no disk: {disk_full.no_engine()}")
needs_mount = pytest.mark.skipif(disk_full.unavailable() is not None, reason=f"no disk: {disk_full.unavailable()}")

WITHIN = 30.0


@pytest.fixture(autouse=True)
def starts_are_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes a minute until it is given up takes a moment; long enough for what really starts, or ends at once."""
    monkeypatch.setattr(import_module("cleanup.handlers.recover_workspace"), "_PAUSES", (0.5, 0.05, 0.1, 0.2, 0.2))
    monkeypatch.setattr(bounds, "RESUME", 1.0)


class Place(ABC):
    """An account at a service, and the stopped sandbox of a failed run in it, with a file. Brings rows about."""

    provider_key: str
    policy = "retain_on_failure"

    def __init__(self, settings: Settings, directory: Path, **how: Any) -> None:
        self.settings, self.directory = settings, directory
        self.company = factories.company()
        self.account = factories.account(
            self.company, provider=self.provider_key, endpoint=self.endpoint(), attested_identity="", **how
        )
        self.environment: Environment = factories.environment(self.account, config=self.config(), policy=self.policy)
        self.run: Run = factories.run(self.company)
        self.lease: Lease = leases.acquire(self.environment.pk, company_id=self.company.pk, run_id=self.run.pk)
        leases.bridge(self.lease.pk).execute(["sh", "-c", self.work()])
        leases.release(self.lease.pk, outcome="failed")
        self.sweep()
        self.lease.refresh_from_db()
        assert self.lease.state == "retained"
        self.first: Receipt = self.lease.receipts.get()

    @abstractmethod
    def endpoint(self) -> dict[str, Any]: ...

    @abstractmethod
    def config(self) -> dict[str, Any]: ...

    @abstractmethod
    def work(self) -> str:
        """The script of the run, which writes the files."""

    @abstractmethod
    def runs(self) -> bool:
        """Whether the sandbox runs, by somebody else's word than the adapter's."""

    @abstractmethod
    def restart(self, how: str) -> None: ...

    def saving(self, how: str) -> None:
        match how:
            case table.NO_WORKSPACE:
                Lease.objects.filter(pk=self.lease.pk).update(config={**self.lease.config, "workspace": "not-there"})
            case table.TOO_LARGE:
                self.settings.PAPERCLIP_ARCHIVE_MAX_BYTES = 1000
            case table.STORAGE:
                no_directory(self.settings, self.directory)
            case _:
                assert how in (table.WHOLE, table.NONE)

    def stop(self, how: str) -> None:
        assert how in (table.WORKS, table.NONE)

    def sweep(self) -> None:
        sweep(self)  # type: ignore[arg-type] - it asks for no more than an account

    def brings_about(self, row: Attempt) -> None:
        """Let a user go on from the run, with this behaviour of the service, and compare."""
        task = FailedTask(self, leased=False)  # type: ignore[arg-type] - likewise
        self.restart(row.restart)
        self.saving(row.saving)
        self.stop(row.stop)
        asked = task.commented()
        self.sweep()
        if row.stop == table.STOP_LOST and self.lease.obligations.filter(kind="teardown", closed_at=None).exists():
            falls_due(owed(self.lease, "teardown"))
            self.sweep()
        assert seen(self.lease, self.first, asked) == row.leaves
        assert self.runs() == row.leaves.lease.startswith("pending")


def rows(restarts: set[str], savings: set[str], stops: set[str], *, but: set[tuple[str, str]] = frozenset()) -> Any:  # type: ignore[assignment]
    """The rows of the table that a service can be brought to."""
    chosen = [
        row
        for row in ATTEMPTS
        if row.restart in restarts
        and row.saving in savings | {table.NONE}
        and row.stop in stops | {table.NONE}
        and (row.restart, row.stop) not in but
    ]
    return pytest.mark.parametrize("row", chosen, ids=str)


# Containers


class Breaking:
    """A relay to an engine's socket that breaks the connection of the calls that a test names."""

    def __init__(self, engine: PrivateEngine) -> None:
        self._engine = engine
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.unsent: set[bytes] = set()
        """What of a request's first line breaks it before it is passed on."""
        self.unanswered: set[bytes] = set()
        """And after it was done, before the answer is."""
        self.dead = threading.Event()
        self.dies_at: bytes | None = None
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.dead.is_set():
                client.close()
                continue
            server = socket.socket(socket.AF_UNIX)
            server.connect(str(self._engine.socket))
            threading.Thread(target=self._pass_requests, args=(client, server), daemon=True).start()
            threading.Thread(target=self._pass, args=(server, client), daemon=True).start()

    def _pass_requests(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while data := client.recv(65536):
                line = data.partition(b"\r\n")[0]
                if self.dies_at is not None and self.dies_at in line:
                    self.dead.set()
                if self.dead.is_set() or any(text in line for text in self.unsent):
                    self._end(client, server)
                    return
                if any(text in line for text in self.unanswered):
                    # A connection of its own, so that the answer reaches nobody.
                    with socket.socket(socket.AF_UNIX) as own:
                        own.connect(str(self._engine.socket))
                        own.sendall(data)
                        own.recv(65536)
                    self._end(client, server)
                    return
                server.sendall(data)
        self._end(client, server)

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        self._end(source, sink)

    @staticmethod
    def _end(*links: socket.socket) -> None:
        for link in links:
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
            link.close()


class Containers(Place):
    provider_key = "docker"

    def __init__(self, engine: PrivateEngine, settings: Settings, directory: Path, *, exits: bool = False) -> None:
        self.engine, self.relay, self.exits = engine, Breaking(engine), exits
        super().__init__(settings, directory)

    def endpoint(self) -> dict[str, Any]:
        return {"base_url": f"tcp://127.0.0.1:{self.relay.port}"}

    def config(self) -> dict[str, Any]:
        once = "test -e /begun && exit 3; touch /begun; trap 'exit 0' TERM; while :; do sleep 100 & wait $!; done"
        command = {"command": ["sh", "-c", once]} if self.exits else {}
        return {"image": IMAGE, "workspace": "/work", **command}

    def work(self) -> str:
        return "mkdir -p /work && echo written > /work/file"

    def runs(self) -> bool:
        with self.engine.client() as client:
            return any(one["Id"] == self.lease.resource_id for one in client.containers())

    def restart(self, how: str) -> None:
        match how:
            case table.REFUSED:
                self.behind(lambda client: client.start(self.lease.resource_id))
                leases_command = ["sh", "-c", "rm /bin/sh /bin/busybox"]
                self.behind(
                    lambda client: client.exec_start(client.exec_create(self.lease.resource_id, leases_command)["Id"])
                )
                self.behind(lambda client: client.stop(self.lease.resource_id, timeout=0))
            case table.LOST_DONE:
                self.relay.unanswered.add(b"/start")
            case table.LOST:
                self.relay.unsent.add(b"/start")
            case table.RUNS_ALREADY:
                self.behind(lambda client: client.start(self.lease.resource_id))
            case table.GONE_BEFORE:
                self.behind(lambda client: client.remove_container(self.lease.resource_id, force=True))
            case table.EXITS:
                assert self.exits
            case _:
                assert how == table.RUNS

    def behind(self, work: Callable[[Any], Any]) -> None:
        with self.engine.client() as client:
            work(client)

    def saving(self, how: str) -> None:
        match how:
            case table.NO_WORKSPACE:
                Lease.objects.filter(pk=self.lease.pk).update(config={**self.lease.config, "workspace": "/not-there"})
            case table.BREAKS_OFF:
                self.relay.unsent.add(b"/archive?")
            case _:
                super().saving(how)

    def stop(self, how: str) -> None:
        match how:
            case table.STOP_LOST:
                self.relay.unanswered.add(b"/stop")
            case table.STOPPED_ALL_THE_SAME:
                self.relay.unsent.add(b"/stop")
            case table.NOT_SEEN:
                self.relay.dies_at = b"/stop"
            case _:
                super().stop(how)

    def close(self) -> None:
        self.relay.close()
        with self.engine.client() as client, suppress(Exception):
            client.remove_container(self.lease.resource_id, force=True)


@pytest.fixture(scope="module")
def engine() -> Iterator[PrivateEngine]:
    with private_engine() as made:
        yield made


@needs_engine
@rows(
    {table.RUNS, table.LOST_DONE, table.LOST, table.REFUSED, table.RUNS_ALREADY, table.GONE_BEFORE, table.EXITS},
    {table.WHOLE, table.NO_WORKSPACE, table.TOO_LARGE, table.STORAGE, table.BREAKS_OFF},
    {table.WORKS, table.STOP_LOST, table.STOPPED_ALL_THE_SAME, table.NOT_SEEN},
)
def test_a_real_container_leaves_what_the_table_says(
    engine: PrivateEngine, settings: Settings, tmp_path: Path, row: Attempt
) -> None:
    place = Containers(engine, settings, tmp_path, exits=row.restart == table.EXITS)
    try:
        place.brings_about(row)
    finally:
        place.close()


@needs_small_engine
@rows({table.DISK_FULL}, set(), {table.WORKS, table.STOPPED_ALL_THE_SAME, table.NOT_SEEN})
def test_a_container_on_a_disk_that_is_full_leaves_what_the_table_says(
    settings: Settings, tmp_path: Path, row: Attempt
) -> None:
    with small_engine() as (private, disk):
        place = OnSmallDisk(private, settings, tmp_path)
        place.disk = disk
        try:
            place.brings_about(row)
            disk.make_room()
        finally:
            place.close()


class OnSmallDisk(Containers):
    disk: SmallDisk

    def restart(self, how: str) -> None:
        assert how == table.DISK_FULL
        self.disk.fill()


# Processes of this host


class Processes(Place):
    provider_key = "local"

    def __init__(self, base: Path, settings: Settings, directory: Path) -> None:
        self.base = base
        super().__init__(settings, directory)

    def endpoint(self) -> dict[str, Any]:
        return {"state_dir": str(self.base / "state")}

    def config(self) -> dict[str, Any]:
        self.command = self.directory / "command"
        self.command.write_text("#!/bin/sh\nexec sleep 1000\n")
        self.command.chmod(0o700)
        return {"command": [str(self.command)]}

    def work(self) -> str:
        return "echo written > file"

    @property
    def provider(self) -> AnyProvider:
        return open_provider("local", self.endpoint())

    def runs(self) -> bool:
        return bool(left_below(self.base))

    def restart(self, how: str) -> None:
        match how:
            case table.REFUSED:
                self.command.unlink()
            case table.RUNS_ALREADY:
                self.provider.start(self.lease.resource_id, within=WITHIN)
            case table.GONE_BEFORE:
                self.provider.delete(self.lease.resource_id, within=WITHIN)
            case _:
                assert how == table.RUNS

    def close(self) -> None:
        with suppress(Exception):
            self.provider.delete(self.lease.resource_id, within=WITHIN)
        assert not left_below(self.base)


@rows(
    {table.RUNS, table.REFUSED, table.RUNS_ALREADY, table.GONE_BEFORE},
    {table.WHOLE, table.NO_WORKSPACE, table.TOO_LARGE, table.STORAGE},
    {table.WORKS},
)
def test_a_process_leaves_what_the_table_says(settings: Settings, tmp_path: Path, row: Attempt) -> None:
    place = Processes(tmp_path, settings, tmp_path)
    try:
        place.brings_about(row)
    finally:
        place.close()


@needs_mount
@rows({table.DISK_FULL}, set(), {table.WORKS})
def test_a_process_on_a_disk_that_is_full_leaves_what_the_table_says(
    settings: Settings, tmp_path: Path, row: Attempt
) -> None:
    with small_disk(tmp_path / "disk", megabytes=4) as disk:
        place = Processes(disk.place, settings, tmp_path)
        try:
            place.restart = lambda _: disk.fill()  # type: ignore[method-assign]
            place.brings_about(row)
            disk.make_room()
        finally:
            place.close()


# Daytona


class AtDaytona(Place):
    provider_key = "daytona"

    def __init__(self, server: Daytona, settings: Settings, directory: Path) -> None:
        self.server = server
        key = directory / "key"
        key.write_text(KEY)
        company = factories.company()
        self.credential = Credential.objects.create(company=company, name="key", reference=f"file:{key}")
        with self._of(company):
            super().__init__(settings, directory, credential=self.credential)

    @contextmanager
    def _of(self, company: Any) -> Iterator[None]:
        original = factories.company
        factories.company = lambda **_: company  # the credential is the company's
        try:
            yield
        finally:
            factories.company = original

    def endpoint(self) -> dict[str, Any]:
        return {"url": self.server.url}

    def config(self) -> dict[str, Any]:
        return {"lifetime_seconds": 3600}

    def work(self) -> str:
        return "echo written > file"

    def runs(self) -> bool:
        box = self.server.world.boxes[self.lease.resource_id]
        return box.state == "started"

    def restart(self, how: str) -> None:
        self.comes_up = how not in (table.REFUSED, table.DISK_FULL, table.LOST)
        fault = {
            table.REFUSED: Fault("start", Kind.ANSWER, status=400, message="Sandbox is not in valid state"),
            table.DISK_FULL: Fault("start", Kind.ANSWER, status=400, message="no space left on device"),
            table.LOST_DONE: Fault("start", Kind.LOST),
            table.LOST: Fault("start", Kind.RESET),
            table.STARTING: Fault("start", Kind.STUCK),
            table.ERROR: Fault("start", Kind.ERROR),
            table.ERROR_FULL: Fault("start", Kind.DISK_FULL),
        }.get(how)
        if fault is not None:
            self.server.will(fault)
        elif how == table.RUNS_ALREADY:
            open_provider("daytona", self.endpoint(), KEY).start(self.lease.resource_id, within=WITHIN)
        elif how == table.FULL_BEFORE:
            self.server.world.fail(self.lease.resource_id, reason="no space left on device")
        else:
            assert how == table.RUNS

    def stop(self, how: str) -> None:
        match how:
            case table.STOP_LOST:
                self.server.will(Fault("stop", Kind.LOST))
            case table.NOT_SEEN:
                # What is stopped already is not asked to stop: then the look before that is not answered.
                last, answer = ("/stop" if self.comes_up else "/start"), self.server.answer

                def answers_no_more(method: str, target: str, headers: Any, body: bytes) -> Any:
                    if method == "POST" and target.endswith(last):
                        self.server.will(Fault("get", Kind.ANSWER, status=500, times=1000))
                    return answer(method, target, headers, body)

                self.server.answer = answers_no_more  # type: ignore[method-assign]
                if self.comes_up:
                    self.server.will(Fault("stop", Kind.ANSWER, status=400, message="rehearsed", times=1000))
            case _:
                super().stop(how)


@pytest.fixture
def server() -> Iterator[Daytona]:
    with rehearsing(transition=0.0) as running:
        running.world.add_key(KEY)
        yield running


@rows(
    {
        table.RUNS,
        table.REFUSED,
        table.DISK_FULL,
        table.LOST_DONE,
        table.LOST,
        table.STARTING,
        table.ERROR,
        table.ERROR_FULL,
        table.RUNS_ALREADY,
        table.FULL_BEFORE,
    },
    {table.WHOLE, table.NO_WORKSPACE, table.TOO_LARGE, table.STORAGE},
    {table.WORKS, table.STOP_LOST, table.NOT_SEEN},
    but={
        (restart, stop)
        for restart in (table.STARTING, table.ERROR, table.ERROR_FULL)
        for stop in ("works", "reply lost, done")
    },
)
def test_daytona_leaves_what_the_table_says(server: Daytona, settings: Settings, tmp_path: Path, row: Attempt) -> None:
    AtDaytona(server, settings, tmp_path).brings_about(row)
