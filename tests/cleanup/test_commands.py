"""`manage.py sweep` and `manage.py owed`, as an operator without any worker uses them."""

from __future__ import annotations

import json
import os
import signal
from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connection, transaction

import leases
from leases import transitions
from leases.models import Attempt, Lease, Obligation, Operation
from providers.contract import ErrorKind
from tests import factories
from tests.concurrency import elsewhere
from tests.scenarios.steps import (
    acquired,
    attempts,
    evidence,
    fails,
    falls_due,
    is_due,
    owed,
    owed_for,
    released,
    snapshot,
    state,
    sweep,
)
from tests.stage import Rehearsal


def _run(command: str, *arguments: str) -> tuple[int, str]:
    """Return the exit status and what was printed."""
    out = StringIO()
    try:
        call_command(command, *arguments, stdout=out)
    except SystemExit as ended:
        return int(ended.code or 0), out.getvalue()
    return 0, out.getvalue()


def _json(command: str, *arguments: str) -> tuple[int, Any]:
    status, text = _run(command, *arguments, "--json")
    return status, json.loads(text)


# sweep


def test_it_pays_what_is_due_in_this_process(rehearsal: Rehearsal) -> None:
    made = [released(rehearsal) for _ in range(2)]
    later = released(rehearsal)
    Obligation.objects.filter(pk=owed(later).pk).update(due_at=factories.at(600))
    assert _run("sweep") == (0, "2 due, 2 claimed: 2 proven; 0 still due.\n")
    assert [state(lease) for lease in made] == ["expired", "expired"]
    assert state(later) == "pending_cleanup"


def test_it_says_so_when_nothing_is_due(rehearsal: Rehearsal) -> None:
    acquired(rehearsal)
    assert _run("sweep") == (0, "0 due, 0 claimed: nothing to do; 0 still due.\n")


def test_it_prints_one_json_object(rehearsal: Rehearsal) -> None:
    released(rehearsal)
    assert _json("sweep") == (0, {"due": 1, "claimed": 1, "outcomes": {"proven": 1}, "still_due": 0})


def test_it_pays_over_all_accounts(rehearsal: Rehearsal) -> None:
    other = Rehearsal()
    released(rehearsal)
    released(other)
    assert _json("sweep")[1]["outcomes"] == {"proven": 2}


@pytest.mark.parametrize("how", [(), ("--json",)])
def test_a_dry_run_asks_nobody_and_changes_nothing(rehearsal: Rehearsal, how: str) -> None:
    lease = released(rehearsal)
    factories.operation(rehearsal.environment, due_in=-5)
    factories.probe(rehearsal.account, due_in=-5)
    rehearsal.world.calls.clear()
    before = snapshot()
    status, text = _run("sweep", "--dry-run", *how)
    assert snapshot() == before
    assert rehearsal.world.calls == []
    assert status == 0
    assert str(lease.pk) in text
    if how:
        shown = json.loads(text)
        assert (shown["dry_run"], shown["due"]) == (True, 3)
        assert {row["kind"] for row in shown["rows"]} == {"teardown", "recover_creation", "probe_account"}
    else:
        assert text.endswith("3 due; nothing was asked or changed.\n")


def _refused(rehearsal: Rehearsal) -> None:
    rehearsal.world.hooks["inspect"] = fails(ErrorKind.REFUSED)


def _busy(rehearsal: Rehearsal) -> None:
    for box in rehearsal.world.boxes.values():
        box.state = "busy"


def _throttled(rehearsal: Rehearsal) -> None:
    rehearsal.world.hooks["inspect"] = fails(ErrorKind.RATE_LIMITED, retry_after=60.0)


def _quieted(rehearsal: Rehearsal) -> None:
    Lease.objects.update(endpoint={})


def _not_ready(rehearsal: Rehearsal) -> None:
    Lease.objects.update(credential_reference="env:A_SECRET_NOT_SET_HERE")


def _blocked(rehearsal: Rehearsal) -> None:
    rehearsal.account.blocked_until = factories.at(60)
    rehearsal.account.save()


def _broken(rehearsal: Rehearsal) -> None:
    rehearsal.account.circuit = "open"
    rehearsal.account.save()


