"""Startups that outlive their caller: section D of the scenarios, and what a run is answerable for after one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

import leases
from cleanup.claims import Selection
from cleanup.engine import Engine
from leases import bounds, deciding, journal, startup
from leases.errors import AcquireFailed, AcquireRejected, AcquireUncertain, LeaseError
from leases.models import BridgeActivity, Lease, Obligation, Operation
from providers.contract import (
    Capabilities,
    Command,
    Created,
    ErrorKind,
    Execution,
    ProviderError,
    Resource,
    Sighting,
)
from tests import factories
from tests.concurrency import Background, Gate, elsewhere, together
from tests.rehearsal import RehearsalProvider
from tests.scenarios.steps import acquired, evidence, fails, falls_due, owed, state, stop, sweep, sweep_lane
from tests.scenarios.test_reuse import Time
from tests.stage import Rehearsal

pytestmark = pytest.mark.django_db(transaction=True)

Kind = Obligation.Kind
SETUP = [["make", "ready"]]


@pytest.fixture
def rehearsal() -> Rehearsal:
    return Rehearsal()


def acquire(rehearsal: Rehearsal, **how: Any) -> Lease:
    how.setdefault("patience", Time().patience())
    return leases.acquire(rehearsal.environment.pk, company_id=rehearsal.company.pk, run_id=rehearsal.run.pk, **how)


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises(LeaseError) as caught:
        call()
    return f"{caught.value.code}: {caught.value}"


def startup_of(rehearsal: Rehearsal) -> Obligation:
    return Obligation.objects.filter(kind=Kind.STARTUP, run=rehearsal.run).latest("pk")


def is_unsettled(rehearsal: Rehearsal) -> bool:
    return startup.is_unsettled(rehearsal.run.pk)


def look_at_startup() -> dict[str, int]:
    return sweep_lane(Kind.STARTUP).outcomes


def lost(rehearsal: Rehearsal) -> Operation:
    """A creation whose sandbox exists and whose reply was lost."""
    rehearsal.world.after["create"] = fails(ErrorKind.CONNECTION)
    with pytest.raises(AcquireUncertain):
        acquire(rehearsal)
    del rehearsal.world.after["create"]
    return Operation.objects.latest("created_at")


# The obligation on the run


def test_a_run_whose_startup_was_lost_is_unsettled_until_the_exact_sandbox_is_proven_gone(rehearsal: Rehearsal) -> None:
    lost(rehearsal)
    row = startup_of(rehearsal)
    assert (row.quiet, row.due_at, is_unsettled(rehearsal)) == ("waiting", None, True)
    assert row.quiet not in Obligation.FOR_PEOPLE
    sweep(rehearsal)
    row.refresh_from_db()
    assert (row.closed_as, is_unsettled(rehearsal), rehearsal.world.boxes) == ("proven", False, {})


def test_an_ordinary_acquire_owes_the_run_nothing(rehearsal: Rehearsal) -> None:
    """S-101."""
    lease = acquire(rehearsal)
    assert not Obligation.objects.filter(closed_at__isnull=True).exists()
    assert not is_unsettled(rehearsal)
    leases.release(lease.pk)
    assert not is_unsettled(rehearsal)


def test_a_startup_in_progress_is_unsettled_by_its_journal_row_alone(rehearsal: Rehearsal) -> None:
    seen = []
    rehearsal.world.hooks["create"] = lambda _: seen.append(elsewhere(lambda: is_unsettled(rehearsal)))
    acquire(rehearsal)
    assert seen == [True]
    assert not is_unsettled(rehearsal)


def test_a_refused_creation_leaves_the_run_settled(rehearsal: Rehearsal) -> None:
    rehearsal.world.hooks["create"] = fails(ErrorKind.INVALID, nothing_allocated=True)
    with pytest.raises(AcquireFailed):
        acquire(rehearsal)
    assert not is_unsettled(rehearsal)


def test_an_error_that_the_recorded_contract_does_not_know_as_proof_counts_as_a_lost_reply(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An adapter that claims it all the same is not believed: what was recorded before the call decides."""
    contract = Capabilities(
        finds_by_name=True,
        keeps_files=True,
        has_deadline=False,
        creation_window=60.0,
        proves_no_allocation=frozenset({ErrorKind.INVALID}),
    )
    monkeypatch.setattr(RehearsalProvider, "capabilities", contract)
    rehearsal.world.after["create"] = fails(ErrorKind.REFUSED, nothing_allocated=True)
    with pytest.raises(AcquireUncertain):
        acquire(rehearsal)
    sweep(rehearsal)
    assert (rehearsal.world.boxes, state(Lease.objects.get())) == ({}, "failed")


