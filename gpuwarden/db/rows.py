"""Rows that become objects. A row with a value that this version cannot read costs itself only."""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any, Final, TypeVar

from sqlalchemy import JSON, Boolean, Float, Integer, Row, String, Table

from gpuwarden.db.errors import UnreadableRowError

NUMBER_MAX: Final = 1e11
"""Limit of times and durations, seconds: dates end at the year 9999."""

REPORTED_MAX: Final = 1000
"""Most rows that a process logs as unreadable, each once."""

T = TypeVar("T")


class BadJson:
    """A JSON column whose text is no JSON."""

    def __repr__(self) -> str:
        return "no JSON"


def json_or_bad(text: str | bytes) -> Any:
    """Parse a column. A number is a TypeError, which SQLAlchemy handles."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return BadJson()


def converted(row: Row[Any], table: Table, convert: Callable[[Row[Any]], T]) -> T:
    """Convert a row of a table, after a check of the types of its values.

    Raises:
        UnreadableRowError: a value is of another type, or unknown.
    """
    values = row._mapping  # noqa: SLF001 - documented by SQLAlchemy
    key = "/".join(str(values[column.name]) for column in table.primary_key.columns if column.name in values)
    for name, kinds, nullable in _columns(table):
        value = values.get(name)
        if value is None:
            if not nullable and name in values:
                raise UnreadableRowError(table.name, key, f"{name} is missing")
        elif isinstance(value, BadJson) or (kinds and type(value) not in kinds) or not _is_sane(value):
            raise UnreadableRowError(table.name, key, f"{name} is {str(value)[:80]!a}")
    try:
        return convert(row)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UnreadableRowError(table.name, key, str(error)) from None


def readable(
    rows: Iterable[Row[Any]],
    convert: Callable[[Row[Any]], T],
    unreadable: Callable[[UnreadableRowError], None] | None = None,
) -> Iterator[T]:
    """Convert rows. `unreadable` gets those that cannot be read; by default they are logged."""
    for row in rows:
        try:
            found = convert(row)
        except UnreadableRowError as error:
            (unreadable or report)(error)
        else:
            yield found


_reported: Final[set[tuple[str, str]]] = set()


def report(error: UnreadableRowError) -> None:
    """Log an unreadable row, once."""
    if (error.table, error.key) not in _reported and len(_reported) < REPORTED_MAX:
        _reported.add((error.table, error.key))
        import structlog  # noqa: PLC0415 - slow to import, and rarely needed

        structlog.get_logger("gpuwarden").error("row skipped", reason=str(error))


@cache
def _columns(table: Table) -> tuple[tuple[str, tuple[type, ...], bool], ...]:
    return tuple((column.name, _kinds(column.type), bool(column.nullable)) for column in table.columns)


def _kinds(kind: object) -> tuple[type, ...]:
    for of, types in ((Boolean, (bool,)), (Integer, (int,)), (Float, (int, float)), (String, (str,)), (JSON, ())):
        if isinstance(kind, of):
            return types
    return ()


def _is_sane(value: object) -> bool:
    return not isinstance(value, float) or (math.isfinite(value) and abs(value) < NUMBER_MAX)
