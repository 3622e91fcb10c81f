"""C and D: what the recovery of a creation must not decide by itself, and what takes it up again.

What finding, owning and the window are like is in `test_creation.py`; the rules of credentials in
`tests/leases/test_credentials.py`. Here the whole engine works on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from django.db import connection, transaction

import leases
from cleanup import engine
from cleanup.engine import Engine
from leases import credentials, deciding, journal
from leases.errors import AcquireRejected, AcquireUncertain, LeaseError, ResumeFailed
from leases.models import Attempt, Company, Credential, Environment, Lease, Obligation, Operation, ProviderAccount, Run
from providers import registry
from providers.contract import ErrorKind
from providers.stores import Failed, Inactive, NotFound, Value
from tests import factories
from tests.concurrency import Background, Gate, elsewhere
from tests.rehearsal import RehearsalProvider
from tests.scenarios.steps import (
    acquired,
    attempts,
    evidence,
    fails,
    falls_due,
    is_due,
    owed,
    released,
    retry,
    state,
    sweep,
)
from tests.stage import Rehearsal
from tests.vault import Vault, installed

OWN = "A_SECRET_OF_THE_JOURNAL"


@pytest.fixture
def vault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Vault]]:
    with installed(tmp_path, monkeypatch) as store:
        store.answers["acme"] = Value("hunter2")
        yield store


@pytest.fixture
def credential(rehearsal: Rehearsal, vault: type[Vault]) -> Credential:
    """The credential that the rehearsal's account is called with: in a store that all workers share."""
    row = Credential.objects.create(company=rehearsal.company, name="acme", reference="vault:acme")
    rehearsal.account.credential = row
    rehearsal.account.save()
    return row


def _lost(rehearsal: Rehearsal, **values: Any) -> Operation:
    """A creation whose reply was lost; with its credential, and a digest of the value, on record."""
    rehearsal.world.after["create"] = fails(ErrorKind.TIMEOUT)
    with pytest.raises(AcquireUncertain):
        acquired(rehearsal)
    del rehearsal.world.after["create"]
    rehearsal.world.calls.clear()
    Vault.reads.clear()
    return _recorded(Operation.objects.latest("created_at"), rehearsal, **values)


def _recorded(row: Any, rehearsal: Rehearsal, **values: Any) -> Any:
    credential = rehearsal.account.credential
    if credential is not None:
        values = {"credential_uuid": credential.pk, "credential_reference": credential.reference, **values}
        if isinstance(row, Operation):
            values.setdefault("credential_digest", credentials.learned(credential.pk, "hunter2"))
    type(row).objects.filter(pk=row.pk).update(**values)
    row.refresh_from_db()
    return row


def _released(rehearsal: Rehearsal) -> Lease:
    lease: Lease = _recorded(released(rehearsal), rehearsal)
    rehearsal.world.calls.clear()
    Vault.reads.clear()
    return lease


def _probed(rehearsal: Rehearsal) -> ProviderAccount:
    """An account whose circuit is open."""
    acquired(rehearsal)
    account = rehearsal.account
    ProviderAccount.objects.filter(pk=account.pk).update(circuit="open", circuit_failures=5)
    factories.probe(account)
    rehearsal.world.calls.clear()
    Vault.reads.clear()
    return account


def _started(rehearsal: Rehearsal) -> Operation:
    """The start of a stopped sandbox, whose answer was lost."""
    leases.release(acquired(rehearsal, "reuse_by_environment").pk)
    assert sweep(rehearsal) == {"proven": 1}

    def lose(_: str) -> None:
        rehearsal.world.hooks["inspect"] = fails(ErrorKind.PROTOCOL)
        fails(ErrorKind.PROTOCOL)("")

    rehearsal.world.after["start"] = lose
    with pytest.raises(ResumeFailed):
        leases.acquire(
            rehearsal.environment.pk, company_id=rehearsal.company.pk, run_id=factories.run(rehearsal.company).pk
        )
    del rehearsal.world.hooks["inspect"], rehearsal.world.after["start"]
    rehearsal.world.calls.clear()
    Vault.reads.clear()
    start = Operation.objects.filter(kind="start")
    start.update(created_at=factories.at(-9999))  # its recovery is due, so no call of it can be under way
    return _recorded(start.get(), rehearsal)  # type: ignore[no-any-return]


