"""What the failures of an engine mean, in the closed list of the contract.

Engines say by status *and by text* what happened, and differ in both: this table is the only place that reads their
texts. Whatever it does not name is judged by its status alone. Failures that are about one sandbox must not pass for
failures of the engine, because those close the account to everybody else.
"""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import StrEnum
from http import HTTPStatus

import requests
import urllib3
from docker.errors import DockerException

from providers.contract import ErrorKind, ProviderError
from providers.deadline import Deadline


class Call(StrEnum):
    """What the engine is being asked, as far as the meaning of its answers depends on it."""

    IDENTIFY = "identify"
    CREATE = "create"
    START = "start"
    STOP = "stop"
    DELETE = "delete"
    INSPECT = "inspect"
    LIST = "list"
    EXECUTE = "execute"


class Answered(Exception):
    """The engine answered with a status that is no success. `message` is its own, or None if it gave none as JSON.

    Never leaves this package: the text is not redacted.
    """

    def __init__(self, status: int, message: str | None, retry_after: float | None = None) -> None:
        super().__init__(status)
        self.status = status
        self.message = message
        self.retry_after = retry_after


@dataclass(frozen=True, slots=True)
class _Meaning:
    kind: ErrorKind
    statuses: frozenset[int]
    texts: tuple[str, ...]
    """One of these is part of the message, in lower case. None at all: any message will do."""
    calls: frozenset[Call] = frozenset(Call)
    nothing_allocated: bool = False

    def fits(self, call: Call, status: int, text: str) -> bool:
        return (
            call in self.calls
            and status in self.statuses
            and (not self.texts or any(part in text for part in self.texts))
        )


_CREATE = frozenset({Call.CREATE})

# The first one that fits counts. Podman 4 answers 500 where Docker answers 4xx.
_MEANINGS = (
    # A name that something else than a container holds (buildah's work) is not a sandbox that could be found.
    _Meaning(ErrorKind.REFUSED, frozenset({500}), ("external entity",), _CREATE),
    _Meaning(ErrorKind.NAME_TAKEN, frozenset({409}), (), _CREATE, nothing_allocated=True),
    _Meaning(ErrorKind.NAME_TAKEN, frozenset({500}), ("is already in use by",), _CREATE, nothing_allocated=True),
    _Meaning(ErrorKind.INVALID, frozenset({404}), ("no such image",), _CREATE, nothing_allocated=True),
    _Meaning(ErrorKind.INVALID, frozenset({400}), (), _CREATE, nothing_allocated=True),
    _Meaning(ErrorKind.INVALID, frozenset({500}), ("container-init binary not found",), _CREATE),
    _Meaning(ErrorKind.NOT_FOUND, frozenset({404, 409, 500}), ("no such container",)),
    _Meaning(ErrorKind.REFUSED, frozenset({404, 409, 500}), ("no such exec",)),
    # "removal of container ... is already in progress", "container is marked for removal and cannot be started".
    _Meaning(ErrorKind.BUSY, frozenset({409, 500}), ("is already in progress", "marked for removal")),
    # The first process of the sandbox cannot be run: trying again cannot help.
    _Meaning(
        ErrorKind.INVALID,
        frozenset({400, 404, 500}),
        ('exec: "', "invoke a command that was not found"),
        frozenset({Call.START}),
    ),
    # About one container, in podman's words and in Docker's.
    _Meaning(
        ErrorKind.REFUSED,
        frozenset({500}),
        (
            "container state improper",
            "did not receive an exit event",
            "unable to remove filesystem",
            "failed to remove root filesystem",
        ),
    ),
    _Meaning(ErrorKind.REFUSED, frozenset({409}), ()),
)


def meaning(call: Call, answered: Answered) -> ProviderError:
    """Return the error that an answer of the engine stands for."""
    status, message = answered.status, answered.message
    # A command's environment and input may hold secrets, and an engine may quote what it was sent.
    quote = "" if call is Call.EXECUTE else message or ""
    text = f"{call} answered {status}: {quote}" if quote else f"{call} answered {status}"
    if message is not None:
        for entry in _MEANINGS:
            if entry.fits(call, status, message.lower()):
                return ProviderError(entry.kind, text, nothing_allocated=entry.nothing_allocated)
    return ProviderError(_by_status(status, message), text, retry_after=answered.retry_after)


def _by_status(status: int, message: str | None) -> ErrorKind:
    match status:
        case 401 | 403:
            return ErrorKind.AUTHORISATION
        case 429:
            return ErrorKind.RATE_LIMITED
        case _ if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            return ErrorKind.SERVER
        case 400 | 422 if message is not None:
            return ErrorKind.INVALID
    # Also a 404 that is not about a container, and every refusal that is not in an engine's form: somebody else
    # answers here (a reverse proxy, another service), and nothing may be concluded.
    return ErrorKind.PROTOCOL


def answered(response: requests.Response) -> Answered:
    """Read an answer that is no success."""
    try:
        body = response.json()
    except (ValueError, RecursionError):
        body = None
    message = body.get("message") if isinstance(body, dict) else None
    return Answered(
        response.status_code,
        message if isinstance(message, str) else None,
        _seconds(response.headers.get("Retry-After")),
    )


def _seconds(value: str | None) -> float | None:
    """Read a `Retry-After`: seconds, or a date."""
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
def translated(call: Call, deadline: Deadline) -> Iterator[None]:
    """Turn every failure of what is done inside into a `ProviderError`.

    The original is cut off (`from None`): its text and its own causes may hold what was sent.
    """
    try:
        yield
    except ProviderError:
        raise
    except Answered as error:
        raise meaning(call, error) from None
    except (OSError, requests.RequestException, urllib3.exceptions.HTTPError, http.client.HTTPException) as error:
        raise _transport(call, deadline, error) from None
    except (DockerException, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        # The SDK, or we, stumbled over an answer.
        raise ProviderError(ErrorKind.PROTOCOL, f"{call}: not understood ({type(error).__name__})") from None


def _transport(call: Call, deadline: Deadline, error: Exception) -> ProviderError:
    if deadline.passed:
        return ProviderError(ErrorKind.TIMEOUT, f"{call}: the bound on its total time passed")
    chain = list(_chain(error))
    for cause in chain:
        if isinstance(cause, ssl.SSLError):
            return ProviderError(_tls(cause), f"{call}: TLS: {cause.reason or cause}")
    if isinstance(error, requests.JSONDecodeError | requests.TooManyRedirects | requests.exceptions.InvalidHeader):
        return ProviderError(ErrorKind.PROTOCOL, f"{call}: not understood ({type(error).__name__})")
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
        nested = [value for value in (*current.args, getattr(current, "reason", None)) if _is_error(value)]
        current = nested[0] if nested else current.__cause__ or current.__context__


def _is_error(value: object) -> bool:
    return isinstance(value, BaseException)


def _tls(error: ssl.SSLError) -> ErrorKind:
    """Tell "the engine refused our certificate" (it said so, by an alert) from every other failure of TLS."""
    reason = error.reason or ""
    refused = "ALERT" in reason and any(word in reason for word in ("CERTIFICATE", "UNKNOWN_CA", "ACCESS_DENIED"))
    return ErrorKind.AUTHORISATION if refused else ErrorKind.CONNECTION
