"""The engine: claims what an account owes, works on hundreds of rows at once, and writes what became of them.

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
from typing import Any
from uuid import UUID

from django.conf import settings
from django.db import DatabaseError
from django.db.models import Min
from django.db.models.functions import Now

from cleanup import accounts, backoff, claims, work
from cleanup.claims import ALL, Claim, Selection
from cleanup.clock import Clock, boottime
from cleanup.connections import LOST, persistently
from cleanup.decisions import is_about_the_account
from cleanup.handlers import HANDLERS
from cleanup.keeper import KEEPER, Keeper
from cleanup.work import Call, Context, NotSent, Outcome
from leases import bounds
from leases.calling import open_recorded
from leases.credentials import SecretUnavailable
from leases.models import Attempt, Installation, Obligation, ProviderAccount
from providers.contract import ErrorKind, ProviderError
from providers.registry import ConfigurationError, ProviderUnavailable

log = logging.getLogger(__name__)

HANG_MARGIN = 10.0
"""Seconds beyond its bound after which a call's thread is given up on; no adapter that keeps its contract gets here."""

_PAGE = 100
"""Rows per claim: enough to make a claim's cost small, few enough to leave some to other processes."""

UNREADY_FOR = 60.0
"""Seconds for which this process claims nothing of an account whose adapter or secret it lacks."""


@dataclass(slots=True)
class Tally:
    """What a sweep did, by outcome."""

    claimed: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    out_of_time: bool = False

    def count(self, outcome: str) -> None:
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1

    def add(self, other: Tally) -> None:
        self.claimed += other.claimed
        self.out_of_time = self.out_of_time or other.out_of_time
        for outcome, number in other.outcomes.items():
            self.outcomes[outcome] = self.outcomes.get(outcome, 0) + number


_ANSWERS = frozenset({ErrorKind.NAME_TAKEN, ErrorKind.NOT_FOUND, ErrorKind.INVALID, ErrorKind.REFUSED})
"""Failures that only an account that works can answer with. A timeout or nonsense neither opens a circuit nor resets."""


