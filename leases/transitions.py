"""The state machine of a lease, and the only writers of `Lease.state`.

Each transition is one function. It runs in a transaction in which the caller has locked the lease row (or inserts it),
writes the row, its obligation and its audit entry together, and leaves the rest to the database: a lease is
`pending_cleanup` exactly while its teardown is open, and settles only with a receipt (triggers, checked at commit).
`TABLE` is compared with `docs/states.md` and with this module by a test.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from uuid import UUID

from django.db import transaction
from django.db.models import QuerySet
from django.db.models.functions import Now

from leases import audit, bounds, deadlines, startup
from leases.clock import database_now
from leases.demands import Demand, merge
from leases.models import Attempt, Environment, Issue, Lease, Obligation, Operation, Receipt, Run
from leases.models.environments import Policy
from leases.waking import wake
from providers.contract import Resource

State = Lease.State
Evidence = Receipt.Evidence

TABLE: tuple[tuple[str, str, str], ...] = (
    ("none", "active", "attach"),
    ("none", "pending_cleanup", "own_for_teardown"),
    ("none", "active", "succeed"),
    ("released", "expired", "succeed"),
    ("released", "active", "resume"),
    ("released", "pending_cleanup", "reopen"),
    ("retained", "pending_cleanup", "reopen"),
    ("active", "pending_cleanup", "begin_teardown"),
    ("pending_cleanup", "released", "settle"),
    ("pending_cleanup", "retained", "settle"),
    ("pending_cleanup", "expired", "settle"),
    ("pending_cleanup", "failed", "settle"),
    ("pending_cleanup", "failed", "settle_unverified"),
    ("none", "expired", "own_history"),
    ("none", "failed", "own_history"),
    ("expired", "pending_cleanup", "reopen_history"),
    ("failed", "pending_cleanup", "reopen_history"),
    ("released", "pending_cleanup", "dispose"),
    ("retained", "pending_cleanup", "dispose"),
    ("active", "failed", "disown"),
    ("pending_cleanup", "failed", "disown"),
    ("released", "failed", "disown"),
    ("retained", "failed", "disown"),
    ("expired", "pending_cleanup", "owe_again"),
    ("failed", "pending_cleanup", "owe_again"),
)
"""Every transition there is: from, to, the function that makes it."""


def attach(
    operation: Operation,
    *,
    resource_id: str,
    expires_at: datetime | None,
    actor: str,
    as_of: datetime | None = None,
) -> Lease:
    """None -> active: the sandbox of a locked, pending operation becomes a lease; its recovery is not owed any more.

    `as_of` is the provider's own time of the start that it confirmed.
    """
    lease = _lease_of(operation, resource_id, State.ACTIVE)
    lease.expires_at, lease.started_as_of = expires_at, as_of
    lease.save(force_insert=True)
    _hand_over(operation, lease)
    deadlines.open_for(lease)
    audit.record("lease.acquired", lease, company_id=lease.company_id, actor=actor, resource=resource_id)
    return lease


def resume(operation: Operation, lease: Lease, resource: Resource, *, expires_at: datetime | None, actor: str) -> None:
    """Released -> active: the start of a locked operation was confirmed, and the same run has its lease back.

    The confirmed start raises the epoch: no earlier receipt proves anything about what runs now.
    """
    _require(lease, State.RELEASED)
    deadlines.close_for(lease)
    lease.state, lease.outcome, lease.reason, lease.released_at = State.ACTIVE, "", "", None
    lease.orphaned_at = lease.kept_until = None
    lease.expires_at = expires_at
    _start(lease, resource)
    lease.save(
        update_fields=[
            "state",
            "outcome",
            "reason",
            "released_at",
            "orphaned_at",
            "kept_until",
            "expires_at",
            "epoch",
            "started_as_of",
            "may_be_running_since",
        ]
    )
    _hand_over(operation, lease)
    deadlines.open_for(lease)
    audit.record("lease.resumed", lease, company_id=lease.company_id, actor=actor, epoch=lease.epoch)


def succeed(
    operation: Operation, predecessor: Lease, resource: Resource, *, expires_at: datetime | None, actor: str
) -> Lease:
    """None -> active and released -> expired: a successor takes the sandbox over, in one transaction.

    The predecessor ended in its own epoch, with its receipt; the sandbox lives on in the successor's, which is higher.
    """
    _require(predecessor, State.RELEASED)
    lease = _lease_of(operation, predecessor.resource_id, State.ACTIVE)
    lease.resource_name = predecessor.resource_name
    lease.epoch, lease.started_as_of, lease.expires_at = predecessor.epoch, predecessor.started_as_of, expires_at
    _start(lease, resource)
    lease.save(force_insert=True)
    deadlines.close_for(predecessor)
    predecessor.state, predecessor.successor = State.EXPIRED, lease
    predecessor.expires_at = predecessor.kept_until = None
    runs_no_more(predecessor)
    predecessor.save(update_fields=["state", "successor", "expires_at", "kept_until", "may_be_running_since"])
    _resolve(predecessor)
    _hand_over(operation, lease)
    deadlines.open_for(lease)
    audit.record(
        "lease.succeeded",
        predecessor,
        company_id=lease.company_id,
        actor=actor,
        successor=str(lease.pk),
        epoch=lease.epoch,
    )
    audit.record("lease.acquired", lease, company_id=lease.company_id, actor=actor, resource=lease.resource_id)
    return lease


def reopen(lease: Lease, demand: Demand, *, reason: str, actor: str, started: Resource | None = None) -> Obligation:
    """Released or retained -> pending_cleanup: the kept sandbox is to be stopped again, or destroyed. It is locked.

    The epoch rises: it may run, or be gone, so that only what is seen from now on proves its end. `started` is what was
    seen of it running, if it was. Until when it was kept stays on the lease: stopped again, it is kept no shorter.
    """
    _require(lease, State.RELEASED, State.RETAINED)
    deadlines.close_for(lease)
    lease.state, lease.reason = State.PENDING_CLEANUP, reason
    _start(lease, started)
    lease.save(update_fields=["state", "reason", "epoch", "started_as_of", "may_be_running_since"])
    obligation = _owe_teardown(lease, demand, due_at=demand.drain_until)
    audit.record(
        "lease.reopened",
        lease,
        company_id=lease.company_id,
        actor=actor,
        reason=reason,
        verb=demand.verb.value,
        epoch=lease.epoch,
    )
    return obligation


def sighted_running(lease: Lease, resource: Resource, *, actor: str) -> None:
    """pending_cleanup stays: the sandbox of a locked lease was seen running, by somebody who is not its teardown.

    What was proven or looked for until now is out of date; the teardown looks again.
    """
    _require(lease, State.PENDING_CLEANUP)
    _start(lease, resource)
    lease.save(update_fields=["epoch", "started_as_of", "may_be_running_since"])
    owed = _open_teardown(lease)
    Obligation.objects.filter(pk=owed.pk).update(absent_since=None)
    wake(owed.pk)
    audit.record("lease.sighted_running", lease, company_id=lease.company_id, actor=actor, epoch=lease.epoch)


def own_for_teardown(operation: Operation, *, resource_id: str, reason: str, actor: str) -> Lease:
    """None -> pending_cleanup: a locked operation, pending or unverified, gets an owner for its teardown.

    Never passes through `active`; due at once; the verb is delete, since nobody ever worked in it. Its caller does not
    get it, so the run owes the end of the startup.
    """
    lease = _lease_of(operation, resource_id, State.PENDING_CLEANUP)
    lease.policy, lease.scope = Policy.EPHEMERAL, ""
    lease.outcome = Lease.Outcome.FAILED
    lease.reason = reason
    lease.released_at = Now()
    lease.save(force_insert=True)
    _owe_teardown(lease, Demand(Obligation.Verb.DELETE), due_at=None)
    _hand_over(operation, lease)
    startup.owe(operation)
    audit.record("lease.owned_for_teardown", lease, company_id=lease.company_id, actor=actor, reason=reason)
    return lease


def begin_teardown(lease: Lease, demand: Demand, *, outcome: str, reason: str, actor: str) -> Obligation:
    """Active -> pending_cleanup: close admission and owe the teardown, due when the drain ends, in one transaction."""
    _require(lease, State.ACTIVE)
    lease.state = State.PENDING_CLEANUP
    lease.outcome = outcome
    lease.reason = reason
    lease.released_at = Now()
    lease.save(update_fields=["state", "outcome", "reason", "released_at"])
    deadlines.close_for(lease)
    obligation = _owe_teardown(lease, demand, due_at=demand.drain_until)
    audit.record(
        "lease.released",
        lease,
        company_id=lease.company_id,
        actor=actor,
        reason=reason,
        outcome=outcome,
        verb=demand.verb.value,
        drain_until=demand.drain_until.isoformat() if demand.drain_until else None,
    )
    return obligation


def orphan(lease: Lease, *, actor: str = audit.SYSTEM) -> Obligation:
    """Active -> pending_cleanup: nobody holds the lease any more. It is stopped and kept, and marked as nobody's.

    Stop-only, because a recovery may need its files; the mark stays, so that it is destroyed as soon as nothing needs
    them (domain T-17). The caller has locked run and lease, and re-checked that nobody holds it.
    """
    demand = Demand(Obligation.Verb.STOP_ONLY)
    reason = "orphaned_active_lease_recovered"
    obligation = begin_teardown(lease, demand, outcome=Lease.Outcome.FAILED, reason=reason, actor=actor)
    lease.orphaned_at = Now()
    lease.save(update_fields=["orphaned_at"])
    return obligation


def dispose(lease: Lease, *, reason: str, actor: str) -> Obligation:
    """Released or retained -> pending_cleanup: the kept sandbox is to be destroyed, by its own record (domain T-18).

    Asks no provider. It is nobody's from now on, so that all that holds a kept sandbox still counts until a destroying
    call is announced. The epoch stays: it was proven stopped, so that such a hold finds that proof again. The caller
    has locked the lease and seen that nothing holds it (`leases.holds`), which is looked at again before every such
    call.
    """
    _require(lease, State.RELEASED, State.RETAINED)
    deadlines.close_for(lease)
    lease.state, lease.policy, lease.scope, lease.reason = State.PENDING_CLEANUP, Policy.EPHEMERAL, "", reason
    lease.kept_until = None
    if lease.orphaned_at is None:
        lease.orphaned_at = Now()
    lease.save(update_fields=["state", "policy", "scope", "reason", "kept_until", "orphaned_at"])
    obligation = _owe_teardown(lease, Demand(Obligation.Verb.DELETE), due_at=None)
    audit.record("lease.disposed", lease, company_id=lease.company_id, actor=actor, reason=reason, epoch=lease.epoch)
    return obligation


def owe_again(lease: Lease, *, reason: str, actor: str) -> Obligation:
    """Expired or failed -> pending_cleanup: the sandbox of a lease that is over is there after all, so it leaks.

    What was demanded and given up is demanded again; where nothing was, it is destroyed. The epoch rises: what was
    proven, or given up unproven, says nothing about what is there now. Its run let go of it,
    so that only what holds it on purpose makes a stop of its destruction. The caller has locked the lease, and no other
    one knows the sandbox.
    """
    _require(lease, State.EXPIRED, State.FAILED)
    if lease.successor_id is not None:
        raise ValueError(f"the sandbox of lease {lease.pk} is its successor's")
    lease.state, lease.policy, lease.scope, lease.reason = State.PENDING_CLEANUP, Policy.EPHEMERAL, "", reason
    _start(lease, None)
    lease.save(update_fields=["state", "policy", "scope", "reason", "epoch", "may_be_running_since"])
    verb = _end_verification(lease) or Obligation.Verb.DELETE
    obligation = _owe_teardown(lease, Demand(verb), due_at=None)
    audit.record(
        "lease.owed_again",
        lease,
        company_id=lease.company_id,
        actor=actor,
        reason=reason,
        epoch=lease.epoch,
        verb=verb.value,
    )
    return obligation


def hold_back(lease: Lease, *, held_by: Sequence[str], actor: str) -> bool:
    """pending_cleanup stays: what may destroy the sandbox of a locked lease becomes stop-only, because it is held.

    Returns whether it is stop-only now; False where a destroying call was announced already, which cannot be called
    back. What was demanded is kept, so that the sandbox is destroyed as soon as nothing holds it.
    """
    _require(lease, State.PENDING_CLEANUP)
    owed = _open_teardown(lease)
    if owed.verb == Obligation.Verb.STOP_ONLY:
        return True
    if owed.delete_announced_at is not None:
        return False
    owed.held_verb, owed.verb = owed.verb, Obligation.Verb.STOP_ONLY
    owed.save(update_fields=["held_verb", "verb"])
    wake(owed.pk)
    audit.record(
        "lease.held_back",
        lease,
        company_id=lease.company_id,
        actor=actor,
        verb=owed.held_verb,
        held_by=sorted(held_by),
    )
    return True


def fence_expired(lease: Lease, *, actor: str) -> bool:
    """Active -> pending_cleanup, and what is stopped stays so: nobody saved the files of a fenced sandbox in time.

    It is stopped, and kept as after a failure (domain T-25, T-26): nobody's next run has it, and it is no orphan that
    is destroyed as soon as nothing holds it. Returns whether it is kept; not where its sandbox is gone, or was demanded
    to go by its own holder. The caller has locked issue, run and lease.
    """
    if lease.state == State.ACTIVE:
        demand, failed = Demand(Obligation.Verb.STOP_ONLY), Lease.Outcome.FAILED
        begin_teardown(lease, demand, outcome=failed, reason="fence_expired", actor=actor)
    elif lease.state == State.PENDING_CLEANUP:
        if _open_teardown(lease).verb != Obligation.Verb.STOP_ONLY:
            return False
    elif lease.state in Lease.KEPT:
        if lease.kept_until is not None:
            end = database_now() + lease.retain_for if lease.retain_for is not None else None
            lease.kept_until = end and max(end, lease.kept_until)
    else:
        return False
    lease.policy, lease.scope, lease.outcome = Policy.RETAIN_ON_FAILURE, "", Lease.Outcome.FAILED
    lease.orphaned_at = None
    lease.save(update_fields=["policy", "scope", "outcome", "orphaned_at", "kept_until"])
    audit.record("lease.fence_expired", lease, company_id=lease.company_id, actor=actor, state=lease.state)
    return True


def keep_until(lease: Lease, until: datetime | None, *, actor: str, reason: str) -> None:
    """Released or retained stays: an operator says until when the sandbox of a locked lease is kept."""
    _require(lease, State.RELEASED, State.RETAINED)
    lease.kept_until = until
    lease.save(update_fields=["kept_until"])
    audit.record(
        "lease.kept_until",
        lease,
        company_id=lease.company_id,
        actor=actor,
        reason=reason,
        until=until.isoformat() if until else None,
    )


def mark_orphaned(lease: Lease, *, actor: str, reason: str) -> None:
    """Released or retained stays: an operator says that a kept sandbox is nobody's. The lease is locked."""
    _require(lease, State.RELEASED, State.RETAINED)
    lease.orphaned_at, lease.kept_until = Now(), None
    lease.save(update_fields=["orphaned_at", "kept_until"])
    audit.record("lease.marked_orphaned", lease, company_id=lease.company_id, actor=actor, reason=reason)


