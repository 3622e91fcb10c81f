"""What the admin's templates say with one word: `{% owed_table %}`, `{% when at now %}`, `{{ length|span }}`."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from django import template
from django.utils.html import format_html
from django.utils.safestring import SafeString

from leases import proof
from leases.admin import times
from leases.admin.owed import tallies
from leases.admin.situation import Situation
from leases.clock import database_now
from leases.holds import FOREVER
from leases.models import ProviderAccount

register = template.Library()


@register.simple_tag
def when(at: datetime | None, now: datetime) -> SafeString | str:
    return times.when(at, now)


@register.simple_tag
def until(at: datetime | None, now: datetime) -> SafeString | str:
    """Say until when something holds; None and `FOREVER` where only a write ends it."""
    if at is None or at == FOREVER:
        return "until it is ended"
    return format_html("until {} UTC ({})", f"{at:%Y-%m-%d %H:%M}", times.when(at, now))


@register.filter
def span(length: timedelta | None) -> str:
    return times.NONE if length is None else times.span(length)


@register.inclusion_tag("admin/leases/owed_table.html", takes_context=True)
def owed_table(context: dict[str, Any]) -> dict[str, Any]:
    """Show how much is owed to those who may see obligations. Reads open rows only."""
    if not context["request"].user.has_perm("leases.view_obligation"):
        return {"allowed": False}
    return {
        "allowed": True,
        "perms": context["perms"],
        "tallies": tallies(),
        "situations": [(situation.value, situation.label) for situation in Situation],
        "broken": ProviderAccount.objects.filter(circuit=ProviderAccount.Circuit.OPEN).count(),
        "debts": proof.unproven().count(),
        "now": database_now(),
    }
