"""Where the embedded servers keep their files, and that only one launcher uses them at a time.

Answers for: a place that the servers' account can reach, without opening anybody's directory; `make up` finds its data
again; what a killed launcher left behind is removed.
"""

import fcntl
import hashlib
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from paperclip_env.stack.account import Account
from paperclip_env.stack.problem import Problem

CHECKOUT = Path(__file__).resolve().parents[2]

_TEMPORARY = "paperclip-env-run-"
_SETTLED_S = 60
_NO_EXEC = getattr(os, "ST_NOEXEC", 0)


@dataclass(frozen=True)
class State:
    """One directory of server files; its directory for each server belongs to the servers' account alone."""

    root: Path
    logs: Path
    account: Account

    def directory(self, name: str) -> Path:
        """Return the directory of that name, made for the servers' account."""
        path = self.root / name
        if not path.is_dir():
            path.mkdir(mode=0o700)
            self.account.give(path)
        return path

    def secret(self, name: str) -> str:
        """Return the secret of that name, made on first use and readable by the launcher's account only."""
        return kept_secret(self.root / f"{name}.secret")


def local_directory() -> Path:
    """Return the directory for everything that `make up` keeps: `.local` in the checkout, or $PAPERCLIP_LOCAL_DIR."""
    path = Path(os.environ.get("PAPERCLIP_LOCAL_DIR") or CHECKOUT / ".local").absolute()
    try:
        _make_enterable(path)
    except OSError as error:
        raise Problem(
            f"Cannot make {path} ({error.strerror}). Set PAPERCLIP_LOCAL_DIR to a directory you own."
        ) from None
    return path


def kept_secret(path: Path, strength: int = 48) -> str:
    """Return the secret kept in `path`, made on first use from `strength` random bytes, with mode 0600."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        secret = path.read_text().strip()
        if secret:
            return secret
        handle = os.open(path, os.O_WRONLY | os.O_TRUNC)
    secret = secrets.token_urlsafe(strength)
    with os.fdopen(handle, "w") as file:
        file.write(secret + "\n")
    return secret


@contextmanager
def kept_state(local: Path, account: Account) -> Iterator[State]:
    """Give the files of `make up`, which stay; below `local` if the servers' account can reach it, else in /var/tmp.

    The caller holds the lock of `local`.
    """
    yield _state(_kept_root(local, account), local / "log", account)


@contextmanager
def temporary_state(account: Account) -> Iterator[State]:
    """Give files that are removed at the end. Removes what killed launchers left, too."""
    base = _temporary_base(account)
    prefix = f"{_TEMPORARY}{os.geteuid()}-"
    _remove_abandoned(base, prefix)
    root = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
    try:
        with locked(root / "lock", f"{root} is in use"):
            root.chmod(0o711)
            yield _state(root, root / "log", account)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _state(root: Path, logs: Path, account: Account) -> State:
    logs.mkdir(mode=0o755, exist_ok=True)
    return State(root, logs, account)


@contextmanager
def locked(path: Path, taken: str) -> Iterator[IO[str]]:
    """Hold a lock that the kernel releases however this process ends."""
    try:
        opened = path.open("a+")
    except PermissionError:
        raise Problem(f"{path.parent} belongs to another user. Use that one, or a checkout of your own.") from None
    with opened as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise Problem(f"{taken} (process {file.read().strip() or 'unknown'}). Stop that one first.") from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield file


def _kept_root(local: Path, account: Account) -> Path:
    pointer = local / "servers-are-in"
    if pointer.exists():
        elsewhere = Path(pointer.read_text().strip())
    elif account.can_enter(local):
        root = local / "servers"
        _make_enterable(root)
        return root
    else:
        mark = hashlib.sha256(os.fsencode(local)).hexdigest()[:12]
        elsewhere = Path("/var/tmp") / f"paperclip-env-{os.geteuid()}-{mark}"  # noqa: S108 -- checked right below
    _make_enterable(elsewhere)
    _require_own(elsewhere)
    pointer.write_text(f"{elsewhere}\n")
    return elsewhere


def _make_enterable(path: Path) -> None:
    """Make a directory that others may pass through, whatever the umask. One that exists is left as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir()
    except FileExistsError:
        return
    path.chmod(0o711)


def _require_own(path: Path) -> None:
    """Refuse a directory that somebody else may have laid in a place where everybody may write."""
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise Problem(f"{path} exists but is not a directory of yours alone. Remove it, then start again.")


def _temporary_base(account: Account) -> Path:
    for candidate in (Path(tempfile.gettempdir()), Path("/tmp"), Path("/var/tmp")):  # noqa: S108 -- mkdtemp follows
        if not (candidate.is_dir() and os.access(candidate, os.W_OK) and account.can_enter(candidate)):
            continue
        if account.switched and os.statvfs(candidate).f_flag & _NO_EXEC:
            continue  # the programs may have to be copied there
        return candidate.resolve()
    raise Problem("No directory for temporary files can be used by the servers' account. Set TMPDIR to one that can.")


def _remove_abandoned(base: Path, prefix: str) -> None:
    for path in base.glob(f"{prefix}*"):
        try:
            if path.lstat().st_uid != os.geteuid() or time.time() - path.lstat().st_mtime < _SETTLED_S:
                continue  # not ours, or so new that its launcher may not hold its lock yet
            with locked(path / "lock", "in use"):
                shutil.rmtree(path, ignore_errors=True)
        except (Problem, OSError):
            continue
