"""What calls teach about an account: rate limits, the circuit and its probe, who answers, and who is not ready."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

import leases
from cleanup import claims, engine
from cleanup.claims import claim, new_ids
from cleanup.engine import Engine
from leases.clock import boottime
from leases.models import ActivityEntry, Attempt, Lease, Obligation, ProviderAccount, Receipt
from providers import registry
from providers.contract import ACCOUNT_KINDS, ErrorKind, ProviderError
from tests import factories
from tests.concurrency import Background, Gate, together
from tests.scenarios.steps import (
    acquired,
    attempts,
    audited,
    due_in,
    evidence,
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

Circuit = ProviderAccount.Circuit
OPENS_CIRCUIT = sorted(ACCOUNT_KINDS - {ErrorKind.RATE_LIMITED})
ABOUT_THE_SANDBOX = sorted(set(ErrorKind) - ACCOUNT_KINDS - {ErrorKind.BUSY, ErrorKind.NOT_READY})


def _account(rehearsal: Rehearsal) -> ProviderAccount:
    return ProviderAccount.objects.get(pk=rehearsal.account.pk)


def _probes(rehearsal: Rehearsal) -> list[Obligation]:
    return list(Obligation.objects.filter(probed_account=rehearsal.account).order_by("pk"))


def _claimable(rehearsal: Rehearsal) -> int:
    """How many rows a worker would get; they are given back."""
    taken = claim(rehearsal.account.pk, new_ids(50), worker="w", clock=boottime)
    for one in taken:
        claims.postpone(one, Attempt.Outcome.HANDED_BACK)
    return len(taken)


def _broken(rehearsal: Rehearsal, kind: ErrorKind = ErrorKind.SERVER) -> list[Lease]:
    """Five leases whose teardown failed for the account's sake, which opened its circuit."""
    made = [released(rehearsal) for _ in range(5)]
    rehearsal.world.hooks["identify"] = fails(kind)
    assert Engine().sweep(rehearsal.account.pk).outcomes == {"failed": 5}
    assert _account(rehearsal).circuit == Circuit.OPEN
    return made


# Rate limits


@pytest.mark.parametrize("call", ["identify", "inspect", "delete"])
def test_a_429_blocks_the_account_for_as_long_as_it_says_and_counts_no_attempt(rehearsal: Rehearsal, call: str) -> None:
    lease, other = released(rehearsal), released(rehearsal)
    Obligation.objects.filter(pk=owed(other).pk).update(due_at=factories.at(3))
    rehearsal.world.hooks[call] = fails(ErrorKind.RATE_LIMITED, retry_after=120.0)
    assert Engine().sweep(rehearsal.account.pk).outcomes == {"busy": 1}
    row = owed(lease)
    assert (row.failures, row.busy_count, row.last_error_kind) == (0, 0, "rate_limited")
    assert 115 < due_in(row) <= 120
    account = _account(rehearsal)
    assert (account.circuit, account.circuit_failures) == (Circuit.CLOSED, 0)
    assert 115 < (account.blocked_until - factories.database_now()).total_seconds() <= 120

    del rehearsal.world.hooks[call]
    falls_due(row)
    falls_due(owed(other))
    assert Engine().sweep(rehearsal.account.pk).claimed == 0
    ProviderAccount.objects.filter(pk=account.pk).update(blocked_until=factories.at(-1))
    assert sweep(rehearsal) == {"proven": 2}


@pytest.mark.parametrize(("retry_after", "least", "most"), [(None, 25, 30), (86400.0, 3590, 3600), (0.0, 25, 30)])
def test_a_429_without_a_time_or_with_an_unlikely_one_is_bounded(
    rehearsal: Rehearsal, retry_after: str, least: str, most: str
) -> None:
    lease = released(rehearsal)
    rehearsal.world.hooks["inspect"] = fails(ErrorKind.RATE_LIMITED, retry_after=retry_after)
    Engine().sweep(rehearsal.account.pk)
    assert least < due_in(owed(lease)) <= most


