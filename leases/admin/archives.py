"""Archives of workspaces, to look at, and to download where they are offered.

It answers for: nothing is handed out that is not offered, nor to somebody without the permission, and each download is
in the log. What a file is compared with while it is read is the business of `leases.archive_storage`.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, BinaryIO
from uuid import UUID

from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.db.models import Q, QuerySet
from django.http import Http404, HttpRequest, HttpResponseBase, HttpResponseRedirect, StreamingHttpResponse
from django.template.defaultfilters import filesizeformat
from django.urls import URLPattern, path, reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from typing_extensions import override

from leases import archive_storage, archives, audit
from leases.admin.decisions import Choice
from leases.admin.stock import ViewOnly
from leases.admin.times import NONE, badge, of_row, short
from leases.errors import LeaseError
from leases.models import Archive

PERMISSION = "leases.download_archive"


class StandingFilter(admin.SimpleListFilter):
    title = "standing"
    parameter_name = "standing"

    @override
    def lookups(self, request: HttpRequest, model_admin: Any) -> Iterable[tuple[str, str]]:
        return [
            ("offered", "Offered"),
            ("unsealed", "Whole, its sandbox not proven stopped since"),
            ("unfinished", "Not whole"),
            ("removed", "File removed"),
        ]

    @override
    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        there = queryset.filter(removed_at__isnull=True)
        match self.value():
            case "offered":
                return queryset.filter(archives.OFFERED)
            case "unsealed":
                return there.filter(Q(saved_at__isnull=False, receipt__isnull=True))
            case "unfinished":
                return there.filter(saved_at__isnull=True)
            case "removed":
                return queryset.filter(removed_at__isnull=False)
            case _:
                return queryset


@admin.register(Archive)
class ArchiveAdmin(ViewOnly[Archive]):
    identities = ("id", "lease_id", "recovery_id", "attempt_id", "lease__run_id", "company_id")
    list_display = ("begun", "in_a_word", "of_lease", "company", "shown_size", "saved", "removed")
    list_filter = (StandingFilter, "company")
    list_select_related = ("company", "lease")
    search_fields = ("lease__resource_id__startswith", "company__name__startswith")
    date_hierarchy = "begun_at"
    ordering = ("-begun_at", "-id")

    @override
    def get_fields(self, request: HttpRequest, obj: Any = None) -> list[Any]:
        return ["standing", *super().get_fields(request, obj)]

    @override
    def get_urls(self) -> list[URLPattern]:
        view = self.admin_site.admin_view(self.download)
        return [path("<uuid:pk>/download/", view, name="leases_archive_download"), *super().get_urls()]

    @override
    def more(self, request: HttpRequest, row: Archive) -> dict[str, Any]:
        if not archives.is_offered(row) or not request.user.has_perm(PERMISSION):
            return {}
        url = reverse("admin:leases_archive_download", args=[row.pk])
        return {"removals": (Choice(f"Download ({filesizeformat(row.size or 0)})", url, grave=False),)}

    def download(self, request: HttpRequest, pk: UUID) -> HttpResponseBase:
        """Stream an offered archive. What turns out to be damaged ends the connection before its last byte."""
        row = Archive.objects.filter(pk=pk).first()
        if row is None:
            raise Http404
        if not self.has_view_permission(request, row) or not request.user.has_perm(PERMISSION):
            raise PermissionDenied
        try:
            pieces = _Pieces(archives.open_archive(row.pk, company_id=row.company_id))
        except LeaseError as refusal:
            self.message_user(request, f"It was not downloaded: {refusal}", messages.ERROR)
            return HttpResponseRedirect(reverse("admin:leases_archive_change", args=[row.pk]))
        actor = request.user.get_username()
        audit.record("archive.read", row, company_id=row.company_id, actor=actor, lease=str(row.lease_id))
        return StreamingHttpResponse(
            pieces,
            content_type="application/x-tar",
            headers={
                "Content-Length": str(row.size),
                "Content-Disposition": f'attachment; filename="workspace-{row.lease_id}-{row.pk}.tar"',
                "Cache-Control": "no-store",
            },
        )

    @admin.display(description="standing")
    def standing(self, row: Archive) -> SafeString:
        return badge(archives.standing(row), _tone(row))

    @admin.display(description="standing")
    def in_a_word(self, row: Archive) -> SafeString:
        if row.saved_at is None:
            word = "not whole"
        elif row.removed_at is not None:
            word = "removed"
        else:
            word = "offered" if archives.is_offered(row) else "not sealed"
        return badge(word, _tone(row))

    @admin.display(description="lease", ordering="lease")
    def of_lease(self, row: Archive) -> SafeString:
        url = reverse("admin:leases_lease_change", args=[row.lease_id])
        return format_html('<a href="{}">{}</a>', url, short(row.lease.resource_id or str(row.lease_id)))

    @admin.display(description="size", ordering="size")
    def shown_size(self, row: Archive) -> str:
        return filesizeformat(row.size) if row.size is not None else NONE

    @admin.display(description="begun", ordering="begun_at")
    def begun(self, row: Archive) -> SafeString | str:
        return of_row(row, "begun_at")

    @admin.display(description="saved", ordering="saved_at")
    def saved(self, row: Archive) -> SafeString | str:
        return of_row(row, "saved_at")

    @admin.display(description="removed", ordering="removed_at")
    def removed(self, row: Archive) -> SafeString | str:
        return of_row(row, "removed_at")


def _tone(row: Archive) -> str:
    if row.removed_at is not None:
        return "plain"
    return "good" if archives.is_offered(row) else "pending"


class _Pieces:
    """The pieces of an archive that is open from the beginning, and closed when it was read, or nobody reads on."""

    def __init__(self, opened: AbstractContextManager[BinaryIO]) -> None:
        self._opened: AbstractContextManager[BinaryIO] | None = opened
        self._file = opened.__enter__()

    def __iter__(self) -> _Pieces:
        return self

    def __next__(self) -> bytes:
        piece = self._file.read(archive_storage.PIECE)
        if piece:
            return piece
        self.close()
        raise StopIteration

    def close(self) -> None:
        """Close the file, once. Nothing is verified by that: each read did, and whoever left early got no whole."""
        opened, self._opened = self._opened, None
        if opened is not None:
            left = GeneratorExit("nobody reads on")
            opened.__exit__(type(left), left, None)
