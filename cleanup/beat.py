"""The beat: sleeps until the earliest deadline, and hints the workers at it. `celery -A paperclip_env beat` runs it.

Answers for: a deadline is hinted at within milliseconds of its time, and of the commit that moved it earlier; nothing
owed and nothing changed means no statement at all; whatever breaks (session, server, broker, leader), it comes back
and reads everything again. It decides nothing about obligations: a hint says "this account has due work", and the
claim looks.

Why no wake-up is lost. A commit that makes a deadline earlier notifies, in the database. Take any such commit, and
the last look (`hint_due`) before we sleep. Either the look's snapshot contains it, and the look's answer accounts for
it; or it committed after the snapshot, and then its notification reaches this session after the snapshot too: during
the statement (psycopg's handler gets it), or later (the socket wakes us). `_armed` is emptied *before* the look and
every answer and notification only lowers it, so neither can overwrite the other. A session first listens and then
looks, so the same holds for its first look, and every new session starts with one.

Periodic tasks of django-celery-beat work as usual, without its polling: they are read again when the database says
that one was edited.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any
from uuid import UUID

import psycopg
from celery import Celery
from celery.beat import ScheduleEntry, SchedulingError
from django.db import DatabaseError, InterfaceError, connection
from django_celery_beat.models import PeriodicTask
from django_celery_beat.schedulers import DatabaseScheduler, ModelEntry
from kombu import Producer

from cleanup import alarm, judging, leadership, outside
from cleanup.claims import LANE
from cleanup.listening import NotDirect, Session
from cleanup.publishing import ONCE_AGAIN, REST, Publisher
from cleanup.reckoning import Reckoning
from cleanup.watermark import Mark, Unclear
from leases.clock import boottime

logger = logging.getLogger(__name__)

SWEEP = "cleanup.tasks.sweep"
SETTLE_OWNERSHIP = "cleanup.tasks.settle_ownership"
QUEUE = "paperclip"

CAP = 300.0
"""The longest sleep. Its end sends no statement: it only compares the clocks, one of which may have been set. Celery's
`--max-interval` changes it."""

_GAP, _LONGEST_GAP = 4.0, 1.0
"""Between two looks, in lengths of the last one, and at most in seconds: in a burst of commits, each with its
notification, looking takes a fifth of the time of the beat and of one connection, however many accounts there are."""

_LOCKED_GAP = 0.25
"""The same after a look that left out an account whose row was locked by a claim, in seconds."""

_RECONNECT_FIRST, _RECONNECT_MOST = 0.05, 2.0


class Entry(ModelEntry):  # type: ignore[misc]
    """A periodic task, whose runs are saved in their own columns alone.

    A whole row, read before somebody's edit and saved after it, would undo the edit; after the task was deleted it
    would bring it back.
    """

    def save(self) -> None:
        PeriodicTask.objects.filter(pk=self.model.pk).update(
            last_run_at=self.model.last_run_at, total_run_count=self.model.total_run_count
        )

    def _disable(self, model: PeriodicTask) -> None:
        model.enabled = False
        PeriodicTask.objects.filter(pk=model.pk).update(enabled=False, last_run_at=None)


class Scheduler(DatabaseScheduler):  # type: ignore[misc]
    """Runs inside `tick()`, which returns 0 unless the database is away, so that Celery never sleeps for it."""

    Entry = Entry
    producer = None
    """Celery's own connects without a bound; `Publisher` has ours."""

    def __init__(self, app: Celery, **options: Any) -> None:
        self._session: Session | None = None
        self._leads = False
        self._directness_proven = False
        self._reckoning = Reckoning()
        self._armed: float | None = None  # by the database's clock; None: nothing is owed
        self._not_before = 0.0  # by `boottime`
        self._schedule: dict[str, ScheduleEntry] = {}
        self._schedule_is_stale = True
        self._defaults_installed = False
        self._publisher = Publisher(app)
        self._pause = _RECONNECT_FIRST
        self._trouble = ""
        self._judge_at: float | None = None  # by `boottime`; None: the server was judged
        self._identity, self._timeline = "", 0
        self._kept_outside = False
        self._place_trouble = ""
        self._is_unclear = False
        super().__init__(app, **options)
        self.max_interval = options.get("max_interval") or CAP

    def tick(self, *_: Any, **__: Any) -> float:
        """Do what is due, then sleep until something is. Returns the seconds to wait before the next call."""
        try:
            session = self._session or self._connect()
            if self._leads or self._stand_by(session):
                self._work(session)
        except (psycopg.Error, DatabaseError, InterfaceError) as error:
            self._lose_session()
            return self._wait_for_the_database(error)
        except (SystemExit, KeyboardInterrupt, NotDirect):
            self._lose_session()
            raise
        return 0.0

    def close(self) -> None:
        """Save what ran. `tick` closes the session: this may have interrupted it in the middle of a statement."""
        self.sync()
        self._publisher.close()

    def _work(self, session: Session) -> None:
        if self._time_to_judge() <= 0:
            self._judge(session)
        periodic = self._send_periodic_tasks()
        if self._time_to_look() <= 0:
            self._look(session)
        if self._schedule_is_stale and self._publisher.rests_for() <= 0:
            return  # heard while looking
        session.sleep(min(periodic, self._time_to_look(), self._time_to_judge(), self.max_interval))

    # --- Deadlines --------------------------------------------------------------------------------------------------

    def _look(self, session: Session) -> None:
        began = boottime()
        moved = self._advance(session)
        self._armed = None  # before the statement; see above
        rung = alarm.hint_due(session.connection)
        self._reckoning.observe(rung.now)
        ended = boottime()
        left_out = rung.look_at is not None and rung.look_at <= rung.now
        self._not_before = ended + (_LOCKED_GAP if left_out else min((ended - began) * _GAP, _LONGEST_GAP))
        if rung.look_at is not None:
            self._arm(rung.look_at)
        self._pause, self._trouble = _RECONNECT_FIRST, ""
        self._send_hints(rung.hinted)
        if moved is not None:
            self._keep_outside(*moved)

    def _time_to_look(self) -> float:
        """Return the seconds until the next look; infinite when nothing is owed. The broker's rest puts it off."""
        if self._armed is None:
            return math.inf
        return max(self._reckoning.until(self._armed), self._not_before - boottime(), self._publisher.rests_for())

    def _arm(self, moment: float) -> None:
        self._armed = moment if self._armed is None else min(self._armed, moment)

    def _heed(self, channel: str, payload: str) -> None:
        """Take a notification in. Called in the middle of statements, so it only takes notes."""
        if channel == "paperclip_schedule":
            self._schedule_is_stale = True
            return
        try:
            moment = float(payload)
        except ValueError:
            moment = 0.0  # whatever it was meant to say, a look answers it
        self._arm(0.0 if math.isnan(moment) else moment)

    def _send_hints(self, accounts: Sequence[UUID]) -> None:
        """Send a hint for each account, until the broker fails: what is left lapses and is hinted at again.

        The built-in lane has a task of its own, so that its work is told apart by whoever looks at the broker.
        """
        for account in accounts:

            def send(producer: Producer, account: UUID = account) -> None:
                task, arguments = (SETTLE_OWNERSHIP, []) if account == LANE else (SWEEP, [str(account)])
                self.send_task(task, arguments, queue=QUEUE, producer=producer, **ONCE_AGAIN)

            if not self._publisher.attempt(send):
                break

    # --- The high-water mark (`cleanup.judging`) ----------------------------------------------------------------------

    def _judge(self, session: Session) -> None:
        """Judge the server before anything is hinted; again after a while where that cannot be told yet."""
        execute = judging.on_session(session.connection)
        verdict = judging.pronounce(execute, keeps=True)
        if isinstance(verdict, Unclear):
            if not self._is_unclear:
                logger.error("The beat cannot tell yet whether the database is a restored or copied one; asking again.")
            self._judge_at, self._is_unclear = boottime() + REST, True
            return
        self._judge_at, self._is_unclear = None, False
        now = judging.read(execute).facts.now
        self._identity, self._timeline = now.identity, now.timeline
        if (moved := self._advance(session)) is not None:
            self._keep_outside(*moved)

    def _time_to_judge(self) -> float:
        return math.inf if self._judge_at is None else self._judge_at - boottime()

    def _advance(self, session: Session) -> tuple[UUID, Mark] | None:
        if self._judge_at is not None:
            return None
        execute = judging.on_session(session.connection)
        return judging.advance(execute, self._identity, self._timeline, kept_outside=self._kept_outside)

    def _keep_outside(self, mark: UUID, kept: Mark) -> None:
        """Keep the mark in the file and, where it has keys, in the broker. One place is enough, and told of when lost.

        A place that is ahead holds the mark of another database, or of another leader: then judge again.
        """
        places = 0
        try:
            try:
                outside.keep_in_file(mark, kept)
                places += 1
            except outside.Silent as silent:
                self._tell_of_place(str(silent))
            else:
                self._tell_of_place("")
            if self._publisher.rests_for() <= 0:
                places += self._keep_in_broker(mark, kept)
        except outside.Overtaken as ahead:
            logger.error("%s; judging this database again.", ahead)  # noqa: TRY400 -- a finding, not a fault
            self._judge_at = 0.0
        self._kept_outside = self._kept_outside or places > 0

    def _keep_in_broker(self, mark: UUID, kept: Mark) -> bool:
        done, overtaken = False, False

        def send(producer: Producer) -> None:
            nonlocal done, overtaken
            try:
                done = outside.keep_in_channel(producer.channel, mark, kept)
            except outside.Overtaken:
                overtaken = True

        self._publisher.attempt(send)
        if overtaken:
            raise outside.Overtaken
        return done

    def _tell_of_place(self, trouble: str) -> None:
        if trouble and trouble != self._place_trouble:
            logger.warning("The high-water mark is not kept in its file: %s", trouble)
        self._place_trouble = trouble

    # --- Periodic tasks ---------------------------------------------------------------------------------------------

    def _send_periodic_tasks(self) -> float:
        """Read the periodic tasks if they changed, send those that are due, return the seconds until the next is."""
        resting = self._publisher.rests_for()
        if resting > 0:
            return resting
        try:
            if self._schedule_is_stale:
                self._read_schedule()
            delay: float = super().tick()
            self.sync()
        finally:
            connection.close()  # Django's; kept, it would be a second idle session
        return delay

    def _read_schedule(self) -> None:
        self._schedule_is_stale = False  # before reading: an edit in the meantime makes it stale again
        self.sync()
        self._schedule = self.all_as_schedule()
        if not self._defaults_installed:
            self.install_default_entries({})
            self.update_from_dict(self.app.conf.beat_schedule)
            self._defaults_installed = True
        self._heap = None  # made anew by Celery

    @property
    def schedule(self) -> dict[str, ScheduleEntry]:
        return self._schedule

    def setup_schedule(self) -> None:
        """Read nothing yet: the banner makes an instance too, and a beat that stands by must not write."""

    def all_as_schedule(self) -> dict[str, ScheduleEntry]:
        """Return the enabled tasks. One that cannot be understood is left out, and costs the others nothing."""
        entries: dict[str, ScheduleEntry] = {}
        for model in self.enabled_models():
            try:
                entries[model.name] = self.Entry(model, app=self.app)
            except (DatabaseError, InterfaceError):
                raise
            except Exception:
                logger.exception("The periodic task %s is left out", model.name)
        return entries

    def enabled_models_qs(self) -> Any:
        """All of them: the window of some hours in the base class counts on reading again every five minutes."""
        return PeriodicTask.objects.enabled()

    def apply_entry(self, entry: ScheduleEntry, producer: None = None) -> None:  # noqa: ARG002 -- Celery's signature
        """Send a due task. If the broker fails, forget that it ran: read again later, it is still due then."""
        logger.info("Sending the periodic task %s (%s).", entry.name, entry.task)
        entry.options = {**(entry.options or {}), **ONCE_AGAIN}

        def send(producer: Producer) -> None:
            try:
                self.apply_async(entry, producer=producer, advance=False)
            except SchedulingError as error:
                if self._publisher.is_at_fault(error.__context__):
                    raise
                logger.exception("The periodic task %s cannot be sent", entry.name)

        if not self._publisher.attempt(send):
            self._dirty.discard(entry.name)
            self._schedule_is_stale = True

    def should_sync(self) -> bool:
        """Celery would save in the middle of sending; `_send_periodic_tasks` saves after it, and after every one."""
        return False

    def sync(self) -> None:
        """Save when the tasks ran and how often."""
        if self._dirty:
            super().sync()

    # --- The session and its lead -----------------------------------------------------------------------------------

    def _connect(self) -> Session:
        session = self._session = Session(self._heed)
        session.prepare(prove=not self._directness_proven)
        self._directness_proven = True
        if leadership.take(session.connection):
            judging.gap_ended(judging.on_session(session.connection))  # nobody led until now
            self._lead(session)
        else:
            logger.info("Another beat leads; standing by.")
        return session

    def _stand_by(self, session: Session) -> bool:
        """Wait for a while to lead; return whether we do. Celery calls again, so a health check sees us tick."""
        if leadership.wait(session.connection):
            self._lead(session)
        return self._leads

    def _lead(self, session: Session) -> None:
        """Listen first, then read everything: what changed while nobody listened is found by reading."""
        session.listen()
        self._leads = True
        self._schedule_is_stale = True
        self._arm(0.0)
        self._judge_at, self._kept_outside = 0.0, False
        logger.info("Leading.")

    def _lose_session(self) -> None:
        session, self._session, self._leads = self._session, None, False
        if session is not None:
            session.close()

    def _wait_for_the_database(self, error: Exception) -> float:
        """Return how long to wait before the next try, and log a trouble once, not at every try."""
        trouble = " ".join(str(error).split()) or type(error).__name__
        if trouble != self._trouble:
            logger.warning("The database does not serve the beat, trying again: %s", trouble)
        self._trouble = trouble
        pause, self._pause = self._pause, min(self._pause * 2, _RECONNECT_MOST)
        return pause
