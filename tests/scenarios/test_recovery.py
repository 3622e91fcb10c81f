"""R: a failed run's stopped sandbox is reopened to save its files; where that cannot work, the generation says so."""

from __future__ import annotations

import io
import tarfile
from datetime import timedelta
from importlib import import_module
from itertools import pairwise
from typing import Any
from uuid import uuid4

import pytest
from django.db import connection

import leases
from cleanup import judging
from cleanup.engine import Engine
from leases import archives, bounds, keeping, proof, recovering
from leases.clock import boottime
from leases.errors import LeaseError
from leases.models import Archive, Installation, Lease, Obligation, Operation, Recovery
from providers.contract import ErrorKind, ProviderError
from tests import factories
from tests.failed_task import FailedTask
from tests.scenarios.passing import passes, shift
from tests.scenarios.steps import acquired, audited, evidence, fails, falls_due, state, sweep, sweep_lane
from tests.stage import Rehearsal

FILES = {"report.txt": b"the work of a night", "src/main.py": b"print()\n" * 2000}


def failed(rehearsal: Rehearsal, policy: str = "retain_on_failure") -> Lease:
    """A lease of a failed run: stopped, kept, proven, with files in its sandbox."""
    lease = acquired(rehearsal, policy)
    rehearsal.world.of(lease.resource_id).files.update(FILES)
    leases.release(lease.pk, outcome="failed", disposition="stop_and_retain")
    type(rehearsal.run).objects.filter(pk=rehearsal.run.pk).update(status="failed", finished_at=factories.at(0))
    assert sweep(rehearsal)["proven"] == 1
    lease.refresh_from_db()
    return lease


def recover(lease: Lease) -> Recovery:
    return recovering.recover_workspace(lease.pk, lease.company_id, actor="operator", reason="the files are needed")


def owed(lease: Lease, kind: str) -> Obligation:
    return lease.obligations.filter(kind=kind).latest("pk")


def next_attempt(rehearsal: Rehearsal, lease: Lease) -> dict[str, int]:
    """Let the time until the next attempt pass, and sweep."""
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE leases_recovery SET next_attempt_at = now() WHERE lease_id = %s AND state = 'running'", [lease.pk]
        )
    falls_due(owed(lease, "recover_workspace"))
    return sweep(rehearsal)


def open_kinds(lease: Lease) -> set[str]:
    return set(lease.obligations.filter(closed_at__isnull=True).values_list("kind", flat=True)) | set(
        Obligation.objects.filter(operation__source=lease, closed_at__isnull=True).values_list("kind", flat=True)
    )


def contents(archive: Archive) -> dict[str, bytes]:
    with archives.open_archive(archive.pk, company_id=archive.company_id) as file:
        packed = io.BytesIO(file.read())
    with tarfile.open(fileobj=packed) as tar:
        return {
            member.name.removeprefix("./"): tar.extractfile(member).read()  # type: ignore[union-attr]
            for member in tar.getmembers()
            if member.isfile()
        }


def test_the_files_are_saved_and_the_sandbox_is_stopped_again(rehearsal: Rehearsal) -> None:
    lease = failed(rehearsal)
    recovery = recover(lease)
    sweep(rehearsal)
    recovery.refresh_from_db()
    lease.refresh_from_db()
    assert (recovery.state, recovery.attempts, recovery.failure) == ("complete", 1, "")
    assert (state(lease), lease.epoch, evidence(lease)) == ("retained", 2, ["stopped", "stopped"])
    assert rehearsal.world.of(lease.resource_id).state == "stopped"
    assert proof.is_proven_ended(lease)
    archive = Archive.objects.get(lease=lease)
    assert archive.receipt == lease.receipts.get(epoch=2)
    assert contents(archive) == FILES
    assert open_kinds(lease) == {"dispose"}


