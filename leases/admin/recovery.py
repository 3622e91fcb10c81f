"""Recoveries of files and continuations: to look at, and the two decisions about them: recover again, withdraw.

It answers for what `leases.admin.keeping` answers for. What a decision does is the business of `leases.recovering` and
`leases.continuing`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.contrib import admin
from django.db.models import Model, Q, QuerySet
from django.http import HttpRequest
from django.template.defaultfilters import filesizeformat
from django.urls import URLPattern, reverse
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from typing_extensions import override

from leases import archives, continuing, recovering
from leases.admin import keeping
from leases.admin.decisions import sentence
from leases.admin.keeping import Keeping
from leases.admin.owed import of_subject, section
from leases.admin.stock import ViewOnly
from leases.admin.times import NONE, badge, exact_of_row, of_row, short
from leases.clock import database_now
from leases.errors import LeaseError
from leases.models import (
    Archive,
    Continuation,
    IssueFacts,
    Lease,
    Obligation,
    Recovery,
    RecoveryAction,
    RunFacts,
)
from leases.unfinished import NOT_LOOKED, failure_in_words

_TONES = {Recovery.State.RUNNING: "pending", Recovery.State.COMPLETE: "good", Recovery.State.EXHAUSTED: "bad"}
_WAITS = {
    Continuation.State.WAITING: "pending",
    Continuation.State.STARTED: "good",
    Continuation.State.WITHDRAWN: "plain",
}


# Decisions


class RecoverFiles(Keeping):
    key = "recover_files"
    model = Lease
    label = "Recover the files again…"
    explanation = (
        "The stopped sandbox is started, its workspace is saved as an archive, and it is stopped again: at most six "
        "attempts within half an hour. Do that after making room, or when the provider works again. Meanwhile nothing "
        "is proof that it is stopped, and what waits to continue its run waits for this."
    )
    permission = "leases.recover_files"
    hint = "Nothing was written."

    @classmethod
    @override
    def refusal(cls, row: Lease) -> str:
        if row.state not in Lease.KEPT:
            return f"The lease is {row.get_state_display()}: no stopped sandbox is kept."
        return "Its files are being recovered at this moment." if recovering.running(row) is not None else ""

    @override
    def in_the_way(self, row: Lease) -> str:
        try:
            recovering.require_recoverable(row)
        except LeaseError as error:
            return sentence(error)
        return ""

    @override
    def decide(self, row: Lease, data: dict[str, Any], *, actor: str) -> str:
        begun = recovering.recover_workspace(row.pk, row.company_id, actor=actor, reason=data["reason"])
        return f"Generation {begun.generation} is begun: its first attempt is due now."


class WithdrawContinuation(Keeping):
    key = "withdraw"
    model = Continuation
    label = "Withdraw…"
    explanation = "It is not wanted any more: no run is started for it. A retry may be asked for again afterwards."
    permission = "leases.withdraw_continuation"
    grave = True

    @classmethod
    @override
    def refusal(cls, row: Continuation) -> str:
        return "" if row.state == Continuation.State.WAITING else f"It does not wait any more: it is {row.state}."

    @override
    def decide(self, row: Continuation, data: dict[str, Any], *, actor: str) -> str:
        continuing.withdraw(row.pk, row.company_id, actor=actor, reason=data["reason"])
        return "It is withdrawn."


DECISIONS: tuple[type[Keeping], ...] = (RecoverFiles, WithdrawContinuation)


def urls(model: type[Model]) -> list[URLPattern]:
    return keeping.urls(admin.site, model, DECISIONS)


def of_lease_page(request: HttpRequest, lease: Lease) -> dict[str, Any]:
    """Return what the page of a lease shows of its recoveries: its generations, and whether it may be running."""
    generations = list(lease.recoveries.order_by("-generation"))
    return {
        "now": database_now(),
        "generations": [(one, _TONES[Recovery.State(one.state)], failure_in_words(one)) for one in generations],
        "archives": Archive.objects.filter(lease=lease).order_by("-begun_at"),
        "may_run_since": lease.may_be_running_since,
        "recovery_decisions": keeping.choices(request, lease, DECISIONS),
    }


# Recoveries


@admin.register(Recovery)
class RecoveryAdmin(ViewOnly[Recovery]):
    identities = ("id", "lease_id", "lease__run_id")
    list_display = (
        "begun",
        "shown_state",
        "sandbox",
        "generation",
        "attempts",
        "why",
        "next_attempt",
        "requested_by",
        "company",
    )
    list_filter = ("state", "failure", "company")
    list_select_related = ("company", "lease")
    search_fields = ("lease__resource_id__startswith", "requested_by", "company__name")
    ordering = ("-started_at",)
    readonly_fields = (
        "shown_state",
        "sandbox",
        "failed",
        "then",
        "begun_at",
        "no_later_than",
        "next_at",
        "over_at",
        "restarts",
        "owed_by",
        "saved",
        "continued_by",
    )
    fieldsets = (
        (None, {"fields": ("id", "shown_state", "company", "sandbox", "generation", "requested_by", "reason")}),
        ("Attempts", {"fields": ("attempts", "next_at", "failed", "then", "restarts", "restarted_epoch", "owed_by")}),
        ("Time", {"fields": ("begun_at", "no_later_than", "over_at")}),
        ("What came of it", {"fields": ("saved", "continued_by")}),
    )

    @override
    def get_fields(self, request: HttpRequest, obj: Any = None) -> list[Any]:
        return [name for _, options in self.fieldsets for name in options["fields"]]

    @override
    def more(self, request: HttpRequest, row: Recovery) -> dict[str, Any]:
        if row.state != Recovery.State.RUNNING:
            return {}
        kinds = (Obligation.Kind.RECOVER_WORKSPACE, Obligation.Kind.END_RECOVERY)
        return section(request, of_subject(Q(lease=row.lease_id, kind__in=kinds) | Q(operation__recovery=row)))

    @admin.display(description="state", ordering="state")
    def shown_state(self, row: Recovery) -> SafeString:
        return badge(row.get_state_display(), _TONES[Recovery.State(row.state)])

    @admin.display(description="sandbox", ordering="lease__resource_id")
    def sandbox(self, row: Recovery) -> SafeString:
        return _link(row.lease, row.lease.resource_id)

    @admin.display(description="last failure")
    def why(self, row: Recovery) -> str:
        return row.get_failure_display() or NONE

    @admin.display(description="why the last attempt failed")
    def failed(self, row: Recovery) -> str:
        return failure_in_words(row) or NONE

    @admin.display(description="what is to be done")
    def then(self, row: Recovery) -> str:
        return row.get_disposition_display() or NONE

    @admin.display(description="begun", ordering="started_at")
    def begun(self, row: Recovery) -> SafeString | str:
        return of_row(row, "started_at")

    @admin.display(description="begun")
    def begun_at(self, row: Recovery) -> SafeString | str:
        return exact_of_row(row, "started_at")

    @admin.display(description="no attempt begins after")
    def no_later_than(self, row: Recovery) -> SafeString | str:
        return exact_of_row(row, "ends_at")

    @admin.display(description="over")
    def over_at(self, row: Recovery) -> SafeString | str:
        return exact_of_row(row, "finished_at")

    @admin.display(description="next attempt", ordering="next_attempt_at")
    def next_attempt(self, row: Recovery) -> SafeString | str:
        return of_row(row, "next_attempt_at")

    @admin.display(description="next attempt")
    def next_at(self, row: Recovery) -> SafeString | str:
        return exact_of_row(row, "next_attempt_at")

    @admin.display(description="obligation, with each attempt")
    def owed_by(self, row: Recovery) -> SafeString | str:
        """Link to what was owed in its time: it is opened behind the generation, in its transaction."""
        of_lease = row.lease.obligations.filter(kind=Obligation.Kind.RECOVER_WORKSPACE, owed_since__gte=row.started_at)
        found = of_lease.order_by("pk")[:1]
        return _lines((_link(one, f"#{one.pk}"), one.get_closed_as_display() or "open") for one in found)

    @admin.display(description="starts")
    def restarts(self, row: Recovery) -> SafeString | str:
        starts = row.operations.order_by("created_at")
        return _lines((_link(one, f"{one.created_at:%Y-%m-%d %H:%M:%S} UTC"), f"is {one.state}") for one in starts)

    @admin.display(description="archives")
    def saved(self, row: Recovery) -> SafeString | str:
        found = row.archives.order_by("begun_at")
        return _lines(
            (
                _link(one, f"of {one.begun_at:%Y-%m-%d %H:%M} UTC"),
                f"{archives.standing(one)}{f', {filesizeformat(one.size)}' if one.size is not None else ''}",
            )
            for one in found
        )

    @admin.display(description="continuations bound to it")
    def continued_by(self, row: Recovery) -> SafeString | str:
        return _lines((_link(one, one.get_kind_display()), one.state) for one in row.continuations.all())


# Continuations


_MESSAGE = ("message_id", "written_at")


class HoldFilter(admin.SimpleListFilter):
    """By the code of the gate that is closed, of those that wait."""

    title = "what it waits for"
    parameter_name = "hold"

    @override
    def lookups(self, request: HttpRequest, model_admin: Any) -> Iterable[tuple[str, str]]:
        waiting = Continuation.objects.filter(state=Continuation.State.WAITING).exclude(hold="")
        return [(code, code.replace("_", " ")) for code in sorted(set(waiting.values_list("hold", flat=True)))]

    @override
    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset.filter(hold=self.value()) if self.value() else queryset


@admin.register(Continuation)
class ContinuationAdmin(ViewOnly[Continuation]):
    identities = ("id", "issue_id", "run_id", "started_run_id", "recovery_id")
    list_display = ("requested", "shown_state", "kind", "of_issue", "waits_because", "requested_by", "company")
    list_filter = ("state", HoldFilter, "kind", "company")
    list_select_related = ("company", "issue", "run", "recovery")
    search_fields = ("message_id__startswith", "requested_by", "issue__title", "company__name")
    ordering = ("-requested_at",)
    readonly_fields = (
        "shown_state",
        "waits_because",
        "of_issue",
        "of_run",
        "started",
        "bound_to",
        "asked_at",
        "written_at",
        "looked_at",
        "over_at",
    )
    fieldsets = (
        (None, {"fields": ("id", "shown_state", "hold", "waits_because", "looked_at", "over_at", "withdrawn_by")}),
        ("What was asked for", {"fields": ("kind", "requested_by", "asked_at", *_MESSAGE, "recovers_files")}),
        ("Of what", {"fields": ("company", "of_issue", "of_run", "bound_to")}),
        ("What it started", {"fields": ("started", "readiness")}),
    )  # fmt: skip

    @override
    def get_fields(self, request: HttpRequest, obj: Any = None) -> list[Any]:
        return [name for _, options in self.fieldsets for name in options["fields"]]

    @override
    def get_urls(self) -> list[URLPattern]:
        return [*urls(Continuation), *super().get_urls()]

    @override
    def more(self, request: HttpRequest, row: Continuation) -> dict[str, Any]:
        return section(request, of_subject(Q(continuation=row))) | {
            "recovery_decisions": keeping.choices(request, row, DECISIONS)
        }

    @admin.display(description="state", ordering="state")
    def shown_state(self, row: Continuation) -> SafeString:
        return badge(row.state, _WAITS[Continuation.State(row.state)])

    @admin.display(description="waits because")
    def waits_because(self, row: Continuation) -> str:
        if row.state != Continuation.State.WAITING:
            return NONE
        return row.hold_sentence or NOT_LOOKED

    @admin.display(description="issue", ordering="issue__title")
    def of_issue(self, row: Continuation) -> SafeString:
        return _link(row.issue, row.issue.title)

    @admin.display(description="continues")
    def of_run(self, row: Continuation) -> SafeString:
        return _link(row.run, str(row.run))

    @admin.display(description="run")
    def started(self, row: Continuation) -> SafeString | str:
        return _link(row.started_run, str(row.started_run)) if row.started_run else NONE

    @admin.display(description="recovery of the files")
    def bound_to(self, row: Continuation) -> SafeString | str:
        recovery = row.recovery
        return _link(recovery, f"generation {recovery.generation} ({recovery.state})") if recovery else NONE

    @admin.display(description="asked for", ordering="requested_at")
    def requested(self, row: Continuation) -> SafeString | str:
        return of_row(row, "requested_at")

    @admin.display(description="asked for")
    def asked_at(self, row: Continuation) -> SafeString | str:
        return exact_of_row(row, "requested_at")

    @admin.display(description="message written")
    def written_at(self, row: Continuation) -> SafeString | str:
        return exact_of_row(row, "authored_at")

    @admin.display(description="looked at, with another result than before")
    def looked_at(self, row: Continuation) -> SafeString | str:
        return exact_of_row(row, "evaluated_at")

    @admin.display(description="over")
    def over_at(self, row: Continuation) -> SafeString | str:
        return exact_of_row(row, "ended_at")


@admin.register(IssueFacts)
class IssueFactsAdmin(ViewOnly[IssueFacts]):
    identities = ("issue_id",)
    list_display = ("issue", "is_open", "assignee", "decisions_pending", "told")
    list_filter = ("is_open",)
    list_select_related = ("issue",)
    search_fields = ("issue__title", "assignee")
    ordering = ("-told_at",)

    @admin.display(description="told", ordering="told_at")
    def told(self, row: IssueFacts) -> SafeString | str:
        return of_row(row, "told_at")


@admin.register(RunFacts)
class RunFactsAdmin(ViewOnly[RunFacts]):
    identities = ("run_id", "run__issue_id")
    list_display = ("run", "adapter_attached", "coordinator", "coordinator_owner", "history_available", "told")
    list_filter = ("coordinator", "adapter_attached")
    list_select_related = ("run",)
    search_fields = ("coordinator_owner", "run__issue__title")
    ordering = ("-told_at",)

    @admin.display(description="told", ordering="told_at")
    def told(self, row: RunFacts) -> SafeString | str:
        return of_row(row, "told_at")


@admin.register(RecoveryAction)
class RecoveryActionAdmin(ViewOnly[RecoveryAction]):
    identities = ("id", "issue_id", "run_id")
    list_display = ("opened", "shown_state", "cause", "of_issue", "of_run", "closed_by", "company")
    list_filter = (("closed_at", admin.EmptyFieldListFilter), "company")
    list_select_related = ("company", "issue", "run")
    search_fields = ("cause", "issue__title", "company__name")
    ordering = ("-opened_at",)

    @admin.display(description="state")
    def shown_state(self, row: RecoveryAction) -> SafeString:
        return badge("closed", "plain") if row.closed_at else badge("open: blocks its issue", "pending")

    @admin.display(description="issue", ordering="issue__title")
    def of_issue(self, row: RecoveryAction) -> SafeString:
        return _link(row.issue, row.issue.title)

    @admin.display(description="run")
    def of_run(self, row: RecoveryAction) -> SafeString | str:
        return _link(row.run, str(row.run)) if row.run else NONE

    @admin.display(description="opened", ordering="opened_at")
    def opened(self, row: RecoveryAction) -> SafeString | str:
        return of_row(row, "opened_at")


def _link(row: Model, text: str) -> SafeString:
    url = reverse(f"admin:leases_{type(row).__name__.lower()}_change", args=[row.pk])
    return format_html('<a href="{}">{}</a>', url, short(text) if len(text) > 60 else text)  # noqa: PLR2004 - a line


def _lines(found: Iterable[tuple[SafeString, str]]) -> SafeString | str:
    return format_html_join(SafeString("<br>"), "{}: {}", found) or NONE
