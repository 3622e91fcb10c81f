"""Running one command in a container, with an end to it.

An engine can start a command but not end one. So every command carries a mark of its own in its environment, which all
its descendants inherit, daemons included; past its timeout a second command kills whatever carries the mark, again and
again until nothing does. Both are small POSIX shell scripts run by the container's `/bin/sh`, so this needs nothing of
the host and works over any transport. Not reached: processes that cleared their environment or run as another user
than the container's. They end with the sandbox.

Exit statuses above 128 are read as the shell's word for "died by a signal": engines do not tell the two apart.
"""

from __future__ import annotations

import time
import uuid
from contextlib import closing

from providers.contract import Command, ErrorKind, Execution, ProviderError
from providers.docker import answers
from providers.docker.connection import Conversation
from providers.docker.errors import Call
from providers.docker.streams import Streams

_MARK = "PAPERCLIP_ENV_COMMAND"

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

# $1 the mark. Built-in commands only. A zombie has no environment left, so the loop ends when all are dead.
_KILL = """
round=0
while [ $round -lt 100 ]; do
  found=
  for process in /proc/[0-9]*; do
    {
      while IFS= read -r line || [ -n "$line" ]; do
        case $line in *"$1"*) kill -9 "${process#/proc/}" && found=1; break;; esac
      done <"$process/environ"
    } 2>/dev/null
  done
  [ -z "$found" ] && exit 0
  round=$((round + 1))
done
exit 1
"""

_SIGNALS = 128
_FIRST_LOOK = 0.01
_LAST_LOOK = 0.5
_SILENCE = 1.0
_LONGEST_SILENCE = 8.0
_DRAIN = 0.5
"""Seconds to wait for what a command wrote before it ended, while something else still holds its streams open."""


def run(conversation: Conversation, container: str, command: Command) -> Execution:
    """Run a command and wait for its end, or end it at its timeout."""
    if not command.argv or any("\0" in part for part in (*command.argv, command.cwd or "", *command.env.values())):
        raise ProviderError(ErrorKind.INVALID, "a command is a program and its arguments, without null bytes")
    if any(not name or "=" in name or "\0" in name for name in command.env):
        raise ProviderError(ErrorKind.INVALID, "a variable of a command has no name, or one with = in it")
    mark = f"{_MARK}={uuid.uuid4().hex}"
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
    exit_code, signal = _read(status)
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
        killer = _prepare(conversation, container, ["/bin/sh", "-c", _KILL, "sh", mark], [], stdin=False)
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


def _read(status: int | None) -> tuple[int | None, int | None]:
    """Take an exit status apart into exit code and signal."""
    if status is not None and _SIGNALS < status <= _SIGNALS + 64:
        return None, status - _SIGNALS
    return status, None