def merge_demand(
    lease: Lease, demand: Demand, *, actor: str, reason: str, explicit_stop: bool = False, authorised: bool = False
) -> Obligation:
    """pending_cleanup stays: a second demand merges into the open teardown of a locked lease; a change wakes it."""
    _require(lease, State.PENDING_CLEANUP)
    obligation = _open_teardown(lease)
    opened = Demand(Obligation.Verb(obligation.verb), obligation.drain_until)
    merged = merge(opened, demand, explicit_stop=explicit_stop, authorised=authorised)
    if obligation.held_verb and demand.verb == Obligation.Verb.DELETE and merged.verb == Obligation.Verb.STOP_ONLY:
        # Held back, and its destruction demanded once more: that is owed when nothing holds it.
        obligation.held_verb = Obligation.Verb.DELETE
        obligation.save(update_fields=["held_verb"])
    if merged != opened:
        obligation.verb, obligation.drain_until = merged.verb, merged.drain_until
        obligation.save(update_fields=["verb", "drain_until"])
        wake(obligation.pk)
        audit.record(
            "lease.teardown.changed",
            lease,
            company_id=lease.company_id,
            actor=actor,
            reason=reason,
            verb=merged.verb.value,
            drain_until=merged.drain_until.isoformat() if merged.drain_until else None,
        )
    return obligation


