"""Django's admin classes as ours start from: typed, and two ways to be more careful than the stock.

`ViewOnly` refuses to add, change and delete whoever asks and by whatever method. `Found` finds rows by any of their
identities with an index, and by a prefix of a name otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast
from uuid import UUID

from django import forms
from django.contrib import admin
from django.db.models import DateTimeField, Model, Q, QuerySet
from django.db.models.functions import Now
from django.http import HttpRequest, HttpResponse
from typing_extensions import override

from leases import audit
from leases.admin.times import exactly
from leases.models import Company

M = TypeVar("M", bound=Model)

if TYPE_CHECKING:
    _ModelAdmin = admin.ModelAdmin
    _ModelForm = forms.ModelForm
else:
    # Django's own classes take no type argument at run time.
    class _ModelAdmin(admin.ModelAdmin, Generic[M]):
        pass

    class _ModelForm(forms.ModelForm, Generic[M]):
        pass


class Found(_ModelAdmin[M]):
    """A list that is found by identity, and that does not count what it does not show."""

    identities: tuple[str, ...] = ("id",)
    """Columns that a whole UUID in the search box is compared with."""
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER  # a count per filter over tables that only grow
    list_per_page = 50

    @override
    def get_queryset(self, request: HttpRequest) -> QuerySet[M]:
        # The database's clock comes with each row, so that what is shown as late is late by the clock that decides.
        return cast("QuerySet[M]", super().get_queryset(request).annotate(database_now=Now()))

    @override
    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[M], search_term: str
    ) -> tuple[QuerySet[M], bool]:
        try:
            identity = UUID(search_term.strip())
        except ValueError:
            return super().get_search_results(request, queryset, search_term)
        same = Q.create([(name, identity) for name in self.identities], connector=Q.OR)
        return queryset.filter(same), False

    def more(self, request: HttpRequest, row: M) -> dict[str, Any]:  # noqa: ARG002 - for those who have something to add
        """Return what the page of a row shows beside its fields, by the names that its template knows."""
        return {}

    @override
    def render_change_form(
        self,
        request: HttpRequest,
        context: dict[str, Any],
        add: bool = False,
        change: bool = False,
        form_url: str = "",
        obj: M | None = None,
    ) -> HttpResponse:
        if obj is not None:
            context |= self.more(request, obj)
        return super().render_change_form(request, context, add, change, form_url, obj)


class ViewOnly(Found[M]):
    """Rows that the system writes and people only read: every column, times in full and relative."""

    @override
    def get_fields(self, request: HttpRequest, obj: Any = None) -> list[Any]:
        fields = self.model._meta.fields  # noqa: SLF001 - Django's own name for it
        return [exactly(field.name) if isinstance(field, DateTimeField) else field.name for field in fields]

    @override
    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    @override
    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    @override
    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


class Editable(Found[M]):
    """Rows that people configure. What identifies a row is written once, and every change is in the log.

    Only the columns that the person changed are written: the rest of the row belongs to the workers, who may have moved
    it (a circuit, a controller's lease) since the page was shown.
    """

    written_once: tuple[str, ...] = ("company",)
    once_made: tuple[str, ...] = ("id", "created_at")
    """What only a row that exists has to show."""

    @override
    def get_fieldsets(self, request: HttpRequest, obj: M | None = None) -> Any:
        sets = super().get_fieldsets(request, obj)
        if obj is not None:
            return sets
        asked = ((title, [name for name in options["fields"] if name not in self.once_made]) for title, options in sets)
        return [(title, {"fields": names}) for title, names in asked if names]

    @override
    def get_readonly_fields(self, request: HttpRequest, obj: M | None = None) -> tuple[str, ...]:
        fixed = tuple(super().get_readonly_fields(request, obj))
        return fixed if obj is None else (*fixed, *(name for name in self.written_once if name not in fixed))

    @override
    def save_model(self, request: HttpRequest, obj: M, form: Any, change: bool) -> None:
        if change:
            if form.changed_data:
                obj.save(update_fields=form.changed_data)
                self._record(request, obj, "changed", fields=form.changed_data)
        else:
            obj.save(force_insert=True)
            self._record(request, obj, "created")

    @override
    def delete_model(self, request: HttpRequest, obj: M) -> None:
        self._record(request, obj, "deleted", name=str(obj))
        super().delete_model(request, obj)

    def _record(self, request: HttpRequest, obj: M, what: str, **details: Any) -> None:
        company_id = obj.pk if isinstance(obj, Company) else obj.company_id  # type: ignore[attr-defined]
        action = f"{type(obj).__name__.lower()}.{what}"
        audit.record(action, obj, company_id=company_id, actor=request.user.get_username(), **details)


class CheckedForm(_ModelForm[M]):
    """A form in which every refusal of the model's reaches the page.

    A refusal that names a field which this page does not ask for (an account's provider is written once) stands on top;
    Django would fail on it. References to rows of another company are refused here, before the database does at commit.
    """

    same_company: tuple[str, ...] = ()

    @override
    def add_error(self, field: str | None, error: Any) -> None:
        told = getattr(error, "error_dict", None)
        if field is not None or told is None:
            super().add_error(field, error)
            return
        for name, errors in told.items():
            if name not in self.fields:
                super().add_error(None, errors)
            elif name not in self.errors:  # what could not even be read needs no second opinion
                super().add_error(name, errors)

    @override
    def clean(self) -> dict[str, Any] | None:
        cleaned = super().clean()
        company = self.cleaned_data.get("company")
        company_id = company.pk if company else getattr(self.instance, "company_id", None)
        for name in self.same_company:
            other = self.cleaned_data.get(name)
            if other is not None and company_id is not None and other.company_id != company_id:
                self.add_error(name, "belongs to another company")
        return cleaned
