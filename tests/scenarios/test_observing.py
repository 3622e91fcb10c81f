"""While a database may be a restored or copied one: what is left alone, what goes on, and how a person ends it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import StringIO
from typing import Any
from uuid import uuid4

import pytest
import redis
from django.core.management import CommandError, call_command
from django.db import connection
from django.test import Client

import leases
from cleanup import judging, outside, report, trusting
from cleanup.checks import tell_of_the_database
from cleanup.claims import LANE
from cleanup.engine import Engine
from cleanup.watermark import Mark
from leases import trust
from leases.errors import AcquireRejected, AdmissionClosed, DecisionRefused
from leases.models import ActivityEntry, Attempt, Installation, Lease, Obligation, ProviderAccount
from leases.models.environments import Policy
from tests import factories
from tests.beats import broker_url, eventually
from tests.concurrency import Background, elsewhere
from tests.scenarios.steps import acquired, attempts, owed, released, state, sweep
from tests.stage import Rehearsal

pytestmark = pytest.mark.django_db(transaction=True)

Why = Installation.Observing
CHANGES = ("stop", "delete", "start", "recover", "extend", "create")


@pytest.fixture(autouse=True)
def _judged_anew(transactional_db: None) -> Iterator[None]:
    judging.forget()
    yield
    judging.forget()


def observe() -> None:
    """Let this database observe: what was released or made before now is of before the mark."""
    assert judging.is_cleared()
    at = factories.database_now()
    Installation.objects.update(observing_since=at, observing_why=Why.BEHIND, observed_mark_at=at)


def changed(rehearsal: Rehearsal) -> list[str]:
    """The calls that change something, in their order."""
    return [name for name, _ in rehearsal.world.calls if name in CHANGES]


def reused(rehearsal: Rehearsal) -> Lease:
    """A lease whose stopped sandbox waits for its next run."""
    lease = released(rehearsal, Policy.REUSE_BY_ENVIRONMENT)
    assert sweep(rehearsal) == {"proven": 1}
    assert state(lease) == "released"
    return lease


# --- What is left alone -----------------------------------------------------------------------------------------------


def test_what_was_released_before_the_mark_is_left_alone_and_no_attempt_at_it_burnt(rehearsal: Rehearsal) -> None:
    before = released(rehearsal)
    calls = list(rehearsal.world.calls)
    observe()
    assert sweep(rehearsal) == {"quieted": 1}
    row = owed(before)
    assert (row.quiet, row.failures, row.closed_at, row.escalated_at) == ("observing", 0, None, None)
    assert (state(before), rehearsal.world.calls) == ("pending_cleanup", calls)
    leases.retry(company_id=rehearsal.company.pk, lease_id=before.pk, actor="user", reason="please")
    assert sweep(rehearsal) == {"quieted": 1}
    assert rehearsal.world.calls == calls, "nor because a person asks for it"


def test_what_was_released_after_the_mark_is_torn_down(rehearsal: Rehearsal) -> None:
    before, lease = released(rehearsal), acquired(rehearsal)
    observe()
    leases.release(lease.pk)
    outcomes = sweep(rehearsal)
    assert outcomes == {"quieted": 1, "proven": 1}
    assert (state(before), state(lease)) == ("pending_cleanup", "expired")
    assert rehearsal.world.count("delete") == 1


def test_an_acquire_creates_and_neither_starts_nor_dooms_what_is_kept(rehearsal: Rehearsal) -> None:
    kept = reused(rehearsal)
    observe()
    rehearsal.environment.config = {"size": 2}
    rehearsal.environment.save()
    again = acquired(rehearsal, Policy.REUSE_BY_ENVIRONMENT)
    assert again.resource_id != kept.resource_id
    assert (state(kept), rehearsal.world.count("start"), rehearsal.world.count("delete")) == ("released", 0, 0)


def test_no_work_goes_into_a_sandbox_of_before(rehearsal: Rehearsal) -> None:
    before = acquired(rehearsal)
    observe()
    with pytest.raises(AdmissionClosed) as caught:
        leases.bridge(before.pk).execute(["true"])
    assert caught.value.code == "observing"
    assert rehearsal.world.count("execute") == 0
    leases.bridge(acquired(rehearsal, ad_hoc=True).pk).execute(["true"])
    assert rehearsal.world.count("execute") == 1


def test_a_start_that_is_under_way_is_not_sent_any_more(rehearsal: Rehearsal) -> None:
    kept = reused(rehearsal)
    rehearsal.world.after["inspect"] = lambda _: Background(observe).result()
    with pytest.raises(AcquireRejected, match="restored or copied"):
        acquired(rehearsal, Policy.REUSE_BY_ENVIRONMENT)
    assert rehearsal.world.count("start") == 0
    rehearsal.world.after.clear()
    sweep(rehearsal)
    assert (rehearsal.world.of(kept.resource_id).state, rehearsal.world.count("delete")) == ("stopped", 0)


def test_a_kept_sandbox_is_not_started_while_its_server_is_yet_to_be_judged(rehearsal: Rehearsal) -> None:
    kept = reused(rehearsal)
    Installation.objects.update(judged_server="16384/00000001/0.000000")
    assert trust.is_observing()
    assert not trust.may_lapse()
    assert acquired(rehearsal, Policy.REUSE_BY_ENVIRONMENT).resource_id != kept.resource_id
    assert state(kept) == "released"


LEFT_ALONE: dict[str, Callable[[], Obligation]] = {
    "a teardown": factories.teardown,
    "the end of what is kept": lambda: factories.stopped().obligations.get(kind="dispose"),
    "an old creation": lambda: owed(factories.operation(due_in=0)),
    "an old start": lambda: owed(factories.start(due_in=0)),
    "a deadline of a provider": lambda: _of_lease("extend"),
    "an ad-hoc lease at its deadline": lambda: _of_lease("end_lease", account=None),
    "an orphan": lambda: _of_lease("settle_orphan", account=None),
    "a fence": lambda: _of_lease("end_fence", account=None),
    "the watch over controllers": lambda: Obligation.objects.create(
        kind="watch_controllers", installation=Installation.current(), due_at=factories.at(0)
    ),
}


def _of_lease(kind: str, **values: Any) -> Obligation:
    lease = factories.lease()
    return Obligation.objects.create(
        **{
            "company_id": lease.company_id,
            "kind": kind,
            "account": lease.account,
            "lease": lease,
            "due_at": factories.at(0),
            **values,
        }
    )


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_it_is_left_alone(case: str) -> None:
    row = LEFT_ALONE[case]()
    Obligation.objects.filter(pk=row.pk).update(due_at=factories.at(0), quiet="")
    observe()
    Engine().sweep(row.account_id or LANE)
    row.refresh_from_db()
    assert (row.quiet, row.failures, row.closed_at) == ("observing", 0, None)
    assert attempts(row) == ["quieted"]
    assert not Attempt.objects.exclude(announced_call="").exists()


def test_the_recovery_of_a_creation_asked_for_since_goes_on(rehearsal: Rehearsal) -> None:
    observe()
    lost = factories.operation(rehearsal.environment, due_in=0)
    Engine().sweep(rehearsal.account.pk)
    assert owed(lost).quiet != "observing"


def test_reads_go_on(rehearsal: Rehearsal) -> None:
    """A probe asks an account who it is; nothing of that changes anything."""
    rehearsal.account.attested_identity = rehearsal.world.identity
    rehearsal.account.circuit = ProviderAccount.Circuit.OPEN
    rehearsal.account.save()
    probe = factories.probe(rehearsal.account)
    observe()
    assert sweep(rehearsal) == {"proven": 1}
    probe.refresh_from_db()
    assert probe.closed_as == "proven"


def test_a_call_is_not_announced_once_it_observes_however_far_the_attempt_had_come(rehearsal: Rehearsal) -> None:
    lease = released(rehearsal)
    rehearsal.world.after["inspect"] = lambda _: Background(observe).result()
    assert sweep(rehearsal) == {"quieted": 1}
    assert owed(lease).quiet == "observing"
    assert changed(rehearsal) == ["create"]


# --- How it comes to observe ------------------------------------------------------------------------------------------


def _later_mark(**values: Any) -> Mark:
    now = judging.read(judging.on_django).facts.now
    return replace(now, position=now.position + 10**9, **values)


def test_an_engine_judges_the_database_before_it_claims_anything(rehearsal: Rehearsal) -> None:
    before = released(rehearsal)
    mark = _later_mark()
    outside.keep_in_broker(Installation.current().mark, mark)
    Installation.objects.update(judged_server="")
    judging.forget()
    assert sweep(rehearsal) == {"quieted": 1}
    installation = Installation.current()
    assert (installation.observing_why, installation.observed_mark_at) == ("behind", mark.at)
    assert (changed(rehearsal), owed(before).quiet) == (["create"], "observing")


def test_an_engine_that_cannot_tell_does_nothing(rehearsal: Rehearsal) -> None:
    """The server was started anew, marks were kept outside, and this process finds none: the beat knows more."""
    before = released(rehearsal)
    at = factories.database_now()
    Installation.objects.update(
        judged_server="another start",
        watermark_outside=True,
        watermark_position=1,
        watermark_timeline=1,
        watermark_at=at,
        watermark_identity=judging.read(judging.on_django).facts.now.identity,
    )
    judging.forget()
    assert Engine().sweep(rehearsal.account.pk).claimed == 0
    assert (attempts(owed(before)), Installation.current().observing_since) == ([], None)


def test_an_emptied_broker_changes_nothing(rehearsal: Rehearsal) -> None:
    """K-36. The server that was judged is the one that answers, so there is nothing to ask outside."""
    before, mark = released(rehearsal), Installation.current().mark
    assert judging.is_cleared()
    Installation.objects.update(watermark_outside=True)
    with redis.Redis.from_url(broker_url()) as broker:
        broker.flushdb()
    assert outside.in_broker(mark) is None
    judging.forget()
    assert sweep(rehearsal) == {"proven": 1}
    assert (state(before), trust.is_observing()) == ("expired", False)


# --- How a person ends it ---------------------------------------------------------------------------------------------


def run(*arguments: str) -> dict[str, Any]:
    out = StringIO()
    call_command("trust_database", *arguments, "--json", stdout=out)
    told: dict[str, Any] = json.loads(out.getvalue())
    return told


def test_trust_wakes_what_was_left_alone_and_it_is_paid(rehearsal: Rehearsal) -> None:
    before = released(rehearsal)
    observe()
    sweep(rehearsal)
    dry = run("--as-restore", "--dry-run")
    assert (dry["observing"], dry["why"], dry["waiting"], owed(before).quiet) == (True, "behind", 1, "observing")
    told = run("--as-restore", "--reason", "the backup of noon", "--actor", "ann")
    assert told["woken"] == 1
    installation = Installation.current()
    assert (installation.observing_since, installation.observing_why) == (None, "")
    assert not trust.may_lapse(), "holds stand for a while"
    kept = outside.in_broker(installation.mark)
    assert kept is not None
    assert kept == outside.in_file(installation.mark)
    assert sweep(rehearsal) == {"proven": 1}
    assert state(before) == "expired"
    entry = ActivityEntry.objects.get(action="installation.trusted_as_restore")
    assert (entry.company_id, entry.actor, entry.reason) == (None, "ann", "the backup of noon")


def test_marks_of_before_a_persons_word_are_void(rehearsal: Rehearsal) -> None:
    ahead = _later_mark()
    mark = Installation.current().mark
    outside.keep_in_broker(mark, ahead)
    outside.keep_in_file(mark, ahead)
    Installation.objects.update(judged_server="")
    judging.forget()
    assert judging.is_cleared()
    assert trust.is_observing()
    run("--as-restore", "--reason", "restored")
    outside.file_of(mark).write_text(outside._written(ahead))  # the beat's, on a host that was not reached
    Installation.objects.update(judged_server="another start")
    judging.forget()
    assert judging.is_cleared()
    assert not trust.is_observing()


def test_what_is_trusted_already_is_refused(rehearsal: Rehearsal) -> None:
    with pytest.raises(CommandError, match="does not observe"):
        call_command("trust_database", "--as-restore", "--reason", "for nothing")
    with pytest.raises(CommandError, match="--reason is required"):
        call_command("trust_database", "--as-restore")


def test_trust_that_comes_while_a_row_becomes_quiet_is_not_slept_through(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row's writer shares the lock of the installation's row; trust waits for it, and then finds the row quiet."""
    before, giving, still = released(rehearsal), [], trust.still_forbids
    observe()

    def trusted_meanwhile(kind: str, **subject: Any) -> bool:
        answer = still(kind, **subject)
        giving.append(Background(lambda: trusting.as_restore(actor="ann", reason="meanwhile")))
        eventually(lambda: elsewhere(_somebody_waits_for_a_lock), "trust waits for the row to be written")
        return answer

    monkeypatch.setattr(trust, "still_forbids", trusted_meanwhile)
    Engine().sweep(rehearsal.account.pk)
    giving[0].result()
    row = owed(before)
    assert (row.quiet, row.due_at is not None, attempts(row)) == ("", True, ["quieted"])


