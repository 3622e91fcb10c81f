"""The row locks of a settle, taken without waiting: issue, run, lease, the order of locks (design 4).

A settle that finds one held comes back in seconds; nobody is held up by it, and it holds up nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from uuid import UUID

from django.db import DatabaseError, transaction
from django.db.models import Q, QuerySet
from psycopg.errors import LockNotAvailable

from cleanup.claims import Claim
from cleanup.work import Contended, Outcome
from leases.models import Issue, Lease, Obligation, Run


class _Changed(Exception):
    """The lease came to another issue while its locks were taken: those are not its locks any more."""


def without_waiting(settle: Callable[[], Outcome]) -> Outcome:
    """Run a settle in a transaction of its own; one that meets somebody's lock has written nothing, and comes back."""
    try:
        with transaction.atomic():
            return settle()
    except _Changed:
        return Contended()
    except DatabaseError as error:
        if isinstance(error.__cause__, LockNotAvailable):
            return Contended()
        raise


def locked_in_order(lease_id: UUID) -> Lease:
    """Lock and return a lease, its run and its issue before it, in a settle that runs `without_waiting`.

    A lease's run is final and its issue hardly ever changes; one that did is noticed under its lock.
    """
    run_id, issue_id = Lease.objects.values_list("run_id", "issue_id").get(pk=lease_id)
    if issue_id is not None:
        Issue.objects.select_for_update(no_key=True, nowait=True).get(pk=issue_id)
    if run_id is not None:
        Run.objects.select_for_update(no_key=True, nowait=True).get(pk=run_id)
    lease = Lease.objects.select_for_update(no_key=True, nowait=True, of=("self",)).get(pk=lease_id)
    if lease.issue_id != issue_id:
        raise _Changed
    return lease


def also_locked(leases: QuerySet[Lease]) -> list[Lease]:
    """Lock and return more leases in the same way. Not waited for, so their place in the order is free."""
    return list(leases.select_for_update(no_key=True, nowait=True, of=("self",)).order_by("pk"))


def own_rows(claim: Claim, woken: QuerySet[Obligation]) -> None:
    """Lock the claim's own row, and the open ones that its settle wakes, without waiting for anybody.

    For a settle whose row is woken together with those: whoever wakes them both may hold either.
    """
    rows = Obligation.objects.filter(Q(pk=claim.obligation_id) | Q(pk__in=woken.values("pk")), closed_at__isnull=True)
    list(rows.select_for_update(no_key=True, nowait=True, of=("self",)).order_by("pk").values_list("pk", flat=True))
