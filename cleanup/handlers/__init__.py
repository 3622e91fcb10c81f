"""One handler per kind of obligation, registered here and nowhere else."""

from __future__ import annotations

from cleanup.handlers.confirm_cancel import confirm_cancel
from cleanup.handlers.dispose import dispose
from cleanup.handlers.end_fence import end_fence
from cleanup.handlers.end_lease import end_lease
from cleanup.handlers.end_recovery import end_recovery
from cleanup.handlers.extend import extend
from cleanup.handlers.probe_account import probe_account
from cleanup.handlers.recover_creation import recover_creation
from cleanup.handlers.recover_start import recover_start
from cleanup.handlers.recover_workspace import recover_workspace
from cleanup.handlers.settle_orphan import settle_orphan
from cleanup.handlers.start_continuation import start_continuation
from cleanup.handlers.startup import startup_of
from cleanup.handlers.teardown import teardown
from cleanup.handlers.verify_end import verify_end
from cleanup.handlers.watch_controllers import watch_controllers
from cleanup.handlers.watch_restart import watch_restart
from cleanup.work import Handler
from leases.models import Obligation

HANDLERS: dict[str, Handler] = {
    Obligation.Kind.TEARDOWN: teardown,
    Obligation.Kind.RECOVER_CREATION: recover_creation,
    Obligation.Kind.RECOVER_START: recover_start,
    Obligation.Kind.STARTUP: startup_of,
    Obligation.Kind.EXTEND: extend,
    Obligation.Kind.END_LEASE: end_lease,
    Obligation.Kind.END_FENCE: end_fence,
    Obligation.Kind.PROBE_ACCOUNT: probe_account,
    Obligation.Kind.DISPOSE: dispose,
    Obligation.Kind.SETTLE_ORPHAN: settle_orphan,
    Obligation.Kind.WATCH_CONTROLLERS: watch_controllers,
    Obligation.Kind.VERIFY_END: verify_end,
    Obligation.Kind.START_CONTINUATION: start_continuation,
    Obligation.Kind.RECOVER_WORKSPACE: recover_workspace,
    Obligation.Kind.END_RECOVERY: end_recovery,
    Obligation.Kind.WATCH_RESTART: watch_restart,
    Obligation.Kind.CONFIRM_CANCEL: confirm_cancel,
}
