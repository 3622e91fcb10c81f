"""A company with an account at a rehearsal provider, an environment and a run: the stage of most engine tests."""

from __future__ import annotations

from leases.models import Company, Environment, ProviderAccount, Run
from tests import factories
from tests.rehearsal import WORLDS, World, new_world


class Rehearsal:
    def __init__(self, provider: str = "rehearsal", **environment: object) -> None:
        key = new_world()
        self.world: World = WORLDS[key]
        self.company: Company = factories.company()
        self.account: ProviderAccount = factories.account(
            self.company, provider=provider, endpoint={"world": key}, attested_identity=""
        )
        self.environment: Environment = factories.environment(self.account, **environment)
        self.run: Run = factories.run(self.company)
