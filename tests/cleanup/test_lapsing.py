"""The watch over the fleet's holds: what it decides, what it never takes for proof, and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import uuid4

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

import leases
from cleanup import lapsing
from cleanup.lapsing import AskPerson, Decision, Facts, Idle, Settle, Wait
from leases import controllers
from leases.errors import ControlRefused
from leases.models import ActivityEntry, Installation, Obligation, Run
from leases.waking import wake
from tests import factories, fleet
from tests.concurrency import BOUND, Background, Gate, elsewhere, together
from tests.tables import rows_of

pytestmark = pytest.mark.django_db(transaction=True)

NOON = datetime(2026, 6, 1, 12, tzinfo=UTC)
LATER = NOON + timedelta(seconds=60)
A = uuid4()


@pytest.fixture(autouse=True)
def _server(transactional_db: None) -> Iterator[None]:
    with fleet.a_server_that_was_always_there():
        yield


# --- The decision -----------------------------------------------------------------------------------------------------

DECISIONS: dict[str, Decision] = {
    "idle: waits for a hold to be taken": Idle(),
    "wait for the next": Wait(NOON),
    "wait until it is over": Wait(LATER),
    "settle": Settle((A,)),
}
TABLE = rows_of(Path(__file__).parents[2] / "docs" / "controllers.md", "What the watch decides")


@pytest.mark.parametrize("row", TABLE, ids=lambda row: " ".join(row.values()))
def test_the_decision(row: dict[str, str]) -> None:
    live, lapsed, lately = (int(row[column]) for column in ("live", "lapsed", "lately"))
    facts = Facts(
        live,
        lapsed,
        lately,
        due=(A,) if int(row["due"]) else (),
        next_at=NOON if live else None,
        calm_until=LATER if row["besides"] == "calm" else None,
        asked=row["besides"] == "asked before",
    )
    asks = AskPerson(lapsed + lately, live + lately)
    assert lapsing.decide(facts) == DECISIONS.get(row["decision"], asks)
    assert row["decision"] in {*DECISIONS, "ask a person"}


def test_every_decision_is_in_the_table() -> None:
    assert {row["decision"] for row in TABLE} == {*DECISIONS, "ask a person"}


# --- What it does -----------------------------------------------------------------------------------------------------


def test_a_hold_that_lapsed_interrupts_its_run_and_tells_whose_it_was() -> None:
    gone, there = fleet.fleet(2)
    fleet.passes(81, gone)
    fleet.look()
    assert fleet.statuses([gone, there]) == ["interrupted", "running"]
    assert Run.objects.get(pk=gone.run_id).finished_at is not None
    entry = ActivityEntry.objects.get(action="run.interrupted")
    assert (entry.subject_id, entry.details["controller"], entry.details["generation"]) == (
        str(gone.run_id),
        gone.controller_id,
        1,
    )


def test_it_is_settled_a_third_of_its_length_after_its_end() -> None:
    one, _ = fleet.fleet(2)
    fleet.passes(61, one)
    fleet.look()
    assert fleet.statuses([one]) == ["running"]
    row = fleet.watch()
    assert row is not None
    assert row.due_at is not None
    until = Run.objects.get(pk=one.run_id).controller_expires_at
    assert until is not None
    assert (row.due_at - until).total_seconds() == pytest.approx(20)
    fleet.passes(20, one)
    fleet.look()
    assert fleet.statuses([one]) == ["interrupted"]


def test_eleven_of_twenty_are_not_settled_and_a_person_is_asked() -> None:
    runs = fleet.fleet(20)
    fleet.passes(90, *runs[:11])
    assert fleet.look() == {"quieted": 1}
    assert set(fleet.statuses(runs)) == {"running"}
    row = fleet.watch()
    assert row is not None
    assert (row.quiet, row.due_at) == (Obligation.Quiet.MASS_LAPSE, None)
    entry = ActivityEntry.objects.get(action="installation.mass_lapse")
    assert entry.details == {"lapsed": 11, "of": 20}


def test_ten_of_sixty_are_settled() -> None:
    runs = fleet.fleet(60)
    fleet.passes(90, *runs[:10])
    fleet.look()
    assert fleet.statuses(runs).count("interrupted") == 10


def test_those_that_are_cut_off_by_one_cause_lapse_one_by_one_and_are_seen_together() -> None:
    """Each renewed at its own moment, within a third of the length, before all were cut off."""
    runs = fleet.fleet(30)
    for number, run in enumerate(runs[:15]):
        fleet.passes(60 + number * 20 / 15 + 0.5, run)
    fleet.look()  # the first is not settled before the last has lapsed
    assert set(fleet.statuses(runs)) == {"running"}
    row = fleet.watch()
    assert row is not None
    assert row.quiet == Obligation.Quiet.MASS_LAPSE


def test_a_mass_lapse_is_over_by_itself_when_all_have_renewed_and_not_before() -> None:
    runs = fleet.fleet(20)
    fleet.passes(90, *runs[:11])
    fleet.look()
    for run in runs[:10]:
        leases.renew(run)
    fleet.falls_due()
    assert fleet.look() == {"quieted": 1}
    assert fleet.statuses(runs)[10] == "running"
    leases.renew(runs[10])
    row = fleet.watch()
    assert row is not None
    assert row.due_at is not None
    fleet.falls_due()
    fleet.look()
    row.refresh_from_db()
    assert (row.quiet, Installation.current().lapse_asked_at) == ("", None)
    fleet.passes(90, runs[10])
    fleet.look()
    assert fleet.statuses(runs)[10] == "interrupted"


def test_a_hold_that_is_taken_meanwhile_does_not_hide_what_a_person_is_asked() -> None:
    runs = fleet.fleet(20)
    fleet.passes(90, *runs[:11])
    fleet.look()
    fleet.held()
    row = fleet.watch()
    assert row is not None
    assert row.quiet == Obligation.Quiet.MASS_LAPSE


def _asked(minutes: float = 15) -> list[controllers.Controller]:
    """A fleet of twenty of which eleven lapsed, so long after a person was asked."""
    runs = fleet.fleet(20)
    fleet.passes(90, *runs[:11])
    assert fleet.look() == {"quieted": 1}
    watch = Obligation.objects.filter(kind=Obligation.Kind.WATCH_CONTROLLERS)
    watch.update(owed_since=factories.at(-60 * minutes))
    Installation.objects.update(lapse_asked_at=factories.at(-60 * minutes))
    return runs


def _ends_by_itself(runs: list[controllers.Controller]) -> None:
    Run.objects.filter(pk=runs[0].run_id).update(status="succeeded", finished_at=factories.database_now())


def _is_retried(_: list[controllers.Controller]) -> None:
    watch = fleet.watch()
    assert watch is not None
    wake(watch.pk, explicit=True)


@pytest.mark.parametrize("woken_by", [_ends_by_itself, _is_retried])
def test_a_watch_that_is_woken_while_a_person_is_asked_was_not_away_and_asks_on(
    woken_by: Callable[[list[controllers.Controller]], None],
) -> None:
    runs = _asked()
    woken_by(runs)
    assert fleet.look() == {"quieted": 1}
    installation, watch = Installation.current(), fleet.watch()
    assert watch is not None
    assert (watch.quiet, installation.gap_ended_at) == (Obligation.Quiet.MASS_LAPSE, None)
    assert installation.lapse_asked_at is not None
    fleet.passes(120, *runs[:11])
    for run in runs[11:]:
        leases.renew(run)
    fleet.look()
    assert "interrupted" not in fleet.statuses(runs)


def test_the_answer_of_a_person_is_no_outage() -> None:
    runs = _asked()
    controllers.settle_lapsed(actor="olga", reason="the host is gone")
    fleet.look()
    assert Installation.current().gap_ended_at is None
    assert fleet.statuses(runs) == ["interrupted"] * 11 + ["running"] * 9


@pytest.mark.parametrize(("due_in", "stays_late"), [(None, False), (60, False), (-60, True)])
def test_a_wake_of_the_watch_is_late_only_where_it_was_overdue(due_in: float | None, stays_late: bool) -> None:  # noqa: FBT001
    fleet.held()
    watch = fleet.watch()
    assert watch is not None
    long_ago = factories.at(-600)  # as it stays after a look that failed, or that made the watch wait
    due_at = None if due_in is None else factories.at(due_in)
    Obligation.objects.filter(pk=watch.pk).update(
        due_at=due_at, owed_since=long_ago, quiet="waiting" if due_at is None else ""
    )
    wake(watch.pk)
    watch.refresh_from_db()
    assert watch.due_at is not None
    assert watch.due_at <= factories.database_now()
    assert watch.owed_since == (long_ago if stays_late else watch.due_at)


def test_a_wake_of_any_other_kind_leaves_the_age_of_the_debt() -> None:
    row = factories.teardown(due_at=None, quiet="foreign_marks", owed_since=factories.at(-600))
    since = row.owed_since
    wake(row.pk)
    row.refresh_from_db()
    assert row.owed_since == since


def test_a_person_settles_them() -> None:
    runs = fleet.fleet(20)
    fleet.passes(90, *runs[:11])
    fleet.look()
    done, left = controllers.settle_lapsed(actor="olga", reason="the host is gone")
    assert (len(done), left) == (11, [])
    fleet.look()
    assert fleet.statuses(runs) == ["interrupted"] * 11 + ["running"] * 9
    row = fleet.watch()
    assert row is not None
    assert row.quiet == ""
    entry = ActivityEntry.objects.filter(action="run.interrupted").latest("pk")
    assert (entry.actor, entry.reason) == ("olga", "the host is gone")
    fleet.passes(90, runs[11])  # one more is one, not the twelfth
    fleet.look()
    assert fleet.statuses(runs)[11] == "interrupted"


def test_a_person_says_that_it_was_an_outage_of_ours() -> None:
    runs = fleet.fleet(20)
    fleet.passes(90, *runs[:11])
    fleet.look()
    controllers.extend_lapsed(actor="olga", reason="the API was away")
    assert controllers.lapsed() == []
    fleet.look()
    assert set(fleet.statuses(runs)) == {"running"}
    row = fleet.watch()
    assert row is not None
    assert row.due_at is not None
    assert 75 < (row.due_at - factories.database_now()).total_seconds() < 81  # a full length, and the linger


def test_without_a_controlled_live_run_nothing_is_due() -> None:
    one = fleet.held()
    Run.objects.filter(pk=one.run_id).update(status="succeeded")
    fleet.falls_due()
    assert fleet.look()["waiting"] == 1
    row = fleet.watch()
    assert row is not None
    assert (row.quiet, row.due_at) == ("waiting", None)
    again = fleet.held()
    row.refresh_from_db()
    assert row.due_at == again.expires_at


# --- What it never takes for proof ------------------------------------------------------------------------------------


def test_a_server_that_was_restarted_lets_nobody_lapse_for_a_full_length() -> None:
    runs = fleet.fleet(3)
    fleet.passes(300)
    with fleet.server_up_since("now() - interval '59 s'"):
        fleet.look()
        assert set(fleet.statuses(runs)) == {"running"}
        assert controllers.lapsed() == []
    with fleet.server_up_since("now() - interval '81 s'"):
        fleet.falls_due()
        fleet.look()
    assert set(fleet.statuses(runs)) == {"interrupted"}


def test_a_watch_that_comes_late_was_away_and_lets_nobody_lapse_for_a_full_length() -> None:
    runs = fleet.fleet(3)
    fleet.passes(300)
    fleet.falls_due(late=11)
    fleet.look()
    assert set(fleet.statuses(runs)) == {"running"}
    gap = Installation.current().gap_ended_at
    assert gap is not None
    assert abs((gap - factories.database_now()).total_seconds()) < BOUND
    row = fleet.watch()
    assert row is not None
    assert row.due_at is not None
    assert 75 < (row.due_at - gap).total_seconds() < 81


def test_a_watch_that_comes_in_time_ends_no_gap() -> None:
    runs = fleet.fleet(3)
    fleet.passes(300)
    fleet.falls_due(late=0.1)
    fleet.look()
    assert Installation.current().gap_ended_at is None
    assert set(fleet.statuses(runs)) == {"interrupted"}


def test_a_look_that_comes_a_little_late_leaves_whoever_is_alive_the_time_to_renew() -> None:
    """An outage longer than the holds may have ended right before it, in which nobody could renew."""
    back, gone = fleet.fleet(2)
    fleet.passes(300)
    fleet.falls_due(late=8)
    fleet.look()
    assert fleet.statuses([back, gone]) == ["running", "running"]
    row = fleet.watch()
    assert row is not None
    assert row.due_at is not None
    assert 15 < (row.due_at - factories.database_now()).total_seconds() <= 20
    leases.renew(back)
    fleet.falls_due(late=8)  # slow, and not away: put off once and no more
    fleet.look()
    assert fleet.statuses([back, gone]) == ["running", "interrupted"]


def test_each_hold_stands_its_own_length_from_the_end_of_a_gap() -> None:
    short, long = fleet.held(seconds=10), fleet.held(seconds=600)
    fleet.passes(1000)
    Installation.objects.update(gap_ended_at=factories.at(-60))
    fleet.look()
    assert fleet.statuses([short, long]) == ["interrupted", "running"]


def test_nothing_lapses_while_it_is_calm() -> None:
    runs = fleet.fleet(3)
    fleet.passes(300)
    Installation.objects.update(calm_until=factories.at(120))
    fleet.look()
    assert set(fleet.statuses(runs)) == {"running"}
    row = fleet.watch()
    assert row is not None
    assert row.due_at == Installation.current().calm_until
    Installation.objects.update(calm_until=factories.at(-1))
    fleet.falls_due()
    fleet.look()
    assert set(fleet.statuses(runs)) == {"interrupted"}


# --- Races ------------------------------------------------------------------------------------------------------------


def test_of_a_renewal_and_a_lapse_at_once_one_wins_and_the_other_is_told() -> None:
    for _ in range(8):
        one = fleet.held()
        fleet.passes(90, one)

        def renew(one: controllers.Controller = one) -> str:
            try:
                leases.renew(one)
            except ControlRefused as refusal:
                return refusal.code
            return "renewed"

        def lapse(one: controllers.Controller = one) -> str:
            try:
                lapsed = controllers.interrupt_lapsed(one.run_id, linger=0.0)
            except controllers.Contended:
                return "contended"
            return "interrupted" if lapsed else "stands"

        renewed, ended = together(renew, lapse)
        assert (renewed, ended) in {
            ("renewed", "contended"),
            ("renewed", "stands"),
            ("controller_lapsed", "interrupted"),
        }
        assert fleet.statuses([one]) == ["interrupted" if ended == "interrupted" else "running"]


def test_a_renewal_that_waits_for_the_lapse_finds_the_run_over() -> None:
    one = fleet.held()
    fleet.passes(90, one)
    gate = Gate()

    def lapse() -> None:
        with transaction.atomic():
            assert controllers.interrupt_lapsed(one.run_id, linger=0.0)
            gate()

    ending = Background(lapse)
    gate.wait()
    renewal = Background(lambda: leases.renew(one))
    gate.open()
    ending.result()
    with pytest.raises(ControlRefused) as refused:
        renewal.result()
    assert refused.value.code == "controller_lapsed"


def test_a_run_that_somebody_has_locked_is_looked_at_again_soon() -> None:
    one, other = fleet.fleet(2)
    fleet.passes(90)
    gate = Gate()

    def hold() -> None:
        with transaction.atomic():
            Run.objects.select_for_update().get(pk=one.run_id)
            gate()

    holding = Background(hold)
    gate.wait()
    fleet.look()
    assert fleet.statuses([one, other]) == ["running", "interrupted"]
    row = fleet.watch()
    assert row is not None
    assert row.due_at is not None
    assert 3 < (row.due_at - factories.database_now()).total_seconds() < 6
    gate.open()
    holding.result()
    fleet.falls_due()
    fleet.look()
    assert fleet.statuses([one]) == ["interrupted"]
    assert Installation.current().gap_ended_at is None


def test_a_hold_that_is_taken_while_the_fleet_is_looked_at_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The look had no controlled run in its snapshot, and was about to wait without a deadline."""
    one = fleet.held()
    Run.objects.filter(pk=one.run_id).update(status="succeeded")
    fleet.falls_due()
    read = lapsing.read

    def reading(*, longest: float) -> Facts:
        facts = read(longest=longest)
        monkeypatch.setattr(lapsing, "read", read)
        elsewhere(lambda: fleet.held(seconds=10))
        return facts

    monkeypatch.setattr(lapsing, "read", reading)
    fleet.look()
    row = fleet.watch()
    assert row is not None
    assert row.due_at is not None
    assert (row.due_at - factories.database_now()).total_seconds() < 14


