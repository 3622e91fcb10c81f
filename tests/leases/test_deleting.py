"""What may be deleted, closed and archived, and what stands in the way: the functions, on rows."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest
from django.db import connection, transaction

from leases import archiving, closing, deleting, holds, pruning, transitions
from leases.blockers import LISTED, Refused
from leases.demands import Demand
from leases.errors import LeaseError, NotFound
from leases.models import (
    ActivityEntry,
    Company,
    Credential,
    Environment,
    Hold,
    Installation,
    InventoryFinding,
    Lease,
    Obligation,
    Operation,
    ProviderAccount,
    Run,
)
from tests import factories
from tests.scenarios.steps import snapshot

pytestmark = pytest.mark.django_db(transaction=True)

WHY: dict[str, Any] = {"actor": "olga", "reason": "no longer needed"}


def ended(where: Environment | None = None, **values: Any) -> Lease:
    """A lease whose sandbox is proven destroyed."""
    with transaction.atomic():
        lease = factories.lease(where, **values)
        demand = Demand(Obligation.Verb.DELETE)
        owed = transitions.begin_teardown(lease, demand, outcome="succeeded", reason="released", actor="test")
        transitions.settle(lease, owed, factories.receipt(lease))
    lease.refresh_from_db()
    return lease


def given_up(where: Environment | None = None) -> Lease:
    """A lease whose teardown an operator ended without proof; the proof is sought from then on."""
    owed = factories.teardown(factories.lease(where))
    lease = owed.lease
    assert lease is not None
    with transaction.atomic():
        transitions.settle_unverified(lease, owed, actor="olga", reason="scrapped")
    return lease


def sought(lease: Lease) -> Obligation:
    """Owe the proof of a lease's end."""
    return Obligation.objects.create(
        company_id=lease.company_id,
        kind=Obligation.Kind.VERIFY_END,
        account_id=lease.account_id,
        lease=lease,
        verb=Obligation.Verb.DELETE,
        due_at=factories.at(600),
    )


def over(company: Company, **values: Any) -> Run:
    return factories.run(company, status=Run.Status.FAILED, finished_at=factories.database_now(), **values)


def refused(call: Any) -> dict[str, int]:
    """The refusal of a call, by code; nothing was written."""
    before = snapshot()
    with pytest.raises(Refused) as error:
        call()
    assert snapshot() == before
    return dict(error.value.blockers.counts)


# Companies


def close(company: Company) -> Company:
    return closing.close_company(company.pk, **WHY)


def test_a_company_of_which_nothing_is_left_becomes_a_tombstone() -> None:
    company = factories.company()
    credential = Credential.objects.create(company=company, name="key", reference="env:ACME_KEY", digest="a" * 64)
    account = factories.account(company, credential=credential)
    where = factories.environment(account, config={"directory": "of acme"})
    issue = factories.issue(company)
    lease = ended(where, run=over(company, issue=issue), issue=issue, credential_uuid=credential.pk)
    tombstone = close(company)
    assert (tombstone.pk, tombstone.name, tombstone.closed_at is not None) == (company.pk, "", True)
    for row in (credential, account, where, issue, lease):
        row.refresh_from_db()
    assert (credential.name, credential.reference) == (f"erased {credential.pk}", f"erased:{credential.pk}")
    assert (credential.digest, credential.status) == ("", "archived")
    assert (where.name, where.config, where.status) == (f"erased {where.pk}", {}, "archived")
    assert (issue.title, account.name) == ("erased", f"erased {account.pk}")
    # The history stays, and what it is bound to.
    assert lease.receipts.count() == 1
    assert account.attested_identity == lease.account_identity
    entry = ActivityEntry.objects.get(action="company.closed")
    assert (entry.actor, entry.reason, entry.company_id) == ("olga", "no longer needed", company.pk)
    assert entry.details == {"issues": 1, "environments": 1, "credentials": 1, "accounts": 1, "continuations": 0}


