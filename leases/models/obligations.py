"""What is owed, and the history of the attempts to pay it."""

from __future__ import annotations

import uuid
from typing import Any

from django.db import models
from django.db.models import F, Q
from django.db.models.functions import Now

from leases.models.accounts import ProviderAccount
from leases.models.continuation import Continuation
from leases.models.journal import Operation
from leases.models.lease import Lease
from leases.models.tenancy import Company, Installation, Run

_SUBJECTS = ("lease", "operation", "run", "continuation", "installation", "probed_account")
_OF_LEASE = [
    "teardown",
    "extend",
    "end_lease",
    "settle_orphan",
    "dispose",
    "end_fence",
    "verify_end",
    "recover_workspace",
    "end_recovery",
    "watch_restart",
]
_INNER = [
    "startup",
    "end_lease",
    "settle_orphan",
    "dispose",
    "end_fence",
    "watch_controllers",
    "end_recovery",
    "start_continuation",
    "confirm_cancel",
]


def _has_only(subject: str, **kind: Any) -> Q:
    return Q(**kind, **{f"{name}__isnull": name != subject for name in _SUBJECTS})


class Obligation(models.Model):
    """One thing still owed. An open row with `due_at` is all that work ever starts from; a message is only a hint.

    Claimed while `attempt_id` is set; `due_at` is then the end of that attempt's protection. `wakes` counts facts that
    changed; a settle that finds it moved since its claim makes the row due at once. The claim and the settle live in
    `cleanup.claims`; waking lives in the database function `leases_wake`.
    """

    class Kind(models.TextChoices):
        TEARDOWN = "teardown", "stop or destroy a lease's sandbox, proven"
        RECOVER_CREATION = "recover_creation", "find out what became of a creation"
        RECOVER_START = "recover_start", "find out what became of a start"
        STARTUP = "startup", "see what a startup of a run left behind to its end"
        EXTEND = "extend", "keep the provider's own deadline ahead"
        END_LEASE = "end_lease", "release an ad-hoc lease at its deadline"
        PROBE_ACCOUNT = "probe_account", "ask a blocked account whether it works again"
        SETTLE_ORPHAN = "settle_orphan", "stop and keep the sandbox of a lease that nobody holds"
        DISPOSE = "dispose", "destroy a kept sandbox when nothing needs it any more"
        END_FENCE = "end_fence", "keep what a controller fenced when it went down and did not save"
        VERIFY_END = "verify_end", "find proof of an end that was never proven"
        WATCH_CONTROLLERS = "watch_controllers", "interrupt the runs whose controllers are gone"
        RECOVER_WORKSPACE = "recover_workspace", "reopen a stopped sandbox and save its files"
        END_RECOVERY = "end_recovery", "end a recovery of files whose time is over"
        WATCH_RESTART = "watch_restart", "see whether a sandbox runs whose restart was never answered"
        START_CONTINUATION = "start_continuation", "start the run that continues a failed one"
        CONFIRM_CANCEL = "confirm_cancel", "confirm a cancellation when the execution is proven ended"

    INNER = (
        Kind.STARTUP,
        Kind.END_LEASE,
        Kind.SETTLE_ORPHAN,
        Kind.DISPOSE,
        Kind.END_FENCE,
        Kind.WATCH_CONTROLLERS,
        Kind.END_RECOVERY,
        Kind.START_CONTINUATION,
        Kind.CONFIRM_CANCEL,
    )
    """Kinds that call no provider. They share the built-in lane (no account), where no account's trouble holds them."""

    STANDING = (
        Kind.DISPOSE,
        Kind.VERIFY_END,
        Kind.WATCH_CONTROLLERS,
        Kind.START_CONTINUATION,
        Kind.CONFIRM_CANCEL,
    )
    """Kinds that stand for long by their nature: their age alone escalates nothing."""

    class Verb(models.TextChoices):
        STOP_ONLY = "stop_only", "stop, never delete"
        STOP_OR_DELETE = "stop_or_delete", "stop, delete if that fails"
        DELETE = "delete"

    class ClosedAs(models.TextChoices):
        PROVEN = "proven", "a receipt proves it"
        UNVERIFIED = "unverified", "an operator ended the retries; the debt stays visible"
        HANDED_OVER = "handed_over", "another obligation took it over"
        NOTHING_OWED = "nothing_owed", "nothing was owed any more"
        DISOWNED = "disowned", "its sandbox is that of the installation which this database is a clone of"

    class Quiet(models.TextChoices):
        """Why a person is needed. The write that ends the fact wakes the row."""

        CREATION_NOT_FOUND = "creation_not_found", "look for it at the provider: its creation window passed unseen"
        NO_LOOKUP = "no_lookup", "find the sandbox by hand: this provider cannot look a creation up by name"
        FOREIGN_MARKS = "foreign_marks", "the sandbox carries another installation's marks; decide whose it is"
        IDENTITY_CONFLICT = (
            "identity_conflict",
            "a live lease already owns the sandbox that answered; decide whose it is",
        )
        INVALID_SNAPSHOT = "invalid_snapshot", "the recorded configuration no longer fits the provider's schema"
        CREDENTIAL_INACTIVE = "credential_inactive", "enable the credential: it is disabled, archived or not yet valid"
        CREDENTIAL_MISSING = "credential_missing", "provide the credential: it was deleted, or its store has none"
        CREDENTIAL_CHANGED = "credential_changed", "the secret is another one than the creation was asked with"
        COMPANY_CLOSED = "company_closed", "the company was closed; decide what becomes of its sandbox"
        MASS_LAPSE = "mass_lapse", "an unlikely share of the controllers lapsed at once: an outage of ours, or theirs?"
        UNACKNOWLEDGED = "unacknowledged", "a cancelled startup of the run ended, and nobody acknowledged it"
        OPERATOR_DECIDES = "operator_decides", "kept until you decide: destroy it, or say until when it is kept"
        DEADLINE_FIXED = (
            "deadline_fixed",
            "the provider will end it at its own deadline although it is held: save its files",
        )
        HISTORY_UNVERIFIED = "history_unverified", "no proof of its end was found in days: look at the provider"
        OBSERVING = "observing", "this database may be a restored or copied one: say which (trust_database)"
        WAITING = "waiting", "nothing to decide: woken when what it waits for ends"

    FOR_PEOPLE = tuple(why for why in Quiet.values if why != "waiting")
    """The reasons that put a row into the operator's queue."""

    id = models.BigAutoField(primary_key=True)
    company = models.ForeignKey(Company, null=True, blank=True, on_delete=models.PROTECT)
    kind = models.CharField(max_length=20, choices=Kind.choices)
    account = models.ForeignKey(
        ProviderAccount, null=True, blank=True, on_delete=models.PROTECT, related_name="obligations"
    )
    lease = models.ForeignKey(Lease, null=True, blank=True, on_delete=models.PROTECT, related_name="obligations")
    operation = models.ForeignKey(
        Operation, null=True, blank=True, on_delete=models.PROTECT, related_name="obligations"
    )
    probed_account = models.ForeignKey(
        ProviderAccount, null=True, blank=True, on_delete=models.PROTECT, related_name="probes"
    )
    run = models.ForeignKey(Run, null=True, blank=True, on_delete=models.PROTECT, related_name="obligations")
    continuation = models.ForeignKey(
        Continuation, null=True, blank=True, on_delete=models.PROTECT, related_name="obligations"
    )
    installation = models.ForeignKey(
        Installation, null=True, blank=True, on_delete=models.PROTECT, related_name="obligations"
    )

    verb = models.CharField(
        max_length=20, choices=Verb.choices, blank=True, help_text="What is demanded, or was when it ended unproven."
    )
    held_verb = models.CharField(
        max_length=20, choices=Verb.choices, blank=True, help_text="What was demanded before a hold forbade it."
    )
    drain_until = models.DateTimeField(null=True, blank=True)
    delete_announced_at = models.DateTimeField(
        null=True, blank=True, help_text="When a destroying call was first announced."
    )
    absent_since = models.DateTimeField(
        null=True, blank=True, help_text="When the first of the looks in a row was that did not find the sandbox."
    )

    due_at = models.DateTimeField(null=True, blank=True)
    not_before = models.DateTimeField(
        null=True, blank=True, help_text="No wake makes it due earlier; only a person's request does."
    )
    owed_since = models.DateTimeField(db_default=Now(), editable=False)
    attempt_id = models.UUIDField(null=True, blank=True)
    worker = models.CharField(max_length=200, null=True, blank=True)  # noqa: DJ001 - null together with attempt_id
    claimed_at = models.DateTimeField(null=True, blank=True)
    wakes = models.PositiveBigIntegerField(default=0)
    requests = models.PositiveIntegerField(default=0, help_text="Attempts that a person asked for (Stop, Retry).")
    requests_served = models.PositiveIntegerField(default=0)
    failures = models.PositiveIntegerField(default=0)
    busy_count = models.PositiveIntegerField(default=0)
    last_error_kind = models.CharField(max_length=20, blank=True)
    escalated_at = models.DateTimeField(null=True, blank=True)
    quiet = models.CharField(max_length=20, choices=Quiet.choices, blank=True)
    closed_at = models.DateTimeField(null=True, blank=True)
    closed_as = models.CharField(max_length=20, choices=ClosedAs.choices, blank=True)

    class Meta:
        constraints = [
            models.CheckConstraint(
                condition=_has_only("lease", kind__in=_OF_LEASE)
                | _has_only("operation", kind__in=["recover_creation", "recover_start"])
                | _has_only("run", kind__in=["startup", "confirm_cancel"])
                | _has_only("continuation", kind="start_continuation")
                | _has_only("installation", kind="watch_controllers")
                | _has_only("probed_account", kind="probe_account") & Q(probed_account=F("account")),
                name="obligation_has_the_subject_of_its_kind",
            ),
            models.CheckConstraint(
                condition=Q(account__isnull=False) | Q(kind__in=_INNER), name="obligation_names_whom_it_calls"
            ),
            models.CheckConstraint(
                condition=Q(company__isnull=False) | Q(installation__isnull=False),
                name="obligation_names_its_company",
            ),
            models.CheckConstraint(
                condition=Q(attempt_id__isnull=True, worker__isnull=True, claimed_at__isnull=True)
                | Q(attempt_id__isnull=False, worker__isnull=False, claimed_at__isnull=False),
                name="obligation_claim_is_whole",
            ),
            models.CheckConstraint(
                condition=(Q(due_at__isnull=True) & (~Q(quiet="") | Q(closed_at__isnull=False)))
                | (Q(due_at__isnull=False) & Q(quiet="") & Q(closed_at__isnull=True)),
                name="obligation_is_due_unless_quiet_or_closed",
            ),
            models.CheckConstraint(
                condition=Q(due_at__isnull=False) | Q(attempt_id__isnull=True),
                name="obligation_claimed_only_while_due",
            ),
            models.CheckConstraint(
                condition=Q(closed_at__isnull=True, closed_as="") | (Q(closed_at__isnull=False) & ~Q(closed_as="")),
                name="obligation_closes_as_something",
            ),
            models.CheckConstraint(
                condition=Q(kind="teardown", verb__in=["stop_only", "stop_or_delete", "delete"])
                # What was demanded when it ended unproven: should it be found alive, that is owed again.
                | Q(
                    kind="verify_end",
                    verb__in=["stop_only", "stop_or_delete", "delete"],
                    held_verb="",
                    drain_until__isnull=True,
                )
                | ~Q(kind__in=["teardown", "verify_end"]) & Q(verb="", held_verb="", drain_until__isnull=True),
                name="obligation_verb_is_a_teardowns",
            ),
            models.CheckConstraint(
                condition=Q(kind__in=["teardown", "verify_end"]) | Q(absent_since__isnull=True),
                name="obligation_absence_is_a_teardowns",
            ),
            models.CheckConstraint(
                condition=Q(requests_served__lte=F("requests")), name="obligation_serves_what_was_requested"
            ),
            models.UniqueConstraint(
                fields=["lease", "kind"],
                condition=Q(closed_at__isnull=True, lease__isnull=False),
                name="obligation_is_one_per_lease_and_kind",
            ),
            models.UniqueConstraint(
                fields=["operation", "kind"],
                condition=Q(closed_at__isnull=True, operation__isnull=False),
                name="obligation_is_one_per_operation_and_kind",
            ),
            models.UniqueConstraint(
                fields=["probed_account", "kind"],
                condition=Q(closed_at__isnull=True, probed_account__isnull=False),
                name="obligation_is_one_per_account_and_kind",
            ),
            models.UniqueConstraint(
                fields=["run", "kind"],
                condition=Q(closed_at__isnull=True, run__isnull=False),
                name="obligation_is_one_per_run_and_kind",
            ),
            models.UniqueConstraint(
                fields=["continuation", "kind"],
                condition=Q(closed_at__isnull=True, continuation__isnull=False),
                name="obligation_is_one_per_continuation_and_kind",
            ),
            models.UniqueConstraint(
                fields=["installation", "kind"],
                condition=Q(closed_at__isnull=True, installation__isnull=False),
                name="obligation_is_one_per_installation_and_kind",
            ),
            models.UniqueConstraint(
                fields=["attempt_id"], condition=Q(attempt_id__isnull=False), name="obligation_attempt_is_its_own"
            ),
        ]
        permissions = [("settle_unverified", "Can settle obligation without proof")]
        indexes = [
            # What the claim and the beat's alarm read: open rows only, so that history costs them nothing.
            # Verification of history, of which there may be much, has one of its own and is not stepped over.
            models.Index(
                fields=["account", "due_at"],
                condition=Q(due_at__isnull=False) & ~Q(kind="verify_end"),
                name="obligation_due",
            ),
            models.Index(
                fields=["account", "due_at"],
                condition=Q(due_at__isnull=False, kind="verify_end"),
                name="obligation_verified",
            ),
            models.Index(fields=["account"], condition=Q(requests__gt=F("requests_served")), name="obligation_urgent"),
            models.Index(
                fields=["account", "due_at"], condition=Q(attempt_id__isnull=False), name="obligation_claimed"
            ),
            models.Index(fields=["kind"], condition=Q(closed_at__isnull=True), name="obligation_open"),
            # What a person is to look at, and what a credential's change wakes.
            models.Index(fields=["company"], condition=~Q(quiet=""), name="obligation_quiet"),
        ]

    def __str__(self) -> str:
        return f"{self.kind} #{self.pk}"

    @property
    def is_open(self) -> bool:
        return self.closed_at is None


