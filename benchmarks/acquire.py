"""What acquiring costs beside the provider: statements and time, for a creation, a start, and a repeated request.

    .venv/bin/python -m paperclip_env.stack run -- .venv/bin/python -m benchmarks.acquire

Runs on an empty, migrated database. Statements are counted with a provider in memory; the rates are taken at the
rehearsal of Daytona, over HTTP, whose transitions take no time, with so many callers at once. Prints one JSON object.
Compare the ratios within one run; the machine is not quiet.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import django


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--leases", type=int, default=60)
    parser.add_argument("--callers", type=int, default=8)
    options = parser.parse_args()

    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "paperclip_env.settings")
    os.environ.setdefault("LOG_LEVEL", "ERROR")
    django.setup()
    from django.core.management import call_command

    call_command("migrate", verbosity=0)
    print(json.dumps({"statements": _statements(), "a second": _rates(options.leases, options.callers)}, indent=2))


def _statements() -> dict[str, int]:
    from django.db import connection
    from django.test.utils import CaptureQueriesContext

    import leases
    from cleanup.engine import Engine
    from providers import registry
    from tests import factories
    from tests.rehearsal import new_world

    registry._BUILT_IN["rehearsal"] = "tests.rehearsal:RehearsalProvider"  # noqa: SLF001 - as the tests do
    account = factories.account(provider="rehearsal", endpoint={"world": new_world()}, attested_identity="")
    environment = factories.environment(account, policy="reuse_by_environment")
    counted: dict[str, int] = {}

    def count(what: str, call: Callable[[], Any]) -> Any:
        with CaptureQueriesContext(connection) as queries:
            value = call()
        counted[what] = len(queries)
        return value

    def acquire(**how: Any) -> Any:
        run = factories.run(account.company)
        return lambda: leases.acquire(environment.pk, company_id=account.company_id, run_id=run.pk, **how)

    acquire()()  # the account has attested itself, and every cache is warm
    lease = count("a creation", acquire(request_key="one"))
    run_id = lease.run_id
    count(
        "the same request again",
        lambda: leases.acquire(environment.pk, company_id=account.company_id, run_id=run_id, request_key="one"),
    )
    count("a release", lambda: leases.release(lease.pk))
    count("its teardown", lambda: Engine().sweep(account.pk))
    count("a start by another run", acquire())
    return counted


def _rates(number: int, callers: int) -> dict[str, float]:
    from django.db import connection

    import leases
    from cleanup.engine import Engine
    from leases.models import Credential, Lease
    from providers.daytona.rehearsal import rehearsing
    from tests import factories

    with rehearsing(transition=0.0) as server:
        os.environ["BENCHMARK_KEY"] = "a-key-of-the-rehearsal"
        server.world.add_key("a-key-of-the-rehearsal")
        company = factories.company()
        credential = Credential.objects.create(company=company, name="key", reference="env:BENCHMARK_KEY")
        account = factories.account(
            company, provider="daytona", endpoint={"url": server.url}, credential=credential, attested_identity=""
        )
        config = {"snapshot": "small"}
        environment = factories.environment(account, policy="reuse_by_environment", config=config)
        runs = [[factories.run(company).pk for _ in range(number)] for _ in range(2)]

        def acquire(run_id: Any) -> None:
            leases.acquire(environment.pk, company_id=company.pk, run_id=run_id)
            connection.close()

        def a_second(call: Callable[[Any], None], subjects: list[Any]) -> float:
            began = time.perf_counter()
            with ThreadPoolExecutor(callers) as pool:
                list(pool.map(call, subjects))
            return round(len(subjects) / (time.perf_counter() - began), 1)

        rates = {"creations": a_second(acquire, runs[0])}
        for lease in Lease.objects.filter(environment=environment):
            leases.release(lease.pk)
        began = time.perf_counter()
        Engine().sweep(account.pk, seconds=600)
        rates["teardowns (stop)"] = round(number / (time.perf_counter() - began), 1)
        rates["starts"] = a_second(acquire, runs[1])
    return rates


if __name__ == "__main__":
    main()
