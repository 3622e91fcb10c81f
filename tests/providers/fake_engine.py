"""A server on a unix socket that answers as an engine might: statuses that podman never gives, nonsense, slow bytes.

The default answers are those of a healthy Docker engine with no containers. A test replaces some of them.
"""

from __future__ import annotations

import json
import re
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from providers.docker import DockerProvider
from providers.docker.schemas import DockerEndpoint
from tests.engine import short_directory

CONTAINER = "c" * 64
EXEC = "e" * 64
UPGRADED = b"HTTP/1.1 101 UPGRADED\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n"


@dataclass(frozen=True)
class Answer:
    """One answer. From byte `slow_from` on (none: never), a byte a second; `raw` replaces head and body."""

    status: int = 200
    body: object = None
    headers: dict[str, str] = field(default_factory=dict)
    raw: bytes | None = None
    slow_from: int | None = None
    then_close: bool = False

    def head(self) -> bytes:
        lines = [f"HTTP/1.1 {self.status} Whatever", f"Content-Length: {len(self.text())}"]
        lines += [f"{name}: {value}" for name, value in {"Content-Type": "application/json", **self.headers}.items()]
        return "\r\n".join([*lines, "", ""]).encode()

    def text(self) -> bytes:
        if self.body is None:
            return b""
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()

    def bytes(self) -> bytes:
        return self.raw if self.raw is not None else self.head() + self.text()


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    head: str
    body: bytes


Route = Answer | Callable[[Request], Answer]

_HEALTHY: dict[str, Route] = {
    r"GET /_ping": Answer(200, b"OK", {"Api-Version": "1.44"}),
    r"GET /v[0-9.]+/info": Answer(200, {"ID": "11111111-2222", "Name": "host", "DockerRootDir": "/var/lib/docker"}),
    r"GET /v[0-9.]+/containers/json": Answer(200, []),
    r"GET /v[0-9.]+/containers/\w+/json": Answer(404, {"message": f"No such container: {CONTAINER}"}),
    r"GET /v[0-9.]+/containers/\w+/archive": Answer(404, {"message": "no such file or directory"}),
    r"POST /v[0-9.]+/containers/create": Answer(201, {"Id": CONTAINER, "Warnings": []}),
    r"POST /v[0-9.]+/containers/\w+/(start|stop|kill|unpause)": Answer(204),
    r"DELETE /v[0-9.]+/containers/\w+": Answer(204),
    r"POST /v[0-9.]+/containers/\w+/exec": Answer(201, {"Id": EXEC}),
    r"POST /v[0-9.]+/exec/\w+/start": Answer(raw=UPGRADED + b"\x01\0\0\0\0\0\0\x02hi", then_close=True),
    r"GET /v[0-9.]+/exec/\w+/json": Answer(200, {"ID": EXEC, "Running": False, "ExitCode": 0}),
}


class FakeEngine:
    """The server. `routes` maps "METHOD path" patterns to answers; `requests` holds what was asked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.routes: dict[str, Route] = dict(_HEALTHY)
        self.requests: list[Request] = []
        self.closing = threading.Event()

    @property
    def provider(self) -> DockerProvider:
        return DockerProvider(DockerEndpoint(base_url=f"unix://{self.path}"))

    def answers(self, route: str, answer: Route) -> None:
        """Replace the answer to a route: its method and the end of its path, as in `POST /start`."""
        method, _, end = route.partition(" ")
        matching = [key for key in self.routes if key.startswith(method) and key.endswith(end)]
        assert len(matching) == 1, (route, matching)
        self.routes[matching[0]] = answer

    def answers_everything(self, answer: Route) -> None:
        self.routes = {".*": answer}

    def answer_to(self, request: Request) -> Answer:
        self.requests.append(request)
        for pattern, route in self.routes.items():
            if re.fullmatch(pattern, f"{request.method} {request.path.partition('?')[0]}"):
                return route if isinstance(route, Answer) else route(request)
        return Answer(404, {"message": "page not found"})

    @property
    def asked(self) -> list[str]:
        """What was asked, without version and query."""
        return [f"{r.method} {re.sub('^/v[0-9.]+', '', r.path).partition('?')[0]}" for r in self.requests]


@contextmanager
def fake_engine() -> Iterator[FakeEngine]:
    with short_directory() as directory:
        engine = FakeEngine(directory / "engine.sock")

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                with suppress(OSError):
                    while (request := _read(self)) is not None and _write(self, engine, engine.answer_to(request)):
                        pass

        class Server(socketserver.ThreadingUnixStreamServer):
            daemon_threads = False
            request_queue_size = 128

        with Server(str(engine.path), Handler) as server:
            thread = threading.Thread(target=server.serve_forever, args=(0.01,))
            thread.start()
            try:
                yield engine
            finally:
                engine.closing.set()
                server.shutdown()
                thread.join()


def _read(handler: socketserver.StreamRequestHandler) -> Request | None:
    lines = []
    while (line := handler.rfile.readline()) not in {b"\r\n", b""}:
        lines.append(line.decode())
    if not lines:
        return None
    head = "".join(lines)
    length = re.search(r"(?im)^content-length: *(\d+)", head)
    body = handler.rfile.read(int(length[1])) if length else b""
    method, path, _ = lines[0].split(" ", 2)
    return Request(method, path, head, body)


def _write(handler: socketserver.StreamRequestHandler, engine: FakeEngine, answer: Answer) -> bool:
    data = answer.bytes()
    quick = len(data) if answer.slow_from is None else answer.slow_from
    handler.wfile.write(data[:quick])
    for position in range(quick, len(data)):
        if engine.closing.wait(1.0):
            return False
        handler.wfile.write(data[position : position + 1])
    return not answer.then_close
