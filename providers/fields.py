"""Fields that the schemas of several providers have: what they take, and the sentence for what they do not."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated
from urllib.parse import SplitResult, urlsplit

from pydantic import AfterValidator

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LONGEST_PATH = 1024
_REFERENCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/@-]{0,254}")


def is_loopback(host: str) -> bool:
    """Say whether a host name or address is this very machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def split_url(url: str, shape: str) -> SplitResult:
    """Take an address apart. Raises `ValueError` with the sentence `shape` where it has more than a place in it."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        raise ValueError(shape) from None
    if parts.query or parts.fragment or "@" in parts.netloc or any(c.isspace() or not c.isprintable() for c in url):
        raise ValueError(f"{shape}, and nothing else")
    return parts


def safe_url(url: str) -> str:
    """Return an address without its trailing slash, or raise `ValueError`: a key is sent nowhere in the clear."""
    shape = "must be https://host[:port][/path], or http:// to this very machine"
    parts = split_url(url, shape)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError(shape)
    if parts.scheme == "http" and not is_loopback(parts.hostname):
        raise ValueError(shape)
    return url.rstrip("/")


def _absolute(path: str) -> str:
    if not path.startswith("/"):
        raise ValueError("must be the absolute path of a file")
    return path


def _reference(value: str) -> str:
    if not _REFERENCE.fullmatch(value):
        raise ValueError("must be a name, with its tag or digest where it has one")
    return value


def _variables(env: dict[str, str]) -> dict[str, str]:
    for name, value in env.items():
        if not _VARIABLE.fullmatch(name) or "\0" in value:
            raise ValueError(f"{name!r} is not the name of a variable, or its value holds a null byte")
    return env


def _directory(path: str) -> str:
    inside = path == "." or path.strip("/.")
    if not inside or ".." in path.split("/") or not path.isprintable() or len(path) > _LONGEST_PATH:
        raise ValueError("must be a directory below /, absolute or relative to where commands start, without ..")
    return path


WebAddress = Annotated[str, AfterValidator(safe_url)]
"""The address of an API that is called with a key."""
Directory = Annotated[str, AfterValidator(_directory)]
"""A directory in a sandbox: absolute, or relative to the one in which commands start."""
AbsolutePath = Annotated[str, AfterValidator(_absolute)]
Reference = Annotated[str, AfterValidator(_reference)]
"""The name of an image, a snapshot, a template, a region: with its tag or digest where it has one."""
Variables = Annotated[dict[str, str], AfterValidator(_variables)]
"""Variables of every process in a sandbox. Not for secrets: providers show them to everyone who may ask."""
