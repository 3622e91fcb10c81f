"""The provider of Daytona's sandboxes, over its REST API.

Proof rests on these facts, each of which has cost somebody a sandbox that ran on unseen:

- A sandbox is its id. Names are freed while the old sandbox may still execute, so only `find` goes by a name.
- `stopped` and `archived` are proof where the desired state agrees, `destroyed` always, an error never.
- **A 404 is not proof by itself.** A sandbox whose deletion was asked for and failed is hidden behind it and may
  execute for ever; only the list with `includeErroredDeleted` shows it. `inspect` answers `Gone` on a 404 only together
  with such a list, read to its last page, that does not show the exact id. A list comes from an index that may lag by
  seconds, so a single look is weaker than it should be: the rule of two such looks at least two minutes apart needs an
  engine that remembers the first one, and does not exist yet. Without the complete list the answer is `Unknown`.
- Accepting a stop or a deletion is not finishing it, and "state change in progress" (409, formerly 400) is `BUSY`.

What is asked for ends within its bound, over a session of its own, and is never repeated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, ClassVar
from urllib.parse import urlsplit

from providers.contract import (
    Busy,
    Capabilities,
    Command,
    Created,
    Ended,
    ErrorKind,
    Execution,
    Gone,
    Listing,
    Provider,
    ProviderError,
    Resource,
    Running,
    Sighting,
    Stopped,
    Unknown,
    is_name,
    require_name,
)
from providers.daytona import answers, commands
from providers.daytona.answers import Sandbox
from providers.daytona.connection import api
from providers.daytona.schemas import DaytonaConfig, DaytonaEndpoint
from providers.failures import Call, translated
from providers.fields import safe_url
from providers.http_api import Conversation
from providers.reading import carrying, text

_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_PAGE = 200
_PAGES = 500
_FIRST_LOOK = 0.05
_LAST_LOOK = 1.0


class DaytonaProvider(Provider[DaytonaEndpoint, DaytonaConfig]):
    """Sandboxes of one organisation. The secret is an API key that may write and delete sandboxes."""

    key = "daytona"
    label = "Daytona"
    Endpoint = DaytonaEndpoint
    Config = DaytonaConfig
    capabilities: ClassVar[Capabilities] = Capabilities(
        finds_by_name=True,
        keeps_files=True,
        has_deadline=True,
        # The row is written while the create is answered; a request that hangs in front of it may come late.
        creation_window=300.0,
        absence_apart=120.0,
        proves_no_allocation=frozenset({ErrorKind.INVALID, ErrorKind.NAME_TAKEN}),
    )

    def __init__(self, endpoint: DaytonaEndpoint, secret: str | None = None) -> None:
        super().__init__(endpoint, secret)
        self._api = api(endpoint, secret)

    def identify(self, *, within: float) -> str:
        """Return the organisation that the service says the key belongs to: another key of it is the same account.

        Raises `IDENTITY` when the endpoint names another one.
        """
        expected = self.endpoint.organization_id
        with self._api.conversation(Call.IDENTIFY, within) as conversation:
            key = conversation.ask("GET", "/api-keys/current")
            if isinstance(key, dict) and key.get("organizationId") is None and expected is not None:
                # A server that does not say it: one that lets this key read this organisation means the same.
                organization = text(conversation.ask("GET", f"/organizations/{expected}"), "id")
            else:
                organization = text(key, "organizationId")
        self._expect(organization)
        return f"daytona {organization}"

    def create(self, name: str, marks: Mapping[str, str], config: DaytonaConfig, *, within: float) -> Created:
        """Create a sandbox and wait until it has started, which may include building an image.

        Raises `TIMEOUT` where that takes longer than the bound, and `REFUSED` where it ends in an error: in both a
        sandbox exists, under this name.
        """
        require_name(name)
        with self._api.conversation(Call.CREATE, within) as conversation:
            seen = self._read(conversation.ask("POST", "/sandbox", body=_creation(name, marks, config)))
            look = _FIRST_LOOK
            # From here on something is allocated, whatever fails.
            while isinstance(sighting := answers.sighting(seen), Busy):
                with translated(Call.CREATE, conversation.deadline):
                    conversation.deadline.pause(look)
                look = min(2 * look, _LAST_LOOK)
                seen = self._started(conversation, seen.resource.resource_id)
        if not isinstance(sighting, Running):
            raise ProviderError(ErrorKind.REFUSED, f"created, but {_summary(sighting)}")
        return Created(seen.resource)

    def find(self, name: str, marks: Mapping[str, str], *, within: float) -> Resource | None:  # noqa: ARG002 - to come
        """One whose deletion was asked for has lost its name already, and is not found by it."""
        if not is_name(name):
            return None
        with self._api.conversation(Call.FIND, within) as conversation:
            try:
                seen = self._read(conversation.ask("GET", f"/sandbox/{name}"))
            except ProviderError as error:
                if error.kind is not ErrorKind.NOT_FOUND:
                    raise
                return None
        # The path also takes ids.
        return seen.resource if seen.resource.name == name else None

    def inspect(self, resource_id: str, *, within: float) -> Sighting:
        """A read may be answered from a cache that is at most ten seconds old and forgotten at every change.

        `Gone` on a 404 needs a complete list that includes errored and deleted sandboxes; see this module's docstring.
        """
        _require_id(resource_id)
        with self._api.conversation(Call.INSPECT, within) as conversation:
            try:
                return answers.sighting(self._look(conversation, resource_id))
            except ProviderError as error:
                if error.kind is not ErrorKind.NOT_FOUND:
                    raise
            listed, complete = self._listed(conversation, {"id": resource_id})
        return answers.absence(resource_id, listed, complete=complete)

    def start(self, resource_id: str, *, within: float) -> None:
        """A paused sandbox goes on where it was. One in a recoverable error is recovered, which starts it."""
        _require_id(resource_id)
        with self._api.conversation(Call.START, within) as conversation:
            seen = self._look(conversation, resource_id)
            if seen.state == "error" and seen.recoverable:
                self._change(conversation, resource_id, "/recover")
                return
            match answers.sighting(seen):
                case Running():
                    return
                case Stopped():
                    self._change(conversation, resource_id, "/start")
                case other:
                    raise _unfit(other)

    def stop(self, resource_id: str, *, grace: float, within: float) -> None:
        """The service has a grace period of its own; without any grace it is told to use force.

        One that the service would delete after a stop is told not to first: stopping an ephemeral one *is* deleting it.
        Raises `REFUSED` for one in an error, which the service cannot stop, and may still execute.
        """
        _require_id(resource_id)
        with self._api.conversation(Call.STOP, within) as conversation:
            seen = self._look(conversation, resource_id)
            match answers.sighting(seen):
                case Running() | Stopped(ended=Ended.SUSPENDED):
                    self._keep(conversation, seen)
                    query = {} if grace > 0 else {"force": "true"}
                    self._change(conversation, resource_id, "/stop", query)
                case Stopped():
                    return
                case other:
                    raise _unfit(other)

    def delete(self, resource_id: str, *, within: float) -> None:
        """A 404 means that there is nothing to ask for, perhaps because the last deletion failed: see `inspect`."""
        _require_id(resource_id)
        with self._api.conversation(Call.DELETE, within) as conversation:
            try:
                conversation.ask("DELETE", f"/sandbox/{resource_id}")
            except ProviderError as error:
                if error.kind is not ErrorKind.NOT_FOUND:
                    raise

    def execute(self, resource_id: str, command: Command, *, within: float) -> Execution:
        """Needs a few programs in the image. See `providers.daytona.commands`."""
        _require_id(resource_id)
        with self._api.conversation(Call.EXECUTE, within) as conversation:
            seen = self._look(conversation, resource_id)
            if seen.state == "destroyed":
                raise ProviderError(ErrorKind.NOT_FOUND, "the sandbox is destroyed")
            if seen.state != "started":
                raise ProviderError(ErrorKind.REFUSED, f"the sandbox is not running: {seen.state or 'no state'}")
            return commands.run(conversation, f"{self._toolbox(seen)}/{resource_id}", command)

    def list(self, marks: Mapping[str, str], *, within: float) -> Listing:
        """Errored ones whose deletion was asked for are included. The index may lag: absence here proves nothing."""
        query = {"labels": json.dumps(dict(marks))} if marks else {}
        with self._api.conversation(Call.LIST, within) as conversation:
            listed, complete = self._listed(conversation, query)
        existing = (seen.resource for seen in listed if seen.state != "destroyed")
        return Listing(carrying(existing, marks), complete=complete)

    def _look(self, conversation: Conversation, resource_id: str) -> Sandbox:
        seen = self._read(conversation.ask("GET", f"/sandbox/{resource_id}"))
        if seen.resource.resource_id != resource_id:
            # The path also takes names, and this is another sandbox whose name is our id.
            raise ProviderError(ErrorKind.PROTOCOL, "not understood: a description of another sandbox")
        return seen

    def _started(self, conversation: Conversation, resource_id: str) -> Sandbox:
        try:
            return self._look(conversation, resource_id)
        except ProviderError as error:
            # Of a creation these would say something else: that nothing was made, or that the request is wrong.
            if error.kind in {ErrorKind.INVALID, ErrorKind.NAME_TAKEN, ErrorKind.NOT_FOUND}:
                raise ProviderError(ErrorKind.REFUSED, f"created, but then {error.excerpt}") from None
            raise

    def _change(
        self, conversation: Conversation, resource_id: str, path: str, query: Mapping[str, str] | None = None
    ) -> Sandbox:
        return self._read(conversation.ask("POST", f"/sandbox/{resource_id}{path}", query=query))

    def _keep(self, conversation: Conversation, seen: Sandbox) -> None:
        """See to it that a stop leaves the files."""
        if seen.auto_delete is not None and seen.auto_delete >= 0:
            seen = self._change(conversation, seen.resource.resource_id, "/autodelete/-1")
            if seen.auto_delete is None or seen.auto_delete >= 0:
                raise ProviderError(ErrorKind.REFUSED, "the sandbox would be deleted after a stop, and keeps to it")

    def _listed(self, conversation: Conversation, query: Mapping[str, str]) -> tuple[tuple[Sandbox, ...], bool]:
        """Read a list to its end. The second value is false where that was not reached."""
        found: dict[str, Sandbox] = {}
        cursor: str | None = None
        cursors: set[str] = set()
        for _ in range(_PAGES):
            at = {"cursor": cursor} if cursor else {}
            asked = {**query, "limit": str(_PAGE), "includeErroredDeleted": "true", **at}
            page = answers.page(conversation.ask("GET", "/sandbox", query=asked))
            for seen in page.items:
                self._expect(seen.organization)
                found[seen.resource.resource_id] = seen
            cursor = page.cursor
            if cursor is None:
                return tuple(found.values()), True
            if cursor in cursors:
                raise ProviderError(ErrorKind.PROTOCOL, "not understood: a list that goes round in circles")
            cursors.add(cursor)
        return tuple(found.values()), False

    def _read(self, answer: object) -> Sandbox:
        seen = answers.sandbox(answer)
        self._expect(seen.organization)
        return seen

    def _expect(self, organization: str) -> None:
        if self.endpoint.organization_id not in {None, organization}:
            raise ProviderError(ErrorKind.IDENTITY, f"the key belongs to another organisation: {organization}")

    def _toolbox(self, seen: Sandbox) -> str:
        """Return where commands are run: an address that the API names. The key goes there, so never in the clear."""
        try:
            url = safe_url(seen.toolbox_url)
            safe = urlsplit(url).scheme == "https" or urlsplit(self.endpoint.url).scheme == "http"
        except ValueError:
            safe = False
        if not safe:
            raise ProviderError(ErrorKind.PROTOCOL, "not understood: the address of a sandbox's toolbox")
        return url


def _require_id(resource_id: str) -> None:
    # Paths take names, too: what does not look like an id could be another sandbox's name.
    if not _ID.fullmatch(resource_id):
        raise ProviderError(ErrorKind.INVALID, "not the id of a sandbox: a UUID")


def _unfit(sighting: Sighting) -> ProviderError:
    """Say why a sandbox cannot be changed now."""
    match sighting:
        case Gone():
            return ProviderError(ErrorKind.NOT_FOUND, "the sandbox is destroyed")
        case Busy():
            return ProviderError(ErrorKind.BUSY, f"state change in progress: {sighting.transition}")
    return ProviderError(ErrorKind.REFUSED, f"the sandbox is {_summary(sighting)}")


def _summary(sighting: Sighting) -> str:
    return sighting.reason if isinstance(sighting, Unknown) else type(sighting).__name__.lower()


def _creation(name: str, marks: Mapping[str, str], config: DaytonaConfig) -> dict[str, Any]:
    """Return the body of a creation. What ends a sandbox is always said: the service's defaults would stop ours."""
    body: dict[str, Any] = {
        "name": name,
        "labels": dict(marks),
        "env": dict(config.env),
        "target": config.target,
        "user": config.user,
        "snapshot": config.snapshot,
        "autoStopInterval": config.auto_stop_minutes,
        "autoPauseInterval": 0,
        "autoArchiveInterval": config.auto_archive_minutes,
        "autoDeleteInterval": config.auto_delete_minutes,
        "ttlMinutes": config.ttl_minutes,
    }
    if config.image is not None:
        resources = {"cpu": config.cpu, "memory": config.memory_gb, "disk": config.disk_gb, "gpu": config.gpu}
        body |= {"buildInfo": {"dockerfileContent": f"FROM {config.image}\n"}, **resources}
    return {key: value for key, value in body.items() if value is not None}
