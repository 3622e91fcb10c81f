"""The sessions of this process: one for each account, whose connections are kept alive between calls.

It answers for this: a connection serves one call at a time and under that call's deadline; what is idle for long, old,
or closed by the server is not used again; a call that failed leaves no connection behind; a child process uses none of
its parent's; and no secret is kept, in no form that it could be read from. Nothing is retried.
"""

from __future__ import annotations

import atexit
import hashlib
import math
import os
import re
import secrets
import ssl
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.cookiejar import DefaultCookiePolicy
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import requests
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

from providers.deadline import BoundedAdapter, BoundedConnection, Deadline

if TYPE_CHECKING:
    _Pool = HTTPConnectionPool
else:
    _Pool = object

IDLE_SECONDS = 15.0
"""How long an idle connection may be used again, where its server does not say that it closes it earlier."""
_MARGIN = 1.0
"""Seconds before that at which it counts as closed: a request sent at the last moment arrives after it."""
_TIMEOUT = re.compile(r"\btimeout\s*=\s*(\d{1,9})\b", re.IGNORECASE)
AGE_SECONDS = 300.0
"""How long after it was opened a connection may be used again: an address may lead elsewhere by then."""
MOST_IDLE = 128
"""Idle connections of this process, those of all accounts together. How many are in use is not limited."""
MOST_ACCOUNTS = 64
"""Sessions of this process. The one that was not asked for the longest makes room."""

Place = tuple[str, str, int | None]
"""Where a connection leads: scheme, host, port."""


class Use:
    """One call's use of connections, in one thread from begin to end. What it took is its own until it ends.

    It reuses connections opened at `opened_since` (by the monotonic clock) or later, or none at all, not even its own.
    """

    def __init__(self, deadline: Deadline, *, opened_since: float = -math.inf, reuses: bool = True) -> None:
        self.deadline = deadline
        self.opened_since = opened_since
        self.reuses = reuses
        self.held: dict[Place, BoundedConnection] = {}
        """Connections that wait for the next request of this call."""
        self.taken: set[BoundedConnection] = set()
        """Connections that a request has. Left over at the end are those over which it failed."""
        self.latest: BoundedConnection | None = None
        """The connection of the latest answer, as far as it stays open."""
        self._process = os.getpid()

    def here(self) -> Use:
        """Return this, without the connections of a parent process where this is a child."""
        if self._process != os.getpid():
            self._process = os.getpid()
            self.drop()
        return self

    def heed(self, response: requests.Response) -> None:
        """Note what a server says about for how long it keeps the connection that it answered over."""
        told = _TIMEOUT.search(response.headers.get("Keep-Alive", ""))
        if told is not None and self.latest is not None:
            self.latest.idle_seconds = int(told[1]) - _MARGIN

    def drop(self) -> None:
        """Close all connections of this call."""
        for connection in (*self.held.values(), *self.taken):
            connection.close()
        self.held.clear()
        self.taken.clear()


class _Current(threading.local):
    """The call that this thread is in the middle of a request of. Its sockets and pools read it."""

    use: Use | None = None


_current = _Current()


def _use() -> Use:
    if _current.use is None:
        raise RuntimeError("a request over a session that no call is using")
    return _current.use


