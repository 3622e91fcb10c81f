"""Inventory: what the provider accounts hold with our marks, put beside our rows, and at most N leaks given an owner.

A listing counts only when it is complete and the account attested the recorded identity before and after it; any other
changes nothing. A finding is confirmed by a second complete listing that began `GRACE` after the first. It reads rows
and providers, and nothing else: what a broker holds or has lost says nothing about a sandbox (K-36).
"""

from __future__ import annotations

import logging
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db import connection, transaction
from django.db.models.functions import Now

from leases import bounds, leaks, trust
from leases.clock import database_now
from leases.errors import DecisionRefused
from leases.leaks import Judgement, Standing
from leases.models import Installation, InventoryFinding, InventoryListing, Lease, ProviderAccount
from leases.models.inventory import GRACE
from providers.contract import ErrorKind, ProviderError, Resource, redact, usable

Verdict = InventoryFinding.Verdict
Resolution = InventoryFinding.Resolution
Outcome = InventoryListing.Outcome

log = logging.getLogger(__name__)

MOST_DESTROYED = 20
"""How many leaks one run may at most give an owner that destroys them, whatever it was asked for."""

_REFUSALS = 20
"""Leaks that a run may try in vain beyond that."""


@dataclass(frozen=True, slots=True)
class Identity:
    """One account at a provider, as it attests itself, and our rows for it."""

    provider: str
    name: str
    accounts: tuple[ProviderAccount, ...]


@dataclass(slots=True)
class Report:
    """What came of one identity. `findings` are those that are open now; of a failed listing, as they were before."""

    identity: Identity
    account: ProviderAccount
    began_at: datetime
    outcome: InventoryListing.Outcome
    problem: str = ""
    counts: Counter[str] = field(default_factory=Counter)
    findings: list[InventoryFinding] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    """Ids of sandboxes of other installations."""

    @property
    def is_complete(self) -> bool:
        return self.outcome == Outcome.COMPLETE

    @property
    def leaks(self) -> list[InventoryFinding]:
        """What is confirmed and has no owner that destroys it."""
        return [
            finding
            for finding in self.findings
            if finding.verdict != Verdict.MISSING and finding.confirmed_at and finding.obligation_id is None
        ]

    @property
    def missing_in_use(self) -> list[InventoryFinding]:
        """What an active lease should have and two listings did not hold. It proves nothing; somebody should look."""
        return [
            finding
            for finding in self.findings
            if finding.verdict == Verdict.MISSING
            and finding.confirmed_at
            and finding.lease is not None
            and finding.lease.state == Lease.State.ACTIVE
        ]


@dataclass(slots=True)
class Destroyed:
    """What became of the leaks that a run was to destroy."""

    owned: list[tuple[InventoryFinding, Lease]] = field(default_factory=list)
    refused: list[tuple[InventoryFinding, DecisionRefused]] = field(default_factory=list)


def identities(account_ids: Iterable[UUID] | None = None) -> list[Identity]:
    """Return the accounts to list, those that attest the same identity as one. None: all that ever attested one.

    An account that was never used has attested nothing, and holds nothing of ours. One of a closed company is not asked
    unless it is named: its credential went with it, and nothing of it was left.
    """
    rows = ProviderAccount.objects.select_related("credential", "company").exclude(attested_identity="")
    rows = rows.order_by("created_at")
    groups: dict[tuple[str, str], list[ProviderAccount]] = {}
    for account in rows:
        groups.setdefault((account.provider, account.attested_identity), []).append(account)
    wanted = None if account_ids is None else set(account_ids)
    return [
        Identity(provider, name, tuple(accounts))
        for (provider, name), accounts in groups.items()
        if (_open(accounts) if wanted is None else wanted & {account.pk for account in accounts})
    ]


def _open(accounts: Iterable[ProviderAccount]) -> list[ProviderAccount]:
    return [account for account in accounts if account.company.closed_at is None]


