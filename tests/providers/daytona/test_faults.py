"""The Daytona provider where the service fails: what its users ran into (K-01 to K-10), on the rehearsal server."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from providers.contract import (
    Busy,
    Command,
    Ended,
    ErrorKind,
    Gone,
    Running,
    Stopped,
    Unknown,
)
from providers.daytona import DaytonaProvider, provider
from providers.daytona.rehearsal import Fault, Kind, Rehearsal
from providers.daytona.schemas import DaytonaConfig, DaytonaEndpoint
from tests.providers.daytona.conftest import MARKS, WITHIN, busy_with_work
from tests.providers.rehearsed import KEY, Clock, refused

ABSENT = "00000000-0000-4000-8000-000000000000"
IN_PROGRESS = "Sandbox state change in progress"


CALLS: dict[str, Callable[[DaytonaProvider, str, float], Any]] = {
    "key": lambda p, _, within: p.identify(within=within),
    "create": lambda p, _, within: p.create("another", MARKS, DaytonaConfig(), within=within),
    "get": lambda p, sandbox, within: p.inspect(sandbox, within=within),
    "stop": lambda p, sandbox, within: p.stop(sandbox, grace=1, within=within),
    "delete": lambda p, sandbox, within: p.delete(sandbox, within=within),
    "execute": lambda p, sandbox, within: p.execute(sandbox, Command(("true",), timeout=1), within=within),
    "list": lambda p, _, within: p.list(MARKS, within=within),
}
every_call = pytest.mark.parametrize("call", sorted(CALLS))


# What is not there.


def test_a_sandbox_that_is_hidden_after_a_failed_deletion_is_not_gone(
    server: Rehearsal, daytona: DaytonaProvider, create: Callable[..., str]
) -> None:
    sandbox = create()
    busy_with_work(daytona, server, sandbox)
    server.will(Fault("delete", Kind.HIDDEN))
    daytona.delete(sandbox, within=WITHIN)
    assert refused(lambda: daytona.stop(sandbox, grace=1, within=WITHIN)).kind is ErrorKind.NOT_FOUND
    for _ in range(2):
        seen = daytona.inspect(sandbox, within=WITHIN)
        assert isinstance(seen, Unknown)
        assert "listed as error" in seen.reason
        daytona.delete(sandbox, within=WITHIN)  # answered with 404, which changes nothing
    assert server.world.executing(sandbox)
    listing = daytona.list(MARKS, within=WITHIN)
    assert [resource.resource_id for resource in listing.resources] == [sandbox]
    assert daytona.find("box", {}, within=WITHIN) is None


def test_an_absence_is_believed_only_with_a_list_to_its_end(server: Rehearsal, daytona: DaytonaProvider) -> None:
    assert isinstance(daytona.inspect(ABSENT, within=WITHIN), Gone)
    assert server.asked[-2:] == [("get", ABSENT), ("list", "")]
    server.will(Fault("list", Kind.ANSWER, status=503))
    assert refused(lambda: daytona.inspect(ABSENT, within=WITHIN)).kind is ErrorKind.SERVER


def test_an_absence_beside_a_list_that_is_not_complete_is_unknown(
    daytona: DaytonaProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provider, "_PAGES", 0)
    assert isinstance(daytona.inspect(ABSENT, within=WITHIN), Unknown)


def test_a_404_beside_a_list_that_still_shows_the_sandbox_is_not_gone(
    server: Rehearsal, daytona: DaytonaProvider, create: Callable[..., str]
) -> None:
    sandbox = create()
    server.will(Fault("get", Kind.ANSWER, status=404, message=f"Sandbox with ID or name {sandbox} not found"))
    assert isinstance(daytona.inspect(sandbox, within=WITHIN), Unknown)


def test_a_404_of_somebody_else_than_the_service_says_nothing(
    server: Rehearsal, daytona: DaytonaProvider, create: Callable[..., str]
) -> None:
    sandbox = create()
    server.will(Fault("*", Kind.ANSWER, times=2, status=404, message="Cannot GET /api/sandbox"))
    assert refused(lambda: daytona.inspect(sandbox, within=WITHIN)).kind is ErrorKind.PROTOCOL
    assert refused(lambda: daytona.delete(sandbox, within=WITHIN)).kind is ErrorKind.PROTOCOL


def test_a_lost_sandbox_that_is_still_described_is_gone_by_its_state(
    server: Rehearsal, daytona: DaytonaProvider, create: Callable[..., str]
) -> None:
    sandbox = create()
    server.world.evict(sandbox)
    assert isinstance(daytona.inspect(sandbox, within=WITHIN), Gone)
    assert refused(lambda: daytona.stop(sandbox, grace=1, within=WITHIN)).kind is ErrorKind.NOT_FOUND
    assert server.asked[-1] == ("get", sandbox)


def test_a_name_is_free_while_the_old_sandbox_still_executes(
    server: Rehearsal, daytona: DaytonaProvider, create: Callable[..., str]
) -> None:
    old = create()
    busy_with_work(daytona, server, old)
    server.will(Fault("delete", Kind.STUCK))
    daytona.delete(old, within=WITHIN)
    new = create()
    assert new != old
    assert server.world.executing(old)
    assert isinstance(daytona.inspect(old, within=WITHIN), Busy)
    assert isinstance(daytona.inspect(new, within=WITHIN), Running)


def test_a_sandbox_whose_name_is_our_id_is_never_taken_for_it(daytona: DaytonaProvider, server: Rehearsal) -> None:
    other = daytona.create(ABSENT, MARKS, DaytonaConfig(), within=WITHIN).resource.resource_id
    assert refused(lambda: daytona.inspect(ABSENT, within=WITHIN)).kind is ErrorKind.PROTOCOL
    assert refused(lambda: daytona.stop(ABSENT, grace=1, within=WITHIN)).kind is ErrorKind.PROTOCOL
    assert isinstance(daytona.inspect(other, within=WITHIN), Running)


def test_an_id_is_no_name(daytona: DaytonaProvider, create: Callable[..., str]) -> None:
    assert daytona.find(create(), {}, within=WITHIN) is None


# Transitions.


@pytest.mark.parametrize("status", [400, 409])
@pytest.mark.parametrize("call", ["start", "stop", "delete"])
def test_a_state_change_in_progress_is_busy_and_no_success(
    server: Rehearsal, daytona: DaytonaProvider, create: Callable[..., str], call: str, status: int
) -> None:
    sandbox = create()
    if call == "start":
        daytona.stop(sandbox, grace=1, within=WITHIN)
    server.will(Fault(call, Kind.ANSWER, status=status, message=IN_PROGRESS))
    calls = {**CALLS, "start": lambda p, sandbox, within: p.start(sandbox, within=within)}
    assert refused(lambda: calls[call](daytona, sandbox, WITHIN)).kind is ErrorKind.BUSY


def test_a_sandbox_that_is_stuck_while_starting_is_busy_for_as_long_as_it_takes(
    server: Rehearsal, daytona: DaytonaProvider, create: Callable[..., str], clock: Clock
) -> None:
    sandbox = create()
    daytona.stop(sandbox, grace=1, within=WITHIN)
    server.will(Fault("start", Kind.STUCK))
    daytona.start(sandbox, within=WITHIN)
    clock.now += 12 * 3600
    assert isinstance(daytona.inspect(sandbox, within=WITHIN), Busy)
    assert refused(lambda: daytona.stop(sandbox, grace=1, within=WITHIN)).kind is ErrorKind.BUSY
    assert refused(lambda: daytona.delete(sandbox, within=WITHIN)).kind is ErrorKind.BUSY
    server.world.unstick(sandbox)
    daytona.delete(sandbox, within=WITHIN)
    assert isinstance(daytona.inspect(sandbox, within=WITHIN), Gone)


def test_an_accepted_deletion_is_not_a_finished_one(
    server: Rehearsal, daytona: DaytonaProvider, create: Callable[..., str], clock: Clock
) -> None:
    sandbox = create()
    busy_with_work(daytona, server, sandbox)
    server.world.transition = 60.0
    daytona.delete(sandbox, within=WITHIN)
    assert daytona.inspect(sandbox, within=WITHIN) == Busy(
        daytona.list(MARKS, within=WITHIN).resources[0], "destroying"
    )
    assert refused(lambda: daytona.delete(sandbox, within=WITHIN)).kind is ErrorKind.BUSY
    assert server.world.executing(sandbox)
    clock.now += 61
    assert isinstance(daytona.inspect(sandbox, within=WITHIN), Gone)
    assert not server.world.executing(sandbox)


def test_a_paused_sandbox_is_suspended_and_its_stop_ends_it(
    server: Rehearsal, daytona: DaytonaProvider, create: Callable[..., str]
) -> None:
    sandbox = create()
    busy_with_work(daytona, server, sandbox)
    organization = server.world.keys[KEY]
    server.world.act(organization, sandbox, "pause", server.world.boxes[sandbox].outcome)
    seen = daytona.inspect(sandbox, within=WITHIN)
    assert isinstance(seen, Stopped)
    assert seen.ended is Ended.SUSPENDED
    assert server.world.executing(sandbox)
    daytona.stop(sandbox, grace=0, within=WITHIN)
    seen = daytona.inspect(sandbox, within=WITHIN)
    assert isinstance(seen, Stopped)
    assert seen.ended is Ended.KILLED
    assert not server.world.executing(sandbox)


# Errors.


def test_an_errored_sandbox_is_not_stopped_and_can_be_deleted(
    server: Rehearsal, daytona: DaytonaProvider, create: Callable[..., str]
) -> None:
    sandbox = create()
    busy_with_work(daytona, server, sandbox)
    server.world.fail(sandbox, reason="no space left on device")
    assert refused(lambda: daytona.stop(sandbox, grace=1, within=WITHIN)).kind is ErrorKind.REFUSED
    seen = daytona.inspect(sandbox, within=WITHIN)
    assert isinstance(seen, Unknown)
    assert seen.reason == "error: no space left on device"
    assert ("stop", sandbox) not in server.asked
    assert server.world.executing(sandbox)
    daytona.delete(sandbox, within=WITHIN)
    assert isinstance(daytona.inspect(sandbox, within=WITHIN), Gone)
    assert not server.world.executing(sandbox)


def test_a_stop_that_ends_in_an_error_proves_nothing(
    server: Rehearsal, daytona: DaytonaProvider, create: Callable[..., str]
) -> None:
    sandbox = create()
    busy_with_work(daytona, server, sandbox)
    server.will(Fault("stop", Kind.ERROR))
    daytona.stop(sandbox, grace=1, within=WITHIN)
    assert isinstance(daytona.inspect(sandbox, within=WITHIN), Unknown)
    assert server.world.executing(sandbox)


# Creations.


@pytest.mark.parametrize(
    "fault",
    [
        Fault("create", Kind.LOST),
        Fault("create", Kind.ANSWER, status=502, effect=True),
        Fault("create", Kind.ANSWER, status=400, effect=True),
        Fault("create", Kind.ANSWER, status=408, effect=True),
    ],
    ids=["lost", "502", "400", "408"],
)
def test_a_creation_that_fails_after_its_effect_claims_nothing_and_is_found(
    server: Rehearsal, daytona: DaytonaProvider, fault: Fault
) -> None:
    server.will(fault)
    error = refused(lambda: daytona.create("box", MARKS, DaytonaConfig(), within=WITHIN))
    assert error.kind is not ErrorKind.NAME_TAKEN
    assert not error.nothing_allocated
    found = daytona.find("box", {}, within=WITHIN)
    assert found is not None
    assert dict(found.marks) == MARKS
    again = refused(lambda: daytona.create("box", MARKS, DaytonaConfig(), within=WITHIN))
    assert (again.kind, again.nothing_allocated) == (ErrorKind.NAME_TAKEN, True)


@pytest.mark.parametrize("kind", [Kind.STUCK, Kind.ERROR, Kind.DISK_FULL])
def test_a_creation_answers_its_id_whatever_becomes_of_it(
    server: Rehearsal, daytona: DaytonaProvider, kind: Kind
) -> None:
    server.will(Fault("create", kind))
    created = daytona.create("box", MARKS, DaytonaConfig(), within=WITHIN)
    assert not created.ready
    assert server.asked == [("create", "")]
    assert daytona.find("box", {}, within=WITHIN) == created.resource
    seen = daytona.inspect(created.resource.resource_id, within=WITHIN)
    assert isinstance(seen, Busy if kind is Kind.STUCK else Unknown)


def test_a_creation_that_takes_its_time_runs_later(server: Rehearsal, daytona: DaytonaProvider, clock: Clock) -> None:
    server.world.transition = 30.0
    created = daytona.create("box", MARKS, DaytonaConfig(image="debian:12"), within=WITHIN)
    assert not created.ready
    sandbox = created.resource.resource_id
    states = []
    while not isinstance(seen := daytona.inspect(sandbox, within=WITHIN), Running):
        assert isinstance(seen, Busy)
        states.append(seen.transition)
        clock.now += 30
    assert states == ["pending_build", "building_snapshot", "creating", "starting"]


@pytest.mark.parametrize(("seconds", "minutes"), [(None, None), (59, None), (60, 1), (150, 2)])
def test_a_lifetime_is_the_services_own_deadline_in_whole_minutes(
    server: Rehearsal, daytona: DaytonaProvider, clock: Clock, seconds: int | None, minutes: int | None
) -> None:
    """S-279."""
    created = daytona.create("box", MARKS, DaytonaConfig(lifetime_seconds=seconds), within=WITHIN)
    sandbox = created.resource.resource_id
    assert server.world.boxes[sandbox].body.get("ttlMinutes") == minutes
    expected = None if minutes is None else datetime.fromtimestamp(clock.now + 60 * minutes, UTC)
    assert created.resource.expires_at == expected
    clock.now += 60 * (minutes or 1000) + 1
    assert isinstance(daytona.inspect(sandbox, within=WITHIN), Running if minutes is None else Gone)


def test_a_sandbox_is_made_to_be_kept(
    server: Rehearsal, daytona: DaytonaProvider, create: Callable[..., str], clock: Clock
) -> None:
    sandbox = create(image="debian:12", cpu=2, env={"PURPOSE": "test"})
    body = server.world.boxes[sandbox].body
    assert body["buildInfo"] == {"dockerfileContent": "FROM debian:12\n"}
    assert (body["cpu"], body["autoStopInterval"], body["autoPauseInterval"], body["autoDeleteInterval"]) == (
        2,
        0,
        0,
        -1,
    )
    clock.now += 3 * 24 * 3600
    assert isinstance(daytona.inspect(sandbox, within=WITHIN), Running)
    daytona.stop(sandbox, grace=1, within=WITHIN)
    clock.now += 60 * 24 * 3600
    assert isinstance(daytona.inspect(sandbox, within=WITHIN), Stopped)


def test_resources_beside_a_snapshot_are_dropped(server: Rehearsal, create: Callable[..., str]) -> None:
    """S-278."""
    body = server.world.boxes[create(snapshot="base", cpu=2)].body
    assert body["snapshot"] == "base"
    assert "cpu" not in body


# Failures of any call.


@every_call
@pytest.mark.parametrize(
    ("status", "headers", "kind", "retry_after"),
    [
        (401, {}, ErrorKind.AUTHORISATION, None),
        (403, {}, ErrorKind.AUTHORISATION, None),
        (429, {"Retry-After-sandbox-lifecycle": "7"}, ErrorKind.RATE_LIMITED, 7.0),
        (500, {}, ErrorKind.SERVER, None),
        (503, {"Retry-After": "3"}, ErrorKind.SERVER, 3.0),
        (418, {}, ErrorKind.PROTOCOL, None),
        (302, {"Location": "http://127.0.0.1:1/"}, ErrorKind.PROTOCOL, None),
    ],
)
def test_a_failure_has_its_kind_and_is_not_tried_again(
    server: Rehearsal,
    daytona: DaytonaProvider,
    create: Callable[..., str],
    call: str,
    status: int,
    headers: dict[str, str],
    kind: ErrorKind,
    retry_after: float | None,
) -> None:
    sandbox = create()
    server.asked.clear()
    server.will(Fault(call, Kind.ANSWER, status=status, headers=headers))
    error = refused(lambda: CALLS[call](daytona, sandbox, WITHIN))
    assert (error.kind, error.retry_after) == (kind, retry_after), error
    assert not error.nothing_allocated
    assert [asked for asked, _ in server.asked].count(call) == 1


@every_call
@pytest.mark.parametrize("kind", [Kind.LOST, Kind.RESET])
def test_a_connection_that_breaks_is_said_to_have_broken(
    server: Rehearsal, daytona: DaytonaProvider, create: Callable[..., str], call: str, kind: Kind
) -> None:
    sandbox = create()
    server.will(Fault(call, kind))
    error = refused(lambda: CALLS[call](daytona, sandbox, WITHIN))
    assert error.kind is ErrorKind.CONNECTION
    assert not error.nothing_allocated


@every_call
def test_a_slow_answer_holds_nobody_beyond_the_bound(
    server: Rehearsal, daytona: DaytonaProvider, create: Callable[..., str], call: str
) -> None:
    sandbox = create()
    server.will(Fault(call, Kind.DELAY, seconds=10))
    started = time.monotonic()
    assert refused(lambda: CALLS[call](daytona, sandbox, 0.3)).kind is ErrorKind.TIMEOUT
    assert time.monotonic() - started < 1.3


# Identity, pages, and where the key goes.


def test_another_organisation_behind_the_key_is_another_account(server: Rehearsal, create: Callable[..., str]) -> None:
    sandbox = create()
    daytona = DaytonaProvider(DaytonaEndpoint(url=server.url, organization_id=server.world.keys[KEY]), KEY)
    assert daytona.identify(within=WITHIN) == f"daytona {server.world.keys[KEY]}"
    assert isinstance(daytona.inspect(sandbox, within=WITHIN), Running)
    server.world.add_key(KEY)
    assert refused(lambda: daytona.identify(within=WITHIN)).kind is ErrorKind.IDENTITY
    other = DaytonaProvider(DaytonaEndpoint(url=server.url), KEY)
    made = other.create("theirs", MARKS, DaytonaConfig(), within=WITHIN).resource.resource_id
    for call in (
        lambda: daytona.inspect(made, within=WITHIN),
        lambda: daytona.list(MARKS, within=WITHIN),
        lambda: daytona.find("theirs", {}, within=WITHIN),
        lambda: daytona.stop(made, grace=1, within=WITHIN),
        lambda: daytona.create("ours", MARKS, DaytonaConfig(), within=WITHIN),
    ):
        assert refused(call).kind is ErrorKind.IDENTITY
    assert isinstance(other.inspect(made, within=WITHIN), Running)


def test_every_page_of_a_list_is_read(
    daytona: DaytonaProvider, create: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = {create(f"box-{number}") for number in range(5)}
    monkeypatch.setattr(provider, "_PAGE", 2)
    listing = daytona.list(MARKS, within=WITHIN)
    assert {resource.resource_id for resource in listing.resources} == made
    assert listing.complete
    monkeypatch.setattr(provider, "_PAGES", 2)
    assert not daytona.list(MARKS, within=WITHIN).complete


@pytest.mark.parametrize(
    ("secret", "kind"),
    [(None, ErrorKind.NOT_READY), ("", ErrorKind.NOT_READY), ("two\nlines", ErrorKind.AUTHORISATION)],
)
@every_call
def test_without_a_usable_key_nothing_is_sent(
    server: Rehearsal, call: str, secret: str | None, kind: ErrorKind
) -> None:
    daytona = DaytonaProvider(DaytonaEndpoint(url=server.url), secret)
    error = refused(lambda: CALLS[call](daytona, ABSENT, WITHIN))
    assert error.kind is kind
    assert "lines" not in str(error)
    assert server.asked == []


def test_no_file_of_the_user_puts_another_secret_in_place_of_the_key(
    daytona: DaytonaProvider, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login somebody password else\n", encoding="utf-8")
    monkeypatch.setenv("NETRC", str(netrc))
    assert daytona.identify(within=WITHIN)


@pytest.mark.parametrize("url", ["http://elsewhere.example/toolbox", "ftp://127.0.0.1/", "", "https://user@host/"])
def test_the_key_is_not_sent_in_the_clear_to_an_address_that_an_answer_names(
    server: Rehearsal, daytona: DaytonaProvider, create: Callable[..., str], url: str
) -> None:
    sandbox = create()
    server.world.toolbox_url = url
    server.asked.clear()
    assert refused(lambda: CALLS["execute"](daytona, sandbox, WITHIN)).kind is ErrorKind.PROTOCOL
    assert server.asked == [("get", sandbox)]


# Commands.


def test_a_command_that_dies_by_a_signal_says_so(daytona: DaytonaProvider, create: Callable[..., str]) -> None:
    done = daytona.execute(create(), Command(("sh", "-c", "echo last; kill -9 $$"), timeout=5), within=WITHIN)
    assert (done.exit_code, done.signal, done.stdout, done.timed_out) == (None, 9, b"last\n", False)


def test_a_commands_files_are_cleared_away(
    server: Rehearsal, daytona: DaytonaProvider, create: Callable[..., str]
) -> None:
    sandbox = create()
    home = server.world.boxes[sandbox].machine.home
    for seconds in (5, 0.2):
        command = Command(("sh", "-c", "cat; sleep 1"), stdin=b"input", timeout=seconds)
        assert daytona.execute(sandbox, command, within=WITHIN).stdout == b"input"
    assert [path for path in home.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    "command",
    [
        Command(()),
        Command(("a\0b",)),
        Command(("a",), env={"": "x"}),
        Command(("a",), env={"A=B": "x"}),
        Command(("x" * 100_001,)),
    ],
)
def test_a_command_that_is_none_is_refused(
    daytona: DaytonaProvider, create: Callable[..., str], command: Command
) -> None:
    sandbox = create()
    assert refused(lambda: daytona.execute(sandbox, command, within=WITHIN)).kind is ErrorKind.INVALID


def test_a_sandbox_that_lacks_the_programs_says_so(
    server: Rehearsal, daytona: DaytonaProvider, create: Callable[..., str]
) -> None:
    sandbox = create(env={"PATH": "/nowhere"})
    assert refused(lambda: CALLS["execute"](daytona, sandbox, WITHIN)).kind is ErrorKind.REFUSED
