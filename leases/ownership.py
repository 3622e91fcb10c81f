"""Whose is each sandbox, what keeps it, until when, and what that costs: the report, for the command and the admin.

Read-only, in one snapshot. What holds a sandbox is read where its settle reads it (`leases.holds`), and when a row is
acted on next is what that settle would compute now, so that the report cannot say another time than comes true.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from uuid import UUID

from django.db import connection
from django.db.models import TextChoices

from leases import controllers, holds, trust
from leases.holds import FOREVER, Reason, Standing
from leases.models import Hold, Lease, Obligation, Run
from leases.snapshot import snapshot

SHOWN = 20
"""Sandboxes that the report names of a kind, those that are acted on first."""

DECIDES = Obligation.Quiet.OPERATOR_DECIDES.value
UNACKNOWLEDGED = Obligation.Quiet.UNACKNOWLEDGED.value
_ACTIVE, _PENDING = Lease.State.ACTIVE.value, Lease.State.PENDING_CLEANUP.value
_HOUR = Decimal(3600)
_NOTHING = Decimal(0)


class Kind(TextChoices):
    """Every lease whose sandbox is not gone is of exactly one of these kinds."""

    IN_USE = "in_use", "in use"
    FENCED = "fenced", "in use, fenced by a controller that went down"
    ORPHAN = "orphan", "in use by nobody"
    REUSABLE = "reusable", "idle, for the next run"
    RETAINED = "retained", "kept for its files"
    RETAINED_ORPHAN = "retained_orphan", "nobody's, kept while it is needed"
    TEARDOWN = "teardown", "being stopped or destroyed"


STOPPED = frozenset({Kind.REUSABLE, Kind.RETAINED, Kind.RETAINED_ORPHAN})
"""Kinds whose sandboxes are proven stopped: the price of a running one is the most that they cost."""
SETTLED = STOPPED | {Kind.ORPHAN}
"""Kinds that a settle decides about, by rows and in milliseconds."""


@dataclass(frozen=True, slots=True)
class Sandbox:
    """One lease whose sandbox is not gone. Times are the database's."""

    lease: UUID
    resource_id: str
    provider: str
    environment: str
    kind: Kind
    obligation: int | None
    """What acts on it next: its settle_orphan, dispose or teardown."""
    reasons: tuple[Reason, ...]
    """What keeps it as it is."""
    person: str
    """Why a person is needed (`Obligation.Quiet`), "" where none is."""
    due_at: datetime | None
    """When it is acted on next if nothing is written until then; in the past: as soon as a worker is free."""
    since: datetime
    """Since when it is kept, or, of one that runs, since when it is rented."""
    hourly_price: Decimal | None
    so_far: Decimal | None
    """`hourly_price` times the hours since then, None where the price is not known."""
    may_run_since: datetime | None = None
    """Since when it may run again although its end is proven: a restart of it was never answered."""

    @property
    def is_kept(self) -> bool:
        """Whether it was proven stopped and is kept; it may be running again since."""
        return self.kind in STOPPED

    @property
    def is_stopped(self) -> bool:
        """Whether it is stopped as far as is known, so that its price is the most that it costs."""
        return self.kind in STOPPED and self.may_run_since is None

    @property
    def advice(self) -> str:
        """What the person is to do who is needed."""
        return str(Obligation.Quiet(self.person).label) if self.person else ""

    def is_releasable(self, now: datetime) -> bool:
        return self.due_at is not None and self.due_at <= now


@dataclass(frozen=True, slots=True)
class Because:
    """How many sandboxes of a kind one thing keeps, and until when it does (None: until it is ended)."""

    name: str
    strength: str
    sentence: str
    count: int
    first_until: datetime | None
    last_until: datetime | None


@dataclass(frozen=True, slots=True)
class Cost:
    """Of the sandboxes whose price is known; of how many it is not. `at_most`: some of them are stopped."""

    per_hour: Decimal = _NOTHING
    so_far: Decimal = _NOTHING
    unknown: int = 0
    at_most: bool = False

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.per_hour + other.per_hour,
            self.so_far + other.so_far,
            self.unknown + other.unknown,
            self.at_most or other.at_most,
        )


