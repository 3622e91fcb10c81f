"""What is owed, as the pages show it: one card per open obligation, and one table for all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db.models import Count, Min, Q
from django.db.models.functions import Now

from leases.admin.situation import CONDITIONS, ESCALATED, TONES, Outlook, Situation, outlook
from leases.models import Lease, Obligation, ProviderAccount


@dataclass(frozen=True, slots=True)
class Card:
    """An open obligation and when it is tried next."""

    obligation: Obligation
    outlook: Outlook

    @property
    def tone(self) -> str:
        return TONES[self.outlook.situation]


def cards(obligations: Sequence[Obligation], now: datetime) -> list[Card]:
    """Return the cards of open obligations, read with their accounts. At most two more statements per account."""
    counts: dict[Any, int] = {}
    probes: dict[Any, datetime | None] = {}
    for account in {obligation.account for obligation in obligations}:
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
                in_flight=counts[obligation.account_id],
                probe_at=probes.get(obligation.account_id),
            ),
        )
        for obligation in obligations
    ]


def obligations_of(lease: Lease) -> list[Obligation]:
    """Return all obligations of a lease and of its creation that are open, or that an operator ended without proof."""
    whose = Q(lease=lease) | Q(operation__lease_uuid=lease.pk)
    left = Q(closed_at__isnull=True) | Q(closed_as=Obligation.ClosedAs.UNVERIFIED)
    return list(Obligation.objects.filter(whose, left).select_related("account").order_by("pk"))


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
