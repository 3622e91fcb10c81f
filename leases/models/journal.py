"""The journal: what is committed before a provider is asked to create or to start a sandbox."""

from __future__ import annotations

import uuid

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now

from leases.models.accounts import ProviderAccount
from leases.models.environments import RETAIN_FOR, REUSE_IDLE_FOR
from leases.models.lease import Lease
from leases.models.tenancy import Company


class Operation(models.Model):
    """One creation or one start, owned from before the call until its sandbox is a lease's or proven gone.

    The identities of the environment, the run, the credential and the lease-to-be are plain values, so that they
    survive deletion and rebinding. `name` is derived from the creation's own id, so that no two incarnations share one.
    What the provider's contract says is recorded, so that it cannot change under a recovery. It holds references and
    never a secret, and no provider payload.

    A start names the stopped sandbox (`resource_id`) and the lease whose sandbox it was (`source`). While it is
    pending, no receipt of that sandbox is proof (`leases.proof`).
    """

    class Kind(models.TextChoices):
        CREATE = "create"
        START = "start"

    class State(models.TextChoices):
        PENDING = "pending", "the provider may have allocated or started a sandbox that no lease owns"
        ATTACHED = "attached", "a lease owns the sandbox"
        RESOLVED = "resolved", "nothing is owned any more, or nothing was ever allocated or started"
        UNVERIFIED = "unverified", "an operator ended the search; whether a sandbox exists is not known"

    UNOWNED = (State.PENDING, State.UNVERIFIED)
    """States in which no lease owns what the provider may have allocated or started."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    kind = models.CharField(max_length=10, choices=Kind.choices, default=Kind.CREATE)
    company = models.ForeignKey(Company, on_delete=models.PROTECT)
    account = models.ForeignKey(ProviderAccount, on_delete=models.PROTECT)
    environment_uuid = models.UUIDField()
    run_uuid = models.UUIDField(null=True, blank=True)
    issue_uuid = models.UUIDField(null=True, blank=True)
    lease_uuid = models.UUIDField()
    lease = models.ForeignKey(Lease, null=True, blank=True, on_delete=models.PROTECT, related_name="operations")
    source = models.ForeignKey(Lease, null=True, blank=True, on_delete=models.PROTECT, related_name="starts")
    recovery = models.ForeignKey(
        "leases.Recovery",
        null=True,
        blank=True,
        on_delete=models.PROTECT,
        related_name="operations",
        help_text="The generation whose attempt a start is; empty: an acquire's.",
    )
    state = models.CharField(max_length=10, choices=State.choices, default=State.PENDING)
    request_key = models.CharField(  # noqa: DJ001 - null where there is none, so that it can be unique
        max_length=200, null=True, blank=True, help_text="The caller's own name of its request: it is served once."
    )

    name = models.CharField(max_length=63)
    marks = models.JSONField(default=dict)
    provider = models.CharField(max_length=50)
    endpoint = models.JSONField(default=dict)
    credential_uuid = models.UUIDField(null=True, blank=True)
    credential_reference = models.CharField(max_length=500, blank=True)
    credential_digest = models.CharField(max_length=64, blank=True)
    account_identity = models.CharField(max_length=500)
    config = models.JSONField(default=dict)
    policy = models.CharField(max_length=40)
    scope = models.CharField(max_length=200, blank=True)
    fingerprint = models.CharField(max_length=64, blank=True)
    drain_seconds = models.PositiveIntegerField(default=30)
    reuse_idle_for = models.DurationField(default=REUSE_IDLE_FOR)
    retain_for = models.DurationField(null=True, blank=True, default=RETAIN_FOR)
    hourly_price = models.DecimalField(max_digits=10, decimal_places=4, null=True, blank=True)
    ends_at = models.DateTimeField(null=True, blank=True)

    finds_by_name = models.BooleanField()
    creation_window = models.FloatField(help_text="Seconds during which a lost creation may still appear.")
    proves_no_allocation = models.JSONField(
        default=list, help_text="Error kinds with which an answer may prove that nothing was allocated."
    )
    binding = models.CharField(max_length=200, blank=True, help_text="The adapter's own, opaque.")

    resource_id = models.CharField(max_length=200, blank=True)
    looks = models.PositiveIntegerField(default=0, help_text="Look-ups so far that did not find it.")
    created_at = models.DateTimeField(db_default=Now(), editable=False)
    call_ended_at = models.DateTimeField(
        null=True, blank=True, help_text="When it was known that nothing its caller asked for can still be done."
    )
    cancelled_at = models.DateTimeField(null=True, blank=True)
    outlived_at = models.DateTimeField(
        null=True, blank=True, help_text="When it was found that its caller does not get the sandbox."
    )
    resolved_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["account", "name"], condition=Q(kind="create"), name="operation_name_is_unique"
            ),
            models.UniqueConstraint(
                fields=["lease_uuid"], condition=Q(kind="create"), name="operation_creates_one_lease"
            ),
            models.UniqueConstraint(fields=["lease"], condition=Q(kind="create"), name="operation_created_its_lease"),
            models.UniqueConstraint(fields=["company", "request_key"], name="operation_serves_a_request_once"),
            models.UniqueConstraint(
                fields=["account", "resource_id"],
                condition=Q(kind="start", state="pending"),
                name="operation_is_the_only_start_of_its_sandbox",
            ),
            models.CheckConstraint(condition=Q(kind__in=["create", "start"]), name="operation_kind_is_known"),
            models.CheckConstraint(
                condition=Q(kind="create", source__isnull=True)
                | Q(kind="start", source__isnull=False) & ~Q(resource_id=""),
                name="operation_start_names_its_sandbox",
            ),
            models.CheckConstraint(
                condition=Q(recovery__isnull=True) | Q(kind="start"), name="operation_of_a_recovery_is_a_start"
            ),
            models.CheckConstraint(condition=~Q(account_identity=""), name="operation_names_its_account"),
            models.CheckConstraint(
                condition=Q(state__in=["pending", "attached", "resolved", "unverified"]),
                name="operation_state_is_known",
            ),
            models.CheckConstraint(
                condition=~Q(state="attached") | Q(lease__isnull=False), name="operation_attached_has_a_lease"
            ),
            models.CheckConstraint(
                condition=Q(state__in=["resolved", "unverified"], resolved_at__isnull=False)
                | ~Q(state__in=["resolved", "unverified"]) & Q(resolved_at__isnull=True),
                name="operation_resolved_says_when",
            ),
        ]
        indexes = [
            models.Index(fields=["run_uuid"], condition=Q(state="pending"), name="operation_pending_of_run"),
            # What became of all that a run asked for.
            models.Index(fields=["run_uuid"], condition=Q(run_uuid__isnull=False), name="operation_of_run"),
            models.Index(fields=["-created_at"], name="operation_newest_first"),
            # What a teardown asks before it believes a stop, and the end of a lease before it is over.
            models.Index(fields=["account", "resource_id"], condition=~Q(resource_id=""), name="operation_of_sandbox"),
        ]

    def __str__(self) -> str:
        return f"{'creation' if self.kind == self.Kind.CREATE else 'start'} of {self.name} ({self.state})"
