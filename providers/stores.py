"""Secret stores: where a credential's reference points, and the closed list of what such a store may answer.

A reference is `STORE:NAME`. `env` and `file` are built in; a package outside this repository adds a store with an entry
point in the group `paperclip_env.secret_stores`, whose name is the store's and whose object is its class.
"""

from __future__ import annotations

import logging
import os
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import ClassVar

from providers.contract import redact

log = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "paperclip_env.secret_stores"


class InvalidReference(ValueError):
    """The text is not a reference of a known form. The sentence is for people and never repeats the text."""


class StoreUnavailable(LookupError):
    """No store of that name can be loaded *in this process*. Says nothing about other processes."""


@dataclass(frozen=True, slots=True)
class Value:
    """The secret, usable now."""

    value: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class NotFound:
    """The store answers, and has no such secret. For a shared store that is so for everybody, until somebody acts."""


@dataclass(frozen=True, slots=True)
class Inactive:
    """The store has the secret and says that it may not be used: disabled, archived or not yet valid.

    That of the secret, its version or its vault alike. Never for a caller that is not allowed to ask: that is `Failed`.
    """


@dataclass(frozen=True, slots=True)
class Failed:
    """Everything else: not reached, overloaded, not allowed, not understood. It is asked again later."""

    excerpt: str = ""


Answer = Value | NotFound | Inactive | Failed


class SecretStore(ABC):
    """One kind of place where secrets are kept.

    A class without arguments; one instance serves a process, and is called from several threads at once. It only reads:
    nothing here ever creates, enables or renews a secret. What it raises, and what it answers beyond the closed list,
    counts as `Failed`.
    """

    shared: ClassVar[bool]
    """Whether every worker gets the same answer. Only a shared store's *not found* and *inactive* are worth a person's
    time; what a store of this process alone lacks is this process's unreadiness."""

    def check(self, name: str) -> None:  # noqa: B027 - most stores take any name
        """Raise `InvalidReference` with a sentence where `name` can be no name of this store. Reads nothing."""

    @abstractmethod
    def read(self, name: str, *, within: float) -> Answer:
        """Return what the store says about this name, within `within` seconds altogether. Does not retry."""


class EnvironmentStore(SecretStore):
    """`env:NAME`: a variable of this process."""

    shared: ClassVar[bool] = False

    def check(self, name: str) -> None:
        if not name.isidentifier():
            raise InvalidReference("env: must be followed by the name of an environment variable")

    def read(self, name: str, *, within: float) -> Answer:  # noqa: ARG002 - answers at once
        value = os.environ.get(name)
        return NotFound() if not value else Value(value)


class FileStore(SecretStore):
    """`file:/path`: a file that this process can read. Read at each call, so that a new value needs no restart."""

    shared: ClassVar[bool] = False

    def check(self, name: str) -> None:
        if not Path(name).is_absolute():
            raise InvalidReference("file: must be followed by an absolute path")

    def read(self, name: str, *, within: float) -> Answer:  # noqa: ARG002 - a local read
        try:
            value = Path(name).read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            return NotFound()
        except OSError as error:
            return Failed(error.strerror or type(error).__name__)
        return NotFound() if not value else Value(value)


_BUILT_IN = {"env": "providers.stores:EnvironmentStore", "file": "providers.stores:FileStore"}

_FORM = re.compile(r"([a-z][a-z0-9_.-]*):(.+)")


@cache
def _announced() -> dict[str, str]:
    return {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}


def known() -> list[str]:
    """Return the names of all stores known to this process, sorted."""
    return sorted(_BUILT_IN.keys() | _announced().keys())


@cache
def load(store: str) -> SecretStore:
    """Return this process's instance of a store; a built-in one cannot be replaced by a package.

    Raises `StoreUnavailable` when there is none of that name, or it cannot be made here.
    """
    target = _BUILT_IN.get(store) or _announced().get(store)
    if target is None:
        raise StoreUnavailable(f"no secret store named {store!r} is installed here; known are: {', '.join(known())}")
    module, _, name = target.partition(":")
    try:
        made: object = getattr(import_module(module), name)()
    except Exception as error:
        raise StoreUnavailable(f"the secret store {store!r} cannot be made here: {type(error).__name__}") from error
    if not isinstance(made, SecretStore) or not isinstance(getattr(made, "shared", None), bool):
        raise StoreUnavailable(f"the secret store {store!r} is not a SecretStore that says whether it is shared")
    return made


def split(reference: str) -> tuple[str, str]:
    """Return (store, name) of a reference, whatever stores there are here. Raises `InvalidReference`."""
    form = _FORM.fullmatch(reference)
    if form is None:
        raise InvalidReference("must be env:NAME, file:/absolute/path, or the name of a secret store, a colon, a name")
    return form[1], form[2]


def parse(reference: str) -> tuple[str, str]:
    """Return (store, name) of a reference that is good as far as can be told here, for the edge (a form, a command).

    Raises `InvalidReference`, also for a store that this process does not know: that is a slip of the pen more often
    than a store of another process, and may be a secret that was pasted.
    """
    store, name = split(reference)
    try:
        load(store).check(name)
    except StoreUnavailable:
        raise InvalidReference(f"must name a secret store that is installed here: {', '.join(known())}") from None
    return store, name


def ask(reference: str, *, within: float) -> Answer:
    """Return a store's answer about a reference. Raises `StoreUnavailable`, and `InvalidReference` for no reference.

    Whatever else goes wrong is `Failed`, and its text is not repeated: it may carry the secret.
    """
    store, name = split(reference)
    source = load(store)
    try:
        answer: object = source.read(name, within=within)
    except Exception as error:  # noqa: BLE001 - by the contract that is a failure, of whatever kind
        log.error("secret store %s raised %s", store, type(error).__name__)  # noqa: TRY400 - its text may carry secrets
        return Failed(f"raised {type(error).__name__}")
    match answer:
        case Value(value=str(text)) if text:
            return answer
        case NotFound() | Inactive():
            return answer
        case Failed():
            return Failed(redact(answer.excerpt))
        case _:
            return Failed("answered what no secret store answers")