def test_whatever_is_not_settled_stands_in_the_way() -> None:
    company = factories.company()
    where = factories.environment(factories.account(company))
    factories.lease(where)  # active
    factories.teardown(factories.lease(where))
    factories.stopped(factories.lease(where))
    factories.operation(where)
    factories.operation(where, state=Operation.State.UNVERIFIED, resolved_at=factories.database_now())
    given_up(where)
    run = factories.run(company)
    factories.startup(over(company))
    history = ended(where)
    Obligation.objects.create(
        company=company, kind="verify_end", verb="delete", account=where.account, lease=history, due_at=factories.at(60)
    )
    for verdict in ("unknown", "missing"):
        InventoryFinding.objects.create(
            company=company,
            account=where.account,
            provider="local",
            account_identity=where.account.attested_identity,
            resource_id=f"{verdict} box",
            verdict=verdict,
            lease=history if verdict == "missing" else None,
            sightings=2,
            first_seen_at=factories.at(-3600),
            last_seen_at=factories.at(0),
            confirmed_at=factories.at(0),
        )
    Hold.objects.create(company=company, issue=factories.issue(company), kind="export", strength="soft", holder="x")
    assert refused(lambda: close(company)) == {
        "live_run": 1,
        "pending_operation": 1,
        "unverified_operation": 1,
        "unsettled_lease": 3,
        "open_obligation": 3,
        "unproven_end": 1,
        "hold": 1,
        "leak": 1,
    }
    told = closing.what_stands_in_the_way(company.pk)
    assert [(one.row, one.id, one.told) for one in told.listed if one.code == "live_run"] == [
        ("run", str(run.pk), "it is running")
    ]
    assert close(factories.company()).closed_at  # of another company: none of it


def test_a_stopped_predecessor_counts_as_settled_when_its_successor_does() -> None:
    """S-263."""
    where = factories.environment()
    with transaction.atomic():
        first = factories.stopped(factories.lease(where))
        second = factories.lease(where, resource_id=first.resource_id, epoch=2)
        Obligation.objects.filter(lease=first, kind="dispose").update(
            closed_at=factories.database_now(), closed_as="nothing_owed", due_at=None
        )
        first.state, first.successor = Lease.State.EXPIRED, second
        first.save(update_fields=["state", "successor"])
    assert refused(lambda: close(where.company)) == {"unsettled_lease": 1}
    with transaction.atomic():
        owed = factories.teardown(second)
        factories.receipt(second)
        second.state = Lease.State.EXPIRED
        second.save(update_fields=["state"])
        owed.closed_at, owed.closed_as, owed.due_at = factories.database_now(), "proven", None
        owed.save(update_fields=["closed_at", "closed_as", "due_at"])
    assert close(where.company).closed_at


def test_a_long_history_is_no_obstacle_and_costs_no_more() -> None:
    """S-264 has a limit of 1024 examined leases: here what is settled is not examined, so there is none."""
    company = factories.company()
    where = factories.environment(factories.account(company))
    template = ended(where)
    with connection.cursor() as cursor, transaction.atomic():
        columns = [str(f.column) for f in Lease._meta.concrete_fields if f.column not in ("id", "resource_id")]
        names = ", ".join(columns)
        cursor.execute(
            f"INSERT INTO leases_lease (id, resource_id, {names})"  # noqa: S608 - our own columns
            f" SELECT gen_random_uuid(), 'r' || n, {names} FROM leases_lease, generate_series(1, 1100) n WHERE id = %s",
            [template.pk],
        )
        cursor.execute(
            """
            INSERT INTO leases_receipt (lease_id, account_id, company_uuid, resource_id, account_identity, epoch,
                                        evidence, ended, attempt_id)
            SELECT id, account_id, company_id, resource_id, account_identity, epoch, 'destroyed', 'killed',
                   gen_random_uuid() FROM leases_lease WHERE id <> %s
            """,
            [template.pk],
        )
    assert close(company).closed_at


def test_many_blockers_are_counted_and_the_first_are_listed() -> None:
    where = factories.environment()
    for _ in range(LISTED + 2):
        factories.lease(where)
    told = closing.what_stands_in_the_way(where.company_id)
    assert (told.total, len(told.listed)) == (LISTED + 2, LISTED)


def test_a_probe_asks_for_nobody_and_ends_with_the_company() -> None:
    company = factories.company()
    account = factories.account(company, circuit=ProviderAccount.Circuit.OPEN)
    probe = factories.claimed(factories.probe(account))
    history = factories.attempt(probe, id=probe.attempt_id, finished_at=None, outcome="")
    close(company)
    probe.refresh_from_db()
    history.refresh_from_db()
    assert (probe.closed_as, probe.attempt_id, history.outcome) == ("nothing_owed", None, "nothing_owed")


