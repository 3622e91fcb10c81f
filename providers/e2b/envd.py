"""Running one command in a sandbox, through the agent in it (`envd`), as the official SDK does.

The agent speaks the Connect protocol: a request is one message in an envelope, the answer a stream of such, the last
of which says whether it went well. Each envelope is a byte of flags, four bytes with the length, and JSON. The agent
ends what it started and nothing else, so commands go through the shell script of `providers.shell`.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

import requests

from providers import shell
from providers.contract import Command, ErrorKind, Execution, ProviderError
from providers.failures import Answered, Call, translated
from providers.http_api import Conversation, HttpApi
from providers.reading import not_understood, structure, word

PORT = 49983
_LAST = 0x02
_SLACK = 10
"""Seconds that the agent gives the script beyond the command's own timeout."""
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
    response = conversation.request(
        "POST",
        "/process.Process/Start",
        headers={
            "Content-Type": "application/connect+json",
            "Connect-Protocol-Version": "1",
            "Connect-Timeout-Ms": str(1000 * (math.ceil(max(0.001, command.timeout)) + _SLACK)),
        },
        content=_envelope(asked),
    )
    with translated(conversation.call, conversation.deadline):
        return shell.read(b"".join(_stdout(response.content)).decode("utf-8", "replace"), line.mark)


def _envelope(message: dict[str, Any]) -> bytes:
    data = json.dumps(message).encode()
    return bytes([0]) + len(data).to_bytes(4, "big") + data


def _stdout(stream: bytes) -> Iterator[bytes]:
    """Yield what a process wrote, until the stream says that all is well."""
    while stream:
        flags, size = stream[0], int.from_bytes(stream[1:5], "big")
        data, stream = stream[5 : 5 + size], stream[5 + size :]
        if len(data) != size:
            break
        message = structure(json.loads(data), "a message of a sandbox's agent")
        if flags & _LAST:
            if (error := message.get("error")) is not None:
                code = word(structure(error, "an error of a sandbox's agent").get("code"))
                raise ProviderError(ErrorKind.REFUSED, f"the sandbox broke a command off: {code}")
            return
        event = structure(message.get("event") or {}, "an event of a process")
        if output := word(structure(event.get("data") or {}, "the output of a process").get("stdout")):
            yield base64.b64decode(output)
    raise not_understood("what a process wrote, which breaks off")


def _answered(response: requests.Response) -> Answered:
    return Answered(response.status_code, None)


def _meaning(call: Call, answered: Answered, _: str | None) -> ProviderError:
    # Whatever a sandbox answers says nothing about the account. In front of one that is gone stands a proxy.
    kind = ErrorKind.RATE_LIMITED if answered.status == HTTPStatus.TOO_MANY_REQUESTS else ErrorKind.REFUSED
    return ProviderError(kind, f"{call}: the sandbox, or who stands before it, answered {answered.status}")


def _parts(version: str) -> tuple[int, ...]:
    parts = version.removeprefix("v").split("-")[0].split(".")
    return tuple(int(part) for part in parts) if all(part.isdecimal() for part in parts) else _NAMELESS
