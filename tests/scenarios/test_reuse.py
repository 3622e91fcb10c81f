"""Which sandbox a run gets again: section A of the scenarios, and what of B is about a sandbox that is used again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest
from django.db import transaction

import leases
from leases import proof, reuse
from leases.errors import AcquireInProgress, AcquireRefused, AcquireRejected, AcquireUncertain, ResumeFailed
from leases.models import BridgeActivity, Company, Environment, Lease, Obligation, Operation, Receipt, Run
from leases.models.environments import Policy
from leases.patience import Patience
from providers.contract import Capabilities, ErrorKind, ProviderError
from tests import factories
from tests.concurrency import Background, Gate, elsewhere, together
from tests.rehearsal import RehearsalProvider
from tests.scenarios.steps import audited, evidence, fails, falls_due, owed, state, sweep
from tests.stage import Rehearsal

pytestmark = pytest.mark.django_db(transaction=True)

BY_ENVIRONMENT, BY_WORKSPACE = Policy.REUSE_BY_ENVIRONMENT, Policy.REUSE_BY_EXECUTION_WORKSPACE


class Time:
    """A clock that passes only in pauses, which it records."""

    def __init__(self) -> None:
        self.now, self.pauses = 1000.0, list[float]()

    def __call__(self) -> float:
        return self.now

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += max(seconds, 0.001)

    def patience(self) -> Patience:
        return Patience(clock=self, pause=self.pause)


@pytest.fixture
def rehearsal() -> Rehearsal:
    return Rehearsal(policy=BY_ENVIRONMENT)


def acquire(rehearsal: Rehearsal, run: Run | None = None, **how: Any) -> Lease:
    how.setdefault("patience", Time().patience())
    return leases.acquire(
        rehearsal.environment.pk, company_id=rehearsal.company.pk, run_id=run.pk if run else None, **how
    )


def kept(rehearsal: Rehearsal, run: Run | None = None, **how: Any) -> Lease:
    """A lease whose sandbox was stopped and kept, proven."""
    lease = leases.release(acquire(rehearsal, run or rehearsal.run, **how).pk)
    assert sweep(rehearsal) == {"proven": 1}
    assert (state(lease), evidence(lease)) == ("released", ["stopped"])
    return lease


def another_run(rehearsal: Rehearsal, **values: Any) -> Run:
    return factories.run(rehearsal.company, **values)


def outcome_of(lease: Lease) -> tuple[str, str, int]:
    lease.refresh_from_db()
    return lease.state, lease.reason, lease.epoch


# Whose it may be again


def test_the_next_run_of_the_environment_gets_it_as_a_successor(rehearsal: Rehearsal) -> None:
    """S-008, S-023: resumed, in a row of its own; the predecessor is history, with its receipt."""
    first = kept(rehearsal)
    second = acquire(rehearsal, another_run(rehearsal))
    assert (second.resource_id, second.resource_name) == (first.resource_id, first.resource_name)
    assert rehearsal.world.count("create") == 1
    assert rehearsal.world.count("start") == 1
    assert (state(second), second.epoch) == ("active", 2)
    first.refresh_from_db()
    assert (first.state, first.successor, evidence(first)) == ("expired", second, ["stopped"])
    assert [op.state for op in Operation.objects.order_by("created_at")] == ["resolved", "attached"]
    assert not Obligation.objects.filter(closed_at__isnull=True).exists()
    assert (audited("lease.succeeded", first), audited("lease.acquired", second)) == (1, 1)


def test_the_same_run_gets_its_own_lease_again(rehearsal: Rehearsal) -> None:
    """S-022: the same row; what proved its first epoch proves nothing about the second."""
    first = kept(rehearsal)
    assert proof.is_proven_ended(first)
    again = acquire(rehearsal, rehearsal.run)
    assert again == first
    assert outcome_of(first) == ("active", "", 2)
    assert first.released_at is None
    assert not proof.is_proven_ended(first)
    leases.release(first.pk)
    assert sweep(rehearsal) == {"proven": 1}
    assert (state(first), evidence(first)) == ("released", ["stopped", "stopped"])
    assert [receipt.epoch for receipt in Receipt.objects.order_by("pk")] == [1, 2]


def test_a_successor_is_torn_down_like_any_other_and_its_predecessor_stays_as_it_is(rehearsal: Rehearsal) -> None:
    first = kept(rehearsal)
    second = acquire(rehearsal, another_run(rehearsal))
    leases.release(second.pk, disposition="destroy")
    assert sweep(rehearsal) == {"proven": 1}
    assert (state(first), state(second), rehearsal.world.boxes) == ("expired", "expired", {})
    assert {op.state for op in Operation.objects.all()} == {"resolved"}


def test_a_lease_of_no_run_neither_gets_one_nor_leaves_one(rehearsal: Rehearsal) -> None:
    """S-006, S-007."""
    kept(rehearsal)
    ad_hoc = acquire(rehearsal)
    assert (ad_hoc.policy, ad_hoc.scope, rehearsal.world.count("start")) == ("ephemeral", "", 0)
    leases.release(ad_hoc.pk, disposition="stop_and_retain")
    sweep(rehearsal)
    assert state(ad_hoc) == "released"
    lease = acquire(rehearsal, another_run(rehearsal))
    assert lease.resource_id != ad_hoc.resource_id


@pytest.mark.parametrize(
    ("first", "second", "again"),
    [
        ({"workspace": "w"}, {"workspace": "w"}, True),
        ({"workspace": "w"}, {"workspace": "v"}, False),
        ({"workspace": "w", "agent": "a"}, {"workspace": "w", "agent": "b"}, False),
        ({"workspace": "w" * 300}, {"workspace": "w" * 300}, True),
        ({"workspace": "w" * 300}, {"workspace": "w" * 299}, False),
        ({}, {}, True),
        ({"agent": "a"}, {"agent": "b"}, False),
        ({}, {"workspace": "w"}, False),
    ],
)
def test_by_workspace_or_else_by_issue_and_agent(first: dict[str, str], second: dict[str, str], *, again: bool) -> None:
    """S-010."""
    rehearsal = Rehearsal(policy=BY_WORKSPACE)
    issue = factories.issue(rehearsal.company)
    lease = kept(rehearsal, another_run(rehearsal, issue=issue), **first)
    got = acquire(rehearsal, another_run(rehearsal, issue=issue), **second)
    assert (got.resource_id == lease.resource_id) is again


def test_a_task_without_workspace_and_issue_leaves_nothing_to_use_again() -> None:
    rehearsal = Rehearsal(policy=BY_WORKSPACE)
    assert acquire(rehearsal, rehearsal.run).scope == ""


def test_another_issue_gets_another_sandbox() -> None:
    rehearsal = Rehearsal(policy=BY_WORKSPACE)
    runs = [another_run(rehearsal, issue=factories.issue(rehearsal.company)) for _ in range(2)]
    lease = kept(rehearsal, runs[0])
    assert acquire(rehearsal, runs[1]).resource_id != lease.resource_id
    assert state(lease) == "released"


def _of_another_size(rehearsal: Rehearsal) -> None:
    Environment.objects.filter(pk=rehearsal.environment.pk).update(config={"size": 2})


def _at_another_account(rehearsal: Rehearsal) -> None:
    account = factories.account(
        rehearsal.company, provider="rehearsal", endpoint=rehearsal.account.endpoint, attested_identity=""
    )
    Environment.objects.filter(pk=rehearsal.environment.pk).update(account=account)


@pytest.mark.parametrize("change", [_of_another_size, _at_another_account])
def test_one_that_was_made_from_something_else_is_destroyed_first(
    rehearsal: Rehearsal, change: Callable[[Rehearsal], None]
) -> None:
    """S-009: its destruction is on record before anything is created in its place."""
    lease = kept(rehearsal)
    change(rehearsal)
    seen = []
    rehearsal.world.hooks["create"] = lambda _: seen.append(elsewhere(lambda: outcome_of(Lease.objects.get())))
    new = acquire(rehearsal, another_run(rehearsal))
    assert seen == [("pending_cleanup", "lease_fingerprint_mismatch", 2)]
    assert new.resource_id != lease.resource_id
    assert owed(lease).verb == "delete"
    assert sweep(rehearsal) == {"proven": 1}
    assert (state(lease), list(rehearsal.world.boxes)) == ("expired", [new.resource_id])


def test_a_provider_that_keeps_no_files_makes_ephemeral_leases(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-024."""
    forgets = Capabilities(finds_by_name=True, keeps_files=False, has_deadline=False, creation_window=60.0)
    monkeypatch.setattr(RehearsalProvider, "capabilities", forgets)
    lease = acquire(rehearsal, rehearsal.run)
    assert (lease.policy, lease.scope) == ("ephemeral", "")


