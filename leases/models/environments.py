"""Named ways to run: which account, what kind of sandbox, and what becomes of it afterwards."""

from __future__ import annotations

import uuid
from datetime import timedelta

from django.core.exceptions import ValidationError
from django.core.validators import MaxValueValidator
from django.db import models
from django.db.models import Q
from django.db.models.functions import Now

from leases.models.accounts import ProviderAccount
from leases.models.tenancy import Company
from leases.validation import validate_configuration


class Policy(models.TextChoices):
    """What becomes of a sandbox when its lease is released."""

    EPHEMERAL = "ephemeral", "destroy it"
    REUSE_BY_ENVIRONMENT = "reuse_by_environment", "stop it and keep it for the environment's next run"
    REUSE_BY_EXECUTION_WORKSPACE = "reuse_by_execution_workspace", "stop it and keep it for its workspace's next run"
    RETAIN_ON_FAILURE = "retain_on_failure", "stop and keep it when the run failed, else destroy it"


REUSE_IDLE_FOR = timedelta(days=7)
RETAIN_FOR = timedelta(days=30)
LONGEST_KEPT = timedelta(days=3650)


class Environment(models.Model):
    """A named way to run. Leases take a snapshot of it, so that changing it never redirects a teardown."""

    class Status(models.TextChoices):
        ACTIVE = "active"
        ARCHIVED = "archived"

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    company = models.ForeignKey(Company, on_delete=models.PROTECT)
    name = models.CharField(max_length=200)
    account = models.ForeignKey(ProviderAccount, on_delete=models.PROTECT)
    config = models.JSONField(default=dict, blank=True, help_text="What kind of sandbox; the provider's own schema.")
    policy = models.CharField(max_length=40, choices=Policy.choices, default=Policy.EPHEMERAL)
    drain_seconds = models.PositiveIntegerField(
        default=30,
        validators=[MaxValueValidator(3600)],
        help_text="Seconds: how long a released lease waits for work in flight before its sandbox is stopped.",
    )
    reuse_idle_for = models.DurationField(
        default=REUSE_IDLE_FOR, help_text="How long a stopped sandbox waits for its next run, then it is destroyed."
    )
    retain_for = models.DurationField(
        null=True,
        blank=True,
        default=RETAIN_FOR,
        help_text="How long a stopped sandbox is kept for its files. Empty: until an operator decides.",
    )
    hourly_price = models.DecimalField(max_digits=10, decimal_places=4, null=True, blank=True)
    status = models.CharField(max_length=10, choices=Status.choices, default=Status.ACTIVE)
    created_at = models.DateTimeField(db_default=Now(), editable=False)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["company", "name"], name="environment_name_is_unique"),
            models.CheckConstraint(condition=Q(status__in=["active", "archived"]), name="environment_status_is_known"),
            models.CheckConstraint(condition=Q(policy__in=Policy.values), name="environment_policy_is_known"),
            models.CheckConstraint(condition=Q(drain_seconds__lte=3600), name="environment_drain_is_bounded"),
            models.CheckConstraint(
                condition=Q(reuse_idle_for__gt=timedelta(0))
                & (Q(retain_for__isnull=True) | Q(retain_for__gt=timedelta(0))),
                name="environment_keeps_for_a_time",
            ),
        ]

    def __str__(self) -> str:
        return self.name

    def clean(self) -> None:
        if self.hourly_price is not None and self.hourly_price < 0:
            raise ValidationError({"hourly_price": "must not be negative"})
        for field in ("reuse_idle_for", "retain_for"):
            length = getattr(self, field)
            if length is not None and not timedelta(0) < length <= LONGEST_KEPT:
                raise ValidationError({field: f"must be more than nothing, and at most {LONGEST_KEPT.days} days"})
        try:
            account = self.account
        except ProviderAccount.DoesNotExist:
            return  # a form without it says so by itself
        if account.company_id != self.company_id:
            raise ValidationError({"account": "belongs to another company"})
        validate_configuration(account.provider, "Config", self.config, field="config")
