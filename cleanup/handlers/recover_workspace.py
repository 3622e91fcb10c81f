"""Recovery of files: one attempt to reopen a stopped sandbox and save its workspace. `docs/recovery.md` has the table.

An attempt looks, journals its start, starts, and looks until the sandbox runs. Seen running, its restart is confirmed:
the epoch rises and its stop is owed before anything else is asked, and the files are saved while that stop waits. Where
it does not come to run, it is stopped; when that is not seen either, the start is withdrawn and the earlier receipt
stands again. Between calls everything is in rows: an attempt that dies, or is handed back, is gone on with from there.
Its pending start is settled by `recover_start`, whose end wakes this row.

What an attempt learned about the sandbox is written whoever holds the row by then; what becomes of the generation is
fenced, under the lease's lock.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from django.db import transaction

from cleanup import evidence, sightings
from cleanup.claims import Claim, fenced, finish_attempt
from cleanup.decisions import is_about_the_account
from cleanup.work import (
    Call,
    Context,
    Done,
    Failed,
    Held,
    InTransition,
    NeedsOperator,
    NotSent,
    Outcome,
    Waiting,
    identify,
)
from leases import archives, audit, bounds, journal, proof, recovering, reuse, transitions
from leases.clock import database_now
from leases.demands import Demand, Verb
from leases.models import Archive, Attempt, BridgeActivity, Lease, Obligation, Operation, Receipt, Recovery
from leases.recovering import Failure
from providers.contract import Busy, ErrorKind, Gone, ProviderError, Resource, Running, Sighting, Stopped, Unknown
from providers.registry import AnyProvider, load, validate

log = logging.getLogger(__name__)

_OTHER_ACCOUNT = Failed(ErrorKind.IDENTITY, "another account answers than the one recorded on the lease")
_SENT_WITHIN = bounds.RESUME
"""Seconds within which a start is sent after its journal: `bounds.START_OVER` counts with it."""
_PAUSES = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 5.0)
"""Seconds between two looks at a sandbox that is starting; the last one goes on."""


@dataclass(slots=True)
class _Facts:
    """What the rows say at the beginning of an attempt."""

    lease: Lease
    recovery: Recovery
    saving: bool
    """The sandbox runs by now, and its files are still to be saved: an attempt was handed back in between."""


def recover_workspace(claim: Claim, context: Context) -> Generator[Call, Any, Outcome]:
    """Make one attempt of the generation that runs, or go on with one. Settles by itself what it learns."""
    facts = _next(claim)
    if not isinstance(facts, _Facts):
        return facts
    lease = facts.lease
    provider = yield from context.open_recorded(lease)
    if (yield identify(provider)) != lease.account_identity:
        return _OTHER_ACCOUNT
    if facts.saving:
        return (yield from _save(claim, context, provider, lease))

    # What is gone, or full, is not asked to start; what runs already needs no start.
    sighting = sightings.about(lease, (yield sightings.inspect(provider, lease)))
    if sightings.shows_foreign(sighting, context.installation, sightings.creation_of(lease)):
        return NeedsOperator(Obligation.Quiet.FOREIGN_MARKS)
    match sighting:
        case Gone(stated=stated) if stated or not provider.capabilities.absence_apart:
            if (yield identify(provider)) != lease.account_identity:
                return _OTHER_ACCOUNT
            return _failed(claim, ProviderError(ErrorKind.NOT_FOUND, "it is gone"), Failure.SOURCE_UNAVAILABLE)
        case Gone():
            return _failed(claim, ProviderError(ErrorKind.NOT_FOUND, "it is not to be found"))
        case Unknown(disk_full=True, reason=reason):
            return _failed(claim, ProviderError(ErrorKind.DISK_FULL, reason))
        case Busy(transition=transition):
            return InTransition(transition or "transition")
        case Running(resource=resource):
            if not _confirmed(claim, None, lease, resource):
                return Done(proven=False)
            return (yield from _save(claim, context, provider, lease))

    # Counted from before its journal: a process that is suspended right behind the commit starts nothing late either.
    not_after = context.clock() + _SENT_WITHIN
    operation = _begin(claim, context)
    if not isinstance(operation, Operation):
        return operation
    return (yield from _restart(claim, context, provider, lease, operation, not_after=not_after))


def _next(claim: Claim) -> _Facts | Outcome:
    """Read what is next to be done, and do what needs no call."""
    with transaction.atomic():
        locked = _locked(claim)
        if locked is None:
            return Done(proven=False)
        lease, row, recovery = locked
        claim.wakes = row.wakes  # what those wakes told of is read here, under the lock
        if recovery.operations.filter(state=Operation.State.PENDING).exists():
            return Waiting()  # its own recovery settles it, by the same rules, and that wakes this row
        if recovering.is_saving(lease, recovery):
            return _Facts(lease, recovery, saving=True)
        saved = _saved(recovery)
        if saved is not None:
            receipt = _receipt_of(lease, saved)
            if receipt is None:
                return Waiting()
            if not archives.seal(saved, receipt):
                return Held(database_now())  # its file was removed at this moment: it counts no more
            recovering.complete(recovery, receipt)
            finish_attempt(claim, Attempt.Outcome.PROVEN)
            return Done(proven=True)
        if lease.state != Lease.State.PENDING_CLEANUP and lease.state not in Lease.KEPT:
            recovering.failed(
                recovery, ProviderError(ErrorKind.NOT_FOUND, "it is gone"), failure=Failure.SOURCE_UNAVAILABLE
            )
            return _exhaust(claim, recovery)
        if recovering.is_over(recovery):
            return _exhaust(claim, recovery)
        if lease.state == Lease.State.PENDING_CLEANUP:
            return Waiting()
        if recovery.next_attempt_at is not None and recovery.next_attempt_at > database_now():
            return Held(recovery.next_attempt_at)
        if not proof.is_proven_ended(lease):
            return Waiting()  # somebody else's start of it is pending; its end wakes this row
        if reuse.is_disturbed(lease, but=claim.attempt_id):
            return InTransition("another attempt")
        return _Facts(lease, recovery, saving=False)


def _begin(claim: Claim, context: Context) -> Operation | Outcome:
    """Journal the start and announce it, if the rows still say that it may be: one transaction, before the call."""
    at = context.clock()
    with transaction.atomic():
        locked = _locked(claim)
        if locked is None:
            return Done(proven=False)
        lease, row, recovery = locked
        if (
            lease.state not in Lease.KEPT
            or recovering.is_over(recovery)
            or not proof.is_proven_ended(lease)
            or reuse.is_disturbed(lease, but=claim.attempt_id)
        ):
            return Held(database_now())
        operation = recovering.journal_start(lease, recovery)
        evidence.note(claim, row, "start", epoch=lease.epoch)
    claim.renewed_at = max(claim.renewed_at, at)
    return operation


def _restart(
    claim: Claim, context: Context, provider: AnyProvider, lease: Lease, operation: Operation, *, not_after: float
) -> Generator[Call, Any, Outcome]:
    """Start the sandbox of a journalled operation, and save its files once it was seen running."""
    error: ProviderError | None = None
    maybe = True
    try:
        yield _start(provider, lease, context, not_after)
    except NotSent:
        _never_sent(operation)
        raise
    except ProviderError as raised:
        error, maybe = raised, reuse.may_be_done(raised)
    sighting = None
    if maybe:
        sighting, error = yield from _until_it_runs(provider, lease, context, error)
    if isinstance(sighting, Running):
        if not _confirmed(claim, operation, lease, sighting.resource):
            return Done(proven=False)
        return (yield from _save(claim, context, provider, lease))
    if error is None:
        error = ProviderError(ErrorKind.REFUSED, "the sandbox was started, and did not come to run")
    _note_failure(claim, operation, error, refused=not maybe)

    # It failed: stopped again, or the start withdrawn.
    not_after = context.clock() + bounds.SEND_MARGIN
    if not _announce_stop(claim, context, operation):
        return Done(proven=False)
    try:
        yield _stop(provider, lease, context, not_after)
        sighting = yield from _look(provider, lease)
    except NotSent:
        raise
    except ProviderError:
        sighting = yield from _look(provider, lease)
    return _after_stop(claim, lease, operation, sighting, error, maybe=maybe)


def _start(provider: AnyProvider, lease: Lease, context: Context, not_after: float) -> Call:
    def run() -> None:
        # Beyond this the recovery of the start may have withdrawn it: a process that was suspended starts nothing late.
        if context.clock() > not_after:
            raise ProviderError(ErrorKind.TIMEOUT, "the start was not sent in time")
        provider.start(lease.resource_id, within=bounds.START)

    return Call("start", run, bounds.START, changes=True)


def _stop(provider: AnyProvider, lease: Lease, context: Context, not_after: float) -> Call:
    def run() -> None:
        # Beyond this somebody else may have settled the start, and given the sandbox to a run.
        if context.clock() > not_after:
            raise ProviderError(ErrorKind.TIMEOUT, "the stop was not sent in time")
        provider.stop(lease.resource_id, grace=bounds.STOP_GRACE, within=bounds.STOP)

    return Call("stop", run, bounds.STOP, changes=True)


def _until_it_runs(
    provider: AnyProvider, lease: Lease, context: Context, error: ProviderError | None
) -> Generator[Call, Any, tuple[Sighting | None, ProviderError | None]]:
    """Look until the sandbox runs, or will not. Returns the last look, and why it does not run where that is known."""
    until = context.clock() + bounds.RESUME
    looks = 0
    while True:
        pause = _PAUSES[min(looks, len(_PAUSES) - 1)]
        if pause:
            yield Call("pause", lambda pause=pause: time.sleep(pause), pause + 1.0)  # type: ignore[misc]
        looks += 1
        sighting = yield from _look(provider, lease)
        match sighting:
            case Running():
                return sighting, None
            case Unknown(disk_full=True, reason=reason):
                return sighting, ProviderError(ErrorKind.DISK_FULL, reason)
            case Unknown(reason=reason):
                return sighting, error or ProviderError(ErrorKind.REFUSED, reason or "its state is not known")
            case Gone():
                return sighting, error or ProviderError(ErrorKind.NOT_FOUND, "it is not to be found")
            case Stopped() if error is not None or looks >= len(_PAUSES):
                return sighting, error
            case _ if context.clock() > until:
                return sighting, error or ProviderError(ErrorKind.TIMEOUT, "it did not come to run in time")


def _look(provider: AnyProvider, lease: Lease) -> Generator[Call, Any, Sighting | None]:
    """Look at the sandbox; None where that was not answered."""
    try:
        return sightings.about(lease, (yield sightings.inspect(provider, lease)))
    except ProviderError:
        return None


def _confirmed(claim: Claim, operation: Operation | None, lease: Lease, resource: Resource) -> bool:
    """It was seen running: the epoch rises, and its stop is owed. Returns whether this attempt saves its files now.

    Written whoever holds the row: a sandbox that runs is stopped. Where its start was settled meanwhile, or the lease
    given to somebody, that decides what is owed (`reuse.stop_what_runs`). Under the locks of lease and operation, as
    everything else that settles a start, so it is confirmed once.
    """
    seen_in = lease.epoch
    with transaction.atomic():
        if operation is not None:
            lease, operation = journal.locked_start(operation)
        else:
            lease = Lease.objects.select_for_update(no_key=True).get(pk=lease.pk)
        row = fenced(claim)
        recovery = recovering.running(lease)
        if operation is None:
            # Nobody of ours started it, and what came since may be newer than this look: another epoch, another user.
            if lease.state not in Lease.KEPT or lease.epoch != seen_in or reuse.is_starting(lease):
                return False
            if recovery is None:  # its generation was ended meanwhile, so nobody else looks at what runs
                transitions.reopen(
                    lease, Demand(Verb.STOP_ONLY), reason="workspace_recovery", actor=audit.SYSTEM, started=resource
                )
                return False
            if row is None:
                return False  # a newer attempt looks by itself
            recovering.count(recovery)
            recovering.restarted(lease, recovery, resource, operation=None, actor=audit.SYSTEM)
            return True
        if operation.state != Operation.State.PENDING:
            reuse.stop_what_runs(operation, lease, resource, audit.SYSTEM)
            return False
        if row is None or recovery is None or recovery.failure == Failure.STOPPED:
            journal.calls_ended(operation)
            reuse.stop_again(operation, lease, resource, reason="workspace_recovery", actor=audit.SYSTEM)
            return False
        recovering.restarted(lease, recovery, resource, operation=operation, actor=audit.SYSTEM)
        return True


def _note_failure(claim: Claim, operation: Operation, error: ProviderError, *, refused: bool) -> None:
    """Write why the restart failed before anything else is asked: whoever goes on from here knows it.

    `refused`: the provider said that it does not do it. A start that it accepted may still be done, whatever was seen.
    """
    with transaction.atomic():
        journal.locked_start(operation)  # before any obligation
        locked = _locked(claim)
        if locked is None:
            return
        _, _, recovery = locked
        if refused:
            journal.calls_ended(operation)
        recovering.failed(recovery, error)


def _announce_stop(claim: Claim, context: Context, operation: Operation) -> bool:
    """Announce the stop, and keep the start's own recovery off until it is answered. Returns whether it may be sent."""
    at = context.clock()
    try:
        with transaction.atomic():
            lease, _ = journal.locked_start(operation)
            row = fenced(claim)
            if row is None:
                return False
            journal.keep_off_recovery(operation, bounds.STOP + bounds.INSPECT + bounds.CREATE_MARGIN)
            evidence.note(claim, row, "stop", epoch=lease.epoch)
    except journal.TakenOver:
        return False
    claim.renewed_at = max(claim.renewed_at, at)
    return True


