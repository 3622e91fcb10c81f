"""The engine: claims what is owed, works on hundreds of rows at once, and writes what became of them.

One thread (the caller's) does all database work, over its one connection; every provider call runs in a daemon thread
of its own, outside any transaction, and is given up on when it overruns its bound. So a slow call holds up nothing but
its own row, and a process that must end never waits for a thread that hangs.

On `stopping`, rows whose call has not been sent are handed back at once; calls in flight get one call bound to finish;
what is then still open keeps its protection and falls due by itself.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
import time
import traceback
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypedDict
from uuid import UUID

from django.db.models import Min, QuerySet
from django.db.models.functions import Now

from cleanup import claims, judging, work
from cleanup.claims import ALL, LANE, Claim, Selection
from cleanup.decisions import is_about_the_account
from cleanup.dispositions import CONTENDED, Written, write
from cleanup.handlers import HANDLERS
from cleanup.keeper import KEEPER, Keeper
from cleanup.opening import open_recorded
from cleanup.slots import SLOTS, Slots
from cleanup.work import Call, Context, NotSent, Outcome
from leases import bounds, trust
from leases.clock import Clock, boottime
from leases.connections import LOST, PATIENCE, persistently
from leases.credentials import CredentialUnusable, SecretUnavailable
from leases.models import Installation, Lease, Obligation, Operation, ProviderAccount
from providers.contract import ErrorKind, ProviderError
from providers.registry import ConfigurationError, ProviderUnavailable

log = logging.getLogger(__name__)

HANG_MARGIN = 10.0
"""Seconds beyond its bound after which a call's thread is given up on; no adapter that keeps its contract gets here."""

_PAGE = 100
"""Rows per claim: enough to make a claim's cost small, few enough to leave some to other processes."""

_NOT_SENT_DELAY, _LOST_DELAY = 2.0, 1.0
"""Seconds after which a row is due again whose call was not sent, or whose database connection was lost."""

_NOT_JUDGED_DELAY = 5.0
"""Seconds after which a row is due again that was met by a server which nobody had judged yet."""

UNREADY_FOR = 60.0
"""Seconds for which this process claims nothing of an account whose adapter or secret it lacks."""


@dataclass(slots=True)
class Tally:
    """What a sweep did, by outcome."""

    claimed: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    out_of_time: bool = False
    hands_on: bool = False
    """It did something and ended by itself: what is due by now is worth a hint at once."""

    def count(self, outcome: str) -> None:
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1

    def add(self, other: Tally) -> None:
        self.claimed += other.claimed
        self.out_of_time = self.out_of_time or other.out_of_time
        for outcome, number in other.outcomes.items():
            self.outcomes[outcome] = self.outcomes.get(outcome, 0) + number


@dataclass(slots=True, eq=False)
class _Task:
    claim: Claim
    steps: Generator[Call, Any, Outcome]
    call: Call | None = None
    gives_up_at: float = 0.0


def worker_name() -> str:
    """Return a name by which people find this process."""
    return f"{socket.gethostname()}:{os.getpid()}"


