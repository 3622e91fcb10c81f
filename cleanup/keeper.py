"""Keeping claims: one thread per process that renews the protection of everything it works on, in one statement.

It holds no claim by itself: a claim that is done is released from it at once, whatever the renewal is doing, so a hung
renewal keeps nothing (domain 6.7). While nothing is held it neither runs a statement nor keeps a connection.
"""

from __future__ import annotations

import logging
import threading

from django.db import connection

from cleanup import claims
from cleanup.backoff import RENEW_EVERY
from cleanup.claims import Claim
from leases.clock import Clock, boottime

log = logging.getLogger(__name__)


class Keeper:
    """Renews what was handed to `keep` until `release`. Thread-safe."""

    def __init__(self, *, clock: Clock = boottime, every: float = RENEW_EVERY) -> None:
        self._clock = clock
        self._every = every
        self._held: dict[int, Claim] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def keep(self, claim: Claim) -> None:
        with self._changed:
            self._held[id(claim)] = claim
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="keeper", daemon=True)
                self._thread.start()

    def release(self, claim: Claim) -> None:
        with self._changed:
            self._held.pop(id(claim), None)
            if not self._held:
                self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._held:
                    self._thread = None
                    break
                self._changed.wait_for(lambda: not self._held, timeout=self._every)
                held = list(self._held.values())
            if held:
                try:
                    claims.renew(held, clock=self._clock)
                except Exception as error:  # noqa: BLE001 - one failed round must not end the keeping
                    # The protection is far longer than the period: the next round tries again on a new connection.
                    log.warning("renewal failed (%s)", type(error).__name__)
                    connection.close()
        connection.close()


KEEPER = Keeper()
"""The process's own."""
