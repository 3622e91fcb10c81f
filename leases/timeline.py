"""The story of one lease in one order: what was journalled, owed, tried, proven, done in the sandbox, and logged.

Its operations are the creation or the start that made it, and every start of its own sandbox; so a sandbox that is used
again is told twice, as the end of the one lease's story and the beginning of the other's.

A pure read for people. It never loads more than `LIMIT` rows of a kind, whatever the age of the lease: a teardown that
fails for a year is tried some fifty times a day.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from itertools import chain

from django.db.models import CharField, Q, QuerySet
from django.db.models.functions import Cast

from leases import deadlines
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
    TAKEOVER = "takeover"
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
    """Return what happened to this lease, oldest first: its newest `limit` events. Seven statements, however many."""
    journal = Operation.objects.filter(Q(lease_uuid=lease.pk) | Q(source=lease)).order_by("-created_at")
    operations = list(journal[: limit + 1])
    made = [operation.pk for operation in operations if operation.lease_uuid == lease.pk]
    owed = Q(lease=lease) | Q(operation__in=[operation.pk for operation in operations])
    if lease.run_id is not None:
        owed |= Q(run_id=lease.run_id, kind=Obligation.Kind.STARTUP)
    obligations = list(Obligation.objects.filter(owed).order_by("-pk")[: limit + 1])
    ids = [obligation.pk for obligation in obligations]
    attempts = Attempt.objects.filter(obligation__in=ids).select_related("obligation").order_by("-claimed_at")
    activities = BridgeActivity.objects.filter(Q(lease=lease) | Q(operation__in=made)).order_by("-started_at")
    receipts = Receipt.objects.filter(lease=lease).order_by("-pk")
    found = chain(
        chain.from_iterable(_of_operation(operation, lease) for operation in operations),
        _of_succession(lease),
        chain.from_iterable(map(_of_obligation, obligations)),
        map(_of_attempt, attempts[: limit + 1]),
        map(_of_activity, activities[: limit + 1]),
        map(_of_receipt, receipts[: limit + 1]),
        map(_of_entry, _entries(lease, operations, ids)[: limit + 1]),
    )
    events = sorted(found, key=lambda event: (event.at, _RANK[event.source]))
    return Timeline(tuple(events[-limit:]), complete=len(events) <= limit)


def _entries(lease: Lease, operations: list[Operation], obligations: list[int]) -> QuerySet[ActivityEntry]:
    subjects = Q(subject_type="lease", subject_id=str(lease.pk))
    if operations:
        subjects |= Q(subject_type="operation", subject_id__in=[str(operation.pk) for operation in operations])
    if holds := list(lease.holds.values_list("pk", flat=True)[:LIMIT]):
        subjects |= Q(subject_type="hold", subject_id__in=[str(pk) for pk in holds])
    if obligations:
        subjects |= Q(subject_type="obligation", subject_id__in=[str(pk) for pk in obligations])
    # In the same statement: the recoveries of its files, and what they saved.
    for name, rows in (("recovery", lease.recoveries.all()), ("archive", lease.archives.all())):
        ids = rows.order_by().annotate(text=Cast("pk", CharField())).values("text")
        subjects |= Q(subject_type=name, subject_id__in=ids)
    return ActivityEntry.objects.filter(subjects).order_by("-at", "-pk")


def _of_operation(operation: Operation, lease: Lease) -> Iterator[Event]:
    start = operation.kind == Operation.Kind.START
    what = "Start" if start else "Creation"
    whose = {"for_lease": str(operation.lease_uuid)} if operation.lease_uuid != lease.pk else {}
    if operation.source_id is not None and operation.source_id != lease.pk:
        whose["of_the_sandbox_of_lease"] = str(operation.source_id)
    yield Event(
        operation.created_at,
        Source.JOURNAL,
        f"{what} recorded, before the provider was asked",
        facts=_facts(
            name=operation.name,
            provider=operation.provider,
            account=operation.account_identity,
            request=operation.request_key or "",
            **whose,
        ),
    )
    if operation.cancelled_at:
        yield Event(operation.cancelled_at, Source.JOURNAL, f"{what} cancelled", Tone.PENDING)
    if operation.outlived_at:
        yield Event(operation.outlived_at, Source.JOURNAL, f"{what} outlived its caller", Tone.PENDING)
    if operation.resolved_at and operation.state == Operation.State.UNVERIFIED:
        yield Event(operation.resolved_at, Source.JOURNAL, f"{what} given up: what came of it is not known", Tone.BAD)
    elif operation.resolved_at:
        left = "nothing of it is under way any more" if start else "nothing is owned any more"
        yield Event(operation.resolved_at, Source.JOURNAL, f"{what} resolved: {left}", Tone.GOOD)


def _of_succession(lease: Lease) -> Iterator[Event]:
    """A successor takes over in the transaction that makes it, so the time of both is when it was acquired."""
    both = Lease.objects.filter(Q(successor_id=lease.pk) | Q(predecessor__pk=lease.pk))
    for other in both:
        if other.successor_id == lease.pk:
            told = ("Takes the sandbox over from its predecessor", {"predecessor": str(other.pk)})
            yield Event(lease.acquired_at, Source.TAKEOVER, told[0], Tone.GOOD, facts=_facts(**told[1]))
        else:
            told = ("The sandbox was taken over by a successor", {"successor": str(other.pk)})
            yield Event(other.acquired_at, Source.TAKEOVER, told[0], Tone.GOOD, facts=_facts(**told[1]))


def _of_obligation(obligation: Obligation) -> Iterator[Event]:
    kind = obligation.get_kind_display()
    drain = obligation.drain_until
    # A deadline is owed from a time that comes, and anew each time that it was moved: its attempts tell of it.
    if obligation.kind not in (*deadlines.KINDS, Obligation.Kind.END_RECOVERY):
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


_TOLD = {
    "lease.may_be_running": Tone.BAD,
    "recovery.exhausted": Tone.BAD,
    "recovery.disowned": Tone.BAD,
    "recovery.complete": Tone.GOOD,
    "archive.sealed": Tone.GOOD,
}
"""Entries of the log that are good or bad news by themselves."""


def _of_entry(entry: ActivityEntry) -> Event:
    details = ((name, "" if value is None else str(value)) for name, value in entry.details.items() if name != "lease")
    return Event(
        entry.at,
        Source.AUDIT,
        entry.action,
        _TOLD.get(entry.action, Tone.PLAIN),
        facts=_facts(by=entry.actor, reason=entry.reason) + _named(details),
    )


def _facts(**values: str) -> tuple[tuple[str, str], ...]:
    return _named(values.items())


def _named(values: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    return tuple((name.replace("_", " "), value) for name, value in values if value)


def _seconds(span: timedelta) -> str:
    return f"{span.total_seconds():.1f} s"
