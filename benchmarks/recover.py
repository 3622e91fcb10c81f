"""How many lost creations a second are found, owned, destroyed and proven, one at a time and 50 at once.

    .venv/bin/python -m paperclip_env.stack run -- .venv/bin/python -m benchmarks.recover

Runs on an empty, migrated database with a provider in memory whose calls take their time. Each creation is a real
acquire whose reply is lost; measured is what follows: its recovery (who is it, find), the teardown that it owes (who
is it, look, delete, look, who is it), and the end of its run's startup, which calls nobody. Prints one JSON object.
Compare the ratios within one run; the machine is not quiet. Where 50 at once comes near no latency, the calls are
hidden, and what is left is the engine's and PostgreSQL's own time.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import django


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--lost", type=int, default=60)
    parser.add_argument("--latency", type=float, default=0.05, help="seconds that each call takes")
    options = parser.parse_args()

    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "paperclip_env.settings")
    os.environ.setdefault("LOG_LEVEL", "ERROR")
    django.setup()
    from django.core.management import call_command

    from providers import registry

    call_command("migrate", verbosity=0)
    registry._BUILT_IN["rehearsal"] = "tests.rehearsal:RehearsalProvider"  # noqa: SLF001 - as the tests do
    bound = _recovered_per_second(options.lost, 0.0, 50)
    one, many = (_recovered_per_second(options.lost, options.latency, at_once) for at_once in (1, 50))
    print(
        json.dumps(
            {
                "lost creations": options.lost,
                "a second, no latency, 50 at once": round(bound, 1),
                f"a second, {options.latency} s a call, 1 at once": round(one, 1),
                f"a second, {options.latency} s a call, 50 at once": round(many, 1),
                "50 at once against 1": round(many / one, 1),
                "50 at once against no latency": round(many / bound, 2),
            },
            indent=2,
        )
    )


def _recovered_per_second(number: int, latency: float, at_once: int) -> float:
    from cleanup.engine import Engine
    from cleanup.slots import Slots
    from leases.models import Lease, Obligation

    account, world = _losing(number)
    for call in ("identify", "find", "inspect", "delete"):
        world.hooks[call] = lambda _: time.sleep(latency)
    engine = Engine(slots=Slots(at_once * 4))  # an account gets a quarter
    outcomes: Counter[str] = Counter()
    started = time.perf_counter()
    while (tally := engine.sweep(account.pk, seconds=600)).claimed:
        outcomes.update(tally.outcomes)
    took = time.perf_counter() - started
    states = Counter(Lease.objects.filter(account=account).values_list("state", flat=True))
    owed = Obligation.objects.filter(account=account, closed_at__isnull=True).count()
    if states != {"failed": number} or owed or world.boxes:
        raise SystemExit(f"not all were recovered: {states}, {owed} owed, {len(world.boxes)} left, {outcomes}")
    return number / took


def _losing(number: int) -> tuple[Any, Any]:
    """Return an account, and its world, at which the reply of so many creations was lost."""
    from django.db import connection

    import leases
    from leases.errors import AcquireUncertain
    from providers.contract import ErrorKind, ProviderError
    from tests import factories
    from tests.rehearsal import WORLDS, new_world

    def lose(_: str) -> None:
        raise ProviderError(ErrorKind.CONNECTION, "the reply is lost")

    key = new_world()
    world = WORLDS[key]
    world.after["create"] = lose
    account = factories.account(
        provider="rehearsal", endpoint={"world": key}, attested_identity=world.identity, concurrency_limit=1000
    )
    environment = factories.environment(account)

    def acquire(run_id: Any) -> None:
        try:
            leases.acquire(environment.pk, company_id=account.company_id, run_id=run_id)
        except AcquireUncertain:
            return
        finally:
            connection.close()
        raise SystemExit("an acquire whose reply was lost returned a lease")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(acquire, [factories.run(account.company).pk for _ in range(number)]))
    return account, world


if __name__ == "__main__":
    main()
