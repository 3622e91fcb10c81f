"""What the public functions refuse, and how it is told to a caller. Nothing is half-written when one is raised."""

from __future__ import annotations


class LeaseError(Exception):
    """Base of every refusal. `code` is stable and short; the text is a sentence for people."""

    code = "lease_error"

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code


class NotFound(LeaseError):
    """No such row in this company."""

    code = "not_found"


class AcquireRefused(LeaseError):
    """Refused before any provider was asked to create anything. Nothing is owned."""

    code = "acquire_refused"


class AcquireFailed(LeaseError):
    """The provider answered that nothing was allocated. Nothing is owned."""

    code = "acquire_failed"


class AcquireUncertain(LeaseError):
    """The answer was lost and a sandbox may exist. Its operation owns it: it will be found and destroyed."""

    code = "acquire_uncertain"


class AcquireRejected(LeaseError):
    """The sandbox came to be and may no longer be attached (stopped, run over, archived). It is being destroyed."""

    code = "acquire_rejected"


class ResumeFailed(LeaseError):
    """The stopped sandbox that this run should have again could not be started now. It is kept; nothing was created."""

    code = "resume_failed"


class AcquireInProgress(LeaseError):
    """The same request is being served at this moment. Ask again; nothing was done."""

    code = "acquire_in_progress"


class AdmissionClosed(LeaseError):
    """The lease takes no work any more, because it was released.

    Or for now (`observing`): it is of before, and this database may be a restored or copied one.
    """

    code = "admission_closed"


class ControlRefused(LeaseError):
    """This controller does not hold the run (any more). The code says why.

    It is `controlled`, `controller_replaced`, `controller_lapsed`, `run_over` or `startup_open`.
    """

    code = "control_refused"


class ContinuationRefused(LeaseError):
    """What was asked for can never start a run, or is over already. Nothing was written. The code says why.

    It is `not_a_user`, `no_issue`, `company_closed`, `different_message` or `started`.
    """

    code = "continuation_refused"


class DecisionRefused(LeaseError):
    """What was found, or where the row stands, does not allow what an operator decided. Nothing was written."""

    code = "decision_refused"


class WorkFailed(LeaseError):
    """The provider could not run the work. `code` is the provider's error kind."""
