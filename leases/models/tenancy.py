"""Whose the work is: the installation, the tenants, and the work items that sandboxes are rented for."""

from __future__ import annotations

import uuid

from django.core.exceptions import ValidationError
from django.db import models
from django.db.models import Q
from django.db.models.functions import Now


class Installation(models.Model):
    """This installation, one row, made at its first use: its identity, and what is true of the whole fleet.

    Every sandbox of ours carries `mark`. It changes only when a copy of the database is declared a clone, whose
    sandboxes are then its own. `hinted_until` is the hint of the built-in lane, which the obligations that call no
    provider share. The high-water mark (`watermark_*`) is what this database remembers of how far it was written;
    `cleanup.watermark` compares it with what is kept outside.
    """

    class Observing(models.TextChoices):
        """Why nothing is trusted that this database says: a person has to say what it is."""

        BEHIND = "behind", "an older state of this database was restored"
        ANOTHER_SERVER = "another_server", "this is not the server, or the database, that the mark was made in"
        MARKS_LOST = "marks_lost", "no mark is left outside this database, and its server was started anew"

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    only = models.BooleanField(default=True, unique=True, editable=False)
    mark = models.UUIDField(default=uuid.uuid4, editable=False)
    hinted_until = models.DateTimeField(null=True, blank=True, editable=False)
    gap_ended_at = models.DateTimeField(
        null=True,
        blank=True,
        help_text="When holds could be renewed again after an outage of ours: each stands one full length from then.",
    )
    calm_until = models.DateTimeField(
        null=True, blank=True, help_text="Until then no hold lapses and no inventory deletes (after a failover)."
    )

    watermark_generation = models.PositiveBigIntegerField(
        default=0,
        db_default=0,
        editable=False,
        help_text="When a person last said to trust this database, in seconds since 1970; 0: never.",
    )
    watermark_identity = models.CharField(
        max_length=60,
        blank=True,
        default="",
        db_default="",
        editable=False,
        help_text="The server's system identifier, and the database's oid.",
    )
    watermark_timeline = models.BigIntegerField(null=True, blank=True, editable=False)
    watermark_position = models.BigIntegerField(
        null=True, blank=True, editable=False, help_text="Bytes of write-ahead log, as of the beat's last look."
    )
    watermark_at = models.DateTimeField(null=True, blank=True, editable=False)
    watermark_outside = models.BooleanField(
        default=False,
        db_default=False,
        editable=False,
        help_text="The mark was once kept outside too, so its absence there is telling.",
    )
    judged_server = models.CharField(
        max_length=120,
        blank=True,
        default="",
        db_default="",
        editable=False,
        help_text="The start of the server that was last judged as ours.",
    )
    observing_since = models.DateTimeField(null=True, blank=True, editable=False)
    observing_why = models.CharField(
        max_length=20, choices=Observing.choices, blank=True, default="", db_default="", editable=False
    )
    observed_mark_at = models.DateTimeField(
        null=True, blank=True, editable=False, help_text="What was released after it may be torn down while observing."
    )
    lapse_asked_at = models.DateTimeField(
        null=True,
        blank=True,
        editable=False,
        help_text="Since when a person is asked why so many controllers lapsed at once; meanwhile none is settled.",
    )
    lapse_put_off_at = models.DateTimeField(
        null=True,
        blank=True,
        editable=False,
        help_text="When a look that came a little late settled nothing, and left those who lapsed the time to renew.",
    )
    lapse_answered_at = models.DateTimeField(
        null=True, blank=True, editable=False, help_text="When a person last said what a mass lapse was."
    )

    class Meta:
        constraints = [
            models.CheckConstraint(condition=Q(only=True), name="installation_is_one_row"),
            models.CheckConstraint(
                condition=Q(observing_since__isnull=True, observed_mark_at__isnull=True, observing_why="")
                | Q(observing_since__isnull=False, observed_mark_at__isnull=False) & ~Q(observing_why=""),
                name="installation_observes_for_a_reason",
            ),
            models.CheckConstraint(
                condition=Q(watermark_position__isnull=True, watermark_at__isnull=True, watermark_timeline__isnull=True)
                | Q(watermark_position__isnull=False, watermark_at__isnull=False, watermark_timeline__isnull=False),
                name="installation_watermark_is_whole",
            ),
        ]

    def __str__(self) -> str:
        return str(self.mark)

    @classmethod
    def current(cls) -> Installation:
        """Return this installation. Two processes that make it at once get the same row (`only` is unique)."""
        return cls.objects.get_or_create(only=True)[0]


