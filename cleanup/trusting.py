"""A person says what an observing database is: the one and only from now on, or a clone of one that goes on elsewhere.

Either is one transaction with its entry in the log, which belongs to no company. What is kept outside follows: a mark
of before a person's word is void, so a place that cannot be reached from here holds nothing against the database.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast
from uuid import UUID, uuid4

from django.db import connection, transaction
from django.db.models import Q, QuerySet

from cleanup import judging, outside
from cleanup.judging import CALM
from cleanup.watermark import Mark, Unclear
from leases import arguments, audit, continuing, recovering, transitions, trust
from leases.errors import DecisionRefused
from leases.models import Continuation, Installation, Lease, Obligation, Operation

UNSETTLED = (*Lease.LIVE, Lease.State.RELEASED)
"""States of leases that are not over, as a clone finds them."""

_TRUSTED = f"""
UPDATE leases_installation
   SET mark = %(mark)s, observing_since = NULL, observing_why = '', observed_mark_at = NULL,
       watermark_generation = greatest(watermark_generation + 1, %(above)s + 1, extract(epoch FROM now())::bigint),
       watermark_identity = %(identity)s, watermark_timeline = %(timeline)s,
       watermark_position = (pg_current_wal_lsn() - '0/0')::bigint, watermark_at = clock_timestamp(),
       judged_server = {trust.SERVER}, calm_until = now() + %(calm)s, gap_ended_at = now()
