"""Connections that are kept alive between calls: what they save, and what they must never do."""

from __future__ import annotations

import gc
import os
import shutil
import socket
import threading
import time
import types
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from email.message import Message
from pathlib import Path
from typing import Any

import pytest

from providers import sessions as module
from providers.contract import Command, ErrorKind, Gone, Running
from providers.daytona import DaytonaProvider
from providers.daytona.connection import api
from providers.daytona.rehearsal import Fault, Kind, Rehearsal, rehearsing
from providers.daytona.schemas import DaytonaConfig, DaytonaEndpoint
from providers.failures import Call
from providers.sessions import sessions
from tests.authority import OPENSSL, Authority
from tests.providers.rehearsed import KEY, refused
from tests.relay import Relay

WITHIN = 20.0
ABSENT = "00000000-0000-4000-8000-000000000000"
needs_certificates = pytest.mark.skipif(OPENSSL is None, reason="no openssl to make certificates with")


@pytest.fixture(autouse=True)
def _no_sessions_of_others() -> Iterator[None]:
    sessions.forget()
    yield
    sessions.forget()


@pytest.fixture
def server() -> Iterator[Rehearsal]:
    with rehearsing(transition=0.0) as server:
        server.world.add_key(KEY)
        yield server


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "ours")


def adapter(server: Rehearsal, key: str = KEY, **endpoint: Any) -> DaytonaProvider:
    """Return a new instance of the adapter, as each attempt has one."""
    return DaytonaProvider(DaytonaEndpoint(url=server.url, **endpoint), key)


over_both = pytest.mark.parametrize("scheme", ["http", pytest.param("https", marks=needs_certificates)])


def speaking(server: Rehearsal, scheme: str, request: pytest.FixtureRequest) -> dict[str, Any]:
    """Let a server speak this scheme, and return what its endpoint needs for it."""
    if scheme == "http":
        return {}
    authority: Authority = request.getfixturevalue("authority")
    server.speak_tls(authority.serving())
    return {"tls_ca": str(authority.certificate)}


def look(daytona: DaytonaProvider, *, within: float = WITHIN) -> object:
    return daytona.inspect(ABSENT, within=within)


def create(daytona: DaytonaProvider, name: str = "box") -> str:
    return daytona.create(name, {}, DaytonaConfig(), within=WITHIN).resource.resource_id


# What is shared.


def test_calls_of_one_account_share_a_connection_whoever_makes_them(server: Rehearsal) -> None:
    for _ in range(3):
        assert isinstance(look(adapter(server)), Gone)
    assert len(server.asked) == 6
    assert server.connections == 1


def test_a_teardown_opens_one_connection(server: Rehearsal) -> None:
    sandbox = create(adapter(server))
    before = server.connections
    daytona = adapter(server)
    daytona.identify(within=WITHIN)
    daytona.inspect(sandbox, within=WITHIN)
    daytona.stop(sandbox, grace=1, within=WITHIN)
    daytona.inspect(sandbox, within=WITHIN)
    daytona.delete(sandbox, within=WITHIN)
    assert server.connections - before == 1


