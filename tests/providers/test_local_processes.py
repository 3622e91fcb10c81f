"""The local provider never takes a sandbox for stopped that is not, nor another's process for one of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from providers.conformance import refused, until
from providers.contract import Busy, Command, ErrorKind, Gone, ProviderError, Resource, Running, Stopped, Unknown
from tests.providers.local_harness import WITHIN, Local, pids_of, state_of

TAG = "7200.{:09d}"


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Local]:
    local = Local(tmp_path / "state")
    yield local
    local.close()


@pytest.fixture
def tag() -> str:
    return TAG.format(int.from_bytes(os.urandom(4), "big") % 10**9)


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """A process of somebody else, with every signal that it is sent visible by its death or its stop."""
    with subprocess.Popen(["/bin/sleep", "3600"]) as process:
        yield process
        process.kill()


def run(local: Local, resource: Resource, script: str, timeout: float = 10.0) -> bytes:
    command = Command(("sh", "-c", script), timeout=timeout)
    return local.provider.execute(resource.resource_id, command, within=WITHIN).stdout


def daemonise(local: Local, resource: Resource, tag: str, prefix: str = "") -> int:
    """Leave a process behind that has no parent, group or session of the sandbox's; return its PID."""
    run(local, resource, f"({prefix} setsid sleep {tag} </dev/null >/dev/null 2>&1 &); exit 0")
    assert until(lambda: len(pids_of(tag)) == 1, WITHIN)
    return pids_of(tag)[0]


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    assert until(lambda: state_of(pid) in "ZX", WITHIN)


def stop(local: Local, resource: Resource, grace: float = 0.3) -> None:
    local.provider.stop(resource.resource_id, grace=grace, within=WITHIN)


def inspect(local: Local, resource: Resource) -> object:
    return local.provider.inspect(resource.resource_id, within=WITHIN)


def started_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def ends(local: Local, resource: Resource, way: str) -> None:
    """End a sandbox one way or the other, and check that it is proven."""
    if way == "stop":
        stop(local, resource)
        assert isinstance(inspect(local, resource), Stopped)
    else:
        local.provider.delete(resource.resource_id, within=WITHIN)
        assert isinstance(inspect(local, resource), Gone)


both_ways = pytest.mark.parametrize("way", ["stop", "delete"])


# A supervisor that is dead, or does not listen.


@both_ways
def test_what_a_killed_supervisor_left_is_found_by_its_mark_and_ended(local: Local, tag: str, way: str) -> None:
    resource = local.create()
    daemonise(local, resource, tag)
    kill(local.supervisor())
    local.forge("known.json", [])  # so that only the mark is left to find it by
    assert isinstance(inspect(local, resource), Running)
    refused(ErrorKind.REFUSED, lambda: run(local, resource, "true"))
    refused(ErrorKind.REFUSED, lambda: local.provider.start(resource.resource_id, within=WITHIN))
    assert pids_of(tag)
    ends(local, resource, way)
    assert not pids_of(tag)


def test_a_sandbox_whose_supervisor_died_with_nothing_left_is_stopped_and_starts_again(local: Local) -> None:
    resource = local.create()
    run(local, resource, "echo kept > note")
    kill(local.supervisor())
    assert isinstance(inspect(local, resource), Stopped)
    local.provider.start(resource.resource_id, within=WITHIN)
    assert run(local, resource, "cat note") == b"kept\n"


@both_ways
def test_a_process_that_cleared_its_mark_ends_with_its_sandbox(local: Local, tag: str, way: str) -> None:
    resource = local.create()
    pid = daemonise(local, resource, tag, "env -i")
    assert until(
        lambda: b"PAPERCLIP" not in Path(f"/proc/{pid}/environ").read_bytes(), WITHIN
    )  # `env` has done its work
    ends(local, resource, way)
    assert not pids_of(tag)


