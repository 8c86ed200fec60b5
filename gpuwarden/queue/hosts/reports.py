"""The newest reports of hosts that are not scraped. Any central gateway may publish them."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from sqlalchemy import ColumnElement, Select, case, literal, select, true, tuple_

from gpuwarden.db.transactions import reading, upsert, writing
from gpuwarden.queue.base import QueueBase
from gpuwarden.queue.hosts.seen_hosts import hear
from gpuwarden.queue.hosts.tokens import valid_after
from gpuwarden.queue.schema import HOST_REPORTS, HOST_TOKENS

READ_AT_ONCE: Final = 8
"""Reports that are read at once."""


class Kind(StrEnum):
    """What a report has."""

    PAGE = "page"
    """The page of an exporter."""
    GPU = "gpu"
    TASKS = "tasks"


@dataclass(frozen=True, kw_only=True)
class HostReport:
    """A report. `page` is its series with gzip, `None` if it is old."""

    host: str
    kind: Kind
    age_s: float
    page: bytes | None


class HostReports(QueueBase):
    """Reports of hosts."""

    def save(self, host: str, kind: Kind, page: bytes, *, now: float) -> None:
        """Replace the report of a host."""
        row: dict[str, Any] = {"host": host, "kind": kind, "received_at": now, "page": page}
        with writing(self._engine) as connection:
            connection.execute(
                upsert(connection, HOST_REPORTS)
                .values(row)
                .on_conflict_do_update(index_elements=["host", "kind"], set_={"received_at": now, "page": page})
            )
            hear(connection, host, now)

    def ages(self, host: str, *, now: float) -> list[HostReport]:
        """The reports of a host, without their pages."""
        return self._found(_reports(literal(None), HOST_REPORTS.c.host == host), now)

    def newest(self, *, fresh_s: float, now: float) -> Iterator[HostReport]:
        """The reports of hosts with a valid token, in order, without the pages of those older than `fresh_s`.

        A few are read at once: all may have 300 MB.
        """
        its = HOST_REPORTS.c
        page = case((its.received_at >= now - fresh_s, its.page))
        valid = its.host.in_(select(HOST_TOKENS.c.host).where(valid_after(now)))
        after: ColumnElement[bool] = true()
        while found := self._found(_reports(page, valid, after).limit(READ_AT_ONCE), now):
            yield from found
            after = tuple_(its.host, its.kind) > (found[-1].host, found[-1].kind)

    def _found(self, reports: Select[Any], now: float) -> list[HostReport]:
        with reading(self._engine) as connection:
            return [
                HostReport(host=row.host, kind=Kind(row.kind), age_s=max(0.0, now - row.received_at), page=row.page)
                for row in connection.execute(reports)
            ]


def _reports(page: ColumnElement[Any], *wanted: ColumnElement[bool]) -> Select[Any]:
    its = HOST_REPORTS.c
    found = select(its.host, its.kind, its.received_at, page.label("page")).where(*wanted)
    return found.order_by(its.host, its.kind)
