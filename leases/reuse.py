"""Reuse: which stopped sandbox a run gets again, starting it, and giving it to the run.

A start is journalled like a creation, under the lock of the lease whose sandbox it is, before the provider is asked;
from that commit on no receipt of the sandbox is proof, and nobody else starts, attaches or tears it down (constraints
`operation_is_the_only_start_of_its_sandbox` and `start_is_alone_with_its_sandbox`). Only the provider's explicit word
that it cannot be had again leads to a replacement; any other failure keeps the lease and creates nothing (domain 11.3).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.db import transaction
from django.db.models import Max, Q, QuerySet
from django.db.models.functions import Now

from leases import audit, bounds, companies, fencing, holds, journal, proof, startup, transitions, trust
from leases.connections import persistently
from leases.demands import Demand, Verb
from leases.errors import AcquireRejected, ResumeFailed
from leases.models import Attempt, BridgeActivity, Lease, Obligation, Operation, Recovery, Run
from leases.patience import TRANSIENT, Patience
from leases.planning import Request
from providers.contract import Busy, ErrorKind, Gone, ProviderError, Resource, Running, Sighting, Stopped
from providers.registry import AnyProvider

MISMATCH = "lease_fingerprint_mismatch"


_MAY_BE_DONE = frozenset({ErrorKind.CONNECTION, ErrorKind.TIMEOUT, ErrorKind.SERVER, ErrorKind.PROTOCOL})
"""Failures of a start after which the provider may do all the same what it was asked for."""


def may_be_done(error: ProviderError) -> bool:
    """Return whether the provider may have done, or may still do, the start that failed like this."""
    return error.kind in _MAY_BE_DONE


class CannotResume(Exception):
    """The provider's explicit word that this sandbox cannot be had again. `reason` is a code of domain 2.3."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        self.under_way = False
        super().__init__(reason)


@dataclass(slots=True)
class _Calls:
    """How many starts were sent that the provider did not refuse: each is done, or may still be."""

    sent: int = 0

    def start(self, provider: AnyProvider, resource_id: str) -> None:
        self.sent += 1
        try:
            provider.start(resource_id, within=bounds.START)
        except ProviderError as error:
            if not may_be_done(error):
                self.sent -= 1
            raise


class Disturbed(Exception):
    """An attempt is, or may be, at work on the sandbox. Nothing was decided; ask again soon."""


def choose(planned: Operation, *, actor: str) -> Lease | None:
    """Return the locked lease whose sandbox `planned` may have again, or None. Runs in the journal's transaction.

    Sandboxes of the same scope that were made from something else are of no use to anyone any more: their destruction
    is owed here, before anything is created in their place (S-009). Raises `Disturbed` where an attempt may still be
    at work on the one that fits.
    """
    if not planned.scope or trust.is_observing():
        return None  # what a restored database believes to be kept may be in use by somebody
    kept = list(
        Lease.objects.select_for_update(no_key=True)
        .filter(company_id=planned.company_id, scope=planned.scope, state=Lease.State.RELEASED)
        .exclude(expires_at__lte=Now())  # the provider does away with it at any moment (S-143)
        .order_by("id")
    )
    fitting = None
    for lease in sorted(kept, key=lambda lease: lease.released_at or lease.acquired_at, reverse=True):
        if is_starting(lease) or fencing.of(lease) is not None or holds.of(lease).is_held_explicitly:
            continue  # who holds it on purpose needs its files as they are
        if _is_recovered(lease, planned):
            continue
        if lease.fingerprint != planned.fingerprint or lease.account_id != planned.account_id:
            transitions.reopen(lease, Demand(Verb.DELETE), reason=MISMATCH, actor=actor)
        elif fitting is None and proof.is_proven_ended(lease):
            fitting = lease
    if fitting is not None and is_disturbed(fitting):
        raise Disturbed
    return fitting


