"""The start of a stopped sandbox, killed with SIGKILL before and after each of its steps in a real process.

As in `test_acquire_crash.py`, for a sandbox that is used again: by the run that had it, by another one, and where the
provider says that it cannot be had and another one is created. It was started at most once, for one owner; its files
are there in the end, whatever was killed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

import leases
from leases import proof
from leases.errors import AcquireInProgress, AcquireRejected
from leases.models import Attempt, Lease, Obligation, Operation
from leases.models.environments import Policy
from providers.daytona.rehearsal import rehearsing
from tests import factories
from tests.crashing import (
    CALL_BOUNDS_PASS,
    CREATION_WINDOW_PASSES,
    DaytonaScene,
    Processes,
    Scene,
    nothing_is_left,
    one_owner,
    processes,
    proven,
    started,
)
from tests.providers.rehearsed import Clock
from tests.tracing import AFTER, BEFORE, Point

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(scope="module")
def forks(django_db_setup: None) -> Iterator[Processes]:
    with processes() as made:
        yield made


class Kept(Scene):
    """A sandbox that was stopped and kept, with a file in it, for the next run of its environment."""

    def __init__(self, base: Path, forks: Processes) -> None:
        super().__init__(base, forks, policy=Policy.REUSE_BY_ENVIRONMENT)
        self.source = self.acquire_here(request_key="the first request")
        leases.bridge(self.source.pk).execute(["sh", "-c", "echo written > file"])
        leases.release(self.source.pk)
        assert self.sweep() == 1
        proven(self.source, "stopped")
        started(self, 1)
        assert self.executing() == []

    def another_run_asks(self) -> None:
        self.run = factories.run(self.account.company)

    def the_file_is_there(self, *, starts: int) -> None:
        """The next run gets the sandbox with its files, and a release ends it."""
        lease = self.acquire_here(factories.run(self.account.company), request_key="a later request")
        assert lease.resource_id == self.source.resource_id
        assert leases.bridge(lease.pk).execute(["cat", "file"]).stdout == b"written\n"
        started(self, starts)
        leases.release(lease.pk)
        self.recover()
        nothing_is_left(self, starts=starts, sandboxes=1)


@pytest.fixture
def kept(tmp_path: Path, forks: Processes) -> Iterator[Kept]:
    made = Kept(tmp_path, forks)
    try:
        yield made
    finally:
        made.close()


# What comes of it.


def nothing(scene: Kept) -> None:
    """Nobody was asked and nothing is owed: the receipt is proof, and the request, repeated, the first of its kind."""
    assert not Operation.objects.filter(kind="start").exists()
    scene.time_passes(CALL_BOUNDS_PASS)
    scene.recover()
    proven(scene.source, "stopped")
    nothing_is_left(scene, starts=1, sandboxes=1)
    assert scene.acquire_here().resource_id == scene.source.resource_id
    started(scene, 2)


def withdrawn(scene: Kept) -> None:
    """It was not started: no receipt proves anything until a look says so, and then the one from before does again."""
    start = scene.operation("start")
    assert (start.state, scene.executing()) == (Operation.State.PENDING, [])
    assert not proof.is_proven_ended(scene.source)
    assert scene.sweep() == 0  # its caller might still be about to start it
    scene.time_passes(CALL_BOUNDS_PASS)
    scene.recover()
    start.refresh_from_db()
    assert (start.state, start.lease) == (Operation.State.RESOLVED, None)
    assert (scene.audited("operation.withdrawn"), scene.audited("lease.reopened")) == (1, 0)
    proven(scene.source, "stopped")
    assert (scene.source.state, scene.source.epoch) == (Lease.State.RELEASED, 1)
    nothing_is_left(scene, starts=1, sandboxes=1)
    is_over(scene)
    scene.the_file_is_there(starts=2)


def stopped_again(scene: Kept) -> None:
    """It runs for nobody: its epoch rises with the sighting, it is stopped, and nothing of it is lost."""
    started(scene, 2)
    start = scene.operation("start")
    assert start.state == Operation.State.PENDING
    assert not proof.is_proven_ended(scene.source)
    assert scene.executing()
    assert scene.sweep() == 0
    scene.time_passes(CALL_BOUNDS_PASS)
    scene.recover()
    one_owner()
    teardown = scene.source.obligations.filter(kind="teardown").latest("pk")
    assert (teardown.kind, teardown.verb, teardown.closed_as) == ("teardown", "stop_only", "proven")
    proven(scene.source, "stopped", "stopped")
    assert (scene.source.state, scene.source.epoch) == (Lease.State.RELEASED, 2)
    assert [receipt.epoch for receipt in scene.source.receipts.order_by("pk")] == [1, 2]
    assert scene.audited("run.startup_owed") == scene.audited("run.startup_ended") == 1
    nothing_is_left(scene, starts=2, sandboxes=1)
    is_over(scene)
    scene.the_file_is_there(starts=3)


def attached(scene: Kept) -> None:
    """An ordinary lease: asking again tells of it, and a release stops it."""
    started(scene, 2)
    start = scene.operation("start")
    lease = Lease.objects.get(state=Lease.State.ACTIVE)
    assert (start.state, start.lease, lease.epoch) == (Operation.State.ATTACHED, lease, 2)
    scene.source.refresh_from_db()
    same_run = scene.run.pk == scene.source.run_id
    assert (scene.source == lease) is same_run
    if not same_run:
        assert (scene.source.state, scene.source.successor) == (Lease.State.EXPIRED, lease)
        proven(scene.source, "stopped")
    scene.time_passes(CALL_BOUNDS_PASS)
    scene.recover()
    assert scene.audited("operation.recovered", "operation.withdrawn") == 0
    assert scene.acquire_here() == lease
    leases.release(lease.pk)
    scene.recover()
    proven(lease, *["stopped"] * (2 if same_run else 1))
    nothing_is_left(scene, starts=2, sandboxes=1)
    scene.the_file_is_there(starts=3)


def is_over(scene: Scene) -> None:
    """The request, repeated, neither starts nor creates anything more."""
    with pytest.raises(AcquireRejected) as caught:
        scene.acquire_here()
    assert caught.value.code == "request_over"


Outcome = Callable[[Kept], None]

STEPS: tuple[tuple[str, Outcome, Outcome], ...] = (
    ("call identify", nothing, nothing),
    ("commit journal.begin", nothing, withdrawn),
    ("call inspect", withdrawn, withdrawn),
    ("commit journal.keep_off_recovery", withdrawn, withdrawn),
    ("call start", withdrawn, stopped_again),
    ("launch of its processes", withdrawn, stopped_again),  # inside the start: half of it done, and all but the answer
    ("call inspect (2)", stopped_again, stopped_again),
    ("commit reuse._attach", stopped_again, attached),
    ("reply", attached, attached),
)
"""Every step of an acquire that starts a stopped sandbox, and what comes of it right before it and right after."""


def points(steps: tuple[tuple[str, Outcome, Outcome], ...]) -> list[object]:
    return [
        pytest.param((when, step), outcome, id=f"{when} {step}")
        for step, *outcomes in steps
        for when, outcome in zip((BEFORE, AFTER), outcomes, strict=True)
    ]


def taken(scene: Scene) -> list[str]:
    """The steps that the acquire took, in order, each of which has an end."""
    diary = scene.diary("acquire")
    steps = [step for when, step in diary if when == BEFORE]
    assert len(diary) == 2 * len(steps)
    return steps


@pytest.mark.parametrize("run", ["the same run", "another run"])
def test_the_table_has_every_step_that_a_resume_takes(kept: Kept, run: str) -> None:
    """Whoever adds a commit or a call to it is told here to say what becomes of it."""
    if run == "another run":
        kept.another_run_asks()
    lease = kept.acquire()
    assert lease is not None
    assert lease.resource_id == kept.source.resource_id
    assert taken(kept) == [step for step, *_ in STEPS]
    assert kept.executing()


@pytest.mark.parametrize(("point", "outcome"), points(STEPS))
def test_a_resume_that_is_killed_leaves_it_stopped_or_owned(kept: Kept, point: Point, outcome: Outcome) -> None:
    kept.acquire(dies_at=point)
    assert kept.diary()[-1] == point
    outcome(kept)


@pytest.mark.parametrize(
    ("point", "outcome"), points(tuple(step for step in STEPS if step[0] in ("call start", "commit reuse._attach")))
)
def test_a_succession_that_is_killed_leaves_it_stopped_or_owned(kept: Kept, point: Point, outcome: Outcome) -> None:
    """Where another run was to have it: the predecessor stays what it was until the very commit."""
    kept.another_run_asks()
    kept.acquire(dies_at=point)
    outcome(kept)


@pytest.mark.parametrize("dies_at", [(AFTER, "call start"), (BEFORE, "call start")])
def test_three_that_recover_the_same_start_at_the_same_time_make_one_owner(kept: Kept, dies_at: Point) -> None:
    """Each has seen it, and each but the last has lost its row to the next, when all go on at once."""
    kept.acquire(dies_at=dies_at)
    kept.time_passes(CALL_BOUNDS_PASS)
    kept.recover_together(at=(AFTER, "call inspect"))
    was_started = dies_at[0] == AFTER
    assert kept.audited("operation.recovered", "operation.withdrawn") == 1
    assert kept.audited("lease.reopened") == was_started
    proven(kept.source, *["stopped"] * (1 + was_started))
    assert Attempt.objects.filter(obligation__kind=Obligation.Kind.RECOVER_START).count() == 3
    nothing_is_left(kept, starts=1 + was_started, sandboxes=1)


# Where it cannot be had again, and another one is created.


class Vanished(Kept):
    """The sandbox to be used again was removed behind our back."""

    def __init__(self, base: Path, forks: Processes) -> None:
        super().__init__(base, forks)
        self.provider.delete(self.source.resource_id, within=30.0)
        self.another_run_asks()


@pytest.fixture
def vanished(tmp_path: Path, forks: Processes) -> Iterator[Vanished]:
    made = Vanished(tmp_path, forks)
    try:
        yield made
    finally:
        made.close()


def replaced_later(scene: Kept) -> None:
    """Nothing was journalled: the request, repeated, is the first, and has its replacement."""
    assert not Operation.objects.filter(kind="start").exists()
    scene.time_passes(CALL_BOUNDS_PASS)
    scene.recover()
    nothing_is_left(scene, starts=1)
    assert scene.acquire_here().resource_id != scene.source.resource_id
    started(scene, 2)
    scene.recover()
    the_old_one_is_gone(scene)


def gone(scene: Kept) -> None:
    """The start is over, the old one's end is proven, and nothing was created in its place."""
    scene.time_passes(CALL_BOUNDS_PASS)
    scene.recover()
    one_owner()
    the_old_one_is_gone(scene)
    nothing_is_left(scene, starts=1)
    is_over(scene)


