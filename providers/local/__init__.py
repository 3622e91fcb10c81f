"""Sandboxes on this very host: a directory and a supervised tree of processes, found by name after any restart.

For development, for tests, and for hosts that are rented as a whole. It isolates nothing: a sandbox runs as the user
that its worker runs as, and could tamper with its own records. What it takes seriously is the proof of a stop.

What belongs to a sandbox: every descendant of its supervisor (a child subreaper, so that leaving group, session or
parent changes nothing), and every process that carries its mark in the environment. `Stopped` rests on one of these,
strongest first:

- the supervisor recorded that the kernel knew of no child of it any more, which for a subreaper means no descendant;
- the boot that the run was recorded under is over;
- a count of `/proc` in which nothing was found and nothing could have slipped through (see `census`).

What is known not to be covered, and what is answered then:

- A supervisor is killed with SIGKILL (nobody here does that; the out-of-memory killer might), *and* a process below it
  has cleared its mark, *and* it was started so shortly before (up to 5 s) that the supervisor had not recorded it, or
  descends from such a one that is dead. It is found by nothing, and the sandbox passes for stopped. Alive, the
  supervisor misses nothing.
- Under a plain user, the same with a process that became another user (sudo): its environment cannot be read. One that
  keeps this user but may not be read (a program that forbids dumps) makes the answer `Unknown` as long as it lives.
- What asks a service outside to run something (docker, cron, at, systemd-run) started no process of the sandbox.
- A run in another PID namespace of the same boot (a container that was replaced) cannot be seen: `Unknown`, until a
  reboot, unless its supervisor recorded the end. Only where all workers of a state directory share one PID namespace,
  and its file system is local to the host, can anything be proven.
- Where processes are born without a pause (some thousand a second), a count never settles: a sandbox whose supervisor
  was killed is then `Unknown`, and its `delete` refused, until there is a moment of quiet.
- With hidepid, or in a time namespace that changes, `/proc` does not say what this package asks.
- A removed directory (by hand) takes its records with it; what is left of the sandbox is found by the mark alone.
- A process that the kernel holds (state D) cannot be ended by anybody: `stop` answers TIMEOUT, `inspect` `Running`.
- Reading the state directory is not interrupted by the bound on a call; a disk that hangs holds the caller.
- The main command's output grows in `main.log` without a limit, and no resource of the host is limited.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from providers.local.provider import LocalProvider

__all__ = ["LocalProvider"]


def __getattr__(name: str) -> Any:
    # Late, because the supervisor is a module of this package and must not load the contract's dependencies.
    if name == "LocalProvider":
        from providers.local.provider import LocalProvider

        return LocalProvider
    raise AttributeError(name)
