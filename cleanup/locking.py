"""The row locks of a settle, taken without waiting: issue, run, lease, the order of locks (design 4).

A settle that finds one held comes back in seconds; nobody is held up by it, and it holds up nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from uuid import UUID

from django.db import DatabaseError, transaction
from django.db.models import QuerySet
from psycopg.errors import LockNotAvailable

from cleanup.work import Contended, Outcome
from leases.models import Issue, Lease, Run


class NotAvailable(Exception):
    """Somebody holds one of the locks. Nothing was decided; the transaction is to be ended."""


def without_waiting(settle: Callable[[], Outcome]) -> Outcome:
    """Run a settle in a transaction of its own; one that meets somebody's lock has written nothing, and comes back."""
    try:
        with transaction.atomic():
            return settle()
    except NotAvailable:
        return Contended()


def locked_in_order(lease_id: UUID) -> Lease:
    """Lock and return a lease, its run and its issue before it. Raises `NotAvailable`. The caller is in a transaction.

    A lease's run is final and its issue hardly ever changes; one that did is noticed under its lock.
    """
    run_id, issue_id = Lease.objects.values_list("run_id", "issue_id").get(pk=lease_id)
    try:
        if issue_id is not None:
            Issue.objects.select_for_update(no_key=True, nowait=True).get(pk=issue_id)
        if run_id is not None:
            Run.objects.select_for_update(no_key=True, nowait=True).get(pk=run_id)
        lease = Lease.objects.select_for_update(no_key=True, nowait=True, of=("self",)).get(pk=lease_id)
    except DatabaseError as error:
        if isinstance(error.__cause__, LockNotAvailable):
            raise NotAvailable from error
        raise
    if lease.issue_id != issue_id:
        raise NotAvailable
    return lease


def also_locked(leases: QuerySet[Lease]) -> list[Lease]:
    """Lock and return more leases. Raises `NotAvailable`. Not waited for, so their place in the order is free."""
    try:
        return list(leases.select_for_update(no_key=True, nowait=True, of=("self",)).order_by("pk"))
    except DatabaseError as error:
        if isinstance(error.__cause__, LockNotAvailable):
            raise NotAvailable from error
        raise