def _after_stop(
    claim: Claim,
    lease: Lease,
    operation: Operation,
    sighting: Sighting | None,
    error: ProviderError,
    *,
    maybe: bool,
) -> Outcome:
    """Settle a start that failed by the last look, and say what becomes of the generation.

    Its own call has ended, and no other attempt of this operation ever made one, so none is within its bound.
    """
    if isinstance(sighting, Running):
        with transaction.atomic():
            lease, operation = journal.locked_start(operation)
            if operation.state != Operation.State.PENDING:
                reuse.stop_what_runs(operation, lease, sighting.resource, audit.SYSTEM)
            else:
                fenced(claim)
                journal.calls_ended(operation)
                reuse.stop_again(operation, lease, sighting.resource, reason="workspace_recovery", actor=audit.SYSTEM)
    with transaction.atomic():
        lease, operation = journal.locked_start(operation)
        row = fenced(claim)
        if operation.state == Operation.State.PENDING:
            _settle_unconfirmed(claim, lease, operation, sighting, maybe=maybe)
        recovery = recovering.running(lease)
        if row is None or recovery is None:
            return Done(proven=False)
        if recovering.is_over(recovery):
            return _exhaust(claim, recovery, error)
        if lease.state not in Lease.KEPT:
            return Waiting()
        return Failed(error.kind, error.excerpt, error.retry_after, until=recovery.next_attempt_at)


