"""Receipts: the only proof that execution in a sandbox ended."""

from __future__ import annotations

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now

from leases.models.accounts import ProviderAccount
from leases.models.lease import Lease


class Receipt(models.Model):
    """What the provider confirmed about exactly one sandbox of one account, in one epoch. Append-only.

    A trigger refuses one that does not match its lease in every binding. The identities are plain values as well, so
    that a receipt outlives the rows it names.
    """

    class Evidence(models.TextChoices):
        STOPPED = "stopped"
        DESTROYED = "destroyed"
        ABSENT = "absent", "absent: gone, and the provider's second source agrees"

    class Ended(models.TextChoices):
        KILLED = "killed"
        SUSPENDED = "suspended"

    id = models.BigAutoField(primary_key=True)
    lease = models.ForeignKey(Lease, on_delete=models.PROTECT, related_name="receipts")
    account = models.ForeignKey(ProviderAccount, on_delete=models.PROTECT)
    company_uuid = models.UUIDField()
    run_uuid = models.UUIDField(null=True, blank=True)
    resource_id = models.CharField(max_length=200)
    account_identity = models.CharField(max_length=500)
    epoch = models.PositiveIntegerField()
    evidence = models.CharField(max_length=10, choices=Evidence.choices)
    ended = models.CharField(max_length=10, choices=Ended.choices, default=Ended.KILLED)
    attempt_id = models.UUIDField()
    confirmed_at = models.DateTimeField(db_default=Now(), editable=False)

    class Meta:
        constraints = [
            models.CheckConstraint(
                condition=Q(evidence__in=["stopped", "destroyed", "absent"]), name="receipt_evidence_is_known"
            ),
            models.CheckConstraint(
                condition=Q(ended="killed") | Q(ended="suspended", evidence="stopped"),
                name="receipt_only_a_stopped_sandbox_is_suspended",
            ),
            # A settle that is repeated after an ambiguous commit writes nothing twice.
            models.UniqueConstraint(fields=["attempt_id", "epoch", "evidence"], name="receipt_is_one_per_finding"),
        ]
        indexes = [
            models.Index(fields=["lease", "epoch"], name="receipt_of_epoch"),
            models.Index(fields=["-confirmed_at"], name="receipt_newest_first"),
        ]

    def __str__(self) -> str:
        return f"{self.evidence} (epoch {self.epoch}) of {self.resource_id}"
