"""The shell scripts with which commands are run in a sandbox, and ended with all that they started.

A command carries a mark of its own in its environment, which all its descendants inherit, daemons included; past its
timeout whatever carries the mark is killed, again and again until nothing does. Not reached: processes that cleared
their environment, or run as another user. They end with the sandbox.

For a service that runs one line of shell and answers one text, `line` wraps a command into a script that keeps its two
streams apart in files, ends it at its timeout, and prints all of it as base64, which `read` takes apart. That needs
`/bin/sh`, `mktemp`, `head`, `base64` and `sleep` in the image (busybox and coreutils have them). Exit statuses above
128 are read as the shell's word for "died by a signal": none of these services tells the two apart.
"""

from __future__ import annotations

import base64
import re
import shlex
import uuid
from dataclasses import dataclass

from providers.contract import OUTPUT_LIMIT, Command, ErrorKind, Execution, ProviderError

_VARIABLE = "PAPERCLIP_ENV_COMMAND"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LINE_LIMIT = 100_000
"""Bytes of a command line. The kernel takes 128 KiB in one argument, which the line becomes."""
_SIGNALS = 128

# One round through all processes, with built-in commands only. A zombie has no environment left.
_KILL_MARKED = """
  found=
  for process in /proc/[0-9]*; do
    {
      while IFS= read -r line || [ -n "$line" ]; do
        case $line in *"$mark"*) kill -9 "${process#/proc/}" && found=1; break;; esac
      done <"$process/environ"
    } 2>/dev/null
  done
"""

KILL = f"""
mark=$1 round=0
while [ $round -lt 100 ]; do
{_KILL_MARKED}
  [ -z "$found" ] && exit 0
  round=$((round + 1))
done
exit 1
"""
"""A script of its own that kills what carries the mark `$1`, and exits with 0 once nothing does."""

# $1 timeout, $2 directory, $3 file with the input, $4 mark, $5 bytes kept, $6 the inner script, then its arguments.
_OUTER = f"""
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
{_VARIABLE}=$mark /bin/sh -c "$inner" sh "$work/pid" "$directory" "$@" \
  <"${{input:-/dev/null}}" >"$work/out" 2>"$work/err"
status=$?
kill "$timer" 2>/dev/null
wait "$timer" 2>/dev/null
late=0
if [ -e "$work/late" ]; then
  late=1 found=1
  while [ -n "$found" ]; do
{_KILL_MARKED}
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


def new_mark() -> str:
    """Return a variable with a value that no other command carries, as `NAME=value`."""
    return f"{_VARIABLE}={uuid.uuid4().hex}"


def check(command: Command) -> None:
    """Raise `INVALID` for what cannot be run as a command."""
    if not command.argv or any("\0" in part for part in (*command.argv, command.cwd or "", *command.env.values())):
        raise ProviderError(ErrorKind.INVALID, "a command is a program and its arguments, without null bytes")
    if any(not name or "=" in name or "\0" in name for name in command.env):
        raise ProviderError(ErrorKind.INVALID, "a variable of a command has no name, or one with = in it")


@dataclass(frozen=True, slots=True)
class Line:
    """A command as one line of shell. `stdin` names the file that has to hold its input first, or is empty."""

    text: str
    mark: str
    stdin: str


def line(command: Command) -> Line:
    """Wrap a command into one line of shell. Raises `INVALID` for one that cannot be run, or is too long."""
    check(command)
    if any(not _NAME.fullmatch(name) for name in command.env):
        raise ProviderError(ErrorKind.INVALID, "a variable of a command has no name that a shell takes")
    token = uuid.uuid4().hex
    mark = f"paperclip-env-{token}"
    stdin = f".paperclip-env-{token}" if command.stdin else ""
    variables = [f"{name}={value}" for name, value in command.env.items()]
    seconds = f"{max(0.001, command.timeout):.3f}"
    script = ["/bin/sh", "-c", _OUTER, "sh", seconds, command.cwd or "", stdin, mark, str(OUTPUT_LIMIT + 1)]
    text = shlex.join([*script, _INNER, str(len(variables)), *variables, *command.argv])
    if len(text.encode()) > _LINE_LIMIT:
        raise ProviderError(ErrorKind.INVALID, f"a command with its environment has at most {_LINE_LIMIT} bytes")
    return Line(text, mark, stdin)


def read(result: str, mark: str) -> Execution:
    """Take apart what such a line printed. Raises `REFUSED` where it did not come to its end."""
    found = re.search(rf"\n{mark} (\d+) ([01])\n([^-]*?){mark}\n([^-]*?){mark}\n", result)
    if found is None:
        raise ProviderError(ErrorKind.REFUSED, "the sandbox lacks a program that commands need, or broke one off")
    late = found[2] == "1"
    stdout, stderr = (base64.b64decode(found[number]) for number in (3, 4))
    exit_code, signal = (None, None) if late else outcome(int(found[1]))
    return Execution(
        exit_code=exit_code,
        stdout=stdout[:OUTPUT_LIMIT],
        stderr=stderr[:OUTPUT_LIMIT],
        timed_out=late,
        signal=signal,
        truncated=max(len(stdout), len(stderr)) > OUTPUT_LIMIT,
    )


def outcome(status: int) -> tuple[int | None, int | None]:
    """Take an exit status apart into exit code and signal, of which one is None."""
    if _SIGNALS < status <= _SIGNALS + 64:
        return None, status - _SIGNALS
    return status, None
