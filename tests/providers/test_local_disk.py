"""What the local provider keeps on disk survives crashes, and removing it touches nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Barrier

import pydantic
import pytest

from providers.conformance import refused, until
from providers.contract import (
    Busy,
    Command,
    ErrorKind,
    Gone,
    ProviderError,
    Resource,
    Running,
    Stopped,
    Unknown,
)
from providers.local.deadline import Deadline
from tests.providers.local_harness import WITHIN, Local, left_below, pids_of

ROOT = Path(__file__).resolve().parents[2]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, which only root may")


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Local]:
    local = Local(tmp_path / "state")
    yield local
    local.close()


def run(local: Local, resource: Resource, script: str) -> bytes:
    return local.provider.execute(resource.resource_id, Command(("sh", "-c", script)), within=WITHIN).stdout


def inspect(local: Local, resource: Resource) -> object:
    return local.provider.inspect(resource.resource_id, within=WITHIN)


# Identity.


def test_processes_that_name_a_new_directory_at_once_agree(tmp_path: Path) -> None:
    states = [Local(tmp_path / "new") for _ in range(8)]
    barrier = Barrier(len(states))

    def identify(local: Local) -> str:
        barrier.wait(WITHIN)
        return local.provider.identify(within=WITHIN)

    with ThreadPoolExecutor(len(states)) as pool:
        assert len(set(pool.map(identify, states))) == 1


def test_a_directory_that_lost_its_id_while_it_holds_sandboxes_is_refused(local: Local) -> None:
    resource = local.create()
    identity = (local.state / "directory-id").read_text()
    (local.state / "directory-id").unlink()
    provider = local.provider
    for call in (
        lambda: provider.identify(within=WITHIN),
        lambda: provider.find("box", {}, within=WITHIN),
        lambda: provider.inspect(resource.resource_id, within=WITHIN),
        lambda: provider.inspect("other." + "0" * 32, within=WITHIN),
        lambda: provider.list({}, within=WITHIN),
        lambda: provider.delete(resource.resource_id, within=WITHIN),
    ):
        refused(ErrorKind.IDENTITY, call)
    assert not (local.state / "directory-id").exists()
    (local.state / "directory-id").write_text(identity)
    assert isinstance(inspect(local, resource), Running)


@pytest.mark.parametrize("text", ["", "\n", "\0\0\0\0"])
def test_a_damaged_id_is_refused(local: Local, text: str) -> None:
    local.provider.identify(within=WITHIN)
    (local.state / "directory-id").write_text(text)
    refused(ErrorKind.IDENTITY, lambda: local.provider.identify(within=WITHIN))
    (local.state / "directory-id").unlink()


def test_a_host_without_a_machine_id_is_given_one_that_stays(
    local: Local, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("providers.local.identity._HOST_MACHINE_ID", str(tmp_path / "absent"))
    first = local.provider.identify(within=WITHIN)
    assert first == local.provider.identify(within=WITHIN)
    monkeypatch.undo()
    assert first == local.provider.identify(within=WITHIN)


def test_a_wiped_directory_is_another_one_and_its_sandboxes_are_not_gone(local: Local) -> None:
    resource = local.create()
    run(local, resource, "setsid sleep 3599.5 </dev/null >/dev/null 2>&1 & exit 0")
    before = local.provider.identify(within=WITHIN)
    shutil.rmtree(local.state)
    assert local.provider.identify(within=WITHIN) != before
    sighting = inspect(local, resource)
    assert isinstance(sighting, Unknown)
    assert sighting.resource.resource_id == resource.resource_id
    local.provider.stop(resource.resource_id, grace=0.1, within=WITHIN)
    assert isinstance(inspect(local, resource), Gone)
    refused(ErrorKind.NOT_FOUND, lambda: local.provider.stop(resource.resource_id, grace=0.1, within=WITHIN))
    assert not left_below(local.state)


def test_deleting_what_was_wiped_ends_its_processes(local: Local) -> None:
    resource = local.create()
    shutil.rmtree(local.state)
    local.provider.delete(resource.resource_id, within=WITHIN)
    assert isinstance(inspect(local, resource), Gone)
    assert not left_below(local.state)


# Names and paths.


def test_a_state_directory_may_have_a_longer_path_than_a_socket(tmp_path: Path) -> None:
    state = tmp_path.joinpath(*["a-rather-long-name-of-a-directory"] * 6)
    local = Local(state)
    resource = local.create("x" * 63)
    assert len(str(state)) > 108
    assert run(local, resource, "echo here") == b"here\n"
    local.close()


@pytest.mark.parametrize("name", ["", "../box", "a/b", ".", "A", "box\n", "a" * 64, "b\0x", "é"])
def test_a_name_that_is_none_is_invalid_and_never_found(local: Local, name: str) -> None:
    error = refused(ErrorKind.INVALID, lambda: local.create(name))
    assert error.nothing_allocated
    assert local.provider.find(name, {}, within=WITHIN) is None
    assert local.provider.list({}, within=WITHIN).resources == ()


@pytest.mark.parametrize(
    "resource_id",
    ["", "box", ".", "../sandboxes/box", "../../outside", "box.xyz", "box\0", "\ud800", "box." + "0" * 33],
)
def test_an_id_that_is_none_is_gone_and_deletes_nothing(local: Local, tmp_path: Path, resource_id: str) -> None:
    (tmp_path / "outside").mkdir()
    local.create()
    assert isinstance(local.provider.inspect(resource_id, within=WITHIN), Gone)
    local.provider.delete(resource_id, within=WITHIN)
    refused(ErrorKind.NOT_FOUND, lambda: local.provider.stop(resource_id, grace=0, within=WITHIN))
    assert local.provider.find("box", {}, within=WITHIN) is not None
    assert (local.state / "trash").is_dir()
    assert (tmp_path / "outside").is_dir()


def test_a_sandbox_that_lost_its_record_makes_no_list_complete(local: Local) -> None:
    local.create()
    record = (local.directory() / "sandbox.json").read_text()
    (local.directory() / "sandbox.json").unlink()
    refused(ErrorKind.PROTOCOL, lambda: local.provider.list({}, within=WITHIN))
    refused(ErrorKind.PROTOCOL, lambda: local.provider.find("box", {}, within=WITHIN))
    (local.directory() / "sandbox.json").write_text(record)


# Crashes.

_CRASH = """
import os, signal, subprocess, sys
from providers.local import client, disk, records
from providers.registry import open_provider

