"""What the Docker provider makes of answers: of statuses that podman never gives, of nonsense, and of slow servers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from providers.contract import (
    OUTPUT_LIMIT,
    Busy,
    Command,
    Ended,
    ErrorKind,
    Gone,
    ProviderError,
    Running,
    Sighting,
    Stopped,
    Unknown,
)
from providers.docker import DockerProvider, answers
from providers.docker.schemas import DockerConfig, DockerEndpoint
from providers.docker.streams import Frames
from providers.registry import ConfigurationError, validate
from tests.providers.fake_engine import CONTAINER, EXEC, UPGRADED, Answer, FakeEngine, fake_engine

WITHIN = 20.0
CONFIG = DockerConfig(image="image")
TRUE = Command(("true",), timeout=5)

CALLS: dict[str, Callable[[DockerProvider, float], Any]] = {
    "identify": lambda p, within: p.identify(within=within),
    "create": lambda p, within: p.create("name", {"a": "b"}, CONFIG, within=within),
    "find": lambda p, within: p.find("name", {}, within=within),
    "inspect": lambda p, within: p.inspect(CONTAINER, within=within),
    "start": lambda p, within: p.start(CONTAINER, within=within),
    "stop": lambda p, within: p.stop(CONTAINER, grace=1, within=within),
    "delete": lambda p, within: p.delete(CONTAINER, within=within),
    "execute": lambda p, within: p.execute(CONTAINER, TRUE, within=within),
    "list": lambda p, within: p.list({"a": "b"}, within=within),
}
ROUTES = {
    "identify": "GET /info",
    "create": "POST /create",
    "find": "GET /containers/json",
    "inspect": r"GET /containers/\w+/json",
    "start": "POST /(start|stop|kill|unpause)",
    "stop": "POST /(start|stop|kill|unpause)",
    "delete": r"DELETE /containers/\w+",
    "execute": r"POST /containers/\w+/exec",
    "list": "GET /containers/json",
}
every_call = pytest.mark.parametrize("call", sorted(CALLS))


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with fake_engine() as engine:
        yield engine


def failing(engine: FakeEngine, call: str, *, within: float = WITHIN) -> ProviderError:
    with pytest.raises(ProviderError) as caught:
        CALLS[call](engine.provider, within)
    return caught.value


def description(status: str = "running", **state: Any) -> dict[str, Any]:
    running = status in {"running", "paused", "restarting", "removing"}
    return {
        "Id": CONTAINER,
        "Name": "/name",
        "Config": {"Labels": {"paperclip-env.lease": "1", "maintainer": "somebody"}},
        "HostConfig": {"PidMode": ""},
        "State": {"Status": status, "Running": running, "Pid": 4711 if running else 0, **state},
    }


def entry(**changes: Any) -> dict[str, Any]:
    return {"Id": CONTAINER, "Names": ["/name"], "Labels": {"paperclip-env.lease": "1"}, **changes}


# States.


@pytest.mark.parametrize(
    ("status", "state", "expected"),
    [
        ("running", {}, Running),
        ("restarting", {}, Running),
        ("paused", {}, Stopped),
        ("created", {}, Stopped),
        ("exited", {}, Stopped),
        ("removing", {}, Busy),
        ("dead", {}, Unknown),
        # Podman's own.
        ("configured", {}, Stopped),
        ("stopped", {}, Stopped),
        ("initialized", {"Pid": 12}, Running),
        ("created", {"Pid": 12}, Running),
        ("stopping", {"Pid": 12}, Running),
        # What nobody has heard of, or contradicts itself, is no proof.
        ("hibernating", {}, Unknown),
        ("", {}, Unknown),
        ("exited", {"Pid": 12}, Unknown),
        ("exited", {"Running": True}, Unknown),
        ("exited", {"Running": None}, Unknown),
    ],
)
def test_a_state_means_one_sighting(status: str, state: dict[str, Any], expected: type[Sighting]) -> None:
    sighting = answers.sighting(description(status, **state), CONTAINER)
    assert type(sighting) is expected
    assert not isinstance(sighting, Gone)
    assert sighting.resource.name == "name"
    assert dict(sighting.resource.marks) == {"paperclip-env.lease": "1"}
    if isinstance(sighting, Stopped):
        assert sighting.ended is (Ended.SUSPENDED if status == "paused" else Ended.KILLED)


@pytest.mark.parametrize("namespace", ["host", f"container:{'a' * 64}"])
@pytest.mark.parametrize("status", ["exited", "paused", "created"])
def test_a_container_in_a_foreign_process_namespace_is_never_stopped(status: str, namespace: str) -> None:
    details = description(status) | {"HostConfig": {"PidMode": namespace}}
    assert isinstance(answers.sighting(details, CONTAINER), Unknown)


# Absence.


def test_gone_needs_both_sources(engine: FakeEngine) -> None:
    assert engine.provider.inspect(CONTAINER, within=WITHIN) == Gone()
    assert engine.asked[-2:] == [f"GET /containers/{CONTAINER}/json", "GET /containers/json"]
    assert "all=1" in engine.requests[-1].path


def test_a_container_that_is_described_as_absent_but_listed_is_unknown(engine: FakeEngine) -> None:
    engine.answers("GET /containers/json", Answer(200, [entry(Id="d" * 64), entry()]))
    assert isinstance(engine.provider.inspect(CONTAINER, within=WITHIN), Unknown)


@pytest.mark.parametrize(
    "second",
    [
        Answer(500, {"message": "database is locked"}),
        Answer(401, {"message": "who are you"}),
        Answer(404, {"message": "page not found"}),
        Answer(200, b"[{"),
        Answer(200, {"message": "none"}),
        Answer(200, [entry(Id=None)]),
        Answer(raw=b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n[]", then_close=True),
    ],
)
def test_no_second_source_no_absence(engine: FakeEngine, second: Answer) -> None:
    engine.answers("GET /containers/json", second)
    failing(engine, "inspect")


@pytest.mark.parametrize(
    "first",
    [
        Answer(404, b"<html>not here</html>"),
        Answer(404, b"404 page not found\n"),
        Answer(404, {"message": "page not found"}),
        Answer(404, {"error": "no such container"}),
        Answer(404, ["no such container"]),
        Answer(404, b""),
        Answer(410, {"message": "gone"}),
        Answer(200, b""),
        Answer(200, b"null"),
        Answer(200, description() | {"Id": "d" * 64}),
        Answer(200, b"[" * 100_000),
        Answer(204),
    ],
)
def test_what_is_not_in_the_form_of_an_engine_is_not_understood(engine: FakeEngine, first: Answer) -> None:
    engine.answers(r"GET /containers/\w+/json", first)
    assert failing(engine, "inspect").kind is ErrorKind.PROTOCOL


@pytest.mark.parametrize("text", ["c" * 12, "", "name", "../images", "c" * 63 + "/", "C" * 64])
def test_only_a_whole_id_is_asked_about(engine: FakeEngine, text: str) -> None:
    for ask in (
        lambda: engine.provider.inspect(text, within=WITHIN),
        lambda: engine.provider.stop(text, grace=1, within=WITHIN),
        lambda: engine.provider.start(text, within=WITHIN),
        lambda: engine.provider.delete(text, within=WITHIN),
        lambda: engine.provider.execute(text, TRUE, within=WITHIN),
    ):
        with pytest.raises(ProviderError) as caught:
            ask()
        assert caught.value.kind is ErrorKind.INVALID
    assert engine.requests == []


# Errors.


@every_call
@pytest.mark.parametrize(
    ("answer", "kind", "retry_after"),
    [
        (Answer(401, {"message": "no"}), ErrorKind.AUTHORISATION, None),
        (Answer(403, b"denied by a proxy"), ErrorKind.AUTHORISATION, None),
        (Answer(429, {"message": "slower"}, {"Retry-After": "17"}), ErrorKind.RATE_LIMITED, 17.0),
        (Answer(429, b"", {"Retry-After": "Thu, 01 Jan 1970 00:00:00 GMT"}), ErrorKind.RATE_LIMITED, 0.0),
        (Answer(429, b"", {"Retry-After": "soon"}), ErrorKind.RATE_LIMITED, None),
        (Answer(500, {"message": "database is locked"}), ErrorKind.SERVER, None),
        (Answer(502, b"<html>bad gateway</html>"), ErrorKind.SERVER, None),
        (Answer(503, {"message": "starting"}, {"Retry-After": "3"}), ErrorKind.SERVER, 3.0),
        (Answer(422, {"message": "nonsense"}), ErrorKind.INVALID, None),
        (Answer(400, {"message": "nonsense"}), ErrorKind.INVALID, None),
        (Answer(400, b"Client sent an HTTP request to an HTTPS server.\n"), ErrorKind.PROTOCOL, None),
        (Answer(418, {"message": "teapot"}), ErrorKind.PROTOCOL, None),
        (Answer(302, b"", {"Location": "http://localhost/elsewhere"}), ErrorKind.PROTOCOL, None),
        (Answer(raw=b"SSH-2.0-OpenSSH_9.2\r\n", then_close=True), ErrorKind.PROTOCOL, None),
        (Answer(raw=b"", then_close=True), ErrorKind.CONNECTION, None),
        (Answer(raw=b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{", then_close=True), ErrorKind.CONNECTION, None),
    ],
)
def test_a_failure_has_its_kind_and_is_not_tried_again(
    engine: FakeEngine, call: str, answer: Answer, kind: ErrorKind, retry_after: float | None
) -> None:
    engine.answers(ROUTES[call], answer)
    error = failing(engine, call)
    assert (error.kind, error.retry_after) == (kind, retry_after), error
    # Docker refuses a bad request before it allocates. Nothing else that is answered here says so.
    assert error.nothing_allocated == (call == "create" and answer.status == 400 and isinstance(answer.body, dict))
    asked = engine.asked
    assert len(asked) == len(set(asked)), asked


@pytest.mark.parametrize(
    ("call", "status", "message", "kind"),
    [
        ("create", 409, 'Conflict. The container name "/x" is already in use by container "y"', ErrorKind.NAME_TAKEN),
        ("create", 500, 'the container name "x" is already in use by 4b1f. You have to', ErrorKind.NAME_TAKEN),
        ("create", 500, "the name x is already in use by an external entity", ErrorKind.REFUSED),
        ("create", 404, "No such image: image:latest", ErrorKind.INVALID),
        ("create", 404, "page not found", ErrorKind.PROTOCOL),
        ("start", 409, "container is marked for removal and cannot be started", ErrorKind.BUSY),
        ("start", 404, f"No such container: {CONTAINER}", ErrorKind.NOT_FOUND),
        ("start", 400, 'runc create failed: exec: "x": executable file not found in $PATH', ErrorKind.INVALID),
        ("stop", 404, f"No such container: {CONTAINER}", ErrorKind.NOT_FOUND),
        ("stop", 404, "page not found", ErrorKind.PROTOCOL),
        ("delete", 409, "removal of container cccc is already in progress", ErrorKind.BUSY),
        ("delete", 409, "something else", ErrorKind.REFUSED),
        ("delete", 404, "page not found", ErrorKind.PROTOCOL),
        ("delete", 500, "could not kill: tried to, but did not receive an exit event", ErrorKind.REFUSED),
        ("execute", 409, "container cccc is not running", ErrorKind.REFUSED),
        ("execute", 500, "container state improper", ErrorKind.REFUSED),
        ("execute", 404, f"No such container: {CONTAINER}", ErrorKind.NOT_FOUND),
        # The engine's own storage has no room for another one: that is no sandbox's disk, and proves nothing.
        ("create", 500, "creating container storage: write /x: no space left on device", ErrorKind.SERVER),
        ("create", 500, "mkdir /var/lib/docker/overlay2/x: disk quota exceeded", ErrorKind.SERVER),
        ("list", 500, "no space left on device", ErrorKind.SERVER),
        ("inspect", 500, "no space left on device", ErrorKind.SERVER),
    ],
)  # fmt: skip
def test_what_an_engine_says_in_words_is_about_one_sandbox(
    engine: FakeEngine, call: str, status: int, message: str, kind: ErrorKind
) -> None:
    engine.answers(r"GET /containers/\w+/json", Answer(200, description()))
    engine.answers(ROUTES[call], Answer(status, {"message": message}))
    error = failing(engine, call)
    assert error.kind is kind, error
    assert error.nothing_allocated == (kind is ErrorKind.NAME_TAKEN or "no such image" in message.lower())


@pytest.mark.parametrize(
    "message",
    [
        # Podman's, as its service on a full disk gave them (`test_disk_full`).
        "writing runtime spec JSON for container cccc to disk: write /x/userdata/config.json: no space left on device",
        "mounting storage for container cccc: write /x/vfs-layers/.tmp-mountpoints.json1: no space left on device",
        "removing container cccc root filesystem: 1 error occurred:\n\t* write /x/layers: no space left on device\n",
        # Docker's.
        "mkdir /var/lib/docker/overlay2/cccc/merged: no space left on device",
        "failed to create task for container: failed to start shim: symlink /run/x: No space left on device: unknown",
        'failed to create shim task: OCI runtime create failed: exec: "sh": write pid: Disk quota exceeded: unknown',
        "error creating overlay mount to /x/merged: disk quota exceeded",
    ],
)
@pytest.mark.parametrize("status", [400, 409, 500])
@pytest.mark.parametrize("call", ["start", "stop", "delete", "execute"])
def test_a_full_disk_is_told_by_the_kernels_words_whatever_the_status(
    engine: FakeEngine, call: str, status: int, message: str
) -> None:
    engine.answers(r"GET /containers/\w+/json", Answer(200, description()))
    engine.answers(ROUTES[call], Answer(status, {"message": message}))
    assert failing(engine, call).kind is ErrorKind.DISK_FULL


def test_a_proxy_with_a_full_disk_says_nothing_about_a_sandbox(engine: FakeEngine) -> None:
    engine.answers(ROUTES["start"], Answer(500, b"<html>no space left on device</html>"))
    assert failing(engine, "start").kind is ErrorKind.SERVER


def test_a_creation_whose_container_finds_no_room_to_start_has_allocated_it(engine: FakeEngine) -> None:
    engine.answers(ROUTES["start"], Answer(500, {"message": "mkdir /x/merged: no space left on device"}))
    error = failing(engine, "create")
    assert (error.kind, error.nothing_allocated) == (ErrorKind.DISK_FULL, False)


def test_deleting_what_is_gone_changes_nothing(engine: FakeEngine) -> None:
    engine.answers(ROUTES["delete"], Answer(404, {"message": f"No such container: {CONTAINER}"}))
    engine.provider.delete(CONTAINER, within=WITHIN)
    assert {"force=true", "v=true"} <= set(engine.requests[-1].path.partition("?")[2].split("&"))


def test_stopping_what_is_stopped_and_starting_what_runs_change_nothing(engine: FakeEngine) -> None:
    engine.answers(ROUTES["stop"], Answer(304))
    provider = engine.provider
    provider.stop(CONTAINER, grace=0.2, within=WITHIN)
    assert engine.requests[-1].path.endswith("/stop?t=1")
    provider.start(CONTAINER, within=WITHIN)
    assert len(engine.asked) == 3


def test_a_name_that_is_taken_after_create_was_answered_is_no_such_answer(engine: FakeEngine) -> None:
    # The same text, but to the start: by then something is allocated.
    engine.answers("POST /(start|stop|kill|unpause)", Answer(500, {"message": "port is already in use by another"}))
    error = failing(engine, "create")
    assert (error.kind, error.nothing_allocated) == (ErrorKind.SERVER, False)


def test_no_engine_at_the_address_is_a_matter_of_the_connection(engine: FakeEngine) -> None:
    for base_url in (f"unix://{engine.path}x", f"unix://{engine.path.parent}", "tcp://127.0.0.1:1"):
        provider = DockerProvider(DockerEndpoint(base_url=base_url))
        for call in CALLS.values():
            with pytest.raises(ProviderError) as caught:
                call(provider, WITHIN)
            assert caught.value.kind is ErrorKind.CONNECTION
            assert not caught.value.nothing_allocated


def test_an_engine_is_asked_for_its_version_once(engine: FakeEngine) -> None:
    provider = engine.provider
    for _ in range(3):
        provider.find("name", {}, within=WITHIN)
    assert engine.asked.count("GET /_ping") == 1
    assert engine.requests[-1].path.startswith("/v1.44/")


def test_a_version_that_the_engine_has_lost_is_asked_for_again(engine: FakeEngine) -> None:
    provider = engine.provider
    provider.find("name", {}, within=WITHIN)
    engine.answers("GET /_ping", Answer(200, b"OK", {"Api-Version": "1.41"}))
    engine.answers("GET /containers/json", Answer(400, {"message": "client version 1.44 is too new"}))
    with pytest.raises(ProviderError):
        provider.find("name", {}, within=WITHIN)
    engine.answers("GET /containers/json", Answer(200, []))
    provider.find("name", {}, within=WITHIN)
    assert engine.requests[-1].path.startswith("/v1.41/")


# Identity.


def test_docker_is_recognised_by_its_own_id(engine: FakeEngine) -> None:
    assert engine.provider.identify(within=WITHIN) == "docker 11111111-2222"


@pytest.mark.parametrize("info", [{}, {"ID": ""}, {"ID": None}, {"ID": 7}, [], None])
def test_an_engine_without_an_id_is_not_understood(engine: FakeEngine, info: object) -> None:
    engine.answers("GET /info", Answer(200, info))
    assert failing(engine, "identify").kind is ErrorKind.PROTOCOL


def test_podman_is_recognised_by_place_since_its_id_is_new_each_time(engine: FakeEngine) -> None:
    engine.answers("GET /_ping", Answer(200, b"OK", {"Api-Version": "1.41", "Libpod-Api-Version": "5.4.0"}))
    engine.answers("GET /info", Answer(200, {"ID": "random", "Name": "host", "DockerRootDir": "/storage"}))
    assert engine.provider.identify(within=WITHIN) == "podman host:/storage"
    engine.answers("GET /info", Answer(200, {"ID": "random", "Name": "host", "DockerRootDir": ""}))
    assert failing(engine, "identify").kind is ErrorKind.PROTOCOL


# Listing and finding.


def test_a_filter_that_the_engine_ignores_changes_nothing(engine: FakeEngine) -> None:
    others = [entry(Id="d" * 64, Names=["/name2", "/name2/name"], Labels=None), entry(Id="f" * 64, Names=["/xname"])]
    engine.answers("GET /containers/json", Answer(200, [*others, entry()]))
    found = engine.provider.find("name", {}, within=WITHIN)
    assert found is not None
    assert found.resource_id == CONTAINER
    listing = engine.provider.list({"paperclip-env.lease": "1"}, within=WITHIN)
    assert {resource.resource_id for resource in listing.resources} == {CONTAINER, "f" * 64}
    assert listing.complete
    assert len(engine.provider.list({}, within=WITHIN).resources) == 3


# Slow servers.


@every_call
@pytest.mark.parametrize("slow_from", [0, 20, -1], ids=["status", "headers", "body"])
def test_a_trickle_holds_nobody_beyond_the_bound(engine: FakeEngine, call: str, slow_from: int) -> None:
    padded = Answer(200, b"[" + b" " * 60 + b"]")
    position = len(padded.head()) + 1 if slow_from < 0 else slow_from
    engine.answers(ROUTES[call], Answer(200, padded.body, slow_from=position))
    started = time.monotonic()
    assert failing(engine, call, within=0.6).kind is ErrorKind.TIMEOUT
    assert time.monotonic() - started < 1.5
    assert len(engine.asked) == 2  # the version, and this


@pytest.mark.parametrize("slow_from", [10, len(UPGRADED) + 3, len(UPGRADED) + 9])
def test_a_trickling_stream_holds_nobody_beyond_the_bound(engine: FakeEngine, slow_from: int) -> None:
    frame = UPGRADED + b"\x01\0\0\0\0\0\0\x40" + b"x" * 64
    engine.answers(r"POST /exec/\w+/start", Answer(raw=frame, slow_from=slow_from))
    engine.answers(r"GET /exec/\w+/json", Answer(200, {"ID": EXEC, "Running": True, "ExitCode": None}))
    started = time.monotonic()
    assert failing(engine, "execute", within=0.6).kind is ErrorKind.TIMEOUT
    assert time.monotonic() - started < 1.5


def test_a_command_that_cannot_be_killed_is_not_reported_as_killed(engine: FakeEngine) -> None:
    engine.answers(r"POST /exec/\w+/start", Answer(raw=UPGRADED, then_close=True))
    engine.answers(r"GET /exec/\w+/json", Answer(200, {"ID": EXEC, "Running": True, "ExitCode": None}))
    with pytest.raises(ProviderError) as caught:
        engine.provider.execute(CONTAINER, Command(("true",), timeout=0.1), within=0.6)
    assert caught.value.kind is ErrorKind.TIMEOUT


@every_call
@pytest.mark.parametrize("within", [0.0, -1.0])
def test_no_time_at_all_asks_nothing(engine: FakeEngine, call: str, within: float) -> None:
    assert failing(engine, call, within=within).kind is ErrorKind.TIMEOUT
    assert engine.requests == []


# The streams of a command.


@pytest.mark.parametrize("size", [1, 3, 7, 8, 9, 1000])
def test_frames_may_be_cut_anywhere(size: int) -> None:
    wire = b"\x01\0\0\0\0\0\0\x03out\x02\0\0\0\0\0\0\x03err\x01\0\0\0\0\0\0\0\x03\0\0\0\0\0\0\x01!"
    frames = Frames()
    for start in range(0, len(wire), size):
        frames.feed(wire[start : start + size])
    assert frames.whole
    assert (bytes(frames.stdout), bytes(frames.stderr)) == (b"out", b"err!")


def test_output_beyond_the_limit_is_dropped_and_said_to_be() -> None:
    frames = Frames()
    for _ in range(3):
        frames.feed(b"\x01\0\0\0" + (OUTPUT_LIMIT // 2).to_bytes(4, "big") + b"x" * (OUTPUT_LIMIT // 2))
    assert len(bytes(frames.stdout)) == OUTPUT_LIMIT
    assert (frames.stdout.truncated, frames.stderr.truncated) == (True, False)


@pytest.mark.parametrize(
    ("raw", "kind"),
    [
        (UPGRADED + b"\x01\0\0\0\0\0\0\x09hi", ErrorKind.CONNECTION),
        (UPGRADED + b"\x01\0\0", ErrorKind.CONNECTION),
        (UPGRADED + b"hello, I am no frame", ErrorKind.PROTOCOL),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", ErrorKind.PROTOCOL),
    ],
)
def test_streams_that_break_off_or_are_none_are_no_answer(engine: FakeEngine, raw: bytes, kind: ErrorKind) -> None:
    engine.answers(r"POST /exec/\w+/start", Answer(raw=raw, then_close=True))
    assert failing(engine, "execute").kind is kind


def test_output_that_arrives_with_the_headers_is_not_lost(engine: FakeEngine) -> None:
    answer = engine.provider.execute(CONTAINER, TRUE, within=WITHIN)
    assert (answer.stdout, answer.exit_code) == (b"hi", 0)


def test_an_engine_that_does_not_upgrade_is_understood_too(engine: FakeEngine) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/vnd.docker.raw-stream\r\n\r\n"
    engine.answers(r"POST /exec/\w+/start", Answer(raw=head + b"\x02\0\0\0\0\0\0\x02no", then_close=True))
    assert engine.provider.execute(CONTAINER, TRUE, within=WITHIN).stderr == b"no"


@pytest.mark.parametrize(
    "command",
    [Command(()), Command(("a\0b",)), Command(("a",), env={"": "x"}), Command(("a",), env={"A=B": "x"})],
)
def test_a_command_that_is_none_is_refused_at_once(engine: FakeEngine, command: Command) -> None:
    with pytest.raises(ProviderError) as caught:
        engine.provider.execute(CONTAINER, command, within=WITHIN)
    assert caught.value.kind is ErrorKind.INVALID


# Configuration.

TLS = {"tls_ca": "/ca.pem", "tls_cert": "/cert.pem", "tls_key": "/key.pem"}


@pytest.mark.parametrize(
    "data",
    [
        {"base_url": "unix:///run/docker.sock"},
        {"base_url": "unix:///run/podman/podman.sock", "anchor": "paperclip-env"},
        {"base_url": "tcp://127.0.0.1:2375"},
        {"base_url": "tcp://localhost:2375"},
        {"base_url": "tcp://[::1]:2375"},
        {"base_url": "tcp://engine.example:2376", **TLS},
        {"base_url": "https://10.0.0.1:2376", **TLS},
    ],
)
def test_these_endpoints_are_accepted(data: dict[str, Any]) -> None:
    validate(DockerEndpoint, data)


@pytest.mark.parametrize(
    ("data", "field"),
    [
        ({"base_url": "tcp://10.0.0.1:2375"}, "base_url"),
        ({"base_url": "tcp://engine.example:2375"}, "base_url"),
        ({"base_url": "https://127.0.0.1:2376"}, "base_url"),
        ({"base_url": "tcp://127.0.0.1"}, "base_url"),
        ({"base_url": "tcp://127.0.0.1:99999"}, "base_url"),
        ({"base_url": "http://127.0.0.1:2375"}, "base_url"),
        ({"base_url": "ssh://root@host"}, "base_url"),
        ({"base_url": "tcp://user:pw@127.0.0.1:2375"}, "base_url"),
        ({"base_url": "tcp://127.0.0.1:2375/path"}, "base_url"),
        ({"base_url": "unix://run/docker.sock"}, "base_url"),
        ({"base_url": "unix:///" + "x" * 107}, "base_url"),
        ({"base_url": "unix:///run/docker.sock", **TLS}, "base_url"),
        ({"base_url": "https://10.0.0.1:2376", **TLS, "tls_key": None}, "base_url"),
        ({"base_url": "https://10.0.0.1:2376", **TLS, "tls_ca": "relative.pem"}, "tls_ca"),
        ({"base_url": "unix:///run/docker.sock", "anchor": "a b"}, "anchor"),
        ({"base_url": ""}, "base_url"),
    ],
)
def test_these_endpoints_are_refused_by_the_name_of_a_field(data: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        validate(DockerEndpoint, data)
    assert field in caught.value.errors


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"image": ""}, "image"),
        ({"image": "-x"}, "image"),
        ({"command": []}, "command"),
        ({"command": "sleep"}, "command"),
        ({"env": {"A B": "x"}}, "env"),
        ({"memory_mb": 1}, "memory_mb"),
        ({"memory_mb": "64"}, "memory_mb"),
        ({"cpus": 0}, "cpus"),
        ({"network": "host"}, "network"),
        ({"network": "container:abc"}, "network"),
        ({"privileged": True}, "privileged"),
    ],
)
def test_these_configurations_are_refused_by_the_name_of_the_field(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        validate(DockerConfig, {"image": "image", **change})
    assert set(caught.value.errors) == {field}
