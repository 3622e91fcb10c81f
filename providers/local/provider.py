"""The adapter: the methods of the contract, put together from the modules beside it."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field

from providers import archiving
from providers.contract import (
    Busy,
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
    Schema,
    Sighting,
    Stopped,
    Unknown,
)
from providers.fields import Directory
from providers.local import archiving as packing
from providers.local import client, ending, evidence, records
from providers.local.deadline import Deadline
from providers.local.disk import Sandbox, StateDirectory
from providers.local.supervisor import ARGUMENTS_LIMIT, STDIN_LIMIT

_BUSY_AFTER = 0.5


def _absolute(path: str) -> str:
    if not path.startswith("/") or "\0" in path:
        raise ValueError("must be an absolute path")
    return path


def _plain(text: str) -> str:
    if "\0" in text:
        raise ValueError("must not hold a zero byte")
    return text


def _variable(name: str) -> str:
    if not name or "=" in name:
        raise ValueError("must be the name of an environment variable")
    return _plain(name)


def _relative(path: str) -> str:
    if path.startswith("/"):
        raise ValueError("must be relative: it is below the sandbox's own directory")
    return path


Text = Annotated[str, AfterValidator(_plain)]


class LocalEndpoint(Schema):
    """Where this host keeps its sandboxes."""

    state_dir: Annotated[str, AfterValidator(_absolute)] = Field(
        description="Absolute path of the directory that holds the sandboxes; made at first use."
    )


class LocalConfig(Schema):
    """What kind of sandbox is made."""

    command: list[Text] = Field(
        default=[], description="Main command, run at every start in the sandbox's directory. None by default."
    )
    env: dict[Annotated[str, AfterValidator(_variable)], Text] = Field(
        default={}, description="Environment of the main command and of every other one."
    )
    workspace: Annotated[Directory, AfterValidator(_relative)] = Field(
        default=".", description="The directory with the work, whose files are saved: relative to the sandbox's own."
    )


class LocalProvider(Provider[LocalEndpoint, LocalConfig]):
    """Sandboxes that are directories and process trees of this host. It calls nothing over a network."""

    key: ClassVar[str] = "local"
    label: ClassVar[str] = "This host"
    Endpoint: ClassVar[type[Schema]] = LocalEndpoint
    Config: ClassVar[type[Schema]] = LocalConfig
    capabilities: ClassVar[Capabilities] = Capabilities(
        finds_by_name=True,
        keeps_files=True,
        has_deadline=False,
        # The bound on a call, and then some: a creator may be frozen between its last check and the rename.
        creation_window=600.0,
        proves_no_allocation=frozenset({ErrorKind.INVALID, ErrorKind.NAME_TAKEN, ErrorKind.SERVER}),
        archives=True,
    )

    def identify(self, *, within: float) -> str:
        with self._state(Deadline(within)) as state:
            return state.identity

    def create(self, name: str, marks: Mapping[str, str], config: LocalConfig, *, within: float) -> Created:
        deadline = Deadline(within)
        with (
            self._state(deadline) as state,
            state.new(name, marks, config.model_dump(mode="json"), deadline) as sandbox,
        ):
            client.launch(sandbox, deadline)
            return Created(sandbox.resource)

    def find(self, name: str, marks: Mapping[str, str], *, within: float) -> Resource | None:  # noqa: ARG002 - names are final here
        with self._state(Deadline(within)) as state:
            sandbox = state.by_name(name)
            if sandbox is None:
                return None
            sandbox.close()
            return sandbox.resource

    def inspect(self, resource_id: str, *, within: float) -> Sighting:
        deadline = Deadline(within)
        with self._state(deadline) as state, self._sandbox(state, resource_id) as sandbox:
            if sandbox is None:
                return self._inspect_absent(state, resource_id, deadline)
            # Only under the lock is "nothing executes" an answer: without it a start may be about to happen.
            if not sandbox.acquire(None, until=Deadline(min(_BUSY_AFTER, within / 2)).at):
                return Busy(sandbox.resource, sandbox.holder())
            if not state.stands(sandbox):
                return self._inspect_absent(state, resource_id, deadline)
            if evidence.supervisor_of(sandbox) is not None:
                return Running(sandbox.resource)
            found = evidence.gather(sandbox, deadline)
            if found.executes:
                return Running(sandbox.resource)
            return Unknown(sandbox.resource, found.doubt) if found.doubt else Stopped(sandbox.resource)

    def start(self, resource_id: str, *, within: float) -> None:
        deadline = Deadline(within)
        with self._state(deadline) as state, self._changing(state, resource_id, "starting", deadline) as sandbox:
            if sandbox is None:
                raise _not_found(resource_id)
            if evidence.supervisor_of(sandbox) is not None:
                client.check_serving(sandbox, deadline)
                return
            found = evidence.gather(sandbox, deadline)
            if found.executes or found.doubt:
                raise ProviderError(
                    ErrorKind.REFUSED, found.doubt or "processes of its last run still execute: stop it first"
                )
            client.launch(sandbox, deadline)

    def stop(self, resource_id: str, *, grace: float, within: float) -> None:
        deadline = Deadline(within)
        with self._state(deadline) as state, self._changing(state, resource_id, "stopping", deadline) as sandbox:
            if sandbox is not None:
                ending.end(sandbox, grace=grace, deadline=deadline)
            elif evidence.gather_absent(resource_id, deadline).executes:
                ending.end_absent(resource_id, deadline)
            else:
                raise _not_found(resource_id)

    def delete(self, resource_id: str, *, within: float) -> None:
        deadline = Deadline(within)
        with self._state(deadline) as state, self._changing(state, resource_id, "deleting", deadline) as sandbox:
            if sandbox is None:
                ending.end_absent(resource_id, deadline)
            else:
                ending.end(sandbox, grace=0.0, deadline=deadline)
                found = evidence.gather(sandbox, deadline)
                # Without its directory the doubt would be forgotten, and the sandbox pass for gone.
                if found.executes or found.doubt:
                    raise ProviderError(ErrorKind.REFUSED, found.doubt or "its processes do not end")
                state.discard(sandbox)
            state.empty_trash(resource_id, deadline)

    def execute(self, resource_id: str, command: Command, *, within: float) -> Execution:
        deadline = Deadline(within)
        _check(command)
        with self._state(deadline) as state, self._sandbox(state, resource_id) as sandbox:
            if sandbox is None:
                raise _not_found(resource_id)
            if evidence.supervisor_of(sandbox) is None:
                raise ProviderError(ErrorKind.REFUSED, "the sandbox is not running")
            return client.execute(sandbox, command, deadline)

    def archive(self, resource_id: str, path: str, *, within: float) -> Generator[bytes, None, None]:
        """No lock is held meanwhile: a stop does not wait for a reader. `path` is relative to the sandbox's files."""
        deadline = Deadline(within)
        archiving.check(path)
        with self._state(deadline) as state, self._sandbox(state, resource_id) as sandbox:
            if sandbox is None:
                raise _not_found(resource_id)
            if evidence.supervisor_of(sandbox) is None:
                raise ProviderError(ErrorKind.REFUSED, "the sandbox is not running")
            yield from packing.pack(sandbox, path, deadline)
            # What vanishes is left out; when all of it does, that was no archive.
            if not state.stands(sandbox):
                raise _not_found(resource_id)

    @classmethod
    def workspace(cls, config: LocalConfig) -> str:
        return config.workspace

    def list(self, marks: Mapping[str, str], *, within: float) -> Listing:
        deadline = Deadline(within)
        found = []
        with self._state(deadline) as state:
            for resource in state.resources():
                deadline.check("listing")
                if marks.items() <= resource.marks.items():
                    found.append(resource)
        return Listing(tuple(found), complete=True)

    def _inspect_absent(self, state: StateDirectory, resource_id: str, deadline: Deadline) -> Sighting:
        resource = Resource(resource_id, resource_id.partition(".")[0])
        found = evidence.gather_absent(resource_id, deadline)
        if found.executes:
            return Unknown(resource, f"its directory is gone, and process {found.members[0].pid} still executes")
        if found.doubt:
            return Unknown(resource, found.doubt)
        if state.in_trash(resource_id):
            return Unknown(resource, "its removal was interrupted: delete it again")
        return Gone()

    @contextmanager
    def _state(self, deadline: Deadline) -> Iterator[StateDirectory]:
        """Open the state directory for one call, and let nothing but `ProviderError` out of it."""
        assert isinstance(self.endpoint, LocalEndpoint)  # noqa: S101
        try:
            deadline.check("the call had yet to begin")
            state = StateDirectory(self.endpoint.state_dir)
            try:
                yield state
            finally:
                state.close()
        except PermissionError as error:
            raise ProviderError(ErrorKind.AUTHORISATION, error) from None
        except OSError as error:
            raise ProviderError(ErrorKind.SERVER, error) from None

    @contextmanager
    def _sandbox(self, state: StateDirectory, resource_id: str) -> Iterator[Sandbox | None]:
        sandbox = state.by_id(resource_id)
        try:
            yield sandbox
        finally:
            if sandbox is not None:
                sandbox.close()

    @contextmanager
    def _changing(
        self, state: StateDirectory, resource_id: str, doing: str, deadline: Deadline
    ) -> Iterator[Sandbox | None]:
        """Open a sandbox and hold it exclusively; None when there is none, or none any more once it could be locked."""
        with self._sandbox(state, resource_id) as sandbox:
            if sandbox is not None and not sandbox.acquire(doing, until=deadline.at):
                raise ProviderError(ErrorKind.BUSY, f"another call holds it: {sandbox.holder()}")
            try:
                yield sandbox if sandbox is not None and state.stands(sandbox) else None
            except OSError as error:
                if not records.is_full(error):
                    raise
                raise ProviderError(ErrorKind.DISK_FULL, error) from None


def _check(command: Command) -> None:
    if not (math.isfinite(command.timeout) and command.timeout > 0):
        raise ProviderError(ErrorKind.INVALID, "a command's timeout is a positive number of seconds")
    texts = [*command.argv, command.cwd or "", *command.env, *command.env.values()]
    if len(command.stdin) > STDIN_LIMIT:
        raise ProviderError(ErrorKind.INVALID, f"stdin is limited to {STDIN_LIMIT} bytes")
    if sum(map(len, texts)) > ARGUMENTS_LIMIT:
        raise ProviderError(ErrorKind.INVALID, f"command and environment are limited to {ARGUMENTS_LIMIT} characters")
    if not command.argv or any("\0" in text for text in texts) or any(not n or "=" in n for n in command.env):
        raise ProviderError(ErrorKind.INVALID, "the command is empty, or cannot be handed to a process")


def _not_found(resource_id: str) -> ProviderError:
    return ProviderError(ErrorKind.NOT_FOUND, f"no sandbox {resource_id}")
