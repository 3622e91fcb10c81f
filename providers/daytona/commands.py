"""Running one command in a sandbox, over the service's toolbox: one line of shell, answered by one text.

The line is the wrapper of `providers.shell`, which keeps the streams apart and ends the command at its timeout.
Input is uploaded as a file first.
"""

from __future__ import annotations

import math

from providers import shell
from providers.contract import Command, Execution
from providers.http_api import Conversation
from providers.reading import not_understood

_SLACK = 10
"""Seconds that the service gives the script beyond the command's own timeout."""


def run(conversation: Conversation, toolbox: str, command: Command) -> Execution:
    """Run a command through a sandbox's toolbox (`toolbox` is its address) and wait for its end."""
    line = shell.line(command)
    if line.stdin:
        form = {"files[0].path": (None, line.stdin), "files[0].file": (line.stdin, command.stdin)}
        conversation.ask("POST", "/files/bulk-upload", base=toolbox, files=form)
    body = {"command": line.text, "timeout": math.ceil(max(0.001, command.timeout)) + _SLACK}
    answer = conversation.ask("POST", "/process/execute", base=toolbox, body=body)
    result = answer.get("result") if isinstance(answer, dict) else None
    if not isinstance(result, str):
        raise not_understood("the result of a command")
    return shell.read(result, line.mark)