def test_a_full_disk_ends_it_at_once_and_the_earlier_receipt_stands(rehearsal: Rehearsal) -> None:
    """S-241: resume fails with disk full, and the stop fails: one attempt, exhausted, the original receipt."""
    lease = failed(rehearsal)
    before = lease.receipts.get()
    rehearsal.world.hooks["start"] = fails(ErrorKind.DISK_FULL, message="no space left on device")
    rehearsal.world.hooks["stop"] = fails(ErrorKind.SERVER)
    recovery = recover(lease)
    rehearsal.world.hooks["inspect"] = after_first(rehearsal, fails(ErrorKind.SERVER))
    sweep(rehearsal)
    recovery.refresh_from_db()
    lease.refresh_from_db()
    assert (recovery.state, recovery.attempts) == ("exhausted", 1)
    assert (recovery.failure, recovery.disposition) == ("source_unavailable", "use_alternative_strategy")
    assert (state(lease), lease.epoch) == ("retained", 1)
    assert list(proof.receipts(lease)) == [before]
    assert lease.may_be_running_since is not None
    assert open_kinds(lease) == {"dispose", "watch_restart"}


def blocked(rehearsal: Rehearsal) -> None:
    """The restart of the sandbox fails in a way that the test chose; so does its stop, and nobody sees it."""

    def unseen(_: str) -> None:
        rehearsal.world.hooks["inspect"] = fails(ErrorKind.REFUSED)
        fails(ErrorKind.REFUSED)(_)

    rehearsal.world.hooks["stop"] = unseen


def test_a_saved_comment_goes_on_in_a_fresh_workspace_when_the_disk_is_full(rehearsal: Rehearsal) -> None:
    """S-241, K-08: nothing of the old sandbox is waited for; it stays kept, with its receipt."""
    lease = failed(rehearsal)
    rehearsal.world.hooks["start"] = fails(ErrorKind.DISK_FULL)
    blocked(rehearsal)
    task = FailedTask(rehearsal, leased=False)
    comment = task.commented()
    sweep(rehearsal)
    (run,) = task.started()
    comment.refresh_from_db()
    assert (comment.state, comment.readiness) == ("started", "fresh_isolated_workspace")
    assert (run.status, run.fresh_workspace, run.continues_id) == ("queued", True, lease.run_id)
    assert (state(lease), evidence(lease), rehearsal.world.count("start")) == ("retained", ["stopped"], 1)
    rehearsal.world.hooks.clear()
    type(run).objects.filter(pk=run.pk).update(status="running")
    fresh = leases.acquire(rehearsal.environment.pk, company_id=rehearsal.company.pk, run_id=run.pk)
    assert fresh.resource_id != lease.resource_id
    assert state(lease) == "retained"


def test_a_retry_binds_to_the_exhausted_generation_and_repeats_nothing(rehearsal: Rehearsal) -> None:
    """S-243."""
    lease = failed(rehearsal)
    rehearsal.world.hooks["start"] = fails(ErrorKind.DISK_FULL)
    recovery = recover(lease)
    sweep(rehearsal)
    recovery.refresh_from_db()
    assert recovery.state == "exhausted"
    task = FailedTask(rehearsal, leased=False)
    first, second = task.retried(), task.retried()
    sweep(rehearsal)
    (run,) = task.started()
    first.refresh_from_db()
    assert (first.pk, first.recovery_id, first.started_run_id) == (second.pk, recovery.pk, run.pk)
    assert run.fresh_workspace
    assert (Recovery.objects.count(), rehearsal.world.count("start")) == (1, 1)


def test_what_runs_after_the_comment_was_admitted_takes_nothing_back(rehearsal: Rehearsal) -> None:
    """Beyond domain 9.2: the sighting raises the epoch, the sandbox is stopped, and the new run goes on."""
    lease = failed(rehearsal)
    rehearsal.world.hooks["start"] = fails(ErrorKind.DISK_FULL)
    blocked(rehearsal)
    task = FailedTask(rehearsal, leased=False)
    comment = task.commented()
    sweep(rehearsal)
    rehearsal.world.hooks.clear()
    rehearsal.world.of(lease.resource_id).state = "running"
    falls_due(owed(lease, "watch_restart"))
    sweep(rehearsal)
    (run,) = task.started()
    comment.refresh_from_db()
    lease.refresh_from_db()
    assert (comment.state, comment.started_run_id, run.status) == ("started", run.pk, "queued")
    assert (lease.state, lease.epoch, lease.may_be_running_since) == ("retained", 2, None)
    assert [receipt.epoch for receipt in lease.receipts.order_by("pk")] == [1, 2]
    assert rehearsal.world.of(lease.resource_id).state == "stopped"