RETURNING mark, watermark_generation, watermark_identity, watermark_timeline, watermark_position, watermark_at
"""  # noqa: S608 - constants


@dataclass(frozen=True, slots=True)
class Trusted:
    """What became of the word that was given."""

    mark: UUID
    kept_in: tuple[str, ...]
    """The places outside that hold the new high-water mark already; the beat keeps it in all of them."""
    woken: int = 0
    leases: int = 0
    operations: int = 0
    obligations: int = 0


@dataclass(frozen=True, slots=True)
class Examined:
    """What giving trust would meet."""

    trust: trust.Trust
    mark: UUID
    waiting: int
    """Obligations that are left alone for as long as this database observes."""
    leases: int
    operations: int
    own: tuple[UUID, ...]
    """Leases that this database acquired itself since the mark, and that are not over."""


def examine() -> Examined:
    """Return what this database is taken for, and what hangs on that. Judges it if nobody has; changes nothing else."""
    known = judging.read(judging.on_django)
    standing = trust.read()
    own = _own(standing)
    return Examined(
        standing,
        known.mark,
        waiting=_waiting().count(),
        leases=_unsettled().count(),
        operations=_pending().count(),
        own=own,
    )


def as_restore(*, actor: str, reason: str) -> Trusted:
    """End observing: this database is the one and only. Wakes all that was left alone; what was lost stays lost.

    Raises `LeaseError` without a reason, and `DecisionRefused` where the database does not observe.
    """
    arguments.actor(actor)
    arguments.reason(reason, "a decision")
    require_doubt()
    standing = trust.read()
    mark = Installation.current().mark
    above = _generation_outside(mark)
    with transaction.atomic():
        woken = _waiting().count()
        kept = _trust(mark, above)
        _record("installation.trusted_as_restore", actor, reason, why=standing.why, woken=woken)
    return Trusted(kept[0], _keep_outside(*kept), woken=woken)


def as_clone(*, actor: str, reason: str, confirmation: str) -> Trusted:
    """End observing: this is a copy, and the original goes on. Its sandboxes are the original's, and none of ours.

    In one transaction: a new mark for the sandboxes of this installation, and an end without proof and without debt
    (`disowned`) of every lease and creation that the copy brought along. So no path is left that acts on an old sandbox
    by its lease. What waits to continue a run is withdrawn: the original starts it. `confirmation` is the present mark.

    Raises `LeaseError` without a reason, and `DecisionRefused` where another text confirms, or where this database
    acquired leases itself while observing: those carry the old mark, and are to be released, and seen to end, before.
    """
    arguments.actor(actor)
    arguments.reason(reason, "a decision")
    with transaction.atomic():
        standing = trust.read()
        installation = Installation.current()
        if confirmation.strip() != str(installation.mark):
            raise DecisionRefused(
                "what was typed is not the present mark of this installation; nothing was written", code="confirmation"
            )
        if own := _own(standing):
            raise DecisionRefused(
                f"this database acquired {len(own)} leases itself while observing, whose sandboxes carry the old mark; "
                f"release them first, and wait for their end: {', '.join(str(pk) for pk in own[:5])}",
                code="own_leases",
            )
        # In the lock order: the issues of what waits to continue, whose runs are not touched; leases by id, operations,
        # obligations; the installation's row last.
        obligations = Obligation.objects.filter(closed_at__isnull=True, probed_account__isnull=True).count()
        continuing.withdraw_all(
            Continuation.objects.all(), actor=actor, reason=reason, closed_as=Obligation.ClosedAs.DISOWNED
        )
        leases = list(_unsettled().order_by("id").select_for_update(no_key=True, of=("self",)))
        operations = list(_pending().order_by("id").select_for_update(no_key=True, of=("self",)))
        for lease in leases:
            recovering.disown(lease, actor=actor)
            transitions.disown(lease, actor=actor, reason=reason)
        for operation in operations:
            transitions.disown_operation(operation, actor=actor, reason=reason)
        # The startups and cancellations of runs, and what is still asked about leases that are over.
        transitions.close_disowned(Obligation.objects.filter(Q(run__isnull=False) | Q(lease__isnull=False)))
        kept = _trust(uuid4(), 0)
        _record(
            "installation.declared_clone",
            actor,
            reason,
            why=standing.why,
            mark_before=str(installation.mark),
            leases=len(leases),
            operations=len(operations),
        )
    return Trusted(
        kept[0], _keep_outside(*kept), leases=len(leases), operations=len(operations), obligations=obligations
    )


def require_doubt() -> None:
    """Raise `DecisionRefused` where nothing speaks against this database: then there is nothing to say.

    A process that cannot tell is in doubt, too; its person can.
    """
    if trust.read().observing_since is not None:
        return
    if not isinstance(judging.pronounce(judging.on_django, keeps=False), Unclear) and not trust.read().is_observing:
        raise DecisionRefused("this database does not observe: it is trusted already", code="not_observing")


def _own(standing: trust.Trust) -> tuple[UUID, ...]:
    if standing.mark_at is None:
        return ()
    acquired = _unsettled().filter(acquired_at__gt=standing.mark_at).order_by("id").values_list("id", flat=True)
    created = _pending().filter(created_at__gt=standing.mark_at).order_by("id").values_list("lease_uuid", flat=True)
    return (*acquired, *created)


def _unsettled() -> QuerySet[Lease]:
    return Lease.objects.filter(state__in=UNSETTLED)


def _pending() -> QuerySet[Operation]:
    return Operation.objects.filter(state=Operation.State.PENDING)


def _waiting() -> QuerySet[Obligation]:
    return Obligation.objects.filter(quiet=Obligation.Quiet.OBSERVING)


def _trust(mark: UUID, above: int) -> tuple[UUID, Mark]:
    now = judging.read(judging.on_django).facts.now
    with connection.cursor() as cursor:
        cursor.execute(
            _TRUSTED,
            cast(
                "Any", {"mark": mark, "above": above, "identity": now.identity, "timeline": now.timeline, "calm": CALM}
            ),
        )
        row = cursor.fetchone()
    return row[0], Mark(*row[1:])


def _generation_outside(mark: UUID) -> int:
    """Return the latest generation that is found outside: the new one is above it, whatever the clocks say."""
    found = [0]
    for ask in (outside.in_file, outside.in_broker):
        try:
            kept = ask(mark)
        except outside.Silent:
            continue
        found += [kept.generation] if kept is not None else []
    return max(found)


def _keep_outside(mark: UUID, kept: Mark) -> tuple[str, ...]:
    judging.forget()
    places = []
    try:
        outside.keep_in_file(mark, kept)
        places.append(str(outside.file_of(mark)))
    except outside.Silent:
        pass  # the file is the beat's, on its host; what it holds is void by now
    try:
        if outside.keep_in_broker(mark, kept):
            places.append("the broker")
    except outside.Silent:
        pass  # the beat keeps it there at its next look
    if places:
        Installation.objects.filter(mark=mark).update(watermark_outside=True)
    return tuple(places)


def _record(action: str, actor: str, reason: str, **details: object) -> None:
    installation = Installation.current()
    audit.record(action, installation, company_id=None, actor=actor, reason=reason, **details)
