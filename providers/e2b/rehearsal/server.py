"""The HTTP face of the rehearsed E2B: the API, and the agent in each sandbox with its Connect protocol."""

from __future__ import annotations

import base64
import json
from email.message import Message
from email.parser import BytesParser
from email.policy import HTTP
from http import HTTPStatus
from typing import Any, ClassVar

from providers import rehearsing
from providers.e2b.rehearsal.world import World
from providers.rehearsing import Answer, Kind, Machine, Refused, Request, Route, in_json

_RETRIED = frozenset({"sandbox_create_failed", "sandbox_placement_timeout", "idempotency_in_progress"})
_NEVER = frozenset({"idempotency_request_mismatch", "sandbox_create_refused", "idempotency_outcome_unknown"})
_AT_ONCE = 1 << 15
"""Bytes of output that one event carries."""
_LONGEST_COMMAND = 60_000
"""Milliseconds that a command has where its caller names no limit."""


# The calls of the API. Each takes the rehearsal and a request.


def _team(server: Rehearsal, request: Request) -> Answer:  # noqa: ARG001
    if request.argument != request.account:
        raise Refused(
            403, f"You ({request.account}) are not authorized to access this team's ({request.argument}) metrics"
        )
    return in_json([])


def _create(server: Rehearsal, request: Request) -> Answer:
    key = str(request.headers.get("Idempotency-Key", ""))
    return in_json(server.world.create(request.account, request.json, key, request.outcome), HTTPStatus.CREATED)


def _list(server: Rehearsal, request: Request) -> Answer:
    rows, token = server.world.search(request.account, request.query, request.left_out)
    return in_json(rows, headers={"x-next-token": token} if token else {})


def _get(server: Rehearsal, request: Request) -> Answer:
    return in_json(server.world.get(request.account, request.sandbox))


def _kill(server: Rehearsal, request: Request) -> Answer:
    server.world.kill(request.account, request.sandbox, request.outcome)
    return Answer(HTTPStatus.NO_CONTENT)


def _pause(server: Rehearsal, request: Request) -> Answer:
    server.world.pause(
        request.account,
        request.sandbox,
        memory=request.json.get("memory") is not False,
        strict=request.json.get("requireHealthyGuest") is True,
        unresponsive=Kind.UNRESPONSIVE in request.faults,
        outcome=request.outcome,
    )
    return Answer(HTTPStatus.NO_CONTENT)


def _connect(server: Rehearsal, request: Request) -> Answer:
    made, resumed = server.world.connect(
        request.account,
        request.sandbox,
        timeout=request.json.get("timeout", 300),
        memory=request.json.get("memory") is not False,
        outcome=request.outcome,
    )
    return in_json(made, HTTPStatus.CREATED if resumed else HTTPStatus.OK)


def _timeout(server: Rehearsal, request: Request) -> Answer:
    server.world.set_timeout(request.account, request.sandbox, request.json.get("timeout", -1))
    return Answer(HTTPStatus.NO_CONTENT)


# The calls of a sandbox's agent.


def _machine(server: Rehearsal, request: Request) -> Machine:
    return server.world.machine(str(request.headers.get("E2b-Sandbox-Id", "")), request.key)


def _health(server: Rehearsal, request: Request) -> Answer:
    _machine(server, request)
    return Answer(HTTPStatus.NO_CONTENT)


def _start(server: Rehearsal, request: Request) -> Answer:
    """Run a process to its end and tell of it. A caller that listens while it runs hears all of it at its end."""
    machine = _machine(server, request)
    asked = json.loads(request.body[5:])["process"]
    timeout = int(request.headers.get("Connect-Timeout-Ms") or _LONGEST_COMMAND) / 1000
    done = machine.run(
        [asked["cmd"], *asked.get("args", [])], cwd=asked.get("cwd"), env=asked.get("envs") or {}, timeout=timeout
    )
    stream = _event({"start": {"pid": done.pid}})
    for name, output in (("stdout", done.stdout), ("stderr", done.stderr)):
        for start in range(0, len(output), _AT_ONCE):
            stream += _event({"data": {name: base64.b64encode(output[start : start + _AT_ONCE]).decode()}})
    if done.status is None:
        error = {"code": "deadline_exceeded", "message": "the deadline was exceeded"}
        return _streamed(stream + _envelope({"error": error}, flags=2))
    told = f"exit status {done.status}" if done.status >= 0 else f"signal: {-done.status}"
    # The protocol's JSON leaves out what is nothing.
    end = {"exitCode": max(-1, done.status), "exited": done.status >= 0, "status": told}
    end = {name: value for name, value in end.items() if value}
    return _streamed(stream + _event({"end": end}) + _envelope({}, flags=2))


