"""Which providers there are: the built-in ones and those that installed packages announce.

A package outside this repository adds an adapter with an entry point in the group `paperclip_env.providers`, whose name
is the provider's key and whose object is its class.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from pydantic import ValidationError

from providers.contract import Provider, Schema

ENTRY_POINT_GROUP = "paperclip_env.providers"

_BUILT_IN = {
    "local": "providers.local:LocalProvider",
    "docker": "providers.docker:DockerProvider",
    "daytona": "providers.daytona:DaytonaProvider",
    "e2b": "providers.e2b:E2BProvider",
}

AnyProvider = Provider[Any, Any]


class ProviderUnavailable(LookupError):
    """No adapter of that key can be loaded *in this process*. Says nothing about other processes."""


class ConfigurationError(ValueError):
    """A configuration does not fit the provider's schema. `errors` maps each offending field to a sentence."""

    def __init__(self, errors: Mapping[str, str]) -> None:
        self.errors = dict(errors)
        super().__init__("; ".join(f"{name}: {text}" for name, text in self.errors.items()))


@cache
def _announced() -> dict[str, str]:
    return {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}


def known() -> list[str]:
    """Return the keys of all known providers, sorted."""
    return sorted(_BUILT_IN.keys() | _announced().keys())


def load(key: str) -> type[AnyProvider]:
    """Return the adapter class of a provider; a built-in one cannot be replaced by a package.

    Raises `ProviderUnavailable` when there is none of that key, or it cannot be imported here.
    """
    target = _BUILT_IN.get(key) or _announced().get(key)
    if target is None:
        raise ProviderUnavailable(f"no provider named {key!r}; known are: {', '.join(known())}")
    module, _, name = target.partition(":")
    try:
        adapter = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ProviderUnavailable(f"the adapter of provider {key!r} cannot be loaded: {error}") from error
    if not (isinstance(adapter, type) and issubclass(adapter, Provider)):
        raise ProviderUnavailable(f"the adapter of provider {key!r} is not a Provider: {target}")
    return adapter


def validate(schema: type[Schema], data: object) -> Schema:
    """Return `data` as an instance of `schema`. Raises `ConfigurationError` naming every field that does not fit.

    Validation goes through JSON, so that what is stored and read back later means the same.
    """
    if not isinstance(data, dict):
        raise ConfigurationError({"configuration": "must be an object of keys and values"})
    try:
        return schema.model_validate_json(_json(data))
    except ValidationError as error:
        raise ConfigurationError(
            {".".join(str(part) for part in item["loc"]) or "configuration": _sentence(item) for item in error.errors()}
        ) from error


def _sentence(item: Any) -> str:
    """Say what is wrong with a field in our words, where pydantic's are about itself."""
    match item["type"]:
        case "extra_forbidden":
            return "is not a setting of this provider"
        case "missing":
            return "is required"
        case "value_error":
            return str(item["ctx"]["error"])
        case _:
            return str(item["msg"])


def _json(data: dict[str, object]) -> str:
    try:
        return json.dumps(data)
    except (TypeError, ValueError) as error:
        raise ConfigurationError({"configuration": f"cannot be written as JSON: {error}"}) from error


def open_provider(key: str, endpoint: object, secret: str | None = None) -> AnyProvider:
    """Return an adapter ready to be called.

    Raises `ProviderUnavailable` when this process lacks the adapter, `ConfigurationError` when the endpoint does not
    fit its schema.
    """
    adapter = load(key)
    return adapter(validate(adapter.Endpoint, endpoint), secret)
