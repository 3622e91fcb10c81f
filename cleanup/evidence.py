"""Evidence and announcements: what an attempt writes before a call that changes something, and after it learned proof.

A receipt is inserted whoever learned it, bound to the epoch that was read before the call; what it *means* is decided
under the lease's lock: the attempt that still holds the row settles with it, a superseded one only wakes the row, whose
next attempt finds the receipt. So a late answer is never lost, and never undoes what a newer attempt did.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from django.db import transaction
from django.db.models import F, Max
from django.db.models.functions import Coalesce, Now

from cleanup.backoff import PROTECTION
from cleanup.claims import Claim, fenced, finish_attempt
from leases import audit, proof, transitions
from leases.clock import Clock
from leases.models import Attempt, Lease, Obligation, Receipt
from leases.waking import wake
from providers.contract import Ended

Verb = Obligation.Verb
Evidence = Receipt.Evidence


@dataclass(frozen=True, slots=True)
class Standing:
    """The facts about a teardown as the database has them at one moment, read under the lease's lock."""

    lease: Lease
    verb: Verb
    drain_until: datetime | None
    delete_announced: bool
    epoch: int
    receipt: Receipt | None
    """A receipt of this epoch that already proves what the verb demands."""
    proven_before: bool
    """There was some receipt of this epoch at that moment: whoever sees the sandbox running later sees a restart."""


def standing(claim: Claim) -> Standing | None:
    """Return the facts, or None when the row is no longer this attempt's."""
    with transaction.atomic():
        read = _read(claim)
    return read[2] if read else None


def announce(claim: Claim, call: str, still_due: Callable[[Standing], bool], *, clock: Clock) -> Standing | None:
    """Read the facts again and, if the call is `still_due` by them, note it and renew the protection.

    All in one transaction: after its commit the call may be sent for as long as the protection lasts. Returns the facts
    read, so what changed since the attempt began (a demand, a receipt) is decided on right before each such call; None
    when the row is no longer this attempt's.
    """
    at = clock()
    with transaction.atomic():
        read = _read(claim)
        if read is None:
            return None
        lease, row, facts = read
        if not still_due(facts):
            return facts
        Attempt.objects.filter(pk=claim.attempt_id).update(
            announced_call=call, announced_at=Now(), announced_epoch=lease.epoch
        )
        changes: dict[str, Any] = {"due_at": Now() + timedelta(seconds=PROTECTION)}
        if call == "delete":
            changes["delete_announced_at"] = Coalesce(F("delete_announced_at"), Now())
        Obligation.objects.filter(pk=row.pk).update(**changes)
    claim.renewed_at = max(claim.renewed_at, at)
    return replace(facts, delete_announced=facts.delete_announced or call == "delete")


def _read(claim: Claim) -> tuple[Lease, Obligation, Standing] | None:
    lease = Lease.objects.select_for_update(no_key=True).get(pk=claim.lease)
    row = fenced(claim)
    if row is None:
        return None
    claim.wakes = row.wakes  # what those wakes told of is read here, under the lock
    return (
        lease,
        row,
        Standing(
            lease=lease,
            verb=Verb(row.verb),
            drain_until=_drain_end(lease, row),
            delete_announced=row.delete_announced_at is not None,
            epoch=lease.epoch,
            receipt=satisfying(lease, Verb(row.verb)),
            proven_before=proof.receipts(lease).exists(),
        ),
    )


def satisfying(lease: Lease, verb: Verb) -> Receipt | None:
    """Return a receipt of the lease's epoch that proves what this verb demands, if there is one."""
    receipts = proof.receipts(lease)
    if verb == Verb.DELETE:
        receipts = receipts.filter(evidence__in=[Evidence.DESTROYED, Evidence.ABSENT])
    return receipts.order_by("pk").first()


def settle_with(claim: Claim, evidence: Evidence, *, epoch: int, ended: Ended = Ended.KILLED) -> bool:
    """Record the receipt and, if this attempt still holds the row, settle the lease with it. Returns whether it did.

    Safe to repeat after a COMMIT whose reply was lost: the receipt is one per attempt and finding, the row closes once.
    """
    with transaction.atomic():
        lease = Lease.objects.select_for_update(no_key=True).get(pk=claim.lease)
        receipt, _ = Receipt.objects.get_or_create(
            attempt_id=claim.attempt_id,
            epoch=epoch,
            evidence=evidence,
            defaults={
                "lease": lease,
                "account_id": lease.account_id,
                "company_uuid": lease.company_id,
                "run_uuid": lease.run_id,
                "resource_id": lease.resource_id,
                "account_identity": lease.account_identity,
                "ended": ended.value,
            },
        )
        return _settle(claim, lease, receipt)


def settle_by_receipt(claim: Claim, receipt: Receipt) -> bool:
    """Settle with a receipt that another attempt learned. Returns whether this attempt still held the row."""
    with transaction.atomic():
        lease = Lease.objects.select_for_update(no_key=True).get(pk=claim.lease)
        return _settle(claim, lease, receipt)


def sighted_running(claim: Claim, epoch: int) -> None:
    """A sandbox that had been proven stopped when the look began is seen running: it was started. The epoch rises.

    The stop that proves its end must come after that, so no receipt of the old epoch settles this teardown (design 4).
    Only the attempt that holds the row may say so: what a superseded one saw may be older than the newer one's proof.
    """
    with transaction.atomic():
        lease = Lease.objects.select_for_update(no_key=True).get(pk=claim.lease)
        if lease.epoch == epoch and fenced(claim) is not None:
            lease.epoch = epoch + 1
            lease.save(update_fields=["epoch"])
            audit.record("lease.sighted_running", lease, company_id=lease.company_id, epoch=lease.epoch)


def _settle(claim: Claim, lease: Lease, receipt: Receipt) -> bool:
    row = fenced(claim)
    if row is None or not _proves(receipt, lease, Verb(row.verb)):
        _tell_whoever_holds_it(lease)
        if row is None:
            finish_attempt(claim, Attempt.Outcome.SUPERSEDED)
        return False
    transitions.settle(lease, row, receipt)
    finish_attempt(claim, Attempt.Outcome.PROVEN)
    return True


def _proves(receipt: Receipt, lease: Lease, verb: Verb) -> bool:
    """Re-checked under the lock: the verb may have become stronger, the epoch may have risen, since it was decided."""
    if receipt.epoch != lease.epoch:
        return False
    return verb != Verb.DELETE or receipt.evidence != Evidence.STOPPED


def _tell_whoever_holds_it(lease: Lease) -> None:
    for row in Obligation.objects.filter(lease=lease, kind=Obligation.Kind.TEARDOWN, closed_at__isnull=True):
        wake(row.pk)


def _drain_end(lease: Lease, row: Obligation) -> datetime | None:
    """Return until when work in flight is waited for: the drain bound, or the last deadline of that work if earlier.

    None when nothing is waited for. Decided by the database's clock.
    """
    if row.drain_until is None or not Obligation.objects.filter(pk=row.pk, drain_until__gt=Now()).exists():
        return None
    open_work = lease.activities.filter(ended_at__isnull=True, deadline__gt=Now())
    last: datetime | None = open_work.aggregate(last=Max("deadline"))["last"]
    return min(row.drain_until, last) if last is not None else None
