"""Explicit retry: a person wants what is owed tried now.

It skips the cooldown and cannot take over a live attempt: the request is counted on the row, and the settle of a live
attempt that fails makes the row due at once because of it (domain 6.10; one attempt per request, audited).
"""

from __future__ import annotations

from collections.abc import Iterable
from uuid import UUID

from django.db import transaction
from django.db.models import F, Q, QuerySet

from leases import arguments, audit
from leases.connections import despite_deadlocks
from leases.errors import LeaseError, NotFound
from leases.models import Lease, Obligation, ProviderAccount, Run
from leases.waking import wake

_WAITING = (
    Obligation.Kind.SETTLE_ORPHAN,
    Obligation.Kind.DISPOSE,
    Obligation.Kind.START_CONTINUATION,
    Obligation.Kind.CONFIRM_CANCEL,
    Obligation.Kind.END_RECOVERY,
    Obligation.Kind.RECOVER_WORKSPACE,
    Obligation.Kind.WATCH_RESTART,
)
"""What waits for other rows, whose ends wake it."""


def retry(
    *, company_id: UUID, run_id: UUID | None = None, lease_id: UUID | None = None, actor: str, reason: str
) -> int:
    """Ask for one attempt at each open obligation of one run, or of one lease, of one company.

    Not at the run's startup: that asks no provider, and is woken by whatever may end it.

    Returns how many were asked for. Raises `NotFound` for a run or lease that this company does not have, `LeaseError`
    when no reason is given, or not exactly one of the two.
    """
    if (run_id is None) == (lease_id is None):
        raise LeaseError("name either a run or a lease", code="invalid")
    company_id = arguments.identity(company_id, "company_id")
    run_id = arguments.identity(run_id, "run_id") if run_id is not None else None
    lease_id = arguments.identity(lease_id, "lease_id") if lease_id is not None else None
    arguments.actor(actor)
    arguments.reason(reason, "a retry")
    owed = Obligation.objects.filter(company_id=company_id, closed_at__isnull=True)
    if run_id is not None:
        if not Run.objects.filter(pk=run_id, company_id=company_id).exists():
            raise NotFound(f"no run {run_id} in this company")
        owed = owed.filter(Q(lease__run_id=run_id) | Q(operation__run_uuid=run_id))
    elif lease_id is not None:
        if not Lease.objects.filter(pk=lease_id, company_id=company_id).exists():
            raise NotFound(f"no lease {lease_id} in this company")
        owed = owed.filter(lease_id=lease_id)
    return retry_obligations(owed.values_list("pk", flat=True), actor=actor, reason=reason)


def retry_obligations(ids: Iterable[int], *, actor: str, reason: str) -> int:
    """Ask for one attempt at each of these open obligations, and at the probe of a blocked account behind them.

    Returns how many were asked for. Raises `LeaseError` when no reason is given.
    """
    arguments.actor(actor)
    arguments.reason(reason, "a retry")
    owed = Obligation.objects.filter(pk__in=list(ids), closed_at__isnull=True).select_related("account")
    # Startups in a transaction of their own, and so what waits for them and for holds: the end of a teardown or a
    # recovery wakes its run's startup, and the end of a startup the settles of its run, whatever a retry has locked.
    startups = Q(kind=Obligation.Kind.STARTUP)
    settles = Q(kind__in=_WAITING)
    return sum(
        despite_deadlocks(lambda some=some: _ask(owed.filter(some), actor, reason))  # type: ignore[misc]
        for some in (~startups & ~settles, startups, settles)
    )


def _ask(owed: QuerySet[Obligation], actor: str, reason: str) -> int:
    count = 0
    with transaction.atomic():
        # In the order in which a Stop comes to them (leases by id, then operations by id), so that the two cannot
        # deadlock; the probes, which no Stop touches, last and in an order of their own.
        accounts, probes = set(), set()
        for obligation in owed.order_by(F("lease_id").asc(nulls_last=True), "operation_id", "run_id", "pk"):
            if obligation.kind == Obligation.Kind.PROBE_ACCOUNT:
                probes.add(obligation.pk)
            else:
                wake(obligation.pk, explicit=True)
            account = obligation.account
            if account is not None and account.circuit == ProviderAccount.Circuit.OPEN:
                accounts.add(account.pk)
            audit.record(
                "obligation.retry_requested",
                obligation,
                company_id=obligation.company_id,
                actor=actor,
                reason=reason,
                kind=obligation.kind,
                lease=str(obligation.lease_id) if obligation.lease_id else None,
            )
            count += 1
        for pk in sorted(probes | _probes_of(accounts)):
            wake(pk, explicit=True)
    return count


def _probes_of(accounts: set[UUID]) -> set[int]:
    """Behind an open circuit nothing but its probe is claimed, so that is what a person's request must reach."""
    probes = Obligation.objects.filter(
        probed_account_id__in=accounts, kind=Obligation.Kind.PROBE_ACCOUNT, closed_at__isnull=True
    )
    return set(probes.values_list("pk", flat=True))
