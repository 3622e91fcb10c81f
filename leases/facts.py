"""What the control plane tells about its tasks and runs, as rows that gates are decided by (`leases.gates`).

Each fact is changed under the lock of what it is about, only where it is named, and audited. One that was never told,
or was taken back with None, keeps its gate closed. Every change wakes what waits for it, in the database. Telling the
same again writes nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, Final
from uuid import UUID

from django.db import models, transaction
from django.db.models.functions import Now

from leases import arguments, audit, holds
from leases.errors import LeaseError, NotFound
from leases.models import Hold, Issue, IssueFacts, RecoveryAction, Run, RunFacts

LARGEST = 2_147_483_647
"""The largest number that a column of numbers holds."""

ADAPTER_LIMIT = 50


class NotNamed(enum.Enum):
    """Stands for a fact that a call does not speak of."""

    NOT_NAMED = enum.auto()


NOT_NAMED: Final = NotNamed.NOT_NAMED


def tell_issue(
    issue_id: UUID,
    company_id: UUID,
    *,
    is_open: bool | NotNamed | None = NOT_NAMED,
    assignee: str | NotNamed | None = NOT_NAMED,
    decisions_pending: int | NotNamed | None = NOT_NAMED,
    actor: str = "api",
) -> IssueFacts:
    """Say what is so of a task: whether it is open, whose it is ("": nobody's), how many decisions are pending.

    What is not named stays as it is; None takes it back. Raises `NotFound`, and `LeaseError` (`invalid`).
    """
    issue_id = arguments.identity(issue_id, "issue_id")
    company_id = arguments.identity(company_id, "company_id")
    arguments.actor(actor)
    told = _named(
        is_open=(is_open, arguments.flag),
        assignee=(assignee, _name_or_nobody),
        decisions_pending=(decisions_pending, _count),
    )
    with transaction.atomic():
        issue = _locked_issue(issue_id, company_id)
        facts, _ = IssueFacts.objects.get_or_create(issue=issue)
        if changed := _write(facts, told):
            audit.record("issue.told", issue, company_id=company_id, actor=actor, **changed)
    return facts


def tell_run(  # noqa: PLR0913 - one keyword for each fact
    run_id: UUID,
    company_id: UUID,
    *,
    agent: str | NotNamed = NOT_NAMED,
    adapter: str | NotNamed = NOT_NAMED,
    adapter_attached: bool | NotNamed | None = NOT_NAMED,
    coordinator: str | NotNamed | None = NOT_NAMED,
    coordinator_owner: str | NotNamed | None = NOT_NAMED,
    accepted_failed_result: bool | NotNamed | None = NOT_NAMED,
    history_available: bool | NotNamed | None = NOT_NAMED,
    process_id: int | NotNamed | None = NOT_NAMED,
    actor: str = "api",
) -> RunFacts:
    """Say what is so of an execution. What is not named stays as it is; None takes it back.

    `agent` and `adapter` are final once told (S-256: an agent that is run differently from now on makes no other run of
    an old one). `coordinator` is one of `RunFacts.Coordinator`; `coordinator_owner` is "" where nobody is at work on
    the result. `process_id` decides nothing.

    Raises `NotFound`, and `LeaseError`: `invalid`, or `final` for another agent or adapter than the run's.
    """
    run_id = arguments.identity(run_id, "run_id")
    company_id = arguments.identity(company_id, "company_id")
    arguments.actor(actor)
    of_run = _named(agent=(agent, arguments.name), adapter=(adapter, _adapter))
    if None in of_run.values():
        raise LeaseError("whose run it is, and how it is run, cannot be taken back", code="final")
    told = _named(
        adapter_attached=(adapter_attached, arguments.flag),
        coordinator=(coordinator, _coordinator),
        coordinator_owner=(coordinator_owner, _name_or_nobody),
        accepted_failed_result=(accepted_failed_result, arguments.flag),
        history_available=(history_available, arguments.flag),
        process_id=(process_id, _count),
    )
    if told.get("coordinator", "") is None:
        told["coordinator"] = ""
    with transaction.atomic():
        issue = Run.objects.filter(pk=run_id, company_id=company_id).values("issue_id")
        list(Issue.objects.select_for_update(no_key=True).filter(pk__in=issue))
        run = Run.objects.select_for_update(no_key=True).filter(pk=run_id, company_id=company_id).first()
        if run is None:
            raise NotFound(f"no run {run_id} in this company")
        for name, value in of_run.items():
            if getattr(run, name) not in ("", value):
                raise LeaseError(f"the run's {name} is {getattr(run, name)}, for good", code="final")
        facts, _ = RunFacts.objects.get_or_create(run=run)
        if changed := _write(run, of_run) | _write(facts, told):
            audit.record("run.told", run, company_id=company_id, actor=actor, **changed)
    return facts


def open_recovery_action(
    issue_id: UUID, company_id: UUID, *, run_id: UUID | None, cause: str, actor: str = "api"
) -> RecoveryAction:
    """Say that a run of a task failed, and that its execution is blocked until this is resolved.

    Until then the kept sandboxes of the task are held, softly (`leases.holds`). The same action that is open already
    (task, run, cause) is returned. Raises `NotFound`, and `LeaseError` (`invalid`).
    """
    issue_id = arguments.identity(issue_id, "issue_id")
    company_id = arguments.identity(company_id, "company_id")
    run_id = arguments.identity(run_id, "run_id") if run_id is not None else None
    arguments.actor(actor)
    arguments.name(cause, "a cause")
    with transaction.atomic():
        issue = _locked_issue(issue_id, company_id)
        run = Run.objects.filter(pk=run_id, company_id=company_id).first() if run_id is not None else None
        if run_id is not None and run is None:
            raise NotFound(f"no run {run_id} in this company")
        action, created = RecoveryAction.objects.get_or_create(
            company_id=company_id, issue=issue, run=run, cause=cause, closed_at=None
        )
        if created:
            audit.record(
                "recovery_action.opened",
                action,
                company_id=company_id,
                actor=actor,
                cause=cause,
                issue=str(issue_id),
                run=str(run_id) if run_id else None,
            )
            holds.hold(
                company_id=company_id,
                kind=Hold.Kind.RECOVERY_ACTION,
                holder=_holder(action),
                issue_id=issue_id,
                actor=actor,
            )
    return action


def close_recovery_action(action_id: UUID, company_id: UUID, *, actor: str = "api", reason: str = "") -> RecoveryAction:
    """Say that a recovery action is resolved. Closing it again changes nothing.

    Raises `NotFound`, and `LeaseError` (`invalid`).
    """
    action_id = arguments.identity(action_id, "action_id")
    company_id = arguments.identity(company_id, "company_id")
    arguments.actor(actor)
    if reason:
        arguments.reason(reason, "closing a recovery action")
    with transaction.atomic():
        issue = RecoveryAction.objects.filter(pk=action_id, company_id=company_id).values("issue_id")
        list(Issue.objects.select_for_update(no_key=True).filter(pk__in=issue))
        action = RecoveryAction.objects.filter(pk=action_id, company_id=company_id).first()
        if action is None:
            raise NotFound(f"no recovery action {action_id} in this company")
        close(action, actor=actor, reason=reason)
    action.refresh_from_db()
    return action


def close(action: RecoveryAction, *, actor: str, reason: str = "") -> None:
    """Close an action whose issue is locked, if it is open, and end what it held."""
    open_ones = RecoveryAction.objects.filter(pk=action.pk, closed_at__isnull=True)
    if not open_ones.update(closed_at=Now(), closed_by=actor):
        return
    audit.record("recovery_action.closed", action, company_id=action.company_id, actor=actor, reason=reason)
    held = Hold.objects.filter(kind=Hold.Kind.RECOVERY_ACTION, holder=_holder(action), ended_at__isnull=True)
    for hold_id in held.filter(issue_id=action.issue_id).values_list("pk", flat=True):
        holds.end(hold_id, company_id=action.company_id, actor=actor, reason=reason)


def _holder(action: RecoveryAction) -> str:
    return f"recovery action {action.pk}"


def _locked_issue(issue_id: UUID, company_id: UUID) -> Issue:
    issue = Issue.objects.select_for_update(no_key=True).filter(pk=issue_id, company_id=company_id).first()
    if issue is None:
        raise NotFound(f"no issue {issue_id} in this company")
    return issue


def _named(**facts: tuple[Any, Callable[[Any, str], Any]]) -> dict[str, Any]:
    """Return the facts that a call names, each checked; None stays None."""
    return {
        name: None if value is None else check(value, name)
        for name, (value, check) in facts.items()
        if value is not NOT_NAMED
    }


def _write(row: models.Model, told: dict[str, Any]) -> dict[str, Any]:
    """Write what differs from a locked row, and return it."""
    changed = {name: value for name, value in told.items() if getattr(row, name) != value}
    if changed:
        when = {"told_at": Now()} if isinstance(row, IssueFacts | RunFacts) else {}
        type(row)._default_manager.filter(pk=row.pk).update(**changed, **when)  # noqa: SLF001 - documented API of Django
        row.refresh_from_db()
    return changed


def _name_or_nobody(value: object, what: str) -> str:
    return "" if value == "" else arguments.name(value, what)


def _adapter(value: object, what: str) -> str:
    return arguments.name(value, what, limit=ADAPTER_LIMIT)


def _count(value: object, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LARGEST:
        raise LeaseError(f"{what} is a whole number from 0 to {LARGEST}", code="invalid")
    return value


def _coordinator(value: object, what: str) -> str:
    if not isinstance(value, str) or value not in RunFacts.Coordinator.values:
        raise LeaseError(f"{what} is one of {', '.join(RunFacts.Coordinator.values)}", code="invalid")
    return str(value)
