"""Running one command in a container, with an end to it.

An engine can start a command but not end one. So past its timeout a second command kills whatever carries the first
one's mark, again and again until nothing does (`providers.shell`). Both are small POSIX shell scripts run by the
container's `/bin/sh`, so this needs nothing of the host and works over any transport.
"""

from __future__ import annotations

import time
from contextlib import closing

from providers import shell
from providers.contract import Command, Execution
from providers.docker import answers
from providers.docker.connection import Conversation
from providers.docker.streams import Streams
from providers.failures import Call

# $1 directory, $2 bytes of stdin, then the command. The pipe ends stdin by its length, because a connection with TLS
# cannot be half-closed.
_RUN = """
directory=$1 size=$2
shift 2
if [ -n "$directory" ]; then cd -- "$directory" || exit 126; fi
if [ "$size" = 0 ]; then exec "$@" </dev/null; fi
command -v head >/dev/null || { echo 'stdin needs the program "head" in the image' >&2; exit 126; }
head -c "$size" | { exec "$@"; }
"""

_FIRST_LOOK = 0.01
_LAST_LOOK = 0.5
_SILENCE = 1.0
_LONGEST_SILENCE = 8.0
_DRAIN = 0.5
"""Seconds to wait for what a command wrote before it ended, while something else still holds its streams open."""


def run(conversation: Conversation, container: str, command: Command) -> Execution:
    """Run a command and wait for its end, or end it at its timeout."""
    shell.check(command)
    mark = shell.new_mark()
    argv = ["/bin/sh", "-c", _RUN, "sh", command.cwd or "", str(len(command.stdin)), *command.argv]
    environment = [*(f"{name}={value}" for name, value in command.env.items()), mark]
    exec_id = _prepare(conversation, container, argv, environment, stdin=bool(command.stdin))
    end = time.monotonic() + command.timeout
    with conversation.asking(Call.EXECUTE) as client, closing(client.open_exec(exec_id)) as response:
        streams = Streams(response, command.stdin)
        status = _await(conversation, exec_id, streams, end)
        timed_out = status is None
        if timed_out:
            _kill(conversation, container, exec_id, mark, streams)
            streams.exchange(_bound(conversation, time.monotonic() + _DRAIN))
    frames = streams.frames
    exit_code, signal = (None, None) if status is None else shell.outcome(status)
    return Execution(
        exit_code=exit_code,
        stdout=bytes(frames.stdout),
        stderr=bytes(frames.stderr),
        timed_out=timed_out,
        signal=signal,
        truncated=frames.stdout.truncated or frames.stderr.truncated,
    )


def _prepare(
    conversation: Conversation, container: str, argv: list[str], environment: list[str], *, stdin: bool
) -> str:
    with conversation.asking(Call.EXECUTE) as client:
        return answers.identifier(client.exec_create(container, argv, stdin=stdin, environment=environment))


def _await(conversation: Conversation, exec_id: str, streams: Streams, end: float) -> int | None:
    """Wait until the command ended and return its exit status, or None at `end`.

    The streams end when their last holder does, which may be a background process that the command left behind on
    purpose. So in a long silence the engine is asked, ever more rarely, whether the command itself is over.
    """
    silence = _SILENCE
    while not streams.exchange(_bound(conversation, min(end, time.monotonic() + silence))):
        conversation.deadline.left()
        status = _status(conversation, exec_id)
        if status is not None:
            streams.exchange(_bound(conversation, time.monotonic() + _DRAIN))
            return status
        if time.monotonic() >= end:
            return None
        silence = min(2 * silence, _LONGEST_SILENCE)
    return _await_status(conversation, exec_id, end)


def _await_status(conversation: Conversation, exec_id: str, end: float) -> int | None:
    """Wait for the exit status of a command whose streams ended; some close their streams and go on."""
    look = _FIRST_LOOK
    while (status := _status(conversation, exec_id)) is None and time.monotonic() < end:
        conversation.deadline.pause(look)
        look = min(2 * look, _LAST_LOOK)
    return status


def _status(conversation: Conversation, exec_id: str) -> int | None:
    with conversation.asking(Call.EXECUTE) as client:
        return answers.exit_status(client.exec_inspect(exec_id))


def _kill(conversation: Conversation, container: str, exec_id: str, mark: str, streams: Streams) -> None:
    """Kill all that carries the mark, and see that the command is over.

    Raises `TIMEOUT` when the call's bound passes before that: a command that could not be killed is never reported as
    killed.
    """
    look = _FIRST_LOOK
    while True:
        killer = _prepare(conversation, container, ["/bin/sh", "-c", shell.KILL, "sh", mark], [], stdin=False)
        with conversation.asking(Call.EXECUTE) as client, closing(client.open_exec(killer)) as response:
            Streams(response, b"").exchange(conversation.deadline.end)
            killed = _await_status(conversation, killer, conversation.deadline.end)
        # An engine that cannot hand over what the command wrote does not see its end.
        ended = streams.exchange(_bound(conversation, time.monotonic() + look))
        if killed == 0 and _status(conversation, exec_id) is not None:
            return
        # It may not have been started yet when the killer looked, or still be dying.
        if ended:
            conversation.deadline.pause(look)
        look = min(2 * look, _LAST_LOOK)


def _bound(conversation: Conversation, moment: float) -> float:
    return min(moment, conversation.deadline.end)
