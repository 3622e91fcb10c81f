"""The Docker provider against a real engine (podman's service): the contract, and what is Docker's own.

Skipped as a whole, with the reason, where no engine can be run.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest
from docker import APIClient

from providers.conformance import AnyProvider, Harness, ProviderConformance, until
from providers.contract import (
    MARK_INSTALLATION,
    Command,
    Ended,
    ErrorKind,
    Gone,
    ProviderError,
    Resource,
    Running,
    Stopped,
)
from providers.docker import DockerProvider
from providers.docker.schemas import DockerConfig, DockerEndpoint
from providers.registry import open_provider
from tests.engine import IMAGE, PrivateEngine, available, private_engine, short_directory
from tests.providers.fake_engine import CONTAINER, Answer, Request, fake_engine

pytestmark = pytest.mark.skipif(available() is not None, reason=f"no container engine: {available()}")

WITHIN = 30.0
MARKS = {MARK_INSTALLATION: "docker-tests"}
CONFIG = DockerConfig(image=IMAGE)


@pytest.fixture(scope="module")
def engine() -> Iterator[PrivateEngine]:
    with private_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
def other_engine() -> Iterator[PrivateEngine]:
    with private_engine() as engine:
        yield engine


@pytest.fixture
def own_engine() -> Iterator[PrivateEngine]:
    """An engine for one test, which may break it."""
    with private_engine() as engine:
        yield engine


@pytest.fixture
def provider(engine: PrivateEngine) -> DockerProvider:
    return DockerProvider(DockerEndpoint(base_url=engine.base_url))


@pytest.fixture
def client(engine: PrivateEngine) -> Iterator[APIClient]:
    with engine.client() as client:
        yield client


@pytest.fixture
def create(provider: DockerProvider) -> Iterator[Callable[..., str]]:
    made: list[str] = []

    def create(config: DockerConfig = CONFIG) -> str:
        name = f"docker-{os.urandom(6).hex()}"
        made.append(provider.create(name, MARKS, config, within=WITHIN).resource.resource_id)
        return made[-1]

    yield create
    for container in made:
        provider.delete(container, within=WITHIN)


def shell(script: str, **options: Any) -> Command:
    return Command(("sh", "-c", script), **options)


def executing(tag: str) -> list[int]:
    """Return the processes of this host that have this text on their command line, zombies left out."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with suppress(OSError):
                if tag.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    return found


def new_tag() -> str:
    return f"{4000 + int.from_bytes(os.urandom(1))}.{int.from_bytes(os.urandom(3)):08d}"


class DockerHarness(Harness):
    key: ClassVar[str] = "docker"

    def __init__(self, engine: PrivateEngine, other: PrivateEngine) -> None:
        self.engine = engine
        self.other = other

    def endpoint_data(self) -> dict[str, Any]:
        return {"base_url": self.engine.base_url}

    def config_data(self) -> dict[str, Any]:
        return {"image": IMAGE, "workspace": "/root"}

    def executes(self, resource: Resource, tag: str) -> bool:
        return bool(executing(tag))

    @contextmanager
    def switchable(self) -> Iterator[tuple[AnyProvider, Callable[[], None]]]:
        with short_directory() as directory:
            address, sockets = directory / "engine.sock", [self.engine.socket, self.other.socket]

            def switch() -> None:
                address.unlink(missing_ok=True)
                address.symlink_to(sockets[0])
                sockets.reverse()

            switch()
            yield open_provider("docker", {"base_url": f"unix://{address}"}), switch

    @contextmanager
    def trickling(self) -> Iterator[tuple[AnyProvider, str]]:
        with fake_engine() as fake:
            fake.answers_everything(Answer(200, b"OK", {"Api-Version": "1.44"}, slow_from=0))
            yield fake.provider, CONTAINER

    @contextmanager
    def _refusing(self) -> Iterator[AnyProvider]:
        def echo(request: Request) -> Answer:
            return Answer(500, {"message": f"cannot do {request.head} {request.body!r}"})

        with fake_engine() as fake:
            for route in list(fake.routes):
                if "_ping" not in route:
                    fake.routes[route] = echo
            yield fake.provider

    def echoing(self, secret: str) -> AbstractContextManager[AnyProvider]:
        return self._refusing()


