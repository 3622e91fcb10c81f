"""A restored backup, a copy, a failover, an emptied broker: with real servers, processes and sandboxes. Slow."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.restoring import Site, another, site, under_another_name

pytestmark = pytest.mark.timeout(900)
"""Each step is a process or a server that starts."""


@pytest.fixture(scope="module")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Site, Path]]:
    directory = tmp_path_factory.mktemp("site")
    with site(directory) as made:
        made.copy_to(directory / "empty")
        yield made, directory / "empty"


@pytest.fixture
def fresh(migrated: tuple[Site, Path], tmp_path: Path) -> Iterator[Site]:
    """The installation with an empty database, an empty broker, and an empty state of its beat."""
    made, empty = migrated
    made.restore_from(empty)
    made.directory, made.kept = tmp_path, tmp_path / "kept"
    with redis.Redis.from_url(made.broker_url) as broker:
        broker.flushall()
    yield made
    made.python(_ALL.format(state=tmp_path / "sandboxes") + "for one in found: provider.delete(one, within=20)")


_ALL = """
provider = open_provider("local", {{"state_dir": "{state}"}})
found = [one.resource_id for one in provider.list({{}}, within=20).resources]
"""

_MADE = """
company = Company.objects.create(name="c")
here = {{"state_dir": "{state}"}}
account = ProviderAccount.objects.create(company=company, name="here", provider="local", endpoint=here)
environment = Environment.objects.create(company=company, account=account, name="e", policy="{policy}")
def acquire():
    run = Run.objects.create(company=company, status="running")
    return leases.acquire(environment.pk, company_id=company.pk, run_id=run.pk)
"""

_AGAIN = """
company, environment = Company.objects.get(), Environment.objects.get()
def acquire():
    run = Run.objects.create(company=company, status="running")
    return leases.acquire(environment.pk, company_id=company.pk, run_id=run.pk)
"""


def running(where: Site) -> set[str]:
    """The sandboxes that are there and run, as the provider says."""
    return set(
        where.python(
            _ALL.format(state=where.directory / "sandboxes")
            + "told = [one for one in found if type(provider.inspect(one, within=20)).__name__ == 'Running']"
        )
    )


def quiet(where: Site) -> set[tuple[str, str]]:
    """What is quiet, of which lease."""
    told: list[Any] = where.python(
        "told = list(Obligation.objects.filter(quiet='observing').values_list('kind', 'lease_id'))"
    )
    return {(kind, lease) for kind, lease in told}


def test_a_restored_backup_destroys_nothing_until_a_person_trusts_it(fresh: Site, tmp_path: Path) -> None:
    """In the backup one lease owes its teardown, and the sandbox of another is kept.

    Since then the kept one was started again, for a run that the backup does not know; and its time is over.
    """
    leased = fresh.python(
        _MADE.format(state=tmp_path / "sandboxes", policy="reuse_by_environment")
        + """
kept = acquire(); leases.release(kept.pk)
from cleanup.engine import Engine
Engine().sweep(account.pk)
Environment.objects.update(policy="ephemeral")
owing = acquire(); leases.release(owing.pk)
Environment.objects.update(policy="reuse_by_environment")
told = {"kept": kept.pk, "box": kept.resource_id, "owing": owing.pk, "owed_box": owing.resource_id}
"""
    )
    fresh.beat()
    fresh.copy_to(tmp_path / "backup")
    assert "OBSERVING" not in fresh.beat(), "the server was only started anew"
    in_use = fresh.python(_AGAIN + "told = acquire().resource_id")
    assert in_use == leased["box"], "the kept sandbox was started again"
    assert fresh.manage("sweep").returncode == 0
    assert running(fresh) == {in_use}
    fresh.beat()
    mark = fresh.installation()

    fresh.restore_from(tmp_path / "backup")
    # It runs on, far beyond the mark, and what it keeps falls due, before anybody looks at it.
    fresh.execute(
        "UPDATE leases_lease SET kept_until = now() WHERE state = 'released'",
        "CREATE TABLE much AS SELECT g, repeat('x', 500) FROM generate_series(1, 4000) g",
        "SELECT pg_switch_wal()",
        "CHECKPOINT",
    )
    assert fresh.execute("SELECT (pg_current_wal_lsn() - '0/0')::bigint") > mark["watermark_position"]
    assert fresh.manage("sweep").returncode == 1
    restored = fresh.installation()
    assert (restored["observing_why"], restored["observed_mark_at"]) == ("behind", mark["watermark_at"])
    assert quiet(fresh) == {("teardown", leased["owing"]), ("dispose", leased["kept"])}
    assert running(fresh) == {in_use}
    assert fresh.manage("owed").stdout.startswith("OBSERVING since ")
    assert "OBSERVING" in fresh.beat()

    # An acquire makes a sandbox, although one is kept; its release is paid.
    made, state = fresh.python(
        _AGAIN
        + """