@dataclass(frozen=True, slots=True)
class Group:
    """The sandboxes of one kind. `count` is `releasable` (now), `held` and `undecided` (for a person) together."""

    kind: Kind
    label: str
    count: int
    releasable: int
    held: int
    undecided: int
    next_due: datetime | None
    cost: Cost
    may_run: int
    """How many of them may be running although they were proven stopped."""
    because: tuple[Because, ...]
    sandboxes: tuple[Sandbox, ...]
    """The first `SHOWN`; all of them where that was asked for."""

    @property
    def left_out(self) -> int:
        return self.count - len(self.sandboxes)


@dataclass(frozen=True, slots=True)
class History:
    """Ends at one account that nothing proves and that are looked for."""

    account: UUID
    name: str
    provider: str
    open: int
    undecided: int
    """Of these, how many a person is asked about."""
    next_due: datetime | None
    cost: Cost


@dataclass(frozen=True, slots=True)
class MassLapse:
    """Runs whose controllers' holds are over and about which a person is asked, because so many lapsed at once."""

    runs: int


@dataclass(frozen=True, slots=True)
class Ownership:
    at: datetime
    groups: tuple[Group, ...]
    history: tuple[History, ...]
    mass_lapse: MassLapse | None
    total: Cost

    def of(self, kind: Kind) -> Group:
        return next(group for group in self.groups if group.kind == kind)


def ownership(*, shown: int | None = SHOWN) -> Ownership:
    """Return what every sandbox is kept by. `shown`: how many are named of each kind, None for all.

    Raises Django's `DatabaseError` only.
    """
    with snapshot():
        at = _now()
        found = _sandboxes()
        history = tuple(_history(at))
        lapse = _mass_lapse()
    of_kind: dict[Kind, list[Sandbox]] = defaultdict(list)
    for sandbox in found:
        of_kind[sandbox.kind].append(sandbox)
    groups = tuple(_group(kind, of_kind[kind], at, shown) for kind in Kind)
    total = sum((group.cost for group in groups), Cost())
    return Ownership(at, groups, history, lapse, total)


def of(lease_id: UUID) -> Sandbox | None:
    """Return what one lease's sandbox is kept by, None where it is gone."""
    with snapshot():
        with connection.cursor() as cursor:
            cursor.execute(_FACTS + "AND l.id = %s", [lease_id])
            row = cursor.fetchone()
        if row is None:
            return None
        return _sandbox(_Facts(*row), holds.standing([lease_id])[lease_id], trust.read())


def next_due(kind: str) -> datetime | None:
    """Return when an open obligation of this kind is acted on next, if nothing is written until then.

    None: not by itself. In the past: as soon as a worker is free. Of `dispose` and `settle_orphan` it is the moment at
    which the first sandbox is let go, which is what their settles compute, however often a row is looked at before.
    """
    with snapshot():
        settled = {Obligation.Kind.DISPOSE: STOPPED, Obligation.Kind.SETTLE_ORPHAN: frozenset({Kind.ORPHAN})}
        if kind in settled:
            of_kind = settled[Obligation.Kind(kind)]
            rows: Iterable[datetime | None] = (row.due_at for row in _sandboxes() if row.kind in of_kind)
        elif kind in Obligation.INNER and trust.is_observing():
            rows = []
        else:
            with connection.cursor() as cursor:
                cursor.execute(_NEXT_OF_KIND, [kind])
                rows = [cursor.fetchone()[0]]
        return min((at for at in rows if at is not None), default=None)


# Behind an open circuit only the account's probe is claimed, and nothing says when one succeeds.
_NEXT_OF_KIND = """
SELECT min(greatest(o.due_at, a.blocked_until))
  FROM leases_obligation o LEFT JOIN leases_provideraccount a ON a.id = o.account_id
 WHERE o.closed_at IS NULL AND o.kind = %s AND o.attempt_id IS NULL AND o.due_at IS NOT NULL
   AND (o.kind = 'probe_account' OR a.circuit IS DISTINCT FROM 'open')
"""

