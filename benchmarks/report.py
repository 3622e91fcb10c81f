# ruff: noqa: S608 - every statement is made of constants
"""How long the ownership report takes for a fleet, against what only counts it; and that history costs it nothing.

    .venv/bin/python -m paperclip_env.stack run -- .venv/bin/python -m benchmarks.report

Runs on an empty, migrated database. Makes so many leases, nine in ten of them kept and some of these held in every way,
then as many again that are history, and prints one JSON object. Compare the ratios within one run; the machine is not
quiet. `--explain` prints the plans of the report's two statements, slowest parts first to look at.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import django


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--leases", type=int, default=50_000)
    parser.add_argument("--history", type=int, default=100_000, help="ended leases, beside them")
    parser.add_argument("--explain", action="store_true", help="print the plans on standard error")
    options = parser.parse_args()

    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "paperclip_env.settings")
    os.environ.setdefault("LOG_LEVEL", "ERROR")
    django.setup()
    from django.core.management import call_command
    from django.db import connection

    from leases import holds
    from leases.models import Lease, Obligation
    from leases.ownership import next_due, ownership

    call_command("migrate", verbosity=0)
    connection.execute_wrappers.append(_patient)
    _make(options.leases // 10, first=0)
    tenth = _seconds(ownership)
    _make(options.leases - options.leases // 10, first=options.leases // 10)
    whole = _seconds(ownership)
    _make_history(options.history)
    beside_history = _seconds(ownership)
    told = ownership()
    if options.explain:
        _explain()
    counted = _seconds(lambda: Obligation.objects.filter(closed_at=None).count())
    named = _seconds(lambda: Lease.objects.filter(state__in=Lease.KEPT).values_list("pk", "kept_until").__len__())
    print(
        json.dumps(
            {
                "leases": options.leases,
                "kinds": {group.kind.value: group.count for group in told.groups},
                "seconds": round(whole, 2),
                "ten times the leases against one": round(whole / tenth, 1),
                f"with {options.history} ended leases against without": round(beside_history / whole, 2),
                "the holds of all kept ones, of it": round(_seconds(lambda: list(holds.kept())) / beside_history, 2),
                "next due of dispose, of it": round(_seconds(lambda: next_due("dispose")) / beside_history, 2),
                "against reading the kept leases alone": round(beside_history / named, 1),
                "against counting what is open": round(beside_history / counted, 1),
            },
            indent=2,
        )
    )


def _patient(execute: Any, sql: Any, params: Any, many: Any, context: Any) -> Any:
    """Making the rows takes longer than a statement may otherwise."""
    context["cursor"].connection.execute("SET statement_timeout = 0")
    return execute(sql, params, many, context)


def _seconds(work: Callable[[], Any], times: int = 3) -> float:
    """Return the shortest of some runs: what else the machine does only ever adds."""
    took = []
    for _ in range(times):
        started = time.perf_counter()
        work()
        took.append(time.perf_counter() - started)
    return min(took)


_MADE = """
WITH made AS (
    INSERT INTO leases_lease (id, company_id, environment_id, account_id, issue_id, run_id, state, policy, outcome,
        reason, provider, endpoint, credential_reference, account_identity, config, drain_seconds, reuse_idle_for,
        retain_for, hourly_price, resource_id, resource_name, epoch, scope, fingerprint, files_lost, acquired_at,
        released_at, expires_at, kept_until, orphaned_at)
    SELECT gen_random_uuid(), %(company)s, %(environment)s, %(account)s,
           (%(issues)s::uuid[])[1 + n %% cardinality(%(issues)s::uuid[])],
           (%(runs)s::uuid[])[1 + n %% cardinality(%(runs)s::uuid[])],
           {state}, 'ephemeral', 'succeeded', '', 'local', '{{}}', '', 'identity', '{{}}', 30, interval '7 d',
           interval '30 d', 0.1, 'box-' || n || %(suffix)s, 'box-' || n, 1,
           CASE WHEN n %% 3 = 0 THEN 'scope' ELSE '' END,
           '', false, now() - interval '9 h', {released}, now() + interval '2 d', {kept_until}, {orphaned}
      FROM generate_series(%(first)s, %(first)s + %(number)s - 1) n
    RETURNING id, state
)
"""

_RECEIPTS = """
INSERT INTO leases_receipt (lease_id, account_id, company_uuid, run_uuid, resource_id, account_identity, epoch,
                            evidence, ended, attempt_id)