def settled_state(evidence: str, *, policy: str, outcome: str) -> Lease.State:
    """Return the state in which proof of this evidence leaves a lease (table in `docs/states.md`)."""
    if evidence == Evidence.STOPPED:
        retain = policy == Policy.RETAIN_ON_FAILURE and outcome == Lease.Outcome.FAILED
        return State.RETAINED if retain else State.RELEASED
    return State.FAILED if outcome == Lease.Outcome.FAILED else State.EXPIRED


def settle(lease: Lease, obligation: Obligation, receipt: Receipt) -> None:
    """pending_cleanup -> released, retained, expired or failed: the receipt proves what the teardown owed.

    The caller holds the lease's lock and has passed the fence of the obligation. Destroyed or absent under stop-only is
    proof of the end too; it costs the files, which is recorded and audited (design 2.3).
    """
    _require(lease, State.PENDING_CLEANUP)
    if receipt.lease_id != lease.pk or receipt.epoch != lease.epoch:
        raise ValueError(f"receipt {receipt.pk} proves nothing about epoch {lease.epoch} of lease {lease.pk}")
    lease.state = settled_state(receipt.evidence, policy=lease.policy, outcome=lease.outcome)
    lease.files_lost = obligation.verb == Obligation.Verb.STOP_ONLY and receipt.evidence != Evidence.STOPPED
    lease.kept_until = kept_until(lease, obligation) if lease.state in Lease.KEPT else None
    if receipt.evidence != Evidence.STOPPED:
        runs_no_more(lease)
    lease.save(update_fields=["state", "files_lost", "kept_until", "may_be_running_since"])
    close(obligation, Obligation.ClosedAs.PROVEN)
    if lease.state != State.RELEASED:
        _resolve(lease)
    audit.record(
        "lease.teardown.confirmed",
        lease,
        company_id=lease.company_id,
        evidence=receipt.evidence,
        epoch=receipt.epoch,
        state=lease.state,
    )
    if lease.files_lost:
        audit.record("lease.files_lost", lease, company_id=lease.company_id, evidence=receipt.evidence)