_FACTS = f"""
SELECT l.id, l.state, l.resource_id, l.provider, coalesce(e.name, ''), l.scope <> '', l.orphaned_at IS NOT NULL,
       l.hourly_price, l.ends_at,
       CASE WHEN l.state IN ('released', 'retained') THEN coalesce(
           (SELECT max(p.confirmed_at) FROM leases_receipt p WHERE p.lease_id = l.id AND p.epoch = l.epoch),
           l.released_at) ELSE l.acquired_at END,
       r.status, r.controller_id, CASE WHEN r.controller_expires_at IS NOT NULL THEN {controllers.ENDS} END,
       CASE WHEN r.controller_expires_at IS NOT NULL THEN greatest(
           {controllers.ENDS} + {controllers.LINGER!r} * r.controller_seconds * interval '1 s',
           i.calm_until, CASE WHEN w.attempt_id IS NULL THEN w.due_at END) END,
       coalesce(w.quiet, ''),
       CASE l.state WHEN 'pending_cleanup' THEN l.released_at END,
       CASE l.state WHEN 'active' THEN (
           SELECT f.due_at FROM leases_obligation f
            WHERE f.lease_id = l.id AND f.kind = 'end_fence' AND f.closed_at IS NULL) END,
       o.id, o.due_at, o.attempt_id IS NOT NULL, o.quiet, o.drain_until, o.held_verb,
       a.blocked_until, coalesce(a.circuit = 'open', false),
       o.kind = 'settle_orphan' AND (
           EXISTS (SELECT 1 FROM leases_operation p WHERE p.run_uuid = l.run_id AND p.state = 'pending')
           OR EXISTS (SELECT 1 FROM leases_obligation s
                       WHERE s.run_id = l.run_id AND s.kind = 'startup' AND s.closed_at IS NULL)),
       o.kind = 'settle_orphan' AND EXISTS (
           SELECT 1 FROM leases_operation p
            WHERE p.run_uuid = l.run_id AND p.cancelled_at IS NOT NULL
              AND (r.cancel_acknowledged_at IS NULL OR p.cancelled_at > r.cancel_acknowledged_at)),
       l.may_be_running_since
  FROM leases_lease l
  LEFT JOIN leases_installation i ON true
  LEFT JOIN leases_environment e ON e.id = l.environment_id
  LEFT JOIN leases_run r ON r.id = l.run_id
  LEFT JOIN leases_obligation o ON o.lease_id = l.id AND o.closed_at IS NULL
        AND o.kind = CASE l.state WHEN 'active' THEN 'settle_orphan' WHEN 'pending_cleanup' THEN 'teardown'
                                  ELSE 'dispose' END
  LEFT JOIN leases_provideraccount a ON a.id = o.account_id
  LEFT JOIN leases_obligation w ON w.installation_id = i.id AND w.kind = 'watch_controllers' AND w.closed_at IS NULL
 WHERE l.state IN ('active', 'released', 'retained', 'pending_cleanup')
"""  # noqa: S608 - constants


@dataclass(frozen=True, slots=True)
class _Facts:
    """One row of `_FACTS`."""

    lease: UUID
    state: str
    resource_id: str
    provider: str
    environment: str
    reusable: bool
    orphaned: bool
    hourly_price: Decimal | None
    ends_at: datetime | None
    since: datetime
    run_status: str | None
    controller_id: str | None
    controller_until: datetime | None
    settled_at: datetime | None
    """When its run is interrupted if its controller does not renew: never before the watch looks."""
    watch_quiet: str
    """Why the watch over controllers is quiet, "" where it looks at its time."""
    released_at: datetime | None
    """Of one that owes its teardown."""
    fence_due: datetime | None
    """When what ends its fence is due; the fence itself stands until that did so."""
    obligation: int | None
    due_at: datetime | None
    in_flight: bool
    quiet: str | None
    drain_until: datetime | None
    held_verb: str | None
    blocked_until: datetime | None
    """Until when the account of what is owed asked to be left alone."""
    circuit_open: bool
    startup_open: bool | None
    """As `startup.is_open` says it of the run of an orphan."""
    unacknowledged: bool | None
    """As `startup.is_unacknowledged` says it."""
    may_run_since: datetime | None

    @property
    def is_orphan(self) -> bool:
        """Whether nobody uses an active lease whose settle is owed; as that settle looks at it."""
        if self.obligation is None:
            return False
        return self.run_status not in Run.LIVE if self.run_status is not None else self.ends_at is None


