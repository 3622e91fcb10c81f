"""The one process that every running sandbox has: parent and reaper of all that executes in it.

It outlives the worker that made it. Being a child subreaper it stays the ancestor of whatever is started here, also of
what leaves its group, its session or its parent; so when the kernel says that it has no child left, nothing is left,
and only with that word does it record the end of its run. On SIGTERM it accepts nothing new and waits for that moment:
ending the others is the stopper's work (`ending`), which does not depend on this process being alive or willing.

Commands come over a UNIX socket: one connection each, a line of JSON and then stdin; answered by a line of JSON, then
stdout and stderr. One thread and one loop, standard library only, so that it starts fast and stays small.
"""

# Descriptors and /proc are not for pathlib, which would also slow the start of the supervisor down.
# ruff: noqa: PTH104, PTH109, PTH118, PTH123

from __future__ import annotations

import ctypes
import json
import os
import selectors
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import Any

from providers.local import processes, records
from providers.local.census import SANDBOX_VARIABLE, carries
from providers.local.processes import ProcessId

COMMAND_VARIABLE = "PAPERCLIP_ENV_COMMAND"
"""Marks what one command started, to find all of it when that command runs out of time."""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ARGUMENTS_LIMIT = 1 << 20
_HEADER_LIMIT = 16 << 20  # each character of an argument takes up to 12 bytes of JSON
STDIN_LIMIT = 64 << 20
_CHUNK = 1 << 16
_PR_SET_CHILD_SUBREAPER = 36
_KILL_ROUND = 0.02
_KILL_BOUND = 5.0
_RECORD_EVERY = 5.0
_FAREWELL = 1.0
_LONGEST_PAUSE = 3600.0
_DRAIN_READS = 64


class Running:
    """One command: its process, its pipes and the connection that waits for it."""

    def __init__(self, supervisor: Supervisor, connection: Connection, request: dict[str, Any], stdin: bytes) -> None:
        self.supervisor = supervisor
        self.connection = connection
        self.limit = int(request["limit"])
        self.deadline = time.monotonic() + float(request["timeout"])
        self.give_up = self.deadline + _KILL_BOUND
        self.timed_out = False
        self.truncated = False
        self.status: int | None = None
        self.mark = os.urandom(8).hex()
        self.stdin = memoryview(stdin)
        ours_in, theirs_in = reversed(os.pipe())
        ours_out, theirs_out = os.pipe()
        ours_error, theirs_error = os.pipe()
        self.input, self.output, self.error = ours_in, ours_out, ours_error
        self.kept = {ours_out: bytearray(), ours_error: bytearray()}
        self.open = {ours_in, ours_out, ours_error}
        theirs = (theirs_in, theirs_out, theirs_error)
        env = {**request["env"], COMMAND_VARIABLE: self.mark}
        try:
            self.pid = supervisor.spawn(request["argv"], request["cwd"], env, theirs)
        except BaseException:
            for handle in self.open:
                os.close(handle)
            raise
        finally:
            for handle in theirs:
                os.close(handle)
        for handle in self.open:
            os.set_blocking(handle, False)
        supervisor.selector.register(ours_in, selectors.EVENT_WRITE, self.feed)
        supervisor.selector.register(ours_out, selectors.EVENT_READ, self.read)
        supervisor.selector.register(ours_error, selectors.EVENT_READ, self.read)

    def feed(self, handle: int) -> None:
        try:
            written = os.write(handle, self.stdin[:_CHUNK]) if self.stdin else 0
        except BlockingIOError:
            return
        except OSError:  # it does not read
            written = len(self.stdin)
        self.stdin = self.stdin[written:]
        if not self.stdin:
            self._close(handle)

    def read(self, handle: int) -> bool:
        """Keep what there is up to the limit, and throw the rest away so that the command is never blocked."""
        try:
            chunk = os.read(handle, _CHUNK)
        except BlockingIOError:
            return False
        if not chunk:
            self._close(handle)
            return False
        kept = self.kept[handle]
        room = self.limit - len(kept)
        kept += chunk[:room]
        self.truncated = self.truncated or len(chunk) > room
        return True

    def ended(self, status: int) -> None:
        """Take the exit status, and what is left in the pipes: a background process may hold them open for ever."""
        self.status = status
        for handle in self.open & {self.output, self.error}:
            reads = 0
            while reads < _DRAIN_READS and self.read(handle):
                reads += 1
        if not self.timed_out:
            self.answer()

    def expire(self) -> bool:
        """Kill one round of a command that ran out of time; True when nothing of it is left."""
        self.timed_out = True
        members = self.supervisor.members_of(self.pid if self.status is None else None, self.mark)
        for member in members:
            with suppress(OSError):
                processes.send(member, signal.SIGKILL)
        return self.status is not None and (not members or time.monotonic() > self.give_up)

    def answer(self) -> None:
        code = os.waitstatus_to_exitcode(self.status or 0)
        for handle in list(self.open):
            self._close(handle)
        self.supervisor.running.remove(self)
        out, error = bytes(self.kept[self.output]), bytes(self.kept[self.error])
        self.connection.reply(
            {
                "exit_code": None if self.timed_out or code < 0 else code,
                "signal": -code if code < 0 else None,
                "timed_out": self.timed_out,
                "truncated": self.truncated,
                "stdout": len(out),
                "stderr": len(error),
            },
            out + error,
        )

    def _close(self, handle: int) -> None:
        self.open.discard(handle)
        self.supervisor.selector.unregister(handle)
        os.close(handle)