class Session:
    """The `requests` session of one account, and its connections. Safe to use from any number of threads at once.

    After it is made, nothing in it changes but urllib3's table of pools, which has a lock: headers, adapters and
    settings are only read, and no cookie is ever put into its jar. Secrets travel in each request's own headers.
    """

    def __init__(self, idle: Idle, context: ssl.SSLContext | None) -> None:
        self.closed = False
        self._idle = idle
        self._session = requests.Session()
        self._session.trust_env = False
        self._session.cookies.set_policy(DefaultCookiePolicy(allowed_domains=()))
        self._session.headers["Accept"] = "application/json"
        adapter = _KeepingAdapter(self, context)
        self._session.mount("http://", adapter)
        self._session.mount("https://", adapter)

    @contextmanager
    def using(self, use: Use) -> Iterator[None]:
        """Let one call use this session. What it opened is kept where it went well and within its bound."""
        try:
            yield
        except BaseException:
            use.drop()
            raise
        # After the bound nothing is kept: whoever gave the call up may not find its connection in other hands.
        if not use.here().deadline.passed and not self.closed:
            for place, connection in use.held.items():
                self._idle.put(self, place, connection)
            use.held.clear()
        use.drop()

    def request(self, use: Use, method: str, url: str, **options: Any) -> requests.Response:
        """Send one request of a call and read its whole answer; no redirect is followed.

        With `stream=True` among the options, only its head: whoever reads the rest closes the response in this call,
        under whose bound the connection stays. It is not used again.
        """
        before, _current.use = _current.use, use.here()
        use.latest = None
        try:
            response = self._session.request(method, url, allow_redirects=False, timeout=use.deadline.left(), **options)
            use.heed(response)
            return response
        finally:
            _current.use = before

    def take(self, place: Place) -> BoundedConnection | None:
        """Return a connection for the request that this thread is about to send, or None where it has to open one."""
        use = _use()
        own = use.held.pop(place, None)
        if own is not None and not (use.reuses and _sound(own)):
            own.close()
            own = None
        if own is None and use.reuses:
            own = self._idle.take(self, place, use.opened_since)
        if own is not None:
            own.bind(use.deadline)
        return own

    def give_back(self, place: Place, connection: BoundedConnection) -> None:
        """Take a connection back from a request whose answer was read to its end. The call keeps it to itself."""
        use = _current.use
        if use is None or place in use.held or not connection.sock:
            connection.close()
        else:
            use.held[place] = use.latest = connection
        if use is not None:
            use.taken.discard(connection)


def _sound(connection: BoundedConnection) -> bool:
    """Say whether a connection is open, and silent: one that has something to say unasked is closing, or confused."""
    sock = connection.sock
    return connection.is_connected and not (isinstance(sock, ssl.SSLSocket) and sock.pending())


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    session: Session
    place: Place
    connection: BoundedConnection
    since: float