@pytest.mark.parametrize("end", ["suspended", "stopped"])
def test_the_receipt_of_a_suspension_does_not_stand_again(rehearsal: Rehearsal, end: str) -> None:
    """Design 4: resuming goes on with the old processes, so that what may run now may be they."""
    lease = acquired(rehearsal, "retain_on_failure")
    stops = rehearsal.world.hooks
    rehearsal.world.after["stop"] = lambda subject: setattr(rehearsal.world.of(subject), "state", end)
    leases.release(lease.pk, outcome="failed")
    ended(rehearsal)
    sweep(rehearsal)
    rehearsal.world.after.clear()
    assert lease.receipts.get().ended == {"suspended": "suspended", "stopped": "killed"}[end]
    stops["start"] = fails(ErrorKind.CONNECTION)
    blocked(rehearsal)
    recovery = recover(lease)
    sweep(rehearsal)
    lease.refresh_from_db()
    if end == "stopped":
        assert (lease.state, lease.epoch, proof.is_proven_ended(lease)) == ("retained", 1, True)
        return
    assert (lease.state, lease.epoch, lease.may_be_running_since) == ("pending_cleanup", 2, None)
    assert not proof.is_proven_ended(lease)
    assert open_kinds(lease) == {"teardown", "recover_workspace", "end_recovery"}
    stops.clear()
    Operation.objects.filter(source=lease).update(created_at=factories.at(-9999))
    falls_due(owed(lease, "teardown"))
    sweep(rehearsal)
    recovery.refresh_from_db()
    assert (state(lease), proof.is_proven_ended(lease), recovery.state) == ("retained", True, "running")


def test_a_suspended_sandbox_that_is_stopped_after_all_has_a_receipt_that_stands(rehearsal: Rehearsal) -> None:
    lease = acquired(rehearsal, "retain_on_failure")
    rehearsal.world.after["stop"] = lambda subject: setattr(rehearsal.world.of(subject), "state", "suspended")
    leases.release(lease.pk, outcome="failed")
    ended(rehearsal)
    sweep(rehearsal)
    rehearsal.world.after.clear()
    rehearsal.world.hooks["start"] = fails(ErrorKind.REFUSED)
    recover(lease)
    sweep(rehearsal)
    lease.refresh_from_db()
    assert (lease.state, lease.epoch) == ("retained", 1)
    assert [receipt.ended for receipt in lease.receipts.order_by("pk")] == ["suspended", "killed"]


def ended(rehearsal: Rehearsal) -> None:
    type(rehearsal.run).objects.filter(pk=rehearsal.run.pk).update(status="failed", finished_at=factories.at(0))


def test_a_receipt_that_does_not_fit_the_lease_any_more_is_not_restored(rehearsal: Rehearsal) -> None:
    """S-248: it is stopped like a running one."""
    lease = failed(rehearsal)

    def another_start_was_given_up(_: str) -> None:
        try:
            other = Operation.objects.get(source=lease, state="pending")
            other.pk, other.recovery, other.lease_uuid = uuid4(), None, uuid4()
            other.state, other.resolved_at = "unverified", factories.at(0)
            other.save(force_insert=True)
        finally:
            connection.close()  # of the call's thread
        raise ProviderError(ErrorKind.CONNECTION)

    rehearsal.world.hooks["start"] = another_start_was_given_up
    blocked(rehearsal)
    recover(lease)
    sweep(rehearsal)
    lease.refresh_from_db()
    assert (lease.state, lease.epoch, evidence(lease)) == ("pending_cleanup", 2, ["stopped"])
    assert not proof.is_proven_ended(lease)
    assert open_kinds(lease) == {"teardown", "recover_workspace", "end_recovery"}


# Time


def begun_ago(recovery: Recovery) -> float:
    """Seconds since the generation began, by its end, which moves with all that passes."""
    try:
        recovery = Recovery.objects.get(pk=recovery.pk)
        return recovering.WINDOW - (recovery.ends_at - factories.database_now()).total_seconds()
    finally:
        connection.close()  # of the call's thread


