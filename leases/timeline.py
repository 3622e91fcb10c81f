"""The story of one lease in one order: what was journalled, owed, tried, proven, done in the sandbox, and logged.

A pure read for people. It never loads more than `LIMIT` rows of a kind, whatever the age of the lease: a teardown that
fails for a year is tried some fifty times a day.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from itertools import chain

from django.db.models import Q, QuerySet

from leases.models import ActivityEntry, Attempt, BridgeActivity, Lease, Obligation, Operation, Receipt

LIMIT = 300
"""Events shown at most, the newest; and rows read at most of each kind."""


class Source(StrEnum):
    """Which table an event comes from, in the order of telling within one instant.

    Rows that share a transaction share its time; they are told as they follow from each other, the log's word last.
    """

    JOURNAL = "journal"
    INTENT = "intent"
    ACTIVITY = "activity"
    ATTEMPT = "attempt"
    RECEIPT = "receipt"
    CLOSED = "closed"
    AUDIT = "audit"


class Tone(StrEnum):
    PLAIN = "plain"
    GOOD = "good"
    BAD = "bad"
    PENDING = "pending"


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened. `facts` are labels with values; values may be provider text, so escape them."""

    at: datetime
    source: Source
    title: str
    tone: Tone = Tone.PLAIN
    lasted: timedelta | None = None
    facts: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Timeline:
    """Events, oldest first. Not `complete` when older ones were left out."""

    events: tuple[Event, ...]
    complete: bool


_RANK = {source: rank for rank, source in enumerate(Source)}


def timeline(lease: Lease, *, limit: int = LIMIT) -> Timeline:
    """Return what happened to this lease, oldest first: its newest `limit` events. Six statements, however many."""
    operation = Operation.objects.filter(lease_uuid=lease.pk).first()
    owed = Q(lease=lease) | Q(operation=operation) if operation else Q(lease=lease)
    obligations = list(Obligation.objects.filter(owed).order_by("-pk")[: limit + 1])
    ids = [obligation.pk for obligation in obligations]
    attempts = Attempt.objects.filter(obligation__in=ids).select_related("obligation").order_by("-claimed_at")
    activities = BridgeActivity.objects.filter(lease=lease).order_by("-started_at")
    receipts = Receipt.objects.filter(lease=lease).order_by("-pk")
    found = chain(
        chain.from_iterable(map(_of_operation, [operation] if operation else [])),
        chain.from_iterable(map(_of_obligation, obligations)),
        map(_of_attempt, attempts[: limit + 1]),
        map(_of_activity, activities[: limit + 1]),
        map(_of_receipt, receipts[: limit + 1]),
        map(_of_entry, _entries(lease, operation, ids)[: limit + 1]),
    )
    events = sorted(found, key=lambda event: (event.at, _RANK[event.source]))
    return Timeline(tuple(events[-limit:]), complete=len(events) <= limit)


def _entries(lease: Lease, operation: Operation | None, obligations: list[int]) -> QuerySet[ActivityEntry]:
    subjects = Q(subject_type="lease", subject_id=str(lease.pk))
    if operation is not None:
        subjects |= Q(subject_type="operation", subject_id=str(operation.pk))
    if obligations:
        subjects |= Q(subject_type="obligation", subject_id__in=[str(pk) for pk in obligations])
    return ActivityEntry.objects.filter(subjects).order_by("-at", "-pk")


def _of_operation(operation: Operation) -> Iterator[Event]:
    yield Event(
        operation.created_at,
        Source.JOURNAL,
        "Creation recorded, before the provider was asked",
        facts=_facts(name=operation.name, provider=operation.provider, account=operation.account_identity),
    )
    if operation.cancelled_at:
        yield Event(operation.cancelled_at, Source.JOURNAL, "Creation cancelled", Tone.PENDING)
    if operation.resolved_at:
        yield Event(operation.resolved_at, Source.JOURNAL, "Creation resolved: nothing is owned any more", Tone.GOOD)


def _of_obligation(obligation: Obligation) -> Iterator[Event]:
    kind = obligation.get_kind_display()
    drain = obligation.drain_until
    yield Event(
        obligation.owed_since,
        Source.INTENT,
        f"Owed: {kind}",
        Tone.PENDING,
        facts=_facts(
            obligation=f"#{obligation.pk}",
            verb=obligation.get_verb_display().lower(),
            drain_until=f"{drain:%Y-%m-%d %H:%M:%S} UTC" if drain else "",
        ),
    )
    if obligation.closed_at:
        proven = obligation.closed_as != Obligation.ClosedAs.UNVERIFIED
        yield Event(
            obligation.closed_at,
            Source.CLOSED,
            f"No longer owed: {kind}",
            Tone.GOOD if proven else Tone.BAD,
            facts=_facts(obligation=f"#{obligation.pk}", because=obligation.get_closed_as_display()),
        )


_TONES = {
    "": Tone.PENDING,
    Attempt.Outcome.PROVEN: Tone.GOOD,
    Attempt.Outcome.NOTHING_OWED: Tone.GOOD,
    Attempt.Outcome.HANDED_OVER: Tone.GOOD,
    Attempt.Outcome.FAILED: Tone.BAD,
    Attempt.Outcome.QUIETED: Tone.BAD,
    Attempt.Outcome.SUPERSEDED: Tone.BAD,
}


def _of_attempt(attempt: Attempt) -> Event:
    announced = attempt.announced_call
    if announced and attempt.announced_at:
        epoch = f", epoch {attempt.announced_epoch}" if attempt.announced_epoch is not None else ""
        announced = f"{announced} (after {_seconds(attempt.announced_at - attempt.claimed_at)}{epoch})"
    return Event(
        attempt.claimed_at,
        Source.ATTEMPT,
        f"Attempt at {attempt.obligation}: {attempt.get_outcome_display().lower() or 'in flight'}",
        _TONES.get(attempt.outcome, Tone.PLAIN),
        lasted=attempt.finished_at - attempt.claimed_at if attempt.finished_at else None,
        facts=_facts(
            announced=announced, error=attempt.error_kind, provider_said=attempt.error_excerpt, worker=attempt.worker
        ),
    )


def _of_activity(activity: BridgeActivity) -> Event:
    code = activity.exit_code
    return Event(
        activity.started_at,
        Source.ACTIVITY,
        f"Work in the sandbox, {activity.kind}: {activity.get_outcome_display().lower() or 'open'}",
        Tone.PLAIN if activity.ended_at else Tone.PENDING,
        lasted=activity.ended_at - activity.started_at if activity.ended_at else None,
        facts=_facts(exit_code="" if code is None else str(code), error=activity.error_kind),
    )


def _of_receipt(receipt: Receipt) -> Event:
    return Event(
        receipt.confirmed_at,
        Source.RECEIPT,
        f"Proof from the provider: {receipt.get_evidence_display().lower()}",
        Tone.GOOD,
        facts=_facts(epoch=str(receipt.epoch), ended=receipt.ended, sandbox=receipt.resource_id),
    )


def _of_entry(entry: ActivityEntry) -> Event:
    details = ((name, "" if value is None else str(value)) for name, value in entry.details.items() if name != "lease")
    return Event(
        entry.at, Source.AUDIT, entry.action, facts=_facts(by=entry.actor, reason=entry.reason) + _named(details)
    )


def _facts(**values: str) -> tuple[tuple[str, str], ...]:
    return _named(values.items())


def _named(values: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    return tuple((name.replace("_", " "), value) for name, value in values if value)


def _seconds(span: timedelta) -> str:
    return f"{span.total_seconds():.1f} s"
