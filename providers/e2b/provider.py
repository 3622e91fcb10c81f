"""The provider of E2B's sandboxes, over its REST API.

Proof rests on these facts:

- A sandbox is its id. The service knows no names and makes nothing unique; the name of a creation is a mark, and the
  key that makes a repeated creation answer the first one's sandbox.
- `paused` is proof only once the service says how it was paused; until then the processes may still execute. A pause of
  the disk alone ended them, a pause with memory suspended them.
- Reads answer 404 for a sandbox that is gone, for one that is being killed, and for another team's. `inspect` answers
  `Gone` only beside a list of all the team's sandboxes, in every state and to its last page, that does not show the
  exact id; and who the team is, `identify` asks. A kill takes seconds, so such looks count a while apart.
- Connecting resumes a sandbox and moves its deadline, and so do the service's other conveniences. Only `start` does it.

What is asked for ends within its bound. Nothing is repeated, but for the one resume that the
service itself asks to be repeated without memory.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any, ClassVar
from urllib.parse import urlsplit

from providers import archiving
from providers.contract import (
    Capabilities,
    Command,
    Created,
    ErrorKind,
    Execution,
    Listing,
    Provider,
    ProviderError,
    Resource,
    Running,
    Sighting,
    Stopped,
    is_name,
    require_name,
    usable,
)
from providers.e2b import answers, envd, errors
from providers.e2b.answers import Sandbox
from providers.e2b.schemas import E2BConfig, E2BEndpoint
from providers.failures import Call, UnlessGone
from providers.http_api import Conversation, HttpApi, told_at
from providers.reading import carries, carrying, not_understood, text, to_the_end, unfit

_ID = re.compile(r"[a-z0-9]{1,64}")
_DOMAIN = re.compile(r"([a-z0-9]([a-z0-9-]*[a-z0-9])?\.)+[a-z]{2,}")
_NOBODYS_TEAM = "00000000-0000-0000-0000-000000000000"
_NOT_TOLD = frozenset({ErrorKind.AUTHORISATION, ErrorKind.INVALID, ErrorKind.PROTOCOL})
"""What an answer about nobody's team is that does not say whose key asked."""
_PAGE = 100
_PAGES = 1000
_UNTOLD_LIFETIME = 300
"""Seconds that the service itself takes where it is told none."""
_PAUSE_MARGIN = 60.0
"""Seconds beyond the call's bound for which the deadline has to be away when a pause begins."""
_SHARED_DOMAINS = frozenset({"e2b.app", "e2b.dev", "e2b.pro"})
"""Where all sandboxes are reached under one host name, and told apart by a header."""


