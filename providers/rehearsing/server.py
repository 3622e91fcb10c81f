"""The HTTP face of a rehearsal: routes, and the scripted faults, which meet a request before and after its answer."""

from __future__ import annotations

import json
import re
import socket
import ssl
import struct
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from email.message import Message
from email.utils import formatdate
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

from providers.rehearsing.faults import Fault, Kind
from providers.rehearsing.world import Outcome, Refused, World

ANOTHER_ACCOUNT = "00000000-0000-4000-8000-0000000000ff"
"""Whose a key is for the length of the fault `other_account`."""
DISK_FULL = "no space left on device"


@dataclass(frozen=True)
class Request:
    """One request, taken apart. `account` and `key` are who asks, or empty."""

    account: str = ""
    key: str = ""
    sandbox: str = ""
    argument: str = ""
    query: dict[str, str] = field(default_factory=dict)
    headers: Message = field(default_factory=Message)
    body: bytes = b""
    faults: dict[Kind, Fault] = field(default_factory=dict)

    @property
    def json(self) -> dict[str, Any]:
        """The JSON object that was sent. Raises `Refused` for anything else."""
        try:
            value = json.loads(self.body or b"{}")
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise Refused(400, "Unexpected token in JSON")
        return value

    @property
    def outcome(self) -> Outcome:
        """How the transition that this request begins is to end."""
        failing = self.faults.get(Kind.ERROR)
        full = self.faults.get(Kind.DISK_FULL)
        reason = f"rehearsed: {DISK_FULL}" if full else failing.message if failing else ""
        return Outcome(
            fails=failing is not None or full is not None,
            recoverable=any(fault is not None and fault.recoverable for fault in (failing, full)),
            hidden=Kind.HIDDEN in self.faults,
            stuck=Kind.STUCK in self.faults,
            reason=reason,
        )

    def left_out(self, sandbox: str) -> bool:
        """Say whether a list that is asked for is to leave this sandbox out."""
        out = self.faults.get(Kind.LEFT_OUT)
        return out is not None and out.sandbox in {None, sandbox}


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


def in_json(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Answer:
    """Return an answer that is this value in JSON."""
    return Answer(status, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})})


Act = Callable[[Any, Request], Answer]
Route = tuple[str, str, str, Act]
"""Method, a regular expression of the whole path, the call's name for faults, and what answers it.

The expression may have the groups `sandbox` and `argument`.
"""

W = TypeVar("W", bound=World[Any])