def _row(subject: Any) -> Obligation:
    if isinstance(subject, ProviderAccount):
        return subject.probes.latest("pk")
    return owed(subject)


def _ready_again(rehearsal: Rehearsal) -> None:
    """The minute for which this process left the account alone is over."""
    engine._UNREADY.pop(rehearsal.account.pk, None)


# A credential that may not be used


def _disable(row: Credential) -> None:
    Credential.objects.filter(pk=row.pk).update(status="disabled")


def _archive(row: Credential) -> None:
    Credential.objects.filter(pk=row.pk).update(status="archived")


def _enable(row: Credential) -> None:
    Credential.objects.filter(pk=row.pk).update(status="active")


def _delete(row: Credential) -> None:
    ProviderAccount.objects.filter(credential=row).update(credential=None)
    Credential.objects.filter(pk=row.pk).delete()


def _make_again(row: Credential) -> None:
    Credential.objects.create(company_id=row.company_id, name="again", reference=row.reference)


def _inactive_in_store(_: Credential) -> None:
    Vault.answers["acme"] = Inactive()


def _lost_by_store(_: Credential) -> None:
    Vault.answers["acme"] = NotFound()


def _back_in_store(row: Credential) -> None:
    Vault.answers["acme"] = Value("hunter2")
    credentials.learned(row.pk, "hunter2")  # an acquire, or a probe, that works again


ENDS: list[tuple[Callable[[Credential], None], str, Callable[[Credential], None]]] = [
    (_disable, "credential_inactive", _enable),
    (_archive, "credential_inactive", _enable),
    (_delete, "credential_missing", _make_again),
    (_inactive_in_store, "credential_inactive", _back_in_store),
    (_lost_by_store, "credential_missing", _back_in_store),
]


# An account's credential cannot be deleted while the account has it, so a probe never misses one.
OWING = [
    (owing, *ends)
    for owing in (_lost, _started, _released, _probed)
    for ends in ENDS
    if (owing, ends[0]) != (_probed, _delete)
]


@pytest.mark.parametrize(
    ("owing", "ends", "why", "mends"), OWING, ids=[f"{case[0].__name__}{case[1].__name__}" for case in OWING]
)
def test_a_credential_that_may_not_be_used_costs_no_call_and_waits_for_a_person(
    rehearsal: Rehearsal,
    credential: Credential,
    owing: Callable[[Rehearsal], Any],
    ends: Callable[[Credential], None],
    why: str,
    mends: Callable[[Credential], None],
) -> None:
    """S-066, S-067: no provider call, no deadline, also after a restart and repeated scans; mended, it goes on."""
    subject = owing(rehearsal)
    falls_due(_row(subject))
    ends(credential)
    for _ in range(3):  # engines of their own, as after a restart
        sweep(rehearsal)
    row = _row(subject)
    assert (row.quiet, row.due_at, row.failures) == (why, None, 0)
    assert attempts(row) == ["quieted"]
    assert rehearsal.world.calls == []
    assert len(Vault.reads) == (1 if "store" in ends.__name__ else 0)
    mends(credential)
    assert is_due(_row(subject))
    sweep(rehearsal)
    assert not _row(subject).is_open
    assert not Obligation.objects.filter(closed_at__isnull=True).exclude(kind="dispose").exists()


def test_one_that_is_disabled_again_is_not_enabled_by_anybody(rehearsal: Rehearsal, credential: Credential) -> None:
    """S-067: nothing ever reactivates a credential."""
    operation = _lost(rehearsal)
    _disable(credential)
    sweep(rehearsal)
    retry(rehearsal)
    sweep(rehearsal)
    credential.refresh_from_db()
    assert (credential.status, owed(operation).quiet) == ("disabled", "credential_inactive")
    assert rehearsal.world.calls == []


