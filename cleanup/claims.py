"""Claims: taking obligations, keeping them, and the fence around everything written about them.

All SQL of the engine's locking is here. The rules (design 2.2, 4, 5, 6):

- A claim locks the account row, then obligations with SKIP LOCKED, and locks nothing after. It holds nothing before, so
  waiting for the account row cannot deadlock. Under that lock the rows in flight are counted, so two claimers at a full
  account cannot both pass its limit. A row whose protection ended counts no more: it is itself due.
- Rows that call no provider name no account. They share the built-in lane, which is claimed like an account under the
  id `LANE`: its lock is the row of the installation, its limit a constant, and nothing blocks it.
- Verification of history comes last, and never takes more than a tenth of an account's places (one at least).
- `attempt_id` is made by the claimer beforehand. After a COMMIT whose reply was lost the worker asks for the rows that
  carry its ids (`reclaim`), so a claim is neither lost nor made twice.
- Every disposition is written `WHERE attempt_id = mine` (`postpone`, `quiet_down`, `transitions.close` after `fenced`).
  An attempt that lost its row writes none. Evidence is not fenced: see `cleanup.evidence`.
- `wakes` is compared by the statement that postpones, under the row's lock, so a wake between evaluation and settle is
  either seen by it or comes after it and moves `due_at` itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

from django.db import connection, transaction
from django.db.models.functions import Now

from cleanup.backoff import ESCALATE_AFTER, ESCALATE_AT_FAILURES, PROTECTION
from leases import audit, bounds
from leases.clock import Clock
from leases.models import Attempt, Obligation


def _interval(seconds: float) -> Any:
    return timedelta(seconds=seconds)  # psycopg adapts it; the stubs of Django do not know


_PROTECTION = _interval(PROTECTION)

LANE = UUID(int=0)
"""Stands for the built-in lane where an account's id is asked for. No account has this id."""

LANE_LIMIT = 50
"""How many rows of the built-in lane may be in flight at once. They wait for nobody but this database."""

VERIFICATION_SHARE = 10
"""At most one in so many places of an account, and one at least, is given to the verification of history."""


@dataclass(slots=True)
class Claim:
    """One obligation that this process works on. `renewed_at` is by `Clock`, taken before the statement was sent."""

    obligation_id: int
    attempt_id: UUID
    kind: str
    company_id: UUID | None
    account_id: UUID
    """`LANE` where the row names no account."""
    lease_id: UUID | None
    operation_id: UUID | None
    run_id: UUID | None
    continuation_id: UUID | None
    installation_id: UUID | None
    wakes: int
    failures: int
    busy_count: int
    renewed_at: float
    lost: bool = field(default=False)
    """Its protection was not renewed any more: another attempt may have the row."""

    @property
    def company(self) -> UUID:
        """The company of whatever is not the whole installation's (`obligation_names_its_company`)."""
        if self.company_id is None:
            raise TypeError(f"a {self.kind} has no company")
        return self.company_id

    @property
    def installation(self) -> UUID:
        """The installation of what concerns the whole fleet (`obligation_has_the_subject_of_its_kind`)."""
        if self.installation_id is None:
            raise TypeError(f"a {self.kind} has no installation")
        return self.installation_id

    @property
    def lease(self) -> UUID:
        """The lease of a teardown and of all that stands on a lease (the same constraint)."""
        if self.lease_id is None:
            raise TypeError(f"a {self.kind} has no lease")
        return self.lease_id

    @property
    def operation(self) -> UUID:
        """The operation of a recovery (the same constraint)."""
        if self.operation_id is None:
            raise TypeError(f"a {self.kind} has no operation")
        return self.operation_id

    @property
    def run(self) -> UUID:
        """The run of a startup, or of a cancellation (the same constraint)."""
        if self.run_id is None:
            raise TypeError(f"a {self.kind} has no run")
        return self.run_id

    @property
    def continuation(self) -> UUID:
        """The continuation whose run is to be started (the same constraint)."""
        if self.continuation_id is None:
            raise TypeError(f"a {self.kind} has no continuation")
        return self.continuation_id


