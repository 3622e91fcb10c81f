"""A lease, one use of one sandbox, and the work that goes through its bridge."""

from __future__ import annotations

import uuid

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now

from leases.models.accounts import ProviderAccount
from leases.models.environments import RETAIN_FOR, REUSE_IDLE_FOR, Environment, Policy
from leases.models.tenancy import Company, Issue, Run


class Lease(models.Model):
    """One use of one sandbox. `state` is written by `leases.transitions` alone.

    `provider`, `endpoint`, `credential_reference`, `account_identity` and `config` are a snapshot taken at acquisition:
    teardown works from them, never from the environment of the day. `epoch` counts confirmed starts of the sandbox; a
    receipt proves only the epoch it names. `expires_at` holds nothing but a deadline that the provider attested.
    `successor` is the lease that took the sandbox over; from then on this one is history.
    """

    class State(models.TextChoices):
        ACTIVE = "active"
        RELEASED = "released"
        RETAINED = "retained"
        PENDING_CLEANUP = "pending_cleanup", "pending cleanup"
        EXPIRED = "expired"
        FAILED = "failed"

    class Outcome(models.TextChoices):
        """How the use went, as its holder says on release."""

        SUCCEEDED = "succeeded"
        FAILED = "failed"

    KEPT = (State.RELEASED, State.RETAINED)
    """States in which a stopped sandbox is kept for its files. Each has an open `dispose`, which is its end."""

    LIVE = (State.ACTIVE, State.PENDING_CLEANUP, State.RETAINED)
    """States in which this lease is the owner of its sandbox; at most one such lease per sandbox."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    company = models.ForeignKey(Company, on_delete=models.PROTECT)
    environment = models.ForeignKey(Environment, null=True, blank=True, on_delete=models.SET_NULL)
    issue = models.ForeignKey(Issue, null=True, blank=True, on_delete=models.PROTECT)
    run = models.ForeignKey(Run, null=True, blank=True, on_delete=models.PROTECT)
    account = models.ForeignKey(ProviderAccount, on_delete=models.PROTECT)
    state = models.CharField(max_length=20, choices=State.choices)
    policy = models.CharField(max_length=40, choices=Policy.choices)
    outcome = models.CharField(max_length=10, choices=Outcome.choices, blank=True)
    reason = models.CharField(max_length=60, blank=True, help_text="Short code: why it left the active state.")

    provider = models.CharField(max_length=50)
    endpoint = models.JSONField(default=dict)
    credential_uuid = models.UUIDField(null=True, blank=True)
    credential_reference = models.CharField(max_length=500, blank=True)
    account_identity = models.CharField(max_length=500)
    config = models.JSONField(default=dict)
    drain_seconds = models.PositiveIntegerField(default=30)
    reuse_idle_for = models.DurationField(default=REUSE_IDLE_FOR)
    retain_for = models.DurationField(null=True, blank=True, default=RETAIN_FOR)
    hourly_price = models.DecimalField(max_digits=10, decimal_places=4, null=True, blank=True)

    resource_id = models.CharField(max_length=200)
    resource_name = models.CharField(max_length=63)
    epoch = models.PositiveIntegerField(default=1)
    started_as_of = models.DateTimeField(
        null=True,
        blank=True,
        help_text="The provider's own time of the last start it confirmed; what is older is stale.",
    )
    expires_at = models.DateTimeField(null=True, blank=True)
    ends_at = models.DateTimeField(null=True, blank=True, help_text="An ad-hoc lease is released then by itself.")
    scope = models.CharField(max_length=200, blank=True, help_text="What may use the sandbox again; empty: nothing.")
    fingerprint = models.CharField(max_length=64, blank=True, help_text="Digest of what the sandbox was made from.")
    successor = models.OneToOneField(
        "self", null=True, blank=True, on_delete=models.PROTECT, related_name="predecessor"
    )
    files_lost = models.BooleanField(default=False, help_text="Destroyed although its files were to be kept.")

    orphaned_at = models.DateTimeField(
        null=True,
        blank=True,
        help_text="When nobody held it any more: it is destroyed as soon as nothing needs its files.",
    )
    kept_until = models.DateTimeField(
        null=True, blank=True, help_text="When a kept sandbox is destroyed; empty: when an operator decides."
    )

    may_be_running_since = models.DateTimeField(
        null=True,
        blank=True,
        help_text="Since when the sandbox of a proven end may run again: a restart of it was never answered.",
    )

    acquired_at = models.DateTimeField(db_default=Now())
    released_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        constraints = [
            models.CheckConstraint(
                condition=Q(state__in=["active", "released", "retained", "pending_cleanup", "expired", "failed"]),
                name="lease_state_is_known",
            ),
            models.CheckConstraint(condition=Q(policy__in=Policy.values), name="lease_policy_is_known"),
            models.CheckConstraint(condition=Q(outcome__in=["", "succeeded", "failed"]), name="lease_outcome_is_known"),
            models.CheckConstraint(
                condition=Q(state="active", released_at__isnull=True)
                | ~Q(state="active") & Q(released_at__isnull=False),
                name="lease_is_active_until_released",
            ),
            models.CheckConstraint(condition=~Q(resource_id=""), name="lease_names_its_sandbox"),
            models.CheckConstraint(condition=~Q(account_identity=""), name="lease_names_its_account"),
            models.CheckConstraint(condition=Q(epoch__gte=1), name="lease_epoch_is_positive"),
            models.CheckConstraint(
                condition=Q(successor__isnull=True) | Q(state="expired"), name="lease_succeeded_is_expired"
            ),
            models.CheckConstraint(condition=Q(scope="") | Q(run__isnull=False), name="lease_of_no_run_is_not_reused"),
            models.CheckConstraint(
                condition=Q(ends_at__isnull=True) | Q(run__isnull=True), name="lease_that_ends_by_itself_is_ad_hoc"
            ),
            models.UniqueConstraint(
                fields=["account", "resource_id"],
                condition=Q(state__in=["active", "pending_cleanup", "retained"]),
                name="lease_is_the_only_live_one_of_its_sandbox",
            ),
        ]
        indexes = [
            models.Index(fields=["company", "state"], name="lease_company_state"),
            models.Index(fields=["resource_id"], name="lease_resource"),
            models.Index(fields=["-acquired_at"], name="lease_newest_first"),
            # The leases whose sandbox is not gone, among all that ever were: what the report reads.
            models.Index(
                fields=["id"],
                condition=Q(state__in=["active", "released", "retained", "pending_cleanup"]),
                name="lease_unsettled",
            ),
            # What an acquire looks for: a stopped sandbox of its scope, newest first.
            models.Index(
                fields=["company", "scope", "-released_at"],
                condition=Q(state="released") & ~Q(scope=""),
                name="lease_reusable",
            ),
        ]

    def __str__(self) -> str:
        return f"lease {self.id} ({self.get_state_display()})"


class BridgeActivity(models.Model):
    """One piece of accepted work between host and sandbox. Open until it ended; past its deadline it holds nothing.

    Work during a startup, before there is a lease, belongs to its operation.
    """

    class Kind(models.TextChoices):
        EXECUTE = "execute"
        SYNC = "sync"

    class Outcome(models.TextChoices):
        COMPLETED = "completed"
        FAILED = "failed"
        BACKED_OUT = "backed_out", "backed out: the lease was released before it began"
        LOST = "lost", "lost: nobody told its end, and its sandbox ended"

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    company = models.ForeignKey(Company, on_delete=models.PROTECT)
    lease = models.ForeignKey(Lease, null=True, blank=True, on_delete=models.PROTECT, related_name="activities")
    operation = models.ForeignKey(
        "leases.Operation", null=True, blank=True, on_delete=models.PROTECT, related_name="activities"
    )
    kind = models.CharField(max_length=10, choices=Kind.choices, default=Kind.EXECUTE)
    started_at = models.DateTimeField(db_default=Now())
    deadline = models.DateTimeField()
    ended_at = models.DateTimeField(null=True, blank=True)
    outcome = models.CharField(max_length=12, choices=Outcome.choices, blank=True)
    exit_code = models.IntegerField(null=True, blank=True)
    error_kind = models.CharField(max_length=20, blank=True)

    class Meta:
        verbose_name_plural = "bridge activities"
        constraints = [
            models.CheckConstraint(
                condition=Q(ended_at__isnull=True, outcome="")
                | Q(ended_at__isnull=False, outcome__in=["completed", "failed", "backed_out", "lost"]),
                name="activity_ends_with_an_outcome",
            ),
            models.CheckConstraint(
                condition=Q(lease__isnull=False, operation__isnull=True)
                | Q(lease__isnull=True, operation__isnull=False),
                name="activity_is_of_a_lease_or_a_startup",
            ),
        ]
        indexes = [
            models.Index(fields=["lease"], condition=Q(ended_at__isnull=True), name="activity_open"),
            models.Index(
                fields=["operation"],
                condition=Q(ended_at__isnull=True, operation__isnull=False),
                name="activity_open_of_startup",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.kind} in {self.lease_id or self.operation_id}"
