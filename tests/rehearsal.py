"""A provider to rehearse faults with: it keeps sandboxes in memory and does, call by call, what a test scripted.

It implements the whole contract, so what the engine sees is what a real adapter would answer; the faults that no real
provider produces on demand (a lost reply, a hang, an answer out of order) are raised by hooks.
"""

from __future__ import annotations

import io
import tarfile
import threading
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import ClassVar
from uuid import uuid4

from providers.contract import (
    Busy,
    Capabilities,
    Command,
    Created,
    Ended,
    ErrorKind,
    Execution,
    Gone,
    Listing,
    Provider,
    ProviderError,
    Resource,
    Running,
    Schema,
    Sighting,
    Stopped,
    Unknown,
)


class Endpoint(Schema):
    world: str


class Config(Schema):
    size: int = 1
    workspace: str = "."


@dataclass
class Box:
    """A sandbox. `hidden` ones are not to be found, and may run on all the same; `destroyed` ones are said to be so.

    `files` is what an archive of it holds, by path relative to the directory in which commands start. A `full` one is
    in an error for its full disk.
    """

    resource: Resource
    state: str = "running"  # running, stopped, suspended, busy, unknown, recoverable, full, hidden, destroyed
    files: dict[str, bytes] = field(default_factory=dict)


@dataclass
class World:
    """One engine with its sandboxes, the calls it received, and hooks that run before (or instead of) a call.

    `hooks[name]` is called with the resource id or name and may raise; `after[name]` is called when the call has taken
    effect and may raise too, which loses its reply. Of an archive, that is when all but its last piece was read.
    """

    identity: str = field(default_factory=lambda: f"world-{uuid4()}")
    boxes: dict[str, Box] = field(default_factory=dict)
    calls: list[tuple[str, str]] = field(default_factory=list)
    hooks: dict[str, Callable[[str], None]] = field(default_factory=dict)
    after: dict[str, Callable[[str], None]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, name: str) -> int:
        return sum(1 for call, _ in self.calls if call == name)

    def of(self, resource_id: str) -> Box:
        return self.boxes[resource_id]


WORLDS: dict[str, World] = {}


def new_world() -> str:
    """Make a world and return the key under which endpoints name it."""
    key = uuid4().hex
    WORLDS[key] = World()
    return key


