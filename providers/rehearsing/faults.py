"""The faults that a rehearsal is told to produce, call by call.

A fault waits for the next request of its call (and, where it names one, of its sandbox), and is used up after `times`
of them. Faults of one request add up: a delay and an answer, say.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Kind(StrEnum):
    ANSWER = "answer"
    """Answer `status` with `headers` and `message`, and do nothing. With `effect`, do what was asked first."""
    LOST = "lost"
    """Do what was asked, and close the connection without an answer."""
    RESET = "reset"
    """Reset the connection, and do nothing."""
    DELAY = "delay"
    """Wait `seconds` before anything else."""
    TRICKLE = "trickle"
    """Answer one byte a second."""
    CUT = "cut"
    """Send half of the answer, and close the connection."""
    ERROR = "error"
    """The transition that this call begins ends in the state `error` (`recoverable` or not), and nothing is ended."""
    HIDDEN = "hidden"
    """The deletion that this call begins fails: nothing is ended, and the sandbox is hidden behind 404."""
    DISK_FULL = "disk_full"
    """Like `error`, with a full disk as its reason. A command or an upload is refused for it."""
    OTHER_ACCOUNT = "other_account"
    """The call is answered as if its key belonged to another account."""
    STUCK = "stuck"
    """The transition that this call begins never ends."""
    UNRESPONSIVE = "unresponsive"
    """The sandbox's own agent does not answer to what this call needs of it."""
    LEFT_OUT = "left_out"
    """A list leaves out `sandbox`, or everything."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. `call` is the name of a call (see the rehearsal's routes), or `*` for any."""

    call: str
    kind: Kind
    times: int = 1
    sandbox: str | None = None
    """Id or name in the request's path. For `left_out`, the id that is left out."""
    status: int = 500
    message: str = "rehearsed"
    """Of an answer, or the reason of an error."""
    headers: Mapping[str, str] = field(default_factory=dict)
    details: Mapping[str, object] = field(default_factory=dict)
    """Further keys of an answer, where the service has some."""
    effect: bool = False
    seconds: float = 1.0
    recoverable: bool = False

    @classmethod
    def asked_for(cls, asked: Mapping[str, object], calls: Collection[str]) -> Fault:
        """Return the fault that a request describes, for one of `calls` or for `*`.

        Raises `ValueError` with a sentence for whoever scripts it: a fault that is misspelt would wait for ever.
        """
        choices = {"call": ["*", *sorted(set(calls))], "kind": [kind.value for kind in Kind]}
        for name, allowed in choices.items():
            if asked.get(name) not in allowed:
                raise ValueError(f"{name}: {asked.get(name)!r} is none of {', '.join(allowed)}")
        for name, value in asked.items():
            if name not in choices and name not in _FITS:
                raise ValueError(f"{name}: is nothing that a fault has; it may have {', '.join([*choices, *_FITS])}")
            if name in _FITS and not _FITS[name][1](value):
                raise ValueError(f"{name}: must be {_FITS[name][0]}")
        return cls(**{**asked, "kind": Kind(asked["kind"])})  # type: ignore[arg-type]  # looked at above


def _number(least: float, most: float, *types: type) -> Callable[[object], bool]:
    return lambda value: isinstance(value, types) and not isinstance(value, bool) and least <= value <= most  # type: ignore[operator]


def _one(*types: type) -> Callable[[object], bool]:
    return lambda value: isinstance(value, types)


def _texts(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


_FITS: Mapping[str, tuple[str, Callable[[object], bool]]] = {
    "times": ("a whole number, 1 or more", _number(1, float("inf"), int)),
    "sandbox": ("a text or null", _one(str, type(None))),
    "status": ("a whole number from 200 to 599", _number(200, 599, int)),
    "message": ("a text", _one(str)),
    "headers": ("an object of texts", _texts),
    "details": ("an object", _one(dict)),
    "effect": ("true or false", _one(bool)),
    "seconds": ("a number from 0 to 86400", _number(0, 86400, int, float)),
    "recoverable": ("true or false", _one(bool)),
}
"""What a request may say of a fault beside `call` and `kind`: how it must be, and whether it is."""


class Script:
    """The faults that are still to come. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[tuple[Fault, int]] = []

    def add(self, *faults: Fault) -> None:
        with self._lock:
            self._waiting += [(fault, fault.times) for fault in faults]

    def clear(self) -> None:
        with self._lock:
            self._waiting.clear()

    def waiting(self) -> list[Fault]:
        with self._lock:
            return [fault for fault, _ in self._waiting]

    def take(self, call: str, sandbox: str | None) -> dict[Kind, Fault]:
        """Use up the faults that this request meets: the first of each kind."""
        met: dict[Kind, Fault] = {}
        with self._lock:
            left = []
            for fault, times in self._waiting:
                addressed = fault.kind is Kind.LEFT_OUT or fault.sandbox in {None, sandbox}
                if fault.call in {call, "*"} and addressed and fault.kind not in met:
                    met[fault.kind] = fault
                    times -= 1  # noqa: PLW2901  (what is left of it goes back on the list)
                if times:
                    left.append((fault, times))
            self._waiting = left
        return met