def crash(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

def before(module, name):
    setattr(module, name, crash)

def after(module, name):
    original = getattr(module, name)
    def wrapped(*args, **kwargs):
        original(*args, **kwargs)
        crash()
    setattr(module, name, wrapped)

class Os:
    rename = staticmethod(crash)
    def __getattr__(self, name):
        return getattr(os, name)

point = sys.argv[2]
if point == "before it has a record":
    before(records, "write")
elif point == "before it has its name":
    disk.os = Os()
elif point == "when it has its name":
    before(client, "launch")
elif point == "when its supervisor was forked":
    after(client.subprocess, "Popen")
elif point == "when its supervisor is ready":
    after(client, "_read_word")
provider = open_provider("local", {"state_dir": sys.argv[1]})
config = type(provider).Config(command=["sleep", "3600"])
print(provider.create("box", {}, config, within=30).resource.resource_id, flush=True)
crash()
"""


def crashing(local: Local, point: str) -> str:
    answer = subprocess.run(
        [sys.executable, "-c", _CRASH, str(local.state), point],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        start_new_session=True,
    )
    assert answer.returncode == -9, answer.stderr
    return answer.stdout.strip()


@pytest.mark.parametrize("point", ["before it has a record", "before it has its name"])
def test_a_creator_killed_before_its_sandbox_has_a_name_leaves_nothing_that_runs(local: Local, point: str) -> None:
    crashing(local, point)
    assert local.provider.find("box", {}, within=WITHIN) is None
    assert local.provider.list({}, within=WITHIN).resources == ()
    assert not left_below(local.state)
    (abandoned,) = (local.state / "staging").iterdir()
    os.utime(abandoned, (0, 0))
    resource = local.create()
    assert isinstance(inspect(local, resource), Running)
    assert not list((local.state / "staging").iterdir())


@pytest.mark.parametrize(
    "point",
    ["when it has its name", "when its supervisor was forked", "when its supervisor is ready", "when it is created"],
)
@pytest.mark.parametrize("way", ["stop", "delete"])
def test_a_creator_killed_later_leaves_what_is_found_and_ended(local: Local, point: str, way: str) -> None:
    told = crashing(local, point)
    resource = local.provider.find("box", {}, within=WITHIN)
    assert resource is not None
    assert told in {"", resource.resource_id}
    assert not isinstance(inspect(local, resource), Gone | Unknown)
    assert until(lambda: not isinstance(inspect(local, resource), Busy), WITHIN)
    # Once it is said to be stopped, nothing that the dead creator set off starts it any more.
    expected = Stopped if point == "when it has its name" else Running
    assert isinstance(inspect(local, resource), expected)
    if way == "stop":
        local.provider.stop(resource.resource_id, grace=0.2, within=WITHIN)
        assert isinstance(inspect(local, resource), Stopped)
        local.provider.start(resource.resource_id, within=WITHIN)
        assert isinstance(inspect(local, resource), Running)
    local.provider.delete(resource.resource_id, within=WITHIN)
    assert isinstance(inspect(local, resource), Gone)
    assert not left_below(local.state)


def test_a_sandbox_survives_the_death_of_its_creator_and_its_whole_session(local: Local) -> None:
    resource_id = crashing(local, "when it is created")
    answer = local.provider.execute(resource_id, Command(("echo", "alive")), within=WITHIN)
    assert answer.stdout == b"alive\n"


def test_an_interrupted_removal_is_neither_gone_nor_forgotten_until_it_is_finished(
    local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    resource = local.create()
    run(local, resource, "mkdir -p deep/er; touch deep/er/file")
    with monkeypatch.context() as patch:

        def interrupted(*_: object, **__: object) -> None:
            raise ProviderError(ErrorKind.TIMEOUT)

        patch.setattr("providers.local.removal.remove", interrupted)
        refused(ErrorKind.TIMEOUT, lambda: local.provider.delete(resource.resource_id, within=WITHIN))
    assert isinstance(inspect(local, resource), Unknown)
    assert local.provider.list({}, within=WITHIN).resources == (resource,)
    again = local.create()
    assert isinstance(inspect(local, again), Running)
    local.provider.delete(resource.resource_id, within=WITHIN)
    assert isinstance(inspect(local, resource), Gone)
    assert local.provider.list({}, within=WITHIN).resources == (again,)


# Removal.


def test_removal_follows_no_link_out_of_the_sandbox(local: Local, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("kept")
    outside.chmod(0o500)
    resource = local.create()
    run(local, resource, f"ln -s {outside} directory; ln -s {outside}/precious file; ln -s . self; ln -s nowhere gone")
    run(local, resource, f"mkdir d; ln -s {outside} d/directory; ln {outside}/precious hard")
    files = local.directory() / "files"
    shutil.rmtree(files / "d")
    (files / "d").symlink_to(outside)
    local.provider.delete(resource.resource_id, within=WITHIN)
    assert isinstance(inspect(local, resource), Gone)
    assert (outside / "precious").read_text() == "kept"
    assert outside.stat().st_mode & 0o777 == 0o500
    outside.chmod(0o700)


def test_a_files_directory_that_became_a_link_is_not_followed(local: Local, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("kept")
    resource = local.create()
    shutil.rmtree(local.directory() / "files")
    (local.directory() / "files").symlink_to(outside)
    local.provider.delete(resource.resource_id, within=WITHIN)
    assert isinstance(inspect(local, resource), Gone)
    assert (outside / "precious").read_text() == "kept"


def test_a_tree_deeper_than_any_stack_is_removed(local: Local) -> None:
    resource = local.create()
    script = "import os\nfor _ in range(1500):\n    os.mkdir('d'); os.chdir('d')\n    open('f', 'w').close()"
    command = Command((sys.executable, "-I", "-c", script), timeout=20)
    assert local.provider.execute(resource.resource_id, command, within=WITHIN).exit_code == 0
    local.provider.delete(resource.resource_id, within=WITHIN)
    assert isinstance(inspect(local, resource), Gone)
    assert not list((local.state / "trash").iterdir())


def test_a_removal_that_takes_too_long_goes_on_with_the_next_call(
    local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    resource = local.create()
    run(local, resource, "mkdir many; cd many; seq 60 | xargs touch")
    many = local.state / "trash" / resource.resource_id / "files" / "many"
    with monkeypatch.context() as patch:
        removed = 0

        def check(_: Deadline, doing: str) -> None:
            nonlocal removed
            removed += doing == "removing files"
            if removed > 20:
                raise ProviderError(ErrorKind.TIMEOUT, doing)

        patch.setattr(Deadline, "check", check)
        refused(ErrorKind.TIMEOUT, lambda: local.provider.delete(resource.resource_id, within=WITHIN))
    assert isinstance(inspect(local, resource), Unknown)
    assert not many.exists() or len(list(many.iterdir())) < 60
    local.provider.delete(resource.resource_id, within=WITHIN)
    assert isinstance(inspect(local, resource), Gone)


_LIFE = """
import os, sys
from providers.contract import Command, Gone, Running, Stopped, ErrorKind, ProviderError
from providers.registry import open_provider
assert os.geteuid() == 65534
provider = open_provider("local", {"state_dir": sys.argv[1]})
box = provider.create("box", {"a": "b"}, type(provider).Config(), within=30).resource.resource_id
def run(script):
    return provider.execute(box, Command(("sh", "-c", script)), within=30)
run("mkdir -p locked/in/here; touch locked/in/file; chmod 000 locked/in locked; mkdir r; touch r/f; chmod 500 r")
run("(setsid sleep %s </dev/null >/dev/null 2>&1 &)" % sys.argv[2])
assert isinstance(provider.inspect(box, within=30), Running)
os.kill(int(__import__("json").load(open(sys.argv[1] + "/sandboxes/box/run.json"))["pid"]), 9)
assert isinstance(provider.inspect(box, within=30), Running)
provider.stop(box, grace=0.2, within=30)
print(type(provider.inspect(box, within=30)).__name__)
provider.delete(box, within=30)
print(type(provider.inspect(box, within=30)).__name__)
"""


def as_plain_user(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        arguments,
        cwd="/",
        env={"PYTHONPATH": f"{ROOT}:{Path(pydantic.__file__).parents[1]}"},
        user=65534,
        group=65534,
        extra_groups=[],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def interpreter_of_plain_user() -> str:
    """Return an interpreter that any user may execute: this one may stand in root's home."""
    for path in (sys.executable, "/usr/bin/python3.11", "/usr/bin/python3"):
        with suppress(OSError):
            if as_plain_user([path, "-c", "import providers.registry"]).returncode == 0:
                return path
    pytest.skip("no interpreter here that a plain user may execute")


@needs_root
def test_a_plain_user_owns_ends_and_removes_what_it_made_without_permissions() -> None:
    interpreter = interpreter_of_plain_user()
    base = Path(tempfile.mkdtemp(prefix="local-"))
    tag = f"3599.{int.from_bytes(os.urandom(3), 'big')}"
    try:
        os.chown(base, 65534, 65534)
        answer = as_plain_user([interpreter, "-c", _LIFE, str(base / "state"), tag])
        assert answer.returncode == 0, answer.stderr
        assert answer.stdout.split() == ["Stopped", "Gone"]
        assert not pids_of(tag)
        assert not list((base / "state" / "trash").iterdir())
    finally:
        shutil.rmtree(base)
