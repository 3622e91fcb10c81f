"""Attacks on the engine: what once leaked a claim or a place, ended a sweep, span, or shut an account for nothing.

Each of these succeeded once. The names say what has to hold instead.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import InterfaceError, OperationalError, connection, transaction

import leases
from cleanup import claims, engine, evidence, tasks
from cleanup.claims import Claim, Selection, claim, new_ids
from cleanup.engine import Engine
from cleanup.handlers import HANDLERS
from cleanup.keeper import Keeper
from cleanup.slots import SHARES, Slots
from leases import bounds, connections
from leases.clock import boottime
from leases.models import Attempt, BridgeActivity, Lease, Obligation, ProviderAccount
from leases.models.environments import Policy
from leases.waking import wake
from providers.contract import ErrorKind
from tests import factories
from tests.concurrency import BOUND, Background, Gate
from tests.scenarios.steps import (
    acquired,
    attempts,
    due_in,
    fails,
    falls_due,
    is_due,
    owed,
    owed_for,
    released,
    retry,
    state,
    stop,
    sweep,
)
from tests.stage import Rehearsal

PLACES = 8


class Bench:
    """A keeper and places of our own, to see that a sweep leaves nothing in them."""

    def __init__(self) -> None:
        self.keeper, self.slots = Keeper(every=3600), Slots(PLACES)

    def engine(self, **options: Any) -> Engine:
        return Engine(keeper=self.keeper, slots=self.slots, **options)

    def assert_everything_was_let_go_of(self) -> None:
        assert self.keeper._held == {}
        assert self.slots._free == PLACES


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.assert_everything_was_let_go_of()


@pytest.fixture
def pair(rehearsal: Rehearsal) -> tuple[Lease, Lease]:
    """Two leases that owe their teardown: one to do evil to, and one that must be paid all the same."""
    return released(rehearsal), released(rehearsal)


def _only(subject: str, work: Callable[[str], None]) -> Callable[[str], None]:
    return lambda which: work(which) if which == subject else None


def _account(rehearsal: Rehearsal) -> ProviderAccount:
    return ProviderAccount.objects.get(pk=rehearsal.account.pk)


# An exception in the wrong place


def test_a_hint_that_cannot_be_sent_ends_no_sweep(
    rehearsal: Rehearsal, bench: Bench, pair: tuple[Lease, Lease]
) -> None:
    """The broker is away when a row in transition is told of, and another row's call is in flight."""
    bad, good = pair
    rehearsal.world.of(bad.resource_id).state = "busy"
    told = threading.Event()
    rehearsal.world.hooks["inspect"] = _only(good.resource_id, lambda _: told.wait(BOUND) and None)

    def no_broker(_: Claim, __: float) -> None:
        told.set()
        raise ConnectionError("the broker is away")

    assert bench.engine(on_busy=no_broker).sweep(rehearsal.account.pk).outcomes == {"busy": 1, "proven": 1}
    assert told.is_set()
    assert (state(bad), state(good)) == ("pending_cleanup", "expired")
    assert due_in(owed(bad)) < 3


def test_a_kind_that_this_version_does_not_know_is_a_fault_of_its_rows_alone(
    rehearsal: Rehearsal, bench: Bench, pair: tuple[Lease, Lease], monkeypatch: pytest.MonkeyPatch
) -> None:
    operation = factories.operation(rehearsal.environment, due_in=-1)
    monkeypatch.delitem(HANDLERS, "recover_creation")
    assert bench.engine().sweep(rehearsal.account.pk).outcomes == {"failed": 1, "proven": 2}
    row = owed(operation)
    assert (row.failures, row.attempt_id, row.last_error_kind) == (1, None, "protocol")
    assert _account(rehearsal).circuit_failures == 0


