"""Rows for tests, written directly: unique, consistent with every constraint, and nothing more than asked for.

They go past the functions that a caller would use on purpose, so that a test of one mechanism stands on no other.
Each commits as a whole, because the deferred triggers look at commit. Keyword arguments overwrite any column. Times
are given relative to the *database's* clock: `due_in=-5` is five seconds ago, by the clock that compares it.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from itertools import count
from typing import Any
from uuid import uuid4

from django.db import connection, transaction

from leases.models import (
    Archive,
    Attempt,
    Company,
    Continuation,
    Environment,
    Hold,
    InventoryFinding,
    InventoryListing,
    Issue,
    IssueFacts,
    Lease,
    Obligation,
    Operation,
    ProviderAccount,
    Receipt,
    Recovery,
    RecoveryAction,
    Run,
    RunFacts,
)
from leases.models.inventory import GRACE

_number = count(1)


def database_now() -> datetime:
    """Return the time by the clock of the database, not frozen by a transaction."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT clock_timestamp()")
        row = cursor.fetchone()
    assert row is not None
    now: datetime = row[0]
    return now


def at(seconds: float) -> datetime:
    """Return the moment `seconds` from now by the database's clock (negative: ago)."""
    return database_now() + timedelta(seconds=seconds)


def _unique(what: str) -> str:
    # The random part keeps processes that share a database apart.
    return f"{what}-{next(_number)}-{uuid4().hex[:8]}"


def company(**values: Any) -> Company:
    return Company.objects.create(**{"name": _unique("company"), **values})


def account(company_: Company | None = None, **values: Any) -> ProviderAccount:
    """Make an account that has attested who it is, of the provider `local`."""
    owner = company_ or company()
    name = _unique("account")
    return ProviderAccount.objects.create(
        **{"company": owner, "name": name, "provider": "local", "attested_identity": f"identity of {name}", **values}
    )


def environment(account_: ProviderAccount | None = None, **values: Any) -> Environment:
    owner = account_ or account()
    return Environment.objects.create(
        **{"company_id": owner.company_id, "account": owner, "name": _unique("environment"), **values}
    )


def issue(company_: Company | None = None, **values: Any) -> Issue:
    return Issue.objects.create(**{"company": company_ or company(), "title": _unique("issue"), **values})


def run(company_: Company | None = None, **values: Any) -> Run:
    """Make a running run."""
    return Run.objects.create(**{"company": company_ or company(), "status": Run.Status.RUNNING, **values})


def lease(environment_: Environment | None = None, **values: Any) -> Lease:
    """Make an active lease of a sandbox in an environment. `teardown` makes it pending cleanup.

    It is a run's where one is given, else an ad-hoc one, which ends in an hour: one that has neither is nobody's.
    """
    where = environment_ or environment()
    resource = _unique("resource")
    if not values.get("run") and not values.get("run_id"):
        values.setdefault("ends_at", at(3600))
    return Lease.objects.create(
        **{
            "company_id": where.company_id,
            "environment": where,
            "account": where.account,
            "state": Lease.State.ACTIVE,
            "policy": where.policy,
            "provider": where.account.provider,
            "endpoint": where.account.endpoint,
            "account_identity": where.account.attested_identity or f"identity of {where.account.name}",
            "config": where.config,
            "drain_seconds": where.drain_seconds,
            "resource_id": resource,
            "resource_name": resource[:63],
            **values,
        }
    )


@transaction.atomic
def teardown(lease_: Lease | None = None, *, due_in: float = 0.0, **values: Any) -> Obligation:
    """Make a lease pending cleanup and owe its teardown, due in `due_in` seconds."""
    subject = lease_ or lease()
    subject.state = Lease.State.PENDING_CLEANUP
    subject.outcome = subject.outcome or Lease.Outcome.SUCCEEDED
    subject.reason = subject.reason or "test"
    subject.released_at = subject.released_at or database_now()
    subject.save(update_fields=["state", "outcome", "reason", "released_at"])
    return Obligation.objects.create(
        **{
            "company_id": subject.company_id,
            "kind": Obligation.Kind.TEARDOWN,
            "account_id": subject.account_id,
            "lease": subject,
            "verb": Obligation.Verb.DELETE,
            "due_at": at(due_in),
            **values,
        }
    )


