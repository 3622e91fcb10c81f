"""A TCP relay between a program and its server, which a test can cut, hang, or make swallow notifications."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from types import TracebackType
from typing import Self


class Relay:
    """Listens on a port of its own and passes everything on to `target`."""

    def __init__(self, target: tuple[str, int], *, swallows_notifications: bool = False) -> None:
        self._target = target
        self._swallows = swallows_notifications
        self._open = threading.Event()
        self._open.set()
        self._links: list[socket.socket] = []
        self._listener: socket.socket | None = None
        self.port = 0
        self._listen()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _at: TracebackType | None
    ) -> None:
        self.cut()

    def cut(self) -> None:
        """Break every connection and refuse new ones."""
        if self._listener is not None:
            # Closing alone does not end an accept() in another thread.
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
        for link in self._links:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
            link.close()
        self._links.clear()
        self._open.set()

    def hang(self) -> None:
        """Keep every connection, take new ones, and pass nothing on."""
        self._open.clear()

    def mend(self) -> None:
        """Pass on again, on the same port."""
        if self._listener is None:
            self._listen()
        self._open.set()

    def _listen(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port), reuse_port=True)
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
                server = socket.create_connection(self._target)
            except OSError:
                return
            self._links += [client, server]
            back = self._pass_messages if self._swallows else self._pass
            threading.Thread(target=self._pass, args=(client, server), daemon=True).start()
            threading.Thread(target=back, args=(server, client), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self._open.wait()
                sink.sendall(data)
        self._end(sink)

    def _pass_messages(self, server: socket.socket, client: socket.socket) -> None:
        """Pass a PostgreSQL server's messages on, without its notifications: as a pooling proxy does."""
        with contextlib.suppress(OSError), server.makefile("rb") as messages:
            while kind := messages.read(1):
                head = messages.read(4)
                body = messages.read(struct.unpack("!I", head)[0] - 4)
                if kind != b"A":
                    client.sendall(kind + head + body)
        self._end(client)

    @staticmethod
    def _end(sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)