def _settle_unconfirmed(
    claim: Claim, lease: Lease, operation: Operation, sighting: Sighting | None, *, maybe: bool
) -> None:
    """Settle a pending start that nobody saw running. Lease and operation are locked.

    Seen stopped, that is a fresh receipt; otherwise the earlier one stands again. `maybe`: the provider may still do
    what it was asked for, so that somebody goes on looking.
    """
    if isinstance(sighting, Stopped):
        evidence.record(claim, lease, Receipt.Evidence.STOPPED, epoch=lease.epoch, ended=sighting.ended)
    recovering.withdraw(
        lease, operation, may_run=maybe or not isinstance(sighting, Stopped | Gone), reason="workspace_recovery"
    )


def _never_sent(operation: Operation) -> None:
    """Its start was not sent: nothing of it is under way, and the earlier receipt stands."""
    with transaction.atomic():
        lease, operation = journal.locked_start(operation)
        if operation.state == Operation.State.PENDING:
            journal.calls_ended(operation)
            recovering.withdraw(lease, operation, may_run=False, reason="workspace_recovery")
            recovery = recovering.running(lease)
            if recovery is not None and recovery.pk == operation.recovery_id:
                recovering.uncount(recovery)


# Saving


def _save(claim: Claim, context: Context, provider: AnyProvider, lease: Lease) -> Generator[Call, Any, Outcome]:
    """Save the files of the restarted sandbox. Whatever comes of it, its stop waits no longer then."""
    config = validate(load(lease.provider).Config, lease.config)
    path = provider.workspace(config)
    seconds = provider.lifetime(config) if provider.capabilities.has_deadline else None
    archive = _begin_archive(claim, context, path, extends=seconds is not None)
    if archive is None:
        return Done(proven=False)
    if seconds is not None:
        yield from _set_deadline(provider, lease, seconds)

    def run() -> archives.Saved | archives.TooLarge | archives.StorageFailed:
        # These two are ours, not the provider's, and so no error of the call.
        try:
            with closing(provider.archive(lease.resource_id, archive.path, within=bounds.SAVE)) as pieces:
                return archives.write(archive, pieces)
        except (archives.TooLarge, archives.StorageFailed) as failed:
            return failed

    try:
        answer = yield Call("archive", run, bounds.SAVE)
    except ProviderError as error:
        own = {ErrorKind.MISSING_PATH: Failure.WORKSPACE_MISSING}.get(error.kind)
        return _save_failed(claim, error, own)
    if isinstance(answer, archives.TooLarge):
        return _save_failed(claim, ProviderError(ErrorKind.REFUSED, str(answer)), Failure.ARCHIVE_TOO_LARGE)
    if isinstance(answer, archives.StorageFailed):
        return _save_failed(claim, ProviderError(ErrorKind.NOT_READY, str(answer)), Failure.STORAGE_UNAVAILABLE)
    with transaction.atomic():
        locked = _locked(claim)
        if locked is None:
            return Done(proven=False)
        lease, row, recovery = locked
        claim.wakes = row.wakes  # nothing that they told of matters before the stop, whose end wakes this row
        if not recovering.is_saving(lease, recovery) or archive.epoch != lease.epoch:
            # Out of time, or stopped: its stop may have come in between, and what was read would not be whole.
            recovering.end_saving(recovery, BridgeActivity.Outcome.FAILED)
            return Waiting() if lease.state == Lease.State.PENDING_CLEANUP else Held(database_now())
        archives.saved(archive, answer)
        recovering.end_saving(recovery, BridgeActivity.Outcome.COMPLETED)
    return Waiting()


