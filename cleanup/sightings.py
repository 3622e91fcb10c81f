"""Looking at the sandbox that a lease recorded: the call, what its answer is about, and whether the sandbox is ours."""

from __future__ import annotations

from typing import Any

from cleanup.work import Call, is_foreign
from leases import bounds
from leases.models import Lease, Operation
from leases.planning import MARK_OPERATION
from providers.contract import ErrorKind, Gone, ProviderError, Sighting, Unknown
from providers.registry import AnyProvider


def inspect(provider: AnyProvider, lease: Lease) -> Call:
    """Ask what the sandbox is now."""
    return Call("inspect", lambda: provider.inspect(lease.resource_id, within=bounds.INSPECT), bounds.INSPECT)


def about(lease: Lease, answer: Any) -> Sighting:
    """Return the answer as a sighting of the lease's sandbox. Anything else proves nothing and is never guessed at."""
    if not isinstance(answer, Sighting):
        raise ProviderError(ErrorKind.PROTOCOL, f"inspect answered {type(answer).__name__}, which is no sighting")
    if not isinstance(answer, Gone) and answer.resource.resource_id != lease.resource_id:
        raise ProviderError(ErrorKind.PROTOCOL, "inspect answered about another sandbox")
    return answer


def creation_of(lease: Lease) -> str:
    """Return the mark of its creation that the sandbox carries: whatever took it over since recorded the same marks.

    Empty where it is not known: what was imported has no journal here.
    """
    marks = Operation.objects.filter(lease=lease).values_list("marks", flat=True).first()
    return str((marks or {}).get(MARK_OPERATION, ""))


def shows_foreign(sighting: Sighting | None, installation: str, creation: str = "") -> bool:
    """Return whether it is not ours, or not what this lease is about but another creation's of ours."""
    if sighting is None or isinstance(sighting, Gone):
        return False
    if isinstance(sighting, Unknown) and not sighting.resource.name:
        return False  # the provider did not describe it: that says nothing about whose it is
    return is_foreign(sighting.resource, installation=installation, creation=creation)
