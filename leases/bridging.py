"""The bridge: work between host and sandbox, admitted only while the lease is active.

Admission is decided under the lease's row lock (`FOR SHARE`: work does not exclude work, release excludes it), so what
is admitted is either seen by the release, which then drains it, or refused. Work that was admitted and finds the lease
released right before it begins backs out. The end of each activity wakes the teardown (trigger).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from uuid import UUID

from django.db import transaction
from django.db.models import Q
from django.db.models.functions import Now

from leases import arguments, bounds, controllers, fencing, trust
from leases.calling import open_recorded
from leases.controllers import Controller
from leases.credentials import SecretUnavailable
from leases.errors import AdmissionClosed, LeaseError, NotFound, WorkFailed
from leases.models import BridgeActivity, Lease, Run
from providers.contract import Command, Execution, ProviderError
from providers.registry import ConfigurationError, ProviderUnavailable

Outcome = BridgeActivity.Outcome


class Bridge:
    """The way into one lease's sandbox. Holds no connection and no state; all work is admitted piece by piece."""

    def __init__(self, lease_id: UUID, company_id: UUID | None = None, controller: Controller | None = None) -> None:
        if controller is not None:
            controllers.check(controller)
        self.controller = controller
        self.lease_id = arguments.identity(lease_id, "lease_id")
        self.company_id = arguments.identity(company_id, "company_id") if company_id is not None else None

    def execute(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout: float = 60.0,
    ) -> Execution:
        """Run a command in the sandbox and return what became of it; `timeout` in seconds ends it.

        Raises `AdmissionClosed` when the lease takes no work (any more), `WorkFailed` when the provider could not run
        it.
        """
        argv = list(argv) if not isinstance(argv, str | bytes) else argv
        if not arguments.is_argv(argv):
            raise TypeError("argv is the program and its arguments, one string each, such as ['sh', '-c', 'ls']")
        words = [*(env or {}).keys(), *(env or {}).values(), *([cwd] if cwd is not None else [])]
        if words and not arguments.is_argv(words):
            raise TypeError("cwd, and the names and values of env, are text, without NUL")
        if not isinstance(stdin, bytes):
            raise TypeError("stdin is bytes")
        arguments.seconds(timeout, "timeout", longest=bounds.WORK_LONGEST)
        command = Command(tuple(argv), cwd=cwd, env=dict(env or {}), stdin=stdin, timeout=timeout)
        within = timeout + bounds.EXECUTE_OVERHEAD
        lease, activity = self._admit(BridgeActivity.Kind.EXECUTE, within)
        outcome, exit_code, error_kind = Outcome.FAILED, None, ""
        try:
            provider = open_recorded(lease)
            if not self._still_open():
                outcome = Outcome.BACKED_OUT
                raise AdmissionClosed(
                    "the lease was released, or its controller lost the run, before the work began; it backed out"
                )
            execution = provider.execute(lease.resource_id, command, within=within)
            outcome, exit_code = Outcome.COMPLETED, execution.exit_code
            return execution
        except ProviderError as error:
            error_kind = error.kind.value
            raise WorkFailed(f"the provider could not run the command: {error}", code=error_kind) from error
        except (ProviderUnavailable, SecretUnavailable, ConfigurationError) as error:
            raise WorkFailed(str(error), code="not_ready") from error
        finally:
            self._end(activity, outcome, exit_code=exit_code, error_kind=error_kind)

    @contextmanager
    def activity(self, *, timeout: float, kind: str = BridgeActivity.Kind.SYNC) -> Iterator[BridgeActivity]:
        """Admit work that the caller does by its own means.

        The teardown waits for the end of the block, for at most the drain bound. `timeout` in seconds; past it the work
        holds nothing any more. Raises `AdmissionClosed`.
        """
        arguments.seconds(timeout, "timeout", longest=bounds.WORK_LONGEST)
        if kind not in BridgeActivity.Kind.values:
            raise LeaseError(f"kind must be one of {', '.join(BridgeActivity.Kind.values)}", code="invalid")
        _, activity = self._admit(kind, timeout)
        outcome = Outcome.FAILED
        try:
            if not self._still_open():
                outcome = Outcome.BACKED_OUT
                raise AdmissionClosed(
                    "the lease was released, or its controller lost the run, before the work began; it backed out"
                )
            yield activity
            outcome = Outcome.COMPLETED
        finally:
            self._end(activity, outcome)

    def _admit(self, kind: str, seconds: float) -> tuple[Lease, BridgeActivity]:
        with transaction.atomic(durable=True):
            # FOR SHARE through the ORM does not exist; the row is locked by the statement below it in one round trip.
            # The run before the lease: whoever takes the run over, or ends it, sees this work or comes before it.
            run = controllers.shared(self.controller) if self.controller is not None else None
            lease = Lease.objects.raw(
                "SELECT * FROM leases_lease WHERE id = %s AND (%s::uuid IS NULL OR company_id = %s::uuid) FOR SHARE",
                [self.lease_id, self.company_id, self.company_id],
            )
            for row in lease:
                controllers.of_its_run(self.controller, row.run_id)
                lost = controllers.lost(run, self.controller) if run is not None else None
                if lost is not None and not fencing.owns(row, self.controller):
                    raise AdmissionClosed(lost.sentence, code=lost.code)
                if row.state != Lease.State.ACTIVE:
                    raise AdmissionClosed(f"the lease is {row.get_state_display()} and takes no work any more")
                _require_trusted(row)
                activity = BridgeActivity.objects.create(
                    company_id=row.company_id, lease=row, kind=kind, deadline=Now() + timedelta(seconds=seconds)
                )
                return row, activity
        raise NotFound(f"no lease {self.lease_id} in this company")

    def _still_open(self) -> bool:
        lease = Lease.objects.filter(pk=self.lease_id, state=Lease.State.ACTIVE)
        if self.controller is not None:
            holds_run = Q(
                run__controller_generation=self.controller.generation,
                run__controller_id=self.controller.controller_id,
                run__status__in=Run.LIVE,
            )
            lease = lease.filter(holds_run | Q(pk__in=fencing.fences_of(self.controller).values("lease_id")))
        return lease.exists()

    def _end(
        self, activity: BridgeActivity, outcome: str, *, exit_code: int | None = None, error_kind: str = ""
    ) -> None:
        BridgeActivity.objects.filter(pk=activity.pk, ended_at__isnull=True).update(
            ended_at=Now(), outcome=outcome, exit_code=exit_code, error_kind=error_kind
        )


def bridge(lease_id: UUID, *, company_id: UUID | None = None, controller: Controller | None = None) -> Bridge:
    """Return the bridge into a lease's sandbox. Asks nothing yet; `company_id` restricts it to that tenant's leases.

    With a `controller` it admits work only while that one holds the lease's run: else `AdmissionClosed`, with the code
    that `renew` is refused with.
    """
    return Bridge(lease_id, company_id, controller)


def _require_trusted(lease: Lease) -> None:
    """Refuse work in a sandbox that may be somebody else's by now: of a lease of before, while this database observes.

    Not for the moment in which a server that was started anew is still to be judged: its live runs work on.
    """
    trusted = trust.read()
    if trusted.observing_since is not None and (trusted.mark_at is None or lease.acquired_at <= trusted.mark_at):
        raise AdmissionClosed(trust.sentence(trusted.why, trusted.observing_since), code="observing")