class TestDockerConforms(ProviderConformance):
    @pytest.fixture
    def harness(self, engine: PrivateEngine, other_engine: PrivateEngine) -> Harness:
        return DockerHarness(engine, other_engine)


# How containers are made.


def test_a_container_is_made_to_stay_what_we_left_it(create: Callable[..., str], client: APIClient) -> None:
    host = client.inspect_container(create())["HostConfig"]
    assert host["RestartPolicy"]["Name"] == "no"
    assert host["AutoRemove"] is False
    assert host["NetworkMode"] == "none"
    assert host["PidMode"] in {"", "private"}
    assert host["Privileged"] is False


def test_limits_and_variables_reach_the_engine(
    create: Callable[..., str], client: APIClient, provider: DockerProvider
) -> None:
    container = create(DockerConfig(image=IMAGE, env={"PURPOSE": "a test"}, memory_mb=64, cpus=0.5, pids=50))
    host = client.inspect_container(container)["HostConfig"]
    assert (host["Memory"], host["NanoCpus"], host["PidsLimit"]) == (64 << 20, 500_000_000, 50)
    assert provider.execute(container, shell('printf "%s" "$PURPOSE"'), within=WITHIN).stdout == b"a test"


def test_an_image_that_the_engine_lacks_allocates_nothing(provider: DockerProvider) -> None:
    with pytest.raises(ProviderError) as caught:
        provider.create("no-image", MARKS, DockerConfig(image="no/such:image"), within=WITHIN)
    assert (caught.value.kind, caught.value.nothing_allocated) == (ErrorKind.INVALID, True)
    assert provider.find("no-image", {}, within=WITHIN) is None


def test_a_container_that_cannot_be_started_was_allocated_and_is_found(provider: DockerProvider) -> None:
    with pytest.raises(ProviderError) as caught:
        provider.create("no-command", MARKS, DockerConfig(image=IMAGE, command=("/no/such",)), within=WITHIN)
    assert (caught.value.kind, caught.value.nothing_allocated) == (ErrorKind.INVALID, False)
    found = provider.find("no-command", {}, within=WITHIN)
    assert found is not None
    assert isinstance(provider.inspect(found.resource_id, within=WITHIN), Stopped)
    provider.delete(found.resource_id, within=WITHIN)
    assert isinstance(provider.inspect(found.resource_id, within=WITHIN), Gone)


def test_the_first_process_reaps_what_is_orphaned_to_it(create: Callable[..., str], provider: DockerProvider) -> None:
    container = create()
    provider.execute(container, shell("(sleep 0.01 &) ; exit 0"), within=WITHIN)

    def clean() -> bool:
        listing = provider.execute(container, shell("ps -o stat,args"), within=WITHIN).stdout
        return b"sleep 0.01" not in listing and not any(line.startswith(b"Z") for line in listing.splitlines())

    assert until(clean, WITHIN)


# Deleting and stopping.


def test_deleting_removes_the_anonymous_volumes_and_only_those(
    engine: PrivateEngine, provider: DockerProvider, client: APIClient
) -> None:
    client.create_volume("kept-by-name")
    _image_with_volume(client)
    container = provider.create("volumes", MARKS, DockerConfig(image="localhost/voluminous:latest"), within=WITHIN)
    mounts = client.inspect_container(container.resource.resource_id)["Mounts"]
    assert [mount["Destination"] for mount in mounts] == ["/data"]
    volume = mounts[0]["Name"]
    assert volume in _volumes(client)
    provider.stop(container.resource.resource_id, grace=1, within=WITHIN)
    assert volume in _volumes(client)
    provider.delete(container.resource.resource_id, within=WITHIN)
    assert volume not in _volumes(client)
    assert "kept-by-name" in _volumes(client)
    client.remove_volume("kept-by-name")


