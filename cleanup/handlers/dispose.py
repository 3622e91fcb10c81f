"""The end of a kept sandbox: destroyed when nothing needs it any more and its time is over. Asks no provider.

Domain 8.2. One that is nobody's (`orphaned_at`) is due at once; one that waits for its next run, or is kept for its
files, when its time is over; one whose environment says so, when an operator decides. Whatever its time, what holds it
(`leases.holds`) keeps it. Row locks are taken without waiting, in the order of locks, and everything is decided under
them; what the settle leads to is another row's work, whose every destroying call looks at the holds again.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from cleanup.claims import Claim, fenced, finish_attempt
from cleanup.locking import locked_in_order, without_waiting
from cleanup.work import Call, Context, Done, Held, NeedsOperator, Outcome, Waiting
from leases import audit, deadlines, holds, transitions
from leases.models import Attempt, Lease, Obligation


def dispose(claim: Claim, _: Context) -> Generator[Call, Any, Outcome]:
    """Owe the destruction of one kept sandbox, or say when that is to be looked at again."""
    yield from ()
    return without_waiting(lambda: _settle(claim))


def _settle(claim: Claim) -> Outcome:
    lease = locked_in_order(claim.lease)
    deadlines.locked(lease)  # all that is closed below, in their order, before the one that is ours
    row = fenced(claim)
    if row is None or lease.state not in Lease.KEPT:
        return Done(proven=False)
    claim.wakes = row.wakes  # what those wakes told of is evaluated here, under the locks
    held = holds.of(lease)
    _keep_ahead(lease, held)
    at = held.releasable_at
    if at is None:
        return NeedsOperator(Obligation.Quiet.OPERATOR_DECIDES)
    if at == holds.FOREVER:
        contested = any(reason.name == holds.OTHER_LEASE for reason in held.reasons) and holds.is_contested(lease)
        return NeedsOperator(Obligation.Quiet.IDENTITY_CONFLICT) if contested else Waiting()
    if at > held.at:
        return Held(at)
    transitions.close(row, Obligation.ClosedAs.HANDED_OVER)
    finish_attempt(claim, Attempt.Outcome.HANDED_OVER)
    transitions.dispose(lease, reason=_reason(lease, held), actor=audit.SYSTEM)
    return Done(proven=True)


def _keep_ahead(lease: Lease, held: holds.Standing) -> None:
    """Keep the provider's own deadline ahead of what is held whatever happens, and of nothing else that is kept."""
    if held.always_until is not None and lease.expires_at is not None:
        deadlines.keep_ahead(lease)
    else:
        deadlines.let_come(lease)


def _reason(lease: Lease, held: holds.Standing) -> str:
    if held.orphaned:
        return "retained_orphan"
    return "idle_too_long" if lease.scope else "retention_over"
