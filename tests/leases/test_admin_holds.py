"""The pages of holds and kept sandboxes: what they refuse, what they show, and what a second click changes."""

from __future__ import annotations

from datetime import timedelta
from decimal import Decimal
from typing import Any
from uuid import uuid4

import pytest
from django.contrib.auth.models import Permission, User
from django.db import connection, transaction
from django.http import HttpResponse
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from leases import holds, transitions
from leases.admin.keeping import (
    DECISIONS,
    DestroyForIssue,
    DestroyNow,
    EndHold,
    HoldIssue,
    HoldLease,
    Keeping,
    KeepUntil,
    MarkOrphaned,
)
from leases.admin.lengths import read, written
from leases.models import ActivityEntry, Environment, Hold, Issue, Lease, Obligation
from tests import factories
from tests.scenarios.steps import audited, snapshot, state

pytestmark = pytest.mark.django_db(transaction=True)

SCRIPT = "<script>alert(1)</script>"


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


def _page(row: Any) -> str:
    return reverse(f"admin:leases_{type(row).__name__.lower()}_change", args=[row.pk])


def _text(response: HttpResponse) -> str:
    return response.content.decode()


def _kept(*, days: float | None = 20, **values: Any) -> Lease:
    """A stopped sandbox, kept for so many days; None: until an operator decides."""
    where = factories.environment(factories.account(), hourly_price=Decimal(2))
    lease = factories.stopped(factories.lease(where, hourly_price=Decimal(2), **values))
    Lease.objects.filter(pk=lease.pk).update(kept_until=None if days is None else factories.at(days * 86_400))
    lease.refresh_from_db()
    return lease


def _of_issue(**values: Any) -> Lease:
    lease = _kept(**values)
    issue = factories.issue(lease.company)
    Lease.objects.filter(pk=lease.pk).update(issue=issue)
    lease.refresh_from_db()
    return lease


def _hold(lease: Lease, **values: Any) -> Hold:
    return holds.hold(
        **{
            "company_id": lease.company_id,
            "kind": "operator",
            "holder": "bob",
            "lease_id": lease.pk,
            "until": factories.at(86_400),
            "reason": "the files are needed",
            **values,
        }
    )


def _in(days: float) -> str:
    return f"{factories.at(days * 86_400):%Y-%m-%dT%H:%M}"


def _given(decision: type[Keeping]) -> tuple[Any, dict[str, str]]:
    """A row that this decision can be made about, and what is posted to make it."""
    lease = _of_issue()
    row: Any = lease
    if decision.model is Issue:
        row = lease.issue
    if decision.model is Hold:
        row = _hold(lease)
    data = {"reason": "because"}
    if decision in {HoldLease, HoldIssue, KeepUntil}:
        data["until"] = _in(3)
    if decision is DestroyNow:
        data["confirmation"] = lease.resource_id
    return row, data


# Who may


@pytest.mark.parametrize("decision", DECISIONS, ids=lambda decision: f"{decision.__name__}")
def test_a_decision_needs_its_own_permission_to_be_seen_and_to_be_made(decision: type[Keeping]) -> None:
    row, data = _given(decision)
    looking = ("view_lease", "view_issue", "view_hold")
    others = {d.permission.partition(".")[2] for d in DECISIONS if d.permission != decision.permission}
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
    assert allowed.post(address, data)["Location"] == _page(row)
    assert snapshot() != before


@pytest.mark.parametrize("decision", DECISIONS, ids=lambda decision: f"{decision.__name__}")
def test_a_forged_post_decides_nothing(decision: type[Keeping]) -> None:
    row, data = _given(decision)
    browser = Client(enforce_csrf_checks=True)
    browser.force_login(User.objects.create_superuser("olga"))
    before = snapshot()
    assert browser.post(decision.address(row.pk), data).status_code == 403
    assert snapshot() == before


@pytest.mark.parametrize("decision", DECISIONS, ids=lambda decision: f"{decision.__name__}")
def test_a_decision_without_a_reason_is_asked_again_and_what_does_not_exist_has_no_page(
    olga: Client, decision: type[Keeping]
) -> None:
    row, data = _given(decision)
    before = snapshot()
    for reason in ("", "  \n ", "x" * 501):
        answer = olga.post(decision.address(row.pk), data | {"reason": reason})
        assert answer.context["form"].errors["reason"]
    assert snapshot() == before
    assert olga.get(decision.address(uuid4())).status_code == 404