class Rehearsal(ABC, Generic[W]):
    """A server with its world, on a port of its own. `asked` is the list of calls, as (call, sandbox).

    `connections` is how many it accepted.
    """

    key: ClassVar[str]
    """The key of the provider that this is a rehearsal of."""
    label: ClassVar[str]
    prefix: ClassVar[str] = ""
    """What the API's paths begin with."""
    world_class: ClassVar[type[World[Any]]]
    routes: ClassVar[tuple[Route, ...]]

    def __init__(self, world: W, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self.world = world
        self.asked: list[tuple[str, str]] = []
        self.connections = 0
        self.echoes = False
        """Refuse everything, quoting all that was sent: a server that gives secrets away."""
        self.closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._server = _Server(self, host, port)
        self.root = f"http://{f'[{host}]' if ':' in host else host}:{self._server.server_address[1]}"

    @property
    def url(self) -> str:
        """The address to give to clients as the API's."""
        return self.root + self.prefix

    @abstractmethod
    def authorised(self, headers: Message) -> tuple[str, str]:
        """Return the key of a request and the account it belongs to, or raise `Refused`."""

    @abstractmethod
    def refusal(self, path: str, error: Refused) -> Answer:
        """Return an error in the service's form."""

    def will(self, *faults: Fault) -> None:
        """Script faults for the calls to come."""
        self.world.script.add(*faults)

    def serve(self) -> None:
        """Serve in this thread until an exception (Ctrl-C) ends it."""
        self._server.serve_forever(0.05)

    def start(self) -> None:
        """Serve in a thread of its own until `close`."""
        self._thread = threading.Thread(target=self.serve, name="rehearsal")
        self._thread.start()

    def speak_tls(self, context: ssl.SSLContext) -> None:
        """Serve over TLS from now on, with the certificate of this context."""
        # The handshake belongs to the thread of its connection, which may take its time.
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        self.root = self.root.replace("http://", "https://", 1)

    def hang_up(self) -> None:
        """End all connections, as a service does with those that are kept alive for too long."""
        self._server.hang_up()

    def close(self) -> None:
        """End serving, and all that runs in the sandboxes."""
        self.closing.set()
        if self._thread is not None:
            # Waits for a thread that serves or is about to: without one, for ever.
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()
        self.hang_up()
        self.world.close()

    def answer(self, method: str, target: str, headers: Message, body: bytes) -> tuple[Answer, dict[Kind, Fault]]:
        """Find out what is asked, meet the faults scripted for it, and answer."""
        parts = urlsplit(target)
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        control = _routed(_CONTROL, method, parts.path)
        if control is not None:
            try:
                return control[2](self, Request(query=query, headers=headers, body=body)), {}
            except Refused as error:
                return in_json({"message": error.message}, error.status), {}
        route = _routed(self.routes, method, parts.path)
        if route is None:
            return self.refusal(parts.path, Refused(404, f"Cannot {method} {parts.path}")), {}
        call, groups, act = route
        sandbox = groups.get("sandbox", "")
        self.asked.append((call, sandbox))
        faults = self.world.script.take(call, sandbox)
        if (delay := faults.get(Kind.DELAY)) is not None:
            self.closing.wait(delay.seconds)
        if Kind.RESET in faults:
            return Answer(0), faults
        instead = faults.get(Kind.ANSWER)
        try:
            if self.echoes:
                return self.refusal(target, Refused(500, f"cannot do {method} {target} {headers} {body!r}")), faults
            if instead is None or instead.effect:
                key, account = self.authorised(headers)
                if Kind.OTHER_ACCOUNT in faults:
                    account = ANOTHER_ACCOUNT
                argument = groups.get("argument", "")
                answer = act(self, Request(account, key, sandbox, argument, query, headers, body, faults))
        except Refused as error:
            answer = self.refusal(parts.path, error)
        if instead is not None:
            refusal = self.refusal(parts.path, Refused(instead.status, instead.message, **instead.details))
            answer = replace(refusal, headers={**refusal.headers, **instead.headers})
        # Before the answer: what a client was told is never forgotten.
        self.world.save()
        return answer, faults


R = TypeVar("R", bound=Rehearsal[Any])


@contextmanager
def running(rehearsal: type[R], **options: Any) -> Iterator[R]:
    """Run a rehearsal in a thread of this process, in a directory that is thrown away. Options are the world's."""
    with tempfile.TemporaryDirectory(prefix="rehearsal-", ignore_cleanup_errors=True) as directory:
        server = rehearsal(rehearsal.world_class(Path(directory), **options))
        server.start()
        try:
            yield server
        finally:
            server.close()


# What is asked of the rehearsal itself, by whoever directs it. Nothing here is the service's.


def _add_fault(server: Rehearsal[Any], request: Request) -> Answer:
    try:
        fault = Fault.asked_for(request.json, [call for _, _, call, _ in server.routes])
    except ValueError as error:
        raise Refused(400, str(error)) from None
    server.will(fault)
    return in_json({}, 201)


def _faults(server: Rehearsal[Any], request: Request) -> Answer:  # noqa: ARG001
    return in_json([asdict(fault) for fault in server.world.script.waiting()])


def _no_faults(server: Rehearsal[Any], request: Request) -> Answer:  # noqa: ARG001
    server.world.script.clear()
    return in_json({})


def _add_key(server: Rehearsal[Any], request: Request) -> Answer:
    key, account = request.json.get("key"), request.json.get("account")
    if not isinstance(key, str) or not key or not (account is None or isinstance(account, str)):
        raise Refused(400, "key must be a text, and account one or null")
    return in_json({"key": key, "account": server.world.add_key(key, account)}, 201)


def _sandboxes(server: Rehearsal[Any], request: Request) -> Answer:  # noqa: ARG001
    world = server.world
    world.settle()
    return in_json(
        [
            {"id": box.id, "account": box.account, "state": box.state, "executing": world.executing(box.id)}
            for box in list(world.boxes.values())
        ]
    )


_CONTROL: tuple[Route, ...] = (
    ("POST", r"/rehearsal/faults", "", _add_fault),
    ("GET", r"/rehearsal/faults", "", _faults),
    ("DELETE", r"/rehearsal/faults", "", _no_faults),
    ("POST", r"/rehearsal/keys", "", _add_key),
    ("GET", r"/rehearsal/sandboxes", "", _sandboxes),
)


def _routed(routes: tuple[Route, ...], method: str, path: str) -> tuple[str, dict[str, str], Act] | None:
    for verb, pattern, call, act in routes:
        found = re.fullmatch(pattern, path)
        if verb == method and found is not None:
            return call, {name: unquote(text or "") for name, text in found.groupdict().items()}, act
    return None


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, rehearsal: Rehearsal[Any], host: str, port: int) -> None:
        self.rehearsal = rehearsal
        self._open: set[socket.socket] = set()
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        self.rehearsal.connections += 1
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def hang_up(self) -> None:
        """End the connections, which clients would keep alive."""
        for connection in tuple(self._open):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def service_actions(self) -> None:
        # Deadlines pass also when nobody asks.
        with suppress(OSError):
            self.rehearsal.world.settle()
            self.rehearsal.world.save()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that hang up are part of a rehearsal."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server
    disable_nagle_algorithm = True

    def log_message(self, *args: Any) -> None:
        """Stay quiet."""

    def _body(self) -> bytes:
        if "chunked" not in str(self.headers.get("Transfer-Encoding", "")).lower():
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline().partition(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass  # trailers
        return body

    def _serve(self) -> None:
        rehearsal = self.server.rehearsal
        answer, faults = rehearsal.answer(self.command, self.path, self.headers, self._body())
        if Kind.RESET in faults:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            self.connection.close()
            return
        if Kind.LOST in faults:
            self.close_connection = True
            return
        phrase = HTTPStatus(answer.status).phrase if answer.status in set(HTTPStatus) else "Whatever"
        lines = [f"HTTP/1.1 {answer.status} {phrase}"]
        headers = {"Date": formatdate(rehearsal.world.clock(), usegmt=True), **answer.headers}
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if answer.status != HTTPStatus.NO_CONTENT:
            lines.append(f"Content-Length: {len(answer.body)}")
        data = "\r\n".join([*lines, "", ""]).encode() + answer.body
        if Kind.CUT in faults:
            self.wfile.write(data[: len(data) // 2])
            self.close_connection = True
            return
        if Kind.TRICKLE not in faults:
            self.wfile.write(data)
            return
        for position in range(len(data)):
            self.wfile.write(data[position : position + 1])
            if rehearsal.closing.wait(1.0):
                self.close_connection = True
                return

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _serve  # noqa: N815  (names that http.server looks for)
