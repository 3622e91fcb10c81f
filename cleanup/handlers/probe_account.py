"""The one question to a blocked account: does it answer, and is it still the same? One cheap read, nothing else."""

from __future__ import annotations

from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

from cleanup import accounts
from cleanup.claims import Claim
from cleanup.work import Call, Context, Done, Failed, Outcome, identify
from leases.models import ProviderAccount
from providers.contract import ErrorKind


def probe_account(claim: Claim, context: Context) -> Generator[Call, Any, Outcome]:
    """Ask the account who it is. The recorded identity closes its circuit, which wakes all that waits behind it."""
    account = ProviderAccount.objects.select_related("credential").get(pk=claim.account_id)
    provider = context.open_recorded(
        SimpleNamespace(
            provider=account.provider,
            endpoint=account.endpoint,
            credential_reference=account.credential.reference if account.credential else "",
        )
    )
    identity = yield identify(provider)
    if account.attested_identity and identity != account.attested_identity:
        return Failed(ErrorKind.IDENTITY, "another account answers than the one recorded")
    return Done(proven=accounts.works_again(claim))
