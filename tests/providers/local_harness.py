"""The local provider's harness, and the operating system's own word on what its sandboxes do.

Nothing here asks the adapter's code about processes: it would agree with itself.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

from providers.conformance import AnyProvider, Harness
from providers.contract import MARK_INSTALLATION, Resource
from providers.registry import open_provider

WITHIN = 30.0


class LocalHarness(Harness):
    key: ClassVar[str] = "local"
    # `identify`, `find`, `list` read files, `inspect`, `stop` and `delete` ask the kernel: none waits for a server.
    trickled_calls: ClassVar[frozenset[str]] = frozenset({"execute", "start"})
    knows_absolute_paths: ClassVar[bool] = False

    def __init__(self, base: Path) -> None:
        self.base = base
        self.state = base / "state"

    def endpoint_data(self) -> dict[str, Any]:
        return {"state_dir": str(self.state)}

    def config_data(self) -> dict[str, Any]:
        return {"command": [], "env": {"PURPOSE": "conformance"}}

    def executes(self, resource: Resource, tag: str) -> bool:
        return bool(pids_of(tag))

    @contextmanager
    def switchable(self) -> Iterator[tuple[AnyProvider, Callable[[], None]]]:
        provider = self.provider()
        here, there, aside = self.state, self.base / "other", self.base / "aside"
        open_provider("local", {"state_dir": str(there)}).identify(within=WITHIN)

        def switch() -> None:
            here.rename(aside)
            there.rename(here)
            aside.rename(there)

        yield provider, switch

    @contextmanager
    def trickling(self) -> Iterator[tuple[AnyProvider, str]]:
        provider = self.provider()
        resource = provider.create("trickled", {MARK_INSTALLATION: "trickled"}, _config(), within=WITHIN)
        socket_path = self.state / "sandboxes" / "trickled" / "socket"
        closing = threading.Event()
        with socket.socket(socket.AF_UNIX) as listener:
            socket_path.unlink(missing_ok=True)
            directory = os.open(socket_path.parent, os.O_RDONLY)
            listener.bind(f"/proc/self/fd/{directory}/socket")
            os.close(directory)
            listener.listen()
            thread = threading.Thread(target=_trickle, args=(listener, closing))
            thread.start()
            try:
                yield provider, resource.resource.resource_id
            finally:
                closing.set()
                listener.shutdown(socket.SHUT_RDWR)
                thread.join()
                provider.delete(resource.resource.resource_id, within=WITHIN)


def _trickle(listener: socket.socket, closing: threading.Event) -> None:
    with suppress(OSError):
        peer, _ = listener.accept()
        with peer:
            while not closing.wait(1.0):
                peer.sendall(b" ")


def _config(**options: Any) -> Any:
    from providers.local.provider import LocalConfig

    return LocalConfig(**options)


def pids_of(tag: str) -> list[int]:
    """Return the processes, zombies left out, that have this text in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):
                if tag.encode() in (entry / "cmdline").read_bytes() and state_of(int(entry.name)) not in "ZX":
                    found.append(int(entry.name))
    return found


def state_of(pid: int) -> str:
    """Return the state letter of a process, "X" for one that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def left_below(base: Path) -> list[str]:
    """Return what still executes with its working directory or environment below this path."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):
                directory = str((entry / "cwd").readlink())
                if directory.startswith(f"{base}/") or f"HOME={base}/".encode() in (entry / "environ").read_bytes():
                    found.append(f"{entry.name} {(entry / 'cmdline').read_bytes()!r}")
    return found


class Local:
    """A local provider at a directory of its own, with the insides that tests forge and break."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.provider = open_provider("local", {"state_dir": str(state)})

    def config(self, **options: Any) -> Any:
        return _config(**options)

    def create(self, name: str = "box", **options: Any) -> Resource:
        return self.provider.create(name, {MARK_INSTALLATION: "test"}, _config(**options), within=WITHIN).resource

    def directory(self, name: str = "box") -> Path:
        return self.state / "sandboxes" / name

    def record(self, file: str, name: str = "box") -> Any:
        return json.loads((self.directory(name) / file).read_text())

    def forge(self, file: str, value: Any, name: str = "box") -> None:
        (self.directory(name) / file).write_text(json.dumps(value))

    def supervisor(self, name: str = "box") -> int:
        return int(self.record("run.json", name)["pid"])

    def close(self) -> None:
        if not (self.state / "directory-id").exists():
            return
        for resource in self.provider.list({}, within=WITHIN).resources:
            self.provider.delete(resource.resource_id, within=WITHIN)
        shutil.rmtree(self.state, ignore_errors=True)
