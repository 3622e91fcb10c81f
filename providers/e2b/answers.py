"""What E2B's descriptions of sandboxes mean in the terms of the contract. Pure functions of the answers.

The table of docs/e2b.md is the test of `sighting`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import quote, urlencode

from providers.contract import (
    MARK_PREFIX,
    Busy,
    Ended,
    Gone,
    Resource,
    Running,
    Sighting,
    Stopped,
    Unknown,
    redact,
    usable,
)
from providers.reading import elements, marks, moment, structure, text, word

NAME = MARK_PREFIX + "name"
"""The service knows no names, so the name of a creation is a mark of ours that stays in here."""
LIFETIME = MARK_PREFIX + "lifetime"
"""How far ahead the deadline is kept, in seconds: a resume has to set it again, and nothing else remembers."""


@dataclass(frozen=True, slots=True)
class Sandbox:
    """As much of a description as the adapter goes by. `lifetime` is in seconds, None for one that we did not make."""

    resource: Resource
    state: str
    pause_mode: str
    memory_unusable: bool
    lifetime: int | None
    domain: str
    envd_version: str
    envd_token: str


def metadata(name: str, given: Mapping[str, str], lifetime: int) -> dict[str, str]:
    """Return what a sandbox is to carry: the marks, and what the service has no place of its own for."""
    return {**given, NAME: name, LIFETIME: str(lifetime)}


def query(wanted: Mapping[str, str]) -> str:
    """Write a filter on metadata as the service reads it: each key and value is quoted, and then the whole again."""
    return urlencode({quote(key): quote(value) for key, value in wanted.items()})


def sandbox(answer: object) -> Sandbox:
    """Read a description, of a read by id or of a list."""
    item = structure(answer, "a description of a sandbox")
    carried = marks(item.get("metadata"))
    name, lifetime = carried.pop(NAME, ""), carried.pop(LIFETIME, "")
    state = word(item.get("state"))
    # Of a paused sandbox the same field says when it was paused: nothing ends it by itself.
    deadline = moment(item.get("endAt")) if state == "running" else None
    return Sandbox(
        resource=usable(Resource(text(item, "sandboxID"), name, carried, expires_at=deadline)),
        state=state,
        pause_mode=word(item.get("pauseMode")),
        memory_unusable=item.get("envdUnresponsiveAtPause") is True,
        lifetime=int(lifetime) if re.fullmatch(r"[0-9]{1,9}", lifetime) else None,
        domain=word(item.get("domain")),
        envd_version=word(item.get("envdVersion")),
        envd_token=word(item.get("envdAccessToken")),
    )


def listed(answer: object) -> tuple[Sandbox, ...]:
    """Read one page of a list. Raises `PROTOCOL` where one entry cannot be understood: a list with a gap is none."""
    return tuple(sandbox(item) for item in elements(answer, "a list of sandboxes"))


def sighting(seen: Sandbox) -> Sighting:
    """Say what a description proves.

    The service calls a sandbox paused from the moment that a pause begins, while its processes still execute; only
    the mode of the pause, which appears when it has ended, is proof. A pause with memory goes on after a resume with
    the old processes: `Stopped`, but only `SUSPENDED`.
    """
    resource = seen.resource
    match seen.state, seen.pause_mode:
        case "running", _:
            return Running(resource)
        case "paused", "filesystem":
            return Stopped(resource)
        case "paused", "full":
            return Stopped(resource, Ended.SUSPENDED)
        case "paused", "":
            return Busy(resource, "pausing")
        case "paused", mode:
            return Unknown(resource, f"paused in a mode that is not known: {redact(mode)}")
        case _:
            return Unknown(resource, f"in a state that is not known: {redact(seen.state) or 'none'}")


def absence(resource_id: str, found: Iterable[Sandbox], *, complete: bool) -> Sighting:
    """Say what a 404 means beside a list of all sandboxes of the team, in every state."""
    for seen in found:
        if seen.resource.resource_id == resource_id:
            return Unknown(seen.resource, f"described as absent, but listed as {redact(seen.state) or 'nothing'}")
    if not complete:
        return Unknown(Resource(resource_id, ""), "described as absent, and the list is not complete")
    return Gone()
