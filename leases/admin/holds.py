"""Holds: who still needs which sandbox, and until when. Placed from the page of a lease or an issue, ended here."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import Q, QuerySet
from django.db.models.functions import Now
from django.http import HttpRequest
from django.urls import URLPattern, reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from typing_extensions import override

from leases.admin import keeping
from leases.admin.stock import ViewOnly
from leases.admin.times import badge, exact_of_row, of_row, short
from leases.models import Hold

STANDS = Q(ended_at__isnull=True) & (Q(until__isnull=True) | Q(until__gt=Now()))


class StandsFilter(admin.SimpleListFilter):
    """Those that hold something now, unless asked otherwise: what is over is history."""

    title = "whether it stands"
    parameter_name = "stands"

    @override
    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [("over", "Over"), ("all", "All")]

    @override
    def choices(self, changelist: Any) -> Any:
        stock = super().choices(changelist)
        yield {**next(stock), "display": "Stands"}
        yield from stock

    @override
    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        match self.value():
            case "all":
                return queryset
            case "over":
                return queryset.exclude(STANDS)
            case _:
                return queryset.filter(STANDS)


@admin.register(Hold)
class HoldAdmin(ViewOnly[Hold]):
    identities = ("id", "lease_id", "issue_id")
    list_display = ("what", "on", "strength", "holder", "ends", "placed", "company")
    list_filter = (StandsFilter, "kind", "strength", "company")
    list_select_related = ("company", "lease", "issue")
    search_fields = ("holder__startswith", "lease__resource_id__startswith", "issue__title", "reason")
    ordering = ("until", "id")

    @override
    def get_urls(self) -> list[URLPattern]:
        return [*keeping.urls(self.admin_site, Hold), *super().get_urls()]

    @override
    def get_fields(self, request: HttpRequest, obj: Any = None) -> list[Any]:
        return [
            "kind", "shown_strength", "on", "holder", "reason", "ends_exactly", "company", "id", "placed_exactly",
            "ended_exactly", "ended_by",
        ]  # fmt: skip

    @override
    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> tuple[str, ...]:
        return ("shown_strength", "on", "ends_exactly", "placed_exactly", "ended_exactly")

    @override
    def more(self, request: HttpRequest, row: Hold) -> dict[str, Any]:
        return keeping.facts(row) | {"decisions": keeping.choices(request, row)}

    @admin.display(description="why", ordering="kind")
    def what(self, hold: Hold) -> str:
        return hold.get_kind_display()

    @admin.display(description="on")
    def on(self, hold: Hold) -> SafeString:
        if hold.lease is not None:
            url = reverse("admin:leases_lease_change", args=[hold.lease_id])
            return format_html('sandbox <a href="{}">{}</a>', url, short(hold.lease.resource_id))
        url = reverse("admin:leases_issue_change", args=[hold.issue_id])
        return format_html('every kept sandbox of <a href="{}">{}</a>', url, hold.issue)

    @admin.display(description="strength", ordering="strength")
    def shown_strength(self, hold: Hold) -> SafeString:
        if hold.strength == Hold.Strength.ALWAYS:
            return badge("always", "good")
        return badge("while its files can be read", "pending")

    @admin.display(description="until", ordering="until")
    def ends(self, hold: Hold) -> SafeString | str:
        return of_row(hold, "until") if hold.until else "it is ended"

    @admin.display(description="placed", ordering="created_at")
    def placed(self, hold: Hold) -> SafeString | str:
        return of_row(hold, "created_at")

    @admin.display(description="until")
    def ends_exactly(self, hold: Hold) -> SafeString | str:
        return exact_of_row(hold, "until") if hold.until else "it is ended"

    @admin.display(description="placed")
    def placed_exactly(self, hold: Hold) -> SafeString | str:
        return exact_of_row(hold, "created_at")

    @admin.display(description="ended")
    def ended_exactly(self, hold: Hold) -> SafeString | str:
        return exact_of_row(hold, "ended_at")