SELECT l.id, l.account_id, l.company_id, l.run_id, l.resource_id, l.account_identity, 1, %s, 'killed', gen_random_uuid()
  FROM leases_lease l WHERE l.state = %s AND NOT EXISTS (SELECT 1 FROM leases_receipt r WHERE r.lease_id = l.id)
"""

_HELD = """
INSERT INTO leases_hold (id, company_id, lease_id, kind, strength, holder, reason, until, ended_by)
SELECT gen_random_uuid(), l.company_id, l.id, kind.name, kind.strength, 'benchmark', '', now() + interval '5 d', ''
  FROM (SELECT l.*, row_number() OVER () AS n FROM leases_lease l WHERE l.state = 'released') l
  JOIN (VALUES (0, 'operator', 'always'), (1, 'export', 'soft'), (2, 'recovery_source', 'always'))
       kind(n, name, strength)
    ON l.n %% 7 = kind.n
ON CONFLICT DO NOTHING
"""


def _make(number: int, *, first: int) -> None:
    """Make so many leases: one in ten in use, the others kept: reusable, orphaned, or for their files."""
    from django.db import connection, transaction

    values = {**_tenant(), "suffix": uuid4().hex[:4], "number": number, "first": first}
    active = "n % 10 = 0"
    statement = _MADE.format(
        state=f"CASE WHEN {active} THEN 'active' ELSE 'released' END",
        released=f"CASE WHEN {active} THEN NULL ELSE now() - interval '1 h' END",
        kept_until=f"CASE WHEN {active} THEN NULL ELSE now() + n * interval '1 s' END",
        orphaned=f"CASE WHEN n % 3 = 1 AND NOT {active} THEN now() END",
    ).replace("n % ", "n %% ")
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(statement + "SELECT count(*) FROM made", values)
        cursor.execute(_RECEIPTS, ["stopped", "released"])
        cursor.execute(_HELD.replace("%%", "%"))
    with connection.cursor() as cursor:
        cursor.execute("VACUUM ANALYZE")


def _make_history(number: int) -> None:
    from django.db import connection, transaction

    values = {**_tenant(), "suffix": uuid4().hex[:4], "number": number, "first": 0}
    statement = _MADE.format(state="'expired'", released="now()", kept_until="NULL", orphaned="NULL")
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(statement + "SELECT count(*) FROM made", values)
        cursor.execute(_RECEIPTS, ["destroyed", "expired"])
    with connection.cursor() as cursor:
        cursor.execute("VACUUM ANALYZE")


def _tenant() -> dict[str, Any]:
    """A company with an environment, and fifty issues and runs of which one in ten is live."""
    from tests import factories

    account = factories.account(attested_identity="identity")
    company = account.company
    issues = [factories.issue(company) for _ in range(50)]
    runs = [
        factories.run(company, issue=issue, status="running" if n % 10 == 0 else "failed")
        for n, issue in enumerate(issues)
    ]
    return {
        "company": company.pk,
        "environment": factories.environment(account).pk,
        "account": account.pk,
        "issues": [issue.pk for issue in issues],
        "runs": [run.pk for run in runs],
    }


def _explain() -> None:
    import sys

    from django.db import connection

    from leases import ownership

    def plan(execute: Any, sql: Any, params: Any, many: Any, context: Any) -> Any:
        if "FROM leases_lease l" in str(sql):
            cursor = context["cursor"].connection.cursor()
            cursor.execute("EXPLAIN (ANALYZE, BUFFERS, COSTS OFF) " + sql, params)
            print("\n".join(line for (line,) in cursor.fetchall()), "\n", file=sys.stderr)
        return execute(sql, params, many, context)

    with connection.execute_wrapper(plan):
        ownership.ownership()


if __name__ == "__main__":
    main()
