"""Containers of any engine that speaks the Docker Engine API: Docker itself, and podman's service."""

from providers.docker.provider import DockerProvider

__all__ = ["DockerProvider"]
