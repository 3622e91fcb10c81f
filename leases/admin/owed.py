"""What is owed, as the pages show it: one card per open obligation with what may be decided, and one table for all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db.models import Case, Count, Min, Q, QuerySet, Value, When
from django.db.models.functions import Now
from django.http import HttpRequest

from leases import proof
from leases.admin.answers import choices
from leases.admin.decisions import Choice, appears_until
from leases.admin.retry import may_retry
from leases.admin.situation import CONDITIONS, ESCALATED, TONES, Outlook, Situation, outlook
from leases.clock import database_now
from leases.models import Lease, Obligation, ProviderAccount


@dataclass(frozen=True, slots=True)
class Card:
    """An open obligation, when it is tried next, and what this user may decide about it."""

    obligation: Obligation
    outlook: Outlook
    decisions: tuple[Choice, ...] = ()

    @property
    def tone(self) -> str:
        return TONES[self.outlook.situation]

    @property
    def appears_until(self) -> datetime | None:
        return appears_until(self.obligation.operation)


@dataclass(frozen=True, slots=True)
class Debt:
    """An obligation that an operator ended without proof. `paid` says that its proof or its sandbox came after all."""

    obligation: Obligation
    paid: bool
    decisions: tuple[Choice, ...] = ()


def section(request: HttpRequest, obligations: Sequence[Obligation]) -> dict[str, Any]:
    """Return what `admin/leases/owed_section.html` shows of these obligations, read by `of_subject`.

    *Retry now* is offered for what is tried by itself; what needs a person offers its decisions instead.
    """
    now = database_now()
    owed = [obligation for obligation in obligations if obligation.is_open]
    by_itself = [obligation for obligation in owed if obligation.quiet not in Obligation.FOR_PEOPLE]
    ended = [row for row in obligations if row.closed_as == Obligation.ClosedAs.UNVERIFIED]
    return {
        "now": now,
        "cards": cards(owed, now, request=request),
        "debts": [Debt(row, row.is_paid, choices(request, row)) for row in ended],  # type: ignore[attr-defined]
        "may_retry": bool(by_itself) and may_retry(request),
        "retry_ids": ",".join(str(obligation.pk) for obligation in by_itself),
    }


def cards(obligations: Sequence[Obligation], now: datetime, *, request: HttpRequest | None = None) -> list[Card]:
    """Return the cards of open obligations, read with their accounts. At most two more statements per account.

    What is in flight in the built-in lane is not counted: its rows are done with in milliseconds.
    """
    counts: dict[Any, int] = {}
    probes: dict[Any, datetime | None] = {}
    for account in {obligation.account for obligation in obligations if obligation.account is not None}:
        counts[account.pk] = account.obligations.filter(attempt_id__isnull=False, due_at__gt=Now()).count()
        if account.circuit == ProviderAccount.Circuit.OPEN:
            open_probes = Obligation.objects.filter(probed_account=account, closed_at__isnull=True)
            probes[account.pk] = open_probes.values_list("due_at", flat=True).first()
    return [
        Card(
            obligation,
            outlook(
                obligation,
                obligation.account,
                now,
                in_flight=counts.get(obligation.account_id, 0),
                probe_at=probes.get(obligation.account_id),
            ),
            choices(request, obligation) if request else (),
        )
        for obligation in obligations
    ]


def of_lease(lease: Lease) -> list[Obligation]:
    """Return what a lease owes, its creation and the starts of its sandbox; see `of_subject`."""
    return of_subject(Q(lease=lease) | Q(operation__lease_uuid=lease.pk) | Q(operation__source=lease))


def of_subject(whose: Q) -> list[Obligation]:
    """Return the obligations that are open, or that an operator ended without proof, in one statement."""
    left = Q(closed_at__isnull=True) | Q(closed_as=Obligation.ClosedAs.UNVERIFIED)
    return list(with_debts(Obligation.objects.filter(whose, left)).order_by("pk"))


def with_debts(rows: QuerySet[Obligation]) -> QuerySet[Obligation]:
    """Read obligations with what a card shows of their subjects, and whether the debt of each is paid since."""
    paid = Case(When(proof.paid_since(), then=Value(True)), default=Value(False))
    return rows.select_related("account", "lease", "operation", "run").annotate(is_paid=paid)


@dataclass(frozen=True, slots=True)
class Tally:
    """How much of one kind is owed. `counts` pairs each situation's key with its number."""

    kind: str
    label: str
    open: int
    counts: tuple[tuple[str, int], ...]
    escalated: int
    late_since: datetime | None


def tallies() -> list[Tally]:
    """Return how much is owed per kind. One statement that reads open rows only (partial index `obligation_open`)."""
    names = {situation: f"n_{situation.value}" for situation in Situation}
    numbers = {name: Count("pk", filter=CONDITIONS[situation]) for situation, name in names.items()}
    rows: Iterable[Any] = (
        Obligation.objects.filter(closed_at__isnull=True)
        .values("kind")
        .annotate(
            open=Count("pk"),
            escalated=Count("pk", filter=ESCALATED),
            late_since=Min("due_at", filter=CONDITIONS[Situation.DUE]),
            **numbers,
        )
        .order_by("kind")
    )
    return [
        Tally(
            kind=row["kind"],
            label=Obligation.Kind(row["kind"]).label,
            open=row["open"],
            counts=tuple((situation.value, row[name]) for situation, name in names.items()),
            escalated=row["escalated"],
            late_since=row["late_since"],
        )
        for row in rows
    ]
