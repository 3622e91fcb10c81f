"""The demo, interrupted: it leaves nothing running, and touches nothing of somebody else's."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest

from paperclip_env.demo.audit import left_at, made
from paperclip_env.demo.services import serve
from paperclip_env.stack.emptiness import require_empty
from paperclip_env.stack.problem import Problem
from providers.rehearsing import Outcome
from tests import factories
from tests.beats import CHECKOUT, Queue, database_url, eventually


def _below(directory: Path) -> list[int]:
    """Return the processes that work in, or log to, this directory."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                places = [entry / "cwd", entry / "fd" / "1"]
                if any(str(place.readlink()).startswith(str(directory)) for place in places):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def _rehearsed(directory: Path) -> list[int]:
    """Return the processes of rehearsed sandboxes whose files are below this directory, wherever they work."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                environment = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if any(value.startswith(f"HOME={directory}/".encode()) for value in environment):
                found.append(int(entry.name))
    return found


@pytest.mark.parametrize(
    ("number", "moment"),
    [
        (signal.SIGINT, "in the middle of its acquire"),
        (signal.SIGTERM, "leases released"),
        (signal.SIGINT, "A new worker starts"),
    ],
)
def test_an_interrupted_demo_leaves_nothing_running(number: signal.Signals, moment: str, tmp_path: Path) -> None:
    """In the middle of its faults, too: an account is away, a lock is held, and a sandbox has no owner yet."""
    log = tmp_path / "demo.log"
    scratch = Path(tempfile.mkdtemp(prefix="pe-", dir="/tmp"))  # short: podman's own paths may have 50 characters
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_URL")}
    with log.open("wb") as output:
        demo = subprocess.Popen(
            [sys.executable, "-m", "paperclip_env.stack", "demo"],
            cwd=CHECKOUT,
            env={**environment, "TMPDIR": str(scratch)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )

    def look() -> bool:
        assert demo.poll() is None, log.read_text()
        return moment in log.read_text() and bool(_rehearsed(scratch))

    try:
        eventually(look, f"the demo says {moment!r}", bound=120)
        demo.send_signal(number)
        assert demo.wait(60) == 128 + number, log.read_text()
    finally:
        demo.kill()
    told = log.read_text()
    assert "Interrupted; everything is being cleaned up." in told
    assert "Traceback" not in told
    assert "could not be cleaned up" not in told
    assert _rehearsed(scratch) == []
    eventually(lambda: not _below(scratch), "nothing is left running")
    assert list(scratch.glob("paperclip-demo-*")) == []
    shutil.rmtree(scratch)


@pytest.mark.django_db
def test_the_audit_sees_a_sandbox_that_nobody_owns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the service's own word: that it was made, that it executes, and, once it is stopped, that it exists."""
    for variable in ("DEMO_E2B_KEY", "DEMO_DAYTONA_KEY"):
        monkeypatch.setenv(variable, "")  # put back afterwards
    with ExitStack() as stack:
        service = serve(tmp_path, stack).e2b
        account = factories.account(provider="e2b", endpoint=service.endpoint)
        assert (made(account, service).good, left_at(account, service).good) == (True, True)
        team = service.server.world.keys[service.key]
        sandbox = service.server.world.create(team, {"templateID": "base"}, "", Outcome())["sandboxID"]
        assert (made(account, service).good, left_at(account, service).good) == (False, False)
        assert list(service.executing()) == [sandbox]
        service.server.world.pause(team, sandbox, memory=False, strict=False, unresponsive=False, outcome=Outcome())
        assert service.executing() == {}
        assert left_at(account, service).good is False
        service.server.world.kill(team, sandbox, Outcome())
        assert (made(account, service).good, left_at(account, service).good) == (False, True)
    assert _rehearsed(tmp_path) == []


@pytest.mark.django_db
def test_the_demo_refuses_a_database_that_is_not_empty() -> None:
    with pytest.raises(Problem, match="The database that DATABASE_URL names is not empty"):
        require_empty(["DATABASE_URL"], {"DATABASE_URL": database_url()})


def test_the_demo_refuses_a_broker_that_is_not_empty() -> None:
    queue = Queue("somebody's")
    address = {"CELERY_BROKER_URL": os.environ["CELERY_BROKER_URL"]}
    queue._broker.flushdb()
    require_empty(["CELERY_BROKER_URL"], address)
    queue._broker.rpush("somebody's", "work")
    with pytest.raises(Problem, match="The broker that CELERY_BROKER_URL names is not empty"):
        require_empty(["CELERY_BROKER_URL"], address)
    queue.close()