def test_another_credential_for_the_account_lets_its_probe_go_on(rehearsal: Rehearsal, credential: Credential) -> None:
    """The probe asks with what the account has today; rows behind it keep what they recorded."""
    account = _probed(rehearsal)
    _disable(credential)
    assert sweep(rehearsal) == {"quieted": 1}
    other = Credential.objects.create(company=rehearsal.company, name="other", reference="vault:other")
    Vault.answers["other"] = Value("hunter3")
    ProviderAccount.objects.filter(pk=account.pk).update(credential=other)
    assert sweep(rehearsal) == {"proven": 1}
    other.refresh_from_db()
    assert other.digest == credentials.digest("hunter3")


def _raises() -> Any:
    raise ConnectionError("the token hunter2 was refused")


@pytest.mark.parametrize("trouble", [Failed("answered 503"), Failed("answered 422"), _raises, lambda: None])
def test_a_store_that_fails_is_asked_again_and_the_creation_has_one_owner_in_the_end(
    rehearsal: Rehearsal, credential: Credential, trouble: Any
) -> None:
    """S-068: pending, with a retry, whatever the failure is; nothing counted, since no row did anything wrong."""
    operation = _lost(rehearsal)
    Vault.answers["acme"] = trouble
    for _ in range(2):
        assert sweep(rehearsal) == {"handed_back": 1}
        _ready_again(rehearsal)
    row = owed(operation)
    assert (row.quiet, row.failures, row.last_error_kind, is_due(row)) == ("", 0, "not_ready", True)
    assert "vault:acme" in Attempt.objects.filter(obligation=row).latest("claimed_at").error_excerpt
    assert rehearsal.world.calls == []
    Vault.answers["acme"] = Value("hunter2")
    assert sweep(rehearsal) == {"proven": 2}
    assert (Lease.objects.count(), rehearsal.world.count("create"), rehearsal.world.boxes) == (1, 0, {})


def test_a_slow_store_holds_up_its_own_row_and_nobody_elses(rehearsal: Rehearsal, credential: Credential) -> None:
    """It is asked in a thread of its own, as a provider is."""
    slow, quick = _released(rehearsal), _released(rehearsal)
    gate = Gate()
    Vault.answers["slow"] = lambda: (gate(), Value("hunter2"))[1]
    other = Credential.objects.create(company=rehearsal.company, name="slow", reference="vault:slow")
    Lease.objects.filter(pk=slow.pk).update(credential_uuid=other.pk, credential_reference=other.reference)
    swept = Background(lambda: Engine().sweep(rehearsal.account.pk))
    gate.wait()
    for _ in range(2000):
        if state(quick) == "expired":
            break
        connection.cursor().execute("SELECT pg_sleep(0.01)")
    assert (state(quick), state(slow)) == ("expired", "pending_cleanup")
    gate.open()
    assert swept.result().outcomes == {"proven": 2}


# A value that changed


def test_a_creation_is_not_looked_for_with_another_secret_until_a_person_accepts_it(
    rehearsal: Rehearsal, credential: Credential
) -> None:
    """S-069: decided by rows, so by every worker alike, and nothing is read."""
    operation = _lost(rehearsal)
    credentials.learned(credential.pk, "hunter3")
    Vault.answers["acme"] = Value("hunter3")
    assert sweep(rehearsal) == {"quieted": 1}
    assert owed(operation).quiet == "credential_changed"
    assert (rehearsal.world.calls, Vault.reads) == ([], [])
    _accept(operation)
    assert sweep(rehearsal) == {"proven": 2}
    assert rehearsal.world.boxes == {}


def _accept(operation: Operation) -> None:
    """The operator says that the secret of today will do."""
    recovery = owed(operation)
    deciding.recheck(company_id=operation.company_id, obligation_id=recovery.pk, actor="olga", reason="rotated")


def test_a_shared_store_that_has_another_value_is_enough(rehearsal: Rehearsal, credential: Credential) -> None:
    """S-069: before anybody has seen the new value work."""
    operation = _lost(rehearsal)
    Vault.answers["acme"] = Value("hunter3")
    assert sweep(rehearsal) == {"quieted": 1}
    assert (owed(operation).quiet, rehearsal.world.calls) == ("credential_changed", [])
    credential.refresh_from_db()
    assert credential.digest == credentials.digest("hunter2")
    _accept(operation)
    assert sweep(rehearsal) == {"proven": 2}