class Slots:
    """How many calls this process may have in flight, over all accounts and threads."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._lock = threading.Lock()

    def take(self, want: int) -> int:
        """Take up to `want`; returns how many."""
        with self._lock:
            taken = min(want, self._free)
            self._free -= taken
            return taken

    def give_back(self, count: int = 1) -> None:
        with self._lock:
            self._free += count


SLOTS = Slots(settings.PAPERCLIP_CALLS_IN_FLIGHT)
"""The process's own."""


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

    def __post_init__(self) -> None:
        self.worker = worker_name()
        self._answers: queue.SimpleQueue[tuple[_Task, Call, Any, ProviderError | NotSent | None]] = queue.SimpleQueue()
        self._tasks: set[_Task] = set()
        self._context = Context(
            clock=self.clock, open_recorded=open_recorded, installation=str(Installation.current().pk)
        )
        self._unready = False
        self.tally = Tally()

    def sweep(
        self, account_id: UUID, *, seconds: float = 60.0, selection: Selection = ALL, limit: int | None = None
    ) -> Tally:
        """Work on what the account owes now, for at most `seconds` of claiming, and return what was done.

        `limit` bounds the rows claimed. Ends when nothing more can be claimed and nothing is in flight.
        """
        self.tally = Tally()
        if _UNREADY.get(account_id, 0.0) > time.monotonic():
            return self.tally
        self._unready = False
        persistently(lambda: claims.escalate_overdue(account_id))
        claim_until = time.monotonic() + seconds
        more = True
        stopped_at: float | None = None
        while True:
            if stopped_at is None and self.stopping():
                stopped_at = time.monotonic()
            self.tally.out_of_time = time.monotonic() >= claim_until
            if stopped_at is not None and time.monotonic() - stopped_at > bounds.LONGEST_CALL + HANG_MARGIN:
                break  # what is still open keeps its protection
            may_claim = more and stopped_at is None and not self.tally.out_of_time and not self._unready
            if may_claim:
                more = self._claim(account_id, selection, limit)
            if not self._tasks:
                if not may_claim or not more:
                    break
                continue
            if self._wait_for_answers(stopping=stopped_at is not None):
                more = True
        self._abandon_rest()
        return self.tally

    # Claiming

    def _claim(self, account_id: UUID, selection: Selection, limit: int | None) -> bool:
        """Claim as much as there is room for, and begin. Returns whether it is worth asking again before an answer."""
        want = _PAGE if limit is None else min(_PAGE, limit - self.tally.claimed)
        want = self.slots.take(want)
        if want <= 0:
            return False
        ids = claims.new_ids(want)
        claimed: list[Claim] = []
        try:
            claimed = claims.claim(account_id, ids, worker=self.worker, clock=self.clock, selection=selection)
        except LOST:
            # The claim may have committed although its reply was lost: what carries these ids is ours.
            claimed = persistently(lambda: claims.reclaim(ids, clock=self.clock))
        finally:
            self.slots.give_back(want - len(claimed))
        self.tally.claimed += len(claimed)
        proven = self.tally.outcomes.get(Attempt.Outcome.PROVEN, 0)
        for claim in claimed:
            self.keeper.keep(claim)
            if self.on_claimed:
                self.on_claimed(claim)
            task = _Task(claim, HANDLERS[claim.kind](claim, self._context))
            self._tasks.add(task)
            self._step(task, lambda task=task: next(task.steps))  # type: ignore[misc]
        # A row settled on the spot may have brought forth another (a recovery owes the teardown of what it found).
        return len(claimed) == want or self.tally.outcomes.get(Attempt.Outcome.PROVEN, 0) > proven

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
            self._finish(task, work.HandBack())
        except ProviderError as error:
            if error.kind == ErrorKind.NOT_READY:
                self._unready_for(task.claim.account_id, error)
                self._finish(task, work.HandBack())
            else:
                unanswered = error.kind == ErrorKind.TIMEOUT and task.call is not None and task.call.name == "identify"
                about = unanswered or is_about_the_account(error.kind)
                self._finish(task, work.Failed(error.kind, error.excerpt, error.retry_after, about))
        except (ProviderUnavailable, SecretUnavailable) as error:
            self._unready_for(task.claim.account_id, error)
            self._finish(task, work.HandBack())
        except ConfigurationError:
            self._finish(task, work.NeedsOperator(Obligation.Quiet.INVALID_SNAPSHOT))
        except LOST:
            log.warning("database connection lost while working on obligation %s", task.claim.obligation_id)
            self._finish(task, work.HandBack())
        except Exception as error:  # noqa: BLE001 - one row's fault must not end the sweep; it is counted, logged and tried again
            log.error("handler of obligation %s failed:\n%s", task.claim.obligation_id, _where(error))  # noqa: TRY400 - its text may carry secrets
            self._finish(task, work.Failed(ErrorKind.PROTOCOL, f"internal: {type(error).__name__}"))
        else:
            if stopping or self.stopping():
                task.steps.close()
                self._finish(task, work.HandBack())
            else:
                self._send(task, call)

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

        threading.Thread(target=run, name=f"call-{call.name}", daemon=True).start()

    def _give_up_on_hanging_calls(self) -> None:
        now = time.monotonic()
        for task in [task for task in self._tasks if task.gives_up_at <= now]:
            name = task.call.name if task.call else "call"
            log.error("call %s overran its bound; its thread is given up on", name)
            error = ProviderError(ErrorKind.TIMEOUT, f"{name} overran its bound")
            self._step(task, lambda task=task, error=error: task.steps.throw(error))  # type: ignore[misc]

    # Outcomes

    def _finish(self, task: _Task, outcome: Outcome) -> None:
        self._tasks.discard(task)
        claim = task.claim
        try:
            # Every disposition is fenced by the attempt and so safe to repeat after a lost reply.
            name = persistently(lambda: self._write(claim, outcome))
        except DatabaseError as error:
            log.exception("obligation %s keeps its protection: %s", claim.obligation_id, type(error).__name__)
            name = "unwritten"
        finally:
            self.keeper.release(claim)
            self.slots.give_back()
        self.tally.count(name)
        if self.on_finished:
            self.on_finished(claim)

    def _write(self, claim: Claim, outcome: Outcome) -> str:
        kinds = Attempt.Outcome
        match outcome:
            case work.Done(proven=proven):
                accounts.answered(claim)
                if not proven:
                    claims.finish_attempt(claim, kinds.SUPERSEDED)
                return kinds.PROVEN if proven else kinds.SUPERSEDED
            case work.Draining(until=until):
                claims.postpone(claim, kinds.DRAINING, until=until)
                return kinds.DRAINING
            case work.InTransition():
                accounts.answered(claim)
                delay = backoff.busy(claim.busy_count + 1, self.random)
                if (
                    claims.postpone(claim, kinds.BUSY, delay=delay, busy=True, error_kind=ErrorKind.BUSY)
                    and self.on_busy
                ):
                    self.on_busy(claim, delay)
                return kinds.BUSY
            case work.NotSeen(delay=delay):
                accounts.answered(claim)
                claims.postpone(claim, kinds.NOT_SEEN, delay=delay)
                return kinds.NOT_SEEN
            case work.NeedsOperator(why=why):
                claims.quiet_down(claim, why)
                return kinds.QUIETED
            case work.HandBack():
                claims.postpone(claim, kinds.HANDED_BACK)
                return kinds.HANDED_BACK
            case work.Failed() as failure:
                return self._write_failure(claim, failure)

    def _write_failure(self, claim: Claim, failure: work.Failed) -> str:
        kinds = Attempt.Outcome
        error = ProviderError(failure.kind, failure.excerpt, retry_after=failure.retry_after)
        if failure.kind == ErrorKind.BUSY:
            delay = backoff.busy(claim.busy_count + 1, self.random)
            claims.postpone(claim, kinds.BUSY, delay=delay, busy=True, error_kind=failure.kind)
            return kinds.BUSY
        if failure.kind == ErrorKind.RATE_LIMITED:
            # The account is not ready; the row did nothing wrong, and no attempt of it is counted.
            delay = accounts.throttled(claim, error)
            claims.postpone(claim, kinds.BUSY, delay=delay, error_kind=failure.kind, excerpt=error.excerpt)
            return kinds.BUSY
        is_probe = claim.kind == Obligation.Kind.PROBE_ACCOUNT
        held = claims.postpone(
            claim,
            kinds.FAILED,
            delay=backoff.cooldown(claim.failures + 1, self.random),
            failed=True,
            error_kind=failure.kind,
            excerpt=error.excerpt,
        )
        if held and not is_probe:
            if failure.about_account or is_about_the_account(failure.kind):
                accounts.failed(claim, failure.kind)
            elif failure.kind in _ANSWERS:
                accounts.answered(claim)
        return kinds.FAILED

    def _unready_for(self, account_id: UUID, error: Exception) -> None:
        self._unready = True
        _UNREADY[account_id] = time.monotonic() + UNREADY_FOR
        log.error("this worker is not ready for account %s: %s", account_id, error)

    def _abandon_rest(self) -> None:
        for task in self._tasks:
            self.keeper.release(task.claim)
            self.slots.give_back()
        self._tasks.clear()


