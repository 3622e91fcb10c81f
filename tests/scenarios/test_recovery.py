"""R: a failed run's stopped sandbox is reopened to save its files; where that cannot work, the generation says so."""

from __future__ import annotations

import io
import tarfile
from typing import Any

import pytest
from django.db import connection

from leases import archives, proof, recovering
from leases.errors import LeaseError
from leases.models import Archive, Lease, Obligation, Operation, Recovery
from providers.contract import ErrorKind
from tests import factories
from tests.scenarios.steps import acquired, audited, evidence, fails, falls_due, state, sweep
from tests.stage import Rehearsal

FILES = {"report.txt": b"the work of a night", "src/main.py": b"print()\n" * 2000}


def failed(rehearsal: Rehearsal, policy: str = "retain_on_failure") -> Lease:
    """A lease of a failed run: stopped, kept, proven, with files in its sandbox."""
    import leases

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
    import leases

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
