"""What an account and an environment of this provider may say. Neither holds a secret."""

from __future__ import annotations

import re

from pydantic import Field, field_validator

from providers.contract import Schema
from providers.fields import AbsolutePath, Directory, Reference, Variables, WebAddress

_TEAM = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_DAY = 24 * 3600


class E2BEndpoint(Schema):
    """Where the API is reached. The secret is an API key; who holds it acts for one team."""

    url: WebAddress = "https://api.e2b.app"
    """The API's address. Plain http only to this very machine: the key travels in a header."""
    team_id: str | None = None
    """The team that the key must belong to. Without it, the one that the service says it belongs to."""
    sandbox_url: WebAddress | None = None
    """Where the agents of all sandboxes are reached, for a service of one's own. None: as the service names it."""
    tls_ca: AbsolutePath | None = None
    """File with the authority that signed the servers' certificates, for a service of one's own. Absolute path."""

    @field_validator("team_id")
    @classmethod
    def _identifier(cls, value: str | None) -> str | None:
        if value is not None and not _TEAM.fullmatch(value):
            raise ValueError("must be the id of a team: a UUID in lower case")
        return value


class E2BConfig(Schema):
    """What kind of sandbox is made: from which template, and for how long."""

    template: Reference = "base"
    """A template's name or id, with its tag where it has one. It brings processors, memory and disk."""
    env: Variables = Field(default_factory=dict)
    """Variables of every process in the sandbox. Not for secrets: a running sandbox shows them to its processes."""
    lifetime_seconds: int = Field(default=3600, ge=60, le=_DAY)
    """How far ahead the service's own deadline is kept, at which it kills the sandbox. It always has one; how much a
    team may ask for depends on its plan."""
    internet_access: bool = True
    """Whether the sandbox may reach the internet."""
    workspace: Directory = "."
    """The directory with the work, whose files are saved. `.` is where commands start: the home of the template's user,
    unless that names another one."""
