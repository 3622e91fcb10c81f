"""`manage.py rehearse`, as its user meets it: what it prints, how it ends, and what it remembers."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests
from django.core.management import CommandError, call_command

from providers.conformance import until
from providers.contract import Command, ErrorKind, Gone, Resource, Running, Stopped
from providers.registry import open_provider, validate
from providers.rehearsing import rehearsal, rehearsals
from tests.providers.rehearsed import executing, refused

ROOT = Path(__file__).parents[2]
WITHIN = 20.0


def started(*options: str) -> subprocess.Popen[str]:
    # Without the addresses of any server of ours: a rehearsal needs none.
    left_out = ("DATABASE_URL", "CELERY_BROKER_URL", "SECRET_KEY", "DJANGO_SETTINGS_MODULE")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    return subprocess.Popen(
        [sys.executable, "manage.py", "rehearse", *options],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextmanager
def rehearsing(*options: str, end: signal.Signals = signal.SIGINT) -> Iterator[dict[str, Any]]:
    with started("daytona", "--json", "--transition", "0", "--cache", "0", "--index-lag", "0", *options) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())
        finally:
            process.send_signal(end)
            assert process.wait(WITHIN) == (0 if end != signal.SIGKILL else -signal.SIGKILL)


def adapter(facts: dict[str, Any]) -> Any:
    return open_provider("daytona", {"url": facts["url"]}, facts["key"])


def create(provider: Any, name: str = "box") -> Resource:
    resource: Resource = provider.create(name, {}, validate(provider.Config, {}), within=WITHIN).resource
    return resource


def daemon(provider: Any, resource: Resource, tag: str) -> None:
    script = f"(setsid sleep {tag} </dev/null >/dev/null 2>&1 &) ; echo kept > note"
    provider.execute(resource.resource_id, Command(("sh", "-c", script), timeout=5), within=WITHIN)
    assert executing(tag)


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_it_says_where_it_serves_and_leaves_nothing_running_at_its_end(end: signal.Signals) -> None:
    tag = f"4141.{os.getpid()}{int(end)}"
    with rehearsing(end=end) as facts:
        assert set(facts) == {"provider", "url", "key", "account"}
        provider = adapter(facts)
        assert provider.identify(within=WITHIN) == f"daytona {facts['account']}"
        daemon(provider, create(provider), tag)
    assert not executing(tag)


def test_without_json_it_prints_for_people() -> None:
    with started("daytona", "--port", "0", "--key", "a-key") as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(5)]
        process.send_signal(signal.SIGINT)
        assert process.wait(WITHIN) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""
    assert lines[2].split() == ["key", "a-key"]
    assert lines[4].startswith("Ctrl-C")


@pytest.mark.parametrize("served", [False, True])
def test_a_server_ends_whether_or_not_it_ever_served(tmp_path: Path, *, served: bool) -> None:
    # Ctrl-C may come between the address and the first request.
    found = rehearsal("daytona")
    server = found(found.world_class(tmp_path))
    if served:
        server.start()
    ended = threading.Thread(target=server.close, daemon=True)
    ended.start()
    ended.join(WITHIN)
    assert not ended.is_alive()


def test_a_world_in_a_file_outlives_a_clean_end_with_its_files_and_without_its_processes(tmp_path: Path) -> None:
    state, tag = str(tmp_path / "world.json"), f"4242.{os.getpid()}"
    with rehearsing("--state", state) as facts:
        provider = adapter(facts)
        running, stopped, deleted = (create(provider, name) for name in ("running", "stopped", "deleted"))
        daemon(provider, running, tag)
        provider.stop(stopped.resource_id, grace=1, within=WITHIN)
        provider.delete(deleted.resource_id, within=WITHIN)
    assert not executing(tag)
    assert (tmp_path / "world.json").stat().st_mode & 0o077 == 0
    with rehearsing("--state", state) as again:
        assert (again["key"], again["account"]) == (facts["key"], facts["account"])
        provider = adapter(again)
        assert isinstance(provider.inspect(running.resource_id, within=WITHIN), Running)
        assert isinstance(provider.inspect(stopped.resource_id, within=WITHIN), Stopped)
        assert isinstance(provider.inspect(deleted.resource_id, within=WITHIN), Gone)
        note = provider.execute(running.resource_id, Command(("cat", "note"), timeout=5), within=WITHIN)
        assert note.stdout == b"kept\n"


def test_a_killed_server_finds_its_sandboxes_and_their_processes_again(tmp_path: Path) -> None:
    # The outage of a provider's API does not end its sandboxes.
    state, tag = str(tmp_path / "world.json"), f"4343.{os.getpid()}"
    with rehearsing("--state", state, end=signal.SIGKILL) as facts:
        provider = adapter(facts)
        resource = create(provider)
        daemon(provider, resource, tag)
    assert executing(tag)
    with rehearsing("--state", state) as again:
        provider = adapter(again)
        assert isinstance(provider.inspect(resource.resource_id, within=WITHIN), Running)
        provider.stop(resource.resource_id, grace=1, within=WITHIN)
        assert until(lambda: not executing(tag), WITHIN)
        assert isinstance(provider.inspect(resource.resource_id, within=WITHIN), Stopped)


def test_faults_keys_and_a_look_at_the_sandboxes_are_had_over_http() -> None:
    with rehearsing() as facts:
        provider, root = adapter(facts), facts["url"].removesuffix("/api")
        resource = create(provider)
        fault = {"call": "stop", "kind": "answer", "status": 429, "headers": {"Retry-After": "7"}}
        assert requests.post(f"{root}/rehearsal/faults", json=fault, timeout=10).status_code == 201
        [waiting] = requests.get(f"{root}/rehearsal/faults", timeout=10).json()
        assert (waiting["call"], waiting["status"]) == ("stop", 429)
        error = refused(lambda: provider.stop(resource.resource_id, grace=1, within=WITHIN))
        assert (error.kind, error.retry_after) == (ErrorKind.RATE_LIMITED, 7.0)
        [seen] = requests.get(f"{root}/rehearsal/sandboxes", timeout=10).json()
        assert (seen["id"], seen["state"], seen["executing"]) == (resource.resource_id, "started", [])
        key = {"key": facts["key"], "account": "another"}
        assert requests.post(f"{root}/rehearsal/keys", json=key, timeout=10).status_code == 201
        assert provider.identify(within=WITHIN) == "daytona another"
        assert requests.post(f"{root}/rehearsal/keys", json={}, timeout=10).status_code == 400


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ({"call": "kill", "kind": "lost"}, "call: 'kill' is none of *, archive, "),
        ({"call": "stop", "kind": "loss"}, "kind: 'loss' is none of answer, "),
        ({"call": "stop", "kind": "lost", "tmes": 2}, "tmes: is nothing that a fault has"),
        ({"call": "stop", "kind": "lost", "times": 0}, "times: must be a whole number, 1 or more"),
        ({"call": "stop", "kind": "answer", "status": "teapot"}, "status: must be a whole number from 200 to 599"),
        ({"kind": "lost"}, "call: None is none of *, "),
    ],
)
def test_a_misspelt_fault_is_refused_and_does_not_wait(fault: dict[str, object], sentence: str) -> None:
    with rehearsing() as facts:
        root = facts["url"].removesuffix("/api")
        answer = requests.post(f"{root}/rehearsal/faults", json=fault, timeout=10)
        assert (answer.status_code, sentence in answer.json()["message"]) == (400, True), answer.text
        assert requests.get(f"{root}/rehearsal/faults", timeout=10).json() == []


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("acme",), "invalid choice: 'acme'"),
        (("daytona", "--transition", "-1"), "--transition"),
        (("daytona", "--quota", "none"), "--quota"),
        (("daytona", "--state", "{state}"), "cannot be read as a world"),
        (("daytona", "--port", "{port}"), "cannot serve at 127.0.0.1"),
        (("daytona", "--port", "65536"), "'65536' is not a port, 0 to 65535"),
        (("daytona", "--cache", "soon"), "'soon' is not a number of seconds"),
        (("daytona", "--quota", "-1"), "'-1' is not a number of sandboxes"),
        (("e2b", "--key", "a b"), "a key is printable ASCII without spaces"),
    ],
)
def test_what_cannot_be_served_is_refused_in_a_sentence(
    tmp_path: Path, options: tuple[str, ...], sentence: str
) -> None:
    damaged = tmp_path / "world.json"
    damaged.write_text("[1", encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        given = [option.format(state=damaged, port=taken.getsockname()[1]) for option in options]
        with pytest.raises(CommandError, match=sentence):
            call_command("rehearse", *given)
    assert damaged.read_text(encoding="utf-8") == "[1"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_every_provider_that_is_a_service_can_be_rehearsed() -> None:
    assert rehearsals() == ["daytona", "e2b"]
    for key in rehearsals():
        assert rehearsal(key).key == key
    with pytest.raises(LookupError, match="these can: daytona, e2b"):
        rehearsal("docker")