@pytest.mark.parametrize("decision", DECISIONS, ids=lambda decision: f"{decision.__name__}")
def test_the_reason_goes_into_the_log_under_the_operators_name(olga: Client, decision: type[Keeping]) -> None:
    row, data = _given(decision)
    olga.post(decision.address(row.pk), data)
    entries = ActivityEntry.objects.filter(actor="olga")
    assert "because" in set(entries.values_list("reason", flat=True))


# Holds


def test_a_hold_is_placed_from_the_leases_page_and_shown_there(olga: Client) -> None:
    lease = _kept()
    olga.post(HoldLease.address(lease.pk), {"until": _in(40), "reason": "the customer asked"})
    hold = Hold.objects.get()
    assert (hold.kind, hold.strength, hold.holder, hold.lease_id) == ("operator", "always", "olga", lease.pk)
    page = _text(olga.get(_page(lease)))
    for fact in ("an operator keeps it", "always", "olga", "the customer asked", f"{hold.until:%Y-%m-%d %H:%M} UTC"):
        assert fact in page


def test_placing_it_again_moves_its_review(olga: Client) -> None:
    lease = _kept()
    for days in (10, 2):
        olga.post(HoldLease.address(lease.pk), {"until": _in(days), "reason": "because"})
    hold = Hold.objects.get()
    assert hold.until is not None
    assert abs(hold.until - factories.at(2 * 86_400)) < timedelta(minutes=2)


@pytest.mark.parametrize("until", ["2020-01-01T00:00", "tomorrow", "", "10000-01-01T00:00"])
def test_a_review_that_is_no_moment_to_come_is_refused_at_its_field(olga: Client, until: str) -> None:
    lease = _kept()
    before = snapshot()
    for decision in (HoldLease, KeepUntil):
        answer = olga.post(decision.address(lease.pk), {"until": until, "reason": "because"})
        assert answer.context["form"].errors["until"]
    assert snapshot() == before


def test_a_hold_that_comes_too_late_is_a_sentence_on_the_page(olga: Client) -> None:
    owed = factories.teardown(delete_announced_at=factories.at(-1))
    before = snapshot()
    answer = olga.post(HoldLease.address(owed.lease_id), {"until": _in(3), "reason": "because"})
    assert answer.status_code == 200
    assert "a destroying call was announced already" in _text(answer)
    assert snapshot() == before


def test_a_hold_on_what_owes_its_destruction_stops_and_keeps_it(olga: Client) -> None:
    owed = factories.teardown()
    olga.post(HoldLease.address(owed.lease_id), {"until": _in(3), "reason": "because"})
    owed.refresh_from_db()
    assert (owed.verb, owed.held_verb) == ("stop_only", "delete")


def test_a_sandbox_that_is_gone_offers_nothing(olga: Client) -> None:
    lease = factories.teardown().lease
    with transaction.atomic():
        transitions.settle_unverified(lease, lease.obligations.get(), actor="olga", reason="gone")
    page = _text(olga.get(_page(lease)))
    assert HoldLease.address(lease.pk) not in page
    answer = olga.get(HoldLease.address(lease.pk), follow=True)
    assert "nothing to hold any more" in _text(answer)


def test_a_hold_on_an_issue_is_shown_on_the_issue_and_on_its_leases(olga: Client) -> None:
    lease = _of_issue()
    olga.post(HoldIssue.address(lease.issue_id), {"until": _in(40), "reason": "an audit"})
    for page in (_text(olga.get(_page(lease))), _text(olga.get(_page(lease.issue)))):
        assert "an operator keeps it" in page
        assert "an audit" in page
    assert lease.resource_id in _text(olga.get(_page(lease.issue)))


def test_an_ended_hold_is_history_and_ending_it_twice_says_so(olga: Client) -> None:
    lease = _kept()
    hold = _hold(lease)
    assert EndHold.address(hold.pk) in _text(olga.get(_page(hold)))
    olga.post(EndHold.address(hold.pk), {"reason": "enough"})
    hold.refresh_from_db()
    assert (hold.ended_by, audited("hold.ended", hold)) == ("olga", 1)
    answer = olga.post(EndHold.address(hold.pk), {"reason": "enough"}, follow=True)
    assert "It was ended already, by olga." in _text(answer)
    assert audited("hold.ended", hold) == 1
    assert "an operator keeps it" not in _text(olga.get(_page(lease)))
    assert str(hold.pk) not in _text(olga.get(reverse("admin:leases_hold_changelist")))
    assert str(hold.pk) in _text(olga.get(reverse("admin:leases_hold_changelist"), {"stands": "all"}))


