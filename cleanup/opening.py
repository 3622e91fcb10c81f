"""Opening the provider that a row recorded without holding up the engine.

A shared secret store is asked like a provider: in a thread of its own, under a bound.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from cleanup.work import Call
from leases import bounds, calling
from leases.credentials import SecretUnavailable
from providers.contract import ProviderError
from providers.registry import AnyProvider
from providers.stores import Answer


def open_recorded(snapshot: calling.Snapshot, *, expected_digest: str = "") -> Generator[Call, Any, AnyProvider]:
    """Yield the call that reads the secret, where that may take time, and return the adapter.

    Raises what `calling.opening` raises. The rows are read before anything is asked of anybody: a credential that may
    not be used is not even read.
    """
    prepared = calling.opening(snapshot, expected_digest=expected_digest)
    if not prepared.reads_elsewhere:
        return prepared.opened(prepared.read())
    try:
        answer: Answer | None = yield Call("read_secret", prepared.read, bounds.READ_SECRET)
    except ProviderError as error:  # given up on by the engine
        raise SecretUnavailable("its store did not answer in time") from error
    return prepared.opened(answer)