def test_a_shorter_429_does_not_shorten_a_longer_one(rehearsal: Rehearsal) -> None:
    released(rehearsal)
    released(rehearsal)
    waits = iter([600.0, 60.0])

    def throttle(_: str) -> None:
        raise ProviderError(ErrorKind.RATE_LIMITED, retry_after=next(waits))

    rehearsal.world.hooks["inspect"] = throttle
    assert Engine().sweep(rehearsal.account.pk).outcomes == {"busy": 2}
    assert (_account(rehearsal).blocked_until - factories.database_now()).total_seconds() > 590


# The circuit


@pytest.mark.parametrize("kind", OPENS_CIRCUIT)
def test_five_failures_in_a_row_of_whatever_rows_open_the_circuit_and_owe_one_probe(
    rehearsal: Rehearsal, kind: ErrorKind
) -> None:
    made = [released(rehearsal) for _ in range(5)]
    rehearsal.world.hooks["inspect"] = fails(kind)
    for number, lease in enumerate(made, start=1):
        Engine().sweep(rehearsal.account.pk, limit=1)
        account = _account(rehearsal)
        assert account.circuit_failures == number, lease
        assert account.circuit == (Circuit.OPEN if number == 5 else Circuit.CLOSED)
    assert [owed(lease).failures for lease in made] == [1] * 5
    (probe,) = _probes(rehearsal)
    assert 25 < due_in(probe) <= 30
    assert audited("account.blocked", rehearsal.account) == 1


def test_more_failures_than_open_it_owe_no_second_probe(rehearsal: Rehearsal) -> None:
    for _ in range(8):
        released(rehearsal)
    rehearsal.world.hooks["identify"] = fails(ErrorKind.CONNECTION)
    account = rehearsal.account.pk
    together(*[lambda: Engine().sweep(account) for _ in range(2)])
    assert len(_probes(rehearsal)) == 1
    assert _account(rehearsal).circuit_failures == 8


@pytest.mark.parametrize("kind", ABOUT_THE_SANDBOX)
def test_failures_about_a_sandbox_never_move_it(rehearsal: Rehearsal, kind: ErrorKind) -> None:
    made = [released(rehearsal) for _ in range(6)]
    rehearsal.world.hooks["inspect"] = fails(kind)
    assert Engine().sweep(rehearsal.account.pk).outcomes == {"failed": 6}
    account = _account(rehearsal)
    assert (account.circuit, account.circuit_failures) == (Circuit.CLOSED, 0)
    assert [owed(lease).failures for lease in made] == [1] * 6
    assert _probes(rehearsal) == []


def test_a_success_resets_the_count(rehearsal: Rehearsal) -> None:
    rehearsal.world.hooks["inspect"] = fails(ErrorKind.SERVER)
    for _ in range(4):
        released(rehearsal)
    Engine().sweep(rehearsal.account.pk)
    assert _account(rehearsal).circuit_failures == 4
    del rehearsal.world.hooks["inspect"]
    released(rehearsal)
    assert Engine().sweep(rehearsal.account.pk).outcomes == {"proven": 1}
    assert _account(rehearsal).circuit_failures == 0
    rehearsal.world.hooks["inspect"] = fails(ErrorKind.SERVER)
    released(rehearsal)
    Engine().sweep(rehearsal.account.pk)
    assert _account(rehearsal).circuit == Circuit.CLOSED


def test_neither_a_call_that_began_nor_one_that_answered_on_the_way_resets_it(rehearsal: Rehearsal) -> None:
    """K-24: a breaker that is reset by a start never opens. Here `identify` answers each time, and `delete` fails."""
    lease = released(rehearsal)
    rehearsal.world.hooks["delete"] = fails(ErrorKind.SERVER)
    for _ in range(5):
        falls_due(owed(lease))
        assert Engine().sweep(rehearsal.account.pk).outcomes == {"failed": 1}
    assert rehearsal.world.count("inspect") == 5
    assert _account(rehearsal).circuit == Circuit.OPEN