def kept_until(lease: Lease, obligation: Obligation) -> datetime | None:
    """Return until when a sandbox is kept that this teardown stopped, None: until an operator decides, or nobody's.

    By what the lease recorded of its environment; one that was kept before not shorter than was said then, which may
    have been an operator's word. One that is kept only because a hold forbade its destruction has no time of its own.
    """
    now, said = database_now(), lease.kept_until
    if lease.orphaned_at is not None:
        return None  # it has no time of its own
    if obligation.held_verb == Obligation.Verb.DELETE:
        return now
    if lease.scope and lease.state == State.RELEASED:
        end: datetime | None = now + lease.reuse_idle_for
    else:
        end = now + lease.retain_for if lease.retain_for is not None else None
    return max(end, said) if end is not None and said is not None else end or said


# What an operator ends without proof (`leases.deciding`). It is never a receipt, and stays visible as debt.


def settle_unverified(lease: Lease, obligation: Obligation, *, actor: str, reason: str) -> None:
    """pending_cleanup -> failed: an operator ends the retries of a locked lease's teardown; nothing is proven.

    What a teardown that comes back late proves is kept as its receipt. The proof that is missing is owed from now on,
    and looked for: `verify_end`.
    """
    _require(lease, State.PENDING_CLEANUP)
    lease.state, lease.kept_until = State.FAILED, None
    runs_no_more(lease)  # `verify_end` looks at it from now on
    lease.save(update_fields=["state", "kept_until", "may_be_running_since"])
    close_unverified(obligation)
    _owe_verification(lease, Obligation.Verb(obligation.held_verb or obligation.verb))
    audit.record(
        "lease.teardown.unverified",
        lease,
        company_id=lease.company_id,
        actor=actor,
        reason=reason,
        obligation=obligation.pk,
        quiet=obligation.quiet,
        epoch=lease.epoch,
    )


