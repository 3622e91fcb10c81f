"""The way to a JSON API over HTTP: one session per call, bounded in total, over connections of its own.

A session lives as long as one call, so whoever answers at the address now is who answers the whole call. The secret
goes into the headers that the adapter names and nowhere else: no redirect is followed, and neither proxies nor `.netrc`
are read. Nothing is retried.
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any

import requests

from providers.contract import ErrorKind, ProviderError
from providers.deadline import BoundedAdapter, Deadline, tls_context
from providers.failures import Answered, Call, translated


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

    def __init__(self, api: HttpApi, session: requests.Session, deadline: Deadline, call: Call) -> None:
        self.deadline = deadline
        self.call = call
        self._api = api
        self._session = session

    def ask(self, method: str, path: str, **options: Any) -> Any:
        """Ask as `request` does, and return the JSON of the answer, or None for an empty one."""
        return self.read(self.request(method, path, **options))

    def read(self, response: requests.Response) -> Any:
        """Return the JSON of an answer, or None for an empty one."""
        with translated(self.call, self.deadline):
            return response.json() if response.content else None

    def request(
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
    ) -> requests.Response:
        """Ask the API, or another server of the service's at `base`, and return its answer, which is a success.

        What is sent is `body` in JSON, or `content` as it is, or `files`.
        A header that is None is left out: what another server has no business to see, the secret above all.
        """
        url = (self._api.url if base is None else base) + path
        with translated(self.call, self.deadline, lambda answered: self._api.meaning(self.call, answered)):
            response = self._session.request(
                method,
                url,
                params=query,
                headers=headers,
                json=body,
                data=content,
                files=files,
                allow_redirects=False,
                timeout=self.deadline.left(),
            )
            if not HTTPStatus.OK <= response.status_code < HTTPStatus.MULTIPLE_CHOICES:
                raise self._api.answered(response)
        return response


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
    ) -> None:
        """Say in which `headers` the secret travels, and how to read (`answered`) and judge (`meaning`) a refusal.

        `tls_ca` is the file of the server's authority, None for the system's.
        """
        self.url = url
        self.answered = answered
        self._headers = headers
        self._meaning = meaning
        self._secret = secret
        self._tls = None if url.startswith("http://") else TlsFiles(tls_ca)

    def meaning(self, call: Call, answered: Answered) -> ProviderError:
        return self._meaning(call, answered, self._secret)

    @contextmanager
    def conversation(self, call: Call, within: float) -> Iterator[Conversation]:
        """Open a conversation that ends `within` seconds from now.

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
        with requests.Session() as session:
            session.trust_env = False
            session.headers.update({"Accept": "application/json", **self._headers(secret)})
            adapter = BoundedAdapter(deadline, context=self._tls.context() if self._tls else None)
            session.mount("http://", adapter)
            session.mount("https://", adapter)
            yield Conversation(self, session, deadline, call)
