"""Ending everything that executes in a sandbox, from outside, whatever state its supervisor is in.

Polite first, then by force: freeze what is found until a count finds nothing new, so that nothing forks away from the
kill, then kill it. The supervisor goes last. Left to itself it exits once the kernel says it has no child; where it
does not (stopped, stuck), it is frozen, seen to be childless, and killed, and that is recorded as the same word.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from providers.contract import ErrorKind, ProviderError
from providers.local import census, evidence, processes, records
from providers.local.deadline import Deadline
from providers.local.disk import Sandbox
from providers.local.evidence import Evidence
from providers.local.processes import ProcessId, Stat

_LOOK_EVERY = 0.1
_SUPERVISOR_PATIENCE = 1.0
_FREEZE_ROUNDS = 20
_CHASE = 0.2
_POLITE_SHARE = 0.5
"""At most this share of a call is spent on politeness: one with a long grace and a short bound still ends by force."""


def end(sandbox: Sandbox, *, grace: float, deadline: Deadline) -> None:
    """End all execution in a sandbox that the caller has locked.

    Returns when nothing is seen to execute any more (whether that is certain, `evidence` says). Raises `TIMEOUT` when
    the bound passed first, `REFUSED` for a process that may not be signalled, or not be seen, from here.
    """
    if evidence.run_of(sandbox).hidden:
        raise ProviderError(ErrorKind.REFUSED, "it was started in another PID namespace, and cannot be ended from here")
    found = evidence.gather(sandbox, deadline)
    if found.supervisor is not None:
        # It refuses new commands from now on, and exits after the last of the others.
        _send(found.supervisor, signal.SIGTERM)
        _send(found.supervisor, signal.SIGCONT)
    found = _ask(sandbox, found, grace, deadline)
    alone_since: float | None = None
    while found.executes or found.unsettled:
        deadline.check("ending the sandbox's processes")
        if found.unsettled:
            _chase(sandbox.resource.resource_id, deadline)
        if found.members:
            alone_since = None
            _force(lambda: evidence.gather(sandbox, deadline).members, found.members)
            _wait_for_end([one.id for one in found.members], deadline, _LOOK_EVERY)
        elif found.supervisor is not None:
            alone_since = alone_since or time.monotonic()
            _wait_for_end([found.supervisor], deadline, _LOOK_EVERY)
            if time.monotonic() - alone_since > _SUPERVISOR_PATIENCE:
                _retire(sandbox, found.supervisor, deadline)
        found = evidence.gather(sandbox, deadline)


def end_absent(resource_id: str, deadline: Deadline) -> None:
    """End what carries the mark of a sandbox that is not on disk any more. Raises as `end` does."""
    found = evidence.gather_absent(resource_id, deadline)
    while found.executes or found.unsettled:
        deadline.check("ending the sandbox's processes")
        if found.unsettled:
            _chase(resource_id, deadline)
        _force(lambda: evidence.gather_absent(resource_id, deadline).members, found.members)
        _wait_for_end([one.id for one in found.members], deadline, _LOOK_EVERY)
        found = evidence.gather_absent(resource_id, deadline)


def _ask(sandbox: Sandbox, found: Evidence, grace: float, deadline: Deadline) -> Evidence:
    """Send SIGTERM once to each process, and give them `grace` seconds."""
    polite = Deadline(min(grace, deadline.left * _POLITE_SHARE))
    asked: set[ProcessId] = set()
    while found.executes and not polite.passed:
        for one in found.members:
            if one.id not in asked:
                _send(one.id, signal.SIGTERM)
                asked.add(one.id)
        # The supervisor's exit says it all; without one, any member's does.
        waited = [found.supervisor] if found.supervisor is not None else [one.id for one in found.members]
        _wait_for_end(waited, polite, _LOOK_EVERY)
        found = evidence.gather(sandbox, deadline)
    return found


def _force(look: Callable[[], tuple[Stat, ...]], members: tuple[Stat, ...]) -> None:
    frozen: set[ProcessId] = set()
    for _ in range(_FREEZE_ROUNDS):
        fresh = [one.id for one in members if one.id not in frozen]
        if not fresh:
            break
        for process in fresh:
            _send(process, signal.SIGSTOP)
        frozen.update(fresh)
        members = look()
    for process in frozen:
        _send(process, signal.SIGKILL)


def _chase(resource_id: str, deadline: Deadline) -> None:
    """Kill what forks and exits faster than a census: it is always the process that was born last."""
    mark = census.mark_of(resource_id)
    chase = Deadline(min(_CHASE, deadline.left))
    while not chase.passed:
        newest = processes.stat(processes.last_pid())
        if newest is not None:
            with suppress(PermissionError):
                if census.carries(processes.environment(newest), mark):
                    _send(newest.id, signal.SIGKILL)


def _retire(sandbox: Sandbox, supervisor: ProcessId, deadline: Deadline) -> None:
    """Kill a supervisor that is alone and does not exit, and record the end of its run; only if that is certain."""
    _send(supervisor, signal.SIGSTOP)
    seen = _wait_for_stop(supervisor, deadline)
    found = evidence.gather(sandbox, deadline, strict=True)
    if found.unsettled:
        _chase(sandbox.resource.resource_id, deadline)
    # Stopped it forks no more, and while it lives all that ever ran is below it: an empty, settled count is complete.
    if not seen or found.supervisor != supervisor or found.members or found.doubt:
        _send(supervisor, signal.SIGCONT)  # it may still exit by itself, with the kernel's word
        return
    _send(supervisor, signal.SIGKILL)
    _wait_for_end([supervisor], deadline, deadline.left)
    if not processes.is_alive(supervisor):
        records.write(sandbox.directory, records.ENDED, records.run(processes.world(), supervisor))


def _wait_for_stop(process: ProcessId, deadline: Deadline) -> bool:
    while not deadline.passed:
        seen = processes.stat(process.pid)
        if seen is None or seen.started != process.started:
            return False
        if seen.state in "Tt":
            return True
        time.sleep(0.005)
    return False


def _wait_for_end(waited: Iterable[ProcessId], deadline: Deadline, at_most: float) -> None:
    """Wait until all of these have ended, for a short while."""
    until = time.monotonic() + min(deadline.left, at_most)
    for process in waited:
        handle = processes.open_process(process)
        if handle is None:
            continue
        try:
            poll = select.poll()
            poll.register(handle, select.POLLIN)
            poll.poll(max(0.0, until - time.monotonic()) * 1000)
        finally:
            os.close(handle)


def _send(process: ProcessId, number: signal.Signals) -> None:
    try:
        processes.send(process, number)
    except PermissionError:
        raise ProviderError(ErrorKind.REFUSED, f"process {process.pid} may not be signalled from here") from None