def test_a_write_of_the_intent_that_fails_keeps_the_responsibility(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-093: the journal row is already there, and answers for the run."""

    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError("the database does not take it")

    rehearsal.world.after["create"] = fails(ErrorKind.CONNECTION)
    with monkeypatch.context() as patch:
        patch.setattr(journal.startup, "owe", refuse)
        with pytest.raises(ValueError, match="does not take it"):
            acquire(rehearsal)
    assert not Obligation.objects.filter(kind=Kind.STARTUP).exists()
    assert is_unsettled(rehearsal)
    operation = Operation.objects.get()
    falls_due(owed(operation))
    assert sweep(rehearsal) == {"proven": 2}
    assert (startup_of(rehearsal).closed_as, is_unsettled(rehearsal)) == ("proven", False)


def _void(rehearsal: Rehearsal, _: Lease) -> None:
    rehearsal.world.hooks["inspect"] = fails(ErrorKind.PROTOCOL)


def _running(rehearsal: Rehearsal, lease: Lease) -> None:
    def bring_back(_: str) -> None:
        rehearsal.world.boxes.setdefault(lease.resource_id, box)

    box = rehearsal.world.of(lease.resource_id)
    rehearsal.world.hooks["inspect"] = bring_back


def _of_another(rehearsal: Rehearsal, lease: Lease) -> None:
    box = rehearsal.world.of(lease.resource_id)
    box.resource = Resource("another", box.resource.name, box.resource.marks)


@pytest.mark.parametrize("answer", [_void, _running, _of_another])
def test_an_answer_that_is_not_about_the_end_of_the_exact_sandbox_keeps_it_owed(
    rehearsal: Rehearsal, answer: Callable[[Rehearsal, Lease], None]
) -> None:
    """S-094, S-095, S-096; and S-097: once it is proven, it is enough, whatever the release answered."""
    operation = lost(rehearsal)
    Engine().sweep(rehearsal.account.pk, selection=Selection(kinds=(Kind.RECOVER_CREATION,)))
    lease = Lease.objects.get()
    answer(rehearsal, lease)
    sweep(rehearsal)
    assert (state(lease), evidence(lease)) == ("pending_cleanup", [])
    assert is_unsettled(rehearsal)
    assert startup_of(rehearsal).closed_at is None
    rehearsal.world.hooks.clear()
    rehearsal.world.boxes.clear()
    falls_due(owed(lease))
    sweep(rehearsal)
    assert (evidence(lease), startup_of(rehearsal).closed_as) in [
        (["destroyed"], "proven"),
        (["absent"], "proven"),
    ]
    operation.refresh_from_db()
    assert (operation.state, is_unsettled(rehearsal)) == ("resolved", False)


def test_the_receipt_of_another_lease_of_the_run_does_not_end_it(rehearsal: Rehearsal) -> None:
    """S-096: another sandbox's end is not this one's."""
    other = acquire(rehearsal)
    lost(rehearsal)
    leases.release(other.pk)
    Engine().sweep(rehearsal.account.pk, selection=Selection(lease_id=other.pk))
    assert evidence(other) == ["destroyed"]
    assert look_at_startup() == {"waiting": 1}
    assert is_unsettled(rehearsal)


def test_what_an_operator_gave_up_keeps_the_run_unsettled(rehearsal: Rehearsal) -> None:
    operation = lost(rehearsal)
    rehearsal.world.boxes.clear()
    deciding.settle_unverified(
        owed(operation).pk,
        confirmation=operation.name,
        company_id=rehearsal.company.pk,
        actor="operator",
        reason="nobody can tell any more",
    )
    assert look_at_startup() == {"waiting": 1}
    assert is_unsettled(rehearsal)


def test_late_evidence_takes_what_an_operator_gave_up_back_into_ordinary_teardown(rehearsal: Rehearsal) -> None:
    """Issue B.3: the queue is not closed to evidence."""
    created = Gate()
    rehearsal.world.after["create"] = created
    acquiring = Background(lambda: refused(lambda: acquire(rehearsal)))
    created.wait()
    operation = Operation.objects.get()
    deciding.settle_unverified(
        owed(operation).pk,
        confirmation=operation.name,
        company_id=rehearsal.company.pk,
        actor="operator",
        reason="it hangs",
    )
    created.open()
    assert "is being destroyed" in acquiring.result()
    assert sweep(rehearsal) == {"proven": 1}
    assert (state(Lease.objects.get()), rehearsal.world.boxes) == ("failed", {})


def test_two_ends_at_once_do_not_hide_each_other(rehearsal: Rehearsal) -> None:
    """The trigger wakes unconditionally, and the settle evaluates: whoever commits last is seen."""
    for _ in range(2):
        lost(rehearsal)
    Engine().sweep(rehearsal.account.pk, selection=Selection(kinds=(Kind.RECOVER_CREATION,)))
    rows = [owed(lease) for lease in Lease.objects.all()]
    together(
        *[
            lambda row=row: Engine().sweep(rehearsal.account.pk, selection=Selection(obligation_id=row.pk))  # type: ignore[misc]
            for row in rows
        ]
    )
    sweep(rehearsal)
    assert (startup_of(rehearsal).closed_as, Obligation.objects.filter(kind=Kind.STARTUP).count()) == ("proven", 1)


def test_an_end_during_the_evaluation_makes_it_evaluate_again(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost(rehearsal)
    Engine().sweep(rehearsal.account.pk, selection=Selection(kinds=(Kind.RECOVER_CREATION,)))
    lease, evaluated, real = Lease.objects.get(), Gate(), startup.is_over

    def is_over(run_id: Any) -> bool:
        over = real(run_id)
        if not evaluated.reached.is_set():
            evaluated()
        return over

    monkeypatch.setattr(startup, "is_over", is_over)
    looking = Background(look_at_startup)
    evaluated.wait()
    ending = Background(lambda: Engine().sweep(rehearsal.account.pk, selection=Selection(lease_id=lease.pk)).outcomes)
    evaluated.open()
    looking.result()
    assert ending.result() == {"proven": 1}
    sweep(rehearsal)
    assert startup_of(rehearsal).closed_as == "proven"


# Late replies, in either order


def test_a_reply_after_the_cancellation_saves_its_id_and_is_retired(rehearsal: Rehearsal) -> None:
    """S-092, S-062."""
    created = Gate()
    rehearsal.world.after["create"] = created
    acquiring = Background(lambda: refused(lambda: acquire(rehearsal)))
    created.wait()
    rehearsal.world.hooks["find"] = fails(ErrorKind.CONNECTION)
    assert stop(rehearsal) == 1
    sweep(rehearsal)
    created.open()
    assert "the start was stopped" in acquiring.result()
    operation = Operation.objects.get()
    assert operation.resource_id in rehearsal.world.boxes
    del rehearsal.world.hooks["find"]
    assert sweep(rehearsal) == {"proven": 1}
    assert (state(Lease.objects.get()), is_unsettled(rehearsal)) == ("failed", False)


def test_a_recovery_long_after_its_deadline_works_as_ever(rehearsal: Rehearsal) -> None:
    """S-091."""
    operation = lost(rehearsal)
    Obligation.objects.filter(operation=operation).update(due_at=factories.at(-400_000))
    Operation.objects.filter(pk=operation.pk).update(created_at=factories.at(-500_000))
    assert sweep(rehearsal) == {"proven": 2}


def test_a_look_without_an_identity_keeps_the_ownership_and_looks_again(rehearsal: Rehearsal) -> None:
    """S-084, S-085."""
    operation = lost(rehearsal)
    boxes = dict(rehearsal.world.boxes)
    rehearsal.world.boxes.clear()
    assert sweep(rehearsal) == {"not_seen": 1}
    row = owed(operation)
    assert (row.closed_at, Obligation.objects.filter(pk=row.pk, due_at__gt=factories.database_now()).exists()) == (
        None,
        True,
    )
    rehearsal.world.boxes.update(boxes)
    falls_due(row)
    assert sweep(rehearsal) == {"proven": 2}


def test_an_identity_that_was_found_frees_nothing_before_the_proof(rehearsal: Rehearsal) -> None:
    """S-089."""
    lost(rehearsal)
    rehearsal.world.hooks["delete"] = fails(ErrorKind.SERVER)
    sweep(rehearsal)
    lease = Lease.objects.get()
    assert (state(lease), evidence(lease), is_unsettled(rehearsal)) == ("pending_cleanup", [], True)


# Waiting until it runs


class Starting:
    """Makes the rehearsal answer a create at once, with a sandbox that runs after so many looks (None: never)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, looks: int | None) -> None:
        self.looks = looks
        create, inspect = RehearsalProvider.create, RehearsalProvider.inspect

        def created(provider: RehearsalProvider, *args: Any, **how: Any) -> Created:
            made = create(provider, *args, **how)
            provider.world.of(made.resource.resource_id).state = "busy"
            return Created(made.resource, ready=False)

        def inspected(provider: RehearsalProvider, resource_id: str, **how: Any) -> Sighting:
            box = provider.world.boxes.get(resource_id)
            if box is not None and box.state == "busy" and self.looks is not None:
                self.looks -= 1
                if self.looks < 0:
                    box.state = "running"
            return inspect(provider, resource_id, **how)

        monkeypatch.setattr(RehearsalProvider, "create", created)
        monkeypatch.setattr(RehearsalProvider, "inspect", inspected)