def _image_with_volume(client: APIClient) -> None:
    # The export of a container is the root file system of our image.
    container = client.create_container(IMAGE, ["true"])["Id"]
    root = b"".join(client.export(container))
    client.remove_container(container, force=True)
    client.import_image_from_data(root, repository="localhost/voluminous", tag="latest", changes=["VOLUME /data"])


def _volumes(client: APIClient) -> set[str]:
    return {volume["Name"] for volume in client.volumes()["Volumes"] or []}


def test_a_container_that_was_never_started_is_stopped(provider: DockerProvider, client: APIClient) -> None:
    container = client.create_container(IMAGE, ["sleep", "100"], name="never-started")["Id"]
    sighting = provider.inspect(container, within=WITHIN)
    assert isinstance(sighting, Stopped)
    provider.stop(container, grace=0, within=WITHIN)
    assert isinstance(provider.inspect(container, within=WITHIN), Stopped)
    provider.delete(container, within=WITHIN)


def test_a_stop_is_polite_to_every_process_first(create: Callable[..., str], provider: DockerProvider) -> None:
    container = create()
    script = "(trap 'echo bye >/note; exit 0' TERM; touch /ready; while :; do sleep 0.05; done) >/dev/null 2>&1 & "
    provider.execute(container, shell(script), within=WITHIN)
    ready = shell("test -e /ready")
    assert until(lambda: provider.execute(container, ready, within=WITHIN).exit_code == 0, WITHIN)
    provider.stop(container, grace=10, within=WITHIN)
    provider.start(container, within=WITHIN)
    assert provider.execute(container, shell("cat /note"), within=WITHIN).stdout == b"bye\n"


def test_a_paused_container_is_suspended_and_a_start_resumes_its_old_processes(
    create: Callable[..., str], provider: DockerProvider, client: APIClient
) -> None:
    container, tag = create(), new_tag()
    provider.execute(container, shell(f"sleep {tag} >/dev/null 2>&1 &"), within=WITHIN)
    client.pause(container)
    sighting = provider.inspect(container, within=WITHIN)
    assert isinstance(sighting, Stopped)
    assert sighting.ended is Ended.SUSPENDED
    with pytest.raises(ProviderError) as caught:
        provider.execute(container, shell("true"), within=WITHIN)
    assert caught.value.kind is ErrorKind.REFUSED
    before = executing(tag)
    provider.start(container, within=WITHIN)
    assert isinstance(provider.inspect(container, within=WITHIN), Running)
    assert executing(tag) == before


def test_stopping_a_paused_container_kills_it_without_letting_it_go_on(
    create: Callable[..., str], provider: DockerProvider, client: APIClient
) -> None:
    container, tag = create(), new_tag()
    script = f"(trap 'touch /went-on' TERM; while :; do sleep {tag} & wait; done) >/dev/null 2>&1 &"
    provider.execute(container, shell(script), within=WITHIN)
    client.pause(container)
    provider.stop(container, grace=5, within=WITHIN)
    sighting = provider.inspect(container, within=WITHIN)
    assert isinstance(sighting, Stopped)
    assert sighting.ended is Ended.KILLED
    assert not executing(tag)
    provider.start(container, within=WITHIN)
    assert provider.execute(container, shell("test -e /went-on"), within=WITHIN).exit_code == 1


def test_deleting_a_first_process_that_ignores_signals_does_not_wait_for_it(
    create: Callable[..., str], provider: DockerProvider
) -> None:
    container = create(DockerConfig(image=IMAGE, command=("sh", "-c", "trap '' TERM; while :; do sleep 0.1; done")))
    started = time.monotonic()
    provider.delete(container, within=WITHIN)
    assert isinstance(provider.inspect(container, within=WITHIN), Gone)
    assert time.monotonic() - started < 5


