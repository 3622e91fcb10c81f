"""A bound on the total time of an HTTP call, for every adapter that speaks through `requests`.

The timeouts of `requests` bound each wait for the next bytes, so a server that sends one byte a second holds a caller
for ever. Here the bound sits in the socket: before each operation it is given what is left of the call, and nothing
more. This covers resolving, connecting, the TLS handshake, headers and bodies, over any number of requests, and needs
no second thread to watch.

The bound is that of the call which uses the socket at the moment. A `requests` session made for one call has its
deadline; one that is shared by many asks whose call it is (`providers.sessions`). Nothing is retried.
"""

from __future__ import annotations

import math
import socket
import ssl
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, cast

from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.exceptions import ConnectTimeoutError, NewConnectionError
from urllib3.poolmanager import PoolManager
from urllib3.util.retry import Retry

if TYPE_CHECKING:
    _Socket = socket.socket
else:
    _Socket = object


class Deadline:
    """The moment at which a call ends, `within` seconds from now, on this process's monotonic clock."""

    def __init__(self, within: float) -> None:
        self.end = time.monotonic() + within

    @property
    def passed(self) -> bool:
        return time.monotonic() >= self.end

    def left(self) -> float:
        """Return the seconds left, more than zero. Raises `TimeoutError` when there are none."""
        left = self.end - time.monotonic()
        if left <= 0:
            raise TimeoutError("the bound on the call's total time passed")
        return left

    def pause(self, seconds: float) -> None:
        """Wait, but never past the end. Raises `TimeoutError` when the end is reached."""
        time.sleep(min(seconds, self.left()))
        self.left()


class _Bounded(_Socket):
    """Mixed into a socket class: each operation may take what is left of the call, and not one second each.

    `deadline` is None during the TLS handshake (which OpenSSL bounds as a whole by the socket's timeout), while the
    socket waits for its next call, and once it was taken over by somebody who bounds it otherwise.
    """

    deadline: Deadline | None = None

    def _allot(self) -> None:
        if self.deadline is not None:
            self.settimeout(self.deadline.left())

    def recv(self, *args: Any, **kwargs: Any) -> bytes:
        self._allot()
        return super().recv(*args, **kwargs)

    def recv_into(self, *args: Any, **kwargs: Any) -> int:
        self._allot()
        return super().recv_into(*args, **kwargs)

    def send(self, *args: Any, **kwargs: Any) -> int:
        self._allot()
        return super().send(*args, **kwargs)

    def sendall(self, *args: Any, **kwargs: Any) -> None:
        self._allot()
        super().sendall(*args, **kwargs)


class BoundedSocket(_Bounded, socket.socket):
    """A plain socket under a deadline."""


class BoundedTLSSocket(_Bounded, ssl.SSLSocket):
    """A TLS socket under a deadline."""


def tls_context(ca: str | None = None, certificate: tuple[str, str] | None = None) -> ssl.SSLContext:
    """Return a context that verifies servers against the file `ca`, or else against the system's authorities.

    With `certificate` (its file and its key's file) it shows that one to them. A context may serve any number of
    sessions and threads. Raises `OSError` (of which `ssl.SSLError` is one) when a file is not what it should be.
    """
    context = ssl.create_default_context(cafile=ca)
    if certificate is not None:
        context.load_cert_chain(*certificate)
    context.sslsocket_class = BoundedTLSSocket
    return context


