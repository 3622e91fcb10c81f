"""The provider of containers, over the Docker Engine API.

Proof rests on these facts of the API:

- A container has an id that is never used again, and a process namespace of its own. When its first process is gone,
  the kernel has killed all others in it, those of `exec` included: an engine's `exited` speaks for all of them.
- A container that is gone is in neither of two sources: its own description (404) and the list of all containers.
- Containers are made without restart policy and without removal on exit: an engine starts none again on its own, and
  none disappears unasked.

What is asked for ends within its bound, over one connection of its own, and is never repeated.
"""

from __future__ import annotations

import math
import posixpath
import re
from collections.abc import Generator, Mapping
from contextlib import closing
from typing import Any, ClassVar

from providers import archiving
from providers.contract import (
    Capabilities,
    Command,
    Created,
    ErrorKind,
    Execution,
    Gone,
    Listing,
    Provider,
    ProviderError,
    Resource,
    Running,
    Sighting,
    Unknown,
    is_name,
    require_name,
)
from providers.docker import answers, commands
from providers.docker.connection import Client, Conversation, Engine
from providers.docker.schemas import DockerConfig, DockerEndpoint
from providers.failures import Answered, Call, UnlessGone
from providers.reading import carrying, text, unfit

_ID = re.compile(r"[0-9a-f]{64}")
_PIECE = 1 << 16


