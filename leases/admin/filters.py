"""Filters whose choices are known beforehand: the stock ones ask the whole table which values it holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.contrib import admin
from django.contrib.admin.views.main import ChangeList
from django.db.models import QuerySet
from django.http import HttpRequest
from typing_extensions import override

from leases.models import Obligation
from providers.contract import ErrorKind


class OpenUnlessAsked(admin.SimpleListFilter):
    """A choice of which `open` stands where nobody chose; there is no other way to say *all* than to choose it."""

    @property
    def chosen(self) -> str:
        return self.value() or "open"

    @override
    def choices(self, changelist: ChangeList) -> Iterator[Any]:
        for value, label in self.lookup_choices:
            yield {
                "selected": value == self.chosen,
                "query_string": changelist.get_query_string({str(self.parameter_name): value}),
                "display": label,
            }


class OneOf(admin.SimpleListFilter):
    """A column that is compared with one of some words."""

    column: str
    words: tuple[str, ...]

    @override
    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(word, word.replace("_", " ")) for word in self.words]

    @override
    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        chosen = self.value()
        return queryset.filter(**{self.column: chosen}) if chosen in self.words else queryset


class ErrorKindFilter(OneOf):
    title = "error"
    parameter_name = "error"
    column = "error_kind"
    words = tuple(kind.value for kind in ErrorKind)


class LastErrorKindFilter(ErrorKindFilter):
    title = "last error"
    column = "last_error_kind"


class QuietFilter(OneOf):
    title = "why a person is needed"
    parameter_name = "why"
    column = "quiet"
    words = Obligation.FOR_PEOPLE


class SubjectFilter(OneOf):
    title = "subject"
    parameter_name = "subject"
    column = "subject_type"
    words = (
        "lease",
        "hold",
        "obligation",
        "operation",
        "archive",
        "provideraccount",
        "environment",
        "credential",
        "run",
        "issue",
        "company",
    )
