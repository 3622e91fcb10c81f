"""The bound on a call's total time, where the providers' own tests do not reach it."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import pytest
import requests

from providers.deadline import BoundedAdapter, Deadline, tls_context


def session(within: float) -> tuple[requests.Session, Deadline]:
    deadline = Deadline(within)
    client = requests.Session()
    client.trust_env = False
    for scheme in ("http://", "https://"):
        client.mount(scheme, BoundedAdapter(deadline, context=tls_context()))
    return client, deadline


def test_a_resolver_that_never_answers_holds_nobody_beyond_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()

    def stuck(*args: Any, **kwargs: Any) -> list[Any]:
        released.wait(30)
        raise socket.gaierror("too late")

    monkeypatch.setattr(socket, "getaddrinfo", stuck)
    client, deadline = session(0.3)
    started = time.monotonic()
    with client, pytest.raises(requests.ConnectTimeout):
        client.get("http://slow.example:80/")
    assert deadline.passed
    assert time.monotonic() - started < 1
    released.set()


def test_addresses_that_swallow_packets_share_one_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    # A listener whose backlog is full does not answer the next connection.
    with socket.socket() as full, socket.socket() as first, socket.socket() as second:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for waiting in (first, second):
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        address = (socket.AF_INET, socket.SOCK_STREAM, 6, "", full.getsockname())
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [address] * 5)
        client, deadline = session(0.4)
        started = time.monotonic()
        with client, pytest.raises(requests.ConnectionError):
            client.get("http://many.example:80/")
        assert deadline.passed
        assert time.monotonic() - started < 1


def test_a_request_that_nobody_reads_holds_nobody_beyond_the_bound() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client, deadline = session(0.4)
        started = time.monotonic()
        with client, pytest.raises(requests.RequestException):
            client.post(f"http://127.0.0.1:{server.getsockname()[1]}/", data=b"x" * (32 << 20))
        assert deadline.passed
        assert time.monotonic() - started < 1.5


def test_a_refused_connection_is_known_at_once() -> None:
    client, deadline = session(30)
    with client, pytest.raises(requests.ConnectionError):
        client.get("http://127.0.0.1:1/")
    assert not deadline.passed


def test_a_pause_ends_with_the_deadline() -> None:
    deadline = Deadline(0.05)
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        deadline.pause(10)
    assert time.monotonic() - started < 1
    with pytest.raises(TimeoutError):
        deadline.left()