def test_another_value_in_this_process_alone_is_its_unreadiness(
    rehearsal: Rehearsal, credential: Credential, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-069: a worker that was not restarted since the secret was changed, beside those that were."""
    Credential.objects.filter(pk=credential.pk).update(reference=f"env:{OWN}")
    monkeypatch.setenv(OWN, "hunter2")
    operation = _lost(rehearsal)
    monkeypatch.setenv(OWN, "hunter1")
    assert sweep(rehearsal) == {"handed_back": 1}
    assert (owed(operation).quiet, rehearsal.world.calls) == ("", [])
    _ready_again(rehearsal)
    monkeypatch.setenv(OWN, "hunter2")
    assert sweep(rehearsal) == {"proven": 2}


def test_a_teardown_is_not_refused_for_a_changed_value(rehearsal: Rehearsal, credential: Credential) -> None:
    """Keys are rotated all the time; whose the sandbox is, the attested identity says."""
    lease = _released(rehearsal)
    credentials.learned(credential.pk, "hunter2")
    credentials.learned(credential.pk, "hunter3")
    Vault.answers["acme"] = Value("hunter3")
    assert sweep(rehearsal) == {"proven": 1}
    assert evidence(lease) == ["destroyed"]


# The company


def _close(company: Company) -> None:
    Company.objects.filter(pk=company.pk).update(closed_at=factories.database_now(), name="")


def _reopen(company: Company) -> None:
    Company.objects.filter(pk=company.pk).update(closed_at=None)


def _waits_for_the_company(rehearsal: Rehearsal, operation: Operation) -> None:
    for _ in range(3):
        sweep(rehearsal)
    row = owed(operation)
    assert (row.quiet, row.due_at, row.failures) == ("company_closed", None, 0)
    assert Lease.objects.count() == 0
    assert rehearsal.world.count("delete") == 0


def test_a_company_closed_before_the_look_up_is_asked_about_and_nothing_is_called(rehearsal: Rehearsal) -> None:
    """S-063."""
    operation = _lost(rehearsal)
    _close(rehearsal.company)
    _waits_for_the_company(rehearsal, operation)
    assert rehearsal.world.calls == []
    _reopen(rehearsal.company)
    assert is_due(owed(operation))
    assert sweep(rehearsal) == {"proven": 2}


def test_a_company_closed_during_the_look_up_gets_no_lease_and_the_id_is_kept(rehearsal: Rehearsal) -> None:
    """S-064."""
    operation = _lost(rehearsal)
    (resource_id,) = rehearsal.world.boxes
    rehearsal.world.hooks["find"] = lambda _: elsewhere(lambda: _close(rehearsal.company))
    _waits_for_the_company(rehearsal, operation)
    assert rehearsal.world.count("find") == 1
    operation.refresh_from_db()
    assert operation.resource_id == resource_id


@pytest.mark.parametrize("call", ["identify", "find"])
@pytest.mark.parametrize("how", ["fails", "is not seen"])
def test_a_look_up_that_fails_after_the_company_was_closed_is_not_repeated(
    rehearsal: Rehearsal, call: str, how: str
) -> None:
    """S-065."""
    operation = _lost(rehearsal)

    def meanwhile(_: str) -> None:
        elsewhere(lambda: _close(rehearsal.company))
        if how == "fails":
            fails(ErrorKind.SERVER)("")
        rehearsal.world.boxes.clear()

    rehearsal.world.hooks[call] = meanwhile
    _waits_for_the_company(rehearsal, operation)
    assert rehearsal.world.count(call) == 1


def test_whoever_closes_a_company_waits_for_the_lease_that_is_being_made(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-064: between the check and the commit nobody closes it, so no lease is made for a company that is closed."""
    _lost(rehearsal)
    gate = Gate()
    original = journal.is_owned

    def slowly(*arguments: Any) -> bool:
        gate()
        return original(*arguments)

    monkeypatch.setattr(import_module("cleanup.handlers.recover_creation"), "is_owned", slowly)
    swept = Background(lambda: Engine().sweep(rehearsal.account.pk, limit=1))
    gate.wait()
    closing = Background(lambda: _close(rehearsal.company))
    _until_somebody_waits()
    assert not Company.objects.filter(closed_at__isnull=False).exists()
    gate.open()
    assert swept.result().outcomes == {"proven": 1}
    closing.result()
    assert Lease.objects.count() == 1


def _until_somebody_waits() -> None:
    for _ in range(2000):
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_sleep(0.01)")
            cursor.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
            )
            (waiting,) = cursor.fetchone()
        if waiting:
            return
    raise AssertionError("nobody waits for a lock")


