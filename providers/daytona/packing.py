"""Reading a directory of a sandbox through commands, piece by piece, for the service streams no file that it has not.

A `tar` that runs on in the sandbox writes into a pipe with a name, and each command reads the next piece of it, as
base64. So nothing takes room: the pipe has none, and what was not read yet is not packed yet. What `tar` ended with
follows its stream, and zeros behind that, so that the last piece is as long as all others.

That needs `tar`, `mkfifo`, `dd` (with `iflag=fullblock`) and `base64` in the image. What was begun is ended, and its
pipe removed, when the reader is through or gives up, and by itself when the call's bound passed.
"""

from __future__ import annotations

import base64
import math
import re
import shlex
import time
import uuid
from collections.abc import Generator
from contextlib import suppress

from providers import archiving, shell
from providers.contract import EXCERPT_LIMIT, ErrorKind, ProviderError
from providers.failures import FULL_DISK
from providers.http_api import Conversation
from providers.reading import not_understood

_PIECE = 4 << 20
_BLOCK = 1 << 16

# In the background: $1 the pipe's directory, $2 directory, $3 mark, $4 bytes of a piece, $5 seconds, $6 a script that
# kills what carries the variable $7. It keeps the pipe open at both ends, so that nobody who reads from it meets its
# end, and nobody who writes to it a pipe that was left. Its timer ends it all, without the variable: who kills has to
# outlive the others.
_WRITE = f"""
(sleep "$5"; rm -rf -- "$1"; unset "${{7%%=*}}"; exec /bin/sh -c "$6" sh "$7") &
exec 3<>"$1/pipe" 4>"$1/complaint"
directory=$2 mark=$3 piece=$4
(
  {archiving.PACK}
  exit "$packed"
) >&3 2>&4 3>&- 4>&-
status=$?
printf '\\n%s %s ' "$mark" "$status" >&3
head -c {EXCERPT_LIMIT} "$1/complaint" | base64 | tr -d '\\n' >&3
echo >&3
head -c "$piece" /dev/zero >&3
"""

# $1 directory, $2 mark, $3 bytes of a piece, $4 the script of the background, $5 seconds, $6 and $7 as there.
_BEGIN = f"""
directory=$1 mark=$2 work=
[ -d "$directory" ] || {{ echo "$mark {archiving.MISSING}"; exit 0; }}
for place in "${{TMPDIR:-/tmp}}" /dev/shm; do
  if said=$(mktemp -d "$place/paperclip-env-XXXXXX" 2>&1); then
    work=$said
    if said=$(mkfifo -m 600 "$work/pipe" 2>&1); then break; fi
    rmdir "$work"
    work=
  fi
done
[ -n "$work" ] || {{ echo "$mark failed $said"; exit 0; }}
export "$7"
/bin/sh -c "$4" sh "$work" "$directory" "$mark" "$3" "$5" "$6" "$7" </dev/null >/dev/null 2>&1 &
echo "$mark ready $work"
"""

# $1 the pipe's directory, $2 blocks of a piece.
_READ = f'dd if="$1/pipe" bs={_BLOCK} count="$2" iflag=fullblock 2>/dev/null | base64'
_END = 'mark=$1\n/bin/sh -c "$3" sh "$mark"; rm -rf -- "$2"'


def archive(conversation: Conversation, toolbox: str, path: str) -> Generator[bytes, None, None]:
    """Yield a directory as a tar stream, through a sandbox's toolbox (`toolbox` is its address).

    Raises `MISSING_PATH` where there is none, `REFUSED` where something of it could not be read, and `DISK_FULL` where
    not even a pipe finds room.
    """
    mark, variable = f"paperclip-env-{uuid.uuid4().hex}", shell.new_mark()
    seconds = str(_seconds(conversation))
    begun = _run(conversation, toolbox, _BEGIN, path, mark, str(_PIECE), _WRITE, seconds, shell.KILL, variable)
    word, work = _begun(begun, mark)
    if word == str(archiving.MISSING):
        raise archiving.missing(path)
    if word != "ready":
        full = any(words in work.lower() for words in FULL_DISK)
        raise ProviderError(
            ErrorKind.DISK_FULL if full else ErrorKind.REFUSED, f"the sandbox cannot make a pipe: {work}"
        )
    try:
        yield from archiving.whole(_pieces(conversation, toolbox, work, mark, path))
    finally:
        _end(conversation, toolbox, work, variable)


def _pieces(conversation: Conversation, toolbox: str, work: str, mark: str, path: str) -> Generator[bytes, None, None]:
    """Yield the stream up to where the mark says what it ended with, which may lie across two pieces."""
    end = re.compile(rb"\n%s (\d+) ([A-Za-z0-9+/=]*)\n" % mark.encode())
    longest = len(mark) + 2 * EXCERPT_LIMIT
    kept = b""
    while True:
        read = _run(conversation, toolbox, _READ, work, str(_PIECE // _BLOCK))
        try:
            piece = base64.b64decode("".join(read.split()), validate=True)
        except ValueError:
            raise ProviderError(
                ErrorKind.REFUSED, f"the sandbox lacks a program that archives need, or broke one off: {read[:100]}"
            ) from None
        kept += piece
        found = end.search(kept, max(0, len(kept) - len(piece) - longest))
        if found:
            yield kept[: found.start()]
            archiving.judge(int(found[1]), path, base64.b64decode(found[2]))
            return
        if len(piece) != _PIECE:
            raise ProviderError(ErrorKind.CONNECTION, "the archive broke off")
        yield kept[:-longest]
        kept = kept[-longest:]


def _end(conversation: Conversation, toolbox: str, work: str, variable: str) -> None:
    """End what was begun, as far as that is possible; the archive is what it is without it, and there is the timer."""
    with suppress(ProviderError):
        _run(conversation, toolbox, _END, variable, work, shell.KILL)


def _run(conversation: Conversation, toolbox: str, script: str, *arguments: str) -> str:
    command = shlex.join(["/bin/sh", "-c", script, "sh", *arguments])
    body = {"command": command, "timeout": _seconds(conversation)}
    answer = conversation.ask("POST", "/process/execute", base=toolbox, body=body)
    result = answer.get("result") if isinstance(answer, dict) else None
    if not isinstance(result, str):
        raise not_understood("the result of a command")
    return result


def _seconds(conversation: Conversation) -> int:
    return max(1, math.ceil(conversation.deadline.end - time.monotonic()))


def _begun(result: str, mark: str) -> tuple[str, str]:
    found = re.search(rf"^{mark} (\w+) ?(.*)$", result, re.MULTILINE)
    if found is None:
        raise ProviderError(ErrorKind.REFUSED, f"the sandbox lacks a program that archives need: {result[:100]}")
    return found[1], found[2].strip()
