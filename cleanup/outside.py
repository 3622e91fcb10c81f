"""Where the high-water mark is kept outside the database: a file of the beat, and a key of a broker that has keys.

Both are named after the mark of the installation's sandboxes, so a clone keeps its own. Neither is ever written
backwards. A place that holds nothing is an answer; one that cannot be asked raises `Silent`.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import UUID

from celery import current_app
from django.conf import settings
from kombu.transport import redis as redis_transport

from cleanup.publishing import AT_ONCE, SOCKET
from cleanup.watermark import Mark, is_another

KEY = "paperclip_env:watermark:{mark}"
FILE = "watermark-{mark}.json"


class Silent(Exception):
    """A place cannot be asked now. `place` names it for people."""

    def __init__(self, place: str, error: BaseException | str) -> None:
        super().__init__(f"{place} does not answer: {error}")
        self.place = place


class Garbled(Silent):
    """What a place holds is no mark. It tells nothing, and whoever keeps the mark replaces it."""


class Overtaken(Exception):
    """A place holds a mark that is ahead of the one to be kept: of another database with this installation's mark."""

    def __init__(self) -> None:
        super().__init__("the high-water mark that is kept outside is ahead of the one to be kept")


# The file


def file_of(mark: UUID) -> Path:
    """Return the path of the state file, in PAPERCLIP_STATE_DIR of this process's host."""
    return Path(settings.PAPERCLIP_STATE_DIR) / FILE.format(mark=mark)


def in_file(mark: UUID) -> Mark | None:
    """Return what the state file says; None where there is none. Raises `Silent` for one that cannot be read."""
    path = file_of(mark)
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise Silent(str(path), error.strerror or type(error).__name__) from error
    try:
        return _read(text)
    except (ValueError, KeyError, TypeError) as error:
        raise Garbled(str(path), "what it holds is no mark") from error


def keep_in_file(mark: UUID, kept: Mark) -> None:
    """Replace the state file by this mark, whole or not at all. Raises `Silent`, and `Overtaken`."""
    path = file_of(mark)
    with suppress(Garbled):
        _require_ahead(kept, in_file(mark))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(_written(kept) + "\n")
                file.flush()
                os.fsync(file.fileno())
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise Silent(str(path), error.strerror or type(error).__name__) from error


# The broker


def broker_has_keys() -> bool:
    """Return whether the broker is one that keeps keys (Redis, Valkey, a sentinel's), and not queues alone."""
    with current_app.connection_for_write() as connection:
        return bool(connection.transport.driver_type == "redis")


def in_broker(mark: UUID) -> Mark | None:
    """Return what the broker's key says; None where there is none, or the broker has no keys. Raises `Silent`."""
    if not broker_has_keys():
        return None
    with _channel() as channel:
        return _in_key(channel, mark)


def keep_in_broker(mark: UUID, kept: Mark) -> bool:
    """Set the broker's key to this mark; False where the broker has no keys. Raises `Silent`, and `Overtaken`."""
    if not broker_has_keys():
        return False
    with _channel() as channel:
        return keep_in_channel(channel, mark, kept)


def keep_in_channel(channel: Any, mark: UUID, kept: Mark) -> bool:
    """Set the key over an open channel of the broker, whose own errors pass; else as `keep_in_broker`."""
    if not isinstance(channel, redis_transport.Channel):
        return False
    with suppress(Garbled):
        _require_ahead(kept, _in_key(channel, mark))
    channel.client.set(KEY.format(mark=mark), _written(kept))
    return True


@contextmanager
def _channel() -> Iterator[Any]:
    options = SOCKET if "socket_timeout" in current_app.conf.broker_transport_options else {}
    try:
        with current_app.connection_for_write(transport_options=options) as connection:
            connection.ensure_connection(**AT_ONCE)
            yield connection.default_channel
    except (Overtaken, Silent):
        raise
    except Exception as error:  # each transport has exceptions of its own
        raise Silent("the broker", type(error).__name__) from error


def _in_key(channel: Any, mark: UUID) -> Mark | None:
    text = channel.client.get(KEY.format(mark=mark))
    if text is None:
        return None
    try:
        return _read(text.decode() if isinstance(text, bytes) else text)
    except (ValueError, KeyError, TypeError) as error:
        raise Garbled("the broker", "what its key holds is no mark") from error


# What both hold


def _require_ahead(kept: Mark, present: Mark | None) -> None:
    """Never backwards: an older mark does not replace a newer one, and another database's is a finding."""
    if present is None or present.generation < kept.generation:
        return
    ahead = (present.generation, present.timeline, present.position)
    if is_another(present.identity, kept.identity) or ahead > (kept.generation, kept.timeline, kept.position):
        raise Overtaken


def _written(mark: Mark) -> str:
    return json.dumps(asdict(mark) | {"at": mark.at.isoformat()}, sort_keys=True)


def _read(text: str) -> Mark:
    found: dict[str, Any] = json.loads(text)
    at = datetime.fromisoformat(found["at"])
    if at.tzinfo is None:
        raise ValueError("a time without its zone")
    return Mark(
        generation=int(found["generation"]),
        identity=str(found["identity"]),
        timeline=int(found["timeline"]),
        position=int(found["position"]),
        at=at,
    )
