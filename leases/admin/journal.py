"""The journal of creations, to look at."""

from __future__ import annotations

from django.contrib import admin
from django.utils.safestring import SafeString

from leases.admin.stock import ViewOnly
from leases.admin.times import badge, of_row
from leases.models import Operation

_TONES = {Operation.State.PENDING: "pending", Operation.State.ATTACHED: "good"}


@admin.register(Operation)
class OperationAdmin(ViewOnly[Operation]):
    identities = ("id", "lease_uuid", "run_uuid", "environment_uuid", "issue_uuid")
    list_display = (
        "name",
        "shown_state",
        "company",
        "account",
        "resource_id",
        "looks",
        "created",
        "cancelled",
        "resolved",
    )
    list_filter = ("state", "account__provider", "company")
    list_select_related = ("company", "account")
    search_fields = ("name__startswith", "resource_id__startswith", "account__name", "company__name")
    date_hierarchy = "created_at"
    ordering = ("-created_at",)

    @admin.display(description="state", ordering="state")
    def shown_state(self, operation: Operation) -> SafeString:
        return badge(operation.state, _TONES.get(Operation.State(operation.state), "plain"))

    @admin.display(description="begun", ordering="created_at")
    def created(self, operation: Operation) -> SafeString | str:
        return of_row(operation, "created_at")

    @admin.display(description="cancelled", ordering="cancelled_at")
    def cancelled(self, operation: Operation) -> SafeString | str:
        return of_row(operation, "cancelled_at")

    @admin.display(description="resolved", ordering="resolved_at")
    def resolved(self, operation: Operation) -> SafeString | str:
        return of_row(operation, "resolved_at")
