"""The conformance suite: what a provider adapter has to show before its answers are believed.

An adapter's author implements `Harness` once and subclasses `ProviderConformance`; pytest does the rest::

    class TestAcmeConforms(ProviderConformance):
        @pytest.fixture
        def harness(self) -> Iterator[Harness]:
            with AcmeHarness() as harness:
                yield harness

Every test makes its own sandboxes under an installation mark of its own and deletes them again, so that the suite runs
in parallel, in any order, and beside other people's sandboxes. It needs pytest and is the only module here that does.
For readable failures put `pytest.register_assert_rewrite("providers.conformance")` into a `conftest.py`.

The suite reads what a sandbox does from two sides: through the adapter, and by the word of the operating system or
the engine (`Harness.executes`), because an adapter that is wrong about its own sandboxes would agree with itself.
"""

from __future__ import annotations

import hashlib
import io
import secrets
import tarfile
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, ClassVar, TypeVar

import pytest

from providers.contract import (
    MARK_INSTALLATION,
    MARK_PREFIX,
    OUTPUT_LIMIT,
    Command,
    Created,
    Ended,
    ErrorKind,
    Execution,
    Gone,
    Provider,
    ProviderError,
    Resource,
    Running,
    Sighting,
    Stopped,
)
from providers.registry import ConfigurationError, load, validate

AnyProvider = Provider[Any, Any]
T = TypeVar("T")

ALL_CALLS = frozenset({"identify", "create", "find", "inspect", "start", "stop", "delete", "execute", "list"})
OPTIONAL_CALLS = frozenset({"recover", "extend", "archive"})
"""Methods that an adapter may leave as they are; they then refuse at once, without asking anybody."""
_LONG_NAME = "-".join(["a-name-that-is-longer-than-the-hundred-bytes-of-a-header"] * 4)
_LARGE = 5 << 20
_LEFT_BEHIND = "ls -A . ${TMPDIR:-/tmp} | grep paperclip-env || true"
_PACKING = "tar -cf - ."
"""What packs an archive inside a sandbox, where one does, has this on its command line."""


class Harness(ABC):
    """What the suite has to know about one provider. One instance serves one test.

    The abstract methods are the provider itself. The hooks below them have a default or skip their test with a reason;
    an adapter that skips one says so in its documentation.
    """

    key: ClassVar[str]
    """The provider's key in the registry. An adapter outside this repository is found by its entry point."""
    within: ClassVar[float] = 30.0
    """Seconds that every ordinary call gets, and that the suite waits for a state to be reached."""
    trickle_within: ClassVar[float] = 1.5
    """Seconds that each call gets against the trickling server. A whole answer must need longer at a byte a second."""
    margin: ClassVar[float] = 1.0
    """Seconds by which a call may exceed its bound."""
    trickled_calls: ClassVar[frozenset[str]] = ALL_CALLS | OPTIONAL_CALLS
    """Names of the methods that talk to the server at all. The others need only return in time."""
    knows_absolute_paths: ClassVar[bool] = True
    """Whether `archive` takes an absolute path. Where a sandbox has no file system of its own it need not."""

    # The provider.

    @abstractmethod
    def endpoint_data(self) -> dict[str, Any]:
        """Return a valid endpoint as JSON data. The suite may lay sandboxes there and deletes them again."""

    @abstractmethod
    def config_data(self) -> dict[str, Any]:
        """Return a valid configuration as JSON data, of a sandbox that runs until it is stopped."""

    @abstractmethod
    def executes(self, resource: Resource, tag: str) -> bool:
        """Say whether a process with `tag` in its command line still executes for this sandbox. A zombie does not.

        By the operating system's or the engine's own word, never through the adapter: a stopped or absent sandbox
        executes nothing only if the process table says so.
        """

    def secret(self) -> str | None:
        """Return the secret that the endpoint is called with, or None."""
        return None

    def provider(self) -> AnyProvider:
        """Return a new adapter instance at `endpoint_data`, built as production builds it."""
        adapter = load(self.key)
        return adapter(validate(adapter.Endpoint, self.endpoint_data()), self.secret())

    def deadline_config_data(self, seconds: int) -> dict[str, Any]:
        """Return a configuration whose sandboxes the provider itself ends after so many seconds.

        Needed where `Capabilities.has_deadline` is set.
        """
        raise NotImplementedError("a provider with a deadline of its own needs a configuration that sets one")

    # Commands inside the sandbox.

    def shell(self, script: str) -> tuple[str, ...]:
        """Return the argv that runs a POSIX shell script inside the sandbox."""
        return ("sh", "-c", script)

    def daemon(self, tag: str) -> Command:
        """Return a command that ends at once, and leaves a daemon behind: own session, no parent, no open streams.

        `tag` is a unique number of seconds (more than an hour) as text, so that `sleep` takes it as its argument.
        """
        script = f"(setsid sh -c 'sleep {tag} & sleep {tag}' </dev/null >/dev/null 2>&1 &) ; exit 0"
        return Command(self.shell(script), timeout=10)

    def stubborn(self, tag: str) -> Command:
        """Return a command like `daemon`, whose process ignores SIGTERM."""
        script = f"(trap '' TERM HUP; setsid sleep {tag} </dev/null >/dev/null 2>&1 &) ; exit 0"
        return Command(self.shell(script), timeout=10)

    # Faults.

    def switchable(self) -> AbstractContextManager[tuple[AnyProvider, Callable[[], None]]]:
        """Return, as a context, a provider at some address, and a function that switches what stands behind it.

        The function puts another engine behind that very address and, called again, the first one back. The two
        share no sandbox.
        """
        pytest.skip("this harness cannot put another engine behind the same address")

    def trickling(self) -> AbstractContextManager[tuple[AnyProvider, str]]:
        """Return, as a context, a provider whose server trickles, and an id to ask it about (any well-formed one).

        The server answers one byte a second, and never a whole answer within `trickle_within`.
        """
        pytest.skip("this harness has no trickling server")

    def echoing(self, secret: str) -> AbstractContextManager[AnyProvider]:
        """Return, as a context, a provider with this secret whose calls fail.

        The best one is a server that refuses every request and echoes in its errors all that it was sent, headers
        included.
        """
        adapter = load(self.key)
        return nullcontext(adapter(validate(adapter.Endpoint, self.endpoint_data()), secret))


