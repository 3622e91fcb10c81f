"""`make up`: the whole system on this machine, until somebody stops it or a part of it ends.

Answers for: one address and one login, the same at every start; logs in `.local/log`; nothing restarted in silence; all
parts stopped in the order in which they need each other.
"""

import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NoReturn

from paperclip_env.stack import first_login
from paperclip_env.stack.account import server_account
from paperclip_env.stack.foreground import Stopped
from paperclip_env.stack.ports import LOOPBACK, is_free
from paperclip_env.stack.problem import Problem
from paperclip_env.stack.servers import servers
from paperclip_env.stack.services import Services
from paperclip_env.stack.state import CHECKOUT, kept_secret, kept_state, local_directory, locked

_DEFAULT_PORT = 8000
_HIGHEST_PORT = 65535
_WEB_ANSWERS_S = 60.0

_WEB = [
    *(sys.executable, "-m", "gunicorn", "paperclip_env.wsgi", "--no-control-socket"),
    *("--worker-class", "gthread", "--workers", "2", "--threads", "8"),
]
_CELERY = [sys.executable, "-m", "celery", "-A", "paperclip_env"]
# The workers have nothing to tell each other, and a hint needs no event.
_WORKER = [*_CELERY, "worker", "-P", "threads", "--without-gossip", "--without-mingle", "--without-heartbeat"]
_BEAT = [*_CELERY, "beat"]


def up() -> int:
    """Run everything until somebody stops it, or until one part ends by itself, which is an error."""
    try:
        _run()
    except Stopped:
        return 0  # as it was asked to


def _run() -> NoReturn:
    port = _web_port()
    local = local_directory()
    with ExitStack() as stack:
        stack.enter_context(locked(local / "lock", "`make up` already runs from this checkout"))
        _say("Starting the database and the broker ...")
        served = stack.enter_context(servers(partial(kept_state, local, server_account()), durable=True))
        environment = _environment(local, served.addresses)
        services = stack.enter_context(Services(local / "log", environment, served.processes))

        _say("Preparing the database ...")
        manage = [sys.executable, str(CHECKOUT / "manage.py")]
        services.complete("migrate", [*manage, "migrate", "--noinput"])
        services.complete("static", [*manage, "collectstatic", "--noinput", "--verbosity", "0"])
        known_before = (local / "admin-password").exists()
        password = kept_secret(local / "admin-password", 12)
        known = services.complete(
            "login",
            [sys.executable, "-m", "paperclip_env.stack.first_login"],
            # A password made just now is not one that somebody changed: data that outlived `.local` gets it as well.
            extra={first_login.PASSWORD_VARIABLE: password, first_login.RESET_VARIABLE: "" if known_before else "1"},
            accepted=(first_login.WORKS, first_login.CHANGED),
        )

        _say("Starting web, worker and beat ...")
        # Stopped in the reverse order: beat, worker, web.
        services.start("web", [*_WEB, "--bind", f"{LOOPBACK}:{port}"])
        services.start("worker", _WORKER)
        services.start("beat", _BEAT)
        _wait_for_web(services, port)
        stack.enter_context(_published(local, environment))
        _say(
            f"\n  address   http://{LOOPBACK}:{port}/\n  user      {first_login.USER}"
            f"\n  password  {password if known == first_login.WORKS else '(changed since the first start)'}"
            f"\n  logs      {local / 'log'}\n\nCtrl-C stops everything."
        )
        raise Problem(f"{services.wait()}Everything else was stopped.")


def running_environment() -> Mapping[str, str]:
    """Return what the parts of the running `make up` have in their environment. Raises `Problem` if none runs."""
    local = local_directory()
    try:
        with locked(local / "lock", ""):
            pass
    except Problem:
        try:
            found: dict[str, str] = json.loads(_environment_file(local).read_text())
        except OSError:
            raise Problem("`make up` is still starting. Try again in a few seconds.") from None
        return found
    raise Problem("`make up` does not run from this checkout.")


def _environment(local: Path, addresses: Mapping[str, str]) -> dict[str, str]:
    return {
        "PLAIN_HTTP": "1",
        "SECRET_KEY": kept_secret(local / "secret-key"),
        **{name: value for name, value in os.environ.items() if value},
        **addresses,
        "STATIC_ROOT": str(local / "static"),
        "PAPERCLIP_STATE_DIR": os.environ.get("PAPERCLIP_STATE_DIR") or str(local / "state"),
        "DJANGO_SETTINGS_MODULE": "paperclip_env.settings",
        "PYTHONUNBUFFERED": "1",
    }


def _web_port() -> int:
    text = os.environ.get("PORT", "").strip() or str(_DEFAULT_PORT)
    if not text.isdecimal() or not 0 < int(text) <= _HIGHEST_PORT:
        raise Problem(f"PORT must be a number between 1 and {_HIGHEST_PORT}, not {text!r}.")
    try:
        free = is_free(int(text))
    except PermissionError:
        raise Problem(f"This user may not listen on port {text}. Choose one above 1023: PORT=8010 make up") from None
    if not free:
        raise Problem(f"Port {text} is in use by another program. Stop that one, or choose another: PORT=8010 make up")
    return int(text)


def _wait_for_web(services: Services, port: int) -> None:
    until = time.monotonic() + _WEB_ANSWERS_S
    while True:
        if ended := services.ended():
            raise Problem(ended)
        try:
            with urllib.request.urlopen(f"http://{LOOPBACK}:{port}/healthz", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            if time.monotonic() > until:
                raise Problem(f"The web server does not answer; see {services.log('web')}.") from None
        time.sleep(0.1)


def _environment_file(local: Path) -> Path:
    return local / "environment.json"


class _published:  # noqa: N801 -- used as a `with` statement's verb
    """Keep what `run --up` needs in a file of mode 0600 while everything runs."""

    def __init__(self, local: Path, environment: Mapping[str, str]) -> None:
        self._file = _environment_file(local)
        self._environment = environment

    def __enter__(self) -> None:
        self._file.unlink(missing_ok=True)
        handle = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w") as file:
            json.dump(dict(self._environment), file)

    def __exit__(self, *_: object) -> None:
        self._file.unlink(missing_ok=True)


def _say(text: str) -> None:
    print(text, flush=True)
