"""What a test session needs before Django's settings are read.

Answers for: a sentence instead of a traceback where no servers are given, and a broker database of its own for each
parallel test process. (pytest-django gives each a PostgreSQL database of its own.)
"""

import atexit
import os
import shutil
import sys
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

import pytest


def _prepare() -> str | None:
    """Set the environment; return what is missing."""
    for name in ("DATABASE_URL", "CELERY_BROKER_URL"):
        if not os.environ.get(name):
            return f"{name} is not set. Use `make test`, or `.venv/bin/python -m paperclip_env.stack test -k NAME`."
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "paperclip_env.settings")
    # Whatever the beats of the tests keep is this run's alone.
    state = tempfile.mkdtemp(prefix="paperclip-env-state-")
    atexit.register(shutil.rmtree, state, ignore_errors=True)
    os.environ["PAPERCLIP_STATE_DIR"] = state
    os.environ["PAPERCLIP_ARCHIVE_DIR"] = str(Path(state) / "archives")
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    broker = urlsplit(os.environ["CELERY_BROKER_URL"])
    if worker.startswith("gw") and broker.scheme in {"redis", "rediss"}:
        # Database 0 is left to whoever gave the address.
        os.environ["CELERY_BROKER_URL"] = broker._replace(path=f"/{int(worker[2:]) + 1}").geturl()
    return None


if _missing := _prepare():
    # Not pytest.exit: the folders' own conftest files import models, and pytest would show a traceback for either.
    sys.stderr.write(f"ERROR: {_missing}\n")
    raise SystemExit(pytest.ExitCode.USAGE_ERROR)


def pytest_configure() -> None:
    """Give the settings the same broker, and the same places for the beat's state and for archives.

    pytest-django has read them before this file where DJANGO_SETTINGS_MODULE was in the environment already, as it is
    in every parallel process.
    """
    from django.conf import settings

    settings.CELERY_BROKER_URL = os.environ["CELERY_BROKER_URL"]
    settings.PAPERCLIP_STATE_DIR = Path(os.environ["PAPERCLIP_STATE_DIR"])
    settings.PAPERCLIP_ARCHIVE_DIR = Path(os.environ["PAPERCLIP_ARCHIVE_DIR"])
    settings.STORAGES["workspace_archives"]["OPTIONS"]["location"] = os.environ["PAPERCLIP_ARCHIVE_DIR"]
