"""What counts as proof that execution in a lease's sandbox ended. The one reader of receipts that decides anything.

A receipt proves the epoch that it names, and nothing while a start of its sandbox is pending: whether that start was
done is then not known (design 4, *Epochs*). The start is journalled under the lock of the lease that is read here. Nor
does one prove anything that is older than the end of a start which an operator ended unverified: that opens no gate.
"""

from __future__ import annotations

from uuid import UUID

from django.db.models import Exists, OuterRef, Q, QuerySet
from django.db.models.functions import Coalesce

from leases.models import Lease, Obligation, Operation, Receipt


def receipts(lease: Lease) -> QuerySet[Receipt]:
    """Return the receipts that prove, as of now, that execution in this lease's epoch ended."""
    return lease.receipts.filter(~Exists(_unknown_starts()), epoch=lease.epoch)


def receipts_but_for(lease: Lease, start: Operation) -> QuerySet[Receipt]:
    """Return the receipts that would prove it, were it known that this pending start was not done."""
    return lease.receipts.filter(~Exists(_unknown_starts().exclude(pk=start.pk)), epoch=lease.epoch)


def of_each(lease: str = "pk", epoch: str = "epoch") -> QuerySet[Receipt]:
    """Return `receipts` of each lease that a query reads, for its `Exists`; the columns are the outer query's."""
    return Receipt.objects.filter(~Exists(_unknown_starts()), lease=OuterRef(lease), epoch=OuterRef(epoch))


def _unknown_starts() -> QuerySet[Operation]:
    """Return the starts of a receipt's sandbox of which it is not known, since that receipt, whether they were done."""
    unknown = Q(state=Operation.State.PENDING) | Q(
        state=Operation.State.UNVERIFIED, resolved_at__gte=OuterRef("confirmed_at")
    )
    return Operation.objects.filter(
        unknown,
        kind=Operation.Kind.START,
        account_id=OuterRef("account_id"),
        resource_id=OuterRef("resource_id"),
    )


def is_proven_ended(lease: Lease) -> bool:
    """Return whether there is proof that nothing executes in this lease's sandbox on its behalf."""
    return receipts(lease).exists()


def unproven() -> QuerySet[Obligation]:
    """Return the debts: what operators ended unverified, and what nothing proved or found since."""
    return Obligation.objects.filter(Q(closed_as=Obligation.ClosedAs.UNVERIFIED) & ~paid_since())


def paid_since() -> Q:
    """Whether an obligation that was ended unverified has its proof after all, or its sandbox a new owner.

    A start's is paid by a receipt of an epoch that began after it was given up, or that says that the sandbox was gone
    since. A startup's is paid when nothing of it is `unended` any more. A lease's whose sandbox was found is owed by
    its next teardown.
    """
    of_epoch = Receipt.objects.filter(lease=OuterRef("lease"), epoch=OuterRef("lease__epoch"))
    gone = [Receipt.Evidence.DESTROYED, Receipt.Evidence.ABSENT]
    destroyed = of_epoch.filter(evidence__in=gone)
    stop_is_enough = Q(verb__in=[Obligation.Verb.STOP_ONLY, Obligation.Verb.STOP_OR_DELETE])
    taken_up = Obligation.objects.filter(lease=OuterRef("lease"), kind=Obligation.Kind.TEARDOWN, pk__gt=OuterRef("pk"))
    found = Q(operation__isnull=False) & ~Q(operation__state=Operation.State.UNVERIFIED)
    of_source = Receipt.objects.filter(lease=OuterRef("operation__source"))
    before = Receipt.objects.filter(
        lease=OuterRef("lease"),
        epoch__gte=OuterRef("epoch"),
        confirmed_at__lte=OuterRef(OuterRef("operation__resolved_at")),
    )
    after = of_source.filter(
        ~Exists(before) | Q(evidence__in=gone), confirmed_at__gt=OuterRef("operation__resolved_at")
    )
    paid = Q(Exists(destroyed)) | stop_is_enough & Q(Exists(of_epoch)) | found | Q(Exists(after))
    came_to_its_end = Q(kind=Obligation.Kind.STARTUP) & ~Q(Exists(unended(OuterRef("run_id"))))
    return paid | Q(Exists(taken_up)) | came_to_its_end


def unended(run: UUID | OuterRef) -> QuerySet[Operation]:
    """Return what a run asked for and did not get, and of which it is not proven that nothing of it runs any more.

    The exact sandbox has to be proven ended, whatever its release answered. Of a start that was given up a later proof
    of its sandbox is enough; of such a creation nobody knows the sandbox.
    """
    subject = Lease.objects.filter(pk=Coalesce(OuterRef("lease_id"), OuterRef("source_id")))
    ended = subject.filter(Q(successor__isnull=False) | Q(Exists(of_each())))
    given_up = Q(state=Operation.State.UNVERIFIED)
    came_to_nothing = Q(state=Operation.State.RESOLVED, lease__isnull=True, source__isnull=True)
    without_its_caller = (given_up | Q(outlived_at__isnull=False)) & ~came_to_nothing
    return Operation.objects.filter(
        Q(state=Operation.State.PENDING) | given_up & Q(source__isnull=True) | without_its_caller & ~Q(Exists(ended)),
        run_uuid=run,
    )
