"""Makes the virtual environment and installs the pinned packages; run by `make` with whatever Python the machine has.

Answers for: a second run that does nothing; one run at a time; a sentence when it cannot work. It uses the standard
library alone and parses under old Pythons, because it has to say which version is needed.

usage: venv.py [--this-python] REQUIREMENTS_FILE ...
"""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

NEEDED = (3, 11)
VENV = Path(".venv")
PYTHON = VENV / "bin" / "python"


def main(arguments: "list[str]") -> int:
    """Make ready what the requirements files name and return the exit code. `--this-python` insists on this version."""
    try:
        if sys.version_info < NEEDED:
            return _give_up(
                f"Python 3.11 or newer is needed, and {sys.executable} is {sys.version.split()[0]}. {_NAME_ONE}"
            )
        import fcntl

        with Path(".venv.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            insist = arguments[:1] == ["--this-python"]
            return _make([Path(name) for name in arguments[insist:]], insist=insist)
    except OSError as error:
        return _give_up(f"Cannot make a virtual environment in {Path.cwd()}: {error}.")
    except KeyboardInterrupt:
        return 130


_NAME_ONE = "Install one, or name it: make PYTHON=/path/to/python3 ..."


def _make(files: "list[Path]", *, insist: bool) -> int:
    version = _version(PYTHON)
    if version is None or version < NEEDED or (insist and version != tuple(sys.version_info[:2])):
        print(f"Making a virtual environment with Python {sys.version.split()[0]} ...", flush=True)
        made = _run([sys.executable, "-m", "venv", "--clear", str(VENV)])
        if made.returncode != 0:
            return _give_up(
                f"{sys.executable} cannot make a virtual environment. On Debian and Ubuntu, install python3-venv.",
                made.stdout,
            )
    stamps = {VENV / f"{file.name}.installed": _digest(file) for file in files}
    if all(stamp.is_file() and stamp.read_text() == digest for stamp, digest in stamps.items()):
        return 0
    print(f"Installing {', '.join(map(str, files))} ...", flush=True)
    command = [str(PYTHON), "-I", "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check"]
    installed = _run([*command, "--require-hashes", *(part for file in files for part in ("-r", str(file)))])
    if installed.returncode != 0:
        return _give_up(
            "pip could not install the packages. It needs a package index that it can reach.", installed.stdout
        )
    for stamp, digest in stamps.items():
        stamp.write_text(digest)
    return 0


def _version(python: Path) -> "tuple[int, ...] | None":
    """Return the version of an environment's Python, or None if it does not work or has no pip."""
    if not python.exists():
        return None
    asked = _run([str(python), "-I", "-c", "import pip, sys; print(*sys.version_info[:2])"])
    return tuple(int(part) for part in asked.stdout.split()) if asked.returncode == 0 else None


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _run(command: "list[str]") -> "subprocess.CompletedProcess[str]":
    # A caller's PIP_USER would put the packages elsewhere.
    environment = {**os.environ, "PIP_USER": "0"}
    return subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def _give_up(sentence: str, output: str = "") -> int:
    print(f"paperclip_env: {sentence}", *output.splitlines()[-12:], sep="\n    ", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