def take(identity: Identity, *, dry_run: bool = False) -> Report:
    """List one account and put what it holds beside our rows. With `dry_run` nothing is written.

    Its rows for it are asked in turn until one lists it. Asks the provider outside any transaction, twice who it is
    and once for the list (`bounds.IDENTIFY`, `bounds.LIST`).
    """
    report = None
    for account in _open(identity.accounts) or identity.accounts:
        began_at = database_now()
        try:
            resources = _listed(account, identity)
        except (ProviderError, DecisionRefused) as error:
            report = Report(identity, account, began_at, Outcome.FAILED, problem=redact(error))
            continue
        except Exception as error:  # an adapter's fault must not keep the other accounts from being looked at
            log.exception("the adapter of %s raised outside its contract", identity.provider)
            problem = f"the adapter raised outside its contract: {type(error).__name__}"
            report = Report(identity, account, began_at, Outcome.FAILED, problem=problem)
            continue
        return _compared(identity, account, began_at, resources, dry_run=dry_run)
    if report is None:
        raise ValueError("an identity without accounts")
    report.findings = list(_open_findings(identity))
    if not dry_run:
        _write_listing(report)
    return report


def destroy_leaks(
    reports: Sequence[Report],
    most: int,
    *,
    actor: str,
    reason: str,
    into: Destroyed | None = None,
    stopping: Callable[[], bool] = lambda: False,
    on_done: Callable[[], Any] = lambda: None,
) -> Destroyed:
    """Give at most `most` leaks an owner for their teardown: those that a complete listing of this run confirmed.

    Never more than `MOST_DESTROYED`. Each is looked at again right before (`leaks.destroy`); one that is refused then
    is left as it is. The oldest come first. What is done is noted in `into` as it happens, and returned.
    """
    most = min(most, MOST_DESTROYED)
    done = into if into is not None else Destroyed()
    candidates = [
        finding
        for report in reports
        if report.is_complete
        for finding in report.leaks
        if finding.verdict in InventoryFinding.AUTOMATIC
    ]
    for finding in sorted(candidates, key=lambda finding: (finding.first_seen_at, finding.pk)):
        if len(done.owned) >= most or len(done.refused) >= _REFUSALS or stopping():
            break
        try:
            lease = leaks.destroy(finding.pk, actor=actor, reason=reason)
        except DecisionRefused as refused:
            done.refused.append((finding, refused))
        else:
            finding.refresh_from_db()
            done.owned.append((finding, lease))
        on_done()
    return done


def _listed(account: ProviderAccount, identity: Identity) -> dict[str, Resource]:
    """Return all sandboxes of the account by id. Raises `ProviderError` and `DecisionRefused`: then nothing counts.

    Listed without a filter: a sandbox that lost its marks is there all the same, and others' are told apart here.
    """
    if account.blocked_until is not None and account.blocked_until > database_now():
        raise ProviderError(ErrorKind.RATE_LIMITED, "the provider asked to wait")
    provider = leaks.opened(account)
    _require_identity(provider.identify(within=bounds.IDENTIFY), identity)
    listing = provider.list({}, within=bounds.LIST)
    if not listing.complete:
        raise ProviderError(ErrorKind.PROTOCOL, "the list is not complete")
    _require_identity(provider.identify(within=bounds.IDENTIFY), identity)
    return {resource.resource_id: usable(resource) for resource in listing.resources}


def _require_identity(answer: str, identity: Identity) -> None:
    if answer != identity.name:
        raise ProviderError(ErrorKind.IDENTITY, "another account answers than the one recorded")


def _compared(
    identity: Identity, account: ProviderAccount, began_at: datetime, resources: dict[str, Resource], *, dry_run: bool
) -> Report:
    """Judge what was listed by rows that are read after it, and write what came of it in one transaction.

    One at a time for each identity (an advisory lock), and in the order in which the listings began: one that is
    overtaken changes nothing, so that no older view undoes a newer one.
    """
    report = Report(identity, account, began_at, Outcome.COMPLETE)
    with transaction.atomic():
        _one_at_a_time(identity)
        if _is_overtaken(identity, began_at):
            report.outcome = Outcome.OVERTAKEN
            report.findings = list(_open_findings(identity))
        else:
            judgements = _judged(resources, identity)
            gone = _missing(resources, identity, began_at)
            _count(report, judgements, len(gone))
            report.foreign = sorted(rid for rid, one in judgements.items() if one.verdict == Standing.FOREIGN)
            seen = [*_seen(resources, judgements, identity, account), *_lost(gone)]
            report.findings = _advance(seen, judgements, identity, began_at, dry_run=dry_run)
        if not dry_run:
            _write_listing(report)
    return report


def _one_at_a_time(identity: Identity) -> None:
    keys = [
        zlib.crc32(b"leases.inventory") - 2**31,
        zlib.crc32(f"{identity.provider} {identity.name}".encode()) - 2**31,
    ]
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s, %s)", keys)


