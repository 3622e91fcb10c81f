"""The journal of creations and starts: to look at, with what is owed of each and what may be decided about it."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import Q
from django.http import HttpRequest
from django.urls import URLPattern
from django.utils.safestring import SafeString
from typing_extensions import override

from leases.admin import decisions
from leases.admin.obligations import newest_attempts
from leases.admin.owed import of_subject, section
from leases.admin.stock import ViewOnly
from leases.admin.times import NONE, badge, of_row, short
from leases.models import Obligation, Operation

_TONES = {
    Operation.State.PENDING: "pending",
    Operation.State.ATTACHED: "good",
    Operation.State.UNVERIFIED: "bad",
}


@admin.register(Operation)
class OperationAdmin(ViewOnly[Operation]):
    identities = ("id", "lease_uuid", "run_uuid", "environment_uuid", "issue_uuid", "source_id")
    list_display = (
        "shown_name",
        "kind",
        "shown_state",
        "created",
        "sandbox",
        "started_from",
        "request_key",
        "account_name",
        "looks",
        "company",
    )
    list_filter = ("state", "kind", "account__provider", "company")
    list_select_related = ("company", "account")
    search_fields = (
        "name__startswith",
        "resource_id__startswith",
        "request_key__startswith",
        "account__name",
        "company__name",
    )
    date_hierarchy = "created_at"
    ordering = ("-created_at",)

    @override
    def get_urls(self) -> list[URLPattern]:
        return [*decisions.urls(self.admin_site, Operation), *super().get_urls()]

    @override
    def more(self, request: HttpRequest, row: Operation) -> dict[str, Any]:
        owed = of_subject(Q(operation=row))
        # The search for it: what is open, else what was tried last.
        tried = next((one for one in owed if one.is_open), None) or Obligation.objects.filter(operation=row).last()
        return section(request, owed) | {"attempts": newest_attempts(tried) if tried else []}

    @admin.display(description="name", ordering="name")
    def shown_name(self, operation: Operation) -> SafeString | str:
        return short(operation.name)

    @admin.display(description="state", ordering="state")
    def shown_state(self, operation: Operation) -> SafeString:
        return badge(operation.state, _TONES.get(Operation.State(operation.state), "plain"))

    @admin.display(description="sandbox", ordering="resource_id")
    def sandbox(self, operation: Operation) -> SafeString | str:
        return short(operation.resource_id) or NONE

    @admin.display(description="starts the sandbox of")
    def started_from(self, operation: Operation) -> SafeString | str:
        return short(str(operation.source_id)) if operation.source_id else NONE

    @admin.display(description="begun", ordering="created_at")
    def created(self, operation: Operation) -> SafeString | str:
        return of_row(operation, "created_at")

    @admin.display(description="account", ordering="account__name")
    def account_name(self, operation: Operation) -> str:
        return operation.account.name
