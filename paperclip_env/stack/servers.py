"""The servers a command needs: those the caller names, and embedded ones in place of the others.

Answers for: what is handed on answers right now, or a sentence says which address does not.
"""

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

import kombu
import psycopg

from paperclip_env.stack.broker import Broker
from paperclip_env.stack.postgres import Postgres
from paperclip_env.stack.problem import Problem
from paperclip_env.stack.state import State

_PATIENCE_S = 5


@dataclass(frozen=True)
class Served:
    """The addresses of the servers, by the variables that name them, and the processes of the embedded ones."""

    addresses: dict[str, str]
    processes: dict[str, subprocess.Popen[bytes]]


@contextmanager
def servers(state: Callable[[], AbstractContextManager[State]], *, durable: bool) -> Iterator[Served]:
    """Start what $DATABASE_URL and $CELERY_BROKER_URL do not name; give the addresses of all."""
    given = {name: os.environ.get(name, "").strip() for name in ("DATABASE_URL", "CELERY_BROKER_URL")}
    if given["DATABASE_URL"]:
        _require_database(given["DATABASE_URL"])
    if given["CELERY_BROKER_URL"]:
        _require_broker(given["CELERY_BROKER_URL"])
    served = Served(given, {})
    with ExitStack() as stack:
        if not all(given.values()):
            files = stack.enter_context(state())
            if not given["DATABASE_URL"]:
                postgres = Postgres(files, durable=durable)
                stack.callback(postgres.stop)
                served.processes["postgres"] = postgres.start()
                given["DATABASE_URL"] = postgres.url
            if not given["CELERY_BROKER_URL"]:
                broker = Broker(files, durable=durable)
                stack.callback(broker.stop)
                served.processes["broker"] = broker.start()
                given["CELERY_BROKER_URL"] = broker.url
        yield served


def _require_database(url: str) -> None:
    if not url.startswith(("postgres://", "postgresql://")):
        raise Problem("DATABASE_URL must look like postgres://USER:PASSWORD@HOST:PORT/NAME.")
    try:
        psycopg.connect(url, connect_timeout=_PATIENCE_S).close()
    except psycopg.Error as error:
        raise Problem(f"The database that DATABASE_URL names does not let us in: {_one_line(error)}") from None


def _require_broker(url: str) -> None:
    try:
        with kombu.Connection(url, connect_timeout=_PATIENCE_S) as connection:
            connection.ensure_connection(max_retries=1, timeout=_PATIENCE_S)
    except Exception as error:  # noqa: BLE001 -- each transport has exceptions of its own
        raise Problem(f"The broker that CELERY_BROKER_URL names does not let us in: {_one_line(error)}") from None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
