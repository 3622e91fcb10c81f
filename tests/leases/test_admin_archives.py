"""The pages of archives: what they show, and to whom they hand what out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.core.files.storage import FileSystemStorage
from django.template.defaultfilters import filesizeformat
from django.test import Client
from django.urls import reverse

from leases.archives import ArchiveDamaged
from leases.models import ActivityEntry, Archive
from tests import factories
from tests.leases.test_archives import begun, seal, spoiled, tar, use, whole

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def directory(tmp_path: Path, settings: Any) -> Path:
    use(settings, FileSystemStorage, location=str(tmp_path / "archives"))
    return tmp_path / "archives"


WORDS = {"unfinished": "not whole", "unsealed": "not sealed", "offered": "offered", "removed": "removed"}


def somebody(*codenames: str) -> Client:
    user = User.objects.create_user("olga", password="x", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=codenames))
    client = Client()
    client.force_login(user)
    return client


@pytest.fixture
def olga(directory: Path) -> Client:
    return somebody("view_archive", "download_archive", "view_lease")


def download(client: Client, archive: Archive) -> Any:
    return client.get(reverse("admin:leases_archive_download", args=[archive.pk]))


def page(client: Client, archive: Archive) -> str:
    return client.get(reverse("admin:leases_archive_change", args=[archive.pk])).content.decode()


def test_an_offered_one_is_downloaded_whole_and_the_log_says_by_whom(olga: Client) -> None:
    content = tar(a=b"x" * 200_000)
    archive = seal(whole(begun(), content))
    assert f"Download ({filesizeformat(len(content))})" in page(olga, archive)
    answer = download(olga, archive)
    assert b"".join(answer.streaming_content) == content
    assert answer.headers["Content-Length"] == str(len(content))
    assert answer.headers["Content-Type"] == "application/x-tar"
    assert answer.headers["Content-Disposition"].startswith('attachment; filename="workspace-')
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    answer.close()
    assert ActivityEntry.objects.get(action="archive.read").actor == "olga"


def test_what_is_not_offered_is_not_handed_out(olga: Client) -> None:
    half, unsealed, removed = begun(), whole(begun()), seal(whole(begun()))
    Archive.objects.filter(pk=removed.pk).update(removed_at=factories.database_now())
    for archive, why in ((half, "not whole"), (unsealed, "not proven stopped"), (removed, "file was removed")):
        text = page(olga, archive)
        assert "Download" not in text
        assert why in text
        answer = download(olga, archive)
        assert answer.status_code == 302
        assert "It was not downloaded: archive" in page(olga, archive)
    assert not ActivityEntry.objects.filter(action="archive.read").exists()


def test_it_takes_the_permission(directory: Path) -> None:
    archive = seal(whole(begun()))
    client = somebody("view_archive")
    assert "Download" not in page(client, archive)
    assert download(client, archive).status_code == 403
    assert download(Client(), archive).status_code == 302  # to the login
    assert not ActivityEntry.objects.filter(action="archive.read").exists()


def test_seeing_is_a_permission_too(directory: Path) -> None:
    assert download(somebody("download_archive"), seal(whole(begun()))).status_code == 403


def test_a_damaged_one_never_comes_whole(olga: Client, directory: Path) -> None:
    archive = seal(whole(begun(), tar(a=b"x" * 200_000)))
    spoiled(directory, archive, lambda content: b"y" + content[1:])
    answer = download(olga, archive)
    received = bytearray()

    def receive() -> None:
        for piece in answer.streaming_content:
            received.extend(piece)

    with pytest.raises(ArchiveDamaged, match="checksum"):
        receive()
    assert len(received) < int(answer.headers["Content-Length"])
    answer.close()


def test_one_whose_file_is_missing_is_a_sentence(olga: Client, directory: Path) -> None:
    archive = seal(whole(begun()))
    spoiled(directory, archive, lambda _: None)
    assert download(olga, archive).status_code == 302
    assert "is not in the storage any more" in page(olga, archive)


def test_a_download_that_is_broken_off_closes_the_file(olga: Client) -> None:
    archive = seal(whole(begun(), tar(a=b"x" * 400_000)))
    answer = download(olga, archive)
    next(iter(answer.streaming_content))
    answer.close()  # warnings of files left open are errors


def test_the_list_shows_where_each_stands_and_filters_by_it(olga: Client) -> None:
    archives_by = {
        "unfinished": begun(),
        "unsealed": whole(begun()),
        "offered": seal(whole(begun())),
        "removed": seal(whole(begun())),
    }
    Archive.objects.filter(pk=archives_by["removed"].pk).update(removed_at=factories.database_now())
    address = reverse("admin:leases_archive_changelist")
    everything = olga.get(address).content.decode()
    for standing, archive in archives_by.items():
        assert str(archive.lease_id) in everything
        assert WORDS[standing] in everything
        rows = olga.get(address, {"standing": standing}).context["cl"].queryset
        assert list(rows) == [archive]
    found = olga.get(address, {"q": str(archives_by["offered"].lease_id)}).context["cl"].queryset
    assert list(found) == [archives_by["offered"]]


def test_no_row_is_changed_added_or_deleted_by_hand(directory: Path, admin_client: Client) -> None:
    archive = seal(whole(begun()))
    assert admin_client.get(reverse("admin:leases_archive_add")).status_code == 403
    assert admin_client.post(reverse("admin:leases_archive_delete", args=[archive.pk])).status_code == 403
    assert admin_client.post(reverse("admin:leases_archive_change", args=[archive.pk]), {}).status_code == 403
