"""History: leases that ended without proof, where they come from, and how they are told to people.

Such a lease owes a `verify_end` from the transaction that ends it on (constraint `lease_settles_with_proof`). Looking
for the proof is the business of `cleanup.handlers.verify_end`.
"""

from __future__ import annotations

import json
from typing import Any, Literal
from uuid import UUID

from django.db import transaction
from django.db.models import Count, Min, Q, QuerySet
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from leases import arguments, transitions
from leases.clock import database_now
from leases.demands import Verb, verb_of_policy
from leases.errors import LeaseError, NotFound
from leases.models import Environment, Issue, Lease, Obligation, ProviderAccount, Run
from leases.models.environments import Policy
from leases.retrying import retry_obligations
from providers.contract import ProviderError, Resource, usable

LINE_LIMIT = 1 << 20
"""Characters of one line that is imported."""


class Ended(BaseModel):
    """One lease that ended elsewhere, as a line of an import says it. `id` is kept: importing it again changes nothing.

    `verb` is what was demanded of the sandbox and is owed again should it be found alive; by the policy, unless given.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    id: UUID
    account: UUID
    resource_id: str
    resource_name: str = Field(default="", max_length=63)
    account_identity: str | None = None
    policy: Policy = Policy.EPHEMERAL
    outcome: Literal["succeeded", "failed"] = "failed"
    verb: Verb | None = None
    acquired_at: AwareDatetime
    released_at: AwareDatetime
    environment: UUID | None = None
    issue: UUID | None = None
    run: UUID | None = None
    config: dict[str, Any] = Field(default_factory=dict)


def parse(line: str) -> Ended:
    """Return what a line of JSON says. Raises `LeaseError` that names every field that does not fit."""
    if len(line) > LINE_LIMIT:
        raise LeaseError(f"a line has at most {LINE_LIMIT} characters", code="invalid")
    try:
        record = Ended.model_validate_json(line)
    except (ValidationError, ValueError) as error:
        raise LeaseError(_sentences(error), code="invalid") from error
    texts = [record.resource_id, record.resource_name, json.dumps(record.config, ensure_ascii=False)]
    if not all(arguments.is_storable(text) and "\\u0000" not in text for text in texts):
        raise LeaseError("text cannot have NUL or lone surrogates", code="invalid")
    try:
        usable(Resource(record.resource_id, record.resource_name))
    except ProviderError as error:
        raise LeaseError(f"resource_id: {error.excerpt}", code="invalid") from error
    return record


def import_ended(record: Ended, *, actor: str) -> Lease | None:
    """Insert a lease that ended elsewhere, without a receipt, and the debt of its proof; returns it.

    None where it was imported before. It is called at the account's provider with the account's endpoint and credential
    of today, recorded like those of any lease. Raises `NotFound` for an account, an environment, an issue or a run that
    there is not in its company, and `LeaseError` for what contradicts what is known; nothing is written then.
    """
    arguments.actor(actor)
    with transaction.atomic():
        account = ProviderAccount.objects.select_related("company", "credential").filter(pk=record.account).first()
        if account is None:
            raise NotFound(f"account: there is no {record.account}")
        if _is_there(record):
            return None
        _require_consistent(record, account)
        credential = account.credential
        lease = Lease(
            id=record.id,
            company_id=account.company_id,
            environment_id=_of_company(Environment, record.environment, account),
            issue_id=_of_company(Issue, record.issue, account),
            run_id=_of_company(Run, record.run, account),
            account=account,
            policy=record.policy,
            outcome=record.outcome,
            reason="imported",
            provider=account.provider,
            endpoint=account.endpoint,
            credential_uuid=credential.pk if credential else None,
            credential_reference=credential.reference if credential else "",
            account_identity=account.attested_identity,
            config=record.config,
            resource_id=record.resource_id,
            resource_name=record.resource_name,
            acquired_at=record.acquired_at,
            released_at=record.released_at,
        )
        if owner := owners(lease).first():
            raise LeaseError(f"resource_id: lease {owner.pk} has this sandbox now ({owner.state})", code="owned")
        transitions.own_history(lease, record.verb or verb_of_policy(record.policy, record.outcome), actor=actor)
    return lease


def owners(lease: Lease) -> QuerySet[Lease]:
    """Return the other leases that have this lease's sandbox now, as the provider knows it: in use, owed, or kept."""
    return Lease.objects.filter(
        resource_id=lease.resource_id,
        provider=lease.provider,
        account_identity=lease.account_identity,
        state__in={*Lease.LIVE, *Lease.KEPT},
    ).exclude(pk=lease.pk)


