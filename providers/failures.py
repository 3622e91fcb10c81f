"""What the failures of a call over HTTP mean, as far as that is the same for every provider.

What broke on the way (no connection, a bound that passed, bytes that are no HTTP) is judged here. What a service's own
answers mean is for its adapter to say, which hands its reading in as a `Meaning`.
"""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import StrEnum
from http import HTTPStatus
from typing import Any

import requests
import urllib3

from providers.contract import ErrorKind, ProviderError
from providers.deadline import Deadline


class Call(StrEnum):
    """What a service is being asked, as far as the meaning of its answers depends on it."""

    IDENTIFY = "identify"
    CREATE = "create"
    START = "start"
    RECOVER = "recover"
    STOP = "stop"
    DELETE = "delete"
    EXTEND = "extend"
    INSPECT = "inspect"
    FIND = "find"
    LIST = "list"
    EXECUTE = "execute"
    ARCHIVE = "archive"


FULL_DISK = ("no space left on device", "disk quota exceeded")
"""The kernel's words for ENOSPC and EDQUOT, in lower case: what services hand on when a disk or a quota is used up."""


class Answered(Exception):
    """A service answered with a status that is no success. `message` is its own, or None if it gave none in its form.

    `retry_after` is in seconds. Never leaves an adapter: the text is not redacted.
    """

    def __init__(self, status: int, message: str | None, retry_after: float | None = None) -> None:
        super().__init__(status)
        self.status = status
        self.message = message
        self.retry_after = retry_after


Meaning = Callable[[Answered], ProviderError]
"""Says what an answer that is no success stands for, in one call."""


def json_body(response: requests.Response) -> dict[str, Any] | None:
    """Return the JSON object that an answer holds, or None where it holds none."""
    try:
        body = response.json()
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None


def wait(value: str | None) -> float | None:
    """Read the value of a `Retry-After`, seconds or a date, as seconds from now. What is neither asks for nothing."""
    if value is None:
        return None
    if value.strip().isdecimal():
        return float(value)
    try:
        when = parsedate_to_datetime(value)
    except ValueError:
        return None
    return max(0.0, (when.replace(tzinfo=when.tzinfo or UTC) - datetime.now(UTC)).total_seconds())


def told(call: Call, answered: Answered, secret: str | None = None) -> str:
    """Return what an answer says, for people: without the secret, and without what a command was given."""
    # A command's environment and input may hold secrets, and a service may quote what it was sent.
    quote = "" if call is Call.EXECUTE else answered.message or ""
    if secret:
        quote = quote.replace(secret, "[redacted]")
    return f"{call} answered {answered.status}: {quote}" if quote else f"{call} answered {answered.status}"


def by_status(status: int) -> ErrorKind | None:
    """Return the kind that a status has whoever answers, or None where that depends on the service."""
    match status:
        case 401 | 403:
            return ErrorKind.AUTHORISATION
        case 429:
            return ErrorKind.RATE_LIMITED
        case _ if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            return ErrorKind.SERVER
    return None


_NONSENSE: tuple[type[Exception], ...] = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


@contextmanager
def translated(
    call: Call, deadline: Deadline, meaning: Meaning | None = None, *, stumbles: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Turn every failure of what is done inside into a `ProviderError`.

    `stumbles` are the exceptions of a client library over an answer that it does not understand. The original is cut
    off (`from None`): its text and its own causes may hold what was sent.
    """
    try:
        yield
    except ProviderError:
        raise
    except Answered as error:
        if meaning is None:
            raise ProviderError(ErrorKind.PROTOCOL, told(call, error)) from None
        raise meaning(error) from None
    except (OSError, requests.RequestException, urllib3.exceptions.HTTPError, http.client.HTTPException) as error:
        raise _transport(call, deadline, error) from None
    except (*_NONSENSE, *stumbles) as error:
        raise ProviderError(ErrorKind.PROTOCOL, f"{call}: not understood ({type(error).__name__})") from None


class UnlessGone:
    """Passes over `NOT_FOUND`, where a sandbox that is not there leaves nothing to do, or is looked for elsewhere."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        return isinstance(error, ProviderError) and error.kind is ErrorKind.NOT_FOUND


_MISUNDERSTOOD = (
    requests.JSONDecodeError,
    requests.TooManyRedirects,
    requests.exceptions.InvalidHeader,
    requests.exceptions.InvalidURL,
)


def _transport(call: Call, deadline: Deadline, error: Exception) -> ProviderError:
    if deadline.passed:
        return ProviderError(ErrorKind.TIMEOUT, f"{call}: the bound on its total time passed")
    chain = list(_chain(error))
    for cause in chain:
        if isinstance(cause, ssl.SSLError):
            return ProviderError(_tls(cause), f"{call}: TLS: {cause.reason or type(cause).__name__}")
    if isinstance(error, _MISUNDERSTOOD):
        return ProviderError(ErrorKind.PROTOCOL, f"{call}: not understood ({type(error).__name__})")
    # The innermost cause names what happened ("Connection refused"); the outer ones quote addresses and objects.
    innermost = chain[-1]
    if isinstance(innermost, http.client.HTTPException) and not isinstance(
        innermost, http.client.RemoteDisconnected | http.client.IncompleteRead
    ):
        return ProviderError(ErrorKind.PROTOCOL, f"{call}: not HTTP ({type(innermost).__name__})")
    reason = innermost.strerror if isinstance(innermost, OSError) and innermost.strerror else type(innermost).__name__
    return ProviderError(ErrorKind.CONNECTION, f"{call}: {reason}")


def _tls(error: ssl.SSLError) -> ErrorKind:
    """Tell "the server refused our certificate" (it said so, by an alert) from every other failure of TLS."""
    reason = error.reason or ""
    refused = "ALERT" in reason and any(word in reason for word in ("CERTIFICATE", "UNKNOWN_CA", "ACCESS_DENIED"))
    return ErrorKind.AUTHORISATION if refused else ErrorKind.CONNECTION


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
