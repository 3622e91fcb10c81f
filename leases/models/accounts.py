"""With what and where a provider is called: references to secrets, and accounts with their limits and their circuit."""

from __future__ import annotations

import uuid

from django.core.exceptions import ValidationError
from django.core.validators import MinValueValidator
from django.db import models
from django.db.models import Q
from django.db.models.functions import Now

from leases.models.tenancy import Company
from leases.validation import needs_secret, validate_configuration
from providers import stores


class Credential(models.Model):
    """Which secret a provider is called with: a reference into a store, never the value."""

    class Status(models.TextChoices):
        ACTIVE = "active"
        DISABLED = "disabled"
        ARCHIVED = "archived"

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    company = models.ForeignKey(Company, on_delete=models.PROTECT)
    name = models.CharField(max_length=200)
    reference = models.CharField(
        max_length=500, help_text="A reference, such as env:NAME or file:/absolute/path; never the secret itself."
    )
    digest = models.CharField(
        max_length=64, blank=True, editable=False, help_text="Keyed digest of the value last seen to work."
    )
    status = models.CharField(max_length=10, choices=Status.choices, default=Status.ACTIVE)
    created_at = models.DateTimeField(db_default=Now(), editable=False)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["company", "name"], name="credential_name_is_unique"),
            models.CheckConstraint(
                condition=Q(reference__regex=r"^[a-z][a-z0-9_.-]*:.+$"), name="credential_is_a_reference"
            ),
            models.CheckConstraint(
                condition=Q(status__in=["active", "disabled", "archived"]), name="credential_status_is_known"
            ),
        ]

    def __str__(self) -> str:
        return self.name

    def clean(self) -> None:
        try:
            stores.parse(self.reference)
        except stores.InvalidReference as error:
            raise ValidationError({"reference": str(error)}) from error


class ProviderAccount(models.Model):
    """One account at one provider: the unit of limits, of blocking, and of hints to the workers.

    `attested_identity` is what the provider itself says the account is; it is written once, by the first call, and a
    different answer later means that somebody else answers. Claimed obligations are counted, never a counter kept.
    """

    class Circuit(models.TextChoices):
        CLOSED = "closed"
        OPEN = "open"

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    company = models.ForeignKey(Company, on_delete=models.PROTECT)
    name = models.CharField(max_length=200)
    provider = models.CharField(max_length=50)
    endpoint = models.JSONField(default=dict, blank=True, help_text="Where the provider is reached; its own schema.")
    credential = models.ForeignKey(Credential, null=True, blank=True, on_delete=models.PROTECT)
    attested_identity = models.CharField(max_length=500, blank=True, editable=False)
    concurrency_limit = models.PositiveIntegerField(
        default=50, validators=[MinValueValidator(1)], help_text="Obligations worked on at the same time."
    )
    blocked_until = models.DateTimeField(
        null=True, blank=True, help_text="No claim before this time (the provider's Retry-After)."
    )
    circuit = models.CharField(max_length=10, choices=Circuit.choices, default=Circuit.CLOSED, editable=False)
    circuit_failures = models.PositiveIntegerField(default=0, editable=False)
    hinted_until = models.DateTimeField(null=True, blank=True, editable=False)
    created_at = models.DateTimeField(db_default=Now(), editable=False)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["company", "name"], name="account_name_is_unique"),
            models.CheckConstraint(condition=Q(concurrency_limit__gte=1), name="account_limit_is_positive"),
            models.CheckConstraint(condition=Q(circuit__in=["closed", "open"]), name="account_circuit_is_known"),
        ]

    def __str__(self) -> str:
        return f"{self.name} ({self.provider})"

    def clean(self) -> None:
        validate_configuration(self.provider, "Endpoint", self.endpoint, field="endpoint")
        if self.credential is not None and self.credential.company_id != self.company_id:
            raise ValidationError({"credential": "belongs to another company"})
        if self.credential is None and needs_secret(self.provider):
            raise ValidationError({"credential": "this provider answers nobody without a secret: choose a credential"})
