"""Evidence and announcements: what an attempt writes before a call that changes something, and after it learned proof.

A receipt is inserted whoever learned it, bound to the epoch that was read before the call; what it *means* is decided
under the lease's lock: the attempt that still holds the row settles with it, a superseded one only wakes the row, whose
next attempt finds the receipt. So a late answer is never lost, and never undoes what a newer attempt did.

Absence, where one look is not enough, is a row of looks that all found nothing: the first writes `absent_since`, any
that sees something clears it, whoever made it. Both are done under the lease's lock, like the settle, which proves
absence only while `absent_since` is still the one that its attempt read before it looked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from django.db import transaction
from django.db.models import F, Max
from django.db.models.functions import Coalesce, Now

from cleanup.backoff import PROTECTION
from cleanup.claims import Claim, fenced, finish_attempt
from leases import audit, bounds, holds, proof, reuse, transitions, trust
from leases.clock import Clock, database_now
from leases.models import Attempt, Lease, Obligation, Receipt
from leases.waking import wake
from providers.contract import Ended, Resource

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
    absent_since: datetime | None
    """When the first of the looks in a row was that did not find the sandbox, and by when that is known."""
    absent_for: float | None
    """Seconds from that to this reading, and so at most to any look that follows it."""
    extending: bool
    """A call that moves the provider's deadline may be on its way (see `_is_extending`)."""
    starting_until: datetime | None
    """A call of a start that was given up may still be done (`reuse.starts_under_way`)."""


def standing(claim: Claim) -> Standing | None:
    """Return the facts, or None when the row is no longer this attempt's."""
    with transaction.atomic():
        read = _read(claim)
    return read[2] if read else None


def announce(
    claim: Claim,
    call: str,
    still_due: Callable[[Standing], bool],
    *,
    clock: Clock,
    recovers: Resource | None = None,
) -> Standing | None:
    """Read the facts again and, if the call is `still_due` by them, note it and renew the protection.

    All in one transaction: after its commit the call may be sent for as long as the protection lasts. Returns the facts
    read, so what changed since the attempt began (a demand, a receipt) is decided on right before each such call; None
    when the row is no longer this attempt's. `recovers` is the sandbox as it was seen, for a call that starts it.
    """
    at = clock()
    with transaction.atomic():
        read = _read(claim)
        if read is None:
            return None
        lease, row, facts = read
        if not still_due(facts):
            return facts
        if recovers is not None:
            facts = _begin_epoch(lease, facts, recovers)
        note(claim, row, call, epoch=lease.epoch)
        if call == "delete":
            Obligation.objects.filter(pk=row.pk).update(delete_announced_at=Coalesce(F("delete_announced_at"), Now()))
    claim.renewed_at = max(claim.renewed_at, at)
    return replace(facts, delete_announced=facts.delete_announced or call == "delete")


def note(claim: Claim, row: Obligation, call: str, *, epoch: int) -> None:
    """Note the call that this attempt is about to make, and renew its protection; the row is locked and fenced.

    The caller counts the protection from a time that it took before the transaction, and only once that committed.
    This is the one place where a changing call is announced, so here it is refused (`leases.trust.Observing`) where
    this database may be a restored or copied one. The verdict is read by the statement's own server: a connection that
    was made anew since the claim may lead to another one.
    """
    trusted = trust.read()
    if trusted.is_observing and trust.forbids(trusted, claim.kind, lease=row.lease, operation=row.operation):
        raise trust.Observing
    Attempt.objects.filter(pk=claim.attempt_id).update(announced_call=call, announced_at=Now(), announced_epoch=epoch)
    Obligation.objects.filter(pk=row.pk).update(due_at=Now() + timedelta(seconds=PROTECTION))


