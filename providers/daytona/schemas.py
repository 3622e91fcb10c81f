"""What an account and an environment of this provider may say. Neither holds a secret."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

from pydantic import Field, ValidationInfo, field_validator

from providers.contract import Schema

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_REFERENCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/@-]{0,254}")
_ORGANIZATION = re.compile(r"[A-Za-z0-9_-]{1,100}")
_MONTH = 31 * 24 * 3600


class DaytonaEndpoint(Schema):
    """Where the API is reached. The secret is an API key; who holds it acts for one organisation."""

    url: str = "https://app.daytona.io/api"
    """The API's address. Plain http only to this very machine: the key travels in a header."""
    organization_id: str | None = None
    """The organisation that the key must belong to. Without it, the one that the key says it belongs to."""
    tls_ca: str | None = None
    """File with the authority that signed the server's certificate, for one of your own. Absolute path."""

    @field_validator("url")
    @classmethod
    def _address(cls, url: str) -> str:
        return safe_url(url)

    @field_validator("organization_id")
    @classmethod
    def _identifier(cls, value: str | None) -> str | None:
        if value is not None and not _ORGANIZATION.fullmatch(value):
            raise ValueError("must be the id of an organisation")
        return value

    @field_validator("tls_ca")
    @classmethod
    def _absolute(cls, path: str | None) -> str | None:
        if path is not None and not path.startswith("/"):
            raise ValueError("must be the absolute path of a file")
        return path


def safe_url(url: str) -> str:
    """Return an address without its trailing slash, or raise `ValueError`: a key is sent nowhere in the clear."""
    shape = "must be https://host[:port][/path], or http:// to this very machine"
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        raise ValueError(shape) from None
    if parts.query or parts.fragment or "@" in parts.netloc or any(c.isspace() or not c.isprintable() for c in url):
        raise ValueError(f"{shape}, and nothing else")
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError(shape)
    if parts.scheme == "http" and not _is_loopback(parts.hostname):
        raise ValueError(shape)
    return url.rstrip("/")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class DaytonaConfig(Schema):
    """What kind of sandbox is made: from an image or from a snapshot of the organisation, or its default snapshot."""

    image: str | None = None
    """A container image. Excludes `snapshot`."""
    snapshot: str | None = None
    """A snapshot of the organisation. Excludes `image`."""
    cpu: int | None = Field(default=None, gt=0, le=1024)
    """Processors. Resources are an image's: a snapshot brings its own, so they are dropped beside one."""
    memory_gb: int | None = Field(default=None, gt=0, le=16384)
    disk_gb: int | None = Field(default=None, gt=0, le=65536)
    gpu: int | None = Field(default=None, gt=0, le=64)
    target: str | None = None
    """The region, or None for the organisation's own."""
    user: str | None = None
    """The user that commands run as, or None for the image's."""
    env: dict[str, str] = Field(default_factory=dict)
    """Variables of every process in the sandbox. Not for secrets: the service shows them to everyone who may ask."""
    lifetime_seconds: int | None = Field(default=None, gt=0, le=12 * _MONTH)
    """After how long, from its creation, the service is to destroy the sandbox in whatever state it is. The service
    counts whole minutes: what is over them is cut off, and under one minute there is no such deadline."""
    auto_stop_minutes: int = Field(default=0, ge=0, le=_MONTH // 60)
    """After how long without activity the service stops the sandbox. 0: never."""
    auto_archive_minutes: int = Field(default=0, ge=0, le=_MONTH // 60)
    """How long after a stop the service moves the files to its archive. 0: as late as it can."""
    auto_delete_minutes: int = -1
    """How long after a stop the service deletes the sandbox. -1: never. 0 would turn every stop into a deletion."""

    @field_validator("image", "snapshot", "target", "user")
    @classmethod
    def _reference(cls, value: str | None) -> str | None:
        if value is not None and not _REFERENCE.fullmatch(value):
            raise ValueError("must be a name, with its tag or digest where it has one")
        return value

    @field_validator("env")
    @classmethod
    def _variables(cls, env: dict[str, str]) -> dict[str, str]:
        for name, value in env.items():
            if not _VARIABLE.fullmatch(name) or "\0" in value:
                raise ValueError(f"{name!r} is not the name of a variable, or its value holds a null byte")
        return env

    @field_validator("auto_delete_minutes")
    @classmethod
    def _keeps(cls, minutes: int) -> int:
        if minutes == 0 or not -1 <= minutes <= _MONTH // 60:
            raise ValueError("must be -1 for never, or a number of minutes from 1 on: at 0, stopping is deleting")
        return minutes

    # These two know the fields before theirs; one that did not fit is missing there, and is reported itself.

    @field_validator("snapshot")
    @classmethod
    def _one_source(cls, snapshot: str | None, info: ValidationInfo) -> str | None:
        if snapshot is not None and info.data.get("image") is not None:
            raise ValueError("give an image or a snapshot, not both")
        return snapshot

    @field_validator("cpu", "memory_gb", "disk_gb", "gpu")
    @classmethod
    def _of_an_image(cls, value: int | None, info: ValidationInfo) -> int | None:
        neither = all(info.data.get(source, "unfit") is None for source in ("image", "snapshot"))
        if value is not None and neither:
            raise ValueError("needs an image: a snapshot brings its own")
        return value

    @property
    def ttl_minutes(self) -> int | None:
        """The lifetime in the service's whole minutes, or None for no deadline."""
        return (self.lifetime_seconds or 0) // 60 or None
