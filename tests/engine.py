"""A real container engine for tests: private, started once per test process, gone at its end."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paperclip_env.stack.engine import IMAGE, PrivateEngine
from paperclip_env.stack.engine import unavailable as available

__all__ = ["IMAGE", "PrivateEngine", "available", "private_engine", "short_directory"]


@contextmanager
def short_directory() -> Iterator[Path]:
    """Make a directory whose path leaves room for that of a unix socket, and remove it."""
    directory = Path(tempfile.mkdtemp(prefix="pe-", dir="/tmp"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def private_engine() -> Iterator[PrivateEngine]:
    """Run an engine of our own. Ask `available` first."""
    with short_directory() as directory, PrivateEngine(directory / "engine") as engine:
        yield engine
