"""Hints to whoever pays. Losing one costs time and never a payment: the row behind it has its own `due_at`."""

from django.dispatch import Signal

lease_draining = Signal()
"""Sent after the commit of a release that waits for work in flight. Arguments: `obligation_id`, `drain_seconds`."""

continuation_started = Signal()
"""Sent after the commit of an admission. Arguments: `run_id` of the queued run, `continuation_ids` that it is for."""

cancellation_confirmed = Signal()
"""Sent after the commit that confirms a cancellation. Arguments: `run_id`, `company_id`. The run's row says so too."""
