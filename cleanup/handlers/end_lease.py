"""The end of an ad-hoc lease at its own deadline: a release that nobody has to ask for.

Asks no provider for anything: what the lease owes from then on is its teardown, and that is another row's work.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from django.db import transaction

from cleanup.claims import Claim, fenced, finish_attempt
from cleanup.work import Call, Context, Done, HandBack, Outcome
from leases import audit, deadlines, transitions
from leases.clock import database_now
from leases.demands import Demand, verb_of_policy
from leases.models import Attempt, Lease, Obligation


def end_lease(claim: Claim, context: Context) -> Generator[Call, Any, Outcome]:  # noqa: ARG001 - a handler's signature
    """Release the lease as its policy says, without a drain: its holder knew the deadline.

    A release at the same time takes the same lock. Whoever comes second finds the row closed, and the lease released.
    """
    yield from ()
    with transaction.atomic():
        lease = Lease.objects.select_for_update(no_key=True).get(pk=claim.lease)
        deadlines.locked(lease)  # all that the release closes, in their order, before the one that is ours
        row = fenced(claim)
        if row is None or lease.state != Lease.State.ACTIVE or lease.ends_at is None:
            return Done(proven=False)
        early = (lease.ends_at - database_now()).total_seconds()
        if early > 0:
            return HandBack(early)  # a person asked for an attempt, which is no reason to end a lease before its time
        transitions.close(row, Obligation.ClosedAs.HANDED_OVER)
        finish_attempt(claim, Attempt.Outcome.HANDED_OVER)
        outcome = Lease.Outcome.FAILED  # nobody said that the use went well
        transitions.begin_teardown(
            lease,
            Demand(verb_of_policy(lease.policy, outcome)),
            outcome=outcome,
            reason="deadline_passed",
            actor=audit.SYSTEM,
        )
    return Done(proven=True)