@dataclass(frozen=True, slots=True)
class Selection:
    """Which obligations of an account are meant; nothing set means all."""

    kinds: tuple[str, ...] = ()
    company_id: UUID | None = None
    lease_id: UUID | None = None
    obligation_id: int | None = None
    ahead: float = 0.0
    """Seconds: what is due within them counts as due. For a second look at one row, soon after the first."""


ALL = Selection()

_COLUMNS = f"""
    id, attempt_id, kind, company_id, coalesce(account_id, '{LANE}') AS account_id, lease_id, operation_id, run_id,
    continuation_id, installation_id, wakes, failures, busy_count
"""  # of the claim

_LOCK_ACCOUNT = """
SELECT concurrency_limit,
       circuit = 'open' AS broken,
       coalesce(blocked_until > now(), false) AS blocked
  FROM leases_provideraccount WHERE id = %(account)s
   FOR NO KEY UPDATE
"""

_LOCK_LANE = f"SELECT {LANE_LIMIT}, false, false FROM leases_installation FOR NO KEY UPDATE"  # noqa: S608 - a constant

# What a person asked for goes first, then deadlines of providers, which do not wait, then what is due longest; what is
# verified of the past gets what all that leaves. Behind an open circuit only the probe is claimed; the provider's own
# Retry-After holds that too, since a probe is a call like any other. The two kinds of picking read an index each, so
# that neither costs the other anything: `obligation_due` and `obligation_verified`.
_CLAIM = """
WITH room AS (
    -- A probe takes no place, so that a full account can still be asked whether it works.
    SELECT CASE WHEN %(broken)s THEN 1 ELSE greatest(0, least(%(want)s, %(limit)s - count(*))) END AS n,
           CASE WHEN %(broken)s THEN 0
                ELSE greatest(0, %(verifying)s - count(*) FILTER (WHERE kind = 'verify_end')) END AS verifying
      FROM leases_obligation
     WHERE {whose} AND attempt_id IS NOT NULL AND due_at > now() AND kind <> 'probe_account'
), first AS (
    SELECT id, attempt_id AS previous
      FROM leases_obligation
     WHERE {whose} AND due_at <= now() + %(ahead)s AND kind <> 'verify_end'
       AND NOT %(blocked)s AND (kind = 'probe_account' OR NOT %(broken)s)
       AND {selected}
     ORDER BY requests > requests_served DESC, kind = 'extend' DESC, due_at
     LIMIT (SELECT n FROM room)
       FOR UPDATE SKIP LOCKED
), last AS (
    SELECT id, attempt_id AS previous
      FROM leases_obligation
     WHERE {whose} AND due_at <= now() + %(ahead)s AND kind = 'verify_end'
       AND NOT %(blocked)s AND NOT %(broken)s
       AND {selected}
     ORDER BY requests > requests_served DESC, due_at
     LIMIT (SELECT least(verifying, n - (SELECT count(*) FROM first)) FROM room)
       FOR UPDATE SKIP LOCKED
), numbered AS (
    SELECT id, previous, row_number() OVER () AS n FROM (SELECT * FROM first UNION ALL SELECT * FROM last) picked
), superseded AS (
    UPDATE leases_attempt a SET finished_at = now(), outcome = 'superseded'
      FROM numbered WHERE a.id = numbered.previous AND a.finished_at IS NULL
), claimed AS (
    UPDATE leases_obligation o
       SET attempt_id = ids.id, worker = %(worker)s, claimed_at = now(), due_at = now() + %(protection)s,
           requests_served = requests
      FROM numbered JOIN unnest(%(ids)s::uuid[]) WITH ORDINALITY AS ids(id, n) USING (n)
     WHERE o.id = numbered.id
    RETURNING o.*
), history AS (
    INSERT INTO leases_attempt (id, company_id, obligation_id, worker, claimed_at,
                                announced_call, outcome, error_kind, error_excerpt)
    SELECT attempt_id, company_id, id, worker, now(), '', '', '', '' FROM claimed
)
SELECT {columns} FROM claimed
"""

