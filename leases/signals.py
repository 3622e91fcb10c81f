"""Hints to whoever pays. Losing one costs time and never a payment: the row behind it has its own `due_at`."""

from django.dispatch import Signal

lease_draining = Signal()
"""Sent after the commit of a release that waits for work in flight. Arguments: `obligation_id`, `drain_seconds`."""
