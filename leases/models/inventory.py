"""What provider accounts were seen to hold: the listings, and what was found beside our own rows."""

from __future__ import annotations

from datetime import timedelta

from django.db import models
from django.db.models import F, Q
from django.db.models.functions import Now

from leases.models.accounts import ProviderAccount
from leases.models.lease import Lease
from leases.models.obligations import Obligation
from leases.models.tenancy import Company

GRACE = timedelta(minutes=15)
"""How long after the listing that first saw it the listing must have begun that confirms a finding."""


class InventoryListing(models.Model):
    """One attempt to list what an account holds, and how many of what it was. Only a complete one counts.

    Two accounts that attest the same identity are one at the provider: what is found belongs to the identity.
    """

    class Outcome(models.TextChoices):
        COMPLETE = "complete"
        FAILED = "failed", "failed: it changed nothing"
        OVERTAKEN = "overtaken", "overtaken: one that began later was complete first"

    id = models.BigAutoField(primary_key=True)
    account = models.ForeignKey(ProviderAccount, on_delete=models.PROTECT, related_name="listings")
    provider = models.CharField(max_length=50)
    account_identity = models.CharField(max_length=500)
    outcome = models.CharField(max_length=10, choices=Outcome.choices)
    problem = models.CharField(max_length=300, blank=True, help_text="Why it failed.")
    began_at = models.DateTimeField()
    ended_at = models.DateTimeField(db_default=Now(), editable=False)
    alive = models.PositiveIntegerField(default=0)
    settled = models.PositiveIntegerField(default=0)
    unknown = models.PositiveIntegerField(default=0)
    ambiguous = models.PositiveIntegerField(default=0)
    missing = models.PositiveIntegerField(default=0)
    foreign = models.PositiveIntegerField(default=0)
    unmarked = models.PositiveIntegerField(default=0)

    class Meta:
        constraints = [
            models.CheckConstraint(
                condition=Q(outcome="complete", problem="")
                | Q(outcome="overtaken", problem="")
                | Q(outcome="failed") & ~Q(problem=""),
                name="listing_failed_says_why",
            ),
        ]
        indexes = [
            models.Index(fields=["provider", "account_identity", "-began_at"], name="listing_newest_of_identity"),
        ]

    def __str__(self) -> str:
        return f"listing #{self.pk} of {self.provider} ({self.outcome})"


class InventoryFinding(models.Model):
    """One sandbox at a provider that does not fit our rows, from the first complete listing that saw it so.

    It is open until a complete listing sees otherwise, and counts (`confirmed_at`) only once a complete listing that
    began `GRACE` after the first one still saw the same. `obligation` is the teardown that it was given; from then on
    its lease speaks for it.
    """

    class Verdict(models.TextChoices):
        SETTLED = "settled", "settled: the lease is over, and the sandbox is there (a leak)"
        UNKNOWN = "unknown", "unknown: it carries our marks, and no lease or creation owns it (a leak)"
        AMBIGUOUS = "ambiguous", "ambiguous: its marks are those of a creation whose sandbox is another one; you decide"
        MISSING = "missing", "missing: the lease should have a sandbox, and the listing does not hold it"

    class Resolution(models.TextChoices):
        KNOWN = "known", "a lease or a creation of ours knows it"
        NOT_LISTED = "not_listed", "not listed any more"
        CHANGED = "changed", "it looks otherwise now"
        OVER = "over", "listed again, or its lease needs no sandbox any more"

    AUTOMATIC = (Verdict.SETTLED, Verdict.UNKNOWN)
    """The leaks: what an inventory may give an owner that destroys it. Of the others a person decides, or nobody."""

    id = models.BigAutoField(primary_key=True)
    company = models.ForeignKey(Company, null=True, blank=True, on_delete=models.PROTECT)
    account = models.ForeignKey(ProviderAccount, on_delete=models.PROTECT, related_name="findings")
    provider = models.CharField(max_length=50)
    account_identity = models.CharField(max_length=500)
    resource_id = models.CharField(max_length=200)
    resource_name = models.CharField(max_length=200, blank=True)
    marks = models.JSONField(default=dict, blank=True, help_text="Ours alone.")
    verdict = models.CharField(max_length=10, choices=Verdict.choices)
    lease = models.ForeignKey(Lease, null=True, blank=True, on_delete=models.PROTECT, related_name="findings")
    hourly_price = models.DecimalField(max_digits=10, decimal_places=4, null=True, blank=True)
    first_seen_at = models.DateTimeField(help_text="When the first complete listing began that saw it so.")
    last_seen_at = models.DateTimeField()
    sightings = models.PositiveIntegerField(default=1, help_text="Complete listings in a row that saw it so.")
    confirmed_at = models.DateTimeField(null=True, blank=True)
    obligation = models.ForeignKey(
        Obligation, null=True, blank=True, on_delete=models.PROTECT, related_name="findings", help_text="Its teardown."
    )
    resolved_at = models.DateTimeField(null=True, blank=True)
    resolution = models.CharField(max_length=10, choices=Resolution.choices, blank=True)

    class Meta:
        constraints = [
            models.CheckConstraint(
                condition=Q(verdict__in=["settled", "unknown", "ambiguous", "missing"]), name="finding_verdict_is_known"
            ),
            models.CheckConstraint(
                condition=~Q(verdict__in=["settled", "missing"]) | Q(lease__isnull=False),
                name="finding_names_the_lease_it_is_about",
            ),
            models.CheckConstraint(
                condition=Q(confirmed_at__isnull=True)
                | Q(sightings__gte=2, confirmed_at__gte=F("first_seen_at") + GRACE),
                name="finding_is_confirmed_after_its_grace",
            ),
            models.CheckConstraint(
                condition=Q(obligation__isnull=True)
                | Q(confirmed_at__isnull=False, lease__isnull=False, verdict__in=["settled", "unknown", "ambiguous"]),
                name="finding_is_owned_once_confirmed",
            ),
            models.CheckConstraint(
                condition=Q(lease__isnull=True) | Q(company__isnull=False), name="finding_of_a_lease_names_its_company"
            ),
            models.CheckConstraint(
                condition=Q(resolved_at__isnull=True, resolution="")
                | (Q(resolved_at__isnull=False) & ~Q(resolution="")),
                name="finding_resolves_as_something",
            ),
            models.UniqueConstraint(
                fields=["provider", "account_identity", "resource_id"],
                condition=Q(resolved_at__isnull=True),
                name="finding_is_the_only_open_one_of_its_sandbox",
            ),
        ]
        permissions = [("destroy_leak", "Can adopt and destroy what an inventory found")]
        indexes = [models.Index(fields=["-first_seen_at"], name="finding_newest_first")]

    def __str__(self) -> str:
        return f"{self.verdict} sandbox {self.resource_id} at {self.provider}"

    @property
    def is_open(self) -> bool:
        return self.resolved_at is None
