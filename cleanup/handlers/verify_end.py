"""History: look for the proof of an end that was never proven. Changes nothing at any provider.

A lease that ended without a receipt (given up by an operator, imported, of an older version) is looked at now and then.
Gone, by the same rules as for a teardown (identity before absence, two looks where one is not enough), is its receipt.
What is there and ours is no history: its teardown is owed again, with the verb that was demanded, and settles like any
other; so a sandbox that is found stopped gets its end too. What is not ours is left alone, for a person.

The time of the next look is written before this one begins (`claims.space_out`), so that no wake, no failure and no
crash makes it earlier. What has been looked for in vain for days is asked about (`cleanup.dispositions`). While another
lease has the sandbox nothing is looked at, and nobody is asked: the end of that one wakes this row.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db import transaction

from cleanup import evidence, sightings
from cleanup.claims import Claim, fenced, finish_attempt, space_out
from cleanup.work import Call, Context, Done, Failed, NeedsOperator, NotSeen, Outcome, Waiting, identify
from leases import audit, history, proof, reuse, transitions
from leases.clock import database_now
from leases.models import Attempt, Lease, Obligation, Receipt
from providers.contract import ErrorKind, Gone, Resource, Running, Stopped

Evidence = Receipt.Evidence

_OTHER_ACCOUNT = Failed(ErrorKind.IDENTITY, "another account answers than the one recorded on the lease")


@dataclass(frozen=True, slots=True)
class _Facts:
    """What was read under the lease's lock right before the look."""

    lease: Lease
    epoch: int
    absent_since: datetime | None
    absent_for: float | None
    """Seconds from the first of the looks in a row that found nothing to this reading, and so to before this look."""
    starting: bool
    """A call of a start that was given up may still be done: what is not found now may come up later."""


def verify_end(claim: Claim, context: Context) -> Generator[Call, Any, Outcome]:
    """Look once at the sandbox of a lease that ended without proof. Settles by itself what the look proves."""
    facts = _begin(claim)
    if not isinstance(facts, _Facts):
        return facts
    lease = facts.lease
    provider = yield from context.open_recorded(lease)
    apart = provider.capabilities.absence_apart
    if (yield identify(provider)) != lease.account_identity:
        return _OTHER_ACCOUNT
    sighting = sightings.about(lease, (yield sightings.inspect(provider, lease)))

    if isinstance(sighting, Gone):
        if (yield identify(provider)) != lease.account_identity:
            return _OTHER_ACCOUNT
        if sighting.stated:
            return _prove(claim, facts, Evidence.DESTROYED)
        if facts.starting:
            return NotSeen()
        if not apart:
            return _prove(claim, facts, Evidence.ABSENT)
        if facts.absent_for is not None and facts.absent_for >= apart:
            return _prove(claim, facts, Evidence.ABSENT, absent_since=facts.absent_since)
        until = evidence.not_found(claim, apart=apart)
        return NotSeen(until=until) if until is not None else Done(proven=False)

    if apart:
        evidence.found(claim)
    if sightings.shows_foreign(sighting, context.installation, sightings.creation_of(lease)):
        return NeedsOperator(Obligation.Quiet.FOREIGN_MARKS)
    match sighting:
        case Running(resource=resource):
            return _reopen(claim, facts, resource, reason="found_running")
        case Stopped():
            return _reopen(claim, facts, None, reason="found_stopped")
        case _:
            return NotSeen()


def _begin(claim: Claim) -> _Facts | Outcome:
    """Read the facts and write when the next look may be; or settle by what is known without one."""
    with transaction.atomic():
        locked = _locked(claim)
        if locked is None:
            return Done(proven=False)
        lease, row = locked
        claim.wakes = row.wakes  # what those wakes told of is read here, under the lock
        receipts = proof.receipts(lease)
        if gone := receipts.exclude(evidence=Evidence.STOPPED).first():
            return _settled(claim, lease, row, gone)
        if history.owners(lease).exists():
            # Whoever has the sandbox owes its end, of which this lease's is a part, and which wakes this row. It comes
            # before or after this reading: the row's lock is taken, and the wake takes it too.
            return Waiting()
        space_out(row)
        if row.verb != Obligation.Verb.DELETE and receipts.exists():
            return _owed_again(claim, lease, row, None, "found_stopped")
        since = row.absent_since
        return _Facts(
            lease=lease,
            epoch=lease.epoch,
            absent_since=since,
            absent_for=(database_now() - since).total_seconds() if since is not None else None,
            starting=lease.epoch > 1 and reuse.starts_under_way(lease.account_id, lease.resource_id).exists(),
        )


def _prove(claim: Claim, facts: _Facts, found: Evidence, *, absent_since: datetime | None = None) -> Outcome:
    """Record the receipt, which is kept whoever learned it, and close the row with it if it is still this attempt's.

    `absent_since` is the first of the looks that prove absence together; one that saw something meanwhile unsays it.
    Safe to repeat after a COMMIT whose reply was lost.
    """
    with transaction.atomic():
        lease = Lease.objects.select_for_update(no_key=True).get(pk=claim.lease)
        if absent_since is not None:
            looks = Obligation.objects.filter(pk=claim.obligation_id, absent_since=absent_since)
            if not looks.exists():
                return Done(proven=False)
        receipt = evidence.record(claim, lease, found, epoch=facts.epoch)
        row = fenced(claim)
        if row is None or lease.epoch != facts.epoch:
            return Done(proven=False)
        return _settled(claim, lease, row, receipt)


def _settled(claim: Claim, lease: Lease, row: Obligation, receipt: Receipt) -> Outcome:
    transitions.verified(lease, row, receipt)
    finish_attempt(claim, Attempt.Outcome.PROVEN)
    return Done(proven=True)


def _reopen(claim: Claim, facts: _Facts, started: Resource | None, *, reason: str) -> Outcome:
    """Owe the teardown of what was seen again, if that is still what the rows say under the lock.

    A proof that came while this attempt looked is newer than a sandbox seen stopped, and settles this row; one seen
    running was started, whatever was proven of it before.
    """
    with transaction.atomic():
        locked = _locked(claim)
        if locked is None or locked[0].epoch != facts.epoch or history.owners(locked[0]).exists():
            return Done(proven=False)
        if started is None and proof.receipts(locked[0]).exclude(evidence=Evidence.STOPPED).exists():
            return Done(proven=False)
        return _owed_again(claim, *locked, started, reason)


def _owed_again(claim: Claim, lease: Lease, row: Obligation, started: Resource | None, reason: str) -> Outcome:
    transitions.reopen_history(lease, row, started=started, reason=reason, actor=audit.SYSTEM)
    finish_attempt(claim, Attempt.Outcome.HANDED_OVER)
    return Done(proven=True)


def _locked(claim: Claim) -> tuple[Lease, Obligation] | None:
    """Lock the lease and the row; None where the row is no longer this attempt's."""
    lease = Lease.objects.select_for_update(no_key=True).get(pk=claim.lease)
    row = fenced(claim)
    return (lease, row) if row is not None else None
