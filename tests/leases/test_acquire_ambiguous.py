"""Commits whose reply is lost, at each commit of acquire and of resume: the same lease, or the same refusal, and never
two sandboxes.

Each path is first walked undisturbed, which tells its commits; a table says which they are, so that a new one is not
passed over. Then it is walked once for each, and everything that came of it is compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from django.db import OperationalError, connection

import leases
from leases import journal
from leases.errors import AcquireUncertain, LeaseError
from leases.models import BridgeActivity, Installation, Lease, Obligation, Operation, Run
from leases.models.environments import Policy
from leases.patience import Patience
from providers.contract import Created, ErrorKind, Resource
from tests import factories
from tests.concurrency import elsewhere
from tests.rehearsal import RehearsalProvider
from tests.scenarios.steps import evidence, fails, state, sweep
from tests.stage import Rehearsal
from tests.tracing import AFTER, Point, Trace

pytestmark = pytest.mark.django_db(transaction=True)


def acquire(stage: Rehearsal, run: Run, **how: Any) -> Lease:
    how.setdefault("patience", Patience(pause=lambda _: None))
    how.setdefault("request_key", f"request of {run.pk}")
    return leases.acquire(stage.environment.pk, company_id=stage.company.pk, run_id=run.pk, **how)


def kept(stage: Rehearsal) -> Lease:
    lease = leases.release(acquire(stage, stage.run, request_key="the first").pk)
    assert sweep(stage) == {"proven": 1}
    return lease


# Paths: each prepares a stage, and returns what is then done on it.

Act = Callable[[], Lease]


def creates(stage: Rehearsal) -> Act:
    """A sandbox that is not ready at once, and is set up with two commands."""
    looks: list[str] = []

    def comes_up(resource_id: str) -> None:
        looks.append(resource_id)
        stage.world.of(resource_id).state = "running" if len(looks) > 1 else "busy"

    stage.world.hooks["inspect"] = comes_up
    return lambda: acquire(stage, stage.run, setup=[["one"], ["two"]])


def is_refused(stage: Rehearsal) -> Act:
    stage.world.hooks["create"] = fails(ErrorKind.INVALID, nothing_allocated=True)
    return lambda: acquire(stage, stage.run)


def is_not_answered(stage: Rehearsal) -> Act:
    stage.world.after["create"] = fails(ErrorKind.CONNECTION)
    return lambda: acquire(stage, stage.run)


def cannot_be_set_up(stage: Rehearsal) -> Act:
    stage.world.hooks["execute"] = fails(ErrorKind.REFUSED)
    return lambda: acquire(stage, stage.run, setup=[["one"]])


def is_rejected(stage: Rehearsal) -> Act:
    stage.world.after["create"] = lambda _: elsewhere(lambda: _is_over(stage.run))
    return lambda: acquire(stage, stage.run)


def resumes(stage: Rehearsal) -> Act:
    kept(stage)
    return lambda: acquire(stage, stage.run)


def succeeds(stage: Rehearsal) -> Act:
    kept(stage)
    run = factories.run(stage.company)
    return lambda: acquire(stage, run)


def cannot_be_started(stage: Rehearsal) -> Act:
    act = succeeds(stage)
    stage.world.hooks["start"] = fails(ErrorKind.REFUSED)
    return act


def may_not_be_resumed(stage: Rehearsal) -> Act:
    kept(stage)
    run = factories.run(stage.company)
    stage.world.after["start"] = lambda _: elsewhere(lambda: _is_over(run))
    return lambda: acquire(stage, run)


def is_replaced(stage: Rehearsal) -> Act:
    act = succeeds(stage)
    stage.world.hooks["start"] = fails(ErrorKind.CANNOT_START)
    return act


def _is_over(run: Run) -> None:
    Run.objects.filter(pk=run.pk).update(status=Run.Status.CANCELLED)


BEGIN, SAVE, ATTACH = "commit journal.begin", "commit journal.save_resource_id", "commit creating._attach"
STILL_MINE = "commit journal.keep_off_recovery"

PATHS: dict[Callable[[Rehearsal], Act], tuple[str, ...]] = {
    creates: (
        *("write acquisition.attest", BEGIN, SAVE),
        *("commit journal.keep_off_recovery", "commit journal.keep_off_recovery (2)"),
        *("commit creating._set_up", "write creating._set_up", "commit creating._set_up (2)"),
        *("write creating._set_up (2)", ATTACH),
    ),
    is_refused: ("write acquisition.attest", BEGIN, "commit creating._not_created"),
    is_not_answered: ("write acquisition.attest", BEGIN, "commit creating._not_created"),
    cannot_be_set_up: (
        *("write acquisition.attest", BEGIN, SAVE),
        *("commit creating._set_up", "write creating._set_up", "commit creating._give_back"),
    ),
    is_rejected: ("write acquisition.attest", BEGIN, SAVE, ATTACH),
    resumes: (BEGIN, STILL_MINE, "commit reuse._attach"),
    succeeds: (BEGIN, STILL_MINE, "commit reuse._attach"),
    cannot_be_started: (BEGIN, STILL_MINE, "commit journal.give_up"),
    may_not_be_resumed: (BEGIN, STILL_MINE, "commit reuse._attach"),
    is_replaced: (BEGIN, STILL_MINE, "commit reuse.replace", SAVE, ATTACH),
}
"""The commits of each path, and the writes outside a transaction, in order."""


@dataclass(frozen=True)
class Told:
    """What the caller was told: that it has a lease, or the refusal; and what the provider was asked to bring forth."""

    answer: str
    creates: int
    starts: int
    running: int
    owed: tuple[str, ...]


def walk(path: Callable[[Rehearsal], Act], reached: Callable[[Point], None]) -> tuple[Rehearsal, Told]:
    stage = Rehearsal(policy=Policy.REUSE_BY_ENVIRONMENT)
    Installation.current()  # a row that is there after the first acquire of all
    act = path(stage)
    with Trace(reached).commits():
        try:
            answer = f"lease {act().state}"
        except LeaseError as error:
            answer = f"{type(error).__name__} {error.code}"
    owed = Obligation.objects.filter(company_id=stage.company.pk, closed_at__isnull=True).order_by("pk")
    running = sum(box.state == "running" for box in stage.world.boxes.values())
    told = Told(
        answer,
        stage.world.count("create"),
        stage.world.count("start"),
        running,
        tuple(owed.values_list("kind", flat=True)),
    )
    return stage, told


def loses(at: str) -> tuple[list[str], Callable[[Point], None]]:
    """Lose the connection right after this commit, before its reply; once."""
    happened: list[str] = []

    def reached(point: Point) -> None:
        if point == (AFTER, at) and not happened:
            happened.append(at)
            connection.connection.close()
            raise OperationalError("server closed the connection unexpectedly")

    return happened, reached


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Creations are answered before the sandbox runs."""
    create = RehearsalProvider.create
    monkeypatch.setattr(
        RehearsalProvider,
        "create",
        lambda *args, **kwargs: Created(create(*args, **kwargs).resource, ready=False),
    )