class Attempt(models.Model):
    """One claim of an obligation. `announced_*` is the last call about to be made, written before it is sent."""

    class Outcome(models.TextChoices):
        PROVEN = "proven"
        FAILED = "failed"
        BUSY = "busy"
        DRAINING = "draining"
        NOT_SEEN = "not_seen", "not seen yet"
        EXTENDED = "extended", "the provider's deadline was moved"
        HELD = "held", "somebody still needs it, or its time has not come"
        NOTHING_OWED = "nothing_owed", "nothing owed any more"
        HANDED_OVER = "handed_over", "handed over"
        HANDED_BACK = "handed_back", "handed back unworked"
        QUIETED = "quieted", "a person is needed"
        WAITING = "waiting", "waits for what other rows say"
        SUPERSEDED = "superseded", "its protection ended and another attempt took over"

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    company = models.ForeignKey(Company, null=True, blank=True, on_delete=models.PROTECT)
    obligation = models.ForeignKey(Obligation, on_delete=models.PROTECT, related_name="attempts")
    worker = models.CharField(max_length=200)
    claimed_at = models.DateTimeField(db_default=Now(), editable=False)
    announced_call = models.CharField(max_length=20, blank=True)
    announced_at = models.DateTimeField(null=True, blank=True)
    announced_epoch = models.PositiveIntegerField(null=True, blank=True)
    finished_at = models.DateTimeField(null=True, blank=True)
    outcome = models.CharField(max_length=12, choices=Outcome.choices, blank=True)
    error_kind = models.CharField(max_length=20, blank=True)
    error_excerpt = models.CharField(max_length=300, blank=True)

    class Meta:
        constraints = [
            models.CheckConstraint(
                condition=Q(finished_at__isnull=True, outcome="") | (Q(finished_at__isnull=False) & ~Q(outcome="")),
                name="attempt_finishes_with_an_outcome",
            ),
        ]
        indexes = [
            models.Index(fields=["obligation", "claimed_at"], name="attempt_history"),
            models.Index(fields=["-claimed_at"], name="attempt_newest_first"),
        ]

    def __str__(self) -> str:
        return f"attempt {self.id} ({self.outcome or 'running'})"
