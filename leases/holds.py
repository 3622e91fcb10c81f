"""May this sandbox be destroyed? The one list of what holds it, and everything that reads it (design 4).

Each condition is one SQL expression on a lease `l`: the moment at which it ends by itself, `FOREVER` where only a write
ends it, and NULL where it does not hold. The listing, the report, the settle, and the re-check under the lease's lock
before every destroying call evaluate this list and no other, in the same statement, so that they cannot differ.

*Always* holds stand whatever happens. *Soft* ones count only while the stopped sandbox is a usable source, that is
until the provider's own `expires_at` (domain 8.2). Whoever adds a hold locks the lease first, and so does whoever
destroys: so either the hold is seen, or its holder is told that it comes too late. What ends a hold wakes the lease's
disposal (triggers, `0008_holds.sql`).
"""

# ruff: noqa: S608 - every expression is made of constants

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from django.db import connection, transaction
from django.db.models import Q, QuerySet
from django.db.models.functions import Now

from leases import arguments, audit, transitions
from leases.clock import database_now
from leases.errors import LeaseError, NotFound
from leases.models import Hold, Issue, Lease, Operation, Run

OTHER_LEASE = "other_lease"

FOREVER = datetime(9999, 12, 31, tzinfo=UTC)
"""When something ends that only a write ends."""

_FOREVER = "'9999-12-31 00:00:00+00'::timestamptz"
_LIVE_RUN = "('queued', 'scheduled_retry', 'running')"
_LIVE_LEASE = "('active', 'pending_cleanup', 'retained')"

_RESTING = """(l.state IN ('released', 'retained') OR l.state = 'pending_cleanup' AND l.orphaned_at IS NOT NULL)"""
"""It is kept, or the disposal of one that was nobody's has begun. A release by its own holder is no such thing: a run
that lets go of its sandbox does not hold it by being alive."""

_WAS_KEPT = """(l.state IN ('released', 'retained') OR l.state = 'pending_cleanup' AND (
    l.orphaned_at IS NOT NULL
    OR EXISTS (SELECT 1 FROM leases_receipt r WHERE r.lease_id = l.id AND r.evidence = 'stopped')))"""
"""It is kept, or was and is to be destroyed by now: what a hold on its issue covers."""


@dataclass(frozen=True, slots=True)
class Condition:
    """One way in which a sandbox is needed. `explicit`: by a `Hold` row, which somebody placed on purpose."""

    name: str
    strength: str
    sentence: str
    sql: str
    explicit: bool = False


def _if(condition: str) -> str:
    return f"CASE WHEN {condition} THEN {_FOREVER} END"


def _of_rows(kind: str) -> str:
    """Return the expression for the `Hold` rows of one kind, on the lease or on its issue."""
    if kind == Hold.Kind.SHUTDOWN_FENCE:  # protects the sandbox, whichever row of ours names it (S-238)
        # Past its time too: what ends it must not find the sandbox destroyed by what was due at the same moment.
        return f"""(SELECT max(greatest(h.until, now() + interval '30 s'))
         FROM leases_lease o JOIN leases_hold h ON h.lease_id = o.id
        WHERE o.resource_id = l.resource_id AND o.provider = l.provider AND o.account_identity = l.account_identity
          AND h.kind = '{kind}' AND h.ended_at IS NULL)"""
    return f"placed.{kind}"


_ALWAYS, _SOFT = Hold.Strength.ALWAYS.value, Hold.Strength.SOFT.value

CONDITIONS: tuple[Condition, ...] = (
    Condition(
        "run_live",
        _ALWAYS,
        "its run is not over",
        _if(f"{_RESTING} AND EXISTS (SELECT 1 FROM leases_run r WHERE r.id = l.run_id AND r.status IN {_LIVE_RUN})"),
    ),
    Condition(
        "stop_and_retain",
        _ALWAYS,
        "it is being stopped to be kept",
        _if(
            "EXISTS (SELECT 1 FROM leases_obligation o WHERE o.lease_id = l.id AND o.kind = 'teardown'"
            " AND o.closed_at IS NULL AND o.verb = 'stop_only')"
        ),
    ),
    Condition(
        "attempt_in_flight",
        _ALWAYS,
        "an attempt is at work on it",
        "CASE WHEN l.state <> 'pending_cleanup' THEN (SELECT max(o.due_at) FROM leases_obligation o"
        " WHERE o.lease_id = l.id AND o.attempt_id IS NOT NULL AND o.due_at > now()"
        " AND o.kind NOT IN ('dispose', 'settle_orphan', 'end_recovery')) END",
    ),
    Condition(
        "being_started",
        _ALWAYS,
        "it is being started",
        _if(
            "EXISTS (SELECT 1 FROM leases_operation op WHERE op.account_id = l.account_id"
            " AND op.resource_id = l.resource_id AND op.kind = 'start' AND op.state = 'pending')"
        ),
    ),
    Condition(
        "recovering",
        _ALWAYS,
        "its files are being recovered",
        _if("EXISTS (SELECT 1 FROM leases_recovery y WHERE y.lease_id = l.id AND y.state = 'running')"),
    ),
    Condition(
        OTHER_LEASE,
        _ALWAYS,
        "another live lease is on the same sandbox",
        _if(
            "EXISTS (SELECT 1 FROM leases_lease o WHERE o.id <> l.id AND o.resource_id = l.resource_id"
            " AND o.provider = l.provider AND o.account_identity = l.account_identity"
            f" AND o.state IN {_LIVE_LEASE})"
        ),
    ),
    *(
        Condition(
            kind.value,
            _SOFT if kind in Hold.SOFT_KINDS else _ALWAYS,
            str(kind.label),
            _of_rows(kind.value),
            explicit=True,
        )
        for kind in Hold.Kind
    ),
    Condition(
        "run_on_issue",
        _SOFT,
        "a run of its issue is queued, scheduled or running",
        _if(
            f"{_RESTING} AND EXISTS (SELECT 1 FROM leases_run r"
            f" WHERE r.issue_id = l.issue_id AND r.status IN {_LIVE_RUN})"
        ),
    ),
)