def _begin_epoch(lease: Lease, facts: Standing, seen: Resource) -> Standing:
    """Raise the epoch of a sandbox that is about to be recovered, in the transaction that announces it.

    A recovery is a start whose reply may be lost, so its epoch begins before the call and not when somebody confirms
    it: at this commit every receipt of the older epoch stops being proof. No operation is journalled for it. A journal
    entry finds an owner for what a start may bring up, and this sandbox has one: the open teardown, which survives the
    process and looks again. What the provider says about it from before the state that was seen is out of date.
    """
    lease.epoch += 1
    lease.started_as_of = later(lease.started_as_of, seen.as_of)
    lease.save(update_fields=["epoch", "started_as_of"])
    audit.record("lease.recovering", lease, company_id=lease.company_id, epoch=lease.epoch)
    return replace(facts, epoch=lease.epoch, receipt=None, proven_before=False)


def later(one: datetime | None, other: datetime | None) -> datetime | None:
    """Return the later of two times, of which either may be unknown."""
    known = [moment for moment in (one, other) if moment is not None]
    return max(known) if known else None


def _read(claim: Claim) -> tuple[Lease, Obligation, Standing] | None:
    lease = Lease.objects.select_for_update(no_key=True).get(pk=claim.lease)
    row = fenced(claim)
    if row is None:
        return None
    _heed_holds(lease, row)
    claim.wakes = row.wakes  # what those wakes told of is read here, under the lock
    since = row.absent_since
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
            absent_since=since,
            absent_for=(database_now() - since).total_seconds() if since is not None else None,
            extending=_is_extending(lease),
            # One that was never started again has no start to wait for. A disposal leaves the epoch as it was.
            starting_until=reuse.starting_until(lease) if lease.epoch > 1 or lease.orphaned_at is not None else None,
        ),
    )


def _heed_holds(lease: Lease, row: Obligation) -> None:
    """Stop and keep what is held, instead of what was demanded (design 4). Lease and row are locked.

    Read here, so before every call that changes something, in the transaction that announces it: a hold that was placed
    before has this lock first. Once a destroying call was announced nobody is promised anything any more.
    """
    if row.verb == Verb.STOP_ONLY or row.delete_announced_at is not None:
        return
    held = holds.of(lease)
    if held.is_held:
        transitions.hold_back(lease, held_by=[reason.name for reason in held.reasons], actor=audit.SYSTEM)
        row.refresh_from_db(fields=["verb", "held_verb", "wakes"])


def satisfying(lease: Lease, verb: Verb) -> Receipt | None:
    """Return a receipt of the lease's epoch that proves what this verb demands, if there is one."""
    receipts = proof.receipts(lease)
    if verb == Verb.DELETE:
        receipts = receipts.filter(evidence__in=[Evidence.DESTROYED, Evidence.ABSENT])
    return receipts.order_by("pk").first()


def settle_with(
    claim: Claim,
    evidence: Evidence,
    *,
    epoch: int,
    ended: Ended = Ended.KILLED,
    absent_since: datetime | None = None,
    deadline_of: Resource | None = None,
) -> bool:
    """Record the receipt and, if this attempt still holds the row, settle the lease with it. Returns whether it did.

    `absent_since` is the first of the looks that prove absence together; when another attempt saw something meanwhile,
    they prove nothing. `deadline_of` is a stopped sandbox as it was seen, whose deadline is kept with the lease.
    Safe to repeat after a COMMIT whose reply was lost: the receipt is one per attempt and finding, the row closes once.
    """
    with transaction.atomic():
        lease = Lease.objects.select_for_update(no_key=True).get(pk=claim.lease)
        if absent_since is not None and not _still_absent(claim, absent_since):
            return False
        receipt = record(claim, lease, evidence, epoch=epoch, ended=ended)
        if deadline_of is not None and lease.epoch == epoch and lease.state == Lease.State.PENDING_CLEANUP:
            lease.expires_at = deadline_of.expires_at
            lease.save(update_fields=["expires_at"])
        return _settle(claim, lease, receipt)


def record(claim: Claim, lease: Lease, evidence: Evidence, *, epoch: int, ended: Ended = Ended.KILLED) -> Receipt:
    """Insert what this attempt learned about a locked lease, and return the receipt: one per attempt and finding."""
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
    return receipt


