"""T: what may be deleted, and who wins against it: at an engine, with acquires that are under way."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connection, transaction

import leases
from leases import archiving, closing, deleting
from leases.blockers import Refused
from leases.errors import AcquireRefused, AcquireRejected, LeaseError
from leases.models import Company, Credential, Environment, Lease, Obligation, Operation, ProviderAccount, Run
from providers.contract import ErrorKind
from tests import factories
from tests.concurrency import Background, Gate, together
from tests.scenarios.steps import acquired, evidence, fails, owed, released, snapshot, state, sweep, sweep_lane
from tests.stage import Rehearsal

pytestmark = pytest.mark.django_db(transaction=True)

REUSE = "reuse_by_environment"
WHY: dict[str, Any] = {"actor": "olga", "reason": "no longer needed"}


def kept(rehearsal: Rehearsal) -> Lease:
    """A stopped sandbox that the environment's next run may have, of a run that is over."""
    lease = released(rehearsal, REUSE)
    sweep(rehearsal)
    run_is_over(rehearsal.run)
    assert state(lease) == "released"
    return lease


def run_is_over(run: Run) -> None:
    Run.objects.filter(pk=run.pk).update(status="succeeded", finished_at=factories.database_now())


def another_run(rehearsal: Rehearsal) -> Run:
    return factories.run(rehearsal.company)


def acquire(rehearsal: Rehearsal, run: Run | None) -> Lease:
    return leases.acquire(rehearsal.environment.pk, company_id=rehearsal.company.pk, run_id=run.pk if run else None)


def delete(rehearsal: Rehearsal, *, consent: bool = True) -> deleting.Deleted:
    return deleting.delete_environment(
        rehearsal.environment.pk, company_id=rehearsal.company.pk, consent=consent, **WHY
    )


def refused(call: Any) -> dict[str, int]:
    before = snapshot()
    with pytest.raises(Refused) as error:
        call()
    assert snapshot() == before
    return dict(error.value.blockers.counts)


# --- Environments -----------------------------------------------------------------------------------------------------


def test_the_lease_of_a_live_run_refuses(rehearsal: Rehearsal) -> None:
    """S-258: and nothing is called at the provider for it."""
    lease = acquired(rehearsal)
    calls = list(rehearsal.world.calls)
    assert refused(lambda: delete(rehearsal)) == {"live_run": 1}
    assert rehearsal.world.calls == calls
    assert leases.bridge(lease.pk).execute(["true"]).exit_code == 0


@pytest.mark.parametrize("how", ["kept", "left active"])
def test_it_owes_its_teardown_before_the_provider_is_asked_and_outlives_the_environment(
    rehearsal: Rehearsal, how: str
) -> None:
    """S-259, T-20: by its own record, whatever the account's credential and the environment of the day are."""
    if how == "kept":
        lease = kept(rehearsal)
    else:
        lease = acquired(rehearsal)
        run_is_over(rehearsal.run)
    before = len(rehearsal.world.calls)
    assert delete(rehearsal).owing == (lease.pk,)
    assert len(rehearsal.world.calls) == before, "nothing was asked while it was written"
    seen: list[tuple[str, Any]] = []

    def look(_: str) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SELECT state, environment_id FROM leases_lease WHERE id = %s", [lease.pk])
            seen.append(cursor.fetchone())
        connection.close()  # the call's own thread

    rehearsal.world.hooks["delete"] = look
    assert not Environment.objects.exists()
    sweep(rehearsal)
    assert seen[0] == ("pending_cleanup", None)
    assert evidence(lease)[-1] == "destroyed"
    assert not rehearsal.world.boxes


def test_without_consent_a_stop_is_not_made_a_destruction(rehearsal: Rehearsal) -> None:
    lease = released(rehearsal, REUSE)
    run_is_over(rehearsal.run)
    assert refused(lambda: delete(rehearsal, consent=False)) == {"stopping": 1}
    assert owed(lease).verb == "stop_or_delete"
    sweep(rehearsal)
    assert (state(lease), rehearsal.world.count("delete")) == ("released", 0)


def test_with_consent_it_is(rehearsal: Rehearsal) -> None:
    lease = released(rehearsal, REUSE)
    run_is_over(rehearsal.run)
    delete(rehearsal)
    sweep(rehearsal)
    assert evidence(lease)[-1] == "destroyed"


@pytest.mark.parametrize("settled_first", [False, True])
def test_what_a_queued_retry_needs_is_kept_whether_or_not_its_settle_came_first(
    rehearsal: Rehearsal, *, settled_first: bool
) -> None:
    issue = factories.issue(rehearsal.company)
    Run.objects.filter(pk=rehearsal.run.pk).update(issue=issue)
    lease = acquired(rehearsal)
    Run.objects.filter(pk=rehearsal.run.pk).update(status="failed", finished_at=factories.database_now())
    factories.run(rehearsal.company, issue=issue, status="queued")
    if settled_first:
        sweep_lane(Obligation.Kind.SETTLE_ORPHAN)
        assert state(lease) == "pending_cleanup"
    assert refused(lambda: delete(rehearsal)) == {"held": 1}
    sweep(rehearsal)
    assert refused(lambda: delete(rehearsal)) == {"held": 1}
    assert (state(lease), rehearsal.world.count("delete")) == ("released", 0)


