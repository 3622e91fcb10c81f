"""Which secret a call is made with, whether it may be used, and whether it is still the same one.

A lease or an operation names a credential by id and remembers its reference. The row decides: one that is disabled,
archived or deleted ends all calls made with it, for every worker, until a person acts. The value is read from its store
at the moment of a call; it is never stored and never logged. What is kept of it is a keyed digest, to notice a change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol
from uuid import UUID

from django.conf import settings
from django.db import transaction
from django.db.models import Q, QuerySet
from django.utils.crypto import constant_time_compare, salted_hmac

from leases import audit, companies
from leases.models import Credential, Lease, Obligation, Operation
from providers.stores import (
    Answer,
    Failed,
    Inactive,
    InvalidReference,
    NotFound,
    StoreUnavailable,
    Value,
    load,
    parse,
    split,
)

__all__ = [
    "CredentialUnusable",
    "Dependants",
    "InvalidReference",
    "SecretUnavailable",
    "accept",
    "dependants",
    "digest",
    "learned",
    "matches",
    "parse",
]

_WAITS_FOR_ANY_VALUE = (Obligation.Quiet.CREDENTIAL_INACTIVE, Obligation.Quiet.CREDENTIAL_MISSING)

QUIET = (*_WAITS_FOR_ANY_VALUE, Obligation.Quiet.CREDENTIAL_CHANGED)
"""The reasons for a person that a write to a credential may end."""

_SALT = "leases.credentials"


class SecretUnavailable(Exception):
    """The secret cannot be had here and now.

    Unless it is a `CredentialUnusable`, that is this process's own unreadiness and says nothing about other workers.
    """


class CredentialUnusable(SecretUnavailable):
    """No worker may call with this credential until a person acts; `why` is what is asked of that person.

    `still` tells, in the transaction of the caller and under the company's lock, whether what was read still holds.
    """

    def __init__(self, why: Obligation.Quiet, still: Callable[[], bool]) -> None:
        super().__init__(why.label)
        self.why = why
        self.still = still


class Named(Protocol):
    """What leases, operations and accounts have in common: whose the credential is, and which."""

    company_id: UUID
    credential_uuid: UUID | None
    credential_reference: str


@dataclass(frozen=True, slots=True)
class Standing:
    """A credential's row as it was read."""

    id: UUID
    status: str
    reference: str
    digest: str


def standing(named: Named) -> Standing | None:
    """Return the row of the credential that was named, or None where it was deleted.

    One that was made again for the same company with the same reference stands in for a deleted one; of several, one
    that is active.
    """
    columns = ("id", "status", "reference", "digest")
    rows = Credential.objects.filter(company_id=named.company_id)
    if named.credential_uuid is not None and (
        row := rows.filter(pk=named.credential_uuid).values_list(*columns).first()
    ):
        return Standing(*row)
    again = rows.filter(reference=named.credential_reference).order_by("created_at").values_list(*columns)
    found = [Standing(*row) for row in again]
    return next((one for one in found if one.status == Credential.Status.ACTIVE), found[0] if found else None)


@dataclass(frozen=True, slots=True)
class Secret:
    """A secret that may be read: where, and what its reading would have to find."""

    named: Named
    row: Standing | None
    reference: str
    expected_digest: str
    shared: bool

    def value(self, answer: Answer) -> str:
        """Return the value that the store answered.

        Raises `SecretUnavailable` and `CredentialUnusable`: only what a shared store says of a secret, and not that it
        failed, is a matter for a person.
        """
        match answer:
            case Value(value=value) if not self.expected_digest or matches(value, self.expected_digest):
                return value
            case Value() if self.shared:
                raise self._unusable(Obligation.Quiet.CREDENTIAL_CHANGED)
            case Value():
                raise SecretUnavailable(f"{self.reference} has another value here than the creation was asked with")
            case NotFound() if self.shared:
                raise self._unusable(Obligation.Quiet.CREDENTIAL_MISSING)
            case Inactive() if self.shared:
                raise self._unusable(Obligation.Quiet.CREDENTIAL_INACTIVE)
            case Failed(excerpt=excerpt):
                raise SecretUnavailable(f"{self.reference} cannot be read: {excerpt or 'its store failed'}")
            case _:
                raise SecretUnavailable(f"{self.reference} is not to be had in this process")

    def _unusable(self, why: Obligation.Quiet) -> CredentialUnusable:
        return CredentialUnusable(why, _still(self.named, self.row))


