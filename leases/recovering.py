"""Recovery of files: the generations, and what each attempt writes about its sandbox. The only writer of `Recovery`.

A generation is begun here and ended here; in between, the attempts of its `recover_workspace` obligation start the
stopped sandbox, save its files, and leave its stop to the teardown that a confirmed restart opens. What an attempt does
is in `cleanup.handlers.recover_workspace`; the archives are `leases.archives`.

All that is written about one generation is guarded by the lock of its lease. While the operation of an attempt is
pending no reader sees proof (`leases.proof`), and a running generation holds the sandbox (`leases.holds`) and keeps it
from its next user, so in that window nothing is admitted, used again or destroyed (domain 9; S-247).
"""

from __future__ import annotations

from datetime import timedelta
from uuid import UUID

from django.db import transaction
from django.db.models import F, Max
from django.db.models.functions import Now

from leases import archives, arguments, audit, bounds, fencing, journal, planning, proof, reuse, transitions, trust
from leases.clock import database_now
from leases.demands import Demand, Verb
from leases.errors import LeaseError, NotFound
from leases.models import (
    Attempt,
    BridgeActivity,
    Lease,
    Obligation,
    Operation,
    Receipt,
    Recovery,
    Run,
)
from leases.waking import wake
from providers.contract import ErrorKind, ProviderError, Resource
from providers.registry import ConfigurationError, ProviderUnavailable, load, validate

Kind = Obligation.Kind
Failure = Recovery.Failure

ATTEMPTS = 6
WINDOW = 30 * 60.0
"""A generation is at most so many attempts, in so many seconds (domain 9.3)."""
PAUSES = (0.0, 30.0, 60.0, 120.0, 240.0, 480.0)
"""Seconds before each attempt, counted from the failure of the one before."""

AUTOMATIC = "a continuation"
"""Who asked for a generation that no person asked for by name."""


class CannotRecover(LeaseError):
    """The sandbox of this lease cannot be reopened now. Nothing was written; the code says why."""

    code = "cannot_recover"


# Generations


def recover_workspace(lease_id: UUID, company_id: UUID, *, actor: str, reason: str, workspace: str = "") -> Recovery:
    """Recover the files of a kept sandbox once more, because a person asks for it (after freeing disk, for example).

    Always a new generation, whatever came of earlier ones (domain 9.4, S-249); the continuations that wait for the
    lease wait for this one. Raises `NotFound`; `CannotRecover` with the code `recovery_running` while one runs,
    `no_archives` where the provider cannot hand files over, `not_kept` where there is no stopped, kept sandbox,
    `not_proven` where its stop has no proof at this moment, and `fenced` while a controller that went down may still
    save it, `observing` while nobody said what this database is; `LeaseError` with the code `invalid` without a reason.

    `workspace` is the directory to save, where the one that the lease recorded when it was acquired is not the right
    one; refused as a configuration would refuse it.
    """
    lease_id = arguments.identity(lease_id, "lease_id")
    company_id = arguments.identity(company_id, "company_id")
    arguments.actor(actor)
    arguments.reason(reason, "recovering the files again")
    with transaction.atomic():
        lease = Lease.objects.select_for_update(no_key=True).filter(pk=lease_id, company_id=company_id).first()
        if lease is None:
            raise NotFound(f"no lease {lease_id} in this company")
        require_recoverable(lease)
        if workspace:
            _require_workspace(lease, workspace)
        return begin(lease, requested_by=actor, reason=reason, workspace=workspace)


def _require_workspace(lease: Lease, workspace: object) -> None:
    """Refuse what a configuration of the lease's provider would refuse. Its own is read as it was recorded."""
    try:
        validate(load(lease.provider).Config, {**lease.config, "workspace": workspace})
    except ConfigurationError as error:
        told = error.errors.get("workspace")
        raise LeaseError(f"workspace: {told or error}", code="invalid") from None
    except ProviderUnavailable as error:
        raise CannotRecover(str(error), code="provider_unavailable") from None