def test_a_retry_that_is_queued_after_the_deletion_still_finds_the_files_of_what_was_left(
    rehearsal: Rehearsal,
) -> None:
    """It becomes nobody's instead of being destroyed outright, and is held like every such sandbox."""
    issue = factories.issue(rehearsal.company)
    Run.objects.filter(pk=rehearsal.run.pk).update(issue=issue)
    lease = acquired(rehearsal)
    run_is_over(rehearsal.run)
    delete(rehearsal)
    retry = factories.run(rehearsal.company, issue=issue, status="queued")
    sweep(rehearsal)
    assert (state(lease), rehearsal.world.count("delete")) == ("released", 0)
    run_is_over(retry)
    sweep(rehearsal)
    assert evidence(lease)[-1] == "destroyed"


def test_a_destruction_that_fails_stays_owed_and_is_counted(rehearsal: Rehearsal) -> None:
    """S-261: the environment is gone by then, and the lease does not need it."""
    lease = kept(rehearsal)
    delete(rehearsal)
    rehearsal.world.hooks["delete"] = fails(ErrorKind.SERVER)
    assert sweep(rehearsal) == {"failed": 1}
    row = owed(lease)
    assert (state(lease), row.failures, row.is_open) == ("pending_cleanup", 1, True)
    del rehearsal.world.hooks["delete"]
    leases.retry(company_id=rehearsal.company.pk, lease_id=lease.pk, actor="olga", reason="again")
    sweep(rehearsal)
    assert evidence(lease)[-1] == "destroyed"


def test_a_resume_that_was_first_keeps_the_sandbox_and_the_deletion_refuses(rehearsal: Rehearsal) -> None:
    """S-260: while the start is under way, and when it was confirmed."""
    lease, run, starting = kept(rehearsal), another_run(rehearsal), Gate()
    rehearsal.world.hooks["start"] = starting
    acquiring = Background(lambda: acquire(rehearsal, run))
    starting.wait()
    assert refused(lambda: delete(rehearsal)) == {"held": 1, "being_started": 1}
    starting.open()
    successor = acquiring.result()
    assert successor.resource_id == lease.resource_id
    assert refused(lambda: delete(rehearsal)) == {"live_run": 1}
    assert leases.bridge(successor.pk).execute(["true"]).exit_code == 0
    assert rehearsal.world.count("delete") == 0


def test_a_resume_that_comes_second_is_refused_and_starts_nothing(rehearsal: Rehearsal) -> None:
    lease, run = kept(rehearsal), another_run(rehearsal)
    with transaction.atomic():
        # The deletion's first transaction, up to its commit.
        deleting._owe(rehearsal.environment.pk, rehearsal.company.pk, "olga", "x", consent=True)
        acquiring = Background(lambda: _refusal(lambda: acquire(rehearsal, run)))
    assert acquiring.result() in (
        "the environment is archived",
        "the environment was deleted or belongs to another company",
    )
    assert rehearsal.world.count("start") == 0
    assert state(lease) == "pending_cleanup"


def _refusal(call: Any) -> str:
    try:
        call()
    except LeaseError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("_", range(6))
def test_of_a_resume_and_a_deletion_at_the_same_moment_exactly_one_wins(rehearsal: Rehearsal, _: int) -> None:
    """S-260, with two connections: either the run has the sandbox, or it owes its destruction."""
    lease, run = kept(rehearsal), another_run(rehearsal)

    def resume() -> Lease | str:
        try:
            return acquire(rehearsal, run)
        except (AcquireRefused, AcquireRejected, LeaseError) as error:
            return error.code

    def remove() -> Any:
        try:
            return delete(rehearsal)
        except Refused as error:
            return error.code

    got, done = together(resume, remove)
    lease.refresh_from_db()
    if isinstance(got, Lease):
        assert done == "blocked"
        assert (got.resource_id, lease.state) == (lease.resource_id, "expired")
        assert Environment.objects.filter(status="active").exists()
    else:
        assert isinstance(done, deleting.Deleted)
        assert lease.state == "pending_cleanup"
        assert not Environment.objects.exists()
    sweep(rehearsal)
    running = [box for box in rehearsal.world.boxes.values() if box.state == "running"]
    assert len(running) == (1 if isinstance(got, Lease) else 0)


