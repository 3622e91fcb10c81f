"""The creation journal, as far as issue A has it: a creation nobody answered for is found, owned once and destroyed."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from django.db import DataError, IntegrityError, connection, transaction

import leases
from cleanup.engine import Engine
from leases import journal
from leases.errors import AcquireFailed, AcquireRefused, AcquireUncertain, NotFound
from leases.models import Company, Environment, Lease, Obligation, Operation, Run
from providers import registry
from providers.contract import MARK_INSTALLATION, Capabilities, ErrorKind, Resource
from tests import factories
from tests.concurrency import elsewhere, together
from tests.rehearsal import RehearsalProvider
from tests.scenarios.steps import acquired, audited, evidence, fails, falls_due, is_due, owed, snapshot, state, sweep
from tests.stage import Rehearsal


class WithoutLookUp(RehearsalProvider):
    key: ClassVar[str] = "rehearsal"
    capabilities: ClassVar[Capabilities] = Capabilities(
        finds_by_name=False, keeps_files=True, has_deadline=False, creation_window=60.0
    )


LOSES_THE_REPLY = sorted(
    set(ErrorKind) - {ErrorKind.NAME_TAKEN, ErrorKind.BUSY, ErrorKind.RATE_LIMITED, ErrorKind.NOT_READY}
)


def _lost(rehearsal: Rehearsal, kind: ErrorKind = ErrorKind.TIMEOUT) -> Operation:
    """A creation whose reply was lost: the sandbox exists, and the caller was told that this is not known."""
    rehearsal.world.after["create"] = fails(kind)
    with pytest.raises(AcquireUncertain) as told:
        acquired(rehearsal)
    assert told.value.code == kind
    del rehearsal.world.after["create"]
    return Operation.objects.latest("created_at")


def _window_passes(operation: Operation) -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE leases_operation SET created_at = now() - interval '1 hour' WHERE id = %s", [operation.pk]
        )
    falls_due(owed(operation))


def _finds_nothing_in_the_window(rehearsal: Rehearsal, operation: Operation) -> None:
    _window_passes(operation)
    assert sweep(rehearsal) == {"quieted": 1}
    assert owed(operation).quiet == "creation_not_found"


@pytest.mark.parametrize("kind", LOSES_THE_REPLY)
def test_a_create_whose_reply_was_lost_is_looked_up_and_never_repeated(rehearsal: Rehearsal, kind: ErrorKind) -> None:
    """S-058, K-10: whatever the error, but one that proves by the contract that nothing was allocated."""
    operation = _lost(rehearsal, kind)
    assert is_due(owed(operation))  # woken: nobody waits for the call's bound any more
    assert sweep(rehearsal) == {"proven": 2}
    assert rehearsal.world.count("create") == 1
    assert rehearsal.world.boxes == {}
    lease = Lease.objects.get()
    assert (lease.pk, lease.reason, evidence(lease)) == (operation.lease_uuid, "creation_recovered", ["destroyed"])


def test_a_create_that_the_provider_proves_to_have_refused_owes_nothing(rehearsal: Rehearsal) -> None:
    rehearsal.world.hooks["create"] = fails(ErrorKind.INVALID, nothing_allocated=True)
    with pytest.raises(AcquireFailed):
        acquired(rehearsal)
    operation = Operation.objects.get()
    assert (operation.state, owed(operation).closed_as) == ("resolved", "nothing_owed")
    assert sweep(rehearsal) == {}


def test_a_journal_that_cannot_be_written_means_that_the_provider_is_never_called(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-055."""

    def refuse(*_: Any, **__: Any) -> None:
        raise IntegrityError("the database does not take it")

    monkeypatch.setattr(journal.audit, "record", refuse)
    with pytest.raises(IntegrityError):
        acquired(rehearsal)
    assert rehearsal.world.count("create") == 0
    assert Operation.objects.count() == 0


def test_an_acquire_in_a_callers_transaction_is_refused_before_the_provider_is_called(rehearsal: Rehearsal) -> None:
    """S-055, design 1: nothing is on record until the *outer* transaction commits, and a crash or rollback loses all.

    (A view under `ATOMIC_REQUESTS`, a control plane's own `atomic` block.)
    """
    with pytest.raises(RuntimeError), transaction.atomic():
        acquired(rehearsal)
    assert rehearsal.world.count("create") == 0
    assert rehearsal.world.boxes == {}


def test_a_create_that_this_process_cannot_send_owes_nothing(rehearsal: Rehearsal) -> None:
    """By the contract of `NOT_READY` nothing was sent, so no person need look for what cannot exist."""
    rehearsal.world.hooks["create"] = fails(ErrorKind.NOT_READY)
    with pytest.raises((AcquireFailed, AcquireRefused)):
        acquired(rehearsal)
    assert not Obligation.objects.filter(closed_at__isnull=True).exists()


