"""Teardown: stop or destroy a lease's sandbox, and settle the lease with what the provider confirmed.

A thin shell around `cleanup.decisions.decide`. It works from the lease's own snapshot. The account is attested before
anything is asked about the sandbox, and again after an answer that it is gone (design 6, *Identity before absence*).
Before each call that changes something the facts are read again under the lease's lock and the call is announced; if
they decide otherwise by then, the call is not made.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from cleanup import decisions, evidence
from cleanup.claims import Claim
from cleanup.decisions import ACCEPTED, Facts, Sent, decide, is_about_the_account
from cleanup.work import Call, Context, Done, Draining, Failed, InTransition, NeedsOperator, Outcome, identify
from leases import bounds
from leases.models import Lease
from providers.contract import (
    MARK_INSTALLATION,
    ErrorKind,
    Gone,
    ProviderError,
    Running,
    Sighting,
    Unknown,
)
from providers.registry import AnyProvider

_OTHER_ACCOUNT = Failed(ErrorKind.IDENTITY, "another account answers than the one recorded on the lease")


@dataclass(slots=True)
class _Seen:
    """What this attempt learned by itself."""

    sighting: Sighting | None = None
    stop: Sent = None
    delete: Sent = None
    ran: bool = False
    """It saw the sandbox running. A receipt that turns up afterwards may be older than that, and settles nothing."""


def teardown(claim: Claim, context: Context) -> Generator[Call, Any, Outcome]:
    """Work on one teardown. Returns what the engine is to write; settles by itself when it has proof."""
    seen = _Seen()
    facts = evidence.standing(claim)
    if facts is None:
        return Done(proven=False)
    if facts.receipt is not None:
        return Done(proven=evidence.settle_by_receipt(claim, facts.receipt))
    if isinstance(decision := _decide(facts, seen, context), decisions.Drain):
        return Draining(decision.until)
    lease = facts.lease
    provider = yield from context.open_recorded(lease)
    if (yield identify(provider)) != lease.account_identity:
        return _OTHER_ACCOUNT

    while facts is not None:
        if facts.receipt is not None:
            if not seen.ran:
                return Done(proven=evidence.settle_by_receipt(claim, facts.receipt))
            # Another attempt's answer arrived, and this one saw the sandbox running: a fresh look tells which was last.
            seen = _Seen(sighting=_about(lease, (yield _look(provider, lease))))
            if isinstance(seen.sighting, Running):
                evidence.sighted_running(claim, facts.epoch)
                facts, seen.ran = evidence.standing(claim), True
                continue
            if not isinstance(_decide(facts, seen, context), decisions.Discharge):
                return InTransition("unclear")
        match _decide(facts, seen, context):
            case decisions.Look():
                seen.sighting = _about(lease, (yield _look(provider, lease)))
                if isinstance(seen.sighting, Running):
                    seen.ran = True
                    if facts.proven_before:
                        evidence.sighted_running(claim, facts.epoch)
            case decisions.Stop() as step:
                facts, announced = _announce(claim, step, seen, context)
                if announced:
                    seen.stop = yield from _change(_stop(provider, lease), seen)
            case decisions.Delete() as step:
                facts, announced = _announce(claim, step, seen, context)
                if announced:
                    seen.delete = yield from _change(_delete(provider, lease), seen)
            case decisions.Discharge(evidence=proof, ended=ended):
                if isinstance(seen.sighting, Gone) and (yield identify(provider)) != lease.account_identity:
                    return _OTHER_ACCOUNT
                return Done(proven=evidence.settle_with(claim, proof, epoch=facts.epoch, ended=ended))
            case decisions.Drain(until=until):
                return Draining(until)
            case decisions.Wait(transition=transition):
                return InTransition(transition)
            case decisions.Fail(kind=kind):
                return Failed(kind, "the sandbox was not seen to end")
            case decisions.AskOperator(why=why):
                return NeedsOperator(why)
    return Done(proven=False)


def _announce(
    claim: Claim, step: decisions.Stop | decisions.Delete, seen: _Seen, context: Context
) -> tuple[evidence.Standing | None, bool]:
    """Return the facts read again, and whether the call was announced: sent it may be only then."""
    announced = False

    def still_due(facts: evidence.Standing) -> bool:
        nonlocal announced
        announced = facts.receipt is None and _decide(facts, seen, context) == step
        return announced

    call = "stop" if isinstance(step, decisions.Stop) else "delete"
    facts = evidence.announce(claim, call, still_due, clock=context.clock)
    return facts, announced


def _decide(facts: evidence.Standing, seen: _Seen, context: Context) -> decisions.Decision:
    return decide(
        Facts(
            verb=facts.verb,
            drain_until=facts.drain_until,
            sighting=seen.sighting,
            foreign=_is_foreign(seen.sighting, context.installation),
            stop=seen.stop,
            delete=seen.delete,
            delete_announced=facts.delete_announced,
        )
    )


def _about(lease: Lease, answer: Any) -> Sighting:
    """Return the answer as a sighting of the lease's sandbox. Anything else proves nothing and is never guessed at."""
    if not isinstance(answer, Sighting):
        raise ProviderError(ErrorKind.PROTOCOL, f"inspect answered {type(answer).__name__}, which is no sighting")
    if not isinstance(answer, Gone) and answer.resource.resource_id != lease.resource_id:
        raise ProviderError(ErrorKind.PROTOCOL, "inspect answered about another sandbox")
    return answer


def _is_foreign(sighting: Sighting | None, installation: str) -> bool:
    if sighting is None or isinstance(sighting, Gone):
        return False
    if isinstance(sighting, Unknown) and not sighting.resource.name:
        return False  # the provider did not describe it: that says nothing about whose it is
    return sighting.resource.marks.get(MARK_INSTALLATION) != installation


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


def _look(provider: AnyProvider, lease: Lease) -> Call:
    return Call("inspect", lambda: provider.inspect(lease.resource_id, within=bounds.INSPECT), bounds.INSPECT)


def _stop(provider: AnyProvider, lease: Lease) -> Call:
    def run() -> None:
        provider.stop(lease.resource_id, grace=bounds.STOP_GRACE, within=bounds.STOP)

    return Call("stop", run, bounds.STOP, changes=True)


def _delete(provider: AnyProvider, lease: Lease) -> Call:
    return Call("delete", lambda: provider.delete(lease.resource_id, within=bounds.DELETE), bounds.DELETE, changes=True)
