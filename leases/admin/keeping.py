"""The pages on which an operator decides about sandboxes that are kept: hold, keep until, destroy, nobody's.

They answer for: nothing happens on a GET, without the permission or without a reason; a refusal is a sentence on the
page, with the name of what holds the sandbox. What is decided is the business of `leases.holds` and `leases.keeping`.
"""

from __future__ import annotations

from abc import abstractmethod
from datetime import timedelta
from typing import Any, ClassVar
from uuid import UUID

from django import forms
from django.contrib import admin, messages
from django.contrib.admin import AdminSite
from django.core.exceptions import PermissionDenied
from django.db.models import Model, Q, QuerySet
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.views import View

from leases import holds, keeping, ownership
from leases.admin.decisions import Choice, ReasonForm, sentence
from leases.clock import database_now
from leases.errors import LeaseError, NotFound
from leases.models import Continuation, Hold, Issue, Lease
from providers.contract import RESOURCE_ID_LIMIT

REVIEWED_AFTER = timedelta(days=7)
"""What a page proposes as the moment at which an operator's hold is reviewed."""
SHOWN_SANDBOXES = 20

_OVER = (Lease.State.EXPIRED, Lease.State.FAILED)


class UntilForm(ReasonForm):
    until = forms.DateTimeField(
        label="Until (UTC)",
        widget=forms.DateTimeInput(attrs={"type": "datetime-local", "autofocus": True}, format="%Y-%m-%dT%H:%M"),
    )
    field_order = ("until", "reason")


class ReviewForm(UntilForm):
    until = forms.DateTimeField(
        label="Review on (UTC)",
        widget=forms.DateTimeInput(attrs={"type": "datetime-local", "autofocus": True}, format="%Y-%m-%dT%H:%M"),
        help_text="The hold ends by itself then, unless somebody places it again.",
    )


class TypedForm(ReasonForm):
    confirmation = forms.CharField(
        label="Type its id",
        max_length=RESOURCE_ID_LIMIT,
        widget=forms.TextInput(attrs={"class": "vTextField", "autofocus": True, "autocomplete": "off"}),
    )
    field_order = ("confirmation", "reason")


class Keeping(View):
    """One decision about a lease, an issue or a hold: who may make it, its form, and what making it does."""

    key: ClassVar[str]
    model: ClassVar[type[Lease | Issue | Hold | Continuation]]
    label: ClassVar[str]
    explanation: ClassVar[str]
    permission: ClassVar[str]
    form: ClassVar[type[ReasonForm]] = ReasonForm
    grave: ClassVar[bool] = False
    hint: ClassVar[str] = "End what holds it first."
    """What to do about what is in the way."""

    @classmethod
    @abstractmethod
    def refusal(cls, row: Any) -> str:
        """Return why the decision makes no sense as the row stands, "" where it does. No lock, no promise."""

    @abstractmethod
    def decide(self, row: Any, data: dict[str, Any], *, actor: str) -> str:
        """Make the decision and return a sentence. Raises `LeaseError`."""

    def confirmation(self, row: Any) -> str:  # noqa: ARG002 - for those that ask for one
        return ""

    def in_the_way(self, row: Any) -> str:  # noqa: ARG002 - for those that something can stand in the way of
        """Return why it would be refused now, "" where it would not. The page says so instead of asking."""
        return ""

    @classmethod
    def address(cls, pk: UUID) -> str:
        return reverse(f"admin:leases_{cls.model.__name__.lower()}_{cls.key}", args=[pk])

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        if not request.user.has_perm(self.permission):
            raise PermissionDenied
        row: Any = self.model.objects.filter(pk=kwargs["pk"]).first()
        if row is None:
            raise Http404
        self.row = row
        refusal = self.refusal(row)
        if refusal:  # somebody else was faster, or a second click
            messages.warning(request, refusal)
            return HttpResponseRedirect(_page_of(row))
        return super().dispatch(request, *args, **kwargs)

    def get(self, request: HttpRequest, **_: Any) -> HttpResponse:
        return self._page(request, self.form(initial={"until": database_now() + REVIEWED_AFTER}))

    def post(self, request: HttpRequest, **_: Any) -> HttpResponse:
        form = self.form(request.POST)
        if not form.is_valid():
            return self._page(request, form)
        wanted = self.confirmation(self.row)
        if wanted and form.cleaned_data["confirmation"].strip() != wanted:
            form.add_error("confirmation", "What was typed is not its exact id; nothing was written.")
            return self._page(request, form)
        try:
            told = self.decide(self.row, form.cleaned_data, actor=request.user.get_username())
        except NotFound as error:
            raise Http404 from error
        except LeaseError as error:
            form.add_error("until" if _is_about_until(error, form) else None, sentence(error))
            return self._page(request, form)
        messages.success(request, told)
        return HttpResponseRedirect(_page_of(self.row))

    def _page(self, request: HttpRequest, form: ReasonForm) -> HttpResponse:
        row = self.row
        context: dict[str, Any] = {
            **admin.site.each_context(request),
            "title": self.label.rstrip("…"),
            "opts": self.model._meta,  # noqa: SLF001 - Django's own name for it
            "form": form,
            "back": _page_of(row),
            "explanation": self.explanation,
            "button": self.label.rstrip("…"),
            "grave": self.grave,
            "subject": row,
            "confirmation": self.confirmation(row),
            "in_the_way": self.in_the_way(row),
            "hint": self.hint,
            **facts(row),
        }
        return TemplateResponse(request, "admin/leases/keep.html", context)


