"""What the failures of an engine mean, in the closed list of the contract.

Engines say by status *and by text* what happened, and differ in both: this table is the only place that reads their
texts. Whatever it does not name is judged by its status alone. Failures that are about one sandbox must not pass for
failures of the engine, because those close the account to everybody else.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

import requests
from docker.errors import DockerException

from providers import failures
from providers.contract import ErrorKind, ProviderError
from providers.deadline import Deadline
from providers.failures import FULL_DISK, Answered, Call, by_status, json_body, told, wait


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
_NEEDING_ROOM = frozenset({Call.START, Call.STOP, Call.DELETE, Call.EXECUTE, Call.ARCHIVE})
"""Calls that do something to one container. A `create` that finds the engine's storage full is the engine's failure."""

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
    _Meaning(
        ErrorKind.MISSING_PATH,
        frozenset({400, 404, 500}),
        ("could not find the file", "no such file or directory", "not a directory"),
        frozenset({Call.ARCHIVE}),
    ),
    # In the words of the kernel, which all engines hand on, behind those of whoever met it. Before what follows: the
    # rest of the text says what was being done.
    _Meaning(ErrorKind.DISK_FULL, frozenset(range(400, 600)), FULL_DISK, _NEEDING_ROOM),
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
    status, message, text = answered.status, answered.message, told(call, answered)
    if message is not None:
        for entry in _MEANINGS:
            if entry.fits(call, status, message.lower()):
                return ProviderError(entry.kind, text, nothing_allocated=entry.nothing_allocated)
    kind = by_status(status)
    if kind is None:
        # Also a 404 that is not about a container, and every refusal that is not in an engine's form: somebody else
        # answers here (a reverse proxy, another service), and nothing may be concluded.
        kind = ErrorKind.INVALID if status in {400, 422} and message is not None else ErrorKind.PROTOCOL
    return ProviderError(kind, text, retry_after=answered.retry_after)


def answered(response: requests.Response) -> Answered:
    """Read an answer that is no success."""
    message = (json_body(response) or {}).get("message")
    return Answered(
        response.status_code,
        message if isinstance(message, str) else None,
        wait(response.headers.get("Retry-After")),
    )


def translated(call: Call, deadline: Deadline) -> AbstractContextManager[None]:
    """Turn every failure of what is done inside into a `ProviderError`, the SDK's own stumbling included."""
    return failures.translated(call, deadline, lambda answered: meaning(call, answered), stumbles=(DockerException,))