@dataclass
class Engine:
    """Works on obligations of accounts. One instance serves one thread at a time."""

    stopping: Callable[[], bool] = lambda: False
    clock: Clock = boottime
    keeper: Keeper = KEEPER
    slots: Slots = SLOTS
    random: Random = field(default_factory=Random)
    on_claimed: Callable[[Claim], None] | None = None
    """Called after each claim; how tests stop the engine at a chosen point."""
    on_finished: Callable[[Claim], None] | None = None
    """Called when a row was let go of, whatever came of it."""
    on_busy: Callable[[Claim, float], None] | None = None
    """Told of a row in transition and the seconds until it is due: a chance to look earlier."""
    on_contended: Callable[[Claim], None] | None = None
    """Told of a row whose settle met a lock, and which is due much later than the lock will last: the same chance."""

    def __post_init__(self) -> None:
        self.worker = worker_name()
        self._answers: queue.SimpleQueue[tuple[_Task, Call, Any, ProviderError | NotSent | None]] = queue.SimpleQueue()
        self._tasks: set[_Task] = set()
        self._context = Context(
            clock=self.clock, open_recorded=open_recorded, installation=str(persistently(Installation.current).mark)
        )
        self._unready = self._short_of_slots = self._database_is_away = False
        self._claims_until = 0.0
        self._held = 0
        self.tally = Tally()

    def sweep(
        self, account_id: UUID, *, seconds: float = 60.0, selection: Selection = ALL, limit: int | None = None
    ) -> Tally:
        """Work on what the account owes now, for at most `seconds` of claiming, and return what was done.

        `account_id` is `claims.LANE` for what names no account. `limit` bounds the rows claimed. Ends when nothing more
        can be claimed and nothing is in flight.
        """
        self.tally = Tally()
        if _UNREADY.get(account_id, 0.0) > time.monotonic():
            return self.tally
        self._unready = self._short_of_slots = self._database_is_away = False
        self._claims_until = time.monotonic() + seconds
        if not persistently(judging.is_cleared):
            return self.tally
        persistently(lambda: claims.escalate_overdue(account_id))
        try:
            self._work(account_id, selection, limit)
        finally:
            self._abandon_rest()
        return self.tally

    def _work(self, account_id: UUID, selection: Selection, limit: int | None) -> None:
        more = True
        stopped_at: float | None = None
        while True:
            if stopped_at is None and self.stopping():
                stopped_at = time.monotonic()
            self.tally.out_of_time = time.monotonic() >= self._claims_until
            if stopped_at is not None and time.monotonic() - stopped_at > bounds.LONGEST_CALL + HANG_MARGIN:
                return  # what is still open keeps its protection
            may_claim = more and stopped_at is None and not self.tally.out_of_time and not self._unready
            if may_claim:
                more = self._claim(account_id, selection, limit)
            if self._tasks:
                more = self._wait_for_answers(stopping=stopped_at is not None) or more
            elif not (may_claim and more):
                # Whoever was claimed for and is due again, or became due meanwhile, is to be hinted at once. Not where
                # nothing could be done here: that would send hints in a circle.
                blocked = self._unready or self._short_of_slots
                self.tally.hands_on = self.tally.claimed > 0 and not blocked
                return

    # Claiming

    def _claim(self, account_id: UUID, selection: Selection, limit: int | None) -> bool:
        """Claim as much as there is room for, and begin. Returns whether it is worth asking again before an answer."""
        room = min(_PAGE, self.slots.share - self._held)
        if limit is not None:
            room = min(room, limit - self.tally.claimed)
        if room <= 0:
            return False
        if not persistently(judging.is_cleared):
            return False  # another server answers by now, which another process is to judge, or a person
        trusted = persistently(trust.read)
        want = self.slots.take(room)
        self._short_of_slots = want == 0
        if want == 0:
            return False
        ids = claims.new_ids(want)
        claimed: list[Claim] = []
        try:
            claimed = claims.claim(account_id, ids, worker=self.worker, clock=self.clock, selection=selection)
        except LOST:
            # The claim may have committed although its reply was lost: what carries these ids is ours.
            claimed = persistently(lambda: claims.reclaim(ids, clock=self.clock))
        finally:
            self._held += len(claimed)
            self.slots.give_back(want - len(claimed))
        self.tally.claimed += len(claimed)
        # All are held, kept and known before any is begun, so that a fault in one loses none of the others.
        tasks = [_Task(claim, _begin(claim, self._context, trusted)) for claim in claimed]
        self._tasks.update(tasks)
        for task in tasks:
            self.keeper.keep(task.claim)
        for task in tasks:
            if self.on_claimed:
                self.on_claimed(task.claim)
            self._step(task, lambda task=task: next(task.steps))  # type: ignore[misc]
        # A row that was done with on the spot made room, and may have brought forth another (a recovery owes the
        # teardown of what it found).
        return len(claimed) == want or any(task not in self._tasks for task in tasks)

    # Calls and answers

    def _wait_for_answers(self, *, stopping: bool) -> bool:
        """Take the answers that are there, waiting for the first. Returns whether any row was let go of."""
        before = len(self._tasks)
        nearest = min(task.gives_up_at for task in self._tasks)
        # While not stopping, look up once a second whether to stop: a signal cannot wake a queue in another thread.
        timeout = max(0.0, min(nearest - time.monotonic(), 1.0))
        try:
            answer = self._answers.get(timeout=timeout)
        except queue.Empty:
            self._give_up_on_hanging_calls()
            return len(self._tasks) < before
        while True:
            self._take(*answer, stopping=stopping)
            try:
                answer = self._answers.get_nowait()
            except queue.Empty:
                return len(self._tasks) < before

    def _take(
        self, task: _Task, call: Call, value: Any, error: ProviderError | NotSent | None, *, stopping: bool
    ) -> None:
        if task not in self._tasks or task.call is not call:
            return  # given up on before
        if error is None:
            self._step(task, lambda: task.steps.send(value), stopping=stopping)
        else:
            self._step(task, lambda: task.steps.throw(error), stopping=stopping)

    def _step(self, task: _Task, advance: Callable[[], Call], *, stopping: bool = False) -> None:
        """Advance a handler to its next call, or to its outcome, which is written."""
        try:
            call = advance()
        except StopIteration as ended:
            self._finish(task, ended.value)
        except NotSent:
            self._finish(task, work.HandBack(0.0 if stopping else _NOT_SENT_DELAY))
        except ProviderError as error:
            if error.kind == ErrorKind.NOT_READY:
                self._hand_back_unready(task, error, error.excerpt)
            else:
                unanswered = (
                    error.kind == ErrorKind.TIMEOUT and task.call is not None and task.call.name == work.IDENTIFY
                )
                about = unanswered or is_about_the_account(error.kind)
                self._finish(task, work.Failed(error.kind, error.excerpt, error.retry_after, about))
        except CredentialUnusable as error:
            self._finish(task, work.NeedsOperator(error.why, error.still))
        except trust.Observing:
            self._finish(task, _left_alone(task.claim))
        except (ProviderUnavailable, SecretUnavailable) as error:
            self._hand_back_unready(task, error, str(error))
        except ConfigurationError as error:
            if task.claim.kind == Obligation.Kind.PROBE_ACCOUNT:
                # Asked with the account as it is today: it can be put right, and then has to be asked again.
                self._finish(task, work.Failed(ErrorKind.INVALID, str(error)))
            else:
                self._finish(task, work.NeedsOperator(Obligation.Quiet.INVALID_SNAPSHOT))
        except LOST:
            log.warning("database connection lost while working on obligation %s", task.claim.obligation_id)
            self._finish(task, work.HandBack(_LOST_DELAY))
        except Exception as error:  # noqa: BLE001 - one row's fault must not end the sweep; it is counted, logged and tried again
            log.error("handler of obligation %s failed:\n%s", task.claim.obligation_id, _where(error))  # noqa: TRY400 - its text may carry secrets
            self._finish(task, work.Failed(ErrorKind.PROTOCOL, f"internal: {type(error).__name__}"))
        else:
            overtime = time.monotonic() > self._claims_until + bounds.LONGEST_CALL
            if not (stopping or overtime or self.stopping()):
                self._send(task, call)
            elif call.changes:  # what was written for it is undone by who wrote it
                self._step(task, lambda: task.steps.throw(NotSent()), stopping=True)
            else:
                self._finish(task, work.HandBack())

    def _send(self, task: _Task, call: Call) -> None:
        task.call = call
        task.gives_up_at = time.monotonic() + call.within + HANG_MARGIN

        def run() -> None:
            value, error = None, None
            # Asked here, right before sending, because the thread may begin late (a suspended process, a full machine).
            if call.changes and not claims.may_send(task.claim, call.within, bounds.SEND_MARGIN, clock=self.clock):
                self._answers.put((task, call, None, NotSent()))
                return
            try:
                value = call.run()
            except ProviderError as raised:
                error = raised
            except Exception as raised:  # noqa: BLE001 - an adapter that breaks its contract: an answer that cannot be understood
                log.error("adapter call %s raised outside its contract:\n%s", call.name, _where(raised))  # noqa: TRY400 - its text may carry secrets
                error = ProviderError(ErrorKind.PROTOCOL, f"{call.name} raised {type(raised).__name__}")
            self._answers.put((task, call, value, error))

        try:
            threading.Thread(target=run, name=f"call-{call.name}", daemon=True).start()
        except RuntimeError as error:  # no more threads: not sent, like a call that came too late
            log.error("call %s could not be started: %s", call.name, error)  # noqa: TRY400
            self._answers.put((task, call, None, NotSent()))

    def _give_up_on_hanging_calls(self) -> None:
        now = time.monotonic()
        for task in [task for task in self._tasks if task.gives_up_at <= now]:
            name = task.call.name if task.call else "call"
            log.error("call %s overran its bound; its thread is given up on", name)
            error = ProviderError(ErrorKind.TIMEOUT, f"{name} overran its bound")
            self._step(task, lambda task=task, error=error: task.steps.throw(error))  # type: ignore[misc]

    # Outcomes

    def _finish(self, task: _Task, outcome: Outcome) -> None:
        """Write the outcome and let go of the row, whatever happens: what cannot be written keeps its protection."""
        self._tasks.discard(task)
        task.steps.close()
        claim = task.claim
        written = Written("unwritten")
        try:
            written = persistently(
                lambda: write(claim, outcome, called=task.call is not None, random=self.random),
                patience=0.0 if self._database_is_away else PATIENCE,
            )
            self._database_is_away = False
        except Exception as error:  # noqa: BLE001 - whatever it is, the row must be let go of
            self._database_is_away = isinstance(error, LOST)
            log.error("obligation %s keeps its protection:\n%s", claim.obligation_id, _where(error))  # noqa: TRY400
        finally:
            self._let_go(task)
        self.tally.count(written.outcome)
        if self.on_finished:
            self.on_finished(claim)
        try:
            if self.on_busy and written.looks_again_in is not None:
                self.on_busy(claim, written.looks_again_in)
            elif self.on_contended and written.outcome == CONTENDED:
                self.on_contended(claim)
        except Exception as error:  # noqa: BLE001 - a hint that cannot be sent (the broker is away) costs only time
            log.warning("no early look at obligation %s: %s", claim.obligation_id, type(error).__name__)

    def _let_go(self, task: _Task) -> None:
        self.keeper.release(task.claim)
        self.slots.give_back()
        self._held -= 1

    def _hand_back_unready(self, task: _Task, error: Exception, excerpt: str) -> None:
        """Give a row back for which this process lacks an adapter or a secret, and claim none of its account for now.

        In the built-in lane the next row is of another provider, or of none: only this one waits.
        """
        account_id = task.claim.account_id
        log.error("this worker is not ready for account %s: %s", account_id, error)
        delay = UNREADY_FOR if account_id == LANE else 0.0
        if account_id != LANE:
            self._unready = True
            _UNREADY[account_id] = time.monotonic() + UNREADY_FOR
        self._finish(task, work.HandBack(delay, kind=ErrorKind.NOT_READY, excerpt=excerpt))

    def _abandon_rest(self) -> None:
        """Let go of what is still open: nobody renews it any more, so it falls due when its protection ends."""
        for task in list(self._tasks):
            self._tasks.discard(task)
            self._let_go(task)