@both_ways
def test_a_process_that_cleared_its_mark_is_known_from_before_its_supervisor_was_killed(
    local: Local, tag: str, way: str
) -> None:
    resource = local.create()
    pid = daemonise(local, resource, tag, "env -i")
    assert until(lambda: pid in [known for known, _ in local.record("known.json")], WITHIN)
    kill(local.supervisor())
    assert isinstance(inspect(local, resource), Running)
    ends(local, resource, way)
    assert not pids_of(tag)


@both_ways
def test_a_frozen_supervisor_holds_nobody_and_is_ended_with_all_below_it(local: Local, tag: str, way: str) -> None:
    resource = local.create()
    daemonise(local, resource, tag)
    os.kill(local.supervisor(), signal.SIGSTOP)
    assert isinstance(inspect(local, resource), Running)
    began = time.monotonic()
    command = Command(("true",))
    refused(ErrorKind.TIMEOUT, lambda: local.provider.execute(resource.resource_id, command, within=0.5))
    refused(ErrorKind.TIMEOUT, lambda: local.provider.start(resource.resource_id, within=0.5))
    assert time.monotonic() - began < 3
    ends(local, resource, way)
    assert not pids_of(tag)


def test_a_supervisor_that_is_frozen_again_and_again_is_ended_all_the_same(local: Local, tag: str) -> None:
    resource = local.create()
    daemonise(local, resource, tag)
    supervisor = local.supervisor()
    with subprocess.Popen([sys.executable, "-c", _FREEZER, str(supervisor)], stdout=subprocess.PIPE) as freezer:
        assert freezer.stdout is not None
        freezer.stdout.readline()
        ends(local, resource, "stop")
        freezer.wait(WITHIN)
    assert local.record("ended.json") == local.record("run.json")
    assert not pids_of(tag)


_FREEZER = """
import os, signal, sys
from contextlib import suppress
with suppress(ProcessLookupError):
    pid = int(sys.argv[1])
    os.kill(pid, signal.SIGSTOP)
    print(flush=True)
    while open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] not in "ZX":
        os.kill(pid, signal.SIGSTOP)
"""


# Records that point to somebody else.


@both_ways
@pytest.mark.parametrize("boot", ["this boot", "another boot"])
def test_a_recycled_pid_is_never_signalled(
    local: Local, stranger: subprocess.Popen[bytes], way: str, boot: str
) -> None:
    resource = local.create()
    kill(local.supervisor())
    run_record = local.record("run.json")
    # In this boot only the start time tells them apart; after a reboot even that may be the same.
    started = started_of(stranger.pid)
    forged = {**run_record, "pid": stranger.pid, "started": started - 1}
    if boot == "another boot":
        forged |= {"boot": "00000000-0000-0000-0000-000000000000", "started": started}
    local.forge("run.json", forged)
    local.forge("known.json", [[stranger.pid, forged["started"]]])
    assert isinstance(inspect(local, resource), Stopped)
    ends(local, resource, way)
    assert state_of(stranger.pid) == "S"
    assert stranger.poll() is None


def test_after_a_reboot_nothing_runs_and_the_sandbox_starts_again(local: Local) -> None:
    resource = local.create()
    run(local, resource, "echo kept > note")
    kill(local.supervisor())
    local.forge("run.json", {**local.record("run.json"), "boot": "another", "namespace": "another"})
    assert isinstance(inspect(local, resource), Stopped)
    local.provider.start(resource.resource_id, within=WITHIN)
    assert run(local, resource, "cat note") == b"kept\n"


def test_what_runs_in_another_pid_namespace_is_unknown_and_its_directory_stays(local: Local) -> None:
    resource = local.create()
    kill(local.supervisor())
    mine = local.record("run.json")
    local.forge("run.json", {**mine, "namespace": "pid:[1]"})
    assert isinstance(inspect(local, resource), Unknown)
    refused(ErrorKind.REFUSED, lambda: stop(local, resource))
    refused(ErrorKind.REFUSED, lambda: local.provider.delete(resource.resource_id, within=WITHIN))
    refused(ErrorKind.REFUSED, lambda: local.provider.start(resource.resource_id, within=WITHIN))
    assert local.directory().is_dir()
    local.forge("run.json", mine)