class RehearsalProvider(Provider[Endpoint, Config]):
    key: ClassVar[str] = "rehearsal"
    label: ClassVar[str] = "rehearsal"
    Endpoint = Endpoint
    Config = Config
    capabilities = Capabilities(
        finds_by_name=True,
        keeps_files=True,
        has_deadline=False,
        creation_window=60.0,
        proves_no_allocation=frozenset(ErrorKind),
        archives=True,
    )

    @property
    def world(self) -> World:
        return WORLDS[self.endpoint.world]

    def _call(self, name: str, subject: str) -> World:
        world = self.world
        with world.lock:
            world.calls.append((name, subject))
        if hook := world.hooks.get(name):
            hook(subject)
        return world

    def _done(self, name: str, subject: str) -> None:
        if hook := self.world.after.get(name):
            hook(subject)

    def identify(self, *, within: float) -> str:
        return self._call("identify", "").identity

    def create(self, name: str, marks: Mapping[str, str], config: Config, *, within: float) -> Created:
        world = self._call("create", name)
        if any(box.resource.name == name for box in world.boxes.values()):
            raise ProviderError(ErrorKind.NAME_TAKEN, nothing_allocated=True)
        resource = Resource(uuid4().hex, name, dict(marks))
        world.boxes[resource.resource_id] = Box(resource)
        self._done("create", name)
        return Created(resource)

    def find(self, name: str, marks: Mapping[str, str], *, within: float) -> Resource | None:
        world = self._call("find", name)
        return next((box.resource for box in world.boxes.values() if box.resource.name == name), None)

    def inspect(self, resource_id: str, *, within: float) -> Sighting:
        box = self._call("inspect", resource_id).boxes.get(resource_id)
        self._done("inspect", resource_id)
        match box:
            case None | Box(state="hidden"):
                return Gone()
            case Box(state="destroyed"):
                return Gone(stated=True)
            case Box(state="stopped"):
                return Stopped(box.resource)
            case Box(state="suspended"):
                return Stopped(box.resource, Ended.SUSPENDED)
            case Box(state="busy"):
                return Busy(box.resource, "starting")
            case Box(state="unknown"):
                return Unknown(box.resource, "error")
            case Box(state="full"):
                return Unknown(box.resource, "error: no space left on device", disk_full=True)
            case Box(state="recoverable"):
                return Unknown(box.resource, "error", recoverable=True)
            case _:
                return Running(box.resource)

    def start(self, resource_id: str, *, within: float) -> None:
        self._box("start", resource_id).state = "running"
        self._done("start", resource_id)

    def stop(self, resource_id: str, *, grace: float, within: float) -> None:
        self._box("stop", resource_id).state = "stopped"
        self._done("stop", resource_id)

    def delete(self, resource_id: str, *, within: float) -> None:
        self._call("delete", resource_id).boxes.pop(resource_id, None)
        self._done("delete", resource_id)

    def execute(self, resource_id: str, command: Command, *, within: float) -> Execution:
        self._box("execute", resource_id)
        self._done("execute", resource_id)
        return Execution(0, b"ok")

    def recover(self, resource_id: str, *, within: float) -> None:
        self._box("recover", resource_id).state = "running"
        self._done("recover", resource_id)

    def archive(self, resource_id: str, path: str, *, within: float) -> Generator[bytes, None, None]:
        box = self._box("archive", resource_id)
        if box.state != "running":
            raise ProviderError(ErrorKind.REFUSED, f"the sandbox is {box.state}")
        directory = "" if path == "." else f"{path}/"
        inside = {name.removeprefix(directory): data for name, data in box.files.items() if name.startswith(directory)}
        if directory and not inside:
            raise ProviderError(ErrorKind.MISSING_PATH, f"no directory {path}")
        packed = _tar(inside)
        for start in range(0, len(packed) - PIECE, PIECE):
            yield packed[start : start + PIECE]
        self._done("archive", resource_id)
        yield packed[-PIECE:]

    @classmethod
    def workspace(cls, config: Config) -> str:
        return config.workspace

    def list(self, marks: Mapping[str, str], *, within: float) -> Listing:
        world = self._call("list", "")
        ours = [b.resource for b in world.boxes.values() if marks.items() <= dict(b.resource.marks).items()]
        return Listing(tuple(ours), complete=True)

    def _box(self, name: str, resource_id: str) -> Box:
        box = self._call(name, resource_id).boxes.get(resource_id)
        if box is None:
            raise ProviderError(ErrorKind.NOT_FOUND)
        return box


PIECE = 4096


def _tar(files: Mapping[str, bytes]) -> bytes:
    """Pack files, named as the contract demands. Its length is a whole number of pieces, as tar's records are."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, data in sorted(files.items()):
            member = tarfile.TarInfo(f"./{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    padding = -len(packed.getvalue()) % PIECE
    return packed.getvalue() + bytes(padding)


class LimitedConfig(Config):
    lifetime: float | None = 3600.0


class LimitedProvider(RehearsalProvider):
    """A provider that ends its sandboxes at a deadline, and whose word that one is not to be found counts twice only.

    A stop turns the deadline off, as the contract demands.
    """

    key: ClassVar[str] = "limited"
    label: ClassVar[str] = "rehearsal with deadlines"
    Config = LimitedConfig
    capabilities = replace(RehearsalProvider.capabilities, has_deadline=True, absence_apart=120.0)

    def create(self, name: str, marks: Mapping[str, str], config: Config, *, within: float) -> Created:
        created = super().create(name, marks, config, within=within)
        assert isinstance(config, LimitedConfig)
        return Created(self._until(created.resource.resource_id, config.lifetime))

    def stop(self, resource_id: str, *, grace: float, within: float) -> None:
        if resource_id in self.world.boxes:
            self._until(resource_id, None)
        super().stop(resource_id, grace=grace, within=within)

    def extend(self, resource_id: str, seconds: float, *, within: float) -> datetime:
        self._box("extend", resource_id)
        moved = self._until(resource_id, seconds).expires_at
        self._done("extend", resource_id)
        assert moved is not None
        return moved

    @classmethod
    def lifetime(cls, config: Config) -> float | None:
        assert isinstance(config, LimitedConfig)
        return config.lifetime

    def _until(self, resource_id: str, seconds: float | None) -> Resource:
        box = self.world.of(resource_id)
        ends = datetime.now(UTC) + timedelta(seconds=seconds) if seconds is not None else None
        box.resource = replace(box.resource, expires_at=ends)
        return box.resource