def _set_deadline(provider: AnyProvider, lease: Lease, seconds: float) -> Generator[Call, Any, None]:
    """Set the provider's own deadline again, which the last stop turned off: should we die now, the sandbox ends.

    The next stop turns it off again. Where that fails the stop that is owed is all there is.
    """
    try:
        yield Call(
            "extend",
            lambda: provider.extend(lease.resource_id, seconds, within=bounds.EXTEND),
            bounds.EXTEND,
            changes=True,
        )
    except ProviderError as error:
        log.warning("the deadline of lease %s could not be set (%s)", lease.pk, error.kind.value)


def _begin_archive(claim: Claim, context: Context, path: str, *, extends: bool) -> Archive | None:
    """Write whose archive it is before its first byte, and announce the call that changes something, if one follows."""
    at = context.clock()
    with transaction.atomic():
        locked = _locked(claim)
        if locked is None:
            return None
        lease, row, recovery = locked
        if not recovering.is_saving(lease, recovery):
            return None
        archives.remove_unfinished(recovery)  # what attempts before this one left
        where = recovery.workspace or path  # a person's word comes before what the lease recorded
        archive = archives.begin(lease, recovery, attempt_id=claim.attempt_id, path=where)
        if extends:
            evidence.note(claim, row, "extend", epoch=lease.epoch)
    claim.renewed_at = max(claim.renewed_at, at)
    return archive