_SELECTED = """
           (%(kinds)s::text[] IS NULL OR kind = ANY(%(kinds)s))
       AND (%(company)s::uuid IS NULL OR company_id = %(company)s)
       AND (%(lease)s::uuid IS NULL OR lease_id = %(lease)s)
       AND (%(obligation)s::bigint IS NULL OR id = %(obligation)s)
       AND (attempt_id IS NULL OR due_at <= now())  -- a protection that will end is one
"""


def claiming(account_id: UUID) -> str:
    """Return the statement that claims, for an account or for the built-in lane. Exposed so that its plan is tested."""
    return _CLAIM.format(columns=_COLUMNS, selected=_SELECTED, whose=_whose(account_id))


def _whose(account_id: UUID) -> str:
    return "account_id IS NULL" if account_id == LANE else "account_id = %(account)s"


def lane_of(row: Obligation) -> UUID:
    """Return the id under which a row is claimed: its account's, or `LANE`."""
    return LANE if row.account_id is None else row.account_id


def _claim(row: tuple[Any, ...], at: float) -> Claim:
    return Claim(*(*row, at))


def new_ids(count: int) -> list[UUID]:
    """Return attempt ids to claim with. Made before the statement, so that its lost reply can be asked about."""
    return [uuid4() for _ in range(count)]