@pytest.mark.parametrize("kind", [ErrorKind.REFUSED, ErrorKind.CONNECTION, ErrorKind.BUSY, ErrorKind.CANNOT_START])
def test_its_attempts_have_their_pauses_and_an_end(rehearsal: Rehearsal, kind: ErrorKind) -> None:
    """S-242: 0 s, 30 s, 1, 2, 4, 8 min after the one before, six at most, and then nothing but the watch."""
    lease, at = failed(rehearsal), list[float]()
    recovery = recover(lease)

    def start(_: str) -> None:
        at.append(begun_ago(recovery))
        raise ProviderError(kind)

    rehearsal.world.hooks["start"] = start
    passes(recovering.WINDOW + 3600.0, lambda: (sweep(rehearsal), None)[1])
    recovery.refresh_from_db()
    lease.refresh_from_db()
    final = kind == ErrorKind.CANNOT_START
    assert (recovery.state, recovery.attempts) == ("exhausted", 1 if final else 6)
    assert recovery.failure == ("source_unavailable" if final else "provider_unavailable")
    between = [later - earlier for earlier, later in pairwise(at)]
    expected = [] if final else [30.0, 60.0, 120.0, 240.0, 480.0]
    assert len(between) == len(expected)
    for seen, pause in zip(between, expected, strict=True):
        assert pause <= seen < pause + (40.0 if kind == ErrorKind.CONNECTION else 10.0)
    assert (lease.state, lease.may_be_running_since, open_kinds(lease)) == ("retained", None, {"dispose"})
    assert proof.is_proven_ended(lease)


@pytest.mark.parametrize("how", ["rate limited", "refused"])
def test_an_account_that_answers_nobody_for_all_of_its_time_ends_it(rehearsal: Rehearsal, how: str) -> None:
    lease = failed(rehearsal)
    if how == "rate limited":
        type(rehearsal.account).objects.filter(pk=rehearsal.account.pk).update(blocked_until=factories.at(10 * 3600))
    else:
        rehearsal.world.hooks["identify"] = fails(ErrorKind.AUTHORISATION)
    task = FailedTask(rehearsal, leased=False)
    comment = task.commented()
    for seconds in (0.0, 60.0, recovering.WINDOW):
        shift(seconds)
        sweep(rehearsal)
    recovery = Recovery.objects.get()
    comment.refresh_from_db()
    assert (recovery.state, recovery.attempts, recovery.failure) == ("exhausted", 0, "provider_unavailable")
    assert (comment.state, comment.readiness) == ("started", "fresh_isolated_workspace")
    assert (state(lease), evidence(lease), rehearsal.world.count("start")) == ("retained", ["stopped"], 0)
    assert open_kinds(lease) == {"dispose"}


def test_while_the_database_observes_nothing_is_started_and_nothing_is_given_up(rehearsal: Rehearsal) -> None:
    judging.forget()
    lease = failed(rehearsal)
    recovery = recover(lease)
    assert judging.is_cleared()
    at = factories.database_now()
    Installation.objects.update(observing_since=at, observing_why="behind", observed_mark_at=at)
    passes(recovering.WINDOW + 60.0, lambda: (sweep(rehearsal), None)[1])
    recovery.refresh_from_db()
    assert (recovery.state, recovery.attempts, rehearsal.world.count("start")) == ("running", 0, 0)
    assert {owed(lease, kind).quiet for kind in ("recover_workspace", "end_recovery")} == {"observing"}
    Installation.objects.update(observing_since=None, observing_why="", observed_mark_at=None)
    sweep(rehearsal)
    recovery.refresh_from_db()
    assert (recovery.state, recovery.attempts) == ("exhausted", 0)
    assert (state(lease), open_kinds(lease)) == ("retained", {"dispose"})