def _save_failed(claim: Claim, error: ProviderError, failure: Failure | None) -> Outcome:
    """Write why the files were not saved, and let the stop come. The generation ends, or goes on once it is stopped."""
    with transaction.atomic():
        locked = _locked(claim)
        if locked is None:
            return Done(proven=False)
        lease, row, recovery = locked
        claim.wakes = row.wakes
        over = recovering.failed(recovery, error, failure=failure)
        recovering.end_saving(recovery, BridgeActivity.Outcome.FAILED, error_kind=error.kind.value)
        if over:
            return _exhaust(claim, recovery, error)
        if lease.state != Lease.State.PENDING_CLEANUP and recovery.next_attempt_at is not None:
            return Held(recovery.next_attempt_at)  # it is stopped already, and no wake is to come
    return Waiting()


def _saved(recovery: Recovery) -> Archive | None:
    return recovery.archives.filter(saved_at__isnull=False, removed_at__isnull=True).order_by("-epoch").first()


def _receipt_of(lease: Lease, archive: Archive) -> Receipt | None:
    """Return the proof that the sandbox ended after this archive was read."""
    return proof.receipts(lease).filter(epoch__gte=archive.epoch).order_by("pk").first()


# Ending


def _failed(claim: Claim, error: ProviderError, failure: Failure | None = None) -> Outcome:
    """An attempt failed before it asked for a start; it counts as one, so that looks in vain come to an end too."""
    with transaction.atomic():
        locked = _locked(claim)
        if locked is None:
            return Done(proven=False)
        _, _, recovery = locked
        recovering.count(recovery)
        if recovering.failed(recovery, error, failure=failure):
            return _exhaust(claim, recovery, error)
        return Failed(error.kind, error.excerpt, until=recovery.next_attempt_at)


def _exhaust(claim: Claim, recovery: Recovery, error: ProviderError | None = None) -> Outcome:
    kind = error.kind.value if error is not None else recovery.error_kind
    finish_attempt(
        claim,
        Attempt.Outcome.FAILED,
        error_kind=kind,
        excerpt=error.excerpt if error is not None else recovery.error_excerpt,
    )
    recovering.exhaust(recovery)
    if error is not None and is_about_the_account(error.kind):
        return Failed(error.kind, error.excerpt, error.retry_after)
    return Done(proven=True)


def _locked(claim: Claim) -> tuple[Lease, Obligation, Recovery] | None:
    """Lock the lease and the row; None where the row is no longer this attempt's, or no generation runs."""
    lease = Lease.objects.select_for_update(no_key=True).get(pk=claim.lease)
    row = fenced(claim)
    recovery = recovering.running(lease) if row is not None else None
    return (lease, row, recovery) if row is not None and recovery is not None else None