# No wake is lost between looking and going quiet


@pytest.mark.parametrize("mends", [_enable, _make_again], ids=["enabled", "made again"])
def test_a_credential_that_is_mended_while_its_row_goes_quiet_is_not_slept_through(
    rehearsal: Rehearsal, credential: Credential, mends: Callable[[Credential], None]
) -> None:
    """The write is not committed when the attempt looks, and has run its trigger before the row is quiet."""
    operation = _lost(rehearsal)
    (_disable if mends is _enable else _delete)(credential)
    gate = Gate()

    def write() -> None:
        with transaction.atomic():
            mends(credential)
            gate()

    writing = Background(write)
    gate.wait()
    swept = Background(lambda: Engine().sweep(rehearsal.account.pk, limit=1))
    _until_somebody_waits()
    gate.open()
    writing.result()
    swept.result()
    assert (owed(operation).quiet, is_due(owed(operation))) == ("", True)
    assert sweep(rehearsal) == {"proven": 2}


@pytest.mark.parametrize("why", ["no look-up", "closed"])
def test_an_id_that_is_being_saved_while_the_row_goes_quiet_is_not_slept_through(
    rehearsal: Rehearsal, why: str
) -> None:
    """D: the late reply and the recovery at the same moment."""
    operation = _lost(rehearsal, **({"finds_by_name": False} if why == "no look-up" else {}))
    (resource_id,) = rehearsal.world.boxes
    if why == "closed":
        _close(rehearsal.company)
    gate = Gate()

    def save() -> None:
        with transaction.atomic():
            journal.save_resource_id(Operation.objects.get(pk=operation.pk), resource_id)
            gate()

    saving = Background(save)
    gate.wait()
    swept = Background(lambda: Engine().sweep(rehearsal.account.pk, limit=1))
    _until_somebody_waits()
    gate.open()
    saving.result()
    swept.result()
    if why == "closed":
        sweep(rehearsal)
        assert owed(operation).quiet == "company_closed"
    else:
        assert is_due(owed(operation))
        assert sweep(rehearsal) == {"proven": 2}


# The queue is not closed to evidence


@pytest.mark.parametrize(
    "why",
    [
        "no_lookup",
        "creation_not_found",
        "foreign_marks",
        "credential_missing",
        "credential_inactive",
        "credential_changed",
    ],
)
def test_an_id_that_comes_late_takes_the_creation_back_into_ordinary_teardown(rehearsal: Rehearsal, why: str) -> None:
    """Whatever it was quiet for: nobody has to click."""
    operation = _lost(rehearsal)
    (resource_id,) = rehearsal.world.boxes
    Obligation.objects.filter(operation=operation).update(due_at=None, quiet=why)
    elsewhere(lambda: journal.save_resource_id(Operation.objects.get(pk=operation.pk), resource_id))
    assert sweep(rehearsal) == {"proven": 2}
    assert rehearsal.world.count("find") == 0
    assert rehearsal.world.boxes == {}


def test_a_known_id_has_an_owner_even_while_its_credential_may_not_be_used(
    rehearsal: Rehearsal, credential: Credential
) -> None:
    """Owning needs no call; then it is the teardown that waits, and the debt is visible as one of a lease."""
    operation = _lost(rehearsal)
    (resource_id,) = rehearsal.world.boxes
    _disable(credential)
    journal.save_resource_id(operation, resource_id)
    assert Engine().sweep(rehearsal.account.pk, limit=1).outcomes == {"proven": 1}
    lease = _recorded(Lease.objects.get(), rehearsal)
    assert sweep(rehearsal) == {"quieted": 1}
    assert (state(lease), owed(lease).quiet) == ("pending_cleanup", "credential_inactive")
    assert rehearsal.world.calls == []


