"""A recovery of files, killed with SIGKILL before and after each write and call of an attempt, in a real process.

What a dead worker leaves is gone on with by the rules of the failure table: its start is settled by a look, what was
seen running is stopped, and the next attempt comes when its protection is over. Nothing is lost or runs unowned.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import leases
from leases import archives, proof
from leases.models import Lease, Operation, Recovery
from leases.models.environments import Policy
from tests import factories
from tests.crashing import CALL_BOUNDS_PASS, Processes, Scene, owed, processes, proven, started
from tests.failure_table import Rows, seen
from tests.scenarios.passing import shift
from tests.tracing import AFTER, BEFORE, Point

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(scope="module")
def forks(django_db_setup: None) -> Iterator[Processes]:
    with processes() as made:
        yield made


class Failed(Scene):
    """The stopped sandbox of a failed run, with a file in it, and a generation that is due."""

    def __init__(self, base: Path, forks: Processes) -> None:
        super().__init__(base, forks, policy=Policy.RETAIN_ON_FAILURE)
        self.lease = self.acquire_here()
        leases.bridge(self.lease.pk).execute(["sh", "-c", "echo written > file"])
        leases.release(self.lease.pk, outcome="failed")
        type(self.run).objects.filter(pk=self.run.pk).update(status="failed", finished_at=factories.at(0))
        assert self.sweep() == 1
        proven(self.lease, "stopped")
        started(self, 1)
        self.first = self.lease.receipts.get()
        self.recovery = leases.recover_workspace(
            self.lease.pk, self.lease.company_id, actor="operator", reason="the file is needed"
        )

    def rows(self) -> Rows:
        return seen(self.lease, self.first)

    def bounds_pass(self) -> None:
        """Long enough for every call and every saving to be over, and not for the protection of the dead worker."""
        self.time_passes(CALL_BOUNDS_PASS)
        self.recover(1)

    def protection_passes(self) -> None:
        Recovery.objects.filter(next_attempt_at__isnull=False).update(next_attempt_at=factories.at(0))
        self.time_passes(1000.0)
        shift(1000.0, only={"leases_attempt"})
        self.recover(1)

    def is_saved(self, *, attempts: int, starts: int) -> None:
        """The file is there, of the last epoch or one before, and nothing is owed but the end of what is kept."""
        self.recovery.refresh_from_db()
        assert (self.recovery.state, self.recovery.attempts, self.recovery.failure) == ("complete", attempts, "")
        (archive,) = archives.offered(company_id=self.lease.company_id, lease_id=self.lease.pk)
        with archives.open_archive(archive.pk, company_id=archive.company_id) as file:
            packed = io.BytesIO(file.read())
        with tarfile.open(fileobj=packed) as tar:
            written = tar.extractfile("./file")
            assert written is not None
            assert written.read() == b"written\n"
        self.is_at_rest()
        started(self, starts)

    def is_at_rest(self) -> None:
        self.lease.refresh_from_db()
        assert (self.lease.state, proof.is_proven_ended(self.lease)) == (Lease.State.RETAINED, True)
        assert self.executing() == []
        assert len(self.sandboxes()) == 1
        assert not owed().exists()
        assert not Operation.objects.filter(state="pending").exists()


@pytest.fixture
def failed(tmp_path: Path, forks: Processes) -> Iterator[Failed]:
    made = Failed(tmp_path, forks)
    try:
        yield made
    finally:
        made.close()


_WAITS, _FILES = "waits: workspace_repair_required", "starts: files_recovered"
_GENERATION = "dispose, end_recovery, recover_workspace"


def _kept(lease: str, receipts: str, generation: str) -> Rows:
    proof_is = "earlier" if receipts == "stopped 1" else "fresh"
    return Rows(lease, receipts, proof_is, _GENERATION, generation, "no", "no", _WAITS)


# What comes of it.


def untouched(scene: Failed) -> None:
    """Nothing was written of the attempt: it is the first one still."""
    assert scene.rows() == _kept("retained, 1", "stopped 1", "running, 0")
    scene.bounds_pass()
    scene.protection_passes()
    scene.is_saved(attempts=1, starts=2)


def withdrawn(scene: Failed) -> None:
    """Journalled, and not started: no proof until a look says so, which is a fresh receipt; then the next attempt."""
    assert (scene.rows().proof, scene.executing()) == ("none", [])
    scene.bounds_pass()
    assert scene.rows() == _kept("retained, 1", "stopped 1, stopped 1", "running, 1")
    scene.protection_passes()
    scene.is_saved(attempts=2, starts=2)


def stopped_again(scene: Failed) -> None:
    """It runs, and nobody confirmed it, or nobody saved its files: it is stopped, with a receipt of its own epoch."""
    started(scene, 2)
    assert scene.rows().proof == "none"
    scene.bounds_pass()
    assert scene.executing() == []
    assert scene.rows() == _kept("retained, 2", "stopped 1, stopped 2", "running, 1")
    scene.protection_passes()
    scene.is_saved(attempts=2, starts=3)


def saved(scene: Failed) -> None:
    """The archive is whole: it is offered once the sandbox is proven stopped, and nothing is started again."""
    scene.bounds_pass()
    scene.protection_passes()
    scene.protection_passes()
    scene.is_saved(attempts=1, starts=2)
    assert scene.rows().receipts == "stopped 1, stopped 2"


def noted(scene: Failed) -> None:
    """Why it failed is known, and that another attempt could only repeat it: there is none, whoever goes on."""
    assert (scene.rows().proof, scene.executing()) == ("none", [])
    scene.bounds_pass()
    assert scene.rows() == _kept("retained, 1", "stopped 1, stopped 1", "running, 1: source_unavailable, retry")
    scene.protection_passes()
    exhausted(scene)


def exhausted(scene: Failed) -> None:
    """No attempt follows, and the lease has a fresh receipt."""
    assert scene.rows() == Rows(
        "retained, 1",
        "stopped 1, stopped 1",
        "fresh",
        "dispose",
        "exhausted, 1: source_unavailable, use_alternative_strategy",
        "no",
        "no",
        "starts: fresh_isolated_workspace",
    )
    scene.is_at_rest()
    started(scene, 1)


def tried_again(scene: Failed) -> None:
    """Why it failed is known, and may pass."""
    assert (scene.rows().proof, scene.executing()) == ("none", [])
    scene.bounds_pass()
    failed_once(scene)


def failed_once(scene: Failed) -> None:
    """The attempt is over; the next one comes in its time."""
    again = "running, 1: provider_unavailable, retry"
    assert scene.rows() == _kept("retained, 1", "stopped 1, stopped 1", again)
    scene.protection_passes()
    scene.is_saved(attempts=2, starts=2)


Outcome = Callable[[Failed], None]
Steps = tuple[tuple[str, Outcome, Outcome], ...]

STEPS: Steps = (
    ("call identify", untouched, untouched),
    ("call inspect", untouched, untouched),
    ("commit recover_workspace._begin", untouched, withdrawn),
    ("call start", withdrawn, stopped_again),
    ("launch of its processes", withdrawn, stopped_again),  # inside the start: half of it done, and all but the answer
    ("call inspect (2)", stopped_again, stopped_again),
    ("commit recover_workspace._confirmed", stopped_again, stopped_again),
    ("commit recover_workspace._begin_archive", stopped_again, stopped_again),
    ("write of the archive", stopped_again, stopped_again),
    ("commit recover_workspace._save", stopped_again, saved),
    ("call identify (2)", saved, saved),
    ("call inspect (3)", saved, saved),
    ("commit evidence.announce", saved, saved),
    ("call stop", saved, saved),
    ("call inspect (4)", saved, saved),
    ("commit evidence.settle_with", saved, saved),
    ("commit recover_workspace._next (2)", saved, saved),
)
"""Every step of an attempt that saves the files, with its teardown, and what comes of it before and after each."""


def _refused(note: Outcome, over: Outcome) -> Steps:
    return (
        ("commit recover_workspace._begin", untouched, withdrawn),
        ("call start", withdrawn, withdrawn),
        ("commit recover_workspace._note_failure", withdrawn, note),
        ("commit recover_workspace._announce_stop", note, note),
        ("call stop", note, note),
        ("call inspect (2)", note, note),
        ("commit recover_workspace._after_stop", note, over),
    )


FULL, REFUSED = _refused(noted, exhausted), _refused(tried_again, failed_once)
"""The steps of one whose start is refused: for a full disk, and for what may pass."""

_ENGINES = ("commit claims.", "commit locking.", "write accounts.", "commit evidence.standing")
"""Steps of the engine, of the rows beside it, and those that only read."""


def points(steps: Steps) -> list[object]:
    return [
        pytest.param((when, step), outcome, id=f"{when} {step}")
        for step, *outcomes in steps
        for when, outcome in zip((BEFORE, AFTER), outcomes, strict=True)
    ]


def taken(scene: Scene) -> list[str]:
    """The steps that the attempt took, in order, but those that are the engine's."""
    steps = [step for when, step in scene.diary("work") if when == BEFORE and not step.startswith(_ENGINES)]
    return [step for step in steps if step != "commit recover_workspace._next"]  # nothing was written


