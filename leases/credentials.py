"""References to secrets, and reading them at the moment of a call. The value is never stored and never logged."""

from __future__ import annotations

import os
from pathlib import Path


class InvalidReference(ValueError):
    """The text is not a reference of a known form."""


class SecretUnavailable(Exception):
    """This process cannot read the secret. That is its own unreadiness and says nothing about other workers."""


def parse(reference: str) -> tuple[str, str]:
    """Return (store, name). Raises `InvalidReference` with a sentence for people."""
    store, _, name = reference.partition(":")
    if store not in ("env", "file") or not name:
        raise InvalidReference("must be env:NAME or file:/absolute/path")
    if store == "env" and not name.isidentifier():
        raise InvalidReference("env: must be followed by the name of an environment variable")
    if store == "file" and not Path(name).is_absolute():
        raise InvalidReference("file: must be followed by an absolute path")
    return store, name


def resolve(reference: str) -> str | None:
    """Return the secret that a reference names, or None for an empty reference. Raises `SecretUnavailable`."""
    if not reference:
        return None
    store, name = parse(reference)
    if store == "env":
        value = os.environ.get(name)
        if value is None:
            raise SecretUnavailable(f"environment variable {name} is not set in this process")
        return value
    try:
        return Path(name).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise SecretUnavailable(f"file {name} cannot be read here: {error.strerror}") from error