def test_the_kernels_word_from_another_pid_namespace_counts(local: Local) -> None:
    resource = local.create()
    stop(local, resource)
    for file in ("run.json", "ended.json"):
        local.forge(file, {**local.record(file), "namespace": "pid:[1]"})
    assert isinstance(inspect(local, resource), Stopped)


def test_a_damaged_record_is_no_proof(local: Local) -> None:
    resource = local.create()
    kill(local.supervisor())
    mine = local.record("run.json")
    local.forge("run.json", {"pid": 1})
    refused(ErrorKind.PROTOCOL, lambda: inspect(local, resource))
    refused(ErrorKind.PROTOCOL, lambda: local.provider.delete(resource.resource_id, within=WITHIN))
    local.forge("run.json", mine)


# Processes that are hard to see or to end.


def test_threads_that_outlive_their_first_one_still_execute(local: Local, tag: str) -> None:
    resource = local.create()
    script = (
        "import ctypes, threading, time; threading.Thread(target=time.sleep, args=(3600,)).start(); "
        "ctypes.CDLL(None).pthread_exit(None)"
    )
    run(local, resource, f"setsid {sys.executable} -c '{script}' {tag} </dev/null >/dev/null 2>&1 & echo $!")

    def found() -> list[int]:
        return [
            int(entry.parent.name)
            for entry in Path("/proc").glob("[0-9]*/status")
            if state_of(int(entry.parent.name)) == "Z" and len(list(entry.parent.glob("task/*"))) > 1
        ]

    assert until(lambda: bool(found()), WITHIN)
    (pid,) = found()
    kill(local.supervisor())
    local.forge("known.json", [])
    assert isinstance(inspect(local, resource), Running)
    stop(local, resource)
    assert isinstance(inspect(local, resource), Stopped)
    assert len(list(Path(f"/proc/{pid}").glob("task/*"))) <= 1


def test_what_keeps_forking_is_frozen_and_ended(local: Local, tag: str) -> None:
    resource = local.create()
    script = f"trap '' TERM; while :; do sleep {tag} & sleep 0.005; done"
    run(local, resource, f'setsid sh -c "{script}" </dev/null >/dev/null 2>&1 & exit 0')
    assert until(lambda: len(pids_of(f"sleep\0{tag}")) > 10, WITHIN)
    stop(local, resource)
    assert isinstance(inspect(local, resource), Stopped)
    assert not pids_of(tag)


# Each process lives for an instant and leaves one successor.
_CHAIN = """
import os, time
while {condition}:
    time.sleep(0.001)
    if os.fork():
        os._exit(0)
    {sign}
"""


def test_what_forks_and_exits_faster_than_anyone_can_look_never_passes_for_stopped(
    local: Local, tmp_path: Path
) -> None:
    resource = local.create()
    off = tmp_path / "off"
    chain = _CHAIN.format(condition=f"not os.path.exists({str(off)!r})", sign="pass")
    run(local, resource, f'setsid {sys.executable} -I -S -c "{chain}" </dev/null >/dev/null 2>&1 & exit 0')
    sightings = [inspect(local, resource) for _ in range(20)]
    kill(local.supervisor())
    sightings += [local.provider.inspect(resource.resource_id, within=0.2) for _ in range(20)]
    assert not [sighting for sighting in sightings if isinstance(sighting, Stopped | Gone)]
    assert not off.exists()
    off.touch()
    assert until(lambda: isinstance(inspect(local, resource), Stopped), WITHIN)