def _is_overtaken(identity: Identity, began_at: datetime) -> bool:
    return InventoryListing.objects.filter(
        provider=identity.provider, account_identity=identity.name, outcome=Outcome.COMPLETE, began_at__gte=began_at
    ).exists()


def _judged(resources: dict[str, Resource], identity: Identity) -> dict[str, Judgement]:
    installation, now = str(Installation.current().mark), database_now()
    rows = leaks.rows_of(list(resources.values()), provider=identity.provider)
    return {
        resource_id: leaks.judge(resource, rows[resource_id], installation=installation, now=now)
        for resource_id, resource in resources.items()
    }


def _missing(resources: dict[str, Resource], identity: Identity, began_at: datetime) -> list[Lease]:
    """Return the leases that should have a sandbox and have none in a complete listing that began after they did."""
    needed = Lease.objects.filter(
        provider=identity.provider,
        account_identity=identity.name,
        state__in=leaks.NEEDED,
        acquired_at__lt=began_at,
    )
    # Of several leases of one sandbox (two accounts may be one at the provider) one speaks for it.
    lost = {
        resource_id: pk
        for pk, resource_id in needed.order_by("-pk").values_list("pk", "resource_id").iterator()
        if resource_id not in resources
    }
    return list(Lease.objects.filter(pk__in=lost.values()).order_by("pk"))


def _count(report: Report, judgements: dict[str, Judgement], missing: int) -> None:
    report.counts = Counter(str(one.verdict) for one in judgements.values())
    report.counts[Verdict.MISSING.value] = missing


def _seen(
    resources: dict[str, Resource], judgements: dict[str, Judgement], identity: Identity, asked: ProviderAccount
) -> Iterator[InventoryFinding]:
    """Yield an unsaved finding for each sandbox that does not fit."""
    for resource_id, judged in judgements.items():
        if isinstance(judged.verdict, Standing):
            continue
        resource, lease = resources[resource_id], judged.lease
        of_company = leaks.company_of(resource.marks, identity.accounts)
        whose = lease or of_company
        price = lease or judged.operation
        yield InventoryFinding(
            company_id=whose.company_id if whose else None,
            account=lease.account if lease else of_company or asked,
            resource_id=resource_id,
            resource_name=redact(resource.name, limit=200),
            marks=leaks.ours_alone(resource.marks),
            verdict=judged.verdict,
            lease=lease,
            hourly_price=price.hourly_price if price else None,
        )


def _lost(missing: Iterable[Lease]) -> Iterator[InventoryFinding]:
    """Yield an unsaved finding for each sandbox that is missing. Nothing is concluded from it: absence is no proof."""
    for lease in missing:
        yield InventoryFinding(
            company_id=lease.company_id,
            account_id=lease.account_id,
            resource_id=lease.resource_id,
            resource_name=lease.resource_name,
            verdict=Verdict.MISSING,
            lease=lease,
            hourly_price=lease.hourly_price,
        )


def _advance(
    seen: Sequence[InventoryFinding],
    judgements: dict[str, Judgement],
    identity: Identity,
    began_at: datetime,
    *,
    dry_run: bool,
) -> list[InventoryFinding]:
    """Begin, advance and resolve findings by what a complete listing saw; returns those that are open then.

    The same verdict on the same sandbox is one finding; any other begins anew, with a grace of its own. While nothing
    may end by the passing of time (after a failover, in a copy that observes) no finding is confirmed.
    """
    confirms = trust.may_lapse()
    before = {finding.resource_id: finding for finding in _open_findings(identity, lock=not dry_run)}
    now: list[InventoryFinding] = []
    for new in seen:
        old = before.pop(new.resource_id, None)
        if old is not None and _is_the_same(old, new):
            old.sightings += 1
            old.last_seen_at = began_at
            if old.confirmed_at is None and confirms and began_at >= old.first_seen_at + GRACE:
                old.confirmed_at = began_at
            if not dry_run:
                old.save(update_fields=["sightings", "last_seen_at", "confirmed_at"])
            now.append(old)
            continue
        if old is not None and not dry_run:
            _resolve(old, Resolution.CHANGED)
        new.provider, new.account_identity = identity.provider, identity.name
        new.first_seen_at = new.last_seen_at = began_at
        if not dry_run:
            new.save(force_insert=True)
        now.append(new)
    if not dry_run:
        for old in before.values():
            _resolve(old, _why_over(old, judgements.get(old.resource_id)))
    return sorted(now, key=lambda finding: (finding.first_seen_at, finding.resource_id))


