"""The gates between a saved message or a retry and the run that it starts: one list, in the order of domain 9.5.

Each is a pure function of facts that `read` collected, under the locks of the caller. The first closed one is the hold,
with its code and a sentence for people; a fact that was never told closes its gate too. What may open one is a write,
which wakes the continuation in the database, or a time, which the answer says. Ids of processes are no fact: on a
remote run they may be the number of anything here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from leases import archives, fencing, proof
from leases.clock import database_now
from leases.ending import execution_ended
from leases.holds import FOREVER
from leases.models import Archive, Continuation, IssueFacts, Lease, Recovery, RecoveryAction, Run, RunFacts

Kind = Continuation.Kind
Coordinator = RunFacts.Coordinator


@dataclass(frozen=True, slots=True)
class Answer:
    """What one gate says. `until`: only time opens it, and then; `detail` says more than its own sentence."""

    is_open: bool
    is_told: bool = True
    until: datetime | None = None
    detail: str = ""


OPEN, CLOSED, NOT_TOLD = Answer(is_open=True), Answer(is_open=False), Answer(is_open=False, is_told=False)


@dataclass(frozen=True, slots=True)
class Source:
    """A run that has to be over and settled: the named one, and that of each open recovery action of the task."""

    run: Run
    facts: RunFacts | None
    has_ended: bool
    ended_sentence: str
    fenced_by: str = ""
    """The controller that went down and may still save the files of one of its sandboxes."""


@dataclass(frozen=True, slots=True)
class Files:
    """What became of the files of the named run.

    `kept` are its kept leases whose files nobody gets by reuse, `newest` the newest generation of each of its leases.
    `lost`: a sandbox was destroyed that was to be kept, or cannot be recovered at all.
    """

    kept: tuple[Lease, ...] = ()
    newest: tuple[Recovery, ...] = ()
    lost: bool = False

    @property
    def running(self) -> Recovery | None:
        return next((one for one in self.newest if one.state == Recovery.State.RUNNING), None)

    @property
    def unsaved(self) -> tuple[Lease, ...]:
        """The leases for which no generation was ever begun."""
        begun = {one.lease_id for one in self.newest}
        return tuple(lease for lease in self.kept if lease.pk not in begun)

    @property
    def bound(self) -> Recovery | None:
        """The generation that decides: a running one, else an exhausted one, else a complete one."""
        order = [Recovery.State.RUNNING, Recovery.State.EXHAUSTED, Recovery.State.COMPLETE]
        return min(self.newest, key=lambda one: order.index(Recovery.State(one.state)), default=None)

    @property
    def readiness(self) -> Continuation.Readiness:
        """In what workspace the run begins, once no generation runs any more."""
        if self.lost or any(one.state == Recovery.State.EXHAUSTED for one in self.newest):
            return Continuation.Readiness.FRESH_ISOLATED_WORKSPACE
        if self.newest:
            return Continuation.Readiness.FILES_RECOVERED
        return Continuation.Readiness.SAME_WORKSPACE


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that the gates of one continuation look at. `by_user` and `kind` are as they were asked for."""

    by_user: bool
    kind: str
    issue_id: UUID
    authored_at: datetime | None
    issue: IssueFacts | None
    run: Run
    actions: tuple[RecoveryAction, ...]
    sources: tuple[Source, ...]
    live: tuple[Run, ...]
    files: Files
    now: datetime


@dataclass(frozen=True, slots=True)
class Gate:
    """One gate: its code, when it is open (for the table in `docs/continuing.md`), and what is said while it is not."""

    code: str
    opens: str
    closed: str
    untold: str
    look: Callable[[Facts], Answer]

    def sentence(self, answer: Answer) -> str:
        """Return why it is closed, for people."""
        if not answer.is_told:
            return f"{self.untold} ({answer.detail})" if answer.detail else self.untold
        return f"{self.closed}: {answer.detail}" if answer.detail else self.closed