_WINDOW = f"coalesce(l.expires_at, {_FOREVER})"
"""Until when the stopped sandbox is a usable source."""


def _bounded(condition: Condition) -> str:
    """Return when a condition ends; a soft one, with the window at the latest."""
    if condition.strength != _SOFT:
        return f"({condition.sql})"
    return f"""(SELECT least(soft.until, {_WINDOW}) FROM (SELECT {condition.sql} AS until) soft
        WHERE soft.until IS NOT NULL AND {_WINDOW} > now())"""


_COLUMNS = ",\n".join(f"{_bounded(condition)} AS {condition.name}" for condition in CONDITIONS)
_PLACED = ",\n".join(
    f"max(coalesce(h.until, {_FOREVER})) FILTER (WHERE h.kind = '{kind}') AS {kind}" for kind in Hold.Kind.values
)
_FACTS = f"""
SELECT l.id, l.state, l.orphaned_at IS NOT NULL AS orphaned, l.kept_until, l.expires_at, now() AS now,
       {_COLUMNS}
  FROM {{source}} l
  LEFT JOIN LATERAL (
      SELECT {_PLACED} FROM leases_hold h
       WHERE h.ended_at IS NULL AND (h.until IS NULL OR h.until > now())
         AND (h.lease_id = l.id OR h.issue_id = l.issue_id AND {_WAS_KEPT})
  ) placed ON true
"""
"""The `Hold` rows of a lease are read once, each kind's in a column of `placed`."""

_LEASES = "leases_lease"
_AS_KEPT = """(SELECT id, 'released' AS state, orphaned_at, kept_until, expires_at, company_id, run_id, issue_id,
        provider, account_id, account_identity, resource_id FROM leases_lease)"""
"""Leases as if each were stopped and kept by now."""

_PASSING = ("stop_and_retain", "attempt_in_flight")
"""What is over once a sandbox is kept: its own stop, and who is at work on it."""


@dataclass(frozen=True, slots=True)
class Reason:
    """One thing that holds a lease, until when (`FOREVER`: until a write ends it)."""

    name: str
    strength: str
    sentence: str
    until: datetime
    explicit: bool


@dataclass(frozen=True, slots=True)
class Standing:
    """What holds one lease at one moment, by the database's clock."""

    lease_id: UUID
    state: str
    orphaned: bool
    kept_until: datetime | None
    expires_at: datetime | None
    at: datetime
    reasons: tuple[Reason, ...]

    @property
    def always_until(self) -> datetime | None:
        return self._until(_ALWAYS)

    @property
    def soft_until(self) -> datetime | None:
        return self._until(_SOFT)

    @property
    def held_until(self) -> datetime | None:
        """When the last of its holds ends by itself; None where nothing holds it."""
        return max((reason.until for reason in self.reasons), default=None)

    @property
    def is_held(self) -> bool:
        return bool(self.reasons)

    @property
    def is_held_explicitly(self) -> bool:
        return any(reason.explicit for reason in self.reasons)

    @property
    def releasable_at(self) -> datetime | None:
        """When the kept sandbox may be destroyed: `FOREVER` while a write has to come first, None: a person decides.

        In the past, or now, where nothing stands in the way.
        """
        end = self.at if self.orphaned else self.kept_until
        if self.held_until is not None and (end is None or self.held_until > end):
            return self.held_until
        return end

    def _until(self, strength: str) -> datetime | None:
        return max((reason.until for reason in self.reasons if reason.strength == strength), default=None)


