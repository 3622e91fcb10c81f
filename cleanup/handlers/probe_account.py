"""The one question to a blocked account: does it answer, and is it still the same? One cheap read, nothing else."""

from __future__ import annotations

from collections.abc import Generator
from types import SimpleNamespace
from typing import Any, cast

from cleanup import accounts
from cleanup.claims import Claim
from cleanup.work import Call, Context, Done, Failed, Outcome, identify
from leases import credentials
from leases.calling import Snapshot
from leases.models import ProviderAccount
from providers.contract import ErrorKind


def probe_account(claim: Claim, context: Context) -> Generator[Call, Any, Outcome]:
    """Ask the account who it is. The recorded identity closes its circuit, which wakes all that waits behind it.

    Asked with the endpoint and the credential that the account has today, because those can be put right. One that may
    not be used is not called with here either: then the probe waits for a person, and stands for all rows behind it.
    """
    account = ProviderAccount.objects.select_related("credential").get(pk=claim.account_id)
    provider = yield from context.open_recorded(_today(account))
    identity = yield identify(provider)
    if account.attested_identity and identity != account.attested_identity:
        return Failed(ErrorKind.IDENTITY, "another account answers than the one recorded")
    held = accounts.works_again(claim)
    if account.attested_identity and account.credential_id and provider.secret:
        credentials.learned(account.credential_id, provider.secret)
    return Done(proven=held)


def _today(account: ProviderAccount) -> Snapshot:
    return cast(
        "Snapshot",
        SimpleNamespace(
            company_id=account.company_id,
            provider=account.provider,
            endpoint=account.endpoint,
            credential_uuid=account.credential_id,
            credential_reference=account.credential.reference if account.credential else "",
        ),
    )