class Idle:
    """The idle connections of this process, the one that waits the longest first. Safe to use from several threads.

    A connection is here, or in the hands of one call, and moves under the lock: never do two threads have it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[_Waiting] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, session: Session, place: Place, connection: BoundedConnection) -> None:
        connection.bind(None)
        with self._lock:
            if not session.closed:
                self._waiting.append(_Waiting(session, place, connection, time.monotonic()))
                closing = self._waiting[:-MOST_IDLE]
                self._waiting = self._waiting[-MOST_IDLE:]
            else:
                closing = [_Waiting(session, place, connection, 0.0)]
        _close(closing)

    def take(self, session: Session, place: Place, opened_since: float) -> BoundedConnection | None:
        """Return a connection opened since then, or None. It is the oldest that will do: a newer one does for more."""
        now = time.monotonic()
        with self._lock:
            closing = self._remove(
                lambda one: (
                    now - one.since >= min(IDLE_SECONDS, one.connection.idle_seconds)
                    or now - one.connection.opened >= AGE_SECONDS
                )
            )
            fitting = [
                one
                for one in self._waiting
                if one.session is session and one.place == place and one.connection.opened >= opened_since
            ]
            chosen = None
            for one in sorted(fitting, key=lambda one: one.connection.opened):
                self._waiting.remove(one)
                if _sound(one.connection):
                    chosen = one.connection
                    break
                closing.append(one)
        _close(closing)
        return chosen

    def close(self, session: Session | None = None) -> None:
        """Close the idle connections of a session, whose others are closed when their calls end, or all there are."""
        with self._lock:
            if session is not None:
                session.closed = True
            closing = self._remove(lambda one: session is None or one.session is session)
        _close(closing)

    def _begin_as_a_child(self) -> None:
        # Closing says nothing to the servers, which the parent goes on talking to.
        self._lock = threading.Lock()
        waiting, self._waiting = self._waiting, []
        _close(waiting)

    def _remove(self, unwanted: Callable[[_Waiting], bool]) -> list[_Waiting]:
        removed = [one for one in self._waiting if unwanted(one)]
        self._waiting = [one for one in self._waiting if one not in removed]
        return removed


def _close(waiting: list[_Waiting]) -> None:
    for one in waiting:
        one.connection.close()


class Sessions:
    """The sessions of this process by account: address, secret (as a digest under a key of this process), TLS files."""

    def __init__(self) -> None:
        self.idle = Idle()
        self._key = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self._sessions: OrderedDict[Hashable, Session] = OrderedDict()

    def of(self, url: str, secret: str, tls_file: str | None, context: Callable[[], ssl.SSLContext | None]) -> Session:
        """Return the session of an account. `context` makes its TLS context where there is no session yet.

        A TLS file that was written anew makes another session; the system's own authorities are read once for each.
        """
        digest = hashlib.blake2b(secret.encode(), key=self._key).digest()
        account = (url, digest, tls_file and _version(tls_file))
        with self._lock:
            session = self._sessions.get(account)
            if session is not None:
                self._sessions.move_to_end(account)
                return session
        # Reading the system's authorities takes long enough not to hold the lock. Of two that are made one is used.
        made = Session(self.idle, context())
        evicted = []
        with self._lock:
            session = self._sessions.setdefault(account, made)
            self._sessions.move_to_end(account)
            while len(self._sessions) > MOST_ACCOUNTS:
                evicted.append(self._sessions.popitem(last=False)[1])
        for old in evicted:
            self.idle.close(old)
        return session

    def once(self, context: ssl.SSLContext | None) -> Session:
        """Return a session that is nobody's, and keeps no connection beyond a call."""
        session = Session(self.idle, context)
        session.closed = True
        return session

    def forget(self) -> None:
        """Forget all sessions and close their idle connections. Those in use are closed when their calls end."""
        with self._lock:
            forgotten = list(self._sessions.values())
            self._sessions.clear()
        for session in forgotten:
            self.idle.close(session)

    def _begin_as_a_child(self) -> None:
        """Let go of what was the parent's. Whoever held a lock does not exist here."""
        self._lock = threading.Lock()
        for session in self._sessions.values():
            session.closed = True
        self._sessions = OrderedDict()
        self.idle._begin_as_a_child()  # noqa: SLF001


def _version(path: str) -> tuple[object, ...]:
    """Return what changes when a file is replaced or written anew. One that cannot be seen has no version."""
    try:
        seen = Path(path).stat()
    except OSError:
        # Whoever makes the context cannot read it either, and says so.
        return (path,)
    return (path, seen.st_ino, seen.st_size, seen.st_mtime_ns)


class _Keeping(_Pool):
    """Mixed into a pool of urllib3: its connections are those of the session, which knows whose call this is."""

    session: Session

    @property
    def _place(self) -> Place:
        return self.scheme, self.host, self.port

    def _get_conn(self, timeout: float | None = None) -> Any:  # noqa: ARG002
        connection = self.session.take(self._place) or cast(BoundedConnection, self._new_conn())
        _use().taken.add(connection)
        return connection

    def _put_conn(self, conn: Any) -> None:
        if conn is not None:
            self.session.give_back(self._place, conn)


class _KeepingPool(_Keeping, HTTPConnectionPool):
    """Of plain connections."""


class _KeepingTLSPool(_Keeping, HTTPSConnectionPool):
    """Of connections over TLS."""


class _KeepingAdapter(BoundedAdapter):
    """Transport for a session that many calls share. The deadline is that of the call which sends."""

    pool_classes = (_KeepingPool, _KeepingTLSPool)

    def __init__(self, session: Session, context: ssl.SSLContext | None) -> None:
        self._of = session
        super().__init__(lambda: _use().deadline, context=context)

    def _made(self, pool: HTTPConnectionPool) -> None:
        cast(_Keeping, pool).session = self._of


sessions = Sessions()
os.register_at_fork(after_in_child=sessions._begin_as_a_child)  # noqa: SLF001
atexit.register(sessions.forget)
