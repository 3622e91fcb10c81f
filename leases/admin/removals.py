"""The pages that end what people configure: delete an environment, close a company, archive or delete a credential.

They answer for: nothing happens on a GET, without the permission, without a reason, or without what has to be typed;
what stands in the way is listed before anything is asked; and there is no other way through the admin. What is refused,
and what ending one does, is the business of `leases.deleting`, `leases.closing` and `leases.archiving`.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, TypeVar
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
from typing_extensions import override

from leases import archiving, closing, deleting
from leases.admin.decisions import Choice, ReasonForm, sentence
from leases.admin.stock import Editable
from leases.blockers import Blocker, Blockers
from leases.errors import LeaseError, NotFound
from leases.models import Company, Credential, Environment

M = TypeVar("M", bound=Model)

_PAGES = {
    "lease": "lease",
    "operation": "operation",
    "obligation": "obligation",
    "run": "run",
    "hold": "hold",
    "account": "provideraccount",
    "inventoryfinding": "inventoryfinding",
}


class ConfirmedForm(ReasonForm):
    confirmation = forms.CharField(
        label="Type its name",
        max_length=200,
        widget=forms.TextInput(attrs={"class": "vTextField", "autofocus": True, "autocomplete": "off"}),
    )
    field_order: tuple[str, ...] = ("confirmation", "reason")


class ConsentForm(ConfirmedForm):
    consent = forms.BooleanField(
        label="Destroy what is kept",
        required=False,
        help_text="What is stopped and kept, or was left behind, owes its destruction. Its files are lost.",
    )
    field_order = ("confirmation", "consent", "reason")


class ForceForm(ReasonForm):
    force = forms.BooleanField(
        label="All the same",
        required=False,
        help_text="What depends on it cannot be ended any more until a person acts. The log lists it.",
    )
    field_order = ("force", "reason")


class Removal(View):
    """One way to end a row: who may, its form, what stands in the way, and what doing it does."""

    key: ClassVar[str]
    model: ClassVar[type[Environment | Company | Credential]]
    label: ClassVar[str]
    explanation: ClassVar[str]
    permission: ClassVar[str]
    form: ClassVar[type[ReasonForm]]

    @abstractmethod
    def in_the_way(self, row: Any) -> Blockers:
        """Return what stands in the way now."""

    @abstractmethod
    def end(self, row: Any, data: dict[str, Any], *, actor: str) -> str:
        """End the row and return a sentence. Raises `LeaseError`."""

    @classmethod
    def offered(cls, row: Any) -> bool:  # noqa: ARG003 - for those to whom it matters
        return True

    @classmethod
    def address(cls, pk: UUID) -> str:
        return reverse(f"admin:leases_{cls.model.__name__.lower()}_{cls.key}", args=[pk])

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        if not request.user.has_perm(self.permission):
            raise PermissionDenied
        row = self.model.objects.filter(pk=kwargs["pk"]).first()
        if row is None:
            raise Http404
        self.row: Any = row
        if not self.offered(row):
            messages.warning(request, f"{row} is {self._ended} already.")
            return HttpResponseRedirect(_change_page(row))
        return super().dispatch(request, *args, **kwargs)

    def get(self, request: HttpRequest, **_: Any) -> HttpResponse:
        return self._page(request, self.form())

    def post(self, request: HttpRequest, **_: Any) -> HttpResponse:
        form = self.form(request.POST)
        if not form.is_valid():
            return self._page(request, form)
        if "confirmation" in form.fields and form.cleaned_data["confirmation"].strip() != str(self.row):
            form.add_error("confirmation", "What was typed is not its exact name; nothing was written.")
            return self._page(request, form)
        try:
            told = self.end(self.row, form.cleaned_data, actor=request.user.get_username())
        except NotFound as error:
            raise Http404 from error
        except LeaseError as error:
            form.add_error(None, sentence(error))
            return self._page(request, form)
        messages.success(request, told)
        there = self.model.objects.filter(pk=self.row.pk).exists()
        return HttpResponseRedirect(_change_page(self.row) if there else _list_page(self.model))

    _ended: ClassVar[str] = "ended"

    def _page(self, request: HttpRequest, form: ReasonForm) -> HttpResponse:
        blockers = self.in_the_way(self.row)
        context: dict[str, Any] = {
            **admin.site.each_context(request),
            "title": self.label.rstrip("…"),
            "opts": self.model._meta,  # noqa: SLF001 - Django's own name for it
            "form": form,
            "may_be_done": not blockers.unyielding,
            "back": _change_page(self.row),
            "explanation": self.explanation,
            "button": self.label.rstrip("…"),
            "grave": True,
            "subject": self.row,
            "confirmation": str(self.row),
            "blockers": [(blocker, _link(blocker)) for blocker in blockers.listed],
            "more": blockers.total - len(blockers.listed),
        }
        return TemplateResponse(request, "admin/leases/removal.html", context)


class DeleteEnvironment(Removal):
    key = "remove"
    model = Environment
    label = "Delete…"
    explanation = (
        "The environment admits nothing new at once. Its leases survive it, and are torn down from their own record. "
        "A sandbox of a live run, and one that something needs, stand in the way."
    )
    permission = "leases.delete_environment"
    form = ConsentForm

    def in_the_way(self, row: Environment) -> Blockers:
        return deleting.what_stands_in_the_way(row.pk, company_id=row.company_id)

    def end(self, row: Environment, data: dict[str, Any], *, actor: str) -> str:
        done = deleting.delete_environment(
            row.pk, company_id=row.company_id, actor=actor, reason=data["reason"], consent=data["consent"]
        )
        return f"Deleted {done.name}. {len(done.owing)} leases owe their teardown because of it."


class CloseCompany(Removal):
    key = "close"
    model = Company
    label = "Close…"
    explanation = (
        "Only a company of which nothing is owed, held or unproven can be closed. Its name and those of its issues, "
        "environments, accounts and credentials are erased; its id, its journal, its receipts and its log stay. "
        "It cannot be opened again."
    )
    permission = "leases.delete_company"
    form = ConfirmedForm
    _ended = "closed"

    @classmethod
    def offered(cls, row: Company) -> bool:
        return row.closed_at is None

    def in_the_way(self, row: Company) -> Blockers:
        return closing.what_stands_in_the_way(row.pk)

    def end(self, row: Company, data: dict[str, Any], *, actor: str) -> str:
        closing.close_company(row.pk, actor=actor, reason=data["reason"])
        return f"Closed. What is left of {row} is its tombstone."


class _EndCredential(Removal):
    model = Credential
    form = ForceForm
    delete: ClassVar[bool]

    def in_the_way(self, row: Credential) -> Blockers:
        return archiving.what_depends_on(row.pk, company_id=row.company_id, delete=self.delete)

    def end(self, row: Credential, data: dict[str, Any], *, actor: str) -> str:
        end = archiving.delete_credential if self.delete else archiving.archive_credential
        end(row.pk, company_id=row.company_id, actor=actor, reason=data["reason"], force=data["force"])
        return f"{'Deleted' if self.delete else 'Archived'} {row}. No call is made with it any more."


class ArchiveCredential(_EndCredential):
    key = "archive"
    label = "Archive…"
    explanation = "No call is made with it any more, also none that would end a sandbox. It can be enabled again."
    permission = "leases.change_credential"
    delete = False
    _ended = "archived"

    @classmethod
    def offered(cls, row: Credential) -> bool:
        return row.status != Credential.Status.ARCHIVED


class DeleteCredential(_EndCredential):
    key = "remove"
    label = "Delete…"
    explanation = (
        "No call is made with it any more, also none that would end a sandbox. Another credential with the same "
        "reference stands in for it."
    )
    permission = "leases.delete_credential"
    delete = True


REMOVALS: tuple[type[Removal], ...] = (DeleteEnvironment, CloseCompany, ArchiveCredential, DeleteCredential)


class Removable(Editable[M]):
    """For the pages of what can be ended: the buttons, their pages, and no other way to delete it."""

    @override
    def get_urls(self) -> list[URLPattern]:
        return [*_urls(self.admin_site, self.model), *super().get_urls()]

    @override
    def delete_view(
        self,
        request: HttpRequest,
        object_id: str,
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        """Lead to the page that lists what stands in the way: Django's own would ask the database alone."""
        removal = next((one for one in REMOVALS if one.model is self.model and one.key == "remove"), None)
        if removal is None or not request.user.has_perm(removal.permission):
            raise PermissionDenied
        try:
            return HttpResponseRedirect(removal.address(UUID(object_id)))
        except ValueError as error:
            raise Http404 from error

    @override
    def delete_model(self, request: HttpRequest, obj: M) -> None:
        raise PermissionDenied

    @override
    def more(self, request: HttpRequest, row: M) -> dict[str, Any]:
        return {**super().more(request, row), "removals": choices(request, row), "show_delete": False}


def choices(request: HttpRequest, row: Model) -> tuple[Choice, ...]:
    """Return the ways in which this user may end a row as it stands."""
    return tuple(
        Choice(one.label, one.address(row.pk), grave=True)
        for one in REMOVALS
        if one.model is type(row) and request.user.has_perm(one.permission) and one.offered(row)
    )


def _urls(site: AdminSite, model: type[Model]) -> list[URLPattern]:
    name = model.__name__.lower()
    return [
        path(f"<uuid:pk>/{one.key}/", site.admin_view(one.as_view()), name=f"leases_{name}_{one.key}")
        for one in REMOVALS
        if one.model is model
    ]


def _link(blocker: Blocker) -> str:
    try:
        return reverse(f"admin:leases_{_PAGES[blocker.row]}_change", args=[blocker.id])
    except LookupError:
        return ""


def _change_page(row: Model) -> str:
    return reverse(f"admin:leases_{type(row).__name__.lower()}_change", args=[row.pk])


def _list_page(model: type[Model]) -> str:
    return reverse(f"admin:leases_{model.__name__.lower()}_changelist")
