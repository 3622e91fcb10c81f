"""The plot of the demo, step by step, and its end: the audit, and an exit status of 0 only if it holds."""

from __future__ import annotations

import fcntl
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from django.db import DatabaseError, connection
from tqdm import tqdm

from leases.errors import LeaseError
from leases.models import Lease, Obligation, ProviderAccount, Run
from paperclip_env.demo.audit import findings
from paperclip_env.demo.cast import Cast
from paperclip_env.demo.continued import Continued
from paperclip_env.demo.engines import Engine, container_engine
from paperclip_env.demo.losses import Losses
from paperclip_env.demo.machinery import Machinery, empty_the_broker, wait_until, waiting_messages
from paperclip_env.demo.orphans import Orphan
from paperclip_env.demo.services import Services, serve
from paperclip_env.stack.foreground import Stopped, stoppable
from providers.contract import ProviderError

_PATIENCE = 95.0
"""Seconds after which the demo gives up waiting for the last receipt."""

_began = time.monotonic()


def main() -> int:
    """Play the demo. Returns the exit status."""
    with stoppable(), ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paperclip-demo-")))
        engine = stack.enter_context(container_engine(directory))
        services = serve(directory, stack)
        casts: list[Cast] = []
        # Left in the reverse order: the faults end, then the processes, then what is left of the sandboxes, and then
        # the services.
        stack.callback(_tidy, casts)
        machinery = stack.enter_context(Machinery(directory))
        try:
            return _play(directory, engine, services, machinery, stack, casts)
        except Stopped as stopped:
            _say("Interrupted; everything is being cleaned up.")
            return 128 + stopped.by
        except (TimeoutError, RuntimeError, LeaseError, ProviderError, DatabaseError) as error:
            _say(f"The demo failed: {error}")
            for name in ("worker", "beat"):
                if (directory / f"{name}.log").exists():
                    sys.stderr.write(f"--- {name}\n{machinery.log_tail(name)}\n")
            return 1


def _tidy(casts: list[Cast]) -> None:
    connection.close()  # the signal may have come in the middle of a statement
    for cast in casts:
        cast.tidy()


def _play(
    directory: Path,
    engine: Engine | str,
    services: Services,
    machinery: Machinery,
    stack: ExitStack,
    casts: list[Cast],
) -> int:
    if isinstance(engine, str):
        _say(f"No container engine here ({engine}); the sandboxes are processes.")
    machinery.start("beat")
    machinery.start("worker")
    cast = Cast(directory, engine if isinstance(engine, Engine) else None, services)
    casts.append(cast)
    _say("E2B and Daytona are rehearsed: their APIs, from memory, with real processes in their sandboxes.")
    losses = Losses(cast, services.e2b, cast.lossy)
    losses.begin(machinery)
    cast.enter(_say)
    losses.kill_the_caller(machinery, _say)
    losses.lose_the_reply(_say)
    cast.rent(_say)
    losses.wait_until_destroyed(_say)

    refusal = _Refusal(cast.part("refuses to stop").lease, directory / "workshop")
    stack.callback(refusal.end)
    _say("One sandbox now refuses to stop: somebody else holds its lock.")
    fault = _Fault(cast.flaky_directory)
    stack.callback(fault.end)
    _say("One account is failing: where its state directory was there is none.")

    before = _proven(cast)
    active = cast.active()
    first, second = active[::2], active[1::2]
    for part in first:
        part.release()
    _say(f"{len(first)} leases released.")
    wait_until("the first receipt", lambda: _proven(cast) > before, seconds=40)
    held = _in_flight(cast)
    machinery.end("worker", signal.SIGKILL)
    _say(f"The worker is killed with SIGKILL, in the middle of {held} teardowns.")
    for part in second:
        part.release()
    wait_until("a hint in the broker", lambda: waiting_messages() > 0, seconds=40)
    _say(f"{len(second)} more leases released, with no worker alive.")
    _say(f"The broker is emptied of everything, {empty_the_broker()} waiting message(s) among it.")
    machinery.start("worker")
    _say("A new worker starts. It has no memory and no message; it has the rows.")
    orphan = Orphan.left_by_its_controller(cast, _say)
    continued = Continued.after_a_failure(cast, _say)
    _watch(cast, len(cast.parts) + len(losses.all) + 2, machinery, fault, refusal)
    orphan.comes_to_its_end(_say)
    continued.comes_to_its_end(_say)
    Run.objects.filter(company=cast.company).update(status=Run.Status.SUCCEEDED)
    return _audit(cast, losses, orphan, continued, directory)