def resume(operation: Operation, provider: AnyProvider, config: Any, request: Request, *, patience: Patience) -> Lease:
    """Start the sandbox of a journalled start and return the active lease that it is now.

    The same run has its lease back; another one gets a successor, and the predecessor is history. Raises
    `CannotResume` (then `replace` it), `ResumeFailed` (it is kept, and nothing was created) and `AcquireRejected` (it
    runs, and its caller may not have it any more; it is being stopped, and kept).
    """
    calls = _Calls()
    try:
        resource = _start(operation, provider, patience, calls)
    except CannotResume as why:
        why.under_way = calls.sent > 0
        raise
    except journal.TakenOver as why:
        persistently(lambda: journal.give_up(operation, "operation.start_dropped", under_way=calls.sent > 0))
        raise AcquireRejected(f"the sandbox may not be used again: {why}; it is being stopped, and kept") from why
    except ProviderError as error:
        kind = error.kind.value
        persistently(lambda: journal.give_up(operation, "operation.start_failed", under_way=calls.sent > 0, kind=kind))
        raise ResumeFailed(
            f"the sandbox to be used again could not be started ({error}); it is kept, and nothing was created",
            code=kind,
        ) from error
    expires_at = _deadline(provider, operation, config)
    under_way = calls.sent > 1  # one of them is what was seen
    return persistently(lambda: _attach(operation, resource, expires_at, under_way, request))


def _start(operation: Operation, provider: AnyProvider, patience: Patience, calls: _Calls) -> Resource:
    """Start the stopped sandbox of a journalled operation and return it running; `calls` counts what may be done.

    Raises `CannotResume` only on the provider's explicit word, `TakenOver` where it is not this caller's to start any
    more, and `ProviderError` otherwise: at once for what will not pass, for the rest when the patience is over.
    """
    last: ProviderError = ProviderError(ErrorKind.TIMEOUT, "the sandbox did not start in time")
    missing = asked = False
    while not patience.is_over:
        try:
            sighting = provider.inspect(operation.resource_id, within=bounds.INSPECT)
            missing = isinstance(sighting, Gone)
            if isinstance(sighting, Gone):
                if sighting.stated or not provider.capabilities.absence_apart:
                    raise _gone(operation, provider)
            else:
                _require_ours(operation, sighting)
                if isinstance(sighting, Running):
                    return sighting.resource
                if not isinstance(sighting, Busy) and _may_start(operation, patience):
                    calls.start(provider, operation.resource_id)
                    if not asked:
                        asked = True
                        continue  # many are there at once
        except ProviderError as error:
            if error.kind == ErrorKind.CANNOT_START:
                raise CannotResume("resume_failed") from error
            if error.kind not in TRANSIENT and error.kind != ErrorKind.NOT_FOUND:
                raise
            last = error
        patience.wait()
    if missing:  # seen missing to the end: as explicit as it gets where absence is never stated
        raise _gone(operation, provider)
    raise last


def _may_start(operation: Operation, patience: Patience) -> bool:
    """Return whether a start may be sent now. Raises `TakenOver` where it is not this caller's to send any more.

    The patience is asked last, right before the call: a process that was suspended must not start anything late.
    """
    trusted = persistently(trust.read)
    if trusted.observing_since is not None:
        raise journal.TakenOver("this database may be a restored or copied one")
    if not trusted.is_judged:
        return False  # its server was started anew; a moment later somebody has judged it
    persistently(lambda: journal.keep_off_recovery(operation, bounds.START + bounds.CREATE_MARGIN))
    return not patience.is_over


def _gone(operation: Operation, provider: AnyProvider) -> CannotResume:
    """Return that it is gone, if the recorded account still is who says so (design 6, *Identity before absence*)."""
    if provider.identify(within=bounds.IDENTIFY) != operation.account_identity:
        raise ProviderError(ErrorKind.IDENTITY, "another account answers than the one recorded")
    return CannotResume("not_found")


def _require_ours(operation: Operation, sighting: Sighting) -> None:
    """Raise `CannotResume` where what answers to the id is not what was created: it must carry the creation's marks."""
    if isinstance(sighting, Stopped | Running) and not operation.marks.items() <= dict(sighting.resource.marks).items():
        raise CannotResume("identity_mismatch")