_UNREADY: dict[UUID, float] = {}
"""Accounts that this process cannot serve for now, and until when (monotonic)."""


def _begin(claim: Claim, context: Context, trusted: trust.Trust) -> Generator[Call, Any, Outcome]:
    """Start the handler of a claim's kind, inside the generator, so that a missing one is a fault of that row alone.

    Not while this database observes, unless it may: then no attempt is burnt. What a database that begins to observe
    meanwhile forbids is refused at its announcement (`cleanup.evidence.note`).
    """
    if claim.kind in Obligation.INNER:
        trusted = trust.read()  # it asks nobody, and so announces nothing: this is where it is stopped
    if trusted.is_observing and trust.forbids(trusted, claim.kind, **_subject(claim)):
        raise trust.Observing
    return (yield from HANDLERS[claim.kind](claim, context))


class _Subject(TypedDict):
    lease: Lease | None
    operation: Operation | None


def _subject(claim: Claim) -> _Subject:
    return {
        "lease": Lease.objects.filter(pk=claim.lease_id).first() if claim.lease_id else None,
        "operation": Operation.objects.filter(pk=claim.operation_id).first() if claim.operation_id else None,
    }


def _left_alone(claim: Claim) -> Outcome:
    """Return what becomes of a row that is not worked on while observing: quiet, until trust wakes it (trigger)."""
    if not trust.read().is_judged:
        return work.HandBack(_NOT_JUDGED_DELAY, excerpt="the database's server was started anew")
    return work.NeedsOperator(Obligation.Quiet.OBSERVING, lambda: trust.still_forbids(claim.kind, **_subject(claim)))