def first_closed(facts: Facts) -> tuple[Gate, Answer] | None:
    """Return the first gate that is closed, and its answer; None where all are open."""
    for gate in GATES:
        answer = gate.look(facts)
        if not answer.is_open:
            return gate, answer
    return None


def _every(answers: Iterable[Answer]) -> Answer:
    """Open where all are; else the one that says the most: closed before not told, and the latest time."""
    closed = [answer for answer in answers if not answer.is_open]
    told = [answer for answer in closed if answer.is_told]
    if not closed:
        return OPEN
    return max(told or closed, key=lambda answer: answer.until or FOREVER)


def _if(holds: bool | None) -> Answer:  # noqa: FBT001 - private
    return NOT_TOLD if holds is None else OPEN if holds else CLOSED


# The gates


def _user(facts: Facts) -> Answer:
    return _if(facts.by_user)


def _kind(facts: Facts) -> Answer:
    return _if(facts.kind in Kind.values)


def _task_is_open(facts: Facts) -> Answer:
    return _if(facts.issue.is_open if facts.issue else None)


def _same_assignee(facts: Facts) -> Answer:
    if facts.issue is None or facts.issue.assignee is None or not facts.run.agent:
        return NOT_TOLD
    return _if(facts.issue.assignee == facts.run.agent)


def _is_blocked(facts: Facts) -> Answer:
    return _if(bool(facts.actions))


def _decided(facts: Facts) -> Answer:
    if facts.issue is None or facts.issue.decisions_pending is None:
        return NOT_TOLD
    return _if(facts.issue.decisions_pending == 0)


def _sources_are_known(facts: Facts) -> Answer:
    known = {source.run.pk for source in facts.sources}
    return _if(all(action.run_id in known for action in facts.actions))


def _sources_are_over(facts: Facts) -> Answer:
    return _if(all(not source.run.is_live and source.run.finished_at is not None for source in facts.sources))


def _sources_are_the_tasks(facts: Facts) -> Answer:
    if any(source.run.issue_id != facts.issue_id for source in facts.sources):
        return CLOSED
    return _every(
        _if(source.run.agent == facts.run.agent) if source.run.agent else NOT_TOLD for source in facts.sources
    )


def _message_is_newer(facts: Facts) -> Answer:
    if facts.kind != Kind.COMMENT or facts.authored_at is None:
        return OPEN
    ends = [source.run.finished_at for source in facts.sources]
    return _if(all(end is not None and facts.authored_at > end for end in ends))


def _nobody_controls(facts: Facts) -> Answer:
    return _every(_control_of(source, facts.now) for source in facts.sources)


def _control_of(source: Source, now: datetime) -> Answer:
    if source.facts is None or source.facts.adapter_attached is None:
        return NOT_TOLD
    if source.facts.adapter_attached:
        return CLOSED
    if source.fenced_by:
        return Answer(is_open=False, detail=f"{source.fenced_by} went down and may still save its files")
    # Our own word for it. The run is over, so nobody could renew the hold since: an outage of ours lengthens nothing.
    until, given_up = source.run.controller_expires_at, source.run.controller_gave_up_at is not None
    if until is None or given_up or until <= now:
        return OPEN
    return Answer(is_open=False, until=until, detail=f"{source.run.controller_id} holds the run")


def _is_settled(facts: Facts) -> Answer:
    return _every(_settlement_of(source.facts) for source in facts.sources)


def _settlement_of(facts: RunFacts | None) -> Answer:
    if facts is None or not facts.coordinator:
        return Answer(is_open=False, is_told=False, detail="coordinator")
    if facts.coordinator_owner is None:
        return Answer(is_open=False, is_told=False, detail="coordinator_owner")
    if facts.coordinator_owner:
        return CLOSED
    if facts.coordinator == Coordinator.COMMITTED:
        if facts.accepted_failed_result is None:
            return Answer(is_open=False, is_told=False, detail="accepted_failed_result")
        return _if(facts.accepted_failed_result)
    return _if(facts.coordinator == Coordinator.TERMINAL_FAILURE)


