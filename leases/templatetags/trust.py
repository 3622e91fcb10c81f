"""What every page of the admin says while this database is not trusted: `{% observing as told %}`."""

from __future__ import annotations

from django import template

from leases import trust

register = template.Library()


@register.simple_tag
def observing() -> str:
    """Return the sentence for people, or nothing where this database is trusted."""
    standing = trust.read()
    return trust.sentence(standing.why, standing.observing_since) if standing.is_observing else ""
