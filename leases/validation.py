"""Provider configuration checked at the edge: every refusal names its field, and nothing is saved."""

from __future__ import annotations

from typing import Literal

from django.core.exceptions import ValidationError

from providers import registry


def validate_configuration(provider: str, schema: Literal["Endpoint", "Config"], data: object, *, field: str) -> None:
    """Raise Django's `ValidationError` when `data` does not fit the provider's schema, or there is no such provider."""
    try:
        adapter = registry.load(provider)
        registry.validate(getattr(adapter, schema), data)
    except registry.ProviderUnavailable as error:
        raise ValidationError({"provider" if schema == "Endpoint" else field: str(error)}) from error
    except registry.ConfigurationError as error:
        raise ValidationError({field: [f"{name}: {text}" for name, text in error.errors.items()]}) from error


def needs_secret(provider: str) -> bool:
    """Return whether an account of this provider has to name a credential; False where this process cannot tell."""
    try:
        return registry.load(provider).needs_secret
    except registry.ProviderUnavailable:
        return False