def _execution_has_ended(facts: Facts) -> Answer:
    # A recovery takes the proof back for as long as it restarts the sandbox. It is told as what it is: the last gate is
    # closed exactly while it runs, which was read under the same lock.
    saved = facts.run.pk if facts.files.running is not None else None
    return _every(
        OPEN if source.has_ended or source.run.pk == saved else Answer(is_open=False, detail=source.ended_sentence)
        for source in facts.sources
    )


def _is_alone(facts: Facts) -> Answer:
    return _if(not facts.live)


def _history_is_there(facts: Facts) -> Answer:
    return _every(_if(source.facts.history_available if source.facts else None) for source in facts.sources)


def _files_are_decided(facts: Facts) -> Answer:
    return _if(facts.files.running is None and not facts.files.unsaved)


GATES: tuple[Gate, ...] = (
    Gate(
        "not_a_user",
        "a user asks",
        "only a user can continue a failed run",
        "it was not said whether a user asks",
        _user,
    ),
    Gate(
        "kind_unknown",
        "it is a retry of a named run, a new comment, or a message that the server recorded as queued",
        "it is neither a retry nor a message",
        "it was not said what it is",
        _kind,
    ),
    Gate(
        "task_closed",
        "the task is open",
        "the task is closed",
        "whether the task is open was not told",
        _task_is_open,
    ),
    Gate(
        "task_reassigned",
        "the task is assigned to the agent whose run it was",
        "the task is not assigned to the run's agent any more",
        "whose the task is, or whose run it was, was not told",
        _same_assignee,
    ),
    Gate(
        "action_missing",
        "an open recovery action blocks the task",
        "no open recovery action blocks the task: there is nothing to continue",
        "no open recovery action blocks the task: there is nothing to continue",
        _is_blocked,
    ),
    Gate(
        "decision_pending",
        "no approval and no question is pending",
        "an approval or a question waits for an answer",
        "whether a decision is pending was not told",
        _decided,
    ),
    Gate(
        "source_missing",
        "each open recovery action names its run",
        "a recovery action does not say which run it is about",
        "a recovery action does not say which run it is about",
        _sources_are_known,
    ),
    Gate(
        "source_running",
        "these runs are over, and when they ended is known",
        "a run that failed is not over yet, or when it ended is not known",
        "when the run ended was not told",
        _sources_are_over,
    ),
    Gate(
        "source_mismatch",
        "they are of the same agent and the same task",
        "a run that blocks the task is another agent's or another task's",
        "whose a run is that blocks the task was not told",
        _sources_are_the_tasks,
    ),
    Gate(
        "message_predates_stop",
        "a comment was written after they ended; one that was recorded as queued need not be",
        "the message was written before the run ended",
        "when the message was written was not told",
        _message_is_newer,
    ),
    Gate(
        "controller_settling",
        "no adapter controls them any more, no controller's hold on them stands, and no shutdown fence",
        "the run is still under somebody's control",
        "whether an adapter still controls the run was not told",
        _nobody_controls,
    ),
    Gate(
        "execution_settling",
        "their results are settled as failed, and nobody is at work on them",
        "the result of the run is not settled yet",
        "how far the result of the run is settled was not told",
        _is_settled,
    ),
    Gate(
        "remote_cleanup",
        "the end of their execution is proven",
        "the execution is not proven to have ended",
        "the execution is not proven to have ended",
        _execution_has_ended,
    ),
    Gate(
        "execution_active",
        "no other run of the task is queued, scheduled or running",
        "another run of the task is not over",
        "another run of the task is not over",
        _is_alone,
    ),
    Gate(
        "source_unavailable",
        "their history can be read",
        "the history of the run cannot be read",
        "whether the history of the run can be read was not told",
        _history_is_there,
    ),
    Gate(
        "workspace_repair_required",
        "their files are saved, or it is decided that the work goes on without them",
        "the files of the run are being saved",
        "the files of the run are being saved",
        _files_are_decided,
    ),
)


