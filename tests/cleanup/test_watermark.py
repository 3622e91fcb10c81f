"""What a database is, by its marks: the table of the decision, and the places where the marks are kept outside."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import uuid4

import pytest
import redis
from django.conf import settings

from cleanup import outside
from cleanup.watermark import Facts, Failover, Fresh, Mark, Observe, Same, Unclear, Verdict, Why, judge
from tests.beats import broker_url

AT = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)
KEPT = Mark(generation=2, identity="77/16384", timeline=3, position=1000, at=AT)
NOW = replace(KEPT, position=1500, at=AT + timedelta(hours=1))
LATER = AT + timedelta(minutes=30)

OURS = Facts(now=NOW, server="started", judged_server="started", kept=KEPT, kept_outside=True, outside=(KEPT,))
ANEW = replace(OURS, judged_server="started before")
"""The server was started since it was judged."""


def mark(**values: object) -> Mark:
    return replace(KEPT, at=LATER, **values)  # type: ignore[arg-type]


BEHIND = Observe(Why.BEHIND, LATER)
ANOTHER = Observe(Why.ANOTHER_SERVER)

TABLE: dict[str, tuple[Facts, Verdict]] = {
    # Nothing was ever kept.
    "a new installation": (Facts(now=NOW, server="started"), Fresh()),
    "a new installation whose broker is away": (Facts(now=NOW, server="started", heard_all=False), Fresh()),
    "a new installation, to a worker": (Facts(now=NOW, server="started", keeps=False), Fresh()),
    # The same start of the same server.
    "the judged server": (OURS, Same()),
    "the broker was emptied": (replace(OURS, outside=()), Same()),
    "the broker is away": (replace(OURS, outside=(), heard_all=False), Same()),
    # The server was started anew, or a standby took over.
    "a restart": (ANEW, Failover()),
    "a restart that a worker sees first": (replace(ANEW, keeps=False), Failover()),
    "a standby took over": (replace(ANEW, now=replace(NOW, timeline=4)), Failover()),
    "the mark of one place is older": (replace(ANEW, outside=(replace(KEPT, position=10), KEPT)), Failover()),
    "a mark that was never kept outside": (replace(ANEW, outside=(), kept_outside=False), Failover()),
    "a mark from before a person's word is void": (
        replace(ANEW, outside=(mark(generation=1, position=9999), KEPT)),
        Failover(),
    ),
    "the identifier may not be asked for any more": (replace(ANEW, now=replace(NOW, identity="?/16384")), Failover()),
    # An older state of it.
    "its position is behind": (replace(ANEW, outside=(mark(position=2000),)), BEHIND),
    "its position is behind, as one place knows": (replace(ANEW, outside=(KEPT, mark(position=2000))), BEHIND),
    "it was restored, and ran on": (replace(ANEW, outside=(mark(position=1400),)), BEHIND),
    "it was restored from before the first mark": (
        replace(ANEW, kept=None, kept_outside=False, outside=(mark(),)),
        BEHIND,
    ),
    "it is on an older timeline": (replace(ANEW, outside=(mark(timeline=4),)), BEHIND),
    "a later state of it was trusted": (replace(ANEW, outside=(mark(generation=3, position=1),)), BEHIND),
    "the judged server, overtaken by another": (replace(OURS, outside=(mark(position=2000),)), BEHIND),
    # A copy of it.
    "another system": (replace(ANEW, now=replace(NOW, identity="78/16384")), ANOTHER),
    "another database of the server": (replace(ANEW, now=replace(NOW, identity="77/16999")), ANOTHER),
    "a copy without any mark outside": (replace(ANEW, now=replace(NOW, identity="78/16384"), outside=()), ANOTHER),
    "a copy whose broker is away": (
        replace(ANEW, now=replace(NOW, identity="78/1"), outside=(), heard_all=False),
        ANOTHER,
    ),
    # No mark is left.
    "both places lost it": (replace(ANEW, outside=()), Observe(Why.MARKS_LOST)),
    "a worker finds none": (replace(ANEW, outside=(), keeps=False), Unclear()),
    "a place does not answer": (replace(ANEW, heard_all=False), Unclear()),
    "no place answers": (replace(ANEW, outside=(), heard_all=False), Unclear()),
    # What observes goes on observing.
    "it observes": (replace(OURS, observing=Why.MARKS_LOST), Observe(Why.MARKS_LOST)),
}


@pytest.mark.parametrize("case", TABLE)
def test_a_database_is_judged(case: str) -> None:
    facts, verdict = TABLE[case]
    assert judge(facts) == verdict


# --- The places outside -----------------------------------------------------------------------------------------------


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(settings, "PAPERCLIP_STATE_DIR", tmp_path / "state")
    return tmp_path / "state"


@pytest.mark.parametrize("place", ["file", "broker"])
def test_a_place_gives_back_what_was_kept_and_never_goes_backwards(place: str, state: Path) -> None:
    keep, ask = {
        "file": (outside.keep_in_file, outside.in_file),
        "broker": (outside.keep_in_broker, outside.in_broker),
    }[place]
    ours = uuid4()
    assert ask(ours) is None
    keep(ours, KEPT)
    keep(ours, KEPT)
    assert ask(ours) == KEPT
    assert ask(uuid4()) is None, "another installation's"
    for older in (
        replace(KEPT, position=999),
        replace(KEPT, timeline=2, position=5000),
        replace(KEPT, generation=1, position=5000),
        replace(KEPT, identity="78/16384", position=5000),
    ):
        with pytest.raises(outside.Overtaken):
            keep(ours, older)
        assert ask(ours) == KEPT
    trusted = replace(KEPT, generation=3, identity="78/1", timeline=1, position=1)
    keep(ours, trusted)
    assert ask(ours) == trusted


def test_a_file_that_cannot_be_read_is_silent_and_one_that_is_garbled_is_replaced(state: Path) -> None:
    ours = uuid4()
    outside.keep_in_file(ours, KEPT)
    outside.file_of(ours).write_text('{"position": ')
    with pytest.raises(outside.Garbled):
        outside.in_file(ours)
    outside.keep_in_file(ours, KEPT)
    assert outside.in_file(ours) == KEPT
    assert [path.name for path in state.iterdir()] == [outside.file_of(ours).name], "no half-written file is left"
    outside.file_of(ours).unlink()
    outside.file_of(ours).mkdir()
    with pytest.raises(outside.Silent):
        outside.in_file(ours)
    with pytest.raises(outside.Silent):
        outside.keep_in_file(ours, KEPT)


def test_a_broker_that_is_away_is_silent_and_one_without_keys_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from celery import current_app

    monkeypatch.setattr(current_app.conf, "broker_write_url", "redis://127.0.0.1:1/0")
    with pytest.raises(outside.Silent, match="the broker"):
        outside.in_broker(uuid4())
    with pytest.raises(outside.Silent, match="the broker"):
        outside.keep_in_broker(uuid4(), KEPT)
    monkeypatch.setattr(current_app.conf, "broker_write_url", "amqp://guest:guest@127.0.0.1:1//")
    assert outside.in_broker(uuid4()) is None
    assert outside.keep_in_broker(uuid4(), KEPT) is False


def test_what_is_no_mark_in_the_broker_is_replaced() -> None:
    ours = uuid4()
    with redis.Redis.from_url(broker_url()) as broker:
        broker.set(outside.KEY.format(mark=ours), "{}")
        with pytest.raises(outside.Garbled):
            outside.in_broker(ours)
        outside.keep_in_broker(ours, KEPT)
        assert outside.in_broker(ours) == KEPT
        broker.delete(outside.KEY.format(mark=ours))
