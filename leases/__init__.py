"""What is owed: the model, its transitions and proof, and the functions that control planes call.

Answers for recording ownership before a sandbox exists and for never forgetting it. How a debt is paid (claims,
retries, workers, the beat) is the business of `cleanup`; how a provider is spoken to, of `providers`.

    lease = leases.acquire(environment_id, company_id=company, run_id=run)
    leases.bridge(lease.id).execute(["pytest", "-q"])
    leases.release(lease.id)

These names are loaded on first use, because Django's models may be imported only after its set-up.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leases.acquisition import acquire
    from leases.archives import offered as offered_archives
    from leases.archives import open_archive
    from leases.archiving import archive_credential, delete_credential
    from leases.bridging import bridge
    from leases.cancelling import cancellation, request_cancellation
    from leases.closing import close_company
    from leases.continuing import request_retry, save_message
    from leases.continuing import withdraw as withdraw_continuation
    from leases.controllers import acknowledge_cancellation, give_up_control, renew, take_control
    from leases.deleting import delete_environment
    from leases.ending import execution_ended
    from leases.facts import close_recovery_action, open_recovery_action, tell_issue, tell_run
    from leases.fencing import fence, go_down
    from leases.recovering import recover_workspace
    from leases.releasing import release, stop
    from leases.retrying import retry

__all__ = [
    "acknowledge_cancellation",
    "acquire",
    "archive_credential",
    "bridge",
    "cancellation",
    "close_company",
    "close_recovery_action",
    "delete_credential",
    "delete_environment",
    "execution_ended",
    "fence",
    "give_up_control",
    "go_down",
    "offered_archives",
    "open_archive",
    "open_recovery_action",
    "recover_workspace",
    "release",
    "renew",
    "request_cancellation",
    "request_retry",
    "retry",
    "save_message",
    "stop",
    "take_control",
    "tell_issue",
    "tell_run",
    "withdraw_continuation",
]

_NAMED = {"offered_archives": "offered", "withdraw_continuation": "withdraw"}
"""Names that say more here than they have to at home."""

_HOMES = {
    "acknowledge_cancellation": "leases.controllers",
    "acquire": "leases.acquisition",
    "archive_credential": "leases.archiving",
    "bridge": "leases.bridging",
    "cancellation": "leases.cancelling",
    "close_company": "leases.closing",
    "close_recovery_action": "leases.facts",
    "delete_credential": "leases.archiving",
    "delete_environment": "leases.deleting",
    "execution_ended": "leases.ending",
    "fence": "leases.fencing",
    "give_up_control": "leases.controllers",
    "go_down": "leases.fencing",
    "offered_archives": "leases.archives",
    "open_archive": "leases.archives",
    "recover_workspace": "leases.recovering",
    "open_recovery_action": "leases.facts",
    "release": "leases.releasing",
    "renew": "leases.controllers",
    "request_cancellation": "leases.cancelling",
    "request_retry": "leases.continuing",
    "retry": "leases.retrying",
    "save_message": "leases.continuing",
    "stop": "leases.releasing",
    "take_control": "leases.controllers",
    "tell_issue": "leases.facts",
    "tell_run": "leases.facts",
    "withdraw_continuation": "leases.continuing",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), _NAMED.get(name, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