class Connection:
    """One client: a request is read, and an answer written, as fast as the other side cares to."""

    def __init__(self, supervisor: Supervisor, peer: socket.socket) -> None:
        self.supervisor = supervisor
        self.peer = peer
        self.received = bytearray()
        self.header: dict[str, Any] | None = None
        self.pending = memoryview(b"")
        self.watched = True
        peer.setblocking(False)
        supervisor.connections.add(self)
        supervisor.selector.register(peer, selectors.EVENT_READ, self.receive)

    def receive(self, _: int) -> None:
        try:
            chunk = self.peer.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        if not chunk:
            self.close()
            return
        self.received += chunk
        try:
            self._understand()
        except (ValueError, KeyError, TypeError) as error:
            self.reply({"invalid": f"{type(error).__name__} in the request"})

    def _understand(self) -> None:
        if self.header is None:
            line, newline, rest = self.received.partition(b"\n")
            if not newline:
                if len(line) > _HEADER_LIMIT:
                    self.reply({"invalid": "the command is too long"})
                return
            self.header = json.loads(line.decode())
            self.received = rest
            if int(self.header.get("stdin", 0)) > STDIN_LIMIT:
                self.reply({"invalid": f"stdin is limited to {STDIN_LIMIT} bytes"})
                return
        if len(self.received) < int(self.header.get("stdin", 0)):
            return
        # The client says nothing more; should it go away, the command runs on until its own timeout.
        self._unwatch()
        if self.supervisor.closing:
            self.reply({"refused": "the sandbox is being stopped"})
        elif self.header["op"] == "ping":
            self.reply({"running": True})
        else:
            stdin, self.received = bytes(self.received), bytearray()
            self.supervisor.execute(self, self.header, stdin)

    def reply(self, header: dict[str, Any], body: bytes = b"") -> None:
        self.pending = memoryview(json.dumps(header).encode() + b"\n" + body)
        self._unwatch()
        self.supervisor.selector.register(self.peer, selectors.EVENT_WRITE, self.send)
        self.watched = True

    def send(self, _: int) -> None:
        try:
            self.pending = self.pending[self.peer.send(self.pending) :]
        except BlockingIOError:
            return
        except OSError:
            self.pending = memoryview(b"")
        if not self.pending:
            self.close()

    def close(self) -> None:
        self._unwatch()
        self.peer.close()
        self.supervisor.connections.discard(self)

    def _unwatch(self) -> None:
        if self.watched:
            self.supervisor.selector.unregister(self.peer)
            self.watched = False


