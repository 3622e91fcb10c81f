"""What an operator decides: adopted only what is verified, ended only what was typed, owned once, and never a proof."""

from __future__ import annotations

from typing import Any
from uuid import UUID, uuid4

import pytest
from django.db import transaction

from cleanup import evidence as evidence_of
from cleanup.claims import claim, new_ids
from cleanup.engine import Engine
from leases import deciding, journal, proof, retrying
from leases.clock import boottime
from leases.errors import AcquireRejected, AcquireUncertain, DecisionRefused, LeaseError, NotFound
from leases.models import ActivityEntry, Installation, Lease, Obligation, Operation, Receipt
from leases.models.environments import Policy
from leases.startup import is_unsettled
from providers.contract import MARK_INSTALLATION, MARK_PREFIX, ErrorKind, Resource, Unknown
from tests import factories
from tests.concurrency import Background, Gate, together
from tests.rehearsal import Box, RehearsalProvider
from tests.scenarios.steps import acquired, attempts, audited, evidence, fails, owed, released, snapshot, state, sweep
from tests.stage import Rehearsal

MARK_OPERATION = f"{MARK_PREFIX}operation"
WHO = {"actor": "olga", "reason": "found it by hand"}


def _lost(rehearsal: Rehearsal) -> tuple[Operation, str]:
    """A creation whose reply was lost, and the id of the sandbox that exists all the same."""
    known = set(rehearsal.world.boxes)
    rehearsal.world.after["create"] = fails(ErrorKind.TIMEOUT)
    with pytest.raises(AcquireUncertain):
        acquired(rehearsal)
    del rehearsal.world.after["create"]
    rehearsal.world.calls.clear()
    (resource_id,) = set(rehearsal.world.boxes) - known
    return Operation.objects.latest("created_at"), resource_id


def _quieted(operation: Operation, why: str = "no_lookup") -> Obligation:
    Obligation.objects.filter(operation=operation).update(due_at=None, quiet=why)
    return owed(operation)


def _adopt(operation: Operation, resource_id: str, **values: Any) -> Lease:
    return deciding.adopt(operation.pk, resource_id, **{"company_id": operation.company_id, **WHO, **values})


# Adopting


@pytest.mark.parametrize("why", [*Obligation.FOR_PEOPLE, ""])
def test_a_sandbox_found_by_hand_gets_one_owner_and_is_torn_down(rehearsal: Rehearsal, why: str) -> None:
    operation, resource_id = _lost(rehearsal)
    if why:
        _quieted(operation, why)
    lease = _adopt(operation, resource_id)
    assert (lease.state, lease.reason, lease.resource_id) == ("pending_cleanup", "adopted", resource_id)
    operation.refresh_from_db()
    assert (operation.state, operation.lease_id, operation.resource_id) == ("attached", lease.pk, resource_id)
    assert owed(operation).closed_as == "handed_over"
    entry = ActivityEntry.objects.get(action="operation.adopted")
    assert (entry.actor, entry.reason, entry.subject_id) == ("olga", WHO["reason"], str(operation.pk))
    assert [name for name, _ in rehearsal.world.calls] == ["identify", "inspect"]
    assert sweep(rehearsal) == {"proven": 1}
    assert (state(lease), evidence(lease), rehearsal.world.boxes) == ("failed", ["destroyed"], {})


def test_a_creation_that_was_ended_unverified_is_owned_when_its_sandbox_turns_up(rehearsal: Rehearsal) -> None:
    operation, resource_id = _lost(rehearsal)
    row = _quieted(operation)
    deciding.settle_unverified(row.pk, confirmation=operation.name, company_id=operation.company_id, **WHO)
    assert [debt.pk for debt in proof.unproven()] == [row.pk]
    lease = _adopt(operation, resource_id)
    assert lease.state == "pending_cleanup"
    assert not proof.unproven().exists()
    assert sweep(rehearsal) == {"proven": 1}


def test_an_operator_may_adopt_what_a_closed_company_left_behind(rehearsal: Rehearsal) -> None:
    """The machine makes no lease for a closed company; a person, with a reason, decides what becomes of its sandbox."""
    operation, resource_id = _lost(rehearsal)
    rehearsal.company.closed_at = factories.at(0)
    rehearsal.company.save()
    assert sweep(rehearsal) == {"quieted": 1}
    assert owed(operation).quiet == "company_closed"
    lease = _adopt(operation, resource_id)
    assert sweep(rehearsal)["proven"] >= 1
    assert (evidence(lease), rehearsal.world.boxes) == (["destroyed"], {})


