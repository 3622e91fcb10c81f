"""The journal: what is committed before a provider is asked to create a sandbox."""

from __future__ import annotations

import uuid

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now

from leases.models.accounts import ProviderAccount
from leases.models.lease import Lease
from leases.models.tenancy import Company


class Operation(models.Model):
    """One creation, owned from before the call until its sandbox is a lease's or proven gone.

    The identities of the environment, the run and the lease-to-be are plain values, so that they survive deletion and
    rebinding. `name` is derived from the operation's own id, so that no two incarnations share one. It holds references
    and never a secret, and no provider payload.
    """

    class State(models.TextChoices):
        PENDING = "pending", "the provider may have allocated a sandbox that no lease owns"
        ATTACHED = "attached", "a lease owns the sandbox"
        RESOLVED = "resolved", "nothing is owned any more, or nothing was ever allocated"

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    company = models.ForeignKey(Company, on_delete=models.PROTECT)
    account = models.ForeignKey(ProviderAccount, on_delete=models.PROTECT)
    environment_uuid = models.UUIDField()
    run_uuid = models.UUIDField(null=True, blank=True)
    issue_uuid = models.UUIDField(null=True, blank=True)
    lease_uuid = models.UUIDField(unique=True)
    lease = models.OneToOneField(Lease, null=True, blank=True, on_delete=models.PROTECT, related_name="operation")
    state = models.CharField(max_length=10, choices=State.choices, default=State.PENDING)

    name = models.CharField(max_length=63)
    marks = models.JSONField(default=dict)
    provider = models.CharField(max_length=50)
    endpoint = models.JSONField(default=dict)
    credential_reference = models.CharField(max_length=500, blank=True)
    account_identity = models.CharField(max_length=500)
    config = models.JSONField(default=dict)
    policy = models.CharField(max_length=40)
    drain_seconds = models.PositiveIntegerField(default=30)
    hourly_price = models.DecimalField(max_digits=10, decimal_places=4, null=True, blank=True)
    finds_by_name = models.BooleanField()
    creation_window = models.FloatField(help_text="Seconds during which a lost creation may still appear.")

    resource_id = models.CharField(max_length=200, blank=True)
    looks = models.PositiveIntegerField(default=0, help_text="Look-ups so far that did not find it.")
    created_at = models.DateTimeField(db_default=Now(), editable=False)
    cancelled_at = models.DateTimeField(null=True, blank=True)
    resolved_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["account", "name"], name="operation_name_is_unique"),
            models.CheckConstraint(condition=~Q(account_identity=""), name="operation_names_its_account"),
            models.CheckConstraint(
                condition=Q(state__in=["pending", "attached", "resolved"]), name="operation_state_is_known"
            ),
            models.CheckConstraint(
                condition=~Q(state="attached") | Q(lease__isnull=False), name="operation_attached_has_a_lease"
            ),
            models.CheckConstraint(
                condition=Q(state="resolved", resolved_at__isnull=False)
                | ~Q(state="resolved") & Q(resolved_at__isnull=True),
                name="operation_resolved_says_when",
            ),
        ]
        indexes = [
            models.Index(fields=["run_uuid"], condition=Q(state="pending"), name="operation_pending_of_run"),
            models.Index(fields=["-created_at"], name="operation_newest_first"),
        ]

    def __str__(self) -> str:
        return f"creation of {self.name} ({self.state})"