def replace(operation: Operation, planned: Operation, request: Request, why: CannotResume) -> None:
    """Give a start up for good and journal the creation in its place, in one transaction. Safe to repeat.

    Raises `AcquireRejected` where the caller may not have another sandbox by now; the old one's end is owed all the
    same.
    """
    with transaction.atomic():
        if Operation.objects.filter(pk=planned.pk).exists():
            return
        companies.hold(operation.company_id)
        run = journal.live_run(operation.run_uuid, operation.company_id)
        source, locked = journal.locked_start(operation)
        problem = journal.why_not(locked, run, request.controller)
        if not why.under_way:
            journal.calls_ended(locked)
        if locked.state == Operation.State.PENDING:
            transitions.refuse_operation(locked)
            transitions.reopen(source, _demand_for(why.reason), reason=why.reason, actor=request.actor)
            audit.record("lease.replaced", source, company_id=source.company_id, actor=request.actor, reason=why.reason)
        if problem is None:
            Operation.objects.filter(pk=locked.pk).update(request_key=None)
            journal.write(planned, due_in=bounds.CREATE + bounds.CREATE_MARGIN, run=run, actor=request.actor)
    if problem is not None:
        raise AcquireRejected(f"the sandbox cannot be used again, and there is no other: {problem}", code=problem.code)


def stop_again(operation: Operation, source: Lease, resource: Resource | None, *, reason: str, actor: str) -> None:
    """The started sandbox of a locked operation is nobody's: stop it, and keep its files (S-041).

    `resource` is what was seen of it running, which raises the epoch in the same transaction; None where it was not.
    """
    transitions.refuse_operation(operation)
    transitions.reopen(source, Demand(Verb.STOP_ONLY), reason=reason, actor=actor, started=resource)
    if operation.recovery_id is None:
        startup.owe(operation)


def _attach(
    operation: Operation,
    resource: Resource,
    expires_at: datetime | None,
    under_way: bool,  # noqa: FBT001 - private
    request: Request,
) -> Lease:
    actor = request.actor
    with transaction.atomic():
        companies.hold(operation.company_id)
        run = journal.live_run(operation.run_uuid, operation.company_id)
        source, locked = journal.locked_start(operation)
        if attached := journal.already_attached(locked, resource.resource_id):
            return attached
        if not under_way:
            journal.calls_ended(locked)
        problem = journal.why_not(locked, run, request.controller)
        if problem is None and locked.lease_uuid == source.pk:
            transitions.resume(locked, source, resource, expires_at=expires_at, actor=actor)
            return source
        if problem is None:
            return transitions.succeed(locked, source, resource, expires_at=expires_at, actor=actor)
        given_up = locked.state == Operation.State.UNVERIFIED and source.state == Lease.State.RELEASED
        if locked.state == Operation.State.PENDING or given_up:
            # Also what an operator had given up: it is seen running, so its stop is owed again.
            stop_again(locked, source, resource, reason="acquire_rejected", actor=actor)
        else:
            stop_what_runs(locked, source, resource, actor)
    raise AcquireRejected(
        f"the sandbox may not be used again: {problem}; it is being stopped, and kept",
        code=problem.code,
    )


def stop_what_runs(operation: Operation, source: Lease, resource: Resource, actor: str) -> None:
    """Own the end of a sandbox that was seen running when its start had been settled without its caller. Both locked.

    That its caller is late says nothing about when it was started: so the epoch rises, whatever was proven since
    (design 4). One that another run uses or starts by now is that run's; one that was given to nobody is stopped.
    """
    if operation.state == Operation.State.ATTACHED or operation.lease_id is not None or is_starting(source):
        return
    if source.state in Lease.KEPT:
        reason = "acquire_rejected" if operation.recovery_id is None else "workspace_recovery"
        transitions.reopen(source, Demand(Verb.STOP_ONLY), reason=reason, actor=actor, started=resource)
        if operation.recovery_id is None:
            startup.owe(operation)
    elif source.state == Lease.State.PENDING_CLEANUP:
        transitions.sighted_running(source, resource, actor=actor)


