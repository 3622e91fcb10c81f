"""The rehearsal of E2B itself: that the official client is served by it, and that it is as awkward as the service."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from e2b import CommandExitException, Sandbox, SandboxQuery, SandboxState
from e2b.exceptions import AuthenticationException, RateLimitException, SandboxException, SandboxNotFoundException

from providers.e2b.rehearsal import Rehearsal, World
from providers.rehearsing import Fault, Kind, Outcome, running
from tests.providers.rehearsed import KEY, Clock

ROOT = Path(__file__).parents[3]
METADATA = {"a b": "c&d=é/+%20"}


@pytest.fixture
def lively() -> Iterator[Rehearsal]:
    with running(Rehearsal, transition=0.02) as lively:
        lively.world.add_key(KEY)
        yield lively


@pytest.fixture
def options(lively: Rehearsal) -> dict[str, Any]:
    return {
        "api_key": KEY,
        "api_url": lively.url,
        "sandbox_url": lively.url,
        "request_timeout": 20,
        "http_version": "1.1",
    }


def listed(options: dict[str, Any], **query: Any) -> list[str]:
    pages = Sandbox.list(query=SandboxQuery(**query), **options)
    found = []
    while pages.has_next:
        found += [item.sandbox_id for item in pages.next_items()]
    return found


# The official client.


def test_the_official_client_lives_a_whole_life_with_a_sandbox(lively: Rehearsal, options: dict[str, Any]) -> None:
    box = Sandbox.create("base", timeout=120, metadata=METADATA, envs={"GREETING": "hello"}, **options)
    info = box.get_info()
    assert (info.sandbox_id, info.state, info.metadata) == (box.sandbox_id, SandboxState.RUNNING, METADATA)
    assert 110 < (info.end_at - info.started_at).total_seconds() <= 120
    done = box.commands.run('echo "$GREETING"; echo oops >&2')
    assert (done.stdout, done.stderr, done.exit_code) == ("hello\n", "oops\n", 0)
    with pytest.raises(CommandExitException) as caught:
        box.commands.run("exit 3")
    assert caught.value.exit_code == 3
    box.files.write("note", "kept")
    assert listed(options, metadata=METADATA) == [box.sandbox_id]
    assert listed(options, metadata={"a b": "other"}) == []

    assert box.pause()
    assert box.get_info().state is SandboxState.PAUSED
    assert not box.pause()
    assert listed(options, state=[SandboxState.RUNNING]) == []
    assert listed(options) == [box.sandbox_id]
    again = Sandbox.connect(box.sandbox_id, timeout=300, **options)
    assert again.get_info().state is SandboxState.RUNNING
    assert again.files.read("note") == "kept"
    again.set_timeout(600)
    assert again.is_running()

    assert again.kill()
    assert not again.kill()
    assert not again.is_running()
    with pytest.raises(SandboxNotFoundException):
        again.get_info()
    assert listed(options) == []
    assert not lively.world.executing(box.sandbox_id)


@pytest.mark.parametrize(("mode", "survives"), [("full", True), ("filesystem", False)])
def test_the_official_client_finds_old_processes_after_a_pause_with_memory_alone(
    lively: Rehearsal, options: dict[str, Any], mode: Any, *, survives: bool
) -> None:
    box = Sandbox.create(**options)
    box.commands.run("(setsid sleep 5000 </dev/null >/dev/null 2>&1 &) ; exit 0")
    [before] = lively.world.executing(box.sandbox_id)
    box.pause(mode=mode)
    assert bool(lively.world.executing(box.sandbox_id)) is survives
    Sandbox.connect(box.sandbox_id, **options)
    assert lively.world.executing(box.sandbox_id) == ([before] if survives else [])


def test_the_official_client_repeats_a_creation_with_its_key(lively: Rehearsal, options: dict[str, Any]) -> None:
    first = Sandbox.create(idempotency_key="once", **options)
    assert Sandbox.create(idempotency_key="once", **options).sandbox_id == first.sandbox_id
    with pytest.raises(SandboxException, match="422"):
        Sandbox.create(idempotency_key="once", metadata={"other": "request"}, **options)
    assert listed(options) == [first.sandbox_id]


def test_the_official_client_obeys_the_hints_of_the_rehearsal(lively: Rehearsal, options: dict[str, Any]) -> None:
    def asked() -> int:
        return [call for call, _ in lively.asked].count("create")

    # The service's own hints, as it adds them by itself: tried again, and the second time it works.
    lively.will(Fault("create", Kind.ERROR))
    Sandbox.create(**options)
    assert asked() == 2
    lively.will(Fault("create", Kind.ANSWER, status=500, headers={"Should-Retry": "false"}))
    with pytest.raises(SandboxException):
        Sandbox.create(**options)
    assert asked() == 3
    lively.will(Fault("create", Kind.ANSWER, status=429, headers={"Retry-After": "1"}))
    begun = time.monotonic()
    Sandbox.create(**options)
    assert time.monotonic() - begun >= 1
    lively.world.quota = 1
    with pytest.raises(RateLimitException):
        Sandbox.create(**{**options, "retries": 0})
    with pytest.raises(AuthenticationException):
        Sandbox.create(**{**options, "api_key": "nobodys"})


# As awkward as the service.


class Client:
    """The API as a client without any comfort sees it."""

    def __init__(self, server: Rehearsal, key: str = KEY) -> None:
        self.server = server
        self.key = key

    def __call__(self, method: str, path: str, **options: Any) -> tuple[int, Any]:
        url, headers = self.server.url + path, {"X-API-KEY": self.key, **options.pop("headers", {})}
        response = requests.request(method, url, headers=headers, timeout=10, **options)
        return response.status_code, response.json() if response.content else None

    def create(self, **body: Any) -> str:
        status, made = self("POST", "/v2/sandboxes", json={"templateID": "base", **body})
        assert status == 201
        return str(made["sandboxID"])

    def seen(self, sandbox: str) -> tuple[int, str | None, str | None]:
        status, told = self("GET", f"/sandboxes/{sandbox}")
        return status, told.get("state"), told.get("pauseMode")


@pytest.fixture
def client(server: Rehearsal) -> Client:
    return Client(server)


class Asking:
    """A request that is waiting for its answer."""

    def __init__(self, client: Client, sandbox: str, state: str, method: str, path: str, **options: Any) -> None:
        client.server.world.transition = 10.0
        self.answer: tuple[int, Any] | None = None
        self._thread = threading.Thread(target=lambda: setattr(self, "answer", client(method, path, **options)))
        self._thread.start()
        boxes = client.server.world.boxes
        while not any(box.state == state for box in boxes.values() if sandbox in {"", box.id}):
            assert self._thread.is_alive()
            time.sleep(0.005)

    def answered(self) -> tuple[int, Any]:
        self._thread.join(10)
        assert self.answer is not None
        return self.answer


def test_a_sandbox_is_called_paused_before_it_is(client: Client, clock: Clock) -> None:
    sandbox = client.create()
    pausing = Asking(client, sandbox, "pausing", "POST", f"/sandboxes/{sandbox}/pause", json={"memory": False})
    assert client.seen(sandbox) == (200, "paused", None)
    assert client("POST", f"/sandboxes/{sandbox}/pause")[0] == 409
    assert client("DELETE", f"/sandboxes/{sandbox}")[0] == 409
    clock.now += 10
    assert pausing.answered() == (204, None)
    assert client.seen(sandbox) == (200, "paused", "filesystem")
    status, error = client("POST", f"/sandboxes/{sandbox}/pause")
    assert (status, error["code"], "already paused" in error["message"]) == (409, 409, True)
    resuming = Asking(client, sandbox, "resuming", "POST", f"/v2/sandboxes/{sandbox}/connect", json={"timeout": 60})
    assert client.seen(sandbox) == (200, "paused", "filesystem")
    clock.now += 10
    assert resuming.answered()[0] == 201
    assert client.seen(sandbox) == (200, "running", None)
    assert client("POST", f"/v2/sandboxes/{sandbox}/connect", json={"timeout": 60})[0] == 200


def test_a_sandbox_is_not_shown_while_it_is_made_or_killed(client: Client, clock: Clock) -> None:
    making = Asking(client, "", "creating", "POST", "/v2/sandboxes", json={"templateID": "base"})
    assert client("GET", "/v2/sandboxes") == (200, [])
    clock.now += 10
    sandbox = making.answered()[1]["sandboxID"]
    killing = Asking(client, sandbox, "killing", "DELETE", f"/sandboxes/{sandbox}")
    assert client.seen(sandbox)[0] == 404
    assert client("GET", "/v2/sandboxes") == (200, [])
    assert client("DELETE", f"/sandboxes/{sandbox}")[0] == 404
    clock.now += 10
    assert killing.answered() == (204, None)


def test_a_deadline_kills_or_pauses_as_was_asked_for(client: Client, clock: Clock) -> None:
    killed, paused = client.create(timeout=60), client.create(timeout=60, autoPause=True)
    clock.now += 59
    assert client.seen(killed)[1] == client.seen(paused)[1] == "running"
    clock.now += 1
    assert client.seen(killed)[0] == 404
    assert client.seen(paused) == (200, "paused", "full")
    clock.now += 10**6
    assert client.seen(paused) == (200, "paused", "full")


def test_connecting_to_a_running_sandbox_never_brings_its_deadline_nearer_and_a_timeout_may(
    client: Client, server: Rehearsal, clock: Clock
) -> None:
    sandbox = client.create(timeout=600)
    box = server.world.boxes[sandbox]
    client("POST", f"/v2/sandboxes/{sandbox}/connect", json={"timeout": 60})
    assert box.ends == clock.now + 600
    assert client("POST", f"/sandboxes/{sandbox}/timeout", json={"timeout": 60}) == (204, None)
    assert box.ends == clock.now + 60
    assert client("POST", f"/sandboxes/{sandbox}/timeout", json={"timeout": 10**6})[0] == 400


def test_a_kill_that_its_node_never_heard_of_is_forgotten_and_executes(client: Client, server: Rehearsal) -> None:
    sandbox = client.create()
    machine = server.world.boxes[sandbox].machine
    machine.execute("(setsid sleep 5000 </dev/null >/dev/null 2>&1 &)", cwd=None, env={}, timeout=5)
    server.will(Fault("kill", Kind.HIDDEN))
    assert client("DELETE", f"/sandboxes/{sandbox}") == (204, None)
    assert client.seen(sandbox)[0] == 404
    assert client("GET", "/v2/sandboxes") == (200, [])
    assert server.world.executing(sandbox)


def test_an_unresponsive_agent_refuses_a_pause_of_the_disk_and_spoils_one_of_the_memory(
    client: Client, server: Rehearsal
) -> None:
    sandbox = client.create()
    for body in ({"memory": False}, {"requireHealthyGuest": True}):
        server.will(Fault("pause", Kind.UNRESPONSIVE))
        assert client("POST", f"/sandboxes/{sandbox}/pause", json=body)[0] == 503
        assert client.seen(sandbox)[1] == "running"
    server.will(Fault("pause", Kind.UNRESPONSIVE))
    assert client("POST", f"/sandboxes/{sandbox}/pause")[0] == 204
    assert client("GET", f"/sandboxes/{sandbox}")[1]["envdUnresponsiveAtPause"] is True
    status, error = client("POST", f"/v2/sandboxes/{sandbox}/connect", json={"timeout": 60})
    assert (status, error["error_code"]) == (409, "sandbox_snapshot_guest_agent_unresponsive")
    assert client("POST", f"/v2/sandboxes/{sandbox}/connect", json={"timeout": 60, "memory": False})[0] == 201
    assert "envdUnresponsiveAtPause" not in client("GET", f"/sandboxes/{sandbox}")[1]


def test_a_list_has_pages_the_newest_first_and_takes_no_nonsense(client: Client, clock: Clock) -> None:
    made = []
    for _ in range(3):
        clock.now += 1
        made.append(client.create())
    url = f"{client.server.url}/v2/sandboxes"
    first = requests.get(url, params={"limit": "2"}, headers={"X-API-KEY": KEY}, timeout=10)
    assert [item["sandboxID"] for item in first.json()] == [made[2], made[1]]
    token = first.headers["x-next-token"]
    rest = requests.get(url, params={"limit": "2", "nextToken": token}, headers={"X-API-KEY": KEY}, timeout=10)
    assert [item["sandboxID"] for item in rest.json()] == [made[0]]
    assert "x-next-token" not in rest.headers
    for nonsense in ({"limit": "101"}, {"state": "asleep"}, {"metadata": "x"}, {"nextToken": "x"}):
        assert client("GET", "/v2/sandboxes", params=nonsense)[0] == 400


def test_each_key_sees_its_team_alone_and_is_told_which(client: Client, server: Rehearsal) -> None:
    sandbox = client.create()
    server.world.add_key("other")
    other = Client(server, "other")
    assert other.seen(sandbox)[0] == 404
    assert other("GET", "/v2/sandboxes") == (200, [])
    assert other("DELETE", f"/sandboxes/{sandbox}")[0] == 404
    ours, theirs = server.world.keys[KEY], server.world.keys["other"]
    assert client("GET", f"/teams/{ours}/metrics") == (200, [])
    status, error = client("GET", f"/teams/{theirs}/metrics")
    assert (status, error["message"].startswith(f"You ({ours}) are not authorized")) == (403, True)
    assert Client(server, "nobody")("GET", "/v2/sandboxes")[0] == 401


def test_an_agent_listens_to_its_sandboxs_token_alone(client: Client, server: Rehearsal) -> None:
    sandbox = client.create()
    token = server.world.boxes[sandbox].token
    for asked, given, expected in ((sandbox, token, 204), (sandbox, "other", 401), ("i0", token, 502)):
        headers = {"E2b-Sandbox-Id": asked, "X-Access-Token": given}
        assert client("GET", "/health", headers=headers)[0] == expected


def test_a_world_that_is_kept_in_a_file_is_there_again(tmp_path: Path) -> None:
    options: dict[str, Any] = {"state": tmp_path / "world.json", "transition": 0.0}
    body = {"templateID": "base", "metadata": METADATA}
    world = World(tmp_path / "files", **options)
    team = world.add_key(KEY)
    made = world.create(team, body, "once", Outcome())
    world.close()
    again = World(tmp_path / "files", **options)
    try:
        assert again.get(team, made["sandboxID"])["metadata"] == METADATA
        assert again.create(team, body, "once", Outcome()) == made
    finally:
        again.close()


def test_the_command_serves_it_until_it_is_told_to_end() -> None:
    command = [sys.executable, "manage.py", "rehearse", "e2b", "--transition", "0", "--json"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        facts = json.loads(process.stdout.readline())
        sandbox = Sandbox.create(api_key=facts["key"], api_url=facts["url"], sandbox_url=facts["url"])
        assert sandbox.commands.run("echo served").stdout == "served\n"
        process.terminate()
        assert process.wait(20) == 0