def _refused(operation: Operation, resource_id: str, code: str, told: str = "") -> None:
    before = snapshot()
    with pytest.raises(DecisionRefused, match=told or None) as refused:
        _adopt(operation, resource_id)
    assert refused.value.code == code
    assert snapshot() == before


def test_what_is_gone_is_refused(rehearsal: Rehearsal) -> None:
    operation, resource_id = _lost(rehearsal)
    rehearsal.world.boxes.clear()
    _refused(operation, resource_id, "gone", "no such sandbox")


def test_another_account_is_refused_before_the_sandbox_is_looked_at(rehearsal: Rehearsal) -> None:
    operation, resource_id = _lost(rehearsal)
    rehearsal.world.identity = "another engine"
    _refused(operation, resource_id, "identity", "another account answers")
    assert rehearsal.world.count("inspect") == 0


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({MARK_INSTALLATION: str(uuid4())}, "another installation's mark"),
        ({MARK_INSTALLATION: None}, "another installation's mark"),
        ({MARK_OPERATION: str(uuid4())}, "mark of another operation"),
        ({MARK_OPERATION: None}, "mark of another operation"),
        ({MARK_INSTALLATION: None, MARK_OPERATION: None}, "no marks of ours"),
    ],
)
def test_foreign_or_missing_marks_are_refused(rehearsal: Rehearsal, changed: dict[str, Any], told: str) -> None:
    operation, resource_id = _lost(rehearsal)
    box = rehearsal.world.of(resource_id)
    marks = {key: value for key, value in (dict(box.resource.marks) | changed).items() if value is not None}
    box.resource = Resource(resource_id, box.resource.name, marks)
    _refused(operation, resource_id, "foreign_marks", told)


class _Undescribed(RehearsalProvider):
    """A provider whose look at this state shows neither name nor marks; its list by marks does know them."""

    def inspect(self, resource_id: str, *, within: float) -> Any:
        self._call("inspect", resource_id)
        return Unknown(Resource(resource_id, ""), "error")


@pytest.mark.parametrize("list_by_marks", ["names it", "does not"])
def test_where_the_look_shows_no_marks_the_list_by_marks_decides(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch, list_by_marks: str
) -> None:
    operation, resource_id = _lost(rehearsal)
    monkeypatch.setattr("providers.registry.load", lambda _: _Undescribed)
    if list_by_marks == "names it":
        assert _adopt(operation, resource_id).resource_id == resource_id
        return
    box = rehearsal.world.of(resource_id)
    box.resource = Resource(resource_id, box.resource.name, {MARK_INSTALLATION: str(Installation.current().mark)})
    _refused(operation, resource_id, "foreign_marks", "no marks of ours")


@pytest.mark.parametrize("call", ["identify", "inspect"])
@pytest.mark.parametrize("kind", [ErrorKind.TIMEOUT, ErrorKind.AUTHORISATION, ErrorKind.NOT_FOUND])
def test_a_provider_that_does_not_answer_verifies_nothing(rehearsal: Rehearsal, call: str, kind: ErrorKind) -> None:
    operation, resource_id = _lost(rehearsal)
    rehearsal.world.hooks[call] = fails(kind)
    _refused(operation, resource_id, kind.value, "could not be asked")


def test_a_process_that_lacks_the_secret_says_so_and_asks_nobody(rehearsal: Rehearsal) -> None:
    operation, resource_id = _lost(rehearsal)
    Operation.objects.update(credential_reference="env:A_SECRET_NOT_SET_HERE")
    _refused(operation, resource_id, "credential_unavailable", "from this process")
    assert rehearsal.world.calls == []


def test_an_endpoint_that_no_longer_fits_is_refused(rehearsal: Rehearsal) -> None:
    operation, resource_id = _lost(rehearsal)
    Operation.objects.update(endpoint={})
    _refused(operation, resource_id, "invalid_snapshot")