def test_behind_an_open_circuit_nothing_is_claimed_and_no_attempt_burnt(rehearsal: Rehearsal) -> None:
    untried = acquired(rehearsal)
    made = _broken(rehearsal)
    leases.release(untried.pk)
    for lease in made:
        falls_due(owed(lease))
    calls = len(rehearsal.world.calls)
    assert Engine().sweep(rehearsal.account.pk).claimed == 0
    assert len(rehearsal.world.calls) == calls
    assert [owed(lease).failures for lease in made] == [1] * 5
    assert attempts(owed(untried)) == []


def test_a_probe_that_succeeds_opens_the_way_for_what_is_due(rehearsal: Rehearsal) -> None:
    untried = acquired(rehearsal)
    made = _broken(rehearsal)
    leases.release(untried.pk)
    (probe,) = _probes(rehearsal)
    del rehearsal.world.hooks["identify"]
    falls_due(probe)
    # The probe, and then at once what waited behind it; what failed keeps its own cooldown.
    assert Engine().sweep(rehearsal.account.pk).outcomes == {"proven": 2}
    account = _account(rehearsal)
    assert (account.circuit, account.circuit_failures) == (Circuit.CLOSED, 0)
    assert (_probes(rehearsal)[0].closed_as, audited("account.unblocked", account)) == ("proven", 1)
    assert state(untried) == Lease.State.EXPIRED
    assert not any(is_due(owed(lease)) for lease in made)
    for lease in made:
        falls_due(owed(lease))
    assert sweep(rehearsal) == {"proven": 5}


def test_a_probe_is_one_cheap_read(rehearsal: Rehearsal) -> None:
    _broken(rehearsal)
    (probe,) = _probes(rehearsal)
    rehearsal.world.calls.clear()
    falls_due(probe)
    assert Engine().sweep(rehearsal.account.pk).outcomes == {"failed": 1}
    assert rehearsal.world.calls == [("identify", "")]


def test_a_circuit_can_open_again_and_owes_a_probe_of_its_own(rehearsal: Rehearsal) -> None:
    _broken(rehearsal)
    del rehearsal.world.hooks["identify"]
    falls_due(_probes(rehearsal)[0])
    sweep(rehearsal)
    made = [released(rehearsal) for _ in range(5)]
    rehearsal.world.hooks["identify"] = fails(ErrorKind.AUTHORISATION)
    assert Engine().sweep(rehearsal.account.pk).outcomes == {"failed": len(made)}
    first, second = _probes(rehearsal)
    assert (first.is_open, second.is_open) == (False, True)


def test_a_probe_that_fails_backs_off_by_itself(rehearsal: Rehearsal) -> None:
    _broken(rehearsal)
    (probe,) = _probes(rehearsal)
    waits = []
    for _ in range(6):
        falls_due(probe)
        assert Engine().sweep(rehearsal.account.pk).outcomes == {"failed": 1}
        waits.append(due_in(probe))
    assert 22 < waits[0] <= 40
    assert waits[3] > waits[0] * 4
    assert waits[4] == pytest.approx(1800, abs=5)
    assert waits[5] == pytest.approx(1800, abs=5)
    probe.refresh_from_db()
    assert probe.failures == 6
    # The failures of the probe are not the account's: they are what it is open for.
    assert _account(rehearsal).circuit_failures == 5


def test_a_probe_that_is_throttled_has_not_failed(rehearsal: Rehearsal) -> None:
    _broken(rehearsal)
    (probe,) = _probes(rehearsal)
    rehearsal.world.hooks["identify"] = fails(ErrorKind.RATE_LIMITED, retry_after=300.0)
    falls_due(probe)
    assert Engine().sweep(rehearsal.account.pk).outcomes == {"busy": 1}
    assert (_probes(rehearsal)[0].failures, _account(rehearsal).circuit) == (0, Circuit.OPEN)
    assert due_in(probe) > 290