def hold(
    subject: Lease | Issue, kind: str = Hold.Kind.OPERATOR, *, until_in: float | None = None, **values: Any
) -> Hold:
    """Hold a lease or an issue's leases, until `until_in` seconds from now; an operator's hold for an hour."""
    if until_in is None and kind in (Hold.Kind.OPERATOR, Hold.Kind.SHUTDOWN_FENCE):
        until_in = 3600.0
    where = {"lease": subject} if isinstance(subject, Lease) else {"issue": subject}
    strength = Hold.Strength.SOFT if kind in Hold.SOFT_KINDS else Hold.Strength.ALWAYS
    return Hold.objects.create(
        **{
            "company_id": subject.company_id,
            "kind": kind,
            "strength": strength,
            "holder": _unique("holder"),
            "until": at(until_in) if until_in is not None else None,
            **where,
            **values,
        }
    )


def receipt(lease_: Lease, **values: Any) -> Receipt:
    """Record that a lease's sandbox was destroyed in its present epoch."""
    return Receipt.objects.create(
        **{
            "lease": lease_,
            "account_id": lease_.account_id,
            "company_uuid": lease_.company_id,
            "run_uuid": lease_.run_id,
            "resource_id": lease_.resource_id,
            "account_identity": lease_.account_identity,
            "epoch": lease_.epoch,
            "evidence": Receipt.Evidence.DESTROYED,
            "attempt_id": uuid4(),
            **values,
        }
    )


@transaction.atomic
def stopped(lease_: Lease | None = None, *, state: str = Lease.State.RELEASED) -> Lease:
    """Make a lease whose sandbox is proven stopped: its teardown is closed by a receipt."""
    owed = teardown(lease_, verb=Obligation.Verb.STOP_ONLY)
    subject = owed.lease
    assert subject is not None
    receipt(subject, evidence=Receipt.Evidence.STOPPED)
    subject.state = state
    subject.kept_until = at(30 * 86_400)
    subject.save(update_fields=["state", "kept_until"])
    owed.closed_at, owed.closed_as, owed.due_at = database_now(), Obligation.ClosedAs.PROVEN, None
    owed.save(update_fields=["closed_at", "closed_as", "due_at"])
    return subject


@transaction.atomic
def given_up(lease_: Lease | None = None, **values: Any) -> Obligation:
    """Make a lease whose teardown an operator ended without proof, and owe the search for the proof; returns that."""
    owed = teardown(lease_, **values)
    subject = owed.lease
    assert subject is not None
    subject.state = Lease.State.FAILED
    subject.save(update_fields=["state"])
    owed.closed_at, owed.closed_as, owed.due_at = database_now(), Obligation.ClosedAs.UNVERIFIED, None
    owed.save(update_fields=["closed_at", "closed_as", "due_at"])
    return Obligation.objects.create(
        company_id=subject.company_id,
        kind=Obligation.Kind.VERIFY_END,
        account_id=subject.account_id,
        lease=subject,
        verb=owed.verb,
        due_at=at(300),
        not_before=at(300),
    )


@transaction.atomic
def operation(environment_: Environment | None = None, *, due_in: float = 150.0, **values: Any) -> Operation:
    """Make a pending creation and owe its recovery, due in `due_in` seconds."""
    where = environment_ or environment()
    made = Operation.objects.create(
        **{
            "company_id": where.company_id,
            "account": where.account,
            "environment_uuid": where.pk,
            "lease_uuid": uuid4(),
            "name": _unique("sandbox")[:63],
            "provider": where.account.provider,
            "endpoint": where.account.endpoint,
            "account_identity": where.account.attested_identity or f"identity of {where.account.name}",
            "config": where.config,
            "policy": where.policy,
            "finds_by_name": True,
            "creation_window": 120.0,
            **values,
        }
    )
    if made.state == Operation.State.PENDING:
        Obligation.objects.create(
            company_id=made.company_id,
            kind=Obligation.Kind.RECOVER_CREATION,
            account_id=made.account_id,
            operation=made,
            due_at=at(due_in),
        )
    return made


@transaction.atomic
def start(source: Lease | None = None, *, due_in: float = 150.0, **values: Any) -> Operation:
    """Make a pending start of a lease's stopped sandbox and owe its recovery, due in `due_in` seconds."""
    subject = source or stopped()
    made = Operation.objects.create(
        **{
            "kind": Operation.Kind.START,
            "company_id": subject.company_id,
            "account_id": subject.account_id,
            "environment_uuid": subject.environment_id or uuid4(),
            "lease_uuid": uuid4(),
            "source": subject,
            "resource_id": subject.resource_id,
            "name": subject.resource_name,
            "provider": subject.provider,
            "endpoint": subject.endpoint,
            "account_identity": subject.account_identity,
            "config": subject.config,
            "policy": subject.policy,
            "finds_by_name": True,
            "creation_window": 120.0,
            **values,
        }
    )
    if made.state == Operation.State.PENDING:
        Obligation.objects.create(
            company_id=made.company_id,
            kind=Obligation.Kind.RECOVER_START,
            account_id=made.account_id,
            operation=made,
            due_at=at(due_in),
        )
    return made


