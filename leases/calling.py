"""Reaching the provider that a row recorded: its endpoint and its credential, never today's environment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol
from uuid import UUID

from leases import bounds, credentials
from providers import registry, stores
from providers.contract import Schema
from providers.registry import AnyProvider
from providers.stores import Answer


class Snapshot(Protocol):
    """What leases, operations and accounts have in common: where to call, and with which secret."""

    company_id: UUID
    provider: str
    endpoint: dict[str, object]
    credential_uuid: UUID | None
    credential_reference: str


@dataclass(frozen=True, slots=True)
class Opening:
    """An adapter that lacks nothing but its secret. Made from rows; `read` touches no row and may take its time."""

    adapter: type[AnyProvider]
    endpoint: Schema
    secret: credentials.Secret | None

    @property
    def reads_elsewhere(self) -> bool:
        """Whether the secret is in a shared store, so that reading it may take up to `bounds.READ_SECRET` seconds."""
        return self.secret is not None and self.secret.shared

    def read(self) -> Answer | None:
        """Return the store's answer, None where no secret is sent. Raises nothing that `opening` did not raise."""
        return stores.ask(self.secret.reference, within=bounds.READ_SECRET) if self.secret else None

    def opened(self, answer: Answer | None) -> AnyProvider:
        """Return the adapter, ready to be called. Raises `SecretUnavailable` or `CredentialUnusable` by the answer."""
        return self.adapter(self.endpoint, self.secret.value(answer) if self.secret and answer else None)


def opening(snapshot: Snapshot, *, expected_digest: str = "") -> Opening:
    """Prepare to call the provider of a lease, an operation or an account.

    With an `expected_digest` only with the same secret as then. Raises `CredentialUnusable` (its row forbids the call;
    a person must act), `ProviderUnavailable` and `SecretUnavailable` (this process is not ready), and
    `ConfigurationError` when the recorded endpoint no longer fits the adapter's schema (a person must look).
    """
    secret = credentials.usable(snapshot, expected_digest=expected_digest)
    adapter = registry.load(snapshot.provider)
    return Opening(adapter, registry.validate(adapter.Endpoint, snapshot.endpoint), secret)


def open_recorded(snapshot: Snapshot) -> AnyProvider:
    """Return the adapter for a lease or an operation, reading its secret here and now; raises what `opening` raises.

    For a caller that may wait. The engine reads shared stores in threads of their own (`cleanup.opening`).
    """
    prepared = opening(snapshot)
    return prepared.opened(prepared.read())
