"""Obligations and the attempts to pay them: to look at, and to be tried now by an action that asks for a reason."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from django.contrib import admin
from django.db.models import F, Max, Model, OuterRef, Q, QuerySet, Subquery
from django.http import HttpRequest, HttpResponse
from django.urls import URLPattern, path, reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from typing_extensions import override

from leases import ownership, proof
from leases.admin import answers, decisions, keeping, retry
from leases.admin.filters import ErrorKindFilter, LastErrorKindFilter, OpenUnlessAsked, QuietFilter
from leases.admin.owed import of_subject, section
from leases.admin.situation import CONDITIONS, OPEN, TONES, Situation, situation_of
from leases.admin.stock import ViewOnly
from leases.admin.times import NONE, badge, of_row, short, span
from leases.models import Attempt, Obligation, Receipt

ATTEMPTS_SHOWN = 20

_SETTLES = frozenset({Obligation.Kind.DISPOSE, Obligation.Kind.SETTLE_ORPHAN})
"""Kinds whose page says what keeps the sandbox: they wait for just that."""


def newest_attempts(obligation: Obligation) -> QuerySet[Attempt]:
    return obligation.attempts.order_by("-claimed_at")[:ATTEMPTS_SHOWN]


class SituationFilter(OpenUnlessAsked):
    """Open rows unless asked otherwise: what is closed is history."""

    title = "situation"
    parameter_name = "situation"

    @override
    def lookups(self, request: HttpRequest, model_admin: Any) -> Iterable[tuple[str, str]]:
        return [
            ("open", "Open"),
            *((situation.value, situation.label.capitalize()) for situation in Situation),
            ("closed", "Closed"),
            ("unverified", "Ended without proof"),
            ("all", "All"),
        ]

    @override
    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        match self.chosen:
            case "all":
                return queryset
            case "closed":
                return queryset.filter(closed_at__isnull=False)
            case "unverified":
                return queryset.filter(pk__in=proof.unproven().values("pk"))
            case value if value in Situation.values:
                return queryset.filter(CONDITIONS[Situation(value)])
            case _:
                return queryset.filter(OPEN)


BUILT_IN = "built-in"
"""What stands for an account where a row calls no provider."""


@admin.register(Obligation)
class ObligationAdmin(ViewOnly[Obligation]):
    identities = ("lease_id", "operation_id", "run_id", "account_id", "attempt_id")
    list_display = (
        "what",
        "situation",
        "subject",
        "account_name",
        "due",
        "owed",
        "failed",
    )
    list_filter = (
        SituationFilter,
        ("escalated_at", admin.EmptyFieldListFilter),
        "kind",
        "verb",
        QuietFilter,
        LastErrorKindFilter,
        "account__provider",
        "company",
    )
    list_select_related = ("account", "lease", "operation", "run")
    search_fields = (
        "lease__resource_id__startswith",
        "operation__name__startswith",
        "account__name__startswith",
        "worker__startswith",
        "company__name",
    )
    # What needs a person has no time of its own and stands first; then what is due longest.
    ordering = (F("due_at").asc(nulls_first=True), "id")
    actions = ("retry_now",)
    readonly_fields = ("called",)

    @override
    def get_fields(self, request: HttpRequest, obj: Any = None) -> list[Any]:
        return ["called" if field == "account" else field for field in super().get_fields(request, obj)]

    @override
    def get_urls(self) -> list[URLPattern]:
        view = self.admin_site.admin_view(retry.retry_view)
        return [
            path("retry/", view, name="leases_obligation_retry"),
            *decisions.urls(self.admin_site, Obligation),
            *decisions.urls(self.admin_site, Obligation, answers.ANSWERS),
            *super().get_urls(),
        ]

    @override
    def get_queryset(self, request: HttpRequest) -> QuerySet[Obligation]:
        proofs = Receipt.objects.filter(lease=OuterRef("lease"), epoch=OuterRef("lease__epoch")).values("lease")
        kept_since = Subquery(proofs.annotate(at=Max("confirmed_at")).values("at"))
        return super().get_queryset(request).annotate(kept_since=kept_since)

    def has_retry_permission(self, request: HttpRequest) -> bool:
        return retry.may_retry(request)

    @admin.action(description="Retry now…", permissions=["retry"])
    def retry_now(self, request: HttpRequest, queryset: QuerySet[Obligation]) -> HttpResponse:
        ids = list(queryset.order_by("pk").values_list("pk", flat=True)[: retry.MAX_ROWS + 1])
        return retry.ask(request, ids, back=request.get_full_path())

    @override
    def more(self, request: HttpRequest, row: Obligation) -> dict[str, Any]:
        shown = section(request, of_subject(Q(pk=row.pk))) | {"attempts": newest_attempts(row)}
        if row.lease is not None and row.is_open and row.kind in _SETTLES:
            shown |= keeping.facts(row.lease) | {"keep_decisions": keeping.choices(request, row.lease)}
        return shown

    @admin.display(description="owed", ordering="kind")
    def what(self, obligation: Obligation) -> str:
        return f"{obligation.kind} #{obligation.pk}" + (f": {obligation.verb}" if obligation.verb else "")

    @admin.display(description="situation")
    def situation(self, obligation: Obligation) -> SafeString:
        if not obligation.is_open:
            tone = "bad" if obligation.closed_as == Obligation.ClosedAs.UNVERIFIED else "plain"
            return badge(obligation.closed_as, tone)
        standing = situation_of(obligation, obligation.database_now)  # type: ignore[attr-defined]  # annotated
        shown = badge(standing.label, TONES[standing])
        if obligation.escalated_at:
            shown = format_html("{} {}", shown, badge("escalated", "bad"))
        if standing == Situation.QUIET:
            cost = f" ({_cost(obligation)})" if obligation.quiet == Obligation.Quiet.OPERATOR_DECIDES else ""
            return format_html("{} <br>{}{}", shown, obligation.get_quiet_display(), cost)
        if standing == Situation.IN_FLIGHT:
            return format_html("{} <br>{}", shown, obligation.worker)
        return shown

    @admin.display(description="of")
    def subject(self, obligation: Obligation) -> SafeString | str:
        if obligation.lease is not None:
            return _link(obligation.lease, obligation.lease.resource_id)
        if obligation.operation is not None:
            return _link(obligation.operation, obligation.operation.name)
        if obligation.run is not None:
            return _link(obligation.run, f"run {obligation.run_id}")
        if obligation.account is not None:
            return _link(obligation.account, obligation.account.name)
        return "the whole fleet"

    @admin.display(description="account", ordering="account__name")
    def account_name(self, obligation: Obligation) -> str:
        return obligation.account.name if obligation.account is not None else BUILT_IN

    @admin.display(description="account")
    def called(self, obligation: Obligation) -> SafeString | str:
        if obligation.account is None:
            return BUILT_IN
        return _link(obligation.account, obligation.account.name)

    @admin.display(description="due", ordering="due_at")
    def due(self, obligation: Obligation) -> SafeString | str:
        return of_row(obligation, "due_at")

    @admin.display(description="owed since", ordering="owed_since")
    def owed(self, obligation: Obligation) -> SafeString | str:
        return of_row(obligation, "owed_since")

    @admin.display(description="failures", ordering="failures")
    def failed(self, obligation: Obligation) -> str:
        last = f" ({obligation.last_error_kind})" if obligation.last_error_kind else ""
        return f"{obligation.failures}{last}"


def _cost(obligation: Obligation) -> str:
    """What a kept sandbox costs that waits for a person, as the report reckons it (`leases.ownership`)."""
    kept: Any = obligation
    price = kept.lease.hourly_price
    if price is None:
        return "price unknown"
    so_far = ownership.spent(price, kept.kept_since or kept.lease.released_at, kept.database_now)
    return f"at most {price:.2f} an hour, {so_far:.2f} so far"


@admin.register(Attempt)
class AttemptAdmin(ViewOnly[Attempt]):
    identities = ("id", "obligation__lease_id", "obligation__operation_id")
    list_display = (
        "claimed",
        "obligation",
        "shown_outcome",
        "announced_call",
        "error_kind",
        "took",
        "error_excerpt",
        "worker",
    )
    list_filter = ("outcome", ErrorKindFilter, "obligation__kind")
    list_select_related = ("obligation",)
    search_fields = ("worker__startswith", "=obligation__id", "error_excerpt", "company__name")
    ordering = ("-claimed_at",)

    @admin.display(description="claimed", ordering="claimed_at")
    def claimed(self, attempt: Attempt) -> SafeString | str:
        return of_row(attempt, "claimed_at")

    @admin.display(description="outcome", ordering="outcome")
    def shown_outcome(self, attempt: Attempt) -> SafeString:
        return outcome_badge(attempt)

    @admin.display(description="took")
    def took(self, attempt: Attempt) -> str:
        return span(attempt.finished_at - attempt.claimed_at) if attempt.finished_at else NONE


_OUTCOME_TONES: Mapping[str, str] = {
    "": "pending",
    Attempt.Outcome.PROVEN: "good",
    Attempt.Outcome.FAILED: "bad",
    Attempt.Outcome.QUIETED: "bad",
    Attempt.Outcome.SUPERSEDED: "bad",
}


def outcome_badge(attempt: Attempt) -> SafeString:
    return badge(attempt.get_outcome_display() or "in flight", _OUTCOME_TONES.get(attempt.outcome, "plain"))


def _link(row: Model, text: str) -> SafeString:
    url = reverse(f"admin:leases_{type(row).__name__.lower()}_change", args=[row.pk])
    return format_html('<a href="{}">{}</a>', url, short(text))
