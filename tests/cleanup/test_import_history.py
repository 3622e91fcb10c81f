"""`manage.py import_history`: all of a file or nothing, and every bad line by its number."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from django.core.management import CommandError, call_command

from leases import history
from leases.models import ActivityEntry, Lease, Obligation, ProviderAccount
from tests import factories
from tests.scenarios.steps import snapshot

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def account() -> ProviderAccount:
    return factories.account()


def line(owner: ProviderAccount, **values: Any) -> dict[str, Any]:
    return {
        "id": str(uuid4()),
        "account": str(owner.pk),
        "resource_id": f"box-{uuid4()}",
        "acquired_at": "2026-01-01T08:00:00Z",
        "released_at": "2026-01-01T09:00:00+00:00",
        **values,
    }


def written(path: Path, *lines: Any) -> Path:
    file = path / "history.jsonl"
    file.write_bytes(b"\n".join(one if isinstance(one, bytes) else json.dumps(one).encode() for one in lines) + b"\n\n")
    return file


def run(*arguments: Any) -> tuple[int, str]:
    out = StringIO()
    try:
        call_command("import_history", *map(str, arguments), stdout=out)
    except CommandError as refused:
        return refused.returncode, str(refused)
    except SystemExit as ended:
        return int(ended.code or 0), out.getvalue()
    return 0, out.getvalue()


def test_a_file_is_imported_and_again_and_nothing_is_twice(account: ProviderAccount, tmp_path: Path) -> None:
    lines = [line(account), line(account, outcome="succeeded", policy="reuse_by_environment", resource_name="old-1")]
    file = written(tmp_path, *lines)
    assert run(file, "--actor", "olga") == (
        0,
        "2 imported, 0 were there already. Their sandboxes are looked for from now on.\n",
    )
    made = [Lease.objects.get(pk=one["id"]) for one in lines]
    assert [lease.state for lease in made] == ["failed", "expired"]
    assert [row.verb for row in history.unverified().order_by("pk")] == ["delete", "stop_or_delete"]
    assert set(ActivityEntry.objects.values_list("action", "actor")) == {("lease.imported", "olga")}
    before = snapshot()
    assert run(file)[1].startswith("0 imported, 2 were there already.")
    assert snapshot() == before


def test_a_dry_run_checks_all_and_writes_nothing(account: ProviderAccount, tmp_path: Path) -> None:
    before = snapshot()
    assert run(written(tmp_path, line(account)), "--dry-run") == (
        0,
        "1 would be imported, 0 are there already.\n",
    )
    assert snapshot() == before


BAD: dict[str, tuple[Any, str]] = {
    "no JSON": (b"{", "JSON"),
    "no object": ([1], "object"),
    "no text": (b"\xff\xfe", "is no UTF-8 text"),
    "a field too many": ({"secret": "x"}, "secret: is no field of a lease that is imported"),
    "no id": ({"id": None}, "id: "),
    "no account of ours": ({"account": str(uuid4())}, "account: there is no"),
    "no sandbox": ({"resource_id": ""}, "resource_id: not a usable resource id"),
    "a sandbox that no provider names": ({"resource_id": "a\nb"}, "resource_id: not a usable resource id"),
    "NUL": ({"config": {"a": "\x00"}}, "text cannot have NUL"),
    "a lone surrogate": ({"resource_name": "\ud800"}, ""),
    "a name too long": ({"resource_name": "x" * 64}, "resource_name: "),
    "an unknown policy": ({"policy": "forever"}, "policy: "),
    "an unknown verb": ({"verb": "explode"}, "verb: "),
    "a time without a zone": ({"acquired_at": "2026-01-01T08:00:00"}, "acquired_at: "),
    "an endless time": ({"released_at": "infinity"}, "released_at: "),
    "an end before its beginning": ({"released_at": "2025-01-01T08:00:00Z"}, "released_at: is before acquired_at"),
    "an end that has not come": ({"released_at": "2999-01-01T08:00:00Z"}, "released_at: has not come yet"),
    "another account's identity": ({"account_identity": "somebody else"}, "account_identity: is not"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_a_bad_line_is_named_and_nothing_is_written_of_the_whole_file(
    account: ProviderAccount, tmp_path: Path, case: str, dry: tuple[str, ...]
) -> None:
    values, why = BAD[case]
    bad = line(account, **values) if isinstance(values, dict) else values
    before = snapshot()
    status, text = run(written(tmp_path, line(account), bad, line(account)), *dry)
    assert status == 1
    assert text.startswith("line 2: ")
    assert why in text
    assert text.endswith("Refused: 1 bad line. Nothing was written.\n")
    assert snapshot() == before


def test_machines_read_one_object(account: ProviderAccount, tmp_path: Path) -> None:
    status, text = run(written(tmp_path, line(account), {}, line(account)), "--json")
    told = json.loads(text)
    assert (status, told["imported"], [one["line"] for one in told["refused"]]) == (1, 2, [2])
    assert not Lease.objects.exists()


def test_an_id_that_says_something_else_is_refused(account: ProviderAccount, tmp_path: Path) -> None:
    one = line(account)
    status, text = run(written(tmp_path, one, {**one, "resource_id": "another"}))
    assert (status, "line 2: id: lease" in text, Obligation.objects.count()) == (1, True, 0)


def test_many_bad_lines_are_counted(account: ProviderAccount, tmp_path: Path) -> None:
    _, text = run(written(tmp_path, *({} for _ in range(25))))
    assert "and 5 more bad lines" in text


def test_a_file_that_is_not_there_is_a_wrong_argument(tmp_path: Path) -> None:
    assert run(tmp_path / "none")[0] == 2
