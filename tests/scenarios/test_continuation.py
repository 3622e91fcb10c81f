"""S: what a user asks for after a run failed starts one run, by itself, when the last gate opens."""

from __future__ import annotations

from leases.models import Run
from tests.failed_task import AGENT, FailedTask, owed_by, seen
from tests.scenarios.steps import sweep
from tests.stage import Rehearsal


def test_a_retry_starts_one_queued_run_that_goes_on_from_the_failed_one(rehearsal: Rehearsal) -> None:
    task = FailedTask(rehearsal)
    row = task.retried()
    sweep(rehearsal)
    assert seen(row) == ("started", "")
    (run,) = task.started()
    assert (run.status, run.continues_id, run.agent, run.adapter, run.fresh_workspace) == (
        Run.Status.QUEUED,
        task.run.pk,
        AGENT,
        "",
        False,
    )
    assert row.started_run_id == run.pk
    assert owed_by(row).closed_as == "proven"
