"""What inventories found at the provider accounts, to look at, and the one decision about it: adopt and destroy.

It answers for: nothing happens on a GET, without the permission or without a reason. What destroying one does, and what
it verifies before, is the business of `leases.leaks`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from uuid import UUID

from django.contrib import admin
from django.db.models import Model, QuerySet
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from typing_extensions import override

from leases import leaks
from leases.admin.decisions import Choice, Decision, ReasonForm
from leases.admin.filters import OpenUnlessAsked
from leases.admin.stock import ViewOnly
from leases.admin.times import NONE, badge, of_row, short
from leases.errors import LeaseError, NotFound
from leases.models import InventoryFinding, InventoryListing, Obligation, Operation

_TONES = {
    InventoryFinding.Verdict.SETTLED: "bad",
    InventoryFinding.Verdict.UNKNOWN: "bad",
    InventoryFinding.Verdict.AMBIGUOUS: "pending",
    InventoryFinding.Verdict.MISSING: "pending",
}


class Destroy(Decision):
    key = "destroy"
    model = InventoryFinding
    label = "Adopt and destroy…"
    explanation = (
        "The provider is asked whether this is the account that was listed, whether the sandbox is there, and whether "
        "it carries our marks and those of its creation. Then it gets an owner that owes its teardown: it is "
        "destroyed. What holds it makes a stop of that."
    )
    permission = "leases.destroy_leak"

    @classmethod
    def offered(cls, row: Obligation) -> UUID | int | None:  # noqa: ARG003 - it is not about an obligation
        return None

    @override
    def find(self, pk: int) -> tuple[Operation | None, Obligation | None]:
        finding = InventoryFinding.objects.select_related("account", "lease").filter(pk=pk).first()
        if finding is None:
            raise NotFound(f"no finding {pk}")
        leaks.require_destroyable(finding, by_person=True)
        self.finding = finding
        return None, None

    @override
    def decide(self, data: dict[str, Any], *, actor: str) -> tuple[str, Model]:
        lease = leaks.destroy(self.finding.pk, actor=actor, reason=data["reason"], by_person=True)
        return f"Lease {lease.pk} owns {lease.resource_id} now, and owes its teardown.", lease

    @override
    def _page(self, request: HttpRequest, form: ReasonForm) -> HttpResponse:
        page = super()._page(request, form)
        if isinstance(page, TemplateResponse) and page.context_data is not None:
            page.template_name = "admin/leases/inventoryfinding/destroy.html"
            page.context_data |= {
                "subject": self.finding,
                "finding": self.finding,
                "marks": sorted(self.finding.marks.items()),
            }
        return page


class StandingFilter(OpenUnlessAsked):
    """Open ones unless asked otherwise: what is over is history."""

    title = "standing"
    parameter_name = "standing"

    @override
    def lookups(self, request: HttpRequest, model_admin: Any) -> Iterable[tuple[str, str]]:
        return [
            ("open", "Open"),
            ("leaks", "Leaks that nobody deals with"),
            ("owned", "Owes its teardown"),
            ("over", "Over"),
            ("all", "All"),
        ]

    @override
    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        still = queryset.filter(resolved_at__isnull=True)
        match self.chosen:
            case "all":
                return queryset
            case "over":
                return queryset.filter(resolved_at__isnull=False)
            case "owned":
                return still.filter(obligation__isnull=False)
            case "leaks":
                missing = InventoryFinding.Verdict.MISSING
                return still.filter(confirmed_at__isnull=False, obligation__isnull=True).exclude(verdict=missing)
            case _:
                return still


@admin.register(InventoryFinding)
class InventoryFindingAdmin(ViewOnly[InventoryFinding]):
    identities = ("lease_id", "account_id", "company_id")
    list_display = ("shown_verdict", "resource", "account", "owner", "since", "last", "confirmed", "price", "how_over")
    list_filter = (StandingFilter, "verdict", "provider", "company")
    list_select_related = ("account", "lease")
    search_fields = ("resource_id__startswith", "resource_name__startswith", "account__name__startswith")
    ordering = ("-first_seen_at", "-id")

    @override
    def get_urls(self) -> list[URLPattern]:
        view = self.admin_site.admin_view(Destroy.as_view())
        return [path("<int:pk>/destroy/", view, name="leases_inventoryfinding_destroy"), *super().get_urls()]

    @override
    def more(self, request: HttpRequest, row: InventoryFinding) -> dict[str, Any]:
        return {
            "removals": (Choice(Destroy.label, Destroy.address(row.pk), grave=True),) if self._may(request, row) else ()
        }

    def _may(self, request: HttpRequest, row: InventoryFinding) -> bool:
        try:
            leaks.require_destroyable(row, by_person=True)
        except LeaseError:
            return False
        return request.user.has_perm(Destroy.permission)

    @admin.display(description="verdict", ordering="verdict")
    def shown_verdict(self, finding: InventoryFinding) -> SafeString:
        return badge(finding.verdict, _TONES[InventoryFinding.Verdict(finding.verdict)] if finding.is_open else "plain")

    @admin.display(description="sandbox")
    def resource(self, finding: InventoryFinding) -> SafeString | str:
        return short(finding.resource_id)

    @admin.display(description="lease")
    def owner(self, finding: InventoryFinding) -> SafeString | str:
        if finding.lease is None:
            return NONE
        url = reverse("admin:leases_lease_change", args=[finding.lease_id])
        return format_html('<a href="{}">{}</a>', url, finding.lease.get_state_display())

    @admin.display(description="since", ordering="first_seen_at")
    def since(self, finding: InventoryFinding) -> SafeString | str:
        return of_row(finding, "first_seen_at")

    @admin.display(description="last seen", ordering="last_seen_at")
    def last(self, finding: InventoryFinding) -> SafeString | str:
        return of_row(finding, "last_seen_at")

    @admin.display(description="confirmed", ordering="confirmed_at")
    def confirmed(self, finding: InventoryFinding) -> SafeString | str:
        return of_row(finding, "confirmed_at")

    @admin.display(description="price an hour", ordering="hourly_price")
    def price(self, finding: InventoryFinding) -> str:
        return str(finding.hourly_price) if finding.hourly_price is not None else NONE

    @admin.display(description="what became of it")
    def how_over(self, finding: InventoryFinding) -> str:
        if not finding.is_open:
            return finding.get_resolution_display()
        return "owes its teardown" if finding.obligation_id else NONE


@admin.register(InventoryListing)
class InventoryListingAdmin(ViewOnly[InventoryListing]):
    identities = ("account_id",)
    list_display = (
        "began",
        "account",
        "shown_outcome",
        "problem",
        *("alive", "settled", "unknown", "ambiguous", "missing", "foreign", "unmarked"),
    )
    list_filter = ("outcome", "provider")
    list_select_related = ("account",)
    search_fields = ("account__name__startswith", "account_identity__startswith")
    ordering = ("-began_at", "-id")

    @admin.display(description="began", ordering="began_at")
    def began(self, listing: InventoryListing) -> SafeString | str:
        return of_row(listing, "began_at")

    @admin.display(description="outcome", ordering="outcome")
    def shown_outcome(self, listing: InventoryListing) -> SafeString:
        return badge(listing.outcome, "good" if listing.outcome == InventoryListing.Outcome.COMPLETE else "bad")
