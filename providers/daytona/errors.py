"""What the failures of Daytona's API mean, in the closed list of the contract.

The service says by status, and for a few answers only by its text, what happened; this table is the only place that
reads texts. Whatever it does not name is judged by its status alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import requests

from providers.contract import ErrorKind, ProviderError
from providers.failures import FULL_DISK, Answered, Call, by_status, json_body, told, wait

_CHANGES = frozenset({Call.START, Call.RECOVER, Call.STOP, Call.DELETE, Call.EXTEND, Call.EXECUTE, Call.ARCHIVE})
_NEEDING_ROOM = frozenset({Call.START, Call.EXECUTE, Call.ARCHIVE})
"""To a creation, the same words are about the disk of whoever makes sandboxes."""
_ROUTER = re.compile(r"cannot (?:get|post|put|patch|delete|head) /")
"""What a server says that has no such route. It says nothing about a sandbox."""
_QUOTA = re.compile(r"limit exceeded|exceeds maximum allowed|quota exceeded")
"""A refusal about what the organisation may have, whatever its status: older servers give it the one of a wrong key."""
_NO_MORE_DISK = "storage cannot be further expanded"
"""The service gave a full sandbox all the space that it ever gives by itself, and will not start it again."""


def meaning(call: Call, answered: Answered, secret: str | None) -> ProviderError:
    """Return the error that an answer of the service stands for."""
    kind = _kind(call, answered.status, answered.message)
    # A conflict of names is decided before anything is allocated. No other refusal says so: the service also answers
    # 400 for a sandbox that it made and could not start.
    taken = kind is ErrorKind.NAME_TAKEN
    text = told(call, answered, secret)
    return ProviderError(kind, text, retry_after=answered.retry_after, nothing_allocated=taken)


def _kind(call: Call, status: int, message: str | None) -> ErrorKind:
    said = (message or "").lower()
    if message is not None:
        if status in {400, 409} and "state change in progress" in said:
            return ErrorKind.BUSY
        if status in {400, 403} and _NO_MORE_DISK in said:
            return ErrorKind.CANNOT_START if call is Call.START else ErrorKind.REFUSED
        if call in _NEEDING_ROOM and any(words in said for words in FULL_DISK):
            return ErrorKind.DISK_FULL
        if status in {400, 403} and _QUOTA.search(said):
            return ErrorKind.INVALID if call is Call.CREATE else ErrorKind.REFUSED
    plain = by_status(status)
    if plain is not None:
        return plain
    match status:
        case 408:
            return ErrorKind.TIMEOUT
        # From here on, only what is in the service's own form: a reverse proxy's 404 says nothing about a sandbox.
        case _ if message is None or _ROUTER.match(said):
            return ErrorKind.PROTOCOL
        case 409 if call is Call.CREATE:
            return ErrorKind.NAME_TAKEN if "already exists" in said else ErrorKind.REFUSED
        case 409:
            return ErrorKind.BUSY
        case 404 if call is Call.CREATE:
            return ErrorKind.INVALID
        case 404 if "sandbox" in said and "not found" in said:
            return ErrorKind.NOT_FOUND
        # Of a region, a runner, a file: a sandbox that lacks one may well exist.
        case 404:
            return ErrorKind.REFUSED if call in _CHANGES else ErrorKind.PROTOCOL
        case 400 | 422:
            return ErrorKind.REFUSED if call in _CHANGES else ErrorKind.INVALID
    return ErrorKind.PROTOCOL


def answered(response: requests.Response) -> Answered:
    """Read an answer that is no success."""
    body = json_body(response) or {}
    message = body.get("message") if body.get("statusCode") == response.status_code else None
    if isinstance(message, list):  # one sentence for each field that does not fit
        message = "; ".join(str(part) for part in message)
    return Answered(response.status_code, message if isinstance(message, str) else None, retry_after(response.headers))


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Read the longest wait that is asked for: `Retry-After`, with or without a throttler's name behind it.

    Where there is none, `X-RateLimit-Reset-<throttler>` of those that have nothing left.
    """
    lower = {name.lower(): value for name, value in headers.items()}
    waits = [wait(value) for name, value in lower.items() if name.split("-")[:2] == ["retry", "after"]]
    if not any(seconds is not None for seconds in waits):
        waits = [
            wait(lower.get(name.replace("-remaining", "-reset", 1)))
            for name, value in lower.items()
            if name.startswith("x-ratelimit-remaining") and value.strip() == "0"
        ]
    return max((seconds for seconds in waits if seconds is not None), default=None)
