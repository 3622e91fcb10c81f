"""A private container engine: podman's service on a socket of its own, with all its state under one directory.

For tests and the demo. It shares nothing with the machine's own podman (storage, locks, events), needs no image
registry (an image is packed from the host's static busybox), and leaves no process, mount or directory behind.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import socket
import subprocess
import tarfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from docker import APIClient
from docker.errors import DockerException

IMAGE = "localhost/busybox:latest"

_PROGRAMS = frozenset({"podman", "conmon", "runc"})

# `file` locks: podman's default ones lie in one shared memory of the whole machine, and each new engine frees them all.
# The rest is what runc needs on a kernel with hybrid control groups (`docs`: a real container engine on Debian 12).
_CONFIGURATION = """\
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
lock_type = "file"
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
seccomp_profile = "unconfined"
netns = "none"
"""


class EngineError(RuntimeError):
    """The engine did not start, or did not end. The text says what it wrote."""


def unavailable() -> str | None:
    """Say why there can be no engine here, or None when there can."""
    missing = [program for program in ("podman", "runc") if _program(program) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (.ci/engine.sh installs them)"
    if _busybox() is None:
        return "no static busybox to make an image of (.ci/engine.sh installs it)"
    if os.geteuid() != 0:
        return "a private engine needs root"
    return None


class PrivateEngine:
    """One engine under `directory`, listening on `address`. A context: stopped, emptied and removed at its end.

    Keep the path short: a unix socket's has at most 107 bytes.
    """

    def __init__(self, directory: Path, *, address: Path | None = None) -> None:
        self.directory = directory
        self.socket = address or directory / "engine.sock"
        self._service: subprocess.Popen[bytes] | None = None

    @property
    def base_url(self) -> str:
        return f"unix://{self.socket}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def start(self, *, within: float = 30.0) -> None:
        """Start the service and see that it answers and has its image. Containers of an earlier start are kept."""
        reason = unavailable()
        if reason is not None:
            raise EngineError(reason)
        self.directory.mkdir(parents=True, exist_ok=True)
        configuration = self.directory / "containers.conf"
        configuration.write_text(_CONFIGURATION)
        self.socket.unlink(missing_ok=True)
        podman = _program("podman") or "podman"
        command = [podman, "--storage-driver=vfs"]
        command += [f"--{name}={self.directory / name}" for name in ("root", "runroot", "tmpdir")]
        command += ["system", "service", "--time=0", self.base_url]
        environment = {**os.environ, "CONTAINERS_CONF": str(configuration), "TMPDIR": str(self.directory)}
        environment["PATH"] = f"{environment.get('PATH', '')}:/usr/sbin:/sbin"
        with (self.directory / "engine.log").open("ab") as log:
            self._service = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        try:
            self._await(within)
            with self.client() as client:
                if not client.images(IMAGE):
                    client.import_image_from_data(_root_file_system(), repository=IMAGE.partition(":")[0], tag="latest")
        except BaseException:
            self.stop()
            raise

    def client(self) -> APIClient:
        """Return a client of the official SDK, for looks at the engine past anybody else. Close it."""
        return APIClient(self.base_url, version="1.41", timeout=30)

    def stop(self) -> None:
        """End the service, and no container: they go on without it, as after a crash of an engine."""
        service, self._service = self._service, None
        if service is None:
            return
        service.terminate()
        try:
            service.wait(15)
        except subprocess.TimeoutExpired:
            service.kill()
            service.wait(15)
        self.socket.unlink(missing_ok=True)

    def remove(self, *, within: float = 20.0) -> None:
        """End all containers and the service, and remove the directory. Raises `EngineError` when processes stay."""
        containers = self._containers()
        if self._service is not None:
            with suppress(DockerException, OSError), self.client() as client:
                for container in client.containers(all=True):
                    with suppress(DockerException, OSError):
                        client.remove_container(container["Id"], force=True, v=True)
        self.stop()
        # What a broken engine could not end: its monitors, which name the directory, and whatever they left alone.
        deadline = time.monotonic() + within
        while processes := list(_processes(self.directory, containers)):
            if time.monotonic() > deadline:
                raise EngineError(f"these processes of {self.directory} do not end: {processes}")
            for process in processes:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.05)
        for mount in sorted(_mounts(self.directory), key=len, reverse=True):
            subprocess.run([_program("umount") or "umount", "--lazy", mount], check=False, capture_output=True)
        for group in _control_groups(containers):
            with suppress(OSError):
                group.rmdir()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _containers(self) -> set[str]:
        """Return the ids of all containers that ever were, from the engine's files: it may be dead."""
        places = [self.directory / "root" / "vfs-containers", self.directory / "runroot" / "vfs-containers"]
        found = (entry.name for place in places if place.is_dir() for entry in place.iterdir())
        events = self.directory / "tmpdir" / "events" / "events.log"
        past = re.findall("[0-9a-f]{64}", events.read_text(errors="replace")) if events.exists() else []
        return {name for name in found if re.fullmatch("[0-9a-f]{64}", name)} | set(past)

    def _await(self, within: float) -> None:
        deadline = time.monotonic() + within
        while True:
            # The SDK does not close a socket that could not be connected, so it comes second.
            with suppress(OSError), socket.socket(socket.AF_UNIX) as listening:
                listening.connect(str(self.socket))
                with suppress(DockerException), self.client() as client:
                    if client.ping():
                        return
            if self._service is None or self._service.poll() is not None or time.monotonic() > deadline:
                log = (self.directory / "engine.log").read_text(errors="replace")
                raise EngineError(f"podman's service does not answer: {log[-1000:]}")
            time.sleep(0.02)


def _program(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")


def _busybox() -> str | None:
    """Return the path of a busybox that needs no libraries."""
    found = _program("busybox")
    if found is None:
        return None
    # A dynamic program names its loader; a static one has no such header.
    return None if b"ld-linux" in Path(found).read_bytes()[:4096] else found


def _root_file_system() -> bytes:
    busybox = _busybox() or "busybox"
    applets = subprocess.run([busybox, "--list"], check=True, capture_output=True, text=True).stdout.split()
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name in ("bin", "dev", "etc", "proc", "root", "sys", "tmp"):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
            tar.addfile(folder)
        tar.add(Path(busybox).resolve(), "bin/busybox")  # a link, where a system links its programs
        for applet in applets:
            if applet != "busybox":
                link = tarfile.TarInfo(f"bin/{applet}")
                link.type, link.linkname = tarfile.SYMTYPE, "busybox"
                tar.addfile(link)
    return packed.getvalue()


def _processes(directory: Path, containers: set[str]) -> Iterator[int]:
    """Yield the engine's own processes and its monitors, and every process in the control group of a container."""
    groups = [f"/libpod-{container}" for container in containers]
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        with suppress(OSError):
            program, _, arguments = (entry / "cmdline").read_bytes().partition(b"\0")
            is_ours = Path(os.fsdecode(program)).name in _PROGRAMS and f"{directory}/".encode() in arguments
            group = (entry / "cgroup").read_text()
            if is_ours or any(name in group for name in groups):
                yield int(entry.name)


def _control_groups(containers: set[str]) -> Iterator[Path]:
    for group in Path("/sys/fs/cgroup").glob("*/libpod_parent/libpod-*"):
        if group.name.removeprefix("libpod-") in containers:
            yield group


def _mounts(directory: Path) -> Iterator[str]:
    for line in Path("/proc/mounts").read_text().splitlines():
        place = line.split()[1]
        if place.startswith(f"{directory}/"):
            yield place
