"""The provider contract: what a provider is asked, what it may answer, and what the caller may conclude.

An adapter is one class with nine methods, three more where the provider can do it, and a few flags. It never retries,
never guesses, and never turns a missing answer into a good one: what it cannot tell, it raises as a `ProviderError` of
a closed list of kinds. The rules of proof (`design` 2.3) rest on the promises in these docstrings;
`providers/conformance.py` holds every adapter to
them.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import ClassVar, Generic, TypeVar

from pydantic import BaseModel, ConfigDict

MARK_PREFIX = "paperclip-env."
MARK_INSTALLATION = MARK_PREFIX + "installation"
"""The mark that says whose a sandbox is. What carries another installation's is foreign and never touched."""

EXCERPT_LIMIT = 300
RESOURCE_ID_LIMIT = 200
_NAME = re.compile(r"[a-z0-9-]{1,63}")
OUTPUT_LIMIT = 1 << 20
"""Bytes of stdout, and of stderr, that `Provider.execute` keeps of one command."""


class ErrorKind(StrEnum):
    """Every way in which a call can fail. Callers decide by kind and never by text."""

    AUTHORISATION = "authorisation"
    """The account's credential was refused (401, 403)."""
    CONNECTION = "connection"
    """No connection, or it broke before a whole answer was read."""
    TIMEOUT = "timeout"
    """The bound on the call's total time passed. What the provider did is not known."""
    RATE_LIMITED = "rate_limited"
    """The account calls too often (429). `retry_after` says how long to wait, where the provider does."""
    SERVER = "server"
    """The provider failed (5xx)."""
    IDENTITY = "identity"
    """Another account, engine or machine answers than the one that was recorded."""
    BUSY = "busy"
    """The sandbox is in a transition that excludes this call for now (Daytona's 409). Not a failure."""
    NAME_TAKEN = "name_taken"
    """`create`: a sandbox of that name exists. Nothing was allocated by this call."""
    NOT_FOUND = "not_found"
    """No such sandbox to act on. Never proof that it ended: only `inspect` may answer `Gone`."""
    INVALID = "invalid"
    """The provider refuses the request as such (400, 422): trying it again unchanged cannot help."""
    REFUSED = "refused"
    """The provider understood and could not do it (for example a stop that ended with the sandbox still running)."""
    CANNOT_START = "cannot_start"
    """`start`: the provider says that this sandbox can never run again with its files. The one error of a start that
    permits replacing the sandbox; never raised on a guess."""
    DISK_FULL = "disk_full"
    """The sandbox's own disk is full, or its quota is used up, and the call failed for that. By the provider's own
    words only. Says nothing about the account, and not that it is for ever: somebody may make room. Of a `create` it
    proves nothing: what was allocated before the disk was full may exist."""
    MISSING_PATH = "missing_path"
    """`archive`: the sandbox runs, and has no directory of that name."""
    PROTOCOL = "protocol"
    """An answer that this adapter does not understand."""
    NOT_READY = "not_ready"
    """This process lacks something that the call needs (a file, a program). Nothing was sent; other workers may do."""


ACCOUNT_KINDS = frozenset(
    {
        ErrorKind.AUTHORISATION,
        ErrorKind.CONNECTION,
        ErrorKind.RATE_LIMITED,
        ErrorKind.SERVER,
        ErrorKind.IDENTITY,
    }
)
"""Kinds that say something about the account rather than about one sandbox; only these move its circuit."""


_SECRETS = re.compile(
    r"(?i)(authorization|api[-_]?key|token|password|passwd|secret|bearer)(\W{1,4})(?:(?:bearer|basic)\s+)?[^\s,;'\"&]+"
    r"|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"
)


def redact(text: object, *, limit: int = EXCERPT_LIMIT) -> str:
    """Return a bounded, single-line excerpt of provider text with what looks like a secret removed."""
    # What PostgreSQL or a terminal cannot take (NUL, control characters, lone surrogates) is replaced first.
    printable = "".join(c if c.isprintable() else " " for c in str(text))
    line = " ".join(printable.split())
    line = _SECRETS.sub(lambda m: f"{m[1]}{m[2]}[redacted]" if m[1] else "[redacted]", line)
    return line if len(line) <= limit else line[: limit - 1] + "…"