class HoldLease(Keeping):
    key = "hold"
    model = Lease
    label = "Hold…"
    explanation = (
        "The sandbox is not destroyed before the day of review, whatever becomes of its run, its issue or its "
        "environment. A sandbox that is to be destroyed is stopped and kept instead, unless the call that destroys it "
        "was sent already."
    )
    permission = "leases.add_hold"
    form = ReviewForm

    @classmethod
    def refusal(cls, row: Lease) -> str:
        return "Its sandbox is gone: there is nothing to hold any more." if row.state in _OVER else ""

    def decide(self, row: Lease, data: dict[str, Any], *, actor: str) -> str:
        placed = holds.hold(
            company_id=row.company_id,
            kind=Hold.Kind.OPERATOR,
            holder=actor,
            lease_id=row.pk,
            until=data["until"],
            reason=data["reason"],
            actor=actor,
        )
        return f"Held until {placed.until:%Y-%m-%d %H:%M} UTC."


class HoldIssue(Keeping):
    key = "hold"
    model = Issue
    label = "Hold its sandboxes…"
    explanation = (
        "No sandbox of this issue that is stopped and kept, now or later, is destroyed before the day of review. "
        "What is in use is not touched."
    )
    permission = "leases.add_hold"
    form = ReviewForm

    @classmethod
    def refusal(cls, row: Issue) -> str:  # noqa: ARG003 - an issue can always be held
        return ""

    def decide(self, row: Issue, data: dict[str, Any], *, actor: str) -> str:
        placed = holds.hold(
            company_id=row.company_id,
            kind=Hold.Kind.OPERATOR,
            holder=actor,
            issue_id=row.pk,
            until=data["until"],
            reason=data["reason"],
            actor=actor,
        )
        return f"Every kept sandbox of this issue is held until {placed.until:%Y-%m-%d %H:%M} UTC."


class EndHold(Keeping):
    key = "end"
    model = Hold
    label = "End the hold…"
    explanation = (
        "Whoever placed it does not keep the sandbox any more. It is destroyed as soon as nothing else does, and its "
        "time is over."
    )
    permission = "leases.change_hold"
    grave = True

    @classmethod
    def refusal(cls, row: Hold) -> str:
        return f"It was ended already, by {row.ended_by}." if row.ended_at is not None else ""

    def decide(self, row: Hold, data: dict[str, Any], *, actor: str) -> str:
        holds.end(row.pk, company_id=row.company_id, actor=actor, reason=data["reason"])
        return "The hold is ended."


class _OfKept(Keeping):
    model = Lease

    @classmethod
    def refusal(cls, row: Lease) -> str:
        if row.state not in Lease.KEPT:
            return f"The lease is {row.get_state_display()}: no sandbox is kept."
        return ""


class KeepUntil(_OfKept):
    key = "keep_until"
    label = "Keep until…"
    explanation = (
        "The stopped sandbox is kept until then, whatever its environment says, and destroyed afterwards unless "
        "something holds it. An earlier time than today's is possible."
    )
    permission = "leases.change_lease"
    form = UntilForm

    @classmethod
    def refusal(cls, row: Lease) -> str:
        if row.orphaned_at is not None and row.state in Lease.KEPT:
            return "The sandbox is nobody's and has no time of its own: place a hold on it."
        return super().refusal(row)

    def decide(self, row: Lease, data: dict[str, Any], *, actor: str) -> str:
        lease = keeping.keep_until(
            row.pk, data["until"], company_id=row.company_id, actor=actor, reason=data["reason"]
        )  # fmt: skip
        return f"Kept until {lease.kept_until:%Y-%m-%d %H:%M} UTC."


class DestroyNow(_OfKept):
    key = "destroy_now"
    label = "Destroy now…"
    explanation = (
        "The sandbox is destroyed with its files as soon as a worker is free. That cannot be taken back once the call "
        "was sent. What is held is refused."
    )
    permission = "leases.delete_lease"
    form = TypedForm
    grave = True

    def confirmation(self, row: Lease) -> str:
        return row.resource_id

    def in_the_way(self, row: Lease) -> str:
        standing = holds.standing([row.pk])[row.pk]
        return sentence(keeping.Held(standing)) if standing.is_held else ""

    def decide(self, row: Lease, data: dict[str, Any], *, actor: str) -> str:
        keeping.destroy_now(row.pk, company_id=row.company_id, actor=actor, reason=data["reason"])
        return "Its destruction is owed now."


