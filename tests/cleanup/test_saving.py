"""Saving the files of real sandboxes: what comes back is what was there, byte for byte; what does not fit says so."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from django.core.files.storage import FileSystemStorage
from django.db import connection

import leases
from cleanup.claims import LANE
from cleanup.engine import Engine
from leases import recovering
from leases.models import Archive, Environment, Lease, ProviderAccount, Recovery
from tests import disk_full, factories
from tests.disk_full import SmallDisk, small_disk
from tests.engine import IMAGE, PrivateEngine, available, private_engine
from tests.leases.test_archives import files_in, gone, use
from tests.providers.local_harness import left_below
from tests.scenarios.steps import evidence, falls_due

pytestmark = pytest.mark.django_db(transaction=True)

WORK = """
set -e
umask 022
mkdir -p "deep/er/than that" empty 'quoted " and '\\'' and $HOME'
echo 'print()' > deep/main.py
head -c 3000001 /dev/urandom > "deep/er/than that/binary"
: > deep/nothing
printf 'naïve, 漢字' > 'deep/naïve-漢字'
echo x > ./-rf
echo secret > private && chmod 600 private
printf '#!/bin/sh\\n' > tool && chmod 755 tool
echo suid > odd && chmod 4751 odd
echo none > unreadable && chmod 000 unreadable
mkdir closed && echo in > closed/file && chmod 700 closed
mkdir sticky && chmod 1777 sticky
chmod 555 empty
ln -s deep/main.py relative
ln -s /etc/passwd absolute
ln -s nowhere/at/all dangling
ln tool twin
long=$(printf 'n%.0s' $(seq 1 120))
mkdir -p "$long/$long" && echo far > "$long/$long/$long"
find . -type f -exec touch -t 202001020304.05 {} +
touch -t 199901020304.05 deep/main.py
"""
"""Full seconds, because an engine rounds times to the nearest."""

LOOK = """
find . | LC_ALL=C sort | while IFS= read -r f; do
  if [ -L "$f" ]; then echo "link $f -> $(readlink "$f")"
  elif [ -d "$f" ]; then echo "directory $(stat -c '%f %u %g' "$f") $f"
  elif [ -f "$f" ]; then echo "file $(stat -c '%f %u %g %s %Y' "$f") $(sha256sum < "$f") $f"
  else echo "other $f"; fi