def test_an_explicit_retry_behind_an_open_circuit_asks_the_account_first(rehearsal: Rehearsal) -> None:
    made = _broken(rehearsal)
    (probe,) = _probes(rehearsal)
    assert retry(rehearsal) == 5
    assert is_due(probe)
    assert Engine().sweep(rehearsal.account.pk).outcomes == {"failed": 1}
    assert [owed(lease).failures for lease in made] == [1] * 5
    del rehearsal.world.hooks["identify"]
    assert retry(rehearsal) == 5
    assert sweep(rehearsal) == {"proven": 6}


def test_a_dead_account_delays_nobody_else(rehearsal: Rehearsal) -> None:
    """S-198, G-22: while all calls of one account hang, another's are made, answered and settled."""
    other = Rehearsal()
    for _ in range(3):
        released(rehearsal)
    lease = released(other)
    hanging = Gate()
    rehearsal.world.hooks["identify"] = hanging
    dead = Background(lambda: Engine().sweep(rehearsal.account.pk))
    hanging.wait()
    assert Engine().sweep(other.account.pk).outcomes == {"proven": 1}
    assert state(lease) == Lease.State.EXPIRED
    del rehearsal.world.hooks["identify"]
    hanging.open()
    assert dead.result().outcomes == {"proven": 3}


def test_an_open_circuit_is_one_accounts(rehearsal: Rehearsal) -> None:
    other = Rehearsal()
    _broken(rehearsal)
    released(other)
    assert sweep(other) == {"proven": 1}


# Identity before absence


def _another_answers(rehearsal: Rehearsal) -> None:
    """The address leads to another engine, which knows none of our sandboxes."""
    rehearsal.world.identity = "somebody else"
    rehearsal.world.boxes.clear()


def test_when_another_account_answers_a_sandbox_is_never_absent(rehearsal: Rehearsal) -> None:
    lease = released(rehearsal)
    _another_answers(rehearsal)
    assert Engine().sweep(rehearsal.account.pk).outcomes == {"failed": 1}
    assert owed(lease).last_error_kind == "identity"
    assert rehearsal.world.count("inspect") == 0
    assert evidence(lease) == []
    assert state(lease) == Lease.State.PENDING_CLEANUP
    assert _account(rehearsal).circuit_failures == 1


@pytest.mark.parametrize("verb", ["ephemeral", "reuse_by_environment"])
def test_an_account_that_changes_between_the_questions_proves_nothing_either(rehearsal: Rehearsal, verb: str) -> None:
    """It is attested before the look and again after an answer that the sandbox is gone."""
    lease = released(rehearsal, verb)
    rehearsal.world.hooks["inspect"] = lambda _: _another_answers(rehearsal)
    assert Engine().sweep(rehearsal.account.pk).outcomes == {"failed": 1}
    assert owed(lease).last_error_kind == "identity"
    assert evidence(lease) == []


def test_the_control_the_same_account_may_say_that_a_sandbox_is_absent(rehearsal: Rehearsal) -> None:
    lease = released(rehearsal)
    rehearsal.world.boxes.clear()
    assert sweep(rehearsal) == {"proven": 1}
    assert evidence(lease) == ["absent"]


def test_another_account_does_not_close_the_circuit(rehearsal: Rehearsal) -> None:
    _broken(rehearsal)
    del rehearsal.world.hooks["identify"]
    mine = rehearsal.world.identity
    rehearsal.world.identity = "somebody else"
    (probe,) = _probes(rehearsal)
    falls_due(probe)
    assert Engine().sweep(rehearsal.account.pk).outcomes == {"failed": 1}
    probe.refresh_from_db()
    assert (probe.last_error_kind, _account(rehearsal).circuit) == ("identity", Circuit.OPEN)
    rehearsal.world.identity = mine
    falls_due(probe)
    assert Engine().sweep(rehearsal.account.pk).outcomes == {"proven": 1}


