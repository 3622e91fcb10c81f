"""The pages on which a person answers what only a person knows: was it an outage, does the owner know, look once more.

They answer for what `leases.admin.decisions` answers for. What an answer does is the business of `leases.controllers`
and `leases.history`.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.db.models import Model
from django.http import HttpRequest

from leases import controllers, history
from leases.admin import decisions, retry
from leases.admin.decisions import Choice, Decision, OfObligation
from leases.errors import LeaseError
from leases.models import Obligation

Quiet = Obligation.Quiet


class _Answer(OfObligation):
    """An answer to one reason why a row asks a person."""

    asked: Quiet

    @classmethod
    def offered(cls, row: Obligation) -> UUID | int | None:
        return row.pk if row.is_open and row.quiet == cls.asked else None

    def find(self, pk: int) -> tuple[Any, Obligation]:
        operation, row = super().find(pk)
        if row.quiet != self.asked:
            raise LeaseError("a person is not asked about that any more", code="resolved")
        return operation, row


class ExtendLapsed(_Answer):
    key = "extend_lapsed"
    asked = Quiet.MASS_LAPSE
    label = "It was an outage…"
    explanation = (
        "The controllers could not renew, or we could not hear them. Every hold stands one full length from now: who "
        "is alive renews in that time, and who is not lapses again."
    )
    permission = "leases.change_run"

    def decide(self, data: dict[str, Any], *, actor: str) -> tuple[str, Model]:
        _, row = self.find(self.pk)
        ended = controllers.extend_lapsed(actor=actor, reason=data["reason"])
        return f"Every hold stands one full length from {ended:%H:%M:%S} UTC on.", row


class SettleLapsed(_Answer):
    key = "settle_lapsed"
    asked = Quiet.MASS_LAPSE
    label = "They are gone…"
    explanation = (
        "Every live run whose controller's hold has lapsed is interrupted, and the sandboxes that they use are stopped "
        "and kept. A run that is renewed before its turn goes on."
    )
    permission = "leases.change_run"
    grave = True

    def decide(self, data: dict[str, Any], *, actor: str) -> tuple[str, Model]:
        _, row = self.find(self.pk)
        done, left = controllers.settle_lapsed(actor=actor, reason=data["reason"])
        more = f" {len(left)} are left: renewed, ended or locked at this moment." if left else ""
        return f"{len(done)} runs were interrupted.{more}", row


class Acknowledge(_Answer):
    key = "acknowledge"
    asked = Quiet.UNACKNOWLEDGED
    label = "Acknowledge the cancellation…"
    explanation = (
        "You say in the control plane's place that it knows what became of the startup that it cancelled. The sandbox "
        "that its run left in use is stopped and kept."
    )
    permission = "leases.change_run"

    def decide(self, data: dict[str, Any], *, actor: str) -> tuple[str, Model]:
        _, row = self.find(self.pk)
        if row.lease is None or row.lease.run_id is None:
            raise LeaseError("no run is asked about", code="resolved")
        controllers.acknowledge_cancellation(
            row.lease.run_id, row.lease.company_id, actor=actor, reason=data["reason"]
        )  # fmt: skip
        return "The cancellation is acknowledged; its sandbox is stopped and kept.", row


class LookAgain(_Answer):
    key = "look_again"
    asked = Quiet.HISTORY_UNVERIFIED
    label = "Look again at all of this account…"
    explanation = (
        "One look is made at the end of each lease of this account that a person is asked about. It only looks, and "
        "changes no sandbox that is stopped or gone."
    )
    permission = retry.PERMISSION

    def decide(self, data: dict[str, Any], *, actor: str) -> tuple[str, Model]:
        _, row = self.find(self.pk)
        if row.account is None or row.company_id is None:
            raise LeaseError("no account is asked about", code="resolved")
        count = history.look_again(row.account.pk, company_id=row.company_id, actor=actor, reason=data["reason"])
        return f"Asked for one look at each of {count}.", row


ANSWERS: tuple[type[Decision], ...] = (ExtendLapsed, SettleLapsed, Acknowledge, LookAgain)


def choices(request: HttpRequest, row: Obligation) -> tuple[Choice, ...]:
    """Return the answers that this user may give about an obligation, before what may always be decided."""
    return (*decisions.choices(request, row, ANSWERS), *decisions.choices(request, row))
