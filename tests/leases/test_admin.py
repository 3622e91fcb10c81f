"""The operator's pages: what they refuse, what they show, and what they cost."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from django.apps import apps
from django.contrib import admin
from django.contrib.auth.models import Permission, User
from django.core.exceptions import ValidationError
from django.db import connection, transaction
from django.db.models import Model
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from pytest_django import DjangoAssertNumQueries

from leases import audit, transitions
from leases.admin.owed import tallies
from leases.admin.situation import CONDITIONS, Situation, outlook, situation_of
from leases.admin.stock import Editable, ViewOnly
from leases.admin.times import relative, span
from leases.models import (
    ActivityEntry,
    Archive,
    Attempt,
    BridgeActivity,
    Company,
    Continuation,
    Credential,
    Environment,
    Hold,
    Installation,
    InventoryFinding,
    InventoryListing,
    Issue,
    IssueFacts,
    Lease,
    Obligation,
    Operation,
    ProviderAccount,
    Receipt,
    Recovery,
    RecoveryAction,
    Run,
    RunFacts,
)
from providers import registry
from tests import factories

pytestmark = pytest.mark.django_db

SCRIPT = "<script>alert(1)</script>"
ESCAPED = "&lt;script&gt;alert(1)&lt;/script&gt;"


def _attempt(obligation: Obligation | None = None, **values: Any) -> Attempt:
    owed = obligation or factories.teardown()
    return Attempt.objects.create(
        **{"id": uuid4(), "company_id": owed.company_id, "obligation": owed, "worker": "w", **values}
    )


def _receipt() -> Receipt:
    lease = factories.lease()
    return Receipt.objects.create(
        lease=lease,
        account_id=lease.account_id,
        company_uuid=lease.company_id,
        resource_id=lease.resource_id,
        account_identity=lease.account_identity,
        epoch=1,
        evidence=Receipt.Evidence.STOPPED,
        attempt_id=uuid4(),
    )


def _activity() -> BridgeActivity:
    lease = factories.lease()
    return BridgeActivity.objects.create(company_id=lease.company_id, lease=lease, deadline=factories.at(60))


def _entry() -> ActivityEntry:
    company = factories.company()
    audit.record("company.noted", company, company_id=company.pk)
    return ActivityEntry.objects.latest("pk")


def _credential(company: Company | None = None) -> Credential:
    owner = company or factories.company()
    return Credential.objects.create(company=owner, name=f"credential {uuid4()}", reference="env:SOME_KEY")


def _hold() -> Hold:
    """One on a lease, and one on an issue."""
    issue, lease = factories.issue(), factories.lease()
    until = factories.at(60)
    operator = {"kind": "operator", "strength": "always", "holder": "olga", "until": until}
    Hold.objects.create(company=issue.company, issue=issue, **operator)
    return Hold.objects.create(company_id=lease.company_id, lease=lease, **operator)


def _run() -> Run:
    company = factories.company()
    return factories.run(company, issue=factories.issue(company))


def _account() -> ProviderAccount:
    company = factories.company()
    return factories.account(company, credential=_credential(company))


def _activities() -> BridgeActivity:
    """One of a startup, and one of a lease."""
    operation = factories.operation()
    BridgeActivity.objects.create(company_id=operation.company_id, operation=operation, deadline=factories.at(60))
    return _activity()


def _obligations() -> Obligation:
    """One of each subject."""
    factories.operation()
    factories.startup()
    factories.probe()
    return factories.teardown()


def _operations() -> Operation:
    """A start, and a creation."""
    factories.start()
    return factories.operation(request_key=str(uuid4()))


def _owing_run() -> Run:
    run = _run()
    factories.startup(run)
    return run


def _continuations() -> Continuation:
    """One that waits, and one that is bound to a recovery and started a run."""
    recovery = factories.recovery(state="exhausted")
    factories.continuation(factories.failed_run(recovery.company), state="started", recovery=recovery)
    return factories.continuation(kind="comment", hold="decision_pending", hold_sentence="an approval waits")


MAKERS: dict[type[Model], Callable[[], Model]] = {
    ActivityEntry: _entry,
    Attempt: _attempt,
    BridgeActivity: _activities,
    Company: factories.company,
    Credential: _credential,
    Environment: factories.environment,
    Hold: _hold,
    Installation: Installation.current,
    InventoryFinding: factories.finding,
    InventoryListing: factories.listing,
    Issue: factories.issue,
    Lease: lambda: factories.teardown().lease,
    Obligation: _obligations,
    Operation: _operations,
    ProviderAccount: _account,
    Receipt: _receipt,
    Run: _owing_run,
    Recovery: factories.recovery,
    Archive: factories.archive,
    Continuation: _continuations,
    IssueFacts: factories.issue_facts,
    RunFacts: factories.run_facts,
    RecoveryAction: factories.recovery_action,
}
VIEW_ONLY = [model for model in MAKERS if isinstance(admin.site.get_model_admin(model), ViewOnly)]
EDITABLE = [model for model in MAKERS if isinstance(admin.site.get_model_admin(model), Editable)]


def _url(page: str, model: type[Model], *args: Any) -> str:
    return reverse(f"admin:leases_{model.__name__.lower()}_{page}", args=args)


def _name(model: type[Model]) -> str:
    return model.__name__


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


# --- Every list -----------------------------------------------------------------------------------------------------


def test_every_model_is_registered() -> None:
    ours = set(apps.get_app_config("leases").get_models())
    assert {model for model in ours if not admin.site.is_registered(model)} == set()
    assert ours == set(MAKERS), "a new model needs a maker here, so that its list is counted"


def _queries(browser: Client, url: str) -> list[str]:
    with CaptureQueriesContext(
        connection,
    ) as captured:
        assert browser.get(url).status_code == 200
    return [query["sql"] for query in captured]


@pytest.mark.parametrize("model", MAKERS, ids=_name)
def test_a_list_costs_as_many_statements_for_twenty_rows_as_for_one(olga: Client, model: type[Model]) -> None:
    # Installation is one row for ever; its list is loaded all the same.
    url = _url("changelist", model) + ("?situation=all" if model is Obligation else "")
    MAKERS[model]()
    _queries(olga, url)  # content types are cached from here on
    one = _queries(olga, url)
    for _ in range(19):
        MAKERS[model]()
    assert len(_queries(olga, url)) == len(one), "\n".join(_queries(olga, url))


@pytest.mark.parametrize("model", MAKERS, ids=_name)
def test_a_row_is_found_by_its_identity_and_any_text_may_be_searched_for(olga: Client, model: type[Model]) -> None:
    row = MAKERS[model]()
    url = _url("changelist", model)
    words = [str(uuid4()), "text", "it's 100%_\\", "1", "é\u2028"]
    words.extend([str(row.pk)] if "id" in admin.site.get_model_admin(model).identities else [])
    found = [olga.get(url, {"q": word}) for word in words]
    assert [response.status_code for response in found] == [200] * len(words)
    if "id" in admin.site.get_model_admin(model).identities:
        assert [str(item.pk) for item in found[-1].context["cl"].result_list] == [str(row.pk)]


@pytest.mark.parametrize("model", MAKERS, ids=_name)
def test_every_filter_choice_can_be_followed(olga: Client, model: type[Model]) -> None:
    MAKERS[model]()
    page = olga.get(_url("changelist", model)).context["cl"]
    for spec in page.filter_specs:
        for choice in list(spec.choices(page))[:3]:
            response = olga.get(_url("changelist", model) + choice["query_string"])
            assert response.status_code == 200, choice


@pytest.mark.parametrize("model", MAKERS, ids=_name)
def test_nothing_is_deleted_in_bulk(olga: Client, model: type[Model]) -> None:
    row = MAKERS[model]()
    data = {"action": "delete_selected", "_selected_action": str(row.pk), "post": "yes"}
    olga.post(_url("changelist", model), data)
    assert model._default_manager.filter(pk=row.pk).exists()
    assert "delete_selected" not in olga.get(_url("changelist", model)).content.decode()


@pytest.mark.parametrize("model", MAKERS, ids=_name)
def test_every_row_has_a_page(olga: Client, model: type[Model]) -> None:
    row = MAKERS[model]()
    assert olga.get(_url("change", model, row.pk)).status_code == 200


# --- What the system writes is only looked at -----------------------------------------------------------------------


def test_what_the_system_writes_is_view_only() -> None:
    assert {
        Lease, Attempt, Receipt, Obligation, Operation, BridgeActivity, ActivityEntry, Installation,
        InventoryFinding, InventoryListing, Hold, Recovery, Archive, Continuation, IssueFacts, RunFacts, RecoveryAction,
    } == set(VIEW_ONLY)  # fmt: skip


@pytest.mark.parametrize("model", VIEW_ONLY, ids=_name)
def test_a_view_only_row_refuses_add_change_and_delete_by_any_method(olga: Client, model: type[Model]) -> None:
    row = MAKERS[model]()
    before = model._default_manager.filter(pk=row.pk).values().get()
    data = dict.fromkeys(before, "1") | {"post": "yes", "_save": "Save"}
    answers = [
        olga.get(_url("add", model)),
        olga.post(_url("add", model), data),
        olga.post(_url("change", model, row.pk), data),
        olga.get(_url("delete", model, row.pk)),
        olga.post(_url("delete", model, row.pk), data),
    ]
    assert [answer.status_code for answer in answers] == [403] * 5
    assert model._default_manager.filter(pk=row.pk).values().get() == before


def test_a_company_is_closed_and_never_deleted(olga: Client) -> None:
    company = factories.company()
    assert olga.post(_url("delete", Company, company.pk), {"post": "yes"}).status_code == 403


def test_pages_ask_for_a_login() -> None:
    answer = Client().get(reverse("admin:leases_obligation_retry"))
    assert answer.status_code == 302
    assert "/login/" in answer["Location"]


# --- What people configure ------------------------------------------------------------------------------------------


def _account_form(company: Company, **values: Any) -> dict[str, Any]:
    return {
        "company": company.pk,
        "name": "engine",
        "provider": "docker",
        "endpoint": json.dumps({"base_url": "unix:///run/docker.sock"}),
        "credential": "",
        "concurrency_limit": 5,
        "blocked_until_0": "",
        "blocked_until_1": "",
        **values,
    }


def test_an_account_is_made_and_the_log_says_by_whom(olga: Client) -> None:
    company = factories.company()
    assert olga.post(_url("add", ProviderAccount), _account_form(company)).status_code == 302
    account = ProviderAccount.objects.get(company=company)
    entry = ActivityEntry.objects.get(subject_id=str(account.pk))
    assert (entry.action, entry.actor, entry.company_id) == ("provideraccount.created", "olga", company.pk)


@pytest.mark.parametrize(
    ("endpoint", "told"),
    [
        ({"base_url": "http://x"}, "base_url: "),
        ({"base_url": "unix:///s", "colour": "red"}, "colour: "),
        ({}, "base_url: "),
        ([1], "must be an object"),
    ],
)
def test_an_endpoint_that_does_not_fit_is_refused_by_the_name_of_its_field(
    olga: Client, endpoint: object, told: str
) -> None:
    company = factories.company()
    answer = olga.post(_url("add", ProviderAccount), _account_form(company, endpoint=json.dumps(endpoint)))
    assert answer.status_code == 200
    assert told in str(answer.context["adminform"].form.errors["endpoint"])
    assert not ProviderAccount.objects.exists()


def test_an_endpoint_that_is_not_json_is_refused_once(olga: Client) -> None:
    answer = olga.post(_url("add", ProviderAccount), _account_form(factories.company(), endpoint="{nonsense"))
    assert answer.context["adminform"].form.errors["endpoint"] == ["Enter a valid JSON."]


def test_a_provider_that_is_not_installed_cannot_be_chosen(olga: Client) -> None:
    answer = olga.post(_url("add", ProviderAccount), _account_form(factories.company(), provider="vmware"))
    assert "provider" in answer.context["adminform"].form.errors
    assert not ProviderAccount.objects.exists()


def test_the_page_of_an_account_whose_adapter_is_missing_here_says_so(olga: Client) -> None:
    account = factories.account(provider="vmware")
    assert "no provider named" in olga.get(_url("change", ProviderAccount, account.pk)).content.decode()
    answer = olga.post(_url("change", ProviderAccount, account.pk), _account_form(account.company, endpoint="{}"))
    assert answer.status_code == 200
    assert "no provider named" in str(answer.context["adminform"].form.non_field_errors())


def test_an_environment_that_does_not_fit_its_provider_is_refused_by_the_name_of_its_field(olga: Client) -> None:
    account = factories.account(provider="docker", endpoint={"base_url": "unix:///s"})
    form = {
        "company": account.company_id,
        "account": account.pk,
        "name": "python",
        "config": json.dumps({"image": "python", "memory_mb": "much"}),
        "policy": "ephemeral",
        "drain_seconds": 30,
        "reuse_idle_for": "7 days",
        "status": "active",
    }
    answer = olga.post(_url("add", Environment), form)
    assert "memory_mb: " in str(answer.context["adminform"].form.errors["config"])
    assert not Environment.objects.exists()
    form |= {"config": '{"image": "python"}'}
    answer = olga.post(_url("add", Environment), form | {"hourly_price": "-0.1"})
    assert answer.context["adminform"].form.errors["hourly_price"] == ["must not be negative"]
    assert not Environment.objects.exists()
    assert olga.post(_url("add", Environment), form).status_code == 302


def test_an_open_company_needs_a_name(olga: Client) -> None:
    answer = olga.post(_url("add", Company), {"name": " "})
    assert answer.context["adminform"].form.errors["name"] == ["an open company needs a name"]
    assert not Company.objects.exists()


@pytest.mark.parametrize("model", EDITABLE, ids=_name)
def test_what_identifies_a_row_is_written_once(olga: Client, model: type[Model]) -> None:
    row = MAKERS[model]()
    form = olga.get(_url("change", model, row.pk)).context["adminform"].form
    assert {"company", "provider", "attested_identity", "id", "circuit", "created_at"}.isdisjoint(form.fields)


def test_a_row_of_another_company_is_refused_in_the_form(olga: Client) -> None:
    company = factories.company()
    stranger = factories.issue()
    answer = olga.post(_url("add", Run), {"company": company.pk, "issue": stranger.pk, "status": "queued",
                                          "controller_generation": 0})  # fmt: skip
    assert answer.context["adminform"].form.errors["issue"] == ["belongs to another company"]
    run = factories.run(company)
    answer = olga.post(_url("change", Run, run.pk), {"issue": stranger.pk, "status": "queued",
                                                     "controller_generation": 0})  # fmt: skip
    assert answer.context["adminform"].form.errors["issue"] == ["belongs to another company"]
    credential = _credential()
    answer = olga.post(_url("add", ProviderAccount), _account_form(company, credential=credential.pk))
    assert "belongs to another company" in str(answer.context["adminform"].form.errors["credential"])


def test_saving_writes_only_what_the_person_changed(olga: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    account = factories.account(provider="docker", endpoint={"base_url": "unix:///run/docker.sock"})
    genuine = ProviderAccount.clean

    def meanwhile(self: ProviderAccount) -> None:
        genuine(self)
        ProviderAccount.objects.filter(pk=account.pk).update(circuit="open", circuit_failures=5)

    monkeypatch.setattr(ProviderAccount, "clean", meanwhile)
    form = _account_form(account.company, name=account.name, concurrency_limit=7)
    form["initial-endpoint"] = form["endpoint"]  # as the page sends it back
    assert olga.post(_url("change", ProviderAccount, account.pk), form).status_code == 302
    account.refresh_from_db()
    assert (account.circuit, account.concurrency_limit) == ("open", 7)
    entry = ActivityEntry.objects.get(action="provideraccount.changed")
    assert entry.details["fields"] == ["concurrency_limit"]


def test_an_account_that_something_is_owed_at_cannot_be_deleted(olga: Client) -> None:
    owed = factories.teardown()
    page = olga.post(_url("delete", ProviderAccount, owed.account_id), {"post": "yes"})
    assert "Cannot delete" in page.content.decode()
    assert ProviderAccount.objects.filter(pk=owed.account_id).exists()


def test_a_reference_is_chosen_by_searching(olga: Client) -> None:
    account = factories.account()
    wanted = {"app_label": "leases", "model_name": "environment", "field_name": "account"}
    for term in (account.name, str(account.pk)):
        answer = olga.get(reverse("admin:autocomplete"), {**wanted, "term": term})
        assert [found["id"] for found in answer.json()["results"]] == [str(account.pk)]


def test_a_secret_pasted_as_a_reference_is_refused_and_not_shown_again(olga: Client) -> None:
    company = factories.company()
    form = {"company": company.pk, "name": "key", "reference": "e2b_1234567890abcdef", "status": "active"}
    answer = olga.post(_url("add", Credential), form)
    assert "reference" in answer.context["adminform"].form.errors
    assert "e2b_1234567890abcdef" not in answer.content.decode()
    assert not Credential.objects.exists()


def test_a_credential_never_shows_its_secret(olga: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "t0p-s3cret-value")
    credential = _credential()
    for url in (_url("changelist", Credential), _url("change", Credential, credential.pk)):
        page = olga.get(url).content.decode()
        assert "env:SOME_KEY" in page
        assert "t0p-s3cret-value" not in page


def test_a_credential_tells_what_depends_on_it_and_enabling_it_wakes_that(olga: Client) -> None:
    credential = _credential()
    where = factories.environment(factories.account(credential.company, credential=credential))
    Credential.objects.filter(pk=credential.pk).update(status="disabled", digest="0123456789abcdef" * 4)
    named = {"credential_uuid": credential.pk, "credential_reference": credential.reference}
    factories.lease(where, **named)
    owed = factories.teardown(factories.lease(where, **named), due_at=None, quiet="credential_inactive")
    factories.operation(where, **named)
    factories.operation(where)
    url = _url("change", Credential, credential.pk)
    page = olga.get(url).content.decode()
    assert "2 leases whose sandbox is not proven gone, 1 unanswered operations; 1 obligations wait" in page
    assert "digest 01234567…" in page
    assert "0123456789" not in page
    form = {"name": credential.name, "reference": credential.reference, "status": "active"}
    assert olga.post(url, form).status_code == 302
    owed.refresh_from_db()
    assert (owed.quiet, owed.wakes) == ("", 1)


def test_the_form_shows_what_each_provider_expects(olga: Client) -> None:
    page = olga.get(_url("add", ProviderAccount)).content.decode()
    known = registry.known()
    for key in known:
        assert f'value="{key}"' in page
    assert "base_url" in page
    assert "DatabaseDefault" not in page


# --- Where an obligation stands -------------------------------------------------------------------------------------


def _in_situation(situation: Situation) -> Obligation:
    match situation:
        case Situation.QUIET:
            owed = Obligation.objects.get(operation=factories.operation())
            Obligation.objects.filter(pk=owed.pk).update(due_at=None, quiet=Obligation.Quiet.CREATION_NOT_FOUND)
            return owed
        case Situation.IN_FLIGHT:
            return factories.claimed(factories.teardown())
        case Situation.COOLING:
            return factories.teardown(due_in=600, failures=2)
        case Situation.DUE:
            factories.claimed(factories.teardown(), protected_for=-5)
            return factories.teardown(due_in=-5)


def test_every_open_row_is_in_one_situation_in_python_and_in_sql_alike() -> None:
    for situation in Situation:
        _in_situation(situation)
    now = factories.database_now()
    open_rows = Obligation.objects.filter(closed_at__isnull=True)
    by_python = {row.pk: situation_of(row, now) for row in open_rows}
    by_sql = {pk: situation for situation, condition in CONDITIONS.items()
              for pk in open_rows.filter(condition).values_list("pk", flat=True)}  # fmt: skip
    assert by_python == by_sql
    assert sum(open_rows.filter(condition).count() for condition in CONDITIONS.values()) == len(by_python)


def test_an_open_circuit_holds_up_all_but_the_probe() -> None:
    account = factories.account(circuit=ProviderAccount.Circuit.OPEN, circuit_failures=5)
    probe = factories.probe(account, due_in=-5)
    owed = factories.teardown(factories.lease(factories.environment(account)), due_in=-5)
    now = factories.database_now()
    later = now + timedelta(minutes=9)
    held = outlook(owed, account, now, probe_at=later)
    assert "circuit" in held.held_up
    assert held.next_at == later
    assert outlook(probe, account, now, probe_at=later).held_up == ""


def test_a_blocked_account_is_tried_no_earlier_than_its_block_ends() -> None:
    now = factories.database_now()
    account = factories.account(blocked_until=now + timedelta(minutes=5))
    owed = factories.teardown(factories.lease(factories.environment(account)), due_in=-5)
    held = outlook(owed, account, now)
    assert held.next_at == account.blocked_until
    assert held.held_up


def test_a_full_account_says_so() -> None:
    account = factories.account(concurrency_limit=2)
    owed = factories.teardown(factories.lease(factories.environment(account)))
    assert "full: 2 of 2" in outlook(owed, account, factories.database_now(), in_flight=2).held_up


def test_a_row_that_needs_a_person_is_not_tried_by_itself_and_gives_advice() -> None:
    owed = _in_situation(Situation.QUIET)
    owed.refresh_from_db()
    told = outlook(owed, owed.account, factories.database_now())
    assert told.next_at is None
    assert "look for it at the provider" in told.why


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 s"), (0.25, "0.2 s"), (41, "41 s"), (60, "1 min"), (3725, "1 h 2 min"), (86400 * 3 + 5, "3 d")],
)
def test_a_span_reads_in_its_two_largest_units(seconds: float, text: str) -> None:
    assert span(timedelta(seconds=seconds)) == text


def test_a_time_reads_relative_to_now() -> None:
    now = factories.database_now()
    assert relative(now + timedelta(seconds=90), now) == "in 1 min 30 s"
    assert relative(now - timedelta(hours=2), now) == "2 h ago"
    assert relative(now, now) == "now"


# --- A lease's page -------------------------------------------------------------------------------------------------


def test_a_lease_shows_what_is_owed_and_by_whom_it_is_worked_on(olga: Client) -> None:
    owed = factories.claimed(factories.teardown(verb="stop_only", failures=3, last_error_kind="server", busy_count=2))
    page = olga.get(_url("change", Lease, owed.lease_id)).content.decode()
    for text in ("stop, never delete", "in flight", "protected until", "3 (last: server)", "2 times", "Retry now"):
        assert text in page


def test_a_lease_shows_the_advice_of_a_quiet_row_and_the_circuit_in_the_way(olga: Client) -> None:
    account = factories.account(circuit=ProviderAccount.Circuit.OPEN)
    owed = factories.teardown(factories.lease(factories.environment(account)))
    assert "is open: nothing is tried" in olga.get(_url("change", Lease, owed.lease_id)).content.decode()
    Obligation.objects.filter(pk=owed.pk).update(due_at=None, quiet=Obligation.Quiet.FOREIGN_MARKS)
    page = olga.get(_url("change", Lease, owed.lease_id)).content.decode()
    assert "decide whose it is" in page
    assert "not by itself" in page


def test_a_debt_that_was_closed_without_proof_stays_visible(olga: Client) -> None:
    owed = factories.teardown()
    transitions.settle_unverified(owed.lease, owed, actor="olga", reason="gone")
    looked_for = Obligation.objects.get(lease=owed.lease_id, kind="verify_end", closed_at=None)
    page = olga.get(_url("change", Lease, owed.lease_id))
    assert "Nothing proves that the sandbox ended" in page.content.decode()
    assert page.context["retry_ids"] == str(looked_for.pk), "what was given up is not tried again, only looked for"


def test_provider_text_and_names_are_escaped_everywhere(olga: Client) -> None:
    company = factories.company(name=SCRIPT)
    account = factories.account(company, name=SCRIPT, circuit="open", attested_identity=SCRIPT)
    environment = factories.environment(account, name=SCRIPT)
    lease = factories.lease(environment, resource_id=SCRIPT)
    owed = factories.teardown(lease, last_error_kind="<script>x", due_in=-5)
    tried = _attempt(owed, worker=SCRIPT, finished_at=factories.at(1), outcome="failed", error_excerpt=SCRIPT)
    audit.record("lease.noted", lease, company_id=company.pk, actor=SCRIPT, reason=SCRIPT, note=SCRIPT)
    operation = factories.operation(environment, resource_id=SCRIPT)
    issue = factories.issue(company, title=SCRIPT)
    urls = [
        reverse("admin:index"),
        *(_url("changelist", model) for model in MAKERS),
        _url("change", Lease, lease.pk),
        _url("change", Obligation, owed.pk),
        _url("change", Attempt, tried.pk),
        _url("change", Operation, operation.pk),
        _url("change", ProviderAccount, account.pk),
        _url("change", Issue, issue.pk),
    ]
    for url in urls:
        page = olga.get(url).content.decode()
        assert SCRIPT not in page, url
        assert "<script>x" not in page, url
    assert ESCAPED in olga.get(_url("change", Lease, lease.pk)).content.decode()
    page = olga.post(reverse("admin:leases_obligation_retry"), {"ids": owed.pk, "next": SCRIPT}).content.decode()
    assert ESCAPED in page
    assert SCRIPT not in page


# --- Retry now ------------------------------------------------------------------------------------------------------

RETRY = "/admin/leases/obligation/retry/"


def test_the_action_asks_for_a_reason_and_does_nothing_yet(olga: Client) -> None:
    owed = factories.teardown(due_in=600)
    data = {"action": "retry_now", "_selected_action": str(owed.pk), "index": "0"}
    answer = olga.post(_url("changelist", Obligation), data)
    assert b'name="reason"' in answer.content
    owed.refresh_from_db()
    assert owed.requests == 0


def test_a_retry_with_a_reason_asks_for_an_attempt_and_is_in_the_log(olga: Client) -> None:
    owed = factories.teardown(due_in=600)
    back = _url("change", Lease, owed.lease_id)
    data = {"ids": str(owed.pk), "next": back, "confirmed": "1", "reason": "  the engine is back  "}
    answer = olga.post(RETRY, data, follow=True)
    assert answer.redirect_chain == [(back, 302)]
    assert "Asked for one attempt at 1 obligation." in answer.content.decode()
    owed.refresh_from_db()
    assert owed.requests == 1
    assert owed.due_at is not None
    assert owed.due_at <= factories.database_now()
    entry = ActivityEntry.objects.get(action="obligation.retry_requested")
    assert (entry.actor, entry.reason, entry.subject_id) == ("olga", "the engine is back", str(owed.pk))


@pytest.mark.parametrize("reason", ["", "   \n ", "x" * 501])
def test_a_retry_without_a_proper_reason_is_asked_again(olga: Client, reason: str) -> None:
    owed = factories.teardown(due_in=600)
    answer = olga.post(RETRY, {"ids": str(owed.pk), "confirmed": "1", "reason": reason})
    assert answer.status_code == 200
    assert answer.context["form"].errors["reason"]
    owed.refresh_from_db()
    assert owed.requests == 0


def test_a_retry_is_a_post(olga: Client) -> None:
    owed = factories.teardown(due_in=600)
    assert olga.get(RETRY, {"ids": str(owed.pk), "confirmed": "1", "reason": "r"}).status_code == 405
    owed.refresh_from_db()
    assert owed.requests == 0


def test_a_retry_needs_the_token_against_forged_posts() -> None:
    owed = factories.teardown(due_in=600)
    browser = Client(enforce_csrf_checks=True)
    browser.force_login(User.objects.create_superuser("olga"))
    assert browser.post(RETRY, {"ids": str(owed.pk), "confirmed": "1", "reason": "r"}).status_code == 403
    owed.refresh_from_db()
    assert owed.requests == 0


def test_only_who_may_change_obligations_sees_and_uses_retry() -> None:
    owed = factories.teardown(due_in=600)
    data = {"ids": str(owed.pk), "confirmed": "1", "reason": "r"}
    select = {"action": "retry_now", "_selected_action": str(owed.pk), "index": "0"}
    looks = _browser("view_obligation", "view_lease")
    for url in (
        _url("changelist", Obligation),
        _url("change", Obligation, owed.pk),
        _url("change", Lease, owed.lease_id),
    ):
        assert "Retry now" not in looks.get(url).content.decode()
    assert b'name="reason"' not in looks.post(_url("changelist", Obligation), select).content
    assert looks.post(RETRY, data).status_code == 403
    acts = _browser("view_obligation", "view_lease", "change_obligation")
    for url in (
        _url("changelist", Obligation),
        _url("change", Obligation, owed.pk),
        _url("change", Lease, owed.lease_id),
    ):
        assert "Retry now" in acts.get(url).content.decode()
    assert acts.post(_url("change", Obligation, owed.pk), {"failures": 0}).status_code == 403
    assert acts.post(RETRY, data).status_code == 302


@pytest.mark.parametrize("ids", ["", "x", "1,", "-1", "1;2", "9" * 30, "٣"])
def test_a_malformed_list_of_obligations_is_refused(olga: Client, ids: str) -> None:
    assert olga.post(RETRY, {"ids": ids, "confirmed": "1", "reason": "r"}).status_code == 400


def test_a_retry_leads_back_to_this_site_only(olga: Client) -> None:
    owed = factories.teardown(due_in=600)
    data = {"ids": str(owed.pk), "confirmed": "1", "reason": "r", "next": "https://example.org/"}
    assert olga.post(RETRY, data)["Location"] == _url("changelist", Obligation)


def test_what_is_not_owed_any_more_is_said_and_left_alone(olga: Client) -> None:
    owed, closed = factories.teardown(due_in=600), factories.probe()
    transitions.close(closed, Obligation.ClosedAs.PROVEN)
    data = {"ids": f"{owed.pk},{closed.pk}", "confirmed": "1", "reason": "r"}
    page = olga.post(RETRY, data, follow=True).content.decode()
    assert "Asked for one attempt at 1 obligation." in page
    assert "1 of the 2 named are not owed any more" in page
    page = olga.post(RETRY, {"ids": str(closed.pk)}, follow=True).content.decode()
    assert "Nothing of this is owed any more" in page


def test_too_many_at_once_are_refused(olga: Client) -> None:
    ids = ",".join(str(number) for number in range(1, 1002))
    page = olga.post(RETRY, {"ids": ids, "confirmed": "1", "reason": "r"}, follow=True).content.decode()
    assert "at most 1000 obligations" in page
    assert not ActivityEntry.objects.filter(action="obligation.retry_requested").exists()


def test_all_rows_across_pages_can_be_retried(olga: Client) -> None:
    for _ in range(60):
        factories.teardown(due_in=600)
    first = Obligation.objects.earliest("pk")
    data = {"action": "retry_now", "_selected_action": str(first.pk), "index": "0", "select_across": "1"}
    answer = olga.post(_url("changelist", Obligation), data)
    assert answer.context["count"] == 60


# --- The index ------------------------------------------------------------------------------------------------------


def test_the_index_counts_what_is_owed_with_links_that_show_as_many(olga: Client) -> None:
    for situation in Situation:
        _in_situation(situation)
    factories.teardown(due_in=600, escalated_at=factories.at(-5))
    page = olga.get(reverse("admin:index"))
    assert "Owed now" in page.content.decode()
    listed = _url("changelist", Obligation)
    for tally in tallies():
        of_kind = {"kind__exact": tally.kind}
        for key, count in tally.counts:
            shown = olga.get(listed, {"situation": key, **of_kind}).context["cl"].result_count
            assert shown == count, (tally.kind, key)
        assert olga.get(listed, of_kind).context["cl"].result_count == tally.open
        escalated = olga.get(listed, {"escalated_at__isempty": "0", **of_kind})
        assert escalated.context["cl"].result_count == tally.escalated
        assert sum(count for _, count in tally.counts) == tally.open


def test_the_index_tells_nothing_to_who_may_not_see_obligations() -> None:
    factories.teardown()
    assert "Owed now" not in _browser("view_company").get(reverse("admin:index")).content.decode()
    assert "Owed now" in _browser("view_obligation").get(reverse("admin:index")).content.decode()


def test_counting_what_is_owed_is_one_statement_over_open_rows(
    django_assert_num_queries: DjangoAssertNumQueries,
) -> None:
    with django_assert_num_queries(1) as captured:
        tallies()
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SET LOCAL enable_seqscan = off")
        cursor.execute("EXPLAIN " + captured.captured_queries[0]["sql"])
        plan = "\n".join(row[0] for row in cursor.fetchall())
    assert "obligation_open" in plan


@pytest.mark.parametrize("provider", ["daytona", "e2b"])
def test_an_account_of_a_provider_that_needs_a_secret_names_a_credential(provider: str) -> None:
    account = factories.account(provider=provider, endpoint={})
    with pytest.raises(ValidationError) as caught:
        account.clean()
    assert list(caught.value.message_dict) == ["credential"]
    account.credential = Credential.objects.create(company=account.company, name="key", reference="env:KEY")
    account.clean()