def test_a_lease_of_the_old_account_is_not_settled_by_the_new_one_though_both_answer(rehearsal: Rehearsal) -> None:
    """The identity is the one recorded on the lease, whatever the account row says by now (domain I-7)."""
    lease = released(rehearsal)
    _another_answers(rehearsal)
    ProviderAccount.objects.filter(pk=rehearsal.account.pk).update(attested_identity="somebody else")
    assert Engine().sweep(rehearsal.account.pk).outcomes == {"failed": 1}
    assert Receipt.objects.filter(lease=lease).count() == 0


def test_an_account_that_attests_nothing_proves_no_absence(rehearsal: Rehearsal) -> None:
    """Nothing equals nothing, and is no identity: an acquire that is refused, or a teardown without proof, is right."""
    rehearsal.world.identity = ""
    try:
        lease = released(rehearsal)
    except leases.errors.AcquireRefused:
        assert rehearsal.world.count("create") == 0
        return
    rehearsal.world.boxes.clear()
    sweep(rehearsal)
    assert evidence(lease) == []


def test_an_acquire_is_refused_when_another_account_answers(rehearsal: Rehearsal) -> None:
    acquired(rehearsal)
    _another_answers(rehearsal)
    with pytest.raises(leases.errors.AcquireRefused, match="another account"):
        acquired(rehearsal)
    assert rehearsal.world.count("create") == 1


# Escalation


def test_it_escalates_once_at_the_fifth_failure(rehearsal: Rehearsal) -> None:
    """S-184, S-195, domain 6: then every half hour, without end, and counted without a ceiling."""
    lease = released(rehearsal)
    rehearsal.world.hooks["inspect"] = fails(ErrorKind.REFUSED)
    row = owed(lease)
    for number in range(1, 8):
        falls_due(row)
        assert Engine().sweep(rehearsal.account.pk).outcomes == {"failed": 1}
        row.refresh_from_db()
        assert row.failures == number
        assert (row.escalated_at is not None) == (number >= 5)
        assert audited("obligation.escalated", row) == (1 if number >= 5 else 0)
        assert (due_in(row) == pytest.approx(1800, abs=5)) == (number >= 5)
    del rehearsal.world.hooks["inspect"]
    falls_due(row)
    assert sweep(rehearsal) == {"proven": 1}


@pytest.mark.parametrize(("minutes", "escalates"), [(29, False), (31, True)])
def test_it_escalates_when_owed_too_long_though_never_tried(rehearsal: Rehearsal, minutes: str, escalates: str) -> None:
    lease = released(rehearsal)
    row = owed(lease)
    ProviderAccount.objects.filter(pk=rehearsal.account.pk).update(blocked_until=factories.at(600))
    owed_for(row, minutes * 60)
    for _ in range(2):
        assert Engine().sweep(rehearsal.account.pk).claimed == 0
    row.refresh_from_db()
    assert (row.escalated_at is not None) == escalates
    assert audited("obligation.escalated", row) == int(escalates)
    assert attempts(row) == []


def test_it_escalates_by_age_when_it_is_only_ever_busy(rehearsal: Rehearsal) -> None:
    """K-05: stuck starting for twelve hours is no failure, and is told all the same."""
    lease = released(rehearsal)
    rehearsal.world.of(lease.resource_id).state = "busy"
    row = owed(lease)
    Engine().sweep(rehearsal.account.pk)
    assert audited("obligation.escalated", row) == 0
    owed_for(row, 31 * 60)
    falls_due(row)
    Engine().sweep(rehearsal.account.pk)
    row.refresh_from_db()
    assert (row.failures, row.busy_count) == (0, 2)
    assert audited("obligation.escalated", row) == 1


def test_behind_an_open_circuit_only_the_probe_escalates(rehearsal: Rehearsal) -> None:
    made = _broken(rehearsal)
    (probe,) = _probes(rehearsal)
    for row in [probe, *(owed(lease) for lease in made)]:
        owed_for(row, 3600)
    assert Engine().sweep(rehearsal.account.pk).claimed == 0
    assert audited("obligation.escalated", probe) == 1
    assert ActivityEntry.objects.filter(action="obligation.escalated").count() == 1


