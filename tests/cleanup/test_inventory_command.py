"""`manage.py inventory` as an operator at a shell uses it, with real processes (`local`) and over HTTP (Daytona's)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from io import StringIO
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.core.management import CommandError, call_command

import leases
from cleanup import tasks
from leases import deciding
from leases.models import (
    ActivityEntry,
    Environment,
    Installation,
    InventoryFinding,
    Lease,
    Obligation,
    Receipt,
    Run,
)
from leases.planning import MARK_OPERATION, name_of
from providers.contract import MARK_INSTALLATION, ErrorKind
from providers.daytona.rehearsal import Fault, Kind
from providers.local.provider import LocalConfig
from providers.registry import AnyProvider, open_provider
from tests import factories
from tests.beats import BOUND, CHECKOUT, Queue, database_url, eventually
from tests.cleanup.test_inventory import PAST_GRACE, marked, passes, put, settled_leak
from tests.providers.local_harness import pids_of
from tests.scenarios.steps import evidence, fails, owed, snapshot, state, sweep
from tests.scenarios.test_daytona import Place, clock, place, server
from tests.stage import Rehearsal
from tests.workers import workers

__all__ = ["clock", "place", "server"]  # fixtures

pytestmark = pytest.mark.django_db(transaction=True)

WITHIN = 30.0


def run(*arguments: Any) -> tuple[int, str]:
    """Return the exit status and what was printed, or the sentence of the refusal."""
    out, err = StringIO(), StringIO()
    try:
        call_command("inventory", *map(str, arguments), stdout=out, stderr=err)
    except CommandError as refused:
        return refused.returncode, str(refused)
    except SystemExit as ended:
        return int(ended.code or 0), out.getvalue() + err.getvalue()
    return 0, out.getvalue() + err.getvalue()


def read(*arguments: Any) -> tuple[int, Any]:
    status, text = run(*arguments, "--json")
    return status, json.loads(text)


def counts(told: Any) -> dict[str, int]:
    (account,) = told["accounts"]
    return {name: number for name, number in account["counts"].items() if number}


@pytest.fixture
def used(rehearsal: Rehearsal) -> Rehearsal:
    rehearsal.account.attested_identity = rehearsal.world.identity
    rehearsal.account.save()
    return rehearsal


# At the shell


def test_it_reports_first_and_destroys_nothing_unless_told_to(used: Rehearsal) -> None:
    used.run.status = Run.Status.SUCCEEDED
    used.run.save()
    stray = marked(used)
    status, told = run()
    assert status == 0
    assert "1 unknown" in told
    assert f"unknown {stray.resource_id}, not confirmed yet, seen so for 0 min" in told
    passes(PAST_GRACE)
    status, told = run()
    assert status == 1
    assert f"unknown {stray.resource_id}, confirmed, seen so for 15 min" in told
    assert told.endswith("1 confirmed leaks are left.\n")
    assert (Lease.objects.count(), used.world.count("delete")) == (0, 0)
    passes(1)
    status, told = run("--delete", 1, "--actor", "olga")
    lease = Lease.objects.get()
    assert status == 0
    assert f"{stray.resource_id}: lease {lease.pk} owns it now, and owes its teardown." in told
    assert ActivityEntry.objects.get(action="inventory.owned").actor == "olga"
    assert used.world.count("delete") == 0
    assert sweep(used) == {"proven": 1}
    assert used.world.boxes == {}


def test_the_json_object_says_all_of_it(used: Rehearsal) -> None:
    lease = settled_leak(used)
    other = put(used, {MARK_INSTALLATION: str(uuid4())})
    put(used, {})
    run()
    passes(PAST_GRACE)
    status, told = read("--account", used.account.name)
    assert (status, counts(told), told["leaks"]) == (1, {"settled": 1, "foreign": 1, "unmarked": 1}, 1)
    (account,) = told["accounts"]
    assert account["foreign"] == [other.resource_id]
    (finding,) = account["findings"]
    assert {name: finding[name] for name in ("verdict", "resource_id", "lease", "owned")} == {
        "verdict": "settled",
        "resource_id": lease.resource_id,
        "lease": str(lease.pk),
        "owned": False,
    }
    assert finding["confirmed_at"]
    passes(1)
    status, told = read("--account", used.account.pk, "--delete", 3)
    assert (status, told["leaks"], told["refused"]) == (0, 0, [])
    assert [one["lease"] for one in told["destroyed"]] == [str(lease.pk)]


def test_a_dry_run_writes_nothing_and_confirms_nothing(used: Rehearsal) -> None:
    marked(used)
    before = snapshot()
    status, told = run("--dry-run")
    assert (status, "Nothing was written" in told) == (0, True)
    assert snapshot() == before


def test_what_is_refused_right_before_is_told_and_left(used: Rehearsal) -> None:
    stray = marked(used)
    run()
    passes(PAST_GRACE)
    used.world.hooks["inspect"] = fails(ErrorKind.SERVER)
    status, told = run("--delete", 5)
    assert status == 1
    assert f"{stray.resource_id}: left alone: the provider could not be asked: server." in told


def test_an_account_that_cannot_be_listed_is_told_and_the_others_are_listed(used: Rehearsal) -> None:
    another = Rehearsal()
    another.account.attested_identity = another.world.identity
    another.account.save()
    used.world.hooks["list"] = fails(ErrorKind.SERVER)
    status, told = run("--all")
    assert status == 1
    assert f"{used.account.name} (rehearsal): NOT LISTED: server. Nothing follows from it." in told
    assert f"{another.account.name} (rehearsal): nothing" in told


def test_nothing_is_destroyed_after_a_failover_and_that_is_said(used: Rehearsal) -> None:
    marked(used)
    run()
    passes(PAST_GRACE)
    run()
    passes(1)
    Installation.objects.update(calm_until=factories.at(60))
    status, told = run("--delete", 5)
    assert (status, "Nothing is destroyed" in told, Lease.objects.count()) == (1, True, 0)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--account", "nobody"), "there is no account 'nobody'"),
        (("--delete", "21"), "from 0 to 20"),
        (("--delete", "-1"), "from 0 to 20"),
        (("--delete", "1", "--dry-run"), "exclude each other"),
        (("--account", "x", "--all"), "not allowed with"),
        (("--delete", "many"), "invalid int value"),
    ],
)
def test_bad_input_is_refused_in_a_sentence_and_nothing_is_touched(
    used: Rehearsal, arguments: tuple[str, ...], told: str
) -> None:
    before = snapshot()
    status, text = run(*arguments)
    assert told in text
    assert status in (1, 2)  # what argparse refuses is a CommandError of its own when it is called from Python
    assert (snapshot(), used.world.calls) == (before, [])


def test_an_account_that_was_never_used_is_refused_by_name(rehearsal: Rehearsal) -> None:
    status, told = run("--account", rehearsal.account.name)
    assert (status, "never used" in told) == (2, True)
    assert run()[0] == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("call", ["list", "inspect"])
def test_ctrl_c_ends_it_at_once_and_leaves_what_was_done(used: Rehearsal, number: Any, call: str) -> None:
    marked(used)
    run()
    passes(PAST_GRACE)
    before = signal.getsignal(number)

    def interrupt(_: str) -> None:
        os.kill(os.getpid(), number)

    used.world.hooks[call] = interrupt
    status, _ = run("--delete", 1)
    assert (status, signal.getsignal(number)) == (130, before)
    assert Lease.objects.count() == 0
    assert InventoryFinding.objects.get().is_open


# On `local`: real processes


class Local:
    """An account of `local`, with sandboxes made past our books."""

    def __init__(self, directory: Path) -> None:
        endpoint = {"state_dir": str(directory / "state")}
        self.account = factories.account(endpoint=endpoint, attested_identity="")
        self.tag = f"tag-{uuid4().hex}"
        self.environment: Environment = factories.environment(
            self.account, config={"command": ["sh", "-c", f": {self.tag}; sleep 1000"]}
        )
        self.provider: AnyProvider = open_provider("local", endpoint)

    def acquire(self) -> Lease:
        return leases.acquire(self.environment.pk, company_id=self.account.company_id, ends_in=600)

    def put(self, marks: Mapping[str, str]) -> tuple[str, str]:
        """Make a sandbox that no row of ours names; returns its id and what its process is found by."""
        tag = f"tag-{uuid4().hex}"
        config = LocalConfig(command=["sh", "-c", f": {tag}; sleep 1000"])
        name = name_of(UUID(marks.get(MARK_OPERATION, str(uuid4()))))
        created = self.provider.create(name, marks, config, within=WITHIN)
        return created.resource.resource_id, tag

    def ours(self) -> dict[str, str]:
        return {
            MARK_INSTALLATION: str(Installation.current().mark),
            MARK_OPERATION: str(uuid4()),
            "paperclip-env.company": str(self.account.company_id),
        }


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Local]:
    place = Local(tmp_path)
    yield place
    for left in place.provider.list({}, within=WITHIN).resources:
        place.provider.delete(left.resource_id, within=WITHIN)


def test_real_leaks_are_found_and_destroyed_and_nothing_else_is(local: Local) -> None:
    """A lease that was given up, and a sandbox that the books of yesterday do not know, beside all that is not ours."""
    in_use, given_up = local.acquire(), local.acquire()
    leases.release(given_up.pk)
    debt = owed(given_up)
    deciding.settle_unverified(
        debt.pk, confirmation=given_up.resource_id, company_id=debt.company_id, actor="olga", reason="looked dead"
    )
    lost, lost_tag = local.put(local.ours())
    foreign, foreign_tag = local.put(local.ours() | {MARK_INSTALLATION: str(uuid4())})
    unmarked, unmarked_tag = local.put({})
    stopped, _ = local.put(local.ours())
    local.provider.stop(stopped, grace=1.0, within=WITHIN)
    passes(3600)

    assert run()[0] == 0
    passes(PAST_GRACE)
    status, told = read()
    assert (status, counts(told)) == (1, {"alive": 1, "settled": 1, "unknown": 2, "foreign": 1, "unmarked": 1})
    passes(1)
    status, told = read("--delete", 2)
    assert (status, len(told["destroyed"]), told["leaks"]) == (1, 2, 1)
    passes(1)
    assert read("--delete", 2)[0] == 0
    assert len(pids_of(lost_tag)) > 0  # until it is paid

    sweep(local)  # type: ignore[arg-type] - it asks for no more than an account
    left = {one.resource_id for one in local.provider.list({}, within=WITHIN).resources}
    assert left == {in_use.resource_id, foreign, unmarked}
    assert pids_of(lost_tag) == []
    assert pids_of(foreign_tag) and pids_of(unmarked_tag) and pids_of(local.tag)
    assert (state(in_use), state(given_up)) == ("active", "failed" if given_up.outcome == "failed" else "expired")
    assert evidence(given_up) == ["destroyed"]
    assert Lease.objects.get(resource_id=lost).state == "failed"
    passes(1)
    status, told = read()
    assert (status, counts(told)) == (0, {"alive": 1, "foreign": 1, "unmarked": 1})


def test_two_processes_at_once_own_each_leak_once(local: Local, tmp_path: Path) -> None:
    local.acquire()
    made = {local.put(local.ours())[0] for _ in range(3)}
    passes(3600)
    run()
    passes(PAST_GRACE)
    processes = [
        subprocess.Popen(
            [sys.executable, "manage.py", "inventory", "--delete", "20", "--json"],
            cwd=CHECKOUT,
            env={**os.environ, "DATABASE_URL": database_url()},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for _ in range(2)
    ]
    try:
        answers = [(*process.communicate(timeout=60), process.returncode) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait(BOUND)
    told = [json.loads(out) for out, _, _ in answers]
    owned = [one["resource_id"] for each in told for one in each["destroyed"]]
    assert (sorted(owned), len(owned)) == (sorted(made), 3), [err for _, err, _ in answers]
    assert Obligation.objects.filter(kind=Obligation.Kind.TEARDOWN).count() == 3
    sweep(local)  # type: ignore[arg-type]
    assert len(local.provider.list({}, within=WITHIN).resources) == 1


def test_a_worker_takes_inventory_and_pays_for_it(local: Local, tmp_path: Path) -> None:
    """The task as the periodic one sends it: by a message, to a worker process, which then pays the teardown."""
    in_use = local.acquire()
    lost, tag = local.put(local.ours())
    passes(3600)
    run()
    passes(PAST_GRACE)
    queue = Queue()
    try:
        with workers(tmp_path) as start:
            start().is_ready()
            tasks.inventory.apply_async(kwargs={"delete": 3})
            eventually(lambda: Lease.objects.filter(resource_id=lost).exists(), "the leak has an owner")
            tasks.sweep.delay(str(local.account.pk))
            eventually(lambda: Receipt.objects.filter(resource_id=lost).exists(), "the leak is proven destroyed")
    finally:
        queue.close()
    assert pids_of(tag) == []
    assert state(in_use) == "active"


# At Daytona


def test_a_sandbox_that_the_index_left_out_for_too_long_turns_up_as_a_leak(place: Place) -> None:
    """Twice absent by the service's word, and there all the same: the proof was wrong, and the inventory says so."""
    lease = place.acquire()
    gone = "Sandbox with ID or name x not found"
    place.server.will(
        Fault("get", Kind.ANSWER, status=404, message=gone, times=50), Fault("list", Kind.LEFT_OUT, times=50)
    )
    leases.release(lease.pk)
    _settles(place, lease)
    assert evidence(lease) == ["absent"]
    place.server.world.script.clear()
    place.clock.now += 600
    passes(3600)
    run()
    passes(PAST_GRACE)
    status, told = read("--delete", 1)
    assert (status, [one["lease"] for one in told["destroyed"]]) == (0, [str(lease.pk)])
    assert state(lease) == "pending_cleanup"
    _settles(place, lease)
    assert evidence(lease) == ["absent", "absent"]
    assert set(place.states().values()) == {"destroyed"}