def test_a_handler_that_cannot_even_begin_is_a_fault_of_its_rows_alone(
    rehearsal: Rehearsal, bench: Bench, pair: tuple[Lease, Lease], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: Claim, __: Any) -> Any:
        raise TypeError("a mistake of ours")

    factories.operation(rehearsal.environment, due_in=-1)
    monkeypatch.setitem(HANDLERS, "recover_creation", broken)
    assert bench.engine().sweep(rehearsal.account.pk).outcomes == {"failed": 1, "proven": 2}


TEXTS = {
    "a lone surrogate": "bad \ud800 text",
    "a NUL": "bad \x00 text",
    "control characters": "bad \x1b[31m\r\n\x07 text",
    "megabytes": "x" * (1 << 20),
}


@pytest.mark.parametrize("call", ["identify", "inspect", "delete"])
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_a_text_that_the_database_cannot_take_costs_nothing_but_itself(
    rehearsal: Rehearsal, bench: Bench, pair: tuple[Lease, Lease], call: str, text: str
) -> None:
    # The account's own call has no subject: both rows fail then, each with its count.
    subject = "" if call == "identify" else pair[0].resource_id
    rehearsal.world.hooks[call] = _only(subject, fails(ErrorKind.REFUSED, message=text))
    expected = {"failed": 2} if call == "identify" else {"failed": 1, "proven": 1}
    assert bench.engine().sweep(rehearsal.account.pk).outcomes == expected
    row = owed(pair[0])
    assert (row.failures, row.attempt_id) == (1, None)
    excerpt = Attempt.objects.get(obligation=row).error_excerpt
    assert len(excerpt) <= 300
    assert excerpt.isprintable()


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_so_does_the_text_of_what_an_adapter_must_not_raise(
    rehearsal: Rehearsal, bench: Bench, pair: tuple[Lease, Lease], text: str
) -> None:
    def raise_it(_: str) -> None:
        raise ValueError(text)

    rehearsal.world.hooks["inspect"] = _only(pair[0].resource_id, raise_it)
    assert bench.engine().sweep(rehearsal.account.pk).outcomes == {"failed": 1, "proven": 1}


