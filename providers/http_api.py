"""The way to a JSON API over HTTP: calls that are bounded in total, over connections that an account's calls share.

Who answers one request of a call answers them all, as far as one connection lasts. What must not meet a connection that
its server has just closed, or that leads to who answered before, opens its own (`HttpApi._use`). The secret goes into
the headers that the adapter names and nowhere else: no redirect is followed, and neither proxies nor `.netrc` are read.
Nothing is retried.
"""

from __future__ import annotations

import math
import ssl
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any

import requests
from requests.structures import CaseInsensitiveDict

from providers.contract import ErrorKind, ProviderError
from providers.deadline import Deadline, tls_context
from providers.failures import Answered, Call, translated
from providers.sessions import Session, Use, sessions


class TlsFiles:
    """The TLS context of one account, made of its files at first use. Safe to use from any number of threads."""

    def __init__(self, ca: str | None = None, certificate: tuple[str, str] | None = None) -> None:
        """`ca` is the file of the authority, None for the system's; `certificate` is our own file and its key's."""
        self._ca = ca
        self._certificate = certificate
        self._context: ssl.SSLContext | None = None
        self._lock = threading.Lock()

    def context(self) -> ssl.SSLContext:
        """Return the context. Raises `NOT_READY` where this host lacks a file, or cannot use it."""
        with self._lock:
            if self._context is None:
                try:
                    self._context = tls_context(self._ca, self._certificate)
                except OSError as error:
                    reason = error.strerror or error
                    raise ProviderError(
                        ErrorKind.NOT_READY, f"cannot read the TLS files of this account: {reason}"
                    ) from None
            return self._context


class Conversation:
    """One call's requests, all under one deadline. Every failure is the `ProviderError` that it means for this call."""

    def __init__(self, api: HttpApi, session: Session, use: Use, call: Call, headers: Mapping[str, str]) -> None:
        self.deadline = use.deadline
        self.call = call
        self._api = api
        self._session = session
        self._use = use
        self._headers = headers

    def ask(self, method: str, path: str, **options: Any) -> Any:
        """Ask as `request` does, and return the JSON of the answer, or None for an empty one."""
        return self.read(self.request(method, path, **options))

    def read(self, response: requests.Response) -> Any:
        """Return the JSON of an answer, or None for an empty one."""
        with translated(self.call, self.deadline):
            return response.json() if response.content else None

    def request(  # noqa: PLR0913 - named ones, of which a call gives two or three
        self,
        method: str,
        path: str,
        *,
        base: str | None = None,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str | None] | None = None,
        body: object = None,
        content: bytes | None = None,
        files: Mapping[str, Any] | None = None,
        stream: bool = False,
    ) -> requests.Response:
        """Ask the API, or another server of the service's at `base`, and return its answer, which is a success.

        With `stream`, as soon as it begins: read the rest with `pieces`.

        What is sent is `body` in JSON, or `content` as it is, or `files`.
        A header that is None is left out: what another server has no business to see, the secret above all.
        """
        url = (self._api.url if base is None else base) + path
        sent: CaseInsensitiveDict[str | None] = CaseInsensitiveDict(self._headers)
        sent.update(headers or {})
        with translated(self.call, self.deadline, lambda answered: self._api.meaning(self.call, answered)):
            response = self._session.request(
                self._use,
                method,
                url,
                params=query,
                headers=sent,
                json=body,
                data=content,
                files=files,
                stream=stream,
            )
            if not HTTPStatus.OK <= response.status_code < HTTPStatus.MULTIPLE_CHOICES:
                raise self._api.answered(response)
        return response

    def pieces(self, response: requests.Response, size: int = 1 << 16) -> Generator[bytes, None, None]:
        """Yield the rest of an answer that was asked for with `stream`, and close it."""
        with translated(self.call, self.deadline), closing(response):
            for piece in response.iter_content(size):
                self.deadline.left()
                yield piece


def told_at(response: requests.Response) -> datetime:
    """Return when a server says that it gave an answer (`Date`), or else this host's own time."""
    try:
        when = parsedate_to_datetime(response.headers["Date"])
    except (KeyError, ValueError):
        return datetime.now(UTC)
    return when.replace(tzinfo=when.tzinfo or UTC)


class HttpApi:
    """A JSON API at one address with one secret. Safe to use from any number of threads."""

    def __init__(
        self,
        url: str,
        secret: str | None,
        *,
        headers: Callable[[str], Mapping[str, str]],
        answered: Callable[[requests.Response], Answered],
        meaning: Callable[[Call, Answered, str | None], ProviderError],
        tls_ca: str | None = None,
        keeps: bool = True,
    ) -> None:
        """Say in which `headers` the secret travels, and how to read (`answered`) and judge (`meaning`) a refusal.

        `tls_ca` is the file of the server's authority, None for the system's. Without `keeps`, no connection is kept
        beyond a call: for an address and a secret that are asked once.
        """
        self.url = url
        self.answered = answered
        self._headers = headers
        self._meaning = meaning
        self._secret = secret
        self._tls_ca = tls_ca
        self._keeps = keeps
        self._attested_since = -math.inf

    def meaning(self, call: Call, answered: Answered) -> ProviderError:
        return self._meaning(call, answered, self._secret)

    @contextmanager
    def conversation(self, call: Call, within: float) -> Iterator[Conversation]:
        """Open a conversation, for this thread, that ends `within` seconds from now.

        Raises `NOT_READY` where there is no key, `AUTHORISATION` where what there is cannot be one.
        """
        deadline = Deadline(within)
        with translated(call, deadline):
            deadline.left()
        secret = self._secret
        if not secret:
            raise ProviderError(ErrorKind.NOT_READY, "this account needs an API key, and there is none here")
        if not (secret.isascii() and secret.isprintable() and " " not in secret):
            raise ProviderError(ErrorKind.AUTHORISATION, "the secret of this account is not an API key")
        headers = self._headers(secret)
        session = self._session(secret)
        use = self._use(call, deadline)
        with session.using(use):
            yield Conversation(self, session, use, call, headers)

    def _session(self, secret: str) -> Session:
        if not self._keeps:
            return sessions.once(self._context())
        return sessions.of(self.url, secret, self._tls_ca, self._context)

    def _context(self) -> ssl.SSLContext | None:
        return None if self.url.startswith("http://") else TlsFiles(self._tls_ca).context()

    def _use(self, call: Call, deadline: Deadline) -> Use:
        """Say which connections a call may use.

        Identity before absence: whoever says who the account is, is asked over a connection of its own, and from then
        on this instance uses no connection that was opened before. So no answer that counts because of an attested
        identity comes from where the address led to earlier.
        """
        now = time.monotonic()
        match call:
            case Call.CREATE:
                # Sent into a connection that the server was closing, it would be a lost reply that nobody had to lose.
                return Use(deadline, reuses=False)
            case Call.IDENTIFY:
                self._attested_since = now
                return Use(deadline, opened_since=now)
            case Call.EXECUTE | Call.ARCHIVE:
                # What a command did is not known either once its answer is lost.
                return Use(deadline, opened_since=now)
            case _:
                return Use(deadline, opened_since=self._attested_since)
