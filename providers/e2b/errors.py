"""What the failures of E2B's API mean, in the closed list of the contract.

The service says by status, by a code of an open set, and by the header `Should-Retry` what happened. What it does not
name is judged by its status alone, and only where the answer has the service's own form: a reverse proxy's 404 says
nothing about a sandbox.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from http import HTTPStatus

import requests

from providers.contract import ErrorKind, ProviderError
from providers.failures import FULL_DISK, Answered, Call, by_status, json_body, told, wait

IN_PROGRESS = "idempotency_in_progress"
OUTCOME_UNKNOWN = "idempotency_outcome_unknown"
MISMATCH = "idempotency_request_mismatch"
CREATE_REFUSED = "sandbox_create_refused"
UNRESPONSIVE = "sandbox_snapshot_guest_agent_unresponsive"

_CODES = {
    IN_PROGRESS: ErrorKind.BUSY,
    OUTCOME_UNKNOWN: ErrorKind.REFUSED,
    MISMATCH: ErrorKind.NAME_TAKEN,
    CREATE_REFUSED: ErrorKind.INVALID,
    UNRESPONSIVE: ErrorKind.REFUSED,
}
_OTHER_TEAM = re.compile(r"You \(([0-9a-f-]{36})\) are not authorized to access this team's \(.*\) metrics")
_CHANGES = frozenset({Call.START, Call.STOP, Call.DELETE, Call.EXTEND})
_NEEDING_ROOM = frozenset({Call.START, Call.EXECUTE, Call.ARCHIVE})
_PASSING = frozenset({ErrorKind.RATE_LIMITED, ErrorKind.SERVER, ErrorKind.BUSY})
_FINAL = frozenset({ErrorKind.INVALID, ErrorKind.REFUSED})
_PROVING = frozenset({MISMATCH, CREATE_REFUSED, ""})


class Refusal(Answered):
    """An answer that is no success, with its code (empty for none) and what `Should-Retry` says (None for nothing)."""

    code: str = ""
    should_retry: bool | None = None


class OtherTeam(ProviderError):
    """What was asked is another team's business. The service says whose key it was asked with: `team`'s."""

    def __init__(self, team: str) -> None:
        super().__init__(ErrorKind.IDENTITY, f"the key belongs to another team: {team}")
        self.team = team


class Unresponsive(ProviderError):
    """A paused sandbox whose memory cannot be restored, only its disk."""


def answered(response: requests.Response) -> Refusal:
    """Read an answer that is no success."""
    body = json_body(response) or {}
    status, message, code = response.status_code, body.get("message"), body.get("error_code")
    in_form = body.get("code") == status and isinstance(message, str)
    hint = {"true": True, "false": False}.get(response.headers.get("Should-Retry", "").strip().lower())
    refusal = Refusal(status, str(message) if in_form else None, retry_after(response.headers))
    refusal.code = code if in_form and isinstance(code, str) else ""
    refusal.should_retry = hint
    return refusal


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Read the wait that is asked for, in seconds: `Retry-After`, or `RateLimit-Reset` where nothing remains."""
    asked = wait(headers.get("Retry-After"))
    if asked is None and headers.get("RateLimit-Remaining", "").strip() == "0":
        asked = wait(headers.get("RateLimit-Reset"))
    return asked


def meaning(call: Call, answer: Answered, secret: str | None) -> ProviderError:
    """Return the error that an answer of the service stands for."""
    code, hint = (answer.code, answer.should_retry) if isinstance(answer, Refusal) else ("", None)
    if call is Call.IDENTIFY and (other := _OTHER_TEAM.fullmatch(answer.message or "")):
        return OtherTeam(other[1])
    kind = _full_disk(call, answer.message) or _by_code(call, code) or _by_status(call, answer.status, answer.message)
    # The header is the service's own word on whether another try can help, and overrules what a status suggests.
    if hint is False and kind in _PASSING:
        kind = ErrorKind.REFUSED
    elif hint is True and kind in _FINAL:
        kind = ErrorKind.BUSY
    text = told(call, answer, secret) + (f" ({code})" if code and call is not Call.EXECUTE else "")
    if code == UNRESPONSIVE:
        return Unresponsive(kind, text, retry_after=answer.retry_after)
    # What is wrong with a request is found before anything is placed, and without a code of its own. Whatever went
    # wrong later has one, and of those only these two are final.
    proof = call is Call.CREATE and code in _PROVING and kind in {ErrorKind.INVALID, ErrorKind.NAME_TAKEN}
    return ProviderError(kind, text, retry_after=answer.retry_after, nothing_allocated=proof)


def _full_disk(call: Call, message: str | None) -> ErrorKind | None:
    """Return `DISK_FULL` where a sandbox that exists found no room. To a creation it is the service's own disk."""
    said = (message or "").lower()
    full = call in _NEEDING_ROOM and any(words in said for words in FULL_DISK)
    return ErrorKind.DISK_FULL if full else None


def _by_code(call: Call, code: str) -> ErrorKind | None:
    if code == CREATE_REFUSED and call is Call.START:
        # Resuming creates a machine from what was stored at the pause, and no retry changes a refusal of that.
        return ErrorKind.CANNOT_START
    return _CODES.get(code)


def _by_status(call: Call, status: int, message: str | None) -> ErrorKind:
    if status == HTTPStatus.SERVICE_UNAVAILABLE and call is Call.STOP and message is not None:
        # The one reason the service gives for it: the sandbox's own agent does not answer. Not the account's fault.
        return ErrorKind.REFUSED
    if (kind := by_status(status)) is not None:
        return kind
    if status == HTTPStatus.REQUEST_TIMEOUT:
        return ErrorKind.TIMEOUT
    if message is None:
        return ErrorKind.PROTOCOL
    match status:
        case 404 if call is Call.CREATE:
            return ErrorKind.INVALID
        case 404 if call in {Call.LIST, Call.FIND, Call.IDENTIFY}:
            return ErrorKind.PROTOCOL
        case 404:
            return ErrorKind.NOT_FOUND
        case 409:
            return ErrorKind.REFUSED if call is Call.CREATE else ErrorKind.BUSY
        case 400 | 422:
            return ErrorKind.REFUSED if call in _CHANGES or call in {Call.EXECUTE, Call.ARCHIVE} else ErrorKind.INVALID
    return ErrorKind.PROTOCOL