def test_an_outcome_that_cannot_be_written_leaves_its_row_protected_and_ends_no_sweep(
    rehearsal: Rehearsal, bench: Bench, pair: tuple[Lease, Lease], monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = pair
    write = engine.write

    def refuse(one: Claim, *args: Any, **options: Any) -> Any:
        if one.lease_id == bad.pk:
            raise ValueError("a mistake of ours")
        return write(one, *args, **options)

    monkeypatch.setattr(engine, "write", refuse)
    rehearsal.world.of(bad.resource_id).state = "busy"
    assert bench.engine().sweep(rehearsal.account.pk).outcomes == {"unwritten": 1, "proven": 1}
    assert owed(bad).attempt_id is not None
    assert due_in(owed(bad)) > 800
    assert state(good) == "expired"


# A database that is away


def test_a_claim_that_cannot_be_asked_about_lets_go_of_all_the_others(
    rehearsal: Rehearsal, bench: Bench, pair: tuple[Lease, Lease], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays away for longer than it is waited for, while the call of the first row is in flight."""
    monkeypatch.setattr(engine, "persistently", lambda work, **_: connections.persistently(work, patience=0.0))
    monkeypatch.setattr(engine, "_PAGE", 1)
    gate, real, asked = Gate(), claims.claim, []
    rehearsal.world.hooks["inspect"] = gate

    def away(*args: Any, **options: Any) -> list[Claim]:
        asked.append(1)
        if len(asked) > 1:
            raise OperationalError("server closed the connection unexpectedly")
        return real(*args, **options)

    def refused(*_: Any, **__: Any) -> list[Claim]:
        raise OperationalError("connection refused")

    with monkeypatch.context() as gone:
        gone.setattr(claims, "claim", away)
        gone.setattr(claims, "reclaim", refused)
        with pytest.raises(OperationalError, match="connection refused"):
            bench.engine().sweep(rehearsal.account.pk)
    gate.open()
    del rehearsal.world.hooks["inspect"]
    bench.assert_everything_was_let_go_of()
    # Nobody renews the first row any more: its protection ends, and it is paid like the second.
    assert Obligation.objects.filter(attempt_id__isnull=False).count() == 1
    for lease in pair:
        falls_due(owed(lease))
    assert sweep(rehearsal) == {"proven": 2}


def test_a_database_that_is_away_is_waited_for_once_and_not_once_for_every_row(
    rehearsal: Rehearsal, bench: Bench, pair: tuple[Lease, Lease], monkeypatch: pytest.MonkeyPatch
) -> None:
    for lease in pair:
        rehearsal.world.of(lease.resource_id).state = "busy"
    waited = []

    def away(work: Callable[[], Any], *, patience: float = connections.PATIENCE) -> Any:
        try:
            return connections.persistently(work, patience=0.0)
        except connections.LOST:
            waited.append(patience)
            raise

    def refuse(*_: Any, **__: Any) -> Any:
        raise InterfaceError("connection already closed")

    monkeypatch.setattr(engine, "persistently", away)
    monkeypatch.setattr(engine, "write", refuse)
    assert bench.engine().sweep(rehearsal.account.pk).outcomes == {"unwritten": 2}
    assert waited == [connections.PATIENCE, 0.0]


@pytest.mark.parametrize("error", [ValueError("a mistake"), InterfaceError("closed"), OperationalError("gone")])
def test_a_keeper_goes_on_renewing_after_whatever_error(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    row = owed(released(rehearsal))
    (mine,) = claim(rehearsal.account.pk, new_ids(1), worker="w", clock=boottime)
    Obligation.objects.filter(pk=row.pk).update(due_at=factories.at(60))
    real, rounds, renewed = claims.renew, [], threading.Event()

    def renew(held: Any, *, clock: Any) -> None:
        rounds.append(len(held))
        if len(rounds) < 3:
            raise error
        real(held, clock=clock)
        renewed.set()

    monkeypatch.setattr(claims, "renew", renew)
    keeper = Keeper(every=0.01)
    keeper.keep(mine)
    assert renewed.wait(BOUND)
    thread = keeper._thread
    keeper.release(mine)
    assert thread is not None
    thread.join(BOUND)
    assert not thread.is_alive()
    assert set(rounds) == {1}
    assert not mine.lost
    assert due_in(row) > 800


# Nothing spins


def _busy(rehearsal: Rehearsal) -> None:
    rehearsal.world.of(released(rehearsal).resource_id).state = "busy"


def _foreign(rehearsal: Rehearsal) -> None:
    box = rehearsal.world.of(released(rehearsal).resource_id)
    box.resource.marks["paperclip-env.installation"] = "another"  # type: ignore[index]


def _fails(call: str, kind: ErrorKind) -> Callable[[Rehearsal], None]:
    def given(rehearsal: Rehearsal) -> None:
        released(rehearsal)
        rehearsal.world.hooks[call] = fails(kind)

    return given


def _refuses_both(rehearsal: Rehearsal) -> None:
    released(rehearsal, Policy.REUSE_BY_ENVIRONMENT)
    rehearsal.world.hooks.update(stop=fails(ErrorKind.REFUSED), delete=fails(ErrorKind.REFUSED))


def _another_answers(rehearsal: Rehearsal) -> None:
    released(rehearsal)
    rehearsal.world.identity = "another"


def _not_seen(rehearsal: Rehearsal) -> None:
    factories.operation(rehearsal.environment, due_in=-1, account_identity=rehearsal.world.identity)


def _draining(rehearsal: Rehearsal) -> None:
    rehearsal.environment.drain_seconds = 3600
    rehearsal.environment.save()
    lease = acquired(rehearsal)
    BridgeActivity.objects.create(company_id=lease.company_id, lease=lease, kind="execute", deadline=factories.at(7200))
    leases.release(lease.pk)
    wake(owed(lease).pk)


def _wrong_endpoint(rehearsal: Rehearsal) -> None:
    Lease.objects.filter(pk=released(rehearsal).pk).update(endpoint={"wrold": 1})


def _deaf(rehearsal: Rehearsal) -> None:
    """A delete that is accepted and does nothing."""
    released(rehearsal)

    def bring_back(resource_id: str) -> None:
        rehearsal.world.boxes[resource_id] = kept[resource_id]

    kept = dict(rehearsal.world.boxes)
    rehearsal.world.after["delete"] = bring_back


def _probe(rehearsal: Rehearsal) -> None:
    ProviderAccount.objects.filter(pk=rehearsal.account.pk).update(circuit="open")
    factories.probe(rehearsal.account, due_in=-1)
    rehearsal.world.hooks["identify"] = fails(ErrorKind.CONNECTION)


OUTCOMES: dict[str, tuple[Callable[[Rehearsal], None], str, list[str]]] = {
    "busy": (_busy, "busy", ["identify", "inspect"]),
    "busy, said by the call": (_fails("delete", ErrorKind.BUSY), "busy", ["identify", "inspect", "delete", "inspect"]),
    "busy, said by the look": (_fails("inspect", ErrorKind.BUSY), "busy", ["identify", "inspect"]),
    "accepted and not done": (_deaf, "busy", ["identify", "inspect", "delete", "inspect"]),
    "throttled": (_fails("inspect", ErrorKind.RATE_LIMITED), "busy", ["identify", "inspect"]),
    "refused": (_fails("delete", ErrorKind.REFUSED), "failed", ["identify", "inspect", "delete", "inspect"]),
    "a stop that is refused, and its fall-back too": (
        _refuses_both,
        "failed",
        ["identify", "inspect", "stop", "inspect", "delete", "inspect"],
    ),
    "no answer": (_fails("inspect", ErrorKind.TIMEOUT), "failed", ["identify", "inspect"]),
    "a server that fails": (_fails("inspect", ErrorKind.SERVER), "failed", ["identify", "inspect"]),
    "an account that fails": (_fails("identify", ErrorKind.CONNECTION), "failed", ["identify"]),
    "another account": (_another_answers, "failed", ["identify"]),
    "not ready here": (_fails("inspect", ErrorKind.NOT_READY), "handed_back", ["identify", "inspect"]),
    "a person is needed": (_foreign, "quieted", ["identify", "inspect"]),
    "a snapshot that does not fit": (_wrong_endpoint, "quieted", []),
    "not seen yet": (_not_seen, "not_seen", ["identify", "find"]),
    "draining": (_draining, "draining", []),
    "a probe that fails": (_probe, "failed", ["identify"]),
}


@pytest.mark.parametrize(("given", "outcome", "calls"), OUTCOMES.values(), ids=OUTCOMES.keys())
def test_each_outcome_is_one_attempt_and_so_many_calls(
    rehearsal: Rehearsal, bench: Bench, given: Callable[[Rehearsal], None], outcome: str, calls: list[str]
) -> None:
    given(rehearsal)
    before = len(rehearsal.world.calls)
    tally = bench.engine().sweep(rehearsal.account.pk)
    assert (tally.claimed, tally.outcomes) == (1, {outcome: 1})
    assert [name for name, _ in rehearsal.world.calls[before:]] == calls
    # And it stays at that: nothing of it is claimed again at once.
    assert bench.engine().sweep(rehearsal.account.pk).claimed == 0


def test_a_call_that_may_not_be_sent_any_more_is_one_attempt(rehearsal: Rehearsal, bench: Bench) -> None:
    lease = released(rehearsal)

    def clock() -> float:
        return boottime() + (16 * 60.0 if threading.current_thread().name == "call-delete" else 0.0)

    assert bench.engine(clock=clock).sweep(rehearsal.account.pk).outcomes == {"handed_back": 1}
    assert rehearsal.world.count("delete") == 0
    assert 0 < due_in(owed(lease)) <= 2


def test_a_protection_shorter_than_a_call_does_not_spin(
    rehearsal: Rehearsal, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    released(rehearsal)
    monkeypatch.setattr(claims, "PROTECTION", bounds.DELETE + bounds.SEND_MARGIN - 1)
    assert bench.engine().sweep(rehearsal.account.pk).outcomes == {"handed_back": 1}
    assert rehearsal.world.count("inspect") == 1


def test_a_lease_that_somebody_holds_locked_does_not_spin_and_delays_nobody(
    rehearsal: Rehearsal, bench: Bench, pair: tuple[Lease, Lease]
) -> None:
    held, free = pair
    gate = Gate()

    def hold() -> None:
        with transaction.atomic():
            Lease.objects.select_for_update().get(pk=held.pk)
            gate()

    holder = Background(hold)
    gate.wait()
    with connection.cursor() as cursor:
        cursor.execute("SET lock_timeout = '100ms'")
    try:
        assert bench.engine().sweep(rehearsal.account.pk).outcomes == {"handed_back": 1, "proven": 1}
    finally:
        connection.close()
        gate.open()
        holder.result()
    assert (state(free), owed(held).failures) == ("expired", 0)
    assert due_in(owed(held)) <= 1


def test_a_settle_that_never_fits_does_not_spin(
    rehearsal: Rehearsal, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = released(rehearsal)
    monkeypatch.setattr(evidence, "settle_with", lambda *_, **__: False)
    assert bench.engine().sweep(rehearsal.account.pk).outcomes == {"handed_back": 1}
    row = owed(lease)
    assert (row.attempt_id, row.failures) == (None, 0)
    assert 0 < due_in(row) <= 1


@pytest.mark.parametrize(
    ("said", "waits"),
    [
        (float("nan"), 30),
        (float("inf"), 30),
        (float("-inf"), 30),
        (-5.0, 30),
        (0.0, 30),
        (None, 30),
        (0.001, 1),
        (7.0, 7),
        (1e12, 3600),
    ],
)
def test_whatever_a_provider_says_of_when_to_come_again_is_bounded(
    rehearsal: Rehearsal, bench: Bench, said: float | None, waits: float
) -> None:
    lease = released(rehearsal)
    rehearsal.world.hooks["inspect"] = fails(ErrorKind.RATE_LIMITED, retry_after=said)
    tally = bench.engine().sweep(rehearsal.account.pk)
    assert (tally.outcomes, rehearsal.world.count("inspect")) == ({"busy": 1}, 1)
    row, until = owed(lease), _account(rehearsal).blocked_until
    assert until is not None
    assert row.due_at is not None
    claimed_at = Attempt.objects.get(obligation=row).claimed_at
    assert waits <= (until - claimed_at).total_seconds() < waits + 5
    assert waits <= (row.due_at - claimed_at).total_seconds() < waits + 5
    assert row.failures == 0


# Room


def test_one_account_takes_no_more_than_its_share_of_the_places(rehearsal: Rehearsal, bench: Bench) -> None:
    share, other = PLACES // SHARES, Rehearsal()
    for _ in range(3 * share):
        released(rehearsal)
    released(other)
    gate, claimed, full, least = Gate(), [], threading.Event(), [PLACES]

    def count(_: Claim) -> None:
        claimed.append(1)
        least[0] = min(least[0], bench.slots._free)
        if len(claimed) == share:
            full.set()

    rehearsal.world.hooks["identify"] = gate
    slow = Background(lambda: bench.engine(on_claimed=count).sweep(rehearsal.account.pk))
    gate.wait()
    assert full.wait(BOUND)
    # Nothing of it answers, and another account is served.
    assert bench.engine().sweep(other.account.pk).outcomes == {"proven": 1}
    assert len(claimed) == share
    gate.open()
    assert slow.result().outcomes == {"proven": 3 * share}
    assert least[0] >= PLACES - 2 * share  # its own, and what the other held for a moment


def test_rows_that_need_no_call_are_all_paid_in_one_sweep_though_one_may_be_in_flight(
    rehearsal: Rehearsal, bench: Bench
) -> None:
    rehearsal.account.concurrency_limit = 1
    rehearsal.account.save()
    for number in range(5):
        identity = rehearsal.world.identity
        factories.operation(rehearsal.environment, due_in=-1, resource_id=f"known-{number}", account_identity=identity)
    only = Selection(kinds=("recover_creation",))
    assert bench.engine().sweep(rehearsal.account.pk, selection=only).outcomes == {"proven": 5}
    assert rehearsal.world.calls == []
    # What they brought forth does call, one by one.
    assert bench.engine().sweep(rehearsal.account.pk).outcomes == {"proven": 5}


def test_what_was_settled_without_a_call_says_nothing_about_the_account(rehearsal: Rehearsal) -> None:
    ProviderAccount.objects.filter(pk=rehearsal.account.pk).update(circuit_failures=4)
    factories.operation(rehearsal.environment, due_in=-1, resource_id="known")
    only = Selection(kinds=("recover_creation",))
    assert Engine().sweep(rehearsal.account.pk, selection=only).outcomes == {"proven": 1}
    assert _account(rehearsal).circuit_failures == 4


@pytest.mark.parametrize("after", ["the claim", "the look"])
def test_what_a_sweep_has_no_time_for_any_more_is_handed_back_due_at_once(
    rehearsal: Rehearsal, bench: Bench, after: str
) -> None:
    lease = released(rehearsal)

    def time_passes(*_: Any) -> None:
        worker._claims_until = time.monotonic() - bounds.LONGEST_CALL - 1

    worker = bench.engine()
    if after == "the claim":
        worker.on_claimed = time_passes
    else:
        rehearsal.world.after["inspect"] = time_passes
    tally = worker.sweep(rehearsal.account.pk)
    assert (tally.outcomes, tally.out_of_time) == ({"handed_back": 1}, True)
    assert [rehearsal.world.count(call) for call in ("inspect", "delete")] == [int(after == "the look"), 0]
    assert is_due(owed(lease))
    assert attempts(owed(lease)) == ["handed_back"]


def test_what_a_sweep_began_in_its_time_it_finishes(rehearsal: Rehearsal, bench: Bench) -> None:
    """The control of the test above: the time for claiming is over, the time for one more call is not."""
    released(rehearsal)
    worker = bench.engine()

    def time_passes(_: Claim) -> None:
        worker._claims_until = time.monotonic() - 1

    worker.on_claimed = time_passes
    assert worker.sweep(rehearsal.account.pk).outcomes == {"proven": 1}


# Hints, and chains of early looks


@pytest.fixture
def early_looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The countdowns with which early looks were asked for; nothing of them is run."""
    sent: list[int] = []
    monkeypatch.setattr(tasks.settle, "apply_async", lambda _, countdown: sent.append(countdown))
    return sent


def test_a_transition_begins_one_chain_of_early_looks(rehearsal: Rehearsal, early_looks: list[int]) -> None:
    lease = released(rehearsal)
    rehearsal.world.of(lease.resource_id).state = "busy"
    begun = []
    for _ in range(8):
        tasks.sweep(str(rehearsal.account.pk))
        begun.append(len(early_looks))
        falls_due(owed(lease))
    assert begun == [0, 0, 1, 1, 1, 1, 1, 1]
    assert early_looks == [tasks.SETTLE_AFTER]


def test_a_chain_whose_looks_another_sweep_takes_ends_all_the_same(
    rehearsal: Rehearsal, early_looks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its wake rings, and the sweep that hears it is quicker than the chain's own claim."""
    lease = released(rehearsal)
    rehearsal.world.of(lease.resource_id).state = "busy"
    row = owed(lease)
    Obligation.objects.filter(pk=row.pk).update(busy_count=tasks.SETTLE_FROM)

    def wake_and_be_overtaken(pk: int) -> None:
        wake(pk)
        tasks.sweep(str(rehearsal.account.pk))

    monkeypatch.setattr(tasks, "wake", wake_and_be_overtaken)
    tasks.sweep(str(rehearsal.account.pk))
    looks = 0
    while early_looks and looks < 20:
        early_looks.pop()
        looks += 1
        tasks.settle.run(row.pk)
    assert looks == 1
    assert rehearsal.world.count("inspect") == 2


def _hinted(rehearsal: Rehearsal) -> None:
    ProviderAccount.objects.filter(pk=rehearsal.account.pk).update(hinted_until=factories.at(10))


def _is_hinted(rehearsal: Rehearsal) -> bool:
    return _account(rehearsal).hinted_until is not None


def test_a_sweep_that_did_something_uses_its_hint_up(rehearsal: Rehearsal) -> None:
    """So what became due behind it is hinted at once, and not when the hint lapses."""
    released(rehearsal)
    _hinted(rehearsal)
    tasks.sweep(str(rehearsal.account.pk))
    assert not _is_hinted(rehearsal)


def test_a_sweep_that_failed_at_everything_did_something(rehearsal: Rehearsal) -> None:
    released(rehearsal)
    rehearsal.world.hooks["inspect"] = fails(ErrorKind.REFUSED)
    _hinted(rehearsal)
    tasks.sweep(str(rehearsal.account.pk))
    assert not _is_hinted(rehearsal)


def test_a_sweep_that_found_nothing_leaves_the_hint(rehearsal: Rehearsal) -> None:
    _hinted(rehearsal)
    tasks.sweep(str(rehearsal.account.pk))
    assert _is_hinted(rehearsal)


def test_a_worker_that_is_not_ready_leaves_the_hint(rehearsal: Rehearsal) -> None:
    """Or it would be hinted again at once, in a circle, where nothing can be done."""
    lease = released(rehearsal)
    rehearsal.world.hooks["inspect"] = fails(ErrorKind.NOT_READY)
    for _ in range(2):
        _hinted(rehearsal)
        tasks.sweep(str(rehearsal.account.pk))
        assert _is_hinted(rehearsal)
    assert (rehearsal.world.count("inspect"), is_due(owed(lease))) == (1, True)


def test_a_process_that_is_full_leaves_the_hint(rehearsal: Rehearsal) -> None:
    released(rehearsal)
    slots = Slots(PLACES)
    assert slots.take(PLACES) == PLACES
    tally = Engine(slots=slots).sweep(rehearsal.account.pk)
    assert (tally.claimed, tally.hands_on) == (0, False)
    slots.give_back(PLACES)
    assert Engine(slots=slots).sweep(rehearsal.account.pk).hands_on


# Accounts and their probes


def test_a_full_account_can_still_be_asked_whether_it_works(rehearsal: Rehearsal) -> None:
    """Its places are held by a process that died; nothing else can ever open the circuit."""
    rehearsal.account.concurrency_limit = 1
    rehearsal.account.save()
    released(rehearsal)
    assert len(claim(rehearsal.account.pk, new_ids(1), worker="dead", clock=boottime)) == 1
    ProviderAccount.objects.filter(pk=rehearsal.account.pk).update(circuit="open")
    probe = factories.probe(rehearsal.account, due_in=-1)
    assert Engine().sweep(rehearsal.account.pk).outcomes == {"proven": 1}
    probe.refresh_from_db()
    assert (probe.closed_as, _account(rehearsal).circuit) == ("proven", "closed")


def test_a_probe_in_flight_takes_no_place(rehearsal: Rehearsal) -> None:
    rehearsal.account.concurrency_limit = 1
    rehearsal.account.save()
    released(rehearsal)
    factories.claimed(factories.probe(rehearsal.account))
    assert Engine().sweep(rehearsal.account.pk).outcomes == {"proven": 1}


def test_a_row_that_recorded_another_endpoint_does_not_shut_the_account_of_today(rehearsal: Rehearsal) -> None:
    poison, healthy = released(rehearsal), acquired(rehearsal)
    Lease.objects.filter(pk=poison.pk).update(endpoint=Rehearsal().account.endpoint)
    for _ in range(6):
        falls_due(owed(poison))
        assert Engine().sweep(rehearsal.account.pk).outcomes == {"failed": 1}
    assert (owed(poison).failures, owed(poison).last_error_kind) == (6, "identity")
    account = _account(rehearsal)
    assert (account.circuit, account.circuit_failures) == ("closed", 0)
    assert owed(poison).escalated_at is not None
    leases.release(healthy.pk)
    assert Engine().sweep(rehearsal.account.pk).outcomes == {"proven": 1}


def test_so_does_a_creation_that_recorded_another_endpoint(rehearsal: Rehearsal) -> None:
    elsewhere_ = Rehearsal().account.endpoint
    operation = factories.operation(
        rehearsal.environment, due_in=-1, endpoint=elsewhere_, account_identity=rehearsal.world.identity
    )
    for _ in range(6):
        falls_due(owed(operation))
        assert Engine().sweep(rehearsal.account.pk).outcomes == {"failed": 1}
    assert _account(rehearsal).circuit == "closed"


def test_rows_that_recorded_the_endpoint_of_today_do_shut_it(rehearsal: Rehearsal) -> None:
    """The control of the two tests above."""
    lease = released(rehearsal)
    rehearsal.world.identity = "another"
    for _ in range(5):
        falls_due(owed(lease))
        assert Engine().sweep(rehearsal.account.pk).outcomes == {"failed": 1}
    assert _account(rehearsal).circuit == "open"


def test_a_probe_that_is_misconfigured_backs_off_and_is_never_quiet(rehearsal: Rehearsal) -> None:
    """It asks with the account as it is today, which can be put right, and nothing would wake it then."""
    lease = released(rehearsal)
    good = rehearsal.account.endpoint
    ProviderAccount.objects.filter(pk=rehearsal.account.pk).update(circuit="open", endpoint={"wrold": 1})
    probe = factories.probe(rehearsal.account, due_in=-1)
    for failures in (1, 2):
        falls_due(probe)
        assert Engine().sweep(rehearsal.account.pk).outcomes == {"failed": 1}
        probe.refresh_from_db()
        assert (probe.quiet, probe.failures, probe.last_error_kind) == ("", failures, "invalid")
        assert 20 < due_in(probe) < 120
    assert (rehearsal.world.count("identify"), _account(rehearsal).circuit) == (1, "open")  # the acquire's
    owed_for(probe, 3600)
    Engine().sweep(rehearsal.account.pk)
    probe.refresh_from_db()
    assert probe.escalated_at is not None
    ProviderAccount.objects.filter(pk=rehearsal.account.pk).update(endpoint=good)
    assert retry(rehearsal) == 1
    assert sweep(rehearsal) == {"proven": 2}
    assert state(lease) == "expired"


def test_a_recovery_without_look_up_goes_quiet_and_each_stop_asks_once(rehearsal: Rehearsal) -> None:
    operation = factories.operation(
        rehearsal.environment,
        due_in=-1,
        run_uuid=rehearsal.run.pk,
        finds_by_name=False,
        account_identity=rehearsal.world.identity,
    )
    assert sweep(rehearsal) == {"quieted": 1}
    for _ in range(2):
        assert stop(rehearsal) == 1
        assert is_due(owed(operation))
        assert sweep(rehearsal) == {"quieted": 1}
    assert owed(operation).requests == owed(operation).requests_served == 2


def test_the_engine_knows_every_kind_that_there_is() -> None:
    """The control of the unknown kind above."""
    assert set(HANDLERS) == set(Obligation.Kind)