class BoundedAdapter(HTTPAdapter):
    """Transport for a `requests` session, each of whose calls ends with its deadline, whatever the server does.

    `deadline` is that of the only call, or tells that of the call which this thread is in.

    With `unix_socket`, every request goes to that socket, whatever its URL says. HTTPS needs a `context` made by
    `tls_context`, which alone decides whom to trust: the session's `verify` and `cert` are ignored.
    """

    pool_classes: ClassVar[tuple[type[HTTPConnectionPool], type[HTTPSConnectionPool]]] = (
        HTTPConnectionPool,
        HTTPSConnectionPool,
    )

    def __init__(
        self,
        deadline: Deadline | Callable[[], Deadline],
        *,
        unix_socket: str | None = None,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self._deadline = (lambda: deadline) if isinstance(deadline, Deadline) else deadline
        self._unix_socket = unix_socket
        self._context = context
        self._pools: list[HTTPConnectionPool] = []
        super().__init__(max_retries=Retry(0, read=False, redirect=False))

    # The next three override what `requests` calls; their signatures are not ours to choose.

    def init_poolmanager(self, connections: int, maxsize: int, block: Any = False, **kwargs: Any) -> None:  # noqa: FBT002
        manager = PoolManager(num_pools=connections, maxsize=maxsize, block=block, **kwargs)
        bounds: dict[str, Any] = {"deadline": self._deadline, "unix_socket": self._unix_socket}
        plain, tls = self.pool_classes
        manager.pool_classes_by_scheme = {
            "http": cast(Any, partial(self._pool, plain, partial(BoundedConnection, **bounds))),
            "https": cast(Any, partial(self._pool, tls, partial(_TLSConnection, **bounds))),
        }
        self.poolmanager = manager

    def build_connection_pool_key_attributes(self, request: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:  # noqa: ARG002
        host, _ = super().build_connection_pool_key_attributes(request, verify=False)
        return host, {"ssl_context": self._context} if host["scheme"] == "https" else {}

    def cert_verify(self, conn: Any, url: Any, *args: Any) -> None:  # noqa: ARG002
        # The original would add the public authorities to those that the context trusts.
        if self._context is None and str(url).lower().startswith("https"):
            raise ssl.SSLError("HTTPS needs a TLS context")

    def close(self) -> None:
        """Close all connections now. The original leaves that to the garbage collector, which errors hold back."""
        super().close()
        for pool in self._pools:
            pool.close()

    def _pool(
        self, pool_class: type[HTTPConnectionPool], connection: object, host: str, port: int, **options: Any
    ) -> HTTPConnectionPool:
        pool = pool_class(host, port, **options)
        pool.ConnectionCls = cast(Any, connection)
        self._made(pool)
        return pool

    def _made(self, pool: HTTPConnectionPool) -> None:
        """Remember a pool, to close its connections."""
        self._pools.append(pool)


class BoundedConnection(HTTPConnection):
    """A connection that is opened within the deadline of whoever opens it. `opened` is when, by the monotonic clock.

    `idle_seconds` is for how long its server says that it may be idle.
    """

    def __init__(self, *args: Any, deadline: Callable[[], Deadline], unix_socket: str | None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.opened = time.monotonic()
        self.idle_seconds = math.inf
        self._deadline = deadline
        self._unix_socket = unix_socket

    def _new_conn(self) -> socket.socket:
        deadline = self._deadline()
        try:
            sock = _connect(deadline, self._unix_socket, self.host, self.port)
        except TimeoutError as error:
            raise ConnectTimeoutError(self, "connecting took too long") from error
        except OSError as error:
            raise NewConnectionError(self, f"cannot connect: {error}") from error
        sock.settimeout(deadline.left())
        return sock

    def connect(self) -> None:
        self.opened = time.monotonic()
        super().connect()
        self.bind(self._deadline())

    def bind(self, deadline: Deadline | None) -> None:
        """Put the open socket under the deadline of the call that uses it from now on, or of none while it waits."""
        cast(_Bounded, self.sock).deadline = deadline


class _TLSConnection(BoundedConnection, HTTPSConnection):
    """Resolves to our `_new_conn` and `connect`, around the TLS handshake of urllib3."""


def _connect(deadline: Deadline, unix_socket: str | None, host: str, port: int) -> BoundedSocket:
    """Connect within what is left, over all the addresses of the host together."""
    targets: list[tuple[int, Any]]
    targets = [(socket.AF_UNIX, unix_socket)] if unix_socket else _resolve(deadline, host, port)
    failure: OSError = OSError(f"{host} has no address")
    for family, address in targets:
        sock = BoundedSocket(family, socket.SOCK_STREAM)
        try:
            sock.settimeout(deadline.left())
            sock.connect(address)
            if family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise failure


def _resolve(deadline: Deadline, host: str, port: int) -> list[tuple[int, Any]]:
    """Resolve a host name in a thread of its own, for nothing else can bound the system's resolver."""
    answer: list[tuple[int, Any]] = []
    failure: list[OSError] = []

    def ask() -> None:
        try:
            found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
            answer.extend((family, address) for family, _, _, _, address in found)
        except (OSError, UnicodeError) as error:
            failure.append(error if isinstance(error, OSError) else OSError(f"not a host name: {host}"))

    thread = threading.Thread(target=ask, name="resolve", daemon=True)
    thread.start()
    thread.join(deadline.left())
    if thread.is_alive():
        raise TimeoutError(f"resolving {host} took too long")
    if failure:
        raise failure[0]
    return answer