def test_one_that_observes_in_the_middle_of_an_attempt_keeps_it_unproven_and_goes_on_later(
    rehearsal: Rehearsal,
) -> None:
    """Its start failed, and its stop is not announced any more: nobody takes it for ended until somebody may."""
    judging.forget()
    lease = failed(rehearsal)
    recovery = recover(lease)
    assert judging.is_cleared()

    def observes(_: str) -> None:
        try:
            at = factories.database_now()
            Installation.objects.update(observing_since=at, observing_why="behind", observed_mark_at=at)
        finally:
            connection.close()  # of the call's thread
        raise ProviderError(ErrorKind.CONNECTION)

    rehearsal.world.hooks["start"] = observes
    stops = rehearsal.world.count("stop")
    sweep(rehearsal)
    assert (proof.is_proven_ended(lease), rehearsal.world.count("stop")) == (False, stops)
    assert owed(lease, "recover_workspace").quiet == "observing"
    rehearsal.world.hooks.clear()
    Operation.objects.filter(source=lease).update(created_at=factories.at(-9999))
    Installation.objects.update(observing_since=None, observing_why="", observed_mark_at=None)
    for row in Obligation.objects.filter(operation__source=lease, closed_at=None):
        falls_due(row)
    sweep(rehearsal)
    next_attempt(rehearsal, lease)
    recovery.refresh_from_db()
    assert (recovery.state, recovery.attempts) == ("complete", 2)


def after_first(rehearsal: Rehearsal, hook: Any) -> Any:
    """A hook that lets the first call pass."""
    seen = rehearsal.world.count("inspect")

    def call(subject: str) -> None:
        if rehearsal.world.count("inspect") > seen + 1:
            hook(subject)

    return call


def test_an_unknown_failure_is_tried_six_times(rehearsal: Rehearsal) -> None:
    """S-242."""
    lease = failed(rehearsal)
    rehearsal.world.hooks["start"] = fails(ErrorKind.REFUSED)
    rehearsal.world.hooks["stop"] = fails(ErrorKind.REFUSED)
    recovery = recover(lease)
    sweep(rehearsal)
    for made in range(1, 6):
        recovery.refresh_from_db()
        assert (recovery.state, recovery.attempts) == ("running", made)
        next_attempt(rehearsal, lease)
    recovery.refresh_from_db()
    assert (recovery.state, recovery.attempts) == ("exhausted", 6)
    assert (recovery.failure, recovery.disposition) == ("provider_unavailable", "use_alternative_strategy")
    assert rehearsal.world.count("start") == 6
    assert proof.is_proven_ended(lease)
    assert Operation.objects.filter(source=lease, state="pending").count() == 0


def test_a_confirmed_restart_leaves_only_a_fresh_stop(rehearsal: Rehearsal) -> None:
    """S-244: resume returned, a later check and the stop fail: pending, and no receipt."""
    lease = failed(rehearsal)
    rehearsal.world.hooks["archive"] = fails(ErrorKind.MISSING_PATH)
    recovery = recover(lease)
    rehearsal.world.hooks["stop"] = fails(ErrorKind.REFUSED)
    sweep(rehearsal)
    recovery.refresh_from_db()
    lease.refresh_from_db()
    assert (recovery.state, recovery.failure) == ("exhausted", "workspace_missing")
    assert (state(lease), lease.epoch) == ("pending_cleanup", 2)
    assert not proof.is_proven_ended(lease)
    assert open_kinds(lease) == {"teardown"}
    rehearsal.world.hooks.clear()
    falls_due(owed(lease, "teardown"))
    sweep(rehearsal)
    assert (state(lease), evidence(lease)) == ("retained", ["stopped", "stopped"])


def test_a_failed_restart_that_is_stopped_has_a_fresh_receipt(rehearsal: Rehearsal) -> None:
    """S-246."""
    lease = failed(rehearsal)
    rehearsal.world.hooks["start"] = fails(ErrorKind.REFUSED)
    recovery = recover(lease)
    sweep(rehearsal)
    recovery.refresh_from_db()
    assert (recovery.state, recovery.attempts, recovery.failure) == ("running", 1, "provider_unavailable")
    assert (state(lease), lease.epoch, evidence(lease)) == ("retained", 1, ["stopped", "stopped"])
    lease.refresh_from_db()
    assert lease.may_be_running_since is None
    assert audited("operation.withdrawn", Operation.objects.get(source=lease)) == 1