def test_a_company_is_closed_once_and_with_a_reason() -> None:
    company = factories.company()
    with pytest.raises(LeaseError, match="needs a reason"):
        closing.close_company(company.pk, actor="olga", reason=" ")
    close(company)
    with pytest.raises(LeaseError) as error:
        close(company)
    assert error.value.code == "already_closed"
    with pytest.raises(NotFound):
        closing.close_company(uuid4(), **WHY)


# Credentials


def credential(company: Company | None = None, **values: Any) -> Credential:
    owner = company or factories.company()
    return Credential.objects.create(**{"company": owner, "name": f"key {uuid4()}", "reference": "env:KEY", **values})


def test_a_credential_that_nothing_depends_on_is_archived_and_deleted() -> None:
    row = credential()
    ended(factories.environment(factories.account(row.company)), credential_uuid=row.pk)
    assert archiving.archive_credential(row.pk, company_id=row.company_id, **WHY).status == "archived"
    with pytest.raises(LeaseError) as error:
        archiving.archive_credential(row.pk, company_id=row.company_id, **WHY)
    assert error.value.code == "already_archived"
    archiving.delete_credential(row.pk, company_id=row.company_id, **WHY)
    assert not Credential.objects.exists()
    actions = ActivityEntry.objects.filter(subject_id=str(row.pk)).order_by("pk").values_list("action", flat=True)
    assert list(actions) == ["credential.archived", "credential.deleted"]


@pytest.mark.parametrize("end", [archiving.archive_credential, archiving.delete_credential])
def test_what_depends_on_a_credential_stands_in_the_way_unless_it_is_forced(end: Any) -> None:
    row = credential()
    where = factories.environment(factories.account(row.company))
    lease = factories.lease(where, credential_uuid=row.pk)
    by_reference = factories.lease(where, credential_uuid=uuid4(), credential_reference=row.reference)
    other = credential(row.company, reference=row.reference)
    factories.lease(where, credential_uuid=other.pk, credential_reference=row.reference)
    factories.operation(where, credential_uuid=row.pk)
    history = ended(where, credential_uuid=row.pk)
    Obligation.objects.create(
        company=row.company,
        kind="verify_end",
        verb="delete",
        account=where.account,
        lease=history,
        due_at=factories.at(60),
    )
    found = {"pending_operation": 1, "unsettled_lease": 2, "open_obligation": 1}
    assert refused(lambda: end(row.pk, company_id=row.company_id, **WHY)) == found
    end(row.pk, company_id=row.company_id, **WHY, force=True)
    entry = ActivityEntry.objects.get(subject_id=str(row.pk))
    assert (entry.reason, entry.details["forced"]) == ("no longer needed", True)
    assert entry.details["depending"]["counts"] == found
    listed = {one["id"] for one in entry.details["depending"]["blockers"] if one["row"] == "lease"}
    assert listed == {str(lease.pk), str(by_reference.pk)}


def test_an_account_needs_another_credential_before_its_own_is_deleted() -> None:
    row = credential()
    account = factories.account(row.company, credential=row)
    assert refused(lambda: archiving.delete_credential(row.pk, company_id=row.company_id, **WHY, force=True)) == {
        "account": 1
    }
    ProviderAccount.objects.filter(pk=account.pk).update(credential=None)
    archiving.delete_credential(row.pk, company_id=row.company_id, **WHY)


def test_a_credential_of_another_company_is_not_found() -> None:
    with pytest.raises(NotFound):
        archiving.archive_credential(credential().pk, company_id=factories.company().pk, **WHY)


# Environments


def delete(where: Environment, **how: Any) -> deleting.Deleted:
    return deleting.delete_environment(where.pk, company_id=where.company_id, **WHY, **how)


def test_an_environment_whose_leases_are_settled_is_deleted_and_they_survive_it() -> None:
    where = factories.environment()
    leases = [ended(where) for _ in range(3)]
    owed = factories.teardown(factories.lease(where))
    done = delete(where)
    assert (done.owing, done.cancelled) == ((), 0)
    assert not Environment.objects.exists()
    for lease in [*leases, owed.lease]:
        assert lease is not None
        before = lease.config, lease.account_identity, lease.resource_id
        lease.refresh_from_db()
        assert lease.environment_id is None
        assert before == (lease.config, lease.account_identity, lease.resource_id)
    actions = ActivityEntry.objects.filter(subject_id=str(where.pk)).order_by("pk").values_list("action", flat=True)
    assert list(actions) == ["environment.deletion_begun", "environment.deleted"]