def own_history(lease: Lease, verb: Obligation.Verb, *, actor: str) -> Obligation:
    """None -> expired or failed: what ended elsewhere, without proof, is inserted together with the debt of the proof.

    `verb` is what was demanded of its sandbox, and is owed again should that be found alive.
    """
    lease.state = State.FAILED if lease.outcome == Lease.Outcome.FAILED else State.EXPIRED
    lease.save(force_insert=True)
    owed = _owe_verification(lease, verb)
    audit.record("lease.imported", lease, company_id=lease.company_id, actor=actor, resource=lease.resource_id)
    return owed


def verified(lease: Lease, obligation: Obligation, receipt: Receipt) -> None:
    """Expired or failed stays: the end of a locked lease is proven after all. Its `verify_end` is locked and fenced.

    The receipt says destroyed or absent. One that was merely stopped is kept, and so is no history (`reopen_history`).
    """
    _require(lease, State.EXPIRED, State.FAILED)
    if (receipt.lease_id, receipt.epoch) != (lease.pk, lease.epoch) or receipt.evidence == Evidence.STOPPED:
        raise ValueError(f"receipt {receipt.pk} does not prove the end of epoch {lease.epoch} of lease {lease.pk}")
    close(obligation, Obligation.ClosedAs.PROVEN)
    _resolve(lease)
    audit.record(
        "lease.end_verified", lease, company_id=lease.company_id, evidence=receipt.evidence, epoch=receipt.epoch
    )