class Sandboxes:
    """The sandboxes of one test: made under one installation mark, and deleted after it whatever happened."""

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.provider = harness.provider()
        self.installation = f"conformance-{secrets.token_hex(8)}"
        self.marks = {MARK_INSTALLATION: self.installation}
        self._made: list[Resource] = []

    def name(self) -> str:
        return f"conformance-{secrets.token_hex(6)}"

    def tag(self) -> str:
        """Return a number of seconds that no other process on this host sleeps."""
        return f"{3600 + secrets.randbelow(3600)}.{secrets.randbelow(10**9):09d}"

    def config(self, data: dict[str, Any] | None = None) -> Any:
        return validate(load(self.harness.key).Config, self.harness.config_data() if data is None else data)

    def create(self, name: str | None = None, **marks: str) -> Resource:
        """Create a sandbox and wait until it runs. It has the marks of all, its own, and one of this creation."""
        return self.running(self.create_at(self.provider, name, self.marks_of(**marks)))

    def create_at(
        self,
        provider: AnyProvider,
        name: str | None = None,
        marks: dict[str, str] | None = None,
        config: dict[str, Any] | None = None,
    ) -> Created:
        """Create a sandbox, and only that: it may be starting still."""
        wanted = self.config(config)
        created = provider.create(name or self.name(), marks or self.marks_of(), wanted, within=self.harness.within)
        self._made.append(created.resource)
        return created

    def repeated(self, resource: Resource) -> str:
        """Repeat the create of a sandbox, as only the living attempt itself would, and return the id it answers."""
        return self.create_at(self.provider, resource.name, dict(resource.marks)).resource.resource_id

    def running(self, created: Created, provider: AnyProvider | None = None) -> Resource:
        """Do as a caller of `create` has to: look until it runs."""
        if not created.ready:
            self.becomes(created.resource, Running, provider)
        return created.resource

    def marks_of(self, **marks: str) -> dict[str, str]:
        """Return the marks of a new creation: the last one no other creation has."""
        own = {"operation": secrets.token_hex(8), **marks}
        return {**self.marks, **{MARK_PREFIX + key: value for key, value in own.items()}}

    def find(self, name: str, marks: Mapping[str, str]) -> Resource | None:
        return self.provider.find(name, marks, within=self.harness.within)

    def found(self, resource: Resource) -> bool:
        """Say whether a sandbox is found as its creation would be looked for."""
        return until(lambda: self.find(resource.name, resource.marks) == resource, self.harness.within)

    def inspect(self, resource: Resource) -> Sighting:
        return self.provider.inspect(resource.resource_id, within=self.harness.within)

    def run(self, resource: Resource, script: str, **options: Any) -> Execution:
        return self.execute(resource, Command(self.harness.shell(script), **options))

    def execute(self, resource: Resource, command: Command) -> Execution:
        return self.provider.execute(resource.resource_id, command, within=self.harness.within)

    def stop(self, resource: Resource, *, grace: float = 0.5) -> None:
        self.provider.stop(resource.resource_id, grace=grace, within=self.harness.within)

    def start(self, resource: Resource) -> None:
        self.provider.start(resource.resource_id, within=self.harness.within)

    def delete(self, resource: Resource) -> None:
        self.provider.delete(resource.resource_id, within=self.harness.within)

    def lists(self, *expected: Resource, **marks: str) -> bool:
        """Say whether the list becomes exactly this. Some providers' lists are behind by seconds."""
        wanted = {**self.marks, **{MARK_PREFIX + key: value for key, value in marks.items()}}

        def reached() -> bool:
            listing = self.provider.list(wanted, within=self.harness.within)
            assert listing.complete
            found = {resource.resource_id: resource for resource in listing.resources}
            return found == {resource.resource_id: resource for resource in expected}

        return until(reached, self.harness.within)

    def becomes(self, resource: Resource, wanted: type[T], provider: AnyProvider | None = None) -> T:
        """Wait until `inspect` answers this, with a bound, and return the sighting."""
        sighting: Sighting | None = None

        def reached() -> bool:
            nonlocal sighting
            sighting = (provider or self.provider).inspect(resource.resource_id, within=self.harness.within)
            return isinstance(sighting, wanted)

        assert until(reached, self.harness.within), f"expected {wanted.__name__}, last saw {sighting}"
        assert isinstance(sighting, wanted)
        return sighting

    def executes(self, resource: Resource, tag: str) -> bool:
        return until(lambda: self.harness.executes(resource, tag), self.harness.within)

    def executes_no_more(self, resource: Resource, tag: str) -> bool:
        return until(lambda: not self.harness.executes(resource, tag), self.harness.within)

    def close(self) -> None:
        """Delete all that is listed, and all that was made: a list may be behind."""
        listed = self.provider.list(self.marks, within=self.harness.within).resources
        for resource in {resource.resource_id: resource for resource in (*listed, *self._made)}.values():
            assert until(partial(self._deleted, resource), self.harness.within), resource

    def _deleted(self, resource: Resource) -> bool:
        try:
            self.delete(resource)
        except ProviderError as error:
            if error.kind is not ErrorKind.BUSY:
                raise
            return False
        return True