def claim(
    account_id: UUID, ids: Sequence[UUID], *, worker: str, clock: Clock, selection: Selection = ALL
) -> list[Claim]:
    """Claim up to `len(ids)` due obligations of an account and return them; fewer when its limit or the debt is less.

    `account_id` is `LANE` for what names no account.

    Raises Django's `OperationalError` when the connection broke; then `reclaim(ids)` tells what was claimed.
    """
    at = clock()
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(_LOCK_LANE if account_id == LANE else _LOCK_ACCOUNT, {"account": account_id})
        row = cursor.fetchone()
        if row is None:
            return []
        limit, broken, blocked = row
        cursor.execute(
            claiming(account_id),
            {
                "account": account_id,
                "want": len(ids),
                "limit": limit,
                "verifying": max(1, limit // VERIFICATION_SHARE),
                "ahead": _interval(selection.ahead),
                "blocked": blocked,
                "broken": broken,
                "kinds": list(selection.kinds) or None,
                "company": selection.company_id,
                "lease": selection.lease_id,
                "obligation": selection.obligation_id,
                "worker": worker,
                "protection": _PROTECTION,
                "ids": list(ids),
            },
        )
        return [_claim(row, at) for row in cursor.fetchall()]


def reclaim(ids: Sequence[UUID], *, clock: Clock) -> list[Claim]:
    """Return the obligations that carry these attempt ids, with their protection renewed (after a lost reply).

    Read without a lock, so that none is missed, and then renewed like all others. A row that could not be renewed is
    worked on all the same; a call that changes something renews it first, in its announcement.
    """
    with connection.cursor() as cursor:
        cursor.execute(
            f"SELECT {_COLUMNS} FROM leases_obligation WHERE attempt_id = ANY(%s)",  # noqa: S608 - a constant
            [list(ids)],
        )
        claimed = [_claim(row, clock() - PROTECTION) for row in cursor.fetchall()]
    renew(claimed, clock=clock)
    return [one for one in claimed if not one.lost]


def renew(claims: Sequence[Claim], *, clock: Clock) -> None:
    """Renew the protection of all these claims in one statement; those whose row was taken over are marked lost.

    Touches nothing but `due_at` of rows that still carry the attempt, so a late renewal changes no settled row, no
    newer attempt and no cooldown (domain I-13).
    """
    at = clock()
    ids = [claim.attempt_id for claim in claims]
    with transaction.atomic(), connection.cursor() as cursor:
        # A row that somebody has locked is being written about at this moment. Waiting for it while holding others
        # could deadlock with a Stop that locks several; it is renewed in the next round.
        cursor.execute(
            """
            WITH mine AS (
                SELECT id FROM leases_obligation WHERE attempt_id = ANY(%(ids)s) FOR UPDATE SKIP LOCKED
            ), renewed AS (
                UPDATE leases_obligation o SET due_at = now() + %(protection)s FROM mine WHERE o.id = mine.id
                RETURNING o.attempt_id
            )
            SELECT attempt_id, attempt_id IN (SELECT attempt_id FROM renewed)
              FROM leases_obligation WHERE attempt_id = ANY(%(ids)s)
            """,
            {"ids": ids, "protection": _PROTECTION},
        )
        kept: dict[UUID, bool] = dict(cursor.fetchall())
    for one in claims:
        if one.attempt_id not in kept:
            one.lost = True
        elif kept[one.attempt_id]:
            one.renewed_at = max(one.renewed_at, at)


def fenced(claim: Claim) -> Obligation | None:
    """Lock and return the obligation if it is still this attempt's, else None.

    The caller is in a transaction and has locked what comes before it (lease, operation, account).
    """
    row = (
        Obligation.objects.select_for_update(no_key=True)
        .filter(pk=claim.obligation_id, attempt_id=claim.attempt_id, closed_at__isnull=True)
        .first()
    )
    if row is None:
        claim.lost = True
    return row


def may_send(claim: Claim, bound: float, margin: float, *, clock: Clock) -> bool:
    """Return whether a call of this bound still fits into the protection last renewed. Asked right before sending.

    A fence stops writes, not calls: a worker that was suspended after its announcement must not send late.
    """
    return not claim.lost and clock() + bound + margin <= claim.renewed_at + PROTECTION


_STANDING = [kind.value for kind in Obligation.STANDING]

_POSTPONE = """
UPDATE leases_obligation
   SET attempt_id = NULL, worker = NULL, claimed_at = NULL,
       due_at = CASE WHEN requests > requests_served THEN now()
                     ELSE greatest(not_before, CASE WHEN %(heeds_wakes)s AND wakes <> %(wakes)s THEN now()
                                                    ELSE coalesce(%(until)s::timestamptz, now() + %(delay)s) END) END,
       failures = failures + %(failed)s,
       busy_count = CASE WHEN %(busy)s THEN busy_count + 1 WHEN %(keeps_busy)s THEN busy_count ELSE 0 END,
       last_error_kind = CASE WHEN %(error_kind)s = '' AND %(failed)s = 0 THEN last_error_kind ELSE %(error_kind)s END,
       escalated_at = coalesce(escalated_at, CASE
           WHEN kind <> 'verify_end' AND failures + %(failed)s >= %(escalate_failures)s
             OR kind <> ALL(%(standing)s) AND owed_since <= now() - %(escalate_after)s
           THEN now() END)
 WHERE id = %(id)s AND attempt_id = %(attempt)s
RETURNING escalated_at = now()
"""


def postpone(
    claim: Claim,
    outcome: Attempt.Outcome,
    *,
    delay: float = 0.0,
    until: datetime | None = None,
    failed: bool = False,
    busy: bool = False,
    error_kind: str = "",
    excerpt: str = "",
) -> bool:
    """Give the row back, due later: in `delay` seconds of the database's clock, or at `until`. Returns whether it held.

    A wake that came since the claim makes it due now instead; a failure keeps its cooldown, unless a person asked.
    A hand-back keeps the busy count. Escalates once, at the fifth failure or when owed too long (design 5); what stands
    for long by its nature is not owed too long.
    """
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(
            _POSTPONE,
            {
                "id": claim.obligation_id,
                "attempt": claim.attempt_id,
                "wakes": claim.wakes,
                "heeds_wakes": not failed,
                "until": until,
                "delay": _interval(delay),
                "failed": int(failed),
                "busy": busy,
                "keeps_busy": outcome == Attempt.Outcome.HANDED_BACK,
                "error_kind": error_kind,
                "escalate_failures": ESCALATE_AT_FAILURES,
                "escalate_after": _interval(ESCALATE_AFTER),
                "standing": _STANDING,
            },
        )
        row = cursor.fetchone()
        held = row is not None
        finish_attempt(claim, outcome if held else Attempt.Outcome.SUPERSEDED, error_kind=error_kind, excerpt=excerpt)
        if held and row[0]:
            record_escalation(claim.obligation_id)
    claim.lost = claim.lost or not held
    return held


def owe_again(claim: Claim, outcome: Attempt.Outcome, *, at: datetime) -> bool:
    """Give the row back paid: the same is owed anew at `at`, with nothing counted against it. Returns whether it held.

    So it escalates by its age only from then on, and a wake that came since the claim makes it due now.
    """
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(
            """
            UPDATE leases_obligation
               SET attempt_id = NULL, worker = NULL, claimed_at = NULL,
                   due_at = CASE WHEN requests > requests_served OR wakes <> %(wakes)s THEN now() ELSE %(at)s END,
                   owed_since = %(at)s, failures = 0, busy_count = 0, last_error_kind = '', escalated_at = NULL
             WHERE id = %(id)s AND attempt_id = %(attempt)s
            """,
            {"id": claim.obligation_id, "attempt": claim.attempt_id, "wakes": claim.wakes, "at": at},
        )
        held = bool(cursor.rowcount)
        finish_attempt(claim, outcome if held else Attempt.Outcome.SUPERSEDED)
    claim.lost = claim.lost or not held
    return held


def quiet_down(claim: Claim, why: Obligation.Quiet, *, still: Callable[[], bool] | None = None) -> bool:
    """Make the row quiet: a person is needed. A wake that came since the claim makes it due now instead.

    So does a fact that is over by now: `still` is asked first, and locks what it reads until this commits.
    """
    with transaction.atomic():
        became = _become_quiet(claim, why, over=still is not None and not still())
        finish_attempt(claim, Attempt.Outcome.SUPERSEDED if became is None else Attempt.Outcome.QUIETED)
        if became:
            obligation = Obligation.objects.get(pk=claim.obligation_id)
            audit.record("obligation.quieted", obligation, company_id=claim.company_id, why=why.value)
    return became is not None


def wait(claim: Claim) -> bool:
    """Let the row wait, without a deadline, for the write that wakes it. One that came since the claim makes it due."""
    with transaction.atomic():
        became = _become_quiet(claim, Obligation.Quiet.WAITING, over=False)
        finish_attempt(claim, Attempt.Outcome.SUPERSEDED if became is None else Attempt.Outcome.WAITING)
    return became is not None


def _become_quiet(claim: Claim, why: Obligation.Quiet, *, over: bool) -> bool | None:
    """Return whether the row is quiet now; False where it is due instead, None where it is not this attempt's."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            UPDATE leases_obligation
               SET attempt_id = NULL, worker = NULL, claimed_at = NULL,
                   due_at = CASE WHEN requests > requests_served THEN now()
                                 WHEN %(over)s OR wakes <> %(wakes)s THEN greatest(now(), not_before) END,
                   quiet = CASE WHEN %(over)s OR wakes <> %(wakes)s OR requests > requests_served
                                THEN '' ELSE %(why)s END
             WHERE id = %(id)s AND attempt_id = %(attempt)s
            RETURNING quiet
            """,
            {
                "id": claim.obligation_id,
                "attempt": claim.attempt_id,
                "wakes": claim.wakes,
                "why": why.value,
                "over": over,
            },
        )
        row = cursor.fetchone()
    return None if row is None else row[0] != ""