def reopen_history(
    lease: Lease, obligation: Obligation, *, started: Resource | None, reason: str, actor: str
) -> Obligation:
    """Expired or failed -> pending_cleanup: what counted as ended is there. Lease and `verify_end` are locked.

    What was demanded is owed again from now on, and settles like any other teardown. The epoch rises where the sandbox
    was seen running (`started`), so that only what is seen from now on proves its end.
    """
    _require(lease, State.EXPIRED, State.FAILED)
    lease.state, lease.reason = State.PENDING_CLEANUP, reason
    if started is not None:
        _start(lease, started)
    lease.save(update_fields=["state", "reason", "epoch", "started_as_of", "may_be_running_since"])
    close(obligation, Obligation.ClosedAs.HANDED_OVER)
    owed = _owe_teardown(lease, Demand(Obligation.Verb(obligation.verb)), due_at=None)
    audit.record(
        "lease.history_reopened",
        lease,
        company_id=lease.company_id,
        actor=actor,
        reason=reason,
        verb=obligation.verb,
        epoch=lease.epoch,
    )
    return owed


def end_unverified(operation: Operation, obligation: Obligation, *, actor: str, reason: str) -> None:
    """Pending -> unverified: an operator ends the search for what became of a locked creation or start.

    Should the sandbox turn up after all, it gets an owner for its teardown (`own_for_teardown`).
    """
    operation.state = Operation.State.UNVERIFIED
    operation.resolved_at = Now()
    operation.save(update_fields=["state", "resolved_at"])
    close_unverified(obligation)
    audit.record(
        "operation.unverified",
        operation,
        company_id=operation.company_id,
        actor=actor,
        reason=reason,
        obligation=obligation.pk,
        quiet=obligation.quiet,
    )


# What ends in a clone because it is the original's (`cleanup.trusting`). Nothing is proven, and nothing is owed here.


def disown(lease: Lease, *, actor: str, reason: str) -> None:
    """Any state of a lease that is not over -> failed: its sandbox is the original's. The lease is locked.

    All that it owes is closed as `disowned`, whoever is at work on it.
    """
    _require(lease, State.ACTIVE, State.PENDING_CLEANUP, State.RELEASED, State.RETAINED)
    before = lease.state
    if before == State.ACTIVE:
        lease.outcome, lease.released_at = Lease.Outcome.FAILED, Now()
    if before != State.PENDING_CLEANUP:
        _owe_teardown(lease, Demand(Obligation.Verb.STOP_ONLY), due_at=None)
    lease.state, lease.reason, lease.kept_until = State.FAILED, "cloned", None
    runs_no_more(lease, Obligation.ClosedAs.DISOWNED)
    lease.save(update_fields=["state", "outcome", "reason", "released_at", "kept_until", "may_be_running_since"])
    close_disowned(Obligation.objects.filter(lease=lease))
    _resolve(lease)
    audit.record("lease.disowned", lease, company_id=lease.company_id, actor=actor, reason=reason, state_before=before)


def disown_operation(operation: Operation, *, actor: str, reason: str) -> None:
    """Pending -> resolved: what a locked creation or start brought forth is the original's."""
    Operation.objects.filter(pk=operation.pk).update(state=Operation.State.RESOLVED, resolved_at=Now())
    close_disowned(Obligation.objects.filter(operation=operation))
    audit.record("operation.disowned", operation, company_id=operation.company_id, actor=actor, reason=reason)


