"""The way to the API: one session per call, bounded in total, over connections of its own.

A session lives as long as one call, so whoever answers at the address now is who answers the whole call. The key goes
into one header and nowhere else: no redirect is followed, and neither proxies nor `.netrc` are read.
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

import requests

from providers.contract import ErrorKind, ProviderError
from providers.daytona.errors import Call, answered, translated
from providers.daytona.schemas import DaytonaEndpoint
from providers.deadline import BoundedAdapter, Deadline, tls_context


class Conversation:
    """One call's requests, all under one deadline. Every failure is the `ProviderError` that it means for this call."""

    def __init__(self, session: requests.Session, endpoint: DaytonaEndpoint, deadline: Deadline, call: Call) -> None:
        self.endpoint = endpoint
        self.deadline = deadline
        self.call = call
        self._session = session

    def ask(
        self,
        method: str,
        path: str,
        *,
        base: str | None = None,
        query: Mapping[str, str] | None = None,
        body: object = None,
        files: Mapping[str, Any] | None = None,
    ) -> Any:
        """Ask the API, or another server of the service's at `base`, and return the JSON of its answer."""
        url = (self.endpoint.url if base is None else base) + path
        secret = str(self._session.headers["Authorization"]).removeprefix("Bearer ")
        with translated(self.call, self.deadline, secret):
            response = self._session.request(
                method, url, params=query, json=body, files=files, allow_redirects=False, timeout=self.deadline.left()
            )
            if not HTTPStatus.OK <= response.status_code < HTTPStatus.MULTIPLE_CHOICES:
                raise answered(response)
            return response.json() if response.content else None

    def pause(self, seconds: float) -> None:
        with translated(self.call, self.deadline):
            self.deadline.pause(seconds)


class Api:
    """The API at one endpoint with one key. Safe to use from any number of threads."""

    def __init__(self, endpoint: DaytonaEndpoint, secret: str | None) -> None:
        self._endpoint = endpoint
        self._secret = secret
        self._context: ssl.SSLContext | None = None
        self._context_lock = threading.Lock()

    @contextmanager
    def conversation(self, call: Call, within: float) -> Iterator[Conversation]:
        """Open a conversation that ends `within` seconds from now.

        Raises `NOT_READY` where there is no key, `AUTHORISATION` where what there is cannot be one.
        """
        deadline = Deadline(within)
        with translated(call, deadline):
            deadline.left()
        if not self._secret:
            raise ProviderError(ErrorKind.NOT_READY, "this account needs an API key, and there is none here")
        if not (self._secret.isascii() and self._secret.isprintable() and " " not in self._secret):
            raise ProviderError(ErrorKind.AUTHORISATION, "the secret of this account is not an API key")
        with requests.Session() as session:
            session.trust_env = False
            session.headers.update({"Authorization": f"Bearer {self._secret}", "Accept": "application/json"})
            adapter = BoundedAdapter(deadline, context=self._tls())
            session.mount("http://", adapter)
            session.mount("https://", adapter)
            yield Conversation(session, self._endpoint, deadline, call)

    def _tls(self) -> ssl.SSLContext | None:
        if self._endpoint.url.startswith("http://"):
            return None
        with self._context_lock:
            if self._context is None:
                try:
                    self._context = tls_context(self._endpoint.tls_ca)
                except OSError as error:
                    raise ProviderError(
                        ErrorKind.NOT_READY, f"cannot read the TLS file of this account: {error.strerror or error}"
                    ) from None
            return self._context
