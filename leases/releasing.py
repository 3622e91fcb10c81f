"""Release and Stop: the end of a lease's use; `active` ends in the transaction that writes the debt of its teardown.

Locks, in order: run (where a run is stopped), lease by id, obligation. Admission of work locks the lease too, so a
release sees all work that was admitted before it, and all later work is refused.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Literal
from uuid import UUID

from django.db import transaction
from django.db.models import Exists, OuterRef, Q, QuerySet
from django.db.models.functions import Now

from leases import arguments, audit, controllers, fencing, journal, recovering, startup, transitions
from leases.clock import database_now
from leases.connections import despite_deadlocks
from leases.controllers import Controller, Lost
from leases.demands import Demand, Verb, verb_of_policy
from leases.errors import ControlRefused, LeaseError, NotFound
from leases.models import Lease, Obligation, Operation, Recovery, Run
from leases.signals import lease_draining
from leases.waking import wake

Disposition = Literal["by_policy", "destroy", "stop_and_retain"]


def release(
    lease_id: UUID,
    *,
    outcome: Literal["succeeded", "failed"] = "succeeded",
    disposition: Disposition = "by_policy",
    company_id: UUID | None = None,
    actor: str = "api",
    controller: Controller | None = None,
) -> Lease:
    """End the use of a lease and owe its teardown; returns the lease, `pending_cleanup`.

    Work in flight is waited for, at most the lease's drain bound. Returns before anything is stopped: only a receipt
    says that it was. Releasing again merges the new demand into the open one, and changes nothing on a settled lease.
    Raises `NotFound`; with a `controller` that lost the run `ControlRefused`, with the code `controller_replaced` or
    `controller_lapsed`. One whose run is over may still release what it leaves. `Fenced`, code `fenced`, while another
    controller's shutdown fence stands: ask again when it is over. The release by its owner, or by whoever holds the run
    by now, ends it, unless the sandbox is stopped and kept.
    """
    lease_id = arguments.identity(lease_id, "lease_id")
    company_id = arguments.identity(company_id, "company_id") if company_id is not None else None
    arguments.actor(actor)
    if outcome not in Lease.Outcome.values:
        raise LeaseError(f"outcome must be one of {', '.join(Lease.Outcome.values)}", code="invalid")
    with transaction.atomic():
        run = controllers.shared(controller) if controller is not None else None
        lease = _locked(lease_id, company_id)
        controllers.of_its_run(controller, lease.run_id if controller else None)
        owns = fencing.let_pass(lease, controller, run=run, keeps=disposition == "stop_and_retain", actor=actor)
        lost = controllers.lost(run, controller) if run is not None and not owns else None
        if lost in (Lost.REPLACED, Lost.LAPSED):
            raise ControlRefused(lost.sentence, code=lost.code)
        verb = _verb(lease, outcome, disposition)
        if lease.state == Lease.State.ACTIVE:
            drain_until = None
            if _has_open_work(lease):
                drain_until = database_now() + timedelta(seconds=lease.drain_seconds)
            demand = Demand(verb, drain_until)
            obligation = transitions.begin_teardown(lease, demand, outcome=outcome, reason="released", actor=actor)
            if drain_until is not None:
                seconds = lease.drain_seconds
                transaction.on_commit(
                    lambda: lease_draining.send_robust(Lease, obligation_id=obligation.pk, drain_seconds=seconds)
                )
        elif lease.state == Lease.State.PENDING_CLEANUP:
            open_drain = Obligation.objects.get(
                lease=lease, kind=Obligation.Kind.TEARDOWN, closed_at__isnull=True
            ).drain_until
            transitions.merge_demand(lease, Demand(verb, open_drain), actor=actor, reason="released_again")
    lease.refresh_from_db()
    return lease


def stop(*, company_id: UUID, run_id: UUID | None = None, lease_id: UUID | None = None, actor: str = "api") -> int:
    """Stop a run's work now, or one lease's: nothing is drained, and starts in progress are cancelled.

    Each lease is torn down as its policy says; what a creation in progress brings forth is destroyed, and a sandbox
    that is being started again is stopped again. `lease_id` may be that of a lease that is still coming to be
    (`Operation.lease_uuid`). Returns how many leases and starts were reached. Raises `NotFound` for a run or lease that
    this company does not have, and `Fenced` while a shutdown fence keeps others off one of the leases; then nothing is
    stopped.
    """
    if (run_id is None) == (lease_id is None):
        raise LeaseError("name either a run or a lease", code="invalid")
    company_id = arguments.identity(company_id, "company_id")
    run_id = arguments.identity(run_id, "run_id") if run_id is not None else None
    lease_id = arguments.identity(lease_id, "lease_id") if lease_id is not None else None
    arguments.actor(actor)

    def stop_now() -> int:
        return _stop(company_id, run_id, lease_id, actor)

    reached = despite_deadlocks(stop_now)
    if not reached and lease_id is not None:
        # It may have come to be between the look at the leases and the one at the starts; it does that once.
        reached = despite_deadlocks(stop_now)
    return reached


def _stop(company_id: UUID, run_id: UUID | None, lease_id: UUID | None, actor: str) -> int:
    reached = 0
    operations = Operation.objects.filter(company_id=company_id)
    with transaction.atomic():
        if run_id is not None:
            if not Run.objects.select_for_update(no_key=True).filter(pk=run_id, company_id=company_id).exists():
                raise NotFound(f"no run {run_id} in this company")
            reached_by = Q(state__in=[Lease.State.ACTIVE, Lease.State.PENDING_CLEANUP])
            reached_by |= Q(Exists(Recovery.objects.filter(lease=OuterRef("pk"), state=Recovery.State.RUNNING)))
            ids = list(Lease.objects.filter(reached_by, run_id=run_id).order_by("id").values_list("id", flat=True))
            operations = operations.filter(run_uuid=run_id)
        else:
            assert lease_id is not None  # noqa: S101 - narrows for the type checker; checked above
            operations = operations.filter(Q(lease_uuid=lease_id) | Q(source_id=lease_id))
            there = Lease.objects.filter(pk=lease_id, company_id=company_id).exists()
            if not there and not operations.exists():
                raise NotFound(f"no lease {lease_id} in this company")
            ids = [lease_id] if there else []
        for pk in ids:
            reached += _stop_lease(_locked(pk, company_id), actor)
        reached += cancel_starts(operations, actor)
    return reached


def _stop_lease(lease: Lease, actor: str) -> int:
    fencing.let_pass(lease, None, run=None, keeps=False, actor=actor)
    recovered = recovering.stop(lease, actor=actor)
    demand = Demand(_verb(lease, Lease.Outcome.FAILED, "by_policy"), None)
    if lease.state == Lease.State.ACTIVE:
        owed = transitions.begin_teardown(lease, demand, outcome=Lease.Outcome.FAILED, reason="stopped", actor=actor)
    elif lease.state == Lease.State.PENDING_CLEANUP:
        owed = transitions.merge_demand(lease, demand, actor=actor, reason="stopped", explicit_stop=True)
    else:
        return int(recovered)
    wake(owed.pk, explicit=True)
    audit.record("lease.stop_requested", lease, company_id=lease.company_id, actor=actor)
    return 1


def cancel_starts(starts: QuerySet[Operation], actor: str) -> int:
    """Cancel startups in progress. Their recovery is woken: it looks now, and owns what it finds at once.

    It waits for no set-up. What the caller is still answered finds the operation cancelled. The start of a recovery of
    files is no startup of its run, and ends with its generation.
    """
    startups = starts.filter(recovery__isnull=True, state=Operation.State.PENDING)
    pending = startups.select_for_update(no_key=True)
    count = 0
    for operation in pending.order_by("id"):
        Operation.objects.filter(pk=operation.pk, cancelled_at__isnull=True).update(cancelled_at=Now())
        startup.owe(operation)
        journal.wake_recovery(operation, explicit=True)
        audit.record("operation.cancelled", operation, company_id=operation.company_id, actor=actor)
        count += 1
    return count


def _locked(lease_id: UUID, company_id: UUID | None) -> Lease:
    leases = Lease.objects.select_for_update(no_key=True).filter(pk=lease_id)
    if company_id is not None:
        leases = leases.filter(company_id=company_id)
    lease = leases.first()
    if lease is None:
        raise NotFound(f"no lease {lease_id} in this company")
    return lease


def _verb(lease: Lease, outcome: str, disposition: Disposition) -> Verb:
    match disposition:
        case "by_policy":
            return verb_of_policy(lease.policy, outcome)
        case "destroy":
            return Verb.DELETE
        case "stop_and_retain":
            return Verb.STOP_ONLY
        case _:
            raise LeaseError(f"unknown disposition: {disposition}", code="invalid")


def _has_open_work(lease: Lease) -> bool:
    return lease.activities.filter(ended_at__isnull=True, deadline__gt=Now()).exists()
