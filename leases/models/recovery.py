"""Recovery of files: a generation of attempts to reopen a stopped sandbox, and the archives that it saved."""

from __future__ import annotations

import uuid

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now

from leases.models.lease import BridgeActivity, Lease
from leases.models.receipts import Receipt
from leases.models.tenancy import Company


class Recovery(models.Model):
    """One generation: at most six attempts, within half an hour, to reopen a stopped sandbox and save its files.

    It runs exactly while the `recover_workspace` obligation of its lease is open (trigger, checked at commit). Guarded
    by the lease's lock. An exhausted one says to use an alternative: whoever needed the files goes on without them.
    """

    class State(models.TextChoices):
        RUNNING = "running"
        COMPLETE = "complete", "complete: the files are saved"
        EXHAUSTED = "exhausted", "exhausted: the work goes on without the files"

    class Failure(models.TextChoices):
        SOURCE_UNAVAILABLE = "source_unavailable", "the sandbox cannot run any more, or is gone"
        WORKSPACE_MISSING = "workspace_missing", "the workspace is not in the sandbox"
        ARCHIVE_TOO_LARGE = "archive_too_large", "the workspace is larger than an archive may be"
        PROVIDER_UNAVAILABLE = "provider_unavailable", "the provider could not do it"
        STORAGE_UNAVAILABLE = "storage_unavailable", "the archive could not be written"
        STOPPED = "stopped", "somebody stopped it"

    FINAL = (Failure.SOURCE_UNAVAILABLE, Failure.WORKSPACE_MISSING, Failure.ARCHIVE_TOO_LARGE, Failure.STOPPED)
    """Failures that another attempt could only repeat."""

    class Disposition(models.TextChoices):
        RETRY = "retry", "try again"
        USE_ALTERNATIVE_STRATEGY = "use_alternative_strategy", "go on without the files"

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    company = models.ForeignKey(Company, on_delete=models.PROTECT)
    lease = models.ForeignKey(Lease, on_delete=models.PROTECT, related_name="recoveries")
    generation = models.PositiveIntegerField()
    state = models.CharField(max_length=10, choices=State.choices, default=State.RUNNING)
    requested_by = models.CharField(max_length=200)
    reason = models.CharField(max_length=500, blank=True, help_text="Why a person asked for it.")
    workspace = models.CharField(
        max_length=1000, blank=True, default="", help_text="The directory to save; empty: as the lease recorded it."
    )
    attempts = models.PositiveSmallIntegerField(default=0, help_text="How often the sandbox was asked to start.")
    started_at = models.DateTimeField(db_default=Now(), editable=False)
    ends_at = models.DateTimeField(help_text="No attempt begins after that.")
    next_attempt_at = models.DateTimeField(null=True, blank=True)
    restarted_epoch = models.PositiveIntegerField(
        null=True, blank=True, help_text="The epoch that its last confirmed restart began."
    )
    activity = models.ForeignKey(
        BridgeActivity, null=True, blank=True, on_delete=models.PROTECT, related_name="+", editable=False
    )
    failure = models.CharField(max_length=20, choices=Failure.choices, blank=True)
    disposition = models.CharField(max_length=30, choices=Disposition.choices, blank=True)
    error_kind = models.CharField(max_length=20, blank=True)
    error_excerpt = models.CharField(max_length=300, blank=True)
    finished_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        verbose_name_plural = "recoveries"
        permissions = [("recover_files", "Can recover the files of a sandbox again")]
        constraints = [
            models.CheckConstraint(
                condition=Q(state="running", finished_at__isnull=True)
                | Q(state__in=["complete", "exhausted"], finished_at__isnull=False),
                name="recovery_ends_in_a_state",
            ),
            models.CheckConstraint(
                condition=Q(failure="", disposition="")
                | Q(
                    failure__in=[
                        "source_unavailable",
                        "workspace_missing",
                        "archive_too_large",
                        "provider_unavailable",
                        "storage_unavailable",
                        "stopped",
                    ],
                    disposition__in=["retry", "use_alternative_strategy"],
                ),
                name="recovery_failure_has_a_disposition",
            ),
            models.CheckConstraint(
                condition=~Q(state="exhausted") | Q(disposition="use_alternative_strategy"),
                name="recovery_exhausted_says_what_to_do",
            ),
            models.CheckConstraint(condition=Q(attempts__lte=6), name="recovery_tries_six_times"),
            models.UniqueConstraint(fields=["lease", "generation"], name="recovery_generation_is_one"),
            models.UniqueConstraint(fields=["lease"], condition=Q(state="running"), name="recovery_is_one_per_lease"),
        ]

    def __str__(self) -> str:
        return f"recovery {self.generation} of lease {self.lease_id} ({self.state})"


class Archive(models.Model):
    """The files of a workspace, as one attempt read them. Offered only when it is whole and its sandbox proven ended.

    `name` is its name in the file storage. The row is there before the first byte is, so that what is half-written has
    somebody who removes it. `receipt` is that of the stop after the saving.
    """

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    company = models.ForeignKey(Company, on_delete=models.PROTECT)
    lease = models.ForeignKey(Lease, on_delete=models.PROTECT, related_name="archives")
    recovery = models.ForeignKey(Recovery, on_delete=models.PROTECT, related_name="archives")
    attempt_id = models.UUIDField(unique=True)
    epoch = models.PositiveIntegerField()
    path = models.CharField(max_length=1000, help_text="The directory in the sandbox.")
    name = models.CharField(max_length=300, unique=True)
    begun_at = models.DateTimeField(db_default=Now(), editable=False)
    size = models.PositiveBigIntegerField(null=True, blank=True, help_text="Bytes.")
    sha256 = models.CharField(max_length=64, blank=True)
    saved_at = models.DateTimeField(null=True, blank=True, help_text="When it was whole in the storage.")
    receipt = models.ForeignKey(Receipt, null=True, blank=True, on_delete=models.PROTECT, related_name="archives")
    removed_at = models.DateTimeField(null=True, blank=True, help_text="When the file was removed from the storage.")

    class Meta:
        constraints = [
            models.CheckConstraint(
                condition=Q(saved_at__isnull=True, size__isnull=True, sha256="")
                | Q(saved_at__isnull=False, size__isnull=False) & ~Q(sha256=""),
                name="archive_is_saved_whole",
            ),
            models.CheckConstraint(
                condition=Q(receipt__isnull=True) | Q(saved_at__isnull=False), name="archive_is_sealed_when_saved"
            ),
        ]
        permissions = [("download_archive", "Can download archive")]

    def __str__(self) -> str:
        return f"archive of {self.lease_id} ({'whole' if self.saved_at else 'not whole'})"