def test_of_several_the_one_released_last_is_taken(rehearsal: Rehearsal) -> None:
    first = acquire(rehearsal, another_run(rehearsal))
    second = acquire(rehearsal, another_run(rehearsal))
    for lease in (first, second):
        leases.release(lease.pk)
    assert sweep(rehearsal) == {"proven": 2}
    assert acquire(rehearsal, another_run(rehearsal)).resource_id == second.resource_id
    assert acquire(rehearsal, another_run(rehearsal)).resource_id == first.resource_id


def test_another_company_never_gets_it(rehearsal: Rehearsal) -> None:
    """The scope names the environment, and an environment is one company's; a row that lies is passed over, too."""
    lease = kept(rehearsal)
    other = Rehearsal(policy=BY_ENVIRONMENT)
    Lease.objects.filter(pk=lease.pk).update(scope=f"environment:{other.environment.pk}/agent:")
    got = acquire(other, other.run)
    assert got.resource_id != lease.resource_id
    assert state(lease) == "released"


# Starting it


def test_a_start_is_journalled_before_the_call_and_suspends_every_receipt(rehearsal: Rehearsal) -> None:
    lease = kept(rehearsal)
    run = another_run(rehearsal)
    seen: list[Any] = []

    def look(_: str) -> None:
        def read() -> None:
            (start,) = Operation.objects.filter(kind="start")
            seen.append((start.state, start.source_id, start.resource_id, start.run_uuid))
            seen.append(proof.is_proven_ended(Lease.objects.get(pk=lease.pk)))
            seen.append(owed(start).kind)

        elsewhere(read)

    rehearsal.world.hooks["start"] = look
    acquire(rehearsal, run)
    assert seen == [("pending", lease.pk, lease.resource_id, run.pk), False, "recover_start"]


