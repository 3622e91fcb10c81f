"""The provider of Daytona's sandboxes, over its REST API.

Proof rests on these facts, each of which has cost somebody a sandbox that ran on unseen:

- A sandbox is its id. Names are freed while the old sandbox may still execute, so only `find` goes by a name.
- `stopped` and `archived` are proof where the desired state agrees, `destroyed` always, an error never.
- **A 404 is not proof by itself.** A sandbox whose deletion was asked for and failed is hidden behind it and may
  execute for ever; only the list with `includeErroredDeleted` shows it. `inspect` answers `Gone` on a 404 only together
  with such a list, read to its last page, that does not show the exact id, and `Unknown` without one. That list comes
  from an index that lags and flaps, so such a `Gone` is not `stated`: it counts when two looks `absence_apart` seconds
  apart agree, which is for the caller to see to.
- Accepting a stop or a deletion is not finishing it, and "state change in progress" (409, formerly 400) is `BUSY`.
- What the service does by itself to a stopped sandbox (auto-delete) or to any one (its deadline) would delete what a
  stop is to keep: both are turned off, and seen to be off, before anything is stopped.

What is asked for ends within its bound, and is never repeated.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Generator, Mapping
from datetime import datetime, timedelta
from typing import Any, ClassVar
from urllib.parse import urlsplit

from providers import archiving
from providers.contract import (
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
from providers.daytona import answers, commands, packing
from providers.daytona.answers import Sandbox
from providers.daytona.connection import api, is_jwt
from providers.daytona.schemas import DaytonaConfig, DaytonaEndpoint
from providers.failures import Call, UnlessGone
from providers.fields import safe_url
from providers.http_api import Conversation, told_at
from providers.reading import carries, carrying, elements, not_understood, text, to_the_end, unfit

_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_PAGE = 200
_PAGES = 500


class DaytonaProvider(Provider[DaytonaEndpoint, DaytonaConfig]):
    """Sandboxes of one organisation. The secret is an API key that may write and delete sandboxes, or a user's JWT."""

    key = "daytona"
    label = "Daytona"
    Endpoint = DaytonaEndpoint
    Config = DaytonaConfig
    needs_secret = True
    capabilities: ClassVar[Capabilities] = Capabilities(
        finds_by_name=True,
        keeps_files=True,
        has_deadline=True,
        # The row is written while the create is answered; a request that hangs in front of it may come late.
        creation_window=300.0,
        absence_apart=120.0,
        proves_no_allocation=frozenset({ErrorKind.INVALID, ErrorKind.NAME_TAKEN}),
        archives=True,
    )

    def __init__(self, endpoint: DaytonaEndpoint, secret: str | None = None) -> None:
        super().__init__(endpoint, secret)
        self._api = api(endpoint, secret)

    @classmethod
    def lifetime(cls, config: DaytonaConfig) -> float | None:
        """The service counts whole minutes, and knows no deadline under one."""
        return float(config.lifetime_seconds) if config.lifetime_seconds and config.ttl_minutes else None

    def identify(self, *, within: float) -> str:
        """Return the organisation that the service says the key belongs to: another key of it is the same account.

        Raises `IDENTITY` when the endpoint names another one.
        """
        expected = self.endpoint.organization_id
        with self._api.conversation(Call.IDENTIFY, within) as conversation:
            # A user's JWT belongs to no organisation: one that it lets us read is the one that we act for.
            key = None if is_jwt(self.secret) else conversation.ask("GET", "/api-keys/current")
            if expected is not None and (key is None or (isinstance(key, dict) and key.get("organizationId") is None)):
                # Likewise a server that does not say whose a key is.
                organization = text(conversation.ask("GET", f"/organizations/{expected}"), "id")
            else:
                organization = text(key, "organizationId")
        self._expect(organization)
        return f"daytona {organization}"

    def create(self, name: str, marks: Mapping[str, str], config: DaytonaConfig, *, within: float) -> Created:
        """Ask for a sandbox and answer with its id, whatever else the service says of it: `inspect` has the rest."""
        require_name(name)
        with self._api.conversation(Call.CREATE, within) as conversation:
            seen = self._read(conversation.ask("POST", "/sandbox", body=_creation(name, marks, config)))
        return Created(seen.resource, ready=isinstance(answers.sighting(seen), Running))

    def find(self, name: str, marks: Mapping[str, str], *, within: float) -> Resource | None:
        """Look by the name, and, because a deletion frees it, by the marks: also among errored and deleted ones.

        Without marks it goes by the name alone. One that has the name and not the marks is answered only where no
        other one carries them.
        """
        with self._api.conversation(Call.FIND, within) as conversation:
            named = self._named(conversation, name) if is_name(name) else None
            if not marks or (named is not None and carries(named, marks)):
                return named
            listed, _ = self._listed(conversation, {"labels": json.dumps(dict(marks))})
        return answers.creation(name, marks, listed) or named

    def inspect(self, resource_id: str, *, within: float) -> Sighting:
        """A read may be answered from a cache that is at most ten seconds old and forgotten at every change.

        `Gone` on a 404 needs a complete list that includes errored and deleted sandboxes; see this module's docstring.
        """
        _require_id(resource_id)
        with self._api.conversation(Call.INSPECT, within) as conversation:
            with UnlessGone():
                return answers.sighting(self._look(conversation, resource_id))
            listed, complete = self._listed(conversation, {"id": resource_id})
        return answers.absence(resource_id, listed, complete=complete)

    def start(self, resource_id: str, *, within: float) -> None:
        """A paused sandbox goes on where it was. One in a recoverable error is recovered, which starts it.

        Raises `CANNOT_START` for an error that the service says cannot be recovered, and where it says that it gives
        a full sandbox no more space; `DISK_FULL` for an error for a full disk of which it says neither.
        """
        _require_id(resource_id)
        with self._api.conversation(Call.START, within) as conversation:
            seen = self._look(conversation, resource_id)
            if self._recovered(conversation, seen):
                return
            match answers.sighting(seen):
                case Running():
                    return
                case Stopped():
                    self._change(conversation, resource_id, "/start")
                case other if answers.cannot_recover(seen):
                    raise ProviderError(ErrorKind.CANNOT_START, unfit(other).excerpt)
                case Unknown(disk_full=True) as other:
                    raise ProviderError(ErrorKind.DISK_FULL, unfit(other).excerpt)
                case other:
                    raise unfit(other)

    def recover(self, resource_id: str, *, within: float) -> None:
        """A repair that the service offers for some errors, a full disk among them. One that runs needs none."""
        _require_id(resource_id)
        with self._api.conversation(Call.RECOVER, within) as conversation:
            seen = self._look(conversation, resource_id)
            sighting = answers.sighting(seen)
            if not self._recovered(conversation, seen) and not isinstance(sighting, Running):
                raise unfit(sighting)

    def stop(self, resource_id: str, *, grace: float, within: float) -> None:
        """The service has a grace period of its own; without any grace it is told to use force.

        What would delete it (auto-delete, and the service's deadline) is turned off first, also for one that is
        stopped already: stopping an ephemeral sandbox *is* deleting it. Raises `REFUSED` where the service keeps to
        either, and for one in an error, which it cannot stop, and which may still execute.
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
                    self._keep(conversation, seen)
                case other:
                    raise unfit(other)

    def delete(self, resource_id: str, *, within: float) -> None:
        """A 404 means that there is nothing to ask for, perhaps because the last deletion failed: see `inspect`.

        Raises `REFUSED` for one that was forked: its forks have to be deleted first, and are never deleted here, for
        we made none of them, and somebody may need them.
        """
        _require_id(resource_id)
        with self._api.conversation(Call.DELETE, within) as conversation:
            try:
                conversation.ask("DELETE", f"/sandbox/{resource_id}")
            except ProviderError as error:
                if error.kind is ErrorKind.REFUSED and "fork children" in error.excerpt:
                    raise self._forked(conversation, resource_id, error) from None
                if error.kind is not ErrorKind.NOT_FOUND:
                    raise

    def extend(self, resource_id: str, seconds: float, *, within: float) -> datetime:
        """Set the service's deadline in whole minutes, by its own clock; one that is late enough is left as it is.

        Raises `REFUSED` where the service keeps to an earlier one (an organisation may have a longest life of its
        sandboxes), and for a stopped sandbox without a deadline: that is how a stop left it, for its files' sake.
        """
        _require_id(resource_id)
        with self._api.conversation(Call.EXTEND, within) as conversation:
            response = conversation.request("GET", f"/sandbox/{resource_id}")
            seen = self._the(resource_id, conversation.read(response))
            sighting = answers.sighting(seen)
            if isinstance(sighting, Gone):
                raise unfit(sighting)
            if isinstance(sighting, Stopped) and not seen.has_deadline:
                raise ProviderError(ErrorKind.REFUSED, "the sandbox is stopped, and kept without a deadline")
            wanted = told_at(response) + timedelta(seconds=seconds)
            if _reaches(seen, wanted):
                return _deadline(seen)
            # The service counts from now; one that counts from the creation, as it does for a new sandbox, is told so.
            for since in (told_at(response), seen.created):
                if since is None:
                    continue
                minutes = max(1, math.ceil((wanted - since).total_seconds() / 60))
                seen = self._change(conversation, resource_id, f"/ttl/{minutes}")
                if _reaches(seen, wanted):
                    return _deadline(seen)
        ends = seen.resource.expires_at
        raise ProviderError(
            ErrorKind.REFUSED, f"the service keeps its deadline at {ends.isoformat() if ends else 'an unknown time'}"
        )

    def execute(self, resource_id: str, command: Command, *, within: float) -> Execution:
        """Needs a few programs in the image. See `providers.daytona.commands`."""
        _require_id(resource_id)
        with self._api.conversation(Call.EXECUTE, within) as conversation:
            return commands.run(conversation, self._running(conversation, resource_id), command)

    def archive(self, resource_id: str, path: str, *, within: float) -> Generator[bytes, None, None]:
        """Needs a few programs in the image, and reads as the user that commands run as. See `packing`."""
        _require_id(resource_id)
        archiving.check(path)
        with self._api.conversation(Call.ARCHIVE, within) as conversation:
            yield from packing.archive(conversation, self._running(conversation, resource_id), path)

    @classmethod
    def workspace(cls, config: DaytonaConfig) -> str:
        return config.workspace

    def list(self, marks: Mapping[str, str], *, within: float) -> Listing:
        """Errored ones whose deletion was asked for are included. The index may lag: absence here proves nothing."""
        query = {"labels": json.dumps(dict(marks))} if marks else {}
        with self._api.conversation(Call.LIST, within) as conversation:
            listed, complete = self._listed(conversation, query)
        existing = (seen.resource for seen in listed if seen.state != "destroyed")
        return Listing(carrying(existing, marks), complete=complete)

    def _named(self, conversation: Conversation, name: str) -> Resource | None:
        try:
            seen = self._read(conversation.ask("GET", f"/sandbox/{name}"))
        except ProviderError as error:
            if error.kind is not ErrorKind.NOT_FOUND:
                raise
            return None
        # The path also takes ids.
        return seen.resource if seen.resource.name == name else None

    def _look(self, conversation: Conversation, resource_id: str) -> Sandbox:
        return self._the(resource_id, conversation.ask("GET", f"/sandbox/{resource_id}"))

    def _the(self, resource_id: str, answer: object) -> Sandbox:
        seen = self._read(answer)
        if seen.resource.resource_id != resource_id:
            # The path also takes names, and this is another sandbox whose name is our id.
            raise ProviderError(ErrorKind.PROTOCOL, "not understood: a description of another sandbox")
        return seen

    def _forked(self, conversation: Conversation, resource_id: str, refusal: ProviderError) -> ProviderError:
        """Say which forks are in the way of a deletion, or only that some are where the service does not tell."""
        try:
            forks = [
                text(item, "id") for item in elements(conversation.ask("GET", f"/sandbox/{resource_id}/forks"), "forks")
            ]
        except ProviderError:
            return refusal
        number = "1 fork" if len(forks) == 1 else f"{len(forks)} forks"
        return ProviderError(
            ErrorKind.REFUSED, f"{number} of this sandbox must be deleted first: {', '.join(sorted(forks))}"
        )

    def _change(
        self, conversation: Conversation, resource_id: str, path: str, query: Mapping[str, str] | None = None
    ) -> Sandbox:
        return self._the(resource_id, conversation.ask("POST", f"/sandbox/{resource_id}{path}", query=query))

    def _recovered(self, conversation: Conversation, seen: Sandbox) -> bool:
        """Ask for a recovery where the service offers one."""
        if not answers.may_recover(seen):
            return False
        self._change(conversation, seen.resource.resource_id, "/recover")
        return True

    def _keep(self, conversation: Conversation, seen: Sandbox) -> None:
        """See to it that a stop leaves the files, for as long as nobody deletes them.

        Where an organisation's longest life refuses to be turned off, they are kept until the deadline that it sets: a
        stop brings it no nearer, and every look tells it.
        """
        resource_id = seen.resource.resource_id
        if not answers.stays_after_stop(seen):
            seen = self._change(conversation, resource_id, "/autodelete/-1")
        has_longest_life = False
        if seen.has_deadline:
            try:
                seen = self._change(conversation, resource_id, "/ttl/0")
            except ProviderError as error:
                if error.kind is not ErrorKind.REFUSED:
                    raise
                has_longest_life = True
                seen = self._look(conversation, resource_id)
        # The last answer speaks for both.
        if not answers.stays_after_stop(seen):
            raise ProviderError(ErrorKind.REFUSED, "the sandbox would be deleted after a stop, and keeps to it")
        if seen.has_deadline and not has_longest_life:
            raise ProviderError(ErrorKind.REFUSED, "the service would destroy the sandbox at a time, and keeps to it")

    def _listed(self, conversation: Conversation, query: Mapping[str, str]) -> tuple[tuple[Sandbox, ...], bool]:
        """Read a list to its end. The second value is false where that was not reached."""
        asked = {**query, "limit": str(_PAGE), "includeErroredDeleted": "true"}

        def page(cursor: str | None) -> tuple[tuple[Sandbox, ...], str | None]:
            at = {"cursor": cursor} if cursor else {}
            read = answers.page(conversation.ask("GET", "/sandbox", query={**asked, **at}))
            for seen in read.items:
                self._expect(seen.organization)
            return read.items, read.cursor

        listed, complete = to_the_end(page, most=_PAGES)
        # One that changes while the pages are read may be met twice.
        return tuple({seen.resource.resource_id: seen for seen in listed}.values()), complete

    def _read(self, answer: object) -> Sandbox:
        seen = answers.sandbox(answer)
        self._expect(seen.organization)
        return seen

    def _expect(self, organization: str) -> None:
        if self.endpoint.organization_id not in {None, organization}:
            raise ProviderError(ErrorKind.IDENTITY, f"the key belongs to another organisation: {organization}")

    def _running(self, conversation: Conversation, resource_id: str) -> str:
        """Return the address of a running sandbox's toolbox. Raises `REFUSED` for one that is not running."""
        seen = self._look(conversation, resource_id)
        if seen.state == "destroyed":
            raise ProviderError(ErrorKind.NOT_FOUND, "the sandbox is destroyed")
        if seen.state != "started":
            raise ProviderError(ErrorKind.REFUSED, f"the sandbox is not running: {seen.state or 'no state'}")
        return f"{self._toolbox(seen)}/{resource_id}"

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


def _reaches(seen: Sandbox, wanted: datetime) -> bool:
    return seen.resource.expires_at is not None and seen.resource.expires_at >= wanted


def _deadline(seen: Sandbox) -> datetime:
    if seen.resource.expires_at is None:
        raise not_understood("the deadline of a sandbox")
    return seen.resource.expires_at


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
