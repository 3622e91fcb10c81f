"""The pages that delete, close and archive: what they list, what they refuse, and that nothing goes past them."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest
from django.contrib.auth.models import Permission, User
from django.http import HttpResponse
from django.test import Client
from django.urls import reverse

from leases.admin.removals import REMOVALS, Removal
from leases.models import ActivityEntry, Company, Credential, Environment
from tests import factories
from tests.scenarios.steps import snapshot

pytestmark = pytest.mark.django_db(transaction=True)


def _credential(company: Company | None = None, **values: Any) -> Credential:
    owner = company or factories.company()
    return Credential.objects.create(**{"company": owner, "name": f"key {uuid4()}", "reference": "env:KEY", **values})


def _row(removal: type[Removal]) -> Any:
    makers: dict[Any, Any] = {
        Environment: factories.environment,
        Company: factories.company,
        Credential: _credential,
    }
    return makers[removal.model]()


def _posted(row: Any, **values: Any) -> dict[str, Any]:
    return {"confirmation": str(row), "reason": "no longer needed", **values}


def _page(row: Any) -> str:
    return reverse(f"admin:leases_{type(row).__name__.lower()}_change", args=[row.pk])


def _text(response: HttpResponse) -> str:
    return response.content.decode()


@pytest.fixture
def olga(client: Client) -> Client:
    """A superuser's browser."""
    client.force_login(User.objects.create_superuser("olga"))
    return client


def _browser(*permissions: str) -> Client:
    user = User.objects.create_user(f"user-{uuid4().hex[:8]}", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    browser = Client()
    browser.force_login(user)
    return browser


removals = pytest.mark.parametrize("removal", REMOVALS, ids=lambda one: one.__name__)


@removals
def test_it_is_offered_on_the_page_of_the_row_and_done_with_a_reason(olga: Client, removal: type[Removal]) -> None:
    row = _row(removal)
    url = removal.address(row.pk)
    assert f'href="{url}"' in _text(olga.get(_page(row)))
    assert "Nothing." in _text(olga.get(url))
    assert olga.post(url, _posted(row)).status_code == 302
    entry = ActivityEntry.objects.filter(subject_id=str(row.pk)).latest("pk")
    assert (entry.actor, entry.reason) == ("olga", "no longer needed")


@removals
def test_nothing_happens_on_a_get_or_without_permission_reason_or_name(removal: type[Removal]) -> None:
    row = _row(removal)
    codename = removal.permission.partition(".")[2]
    may, may_not = _browser(codename), _browser("view_environment", "view_company", "view_credential")
    url = removal.address(row.pk)
    before = snapshot()
    assert may.get(url).status_code == 200
    assert may_not.get(url).status_code == 403
    assert may_not.post(url, _posted(row)).status_code == 403
    assert "required" in _text(may.post(url, _posted(row, reason=" ")))
    if "confirmation" in removal.form.base_fields:
        assert "not its exact name" in _text(may.post(url, _posted(row, confirmation="another")))
    assert snapshot() == before
    assert may.get(removal.address(uuid4())).status_code == 404


@removals
def test_djangos_own_deletion_leads_to_it(olga: Client, removal: type[Removal]) -> None:
    row = _row(removal)
    own = reverse(f"admin:leases_{type(row).__name__.lower()}_delete", args=[row.pk])
    before = snapshot()
    answer = olga.post(own, {"post": "yes"})
    if removal.model is Company:
        assert answer.status_code == 403
    else:
        assert answer["Location"].endswith("/remove/")
    assert snapshot() == before


def test_an_environments_page_lists_what_stands_in_the_way_and_consent_ends_it(olga: Client) -> None:
    where = factories.environment(name="<b>build</b>")
    lease = factories.stopped(factories.lease(where))
    url = reverse("admin:leases_environment_remove", args=[where.pk])
    page = _text(olga.get(url))
    assert reverse("admin:leases_lease_change", args=[lease.pk]) in page
    assert "stopped and kept; with consent its sandbox is destroyed" in page
    assert "the box above" in page
    assert "&lt;b&gt;build&lt;/b&gt;" in page
    assert "<b>build</b>" not in page
    before = snapshot()
    assert "cannot be deleted; in the way: 1 kept" in _text(olga.post(url, _posted(where)))
    assert snapshot() == before
    answer = olga.post(url, _posted(where, consent="on"), follow=True)
    assert "1 leases owe their teardown because of it" in _text(answer)
    lease.refresh_from_db()
    assert (lease.state, lease.environment_id) == ("pending_cleanup", None)


def test_what_does_not_yield_offers_no_form(olga: Client) -> None:
    where = factories.environment()
    factories.lease(where, run=factories.run(where.company))
    page = _text(olga.get(reverse("admin:leases_environment_remove", args=[where.pk])))
    assert "it ends, or is ended, first" in page
    assert 'name="reason"' not in page


def test_a_closed_company_keeps_its_page_and_cannot_be_opened_again(olga: Client) -> None:
    company = factories.company()
    url = reverse("admin:leases_company_close", args=[company.pk])
    olga.post(url, _posted(company))
    company.refresh_from_db()
    assert company.closed_at is not None
    page = _text(olga.get(_page(company)))
    assert url not in page
    assert f"closed company {company.pk}" in page
    assert "is closed already" in _text(olga.get(url, follow=True))
    olga.post(_page(company), {"name": "again", "closed_at_0": "", "closed_at_1": ""})
    company.refresh_from_db()
    assert (company.name, company.closed_at is None) == ("", False)


def test_a_company_cannot_be_closed_through_its_form(olga: Client) -> None:
    company = factories.company()
    form = {"name": company.name, "closed_at_0": "2026-01-01", "closed_at_1": "12:00:00"}
    assert olga.post(_page(company), form).status_code == 302
    company.refresh_from_db()
    assert company.closed_at is None


def test_a_credential_is_archived_on_its_page_and_not_in_its_form(olga: Client) -> None:
    row = _credential()
    lease = factories.lease(factories.environment(factories.account(row.company)), credential_uuid=row.pk)
    form = {"name": row.name, "reference": row.reference, "status": "archived"}
    answer = olga.post(_page(row), form)
    assert "status" in answer.context["adminform"].form.errors
    url = reverse("admin:leases_credential_archive", args=[row.pk])
    assert str(lease.pk) in _text(olga.get(url))
    assert "cannot be archived; in the way: 1 unsettled lease" in _text(olga.post(url, _posted(row)))
    assert olga.post(url, _posted(row, force="on")).status_code == 302
    row.refresh_from_db()
    assert row.status == "archived"
    # And enabled again in the form, as ever.
    assert olga.post(_page(row), form | {"status": "active"}).status_code == 302
    row.refresh_from_db()
    assert row.status == "active"
