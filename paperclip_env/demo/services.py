"""The rented services of the demo: rehearsals of E2B and Daytona in this process, on ports of their own.

Answers for what a service says of its sandboxes by itself, whatever the database says. Like a template with a start
command, each runs something of its own in a sandbox as long as that runs, so that one nobody was told of executes too.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from providers.daytona import rehearsal as daytona_rehearsal
from providers.e2b import rehearsal as e2b_rehearsal
from providers.rehearsing import Box, Fault, Kind, Machine, Rehearsal

_TRANSITION = 0.2
"""Seconds that each transition takes there."""
_OWN = "(setsid sh -c 'trap \"\" HUP TERM; while :; do sleep 1; done' >/dev/null 2>&1 &)"


@dataclass(frozen=True, slots=True)
class Service:
    """One service, with the key of an account there. `reference` is how a credential names that key."""

    server: Rehearsal[Any]
    key: str
    reference: str
    endpoint: dict[str, object]

    @property
    def label(self) -> str:
        return self.server.label

    def sandboxes(self) -> list[Box]:
        """Return every sandbox that was ever made there, ended ones too, as they are now."""
        with self.server.world.lock:
            self.server.world.settle()
            return list(self.server.world.boxes.values())

    def executing(self) -> dict[str, list[int]]:
        """Return what executes in which sandbox there, by the word of the operating system."""
        found = {box.id: self.server.world.executing(box.id) for box in self.sandboxes()}
        return {sandbox: processes for sandbox, processes in found.items() if processes}

    def will(self, kind: Kind, *, times: int = 1) -> None:
        """Let the next creations there meet a fault."""
        self.server.will(Fault("create", kind, times=times))


@dataclass(frozen=True, slots=True)
class Services:
    e2b: Service
    daytona: Service

    def __iter__(self) -> Iterator[Service]:
        return iter((self.e2b, self.daytona))


def serve(directory: Path, stack: ExitStack) -> Services:
    """Start both services. Leaving `stack` ends them, and all that runs in their sandboxes.

    Their keys are put into the environment, for this process and those that it starts.
    """
    first = _serve(e2b_rehearsal.Rehearsal(_E2BWorld(directory / "e2b", transition=_TRANSITION)), stack)
    first.endpoint["sandbox_url"] = first.server.url
    second = _serve(daytona_rehearsal.Rehearsal(_DaytonaWorld(directory / "daytona", transition=_TRANSITION)), stack)
    return Services(first, second)


def _serve(server: Rehearsal[Any], stack: ExitStack) -> Service:
    stack.callback(server.close)  # before it starts: an interruption in between finds it
    server.start()
    key, variable = f"demo-{secrets.token_hex(12)}", f"DEMO_{server.key.upper()}_KEY"
    server.world.add_key(key)
    os.environ[variable] = key
    return Service(server, key, f"env:{variable}", {"url": server.url})


class _E2BWorld(e2b_rehearsal.World):
    def enter(self, box: Any, state: str) -> None:
        super().enter(box, state)
        if state == "running":
            _boot(box.machine)


class _DaytonaWorld(daytona_rehearsal.World):
    def enter(self, box: Any, state: str) -> None:
        super().enter(box, state)
        if state == "started":
            _boot(box.machine)


def _boot(machine: Machine) -> None:
    """Start what the template starts by itself. Under the world's lock, so that no end comes in between."""
    if not machine.running():
        machine.execute(_OWN, cwd=None, env={}, timeout=30)
