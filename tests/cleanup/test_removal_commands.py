"""`manage.py delete_environment`, `close_company` and `archive_credential`, as an operator at a shell uses them."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest

from leases.models import ActivityEntry, Company, Credential, Environment, Lease
from tests import factories
from tests.cleanup.test_decision_commands import _json, _run
from tests.scenarios.steps import snapshot

pytestmark = pytest.mark.django_db(transaction=True)

WHY = ("--reason", "no longer needed", "--actor", "olga")


def _credential(company: Company) -> Credential:
    return Credential.objects.create(company=company, name="key", reference="env:KEY")


def _three() -> list[tuple[str, Any]]:
    return [
        ("delete_environment", factories.environment()),
        ("close_company", factories.company()),
        ("archive_credential", _credential(factories.company())),
    ]


@pytest.mark.parametrize("which", range(3))
def test_a_rehearsal_writes_nothing_and_the_real_thing_is_logged(which: int) -> None:
    command, row = _three()[which]
    before = snapshot()
    status, told = _run(command, row.pk, "--dry-run")
    assert (status, "Nothing stands in the way. Nothing was written." in told) == (0, True)
    assert _json(command, row.pk, "--dry-run")[1]["total"] == 0
    assert snapshot() == before
    status, found = _json(command, row.pk, *WHY)
    assert (status, found["dry_run"]) == (0, False)
    entry = ActivityEntry.objects.filter(subject_id=str(row.pk)).latest("pk")
    assert (entry.actor, entry.reason) == ("olga", "no longer needed")


@pytest.mark.parametrize("which", range(3))
def test_wrong_arguments_end_with_two(which: int) -> None:
    command, row = _three()[which]
    assert _run(command, row.pk)[0] == 2
    assert _run(command, uuid4(), *WHY)[0] == 2
    assert _run(command, uuid4(), "--dry-run")[0] == 2


def test_what_stands_in_the_way_is_listed_and_ends_with_one() -> None:
    company = factories.company()
    credential = _credential(company)
    where = factories.environment(factories.account(company))
    lease = factories.stopped(factories.lease(where, credential_uuid=credential.pk))
    before = snapshot()
    for command, row, hint in (
        ("delete_environment", where, "With --consent it goes all the same."),
        ("close_company", company, ""),
        ("archive_credential", credential, "With --force it goes all the same."),
    ):
        for how in (("--dry-run",), WHY):
            status, told = _run(command, row.pk, *how)
            assert status == 1
            assert f"lease {lease.pk}: " in told
            assert (hint in told) and ("With --" in told) == bool(hint)
            status, found = _json(command, row.pk, *how)
            assert (status, found["refused"], found["total"]) == (1, "blocked", 1)
            assert found["blockers"][0]["id"] == str(lease.pk)
    assert snapshot() == before


def test_consent_and_force_are_said_on_the_command_line() -> None:
    company = factories.company()
    credential = _credential(company)
    where = factories.environment(factories.account(company))
    lease = factories.stopped(factories.lease(where, credential_uuid=credential.pk))
    before = snapshot()
    status, told = _run("delete_environment", where.pk, "--consent", "--dry-run")
    assert (status, "Would go all the same" in told) == (0, True)
    assert snapshot() == before
    assert _json("delete_environment", where.pk, "--consent", *WHY)[1]["owing"] == [str(lease.pk)]
    assert not Environment.objects.exists()
    assert Lease.objects.get().state == "pending_cleanup"
    assert _run("archive_credential", credential.pk, "--force", "--delete", *WHY)[0] == 0
    assert not Credential.objects.exists()