def calls_are_over(operation: Operation) -> bool:
    """Return whether no call of a start can be under way any more: its caller said so, or its bound is long over."""
    return not starts_under_way(operation.account_id, operation.resource_id).filter(pk=operation.pk).exists()


def starts_under_way(account_id: UUID, resource_id: str) -> QuerySet[Operation]:
    """Return the starts of this sandbox of which a call may still be done, whatever became of them since."""
    return Operation.objects.filter(
        kind=Operation.Kind.START,
        account_id=account_id,
        resource_id=resource_id,
        call_ended_at__isnull=True,
        created_at__gt=Now() - timedelta(seconds=bounds.START_OVER),
    )


def starting_until(lease: Lease) -> datetime | None:
    """Return until when a call of a start of this lease's sandbox may still be done, None: none can any more."""
    last: datetime | None = starts_under_way(lease.account_id, lease.resource_id).aggregate(last=Max("created_at"))[
        "last"
    ]
    return last + timedelta(seconds=bounds.START_OVER) if last is not None else None


def _demand_for(reason: str) -> Demand:
    """Return what becomes of a sandbox that cannot be had again.

    One that was not found is stopped should it turn up, not destroyed: where absence cannot be stated it may be a list
    that flaps, and its files somebody's work.
    """
    return Demand(Verb.STOP_OR_DELETE if reason == "not_found" else Verb.DELETE)


def is_starting(lease: Lease) -> bool:
    return Operation.objects.filter(
        kind=Operation.Kind.START,
        state=Operation.State.PENDING,
        account_id=lease.account_id,
        resource_id=lease.resource_id,
    ).exists()


def _is_recovered(lease: Lease, planned: Operation) -> bool:
    """Return whether a recovery has its files, or found that it cannot run: nobody gets it, and nothing is repeated.

    A run that begins in a fresh workspace gets none that another run left.
    """
    last = lease.recoveries.order_by("-generation").first()
    if last is not None and last.state != Recovery.State.COMPLETE:
        return True
    if planned.run_uuid is None or lease.run_id == planned.run_uuid:
        return False
    return Run.objects.filter(pk=planned.run_uuid, fresh_workspace=True).exists()


def is_disturbed(lease: Lease, *, but: UUID | None = None) -> bool:
    """An attempt other than `but` holds an obligation on this sandbox, or lost it less than a call bound ago (design).

    Or work that was admitted into it has no end yet, and could go on writing under the sandbox that is started (S-125).
    """
    of_sandbox = Q(lease__account_id=lease.account_id, lease__resource_id=lease.resource_id)
    calling = ~Q(kind__in=Obligation.INNER)
    held = Obligation.objects.filter(of_sandbox, calling, attempt_id__isnull=False, due_at__gt=Now())
    if but is not None:
        held = held.exclude(attempt_id=but)
    on_lease = Q(obligation__lease__account_id=lease.account_id, obligation__lease__resource_id=lease.resource_id)
    # The recovery of a start stops, too, and may have been closed over by whoever settled that start.
    on_start = Q(
        obligation__operation__source__account_id=lease.account_id,
        obligation__operation__source__resource_id=lease.resource_id,
    )
    lost = Attempt.Outcome.SUPERSEDED
    late = Attempt.objects.filter(
        on_lease & Q(outcome=lost) | on_start & Q(outcome__in=[lost, Attempt.Outcome.HANDED_OVER]),
        announced_at__gt=Now() - timedelta(seconds=bounds.LONGEST_CALL + bounds.SEND_MARGIN),
    )
    working = BridgeActivity.objects.filter(of_sandbox, ended_at__isnull=True, deadline__gt=Now())
    return held.exists() or late.exists() or working.exists()


def _deadline(provider: AnyProvider, operation: Operation, config: Any) -> datetime | None:
    """Set the provider's own deadline again, which the stop turned off, and return it; None where there is none.

    A failure leaves it to the obligation that keeps deadlines ahead: the sandbox runs, and is owned.
    """
    seconds = provider.lifetime(config) if provider.capabilities.has_deadline else None
    if seconds is None:
        return None
    try:
        return provider.extend(operation.resource_id, seconds, within=bounds.START)
    except ProviderError:
        return None