def test_the_id_is_saved_before_it_runs_and_the_lease_is_made_when_it_does(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    Starting(monkeypatch, looks=3)
    seen = []
    rehearsal.world.hooks["inspect"] = lambda resource_id: seen.append(
        elsewhere(lambda: (Operation.objects.get().resource_id == resource_id, Lease.objects.count()))
    )
    lease = acquire(rehearsal)
    assert (state(lease), seen) == ("active", [(True, 0)] * 4)


def test_the_recovery_is_kept_off_a_startup_that_lives(rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    Starting(monkeypatch, looks=2)

    def late(_: str) -> None:
        def fall_due() -> None:
            row = owed(Operation.objects.get())
            assert Obligation.objects.filter(pk=row.pk, due_at__gt=factories.at(bounds.INSPECT)).exists()

        elsewhere(fall_due)

    rehearsal.world.hooks["inspect"] = late
    assert state(acquire(rehearsal)) == "active"


@pytest.mark.parametrize(
    ("becomes", "code"), [("unknown", "start_failed"), ("stopped", "start_failed"), ("gone", "start_failed")]
)
def test_one_that_comes_to_be_in_no_use_is_owned_and_destroyed(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch, becomes: str, code: str
) -> None:
    """K-16: whatever fails after the create is covered."""
    Starting(monkeypatch, looks=None)

    def become(resource_id: str) -> None:
        if becomes == "gone":
            rehearsal.world.boxes.pop(resource_id, None)
        else:
            rehearsal.world.of(resource_id).state = becomes

    rehearsal.world.hooks["inspect"] = become
    with pytest.raises(AcquireRejected) as caught:
        acquire(rehearsal)
    assert caught.value.code == code
    assert is_unsettled(rehearsal)
    rehearsal.world.hooks.clear()
    assert sweep(rehearsal) == {"proven": 1}
    assert (rehearsal.world.boxes, is_unsettled(rehearsal)) == ({}, False)


def test_one_that_does_not_start_in_time_is_owned_and_destroyed(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    Starting(monkeypatch, looks=None)
    time = Time()
    with pytest.raises(AcquireRejected) as caught:
        acquire(rehearsal, patience=time.patience())
    assert (caught.value.code, round(time.now - 1000)) == ("timeout", round(bounds.READY))
    assert state(Lease.objects.get()) == "pending_cleanup"


def test_a_stop_reaches_one_that_is_still_starting(rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    Starting(monkeypatch, looks=None)
    looking = Gate()
    rehearsal.world.hooks["inspect"] = lambda _: None if looking.reached.is_set() else looking()
    acquiring = Background(lambda: refused(lambda: acquire(rehearsal)))
    looking.wait()
    assert stop(rehearsal) == 1
    Engine().sweep(rehearsal.account.pk, selection=Selection(kinds=(Kind.RECOVER_CREATION,)))
    assert state(Lease.objects.get()) == "pending_cleanup"
    looking.open()
    assert "took it over first" in acquiring.result()


def test_a_stop_reaches_the_startup_of_an_ad_hoc_lease(rehearsal: Rehearsal) -> None:
    """It has no run; it is named by the lease that it would have become."""
    created = Gate()
    rehearsal.world.after["create"] = created
    acquiring = Background(lambda: refused(lambda: acquired(rehearsal, ad_hoc=True)))
    created.wait()
    lease_id = Operation.objects.get().lease_uuid
    assert leases.stop(company_id=rehearsal.company.pk, lease_id=lease_id) == 1
    created.open()
    assert "the start was stopped" in acquiring.result()
    sweep(rehearsal)
    assert (state(Lease.objects.get(pk=lease_id)), rehearsal.world.boxes) == ("failed", {})


# Set-up


def test_set_up_runs_before_anybody_gets_the_sandbox_and_leaves_its_rows(rehearsal: Rehearsal) -> None:
    """S-098: activities are rows, of the operation while there is no lease."""
    seen = []
    rehearsal.world.after["execute"] = lambda _: seen.append(elsewhere(Lease.objects.count))
    lease = acquire(rehearsal, setup=[["one"], ["two", "2"]])
    assert (state(lease), seen) == ("active", [0, 0])
    operation = Operation.objects.get()
    assert [(row.outcome, row.exit_code, row.lease_id) for row in operation.activities.order_by("started_at")] == [
        ("completed", 0, None),
        ("completed", 0, None),
    ]


def test_set_up_that_fails_gives_nobody_the_sandbox(rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    """K-16."""

    def execute(_: Any, __: str, command: Command, *, within: float) -> Execution:
        assert within > command.timeout
        return Execution(3)

    monkeypatch.setattr(RehearsalProvider, "execute", execute)
    with pytest.raises(AcquireRejected, match="ended with 3") as caught:
        acquire(rehearsal, setup=SETUP)
    assert caught.value.code == "setup_failed"
    assert BridgeActivity.objects.get().exit_code == 3
    assert sweep(rehearsal) == {"proven": 1}
    assert (rehearsal.world.boxes, is_unsettled(rehearsal)) == ({}, False)


@pytest.mark.parametrize("kind", [ErrorKind.TIMEOUT, ErrorKind.REFUSED, ErrorKind.CONNECTION])
def test_set_up_that_the_provider_cannot_run_gives_nobody_the_sandbox(rehearsal: Rehearsal, kind: ErrorKind) -> None:
    rehearsal.world.hooks["execute"] = fails(kind)
    with pytest.raises(AcquireRejected) as caught:
        acquire(rehearsal, setup=SETUP)
    assert caught.value.code == kind.value
    activity = BridgeActivity.objects.get()
    assert (activity.outcome, activity.error_kind) == ("failed", kind.value)
    sweep(rehearsal)
    assert rehearsal.world.boxes == {}


def test_a_stop_waits_for_no_set_up(rehearsal: Rehearsal) -> None:
    """What exists is stopped at once; the set-up's end comes later, and is kept; only then is the startup over."""
    working = Gate()
    rehearsal.world.after["execute"] = working
    acquiring = Background(lambda: refused(lambda: acquire(rehearsal, setup=SETUP)))
    working.wait()
    assert stop(rehearsal) == 1
    assert sweep(rehearsal) == {"proven": 2}
    lease = Lease.objects.get()
    assert (state(lease), evidence(lease), rehearsal.world.boxes) == ("failed", ["destroyed"], {})
    assert is_unsettled(rehearsal)  # the set-up was accepted, and has no outcome yet
    working.open()
    assert "took it over first" in acquiring.result()
    sweep(rehearsal)
    assert (BridgeActivity.objects.get().outcome, is_unsettled(rehearsal)) == ("completed", False)


def test_set_up_whose_worker_died_is_lost_at_its_deadline_and_not_before(rehearsal: Rehearsal) -> None:
    """S-098: nobody will tell its end; its sandbox is gone, and its own bound is over."""
    operation = lost(rehearsal)
    BridgeActivity.objects.create(company=rehearsal.company, operation=operation, deadline=factories.at(100))
    assert sweep(rehearsal) == {"proven": 2}
    row = startup_of(rehearsal)
    assert (row.closed_at, row.quiet) == (None, "")
    assert Obligation.objects.filter(pk=row.pk, due_at__range=(factories.at(60), factories.at(110))).exists()
    BridgeActivity.objects.update(deadline=factories.at(-1))
    falls_due(row)
    assert look_at_startup() == {"proven": 1}
    assert BridgeActivity.objects.get().outcome == "lost"


# What a living caller may do that a recovery never does


@pytest.fixture
def idempotent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A provider that answers a repeated create with the same sandbox; returns the names it was asked with."""
    names: list[str] = []
    create = RehearsalProvider.create

    def again(
        provider: RehearsalProvider, name: str, marks: Mapping[str, str], config: Any, *, within: float
    ) -> Created:
        names.append(name)
        for box in provider.world.boxes.values():
            if box.resource.name == name:
                return Created(box.resource)
        return create(provider, name, marks, config, within=within)

    monkeypatch.setattr(RehearsalProvider, "create", again)
    capabilities = Capabilities(
        finds_by_name=True, keeps_files=True, has_deadline=False, creation_window=60.0, idempotent_create=True
    )
    monkeypatch.setattr(RehearsalProvider, "capabilities", capabilities)
    return names


def test_an_idempotent_create_whose_answer_was_lost_is_repeated_once_by_the_caller(
    rehearsal: Rehearsal, idempotent: list[str]
) -> None:
    rehearsal.world.after["create"] = fails(ErrorKind.CONNECTION)
    lease = acquire(rehearsal)
    assert (len(idempotent), len(set(idempotent))) == (2, 1)
    assert list(rehearsal.world.boxes) == [lease.resource_id]


def test_a_refusal_of_the_repeat_proves_nothing_about_the_first_create(
    rehearsal: Rehearsal, idempotent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    create = RehearsalProvider.create

    def refusing(provider: RehearsalProvider, *args: Any, **how: Any) -> Created:
        if idempotent:
            raise ProviderError(ErrorKind.INVALID, "no", nothing_allocated=True)
        return create(provider, *args, **how)

    contract = RehearsalProvider.capabilities
    proves = replace(contract, proves_no_allocation=frozenset({ErrorKind.INVALID}))
    monkeypatch.setattr(RehearsalProvider, "capabilities", proves)
    monkeypatch.setattr(RehearsalProvider, "create", refusing)
    rehearsal.world.after["create"] = fails(ErrorKind.CONNECTION)
    with pytest.raises(AcquireUncertain):
        acquire(rehearsal)
    assert sweep(rehearsal) == {"proven": 2}
    assert rehearsal.world.boxes == {}


def test_a_recovery_never_repeats_a_create(rehearsal: Rehearsal, idempotent: list[str]) -> None:
    rehearsal.world.after["create"] = fails(ErrorKind.PROTOCOL)  # nothing that is repeated
    with pytest.raises(AcquireUncertain):
        acquire(rehearsal)
    rehearsal.world.boxes.clear()
    for _ in range(3):
        sweep(rehearsal)
        falls_due(owed(Operation.objects.get()))
    assert len(idempotent) == 1


@pytest.mark.parametrize("leave", [KeyboardInterrupt, SystemExit, RuntimeError])
def test_a_caller_that_leaves_in_the_middle_has_it_looked_for_at_once(
    rehearsal: Rehearsal, leave: type[BaseException]
) -> None:
    """K-21: Ctrl-C between request and reply."""

    def interrupt(_: str) -> None:
        raise leave

    rehearsal.world.after["create"] = interrupt
    with pytest.raises(leave):
        acquire(rehearsal)
    assert is_unsettled(rehearsal)
    assert sweep(rehearsal) == {"proven": 2}
    assert (rehearsal.world.boxes, is_unsettled(rehearsal)) == ({}, False)


def test_a_run_with_nothing_is_settled(rehearsal: Rehearsal) -> None:
    assert not startup.is_unsettled(factories.run(rehearsal.company).pk)
