"""The failure table of a recovery of files, row by row, at a provider that fails on demand; the docs say the same."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from django.core.files.storage import storages
from django.db import connection
from pytest_django import Settings

from leases import bounds
from leases.models import Lease, Obligation, Receipt, Recovery
from providers.contract import ErrorKind, ProviderError
from tests import factories
from tests import failure_table as table
from tests.failed_task import FailedTask
from tests.failure_table import ATTEMPTS, LOOKS, Attempt, Look, Rows, seen
from tests.scenarios.passing import shift
from tests.scenarios.steps import fails, falls_due, sweep
from tests.scenarios.test_recovery import failed, owed, recover
from tests.stage import Rehearsal
from tests.tables import rows_of
from tests.tracing import AFTER, Point, Trace

pytestmark = pytest.mark.django_db(transaction=True)

DOCUMENT = Path(__file__).parents[2] / "docs" / "recovery.md"
NO_REPLY, NO_ANSWER = fails(ErrorKind.CONNECTION), fails(ErrorKind.SERVER)


@pytest.fixture(autouse=True)
def starts_are_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes a minute until it is given up takes a moment."""
    monkeypatch.setattr(import_module("cleanup.handlers.recover_workspace"), "_PAUSES", (0.0, 0.01, 0.01))
    monkeypatch.setattr(bounds, "RESUME", 0.1)


class Bench:
    """A stopped sandbox of a failed run in memory, to which the rows of the table are brought about."""

    def __init__(self, rehearsal: Rehearsal, settings: Settings, directory: Path) -> None:
        self.rehearsal, self.settings, self.directory = rehearsal, settings, directory
        self.lease: Lease = failed(rehearsal)
        self.first: Receipt = self.lease.receipts.get()
        self.task = FailedTask(rehearsal, leased=False)
        self.hooks, self.after = rehearsal.world.hooks, rehearsal.world.after

    def becomes(self, state: str, then: Callable[[str], None] | None = None) -> Callable[[str], None]:
        """A hook with which the sandbox is in this state."""

        def hook(subject: str) -> None:
            self.rehearsal.world.of(self.lease.resource_id).state = state
            if then is not None:
                then(subject)

        return hook

    def restart(self, how: str) -> None:
        match how:
            case table.REFUSED:
                self.hooks["start"] = fails(ErrorKind.REFUSED)
            case table.DISK_FULL:
                self.hooks["start"] = fails(ErrorKind.DISK_FULL)
            case table.LOST_DONE:
                self.after["start"] = NO_REPLY
            case table.LOST:
                self.hooks["start"] = NO_REPLY
            case table.STARTING:
                self.after["start"] = self.becomes("busy")
            case table.ERROR:
                self.after["start"] = self.becomes("unknown")
            case table.ERROR_FULL:
                self.after["start"] = self.becomes("full")
            case table.EXITS:
                self.after["start"] = self.becomes("stopped")
            case table.RUNS_ALREADY:
                self.becomes("running")("")
            case table.FULL_BEFORE:
                self.becomes("full")("")
            case table.GONE_BEFORE:
                self.becomes("hidden")("")
            case _:
                assert how == table.RUNS

    def saving(self, how: str) -> None:
        match how:
            case table.NO_WORKSPACE:
                self.hooks["archive"] = fails(ErrorKind.MISSING_PATH)
            case table.TOO_LARGE:
                self.settings.PAPERCLIP_ARCHIVE_MAX_BYTES = 1000
            case table.STORAGE:
                no_directory(self.settings, self.directory)
            case table.FULL_READING:
                self.after["archive"] = fails(ErrorKind.DISK_FULL)
            case table.BREAKS_OFF:
                self.after["archive"] = NO_REPLY
            case _:
                assert how in (table.WHOLE, table.NONE)

    def stop(self, how: str) -> None:
        match how:
            case table.STOP_LOST:
                self.after["stop"] = NO_REPLY
            case table.STOPPED_ALL_THE_SAME:
                self.hooks["stop"] = fails(ErrorKind.REFUSED)
            case table.RUNS_ALL_THE_SAME:
                self.hooks["stop"] = self.becomes("running", fails(ErrorKind.REFUSED))
            case table.NOT_SEEN:
                self.hooks["stop"] = self.and_is_not_seen
            case _:
                assert how in (table.WORKS, table.NONE)

    def and_is_not_seen(self, _: str) -> None:
        """A hook with which a stop fails, and no look is answered any more."""
        self.hooks["inspect"] = NO_ANSWER
        raise ProviderError(ErrorKind.REFUSED)

    def teardown_looks_again(self, stop: str) -> None:
        """A stop whose reply was lost is a failure of its teardown, which looks once more in half a minute."""
        if stop == table.STOP_LOST and self.lease.obligations.filter(kind="teardown", closed_at=None).exists():
            falls_due(owed(self.lease, "teardown"))
            sweep(self.rehearsal)

    def runs(self) -> bool:
        return self.rehearsal.world.of(self.lease.resource_id).state == "running"

    def answers(self) -> None:
        self.hooks.clear()
        self.after.clear()


def no_directory(settings: Settings, directory: Path) -> None:
    """Let the storage of archives be where there can be no directory."""
    file = directory / "file"
    file.touch()
    kept = settings.STORAGES["workspace_archives"]
    settings.STORAGES = {
        **settings.STORAGES,
        "workspace_archives": {**kept, "OPTIONS": {**kept["OPTIONS"], "location": str(file / "archives")}},
    }
    assert storages["workspace_archives"].path("one").startswith(str(file))


