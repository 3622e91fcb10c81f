"""What goes on after failed runs: what may run unseen, recoveries of files, and continuations that wait. To be read.

It answers for: nothing of that is hidden in a report. A sandbox that may be running costs as if it did, since nobody
can tell; a continuation that waits says by which gate, in the words that were written when it was last looked at.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from uuid import UUID

from django.db.models import Count, Min, Q, QuerySet

from leases.models import Continuation, Lease, Obligation, Recovery

SHOWN = 20
"""Rows of a kind that are named, the oldest first."""

NOT_LOOKED = "nobody has looked at it yet"
"""What is said of a continuation before its first look."""


@dataclass(frozen=True, slots=True)
class MayRun:
    """A sandbox whose earlier end is proven, and which may run again since: a restart of it was never answered."""

    lease: UUID
    resource_id: str
    provider: str
    environment: str
    since: datetime
    next_look: datetime | None
    """When it is looked at again, None: while somebody is at work on it, or when what it waits for ends."""
    hourly_price: Decimal | None


@dataclass(frozen=True, slots=True)
class Recovering:
    """A generation that runs."""

    recovery: UUID
    lease: UUID
    resource_id: str
    generation: int
    attempts: int
    requested_by: str
    started_at: datetime
    ends_at: datetime
    next_attempt_at: datetime | None
    failure: str
    """Why its last attempt failed, in words; "" where none did."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A continuation that waits."""

    continuation: UUID
    issue: UUID
    run: UUID
    kind: str
    requested_by: str
    requested_at: datetime
    hold: str
    """The code of the gate that is closed, "" before the first look."""
    sentence: str


@dataclass(frozen=True, slots=True)
class HeldBy:
    """How many continuations one gate keeps waiting, and since when the oldest of them does."""

    hold: str
    count: int
    since: datetime


@dataclass(frozen=True, slots=True)
class Unfinished:
    """The first of each by name, and how many there are."""

    may_run: tuple[MayRun, ...]
    may_run_count: int
    per_hour: Decimal
    """Of those that may be running, whose price is known."""
    unknown_prices: int
    recoveries: tuple[Recovering, ...]
    recovery_count: int
    continuations: tuple[Waiting, ...]
    continuation_count: int
    held_by: tuple[HeldBy, ...]

    def __bool__(self) -> bool:
        return bool(self.may_run_count or self.recovery_count or self.continuation_count)


def unfinished(*, shown: int | None = SHOWN) -> Unfinished:
    """Return what goes on after failed runs; `shown`: how many are named of each, None for all. Reads only."""
    running = Lease.objects.filter(may_be_running_since__isnull=False)
    prices = list(running.values_list("hourly_price", flat=True))
    recoveries = Recovery.objects.filter(state=Recovery.State.RUNNING)
    waiting = Continuation.objects.filter(state=Continuation.State.WAITING)
    return Unfinished(
        may_run=tuple(_may_run(running, shown)),
        may_run_count=len(prices),
        per_hour=sum((price for price in prices if price is not None), Decimal(0)),
        unknown_prices=sum(1 for price in prices if price is None),
        recoveries=tuple(map(_recovering, _first(recoveries.select_related("lease").order_by("started_at"), shown))),
        recovery_count=recoveries.count(),
        continuations=tuple(map(_waiting, _first(waiting.order_by("requested_at"), shown))),
        continuation_count=waiting.count(),
        held_by=tuple(
            HeldBy(hold, count, since)
            for hold, count, since in waiting.values("hold")
            .annotate(count=Count("pk"), since=Min("requested_at"))
            .order_by("-count", "hold")
            .values_list("hold", "count", "since")
        ),
    )


def failure_in_words(recovery: Recovery) -> str:
    """Return why the last attempt of a generation failed, with what the provider said, "" where none did."""
    if not recovery.failure:
        return ""
    said = f" ({recovery.error_kind}: {recovery.error_excerpt})" if recovery.error_kind else ""
    return f"{recovery.get_failure_display()}{said}"


def _may_run(running: QuerySet[Lease], shown: int | None) -> list[MayRun]:
    watches = Q(obligations__kind=Obligation.Kind.WATCH_RESTART, obligations__closed_at__isnull=True)
    watches &= Q(obligations__attempt_id__isnull=True)
    rows = running.select_related("environment").annotate(next_look=Min("obligations__due_at", filter=watches))
    return [
        MayRun(
            lease=lease.pk,
            resource_id=lease.resource_id,
            provider=lease.provider,
            environment=lease.environment.name if lease.environment else "",
            since=lease.may_be_running_since,
            next_look=lease.next_look,
            hourly_price=lease.hourly_price,
        )
        for lease in _first(rows.order_by("may_be_running_since", "pk"), shown)
        if lease.may_be_running_since is not None
    ]


def _recovering(recovery: Recovery) -> Recovering:
    return Recovering(
        recovery=recovery.pk,
        lease=recovery.lease_id,
        resource_id=recovery.lease.resource_id,
        generation=recovery.generation,
        attempts=recovery.attempts,
        requested_by=recovery.requested_by,
        started_at=recovery.started_at,
        ends_at=recovery.ends_at,
        next_attempt_at=recovery.next_attempt_at,
        failure=failure_in_words(recovery),
    )


def _waiting(row: Continuation) -> Waiting:
    return Waiting(
        continuation=row.pk,
        issue=row.issue_id,
        run=row.run_id,
        kind=row.kind,
        requested_by=row.requested_by,
        requested_at=row.requested_at,
        hold=row.hold,
        sentence=row.hold_sentence or NOT_LOOKED,
    )


def _first(rows: QuerySet, shown: int | None) -> QuerySet:  # type: ignore[type-arg]
    return rows if shown is None else rows[:shown]
