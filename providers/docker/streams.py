"""The streams of a command, over the connection that the engine turned into them.

The engine sends stdout and stderr in frames over one connection, and takes stdin on the same one. Both directions are
served in turn by one thread without blocking, so neither a command that reads nothing nor one that writes without end
can hold its caller, and a TLS connection is never used from two threads.
"""

from __future__ import annotations

import math
import select
import ssl
import time
from contextlib import suppress
from typing import Any

import requests

from providers.contract import OUTPUT_LIMIT, ErrorKind, ProviderError
from providers.deadline import BoundedSocket, BoundedTLSSocket

_CHUNK = 1 << 16
_HEADER = 8
_STDERR, _COMPLAINT = 2, 3  # the latter is the engine's own, about the command
_WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Kept:
    """The first `OUTPUT_LIMIT` bytes of a stream."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self.truncated = False

    def add(self, data: bytes | memoryview) -> None:
        room = OUTPUT_LIMIT - len(self._bytes)
        self._bytes += data[:room]
        self.truncated = self.truncated or len(data) > room

    def __bytes__(self) -> bytes:
        return bytes(self._bytes)


class Frames:
    """Takes the engine's frames apart: one byte that names the stream, three of nothing, four of length, the data."""

    def __init__(self) -> None:
        self.stdout, self.stderr = Kept(), Kept()
        self._header = bytearray()
        self._stream = self.stdout
        self._left = 0

    @property
    def whole(self) -> bool:
        """True between two frames: where the connection may end."""
        return not self._left and not self._header

    def feed(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            if self._left:
                self._stream.add(rest[: self._left])
                taken = min(self._left, len(rest))
                self._left -= taken
                rest = rest[taken:]
                continue
            taken = _HEADER - len(self._header)
            self._header += rest[:taken]
            rest = rest[taken:]
            if len(self._header) == _HEADER:
                self._open()

    def _open(self) -> None:
        number, padding = self._header[0], bytes(self._header[1:4])
        if number > _COMPLAINT or padding != b"\0\0\0":
            raise ProviderError(ErrorKind.PROTOCOL, "not understood: the streams of a command")
        self._stream = self.stderr if number in {_STDERR, _COMPLAINT} else self.stdout
        self._left = int.from_bytes(self._header[4:], "big")
        self._header.clear()


class Streams:
    """The streams of one started command. Close it with its response."""

    def __init__(self, response: requests.Response, stdin: bytes) -> None:
        # The SDK takes the same way to the socket, but loses what the reader has already fetched beyond the headers.
        answer: Any = response.raw._fp  # noqa: SLF001
        reader = answer.fp
        if response.status_code not in {101, 200} or reader is None or response.headers.get("Transfer-Encoding"):
            raise ProviderError(ErrorKind.PROTOCOL, "not understood: a command's streams are not handed over")
        self._socket: BoundedSocket | BoundedTLSSocket = reader.raw._sock  # noqa: SLF001
        self._socket.deadline = None
        self._socket.setblocking(False)
        self.frames = Frames()
        self._unsent = memoryview(stdin)
        self._spoke = bool(stdin)
        self._was_reset = False
        with suppress(*_WOULD_BLOCK):
            self.frames.feed(reader.peek())

    def exchange(self, until: float) -> bool:
        """Pass data in both directions. Returns True when the engine ended the streams, False at `until` (monotonic).

        Raises `OSError` when the connection breaks.
        """
        poll = select.poll()
        while True:
            self._send()
            received = self._receive()
            if received == b"":
                if not self.frames.whole:
                    raise ConnectionError("the streams of a command broke off")
                return True
            left = until - time.monotonic()
            if left <= 0:
                return False
            if received is None:
                poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._unsent else 0))
                poll.poll(math.ceil(left * 1000))

    def _receive(self) -> bytes | None:
        try:
            data = self._socket.recv(_CHUNK)
        except _WOULD_BLOCK:
            return None
        except OSError as error:
            if self._was_reset:
                return b""
            if not (self._spoke and isinstance(error, ConnectionResetError)):
                raise
            # The engine closed before it had read all that we said, sent though it was. What is lost is what we said,
            # not what it said: that is still to be read, where the connection holds it.
            self._unsent, self._was_reset = memoryview(b""), True
            return self._receive()
        self.frames.feed(data)
        return data

    def _send(self) -> None:
        if not self._unsent:
            return
        try:
            sent = self._socket.send(self._unsent[:_CHUNK])
        except _WOULD_BLOCK:
            return
        except (BrokenPipeError, ConnectionResetError):
            # The command ended without reading all of it. What it wrote is still to be read.
            self._unsent = memoryview(b"")
            return
        self._unsent = self._unsent[sent:]
