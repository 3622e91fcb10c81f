"""What the E2B provider makes of answers, and which configurations it takes. Without a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlencode

import pytest
import requests

from providers.contract import Ended, ErrorKind, Sighting, Stopped
from providers.e2b import answers
from providers.e2b.errors import OtherTeam, Unresponsive, answered, meaning
from providers.e2b.schemas import E2BConfig, E2BEndpoint
from providers.failures import Call
from providers.registry import ConfigurationError, validate
from tests.providers.rehearsed import refused
from tests.tables import rows_of

PAGE = Path(__file__).parents[3] / "docs" / "e2b.md"
ID = "i0000000000000000001"
MODES: tuple[str | None, ...] = ("full", "filesystem", None, "", "half")
SPELT: dict[str, tuple[str | None, ...]] = {"any": MODES, "none": (None, ""), "any other": ("half",)}
END = "2026-11-30T12:00:00Z"


def description(**changes: Any) -> dict[str, Any]:
    marks = {"paperclip-env.lease": "1", answers.NAME: "box", answers.LIFETIME: "600", "other": "label"}
    return {"sandboxID": ID, "state": "running", "endAt": END, "metadata": marks, **changes}


def words(sighting: Sighting) -> str:
    ended = {Ended.KILLED: ", killed", Ended.SUSPENDED: ", suspended"}
    return type(sighting).__name__.lower() + (ended[sighting.ended] if isinstance(sighting, Stopped) else "")


def cases() -> list[tuple[str | None, str | None, str]]:
    """Spell out the table of the documentation: every state with every mode."""
    spelt = []
    for row in rows_of(PAGE, "States and sightings"):
        states = [None, "", "hibernating"] if row["state"] == "any other, or none" else [row["state"]]
        modes = SPELT.get(row["pause mode"], (row["pause mode"],))
        spelt += [(state, mode, row["sighting"]) for state in states for mode in modes]
    return spelt


@pytest.mark.parametrize(("state", "mode", "expected"), cases())
def test_a_state_means_what_the_table_says(state: str | None, mode: str | None, expected: str) -> None:
    assert words(answers.sighting(answers.sandbox(description(state=state, pauseMode=mode)))) == expected


def test_the_table_leaves_no_state_and_no_mode_out() -> None:
    spelt = {(state, mode) for state, mode, _ in cases()}
    assert spelt == {(state, mode) for state in ("running", "paused", None, "", "hibernating") for mode in MODES}
    assert len(spelt) == len(cases())


def test_a_resource_has_its_name_and_the_marks_and_nothing_else() -> None:
    seen = answers.sandbox(description())
    assert (seen.resource.name, dict(seen.resource.marks)) == ("box", {"paperclip-env.lease": "1"})
    assert seen.lifetime == 600
    foreign = answers.sandbox(description(metadata=None))
    assert (foreign.resource.name, dict(foreign.resource.marks), foreign.lifetime) == ("", {}, None)


@pytest.mark.parametrize("lifetime", ["", "soon", "-5", "1e3", "9" * 30])
def test_a_lifetime_that_is_no_number_is_none(lifetime: str) -> None:
    assert answers.sandbox(description(metadata={answers.LIFETIME: lifetime})).lifetime is None


def test_only_a_running_sandbox_has_a_deadline() -> None:
    running = answers.sandbox(description()).resource
    assert running.expires_at is not None
    assert running.expires_at.isoformat() == "2026-11-30T12:00:00+00:00"
    # Of a paused one, the service puts the time of its pause into the same field.
    assert answers.sandbox(description(state="paused", pauseMode="full")).resource.expires_at is None
    assert answers.sandbox(description(endAt="soon")).resource.expires_at is None


def test_an_absence_that_a_list_denies_is_none() -> None:
    listed = [answers.sandbox(description())]
    assert words(answers.absence(ID, listed, complete=True)) == "unknown"
    other = ID.replace("1", "2")
    assert words(answers.absence(other, listed, complete=True)) == "gone"
    assert words(answers.absence(other, listed, complete=False)) == "unknown"


@pytest.mark.parametrize(
    "answer", [None, {}, "text", [None], [{}], [{**description(), "sandboxID": ""}], [description(metadata=["x"])]]
)
def test_a_list_with_an_entry_that_is_none_is_not_understood(answer: object) -> None:
    assert refused(lambda: answers.listed(answer)).kind is ErrorKind.PROTOCOL


def test_a_filter_is_quoted_as_the_official_client_quotes_it() -> None:
    wanted = {"a b": "c&d=é/+%", "x": "y"}
    official = urlencode({quote(key): quote(value) for key, value in wanted.items()})
    assert answers.query(wanted) == official
    # What arrives is unquoted once with the query and once more as a whole; the parts stay quoted until they are apart.
    [arrived] = parse_qs(urlencode({"metadata": answers.query(wanted)}))["metadata"]
    assert arrived.count("&") == 1
    assert arrived.count("=") == 2


# Errors.


def answer(status: int, code: str = "", message: str = "said", *, form: bool = True, **headers: str) -> Any:
    response = requests.Response()
    response.status_code = status
    response.headers.update({name.replace("_", "-"): value for name, value in headers.items()})
    body = {"code": status, "message": message, **({"error_code": code} if code else {})}
    response._content = (json.dumps(body) if form else "<html>").encode()
    return answered(response)


def kind(call: Call, *args: Any, **options: Any) -> ErrorKind:
    return meaning(call, answer(*args, **options), None).kind


@pytest.mark.parametrize(
    ("call", "status", "code", "expected", "proof"),
    [
        ("create", 400, "", "invalid", True),
        ("create", 404, "", "invalid", True),
        ("create", 422, "", "invalid", True),
        ("create", 500, "sandbox_create_refused", "invalid", True),
        ("create", 422, "idempotency_request_mismatch", "name_taken", True),
        ("create", 409, "idempotency_in_progress", "busy", False),
        ("create", 409, "idempotency_outcome_unknown", "refused", False),
        ("create", 500, "idempotency_outcome_unknown", "refused", False),
        ("create", 409, "", "refused", False),
        ("create", 401, "", "authorisation", False),
        ("create", 403, "", "authorisation", False),
        ("create", 429, "", "rate_limited", False),
        ("create", 500, "", "server", False),
        ("create", 500, "sandbox_create_failed", "server", False),
        ("create", 503, "sandbox_capacity_unavailable", "server", False),
        ("create", 504, "sandbox_placement_timeout", "server", False),
        ("create", 400, "a_code_to_come", "invalid", False),
        ("start", 500, "sandbox_create_refused", "cannot_start", False),
        ("start", 409, "sandbox_snapshot_guest_agent_unresponsive", "refused", False),
        ("start", 404, "", "not_found", False),
        ("start", 409, "", "busy", False),
        ("stop", 503, "", "refused", False),
        ("stop", 409, "", "busy", False),
        ("delete", 503, "", "server", False),
        ("delete", 404, "", "not_found", False),
        ("delete", 400, "", "refused", False),
        ("extend", 400, "", "refused", False),
        ("inspect", 404, "", "not_found", False),
        ("inspect", 400, "", "invalid", False),
        ("list", 404, "", "protocol", False),
        ("find", 404, "", "protocol", False),
        ("inspect", 408, "", "timeout", False),
        ("inspect", 302, "", "protocol", False),
    ],
)
def test_an_answer_means(call: str, status: int, code: str, expected: str, *, proof: bool) -> None:
    error = meaning(Call(call), answer(status, code), None)
    assert (error.kind.value, error.nothing_allocated) == (expected, proof)


@pytest.mark.parametrize("status", [400, 404, 409, 422])
@pytest.mark.parametrize("call", ["create", "inspect", "delete", "stop"])
def test_what_is_not_in_the_services_form_says_nothing(call: str, status: int) -> None:
    error = meaning(Call(call), answer(status, form=False), None)
    assert (error.kind, error.nothing_allocated) == (ErrorKind.PROTOCOL, False)


@pytest.mark.parametrize(
    ("call", "status", "code", "hint", "expected"),
    [
        ("delete", 500, "", "false", "refused"),
        ("delete", 429, "", "false", "refused"),
        ("delete", 409, "", "false", "refused"),
        ("delete", 503, "", "true", "server"),
        ("delete", 429, "", "true", "rate_limited"),
        ("delete", 400, "", "true", "busy"),
        ("create", 400, "", "true", "busy"),
        ("create", 500, "sandbox_create_failed", "TRUE ", "server"),
        ("delete", 401, "", "true", "authorisation"),
        ("delete", 401, "", "false", "authorisation"),
        ("delete", 404, "", "true", "not_found"),
        ("delete", 500, "", "perhaps", "server"),
    ],
)
def test_whether_another_try_can_help_is_the_services_word(
    call: str, status: int, code: str, hint: str, expected: str
) -> None:
    error = meaning(Call(call), answer(status, code, Should_Retry=hint), None)
    assert (error.kind.value, error.nothing_allocated) == (expected, False)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"Retry_After": "9"}, 9.0),
        ({"Retry_After": "9", "RateLimit_Remaining": "0", "RateLimit_Reset": "60"}, 9.0),
        ({"RateLimit_Remaining": "0", "RateLimit_Reset": "60"}, 60.0),
        ({"RateLimit_Remaining": "3", "RateLimit_Reset": "60"}, None),
        ({"Retry_After": "soon"}, None),
        ({}, None),
    ],
)
def test_an_error_carries_the_wait_that_is_asked_for(headers: dict[str, str], expected: float | None) -> None:
    assert meaning(Call.DELETE, answer(429, **headers), None).retry_after == expected


def test_the_team_of_a_key_is_taken_from_one_sentence_as_a_whole() -> None:
    ours, theirs = "0" * 8 + "-0000-4000-8000-" + "1" * 12, "x"
    said = f"You ({ours}) are not authorized to access this team's ({theirs}) metrics"
    error = meaning(Call.IDENTIFY, answer(403, message=said), None)
    assert isinstance(error, OtherTeam)
    assert (error.kind, error.team) == (ErrorKind.IDENTITY, ours)
    for other in (f"{said}, perhaps", f"No. {said}", said.replace(ours, "you"), "Team is blocked"):
        assert kind(Call.IDENTIFY, 403, message=other) is ErrorKind.AUTHORISATION
    assert kind(Call.DELETE, 403, message=said) is ErrorKind.AUTHORISATION


def test_memory_that_cannot_be_restored_has_an_error_of_its_own() -> None:
    error = meaning(Call.START, answer(409, "sandbox_snapshot_guest_agent_unresponsive"), None)
    assert isinstance(error, Unresponsive)


def test_an_error_quotes_neither_the_key_nor_what_a_command_was_given() -> None:
    error = meaning(Call.CREATE, answer(400, message="no: zq123 is no key"), "zq123")
    assert "zq123" not in str(error)
    assert "is no key" in str(error)
    assert "given" not in str(meaning(Call.EXECUTE, answer(400, message="given"), None))


# Configurations.


@pytest.mark.parametrize(
    ("schema", "data", "field"),
    [
        (E2BEndpoint, {"url": "http://api.e2b.app"}, "url"),
        (E2BEndpoint, {"url": "https://key@api.e2b.app"}, "url"),
        (E2BEndpoint, {"sandbox_url": "http://sandbox.e2b.app"}, "sandbox_url"),
        (E2BEndpoint, {"team_id": "our team"}, "team_id"),
        (E2BEndpoint, {"tls_ca": "ca.pem"}, "tls_ca"),
        (E2BEndpoint, {"api_key": "e2b_0123"}, "api_key"),
        (E2BConfig, {"template": ""}, "template"),
        (E2BConfig, {"template": "../base"}, "template"),
        (E2BConfig, {"lifetime_seconds": 59}, "lifetime_seconds"),
        (E2BConfig, {"lifetime_seconds": 86_401}, "lifetime_seconds"),
        (E2BConfig, {"lifetime_seconds": "3600"}, "lifetime_seconds"),
        (E2BConfig, {"env": {"A B": "x"}}, "env"),
        (E2BConfig, {"internet_access": "no"}, "internet_access"),
        (E2BConfig, {"timeoutMs": 1000}, "timeoutMs"),
    ],
)
def test_nonsense_is_refused_by_the_name_of_its_field(schema: Any, data: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        validate(schema, data)
    assert set(caught.value.errors) == {field}


def test_a_template_is_named_with_its_team_and_tag() -> None:
    for name in ("base", "my-team/tools:v2", "k0wmnzir0zuzye6dndlw"):
        assert E2BConfig(template=name).template == name
