"""What to do next about a sandbox that owes its teardown. A pure function of facts; its table is `docs/teardown.md`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from leases.models.obligations import Obligation
from leases.models.receipts import Receipt
from providers.contract import ACCOUNT_KINDS, Busy, Ended, ErrorKind, Gone, Running, Sighting, Stopped

Verb = Obligation.Verb
Evidence = Receipt.Evidence

ACCEPTED = "accepted"
"""What became of a call that changes something: not made yet (None), accepted, or refused with an error kind."""
Sent = ErrorKind | str | None


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything the decision depends on. `sighting` is of this very attempt; None means not looked yet."""

    verb: Verb
    drain_until: datetime | None = None
    """Set while work is in flight that may still be waited for."""
    sighting: Sighting | None = None
    foreign: bool = False
    """The sandbox carries another installation's mark, or none."""
    stop: Sent = None
    delete: Sent = None
    delete_announced: bool = False
    """Some attempt at this obligation, this one or an earlier one, was about to delete."""


@dataclass(frozen=True, slots=True)
class Drain:
    until: datetime


@dataclass(frozen=True, slots=True)
class Look:
    pass


@dataclass(frozen=True, slots=True)
class Stop:
    pass


@dataclass(frozen=True, slots=True)
class Delete:
    pass


@dataclass(frozen=True, slots=True)
class Wait:
    """A transition is in progress; not a failure."""

    transition: str


@dataclass(frozen=True, slots=True)
class Discharge:
    """What was seen proves the end."""

    evidence: Evidence
    ended: Ended = Ended.KILLED


@dataclass(frozen=True, slots=True)
class Fail:
    kind: ErrorKind


@dataclass(frozen=True, slots=True)
class AskOperator:
    why: Obligation.Quiet


Decision = Drain | Look | Stop | Delete | Wait | Discharge | Fail | AskOperator

_FALL_BACK_TO_DELETE = frozenset({ErrorKind.REFUSED, ErrorKind.INVALID, ErrorKind.TIMEOUT, ErrorKind.PROTOCOL})
"""A stop that failed like this may be followed by a delete. One that failed for the account's sake would fail again."""


def decide(facts: Facts) -> Decision:
    """Return the next step (domain 5.4). Never deletes under stop-only, never takes acceptance for proof."""
    if facts.drain_until is not None:
        return Drain(facts.drain_until)
    match facts.sighting:
        case None:
            return Look()
        case Gone():
            return Discharge(Evidence.DESTROYED if facts.delete_announced else Evidence.ABSENT)
        case _ if facts.foreign:
            return AskOperator(Obligation.Quiet.FOREIGN_MARKS)
        case Busy(transition=transition):
            return Wait(transition or "transition")
        case Stopped(ended=ended) if facts.verb != Verb.DELETE:
            return Discharge(Evidence.STOPPED, ended)
        case Stopped():
            return _delete(facts)
        case running_or_unknown:
            if facts.verb == Verb.DELETE:
                return _delete(facts)
            return _stop(facts, running=isinstance(running_or_unknown, Running))


def _stop(facts: Facts, *, running: bool) -> Decision:
    if facts.stop is None:
        return Stop()
    if facts.stop == ErrorKind.BUSY or (facts.stop == ACCEPTED and running):
        return Wait("stopping")
    kind = ErrorKind.REFUSED if facts.stop == ACCEPTED else ErrorKind(facts.stop)
    if facts.verb == Verb.STOP_OR_DELETE and kind in _FALL_BACK_TO_DELETE:
        return _delete(facts)
    return Fail(kind)


def _delete(facts: Facts) -> Decision:
    match facts.delete:
        case None:
            return Delete()
        case "accepted" | ErrorKind.BUSY:
            return Wait("deleting")
        case kind:
            return Fail(ErrorKind(kind))


def is_about_the_account(kind: ErrorKind) -> bool:
    """Return whether an error says something about the account, so that looking at the sandbox again is no use."""
    return kind in ACCOUNT_KINDS
