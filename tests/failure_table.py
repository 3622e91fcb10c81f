"""The failure table of a recovery of files: what each way of failing leaves, row by row, and how it is read off.

One row is one attempt of a generation: how the restart went, what became of the saving, and of the stop behind it. The
second table is what a later look at a sandbox says that may be running. `docs/recovery.md` has both, and a test
compares them. Whoever brings a row about (in memory, in containers, over HTTP, in processes) sees it with `seen`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from leases import archives, proof
from leases.models import Continuation, Lease, Obligation, Receipt, Recovery

REFUSED = "refused"
DISK_FULL = "refused: disk full"
LOST_DONE = "reply lost, done"
LOST = "reply lost, not done"
STARTING = "accepted, never runs"
ERROR = "accepted, ends in an error"
ERROR_FULL = "accepted, ends in an error: disk full"
EXITS = "accepted, exits at once"
RUNS = "runs"
RUNS_ALREADY = "not asked: it runs already"
FULL_BEFORE = "not asked: disk full"
GONE_BEFORE = "not asked: gone"

NONE = "—"
WHOLE = "whole"
NO_WORKSPACE = "no such directory"
TOO_LARGE = "too large"
STORAGE = "storage fails"
FULL_READING = "disk full while reading"
BREAKS_OFF = "breaks off"

WORKS = "works"
STOP_LOST = "reply lost, done"
STOPPED_ALL_THE_SAME = "fails, seen stopped"
RUNS_ALL_THE_SAME = "fails, seen running"
NOT_SEEN = "fails, not seen"


@dataclass(frozen=True)
class Rows:
    """What the rows say of a lease: the cells of the table behind those that say what happened."""

    lease: str
    receipts: str
    proof: str
    owed: str
    generation: str
    may_run: str
    archive: str
    continuation: str


@dataclass(frozen=True)
class Attempt:
    """One row of the first table: what happened in an attempt, and what it leaves."""

    restart: str
    saving: str
    stop: str
    leaves: Rows

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in list(asdict(self).items())[:3] if value != NONE)


@dataclass(frozen=True)
class Look:
    """One row of the second: what a look at a sandbox says that may be running, and what it leaves."""

    look: str
    stop: str
    leaves: Rows

    def __str__(self) -> str:
        return f"{self.look}, stop {self.stop}" if self.stop != NONE else self.look


_AGAIN = "running, 1: provider_unavailable, retry"
_STORAGE = "running, 1: storage_unavailable, retry"
_SAVED = "running, 1"
_COMPLETE = "complete, 1"
_SOURCE = "exhausted, {}: source_unavailable, use_alternative_strategy"
_MISSING = "exhausted, 1: workspace_missing, use_alternative_strategy"
_LARGE = "exhausted, 1: archive_too_large, use_alternative_strategy"

_WAITS = "waits: workspace_repair_required"
_CLEANUP = "waits: remote_cleanup"
_FILES = "starts: files_recovered"
_FRESH = "starts: fresh_isolated_workspace"

_GENERATION = "end_recovery, recover_workspace"


def _fresh(generation: str, *, watched: bool = False) -> Rows:
    """Seen stopped, without having been seen running: a fresh receipt of the same epoch."""
    return _kept("retained, 1", "stopped 1, stopped 1", "fresh", generation, watched=watched)


def _earlier(generation: str) -> Rows:
    """Not seen at all: the earlier receipt stands, and somebody watches."""
    return _kept("retained, 1", "stopped 1", "earlier", generation, watched=True)


def _untouched(generation: str) -> Rows:
    """Not even asked."""
    return _kept("retained, 1", "stopped 1", "earlier", generation)


def _stopped_again(generation: str) -> Rows:
    """Seen running, and stopped: a receipt of its own epoch."""
    return _kept("retained, 2", "stopped 1, stopped 2", "fresh", generation)


def _kept(lease: str, receipts: str, proven: str, generation: str, *, watched: bool = False) -> Rows:
    owed = ["dispose", *([_GENERATION] if generation.startswith("running") else []), *(["watch_restart"] * watched)]
    may_run = "yes" if watched else "no"
    archive = "offered" if generation == _COMPLETE else "no"
    goes_on = _WAITS if generation.startswith("running") else _FILES if generation == _COMPLETE else _FRESH
    return Rows(lease, receipts, proven, ", ".join(owed), generation, may_run, archive, goes_on)


def _owed(generation: str, receipts: str = "stopped 1") -> Rows:
    """Seen running, and not stopped: nothing but a fresh stop settles it."""
    running = generation.startswith("running")
    owed = f"{_GENERATION}, teardown" if running else "teardown"
    goes_on = _WAITS if running else _CLEANUP
    return Rows("pending_cleanup, 2", receipts, "none", owed, generation, "no", "no", goes_on)


ATTEMPTS: tuple[Attempt, ...] = (
    Attempt(RUNS, WHOLE, WORKS, _stopped_again(_COMPLETE)),
    Attempt(RUNS, WHOLE, STOP_LOST, _stopped_again(_COMPLETE)),
    Attempt(RUNS, WHOLE, RUNS_ALL_THE_SAME, _owed(_SAVED)),
    Attempt(RUNS, WHOLE, NOT_SEEN, _owed(_SAVED)),
    Attempt(RUNS, NO_WORKSPACE, WORKS, _stopped_again(_MISSING)),
    Attempt(RUNS, NO_WORKSPACE, NOT_SEEN, _owed(_MISSING)),
    Attempt(RUNS, TOO_LARGE, WORKS, _stopped_again(_LARGE)),
    Attempt(RUNS, TOO_LARGE, NOT_SEEN, _owed(_LARGE)),
    Attempt(RUNS, STORAGE, WORKS, _stopped_again(_STORAGE)),
    Attempt(RUNS, STORAGE, NOT_SEEN, _owed(_STORAGE)),
    Attempt(RUNS, FULL_READING, WORKS, _stopped_again(_SOURCE.format(1))),
    Attempt(RUNS, FULL_READING, NOT_SEEN, _owed(_SOURCE.format(1))),
    Attempt(RUNS, BREAKS_OFF, WORKS, _stopped_again(_AGAIN)),
    Attempt(RUNS, BREAKS_OFF, STOP_LOST, _stopped_again(_AGAIN)),
    Attempt(RUNS, BREAKS_OFF, NOT_SEEN, _owed(_AGAIN)),
    Attempt(LOST_DONE, WHOLE, WORKS, _stopped_again(_COMPLETE)),
    Attempt(LOST_DONE, BREAKS_OFF, NOT_SEEN, _owed(_AGAIN)),
    Attempt(RUNS_ALREADY, WHOLE, WORKS, _stopped_again(_COMPLETE)),
    Attempt(RUNS_ALREADY, BREAKS_OFF, NOT_SEEN, _owed(_AGAIN)),
    Attempt(REFUSED, NONE, WORKS, _fresh(_AGAIN)),
    Attempt(REFUSED, NONE, STOPPED_ALL_THE_SAME, _fresh(_AGAIN)),
    Attempt(REFUSED, NONE, RUNS_ALL_THE_SAME, _owed(_AGAIN)),
    Attempt(REFUSED, NONE, NOT_SEEN, _earlier(_AGAIN)),
    Attempt(DISK_FULL, NONE, WORKS, _fresh(_SOURCE.format(1))),
    Attempt(DISK_FULL, NONE, STOPPED_ALL_THE_SAME, _fresh(_SOURCE.format(1))),
    Attempt(DISK_FULL, NONE, RUNS_ALL_THE_SAME, _owed(_SOURCE.format(1))),
    Attempt(DISK_FULL, NONE, NOT_SEEN, _earlier(_SOURCE.format(1))),
    Attempt(LOST, NONE, WORKS, _fresh(_AGAIN, watched=True)),
    Attempt(LOST, NONE, STOPPED_ALL_THE_SAME, _fresh(_AGAIN, watched=True)),
    Attempt(LOST, NONE, RUNS_ALL_THE_SAME, _owed(_AGAIN)),
    Attempt(LOST, NONE, NOT_SEEN, _earlier(_AGAIN)),
    Attempt(STARTING, NONE, WORKS, _fresh(_AGAIN, watched=True)),
    Attempt(STARTING, NONE, STOP_LOST, _fresh(_AGAIN, watched=True)),
    Attempt(STARTING, NONE, RUNS_ALL_THE_SAME, _owed(_AGAIN)),
    Attempt(STARTING, NONE, NOT_SEEN, _earlier(_AGAIN)),
    Attempt(ERROR, NONE, WORKS, _fresh(_AGAIN, watched=True)),
    Attempt(ERROR, NONE, STOP_LOST, _fresh(_AGAIN, watched=True)),
    Attempt(ERROR, NONE, NOT_SEEN, _earlier(_AGAIN)),
    Attempt(ERROR_FULL, NONE, WORKS, _fresh(_SOURCE.format(1), watched=True)),
    Attempt(ERROR_FULL, NONE, NOT_SEEN, _earlier(_SOURCE.format(1))),
    Attempt(EXITS, NONE, WORKS, _fresh(_AGAIN, watched=True)),
    Attempt(EXITS, NONE, NOT_SEEN, _earlier(_AGAIN)),
    Attempt(FULL_BEFORE, NONE, NONE, _untouched(_SOURCE.format(1))),
    Attempt(GONE_BEFORE, NONE, NONE, _untouched(_SOURCE.format(1))),
)
"""What an attempt leaves. The number behind a state is the lease's epoch, behind a generation its attempts."""

