"""Attacks on proof and ownership: what would have settled a lease wrongly, lost a sandbox, or left it to nobody.

Each of these succeeded once. The names say what has to hold instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest
from django.db import connection

import leases
from cleanup import evidence as evidence_module
from cleanup.engine import Engine
from leases import acquisition, bounds, creating, journal, transitions
from leases.errors import AcquireFailed, AcquireRefused, AcquireRejected, AcquireUncertain
from leases.models import (
    Attempt,
    Credential,
    Issue,
    Lease,
    Obligation,
    Operation,
    ProviderAccount,
    Receipt,
    Run,
)
from leases.models.environments import Policy
from leases.patience import Patience
from providers.contract import (
    Busy,
    Capabilities,
    Created,
    ErrorKind,
    Resource,
    Running,
    Stopped,
    Unknown,
)
from tests import factories
from tests.concurrency import Background, Gate, elsewhere, lost_commit_reply
from tests.rehearsal import Box, RehearsalProvider
from tests.scenarios.steps import (
    acquired,
    attempts,
    audited,
    evidence,
    fails,
    falls_due,
    is_due,
    owed,
    released,
    snapshot,
    state,
    stop,
    sweep,
)
from tests.stage import Rehearsal

REUSED = Policy.REUSE_BY_ENVIRONMENT


def _once(rehearsal: Rehearsal) -> dict[str, int]:
    return dict(Engine().sweep(rehearsal.account.pk).outcomes)


def _epochs(lease: Lease) -> list[tuple[str, int]]:
    """Every receipt of a lease with the epoch that it proves, oldest first."""
    return list(Receipt.objects.filter(lease=lease).order_by("pk").values_list("evidence", "epoch"))


def _first_look(monkeypatch: pytest.MonkeyPatch, gate: Gate) -> list[str]:
    """The answer to the first look is on its way while the gate is shut. Returns what was answered, look by look."""
    real, seen = RehearsalProvider.inspect, []

    def inspect(self: RehearsalProvider, resource_id: str, *, within: float) -> Any:
        answer = real(self, resource_id, within=within)
        seen.append(type(answer).__name__)
        if len(seen) == 1:
            gate()
        return answer

    monkeypatch.setattr(RehearsalProvider, "inspect", inspect)
    return seen


def _before_announcing(monkeypatch: pytest.MonkeyPatch, call: str) -> Gate:
    """Stop the first attempt that is about to announce this call."""
    gate, real = Gate(), evidence_module.announce

    def announce(claim: Any, name: str, *args: Any, **options: Any) -> Any:
        if name == call and not gate.reached.is_set():
            gate()
        return real(claim, name, *args, **options)

    monkeypatch.setattr(evidence_module, "announce", announce)
    return gate


def _watch_announcements(rehearsal: Rehearsal, **instead: Callable[[str], None]) -> list[tuple[str, str]]:
    """List each changing call with what the newest attempt had announced when it came; then do `instead`."""
    sent: list[tuple[str, str]] = []

    def watch(call: str) -> Callable[[str], None]:
        def hook(subject: str) -> None:
            sent.append((call, elsewhere(lambda: Attempt.objects.latest("claimed_at").announced_call)))
            if call in instead:
                instead[call](subject)

        return hook

    for call in ("stop", "delete"):
        rehearsal.world.hooks[call] = watch(call)
    return sent


# Wrong proof


@pytest.mark.parametrize("call", ["stop", "delete"])
def test_nothing_is_sent_unannounced_when_a_receipt_turns_up_and_the_receipt_is_not_believed(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The receipt is of before somebody started the sandbox again: the stop that counts comes after that."""
    lease = released(rehearsal, REUSED)
    box = rehearsal.world.of(lease.resource_id)
    box.state = "stopped"
    on_its_way = Gate()
    _first_look(monkeypatch, on_its_way)
    older = Background(lambda: _once(rehearsal))
    on_its_way.wait()
    box.state = "running"  # started at the provider, by hand
    falls_due(owed(lease))  # the older attempt's protection ended
    sent = _watch_announcements(rehearsal, stop=fails(ErrorKind.REFUSED))
    gate = _before_announcing(monkeypatch, call)
    newer = Background(lambda: _once(rehearsal))
    gate.wait()  # it saw the sandbox running
    on_its_way.open()
    assert older.result() == {"superseded": 1}
    gate.open()
    assert newer.result() == {"proven": 1}
    assert all(announced == made for made, announced in sent)
    assert [made for made, _ in sent] == ["stop"] * (1 if call == "stop" else 2) + ["delete"]
    # The stop is refused, so it ended with the delete; either way by a receipt of the new epoch.
    assert _epochs(lease) == [("stopped", 1), ("destroyed", 2)]
    assert state(lease) == "expired"
    assert (lease.epoch, audited("lease.sighted_running", lease)) == (2, 1)
    assert rehearsal.world.boxes == {}


