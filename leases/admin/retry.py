"""*Retry now*: a person asks for an attempt, with a reason.

The page answers for: nothing happens on a GET, without the permission, without a reason, or for more rows than one
transaction should hold. What a retry does is the business of `leases.retrying`.
"""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied, ValidationError
from django.http import HttpRequest, HttpResponse, HttpResponseBadRequest, HttpResponseNotAllowed, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.http import url_has_allowed_host_and_scheme

from leases.clock import database_now
from leases.models import Obligation
from leases.retrying import retry_obligations

MAX_ROWS = 1000
"""Obligations that one retry may name: each is locked until all are written."""
SHOWN_ROWS = 20

PERMISSION = "leases.change_obligation"


def may_retry(request: HttpRequest) -> bool:
    """Return whether this user may ask for attempts. Looking at obligations does not suffice."""
    return request.user.has_perm(PERMISSION)


class RetryForm(forms.Form):
    ids = forms.CharField(widget=forms.HiddenInput)
    next = forms.CharField(widget=forms.HiddenInput, required=False)
    reason = forms.CharField(
        max_length=500,
        widget=forms.Textarea(attrs={"rows": 3, "cols": 60, "class": "vLargeTextField", "autofocus": True}),
        help_text="Goes into the log under your name. At most 500 characters.",
    )

    def clean_ids(self) -> list[int]:
        return parse_ids(self.cleaned_data["ids"])


def parse_ids(text: str) -> list[int]:
    """Return the numbers of a comma-separated list. Raises `ValidationError`."""
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and len(part) <= 18 for part in parts):  # noqa: PLR2004 - fits bigint
        raise ValidationError("not a list of obligations")
    return sorted({int(part) for part in parts})


def ask(request: HttpRequest, ids: list[int], *, back: str, form: RetryForm | None = None) -> HttpResponse:
    """Show which obligations would be tried, and ask for the reason."""
    if len(ids) > MAX_ROWS:
        messages.error(request, f"Retry at most {MAX_ROWS} obligations at once; {len(ids)} are selected.")
        return HttpResponseRedirect(back)
    rows = Obligation.objects.filter(pk__in=ids, closed_at__isnull=True).order_by("pk")
    count = rows.count()
    if not count:
        messages.warning(request, "Nothing of this is owed any more.")
        return HttpResponseRedirect(back)
    form = form or RetryForm(initial={"ids": ",".join(map(str, ids)), "next": back})
    context: dict[str, Any] = {
        **admin.site.each_context(request),
        "title": "Retry now",
        "opts": Obligation._meta,  # noqa: SLF001 - Django's own name for it
        "form": form,
        "back": back,
        "count": count,
        "closed": len(ids) - count,
        "rows": rows.select_related("account", "lease", "operation")[:SHOWN_ROWS],
        "more": max(0, count - SHOWN_ROWS),
        "now": database_now(),
    }
    return TemplateResponse(request, "admin/leases/obligation/retry.html", context)


def retry_view(request: HttpRequest) -> HttpResponse:
    """Ask for the reason, and with one ask for the attempts."""
    if request.method != "POST":
        return HttpResponseNotAllowed(["POST"])
    if not may_retry(request):
        raise PermissionDenied
    back = request.POST.get("next", "")
    if not url_has_allowed_host_and_scheme(back, allowed_hosts={request.get_host()}, require_https=request.is_secure()):
        back = reverse("admin:leases_obligation_changelist")
    try:
        ids = parse_ids(request.POST.get("ids", ""))
    except ValidationError:
        return HttpResponseBadRequest("not a list of obligations", content_type="text/plain")
    if "confirmed" not in request.POST or len(ids) > MAX_ROWS:
        return ask(request, ids, back=back)
    form = RetryForm(request.POST)
    if not form.is_valid():
        return ask(request, ids, back=back, form=form)
    reason = form.cleaned_data["reason"]
    count = retry_obligations(ids, actor=request.user.get_username(), reason=reason)
    if count:
        noun = "obligation" if count == 1 else "obligations"
        messages.success(request, f"Asked for one attempt at {count} {noun}. A live attempt is not interrupted.")
    if count < len(ids):
        messages.warning(request, f"{len(ids) - count} of the {len(ids)} named are not owed any more.")
    return HttpResponseRedirect(back)