@pytest.mark.parametrize(
    "fault",
    [_refused, _busy, _throttled, _quieted, _not_ready, _blocked, _broken],
    ids=lambda fault: fault.__name__.strip("_"),
)
def test_it_exits_with_1_when_something_due_stayed_unpaid(rehearsal: Rehearsal, fault: Any) -> None:
    lease = released(rehearsal)
    fault(rehearsal)
    status, text = _run("sweep")
    assert status == 1
    assert text.startswith("1 due, ")
    assert state(lease) == Lease.State.PENDING_CLEANUP


def test_it_exits_with_1_for_a_creation_that_is_not_seen_yet(rehearsal: Rehearsal) -> None:
    factories.operation(
        rehearsal.environment, due_in=-5, account_identity=rehearsal.world.identity, endpoint=rehearsal.account.endpoint
    )
    assert _json("sweep") == (1, {"due": 1, "claimed": 1, "outcomes": {"not_seen": 1}, "still_due": 0})


def test_it_pays_what_its_own_work_brought_forth(rehearsal: Rehearsal) -> None:
    """A recovery that already knows the sandbox's id asks nobody, and owes a teardown that is due at once.

    With its receipt the startup of the run is over too.
    """
    rehearsal.world.after["create"] = fails(ErrorKind.CONNECTION)
    with pytest.raises(leases.errors.AcquireUncertain):
        acquired(rehearsal)
    (resource_id,) = rehearsal.world.boxes
    Operation.objects.update(resource_id=resource_id)
    status, told = _json("sweep")
    assert rehearsal.world.boxes == {}
    told["outcomes"].pop("waiting", None)  # the startup, where it was looked at before the teardown was through
    assert (status, told["outcomes"], told["still_due"]) == (0, {"proven": 3}, 0)


@pytest.mark.parametrize("option", ["kind", "company", "lease"])
def test_it_works_on_what_was_asked_for_and_on_nothing_else(rehearsal: Rehearsal, option: str) -> None:
    other = Rehearsal()
    lease = released(rehearsal)
    probe = factories.probe(rehearsal.account, due_in=-5)
    stranger = released(other)
    chosen = {
        "kind": ("--kind", "probe_account"),
        "company": ("--company", str(other.company.pk)),
        "lease": ("--lease", str(lease.pk)),
    }[option]
    status, told = _json("sweep", *chosen)
    assert (status, told["due"], told["claimed"], told["outcomes"]) == (0, 1, 1, {"proven": 1})
    paid = {"kind": probe, "company": owed(stranger), "lease": owed(lease)}[option]
    assert set(Attempt.objects.values_list("obligation_id", flat=True)) == {paid.pk}


def test_it_works_on_one_providers_accounts(rehearsal: Rehearsal) -> None:
    released(rehearsal)
    other = factories.teardown()
    assert other.account.provider == "local"
    assert _json("sweep", "--provider", "rehearsal") == (
        0,
        {"due": 1, "claimed": 1, "outcomes": {"proven": 1}, "still_due": 0},
    )
    assert attempts(other) == []


def test_a_kind_may_be_given_again(rehearsal: Rehearsal) -> None:
    released(rehearsal)
    factories.probe(rehearsal.account, due_in=-5)
    assert _json("sweep", "--kind", "teardown", "--kind", "probe_account")[1]["outcomes"] == {"proven": 2}