def _sandboxes() -> list[Sandbox]:
    with connection.cursor() as cursor:
        cursor.execute(_FACTS)
        rows = [_Facts(*row) for row in cursor.fetchall()]
    standings = {standing.lease_id: standing for standing in holds.kept()}
    standings |= holds.standing(row.lease for row in rows if row.state in {_ACTIVE, _PENDING})
    trusted = trust.read()
    return [_sandbox(row, standings[row.lease], trusted) for row in rows]


def _sandbox(row: _Facts, standing: Standing, trusted: trust.Trust) -> Sandbox:
    kind = _kind_of(row, standing)
    so_far = None if row.hourly_price is None else spent(row.hourly_price, row.since, standing.at)
    reasons = tuple(_reasons(row, standing, kind))
    person = _person(row, standing, kind, trusted)
    if not person and trusted.is_observing and _is_left_alone(row, kind, trusted):
        person = Obligation.Quiet.OBSERVING.value
    return Sandbox(
        lease=row.lease,
        resource_id=row.resource_id,
        provider=row.provider,
        environment=row.environment,
        kind=kind,
        obligation=row.obligation,
        reasons=reasons,
        person=person,
        due_at=None if person else _due(row, standing, kind, reasons, trusted),
        since=row.since,
        hourly_price=row.hourly_price,
        so_far=so_far,
        may_run_since=row.may_run_since,
    )


def spent(hourly_price: Decimal, since: datetime, now: datetime) -> Decimal:
    """Return what a price an hour comes to over a time."""
    return hourly_price * Decimal((now - since) / timedelta(seconds=1)) / _HOUR


def _kind_of(row: _Facts, standing: Standing) -> Kind:
    if row.state == _PENDING:
        return Kind.TEARDOWN
    if row.state == _ACTIVE:
        if any(reason.name == "shutdown_fence" for reason in standing.reasons):
            return Kind.FENCED
        return Kind.ORPHAN if row.is_orphan else Kind.IN_USE
    if row.orphaned:
        return Kind.RETAINED_ORPHAN
    return Kind.REUSABLE if row.reusable and row.state == Lease.State.RELEASED else Kind.RETAINED


def _reasons(row: _Facts, standing: Standing, kind: Kind) -> Iterator[Reason]:
    """What keeps it as it is: its holder while it is in use, what its teardown waits for, and every hold."""
    if kind == Kind.IN_USE:
        yield _holder(row)
    if kind == Kind.TEARDOWN:
        if row.drain_until is not None and row.drain_until > standing.at:
            yield Reason("drain", _ALWAYS, "work in flight is waited for", row.drain_until, explicit=False)
        if row.held_verb:
            yield Reason("held_back", _ALWAYS, "it is held, so it is only stopped", FOREVER, explicit=False)
        if row.circuit_open:
            told = "its account does not work: it is tried when a probe of the account succeeds"
            yield Reason("circuit_open", _ALWAYS, told, FOREVER, explicit=False)
        if row.blocked_until is not None and row.blocked_until > standing.at:
            told = "the provider asked its account to wait"
            yield Reason("account_blocked", _ALWAYS, told, row.blocked_until, explicit=False)
        return
    if (
        kind in STOPPED
        and not standing.orphaned
        and standing.kept_until is not None
        and standing.kept_until > standing.at
    ):
        yield Reason("kept_until", _ALWAYS, _TIME[kind], standing.kept_until, explicit=False)
    yield from standing.reasons


_ALWAYS = "always"
_TIME = {Kind.REUSABLE: "it waits for the next run", Kind.RETAINED: "the time for which it is kept is not over"}