def close_disowned(obligations: QuerySet[Obligation]) -> int:
    """Lock and close what is open of these; returns how many. An attempt at one has lost its row."""
    rows = list(obligations.filter(closed_at__isnull=True).order_by("pk").select_for_update(no_key=True, of=("self",)))
    for row in rows:
        end_attempt(row, Attempt.Outcome.SUPERSEDED)
        close(row, Obligation.ClosedAs.DISOWNED)
    return len(rows)


def close_unverified(obligation: Obligation) -> None:
    """Close a locked obligation without proof. An attempt that lost its protection over it has lost its row."""
    end_attempt(obligation, Attempt.Outcome.SUPERSEDED)
    close(obligation, Obligation.ClosedAs.UNVERIFIED)


def close(obligation: Obligation, closed_as: Obligation.ClosedAs) -> None:
    """Close a locked obligation. A row closes once (trigger)."""
    Obligation.objects.filter(pk=obligation.pk).update(
        closed_at=Now(), closed_as=closed_as, due_at=None, quiet="", attempt_id=None, worker=None, claimed_at=None
    )


def refuse_operation(operation: Operation) -> None:
    """Pending -> resolved: nothing was allocated, or nothing is started any more. The operation is locked.

    Of a creation the provider's answer proves it; of a start, a look that sees the sandbox stopped when no call can be
    under way, or the teardown that the caller opens in the same transaction.
    """
    Operation.objects.filter(pk=operation.pk).update(state=Operation.State.RESOLVED, resolved_at=Now())
    _end_recovery(operation, Obligation.ClosedAs.NOTHING_OWED)


def _lease_of(operation: Operation, resource_id: str, state: Lease.State) -> Lease:
    if not transaction.get_connection().in_atomic_block:
        raise RuntimeError("a transition runs in a transaction")
    environment = Environment.objects.filter(pk=operation.environment_uuid, company_id=operation.company_id).first()
    return Lease(
        id=operation.lease_uuid,
        company_id=operation.company_id,
        environment=environment,
        issue_id=_if_there(Issue, operation.issue_uuid),
        run_id=_if_there(Run, operation.run_uuid),
        account_id=operation.account_id,
        state=state,
        policy=operation.policy,
        provider=operation.provider,
        endpoint=operation.endpoint,
        credential_uuid=operation.credential_uuid,
        credential_reference=operation.credential_reference,
        account_identity=operation.account_identity,
        config=operation.config,
        drain_seconds=operation.drain_seconds,
        reuse_idle_for=operation.reuse_idle_for,
        retain_for=operation.retain_for,
        ends_at=operation.ends_at,
        scope=operation.scope,
        fingerprint=operation.fingerprint,
        hourly_price=operation.hourly_price,
        resource_id=resource_id,
        resource_name=operation.name,
    )


def _if_there(model: type[Issue | Run], pk: UUID | None) -> UUID | None:
    """The journal outlives what it names; a lease made from it later refers only to what still exists."""
    return pk if pk is not None and model.objects.filter(pk=pk).exists() else None


def _owe_teardown(lease: Lease, demand: Demand, *, due_at: datetime | None) -> Obligation:
    return Obligation.objects.create(
        company_id=lease.company_id,
        kind=Obligation.Kind.TEARDOWN,
        account_id=lease.account_id,
        lease=lease,
        verb=demand.verb,
        drain_until=demand.drain_until,
        due_at=due_at or Now(),
    )


def _owe_verification(lease: Lease, verb: Obligation.Verb) -> Obligation:
    """Owe the proof of an end that was never proven. Looked for later than now, and no wake makes it earlier."""
    first = Now() + timedelta(seconds=bounds.HISTORY_FIRST)
    return Obligation.objects.create(
        company_id=lease.company_id,
        kind=Obligation.Kind.VERIFY_END,
        account_id=lease.account_id,
        lease=lease,
        verb=verb,
        due_at=first,
        not_before=first,
    )


