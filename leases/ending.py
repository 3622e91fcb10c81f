"""Whether the execution of a run has ended: the one question that admission and cancellation ask (domain 4.5).

It has when the run is over, each of its leases has proof of its own, and nothing that was asked for on its behalf is
unresolved; and when there is something to have ended at all. A status, a process that is gone, a process id that
belongs to somebody else by now, or an elapsed time are not asked about: none of them is proof.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from django.db.models import Exists, OuterRef, Q, QuerySet, Subquery, TextField, Value
from django.db.models.functions import Cast

from leases import arguments, proof
from leases.errors import NotFound
from leases.models import Lease, Obligation, Operation, Receipt, Run

SHOWN = 3
"""How many of the things that are missing a sentence tells; the rest it counts."""

_SETTLED = (Lease.State.RELEASED, Lease.State.RETAINED, Lease.State.EXPIRED, Lease.State.FAILED)


_RUN = "run"


class What(enum.StrEnum):
    """What is missing before the execution of a run has ended."""

    RUN_LIVE = "run_live"
    NOTHING_STARTED = "nothing_started"
    LEASE_UNPROVEN = "lease_unproven"
    LEASE_GIVEN_UP = "lease_given_up"
    OPERATION_PENDING = "operation_pending"
    OPERATION_UNVERIFIED = "operation_unverified"
    OPERATION_DISOWNED = "operation_disowned"
    STARTUP_OPEN = "startup_open"
    STARTUP_UNVERIFIED = "startup_unverified"


_SENTENCES = {
    What.RUN_LIVE: "the run is not over ({detail})",
    What.NOTHING_STARTED: "the run has no lease, and no creation of it was refused: nothing says what became of it",
    What.LEASE_UNPROVEN: "lease {subject} ({detail}) has no proof that its sandbox ended",
    What.LEASE_GIVEN_UP: "the teardown of lease {subject} was ended without proof, and nothing proved it since",
    What.OPERATION_PENDING: "it is not known yet what became of {detail} {subject}",
    What.OPERATION_UNVERIFIED: "the search for {detail} {subject} was ended without proof, and nothing proved it since",
    What.OPERATION_DISOWNED: "the sandbox of {detail} {subject} is another installation's, and nothing proves its end",
    What.STARTUP_OPEN: "a startup of the run that outlived its caller has not come to its end",
    What.STARTUP_UNVERIFIED: "a startup of the run was ended without proof, and nothing proved it since",
}
_THINGS: dict[str, str] = {Operation.Kind.CREATE: "creation", Operation.Kind.START: "start"}


@dataclass(frozen=True, slots=True)
class Missing:
    """One thing that is missing. `subject` is the id of the lease, operation or obligation, or of the run itself."""

    what: What
    subject: str
    detail: str = ""

    @property
    def sentence(self) -> str:
        return _SENTENCES[self.what].format(subject=self.subject, detail=_THINGS.get(self.detail, self.detail))


@dataclass(frozen=True, slots=True)
class Ending:
    """Whether the execution of a run has ended, and what is missing where it has not."""

    run_id: UUID
    missing: tuple[Missing, ...]

    @property
    def ended(self) -> bool:
        return not self.missing

    @property
    def sentence(self) -> str:
        """What is missing, for people; at most `SHOWN` things in words."""
        if self.ended:
            return "the execution of the run is proven ended"
        told = "; ".join(one.sentence for one in self.missing[:SHOWN])
        more = len(self.missing) - SHOWN
        return f"{told}; and {more} more" if more > 0 else told


def execution_ended(run_id: UUID, company_id: UUID | None = None) -> Ending:
    """Return whether the execution of a run has ended, with all that is missing. One statement. Raises `NotFound`.

    The answer is of one moment: it is read in one snapshot, so that a sandbox which passes from an operation to its
    lease meanwhile is seen in one of the two. It decides for good only in the transaction that took `locked_for`
    before: see there.
    """
    run_id = arguments.identity(run_id, "run_id")
    company_id = arguments.identity(company_id, "company_id") if company_id is not None else None
    rows = list(facts(run_id, company_id))
    status = next((detail for kind, _, detail in rows if kind == _RUN), None)
    if status is None:
        raise NotFound(f"no run {run_id}" + (" in this company" if company_id is not None else ""))
    missing = [Missing(What(kind), subject, detail) for kind, subject, detail in sorted(rows) if kind != _RUN]
    missing.sort(key=lambda one: list(What).index(one.what))
    if status in Run.LIVE:
        missing.insert(0, Missing(What.RUN_LIVE, str(run_id), status))
    return Ending(run_id, tuple(missing))


def locked_for(run_id: UUID, *, nowait: bool = False) -> Run | None:
    """Lock and return a run, then its leases by id, in the caller's transaction; None where there is no such run.

    Under these locks what `execution_ended` says stays so until the transaction ends. Everything that could take an end
    back needs one of them: a run becomes live again, and begins a creation or a start, under the run's lock; a start of
    one of its sandboxes by anybody, a recovery of its files, a sighting and a reopened teardown raise the epoch, or are
    journalled, under the lease's. A lease that is made for a sandbox that turned up was an unresolved operation before.
    What a provider that breaks its word brings forth later (a second sandbox of one creation) is no part of that end:
    it is an operation of its own, and owned when it is learned of.

    `nowait` raises Django's `OperationalError` where somebody holds one of them. The issue, where the caller locks it,
    comes before.
    """
    run = Run.objects.select_for_update(no_key=True, nowait=nowait).filter(pk=run_id).first()
    if run is not None:
        of_run = Lease.objects.select_for_update(no_key=True, nowait=nowait, of=("self",)).filter(run_id=run_id)
        list(of_run.order_by("pk").values_list("pk", flat=True))
    return run


def facts(run_id: UUID, company_id: UUID | None = None) -> QuerySet[Any, tuple[str, str, str]]:
    """Return the query behind `execution_ended`: a row for the run itself, and one for each thing that is missing."""
    runs = Run.objects.filter(pk=run_id)
    if company_id is not None:
        runs = runs.filter(company_id=company_id)
    leases = Lease.objects.filter(run_id=run_id)
    operations = Operation.objects.filter(run_uuid=run_id)
    startups = Obligation.objects.filter(run_id=run_id, kind=Obligation.Kind.STARTUP)
    unverified = Q(closed_as=Obligation.ClosedAs.UNVERIFIED)
    unpaid = unverified & ~proof.paid_since()
    of_operation = Obligation.objects.filter(operation=OuterRef("pk"))
    given_up = Q(state=Operation.State.UNVERIFIED)
    is_paid = Exists(of_operation.filter(unverified & proof.paid_since()))
    came_to_nothing = operations.filter(Q(state=Operation.State.RESOLVED, lease__isnull=True) | given_up & Q(is_paid))
    # Whatever is asked of a provider is journalled before, and nothing is any more once a cancellation was asked for.
    # So where the journal is empty by then, nothing of the run exists, and nothing will.
    never_begun = Q(cancel_requested_at__isnull=False) & ~Q(Exists(operations))
    return _rows(runs, _RUN, "status").union(
        _rows(runs.filter(~Exists(leases), ~Exists(came_to_nothing), ~never_begun), What.NOTHING_STARTED),
        _rows(leases.exclude(_is_ended()), What.LEASE_UNPROVEN, "state"),
        _rows(Obligation.objects.filter(unpaid, lease__run_id=run_id), What.LEASE_GIVEN_UP, subject="lease_id"),
        _rows(operations.filter(state=Operation.State.PENDING), What.OPERATION_PENDING, "kind"),
        _rows(operations.filter(given_up & ~Q(is_paid)), What.OPERATION_UNVERIFIED, "kind"),
        _rows(
            operations.filter(Exists(of_operation.filter(closed_as=Obligation.ClosedAs.DISOWNED))),
            What.OPERATION_DISOWNED,
            "kind",
        ),
        _rows(startups.filter(closed_at__isnull=True), What.STARTUP_OPEN),
        _rows(startups.filter(unpaid), What.STARTUP_UNVERIFIED),
        all=True,
    )


def _rows(rows: QuerySet[Any], kind: str, detail: str = "", *, subject: str = "pk") -> QuerySet[Any, Any]:
    said: Any = Cast(detail, TextField()) if detail else Value("", TextField())
    return rows.order_by().values_list(Value(str(kind), TextField()), Cast(subject, TextField()), said)


def _is_ended() -> Q:
    """Whether a lease has proof of its own that nothing executes in its sandbox on its behalf (domain 4.2, 4.4).

    One that a successor took over ended in its own epoch, with its own receipt, and what becomes of the sandbox since
    is the successor's. While a teardown is open, what it finds proves nothing before it settled with it; but what was
    proven before that teardown was owed stays proven: a kept sandbox whose disposal began has not begun to run.
    """
    own = Receipt.objects.filter(lease=OuterRef("pk"), epoch=OuterRef("epoch"))
    teardown = Obligation.objects.filter(
        lease=OuterRef("lease"), kind=Obligation.Kind.TEARDOWN, closed_at__isnull=True
    ).values("owed_since")
    return (
        Q(Exists(own), successor__isnull=False)
        | Q(Exists(proof.of_each()), successor__isnull=True, state__in=_SETTLED)
        | Q(Exists(proof.of_each().filter(confirmed_at__lt=Subquery(teardown))), state=Lease.State.PENDING_CLEANUP)
    )
