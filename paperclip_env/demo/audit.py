"""The audit: what the database says of every lease, and what the operating system and the engine say by themselves.

The search for processes goes by the mark that everything in a sandbox inherits, over all processes of this machine, and
by the working directory; not by process group, which a daemon leaves.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cleanup import report
from leases import bounds
from leases.calling import open_recorded
from leases.models import Installation, Lease, Obligation, Receipt
from paperclip_env.demo.cast import Cast
from providers.contract import MARK_INSTALLATION, Running

_PROVEN = (Lease.State.EXPIRED, Lease.State.FAILED, Lease.State.RELEASED, Lease.State.RETAINED)


@dataclass(frozen=True, slots=True)
class Finding:
    text: str
    good: bool


def findings(cast: Cast, directory: Path) -> list[Finding]:
    """Return every finding of the audit; the demo succeeded when all are good."""
    found = [_lease(part.title, part.lease) for part in cast.parts]
    opened = sum(kind.open for kind in report.owed().kinds)
    found.append(Finding(f"{opened} obligations are open", opened == 0))
    unverified = Obligation.objects.filter(closed_as=Obligation.ClosedAs.UNVERIFIED).count()
    found.append(Finding(f"{unverified} were ended without proof", unverified == 0))
    resources = {part.lease.resource_id for part in cast.parts}
    left = _processes(resources, directory)
    what = f"{len(left)} processes of a sandbox are left on this machine"
    found.append(Finding(f"{what}: {left}" if left else what, not left))
    if cast.containers is not None:
        running = _containers(cast)
        found.append(Finding(f"{running} containers are left at the engine", running == 0))
    kept = [part for part in cast.parts if part.lease.state in (Lease.State.RELEASED, Lease.State.RETAINED)]
    files = sum(_has_files(part.lease) for part in kept)
    found.append(Finding(f"{files} of {len(kept)} kept sandboxes still have their files", files == len(kept)))
    return found


def _lease(title: str, lease: Lease) -> Finding:
    lease.refresh_from_db()
    receipt = Receipt.objects.filter(lease=lease, epoch=lease.epoch).order_by("pk").first()
    attempts = sum(o.attempts.count() for o in lease.obligations.all())
    proof = f"{receipt.evidence} by attempt {str(receipt.attempt_id)[:8]}" if receipt else "NO RECEIPT"
    good = receipt is not None and lease.state in _PROVEN
    return Finding(f"{lease.state:<9} {proof:<30} {attempts} attempt(s)  {title}", good)


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
        if marked or where.startswith((f"{inside}/workshop/", f"{inside}/flaky/")):
            left.append(int(entry.name))
    return left


def _containers(cast: Cast) -> int:
    lease = next(part.lease for part in cast.parts if part.lease.account_id == cast.containers.pk)  # type: ignore[union-attr]
    listing = open_recorded(lease).list({MARK_INSTALLATION: str(Installation.current().pk)}, within=bounds.FIND)
    return len(listing.resources)


def _has_files(lease: Lease) -> bool:
    """Start a kept sandbox again, as its next run would, read its file, and stop it."""
    from providers.contract import Command

    provider = open_recorded(lease)
    provider.start(lease.resource_id, within=bounds.STOP)
    try:
        done = provider.execute(lease.resource_id, Command(("cat", "work.txt"), timeout=10), within=bounds.STOP)
        return done.stdout.count(b"\n") == 5  # noqa: PLR2004 - the lines that the work wrote
    finally:
        provider.stop(lease.resource_id, grace=1, within=bounds.STOP)
        if isinstance(provider.inspect(lease.resource_id, within=bounds.INSPECT), Running):
            raise RuntimeError("the audit could not stop what it started")  # noqa: TRY004 - it is not about a type
