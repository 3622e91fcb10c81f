"""`test`, `demo` and `run`: one command against servers that are thrown away afterwards."""

import os
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

from paperclip_env.stack import foreground
from paperclip_env.stack.account import server_account
from paperclip_env.stack.emptiness import require_empty
from paperclip_env.stack.servers import servers
from paperclip_env.stack.state import CHECKOUT, temporary_state
from paperclip_env.stack.up import running_environment


def test(arguments: Sequence[str]) -> int:
    """Run pytest on all cores. `arguments` come last, so that a caller's own `-n` wins."""
    with _throw_away() as environment:
        cores = {"PYTEST_XDIST_AUTO_NUM_WORKERS": os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS", str(_cores()))}
        return foreground.run([sys.executable, "-m", "pytest", "-n", "auto", *arguments], {**environment, **cores})


def demo(arguments: Sequence[str]) -> int:
    """Run `paperclip_env.demo` on an empty, migrated database."""
    named = [name for name in ("DATABASE_URL", "CELERY_BROKER_URL") if os.environ.get(name, "").strip()]
    with _throw_away() as given:
        require_empty(named, given)
        environment = {**given, "DEBUG": "1"}
        manage = [sys.executable, str(CHECKOUT / "manage.py")]
        code = foreground.run([*manage, "migrate", "--verbosity", "0"], environment)
        return code or foreground.run([sys.executable, "-m", "paperclip_env.demo", *arguments], environment)


def run(command: Sequence[str]) -> int:
    """Run any command with the environment that leads to the servers."""
    with _throw_away() as environment:
        return foreground.run(command, environment)


def run_in_up(command: Sequence[str]) -> int:
    """Run any command with the environment of the running `make up`."""
    return foreground.run(command, {**running_environment(), "PYTHONPATH": _with_checkout()})


def _with_checkout() -> str:
    """Where a command finds our modules, wherever its own script is."""
    return os.pathsep.join(filter(None, (str(CHECKOUT), os.environ.get("PYTHONPATH", ""))))


@contextmanager
def _throw_away() -> Iterator[Mapping[str, str]]:
    with temporary_state(server_account()) as state, servers(lambda: nullcontext(state), durable=False) as served:
        static = state.root / "static"  # whitenoise wants it to be there
        static.mkdir()
        os.chdir(CHECKOUT)
        yield {
            **os.environ,
            **served.addresses,
            "DJANGO_SETTINGS_MODULE": "paperclip_env.settings",
            "PAPERCLIP_STATE_DIR": str(state.root / "state"),
            "SECRET_KEY": secrets.token_urlsafe(48),
            "PLAIN_HTTP": "1",
            "STATIC_ROOT": str(static),
            "PYTHONPATH": _with_checkout(),
        }


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
