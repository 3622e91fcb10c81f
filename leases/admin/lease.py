"""Leases with what they owe and their timeline, and the work that went through their bridges: to look at."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import Prefetch, QuerySet
from django.http import HttpRequest
from django.urls import URLPattern, path, reverse
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from typing_extensions import override

from leases import proof
from leases.admin import keeping, recovery
from leases.admin.filters import ErrorKindFilter
from leases.admin.owed import of_lease, section
from leases.admin.owners import owners_view
from leases.admin.situation import TONES, situation_of
from leases.admin.stock import ViewOnly
from leases.admin.times import NONE, badge, exact_of_row, of_row, short, span
from leases.models import BridgeActivity, Lease, Obligation, Operation, Receipt
from leases.timeline import timeline

_TONES = {Lease.State.ACTIVE: "good", Lease.State.PENDING_CLEANUP: "pending", Lease.State.FAILED: "bad"}


_MAY_RUN = badge("may be running", "bad")


class OwesFilter(admin.SimpleListFilter):
    title = "what it owes"
    parameter_name = "owes"

    @override
    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [
            ("anything", "Anything"),
            ("escalated", "Escalated"),
            ("person", "Needs a person"),
            ("unverified", "Ended without proof"),
            ("lost", "Files lost"),
            ("may_run", "May be running"),
        ]

    @override
    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        owed = Obligation.objects.filter(closed_at__isnull=True, lease__isnull=False).values("lease")
        match self.value():
            case "anything":
                return queryset.filter(pk__in=owed)
            case "escalated":
                return queryset.filter(pk__in=owed.filter(escalated_at__isnull=False))
            case "person":
                return queryset.filter(pk__in=owed.filter(quiet__in=Obligation.FOR_PEOPLE))
            case "unverified":
                return queryset.filter(pk__in=proof.unproven().filter(lease__isnull=False).values("lease"))
            case "lost":
                return queryset.filter(files_lost=True)
            case "may_run":
                return queryset.filter(may_be_running_since__isnull=False)
            case _:
                return queryset


@admin.register(Lease)
class LeaseAdmin(ViewOnly[Lease]):
    identities = ("id", "run_id", "issue_id", "environment_id", "successor_id")
    list_display = (
        "beginning",
        "shown_state",
        "owed",
        "acquired",
        "sandbox",
        "environment",
        "company",
        "released",
    )
    list_filter = ("state", OwesFilter, "account__provider", "policy", "outcome", "company")
    list_select_related = ("company", "environment")
    search_fields = (
        "resource_id__startswith",
        "resource_name__startswith",
        "environment__name",
        "account__name",
        "company__name",
    )
    readonly_fields = (
        "was_acquired",
        "was_released",
        "provider_ends_it",
        "ends_by_itself",
        "is_kept_until",
        "was_orphaned",
        "was_started",
        "lost",
        "execution",
        "may_run",
        "taken_over_from",
        "taken_over_by",
    )
    date_hierarchy = "acquired_at"
    ordering = ("-acquired_at",)
    fieldsets = (
        (None, {"fields": ("id", "state", "outcome", "reason", "execution", "may_run", "lost")}),
        ("Whose", {"fields": ("company", "environment", "issue", "run")}),
        (
            "Sandbox",
            {
                "fields": (
                    "resource_id",
                    "resource_name",
                    "epoch",
                    "was_started",
                    "was_acquired",
                    "was_released",
                    "ends_by_itself",
                    "provider_ends_it",
                    "is_kept_until",
                    "was_orphaned",
                )
            },
        ),
        ("Used again", {"fields": ("scope", "fingerprint", "taken_over_from", "taken_over_by")}),
        (
            "Snapshot that it was acquired with",
            {
                "classes": ("collapse",),
                "fields": (
                    "account",
                    "provider",
                    "endpoint",
                    "credential_uuid",
                    "credential_reference",
                    "account_identity",
                    "config",
                    "policy",
                    "drain_seconds",
                    "reuse_idle_for",
                    "retain_for",
                    "hourly_price",
                ),
            },
        ),
    )

    @override
    def get_queryset(self, request: HttpRequest) -> QuerySet[Lease]:
        owed = Obligation.objects.filter(closed_at__isnull=True).order_by("pk")
        prefetch = Prefetch("obligations", queryset=owed, to_attr="open_obligations")
        return super().get_queryset(request).prefetch_related(prefetch)

    @override
    def more(self, request: HttpRequest, row: Lease) -> dict[str, Any]:
        return (
            section(request, of_lease(row))
            | keeping.facts(row)
            | recovery.of_lease_page(request, row)
            | {"keep_decisions": keeping.choices(request, row), "timeline": timeline(row)}
        )

    @override
    def get_urls(self) -> list[URLPattern]:
        view = self.admin_site.admin_view(owners_view)
        return [
            path("owners/", view, name="leases_lease_owners"),
            *keeping.urls(self.admin_site, Lease),
            *recovery.urls(Lease),
            *super().get_urls(),
        ]

    @admin.display(description="state", ordering="state")
    def shown_state(self, lease: Lease) -> SafeString:
        state = badge(lease.get_state_display(), _TONES.get(Lease.State(lease.state), "plain"))
        return format_html("{} {}", state, _MAY_RUN) if lease.may_be_running_since else state

    @admin.display(description="owed")
    def owed(self, lease: Lease) -> SafeString | str:
        owed: list[Obligation] = lease.open_obligations  # type: ignore[attr-defined]  # prefetched
        if not owed:
            return NONE
        badges: list[SafeString] = []
        for obligation in owed:
            standing = situation_of(obligation, lease.database_now)  # type: ignore[attr-defined]  # annotated
            badges.append(badge(f"{obligation.kind}: {standing.label}", TONES[standing]))
            if obligation.escalated_at:
                badges.append(badge("escalated", "bad"))
        return format_html_join(" ", "{}", ((shown,) for shown in badges))

    @admin.display(description="acquired")
    def was_acquired(self, lease: Lease) -> SafeString | str:
        return exact_of_row(lease, "acquired_at")

    @admin.display(description="released")
    def was_released(self, lease: Lease) -> SafeString | str:
        return exact_of_row(lease, "released_at")

    @admin.display(description="the provider ends it")
    def provider_ends_it(self, lease: Lease) -> SafeString | str:
        return exact_of_row(lease, "expires_at")

    @admin.display(description="the lease ends by itself")
    def ends_by_itself(self, lease: Lease) -> SafeString | str:
        return exact_of_row(lease, "ends_at")

    @admin.display(description="kept until")
    def is_kept_until(self, lease: Lease) -> SafeString | str:
        if lease.state not in Lease.KEPT:
            return NONE
        if lease.orphaned_at is not None:
            return "nothing needs it"
        return exact_of_row(lease, "kept_until") if lease.kept_until else "an operator decides"

    @admin.display(description="nobody's since")
    def was_orphaned(self, lease: Lease) -> SafeString | str:
        return exact_of_row(lease, "orphaned_at")

    @admin.display(description="last start, by the provider's clock")
    def was_started(self, lease: Lease) -> SafeString | str:
        return exact_of_row(lease, "started_as_of")

    @admin.display(description="may its sandbox run?")
    def execution(self, lease: Lease) -> SafeString:
        receipt = proof.receipts(lease).order_by("-pk").first()
        if receipt is not None:
            told = f"no: {receipt.evidence}, {receipt.ended}, proven for epoch {receipt.epoch}"
            if lease.may_be_running_since is not None:
                return badge(f"perhaps again since: what ran before is proven ended (epoch {receipt.epoch})", "bad")
            return badge(told, "pending" if receipt.ended == Receipt.Ended.SUSPENDED else "good")
        if lease.receipts.filter(epoch=lease.epoch).exists():
            if lease.starts.filter(state=Operation.State.PENDING).exists():
                return badge("perhaps: it is being started, so its receipts prove nothing", "pending")
            return badge("perhaps: a start of it was given up, so its receipts prove nothing", "bad")
        return badge("assume yes: nothing proves that it ended", "pending")

    @admin.display(description="may be running since")
    def may_run(self, lease: Lease) -> SafeString | str:
        if lease.may_be_running_since is None:
            return NONE
        since = exact_of_row(lease, "may_be_running_since")
        return format_html("{} {}: a restart of it was never answered, and it is watched", _MAY_RUN, since)

    @admin.display(description="taken over from")
    def taken_over_from(self, lease: Lease) -> SafeString | str:
        return _link(getattr(lease, "predecessor", None))

    @admin.display(description="taken over by")
    def taken_over_by(self, lease: Lease) -> SafeString | str:
        return _link(lease.successor)

    @admin.display(description="acquired", ordering="acquired_at")
    def acquired(self, lease: Lease) -> SafeString | str:
        return of_row(lease, "acquired_at")

    @admin.display(description="released", ordering="released_at")
    def released(self, lease: Lease) -> SafeString | str:
        return of_row(lease, "released_at")

    @admin.display(description="lease", ordering="id")
    def beginning(self, lease: Lease) -> SafeString | str:
        return short(str(lease.pk))

    @admin.display(description="sandbox", ordering="resource_id")
    def sandbox(self, lease: Lease) -> SafeString | str:
        return short(lease.resource_id)

    @admin.display(description="files lost")
    def lost(self, lease: Lease) -> SafeString | str:
        return badge("destroyed although its files were to be kept", "bad") if lease.files_lost else "no"


def _link(lease: Lease | None) -> SafeString | str:
    if lease is None:
        return NONE
    return format_html('<a href="{}">{}</a>', reverse("admin:leases_lease_change", args=[lease.pk]), lease)


@admin.register(BridgeActivity)
class BridgeActivityAdmin(ViewOnly[BridgeActivity]):
    identities = ("id", "lease_id")
    list_display = ("started", "kind", "shown_outcome", "exit_code", "error_kind", "took", "due", "sandbox", "company")
    list_filter = ("kind", "outcome", ("ended_at", admin.EmptyFieldListFilter), ErrorKindFilter, "company")
    list_select_related = ("company", "lease", "operation")
    search_fields = ("lease__resource_id__startswith", "operation__name__startswith", "error_kind", "company__name")
    ordering = ("-started_at",)

    @admin.display(description="outcome", ordering="outcome")
    def shown_outcome(self, activity: BridgeActivity) -> SafeString:
        tones = {"": "pending", BridgeActivity.Outcome.COMPLETED: "good", BridgeActivity.Outcome.FAILED: "bad"}
        return badge(activity.outcome or "open", tones.get(activity.outcome, "plain"))

    @admin.display(description="started", ordering="started_at")
    def started(self, activity: BridgeActivity) -> SafeString | str:
        return of_row(activity, "started_at")

    @admin.display(description="sandbox")
    def sandbox(self, activity: BridgeActivity) -> SafeString | str:
        if activity.lease is not None:
            return short(activity.lease.resource_id)
        return short(activity.operation.resource_id or activity.operation.name) if activity.operation else NONE

    @admin.display(description="took")
    def took(self, activity: BridgeActivity) -> str:
        return span(activity.ended_at - activity.started_at) if activity.ended_at else NONE

    @admin.display(description="deadline", ordering="deadline")
    def due(self, activity: BridgeActivity) -> SafeString | str:
        return of_row(activity, "deadline")
