"""The streams of a command over a socket whose other end does what an engine may do."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import requests

from providers.deadline import BoundedSocket
from providers.docker.streams import Streams

HI = b"\x01\0\0\0\0\0\0\x02hi"


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, BoundedSocket]]:
    engine, ours = socket.socketpair()
    client = BoundedSocket(ours.family, ours.type, fileno=ours.detach())
    yield engine, client
    engine.close()
    client.close()


def streams_over(client: BoundedSocket, stdin: bytes) -> Streams:
    reader = client.makefile("rb")
    answer: Any = SimpleNamespace(status_code=101, headers={}, raw=SimpleNamespace(_fp=SimpleNamespace(fp=reader)))
    return Streams(cast(requests.Response, answer), stdin)


def soon() -> float:
    return time.monotonic() + 5


def test_what_a_command_wrote_is_read_though_its_engine_never_read_all_that_was_sent(
    ends: tuple[socket.socket, BoundedSocket],
) -> None:
    """A command that ends without reading its input: the engine closes over what it has not read, which is a reset."""
    engine, client = ends
    streams = streams_over(client, b"x" * 50_000)
    assert not streams.exchange(time.monotonic())
    assert len(engine.recv(100)) == 100
    engine.sendall(HI)
    engine.close()
    assert streams.exchange(soon())
    assert bytes(streams.frames.stdout) == b"hi"


def test_a_frame_that_such_a_reset_cut_in_two_is_no_answer(ends: tuple[socket.socket, BoundedSocket]) -> None:
    engine, client = ends
    streams = streams_over(client, b"x" * 50_000)
    streams.exchange(time.monotonic())
    engine.recv(100)
    engine.sendall(HI[:-1])
    engine.close()
    with pytest.raises(ConnectionError):
        streams.exchange(soon())


def test_a_reset_of_who_sent_nothing_is_a_broken_connection(ends: tuple[socket.socket, BoundedSocket]) -> None:
    engine, client = ends
    streams = streams_over(client, b"")
    client.send(b"what the engine never reads")
    engine.close()
    with pytest.raises(ConnectionResetError):
        streams.exchange(soon())
