"""Installation, companies, issues and runs."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import Prefetch, Q, QuerySet
from django.http import HttpRequest
from django.urls import URLPattern
from django.utils.safestring import SafeString
from typing_extensions import override

from leases.admin import keeping
from leases.admin.owed import of_subject, section
from leases.admin.removals import Removable
from leases.admin.situation import TONES, situation_of
from leases.admin.stock import CheckedForm, Editable, ViewOnly
from leases.admin.times import NONE, badge, of_row
from leases.models import Company, Installation, Issue, IssueFacts, Obligation, RecoveryAction, Run, RunFacts


@admin.register(Installation)
class InstallationAdmin(ViewOnly[Installation]):
    list_display = ("id", "mark", "trusted")
    search_fields = ("id",)
    fieldsets = (
        (None, {"fields": ("id", "mark", "trusted", "observing_since", "observed_mark_at")}),
        ("Time", {"fields": ("gap_ended_at", "calm_until", "hinted_until")}),
        (
            "High-water mark",
            {
                "fields": (
                    "watermark_at",
                    "watermark_position",
                    "watermark_timeline",
                    "watermark_identity",
                    "watermark_generation",
                    "watermark_outside",
                    "judged_server",
                )
            },
        ),
    )

    @admin.display(description="trusted")
    def trusted(self, installation: Installation) -> SafeString:
        if installation.observing_since is not None:
            return badge(f"observing: {installation.get_observing_why_display()}", "bad")
        return badge("trusted", "good")


@admin.register(Company)
class CompanyAdmin(Removable[Company]):
    list_display = ("__str__", "id", "created", "closed")
    list_filter = (("closed_at", admin.EmptyFieldListFilter),)
    search_fields = ("name",)
    ordering = ("name", "id")
    fields = ("name", "closed_at", "id", "created_at")
    readonly_fields = ("closed_at", "id", "created_at")
    once_made = ("closed_at", "id", "created_at")
    written_once = ()

    @override
    def get_readonly_fields(self, request: HttpRequest, obj: Company | None = None) -> tuple[str, ...]:
        fixed = super().get_readonly_fields(request, obj)
        return ("name", *fixed) if obj is not None and obj.closed_at is not None else fixed

    @override
    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False  # a company is closed and leaves its tombstone, which its history keeps pointing at

    @admin.display(description="created", ordering="created_at")
    def created(self, company: Company) -> SafeString | str:
        return of_row(company, "created_at")

    @admin.display(description="closed", ordering="closed_at")
    def closed(self, company: Company) -> SafeString | str:
        return of_row(company, "closed_at")


NOT_TOLD = "not told: its gate stays closed"


def _whose(name: str | None) -> str:
    """Return a name that the control plane told, apart from nobody's and from what it never told."""
    return NOT_TOLD if name is None else name or "nobody"


class _Told:
    """Facts that the control plane tells: to look at, beside what they are about."""

    extra = 0
    can_delete = False

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:  # noqa: ARG002 - Django's signature
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:  # noqa: ARG002 - Django's signature
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:  # noqa: ARG002 - Django's signature
        return False


class IssueFactsInline(_Told, admin.StackedInline):  # type: ignore[type-arg]
    model = IssueFacts
    verbose_name = "what the control plane says of it"
    fields = ("is_open", "assigned_to", "decisions_pending", "told_at")
    readonly_fields = fields

    @admin.display(description="assigned to")
    def assigned_to(self, row: IssueFacts) -> str:
        return _whose(row.assignee)


class RecoveryActionInline(_Told, admin.TabularInline):  # type: ignore[type-arg]
    model = RecoveryAction
    verbose_name_plural = "recovery actions (an open one blocks its execution)"
    fields = ("cause", "run", "opened_at", "closed_at", "closed_by")
    readonly_fields = fields
    ordering = ("-opened_at",)


class RunFactsInline(_Told, admin.StackedInline):  # type: ignore[type-arg]
    model = RunFacts
    verbose_name = "what the control plane says of it"
    fields = (
        "adapter_attached",
        "how_far",
        "at_work",
        "accepted_failed_result",
        "history_available",
        "process_id",
        "told_at",
    )
    readonly_fields = fields

    @admin.display(description="coordinator")
    def how_far(self, row: RunFacts) -> str:
        return row.get_coordinator_display() if row.coordinator else NOT_TOLD

    @admin.display(description="at work on the result")
    def at_work(self, row: RunFacts) -> str:
        return _whose(row.coordinator_owner)


