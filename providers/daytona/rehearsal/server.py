"""The HTTP face of the rehearsal of Daytona: routes, authorisation, and errors in the service's form."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from email.message import Message
from email.parser import BytesParser
from email.policy import HTTP
from http import HTTPStatus
from typing import Any, ClassVar

from providers import rehearsing
from providers.daytona.rehearsal.world import World
from providers.rehearsing import Answer, Kind, Refused, Request, Route, in_json, iso
from providers.rehearsing.server import DISK_FULL

TOOLBOX = "/toolbox"
_EXECUTE_TIMEOUT = 10.0

# The calls. Each takes the rehearsal and a request.


def _list(server: Any, request: Request) -> Answer:
    return in_json(server.world.search(request.account, request.query, request.left_out))


def _fork(server: Any, request: Request) -> Answer:
    return in_json(server.world.fork(request.account, request.sandbox, request.json.get("name"), request.outcome))


def _act(verb: str) -> Callable[[Any, Request], Answer]:
    return lambda server, request: in_json(server.world.act(request.account, request.sandbox, verb, request.outcome))


def _set(setting: str) -> Callable[[Any, Request], Answer]:
    return lambda server, request: in_json(
        server.world.change(request.account, request.sandbox, setting, int(request.argument))
    )


def _labels(server: Any, request: Request) -> Answer:
    labels = request.json.get("labels") or {}
    server.world.change(request.account, request.sandbox, "labels", labels)
    return in_json({"labels": labels})


def _used(server: Any, request: Request) -> Answer:
    with suppress(Refused):
        server.world.machine(request.account, request.sandbox)
    return Answer(201, b"", {})


def _key(server: Any, request: Request) -> Answer:  # noqa: ARG001
    if is_jwt(request.key):
        raise Refused(403, "Authenticate with an API key to use this endpoint")
    return in_json(
        {
            "name": "rehearsal",
            "value": f"dtn_***{request.key[-3:]}",
            "createdAt": "2026-01-01T00:00:00.000Z",
            "permissions": ["write:sandboxes", "delete:sandboxes"],
            "userId": "rehearsal",
            "organizationId": request.account,
        }
    )


def _organization(server: Any, request: Request) -> Answer:  # noqa: ARG001
    if request.argument != request.account:
        raise Refused(403, "Forbidden resource")
    moment = "2026-01-01T00:00:00.000Z"
    limits = ("maxCpuPerSandbox", "maxMemoryPerSandbox", "maxDiskPerSandbox", "secretQuota", "maxSecretsPerSandbox")
    switches = ("personal", "suspended", "sandboxLimitedNetworkEgress", "previewWarningEnabled", "ssoEnabled")
    rates = ("authenticated", "sandboxCreate", "sandboxLifecycle")
    return in_json(
        {
            "id": request.account,
            "name": "rehearsal",
            "createdBy": "rehearsal",
            # The generated client insists on times and a reason also where nothing is suspended.
            **dict.fromkeys(("createdAt", "updatedAt", "suspendedAt", "suspendedUntil"), moment),
            "suspensionReason": "",
            "suspensionCleanupGracePeriodHours": 24,
            "snapshotDeactivationTimeoutMinutes": 20160,
            **dict.fromkeys(limits, 100),
            **dict.fromkeys((*switches, "scimEnabled"), False),
            **dict.fromkeys(f"{rate}RateLimit" for rate in rates),
            **dict.fromkeys(f"{rate}RateLimitTtlSeconds" for rate in rates),
            "defaultQueueTimeout": None,
            "experimentalConfig": {},
            "otelConfig": None,
        }
    )


def _execute(server: Any, request: Request) -> Answer:
    machine = server.world.machine(request.account, request.sandbox)
    if Kind.DISK_FULL in request.faults:
        raise Refused(400, f"failed to execute command: {DISK_FULL}")
    asked = request.json
    done = machine.execute(
        str(asked.get("command", "")),
        cwd=asked.get("cwd"),
        env=asked.get("envs") or {},
        timeout=float(asked.get("timeout") or _EXECUTE_TIMEOUT),
    )
    if done is None:
        raise Refused(408, "command execution timeout")
    return in_json({"exitCode": done[0], "result": done[1]})


def _upload(server: Any, request: Request) -> Answer:
    """Take files as the SDK sends them: form fields `files[N].path`, each with its `files[N].file`."""
    machine = server.world.machine(request.account, request.sandbox)
    if Kind.DISK_FULL in request.faults:
        raise Refused(400, f"failed to write file: {DISK_FULL}")
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
    return in_json({})


def _download(server: Any, request: Request) -> Answer:
    path = server.world.machine(request.account, request.sandbox).path(request.query.get("path", ""))
    if not path.is_file():
        raise Refused(404, "file not found")
    return Answer(200, path.read_bytes(), {"Content-Type": "application/octet-stream"})


_SANDBOX = r"/api/sandbox/(?P<sandbox>[^/]+)"
_IN = r"/toolbox/(?P<sandbox>[^/]+)"
_ROUTES: tuple[Route, ...] = (
    ("POST", r"/api/sandbox", "create", lambda s, r: in_json(s.world.create(r.account, r.json, r.outcome))),
    ("GET", r"/api/sandbox", "list", _list),
    ("GET", _SANDBOX, "get", lambda s, r: in_json(s.world.get(r.account, r.sandbox))),
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
    ("GET", f"{_SANDBOX}/toolbox-proxy-url", "toolbox-url", lambda s, _: in_json({"url": s.world.toolbox_url})),
    ("POST", f"{_SANDBOX}/fork", "fork", _fork),
    ("GET", f"{_SANDBOX}/forks", "forks", lambda s, r: in_json(s.world.forks(r.account, r.sandbox))),
    ("GET", r"/api/api-keys/current", "key", _key),
    ("GET", r"/api/organizations/(?P<argument>[^/]+)", "organization", _organization),
    ("POST", f"{_IN}/process/execute", "execute", _execute),
    ("POST", f"{_IN}/files/bulk-upload", "upload", _upload),
    ("GET", f"{_IN}/files/download", "download", _download),
)


def is_jwt(key: str) -> bool:
    """Say whether what was registered as a key stands for a user's JWT."""
    return key.startswith("eyJ") and key.count(".") == 2  # noqa: PLR2004


