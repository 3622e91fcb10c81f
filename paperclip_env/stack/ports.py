"""Ports of this machine's loopback address."""

import socket

LOOPBACK = "127.0.0.1"


def free_port() -> int:
    """Return a port that was free a moment ago; a server that finds it taken is started again on another one."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


def is_free(port: int) -> bool:
    """Whether a server could listen on `port` now. Raises `PermissionError` where this user may not listen on it."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except PermissionError:
            raise
        except OSError:
            return False
        return True
