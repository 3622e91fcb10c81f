"""Sandboxes of Daytona, over its REST API."""

from providers.daytona.provider import DaytonaProvider

__all__ = ["DaytonaProvider"]
