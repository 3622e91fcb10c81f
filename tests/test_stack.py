"""The launcher starts servers anywhere, leaves nothing behind, and says what is wrong in one sentence."""

import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
import redis

from paperclip_env.stack import programs, venv
from paperclip_env.stack.account import Account, server_account
from paperclip_env.stack.ports import LOOPBACK, free_port
from paperclip_env.stack.problem import Problem
from paperclip_env.stack.state import CHECKOUT, kept_secret, kept_state, locked

BOUND_S = 120.0
SOMEBODY_ELSE = Account(uid=os.geteuid() + 4242, gid=os.getegid() + 4242, switched=True)


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    ours = {"DATABASE_URL", "CELERY_BROKER_URL", "BEAT_DATABASE_URL", "DJANGO_SETTINGS_MODULE"}
    ours |= {"DEBUG", "PLAIN_HTTP", "SECRET_KEY", "STATIC_ROOT"}
    kept = {name: value for name, value in os.environ.items() if name not in ours and not name.startswith("PYTEST_")}
    return {**kept, "PAPERCLIP_LOCAL_DIR": str(tmp_path / "local"), **more}


def stack(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "paperclip_env.stack", *arguments]


def launch(tmp_path: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        stack(*arguments),
        cwd=CHECKOUT,
        env=environment(tmp_path, **more),
        capture_output=True,
        text=True,
        check=False,
        timeout=BOUND_S,
    )


