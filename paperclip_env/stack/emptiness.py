"""Nothing of somebody else's is touched by the demo: servers that a caller names must be empty.

The demo writes rows that can never be deleted (receipts, the audit log), and empties the broker for a purpose.
"""

from collections.abc import Iterable, Mapping

import kombu
import psycopg
import redis

from paperclip_env.stack.problem import Problem

_QUEUE = "paperclip"


def require_empty(given: Iterable[str], environment: Mapping[str, str]) -> None:
    """Raise `Problem` when a server named by one of these variables holds anything."""
    names = set(given)
    if "DATABASE_URL" in names and _has_tables(environment["DATABASE_URL"]):
        raise Problem(
            "The database that DATABASE_URL names is not empty. The demo writes rows that stay for ever: "
            "name an empty database, or unset DATABASE_URL to let it use one of its own."
        )
    if "CELERY_BROKER_URL" in names and _has_messages(environment["CELERY_BROKER_URL"]):
        raise Problem(
            "The broker that CELERY_BROKER_URL names is not empty. The demo empties it: "
            "name an empty one (another database number, another virtual host), or unset CELERY_BROKER_URL."
        )


def _has_tables(url: str) -> bool:
    with psycopg.connect(url, connect_timeout=5) as connection:
        row = connection.execute(
            "SELECT EXISTS (SELECT FROM pg_tables WHERE schemaname NOT IN ('pg_catalog', 'information_schema'))"
        ).fetchone()
    return bool(row and row[0])


def _has_messages(url: str) -> bool:
    if url.startswith(("redis://", "rediss://")):
        with redis.Redis.from_url(url, socket_timeout=5) as client:
            return bool(client.dbsize())
    with kombu.Connection(url, connect_timeout=5) as connection:
        try:
            connection.SimpleQueue(_QUEUE, queue_opts={"passive": True}, no_ack=True).close()
        except connection.channel_errors:
            return False  # never declared
    return True
