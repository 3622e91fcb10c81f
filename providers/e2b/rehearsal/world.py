"""The rehearsed service of E2B behind its HTTP face: what its sandboxes do, and what it tells of them.

Like the service, it answers a change when the change has been made, so whoever asks waits; what others see meanwhile is
what the service shows them.
"""

from __future__ import annotations

import base64
import json
import secrets
import string
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import unquote_plus

from providers import rehearsing
from providers.rehearsing import Machine, Outcome, Refused, iso

ENVD_VERSION = "0.6.4"
_DEFAULT_TIMEOUT = 300
_LONGEST_TIMEOUT = 24 * 3600
_LARGEST_PAGE = 100
_SEEN = {"running": "running", "pausing": "paused", "paused": "paused", "resuming": "paused"}
"""What is shown of each state. While it is created or killed, a sandbox is not shown at all."""
_POLL = 0.005


@dataclass
class Box(rehearsing.Box):
    """One sandbox. `key` and `request` are its creation's; all times are seconds since 1970."""

    key: str = ""
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    started: float = 0.0
    ends: float = 0.0
    timeout: int = _DEFAULT_TIMEOUT
    memory: bool = False
    """Whether the pause that is going on keeps the memory, or the resume that is going on restores it."""
    pause_mode: str = ""
    paused_at: float = 0.0
    unresponsive: bool = False

    @property
    def metadata(self) -> dict[str, str]:
        return dict(self.body.get("metadata") or {})