def test_the_list_of_holds_shows_what_stands(olga: Client) -> None:
    lease = _kept()
    over = _hold(lease, holder="past")
    with connection.cursor() as cursor:
        cursor.execute("UPDATE leases_hold SET until = now() - interval '1 s' WHERE id = %s", [over.pk])
    stands = _hold(lease, holder="present", kind="export", until=None)
    shown = olga.get(reverse("admin:leases_hold_changelist")).context["cl"].result_list
    assert [hold.pk for hold in shown] == [stands.pk]
    shown = olga.get(reverse("admin:leases_hold_changelist"), {"stands": "over"}).context["cl"].result_list
    assert [hold.pk for hold in shown] == [over.pk]


# Kept sandboxes


def test_the_leases_page_says_until_when_it_is_kept_why_and_what_it_costs(olga: Client) -> None:
    lease = _kept()
    page = _text(olga.get(_page(lease)))
    for fact in (
        "Kept for its files",
        "Why it is not destroyed",
        "the time for which it is kept is not over",
        f"{lease.kept_until:%Y-%m-%d %H:%M} UTC",
        "at most 2.00",
    ):
        assert fact in page


def test_one_that_an_operator_decides_about_says_so_with_its_cost(olga: Client) -> None:
    lease = _kept(days=None)
    Obligation.objects.filter(lease=lease, kind="dispose").update(due_at=None, quiet="operator_decides")
    page = _text(olga.get(_page(lease)))
    assert "when a person decides: kept until you decide" in page
    listed = _text(olga.get(reverse("admin:leases_obligation_changelist"), {"situation": "quiet"}))
    assert "(at most 2.00 an hour, 0.00 so far)" in listed
    assert "built-in" in listed
    page = _text(olga.get(_page(Obligation.objects.get(lease=lease, kind="dispose"))))
    assert DestroyNow.address(lease.pk) in page
    assert '<div class="readonly">built-in</div>' in page


def test_the_pages_escape_what_people_wrote(olga: Client) -> None:
    lease = _of_issue()
    Issue.objects.filter(pk=lease.issue_id).update(title=SCRIPT)
    hold = _hold(lease, reason=SCRIPT, holder=SCRIPT)
    for page in (_page(lease), _page(lease.issue), _page(hold), reverse("admin:leases_hold_changelist"),
                 DestroyNow.address(lease.pk), reverse("admin:leases_lease_owners")):  # fmt: skip
        assert SCRIPT not in _text(olga.get(page))
    assert "&lt;script&gt;" in _text(olga.get(_page(lease)))


def test_a_sandbox_is_kept_until_an_operator_says(olga: Client) -> None:
    lease = _kept(days=1)
    olga.post(KeepUntil.address(lease.pk), {"until": _in(90), "reason": "because"})
    lease.refresh_from_db()
    assert lease.kept_until is not None
    assert abs(lease.kept_until - factories.at(90 * 86_400)) < timedelta(minutes=2)


def test_destroying_asks_for_its_id_and_owes_the_destruction(olga: Client) -> None:
    lease = _kept()
    before = snapshot()
    answer = olga.post(DestroyNow.address(lease.pk), {"confirmation": "another", "reason": "because"})
    assert "not its exact id" in str(answer.context["form"].errors["confirmation"])
    assert snapshot() == before
    olga.post(DestroyNow.address(lease.pk), {"confirmation": lease.resource_id, "reason": "because"})
    assert state(lease) == "pending_cleanup"
    assert lease.obligations.get(kind="teardown", closed_at=None).verb == "delete"
    again = olga.post(
        DestroyNow.address(lease.pk), {"confirmation": lease.resource_id, "reason": "because"}, follow=True
    )
    assert "no sandbox is kept" in _text(again)


def test_a_held_sandbox_is_refused_with_the_holds_name(olga: Client) -> None:
    lease = _kept()
    _hold(lease)
    assert "The sandbox is held: an operator keeps it." in _text(olga.get(DestroyNow.address(lease.pk)))
    before = snapshot()
    answer = olga.post(DestroyNow.address(lease.pk), {"confirmation": lease.resource_id, "reason": "because"})
    assert "The sandbox is held: an operator keeps it." in _text(answer)
    assert (snapshot(), state(lease)) == (before, "released")


def test_one_that_is_nobodys_has_no_time_of_its_own_any_more(olga: Client) -> None:
    lease = _kept()
    olga.post(MarkOrphaned.address(lease.pk), {"reason": "because"})
    lease.refresh_from_db()
    assert lease.orphaned_at is not None
    page = _text(olga.get(_page(lease)))
    assert "Nobody&#x27;s, kept while it is needed" in page
    assert MarkOrphaned.address(lease.pk) not in page
    assert KeepUntil.address(lease.pk) not in page
    assert "place a hold on it" in _text(olga.get(KeepUntil.address(lease.pk), follow=True))


