"""Acquire, killed with SIGKILL before and after each of its steps in a real process, on real sandboxes.

The table below says for every point what must come of it. Three fresh processes recover at once. Exactly one sandbox
was ever started, and it ends attached or with a receipt. What runs and what is left is asked of the operating system,
not of the adapter alone. For a sandbox that is used again see `test_resume_crash.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import leases
from leases import startup
from leases.errors import AcquireInProgress, AcquireRejected
from leases.models import Attempt, Lease, Obligation, Operation
from providers.daytona.rehearsal import rehearsing
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


@pytest.fixture
def scene(tmp_path: Path, forks: Processes) -> Iterator[Scene]:
    made = Scene(tmp_path, forks)
    made.setup = [["true"], ["sh", "-c", "exit 0"]]
    try:
        yield made
    finally:
        made.close()


# What comes of it.


def nothing(scene: Scene) -> None:
    """Nobody was asked and nothing is owed: the request, repeated, is the first of its kind."""
    assert not Operation.objects.exists()
    scene.time_passes(CALL_BOUNDS_PASS)
    scene.recover()
    nothing_is_left(scene, starts=0)
    assert scene.acquire_here().state == Lease.State.ACTIVE
    started(scene, 1)


def unasked(scene: Scene) -> None:
    """A name that is absent proves nothing; after the provider's creation window a person is asked, quietly."""
    operation = scene.operation("create")
    scene.time_passes(CALL_BOUNDS_PASS)
    scene.recover()
    (owner,) = operation.obligations.all()
    assert (owner.quiet, owner.is_open) == ("", True)
    assert Attempt.objects.get().outcome == Attempt.Outcome.NOT_SEEN
    scene.time_passes(CREATION_WINDOW_PASSES)
    scene.recover()
    owner.refresh_from_db()
    assert (owner.quiet, owner.due_at, owner.is_open) == ("creation_not_found", None, True)
    with pytest.raises(AcquireInProgress):
        scene.acquire_here()
    assert Lease.objects.count() == 0
    assert (scene.sandboxes(), scene.executing(), scene.starts()) == ([], [], 0)


def found(scene: Scene) -> None:
    """It is found, owned once, and destroyed with a receipt; the run's startup is over then, and not before."""
    _found(scene, starts=1)


def found_unborn(scene: Scene) -> None:
    """The same for one that is there and never ran."""
    _found(scene, starts=0)


def _found(scene: Scene, *, starts: int) -> None:
    started(scene, starts)
    operation = scene.operation("create")
    assert (operation.state, Lease.objects.count(), len(scene.sandboxes())) == ("pending", 0, 1)
    assert scene.sweep() == 0  # the call's bound has not passed: the acquire might still be alive
    assert startup.is_unsettled(scene.run.pk)

    scene.time_passes(CALL_BOUNDS_PASS)
    scene.recover()
    one_owner()
    lease = Lease.objects.get()
    operation.refresh_from_db()
    assert (lease.state, lease.pk) == (Lease.State.FAILED, operation.lease_uuid)
    assert (operation.state, operation.lease_id) == (Operation.State.RESOLVED, lease.pk)
    assert lease.resource_id == operation.resource_id
    proven(lease, "destroyed")
    assert scene.audited("run.startup_owed") == scene.audited("run.startup_ended") == 1
    with pytest.raises(AcquireRejected) as caught:
        scene.acquire_here()
    assert caught.value.code == "request_over"
    nothing_is_left(scene, starts=starts)


def attached(scene: Scene) -> None:
    """An ordinary lease. Its caller may never have heard of it; asking again tells, and a release ends it."""
    started(scene, 1)
    lease, operation = Lease.objects.get(), scene.operation("create")
    assert (lease.state, operation.state) == (Lease.State.ACTIVE, Operation.State.ATTACHED)
    scene.time_passes(CALL_BOUNDS_PASS)
    scene.recover()
    assert scene.audited("operation.recovered") == 0
    assert scene.acquire_here() == lease
    assert leases.bridge(lease.pk).execute(["true"]).exit_code == 0
    leases.release(lease.pk)
    scene.recover()
    proven(lease, "destroyed")
    nothing_is_left(scene, starts=1)


Outcome = Callable[[Scene], None]

STEPS: tuple[tuple[str, Outcome, Outcome], ...] = (
    ("call identify", nothing, nothing),
    ("write acquisition.attest", nothing, nothing),
    ("commit journal.begin", nothing, unasked),
    ("call create", unasked, found),
    ("launch of its processes", found_unborn, found),  # inside the create: half of it done, and all but the answer
    ("commit journal.save_resource_id", found, found),
    ("commit creating._set_up", found, found),
    ("call execute", found, found),
    ("write creating._set_up", found, found),
    ("commit creating._set_up (2)", found, found),
    ("call execute (2)", found, found),
    ("write creating._set_up (2)", found, found),
    ("commit creating._attach", found, attached),
    ("reply", attached, attached),
)
"""Every step of an acquire that creates, and what comes of it when the process dies right before it and right after."""

