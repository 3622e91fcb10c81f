"""What it is worth to keep connections alive between calls: connections opened, and calls a second, over TLS.

    .venv/bin/python -m benchmarks.sessions

Tears sandboxes of a rehearsed Daytona down (identify, look, stop, look: an attempt, which has its own adapter), once
with connections kept and once with one for each call, turn by turn in one run. Between the two is a relay that takes
its time (`--round-trip`), as a network does: opening a connection costs two round trips more than using one, for TCP
and for TLS. Client, relay and server share this process. Needs `openssl`. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from providers import sessions
from providers.daytona import DaytonaProvider
from providers.daytona.rehearsal import Rehearsal, rehearsing
from providers.daytona.schemas import DaytonaConfig, DaytonaEndpoint
from tests.authority import Authority

KEY = "benchmark"
WITHIN = 60.0
CALLS = 4


def _teardown(endpoint: DaytonaEndpoint, sandbox: str) -> None:
    daytona = DaytonaProvider(endpoint, KEY)
    daytona.identify(within=WITHIN)
    daytona.inspect(sandbox, within=WITHIN)
    daytona.stop(sandbox, grace=1, within=WITHIN)
    daytona.inspect(sandbox, within=WITHIN)


@contextmanager
def _network(target: tuple[str, int], round_trip: float) -> Iterator[int]:
    """Pass connections on to `target`, as late as over a network of this round trip (seconds), and yield the port."""

    def carry(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                time.sleep(round_trip / 2)
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def connect(client: socket.socket) -> None:
        time.sleep(round_trip)  # the kernel has answered the client at once
        with client, socket.create_connection(target) as server:
            back = threading.Thread(target=carry, args=(server, client), daemon=True)
            back.start()
            carry(client, server)
            back.join()

    def accept(listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=connect, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        accepting = threading.Thread(target=accept, args=(listener,), daemon=True)
        accepting.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        accepting.join()


@contextmanager
def _one_connection_for_each_call() -> Iterator[None]:
    """Use no idle connection again, as before sessions were shared. The session with its TLS context stays."""
    limit = sessions.IDLE_SECONDS
    sessions.IDLE_SECONDS = 0.0
    try:
        yield
    finally:
        sessions.IDLE_SECONDS = limit


def _measured(server: Rehearsal, endpoint: DaytonaEndpoint, boxes: list[str], threads: int) -> tuple[int, float]:
    """Return how many connections were opened, and how many seconds it took."""
    connections, started = server.connections, time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda box: _teardown(endpoint, box), boxes))
    return server.connections - connections, time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--teardowns", type=int, default=50, help="in each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--round-trip", type=float, default=20.0, help="of the network, in milliseconds; 0: none")
    asked = parser.parse_args()

    kept, single = [0, 0.0], [0, 0.0]
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        server = stack.enter_context(rehearsing(transition=0.0))
        authority = Authority(Path(directory) / "authority")
        server.speak_tls(authority.serving())
        server.world.add_key(KEY)
        url = server.url
        if asked.round_trip:
            port = int(server.root.rpartition(":")[2])
            network = stack.enter_context(_network(("127.0.0.1", port), asked.round_trip / 1000))
            url = f"https://127.0.0.1:{network}{server.prefix}"
        endpoint = DaytonaEndpoint(url=url, tls_ca=str(authority.certificate))
        daytona = DaytonaProvider(endpoint, KEY)
        boxes = [
            daytona.create(f"box-{number}", {}, DaytonaConfig(), within=WITHIN).resource.resource_id
            for number in range(asked.teardowns)
        ]
        for box in boxes:
            daytona.stop(box, grace=0, within=WITHIN)
        for _ in range(asked.rounds):
            connections, seconds = _measured(server, endpoint, boxes, asked.threads)
            kept = [kept[0] + connections, kept[1] + seconds]
            with _one_connection_for_each_call():
                connections, seconds = _measured(server, endpoint, boxes, asked.threads)
            single = [single[0] + connections, single[1] + seconds]
        sessions.sessions.forget()
    calls = CALLS * asked.teardowns * asked.rounds

    def summary(connections: float, seconds: float) -> dict[str, float]:
        return {
            "connections": connections,
            "calls_a_second": round(calls / seconds, 1),
            "ms_a_teardown": round(1000 * seconds / (asked.teardowns * asked.rounds), 2),
        }

    print(
        json.dumps(
            {
                "calls": calls,
                "threads": asked.threads,
                "round_trip_ms": asked.round_trip,
                "kept": summary(*kept),
                "one_for_each_call": summary(*single),
                "times_as_fast": round(single[1] / kept[1], 2),
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
