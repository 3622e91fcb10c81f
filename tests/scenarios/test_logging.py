"""N: what is written where people read. Raw text of a provider or a database may carry secrets; kinds do not."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from django.db import DatabaseError

import leases
from cleanup import claims
from leases.errors import AcquireUncertain
from leases.models import ActivityEntry, Attempt
from providers.contract import EXCERPT_LIMIT, ErrorKind, ProviderError, redact
from tests.scenarios.steps import acquired, fails, owed, released, sweep
from tests.stage import Rehearsal

SECRET = "dtn_0123456789abcdef"


def _says_it_aloud(_: str) -> None:
    raise RuntimeError(f"401 for https://user:{SECRET}@example.org")


def _everything_stored() -> str:
    return repr([*Attempt.objects.values(), *ActivityEntry.objects.values()])


def test_an_adapter_that_raises_what_it_must_not_is_logged_by_place_and_not_by_text(
    rehearsal: Rehearsal, caplog: pytest.LogCaptureFixture
) -> None:
    lease = released(rehearsal)
    rehearsal.world.hooks["inspect"] = _says_it_aloud
    assert sweep(rehearsal) == {"failed": 1}
    assert owed(lease).last_error_kind == "protocol"
    assert "_says_it_aloud" in caplog.text
    assert "RuntimeError" in caplog.text
    assert SECRET not in caplog.text
    assert SECRET not in _everything_stored()


def test_a_mistake_of_ours_is_logged_by_place_and_not_by_text(
    rehearsal: Rehearsal, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-210."""
    released(rehearsal)
    monkeypatch.setattr("cleanup.evidence.fenced", _says_it_aloud)
    assert sweep(rehearsal) == {"failed": 1}
    assert "_says_it_aloud" in caplog.text
    assert SECRET not in caplog.text
    assert SECRET not in _everything_stored()


def test_a_database_that_refuses_a_settle_is_logged_by_kind_and_ends_no_sweep(
    rehearsal: Rehearsal, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-210, S-211: neither the cause nor the raw error."""
    released(rehearsal)
    good = released(rehearsal)
    original = claims.postpone

    def refuse(claim: claims.Claim, *args: Any, **options: Any) -> bool:
        if claim.lease_id != good.pk:
            raise DatabaseError(f"DETAIL: failing row contains ({SECRET})")
        return original(claim, *args, **options)

    monkeypatch.setattr(claims, "postpone", refuse)
    rehearsal.world.hooks["inspect"] = lambda subject: (
        fails(ErrorKind.REFUSED)(subject) if subject != good.resource_id else None
    )
    assert sweep(rehearsal) == {"unwritten": 1, "proven": 1}
    assert "DatabaseError" in caplog.text
    assert SECRET not in caplog.text


def test_the_text_of_a_provider_is_stored_as_a_redacted_bounded_excerpt(rehearsal: Rehearsal) -> None:
    lease = released(rehearsal)
    said = f"denied: Authorization: Bearer {SECRET}, api_key={SECRET}; " + "x" * 1000
    rehearsal.world.hooks["inspect"] = fails(ErrorKind.REFUSED, message=said)
    assert sweep(rehearsal) == {"failed": 1}
    excerpt = Attempt.objects.get(obligation=owed(lease)).error_excerpt
    assert excerpt.startswith("denied: ")
    assert len(excerpt) <= EXCERPT_LIMIT
    assert SECRET not in _everything_stored()


def test_a_caller_is_told_the_kind_and_the_redacted_text(rehearsal: Rehearsal, caplog: Any) -> None:
    """S-211: of an acquire too."""
    rehearsal.world.after["create"] = fails(ErrorKind.SERVER, message=f"token={SECRET}")
    with pytest.raises(AcquireUncertain) as told:
        acquired(rehearsal)
    assert told.value.code == "server"
    assert SECRET not in str(told.value)
    assert SECRET not in caplog.text
    assert SECRET not in _everything_stored()


@pytest.mark.parametrize(
    "text",
    [
        f"Authorization: Bearer {SECRET}",
        f"authorization={SECRET}",
        f'{{"api_key": "{SECRET}"}}',
        f"X-API-Key: {SECRET}",
        f"https://user:{SECRET}@example.org/path",
        f"password={SECRET}&next=1",
        f"token {SECRET}",
        f"secret:{SECRET}",
    ],
)
def test_what_looks_like_a_secret_is_redacted(text: str) -> None:
    assert SECRET not in redact(text)
    assert SECRET not in ProviderError(ErrorKind.SERVER, text).excerpt
    assert SECRET not in str(ProviderError(ErrorKind.SERVER, text))


def test_an_ordinary_life_logs_no_error(rehearsal: Rehearsal, caplog: pytest.LogCaptureFixture) -> None:
    lease = acquired(rehearsal)
    leases.bridge(lease.pk).execute(["true"])
    leases.release(lease.pk)
    assert sweep(rehearsal) == {"proven": 1}
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_the_journal_holds_references_and_no_secret(rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-021, domain 2.5."""
    monkeypatch.setenv("REHEARSAL_KEY", SECRET)
    from leases.models import Credential, Lease, Obligation, Operation

    rehearsal.account.credential = Credential.objects.create(
        company=rehearsal.company, name="key", reference="env:REHEARSAL_KEY"
    )
    rehearsal.account.save()
    released(rehearsal)
    sweep(rehearsal)
    stored = repr([list(model.objects.values()) for model in (Credential, Lease, Obligation, Operation)])
    assert "env:REHEARSAL_KEY" in stored
    assert SECRET not in stored + _everything_stored()