class Supervisor:
    """The loop, and what it knows."""

    def __init__(self, resource_id: str, directory: int, env: dict[str, str]) -> None:
        self.resource_id = resource_id
        self.env = env
        self.directory = directory
        self.selector = selectors.DefaultSelector()
        self.connections: set[Connection] = set()
        self.running: list[Running] = []
        self.closing = False
        self.known: list[ProcessId] = []
        self.record_at: float | None = None
        seen = processes.stat(os.getpid())
        if seen is None:
            raise RuntimeError("/proc does not show this process")
        self.me = seen.id
        self.run = records.run(processes.world(), self.me)

    # Beginning.

    def prepare(self) -> None:
        """Become the reaper, listen, and record the run: all before anything is started."""
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
        self.alarm, wake = os.pipe()
        for handle in (self.alarm, wake):
            os.set_blocking(handle, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._close)
        for number in (signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        self.selector.register(self.alarm, selectors.EVENT_READ, self._drain_alarm)
        # The path is relative: a socket's may have 107 bytes, a state directory's more.
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        temporary = f".{records.SOCKET}.{os.getpid()}"
        self.listener.bind(temporary)
        os.rename(temporary, records.SOCKET)
        self.listener.listen(128)
        self.listener.setblocking(False)
        self.selector.register(self.listener, selectors.EVENT_READ, self._accept)
        records.write(self.directory, records.KNOWN, [], durable=False)
        records.write(self.directory, records.RUN, self.run)

    def start_main(self, argv: list[str]) -> str:
        """Start the sandbox's main command; return why it cannot be started, or nothing."""
        log = os.open("main.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        told, tell = os.pipe()
        self.spawn(argv, None, {}, (null, log, log), tell)
        for handle in (tell, log, null):
            os.close(handle)
        with open(told, "rb") as file:  # closed by the exec that succeeds
            failure = file.read().decode(errors="replace")
        self.record_at = time.monotonic()
        return failure

    # The loop.

    def serve(self) -> None:
        """Serve until nothing is left to wait for after SIGTERM."""
        farewell: float | None = None
        while True:
            childless = self._reap()
            self._expire()
            if self.closing and childless and not self.running:
                farewell = farewell or time.monotonic() + _FAREWELL
                if not any(connection.pending for connection in self.connections) or time.monotonic() > farewell:
                    break
            self._record(childless=childless)
            for key, _ in self.selector.select(self._pause(farewell)):
                # A callback before this one may have closed the descriptor, and another have been given its number.
                if self.selector.get_map().get(key.fd) is key:
                    key.data(key.fd)
        # The kernel's word: a subreaper without children has no descendants.
        records.write(self.directory, records.ENDED, self.run)

    def _pause(self, farewell: float | None) -> float | None:
        times = [running.deadline for running in self.running]
        times += [time.monotonic() + _KILL_ROUND for running in self.running if running.timed_out]
        times += [at for at in (farewell, self.record_at) if at is not None]
        # Bounded because what waits in the kernel counts milliseconds in an int.
        return min(max(0.0, min(times) - time.monotonic()), _LONGEST_PAUSE) if times else None

    def _close(self, *_: object) -> None:
        self.closing = True

    def _drain_alarm(self, handle: int) -> None:
        with suppress(BlockingIOError):
            os.read(handle, 4096)

    def _accept(self, _: int) -> None:
        with suppress(OSError):
            Connection(self, self.listener.accept()[0])

    def _reap(self) -> bool:
        """Collect the dead, own children and adopted ones; True when the kernel says that there is no child left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if pid == 0:
                return False
            for running in list(self.running):
                if running.pid == pid:
                    running.ended(status)
                    self.record_at = time.monotonic()

    def _expire(self) -> None:
        now = time.monotonic()
        for running in list(self.running):
            if running.deadline <= now and running.expire():
                running.answer()

    def _record(self, *, childless: bool) -> None:
        """Write down who descends from this process: now and then while anybody does, and never when nobody does."""
        if childless:
            self.record_at = None
            return
        now = time.monotonic()
        if self.record_at is None or self.record_at > now:
            return
        self.record_at = now + _RECORD_EVERY
        seen = processes.table()
        below = sorted(processes.with_descendants({self.me.pid}, seen) - {self.me.pid})
        known = [seen[pid].id for pid in below]
        if known != self.known:
            with suppress(OSError):  # a full disk costs this help, not the sandbox
                records.write(self.directory, records.KNOWN, known, durable=False)
                self.known = known

    # Commands.

    def execute(self, connection: Connection, request: dict[str, Any], stdin: bytes) -> None:
        try:
            self.running.append(Running(self, connection, request, stdin))
        except OSError as error:
            connection.reply({"failed": error.strerror or "cannot fork"})
        self.record_at = self.record_at or time.monotonic() + _RECORD_EVERY

    def members_of(self, pid: int | None, mark: str) -> list[ProcessId]:
        """Find what a command started: below it, in its session, or marked with it; always below this supervisor."""
        seen = processes.table()
        value = f"{COMMAND_VARIABLE}={mark}".encode()
        below = processes.with_descendants({self.me.pid}, seen) - {self.me.pid}
        roots = set()
        for one in below:
            with suppress(PermissionError):
                if (
                    one == pid
                    or (pid is not None and seen[one].session == pid)
                    or carries(processes.environment(seen[one]), value)
                ):
                    roots.add(one)
        return [seen[one].id for one in processes.with_descendants(roots, seen) if processes.executes(seen[one])]

    def spawn(
        self, argv: list[str], cwd: str | None, env: dict[str, str], streams: tuple[int, int, int], tell: int = 2
    ) -> int:
        """Fork and execute a command in a session of its own. Its failure to start is its own exit code and stderr."""
        environment = {**base_environment(), **self.env, **env, SANDBOX_VARIABLE: self.resource_id}
        pid = os.fork()
        if pid:
            return pid
        code = 126
        try:
            os.setsid()
            signal.set_wakeup_fd(-1)
            for number in (
                signal.SIGHUP,
                signal.SIGINT,
                signal.SIGPIPE,
                signal.SIGXFSZ,
                signal.SIGTERM,
                signal.SIGCHLD,
            ):
                signal.signal(number, signal.SIG_DFL)
            for wanted, handle in enumerate(streams):
                os.dup2(handle, wanted)
            os.chdir(records.FILES)
            if cwd is not None:
                os.chdir(cwd)
            os.execvpe(argv[0], argv, environment)  # noqa: S606 - that is what it is for
        except FileNotFoundError as error:
            code = 127
            os.write(tell, f"{error.filename or argv[0]}: {error.strerror}\n".encode(errors="surrogateescape"))
        except BaseException as error:  # noqa: BLE001 - the child must never return into the loop
            os.write(tell, f"{argv[0]}: {error}\n".encode(errors="replace"))
        finally:
            os._exit(code)


def base_environment() -> dict[str, str]:
    """Return what a command finds in its environment besides its own and the mark: nothing of the worker's."""
    files = os.path.join(os.getcwd(), records.FILES)
    return {"PATH": PATH, "LANG": "C.UTF-8", "HOME": files}


def main() -> None:
    """Detach, take over the sandbox whose directory this was started in, and serve it.

    Arguments: resource id, descriptors of the held lock and of a pipe for the word that it is ready. The configuration
    is read from the sandbox's record.
    """
    resource_id, lock, ready = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    for handle in (lock, ready):
        os.set_inheritable(handle, False)
    if os.fork():
        os._exit(0)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    directory = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    config = records.read(directory, records.SANDBOX)["config"]
    supervisor = Supervisor(resource_id, directory, config["env"])
    try:
        supervisor.prepare()
        # From here on the record leads to this process; until here the lock, held by worker or supervisor, said "busy".
        os.close(lock)
        failure = supervisor.start_main(config["command"]) if config["command"] else ""
    except OSError as error:
        if records.is_full(error):
            _tell(ready, {"disk_full": str(error)})
        raise
    _tell(ready, {"failure": failure})
    supervisor.serve()


def _tell(ready: int, word: dict[str, str]) -> None:
    with suppress(OSError), open(ready, "w", encoding="utf-8") as file:
        json.dump(word, file)