def unverified() -> QuerySet[Obligation]:
    """Return the open debts of a proof, whether they are looked for or wait for a person."""
    return Obligation.objects.filter(kind=Obligation.Kind.VERIFY_END, closed_at__isnull=True)


def asking(account_id: UUID) -> QuerySet[Obligation]:
    """Return those of an account that a person is asked about, because they were looked for in vain."""
    return unverified().filter(account_id=account_id, quiet=Obligation.Quiet.HISTORY_UNVERIFIED)


def by_account() -> list[dict[str, Any]]:
    """Return one row per account that has unverified history, as people are shown it: never one per lease.

    Keys: `account_id`, `account__name`, `company_id`, `unverified` (all), `asking` (of which a person is asked about),
    `oldest` (owed since) and `next_look` (None where nothing looks any more by itself).
    """
    groups = (
        unverified()
        .values("account_id", "account__name", "company_id")
        .annotate(
            unverified=Count("pk"),
            asking=Count("pk", filter=Q(quiet=Obligation.Quiet.HISTORY_UNVERIFIED)),
            oldest=Min("owed_since"),
            next_look=Min("due_at"),
        )
        .order_by("account__name", "account_id")
    )
    return [dict(group) for group in groups]


def look_again(account_id: UUID, *, company_id: UUID, actor: str, reason: str) -> int:
    """Ask for one more look at all of an account's history that a person is asked about; returns at how many.

    Raises `NotFound` for an account that this company does not have, `LeaseError` without a reason.
    """
    if not ProviderAccount.objects.filter(pk=account_id, company_id=company_id).exists():
        raise NotFound(f"no account {account_id} in this company")
    return retry_obligations(asking(account_id).values_list("pk", flat=True), actor=actor, reason=reason)


def _sentences(error: ValueError) -> str:
    if not isinstance(error, ValidationError):
        return "is no line of JSON"
    told = []
    for item in error.errors(include_url=False, include_input=False):
        where = ".".join(str(part) for part in item["loc"])
        match item["type"]:
            case "missing":
                text = "is required"
            case "extra_forbidden":
                text = "is no field of a lease that is imported"
            case _:
                text = item["msg"]
        told.append(f"{where}: {text}" if where else text)
    return "; ".join(told)


def _is_there(record: Ended) -> bool:
    """Return whether this very lease was imported before. Raises `LeaseError` where its id is another one's."""
    there = Lease.objects.filter(pk=record.id).first()
    if there is None:
        return False
    if (there.account_id, there.resource_id, there.acquired_at, there.released_at) != (
        record.account,
        record.resource_id,
        record.acquired_at,
        record.released_at,
    ):
        raise LeaseError(f"id: lease {record.id} is there already, and says otherwise", code="conflict")
    return True


def _require_consistent(record: Ended, account: ProviderAccount) -> None:
    if account.company.closed_at is not None:
        raise LeaseError("account: its company is closed", code="company_closed")
    if not account.attested_identity:
        raise LeaseError(
            "account: no provider ever said who it is, so nothing could be proven with it; use it once first",
            code="unattested",
        )
    if record.account_identity not in (None, account.attested_identity):
        raise LeaseError("account_identity: is not what the account's provider says it is", code="identity")
    if record.released_at < record.acquired_at:
        raise LeaseError("released_at: is before acquired_at", code="invalid")
    if record.released_at > database_now():
        raise LeaseError("released_at: has not come yet; a lease in use is no history", code="invalid")


def _of_company(model: type[Environment | Issue | Run], pk: UUID | None, account: ProviderAccount) -> UUID | None:
    if pk is not None and not model.objects.filter(pk=pk, company_id=account.company_id).exists():
        raise NotFound(f"{model._meta.model_name}: there is no {pk} in the account's company")  # noqa: SLF001 - documented API of Django
    return pk