def _somebody_waits_for_a_lock() -> bool:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        )
        return bool(cursor.fetchone()[0])


# --- A clone ----------------------------------------------------------------------------------------------------------


def test_a_clone_disowns_all_that_the_original_leased_and_touches_nothing_of_it(rehearsal: Rehearsal) -> None:
    kept, active, owing = reused(rehearsal), acquired(rehearsal), released(rehearsal)
    lost = factories.operation(rehearsal.environment)
    startup = factories.startup(rehearsal.run)
    calls = len(rehearsal.world.calls)
    mark = Installation.current().mark
    observe()
    dry = run("--as-clone", "--dry-run")
    assert (dry["leases"], dry["operations"], dry["confirm"]) == (3, 1, str(mark))
    told = run("--as-clone", "--confirm", str(mark), "--reason", "staging", "--actor", "ann")
    assert (told["leases"], told["operations"]) == (3, 1)
    installation = Installation.current()
    assert (str(installation.mark), installation.mark != mark) == (told["mark"], True)
    assert not trust.is_observing()
    for lease in (kept, active, owing):
        assert state(lease) == "failed"
        assert not lease.obligations.filter(closed_at__isnull=True).exists()
        assert owed(lease).closed_as == "disowned"
    lost.refresh_from_db()
    startup.refresh_from_db()
    assert (lost.state, owed(lost).closed_as, startup.closed_as) == ("resolved", "disowned", "disowned")
    assert sweep(rehearsal) == {}
    assert len(rehearsal.world.calls) == calls
    assert report.owed().unverified == 0, "they are the original's debt"
    own = acquired(rehearsal, Policy.REUSE_BY_ENVIRONMENT)
    box = rehearsal.world.of(own.resource_id)
    assert str(installation.mark) in box.resource.marks.values()
    assert own.resource_id != kept.resource_id
    leases.release(own.pk, disposition="destroy")
    assert sweep(rehearsal) == {"proven": 1}
    assert ActivityEntry.objects.get(action="installation.declared_clone").company_id is None


