"""A sandbox that may run although its end was proven: a restart of it was never answered. Looked at until it is known.

The earlier receipt proves that the old execution ended, and admits the task; it says nothing about what may run now,
and costs money. Seen running, the epoch rises and it is stopped, its files kept, with a receipt of its own at the end;
what was admitted by then goes on. Seen stopped, when no call of a start can be under way any more, that is a fresh
receipt, and nobody looks any more (design 4; beyond domain 9.2, G-06).
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from django.db import transaction

from cleanup import evidence, sightings
from cleanup.claims import Claim, fenced, finish_attempt
from cleanup.work import Call, Context, Done, Failed, InTransition, NeedsOperator, NotSeen, Outcome, Waiting, identify
from leases import audit, reuse, transitions
from leases.clock import database_now
from leases.demands import Demand, Verb
from leases.models import Attempt, Lease, Obligation, Receipt
from providers.contract import Busy, Ended, ErrorKind, Gone, Resource, Running, Stopped

_FIRST, _LAST = 30.0, 3600.0
"""Seconds between two looks that cannot tell: as long as it may have been running, within these."""


def watch_restart(claim: Claim, context: Context) -> Generator[Call, Any, Outcome]:
    """Look once at a sandbox that may be running. Settles by itself what the look proves."""
    lease = _watched(claim)
    if not isinstance(lease, Lease):
        return lease
    provider = yield from context.open_recorded(lease)
    if (yield identify(provider)) != lease.account_identity:
        return Failed(ErrorKind.IDENTITY, "another account answers than the one recorded on the lease")
    # Asked before the look: what is seen stopped after it stays so, unless somebody else starts it.
    calls_were_over = not reuse.starts_under_way(lease.account_id, lease.resource_id).exists()
    sighting = sightings.about(lease, (yield sightings.inspect(provider, lease)))
    if sightings.shows_foreign(sighting, context.installation, sightings.creation_of(lease)):
        return NeedsOperator(Obligation.Quiet.FOREIGN_MARKS)
    match sighting:
        case Running(resource=resource):
            return _stop(claim, lease, resource)
        case Gone(stated=stated) if stated or not provider.capabilities.absence_apart:
            return _stop(claim, lease, None)
        case Busy(transition=transition):
            return InTransition(transition or "transition")
        case Stopped(ended=ended) if calls_were_over:
            return _stopped(claim, lease, ended)
        case _:
            return NotSeen(_pause(lease))


def _watched(claim: Claim) -> Lease | Outcome:
    with transaction.atomic():
        lease = Lease.objects.select_for_update(no_key=True).get(pk=claim.lease)
        row = fenced(claim)
        if row is None:
            return Done(proven=False)
        claim.wakes = row.wakes  # what those wakes told of is read here, under the lock
        if lease.state not in Lease.KEPT or reuse.is_starting(lease):
            return Waiting()  # its teardown, or whoever starts it, looks; the end of that wakes this row
        return lease


def _stop(claim: Claim, seen: Lease, resource: Resource | None) -> Outcome:
    """It runs, so its stop is owed: stop-only. Or it is gone, which its teardown proves. The epoch rises either way.

    Only the attempt that holds the row may say so: what a superseded one saw may be older than the newer one's proof.
    """
    with transaction.atomic():
        lease = Lease.objects.select_for_update(no_key=True).get(pk=claim.lease)
        if fenced(claim) is None or lease.state not in Lease.KEPT or lease.epoch != seen.epoch:
            return Done(proven=False)
        if reuse.is_starting(lease):
            return Done(proven=False)
        finish_attempt(claim, Attempt.Outcome.HANDED_OVER)
        reason = "restart_seen" if resource is not None else "not_found"
        transitions.reopen(lease, Demand(Verb.STOP_ONLY), reason=reason, actor=audit.SYSTEM, started=resource)
    return Done(proven=True)


def _stopped(claim: Claim, seen: Lease, ended: Ended) -> Outcome:
    with transaction.atomic():
        lease = Lease.objects.select_for_update(no_key=True).get(pk=claim.lease)
        if fenced(claim) is None or lease.state not in Lease.KEPT or lease.epoch != seen.epoch:
            return Done(proven=False)
        evidence.record(claim, lease, Receipt.Evidence.STOPPED, epoch=lease.epoch, ended=ended)
        finish_attempt(claim, Attempt.Outcome.PROVEN)
        transitions.runs_no_more(lease, Obligation.ClosedAs.PROVEN)
        lease.save(update_fields=["may_be_running_since"])
        audit.record("lease.seen_stopped", lease, company_id=lease.company_id, epoch=lease.epoch)
    return Done(proven=True)


def _pause(lease: Lease) -> float:
    assert lease.may_be_running_since is not None  # noqa: S101 - watched exactly while it is set (constraint)
    since = (database_now() - lease.may_be_running_since).total_seconds()
    return min(_LAST, max(_FIRST, since))
