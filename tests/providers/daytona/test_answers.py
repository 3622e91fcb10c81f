"""What the Daytona provider makes of answers, and which configurations it takes. Without a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from providers.contract import Busy, Ended, ErrorKind, Gone, ProviderError, Running, Sighting, Stopped, Unknown
from providers.daytona import answers
from providers.daytona.errors import meaning, retry_after
from providers.daytona.schemas import DaytonaConfig, DaytonaEndpoint
from providers.failures import Answered, Call
from providers.registry import ConfigurationError, validate
from tests.tables import rows_of

PAGE = Path(__file__).parents[3] / "docs" / "daytona.md"
ID = "00000000-0000-4000-8000-000000000001"
KNOWN = {"started", "stopped", "paused", "archived", "resized", "destroyed"}
UNCLEAR: set[str | None] = {None, "", "hibernated"}


def description(**changes: Any) -> dict[str, Any]:
    return {
        "id": ID,
        "name": "name",
        "organizationId": "org",
        "labels": {"paperclip-env.lease": "1", "other": "label"},
        "state": "started",
        "desiredState": "started",
        **changes,
    }


def cases() -> list[tuple[str | None, str | None, str]]:
    """Spell out the table of the documentation: every state with every desired state."""
    rows = rows_of(PAGE, "States and sightings")
    named: dict[str, set[str]] = {}
    for row in rows:
        named.setdefault(row["state"], set()).update(row["desired state"].split(", "))
    spelt: list[tuple[str | None, str | None, str]] = []
    for row in rows:
        desired: set[str | None] = set()
        for word in row["desired state"].split(", "):
            match word:
                case "any":
                    desired |= KNOWN | UNCLEAR
                case "others":
                    desired |= KNOWN - named[row["state"]]
                case "unclear":
                    desired |= UNCLEAR
                case _:
                    desired.add(word)
        states = [None, "", "hibernating"] if row["state"] == "any other, or none" else [row["state"]]
        spelt += [(state, wish, row["sighting"]) for state in states for wish in sorted(desired, key=str)]
    return spelt


def words(sighting: Sighting) -> str:
    match sighting:
        case Stopped(ended=Ended.KILLED):
            return "stopped, killed"
        case Stopped():
            return "stopped, suspended"
        case Running() | Busy() | Gone() | Unknown():
            return type(sighting).__name__.lower()


@pytest.mark.parametrize(("state", "desired", "expected"), cases())
def test_a_state_means_what_the_table_says(state: str | None, desired: str | None, expected: str) -> None:
    seen = answers.sandbox(description(state=state, desiredState=desired))
    assert words(answers.sighting(seen)) == expected


def test_the_table_leaves_no_state_and_no_desired_state_out() -> None:
    spelt = cases()
    stable = {"started", "stopped", "archived", "paused", "destroyed", "error", "build_failed", "unknown"}
    states = stable | answers.TRANSITIONS
    assert {state for state, _, _ in spelt} - {None, "", "hibernating"} == states
    assert len(spelt) == len({(state, desired) for state, desired, _ in spelt}) == (len(states) + 3) * 9


def test_an_error_is_told_with_its_reason_and_without_a_secret() -> None:
    seen = answers.sandbox(description(state="error", recoverable=True, errorReason="disk full, token=abcdef"))
    sighting = answers.sighting(seen)
    assert isinstance(sighting, Unknown)
    assert sighting.reason == "error, recoverable: disk full, token=[redacted]"


def test_a_resource_has_the_marks_and_no_other_label() -> None:
    assert dict(answers.sandbox(description()).resource.marks) == {"paperclip-env.lease": "1"}
    assert dict(answers.sandbox(description(labels=None)).resource.marks) == {}


@pytest.mark.parametrize(
    ("state", "expected"),
    [("destroying", "busy"), ("error", "unknown"), ("started", "unknown"), ("destroyed", "unknown")],
)
def test_an_absence_that_a_list_denies_is_none(state: str, expected: str) -> None:
    listed = [answers.sandbox(description(state=state, desiredState="destroyed"))]
    assert words(answers.absence(ID, listed, complete=True)) == expected
    other = ID.replace("1", "2")
    assert words(answers.absence(other, listed, complete=True)) == "gone"
    assert words(answers.absence(other, listed, complete=False)) == "unknown"


@pytest.mark.parametrize("value", [None, "", "soon", 5, "2026-11-30T10:00:00"])
def test_a_deadline_that_is_no_moment_is_not_attested(value: object) -> None:
    assert answers.sandbox(description(autoDestroyAt=value)).resource.expires_at is None


@pytest.mark.parametrize(
    "answer",
    [None, [], "text", {}, description(id=""), description(id=5), description(name=None), description(labels=[1]),
     description(organizationId=None), description(id="x" * 201), description(id="a\nb")],
)  # fmt: skip
def test_nonsense_is_no_sandbox(answer: object) -> None:
    with pytest.raises(ProviderError) as caught:
        answers.sandbox(answer)
    assert caught.value.kind is ErrorKind.PROTOCOL


@pytest.mark.parametrize(
    "answer",
    [None, [], {}, {"items": None}, {"items": [description(), {}]}, {"items": [], "nextCursor": 5},
     {"items": [], "nextCursor": ""}],
)  # fmt: skip
def test_a_list_with_a_gap_is_no_list(answer: object) -> None:
    with pytest.raises(ProviderError) as caught:
        answers.page(answer)
    assert caught.value.kind is ErrorKind.PROTOCOL


@pytest.mark.parametrize(
    ("call", "status", "message", "kind"),
    [
        ("create", 409, "Sandbox with name x already exists", ErrorKind.NAME_TAKEN),
        ("create", 409, "something else", ErrorKind.REFUSED),
        ("create", 409, None, ErrorKind.PROTOCOL),
        ("create", 400, "Snapshot x not found", ErrorKind.INVALID),
        ("create", 404, "Snapshot x not found", ErrorKind.INVALID),
        ("create", 422, "not for this class", ErrorKind.INVALID),
        ("stop", 409, "Sandbox was modified by another operation", ErrorKind.BUSY),
        ("stop", 400, "Sandbox state change in progress", ErrorKind.BUSY),
        ("stop", 400, "Sandbox is not started", ErrorKind.REFUSED),
        ("delete", 400, "Cannot delete sandbox which has active fork children.", ErrorKind.REFUSED),
        ("delete", 404, "Cannot DELETE /api/sandbox/x", ErrorKind.PROTOCOL),
        ("inspect", 404, "Region not found", ErrorKind.PROTOCOL),
        ("recover", 404, "Sandbox with ID x does not have a runner", ErrorKind.REFUSED),
        ("recover", 400, "Sandbox is not in a recoverable state", ErrorKind.REFUSED),
        ("extend", 400, "TTL cannot be disabled", ErrorKind.REFUSED),
        ("create", 403, "CPU request 9 exceeds maximum allowed per sandbox (4).", ErrorKind.INVALID),
        ("create", 403, "Region us is not available to the organization", ErrorKind.AUTHORISATION),
        ("delete", 404, "Sandbox not found", ErrorKind.NOT_FOUND),
        ("delete", 404, None, ErrorKind.PROTOCOL),
        ("inspect", 404, "Cannot GET /api/sandbox/x", ErrorKind.PROTOCOL),
        ("execute", 408, "command execution timeout", ErrorKind.TIMEOUT),
        ("list", 402, "payment required", ErrorKind.PROTOCOL),
    ],
)
def test_a_refusal_means_what_its_call_makes_of_it(
    call: str, status: int, message: str | None, kind: ErrorKind
) -> None:
    error = meaning(Call(call), Answered(status, message), "key")
    assert error.kind is kind, error
    assert error.nothing_allocated == (kind is ErrorKind.NAME_TAKEN)


def test_a_refusal_that_quotes_the_key_is_told_without_it() -> None:
    error = meaning(Call.LIST, Answered(500, "cannot use zq123 (as 'zq123')"), "zq123")
    assert "zq123" not in str(error)
    command = meaning(Call.EXECUTE, Answered(500, "cannot run PASS=word"), "zq123")
    assert "word" not in str(command)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"Retry-After": "7"}, 7.0),
        ({"retry-after-sandbox-create": "30"}, 30.0),
        ({"Retry-After": "7", "Retry-After-authenticated": "30"}, 30.0),
        ({"Retry-After": "nonsense"}, None),
        ({"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}, 0.0),
        ({"X-RateLimit-Remaining-authenticated": "0", "X-RateLimit-Reset-authenticated": "12"}, 12.0),
        ({"X-RateLimit-Remaining-authenticated": "5", "X-RateLimit-Reset-authenticated": "12"}, None),
        ({"Retry-After": "1", "X-RateLimit-Remaining-a": "0", "X-RateLimit-Reset-a": "12"}, 1.0),
    ],
)
def test_the_longest_wait_that_is_asked_for_counts(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after(headers) == seconds


# Configuration.


@pytest.mark.parametrize(
    "data",
    [{}, {"image": "debian:12", "cpu": 2}, {"snapshot": "base"}, {"snapshot": "base", "cpu": 2},
     {"lifetime_seconds": 59}, {"auto_delete_minutes": 5}, {"auto_stop_minutes": 15, "target": "eu"}],
)  # fmt: skip
def test_these_configurations_are_accepted(data: dict[str, Any]) -> None:
    validate(DaytonaConfig, data)


@pytest.mark.parametrize(
    ("data", "field"),
    [
        ({"image": "debian:12", "snapshot": "base"}, "snapshot"),
        ({"cpu": 1}, "cpu"),
        ({"memory_gb": 1}, "memory_gb"),
        ({"disk_gb": 1}, "disk_gb"),
        ({"gpu": 1}, "gpu"),
        ({"image": "debian:12", "cpu": 0}, "cpu"),
        ({"image": "debian:12", "memory_gb": -1}, "memory_gb"),
        ({"image": "debian\nRUN x"}, "image"),
        ({"image": ""}, "image"),
        ({"env": {"A B": "x"}}, "env"),
        ({"lifetime_seconds": 0}, "lifetime_seconds"),
        ({"auto_stop_minutes": -1}, "auto_stop_minutes"),
        ({"auto_archive_minutes": -1}, "auto_archive_minutes"),
        ({"auto_delete_minutes": 0}, "auto_delete_minutes"),
        ({"auto_delete_minutes": -2}, "auto_delete_minutes"),
    ],
)
def test_these_configurations_are_refused_by_the_name_of_the_field(data: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        validate(DaytonaConfig, data)
    assert set(caught.value.errors) == {field}


@pytest.mark.parametrize("url", ["https://app.daytona.io/api/", "http://127.0.0.1:8970/api", "http://[::1]:1/api"])
def test_these_addresses_are_accepted(url: str) -> None:
    assert DaytonaEndpoint(url=url).url == url.rstrip("/")


@pytest.mark.parametrize(
    ("data", "field"),
    [
        ({"url": "http://daytona.example/api"}, "url"),
        ({"url": "https://key@daytona.example/api"}, "url"),
        ({"url": "https://daytona.example/api?key=x"}, "url"),
        ({"url": "https://"}, "url"),
        ({"url": "https://host:99999"}, "url"),
        ({"url": "daytona.example"}, "url"),
        ({"organization_id": "a b"}, "organization_id"),
        ({"tls_ca": "ca.pem"}, "tls_ca"),
    ],
)
def test_these_endpoints_are_refused_by_the_name_of_the_field(data: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        validate(DaytonaEndpoint, data)
    assert set(caught.value.errors) == {field}


# A full disk.


@pytest.mark.parametrize(
    ("reason", "full"),
    [
        # As the service's users report them, and as its runner recognises them.
        ("Error response from daemon: mkdir /var/lib/docker/overlay2/1f/merged: no space left on device", True),
        ("failed to start: write /run/x: Disk quota exceeded", True),
        ("Storage limit reached", True),
        ("timeout while starting", False),
        ("Total disk limit exceeded. Maximum allowed: 3.", False),
        ("", False),
    ],
)
@pytest.mark.parametrize("state", ["error", "build_failed"])
def test_an_error_for_a_full_disk_is_told_as_such(state: str, reason: str, *, full: bool) -> None:
    for recoverable in (True, False, None):
        seen = answers.sandbox(description(state=state, recoverable=recoverable, errorReason=reason))
        sighting = answers.sighting(seen)
        assert isinstance(sighting, Unknown)
        assert sighting.disk_full is full
        assert sighting.recoverable is (recoverable is True and state == "error")


def test_a_reason_from_before_says_nothing_of_a_sandbox_in_another_state() -> None:
    reason = "no space left on device"
    assert isinstance(answers.sighting(answers.sandbox(description(state="started", errorReason=reason))), Running)
    sighting = answers.sighting(answers.sandbox(description(state="hibernating", errorReason=reason)))
    assert isinstance(sighting, Unknown)
    assert not sighting.disk_full


@pytest.mark.parametrize("status", [400, 403, 409, 500, 503])
@pytest.mark.parametrize("message", ["mkdir /x/merged: no space left on device", "write /x: Disk quota exceeded"])
def test_a_full_disk_is_told_by_the_kernels_words_and_only_of_a_sandbox_that_exists(status: int, message: str) -> None:
    answered = Answered(status, message)
    for call in (Call.START, Call.EXECUTE, Call.ARCHIVE):
        assert meaning(call, answered, None).kind is ErrorKind.DISK_FULL
    for call in set(Call) - {Call.START, Call.EXECUTE, Call.ARCHIVE}:
        error = meaning(call, answered, None)
        assert error.kind is not ErrorKind.DISK_FULL
        assert not error.nothing_allocated