def unasked(scene: Kept) -> None:
    """The creation in its place is journalled and was not asked for: a question for a person in the end."""
    creation = scene.operation("create")
    assert creation.state == Operation.State.PENDING
    scene.time_passes(CALL_BOUNDS_PASS)
    scene.recover()
    scene.time_passes(CREATION_WINDOW_PASSES)
    scene.recover()
    the_old_one_is_gone(scene)
    assert creation.obligations.get().quiet == "creation_not_found"
    with pytest.raises(AcquireInProgress):
        scene.acquire_here()
    assert (scene.sandboxes(), scene.starts()) == ([], 1)


def found(scene: Kept) -> None:
    """The new one is found, owned once and destroyed."""
    _found(scene, starts=2)


def found_unborn(scene: Kept) -> None:
    """The same for one that is there and never ran."""
    _found(scene, starts=1)


def _found(scene: Kept, *, starts: int) -> None:
    started(scene, starts)
    creation = scene.operation("create")
    scene.time_passes(CALL_BOUNDS_PASS)
    scene.recover()
    assert scene.audited("operation.recovered") == scene.audited("lease.owned_for_teardown") == 1
    proven(Lease.objects.get(pk=creation.lease_uuid), "destroyed")
    the_old_one_is_gone(scene)
    nothing_is_left(scene, starts=starts)
    is_over(scene)


