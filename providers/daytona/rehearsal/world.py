"""The rehearsed service of Daytona behind its HTTP face: what its sandboxes do, and what it tells of them."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from providers import rehearsing
from providers.rehearsing import Machine, Outcome, Refused, iso
from providers.rehearsing.world import NOT_KEPT

READABLE_AFTER_LOSS = 24 * 3600.0
"""Seconds for which a sandbox that was evicted, or that no runner took, can still be read by its id."""
_STABLE = {"started": "started", "stopped": "stopped", "paused": "paused", "archived": "archived"}
_DELETABLE = frozenset({*_STABLE, "archiving", "error", "build_failed", "pending_build"})
_ENTRIES = 100
"""How many of its latest states the index remembers of a sandbox."""


@dataclass
class Box(rehearsing.Box):
    """One sandbox."""

    name: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    desired: str = "started"
    auto_stop: int = 15
    auto_pause: int = 0
    auto_archive: int = 7 * 24 * 60
    auto_delete: int = -1
    destroy_at: float | None = None
    error_reason: str | None = None
    recoverable: bool = False
    evicted: float | None = None
    last_activity: float = 0.0
    parent: str | None = None
    history: list[tuple[float, dict[str, Any]]] = field(default_factory=list, metadata=NOT_KEPT)

    @property
    def hidden(self) -> bool:
        """Whether reads by id and name answer 404: destroyed, or asked to go and failed."""
        return self.state in {"error", "build_failed", "destroyed"} and self.desired == "destroyed"


class World(rehearsing.World[Box]):
    """All that the service remembers. Every public method is safe to call from several threads."""

    box: ClassVar[type[rehearsing.Box]] = Box

    def __init__(self, root: Path, *, longest_life: float | None = None, **options: Any) -> None:
        """`longest_life` is for how many seconds the organisation lets a sandbox live at the most."""
        self.toolbox_url = ""
        self.longest_life = longest_life
        self._reads: dict[tuple[str, str], tuple[float, dict[str, Any]]] = {}
        super().__init__(root, **options)
        for box in self.boxes.values():
            box.history.append((box.updated, self._list_item(box)))

    # Reading.

    def get(self, organization: str, id_or_name: str) -> dict[str, Any]:
        """Answer a read by id or name, perhaps from the cache."""
        with self.lock:
            self.settle()
            now, key = self.clock(), (organization, id_or_name)
            kept = self._reads.get(key)
            if kept is not None and now - kept[0] < self.cache:
                return kept[1]
            answer = self._describe(self._visible(organization, id_or_name))
            self._reads[key] = (now, answer)
            return answer

    def search(
        self, organization: str, query: Mapping[str, str], left_out: Callable[[str], bool] = lambda _: False
    ) -> dict[str, Any]:
        """Answer a list from the index, which is `index_lag` seconds behind."""
        with self.lock:
            self.settle()
            moment = self.clock() - self.index_lag
            errored = query.get("includeErroredDeleted") == "true"
            labels = _labels(query.get("labels"))
            states = set(query["states"].split(",")) if query.get("states") else None
            rows = []
            for box in self.boxes.values():
                if box.account != organization or left_out(box.id):
                    continue
                row = next((entry for since, entry in reversed(box.history) if since <= moment), None)
                if row is not None and _matches(row, query, labels, states, errored=errored):
                    rows.append(row)
            rows.sort(key=lambda row: (row["createdAt"], row["id"]))
            limit = int(query.get("limit") or 100)
            if not 1 <= limit <= 200:  # noqa: PLR2004
                raise Refused(400, "limit must be between 1 and 200")
            after = query.get("cursor")
            if after:
                position = next((n + 1 for n, row in enumerate(rows) if row["id"] == after), None)
                if position is None:
                    raise Refused(400, "Invalid cursor")
                rows = rows[position:]
            page = rows[:limit]
            return {"items": page, "nextCursor": page[-1]["id"] if len(rows) > limit else None}

    def machine(self, organization: str, sandbox: str) -> Machine:
        """Return what a started sandbox runs on, and note that it is in use."""
        with self.lock:
            self.settle()
            box = self._visible(organization, sandbox)
            if box.state != "started":
                raise Refused(400, f"Sandbox is not started: {box.state}")
            box.last_activity = self.clock()
            return box.machine

    # Changing.

    def create(self, organization: str, body: dict[str, Any], outcome: Outcome) -> dict[str, Any]:
        with self.lock:
            self.settle()
            now, identifier = self.clock(), str(uuid.uuid4())
            if body.get("snapshot") and body.get("buildInfo"):
                raise Refused(400, "Cannot specify a snapshot when using a build info entry")
            if not body.get("buildInfo") and any(body.get(key) for key in ("cpu", "memory", "disk", "gpu")):
                raise Refused(400, "Cannot specify Sandbox resources when using a snapshot")
            if body.get("snapshot") == "no-such-snapshot":
                raise Refused(400, "Snapshot no-such-snapshot not found. Did you add it through the Daytona Dashboard?")
            name = body.get("name") or identifier
            if any(box.account == organization and box.name == name for box in self.boxes.values()):
                raise Refused(409, f"Sandbox with name {name} already exists")
            living = [box for box in self.boxes.values() if box.account == organization and box.state != "destroyed"]
            if self.quota is not None and len(living) >= self.quota:
                raise Refused(400, f"Total CPU limit exceeded. Maximum allowed: {self.quota}.")
            box = Box(
                id=identifier,
                account=organization,
                name=name,
                labels=dict(body.get("labels") or {}),
                body=body,
                machine=Machine(self.root, identifier, body.get("env") or {}),
                created=now,
                updated=now,
                last_activity=now,
            )
            for attribute, key in _INTERVALS.items():
                if body.get(key) is not None:
                    setattr(box, attribute, int(body[key]))
            self._live_for(box, now, int(body.get("ttlMinutes") or 0))
            self.boxes[identifier] = box
            first = ["pending_build", "building_snapshot"] if body.get("buildInfo") else []
            self._go(box, [*first, "creating", "starting", "started"], outcome)
            return self._changed(box)

    def act(self, organization: str, id_or_name: str, verb: str, outcome: Outcome) -> dict[str, Any]:
        """Begin a transition and answer the sandbox as it is now: accepted, and not finished."""
        with self.lock:
            self.settle()
            box = self._visible(organization, id_or_name)
            match verb:
                case "delete":
                    self._delete(box, outcome)
                case "start":
                    self._start(box, outcome)
                case "stop":
                    self._require(box, {"started", "paused"}, "Sandbox is not in a stoppable state")
                    if box.auto_delete == 0:
                        self._delete(box, outcome)
                    else:
                        self._go(box, ["stopping", "stopped"], outcome)
                case "pause":
                    self._require(box, {"started"}, "Sandbox is not started")
                    self._go(box, ["pausing", "paused"], outcome)
                case "archive":
                    self._require(box, {"stopped"}, "Sandbox is not stopped")
                    if box.auto_delete == 0:
                        raise Refused(400, "Ephemeral sandboxes cannot be archived")
                    self._go(box, ["archiving", "archived"], outcome)
                case "recover":
                    if box.state != "error" or not box.recoverable:
                        raise Refused(400, "Sandbox is not in a recoverable state")
                    self._go(box, ["starting", "started"], outcome)
            return self._changed(box)

    def fork(self, organization: str, id_or_name: str, name: str | None, outcome: Outcome) -> dict[str, Any]:
        """Begin a sandbox with the files of another one, which cannot be deleted before its child."""
        with self.lock:
            self.settle()
            parent = self._visible(organization, id_or_name)
            self._require(parent, {"started", "stopped"}, "Sandbox is not in a valid state to be forked")
            body = {**parent.body, "labels": parent.labels, "name": name, "buildInfo": None}
            child = self.boxes[self.create(organization, body, outcome)["id"]]
            child.parent = parent.id
            shutil.copytree(parent.machine.home, child.machine.home, dirs_exist_ok=True, symlinks=True)
            return self._changed(child)

    def forks(self, organization: str, id_or_name: str) -> list[dict[str, Any]]:
        """Answer the active children of a sandbox."""
        with self.lock:
            self.settle()
            parent = self._visible(organization, id_or_name)
            return [self._describe(box) for box in self._children(parent)]

    def _children(self, parent: Box) -> list[Box]:
        return [box for box in self.boxes.values() if box.parent == parent.id and box.state != "destroyed"]

    def _live_for(self, box: Box, since: float, minutes: int) -> None:
        """Set the deadline: never later than the organisation's longest life allows, and none for no minutes."""
        ends = [since + 60 * minutes] if minutes else []
        if self.longest_life is not None:
            ends.append(box.created + self.longest_life)
        box.destroy_at = min(ends, default=None)

    def change(self, organization: str, id_or_name: str, setting: str, value: Any) -> dict[str, Any]:
        """Set the labels or one of the intervals. The answer is the sandbox."""
        with self.lock:
            self.settle()
            box = self._visible(organization, id_or_name)
            match setting:
                case "labels":
                    box.labels = dict(value)
                case "ttl":
                    if not value and self.longest_life is not None:
                        raise Refused(400, "TTL cannot be disabled: the organization has a maximum sandbox lifespan")
                    self._live_for(box, self.clock(), value)
                case _:
                    setattr(box, setting, value)
            self._touch(box)
            return self._changed(box)

    def _changed(self, box: Box) -> dict[str, Any]:
        # A change through the API drops what was read before; what the runners do does not.
        self._reads.clear()
        return self._describe(box)

    # What a test does to the world behind the service's back.

    def fail(self, sandbox: str, *, reason: str = "rehearsed", recoverable: bool = False) -> None:
        """Put a sandbox into the state `error`. Nothing of it is ended."""
        with self.lock:
            self.settle()
            box = self.boxes[sandbox]
            box.path, box.outcome = [], Outcome()
            box.error_reason, box.recoverable = reason, recoverable
            self.enter(box, "error")

    def evict(self, sandbox: str) -> None:
        """Destroy a sandbox as a spot eviction does: it stays readable for a day."""
        with self.lock:
            box = self.boxes[sandbox]
            box.path, box.evicted = [], self.clock()
            self.enter(box, "destroyed")

    def set_state(self, sandbox: str, state: str, desired: str | None = None) -> None:
        """Say that a sandbox is in a state, whatever it runs."""
        with self.lock:
            box = self.boxes[sandbox]
            box.path, box.outcome, box.state = [], Outcome(), state
            box.desired = box.desired if desired is None else desired
            self._touch(box)

    # Time.

    def automatic(self, box: Box, now: float) -> None:
        if box.state == "destroyed" or box.pending:
            return
        idle, since = now - box.last_activity, now - box.updated
        if box.destroy_at is not None and now >= box.destroy_at and box.desired != "destroyed":
            self._delete(box, Outcome())
        elif box.state == "started" and box.auto_stop and idle >= 60 * box.auto_stop:
            self._go(box, ["stopping", "stopped"], Outcome())
        elif box.state == "stopped" and box.auto_delete >= 0 and since >= 60 * box.auto_delete:
            self._delete(box, Outcome())
        elif box.state == "stopped" and box.auto_archive and since >= 60 * box.auto_archive:
            self._go(box, ["archiving", "archived"], Outcome())

    def _start(self, box: Box, outcome: Outcome) -> None:
        if box.state == "started" and box.desired == "started":
            return
        self._require(box, {"stopped", "archived", "paused"}, "Sandbox is not in valid state")
        way = {"archived": ["restoring"], "paused": ["resuming"]}.get(box.state, ["starting"])
        self._go(box, [*way, "started"], outcome)

    def _delete(self, box: Box, outcome: Outcome) -> None:
        if (box.pending and box.state not in _DELETABLE) or box.desired == "destroyed":
            raise Refused(409, "Sandbox state change in progress")
        if box.state not in _DELETABLE:
            raise Refused(409, "Sandbox state change in progress")
        if self._children(box):
            raise Refused(400, "Cannot delete sandbox which has active fork children. The forks must be deleted first.")
        # The name is free from here on, whatever becomes of the rest.
        box.name = f"DESTROYED_{box.name}_{int(self.clock() * 1000)}"
        self._go(box, ["destroying", "destroyed"], outcome)

    def _require(self, box: Box, states: set[str], otherwise: str) -> None:
        if box.pending:
            raise Refused(409, "Sandbox state change in progress")
        if box.state in {"error", "build_failed"}:
            raise Refused(400, "Sandbox is in an errored state")
        if box.state not in states:
            raise Refused(400, otherwise)

    def _go(self, box: Box, states: list[str], outcome: Outcome) -> None:
        """Enter the first state at once and the others in time, the last one only if the outcome is good."""
        box.desired = states[-1]
        if outcome.fails or outcome.hidden:
            box.recoverable = outcome.recoverable
        self.go(box, states, outcome)

    def enter(self, box: Box, state: str) -> None:
        before, box.state = box.state, state
        match state:
            case "error":
                box.error_reason = box.outcome.reason or box.error_reason or "rehearsed: the runner failed"
                box.outcome = Outcome()
            case "stopped" | "archived":
                box.machine.end()
            case "paused":
                box.machine.freeze()
            case "destroyed":
                box.machine.remove()
            case "started":
                box.error_reason, box.recoverable = None, False
                box.last_activity = self.clock()
                if before == "resuming":
                    box.machine.thaw()
        self._touch(box)

    def _touch(self, box: Box) -> None:
        box.updated = self.clock()
        box.history.append((box.updated, self._list_item(box)))
        del box.history[:-_ENTRIES]

    # Looking up and describing.

    def _visible(self, organization: str, id_or_name: str) -> Box:
        """Find what reads and changes see: by id first, then by name; never what is hidden."""
        ours = [box for box in self.boxes.values() if box.account == organization]
        named = [box for box in ours if box.id == id_or_name] or [box for box in ours if box.name == id_or_name]
        for box in named:
            lost = box.evicted is not None and self.clock() - box.evicted < READABLE_AFTER_LOSS
            if lost or not (box.hidden or box.state == "destroyed"):
                return box
        raise Refused(404, f"Sandbox with ID or name {id_or_name} not found")

    def _list_item(self, box: Box) -> dict[str, Any]:
        body = box.body
        return {
            "id": box.id,
            "organizationId": box.account,
            "name": box.name,
            "user": body.get("user") or "daytona",
            "labels": dict(box.labels),
            "public": bool(body.get("public")),
            "networkBlockAll": bool(body.get("networkBlockAll")),
            "snapshot": body.get("snapshot") or ("built" if body.get("buildInfo") else "daytona-small"),
            "target": body.get("target") or "us",
            "cpu": body.get("cpu") or 1,
            "gpu": body.get("gpu") or 0,
            "memory": body.get("memory") or 1,
            "disk": body.get("disk") or 3,
            "state": box.state,
            "desiredState": box.desired,
            "errorReason": box.error_reason,
            "recoverable": box.recoverable,
            "backupState": "None",
            "autoStopInterval": box.auto_stop,
            "autoPauseInterval": box.auto_pause,
            "autoArchiveInterval": box.auto_archive,
            "autoDeleteInterval": box.auto_delete,
            "autoDestroyAt": iso(box.destroy_at),
            "createdAt": iso(box.created),
            "updatedAt": iso(box.updated),
            "lastActivityAt": iso(box.last_activity),
            "spotEvictedAt": iso(box.evicted),
            "toolboxProxyUrl": self.toolbox_url,
        }

    def _describe(self, box: Box) -> dict[str, Any]:
        return {
            **self._list_item(box),
            "env": dict(box.body.get("env") or {}),
            "kvm": False,
            "volumes": [],
            "buildInfo": None,
            "runnerId": "rehearsal",
            "sandboxClass": "container",
        }


_INTERVALS = {
    "auto_stop": "autoStopInterval",
    "auto_pause": "autoPauseInterval",
    "auto_archive": "autoArchiveInterval",
    "auto_delete": "autoDeleteInterval",
}


def _matches(
    row: dict[str, Any], query: Mapping[str, str], labels: dict[str, str], states: set[str] | None, *, errored: bool
) -> bool:
    if row["state"] == "destroyed":
        return False
    if row["desiredState"] == "destroyed" and row["state"] in {"error", "build_failed"} and not errored:
        return False
    return (
        row["id"].lower().startswith(query.get("id", "").lower())
        and row["name"].lower().startswith(query.get("name", "").lower())
        and all(row["labels"].get(key) == value for key, value in labels.items())
        and (states is None or row["state"] in states)
    )


def _labels(text: str | None) -> dict[str, str]:
    if not text:
        return {}
    try:
        labels = json.loads(text)
    except ValueError:
        labels = None
    if not isinstance(labels, dict):
        raise Refused(400, "labels must be a JSON object")
    return labels