def startup(run_: Run | None = None, **values: Any) -> Obligation:
    """Owe to see a run's startup to its end: quiet until something that it waits for ends."""
    subject = run_ or run()
    return Obligation.objects.create(
        **{
            "company_id": subject.company_id,
            "kind": Obligation.Kind.STARTUP,
            "run": subject,
            "quiet": Obligation.Quiet.WAITING,
            "due_at": None,
            **values,
        }
    )


def probe(account_: ProviderAccount | None = None, *, due_in: float = 0.0, **values: Any) -> Obligation:
    """Owe the probe of an account. Opening its circuit is the caller's."""
    subject = account_ or account()
    return Obligation.objects.create(
        **{
            "company_id": subject.company_id,
            "kind": Obligation.Kind.PROBE_ACCOUNT,
            "account": subject,
            "probed_account": subject,
            "due_at": at(due_in),
            **values,
        }
    )


def attempt(obligation: Obligation, **values: Any) -> Attempt:
    """Write a finished attempt into the history of an obligation."""
    return Attempt.objects.create(
        **{
            "company_id": obligation.company_id,
            "obligation": obligation,
            "worker": "test",
            "finished_at": database_now(),
            "outcome": Attempt.Outcome.FAILED,
            **values,
        }
    )


def listing(account_: ProviderAccount | None = None, **values: Any) -> InventoryListing:
    """Write a complete listing of an account."""
    where = account_ or account()
    return InventoryListing.objects.create(
        **{
            "account": where,
            "provider": where.provider,
            "account_identity": where.attested_identity,
            "outcome": InventoryListing.Outcome.COMPLETE,
            "began_at": at(0),
            **values,
        }
    )


def finding(lease_: Lease | None = None, **values: Any) -> InventoryFinding:
    """Write that a lease's sandbox leaks: seen by two listings that are far enough apart, and not confirmed yet."""
    of = lease_ or lease()
    return InventoryFinding.objects.create(
        **{
            "company_id": of.company_id,
            "account": of.account,
            "provider": of.provider,
            "account_identity": of.account_identity,
            "resource_id": of.resource_id,
            "verdict": InventoryFinding.Verdict.SETTLED,
            "lease": of,
            "first_seen_at": at(-GRACE.total_seconds() - 60),
            "last_seen_at": at(0),
            "sightings": 2,
            **values,
        }
    )


def claimed(obligation: Obligation, *, protected_for: float = 900.0) -> Obligation:
    """Write an attempt's claim onto an obligation, without the attempt's history row."""
    obligation.attempt_id = uuid4()
    obligation.worker = "test"
    obligation.claimed_at = database_now()
    obligation.due_at = at(protected_for)
    obligation.save(update_fields=["attempt_id", "worker", "claimed_at", "due_at"])
    return obligation


@transaction.atomic
def recovery(lease_: Lease | None = None, *, due_in: float = 0.0, **values: Any) -> Recovery:
    """Make a generation of a stopped lease: a running one, with what it owes, or by `state` one that is over."""
    subject = lease_ or stopped()
    made = Recovery.objects.create(
        **{
            "company_id": subject.company_id,
            "lease": subject,
            "generation": subject.recoveries.count() + 1,
            "requested_by": "test",
            "ends_at": at(1800),
            **_of_generation(values.get("state", Recovery.State.RUNNING), due_in),
            **values,
        }
    )
    for kind, account_id, due in (
        (Obligation.Kind.RECOVER_WORKSPACE, subject.account_id, at(due_in)),
        (Obligation.Kind.END_RECOVERY, None, made.ends_at),
    ):
        if made.state == Recovery.State.RUNNING:
            Obligation.objects.create(
                company_id=made.company_id,
                kind=kind,
                account_id=account_id,
                lease=subject,
                due_at=due,
            )
    return made


def _of_generation(state: str, due_in: float) -> dict[str, Any]:
    if state == Recovery.State.RUNNING:
        return {"next_attempt_at": at(due_in)}
    if state == Recovery.State.COMPLETE:
        return {"finished_at": at(0), "attempts": 1}
    return {
        "finished_at": at(0),
        "attempts": 6,
        "failure": Recovery.Failure.PROVIDER_UNAVAILABLE,
        "disposition": Recovery.Disposition.USE_ALTERNATIVE_STRATEGY,
    }


@transaction.atomic
def may_be_running(lease_: Lease | None = None, *, due_in: float = 30.0, since_in: float = 0.0) -> Lease:
    """Make a stopped lease whose sandbox may run again, since `since_in` seconds, and owe to watch it."""
    subject = lease_ or stopped()
    subject.may_be_running_since = at(since_in)
    subject.save(update_fields=["may_be_running_since"])
    Obligation.objects.create(
        company_id=subject.company_id,
        kind=Obligation.Kind.WATCH_RESTART,
        account_id=subject.account_id,
        lease=subject,
        due_at=at(due_in),
    )
    return subject


