"""Receipts, the only proof, to look at."""

from __future__ import annotations

from django.contrib import admin
from django.utils.safestring import SafeString

from leases.admin.stock import ViewOnly
from leases.admin.times import of_row
from leases.models import Receipt


@admin.register(Receipt)
class ReceiptAdmin(ViewOnly[Receipt]):
    identities = ("lease_id", "run_uuid", "company_uuid", "attempt_id")
    list_display = ("id", "evidence", "ended", "epoch", "resource_id", "account", "lease_id", "confirmed")
    list_filter = ("evidence", "ended", "account__provider")
    list_select_related = ("account",)
    search_fields = ("resource_id__startswith", "account__name", "account_identity__startswith", "lease__company__name")
    date_hierarchy = "confirmed_at"
    ordering = ("-id",)

    @admin.display(description="confirmed", ordering="confirmed_at")
    def confirmed(self, receipt: Receipt) -> SafeString | str:
        return of_row(receipt, "confirmed_at")
