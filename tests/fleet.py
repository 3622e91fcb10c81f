"""A fleet of runs held by controllers, and the time that passes for them, for tests: time is moved by moving rows.

The database server of a test session was started a moment ago, and no hold lapses within its own length of that
(`leases_up_since`); `a_server_that_was_always_there` says otherwise for the length of a test.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from django.db import connection

import leases
from cleanup.claims import LANE
from cleanup.engine import Engine
from leases.controllers import Controller
from leases.models import Attempt, Company, Obligation, Run
from tests import factories


@contextmanager
def server_up_since(moment: str) -> Iterator[None]:
    """Let the database say that its server is up since `moment`, an SQL expression."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT prosrc FROM pg_proc WHERE proname = 'leases_up_since'")
        source = cursor.fetchone()[0]
        cursor.execute(_define(f"SELECT ({moment})::timestamptz"))
    try:
        yield
    finally:
        with connection.cursor() as cursor:
            cursor.execute(_define(source))


def a_server_that_was_always_there() -> object:
    return server_up_since("'-infinity'")


def _define(source: str) -> str:
    return (
        f"CREATE OR REPLACE FUNCTION leases_up_since() RETURNS timestamptz LANGUAGE sql STABLE AS $body${source}$body$"
    )


def held(company: Company | None = None, *, seconds: float = 60.0, by: str = "", **values: object) -> Controller:
    """A running run, held by a controller."""
    run = factories.run(company, **values)
    return leases.take_control(run.pk, run.company_id, by or f"controller of {run.pk}", seconds)


def fleet(number: int, *, seconds: float = 60.0, by: str = "") -> list[Controller]:
    company = factories.company()
    return [held(company, seconds=seconds, by=by) for _ in range(number)]


def passes(seconds: float, *runs: Controller) -> None:
    """Let so much time pass for the holds of these runs (of all, where none is named), and for their watch.

    Past the triggers, as time does it. Run by the role that owns the tables.
    """
    with connection.cursor() as cursor:
        for trigger in ("run_held_wakes_watch", "run_lapse_healed_wakes_watch"):
            cursor.execute(f"ALTER TABLE leases_run DISABLE TRIGGER {trigger}")
        cursor.execute(
            "UPDATE leases_run SET controller_expires_at = controller_expires_at - %s * interval '1 s',"
            " finished_at = finished_at - %s * interval '1 s' WHERE %s::uuid[] IS NULL OR id = ANY(%s::uuid[])",
            [seconds, seconds, _ids(runs), _ids(runs)],
        )
        for trigger in ("run_held_wakes_watch", "run_lapse_healed_wakes_watch"):
            cursor.execute(f"ALTER TABLE leases_run ENABLE ALWAYS TRIGGER {trigger}")
        # Nobody was away: what fell due meanwhile is due now, and not late, however slow this machine is.
        cursor.execute(
            "UPDATE leases_obligation SET due_at = greatest(now(), due_at - %s * interval '1 s'),"
            " owed_since = greatest(now() + interval '10 s', owed_since - %s * interval '1 s')"
            " WHERE kind = 'watch_controllers' AND due_at IS NOT NULL",
            [seconds, seconds],
        )


def falls_due(late: float | None = None) -> None:
    """Let the watch be due now, or since `late` seconds. Where none are given it is not late, however slow we are."""
    row = watch()
    if row is not None and row.due_at is not None:
        owed_since = factories.at(10 if late is None else -late)
        Obligation.objects.filter(pk=row.pk).update(due_at=factories.at(-(late or 0)), owed_since=owed_since)


def _ids(runs: tuple[Controller, ...]) -> list[str] | None:
    return [str(one.run_id) for one in runs] or None


def watch() -> Obligation | None:
    return Obligation.objects.filter(kind=Obligation.Kind.WATCH_CONTROLLERS).first()


def look() -> dict[str, int]:
    """Work on what calls no provider, and return what came of it."""
    return Engine().sweep(LANE).outcomes


def looks() -> int:
    """How often the fleet was looked at."""
    return Attempt.objects.filter(obligation__kind=Obligation.Kind.WATCH_CONTROLLERS).count()


def statuses(runs: list[Controller]) -> list[str]:
    found = dict(Run.objects.filter(pk__in=[one.run_id for one in runs]).values_list("pk", "status"))
    return [found[one.run_id] for one in runs]
