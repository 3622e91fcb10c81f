"""What an account and an environment of this provider may say. Neither holds a secret."""

from __future__ import annotations

import re
from urllib.parse import SplitResult, urlsplit

from pydantic import Field, ValidationInfo, field_validator

from providers.contract import Schema
from providers.fields import AbsolutePath, Directory, Reference, Variables, is_loopback, split_url

_TLS_FIELDS = ("tls_ca", "tls_cert", "tls_key")
_VOLUME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,254}")
_SOCKET_PATH_LIMIT = 107
_NETWORK = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,254}")

# Stays alive, reaps what is orphaned to it (any shell does, waiting), and passes a polite stop on to *all* processes of
# the sandbox, then waits for them: an engine would tell process 1 alone, and kill the others without a word.
_UNTIL_TOLD = """
trap 'kill -TERM -1; while kill -0 -1 2>/dev/null; do sleep 0.1 || sleep 1; done; exit 0' TERM INT
while :; do sleep 86400 & wait $!; done
"""
KEEP_ALIVE = ("/bin/sh", "-c", _UNTIL_TOLD.strip())


class DockerEndpoint(Schema):
    """Where an engine is reached: a unix socket, or TCP with TLS on both sides."""

    tls_ca: AbsolutePath | None = None
    """File with the authority that signed the engine's certificate, on every host that calls the engine."""
    tls_cert: AbsolutePath | None = None
    """File with the certificate that is shown to the engine."""
    tls_key: AbsolutePath | None = None
    """File with that certificate's key. The path is no secret; the file is."""
    anchor: str | None = None
    """Name of a volume, made once by hand on this engine, that the engine is recognised by. For podman, which has no
    id of its own: without one, podman's host name and storage directory stand for it, which a wiped and re-made engine
    shares with its predecessor."""
    # Last, so that it is checked when the TLS fields are known.
    base_url: str
    """`unix:///path`, `tcp://host:port` or `https://host:port`. TCP without TLS only to this very machine."""

    @field_validator("anchor")
    @classmethod
    def _volume(cls, name: str | None) -> str | None:
        if name is not None and not _VOLUME.fullmatch(name):
            raise ValueError("must be the name of a volume")
        return name

    @field_validator("base_url")
    @classmethod
    def _reachable(cls, url: str, info: ValidationInfo) -> str:
        given = {name for name in _TLS_FIELDS if info.data.get(name) is not None}
        if given and len(given) < len(_TLS_FIELDS) and all(name in info.data for name in _TLS_FIELDS):
            missing = ", ".join(name for name in _TLS_FIELDS if name not in given)
            raise ValueError(f"TLS needs all three files; missing: {missing}")
        parts = _split(url)
        if parts.scheme == "unix":
            if given:
                raise ValueError("a unix socket has no TLS: leave out tls_ca, tls_cert and tls_key")
            return url
        if not given and parts.scheme == "https":
            raise ValueError("https needs tls_ca, tls_cert and tls_key")
        if not given and not is_loopback(parts.hostname or ""):
            raise ValueError("TCP to another machine needs TLS: give tls_ca, tls_cert and tls_key")
        return url

    @property
    def unix_socket(self) -> str | None:
        """The path of the engine's unix socket, or None when it is reached over TCP."""
        parts = urlsplit(self.base_url)
        return parts.path if parts.scheme == "unix" else None

    @property
    def http_url(self) -> str:
        """The address as HTTP clients understand it."""
        if self.unix_socket:
            return "http://localhost:2375"
        return f"{'https' if self.tls_ca else 'http'}://{urlsplit(self.base_url).netloc}"


def _split(url: str) -> SplitResult:
    shape = "must be unix:///path, tcp://host:port or https://host:port"
    parts = split_url(url, shape)
    if parts.scheme == "unix":
        if parts.netloc or not parts.path.strip("/"):
            raise ValueError("the path of a unix socket must be absolute: unix:///path")
        if len(parts.path.encode()) > _SOCKET_PATH_LIMIT:
            raise ValueError("the path of a unix socket has at most 107 bytes")
        return parts
    if parts.scheme not in {"tcp", "https"} or not parts.hostname or not parts.port or parts.path not in {"", "/"}:
        raise ValueError(shape)
    return parts


class DockerConfig(Schema):
    """What kind of container is made.

    Its process namespace is always its own: nothing it starts can outlive it.
    """

    image: Reference
    """An image that the engine has. It needs a POSIX shell at /bin/sh; nothing is pulled."""
    command: tuple[str, ...] = KEEP_ALIVE
    """What runs as the sandbox's first process, for as long as the sandbox is to live."""
    env: Variables = Field(default_factory=dict)
    """Variables of every process in the sandbox. Not for secrets: the engine shows them to everyone who may ask."""
    memory_mb: int | None = Field(default=None, ge=16, le=16 << 20)
    """Limit in MiB, or None for none."""
    cpus: float | None = Field(default=None, ge=0.01, le=4096)
    """Limit in processors, or None for none."""
    pids: int | None = Field(default=None, ge=4, le=1 << 22)
    """Limit of processes and threads, or None for the engine's own."""
    network: str = "none"
    """The engine's network to join. By default none at all: reaching out, and being reached by neighbours on the
    engine's common bridge, is for an environment to ask for by name."""
    init: bool = False
    """Let the engine put its own init in front of `command`, for a command that does not reap. Podman needs
    `catatonit` on its host for this."""

    workspace: Directory = "."
    """The directory with the work, whose files are saved. `.` is the image's working directory, where commands start;
    an image that names none starts them in /, which is no workspace."""

    @field_validator("command")
    @classmethod
    def _runs(cls, command: tuple[str, ...]) -> tuple[str, ...]:
        if not command or not command[0] or any("\0" in part for part in command):
            raise ValueError("must be a list of a program and its arguments")
        return command

    @field_validator("network")
    @classmethod
    def _own_network(cls, network: str) -> str:
        if network == "host" or not _NETWORK.fullmatch(network):
            raise ValueError("must be the name of a network; 'host' and other containers' networks are not isolated")
        return network
