"""Finding a container engine for the demo: the one that answers, or a private podman; none is fine too."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from docker import APIClient
from docker.errors import DockerException

from paperclip_env.stack import engine

_SOCKETS = ("/var/run/docker.sock", "/run/podman/podman.sock")
_IMAGES = ("busybox:latest", "alpine:latest", "debian:latest", "ubuntu:latest")


@dataclass(frozen=True, slots=True)
class Engine:
    base_url: str
    image: str


@contextmanager
def container_engine(directory: Path) -> Iterator[Engine | str]:
    """Give an engine with an image, or the reason why there is none."""
    answering = _answering()
    if answering is not None:
        yield answering
        return
    reason = engine.unavailable()
    if reason is not None:
        yield reason
        return
    private = engine.PrivateEngine(directory / "engine")
    try:
        private.start()
    except engine.EngineError as error:
        yield f"podman does not start: {error}"
        return
    with ExitStack() as stack:
        stack.push(private)
        yield Engine(private.base_url, engine.IMAGE)


def _answering() -> Engine | None:
    addresses = [os.environ.get("DOCKER_HOST", ""), *(f"unix://{path}" for path in _SOCKETS if Path(path).exists())]
    for address in filter(None, addresses):
        if not address.startswith("unix://"):
            continue  # TLS needs files that the demo does not know
        try:
            client = APIClient(base_url=address, timeout=5)
            known = {tag for image in client.images() for tag in image.get("RepoTags") or ()}
        except (DockerException, OSError):
            continue
        for image in _IMAGES:
            if image in known:
                return Engine(address, image)
    return None
