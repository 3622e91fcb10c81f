"""Archiving and deleting a credential: what still has to be ended with it is shown first, and stands in the way.

A credential that is archived or gone ends all calls made with it, also those that would end a sandbox. Forced, with a
reason, it goes all the same: what depends on it then waits for a person, who is asked by name (`leases.credentials`).
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.db import transaction
from django.db.models import Q

from leases import arguments, audit
from leases.blockers import Blockers, Gathered, Refused
from leases.closing import SETTLED
from leases.connections import despite_deadlocks
from leases.errors import LeaseError, NotFound
from leases.models import Company, Credential, Lease, Obligation, Operation, ProviderAccount


def what_depends_on(credential_id: UUID, *, company_id: UUID, delete: bool = False) -> Blockers:
    """Return what could not be ended without this credential; to `delete` it, also the accounts that name it.

    What names it by id, or, where that id is no credential any more, by its reference, which this one then stands in
    for. Raises `NotFound`.
    """
    row = Credential.objects.filter(pk=credential_id, company_id=company_id).first()
    if row is None:
        raise NotFound(f"no credential {credential_id} in this company")
    return _dependants(row, delete=delete)


def archive_credential(
    credential_id: UUID, *, company_id: UUID, actor: str, reason: str, force: bool = False
) -> Credential:
    """Archive a credential. Raises `NotFound`, `LeaseError` (`invalid`, `already_archived`), and `Refused`.

    Refused while something unsettled depends on it, unless forced; the log then lists what did.
    """
    return _end(credential_id, company_id=company_id, actor=actor, reason=reason, force=force, delete=False)


def delete_credential(
    credential_id: UUID, *, company_id: UUID, actor: str, reason: str, force: bool = False
) -> Credential:
    """Delete a credential and return the row as it was. Raises `NotFound`, `LeaseError` (`invalid`), and `Refused`.

    Refused while something unsettled depends on it, unless forced; and while an account names it, forced or not: that
    is given another one first.
    """
    return _end(credential_id, company_id=company_id, actor=actor, reason=reason, force=force, delete=True)


def _end(credential_id: UUID, *, company_id: UUID, actor: str, reason: str, force: bool, delete: bool) -> Credential:
    credential_id = arguments.identity(credential_id, "credential_id")
    company_id = arguments.identity(company_id, "company_id")
    arguments.actor(actor)
    arguments.reason(reason, "deleting a credential" if delete else "archiving a credential")
    return despite_deadlocks(lambda: _write(credential_id, company_id, actor, reason, force=force, delete=delete))


def _write(credential_id: UUID, company_id: UUID, actor: str, reason: str, *, force: bool, delete: bool) -> Credential:
    """Locks the credential, then the company, which whoever journals a start holds shared.

    So a start with this credential was either journalled before, and is seen here, or sees the archive.
    """
    with transaction.atomic():
        row = Credential.objects.select_for_update(no_key=True).filter(pk=credential_id, company_id=company_id).first()
        if row is None:
            raise NotFound(f"no credential {credential_id} in this company")
        if not delete and row.status == Credential.Status.ARCHIVED:
            raise LeaseError("the credential is archived already", code="already_archived")
        Company.objects.select_for_update(no_key=True).get(pk=company_id)
        blockers = _dependants(row, delete=delete)
        if blockers.unyielding or (blockers and not force):
            what = "deleted" if delete else "archived"
            raise Refused(f"the credential cannot be {what}", blockers)
        details: dict[str, Any] = {"name": row.name, "reference": row.reference, "forced": force and bool(blockers)}
        if blockers:
            details["depending"] = blockers.as_json()
        action = "credential.deleted" if delete else "credential.archived"
        audit.record(action, row, company_id=company_id, actor=actor, reason=reason, **details)
        if delete:
            Credential.objects.filter(pk=row.pk).delete()
        else:
            row.status = Credential.Status.ARCHIVED
            row.save(update_fields=["status"])
    return row


def _dependants(row: Credential, *, delete: bool) -> Blockers:
    found = Gathered()
    found.rows(
        "pending_operation",
        Operation.objects.filter(_names(row), company_id=row.company_id, state__in=Operation.UNOWNED),
        lambda op: f"{op} can be looked for with this credential only",
        yields=True,
    )
    found.rows(
        "unsettled_lease",
        Lease.objects.filter(_names(row), company_id=row.company_id).exclude(state__in=SETTLED),
        lambda lease: f"its sandbox {lease.resource_id} can be ended with this credential only",
        yields=True,
    )
    owed = Obligation.objects.filter(company_id=row.company_id, closed_at__isnull=True)
    of_ended = _names(row, "lease__") & Q(lease__state__in=SETTLED)
    found.rows(
        "open_obligation",
        owed.filter(of_ended | Q(probed_account__credential=row)),
        lambda owed: f"still owed with it: {owed.get_kind_display()}",
        yields=True,
    )
    if delete:
        found.rows(
            "account",
            ProviderAccount.objects.filter(credential=row),
            lambda account: f"account {account.name} is called with it: choose another credential there first",
        )
    return found.all()


def _names(row: Credential, prefix: str = "") -> Q:
    """Whether a lease or an operation means this credential: by its id, or by its reference where the id is gone."""
    there = Credential.objects.filter(company_id=row.company_id).values("pk")
    by_id = Q(**{f"{prefix}credential_uuid": row.pk})
    named = Q(**{f"{prefix}credential_reference": row.reference})
    orphaned = Q(**{f"{prefix}credential_uuid__isnull": True}) | ~Q(**{f"{prefix}credential_uuid__in": there})
    return by_id | named & orphaned