def begin(lease: Lease, *, requested_by: str, reason: str = "", workspace: str = "") -> Recovery:
    """Begin a generation for a locked lease, or return the one that runs; its first attempt is due at once.

    Raises `CannotRecover` as `recover_workspace` does.
    """
    if (one := running(lease)) is not None:
        return one
    _require_reopenable(lease)
    now = database_now()
    ends_at = now + timedelta(seconds=WINDOW)
    last = lease.recoveries.aggregate(last=Max("generation"))["last"] or 0
    recovery = Recovery.objects.create(
        company_id=lease.company_id,
        lease=lease,
        generation=last + 1,
        requested_by=requested_by,
        reason=reason,
        workspace=workspace,
        ends_at=ends_at,
        next_attempt_at=now,
    )
    Obligation.objects.create(
        company_id=lease.company_id,
        kind=Kind.RECOVER_WORKSPACE,
        account_id=lease.account_id,
        lease=lease,
        due_at=Now(),
    )
    Obligation.objects.create(
        company_id=lease.company_id, kind=Kind.END_RECOVERY, lease=lease, due_at=ends_at, owed_since=ends_at
    )
    audit.record(
        "recovery.begun",
        recovery,
        company_id=lease.company_id,
        actor=requested_by,
        reason=reason,
        lease=str(lease.pk),
        generation=recovery.generation,
    )
    return recovery


def require_recoverable(lease: Lease) -> None:
    """Raise `CannotRecover` where `recover_workspace` would refuse this lease as it stands. Reads only."""
    if running(lease) is not None:
        raise CannotRecover("its files are being recovered at this moment", code="recovery_running")
    if trust.is_observing():
        raise CannotRecover(
            "this database may be a restored or copied one: say first which it is (manage.py trust_database)",
            code="observing",
        )
    _require_reopenable(lease)


def _require_reopenable(lease: Lease) -> None:
    if lease.state not in Lease.KEPT:
        raise CannotRecover(
            f"there is no stopped sandbox that is kept: the lease is {lease.get_state_display()}", code="not_kept"
        )
    if not proof.is_proven_ended(lease):
        raise CannotRecover("whether the sandbox is stopped is not proven at this moment", code="not_proven")
    if fencing.of(lease) is not None:
        raise CannotRecover("a controller that went down may still save its files", code="fenced")
    if not _hands_files_over(lease):
        raise CannotRecover("its provider does not hand the files of a sandbox over", code="no_archives")


def _hands_files_over(lease: Lease) -> bool:
    """Return whether its provider does; yes where this process lacks the adapter, since another may have it."""
    try:
        return load(lease.provider).capabilities.archives
    except ProviderUnavailable:
        return True


def running(lease: Lease) -> Recovery | None:
    """Return the generation of a locked lease that runs, if one does."""
    return lease.recoveries.filter(state=Recovery.State.RUNNING).first()


def newest(lease: Lease) -> Recovery | None:
    """Return the newest generation of a lease, if there is one."""
    return lease.recoveries.order_by("-generation").first()


def complete(recovery: Recovery, receipt: Receipt) -> None:
    """Running -> complete: the archive is whole, and `receipt` proves the stop behind it. The lease is locked."""
    recovery.failure, recovery.disposition, recovery.error_kind, recovery.error_excerpt = "", "", "", ""
    _end(recovery, Recovery.State.COMPLETE, Obligation.ClosedAs.PROVEN)
    audit.record(
        "recovery.complete",
        recovery,
        company_id=recovery.company_id,
        lease=str(recovery.lease_id),
        generation=recovery.generation,
        receipt=receipt.pk,
    )


def exhaust(recovery: Recovery, *, actor: str = audit.SYSTEM) -> None:
    """Running -> exhausted: no attempt follows, and whoever needed the files goes on without them. The lease is locked.

    What the sandbox owes is not touched: a restart that was confirmed has its teardown, one that was not answered its
    operation.
    """
    if not recovery.failure:
        recovery.failure = Failure.PROVIDER_UNAVAILABLE
    recovery.disposition = Recovery.Disposition.USE_ALTERNATIVE_STRATEGY
    _end(recovery, Recovery.State.EXHAUSTED, Obligation.ClosedAs.NOTHING_OWED)
    audit.record(
        "recovery.exhausted",
        recovery,
        company_id=recovery.company_id,
        actor=actor,
        lease=str(recovery.lease_id),
        generation=recovery.generation,
        failure=recovery.failure,
        attempts=recovery.attempts,
    )


