"""What tests at a real service share: a look into a sandbox with the vendor's own client, and one whole life of one.

They run only with a key in the environment, for they cost money; `live` skips them with that reason.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable

import pytest

from providers.conformance import Harness, Sandboxes
from providers.contract import Gone, Resource, Running, Stopped


def live(variable: str) -> list[pytest.MarkDecorator]:
    """Return the marks of tests that need this variable to hold a key."""
    reason = f"{variable} is not in the environment: nothing of the real service is tested"
    return [pytest.mark.skipif(not os.environ.get(variable), reason=reason), pytest.mark.timeout(900)]


class LiveHarness(Harness):
    """A real service. It lets nobody look at its machines, so its own client is asked what executes in a sandbox."""

    within = 90.0

    @abstractmethod
    def shell_status(self, resource_id: str, script: str) -> int | None:
        """Run a script in a sandbox with the vendor's own client. None where that client says that it does not run."""

    def executes(self, resource: Resource, tag: str) -> bool:
        # The brackets keep the search from finding itself.
        pattern = f"[{tag[0]}]{tag[1:]}"
        look = f"cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n' | grep -qx -- '{pattern}'"
        return self.shell_status(resource.resource_id, look) == 0


def lives_once(sandboxes: Sandboxes, is_gone: Callable[[str], bool]) -> None:
    """Lead one small sandbox through its life. `is_gone` asks the vendor's own client at its end."""
    harness = sandboxes.harness
    resource, tag = sandboxes.create(), sandboxes.tag()
    sandboxes.execute(resource, harness.daemon(tag))
    assert sandboxes.executes(resource, tag)
    sandboxes.run(resource, "echo saved > note")
    assert not is_gone(resource.resource_id)
    sandboxes.stop(resource)
    sandboxes.becomes(resource, Stopped)
    assert not harness.executes(resource, tag)
    sandboxes.start(resource)
    sandboxes.becomes(resource, Running)
    assert sandboxes.run(resource, "cat note").stdout == b"saved\n"
    assert not harness.executes(resource, tag)
    sandboxes.delete(resource)
    sandboxes.becomes(resource, Gone)
    assert is_gone(resource.resource_id)