def usable(named: Named, *, expected_digest: str = "") -> Secret | None:
    """Return the secret to read for a call, or None where there is none to send.

    Decided from rows alone; nothing is read from the store. With an `expected_digest` (of a creation) only the value
    that it was asked with will do. Raises `CredentialUnusable` where the row forbids the call, and `SecretUnavailable`
    where this process lacks the store.
    """
    row = None
    if named.credential_uuid is not None:
        row = standing(named)
        if why := _forbidden(row, expected_digest):
            raise CredentialUnusable(why, _still(named, row))
    reference = row.reference if row else named.credential_reference
    if not reference:
        return None
    try:
        store, _ = split(reference)
        shared = load(store).shared
    except (StoreUnavailable, InvalidReference) as error:
        raise SecretUnavailable(str(error)) from error
    return Secret(named, row, reference, expected_digest, shared)


def _forbidden(row: Standing | None, expected_digest: str) -> Obligation.Quiet | None:
    if row is None:
        return Obligation.Quiet.CREDENTIAL_MISSING
    if row.status != Credential.Status.ACTIVE:
        return Obligation.Quiet.CREDENTIAL_INACTIVE
    if expected_digest and row.digest and row.digest != expected_digest:
        return Obligation.Quiet.CREDENTIAL_CHANGED
    return None


def _still(named: Named, row: Standing | None) -> Callable[[], bool]:
    def still() -> bool:
        companies.hold(named.company_id)
        return standing(named) == row if named.credential_uuid is not None else True

    return still


# --- Digests ----------------------------------------------------------------------------------------------------------


def digest(value: str) -> str:
    """Return the keyed digest of a secret: 64 characters that tell nothing without this installation's `SECRET_KEY`."""
    return _digest(value, settings.SECRET_KEY)


def matches(value: str, recorded: str) -> bool:
    """Return whether a recorded digest is this value's, under the key of today or one of `SECRET_KEY_FALLBACKS`."""
    keys = [settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS]
    return any(constant_time_compare(_digest(value, key), recorded) for key in keys)


def _digest(value: str, key: str | bytes) -> str:
    return salted_hmac(_SALT, value, secret=key, algorithm="sha256").hexdigest()


def learned(credential_id: UUID, value: str) -> str:
    """Note that the provider accepted this value of a credential, and return the digest that its row has now.

    Writes only what is news: another value than the one last seen to work, or one for which rows wait for a person (the
    write wakes them, in the database). While the value stays the same, so does the digest, whatever becomes of the key.
    Returns "" for a credential that was deleted. In a transaction of its own, since it locks the company.
    """
    row = Credential.objects.filter(pk=credential_id).first()
    if row is None:
        return ""
    same = matches(value, row.digest)
    if same and not _waiting_for(row, _WAITS_FOR_ANY_VALUE).exists():
        return row.digest
    now = row.digest if same else digest(value)
    with transaction.atomic():
        Credential.objects.filter(pk=credential_id).update(digest=now)
        if row.digest and not same:
            audit.record("credential.value_changed", row, company_id=row.company_id)
    return now


def accept(operation: Operation) -> None:
    """Let a creation that is quiet for a changed value be recovered with the one of today; asked for by a person.

    That is the value last seen to work; where none was since the creation, whatever its store answers. The attested
    identity of the account is compared all the same. The caller wakes the recovery. Where the credential was deleted
    this changes nothing.
    """
    row = standing(operation) if operation.credential_uuid is not None else None
    if row is None:
        return
    accepted = "" if row.digest == operation.credential_digest else row.digest
    Operation.objects.filter(pk=operation.pk).update(credential_digest=accepted)
    operation.credential_digest = accepted


def _waiting_for(row: Credential, reasons: Sequence[str]) -> QuerySet[Obligation]:
    """Return what waits for this credential for one of these reasons; the triggers wake the same rows."""
    waiting = Obligation.objects.filter(company_id=row.company_id, quiet__in=reasons)
    return waiting.filter(
        Q(lease__credential_uuid=row.pk)
        | Q(lease__credential_reference=row.reference)
        | Q(operation__credential_uuid=row.pk)
        | Q(operation__credential_reference=row.reference)
        | Q(probed_account__credential=row)
    )


# --- Who depends on one -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Dependants:
    """What could not be ended without this credential, by number."""

    leases: int
    """Leases whose sandbox is not proven gone."""
    operations: int
    """Creations and starts that nobody has answered for."""
    waiting: int
    """Obligations that wait for a person because of it."""


def dependants(row: Credential) -> Dependants:
    """Return what was made with this credential and still needs it."""
    gone = (Lease.State.EXPIRED, Lease.State.FAILED)
    return Dependants(
        leases=Lease.objects.filter(company_id=row.company_id, credential_uuid=row.pk).exclude(state__in=gone).count(),
        operations=Operation.objects.filter(
            company_id=row.company_id, credential_uuid=row.pk, state=Operation.State.PENDING
        ).count(),
        waiting=_waiting_for(row, QUIET).count(),
    )