@contextmanager
def launched(tmp_path: Path, *arguments: str, **more: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        stack(*arguments),
        cwd=CHECKOUT,
        env=environment(tmp_path, **more),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as launcher:
        try:
            yield launcher
        finally:
            if launcher.poll() is None:
                launcher.terminate()
            launcher.communicate(timeout=BOUND_S)


def eventually(holds: Callable[[], bool]) -> bool:
    until = time.monotonic() + BOUND_S
    while not holds():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((LOOPBACK, port)) == 0


def lines_until(launcher: subprocess.Popen[str], wanted: str) -> dict[str, str]:
    """Read what a launcher says up to the line that begins with `wanted`; give its lines as first word and rest."""
    assert launcher.stdout is not None
    said: dict[str, str] = {}
    for line in launcher.stdout:
        name, _, rest = line.strip().partition(" ")
        said[name] = rest.strip()
        if name == wanted:
            return said
    raise AssertionError(f"ended without {wanted!r}: {said}")


def one_sentence(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("paperclip_env: ")
    return done.stderr


LOOK = """
import os, sys, psycopg, redis
database, broker = os.environ["DATABASE_URL"], os.environ["CELERY_BROKER_URL"]
with psycopg.connect(database, autocommit=True) as connection:
    ask = lambda query: connection.execute(query).fetchone()[0]
    print("libraries", ask("SHOW shared_preload_libraries"))
    print("listens", ask("SHOW listen_addresses"))
    print("data", ask("SHOW data_directory"))
    print("port", ask("SHOW port"))
with redis.Redis.from_url(broker) as client:
    print("databases", client.config_get("databases")["databases"])
    print("broker", client.connection_pool.connection_kwargs["port"], flush=True)
"""


def test_a_command_gets_servers_that_are_gone_after_it(tmp_path: Path) -> None:
    done = launch(tmp_path, "run", "--", sys.executable, "-c", LOOK + "sys.exit(7)")
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert done.returncode == 7, done.stderr
    assert said["libraries"] == "pg_stat_statements"
    assert said["listens"] == LOOPBACK
    assert int(said["databases"]) >= 64
    assert not listens(int(said["port"]))
    assert not listens(int(said["broker"]))
    assert not Path(said["data"]).parent.exists()
    assert not (tmp_path / "local").exists()


def test_servers_die_with_a_killed_launcher_and_the_next_one_clears_up(tmp_path: Path) -> None:
    more = {"TMPDIR": str(tmp_path)} if os.geteuid() != 0 else {}
    with launched(
        tmp_path, "run", "--", sys.executable, "-c", LOOK + "sys.stdin.read(); import time; time.sleep(600)", **more
    ) as first:
        said = lines_until(first, "broker")
        left = Path(said["data"]).parent
        with pytest.raises(psycopg.OperationalError, match="password"):
            psycopg.connect(host=LOOPBACK, port=said["port"], user="paperclip", dbname="paperclip").close()
        with redis.Redis(host=LOOPBACK, port=int(said["broker"])) as stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()
        first.kill()
        assert eventually(lambda: not listens(int(said["port"])) and not listens(int(said["broker"])))
    assert left.exists()
    os.utime(left, (0, 0))
    assert launch(tmp_path, "run", "--", "true", **more).returncode == 0
    assert not left.exists()


CRASH = """
import os, signal, subprocess, sys
from pathlib import Path
from paperclip_env.stack.account import server_account
from paperclip_env.stack.postgres import Postgres
from paperclip_env.stack.state import kept_state
import psycopg
with kept_state(Path(sys.argv[1]), server_account()) as state:
    postgres = Postgres(state, durable=True)
    server = postgres.start()
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        connection.execute("CREATE TABLE kept (value int)")
    server.kill()
    server.wait()
    pid_file = state.root / "postgres" / "postmaster.pid"
    words = pid_file.read_text().split("\\n")
    words[0] = str(os.getpid())  # the number now belongs to somebody who is no PostgreSQL
    pid_file.write_text("\\n".join(words))
    again = Postgres(state, durable=True)
    again.start()
    with psycopg.connect(again.url) as connection:
        print("rows", connection.execute("SELECT count(*) FROM kept").fetchone()[0])
    again.stop()
    print("root", state.root)
"""


def test_data_is_found_again_after_a_crash(reachable: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CRASH, str(reachable)],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=False,
        timeout=BOUND_S,
    )
    assert done.stdout.splitlines() == ["rows 0", f"root {reachable / 'servers'}"], done.stderr


@pytest.fixture
def reachable() -> Iterator[Path]:
    """A directory that the servers' account can reach, unlike pytest's own."""
    base = Path("/var/tmp") / f"paperclip-env-test-{os.getpid()}-{time.monotonic_ns()}"
    base.mkdir()
    base.chmod(0o711)
    yield base
    shutil.rmtree(base)


def test_servers_of_a_closed_tree_keep_their_files_elsewhere_and_open_nothing(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    local = closed / "local"
    local.mkdir(parents=True)
    closed.chmod(0o700)
    with kept_state(local, SOMEBODY_ELSE) as state:
        assert state.root.is_relative_to("/var/tmp")
        assert state.logs == local / "log"
    with kept_state(local, SOMEBODY_ELSE) as again:
        assert again.root == state.root
    again.root.rmdir()
    assert stat.S_IMODE(closed.stat().st_mode) == 0o700


def test_files_that_somebody_else_laid_are_refused(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    trap.mkdir()
    trap.chmod(0o777)
    (tmp_path / "servers-are-in").write_text(f"{trap}\n")
    with pytest.raises(Problem, match="not a directory of yours alone"), kept_state(tmp_path, SOMEBODY_ELSE):
        pass


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has to leave its own account")
def test_root_runs_the_servers_as_nobody() -> None:
    account = server_account()
    assert account.switched
    assert account.uid != 0


def test_a_secret_is_made_once_and_is_its_owners_alone(tmp_path: Path) -> None:
    secret = kept_secret(tmp_path / "secret")
    assert kept_secret(tmp_path / "secret") == secret
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600


def test_a_port_in_use_is_a_sentence(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind((LOOPBACK, 0))
        other.listen()
        port = other.getsockname()[1]
        done = launch(tmp_path, "up", PORT=str(port))
    assert f"Port {port} is in use" in one_sentence(done)


def test_a_second_up_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "local").mkdir()
    with locked(tmp_path / "local" / "lock", ""):
        done = launch(tmp_path, "up", PORT=str(free_port()))
    assert f"already runs from this checkout (process {os.getpid()})" in one_sentence(done)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DATABASE_URL", "mysql://user:hush@127.0.0.1/name"),
        ("DATABASE_URL", f"postgres://user:hush@{LOOPBACK}:1/name"),
        ("CELERY_BROKER_URL", f"redis://:hush@{LOOPBACK}:1/0"),
        ("CELERY_BROKER_URL", "carrier-pigeon://hush"),
    ],
)
def test_an_address_that_leads_nowhere_is_a_sentence(tmp_path: Path, name: str, value: str) -> None:
    sentence = one_sentence(launch(tmp_path, "run", "--", "true", **{name: value}))
    assert name in sentence
    assert "hush" not in sentence


def test_a_missing_wheel_is_a_sentence(tmp_path: Path) -> None:
    wheel = programs.Wheel("no_such_package", "no-such-package", "bin/server", "DATABASE_URL")
    with pytest.raises(Problem, match=r"no-such-package is not installed.*DATABASE_URL"):
        programs.program(wheel, server_account(), tmp_path)


def test_an_old_python_is_a_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(venv, "NEEDED", (99, 0))
    assert venv.main(["requirements.txt"]) == 1
    assert "Python 3.11 or newer is needed" in capsys.readouterr().err


def test_pytest_without_servers_names_make_test(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q"],
        cwd=CHECKOUT,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        check=False,
        timeout=BOUND_S,
    )
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "make test" in done.stderr
    assert "Traceback" not in done.stderr


def test_up_serves_tells_when_a_part_dies_and_knows_its_login_again(reachable: Path) -> None:
    port = str(free_port())
    with launched(reachable, "up", PORT=port) as first:
        said = lines_until(first, "logs")
        assert said["address"] == f"http://{LOOPBACK}:{port}/"
        with urllib.request.urlopen(f"http://{LOOPBACK}:{port}/admin/login/", timeout=10) as page:
            assert page.status == 200
        with urllib.request.urlopen(f"http://{LOOPBACK}:{port}/static/admin/css/base.css", timeout=10) as style:
            assert style.status == 200
        inside = launch(reachable, "run", "--up", "--", sys.executable, "-c", LOOK)
        assert inside.returncode == 0, inside.stderr
        database = int(dict(line.split(" ", 1) for line in inside.stdout.splitlines())["port"])
        os.kill(beat_of(first), signal.SIGKILL)
        rest, _ = first.communicate(timeout=BOUND_S)
    assert first.returncode == 1
    assert "beat ended by itself (signal SIGKILL)" in rest
    assert not listens(int(port))
    assert not listens(database)

    with launched(reachable, "up", PORT=port) as second:
        assert lines_until(second, "logs")["password"] == said["password"]
        second.terminate()
        rest, _ = second.communicate(timeout=BOUND_S)
    assert second.returncode == 0
    assert [line for line in rest.splitlines() if line.startswith("Stopping")] == [
        "Stopping beat ...",
        "Stopping worker ...",
        "Stopping web ...",
    ]


def beat_of(launcher: subprocess.Popen[str]) -> int:
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            command = (path / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if parent == launcher.pid and b"beat" in command:
            return int(path.name)
    raise AssertionError("no beat")