def of(lease: Lease) -> Standing:
    """Return what holds a lease now. Decides something only under the lease's lock."""
    return next(_read("WHERE l.id = %s", [lease.pk]))


def standing(lease_ids: Iterable[UUID]) -> dict[UUID, Standing]:
    """Return what holds each of these leases, from one snapshot."""
    return {one.lease_id: one for one in _read("WHERE l.id = ANY(%s)", [list(lease_ids)])}


def once_kept(lease_ids: Iterable[UUID]) -> dict[UUID, tuple[Reason, ...]]:
    """Return what would hold each of these leases, were it stopped and kept by now.

    So what is in use and nobody's, or being stopped, is judged as it will be a moment later.
    """
    found = _read("WHERE l.id = ANY(%s)", [list(lease_ids)], source=_AS_KEPT)
    return {one.lease_id: tuple(reason for reason in one.reasons if reason.name not in _PASSING) for one in found}


def kept(company_id: UUID | None = None) -> Iterator[Standing]:
    """Return what holds every kept sandbox, from one snapshot: the listing."""
    where = "WHERE l.state IN ('released', 'retained') AND (%s::uuid IS NULL OR l.company_id = %s::uuid) ORDER BY l.id"
    return _read(where, [company_id, company_id])


def _read(where: str, values: Sequence[Any], *, source: str = _LEASES) -> Iterator[Standing]:
    with connection.cursor() as cursor:
        cursor.execute(_FACTS.format(source=source) + where, values)
        rows = cursor.fetchall()
    for lease_id, state, orphaned, kept_until, expires_at, now, *ends in rows:
        reasons = tuple(
            Reason(condition.name, condition.strength, condition.sentence, until, condition.explicit)
            for condition, until in zip(CONDITIONS, ends, strict=True)
            if until is not None and until > now
        )
        yield Standing(lease_id, state, orphaned, kept_until, expires_at, now, reasons)


def is_contested(lease: Lease) -> bool:
    """Return whether another lease of ours owns the same sandbox and will not end by itself either.

    Two of them would wait for each other for ever; whose the sandbox is, a person has to say. One in use by a live run,
    or with an end of its own, or whose teardown is owed, ends by itself, and wakes whatever waits for that.
    """
    others = Lease.objects.filter(
        resource_id=lease.resource_id, provider=lease.provider, account_identity=lease.account_identity
    ).exclude(pk=lease.pk)
    unused = Q(state=Lease.State.ACTIVE) & ~Q(run__status__in=Run.LIVE) & Q(ends_at__isnull=True)
    return others.filter(Q(state=Lease.State.RETAINED) | unused).exists()


class TooLate(LeaseError):
    """A destroying call was announced, or another run is getting it: nobody can hold this sandbox any more."""

    code = "too_late"


def hold(
    *,
    company_id: UUID,
    kind: str,
    holder: str,
    lease_id: UUID | None = None,
    issue_id: UUID | None = None,
    until: datetime | None = None,
    reason: str = "",
    actor: str = "api",
) -> Hold:
    """Say that `holder` needs a lease, or every kept lease of an issue, until `until` or until it is ended.

    The same holder saying it again moves `until` and the reason. A lease that owes its destruction is stopped and kept
    instead, as long as no destroying call was announced; for which leases of an issue it comes too late is in the audit
    entry. An operator's hold needs an `until`, when it is reviewed.

    Raises `NotFound`; `TooLate` for a lease whose destruction has begun; `LeaseError` with code `gone` where its
    sandbox is gone, `invalid` for nonsense.
    """
    company_id, kind = _checked(company_id, kind, holder, until, reason, actor)
    if (lease_id is None) == (issue_id is None):
        raise LeaseError("name either a lease or an issue", code="invalid")
    too_late: list[str] = []
    with transaction.atomic():
        if issue_id is not None:
            issue = _locked_issue(arguments.identity(issue_id, "issue_id"), company_id)
            placed = _place(company_id, kind, holder, until, reason, issue=issue)
            for lease in _locked(Lease.objects.filter(issue=issue, company_id=company_id).exclude(state__in=_OVER)):
                if lease.state != Lease.State.PENDING_CLEANUP or not of(lease).is_held_explicitly:
                    continue
                if not transitions.hold_back(lease, held_by=[kind], actor=actor):
                    too_late.append(str(lease.pk))
        else:
            subject = arguments.identity(lease_id, "lease_id")
            found = _locked(Lease.objects.filter(pk=subject, company_id=company_id))
            if not found:
                raise NotFound(f"no lease {lease_id} in this company")
            placed = hold_locked(found[0], kind=kind, holder=holder, until=until, reason=reason, actor=actor)
        audit.record(
            "hold.placed",
            placed,
            company_id=company_id,
            actor=actor,
            reason=reason,
            kind=kind,
            holder=holder,
            lease=str(lease_id) if lease_id else None,
            issue=str(issue_id) if issue_id else None,
            until=until.isoformat() if until else None,
            **({"too_late_for": too_late} if too_late else {}),
        )
    return placed


