"""Reading what a provider answered: what is not as it should be is `PROTOCOL`, and never passed over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, TypeVar

from providers.contract import MARK_PREFIX, Busy, ErrorKind, Gone, ProviderError, Resource, Sighting, Unknown

T = TypeVar("T")


def structure(value: object, what: str) -> dict[str, Any]:
    """Return a JSON object, or raise `PROTOCOL` naming what was expected."""
    if not isinstance(value, dict):
        raise not_understood(what)
    return value


def text(answer: object, key: str) -> str:
    """Return the non-empty text under this key of an object, or raise `PROTOCOL`."""
    value = structure(answer, "an answer").get(key)
    if not isinstance(value, str) or not value:
        raise not_understood(f"{key}, which is missing or no text")
    return value


def elements(answer: object, what: str) -> list[Any]:
    """Return a JSON list, or raise `PROTOCOL` naming what was expected."""
    if not isinstance(answer, list):
        raise not_understood(what)
    return answer


def word(value: object) -> str:
    """Return a text, or an empty one for anything else."""
    return value if isinstance(value, str) else ""


def moment(value: object) -> datetime | None:
    """Read a time with its zone. What is none attests nothing."""
    try:
        when = datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        return None
    return when if when is not None and when.tzinfo is not None else None


def marks(labels: object) -> dict[str, str]:
    """Keep the marks among the labels: others may add labels of their own."""
    found = structure(labels or {}, "labels")
    return {key: str(value) for key, value in found.items() if key.startswith(MARK_PREFIX)}


def carries(resource: Resource, wanted: Mapping[str, str]) -> bool:
    """Say whether a resource has all these marks."""
    return all(resource.marks.get(key) == value for key, value in wanted.items())


def carrying(resources: Iterable[Resource], wanted: Mapping[str, str]) -> tuple[Resource, ...]:
    """Return those that carry all these marks: a provider's filter is a hint, the marks decide."""
    return tuple(resource for resource in resources if carries(resource, wanted))


def to_the_end(
    page: Callable[[str | None], tuple[Iterable[T], str | None]], *, most: int
) -> tuple[tuple[T, ...], bool]:
    """Read a list of pages, each asked for with the cursor that the one before it gave, None for the first.

    The second value is false where `most` pages did not reach the end. Raises `PROTOCOL` for a cursor that comes again.
    """
    found: list[T] = []
    cursor: str | None = None
    passed: set[str] = set()
    for _ in range(most):
        items, cursor = page(cursor)
        found += items
        if not cursor:
            return tuple(found), True
        if cursor in passed:
            raise not_understood("a list that goes round in circles")
        passed.add(cursor)
    return tuple(found), False


def unfit(sighting: Sighting) -> ProviderError:
    """Say why a sandbox that was seen like this cannot be changed now."""
    match sighting:
        case Gone():
            return ProviderError(ErrorKind.NOT_FOUND, "the sandbox is gone")
        case Busy():
            return ProviderError(ErrorKind.BUSY, f"state change in progress: {sighting.transition}")
        case Unknown():
            return ProviderError(ErrorKind.REFUSED, f"the sandbox is {sighting.reason}")
    return ProviderError(ErrorKind.REFUSED, f"the sandbox is {type(sighting).__name__.lower()}")


def not_understood(what: str) -> ProviderError:
    return ProviderError(ErrorKind.PROTOCOL, f"not understood: {what}")
