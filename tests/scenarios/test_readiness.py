"""L: a worker, a provider or an adapter that is not ready. What this process lacks says nothing about the fleet.

The worker's own unreadiness (adapter or secret missing) and the account's (429, circuit) are in
`tests/cleanup/test_accounts.py`; here is what an adapter itself cannot do.
"""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

import leases
from cleanup.engine import Engine
from leases.models import Lease
from providers import registry
from providers.contract import Provider, Sighting
from tests import factories
from tests.rehearsal import Config, Endpoint, RehearsalProvider
from tests.scenarios.steps import acquired, evidence, falls_due, is_due, owed, released, state, sweep
from tests.stage import Rehearsal


class WithoutAnything(Provider[Endpoint, Config]):
    """An adapter of an older contract: it has no verb at all, so it cannot be opened."""

    key: ClassVar[str] = "rehearsal"
    label: ClassVar[str] = "incomplete"
    Endpoint = Endpoint
    Config = Config
    capabilities = RehearsalProvider.capabilities


class Babbling(RehearsalProvider):
    """An adapter that answers what the contract does not know."""

    def inspect(self, resource_id: str, *, within: float) -> Sighting:
        self._call("inspect", resource_id)
        return None  # type: ignore[return-value]


def _uses(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(registry._BUILT_IN, "rehearsal", f"tests.scenarios.test_readiness:{name}")


@pytest.mark.parametrize("disposition", ["by_policy", "stop_and_retain"])
def test_an_adapter_without_the_verbs_is_not_called_and_nothing_is_substituted(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch, disposition: str
) -> None:
    """S-107, S-137: it stays owed; when the adapter is complete again, it is paid as it was owed."""
    lease = acquired(rehearsal, "reuse_by_environment")
    leases.release(lease.pk, disposition=disposition)  # type: ignore[arg-type]
    rehearsal.world.calls.clear()
    _uses(monkeypatch, "WithoutAnything")
    sweep(rehearsal)
    assert rehearsal.world.calls == []
    assert (state(lease), evidence(lease), owed(lease).quiet) == ("pending_cleanup", [], "")
    monkeypatch.undo()
    falls_due(owed(lease))
    assert sweep(rehearsal) == {"proven": 1}
    assert evidence(lease) == ["stopped"]
    assert rehearsal.world.count("delete") == 0


def test_an_answer_that_is_none_of_the_contracts_proves_nothing(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Domain 4.6: a void answer."""
    lease = released(rehearsal)
    _uses(monkeypatch, "Babbling")
    engine = Engine()
    answers = 0

    def stops_asking() -> bool:
        nonlocal answers
        answers += 1
        return answers > 200

    engine.stopping = stops_asking
    engine.sweep(rehearsal.account.pk)
    assert evidence(lease) == []
    assert state(lease) == Lease.State.PENDING_CLEANUP
    assert rehearsal.world.count("inspect") < 5, "it asks the same question again and again, without a pause"
    assert rehearsal.world.count("delete") == 0


def test_a_built_in_provider_needs_no_worker_to_be_ready(transactional_db: None, tmp_path: Any) -> None:
    """S-201."""
    account = factories.account(endpoint={"state_dir": str(tmp_path / "state")}, attested_identity="")
    environment = factories.environment(account)
    lease = leases.acquire(environment.pk, company_id=account.company_id)
    leases.release(lease.pk)
    assert Engine().sweep(account.pk).outcomes == {"proven": 1}


def test_a_provider_that_nobody_knows_is_this_workers_unreadiness(rehearsal: Rehearsal) -> None:
    """S-202, as the design has it: it consumes no attempt, and is told by its age."""
    lease = released(rehearsal)
    Lease.objects.filter(pk=lease.pk).update(provider="")
    assert Engine().sweep(rehearsal.account.pk).outcomes == {"handed_back": 1}
    assert owed(lease).failures == 0
    assert is_due(owed(lease))