def test_an_operators_request_begins_a_new_generation(rehearsal: Rehearsal) -> None:
    """S-249."""
    lease = failed(rehearsal)
    rehearsal.world.hooks["start"] = fails(ErrorKind.DISK_FULL)
    first = recover(lease)
    sweep(rehearsal)
    first.refresh_from_db()
    assert first.state == "exhausted"
    rehearsal.world.hooks.clear()
    second = recover(lease)
    with pytest.raises(LeaseError) as refused:
        recover(lease)
    assert refused.value.code == "recovery_running"
    sweep(rehearsal)
    second.refresh_from_db()
    assert (first.generation, second.generation, second.state) == (1, 2, "complete")


def test_a_stop_ends_it_whatever_an_attempt_is_at(rehearsal: Rehearsal) -> None:
    """A person stops the run in the middle: of the start, of the saving, and between two attempts."""
    lease = failed(rehearsal)

    def stop(_: str) -> None:
        try:
            leases.stop(company_id=lease.company_id, lease_id=lease.pk, actor="user")
        finally:
            connection.close()  # of the call's thread

    for moment in ("start", "archive"):
        recovery = recover(lease)
        rehearsal.world.hooks[moment] = stop
        sweep(rehearsal)
        rehearsal.world.hooks.clear()
        recovery.refresh_from_db()
        assert (moment, recovery.state, recovery.failure) == (moment, "exhausted", "stopped")
        assert (state(lease), rehearsal.world.of(lease.resource_id).state) == ("retained", "stopped")
        assert open_kinds(lease) == {"dispose"}
        assert not Archive.objects.filter(lease=lease, receipt__isnull=False).exists()
    recovery = recover(lease)
    rehearsal.world.hooks["start"] = fails(ErrorKind.REFUSED)
    sweep(rehearsal)
    leases.stop(company_id=lease.company_id, lease_id=lease.pk, actor="user")
    recovery.refresh_from_db()
    assert (recovery.state, recovery.failure) == ("exhausted", "stopped")


def test_a_run_that_begins_afresh_gets_no_sandbox_that_another_run_left(rehearsal: Rehearsal) -> None:
    """Domain 9.4: nobody repeats the step that was rejected; the run that goes on is isolated from what is kept."""
    import leases

    lease = failed(rehearsal, "reuse_by_environment")
    rehearsal.world.hooks["start"] = fails(ErrorKind.DISK_FULL)
    recovery = recover(lease)
    sweep(rehearsal)
    recovery.refresh_from_db()
    assert recovery.state == "exhausted"
    starts = rehearsal.world.count("start")
    for fresh in (False, True):
        run = factories.run(rehearsal.company, fresh_workspace=fresh)
        got = leases.acquire(rehearsal.environment.pk, company_id=rehearsal.company.pk, run_id=run.pk)
        assert (got.resource_id != lease.resource_id, rehearsal.world.count("start")) == (True, starts)
        leases.release(got.pk)
        sweep(rehearsal)
    # What the last one left is for the next run; one that begins afresh does not get it either, any other one does.
    rehearsal.world.hooks.clear()
    for fresh, reused in ((True, False), (False, True)):
        run = factories.run(rehearsal.company, fresh_workspace=fresh)
        kept = set(Lease.objects.filter(state="released").exclude(pk=lease.pk).values_list("resource_id", flat=True))
        got = leases.acquire(rehearsal.environment.pk, company_id=rehearsal.company.pk, run_id=run.pk)
        assert (got.resource_id in kept) is reused
    lease.refresh_from_db()
    assert (lease.state, lease.epoch) == ("released", 1)


def test_a_dead_account_ends_it_at_the_end_of_its_time(rehearsal: Rehearsal) -> None:
    """Its start was asked for, and then nobody answers any more: the earlier receipt stands, and somebody watches."""
    lease = failed(rehearsal)

    def dies(_: str) -> None:
        for name in ("start", "stop", "inspect", "identify"):
            rehearsal.world.hooks[name] = fails(ErrorKind.CONNECTION)
        fails(ErrorKind.CONNECTION)(_)

    recovery = recover(lease)
    rehearsal.world.hooks["start"] = dies
    sweep(rehearsal)
    recovery.refresh_from_db()
    lease.refresh_from_db()
    assert (recovery.state, recovery.attempts) == ("running", 1)
    assert proof.is_proven_ended(lease)
    assert lease.may_be_running_since is not None
    Recovery.objects.filter(pk=recovery.pk).update(ends_at=factories.at(0))
    falls_due(owed(lease, "end_recovery"))
    sweep(rehearsal)
    recovery.refresh_from_db()
    assert (recovery.state, recovery.failure) == ("exhausted", "provider_unavailable")
    assert open_kinds(lease) == {"dispose", "watch_restart"}


