"""What the failures of Daytona's API mean, in the closed list of the contract.

The service says by status, and for a few answers only by its text, what happened; this table is the only place that
reads texts. Whatever it does not name is judged by its status alone.
"""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import StrEnum
from http import HTTPStatus

import requests
import urllib3

from providers.contract import ErrorKind, ProviderError
from providers.deadline import Deadline


class Call(StrEnum):
    """What the service is being asked, as far as the meaning of its answers depends on it."""

    IDENTIFY = "identify"
    CREATE = "create"
    START = "start"
    STOP = "stop"
    DELETE = "delete"
    INSPECT = "inspect"
    FIND = "find"
    LIST = "list"
    EXECUTE = "execute"


class Answered(Exception):
    """The service answered with a status that is no success. `message` is its own, or None if it gave none as JSON.

    Never leaves this package: the text is not redacted.
    """

    def __init__(self, status: int, message: str | None, retry_after: float | None = None) -> None:
        super().__init__(status)
        self.status = status
        self.message = message
        self.retry_after = retry_after


_CHANGES = frozenset({Call.START, Call.STOP, Call.DELETE})


def meaning(call: Call, answered: Answered, secret: str | None) -> ProviderError:
    """Return the error that an answer of the service stands for."""
    status, message = answered.status, answered.message
    # A command's environment and input may hold secrets, and a service may quote what it was sent.
    quote = "" if call is Call.EXECUTE else message or ""
    if secret:
        quote = quote.replace(secret, "[redacted]")
    text = f"{call} answered {status}: {quote}" if quote else f"{call} answered {status}"
    kind = _kind(call, status, message)
    # A conflict of names is decided before anything is allocated. No other refusal says so: the service also answers
    # 400 for a sandbox that it made and could not start.
    taken = kind is ErrorKind.NAME_TAKEN
    return ProviderError(kind, text, retry_after=answered.retry_after, nothing_allocated=taken)


def _kind(call: Call, status: int, message: str | None) -> ErrorKind:
    said = (message or "").lower()
    if message is not None and status in {400, 409} and "state change in progress" in said:
        return ErrorKind.BUSY
    match status:
        case 401 | 403:
            return ErrorKind.AUTHORISATION
        case 408:
            return ErrorKind.TIMEOUT
        case 429:
            return ErrorKind.RATE_LIMITED
        case _ if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            return ErrorKind.SERVER
        # From here on, only what is in the service's own form: a reverse proxy's 404 says nothing about a sandbox.
        case _ if message is None or said.startswith("cannot "):
            return ErrorKind.PROTOCOL
        case 409 if call is Call.CREATE:
            return ErrorKind.NAME_TAKEN if "already exists" in said else ErrorKind.REFUSED
        case 409:
            return ErrorKind.BUSY
        case 404:
            return ErrorKind.INVALID if call is Call.CREATE else ErrorKind.NOT_FOUND
        case 400 | 422:
            return ErrorKind.REFUSED if call in _CHANGES or call is Call.EXECUTE else ErrorKind.INVALID
    return ErrorKind.PROTOCOL


def answered(response: requests.Response) -> Answered:
    """Read an answer that is no success."""
    try:
        body = response.json()
    except (ValueError, RecursionError):
        body = None
    message = body.get("message") if isinstance(body, dict) and body.get("statusCode") == response.status_code else None
    if isinstance(message, list):  # one sentence for each field that does not fit
        message = "; ".join(str(part) for part in message)
    return Answered(response.status_code, message if isinstance(message, str) else None, retry_after(response.headers))


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Read the longest wait that is asked for: `Retry-After`, with or without a throttler's name behind it.

    Where there is none, `X-RateLimit-Reset-<throttler>` of those that have nothing left.
    """
    lower = {name.lower(): value for name, value in headers.items()}
    waits = [_seconds(value) for name, value in lower.items() if name.split("-")[:2] == ["retry", "after"]]
    if not any(wait is not None for wait in waits):
        waits = [
            _seconds(lower.get(name.replace("-remaining", "-reset", 1)))
            for name, value in lower.items()
            if name.startswith("x-ratelimit-remaining") and value.strip() == "0"
        ]
    return max((wait for wait in waits if wait is not None), default=None)


def _seconds(value: str | None) -> float | None:
    """Read seconds, or a date."""
    if value is None:
        return None
    if value.strip().isdecimal():
        return float(value)
    try:
        when = parsedate_to_datetime(value)
    except ValueError:
        return None
    return max(0.0, (when.replace(tzinfo=when.tzinfo or UTC) - datetime.now(UTC)).total_seconds())


@contextmanager
def translated(call: Call, deadline: Deadline, secret: str | None = None) -> Iterator[None]:
    """Turn every failure of what is done inside into a `ProviderError`.

    The original is cut off (`from None`): its text and its own causes may hold what was sent.
    """
    try:
        yield
    except ProviderError:
        raise
    except Answered as error:
        raise meaning(call, error, secret) from None
    except (OSError, requests.RequestException, urllib3.exceptions.HTTPError, http.client.HTTPException) as error:
        raise _transport(call, deadline, error) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ProviderError(ErrorKind.PROTOCOL, f"{call}: not understood ({type(error).__name__})") from None


def _transport(call: Call, deadline: Deadline, error: Exception) -> ProviderError:
    if deadline.passed:
        return ProviderError(ErrorKind.TIMEOUT, f"{call}: the bound on its total time passed")
    if isinstance(error, requests.JSONDecodeError | requests.exceptions.InvalidHeader | requests.exceptions.InvalidURL):
        return ProviderError(ErrorKind.PROTOCOL, f"{call}: not understood ({type(error).__name__})")
    chain = list(_chain(error))
    for cause in chain:
        if isinstance(cause, ssl.SSLError):
            return ProviderError(ErrorKind.CONNECTION, f"{call}: TLS: {cause.reason or type(cause).__name__}")
    # The innermost cause names what happened ("Connection refused"); the outer ones quote addresses and objects.
    innermost = chain[-1]
    if isinstance(innermost, http.client.HTTPException) and not isinstance(
        innermost, http.client.RemoteDisconnected | http.client.IncompleteRead
    ):
        return ProviderError(ErrorKind.PROTOCOL, f"{call}: not HTTP ({type(innermost).__name__})")
    reason = innermost.strerror if isinstance(innermost, OSError) and innermost.strerror else type(innermost).__name__
    return ProviderError(ErrorKind.CONNECTION, f"{call}: {reason}")


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and what it came from, outermost first; the libraries also nest causes in arguments."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        nested = [
            value for value in (*current.args, getattr(current, "reason", None)) if isinstance(value, BaseException)
        ]
        current = nested[0] if nested else current.__cause__ or current.__context__