def due(selection: Selection = ALL, *, provider: str | None = None) -> QuerySet[Obligation]:
    """Return the obligations that are due now, of this selection and, if given, at accounts of this provider.

    What calls no provider is at none.
    """
    rows = Obligation.objects.filter(closed_at__isnull=True, due_at__lte=Now())
    if selection.kinds:
        rows = rows.filter(kind__in=selection.kinds)
    if selection.company_id:
        rows = rows.filter(company_id=selection.company_id)
    if selection.lease_id:
        rows = rows.filter(lease_id=selection.lease_id)
    if provider:
        rows = rows.filter(account__provider=provider)
    return rows


def accounts_with_due_work(selection: Selection = ALL, *, provider: str | None = None) -> list[UUID]:
    """Return the accounts that owe something now, those owing longest first; `LANE` stands for the built-in lane."""
    rows = due(selection, provider=provider).values("account_id").annotate(first=Min("due_at"))
    accounts: list[UUID | None] = list(rows.order_by("first").values_list("account_id", flat=True))
    return [LANE if account_id is None else account_id for account_id in accounts]


def hand_on(account_id: UUID) -> None:
    """Let what is due be hinted now: the hint that led to a sweep is used up. Clearing it wakes the beat (trigger)."""
    if account_id == LANE:
        lane = Installation.objects.filter(hinted_until__gt=Now())
        persistently(lambda: lane.update(hinted_until=None))
        return
    hinted = ProviderAccount.objects.filter(pk=account_id, hinted_until__gt=Now())
    persistently(lambda: hinted.update(hinted_until=None))


def _where(error: BaseException) -> str:
    """Return where an error came from, without its text, which may carry secrets."""
    frames = traceback.extract_tb(error.__traceback__)
    return (
        type(error).__name__ + " at " + " < ".join(f"{f.name} ({f.filename}:{f.lineno})" for f in reversed(frames[-6:]))
    )