def test_sandboxes_of_every_state_and_page_are_listed(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """K-19: a list that leaves out what is stopped, archived or broken would call it missing, or never find it."""
    monkeypatch.setattr("providers.daytona.provider._PAGE", 2)
    held = [place.acquire(factories.run(place.company)) for _ in range(5)]
    for lease, word in zip(held, ("started", "stopped", "archived", "error", "paused"), strict=True):
        place.server.world.set_state(lease.resource_id, word)
    passes(3600)
    status, told = read()
    assert (status, counts(told)) == (0, {"alive": 5})


def test_a_list_that_breaks_at_its_second_page_changes_nothing(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = place.acquire()
    place.acquire(factories.run(place.company))
    passes(3600)
    run()
    monkeypatch.setattr("providers.daytona.provider._PAGE", 1)
    search = place.server.world.search

    def breaks(organization: str, query: Mapping[str, str], *rest: Any) -> Any:
        return search(organization, {**query, "cursor": "no such page"} if "cursor" in query else query, *rest)

    monkeypatch.setattr(place.server.world, "search", breaks)
    before = snapshot()
    status, told = read("--delete", 20)
    assert (status, told["accounts"][0]["outcome"]) == (1, "failed")
    after = snapshot()
    assert {table for table in after if after[table] != before[table]} == {"leases_inventorylisting"}
    assert state(lease) == "active"


def test_another_organisation_behind_the_key_changes_nothing(place: Place) -> None:
    place.acquire()
    passes(3600)
    place.server.will(Fault("*", Kind.OTHER_ACCOUNT, times=50))
    status, told = read("--delete", 20)
    assert (status, told["accounts"][0]["outcome"]) == (1, "failed")
    assert InventoryFinding.objects.count() == 0


def _settles(place: Place, lease: Lease) -> None:
    for _ in range(8):
        place.sweep()
        if state(lease) != "pending_cleanup":
            return
        place.clock.now += 130
        row = owed(lease)
        Obligation.objects.filter(pk=row.pk, absent_since__isnull=False).update(absent_since=factories.at(-130))
        Obligation.objects.filter(pk=row.pk).update(due_at=factories.at(-1))
    raise AssertionError(f"not settled: {owed(lease).last_error_kind}, {place.states()}")