def test_a_start_that_cannot_be_journalled_is_not_made(rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-055, for a start."""
    lease = kept(rehearsal)

    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError("the database does not take it")

    monkeypatch.setattr(leases.journal, "_owe_recovery", refuse)
    with pytest.raises(ValueError, match="does not take it"):
        acquire(rehearsal, another_run(rehearsal))
    assert (rehearsal.world.count("start"), rehearsal.world.count("create")) == (0, 1)
    assert (state(lease), proof.is_proven_ended(lease)) == ("released", True)


@pytest.mark.parametrize("kind", sorted(reuse.TRANSIENT))
def test_a_transient_failure_is_tried_again_with_growing_pauses(rehearsal: Rehearsal, kind: ErrorKind) -> None:
    """S-012: 250 ms, doubling, each times 0.75 to 1.25."""
    lease, time, failures = kept(rehearsal), Time(), [kind, kind]

    def fail(_: str) -> None:
        if failures:
            raise ProviderError(failures.pop())

    rehearsal.world.hooks["start"] = fail
    got = acquire(rehearsal, another_run(rehearsal), patience=time.patience())
    assert got.resource_id == lease.resource_id
    assert rehearsal.world.count("start") == 3
    for pause, base in zip(time.pauses, [0.25, 0.5, 1.0], strict=False):
        assert 0.75 * base <= pause <= 1.25 * base


def test_after_a_minute_the_acquire_fails_and_the_sandbox_is_kept(rehearsal: Rehearsal) -> None:
    """S-013: pauses of at most 5 s, a minute in all; no replacement."""
    lease, time = kept(rehearsal), Time()
    rehearsal.world.hooks["start"] = fails(ErrorKind.TIMEOUT)
    with pytest.raises(ResumeFailed) as caught:
        acquire(rehearsal, another_run(rehearsal), patience=time.patience())
    assert caught.value.code == "timeout"
    assert time.now - 1000.0 == pytest.approx(60, abs=0.1)
    assert max(time.pauses) <= 5 * 1.25
    assert rehearsal.world.count("create") == 1
    assert state(lease) == "released"


PERMANENT = sorted(set(ErrorKind) - reuse.TRANSIENT - {ErrorKind.CANNOT_START, ErrorKind.NOT_FOUND})


@pytest.mark.parametrize("kind", PERMANENT)
def test_any_other_failure_fails_at_once_and_keeps_it(rehearsal: Rehearsal, kind: ErrorKind) -> None:
    """S-014."""
    lease = kept(rehearsal)
    rehearsal.world.hooks["start"] = fails(kind)
    with pytest.raises(ResumeFailed) as caught:
        acquire(rehearsal, another_run(rehearsal))
    assert caught.value.code == kind.value
    assert (rehearsal.world.count("start"), rehearsal.world.count("create")) == (1, 1)
    # Nothing was started: the look says so, and what proved the stop proves it again.
    assert not proof.is_proven_ended(lease)
    del rehearsal.world.hooks["start"]
    if kind == ErrorKind.PROTOCOL:  # an answer that is not understood may have been that it is done, or will be
        assert sweep(rehearsal) == {"not_seen": 1}
        _no_call_is_under_way()
        falls_due(owed(Operation.objects.get(kind="start")))
    assert sweep(rehearsal) == {"proven": 1}
    assert (state(lease), proof.is_proven_ended(lease), evidence(lease)) == ("released", True, ["stopped"])
    assert acquire(rehearsal, another_run(rehearsal)).resource_id == lease.resource_id


def test_the_providers_word_that_it_never_can_is_followed_by_a_replacement(rehearsal: Rehearsal) -> None:
    lease = kept(rehearsal)
    rehearsal.world.hooks["start"] = fails(ErrorKind.CANNOT_START)
    new = acquire(rehearsal, another_run(rehearsal))
    assert new.resource_id != lease.resource_id
    assert outcome_of(lease) == ("pending_cleanup", "resume_failed", 2)
    assert owed(lease).verb == "delete"
    assert sweep(rehearsal) == {"proven": 1}
    assert (state(lease), state(new)) == ("expired", "active")


def test_one_that_is_gone_is_replaced(rehearsal: Rehearsal) -> None:
    """S-015: with the identity of the account asked again, since it is a negative answer."""
    lease = kept(rehearsal)
    rehearsal.world.boxes.clear()
    asked = rehearsal.world.count("identify")
    new = acquire(rehearsal, another_run(rehearsal))
    assert rehearsal.world.count("identify") == asked + 2
    assert (lease.resource_id != new.resource_id, outcome_of(lease)) == (True, ("pending_cleanup", "not_found", 2))
    assert sweep(rehearsal) == {"proven": 1}
    assert (state(lease), evidence(lease)) == ("expired", ["stopped", "absent"])


def test_another_accounts_word_that_it_is_gone_replaces_nothing(rehearsal: Rehearsal) -> None:
    lease = kept(rehearsal)
    boxes = dict(rehearsal.world.boxes)
    identity = rehearsal.world.identity

    def another(_: str) -> None:
        rehearsal.world.identity = "another"
        rehearsal.world.boxes.clear()

    rehearsal.world.hooks["inspect"] = another
    with pytest.raises(ResumeFailed) as caught:
        acquire(rehearsal, another_run(rehearsal))
    assert caught.value.code == "identity"
    del rehearsal.world.hooks["inspect"]
    rehearsal.world.identity = identity
    rehearsal.world.boxes.update(boxes)
    sweep(rehearsal)
    assert (state(lease), rehearsal.world.count("create")) == ("released", 1)


def test_what_answers_with_other_marks_is_not_what_was_created(rehearsal: Rehearsal) -> None:
    """S-016: it is replaced; and its teardown asks a person, since it may be somebody else's."""
    lease = kept(rehearsal)
    box = rehearsal.world.of(lease.resource_id)
    box.resource = type(box.resource)(lease.resource_id, box.resource.name, {})
    new = acquire(rehearsal, another_run(rehearsal))
    assert new.resource_id != lease.resource_id
    assert outcome_of(lease) == ("pending_cleanup", "identity_mismatch", 2)
    assert sweep(rehearsal) == {"quieted": 1}
    assert (owed(lease).quiet, lease.resource_id in rehearsal.world.boxes) == ("foreign_marks", True)


def test_a_replacement_does_not_wait_for_the_destruction_of_the_old_one(rehearsal: Rehearsal) -> None:
    """S-018."""
    lease = kept(rehearsal)
    rehearsal.world.hooks["start"] = fails(ErrorKind.CANNOT_START)
    rehearsal.world.hooks["delete"] = fails(ErrorKind.SERVER)
    new = acquire(rehearsal, another_run(rehearsal))
    assert sweep(rehearsal) == {"failed": 1}
    assert (state(lease), state(new)) == ("pending_cleanup", "active")


def test_one_that_runs_already_is_taken_as_started(rehearsal: Rehearsal) -> None:
    """Somebody else started it (K-12): the epoch rises all the same, and the run has it."""
    lease = kept(rehearsal)
    rehearsal.world.of(lease.resource_id).state = "running"
    got = acquire(rehearsal, another_run(rehearsal))
    assert (got.resource_id, got.epoch, rehearsal.world.count("start")) == (lease.resource_id, 2, 0)


def test_nothing_is_started_late(rehearsal: Rehearsal) -> None:
    """Who was suspended since the journal may have been taken for dead, and the start withdrawn."""
    lease = kept(rehearsal)

    def clock() -> float:
        return 1000.0 + (9999.0 if Operation.objects.filter(kind="start").exists() else 0.0)

    with pytest.raises(ResumeFailed):
        acquire(rehearsal, another_run(rehearsal), patience=Patience(clock=clock, pause=lambda _: None))
    assert rehearsal.world.count("start") == 0
    assert sweep(rehearsal) == {"proven": 1}
    assert (state(lease), proof.is_proven_ended(lease)) == ("released", True)


# The reply is lost, or comes too late


def _lose_the_reply(rehearsal: Rehearsal) -> None:
    """The start is done; its answer, and every look of its caller after it, is lost."""

    def lose(_: str) -> None:
        rehearsal.world.hooks["inspect"] = fails(ErrorKind.PROTOCOL)
        raise ProviderError(ErrorKind.CONNECTION)

    rehearsal.world.after["start"] = lose


def _no_call_is_under_way() -> None:
    """So much time has passed since the starts were journalled that every call of them has its end."""
    Operation.objects.filter(kind="start").update(created_at=factories.at(-9999))


def test_a_start_whose_reply_was_lost_is_stopped_again_and_kept(rehearsal: Rehearsal) -> None:
    """The sighting raises the epoch, so that only a fresh stop proves its end; nothing is created in its place."""
    lease = kept(rehearsal)
    _lose_the_reply(rehearsal)
    with pytest.raises(ResumeFailed):
        acquire(rehearsal, another_run(rehearsal))
    assert not proof.is_proven_ended(lease)
    del rehearsal.world.hooks["inspect"], rehearsal.world.after["start"]
    # It is stopped at once. That a call may still be done, whose reply was lost, keeps the proof waiting.
    assert sweep(rehearsal) == {"proven": 1, "not_seen": 1}
    assert (rehearsal.world.of(lease.resource_id).state, state(lease)) == ("stopped", "pending_cleanup")
    _no_call_is_under_way()
    falls_due(owed(lease))
    assert sweep(rehearsal) == {"proven": 1}
    assert outcome_of(lease) == ("released", "start_recovered", 2)
    assert (evidence(lease), rehearsal.world.of(lease.resource_id).state) == (["stopped", "stopped"], "stopped")
    assert acquire(rehearsal, another_run(rehearsal)).resource_id == lease.resource_id


def test_it_is_looked_at_and_not_withdrawn_while_a_call_may_be_under_way(rehearsal: Rehearsal) -> None:
    """A Stop wakes the recovery while the caller is about to start: what is seen stopped proves nothing yet."""
    lease, run, starting = kept(rehearsal), another_run(rehearsal), Gate()
    rehearsal.world.hooks["start"] = starting

    def rejected() -> str:
        with pytest.raises(AcquireRejected) as caught:
            acquire(rehearsal, run)
        return str(caught.value)

    acquiring = Background(rejected)
    starting.wait()
    assert leases.stop(company_id=rehearsal.company.pk, run_id=run.pk) == 1
    assert sweep(rehearsal) == {"not_seen": 1}
    assert not proof.is_proven_ended(lease)
    starting.open()
    assert "the start was stopped" in acquiring.result()
    assert outcome_of(lease) == ("pending_cleanup", "acquire_rejected", 2)
    assert sweep(rehearsal) == {"proven": 1}
    assert (state(lease), rehearsal.world.of(lease.resource_id).state) == ("released", "stopped")


def test_a_suspended_sandbox_is_stopped_again_and_its_receipt_never_stands_again(rehearsal: Rehearsal) -> None:
    """Its old processes resume with it, so what the start left is not what the receipt said."""
    lease = leases.release(acquire(rehearsal, rehearsal.run).pk)
    rehearsal.world.of(lease.resource_id).state = "suspended"
    assert sweep(rehearsal) == {"proven": 1}
    rehearsal.world.hooks["start"] = fails(ErrorKind.REFUSED)
    with pytest.raises(ResumeFailed):
        acquire(rehearsal, another_run(rehearsal))
    assert sweep(rehearsal) == {"proven": 2}
    assert (state(lease), len(evidence(lease))) == ("released", 2)


def test_one_that_vanished_during_the_start_is_proven_gone(rehearsal: Rehearsal) -> None:
    lease = kept(rehearsal)

    def vanish(_: str) -> None:
        rehearsal.world.boxes.clear()
        raise ProviderError(ErrorKind.REFUSED)

    rehearsal.world.hooks["start"] = vanish
    with pytest.raises(ResumeFailed):
        acquire(rehearsal, another_run(rehearsal))
    assert sweep(rehearsal) == {"proven": 2}
    assert (state(lease), evidence(lease)) == ("expired", ["stopped", "absent"])


def _run_ends(rehearsal: Rehearsal, run: Run) -> None:
    Run.objects.filter(pk=run.pk).update(status=Run.Status.CANCELLED)


def _environment_is_archived(rehearsal: Rehearsal, _: Run) -> None:
    Environment.objects.filter(pk=rehearsal.environment.pk).update(status=Environment.Status.ARCHIVED)


def _company_is_closed(rehearsal: Rehearsal, _: Run) -> None:
    Company.objects.filter(pk=rehearsal.company.pk).update(closed_at=factories.database_now())


@pytest.mark.parametrize("change", [_run_ends, _environment_is_archived, _company_is_closed])
def test_a_rejected_attach_does_not_cost_the_files(
    rehearsal: Rehearsal, change: Callable[[Rehearsal, Run], None]
) -> None:
    """S-041: a sandbox that is used again is stopped again, and never destroyed, though its caller may not have it."""
    lease, run = kept(rehearsal), another_run(rehearsal)
    rehearsal.world.after["start"] = lambda _: elsewhere(lambda: change(rehearsal, run))
    with pytest.raises(AcquireRejected):
        acquire(rehearsal, run)
    assert (outcome_of(lease), owed(lease).verb) == (("pending_cleanup", "acquire_rejected", 2), "stop_only")
    assert sweep(rehearsal) == {"proven": 1}
    assert (state(lease), rehearsal.world.count("delete")) == ("released", 0)


def test_two_runs_at_once_never_get_the_same_sandbox(rehearsal: Rehearsal) -> None:
    """The start is journalled under the lease's lock: the second finds it being started, and gets one of its own."""
    lease = kept(rehearsal)
    runs = [another_run(rehearsal) for _ in range(3)]
    got = together(*[lambda run=run: acquire(rehearsal, run) for run in runs])  # type: ignore[misc]
    assert len({one.resource_id for one in got}) == 3
    assert [one.resource_id for one in got].count(lease.resource_id) == 1
    assert rehearsal.world.count("start") == 1


def test_nothing_is_started_while_an_attempt_is_at_work_on_it(rehearsal: Rehearsal) -> None:
    """Design 2.2: nor for one call bound after one was superseded, which may still send what it announced."""
    lease, time = kept(rehearsal), Time()
    attempt = lease.obligations.get(kind="teardown").attempts.get()
    with transaction.atomic():
        late = factories.attempt(
            attempt.obligation, outcome="superseded", announced_call="stop", announced_at=factories.at(-1)
        )
    with pytest.raises(AcquireRefused) as caught:
        acquire(rehearsal, another_run(rehearsal), patience=time.patience())
    assert (caught.value.code, rehearsal.world.count("start")) == ("busy", 0)
    assert late.outcome == "superseded"


def test_nothing_is_started_while_old_work_of_it_has_no_end(rehearsal: Rehearsal) -> None:
    """S-125: it could write under the sandbox that is started. Past its own deadline it holds nothing."""
    lease = kept(rehearsal)
    work = BridgeActivity.objects.create(company=rehearsal.company, lease=lease, deadline=factories.at(600))
    with pytest.raises(AcquireRefused, match="try again") as caught:
        acquire(rehearsal, another_run(rehearsal))
    assert (caught.value.code, rehearsal.world.count("start"), rehearsal.world.count("create")) == ("busy", 0, 1)
    BridgeActivity.objects.filter(pk=work.pk).update(deadline=factories.at(-1))
    assert acquire(rehearsal, another_run(rehearsal)).resource_id == lease.resource_id


# Requests


def test_the_same_request_again_returns_the_same_lease_and_asks_nobody(rehearsal: Rehearsal) -> None:
    """S-059, S-072."""
    first = acquire(rehearsal, rehearsal.run, request_key="r-1")
    calls = len(rehearsal.world.calls)
    assert acquire(rehearsal, rehearsal.run, request_key="r-1") == first
    assert len(rehearsal.world.calls) == calls
    assert Operation.objects.count() == 1


def test_ten_at_once_with_one_key_create_one_sandbox(rehearsal: Rehearsal) -> None:
    def one() -> Lease | str:
        try:
            return acquire(rehearsal, rehearsal.run, request_key="r-1")
        except AcquireInProgress as error:
            return error.code

    got = together(*[one] * 10)
    made = [lease for lease in got if isinstance(lease, Lease)]
    assert made
    assert {lease.pk for lease in made} == {Lease.objects.get().pk}
    assert {code for code in got if isinstance(code, str)} <= {"acquire_in_progress"}
    assert rehearsal.world.count("create") == 1


def test_a_request_whose_answer_was_lost_creates_nothing_more(rehearsal: Rehearsal) -> None:
    rehearsal.world.after["create"] = fails(ErrorKind.CONNECTION)
    with pytest.raises(AcquireUncertain):
        acquire(rehearsal, rehearsal.run, request_key="r-1")
    with pytest.raises(AcquireInProgress):
        acquire(rehearsal, rehearsal.run, request_key="r-1")
    sweep(rehearsal)
    with pytest.raises(AcquireRejected) as caught:
        acquire(rehearsal, rehearsal.run, request_key="r-1")
    assert (caught.value.code, rehearsal.world.count("create")) == ("request_over", 1)


def test_a_request_that_was_replaced_is_still_served_once(rehearsal: Rehearsal) -> None:
    kept(rehearsal)
    rehearsal.world.hooks["start"] = fails(ErrorKind.CANNOT_START)
    run = another_run(rehearsal)
    lease = acquire(rehearsal, run, request_key="r-1")
    assert acquire(rehearsal, run, request_key="r-1") == lease
    assert rehearsal.world.count("create") == 2


def test_a_key_names_one_request_only(rehearsal: Rehearsal) -> None:
    acquire(rehearsal, rehearsal.run, request_key="r-1")
    with pytest.raises(AcquireRefused) as caught:
        acquire(rehearsal, another_run(rehearsal), request_key="r-1")
    assert caught.value.code == "request_key_reused"
    other = Rehearsal()
    assert state(acquire(other, other.run, request_key="r-1")) == "active"  # another company's key is its own


@pytest.mark.parametrize(
    "how",
    [
        {"request_key": ""},
        {"request_key": "k" * 201},
        {"request_key": "a\nb"},
        {"workspace": "a\x00"},
        {"agent": "\x1b[0m"},
        {"setup": ["ls"]},
        {"setup": [[]]},
        {"setup": [["ls", 1]]},
        {"ends_in": 60.0},
    ],
)
def test_nonsense_is_refused_before_anything_is_written_or_asked(rehearsal: Rehearsal, how: dict[str, Any]) -> None:
    with pytest.raises(AcquireRefused) as caught:
        acquire(rehearsal, rehearsal.run, **how)
    assert caught.value.code == "invalid"
    assert (Operation.objects.count(), rehearsal.world.calls) == (0, [])


def test_an_unknown_environment_is_none_of_this_company(rehearsal: Rehearsal) -> None:
    with pytest.raises(leases.errors.NotFound):
        leases.acquire(uuid4(), company_id=rehearsal.company.pk)


def test_an_archived_environment_is_refused_before_any_call_changes_something(rehearsal: Rehearsal) -> None:
    """S-001."""
    lease = kept(rehearsal)
    _environment_is_archived(rehearsal, rehearsal.run)
    with pytest.raises(AcquireRefused, match="archived"):
        acquire(rehearsal, another_run(rehearsal))
    assert (rehearsal.world.count("start"), rehearsal.world.count("create"), state(lease)) == (0, 1, "released")


def test_a_start_falls_due_behind_every_call_of_its_caller(rehearsal: Rehearsal) -> None:
    """Whoever dies in the middle: the recovery looks when no call can be under way any more, and withdraws."""
    lease, started = kept(rehearsal), Gate()
    rehearsal.world.hooks["start"] = started
    acquiring = Background(lambda: acquire(rehearsal, another_run(rehearsal)))
    started.wait()
    start = Operation.objects.get(kind="start")
    assert not Obligation.objects.filter(operation=start, due_at__lte=factories.at(149)).exists()
    falls_due(owed(start))
    assert sweep(rehearsal) == {"not_seen": 1}
    Operation.objects.filter(pk=start.pk).update(created_at=factories.at(-9999))
    falls_due(owed(start))
    assert sweep(rehearsal) == {"proven": 1}
    start.refresh_from_db()
    assert (start.state, state(lease), proof.is_proven_ended(lease)) == ("resolved", "released", True)
    started.open()
    with pytest.raises(AcquireRejected, match="took it over first"):
        acquiring.result()
