"""Lengths of time as people write and read them: `7 days`, `12 hours`, `90 min`."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

from django import forms
from django.core.exceptions import ValidationError
from typing_extensions import override

_UNITS = (("week", 604_800), ("day", 86_400), ("hour", 3600), ("minute", 60), ("second", 1))
_WRITTEN = re.compile(r"(\d{1,9})\s*([a-z]+)", re.IGNORECASE)
_SHORT = {
    "w": "week",
    "d": "day",
    "h": "hour",
    "hr": "hour",
    "m": "minute",
    "min": "minute",
    "s": "second",
    "sec": "second",
}


def written(length: timedelta) -> str:
    """Return a length in the largest units that say it exactly: `7 days`, `1 day 12 hours`."""
    seconds = int(length.total_seconds())
    parts = []
    for unit, size in _UNITS[1:]:
        count, seconds = divmod(seconds, size)
        if count:
            parts.append(f"{count} {unit}{'' if count == 1 else 's'}")
    return " ".join(parts) or "0 seconds"


def read(text: str) -> timedelta:
    """Return the length that a text says. Raises `ValueError` for anything that is not one."""
    seconds, rest = 0, text.strip()
    sizes = dict(_UNITS)
    while rest:
        found = _WRITTEN.match(rest)
        if found is None:
            raise ValueError(text)
        word = found.group(2).lower()
        unit = _SHORT.get(word, word.removesuffix("s"))
        if unit not in sizes:
            raise ValueError(text)
        seconds += int(found.group(1)) * sizes[unit]
        rest = rest[found.end() :].lstrip(" ,")
    try:
        return timedelta(seconds=seconds)
    except OverflowError as error:
        raise ValueError(text) from error


class LengthField(forms.Field):
    """A length of time in words. Empty is None."""

    widget = forms.TextInput(attrs={"class": "vTextField", "autocomplete": "off"})

    @override
    def to_python(self, value: Any) -> timedelta | None:
        text = str(value or "").strip()
        if not text:
            return None
        try:
            return read(text)
        except ValueError as error:
            raise ValidationError('Write a length of time with its unit, such as "7 days" or "12 hours".') from error

    @override
    def prepare_value(self, value: Any) -> Any:
        return written(value) if isinstance(value, timedelta) else value

    @override
    def has_changed(self, initial: Any, data: Any) -> bool:
        try:
            return bool(self.to_python(data) != initial)
        except ValidationError:
            return True
