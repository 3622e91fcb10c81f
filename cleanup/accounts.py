"""What calls teach about an account: its circuit, its rate limit, and the one probe of a blocked one.

Only outcomes about the account move its circuit (`providers.contract.ACCOUNT_KINDS`), and only outcomes: starting
something resets nothing. While the circuit is open nothing behind it is claimed, so its rows burn no attempts; one
`probe_account` obligation asks, with the cooldown of its kind, and its success closes the circuit, which wakes the
account (trigger). The account row is locked before any obligation.
"""

from __future__ import annotations

import math
from datetime import timedelta

from django.db import transaction
from django.db.models import F
from django.db.models.functions import Coalesce, Greatest, Now

from cleanup.backoff import (
    CIRCUIT_OPENS_AT,
    COOLDOWN_FIRST,
    RATE_LIMIT_DEFAULT,
    RATE_LIMIT_LONGEST,
    RATE_LIMIT_SHORTEST,
)
from cleanup.claims import Claim, fenced, finish_attempt
from leases import audit, transitions
from leases.models import Attempt, Lease, Obligation, Operation, ProviderAccount
from providers.contract import ErrorKind, ProviderError

Circuit = ProviderAccount.Circuit


def answered(claim: Claim) -> None:
    """The account answered: failures in a row are over. Writes only where there were some."""
    ProviderAccount.objects.filter(pk=claim.account_id, circuit=Circuit.CLOSED, circuit_failures__gt=0).update(
        circuit_failures=0
    )


def throttled(claim: Claim, error: ProviderError) -> float:
    """The account calls too often (429): nothing is claimed until the provider's `Retry-After`. Returns the seconds."""
    said = error.retry_after
    wait = said if said is not None and math.isfinite(said) and said > 0 else RATE_LIMIT_DEFAULT
    wait = min(max(wait, RATE_LIMIT_SHORTEST), RATE_LIMIT_LONGEST)
    until = Now() + timedelta(seconds=wait)
    ProviderAccount.objects.filter(pk=claim.account_id).update(
        blocked_until=Greatest(Coalesce(F("blocked_until"), until), until)
    )
    return wait


def failed(claim: Claim, kind: ErrorKind) -> None:
    """The account failed once more; the fifth time in a row opens its circuit and owes a probe.

    A row that recorded another endpoint than the account has today says nothing about today's account.
    """
    with transaction.atomic():
        account = ProviderAccount.objects.select_for_update(no_key=True).get(pk=claim.account_id)
        if _recorded_endpoint(claim, account) != account.endpoint:
            return
        account.circuit_failures += 1
        opens = account.circuit == Circuit.CLOSED and account.circuit_failures >= CIRCUIT_OPENS_AT
        if opens:
            account.circuit = Circuit.OPEN
        account.save(update_fields=["circuit_failures", "circuit"])
        if opens:
            Obligation.objects.get_or_create(
                kind=Obligation.Kind.PROBE_ACCOUNT,
                probed_account=account,
                closed_at=None,
                defaults={
                    "company_id": account.company_id,
                    "account": account,
                    "due_at": Now() + timedelta(seconds=COOLDOWN_FIRST),
                },
            )
            audit.record("account.blocked", account, company_id=account.company_id, kind=kind.value)


def _recorded_endpoint(claim: Claim, account: ProviderAccount) -> object:
    if claim.lease_id is not None:
        return Lease.objects.values_list("endpoint", flat=True).get(pk=claim.lease_id)
    if claim.operation_id is not None:
        return Operation.objects.values_list("endpoint", flat=True).get(pk=claim.operation_id)
    return account.endpoint


def works_again(claim: Claim) -> bool:
    """The probe succeeded: close circuit (which wakes the account) and probe. Returns whether the fence held."""
    with transaction.atomic():
        account = ProviderAccount.objects.select_for_update(no_key=True).get(pk=claim.account_id)
        row = fenced(claim)
        if row is None:
            finish_attempt(claim, Attempt.Outcome.SUPERSEDED)
            return False
        account.circuit = Circuit.CLOSED
        account.circuit_failures = 0
        account.save(update_fields=["circuit", "circuit_failures"])
        transitions.close(row, Obligation.ClosedAs.PROVEN)
        finish_attempt(claim, Attempt.Outcome.PROVEN)
        audit.record("account.unblocked", account, company_id=account.company_id)
    return True
