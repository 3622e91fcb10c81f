"""Environments: named ways to run, each with a configuration in its provider's own schema."""

from __future__ import annotations

from django.contrib import admin
from django.utils.html import format_html
from django.utils.safestring import SafeString

from leases.admin.lengths import LengthField, written
from leases.admin.removals import Removable
from leases.admin.schemas import schema_of, schemas
from leases.admin.stock import CheckedForm
from leases.admin.times import badge
from leases.models import Environment, ProviderAccount
from leases.models.environments import RETAIN_FOR, REUSE_IDLE_FOR


class EnvironmentForm(CheckedForm[Environment]):
    same_company = ("account",)
    reuse_idle_for = LengthField(
        label="Idle for",
        initial=REUSE_IDLE_FOR,
        help_text="How long a stopped sandbox waits for its next run, such as 7 days or 12 hours. It is "
        "destroyed then. Only sandboxes acquired from now on follow a change.",
    )
    retain_for = LengthField(
        label="Retained for",
        initial=RETAIN_FOR,
        required=False,
        help_text="How long a stopped sandbox is kept for its files, such as 30 days. Empty: until you decide; "
        "each one then stands in the queue, with what it costs.",
    )


@admin.register(Environment)
class EnvironmentAdmin(Removable[Environment]):
    form = EnvironmentForm
    identities = ("id", "account_id")
    list_display = (
        "name", "company", "account", "policy", "drain_seconds", "keeps", "hourly_price", "shown_status"
    )  # fmt: skip
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

    @admin.display(description="keeps", ordering="retain_for")
    def keeps(self, environment: Environment) -> SafeString:
        files = written(environment.retain_for) if environment.retain_for else "until you decide"
        told = '<span class="pe-id">idle {}</span><br><span class="pe-id">for files {}</span>'
        return format_html(told, written(environment.reuse_idle_for), files)

    @admin.display(description="status", ordering="status")
    def shown_status(self, environment: Environment) -> SafeString:
        return badge(
            environment.get_status_display(),
            "good" if environment.status == Environment.Status.ACTIVE else "plain",
        )
