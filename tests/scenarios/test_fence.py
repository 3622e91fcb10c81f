"""Q: a controller that goes down politely fences its leases, and what becomes of them when it does not come back."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, transaction

import leases
from cleanup.engine import Engine
from leases import audit, controllers, deleting, fencing, holds
from leases.blockers import Refused
from leases.controllers import Controller
from leases.errors import AdmissionClosed, ControlRefused, LeaseError
from leases.fencing import Fenced
from leases.models import Environment, Hold, Lease, Obligation, Run
from tests import factories
from tests.concurrency import Background, together
from tests.scenarios.steps import acquired, audited, evidence, state, sweep, sweep_lane
from tests.stage import Rehearsal

pytestmark = pytest.mark.django_db(transaction=True)

REUSE = "reuse_by_environment"
FENCE = Obligation.Kind.END_FENCE


def controlled(rehearsal: Rehearsal, policy: str = "ephemeral") -> tuple[Controller, Lease]:
    controller = controllers.take_control(rehearsal.run.pk, rehearsal.company.pk, "controller-1")
    return controller, acquired(rehearsal, policy)


def fenced(rehearsal: Rehearsal, policy: str = "ephemeral", seconds: float = 600) -> tuple[Controller, Lease]:
    controller, lease = controlled(rehearsal, policy)
    assert fencing.fence(controller, seconds=seconds).leases == (lease.pk,)
    return controller, lease


def is_over(rehearsal: Rehearsal) -> None:
    Run.objects.filter(pk=rehearsal.run.pk).update(status="interrupted", finished_at=factories.database_now())


def deadline_passes() -> None:
    """Let the time of every fence pass, by moving its rows."""
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE leases_hold SET until = now() - interval '1 s' WHERE kind = 'shutdown_fence' AND ended_at IS NULL"
        )
        cursor.execute("UPDATE leases_obligation SET due_at = now() WHERE kind = 'end_fence' AND closed_at IS NULL")


def hold() -> Hold:
    return Hold.objects.get(kind=Hold.Kind.SHUTDOWN_FENCE)


# --- While it stands --------------------------------------------------------------------------------------------------


def test_a_fence_is_a_hold_and_what_ends_it_in_one_commit(rehearsal: Rehearsal) -> None:
    controller, lease = controlled(rehearsal)
    placed = fencing.fence(controller, seconds=600, actor="controller")
    row, standing = lease.obligations.get(kind=FENCE), hold()
    assert placed.leases == (lease.pk,)
    assert standing.until == row.due_at == placed.until
    assert (standing.holder, standing.strength, row.account_id) == ("controller-1", "always", None)
    assert placed.until is not None
    assert timedelta(seconds=590) < placed.until - factories.database_now() <= timedelta(seconds=600)
    assert audited("lease.fenced", lease) == 1


@pytest.mark.parametrize("seconds", [30, 3000])
def test_fencing_again_changes_nothing_and_says_until_when_it_really_stands(
    rehearsal: Rehearsal, seconds: float
) -> None:
    controller, lease = controlled(rehearsal)
    first = fencing.fence(controller, seconds=600)
    again = fencing.fence(controller, seconds=seconds)
    assert again == fencing.Fence(first.until, ())
    assert hold().until == lease.obligations.get(kind=FENCE).due_at == first.until
    leases.release(lease.pk, controller=controller)
    assert fencing.fence(controller, seconds=seconds) == fencing.Fence(None, ()), "nothing is in use, and none stands"


def test_others_leave_a_fenced_lease_alone(rehearsal: Rehearsal) -> None:
    """S-233: release, Stop, the settle of orphans and the sweep of another server do nothing."""
    _, lease = fenced(rehearsal)
    stranger = Controller(rehearsal.run.pk, "controller-2", 1, factories.at(60))
    for refused in (
        lambda: leases.release(lease.pk),
        lambda: leases.release(lease.pk, disposition="stop_and_retain", controller=stranger),
        lambda: leases.stop(company_id=rehearsal.company.pk, run_id=rehearsal.run.pk),
        lambda: leases.stop(company_id=rehearsal.company.pk, lease_id=lease.pk),
    ):
        with pytest.raises(Fenced, match="controller-1 went down and may still save its files, until ") as error:
            refused()
        assert error.value.code == "fenced"
    is_over(rehearsal)
    sweep(rehearsal)
    assert state(lease) == "active"
    assert rehearsal.world.count("stop") + rehearsal.world.count("delete") == 0
    with pytest.raises(Refused) as blocked:
        deleting.delete_environment(
            rehearsal.environment.pk, company_id=rehearsal.company.pk, actor="olga", reason="x", consent=True
        )
    assert dict(blocked.value.blockers.counts) == {"held": 1}


def test_a_stale_snapshot_fences_nothing_that_ended_meanwhile(rehearsal: Rehearsal) -> None:
    """S-235: a release is under way when the fence is asked for; the lock decides, and the row is read again."""
    controller, lease = controlled(rehearsal)
    with transaction.atomic():
        Lease.objects.select_for_update().get(pk=lease.pk)
        waiting = Background(lambda: fencing.fence(controller, seconds=600))
        leases.release(lease.pk)
    assert waiting.result().leases == ()
    assert not Hold.objects.exists()
    assert not Obligation.objects.filter(kind=FENCE).exists()


def test_of_a_release_and_a_fence_at_the_same_moment_one_wins(rehearsal: Rehearsal) -> None:
    controller, lease = controlled(rehearsal)

    def release() -> str:
        try:
            return leases.release(lease.pk).state
        except Fenced as error:
            return error.code

    placed, answer = together(lambda: fencing.fence(controller, seconds=600), release)
    assert (bool(placed.leases), answer, state(lease)) in (
        (True, "fenced", "active"),
        (False, "pending_cleanup", "pending_cleanup"),
    )


def test_only_who_holds_the_run_may_fence_and_for_an_hour_at_most(rehearsal: Rehearsal) -> None:
    controller, _ = controlled(rehearsal)
    for seconds in (0, 3601, float("nan")):
        with pytest.raises(LeaseError) as error:
            fencing.fence(controller, seconds=seconds)
        assert error.value.code == "invalid"
    controllers.take_control(rehearsal.run.pk, rehearsal.company.pk, "controller-1")
    with pytest.raises(ControlRefused) as refused:
        fencing.fence(controller, seconds=600)
    assert refused.value.code == "controller_replaced"
    assert not Hold.objects.exists()


# --- Its owner --------------------------------------------------------------------------------------------------------


def test_the_aborted_owner_itself_may_stop_and_keep_its_lease(rehearsal: Rehearsal) -> None:
    """S-236: also when its run was interrupted since; and work on with it, to save the files."""
    controller, lease = fenced(rehearsal)
    Run.objects.filter(pk=rehearsal.run.pk).update(
        status="interrupted", finished_at=factories.database_now(), controller_expires_at=factories.at(-60)
    )
    assert leases.bridge(lease.pk, controller=controller).execute(["tar", "c", "."]).exit_code == 0
    leases.release(lease.pk, outcome="failed", disposition="stop_and_retain", controller=controller)
    sweep(rehearsal)
    assert (state(lease), evidence(lease)) == ("released", ["stopped"])
    assert hold().ended_at is None, "the files may still be saved"
    assert rehearsal.world.count("delete") == 0


def test_the_owners_ordinary_release_ends_the_fence(rehearsal: Rehearsal) -> None:
    """S-239: nothing was deferred, so whoever was refused asks again, and finds it done."""
    controller, lease = fenced(rehearsal)
    with pytest.raises(Fenced):
        leases.release(lease.pk)
    leases.release(lease.pk, controller=controller)
    assert (hold().ended_by, lease.obligations.get(kind=FENCE).closed_as) == ("api", "nothing_owed")
    sweep(rehearsal)
    assert state(lease) == "expired"
    assert leases.release(lease.pk).state == "expired"
    rehearsal.run.refresh_from_db()
    assert rehearsal.run.restore_failed_at is None


def test_files_that_were_saved_end_the_fence_and_the_lease_is_whoevers(rehearsal: Rehearsal) -> None:
    controller, lease = fenced(rehearsal)
    assert fencing.end(controller, actor="controller") == 1
    assert fencing.end(controller, actor="controller") == 0
    is_over(rehearsal)
    sweep(rehearsal)
    assert evidence(lease)[0] == "stopped"


# --- Whoever takes the run --------------------------------------------------------------------------------------------


def test_a_controller_that_takes_the_run_over_ends_the_fences_of_the_one_before(rehearsal: Rehearsal) -> None:
    """A rolling restart: somebody is there again for whom the sandbox runs, and nothing stops it at the deadline."""
    one, lease = fenced(rehearsal)
    before = one.expires_at
    controllers.give_up_control(one)
    two = controllers.take_control(rehearsal.run.pk, rehearsal.company.pk, "controller-2", actor="two")
    assert (hold().ended_by, hold().holder, two.expires_at >= before) == ("two", "controller-1", True)
    assert lease.obligations.get(kind=FENCE).closed_as == "nothing_owed"
    assert audited("lease.fence_ended", lease) == 1
    deadline_passes()
    assert sweep_lane(FENCE).claimed == 0
    sweep(rehearsal)
    rehearsal.run.refresh_from_db()
    assert (state(lease), rehearsal.run.status, rehearsal.run.restore_failed_at) == ("active", "running", None)
    assert rehearsal.world.count("stop") == 0
    with pytest.raises(AdmissionClosed):
        leases.bridge(lease.pk, controller=one).execute(["true"])
    assert leases.bridge(lease.pk, controller=two).execute(["true"]).exit_code == 0
    leases.release(lease.pk, controller=two)
    sweep(rehearsal)
    assert state(lease) == "expired"


def test_one_that_takes_its_run_again_ends_its_fence_and_a_refused_one_ends_nothing(rehearsal: Rehearsal) -> None:
    fenced(rehearsal)
    with pytest.raises(ControlRefused):
        controllers.take_control(rehearsal.run.pk, rehearsal.company.pk, "controller-2")
    assert hold().ended_at is None
    controllers.take_control(rehearsal.run.pk, rehearsal.company.pk, "controller-1")
    assert hold().ended_at is not None


def test_what_was_stopped_under_the_fence_is_the_new_controllers(rehearsal: Rehearsal) -> None:
    """It stays kept, by its run, which is live."""
    one, lease = fenced(rehearsal, REUSE)
    leases.release(lease.pk, outcome="failed", disposition="stop_and_retain", controller=one)
    sweep(rehearsal)
    controllers.give_up_control(one)
    controllers.take_control(rehearsal.run.pk, rehearsal.company.pk, "controller-2")
    sweep(rehearsal)
    assert (state(lease), hold().ended_at is not None) == ("released", True)
    assert [reason.name for reason in holds.of(lease).reasons] == ["run_live"]


@pytest.mark.parametrize("disposition", ["by_policy", "stop_and_retain"])
def test_whoever_holds_the_run_owns_every_fence_on_its_leases(rehearsal: Rehearsal, disposition: Any) -> None:
    """One that was placed by another name, as before a takeover that did not end it."""
    controller, lease = controlled(rehearsal)
    with transaction.atomic():
        fencing._place(lease, "controller-0", factories.at(600), "test")
    leases.release(lease.pk, disposition=disposition, controller=controller)
    assert state(lease) == "pending_cleanup"
    assert fencing.end(controller) == (1 if disposition == "stop_and_retain" else 0)
    assert hold().ended_at is not None


@pytest.mark.parametrize("_", range(4))
def test_of_a_takeover_and_the_deadline_at_the_same_moment_one_wins(rehearsal: Rehearsal, _: int) -> None:
    one, lease = fenced(rehearsal)
    controllers.give_up_control(one)
    deadline_passes()
    _, outcomes = together(
        lambda: controllers.take_control(rehearsal.run.pk, rehearsal.company.pk, "controller-2"),
        lambda: sweep_lane(FENCE).outcomes,
    )
    rehearsal.run.refresh_from_db()
    marked = rehearsal.run.restore_failed_at is not None
    assert (state(lease), marked) in (("active", False), ("pending_cleanup", True))
    assert hold().ended_at is not None
    assert not lease.obligations.filter(kind=FENCE, closed_at__isnull=True).exists()
    assert (outcomes == {"proven": 1}) or not marked


# --- Its end ----------------------------------------------------------------------------------------------------------


def test_at_the_deadline_it_is_stopped_and_kept_and_the_run_is_marked(rehearsal: Rehearsal) -> None:
    """T-25."""
    _, lease = fenced(rehearsal, REUSE)
    is_over(rehearsal)
    deadline_passes()
    assert sweep_lane(FENCE).outcomes == {"proven": 1}
    lease.refresh_from_db()
    rehearsal.run.refresh_from_db()
    assert (lease.state, lease.reason, lease.policy) == ("pending_cleanup", "fence_expired", "retain_on_failure")
    assert (lease.outcome, lease.scope, lease.orphaned_at) == ("failed", "", None)
    assert lease.obligations.get(kind="teardown").verb == "stop_only"
    assert rehearsal.run.restore_failed_at is not None
    assert hold().ended_at is not None
    sweep(rehearsal)
    assert (state(lease), evidence(lease)) == ("retained", ["stopped"])
    assert rehearsal.world.count("delete") == 0
    assert lease.kept_until is not None
    assert lease.kept_until > factories.at(29 * 86_400)


def test_a_person_who_asks_early_does_not_end_it(rehearsal: Rehearsal) -> None:
    _, lease = fenced(rehearsal)
    leases.retry(company_id=rehearsal.company.pk, lease_id=lease.pk, actor="olga", reason="now")
    assert sweep_lane(FENCE).outcomes == {"held": 1}
    assert (hold().ended_at, state(lease)) == (None, "active")


def test_what_was_stopped_before_the_deadline_stays_as_it_is_and_protected(rehearsal: Rehearsal) -> None:
    """S-237, T-26: the owner died between the stop and the export."""
    controller, lease = fenced(rehearsal, REUSE)
    leases.release(lease.pk, outcome="failed", disposition="stop_and_retain", controller=controller)
    is_over(rehearsal)
    Engine().sweep(rehearsal.account.pk)
    assert state(lease) == "released"
    # Due at the same moment: the end of what is kept must not be faster than that of the fence.
    with connection.cursor() as cursor:
        cursor.execute("UPDATE leases_lease SET kept_until = now() - interval '1 s'")
    deadline_passes()
    sweep_lane(Obligation.Kind.DISPOSE)
    assert state(lease) == "released"
    sweep(rehearsal)
    lease.refresh_from_db()
    rehearsal.run.refresh_from_db()
    assert (lease.state, lease.policy, lease.scope) == ("released", "retain_on_failure", "")
    assert lease.kept_until is not None
    assert lease.kept_until > factories.at(29 * 86_400)
    assert rehearsal.run.restore_failed_at is not None
    assert (rehearsal.world.count("stop"), rehearsal.world.count("delete")) == (1, 0)


def test_a_fenced_sandbox_is_nobodys_to_use_again(rehearsal: Rehearsal) -> None:
    controller, lease = fenced(rehearsal, REUSE)
    leases.release(lease.pk, outcome="failed", disposition="stop_and_retain", controller=controller)
    Engine().sweep(rehearsal.account.pk)
    assert (state(lease), lease.scope != "") == ("released", True)
    other = leases.acquire(
        rehearsal.environment.pk, company_id=rehearsal.company.pk, run_id=factories.run(rehearsal.company).pk
    )
    assert other.resource_id != lease.resource_id


def test_the_protection_is_of_the_sandbox_and_not_of_one_row(rehearsal: Rehearsal) -> None:
    """S-238: a row of the past names the same sandbox, in another account of the same identity."""
    controller, lease = fenced(rehearsal)
    account = factories.account(
        rehearsal.company, provider="rehearsal", endpoint=lease.endpoint, attested_identity=lease.account_identity
    )
    where = factories.environment(account)
    old = factories.stopped(factories.lease(where, resource_id=lease.resource_id, run=rehearsal.run))
    Lease.objects.filter(pk=old.pk).update(kept_until=factories.at(-1), orphaned_at=factories.at(-1))
    leases.release(lease.pk, outcome="failed", disposition="stop_and_retain", controller=controller)
    is_over(rehearsal)
    Engine().sweep(rehearsal.account.pk)
    sweep_lane(Obligation.Kind.DISPOSE)
    assert [reason.name for reason in holds.of(old).reasons] == ["shutdown_fence"]
    assert state(old) == "released"
    deadline_passes()
    sweep(rehearsal)
    for row in (lease, old):
        row.refresh_from_db()
        assert (row.state, row.policy, row.orphaned_at) == ("released", "retain_on_failure", None)
        assert row.kept_until is not None
        assert row.kept_until > factories.at(29 * 86_400)
    assert rehearsal.world.count("delete") == 0


def test_the_end_of_a_fence_wakes_every_row_of_its_sandbox(rehearsal: Rehearsal) -> None:
    controller, lease = fenced(rehearsal)
    account = factories.account(
        rehearsal.company, provider="rehearsal", endpoint=lease.endpoint, attested_identity=lease.account_identity
    )
    old = factories.stopped(factories.lease(factories.environment(account), resource_id=lease.resource_id))
    disposal = old.obligations.get(kind="dispose")
    before = disposal.wakes
    fencing.end(controller)
    disposal.refresh_from_db()
    assert disposal.wakes == before + 1


def test_the_end_is_one_commit(rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    _, lease = fenced(rehearsal)
    deadline_passes()

    def dies(*_: Any, **__: Any) -> None:
        raise RuntimeError("died in the middle")

    with monkeypatch.context() as patch:
        patch.setattr(audit, "record", dies)
        assert sweep_lane(FENCE).outcomes == {"failed": 1}
    rehearsal.run.refresh_from_db()
    assert (state(lease), hold().ended_at, rehearsal.run.restore_failed_at) == ("active", None, None)
    assert lease.obligations.get(kind=FENCE).is_open


def test_of_the_owners_release_and_the_deadline_one_wins(rehearsal: Rehearsal) -> None:
    controller, lease = fenced(rehearsal)
    deadline_passes()
    with transaction.atomic():
        Lease.objects.select_for_update().get(pk=lease.pk)
        ending = Background(lambda: sweep_lane(FENCE).outcomes)
        assert ending.result() == {"contended": 1}, "it does not wait for a lock"
        leases.release(lease.pk, controller=controller)
    assert lease.obligations.get(kind=FENCE).closed_as == "nothing_owed"
    rehearsal.run.refresh_from_db()
    assert rehearsal.run.restore_failed_at is None
    sweep(rehearsal)
    assert state(lease) == "expired"


# --- Going down -------------------------------------------------------------------------------------------------------


def test_who_joins_in_time_keeps_its_fence(rehearsal: Rehearsal) -> None:
    controller, lease = controlled(rehearsal)
    asked: list[float] = []

    def join(seconds: float) -> bool:
        asked.append(seconds)
        assert hold().ended_at is None, "fenced before anything is waited for"
        return True

    assert fencing.go_down(controller, seconds=600, join=join)
    assert asked == [30.0]
    assert state(lease) == "active"


def test_what_never_joins_is_kept_before_anything_is_cleaned_up(rehearsal: Rehearsal) -> None:
    """S-240."""
    controller, lease = controlled(rehearsal)
    assert not fencing.go_down(controller, seconds=600, join=lambda _: False)
    lease.refresh_from_db()
    rehearsal.run.refresh_from_db()
    assert (lease.state, lease.policy) == ("pending_cleanup", "retain_on_failure")
    assert rehearsal.run.restore_failed_at is not None
    assert rehearsal.world.count("stop") == 0
    Environment.objects.update(policy="ephemeral")
    is_over(rehearsal)
    sweep(rehearsal)
    assert (state(lease), rehearsal.world.count("delete")) == ("retained", 0)
