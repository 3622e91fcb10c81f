"""The pages on which an operator decides: adopt a sandbox, look again now, settle without proof.

They answer for: nothing happens on a GET, without the permission, without a reason, or without what had to be typed;
and a refusal is a sentence on the page. What a decision does is the business of `leases.deciding`.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, ClassVar
from uuid import UUID

from django import forms
from django.contrib import admin, messages
from django.contrib.admin import AdminSite
from django.core.exceptions import PermissionDenied
from django.db.models import Model
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.views import View

from leases import arguments, bounds, deciding
from leases.admin import retry
from leases.clock import database_now
from leases.errors import LeaseError, NotFound
from leases.models import Obligation, Operation
from providers.contract import RESOURCE_ID_LIMIT


@dataclass(frozen=True, slots=True)
class Choice:
    """A decision that is offered: the words on its button, and where it leads."""

    label: str
    url: str
    grave: bool


class ReasonForm(forms.Form):
    reason = forms.CharField(
        max_length=arguments.REASON_LIMIT,
        widget=forms.Textarea(attrs={"rows": 3, "cols": 60, "class": "vLargeTextField"}),
        help_text=f"Goes into the log under your name. At most {arguments.REASON_LIMIT} characters.",
    )


class AdoptForm(ReasonForm):
    resource_id = forms.CharField(
        label="Sandbox's id",
        max_length=RESOURCE_ID_LIMIT,
        widget=forms.TextInput(attrs={"class": "vTextField", "autofocus": True, "autocomplete": "off"}),
        help_text="Exactly as the provider names it. The provider is asked before anything is written.",
    )
    field_order = ("resource_id", "reason")


class SettleForm(ReasonForm):
    confirmation = forms.CharField(
        label="Type its name",
        max_length=RESOURCE_ID_LIMIT,
        widget=forms.TextInput(attrs={"class": "vTextField", "autofocus": True, "autocomplete": "off"}),
    )
    field_order = ("confirmation", "reason")


class Decision(View):
    """One decision about one row: who may make it, its form, and what making it does."""

    key: ClassVar[str]
    """The last part of its address."""
    model: ClassVar[type[Model]]
    """What its address names."""
    label: ClassVar[str]
    explanation: ClassVar[str]
    permission: ClassVar[str]
    form: ClassVar[type[ReasonForm]] = ReasonForm
    grave: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def offered(cls, row: Obligation) -> UUID | int | None:
        """Return the id that this decision about an obligation is addressed with, or None where it makes no sense."""

    @abstractmethod
    def find(self, pk: Any) -> tuple[Operation | None, Obligation | None]:
        """Return the operation and the obligation that are decided about. Raises `LeaseError` where nothing is."""

    @abstractmethod
    def decide(self, data: dict[str, Any], *, actor: str) -> tuple[str, Model]:
        """Make the decision and return a sentence with the row to show next. Raises `LeaseError`."""

    @classmethod
    def address(cls, pk: UUID | int) -> str:
        return reverse(f"admin:leases_{cls.model.__name__.lower()}_{cls.key}", args=[pk])

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        if not request.user.has_perm(self.permission):
            raise PermissionDenied
        self.pk = kwargs["pk"]
        try:
            self.operation, self.obligation = self.find(self.pk)
        except NotFound as error:
            raise Http404 from error
        except LeaseError as error:
            return self._back(request, error)
        return super().dispatch(request, *args, **kwargs)

    def get(self, request: HttpRequest, **_: Any) -> HttpResponse:
        return self._page(request, self.form())

    def post(self, request: HttpRequest, **_: Any) -> HttpResponse:
        form = self.form(request.POST)
        if not form.is_valid():
            return self._page(request, form)
        try:
            told, row = self.decide(form.cleaned_data, actor=request.user.get_username())
        except LeaseError as error:
            if error.code in _OVERTAKEN:
                return self._back(request, error)
            form.add_error(None, sentence(error))
            return self._page(request, form)
        messages.success(request, told)
        return HttpResponseRedirect(_page_of(row))

    def _back(self, request: HttpRequest, error: LeaseError) -> HttpResponse:
        """Somebody else was faster, or a second click: say how it stands."""
        messages.warning(request, sentence(error))
        return HttpResponseRedirect(reverse(f"admin:leases_{self.model.__name__.lower()}_change", args=[self.pk]))

    def _page(self, request: HttpRequest, form: ReasonForm) -> HttpResponse:
        operation = self.operation
        asks_for_name = issubclass(self.form, SettleForm)
        context: dict[str, Any] = {
            **admin.site.each_context(request),
            "title": self.label.rstrip("…"),
            "opts": self.model._meta,  # noqa: SLF001 - Django's own name for it
            "form": form,
            "back": reverse(f"admin:leases_{self.model.__name__.lower()}_change", args=[self.pk]),
            "explanation": self.explanation,
            "button": self.label.rstrip("…"),
            "grave": self.grave,
            "obligation": self.obligation,
            "operation": operation,
            "subject": operation if self.model is Operation else self.obligation,
            "appears_until": appears_until(operation),
            "marks": sorted(operation.marks.items()) if operation else (),
            "confirmation": deciding.confirmation_of(self.obligation) if self.obligation and asks_for_name else "",
            "last_attempt": self.obligation.attempts.order_by("-claimed_at").first() if self.obligation else None,
            "now": database_now(),
        }
        return TemplateResponse(request, "admin/leases/decide.html", context)


class Adopt(Decision):
    key = "adopt"
    model = Operation
    label = "Adopt a sandbox…"
    explanation = (
        "You found the sandbox of this creation at the provider. It is asked whether this is the account that was "
        "recorded, whether the sandbox exists, and whether it carries our marks and those of this very creation. Then "
        "the sandbox gets an owner, which tears it down: it is destroyed."
    )
    permission = "leases.change_operation"
    form = AdoptForm

    @classmethod
    def offered(cls, row: Obligation) -> UUID | int | None:
        operation = row.operation
        if operation is None or operation.kind != Operation.Kind.CREATE:
            return None
        return operation.pk if operation.state in Operation.UNOWNED else None

    def find(self, pk: UUID) -> tuple[Operation, Obligation | None]:
        operation = Operation.objects.select_related("account").filter(pk=pk).first()
        if operation is None:
            raise NotFound(f"no operation {pk}")
        return operation, Obligation.objects.filter(operation=operation).order_by("-pk").first()

    def decide(self, data: dict[str, Any], *, actor: str) -> tuple[str, Model]:
        operation, _ = self.find(self.pk)
        lease = deciding.adopt(
            operation.pk,
            data["resource_id"],
            company_id=operation.company_id,
            actor=actor,
            reason=data["reason"],
        )
        return "Adopted: this lease owns the sandbox now, and owes its teardown.", lease


class OfObligation(Decision):
    """A decision that is addressed by the obligation it is about."""

    model = Obligation

    def find(self, pk: int) -> tuple[Operation | None, Obligation]:
        row = Obligation.objects.filter(pk=pk).first()
        if row is None:
            raise NotFound(f"no obligation {pk}")
        row = deciding.open_obligation(row.pk, company_id=row.company_id)
        return row.operation, row


class Recheck(OfObligation):
    key = "recheck"
    label = "Re-check now…"
    explanation = (
        "One attempt is made as soon as a worker is free. Where the secret changed since the creation was asked for, "
        "this also says that the one of today will do."
    )
    permission = retry.PERMISSION

    @classmethod
    def offered(cls, row: Obligation) -> UUID | int | None:
        return row.pk if row.is_open and row.quiet in Obligation.FOR_PEOPLE else None

    def decide(self, data: dict[str, Any], *, actor: str) -> tuple[str, Model]:
        _, row = self.find(self.pk)
        deciding.recheck(obligation_id=row.pk, company_id=row.company_id, actor=actor, reason=data["reason"])
        return f"Asked for one attempt at {row}.", row


class SettleUnverified(OfObligation):
    key = "settle_unverified"
    label = "Settle as unverified…"
    explanation = (
        "This ends the retries and not the debt. Nothing becomes proven by it, nothing is called at the provider, and "
        "what may still run there goes on running. It cannot be taken back; what comes late still counts."
    )
    permission = "leases.settle_unverified"
    form = SettleForm
    grave = True

    @classmethod
    def offered(cls, row: Obligation) -> UUID | int | None:
        """Only once the machine is at its end: what is merely late is nobody's to give up."""
        at_an_end = row.quiet in Obligation.FOR_PEOPLE or row.escalated_at is not None
        return row.pk if at_an_end and deciding.is_settleable(row) else None

    def find(self, pk: int) -> tuple[Operation | None, Obligation]:
        operation, row = super().find(pk)
        deciding.require_settleable(row)
        return operation, row

    def decide(self, data: dict[str, Any], *, actor: str) -> tuple[str, Model]:
        _, row = self.find(self.pk)
        deciding.settle_unverified(
            row.pk,
            confirmation=data["confirmation"],
            company_id=row.company_id,
            actor=actor,
            reason=data["reason"],
        )
        return f"{row} is not tried any more. Nothing proves that it ended: the debt stays visible.", row