# Commands.


def test_a_background_process_that_holds_the_streams_does_not_hold_its_caller(
    create: Callable[..., str], provider: DockerProvider
) -> None:
    container, tag = create(), new_tag()
    started = time.monotonic()
    answer = provider.execute(container, shell(f"echo up; sleep {tag} & exit 5", timeout=25), within=WITHIN)
    assert time.monotonic() - started < 10
    assert (answer.exit_code, answer.stdout, answer.timed_out) == (5, b"up\n", False)
    assert executing(tag)


def test_a_command_that_closes_its_streams_is_waited_for(create: Callable[..., str], provider: DockerProvider) -> None:
    answer = provider.execute(create(), shell("exec >&- 2>&-; sleep 0.3; exit 6"), within=WITHIN)
    assert answer.exit_code == 6


def test_a_daemon_of_a_command_past_its_timeout_dies_with_it(
    create: Callable[..., str], provider: DockerProvider
) -> None:
    container, tag = create(), new_tag()
    script = f"(setsid sh -c 'trap \"\" TERM; sleep {tag} & sleep {tag}' >/dev/null 2>&1 &); echo early; sleep {tag}"
    answer = provider.execute(container, shell(script, timeout=0.5), within=WITHIN)
    assert (answer.timed_out, answer.exit_code, answer.stdout) == (True, None, b"early\n")
    assert not executing(tag)


def test_a_command_that_dies_by_a_signal_names_it(create: Callable[..., str], provider: DockerProvider) -> None:
    answer = provider.execute(create(), shell("kill -KILL $$"), within=WITHIN)
    assert (answer.exit_code, answer.signal) == (None, signal.SIGKILL)


def test_a_command_without_end_on_both_sides_is_ended(create: Callable[..., str], provider: DockerProvider) -> None:
    answer = provider.execute(create(), shell("cat & yes", stdin=b"x" * 3_000_000, timeout=1), within=WITHIN)
    assert answer.timed_out
    assert answer.truncated


def test_a_command_ends_with_its_sandbox(create: Callable[..., str], provider: DockerProvider) -> None:
    container, tag = create(), new_tag()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(provider.execute, container, shell(f"exec sleep {tag}", timeout=25), within=WITHIN)
        assert until(lambda: bool(executing(f"sleep\0{tag}")), WITHIN)
        provider.stop(container, grace=0, within=WITHIN)
        try:
            answer = running.result(WITHIN)
        except ProviderError as error:
            assert error.kind is ErrorKind.REFUSED  # noqa: PT017 -- some engines forget the command with its sandbox
        else:
            assert answer.exit_code != 0
            assert not answer.timed_out


def test_a_directory_that_is_not_there_fails_as_in_a_shell(
    create: Callable[..., str], provider: DockerProvider
) -> None:
    answer = provider.execute(create(), shell("true", cwd="/no/such"), within=WITHIN)
    assert answer.exit_code == 126
    assert b"/no/such" in answer.stderr


# Identity and the life of the engine.


def test_an_engine_that_was_restarted_is_the_same_and_its_containers_ran_on(own_engine: PrivateEngine) -> None:
    provider = DockerProvider(DockerEndpoint(base_url=own_engine.base_url))
    identity = provider.identify(within=WITHIN)
    container = provider.create("survivor", MARKS, CONFIG, within=WITHIN).resource.resource_id
    own_engine.stop()
    for call in (
        lambda: provider.identify(within=WITHIN),
        lambda: provider.inspect(container, within=WITHIN),
        lambda: provider.delete(container, within=WITHIN),
    ):
        with pytest.raises(ProviderError) as caught:
            call()
        assert caught.value.kind is ErrorKind.CONNECTION
    own_engine.start()
    assert provider.identify(within=WITHIN) == identity
    assert isinstance(provider.inspect(container, within=WITHIN), Running)


