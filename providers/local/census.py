"""Which processes belong to a sandbox, and whether that answer is certain.

A walk through `/proc` is not one instant: what forks and exits faster than the walk is never seen. The census therefore
repeats itself, looking only at what is new, until one listing shows nothing new, falls into a time in which the kernel
gave out no PID, and began when no process of the sandbox was alive that could have been in the middle of a fork. Only
then is "none found" an answer. What it could not see into is named as doubt, never left out.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import NamedTuple

from providers.local import processes
from providers.local.processes import ProcessId, Stat

SANDBOX_VARIABLE = "PAPERCLIP_ENV_SANDBOX"
"""The environment variable that everything started in a sandbox inherits; its value is the resource id."""

UNSETTLED = "processes came and went too fast to count them all"
_SETTLING = 2.0
_EXEC_PAUSE = 0.002


class Census(NamedTuple):
    """The processes found executing, without the supervisor. `doubt` says why there may be more, or is empty."""

    members: tuple[Stat, ...]
    doubt: str


def take(
    resource_id: str,
    *,
    supervisor: ProcessId | None,
    known: Iterable[ProcessId],
    since: int,
    until: float,
    strict: bool,
) -> Census:
    """Find every process that carries the mark, was recorded as a descendant, or descends from one of those.

    `since` is the start of the supervisor in clock ticks: what started earlier cannot belong to it. `until` is the
    monotonic time at which to give up being certain. Only a `strict` census can prove that there is none; another one
    is for where the proof comes from elsewhere, and a host on which much is forked does not hold it up.
    """
    walk = _Walk(mark_of(resource_id), {*known, *([supervisor] if supervisor else [])})
    until = min(until, time.monotonic() + _SETTLING)
    members: tuple[Stat, ...] = ()
    settled = False
    while not settled and time.monotonic() < until:
        before = walk.alive(but=supervisor)
        quiet = walk.look_at_what_is_new()
        settled = (quiet or not strict) and walk.strays_have_parents() and not walk.between
        # Looked at once: a member that ends after this one look is still one, because it may just have forked.
        members = walk.alive(but=supervisor)
        if before and not members and strict:
            # What ended during this round may have left a child that its listing did not show yet.
            settled = False
        if walk.between:
            time.sleep(_EXEC_PAUSE)
            walk.look_again()
    return Census(members, _doubt(walk, since, settled=settled))


def _doubt(walk: _Walk, since: int, *, settled: bool) -> str:
    if not settled:
        return UNSETTLED
    mine = os.geteuid()  # root may read all, unless something restricts it: then nothing is too foreign to be ours
    for one in walk.opaque:
        # Another user's process cannot be ours unless it changed users, which the package's docstring names as residue.
        if one.started >= since and (mine == 0 or mine in processes.owners(one.pid)) and processes.is_alive(one.id):
            return f"the environment of process {one.pid} may not be read"
    return ""


class _Walk:
    """What one census has seen so far."""

    def __init__(self, mark: bytes, recorded: set[ProcessId]) -> None:
        self.mark = mark
        self.recorded = recorded
        self.examined: set[int] = set()
        self.seen: dict[int, Stat] = {}
        self.roots: set[int] = set()
        self.between: list[Stat] = []
        """In the middle of an exec or of an exit: they show neither command nor environment."""
        self.opaque: list[Stat] = []

    def alive(self, *, but: ProcessId | None) -> tuple[Stat, ...]:
        found = processes.with_descendants(self.roots, self.seen)
        return tuple(one for pid in sorted(found) if (one := self.seen[pid]).id != but and processes.is_alive(one.id))

    def look_at_what_is_new(self) -> bool:
        """Look at every process not examined yet; True when there was none, and none was born meanwhile."""
        before = processes.last_pid()
        listed = processes.pids()
        quiet = processes.last_pid() == before
        fresh = [pid for pid in listed if pid not in self.examined]
        self.examined.update(fresh)
        for pid in fresh:
            one = processes.stat(pid)
            if one is not None and not one.flags & processes.KERNEL_THREAD:
                self.seen[pid] = one
                self._place(one)
        return quiet and not fresh

    def look_again(self) -> None:
        """Look again at those that could not be placed."""
        before, self.between = self.between, []
        for one in before:
            if processes.is_alive(one.id):
                self._place(one)

    def _place(self, one: Stat) -> None:
        if one.id in self.recorded:
            self.roots.add(one.pid)
            return
        try:
            block = processes.environment(one)
            if not block and processes.executes(one):
                if processes.has_command(one):
                    block = processes.environment(one)  # an exec may have ended between the two looks
                else:
                    self.between.append(one)
        except PermissionError:
            self.opaque.append(one)
            return
        if carries(block, self.mark):
            self.roots.add(one.pid)

    def strays_have_parents(self) -> bool:
        """Ask again whose children those are whose parent ended before it was looked at; False when that is open."""
        complete = True
        for pid in [one.pid for one in self.seen.values() if one.parent and one.parent not in self.seen]:
            again = processes.stat(pid)
            if again is None or again.started != self.seen[pid].started:
                del self.seen[pid]
                self.examined.discard(pid)
            else:
                self.seen[pid] = again
                complete = complete and again.parent in {0, *self.seen}
        return complete


def mark_of(resource_id: str) -> bytes:
    """Return the entry of the environment that marks what belongs to a sandbox."""
    return f"{SANDBOX_VARIABLE}={resource_id}".encode(errors="surrogatepass")


def carries(block: bytes, mark: bytes) -> bool:
    """Say whether an environment block holds exactly this `NAME=value`."""
    return mark in block and mark in block.split(b"\0")
