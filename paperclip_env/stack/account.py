"""As whom the embedded servers run.

PostgreSQL refuses to run as root. Started by root, the servers run as `nobody`, which exists everywhere, so no account
is made and no permission of an existing directory is changed.
"""

import os
import pwd
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from paperclip_env.stack.problem import Problem

_READ_AND_ENTER_BY_OTHERS = stat.S_IROTH | stat.S_IXOTH


class ProcessIdentity(TypedDict, total=False):
    """The arguments of `subprocess` that choose a process's identity."""

    user: int
    group: int
    extra_groups: list[int]


@dataclass(frozen=True)
class Account:
    """The account of the embedded servers; `switched` says that it is not the launcher's own."""

    uid: int
    gid: int
    switched: bool

    @property
    def identity(self) -> ProcessIdentity:
        """What makes `subprocess` start a program as this account."""
        return {"user": self.uid, "group": self.gid, "extra_groups": []} if self.switched else {}

    def can_enter(self, path: Path) -> bool:
        """Whether this account may pass through every directory down to `path`, by their permission bits."""
        return not self.switched or all(self._may(step, stat.S_IXOTH) for step in (path, *path.parents))

    def can_read_tree(self, path: Path) -> bool:
        """Whether this account may enter `path` and list it; its files are taken to be as open as it is."""
        return self.can_enter(path) and (not self.switched or self._may(path, _READ_AND_ENTER_BY_OTHERS))

    def give(self, path: Path) -> None:
        """Make this account the owner of `path`."""
        if self.switched:
            os.chown(path, self.uid, self.gid)

    def _may(self, path: Path, others: int) -> bool:
        found = path.stat()
        if found.st_uid == self.uid:
            wanted = others << 6
        elif found.st_gid == self.gid:
            wanted = others << 3
        else:
            wanted = others
        return found.st_mode & wanted == wanted


def server_account() -> Account:
    """Return the launcher's own account or, for root, `nobody`. Raises `Problem` where there is no `nobody`."""
    if os.geteuid() != 0:
        return Account(os.geteuid(), os.getegid(), switched=False)
    try:
        nobody = pwd.getpwnam("nobody")
    except KeyError:
        raise Problem(
            "PostgreSQL does not run as root, and this machine has no account `nobody` to run it as. "
            "Use another account, or set DATABASE_URL and CELERY_BROKER_URL to servers of your own."
        ) from None
    return Account(nobody.pw_uid, nobody.pw_gid, switched=True)