def test_a_limit_is_kept_over_all_accounts_and_the_rest_is_still_owed(rehearsal: Rehearsal) -> None:
    other = Rehearsal()
    for where in (rehearsal, rehearsal, other, other):
        released(where)
    assert _json("sweep", "--limit", "3") == (
        1,
        {"due": 4, "claimed": 3, "outcomes": {"proven": 3}, "still_due": 1},
    )


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--kind", "tear_down"), "--kind: 'tear_down' is none of teardown, recover_creation, "),
        (("--provider", "dayotna"), "--provider: 'dayotna' is none of "),
        (("--company", "00000000-0000-4000-8000-000000000000"), "--company: there is no company"),
        (("--lease", "00000000-0000-4000-8000-000000000000"), "--lease: there is no lease"),
        (("--limit", "0"), "--limit: must be at least 1"),
        (("--limit", "many"), "--limit: invalid int value: 'many'"),
        (("--company", "acme"), "--company: "),
        (("--lease", "1"), "--lease: "),
        (("--shout",), "unrecognized arguments: --shout"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input_is_refused_in_a_sentence_and_nothing_is_touched(
    rehearsal: Rehearsal, arguments: Any, told: str
) -> None:
    released(rehearsal)
    before = snapshot()
    with pytest.raises(CommandError) as refused:
        call_command("sweep", *arguments)
    assert told in str(refused.value)
    assert snapshot() == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_hands_back_what_was_not_sent_and_ends(rehearsal: Rehearsal, number: Any) -> None:
    lease = released(rehearsal)
    before = signal.getsignal(number)

    def interrupt(_: str) -> None:
        os.kill(os.getpid(), number)

    rehearsal.world.hooks["inspect"] = interrupt
    status, _ = _run("sweep")
    assert status == 130
    assert signal.getsignal(number) is before
    assert rehearsal.world.count("delete") == 0
    assert attempts(owed(lease)) == ["handed_back"]
    assert is_due(owed(lease))
    del rehearsal.world.hooks["inspect"]
    assert _run("sweep")[0] == 0
    assert evidence(lease) == ["destroyed"]


# owed


def test_owed_changes_nothing(rehearsal: Rehearsal) -> None:
    released(rehearsal)
    factories.operation(rehearsal.environment, due_in=-5)
    rehearsal.world.calls.clear()
    before = snapshot()
    assert _run("owed")[0] == 0
    assert _run("owed", "--json")[0] == 0
    assert snapshot() == before
    assert rehearsal.world.calls == []


def test_owed_could_not_change_anything(rehearsal: Rehearsal) -> None:
    modes = []

    def ask(execute: Any, query: Any, params: Any, many: Any, context: Any) -> Any:
        if "leases_obligation" in str(query):
            context["cursor"].execute("SHOW transaction_read_only")
            modes.append(context["cursor"].fetchone()[0])
        return execute(query, params, many, context)

    with connection.execute_wrapper(ask):
        _run("owed")
    assert modes
    assert set(modes) == {"on"}


def test_owed_tells_of_one_moment(rehearsal: Rehearsal) -> None:
    """What commits between its statements is in none of them."""
    released(rehearsal)
    added = []

    def meanwhile(execute: Any, query: Any, params: Any, many: Any, context: Any) -> Any:
        if "leases_obligation" in str(query):
            added.append(elsewhere(lambda: factories.teardown(due_at=None, quiet="foreign_marks")))
        return execute(query, params, many, context)

    with connection.execute_wrapper(meanwhile):
        _, told = _json("owed")
    assert len(added) >= 2
    teardowns = told["kinds"][0]
    assert (teardowns["kind"], teardowns["open"], teardowns["quiet"]) == ("teardown", 1, 0)
    assert teardowns["quiet_because"] == {}
    _, after = _json("owed")
    assert after["kinds"][0]["open"] == 1 + len(added)
    assert after["kinds"][0]["quiet_because"] == {"foreign_marks": len(added)}


def test_owed_says_when_nothing_is(rehearsal: Rehearsal) -> None:
    acquired(rehearsal)
    assert _run("owed")[1].endswith("Nothing is owed.\n")
    released(rehearsal)
    assert "Nothing is owed." not in _run("owed")[1]
    sweep(rehearsal)
    assert _run("owed")[1].endswith("Nothing is owed.\n")


def test_owed_counts_every_row_where_it_stands(rehearsal: Rehearsal) -> None:
    """K-34: the depth of the queue is visible, and why it does not shrink."""
    rows = {name: factories.teardown(factories.lease(rehearsal.environment)) for name in ("due", "cooling", "held")}
    factories.claimed(rows["held"])
    Obligation.objects.filter(pk=rows["cooling"].pk).update(
        failures=2, due_at=factories.at(90), escalated_at=factories.at(0)
    )
    factories.teardown(factories.lease(rehearsal.environment), due_at=None, quiet="foreign_marks")
    owed_for(rows["due"], 7200)
    sought = factories.given_up(factories.lease(rehearsal.environment))
    forced = Obligation.objects.get(lease=sought.lease, kind="teardown")
    rehearsal.account.circuit = "open"
    rehearsal.account.save()

    _, told = _json("owed")
    assert [kind["kind"] for kind in told["kinds"]] == Obligation.Kind.values
    teardowns = told["kinds"][0]
    names = ("open", "in_flight", "cooling", "due", "escalated", "quiet", "waiting")
    counts = {name: teardowns[name] for name in names}
    assert counts == {"open": 4, "in_flight": 1, "cooling": 1, "due": 1, "escalated": 1, "quiet": 1, "waiting": 0}
    assert teardowns["quiet_because"] == {"foreign_marks": 1}
    assert told["unverified"] == 1
    (blocked,) = told["blocked_accounts"]
    assert (blocked["name"], blocked["circuit"], blocked["open"]) == (rehearsal.account.name, "open", 5)

    text = _run("owed")[1]
    line = next(line for line in text.splitlines() if line.startswith("teardown"))
    assert line.split()[1:8] == ["4", "1", "1", "1", "1", "1", "0"]
    assert line.split()[8:11] == ["2", "h", "ago"]
    assert "1 teardown need a person: the sandbox carries another installation's marks" in text
    assert f"account {rehearsal.account.name} (rehearsal) is blocked; 5 wait behind it" in text
    assert "1 ended unverified: no provider ever confirmed these" in text
    assert f"  #{forced.pk} teardown of lease {forced.lease_id}, 0 s ago" in text
    assert [debt["obligation"] for debt in told["debts"]] == [forced.pk]


def test_what_waits_for_other_rows_needs_no_person(rehearsal: Rehearsal) -> None:
    factories.startup(rehearsal.run)
    _, told = _json("owed")
    (startups,) = (kind for kind in told["kinds"] if kind["kind"] == "startup")
    assert (startups["open"], startups["quiet"], startups["waiting"]) == (1, 0, 1)
    assert startups["quiet_because"] == {}
    assert "need a person" not in _run("owed")[1]


def test_a_debt_that_was_paid_late_is_none_any_more(rehearsal: Rehearsal) -> None:
    paid, unpaid = (factories.teardown(factories.lease(rehearsal.environment)) for _ in range(2))
    for row in (paid, unpaid):
        with transaction.atomic():
            transitions.settle_unverified(row.lease, row, actor="olga", reason="the provider is no more")
    factories.receipt(paid.lease)
    _, told = _json("owed")
    assert (told["unverified"], [debt["obligation"] for debt in told["debts"]]) == (1, [unpaid.pk])


def test_what_waits_for_the_end_of_something_else_needs_nobody_and_is_counted_apart(rehearsal: Rehearsal) -> None:
    factories.teardown(factories.lease(rehearsal.environment), due_at=None, quiet="waiting")
    teardowns = _json("owed")[1]["kinds"][0]
    assert (teardowns["open"], teardowns["quiet"], teardowns["waiting"]) == (1, 0, 1)
    assert teardowns["quiet_because"] == {}
    text = _run("owed")[1]
    assert "person" not in text
    line = next(line for line in text.splitlines() if line.startswith("teardown"))
    assert line.split()[6:8] == ["0", "1"]


def test_a_deadline_that_is_to_be_moved_later_is_open_and_not_old(limited: Rehearsal) -> None:
    acquired(limited)
    extends = next(kind for kind in _json("owed")[1]["kinds"] if kind["kind"] == "extend")
    assert (extends["open"], extends["due"], extends["cooling"], extends["oldest"]) == (1, 0, 0, None)
    assert _run("sweep", "--dry-run")[1].startswith("0 due")
    falls_due(Obligation.objects.get(kind="extend"))
    lease = Lease.objects.get()
    assert f"extend of lease {lease.pk} at" in _run("sweep", "--dry-run")[1]


def test_a_row_that_fell_due_again_after_a_crash_is_due_and_not_in_flight(rehearsal: Rehearsal) -> None:
    row = factories.claimed(factories.teardown(factories.lease(rehearsal.environment)))
    falls_due(row)
    teardowns = _json("owed")[1]["kinds"][0]
    assert (teardowns["in_flight"], teardowns["due"]) == (0, 1)