class E2BProvider(Provider[E2BEndpoint, E2BConfig]):
    """Sandboxes of one team. The secret is an API key."""

    key = "e2b"
    label = "E2B"
    Endpoint = E2BEndpoint
    Config = E2BConfig
    needs_secret = True
    capabilities: ClassVar[Capabilities] = Capabilities(
        finds_by_name=True,
        keeps_files=True,
        has_deadline=True,
        # Listed once it is placed, which may come late to a request that was given up.
        creation_window=300.0,
        # Longer than a kill takes, during which a sandbox is neither described nor listed.
        absence_apart=30.0,
        proves_no_allocation=frozenset({ErrorKind.INVALID, ErrorKind.NAME_TAKEN}),
        idempotent_create=True,
        archives=True,
    )

    def __init__(self, endpoint: E2BEndpoint, secret: str | None = None) -> None:
        super().__init__(endpoint, secret)
        self._api = HttpApi(
            endpoint.url,
            secret,
            headers=lambda key: {"X-API-KEY": key},
            answered=errors.answered,
            meaning=errors.meaning,
            tls_ca=endpoint.tls_ca,
        )

    def identify(self, *, within: float) -> str:
        """Return the team that the service says the key belongs to: another key of it is the same account.

        Nothing answers "whose key is this?". Who asks about a team that is not theirs is told whose key they hold.
        Where that is not understood, the endpoint has to name the team, and one that this key may ask about is it.
        Raises `IDENTITY` when the endpoint names another team.
        """
        expected = self.endpoint.team_id
        with self._api.conversation(Call.IDENTIFY, within) as conversation:
            try:
                self._ask_about(conversation, _NOBODYS_TEAM)
            except errors.OtherTeam as told:
                if expected not in {None, told.team}:
                    raise
                return f"e2b {told.team}"
            except ProviderError as error:
                if expected is None or error.kind not in _NOT_TOLD:
                    raise
                self._ask_about(conversation, expected)
                return f"e2b {expected}"
        raise not_understood("a service that shows anybody's team: it cannot say whose key this is")

    def create(self, name: str, marks: Mapping[str, str], config: E2BConfig, *, within: float) -> Created:
        """Create a sandbox that is killed at its deadline and resumed by nothing but `start`.

        A creation repeated with the same name, marks and configuration is answered as the first one was, also when its
        sandbox has ended since: so only a look says that it runs.
        """
        require_name(name)
        body = {
            "templateID": config.template,
            "timeout": config.lifetime_seconds,
            "autoPause": False,
            "autoResume": {"enabled": False},
            "metadata": answers.metadata(name, marks, config.lifetime_seconds),
            "envVars": dict(config.env),
            "allow_internet_access": config.internet_access,
        }
        with self._api.conversation(Call.CREATE, within) as conversation:
            made = conversation.ask("POST", "/v2/sandboxes", headers={"Idempotency-Key": name}, body=body)
        return Created(usable(Resource(text(made, "sandboxID"), name, dict(marks))), ready=False)

    def find(self, name: str, marks: Mapping[str, str], *, within: float) -> Resource | None:
        """By the mark that holds the name; the others tell two of that name apart, which the service does not forbid.

        Raises `PROTOCOL` where they do not.
        """
        if not is_name(name):
            return None
        with self._api.conversation(Call.FIND, within) as conversation:
            listed, complete = self._listed(conversation, {answers.NAME: name})
        found = [seen.resource for seen in listed if seen.resource.name == name]
        ours = [resource for resource in found if carries(resource, marks)] or found
        if len(ours) > 1:
            raise not_understood(f"{len(ours)} sandboxes of one name")
        if not ours and not complete:
            raise not_understood("a list of sandboxes that does not end")
        return ours[0] if ours else None

    def inspect(self, resource_id: str, *, within: float) -> Sighting:
        """`Gone` needs a complete list of all the team's sandboxes; see this module's docstring."""
        _require_id(resource_id)
        with self._api.conversation(Call.INSPECT, within) as conversation:
            with UnlessGone():
                return answers.sighting(self._look(conversation, resource_id))
            listed, complete = self._listed(conversation, {})
        return answers.absence(resource_id, listed, complete=complete)

    def start(self, resource_id: str, *, within: float) -> None:
        """Resume a paused sandbox, and set its deadline as far ahead as its configuration said.

        Memory that cannot be restored is left out, as the service asks for: then it starts from its disk.
        """
        _require_id(resource_id)
        with self._api.conversation(Call.START, within) as conversation:
            seen = self._look(conversation, resource_id)
            match answers.sighting(seen):
                case Running():
                    return
                case Stopped():
                    body: dict[str, Any] = {"timeout": seen.lifetime or _UNTOLD_LIFETIME}
                case other:
                    raise unfit(other)
            from_disk = {**body, "memory": False}
            path = f"/v2/sandboxes/{resource_id}/connect"
            try:
                conversation.ask("POST", path, body=from_disk if seen.memory_unusable else body)
            except errors.Unresponsive:
                if seen.memory_unusable:
                    raise
                conversation.ask("POST", path, body=from_disk)

    def stop(self, resource_id: str, *, grace: float, within: float) -> None:  # noqa: ARG002 - the service has none
        """Pause a sandbox without its memory, which ends its processes: at once, the service knows no polite way.

        A deadline that could come first is moved and read back. One paused with memory stays as it is: ending what it
        remembers would mean resuming it.
        """
        _require_id(resource_id)
        with self._api.conversation(Call.STOP, within) as conversation:
            response = conversation.request("GET", f"/sandboxes/{resource_id}")
            seen = _described(conversation.read(response), resource_id)
            match answers.sighting(seen):
                case Stopped():
                    return
                case Running():
                    self._keep(conversation, seen, told_at(response), within + _PAUSE_MARGIN)
                case other:
                    raise unfit(other)
            try:
                conversation.ask("POST", f"/sandboxes/{resource_id}/pause", body={"memory": False})
            except ProviderError as error:
                # A conflict is a transition in progress, or a pause that somebody else finished first.
                if error.kind is not ErrorKind.BUSY:
                    raise
                if not isinstance(answers.sighting(self._look(conversation, resource_id)), Stopped):
                    raise

    def delete(self, resource_id: str, *, within: float) -> None:
        """Kill a running sandbox, or remove what a paused one left. A 404 means that there is nothing to ask for."""
        _require_id(resource_id)
        with self._api.conversation(Call.DELETE, within) as conversation, UnlessGone():
            conversation.ask("DELETE", f"/sandboxes/{resource_id}")

    def execute(self, resource_id: str, command: Command, *, within: float) -> Execution:
        """Needs a few programs in the template. See `providers.shell`."""
        _require_id(resource_id)
        with self._agent(Call.EXECUTE, resource_id, within) as conversation:
            return envd.run(conversation, command)

    def archive(self, resource_id: str, path: str, *, within: float) -> Generator[bytes, None, None]:
        """Needs `tar` in the template, which reads as the user that commands run as. See `providers.e2b.envd`."""
        _require_id(resource_id)
        archiving.check(path)
        with self._agent(Call.ARCHIVE, resource_id, within) as conversation:
            yield from envd.archive(conversation, path)

    @classmethod
    def workspace(cls, config: E2BConfig) -> str:
        return config.workspace

    def list(self, marks: Mapping[str, str], *, within: float) -> Listing:
        with self._api.conversation(Call.LIST, within) as conversation:
            listed, complete = self._listed(conversation, marks)
        return Listing(carrying((seen.resource for seen in listed), marks), complete=complete)

    def extend(self, resource_id: str, seconds: float, *, within: float) -> datetime:
        """Raises `REFUSED` for a paused one, which has no deadline, and for more than the team's plan allows."""
        _require_id(resource_id)
        with self._api.conversation(Call.EXTEND, within) as conversation:
            if not isinstance(answers.sighting(self._look(conversation, resource_id)), Running):
                raise ProviderError(ErrorKind.REFUSED, "only a running sandbox has a deadline")
            return self._extend(conversation, resource_id, seconds)

    @classmethod
    def lifetime(cls, config: E2BConfig) -> float | None:
        return float(config.lifetime_seconds)

    def _ask_about(self, conversation: Conversation, team: str) -> None:
        now = str(int(time.time()))
        conversation.ask("GET", f"/teams/{team}/metrics", query={"start": now, "end": now})

    def _look(self, conversation: Conversation, resource_id: str) -> Sandbox:
        return _described(conversation.ask("GET", f"/sandboxes/{resource_id}"), resource_id)

    def _keep(self, conversation: Conversation, seen: Sandbox, now: datetime, seconds: float) -> None:
        """See to it that the deadline, which kills, does not come before a pause has ended."""
        deadline = seen.resource.expires_at
        if deadline is None:
            raise not_understood("a running sandbox without a deadline")
        if deadline >= now + timedelta(seconds=seconds):
            return
        if self._extend(conversation, seen.resource.resource_id, seconds) <= deadline:
            raise ProviderError(ErrorKind.REFUSED, "the sandbox would be killed before it is paused, and keeps to it")

    def _extend(self, conversation: Conversation, resource_id: str, seconds: float) -> datetime:
        asked = {"timeout": math.ceil(seconds)}
        conversation.ask("POST", f"/sandboxes/{resource_id}/timeout", body=asked)
        deadline = self._look(conversation, resource_id).resource.expires_at
        if deadline is None:
            raise ProviderError(ErrorKind.REFUSED, "the sandbox has no deadline any more")
        return deadline

    def _listed(self, conversation: Conversation, wanted: Mapping[str, str]) -> tuple[tuple[Sandbox, ...], bool]:
        """Read a list to its end. The second value is false where that was not reached."""
        asked = {"state": "running,paused", "limit": str(_PAGE)}
        if wanted:
            asked["metadata"] = answers.query(wanted)

        def page(token: str | None) -> tuple[tuple[Sandbox, ...], str | None]:
            query = {**asked, "nextToken": token} if token else asked
            response = conversation.request("GET", "/v2/sandboxes", query=query)
            return answers.listed(conversation.read(response)), response.headers.get("x-next-token")

        listed, complete = to_the_end(page, most=_PAGES)
        # One that is resumed while the pages are read may be met twice.
        return tuple({seen.resource.resource_id: seen for seen in listed}.values()), complete

    @contextmanager
    def _agent(self, call: Call, resource_id: str, within: float) -> Iterator[Conversation]:
        """Converse with the agent in a running sandbox. Raises `REFUSED` for one that is not running."""
        with self._api.conversation(call, within) as conversation:
            seen = self._look(conversation, resource_id)
            if seen.state != "running":
                raise ProviderError(ErrorKind.REFUSED, f"the sandbox is not running: {seen.state or 'no state'}")
            left = conversation.deadline.end - time.monotonic()
        if not seen.envd_token:
            raise ProviderError(ErrorKind.REFUSED, "the sandbox has no token that commands could be run with")
        agent = envd.agent(
            self._agent_address(seen), resource_id, seen.envd_token, seen.envd_version, self.endpoint.tls_ca
        )
        with agent.conversation(call, left) as conversation:
            yield conversation

    def _agent_address(self, seen: Sandbox) -> str:
        """Return where the agent of a sandbox is reached. Only its own token goes there, and never in the clear."""
        if self.endpoint.sandbox_url is not None:
            return self.endpoint.sandbox_url
        domain = seen.domain or (urlsplit(self.endpoint.url).hostname or "").removeprefix("api.")
        if not _DOMAIN.fullmatch(domain):
            raise not_understood("the domain of a sandbox")
        if domain in _SHARED_DOMAINS:
            return f"https://sandbox.{domain}"
        return f"https://{envd.PORT}-{seen.resource.resource_id}.{domain}"


def _described(answer: object, resource_id: str) -> Sandbox:
    seen = answers.sandbox(answer)
    if seen.resource.resource_id != resource_id:
        raise not_understood("a description of another sandbox")
    return seen


def _require_id(resource_id: str) -> None:
    # The service takes what follows a hyphen for something else, and would act on what stands before it.
    if not _ID.fullmatch(resource_id):
        raise ProviderError(ErrorKind.INVALID, "not the id of a sandbox: letters and digits")
