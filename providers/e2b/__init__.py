"""Sandboxes of E2B, over its REST API."""

from providers.e2b.provider import E2BProvider

__all__ = ["E2BProvider"]
