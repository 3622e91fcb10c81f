"""Retries and saved messages: what a user asks for after a run failed, kept until a run may go on from there.

A request is a `Continuation` row and the obligation behind it, written in one transaction under the locks of the task
and the run; asking again returns the same row. Whether it may start is decided by `leases.gates`, when and under which
locks by `cleanup.handlers.start_continuation`. What starting and holding write is here.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.db import IntegrityError, transaction
from django.db.models import QuerySet
from django.db.models.functions import Now

from leases import arguments, audit, companies, facts, retrying, transitions
from leases.clock import database_now
from leases.connections import despite_deadlocks
from leases.errors import ContinuationRefused, NotFound
from leases.gates import GATES
from leases.models import (
    Attempt,
    Company,
    Continuation,
    Issue,
    Obligation,
    Recovery,
    RecoveryAction,
    Run,
)
from leases.signals import continuation_started

Kind = Continuation.Kind
State = Continuation.State

CLOCKS_APART = 300.0
"""Seconds by which a control plane's clock may be ahead of the database's. A message of later than that is refused."""

SENTENCE_LIMIT = 500

_TRIED = (
    Obligation.Kind.TEARDOWN,
    Obligation.Kind.RECOVER_CREATION,
    Obligation.Kind.RECOVER_START,
    Obligation.Kind.VERIFY_END,
)
"""What a retry asks an attempt at: all that may prove the end of the run. Not the recovery of files, whose generation
has so many attempts and no more, nor what only waits for other rows."""


def request_retry(
    run_id: UUID, company_id: UUID, *, actor: str, by_user: bool, reason: str, recovers_files: bool = True
) -> Continuation:
    """Ask for a run that goes on from a failed one, and for one attempt now at all that the failed one still owes.

    The same run's retry is there once: asked for again it is returned as it is, started or not, and while it waits each
    request is one more attempt (domain 6.10). Where a saved message started the run that goes on, that is returned.
    `recovers_files`: the files of a kept sandbox are saved first; the last word on that counts while it waits.

    Raises `NotFound`, `LeaseError` (`invalid`), and `ContinuationRefused` (`not_a_user`, `no_issue`,
    `company_closed`). Nothing is written then.
    """
    run_id, company_id = _checked(run_id, company_id, actor, by_user=by_user, recovers_files=recovers_files)
    arguments.reason(reason, "a retry")
    asked = {"kind": Kind.RETRY, "requested_by": actor}
    made = despite_deadlocks(lambda: _once(run_id, company_id, asked, reason, recovers_files=recovers_files))
    if made.state == State.WAITING:
        retrying.retry_obligations(_owed_by(run_id, company_id), actor=actor, reason=reason)
    return made


def save_message(
    run_id: UUID,
    company_id: UUID,
    *,
    message_id: str,
    authored_at: datetime,
    actor: str,
    by_user: bool,
    queued: bool = False,
    recovers_files: bool = True,
) -> Continuation:
    """Keep a user's message until a run may go on from a failed one with it.

    `message_id` is the control plane's own name of it: saved again, the same row is returned, whatever became of it.
    `queued` says that the server had recorded it as queued while the run still worked; any other has to be written
    after the run's end.

    Raises `NotFound`, `LeaseError` (`invalid`), and `ContinuationRefused` (`not_a_user`, `no_issue`, `company_closed`,
    and `different_message` for another message under this name). Nothing is written then.
    """
    run_id, company_id = _checked(run_id, company_id, actor, by_user=by_user, recovers_files=recovers_files)
    arguments.name(message_id, "message_id", error=ContinuationRefused)
    arguments.flag(queued, "queued", error=ContinuationRefused)
    asked = {
        "kind": Kind.QUEUED_MESSAGE if queued else Kind.COMMENT,
        "requested_by": actor,
        "message_id": message_id,
        "authored_at": _moment(authored_at),
    }
    return despite_deadlocks(lambda: _once(run_id, company_id, asked, "", recovers_files=recovers_files))


def withdraw(continuation_id: UUID, company_id: UUID, *, actor: str, reason: str = "") -> Continuation:
    """Say that a waiting continuation is not wanted any more. Again, it changes nothing.

    Raises `NotFound`, `LeaseError` (`invalid`), and `ContinuationRefused` (`started`).
    """
    continuation_id = arguments.identity(continuation_id, "continuation_id")
    company_id = arguments.identity(company_id, "company_id")
    arguments.actor(actor)
    if reason:
        arguments.reason(reason, "a withdrawal")
    with transaction.atomic():
        issue = Continuation.objects.filter(pk=continuation_id, company_id=company_id).values("issue_id")
        list(Issue.objects.select_for_update(no_key=True).filter(pk__in=issue))
        row = Continuation.objects.filter(pk=continuation_id, company_id=company_id).first()
        if row is None:
            raise NotFound(f"no continuation {continuation_id} in this company")
        if row.state == State.STARTED:
            raise ContinuationRefused(f"it started the run {row.started_run_id} already", code="started")
        if row.state == State.WAITING:
            _close([row], Obligation.ClosedAs.NOTHING_OWED, Attempt.Outcome.NOTHING_OWED)
            _withdraw(row, actor=actor, reason=reason)
            row.refresh_from_db()
    return row


def withdraw_all(rows: QuerySet[Continuation], *, actor: str, reason: str, closed_as: Obligation.ClosedAs) -> int:
    """Withdraw what waits of these, in the caller's transaction; returns how many. For who closes a company or clones.

    The tasks are locked first, in the order of their ids.
    """
    waiting = rows.filter(state=State.WAITING)
    list(Issue.objects.select_for_update(no_key=True).filter(pk__in=waiting.values("issue_id")).order_by("pk"))
    found = list(waiting.order_by("pk"))
    _close(found, closed_as, Attempt.Outcome.NOTHING_OWED)
    for row in found:
        _withdraw(row, actor=actor, reason=reason)
    return len(found)


# What an admission writes. Its caller holds the locks of the task, its runs and their leases, and the obligations.


def start(
    continuations: Sequence[Continuation],
    *,
    source: Run,
    agent: str,
    readiness: Continuation.Readiness,
    recoveries: dict[UUID, Recovery | None],
    actions: Sequence[RecoveryAction],
) -> Run:
    """Queue the one run that these continuations of one task start, and close them and the actions that blocked it.

    How the agent is run is the control plane's to tell of the new run: the old one's adapter is that run's (S-256).
    """
    run = Run.objects.create(
        company_id=source.company_id,
        issue_id=source.issue_id,
        status=Run.Status.QUEUED,
        agent=agent,
        continues=source,
        fresh_workspace=readiness == Continuation.Readiness.FRESH_ISOLATED_WORKSPACE,
    )
    _close(continuations, Obligation.ClosedAs.PROVEN, Attempt.Outcome.PROVEN)
    for row in continuations:
        Continuation.objects.filter(pk=row.pk).update(
            state=State.STARTED,
            started_run=run,
            readiness=readiness,
            recovery=recoveries[row.pk],
            hold="",
            hold_sentence="",
            evaluated_at=Now(),
            ended_at=Now(),
        )
        audit.record(
            "continuation.started",
            row,
            company_id=row.company_id,
            run=str(run.pk),
            continues=str(source.pk),
            readiness=readiness.value,
        )
    for action in actions:
        facts.close(action, actor=f"run {run.pk}")
    ids = [row.pk for row in continuations]
    transaction.on_commit(
        lambda: continuation_started.send_robust(Continuation, run_id=run.pk, continuation_ids=ids), robust=True
    )
    return run


def hold(row: Continuation, code: str, sentence: str, recovery: Recovery | None) -> None:
    """Write why a continuation waits, where that changed."""
    sentence = sentence[:SENTENCE_LIMIT]
    bound = recovery.pk if recovery else None
    if (row.hold, row.hold_sentence, row.recovery_id) == (code, sentence, bound):
        return
    Continuation.objects.filter(pk=row.pk).update(
        hold=code, hold_sentence=sentence, recovery=recovery, evaluated_at=Now()
    )
    if row.hold != code or row.recovery_id != bound:
        audit.record(
            "continuation.held",
            row,
            company_id=row.company_id,
            hold=code,
            recovery=str(bound) if bound else None,
        )


def _withdraw(row: Continuation, *, actor: str, reason: str) -> None:
    Continuation.objects.filter(pk=row.pk).update(
        state=State.WITHDRAWN, withdrawn_by=actor, ended_at=Now(), hold="", hold_sentence=""
    )
    audit.record("continuation.withdrawn", row, company_id=row.company_id, actor=actor, reason=reason)


# Requests


def _checked(run_id: UUID, company_id: UUID, actor: str, *, by_user: bool, recovers_files: bool) -> tuple[UUID, UUID]:
    run_id = arguments.identity(run_id, "run_id", error=ContinuationRefused)
    company_id = arguments.identity(company_id, "company_id", error=ContinuationRefused)
    arguments.actor(actor, error=ContinuationRefused)
    arguments.flag(by_user, "by_user", error=ContinuationRefused)
    arguments.flag(recovers_files, "recovers_files", error=ContinuationRefused)
    if not by_user:
        raise ContinuationRefused(GATES[0].closed, code=GATES[0].code)
    return run_id, company_id


def _moment(value: object) -> datetime:
    if not isinstance(value, datetime) or value.tzinfo is None:
        raise ContinuationRefused("authored_at is a moment with a time zone", code="invalid")
    now = database_now()
    try:
        moment = value.astimezone(now.tzinfo)
    except OverflowError:
        raise ContinuationRefused("authored_at is a moment of this calendar", code="invalid") from None
    if moment > now + timedelta(seconds=CLOCKS_APART):
        raise ContinuationRefused("authored_at is a moment to come", code="invalid")
    return moment


def _once(run_id: UUID, company_id: UUID, asked: dict[str, Any], reason: str, *, recovers_files: bool) -> Continuation:
    """Return the continuation that was asked for, made now where it is not there yet."""
    with transaction.atomic():
        run = _locked(run_id, company_id)
        row = _again(run, asked)
        if row is None:
            try:
                with transaction.atomic():
                    row = _make(run, asked, recovers_files=recovers_files)
            except IntegrityError:  # the same message at the same moment, for another task
                row = _again(run, asked)
                if row is None:
                    raise
            else:
                audit.record(
                    "continuation.requested",
                    row,
                    company_id=company_id,
                    actor=row.requested_by,
                    reason=reason,
                    kind=row.kind,
                    run=str(run_id),
                    recovers_files=recovers_files,
                )
                return row
        if row.state == State.WAITING and row.recovers_files != recovers_files:
            _change_mind(row, recovers_files=recovers_files, actor=asked["requested_by"])
    return row


def _locked(run_id: UUID, company_id: UUID) -> Run:
    """Lock the company, shared, the task and the run, and return the run."""
    try:
        closed = companies.hold(company_id)
    except Company.DoesNotExist:
        raise NotFound(f"no run {run_id} in this company") from None
    issue = Run.objects.filter(pk=run_id, company_id=company_id).values("issue_id")
    locked = list(Issue.objects.select_for_update(no_key=True).filter(pk__in=issue))
    run = Run.objects.select_for_update(no_key=True).filter(pk=run_id, company_id=company_id).first()
    if run is None:
        raise NotFound(f"no run {run_id} in this company")
    if closed:
        raise ContinuationRefused("the company is closed", code="company_closed")
    if run.issue_id is None:
        raise ContinuationRefused("the run is of no task, so there is nothing to continue", code="no_issue")
    if run.issue_id not in {issue.pk for issue in locked}:
        raise ContinuationRefused("the run came to another task at this moment; ask again", code="no_issue")
    return run


def _again(run: Run, asked: dict[str, Any]) -> Continuation | None:
    """Return the row of the same request, if it was made before. Raises `ContinuationRefused`."""
    if asked["kind"] == Kind.RETRY:
        asked_for = Continuation.objects.filter(run=run).exclude(state=State.WITHDRAWN)
        # What a message started is the run that a retry would start: it is adopted (S-193).
        return asked_for.filter(kind=Kind.RETRY).first() or asked_for.filter(state=State.STARTED).first()
    row = Continuation.objects.filter(company_id=run.company_id, message_id=asked["message_id"]).first()
    if row is None:
        return None
    if row.run_id != run.pk or any(getattr(row, name) != value for name, value in asked.items()):
        raise ContinuationRefused("another message was saved under this id", code="different_message")
    return row


def _make(run: Run, asked: dict[str, Any], *, recovers_files: bool) -> Continuation:
    assert run.issue_id is not None  # noqa: S101 - `_locked` refused one of no task
    row = Continuation.objects.create(
        company_id=run.company_id, issue_id=run.issue_id, run=run, recovers_files=recovers_files, **asked
    )
    Obligation.objects.create(
        company_id=run.company_id, kind=Obligation.Kind.START_CONTINUATION, continuation=row, due_at=Now()
    )
    return row


def _change_mind(row: Continuation, *, recovers_files: bool, actor: str) -> None:
    """Take the last word on whether the files are saved first, which wakes the row (trigger)."""
    Continuation.objects.filter(pk=row.pk).update(recovers_files=recovers_files)
    audit.record("continuation.changed", row, company_id=row.company_id, actor=actor, recovers_files=recovers_files)
    row.refresh_from_db()


def _owed_by(run_id: UUID, company_id: UUID) -> list[int]:
    owed = Obligation.objects.filter(company_id=company_id, closed_at__isnull=True, kind__in=_TRIED)
    return [
        *owed.filter(lease__run_id=run_id).values_list("pk", flat=True),
        *owed.filter(operation__run_uuid=run_id).values_list("pk", flat=True),
    ]


def _close(rows: Sequence[Continuation], closed_as: Obligation.ClosedAs, outcome: Attempt.Outcome) -> None:
    """Close what waits for these, in the order of the rows. Whoever works on one of them has lost it."""
    owed = Obligation.objects.select_for_update(no_key=True).filter(
        continuation__in=[row.pk for row in rows], closed_at__isnull=True
    )
    for obligation in owed.order_by("pk"):
        transitions.end_attempt(obligation, outcome)
        transitions.close(obligation, closed_as)
