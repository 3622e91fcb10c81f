"""What a teardown is asked to do, and how a second demand merges into an open one. Pure; see `docs/teardown.md`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from leases.models.environments import Policy
from leases.models.lease import Lease
from leases.models.obligations import Obligation

Verb = Obligation.Verb

_STRENGTH = {Verb.STOP_ONLY: 0, Verb.STOP_OR_DELETE: 1, Verb.DELETE: 2}


@dataclass(frozen=True, slots=True)
class Demand:
    """A verb, and until when work in flight is waited for (None: not at all)."""

    verb: Verb
    drain_until: datetime | None = None


def verb_of_policy(policy: str, outcome: str) -> Verb:
    """Return what a release under this policy demands. `outcome` is the holder's word on how the use went."""
    match policy:
        case Policy.EPHEMERAL:
            return Verb.DELETE
        case Policy.REUSE_BY_ENVIRONMENT | Policy.REUSE_BY_EXECUTION_WORKSPACE:
            return Verb.STOP_OR_DELETE
        case Policy.RETAIN_ON_FAILURE:
            return Verb.STOP_ONLY if outcome == Lease.Outcome.FAILED else Verb.DELETE
        case _:
            raise ValueError(f"unknown policy: {policy}")


def merge(opened: Demand, new: Demand, *, explicit_stop: bool = False, authorised: bool = False) -> Demand:
    """Return what an open teardown demands after a second demand (design 4, *Demands merge*).

    Stop-only is sticky: it yields only to an `authorised` demand (an operator with a reason, the retained-orphan
    settle), whose verb stands as it is. Otherwise the stronger verb wins. The drain was written once by the first
    demand: a later one can shorten it, an explicit Stop ends it, nothing extends it.
    """
    if authorised:
        verb = new.verb
    elif opened.verb == Verb.STOP_ONLY:
        verb = Verb.STOP_ONLY
    else:
        verb = max(opened.verb, new.verb, key=lambda v: _STRENGTH[v])
    if explicit_stop or opened.drain_until is None or new.drain_until is None:
        return Demand(verb, None)
    return Demand(verb, min(opened.drain_until, new.drain_until))
