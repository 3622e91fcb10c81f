"""Continuation: a saved message or a retry that waits until a failed run is proven ended, and what it waits for.

The facts are the control plane's: it writes them through `leases.facts`. Null says that it never told one.
"""

from __future__ import annotations

import uuid

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now

from leases.models.recovery import Recovery
from leases.models.tenancy import Company, Issue, Run


class IssueFacts(models.Model):
    """What the control plane says about a task. One row per issue."""

    issue = models.OneToOneField(Issue, primary_key=True, on_delete=models.CASCADE, related_name="facts")
    is_open = models.BooleanField(null=True, blank=True)
    assignee = models.CharField(  # noqa: DJ001 - null: not told; empty: nobody
        max_length=200, null=True, blank=True, help_text="The agent that the task is assigned to."
    )
    decisions_pending = models.PositiveIntegerField(
        null=True, blank=True, help_text="How many approvals and questions wait for an answer."
    )
    told_at = models.DateTimeField(db_default=Now(), editable=False)

    class Meta:
        verbose_name_plural = "issue facts"

    def __str__(self) -> str:
        return f"facts of issue {self.issue_id}"


class RunFacts(models.Model):
    """What the control plane says about one execution. One row per run.

    `process_id` is kept for people and decides nothing: on a remote run it may be the number of any process here.
    """

    class Coordinator(models.TextChoices):
        """How far the control plane came with the result of the run."""

        SETTLING = "settling"
        RETRYABLE_FAILURE = "retryable_failure"
        TERMINAL_FAILURE = "terminal_failure"
        COMMITTED = "committed"

    run = models.OneToOneField(Run, primary_key=True, on_delete=models.CASCADE, related_name="facts")
    adapter_attached = models.BooleanField(
        null=True, blank=True, help_text="Whether the agent's adapter still controls the execution."
    )
    coordinator = models.CharField(max_length=20, choices=Coordinator.choices, blank=True)
    coordinator_owner = models.CharField(  # noqa: DJ001 - null: not told; empty: nobody
        max_length=200, null=True, blank=True, help_text="Who is at work on the result."
    )
    accepted_failed_result = models.BooleanField(
        null=True, blank=True, help_text="Whether a committed result is one that failed, and was accepted as that."
    )
    history_available = models.BooleanField(
        null=True, blank=True, help_text="Whether the history that a continuation needs can be read."
    )
    process_id = models.PositiveIntegerField(null=True, blank=True, help_text="Decides nothing.")
    told_at = models.DateTimeField(db_default=Now(), editable=False)

    class Meta:
        verbose_name_plural = "run facts"
        constraints = [
            models.CheckConstraint(
                condition=Q(coordinator__in=["", "settling", "retryable_failure", "terminal_failure", "committed"]),
                name="run_coordinator_is_known",
            )
        ]

    def __str__(self) -> str:
        return f"facts of run {self.run_id}"


