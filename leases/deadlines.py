"""The deadlines of a lease: the provider's own, which is kept ahead of it, and ours, at which it is released or ends.

Each is an obligation that stands on a lease in use, or on a kept one, and never on one that owes its teardown: opened
in the transaction that makes it active (attach, resume, succeed) or kept (a trigger opens its disposal), closed in the
one that ends that, under the lease's lock. So no deadline of a sandbox that owes its teardown is moved: whoever moves
one announces it under the same lock, and finds the lease released or the row not his any more. A call that was
announced before the release is not called back; the teardown lets it end before it turns the deadline off
(`cleanup.evidence`).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from django.db.models.functions import Now

from leases.clock import database_now
from leases.models import Attempt, Lease, Obligation
from providers.registry import AnyProvider, ConfigurationError, ProviderUnavailable, load, validate

SHORTEST = timedelta(seconds=30)
"""A provider's deadline is moved at most this often, whatever it reads back."""

KINDS = (
    Obligation.Kind.EXTEND,
    Obligation.Kind.END_LEASE,
    Obligation.Kind.SETTLE_ORPHAN,
    Obligation.Kind.DISPOSE,
)


def open_for(lease: Lease) -> None:
    """Owe what the deadlines of a lease demand that becomes active in this transaction."""
    if (lease.expires_at is not None or lease.epoch > 1) and _is_kept_ahead(lease):
        # One that was started again and has none: the stop turned it off, and setting it anew failed. It is due now.
        now = database_now()
        _owe(lease, Obligation.Kind.EXTEND, half_way(lease.expires_at, now) if lease.expires_at else now)
    if lease.ends_at is not None:
        _owe(lease, Obligation.Kind.END_LEASE, lease.ends_at)


def keep_ahead(lease: Lease) -> None:
    """Keep the provider's deadline ahead of a locked lease that is kept and held. Owed once.

    Also where it cannot be moved: then its handler says so to the operator, before the files are gone.
    """
    if lease.expires_at is None:
        return
    owed = Obligation.objects.filter(lease=lease, kind=Obligation.Kind.EXTEND, closed_at__isnull=True)
    if not owed.exists():
        _owe(lease, Obligation.Kind.EXTEND, half_way(lease.expires_at, database_now()))


def let_come(lease: Lease) -> None:
    """Owe nothing of the provider's deadline any more: nothing holds the sandbox of this locked, kept lease."""
    _close([row for row in locked(lease) if row.kind == Obligation.Kind.EXTEND])


def locked(lease: Lease) -> list[Obligation]:
    """Lock and return the open deadlines of a locked lease, by id: so a retry wakes them, without the lease's lock."""
    rows = Obligation.objects.select_for_update(no_key=True).filter(lease=lease, kind__in=KINDS, closed_at__isnull=True)
    return list(rows.order_by("pk"))


def close_for(lease: Lease) -> None:
    """Owe nothing of it any more: the lease, which is locked, is not what it was from this transaction on.

    An attempt that holds such a row is superseded by the close: its id is gone from the row, so nothing that it writes
    about the row passes the fence.
    """
    _close(locked(lease))


def _close(rows: Sequence[Obligation]) -> None:
    if not rows:
        return
    held = [row.attempt_id for row in rows if row.attempt_id is not None]
    Attempt.objects.filter(pk__in=held, finished_at__isnull=True).update(
        finished_at=Now(), outcome=Attempt.Outcome.NOTHING_OWED
    )
    Obligation.objects.filter(pk__in=[row.pk for row in rows]).update(
        closed_at=Now(),
        closed_as=Obligation.ClosedAs.NOTHING_OWED,
        due_at=None,
        quiet="",
        attempt_id=None,
        worker=None,
        claimed_at=None,
    )


def half_way(expires_at: datetime, now: datetime) -> datetime:
    """Return when a deadline is to be moved: at half the time that remains, and not before `SHORTEST` from `now`."""
    return now + max((expires_at - now) / 2, SHORTEST)


def lifetime(lease: Lease, adapter: type[AnyProvider]) -> float | None:
    """Return for how many seconds ahead the lease's configuration keeps the provider's deadline, None: not at all.

    Raises `ConfigurationError` when the recorded configuration does not fit the adapter's schema any more.
    """
    if not adapter.capabilities.has_deadline:
        return None
    return adapter.lifetime(validate(adapter.Config, lease.config))


def _is_kept_ahead(lease: Lease) -> bool:
    """Return whether the deadline is to be moved, also where this process cannot tell: then the handler finds out."""
    try:
        return lifetime(lease, load(lease.provider)) is not None
    except (ProviderUnavailable, ConfigurationError):
        return True


def _owe(lease: Lease, kind: Obligation.Kind, at: datetime) -> None:
    """It is owed from `at` on and not before, so that it does not escalate by its age while it only waits.

    The end of a lease asks nobody, so it waits behind no account's circuit, limit or `Retry-After`.
    """
    account_id = None if kind in Obligation.INNER else lease.account_id
    Obligation.objects.create(
        company_id=lease.company_id, kind=kind, account_id=account_id, lease=lease, due_at=at, owed_since=at
    )
