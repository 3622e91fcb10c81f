"""How a handler and the engine speak: the handler is a generator of calls that receives answers and returns an outcome.

The handler runs in the engine's thread and does the reading and the evidence; the engine makes each call in a thread of
its own, outside any transaction, and writes the fenced disposition. So hundreds of calls are in flight over one
database connection, and a handler reads from top to bottom.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from cleanup.claims import Claim
from leases import bounds
from leases.clock import Clock
from leases.models import Obligation
from leases.planning import MARK_OPERATION
from providers.contract import MARK_INSTALLATION, ErrorKind, Resource
from providers.registry import AnyProvider


@dataclass(frozen=True, slots=True)
class Call:
    """One provider call. `changes` says that it changes something: then it is sent only inside the protection.

    Sent back into the generator is what `run` returned; thrown into it is the `ProviderError` that it raised.
    """

    name: str
    run: Callable[[], Any]
    within: float
    changes: bool = False


def is_foreign(resource: Resource, *, installation: str, creation: str) -> bool:
    """Return whether a sandbox is not ours, or carries the mark of another creation than `creation` ("": of any)."""
    other = bool(creation) and resource.marks.get(MARK_OPERATION, creation) != creation
    return other or resource.marks.get(MARK_INSTALLATION) != installation


IDENTIFY = "identify"


def identify(provider: AnyProvider) -> Call:
    """Ask the account who it is: the one call that is about the account itself, and so counts for it unanswered too."""
    return Call(IDENTIFY, lambda: provider.identify(within=bounds.IDENTIFY), bounds.IDENTIFY)


class NotSent(Exception):
    """Thrown into a handler instead of an answer: the call was not made, because its protection no longer covers it."""


# What a handler returns. The engine writes it, fenced; `Done` says that the handler settled in its own transaction.
@dataclass(frozen=True, slots=True)
class Done:
    proven: bool


@dataclass(frozen=True, slots=True)
class Draining:
    until: datetime


@dataclass(frozen=True, slots=True)
class InTransition:
    transition: str


@dataclass(frozen=True, slots=True)
class NotSeen:
    """A look found nothing, which proves nothing yet; look again in `delay` seconds, or at `until`."""

    delay: float = 0.0
    until: datetime | None = None


@dataclass(frozen=True, slots=True)
class Extended:
    """The provider's deadline was moved; it is owed again at `until`."""

    until: datetime


@dataclass(frozen=True, slots=True)
class Held:
    """Somebody still needs it, or its time has not come: it is owed again at `until`, and nothing is counted."""

    until: datetime


@dataclass(frozen=True, slots=True)
class Contended:
    """Somebody holds the lock of a row that the settle needs. Nothing was written; a look a little later will do."""


@dataclass(frozen=True, slots=True)
class Failed:
    kind: ErrorKind
    excerpt: str = ""
    retry_after: float | None = None
    about_account: bool = False
    """It moves the account's circuit: an error of those kinds, or a call about the account that was not answered."""
    until: datetime | None = None
    """When it is tried again, where its kind has a policy of its own; None: after the cooldown of all others."""


@dataclass(frozen=True, slots=True)
class NeedsOperator:
    """Written only if the fact `still` holds in the transaction that writes it; where it is over, the row is due now.

    `still` locks what it reads, in the order of locks and before any obligation. So a fact that ends meanwhile either
    is seen to have ended, or wakes a row that is quiet already.
    """

    why: Obligation.Quiet
    still: Callable[[], bool] | None = None


@dataclass(frozen=True, slots=True)
class Waiting:
    """Nothing to do until another row changes; that write wakes this one, in the database."""


@dataclass(frozen=True, slots=True)
class HandBack:
    """Not worked: it is due again in `delay` seconds, and nothing is counted. `kind` and `excerpt` say why."""

    delay: float = 0.0
    kind: ErrorKind | None = None
    excerpt: str = ""


Outcome = (
    Done | Draining | InTransition | NotSeen | Extended | Held | Contended | Failed | NeedsOperator | Waiting | HandBack
)


@dataclass(frozen=True, slots=True)
class Context:
    """What the engine gives to a handler."""

    clock: Clock
    open_recorded: Callable[..., Generator[Call, Any, AnyProvider]]
    """`provider = yield from context.open_recorded(row)`: opens the adapter that a row recorded (`cleanup.opening`).
    What it raises the engine understands: a person is needed, or this process is not ready."""
    installation: str


Handler = Callable[[Claim, Context], Generator[Call, Any, Outcome]]