def replaced(scene: Kept) -> None:
    """An ordinary lease of the new one."""
    started(scene, 2)
    lease = Lease.objects.get(state=Lease.State.ACTIVE)
    scene.time_passes(CALL_BOUNDS_PASS)
    scene.recover()
    the_old_one_is_gone(scene)
    assert scene.acquire_here() == lease
    leases.release(lease.pk, disposition="destroy")
    scene.recover()
    proven(lease, "destroyed")
    nothing_is_left(scene, starts=2)


def the_old_one_is_gone(scene: Kept) -> None:
    proven(scene.source, "stopped", "absent")
    assert (scene.source.state, scene.source.epoch) == (Lease.State.EXPIRED, 2)
    assert Operation.objects.get(kind="start").state == Operation.State.RESOLVED


REPLACEMENT: tuple[tuple[str, Outcome, Outcome], ...] = (
    ("call identify", replaced_later, replaced_later),
    ("commit journal.begin", replaced_later, gone),
    ("call inspect", gone, gone),
    ("call identify (2)", gone, gone),
    ("commit reuse.replace", gone, unasked),
    ("call create", unasked, found),
    ("launch of its processes", found_unborn, found),
    ("commit journal.save_resource_id", found, found),
    ("commit creating._attach", found, replaced),
    ("reply", replaced, replaced),
)
"""Every step of an acquire that creates another sandbox in place of one that cannot be had again."""


