"""The pages of recoveries and continuations, what may be running, and the same by command: shown, asked, refused."""

from __future__ import annotations

import json
from decimal import Decimal
from io import StringIO
from typing import Any
from uuid import uuid4

import pytest
from django.contrib.auth.models import Permission, User
from django.core.management import call_command
from django.http import HttpResponse
from django.test import Client
from django.urls import reverse

from cleanup import report
from leases import ownership
from leases.admin.recovery import DECISIONS
from leases.models import ActivityEntry, Continuation, Lease, Obligation, Recovery
from tests import factories
from tests.cleanup.test_decision_commands import _json, _run
from tests.scenarios.steps import snapshot

pytestmark = pytest.mark.django_db(transaction=True)

WHY = ("--reason", "the disk has room again", "--actor", "olga")


@pytest.fixture
def olga(transactional_db: None, client: Client) -> Client:
    """A superuser's browser."""
    client.force_login(User.objects.create_superuser("olga"))
    return client


def browser(*permissions: str) -> Client:
    user = User.objects.create_user(f"user-{uuid4().hex[:8]}", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    made = Client()
    made.force_login(user)
    return made


def page(row: Any) -> str:
    return reverse(f"admin:leases_{type(row).__name__.lower()}_change", args=[row.pk])


def text(response: HttpResponse) -> str:
    assert response.status_code == 200, response
    return response.content.decode()


def kept(**values: Any) -> Lease:
    where = factories.environment(factories.account(), hourly_price=Decimal(2))
    values.setdefault("resource_id", uuid4().hex)  # lists show its beginning, which is its own
    return factories.stopped(factories.lease(where, hourly_price=Decimal(2), **values), state="retained")


def exhausted(lease: Lease | None = None) -> Recovery:
    return factories.recovery(
        lease or kept(),
        state="exhausted",
        failure="source_unavailable",
        error_kind="disk_full",
        error_excerpt="no space left on device",
        attempts=1,
    )


# Recover again


def test_the_page_of_a_lease_tells_its_generations_and_offers_another(olga: Client) -> None:
    recovery = exhausted()
    factories.archive(recovery, saved_at=None)
    told = text(olga.get(page(recovery.lease)))
    assert "Recovery of its files" in told
    assert "the sandbox cannot run any more, or is gone (disk_full: no space left on device)" in told
    assert "not whole" in told
    assert reverse("admin:leases_lease_recover_files", args=[recovery.lease_id]) in told
    url = reverse("admin:leases_lease_recover_files", args=[recovery.lease_id])
    before = snapshot()
    assert "at most six attempts within half an hour" in text(olga.get(url)).replace("\n", " ")
    text(olga.post(url, {"reason": " "}))
    assert snapshot() == before, "nothing without a reason"
    assert olga.post(url, {"reason": "room was made"}).status_code == 302
    begun = Recovery.objects.get(state="running")
    assert (begun.generation, begun.requested_by, begun.reason) == (2, "olga", "room was made")
    assert ActivityEntry.objects.get(action="recovery.begun").actor == "olga"
    assert url not in text(olga.get(page(recovery.lease)))
    assert "Its files are being recovered at this moment" in text(olga.get(url, follow=True))
    assert "Its files are being recovered at this moment" in text(olga.post(url, {"reason": "again"}, follow=True))
    assert Recovery.objects.filter(state="running").count() == 1


def test_what_cannot_be_reopened_is_refused_with_its_sentence(olga: Client) -> None:
    lease = kept()
    url = reverse("admin:leases_lease_recover_files", args=[lease.pk])
    factories.start(lease)
    assert "Whether the sandbox is stopped is not proven at this moment" in text(olga.get(url))
    used = factories.lease()
    assert reverse("admin:leases_lease_recover_files", args=[used.pk]) not in text(olga.get(page(used)))
    answer = olga.get(reverse("admin:leases_lease_recover_files", args=[used.pk]), follow=True)
    assert "The lease is Active: no stopped sandbox is kept." in text(answer)
    assert not Recovery.objects.exists()


@pytest.mark.parametrize("decision", DECISIONS, ids=lambda one: one.key)
def test_nothing_is_decided_without_the_permission(decision: Any) -> None:
    row: Any = kept() if decision.model is Lease else factories.continuation()
    name = type(row).__name__.lower()
    before = snapshot()
    looker = browser(f"view_{name}")
    assert decision.address(row.pk) not in text(looker.get(page(row)))
    assert looker.get(decision.address(row.pk)).status_code == 403
    assert looker.post(decision.address(row.pk), {"reason": "because"}).status_code == 403
    assert snapshot() == before
    allowed = browser(f"view_{name}", decision.permission.split(".")[1])
    assert decision.address(row.pk) in text(allowed.get(page(row)))
    assert allowed.post(decision.address(row.pk), {"reason": "because"}).status_code == 302


def test_the_command_rehearses_begins_and_refuses() -> None:
    lease = kept()
    before = snapshot()
    status, told = _json("recover_files", lease.pk, "--dry-run")
    assert (status, told["generation"], told["dry_run"]) == (0, 1, True)
    assert snapshot() == before
    assert _run("recover_files", lease.pk)[0] == 2, "a reason is asked for"
    status, told = _json("recover_files", lease.pk, *WHY)
    assert (status, told["recovery"]) == (0, str(Recovery.objects.get().pk))
    for arguments in (("--dry-run",), WHY):
        status, told = _json("recover_files", lease.pk, *arguments)
        assert (status, told["refused"]) == (1, "recovery_running")
    assert _run("recover_files", "no-id", *WHY)[0] == 2
    assert _run("recover_files", uuid4(), *WHY)[0] == 2


# Recoveries and continuations to look at


def test_a_recovery_says_how_it_failed_what_is_next_and_what_came_of_it(olga: Client) -> None:
    recovery = factories.recovery(
        kept(), attempts=2, failure="provider_unavailable", disposition="retry", error_kind="timeout", due_in=60
    )
    factories.start(recovery.lease, recovery=recovery)
    archive = factories.archive(recovery, saved_at=None)
    over = exhausted()
    bound = factories.continuation(factories.failed_run(over.company), recovery=over)
    for row in (recovery, bound.recovery):
        listed = text(olga.get(reverse("admin:leases_recovery_changelist") + f"?q={row.pk}"))
        assert page(row) in listed
        assert row.lease.resource_id[:12] in listed
    told = text(olga.get(page(recovery)))
    owed = recovery.lease.obligations.get(kind="recover_workspace")
    assert f">#{owed.pk}</a>: open" in told
    assert "the provider could not do it (timeout: )" in told
    assert "try again" in told
    assert page(recovery.lease) in told
    assert page(archive) in told
    assert ": is pending" in told
    assert "reopen a stopped sandbox and save its files" in told, "what its lease owes"
    assert page(bound) in text(olga.get(page(bound.recovery)))
    assert olga.post(page(recovery), {}).status_code == 403
    assert olga.get(reverse("admin:leases_recovery_add")).status_code == 403


def test_a_continuation_tells_its_hold_in_words_and_is_withdrawn(olga: Client) -> None:
    row = factories.continuation(hold="decision_pending", hold_sentence="two approvals wait for an answer")
    other = factories.continuation(kind="comment")
    listing = reverse("admin:leases_continuation_changelist")
    told = text(olga.get(listing))
    assert "two approvals wait for an answer" in told
    assert "nobody has looked at it yet" in told
    filtered = text(olga.get(f"{listing}?state__exact=waiting&hold=decision_pending"))
    assert page(row) in filtered
    assert page(other) not in filtered
    assert "two approvals wait for an answer" in text(olga.get(page(row)))
    url = reverse("admin:leases_continuation_withdraw", args=[row.pk])
    text(olga.get(url))
    assert olga.post(url, {"reason": "not wanted"}).status_code == 302
    row.refresh_from_db()
    assert (row.state, row.withdrawn_by) == ("withdrawn", "olga")
    assert "It does not wait any more: it is withdrawn." in text(olga.get(url, follow=True))
    status, told = _json("withdraw_continuation", other.pk, "--dry-run")
    assert (status, told["dry_run"]) == (0, True)
    assert _json("withdraw_continuation", other.pk, *WHY)[0] == 0
    started = factories.continuation(state="started")
    assert _json("withdraw_continuation", started.pk, *WHY)[1]["refused"] == "started"
    assert not Continuation.objects.filter(state="waiting").exists()


def test_what_the_control_plane_told_stands_on_the_pages_and_cannot_be_edited_there(olga: Client) -> None:
    run = factories.failed_run(adapter="claude")
    factories.issue_facts(run.issue, assignee="agent-seven")
    factories.run_facts(run, process_id=4711)
    action = factories.recovery_action(run, cause="it ran out of memory")
    told = text(olga.get(page(run.issue)))
    assert "agent-seven" in told
    assert "it ran out of memory" in told
    assert 'name="facts-0-assignee"' not in told
    told = text(olga.get(page(run)))
    assert "4711" in told
    assert "Terminal Failure" in told
    assert "claude" in told
    assert "nobody" in told, "that nobody is at work on the result was told"
    untold = factories.run_facts(coordinator="", coordinator_owner=None)
    assert text(olga.get(page(untold.run))).count("not told: its gate stays closed") == 2
    assert "it ran out of memory" in text(olga.get(reverse("admin:leases_recoveryaction_changelist")))
    assert olga.post(page(action), {}).status_code == 403


def test_what_a_person_edits_of_an_issue_or_a_run_is_saved_beside_facts_that_nobody_can_edit(olga: Client) -> None:
    run = factories.failed_run()
    assert run.issue is not None
    for row, field, value in ((run.issue, "title", "another title"), (run, "status", "interrupted")):
        for _ in range(2):  # without facts, and with them
            shown = olga.get(page(row))
            posted = {
                name: field_.value()
                for formset in shown.context["inline_admin_formsets"]
                for form in [formset.formset.management_form]
                for name, field_ in ((form[key].html_name, form[key]) for key in form.fields)
            }
            form = shown.context["adminform"].form
            posted |= {name: form[name].value() or "" for name in form.fields} | {field: value}
            posted |= {"finished_at_0": "2026-01-01", "finished_at_1": "10:00:00", "facts-0-assignee": "mallory"}
            answer = olga.post(page(row), posted)
            assert answer.status_code == 302, answer.context["errors"]
            row.refresh_from_db()
            assert getattr(row, field) == value
            if not hasattr(type(row).objects.get(pk=row.pk), "facts"):
                factories.issue_facts(row) if row is run.issue else factories.run_facts(row)
    assert run.issue.facts.assignee == "agent-1"


# What may be running


def test_what_may_be_running_is_hidden_nowhere_and_counts_as_costing(olga: Client) -> None:
    lease, quiet = kept(), kept()
    Lease.objects.filter(pk=lease.pk).update(issue=factories.issue(lease.company))
    lease.refresh_from_db()
    factories.may_be_running(lease, since_in=-7200)
    for address in (
        page(lease),
        page(lease.issue),
        reverse("admin:leases_lease_destroy_now", args=[lease.pk]),
        reverse("admin:leases_lease_changelist"),
        reverse("admin:leases_lease_changelist") + "?owes=may_run",
        reverse("admin:leases_lease_owners"),
    ):
        told = text(olga.get(address))
        assert "may be running" in told, address
        assert lease.resource_id[:12] in told
    assert quiet.resource_id[:12] not in text(olga.get(reverse("admin:leases_lease_changelist") + "?owes=may_run"))
    assert "may be running</span>" not in text(olga.get(page(quiet)))
    assert "2 h ago" in text(olga.get(page(lease)))
    assert "Why it is not destroyed" in text(olga.get(page(lease))), "it is kept like any other"
    group = ownership.ownership().of(ownership.Kind.RETAINED)
    assert (group.count, group.may_run) == (2, 1)
    mine = ownership.of(lease.pk)
    assert mine is not None
    assert not mine.is_stopped, "its price is what it costs, not the most that it could"
    out = StringIO()
    call_command("owed", "--list", stdout=out)
    told = out.getvalue()
    assert "1 may be running although their end is proven, counted as costing: 2.00 per hour" in told
    assert f"{lease.pk} {lease.resource_id} (local): a restart was never answered, since 2 h" in told
    out = StringIO()
    call_command("owed", "--json", stdout=out)
    after = json.loads(out.getvalue())["unfinished"]
    assert (after["may_run_count"], after["may_run"][0]["lease"]) == (1, str(lease.pk))


def test_the_report_names_recoveries_that_run_and_what_continuations_wait_for(olga: Client) -> None:
    recovery = factories.recovery(kept(), attempts=1, failure="storage_unavailable", disposition="retry", due_in=30)
    exhausted()
    row = factories.continuation(hold="remote_cleanup", hold_sentence="a sandbox has no proof of its end")
    factories.continuation(state="withdrawn")
    before = snapshot()
    told = report.owed().unfinished
    assert [one.recovery for one in told.recoveries] == [recovery.pk]
    assert [(one.continuation, one.hold) for one in told.continuations] == [(row.pk, "remote_cleanup")]
    assert [(one.hold, one.count) for one in told.held_by] == [("remote_cleanup", 1)]
    out = StringIO()
    call_command("owed", stdout=out)
    assert "1 recoveries of files are running" in out.getvalue()
    assert "last: the archive could not be written" in out.getvalue()
    assert "a sandbox has no proof of its end" in out.getvalue()
    shown = text(olga.get(reverse("admin:leases_lease_owners")))
    assert "a sandbox has no proof of its end" in shown
    assert page(recovery) in shown
    assert snapshot() == before
    assert Obligation.objects.filter(kind="start_continuation", closed_at=None).count() == 1