LOOKS: tuple[Look, ...] = (
    Look("running", WORKS, _stopped_again(_AGAIN)),
    Look("running", STOP_LOST, _stopped_again(_AGAIN)),
    Look("running", NOT_SEEN, _owed(_AGAIN)),
    Look("stopped, while the start may still come", NONE, _earlier(_AGAIN)),
    Look("stopped", NONE, _fresh(_AGAIN)),
    Look(
        "gone",
        NONE,
        Rows(
            "failed, 2",
            "stopped 1, absent 2",
            "fresh",
            NONE,
            _SOURCE.format(1),
            "no",
            "no",
            _FRESH,
        ),
    ),
    Look("in transition", NONE, _earlier(_AGAIN)),
    Look("unknown", NONE, _earlier(_AGAIN)),
    Look("not answered", NONE, _earlier(_AGAIN)),
)
"""What a later look leaves where a start lost its reply and the stop failed (`watch_restart`)."""


def seen(lease: Lease, first: Receipt, asked: Continuation | None = None) -> Rows:
    """Read the cells of a lease off the database. `first` is the receipt from before the generation.

    `asked` is a continuation that waits for the run; where nobody asked, the last cell is what one would see.
    """
    lease.refresh_from_db()
    recovery = Recovery.objects.filter(lease=lease).latest("generation")
    receipts = Receipt.objects.filter(lease=lease).order_by("pk")
    proving = proof.receipts(lease)
    return Rows(
        lease=f"{lease.state}, {lease.epoch}",
        receipts=", ".join(f"{one.evidence} {one.epoch}" for one in receipts),
        proof="none" if not proving.exists() else "fresh" if proving.exclude(pk=first.pk).exists() else "earlier",
        owed=", ".join(sorted(open_kinds(lease))) or NONE,
        generation=_generation(recovery),
        may_run="yes" if lease.may_be_running_since is not None else "no",
        archive="offered" if archives.offered(company_id=lease.company_id, lease_id=lease.pk).exists() else "no",
        continuation=goes_on(lease, recovery) if asked is None else _became_of(asked),
    )


def _became_of(asked: Continuation) -> str:
    asked.refresh_from_db()
    return f"waits: {asked.hold}" if asked.state == asked.State.WAITING else f"starts: {asked.readiness}"


def open_kinds(lease: Lease) -> set[str]:
    """What is owed about a lease, and about the starts of its sandbox."""
    about = Obligation.objects.filter(lease=lease) | Obligation.objects.filter(operation__source=lease)
    return set(about.filter(closed_at__isnull=True).values_list("kind", flat=True))


def _generation(recovery: Recovery) -> str:
    told = f": {recovery.failure}, {recovery.disposition}" if recovery.failure else ""
    return f"{recovery.state}, {recovery.attempts}{told}"


def goes_on(lease: Lease, recovery: Recovery) -> str:
    """What whoever waits for the run sees: what it waits for, or in what workspace it goes on."""
    if recovery.state == Recovery.State.RUNNING:
        return _WAITS
    if not proof.is_proven_ended(lease):
        return _CLEANUP
    return _FILES if recovery.state == Recovery.State.COMPLETE else _FRESH