class ProviderError(Exception):
    """A call failed. `kind` is what callers decide by; the text is a redacted excerpt for people.

    `nothing_allocated` is true only where the provider's contract says that this very answer to `create` proves that
    no sandbox was and will be allocated. Every other failure of `create` counts as a lost reply.
    `retry_after` is in seconds.
    """

    def __init__(
        self,
        kind: ErrorKind,
        message: object = "",
        *,
        retry_after: float | None = None,
        nothing_allocated: bool = False,
    ) -> None:
        self.kind = kind
        self.excerpt = redact(message)
        self.retry_after = retry_after
        self.nothing_allocated = nothing_allocated
        super().__init__(f"{kind.value}: {self.excerpt}" if self.excerpt else kind.value)


class Ended(StrEnum):
    """How execution ended: a `SUSPENDED` sandbox resumes its old processes, a `KILLED` one does not."""

    KILLED = "killed"
    SUSPENDED = "suspended"


@dataclass(frozen=True, slots=True)
class Resource:
    """A sandbox as the provider names it. `resource_id` is the provider's own, `name` the one given at creation.

    `as_of` is the provider's own time of what it says here (its last change), or None where it tells none: an answer
    from before a start is out of date. `expires_at` is the provider's own, attested deadline, or None for none.
    """

    resource_id: str
    name: str
    marks: Mapping[str, str] = field(default_factory=dict)
    as_of: datetime | None = field(default=None, compare=False)
    expires_at: datetime | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Running:
    """Execution may be going on in the sandbox."""

    resource: Resource


@dataclass(frozen=True, slots=True)
class Stopped:
    """The provider confirms, from its live state, that nothing executes in the sandbox; its files are kept."""

    resource: Resource
    ended: Ended = Ended.KILLED


@dataclass(frozen=True, slots=True)
class Gone:
    """The sandbox does not exist, and the provider's own second source agrees (a list, its state on disk, ...).

    Counts only together with `Provider.identify` answering the recorded identity in the same attempt. `stated` says
    that the provider itself calls this very id destroyed; otherwise it is merely not to be found, and counts only when
    looks at least `Capabilities.absence_apart` seconds apart agree.
    """

    stated: bool = False


@dataclass(frozen=True, slots=True)
class Busy:
    """A transition is in progress; ask again soon. `transition` names it, for people."""

    resource: Resource
    transition: str = ""


@dataclass(frozen=True, slots=True)
class Unknown:
    """The sandbox exists in a state from which neither running nor stopped follows (Daytona's `error`).

    `recoverable` says that `Provider.recover` may bring it back to running, where it can be stopped with its files.
    `disk_full` says that the provider gives a full disk or a used-up quota as the reason: a start that was accepted and
    led here failed for that.
    """

    resource: Resource
    reason: str = ""
    recoverable: bool = False
    disk_full: bool = False


def usable(resource: Resource) -> Resource:
    """Return a resource that a provider answered, or raise `PROTOCOL` where its id cannot be kept."""
    if 0 < len(resource.resource_id) <= RESOURCE_ID_LIMIT and resource.resource_id.isprintable():
        return resource
    raise ProviderError(ErrorKind.PROTOCOL, f"not a usable resource id: {resource.resource_id!r}")


def is_name(name: str) -> bool:
    """Say whether a sandbox could have been created under this name."""
    return _NAME.fullmatch(name) is not None


def require_name(name: str) -> None:
    """Raise `INVALID` for a name that `Provider.create` does not take; nothing was allocated."""
    if not is_name(name):
        raise ProviderError(ErrorKind.INVALID, "a name is 1 to 63 of a-z, 0-9 and hyphen", nothing_allocated=True)


Sighting = Running | Stopped | Gone | Busy | Unknown


@dataclass(frozen=True, slots=True)
class Created:
    """The reply to `create`: the id, as soon as the provider has one. `ready` is false while it is still starting.

    The id is saved before anything else is asked. One that is not ready is looked at with `inspect` until it runs.
    """

    resource: Resource
    ready: bool = True


@dataclass(frozen=True, slots=True)
class Listing:
    """All sandboxes, of any state, that carry the marks. `complete` is false where some may have been left out."""

    resources: tuple[Resource, ...]
    complete: bool


@dataclass(frozen=True, slots=True)
class Command:
    """One command to run in a sandbox. `timeout` is in seconds and bounds the command, not the call around it."""

    argv: tuple[str, ...]
    cwd: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    stdin: bytes = b""
    timeout: float = 60.0


