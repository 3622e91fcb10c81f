"""Environments: named ways to run, each with a configuration in its provider's own schema."""

from __future__ import annotations

from django.contrib import admin
from django.utils.safestring import SafeString

from leases.admin.removals import Removable
from leases.admin.schemas import schema_of, schemas
from leases.admin.stock import CheckedForm
from leases.admin.times import badge
from leases.models import Environment, ProviderAccount


class EnvironmentForm(CheckedForm[Environment]):
    same_company = ("account",)


@admin.register(Environment)
class EnvironmentAdmin(Removable[Environment]):
    form = EnvironmentForm
    identities = ("id", "account_id")
    list_display = ("name", "company", "account", "policy", "drain_seconds", "hourly_price", "shown_status")
    list_filter = ("status", "policy", "account__provider", "company")
    list_select_related = ("company", "account")
    search_fields = ("name", "account__name", "company__name")
    autocomplete_fields = ("company", "account")
    ordering = ("name",)
    fieldsets = (
        (None, {"fields": ("company", "name", "account", "config", "expected_config")}),
        (
            "Afterwards",
            {"fields": ("policy", "drain_seconds", "reuse_idle_for", "retain_for", "hourly_price", "status")},
        ),
        (None, {"fields": ("id", "created_at")}),
    )
    readonly_fields = ("expected_config", "id", "created_at")

    @admin.display(description="What a config says")
    def expected_config(self, environment: Environment) -> SafeString:
        account = ProviderAccount.objects.filter(pk=environment.account_id).first()  # none chosen yet on a new page
        return schema_of(account.provider, "Config") if account else schemas("Config")

    @admin.display(description="status", ordering="status")
    def shown_status(self, environment: Environment) -> SafeString:
        return badge(
            environment.get_status_display(),
            "good" if environment.status == Environment.Status.ACTIVE else "plain",
        )
