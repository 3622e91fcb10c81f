"""What Daytona does to a sandbox by itself, and what we make of it: errors, deadlines, deletions, names, forks."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from providers.contract import MARK_PREFIX, Busy, Ended, ErrorKind, Gone, Running, Stopped, Unknown
from providers.daytona import DaytonaProvider
from providers.daytona.rehearsal import Fault, Kind, Rehearsal
from providers.daytona.schemas import DaytonaConfig, DaytonaEndpoint
from tests.providers.daytona.conftest import MARKS, WITHIN, busy_with_work
from tests.providers.rehearsed import KEY, Clock, refused

HOUR = 3600
JWT = "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJ1c2VyIn0.c2lnbmF0dXJl"
Create = Callable[..., str]


def set_up(server: Rehearsal, sandbox: str, setting: str, value: int) -> None:
    server.world.change(server.world.keys[KEY], sandbox, setting, value)


def marks_of(operation: str) -> dict[str, str]:
    return {**MARKS, MARK_PREFIX + "operation": operation}


# Errors: starting and recovering.


@pytest.mark.parametrize("call", ["start", "recover"])
def test_what_can_be_recovered_is_recovered_and_runs(
    server: Rehearsal, daytona: DaytonaProvider, create: Create, call: str
) -> None:
    """S-282."""
    sandbox = create()
    server.world.fail(sandbox, reason="timeout while starting", recoverable=True)
    seen = daytona.inspect(sandbox, within=WITHIN)
    assert isinstance(seen, Unknown)
    assert seen.recoverable
    getattr(daytona, call)(sandbox, within=WITHIN)
    assert isinstance(daytona.inspect(sandbox, within=WITHIN), Running)
    assert ("recover", sandbox) in server.asked
    assert ("start", sandbox) not in server.asked


def test_an_error_that_the_service_calls_final_can_never_start(
    server: Rehearsal, daytona: DaytonaProvider, create: Create
) -> None:
    sandbox = create()
    server.world.fail(sandbox, reason="no space left on device")
    seen = daytona.inspect(sandbox, within=WITHIN)
    assert isinstance(seen, Unknown)
    assert not seen.recoverable
    error = refused(lambda: daytona.start(sandbox, within=WITHIN))
    assert error.kind is ErrorKind.CANNOT_START
    assert "no space left on device" in error.excerpt
    assert refused(lambda: daytona.recover(sandbox, within=WITHIN)).kind is ErrorKind.REFUSED
    assert {call for call, _ in server.asked} == {"create", "get"}


def test_a_full_sandbox_that_gets_no_more_space_can_never_start(
    server: Rehearsal, daytona: DaytonaProvider, create: Create
) -> None:
    said = "Sandbox storage cannot be further expanded. Maximum expansion of 0.30GB has been reached."
    sandbox = create()
    server.world.fail(sandbox, reason="no space left on device", recoverable=True)
    server.will(Fault("recover", Kind.ANSWER, times=2, status=403, message=said))
    error = refused(lambda: daytona.start(sandbox, within=WITHIN))
    assert error.kind is ErrorKind.CANNOT_START
    assert "cannot be further expanded" in error.excerpt
    # Not a refusal of the key, which would close the account to everybody.
    assert refused(lambda: daytona.recover(sandbox, within=WITHIN)).kind is ErrorKind.REFUSED


def test_an_older_service_that_says_nothing_of_recovery_proves_no_end_of_starting(
    server: Rehearsal, daytona: DaytonaProvider, create: Create, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = create()
    server.world.fail(sandbox)
    describe = server.world._describe
    monkeypatch.setattr(server.world, "_describe", lambda box: {**describe(box), "recoverable": None})
    assert refused(lambda: daytona.start(sandbox, within=WITHIN)).kind is ErrorKind.REFUSED


@pytest.mark.parametrize(
    ("status", "message", "kind"),
    [
        (409, "Sandbox state change in progress", ErrorKind.BUSY),
        (400, "Sandbox state change in progress", ErrorKind.BUSY),
        (409, "Sandbox recovery has been attempted recently. Please try again later", ErrorKind.BUSY),
        (400, "Total CPU limit exceeded. Maximum allowed: 10.", ErrorKind.REFUSED),
        (403, "Total CPU limit exceeded. Maximum allowed: 10.", ErrorKind.REFUSED),
        (403, "Organization is suspended: Depleted credits", ErrorKind.AUTHORISATION),
        (400, "mkdir /var/lib/docker/overlay2/x/merged: no space left on device", ErrorKind.DISK_FULL),
        (500, "write /x: Disk quota exceeded", ErrorKind.DISK_FULL),
        (404, "Region with ID eu not found", ErrorKind.REFUSED),
        (404, "Sandbox with ID or name x not found", ErrorKind.NOT_FOUND),
        (422, "Resuming is not supported for this sandbox", ErrorKind.REFUSED),
    ],
)
def test_a_start_that_is_refused_says_why_and_is_no_end_of_starting(
    server: Rehearsal, daytona: DaytonaProvider, create: Create, status: int, message: str, kind: ErrorKind
) -> None:
    sandbox = create()
    daytona.stop(sandbox, grace=1, within=WITHIN)
    server.will(Fault("start", Kind.ANSWER, status=status, message=message))
    error = refused(lambda: daytona.start(sandbox, within=WITHIN))
    assert error.kind is kind
    assert message in error.excerpt


def test_a_disk_that_is_full_is_told_in_words_that_can_be_recognised(
    server: Rehearsal, daytona: DaytonaProvider, create: Create
) -> None:
    sandbox = create()
    daytona.stop(sandbox, grace=1, within=WITHIN)
    server.will(Fault("start", Kind.DISK_FULL, recoverable=True))
    daytona.start(sandbox, within=WITHIN)
    seen = daytona.inspect(sandbox, within=WITHIN)
    assert isinstance(seen, Unknown)
    assert seen.recoverable
    assert seen.disk_full
    assert "no space left on device" in seen.reason


def test_a_full_disk_of_which_an_older_service_says_nothing_more_is_no_end_of_starting(
    server: Rehearsal, daytona: DaytonaProvider, create: Create, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = create()
    server.world.fail(sandbox, reason="Error response from daemon: mkdir /x/merged: no space left on device")
    describe = server.world._describe
    monkeypatch.setattr(server.world, "_describe", lambda box: {**describe(box), "recoverable": None})
    error = refused(lambda: daytona.start(sandbox, within=WITHIN))
    assert error.kind is ErrorKind.DISK_FULL
    assert ("start", sandbox) not in server.asked


def test_a_quota_that_is_used_up_refuses_a_creation_in_its_words(
    server: Rehearsal, daytona: DaytonaProvider, create: Create
) -> None:
    create()
    server.world.quota = 1
    error = refused(lambda: daytona.create("second", MARKS, DaytonaConfig(), within=WITHIN))
    assert error.kind is ErrorKind.INVALID
    assert "limit exceeded" in error.excerpt
    assert not error.nothing_allocated


# Times.


def test_a_look_tells_when_the_service_last_changed_what_it_says(
    server: Rehearsal, daytona: DaytonaProvider, create: Create, clock: Clock
) -> None:
    sandbox = create()
    created = datetime.fromtimestamp(clock.now, UTC)
    assert daytona.inspect(sandbox, within=WITHIN).resource.as_of == created  # type: ignore[union-attr]
    clock.now += HOUR
    assert daytona.inspect(sandbox, within=WITHIN).resource.as_of == created  # type: ignore[union-attr]
    daytona.stop(sandbox, grace=1, within=WITHIN)
    seen = daytona.inspect(sandbox, within=WITHIN)
    assert isinstance(seen, Stopped)
    assert seen.resource.as_of == datetime.fromtimestamp(clock.now, UTC)


@pytest.mark.parametrize(
    ("lifetime", "seconds"), [(None, None), (59, None), (60, 60.0), (150, 150.0), (86400, 86400.0)]
)
def test_a_configuration_says_for_how_long_its_deadline_is_kept(lifetime: int | None, seconds: float | None) -> None:
    assert DaytonaProvider.lifetime(DaytonaConfig(lifetime_seconds=lifetime)) == seconds


def test_a_deadline_is_moved_to_at_least_that_far_from_now(
    server: Rehearsal, daytona: DaytonaProvider, create: Create, clock: Clock
) -> None:
    sandbox = create(lifetime_seconds=HOUR)
    clock.now += 1800
    ends = daytona.extend(sandbox, HOUR + 1, within=WITHIN)
    assert ends == datetime.fromtimestamp(clock.now, UTC) + timedelta(minutes=61)
    clock.now += HOUR + 2
    seen = daytona.inspect(sandbox, within=WITHIN)
    assert isinstance(seen, Running)
    assert seen.resource.expires_at == ends
    clock.now += 60
    assert isinstance(daytona.inspect(sandbox, within=WITHIN), Gone)


def test_a_deadline_that_is_late_enough_is_left_as_it_is(
    server: Rehearsal, daytona: DaytonaProvider, create: Create, clock: Clock
) -> None:
    sandbox = create(lifetime_seconds=HOUR)
    ends = daytona.extend(sandbox, 600, within=WITHIN)
    assert ends == datetime.fromtimestamp(clock.now, UTC) + timedelta(hours=1)
    assert ("ttl", sandbox) not in server.asked


def test_a_service_that_counts_from_the_creation_is_told_so(
    server: Rehearsal, daytona: DaytonaProvider, create: Create, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    live_for = server.world._live_for
    monkeypatch.setattr(server.world, "_live_for", lambda box, _, minutes: live_for(box, box.created, minutes))
    sandbox = create(lifetime_seconds=HOUR)
    clock.now += 1800
    ends = daytona.extend(sandbox, HOUR, within=WITHIN)
    assert ends == datetime.fromtimestamp(clock.now, UTC) + timedelta(hours=1)


def test_a_longest_life_that_an_organisation_sets_is_not_taken_for_an_extension(
    server: Rehearsal, daytona: DaytonaProvider, create: Create, clock: Clock
) -> None:
    server.world.longest_life = 2.0 * HOUR
    sandbox = create(lifetime_seconds=HOUR)
    latest = datetime.fromtimestamp(clock.now, UTC) + timedelta(hours=2)
    error = refused(lambda: daytona.extend(sandbox, 3 * HOUR, within=WITHIN))
    assert error.kind is ErrorKind.REFUSED
    assert latest.isoformat() in error.excerpt


def test_a_sandbox_that_was_stopped_to_be_kept_gets_no_deadline_again_before_it_runs(
    server: Rehearsal, daytona: DaytonaProvider, create: Create, clock: Clock
) -> None:
    sandbox = create(lifetime_seconds=HOUR)
    daytona.stop(sandbox, grace=1, within=WITHIN)
    assert refused(lambda: daytona.extend(sandbox, HOUR, within=WITHIN)).kind is ErrorKind.REFUSED
    clock.now += 48 * HOUR
    assert isinstance(daytona.inspect(sandbox, within=WITHIN), Stopped)
    daytona.start(sandbox, within=WITHIN)
    assert daytona.extend(sandbox, HOUR, within=WITHIN) == datetime.fromtimestamp(clock.now, UTC) + timedelta(hours=1)


# Stopping what the service would delete.


@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize("setting", [("auto_delete", 0), ("auto_delete", 5), ("ttl", 60)])
def test_a_stop_keeps_the_files_of_a_sandbox_that_the_service_would_delete(
    server: Rehearsal,
    daytona: DaytonaProvider,
    create: Create,
    clock: Clock,
    setting: tuple[str, int],
    *,
    paused: bool,
) -> None:
    """S-147."""
    sandbox = create()
    set_up(server, sandbox, *setting)
    if paused:
        server.world.act(server.world.keys[KEY], sandbox, "pause", server.world.boxes[sandbox].outcome)
    daytona.stop(sandbox, grace=1, within=WITHIN)
    calls = [call for call, _ in server.asked]
    assert calls.index("ttl" if setting[0] == "ttl" else "autodelete") < calls.index("stop")
    clock.now += 30 * 24 * HOUR
    seen = daytona.inspect(sandbox, within=WITHIN)
    assert isinstance(seen, Stopped)
    assert seen.ended is Ended.KILLED
    assert seen.resource.expires_at is None


def test_a_sandbox_that_is_stopped_already_is_kept_too(
    server: Rehearsal, daytona: DaytonaProvider, create: Create, clock: Clock
) -> None:
    sandbox = create(auto_delete_minutes=60, lifetime_seconds=2 * HOUR)
    server.world.act(server.world.keys[KEY], sandbox, "stop", server.world.boxes[sandbox].outcome)
    daytona.stop(sandbox, grace=1, within=WITHIN)
    assert ("stop", sandbox) not in server.asked
    clock.now += 24 * HOUR
    assert isinstance(daytona.inspect(sandbox, within=WITHIN), Stopped)


@pytest.mark.parametrize(
    ("setting", "fault"),
    [
        (("auto_delete", 0), Fault("autodelete", Kind.ANSWER, status=400)),
        (("auto_delete", 0), Fault("autodelete", Kind.ANSWER, status=500)),
        (("auto_delete", 0), Fault("autodelete", Kind.ANSWER, status=409, message="Sandbox state change in progress")),
        (("auto_delete", 0), Fault("autodelete", Kind.LOST)),
        (("ttl", 60), Fault("ttl", Kind.ANSWER, status=500)),
        (("ttl", 60), Fault("ttl", Kind.RESET)),
    ],
    ids=lambda value: value.call + str(value.status) + value.kind if isinstance(value, Fault) else "",
)
def test_what_cannot_be_kept_is_not_stopped(
    server: Rehearsal, daytona: DaytonaProvider, create: Create, setting: tuple[str, int], fault: Fault
) -> None:
    sandbox = create()
    set_up(server, sandbox, *setting)
    busy_with_work(daytona, server, sandbox)
    server.will(fault)
    refused(lambda: daytona.stop(sandbox, grace=1, within=WITHIN))
    assert ("stop", sandbox) not in server.asked
    assert isinstance(daytona.inspect(sandbox, within=WITHIN), Running)
    assert server.world.executing(sandbox)


@pytest.mark.parametrize("silent", ["autoDeleteInterval", "autoDestroyAt"])
def test_a_service_that_accepts_a_setting_and_does_not_take_it_is_not_believed(
    server: Rehearsal, daytona: DaytonaProvider, create: Create, monkeypatch: pytest.MonkeyPatch, silent: str
) -> None:
    sandbox = create(lifetime_seconds=HOUR)
    describe = server.world._describe
    stubborn = {"autoDeleteInterval": 0, "autoDestroyAt": "2099-01-01T00:00:00.000Z"}[silent]
    monkeypatch.setattr(server.world, "_describe", lambda box: {**describe(box), silent: stubborn})
    assert refused(lambda: daytona.stop(sandbox, grace=1, within=WITHIN)).kind is ErrorKind.REFUSED
    assert ("stop", sandbox) not in server.asked


def test_where_the_service_is_silent_on_deletion_it_is_told(
    server: Rehearsal, daytona: DaytonaProvider, create: Create, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = create()
    describe = server.world._describe
    monkeypatch.setattr(server.world, "_describe", lambda box: {**describe(box), "autoDeleteInterval": None})
    assert refused(lambda: daytona.stop(sandbox, grace=1, within=WITHIN)).kind is ErrorKind.REFUSED
    assert ("autodelete", sandbox) in server.asked
    assert ("stop", sandbox) not in server.asked


def test_where_a_longest_life_cannot_be_turned_off_the_files_are_kept_until_its_end_which_is_told(
    server: Rehearsal, daytona: DaytonaProvider, create: Create, clock: Clock
) -> None:
    server.world.longest_life = 24.0 * HOUR
    sandbox = create()
    daytona.stop(sandbox, grace=1, within=WITHIN)
    assert ("ttl", sandbox) in server.asked
    seen = daytona.inspect(sandbox, within=WITHIN)
    assert isinstance(seen, Stopped)
    assert seen.resource.expires_at is not None
    assert seen.resource.expires_at.timestamp() == pytest.approx(clock.now + 24 * HOUR, abs=60)


def test_a_longest_life_is_no_reason_to_stop_what_the_service_deletes_after_a_stop(
    server: Rehearsal, daytona: DaytonaProvider, create: Create
) -> None:
    server.world.longest_life = 24.0 * HOUR
    sandbox = create()
    set_up(server, sandbox, "auto_delete", 0)
    server.will(Fault("autodelete", Kind.ANSWER, status=400))
    assert refused(lambda: daytona.stop(sandbox, grace=1, within=WITHIN)).kind is ErrorKind.REFUSED
    assert ("stop", sandbox) not in server.asked


# Looking for a creation.


@pytest.mark.parametrize("end", ["hidden", "stuck"])
def test_a_creation_whose_name_was_freed_is_found_by_its_marks(
    server: Rehearsal, daytona: DaytonaProvider, end: str
) -> None:
    marks = marks_of("one")
    made = daytona.create("box", marks, DaytonaConfig(), within=WITHIN).resource
    server.will(Fault("delete", Kind(end)))
    daytona.delete(made.resource_id, within=WITHIN)
    assert daytona.find("box", {}, within=WITHIN) is None
    found = daytona.find("box", marks, within=WITHIN)
    assert found is not None
    assert found.resource_id == made.resource_id
    seen = daytona.inspect(made.resource_id, within=WITHIN)
    assert isinstance(seen, Unknown if end == "hidden" else Busy)


def test_somebody_elses_sandbox_under_the_name_is_not_taken_for_ours(
    server: Rehearsal, daytona: DaytonaProvider
) -> None:
    marks = marks_of("one")
    made = daytona.create("box", marks, DaytonaConfig(), within=WITHIN).resource
    server.will(Fault("delete", Kind.HIDDEN))
    daytona.delete(made.resource_id, within=WITHIN)
    theirs = daytona.create("box", {MARK_PREFIX + "installation": "another"}, DaytonaConfig(), within=WITHIN).resource
    found = daytona.find("box", marks, within=WITHIN)
    assert found is not None
    assert found.resource_id == made.resource_id
    # Where none of ours is left it is told, with its marks: whose it is, is for the caller to see.
    assert daytona.find("box", marks_of("two"), within=WITHIN) == theirs


def test_a_fork_that_inherited_the_marks_is_not_taken_for_the_creation(
    server: Rehearsal, daytona: DaytonaProvider, clock: Clock
) -> None:
    marks = marks_of("one")
    made = daytona.create("box", marks, DaytonaConfig(), within=WITHIN).resource
    organization = server.world.keys[KEY]
    clock.now += 1
    server.world.fork(organization, made.resource_id, "fork", server.world.boxes[made.resource_id].outcome)
    server.will(Fault("get", Kind.ANSWER, status=404, message="Sandbox with ID or name box not found"))
    found = daytona.find("box", marks, within=WITHIN)
    assert found is not None
    assert found.resource_id == made.resource_id


def test_a_name_that_is_none_is_looked_for_by_its_marks_alone(server: Rehearsal, daytona: DaytonaProvider) -> None:
    assert daytona.find("no/name", {}, within=WITHIN) is None
    assert daytona.find("no/name", marks_of("one"), within=WITHIN) is None
    assert [call for call, _ in server.asked] == ["list"]


# Deleting.


def test_a_sandbox_with_forks_is_not_deleted_and_says_how_many_come_first(
    server: Rehearsal, daytona: DaytonaProvider, create: Create
) -> None:
    sandbox, organization = create(), server.world.keys[KEY]
    outcome = server.world.boxes[sandbox].outcome
    forks = [str(server.world.fork(organization, sandbox, name, outcome)["id"]) for name in ("one", "two")]
    error = refused(lambda: daytona.delete(sandbox, within=WITHIN))
    assert error.kind is ErrorKind.REFUSED
    assert error.excerpt == f"2 forks of this sandbox must be deleted first: {', '.join(sorted(forks))}"
    server.will(Fault("forks", Kind.ANSWER, status=404, message="Cannot GET /api/sandbox/x/forks"))
    error = refused(lambda: daytona.delete(sandbox, within=WITHIN))
    assert (error.kind, "fork children" in error.excerpt) == (ErrorKind.REFUSED, True)
    for fork in forks:
        assert isinstance(daytona.inspect(fork, within=WITHIN), Running)
        daytona.delete(fork, within=WITHIN)
    daytona.delete(sandbox, within=WITHIN)
    assert isinstance(daytona.inspect(sandbox, within=WITHIN), Gone)


def test_an_end_that_the_service_states_is_told_apart_from_one_that_is_only_not_to_be_found(
    server: Rehearsal, daytona: DaytonaProvider, create: Create
) -> None:
    evicted, deleted = create("evicted"), create("deleted")
    server.world.evict(evicted)
    daytona.delete(deleted, within=WITHIN)
    assert daytona.inspect(evicted, within=WITHIN) == Gone(stated=True)
    assert daytona.inspect(deleted, within=WITHIN) == Gone(stated=False)
    assert daytona.capabilities.absence_apart >= 120


def test_an_error_that_is_hidden_is_not_offered_for_recovery(
    server: Rehearsal, daytona: DaytonaProvider, create: Create
) -> None:
    sandbox = create()
    server.will(Fault("delete", Kind.HIDDEN), Fault("delete", Kind.ERROR, recoverable=True))
    daytona.delete(sandbox, within=WITHIN)
    seen = daytona.inspect(sandbox, within=WITHIN)
    assert isinstance(seen, Unknown)
    assert not seen.recoverable


# Whose the secret is.


def test_a_jwt_acts_for_the_organisation_that_the_endpoint_names(server: Rehearsal) -> None:
    organization = server.world.add_key(JWT)
    daytona = DaytonaProvider(DaytonaEndpoint(url=server.url, organization_id=organization), JWT)
    assert daytona.identify(within=WITHIN) == f"daytona {organization}"
    made = daytona.create("box", MARKS, DaytonaConfig(), within=WITHIN).resource
    assert isinstance(daytona.inspect(made.resource_id, within=WITHIN), Running)
    elsewhere = DaytonaProvider(DaytonaEndpoint(url=server.url, organization_id="another"), JWT)
    assert refused(lambda: elsewhere.identify(within=WITHIN)).kind is ErrorKind.AUTHORISATION


def test_a_jwt_without_an_organisation_is_refused_before_anything_is_sent(server: Rehearsal) -> None:
    server.world.add_key(JWT)
    daytona = DaytonaProvider(DaytonaEndpoint(url=server.url), JWT)
    calls: list[Callable[[], Any]] = [
        lambda: daytona.identify(within=WITHIN),
        lambda: daytona.create("box", MARKS, DaytonaConfig(), within=WITHIN),
        lambda: daytona.list(MARKS, within=WITHIN),
    ]
    for call in calls:
        error = refused(call)
        assert (error.kind, error.nothing_allocated) == (ErrorKind.INVALID, True)
        assert "organization_id" in error.excerpt
    assert server.asked == []


def test_another_account_behind_the_key_for_one_call_is_seen_in_that_call(
    server: Rehearsal, daytona: DaytonaProvider, create: Create
) -> None:
    sandbox = create()
    first = daytona.identify(within=WITHIN)
    server.will(Fault("*", Kind.OTHER_ACCOUNT, times=3))
    assert daytona.identify(within=WITHIN) != first
    # What it answers then is harmless only because its identity gives it away.
    assert daytona.inspect(sandbox, within=WITHIN) == Gone()
    assert daytona.identify(within=WITHIN) == first
    assert isinstance(daytona.inspect(sandbox, within=WITHIN), Running)
