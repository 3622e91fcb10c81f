"""The rehearsed service behind its HTTP face: accounts, keys, sandboxes, and what becomes of them over time.

Time is a clock that is handed in. Nothing runs in the background: what is due happens when somebody looks (`settle`),
so a test that owns the clock owns every transition.

With a file, the world is written to it after every change and read back at the next start; what runs in the sandboxes
is found again by its mark where this process was killed. A clean end kills what runs and keeps the files.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from providers.rehearsing.faults import Script
from providers.rehearsing.machine import Machine


class Refused(Exception):
    """A request that is answered with an error. `details` are further keys of the answer, where a service has some."""

    def __init__(self, status: int, message: str, **details: object) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.details = details


@dataclass
class Outcome:
    """How a transition is to end instead of well: in an error, in an error and hidden, or never."""

    fails: bool = False
    recoverable: bool = False
    hidden: bool = False
    stuck: bool = False
    reason: str = ""


NOT_KEPT = {"kept": False}
"""Metadata of a field of a `Box` that is not written to the file."""


@dataclass
class Box:
    """One sandbox. `path` holds the states still to come, each with the time at which it is reached."""

    id: str
    account: str
    body: dict[str, Any]
    """What was asked for at its creation."""
    machine: Machine = field(metadata=NOT_KEPT)
    created: float = 0.0
    updated: float = 0.0
    state: str = ""
    path: list[tuple[float, str]] = field(default_factory=list)
    outcome: Outcome = field(default_factory=Outcome)

    @property
    def pending(self) -> bool:
        return bool(self.path) or self.outcome.stuck


B = TypeVar("B", bound=Box)


class World(ABC, Generic[B]):
    """All that a service remembers. Every public method is safe to call from several threads."""

    box: ClassVar[type[Box]]
    """The class of its sandboxes."""

    def __init__(
        self,
        root: Path,
        *,
        clock: Callable[[], float] = time.time,
        transition: float = 0.05,
        cache: float = 0.0,
        index_lag: float = 0.0,
        quota: int | None = None,
        state: Path | None = None,
    ) -> None:
        """In seconds: what each state on the way takes, how old a read may be, how far lists are behind.

        `quota` is how many sandboxes an account may have; `state` is the file to keep all of it in.
        """
        self.root = root
        self.clock = clock
        self.transition = transition
        self.cache = cache
        self.index_lag = index_lag
        self.quota = quota
        self.keys: dict[str, str] = {}
        self.script = Script()
        self.lock = threading.RLock()
        self.boxes: dict[str, B] = {}
        self._state = state
        self._written = ""
        if state is not None and state.exists():
            self._load(state)

    # What a service has of its own.

    @abstractmethod
    def enter(self, box: B, state: str) -> None:
        """Put a sandbox into a state, with what that does to its machine."""

    @abstractmethod
    def automatic(self, box: B, now: float) -> None:
        """Begin what the service does to a sandbox by itself: deadlines, idle times."""

    def env(self, body: dict[str, Any]) -> dict[str, str]:
        """Return the variables that a creation asks for."""
        return dict(body.get("env") or {})

    # Accounts.

    def add_key(self, key: str, account: str | None = None) -> str:
        """Let this API key in, for this account or a new one, and return the account's id.

        Giving a key that exists another account is how one finds another account behind the same key.
        """
        with self.lock:
            self.keys[key] = account or str(uuid.uuid4())
            return self.keys[key]

    # Time.

    def settle(self) -> None:
        """Let happen what is due by now."""
        with self.lock:
            now = self.clock()
            for box in list(self.boxes.values()):
                self.automatic(box, now)
                while box.path and box.path[0][0] <= now and not box.outcome.stuck:
                    _, state = box.path.pop(0)
                    self.enter(box, state)

    def go(self, box: B, states: list[str], outcome: Outcome, *, failed: str = "error") -> None:
        """Enter the first state at once and the others in time; the last is `failed` where the outcome is no good."""
        box.outcome = outcome
        if outcome.fails or outcome.hidden:
            states = [*states[:-1], failed]
        now = self.clock()
        box.path = [(now + self.transition * (number + 1), state) for number, state in enumerate(states[1:])]
        self.enter(box, states[0])
        self.settle()

    # What a test does to the world behind the service's back.

    def unstick(self, sandbox: str) -> None:
        """Let a stuck transition go on."""
        with self.lock:
            self.boxes[sandbox].outcome = Outcome()

    def executing(self, sandbox: str) -> list[int]:
        """Return the PIDs of what runs in a sandbox, by the word of the operating system."""
        return self.boxes[sandbox].machine.running()

    # Keeping.

    def save(self) -> None:
        """Write the world to its file, where it has one and something changed."""
        if self._state is None:
            return
        with self.lock:
            kept = {"keys": self.keys, "boxes": [self._dump(box) for box in self.boxes.values()]}
            text = json.dumps(kept)
            if text == self._written:
                return
            aside = self._state.with_name(self._state.name + ".new")
            aside.touch(0o600)  # it holds keys
            aside.write_text(text, encoding="utf-8")
            aside.replace(self._state)
            self._written = text

    def close(self) -> None:
        """End all that runs. The files are removed where the world is not kept in a file."""
        with self.lock:
            for box in self.boxes.values():
                if self._state is None:
                    box.machine.remove()
                else:
                    box.machine.end()
            self.save()

    def _dump(self, box: B) -> dict[str, Any]:
        kept = {item.name: getattr(box, item.name) for item in fields(box) if item.metadata.get("kept", True)}
        return {**kept, "outcome": asdict(box.outcome)}

    def _load(self, state: Path) -> None:
        kept = json.loads(state.read_text(encoding="utf-8"))
        self.keys.update(kept["keys"])
        for item in kept["boxes"]:
            item["outcome"] = Outcome(**item["outcome"])
            item["path"] = [(moment, name) for moment, name in item["path"]]
            machine = Machine(self.root, item["id"], self.env(item["body"]))
            box: Any = self.box(machine=machine, **item)
            self.boxes[box.id] = box


def iso(moment: float | None) -> str | None:
    """Return a moment as services write it."""
    if moment is None:
        return None
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