def _watch(cast: Cast, everything: int, machinery: Machinery, fault: _Fault, refusal: _Refusal) -> None:
    """Wait until every lease has its receipt and nothing is owed, ending the faults when they were met."""
    progress = tqdm(total=everything, desc="receipts", unit="lease", disable=not sys.stderr.isatty())
    heals_at = time.monotonic() + 8
    deadline = time.monotonic() + _PATIENCE
    shown = -1
    while ((done := _proven(cast)) < everything or _owes(cast)) and time.monotonic() < deadline:
        progress.update(done - progress.n)
        if not sys.stderr.isatty() and done != shown:
            _say(f"{done} of {everything} leases have their receipt.")
            shown = done
        if ended := machinery.ended():
            raise RuntimeError(f"the {ended[0]} ended by itself")
        if fault.lasts and time.monotonic() > heals_at and _has_failed(cast.flaky):
            fault.end()
            circuit = ProviderAccount.objects.get(pk=cast.flaky.pk).circuit
            _say(f"The failing account works again; its circuit is {circuit}.")
        if refusal.lasts and time.monotonic() > heals_at and _looked_at(refusal.lease):
            refusal.end()
            _say("The lock of the sandbox that refused is let go.")
        time.sleep(0.2)
    progress.update(_proven(cast) - progress.n)
    progress.close()


class _Refusal:
    """A sandbox's lock, held by somebody else for a while: it can neither be stopped nor deleted."""

    def __init__(self, lease: Lease, directory: Path) -> None:
        self.lease = lease
        self._lock = (directory / "sandboxes" / lease.resource_name / "lock").open("r+")
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    @property
    def lasts(self) -> bool:
        return not self._lock.closed

    def end(self) -> None:
        self._lock.close()


class _Fault:
    """A directory that is gone for a while, a plain file in its place."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._away = directory.with_name(f"{directory.name}-away")
        directory.rename(self._away)
        directory.touch()
        self.lasts = True

    def end(self) -> None:
        if self.lasts:
            self._directory.unlink()
            self._away.rename(self._directory)
            self.lasts = False


def _audit(cast: Cast, losses: Losses, orphan: Orphan, continued: Continued, directory: Path) -> int:
    _say("The audit:")
    found = findings(cast, losses, orphan, continued, directory)
    for finding in found:
        sys.stdout.write(f"  {'ok ' if finding.good else 'BAD'} {finding.text}\n")
    bad = sum(not finding.good for finding in found)
    took = time.monotonic() - _began
    if bad:
        _say(f"{bad} finding(s) are bad, after {took:.0f} s.")
        return 1
    _say(f"Every lease is proven ended and nothing was left behind, after {took:.0f} s.")
    return 0


def _proven(cast: Cast) -> int:
    return (
        Lease.objects.filter(company=cast.company)
        .exclude(state__in=[Lease.State.ACTIVE, Lease.State.PENDING_CLEANUP])
        .count()
    )


def _owes(cast: Cast) -> bool:
    """Whether anything is owed still: the end of a startup comes after the receipts that it waits for."""
    owed = Obligation.objects.filter(company=cast.company, closed_at__isnull=True)
    # The end of what is kept comes in its time, and what goes on from a failed run when the demo opens its last gate.
    return owed.exclude(kind__in=[Obligation.Kind.DISPOSE, Obligation.Kind.START_CONTINUATION]).exists()


def _in_flight(cast: Cast) -> int:
    return Obligation.objects.filter(company=cast.company, attempt_id__isnull=False).count()


def _looked_at(lease: Lease) -> bool:
    """Whether some attempt at its teardown came to an end without proof."""
    return any(row.failures + row.busy_count for row in lease.obligations.all())


def _has_failed(account: ProviderAccount) -> bool:
    return Obligation.objects.filter(account=account, failures__gt=0).exists()


def _say(text: str) -> None:
    sys.stdout.write(f"[{time.monotonic() - _began:5.1f} s] {text}\n")
    sys.stdout.flush()
