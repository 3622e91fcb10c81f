"""What an engine's descriptions of containers mean in the terms of the contract. Pure functions of the answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from providers.contract import MARK_PREFIX, Busy, Ended, ErrorKind, ProviderError, Resource, Running, Sighting, Stopped
from providers.contract import Unknown as Unclear

_OWN_PID_NAMESPACE = frozenset({"", "private"})


def listed(answer: object) -> list[Resource]:
    """Read an answer of `GET /containers/json`.

    Raises `PROTOCOL` where one entry cannot be understood: a list with a gap is no list.
    """
    if not isinstance(answer, list):
        raise _not_understood("a list of containers")
    return [_entry(item) for item in answer]


def _entry(item: object) -> Resource:
    entry = _object(item, "an entry of a list of containers")
    names = entry.get("Names")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise _not_understood("the names of a container")
    # "/name" is its own name, "/other/alias" what another container calls it through a link.
    own = next((name.removeprefix("/") for name in names if "/" not in name.removeprefix("/")), "")
    return Resource(_identifier(entry), own, _marks(entry.get("Labels")))


def sighting(answer: object, resource_id: str) -> Sighting:
    """Read an answer of `GET /containers/{id}/json` about this container.

    - A paused container is `Stopped`, but only `SUSPENDED`: its processes are frozen and go on after an unpause.
    - One that was created and never started executes nothing: `Stopped`.
    - Podman's `initialized` (its process exists and waits) and `stopping` may execute: `Running`, so that a stop that
      was interrupted for ever is given again.
    - A state that contradicts itself, and a container in the process namespace of the host or of another one (its
      processes may outlive it), is `Unknown`.
    """
    details = _object(answer, "a description of a container")
    if _identifier(details) != resource_id:
        raise _not_understood("a description of another container")
    resource = _resource(details)
    state = _object(details.get("State"), "the state of a container")
    status, pid = str(state.get("Status", "")).lower(), state.get("Pid", 0)
    if status in {"running", "restarting", "initialized", "stopping"}:
        return Running(resource)
    if status == "removing":
        return Busy(resource, status)
    namespace = _object(details.get("HostConfig"), "the configuration of a container").get("PidMode") or ""
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
    state = _object(_object(answer, "a description of a container").get("State"), "the state of a container")
    return state.get("Status") == "paused"


def identifier(answer: object) -> str:
    """Read the id out of an answer to a creation."""
    return _identifier(_object(answer, "an answer to a creation"))


def text(answer: object, *keys: str) -> str:
    """Return the non-empty text under these keys of a nested object, or raise `PROTOCOL`."""
    for key in keys:
        answer = _object(answer, "an answer").get(key)
    if not isinstance(answer, str) or not answer:
        raise _not_understood(f"{'.'.join(keys)}, which is missing or no text")
    return answer


def exit_status(answer: object) -> int | None:
    """Read an answer of `GET /exec/{id}/json`: the exit status, or None while the command runs."""
    details = _object(answer, "a description of a command")
    running, code = details.get("Running"), details.get("ExitCode")
    if running is True:
        return None
    if running is not False or not isinstance(code, int) or code < 0:
        raise _not_understood("the end of a command")
    return code


def carrying(resources: Iterable[Resource], marks: Mapping[str, str]) -> tuple[Resource, ...]:
    """Return those that carry all these marks: an engine's filter is a hint, the labels decide."""
    return tuple(item for item in resources if all(item.marks.get(key) == value for key, value in marks.items()))


def _resource(details: dict[str, Any]) -> Resource:
    labels = _object(details.get("Config"), "the configuration of a container").get("Labels")
    return Resource(_identifier(details), text(details, "Name").removeprefix("/"), _marks(labels))


def _marks(labels: object) -> dict[str, str]:
    """Keep the marks among the labels: an image brings labels of its own."""
    if labels is None:
        return {}
    return {key: str(value) for key, value in _object(labels, "labels").items() if key.startswith(MARK_PREFIX)}


def _identifier(item: dict[str, Any]) -> str:
    return text(item, "Id")


def _object(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _not_understood(what)
    return value


def _not_understood(what: str) -> ProviderError:
    return ProviderError(ErrorKind.PROTOCOL, f"not understood: {what}")
