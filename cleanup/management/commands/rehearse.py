"""`manage.py rehearse`: serve a provider's API from memory, with faults on demand, to rehearse an outage against.

Needs no database. Ctrl-C ends it, and with it all that runs in its sandboxes.
"""

from __future__ import annotations

import json
import secrets
import signal
import tempfile
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from providers.rehearsing import rehearsal, rehearsals

_HIGHEST_PORT = 65535


class Command(BaseCommand):
    help = "Serve a provider's API from memory until Ctrl-C. It isolates nothing: commands run as you."
    requires_system_checks = ()

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("provider", choices=rehearsals())
        parser.add_argument("--host", default="127.0.0.1", help="who reaches this address runs commands here")
        parser.add_argument("--port", type=_port, default=0, help="0, the default: any that is free")
        parser.add_argument("--key", type=_key, help="API key to let in; one is made up otherwise")
        parser.add_argument("--account", help="the provider's id of the key's account; one is made up otherwise")
        parser.add_argument("--transition", type=_seconds, default=1.0, help="seconds that each transition takes")
        parser.add_argument("--cache", type=_seconds, default=2.0, help="seconds that a read may be old")
        parser.add_argument("--index-lag", type=_seconds, default=2.0, help="seconds that lists are behind")
        parser.add_argument("--quota", type=_quota, help="how many sandboxes an account may have")
        parser.add_argument("--state", type=Path, help="file to keep the world in, from one start to the next")
        parser.add_argument("--json", action="store_true", help="print address and key as one JSON object")

    def handle(self, *_: Any, **options: Any) -> None:
        previous = {number: signal.signal(number, _interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            with _directory(options["state"]) as directory:
                self._serve(directory, options)
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _serve(self, directory: Path, options: dict[str, Any]) -> None:
        found = rehearsal(options["provider"])
        names = ("transition", "cache", "index_lag", "quota", "state")
        try:
            world = found.world_class(directory, **{name: options[name] for name in names})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CommandError(f"--state: {options['state']} cannot be read as a world: {error!r}") from error
        key = options["key"] or next(iter(world.keys), None) or f"rehearsal-{secrets.token_hex(12)}"
        account = world.add_key(key, options["account"] or world.keys.get(key))
        try:
            server = found(world, host=options["host"], port=options["port"])
        except OSError as error:
            raise CommandError(f"cannot serve at {options['host']}, port {options['port']}: {error}") from error
        try:
            with suppress(KeyboardInterrupt):
                self._say({"provider": found.key, "url": server.url, "key": key, "account": account}, options)
                server.serve()
        finally:
            server.close()

    def _say(self, facts: dict[str, str], options: dict[str, Any]) -> None:
        if options["json"]:
            self.stdout.write(json.dumps(facts))
        else:
            for name, value in facts.items():
                self.stdout.write(f"{name:<9} {value}")
            self.stdout.write("Ctrl-C ends it, and all that runs in its sandboxes.")
        self.stdout.flush()


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ArgumentTypeError(f"{text!r} is not a number of seconds, 0 or more")
    return seconds


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > _HIGHEST_PORT:
        raise ArgumentTypeError(f"{text!r} is not a port, 0 to {_HIGHEST_PORT}")
    return int(text)


def _quota(text: str) -> int:
    if not text.isdecimal():
        raise ArgumentTypeError(f"{text!r} is not a number of sandboxes, 0 or more")
    return int(text)


def _key(text: str) -> str:
    if not text or not (text.isascii() and text.isprintable() and " " not in text):
        raise ArgumentTypeError("a key is printable ASCII without spaces: it travels in a header")
    return text


def _interrupt(*_: object) -> None:
    # Once: a second one would interrupt the tidying up.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


@contextmanager
def _directory(state: Path | None) -> Iterator[Path]:
    """Return where the sandboxes' files are: beside the file of the world, or in a place that is thrown away."""
    if state is not None:
        state.parent.mkdir(parents=True, exist_ok=True)
        yield state.with_name(state.name + ".files")
        return
    with tempfile.TemporaryDirectory(prefix="rehearsal-", ignore_cleanup_errors=True) as directory:
        yield Path(directory)