@pytest.mark.parametrize("seen", ["running", "stopped"])
def test_what_may_be_running_is_looked_at_until_that_is_known(rehearsal: Rehearsal, seen: str) -> None:
    """Beyond domain 9.2: seen running it is stopped, with a receipt of its own; seen stopped, nobody looks any more."""
    lease = failed(rehearsal)
    recovery = recover(lease)
    rehearsal.world.hooks["start"] = fails(ErrorKind.SERVER)
    rehearsal.world.hooks["stop"] = fails(ErrorKind.SERVER)
    rehearsal.world.hooks["inspect"] = after_first(rehearsal, fails(ErrorKind.SERVER))
    sweep(rehearsal)
    Recovery.objects.filter(pk=recovery.pk).update(ends_at=factories.at(0))
    falls_due(owed(lease, "end_recovery"))
    rehearsal.world.hooks.clear()
    rehearsal.world.of(lease.resource_id).state = seen
    Operation.objects.filter(source=lease).update(created_at=factories.at(-9999))
    type(rehearsal.account).objects.filter(pk=rehearsal.account.pk).update(circuit="closed", blocked_until=None)
    falls_due(owed(lease, "watch_restart"))
    sweep(rehearsal)
    lease.refresh_from_db()
    assert (state(lease), lease.may_be_running_since, open_kinds(lease)) == ("retained", None, {"dispose"})
    assert lease.epoch == (2 if seen == "running" else 1)
    assert evidence(lease) == ["stopped", "stopped"]
    assert rehearsal.world.of(lease.resource_id).state == "stopped"
    assert proof.is_proven_ended(lease)


def test_a_recovery_shortens_no_time_that_an_operator_gave(rehearsal: Rehearsal) -> None:
    """Kept for two months by an operator's word, with an environment that keeps for a day."""
    lease = failed(rehearsal)
    Lease.objects.filter(pk=lease.pk).update(retain_for=timedelta(days=1))
    until = factories.at(60 * 86_400)
    keeping.keep_until(lease.pk, until, company_id=lease.company_id, actor="operator", reason="evidence")
    recover(lease)
    sweep(rehearsal)
    lease.refresh_from_db()
    assert (lease.state, lease.epoch, lease.kept_until) == ("retained", 2, until)
    assert owed(lease, "dispose").due_at == until