def test_an_id_that_cannot_be_saved_leads_to_no_destructive_call(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-049: the acquire fails, and the recovery does what is right."""

    def refuse(*_: Any) -> None:
        raise DataError("the database does not take it")

    monkeypatch.setattr(journal, "save_resource_id", refuse)
    with pytest.raises(DataError):
        acquired(rehearsal)
    monkeypatch.undo()
    assert rehearsal.world.count("delete") == 0
    falls_due(owed(Operation.objects.get()))
    assert sweep(rehearsal) == {"proven": 2}
    assert rehearsal.world.boxes == {}


def test_many_recoveries_at_once_make_one_owner(rehearsal: Rehearsal) -> None:
    """S-057."""
    _lost(rehearsal)
    account = rehearsal.account.pk
    together(*[lambda: Engine().sweep(account) for _ in range(3)])
    sweep(rehearsal)
    assert Lease.objects.count() == 1
    assert (rehearsal.world.count("create"), rehearsal.world.count("delete")) == (1, 1)


def _rebound(rehearsal: Rehearsal) -> None:
    Run.objects.filter(pk=rehearsal.run.pk).update(status=Run.Status.CANCELLED)


def _deleted(rehearsal: Rehearsal) -> None:
    Environment.objects.filter(pk=rehearsal.environment.pk).delete()


def _closed(rehearsal: Rehearsal) -> None:
    Company.objects.filter(pk=rehearsal.company.pk).update(closed_at=factories.database_now(), name="")


@pytest.mark.parametrize("meanwhile", [_rebound, _deleted], ids=["run over", "environment deleted"])
def test_it_recovers_by_its_own_identities_whatever_became_of_the_others(rehearsal: Rehearsal, meanwhile: Any) -> None:
    """S-040, S-060, S-061, S-062."""
    _lost(rehearsal)
    meanwhile(rehearsal)
    assert sweep(rehearsal) == {"proven": 2}
    assert rehearsal.world.boxes == {}
    assert Lease.objects.get().company_id == rehearsal.company.pk


def test_a_name_that_is_absent_resolves_nothing_and_asks_a_person_after_the_window(rehearsal: Rehearsal) -> None:
    """S-079, S-085, G-13: it stays owned, and a person decides."""
    operation = _lost(rehearsal)
    hidden = dict(rehearsal.world.boxes)
    rehearsal.world.boxes.clear()
    assert sweep(rehearsal) == {"not_seen": 1}
    row = owed(operation)
    assert (row.failures, row.is_open) == (0, True)
    _finds_nothing_in_the_window(rehearsal, operation)
    assert sweep(rehearsal) == {}
    # A person who sees it at the provider asks for another look.
    rehearsal.world.boxes.update(hidden)
    assert leases.retry(company_id=rehearsal.company.pk, run_id=rehearsal.run.pk, actor="user", reason="seen") == 1
    assert sweep(rehearsal) == {"proven": 2}
    assert rehearsal.world.boxes == {}


def test_failing_look_ups_back_off_each_on_its_own(rehearsal: Rehearsal) -> None:
    """S-074, S-068."""
    first, second = _lost(rehearsal), _lost(rehearsal)
    rehearsal.world.hooks["find"] = fails(ErrorKind.REFUSED)
    assert sweep(rehearsal) == {"failed": 2}
    falls_due(owed(first))
    assert sweep(rehearsal) == {"failed": 1}
    assert (owed(first).failures, owed(second).failures) == (2, 1)
    rehearsal.world.hooks.clear()
    for operation in (first, second):
        falls_due(owed(operation))
    assert sweep(rehearsal) == {"proven": 4}


def test_what_is_found_under_our_name_with_another_mark_is_not_ours(rehearsal: Rehearsal) -> None:
    """S-050: not adopted, not destroyed, a person is asked."""
    operation = _lost(rehearsal)
    (box,) = rehearsal.world.boxes.values()
    for marks in ({}, {**box.resource.marks, MARK_INSTALLATION: "another"}, {MARK_INSTALLATION: "another"}):
        box.resource = Resource(box.resource.resource_id, box.resource.name, marks)
        leases.retry(company_id=rehearsal.company.pk, run_id=rehearsal.run.pk, actor="user", reason="again")
        assert sweep(rehearsal) == {"quieted": 1}
        assert owed(operation).quiet == "foreign_marks"
    assert rehearsal.world.count("delete") == 0
    assert Operation.objects.get().resource_id == ""


def test_when_another_account_answers_nothing_is_looked_up(rehearsal: Rehearsal) -> None:
    """The kind of S-069: the account is another one, whatever the secret."""
    operation = _lost(rehearsal)
    rehearsal.world.identity = "somebody else"
    assert sweep(rehearsal) == {"failed": 1}
    assert (owed(operation).last_error_kind, rehearsal.world.count("find")) == ("identity", 0)


def test_a_provider_without_look_up_asks_a_person_at_once(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-070, G-12."""
    monkeypatch.setitem(registry._BUILT_IN, "rehearsal", "tests.scenarios.test_creation:WithoutLookUp")
    operation = _lost(rehearsal)
    assert sweep(rehearsal) == {"quieted": 1}
    assert (owed(operation).quiet, rehearsal.world.count("find")) == ("no_lookup", 0)


def test_the_capability_is_the_one_that_was_recorded(rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Domain 2.5: an adapter that is replaced meanwhile does not change the contract of a creation under way."""
    operation = _lost(rehearsal)
    monkeypatch.setitem(registry._BUILT_IN, "rehearsal", "tests.scenarios.test_creation:WithoutLookUp")
    assert operation.finds_by_name
    assert sweep(rehearsal) == {"proven": 2}


@pytest.mark.parametrize("why", ["creation_not_found", "no_lookup"])
def test_an_id_that_comes_late_wakes_a_recovery_that_had_given_up_looking(rehearsal: Rehearsal, why: str) -> None:
    """Design 7: late evidence wakes a quiet row, in the database.

    The reply comes to a process that saves the id and is killed before it can attach. Nobody else will ever wake it.
    """
    operation = _lost(rehearsal)
    (resource_id,) = rehearsal.world.boxes
    Obligation.objects.filter(operation=operation).update(due_at=None, quiet=why)
    elsewhere(lambda: journal.save_resource_id(Operation.objects.get(pk=operation.pk), resource_id))
    assert is_due(owed(operation))
    assert owed(operation).quiet == ""
    assert sweep(rehearsal) == {"proven": 2}
    assert rehearsal.world.boxes == {}


def test_a_recovered_sandbox_is_never_used(rehearsal: Rehearsal) -> None:
    """S-089: that it was found proves no end and authorises nothing; its owner stays until there is proof."""
    _lost(rehearsal)
    rehearsal.world.hooks["delete"] = fails(ErrorKind.REFUSED)
    sweep(rehearsal)
    lease = Lease.objects.get()
    assert state(lease) == "pending_cleanup"
    with pytest.raises(leases.errors.AdmissionClosed):
        leases.bridge(lease.pk).execute(["true"])
    assert audited("lease.acquired", lease) == 0


# Refused before anything is asked


def _archived(rehearsal: Rehearsal) -> None:
    Environment.objects.filter(pk=rehearsal.environment.pk).update(status=Environment.Status.ARCHIVED)


def _unreachable(rehearsal: Rehearsal) -> None:
    rehearsal.world.hooks["identify"] = fails(ErrorKind.CONNECTION)


def _misconfigured(rehearsal: Rehearsal) -> None:
    Environment.objects.filter(pk=rehearsal.environment.pk).update(config={"size": "large"})


def _without_adapter(rehearsal: Rehearsal) -> None:
    type(rehearsal.account).objects.filter(pk=rehearsal.account.pk).update(provider="nobody")


@pytest.mark.parametrize(
    "given", [_archived, _rebound, _closed, _unreachable, _misconfigured, _without_adapter], ids=lambda g: g.__name__
)
def test_an_acquire_that_may_not_be_is_refused_before_the_provider_is_asked_to_create(
    rehearsal: Rehearsal, given: str
) -> None:
    """S-001, S-003."""
    given(rehearsal)
    with pytest.raises(AcquireRefused):
        leases.acquire(rehearsal.environment.pk, company_id=rehearsal.company.pk, run_id=rehearsal.run.pk)
    assert rehearsal.world.count("create") == 0
    assert Operation.objects.count() == 0
    assert Obligation.objects.count() == 0


def test_nobody_acquires_in_another_companys_environment_or_for_its_run(rehearsal: Rehearsal) -> None:
    other = Rehearsal()
    before = snapshot()
    with pytest.raises(NotFound):
        leases.acquire(rehearsal.environment.pk, company_id=other.company.pk, run_id=other.run.pk)
    assert snapshot() == before
    with pytest.raises(AcquireRefused, match="no such run"):
        leases.acquire(rehearsal.environment.pk, company_id=rehearsal.company.pk, run_id=other.run.pk)
    assert rehearsal.world.count("create") == 0
    assert Operation.objects.count() == 0
