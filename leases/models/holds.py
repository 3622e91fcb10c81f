"""Holds: that somebody still needs a stopped sandbox, as a row. What else needs one says so in rows of its own."""

from __future__ import annotations

import uuid

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now

from leases.models.lease import Lease
from leases.models.tenancy import Company, Issue


class Hold(models.Model):
    """Somebody needs a lease, or every kept lease of an issue. Which rows count, and until when: `leases.holds`.

    An `always` hold stands until it is ended or its `until` has passed. A `soft` one counts only while the stopped
    sandbox is a usable source, that is until the provider's own `expires_at`.
    """

    class Strength(models.TextChoices):
        ALWAYS = "always"
        SOFT = "soft"

    class Kind(models.TextChoices):
        EXPORT_RESUME = "export_resume", "an export that resumes it is under way"
        RESTORE_RECOVERY = "restore_recovery", "its files are still to be restored"
        RECOVERY_CLEANUP = "recovery_cleanup", "the clean-up of a recovery refers to it"
        RECOVERY_SOURCE = "recovery_source", "a recovery reads from it"
        SHUTDOWN_FENCE = "shutdown_fence", "its controller went down and may still save it"
        OPERATOR = "operator", "an operator keeps it"
        EXPORT = "export", "an export is waiting for it"
        PRESERVATION = "preservation", "its files are being preserved"
        RECOVERY_ACTION = "recovery_action", "a recovery action is open"

    SOFT_KINDS = (Kind.EXPORT, Kind.PRESERVATION, Kind.RECOVERY_ACTION)

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    company = models.ForeignKey(Company, on_delete=models.PROTECT)
    lease = models.ForeignKey(Lease, null=True, blank=True, on_delete=models.PROTECT, related_name="holds")
    issue = models.ForeignKey(Issue, null=True, blank=True, on_delete=models.PROTECT, related_name="holds")
    kind = models.CharField(max_length=20, choices=Kind.choices)
    strength = models.CharField(max_length=6, choices=Strength.choices)
    holder = models.CharField(max_length=200, help_text="Who needs it.")
    reason = models.CharField(max_length=500, blank=True)
    until = models.DateTimeField(null=True, blank=True, help_text="When it ends by itself; empty: when it is ended.")
    created_at = models.DateTimeField(db_default=Now(), editable=False)
    ended_at = models.DateTimeField(null=True, blank=True)
    ended_by = models.CharField(max_length=200, blank=True)

    class Meta:
        constraints = [
            models.CheckConstraint(
                condition=Q(lease__isnull=False, issue__isnull=True) | Q(lease__isnull=True, issue__isnull=False),
                name="hold_is_on_a_lease_or_an_issue",
            ),
            models.CheckConstraint(
                condition=Q(
                    kind__in=[
                        "export_resume",
                        "restore_recovery",
                        "recovery_cleanup",
                        "recovery_source",
                        "shutdown_fence",
                        "operator",
                    ],
                    strength="always",
                )
                | Q(kind__in=["export", "preservation", "recovery_action"], strength="soft"),
                name="hold_has_the_strength_of_its_kind",
            ),
            # What has an end of its own is reviewed then; a person or a process that is gone ends nothing.
            models.CheckConstraint(
                condition=~Q(kind__in=["operator", "shutdown_fence"]) | Q(until__isnull=False),
                name="hold_is_reviewed_or_ended",
            ),
            models.CheckConstraint(
                condition=~Q(kind="shutdown_fence") | Q(lease__isnull=False), name="hold_that_fences_is_on_a_lease"
            ),
            models.CheckConstraint(
                condition=Q(ended_at__isnull=True, ended_by="") | Q(ended_at__isnull=False) & ~Q(ended_by=""),
                name="hold_is_ended_by_somebody",
            ),
            models.UniqueConstraint(
                fields=["lease", "kind", "holder"],
                condition=Q(ended_at__isnull=True, lease__isnull=False),
                name="hold_is_one_per_lease_kind_and_holder",
            ),
            models.UniqueConstraint(
                fields=["issue", "kind", "holder"],
                condition=Q(ended_at__isnull=True, issue__isnull=False),
                name="hold_is_one_per_issue_kind_and_holder",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.get_kind_display()} ({self.holder})"
