"""How long from a commit to the hint in the broker, and from a deadline to it.

    .venv/bin/python -m paperclip_env.stack run -- .venv/bin/python -m benchmarks.beat

Starts a real beat on an empty, migrated database and inserts rows one by one from another session, as a release does.
Each sample is one account of its own, so that no mark of an earlier hint is in the way, and begins when the beat
sleeps. Prints one JSON object, times in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import django


def _summary(samples: list[float]) -> dict[str, float]:
    ordered = sorted(samples)
    return {
        "n": len(ordered),
        "median": round(statistics.median(ordered), 2),
        "p99": round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))], 2),
        "max": round(ordered[-1], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--samples", type=int, default=200)
    samples = parser.parse_args().samples

    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "paperclip_env.settings")
    django.setup()
    from django.core.management import call_command

    from leases.models import Obligation
    from tests import factories
    from tests.beats import Queue, beats, eventually, leader_sleeps, owed

    def settle(row: Obligation) -> None:
        """Nobody works here: left due, the row would be hinted again."""
        Obligation.objects.filter(pk=row.pk).update(due_at=factories.at(86_400))

    call_command("migrate", verbosity=0)
    hints = Queue()
    commits, deadlines = [], []
    with tempfile.TemporaryDirectory() as directory, beats(Path(directory)) as start:
        start().leads()
        for _ in range(samples):
            account = factories.account()
            lease = factories.lease(factories.environment(account))
            eventually(leader_sleeps, "the leader sleeps")
            time.sleep(0.02)  # the beat's own pause between two looks, which an idle fleet never meets
            row = factories.teardown(lease)
            committed = time.perf_counter()
            if hints.hint() != account.pk:
                raise SystemExit("another hint came: is this database used by somebody else?")
            commits.append((time.perf_counter() - committed) * 1000)
            settle(row)
        for _ in range(samples):
            row = owed(factories.account(), 0.05)
            hints.hint()
            if row.due_at is None:
                raise SystemExit("the row has no deadline")
            deadlines.append((factories.database_now() - row.due_at).total_seconds() * 1000)
            settle(row)
    hints.close()
    print(json.dumps({"commit_to_hint_ms": _summary(commits), "deadline_to_hint_ms": _summary(deadlines)}, indent=2))


if __name__ == "__main__":
    main()
