"""Writing what became of an attempt: each outcome of a handler to its row, fenced, and to its account.

Every write here is fenced by the attempt, and so safe to repeat after a COMMIT whose reply was lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from cleanup import accounts, backoff, claims, work
from cleanup.claims import LANE, Claim
from cleanup.decisions import is_about_the_account
from cleanup.work import Outcome
from leases.models import Attempt, Obligation
from providers.contract import ErrorKind, ProviderError, redact

Kind = Attempt.Outcome

UNPROVEN_DELAY = 1.0
"""Seconds after which a row is due again whose proof did not fit any more when it was to be settled."""

CONTENDED_DELAY = 30.0
"""Seconds after which a row is due again whose settle met a lock. Earlier looks are hints (`Engine.on_contended`)."""
CONTENDED = "contended"
"""What that is called in a tally; in the history it is a hand-back like others."""

_ANSWERS = frozenset(
    {
        ErrorKind.NAME_TAKEN,
        ErrorKind.NOT_FOUND,
        ErrorKind.INVALID,
        ErrorKind.REFUSED,
        ErrorKind.DISK_FULL,
        ErrorKind.MISSING_PATH,
    }
)
"""Failures that only an account that works can answer with. A timeout neither opens a circuit nor resets it."""


@dataclass(frozen=True, slots=True)
class Written:
    """What was written: the attempt's outcome, and for a row in transition the seconds until it is due."""

    outcome: str
    looks_again_in: float | None = None


def write(claim: Claim, outcome: Outcome, *, called: bool, random: Random) -> Written:
    """Write an outcome. `called` says that the provider was asked, so that an answer can count for the account."""
    written = _write(claim, outcome, called, random)
    if claim.kind == Obligation.Kind.VERIFY_END:
        asked = claims.ask_about_history(claim)
        return Written(Kind.QUIETED if asked else written.outcome)  # and nobody looks at it again in seconds
    return written


def _write(claim: Claim, outcome: Outcome, called: bool, random: Random) -> Written:  # noqa: FBT001 - private
    match outcome:
        case work.Done(proven=True):
            _answered(claim, called)
            return Written(Kind.PROVEN)
        case work.Done():
            # Superseded, or the facts changed under the lock: in the latter case the row is still ours to give back.
            held = claims.postpone(claim, Kind.HANDED_BACK, delay=UNPROVEN_DELAY)
            return Written(Kind.HANDED_BACK if held else Kind.SUPERSEDED)
        case work.Draining(until=until):
            claims.postpone(claim, Kind.DRAINING, until=until)
            return Written(Kind.DRAINING)
        case work.InTransition():
            _answered(claim, called)
            return _busy(claim, random)
        case work.NotSeen(delay=delay, until=until):
            _answered(claim, called)
            claims.postpone(claim, Kind.NOT_SEEN, delay=delay, until=until)
            return Written(Kind.NOT_SEEN)
        case work.Extended(until=until):
            _answered(claim, called)
            held = claims.owe_again(claim, Kind.EXTENDED, at=until)
            return Written(Kind.EXTENDED if held else Kind.SUPERSEDED)
        case work.Held(until=until):
            held = claims.owe_again(claim, Kind.HELD, at=until)
            return Written(Kind.HELD if held else Kind.SUPERSEDED)
        case work.Contended():
            held = claims.postpone(claim, Kind.HANDED_BACK, delay=CONTENDED_DELAY)
            return Written(CONTENDED if held else Kind.SUPERSEDED)
        case work.NeedsOperator(why=why, still=still):
            claims.quiet_down(claim, why, still=still)
            return Written(Kind.QUIETED)
        case work.Waiting():
            held = claims.wait(claim)
            return Written(Kind.WAITING if held else Kind.SUPERSEDED)
        case work.HandBack(delay=delay, kind=kind, excerpt=excerpt):
            claims.postpone(claim, Kind.HANDED_BACK, delay=delay, error_kind=kind or "", excerpt=redact(excerpt))
            return Written(Kind.HANDED_BACK)
        case work.Failed(kind=ErrorKind.BUSY):
            return _busy(claim, random)
        case work.Failed(kind=ErrorKind.RATE_LIMITED) as failure:
            # The account is not ready; the row did nothing wrong, and no attempt of it is counted.
            error = ProviderError(failure.kind, failure.excerpt, retry_after=failure.retry_after)
            delay = accounts.throttled(claim, error)
            claims.postpone(claim, Kind.BUSY, delay=delay, error_kind=failure.kind, excerpt=error.excerpt)
            return Written(Kind.BUSY)
        case work.Failed() as failure:
            return _failed(claim, failure, random)


def _answered(claim: Claim, called: bool) -> None:  # noqa: FBT001 - private
    if called and claim.account_id != LANE:
        accounts.answered(claim)


def _busy(claim: Claim, random: Random) -> Written:
    delay = min(backoff.busy(claim.busy_count + 1, random), backoff.longest(claim.kind))
    held = claims.postpone(claim, Kind.BUSY, delay=delay, busy=True, error_kind=ErrorKind.BUSY)
    return Written(Kind.BUSY, delay if held else None)


def _failed(claim: Claim, failure: work.Failed, random: Random) -> Written:
    held = claims.postpone(
        claim,
        Kind.FAILED,
        delay=min(backoff.cooldown(claim.failures + 1, random), backoff.longest(claim.kind)),
        until=failure.until,
        failed=True,
        error_kind=failure.kind,
        excerpt=failure.excerpt,
    )
    if held and claim.kind != Obligation.Kind.PROBE_ACCOUNT and claim.account_id != LANE:
        if failure.about_account or is_about_the_account(failure.kind):
            accounts.failed(claim, failure.kind)
        elif failure.kind in _ANSWERS:
            accounts.answered(claim)
    return Written(Kind.FAILED)