def test_one_row_watches_however_many_take_hold_at_once() -> None:
    company = factories.company()
    together(*[lambda: fleet.held(company) for _ in range(6)])
    row = Obligation.objects.get(kind=Obligation.Kind.WATCH_CONTROLLERS)
    assert row.due_at == min(Run.objects.values_list("controller_expires_at", flat=True))


# --- What it costs ----------------------------------------------------------------------------------------------------


def test_fifty_controllers_that_renew_cost_one_look_per_length_of_hold() -> None:
    runs = fleet.fleet(50)
    lengths = 6
    for _ in range(lengths * 3):  # each renews at a third of its length
        fleet.passes(20)
        fleet.look()
        for run in runs:
            leases.renew(run)
    assert lengths - 2 <= fleet.looks() <= lengths + 1
    assert set(fleet.statuses(runs)) == {"running"}


def test_a_look_reads_the_runs_that_are_controlled_and_no_others() -> None:
    fleet.fleet(3)
    factories.run()
    with CaptureQueriesContext(connection) as queries:
        facts = lapsing.read(longest=3600)
    assert (facts.live, facts.lapsed, len(queries)) == (3, 0, 1)


def test_a_look_that_comes_after_one_that_failed_is_late_by_our_own_cooldown_and_no_gap() -> None:
    runs = fleet.fleet(3)
    fleet.passes(300)
    fleet.falls_due(late=45)
    Obligation.objects.filter(kind=Obligation.Kind.WATCH_CONTROLLERS).update(failures=1)
    fleet.look()
    assert Installation.current().gap_ended_at is None
    assert set(fleet.statuses(runs)) == {"running"}  # a little late, and so put off once
    fleet.falls_due()
    fleet.look()
    assert set(fleet.statuses(runs)) == {"interrupted"}