@admin.register(Issue)
class IssueAdmin(Editable[Issue]):
    list_display = ("title", "company", "id", "created")
    list_filter = ("company",)
    list_select_related = ("company",)
    search_fields = ("title", "company__name")
    autocomplete_fields = ("company",)
    date_hierarchy = "created_at"
    ordering = ("-created_at",)
    fields = ("company", "title", "id", "created_at")
    readonly_fields = ("id", "created_at")
    inlines = (IssueFactsInline, RecoveryActionInline)

    @override
    def get_urls(self) -> list[URLPattern]:
        return [*keeping.urls(self.admin_site, Issue), *super().get_urls()]

    @override
    def more(self, request: HttpRequest, row: Issue) -> dict[str, Any]:
        return keeping.facts(row) | {"keep_decisions": keeping.choices(request, row)}

    @admin.display(description="created", ordering="created_at")
    def created(self, issue: Issue) -> SafeString | str:
        return of_row(issue, "created_at")


class RunForm(CheckedForm[Run]):
    same_company = ("issue",)


@admin.register(Run)
class RunAdmin(Editable[Run]):
    form = RunForm
    identities = ("id", "issue_id")
    list_display = (
        "id",
        "shown_status",
        "startup",
        "company",
        "issue",
        "controller_id",
        "controller_until",
        "created",
        "finished",
    )
    list_filter = ("status", "company")
    list_select_related = ("company", "issue")
    search_fields = ("controller_id", "issue__title", "company__name")
    autocomplete_fields = ("company", "issue")
    date_hierarchy = "created_at"
    ordering = ("-created_at",)
    # A controller's hold is the control plane's: a form that was opened before a renewal would take that back.
    readonly_fields = (
        "id",
        "created_at",
        "controller_id",
        "controller_generation",
        "controller_seconds",
        "controller_expires_at",
        "controller_gave_up_at",
        "cancel_acknowledged_at",
        "restore_failed_at",
        "agent",
        "adapter",
        "continues",
        "fresh_workspace",
        "cancel_requested_at",
        "cancel_confirmed_at",
    )
    fieldsets = (
        (None, {"fields": ("company", "issue", "status", "finished_at", "id", "created_at")}),
        ("Continuation", {"fields": readonly_fields[9:13]}),
        ("Cancellation", {"fields": readonly_fields[13:]}),
        ("Controller", {"fields": readonly_fields[2:9]}),
    )
    inlines = (RunFactsInline,)

    @override
    def get_queryset(self, request: HttpRequest) -> QuerySet[Run]:
        owed = Obligation.objects.filter(closed_at__isnull=True).order_by("pk")
        prefetch = Prefetch("obligations", queryset=owed, to_attr="open_obligations")
        return super().get_queryset(request).prefetch_related(prefetch)

    @override
    def more(self, request: HttpRequest, row: Run) -> dict[str, Any]:
        return section(request, of_subject(Q(run=row)))

    @admin.display(description="startup")
    def startup(self, run: Run) -> SafeString | str:
        owed: list[Obligation] = run.open_obligations  # type: ignore[attr-defined]  # prefetched
        if not owed:
            return NONE
        standing = situation_of(owed[0], run.database_now)  # type: ignore[attr-defined]  # annotated
        return badge(standing.label, TONES[standing])

    @admin.display(description="status", ordering="status")
    def shown_status(self, run: Run) -> SafeString:
        return badge(run.get_status_display(), "good" if run.is_live else "plain")

    @admin.display(description="controller until", ordering="controller_expires_at")
    def controller_until(self, run: Run) -> SafeString | str:
        return of_row(run, "controller_expires_at")

    @admin.display(description="created", ordering="created_at")
    def created(self, run: Run) -> SafeString | str:
        return of_row(run, "created_at")

    @admin.display(description="finished", ordering="finished_at")
    def finished(self, run: Run) -> SafeString | str:
        return of_row(run, "finished_at")
