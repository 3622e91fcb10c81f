"""Serve a rehearsal until Ctrl-C."""

from __future__ import annotations

import argparse
import secrets
import signal
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from providers.daytona.rehearsal.server import Rehearsal
from providers.daytona.rehearsal.world import World


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m providers.daytona.rehearsal", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="who reaches this address runs commands here")
    parser.add_argument("--port", type=int, default=8970)
    parser.add_argument("--key", help="API key to let in; one is made up otherwise")
    parser.add_argument("--organization", help="id of the key's organisation")
    parser.add_argument("--transition", type=float, default=1.0, help="seconds that each transition takes")
    parser.add_argument("--cache", type=float, default=2.0, help="seconds that a read may be old; the service says 10")
    parser.add_argument("--index-lag", type=float, default=2.0, help="seconds that lists are behind")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    key = options.key or f"rehearsal-{secrets.token_hex(12)}"
    with tempfile.TemporaryDirectory(prefix="daytona-", ignore_cleanup_errors=True) as directory:
        world = World(Path(directory), transition=options.transition, cache=options.cache, index_lag=options.index_lag)
        organization = world.add_key(key, options.organization)
        rehearsal = Rehearsal(world, host=options.host, port=options.port)
        print(f"address       {rehearsal.url}\nkey           {key}\norganisation  {organization}", flush=True)
        try:
            with suppress(KeyboardInterrupt):
                rehearsal.serve()
        finally:
            world.close()


if __name__ == "__main__":
    main()