def test_a_process_that_was_suspended_behind_its_journal_starts_nothing(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its start was withdrawn, and its generation stopped, while it slept: nobody would find what it starts."""
    handler = import_module("cleanup.handlers.recover_workspace")
    lease = failed(rehearsal)
    recover(lease)
    slept = [0.0]
    begin = handler._begin

    def sleeps(claim: Any, context: Any) -> Any:
        operation = begin(claim, context)
        if isinstance(operation, Operation) and not slept[0]:
            slept[0] = 600.0  # within its protection
            shift(slept[0])
            Engine().sweep(rehearsal.account.pk)  # what is due by then: the recovery of the start
            operation.refresh_from_db()
            assert operation.state == "resolved"
            leases.stop(company_id=lease.company_id, lease_id=lease.pk, actor="user")
            sweep_lane()
            assert open_kinds(lease) == {"dispose"}
        return operation

    monkeypatch.setattr(handler, "_begin", sleeps)
    Engine(clock=lambda: boottime() + slept[0]).sweep(rehearsal.account.pk)
    assert slept[0]
    assert (rehearsal.world.count("start"), rehearsal.world.of(lease.resource_id).state) == (0, "stopped")


def test_a_worker_that_stops_behind_its_journal_takes_the_start_back(rehearsal: Rehearsal) -> None:
    """Asked to end while it looked: the start is not sent, and the proof is not hidden until its bound is over."""
    lease = failed(rehearsal)
    recover(lease)
    stopping = [False]

    def ends(_: str) -> None:
        stopping[0] = True

    rehearsal.world.hooks["inspect"] = ends
    Engine(stopping=lambda: stopping[0]).sweep(rehearsal.account.pk)
    assert rehearsal.world.count("start") == 0
    assert Operation.objects.get(source=lease).state == "resolved"
    assert proof.is_proven_ended(lease)
    rehearsal.world.hooks.clear()
    sweep(rehearsal)
    assert Recovery.objects.get(lease=lease).state == "complete"


def test_a_stop_throws_no_files_away_that_are_whole(rehearsal: Rehearsal) -> None:
    """They are saved, and the sandbox would not stop, so somebody presses Stop."""
    lease = failed(rehearsal)
    recovery = recover(lease)
    rehearsal.world.hooks["stop"] = fails(ErrorKind.SERVER)
    sweep(rehearsal)
    assert Archive.objects.get(lease=lease).saved_at is not None
    rehearsal.world.hooks.clear()
    leases.stop(company_id=lease.company_id, lease_id=lease.pk, actor="user")
    sweep(rehearsal)
    recovery.refresh_from_db()
    assert (recovery.state, state(lease), recovery.attempts) == ("complete", "retained", 1)
    assert contents(Archive.objects.get(lease=lease)) == FILES


def test_what_was_seen_running_is_stopped_also_when_its_generation_was_ended_meanwhile(rehearsal: Rehearsal) -> None:
    """Somebody started it at the provider; an attempt sees that, and a Stop comes before it can write it down."""
    lease = failed(rehearsal)
    recover(lease)
    rehearsal.world.of(lease.resource_id).state = "running"

    def stop(_: str) -> None:
        rehearsal.world.after.clear()
        try:
            leases.stop(company_id=lease.company_id, lease_id=lease.pk, actor="user")
        finally:
            connection.close()  # of the call's thread

    rehearsal.world.after["inspect"] = stop
    sweep(rehearsal)
    assert (state(lease), lease.epoch, open_kinds(lease)) == ("retained", 2, {"dispose"})
    assert rehearsal.world.of(lease.resource_id).state == "stopped"


def test_an_operator_says_which_directory_is_to_be_saved(rehearsal: Rehearsal) -> None:
    """Where the lease recorded a wrong one, another recovery would only repeat its failure."""
    lease = failed(rehearsal)
    Lease.objects.filter(pk=lease.pk).update(config={"workspace": "elsewhere"})
    first = recover(lease)
    sweep(rehearsal)
    first.refresh_from_db()
    assert (first.state, first.failure) == ("exhausted", "workspace_missing")
    company = lease.company_id
    with pytest.raises(LeaseError) as refused:
        recovering.recover_workspace(lease.pk, company, actor="operator", reason="again", workspace=7)  # type: ignore[arg-type]
    assert refused.value.code == "invalid"
    second = recovering.recover_workspace(lease.pk, company, actor="operator", reason="again", workspace="src")
    sweep(rehearsal)
    second.refresh_from_db()
    assert (second.state, second.workspace) == ("complete", "src")
    assert contents(Archive.objects.get(recovery=second)) == {"main.py": FILES["src/main.py"]}


def test_the_stop_behind_an_unanswered_start_is_believed_when_that_start_can_come_no_more(rehearsal: Rehearsal) -> None:
    """The first start was lost, the second saved the files: the stop is looked at exactly when the first is over."""
    lease = failed(rehearsal)
    rehearsal.world.hooks["start"] = fails(ErrorKind.TIMEOUT)
    recovery = recover(lease)
    sweep(rehearsal)
    rehearsal.world.hooks.clear()
    next_attempt(rehearsal, lease)
    lease.refresh_from_db()
    teardown = owed(lease, "teardown")
    lost = Operation.objects.filter(source=lease).earliest("created_at")
    assert (lease.state, teardown.due_at) == ("pending_cleanup", lost.created_at + timedelta(seconds=bounds.START_OVER))
    assert teardown.drain_until is None  # nobody is waited for any more
    Operation.objects.filter(pk=lost.pk).update(created_at=factories.at(-9999))
    falls_due(teardown)
    sweep(rehearsal)
    recovery.refresh_from_db()
    assert (recovery.state, recovery.attempts, state(lease)) == ("complete", 2, "retained")