def settle_by_receipt(claim: Claim, receipt: Receipt) -> bool:
    """Settle with a receipt that another attempt learned. Returns whether this attempt still held the row."""
    with transaction.atomic():
        lease = Lease.objects.select_for_update(no_key=True).get(pk=claim.lease)
        return _settle(claim, lease, receipt)


def sighted_running(claim: Claim, facts: Standing, as_of: datetime | None) -> None:
    """A sandbox is seen running, by a look that began with these facts.

    Where it had been proven stopped, it was started: the epoch rises, and no receipt of the old one settles this
    teardown (design 4). In an epoch that a start began, the look confirms that start. Either way, what the provider
    says from before `as_of`, its own time of this answer, is out of date from now on. Only the attempt that holds the
    row may say so: what a superseded one saw may be older than the newer one's proof.
    """
    restarted = facts.proven_before
    if not restarted and (facts.epoch == 1 or as_of is None):
        return
    with transaction.atomic():
        lease = Lease.objects.select_for_update(no_key=True).get(pk=claim.lease)
        if lease.epoch != facts.epoch or fenced(claim) is None:
            return
        lease.started_as_of = later(lease.started_as_of, as_of)
        if restarted:
            lease.epoch += 1
            audit.record("lease.sighted_running", lease, company_id=lease.company_id, epoch=lease.epoch)
        lease.save(update_fields=["epoch", "started_as_of"])


def not_found(claim: Claim, *, apart: float) -> datetime | None:
    """Note a look that did not find the sandbox. Returns when a look can prove it, None if the row is not ours.

    The first of several in a row says since when; later ones leave that as it is, so that a row that is woken in
    between, however often, proves nothing earlier. By the database's clock, and after the look: so the first look was
    at that time or before.
    """
    with transaction.atomic():
        Lease.objects.select_for_update(no_key=True).get(pk=claim.lease)
        row = fenced(claim)
        if row is None:
            return None
        since = row.absent_since
        if since is None:
            since = database_now()
            Obligation.objects.filter(pk=row.pk).update(absent_since=since)
    return since + timedelta(seconds=apart)


def found(claim: Claim) -> None:
    """Note that the sandbox was seen, in whatever state: it was not absent all the time.

    Not fenced, for it is evidence: a look of an attempt that lost its row may only make absence harder to prove.
    """
    missed = Obligation.objects.filter(pk=claim.obligation_id, closed_at__isnull=True, absent_since__isnull=False)
    if not missed.exists():
        return  # whoever writes it now looked after us
    with transaction.atomic():
        Lease.objects.select_for_update(no_key=True).get(pk=claim.lease)
        missed.update(absent_since=None)


def recovered_in_vain(claim: Claim) -> int:
    """Return how many earlier attempts recovered the sandbox and got no further."""
    earlier = Attempt.objects.filter(obligation_id=claim.obligation_id, announced_call="recover")
    return earlier.exclude(pk=claim.attempt_id).count()


def _still_absent(claim: Claim, since: datetime) -> bool:
    return Obligation.objects.filter(pk=claim.obligation_id, absent_since=since).exists()


def _is_extending(lease: Lease) -> bool:
    """Return whether a call that moves the provider's deadline may still be on its way.

    A release closes the `extend` row and supersedes its attempt, and one that saves files may die, but a call that was
    announced before is not called back. Such a call is sent right after its announcement; a bound later it has ended.
    Its attempt tells only that it was superseded, not whether the call was answered, so time decides.
    """
    if lease.expires_at is None and lease.epoch == 1:
        return False
    unanswered = ["", Attempt.Outcome.NOTHING_OWED, Attempt.Outcome.SUPERSEDED]
    return Attempt.objects.filter(
        obligation__lease=lease,
        obligation__kind__in=[Obligation.Kind.EXTEND, Obligation.Kind.RECOVER_WORKSPACE],
        announced_call="extend",
        announced_at__gt=Now() - timedelta(seconds=bounds.EXTEND),
        outcome__in=unanswered,
    ).exists()


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
