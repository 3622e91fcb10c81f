"""Running one command in a sandbox, with its two streams, its input, and an end.

The service runs a line of shell and answers one text. So every command is wrapped into a small POSIX shell script,
which keeps the streams apart in files, ends the command at its timeout, and prints all of it as base64. The command
carries a mark of its own in its environment, which all its descendants inherit, daemons included; past the timeout
whatever carries it is killed, again and again until nothing does. Not reached: processes that cleared their
environment. They end with the sandbox.

The image needs `/bin/sh`, `mktemp`, `head`, `base64` and `sleep` (busybox and coreutils have them). Exit statuses above
128 are read as the shell's word for "died by a signal".
"""

from __future__ import annotations

import base64
import math
import re
import shlex
import uuid

from providers.contract import OUTPUT_LIMIT, Command, ErrorKind, Execution, ProviderError
from providers.daytona.connection import Conversation

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LINE_LIMIT = 100_000
"""Bytes of a command line. The kernel takes 128 KiB in one argument, which the line becomes."""
_SLACK = 10
"""Seconds that the service gives the script beyond the command's own timeout."""
_SIGNALS = 128

# $1 timeout, $2 directory, $3 file with the input, $4 mark, $5 bytes kept, $6 the inner script, then its arguments.
_OUTER = """
seconds=$1 input=$3 mark=$4 limit=$5 inner=$6 directory=$2
shift 6
work=$(mktemp -d) || exit 125
(
  trap 'kill "$sleeping"; exit 0' TERM
  sleep "$seconds" & sleeping=$!
  wait "$sleeping"
  : >"$work/late"
  until read -r pid <"$work/pid"; do sleep 0.05 || sleep 1; done
  kill -9 "$pid"
) </dev/null >/dev/null 2>&1 &
timer=$!
PAPERCLIP_ENV_COMMAND=$mark /bin/sh -c "$inner" sh "$work/pid" "$directory" "$@" \
  <"${input:-/dev/null}" >"$work/out" 2>"$work/err"
status=$?
kill "$timer" 2>/dev/null
wait "$timer" 2>/dev/null
late=0
if [ -e "$work/late" ]; then
  late=1 found=1
  while [ -n "$found" ]; do
    found=
    for process in /proc/[0-9]*; do
      {
        while IFS= read -r line || [ -n "$line" ]; do
          case $line in *"$mark"*) kill -9 "${process#/proc/}" && found=1; break;; esac
        done <"$process/environ"
      } 2>/dev/null
    done
  done
fi
printf '\\n%s %s %s\\n' "$mark" "$status" "$late"
head -c "$limit" "$work/out" | base64
printf '%s\\n' "$mark"
head -c "$limit" "$work/err" | base64
printf '%s\\n' "$mark"
rm -rf -- "$work"
if [ -n "$input" ]; then rm -f -- "$input"; fi
"""

# $1 where its PID goes, $2 directory, $3 number of variables, the variables, then the command.
_INNER = """
echo $$ >"$1.new" && mv "$1.new" "$1" || exit 125
if [ -n "$2" ]; then cd -- "$2" || exit 126; fi
count=$3
shift 3
while [ "$count" -gt 0 ]; do export "$1"; shift; count=$((count - 1)); done
exec "$@"
"""


def run(conversation: Conversation, toolbox: str, command: Command) -> Execution:
    """Run a command through a sandbox's toolbox (`toolbox` is its address) and wait for its end."""
    if not command.argv or any("\0" in part for part in (*command.argv, command.cwd or "", *command.env.values())):
        raise ProviderError(ErrorKind.INVALID, "a command is a program and its arguments, without null bytes")
    if any(not _NAME.fullmatch(name) for name in command.env):
        raise ProviderError(ErrorKind.INVALID, "a variable of a command has no name that a shell takes")
    token = uuid.uuid4().hex
    mark = f"paperclip-env-{token}"
    stdin = f".paperclip-env-{token}" if command.stdin else ""
    variables = [f"{name}={value}" for name, value in command.env.items()]
    seconds = max(0.001, command.timeout)
    script = ["/bin/sh", "-c", _OUTER, "sh", f"{seconds:.3f}", command.cwd or "", stdin, mark, str(OUTPUT_LIMIT + 1)]
    line = shlex.join([*script, _INNER, str(len(variables)), *variables, *command.argv])
    if len(line.encode()) > _LINE_LIMIT:
        raise ProviderError(ErrorKind.INVALID, f"a command with its environment has at most {_LINE_LIMIT} bytes")
    if stdin:
        form = {"files[0].path": (None, stdin), "files[0].file": (stdin, command.stdin)}
        conversation.ask("POST", "/files/bulk-upload", base=toolbox, files=form)
    body = {"command": line, "timeout": math.ceil(seconds) + _SLACK}
    answer = conversation.ask("POST", "/process/execute", base=toolbox, body=body)
    result = answer.get("result") if isinstance(answer, dict) else None
    if not isinstance(result, str):
        raise ProviderError(ErrorKind.PROTOCOL, "not understood: the result of a command")
    return _read(result, mark)


def _read(result: str, mark: str) -> Execution:
    found = re.search(rf"\n{mark} (\d+) ([01])\n([^-]*?){mark}\n([^-]*?){mark}\n", result)
    if found is None:
        raise ProviderError(ErrorKind.REFUSED, "the sandbox lacks a program that commands need, or broke one off")
    status, late = int(found[1]), found[2] == "1"
    stdout, stderr = (base64.b64decode(found[number]) for number in (3, 4))
    signal = status - _SIGNALS if not late and _SIGNALS < status <= _SIGNALS + 64 else None
    return Execution(
        exit_code=None if late or signal is not None else status,
        stdout=stdout[:OUTPUT_LIMIT],
        stderr=stderr[:OUTPUT_LIMIT],
        timed_out=late,
        signal=signal,
        truncated=max(len(stdout), len(stderr)) > OUTPUT_LIMIT,
    )
