"""Removing closed history: the one place that deletes it, in batches, under a database role of its own.

Removed is what was over before a date and what nothing reads to decide anything: attempts, ended work, ended holds,
closed obligations, findings that were resolved, recovery actions that were closed, and *whole sandboxes*: all leases of
one sandbox with their receipts, the operations that made and started it, the recoveries of its files and what continued
from those, or nothing of it. A sandbox of which anything is open, held, younger than the date, of a live run, in an
archive whose file is there, or a debt without proof stays, with every receipt. What is over stays over, so nothing that
was found to be removable is needed again before it is removed (decision 30).

Each batch is a transaction of its own with its entry in the log. It locks the leases that it removes, and skips those
that somebody holds; they are found again next time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.db import DatabaseError, connection, transaction
from django.db.models import Exists, Model, OuterRef, Q, QuerySet
from psycopg.errors import InsufficientPrivilege, InvalidParameterValue

from leases import arguments, audit, proof
from leases.blockers import require_trust
from leases.clock import database_now
from leases.closing import SETTLED
from leases.connections import despite_deadlocks
from leases.errors import LeaseError
from leases.models import (
    ActivityEntry,
    Archive,
    Attempt,
    BridgeActivity,
    Continuation,
    Hold,
    Installation,
    InventoryFinding,
    InventoryListing,
    Lease,
    Obligation,
    Operation,
    Receipt,
    Recovery,
    RecoveryAction,
    Run,
)

ROLE = "paperclip_prune"
"""The database role whose deletions the triggers let pass. SQL of the same name: `0012_prune.sql`."""

YOUNGEST = timedelta(days=1)
"""History younger than this is never removed: an attempt, or a late answer, may still be on its way to it."""

BATCH = 1000
"""Rows, or leases with all that hangs on them, in one transaction."""

Kind = Obligation.Kind
_WITHOUT_PROOF = (Obligation.ClosedAs.UNVERIFIED, Obligation.ClosedAs.DISOWNED)
Counts = dict[str, int]


@dataclass(frozen=True, slots=True)
class Removed:
    """How many rows of each table were removed, or would be."""

    before: datetime
    rows: Counts
    stopped: bool = False
    """It was asked to stop; what is left is found again."""

    @property
    def total(self) -> int:
        return sum(self.rows.values())


# What is over, each by its own rule; none reads what another one removes.


def _attempts(before: datetime) -> QuerySet[Any]:
    """Attempts at open obligations that are moved on again and again. The others go with their obligation.

    The attempts of an open teardown or recovery stay: what it tries next depends on them.
    """
    renewed = Q(obligation__kind__in=(Kind.EXTEND, *Obligation.STANDING))
    return Attempt.objects.filter(renewed, obligation__closed_at__isnull=True, finished_at__lt=before)


def _activities(before: datetime) -> QuerySet[Any]:
    """Work that ended; that of a recovery goes with it."""
    return BridgeActivity.objects.filter(ended_at__lt=before).exclude(
        Exists(Recovery.objects.filter(activity=OuterRef("pk")))
    )


def _holds(before: datetime) -> QuerySet[Any]:
    return Hold.objects.filter(ended_at__lt=before)


def _actions(before: datetime) -> QuerySet[Any]:
    return RecoveryAction.objects.filter(closed_at__lt=before)


def _findings(before: datetime) -> QuerySet[Any]:
    return InventoryFinding.objects.filter(resolved_at__lt=before)


def _listings(before: datetime) -> QuerySet[Any]:
    """Listings that a later complete one has taken the place of."""
    later = InventoryListing.objects.filter(
        provider=OuterRef("provider"),
        account_identity=OuterRef("account_identity"),
        outcome=InventoryListing.Outcome.COMPLETE,
        began_at__gt=OuterRef("began_at"),
    )
    return InventoryListing.objects.filter(Exists(later), ended_at__lt=before)


def _obligations(before: datetime) -> QuerySet[Obligation]:
    """Closed obligations, but for those that ended without proof, and what stands on the same lease or operation.

    They say why a lease is `failed` without a receipt, and whether a debt was taken up since (`proof.paid_since`).
    """
    given_up = Obligation.objects.filter(closed_as__in=_WITHOUT_PROOF)
    return (
        Obligation.objects.filter(closed_at__lt=before)
        .exclude(closed_as__in=_WITHOUT_PROOF)
        .exclude(Exists(given_up.filter(lease=OuterRef("lease"))))
        .exclude(Exists(given_up.filter(operation=OuterRef("operation"))))
        .exclude(Exists(Attempt.objects.filter(_not_over("finished_at", before), obligation=OuterRef("pk"))))
        .exclude(Exists(InventoryFinding.objects.filter(_not_over("resolved_at", before), obligation=OuterRef("pk"))))
    )


def _lone_operations(before: datetime) -> QuerySet[Operation]:
    """Creations that came to nothing."""
    touched = Lease.objects.filter(account=OuterRef("account"), resource_id=OuterRef("resource_id"))
    return Operation.objects.filter(lease__isnull=True, source__isnull=True).exclude(
        Q(Exists(touched)) & ~Q(resource_id="") | _is_needed(before)
    )


def _lone_continuations(before: datetime) -> QuerySet[Continuation]:
    """Continuations that are over and bound to no recovery, of runs that are over by the same date as a whole.

    Until then whoever asks again gets the row, and starts nothing twice; afterwards it is a new request.
    """
    young = Q(
        Exists(Lease.objects.filter(_not_over("released_at", before) | ~Q(state__in=SETTLED), run=OuterRef("run")))
    )
    young |= Q(Exists(Operation.objects.filter(run_uuid=OuterRef("run")).exclude(state=Operation.State.RESOLVED)))
    young |= Q(Exists(Obligation.objects.filter(_not_over("closed_at", before), continuation=OuterRef("pk"))))
    young |= Q(
        Exists(Attempt.objects.filter(_not_over("finished_at", before), obligation__continuation=OuterRef("pk")))
    )
    ended = Continuation.objects.filter(ended_at__lt=before, recovery__isnull=True)
    return ended.exclude(young | _is_live("run"))


def _entries(before: datetime) -> QuerySet[Any]:
    """The log of what may be removed, whether it is there or not (`_of_the_gone`)."""
    return ActivityEntry.objects.filter(subject_type__in=_LOGGED, at__lt=before)


def _of_the_gone(ids: list[int]) -> list[int]:
    """Return those of these entries whose subject is there no more."""
    entries = list(ActivityEntry.objects.filter(pk__in=ids).values_list("pk", "subject_type", "subject_id"))
    there: set[tuple[str, str]] = set()
    for name, rows in _LOGGED.items():
        subjects = {subject for _, kind, subject in entries if kind == name}
        there |= {(name, str(pk)) for pk in rows().filter(pk__in=subjects).values_list("pk", flat=True)}
    return [pk for pk, kind, subject in entries if (kind, subject) not in there]


_LOGGED: dict[str, Callable[[], QuerySet[Any]]] = {
    "lease": Lease.objects.all,
    "operation": Operation.objects.all,
    "obligation": Obligation.objects.all,
    "recovery": Recovery.objects.all,
    "archive": Archive.objects.all,
    "continuation": Continuation.objects.all,
    "recoveryaction": RecoveryAction.objects.all,
}


def _not_over(column: str, before: datetime) -> Q:
    return Q(**{f"{column}__isnull": True}) | Q(**{f"{column}__gte": before})


def _is_live(run: str) -> Q:
    """Whether the run of this column is live, owes something, or what became of it is still asked.

    A cancellation that is not confirmed is owed by it. A continuation of its issue that waits asks whether it ended
    (`leases.ending`), for which it needs the receipts.
    """
    live = Run.objects.filter(pk=OuterRef(run), status__in=Run.LIVE)
    owing = Obligation.objects.filter(run_id=OuterRef(run), closed_at__isnull=True)
    asked = Continuation.objects.filter(issue__run=OuterRef(run), state=Continuation.State.WAITING)
    return Q(Exists(live)) | Q(Exists(owing)) | Q(Exists(asked))


def _stands_on(subject: str, before: datetime) -> Q:
    """Whether something that stands on this lease (or operation) is open, younger than the date, or a debt."""
    owed = Obligation.objects.filter(_not_over("closed_at", before), **{subject: OuterRef("pk")})
    debt = proof.unproven().filter(**{subject: OuterRef("pk")})
    tried = Attempt.objects.filter(_not_over("finished_at", before), **{f"obligation__{subject}": OuterRef("pk")})
    work = BridgeActivity.objects.filter(_not_over("ended_at", before), **{subject: OuterRef("pk")})
    return Q(Exists(owed)) | Q(Exists(debt)) | Q(Exists(tried)) | Q(Exists(work))


def _is_needed(before: datetime) -> Q:
    """Whether an operation is still needed."""
    over = Q(state=Operation.State.RESOLVED, resolved_at__lt=before)
    return ~over | _stands_on("operation", before) | _is_live("run_uuid")


def _over(before: datetime) -> QuerySet[Lease]:
    """Leases of which, by themselves, nothing is needed any more."""
    # One look-up for each index; a condition that joins them by OR would read the whole journal for each lease.
    of_its_sandbox = Operation.objects.filter(account=OuterRef("account"), resource_id=OuterRef("resource_id"))
    touching = (
        Operation.objects.filter(lease=OuterRef("pk")),
        Operation.objects.filter(source=OuterRef("pk")),
        of_its_sandbox.exclude(resource_id=""),
    )
    needed = (
        _stands_on("lease", before)
        | _is_live("run")
        | Q(Exists(Receipt.objects.filter(lease=OuterRef("pk"), confirmed_at__gte=before)))
        | Q(Exists(Hold.objects.filter(_not_over("ended_at", before), lease=OuterRef("pk"))))
        | Q(Exists(InventoryFinding.objects.filter(_not_over("resolved_at", before), lease=OuterRef("pk"))))
    )
    for waited_for in _of_recoveries(before):
        needed |= Q(Exists(waited_for))
    for operations in touching:
        needed |= Q(Exists(operations.filter(_is_needed(before))))
    return _candidates(before).exclude(needed)


def _of_recoveries(before: datetime) -> tuple[QuerySet[Any], ...]:
    """Return what keeps a lease for the sake of its files: a row is the only one that knows whose a file is."""
    here = {"recovery__lease": OuterRef("pk")}
    owed = {"obligation__continuation__recovery__lease": OuterRef("pk")}
    return (
        Recovery.objects.filter(_not_over("finished_at", before), lease=OuterRef("pk")),
        Archive.objects.filter(_not_over("removed_at", before), lease=OuterRef("pk")),
        Continuation.objects.filter(_not_over("ended_at", before), **here),
        Attempt.objects.filter(_not_over("finished_at", before), **owed),
    )


def _candidates(before: datetime) -> QuerySet[Lease]:
    """Leases that may be over: cheap to page through, and judged page by page."""
    return Lease.objects.filter(state__in=SETTLED, released_at__lt=before)


@dataclass(frozen=True, slots=True)
class _Sandboxes:
    leases: list[UUID]
    operations: list[UUID]


def _whole_sandboxes(ids: list[UUID], before: datetime, *, lock: bool) -> _Sandboxes:
    """Return all leases and operations of the sandboxes of these leases, of those sandboxes that are over as a whole.

    With `lock` the leases are locked, and a sandbox of which somebody holds one is left out.
    """
    sandboxes = set(Lease.objects.filter(pk__in=ids).values_list("account_id", "resource_id"))
    on_them = Lease.objects.filter(
        account_id__in={account for account, _ in sandboxes}, resource_id__in={resource for _, resource in sandboxes}
    ).order_by("pk")
    there = {
        pk: (account, resource)
        for pk, account, resource in on_them.values_list("pk", "account_id", "resource_id")
        if (account, resource) in sandboxes
    }
    ready = set(_over(before).filter(pk__in=there).values_list("pk", flat=True))
    if lock:
        mine = on_them.select_for_update(no_key=True, skip_locked=True).filter(pk__in=there)
        ready &= set(mine.values_list("pk", flat=True))
    whole = sandboxes - {there[pk] for pk in there if pk not in ready}
    leases = sorted(pk for pk in there if there[pk] in whole)
    operations = Operation.objects.filter(
        account_id__in={account for account, _ in whole}, resource_id__in={resource for _, resource in whole}
    )
    found = [
        pk
        for pk, account, resource in operations.values_list("pk", "account_id", "resource_id")
        if (account, resource) in whole
    ]
    return _Sandboxes(leases, sorted(found))


def _hanging_on(sandboxes: _Sandboxes) -> list[tuple[str, QuerySet[Any]]]:
    """Return what goes with leases and operations, in the order in which it goes."""
    of_them = Q(lease__in=sandboxes.leases) | Q(operation__in=sandboxes.operations)
    continuations = Continuation.objects.filter(recovery__lease__in=sandboxes.leases)
    obligations = Obligation.objects.filter(of_them | Q(continuation__in=continuations))
    return [
        ("findings", InventoryFinding.objects.filter(Q(lease__in=sandboxes.leases) | Q(obligation__in=obligations))),
        ("attempts", Attempt.objects.filter(obligation__in=obligations)),
        ("obligations", obligations),
        ("continuations", continuations),
        ("archives", Archive.objects.filter(lease__in=sandboxes.leases)),
        ("recoveries", Recovery.objects.filter(lease__in=sandboxes.leases)),
        ("activities", BridgeActivity.objects.filter(of_them)),
        ("holds", Hold.objects.filter(lease__in=sandboxes.leases)),
        ("receipts", Receipt.objects.filter(lease__in=sandboxes.leases)),
    ]


# Doing it


def what_is_over(before: datetime, *, log: bool = False) -> Removed:
    """Return how much `prune` would remove. Reads only, and needs no role; rows may have been added since."""
    _check(before)
    counts: Counts = {}
    for name, rows in _plain(before):
        _add(counts, name, rows.count())
    closed = _obligations(before)
    _add(counts, "attempts", Attempt.objects.filter(obligation__in=closed).count())
    _add(counts, "obligations", closed.count())
    seen: set[UUID] = set()
    for ids in _pages(_candidates(before), BATCH):
        found = _whole_sandboxes([pk for pk in ids if pk not in seen], before, lock=False)
        seen.update(found.leases)
        _count_with(counts, found, before)
    for ids in _pages(_lone_operations(before), BATCH):
        _count_with(counts, _Sandboxes([], ids), before)
    lone = _lone_continuations(before)
    _add(counts, "continuations", lone.count())
    if log:
        for ids in _pages(_entries(before), BATCH):
            # Of what would be gone by then nothing can be said yet; what is gone already can be counted.
            _add(counts, "entries", len(_of_the_gone(ids)))
    return Removed(before, counts)


def prune(
    before: datetime,
    *,
    actor: str,
    reason: str,
    batch: int = BATCH,
    log: bool = False,
    stopping: Callable[[], bool] = lambda: False,
    on_batch: Callable[[int], None] = lambda _: None,
) -> Removed:
    """Remove the history that was over before `before`, in transactions of `batch` rows, and return what was removed.

    With `log` also the log of leases, operations and obligations that are there no more. `stopping` is asked between
    batches, and `on_batch` told of the rows of each. Safe to repeat, and to run twice at once.

    Raises `LeaseError`: `invalid` for a date that is younger than `YOUNGEST`, `observing`, `role_missing` where
    the role does not exist or this user may not take it.
    """
    arguments.actor(actor)
    arguments.reason(reason, "pruning")
    _check(before)
    if batch < 1:
        raise LeaseError("a batch is at least one row", code="invalid")
    require_trust("pruning")
    _require_role()
    run = _Run(before, actor, reason, batch, stopping, on_batch)
    for name, rows in _plain(before):
        run.over(rows, lambda ids, name=name, rows=rows: {name: _delete(rows.model, ids)})  # type: ignore[misc]
    run.over(_obligations(before), _remove_obligations)
    run.over(_candidates(before), lambda ids: _remove_sandboxes(_whole_sandboxes(ids, before, lock=True)))
    run.over(_lone_operations(before), lambda ids: _remove_sandboxes(_Sandboxes([], ids)))
    run.over(_lone_continuations(before), _remove_continuations)
    if log:
        run.over(_entries(before), lambda ids: {"entries": _delete(ActivityEntry, _of_the_gone(ids))})
    return Removed(before, run.counts, run.stopped)


def _plain(before: datetime) -> list[tuple[str, QuerySet[Any]]]:
    return [
        ("findings", _findings(before)),
        ("listings", _listings(before)),
        ("attempts", _attempts(before)),
        ("activities", _activities(before)),
        ("holds", _holds(before)),
        ("actions", _actions(before)),
    ]


class _Run:
    """One pruning: pages through what is over, removes each page in a transaction, and counts."""

    def __init__(
        self,
        before: datetime,
        actor: str,
        reason: str,
        batch: int,
        stopping: Callable[[], bool],
        on_batch: Callable[[int], None],
    ) -> None:
        self.before, self.actor, self.reason, self.batch = before, actor, reason, batch
        self.stopping, self.on_batch = stopping, on_batch
        self.counts: Counts = {}
        self.stopped = False

    def over(self, rows: QuerySet[Any], remove: Callable[[list[Any]], Counts]) -> None:
        for ids in _pages(rows, self.batch):
            if self.stopped or self.stopping():
                self.stopped = True
                return
            removed = despite_deadlocks(lambda ids=ids: self._batch(ids, remove))  # type: ignore[misc]
            for name, count in removed.items():
                _add(self.counts, name, count)
            self.on_batch(sum(removed.values()))

    def _batch(self, ids: list[Any], remove: Callable[[list[Any]], Counts]) -> Counts:
        with transaction.atomic():
            removed = {name: count for name, count in remove(ids).items() if count}
            if removed:
                audit.record(
                    "history.pruned",
                    Installation.current(),
                    company_id=None,
                    actor=self.actor,
                    reason=self.reason,
                    before=self.before.isoformat(),
                    **removed,
                )
        return removed


def _remove_obligations(ids: list[int]) -> Counts:
    return {
        "findings": _delete_found(InventoryFinding.objects.filter(obligation__in=ids)),
        "attempts": _delete_found(Attempt.objects.filter(obligation__in=ids)),
        "obligations": _delete(Obligation, ids),
    }


def _remove_continuations(ids: list[UUID]) -> Counts:
    owed = Obligation.objects.filter(continuation__in=ids)
    return {
        "attempts": _delete_found(Attempt.objects.filter(obligation__in=owed)),
        "obligations": _delete_found(owed),
        "continuations": _delete(Continuation, ids),
    }


def _remove_sandboxes(found: _Sandboxes) -> Counts:
    removed = {name: _delete_found(rows) for name, rows in _hanging_on(found)}
    return {
        **removed,
        "operations": _delete(Operation, found.operations),
        "leases": _delete(Lease, found.leases),
    }


def _delete_found(rows: QuerySet[Any]) -> int:
    return _delete(rows.model, list(rows.values_list("pk", flat=True)))


def _delete(model: type[Model], ids: list[Any]) -> int:
    """Delete these rows as the role that may. Nothing else is done as that role."""
    if not ids:
        return 0
    with connection.cursor() as cursor:
        cursor.execute(f"SET LOCAL ROLE {ROLE}")
        cursor.execute(f"DELETE FROM {model._meta.db_table} WHERE id = ANY(%s)", [ids])  # noqa: S608, SLF001 - constants
        removed = int(cursor.rowcount)
        cursor.execute("RESET ROLE")
    return removed


def _pages(rows: QuerySet[Any], size: int) -> Iterator[list[Any]]:
    """Yield the ids of rows in pages, by id: what stays in a page is passed over, and not met again."""
    after: Any = None
    while True:
        page = rows if after is None else rows.filter(pk__gt=after)
        ids = list(page.order_by("pk").values_list("pk", flat=True)[:size])
        if not ids:
            return
        yield ids
        after = ids[-1]


def _count_with(counts: Counts, found: _Sandboxes, before: datetime) -> None:
    """Count sandboxes with what hangs on them and is not counted for itself."""
    renewed = _attempts(before).filter(pk=OuterRef("pk"))
    closed = _obligations(before)
    counted = {
        "findings": Q(Exists(_findings(before).filter(pk=OuterRef("pk")))),
        "attempts": Q(Exists(renewed)) | Q(Exists(closed.filter(pk=OuterRef("obligation")))),
        "obligations": Q(Exists(closed.filter(pk=OuterRef("pk")))),
        "activities": Q(Exists(_activities(before).filter(pk=OuterRef("pk")))),
        "holds": Q(Exists(_holds(before).filter(pk=OuterRef("pk")))),
    }
    for name, rows in _hanging_on(found):
        more = rows.exclude(counted[name]) if name in counted else rows
        _add(counts, name, more.count())
    _add(counts, "operations", len(found.operations))
    _add(counts, "leases", len(found.leases))


def _add(counts: Counts, name: str, count: int) -> None:
    if count:
        counts[name] = counts.get(name, 0) + count


def _check(before: datetime) -> None:
    if before > database_now() - YOUNGEST:
        raise LeaseError("only history that is older than a day is removed", code="invalid")


def _require_role() -> None:
    """Try the role, so that what lacks it is told before anything is read."""
    try:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute(f"SET LOCAL ROLE {ROLE}")
            missing = [table for table in _tables() if not _may_delete(cursor, table)]
            cursor.execute("RESET ROLE")
    except DatabaseError as error:
        if isinstance(error.__cause__, InvalidParameterValue | InsufficientPrivilege):
            raise LeaseError(
                f"the database role {ROLE} does not exist, or this user may not take it; an administrator of the "
                f"database runs: CREATE ROLE {ROLE} NOLOGIN; GRANT {ROLE} TO {_user()}; SELECT leases_grant_prune();",
                code="role_missing",
            ) from error
        raise
    if missing:
        raise LeaseError(
            f"the database role {ROLE} has no right to remove rows of {', '.join(missing)}; "
            "the owner of the tables runs: SELECT leases_grant_prune();",
            code="role_missing",
        )


def _tables() -> Iterable[str]:
    """Yield the tables that history is removed from."""
    for model in PRUNED:
        yield model._meta.db_table  # noqa: SLF001 - documented API of Django


PRUNED: tuple[type[Model], ...] = (
    InventoryFinding,
    InventoryListing,
    Attempt,
    BridgeActivity,
    Hold,
    Obligation,
    Receipt,
    Operation,
    Lease,
    ActivityEntry,
    Recovery,
    Archive,
    Continuation,
    RecoveryAction,
)
"""Every model of which rows are removed. A new reference to one of them needs a thought here (a test asks)."""


def _may_delete(cursor: Any, table: str) -> bool:
    cursor.execute("SELECT has_table_privilege(%s, %s, 'DELETE')", [ROLE, table])
    return bool(cursor.fetchone()[0])


def _user() -> str:
    return str(connection.settings_dict["USER"] or "YOU")
