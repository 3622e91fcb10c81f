"""Cells as people read them: times relative to the database's clock, with the exact moment on hover; ids; badges."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from functools import cache
from typing import Any

from django.utils.html import format_html
from django.utils.safestring import SafeString

ID_SHOWN = 16
"""Characters of a sandbox's id or name that a list shows."""

NONE = "–"  # noqa: RUF001 - the dash that the stock admin shows for nothing

_UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))


def span(length: timedelta) -> str:
    """Return a length of time in its two largest units: `2 h 5 min`, `41 s`, `0.3 s`."""
    seconds = abs(length.total_seconds())
    if 0 < seconds < 1:
        return f"{seconds:.1f} s" if seconds >= 0.1 else "0 s"  # noqa: PLR2004 - one decimal is shown
    parts: list[str] = []
    for size, unit in _UNITS:
        if seconds >= size or (unit == "s" and not parts):
            parts.append(f"{int(seconds // size)} {unit}")
            seconds %= size
        elif parts:
            break
        if len(parts) == 2:  # noqa: PLR2004 - finer is noise
            break
    return " ".join(parts)


def relative(at: datetime, now: datetime) -> str:
    """Return `in 3 min 20 s`, `2 d 1 h ago` or `now`."""
    if abs(at - now) < timedelta(seconds=1):
        return "now"
    return f"in {span(at - now)}" if at > now else f"{span(at - now)} ago"


def when(at: datetime | None, now: datetime) -> SafeString | str:
    """Return a `<time>` that reads as relative and holds the exact moment."""
    if at is None:
        return NONE
    return format_html(
        '<time class="pe-when" datetime="{}" title="{} UTC">{}</time>',
        at.isoformat(),
        f"{at:%Y-%m-%d %H:%M:%S}",
        relative(at, now),
    )


def of_row(row: Any, name: str) -> SafeString | str:
    """Return a row's time relative to the database's clock that was read with it."""
    return when(getattr(row, name), row.database_now)


def exact_of_row(row: Any, name: str) -> SafeString | str:
    """Return a row's time in full, and relative to the database's clock."""
    at: datetime | None = getattr(row, name)
    if at is None:
        return NONE
    text = f"{at:%Y-%m-%d %H:%M:%S} UTC ({relative(at, row.database_now)})"
    return format_html('<time datetime="{}">{}</time>', at.isoformat(), text)


@cache
def exactly(name: str) -> Callable[[Any], SafeString | str]:
    """Return a read-only field that shows a column's time in full."""

    def field(row: Any) -> SafeString | str:
        return exact_of_row(row, name)

    field.__name__ = name
    field.short_description = name.replace("_", " ")  # type: ignore[attr-defined]  # Django reads it
    return field


def short(text: str) -> SafeString | str:
    """Return the beginning of a long id; the whole on hover."""
    if len(text) <= ID_SHOWN:
        return text
    return format_html('<span class="pe-id" title="{}">{}…</span>', text, text[: ID_SHOWN - 3])


def badge(text: str, tone: str) -> SafeString:
    """Return a short word in a tone (`good`, `bad`, `pending`, `plain`). The word says it; the colour only helps."""
    return format_html('<span class="pe-badge pe-{}">{}</span>', tone, text)
