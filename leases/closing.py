"""Closing a company: only when nothing of it is owed, held or unproven; what remains is a tombstone and the history.

A company counts as settled by domain 2.7, said with our columns. Its history need not be examined for that, however
long it is: the database lets no lease be `expired` or `failed` without proof or an operator's debt
(`lease_settles_with_proof`; a stopped predecessor only where a successor has its sandbox), so only what is not settled,
and the debts, are looked for. That is why there is no limit on the number of leases (decision 30).
"""

from __future__ import annotations

from uuid import UUID

from django.db import transaction
from django.db.models import CharField, F, Q, Value
from django.db.models.functions import Cast, Concat, Now

from leases import arguments, audit, continuing, proof, transitions
from leases.blockers import Blockers, Gathered, Refused, require_trust
from leases.connections import despite_deadlocks
from leases.errors import LeaseError, NotFound
from leases.models import (
    Attempt,
    Company,
    Continuation,
    Credential,
    Environment,
    Hold,
    InventoryFinding,
    Issue,
    Lease,
    Obligation,
    Operation,
    ProviderAccount,
    Run,
)

ERASED = "erased"
"""What a name of a closed company reads, where a column needs one."""

SETTLED = (Lease.State.EXPIRED, Lease.State.FAILED)
"""States in which a lease's sandbox is proven gone, a successor's, or a debt."""


def what_stands_in_the_way(company_id: UUID) -> Blockers:
    """Return what keeps a company from being closed.

    Read in the order in which responsibility passes on (a creation becomes a lease, a lease's end a debt), so that what
    moves on meanwhile is seen where it was or where it went.
    """
    found = Gathered()
    of_company = Q(company_id=company_id)
    found.rows("live_run", Run.objects.filter(of_company, status__in=Run.LIVE), lambda run: f"it is {run.status}")
    found.rows(
        "pending_operation",
        Operation.objects.filter(of_company, state=Operation.State.PENDING),
        lambda op: f"what became of {op} is not known yet",
    )
    found.rows(
        "unverified_operation",
        Operation.objects.filter(of_company, state=Operation.State.UNVERIFIED),
        lambda op: f"an operator gave {op} up; whether a sandbox exists is not known",
    )
    found.rows(
        "unsettled_lease",
        Lease.objects.filter(of_company).exclude(state__in=SETTLED),
        lambda lease: f"its sandbox {lease.resource_id} is not proven gone: the lease is {lease.get_state_display()}",
    )
    owed = Obligation.objects.filter(of_company, closed_at__isnull=True)
    found.rows(
        "open_obligation",
        # What stands on a lease or an operation that is listed already says nothing new; a probe asks about nobody.
        owed.exclude(kind=Obligation.Kind.PROBE_ACCOUNT)
        .exclude(_is_dropped())
        .filter(Q(lease__isnull=True) | Q(lease__state__in=SETTLED))
        .filter(Q(operation__isnull=True) | ~Q(operation__state=Operation.State.PENDING)),
        lambda row: f"still owed: {row.get_kind_display()}",
    )
    found.rows(
        "unproven_end",
        proof.unproven().filter(of_company).exclude(operation__state=Operation.State.UNVERIFIED),
        lambda row: f"an operator ended it without proof: {row.get_kind_display()}",
    )
    found.rows(
        "leak",
        InventoryFinding.objects.filter(
            of_company, confirmed_at__isnull=False, resolved_at__isnull=True, obligation__isnull=True
        ).exclude(verdict=InventoryFinding.Verdict.MISSING),
        lambda finding: f"an inventory found its sandbox {finding.resource_id}, which nobody deals with",
    )
    standing = Q(until__isnull=True) | Q(until__gt=Now())
    found.rows("hold", Hold.objects.filter(of_company, standing, ended_at__isnull=True), str)
    return found.all()


def close_company(company_id: UUID, *, actor: str, reason: str) -> Company:
    """Close a company for good and return its tombstone: the id and when it was closed. Its names are erased.

    The names of its issues, environments, credentials and accounts, the environments' configuration and the
    credentials' references go too; credentials and environments are archived, and continuations that wait are
    withdrawn. Leases, journal, receipts and the log
    stay, with the ids and the snapshots (references, never secrets) that they have. Cannot be taken back.

    Raises `NotFound`, `LeaseError` (`invalid`, `already_closed`, `observing`), and `Refused` with what stands in the
    way. Written whole or not at all.
    """
    company_id = arguments.identity(company_id, "company_id")
    arguments.actor(actor)
    arguments.reason(reason, "closing a company")
    require_trust("closing a company")
    return despite_deadlocks(lambda: _close(company_id, actor, reason))


