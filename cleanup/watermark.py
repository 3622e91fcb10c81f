"""The high-water mark of a database, and what follows from comparing it: a pure function, tested by its table.

A mark says how far a database had been written, by which server. The database keeps one in itself, and others are kept
outside of it. A database that does not reach the outside mark has lost what it once knew: it is an older state of
itself, and what it believes to own may be somebody's by now. So is a copy, which the original goes on without.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from leases.models import Installation

Why = Installation.Observing

UNKNOWN_SYSTEM = "?"
"""In the place of a system identifier that the database's role may not ask for."""


@dataclass(frozen=True, slots=True)
class Mark:
    """How far a database had been written. `position` is in bytes of write-ahead log; `at` by the database's clock."""

    generation: int
    """When a person had last said to trust the database, in seconds since 1970: a mark of before that is void."""
    identity: str
    """`SYSTEM/DATABASE`: the server's system identifier and the database's oid."""
    timeline: int
    position: int
    at: datetime


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known when a process looks at a server that it has not looked at before."""

    now: Mark
    """The server as it is, with the generation that the database remembers."""
    server: str
    """This start of this server (`leases.trust.SERVER`)."""
    judged_server: str = ""
    """The start that was last judged to be ours; empty: none was ever judged."""
    kept: Mark | None = None
    """The mark that the database remembers."""
    kept_outside: bool = False
    """The database remembers that a mark was kept outside, too."""
    outside: tuple[Mark, ...] = ()
    """The marks that were found outside."""
    heard_all: bool = True
    """No place that was asked for a mark failed to answer."""
    keeps: bool = True
    """This is the process that keeps the marks: one that it does not find in the places it knows is not there."""
    observing: Why | None = None


@dataclass(frozen=True, slots=True)
class Fresh:
    """No mark was ever kept: it begins here."""


@dataclass(frozen=True, slots=True)
class Same:
    """The server that was judged before."""


@dataclass(frozen=True, slots=True)
class Failover:
    """The server was started anew, or another took over, and nothing is missing."""


@dataclass(frozen=True, slots=True)
class Observe:
    """It may be a restored or a copied database: nothing is changed until a person says what it is."""

    why: Why
    mark_at: datetime | None = None
    """The time of the mark that tells; None where there is none: then it is now."""


@dataclass(frozen=True, slots=True)
class Unclear:
    """This process cannot tell; another one, or a later look, can. It changes nothing meanwhile."""


Verdict = Fresh | Same | Failover | Observe | Unclear


def judge(facts: Facts) -> Verdict:
    """Return what the database is. Whatever a mark speaks against is observed, whichever mark it is."""
    if facts.observing is not None:
        return Observe(facts.observing)
    generation = facts.now.generation
    for mark in facts.outside:
        if mark.generation > generation:  # a person trusted a later state of it
            return Observe(Why.BEHIND, mark.at)
    valid = tuple(mark for mark in facts.outside if mark.generation == generation)
    known = (*valid, facts.kept) if facts.kept is not None else valid
    if any(is_another(mark.identity, facts.now.identity) for mark in known):
        return Observe(Why.ANOTHER_SERVER)
    behind = [mark.at for mark in known if _is_ahead(mark, facts.now)]
    behind += [mark.at for mark in valid if facts.kept is None or _is_ahead(mark, facts.kept)]
    if behind:
        return Observe(Why.BEHIND, max(behind))
    if facts.server == facts.judged_server:
        return Same()
    if facts.kept is None and not facts.kept_outside:
        return Fresh()
    if not facts.heard_all:
        return Unclear()
    if valid or not facts.kept_outside:
        return Failover()
    return Observe(Why.MARKS_LOST) if facts.keeps else Unclear()


def _is_ahead(mark: Mark, of: Mark) -> bool:
    """Return whether a mark knows of more than the other: a later timeline, or a later position.

    A later timeline is never the older one's past, and positions go on over a change of timeline.
    """
    return mark.timeline > of.timeline or mark.position > of.position


def is_another(one: str, other: str) -> bool:
    """Return whether two identities differ, by what is known of both."""
    (system, _, database), (other_system, _, other_database) = one.partition("/"), other.partition("/")
    both_known = UNKNOWN_SYSTEM not in (system, other_system)
    return database != other_database or (both_known and system != other_system)