def test_what_forks_and_exits_faster_than_anyone_can_look_is_ended(local: Local, tmp_path: Path) -> None:
    resource = local.create()
    last = tmp_path / "last"
    chain = _CHAIN.format(condition=True, sign=f"open({str(last)!r}, 'w').close()")
    run(local, resource, f'setsid {sys.executable} -I -S -c "{chain}" </dev/null >/dev/null 2>&1 & exit 0')
    assert until(last.exists, WITHIN)
    kill(local.supervisor())
    stop(local, resource)
    assert isinstance(inspect(local, resource), Stopped)
    last.unlink()
    assert not until(last.exists, 0.3)


def test_a_command_out_of_time_is_killed_with_what_left_its_session(local: Local, tag: str) -> None:
    resource = local.create()
    command = Command(("sh", "-c", f"(setsid sleep {tag} &); (env -i setsid sleep {tag} &); sleep {tag}"), timeout=0.7)
    answer = local.provider.execute(resource.resource_id, command, within=WITHIN)
    assert answer.timed_out
    marked = [pid for pid in pids_of(tag) if b"PAPERCLIP" in Path(f"/proc/{pid}/environ").read_bytes()]
    assert not marked
    # What also cleared its mark belongs to no command any more, but still to the sandbox.
    stop(local, resource)
    assert isinstance(inspect(local, resource), Stopped)
    assert not pids_of(tag)


def test_processes_are_asked_before_they_are_forced(local: Local) -> None:
    resource = local.create()
    script = "trap 'echo asked > asked; exit 0' TERM; echo ready > ready; while :; do sleep 0.05; done"
    run(local, resource, f'setsid sh -c "{script}" </dev/null >/dev/null 2>&1 & exit 0')
    files = local.directory() / "files"
    assert until((files / "ready").exists, WITHIN)
    began = time.monotonic()
    stop(local, resource, grace=20)
    assert time.monotonic() - began < 10
    assert (files / "asked").read_text() == "asked\n"


def test_a_long_grace_within_a_short_bound_still_ends_by_force(local: Local, tag: str) -> None:
    resource = local.create()
    daemonise(local, resource, tag, "trap '' TERM;")
    local.provider.stop(resource.resource_id, grace=60, within=5.0)
    assert isinstance(inspect(local, resource), Stopped)


def test_a_signalled_command_names_its_signal(local: Local) -> None:
    resource = local.create()
    answer = local.provider.execute(resource.resource_id, Command(("sh", "-c", "kill -USR1 $$")), within=WITHIN)
    assert (answer.exit_code, answer.signal, answer.timed_out) == (None, signal.SIGUSR1, False)


# What a command starts with.


_OF_THE_C_LIBRARY = 0b11 << 31
"""Signals 32 and 33: a program that ignores them hands that on, and the C library lets nobody set them."""


