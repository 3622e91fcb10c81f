"""Settings that would make the engine unsafe are refused before anything starts."""

from __future__ import annotations

from django.core.exceptions import ImproperlyConfigured

from cleanup.backoff import PROTECTION, RENEW_EVERY
from leases import bounds


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