# Reading


def sources_of(named: Iterable[Run], actions: Iterable[RecoveryAction]) -> set[UUID]:
    """Return the ids of the runs that have to be over and settled."""
    return {run.pk for run in named} | {action.run_id for action in actions if action.run_id is not None}


def files_of(continuation: Continuation, *, unrecoverable: Iterable[UUID] = ()) -> Files:
    """Return what is known of the named run's files. `unrecoverable` are leases for which no generation can begin.

    Asked for only where the files are wanted. A released sandbox that the next run gets by its scope needs no saving:
    it brings its files along. One that is retained, that nobody held, or that nobody's scope fits, can only be read.
    """
    if not continuation.recovers_files:
        return Files()
    passed_over = set(unrecoverable)
    leases = list(Lease.objects.filter(run_id=continuation.run_id).select_related("environment").order_by("pk"))
    kept = tuple(
        lease
        for lease in leases
        if lease.state in Lease.KEPT and lease.pk not in passed_over and not _will_be_used_again(lease)
    )
    generations = Recovery.objects.filter(lease__in=[lease for lease in leases if lease.successor_id is None])
    newest = list(generations.order_by("lease_id", "-generation").distinct("lease_id"))
    # What was saved and removed since is not there: it is saved again where the sandbox is, and lost where it is not.
    saved = set(Archive.objects.filter(archives.OFFERED, recovery__in=newest).values_list("recovery_id", flat=True))
    removed = {one.lease_id for one in newest if one.state == Recovery.State.COMPLETE and one.pk not in saved}
    return Files(
        kept=kept,
        newest=tuple(one for one in newest if one.lease_id not in removed),
        lost=bool(passed_over)
        or any(lease.files_lost or (lease.pk in removed and lease.state not in Lease.KEPT) for lease in leases),
    )


def _will_be_used_again(lease: Lease) -> bool:
    if lease.state != Lease.State.RELEASED or not lease.scope or lease.orphaned_at is not None:
        return False
    where = lease.environment
    return (
        where is not None
        and where.status == where.Status.ACTIVE
        and where.policy == lease.policy
        and where.account_id == lease.account_id
        and proof.is_proven_ended(lease)
    )


def read(
    continuation: Continuation, *, actions: Iterable[RecoveryAction], sources: Iterable[Run], files: Files
) -> Facts:
    """Collect what the gates of a continuation look at. Its issue, these runs and their leases are locked.

    `sources` are all runs that `sources_of` named, of whichever continuation; those of this one are picked here.
    """
    blocking = tuple(actions)
    by_id = {run.pk: run for run in sources}
    run = by_id[continuation.run_id]
    wanted = [pk for pk in by_id if pk in sources_of([run], blocking)]
    told = RunFacts.objects.in_bulk(wanted)
    ends = {pk: execution_ended(pk) for pk in wanted}
    return Facts(
        by_user=bool(continuation.requested_by),
        kind=continuation.kind,
        issue_id=continuation.issue_id,
        authored_at=continuation.authored_at,
        issue=IssueFacts.objects.filter(pk=continuation.issue_id).first(),
        run=run,
        actions=blocking,
        sources=tuple(
            Source(by_id[pk], told.get(pk), ends[pk].ended, ends[pk].sentence, _fenced_by(pk)) for pk in wanted
        ),
        live=tuple(Run.objects.filter(issue_id=continuation.issue_id, status__in=Run.LIVE).order_by("pk")),
        files=files,
        now=database_now(),
    )


def _fenced_by(run_id: UUID) -> str:
    """Return who fenced a sandbox of a run, whichever row of ours the fence was placed on."""
    fences = (fencing.of(lease) for lease in Lease.objects.filter(run_id=run_id, successor__isnull=True).order_by("pk"))
    return next((fence.holder for fence in fences if fence is not None), "")
