"""Credentials: which row decides, what may be read, and what is kept of a value."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from leases import calling, credentials
from leases.credentials import CredentialUnusable, SecretUnavailable
from leases.models import ActivityEntry, Company, Credential, Obligation, Operation
from providers.stores import Failed, Inactive, NotFound, Value
from tests import factories
from tests.vault import Vault, installed

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def vault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Vault]]:
    with installed(tmp_path, monkeypatch) as store:
        yield store


def made(company: Company, reference: str = "vault:acme", **values: Any) -> Credential:
    return Credential.objects.create(**{"company": company, "name": f"key {uuid4()}", "reference": reference, **values})


def of(credential: Credential, **values: Any) -> Operation:
    """A creation that was asked with this credential."""
    account = factories.account(credential.company, credential=credential)
    return factories.operation(
        factories.environment(account),
        **{"credential_uuid": credential.pk, "credential_reference": credential.reference, **values},
    )


# Digests


def test_a_digest_is_keyed_and_says_nothing_of_the_value(settings: Any) -> None:
    one = credentials.digest("hunter2")
    assert (len(one), "hunter2" in one, credentials.digest("hunter3") == one) == (64, False, False)
    settings.SECRET_KEY = "another"
    assert credentials.digest("hunter2") != one


def test_a_digest_made_under_a_former_key_still_counts(settings: Any) -> None:
    before, recorded = settings.SECRET_KEY, credentials.digest("hunter2")
    settings.SECRET_KEY = "another"
    assert not credentials.matches("hunter2", recorded)
    settings.SECRET_KEY_FALLBACKS = [before]
    assert credentials.matches("hunter2", recorded)
    assert not credentials.matches("hunter3", recorded)
    assert not credentials.matches("", "")


def test_what_was_seen_to_work_is_recorded_and_only_news_is_written(settings: Any) -> None:
    row = made(factories.company())
    first = credentials.learned(row.pk, "hunter2")
    row.refresh_from_db()
    assert first == row.digest == credentials.digest("hunter2")
    assert ActivityEntry.objects.count() == 0  # the first value is no change
    former, settings.SECRET_KEY = settings.SECRET_KEY, "another"
    settings.SECRET_KEY_FALLBACKS = [former]
    assert credentials.learned(row.pk, "hunter2") == first  # the same value keeps its digest, whatever the key
    second = credentials.learned(row.pk, "hunter3")
    row.refresh_from_db()
    assert second == row.digest != first
    assert ActivityEntry.objects.get().action == "credential.value_changed"
    assert credentials.learned(uuid4(), "hunter2") == ""


def test_a_value_that_works_wakes_what_waited_for_its_store(django_assert_num_queries: Any) -> None:
    row = made(factories.company())
    operation = of(row)
    credentials.learned(row.pk, "hunter2")
    with django_assert_num_queries(2):
        credentials.learned(row.pk, "hunter2")  # nothing waits: nothing is written
    recovery = operation.obligations.get()
    for why, woken in [("credential_missing", True), ("credential_inactive", True), ("credential_changed", False)]:
        Obligation.objects.filter(pk=recovery.pk).update(due_at=None, quiet=why)
        credentials.learned(row.pk, "hunter2")
        recovery.refresh_from_db()
        assert (recovery.quiet == "") is woken, why


def test_accepting_writes_the_digest_of_today_onto_the_operation() -> None:
    row = made(factories.company())
    operation = of(row, credential_digest=credentials.digest("hunter2"))
    credentials.learned(row.pk, "hunter3")
    credentials.accept(operation)
    operation.refresh_from_db()
    assert operation.credential_digest == credentials.digest("hunter3")
    # Nothing newer was seen to work, and a person says that another one will do: whatever the store answers.
    credentials.accept(operation)
    operation.refresh_from_db()
    assert operation.credential_digest == ""
    credentials.accept(operation)
    assert operation.credential_digest == credentials.digest("hunter3")
    Operation.objects.filter(pk=operation.pk).update(credential_uuid=uuid4(), credential_reference="env:GONE")
    operation.refresh_from_db()
    credentials.accept(operation)
    operation.refresh_from_db()
    assert operation.credential_digest == credentials.digest("hunter3")


# Which row decides


def test_the_row_of_that_id_decides_and_its_reference_of_today_is_read(vault: type[Vault]) -> None:
    row = made(factories.company(), "vault:old")
    operation = of(row, endpoint={"state_dir": "/somewhere"})
    Credential.objects.filter(pk=row.pk).update(reference="vault:new")
    vault.answers["new"] = Value("hunter2")
    prepared = calling.opening(operation)
    assert prepared.secret is not None
    assert prepared.secret.value(prepared.read()) == "hunter2"  # type: ignore[arg-type]
    assert vault.reads == ["new"]


def test_one_made_again_stands_in_for_a_deleted_one_an_active_one_first() -> None:
    company = factories.company()
    operation = of(made(company), credential_uuid=uuid4())
    Credential.objects.all().update(reference="vault:elsewhere")
    other_company = made(factories.company())
    assert credentials.standing(operation) is None
    disabled = made(company, status="disabled")
    assert _id_of(operation) == disabled.pk
    active = made(company)
    assert _id_of(operation) == active.pk != other_company.pk


def _id_of(operation: Operation) -> Any:
    found = credentials.standing(operation)
    assert found is not None
    return found.id


D2, D3 = "2" * 64, "3" * 64


@pytest.mark.parametrize(
    ("row", "expected", "why"),
    [
        ({}, "", None),
        ({"digest": D2}, "", None),
        ({"digest": D2}, D2, None),
        ({"digest": ""}, D2, None),
        ({"digest": D3}, D2, "credential_changed"),
        ({"status": "disabled"}, "", "credential_inactive"),
        ({"status": "archived"}, "", "credential_inactive"),
        ({"status": "disabled", "digest": D3}, D2, "credential_inactive"),
        (None, "", "credential_missing"),
        (None, D2, "credential_missing"),
    ],
)
def test_the_row_decides_before_anything_is_read(
    vault: type[Vault], row: dict[str, str] | None, expected: str, why: str | None
) -> None:
    """S-066, S-067, S-069."""
    credential = made(factories.company())
    operation = of(credential)
    if row is None:
        Operation.objects.filter(pk=operation.pk).update(credential_uuid=uuid4(), credential_reference="vault:x")
        operation.refresh_from_db()
    else:
        Credential.objects.filter(pk=credential.pk).update(**row)
    if why is None:
        assert credentials.usable(operation, expected_digest=expected) is not None
    else:
        with pytest.raises(CredentialUnusable) as told:
            credentials.usable(operation, expected_digest=expected)
        assert told.value.why == why
    assert vault.reads == []


@pytest.mark.parametrize(
    ("store", "answer", "why"),
    [
        ("vault", NotFound(), "credential_missing"),
        ("vault", Inactive(), "credential_inactive"),
        ("vault", Failed("answered 503"), None),
        ("vault", Value("hunter3"), "credential_changed"),
        ("own", NotFound(), None),
        ("own", Inactive(), None),
        ("own", Failed("answered 503"), None),
        ("own", Value("hunter3"), None),
    ],
)
def test_only_what_a_shared_store_says_of_the_secret_is_for_a_person(
    vault: type[Vault], store: str, answer: Any, why: str | None
) -> None:
    operation = of(made(factories.company(), f"{store}:acme"))
    secret = credentials.usable(operation, expected_digest=credentials.digest("hunter2"))
    assert secret is not None
    with pytest.raises(SecretUnavailable) as told:
        secret.value(answer)
    assert getattr(told.value, "why", None) == why
    assert "hunter" not in str(told.value)
    assert secret.value(Value("hunter2")) == "hunter2"


def test_a_store_that_is_not_installed_here_is_this_processs_unreadiness() -> None:
    operation = of(made(factories.company(), "unheard:acme"))
    with pytest.raises(SecretUnavailable) as told:
        credentials.usable(operation)
    assert not isinstance(told.value, CredentialUnusable)


def test_a_row_that_names_no_credential_is_called_without_a_secret() -> None:
    operation = factories.operation()
    assert credentials.usable(operation) is None