class RecoveryAction(models.Model):
    """What the control plane opened because a run of an issue failed. While open, it blocks the issue's execution."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    company = models.ForeignKey(Company, on_delete=models.PROTECT)
    issue = models.ForeignKey(Issue, on_delete=models.PROTECT, related_name="recovery_actions")
    run = models.ForeignKey(Run, null=True, blank=True, on_delete=models.PROTECT, related_name="recovery_actions")
    cause = models.CharField(max_length=200)
    opened_at = models.DateTimeField(db_default=Now(), editable=False)
    closed_at = models.DateTimeField(null=True, blank=True)
    closed_by = models.CharField(max_length=200, blank=True)

    class Meta:
        constraints = [
            models.CheckConstraint(
                condition=Q(closed_at__isnull=True, closed_by="") | Q(closed_at__isnull=False) & ~Q(closed_by=""),
                name="recovery_action_is_closed_by_somebody",
            )
        ]
        indexes = [
            models.Index(fields=["issue"], condition=Q(closed_at__isnull=True), name="recovery_action_open"),
        ]

    def __str__(self) -> str:
        return self.cause


class Continuation(models.Model):
    """A retry of a failed run, or a message that was saved for it. Starts one run, by itself, when every gate is open.

    `hold` is the code of the first gate that was closed when it was last looked at. It waits exactly while its
    `start_continuation` obligation is open (trigger, checked at commit).
    """

    class Kind(models.TextChoices):
        RETRY = "retry", "retry of a named failed run"
        COMMENT = "comment", "a new comment of a user"
        QUEUED_MESSAGE = "queued_message", "a message that the server recorded as queued"

    class State(models.TextChoices):
        WAITING = "waiting"
        STARTED = "started"
        WITHDRAWN = "withdrawn"

    class Readiness(models.TextChoices):
        """In what workspace the run that it started begins."""

        SAME_WORKSPACE = "same_workspace", "as the environment reuses sandboxes"
        FILES_RECOVERED = "files_recovered", "the files of the failed run were saved"
        FRESH_ISOLATED_WORKSPACE = "fresh_isolated_workspace", "a fresh isolated workspace"

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    company = models.ForeignKey(Company, on_delete=models.PROTECT)
    issue = models.ForeignKey(Issue, on_delete=models.PROTECT, related_name="continuations")
    run = models.ForeignKey(
        Run, on_delete=models.PROTECT, related_name="continuations", help_text="The failed run that it continues."
    )
    kind = models.CharField(max_length=20, choices=Kind.choices)
    requested_by = models.CharField(max_length=200, help_text="The user.")
    message_id = models.CharField(max_length=200, blank=True, help_text="The control plane's own name of the message.")
    authored_at = models.DateTimeField(null=True, blank=True, help_text="When the message was written.")
    recovers_files = models.BooleanField(default=True, help_text="Whether the files are saved first.")
    recovery = models.ForeignKey(
        Recovery, null=True, blank=True, on_delete=models.PROTECT, related_name="continuations"
    )
    state = models.CharField(max_length=10, choices=State.choices, default=State.WAITING)
    hold = models.CharField(max_length=40, blank=True, help_text="The code of the gate that was closed.")
    hold_sentence = models.CharField(max_length=500, blank=True)
    readiness = models.CharField(max_length=30, choices=Readiness.choices, blank=True)
    started_run = models.ForeignKey(
        Run, null=True, blank=True, on_delete=models.PROTECT, related_name="started_by_continuations"
    )
    requested_at = models.DateTimeField(db_default=Now(), editable=False)
    evaluated_at = models.DateTimeField(null=True, blank=True)
    ended_at = models.DateTimeField(null=True, blank=True, help_text="When it started a run, or was withdrawn.")
    withdrawn_by = models.CharField(max_length=200, blank=True)

    class Meta:
        permissions = [("withdraw_continuation", "Can withdraw a continuation")]
        constraints = [
            models.CheckConstraint(
                condition=Q(state="waiting", started_run__isnull=True, readiness="", ended_at__isnull=True)
                | Q(state="started", started_run__isnull=False, ended_at__isnull=False, hold="") & ~Q(readiness="")
                | Q(state="withdrawn", started_run__isnull=True, readiness="", ended_at__isnull=False),
                name="continuation_starts_one_run",
            ),
            models.CheckConstraint(
                condition=Q(withdrawn_by="") ^ Q(state="withdrawn"), name="continuation_is_withdrawn_by_somebody"
            ),
            models.CheckConstraint(
                condition=Q(kind="retry", message_id="", authored_at__isnull=True)
                | Q(kind__in=["comment", "queued_message"], authored_at__isnull=False) & ~Q(message_id=""),
                name="continuation_message_says_when",
            ),
            models.UniqueConstraint(
                fields=["run"],
                condition=Q(kind="retry", state__in=["waiting", "started"]),
                name="continuation_retries_a_run_once",
            ),
            models.UniqueConstraint(
                fields=["company", "message_id"], condition=~Q(message_id=""), name="continuation_is_one_per_message"
            ),
        ]
        indexes = [
            models.Index(fields=["issue"], condition=Q(state="waiting"), name="continuation_waiting"),
        ]

    def __str__(self) -> str:
        return f"{self.get_kind_display()} ({self.state})"