def _is_the_same(old: InventoryFinding, new: InventoryFinding) -> bool:
    same_lease = new.lease_id is None or old.lease_id == new.lease_id
    return same_lease and (old.verdict, old.company_id, old.marks) == (new.verdict, new.company_id, new.marks)


def _why_over(finding: InventoryFinding, judged: Judgement | None) -> Resolution:
    if finding.verdict == Verdict.MISSING:
        return Resolution.OVER
    if judged is None:
        return Resolution.NOT_LISTED
    return Resolution.KNOWN if judged.verdict == Standing.ALIVE else Resolution.CHANGED


def _resolve(finding: InventoryFinding, resolution: InventoryFinding.Resolution) -> None:
    InventoryFinding.objects.filter(pk=finding.pk, resolved_at__isnull=True).update(
        resolved_at=Now(), resolution=resolution
    )


def _open_findings(identity: Identity, *, lock: bool = False) -> Iterator[InventoryFinding]:
    rows = InventoryFinding.objects.select_related("lease").filter(
        provider=identity.provider, account_identity=identity.name, resolved_at__isnull=True
    )
    rows = rows.order_by("pk")
    if lock:
        rows = rows.select_for_update(no_key=True, of=("self",))
    return rows.iterator() if not lock else iter(list(rows))


def _write_listing(report: Report) -> InventoryListing:
    names = [*Verdict.values, *(standing.value for standing in Standing)]
    return InventoryListing.objects.create(
        account=report.account,
        provider=report.identity.provider,
        account_identity=report.identity.name,
        outcome=report.outcome,
        problem=report.problem,
        began_at=report.began_at,
        **{name: report.counts[name] for name in names},
    )


# What is told of it


def log_of(reports: Sequence[Report], destroyed: Destroyed) -> None:
    """Say in the log what came of a run that nobody watches."""
    for report in reports:
        if report.outcome == Outcome.FAILED:
            log.warning("inventory: %s not listed: %s", report.account, report.problem)
        elif report.leaks:
            log.warning("inventory: %d confirmed leaks at %s", len(report.leaks), report.account)
        for finding in report.missing_in_use:
            log.warning("inventory: lease %s is in use, and %s has no %s", finding.lease_id, report.account, finding)
    for finding, lease in destroyed.owned:
        log.warning("inventory: lease %s owns the leak %s and owes its teardown", lease.pk, finding.resource_id)
    for finding, refused in destroyed.refused:
        log.warning("inventory: the leak %s is left alone: %s", finding.resource_id, refused)


def as_json(reports: Sequence[Report], destroyed: Destroyed, *, dry_run: bool) -> dict[str, Any]:
    """Return the report of a run as JSON values."""
    return {
        "dry_run": dry_run,
        "accounts": [_account_as_json(report) for report in reports],
        "destroyed": [
            {"finding": finding.pk, "resource_id": finding.resource_id, "lease": str(lease.pk)}
            for finding, lease in destroyed.owned
        ],
        "refused": [
            {"finding": finding.pk, "resource_id": finding.resource_id, "code": refused.code, "told": str(refused)}
            for finding, refused in destroyed.refused
        ],
        "leaks": left(reports),
    }


def left(reports: Sequence[Report]) -> int:
    """Return how many confirmed leaks nobody deals with."""
    return sum(len(report.leaks) for report in reports)


def _account_as_json(report: Report) -> dict[str, Any]:
    return {
        "accounts": [account.name for account in report.identity.accounts],
        "provider": report.identity.provider,
        "identity": report.identity.name,
        "outcome": str(report.outcome),
        "problem": report.problem,
        "began_at": report.began_at.isoformat(),
        "counts": {name: report.counts[name] for name in sorted(report.counts)},
        "findings": [
            {
                "finding": finding.pk,
                "verdict": str(finding.verdict),
                "resource_id": finding.resource_id,
                "name": finding.resource_name,
                "lease": str(finding.lease_id) if finding.lease_id else None,
                "lease_state": finding.lease.state if finding.lease else None,
                "since": finding.first_seen_at.isoformat(),
                "confirmed_at": finding.confirmed_at.isoformat() if finding.confirmed_at else None,
                "hourly_price": str(finding.hourly_price) if finding.hourly_price is not None else None,
                "owned": finding.obligation_id is not None,
            }
            for finding in report.findings
        ],
        "foreign": report.foreign,
    }
