"""The E2B provider where the service fails, and what it must never do by the way, on the rehearsal server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pytest

from providers.contract import (
    MARK_INSTALLATION,
    Busy,
    Command,
    Ended,
    ErrorKind,
    Gone,
    Running,
    Stopped,
    Unknown,
)
from providers.e2b import E2BProvider, envd, provider
from providers.e2b.rehearsal import Rehearsal
from providers.e2b.schemas import E2BConfig, E2BEndpoint
from providers.failures import Call
from providers.rehearsing import Answer, Fault, Kind
from tests.providers.rehearsed import KEY, Clock, refused

WITHIN = 20.0
MARKS = {MARK_INSTALLATION: "e2b-tests"}
ABSENT = "i" + "0" * 19
DAEMON = Command(("sh", "-c", "(setsid sleep 5000 </dev/null >/dev/null 2>&1 &) ; exit 0"), timeout=5)


@pytest.fixture
def e2b(server: Rehearsal) -> E2BProvider:
    return E2BProvider(E2BEndpoint(url=server.url, sandbox_url=server.url), KEY)


@pytest.fixture
def create(e2b: E2BProvider) -> Callable[..., str]:
    def create(name: str = "box", **config: Any) -> str:
        return e2b.create(name, MARKS, E2BConfig(**config), within=WITHIN).resource.resource_id

    return create


@pytest.fixture
def at_work(e2b: E2BProvider, server: Rehearsal, create: Callable[..., str]) -> str:
    """Make a sandbox with a daemon in it."""
    sandbox = create()
    e2b.execute(sandbox, DAEMON, within=WITHIN)
    assert server.world.executing(sandbox)
    return sandbox


def pause_with_memory(server: Rehearsal, sandbox: str, **faults: bool) -> None:
    """Pause as somebody else would: with memory."""
    world = server.world
    outcome = {"unresponsive": False, **faults}
    world.pause(world.keys[KEY], sandbox, memory=True, strict=False, outcome=world.boxes[sandbox].outcome, **outcome)


# What a stop is.


def test_a_stop_pauses_the_disk_alone_and_ends_every_process(server: Rehearsal, e2b: E2BProvider, at_work: str) -> None:
    e2b.stop(at_work, grace=5, within=WITHIN)
    seen = e2b.inspect(at_work, within=WITHIN)
    assert isinstance(seen, Stopped)
    assert seen.ended is Ended.KILLED
    assert seen.resource.expires_at is None
    assert server.world.boxes[at_work].pause_mode == "filesystem"
    assert not server.world.executing(at_work)


def test_a_pause_with_memory_is_a_suspension_and_a_stop_leaves_it(
    server: Rehearsal, e2b: E2BProvider, at_work: str
) -> None:
    pause_with_memory(server, at_work)
    server.asked.clear()
    e2b.stop(at_work, grace=0, within=WITHIN)
    assert server.asked == [("get", at_work)]
    seen = e2b.inspect(at_work, within=WITHIN)
    assert isinstance(seen, Stopped)
    assert seen.ended is Ended.SUSPENDED
    assert server.world.executing(at_work)  # frozen, and there
    e2b.start(at_work, within=WITHIN)
    assert isinstance(e2b.inspect(at_work, within=WITHIN), Running)


def test_a_pause_that_has_not_ended_is_no_stop(server: Rehearsal, e2b: E2BProvider, at_work: str, clock: Clock) -> None:
    server.world.transition = 10.0
    stopping = threading.Thread(target=lambda: e2b.stop(at_work, grace=0, within=WITHIN))
    stopping.start()
    try:
        while server.world.boxes[at_work].state != "pausing":
            assert stopping.is_alive()
            time.sleep(0.01)
        seen = e2b.inspect(at_work, within=WITHIN)
        assert isinstance(seen, Busy)
        assert server.world.executing(at_work)
        assert refused(lambda: e2b.stop(at_work, grace=0, within=WITHIN)).kind is ErrorKind.BUSY
        assert refused(lambda: e2b.start(at_work, within=WITHIN)).kind is ErrorKind.BUSY
        assert refused(lambda: e2b.delete(at_work, within=WITHIN)).kind is ErrorKind.BUSY
        assert refused(lambda: e2b.extend(at_work, 60, within=WITHIN)).kind is ErrorKind.REFUSED
    finally:
        clock.now += 10
        stopping.join()
    assert isinstance(e2b.inspect(at_work, within=WITHIN), Stopped)


def test_a_pause_that_fails_leaves_a_running_sandbox(server: Rehearsal, e2b: E2BProvider, at_work: str) -> None:
    server.will(Fault("pause", Kind.ERROR))
    assert refused(lambda: e2b.stop(at_work, grace=0, within=WITHIN)).kind is ErrorKind.SERVER
    assert isinstance(e2b.inspect(at_work, within=WITHIN), Running)
    assert server.world.executing(at_work)


def test_already_paused_is_success(server: Rehearsal, e2b: E2BProvider, at_work: str) -> None:
    # Somebody else paused it between our look and our pause.
    server.will(Fault("pause", Kind.ANSWER, status=409, message="is already paused", effect=True))
    e2b.stop(at_work, grace=0, within=WITHIN)
    assert [call for call, _ in server.asked[-3:]] == ["get", "pause", "get"]
    # Any other conflict is a transition that goes on.
    e2b.start(at_work, within=WITHIN)
    server.will(Fault("pause", Kind.ANSWER, status=409, message="is already paused"))
    assert refused(lambda: e2b.stop(at_work, grace=0, within=WITHIN)).kind is ErrorKind.BUSY


def test_an_agent_that_does_not_answer_refuses_the_stop_and_blames_no_account(
    server: Rehearsal, e2b: E2BProvider, at_work: str
) -> None:
    server.will(Fault("pause", Kind.UNRESPONSIVE))
    assert refused(lambda: e2b.stop(at_work, grace=0, within=WITHIN)).kind is ErrorKind.REFUSED
    assert isinstance(e2b.inspect(at_work, within=WITHIN), Running)


def test_a_deadline_that_would_kill_before_the_pause_is_moved_first(
    server: Rehearsal, e2b: E2BProvider, at_work: str, clock: Clock
) -> None:
    box = server.world.boxes[at_work]
    clock.now = box.ends - 30  # by the service's clock, which is not this host's
    e2b.stop(at_work, grace=0, within=WITHIN)
    assert [call for call, _ in server.asked[-4:]] == ["get", "timeout", "get", "pause"]
    assert box.ends > clock.now + 60


def test_a_deadline_that_cannot_be_moved_stops_nothing(
    server: Rehearsal, e2b: E2BProvider, at_work: str, clock: Clock
) -> None:
    clock.now = server.world.boxes[at_work].ends - 30
    server.will(Fault("timeout", Kind.ANSWER, status=204))
    assert refused(lambda: e2b.stop(at_work, grace=0, within=WITHIN)).kind is ErrorKind.REFUSED
    assert ("pause", at_work) not in server.asked
    assert server.world.executing(at_work)


# Starting.


def test_a_start_sets_the_lifetime_of_the_configuration_again(
    server: Rehearsal, e2b: E2BProvider, create: Callable[..., str], clock: Clock
) -> None:
    sandbox = create(lifetime_seconds=7200)
    e2b.stop(sandbox, grace=0, within=WITHIN)
    clock.now += 50_000
    e2b.start(sandbox, within=WITHIN)
    seen = e2b.inspect(sandbox, within=WITHIN)
    assert isinstance(seen, Running)
    assert seen.resource.expires_at == datetime.fromtimestamp(clock.now + 7200, UTC)


def test_starting_a_running_sandbox_does_not_touch_its_deadline(
    server: Rehearsal, e2b: E2BProvider, at_work: str, clock: Clock
) -> None:
    before = server.world.boxes[at_work].ends
    clock.now += 60
    server.asked.clear()
    e2b.start(at_work, within=WITHIN)
    assert (server.world.boxes[at_work].ends, server.asked) == (before, [("get", at_work)])


def test_memory_that_is_known_to_be_unusable_is_not_restored(server: Rehearsal, e2b: E2BProvider, at_work: str) -> None:
    pause_with_memory(server, at_work, unresponsive=True)
    server.asked.clear()
    e2b.start(at_work, within=WITHIN)
    assert server.asked == [("get", at_work), ("connect", at_work)]
    assert isinstance(e2b.inspect(at_work, within=WITHIN), Running)
    assert not server.world.executing(at_work)


def test_a_resume_is_tried_once_more_without_memory_where_the_service_asks_for_it(
    server: Rehearsal, e2b: E2BProvider, at_work: str
) -> None:
    pause_with_memory(server, at_work)
    code = {"error_code": "sandbox_snapshot_guest_agent_unresponsive"}
    server.will(Fault("connect", Kind.ANSWER, status=409, details=code))
    e2b.start(at_work, within=WITHIN)
    assert not server.world.executing(at_work)
    e2b.stop(at_work, grace=0, within=WITHIN)
    server.asked.clear()
    server.will(Fault("connect", Kind.ANSWER, status=409, details=code, times=5))
    assert refused(lambda: e2b.start(at_work, within=WITHIN)).kind is ErrorKind.REFUSED
    assert [call for call, _ in server.asked] == ["get", "connect", "connect"]


def test_a_sandbox_that_can_never_be_resumed_is_said_to_be_so(
    server: Rehearsal, e2b: E2BProvider, create: Callable[..., str]
) -> None:
    sandbox = create()
    e2b.stop(sandbox, grace=0, within=WITHIN)
    code = {"error_code": "sandbox_create_refused"}
    server.will(Fault("connect", Kind.ANSWER, status=500, details=code, headers={"Should-Retry": "false"}))
    assert refused(lambda: e2b.start(sandbox, within=WITHIN)).kind is ErrorKind.CANNOT_START
    # Everything else keeps it: a lack of room passes.
    server.will(Fault("connect", Kind.ERROR))
    assert refused(lambda: e2b.start(sandbox, within=WITHIN)).kind is ErrorKind.SERVER
    assert isinstance(e2b.inspect(sandbox, within=WITHIN), Stopped)


@pytest.mark.parametrize("status", [400, 409, 500, 503])
@pytest.mark.parametrize("message", ["write /mnt/x: no space left on device", "Disk quota exceeded"])
def test_a_resume_that_finds_no_room_says_so_and_keeps_the_sandbox(
    server: Rehearsal, e2b: E2BProvider, create: Callable[..., str], status: int, message: str
) -> None:
    sandbox = create()
    e2b.stop(sandbox, grace=0, within=WITHIN)
    server.will(Fault("connect", Kind.ANSWER, status=status, message=message))
    assert refused(lambda: e2b.start(sandbox, within=WITHIN)).kind is ErrorKind.DISK_FULL
    assert isinstance(e2b.inspect(sandbox, within=WITHIN), Stopped)
    # To a creation, it is the service's own disk.
    server.will(Fault("create", Kind.ANSWER, status=status, message=message))
    error = refused(lambda: create("another"))
    assert error.kind is not ErrorKind.DISK_FULL


def test_input_that_finds_no_room_in_a_sandbox_says_so(
    server: Rehearsal, e2b: E2BProvider, create: Callable[..., str]
) -> None:
    sandbox = create()
    server.will(Fault("upload", Kind.ANSWER, status=507, message="not enough disk space available"))
    error = refused(lambda: e2b.execute(sandbox, Command(("cat",), stdin=b"input", timeout=5), within=WITHIN))
    assert error.kind is ErrorKind.DISK_FULL


# What is not there.


def test_an_absence_is_believed_only_with_a_list_to_its_end(
    server: Rehearsal, e2b: E2BProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = e2b.inspect(ABSENT, within=WITHIN)
    assert seen == Gone()  # and not stated
    assert server.asked[-2:] == [("get", ABSENT), ("list", "")]
    server.will(Fault("list", Kind.ANSWER, status=503))
    assert refused(lambda: e2b.inspect(ABSENT, within=WITHIN)).kind is ErrorKind.SERVER
    monkeypatch.setattr(provider, "_PAGES", 0)
    assert isinstance(e2b.inspect(ABSENT, within=WITHIN), Unknown)


def test_a_404_that_the_list_denies_is_no_absence(server: Rehearsal, e2b: E2BProvider, at_work: str) -> None:
    server.will(Fault("get", Kind.ANSWER, status=404, message="Sandbox was not found"))
    seen = e2b.inspect(at_work, within=WITHIN)
    assert isinstance(seen, Unknown)
    assert "listed as running" in seen.reason


def test_a_404_that_is_not_the_services_is_no_absence(
    server: Rehearsal, e2b: E2BProvider, at_work: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A proxy's page, in no form of the service's.
    monkeypatch.setattr(server, "refusal", lambda *_: Answer(404, b"<html>Not Found"))
    server.will(Fault("*", Kind.ANSWER, times=10))
    for call in (e2b.inspect, e2b.delete, e2b.start):
        assert refused(partial(call, at_work, within=WITHIN)).kind is ErrorKind.PROTOCOL
    assert refused(lambda: e2b.find("box", MARKS, within=WITHIN)).kind is ErrorKind.PROTOCOL


def test_a_delete_of_what_is_gone_raises_nothing_and_proves_nothing(
    server: Rehearsal, e2b: E2BProvider, at_work: str
) -> None:
    server.will(Fault("kill", Kind.ANSWER, status=404, message="Sandbox was not found"))
    e2b.delete(at_work, within=WITHIN)
    assert isinstance(e2b.inspect(at_work, within=WITHIN), Running)
    e2b.delete(at_work, within=WITHIN)
    e2b.delete(at_work, within=WITHIN)
    assert isinstance(e2b.inspect(at_work, within=WITHIN), Gone)


def test_a_kill_that_is_going_on_hides_a_sandbox_that_executes_so_one_look_is_not_enough(
    server: Rehearsal, e2b: E2BProvider, at_work: str, clock: Clock
) -> None:
    server.world.transition = 10.0
    killing = threading.Thread(target=lambda: e2b.delete(at_work, within=WITHIN))
    killing.start()
    try:
        while server.world.boxes[at_work].state != "killing":
            assert killing.is_alive()
            time.sleep(0.01)
        assert isinstance(e2b.inspect(at_work, within=WITHIN), Gone)
        assert server.world.executing(at_work)
        assert e2b.capabilities.absence_apart >= 3 * server.world.transition
    finally:
        clock.now += 10
        killing.join()
    assert not server.world.executing(at_work)


def test_lists_are_asked_for_every_state_and_read_to_their_last_page(
    server: Rehearsal, e2b: E2BProvider, create: Callable[..., str], clock: Clock
) -> None:
    server.world.page = 2
    made = []
    for number in range(5):
        clock.now += 1
        made.append(create(f"box-{number}"))
    e2b.stop(made[0], grace=0, within=WITHIN)
    pause_with_memory(server, made[1])
    server.asked.clear()
    listing = e2b.list(MARKS, within=WITHIN)
    assert listing.complete
    assert {resource.resource_id for resource in listing.resources} == set(made)
    assert len(server.asked) == 3
    # The last page of all: an id of the first creation is found by it, and another one is not.
    server.will(Fault("get", Kind.ANSWER, status=404, times=2))
    assert isinstance(e2b.inspect(made[0], within=WITHIN), Unknown)
    assert isinstance(e2b.inspect(ABSENT, within=WITHIN), Gone)


def test_a_list_that_leaves_one_out_is_no_proof_of_its_absence(
    server: Rehearsal, e2b: E2BProvider, at_work: str
) -> None:
    server.will(Fault("list", Kind.LEFT_OUT, times=2))
    assert e2b.list(MARKS, within=WITHIN).resources == ()
    assert e2b.find("box", MARKS, within=WITHIN) is None
    assert isinstance(e2b.inspect(at_work, within=WITHIN), Running)


def test_two_sandboxes_of_one_name_are_told_apart_by_their_marks_or_not_at_all(
    server: Rehearsal, e2b: E2BProvider, create: Callable[..., str]
) -> None:
    first = create("box")
    server.world.boxes[first].key = ""  # the service has forgotten the key
    second = e2b.create("box", {**MARKS, "paperclip-env.lease": "2"}, E2BConfig(), within=WITHIN).resource
    found = e2b.find("box", {"paperclip-env.lease": "2"}, within=WITHIN)
    assert found == second
    assert refused(lambda: e2b.find("box", {}, within=WITHIN)).kind is ErrorKind.PROTOCOL


def test_marks_with_any_text_are_found_again(e2b: E2BProvider) -> None:
    marks = {**MARKS, "paperclip-env.note": "a b&c=d+e/é%20"}
    made = e2b.create("box", marks, E2BConfig(), within=WITHIN).resource
    assert e2b.list(marks, within=WITHIN).resources == (made,)
    assert e2b.list({**marks, "paperclip-env.note": "a b&c=d e/é "}, within=WITHIN).resources == ()


# Creating.


def test_a_lost_reply_to_a_create_is_repeated_or_found_and_makes_one_sandbox(
    server: Rehearsal, e2b: E2BProvider, create: Callable[..., str]
) -> None:
    server.will(Fault("create", Kind.LOST))
    error = refused(create)
    assert (error.kind, error.nothing_allocated) == (ErrorKind.CONNECTION, False)
    found = e2b.find("box", MARKS, within=WITHIN)
    assert found is not None
    assert create() == found.resource_id
    assert len(server.world.boxes) == 1


def test_a_create_in_progress_is_busy_and_says_when_to_ask_again(
    server: Rehearsal, e2b: E2BProvider, create: Callable[..., str], clock: Clock
) -> None:
    server.world.transition = 10.0
    answers: list[str] = []
    creating = threading.Thread(target=lambda: answers.append(create()))
    creating.start()
    try:
        while not server.world.boxes:
            assert creating.is_alive()
            time.sleep(0.01)
        error = refused(create)
        assert (error.kind, error.retry_after, error.nothing_allocated) == (ErrorKind.BUSY, 1.0, False)
        assert e2b.find("box", MARKS, within=WITHIN) is None
    finally:
        clock.now += 10
        creating.join()
    assert [create()] == answers == list(server.world.boxes)


@pytest.mark.parametrize(
    ("fault", "kind", "proof"),
    [
        ({"status": 500, "details": {"error_code": "sandbox_create_refused"}}, ErrorKind.INVALID, True),
        ({"status": 409, "details": {"error_code": "idempotency_outcome_unknown"}}, ErrorKind.REFUSED, False),
        ({"status": 503, "details": {"error_code": "sandbox_capacity_unavailable"}}, ErrorKind.SERVER, False),
        ({"status": 429, "headers": {"Retry-After": "7"}}, ErrorKind.RATE_LIMITED, False),
        ({"status": 401}, ErrorKind.AUTHORISATION, False),
        ({"status": 403}, ErrorKind.AUTHORISATION, False),
    ],
)
def test_only_two_answers_of_a_failing_service_prove_that_nothing_was_made(
    server: Rehearsal, create: Callable[..., str], fault: dict[str, Any], kind: ErrorKind, *, proof: bool
) -> None:
    server.will(Fault("create", Kind.ANSWER, **fault))
    error = refused(create)
    assert (error.kind, error.nothing_allocated) == (kind, proof)
    assert error.retry_after == (7.0 if fault["status"] == 429 else None)
    assert len(server.asked) == 1  # nothing is tried again


def test_a_template_that_does_not_exist_and_a_lifetime_beyond_the_plan_allocate_nothing(
    server: Rehearsal, create: Callable[..., str]
) -> None:
    error = refused(lambda: create(template="no-such-template"))
    assert (error.kind, error.nothing_allocated) == (ErrorKind.INVALID, True)
    assert not server.world.boxes


def test_a_sandbox_is_made_to_be_killed_at_its_deadline_and_resumed_by_nobody(
    server: Rehearsal, e2b: E2BProvider, create: Callable[..., str], clock: Clock
) -> None:
    sandbox = create(lifetime_seconds=600, env={"A": "1"}, internet_access=False)
    body = server.world.boxes[sandbox].body
    assert (body["autoPause"], body["autoResume"]) == (False, {"enabled": False})
    assert (body["timeout"], body["allow_internet_access"]) == (600, False)
    assert e2b.lifetime(E2BConfig(lifetime_seconds=600)) == 600.0
    shell = Command(("sh", "-c", 'printf "$A"'), timeout=5)
    assert e2b.execute(sandbox, shell, within=WITHIN).stdout == b"1"
    clock.now += 601
    assert isinstance(e2b.inspect(sandbox, within=WITHIN), Gone)
    assert not server.world.executing(sandbox)


# The deadline.


def test_extending_moves_the_deadline_and_reads_it_back(
    server: Rehearsal, e2b: E2BProvider, create: Callable[..., str], clock: Clock
) -> None:
    sandbox = create(lifetime_seconds=600)
    clock.now += 500
    assert e2b.extend(sandbox, 599.2, within=WITHIN) == datetime.fromtimestamp(clock.now + 600, UTC)
    # Another one may be nearer: it counts from now.
    assert e2b.extend(sandbox, 60, within=WITHIN) == datetime.fromtimestamp(clock.now + 60, UTC)
    server.will(Fault("timeout", Kind.ANSWER, status=400, message="Timeout cannot be greater than 1 hours"))
    assert refused(lambda: e2b.extend(sandbox, 9e4, within=WITHIN)).kind is ErrorKind.REFUSED
    e2b.stop(sandbox, grace=0, within=WITHIN)
    assert refused(lambda: e2b.extend(sandbox, 60, within=WITHIN)).kind is ErrorKind.REFUSED
    e2b.delete(sandbox, within=WITHIN)
    assert refused(lambda: e2b.extend(sandbox, 60, within=WITHIN)).kind is ErrorKind.NOT_FOUND


def test_nothing_but_a_start_connects(server: Rehearsal, e2b: E2BProvider, at_work: str) -> None:
    def everything_else(sandbox: str) -> None:
        e2b.identify(within=WITHIN)
        e2b.inspect(sandbox, within=WITHIN)
        e2b.find("box", MARKS, within=WITHIN)
        e2b.list(MARKS, within=WITHIN)
        e2b.stop(sandbox, grace=0, within=WITHIN)
        e2b.inspect(sandbox, within=WITHIN)
        e2b.delete(sandbox, within=WITHIN)
        e2b.inspect(sandbox, within=WITHIN)

    e2b.extend(at_work, 600, within=WITHIN)
    everything_else(at_work)
    assert {call for call, _ in server.asked} == {
        "create", "execute", "get", "kill", "list", "pause", "team", "timeout"
    }  # fmt: skip


# Who the account is.


def test_the_team_is_the_services_word_and_not_the_keys(server: Rehearsal, e2b: E2BProvider) -> None:
    team = server.world.keys[KEY]
    assert e2b.identify(within=WITHIN) == f"e2b {team}"
    server.world.add_key("second-key", team)
    assert E2BProvider(e2b.endpoint, "second-key").identify(within=WITHIN) == f"e2b {team}"
    server.will(Fault("team", Kind.OTHER_ACCOUNT))
    assert e2b.identify(within=WITHIN) != f"e2b {team}"


def test_an_endpoint_that_names_its_team_takes_no_other(server: Rehearsal) -> None:
    team = server.world.keys[KEY]
    named = E2BProvider(E2BEndpoint(url=server.url, team_id=team), KEY)
    assert named.identify(within=WITHIN) == f"e2b {team}"
    server.will(Fault("team", Kind.OTHER_ACCOUNT))
    assert refused(lambda: named.identify(within=WITHIN)).kind is ErrorKind.IDENTITY


def test_a_service_that_does_not_say_whose_key_it_is_needs_the_teams_name_and_its_consent(
    server: Rehearsal, e2b: E2BProvider
) -> None:
    team = server.world.keys[KEY]
    untold = Fault("team", Kind.ANSWER, status=403, message="Forbidden")
    server.will(untold)
    assert refused(lambda: e2b.identify(within=WITHIN)).kind is ErrorKind.AUTHORISATION
    named = E2BProvider(E2BEndpoint(url=server.url, team_id=team), KEY)
    server.will(untold)
    assert named.identify(within=WITHIN) == f"e2b {team}"
    other = E2BProvider(E2BEndpoint(url=server.url, team_id="1" * 8 + team[8:]), KEY)
    server.will(untold)
    assert refused(lambda: other.identify(within=WITHIN)).kind is ErrorKind.IDENTITY
    # A failing service is not asked a second time, and one that shows everything to everybody proves nothing.
    server.asked.clear()
    server.will(Fault("team", Kind.ANSWER, status=500))
    assert refused(lambda: named.identify(within=WITHIN)).kind is ErrorKind.SERVER
    assert len(server.asked) == 1
    server.will(Fault("team", Kind.ANSWER, status=200))
    assert refused(lambda: named.identify(within=WITHIN)).kind is ErrorKind.PROTOCOL


def test_another_teams_sandbox_is_not_described(server: Rehearsal, e2b: E2BProvider, at_work: str) -> None:
    server.world.add_key("theirs")
    theirs = E2BProvider(e2b.endpoint, "theirs")
    assert isinstance(theirs.inspect(at_work, within=WITHIN), Gone)
    assert theirs.identify(within=WITHIN) != e2b.identify(within=WITHIN)
    theirs.delete(at_work, within=WITHIN)
    assert server.world.executing(at_work)


# Connections, and who is told what.

CALLS: dict[str, tuple[str, Callable[[E2BProvider, str, float], Any]]] = {
    "identify": ("team", lambda p, _, within: p.identify(within=within)),
    "create": ("create", lambda p, _, within: p.create("another", MARKS, E2BConfig(), within=within)),
    "inspect": ("get", lambda p, sandbox, within: p.inspect(sandbox, within=within)),
    "stop": ("pause", lambda p, sandbox, within: p.stop(sandbox, grace=1, within=within)),
    "delete": ("kill", lambda p, sandbox, within: p.delete(sandbox, within=within)),
    "execute": ("execute", lambda p, sandbox, within: p.execute(sandbox, DAEMON, within=within)),
    "extend": ("timeout", lambda p, sandbox, within: p.extend(sandbox, 600, within=within)),
    "list": ("list", lambda p, _, within: p.list(MARKS, within=within)),
}
every_call = pytest.mark.parametrize("call", sorted(CALLS))


@every_call
def test_a_connection_that_breaks_is_an_error_of_its_own_and_is_not_repeated(
    server: Rehearsal, e2b: E2BProvider, at_work: str, call: str
) -> None:
    route, make = CALLS[call]
    for kind in (Kind.RESET, Kind.LOST):
        server.will(Fault(route, kind))
        server.asked.clear()
        assert refused(lambda: make(e2b, at_work, WITHIN)).kind is ErrorKind.CONNECTION
        assert [asked for asked, _ in server.asked].count(route) == 1


@every_call
def test_a_call_that_hangs_ends_at_its_bound(server: Rehearsal, e2b: E2BProvider, at_work: str, call: str) -> None:
    route, make = CALLS[call]
    server.will(Fault(route, Kind.DELAY, seconds=3))
    begun = time.monotonic()
    assert refused(lambda: make(e2b, at_work, 0.5)).kind is ErrorKind.TIMEOUT
    assert time.monotonic() - begun < 2


def test_the_key_goes_to_the_api_and_a_sandboxs_token_to_its_agent(
    server: Rehearsal, e2b: E2BProvider, at_work: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[str, str | None, str | None]] = []
    authorised = server.authorised

    def watched(headers: Any) -> tuple[str, str]:
        sent.append((str(headers.get("E2b-Sandbox-Id")), headers.get("X-API-KEY"), headers.get("X-Access-Token")))
        return authorised(headers)

    monkeypatch.setattr(server, "authorised", watched)
    e2b.execute(at_work, Command(("cat",), stdin=b"x", timeout=5), within=WITHIN)
    token = server.world.boxes[at_work].token
    assert sent == [("None", KEY, None), (at_work, None, token), (at_work, None, token)]


@pytest.mark.parametrize(
    ("domain", "url", "expected"),
    [
        (None, "https://api.e2b.app", "https://sandbox.e2b.app"),
        ("e2b.dev", "https://api.e2b.app", "https://sandbox.e2b.dev"),
        ("box.example.com", "https://api.e2b.app", f"https://49983-{ABSENT}.box.example.com"),
        (None, "https://api.example.com", f"https://49983-{ABSENT}.example.com"),
        ("evil.com/x", "https://api.e2b.app", None),
        ("user@evil.com", "https://api.e2b.app", None),
        (None, "http://127.0.0.1:1", None),
    ],
)
def test_commands_go_where_the_service_says_and_never_in_the_clear(
    domain: str | None, url: str, expected: str | None
) -> None:
    seen = provider.answers.sandbox({"sandboxID": ABSENT, "state": "running", "metadata": {}, "domain": domain})
    here = E2BProvider(E2BEndpoint(url=url), KEY)
    if expected is None:
        assert refused(lambda: here._agent_address(seen)).kind is ErrorKind.PROTOCOL
    else:
        assert here._agent_address(seen) == expected


@pytest.mark.parametrize("fault", [{"status": 502}, {"status": 401}, {"status": 404}])
def test_what_a_sandbox_answers_is_never_the_accounts_fault(
    server: Rehearsal, e2b: E2BProvider, at_work: str, fault: dict[str, Any]
) -> None:
    server.will(Fault("execute", Kind.ANSWER, **fault))
    assert refused(lambda: e2b.execute(at_work, DAEMON, within=WITHIN)).kind is ErrorKind.REFUSED


def test_a_description_of_another_sandbox_is_not_understood(
    server: Rehearsal, e2b: E2BProvider, at_work: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = server.world.get(server.world.keys[KEY], at_work)
    monkeypatch.setattr(server.world, "get", lambda *_: other)
    assert refused(lambda: e2b.inspect(ABSENT, within=WITHIN)).kind is ErrorKind.PROTOCOL
    for call in (e2b.delete, e2b.inspect):
        assert refused(partial(call, f"{at_work}-node1", within=WITHIN)).kind is ErrorKind.INVALID


def enveloped(data: bytes, flags: int = 0) -> bytes:
    return bytes([flags]) + len(data).to_bytes(4, "big") + data


@pytest.mark.parametrize(
    ("stream", "kind"),
    [
        (b"", ErrorKind.PROTOCOL),
        (b"\x00\x00", ErrorKind.PROTOCOL),
        (b"<html>502 Bad Gateway</html>", ErrorKind.PROTOCOL),
        (enveloped(b"{]"), ErrorKind.PROTOCOL),
        (enveloped(b"[]"), ErrorKind.PROTOCOL),
        (enveloped(b'{"event": {"data": {"stdout": "%"}}}'), ErrorKind.PROTOCOL),
        (enveloped(b'{"event": {"start": {"pid": 1}}}'), ErrorKind.PROTOCOL),
        (enveloped(b"{}", flags=2), ErrorKind.REFUSED),
        (enveloped(b'{"error": {"code": "unavailable"}}', flags=2), ErrorKind.REFUSED),
    ],
)
def test_a_stream_that_breaks_off_or_is_none_is_no_execution(
    server: Rehearsal, e2b: E2BProvider, at_work: str, monkeypatch: pytest.MonkeyPatch, stream: bytes, kind: ErrorKind
) -> None:
    monkeypatch.setattr(server, "refusal", lambda *_: Answer(200, stream))
    server.will(Fault("execute", Kind.ANSWER))
    assert refused(lambda: e2b.execute(at_work, DAEMON, within=WITHIN)).kind is kind


def test_an_agent_of_old_is_told_a_user(server: Rehearsal) -> None:
    for version, expected in (("0.3.9", "Basic dXNlcjo="), ("v0.4.0", None), ("0.10.1-rc1", None), ("new", None)):
        sent: dict[str, str] = {}
        agent = envd.agent(server.url, ABSENT, "token", version, None)
        with agent.conversation(Call.EXECUTE, WITHIN) as conversation:
            sent.update({str(name): str(value) for name, value in conversation._headers.items()})
        assert sent.get("Authorization") == expected, version
