"""Teardown: stop or destroy a lease's sandbox, and settle the lease with what the provider confirmed.

A thin shell around `cleanup.decisions.decide`. It works from the lease's own snapshot. The account is attested before
anything is asked about the sandbox, and again after an answer that it is gone (design 6, *Identity before absence*).
Before each call that changes something the facts are read again under the lease's lock and the call is announced; if
they decide otherwise by then, the call is not made. A recovery is such a call, and begins an epoch.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from cleanup import decisions, evidence, sightings
from cleanup.claims import Claim
from cleanup.decisions import ACCEPTED, Facts, Sent, decide, is_about_the_account
from cleanup.work import (
    Call,
    Context,
    Done,
    Draining,
    Failed,
    InTransition,
    NeedsOperator,
    NotSeen,
    Outcome,
    identify,
)
from leases import bounds
from leases.models import Lease
from providers.contract import (
    ErrorKind,
    Gone,
    ProviderError,
    Running,
    Sighting,
    Stopped,
    Unknown,
)
from providers.registry import AnyProvider

_OTHER_ACCOUNT = Failed(ErrorKind.IDENTITY, "another account answers than the one recorded on the lease")


@dataclass(slots=True)
class _Seen:
    """What this attempt learned by itself."""

    absence_apart: float
    creation: str = ""
    """The creation whose mark the sandbox must carry, where it is known."""
    sighting: Sighting | None = None
    stop: Sent = None
    delete: Sent = None
    recover: Sent = None
    recovered_before: int = 0
    ran: bool = False
    """It saw the sandbox running. A receipt that turns up afterwards may be older than that, and settles nothing."""
    ran_as_of: datetime | None = None


def teardown(claim: Claim, context: Context) -> Generator[Call, Any, Outcome]:
    """Work on one teardown. Returns what the engine is to write; settles by itself when it has proof."""
    facts = evidence.standing(claim)
    if facts is None:
        return Done(proven=False)
    if facts.receipt is not None:
        return Done(proven=evidence.settle_by_receipt(claim, facts.receipt))
    if facts.drain_until is not None:
        return Draining(facts.drain_until)
    lease = facts.lease
    provider = yield from context.open_recorded(lease)
    capabilities = provider.capabilities
    creation = sightings.creation_of(lease)
    seen = _Seen(capabilities.absence_apart, creation)
    if (yield identify(provider)) != lease.account_identity:
        return _OTHER_ACCOUNT

    while facts is not None:
        if facts.receipt is not None:
            if not seen.ran:
                return Done(proven=evidence.settle_by_receipt(claim, facts.receipt))
            # Another attempt's answer arrived, and this one saw the sandbox running: a fresh look tells which was last.
            seen = _Seen(capabilities.absence_apart, creation)
            yield from _look(claim, provider, facts, seen)
            if seen.ran:
                facts = evidence.standing(claim)
                continue
            if not isinstance(_decide(facts, seen, context), decisions.Discharge):
                return InTransition("unclear")
        match _decide(facts, seen, context):
            case decisions.Look():
                yield from _look(claim, provider, facts, seen)
            case decisions.Stop() as step:
                facts, announced = _announce(claim, step, seen, context)
                if announced:
                    seen.stop = yield from _change(_stop(provider, lease), seen)
            case decisions.Recover() as step:
                facts, announced = _announce(claim, step, seen, context)
                if announced:
                    seen.recover = yield from _change(_recover(provider, lease), seen)
            case decisions.Delete() as step:
                facts, announced = _announce(claim, step, seen, context)
                if announced:
                    seen.delete = yield from _change(_delete(provider, lease), seen)
            case decisions.Discharge(evidence=proof, ended=ended):
                if isinstance(seen.sighting, Gone) and (yield identify(provider)) != lease.account_identity:
                    return _OTHER_ACCOUNT
                looks = facts.absent_since if _takes_two_looks(seen) else None
                stopped = seen.sighting.resource if isinstance(seen.sighting, Stopped) else None
                settled = evidence.settle_with(
                    claim,
                    proof,
                    epoch=facts.epoch,
                    ended=ended,
                    absent_since=looks,
                    deadline_of=stopped if capabilities.has_deadline else None,
                )
                return Done(proven=settled)
            case decisions.LookLater():
                if (yield identify(provider)) != lease.account_identity:
                    return _OTHER_ACCOUNT
                until = evidence.not_found(claim, apart=capabilities.absence_apart)
                return NotSeen(until=until) if until is not None else Done(proven=False)
            case decisions.Drain(until=until):
                return Draining(until)
            case decisions.Wait(transition="starting") if facts.starting_until is not None:
                return NotSeen(until=facts.starting_until)  # by then what was given up cannot come any more
            case decisions.Wait(transition=transition):
                return InTransition(transition)
            case decisions.Fail(kind=kind):
                return Failed(kind, "the sandbox was not seen to end")
            case decisions.AskOperator(why=why):
                return NeedsOperator(why)
    return Done(proven=False)


def _announce(
    claim: Claim, step: decisions.Stop | decisions.Recover | decisions.Delete, seen: _Seen, context: Context
) -> tuple[evidence.Standing | None, bool]:
    """Return the facts read again, and whether the call was announced: sent it may be only then."""
    announced = False

    def still_due(facts: evidence.Standing) -> bool:
        nonlocal announced
        announced = facts.receipt is None and _decide(facts, seen, context) == step
        return announced

    recovers = None
    if isinstance(step, decisions.Recover) and isinstance(seen.sighting, Unknown):
        recovers = seen.sighting.resource
    call = type(step).__name__.lower()
    facts = evidence.announce(claim, call, still_due, clock=context.clock, recovers=recovers)
    return facts, announced


def _decide(facts: evidence.Standing, seen: _Seen, context: Context) -> decisions.Decision:
    return decide(
        Facts(
            verb=facts.verb,
            drain_until=facts.drain_until,
            sighting=seen.sighting,
            foreign=sightings.shows_foreign(seen.sighting, context.installation, seen.creation),
            stop=seen.stop,
            delete=seen.delete,
            recover=seen.recover,
            recovered_before=seen.recovered_before,
            delete_announced=facts.delete_announced,
            absence_apart=seen.absence_apart,
            absent_for=facts.absent_for,
            started_as_of=evidence.later(facts.lease.started_as_of, seen.ran_as_of),
            extending=facts.extending,
            starting=facts.starting_until is not None,
        )
    )


def _takes_two_looks(seen: _Seen) -> bool:
    return isinstance(seen.sighting, Gone) and not seen.sighting.stated and seen.absence_apart > 0


def _look(claim: Claim, provider: AnyProvider, facts: evidence.Standing, seen: _Seen) -> Generator[Call, Any, None]:
    """Look at the sandbox, and write down at once what the look alone says about epoch and absence."""
    sighting = sightings.about(facts.lease, (yield sightings.inspect(provider, facts.lease)))
    seen.sighting = sighting
    if isinstance(sighting, Gone):
        return
    if seen.absence_apart:
        evidence.found(claim)
    if isinstance(sighting, Running):
        seen.ran, seen.ran_as_of = True, sighting.resource.as_of
        evidence.sighted_running(claim, facts, sighting.resource.as_of)
    elif isinstance(sighting, Unknown) and sighting.recoverable:
        seen.recovered_before = evidence.recovered_in_vain(claim)


def _change(call: Call, seen: _Seen) -> Generator[Call, Any, Sent]:
    """Make a call that changes something; whatever it answered, what was seen before it is out of date."""
    try:
        yield call
    except ProviderError as error:
        if is_about_the_account(error.kind) or error.kind == ErrorKind.NOT_READY:
            raise
        seen.sighting = None
        return error.kind
    seen.sighting = None
    return ACCEPTED


def _stop(provider: AnyProvider, lease: Lease) -> Call:
    def run() -> None:
        provider.stop(lease.resource_id, grace=bounds.STOP_GRACE, within=bounds.STOP)

    return Call("stop", run, bounds.STOP, changes=True)


def _recover(provider: AnyProvider, lease: Lease) -> Call:
    def run() -> None:
        provider.recover(lease.resource_id, within=bounds.RECOVER)

    return Call("recover", run, bounds.RECOVER, changes=True)


def _delete(provider: AnyProvider, lease: Lease) -> Call:
    return Call("delete", lambda: provider.delete(lease.resource_id, within=bounds.DELETE), bounds.DELETE, changes=True)
