"""The audit: what the database says of every lease, and what the operating system, engine and services say themselves.

The search for processes goes by the mark that everything in a sandbox inherits, over all processes of this machine, and
by the working directory; not by process group, which a daemon leaves.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from cleanup import report
from leases import bounds
from leases.calling import open_recorded
from leases.models import Installation, Lease, Obligation, Operation, ProviderAccount, Receipt
from paperclip_env.demo.cast import LINES, Cast
from paperclip_env.demo.continued import Continued
from paperclip_env.demo.losses import Losses
from paperclip_env.demo.machinery import wait_until
from paperclip_env.demo.orphans import Orphan
from paperclip_env.demo.services import Service
from providers.contract import MARK_INSTALLATION, Command, Running, Stopped

_PLACES = ("workshop", "flaky", "e2b", "daytona")
"""Where in the demo's directory sandboxes are."""
_PROVEN = (Lease.State.EXPIRED, Lease.State.FAILED, Lease.State.RELEASED, Lease.State.RETAINED)


@dataclass(frozen=True, slots=True)
class Finding:
    text: str
    good: bool


def findings(cast: Cast, losses: Losses, orphan: Orphan, continued: Continued, directory: Path) -> list[Finding]:
    """Return every finding of the audit; the demo succeeded when all are good."""
    found = [_lease(part.title, part.lease) for part in cast.parts]
    found += [_lease(loss.title, loss.lease) for loss in losses.all]
    found.append(_lease("was nobody's when its controller fell silent", orphan.lease))
    found.append(_lease("failed, was reopened to save its files, and goes on in another run", continued.lease))
    saved = continued.saved_lines()
    what = f"{saved} of {LINES} lines of the failed run are in its archive, and one run goes on from it"
    found.append(Finding(what, continued.is_right()))
    opened = {kind.kind: kind.open for kind in report.owed().kinds}
    ends, kept = opened.pop(Obligation.Kind.DISPOSE), Lease.objects.filter(state__in=Lease.KEPT).count()
    del opened[Obligation.Kind.WATCH_CONTROLLERS]  # stands for the fleet, and waits for the next controller
    found.append(Finding(f"{sum(opened.values())} obligations are open", not any(opened.values())))
    found.append(Finding(f"{ends} of {kept} kept sandboxes have an end that is owed", ends == kept))
    unverified = Obligation.objects.filter(closed_as=Obligation.ClosedAs.UNVERIFIED).count()
    found.append(Finding(f"{unverified} were ended without proof", unverified == 0))
    resources = {part.lease.resource_id for part in cast.parts}
    resources |= {box.id for service in cast.services for box in service.sandboxes()}
    left = _processes(resources, directory)
    what = f"{len(left)} processes of a sandbox are left on this machine"
    found.append(Finding(f"{what}: {left}" if left else what, not left))
    if cast.containers is not None:
        running = _containers(cast)
        found.append(Finding(f"{running} containers are left at the engine", running == 0))
    for account, service in ((cast.e2b, cast.services.e2b), (cast.daytona, cast.services.daytona)):
        found += [made(account, service), left_at(account, service)]
    stopped = [part for part in cast.parts if part.lease.state in Lease.KEPT]
    files = sum(_has_files(part.lease) for part in stopped)
    found.append(Finding(f"{files} of {len(stopped)} kept sandboxes still have their files", files == len(stopped)))
    return found


def _lease(title: str, lease: Lease | None) -> Finding:
    if lease is None:
        return Finding(f"NO OWNER  {title}", good=False)
    lease.refresh_from_db()
    receipt = Receipt.objects.filter(lease=lease, epoch=lease.epoch).order_by("pk").last()
    attempts = sum(o.attempts.count() for o in lease.obligations.all())
    proof = f"{receipt.evidence} by attempt {str(receipt.attempt_id)[:8]}" if receipt else "NO RECEIPT"
    good = receipt is not None and lease.state in _PROVEN
    after = " (its sandbox is another lease's now)" if lease.successor_id else ""
    return Finding(f"{lease.state:<9} {proof:<30} {attempts} attempt(s)  {title}{after}", good)


def made(account: ProviderAccount, service: Service) -> Finding:
    """Whether the service made exactly one sandbox for each creation, and none that the journal does not know."""
    creations = Operation.objects.filter(account=account, kind=Operation.Kind.CREATE)
    known = Counter(creations.values_list("resource_id", flat=True))
    there = Counter(box.id for box in service.sandboxes())
    what = f"{service.label} says that it made {there.total()} sandboxes, for {known.total()} creations"
    return Finding(what, known == there)


def left_at(account: ProviderAccount, service: Service) -> Finding:
    """Whether nothing executes at the service, and what exists there is exactly what leases keep stopped."""
    kept = set(Lease.objects.filter(account=account, state__in=Lease.KEPT).values_list("resource_id", flat=True))
    exist = {box.id: box.state for box in service.sandboxes() if box.state != "killed"}
    executing = service.executing()
    there = ", ".join(f"{count} {state}" for state, count in sorted(Counter(exist.values()).items())) or "none"
    what = f"{service.label} says that {there} exist, of {len(kept)} kept, and that {len(executing)} execute"
    stopped = all(state in ("paused", "stopped") for state in exist.values())
    return Finding(what, stopped and not executing and set(exist) == kept)


def _processes(resources: set[str], directory: Path) -> list[int]:
    marks = {resource.encode() for resource in resources}
    inside = str(directory)
    left = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            environment = (entry / "environ").read_bytes().split(b"\0")
            where = str((entry / "cwd").readlink())
        except OSError:
            continue  # ended meanwhile, or not ours to look at
        marked = any(value.partition(b"=")[2] in marks for value in environment)
        if marked or where.startswith(tuple(f"{inside}/{name}/" for name in _PLACES)):
            left.append(int(entry.name))
    return left


def _containers(cast: Cast) -> int:
    lease = next(part.lease for part in cast.parts if part.lease.account_id == cast.containers.pk)  # type: ignore[union-attr]
    listing = open_recorded(lease).list({MARK_INSTALLATION: str(Installation.current().mark)}, within=bounds.FIND)
    return len(listing.resources)


def _has_files(lease: Lease) -> bool:
    """Start a kept sandbox again, as its next run would, read its file, and stop it."""
    provider, resource_id = open_recorded(lease), lease.resource_id

    def seen(state: type[Running | Stopped]) -> bool:
        return isinstance(provider.inspect(resource_id, within=bounds.INSPECT), state)

    provider.start(resource_id, within=bounds.STOP)
    try:
        wait_until("the start of a kept sandbox", lambda: seen(Running), seconds=30)
        done = provider.execute(resource_id, Command(("cat", "work.txt"), timeout=10), within=bounds.STOP)
        return done.stdout.count(b"\n") == LINES
    finally:
        provider.stop(resource_id, grace=1, within=bounds.STOP)
        wait_until("the end of a sandbox that the audit started", lambda: seen(Stopped), seconds=30)
