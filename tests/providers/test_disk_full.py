"""Sandboxes whose disk really is full, and what the adapters say of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from providers.contract import MARK_INSTALLATION, Command, ErrorKind, Gone, ProviderError, Running, Stopped
from providers.docker import DockerProvider
from providers.docker.schemas import DockerConfig, DockerEndpoint
from tests import disk_full
from tests.disk_full import SmallDisk, fill_from_inside, small_disk, small_engine
from tests.engine import IMAGE, PrivateEngine
from tests.providers.local_harness import Local, left_below

WITHIN = 30.0
MARKS = {MARK_INSTALLATION: "disk-full-tests"}
needs_engine = pytest.mark.skipif(disk_full.no_engine() is not None, reason=f"no engine: {disk_full.no_engine()}")
needs_mount = pytest.mark.skipif(disk_full.unavailable() is not None, reason=f"no disk: {disk_full.unavailable()}")


def refused(call: Callable[[], object]) -> ProviderError:
    with pytest.raises(ProviderError) as caught:
        call()
    return caught.value


# Containers.


@pytest.fixture(scope="module")
def engine() -> Iterator[tuple[PrivateEngine, SmallDisk]]:
    with small_engine() as made:
        yield made


@pytest.fixture
def docker(engine: tuple[PrivateEngine, SmallDisk]) -> Iterator[DockerProvider]:
    private, disk = engine
    provider = DockerProvider(DockerEndpoint(base_url=private.base_url))
    yield provider
    disk.make_room()
    for fill in disk.place.glob("engine/root/vfs/dir/*/fill"):
        fill.unlink()
    for resource in provider.list(MARKS, within=WITHIN).resources:
        provider.delete(resource.resource_id, within=WITHIN)


def container(docker: DockerProvider, name: str = "full") -> str:
    return docker.create(name, MARKS, DockerConfig(image=IMAGE), within=WITHIN).resource.resource_id


@needs_engine
def test_a_container_that_filled_its_disk_cannot_be_started_and_says_why(
    docker: DockerProvider, engine: tuple[PrivateEngine, SmallDisk]
) -> None:
    full, (_, disk) = container(docker), engine
    fill_from_inside(docker, full, disk)
    docker.stop(full, grace=0.5, within=WITHIN)
    assert isinstance(docker.inspect(full, within=WITHIN), Stopped)
    disk.fill()
    for _ in range(2):
        error = refused(lambda: docker.start(full, within=WITHIN))
        assert error.kind is ErrorKind.DISK_FULL, error
        assert "no space left on device" in error.excerpt
        assert isinstance(docker.inspect(full, within=WITHIN), Stopped)
    # A stop is owed after each start that failed; a full disk does not keep it from being done.
    docker.stop(full, grace=0.5, within=WITHIN)
    assert isinstance(docker.inspect(full, within=WITHIN), Stopped)


@needs_engine
def test_a_container_starts_again_when_somebody_made_room(
    docker: DockerProvider, engine: tuple[PrivateEngine, SmallDisk]
) -> None:
    kept = container(docker)
    docker.execute(kept, Command(("sh", "-c", "echo saved >/note")), within=WITHIN)
    docker.stop(kept, grace=0.5, within=WITHIN)
    _, disk = engine
    disk.fill()
    assert refused(lambda: docker.start(kept, within=WITHIN)).kind is ErrorKind.DISK_FULL
    disk.make_room()
    docker.start(kept, within=WITHIN)
    assert isinstance(docker.inspect(kept, within=WITHIN), Running)
    assert docker.execute(kept, Command(("cat", "/note")), within=WITHIN).stdout == b"saved\n"


@needs_engine
def test_a_container_on_a_full_disk_is_removed_or_says_that_it_is_full(
    docker: DockerProvider, engine: tuple[PrivateEngine, SmallDisk]
) -> None:
    full, (_, disk) = container(docker), engine
    docker.stop(full, grace=0.5, within=WITHIN)
    disk.fill()
    kinds = set()
    try:  # what the engine removes first makes room for what it has to write, or it does not
        docker.delete(full, within=WITHIN)
    except ProviderError as error:
        kinds.add(error.kind)
    assert kinds <= {ErrorKind.DISK_FULL}
    disk.make_room()
    docker.delete(full, within=WITHIN)
    assert isinstance(docker.inspect(full, within=WITHIN), Gone)


@needs_engine
def test_an_engine_without_room_for_another_container_failed_itself(
    docker: DockerProvider, engine: tuple[PrivateEngine, SmallDisk]
) -> None:
    """The disk is the engine's, and no sandbox's; what was allocated before it was full may exist."""
    _, disk = engine
    disk.fill()
    error = refused(lambda: container(docker, "another"))
    assert (error.kind, error.nothing_allocated) == (ErrorKind.SERVER, False)


# Processes of this host.


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", megabytes=4) as made:
        yield made


@pytest.fixture
def local(disk: SmallDisk) -> Iterator[Local]:
    made = Local(disk.place / "state")
    yield made
    disk.make_room()
    made.close()
    assert not left_below(disk.place)


@needs_mount
def test_a_local_sandbox_that_filled_its_disk_is_stopped_and_cannot_be_started(local: Local, disk: SmallDisk) -> None:
    provider, full = local.provider, local.create().resource_id
    fill_from_inside(provider, full, disk)
    provider.stop(full, grace=0.5, within=WITHIN)
    assert isinstance(provider.inspect(full, within=WITHIN), Stopped)
    before = sorted(path.name for path in local.directory().iterdir())
    for _ in range(2):
        error = refused(lambda: provider.start(full, within=WITHIN))
        assert error.kind is ErrorKind.DISK_FULL, error
        assert isinstance(provider.inspect(full, within=WITHIN), Stopped)
    # What failed left nothing behind: of that there is no room.
    assert sorted(path.name for path in local.directory().iterdir()) == before
    provider.stop(full, grace=0.5, within=WITHIN)
    (local.directory() / "files" / "fill").unlink()
    disk.make_room()
    provider.start(full, within=WITHIN)
    assert isinstance(provider.inspect(full, within=WITHIN), Running)


@needs_mount
def test_a_local_sandbox_on_a_full_disk_is_deleted(local: Local, disk: SmallDisk) -> None:
    provider, full = local.provider, local.create().resource_id
    fill_from_inside(provider, full, disk)
    provider.delete(full, within=WITHIN)
    assert isinstance(provider.inspect(full, within=WITHIN), Gone)


@needs_mount
def test_a_host_without_room_for_another_local_sandbox_allocates_nothing(local: Local, disk: SmallDisk) -> None:
    local.create("first")
    disk.fill()
    error = refused(lambda: local.create("second"))
    assert (error.kind, error.nothing_allocated) == (ErrorKind.SERVER, True)
    assert local.provider.find("second", {}, within=WITHIN) is None
