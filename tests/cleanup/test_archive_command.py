"""`manage.py archive`, and what `prune` and `check` do about archives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.core.checks import Tags, run_checks
from django.core.files.storage import FileSystemStorage
from django.core.management import CommandError, call_command
from django.db import connection

from leases import archives
from leases.models import ActivityEntry, Archive
from tests import factories
from tests.leases.test_archives import aged, begun, files_in, in_pieces, over, seal, spoiled, tar, use, whole

pytestmark = pytest.mark.django_db(transaction=True)

CHECKOUT = Path(__file__).parents[2]


@pytest.fixture
def directory(tmp_path: Path, settings: Any) -> Path:
    use(settings, FileSystemStorage, location=str(tmp_path / "archives"))
    return tmp_path / "archives"


def run(*arguments: object) -> tuple[int, str]:
    out = StringIO()
    try:
        call_command("archive", *map(str, arguments), stdout=out)
    except CommandError as error:
        return error.returncode, str(error)
    except SystemExit as done:
        return int(done.code or 0), out.getvalue()
    return 0, out.getvalue()


def as_json(*arguments: object) -> tuple[int, dict[str, Any]]:
    status, text = run(*arguments, "--json")
    return status, json.loads(text)


def test_it_lists_what_there_is_and_where_it_stands(directory: Path) -> None:
    offered, half = seal(whole(begun())), begun()
    status, text = run()
    assert status == 0
    assert f"lease {offered.lease_id}  offered" in text
    assert f"lease {half.lease_id}  it is not whole" in text
    assert "2 archives, 10,240 B in the storage." in text
    found = as_json("--offered")[1]["archives"]
    assert [(one["id"], one["offered"], one["size"]) for one in found] == [(str(offered.pk), True, 10_240)]
    assert [one["id"] for one in as_json("--lease", half.lease_id)[1]["archives"]] == [str(half.pk)]
    assert [one["id"] for one in as_json("--company", half.company_id)[1]["archives"]] == [str(half.pk)]
    assert as_json("--run", factories.run().pk)[1] == {"archives": [], "bytes": 0}


def test_it_writes_one_out_as_it_was_and_says_so_in_the_log(directory: Path, tmp_path: Path) -> None:
    content = tar(a=os.urandom(300_000))
    archive, target = seal(whole(begun(), content)), tmp_path / "out.tar"
    status, told = as_json("--save", archive.pk, target, "--actor", "olga")
    assert (status, told["size"], told["sha256"]) == (0, len(content), archive.sha256)
    assert target.read_bytes() == content
    assert target.stat().st_mode & 0o777 == 0o600
    assert ActivityEntry.objects.get(action="archive.read").actor == "olga"
    assert run("--save", archive.pk, target)[0] == 2  # it is there already
    assert target.read_bytes() == content


def test_a_damaged_one_leaves_no_file(directory: Path, tmp_path: Path) -> None:
    archive, target = seal(whole(begun(), tar(a=os.urandom(300_000)))), tmp_path / "out" / "out.tar"
    target.parent.mkdir()
    spoiled(directory, archive, lambda content: content[:-1] + b"x")
    status, told = run("--save", archive.pk, target)
    assert (status, "checksum" in told) == (1, True)
    assert list(target.parent.iterdir()) == []


def test_what_is_not_offered_is_not_written_out(directory: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.tar"
    status, told = as_json("--save", whole(begun()).pk, target)
    assert (status, told["refused"]) == (1, "not_offered")
    assert run("--save", factories.company().pk, target)[0] == 2
    assert run("--save", "nonsense", target)[0] == 2
    assert not target.exists()


def test_a_target_that_cannot_be_written_is_a_sentence(directory: Path, tmp_path: Path) -> None:
    archive = seal(whole(begun()))
    status, told = run("--save", archive.pk, tmp_path / "nowhere" / "out.tar")
    assert (status, told) == (1, "it could not be written: No such file or directory")


def test_it_writes_to_standard_output_bytes_and_nothing_else(directory: Path, tmp_path: Path) -> None:
    content = tar(a=os.urandom(30_000))
    archive = seal(whole(begun(), content))
    done = in_a_process(directory, "archive", "--save", str(archive.pk), "-")
    assert (done.returncode, done.stdout, done.stderr) == (0, content, b"")
    spoiled(directory, archive, lambda kept: kept[:-1])
    done = in_a_process(directory, "archive", "--save", str(archive.pk), "-")
    assert done.returncode == 1
    assert len(done.stdout) < len(content)
    assert b"Traceback" not in done.stderr


def in_a_process(directory: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    parameters = connection.settings_dict
    host, port = parameters["HOST"], parameters["PORT"]
    url = f"postgres://{parameters['USER']}:{parameters['PASSWORD']}@{host}:{port}/{parameters['NAME']}"
    return subprocess.run(
        [sys.executable, "manage.py", *arguments],
        cwd=CHECKOUT,
        env={**os.environ, "DATABASE_URL": url, "PAPERCLIP_ARCHIVE_DIR": str(directory), "DEBUG": "1"},
        capture_output=True,
        check=False,
    )


def test_it_removes_old_ones_and_says_how_many(directory: Path) -> None:
    archive = seal(whole(begun()))
    over(archive.recovery)
    aged(archive, 91)
    assert as_json("--remove-older-than", 90, "--dry-run") == (0, {"dry_run": True, "removed": 1})
    assert run("--remove-older-than", 90)[0] == 2  # without a reason
    assert len(files_in(directory)) == 1
    assert as_json("--remove-older-than", 90, "--reason", "room") == (0, {"dry_run": False, "removed": 1})
    assert files_in(directory) == []


def test_it_cleans_what_was_left(directory: Path) -> None:
    recovery = factories.recovery()
    half = begun(recovery)
    archives.write(half, in_pieces(tar(a=b"a")))
    begun(recovery)  # another attempt took over
    leftover = whole(begun())
    Archive.objects.filter(pk=leftover.pk).update(removed_at=factories.database_now())
    assert as_json("--clean", "--dry-run") == (0, {"dry_run": True, "unfinished": 1})
    assert as_json("--clean") == (0, {"dry_run": False, "unfinished": 1, "files": 1})
    assert files_in(directory) == []


def test_it_tries_the_storage(directory: Path, settings: Any, tmp_path: Path) -> None:
    assert as_json("--check") == (0, {"usable": True})
    assert files_in(directory) == []
    (tmp_path / "file").write_text("in the way")
    use(settings, FileSystemStorage, location=str(tmp_path / "file" / "archives"))
    status, told = run("--check")
    assert (status, "does not work" in told) == (1, True)


def test_prune_goes_by_the_days_of_the_settings(directory: Path, settings: Any) -> None:
    archive = seal(whole(begun()))
    over(archive.recovery)
    aged(archive, 31)

    def prune(*more: str) -> Any:
        out = StringIO()
        call_command("prune", "--before", "2020-01-01", "--reason", "room", "--json", *more, stdout=out)
        return json.loads(out.getvalue())["archive_files"]

    assert settings.PAPERCLIP_ARCHIVE_DAYS == 0
    assert prune() == 0
    settings.PAPERCLIP_ARCHIVE_DAYS = 30
    assert prune("--dry-run") == 1
    assert len(files_in(directory)) == 1
    assert prune() == 1
    assert files_in(directory) == []
    assert Archive.objects.filter(pk=archive.pk, removed_at__isnull=False).exists()


def test_prune_removes_a_left_file_while_its_row_still_names_it(directory: Path) -> None:
    archive = seal(whole(begun()))
    Archive.objects.filter(pk=archive.pk).update(removed_at=factories.database_now())
    call_command("prune", "--before", "2020-01-01", "--dry-run", stdout=StringIO())
    assert len(files_in(directory)) == 1
    call_command("prune", "--before", "2020-01-01", "--reason", "room", stdout=StringIO())
    assert files_in(directory) == []


def test_the_check_tells_of_a_storage_that_cannot_be_used(settings: Any, tmp_path: Path) -> None:
    def told() -> list[str]:
        return [found.msg for found in run_checks(tags=[Tags.files]) if found.id == "paperclip.W004"]

    use(settings, FileSystemStorage, location=str(tmp_path / "not" / "yet" / "there"))
    assert told() == []
    assert list(tmp_path.iterdir()) == []  # looked at only
    (tmp_path / "file").write_text("in the way")
    use(settings, FileSystemStorage, location=str(tmp_path / "file" / "archives"))
    assert "is no directory" in told()[0]
    use(settings, "nowhere.Storage")
    assert "cannot be made" in told()[0]
    assert "PAPERCLIP_ARCHIVE_STORAGE" in told()[0]
    use(settings, "django.core.files.storage.InMemoryStorage")
    assert told() == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_the_check_tells_of_a_directory_that_cannot_be_written(settings: Any, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    use(settings, FileSystemStorage, location=str(tmp_path / "archives"))
    found = [one.msg for one in run_checks(tags=[Tags.files]) if one.id == "paperclip.W004"]
    assert "cannot be written to" in found[0]
