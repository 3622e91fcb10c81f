"""Running things at the same time in tests, each in a thread with a database connection of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from django.db import connection

BOUND = 20.0
"""Seconds after which a test stops waiting for something that should have happened."""


class Background:
    """A function running in a thread of its own; `result` waits for its end and raises what it raised."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._value: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], Any]) -> None:
        try:
            self._value = work()
        except BaseException as error:  # noqa: BLE001 - raised again by `result`
            self._error = error
        finally:
            connection.close()

    def result(self) -> Any:
        self._thread.join(BOUND)
        assert not self._thread.is_alive(), "the background work did not end"
        if self._error is not None:
            raise self._error
        return self._value


def together(*works: Callable[[], Any]) -> list[Any]:
    """Run all at the same time, released by one barrier, and return their results."""
    barrier = threading.Barrier(len(works))

    def start(work: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            connection.ensure_connection()
            barrier.wait(BOUND)
            return work()

        return run

    return [background.result() for background in [Background(start(work)) for work in works]]


class Gate:
    """A point at which one thread waits until the test lets it go on."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()

    def __call__(self, *_: Any) -> None:
        self.reached.set()
        assert self.opened.wait(BOUND), "nobody opened the gate"

    def wait(self) -> None:
        assert self.reached.wait(BOUND), "nobody came to the gate"

    def open(self) -> None:
        self.opened.set()


def elsewhere(work: Callable[[], Any]) -> Any:
    """Run on another connection and return the result."""
    return Background(work).result()


@contextmanager
def lost_commit_reply() -> Iterator[list[int]]:
    """The next COMMIT of this thread's connection succeeds, and its reply is lost with the connection.

    Yields a list that holds one entry when it has happened.
    """
    from django.db.utils import OperationalError

    happened: list[int] = []
    original = connection._commit  # type: ignore[attr-defined]

    def commit() -> None:
        original()
        if not happened:
            happened.append(1)
            connection.connection.close()
            raise OperationalError("server closed the connection unexpectedly")

    connection._commit = commit  # type: ignore[attr-defined]
    try:
        yield happened
    finally:
        connection._commit = original  # type: ignore[attr-defined]
