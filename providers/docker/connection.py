"""The way to an engine: one client per call, bounded in total, over one fresh connection.

A client lives as long as one call, so whoever answers at the address now is who answers the whole call, and nothing is
left open. What costs is shared by the calls of one provider instance: the TLS context and the negotiated version.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import requests
from docker import APIClient

from providers.contract import ErrorKind, ProviderError
from providers.deadline import BoundedAdapter, Deadline
from providers.docker.errors import answered, translated
from providers.docker.schemas import DockerEndpoint
from providers.failures import Call
from providers.http_api import TlsFiles

_ANY_VERSION = "1.24"
"""What the SDK is told before the engine's version is known. The only request made under it has no version."""


@dataclass(frozen=True, slots=True)
class Ping:
    """What an engine says of itself at once."""

    api_version: str
    is_podman: bool


class Client(APIClient):
    """The SDK's client for one call. It follows no redirect, and reads neither proxies nor the user's docker files."""

    def __init__(self, base_url: str, adapter: BoundedAdapter) -> None:
        super().__init__(base_url=base_url, version=_ANY_VERSION)
        self.trust_env = False
        self.max_redirects = 0
        self._general_configs: dict[str, Any] = {}  # would add headers and keys of the user's docker command line
        self.mount("http://", adapter)
        self.mount("https://", adapter)

    def _raise_for_status(self, response: requests.Response) -> None:
        # Instead of the SDK's, which fails on an error that is not in an engine's form.
        if response.status_code >= HTTPStatus.BAD_REQUEST:
            raise answered(response)

    def use(self, api_version: str) -> None:
        """Speak this version of the API from now on."""
        self._version = api_version

    def ping(self) -> Ping:  # type: ignore[override]
        """Ask for the version and the brand, without a version: the answer to this is the same in all of them."""
        response = self.get(f"{self.base_url}/_ping")
        self._raise_for_status(response)
        version = response.headers.get("Api-Version", "")
        if not re.fullmatch(r"1\.\d{1,3}", version):
            raise ProviderError(ErrorKind.PROTOCOL, f"not a Docker engine, or one without an API version: {version}")
        return Ping(version, is_podman="Libpod-Api-Version" in response.headers)

    def remove_now(self, container: str) -> None:
        """Kill and remove a container with its anonymous volumes. `timeout` is podman's: it would wait ten seconds."""
        url = f"{self.base_url}/v{self._version}/containers/{container}"
        self._raise_for_status(self.delete(url, params={"force": "true", "v": "true", "timeout": "0"}))

    def open_exec(self, exec_id: str) -> requests.Response:
        """Start a command and return the answer, whose connection has become the command's streams."""
        response = self.post(
            f"{self.base_url}/v{self._version}/exec/{exec_id}/start",
            json={"Tty": False, "Detach": False},
            headers={"Connection": "Upgrade", "Upgrade": "tcp"},
            stream=True,
        )
        self._raise_for_status(response)
        return response

    def open_archive(self, container: str, directory: str) -> requests.Response:
        """Ask for a directory as a tar stream, and return the answer as soon as it begins.

        With `/.` behind it, the members are named relative to the directory.
        """
        response = self.get(
            f"{self.base_url}/v{self._version}/containers/{container}/archive",
            params={"path": f"{directory.rstrip('/')}/."},
            headers={"Accept-Encoding": "identity"},
            stream=True,
        )
        self._raise_for_status(response)
        return response


class Conversation:
    """One call's requests to the engine, all under one deadline."""

    def __init__(self, client: Client, deadline: Deadline, ping: Ping | None) -> None:
        self.client = client
        self.deadline = deadline
        self._ping = ping

    def ping(self) -> Ping:
        """Return what the engine says of itself, asked within this conversation."""
        if self._ping is None:
            with self.asking(Call.IDENTIFY) as client:
                self._ping = client.ping()
        return self._ping

    @contextmanager
    def asking(self, call: Call) -> Iterator[Client]:
        """Ask the engine something; every failure becomes the `ProviderError` that it means for this call."""
        with translated(call, self.deadline):
            yield self.client


class Engine:
    """One engine at one endpoint. Safe to use from any number of threads."""

    def __init__(self, endpoint: DockerEndpoint) -> None:
        self._endpoint = endpoint
        self._version: str | None = None
        files = (endpoint.tls_cert, endpoint.tls_key) if endpoint.tls_cert and endpoint.tls_key else None
        self._tls = TlsFiles(endpoint.tls_ca, files) if endpoint.tls_ca and files else None

    @contextmanager
    def conversation(self, call: Call, within: float) -> Iterator[Conversation]:
        """Open a conversation that ends `within` seconds from now, in the version of the API that the engine speaks."""
        deadline = Deadline(within)
        with translated(call, deadline):
            deadline.left()
            client = Client(self._endpoint.http_url, self._adapter(deadline))
        with client:
            version, ping = self._version, None
            if version is None:
                with translated(call, deadline):
                    ping = client.ping()
                self._version = version = ping.api_version
            client.use(version)
            try:
                yield Conversation(client, deadline, ping)
            except ProviderError as error:
                if error.kind in {ErrorKind.INVALID, ErrorKind.PROTOCOL}:
                    # Perhaps another engine answers by now that does not speak this version.
                    self._version = None
                raise

    def _adapter(self, deadline: Deadline) -> BoundedAdapter:
        context = self._tls.context() if self._tls else None
        return BoundedAdapter(deadline, unix_socket=self._endpoint.unix_socket, context=context)
