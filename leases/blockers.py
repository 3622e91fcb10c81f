"""What stands in the way of deleting, closing or archiving something: values that a page, a command or a caller lists.

Read under the locks of the function that acts on it, and again by whoever only wants to see. Counted in full, and
listed up to `LISTED`: a refusal need not carry a fleet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from django.db.models import Model, QuerySet

from leases import trust
from leases.errors import LeaseError

LISTED = 50
"""Blockers of one kind that are listed by name."""


@dataclass(frozen=True, slots=True)
class Blocker:
    """One row that stands in the way: which, why (a stable code), and a sentence that says what to do about it."""

    row: str
    """The model's name: `lease`, `operation`, `obligation`, `run`, `hold`, `account`, `inventoryfinding`."""
    id: str
    code: str
    told: str
    yields: bool = False
    """Whether it gives way to what the caller may add: an environment's to consent, a credential's to force."""


@dataclass(frozen=True, slots=True)
class Blockers:
    """All that stands in the way: how much, and the first of each kind by name."""

    listed: tuple[Blocker, ...] = ()
    counts: tuple[tuple[str, int], ...] = ()
    """For each code, how many rows: more than are listed, perhaps."""
    unyielding: int = 0

    @property
    def total(self) -> int:
        return sum(count for _, count in self.counts)

    def __bool__(self) -> bool:
        return bool(self.total)

    def as_json(self) -> dict[str, Any]:
        return {"total": self.total, "counts": dict(self.counts), "blockers": [asdict(one) for one in self.listed]}

    def sentence(self) -> str:
        """Return what stands in the way in one sentence, by number."""
        if not self:
            return "nothing stands in the way"
        return "in the way: " + ", ".join(f"{count} {code.replace('_', ' ')}" for code, count in self.counts)


class Refused(LeaseError):
    """Something stands in the way. Nothing was written. `blockers` says what."""

    code = "blocked"

    def __init__(self, message: str, blockers: Blockers, *, code: str | None = None) -> None:
        super().__init__(f"{message}; {blockers.sentence()}", code=code)
        self.blockers = blockers


class Gathered:
    """Collects blockers: a query set, or rows that were read and judged one by one."""

    def __init__(self) -> None:
        self._listed: list[Blocker] = []
        self._counts: dict[str, int] = {}
        self._unyielding = 0

    def rows(self, code: str, found: QuerySet[Any], tell: Callable[[Any], str], *, yields: bool = False) -> None:
        """Add what a query finds: all are counted in the database, and the first ones are read."""
        count = found.count()
        if not count:
            return
        self._count(code, count, yields=yields)
        self._listed.extend(_of(row, code, tell(row), yields=yields) for row in found.order_by("pk")[:LISTED])

    def row(self, code: str, row: Model, told: str, *, yields: bool = False) -> None:
        self._count(code, 1, yields=yields)
        if sum(one.code == code for one in self._listed) < LISTED:
            self._listed.append(_of(row, code, told, yields=yields))

    def all(self) -> Blockers:
        return Blockers(tuple(self._listed), tuple(self._counts.items()), self._unyielding)

    def _count(self, code: str, count: int, *, yields: bool) -> None:
        self._counts[code] = self._counts.get(code, 0) + count
        if not yields:
            self._unyielding += count


def require_trust(what: str) -> None:
    """Refuse `what` while this database may be a restored or copied one: what it does not know of may need the rows."""
    if trust.is_observing():
        raise LeaseError(
            f"{what} waits until somebody says what this database is (manage.py trust_database)", code="observing"
        )


def _of(row: Model, code: str, told: str, *, yields: bool) -> Blocker:
    name = row._meta.model_name or ""  # noqa: SLF001 - documented API of Django
    return Blocker("account" if name == "provideraccount" else name, str(row.pk), code, told, yields)


def lines(blockers: Blockers) -> Iterable[str]:
    """Yield one line for each listed blocker, and one for those that are not listed."""
    for one in blockers.listed:
        yield f"{one.row} {one.id}: {one.told} ({one.code})"
    if blockers.total > len(blockers.listed):
        yield f"and {blockers.total - len(blockers.listed)} more"