done
"""
"""What is there: kinds, permissions, owners, sizes, times, links, contents. In the sandbox, and in what was saved."""


@dataclass(slots=True)
class Site:
    """An account of a real provider, an environment whose runs are kept when they fail, and where its work lies."""

    account: ProviderAccount
    environment: Environment
    directory: str

    def failed(self, work: str = WORK) -> tuple[Lease, str]:
        """A lease of a failed run, stopped with its files, and what its sandbox said is in its workspace."""
        run = factories.run(self.account.company)
        lease = leases.acquire(self.environment.pk, company_id=self.account.company_id, run_id=run.pk)
        bridge = leases.bridge(lease.pk)
        inside = f"mkdir -p {self.directory}; cd {self.directory}\n"
        done = bridge.execute(["sh", "-c", inside + work])
        assert done.exit_code == 0, done.stderr.decode()
        look = bridge.execute(["sh", "-c", inside + LOOK])
        assert look.exit_code == 0, look.stderr.decode()
        leases.release(lease.pk, outcome="failed")
        self.sweep()
        lease.refresh_from_db()
        assert evidence(lease) == ["stopped"]
        return lease, look.stdout.decode()

    def sweep(self) -> None:
        while Engine().sweep(self.account.pk).claimed + Engine().sweep(LANE).claimed:
            pass

    def recover(self, lease: Lease) -> Recovery:
        recovery = recovering.recover_workspace(lease.pk, lease.company_id, actor="olga", reason="needed")
        self.sweep()
        recovery.refresh_from_db()
        lease.refresh_from_db()
        return recovery

    def try_again(self, recovery: Recovery) -> None:
        """Let the time until the next attempt pass."""
        with connection.cursor() as cursor:
            cursor.execute("UPDATE leases_recovery SET next_attempt_at = now() WHERE id = %s", [recovery.pk])
        falls_due(recovery.lease.obligations.get(kind="recover_workspace", closed_at__isnull=True))
        self.sweep()
        recovery.refresh_from_db()


def site(provider: str, endpoint: dict[str, Any], config: dict[str, Any], directory: str) -> Site:
    account = factories.account(provider=provider, endpoint=endpoint, attested_identity="")
    return Site(account, factories.environment(account, config=config, policy="retain_on_failure"), directory)


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Site]:
    yield site("local", {"state_dir": str(tmp_path / "state")}, {"workspace": "work"}, "work")
    assert left_below(tmp_path / "state") == []


@pytest.fixture(scope="module")
def engine() -> Iterator[PrivateEngine]:
    if available() is not None:
        pytest.skip(f"no container engine: {available()}")
    with private_engine() as running:
        yield running


@pytest.fixture
def containers(engine: PrivateEngine) -> Site:
    return site("docker", {"base_url": engine.base_url}, {"image": IMAGE, "workspace": "/work"}, "/work")


@pytest.fixture
def directory(tmp_path: Path, settings: Any) -> Path:
    use(settings, FileSystemStorage, location=str(tmp_path / "archives"))
    return tmp_path / "archives"


def unpacked(archive: Archive, into: Path) -> Path:
    """Unpack an archive as a person with all rights does, and return where."""
    into.mkdir()
    command = ["/usr/bin/env", "tar", "-C", str(into), "-xp", "--numeric-owner", "--same-owner", "-f", "-"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as tar:
        assert tar.stdin is not None
        with leases.open_archive(archive.pk, company_id=archive.company_id) as file:
            while piece := file.read(1 << 16):
                tar.stdin.write(piece)
        tar.stdin.close()
        assert tar.wait(60) == 0
    return into


def what_is_in(directory: Path) -> str:
    done = subprocess.run(["/bin/sh", "-c", LOOK], cwd=directory, capture_output=True, check=True)
    return done.stdout.decode()


def comes_back_as_it_was(where: Site, tmp_path: Path) -> Path:
    """Save, unpack, compare; return what was unpacked."""
    lease, before = where.failed()
    assert before.count("\n") == 25
    recovery = where.recover(lease)
    assert (recovery.state, recovery.failure, recovery.attempts) == ("complete", "", 1)
    assert (lease.epoch, evidence(lease)) == (2, ["stopped", "stopped"])
    archive = leases.offered_archives(company_id=lease.company_id, run_id=lease.run_id).get()
    assert archive.receipt == lease.receipts.get(epoch=2)
    found = unpacked(archive, tmp_path / "unpacked")
    assert what_is_in(found) == before
    return found


@pytest.mark.skipif(disk_full.unavailable() is not None, reason="giving files away needs root")
def test_the_files_of_a_process_come_back_as_they_were(processes: Site, directory: Path, tmp_path: Path) -> None:
    found = comes_back_as_it_was(processes, tmp_path)
    assert (found / "twin").stat().st_nlink == 1  # of two names of one file, this provider makes two files


def test_the_files_of_a_container_come_back_as_they_were(containers: Site, directory: Path, tmp_path: Path) -> None:
    found = comes_back_as_it_was(containers, tmp_path)
    assert (found / "twin").samefile(found / "tool")


@pytest.fixture
def small(tmp_path: Path, settings: Any) -> Iterator[SmallDisk]:
    """A storage of archives on a disk of one megabyte."""
    if disk_full.unavailable() is not None:
        pytest.skip(f"no small disk: {disk_full.unavailable()}")
    with small_disk(tmp_path / "disk", megabytes=8) as disk:
        use(settings, FileSystemStorage, location=str(disk.place / "archives"))
        yield disk


def waits_for_room(where: Site, disk: SmallDisk) -> None:
    lease, _ = where.failed("head -c 3000000 /dev/urandom > file")
    disk.fill()
    recovery = where.recover(lease)
    assert (recovery.state, recovery.failure, recovery.disposition) == ("running", "storage_unavailable", "retry")
    assert evidence(lease) == ["stopped", "stopped"]  # and it is stopped again, whatever became of its files
    assert not leases.offered_archives(company_id=lease.company_id).exists()
    disk.make_room()
    assert files_in(disk.place) == []
    where.try_again(recovery)
    assert (recovery.state, recovery.failure) == ("complete", "")
    archive = leases.offered_archives(company_id=lease.company_id, lease_id=lease.pk).get()
    assert [path.name for path in files_in(disk.place)] == [f"{archive.pk}.tar"]
    half = Archive.objects.exclude(pk=archive.pk).get()
    assert (half.saved_at, half.removed_at is not None) == (None, True)


def test_a_full_storage_is_tried_again_and_never_leaves_half_of_a_process(processes: Site, small: SmallDisk) -> None:
    waits_for_room(processes, small)


def test_a_full_storage_is_tried_again_and_never_leaves_half_of_a_container(containers: Site, small: SmallDisk) -> None:
    waits_for_room(containers, small)


@pytest.mark.parametrize("kind", ["processes", "containers"])
def test_what_is_too_large_is_given_up_at_once_and_stopped(
    kind: str, request: pytest.FixtureRequest, directory: Path, settings: Any
) -> None:
    where: Site = request.getfixturevalue(kind)
    settings.PAPERCLIP_ARCHIVE_MAX_BYTES = 1_000_000
    lease, _ = where.failed("head -c 1000000 /dev/urandom > file")
    recovery = where.recover(lease)
    assert (recovery.state, recovery.failure) == ("exhausted", "archive_too_large")
    assert recovery.disposition == "use_alternative_strategy"
    assert evidence(lease) == ["stopped", "stopped"]
    for archive in Archive.objects.filter(lease=lease):
        gone(directory / archive.name)
        assert archive.removed_at is not None
    assert not leases.offered_archives(company_id=lease.company_id).exists()


@pytest.mark.parametrize("kind", ["processes", "containers"])
def test_a_worker_that_dies_while_it_saves_leaves_nothing_that_is_offered(
    kind: str, request: pytest.FixtureRequest, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where: Site = request.getfixturevalue(kind)
    lease, _ = where.failed("head -c 1000000 /dev/urandom > file")
    recovery = recovering.recover_workspace(lease.pk, lease.company_id, actor="olga", reason="needed")

    class Killed(BaseException):
        pass

    def dies(*_: Any, **__: Any) -> bool:
        raise Killed

    real = leases.archives.saved  # type: ignore[attr-defined]  # the module, which others have imported
    monkeypatch.setattr("leases.archives.saved", dies)
    with pytest.raises(Killed):
        where.sweep()
    half = Archive.objects.get(lease=lease)
    assert half.saved_at is None
    assert (directory / half.name).exists()  # whole in the storage, and nothing says so
    assert not leases.offered_archives(company_id=lease.company_id).exists()
    monkeypatch.setattr("leases.archives.saved", real)

    falls_due(lease.obligations.get(kind="recover_workspace", closed_at__isnull=True))
    where.sweep()
    recovery.refresh_from_db()
    assert recovery.state == "complete"
    archive = leases.offered_archives(company_id=lease.company_id, lease_id=lease.pk).get()
    assert archive != half
    gone(directory / half.name)
    assert [path.name for path in files_in(directory)] == [f"{archive.pk}.tar"]