def test_another_engine_on_the_same_socket_is_another(own_engine: PrivateEngine) -> None:
    provider = DockerProvider(DockerEndpoint(base_url=own_engine.base_url))
    identity = provider.identify(within=WITHIN)
    container = provider.create("left-behind", MARKS, CONFIG, within=WITHIN).resource.resource_id
    own_engine.stop()
    with PrivateEngine(own_engine.directory.parent / "other", address=own_engine.socket):
        assert provider.identify(within=WITHIN) != identity
        assert isinstance(provider.inspect(container, within=WITHIN), Gone)  # which is why identity comes first
    own_engine.start()
    assert provider.identify(within=WITHIN) == identity
    assert isinstance(provider.inspect(container, within=WITHIN), Running)


def test_an_engine_that_was_wiped_lacks_its_anchor(own_engine: PrivateEngine) -> None:
    provider = DockerProvider(DockerEndpoint(base_url=own_engine.base_url, anchor="paperclip-env"))
    with own_engine.client() as client:
        client.create_volume("paperclip-env")
    identity = provider.identify(within=WITHIN)
    assert provider.identify(within=WITHIN) == identity
    own_engine.remove()
    own_engine.start()
    with pytest.raises(ProviderError) as caught:
        provider.identify(within=WITHIN)
    assert caught.value.kind is ErrorKind.IDENTITY


def test_a_container_whose_monitor_died_is_not_taken_for_stopped(own_engine: PrivateEngine) -> None:
    # Podman can no longer learn of its end, and its own stop leaves it alive in the state "stopping".
    provider = DockerProvider(DockerEndpoint(base_url=own_engine.base_url))
    container = provider.create("unwatched", MARKS, CONFIG, within=WITHIN).resource.resource_id
    with own_engine.client() as client:
        first = client.inspect_container(container)["State"]["Pid"]
    monitor = int(Path(f"/proc/{first}/stat").read_text().rpartition(")")[2].split()[1])
    assert b"conmon" in Path(f"/proc/{monitor}/cmdline").read_bytes()
    os.kill(monitor, signal.SIGKILL)
    assert until(lambda: monitor not in executing("conmon"), WITHIN)
    with suppress(ProviderError):
        provider.stop(container, grace=0, within=WITHIN)
    if Path(f"/proc/{first}").exists():
        assert not isinstance(provider.inspect(container, within=WITHIN), Stopped | Gone)
    with suppress(ProviderError):
        provider.delete(container, within=WITHIN)
    if isinstance(provider.inspect(container, within=WITHIN), Stopped | Gone):
        assert not Path(f"/proc/{first}").exists()


def test_many_threads_share_an_instance_and_leave_no_descriptor_open(
    create: Callable[..., str], provider: DockerProvider
) -> None:
    container = create()
    before = _open_descriptors()
    barrier = threading.Barrier(50)

    def look(number: int) -> object:
        barrier.wait(WITHIN)
        if number % 10 == 0:
            return provider.execute(container, shell("true"), within=WITHIN).exit_code
        if number % 10 == 1:
            with suppress(ProviderError):
                provider.stop("f" * 64, grace=0, within=WITHIN)
            return None
        return provider.inspect(container, within=WITHIN)

    with ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(look, range(100)))
    assert answers.count(0) == 10
    assert sum(isinstance(answer, Running) for answer in answers) == 80
    assert _open_descriptors() <= before


def _open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_the_engine_leaves_nothing_behind() -> None:
    with ExitStack() as stack:
        engine = stack.enter_context(private_engine())
        provider = DockerProvider(DockerEndpoint(base_url=engine.base_url))
        provider.create("left", MARKS, CONFIG, within=WITHIN)
        assert executing(str(engine.directory))
    assert not executing(str(engine.directory))
    assert not engine.directory.parent.exists()
    assert str(engine.directory) not in Path("/proc/mounts").read_text()