@pytest.fixture
def bench(rehearsal: Rehearsal, settings: Settings, tmp_path: Path) -> Bench:
    return Bench(rehearsal, settings, tmp_path)


@pytest.mark.parametrize("row", ATTEMPTS, ids=str)
def test_an_attempt_leaves_what_the_table_says(bench: Bench, row: Attempt) -> None:
    bench.restart(row.restart)
    bench.saving(row.saving)
    bench.stop(row.stop)
    asked = bench.task.commented()
    sweep(bench.rehearsal)
    bench.teardown_looks_again(row.stop)
    assert seen(bench.lease, bench.first, asked) == row.leaves


@pytest.mark.parametrize("row", LOOKS, ids=str)
def test_a_later_look_leaves_what_the_table_says(bench: Bench, row: Look) -> None:
    bench.restart(table.LOST)
    bench.stop(table.NOT_SEEN)
    asked = bench.task.commented()
    sweep(bench.rehearsal)
    assert seen(bench.lease, bench.first).may_run == "yes"
    bench.answers()
    bench.stop(row.stop)
    state, _, still = row.look.partition(", ")
    known = {"in transition": "busy", "gone": "hidden", "not answered": "running"}
    bench.becomes(known.get(state, state))("")
    if state == "not answered":
        bench.hooks["inspect"] = NO_ANSWER
    if not still:
        shift(bounds.START_OVER, only={"leases_operation"})
    falls_due(owed(bench.lease, "watch_restart"))
    sweep(bench.rehearsal)
    bench.teardown_looks_again(row.stop)
    assert seen(bench.lease, bench.first, asked) == row.leaves


# A worker that dies at its writes, with the same behaviour of the provider before and after


class Killed(BaseException):
    """The process ends: nothing of ours catches this."""


def killed_at(bench: Bench, point: Point | None) -> list[Point]:
    """Let a worker work on what is due, killed at this point. Returns the points of the handlers that it came to."""
    reached: list[Point] = []

    def write(at: Point) -> None:
        if at[0] == AFTER and "recover_workspace." in at[1]:
            reached.append(at)
        if at == point:
            raise Killed

    with Trace(write).commits(), suppress(Killed):
        sweep(bench.rehearsal)
    connection.close()  # as the operating system does, and with it what was not committed
    return reached


def a_worker_comes(bench: Bench) -> None:
    """Time passes, past every bound and the protection of the dead, and another worker works on what is due then."""
    for _ in range(3):
        bench.hooks.pop("inspect", None)  # it is seen again, until its stop fails once more
        shift(1000.0, only={"leases_operation", "leases_attempt", "leases_bridgeactivity"})
        Recovery.objects.filter(next_attempt_at__isnull=False).update(next_attempt_at=factories.at(0))
        about = Obligation.objects.filter(lease=bench.lease) | Obligation.objects.filter(operation__source=bench.lease)
        about = about.filter(closed_at=None, due_at__isnull=False)
        about.exclude(kind__in=["dispose", "end_recovery", "watch_restart"]).update(due_at=factories.at(-1))
        sweep(bench.rehearsal)
        generation = Recovery.objects.get(lease=bench.lease)
        if generation.attempts > 1 or generation.state != "running":
            return


@pytest.mark.parametrize(
    "row",
    [
        row
        for row in ATTEMPTS
        if row.restart in (table.DISK_FULL, table.LOST)
        and row.stop in (table.WORKS, table.RUNS_ALL_THE_SAME, table.NOT_SEEN)
    ],
    ids=str,
)
def test_a_row_is_the_same_when_a_worker_dies_on_the_way(
    transactional_db: None, settings: Settings, tmp_path: Path, row: Attempt
) -> None:
    """Killed after each of its writes: the next attempt leaves what the table says, or this one did.

    Where the look that settles its start finds it stopped before any stop, it is what a stop that works leaves.
    """
    works = next(one for one in ATTEMPTS if one.restart == row.restart and one.stop == table.WORKS)
    points: list[Point] = [(AFTER, "none of them")]
    for turn, point in enumerate(points):
        bench = Bench(Rehearsal(), settings, tmp_path)
        bench.restart(row.restart)
        bench.saving(row.saving)
        bench.stop(row.stop)
        recover(bench.lease)
        reached = killed_at(bench, point)
        if turn == 0:
            points.extend(reached)
            continue
        assert reached[-1] == point
        a_worker_comes(bench)
        bench.teardown_looks_again(row.stop)
        left = seen(bench.lease, bench.first)
        assert alike(left) in (alike(row.leaves), alike(works.leaves)), point
        assert bench.runs() == left.lease.startswith("pending")


def alike(rows: Rows) -> Rows:
    """What is the same whichever attempt it was: not their number, nor that of the receipts and epochs."""
    lease, generation = rows.lease.partition(",")[0], re.sub(r", \d", "", rows.generation)
    return replace(rows, lease=lease, receipts="", proof=str(rows.proof != "none"), generation=generation)


@pytest.mark.parametrize(
    ("heading", "rows"), [("What an attempt leaves", ATTEMPTS), ("What a later look leaves", LOOKS)]
)
def test_the_document_says_the_same(heading: str, rows: tuple[Any, ...]) -> None:
    told = rows_of(DOCUMENT, heading)
    flat = [{key: value for key, value in asdict(row).items() if key != "leaves"} | asdict(row.leaves) for row in rows]
    assert [list(row.values()) for row in told] == [[*row.values()] for row in flat]