def _holder(row: _Facts) -> Reason:
    """Who uses an active lease, and until when that is known."""
    if row.run_status is None and row.ends_at is not None:
        return Reason("ad_hoc", _ALWAYS, "its ad-hoc use ends by itself", row.ends_at, explicit=False)
    if row.run_status in Run.LIVE and row.controller_until is not None:
        until = row.controller_until
        return Reason("controller", _ALWAYS, "the controller of its run holds it", until, explicit=False)
    if row.run_status in Run.LIVE:
        return Reason("run", _ALWAYS, "its run is not over, and no controller holds it", FOREVER, explicit=False)
    return Reason("unsettled", _ALWAYS, "nobody uses it, and nothing owes to settle that", FOREVER, explicit=False)


def _person(row: _Facts, standing: Standing, kind: Kind, trusted: trust.Trust) -> str:
    """Why a person is needed: as the row says, or as its settle will say that is due.

    Of what is in use only once its use should have ended: until then nobody has to decide anything about it.
    """
    if kind == Kind.IN_USE:
        return _asked_of_its_use(row, trusted) if _holder(row).until <= standing.at else ""
    if row.quiet and row.quiet in Obligation.FOR_PEOPLE:
        return row.quiet
    if kind in STOPPED and standing.releasable_at is None:
        return DECIDES
    if kind == Kind.ORPHAN and row.unacknowledged and not row.startup_open:
        return UNACKNOWLEDGED
    return ""


def _asked_of_its_use(row: _Facts, trusted: trust.Trust) -> str:
    """Why the end of its use would be asked about instead of settled, "": it is settled."""
    if row.run_status in Run.LIVE and row.watch_quiet in Obligation.FOR_PEOPLE:
        return row.watch_quiet
    ends = Obligation.Kind.WATCH_CONTROLLERS if row.run_status in Run.LIVE else Obligation.Kind.END_LEASE
    left_alone = trust.forbids(trusted, ends, lease=Lease(acquired_at=row.since))
    return Obligation.Quiet.OBSERVING.value if left_alone else ""


def _is_left_alone(row: _Facts, kind: Kind, trusted: trust.Trust) -> bool:
    """Whether nothing is done about it while this database observes; as the engine asks before it begins."""
    if kind in SETTLED or kind == Kind.FENCED:
        return True
    return kind == Kind.TEARDOWN and trust.forbids(
        trusted, Obligation.Kind.TEARDOWN, lease=Lease(released_at=row.released_at)
    )


def _due(
    row: _Facts, standing: Standing, kind: Kind, reasons: tuple[Reason, ...], trusted: trust.Trust
) -> datetime | None:
    """When it is acted on next; see `Sandbox.due_at`."""
    if kind == Kind.IN_USE:
        if _asked_of_its_use(row, trusted):
            return None
        # Its holder's: what else needs the sandbox has its use end all the same. A controller's hold may be renewed
        # for a while after its end.
        holder = reasons[0]
        return row.settled_at if holder.name == "controller" else _if_ever(holder.until)
    if kind == Kind.FENCED:
        fenced = max(reason.until for reason in reasons if reason.name == "shutdown_fence")
        return _if_ever(row.fence_due or fenced)
    if row.obligation is None:
        return None
    # A row in flight is decided about now. One that is due before its time is looked at then, and waits on; one that is
    # due after it cools down.
    looked_at = standing.at if row.in_flight and kind in SETTLED else row.due_at
    if looked_at is None or row.circuit_open:
        return None
    if row.blocked_until is not None:
        looked_at = max(looked_at, row.blocked_until)
    ends = _let_go_at(standing, kind, reasons)
    return looked_at if ends is None else _if_ever(max(ends, looked_at))


def _let_go_at(standing: Standing, kind: Kind, reasons: tuple[Reason, ...]) -> datetime | None:
    """When nothing is in the way any more of what its settle wants, None: nothing is."""
    if kind in STOPPED:
        return standing.releasable_at
    if kind == Kind.ORPHAN:
        return max((reason.until for reason in reasons if reason.name in _KEEP_IN_USE), default=None)
    return None


_KEEP_IN_USE = frozenset({"startup", "other_lease", Hold.Kind.SHUTDOWN_FENCE.value})
"""What an orphan's settle waits for. It stops and keeps the sandbox, which no other hold forbids."""