class DockerProvider(Provider[DockerEndpoint, DockerConfig]):
    """Containers of one engine. There is no secret: who may call is decided by the socket's file mode, or by TLS."""

    key = "docker"
    label = "Docker"
    Endpoint = DockerEndpoint
    Config = DockerConfig
    capabilities: ClassVar[Capabilities] = Capabilities(
        finds_by_name=True,
        keeps_files=True,
        has_deadline=False,
        # An engine that copies an image to a busy disk takes its time before the container can be seen.
        creation_window=120.0,
        proves_no_allocation=frozenset({ErrorKind.INVALID, ErrorKind.NAME_TAKEN}),
        archives=True,
    )

    def __init__(self, endpoint: DockerEndpoint, secret: str | None = None) -> None:
        super().__init__(endpoint, secret)
        self._engine = Engine(endpoint)

    def identify(self, *, within: float) -> str:
        """Return what the engine is recognised by: for Docker, its own engine id.

        Podman invents a new id for each answer, so there it is the anchor volume that the endpoint names (its name,
        place and time of creation), or else the host's name and the storage directory.

        Raises `IDENTITY` when the endpoint names an anchor and the engine has none of that name.
        """
        with self._engine.conversation(Call.IDENTIFY, within) as conversation:
            is_podman = conversation.ping().is_podman
            anchor = self._anchor(conversation)
            with conversation.asking(Call.IDENTIFY) as client:
                if not is_podman:
                    return f"docker {text(client.info(), 'ID')}{anchor}"
                if anchor:
                    return f"podman{anchor}"
                info = client.info()
                return f"podman {text(info, 'Name')}:{text(info, 'DockerRootDir')}"

    def create(self, name: str, marks: Mapping[str, str], config: DockerConfig, *, within: float) -> Created:
        require_name(name)
        with self._engine.conversation(Call.CREATE, within) as conversation:
            with conversation.asking(Call.CREATE) as client:
                container = answers.identifier(
                    client.create_container(
                        config.image,
                        list(config.command),
                        name=name,
                        labels=dict(marks),
                        environment=dict(config.env),
                        host_config=_host_config(client, config),
                        use_config_proxy=False,
                    )
                )
            # From here on something is allocated, whatever fails.
            with conversation.asking(Call.START) as client:
                client.start(container)
        return Created(Resource(container, name, dict(marks)))

    def find(self, name: str, marks: Mapping[str, str], *, within: float) -> Resource | None:  # noqa: ARG002 - names are final here
        if not is_name(name):
            return None
        with self._engine.conversation(Call.LIST, within) as conversation, conversation.asking(Call.LIST) as client:
            found = answers.listed(client.containers(all=True, filters={"name": [f"^{name}$"]}))
        return next((resource for resource in found if resource.name == name), None)

    def inspect(self, resource_id: str, *, within: float) -> Sighting:
        _require_id(resource_id)
        with self._engine.conversation(Call.INSPECT, within) as conversation:
            with UnlessGone(), conversation.asking(Call.INSPECT) as client:
                return answers.sighting(client.inspect_container(resource_id), resource_id)
            # The second source: a list of everything, of which the engine's filter only saves the rest.
            with conversation.asking(Call.INSPECT) as client:
                found = answers.listed(client.containers(all=True, filters={"id": [resource_id]}))
        for resource in found:
            if resource.resource_id == resource_id:
                return Unknown(resource, "described as absent, but listed")
        return Gone()

    def start(self, resource_id: str, *, within: float) -> None:
        """A paused sandbox goes on where it was frozen: that is what starting a suspended one means."""
        _require_id(resource_id)
        with self._engine.conversation(Call.START, within) as conversation, conversation.asking(Call.START) as client:
            try:
                client.start(resource_id)
            except Answered as error:
                if not _is_paused(client, resource_id, error):
                    raise
                client.unpause(resource_id)

    def stop(self, resource_id: str, *, grace: float, within: float) -> None:
        """A paused sandbox is killed without grace where the engine refuses to stop it.

        To be polite to it would be to let it go on.
        """
        _require_id(resource_id)
        with self._engine.conversation(Call.STOP, within) as conversation, conversation.asking(Call.STOP) as client:
            try:
                client.stop(resource_id, timeout=max(0, math.ceil(grace)))
            except Answered as error:
                if not _is_paused(client, resource_id, error):
                    raise
                client.kill(resource_id, "SIGKILL")
                # The kernel holds the signal back from frozen processes. Some engines thaw them for it, some do not.
                if answers.is_paused(client.inspect_container(resource_id)):
                    client.unpause(resource_id)

    def delete(self, resource_id: str, *, within: float) -> None:
        _require_id(resource_id)
        conversing = self._engine.conversation(Call.DELETE, within)
        with conversing as conversation, UnlessGone(), conversation.asking(Call.DELETE) as client:
            client.remove_now(resource_id)

    def execute(self, resource_id: str, command: Command, *, within: float) -> Execution:
        """Needs `/bin/sh` in the image, and `head` for a command with stdin. See `providers.docker.commands`."""
        _require_id(resource_id)
        with self._engine.conversation(Call.EXECUTE, within) as conversation:
            return commands.run(conversation, resource_id, command)

    def archive(self, resource_id: str, path: str, *, within: float) -> Generator[bytes, None, None]:
        """The engine reads the files itself, so nothing is needed in the image.

        It says nothing of a file that it could not read, and leaves it out: Docker only notes it in its log.
        """
        _require_id(resource_id)
        archiving.check(path)
        with self._engine.conversation(Call.ARCHIVE, within) as conversation:
            with conversation.asking(Call.ARCHIVE) as client:
                details = client.inspect_container(resource_id)
                sighting = answers.sighting(details, resource_id)
            if not isinstance(sighting, Running):
                raise unfit(sighting)
            directory = posixpath.normpath(posixpath.join(answers.working_directory(details), path))
            if not directory.strip("/"):
                why = "commands start in /, which is no workspace: the configuration has to name one"
                raise ProviderError(ErrorKind.MISSING_PATH, why)
            with (
                conversation.asking(Call.ARCHIVE) as client,
                closing(client.open_archive(resource_id, directory)) as found,
            ):
                if not answers.is_directory(found.headers.get("X-Docker-Container-Path-Stat", "")):
                    raise archiving.missing(path)
                for piece in archiving.whole(found.iter_content(_PIECE)):
                    conversation.deadline.left()
                    yield piece

    @classmethod
    def workspace(cls, config: DockerConfig) -> str:
        return config.workspace

    def list(self, marks: Mapping[str, str], *, within: float) -> Listing:
        filters = {"label": [f"{key}={value}" for key, value in marks.items()]} if marks else None
        with self._engine.conversation(Call.LIST, within) as conversation, conversation.asking(Call.LIST) as client:
            found = answers.listed(client.containers(all=True, filters=filters))
        # The API has no pages: what it answers is all there is.
        return Listing(carrying(found, marks), complete=True)

    def _anchor(self, conversation: Conversation) -> str:
        name = self.endpoint.anchor
        if name is None:
            return ""
        try:
            with conversation.asking(Call.IDENTIFY) as client:
                volume = client.inspect_volume(name)
                return f" {name}:{text(volume, 'Mountpoint')}:{text(volume, 'CreatedAt')}"
        except ProviderError as error:
            if error.kind is not ErrorKind.PROTOCOL:
                raise
            raise ProviderError(ErrorKind.IDENTITY, f"the engine does not have the anchor volume {name}") from None


def _require_id(resource_id: str) -> None:
    # A shorter one could be the beginning of another container's id, or its name.
    if not _ID.fullmatch(resource_id):
        raise ProviderError(ErrorKind.INVALID, "not the id of a container: 64 hexadecimal digits")


def _is_paused(client: Client, container: str, refusal: Answered) -> bool:
    try:
        return refusal.status in {409, 500} and answers.is_paused(client.inspect_container(container))
    except Answered:
        return False  # what was refused, and why, says more than this


def _host_config(client: Client, config: DockerConfig) -> dict[str, object]:
    limits: dict[str, Any] = {}
    if config.memory_mb is not None:
        limits["mem_limit"] = config.memory_mb << 20
    if config.cpus is not None:
        limits["nano_cpus"] = round(config.cpus * 1_000_000_000)
    if config.pids is not None:
        limits["pids_limit"] = config.pids
    return client.create_host_config(
        restart_policy={"Name": "no"}, auto_remove=False, network_mode=config.network, init=config.init, **limits
    )
