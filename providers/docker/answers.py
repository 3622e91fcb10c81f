"""What an engine's descriptions of containers mean in the terms of the contract. Pure functions of the answers."""

from __future__ import annotations

import base64
import json
from typing import Any

from providers.contract import Busy, Ended, Resource, Running, Sighting, Stopped
from providers.contract import Unknown as Unclear
from providers.reading import marks, not_understood, structure, text

_DIRECTORY = 1 << 31
"""In a mode as Go writes it."""
_OWN_PID_NAMESPACE = frozenset({"", "private"})


def listed(answer: object) -> list[Resource]:
    """Read an answer of `GET /containers/json`.

    Raises `PROTOCOL` where one entry cannot be understood: a list with a gap is no list.
    """
    if not isinstance(answer, list):
        raise not_understood("a list of containers")
    return [_entry(item) for item in answer]


def _entry(item: object) -> Resource:
    entry = structure(item, "an entry of a list of containers")
    names = entry.get("Names")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise not_understood("the names of a container")
    # "/name" is its own name, "/other/alias" what another container calls it through a link.
    own = next((name.removeprefix("/") for name in names if "/" not in name.removeprefix("/")), "")
    return Resource(text(entry, "Id"), own, marks(entry.get("Labels")))


def sighting(answer: object, resource_id: str) -> Sighting:
    """Read an answer of `GET /containers/{id}/json` about this container.

    - A paused container is `Stopped`, but only `SUSPENDED`: its processes are frozen and go on after an unpause.
    - One that was created and never started executes nothing: `Stopped`.
    - Podman's `initialized` (its process exists and waits) and `stopping` may execute: `Running`, so that a stop that
      was interrupted for ever is given again.
    - A state that contradicts itself, and a container in the process namespace of the host or of another one (its
      processes may outlive it), is `Unknown`.
    """
    details = structure(answer, "a description of a container")
    if text(details, "Id") != resource_id:
        raise not_understood("a description of another container")
    resource = _resource(details)
    state = structure(details.get("State"), "the state of a container")
    status, pid = str(state.get("Status", "")).lower(), state.get("Pid", 0)
    if status in {"running", "restarting", "initialized", "stopping"}:
        return Running(resource)
    if status == "removing":
        return Busy(resource, status)
    namespace = structure(details.get("HostConfig"), "the configuration of a container").get("PidMode") or ""
    if namespace not in _OWN_PID_NAMESPACE:
        return Unclear(resource, f"{status}, but it shares the process namespace {namespace!r}")
    if status == "paused":
        return Stopped(resource, Ended.SUSPENDED)
    if status in {"created", "configured"} and pid:
        return Running(resource)
    if status in {"created", "configured", "exited", "stopped"}:
        if state.get("Running") is not False or pid != 0:
            return Unclear(resource, f"{status}, but with the live process {pid}")
        return Stopped(resource)
    return Unclear(resource, status or "no state")


def is_paused(answer: object) -> bool:
    """Say whether a description of a container says that it is paused."""
    state = structure(structure(answer, "a description of a container").get("State"), "the state of a container")
    return state.get("Status") == "paused"


def working_directory(answer: object) -> str:
    """Read where commands start out of a description of a container."""
    details = structure(answer, "a description of a container")
    named = structure(details.get("Config"), "the configuration of a container").get("WorkingDir")
    return named if isinstance(named, str) and named else "/"


def is_directory(stat: str) -> bool:
    """Read what an engine says, in a header beside an archive, of the path that was asked for."""
    try:
        told = json.loads(base64.b64decode(stat, validate=True))
    except ValueError:
        told = None
    told = structure(told, "what a container's archive is of")
    mode, podmans = told.get("mode"), told.get("isDir")
    if not isinstance(mode, int):
        raise not_understood("what a container's archive is of")
    # Podman describes a link itself, and says beside it where that leads.
    return podmans if isinstance(podmans, bool) else bool(mode & _DIRECTORY)


def identifier(answer: object) -> str:
    """Read the id out of an answer to a creation."""
    return text(answer, "Id")


def exit_status(answer: object) -> int | None:
    """Read an answer of `GET /exec/{id}/json`: the exit status, or None while the command runs."""
    details = structure(answer, "a description of a command")
    running, code = details.get("Running"), details.get("ExitCode")
    if running is True:
        return None
    if running is not False or not isinstance(code, int) or code < 0:
        raise not_understood("the end of a command")
    return code


def _resource(details: dict[str, Any]) -> Resource:
    labels = structure(details.get("Config"), "the configuration of a container").get("Labels")
    return Resource(text(details, "Id"), text(details, "Name").removeprefix("/"), marks(labels))