def until(reached: Callable[[], bool], within: float) -> bool:
    """Ask again and again, for at most `within` seconds, and say whether it came true."""
    deadline = time.monotonic() + within
    while not reached():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _in(seconds: float) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=seconds)


def refused(kind: ErrorKind, call: Callable[[], object]) -> ProviderError:
    """Check that a call fails with exactly this kind, and return the error."""
    with pytest.raises(ProviderError) as caught:
        call()
    assert caught.value.kind is kind, f"expected {kind}, got {caught.value}"
    return caught.value


def _names(packed: bytes) -> set[str]:
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        return {name.removeprefix("./") for name in tar.getnames()} - {".", ""}


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    assert file is not None, f"{member.name} is no file"
    return file.read()


class ProviderConformance:
    """Subclass it, give it a `harness` fixture, and every promise of the contract is put to the test."""

    @pytest.fixture
    def harness(self) -> Iterator[Harness]:
        raise NotImplementedError("a conformance test class overrides the fixture `harness`")

    @pytest.fixture
    def sandboxes(self, harness: Harness) -> Iterator[Sandboxes]:
        sandboxes = Sandboxes(harness)
        yield sandboxes
        sandboxes.close()

    # Identity.

    def test_identify_answers_the_same_text_for_ever(self, harness: Harness, sandboxes: Sandboxes) -> None:
        first = sandboxes.provider.identify(within=harness.within)
        assert first
        sandboxes.create()
        assert sandboxes.provider.identify(within=harness.within) == first
        assert harness.provider().identify(within=harness.within) == first

    def test_another_engine_behind_the_same_address_never_passes_for_the_first(
        self, harness: Harness, sandboxes: Sandboxes
    ) -> None:
        with harness.switchable() as (provider, switch):
            first = provider.identify(within=harness.within)
            resource = sandboxes.running(sandboxes.create_at(provider), provider)
            switch()
            try:
                # A negative answer of the other engine is harmless only because its identity gives it away.
                with suppress(ProviderError):
                    provider.inspect(resource.resource_id, within=harness.within)
                try:
                    assert provider.identify(within=harness.within) != first
                except ProviderError as error:
                    assert error.kind is ErrorKind.IDENTITY, error
            finally:
                switch()
            assert provider.identify(within=harness.within) == first
            assert isinstance(provider.inspect(resource.resource_id, within=harness.within), Running)
            provider.delete(resource.resource_id, within=harness.within)

    # Creation and finding.

    def test_a_create_answers_the_id_and_the_sandbox_runs_in_time(self, sandboxes: Sandboxes) -> None:
        name, marks = sandboxes.name(), sandboxes.marks_of(lease="42")
        created = sandboxes.create_at(sandboxes.provider, name, marks)
        resource = created.resource
        assert resource.resource_id
        assert resource.name == name
        assert dict(resource.marks) == marks
        if sandboxes.provider.capabilities.finds_by_name:
            # From the moment that it is allocated, so however far it has come: a lost answer is looked for at once.
            assert sandboxes.find(name, {}) == resource
        if created.ready:
            assert isinstance(sandboxes.inspect(resource), Running)
        sighting = sandboxes.becomes(resource, Running)
        assert sighting.resource == resource
        for moment in (sighting.resource.as_of, sighting.resource.expires_at):
            assert moment is None or moment.tzinfo is not None

    def test_another_instance_finds_what_the_first_one_created(self, harness: Harness, sandboxes: Sandboxes) -> None:
        resource = sandboxes.create()
        assert sandboxes.found(resource)
        assert harness.provider().find(resource.name, resource.marks, within=harness.within) == resource
        assert isinstance(harness.provider().inspect(resource.resource_id, within=harness.within), Running)

    def test_marks_that_no_sandbox_carries_find_none(self, sandboxes: Sandboxes) -> None:
        resource = sandboxes.create(lease="1")
        assert sandboxes.found(resource)
        nobodys = {**resource.marks, MARK_PREFIX + "operation": secrets.token_hex(8)}
        assert sandboxes.find(sandboxes.name(), nobodys) is None
        # By its marks alone it may be found, and no other sandbox in its place.
        assert sandboxes.find(sandboxes.name(), resource.marks) in (None, resource)

    def test_a_repeated_create_makes_no_second_sandbox(self, sandboxes: Sandboxes) -> None:
        resource = sandboxes.create(lease="first")
        sandboxes.run(resource, "echo kept > witness")
        if sandboxes.provider.capabilities.idempotent_create:
            assert sandboxes.repeated(resource) == resource.resource_id
        else:
            error = refused(ErrorKind.NAME_TAKEN, lambda: sandboxes.create(resource.name, lease="second"))
            assert error.nothing_allocated
            assert error.kind in sandboxes.provider.capabilities.proves_no_allocation
        assert sandboxes.lists(resource)
        assert sandboxes.find(resource.name, resource.marks) == resource
        assert sandboxes.run(resource, "cat witness").stdout == b"kept\n"

    def test_the_name_of_a_stopped_sandbox_is_taken_too(self, sandboxes: Sandboxes) -> None:
        resource = sandboxes.create()
        sandboxes.stop(resource)
        sandboxes.becomes(resource, Stopped)
        if sandboxes.provider.capabilities.idempotent_create:
            assert sandboxes.repeated(resource) == resource.resource_id
        else:
            refused(ErrorKind.NAME_TAKEN, lambda: sandboxes.create(resource.name))
        assert isinstance(sandboxes.inspect(resource), Stopped)

    def test_of_concurrent_creates_with_one_name_one_sandbox_comes(
        self, harness: Harness, sandboxes: Sandboxes
    ) -> None:
        name, marks = sandboxes.name(), sandboxes.marks_of()
        providers = [harness.provider() for _ in range(4)]

        def attempt(provider: AnyProvider) -> Created | ProviderError:
            try:
                return sandboxes.create_at(provider, name, marks)
            except ProviderError as error:
                return error

        with ThreadPoolExecutor(len(providers)) as pool:
            answers = list(pool.map(attempt, providers))
        created = {answer.resource.resource_id: answer for answer in answers if isinstance(answer, Created)}
        errors = [answer for answer in answers if isinstance(answer, ProviderError)]
        assert len(created) == 1, answers
        if sandboxes.provider.capabilities.idempotent_create:
            # The others are answered what the first one is, or that it is still being made.
            assert {error.kind for error in errors} <= {ErrorKind.BUSY}
        else:
            assert {error.kind for error in errors} == {ErrorKind.NAME_TAKEN}
            assert len(errors) == len(providers) - 1
        [one] = created.values()
        sandboxes.running(one)
        assert sandboxes.lists(one.resource)

    def test_a_create_that_is_repeated_when_its_sandbox_is_gone_makes_no_second_one(self, sandboxes: Sandboxes) -> None:
        if not sandboxes.provider.capabilities.idempotent_create:
            pytest.skip("this provider refuses a name that exists, and frees it afterwards")
        first = sandboxes.create()
        sandboxes.delete(first)
        sandboxes.becomes(first, Gone)
        # A reply that was lost and is asked for again.
        assert sandboxes.repeated(first) == first.resource_id
        assert isinstance(sandboxes.inspect(first), Gone)
        assert sandboxes.lists()

    def test_an_unknown_name_is_not_found(self, sandboxes: Sandboxes) -> None:
        assert sandboxes.find(sandboxes.name(), {}) is None

    def test_a_name_is_found_exactly_and_never_by_a_part_of_it(self, sandboxes: Sandboxes) -> None:
        resource = sandboxes.create(f"{sandboxes.name()}-x")
        for other in (resource.name[:-1], resource.name[:-2], resource.name[1:], resource.name + "x"):
            assert sandboxes.find(other, {}) is None

    def test_an_unknown_id_is_gone(self, sandboxes: Sandboxes) -> None:
        resource = sandboxes.create()
        sandboxes.delete(resource)
        sandboxes.becomes(resource, Gone)
        assert isinstance(sandboxes.inspect(resource), Gone)

    # Stopping and starting.

    def test_stop_keeps_files_and_start_runs_new_commands_but_no_old_process(self, sandboxes: Sandboxes) -> None:
        resource, tag = sandboxes.create(), sandboxes.tag()
        sandboxes.execute(resource, sandboxes.harness.daemon(tag))
        assert sandboxes.executes(resource, tag)
        assert sandboxes.run(resource, "echo saved > note").exit_code == 0
        sandboxes.stop(resource)
        stopped = sandboxes.becomes(resource, Stopped)
        assert stopped.resource == resource
        assert stopped.ended is Ended.KILLED
        assert not sandboxes.harness.executes(resource, tag)
        sandboxes.start(resource)
        sandboxes.becomes(resource, Running)
        assert sandboxes.run(resource, "cat note").stdout == b"saved\n"
        assert not sandboxes.harness.executes(resource, tag)
        sandboxes.stop(resource)
        sandboxes.becomes(resource, Stopped)

    def test_stopping_twice_changes_nothing(self, sandboxes: Sandboxes) -> None:
        resource = sandboxes.create()
        sandboxes.stop(resource)
        sandboxes.becomes(resource, Stopped)
        sandboxes.stop(resource)
        assert isinstance(sandboxes.inspect(resource), Stopped)

    def test_starting_a_running_sandbox_changes_nothing(self, sandboxes: Sandboxes) -> None:
        resource, tag = sandboxes.create(), sandboxes.tag()
        sandboxes.execute(resource, sandboxes.harness.daemon(tag))
        assert sandboxes.executes(resource, tag)
        sandboxes.start(resource)
        assert isinstance(sandboxes.inspect(resource), Running)
        assert sandboxes.harness.executes(resource, tag)

    def test_a_stopped_sandbox_is_still_found_with_its_marks(self, sandboxes: Sandboxes) -> None:
        resource = sandboxes.create(lease="7")
        sandboxes.stop(resource)
        sandboxes.becomes(resource, Stopped)
        assert sandboxes.found(resource)

    def test_stop_ends_a_command_that_ignores_the_polite_signal(self, sandboxes: Sandboxes) -> None:
        resource, tag = sandboxes.create(), sandboxes.tag()
        sandboxes.execute(resource, sandboxes.harness.stubborn(tag))
        assert sandboxes.executes(resource, tag)
        sandboxes.stop(resource, grace=0.2)
        sandboxes.becomes(resource, Stopped)
        assert not sandboxes.harness.executes(resource, tag)

    def test_stop_and_start_of_a_sandbox_that_is_gone_find_nothing(self, sandboxes: Sandboxes) -> None:
        resource = sandboxes.create()
        sandboxes.delete(resource)
        sandboxes.becomes(resource, Gone)
        refused(ErrorKind.NOT_FOUND, lambda: sandboxes.stop(resource))
        refused(ErrorKind.NOT_FOUND, lambda: sandboxes.start(resource))

    # Deleting.

    def test_deleting_a_running_sandbox_ends_what_it_executes(self, sandboxes: Sandboxes) -> None:
        resource, tag = sandboxes.create(), sandboxes.tag()
        sandboxes.execute(resource, sandboxes.harness.daemon(tag))
        assert sandboxes.executes(resource, tag)
        sandboxes.delete(resource)
        sandboxes.becomes(resource, Gone)
        assert not sandboxes.harness.executes(resource, tag)
        assert until(lambda: sandboxes.find(resource.name, resource.marks) is None, sandboxes.harness.within)
        assert sandboxes.lists()

    def test_deleting_a_stopped_sandbox_leaves_it_gone(self, sandboxes: Sandboxes) -> None:
        resource = sandboxes.create()
        sandboxes.stop(resource)
        sandboxes.becomes(resource, Stopped)
        sandboxes.delete(resource)
        sandboxes.becomes(resource, Gone)

    def test_deleting_twice_changes_nothing(self, sandboxes: Sandboxes) -> None:
        resource = sandboxes.create()
        sandboxes.delete(resource)
        sandboxes.becomes(resource, Gone)
        sandboxes.delete(resource)
        assert isinstance(sandboxes.inspect(resource), Gone)

    @pytest.mark.parametrize("resource_id", ["", ".", "..", "../..", "*", "?all=1", "no-such-sandbox", "\0", "é/\n"])
    def test_an_id_that_names_no_sandbox_deletes_none(self, sandboxes: Sandboxes, resource_id: str) -> None:
        resource = sandboxes.create()
        with suppress(ProviderError):
            sandboxes.provider.delete(resource_id, within=sandboxes.harness.within)
        with suppress(ProviderError):
            sandboxes.provider.stop(resource_id, grace=0.1, within=sandboxes.harness.within)
        assert isinstance(sandboxes.inspect(resource), Running)
        assert sandboxes.lists(resource)

    def test_delete_ends_a_command_that_ignores_the_polite_signal(self, sandboxes: Sandboxes) -> None:
        resource, tag = sandboxes.create(), sandboxes.tag()
        sandboxes.execute(resource, sandboxes.harness.stubborn(tag))
        assert sandboxes.executes(resource, tag)
        sandboxes.delete(resource)
        sandboxes.becomes(resource, Gone)
        assert not sandboxes.harness.executes(resource, tag)

    def test_a_name_is_free_after_delete_and_its_next_sandbox_is_another(self, sandboxes: Sandboxes) -> None:
        if sandboxes.provider.capabilities.idempotent_create:
            pytest.skip("a name is the key of an idempotent create here, and is never used twice")
        first = sandboxes.create()
        sandboxes.run(first, "echo old > note")
        sandboxes.delete(first)
        sandboxes.becomes(first, Gone)
        second = sandboxes.create(first.name)
        assert second.resource_id != first.resource_id
        assert sandboxes.run(second, "test -e note").exit_code == 1
        assert isinstance(sandboxes.inspect(first), Gone)
        sandboxes.delete(first)
        refused(ErrorKind.NOT_FOUND, lambda: sandboxes.stop(first))
        assert isinstance(sandboxes.inspect(second), Running)

    # Deadlines of the provider's own, and recovery.

    def test_a_provider_says_for_how_long_a_sandbox_lives_and_extends_it(
        self, harness: Harness, sandboxes: Sandboxes
    ) -> None:
        provider = sandboxes.provider
        if not provider.capabilities.has_deadline:
            resource = sandboxes.create()
            assert provider.lifetime(sandboxes.config()) is None
            assert resource.expires_at is None
            refused(ErrorKind.REFUSED, lambda: provider.extend(resource.resource_id, 7200, within=harness.within))
            return
        config = harness.deadline_config_data(3600)
        assert provider.lifetime(sandboxes.config(config)) == pytest.approx(3600, abs=60)
        resource = sandboxes.running(sandboxes.create_at(provider, config=config))
        first = sandboxes.becomes(resource, Running).resource.expires_at
        assert first is not None
        assert abs(first - _in(3600)) < timedelta(minutes=2)
        extended = provider.extend(resource.resource_id, 7200, within=harness.within)
        assert _in(7200) - timedelta(minutes=1) < extended < _in(7200) + timedelta(minutes=2)
        again = sandboxes.becomes(resource, Running).resource.expires_at
        assert again is not None
        assert abs(again - extended) < timedelta(seconds=2)

    def test_a_stopped_sandbox_is_kept_past_its_deadline(self, harness: Harness, sandboxes: Sandboxes) -> None:
        provider = sandboxes.provider
        if not provider.capabilities.has_deadline:
            pytest.skip("this provider has no deadline of its own")
        config = harness.deadline_config_data(3600)
        resource = sandboxes.running(sandboxes.create_at(provider, config=config))
        sandboxes.stop(resource)
        assert sandboxes.becomes(resource, Stopped).resource.expires_at is None

    def test_a_deadline_of_a_sandbox_that_is_gone_is_not_extended(self, harness: Harness, sandboxes: Sandboxes) -> None:
        resource = sandboxes.create()
        sandboxes.delete(resource)
        sandboxes.becomes(resource, Gone)
        with pytest.raises(ProviderError) as caught:
            sandboxes.provider.extend(resource.resource_id, 7200, within=harness.within)
        has_deadline = sandboxes.provider.capabilities.has_deadline
        assert caught.value.kind is (ErrorKind.NOT_FOUND if has_deadline else ErrorKind.REFUSED)

    def test_recovery_leaves_alone_what_needs_none(self, harness: Harness, sandboxes: Sandboxes) -> None:
        resource, tag = sandboxes.create(), sandboxes.tag()
        sandboxes.execute(resource, harness.daemon(tag))
        assert sandboxes.executes(resource, tag)
        try:
            sandboxes.provider.recover(resource.resource_id, within=harness.within)
        except ProviderError as error:
            assert error.kind is ErrorKind.REFUSED, error
        assert isinstance(sandboxes.inspect(resource), Running)
        assert harness.executes(resource, tag)
        sandboxes.stop(resource)
        sandboxes.becomes(resource, Stopped)
        refused(ErrorKind.REFUSED, lambda: sandboxes.provider.recover(resource.resource_id, within=harness.within))
        assert isinstance(sandboxes.inspect(resource), Stopped)

    # Executing.

    def test_execute_answers_exit_code_and_both_streams(self, sandboxes: Sandboxes) -> None:
        resource = sandboxes.create()
        answer = sandboxes.run(resource, "printf out; printf err >&2; exit 7")
        assert answer == Execution(exit_code=7, stdout=b"out", stderr=b"err")

    def test_execute_hands_over_stdin_environment_and_directory(self, sandboxes: Sandboxes) -> None:
        resource = sandboxes.create()
        script = 'cat; printf "|%s|" "$GREETING"; pwd'
        body = b"\x00\xff bytes \n" * 10_000
        answer = sandboxes.run(resource, script, stdin=body, env={"GREETING": "hé llo"}, cwd="/")
        assert answer.stdout == body + "|hé llo|/\n".encode()
        assert (answer.exit_code, answer.stderr) == (0, b"")

    def test_stdin_that_a_command_never_reads_does_not_block_it(self, sandboxes: Sandboxes) -> None:
        resource = sandboxes.create()
        assert sandboxes.run(resource, "exit 3", stdin=b"x" * 500_000).exit_code == 3

    def test_a_command_past_its_timeout_is_killed_with_its_children(self, sandboxes: Sandboxes) -> None:
        resource, tag = sandboxes.create(), sandboxes.tag()
        started = time.monotonic()
        answer = sandboxes.run(resource, f"printf early; sleep {tag} & sleep {tag}", timeout=1.0)
        assert time.monotonic() - started < 10
        assert answer.timed_out
        assert answer.exit_code is None
        assert answer.stdout == b"early"
        assert sandboxes.executes_no_more(resource, tag)
        assert isinstance(sandboxes.inspect(resource), Running)
        assert sandboxes.run(resource, "echo still here").stdout == b"still here\n"

    def test_output_is_kept_up_to_its_limit_and_no_further(self, sandboxes: Sandboxes) -> None:
        resource = sandboxes.create()
        size = 2 * OUTPUT_LIMIT
        answer = sandboxes.run(resource, f"head -c {size} /dev/zero; head -c 10 /dev/zero >&2; exit 4")
        assert answer.truncated
        assert len(answer.stdout) == OUTPUT_LIMIT
        assert len(answer.stderr) == 10
        assert answer.exit_code == 4

    def test_several_commands_run_at_once(self, sandboxes: Sandboxes) -> None:
        resource = sandboxes.create()
        # Each waits for the other's file, so both end well only if they run side by side.
        scripts = [
            f"touch {mine}; for i in $(seq 100); do test -e {other} && exit 0; sleep 0.1; done; exit 1"
            for mine, other in (("a", "b"), ("b", "a"))
        ]
        with ThreadPoolExecutor(2) as pool:
            answers = list(pool.map(lambda script: sandboxes.run(resource, script, timeout=20), scripts))
        assert [answer.exit_code for answer in answers] == [0, 0]

    def test_a_command_that_does_not_exist_fails_as_in_a_shell_or_is_invalid(self, sandboxes: Sandboxes) -> None:
        resource = sandboxes.create()
        try:
            answer = sandboxes.execute(resource, Command(("/no/such/command",), timeout=10))
        except ProviderError as error:
            assert error.kind in {ErrorKind.INVALID, ErrorKind.REFUSED}
        else:
            assert answer.exit_code in {126, 127}
        assert isinstance(sandboxes.inspect(resource), Running)

    def test_execute_in_a_stopped_sandbox_is_refused_and_does_not_start_it(self, sandboxes: Sandboxes) -> None:
        resource = sandboxes.create()
        sandboxes.stop(resource)
        sandboxes.becomes(resource, Stopped)
        refused(ErrorKind.REFUSED, lambda: sandboxes.run(resource, "true"))
        assert isinstance(sandboxes.inspect(resource), Stopped)

    def test_execute_in_a_sandbox_that_is_gone_finds_nothing(self, sandboxes: Sandboxes) -> None:
        resource = sandboxes.create()
        sandboxes.delete(resource)
        sandboxes.becomes(resource, Gone)
        refused(ErrorKind.NOT_FOUND, lambda: sandboxes.run(resource, "true"))

    # Archives.

    def test_an_archive_holds_all_that_is_in_a_directory_and_changes_nothing(
        self, harness: Harness, sandboxes: Sandboxes
    ) -> None:
        resource = self._with_files(sandboxes)
        listing = f"find work | sort; cat work/sub/large | cksum; ls -ld work work/*; {_LEFT_BEHIND}"
        before = sandboxes.run(resource, listing).stdout
        packed = self._archived(sandboxes, resource, "work")
        with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
            members = {member.name.removeprefix("./").rstrip("/"): member for member in tar if member.name != "."}
            assert set(members) == {
                *("empty", "sub", "sub/large", "program", "link", "outside", "hollow", "name with\nnewline"),
                *(f"sub/{_LONG_NAME}", f"sub/{_LONG_NAME}/note"),
            }
            assert members["empty"].isdir()
            assert members["sub"].isdir()
            assert members["program"].mode & 0o777 == 0o750
            assert members["hollow"].size == 0
            assert (members["link"].issym(), members["link"].linkname) == (True, "sub/large")
            # A link is what it says, wherever it leads.
            assert (members["outside"].issym(), members["outside"].linkname) == (True, "/etc/passwd")
            assert _content(tar, members[f"sub/{_LONG_NAME}/note"]) == b"saved\n"
            large = _content(tar, members["sub/large"])
        assert len(large) == _LARGE
        assert (
            hashlib.md5(large, usedforsecurity=False).hexdigest().encode()
            in sandboxes.run(resource, "md5sum work/sub/large").stdout
        )
        assert sandboxes.run(resource, listing).stdout == before
        assert isinstance(sandboxes.inspect(resource), Running)
        # The same by its absolute path, where the provider knows such.
        if harness.knows_absolute_paths:
            where = sandboxes.run(resource, "pwd").stdout.decode().rstrip("\n")
            assert _names(self._archived(sandboxes, resource, f"{where}/work/sub")) == {
                "large",
                _LONG_NAME,
                f"{_LONG_NAME}/note",
            }

    def test_the_workspace_of_a_configuration_can_be_archived(self, harness: Harness, sandboxes: Sandboxes) -> None:
        resource = sandboxes.create()
        workspace = sandboxes.provider.workspace(sandboxes.config())
        if not sandboxes.provider.capabilities.archives:
            archive = sandboxes.provider.archive(resource.resource_id, workspace, within=harness.within)
            refused(ErrorKind.REFUSED, lambda: next(archive))
            return
        script = "mkdir -p saved/empty; echo kept >saved/note"
        assert sandboxes.run(resource, script, cwd=None if workspace == "." else workspace).exit_code == 0
        assert {"saved", "saved/empty", "saved/note"} <= _names(self._archived(sandboxes, resource, workspace))

    def test_an_empty_directory_is_an_archive_too(self, sandboxes: Sandboxes) -> None:
        resource = sandboxes.create()
        sandboxes.run(resource, "mkdir hollow")
        assert _names(self._archived(sandboxes, resource, "hollow")) == set()

    @pytest.mark.parametrize("path", ["no-such-directory", "file", "file/below", "broken"])
    def test_an_archive_of_what_is_no_directory_misses_it(self, sandboxes: Sandboxes, path: str) -> None:
        resource = sandboxes.create()
        sandboxes.run(resource, "touch file; ln -s nowhere broken")
        refused(ErrorKind.MISSING_PATH, lambda: self._archived(sandboxes, resource, path))
        assert isinstance(sandboxes.inspect(resource), Running)

    @pytest.mark.parametrize("path", ["", "/", "..", "/.", "a\0b"])
    def test_an_archive_of_a_whole_sandbox_is_invalid(self, sandboxes: Sandboxes, path: str) -> None:
        resource = sandboxes.create()
        refused(ErrorKind.INVALID, lambda: self._archived(sandboxes, resource, path))

    def test_an_archive_of_a_stopped_sandbox_is_refused_and_does_not_start_it(self, sandboxes: Sandboxes) -> None:
        resource = self._with_files(sandboxes)
        sandboxes.stop(resource)
        sandboxes.becomes(resource, Stopped)
        refused(ErrorKind.REFUSED, lambda: self._archived(sandboxes, resource, "work"))
        assert isinstance(sandboxes.inspect(resource), Stopped)

    def test_an_archive_of_a_sandbox_that_is_gone_finds_nothing(self, sandboxes: Sandboxes) -> None:
        resource = self._with_files(sandboxes)
        sandboxes.delete(resource)
        sandboxes.becomes(resource, Gone)
        refused(ErrorKind.NOT_FOUND, lambda: self._archived(sandboxes, resource, "work"))

    def test_files_are_read_again_after_a_stop_and_a_start(self, sandboxes: Sandboxes) -> None:
        resource = self._with_files(sandboxes)
        sandboxes.stop(resource)
        sandboxes.becomes(resource, Stopped)
        sandboxes.start(resource)
        sandboxes.becomes(resource, Running)
        assert "sub/large" in _names(self._archived(sandboxes, resource, "work"))

    def test_nothing_is_asked_before_an_archive_is_read_and_its_bound_counts_from_there(
        self, harness: Harness, sandboxes: Sandboxes
    ) -> None:
        resource = self._with_files(sandboxes)
        absent = sandboxes.provider.archive("no-such-sandbox", "work", within=harness.within)
        absent.close()
        archive = sandboxes.provider.archive(resource.resource_id, "work", within=4.0)
        time.sleep(0.5)
        next(archive)
        time.sleep(4.0)  # a reader that is slow uses its bound up
        started = time.monotonic()
        refused(ErrorKind.TIMEOUT, lambda: list(archive))
        assert time.monotonic() - started < harness.margin

    def test_an_archive_that_is_given_up_leaves_nothing_running(self, harness: Harness, sandboxes: Sandboxes) -> None:
        resource = self._with_files(sandboxes)
        before = sandboxes.run(resource, _LEFT_BEHIND).stdout
        archive = sandboxes.provider.archive(resource.resource_id, "work", within=harness.within)
        next(archive)
        archive.close()
        assert sandboxes.run(resource, _LEFT_BEHIND).stdout == before
        assert sandboxes.executes_no_more(resource, _PACKING)
        # And the sandbox serves on, another archive included.
        assert "sub/large" in _names(self._archived(sandboxes, resource, "work"))

    def _with_files(self, sandboxes: Sandboxes) -> Resource:
        if not sandboxes.provider.capabilities.archives:
            pytest.skip("this provider does not hand files over")
        resource = sandboxes.create()
        script = f"""
            mkdir -p work/empty work/sub/{_LONG_NAME} && cd work &&
            head -c {_LARGE} /dev/urandom >sub/large && echo saved >sub/{_LONG_NAME}/note &&
            echo '#!/bin/sh' >program && chmod 750 program && ln -s sub/large link && ln -s /etc/passwd outside &&
            : >hollow && : >'name with
newline'
        """
        done = sandboxes.run(resource, script)
        assert done.exit_code == 0, done
        return resource

    def _archived(self, sandboxes: Sandboxes, resource: Resource, path: str) -> bytes:
        if not sandboxes.provider.capabilities.archives:
            pytest.skip("this provider does not hand files over")
        with closing(sandboxes.provider.archive(resource.resource_id, path, within=sandboxes.harness.within)) as pieces:
            return b"".join(pieces)

    # Listing.

    def test_list_holds_every_state_and_leaves_out_what_is_marked_otherwise(self, sandboxes: Sandboxes) -> None:
        running, stopped = sandboxes.create(lease="1"), sandboxes.create(lease="2")
        sandboxes.stop(stopped)
        sandboxes.becomes(stopped, Stopped)
        with_other = Sandboxes(sandboxes.harness)
        try:
            foreign = with_other.create(lease="1")
            assert sandboxes.lists(running, stopped)
            assert sandboxes.lists(running, lease="1")
            assert sandboxes.lists(lease="3")
            assert with_other.lists(foreign)
        finally:
            with_other.close()

    # Bounds, threads, configuration, secrets.

    @pytest.mark.parametrize("call", sorted(ALL_CALLS | OPTIONAL_CALLS))
    def test_a_server_that_answers_a_byte_a_second_holds_nobody_beyond_the_bound(
        self, harness: Harness, sandboxes: Sandboxes, call: str
    ) -> None:
        bound = harness.trickle_within
        with harness.trickling() as (provider, resource_id):
            command = Command(harness.shell("true"), timeout=bound / 2)
            calls: dict[str, Callable[[], object]] = {
                "identify": lambda: provider.identify(within=bound),
                "create": lambda: provider.create(sandboxes.name(), sandboxes.marks, sandboxes.config(), within=bound),
                "find": lambda: provider.find(sandboxes.name(), {}, within=bound),
                "inspect": lambda: provider.inspect(resource_id, within=bound),
                "start": lambda: provider.start(resource_id, within=bound),
                "stop": lambda: provider.stop(resource_id, grace=bound / 2, within=bound),
                "delete": lambda: provider.delete(resource_id, within=bound),
                "execute": lambda: provider.execute(resource_id, command, within=bound),
                "list": lambda: provider.list(sandboxes.marks, within=bound),
                "recover": lambda: provider.recover(resource_id, within=bound),
                "extend": lambda: provider.extend(resource_id, 60, within=bound),
                "archive": lambda: list(provider.archive(resource_id, "work", within=bound)),
            }
            started = time.monotonic()
            if call in OPTIONAL_CALLS and getattr(type(provider), call) is getattr(Provider, call):
                refused(ErrorKind.REFUSED, calls[call])
            elif call in harness.trickled_calls:
                refused(ErrorKind.TIMEOUT, calls[call])
            else:
                with suppress(ProviderError):
                    calls[call]()
            assert time.monotonic() - started < bound + harness.margin

    def test_one_instance_serves_several_threads(self, sandboxes: Sandboxes) -> None:
        def life(number: int) -> bytes:
            resource = sandboxes.create(lease=str(number))
            answer = sandboxes.run(resource, f"printf {number}")
            sandboxes.stop(resource)
            sandboxes.becomes(resource, Stopped)
            sandboxes.delete(resource)
            sandboxes.becomes(resource, Gone)
            return answer.stdout

        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(life, range(4))) == [b"0", b"1", b"2", b"3"]
        assert sandboxes.lists()

    @pytest.mark.parametrize("schema", ["Endpoint", "Config"])
    def test_a_configuration_that_does_not_fit_is_refused_by_the_name_of_its_field(
        self, harness: Harness, schema: str
    ) -> None:
        adapter = load(harness.key)
        wanted = adapter.Endpoint if schema == "Endpoint" else adapter.Config
        valid = harness.endpoint_data() if schema == "Endpoint" else harness.config_data()
        validate(wanted, valid)

        def offending(data: object) -> set[str]:
            with pytest.raises(ConfigurationError) as caught:
                validate(wanted, data)
            assert all(caught.value.errors.values())
            return {name.partition(".")[0] for name in caught.value.errors}

        assert offending({**valid, "surely_unknown": 1}) == {"surely_unknown"}
        for name, field in wanted.model_fields.items():
            key = field.alias or name
            assert key in offending({**valid, key: {"no": {"field": ["takes", {"this": 1}]}}})
            if field.is_required():
                assert offending({other: value for other, value in valid.items() if other != key}) == {key}
        no_objects: tuple[object, ...] = (None, [], "text", 5)
        for no_object in no_objects:
            assert offending(no_object) == {"configuration"}

    def test_no_error_carries_a_secret(self, harness: Harness, sandboxes: Sandboxes) -> None:
        # The prefixes of well-known tokens are left out: an adapter must not rely on recognising a secret by its looks.
        secret = f"zq{secrets.token_hex(16)}"
        absent = sandboxes.create()
        sandboxes.delete(absent)
        sandboxes.becomes(absent, Gone)
        bound = harness.within
        command = Command(("/no/such/command",), env={"SOMETHING": secret}, stdin=secret.encode(), timeout=5)
        with harness.echoing(secret) as provider:
            calls: list[Callable[[], object]] = [
                lambda: provider.identify(within=bound),
                lambda: provider.find(sandboxes.name(), {}, within=bound),
                lambda: provider.inspect(absent.resource_id, within=bound),
                lambda: provider.start(absent.resource_id, within=bound),
                lambda: provider.stop(absent.resource_id, grace=0.1, within=bound),
                lambda: provider.delete(absent.resource_id, within=bound),
                lambda: provider.execute(absent.resource_id, command, within=bound),
                lambda: provider.list(sandboxes.marks, within=bound),
                lambda: provider.recover(absent.resource_id, within=bound),
                lambda: provider.extend(absent.resource_id, 60, within=bound),
                lambda: list(provider.archive(absent.resource_id, "work", within=bound)),
            ]
            failures: list[ProviderError] = []
            for call in calls:
                try:
                    call()
                except ProviderError as error:
                    failures.append(error)
        assert failures, "the harness's failing provider did not fail"
        for failure in failures:
            text = "".join(traceback.format_exception(failure)) + repr(failure) + repr(failure.args)
            assert secret not in text