def stop(lease: Lease, *, actor: str) -> bool:
    """End the generation of a locked lease, if one runs, because somebody stopped the run or the lease.

    What an attempt has started by then is stopped: a confirmed restart by its teardown, which waits for no saving any
    more. One that nobody answered for yet keeps the generation until it is settled, so that the earlier receipt stands
    again even where the provider is not heard of any more (`end_recovery`). One whose files are whole already starts
    nothing any more and only waits for the stop: it is left alone, or that would throw them away.
    """
    recovery = running(lease)
    if recovery is None or recovery.archives.filter(saved_at__isnull=False, removed_at__isnull=True).exists():
        return False
    starts = recovery.operations.select_for_update(no_key=True).filter(state=Operation.State.PENDING)
    pending = list(starts.order_by("pk"))  # before any obligation
    recovery.failure, recovery.error_kind, recovery.error_excerpt = Failure.STOPPED, "", ""
    end_saving(recovery, BridgeActivity.Outcome.FAILED)
    if not pending:
        exhaust(recovery, actor=actor)
        return True
    recovery.disposition, recovery.ends_at = Recovery.Disposition.RETRY, database_now()
    recovery.save(update_fields=["failure", "disposition", "error_kind", "error_excerpt", "ends_at"])
    audit.record("recovery.stopped", recovery, company_id=recovery.company_id, actor=actor, lease=str(lease.pk))
    end = Obligation.objects.get(lease=lease, kind=Kind.END_RECOVERY, closed_at__isnull=True)
    wake(end.pk)
    for operation in pending:
        journal.wake_recovery(operation, explicit=True)
    return True


def disown(lease: Lease, *, actor: str) -> None:
    """End the generation of a locked lease whose sandbox is the original's: this database is a clone of one.

    Its obligations are closed by `transitions.disown`. What was written of an archive is left in the storage: it is the
    original's, which may be writing it at this moment.
    """
    recovery = running(lease)
    if recovery is None:
        return
    Recovery.objects.filter(pk=recovery.pk).update(
        state=Recovery.State.EXHAUSTED,
        failure=Failure.STOPPED,
        disposition=Recovery.Disposition.USE_ALTERNATIVE_STRATEGY,
        finished_at=Now(),
        next_attempt_at=None,
    )
    audit.record("recovery.disowned", recovery, company_id=recovery.company_id, actor=actor, lease=str(lease.pk))


# One attempt. Each function runs in a transaction that has locked the lease, and the operation where there is one.


def is_over(recovery: Recovery) -> bool:
    """Return whether no further attempt may begin: six were made, time is up, or another one would repeat the last.

    That last one may have died before it said so.
    """
    if recovery.failure in Recovery.FINAL:
        return True
    due = recovery.next_attempt_at or database_now()
    return recovery.attempts >= ATTEMPTS or max(due, database_now()) >= recovery.ends_at


def journal_start(lease: Lease, recovery: Recovery) -> Operation:
    """Count an attempt and journal its start, with the recovery of that start: from this commit on nothing is proof.

    Its recovery is due when no call of the attempt can be under way any more. The attempt keeps it off before each
    later call that changes something (`journal.keep_off_recovery`).
    """
    operation = planning.restart(lease, recovery)
    run = Run.objects.filter(pk=lease.run_id).first() if lease.run_id else None
    journal.write(operation, due_in=bounds.START_OVER, run=run, actor=audit.SYSTEM)
    count(recovery)
    return operation


def count(recovery: Recovery) -> None:
    """Count an attempt of a running generation: also one that needed no start, or found nothing to be started."""
    recovery.attempts = min(recovery.attempts + 1, ATTEMPTS)
    recovery.save(update_fields=["attempts"])


def uncount(recovery: Recovery) -> None:
    """Take back an attempt of which no start was sent: who is not ready consumes none. The lease is locked."""
    Recovery.objects.filter(pk=recovery.pk, attempts__gt=0).update(attempts=F("attempts") - 1)


def failed(recovery: Recovery, error: ProviderError, *, failure: Failure | None = None) -> bool:
    """Write why an attempt of a running generation failed, and when the next one is due. Returns whether none follows.

    Disk full, and what the provider says can never run again, is the sandbox's own; another attempt would only repeat
    it. Everything else is the provider's, and may pass (domain 9.3).
    """
    if failure is None:
        own = error.kind in (ErrorKind.DISK_FULL, ErrorKind.CANNOT_START)
        failure = Failure.SOURCE_UNAVAILABLE if own else Failure.PROVIDER_UNAVAILABLE
    if recovery.failure == Failure.STOPPED:
        return True
    recovery.failure, recovery.error_kind, recovery.error_excerpt = failure, error.kind.value, error.excerpt
    recovery.disposition = Recovery.Disposition.RETRY
    pause = PAUSES[min(recovery.attempts, ATTEMPTS - 1)]
    recovery.next_attempt_at = database_now() + timedelta(seconds=pause)
    recovery.save(update_fields=["failure", "disposition", "error_kind", "error_excerpt", "next_attempt_at"])
    return is_over(recovery)


