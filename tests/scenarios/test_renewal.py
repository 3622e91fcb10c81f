"""J: the protection of a claim, its renewal, and cooldowns. Numbers are the design's (section 5)."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from random import Random

import pytest
from django.db import transaction

from cleanup import backoff, claims
from cleanup.claims import claim, new_ids
from cleanup.engine import Engine
from cleanup.keeper import Keeper
from leases.clock import boottime
from leases.models import Attempt, Obligation
from providers.contract import ErrorKind
from tests.concurrency import BOUND, Background, Gate
from tests.scenarios.steps import due_in, fails, falls_due, owed, released, sweep
from tests.stage import Rehearsal


@pytest.mark.parametrize(("failures", "least", "most"), [(1, 30, 38), (2, 60, 105), (3, 170, 291), (4, 480, 810)])
def test_a_cooldown_grows_with_jitter_between_its_bounds(failures: int, least: float, most: float) -> None:
    """S-187."""
    waits = [backoff.cooldown(failures, Random(seed)) for seed in range(200)]  # noqa: S311 - reproducible
    assert least <= min(waits) < max(waits) <= most
    assert all(backoff.COOLDOWN_FIRST <= wait <= backoff.COOLDOWN_LAST for wait in waits)


@pytest.mark.parametrize("failures", [5, 6, 1000, 2**31])
def test_from_the_fifth_failure_on_it_is_half_an_hour_without_end(failures: int) -> None:
    """S-180, S-206."""
    assert {backoff.cooldown(failures, Random(seed)) for seed in range(20)} == {1800.0}  # noqa: S311


def test_a_busy_row_is_looked_at_between_two_seconds_and_five_minutes() -> None:
    least = [min(backoff.busy(count, Random(seed)) for seed in range(50)) for count in range(1, 12)]  # noqa: S311
    assert 2.0 <= least[0] <= 2.5
    assert all(b >= a for a, b in pairwise(least))
    assert max(backoff.busy(10**9, Random(seed)) for seed in range(50)) == 300.0  # noqa: S311


def test_a_failed_attempt_cools_down_by_the_databases_clock(rehearsal: Rehearsal) -> None:
    lease = released(rehearsal)
    rehearsal.world.hooks["inspect"] = fails(ErrorKind.REFUSED)
    sweep(rehearsal)
    assert 25 < due_in(owed(lease)) <= 38


def test_the_keeper_renews_what_a_slow_call_is_at_work_on(rehearsal: Rehearsal) -> None:
    """S-179: a call that blocks keeps its row for as long as its process lives."""
    lease = released(rehearsal)
    gate = Gate()
    rehearsal.world.hooks["inspect"] = gate
    keeper = Keeper(every=0.01)
    working = Background(lambda: Engine(keeper=keeper).sweep(rehearsal.account.pk))
    gate.wait()
    row = owed(lease)
    falls_due(row)
    _eventually(lambda: due_in(row) > 14 * 60)
    gate.open()
    assert working.result().outcomes == {"proven": 1}


def test_a_renewal_that_hangs_holds_up_neither_the_settle_nor_the_cooldown(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-180, S-181, S-183."""
    lease = released(rehearsal)
    Obligation.objects.filter(lease=lease).update(failures=4)
    renewing, answered = Gate(), Gate()
    original = claims.renew

    def hang(*args: object, **options: object) -> None:
        renewing()
        original(*args, **options)  # type: ignore[arg-type]
        answered.reached.set()

    monkeypatch.setattr("cleanup.keeper.claims.renew", hang)
    rehearsal.world.hooks["inspect"] = lambda _: (renewing.wait(), fails(ErrorKind.REFUSED)(""))
    keeper = Keeper(every=0.01)
    assert Engine(keeper=keeper).sweep(rehearsal.account.pk).outcomes == {"failed": 1}
    row = owed(lease)
    assert row.attempt_id is None
    assert 29 * 60 < due_in(row) <= 30 * 60
    assert sweep(rehearsal) == {}
    before = Obligation.objects.filter(pk=row.pk).values().get()
    renewing.open()  # it finishes late, and touches nothing
    answered.wait()
    assert Obligation.objects.filter(pk=row.pk).values().get() == before


def test_a_late_renewal_does_not_touch_a_newer_attempt(rehearsal: Rehearsal) -> None:
    """S-183, domain I-13."""
    lease = released(rehearsal)
    (old,) = claim(rehearsal.account.pk, new_ids(1), worker="old", clock=boottime)
    falls_due(owed(lease))
    (new,) = claim(rehearsal.account.pk, new_ids(1), worker="new", clock=boottime)
    row = owed(lease)
    claims.renew([old], clock=boottime)
    row_after = owed(lease)
    assert (row_after.due_at, row_after.attempt_id) == (row.due_at, new.attempt_id)
    assert (old.lost, new.lost) == (True, False)


def test_one_statement_renews_all_that_a_process_holds(rehearsal: Rehearsal, django_assert_num_queries: str) -> None:
    for _ in range(5):
        released(rehearsal)
    held = claim(rehearsal.account.pk, new_ids(5), worker="w", clock=boottime)
    with transaction.atomic(), django_assert_num_queries(3):  # a savepoint around it
        claims.renew(held, clock=boottime)


def test_a_worker_that_was_stopped_for_too_long_knows_it_before_it_sends(rehearsal: Rehearsal) -> None:
    """S-166, as the design has it: no mark of the process, but its protection's age by a clock that never rests."""
    released(rehearsal)
    now = boottime()
    (mine,) = claim(rehearsal.account.pk, new_ids(1), worker="w", clock=lambda: now)
    for slept, may in ((0, True), (14 * 60, True), (14.6 * 60, False), (16 * 60, False)):
        assert claims.may_send(mine, 20, 10, clock=lambda slept=slept: now + slept) is may
    claims.postpone(mine, Attempt.Outcome.HANDED_BACK)
    claims.renew([mine], clock=lambda: now)
    assert not claims.may_send(mine, 20, 10, clock=lambda: now)


def _eventually(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + BOUND
    while not condition():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.01)