def _end_verification(lease: Lease) -> Obligation.Verb | None:
    """Close what looks for the proof of a locked lease's end: its teardown is owed instead. Returns what was demanded.

    None where nothing looks for it.
    """
    row = (
        Obligation.objects.select_for_update(no_key=True)
        .filter(lease=lease, kind=Obligation.Kind.VERIFY_END, closed_at__isnull=True)
        .first()
    )
    if row is None:
        return None
    end_attempt(row, Attempt.Outcome.HANDED_OVER)
    close(row, Obligation.ClosedAs.HANDED_OVER)
    return Obligation.Verb(row.verb) if row.verb else None


def may_be_running(lease: Lease) -> None:
    """Released or retained stays: a restart of the sandbox was never answered, so that it may run. Somebody watches it.

    The earlier receipt proves that the old execution ended, and goes on to: what may run now is none of it. The lease
    is locked.
    """
    _require(lease, State.RELEASED, State.RETAINED)
    if lease.may_be_running_since is not None:
        return
    lease.may_be_running_since = database_now()
    lease.save(update_fields=["may_be_running_since"])
    Obligation.objects.create(
        company_id=lease.company_id,
        kind=Obligation.Kind.WATCH_RESTART,
        account_id=lease.account_id,
        lease=lease,
        due_at=Now(),
    )
    audit.record("lease.may_be_running", lease, company_id=lease.company_id, epoch=lease.epoch)


def runs_no_more(lease: Lease, closed_as: Obligation.ClosedAs = Obligation.ClosedAs.HANDED_OVER) -> None:
    """Watch a locked lease's sandbox no more: it was seen stopped, is gone, or its end is owed to another row.

    The caller saves `may_be_running_since`.
    """
    if lease.may_be_running_since is None:
        return
    lease.may_be_running_since = None
    rows = Obligation.objects.select_for_update(no_key=True).filter(
        lease=lease, kind=Obligation.Kind.WATCH_RESTART, closed_at__isnull=True
    )
    for row in rows:
        end_attempt(row, Attempt.Outcome.HANDED_OVER)
        close(row, closed_as)


def _start(lease: Lease, resource: Resource | None) -> None:
    """Count a start; what the provider said before it is out of date from now on.

    The caller saves `may_be_running_since` as well: that it may run is over where it is known to have been started.
    """
    lease.epoch += 1
    runs_no_more(lease)
    if resource is not None and resource.as_of is not None:
        lease.started_as_of = max(resource.as_of, lease.started_as_of or resource.as_of)


def _resolve(lease: Lease) -> None:
    """What brought this lease forth is done: its sandbox is proven gone, or another lease's."""
    Operation.objects.filter(lease=lease, state=Operation.State.ATTACHED).update(
        state=Operation.State.RESOLVED, resolved_at=Now()
    )


def _hand_over(operation: Operation, lease: Lease) -> None:
    operation.lease = lease
    operation.resource_id = lease.resource_id
    operation.state, operation.resolved_at = Operation.State.ATTACHED, None
    operation.save(update_fields=["lease", "resource_id", "state", "resolved_at"])
    _end_recovery(operation, Obligation.ClosedAs.HANDED_OVER)


def _end_recovery(operation: Operation, closed_as: Obligation.ClosedAs) -> None:
    """Close the recovery of a locked operation. One that an operator ended unverified has none any more."""
    recovery = (
        Obligation.objects.select_for_update(no_key=True).filter(operation=operation, closed_at__isnull=True).first()
    )
    if recovery is None:
        return
    end_attempt(recovery, Attempt.Outcome.HANDED_OVER)
    close(recovery, closed_as)


def _open_teardown(lease: Lease) -> Obligation:
    """Lock and return the open teardown of a locked lease."""
    return Obligation.objects.select_for_update(no_key=True).get(
        lease=lease, kind=Obligation.Kind.TEARDOWN, closed_at__isnull=True
    )


def end_attempt(obligation: Obligation, outcome: Attempt.Outcome) -> None:
    """End the attempt that holds a locked obligation, if one does: the row is closed over it."""
    if obligation.attempt_id is not None:
        Attempt.objects.filter(pk=obligation.attempt_id, finished_at__isnull=True).update(
            finished_at=Now(), outcome=outcome
        )


def _require(lease: Lease, *states: Lease.State) -> None:
    if not transaction.get_connection().in_atomic_block:
        raise RuntimeError("a transition runs in a transaction that holds the lease's lock")
    if lease.state not in states:
        raise ValueError(f"lease {lease.pk} is {lease.state}, not {' or '.join(states)}")