def restarted(lease: Lease, recovery: Recovery, resource: Resource, *, operation: Operation | None, actor: str) -> None:
    """Released or retained -> pending_cleanup: the sandbox was seen running, so its restart is confirmed.

    The epoch rises before anything else is asked: from now on only a fresh stop settles the lease, which is owed from
    this transaction on, and waits for the saving of the files as for other work in the sandbox, until the deadline of
    that work. `operation` is the start that did it, pending; None where the sandbox ran already.
    """
    drain_until = database_now() + timedelta(seconds=bounds.SAVING)
    if operation is not None:
        journal.calls_ended(operation)
        transitions.refuse_operation(operation)
    demand = Demand(Verb.STOP_ONLY, drain_until)
    transitions.reopen(lease, demand, reason="workspace_recovery", actor=actor, started=resource)
    audit.record(
        "recovery.restarted",
        recovery,
        company_id=recovery.company_id,
        lease=str(lease.pk),
        generation=recovery.generation,
        epoch=lease.epoch,
    )
    recovery.restarted_epoch = lease.epoch
    recovery.activity = BridgeActivity.objects.create(
        company_id=lease.company_id, lease=lease, kind=BridgeActivity.Kind.SYNC, deadline=drain_until
    )
    recovery.save(update_fields=["restarted_epoch", "activity"])


def end_saving(recovery: Recovery, outcome: BridgeActivity.Outcome, *, error_kind: str = "") -> None:
    """End the work for which the stop of the restarted sandbox waits. Wakes its teardown (trigger)."""
    if recovery.activity_id is not None:
        BridgeActivity.objects.filter(pk=recovery.activity_id, ended_at__isnull=True).update(
            ended_at=Now(), outcome=outcome, error_kind=error_kind
        )
        # What its stop waited for is over, and says so.
        owed = Obligation.objects.filter(lease_id=recovery.lease_id, kind=Kind.TEARDOWN, closed_at__isnull=True)
        owed.update(drain_until=None)


def is_saving(lease: Lease, recovery: Recovery) -> bool:
    """Return whether the sandbox of a locked lease runs for a saving that has not ended, nor is out of time."""
    activity = recovery.activity
    return (
        lease.state == Lease.State.PENDING_CLEANUP
        and recovery.restarted_epoch == lease.epoch
        and activity is not None
        and activity.ended_at is None
        and activity.deadline > database_now()
    )


def withdraw(lease: Lease, operation: Operation, *, may_run: bool, reason: str) -> None:
    """The start of a locked, pending operation was not confirmed: the earlier receipt is proof again, if there is one.

    Only on these conditions (design 4): no attempt under it confirmed a start, or the epoch would be another and the
    operation not pending; none is within its call bound, which the caller knows; the receipt is still valid for what
    the lease says (S-248), and not of a suspension, since resuming goes on with the old processes. Otherwise the
    sandbox is stopped like a running one. `may_run`: it may have been started all the same, so somebody watches it.
    """
    killed = proof.receipts_but_for(lease, operation).exclude(ended=Receipt.Ended.SUSPENDED)
    if lease.state not in Lease.KEPT or not killed.exists():
        reuse.stop_again(operation, lease, None, reason=reason, actor=audit.SYSTEM)
        return
    transitions.refuse_operation(operation)
    if may_run:
        transitions.may_be_running(lease)
    audit.record(
        "operation.withdrawn", operation, company_id=operation.company_id, lease=str(lease.pk), may_run=may_run
    )


def _end(recovery: Recovery, state: Recovery.State, closed_as: Obligation.ClosedAs) -> None:
    recovery.state, recovery.finished_at, recovery.next_attempt_at = state, Now(), None
    recovery.save(
        update_fields=[
            "state",
            "finished_at",
            "next_attempt_at",
            "failure",
            "disposition",
            "error_kind",
            "error_excerpt",
        ]
    )
    recovery.refresh_from_db(fields=["finished_at"])
    rows = Obligation.objects.select_for_update(no_key=True).filter(
        lease_id=recovery.lease_id, kind__in=[Kind.RECOVER_WORKSPACE, Kind.END_RECOVERY], closed_at__isnull=True
    )
    for row in rows.order_by("pk"):
        # A call of the attempts may be under way; of the end of their time nothing ever is.
        ended = row.kind == Kind.END_RECOVERY
        transitions.end_attempt(row, Attempt.Outcome.NOTHING_OWED if ended else Attempt.Outcome.SUPERSEDED)
        transitions.close(row, closed_as)
    archives.remove_unfinished(recovery)