@dataclass(frozen=True, slots=True)
class Execution:
    """What became of a command. `exit_code` is None when it timed out or died by a signal (then `signal` names it)."""

    exit_code: int | None
    stdout: bytes = b""
    stderr: bytes = b""
    timed_out: bool = False
    signal: int | None = None
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a provider can do beyond the methods, recorded on each operation so that it cannot change under it."""

    finds_by_name: bool
    """`find` sees a sandbox from the moment the provider has allocated it."""
    keeps_files: bool
    """A stopped sandbox keeps its files, and `start` finds them again."""
    has_deadline: bool
    """The provider ends a sandbox by itself at a deadline that it attests."""
    creation_window: float
    """Seconds after a `create` call during which its sandbox may still appear to `find`. After that, absence is a
    person's to judge (it still proves nothing)."""
    absence_apart: float = 0.0
    """Seconds between two looks that must both find nothing before absence counts. 0 where one look is enough."""
    proves_no_allocation: frozenset[ErrorKind] = frozenset()
    """The kinds with which an answer to `create` may prove that nothing was allocated. Such an error says so itself
    (`nothing_allocated`); one of any other kind never counts as proof."""
    idempotent_create: bool = False
    """A `create` repeated with the same name answers the same sandbox. Only the living attempt itself repeats one."""
    archives: bool = False
    """`archive` reads the files of a running sandbox. Without it, starting one to save its files is in vain."""


