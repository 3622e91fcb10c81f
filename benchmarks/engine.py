"""How many teardowns a second the engine pays, and what a slow provider costs.

    .venv/bin/python -m paperclip_env.stack run -- .venv/bin/python -m benchmarks.engine

Runs on an empty, migrated database with a provider in memory, so that what is measured is the engine and PostgreSQL.
Each row is one teardown: claim, identify, inspect, announce, delete, inspect, identify, settle. Prints one JSON object.
Compare the ratios within one run; the machine is not quiet.
"""

from __future__ import annotations

import argparse
import json
import os
import time

import django


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--leases", type=int, default=400)
    parser.add_argument("--latency", type=float, default=0.05, help="seconds that each call of the slow provider takes")
    options = parser.parse_args()

    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "paperclip_env.settings")
    os.environ.setdefault("LOG_LEVEL", "ERROR")
    django.setup()
    from django.core.management import call_command

    from cleanup.engine import Engine
    from cleanup.slots import Slots
    from providers import registry

    call_command("migrate", verbosity=0)
    registry._BUILT_IN["rehearsal"] = "tests.rehearsal:RehearsalProvider"  # noqa: SLF001 - as the tests do

    def paid_per_second(latency: float, at_once: int) -> float:
        account = _owing(options.leases, latency)
        engine = Engine(slots=Slots(at_once * 4))  # an account gets a quarter
        started = time.perf_counter()
        tally = engine.sweep(account.pk, seconds=600)
        took = time.perf_counter() - started
        if tally.outcomes != {"proven": options.leases}:
            raise SystemExit(f"not all were paid: {tally.outcomes}")
        return round(options.leases / took, 1)

    print(
        json.dumps(
            {
                "leases": options.leases,
                "no latency, 50 at once": paid_per_second(0.0, 50),
                f"{options.latency} s a call, 1 at once": paid_per_second(options.latency, 1),
                f"{options.latency} s a call, 50 at once": paid_per_second(options.latency, 50),
            },
            indent=2,
        )
    )


def _owing(number: int, latency: float):  # noqa: ANN202 - a model, known only after the set-up
    from leases.models import Installation
    from providers.contract import MARK_INSTALLATION, Resource
    from tests import factories
    from tests.rehearsal import WORLDS, Box, new_world

    key = new_world()
    world = WORLDS[key]
    for call in ("identify", "inspect", "delete"):
        world.hooks[call] = lambda _: time.sleep(latency)
    account = factories.account(
        provider="rehearsal", endpoint={"world": key}, attested_identity=world.identity, concurrency_limit=1000
    )
    environment = factories.environment(account)
    marks = {MARK_INSTALLATION: str(Installation.current().mark)}
    for _ in range(number):
        lease = factories.lease(environment, endpoint={"world": key})
        world.boxes[lease.resource_id] = Box(Resource(lease.resource_id, lease.resource_name, marks))
        factories.teardown(lease)
    return account


if __name__ == "__main__":
    main()