_UNREADY: dict[UUID, float] = {}
"""Accounts that this process cannot serve for now, and until when (monotonic)."""


def accounts_with_due_work(selection: Selection = ALL, *, provider: str | None = None) -> list[UUID]:
    """Return the accounts that owe something now, those owing longest first."""
    due = Obligation.objects.filter(due_at__lte=Now())
    if selection.kinds:
        due = due.filter(kind__in=selection.kinds)
    if selection.company_id:
        due = due.filter(company_id=selection.company_id)
    if selection.lease_id:
        due = due.filter(lease_id=selection.lease_id)
    if provider:
        due = due.filter(account__provider=provider)
    return list(
        due.values("account_id").annotate(first=Min("due_at")).order_by("first").values_list("account_id", flat=True)
    )


def hand_on(account_id: UUID) -> None:
    """Ask for the next hint now: a sweep ended with work left. Clearing the hint wakes the beat (trigger)."""
    ProviderAccount.objects.filter(pk=account_id).update(hinted_until=None)


def _where(error: BaseException) -> str:
    """Return where an error came from, without its text, which may carry secrets."""
    frames = traceback.extract_tb(error.__traceback__)
    return (
        type(error).__name__ + " at " + " < ".join(f"{f.name} ({f.filename}:{f.lineno})" for f in reversed(frames[-6:]))
    )
