"""What an account and an environment of this provider may say. Neither holds a secret."""

from __future__ import annotations

import re

from pydantic import Field, ValidationInfo, field_validator

from providers.contract import Schema
from providers.fields import AbsolutePath, Directory, Reference, Variables, WebAddress

_ORGANIZATION = re.compile(r"[A-Za-z0-9_-]{1,100}")
_MONTH = 31 * 24 * 3600


class DaytonaEndpoint(Schema):
    """Where the API is reached. The secret is an API key; who holds it acts for one organisation."""

    url: WebAddress = "https://app.daytona.io/api"
    """The API's address. Plain http only to this very machine: the key travels in a header."""
    organization_id: str | None = None
    """The organisation that the key must belong to. Without it, the one that the key says it belongs to."""
    tls_ca: AbsolutePath | None = None
    """File with the authority that signed the server's certificate, for one of your own. Absolute path."""

    @field_validator("organization_id")
    @classmethod
    def _identifier(cls, value: str | None) -> str | None:
        if value is not None and not _ORGANIZATION.fullmatch(value):
            raise ValueError("must be the id of an organisation")
        return value


class DaytonaConfig(Schema):
    """What kind of sandbox is made: from an image or from a snapshot of the organisation, or its default snapshot."""

    image: Reference | None = None
    """A container image. Excludes `snapshot`."""
    snapshot: Reference | None = None
    """A snapshot of the organisation. Excludes `image`."""
    cpu: int | None = Field(default=None, gt=0, le=1024)
    """Processors. Resources are an image's: a snapshot brings its own, so they are dropped beside one."""
    memory_gb: int | None = Field(default=None, gt=0, le=16384)
    disk_gb: int | None = Field(default=None, gt=0, le=65536)
    gpu: int | None = Field(default=None, gt=0, le=64)
    target: Reference | None = None
    """The region, or None for the organisation's own."""
    user: Reference | None = None
    """The user that commands run as, or None for the image's."""
    env: Variables = Field(default_factory=dict)
    """Variables of every process in the sandbox. Not for secrets: the service shows them to everyone who may ask."""
    lifetime_seconds: int | None = Field(default=None, gt=0, le=12 * _MONTH)
    """How far ahead the service's own deadline is kept, at which it destroys the sandbox in whatever state it is. The
    service counts whole minutes: of a new sandbox what is over them is cut off, and under one there is no deadline."""
    auto_stop_minutes: int = Field(default=0, ge=0, le=_MONTH // 60)
    """After how long without activity the service stops the sandbox. 0: never."""
    auto_archive_minutes: int = Field(default=0, ge=0, le=_MONTH // 60)
    """How long after a stop the service moves the files to its archive. 0: as late as it can."""
    auto_delete_minutes: int = -1
    """How long after a stop the service deletes the sandbox. -1: never. 0 would turn every stop into a deletion."""

    @field_validator("auto_delete_minutes")
    @classmethod
    def _keeps(cls, minutes: int) -> int:
        if minutes == 0 or not -1 <= minutes <= _MONTH // 60:
            raise ValueError("must be -1 for never, or a number of minutes from 1 on: at 0, stopping is deleting")
        return minutes

    workspace: Directory = "."
    """The directory with the work, whose files are saved. `.` is where commands start: the image's working directory,
    or its user's home."""

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