def _event(event: dict[str, Any]) -> bytes:
    return _envelope({"event": event})


def _envelope(message: dict[str, Any], *, flags: int = 0) -> bytes:
    data = json.dumps(message).encode()
    return bytes([flags]) + len(data).to_bytes(4, "big") + data


def _streamed(data: bytes) -> Answer:
    return Answer(HTTPStatus.OK, data, {"Content-Type": "application/connect+json"})


def _upload(server: Rehearsal, request: Request) -> Answer:
    """Take files as the SDK sends them: one at the path of the query, or each at the path that its field names."""
    machine = _machine(server, request)
    kind = str(request.headers.get("Content-Type", ""))
    if kind.startswith("multipart/"):
        form = BytesParser(policy=HTTP).parsebytes(f"Content-Type: {kind}\r\n\r\n".encode() + request.body)
        parts = [(part.get_filename() or "", part.get_payload(decode=True)) for part in form.iter_parts()]
    else:
        parts = [("", request.body)]
    written = []
    for name, content in parts:
        path = machine.path(request.query.get("path") or name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else b"")
        written.append({"name": path.name, "type": "file", "path": str(path)})
    return in_json(written)


def _download(server: Rehearsal, request: Request) -> Answer:
    path = _machine(server, request).path(request.query.get("path", ""))
    if not path.is_file():
        raise Refused(404, f"path '{path}' does not exist")
    return Answer(HTTPStatus.OK, path.read_bytes(), {"Content-Type": "application/octet-stream"})


_SANDBOX = r"/sandboxes/(?P<sandbox>[^/]+)"
_ROUTES: tuple[Route, ...] = (
    ("GET", r"/teams/(?P<argument>[^/]+)/metrics", "team", _team),
    ("POST", r"/v2/sandboxes", "create", _create),
    ("GET", r"/v2/sandboxes", "list", _list),
    ("GET", _SANDBOX, "get", _get),
    ("DELETE", _SANDBOX, "kill", _kill),
    ("POST", f"{_SANDBOX}/pause", "pause", _pause),
    ("POST", f"{_SANDBOX}/timeout", "timeout", _timeout),
    ("POST", f"/v2{_SANDBOX}/connect", "connect", _connect),
    ("GET", r"/health", "health", _health),
    ("POST", r"/process\.Process/Start", "execute", _start),
    ("POST", r"/files", "upload", _upload),
    ("GET", r"/files", "download", _download),
)


class Rehearsal(rehearsing.Rehearsal[World]):
    """E2B's API, and the agents of its sandboxes at the same address."""

    key: ClassVar[str] = "e2b"
    label: ClassVar[str] = "E2B"
    world_class: ClassVar[type[rehearsing.World[Any]]] = World
    routes: ClassVar[tuple[Route, ...]] = _ROUTES

    def authorised(self, headers: Message) -> tuple[str, str]:
        if "E2b-Sandbox-Id" in headers:
            # To an agent: its token is looked at with its sandbox.
            return str(headers.get("X-Access-Token", "")), ""
        key = str(headers.get("X-API-KEY", ""))
        team = self.world.keys.get(key)
        if team is None:
            raise Refused(401, "Invalid API key, please visit https://e2b.dev/docs/api-key for more information.")
        return key, team

    def refusal(self, path: str, error: Refused) -> Answer:  # noqa: ARG002 - all its errors have one form
        code = error.details.get("error_code")
        headers = {}
        if code in _RETRIED | _NEVER:
            headers["Should-Retry"] = str(code in _RETRIED).lower()
        if code == "idempotency_in_progress":
            headers["Retry-After"] = "1"
        return in_json({"code": error.status, "message": error.message, **error.details}, error.status, headers)