class Schema(BaseModel):
    """Base of the configurations that a provider declares: unknown keys, missing keys and wrong types are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


E = TypeVar("E", bound=Schema)
C = TypeVar("C", bound=Schema)


class Provider(ABC, Generic[E, C]):
    """One provider, reached at one endpoint with one secret.

    Instances are cheap, hold no state about sandboxes, and may be called from several threads at once. Every method
    raises `ProviderError` and nothing else. `within` bounds the *total* time of the call in seconds, and holds even
    against a server that answers one byte a second; when it passes, the error is `TIMEOUT`. No method retries.
    """

    key: ClassVar[str]
    """The name under which environments and accounts choose this provider."""
    label: ClassVar[str]
    """Its name for people."""
    Endpoint: ClassVar[type[Schema]]
    """Schema of an account's endpoint: where the provider is reached. Never holds a secret."""
    Config: ClassVar[type[Schema]]
    """Schema of an environment's configuration: what kind of sandbox is made. Never holds a secret."""
    capabilities: ClassVar[Capabilities]
    needs_secret: ClassVar[bool] = False
    """Whether nothing can be asked without a secret: then an account of this provider has to name a credential."""
    binding: ClassVar[str] = ""
    """Recorded on each operation, opaque to us: an adapter that answers with another one may not look for what the
    first one created. Change it when names or marks are written differently."""

    def __init__(self, endpoint: E, secret: str | None = None) -> None:
        self.endpoint = endpoint
        self.secret = secret

    @abstractmethod
    def identify(self, *, within: float) -> str:
        """Return what the provider itself says this account is (engine id, organisation, machine and directory).

        The same account answers the same text for ever; another one behind the same address answers another. Reads
        only, and is cheap.
        """

    @abstractmethod
    def create(self, name: str, marks: Mapping[str, str], config: C, *, within: float) -> Created:
        """Allocate and start one sandbox with this name and these marks, automatic restart and resume off.

        Answers as soon as the provider names the sandbox; it may still be starting (`Created.ready`). Raises
        `NAME_TAKEN` when a sandbox of that name exists, of any state. `name` is 1 to 63 characters of a-z, 0-9 and
        hyphen, and unique to this creation: also the key of an idempotent create.
        """

    @abstractmethod
    def find(self, name: str, marks: Mapping[str, str], *, within: float) -> Resource | None:
        """Return the sandbox of this creation, in any state, or None: by exactly its name, or by all its marks.

        A provider without names, or one that frees a name while the sandbox may live, goes by the marks. Reads only.
        None is never proof.
        """

    @abstractmethod
    def inspect(self, resource_id: str, *, within: float) -> Sighting:
        """Look at the live state of exactly this sandbox, never at a cached one. Reads only.

        `Stopped` is answered only when nothing executes in it any more, and `Gone` only when it does not exist and
        the provider's second source agrees.
        """

    @abstractmethod
    def start(self, resource_id: str, *, within: float) -> None:
        """Start a stopped sandbox with its files. Starting a running one changes nothing.

        Returning means that the provider accepted it: `inspect` says when it runs. Raises `NOT_FOUND` for one that is
        gone, `CANNOT_START` where the provider says that it can never run again, and `DISK_FULL` where it could not
        start because its disk is full or its quota used up.
        """

    @abstractmethod
    def stop(self, resource_id: str, *, grace: float, within: float) -> None:
        """End all execution in the sandbox and keep its files: politely, then after `grace` seconds by force.

        What the provider would by itself do to a stopped sandbox, or at a deadline, is turned off first and read back;
        where that fails nothing is stopped (`REFUSED`). Returning means that the provider accepted it, and proves
        nothing: `inspect` says how it ended. Stopping a stopped sandbox changes nothing. Never deletes,
        whatever fails. Raises `NOT_FOUND` for one that is gone.
        """

    @abstractmethod
    def delete(self, resource_id: str, *, within: float) -> None:
        """End all execution and remove the sandbox with its files and whatever was made for it alone.

        Returning means that the provider accepted it, and proves nothing: `inspect` says how it ended. Deleting one
        that is gone changes nothing and raises nothing.
        """

    @abstractmethod
    def execute(self, resource_id: str, command: Command, *, within: float) -> Execution:
        """Run a command in a running sandbox and wait for its end. `within` should exceed `command.timeout`.

        A command past its own timeout is killed and answered with `timed_out`. Raises `NOT_FOUND` for a sandbox that
        is gone and `REFUSED` for one that is not running.
        """

    @abstractmethod
    def list(self, marks: Mapping[str, str], *, within: float) -> Listing:
        """Return all sandboxes, of every state and from every page, that carry all these marks. Reads only."""

    def recover(self, resource_id: str, *, within: float) -> None:  # noqa: ARG002 - for those who override it
        """Bring a sandbox that `inspect` called recoverable back to running, with its files. Counts as a start.

        Returning means that the provider accepted it. Raises `REFUSED` where the provider has no such thing.
        """
        raise ProviderError(ErrorKind.REFUSED, "this provider does not recover sandboxes")

    def extend(self, resource_id: str, seconds: float, *, within: float) -> datetime:  # noqa: ARG002 - likewise
        """Move the provider's own deadline to `seconds` from now, or a little later, and return it as read back.

        Only where `Capabilities.has_deadline`. Raises `REFUSED` where it cannot be moved, `NOT_FOUND` for a sandbox
        that is gone.
        """
        raise ProviderError(ErrorKind.REFUSED, "this provider has no deadline to move")

    def archive(self, resource_id: str, path: str, *, within: float) -> Generator[bytes, None, None]:  # noqa: ARG002
        """Yield the directory `path` of a running sandbox, with all that is in it, as an uncompressed tar stream.

        Member names are relative to `path` (`a/b` or `./a/b`); links are archived as links, never followed. Sockets,
        devices and pipes may be left out. `path` is absolute, or relative to the directory in which commands start, as
        `workspace` names it. Only where `Capabilities.archives`. Nothing in the sandbox is changed, and of its disk
        no room is needed that grows with the archive.

        A generator: nothing is asked before the first `next`, from which `within` counts, whoever is slow; whoever
        does not read it to its end closes it, in the thread that read it. It ends without an error only where the
        archive is whole; what was yielded before an error is worth nothing. Raises, while it is read: `NOT_FOUND` for
        a sandbox that is gone, `REFUSED` for one that is not running or of which something could not be read,
        `MISSING_PATH` where `path` is no directory, `DISK_FULL` where reading needed room and there was none,
        `CONNECTION` or `PROTOCOL` where the stream broke off, and the errors of any call.
        """
        if not self.capabilities.archives:
            raise ProviderError(ErrorKind.REFUSED, "this provider does not hand files over")
        yield from ()

    @classmethod
    def workspace(cls, config: C) -> str:  # noqa: ARG003 - likewise
        """Return the directory, as `archive` takes it, in which a sandbox of this configuration has its work.

        `.` is the directory in which commands start. A configuration that was stored before there was a key for this
        answers the provider's default.
        """
        return "."

    @classmethod
    def lifetime(cls, config: C) -> float | None:  # noqa: ARG003 - likewise
        """Return for how many seconds ahead a configuration keeps the provider's deadline, or None for no deadline."""
        return None