def test_an_answer_about_another_sandbox_is_refused(rehearsal: Rehearsal) -> None:
    operation, resource_id = _lost(rehearsal)
    box = rehearsal.world.boxes.pop(resource_id)
    rehearsal.world.boxes["alias"] = Box(box.resource)
    _refused(operation, "alias", "protocol", "another sandbox")


@pytest.mark.parametrize("nonsense", ["", "x" * 201, "a\nb"])
def test_an_id_that_cannot_be_one_is_refused_before_anybody_is_asked(rehearsal: Rehearsal, nonsense: str) -> None:
    operation, _ = _lost(rehearsal)
    _refused(operation, nonsense, "invalid")
    assert rehearsal.world.calls == []


def test_a_sandbox_that_a_live_lease_owns_is_refused(rehearsal: Rehearsal) -> None:
    lease = acquired(rehearsal)
    operation, _ = _lost(rehearsal)
    _refused(operation, lease.resource_id, "already_owned", "a live lease of another creation owns")
    assert rehearsal.world.calls == []


def test_another_id_than_the_one_that_is_known_is_refused(rehearsal: Rehearsal) -> None:
    operation, resource_id = _lost(rehearsal)
    Operation.objects.update(resource_id="known")
    _refused(operation, resource_id, "identity", "known to be another one, known")


def test_the_id_that_is_known_already_is_fine(rehearsal: Rehearsal) -> None:
    operation, resource_id = _lost(rehearsal)
    Operation.objects.update(resource_id=resource_id)
    _quieted(operation, "identity_conflict")
    assert _adopt(operation, resource_id).state == "pending_cleanup"


def test_what_is_attached_or_resolved_needs_no_owner(rehearsal: Rehearsal) -> None:
    lease = acquired(rehearsal)
    attached = Operation.objects.get()
    _refused(attached, lease.resource_id, "already_owned", f"lease {lease.pk} owns")
    resolved = factories.operation(rehearsal.environment, state="resolved", resolved_at=factories.at(0))
    _refused(resolved, "box", "resolved")
    begun = factories.start(state="resolved", resolved_at=factories.at(0))
    _refused(begun, begun.resource_id, "invalid", "nothing to adopt")


def test_a_second_click_finds_it_owned(rehearsal: Rehearsal) -> None:
    operation, resource_id = _lost(rehearsal)
    _adopt(operation, resource_id)
    _refused(operation, resource_id, "already_owned")
    assert Lease.objects.count() == 1
    assert audited("operation.adopted", operation) == 1


def test_two_that_adopt_at_once_make_one_owner(rehearsal: Rehearsal) -> None:
    operation, resource_id = _lost(rehearsal)

    def attempt() -> str:
        try:
            _adopt(operation, resource_id)
        except DecisionRefused as refused:
            return refused.code
        return "adopted"

    assert sorted(together(*[attempt] * 4)) == ["adopted", *["already_owned"] * 3]
    assert Lease.objects.count() == 1
    assert Obligation.objects.filter(kind="teardown").count() == 1
    assert audited("operation.adopted", operation) == 1


def test_an_adoption_and_a_recovery_at_once_make_one_owner(rehearsal: Rehearsal) -> None:
    """The recovery is through between the operator's look and the operator's lock."""
    operation, resource_id = _lost(rehearsal)
    gate = Gate()
    rehearsal.world.after["inspect"] = gate
    adopting = Background(lambda: _adopt(operation, resource_id))
    gate.wait()
    del rehearsal.world.after["inspect"]
    assert Engine().sweep(rehearsal.account.pk).outcomes.get("proven", 0) >= 1
    gate.open()
    with pytest.raises(DecisionRefused) as refused:
        adopting.result()
    assert refused.value.code in ("already_owned", "resolved")
    assert Lease.objects.count() == 1
    assert audited("operation.adopted", operation) == 0


def test_the_reply_of_the_acquire_itself_that_comes_after_an_adoption_attaches_nothing(rehearsal: Rehearsal) -> None:
    gate = Gate()
    rehearsal.world.after["create"] = gate
    acquiring = Background(lambda: acquired(rehearsal))
    gate.wait()
    (resource_id,) = rehearsal.world.boxes
    lease = _adopt(Operation.objects.get(), resource_id)
    gate.open()
    with pytest.raises(AcquireRejected):
        acquiring.result()
    assert Lease.objects.get() == lease
    assert sweep(rehearsal) == {"proven": 1}


