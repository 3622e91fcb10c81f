"""The HTTP face of a rehearsal: routes, authorisation, errors in the service's form, and the scripted faults."""

from __future__ import annotations

import json
import re
import socket
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from email.message import Message
from email.parser import BytesParser
from email.policy import HTTP
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from providers.daytona.rehearsal.faults import Fault, Kind
from providers.daytona.rehearsal.world import Outcome, Refused, World

API = "/api"
TOOLBOX = "/toolbox"
_EXECUTE_TIMEOUT = 10.0


@dataclass(frozen=True)
class Request:
    """One request, taken apart."""

    organization: str
    key: str
    sandbox: str
    argument: str
    query: dict[str, str]
    headers: Message
    body: bytes
    faults: dict[Kind, Fault]

    @property
    def json(self) -> dict[str, Any]:
        try:
            value = json.loads(self.body or b"{}")
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise Refused(400, "Unexpected token in JSON")
        return value

    @property
    def outcome(self) -> Outcome:
        failing = self.faults.get(Kind.ERROR)
        return Outcome(
            fails=failing is not None,
            recoverable=failing is not None and failing.recoverable,
            hidden=Kind.HIDDEN in self.faults,
            stuck=Kind.STUCK in self.faults,
        )


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes
    headers: dict[str, str]


def _json(value: object, status: int = 200) -> Answer:
    return Answer(status, json.dumps(value).encode(), {"Content-Type": "application/json"})


