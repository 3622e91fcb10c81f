"""The pages on which a person answers what only a person knows: what they refuse, and what each answer does."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest
from django.contrib.auth.models import Permission, User
from django.db import transaction
from django.test import Client
from django.urls import reverse

from leases import transitions
from leases.admin.answers import ANSWERS, Acknowledge, ExtendLapsed, LookAgain, SettleLapsed
from leases.admin.decisions import Decision
from leases.models import ActivityEntry, Installation, Obligation, Run
from tests import factories
from tests.scenarios.steps import snapshot

pytestmark = pytest.mark.django_db(transaction=True)


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


def _page(row: Obligation) -> str:
    return reverse("admin:leases_obligation_change", args=[row.pk])


def _lapse() -> Obligation:
    """A run whose hold ran out, and the row that asks whether that was an outage."""
    factories.run(controller_id="s", controller_seconds=1, controller_expires_at=factories.at(-5))
    watch = Obligation.objects.filter(kind="watch_controllers")
    watch.update(due_at=None, quiet="mass_lapse")
    return watch.get()


def _unacknowledged() -> Obligation:
    """A lease of a run that is over, and of which nobody acknowledged what became of a cancelled startup."""
    company = factories.company()
    run = factories.run(company)
    lease = factories.lease(factories.environment(factories.account(company)), run=run)
    Run.objects.filter(pk=run.pk).update(status="failed", finished_at=factories.at(0))
    orphan = Obligation.objects.filter(lease=lease, kind="settle_orphan")
    orphan.update(due_at=None, quiet="unacknowledged")
    return orphan.get()


def _history() -> Obligation:
    lease = factories.teardown().lease
    with transaction.atomic():
        transitions.settle_unverified(lease, lease.obligations.get(), actor="bob", reason="gone")
    looked_for = Obligation.objects.filter(lease=lease, kind="verify_end")
    looked_for.update(due_at=None, quiet="history_unverified")
    return looked_for.get()


ASKED = {ExtendLapsed: _lapse, SettleLapsed: _lapse, Acknowledge: _unacknowledged, LookAgain: _history}


def test_every_answer_is_tried_here() -> None:
    assert set(ASKED) == set(ANSWERS)


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer.key)
def test_an_answer_is_offered_where_it_is_asked_for_and_needs_its_permission(answer: type[Decision]) -> None:
    row = ASKED[answer]()
    address = answer.address(row.pk)
    without, allowed = _browser("view_obligation"), _browser("view_obligation", answer.permission.partition(".")[2])
    before = snapshot()
    assert address not in without.get(_page(row)).content.decode()
    assert without.post(address, {"reason": "because"}).status_code == 403
    assert address in allowed.get(_page(row)).content.decode()
    assert allowed.get(address).status_code == 200
    assert allowed.post(address, {"reason": " "}).context["form"].errors["reason"]
    assert snapshot() == before


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer.key)
def test_an_answer_is_logged_with_its_reason_and_is_no_second_time_asked_for(
    olga: Client, answer: type[Decision]
) -> None:
    row = ASKED[answer]()
    assert olga.post(answer.address(row.pk), {"reason": "because"})["Location"] == _page(row)
    assert ("olga", "because") in set(ActivityEntry.objects.values_list("actor", "reason"))
    row.refresh_from_db()
    assert row.quiet == ""
    before = snapshot()
    again: Any = olga.post(answer.address(row.pk), {"reason": "because"}, follow=True)
    assert "not asked about that any more" in again.content.decode()
    assert snapshot() == before


def test_an_outage_lets_every_hold_stand_anew(olga: Client) -> None:
    row = _lapse()
    olga.post(ExtendLapsed.address(row.pk), {"reason": "the network was down"})
    assert Installation.objects.get().gap_ended_at is not None
    assert Run.objects.get().status == "running"


def test_those_who_are_gone_have_their_runs_interrupted(olga: Client) -> None:
    row = _lapse()
    answer = olga.post(SettleLapsed.address(row.pk), {"reason": "the rack burned"}, follow=True)
    assert "1 runs were interrupted." in answer.content.decode()
    assert Run.objects.get().status == "interrupted"


def test_an_acknowledgement_wakes_the_settle_of_what_was_left(olga: Client) -> None:
    row = _unacknowledged()
    olga.post(Acknowledge.address(row.pk), {"reason": "asked the team"})
    assert Run.objects.get().cancel_acknowledged_at is not None
    row.refresh_from_db()
    assert row.due_at is not None


def test_one_look_is_asked_for_at_all_of_an_accounts_history(olga: Client) -> None:
    row = _history()
    answer = olga.post(LookAgain.address(row.pk), {"reason": "it is back"}, follow=True)
    assert "Asked for one look at each of 1." in answer.content.decode()
    row.refresh_from_db()
    assert (row.requests, row.due_at is not None) == (1, True)