def _close(company_id: UUID, actor: str, reason: str) -> Company:
    with transaction.atomic():
        company = lock(company_id)
        blockers = what_stands_in_the_way(company_id)
        if blockers:
            raise Refused("the company cannot be closed", blockers)
        withdrawn = continuing.withdraw_all(
            Continuation.objects.filter(company_id=company_id),
            actor=actor,
            reason=reason,
            closed_as=Obligation.ClosedAs.NOTHING_OWED,
        )
        erased = {**_erase(company_id), "continuations": withdrawn}
        _end_probes(company_id)
        _end_cancellations(company_id)
        Company.objects.filter(pk=company_id).update(name="", closed_at=Now())
        audit.record("company.closed", company, company_id=company_id, actor=actor, reason=reason, **erased)
    company.refresh_from_db()
    return company


def lock(company_id: UUID) -> Company:
    """Lock an open company with its credentials, in the order of locks. Raises `NotFound` and `LeaseError`.

    Exclusively, and with that nobody journals a start, attaches a sandbox or gives one an owner (`companies.hold` is
    the same lock, shared), so what is read under it stays true where it says that there is nothing. It does not exclude
    foreign keys: the log of others goes on. A credential that is written meanwhile waits behind it, in its trigger.
    """
    list(Credential.objects.select_for_update(no_key=True).filter(company_id=company_id).order_by("pk"))
    company = Company.objects.select_for_update(no_key=True).filter(pk=company_id).first()
    if company is None:
        raise NotFound(f"no company {company_id}")
    if company.closed_at is not None:
        raise LeaseError(f"the company was closed at {company.closed_at:%Y-%m-%d %H:%M} UTC", code="already_closed")
    return company


def _erase(company_id: UUID) -> dict[str, int]:
    """Erase the words that the tenant chose. A name that must be unique becomes the row's own id."""
    own = Concat(Value(f"{ERASED} "), Cast(F("pk"), CharField()))
    return {
        "issues": Issue.objects.filter(company_id=company_id).update(title=ERASED),
        "environments": Environment.objects.filter(company_id=company_id).update(
            name=own, config={}, status=Environment.Status.ARCHIVED
        ),
        "credentials": Credential.objects.filter(company_id=company_id).update(
            name=own,
            reference=Concat(Value(f"{ERASED}:"), Cast(F("pk"), CharField())),
            digest="",
            status=Credential.Status.ARCHIVED,
        ),
        "accounts": ProviderAccount.objects.filter(company_id=company_id).update(name=own),
    }


def _is_dropped() -> Q:
    """Return what closing itself ends: continuations that wait, and cancellations that nothing can confirm.

    A closed company admits no run. A cancellation of which somebody looked and found no end has none with all else
    settled: nothing was ever started.
    """
    kind = Obligation.Kind
    return Q(kind=kind.START_CONTINUATION) | Q(kind=kind.CONFIRM_CANCEL, quiet=Obligation.Quiet.WAITING)


def _end_cancellations(company_id: UUID) -> None:
    rows = Obligation.objects.filter(company_id=company_id, closed_at__isnull=True)
    runs = rows.filter(kind=Obligation.Kind.CONFIRM_CANCEL).values("run_id")
    list(Run.objects.select_for_update(no_key=True).filter(pk__in=runs).order_by("pk"))
    owed = rows.filter(kind=Obligation.Kind.CONFIRM_CANCEL).select_for_update(no_key=True)
    for row in owed.order_by("pk"):
        transitions.end_attempt(row, Attempt.Outcome.NOTHING_OWED)
        transitions.close(row, Obligation.ClosedAs.NOTHING_OWED)
        audit.record("run.cancellation_dropped", row, company_id=company_id, run=str(row.run_id))


def _end_probes(company_id: UUID) -> None:
    """Nothing waits behind a blocked account any more. An attempt that holds its probe has lost the row."""
    probes = Obligation.objects.select_for_update(no_key=True).filter(
        company_id=company_id, kind=Obligation.Kind.PROBE_ACCOUNT, closed_at__isnull=True
    )
    for probe in probes.order_by("pk"):
        if probe.attempt_id is not None:
            Attempt.objects.filter(pk=probe.attempt_id, finished_at__isnull=True).update(
                finished_at=Now(), outcome=Attempt.Outcome.NOTHING_OWED
            )
        transitions.close(probe, Obligation.ClosedAs.NOTHING_OWED)