def test_without_consent_nothing_is_destroyed_for_it() -> None:
    where = factories.environment()
    factories.stopped(factories.lease(where))
    factories.lease(where, run=over(where.company))
    factories.teardown(factories.lease(where), verb="stop_or_delete")
    factories.teardown(factories.lease(where), verb="stop_only")
    factories.operation(where)
    assert refused(lambda: delete(where)) == {"kept": 1, "active": 1, "stopping": 2, "pending_creation": 1}


def test_with_consent_all_owes_its_teardown_before_the_row_is_deleted() -> None:
    """S-259, T-20: whoever pays it works from the lease's own record."""
    where = factories.environment()
    kept, retained = factories.stopped(factories.lease(where)), factories.stopped(state=Lease.State.RETAINED)
    Lease.objects.filter(pk=retained.pk).update(environment=None)
    left = factories.lease(where, run=over(where.company))
    nobodys = factories.lease(where)
    stopping = factories.teardown(factories.lease(where), verb="stop_or_delete")
    kept_for = factories.teardown(factories.lease(where), verb="stop_only")
    start = factories.operation(where)
    done = delete(where, consent=True)
    assert set(done.owing) == {kept.pk, left.pk, nobodys.pk}
    assert done.cancelled == 1
    kept.refresh_from_db()
    assert (kept.state, kept.reason, kept.environment_id) == ("pending_cleanup", "environment_deleted", None)
    assert kept.obligations.get(closed_at__isnull=True).verb == "delete"
    for lease in (left, nobodys):
        lease.refresh_from_db()
        assert (lease.state, lease.orphaned_at is not None, lease.environment_id) == ("pending_cleanup", True, None)
        assert lease.obligations.get(kind="teardown").verb == "stop_only"
    stopping.refresh_from_db()
    kept_for.refresh_from_db()
    assert (stopping.verb, kept_for.verb) == ("delete", "stop_only")
    start.refresh_from_db()
    assert start.cancelled_at is not None
    assert not Environment.objects.filter(pk=where.pk).exists()


def test_a_lease_of_a_live_run_refuses_whatever_the_consent() -> None:
    """S-258."""
    where = factories.environment()
    factories.lease(where, run=factories.run(where.company))
    factories.operation(where, run_uuid=factories.run(where.company).pk)
    factories.stopped(factories.lease(where))
    assert refused(lambda: delete(where, consent=True)) == {"live_run": 2, "kept": 1}


def test_a_kept_sandbox_that_something_needs_refuses_and_says_what() -> None:
    where = factories.environment()
    lease = factories.stopped(factories.lease(where))
    until = factories.at(3600)
    holds.hold(company_id=where.company_id, kind="operator", holder="olga", lease_id=lease.pk, until=until)
    assert refused(lambda: delete(where, consent=True)) == {"held": 1}
    told = deleting.what_stands_in_the_way(where.pk, company_id=where.company_id).listed[0]
    assert "an operator keeps it (until " in told.told
    assert not told.yields


IN_USE, ORPHANED, STOPPING, ON_HOLD, KEPT = "in use", "orphaned", "being stopped", "held back", "kept"


def of_an_ended_run(where: Environment, how: str, **values: Any) -> Lease:
    """A lease that a run which is over left, at each point on the way from its use to its being kept."""
    lease = factories.lease(where, run=factories.run(where.company, status="failed", **values))
    lease.refresh_from_db()
    if how == ORPHANED:
        with transaction.atomic():
            transitions.orphan(lease)
    elif how in (STOPPING, ON_HOLD):
        factories.teardown(lease, verb="stop_or_delete" if how == STOPPING else "stop_only")
    elif how == KEPT:
        factories.stopped(lease)
    return lease