def hold_locked(lease: Lease, *, kind: str, holder: str, until: datetime | None, reason: str, actor: str) -> Hold:
    """Place a hold on a locked lease, in the caller's transaction. Raises what `hold` raises."""
    if lease.state in _OVER:
        raise LeaseError(f"the lease is {lease.get_state_display()}: there is nothing to hold any more", code="gone")
    if lease.state == Lease.State.PENDING_CLEANUP and not transitions.hold_back(lease, held_by=[kind], actor=actor):
        raise TooLate("the sandbox is being destroyed: a destroying call was announced already")
    # A start is journalled under the lease's lock by who saw no hold: what another run is getting is not held any more.
    given = Operation.objects.filter(source=lease, kind=Operation.Kind.START, state=Operation.State.PENDING)
    if given.exclude(lease_uuid=lease.pk).exists():
        raise TooLate("the sandbox is being started for another run, which will write to its files")
    return _place(lease.company_id, kind, holder, until, reason, lease=lease)


def end(hold_id: UUID, *, company_id: UUID, actor: str, reason: str = "") -> Hold:
    """End a hold. Ending it again changes nothing. Wakes the lease's disposal (trigger).

    Raises `NotFound`, and `LeaseError` with code `invalid` for nonsense.
    """
    if reason:
        arguments.reason(reason, "ending a hold")
    hold_id = arguments.identity(hold_id, "hold_id")
    company_id = arguments.identity(company_id, "company_id")
    arguments.actor(actor)
    with transaction.atomic():
        row = Hold.objects.filter(pk=hold_id, company_id=company_id).first()
        if row is None:
            raise NotFound(f"no hold {hold_id} in this company")
        if row.lease_id is not None:
            Lease.objects.select_for_update(no_key=True).get(pk=row.lease_id)
        if Hold.objects.filter(pk=hold_id, ended_at__isnull=True).update(ended_at=Now(), ended_by=actor):
            audit.record(
                "hold.ended",
                row,
                company_id=company_id,
                actor=actor,
                reason=reason,
                kind=row.kind,
                holder=row.holder,
            )
    row.refresh_from_db()
    return row


_OVER = (Lease.State.EXPIRED, Lease.State.FAILED)


def _place(
    company_id: UUID,
    kind: str,
    holder: str,
    until: datetime | None,
    reason: str,
    *,
    lease: Lease | None = None,
    issue: Issue | None = None,
) -> Hold:
    """Insert the hold, or move the one that stands. Its subject is locked, so nobody places the same meanwhile."""
    placed, created = Hold.objects.get_or_create(
        company_id=company_id,
        kind=kind,
        holder=holder,
        lease=lease,
        issue=issue,
        ended_at=None,
        defaults={
            "strength": Hold.Strength.SOFT if kind in Hold.SOFT_KINDS else Hold.Strength.ALWAYS,
            "until": until,
            "reason": reason,
        },
    )
    if not created:
        placed.until, placed.reason = until, reason
        placed.save(update_fields=["until", "reason"])
    return placed


def _checked(
    company_id: UUID, kind: str, holder: str, until: datetime | None, reason: str, actor: str
) -> tuple[UUID, str]:
    company_id = arguments.identity(company_id, "company_id")
    arguments.actor(actor)
    arguments.actor(holder)
    if kind not in Hold.Kind.values:
        placed = (one for one in Hold.Kind.values if one != Hold.Kind.SHUTDOWN_FENCE)
        raise LeaseError(f"kind must be one of {', '.join(placed)}", code="invalid")
    if reason:
        arguments.reason(reason, "a hold")
    if kind == Hold.Kind.SHUTDOWN_FENCE:
        raise LeaseError("a fence is placed by the controller that goes down", code="invalid")
    if kind == Hold.Kind.OPERATOR and until is None:
        raise LeaseError("an operator's hold needs a time at which it is reviewed", code="invalid")
    if until is not None:
        moment: object = until
        if not isinstance(moment, datetime) or moment.tzinfo is None:
            raise LeaseError("until is a moment with a time zone", code="invalid")
        if not database_now() < until < FOREVER:
            raise LeaseError("until is a moment to come", code="invalid")
    return company_id, kind


def _locked(leases: QuerySet[Lease]) -> list[Lease]:
    return list(leases.select_for_update(no_key=True).order_by("pk"))


def _locked_issue(issue_id: UUID, company_id: UUID) -> Issue:
    issue = Issue.objects.select_for_update(no_key=True).filter(pk=issue_id, company_id=company_id).first()
    if issue is None:
        raise NotFound(f"no issue {issue_id} in this company")
    return issue