def test_a_clone_is_not_declared_by_mistake(rehearsal: Rehearsal) -> None:
    lease = acquired(rehearsal)
    with pytest.raises(DecisionRefused, match="not the present mark"):
        trusting.as_clone(actor="ann", reason="staging", confirmation=str(uuid4()))
    assert state(lease) == "active"


def test_a_clone_first_releases_what_it_acquired_under_the_old_mark(rehearsal: Rehearsal) -> None:
    observe()
    own = acquired(rehearsal)
    mark = str(Installation.current().mark)
    with pytest.raises(DecisionRefused, match="release them first"):
        trusting.as_clone(actor="ann", reason="staging", confirmation=mark)
    leases.release(own.pk)
    assert sweep(rehearsal) == {"proven": 1}
    trusting.as_clone(actor="ann", reason="staging", confirmation=mark)
    assert str(Installation.current().mark) != mark


# --- Where it is said -------------------------------------------------------------------------------------------------


def test_it_is_said_everywhere(rehearsal: Rehearsal, admin_client: Client) -> None:
    assert "OBSERVING" not in admin_client.get("/admin/").content.decode()
    assert tell_of_the_database(["default"]) == []
    observe()
    out = StringIO()
    call_command("owed", stdout=out)
    assert out.getvalue().startswith("OBSERVING since ")
    out = StringIO()
    call_command("owed", "--json", stdout=out)
    assert json.loads(out.getvalue())["trust"]["why"] == "behind"
    for page in ("/admin/", "/admin/leases/lease/", "/admin/leases/installation/"):
        assert "OBSERVING since" in admin_client.get(page).content.decode()
    page = f"/admin/leases/installation/{Installation.current().pk}/change/"
    assert "an older state of this database was restored" in admin_client.get(page).content.decode()
    (warning,) = tell_of_the_database(["default"])
    assert warning.msg.startswith("OBSERVING since ")