@pytest.mark.parametrize("how", [IN_USE, ORPHANED, STOPPING, ON_HOLD, KEPT])
def test_what_a_queued_run_of_its_issue_needs_refuses_however_far_its_stop_has_come(how: str) -> None:
    where = factories.environment()
    issue = factories.issue(where.company)
    lease = of_an_ended_run(where, how, issue=issue)
    Lease.objects.filter(pk=lease.pk).update(issue=issue)
    queued = factories.run(where.company, issue=issue, status="queued")
    assert refused(lambda: delete(where, consent=True)) == {"held": 1}
    told = deleting.what_stands_in_the_way(where.pk, company_id=where.company_id).listed[0].told
    assert "a run of its issue is queued" in told
    Run.objects.filter(pk=queued.pk).update(status="cancelled", finished_at=factories.database_now())
    delete(where, consent=True)
    assert not Environment.objects.exists()


@pytest.mark.parametrize("how", [IN_USE, ORPHANED, STOPPING, ON_HOLD, KEPT])
def test_what_somebody_holds_on_purpose_refuses_however_far_its_stop_has_come(how: str) -> None:
    where = factories.environment()
    lease = of_an_ended_run(where, how)
    until = factories.at(3600)
    Hold.objects.create(
        company=where.company, lease=lease, kind="operator", strength="always", holder="olga", until=until
    )
    assert refused(lambda: delete(where, consent=True)) == {"held": 1}


def test_what_its_own_holder_gave_up_for_good_is_not_in_the_way() -> None:
    where = factories.environment()
    factories.teardown(of_an_ended_run(where, IN_USE), verb="delete")
    delete(where)
    assert not Environment.objects.exists()


def test_a_fence_keeps_an_active_lease_and_a_start_under_way_refuses() -> None:
    where = factories.environment()
    lease = factories.lease(where, run=over(where.company))
    Hold.objects.create(
        company=where.company,
        lease=lease,
        kind="shutdown_fence",
        strength="always",
        holder="controller",
        until=factories.at(60),
    )
    factories.start(factories.stopped(factories.lease(where)), environment_uuid=where.pk)
    assert refused(lambda: delete(where, consent=True)) == {"held": 2, "being_started": 1}


def test_an_environment_that_is_made_active_again_meanwhile_is_not_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    where = factories.environment()
    kept = factories.stopped(factories.lease(where))
    let_go = deleting._let_go

    def meanwhile(environment_id: Any, **how: Any) -> int:
        Environment.objects.filter(pk=environment_id).update(status="active")
        return let_go(environment_id, **how)

    monkeypatch.setattr(deleting, "_let_go", meanwhile)
    with pytest.raises(Refused) as error:
        delete(where, consent=True)
    assert error.value.code == "used_again"
    assert Environment.objects.filter(pk=where.pk).exists()
    kept.refresh_from_db()
    assert kept.state == "pending_cleanup"


def test_many_leases_are_let_go_of_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deleting, "_UNLINKED", 2)
    where = factories.environment()
    leases = [ended(where) for _ in range(5)]
    delete(where)
    assert Lease.objects.filter(pk__in=[lease.pk for lease in leases], environment=None).count() == 5


def test_nonsense_is_refused_at_the_edge() -> None:
    where = factories.environment()
    wrong: list[tuple[Any, str, str]] = [("x", "olga", "why"), (where.pk, "", "why"), (where.pk, "olga", "")]
    for pk, actor, reason in wrong:
        with pytest.raises(LeaseError) as error:
            deleting.delete_environment(pk, company_id=where.company_id, actor=actor, reason=reason)
        assert error.value.code == "invalid"
    with pytest.raises(NotFound):
        deleting.delete_environment(uuid4(), company_id=where.company_id, **WHY)
    with pytest.raises(NotFound):
        deleting.what_stands_in_the_way(where.pk, company_id=uuid4())


@pytest.mark.parametrize("what", ["environment", "company", "history"])
def test_nothing_goes_for_good_while_the_database_is_in_doubt(what: str) -> None:
    where = factories.environment()
    Installation.current()
    moment = factories.database_now()
    Installation.objects.update(observing_since=moment, observing_why="behind", observed_mark_at=moment)
    ends: dict[str, Any] = {
        "environment": lambda: delete(where),
        "company": lambda: close(where.company),
        "history": lambda: pruning.prune(factories.at(-2 * 86_400), **WHY),
    }
    before = snapshot()
    with pytest.raises(LeaseError, match="waits until somebody says what this database is") as error:
        ends[what]()
    assert (error.value.code, snapshot()) == ("observing", before)
