"""Real worker processes on the test's database and broker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from django.conf import settings
from django.db import connection

from tests.beats import BOUND, CHECKOUT, database_url, eventually


class Worker:
    """One process of `celery worker`, as `make up` starts it."""

    def __init__(self, log: Path, **environment: str) -> None:
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "celery", "-A", "paperclip_env", "worker", "-P", "threads", "-c", "4"),
                    *("--loglevel", "INFO", "--without-gossip", "--without-mingle", "--without-heartbeat"),
                ],
                cwd=CHECKOUT,
                env={
                    **os.environ,
                    "DATABASE_URL": database_url(),
                    "CELERY_BROKER_URL": settings.CELERY_BROKER_URL,
                    "APPLICATION_NAME": log.stem,
                    **environment,
                },
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def told(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def is_ready(self) -> Worker:
        def look() -> bool:
            assert self.process.poll() is None, f"the worker ended ({self.process.returncode}):\n{self.told()}"
            return " ready." in self.told()

        eventually(look, "the worker is ready")
        return self

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self, bound: float = BOUND) -> int:
        return self.process.wait(bound)

    def sessions(self) -> list[int]:
        """Return the server processes of this worker's database connections."""
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name = %s",
                [self.log.stem],
            )
            return [row[0] for row in cursor.fetchall()]


@contextmanager
def workers(directory: Path) -> Iterator[Callable[..., Worker]]:
    """Give a function that starts workers; whatever still runs at the end is killed, before the database is emptied."""
    started: list[Worker] = []

    def start(**environment: str) -> Worker:
        worker = Worker(directory / f"worker-{len(started)}.log", **environment)
        started.append(worker)
        return worker

    try:
        yield start
    finally:
        for worker in started:
            if worker.process.poll() is None:
                worker.process.kill()
            worker.process.wait(BOUND)
        eventually(lambda: not any(worker.sessions() for worker in started), "the sessions of the workers are ended")