def test_the_kept_sandboxes_of_an_issue_are_destroyed_but_for_what_is_held(olga: Client) -> None:
    free = _of_issue()
    held = factories.stopped(factories.lease(free.environment, issue=free.issue))
    _hold(held)
    answer = olga.post(DestroyForIssue.address(free.issue_id), {"reason": "it is closed"}, follow=True)
    assert "The destruction of 1 is owed now. 1 are held and left alone." in _text(answer)
    assert (state(free), state(held)) == ("pending_cleanup", "released")


# The report's page


def test_the_report_is_a_page_with_links_to_each_sandbox(olga: Client) -> None:
    lease = _kept()
    _hold(lease)
    page = _text(olga.get(reverse("admin:leases_lease_owners")))
    assert _page(lease) in page
    assert "an operator keeps it" in page
    assert reverse("admin:leases_lease_owners") in _text(olga.get("/admin/"))


def test_the_report_needs_the_permission_to_look_at_leases() -> None:
    assert _browser("view_obligation").get(reverse("admin:leases_lease_owners")).status_code == 403
    assert reverse("admin:leases_lease_owners") not in _text(_browser("view_obligation").get("/admin/"))
    assert _browser("view_lease").get(reverse("admin:leases_lease_owners")).status_code == 200


def test_the_report_costs_as_many_statements_for_twenty_sandboxes_as_for_one(olga: Client) -> None:
    counts = []
    for number in (1, 19):
        for _ in range(number):
            _hold(_kept())
        with CaptureQueriesContext(connection) as captured:
            olga.get(reverse("admin:leases_lease_owners"))
        counts.append(len(captured))
    assert counts[0] == counts[1]


# Environments say how long


@pytest.mark.parametrize(
    ("text", "length"),
    [
        ("7 days", timedelta(days=7)),
        ("12 hours", timedelta(hours=12)),
        ("1 day 12 hours", timedelta(hours=36)),
        ("90 min", timedelta(minutes=90)),
        ("2w", timedelta(weeks=2)),
        ("1 Day, 30 s", timedelta(days=1, seconds=30)),
    ],
)
def test_a_length_of_time_is_read_as_people_write_it_and_written_back(text: str, length: timedelta) -> None:
    assert read(text) == length
    assert read(written(length)) == length


@pytest.mark.parametrize(
    "text", ["7", "seven days", "7 fortnights", "-7 days", "7 days ago", "1.5 days", "9" * 9 + "w"]
)
def test_what_is_no_length_of_time_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        read(text)


def _environment_form(environment: Environment, **values: str) -> dict[str, Any]:
    return {
        "name": environment.name,
        "account": environment.account_id,
        "config": "{}",
        "initial-config": "{}",
        "policy": environment.policy,
        "drain_seconds": 30,
        "reuse_idle_for": "7 days",
        "retain_for": "30 days",
        "hourly_price": "",
        "status": "active",
        **values,
    }


def test_an_environment_says_how_long_in_words(olga: Client) -> None:
    environment = factories.environment()
    page = _text(olga.get(_page(environment)))
    assert 'value="7 days"' in page
    assert 'value="30 days"' in page
    answer = olga.post(_page(environment), _environment_form(environment, reuse_idle_for="36 hours", retain_for=""))
    assert answer.status_code == 302
    environment.refresh_from_db()
    assert (environment.reuse_idle_for, environment.retain_for) == (timedelta(hours=36), None)
    entry = ActivityEntry.objects.get(action="environment.changed")
    assert entry.details["fields"] == ["reuse_idle_for", "retain_for"]
    listed = _text(olga.get(reverse("admin:leases_environment_changelist")))
    assert "idle 1 day 12 hours<" in listed
    assert "for files until you decide<" in listed


@pytest.mark.parametrize(
    ("field", "text", "told"),
    [
        ("reuse_idle_for", "", "This field is required."),
        ("reuse_idle_for", "soon", "Write a length of time with its unit"),
        ("reuse_idle_for", "0 days", "must be more than nothing"),
        ("retain_for", "3651 days", "at most 3650 days"),
        ("retain_for", "30", "Write a length of time with its unit"),
    ],
)
def test_a_length_that_cannot_be_is_refused_at_its_field(olga: Client, field: str, text: str, told: str) -> None:
    environment = factories.environment()
    answer = olga.post(_page(environment), _environment_form(environment, **{field: text}))
    assert told in str(answer.context["adminform"].form.errors[field])