@pytest.fixture
def path(request: pytest.FixtureRequest) -> Callable[[Rehearsal], Act]:
    if request.param is creates:
        request.getfixturevalue("slow")
    chosen: Callable[[Rehearsal], Act] = request.param
    return chosen


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.__name__, indirect=True)
def test_a_commit_whose_reply_is_lost_changes_nothing_of_what_comes_of_it(path: Callable[[Rehearsal], Act]) -> None:
    """S-059, S-072: the same answer, the same calls, and the same things owed, whichever commit it is."""
    seen: list[Point] = []
    _, undisturbed = walk(path, seen.append)
    assert [step for when, step in seen if when == AFTER] == list(PATHS[path])
    for commit in PATHS[path]:
        if commit == "write acquisition.attest":
            continue
        happened, reached = loses(commit)
        stage, told = walk(path, reached)
        assert happened == [commit]
        assert told == undisturbed, commit
        # What it leaves is whole: it can be paid, or released, to the end.
        stage.world.hooks.clear()
        for lease in Lease.objects.filter(company=stage.company, state=Lease.State.ACTIVE):
            leases.release(lease.pk, disposition="destroy")
        sweep(stage)
        assert (
            not Obligation.objects.filter(company=stage.company, closed_at__isnull=True)
            .exclude(kind="dispose")
            .exists()
        ), commit
        assert not BridgeActivity.objects.filter(company=stage.company, ended_at__isnull=True).exists(), commit
        assert not any(box.state == "running" for box in stage.world.boxes.values()), commit


def test_a_first_word_of_the_account_whose_reply_is_lost_owns_nothing(rehearsal: Rehearsal) -> None:
    """It is before the journal: nobody was asked to create anything, and the request may be repeated."""
    _, reached = loses("write acquisition.attest")
    with Trace(reached).commits(), pytest.raises(OperationalError):
        acquire(rehearsal, rehearsal.run)
    connection.close()  # as Django does when a request ends, and a worker when a task does
    assert (Operation.objects.count(), rehearsal.world.count("create")) == (0, 0)
    assert state(acquire(rehearsal, rehearsal.run)) == "active"


def test_an_abandoned_acquire_whose_giving_up_is_ambiguous_is_owned_all_the_same(rehearsal: Rehearsal) -> None:
    """Ctrl-C during the create, and the connection breaks with the commit that gives it up."""

    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    rehearsal.world.after["create"] = interrupt
    happened, reached = loses("commit journal.give_up")
    with Trace(reached).commits(), pytest.raises(KeyboardInterrupt):
        acquire(rehearsal, rehearsal.run)
    assert happened
    assert sweep(rehearsal) == {"proven": 2}
    assert (evidence(Lease.objects.get()), rehearsal.world.boxes) == (["destroyed"], {})


def test_a_second_sandbox_of_one_creation_gets_one_owner_also_when_that_commit_is_ambiguous(
    rehearsal: Rehearsal,
) -> None:
    """A provider that breaks its word: what the recovery found under the name is not what the create answers."""

    def another_is_found(_: str) -> None:
        (box,) = rehearsal.world.boxes.values()
        other = Resource("another", box.resource.name, dict(box.resource.marks))
        rehearsal.world.boxes["another"] = type(box)(other)
        elsewhere(lambda: journal.save_resource_id(Operation.objects.get(), "another"))

    rehearsal.world.after["create"] = another_is_found
    happened, reached = loses("commit journal.save_answered_id")
    with Trace(reached).commits(), pytest.raises(AcquireUncertain):
        acquire(rehearsal, rehearsal.run)
    assert happened
    assert Operation.objects.count() == 2