class Rehearsal(rehearsing.Rehearsal[World]):
    """The service on a port of its own. A key is let in as the bearer; its account is an organisation."""

    key: ClassVar[str] = "daytona"
    label: ClassVar[str] = "Daytona"
    prefix: ClassVar[str] = "/api"
    world_class: ClassVar[type[rehearsing.World[Any]]] = World
    routes: ClassVar[tuple[Route, ...]] = _ROUTES

    def __init__(self, world: World, *, host: str = "127.0.0.1", port: int = 0) -> None:
        super().__init__(world, host=host, port=port)
        world.toolbox_url = self.root + TOOLBOX

    def authorised(self, headers: Message) -> tuple[str, str]:
        scheme, _, key = str(headers.get("Authorization", "")).partition(" ")
        organization = self.world.keys.get(key) if scheme == "Bearer" else None
        if organization is None:
            raise Refused(401, "Invalid credentials")
        if is_jwt(key) and headers.get("X-Daytona-Organization-ID") != organization:
            raise Refused(403, "Forbidden resource")
        return key, organization

    def refusal(self, path: str, error: Refused) -> Answer:
        phrase = HTTPStatus(error.status).phrase if error.status in set(HTTPStatus) else "Error"
        body = {
            "path": path,
            "timestamp": iso(self.world.clock()),
            "statusCode": error.status,
            "error": phrase,
            "message": error.message,
            "source": "DAYTONA_API",
        }
        return in_json(body, error.status)
