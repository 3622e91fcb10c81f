"""The way to the API: where the key goes, and what is made of its answers."""

from __future__ import annotations

from providers.daytona.errors import answered, meaning
from providers.daytona.schemas import DaytonaEndpoint
from providers.http_api import HttpApi


def api(endpoint: DaytonaEndpoint, secret: str | None) -> HttpApi:
    """Return the API at one endpoint with one key."""
    return HttpApi(
        endpoint.url,
        secret,
        headers=lambda key: {"Authorization": f"Bearer {key}"},
        answered=answered,
        meaning=meaning,
        tls_ca=endpoint.tls_ca,
    )
