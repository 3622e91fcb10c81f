"""Where an open obligation stands, and when it is tried next: the same answer for lists, filters, counts and pages.

`CONDITIONS` say it to the database, `situation_of` says it about one row that was read; a test compares the two.
`outlook` is the sentence for a person: a pure function of the row, its account and the database's time.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from django.db.models import Q, TextChoices
from django.db.models.functions import Now

from leases.models import Obligation, ProviderAccount


class Situation(TextChoices):
    """Every open row is in exactly one of these.

    `COOLING` waits: for a cooldown, a drain, a creation's reply, or for what other rows say.
    """

    DUE = "due", "due now"
    IN_FLIGHT = "in_flight", "in flight"
    COOLING = "cooling", "waiting"
    QUIET = "quiet", "needs a person"


OPEN = Q(closed_at__isnull=True)
ESCALATED = OPEN & Q(escalated_at__isnull=False)

CONDITIONS: dict[Situation, Q] = {
    Situation.QUIET: OPEN & Q(quiet__in=Obligation.FOR_PEOPLE),
    Situation.IN_FLIGHT: OPEN & Q(attempt_id__isnull=False, due_at__gt=Now()),
    Situation.COOLING: OPEN & (Q(attempt_id__isnull=True, due_at__gt=Now()) | Q(quiet=Obligation.Quiet.WAITING)),
    Situation.DUE: OPEN & Q(due_at__lte=Now()),
}

TONES = {
    Situation.DUE: "pending",
    Situation.IN_FLIGHT: "good",
    Situation.COOLING: "pending",
    Situation.QUIET: "bad",
}


@dataclass(frozen=True, slots=True)
class Outlook:
    """When an obligation is tried next (None: not by itself), and why then. `held_up` names what is in the way."""

    situation: Situation
    next_at: datetime | None
    why: str
    held_up: str = ""


def situation_of(obligation: Obligation, now: datetime) -> Situation:
    """Return where an open obligation stands at `now`, the database's time."""
    if obligation.due_at is None:
        return Situation.COOLING if obligation.quiet == Obligation.Quiet.WAITING else Situation.QUIET
    if obligation.due_at <= now:
        return Situation.DUE
    return Situation.IN_FLIGHT if obligation.attempt_id else Situation.COOLING


def outlook(
    obligation: Obligation,
    account: ProviderAccount | None,
    now: datetime,
    *,
    in_flight: int = 0,
    probe_at: datetime | None = None,
) -> Outlook:
    """Return when an open obligation is tried next. Without an account nothing is in the way of its turn.

    `in_flight` counts the account's attempts that are protected now; `probe_at` is when its probe is due, if any.
    """
    situation = situation_of(obligation, now)
    due = obligation.due_at
    if due is None:
        if situation == Situation.COOLING:
            return Outlook(situation, None, "It is looked at again when what it waits for ends; nothing is to decide.")
        return Outlook(situation, None, f"A person is needed: {obligation.get_quiet_display().removesuffix('?')}.")
    if situation == Situation.IN_FLIGHT:
        why = f"{obligation.worker} works on it. Should that worker vanish, the row falls due again."
        return Outlook(situation, due, why)
    held_up, until = _in_the_way(obligation, account, now, in_flight, probe_at)
    return Outlook(situation, max(due, until) if until else due, _why(obligation, situation, now), held_up)


def _why(obligation: Obligation, situation: Situation, now: datetime) -> str:
    if situation == Situation.DUE:
        if obligation.attempt_id:
            return f"The attempt of {obligation.worker} lost its protection; any worker may take over."
        if obligation.kind in {Obligation.Kind.DISPOSE, Obligation.Kind.SETTLE_ORPHAN}:
            return "Due: the next free worker looks whether anything still needs the sandbox."
        return "Due: the next free worker takes it."
    return _waiting(obligation, now)


def _waiting(obligation: Obligation, now: datetime) -> str:
    if obligation.drain_until is not None and obligation.drain_until > now:
        return "Work in flight is waited for; stopping begins when it ends, or when the drain is over."
    if obligation.busy_count:
        return f"The sandbox was in a transition at the last {_times(obligation.busy_count, 'look')}."
    if obligation.failures:
        return f"Cooling down after {_times(obligation.failures, 'failure')}."
    if obligation.kind == Obligation.Kind.RECOVER_CREATION:
        return "The creation may still be answered; it is looked for after that."
    if obligation.kind == Obligation.Kind.RECOVER_START:
        return "The start may still be answered; it is looked at after that."
    if obligation.kind == Obligation.Kind.END_LEASE:
        return "The lease is released by itself then."
    if obligation.kind == Obligation.Kind.DISPOSE:
        return "The sandbox is kept until then: its time is not over, or something holds it."
    return "Not due yet."


def _in_the_way(
    obligation: Obligation, account: ProviderAccount | None, now: datetime, in_flight: int, probe_at: datetime | None
) -> tuple[str, datetime | None]:
    if account is None:
        return "", None
    if obligation.kind != Obligation.Kind.PROBE_ACCOUNT:
        if account.circuit == ProviderAccount.Circuit.OPEN:
            return f"The circuit of account {account} is open: nothing is tried until its probe succeeds.", probe_at
        if account.blocked_until is not None and account.blocked_until > now:
            return f"The provider asked account {account} to wait.", account.blocked_until
    if in_flight >= account.concurrency_limit:
        return f"Account {account} is full: {in_flight} of {account.concurrency_limit} attempts in flight.", None
    return "", None


def _times(count: int, noun: str) -> str:
    if count == 1:
        return noun
    return f"{count} {noun}s"
