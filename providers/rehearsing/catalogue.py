"""Which providers can be rehearsed: those of this repository that have a package `rehearsal` with a `Rehearsal`."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from typing import Any

import providers
from providers.rehearsing.server import Rehearsal


def rehearsals() -> list[str]:
    """Return the keys of all providers that can be rehearsed, sorted."""
    packages = [found.name for found in pkgutil.iter_modules(providers.__path__) if found.ispkg]
    return sorted(name for name in packages if importlib.util.find_spec(f"providers.{name}.rehearsal") is not None)


def rehearsal(key: str) -> type[Rehearsal[Any]]:
    """Return the rehearsal of a provider. Raises `LookupError` where there is none."""
    if key not in rehearsals():
        raise LookupError(f"{key!r} cannot be rehearsed; these can: {', '.join(rehearsals())}")
    found: type[Rehearsal[Any]] = importlib.import_module(f"providers.{key}.rehearsal").Rehearsal
    return found
