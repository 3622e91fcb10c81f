"""The steps of an acquire, told as they are taken: each commit, each call of a provider, each write of its own.

The names come from the code that runs (the function that commits, the method that is called), so that a step that is
added there appears here by itself, and a table of steps that does not know it can be told so.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from django.db import connection

BEFORE, AFTER = "before", "after"

Point = tuple[str, str]
"""A point between two steps: `before` or `after`, and the step. The second time of a step is `step (2)`."""

CALLS = ("identify", "create", "find", "inspect", "start", "stop", "delete", "execute", "list", "extend", "recover")
"""The methods of the provider contract."""

_WRITES = ("INSERT", "UPDATE", "DELETE", "WITH")
_PASSED_OVER = {"leases.connections", "leases.audit", "leases.waking"}


class Trace:
    """Calls `reached` at each point, in the order of time. It may end the process, or raise."""

    def __init__(self, reached: Callable[[Point], None]) -> None:
        self.reached = reached
        self._times: Counter[str] = Counter()

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        self._times[name] += 1
        times = self._times[name]
        step = name if times == 1 else f"{name} ({times})"
        self.reached((BEFORE, step))
        try:
            yield
        finally:
            self.reached((AFTER, step))

    def follow(self, owner: Any, name: str, step: str) -> None:
        """Make a step of each call of `owner.name`, from now on."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self.step(step):
                return original(*args, **kwargs)

        setattr(owner, name, run)

    def follow_provider(self, adapter: type[Any]) -> None:
        for name in CALLS:
            self.follow(adapter, name, f"call {name}")

    @contextmanager
    def commits(self) -> Iterator[None]:
        """Make a step of each commit of this thread's connection, and of each write outside a transaction."""
        original = connection._commit  # type: ignore[attr-defined]

        def commit() -> None:
            with self.step(f"commit {_author()}"):
                original()

        def execute(run: Callable[..., Any], sql: str, params: Any, many: bool, context: Any) -> Any:  # noqa: FBT001 - Django's signature
            if connection.in_atomic_block or not str(sql).lstrip().upper().startswith(_WRITES):
                return run(sql, params, many, context)
            with self.step(f"write {_author()}"):
                return run(sql, params, many, context)

        connection._commit = commit  # type: ignore[attr-defined]
        try:
            with connection.execute_wrapper(execute):
                yield
        finally:
            connection._commit = original  # type: ignore[attr-defined]


def _author() -> str:
    """Return the function of `leases` or `cleanup` that is at work."""
    frame: Any = sys._getframe()
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        ours = module.startswith(("leases.", "cleanup.")) and not module.startswith("leases.models")
        if ours and module not in _PASSED_OVER:
            function = frame.f_code.co_qualname.partition(".<locals>")[0]
            return f"{module.partition('.')[2].removeprefix('handlers.')}.{function}"
        frame = frame.f_back
    return "nobody of ours"
