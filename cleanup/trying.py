"""Trying an environment: an ad-hoc lease through the journal, a command in it, its teardown, and each step told.

It uses nothing but what everybody uses: acquire, bridge, release, and the engine, which pays what is owed in this
process, whether or not there are workers. What fails in the middle stays owned like anything else.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from uuid import UUID, uuid4

import leases
from cleanup.claims import Selection, lane_of
from cleanup.engine import Engine
from leases.errors import LeaseError, WorkFailed
from leases.models import Lease, Obligation, Operation
from providers.contract import Execution
from providers.registry import load

LOOK_EVERY = 0.5
"""Seconds between looks at a row that another process works on, or that is not due yet."""

_MARGIN = 120.0
"""Seconds beyond command and teardown after which the lease would end by itself, should this process die."""


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that was done. `lease_id` is known once there is one; `execution` is what became of the command."""

    name: str
    ok: bool
    text: str
    seconds: float
    lease_id: UUID | None = None
    execution: Execution | None = None


def try_environment(
    environment_id: UUID,
    *,
    company_id: UUID,
    argv: Sequence[str],
    timeout: float = 60.0,
    within: float = 300.0,
    actor: str = "api",
) -> Generator[Step]:
    """Acquire a sandbox of the environment, run a command in it, tear it down; yields each step when it is done.

    `timeout` bounds the command and `within` the wait for the teardown's proof, both in seconds. The last step says
    whether anything is still owed. Closing the iterator early releases the lease. Raises `NotFound` for an environment
    that this company does not have.
    """
    key, began = f"try-{uuid4()}", time.monotonic()
    try:
        lease = leases.acquire(
            environment_id,
            company_id=company_id,
            request_key=key,
            ends_in=timeout + within + _MARGIN,
            actor=actor,
        )
    except leases.errors.NotFound:
        raise
    except LeaseError as error:
        yield Step("acquire", ok=False, text=str(error), seconds=time.monotonic() - began)
        yield from _pay(company_id, key, within)
        return
    took = time.monotonic() - began
    text = f"{lease.provider} sandbox {lease.resource_id}"
    try:
        yield Step("acquire", ok=True, text=text, seconds=took, lease_id=lease.pk)
        yield _run(lease, argv, timeout)
    finally:
        began = time.monotonic()
        leases.release(lease.pk, disposition="destroy", company_id=company_id, actor=actor)
    took = time.monotonic() - began
    yield Step("release", ok=True, text=_what_is_waited_for(lease), seconds=took, lease_id=lease.pk)
    yield from _pay(company_id, key, within)


def _what_is_waited_for(lease: Lease) -> str:
    """Say it beforehand: at some providers the proof of a deletion takes two looks, minutes apart."""
    apart = load(lease.provider).capabilities.absence_apart
    return "its teardown is owed; waiting for the proof" + (f", for {apart:.0f} s and more" if apart else "")


def _run(lease: Lease, argv: Sequence[str], timeout: float) -> Step:
    began = time.monotonic()
    try:
        done = leases.bridge(lease.pk, company_id=lease.company_id).execute(argv, timeout=timeout)
    except WorkFailed as error:
        return Step("run", ok=False, text=str(error), seconds=time.monotonic() - began, lease_id=lease.pk)
    if done.timed_out:
        text = f"killed at its timeout of {timeout:g} s"
    elif done.signal is not None:
        text = f"killed by signal {done.signal}"
    else:
        text = f"exit code {done.exit_code}"
    return Step("run", done.exit_code == 0, text, time.monotonic() - began, lease.pk, done)


def _pay(company_id: UUID, key: str, within: float) -> Iterator[Step]:
    """Pay what the request left owed: its recovery, where its answer was lost, and then the teardown."""
    operation = Operation.objects.filter(company_id=company_id, request_key=key).first()
    if operation is None:
        return  # refused before anything was journalled
    began = time.monotonic()
    while (row := _next(operation)) is not None and time.monotonic() - began < within:
        Engine().sweep(lane_of(row), selection=Selection(obligation_id=row.pk))
        row.refresh_from_db()
        if row.quiet:
            break
        if row.closed_at is None:
            time.sleep(LOOK_EVERY)
    operation.refresh_from_db()
    yield _proof(operation, time.monotonic() - began)


def _next(operation: Operation) -> Obligation | None:
    operation.refresh_from_db()
    owed = operation.obligations.filter(closed_at__isnull=True)
    if operation.lease is not None:
        owed |= Obligation.objects.filter(lease=operation.lease, kind=Obligation.Kind.TEARDOWN, closed_at__isnull=True)
    return owed.order_by("pk").first()


def _proof(operation: Operation, seconds: float) -> Step:
    lease = operation.lease
    owed = _next(operation)
    if owed is not None:
        why = Obligation.Quiet(owed.quiet).label if owed.quiet else f"last error: {owed.last_error_kind or 'none'}"
        text = f"still owed ({owed.get_kind_display()}; {why}); it is paid by the workers, or by manage.py sweep"
        return Step("teardown", ok=False, text=text, seconds=seconds, lease_id=lease.pk if lease else None)
    if lease is None:
        return Step("teardown", ok=True, text="nothing was allocated", seconds=seconds)
    receipt = lease.receipts.order_by("-pk").first()
    text = f"proven: {receipt.evidence}" if receipt else "ended without proof"
    return Step("teardown", ok=receipt is not None, text=text, seconds=seconds, lease_id=lease.pk)