def _cancel(rehearsal: Rehearsal) -> None:
    Run.objects.filter(pk=rehearsal.run.pk).update(status=Run.Status.CANCELLED)


@pytest.mark.parametrize("first", ["reply", "look-up"])
def test_a_late_reply_and_the_look_up_end_in_one_teardown_in_either_order(rehearsal: Rehearsal, first: str) -> None:
    """S-082, S-083: the run is over, so the reply that comes first may not be used either."""
    gate = Gate()
    rehearsal.world.after["create"] = gate
    calling = Background(lambda: acquired(rehearsal))
    gate.wait()
    operation = Operation.objects.get()
    if first == "reply":
        _cancel(rehearsal)
        gate.open()
        with pytest.raises(AcquireRejected):
            calling.result()
        assert sweep(rehearsal) == {"proven": 1}
        assert rehearsal.world.count("find") == 0
    else:
        falls_due(owed(operation))
        assert sweep(rehearsal) == {"proven": 2}
        gate.open()
        with pytest.raises(AcquireRejected):
            calling.result()
        sweep(rehearsal)
    lease = Lease.objects.get()
    assert (lease.pk, evidence(lease)) == (operation.lease_uuid, ["destroyed"])
    assert (rehearsal.world.count("create"), rehearsal.world.count("delete")) == (1, 1)


@pytest.mark.parametrize("who", ["the same", "another", "another company"])
def test_an_id_is_saved_once_and_nobody_saves_another(rehearsal: Rehearsal, who: str) -> None:
    """S-051, S-073."""
    operation = _lost(rehearsal)
    (resource_id,) = rehearsal.world.boxes
    journal.save_resource_id(operation, resource_id)
    if who == "the same":
        journal.save_resource_id(operation, resource_id)
    elif who == "another":
        with pytest.raises(Exception, match="already says otherwise"):
            journal.save_resource_id(operation, "another")
    else:
        with pytest.raises(Exception, match="already says otherwise"):
            Operation.objects.filter(pk=operation.pk).update(company=factories.company())
    operation.refresh_from_db()
    assert (operation.resource_id, operation.company_id) == (resource_id, rehearsal.company.pk)


# What is recorded decides, not what is there today


def test_it_recovers_with_what_it_recorded_when_everything_was_rebound_since(rehearsal: Rehearsal) -> None:
    """S-060, S-061: the environment went to another company's account, then it was deleted."""
    operation = _lost(rehearsal)
    other = Rehearsal()
    Environment.objects.filter(pk=rehearsal.environment.pk).update(company=other.company, account=other.account)
    Environment.objects.filter(pk=rehearsal.environment.pk).delete()
    assert sweep(rehearsal) == {"proven": 2}
    lease = Lease.objects.get()
    assert (lease.company_id, lease.account_id) == (rehearsal.company.pk, rehearsal.account.pk)
    assert (lease.pk, lease.environment_id) == (operation.lease_uuid, None)
    assert (other.world.calls, rehearsal.world.boxes) == ([], {})


def test_it_recovers_what_a_run_left_that_is_over_and_belongs_to_it_still(rehearsal: Rehearsal) -> None:
    """S-062: the run was stopped meanwhile."""
    operation = _lost(rehearsal)
    assert leases.stop(company_id=rehearsal.company.pk, run_id=rehearsal.run.pk, actor="user") >= 0
    assert sweep(rehearsal) == {"proven": 2}
    lease = Lease.objects.get()
    assert (lease.pk, lease.run_id, evidence(lease)) == (operation.lease_uuid, rehearsal.run.pk, ["destroyed"])


class Replaced(RehearsalProvider):
    """A later adapter, which writes names and marks in another way."""

    binding = "two"