# A worker that is not ready


def _adapter_is_missing(rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    monkeypatch.delitem(registry._BUILT_IN, "rehearsal")
    return monkeypatch.undo


def _secret_is_missing(rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    Lease.objects.filter(account=rehearsal.account).update(credential_reference="env:A_SECRET_NOT_SET_HERE")
    return lambda: monkeypatch.setenv("A_SECRET_NOT_SET_HERE", "x")


@pytest.mark.parametrize("lacking", [_adapter_is_missing, _secret_is_missing], ids=["adapter", "secret"])
def test_a_worker_that_is_not_ready_gives_back_uncounted_and_leaves_the_account_alone_for_a_minute(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lacking: str
) -> None:
    """S-106, S-196, S-199, S-200: what this worker lacks is its own unreadiness, and no attempt of the row."""
    lease, another = released(rehearsal), released(rehearsal)
    provide = lacking(rehearsal, monkeypatch)
    assert set(Engine().sweep(rehearsal.account.pk).outcomes) == {"handed_back"}
    assert "not ready" in caplog.text
    for row in (owed(lease), owed(another)):
        assert (row.failures, row.busy_count, row.quiet, row.attempt_id) == (0, 0, "", None)
        assert is_due(row)
    tried = Attempt.objects.count()
    account = _account(rehearsal)
    assert (account.circuit, account.circuit_failures, account.blocked_until) == (Circuit.CLOSED, 0, None)

    assert Engine().sweep(rehearsal.account.pk).claimed == 0
    provide()
    assert Engine().sweep(rehearsal.account.pk).claimed == 0
    assert Attempt.objects.count() == tried
    # Another process knows nothing of it and gets the rows; so does this one after a minute.
    assert 55 < engine._UNREADY[rehearsal.account.pk] - time.monotonic() <= 60
    engine._UNREADY[rehearsal.account.pk] = time.monotonic() - 1
    assert Engine().sweep(rehearsal.account.pk).outcomes == {"proven": 2}


@pytest.mark.parametrize("call", ["identify", "inspect", "stop", "delete"])
def test_a_call_that_this_process_cannot_make_is_no_failure_of_the_row(rehearsal: Rehearsal, call: str) -> None:
    """Design 5 and 7: nothing was sent, another worker may do it, and no attempt is consumed."""
    lease = released(rehearsal, "reuse_by_environment" if call == "stop" else "ephemeral")
    rehearsal.world.hooks[call] = fails(ErrorKind.NOT_READY)
    assert Engine().sweep(rehearsal.account.pk).outcomes == {"handed_back": 1}
    row = owed(lease)
    assert (row.failures, row.attempt_id) == (0, None)
    assert is_due(row)
    assert Engine().sweep(rehearsal.account.pk).claimed == 0


def test_not_being_ready_for_one_account_says_nothing_about_another(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Rehearsal()
    released(rehearsal)
    released(other)
    _secret_is_missing(rehearsal, monkeypatch)
    assert Engine().sweep(rehearsal.account.pk).outcomes == {"handed_back": 1}
    assert Engine().sweep(other.account.pk).outcomes == {"proven": 1}


def test_a_recorded_endpoint_that_no_longer_fits_asks_a_person_and_burns_no_retries(rehearsal: Rehearsal) -> None:
    """S-139, S-146: cleanup works from the lease's own snapshot; what cannot be read is quiet, and woken by a Retry."""
    lease = released(rehearsal)
    Lease.objects.filter(pk=lease.pk).update(endpoint={"wrold": "misspelt"})
    assert sweep(rehearsal) == {"quieted": 1}
    row = owed(lease)
    assert (row.quiet, row.due_at, row.failures) == ("invalid_snapshot", None, 0)
    assert audited("obligation.quieted", row) == 1
    Lease.objects.filter(pk=lease.pk).update(endpoint=rehearsal.account.endpoint)
    assert stop(rehearsal) == 1
    assert sweep(rehearsal) == {"proven": 1}