def test_a_lease_that_takes_the_sandbox_meanwhile_stays_its_only_owner(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    operation, resource_id = _lost(rehearsal)
    monkeypatch.setattr(deciding, "is_owned", lambda *_: False)  # as if read just before the other committed
    factories.lease(rehearsal.environment, resource_id=resource_id)
    _refused(operation, resource_id, "already_owned", "a live lease of another creation owns")


def test_no_provider_is_asked_inside_a_transaction(rehearsal: Rehearsal) -> None:
    operation, resource_id = _lost(rehearsal)
    with pytest.raises(RuntimeError, match="inside a transaction"), transaction.atomic():
        _adopt(operation, resource_id)
    assert rehearsal.world.calls == []


def test_an_examination_writes_nothing(rehearsal: Rehearsal) -> None:
    operation, resource_id = _lost(rehearsal)
    before = snapshot()
    found = deciding.examine(operation.pk, resource_id, company_id=operation.company_id)
    assert (found.resource_id, found.seen) == (resource_id, "running")
    assert snapshot() == before


# Looking again


def test_a_recheck_wakes_a_quiet_row_at_once_and_is_in_the_log(rehearsal: Rehearsal) -> None:
    operation, _ = _lost(rehearsal)
    row = _quieted(operation, "creation_not_found")
    told = deciding.recheck(operation_id=operation.pk, company_id=operation.company_id, **WHO)
    assert (told.pk, told.quiet, told.requests) == (row.pk, "", 1)
    assert audited("obligation.retry_requested", row) == 1
    assert sweep(rehearsal)["proven"] == 2


def test_a_second_recheck_before_the_attempt_asks_for_no_second_one(rehearsal: Rehearsal) -> None:
    lease = released(rehearsal)
    for _ in range(2):
        deciding.recheck(obligation_id=owed(lease).pk, company_id=lease.company_id, **WHO)
    assert sweep(rehearsal) == {"proven": 1}
    assert attempts(owed(lease)) == ["proven"]


def test_a_changed_secret_is_accepted_by_the_person_who_looks_again(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    accepted = []
    monkeypatch.setattr(deciding.credentials, "accept", lambda operation: accepted.append(operation.pk))
    operation, _ = _lost(rehearsal)
    row = _quieted(operation, "creation_not_found")
    deciding.recheck(obligation_id=row.pk, company_id=operation.company_id, **WHO)
    assert accepted == []
    _quieted(operation, "credential_changed")
    deciding.recheck(obligation_id=row.pk, company_id=operation.company_id, **WHO)
    assert accepted == [operation.pk]
    assert audited("operation.credential_accepted", operation) == 1


def test_what_is_not_owed_cannot_be_looked_at_again(rehearsal: Rehearsal) -> None:
    lease = released(rehearsal)
    sweep(rehearsal)
    with pytest.raises(DecisionRefused, match="not owed any more: a receipt proves it"):
        deciding.recheck(obligation_id=owed(lease).pk, company_id=lease.company_id, **WHO)
    with pytest.raises(DecisionRefused, match="nothing looks for it"):
        deciding.recheck(operation_id=Operation.objects.get().pk, company_id=lease.company_id, **WHO)


@pytest.mark.django_db(transaction=True)
def test_a_startup_can_be_asked_for_together_with_what_it_waits_for() -> None:
    run = factories.run()
    startup = factories.startup(run)
    teardown = factories.teardown(
        factories.lease(factories.environment(factories.account(run.company)), run=run), due_in=600
    )
    assert retrying.retry(run_id=run.pk, company_id=run.company_id, **WHO) == 1
    count = retrying.retry_obligations([startup.pk, teardown.pk], **WHO)
    assert count == 2
    for row, requests in ((startup, 1), (teardown, 2)):
        row.refresh_from_db()
        assert (row.requests, row.quiet) == (requests, "")


# Settling without proof


def _settle(row: Obligation, confirmation: str | None = None, **values: Any) -> Obligation:
    return deciding.settle_unverified(
        row.pk,
        **{
            "confirmation": deciding.confirmation_of(row) if confirmation is None else confirmation,
            "company_id": row.company_id,
            "actor": "olga",
            "reason": "the provider is no more",
            **values,
        },
    )


def test_a_teardown_ends_without_proof_and_stays_a_debt(rehearsal: Rehearsal) -> None:
    lease = released(rehearsal)
    row = _settle(owed(lease))
    assert (row.closed_as, row.due_at, state(lease)) == ("unverified", None, "failed")
    assert not proof.is_proven_ended(lease)
    assert Receipt.objects.count() == 0
    assert [debt.pk for debt in proof.unproven()] == [row.pk]
    entry = ActivityEntry.objects.get(action="lease.teardown.unverified")
    assert (entry.actor, entry.reason, entry.subject_id) == ("olga", "the provider is no more", str(lease.pk))
    assert sweep(rehearsal) == {}  # nothing tries it any more
    assert rehearsal.world.boxes  # and nothing was done to it


def test_a_receipt_that_comes_late_is_kept_pays_the_debt_and_moves_nothing(rehearsal: Rehearsal) -> None:
    """A worker that was frozen over the end of its protection comes back after the operator gave up."""
    lease = released(rehearsal)
    (held,) = claim(rehearsal.account.pk, new_ids(1), worker="frozen", clock=boottime)
    Obligation.objects.filter(pk=held.obligation_id).update(due_at=factories.at(-1))
    row = _settle(owed(lease))
    assert attempts(row) == ["superseded"]
    assert evidence_of.settle_with(held, Receipt.Evidence.DESTROYED, epoch=1) is False
    assert (state(lease), evidence(lease)) == ("failed", ["destroyed"])
    row.refresh_from_db()
    assert row.closed_as == "unverified"
    assert not proof.unproven().exists()


@pytest.mark.django_db(transaction=True)
def test_a_stop_is_no_proof_of_a_deletion() -> None:
    deleted = factories.teardown(verb="delete")
    stopped = factories.teardown(verb="stop_only")
    for row in (deleted, stopped):
        factories.receipt(row.lease, evidence="stopped")
        _settle(row)
    assert [debt.pk for debt in proof.unproven()] == [deleted.pk]


def test_a_recovery_ends_without_proof_and_is_not_tried_any_more(rehearsal: Rehearsal) -> None:
    operation, _ = _lost(rehearsal)
    row = _settle(_quieted(operation))
    operation.refresh_from_db()
    assert (row.closed_as, operation.state) == ("unverified", "unverified")
    assert audited("operation.unverified", operation) == 1
    assert sweep(rehearsal) == {}
    assert rehearsal.world.calls == []


def test_the_reply_of_a_creation_that_was_given_up_is_owned_and_torn_down(rehearsal: Rehearsal) -> None:
    gate = Gate()
    rehearsal.world.after["create"] = gate
    acquiring = Background(lambda: acquired(rehearsal))
    gate.wait()
    _settle(Operation.objects.get().obligations.get())
    gate.open()
    with pytest.raises(AcquireRejected):
        acquiring.result()
    lease = Lease.objects.get()
    assert (lease.state, lease.reason) == ("pending_cleanup", "turned_up")
    assert not proof.unproven().exists()
    sweep(rehearsal)
    assert (evidence(lease), rehearsal.world.boxes) == (["destroyed"], {})


def test_an_id_that_is_saved_late_is_owned_at_once_since_nobody_would_look_again(rehearsal: Rehearsal) -> None:
    """Whoever learned it (a caller, a look-up that lost its row) may die right after."""
    operation, resource_id = _lost(rehearsal)
    _settle(_quieted(operation))
    for _ in range(2):
        journal.save_resource_id(Operation.objects.get(pk=operation.pk), resource_id)
    assert Lease.objects.get().resource_id == resource_id
    assert audited("operation.turned_up", operation) == 1


def test_an_id_that_is_saved_late_takes_nothing_from_a_live_lease_and_is_not_owned_for_a_closed_company(
    rehearsal: Rehearsal,
) -> None:
    lease = acquired(rehearsal)
    for closed in (False, True):
        operation = factories.operation(rehearsal.environment)
        _settle(operation.obligations.get())
        if closed:
            rehearsal.company.closed_at = factories.at(0)
            rehearsal.company.save()
        journal.save_resource_id(operation, "new" if closed else lease.resource_id)
        operation.refresh_from_db()
        assert (operation.state, operation.resource_id != "") == ("unverified", True)
    assert Lease.objects.get() == lease


def test_a_start_that_was_given_up_and_is_seen_running_is_stopped_again(rehearsal: Rehearsal) -> None:
    lease = released(rehearsal, Policy.REUSE_BY_ENVIRONMENT)
    sweep(rehearsal)
    assert state(lease) == "released"
    gate = Gate()
    rehearsal.world.hooks["start"] = gate
    acquiring = Background(lambda: acquired(rehearsal, Policy.REUSE_BY_ENVIRONMENT))
    gate.wait()
    _settle(Operation.objects.get(kind="start").obligations.get())
    assert not proof.is_proven_ended(lease)
    gate.open()
    with pytest.raises(AcquireRejected):
        acquiring.result()
    lease.refresh_from_db()
    assert (lease.state, lease.epoch, owed(lease).verb) == ("pending_cleanup", 2, "stop_only")
    del rehearsal.world.hooks["start"]
    sweep(rehearsal)
    assert (state(lease), evidence(lease)) == ("released", ["stopped", "stopped"])
    assert proof.is_proven_ended(lease)
    assert rehearsal.world.of(lease.resource_id).state == "stopped"


@pytest.mark.django_db(transaction=True)
def test_a_start_that_was_ended_without_proof_opens_no_gate() -> None:
    """Whether the sandbox was started is not known: the receipt of its stop proves nothing, now or later."""
    source = factories.stopped()
    assert proof.is_proven_ended(source)
    operation = factories.start(source)
    assert not proof.is_proven_ended(source)
    row = _settle(operation.obligations.get(), source.resource_id)
    operation.refresh_from_db()
    assert (row.closed_as, operation.state) == ("unverified", "unverified")
    assert not proof.is_proven_ended(source)
    factories.receipt(source, evidence="stopped", confirmed_at=factories.at(1))
    assert proof.is_proven_ended(source)


@pytest.mark.django_db(transaction=True)
def test_a_startup_is_no_longer_waited_for() -> None:
    startup = factories.startup()
    factories.operation(factories.environment(factories.account(startup.company)), run_uuid=startup.run_id)
    row = _settle(startup, str(startup.run_id))
    assert row.closed_as == "unverified"
    assert audited("startup.unverified", startup) == 1
    assert [debt.pk for debt in proof.unproven()] == [startup.pk]
    assert is_unsettled(startup.run_id)  # it opens no gate


@pytest.mark.django_db(transaction=True)
def test_a_run_with_a_creation_that_was_given_up_is_not_cleanly_ended() -> None:
    run = factories.run()
    operation = factories.operation(factories.environment(factories.account(run.company)), run_uuid=run.pk)
    row = _settle(operation.obligations.get())
    assert row.closed_as == "unverified"
    assert is_unsettled(run.pk)


@pytest.mark.django_db(transaction=True)
def test_what_a_startup_waited_for_and_will_not_come_wakes_it() -> None:
    startup = factories.startup()
    row = factories.teardown(
        factories.lease(factories.environment(factories.account(startup.company)), run=startup.run)
    )
    _settle(row)
    startup.refresh_from_db()
    assert (startup.wakes, startup.quiet) == (1, "")


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("typed", ["", "yes", "RESOURCE", "{0}x"])
def test_the_exact_name_must_be_typed(typed: str) -> None:
    row = factories.teardown()
    before = snapshot()
    with pytest.raises(DecisionRefused, match="not the exact name") as refused:
        _settle(row, typed.format(row.lease.resource_id))
    assert refused.value.code == "confirmation"
    assert snapshot() == before


@pytest.mark.django_db(transaction=True)
def test_a_row_that_an_attempt_holds_is_refused_with_the_end_of_its_protection() -> None:
    row = factories.claimed(factories.teardown())
    before = snapshot()
    with pytest.raises(DecisionRefused, match=rf"protected until {row.due_at:%Y-%m-%d %H:%M:%S} UTC") as refused:
        _settle(row)
    assert refused.value.code == "in_flight"
    assert snapshot() == before


@pytest.mark.django_db(transaction=True)
def test_a_row_that_is_claimed_meanwhile_is_refused_too() -> None:
    """The claim holds the row's lock only; the operator waits for it and reads what it wrote."""
    row = factories.teardown()
    with transaction.atomic():
        factories.claimed(Obligation.objects.select_for_update(no_key=True).get(pk=row.pk))
        settling = Background(lambda: _settle(row))
    with pytest.raises(DecisionRefused) as refused:
        settling.result()
    assert refused.value.code == "in_flight"
    assert state(row.lease) == "pending_cleanup"


@pytest.mark.django_db(transaction=True)
def test_what_needs_no_proof_cannot_be_settled_without() -> None:
    probe = factories.probe()
    lease = factories.lease()
    extend = Obligation.objects.create(
        company_id=lease.company_id, kind="extend", account_id=lease.account_id, lease=lease, due_at=factories.at(60)
    )
    inner = [
        Obligation.objects.create(company_id=lease.company_id, kind=kind, lease=lease, due_at=factories.at(60))
        for kind in ("end_lease", "settle_orphan", "end_fence")
    ]
    kept = factories.stopped().obligations.get(kind="dispose")
    history = factories.given_up()
    of_recovery = factories.recovery().lease.obligations.filter(closed_at__isnull=True).exclude(kind="dispose")
    watched = factories.may_be_running().obligations.get(kind="watch_restart")
    waiting = [factories.continuation().obligations.get(), factories.cancelled()]
    tried = [probe, extend, kept, history, *inner, *of_recovery, watched, *waiting]
    for row in tried:
        with pytest.raises(DecisionRefused, match="needs no proof"):
            _settle(row, "anything")
    of_the_fleet = "watch_controllers"  # has no company, so nobody can name it in one
    assert {*deciding.SETTLEABLE, *(row.kind for row in tried), of_the_fleet} == set(Obligation.Kind.values)


@pytest.mark.django_db(transaction=True)
def test_a_second_click_settles_nothing_again() -> None:
    row = factories.teardown()

    def attempt() -> str:
        try:
            _settle(row)
        except DecisionRefused as refused:
            return refused.code
        return "settled"

    assert sorted(together(attempt, attempt, attempt)) == ["not_owed", "not_owed", "settled"]
    assert audited("lease.teardown.unverified", row.lease) == 1


# All of them


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("reason", ["", "  \n", "x" * 501])
def test_a_decision_without_a_proper_reason_is_refused(reason: str) -> None:
    row, operation = factories.teardown(), factories.operation()
    values: dict[str, Any] = {"actor": "olga", "reason": reason}
    before = snapshot()
    for decide in (
        lambda: deciding.adopt(operation.pk, "box", company_id=operation.company_id, **values),
        lambda: deciding.recheck(obligation_id=row.pk, company_id=row.company_id, **values),
        lambda: _settle(row, **values),
    ):
        with pytest.raises(LeaseError, match="reason") as refused:
            decide()
        assert refused.value.code == "invalid"
    assert snapshot() == before


@pytest.mark.django_db(transaction=True)
def test_another_companys_rows_are_not_found() -> None:
    row, operation = factories.teardown(), factories.operation()
    stranger: UUID = factories.company().pk
    for decide in (
        lambda: deciding.adopt(operation.pk, "box", company_id=stranger, **WHO),
        lambda: deciding.recheck(obligation_id=row.pk, company_id=stranger, **WHO),
        lambda: deciding.recheck(operation_id=operation.pk, company_id=stranger, **WHO),
        lambda: _settle(row, company_id=stranger),
    ):
        with pytest.raises(NotFound):
            decide()


@pytest.mark.django_db(transaction=True)
def test_a_recheck_names_one_thing() -> None:
    for named in ({}, {"obligation_id": 1, "operation_id": uuid4()}):
        with pytest.raises(LeaseError, match="either"):
            deciding.recheck(company_id=uuid4(), **named, **WHO)


def test_a_log_that_cannot_be_written_means_that_nothing_was_decided(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    operation, resource_id = _lost(rehearsal)
    lease = released(rehearsal)

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("no space left on device")

    before = snapshot()
    monkeypatch.setattr(deciding.audit, "record", refuse)
    for decide in (
        lambda: _adopt(operation, resource_id),
        lambda: _settle(owed(lease)),
        lambda: deciding.recheck(obligation_id=owed(lease).pk, company_id=lease.company_id, **WHO),
    ):
        with pytest.raises(OSError, match="no space"):
            decide()
    assert snapshot() == before
