"""What callers pass in, checked at the edge: nonsense is refused with a sentence, before anything is read or written.

What PostgreSQL or a provider could not take (NUL, lone surrogates, endless times) must not be found out in the middle.
"""

from __future__ import annotations

import math
from uuid import UUID

from leases.errors import LeaseError

REASON_LIMIT = 500
"""Characters of a reason, as the log keeps it."""

ACTOR_LIMIT = 200


def identity(value: object, name: str, *, error: type[LeaseError] = LeaseError) -> UUID:
    """Return the id that was passed as a `UUID` or as its text."""
    if isinstance(value, UUID):
        return value
    try:
        return UUID(value)  # type: ignore[arg-type]  # whatever it is
    except (ValueError, TypeError, AttributeError):
        raise error(f"{name} is not an id", code="invalid") from None


def actor(value: object, *, error: type[LeaseError] = LeaseError) -> None:
    """Refuse what cannot be the name of who acts."""
    if not (isinstance(value, str) and 0 < len(value) <= ACTOR_LIMIT and value.isprintable()):
        raise error(f"an actor is 1 to {ACTOR_LIMIT} printable characters", code="invalid")


def name(value: object, what: str, *, limit: int = ACTOR_LIMIT, error: type[LeaseError] = LeaseError) -> str:
    """Return a name that the control plane gives something: 1 to `limit` printable characters."""
    if not (isinstance(value, str) and 0 < len(value) <= limit and value.isprintable()):
        raise error(f"{what} is 1 to {limit} printable characters", code="invalid")
    return value


def flag(value: object, what: str, *, error: type[LeaseError] = LeaseError) -> bool:
    """Return what is true or false, and nothing that merely counts as one of them."""
    if not isinstance(value, bool):
        raise error(f"{what} is true or false", code="invalid")
    return value


def reason(value: object, what: str) -> None:
    """Refuse what is no reason: `what` (a decision, a retry) needs one, of at most `REASON_LIMIT` characters."""
    if not isinstance(value, str) or not value.strip():
        raise LeaseError(f"{what} needs a reason", code="invalid")
    if len(value) > REASON_LIMIT:
        raise LeaseError(f"a reason has at most {REASON_LIMIT} characters", code="invalid")
    if not is_storable(value):
        raise LeaseError("a reason is text, without NUL", code="invalid")


def seconds(value: object, name: str, *, longest: float, error: type[LeaseError] = LeaseError) -> None:
    """Refuse what is no length of time: more than nothing, and at most `longest` seconds."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
        raise error(f"{name} is a number of seconds, above 0", code="invalid")
    if value > longest:
        raise error(f"{name} is at most {longest:.0f} s", code="invalid")


def is_argv(value: object) -> bool:
    """Return whether this is a program and its arguments, as every system takes them."""
    if not isinstance(value, list | tuple) or not value:
        return False
    return all(isinstance(word, str) and is_storable(word) for word in value)


def is_storable(text: str) -> bool:
    """Return whether a text has neither NUL nor lone surrogates."""
    return "\x00" not in text and not any("\ud800" <= char <= "\udfff" for char in text)