def test_an_adapter_of_another_binding_does_not_look(rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Domain 2.5: a replaced adapter cannot change the contract; another worker may still have the right one."""
    operation = _lost(rehearsal)
    with monkeypatch.context() as replaced:
        replaced.setitem(registry._BUILT_IN, "rehearsal", "tests.scenarios.test_journal:Replaced")
        assert sweep(rehearsal) == {"handed_back": 1}
    assert (owed(operation).quiet, owed(operation).failures, rehearsal.world.calls) == ("", 0, [])
    _ready_again(rehearsal)
    assert sweep(rehearsal) == {"proven": 2}


def test_a_provider_without_look_up_keeps_the_id_that_is_known(rehearsal: Rehearsal) -> None:
    """S-070, S-088: what the adapter of its day could not, none of today is asked for; a known id needs no look-up."""
    without = _lost(rehearsal, finds_by_name=False)
    known = _lost(rehearsal, finds_by_name=False)
    journal.save_resource_id(known, next(i for i, b in rehearsal.world.boxes.items() if b.resource.name == known.name))
    assert sweep(rehearsal) == {"quieted": 1, "proven": 2}
    assert (owed(without).quiet, owed(without).due_at, rehearsal.world.count("find")) == ("no_lookup", None, 0)
    assert owed(known).closed_as == "handed_over"


def test_an_attachment_that_is_refused_keeps_the_id_through_any_number_of_scans(rehearsal: Rehearsal) -> None:
    """S-071: a live lease owns the sandbox that the provider named; the id stays for whoever decides."""
    owner = acquired(rehearsal)
    operation = _lost(rehearsal)
    journal.save_resource_id(operation, owner.resource_id)
    for _ in range(4):
        retry(rehearsal)
        sweep(rehearsal)
    operation.refresh_from_db()
    assert (operation.resource_id, operation.state, owed(operation).quiet) == (
        owner.resource_id,
        "pending",
        "identity_conflict",
    )
    assert (state(owner), rehearsal.world.count("delete")) == ("active", 0)


def test_a_worker_that_is_told_to_stop_finishes_the_look_up_it_has_begun(rehearsal: Rehearsal) -> None:
    """S-077: accepted work is joined; what was not begun is handed back, and stays owed."""
    operation = _lost(rehearsal)
    gate = Gate()
    rehearsal.world.hooks["find"] = gate
    stopping = False
    worker = Background(lambda: Engine(stopping=lambda: stopping).sweep(rehearsal.account.pk))
    gate.wait()
    stopping = True
    gate.open()
    assert worker.result().outcomes == {"proven": 1}
    assert owed(operation).closed_as == "handed_over"
    lease = Lease.objects.get()
    assert (state(lease), is_due(owed(lease))) == ("pending_cleanup", True)
    assert sweep(rehearsal) == {"proven": 1}


def test_each_absent_creation_is_looked_for_at_its_own_growing_distance(rehearsal: Rehearsal) -> None:
    """S-074, S-079, S-084: absence resolves nothing, and one that was looked for often is not looked for as often."""
    old, new = _lost(rehearsal), _lost(rehearsal)
    rehearsal.world.boxes.clear()
    distances = []
    for _ in range(5):
        Obligation.objects.filter(operation=new).update(due_at=factories.at(600))
        falls_due(owed(old))
        assert Engine().sweep(rehearsal.account.pk, limit=1).outcomes == {"not_seen": 1}
        row = owed(old)
        assert row.due_at is not None
        distances.append((row.due_at - factories.database_now()).total_seconds())
    assert distances[-1] > 4 * distances[0]
    old.refresh_from_db()
    new.refresh_from_db()
    assert (old.looks, new.looks, old.state) == (5, 0, "pending")


def test_one_whose_window_passed_long_ago_is_recovered_all_the_same_when_it_is_there(rehearsal: Rehearsal) -> None:
    """S-091."""
    operation = _lost(rehearsal, created_at=factories.at(-30 * 24 * 3600))
    assert sweep(rehearsal) == {"proven": 2}
    assert (Lease.objects.get().pk, rehearsal.world.boxes) == (operation.lease_uuid, {})


# The caller


@pytest.mark.parametrize(("ends", "why"), [(end, why) for end, why, _ in ENDS if end is not _delete])
def test_an_acquire_with_a_credential_that_may_not_be_used_creates_nothing(
    rehearsal: Rehearsal, credential: Credential, ends: Callable[[Credential], None], why: str
) -> None:
    ends(credential)
    with pytest.raises(LeaseError):
        acquired(rehearsal)
    assert (rehearsal.world.count("create"), Operation.objects.count()) == (0, 0)
