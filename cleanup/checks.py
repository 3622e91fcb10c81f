"""System checks: settings that would make the engine unsafe are refused before anything starts."""

from __future__ import annotations

from typing import Any

from django.core.checks import CheckMessage, Error, register

from cleanup.backoff import PROTECTION, RENEW_EVERY
from leases import bounds


@register
def protection_exceeds_calls(**_: Any) -> list[CheckMessage]:
    """A call is sent only while the protection covers it, and the protection is renewed only every so often."""
    needed = bounds.LONGEST_CALL + bounds.SEND_MARGIN + RENEW_EVERY
    if needed <= PROTECTION:
        return []
    return [
        Error(
            f"PAPERCLIP_PROTECTION_SECONDS is {PROTECTION:.0f}; with PAPERCLIP_CALL_SECONDS at "
            f"{bounds.LONGEST_CALL:.0f} it must be at least {needed:.0f}.",
            id="cleanup.E001",
        )
    ]