POINTS = [
    pytest.param((when, step), outcome, id=f"{when} {step}")
    for step, *outcomes in STEPS
    for when, outcome in zip((BEFORE, AFTER), outcomes, strict=True)
]


def test_the_table_has_every_step_that_an_acquire_takes(scene: Scene) -> None:
    """Whoever adds a commit or a call to acquire is told here to say what becomes of it."""
    lease = scene.acquire()
    assert lease is not None
    assert [step for when, step in scene.diary() if when == BEFORE] == [step for step, *_ in STEPS]
    assert len(scene.diary()) == 2 * len(STEPS)
    assert len(scene.sandboxes()) == 1
    assert scene.executing()


@pytest.mark.parametrize(("point", "outcome"), POINTS)
def test_an_acquire_that_is_killed_leaves_one_owned_sandbox_or_none(
    scene: Scene, point: Point, outcome: Outcome
) -> None:
    """K-16, K-21, S-056; before it asked, S-079."""
    told = scene.acquire(dies_at=point)
    assert (told is not None) == (point == (AFTER, "reply"))
    assert scene.diary()[-1] == point
    outcome(scene)


def test_three_that_recover_the_same_creation_at_the_same_time_make_one_owner(scene: Scene) -> None:
    """S-057: each has found the sandbox, and each but the last has lost its row to the next, when all go on at once."""
    scene.acquire(dies_at=(AFTER, "call create"))
    scene.time_passes(CALL_BOUNDS_PASS)
    scene.recover_together(at=(AFTER, "call find"))
    one_owner()
    assert scene.audited("lease.owned_for_teardown") == 1
    proven(Lease.objects.get(), "destroyed")
    assert Attempt.objects.filter(obligation__kind=Obligation.Kind.RECOVER_CREATION).count() == 3
    nothing_is_left(scene, starts=1)


def test_the_next_acquire_after_a_kill_makes_its_own_sandbox_and_meets_no_name_of_the_first(scene: Scene) -> None:
    """K-21: the second incarnation's name is its own, so it neither adopts the first nor trips over it."""
    scene.acquire(dies_at=(AFTER, "call create"))
    lease = scene.acquire(request_key="another request")
    assert lease is not None
    assert len(scene.sandboxes()) == 2
    scene.time_passes(CALL_BOUNDS_PASS)
    scene.recover()
    assert scene.sandboxes() == [lease.resource_id]
    assert leases.bridge(lease.pk).execute(["true"]).exit_code == 0
    assert (scene.starts(), Lease.objects.count()) == (2, 2)


# A provider that answers before the sandbox runs.


@pytest.fixture
def daytona(tmp_path: Path, forks: Processes) -> Iterator[DaytonaScene]:
    clock = Clock()
    with rehearsing(clock=clock, transition=5.0) as server:
        yield DaytonaScene(tmp_path, forks, server, clock)


WHILE_IT_COMES_UP = (
    *("call identify", "write acquisition.attest", "commit credentials.learned", "commit journal.begin"),
    *("call create", "POST sandbox", "commit journal.save_resource_id"),
    *("commit journal.keep_off_recovery", "call inspect", "commit creating._attach", "reply"),
)
"""Every step, each once: it is looked at until it runs, the recovery kept off before each look."""


def test_the_steps_of_a_creation_that_is_waited_for_are_known(tmp_path: Path, forks: Processes) -> None:
    with rehearsing(transition=0.2) as server:
        scene = DaytonaScene(tmp_path, forks, server, Clock())
        assert scene.acquire() is not None
        steps = [step for when, step in scene.diary() if when == BEFORE]
        assert tuple(dict.fromkeys(step.partition(" (")[0] for step in steps)) == WHILE_IT_COMES_UP


@pytest.mark.parametrize(
    "point",
    [
        (AFTER, "POST sandbox"),
        (AFTER, "call create"),
        (AFTER, "commit journal.save_resource_id"),
        (AFTER, "commit journal.keep_off_recovery"),
        (AFTER, "call inspect"),
        (BEFORE, "call inspect (2)"),
    ],
    ids=" ".join,
)
def test_one_that_was_still_coming_up_when_its_acquire_was_killed_is_owned_and_destroyed(
    daytona: DaytonaScene, point: Point
) -> None:
    """S-056: also while the provider neither stops nor deletes it, because it is starting."""
    daytona.acquire(dies_at=point)
    operation = daytona.operation("create")
    assert (operation.state, daytona.starts()) == ("pending", 1)
    assert daytona.sweep() == 0
    daytona.time_passes(CALL_BOUNDS_PASS)
    daytona.recover()
    one_owner()
    daytona.comes_to_rest()
    one_owner()
    # Daytona hides what it destroyed, so that two looks prove that it is gone.
    proven(Lease.objects.get(), "absent")
    with pytest.raises(AcquireRejected):
        daytona.acquire_here()
    nothing_is_left(daytona, starts=1)