class Rehearsal:
    """A server with its world, on a port of its own. `asked` is the list of calls, as (call, sandbox)."""

    def __init__(self, world: World, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self.world = world
        self.asked: list[tuple[str, str]] = []
        self.echoes = False
        """Refuse everything, quoting all that was sent: a server that gives secrets away."""
        self.closing = threading.Event()
        self._server = _Server(self, host, port)
        self.root = f"http://{host}:{self._server.server_address[1]}"
        world.toolbox_url = self.root + TOOLBOX

    @property
    def url(self) -> str:
        """The address to give to clients as the API's."""
        return self.root + API

    def will(self, *faults: Fault) -> None:
        self.world.script.add(*faults)

    def serve(self) -> None:
        """Serve until `close` is called from another thread."""
        self._server.serve_forever(0.05)

    def close(self) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self.world.close()

    def answer(self, method: str, target: str, headers: Message, body: bytes) -> tuple[Answer, dict[Kind, Fault]]:
        """Find out what is asked, meet the faults scripted for it, and answer."""
        parts = urlsplit(target)
        route = _routed(method, parts.path)
        if route is None:
            return _error(parts.path, Refused(404, f"Cannot {method} {parts.path}")), {}
        call, groups, act = route
        sandbox = groups.get("sandbox", "")
        self.asked.append((call, sandbox))
        faults = self.world.script.take(call, sandbox) if not call.startswith("rehearsal") else {}
        if (delay := faults.get(Kind.DELAY)) is not None:
            self.closing.wait(delay.seconds)
        instead = faults.get(Kind.ANSWER)
        try:
            if self.echoes:
                return _error(target, Refused(500, f"cannot do {method} {target} {headers} {body!r}")), faults
            if Kind.RESET in faults:
                return Answer(0, b"", {}), faults
            if instead is None or instead.effect:
                key, organization = "", ""
                if not call.startswith("rehearsal"):
                    key, organization = self._authorised(headers)
                query = dict(parse_qsl(parts.query, keep_blank_values=True))
                argument = groups.get("argument", "")
                request = Request(organization, key, sandbox, argument, query, headers, body, faults)
                answer = act(self, request)
        except Refused as error:
            answer = _error(parts.path, error)
        if instead is not None:
            refusal = _error(parts.path, Refused(instead.status, instead.message))
            answer = Answer(refusal.status, refusal.body, {**refusal.headers, **instead.headers})
        return answer, faults

    def _authorised(self, headers: Message) -> tuple[str, str]:
        scheme, _, key = str(headers.get("Authorization", "")).partition(" ")
        organization = self.world.keys.get(key) if scheme == "Bearer" else None
        if organization is None:
            raise Refused(401, "Invalid credentials")
        return key, organization


@contextmanager
def rehearsing(**options: Any) -> Iterator[Rehearsal]:
    """Run a rehearsal in a thread of this process, in a directory that is thrown away. Options are the world's."""
    with tempfile.TemporaryDirectory(prefix="daytona-", ignore_cleanup_errors=True) as directory:
        rehearsal = Rehearsal(World(Path(directory), **options))
        thread = threading.Thread(target=rehearsal.serve, name="rehearsal")
        thread.start()
        try:
            yield rehearsal
        finally:
            rehearsal.close()
            thread.join()


# The calls. Each takes the rehearsal and a request.


def _list(server: Rehearsal, request: Request) -> Answer:
    out = request.faults.get(Kind.LEFT_OUT)
    return _json(
        server.world.search(
            request.organization,
            request.query,
            (lambda _: False) if out is None else (lambda sandbox: out.sandbox in {None, sandbox}),
        )
    )


def _act(verb: str) -> Callable[[Rehearsal, Request], Answer]:
    return lambda server, request: _json(server.world.act(request.organization, request.sandbox, verb, request.outcome))


def _set(setting: str) -> Callable[[Rehearsal, Request], Answer]:
    return lambda server, request: _json(
        server.world.change(request.organization, request.sandbox, setting, int(request.argument))
    )


def _labels(server: Rehearsal, request: Request) -> Answer:
    labels = request.json.get("labels") or {}
    server.world.change(request.organization, request.sandbox, "labels", labels)
    return _json({"labels": labels})


def _used(server: Rehearsal, request: Request) -> Answer:
    with suppress(Refused):
        server.world.machine(request.organization, request.sandbox)
    return Answer(201, b"", {})


def _key(server: Rehearsal, request: Request) -> Answer:  # noqa: ARG001
    return _json(
        {
            "name": "rehearsal",
            "value": f"dtn_***{request.key[-3:]}",
            "createdAt": "2026-01-01T00:00:00.000Z",
            "permissions": ["write:sandboxes", "delete:sandboxes"],
            "userId": "rehearsal",
            "organizationId": request.organization,
        }
    )


def _organization(server: Rehearsal, request: Request) -> Answer:  # noqa: ARG001
    if request.argument != request.organization:
        raise Refused(403, "Forbidden resource")
    return _json({"id": request.organization, "name": "rehearsal"})


def _execute(server: Rehearsal, request: Request) -> Answer:
    machine = server.world.machine(request.organization, request.sandbox)
    asked = request.json
    done = machine.execute(
        str(asked.get("command", "")),
        cwd=asked.get("cwd"),
        env=asked.get("envs") or {},
        timeout=float(asked.get("timeout") or _EXECUTE_TIMEOUT),
    )
    if done is None:
        raise Refused(408, "command execution timeout")
    return _json({"exitCode": done[0], "result": done[1]})


def _upload(server: Rehearsal, request: Request) -> Answer:
    """Take files as the SDK sends them: form fields `files[N].path`, each with its `files[N].file`."""
    machine = server.world.machine(request.organization, request.sandbox)
    head = f"Content-Type: {request.headers.get('Content-Type', '')}\r\n\r\n".encode()
    form = BytesParser(policy=HTTP).parsebytes(head + request.body)
    fields = {
        str(part.get_param("name", header="content-disposition")): part.get_payload(decode=True)
        for part in form.iter_parts()
    }
    for name, content in fields.items():
        where = fields.get(name.removesuffix(".file") + ".path")
        if name.endswith(".file") and isinstance(where, bytes) and isinstance(content, bytes):
            path = machine.path(where.decode())
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    return _json({})


def _download(server: Rehearsal, request: Request) -> Answer:
    path = server.world.machine(request.organization, request.sandbox).path(request.query.get("path", ""))
    if not path.is_file():
        raise Refused(404, "file not found")
    return Answer(200, path.read_bytes(), {"Content-Type": "application/octet-stream"})


def _fault(server: Rehearsal, request: Request) -> Answer:
    asked = request.json
    try:
        fault = Fault(**{**asked, "kind": Kind(asked.get("kind", ""))})
    except (TypeError, ValueError) as error:
        raise Refused(400, str(error)) from None
    server.will(fault)
    return _json({}, 201)


def _no_faults(server: Rehearsal, request: Request) -> Answer:  # noqa: ARG001
    server.world.script.clear()
    return _json({})


_SANDBOX = r"/api/sandbox/(?P<sandbox>[^/]+)"
_IN = r"/toolbox/(?P<sandbox>[^/]+)"
_ROUTES: tuple[tuple[str, str, str, Callable[[Rehearsal, Request], Answer]], ...] = (
    ("POST", r"/api/sandbox", "create", lambda s, r: _json(s.world.create(r.organization, r.json, r.outcome))),
    ("GET", r"/api/sandbox", "list", _list),
    ("GET", _SANDBOX, "get", lambda s, r: _json(s.world.get(r.organization, r.sandbox))),
    ("DELETE", _SANDBOX, "delete", _act("delete")),
    *(("POST", f"{_SANDBOX}/{verb}", verb, _act(verb)) for verb in ("start", "stop", "pause", "archive", "recover")),
    ("PUT", f"{_SANDBOX}/labels", "labels", _labels),
    *(
        ("POST", rf"{_SANDBOX}/{call}/(?P<argument>-?\d+)", call, _set(setting))
        for call, setting in (
            ("autostop", "auto_stop"),
            ("autopause", "auto_pause"),
            ("autoarchive", "auto_archive"),
            ("autodelete", "auto_delete"),
            ("ttl", "ttl"),
        )
    ),
    ("POST", f"{_SANDBOX}/last-activity", "last-activity", _used),
    ("GET", f"{_SANDBOX}/toolbox-proxy-url", "toolbox-url", lambda s, _: _json({"url": s.world.toolbox_url})),
    ("GET", r"/api/api-keys/current", "key", _key),
    ("GET", r"/api/organizations/(?P<argument>[^/]+)", "organization", _organization),
    ("POST", f"{_IN}/process/execute", "execute", _execute),
    ("POST", f"{_IN}/files/bulk-upload", "upload", _upload),
    ("GET", f"{_IN}/files/download", "download", _download),
    ("POST", r"/rehearsal/faults", "rehearsal-fault", _fault),
    ("DELETE", r"/rehearsal/faults", "rehearsal-no-faults", _no_faults),
)
"""Method, path, the call's name for faults, and what answers it."""


def _routed(method: str, path: str) -> tuple[str, dict[str, str], Callable[[Rehearsal, Request], Answer]] | None:
    for verb, pattern, call, act in _ROUTES:
        found = re.fullmatch(pattern, path)
        if verb == method and found is not None:
            return call, {name: unquote(text or "") for name, text in found.groupdict().items()}, act
    return None


def _error(path: str, error: Refused) -> Answer:
    phrase = HTTPStatus(error.status).phrase if error.status in set(HTTPStatus) else "Error"
    body = {
        "path": path,
        "timestamp": "2026-01-01T00:00:00.000Z",
        "statusCode": error.status,
        "error": phrase,
        "message": error.message,
        "source": "DAYTONA_API",
    }
    return _json(body, error.status)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, rehearsal: Rehearsal, host: str, port: int) -> None:
        self.rehearsal = rehearsal
        super().__init__((host, port), _Handler)

    def service_actions(self) -> None:
        # Deadlines pass also when nobody asks.
        with suppress(OSError):
            self.rehearsal.world.settle()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that hang up are part of a rehearsal."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server
    disable_nagle_algorithm = True

    def log_message(self, *args: Any) -> None:
        """Stay quiet."""

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        rehearsal = self.server.rehearsal
        answer, faults = rehearsal.answer(self.command, self.path, self.headers, body)
        if Kind.RESET in faults:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            self.connection.close()
            return
        if Kind.LOST in faults:
            self.close_connection = True
            return
        lines = [f"HTTP/1.1 {answer.status} {'OK' if answer.status < 400 else 'Error'}"]  # noqa: PLR2004
        lines += [f"{name}: {value}" for name, value in answer.headers.items()]
        lines += [f"Content-Length: {len(answer.body)}", "", ""]
        data = "\r\n".join(lines).encode() + answer.body
        if Kind.TRICKLE not in faults:
            self.wfile.write(data)
            return
        for position in range(len(data)):
            self.wfile.write(data[position : position + 1])
            if rehearsal.closing.wait(1.0):
                self.close_connection = True
                return

    do_GET = do_POST = do_PUT = do_DELETE = _serve  # noqa: N815  (names that http.server looks for)
