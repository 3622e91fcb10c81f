"""The state machine: the document says what the code does, one module writes the state, and wrong ones are refused."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from django.db import DatabaseError, IntegrityError, transaction

from leases import audit, demands, transitions
from leases.demands import Demand, Verb
from leases.models import ActivityEntry, Lease, Obligation, Operation, Receipt
from leases.models.environments import Policy
from tests import factories
from tests.tables import rows_of

ROOT = Path(__file__).parents[2]
STATES = ROOT / "docs" / "states.md"


# The document


def test_the_document_lists_every_transition_and_no_other() -> None:
    documented = {(row["from"], row["to"], row["function"]) for row in rows_of(STATES, "Transitions")}
    assert documented == set(transitions.TABLE)
    assert len(transitions.TABLE) == len(set(transitions.TABLE))


def test_the_document_explains_every_state() -> None:
    assert {row["state"] for row in rows_of(STATES, "The states of a lease")} == set(Lease.State.values)


@pytest.mark.parametrize("row", rows_of(STATES, "Where proof leaves it"), ids=lambda row: " | ".join(row.values()))
def test_proof_leaves_a_lease_where_the_document_says(row: dict[str, str]) -> None:
    policies = Policy.values if row["policy"] == "any" else [row["policy"]]
    outcomes = Lease.Outcome.values if row["outcome"] == "any" else [row["outcome"]]
    for policy in policies:
        for outcome in outcomes:
            assert transitions.settled_state(row["evidence"], policy=policy, outcome=outcome) == row["state"]


def test_the_document_covers_every_evidence_policy_and_outcome() -> None:
    covered = set()
    for row in rows_of(STATES, "Where proof leaves it"):
        policies = Policy.values if row["policy"] == "any" else [row["policy"]]
        outcomes = Lease.Outcome.values if row["outcome"] == "any" else [row["outcome"]]
        covered |= {(row["evidence"], policy, outcome) for policy in policies for outcome in outcomes}
    everything = {
        (evidence, policy, outcome)
        for evidence in Receipt.Evidence.values
        for policy in Policy.values
        for outcome in Lease.Outcome.values
    }
    assert covered == everything


# The only writers


WRITING = {
    *("create", "acreate", "get_or_create", "update_or_create", "bulk_create", "update", "aupdate", "bulk_update"),
    *("Lease", "replace"),
}
RAW = re.compile(r"(?is)\b(update|insert\s+into|merge\s+into|delete\s+from|copy)\s+(only\s+)?\"?leases_lease\b(?!_)")


def writers_of_state(source: str) -> list[str]:
    """Return what in this source could write the state of a lease, with its line."""
    tree = ast.parse(source)
    found = []
    for node in ast.walk(tree):
        what = _writes(node)
        if what:
            found.append(f"{getattr(node, 'lineno', 0)}: {what}")
    return found


def _writes(node: ast.AST) -> str:
    match node:
        case ast.Attribute(attr="state", ctx=ast.Store() | ast.Del()):
            return f"assigns {ast.unparse(node)}"
        case ast.Call(func=ast.Name(id="setattr"), args=[_, ast.Constant(value="state"), *_]):
            return ast.unparse(node)
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), keywords=keywords) if name in WRITING:
            for keyword in keywords:
                if keyword.arg == "state" or (keyword.arg in {"defaults", None} and _has_key(keyword.value)):
                    return f"passes state= to {ast.unparse(node.func)}"
            return ""
        case ast.Call(func=ast.Attribute(value=row, attr="save"), keywords=keywords) if any(
            keyword.arg == "update_fields" and _names_state(keyword.value) for keyword in keywords
        ):
            return f"saves the column state of {ast.unparse(row)}"
        case ast.Constant(value=str(text)) if RAW.search(text):
            return "writes the table in SQL"
        case _:
            return ""


def _has_key(value: ast.expr) -> bool:
    return isinstance(value, ast.Dict) and any(isinstance(k, ast.Constant) and k.value == "state" for k in value.keys)


def _names_state(value: ast.expr) -> bool:
    return any(isinstance(node, ast.Constant) and node.value == "state" for node in ast.walk(value))


@pytest.mark.parametrize(
    "source",
    [
        "lease.state = 'active'",
        "lease.state: str = 'active'",
        "lease.state += 'x'",
        "a, lease.state = 1, 'active'",
        "for lease.state in states: pass",
        "setattr(lease, 'state', 'active')",
        "Lease(state='active')",
        "models.Lease(company=c, state='active')",
        "Lease.objects.filter(pk=1).update(state='active')",
        "Lease.objects.create(**{'state': 'active'})",
        "Lease.objects.get_or_create(pk=1, defaults={'state': 'active'})",
        "lease.save(update_fields=['outcome', 'state'])",
        "cursor.execute('UPDATE leases_lease SET state = 1')",
        "cursor.execute('insert into leases_lease (id) values (1)')",
    ],
)
def test_the_scan_below_sees_a_writer(source: str) -> None:
    assert writers_of_state(source)


@pytest.mark.parametrize(
    "source",
    [
        "if lease.state == 'active': pass",
        "Lease.objects.filter(state='active').exists()",
        "Operation.objects.filter(pk=1).update(cancelled_at=now)",
        "cursor.execute('SELECT * FROM leases_lease WHERE id = 1 FOR SHARE')",
        "cursor.execute('UPDATE leases_leasehold SET state = 1')",
    ],
)
def test_the_scan_below_takes_no_reader_for_a_writer(source: str) -> None:
    assert writers_of_state(source) == []


OF_OTHER_TABLES = {
    "leases/recovering.py": {
        "assigns recovery.state",
        "saves the column state of recovery",
        "passes state= to Recovery.objects.filter(pk=recovery.pk).update",
    },
    "leases/continuing.py": {"passes state= to Continuation.objects.filter(pk=row.pk).update"},
}
"""Writers of a column of that name in another table."""


def _sources() -> Iterator[Path]:
    for package in ("leases", "cleanup", "paperclip_env"):
        for path in sorted((ROOT / package).rglob("*.py")):
            if "migrations" not in path.parts:
                yield path


def test_nothing_but_the_transitions_writes_the_state_of_a_lease() -> None:
    writers = {
        str(path.relative_to(ROOT)): {line.split(": ", 1)[1] for line in found}
        for path in _sources()
        if path != ROOT / "leases" / "transitions.py" and (found := writers_of_state(path.read_text(encoding="utf-8")))
    }
    assert writers == OF_OTHER_TABLES


def test_the_functions_of_the_table_are_the_writers_within_the_module() -> None:
    tree = ast.parse((ROOT / "leases" / "transitions.py").read_text(encoding="utf-8"))
    writing = {
        function.name
        for function in tree.body
        if isinstance(function, ast.FunctionDef)
        and any(
            isinstance(node, ast.Attribute)
            and node.attr == "state"
            and isinstance(node.ctx, ast.Store)
            and ast.unparse(node.value) == "lease"
            for node in ast.walk(function)
        )
    }
    through_lease_of = {
        function.name
        for function in tree.body
        if isinstance(function, ast.FunctionDef) and "_lease_of(operation, " in ast.unparse(function)
    } - {"_lease_of"}
    assert writing | through_lease_of == {function for _, _, function in transitions.TABLE}


# Wrong states, and half of a transaction


def _settled() -> Lease:
    owed = factories.teardown()
    with transaction.atomic():
        transitions.settle(owed.lease, owed, _receipt(owed.lease))
    return Lease.objects.get(pk=owed.lease_id)


def _receipt(lease: Lease, **values: Any) -> Receipt:
    return Receipt.objects.create(
        **{
            "lease": lease,
            "account_id": lease.account_id,
            "company_uuid": lease.company_id,
            "run_uuid": lease.run_id,
            "resource_id": lease.resource_id,
            "account_identity": lease.account_identity,
            "epoch": lease.epoch,
            "evidence": "destroyed",
            "attempt_id": uuid4(),
            **values,
        }
    )


GIVEN: dict[str, Callable[[], Lease]] = {
    "active": factories.lease,
    "pending_cleanup": lambda: factories.teardown().lease,
    "expired": _settled,
    "failed": lambda: factories.given_up().lease,
}


def _begin(lease: Lease) -> Any:
    return transitions.begin_teardown(
        lease, Demand(Verb.DELETE), outcome="succeeded", reason="released", actor=audit.SYSTEM
    )


def _merge(lease: Lease) -> Any:
    return transitions.merge_demand(lease, Demand(Verb.DELETE), actor=audit.SYSTEM, reason="again")


def _settle(lease: Lease) -> Any:
    obligation = lease.obligations.first() or Obligation(kind="teardown", verb="delete")
    return transitions.settle(lease, obligation, _receipt(lease))


def _settle_unverified(lease: Lease) -> Any:
    obligation = lease.obligations.first() or Obligation(kind="teardown", verb="delete")
    return transitions.settle_unverified(lease, obligation, actor="olga", reason="the provider is no more")


def _verified(lease: Lease) -> Any:
    obligation = lease.obligations.last() or Obligation(kind="verify_end", verb="delete")
    return transitions.verified(lease, obligation, _receipt(lease))


def _reopen_history(lease: Lease) -> Any:
    obligation = lease.obligations.last() or Obligation(kind="verify_end", verb="delete")
    return transitions.reopen_history(lease, obligation, started=None, reason="found_stopped", actor=audit.SYSTEM)


FROM = {
    _verified: "failed",
    _reopen_history: "failed",
    _begin: "active",
    _merge: "pending_cleanup",
    _settle: "pending_cleanup",
    _settle_unverified: "pending_cleanup",
}


OF_WHAT_IS_OVER = (_verified, _reopen_history)
"""They take expired and failed alike: see tests/scenarios/test_history.py."""


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("make", "given"),
    [(make, given) for make in FROM for given in GIVEN if make not in OF_WHAT_IS_OVER or given != "expired"],
    ids=lambda value: value if isinstance(value, str) else value.__name__.strip("_"),
)
def test_a_transition_refuses_a_lease_in_another_state_and_leaves_it(make: Callable[[Lease], Any], given: str) -> None:
    lease = GIVEN[given]()
    entries = ActivityEntry.objects.count()
    if given == FROM[make]:
        with transaction.atomic():
            make(lease)
        return
    with pytest.raises(ValueError, match=given), transaction.atomic():
        make(lease)
    assert Lease.objects.get(pk=lease.pk).state == given
    assert ActivityEntry.objects.count() == entries


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("make", FROM, ids=lambda make: make.__name__.strip("_"))
def test_a_transition_outside_a_transaction_is_refused_before_it_writes(make: Callable[[Lease], Any]) -> None:
    """Its lock, its row, its obligation and its audit entry are one commit or none."""
    lease = GIVEN[FROM[make]]()
    with pytest.raises(RuntimeError, match="in a transaction"):
        make(lease)
    assert Lease.objects.get(pk=lease.pk).state == FROM[make]


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("make", [transitions.attach, transitions.own_for_teardown], ids=lambda make: make.__name__)
def test_a_lease_is_not_made_outside_a_transaction_either(make: Callable[..., Any]) -> None:
    operation = factories.operation()
    details = {"expires_at": None} if make is transitions.attach else {"reason": "test"}
    with pytest.raises(RuntimeError, match="in a transaction"):
        make(operation, resource_id="r", actor=audit.SYSTEM, **details)
    assert Lease.objects.count() == 0


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("make", [transitions.attach, transitions.own_for_teardown], ids=lambda make: make.__name__)
def test_of_one_creation_two_leases_are_never_made(make: Callable[..., Any]) -> None:
    """S-057, S-073."""
    operation = factories.operation()
    with transaction.atomic():
        transitions.attach(operation, resource_id="r", expires_at=None, actor=audit.SYSTEM)
    details = {"expires_at": None} if make is transitions.attach else {"reason": "test"}
    with pytest.raises((IntegrityError, Obligation.DoesNotExist)), transaction.atomic():
        make(Operation.objects.get(pk=operation.pk), resource_id="r", actor=audit.SYSTEM, **details)
    assert Lease.objects.get().state == Lease.State.ACTIVE


@pytest.mark.django_db(transaction=True)
def test_what_an_operator_ended_unverified_is_owned_when_it_turns_up() -> None:
    operation = factories.operation()
    with transaction.atomic():
        locked = Operation.objects.select_for_update().get(pk=operation.pk)
        transitions.end_unverified(locked, operation.obligations.get(), actor="olga", reason="not to be found")
    operation.refresh_from_db()
    assert (operation.state, operation.obligations.get().closed_as) == ("unverified", "unverified")
    assert operation.resolved_at is not None
    with transaction.atomic():
        locked = Operation.objects.select_for_update().get(pk=operation.pk)
        transitions.own_for_teardown(locked, resource_id="r", reason="late", actor=audit.SYSTEM)
    operation.refresh_from_db()
    assert (operation.state, operation.resource_id, operation.resolved_at) == ("attached", "r", None)
    assert Lease.objects.get().state == Lease.State.PENDING_CLEANUP


@pytest.mark.django_db(transaction=True)
def test_an_ownership_for_teardown_never_passes_through_active() -> None:
    """S-044."""
    operation = factories.operation()
    with transaction.atomic():
        transitions.own_for_teardown(operation, resource_id="r", reason="acquire_rejected", actor=audit.SYSTEM)
    lease = Lease.objects.get()
    assert (lease.state, lease.policy, lease.outcome) == ("pending_cleanup", "ephemeral", "failed")
    assert lease.released_at is not None
    entries = ActivityEntry.objects.filter(subject_id=str(lease.pk)).values_list("action", flat=True)
    assert list(entries) == ["lease.owned_for_teardown"]


@pytest.mark.django_db(transaction=True)
def test_a_receipt_of_another_lease_or_another_epoch_settles_nothing() -> None:
    """S-153, domain I-4."""
    owed = factories.teardown(factories.lease(epoch=2))
    other = factories.teardown(factories.lease(owed.lease.environment))
    for receipt in (_receipt(other.lease), _receipt(owed.lease, epoch=1)):
        with pytest.raises(ValueError, match="proves nothing"), transaction.atomic():
            transitions.settle(owed.lease, owed, receipt)
    owed.refresh_from_db()
    assert owed.is_open
    assert Lease.objects.get(pk=owed.lease_id).state == Lease.State.PENDING_CLEANUP


@pytest.mark.django_db(transaction=True)
def test_a_settle_without_a_sufficient_receipt_does_not_commit() -> None:
    """The function trusts its caller about the lock; the database trusts nobody about the proof."""
    owed = factories.teardown()
    stopped = _receipt(owed.lease, evidence="stopped")
    stopped.evidence = "destroyed"  # in memory only
    with pytest.raises(IntegrityError), transaction.atomic():
        transitions.settle(owed.lease, owed, stopped)
    owed.refresh_from_db()
    assert owed.is_open


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("make", FROM, ids=lambda make: make.__name__.strip("_"))
def test_a_transition_whose_audit_entry_cannot_be_written_does_not_happen(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[Lease], Any]
) -> None:
    lease = factories.teardown(verb="stop_or_delete").lease if make is _merge else GIVEN[FROM[make]]()

    def refuse(*_: Any, **__: Any) -> None:
        raise DatabaseError("no space left on device")

    before = list(Obligation.objects.values())
    monkeypatch.setattr(transitions.audit, "record", refuse)
    with pytest.raises(DatabaseError), transaction.atomic():
        make(lease)
    assert Lease.objects.get(pk=lease.pk).state == FROM[make]
    assert list(Obligation.objects.values()) == before


def test_the_strength_of_verbs_is_total() -> None:
    assert set(demands._STRENGTH) == set(Verb)
    assert len(set(demands._STRENGTH.values())) == len(Verb)
