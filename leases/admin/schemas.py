"""The providers as people meet them in forms: which there are, and what each expects, as its JSON schema to unfold."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Literal

from django import forms
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from providers import registry


class ProviderChoice(forms.ChoiceField):
    """A provider out of those that are installed, read when the form is made."""

    def __init__(self) -> None:
        super().__init__(choices=_choices)


def schema_of(provider: str, part: Literal["Endpoint", "Config"], *, unfolded: bool = False) -> SafeString:
    """Return the schema of an account's endpoint or an environment's configuration as a block to unfold."""
    try:
        adapter = registry.load(provider)
    except registry.ProviderUnavailable as error:
        return format_html("<p>{}</p>", error)
    text = json.dumps(getattr(adapter, part).model_json_schema(), indent=2, ensure_ascii=False)
    opened = SafeString(" open") if unfolded else ""
    return format_html(
        '<details class="pe-schema"{}><summary>{}</summary><pre>{}</pre></details>', opened, adapter.label, text
    )


def schemas(part: Literal["Endpoint", "Config"], keys: Iterable[str] | None = None) -> SafeString:
    """Return the schemas of all providers, each to unfold."""
    known = registry.known() if keys is None else keys
    return format_html_join("", "{}", ((schema_of(key, part),) for key in known))


def _choices() -> list[tuple[str, str]]:
    known = registry.known()
    return [("", "---------"), *((key, _label(key)) for key in known)]


def _label(key: str) -> str:
    try:
        return f"{registry.load(key).label} ({key})"
    except registry.ProviderUnavailable:
        return f"{key} (not available here)"