@transaction.atomic
def continuation(
    run_: Run | None = None, kind: str = Continuation.Kind.RETRY, *, due_in: float = 0.0, **values: Any
) -> Continuation:
    """Make a continuation of an issue's failed run: a waiting one, with what it owes, or by `state` one that is over.

    A message has a name of its own, and was written now.
    """
    subject = run_ or failed_run()
    made = Continuation.objects.create(
        **{
            "company_id": subject.company_id,
            "issue_id": subject.issue_id,
            "run": subject,
            "kind": kind,
            "requested_by": "user:test",
            **({} if kind == Continuation.Kind.RETRY else {"message_id": _unique("message"), "authored_at": at(0)}),
            **_of_continuation(values.get("state", Continuation.State.WAITING), subject),
            **values,
        }
    )
    if made.state == Continuation.State.WAITING:
        Obligation.objects.create(
            company_id=made.company_id,
            kind=Obligation.Kind.START_CONTINUATION,
            continuation=made,
            due_at=at(due_in),
        )
    return made


def _of_continuation(state: str, continued: Run) -> dict[str, Any]:
    if state == Continuation.State.STARTED:
        following = run(continued.company, issue_id=continued.issue_id, continues=continued, status=Run.Status.QUEUED)
        readiness = Continuation.Readiness.SAME_WORKSPACE
        return {"started_run": following, "readiness": readiness, "ended_at": at(0)}
    return {"withdrawn_by": "user:test", "ended_at": at(0)} if state == Continuation.State.WITHDRAWN else {}


def failed_run(company_: Company | None = None, **values: Any) -> Run:
    """Make a run of an issue that failed, of a named agent."""
    owner = company_ or company()
    subject = values.pop("issue", None) or issue(owner)
    return run(
        owner,
        **{"issue": subject, "status": Run.Status.FAILED, "finished_at": at(0), "agent": "agent-1", **values},
    )


def issue_facts(issue_: Issue | None = None, **values: Any) -> IssueFacts:
    """Tell of an issue what opens every gate: it is open, assigned to `agent-1`, and nothing is to be decided."""
    return IssueFacts.objects.create(
        **{
            "issue": issue_ or issue(),
            "is_open": True,
            "assignee": "agent-1",
            "decisions_pending": 0,
            **values,
        }
    )


def run_facts(run_: Run | None = None, **values: Any) -> RunFacts:
    """Tell of a run what opens every gate: nobody controls it, and its failure is final."""
    return RunFacts.objects.create(
        **{
            "run": run_ or failed_run(),
            "adapter_attached": False,
            "coordinator": RunFacts.Coordinator.TERMINAL_FAILURE,
            "coordinator_owner": "",
            "history_available": True,
            **values,
        }
    )


def recovery_action(run_: Run | None = None, **values: Any) -> RecoveryAction:
    """Open a recovery action on a failed run of an issue."""
    subject = run_ or failed_run()
    return RecoveryAction.objects.create(
        **{
            "company_id": subject.company_id,
            "issue_id": subject.issue_id,
            "run": subject,
            "cause": "its run failed",
            **values,
        }
    )


@transaction.atomic
def cancelled(run_: Run | None = None, *, due_in: float = 0.0) -> Obligation:
    """Ask for a run's cancellation, and owe its confirmation; returns that."""
    subject = run_ or run()
    subject.cancel_requested_at = at(0)
    subject.save(update_fields=["cancel_requested_at"])
    return Obligation.objects.create(
        company_id=subject.company_id, kind=Obligation.Kind.CONFIRM_CANCEL, run=subject, due_at=at(due_in)
    )


def archive(recovery_: Recovery | None = None, **values: Any) -> Archive:
    """Write the row of a whole, offered archive, or with `saved_at=None` of one not whole. Its file is not there."""
    of = recovery_ or recovery()
    number = uuid4()
    whole = values.get("saved_at", at(0)) is not None
    proof = of.lease.receipts.order_by("-epoch").first() if whole else None
    return Archive.objects.create(
        **{
            "id": number,
            "company_id": of.company_id,
            "lease": of.lease,
            "recovery": of,
            "attempt_id": uuid4(),
            "epoch": of.lease.epoch,
            "path": "/workspace",
            "name": f"{of.company_id}/{number}.tar",
            "size": 10240 if whole else None,
            "sha256": "0" * 64 if whole else "",
            "saved_at": at(0),
            "receipt": proof,
            **values,
        }
    )