def _if_ever(at: datetime | None) -> datetime | None:
    return None if at == FOREVER else at


def _group(kind: Kind, sandboxes: list[Sandbox], at: datetime, shown: int | None) -> Group:
    sandboxes.sort(key=lambda row: (row.due_at or FOREVER, row.lease))
    undecided = sum(1 for row in sandboxes if row.person)
    releasable = sum(1 for row in sandboxes if not row.person and row.is_releasable(at))
    return Group(
        kind=kind,
        label=str(kind.label),
        count=len(sandboxes),
        releasable=releasable,
        held=len(sandboxes) - undecided - releasable,
        undecided=undecided,
        next_due=next((row.due_at for row in sandboxes if row.due_at is not None), None),
        cost=_cost(
            ((row.hourly_price, row.so_far) for row in sandboxes), at_most=any(row.is_stopped for row in sandboxes)
        ),
        may_run=sum(1 for row in sandboxes if row.may_run_since is not None),
        because=tuple(_because(sandboxes)),
        sandboxes=tuple(sandboxes if shown is None else sandboxes[:shown]),
    )


def _because(sandboxes: list[Sandbox]) -> Iterator[Because]:
    """The things that keep them, the one that keeps most first."""
    counts: Counter[str] = Counter()
    seen: dict[str, Reason] = {}
    first: dict[str, datetime] = {}
    last: dict[str, datetime] = {}
    for sandbox in sandboxes:
        for reason in sandbox.reasons:
            name = reason.name
            counts[name] += 1
            seen.setdefault(name, reason)
            first[name] = min(reason.until, first.get(name, reason.until))
            last[name] = max(reason.until, last.get(name, reason.until))
    for name, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        reason = seen[name]
        yield Because(
            name, reason.strength, reason.sentence, count, _if_ever(first[name]), _if_ever(last[name])
        )  # fmt: skip


def _cost(prices: Iterable[tuple[Decimal | None, Decimal | None]], *, at_most: bool) -> Cost:
    per_hour = so_far = _NOTHING
    unknown = 0
    anything = False
    for price, spent in prices:
        anything = True
        if price is None or spent is None:
            unknown += 1
        else:
            per_hour += price
            so_far += spent
    return Cost(per_hour, so_far, unknown, at_most and anything)


_HISTORY = """
SELECT a.id, a.name, a.provider, count(*), count(*) FILTER (WHERE o.quiet <> '' AND o.quiet <> 'waiting'),
       min(greatest(o.due_at, a.blocked_until)) FILTER (WHERE o.due_at IS NOT NULL AND a.circuit <> 'open'),
       coalesce(sum(l.hourly_price), 0),
       coalesce(sum(l.hourly_price * extract(epoch FROM now() - l.acquired_at) / 3600), 0),
       count(*) FILTER (WHERE l.hourly_price IS NULL)
  FROM leases_obligation o
  JOIN leases_lease l ON l.id = o.lease_id
  JOIN leases_provideraccount a ON a.id = o.account_id
 WHERE o.closed_at IS NULL AND o.kind = 'verify_end'
 GROUP BY a.id ORDER BY a.name, a.id
"""


def _history(at: datetime) -> Iterator[History]:  # noqa: ARG001 - the statement has its own
    with connection.cursor() as cursor:
        cursor.execute(_HISTORY)
        for pk, name, provider, count, undecided, due, per_hour, so_far, unknown in cursor.fetchall():
            # Nobody knows whether any of them runs: it may cost nothing.
            yield History(pk, name, provider, count, undecided, due, Cost(per_hour, so_far, unknown, at_most=True))


def _mass_lapse() -> MassLapse | None:
    asked = Obligation.objects.filter(
        kind=Obligation.Kind.WATCH_CONTROLLERS, closed_at__isnull=True, quiet=Obligation.Quiet.MASS_LAPSE
    )
    return MassLapse(len(controllers.lapsed())) if asked.exists() else None


def _now() -> datetime:
    with connection.cursor() as cursor:
        cursor.execute("SELECT now()")
        row = cursor.fetchone()
    now: datetime = row[0]
    return now
