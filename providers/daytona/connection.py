"""The way to the API: where the key goes, and what is made of its answers.

The secret is an API key, which belongs to one organisation, or a JWT of a user, who may belong to several. A JWT
therefore needs the organisation in the endpoint, and both are sent with it in a header, as the service's own client
does. With a key the header is left out: the key alone says whose it is.
"""

from __future__ import annotations

import re

from providers.contract import ErrorKind, ProviderError
from providers.daytona.errors import answered, meaning
from providers.daytona.schemas import DaytonaEndpoint
from providers.http_api import HttpApi

_JWT = re.compile(r"eyJ[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+")


def is_jwt(secret: str | None) -> bool:
    """Say whether a secret has the form of a JWT: its header is the base64 of a JSON object. No API key has it."""
    return secret is not None and _JWT.fullmatch(secret) is not None


def api(endpoint: DaytonaEndpoint, secret: str | None) -> HttpApi:
    """Return the API at one endpoint with one key or JWT."""

    def headers(key: str) -> dict[str, str]:
        bearer = {"Authorization": f"Bearer {key}"}
        if not is_jwt(key):
            return bearer
        if endpoint.organization_id is None:
            # Nothing was sent, so nothing was allocated.
            raise ProviderError(
                ErrorKind.INVALID, "a JWT needs organization_id in the account's endpoint", nothing_allocated=True
            )
        return {**bearer, "X-Daytona-Organization-ID": endpoint.organization_id}

    return HttpApi(endpoint.url, secret, headers=headers, answered=answered, meaning=meaning, tls_ca=endpoint.tls_ca)
