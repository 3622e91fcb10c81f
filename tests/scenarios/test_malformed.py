"""M: malformed data. What an untyped field allowed, a typed column refuses; what JSON still allows, asks a person."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import DataError, IntegrityError, ProgrammingError, connection, transaction

from leases.models import Lease, Obligation
from tests import factories
from tests.scenarios.steps import owed, released, sweep
from tests.stage import Rehearsal


def _set(row: Obligation, column: str, expression: str) -> None:
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(f"UPDATE leases_obligation SET {column} = {expression} WHERE id = %s", [row.pk])  # noqa: S608


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("column", ["failures", "busy_count", "wakes", "requests", "requests_served"])
def test_a_count_is_never_negative(column: str) -> None:
    """S-205."""
    row = factories.teardown()
    with pytest.raises(IntegrityError):
        _set(row, column, "-3")
    _set(row, column, "0")


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("value", ["1e300", "'many'", "'{}'"])
def test_a_count_is_a_number_that_one_can_reach(value: str) -> None:
    """S-206."""
    row = factories.teardown()
    with pytest.raises(DataError):
        _set(row, "failures", value)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("value", ["1e300", "'soon'", "'1e300'"])
def test_a_deadline_is_a_time(value: str) -> None:
    """S-203."""
    row = factories.teardown()
    with pytest.raises((DataError, ProgrammingError)):
        _set(row, "due_at", value)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("value", ["'infinity'", "'-infinity'"])
def test_a_deadline_is_a_time_that_comes(value: str) -> None:
    """S-203: a row that is due at infinity is owed and never tried, and no report could be written of it."""
    row = factories.teardown()
    with pytest.raises(IntegrityError):
        _set(row, "due_at", value)


@pytest.mark.parametrize("column", ["endpoint", "config"])
@pytest.mark.parametrize("value", [5, [], "text", None, {"unknown": 1}])
def test_a_recorded_configuration_of_another_shape_never_breaks_a_sweep(
    rehearsal: Rehearsal, column: str, value: Any
) -> None:
    """S-207, S-208: what cannot be read asks a person, and its neighbours are paid."""
    bad, good = released(rehearsal), released(rehearsal)
    if value is None:
        value = {}
    Lease.objects.filter(pk=bad.pk).update(**{column: value})
    outcomes = sweep(rehearsal)
    if column == "config":  # a teardown needs none
        assert outcomes == {"proven": 2}
        return
    assert outcomes == {"quieted": 1, "proven": 1}
    assert owed(bad).quiet == "invalid_snapshot"
    assert not owed(good).is_open
