"""The admission of a saved message or a retry: one queued run when every gate is open, else why it waits.

Asks no provider. Row locks are taken without waiting, in the order of locks: the task, the runs that have to be over,
their leases, what is owed. The task's is `FOR UPDATE`, alone among the locks of our code: a run that comes to life on a
task takes the task `FOR KEY SHARE` before it is there (triggers `run_is_born_alone` and `run_comes_to_life_alone`; its
foreign keys would do so at commit, too late), and only `FOR UPDATE` excludes that. So a run that is being inserted is
met here as a lock; one that is inserted meanwhile waits, and is refused where the new run continues the task by then.
Two admissions of one task exclude each other likewise, and the second finds nothing waiting.

Nothing polls. Whatever opens a gate is a write that wakes this row, in the database; all that was woken before the
locks is evaluated under them, and a wake that comes later finds the row quiet, or moves its count. Only the end of a
controller's hold is a time.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any
from uuid import UUID

from cleanup.claims import Claim, fenced
from cleanup.locking import also_locked, without_waiting
from cleanup.work import Call, Context, Done, Held, Outcome, Waiting
from leases import continuing, gates, recovering
from leases.gates import Answer, Facts, Files, Gate
from leases.models import Continuation, Issue, Lease, Obligation, Recovery, RecoveryAction, Run

NEXT_TO_OPEN = gates.GATES[-1]
"""The last gate: what closes it alone is opened from here, by beginning to save the files."""

_NEVER = frozenset({"no_archives", "not_kept"})
"""Why a generation can never begin, so that the work goes on without the files. The rest passes, and wakes this row."""


def start_continuation(claim: Claim, _: Context) -> Generator[Call, Any, Outcome]:
    """Start the run of one continuation, with all of its task that may start by now, or say what it waits for."""
    yield from ()
    return without_waiting(lambda: _settle(claim))


def _settle(claim: Claim) -> Outcome:
    issue_id = Continuation.objects.values_list("issue_id", flat=True).get(pk=claim.continuation)
    Issue.objects.select_for_update(nowait=True).get(pk=issue_id)
    waiting = list(
        Continuation.objects.filter(issue_id=issue_id, state=Continuation.State.WAITING).order_by("requested_at", "pk")
    )
    actions = list(
        RecoveryAction.objects.select_for_update(no_key=True, nowait=True, of=("self",))
        .filter(issue_id=issue_id, closed_at__isnull=True)
        .order_by("opened_at", "pk")
    )
    runs = _locked_runs(waiting, actions)
    also_locked(Lease.objects.filter(run__in=runs))
    _lock_what_is_woken(issue_id, waiting)
    row = fenced(claim)
    mine = next((one for one in waiting if one.pk == claim.continuation), None)
    if row is None or mine is None:
        return Done(proven=False)
    refused = _begin_to_save(mine, actions, runs)
    row.refresh_from_db(fields=["wakes"])
    claim.wakes = row.wakes  # what those wakes told of, this transaction's own among them, is evaluated here
    facts, shut = _evaluate(mine, actions, runs, refused)
    if shut is not None:
        gate, answer = shut
        continuing.hold(mine, gate.code, gate.sentence(answer), facts.files.bound)
        return Waiting() if answer.until is None else Held(answer.until)
    joined, files, bound = [mine], {mine.pk: facts.files}, {mine.pk: facts.files.bound}
    for other in waiting:
        if other.pk != mine.pk:
            their_facts, their_shut = _evaluate(other, actions, runs, refused)
            if their_shut is None:
                files[other.pk] = their_facts.files
            # Who waits for nothing but the files goes along without them: what blocked the task is closed by this run,
            # and there would be nothing left to continue.
            if their_shut is None or their_shut[0] is NEXT_TO_OPEN:
                joined.append(other)
                bound[other.pk] = their_facts.files.bound
    _start(joined, list(files.values()), bound, facts, actions, runs)
    return Done(proven=True)


def _start(
    joined: Sequence[Continuation],
    files: Sequence[Files],
    bound: dict[UUID, Recovery | None],
    facts: Facts,
    actions: Sequence[RecoveryAction],
    runs: Sequence[Run],
) -> None:
    """Start one run for all of these. It goes on from the named run that ended last, afresh where one has to."""
    named = {one.run_id for one in joined}
    source = max((run for run in runs if run.pk in named), key=lambda run: run.finished_at or run.created_at)
    wanted = {one.readiness for one in files}
    readiness = next(
        one
        for one in (
            Continuation.Readiness.FRESH_ISOLATED_WORKSPACE,
            Continuation.Readiness.FILES_RECOVERED,
            Continuation.Readiness.SAME_WORKSPACE,
        )
        if one in wanted
    )
    assert facts.issue is not None  # noqa: S101 - the gates that were open say so
    continuing.start(
        joined,
        source=source,
        agent=facts.issue.assignee or "",
        readiness=readiness,
        recoveries=bound,
        actions=actions,
    )


def _evaluate(
    row: Continuation, actions: Sequence[RecoveryAction], runs: Sequence[Run], refused: set[UUID]
) -> tuple[Facts, tuple[Gate, Answer] | None]:
    facts = gates.read(row, actions=actions, sources=runs, files=gates.files_of(row, unrecoverable=refused))
    return facts, gates.first_closed(facts)


def _begin_to_save(mine: Continuation, actions: Sequence[RecoveryAction], runs: Sequence[Run]) -> set[UUID]:
    """Begin to save the files where that is all that is missing. Returns the leases whose files cannot be saved.

    A generation that ran before is never begun anew from here: an exhausted one says to go on without the files, and
    another would repeat what was refused (S-243). One that an operator begins is the newest then, and is waited for.
    """
    refused: set[UUID] = set()
    facts, shut = _evaluate(mine, actions, runs, refused)
    if shut is None or shut[0] is not NEXT_TO_OPEN or facts.files.running is not None:
        return refused
    for lease in facts.files.unsaved:
        try:
            recovering.begin(lease, requested_by=mine.requested_by, reason="")
        except recovering.CannotRecover as why:  # refused before anything was written
            if why.code in _NEVER:
                refused.add(lease.pk)
    return refused


def _locked_runs(waiting: Sequence[Continuation], actions: Sequence[RecoveryAction]) -> list[Run]:
    named = {one.run_id for one in waiting} | {one.run_id for one in actions if one.run_id is not None}
    runs = Run.objects.select_for_update(no_key=True, nowait=True, of=("self",)).filter(pk__in=named)
    return list(runs.order_by("pk"))


def _lock_what_is_woken(issue_id: UUID, waiting: Sequence[Continuation]) -> None:
    """Lock the rows that the triggers of what is written here wake, so that those wait for nobody either."""
    kinds = (Obligation.Kind.DISPOSE, Obligation.Kind.SETTLE_ORPHAN)
    owed = Obligation.objects.select_for_update(no_key=True, nowait=True, of=("self",)).filter(closed_at__isnull=True)
    list(owed.filter(lease__issue_id=issue_id, kind__in=kinds).order_by("lease_id", "pk"))
    list(owed.filter(continuation__in=[one.pk for one in waiting]).order_by("pk"))
