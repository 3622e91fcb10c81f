"""What Daytona's descriptions of sandboxes mean in the terms of the contract. Pure functions of the answers.

The table of docs/daytona.md is the test of `sighting`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from providers.contract import (
    Busy,
    Ended,
    Gone,
    Resource,
    Running,
    Sighting,
    Stopped,
    redact,
    usable,
)
from providers.contract import Unknown as Unclear
from providers.failures import FULL_DISK
from providers.reading import carries, marks, moment, not_understood, structure, text, word

TRANSITIONS = frozenset(
    {
        "creating", "restoring", "starting", "stopping", "pausing", "resuming", "archiving", "resizing", "snapshotting",
        "forking", "pulling_snapshot", "pending_build", "building_snapshot", "destroying",
    }
)  # fmt: skip
_FAILED = frozenset({"error", "build_failed"})
_DESIRED = frozenset({"started", "stopped", "paused", "archived", "resized", "destroyed"})
_AGREEING = {
    "stopped": frozenset({"stopped", "archived"}),  # moving the files of a stopped sandbox executes nothing
    "archived": frozenset({"archived", "stopped"}),
    "paused": frozenset({"paused"}),
    "started": frozenset({"started"}),
}


@dataclass(frozen=True, slots=True)
class Sandbox:
    """As much of a description as the adapter goes by."""

    resource: Resource
    organization: str
    state: str
    desired: str
    error_reason: str
    recoverable: bool | None
    """What the service says; None where it does not."""
    created: datetime | None
    auto_delete: float | None
    has_deadline: bool
    """Whether the service will destroy it at a time, also one that cannot be read."""
    toolbox_url: str


def sandbox(answer: object) -> Sandbox:
    """Read a description, of a read by id, of an answer to a change, or of a list."""
    item = structure(answer, "a description of a sandbox")
    interval, recoverable = item.get("autoDeleteInterval"), item.get("recoverable")
    return Sandbox(
        resource=usable(
            Resource(
                text(item, "id"),
                text(item, "name"),
                marks(item.get("labels")),
                as_of=moment(item.get("updatedAt")),
                expires_at=moment(item.get("autoDestroyAt")),
            )
        ),
        organization=text(item, "organizationId"),
        state=word(item.get("state")),
        desired=word(item.get("desiredState")),
        error_reason=word(item.get("errorReason")),
        recoverable=recoverable if isinstance(recoverable, bool) else None,
        created=moment(item.get("createdAt")),
        auto_delete=interval if isinstance(interval, int | float) and not isinstance(interval, bool) else None,
        has_deadline=bool(item.get("autoDestroyAt")),
        toolbox_url=word(item.get("toolboxProxyUrl")),
    )


def sighting(seen: Sandbox) -> Sighting:
    """Say what a description proves.

    - `stopped` and `archived` are proof of a stop only where the desired state agrees: a stopped sandbox that is
      wanted started is about to execute.
    - A paused sandbox keeps its memory and goes on after a start: `Stopped`, but only `SUSPENDED`.
    - `destroyed` is the end whatever was desired: nothing leads back from it.
    - A started sandbox whose desired state differs is on its way, and so is every other disagreement that is known.
    - What is not known decides nothing, above all an error: its processes may go on executing.
    """
    resource, state, desired = seen.resource, seen.state, seen.desired
    if state == "destroyed":
        return Gone(stated=True)
    if state in TRANSITIONS:
        return Busy(resource, state)
    agreeing = _AGREEING.get(state)
    if agreeing is None:
        return Unclear(resource, _undecided(seen), recoverable=may_recover(seen), disk_full=is_full(seen))
    if desired not in agreeing:
        if desired in _DESIRED:
            return Busy(resource, f"{state}, to be {desired}")
        if state != "started":
            return Unclear(resource, f"{state}, with the desired state {desired or 'missing'}")
    match state:
        case "started":
            return Running(resource)
        case "paused":
            return Stopped(resource, Ended.SUSPENDED)
        case _:
            return Stopped(resource)


def is_full(seen: Sandbox) -> bool:
    """Say whether the service gives a full disk as the reason of an error: in the kernel's words, or its own."""
    said = seen.error_reason.lower()
    return seen.state in _FAILED and any(words in said for words in (*FULL_DISK, "storage limit"))


def may_recover(seen: Sandbox) -> bool:
    """Say whether the service offers to recover a sandbox from its error."""
    return seen.state == "error" and seen.recoverable is True


def cannot_recover(seen: Sandbox) -> bool:
    """Say whether the service says that a sandbox in an error cannot be recovered, and so never starts again.

    An older service does not say either; then nothing is concluded.
    """
    return seen.state in _FAILED and seen.recoverable is False


def _undecided(seen: Sandbox) -> str:
    reason = f": {redact(seen.error_reason)}" if seen.error_reason else ""
    recoverable = ", recoverable" if seen.recoverable else ""
    return f"{seen.state or 'no state'}{recoverable}{reason}"


def stays_after_stop(seen: Sandbox) -> bool:
    """Say whether the service says that it does not delete a sandbox after a stop. Where it is silent, it may."""
    return seen.auto_delete is not None and seen.auto_delete < 0


def creation(name: str, marks: Mapping[str, str], listed: Iterable[Sandbox]) -> Resource | None:
    """Return which of these is the sandbox that was created with this name and these marks, if any.

    A fork inherits the marks; what was created is older than its forks, or still has a name that tells.
    """
    ours = [seen for seen in listed if seen.state != "destroyed" and carries(seen.resource, marks)]
    renamed = re.compile(rf"(?:DESTROYED_)?{re.escape(name)}(?:_\d+)?")
    never = datetime.max.replace(tzinfo=UTC)
    first = min(ours, key=lambda seen: (not renamed.fullmatch(seen.resource.name), seen.created or never), default=None)
    return first.resource if first else None


def absence(resource_id: str, listed: Iterable[Sandbox], *, complete: bool) -> Sighting:
    """Say what a 404 means beside a list that includes errored and deleted sandboxes.

    Reads answer 404 also for a sandbox whose deletion was asked for and failed, and which may execute for ever. Only
    the list shows those, so a 404 alone, or beside a list that is not complete, is no proof.
    """
    for seen in listed:
        if seen.resource.resource_id != resource_id:
            continue
        if seen.state == "destroying":
            return Busy(seen.resource, "destroying, by a list that may be behind")
        return Unclear(seen.resource, f"described as absent, but listed as {_undecided(seen)}")
    if not complete:
        return Unclear(Resource(resource_id, ""), "described as absent, and the list is not complete")
    return Gone()


@dataclass(frozen=True, slots=True)
class Page:
    items: tuple[Sandbox, ...]
    cursor: str | None


def page(answer: object) -> Page:
    """Read one page of a list. Raises `PROTOCOL` where one entry cannot be understood: a list with a gap is none."""
    body = structure(answer, "a list of sandboxes")
    items, cursor = body.get("items"), body.get("nextCursor")
    if not isinstance(items, list) or not (cursor is None or (isinstance(cursor, str) and cursor)):
        raise not_understood("a list of sandboxes")
    return Page(tuple(sandbox(item) for item in items), cursor)