def space_out(row: Obligation) -> None:
    """Write when history may be looked at again after the look that begins now; the row is locked and fenced.

    As long as it has been owed, so that each wait is twice the last one, between five minutes and six hours. Written
    before the look, so that it stands whatever becomes of this attempt, and by the database's clock.
    """
    with connection.cursor() as cursor:
        cursor.execute(
            """
            UPDATE leases_obligation SET not_before = now() + least(%(last)s, greatest(%(first)s, now() - owed_since))
             WHERE id = %(id)s
            """,
            {"id": row.pk, "first": _interval(bounds.HISTORY_FIRST), "last": _interval(bounds.HISTORY_LAST)},
        )


def ask_about_history(claim: Claim) -> bool:
    """Make history quiet that was looked at for days in vain; its row was given back. Returns whether it is quiet now.

    Not one that was woken since the facts were read, or that a person asks about: that gets its attempt first.
    """
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(
            """
            UPDATE leases_obligation SET due_at = NULL, quiet = %(why)s
             WHERE id = %(id)s AND attempt_id IS NULL AND closed_at IS NULL AND quiet = ''
               AND wakes = %(wakes)s AND requests = requests_served AND owed_since <= now() - %(after)s
            """,
            {
                "id": claim.obligation_id,
                "wakes": claim.wakes,
                "after": _interval(bounds.HISTORY_FOR),
                "why": Obligation.Quiet.HISTORY_UNVERIFIED.value,
            },
        )
        became = bool(cursor.rowcount)
        if became:
            row = Obligation.objects.get(pk=claim.obligation_id)
            audit.record(
                "obligation.quieted", row, company_id=row.company_id, why=Obligation.Quiet.HISTORY_UNVERIFIED.value
            )
    return became