lease = acquire(); leases.release(lease.pk, disposition="destroy")
from cleanup.engine import Engine
Engine().sweep(environment.account_id)
lease.refresh_from_db()
told = [lease.resource_id, lease.state]
"""
    )
    assert (made != in_use, state) == (True, "expired")
    assert running(fresh) == {in_use}
    files = list(fresh.kept.glob("*.json"))
    assert str(mark["watermark_position"]) in files[0].read_text(), "the mark outside is as it was"

    fresh.told("trust_database", "--as-restore", "--reason", "the backup of noon")
    assert quiet(fresh) == set()
    fresh.manage("sweep")
    assert fresh.python(f"told = Lease.objects.get(pk={leased['owing']!r}).state") == "expired"
    assert "OBSERVING" not in fresh.beat()
    fresh.restart()
    assert "OBSERVING" not in fresh.beat(), "and it stays trusted"


@pytest.mark.parametrize("place", ["another server", "another name"])
def test_a_copy_observes_and_once_it_is_declared_a_clone_has_nothing_to_do_with_the_originals(
    fresh: Site, tmp_path: Path, place: str
) -> None:
    box = fresh.python(
        _MADE.format(state=tmp_path / "sandboxes", policy="ephemeral")
        + "lease, used = acquire(), acquire(); leases.release(lease.pk); told = [lease.resource_id, used.resource_id]"
    )
    fresh.beat()
    if place == "another server":
        with another(fresh, tmp_path / "copy") as copy:
            _is_disowned(fresh, copy, set(box))
    else:
        copy = under_another_name(fresh, tmp_path / "copy")
        _is_disowned(fresh, copy, set(box))
    assert fresh.manage("sweep").returncode == 0, "the original goes on"
    assert len(running(fresh)) == 1
    assert fresh.installation()["observing_since"] is None


def _is_disowned(original: Site, copy: Site, boxes: set[str]) -> None:
    original.dump_into(copy)
    assert copy.manage("sweep").returncode == 1
    assert copy.installation()["observing_why"] == "another_server"
    mark = copy.installation()["mark"]
    copy.told("trust_database", "--as-clone", "--confirm", mark, "--reason", "staging")
    assert copy.manage("sweep").returncode == 0
    assert copy.installation()["mark"] != mark
    assert "OBSERVING" not in copy.beat()
    states = copy.python("told = list(Lease.objects.values_list('state', 'reason'))")
    assert states == [["failed", "cloned"], ["failed", "cloned"]]
    assert running(original) == boxes


def test_a_failover_goes_on_and_an_emptied_broker_changes_nothing(fresh: Site, tmp_path: Path) -> None:
    """K-36."""
    fresh.python(
        _MADE.format(state=tmp_path / "sandboxes", policy="ephemeral")
        + "lease, used = acquire(), acquire(); leases.release(lease.pk); told = [lease.resource_id, used.resource_id]"
    )
    fresh.beat()
    before = fresh.installation()
    fresh.fail_over()
    assert fresh.manage("sweep").returncode == 0
    after = fresh.installation()
    assert (before["judged_server"].split("/")[1], after["judged_server"].split("/")[1]) == ("00000001", "00000002")
    assert after["observing_since"] is None
    assert fresh.execute("SELECT calm_until > now() + interval '9 min' FROM leases_installation")
    assert len(running(fresh)) == 1
    fresh.beat()

    _empty_the_broker(fresh)
    fresh.python(_AGAIN + "leases.release(acquire().pk)")
    assert fresh.manage("sweep").returncode == 0
    assert len(running(fresh)) == 1
    fresh.restart()
    assert "OBSERVING" not in fresh.beat(), "the file tells"

    # Both places are lost, and the server is started anew: this may be a copy that was taken elsewhere.
    _empty_the_broker(fresh)
    shutil.rmtree(fresh.kept)
    assert "OBSERVING" not in fresh.beat(), "the server that was judged has not gone anywhere"
    _empty_the_broker(fresh)
    shutil.rmtree(fresh.kept)
    fresh.python(_AGAIN + "leases.release(acquire().pk)")
    fresh.restart()
    swept = fresh.manage("sweep")
    assert swept.returncode == 1
    assert "cannot tell" in swept.stderr
    assert fresh.installation()["observing_since"] is None
    assert len(running(fresh)) == 2
    assert "OBSERVING" in fresh.beat()
    assert fresh.installation()["observing_why"] == "marks_lost"
    fresh.manage("sweep")
    assert len(running(fresh)) == 2


def _empty_the_broker(of: Site) -> None:
    with redis.Redis.from_url(of.broker_url) as broker:
        broker.flushall()
