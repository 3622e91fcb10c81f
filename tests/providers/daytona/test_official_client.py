"""The rehearsal of Daytona is honest: the service's own clients get along with it as they do with the service.

`daytona` is what its users write, `daytona_api_client` what is generated from the service's own description: a field
that is missing or of another type is an error in its models. Both are imported by the tests that need them: they take
seconds to load, which a process that only collects the tests need not spend.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from providers.daytona.rehearsal import Fault, Kind, Rehearsal, rehearsing
from tests.providers.daytona.conftest import KEY

if TYPE_CHECKING:
    from daytona import Daytona
    from daytona_api_client import ApiClient, Sandbox

WAIT = 20


@pytest.fixture
def server() -> Iterator[Rehearsal]:
    with rehearsing(transition=0.02) as server:
        server.world.add_key(KEY)
        yield server


@pytest.fixture
def client(server: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> Daytona:
    from daytona import Daytona, DaytonaConfig

    for name in ("DAYTONA_API_KEY", "DAYTONA_API_URL", "DAYTONA_TARGET", "DAYTONA_JWT_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    return Daytona(DaytonaConfig(api_key=KEY, api_url=server.url, target="us"))


@pytest.fixture
def api(server: Rehearsal) -> Iterator[ApiClient]:
    from daytona_api_client import ApiClient, Configuration

    with ApiClient(Configuration(host=server.url, access_token=KEY)) as client:
        yield client


def until(reached: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_official_client_creates_gets_lists_stops_starts_and_deletes(server: Rehearsal, client: Daytona) -> None:
    from daytona import CreateSandboxFromSnapshotParams, DaytonaNotFoundError, ListSandboxesQuery

    params = CreateSandboxFromSnapshotParams(name="box", labels={"purpose": "test"}, auto_stop_interval=0)
    sandbox = client.create(params, timeout=WAIT)
    assert sandbox.state == "started"
    assert client.get("box").id == client.get(sandbox.id).id == sandbox.id
    assert [item.id for item in client.list(ListSandboxesQuery(labels={"purpose": "test"}))] == [sandbox.id]
    assert sandbox.process.exec("echo kept > note && (sleep 5000 >/dev/null 2>&1 &)").exit_code == 0
    assert server.world.executing(sandbox.id)
    sandbox.stop(timeout=WAIT)
    assert sandbox.state == "stopped"
    assert not server.world.executing(sandbox.id)
    sandbox.start(timeout=WAIT)
    assert sandbox.process.exec("cat note").result == "kept\n"
    sandbox.delete(timeout=WAIT)
    until(lambda: server.world.boxes[sandbox.id].state == "destroyed")
    with pytest.raises(DaytonaNotFoundError):
        client.get(sandbox.id)
    assert list(client.list()) == []


def test_the_official_client_sets_what_ends_a_sandbox_and_reads_it_back(client: Daytona) -> None:
    from daytona import CreateSandboxFromSnapshotParams

    sandbox = client.create(CreateSandboxFromSnapshotParams(ttl_minutes=60, auto_delete_interval=0), timeout=WAIT)
    assert sandbox.auto_destroy_at
    assert sandbox.auto_delete_interval == 0
    sandbox.set_ttl(0)
    sandbox.set_auto_delete_interval(-1)
    sandbox.refresh_data()
    assert not sandbox.auto_destroy_at
    assert sandbox.auto_delete_interval == -1


def test_the_official_client_reads_the_faults_as_what_they_stand_for(server: Rehearsal, client: Daytona) -> None:
    from daytona import DaytonaConflictError, DaytonaError, DaytonaNotFoundError, DaytonaRateLimitError

    sandbox = client.create(timeout=WAIT)
    faults = {
        DaytonaRateLimitError: Fault("stop", Kind.ANSWER, status=429, headers={"Retry-After": "7"}),
        DaytonaConflictError: Fault("stop", Kind.ANSWER, status=409, message="Sandbox state change in progress"),
        DaytonaNotFoundError: Fault("stop", Kind.ANSWER, status=404),
        DaytonaError: Fault("stop", Kind.ERROR, message="the runner failed"),
    }
    for error, fault in faults.items():
        server.will(fault)
        with pytest.raises(error):
            sandbox.stop(timeout=WAIT)
    sandbox.refresh_data()
    assert (sandbox.state, sandbox.error_reason) == ("error", "the runner failed")


def test_every_description_is_one_that_the_generated_models_take(server: Rehearsal, api: ApiClient) -> None:
    from daytona_api_client import ApiKeysApi, CreateSandbox, ForkSandbox, OrganizationsApi, SandboxApi, SandboxLabels

    sandboxes = SandboxApi(api)
    made = sandboxes.create_sandbox(CreateSandbox(name="box", labels={"a": "b"}))

    def becomes(state: str) -> Sandbox:
        until(lambda: sandboxes.get_sandbox(made.id).state == state)
        return sandboxes.get_sandbox(made.id)

    becomes("started")
    changes: list[tuple[Callable[[], object], str]] = [
        (lambda: sandboxes.pause_sandbox(made.id), "paused"),
        (lambda: sandboxes.start_sandbox(made.id), "started"),
        (lambda: sandboxes.stop_sandbox(made.id), "stopped"),
        (lambda: sandboxes.archive_sandbox(made.id), "archived"),
        (lambda: sandboxes.start_sandbox(made.id), "started"),
    ]
    for change, state in changes:
        change()
        seen = becomes(state)
        # What a model does not know it keeps aside: here nothing may be left over.
        assert seen.additional_properties == {}
    server.world.fail(made.id, recoverable=True)
    assert sandboxes.get_sandbox(made.id).recoverable
    sandboxes.recover_sandbox(made.id)
    becomes("started")
    fork = sandboxes.fork_sandbox(made.id, ForkSandbox(name="fork"))
    assert [child.id for child in sandboxes.get_sandbox_forks(made.id)] == [fork.id]
    assert sandboxes.replace_labels(made.id, SandboxLabels(labels={"c": "d"})).labels == {"c": "d"}
    for setting in ("set_autostop_interval", "set_auto_pause_interval", "set_auto_archive_interval", "set_ttl"):
        assert getattr(sandboxes, setting)(made.id, 30).additional_properties == {}
    assert sandboxes.get_toolbox_proxy_url(made.id).url == server.world.toolbox_url
    page = sandboxes.list_sandboxes(limit=1, labels=json.dumps({"c": "d"}), include_errored_deleted=True)
    assert [item.id for item in page.items] == [made.id]
    assert all(item.additional_properties == {} for item in page.items)
    organization = server.world.keys[KEY]
    assert ApiKeysApi(api).get_current_api_key().organization_id == organization
    assert OrganizationsApi(api).get_organization(organization).id == organization
