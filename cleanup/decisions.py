"""What to do next about a sandbox that owes its teardown. A pure function of facts; its table is `docs/teardown.md`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from leases.models.obligations import Obligation
from leases.models.receipts import Receipt
from providers.contract import ACCOUNT_KINDS, Busy, Ended, ErrorKind, Gone, Running, Sighting, Stopped, Unknown

Verb = Obligation.Verb
Evidence = Receipt.Evidence

ACCEPTED = "accepted"
"""What became of a call that changes something: not made yet (None), accepted, or refused with an error kind."""
Sent = ErrorKind | str | None

RECOVERIES = 3
"""Attempts that recovered a sandbox and saw nothing come of it, after which another is not waited for any more."""


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
    recover: Sent = None
    recovered_before: int = 0
    """Earlier attempts that recovered it and saw nothing come of it."""
    delete_announced: bool = False
    """Some attempt at this obligation, this one or an earlier one, was about to delete."""
    absence_apart: float = 0.0
    """Seconds between two looks that must both find nothing (`Capabilities.absence_apart`)."""
    absent_for: float | None = None
    """Seconds from the first of the looks in a row that found nothing to before the present one; None: it is the first.
    """
    started_as_of: datetime | None = None
    """The provider's own time of the last start that is known of: an older answer is out of date."""
    extending: bool = False
    """A call that moves the provider's deadline may still be on its way, sent before the lease was released."""
    starting: bool = False
    """A call of a start that was given up may still be done: what is not running now may run later."""


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
class Recover:
    """Bring it back to running, where it can be stopped with its files. This is a start."""


@dataclass(frozen=True, slots=True)
class Delete:
    pass


@dataclass(frozen=True, slots=True)
class Wait:
    """A transition is in progress; not a failure."""

    transition: str


@dataclass(frozen=True, slots=True)
class LookLater:
    """It was not found, which is no proof before a look that is far enough from the first one; not a failure."""


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


Decision = Drain | Look | Stop | Recover | Delete | Wait | LookLater | Discharge | Fail | AskOperator

_FALL_BACK_TO_DELETE = frozenset({ErrorKind.REFUSED, ErrorKind.INVALID, ErrorKind.TIMEOUT, ErrorKind.PROTOCOL})
"""A stop or recovery that failed like this may be followed by a delete. One for the account's sake would fail again."""


def decide(facts: Facts) -> Decision:
    """Return the next step (domain 5.4). Never deletes under stop-only, never takes acceptance for proof."""
    if facts.drain_until is not None:
        return Drain(facts.drain_until)
    match facts.sighting:
        case None:
            return Look()
        case Gone(stated=stated):
            return _gone(facts, stated=stated)
        case _ if facts.foreign:
            return AskOperator(Obligation.Quiet.FOREIGN_MARKS)
        case Busy(transition=transition):
            return Wait(transition or "transition")
        case _ if facts.verb == Verb.DELETE:
            return _delete(facts)
        case Stopped() as stopped:
            return _stopped(facts, stopped)
        case Unknown(recoverable=True):
            return _recover(facts)
        case running_or_unknown:
            return _stop(facts, running=isinstance(running_or_unknown, Running))


def _gone(facts: Facts, *, stated: bool) -> Decision:
    if stated:
        return Discharge(Evidence.DESTROYED)
    if facts.starting and not facts.delete_announced:
        return Wait("starting")
    if not facts.absence_apart:
        return Discharge(Evidence.DESTROYED if facts.delete_announced else Evidence.ABSENT)
    # Where one look is not enough, an accepted delete does not make it more (K-01): what was deleted is merely absent.
    if facts.absent_for is not None and facts.absent_for >= facts.absence_apart:
        return Discharge(Evidence.ABSENT)
    return LookLater()


def _stopped(facts: Facts, stopped: Stopped) -> Decision:
    as_of, started = stopped.resource.as_of, facts.started_as_of
    if as_of is not None and started is not None and as_of < started:
        return Wait("out of date")
    if facts.starting:
        return Wait("starting")
    if facts.extending:
        return Wait("extending")
    # Found stopped, with a deadline at which the provider would do away with the files: a stop turns it off, and is
    # tried once. Whatever comes of it, the end of execution is proven.
    if facts.verb == Verb.STOP_ONLY and stopped.resource.expires_at is not None:
        if facts.stop is None:
            return Stop()
        if facts.stop == ErrorKind.BUSY:
            return Wait("stopping")
    return Discharge(Evidence.STOPPED, stopped.ended)


def _recover(facts: Facts) -> Decision:
    """Once in an attempt. What it leads to is seen by looking: running, and then it is stopped like any other."""
    in_vain = facts.recovered_before >= RECOVERIES
    if facts.recover is None and not (in_vain and facts.verb == Verb.STOP_OR_DELETE):
        return Recover()
    if facts.stop is not None:
        return _stop(facts, running=False)
    if facts.recover == ErrorKind.BUSY or (facts.recover == ACCEPTED and not in_vain):
        return Wait("recovering")
    kind = ErrorKind.REFUSED if facts.recover in (None, ACCEPTED) else ErrorKind(facts.recover)
    return _fall_back(facts, kind)


def _stop(facts: Facts, *, running: bool) -> Decision:
    if facts.stop is None:
        # A deadline that is moved after it was turned off would be on again.
        return Wait("extending") if facts.extending else Stop()
    if facts.stop == ErrorKind.BUSY or (facts.stop == ACCEPTED and running):
        return Wait("stopping")
    return _fall_back(facts, ErrorKind.REFUSED if facts.stop == ACCEPTED else ErrorKind(facts.stop))


def _fall_back(facts: Facts, kind: ErrorKind) -> Decision:
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
