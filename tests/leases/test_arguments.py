"""Nonsense at the public functions: refused with a sentence and the code `invalid`, and nothing is written or asked."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest

import leases
from leases import deciding
from leases.errors import LeaseError
from leases.models import ActivityEntry, BridgeActivity, Lease, Obligation, Operation
from tests.scenarios.steps import acquired, owed, state
from tests.stage import Rehearsal

pytestmark = pytest.mark.django_db(transaction=True)

NUL, HUGE, SURROGATE = "a\x00b", "x" * 100_000, "\ud800"

WRONG_TIMES = [0, -1.0, math.nan, math.inf, 1e12, "5", None, True]


def _nothing_happens(rehearsal: Rehearsal, call: Callable[[], Any]) -> None:
    def everything() -> list[Any]:
        tables = (Operation, Lease, Obligation, ActivityEntry, BridgeActivity)
        return [*(table.objects.count() for table in tables), list(rehearsal.world.calls)]

    before = everything()
    with pytest.raises(LeaseError) as caught:
        call()
    assert caught.value.code == "invalid"
    assert everything() == before


@pytest.mark.parametrize(
    "how",
    [
        {"environment_id": "nonsense"},
        {"environment_id": 5},
        {"environment_id": None},
        {"company_id": None},
        {"run_id": "nonsense"},
        {"actor": NUL},
        {"actor": HUGE},
        {"actor": ""},
        {"actor": None},
        {"workspace": None},
        {"agent": 5},
        {"request_key": 5},
        {"setup": None},
        {"setup": [5]},
        {"setup": "ls"},
        {"setup": [["ls", NUL]]},
        {"setup": [[SURROGATE]]},
        *({"ends_in": seconds} for seconds in WRONG_TIMES if seconds is not None),
    ],
)
def test_acquire(rehearsal: Rehearsal, how: dict[str, Any]) -> None:
    asked: dict[str, Any] = {"environment_id": rehearsal.environment.pk, "company_id": rehearsal.company.pk} | how
    environment_id = asked.pop("environment_id")
    _nothing_happens(rehearsal, lambda: leases.acquire(environment_id, **asked))


@pytest.mark.parametrize(
    "how",
    [
        {"lease_id": "nonsense"},
        {"lease_id": None},
        {"company_id": "nonsense"},
        {"outcome": ""},
        {"disposition": "nope"},
        {"actor": NUL},
        {"actor": HUGE},
    ],
)
def test_release(rehearsal: Rehearsal, how: dict[str, Any]) -> None:
    lease = acquired(rehearsal)
    asked: dict[str, Any] = {"lease_id": lease.pk} | how
    _nothing_happens(rehearsal, lambda: leases.release(asked.pop("lease_id"), **asked))
    assert state(lease) == "active"


@pytest.mark.parametrize(
    "how", [{"run_id": "nonsense"}, {"company_id": None}, {"actor": NUL}, {"actor": None}, {"lease_id": uuid4()}]
)
@pytest.mark.parametrize("function", [leases.stop, leases.retry])
def test_stop_and_retry(rehearsal: Rehearsal, function: Callable[..., int], how: dict[str, Any]) -> None:
    lease = acquired(rehearsal)
    more = {"reason": "please"} if function is leases.retry else {}
    asked = {"company_id": rehearsal.company.pk, "run_id": rehearsal.run.pk, "actor": "user"} | more | how
    _nothing_happens(rehearsal, lambda: function(**asked))
    assert state(lease) == "active"


@pytest.mark.parametrize("reason", ["", " ", None, NUL, HUGE, SURROGATE])
def test_a_reason(rehearsal: Rehearsal, reason: Any) -> None:
    lease = leases.release(acquired(rehearsal).pk)
    who = {"company_id": rehearsal.company.pk, "actor": "user", "reason": reason}
    _nothing_happens(rehearsal, lambda: leases.retry(lease_id=lease.pk, **who))
    _nothing_happens(rehearsal, lambda: deciding.recheck(obligation_id=owed(lease).pk, **who))


@pytest.mark.parametrize("timeout", WRONG_TIMES)
def test_the_time_of_work(rehearsal: Rehearsal, timeout: Any) -> None:
    """Work without an end would keep its sandbox from every later run."""
    bridge = leases.bridge(acquired(rehearsal).pk)
    _nothing_happens(rehearsal, lambda: bridge.execute(["ls"], timeout=timeout))
    _nothing_happens(rehearsal, lambda: bridge.activity(timeout=timeout).__enter__())


def test_the_kind_of_work_and_the_id_of_a_bridge(rehearsal: Rehearsal) -> None:
    bridge = leases.bridge(acquired(rehearsal).pk)
    _nothing_happens(rehearsal, lambda: bridge.activity(timeout=5, kind=HUGE).__enter__())
    _nothing_happens(rehearsal, lambda: leases.bridge("nonsense"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "how",
    [
        {"argv": [NUL]},
        {"argv": [5]},
        {"argv": 5},
        {"stdin": "text"},
        {"env": {NUL: "b"}},
        {"env": {"A": 1}},
        {"cwd": NUL},
    ],
)
def test_a_command(rehearsal: Rehearsal, how: dict[str, Any]) -> None:
    bridge = leases.bridge(acquired(rehearsal).pk)
    asked: dict[str, Any] = {"argv": ["ls"]} | how
    with pytest.raises(TypeError):
        bridge.execute(asked.pop("argv"), **asked)
    assert (BridgeActivity.objects.count(), rehearsal.world.count("execute")) == (0, 0)
