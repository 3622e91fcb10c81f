"""Debian's own brokers, started for a test and ended with it. Skipped with a reason where they are not installed."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import kombu
import pytest

from tests.beats import eventually

# RabbitMQ's own scripts first: Debian's wrapper of that name changes the user, who may not enter a test's directory.
_PATH = os.pathsep.join(["/usr/lib/rabbitmq/bin", os.environ.get("PATH", ""), "/usr/sbin"])


def _program(name: str) -> str:
    found = shutil.which(name, path=_PATH)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def _port() -> int:
    # Below 45,536: RabbitMQ's nodes talk to each other on this port and 20,000.
    for port in range(21_000 + os.getpid() % 10_000, 45_000):
        with closing(socket.socket()) as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port")


@contextmanager
def broker(kind: str, directory: Path) -> Iterator[str]:
    """Give the address of a running `redis` or `rabbitmq`."""
    with _redis(directory) if kind == "redis" else _rabbitmq(directory) as address:
        eventually(lambda: _answers(address), f"{kind} answers")
        yield address


@contextmanager
def _redis(directory: Path) -> Iterator[str]:
    port = _port()
    command = [_program("redis-server"), "--bind", "127.0.0.1", "--port", str(port), "--save", ""]
    with _running([*command, "--dir", str(directory)], directory):
        yield f"redis://127.0.0.1:{port}/0"


@contextmanager
def _rabbitmq(directory: Path) -> Iterator[str]:
    server = _program("rabbitmq-server")
    port, epmd = _port(), str(_port() + 1)
    environment = {
        **os.environ,
        "PATH": _PATH,
        "HOME": str(directory),
        "RABBITMQ_NODENAME": f"paperclip-{port}@localhost",
        "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
        "RABBITMQ_NODE_PORT": str(port),
        "RABBITMQ_MNESIA_BASE": str(directory / "data"),
        "RABBITMQ_LOG_BASE": str(directory / "log"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(directory / "no-plugins"),
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        "ERL_EPMD_PORT": epmd,
    }
    try:
        with _running([server], directory, environment):
            yield f"amqp://guest:guest@127.0.0.1:{port}//"
    finally:
        # The port mapper that Erlang starts outlives it.
        subprocess.run([_program("epmd"), "-kill"], env=environment, capture_output=True, check=False)


@contextmanager
def _running(command: list[str], directory: Path, environment: dict[str, str] | None = None) -> Iterator[None]:
    with (directory / "broker.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
        )
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _answers(address: str) -> bool:
    try:
        with kombu.Connection(address, connect_timeout=2) as connection:
            connection.ensure_connection(max_retries=1, timeout=2)
    except Exception:  # noqa: BLE001 - each transport has exceptions of its own
        return False
    return True
