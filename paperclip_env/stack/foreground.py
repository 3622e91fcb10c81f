"""Running one command in the foreground, and being ended in good order.

Answers for: Ctrl-C and TERM reach the command once, the launcher outlives it to clean up, and its exit code is ours.
"""

import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType

from paperclip_env.stack import process
from paperclip_env.stack.problem import Problem

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(BaseException):
    """Somebody asked the launcher to end. Not an `Exception`: nothing but the outermost frame may swallow it."""

    def __init__(self, by: signal.Signals) -> None:
        super().__init__(by.name)
        self.by = by


@contextmanager
def stoppable() -> Iterator[None]:
    """Turn the first ending signal into `Stopped`, and ignore the following ones while everything is being stopped."""

    def stop(number: int, _frame: FrameType | None) -> None:
        for ending in _ENDING:
            signal.signal(ending, signal.SIG_IGN)
        raise Stopped(signal.Signals(number))

    for ending in _ENDING:
        signal.signal(ending, stop)
    yield


def run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run `command` on our terminal and return its exit code (128 + number if a signal ended it)."""
    from_terminal = sys.stdin is not None and sys.stdin.isatty()
    try:
        child = subprocess.Popen(
            command,
            env=dict(environment),
            preexec_fn=process.die_with_launcher(signal.SIGTERM),  # noqa: PLW1509 -- the launcher has one thread
        )
    except OSError as error:
        raise Problem(f"Cannot start {command[0]}: {error.strerror}") from None

    def pass_on(number: int, _frame: FrameType | None) -> None:
        # A terminal has sent Ctrl-C to the command by itself; twice would mean "at once".
        if not (number == signal.SIGINT and from_terminal):
            child.send_signal(number)

    before = {ending: signal.signal(ending, pass_on) for ending in _ENDING}
    try:
        code = child.wait()
    finally:
        for ending, handler in before.items():
            signal.signal(ending, handler)
    return code if code >= 0 else 128 - code
