"""What is known about the execution of one sandbox, and how surely.

Three sources, strongest first: the record that a run ended with the kernel's word; the supervisor, alive under exactly
the recorded start time; and a census of `/proc`. A record of another boot proves that its processes are gone; one of
another PID namespace proves nothing here.
"""

from __future__ import annotations

from typing import NamedTuple

from providers.contract import ErrorKind, ProviderError
from providers.local import census, processes, records
from providers.local.deadline import Deadline
from providers.local.disk import Sandbox
from providers.local.processes import ProcessId, Stat


class Evidence(NamedTuple):
    """`supervisor` is None when it has ended. Nothing executes only if it is, `members` is empty and so is `doubt`."""

    supervisor: ProcessId | None
    members: tuple[Stat, ...]
    doubt: str

    @property
    def executes(self) -> bool:
        return self.supervisor is not None or bool(self.members)

    @property
    def unsettled(self) -> bool:
        """Processes come and go faster than they can be counted."""
        return self.doubt == census.UNSETTLED


class Run(NamedTuple):
    """A recorded run of the supervisor, as far as it means something in this boot and namespace."""

    supervisor: ProcessId | None
    """The recorded process, alive or not; None when it cannot exist or be seen here."""
    since: int
    hidden: bool
    """It may execute where this process cannot see it."""
    closed: bool
    """Its end is recorded."""


def run_of(sandbox: Sandbox) -> Run:
    """Read the latest run of a sandbox. Raises `PROTOCOL` for a damaged record."""
    try:
        recorded = records.read(sandbox.directory, records.RUN)
        ended = records.read(sandbox.directory, records.ENDED)
        here = processes.world()
        if recorded is None or recorded["boot"] != here.boot:
            return Run(None, 0, hidden=False, closed=True)
        closed = recorded == ended
        supervisor = ProcessId(recorded["pid"], recorded["started"])
        if recorded["namespace"] != here.namespace:
            return Run(None, supervisor.started, hidden=not closed, closed=closed)
        return Run(supervisor, supervisor.started, hidden=False, closed=closed)
    except (ValueError, KeyError, TypeError) as error:
        raise ProviderError(ErrorKind.PROTOCOL, f"the record of the run is damaged: {error}") from None


def supervisor_of(sandbox: Sandbox) -> ProcessId | None:
    """Return the supervisor if exactly the recorded one is alive."""
    supervisor = run_of(sandbox).supervisor
    return supervisor if supervisor is not None and processes.is_alive(supervisor) else None


def gather(sandbox: Sandbox, deadline: Deadline, *, strict: bool = False) -> Evidence:
    """Look at everything that may execute for this sandbox. Holding its lock makes the answer one about now.

    Without the supervisor's or its record's word the count is strict anyway.
    """
    run = run_of(sandbox)
    supervisor = run.supervisor if run.supervisor is not None and processes.is_alive(run.supervisor) else None
    known = _known(sandbox) if run.supervisor is not None and not run.closed else []
    counted = census.take(
        sandbox.resource.resource_id,
        supervisor=supervisor,
        known=known,
        since=run.since,
        until=deadline.at,
        strict=strict or (supervisor is None and not run.closed),
    )
    doubt = counted.doubt
    if run.closed or (supervisor is not None and doubt != census.UNSETTLED):
        doubt = ""  # nothing is left of that run, or all of it is below its supervisor, whatever was not to be read
    elif run.hidden:
        doubt = "it was started in another PID namespace of this boot, where nothing can be seen"
    return Evidence(supervisor, counted.members, doubt)


def gather_absent(resource_id: str, deadline: Deadline) -> Evidence:
    """Find what still carries the mark of a sandbox that is not on disk: nothing else is left to find it by."""
    counted = census.take(resource_id, supervisor=None, known=(), since=0, until=deadline.at, strict=False)
    # What may not be read is no doubt here: `delete` clears every doubt before it removes a sandbox from disk.
    return Evidence(None, counted.members, counted.doubt if counted.doubt == census.UNSETTLED else "")


def _known(sandbox: Sandbox) -> list[ProcessId]:
    try:
        return [ProcessId(pid, started) for pid, started in records.read(sandbox.directory, records.KNOWN) or []]
    except (ValueError, TypeError):  # written without fsync, and only ever a help
        return []
