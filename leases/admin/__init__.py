"""The operator's pages: Django's stock admin, one module per subject.

What the system itself writes (leases, obligations, attempts, receipts, operations, activities, the log) can only be
looked at here; an obligation is moved by its action alone, and what becomes of a kept sandbox is decided on pages that
ask for a reason. What people configure can be edited, and what does not fit its provider's schema is refused in the
form. Nothing is ever deleted in bulk.
"""

from django.contrib import admin

from leases.admin import (
    accounts,
    archives,
    audit,
    environments,
    holds,
    inventory,
    journal,
    lease,
    obligations,
    receipts,
    recovery,
    tenancy,
)

__all__ = [
    "accounts",
    "archives",
    "audit",
    "environments",
    "holds",
    "inventory",
    "journal",
    "lease",
    "obligations",
    "receipts",
    "recovery",
    "tenancy",
]

admin.site.disable_action("delete_selected")
admin.site.site_header = admin.site.site_title = "paperclip_env"
admin.site.index_title = "What is owed, and the rows behind it"
admin.site.index_template = "admin/leases/index.html"