def test_an_older_stopped_answer_does_not_settle_what_was_seen_running_since(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = released(rehearsal, REUSED)
    box = rehearsal.world.of(lease.resource_id)
    box.state = "stopped"
    on_its_way = Gate()
    seen = _first_look(monkeypatch, on_its_way)
    older = Background(lambda: _once(rehearsal))
    on_its_way.wait()
    box.state = "running"
    falls_due(owed(lease))
    gate = _before_announcing(monkeypatch, "stop")
    newer = Background(lambda: _once(rehearsal))
    gate.wait()
    on_its_way.open()
    assert older.result() == {"superseded": 1}
    assert state(lease) == "pending_cleanup"
    gate.open()
    assert newer.result() == {"proven": 1}
    assert (state(lease), box.state, rehearsal.world.count("stop")) == ("released", "stopped", 1)
    assert seen == ["Stopped", "Running", "Running", "Stopped"]
    assert (lease.epoch, _epochs(lease)) == (2, [("stopped", 1), ("stopped", 2)])


def test_a_stop_that_arrives_late_saves_the_sandbox_from_the_fall_back(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody started it. The newer attempt's look is older than the stop, and a fresh one tells so."""
    lease = released(rehearsal, REUSED)
    late = Gate()
    rehearsal.world.hooks["stop"] = late
    older = Background(lambda: _once(rehearsal))
    late.wait()
    falls_due(owed(lease))
    rehearsal.world.hooks["stop"] = fails(ErrorKind.REFUSED)
    gate = _before_announcing(monkeypatch, "delete")
    newer = Background(lambda: _once(rehearsal))
    gate.wait()  # its own stop was refused and the sandbox still runs: it falls back
    late.open()
    assert older.result() == {"superseded": 1}
    gate.open()
    assert newer.result() == {"proven": 1}
    assert rehearsal.world.count("delete") == 0
    assert owed(lease).delete_announced_at is None
    assert (state(lease), lease.epoch) == ("released", 1)
    assert rehearsal.world.of(lease.resource_id).state == "stopped"
    assert {proof for proof, _ in _epochs(lease)} == {"stopped"}


def test_a_receipt_that_a_fresh_look_does_not_confirm_settles_nothing_yet(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = released(rehearsal, REUSED)
    box = rehearsal.world.of(lease.resource_id)
    box.state = "stopped"
    on_its_way = Gate()
    _first_look(monkeypatch, on_its_way)
    older = Background(lambda: _once(rehearsal))
    on_its_way.wait()
    box.state = "running"
    falls_due(owed(lease))
    gate = _before_announcing(monkeypatch, "stop")
    newer = Background(lambda: _once(rehearsal))
    gate.wait()
    on_its_way.open()
    older.result()
    box.state = "busy"
    gate.open()
    assert newer.result()["busy"] == 1
    assert rehearsal.world.count("stop") == rehearsal.world.count("delete") == 0
    assert audited("lease.teardown.confirmed", lease) == 0
    assert state(lease) == "pending_cleanup"


def test_a_running_answer_of_a_superseded_attempt_raises_no_epoch(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is older than the proof that the newer attempt is about to write, which must still fit."""
    lease = released(rehearsal)
    Receipt.objects.create(
        lease=lease,
        account_id=lease.account_id,
        company_uuid=lease.company_id,
        run_uuid=lease.run_id,
        resource_id=lease.resource_id,
        account_identity=lease.account_identity,
        epoch=1,
        evidence="stopped",
        attempt_id=uuid4(),
    )
    on_its_way = Gate()
    seen = _first_look(monkeypatch, on_its_way)
    older = Background(lambda: _once(rehearsal))
    on_its_way.wait()  # it saw the sandbox running, in spite of the receipt
    falls_due(owed(lease))
    assert _once(rehearsal) == {"proven": 1}
    before = snapshot()
    on_its_way.open()
    assert older.result() == {"superseded": 1}
    assert seen == ["Running", "Running", "Gone"]
    assert snapshot() == before
    # The newer attempt had the right to say so, once.
    assert (state(lease), lease.epoch, _epochs(lease)) == ("expired", 2, [("stopped", 1), ("destroyed", 2)])


def test_an_epoch_that_rises_between_the_look_and_its_settle_hands_the_row_back_and_strands_nothing(
    rehearsal: Rehearsal,
) -> None:
    lease = released(rehearsal, REUSED)
    rehearsal.world.of(lease.resource_id).state = "stopped"

    def rises(_: str) -> None:
        rehearsal.world.after.clear()
        elsewhere(lambda: Lease.objects.filter(pk=lease.pk).update(epoch=2))

    rehearsal.world.after["inspect"] = rises
    assert _once(rehearsal) == {"handed_back": 1, "proven": 1}
    assert attempts(owed(lease)) == ["handed_back", "proven"]
    assert (state(lease), _epochs(lease)) == ("released", [("stopped", 1), ("stopped", 2)])


def test_a_demand_that_becomes_stronger_before_the_settle_hands_the_row_back_and_strands_nothing(
    rehearsal: Rehearsal,
) -> None:
    lease = released(rehearsal, REUSED)

    def strengthen(_: str) -> None:
        if rehearsal.world.count("stop") == 1:  # the look that sees it stopped is on its way
            rehearsal.world.after.clear()
            elsewhere(lambda: leases.release(lease.pk, disposition="destroy"))

    rehearsal.world.after["inspect"] = strengthen
    # Not proven, not superseded: it was still the attempt's own, and because of the wake it was due at once.
    assert _once(rehearsal) == {"handed_back": 1, "proven": 1}
    row = owed(lease)
    assert (row.verb, row.attempt_id, row.closed_as, row.failures) == ("delete", None, "proven", 0)
    assert attempts(row) == ["handed_back", "proven"]
    assert evidence(lease) == ["stopped", "destroyed"]
    assert (state(lease), rehearsal.world.boxes) == ("expired", {})


def test_a_repair_during_an_attempt_is_not_lost_in_the_quiet_that_it_ends_in(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = released(rehearsal)
    good = lease.endpoint
    Lease.objects.filter(pk=lease.pk).update(endpoint={"wrold": 1})
    row, real = owed(lease), evidence_module.standing

    def repair() -> None:
        Lease.objects.filter(pk=lease.pk).update(endpoint=good)
        leases.retry(company_id=rehearsal.company.pk, run_id=rehearsal.run.pk, actor="op", reason="repaired")

    def standing(claim: Any) -> Any:
        facts = real(claim)
        monkeypatch.undo()
        elsewhere(repair)
        return facts

    monkeypatch.setattr(evidence_module, "standing", standing)
    assert _once(rehearsal) == {"quieted": 1, "proven": 1}
    row.refresh_from_db()
    assert (row.closed_as, row.requests, row.requests_served) == ("proven", 1, 1)
    assert state(lease) == "expired"


@pytest.mark.parametrize("sighting", [Running, Stopped, Busy, Unknown])
@pytest.mark.parametrize("policy", [Policy.EPHEMERAL, REUSED])
def test_an_answer_about_a_sandbox_of_another_id_decides_nothing(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch, sighting: Any, policy: str
) -> None:
    lease = released(rehearsal, policy)
    box = rehearsal.world.of(lease.resource_id)
    other = Resource(uuid4().hex, box.resource.name, box.resource.marks)
    monkeypatch.setattr(RehearsalProvider, "inspect", lambda *_, **__: sighting(other))
    assert _once(rehearsal) == {"failed": 1}
    assert (owed(lease).last_error_kind, owed(lease).failures) == ("protocol", 1)
    assert rehearsal.world.count("stop") == rehearsal.world.count("delete") == 0
    assert (evidence(lease), state(lease), box.state) == ([], "pending_cleanup", "running")
    assert ProviderAccount.objects.get().circuit_failures == 0


# Creations


def _dies_after_create(rehearsal: Rehearsal, **how: Any) -> Operation:
    def die(_: str) -> None:
        raise KeyboardInterrupt

    rehearsal.world.after["create"] = die
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(acquisition, "_abandon", lambda _: None)  # who is killed tells nobody
        with pytest.raises(KeyboardInterrupt):
            acquired(rehearsal, **how)
    del rehearsal.world.after["create"]
    return Operation.objects.get()


def test_a_name_that_is_taken_is_taken_by_ourselves(rehearsal: Rehearsal) -> None:
    """A proxy repeated the request: the first made the sandbox, and the answer to the second is what arrived."""

    def the_first_one(name: str) -> None:
        marks = elsewhere(lambda: Operation.objects.get(name=name).marks)
        resource = Resource(uuid4().hex, name, marks)
        rehearsal.world.boxes[resource.resource_id] = Box(resource)

    rehearsal.world.hooks["create"] = the_first_one
    with pytest.raises(AcquireUncertain) as caught:
        acquired(rehearsal)
    assert caught.value.code == "name_taken"
    operation = Operation.objects.get()
    assert operation.state == "pending"
    assert is_due(owed(operation))
    assert sweep(rehearsal) == {"proven": 2}
    assert rehearsal.world.boxes == {}
    assert state(Lease.objects.get()) == "failed"


def _forget_run(rehearsal: Rehearsal) -> None:
    Run.objects.filter(pk=rehearsal.run.pk).delete()


def _forget_issue(rehearsal: Rehearsal) -> None:
    Run.objects.filter(pk=rehearsal.run.pk).update(issue=None)
    Issue.objects.filter(company=rehearsal.company).delete()


def _forget_both(rehearsal: Rehearsal) -> None:
    _forget_run(rehearsal)
    _forget_issue(rehearsal)


@pytest.fixture
def of_an_issue(rehearsal: Rehearsal) -> Rehearsal:
    """A rehearsal whose run works on an issue."""
    rehearsal.run.issue = factories.issue(rehearsal.company)
    rehearsal.run.save()
    return rehearsal


@pytest.mark.parametrize("forget", [_forget_run, _forget_issue, _forget_both])
def test_a_recovery_owns_the_sandbox_though_what_it_was_for_was_deleted(
    of_an_issue: Rehearsal, forget: Callable[[Rehearsal], None]
) -> None:
    operation = _dies_after_create(of_an_issue)
    forget(of_an_issue)
    falls_due(owed(operation))
    assert sweep(of_an_issue) == {"proven": 2}
    lease = Lease.objects.get()
    assert (lease.run_id, lease.issue_id) == (
        None if forget is not _forget_issue else of_an_issue.run.pk,
        None if forget is not _forget_run else operation.issue_uuid,
    )
    assert (state(lease), evidence(lease), of_an_issue.world.boxes) == ("failed", ["destroyed"], {})
    assert owed(operation).failures == 0
    # The journal still says for whom it was.
    operation.refresh_from_db()
    assert (operation.run_uuid, operation.issue_uuid is None) == (of_an_issue.run.pk, False)


@pytest.mark.parametrize("forget", [_forget_run, _forget_both])
def test_an_acquire_whose_run_was_deleted_meanwhile_is_rejected_and_its_sandbox_destroyed(
    of_an_issue: Rehearsal, forget: Callable[[Rehearsal], None]
) -> None:
    of_an_issue.world.after["create"] = lambda _: elsewhere(lambda: forget(of_an_issue))
    with pytest.raises(AcquireRejected, match="no such run"):
        acquired(of_an_issue)
    assert sweep(of_an_issue) == {"proven": 1}
    assert (state(Lease.objects.get()), of_an_issue.world.boxes) == ("failed", {})


def test_an_acquire_whose_issue_was_deleted_meanwhile_is_attached_without_it(of_an_issue: Rehearsal) -> None:
    of_an_issue.world.after["create"] = lambda _: elsewhere(lambda: _forget_issue(of_an_issue))
    lease = acquired(of_an_issue)
    assert (state(lease), lease.issue_id, lease.run_id) == ("active", None, of_an_issue.run.pk)


def _answers_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A provider that breaks its word: each create makes a second sandbox of the same name, and answers with that."""
    real = RehearsalProvider.create

    def create(self: RehearsalProvider, name: str, marks: Any, config: Any, *, within: float) -> Created:
        real(self, name, marks, config, within=within)
        second = Resource(uuid4().hex, name, dict(marks))
        self.world.boxes[second.resource_id] = Box(second)
        return Created(second)

    monkeypatch.setattr(RehearsalProvider, "create", create)


@pytest.mark.parametrize("found", ["found", "destroyed"])
def test_a_second_id_for_one_creation_gets_an_owner_of_its_own(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch, found: str
) -> None:
    _answers_another(monkeypatch)

    def the_first_is_found(_: str) -> None:
        def recover() -> None:
            if found == "found":
                (first,) = rehearsal.world.boxes
                journal.save_resource_id(Operation.objects.get(), first)
            else:
                stop(rehearsal)
                sweep(rehearsal)

        elsewhere(recover)

    rehearsal.world.after["create"] = the_first_is_found
    with pytest.raises(AcquireUncertain) as caught:
        acquired(rehearsal)
    assert caught.value.code == "identity_conflict"
    first, second = Operation.objects.order_by("created_at")
    assert (second.state, second.lease_id) == ("pending", None)
    assert second.resource_id in rehearsal.world.boxes
    assert len({first.resource_id, second.resource_id} - {""}) == 2
    assert len({first.name, second.name, first.lease_uuid, second.lease_uuid}) == 4
    assert second.run_uuid == first.run_uuid == rehearsal.run.pk
    assert (second.account_identity, second.endpoint) == (first.account_identity, first.endpoint)
    assert audited("operation.second_sandbox", second) == 1
    assert is_due(owed(second))
    if found == "found":
        falls_due(owed(first))
    sweep(rehearsal)
    assert rehearsal.world.boxes == {}
    assert sorted(Lease.objects.values_list("resource_id", flat=True)) == sorted(
        Operation.objects.values_list("resource_id", flat=True)
    )
    assert not Obligation.objects.filter(closed_at__isnull=True).exists()
    assert not Lease.objects.exclude(state="failed").exists()


def test_a_reply_that_names_a_live_leases_sandbox_asks_a_person_and_touches_it_not(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = acquired(rehearsal)
    mine = rehearsal.world.of(live.resource_id)
    monkeypatch.setattr(RehearsalProvider, "create", lambda *_, **__: Created(mine.resource))
    with pytest.raises(AcquireRejected) as caught:
        acquired(rehearsal)
    assert caught.value.code == "identity_conflict"
    operation = Operation.objects.exclude(lease=live).get()
    assert operation.state == "pending"
    falls_due(owed(operation))
    assert sweep(rehearsal) == {"quieted": 1}
    row = owed(operation)
    assert (row.quiet, row.due_at, row.failures) == ("identity_conflict", None, 0)
    assert (state(live), mine.state, Lease.objects.count()) == ("active", "running", 1)
    assert rehearsal.world.count("stop") == rehearsal.world.count("delete") == 0
    # The end of the lease that owned it ends the conflict.
    stop(rehearsal)
    assert sweep(rehearsal)["proven"] == 3
    operation.refresh_from_db()
    assert (operation.state, rehearsal.world.boxes) == ("resolved", {})


@pytest.mark.parametrize("why", ["no_lookup", "creation_not_found"])
def test_an_id_that_comes_late_from_a_process_that_dies_wakes_its_quiet_recovery(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    finds = why != "no_lookup"
    capabilities = Capabilities(finds_by_name=finds, keeps_files=True, has_deadline=False, creation_window=60.0)
    monkeypatch.setattr(RehearsalProvider, "capabilities", capabilities)

    def give_up(_: str) -> None:
        def others() -> None:
            Operation.objects.update(created_at=factories.at(-9999))
            falls_due(owed(Operation.objects.get()))
            assert sweep(rehearsal) == {"quieted": 1}
            assert owed(Operation.objects.get()).quiet == why

        elsewhere(others)

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    rehearsal.world.hooks["create"] = give_up
    monkeypatch.setattr(creating, "_attach", die)
    with pytest.raises(KeyboardInterrupt):
        acquired(rehearsal)
    row = owed(Operation.objects.get())
    assert row.quiet == ""
    assert is_due(row)
    assert sweep(rehearsal) == {"proven": 2}
    assert (rehearsal.world.boxes, state(Lease.objects.get())) == ({}, "failed")


def test_an_id_survives_a_database_session_that_ends_between_the_create_and_its_saving(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a provider that cannot look a creation up, the answer is all there will ever be."""
    capabilities = Capabilities(finds_by_name=False, keeps_files=True, has_deadline=False, creation_window=60.0)
    monkeypatch.setattr(RehearsalProvider, "capabilities", capabilities)
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        pid = cursor.fetchone()[0]

    def terminate(_: str) -> None:
        def kill() -> None:
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_terminate_backend(%s, 10000)", [pid])
                assert cursor.fetchone()[0]

        elsewhere(kill)

    rehearsal.world.after["create"] = terminate
    lease = acquired(rehearsal)
    assert (state(lease), lease.resource_id in rehearsal.world.boxes) == ("active", True)
    assert Operation.objects.get().resource_id == lease.resource_id


class _Suspended:
    """A clock of a process that is stopped for so many seconds right after it journalled."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __call__(self) -> float:
        return 1000.0 + (self._seconds if Operation.objects.exists() else 0.0)


def _acquire_by(rehearsal: Rehearsal, clock: _Suspended) -> Lease:
    return leases.acquire(
        rehearsal.environment.pk,
        company_id=rehearsal.company.pk,
        run_id=rehearsal.run.pk,
        patience=Patience(clock=clock),
    )


def test_a_create_is_not_sent_late(rehearsal: Rehearsal) -> None:
    """Its recovery may have looked and given up meanwhile; a sandbox made after that would be nobody's."""
    with pytest.raises(AcquireFailed) as caught:
        _acquire_by(rehearsal, _Suspended(bounds.CREATE_MARGIN + 1))
    assert caught.value.code == "not_ready"
    assert (rehearsal.world.count("create"), rehearsal.world.boxes) == (0, {})
    operation = Operation.objects.get()
    assert (operation.state, owed(operation).closed_as) == ("resolved", "nothing_owed")
    assert sweep(rehearsal) == {}


def test_a_create_within_its_margin_is_sent(rehearsal: Rehearsal) -> None:
    """The control of the test above."""
    assert state(_acquire_by(rehearsal, _Suspended(bounds.CREATE_MARGIN - 1))) == "active"


def test_a_create_that_is_not_sent_ends_a_recovery_that_is_looking_for_it(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    looking, real = Gate(), acquisition._journal
    rehearsal.world.hooks["find"] = looking
    recovering: list[Background] = []

    def suspended(*args: Any) -> tuple[Operation, float]:
        journalled = real(*args)
        falls_due(owed(journalled[0]))
        recovering.append(Background(lambda: _once(rehearsal)))
        looking.wait()
        return journalled

    monkeypatch.setattr(acquisition, "_journal", suspended)
    with pytest.raises(AcquireFailed):
        _acquire_by(rehearsal, _Suspended(9999))
    looking.open()
    recovering[0].result()
    operation = Operation.objects.get()
    assert (operation.state, owed(operation).closed_as, owed(operation).attempt_id) == (
        "resolved",
        "nothing_owed",
        None,
    )
    assert Lease.objects.count() == rehearsal.world.count("create") == 0


@pytest.mark.parametrize("ad_hoc", [False, True])
def test_an_attach_whose_commit_reply_is_lost_returns_the_lease(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch, *, ad_hoc: bool
) -> None:
    lost, attach, happened = lost_commit_reply(), transitions.attach, []

    def attach_and_lose(*args: Any, **options: Any) -> Lease:
        made = attach(*args, **options)
        happened.append(lost.__enter__())  # the next commit of this thread is the attach's
        return made

    monkeypatch.setattr(transitions, "attach", attach_and_lose)
    try:
        lease = acquired(rehearsal, ad_hoc=ad_hoc)
    finally:
        lost.__exit__(None, None, None)
    assert happened == [[1]]
    assert Lease.objects.get() == lease
    assert (state(lease), audited("lease.acquired", lease)) == ("active", 1)
    assert owed(Operation.objects.get()).closed_as == "handed_over"
    assert list(rehearsal.world.boxes) == [lease.resource_id]


def test_an_attach_whose_lease_was_stopped_before_the_reply_was_known_lost_returns_no_active_lease(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    attach, lost, calls = creating._attach, lost_commit_reply(), []

    def attach_twice(*args: Any) -> Lease:
        calls.append(1)
        if len(calls) == 2:
            elsewhere(lambda: stop(rehearsal))
            return attach(*args)
        with lost:
            return attach(*args)

    monkeypatch.setattr(creating, "_attach", attach_twice)
    with pytest.raises(AcquireRejected):
        acquired(rehearsal)
    assert len(calls) == 2
    assert sweep(rehearsal) == {"proven": 1}
    assert (state(Lease.objects.get()), rehearsal.world.boxes) == ("failed", {})


@pytest.mark.parametrize("status", ["disabled", "archived"])
def test_a_credential_that_is_not_active_admits_nothing_new(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    monkeypatch.setenv("REHEARSAL_SECRET", "1")
    credential = Credential.objects.create(
        company=rehearsal.company, name="c", reference="env:REHEARSAL_SECRET", status="active"
    )
    rehearsal.account.credential = credential
    rehearsal.account.save()
    lease = acquired(rehearsal)
    Credential.objects.filter(pk=credential.pk).update(status=status)
    before, calls = snapshot(), len(rehearsal.world.calls)
    with pytest.raises(AcquireRefused) as caught:
        acquired(rehearsal)
    assert caught.value.code == "credential_inactive"
    assert (snapshot(), len(rehearsal.world.calls)) == (before, calls)
    # What is there already is owed and waits for the person who enables it; that write wakes it.
    leases.release(lease.pk)
    assert sweep(rehearsal) == {"quieted": 1}
    assert (owed(lease).quiet, len(rehearsal.world.calls)) == ("credential_inactive", calls)
    Credential.objects.filter(pk=credential.pk).update(status="active")
    assert sweep(rehearsal) == {"proven": 1}


def test_an_endpoint_that_is_edited_while_it_is_asked_attests_nothing(rehearsal: Rehearsal) -> None:
    other = Rehearsal()

    def edit(_: str) -> None:
        rehearsal.world.hooks.clear()
        accounts = ProviderAccount.objects.filter(pk=rehearsal.account.pk)
        elsewhere(lambda: accounts.update(endpoint=other.account.endpoint))

    rehearsal.world.hooks["identify"] = edit
    with pytest.raises(AcquireRefused) as caught:
        acquired(rehearsal)
    assert caught.value.code == "identity"
    assert ProviderAccount.objects.get(pk=rehearsal.account.pk).attested_identity == ""
    assert Operation.objects.count() == rehearsal.world.count("create") == other.world.count("create") == 0
    # The word of the old endpoint was not written down as the new one's, so that one works.
    lease = acquired(rehearsal)
    assert (lease.account_identity, lease.resource_id in other.world.boxes) == (other.world.identity, True)


def test_an_ordinary_life_ends_with_one_receipt_of_the_first_epoch(rehearsal: Rehearsal) -> None:
    """The control of this file."""
    lease = released(rehearsal)
    assert sweep(rehearsal) == {"proven": 1}
    assert (_epochs(lease), state(lease)) == ([("destroyed", 1)], "expired")
