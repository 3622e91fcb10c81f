"""The decision table of docs/teardown.md, and the merge table: the documents are the parametrised tests."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import product
from pathlib import Path

import pytest

from cleanup import decisions
from cleanup.decisions import ACCEPTED, Facts, decide
from cleanup.sightings import shows_foreign
from leases.demands import Demand, Verb, merge, verb_of_policy
from leases.models import Obligation
from leases.models.environments import Policy
from providers.contract import MARK_INSTALLATION, Busy, Ended, ErrorKind, Gone, Resource, Running, Stopped, Unknown
from tests.tables import rows_of

DOC = Path(__file__).parents[2] / "docs" / "teardown.md"
SOON = datetime(2030, 1, 1, tzinfo=UTC)
BOX = Resource("id", "name")
BEFORE, AFTER = SOON - timedelta(hours=1), SOON + timedelta(hours=1)

SIGHTINGS = {
    "not looked": None,
    "running": Running(BOX),
    "stopped": Stopped(BOX),
    "suspended": Stopped(BOX, Ended.SUSPENDED),
    "gone": Gone(),
    "destroyed": Gone(stated=True),
    "not found, first": Gone(),
    "not found, too early": Gone(),
    "not found, again": Gone(),
    "busy": Busy(BOX, "starting"),
    "unknown": Unknown(BOX),
    "recoverable": Unknown(BOX, recoverable=True),
    "recoverable in vain": Unknown(BOX, recoverable=True),
    "out of date": Stopped(replace(BOX, as_of=BEFORE)),
    "stopped, to be deleted": Stopped(replace(BOX, expires_at=AFTER)),
    "stopped while starting": Stopped(BOX),
    "running while starting": Running(BOX),
    "gone while starting": Gone(),
    "destroyed while starting": Gone(stated=True),
    "stopped while extended": Stopped(BOX),
    "running while extended": Running(BOX),
}

CIRCUMSTANCES = {
    "destroyed": {"absence_apart": 120.0},
    "not found, first": {"absence_apart": 120.0},
    "not found, too early": {"absence_apart": 120.0, "absent_for": 119.9},
    "not found, again": {"absence_apart": 120.0, "absent_for": 120.0},
    "recoverable in vain": {"recovered_before": decisions.RECOVERIES},
    "out of date": {"started_as_of": SOON},
    "stopped while starting": {"starting": True},
    "running while starting": {"starting": True},
    "gone while starting": {"starting": True},
    "destroyed while starting": {"starting": True},
    "stopped while extended": {"extending": True},
    "running while extended": {"extending": True},
}
"""What else is known where a sighting is made."""

DECISIONS = {
    "drain": decisions.Drain(SOON),
    "look": decisions.Look(),
    "stop": decisions.Stop(),
    "recover": decisions.Recover(),
    "delete": decisions.Delete(),
    "look later": decisions.LookLater(),
    "wait": decisions.Wait,
    "discharge stopped": decisions.Discharge(decisions.Evidence.STOPPED),
    "discharge stopped (suspended)": decisions.Discharge(decisions.Evidence.STOPPED, Ended.SUSPENDED),
    "discharge destroyed": decisions.Discharge(decisions.Evidence.DESTROYED),
    "discharge absent": decisions.Discharge(decisions.Evidence.ABSENT),
    "ask: foreign marks": decisions.AskOperator(Obligation.Quiet.FOREIGN_MARKS),
}


def _sent(text: str) -> str | ErrorKind | None:
    if text == "-":
        return None
    return ACCEPTED if text == ACCEPTED else ErrorKind(text)


def _verbs(text: str) -> list[Verb]:
    return list(Verb) if text == "any" else [Verb(part.strip()) for part in text.split(",")]


@pytest.mark.parametrize("row", rows_of(DOC, "Decision table"), ids=lambda row: " | ".join(row.values()))
def test_it_decides_as_the_table_says(row) -> None:
    for verb in _verbs(row["verb"]):
        facts = Facts(
            verb=verb,
            drain_until=SOON if row["work in flight"] == "yes" else None,
            sighting=SIGHTINGS[row["sighting"]],
            foreign=row["marks"] == "foreign",
            stop=_sent(row["stop"]),
            recover=_sent(row["recover"]),
            delete=_sent(row["delete"]),
            delete_announced=row["delete"] != "-",
            **CIRCUMSTANCES.get(row["sighting"], {}),
        )
        decision = decide(facts)
        expected = DECISIONS.get(row["decision"])
        if expected is decisions.Wait:
            assert isinstance(decision, decisions.Wait)
        elif expected is None:
            assert decision == decisions.Fail(ErrorKind(row["decision"].removeprefix("fail: ")))
        else:
            assert decision == expected


SENT = [None, ACCEPTED, *ErrorKind]
THE_END = (
    "stopped",
    "suspended",
    "gone",
    "destroyed",
    "destroyed while starting",
    "gone while starting",  # once it was asked to be deleted
    "not found, again",
    "stopped, to be deleted",
)


@pytest.mark.parametrize("name", SIGHTINGS)
def test_stop_only_never_deletes_whatever_happens(name) -> None:
    """S-138, domain I-6."""
    for stop, delete, recover in product(SENT, SENT, SENT):
        facts = Facts(
            verb=Verb.STOP_ONLY,
            sighting=SIGHTINGS[name],
            stop=stop,
            delete=delete,
            recover=recover,
            **CIRCUMSTANCES.get(name, {}),
        )
        assert not isinstance(decide(facts), decisions.Delete), facts


@pytest.mark.parametrize("name", [name for name in SIGHTINGS if name not in THE_END])
def test_nothing_but_a_sighting_of_the_end_discharges(name) -> None:
    """S-119, K-02, K-27: acceptance, errors and timeouts are never proof; nor is a 404 after a delete, K-01."""
    for verb, stop, delete, recover in product(Verb, SENT, SENT, SENT):
        facts = Facts(
            verb=verb,
            sighting=SIGHTINGS[name],
            stop=stop,
            delete=delete,
            recover=recover,
            delete_announced=True,
            **CIRCUMSTANCES.get(name, {}),
        )
        assert not isinstance(decide(facts), decisions.Discharge), facts


@pytest.mark.parametrize("name", SIGHTINGS)
def test_delete_never_recovers_and_nothing_is_recovered_twice_in_an_attempt(name) -> None:
    for verb, stop, delete, recover in product(Verb, SENT, SENT, SENT):
        facts = Facts(
            verb=verb,
            sighting=SIGHTINGS[name],
            stop=stop,
            delete=delete,
            recover=recover,
            **CIRCUMSTANCES.get(name, {}),
        )
        if verb == Verb.DELETE or recover is not None:
            assert decide(facts) != decisions.Recover(), facts


@pytest.mark.parametrize(
    ("as_of", "started", "proof"),
    [
        (None, None, True),
        (None, SOON, True),
        (BEFORE, None, True),
        (SOON, SOON, True),
        (AFTER, SOON, True),
        (BEFORE, SOON, False),
    ],
)
def test_a_stop_is_proof_unless_it_is_known_to_be_older_than_the_last_start(as_of, started, proof) -> None:
    """Unknown times pass: a provider that tells none is believed, as before."""
    sighting = Stopped(replace(BOX, as_of=as_of))
    decision = decide(Facts(verb=Verb.STOP_ONLY, sighting=sighting, started_as_of=started))
    assert isinstance(decision, decisions.Discharge if proof else decisions.Wait)


@pytest.mark.parametrize("row", rows_of(DOC, "Merge table"), ids=lambda row: " | ".join(row.values()))
def test_demands_merge_as_the_table_says(row) -> None:
    times = {"-": None, "early": SOON, "late": SOON + timedelta(seconds=30)}
    by = row["second demand by"]
    merged = merge(
        Demand(Verb(row["open verb"]), times[row["open drain"]]),
        Demand(Verb(row["new verb"]), times[row["new drain"]]),
        explicit_stop=by == "explicit Stop",
        authorised=by == "operator",
    )
    assert merged == Demand(Verb(row["verb"]), times[row["drain"]])


@pytest.mark.parametrize("row", rows_of(DOC, "Verbs by policy"), ids=lambda row: " | ".join(row.values()))
def test_a_policy_demands_the_verb_of_the_table(row) -> None:
    outcomes = ["succeeded", "failed"] if row["outcome"] == "any" else [row["outcome"]]
    for outcome in outcomes:
        assert verb_of_policy(Policy(row["policy"]), outcome) == Verb(row["verb"])


def test_what_a_provider_does_not_describe_is_nobodys():
    """A sandbox hidden behind a 404 has no marks to show: it is looked at again, and no person is asked whose it is."""
    marks = {MARK_INSTALLATION: "ours"}
    assert not shows_foreign(Unknown(Resource("id", ""), "hidden"), "ours")
    assert shows_foreign(Unknown(Resource("id", "name"), "error"), "ours")
    assert not shows_foreign(Unknown(Resource("id", "name", marks), "error"), "ours")
    assert shows_foreign(Running(Resource("id", "")), "ours")