class Company(models.Model):
    """The tenant. Every other row belongs to one, and a match across companies is refused everywhere."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    name = models.CharField(max_length=200, blank=True)
    created_at = models.DateTimeField(db_default=Now(), editable=False)
    closed_at = models.DateTimeField(null=True, blank=True, help_text="Set when closed: admits nothing new.")

    class Meta:
        verbose_name_plural = "companies"

    def __str__(self) -> str:
        return self.name or f"closed company {self.id}"

    def clean(self) -> None:
        if not self.name and self.closed_at is None:  # only what a closed company leaves behind may be nameless
            raise ValidationError({"name": "an open company needs a name"})


class Issue(models.Model):
    """The work item that runs belong to."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    company = models.ForeignKey(Company, on_delete=models.PROTECT)
    title = models.CharField(max_length=300)
    created_at = models.DateTimeField(db_default=Now(), editable=False)

    def __str__(self) -> str:
        return self.title


class Run(models.Model):
    """One execution of a work item. Live runs hold their leases; a terminal status proves nothing about a sandbox."""

    class Status(models.TextChoices):
        QUEUED = "queued"
        SCHEDULED_RETRY = "scheduled_retry"
        RUNNING = "running"
        SUCCEEDED = "succeeded"
        INTERRUPTED = "interrupted"
        FAILED = "failed"
        CANCELLED = "cancelled"
        TIMED_OUT = "timed_out"

    LIVE = (Status.QUEUED, Status.SCHEDULED_RETRY, Status.RUNNING)

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    company = models.ForeignKey(Company, on_delete=models.PROTECT)
    issue = models.ForeignKey(Issue, null=True, blank=True, on_delete=models.PROTECT)
    status = models.CharField(max_length=20, choices=Status.choices, default=Status.QUEUED)
    agent = models.CharField(max_length=200, blank=True, help_text="Who works: the control plane's name of the agent.")
    adapter = models.CharField(
        max_length=50, blank=True, help_text="How the agent is run, as the control plane says; final once told."
    )
    continues = models.ForeignKey(
        "self",
        null=True,
        blank=True,
        on_delete=models.PROTECT,
        related_name="continued_by",
        help_text="The failed run that this one goes on from.",
    )
    fresh_workspace = models.BooleanField(
        default=False, help_text="It begins in a new sandbox, and gets none that another run left."
    )
    controller_id = models.CharField(max_length=200, blank=True)
    controller_generation = models.PositiveIntegerField(default=0)
    controller_seconds = models.PositiveIntegerField(
        null=True, blank=True, help_text="Seconds: the length of the controller's hold, which each renewal gives anew."
    )
    controller_expires_at = models.DateTimeField(null=True, blank=True)
    controller_gave_up_at = models.DateTimeField(
        null=True,
        blank=True,
        help_text="When the controller gave the run up: another may take it before the hold ends.",
    )
    cancel_acknowledged_at = models.DateTimeField(
        null=True, blank=True, help_text="When the control plane took note that a cancelled startup came to its end."
    )
    cancel_requested_at = models.DateTimeField(
        null=True, blank=True, help_text="When the run's cancellation was asked for."
    )
    cancel_confirmed_at = models.DateTimeField(
        null=True, blank=True, help_text="When the execution of the cancelled run was proven ended."
    )
    restore_failed_at = models.DateTimeField(
        null=True, blank=True, help_text="When a shutdown fence ended before the files were saved."
    )
    created_at = models.DateTimeField(db_default=Now(), editable=False)
    finished_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        constraints = [
            models.CheckConstraint(
                condition=Q(
                    status__in=[
                        "queued",
                        "scheduled_retry",
                        "running",
                        "succeeded",
                        "interrupted",
                        "failed",
                        "cancelled",
                        "timed_out",
                    ]
                ),
                name="run_status_is_known",
            ),
            models.CheckConstraint(
                condition=Q(controller_expires_at__isnull=True)
                | ~Q(controller_id="") & Q(controller_seconds__isnull=False),
                name="run_hold_names_its_controller",
            ),
            models.CheckConstraint(
                condition=Q(cancel_confirmed_at__isnull=True) | Q(cancel_requested_at__isnull=False),
                name="run_cancellation_is_requested_first",
            ),
        ]
        indexes = [
            models.Index(
                fields=["issue"],
                condition=Q(status__in=["queued", "scheduled_retry", "running"]),
                name="run_live_of_issue",
            ),
            models.Index(
                fields=["controller_expires_at"],
                condition=Q(status__in=["queued", "scheduled_retry", "running"], controller_expires_at__isnull=False),
                name="run_controlled",
            ),
            # How many holds lapsed lately.
            models.Index(
                fields=["finished_at"],
                condition=Q(status="interrupted", controller_expires_at__isnull=False),
                name="run_lapsed",
            ),
        ]

    def __str__(self) -> str:
        return f"run {self.id} ({self.status})"

    @property
    def is_live(self) -> bool:
        return self.status in self.LIVE
