"""Where the work of a sandbox lies, by its configuration; which is what it was where it does not say so."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from leases import planning
from leases.models import Operation
from providers.contract import Command
from providers.registry import ConfigurationError, load, validate
from tests.providers.local_harness import WITHIN, Local

STORED: dict[str, dict[str, Any]] = {
    "local": {"command": ["sleep", "1000"], "env": {"A": "b"}},
    "docker": {"image": "busybox:latest", "memory_mb": 64},
    "daytona": {"snapshot": "small", "lifetime_seconds": 3600},
    "e2b": {"template": "base"},
}
"""Configurations as they were stored before there was a key for the workspace."""
FINGERPRINTS = {
    "local": "02f09498757f49f4b2adcfd3a96588c4ebfa62a5c0a683e89e8d0d47dd36d260",
    "docker": "d83c173e0b6af1c8bc440d3cd29919f70385186261a554df1ea0afd9cb7eedf3",
    "daytona": "769be8af580616474dc7ec8eb33e9b6319aa86a48d63890d09cedbab1b3cc974",
    "e2b": "b9cdc61aab2b96e3373cb6f36461314819580d8b4d7f040cf73c12410b3c04c3",
}
"""Their fingerprints as they were computed then."""
every_provider = pytest.mark.parametrize("key", sorted(STORED))


def fingerprint(key: str, config: dict[str, Any]) -> str:
    environment = UUID("00000000-0000-4000-8000-000000000001")
    operation = Operation(
        provider=key, endpoint={}, account_identity=f"{key} account", config=config, environment_uuid=environment
    )
    return planning.fingerprint(operation)


@every_provider
def test_a_configuration_from_before_is_valid_and_its_work_lies_where_commands_start(key: str) -> None:
    adapter = load(key)
    assert adapter.workspace(validate(adapter.Config, STORED[key])) == "."


@every_provider
def test_a_configuration_from_before_keeps_its_fingerprint(key: str) -> None:
    assert fingerprint(key, STORED[key]) == FINGERPRINTS[key]


@every_provider
def test_a_workspace_is_named_in_the_configuration(key: str) -> None:
    adapter = load(key)
    assert adapter.workspace(validate(adapter.Config, {**STORED[key], "workspace": "work/tree"})) == "work/tree"
    if key != "local":
        assert adapter.workspace(validate(adapter.Config, {**STORED[key], "workspace": "/work"})) == "/work"


@every_provider
@pytest.mark.parametrize(
    "workspace", ["", "/", "//", "/.", "..", "../other", "a/../../b", "a\0b", "a\nb", "x" * 2000, 5]
)
def test_what_is_no_directory_of_a_sandbox_is_no_workspace(key: str, workspace: object) -> None:
    adapter = load(key)
    with pytest.raises(ConfigurationError) as caught:
        validate(adapter.Config, {**STORED[key], "workspace": workspace})
    assert set(caught.value.errors) == {"workspace"}


def test_a_local_workspace_is_below_the_sandboxs_own_directory(tmp_path: Any) -> None:
    adapter = load("local")
    with pytest.raises(ConfigurationError) as caught:
        validate(adapter.Config, {"workspace": "/work"})
    assert set(caught.value.errors) == {"workspace"}
    local = Local(tmp_path / "state")
    try:
        resource = local.create(workspace="work")
        done = local.provider.execute(resource.resource_id, Command(("mkdir", "work")), within=WITHIN)
        assert done.exit_code == 0
        assert b"".join(local.provider.archive(resource.resource_id, "work", within=WITHIN))
    finally:
        local.close()


@pytest.mark.parametrize("key", sorted(STORED))
def test_where_the_work_lies_is_no_part_of_what_a_sandbox_is_made_from(key: str) -> None:
    assert fingerprint(key, {**STORED[key], "workspace": "/elsewhere"}) == FINGERPRINTS[key]
    assert fingerprint(key, {**STORED[key], "env": {"OTHER": "1"}}) != FINGERPRINTS[key]