def test_the_table_has_every_step_that_an_attempt_takes(failed: Failed) -> None:
    """Whoever adds a commit or a call to it is told here to say what becomes of it."""
    failed.work()
    failed.is_saved(attempts=1, starts=2)
    assert taken(failed) == [step for step, *_ in STEPS]


@pytest.mark.parametrize(("kind", "steps"), [("disk_full", FULL), ("refused", REFUSED)])
def test_and_every_step_of_one_that_is_refused(failed: Failed, kind: str, steps: Steps) -> None:
    failed.work(start=(kind, False))
    assert taken(failed) == ["call identify", "call inspect", *[step for step, *_ in steps]]


@pytest.mark.parametrize(("point", "outcome"), points(STEPS))
def test_an_attempt_that_is_killed_loses_nothing(failed: Failed, point: Point, outcome: Outcome) -> None:
    failed.work(dies_at=point)
    assert failed.diary("work")[-1] == point
    outcome(failed)


@pytest.mark.parametrize(("point", "outcome"), points(STEPS[4:8]))
def test_nor_one_whose_start_lost_its_reply(failed: Failed, point: Point, outcome: Outcome) -> None:
    failed.work(dies_at=point, start=("connection", True))
    outcome(failed)


@pytest.mark.parametrize("stop", [None, ("refused", False), ("timeout", True)], ids=["stops", "fails", "lost"])
@pytest.mark.parametrize(("point", "outcome"), points(FULL))
def test_an_attempt_with_a_full_disk_that_is_killed_is_the_last(
    failed: Failed, point: Point, outcome: Outcome, stop: tuple[str, bool] | None
) -> None:
    failed.work(dies_at=point, start=("disk_full", False), **({"stop": stop} if stop else {}))
    outcome(failed)


@pytest.mark.parametrize(("point", "outcome"), points(REFUSED[2:]))
def test_one_that_was_refused_and_is_killed_is_followed_by_another(
    failed: Failed, point: Point, outcome: Outcome
) -> None:
    failed.work(dies_at=point, start=("refused", False))
    outcome(failed)