def finish_attempt(claim: Claim, outcome: Attempt.Outcome, *, error_kind: str = "", excerpt: str = "") -> None:
    """Write the history of an attempt once; repeating it, or coming after its supersession, changes nothing."""
    Attempt.objects.filter(pk=claim.attempt_id, finished_at__isnull=True).update(
        finished_at=Now(), outcome=outcome, error_kind=error_kind, error_excerpt=excerpt[:300]
    )


_OVERDUE = """
WITH overdue AS (
    SELECT o.id FROM leases_obligation o
     WHERE {whose} AND o.closed_at IS NULL AND o.kind <> ALL(%(standing)s)
       AND o.escalated_at IS NULL AND o.owed_since <= now() - %(after)s
       AND {open}
       FOR NO KEY UPDATE SKIP LOCKED  -- whoever has it locked settles it, which escalates too
)
UPDATE leases_obligation o SET escalated_at = now() FROM overdue WHERE o.id = overdue.id
RETURNING o.id
"""

_NOT_BEHIND_A_CIRCUIT = """(o.kind = 'probe_account'
        OR EXISTS (SELECT 1 FROM leases_provideraccount a WHERE a.id = o.account_id AND a.circuit = 'closed'))"""


def escalate_overdue(account_id: UUID) -> None:
    """Escalate what this account has owed for too long without being tried (it was full, or nobody came).

    Behind an open circuit the probe escalates for all of them (design 6). `account_id` is `LANE` for the built-in lane.
    """
    circuit = "true" if account_id == LANE else _NOT_BEHIND_A_CIRCUIT
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(
            _OVERDUE.format(whose=f"o.{_whose(account_id)}", open=circuit),
            {"account": account_id, "after": _interval(ESCALATE_AFTER), "standing": _STANDING},
        )
        ids = [row[0] for row in cursor.fetchall()]
        for pk in ids:
            record_escalation(pk)


def record_escalation(obligation_id: int) -> None:
    """Write the one audit entry of an escalation, in its transaction."""
    row = Obligation.objects.get(pk=obligation_id)
    audit.record(
        "obligation.escalated",
        row,
        company_id=row.company_id,
        kind=row.kind,
        failures=row.failures,
        error_kind=row.last_error_kind,
        lease=str(row.lease_id) if row.lease_id else None,
    )