def test_the_table_has_every_step_that_a_replacement_takes(vanished: Vanished) -> None:
    assert vanished.acquire() is not None
    assert taken(vanished) == [step for step, *_ in REPLACEMENT]


@pytest.mark.parametrize(("point", "outcome"), points(REPLACEMENT))
def test_a_replacement_that_is_killed_leaves_one_owned_sandbox_or_none(
    vanished: Vanished, point: Point, outcome: Outcome
) -> None:
    vanished.acquire(dies_at=point)
    assert vanished.diary("acquire")[-1] == point
    outcome(vanished)


# A provider that accepts a start and is not done with it.


class KeptAtDaytona(DaytonaScene):
    """A sandbox that was stopped and kept, with a file in it; starting it takes a while."""

    def __init__(self, *place: Any) -> None:
        super().__init__(*place, policy=Policy.REUSE_BY_ENVIRONMENT)
        with self.at_once():
            self.source = self.acquire_here(request_key="the first request")
            leases.bridge(self.source.pk).execute(["sh", "-c", "echo written > file"])
            leases.release(self.source.pk)
            assert self.sweep() == 1
        proven(self.source, "stopped")
        assert (self.starts(), self.executing()) == (1, [])

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Let the service do everything at once."""
        world, takes = self.server.world, self.server.world.transition
        world.transition = 0.0
        try:
            yield
        finally:
            world.transition = takes


def kept_at_daytona(base: Path, forks: Processes, **options: Any) -> AbstractContextManager[KeptAtDaytona]:
    @contextmanager
    def make() -> Iterator[KeptAtDaytona]:
        clock = Clock()
        with rehearsing(**{"clock": clock, **options}) as server:
            yield KeptAtDaytona(base, forks, server, clock)

    return make()


WHILE_IT_STARTS = (
    *("call identify", "commit journal.begin", "call inspect", "commit journal.keep_off_recovery"),
    *("call start", "POST start", "call extend", "POST 60", "commit reuse._attach", "reply"),
)
"""Every step, each once: it is looked at until it runs, and then has the service's own deadline again."""


def test_the_steps_of_a_start_that_is_waited_for_are_known(tmp_path: Path, forks: Processes) -> None:
    with kept_at_daytona(tmp_path, forks, clock=time.time, transition=0.2) as kept:
        assert kept.acquire() is not None
        assert tuple(dict.fromkeys(step.partition(" (")[0] for step in taken(kept))) == WHILE_IT_STARTS


@pytest.mark.parametrize(
    ("point", "takes"),
    [
        ((AFTER, "POST start"), 5.0),
        ((AFTER, "call start"), 5.0),
        ((AFTER, "call inspect (2)"), 5.0),
        ((BEFORE, "call extend"), 0.0),
        ((AFTER, "POST 60"), 0.0),
        ((BEFORE, "commit reuse._attach"), 0.0),
    ],
    ids=str,
)
def test_one_that_was_starting_when_its_acquire_was_killed_is_stopped_again_and_kept(
    tmp_path: Path, forks: Processes, point: Point, takes: float
) -> None:
    """It is neither withdrawn nor stopped while it starts: what is seen then says nothing yet."""
    with kept_at_daytona(tmp_path, forks, transition=takes) as kept:
        kept.acquire(dies_at=point)
        start = kept.operation("start")
        assert (start.state, kept.starts()) == ("pending", 2)
        assert not proof.is_proven_ended(kept.source)
        assert kept.sweep() == 0
        kept.time_passes(CALL_BOUNDS_PASS)
        kept.recover()
        if takes:
            assert kept.audited("operation.recovered", "operation.withdrawn") == 0
            assert not proof.is_proven_ended(kept.source)
        kept.comes_to_rest()
        one_owner()
        proven(kept.source, "stopped", "stopped")
        assert (kept.source.state, kept.source.epoch, kept.source.files_lost) == ("released", 2, False)
        is_over(kept)
        nothing_is_left(kept, starts=2, sandboxes=1)
        with kept.at_once():
            lease = kept.acquire_here(factories.run(kept.account.company), request_key="a later request")
            assert lease.resource_id == kept.source.resource_id
            assert leases.bridge(lease.pk).execute(["cat", "file"]).stdout == b"written\n"
