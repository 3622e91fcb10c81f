"""The audit log."""

from __future__ import annotations

from django.db import models
from django.db.models.functions import Now

from leases.models.tenancy import Company


class ActivityEntry(models.Model):
    """Who did what to which row. Append-only; written in the transaction of the change that it tells of."""

    id = models.BigAutoField(primary_key=True)
    company = models.ForeignKey(Company, null=True, blank=True, on_delete=models.PROTECT)
    at = models.DateTimeField(db_default=Now(), editable=False)
    actor = models.CharField(max_length=200)
    action = models.CharField(max_length=100, help_text="Dotted name, such as lease.released.")
    subject_type = models.CharField(max_length=40)
    subject_id = models.CharField(max_length=40)
    reason = models.CharField(max_length=500, blank=True)
    details = models.JSONField(default=dict, blank=True)

    class Meta:
        verbose_name_plural = "activity entries"
        indexes = [
            models.Index(fields=["subject_type", "subject_id", "at"], name="entry_of_subject"),
            models.Index(fields=["-at"], name="entry_newest_first"),
        ]

    def __str__(self) -> str:
        return f"{self.action} by {self.actor}"
