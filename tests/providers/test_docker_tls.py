"""The Docker provider over TCP with TLS on both sides: the real engine behind a proxy that terminates TLS."""

from __future__ import annotations

import select
import socket
import socketserver
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from providers.contract import MARK_INSTALLATION, Command, ErrorKind, Gone, ProviderError, Running
from providers.docker import DockerProvider
from providers.docker.schemas import DockerConfig, DockerEndpoint
from tests.authority import OPENSSL, Authority
from tests.engine import IMAGE, available, private_engine
from tests.providers.fake_engine import Answer, fake_engine

WITHIN = 30.0

pytestmark = pytest.mark.skipif(OPENSSL is None, reason="no openssl to make certificates with")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "ours")


@contextmanager
def serving(handle: Callable[[socket.socket], None]) -> Iterator[int]:
    """Serve each connection in a thread, and yield the port."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with suppress(OSError):
                handle(self.request)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = False

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def proxy(authority: Authority, engine: Path) -> Iterator[int]:
    """Put TLS, with a certificate demanded of the client, in front of an engine's socket."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(authority.certificate))
    context.load_cert_chain(*authority.sign("server"))
    context.verify_mode = ssl.CERT_REQUIRED

    def relay(accepted: socket.socket) -> None:
        with context.wrap_socket(accepted, server_side=True) as client, socket.socket(socket.AF_UNIX) as behind:
            behind.connect(str(engine))
            # One thread serves both directions: it must not wait for ever for one that takes nothing any more.
            client.settimeout(5)
            behind.settimeout(5)
            while True:
                ready = [client] if client.pending() else select.select([client, behind], [], [])[0]
                for source, target in ((client, behind), (behind, client)):
                    if source in ready:
                        data = source.recv(65536)
                        if not data:
                            return
                        target.sendall(data)

    with serving(relay) as port:
        yield port


def provider_at(port: int, authority: Authority, certificate: tuple[str, str]) -> DockerProvider:
    cert, key = certificate
    return DockerProvider(
        DockerEndpoint(
            base_url=f"tcp://127.0.0.1:{port}", tls_ca=str(authority.certificate), tls_cert=cert, tls_key=key
        )
    )


@pytest.mark.skipif(available() is not None, reason=f"no container engine: {available()}")
def test_a_whole_life_over_tls(authority: Authority) -> None:
    with private_engine() as engine, proxy(authority, engine.socket) as port:
        provider = provider_at(port, authority, authority.sign("client"))
        local = DockerProvider(DockerEndpoint(base_url=engine.base_url))
        assert provider.identify(within=WITHIN) == local.identify(within=WITHIN)
        marks = {MARK_INSTALLATION: "tls"}
        container = provider.create("over-tls", marks, DockerConfig(image=IMAGE), within=WITHIN).resource.resource_id
        assert isinstance(provider.inspect(container, within=WITHIN), Running)
        body = bytes(range(256)) * 4000
        answer = provider.execute(container, Command(("cat",), stdin=body), within=WITHIN)
        assert (answer.stdout == body[: len(answer.stdout)], len(answer.stdout), answer.exit_code) == (
            True,
            len(body),
            0,
        )
        late = provider.execute(container, Command(("sleep", "100"), timeout=0.5), within=WITHIN)
        assert late.timed_out
        provider.stop(container, grace=1, within=WITHIN)
        provider.delete(container, within=WITHIN)
        assert isinstance(provider.inspect(container, within=WITHIN), Gone)


def test_an_engine_with_a_certificate_of_another_authority_is_not_spoken_to(
    authority: Authority, tmp_path: Path
) -> None:
    other = Authority(tmp_path / "other")
    with fake_engine() as engine, proxy(other, engine.path) as port:
        provider = provider_at(port, authority, other.sign("client"))
        with pytest.raises(ProviderError) as caught:
            provider.identify(within=WITHIN)
        assert caught.value.kind is ErrorKind.CONNECTION
        assert engine.requests == []


def test_a_certificate_that_the_engine_refuses_is_a_matter_of_authorisation(
    authority: Authority, tmp_path: Path
) -> None:
    other = Authority(tmp_path / "other")
    with fake_engine() as engine, proxy(authority, engine.path) as port:
        provider = provider_at(port, authority, other.sign("client"))
        with pytest.raises(ProviderError) as caught:
            provider.identify(within=WITHIN)
        # TLS 1.3 says so after the client's first request, which may meet the closed connection before the word.
        assert caught.value.kind in {ErrorKind.AUTHORISATION, ErrorKind.CONNECTION}
        assert engine.requests == []


def test_a_missing_file_is_named_as_what_it_is(authority: Authority, tmp_path: Path) -> None:
    provider = provider_at(1, authority, (str(tmp_path / "none.pem"), str(tmp_path / "none.key")))
    with pytest.raises(ProviderError) as caught:
        provider.identify(within=WITHIN)
    assert caught.value.kind is ErrorKind.NOT_READY


@pytest.mark.parametrize("greeting", [b"", b"\x16"], ids=["silent", "one byte a second"])
def test_a_handshake_without_end_holds_nobody_beyond_the_bound(authority: Authority, greeting: bytes) -> None:
    closing = threading.Event()

    def trickle(accepted: socket.socket) -> None:
        while not closing.wait(0.2):
            accepted.sendall(greeting)

    with serving(trickle) as port:
        provider = provider_at(port, authority, authority.sign("client"))
        started = time.monotonic()
        try:
            with pytest.raises(ProviderError) as caught:
                provider.identify(within=0.8)
        finally:
            closing.set()
        assert caught.value.kind is ErrorKind.TIMEOUT
        assert time.monotonic() - started < 2


def test_trickling_answers_inside_tls_hold_nobody_beyond_the_bound(authority: Authority) -> None:
    with fake_engine() as engine, proxy(authority, engine.path) as port:
        provider = provider_at(port, authority, authority.sign("client"))
        provider.find("name", {}, within=WITHIN)
        engine.answers("GET /containers/json", Answer(200, b"[" + b" " * 60, slow_from=5))
        started = time.monotonic()
        with pytest.raises(ProviderError) as caught:
            provider.find("name", {}, within=0.8)
        assert caught.value.kind is ErrorKind.TIMEOUT
        assert time.monotonic() - started < 2
