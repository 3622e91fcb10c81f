"""Settings that would make the engine unsafe are refused before anything starts; doubts about the rest are told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, connection

from cleanup.backoff import PROTECTION, RENEW_EVERY
from leases import archive_storage, bounds, trust


def require_protection_to_exceed_calls() -> None:
    """Raise `ImproperlyConfigured` where a claim's protection does not cover a call.

    A call is sent only while the protection covers it, and the protection is renewed only every so often. Raised at
    start and not left to `manage.py check`, whose findings a Celery worker discards.
    """
    needed = bounds.LONGEST_CALL + bounds.SEND_MARGIN + RENEW_EVERY
    if needed > PROTECTION:
        raise ImproperlyConfigured(
            f"PAPERCLIP_PROTECTION_SECONDS is {PROTECTION:.0f}; with PAPERCLIP_CALL_SECONDS at "
            f"{bounds.LONGEST_CALL:.0f} it must be at least {needed:.0f}."
        )


@checks.register(checks.Tags.database)
def tell_of_the_database(databases: Sequence[str] | None = None, **_: Any) -> list[checks.CheckMessage]:
    """Warn where this database observes, or where not all may be asked that tells a copy.

    By `manage.py check --database default`, and before each `migrate`.
    """
    if not databases or "default" not in databases:
        return []
    try:
        if "leases_installation" not in connection.introspection.table_names():
            return []  # before the first `migrate`
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT has_function_privilege('pg_control_system()', 'EXECUTE'),"
                " EXISTS (SELECT 1 FROM pg_attribute WHERE attrelid = 'leases_installation'::regclass"
                " AND attname = 'observing_why')"
            )
            may_ask, is_migrated = cursor.fetchone()
        if not is_migrated:
            return []
        standing = trust.read()
    except DatabaseError as error:
        return [checks.Warning(f"The database could not be asked: {type(error).__name__}.", id="paperclip.W001")]
    found: list[checks.CheckMessage] = []
    if standing.observing_since is not None:
        found.append(checks.Warning(trust.sentence(standing.why, standing.observing_since), id="paperclip.W002"))
    if not may_ask:
        found.append(
            checks.Warning(
                "The role may not ask for the server's system identifier, so a copy of this database in another server "
                "is told by its position and its oid alone.",
                hint="GRANT EXECUTE ON FUNCTION pg_control_system() TO the role of DATABASE_URL (and the beat's).",
                id="paperclip.W003",
            )
        )
    return found


@checks.register(checks.Tags.files)
def tell_of_the_storage_of_archives(**_: Any) -> list[checks.CheckMessage]:
    """Warn where archives of workspaces cannot be written. Only looks; `manage.py archive --check` writes one."""
    trouble = archive_storage.trouble()
    if not trouble:
        return []
    hint = "Recovery of files fails with storage_unavailable until then. See docs/recovery.md, Archives."
    return [checks.Warning(trouble, hint=hint, id="paperclip.W004")]