class World(rehearsing.World[Box]):
    """All that the service remembers. Every public method is safe to call from several threads."""

    box: ClassVar[type[rehearsing.Box]] = Box

    def __init__(self, root: Path, *, page: int = _LARGEST_PAGE, **options: Any) -> None:
        """`page` is how many sandboxes one page of a list has at the most."""
        self.page = page
        self._closing = threading.Event()
        super().__init__(root, **options)

    def close(self) -> None:
        self._closing.set()
        super().close()

    def env(self, body: dict[str, Any]) -> dict[str, str]:
        return dict(body.get("envVars") or {})

    # Looking.

    def get(self, team: str, sandbox: str) -> dict[str, Any]:
        """Answer a read by id, from the live state."""
        with self.lock:
            self.settle()
            return self._describe(self._shown(team, sandbox))

    def search(
        self, team: str, query: Mapping[str, str], left_out: Callable[[str], bool] = lambda _: False
    ) -> tuple[list[dict[str, Any]], str | None]:
        """Return one page, the newest first, and the token of the next one."""
        wanted = _filter(query.get("metadata"))
        states = {state for state in query.get("state", "running,paused").split(",") if state}
        limit = int(query.get("limit") or _LARGEST_PAGE)
        if not states <= {"running", "paused"} or not 1 <= limit <= _LARGEST_PAGE:
            raise Refused(400, "error parsing query parameters")
        with self.lock:
            self.settle()
            rows = [
                box
                for box in self.boxes.values()
                if box.account == team
                and _SEEN.get(box.state) in states
                and wanted.items() <= box.metadata.items()
                and not left_out(box.id)
            ]
            rows.sort(key=_place, reverse=True)
            if token := query.get("nextToken"):
                after = _read_token(token)
                rows = [box for box in rows if _place(box) < after]
            size = min(limit, self.page)
            following = _write_token(rows[size - 1]) if len(rows) > size else None
            return [self._list_item(box) for box in rows[:size]], following

    def machine(self, sandbox: str, token: str) -> Machine:
        """Return what a running sandbox runs on, to whoever has its token."""
        with self.lock:
            self.settle()
            box = self.boxes.get(sandbox)
            if box is None or box.state != "running":
                raise Refused(502, "The sandbox was not found", sandboxId=sandbox)
            if not secrets.compare_digest(token, box.token):
                raise Refused(401, "unauthenticated")
            return box.machine

    # Changing.

    def create(self, team: str, body: dict[str, Any], key: str, outcome: Outcome) -> dict[str, Any]:
        """Make a sandbox, or answer again what this key was answered, also when that sandbox has ended."""
        with self.lock:
            self.settle()
            known = [box for box in self.boxes.values() if key and (box.account, box.key) == (team, key)]
            if known:
                return self._replayed(known[0], body)
            box = self._allocated(team, body, key)
            self.go(box, ["creating", "running"], outcome, failed="failed")
        self._done(box)
        if box.state == "failed":
            box.key = ""
            raise Refused(500, outcome.reason or "Failed to create sandbox", error_code="sandbox_create_failed")
        return self._made(box)

    def pause(
        self, team: str, sandbox: str, *, memory: bool, strict: bool, unresponsive: bool, outcome: Outcome
    ) -> None:
        """Pause with memory or without. `unresponsive` says that the sandbox's own agent does not answer."""
        with self.lock:
            self.settle()
            box = self._shown(team, sandbox)
            if box.state == "paused":
                raise Refused(409, f"Error pausing sandbox - sandbox '{sandbox}' is already paused")
            if box.state != "running":
                raise Refused(409, f"Sandbox '{sandbox}' cannot be paused while in '{box.state}' state")
            if unresponsive and (strict or not memory):
                raise Refused(503, "The sandbox guest agent does not answer; the sandbox keeps running")
            box.memory, box.unresponsive = memory, unresponsive
            self.go(box, ["pausing", "paused"], outcome, failed="running")
        self._done(box)
        if box.state == "running":
            raise Refused(500, "Error pausing sandbox")

    def connect(
        self, team: str, sandbox: str, *, timeout: int, memory: bool, outcome: Outcome
    ) -> tuple[dict[str, Any], bool]:
        """Return the sandbox, and whether it was resumed. A running one keeps the later of its deadlines."""
        _check_timeout(timeout)
        with self.lock:
            box = self._shown(team, sandbox)
        self._done(box)
        with self.lock:
            box = self._shown(team, sandbox)
            if box.state == "running":
                box.ends = max(box.ends, self.clock() + timeout)
                return self._made(box), False
            if box.unresponsive and memory:
                raise Refused(
                    409,
                    "The snapshot was taken while the guest agent was not responding; resume it with memory: false",
                    error_code="sandbox_snapshot_guest_agent_unresponsive",
                )
            box.memory, box.timeout = memory, timeout
            self.go(box, ["resuming", "running"], outcome, failed="paused")
        self._done(box)
        if box.state == "paused":
            raise Refused(500, "Failed to place sandbox", error_code="sandbox_placement_timeout")
        return self._made(box), True

    def kill(self, team: str, sandbox: str, outcome: Outcome) -> None:
        """Kill a running sandbox, or remove what a paused one left."""
        with self.lock:
            self.settle()
            box = self._shown(team, sandbox)
            if box.pending:
                raise Refused(409, f"Sandbox '{sandbox}' is in '{box.state}' state")
            before = box.state
            self.go(box, ["killing", "killed"], outcome, failed="lost" if outcome.hidden else before)
        self._done(box)
        if box.state == before:
            raise Refused(500, f"Error killing sandbox '{sandbox}'")

    def set_timeout(self, team: str, sandbox: str, timeout: int) -> None:
        """Move the deadline to this many seconds from now, also nearer."""
        _check_timeout(timeout)
        with self.lock:
            self.settle()
            box = self._shown(team, sandbox)
            if box.state != "running":
                raise Refused(404, f"Sandbox '{sandbox}' was not found")
            box.ends = self.clock() + timeout

    # What a test does to the world behind the service's back.

    def set_state(self, sandbox: str, state: str, pause_mode: str = "") -> None:
        """Say that a sandbox is in a state, whatever it runs."""
        with self.lock:
            box = self.boxes[sandbox]
            box.path, box.outcome, box.state, box.pause_mode = [], Outcome(), state, pause_mode

    # Time.

    def enter(self, box: Box, state: str) -> None:
        before, box.state, now = box.state, state, self.clock()
        match before, state:
            case (("creating" | "resuming"), "running"):
                if before == "resuming" and not box.memory:
                    box.machine.end()
                box.machine.thaw()
                box.started, box.ends = now, now + box.timeout
                box.pause_mode, box.unresponsive = "", False
            case "pausing", "paused":
                if box.memory:
                    box.machine.freeze()
                else:
                    box.machine.end()
                box.pause_mode, box.paused_at = "full" if box.memory else "filesystem", now
            case "pausing", "running":
                box.unresponsive = False
            case _, ("killed" | "failed"):
                box.machine.remove()
        box.updated = now

    def automatic(self, box: Box, now: float) -> None:
        if box.state != "running" or box.pending or now < box.ends:
            return
        if box.body.get("autoPause"):
            box.memory = box.body.get("autoPauseMemory") is not False
            self.go(box, ["pausing", "paused"], Outcome())
        else:
            self.go(box, ["killing", "killed"], Outcome())

    def _done(self, box: Box) -> None:
        """Wait for the end of what was begun, without the lock."""
        while True:
            with self.lock:
                self.settle()
                if not box.pending:
                    return
            if self._closing.wait(_POLL):
                raise Refused(503, "shutting down")

    # Looking up and describing.

    def _allocated(self, team: str, body: dict[str, Any], key: str) -> Box:
        template, timeout = body.get("templateID"), body.get("timeout", _DEFAULT_TIMEOUT)
        if not isinstance(template, str) or not template:
            raise Refused(400, "Error when parsing request: templateID is required")
        if template == "no-such-template":
            raise Refused(404, f"template '{template}' not found")
        _check_timeout(timeout)
        alive = [box for box in self.boxes.values() if box.account == team and box.state in _SEEN]
        if self.quota is not None and len(alive) >= self.quota:
            raise Refused(429, f"you have reached the maximum number of concurrent sandboxes ({self.quota})")
        identifier = "i" + "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(19))
        machine = Machine(self.root, identifier, self.env(body))
        box = Box(identifier, team, body, machine, created=self.clock(), key=key, timeout=timeout)
        self.boxes[identifier] = box
        return box

    def _replayed(self, known: Box, body: dict[str, Any]) -> dict[str, Any]:
        if json.dumps(known.body, sort_keys=True) != json.dumps(body, sort_keys=True):
            raise Refused(422, "The key was used for another request", error_code="idempotency_request_mismatch")
        if known.state == "creating":
            raise Refused(409, "A request with this key is in progress", error_code="idempotency_in_progress")
        return self._made(known)

    def _shown(self, team: str, sandbox: str) -> Box:
        box = self.boxes.get(sandbox)
        if box is None or box.account != team or box.state not in _SEEN:
            raise Refused(404, f"Sandbox '{sandbox}' was not found")
        return box

    def _made(self, box: Box) -> dict[str, Any]:
        return {
            "templateID": box.body["templateID"],
            "sandboxID": box.id,
            "clientID": "rehearsal",
            "envdVersion": ENVD_VERSION,
            "envdAccessToken": box.token,
            "trafficAccessToken": None,
            "domain": None,
        }

    def _list_item(self, box: Box) -> dict[str, Any]:
        return {
            "templateID": box.body["templateID"],
            "sandboxID": box.id,
            "clientID": "rehearsal",
            "startedAt": iso(box.started),
            "endAt": iso(box.paused_at if box.state == "paused" else box.ends),
            "cpuCount": 1,
            "memoryMB": 512,
            "diskSizeMB": 1024,
            "metadata": box.metadata,
            "state": _SEEN[box.state],
            "envdVersion": ENVD_VERSION,
            **({"envdUnresponsiveAtPause": True} if box.unresponsive and box.state != "running" else {}),
        }

    def _describe(self, box: Box) -> dict[str, Any]:
        return {
            **self._list_item(box),
            "envdAccessToken": box.token,
            "allowInternetAccess": box.body.get("allow_internet_access"),
            "domain": None,
            "lifecycle": {
                "autoResume": bool((box.body.get("autoResume") or {}).get("enabled")),
                "onTimeout": "pause" if box.body.get("autoPause") else "kill",
            },
            **({"pauseMode": box.pause_mode} if box.pause_mode else {}),
        }


def _check_timeout(timeout: object) -> None:
    if not isinstance(timeout, int) or timeout < 0:
        raise Refused(400, "Error when parsing request: timeout")
    if timeout > _LONGEST_TIMEOUT:
        raise Refused(400, f"Timeout cannot be greater than {_LONGEST_TIMEOUT // 3600} hours")


def _filter(text: str | None) -> dict[str, str]:
    """Read a filter on metadata, which is quoted as a whole and in its parts."""
    wanted = {}
    for pair in unquote_plus(text).split("&") if text else []:
        key, equals, value = pair.partition("=")
        if not equals or "=" in value:
            raise Refused(400, "invalid key value pair in query")
        wanted[unquote_plus(key)] = unquote_plus(value)
    return wanted


def _place(box: Box) -> tuple[float, str]:
    return box.started, box.id


def _write_token(box: Box) -> str:
    return base64.urlsafe_b64encode(f"{box.started!r}__{box.id}".encode()).decode()


def _read_token(token: str) -> tuple[float, str]:
    try:
        started, _, identifier = base64.urlsafe_b64decode(token).decode().partition("__")
        return float(started), identifier
    except ValueError:
        raise Refused(400, "Invalid next token") from None
