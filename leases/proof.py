"""What counts as proof that execution in a lease's sandbox ended. The one reader of receipts that decides anything.

A receipt proves the epoch that it names, and nothing while a start of its sandbox is pending: whether that start was
done is then not known (design 4, *Epochs*). The start is journalled under the lock of the lease that is read here.
"""

from __future__ import annotations

from django.db.models import Exists, OuterRef, QuerySet

from leases.models import Lease, Operation, Receipt


def receipts(lease: Lease) -> QuerySet[Receipt]:
    """Return the receipts that prove, as of now, that execution in this lease's epoch ended."""
    starting = Operation.objects.filter(
        kind=Operation.Kind.START,
        state=Operation.State.PENDING,
        account_id=OuterRef("account_id"),
        resource_id=OuterRef("resource_id"),
    )
    return lease.receipts.filter(~Exists(starting), epoch=lease.epoch)


def is_proven_ended(lease: Lease) -> bool:
    """Return whether there is proof that nothing executes in this lease's sandbox on its behalf."""
    return receipts(lease).exists()
