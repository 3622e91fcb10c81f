"""The page that says whose each sandbox is, what keeps it, until when, and what that costs (`leases.ownership`)."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse

from leases.models import Lease
from leases.ownership import ownership
from leases.unfinished import unfinished


def owners_view(request: HttpRequest) -> HttpResponse:
    """Show the report. Reads one snapshot of every sandbox that is not gone, so it is a page of its own."""
    if not request.user.has_perm("leases.view_lease"):
        raise PermissionDenied
    told = ownership()
    context: dict[str, Any] = {
        **admin.site.each_context(request),
        "title": "Whose each sandbox is",
        "opts": Lease._meta,  # noqa: SLF001 - Django's own name for it
        "groups": [group for group in told.groups if group.count],
        "count": sum(group.count for group in told.groups),
        "total": told.total,
        "history": told.history,
        "mass_lapse": told.mass_lapse,
        "now": told.at,
        "after": unfinished(),
    }
    return TemplateResponse(request, "admin/leases/owners.html", context)
