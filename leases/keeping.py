"""What an operator decides about kept sandboxes: how long, not at all, and that one is nobody's.

Each is decided under the lease's lock, by the one list of what holds it (`leases.holds`), and leaves an audit entry
with its reason. Nothing here asks a provider: what is destroyed is owed, and paid like every teardown.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from django.db import transaction
from django.db.models import Q, QuerySet

from leases import arguments, audit, holds, transitions
from leases.clock import database_now
from leases.errors import LeaseError, NotFound
from leases.models import Issue, Lease, Run


class Held(LeaseError):
    """Somebody needs the sandbox. `standing` says who, and until when."""

    code = "held"

    def __init__(self, standing: holds.Standing) -> None:
        self.standing = standing
        super().__init__(f"the sandbox is held: {'; '.join(reason.sentence for reason in standing.reasons)}")


@dataclass(frozen=True, slots=True)
class Destroyed:
    """Which kept sandboxes are being destroyed by now, and which are not, because they are held."""

    destroyed: tuple[UUID, ...]
    held: tuple[holds.Standing, ...]


def keep_until(lease_id: UUID, until: datetime, *, company_id: UUID, actor: str, reason: str) -> Lease:
    """Keep a stopped sandbox until then, whatever its environment says; afterwards it is destroyed unless it is held.

    Raises `NotFound`, and `LeaseError` with code `not_kept` where it is not kept, `orphaned` where it is nobody's (hold
    it instead: its time is over), `invalid` for nonsense.
    """
    arguments.actor(actor)
    arguments.reason(reason, "keeping a sandbox")
    moment: object = until
    if not isinstance(moment, datetime) or moment.tzinfo is None or not database_now() < until < holds.FOREVER:
        raise LeaseError("until is a moment to come, with a time zone", code="invalid")
    with transaction.atomic():
        lease = _kept(lease_id, company_id)
        if lease.orphaned_at is not None:
            raise LeaseError("the sandbox is nobody's and has no time of its own: place a hold on it", code="orphaned")
        transitions.keep_until(lease, until, actor=actor, reason=reason)
    return lease


def destroy_now(lease_id: UUID, *, company_id: UUID, actor: str, reason: str) -> Lease:
    """Owe the destruction of a kept sandbox now. Raises `Held` (with who holds it) and what `keep_until` raises."""
    arguments.actor(actor)
    arguments.reason(reason, "destroying a sandbox")
    with transaction.atomic():
        lease = _kept(lease_id, company_id)
        standing = holds.of(lease)
        if standing.is_held:
            raise Held(standing)
        transitions.dispose(lease, reason="destroyed_by_operator", actor=actor)
        audit.record("lease.destroyed_by_operator", lease, company_id=lease.company_id, actor=actor, reason=reason)
    return lease


def destroy_for_issue(issue_id: UUID, *, company_id: UUID, actor: str, reason: str) -> Destroyed:
    """Owe the destruction of every kept sandbox of an issue, but for what is held, such as a live run's (S-115).

    Raises `NotFound` and `LeaseError` with code `invalid`.
    """
    issue_id = arguments.identity(issue_id, "issue_id")
    company_id = arguments.identity(company_id, "company_id")
    arguments.actor(actor)
    arguments.reason(reason, "destroying sandboxes")
    destroyed, held = [], []
    with transaction.atomic():
        issue = Issue.objects.select_for_update(no_key=True).filter(pk=issue_id, company_id=company_id).first()
        if issue is None:
            raise NotFound(f"no issue {issue_id} in this company")
        kept = Lease.objects.filter(issue_id=issue_id, company_id=company_id, state__in=Lease.KEPT)
        for lease in kept.select_for_update(no_key=True).order_by("pk"):
            standing = holds.of(lease)
            if any(reason.strength == "always" or reason.explicit for reason in standing.reasons):
                held.append(standing)
            else:
                transitions.dispose(lease, reason="issue_closed", actor=actor)
                destroyed.append(lease.pk)
        audit.record(
            "issue.sandboxes_destroyed",
            issue,
            company_id=company_id,
            actor=actor,
            reason=reason,
            destroyed=[str(pk) for pk in destroyed],
            held=[str(standing.lease_id) for standing in held],
        )
    return Destroyed(tuple(destroyed), tuple(held))


def unmarked(before: datetime, *, company_id: UUID | None = None) -> QuerySet[Lease]:
    """Return the kept sandboxes of runs that are over or gone, released before then, which nobody marked as nobody's.

    Those that wait for their next run are not among them: they have a time of their own.
    """
    rows = Lease.objects.filter(
        Q(run__isnull=True) | ~Q(run__status__in=Run.LIVE),
        state__in=Lease.KEPT,
        scope="",
        orphaned_at__isnull=True,
        released_at__lt=before,
    )
    if company_id is not None:
        rows = rows.filter(company_id=company_id)
    return rows.order_by("pk")


def mark_orphaned(lease_id: UUID, *, company_id: UUID, actor: str, reason: str) -> Lease:
    """Say that a kept sandbox is nobody's: it is destroyed as soon as nothing holds it. Safe to repeat.

    Raises what `keep_until` raises.
    """
    arguments.actor(actor)
    arguments.reason(reason, "marking a sandbox as nobody's")
    with transaction.atomic():
        lease = _kept(lease_id, company_id)
        if lease.orphaned_at is None:
            transitions.mark_orphaned(lease, actor=actor, reason=reason)
    return lease


def _kept(lease_id: UUID, company_id: UUID) -> Lease:
    lease_id = arguments.identity(lease_id, "lease_id")
    company_id = arguments.identity(company_id, "company_id")
    lease = (
        Lease.objects.select_for_update(no_key=True, of=("self",)).filter(pk=lease_id, company_id=company_id).first()
    )
    if lease is None:
        raise NotFound(f"no lease {lease_id} in this company")
    if lease.state not in Lease.KEPT:
        raise LeaseError(f"the lease is {lease.get_state_display()}: no sandbox is kept", code="not_kept")
    return lease