def test_a_command_inherits_nothing_of_the_workers(local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgres://user:word@host/db")
    resource = local.create(env={"PURPOSE": "test"}, command=[])
    read, write = os.pipe()
    os.set_inheritable(read, True)
    try:
        text = run(local, resource, "env; for fd in /proc/self/fd/*; do echo $fd; done; grep SigIgn /proc/self/status")
    finally:
        os.close(read)
        os.close(write)
    lines = text.decode().splitlines()
    names = {line.partition("=")[0] for line in lines if "=" in line}
    assert names - {"PWD", "SHLVL", "_", "OLDPWD"} == {
        *("PATH", "LANG", "HOME", "PURPOSE"),
        *("PAPERCLIP_ENV_SANDBOX", "PAPERCLIP_ENV_COMMAND"),
    }
    assert f"PAPERCLIP_ENV_SANDBOX={resource.resource_id}" in lines
    handles = {line.rpartition("/")[2] for line in lines if line.startswith("/proc/self/fd/")}
    assert handles - {"3"} == {"0", "1", "2"}  # the third is the shell's, reading the directory
    ignored = int(next(line for line in lines if line.startswith("SigIgn")).split()[1], 16)
    assert ignored & ~_OF_THE_C_LIBRARY == 0


def test_the_main_command_runs_at_every_start(local: Local) -> None:
    resource = local.create(command=["sh", "-c", "echo $PURPOSE >> started; exec sleep 3600"], env={"PURPOSE": "main"})
    started = local.directory() / "files" / "started"
    assert until(lambda: started.exists() and started.read_text() == "main\n", WITHIN)
    stop(local, resource)
    assert isinstance(inspect(local, resource), Stopped)
    local.provider.start(resource.resource_id, within=WITHIN)
    assert until(lambda: started.read_text() == "main\nmain\n", WITHIN)


def test_a_main_command_that_cannot_start_is_named_and_its_sandbox_found(local: Local) -> None:
    error = refused(ErrorKind.INVALID, lambda: local.create(command=["/no/such/program"]))
    assert "/no/such/program" in error.excerpt
    assert not error.nothing_allocated
    found = local.provider.find("box", {}, within=WITHIN)
    assert found is not None
    assert isinstance(inspect(local, found), Running)


def test_a_command_that_makes_no_sense_is_invalid(local: Local) -> None:
    resource = local.create()
    commands = [
        Command(()),
        Command(("a\0b",)),
        Command(("true",), env={"A=B": "c"}),
        Command(("true",), env={"A": "\0"}),
        Command(("true",), timeout=float("inf")),
        Command(("true",), timeout=float("nan")),
        Command(("true",), timeout=0),
        Command(("true",), stdin=bytes(65 << 20)),
    ]
    for command in commands:
        with pytest.raises(ProviderError) as caught:
            local.provider.execute(resource.resource_id, command, within=WITHIN)
        assert caught.value.kind is ErrorKind.INVALID
    assert run(local, resource, "echo alive") == b"alive\n"


# Several callers at once.


def test_concurrent_calls_of_every_kind_end_in_one_of_their_states(local: Local) -> None:
    resource = local.create()
    other = [Local(local.state) for _ in range(4)]
    allowed = {ErrorKind.BUSY, ErrorKind.REFUSED, ErrorKind.CONNECTION}

    def life(one: Local) -> list[ErrorKind]:
        calls: list[Callable[[], object]] = [
            lambda: one.provider.stop(resource.resource_id, grace=0.1, within=WITHIN),
            lambda: one.provider.start(resource.resource_id, within=WITHIN),
            lambda: run(one, resource, "sleep 0.05"),
            lambda: one.provider.inspect(resource.resource_id, within=WITHIN),
        ]
        failed = []
        for _ in range(4):
            for call in calls:
                try:
                    call()
                except ProviderError as error:
                    failed.append(error.kind)
        return failed

    with ThreadPoolExecutor(len(other)) as pool:
        failures = {kind for kinds in pool.map(life, other) for kind in kinds}
    assert failures <= allowed
    with ThreadPoolExecutor(len(other)) as pool:
        list(pool.map(lambda one: one.provider.delete(resource.resource_id, within=WITHIN), other))
    assert isinstance(inspect(local, resource), Gone)
    assert not pids_of(resource.resource_id)


_HOLDER = """
import fcntl, sys
with open(sys.argv[1], "r+") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    print(flush=True)
    input()
"""


def test_a_sandbox_that_another_call_holds_is_busy(local: Local) -> None:
    resource = local.create()
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(local.directory() / "lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        sighting = inspect(local, resource)
        assert isinstance(sighting, Busy)
        assert sighting.transition == "creating"
        refused(ErrorKind.BUSY, lambda: local.provider.stop(resource.resource_id, grace=0, within=0.3))
        refused(ErrorKind.BUSY, lambda: local.provider.delete(resource.resource_id, within=0.3))
        refused(ErrorKind.BUSY, lambda: local.provider.start(resource.resource_id, within=0.3))
        holder.kill()
    assert isinstance(inspect(local, resource), Running)
