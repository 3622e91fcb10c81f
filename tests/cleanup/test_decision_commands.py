"""`manage.py adopt`, `recheck` and `settle_unverified`, as an operator at a shell uses them."""

from __future__ import annotations

import json
from io import StringIO
from typing import Any
from uuid import uuid4

import pytest
from django.core.management import CommandError, call_command

from leases.errors import AcquireUncertain
from leases.models import ActivityEntry, Lease, Obligation, Operation
from providers.contract import ErrorKind
from tests import factories
from tests.scenarios.steps import acquired, fails, owed, released, snapshot, state, sweep
from tests.stage import Rehearsal

WHY = ("--reason", "found it by hand")


def _run(command: str, *arguments: Any) -> tuple[int, str]:
    """Return the exit status and what was printed, or the sentence of the refusal."""
    out = StringIO()
    try:
        call_command(command, *map(str, arguments), stdout=out)
    except CommandError as refused:
        return refused.returncode, str(refused)
    except SystemExit as ended:
        return int(ended.code or 0), out.getvalue()
    return 0, out.getvalue()


def _json(command: str, *arguments: Any) -> tuple[int, Any]:
    status, text = _run(command, *arguments, "--json")
    return status, json.loads(text)


def _lost(rehearsal: Rehearsal) -> tuple[Operation, str]:
    rehearsal.world.after["create"] = fails(ErrorKind.TIMEOUT)
    with pytest.raises(AcquireUncertain):
        acquired(rehearsal)
    del rehearsal.world.after["create"]
    (resource_id,) = rehearsal.world.boxes
    return Operation.objects.get(), resource_id


def test_a_sandbox_is_adopted_and_the_log_says_by_whom(rehearsal: Rehearsal) -> None:
    operation, resource_id = _lost(rehearsal)
    status, told = _run("adopt", operation.pk, resource_id, *WHY, "--actor", "olga")
    lease = Lease.objects.get()
    assert (status, told) == (0, f"Lease {lease.pk} owns {resource_id} now, and owes its teardown.\n")
    entry = ActivityEntry.objects.get(action="operation.adopted")
    assert (entry.actor, entry.reason) == ("olga", "found it by hand")
    assert sweep(rehearsal) == {"proven": 1}


def test_who_decides_is_the_user_of_the_process_unless_told(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("getpass.getuser", lambda: "ops")
    lease = released(rehearsal)
    assert _run("recheck", owed(lease).pk, *WHY)[0] == 0
    assert ActivityEntry.objects.get(action="obligation.retry_requested").actor == "ops (manage.py)"


def test_a_dry_run_verifies_against_the_provider_and_writes_nothing(rehearsal: Rehearsal) -> None:
    operation, resource_id = _lost(rehearsal)
    before = snapshot()
    rehearsal.world.calls.clear()
    assert _json("adopt", operation.pk, resource_id, "--dry-run") == (
        0,
        {
            "dry_run": True,
            "operation": str(operation.pk),
            "resource_id": resource_id,
            "seen": "running",
            "told": f"{resource_id} (running) is this creation's sandbox; it could be adopted. Nothing was written.",
        },
    )
    assert [name for name, _ in rehearsal.world.calls] == ["identify", "inspect"]
    rehearsal.world.boxes.clear()
    status, told = _run("adopt", operation.pk, resource_id, "--dry-run")
    assert (status, told.startswith("refused: the provider has no such sandbox")) == (1, True)
    assert snapshot() == before


def test_a_refusal_is_an_object_too(rehearsal: Rehearsal) -> None:
    operation, resource_id = _lost(rehearsal)
    rehearsal.world.hooks["inspect"] = fails(ErrorKind.TIMEOUT)
    status, told = _json("adopt", operation.pk, resource_id, *WHY)
    assert (status, told["refused"]) == (1, "timeout")
    assert "could not be asked" in told["told"]


@pytest.mark.parametrize("subject", ["obligation", "operation"])
def test_a_quiet_row_is_looked_at_again(rehearsal: Rehearsal, subject: str) -> None:
    operation, _ = _lost(rehearsal)
    Obligation.objects.update(due_at=None, quiet="creation_not_found")
    named = owed(operation).pk if subject == "obligation" else operation.pk
    before = snapshot()
    status, told = _run("recheck", named, "--dry-run")
    assert (status, "would be tried now" in told) == (0, True)
    assert snapshot() == before
    status, told = _json("recheck", named, *WHY)
    assert (status, told["kind"], told["quiet"]) == (0, "recover_creation", "creation_not_found")
    assert sweep(rehearsal) == {"proven": 2}


def test_a_debt_is_ended_without_proof_only_by_its_exact_name(rehearsal: Rehearsal) -> None:
    lease = released(rehearsal)
    row = owed(lease)
    before = snapshot()
    status, told = _json("settle_unverified", row.pk, "--dry-run")
    assert (status, told["confirm"]) == (0, lease.resource_id)
    status, sentence = _run("settle_unverified", row.pk, *WHY, "--confirm", "yes")
    assert (status, "not the exact name" in sentence) == (1, True)
    assert _run("settle_unverified", row.pk, *WHY)[0] == 1
    assert snapshot() == before
    status, sentence = _run("settle_unverified", row.pk, *WHY, "--confirm", lease.resource_id)
    assert (status, "the debt stays visible" in sentence) == (0, True)
    assert state(lease) == "failed"
    assert _run("settle_unverified", row.pk, *WHY, "--confirm", lease.resource_id)[0] == 1


def test_a_dry_run_says_until_when_an_attempt_holds_the_row(rehearsal: Rehearsal) -> None:
    row = factories.claimed(owed(released(rehearsal)))
    status, sentence = _run("settle_unverified", row.pk, "--dry-run")
    assert (status, f"protected until {row.due_at:%Y-%m-%d %H:%M:%S} UTC" in sentence) == (1, True)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("command", "arguments", "told"),
    [
        ("adopt", (uuid4(), "box", *WHY), "there is no operation"),
        ("adopt", ("acme", "box", *WHY), "invalid UUID value: 'acme'"),
        ("adopt", (uuid4(), "box"), "--reason is required"),
        ("adopt", (uuid4(), "box", "--reason", "  "), "--reason is required"),
        ("adopt", (uuid4(),), "resource_id"),
        ("recheck", ("999999", *WHY), "there is no obligation 999999"),
        ("recheck", (uuid4(), *WHY), "there is no operation"),
        ("recheck", ("everything", *WHY), "'everything' is neither"),
        ("recheck", ("1",), "--reason is required"),
        ("settle_unverified", ("999999", *WHY), "there is no obligation 999999"),
        ("settle_unverified", ("box", *WHY), "invalid int value: 'box'"),
        ("settle_unverified", ("1", "--confirm", "box"), "--reason is required"),
    ],
)
def test_wrong_arguments_exit_with_2(command: str, arguments: tuple[Any, ...], told: str) -> None:
    status, sentence = _run(command, *arguments)
    assert told in sentence
    by_argparse = sentence.startswith("Error: ")  # which exits with 2 by itself, at a shell
    assert status == (1 if by_argparse else 2)


def test_an_id_that_cannot_be_one_exits_with_2(rehearsal: Rehearsal) -> None:
    operation, _ = _lost(rehearsal)
    assert _run("adopt", operation.pk, "a\nb", *WHY)[0] == 2
    assert _run("recheck", owed(operation).pk, "--reason", "x" * 501)[0] == 2
