"""The launcher's command line, and how it ends: with the command's exit code, or with one sentence on what to mend."""

import sys
from collections.abc import Callable, Sequence

from paperclip_env.stack import commands
from paperclip_env.stack.foreground import Stopped, stoppable
from paperclip_env.stack.problem import Problem
from paperclip_env.stack.up import up

USAGE = """\
usage: python -m paperclip_env.stack COMMAND

  up                the whole system on this machine, until Ctrl-C; its data stays in .local/
  demo [ARGUMENT]   the demo on servers of its own
  test [ARGUMENT]   pytest on servers of its own
  run -- COMMAND    any command on servers of its own, which are thrown away afterwards
  run --up -- COMMAND    any command on the servers of the running `make up`

$DATABASE_URL and $CELERY_BROKER_URL, where set, are used instead of embedded servers.
"""


def main(arguments: Sequence[str]) -> int:
    """Carry out one command and return the exit code."""
    action = _action(arguments)
    if action is None:
        print(USAGE, end="", file=sys.stderr)
        return 2
    try:
        with stoppable():
            return action()
    except Problem as problem:
        print(f"paperclip_env: {problem}", file=sys.stderr)
        return 1
    except Stopped as stopped:
        return 128 + stopped.by


def _action(arguments: Sequence[str]) -> Callable[[], int] | None:
    match list(arguments):
        case ["up"]:
            return up
        case ["demo", *rest]:
            return lambda: commands.demo(rest)
        case ["test", *rest]:
            return lambda: commands.test(rest)
        case ["run", "--", _, *_] as words:
            return lambda: commands.run(words[2:])
        case ["run", "--up", "--", _, *_] as words:
            return lambda: commands.run_in_up(words[3:])
        case _:
            return None
