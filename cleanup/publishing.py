"""How the beat publishes: between two sleeps, and therefore bounded.

Answers for: a broker that is away or hangs costs the beat seconds, not its hearing, and is then left alone for a
while. What was not sent is not kept: a hint lapses in its row, a periodic task stays due in its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from celery import Celery
from kombu import Connection, Producer
from kombu.exceptions import OperationalError

from leases.clock import boottime

logger = logging.getLogger(__name__)

REST = 5.0
"""How long a broker that failed is left alone, in seconds. Shorter than a hint lasts, so it costs no account a turn."""

# For the transports that know these names (the settings give them to those alone); the others have a bound in
# connecting.
SOCKET = {"socket_timeout": 4, "socket_connect_timeout": 2}

AT_ONCE: dict[str, Any] = {"max_retries": 1, "interval_start": 0, "interval_step": 0, "interval_max": 0}

ONCE_AGAIN: dict[str, Any] = {"retry": True, "retry_policy": AT_ONCE}
"""Options of a message: one more try, because the kept connection may have died since the last message."""


class Publisher:
    def __init__(self, app: Celery) -> None:
        self._app = app
        self._connection: Connection | None = None
        self._producer: Producer | None = None
        self._rests_until = 0.0
        self._failed = False

    def rests_for(self) -> float:
        """Return the seconds for which the broker is still left alone; zero or less when it may be tried."""
        return self._rests_until - boottime()

    def attempt(self, send: Callable[[Producer], object]) -> bool:
        """Call `send` with a producer and return True, or let the broker rest and return False."""
        try:
            send(self._connected())
        except Exception as error:  # noqa: BLE001 -- each transport has exceptions of its own, and none may end the beat
            if not self._failed:
                logger.warning("The broker does not take messages, trying again every %.0f s: %s", REST, error)
            self._failed = True
            self.close()
            self._rests_until = boottime() + REST
            return False
        if self._failed:
            logger.info("The broker takes messages again.")
        self._failed = False
        return True

    def is_at_fault(self, error: BaseException | None) -> bool:
        """Return whether an error is the broker's, and not that of what was to be sent."""
        known = () if self._connection is None else self._connection.recoverable_connection_errors
        return isinstance(error, (OperationalError, OSError, *known))

    def close(self) -> None:
        """Drop the connection. Never raises."""
        connection, self._connection, self._producer = self._connection, None, None
        if connection is not None:
            try:
                connection.release()
            except Exception:
                logger.debug("closing the broken connection failed", exc_info=True)

    def _connected(self) -> Producer:
        if self._connection is None or self._producer is None:
            options = SOCKET if "socket_timeout" in self._app.conf.broker_transport_options else {}
            self._connection = self._app.connection_for_write(transport_options=options)
            self._connection.ensure_connection(**AT_ONCE)
            self._producer = self._app.amqp.Producer(self._connection, auto_declare=False)
        return self._producer
