"""Moving a provider's own deadline ahead of a lease in use, and of a kept one that is held whatever happens.

Never that of a sandbox that owes its teardown.

The provider's deadline is for the case that this whole system is lost; as long as it is not, the lease decides when its
sandbox ends. A failure is counted and escalates, also that the sandbox is not found: a 404 that flaps must not end a
lease, and one that is true is for the lease's holder to notice.
"""

from __future__ import annotations

from collections.abc import Generator
from datetime import datetime
from typing import Any

from django.db import transaction

from cleanup import evidence
from cleanup.claims import Claim, fenced, finish_attempt
from cleanup.work import Call, Context, Done, Extended, Failed, NeedsOperator, Outcome, identify
from leases import bounds, deadlines, holds, transitions
from leases.clock import Clock, database_now
from leases.models import Attempt, Lease, Obligation
from providers.contract import ErrorKind, ProviderError


def extend(claim: Claim, context: Context) -> Generator[Call, Any, Outcome]:
    """Move the deadline of one lease's sandbox, and owe the same again at half of what remains then."""
    lease = Lease.objects.get(pk=claim.lease)
    provider = yield from context.open_recorded(lease)
    seconds = deadlines.lifetime(lease, type(provider))
    kept = lease.state in Lease.KEPT
    if seconds is None:
        return NeedsOperator(Obligation.Quiet.DEADLINE_FIXED) if kept else Done(proven=_nothing_owed(claim))
    if (yield identify(provider)) != lease.account_identity:
        return Failed(ErrorKind.IDENTITY, "another account answers than the one recorded on the lease")
    if not _announce(claim, clock=context.clock):
        return Done(proven=False)
    try:
        expires_at = yield Call(
            "extend",
            lambda: provider.extend(lease.resource_id, seconds, within=bounds.EXTEND),
            bounds.EXTEND,
            changes=True,
        )
    except ProviderError as error:
        if kept and error.kind in (ErrorKind.REFUSED, ErrorKind.INVALID):
            return NeedsOperator(Obligation.Quiet.DEADLINE_FIXED)
        raise
    if not isinstance(expires_at, datetime) or expires_at.tzinfo is None:
        raise ProviderError(ErrorKind.PROTOCOL, f"extend answered {type(expires_at).__name__}, which is no deadline")
    return Extended(_read_back(claim, expires_at))


def _announce(claim: Claim, *, clock: Clock) -> bool:
    """Note the call and renew the protection, if the lease is still in use and the row still this attempt's.

    A release takes the lease's lock and closes the row in the same transaction. So either it comes first, and nothing
    is sent, or it finds the announcement.
    """
    at = clock()
    with transaction.atomic():
        lease = Lease.objects.select_for_update(no_key=True).get(pk=claim.lease)
        row = fenced(claim)
        if row is None or not _is_to_last(lease):
            return False
        evidence.note(claim, row, "extend", epoch=lease.epoch)
    claim.renewed_at = max(claim.renewed_at, at)
    return True


def _is_to_last(lease: Lease) -> bool:
    """Return whether a locked lease is in use, or kept and held whatever happens."""
    if lease.state in Lease.KEPT:
        return holds.of(lease).always_until is not None
    return lease.state == Lease.State.ACTIVE


def _read_back(claim: Claim, expires_at: datetime) -> datetime:
    """Write the deadline that the provider attested, and return when it is to be moved next.

    It is evidence, and not fenced: the sandbox has that deadline whoever moved it. An attempt that lost its row may
    answer after a newer one, so its word only ever makes the deadline later; and once the lease is settled, its
    deadline is what its stop read back.
    """
    with transaction.atomic():
        lease = Lease.objects.select_for_update(no_key=True).get(pk=claim.lease)
        holds = fenced(claim) is not None
        in_use = lease.state in (Lease.State.ACTIVE, Lease.State.PENDING_CLEANUP, *Lease.KEPT)
        if in_use and (holds or lease.expires_at is None or expires_at > lease.expires_at):
            lease.expires_at = expires_at
            lease.save(update_fields=["expires_at"])
        return deadlines.half_way(expires_at, database_now())


def _nothing_owed(claim: Claim) -> bool:
    """Close the row of a sandbox whose provider keeps no deadline to move. Returns whether it was still ours."""
    with transaction.atomic():
        Lease.objects.select_for_update(no_key=True).get(pk=claim.lease)
        row = fenced(claim)
        if row is not None:
            transitions.close(row, Obligation.ClosedAs.NOTHING_OWED)
        finish_attempt(claim, Attempt.Outcome.NOTHING_OWED if row else Attempt.Outcome.SUPERSEDED)
    return row is not None