def test_what_a_pending_creation_brings_forth_is_destroyed_when_that_was_consented_to(rehearsal: Rehearsal) -> None:
    """An ad-hoc acquire is under way: it does not get the sandbox, whose end is owed from its own record."""
    creating = Gate()
    rehearsal.world.after["create"] = creating
    acquiring = Background(lambda: _refusal(lambda: acquire(rehearsal, None)))
    creating.wait()
    assert refused(lambda: delete(rehearsal, consent=False)) == {"pending_creation": 1}
    assert delete(rehearsal).cancelled == 1
    assert not Environment.objects.exists()
    creating.open()
    assert "may not be used" in acquiring.result()
    sweep(rehearsal)
    lease = Lease.objects.get()
    assert (lease.environment_id, state(lease)) == (None, "failed")
    assert not rehearsal.world.boxes


# --- Companies --------------------------------------------------------------------------------------------------------


def close(rehearsal: Rehearsal) -> Company:
    return closing.close_company(rehearsal.company.pk, **WHY)


def test_a_company_is_closed_when_all_its_sandboxes_are_proven_gone(rehearsal: Rehearsal) -> None:
    lease = kept(rehearsal)
    assert refused(lambda: close(rehearsal)) == {"unsettled_lease": 1}
    delete(rehearsal)
    assert refused(lambda: close(rehearsal)) == {"unsettled_lease": 1}
    sweep(rehearsal)
    assert close(rehearsal).closed_at is not None
    assert lease.receipts.count() == 2
    with pytest.raises(LeaseError):
        acquire(rehearsal, another_run(rehearsal))


def test_a_creation_under_way_keeps_a_company_open_and_its_attach_is_not_lost(rehearsal: Rehearsal) -> None:
    creating = Gate()
    run_is_over(rehearsal.run)
    rehearsal.world.after["create"] = creating
    acquiring = Background(lambda: acquire(rehearsal, None))
    creating.wait()
    assert refused(lambda: close(rehearsal)) == {"pending_operation": 1}
    creating.open()
    assert acquiring.result().state == "active"
    assert refused(lambda: close(rehearsal)) == {"unsettled_lease": 1}


@pytest.mark.parametrize("_", range(6))
def test_of_an_attach_and_a_closing_at_the_same_moment_none_is_lost(rehearsal: Rehearsal, _: int) -> None:
    """With two connections: a company that is closed has nothing; one that has something is open."""

    def attach() -> Lease | str:
        try:
            return acquire(rehearsal, None)
        except LeaseError as error:
            return str(error)

    def shut() -> Company | str:
        try:
            return close(rehearsal)
        except Refused as error:
            return error.code

    run_is_over(rehearsal.run)
    got, closed = together(attach, shut)
    if isinstance(closed, Company):
        # Decided where it was journalled: nothing was asked for.
        assert isinstance(got, str)
        assert not Lease.objects.exists()
        assert not Operation.objects.exists()
        assert not rehearsal.world.boxes
    else:
        assert isinstance(got, Lease)
        assert (got.state, closed) == ("active", "blocked")
        assert Company.objects.filter(pk=rehearsal.company.pk, closed_at=None).exists()


# --- Credentials ------------------------------------------------------------------------------------------------------


def with_credential(rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> Credential:
    monkeypatch.setenv("REHEARSED_KEY", "secret")
    credential = Credential.objects.create(company=rehearsal.company, name="key", reference="env:REHEARSED_KEY")
    ProviderAccount.objects.filter(pk=rehearsal.account.pk).update(credential=credential)
    return credential


def test_a_credential_that_is_needed_is_archived_by_force_alone_and_what_needs_it_asks_for_a_person(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    credential = with_credential(rehearsal, monkeypatch)
    lease = acquired(rehearsal)
    named: dict[str, Any] = {"company_id": rehearsal.company.pk, **WHY}
    assert refused(lambda: archiving.archive_credential(credential.pk, **named)) == {"unsettled_lease": 1}
    archiving.archive_credential(credential.pk, force=True, **named)
    leases.release(lease.pk)
    sweep(rehearsal)
    assert (owed(lease).quiet, rehearsal.world.count("delete")) == ("credential_inactive", 0)
    Credential.objects.filter(pk=credential.pk).update(status="active")
    sweep(rehearsal)
    assert state(lease) == "expired"


def test_a_start_is_not_journalled_with_a_credential_that_was_archived_meanwhile(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The acquire read it active; by the time of the journal nothing depended on it, and it is archived."""
    credential = with_credential(rehearsal, monkeypatch)
    asked = Gate()
    rehearsal.world.hooks["identify"] = asked
    acquiring = Background(lambda: _refusal(lambda: acquire(rehearsal, None)))
    asked.wait()
    archiving.archive_credential(credential.pk, company_id=rehearsal.company.pk, **WHY)
    asked.open()
    assert "the credential was disabled, archived or deleted meanwhile" in acquiring.result()
    assert not Operation.objects.exists()
    assert not Obligation.objects.exists()
    assert rehearsal.world.count("create") == 0