def test_threads_never_share_a_connection_and_none_waits_for_another(
    server: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All calls are in flight at the same time, many times the idle connections; each is answered with its own."""
    many, rounds = 2 * module.MOST_IDLE, 3
    daytona = adapter(server)
    ids = [create(daytona, f"box-{number}") for number in range(8)]
    together = threading.Barrier(many)
    answer = server.answer

    def answer_all_at_once(*asked: Any) -> Any:
        together.wait(60)
        return answer(*asked)

    monkeypatch.setattr(server, "answer", answer_all_at_once)

    def work(number: int) -> list[str]:
        # The adapter itself refuses a description of another sandbox.
        seen = [daytona.inspect(ids[(number + turn) % 8], within=120) for turn in range(rounds)]
        return [one.resource.resource_id for one in seen if isinstance(one, Running)]

    with ThreadPoolExecutor(many) as pool:
        for number, seen in enumerate(pool.map(work, range(many))):
            assert seen == [ids[(number + turn) % 8] for turn in range(rounds)]
    assert len(sessions.idle) <= module.MOST_IDLE
    assert len(sessions._sessions) == 1


# What opens its own.


def test_a_create_never_travels_over_a_connection_that_was_used(server: Rehearsal) -> None:
    daytona = adapter(server)
    look(daytona)
    sandbox = create(daytona)
    assert server.connections == 2
    daytona.inspect(sandbox, within=WITHIN)
    assert server.connections == 2


def test_no_request_of_a_call_that_reuses_nothing_has_another_ones_connection(server: Rehearsal) -> None:
    with conversation(server, Call.CREATE) as asking:
        for _ in range(3):
            asking.ask("GET", "/sandbox")
    assert server.connections == 3


def test_a_command_never_travels_over_a_connection_of_an_earlier_call(server: Rehearsal) -> None:
    daytona = adapter(server)
    sandbox = create(daytona)
    before = server.connections
    daytona.execute(sandbox, Command(("true",), timeout=5), within=WITHIN)
    assert server.connections > before


def test_whoever_attests_the_account_is_asked_anew_and_no_older_connection_is_used_then(server: Rehearsal) -> None:
    with Relay(("127.0.0.1", server._server.server_address[1])) as relay, rehearsing(transition=0.0) as successor:
        successor.world.add_key(KEY, "11111111-0000-4000-8000-000000000000")
        endpoint = DaytonaEndpoint(url=f"http://127.0.0.1:{relay.port}{server.prefix}")
        before = DaytonaProvider(endpoint, KEY)
        account = before.identify(within=WITHIN)
        sandbox = create(before)
        # The address leads to another one now, while connections to the former are open.
        relay._target = ("127.0.0.1", successor._server.server_address[1])
        assert len(sessions.idle) == 2
        after = DaytonaProvider(endpoint, KEY)
        assert after.identify(within=WITHIN) != account
        asked = len(server.asked)
        assert isinstance(after.inspect(sandbox, within=WITHIN), Gone)
        assert len(server.asked) == asked


def test_another_account_behind_the_same_key_is_noticed_over_a_kept_connection(server: Rehearsal) -> None:
    daytona = adapter(server)
    account = daytona.identify(within=WITHIN)
    look(daytona)
    server.world.add_key(KEY, "11111111-0000-4000-8000-000000000000")
    assert daytona.identify(within=WITHIN) != account


# What is not used again.


def test_a_connection_that_the_server_closed_is_not_used_again(server: Rehearsal) -> None:
    daytona = adapter(server)
    look(daytona)
    server.hang_up()
    assert isinstance(look(daytona), Gone)
    assert server.connections == 2


@pytest.mark.parametrize("limit", ["IDLE_SECONDS", "AGE_SECONDS"])
def test_a_connection_that_was_idle_for_long_or_is_old_is_not_used_again(
    server: Rehearsal, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    daytona = adapter(server)
    look(daytona)
    monkeypatch.setattr(module, limit, 0.0)
    look(daytona)
    assert server.connections == 2
    assert len(sessions.idle) == 1  # the first one was closed


@pytest.mark.parametrize(("told", "connections"), [("timeout=1", 2), ("max=5, Timeout = 60", 1), ("nonsense", 1)])
def test_a_connection_is_not_used_for_longer_than_its_server_says(
    server: Rehearsal, told: str, connections: int
) -> None:
    server.will(Fault("list", Kind.ANSWER, status=200, headers={"Keep-Alive": told}))
    for _ in range(2):
        with conversation(server, Call.LIST) as asking:
            asking.ask("GET", "/sandbox")
    assert server.connections == connections


def test_a_server_that_speaks_unasked_is_not_listened_to() -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
    accepted = []

    def serve(listener: socket.socket) -> None:
        for extra in (answer, b""):
            client, _ = listener.accept()
            accepted.append(client)
            client.recv(65536)
            client.sendall(answer)
            if extra:
                spoken.wait(10)
                client.sendall(extra)
                said.set()

    spoken, said = threading.Event(), threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        http = api(DaytonaEndpoint(url=f"http://127.0.0.1:{listener.getsockname()[1]}"), KEY)
        with http.conversation(Call.INSPECT, WITHIN) as asking:
            asking.ask("GET", "/")
        spoken.set()
        assert said.wait(10)
        with http.conversation(Call.INSPECT, WITHIN) as asking:
            asking.ask("GET", "/")
        thread.join(10)
    assert len(accepted) == 2
    for client in accepted:
        client.close()


@pytest.mark.parametrize("kind", [Kind.RESET, Kind.LOST])
def test_a_reused_connection_that_breaks_is_a_connection_error_and_nothing_is_retried(
    server: Rehearsal, kind: Kind
) -> None:
    daytona = adapter(server)
    look(daytona)
    asked = len(server.asked)
    server.will(Fault("get", kind))
    assert refused(lambda: look(daytona)).kind is ErrorKind.CONNECTION
    assert server.asked[asked:] == [("get", ABSENT)]
    assert (server.connections, len(sessions.idle)) == (1, 0)


def test_a_call_that_failed_leaves_no_connection(server: Rehearsal) -> None:
    server.will(Fault("get", Kind.ANSWER, status=503))
    assert refused(lambda: look(adapter(server))).kind is ErrorKind.SERVER
    assert len(sessions.idle) == 0


# Bounds.


def conversation(server: Rehearsal, call: Call, within: float = WITHIN) -> Any:
    return api(DaytonaEndpoint(url=server.url), KEY).conversation(call, within)


@over_both
def test_a_kept_connection_is_under_the_bound_of_the_call_that_uses_it(
    server: Rehearsal, scheme: str, request: pytest.FixtureRequest
) -> None:
    daytona = adapter(server, **speaking(server, scheme, request))
    look(daytona)
    server.will(Fault("get", Kind.TRICKLE))
    started = time.monotonic()
    # More than a byte takes: a bound on each wait alone would never pass.
    assert refused(lambda: look(daytona, within=1.6)).kind is ErrorKind.TIMEOUT
    assert time.monotonic() - started < 3
    assert (server.connections, len(sessions.idle)) == (1, 0)
    look(daytona)
    assert server.connections == 2


def test_a_kept_connection_is_not_under_the_bound_of_an_earlier_call(server: Rehearsal) -> None:
    daytona = adapter(server)
    look(daytona, within=3)
    server.will(Fault("get", Kind.DELAY, seconds=3.2))
    look(daytona)
    assert server.connections == 1


def test_a_call_whose_bound_passed_leaves_no_connection_though_it_was_answered(server: Rehearsal) -> None:
    with conversation(server, Call.INSPECT, 1.0) as asking:
        asking.ask("GET", "/sandbox")
        asking.deadline.end = time.monotonic()
    assert len(sessions.idle) == 0


def _stuck_resolver(monkeypatch: pytest.MonkeyPatch, released: threading.Event) -> str:
    def stuck(*_: Any, **__: Any) -> list[Any]:
        released.wait(30)
        raise socket.gaierror("too late")

    monkeypatch.setattr(socket, "getaddrinfo", stuck)
    return "https://slow.example"


@pytest.mark.parametrize("where", ["resolving", "shaking hands"])
def test_opening_a_connection_that_is_to_be_kept_is_bounded(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    released = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"https://127.0.0.1:{silent.getsockname()[1]}"
        if where == "resolving":
            url = _stuck_resolver(monkeypatch, released)
        daytona = DaytonaProvider(DaytonaEndpoint(url=url), KEY)
        started = time.monotonic()
        error = refused(lambda: look(daytona, within=1.0))
        released.set()
    assert error.kind is ErrorKind.TIMEOUT
    assert time.monotonic() - started < 2.5
    assert len(sessions.idle) == 0


# Secrets.


def _texts_below(start: object) -> Iterator[str | bytes]:
    """Yield every text that can be reached from an object, as far as objects hold on to one another."""
    seen: set[int] = set()
    waiting = [start]
    passed_over = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.FrameType)
    while waiting:
        current = waiting.pop()
        if id(current) in seen or isinstance(current, passed_over):
            continue
        seen.add(id(current))
        if isinstance(current, str | bytes):
            yield current
        waiting += gc.get_referents(current)


def test_no_session_and_no_idle_connection_holds_a_secret(server: Rehearsal) -> None:
    secret = "a-secret-that-is-like-no-other"
    server.world.add_key(secret)
    look(adapter(server, secret))
    assert len(sessions.idle) == 1
    texts = list(_texts_below(sessions))
    assert server.url in texts
    assert not [text for text in texts if (secret in text if isinstance(text, str) else secret.encode() in text)]


def test_a_rotated_key_has_another_session(server: Rehearsal) -> None:
    server.world.add_key("rotated", server.world.add_key("former"))
    look(adapter(server, "former"))
    look(adapter(server, "rotated"))
    assert server.connections == 2
    assert len(sessions._sessions) == 2


def test_the_session_that_nobody_asked_for_the_longest_makes_room(
    server: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_ACCOUNTS", 2)
    for key in ("first", "second", "first", "third"):
        server.world.add_key(key)
        look(adapter(server, key))
    assert len(sessions._sessions) == len(sessions.idle) == 2
    assert server.connections == 3
    look(adapter(server, "first"))
    assert server.connections == 3
    look(adapter(server, "second"))
    assert server.connections == 4


def test_a_call_that_outlives_its_session_leaves_no_connection(server: Rehearsal) -> None:
    with conversation(server, Call.INSPECT) as asking:
        asking.ask("GET", "/sandbox")
        sessions.forget()
        asking.ask("GET", "/sandbox")
    assert (server.connections, len(sessions.idle)) == (1, 0)


def test_no_cookie_is_stored_and_no_redirect_followed(server: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Message] = []
    answer = server.answer

    def recording(method: str, target: str, headers: Message, body: bytes) -> Any:
        sent.append(headers)
        return answer(method, target, headers, body)

    monkeypatch.setattr(server, "answer", recording)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    away = {"Set-Cookie": "session=1; Path=/", "Location": f"{server.url}/elsewhere"}
    server.will(Fault("get", Kind.ANSWER, status=302, headers=away))
    assert refused(lambda: look(adapter(server))).kind is ErrorKind.PROTOCOL
    look(adapter(server))
    assert len(sent) == 3
    assert all(headers["Cookie"] is None for headers in sent)


@needs_certificates
def test_an_authoritys_file_that_changed_makes_another_session(
    server: Rehearsal, authority: Authority, tmp_path: Path
) -> None:
    server.speak_tls(authority.serving())
    other = Authority(tmp_path / "other")
    file = tmp_path / "ca.pem"
    shutil.copy(other.certificate, file)
    daytona = adapter(server, tls_ca=str(file))
    assert refused(lambda: look(daytona)).kind is ErrorKind.CONNECTION
    shutil.copy(authority.certificate, file)
    assert isinstance(look(daytona), Gone)
    assert isinstance(look(daytona), Gone)
    assert server.connections == 2
    # Also the other way round: whom it no longer trusts, it speaks to no more.
    shutil.copy(other.certificate, file)
    assert refused(lambda: look(daytona)).kind is ErrorKind.CONNECTION
    file.unlink()
    assert refused(lambda: look(daytona)).kind is ErrorKind.NOT_READY


# Processes and threads.


@over_both
def test_a_child_process_never_uses_a_connection_of_its_parent(
    server: Rehearsal, scheme: str, request: pytest.FixtureRequest
) -> None:
    endpoint = speaking(server, scheme, request)
    daytona = adapter(server, **endpoint)
    look(daytona)
    assert len(sessions.idle) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # this process has threads
        child = os.fork()
    if child == 0:  # pragma: no cover - in another process
        status = 1
        try:
            had_none = len(sessions.idle) == 0 and not sessions._sessions
            status = 0 if had_none and isinstance(look(daytona), Gone) else 1
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert server.connections == 2
    look(daytona)
    assert server.connections == 2  # and what the child closed is open here


def test_a_call_that_finds_itself_in_a_child_process_has_no_connection(
    server: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    with conversation(server, Call.INSPECT) as asking:
        asking.ask("GET", "/sandbox")
        pid = os.getpid()
        monkeypatch.setattr(os, "getpid", lambda: pid + 1)
        asking.ask("GET", "/sandbox")
    assert server.connections == 2


def test_a_request_outside_a_call_is_a_mistake(server: Rehearsal) -> None:
    session = sessions.of(server.url, KEY, None, lambda: None)
    with pytest.raises(RuntimeError, match="no call"):
        session._session.get(server.url)


def test_calls_within_calls_keep_to_their_own_bounds(server: Rehearsal) -> None:
    with conversation(server, Call.INSPECT) as outer, conversation(server, Call.INSPECT) as inner:
        outer.ask("GET", "/sandbox")
        inner.ask("GET", "/sandbox")
        inner.deadline.end = time.monotonic()
        assert refused(lambda: inner.ask("GET", "/sandbox")).kind is ErrorKind.TIMEOUT
        outer.ask("GET", "/sandbox")
    assert server.connections == 2
    assert len(sessions.idle) == 1