class MarkOrphaned(_OfKept):
    key = "mark_orphaned"
    label = "Mark as nobody's…"
    explanation = (
        "You say that nobody comes back for it. Its time is over at once: it is destroyed, with its files, as soon as "
        "nothing holds it."
    )
    permission = "leases.delete_lease"
    grave = True

    @classmethod
    def refusal(cls, row: Lease) -> str:
        if row.orphaned_at is not None:
            return "It is marked as nobody's already."
        return super().refusal(row)

    def decide(self, row: Lease, data: dict[str, Any], *, actor: str) -> str:
        keeping.mark_orphaned(row.pk, company_id=row.company_id, actor=actor, reason=data["reason"])
        return "Marked as nobody's: it is destroyed as soon as nothing holds it."


class DestroyForIssue(Keeping):
    key = "destroy_kept"
    model = Issue
    label = "Destroy its kept sandboxes…"
    explanation = (
        "Every sandbox of this issue that is stopped and kept is destroyed with its files. One that is held, such as a "
        "live run's, is left alone. What is in use is not touched."
    )
    permission = "leases.delete_lease"
    grave = True

    @classmethod
    def refusal(cls, row: Issue) -> str:
        kept = Lease.objects.filter(issue=row, state__in=Lease.KEPT).exists()
        return "" if kept else "No sandbox of this issue is kept."

    def decide(self, row: Issue, data: dict[str, Any], *, actor: str) -> str:
        done = keeping.destroy_for_issue(row.pk, company_id=row.company_id, actor=actor, reason=data["reason"])
        left = f" {len(done.held)} are held and left alone." if done.held else ""
        return f"The destruction of {len(done.destroyed)} is owed now.{left}"


DECISIONS: tuple[type[Keeping], ...] = (
    HoldLease, KeepUntil, MarkOrphaned, DestroyNow, HoldIssue, DestroyForIssue, EndHold,
)  # fmt: skip


def choices(request: HttpRequest, row: Model, decisions: tuple[type[Keeping], ...] = DECISIONS) -> tuple[Choice, ...]:
    """Return the decisions that this user may make about a row as it stands."""
    return tuple(
        Choice(one.label, one.address(row.pk), one.grave)
        for one in decisions
        if one.model is type(row) and request.user.has_perm(one.permission) and not one.refusal(row)
    )


def urls(site: AdminSite, model: type[Model], decisions: tuple[type[Keeping], ...] = DECISIONS) -> list[URLPattern]:
    """Return the addresses of the decisions about rows of a model."""
    name = model.__name__.lower()
    return [
        path(f"<uuid:pk>/{one.key}/", site.admin_view(one.as_view()), name=f"leases_{name}_{one.key}")
        for one in decisions
        if one.model is model
    ]


def facts(row: Model) -> dict[str, Any]:
    """Return what is known of why a row's sandboxes are kept, as `admin/leases/kept_section.html` shows it."""
    now = database_now()
    if isinstance(row, Issue):
        return {"now": now, "holds": open_holds(Q(issue=row)), **_of_issue(row)}
    if isinstance(row, Hold):
        return {"now": now, "holds": [row]} if row.lease is None else {**facts(row.lease), "holds": [row]}
    if not isinstance(row, Lease):
        return {"now": now}
    rows = open_holds(Q(lease=row) | Q(issue__isnull=False, issue=row.issue_id))
    return {"now": now, "holds": rows, "kept": ownership.of(row.pk), "lease": row}


def open_holds(whose: Q) -> QuerySet[Hold]:
    """Return the `Hold` rows that were not ended, also those whose time is over, newest first."""
    return Hold.objects.filter(whose, ended_at__isnull=True).select_related("lease", "issue").order_by("-created_at")


def _of_issue(issue: Issue) -> dict[str, Any]:
    """The kept sandboxes of an issue, each with what holds it."""
    leases = list(Lease.objects.filter(issue=issue, state__in=Lease.KEPT).order_by("pk")[: SHOWN_SANDBOXES + 1])
    found = holds.standing(lease.pk for lease in leases[:SHOWN_SANDBOXES])
    return {
        "sandboxes": [(lease, found[lease.pk]) for lease in leases[:SHOWN_SANDBOXES] if lease.pk in found],
        "more_sandboxes": len(leases) > SHOWN_SANDBOXES,
    }


def _is_about_until(error: LeaseError, form: forms.Form) -> bool:
    return "until" in form.fields and str(error).startswith("until ")


def _page_of(row: Model) -> str:
    return reverse(f"admin:leases_{type(row).__name__.lower()}_change", args=[row.pk])