DECISIONS: tuple[type[Decision], ...] = (Adopt, Recheck, SettleUnverified)

_OVERTAKEN = frozenset({"not_owed", "in_flight", "resolved"})
"""Refusals about where the row stands: no other input would change them."""


def choices(request: HttpRequest, row: Obligation, among: tuple[type[Decision], ...] = DECISIONS) -> tuple[Choice, ...]:
    """Return the decisions that this user may make about an obligation as it stands."""
    offered = ((decision, decision.offered(row)) for decision in among if request.user.has_perm(decision.permission))
    return tuple(Choice(d.label, d.address(pk), d.grave) for d, pk in offered if pk is not None)


def urls(site: AdminSite, model: type[Model], among: tuple[type[Decision], ...] = DECISIONS) -> list[URLPattern]:
    """Return the addresses of the decisions about rows of a model."""
    kind = "uuid" if model is Operation else "int"
    return [
        path(
            f"<{kind}:pk>/{decision.key}/",
            site.admin_view(decision.as_view()),
            name=f"leases_{model.__name__.lower()}_{decision.key}",
        )
        for decision in among
        if decision.model is model
    ]


def appears_until(operation: Operation | None) -> datetime | None:
    """Return until when a creation that nobody answered may still appear at its provider."""
    if operation is None or operation.kind != Operation.Kind.CREATE:
        return None
    return operation.created_at + timedelta(seconds=bounds.CREATE + operation.creation_window)


def _page_of(row: Model) -> str:
    return reverse(f"admin:leases_{type(row).__name__.lower()}_change", args=[row.pk])


def sentence(error: LeaseError) -> str:
    """Return a refusal as a sentence for a page."""
    told = str(error)
    return told[:1].upper() + told[1:] + ("" if told.endswith(".") else ".")
