"""Running one command in a sandbox, through the agent in it (`envd`), as the official SDK does.

The agent speaks the Connect protocol: a request is one message in an envelope, the answer a stream of such, the last
of which says whether it went well. Each envelope is a byte of flags, four bytes with the length, and JSON. The agent
ends what it started and nothing else, so commands go through the shell script of `providers.shell`.
"""

from __future__ import annotations

import base64
import json
import math
import time
from collections.abc import Generator, Iterator
from contextlib import closing
from http import HTTPStatus
from typing import Any

import requests

from providers import archiving, shell
from providers.contract import EXCERPT_LIMIT, Command, ErrorKind, Execution, ProviderError
from providers.failures import Answered, Call, translated
from providers.http_api import Conversation, HttpApi
from providers.reading import not_understood, structure, word

PORT = 49983
_LAST = 0x02
_SLACK = 10
"""Seconds that the agent gives the script beyond the command's own timeout."""
_HEAD = 5
_MEANINGS: dict[int, ErrorKind] = {
    HTTPStatus.TOO_MANY_REQUESTS: ErrorKind.RATE_LIMITED,
    # To an upload, of what a command is to read.
    HTTPStatus.INSUFFICIENT_STORAGE: ErrorKind.DISK_FULL,
}
_PACK = f"""
directory=$1
[ -d "$directory" ] || exit {archiving.MISSING}
{archiving.PACK}
exit "$packed"
"""
_NAMELESS = (0, 4, 0)
"""Agents before this version run nothing for a caller that names no user."""


def agent(base: str, sandbox_id: str, token: str, version: str, tls_ca: str | None) -> HttpApi:
    """Return the way to the agent of one sandbox. Its token opens this sandbox only; the API's key is not sent."""
    headers = {"E2b-Sandbox-Id": sandbox_id, "E2b-Sandbox-Port": str(PORT)}
    if _parts(version) < _NAMELESS:
        headers["Authorization"] = "Basic " + base64.b64encode(b"user:").decode()
    return HttpApi(
        base,
        token,
        headers=lambda secret: {**headers, "X-Access-Token": secret},
        answered=_answered,
        meaning=_meaning,
        tls_ca=tls_ca,
        keeps=False,
    )


def run(conversation: Conversation, command: Command) -> Execution:
    """Run a command and wait for its end."""
    line = shell.line(command)
    if line.stdin:
        # The agent writes, like commands start, in its user's home directory.
        conversation.request("POST", "/files", query={"path": line.stdin}, files={"file": (line.stdin, command.stdin)})
    asked = {"process": {"cmd": "/bin/sh", "args": ["-c", line.text], "envs": {}}, "stdin": False}
    response = conversation.request(**_start(asked, math.ceil(max(0.001, command.timeout)) + _SLACK))
    with translated(conversation.call, conversation.deadline):
        output = b"".join(data for name, data in _events(iter([response.content])) if name == "stdout")
        return shell.read(output.decode("utf-8", "replace"), line.mark)


def archive(conversation: Conversation, path: str) -> Generator[bytes, None, None]:
    """Yield a directory as the tar stream that a process in the sandbox writes. It is ended by the agent with the call.

    Raises `MISSING_PATH` where there is none, `REFUSED` where something of it could not be read.
    """
    script = ["-c", _PACK, "sh", path]
    asked = {"process": {"cmd": "/bin/sh", "args": script, "envs": {}}, "stdin": False}
    seconds = math.ceil(conversation.deadline.end - time.monotonic())
    response = conversation.request(**_start(asked, max(1, seconds)), stream=True)
    complaint, status = b"", None

    def output() -> Generator[bytes, None, None]:
        nonlocal complaint, status
        with closing(conversation.pieces(response)) as pieces:
            for name, data in _events(pieces):
                if name == "stdout":
                    yield data
                elif name == "stderr":
                    complaint = (complaint + data)[-EXCERPT_LIMIT:]
                else:
                    status = int(data)
        # Before it is looked at whether the archive is whole: this says why it is not.
        archiving.judge(status, path, complaint)

    with translated(conversation.call, conversation.deadline):
        yield from archiving.whole(output())


def _start(asked: dict[str, Any], seconds: int) -> dict[str, Any]:
    """Return the request that starts a process, which has so many seconds."""
    return {
        "method": "POST",
        "path": "/process.Process/Start",
        "headers": {
            "Content-Type": "application/connect+json",
            "Connect-Protocol-Version": "1",
            "Connect-Timeout-Ms": str(1000 * seconds),
        },
        "content": _envelope(asked),
    }


def _envelope(message: dict[str, Any]) -> bytes:
    data = json.dumps(message).encode()
    return bytes([0]) + len(data).to_bytes(4, "big") + data


def _events(pieces: Iterator[bytes]) -> Iterator[tuple[str, bytes]]:
    """Yield what a process wrote, each with the name of its stream, and its exit status as `end`.

    Ends where the stream says that all is well, and raises `PROTOCOL` where it breaks off before.
    """
    stream = bytearray()
    for piece in pieces:
        stream += piece
        while len(stream) >= _HEAD and len(stream) >= _HEAD + (size := int.from_bytes(stream[1:_HEAD], "big")):
            flags, data = stream[0], bytes(stream[_HEAD : _HEAD + size])
            del stream[: _HEAD + size]
            message = structure(json.loads(data), "a message of a sandbox's agent")
            if flags & _LAST:
                if (error := message.get("error")) is not None:
                    code = word(structure(error, "an error of a sandbox's agent").get("code"))
                    raise ProviderError(ErrorKind.REFUSED, f"the sandbox broke a command off: {code}")
                return
            yield from _told(structure(message.get("event") or {}, "an event of a process"))
    raise not_understood("what a process wrote, which breaks off")


def _told(event: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
    data = structure(event.get("data") or {}, "the output of a process")
    for name in ("stdout", "stderr"):
        if output := word(data.get(name)):
            yield name, base64.b64decode(output)
    if (end := event.get("end")) is not None:
        end = structure(end, "the end of a process")
        # What is nothing is left out: an exit status of 0, too.
        code = end.get("exitCode", 0) if end.get("exited") is True else -1
        yield "end", b"%d" % (code if isinstance(code, int) else -1)


def _answered(response: requests.Response) -> Answered:
    return Answered(response.status_code, None)


def _meaning(call: Call, answered: Answered, _: str | None) -> ProviderError:
    # Whatever a sandbox answers says nothing about the account. In front of one that is gone stands a proxy.
    kind = _MEANINGS.get(answered.status, ErrorKind.REFUSED)
    return ProviderError(kind, f"{call}: the sandbox, or who stands before it, answered {answered.status}")


def _parts(version: str) -> tuple[int, ...]:
    parts = version.removeprefix("v").split("-")[0].split(".")
    return tuple(int(part) for part in parts) if all(part.isdecimal() for part in parts) else _NAMELESS
