"""Reaching the provider that a row recorded: its endpoint and its credential's reference, never today's environment."""

from __future__ import annotations

from typing import Protocol

from leases import credentials
from providers.registry import AnyProvider, open_provider


class Snapshot(Protocol):
    """What leases, operations and accounts have in common: where to call, and with which secret."""

    provider: str
    endpoint: dict[str, object]
    credential_reference: str


def open_recorded(snapshot: Snapshot) -> AnyProvider:
    """Return the adapter for a lease or an operation.

    Raises `ProviderUnavailable` and `SecretUnavailable` (this process is not ready), and `ConfigurationError` when the
    recorded endpoint no longer fits the adapter's schema (a person must look).
    """
    return open_provider(snapshot.provider, snapshot.endpoint, credentials.resolve(snapshot.credential_reference))
