"""The rehearsal of Daytona itself: that it is as awkward as the service, seen over HTTP."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from providers.daytona.rehearsal import Fault, Kind, Rehearsal, rehearsing
from tests.providers.rehearsed import KEY, Clock

DAY = 24 * 3600


class Client:
    """The API as a client without any comfort sees it."""

    def __init__(self, server: Rehearsal, key: str = KEY) -> None:
        self.server = server
        self.key = key

    def __call__(self, method: str, path: str, **options: Any) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {self.key}"}
        response = requests.request(method, self.server.url + path, headers=headers, timeout=10, **options)
        return response.status_code, response.json() if response.content else None

    def create(self, **body: Any) -> str:
        status, made = self("POST", "/sandbox", json=body)
        assert status == 200
        return str(made["id"])

    def state(self, sandbox: str) -> str | int:
        status, seen = self("GET", f"/sandbox/{sandbox}")
        return str(seen["state"]) if status == 200 else status

    def listed(self, **query: str) -> list[tuple[str, str]]:
        status, page = self("GET", "/sandbox", params=query)
        assert status == 200
        return [(item["name"], item["state"]) for item in page["items"]]


@pytest.fixture
def server(clock: Clock) -> Iterator[Rehearsal]:
    with rehearsing(clock=clock, transition=10.0) as server:
        server.world.add_key(KEY)
        yield server


@pytest.fixture
def client(server: Rehearsal) -> Client:
    return Client(server)


def test_a_transition_takes_its_time_and_goes_through_its_states(client: Client, clock: Clock) -> None:
    sandbox = client.create(buildInfo={"dockerfileContent": "FROM x"})
    seen = [client.state(sandbox)]
    for _ in range(4):
        clock.now += 10
        seen.append(client.state(sandbox))
    assert seen == ["pending_build", "building_snapshot", "creating", "starting", "started"]


def test_a_change_during_another_is_a_conflict(client: Client) -> None:
    sandbox = client.create()
    for method, path in (("POST", "/start"), ("POST", "/stop"), ("DELETE", "")):
        status, error = client(method, f"/sandbox/{sandbox}{path}")
        assert (status, error["message"]) == (409, "Sandbox state change in progress")


def test_a_deletion_frees_the_name_at_once_and_hides_the_sandbox_at_its_end(client: Client, clock: Clock) -> None:
    sandbox = client.create(name="box")
    assert client("POST", "/sandbox", json={"name": "box"})[0] == 409
    clock.now += 30
    status, answer = client("DELETE", "/sandbox/box")
    assert (status, answer["state"], answer["desiredState"]) == (200, "destroying", "destroyed")
    assert answer["name"].startswith("DESTROYED_box_")
    assert client("DELETE", f"/sandbox/{sandbox}")[0] == 409
    second = client.create(name="box")
    assert second != sandbox
    clock.now += 10
    assert client.state(sandbox) == 404
    assert client("DELETE", f"/sandbox/{sandbox}")[0] == 404
    assert client.listed(name="box") == [("box", "starting")]


def test_a_failed_deletion_is_shown_by_one_list_alone(client: Client, server: Rehearsal, clock: Clock) -> None:
    sandbox = client.create(name="box")
    clock.now += 30
    server.will(Fault("delete", Kind.HIDDEN, sandbox=sandbox))
    assert client("DELETE", f"/sandbox/{sandbox}")[0] == 200
    clock.now += 10
    assert client.state(sandbox) == 404
    assert client.listed() == []
    [(name, state)] = client.listed(includeErroredDeleted="true")
    assert name.startswith("DESTROYED_box")
    assert state == "error"


def test_reads_may_be_old_until_somebody_changes_something(client: Client, server: Rehearsal, clock: Clock) -> None:
    server.world.cache, server.world.transition = 10.0, 4.0
    sandbox = client.create()
    assert client.state(sandbox) == "creating"
    clock.now += 9  # it has been started for a second
    assert client.state(sandbox) == "creating"
    clock.now += 1
    assert client.state(sandbox) == "started"
    client("POST", f"/sandbox/{sandbox}/stop")
    assert client.state(sandbox) == "stopping"


def test_lists_are_behind(client: Client, server: Rehearsal, clock: Clock) -> None:
    server.world.index_lag = 5.0
    client.create(name="box")
    assert client.listed() == []
    clock.now += 5
    assert client.listed() == [("box", "creating")]
    clock.now += 5
    assert client.listed() == [("box", "creating")]


def test_lists_flap(client: Client, server: Rehearsal) -> None:
    sandbox = client.create(name="box")
    client.create(name="other")
    server.will(Fault("list", Kind.LEFT_OUT, sandbox=sandbox))
    assert client.listed() == [("other", "creating")]
    assert sorted(client.listed()) == [("box", "creating"), ("other", "creating")]


def test_lists_have_pages_and_filters(client: Client, clock: Clock) -> None:
    for number in range(5):
        client.create(name=f"Box-{number}", labels={"parity": str(number % 2)})
        clock.now += 1
    names: list[str] = []
    cursor: str | None = ""
    while cursor is not None:
        _, page = client("GET", "/sandbox", params={"limit": "2", **({"cursor": cursor} if cursor else {})})
        names += [item["name"] for item in page["items"]]
        cursor = page["nextCursor"]
    assert names == [f"Box-{number}" for number in range(5)]
    assert [name for name, _ in client.listed(labels='{"parity": "1"}')] == ["Box-1", "Box-3"]
    assert len(client.listed(name="box-")) == 5
    assert client.listed(name="ox-") == []
    assert client("GET", "/sandbox", params={"limit": "201"})[0] == 400


def test_the_service_stops_archives_and_deletes_by_itself(client: Client, clock: Clock) -> None:
    sandbox = client.create(autoArchiveInterval=60)
    clock.now += 30
    assert client.state(sandbox) == "started"
    clock.now += 15 * 60
    assert client.state(sandbox) == "stopping"
    clock.now += 10
    assert client.state(sandbox) == "stopped"
    clock.now += 3600
    assert client.state(sandbox) == "archiving"
    clock.now += 10
    assert client.state(sandbox) == "archived"
    ephemeral = client.create(autoDeleteInterval=0)
    clock.now += 30
    _, answer = client("POST", f"/sandbox/{ephemeral}/stop")
    assert answer["desiredState"] == "destroyed"


def test_a_lifetime_ends_a_stopped_sandbox_too(client: Client, clock: Clock) -> None:
    sandbox = client.create(ttlMinutes=60, autoStopInterval=0)
    clock.now += 30
    client("POST", f"/sandbox/{sandbox}/stop")
    clock.now += 10
    assert client.state(sandbox) == "stopped"
    clock.now += 3600
    assert client.state(sandbox) == "destroying"


def test_an_evicted_sandbox_can_be_read_for_a_day(client: Client, server: Rehearsal, clock: Clock) -> None:
    sandbox = client.create()
    server.world.evict(sandbox)
    assert client.state(sandbox) == "destroyed"
    clock.now += DAY
    assert client.state(sandbox) == 404


def test_each_key_sees_its_organisation_alone(client: Client, server: Rehearsal) -> None:
    sandbox = client.create(name="box")
    server.world.add_key("other")
    other = Client(server, "other")
    assert other.state(sandbox) == 404
    assert other.listed() == []
    other.create(name="box")
    assert client("GET", "/api-keys/current")[1]["organizationId"] == server.world.keys[KEY]
    assert Client(server, "nobody")("GET", "/sandbox")[0] == 401


def test_faults_are_scripted_over_http_too(client: Client, server: Rehearsal) -> None:
    faults = f"{server.root}/rehearsal/faults"
    fault = {"call": "list", "kind": "answer", "status": 429, "headers": {"Retry-After": "9"}, "times": 2}
    assert requests.post(faults, json=fault, timeout=10).status_code == 201
    assert client("GET", "/sandbox")[0] == 429
    requests.delete(faults, timeout=10)
    assert client("GET", "/sandbox")[0] == 200
    assert requests.post(faults, json={"call": "list", "kind": "nonsense"}, timeout=10).status_code == 400


def test_it_needs_the_standard_library_alone() -> None:
    script = (
        "import sys; before = set(sys.modules); import importlib.util;"
        "sys.modules['providers.daytona'] = type(sys)('providers.daytona');"
        "sys.modules['providers.daytona'].__path__ = [sys.argv[1]];"
        "import providers.daytona.rehearsal;"
        "names = {name.partition('.')[0] for name in set(sys.modules) - before} - {'providers'};"
        "print(*sorted(name for name in names if name not in sys.stdlib_module_names))"
    )
    folder = str(__import__("providers.daytona", fromlist=["x"]).__path__[0])
    done = subprocess.run(
        [sys.executable, "-c", script, folder], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == []
