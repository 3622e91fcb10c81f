"""The log of who did what, to look at."""

from __future__ import annotations

from django.contrib import admin
from django.utils.html import format_html
from django.utils.safestring import SafeString

from leases.admin.filters import SubjectFilter
from leases.admin.stock import ViewOnly
from leases.admin.times import of_row, short
from leases.models import ActivityEntry


@admin.register(ActivityEntry)
class ActivityEntryAdmin(ViewOnly[ActivityEntry]):
    identities = ("subject_id", "company_id")
    list_display = ("happened", "action", "actor", "subject", "reason", "company")
    list_filter = (SubjectFilter, "company")
    list_select_related = ("company",)
    search_fields = ("action__startswith", "actor__startswith", "subject_id__exact", "reason")
    date_hierarchy = "at"
    ordering = ("-at", "-id")

    @admin.display(description="subject", ordering="subject_type")
    def subject(self, entry: ActivityEntry) -> SafeString:
        return format_html("{} {}", entry.subject_type, short(entry.subject_id))

    @admin.display(description="when", ordering="at")
    def happened(self, entry: ActivityEntry) -> SafeString | str:
        return of_row(entry, "at")
