"""The pages on which an operator decides: what they refuse, what they show, and that a second click changes nothing."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.http import HttpResponse
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

import leases
from leases.admin.decisions import DECISIONS, Adopt, Decision, Recheck, SettleUnverified
from leases.errors import AcquireUncertain
from leases.models import ActivityEntry, InventoryFinding, Lease, Obligation, Operation, Run
from providers.contract import ErrorKind
from tests import factories
from tests.concurrency import together
from tests.scenarios.steps import acquired, audited, fails, owed, snapshot, state, sweep
from tests.stage import Rehearsal

SCRIPT = "<script>alert(1)</script>"


def _page(row: Any) -> str:
    return reverse(f"admin:leases_{type(row).__name__.lower()}_change", args=[row.pk])


@pytest.fixture
def olga(transactional_db: None, client: Client) -> Client:
    """A superuser's browser."""
    client.force_login(User.objects.create_superuser("olga"))
    return client


def _browser(*permissions: str) -> Client:
    user = User.objects.create_user(f"user-{uuid4().hex[:8]}", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    browser = Client()
    browser.force_login(user)
    return browser


def _text(response: HttpResponse) -> str:
    return response.content.decode()


def _lost(rehearsal: Rehearsal) -> tuple[Operation, str]:
    """A creation that a person must look for, and the id of the sandbox that exists all the same."""
    rehearsal.world.after["create"] = fails(ErrorKind.TIMEOUT)
    with pytest.raises(AcquireUncertain):
        acquired(rehearsal)
    del rehearsal.world.after["create"]
    operation = Operation.objects.get()
    _quieted(operation)
    (resource_id,) = rehearsal.world.boxes
    return operation, resource_id


def _quieted(operation: Operation) -> Obligation:
    Obligation.objects.filter(operation=operation).update(due_at=None, quiet=Obligation.Quiet.NO_LOOKUP)
    return owed(operation)


def _given(decision: type[Decision]) -> tuple[Any, dict[str, str]]:
    """A row that this decision can be made about, and what is posted to make it."""
    operation = factories.operation(looks=7)
    row = _quieted(operation)
    match decision.key:
        case "adopt":
            return operation, {"resource_id": "box", "reason": "found it"}
        case "recheck":
            return row, {"reason": "look again"}
        case _:
            return row, {"confirmation": operation.name, "reason": "it is no more"}


# Who may


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("decision", DECISIONS, ids=lambda decision: decision.key)
def test_a_decision_needs_its_own_permission_to_be_seen_and_to_be_made(decision: type[Decision]) -> None:
    row, data = _given(decision)
    looking = ("view_obligation", "view_operation", "view_lease")
    others = [d.permission.partition(".")[2] for d in DECISIONS if d.permission != decision.permission]
    without, allowed = _browser(*looking, *others), _browser(*looking, decision.permission.partition(".")[2])
    address = decision.address(row.pk)
    before = snapshot()
    assert address not in _text(without.get(_page(row)))
    assert without.get(address).status_code == 403
    assert without.post(address, data).status_code == 403
    assert Client().get(address)["Location"].startswith("/admin/login/")
    assert snapshot() == before
    assert address in _text(allowed.get(_page(row)))
    assert allowed.get(address).status_code == 200
    assert snapshot() == before


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("decision", DECISIONS, ids=lambda decision: decision.key)
def test_a_forged_post_decides_nothing(decision: type[Decision]) -> None:
    row, data = _given(decision)
    browser = Client(enforce_csrf_checks=True)
    browser.force_login(User.objects.create_superuser("olga"))
    before = snapshot()
    assert browser.post(decision.address(row.pk), data).status_code == 403
    assert snapshot() == before


@pytest.mark.parametrize("decision", DECISIONS, ids=lambda decision: decision.key)
@pytest.mark.parametrize("reason", ["", "   \n ", "x" * 501])
def test_a_decision_without_a_proper_reason_is_asked_again(olga: Client, decision: type[Decision], reason: str) -> None:
    row, data = _given(decision)
    before = snapshot()
    answer = olga.post(decision.address(row.pk), data | {"reason": reason})
    assert answer.status_code == 200
    assert answer.context["form"].errors["reason"]
    assert snapshot() == before


@pytest.mark.parametrize("decision", DECISIONS, ids=lambda decision: decision.key)
def test_what_does_not_exist_has_no_page(olga: Client, decision: type[Decision]) -> None:
    nobody = uuid4() if decision.model is Operation else 999_999
    assert olga.get(decision.address(nobody)).status_code == 404


@pytest.mark.parametrize("decision", DECISIONS, ids=lambda decision: decision.key)
def test_a_page_shows_the_facts_and_escapes_them(olga: Client, decision: type[Decision]) -> None:
    row, _ = _given(decision)
    operation = row if isinstance(row, Operation) else row.operation
    Operation.objects.filter(pk=operation.pk).update(marks={"paperclip-env.operation": SCRIPT})
    tried = owed(operation)
    tried.attempts.create(
        company_id=tried.company_id, worker="w", finished_at=factories.at(1), outcome="failed", error_excerpt=SCRIPT
    )
    page = _text(olga.get(decision.address(row.pk)))
    for fact in (operation.name, "7 times", "may appear until", operation.account_identity, "find the sandbox by hand"):
        assert fact.replace("'", "&#x27;") in page
    assert SCRIPT not in page
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;") == 2


# Each of them


def test_a_sandbox_is_adopted_from_the_operations_page(olga: Client, rehearsal: Rehearsal) -> None:
    operation, resource_id = _lost(rehearsal)
    data = {"resource_id": f" {resource_id} ", "reason": "  found it by hand "}
    answer = olga.post(Adopt.address(operation.pk), data, follow=True)
    lease = Lease.objects.get()
    assert answer.redirect_chain == [(_page(lease), 302)]
    assert "owes its teardown" in _text(answer)
    entry = ActivityEntry.objects.get(action="operation.adopted")
    assert (entry.actor, entry.reason) == ("olga", "found it by hand")
    assert sweep(rehearsal) == {"proven": 1}


def test_a_refusal_is_a_sentence_on_the_page_and_keeps_what_was_typed(olga: Client, rehearsal: Rehearsal) -> None:
    operation, _ = _lost(rehearsal)
    before = snapshot()
    answer = olga.post(Adopt.address(operation.pk), {"resource_id": "not-it", "reason": "a guess"})
    page = _text(answer)
    assert answer.status_code == 200
    assert "The provider has no such sandbox" in page
    assert 'value="not-it"' in page
    assert "a guess" in page
    assert snapshot() == before


def test_two_clicks_adopt_once(olga: Client, rehearsal: Rehearsal) -> None:
    operation, resource_id = _lost(rehearsal)
    data = {"resource_id": resource_id, "reason": "found it"}

    def click() -> int:
        browser = Client()
        browser.force_login(User.objects.get(username="olga"))
        return browser.post(Adopt.address(operation.pk), data).status_code

    assert sorted(together(click, click)) == [200, 302]
    assert Lease.objects.count() == 1
    assert audited("operation.adopted", operation) == 1
    assert "owns its sandbox already" in _text(olga.post(Adopt.address(operation.pk), data))


def test_a_quiet_row_is_looked_at_again(olga: Client) -> None:
    row, data = _given(Recheck)
    answer = olga.post(Recheck.address(row.pk), data, follow=True)
    assert answer.redirect_chain == [(_page(row), 302)]
    row.refresh_from_db()
    assert (row.quiet, row.requests) == ("", 1)
    assert ActivityEntry.objects.get(action="obligation.retry_requested").reason == "look again"


@pytest.mark.parametrize("typed", ["yes", "PE", "{0} {0}"])
def test_only_the_exact_name_settles(olga: Client, typed: str) -> None:
    row, data = _given(SettleUnverified)
    before = snapshot()
    answer = olga.post(SettleUnverified.address(row.pk), data | {"confirmation": typed.format(row.operation.name)})
    assert "not the exact name" in _text(answer)
    assert snapshot() == before


def test_a_debt_is_settled_once_and_stays_on_every_page(olga: Client) -> None:
    row = factories.teardown(escalated_at=factories.at(-60), failures=9)
    data = {"confirmation": row.lease.resource_id, "reason": "the rack was scrapped"}
    assert f'type exactly <b class="pe-typed">{row.lease.resource_id}</b>' in _text(
        olga.get(SettleUnverified.address(row.pk))
    )
    first = olga.post(SettleUnverified.address(row.pk), data, follow=True)
    assert "the debt stays visible" in _text(first)
    second = olga.post(SettleUnverified.address(row.pk), data, follow=True)
    assert second.redirect_chain == [(_page(row), 302)]
    assert "is not owed any more" in _text(second)
    assert audited("lease.teardown.unverified", row.lease) == 1
    assert state(row.lease) == "failed"
    for page in (_page(row), _page(row.lease)):
        assert "Nothing proves that the sandbox ended" in _text(olga.get(page))
    listed = reverse("admin:leases_obligation_changelist") + "?situation=unverified"
    assert [found.pk for found in olga.get(listed).context["cl"].result_list] == [row.pk]
    leases = reverse("admin:leases_lease_changelist") + "?owes=unverified"
    assert [found.pk for found in olga.get(leases).context["cl"].result_list] == [row.lease_id]
    factories.receipt(row.lease)
    assert "the debt is paid" in _text(olga.get(_page(row.lease)))
    assert not olga.get(listed).context["cl"].result_list


def test_a_row_that_an_attempt_holds_says_until_when(olga: Client) -> None:
    row = factories.claimed(factories.teardown(escalated_at=factories.at(-60)))
    answer = olga.get(SettleUnverified.address(row.pk), follow=True)
    assert answer.redirect_chain == [(_page(row), 302)]
    assert f"protected until {row.due_at:%Y-%m-%d %H:%M:%S} UTC" in _text(answer)


def test_what_is_merely_late_is_not_offered_to_be_given_up(olga: Client) -> None:
    late, ended = factories.teardown(failures=2), factories.teardown(escalated_at=factories.at(-60))
    probe = factories.probe(escalated_at=factories.at(-60))
    offered = [SettleUnverified.address(row.pk) in _text(olga.get(_page(row))) for row in (late, ended, probe)]
    assert offered == [False, True, False]


def test_a_creation_that_was_given_up_still_offers_to_adopt(olga: Client, rehearsal: Rehearsal) -> None:
    operation, resource_id = _lost(rehearsal)
    row = owed(operation)
    olga.post(SettleUnverified.address(row.pk), {"confirmation": operation.name, "reason": "not to be found"})
    page = _text(olga.get(_page(operation)))
    assert "Whether a sandbox exists is not known" in page
    assert Adopt.address(operation.pk) in page
    assert Recheck.address(row.pk) not in page
    olga.post(Adopt.address(operation.pk), {"resource_id": resource_id, "reason": "there it is"})
    assert Adopt.address(operation.pk) not in _text(olga.get(_page(operation)))


# What the pages show beside


def test_what_waits_for_other_rows_is_not_among_what_needs_a_person(olga: Client) -> None:
    startup = factories.startup()
    factories.operation()
    quiet = _quieted(factories.operation())
    listed = reverse("admin:leases_obligation_changelist")
    assert [row.pk for row in olga.get(listed, {"situation": "quiet"}).context["cl"].result_list] == [quiet.pk]
    assert startup.pk in [row.pk for row in olga.get(listed, {"situation": "cooling"}).context["cl"].result_list]
    page = _text(olga.get(_page(startup)))
    assert "nothing is to decide" in page
    assert "Retry now" in page


def test_a_run_shows_what_its_startup_left_behind(olga: Client) -> None:
    startup = factories.startup()
    assert "see what a startup of a run left behind" in _text(olga.get(_page(startup.run)))
    assert "What is owed" not in _text(olga.get(_page(factories.run())))
    (run,) = [
        row
        for row in olga.get(reverse("admin:leases_run_changelist")).context["cl"].result_list
        if row.pk == startup.run_id
    ]
    assert [owed.pk for owed in run.open_obligations] == [startup.pk]


def test_an_operation_shows_its_kind_source_and_request(olga: Client) -> None:
    start = factories.start(request_key="attempt 17")
    for page in (_page(start), reverse("admin:leases_operation_changelist")):
        text = _text(olga.get(page))
        assert "attempt 17" in text
        assert str(start.source_id)[:13] in text


def test_a_lease_shows_who_had_its_sandbox_before_and_after(olga: Client) -> None:
    before = factories.stopped(factories.lease(run=None))
    after = factories.lease(before.environment, resource_id=before.resource_id, epoch=2, ends_at=factories.at(3600))
    Lease.objects.filter(pk=before.pk).update(state="expired", successor=after)
    assert _page(after) in _text(olga.get(_page(before)))
    assert _page(before) in _text(olga.get(_page(after)))
    assert "the lease ends by itself" in _text(olga.get(_page(after))).lower()


def test_a_lease_says_whether_its_sandbox_may_run(olga: Client) -> None:
    lease = factories.lease()
    assert "assume yes" in _text(olga.get(_page(lease)))
    factories.stopped(lease)
    assert "no: stopped, killed, proven for epoch 1" in _text(olga.get(_page(lease)))
    start = factories.start(lease)
    assert "it is being started" in _text(olga.get(_page(lease)))
    row = start.obligations.get()
    Obligation.objects.filter(pk=row.pk).update(escalated_at=factories.at(0))
    olga.post(SettleUnverified.address(row.pk), {"confirmation": lease.resource_id, "reason": "the engine is gone"})
    assert "a start of it was given up" in _text(olga.get(_page(lease)))


def test_a_page_costs_as_many_statements_for_many_rows_as_for_one(olga: Client) -> None:
    owner = factories.run()
    environment = factories.environment(factories.account(owner.company))

    def statements(row: Any) -> int:
        with CaptureQueriesContext(connection) as captured:
            assert olga.get(_page(row)).status_code == 200
        return len(captured)

    lease = factories.stopped(factories.lease(environment, run=owner))

    def more() -> None:
        start = factories.start(lease, run_uuid=owner.pk)
        olga.post(
            SettleUnverified.address(start.obligations.get().pk),
            {"confirmation": lease.resource_id, "reason": "the engine is gone"},
        )

    more()
    statements(lease)  # content types are cached from here on
    one = statements(lease)
    for _ in range(5):
        more()
    assert Obligation.objects.filter(operation__source=lease, closed_as="unverified").count() == 6
    assert statements(lease) == one
    assert Run.objects.count() == 1


# What an inventory found


def _leak() -> InventoryFinding:
    lease = factories.lease()
    return factories.finding(lease, confirmed_at=factories.at(0), resource_id=SCRIPT)


def _destroy(row: InventoryFinding) -> str:
    return reverse("admin:leases_inventoryfinding_destroy", args=[row.pk])


def test_destroying_a_leak_has_a_permission_of_its_own(transactional_db: None) -> None:
    row = _leak()
    assert _browser("view_inventoryfinding", "change_obligation").get(_destroy(row)).status_code == 403
    assert _browser("destroy_leak", "view_inventoryfinding").get(_destroy(row)).status_code == 200


def test_a_leak_is_shown_with_what_is_known_and_nothing_happens_without_a_reason(olga: Client) -> None:
    row = _leak()
    assert _destroy(row) in _text(olga.get(_page(row)))
    before = snapshot()
    for response in (olga.get(_destroy(row)), olga.post(_destroy(row), {"reason": ""})):
        assert response.status_code == 200
        assert "&lt;script&gt;" in _text(response)
        assert SCRIPT not in _text(response)
    assert snapshot() == before


def test_a_finding_that_does_not_count_yet_is_offered_to_nobody(olga: Client) -> None:
    row = factories.finding()
    assert _destroy(row) not in _text(olga.get(_page(row)))
    response = olga.post(_destroy(row), {"reason": "hurry"}, follow=True)
    assert "Not confirmed yet" in _text(response)
    assert olga.get(reverse("admin:leases_inventoryfinding_destroy", args=[10**9])).status_code == 404


def test_a_leak_is_adopted_and_destroyed_and_a_second_click_is_told(olga: Client, rehearsal: Rehearsal) -> None:
    lease = leases.release(acquired(rehearsal).pk)
    box = rehearsal.world.of(lease.resource_id)
    sweep(rehearsal)
    rehearsal.world.boxes[lease.resource_id] = box
    Operation.objects.update(created_at=factories.at(-3600))
    marks = {name: value for name, value in box.resource.marks.items() if name.startswith("paperclip-env.")}
    row = factories.finding(lease, confirmed_at=factories.at(0), marks=marks)
    response = olga.post(_destroy(row), {"reason": "found by the inventory"}, follow=True)
    assert "owes its teardown" in _text(response)
    row.refresh_from_db()
    assert (state(lease), row.obligation) == ("pending_cleanup", owed(lease))
    assert ActivityEntry.objects.get(action="inventory.owned").actor == "olga"
    assert "owns it already" in _text(olga.post(_destroy(row), {"reason": "again"}, follow=True))
    sweep(rehearsal)
    assert lease.resource_id not in rehearsal.world.boxes
