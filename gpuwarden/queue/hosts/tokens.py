"""Tokens by which hosts authenticate at the gateway. The queue has only their hashes."""

import hashlib
import hmac
import re
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, Executable, Row, and_, delete, insert, or_, select, update

from gpuwarden.db.locks import advisory_lock
from gpuwarden.db.rows import converted, readable
from gpuwarden.db.transactions import autocommit, reading, writing
from gpuwarden.errors import GpuwardenError
from gpuwarden.fields import made_from
from gpuwarden.queue.base import QueueBase
from gpuwarden.queue.schema import HOST_TOKENS
from gpuwarden.queue.sql import Prepared
from gpuwarden.state_file import check_name

PREFIX: Final = "gpuwarden_host_"
"""What a scanner for secrets finds."""

SEEN_EVERY_S: Final = 60.0
"""How often the last use of a token is written, seconds."""

GRACE_MAX_S: Final = 7 * 86400.0
"""Longest use of a token after its rotation, seconds."""

KEPT_S: Final = 90 * 86400.0
"""How long the row of a revoked host is kept, seconds."""

_TOKEN: Final = re.compile(PREFIX + "([0-9a-f]{16})_[0-9a-f]{64}")


class Scope(StrEnum):
    """What a token allows."""

    QUEUE = "queue"
    REPORTS = "reports"


class HostTokenError(GpuwardenError):
    """A host is enrolled already, or not enrolled."""


@dataclass(frozen=True, kw_only=True)
class HostToken:
    """A token, without its secret. Times are Unix seconds."""

    host: str
    token_id: str
    scopes: tuple[str, ...]
    queues: tuple[str, ...] | None
    """The only queues that it allows. `None`: all."""
    created_at: float
    last_seen_at: float | None
    revoked_at: float | None
    """When the token stops being valid, also in the future."""

    def is_valid(self, now: float) -> bool:
        """Whether the gateway accepts the token."""
        return self.revoked_at is None or now < self.revoked_at


class HostTokens(QueueBase):
    """Tokens of hosts. A host has one, and until the end of a rotation also older ones."""

    def enrol(
        self, host: str, *, scopes: Collection[Scope] = tuple(Scope), queues: Collection[str] | None = None, now: float
    ) -> str:
        """Return the token of a new host, or of one whose tokens are revoked. Without `queues` it allows all.

        Raises:
            HostTokenError: the host has a valid token.
            StateFileError: the name is invalid.
        """
        check_name(host, what="host")
        with writing(self._engine) as connection:
            advisory_lock(connection, "host tokens")
            if connection.scalar(select(HOST_TOKENS.c.host).where(_newest_of(host))) is not None:
                raise HostTokenError(
                    f"{host} is enrolled: `gpuwarden host rotate {host}` replaces its token,"
                    f" `gpuwarden host revoke {host}` ends it"
                )
            return _issue(connection, host, scopes, queues, now)

    def rotate(
        self,
        host: str,
        *,
        scopes: Collection[Scope] | None = None,
        queues: Collection[str] | None = None,
        grace_s: float = 0.0,
        now: float,
    ) -> str:
        """Return a new token. The old ones end after `grace_s`. Without `scopes` or `queues` it has the old one's.

        Raises:
            HostTokenError: the host has no valid token.
        """
        with writing(self._engine) as connection:
            advisory_lock(connection, "host tokens")
            its = select(HOST_TOKENS.c.scopes, HOST_TOKENS.c.queues).where(_newest_of(host))
            kept = connection.execute(its).one_or_none()
            if kept is None:
                raise HostTokenError(f"{host} has no valid token: `gpuwarden host enrol {host}` makes one")
            _end(connection, host, now + grace_s)
            kept_scopes = kept.scopes.split(",") if scopes is None else scopes
            return _issue(connection, host, kept_scopes, kept.queues if queues is None else queues, now)

    def revoke(self, host: str, *, now: float) -> bool:
        """End all tokens of a host; False if it has no valid one."""
        with writing(self._engine) as connection:
            advisory_lock(connection, "host tokens")
            return _end(connection, host, now)

    def rows(self, host: str | None = None) -> list[HostToken]:
        """The tokens of one host or of all, by host, the newest first."""
        of_host = () if host is None else (HOST_TOKENS.c.host == host,)
        found = select(*_SHOWN).where(*of_host).order_by(HOST_TOKENS.c.host, HOST_TOKENS.c.created_at.desc())
        with reading(self._engine) as connection:
            return list(readable(connection.execute(found), _to_token))

    def valid(self, token_ids: Collection[str], now: float) -> dict[str, frozenset[str]]:
        """The scopes of each of these tokens that is valid, by its id."""
        its = HOST_TOKENS.c.token_id.in_(token_ids)
        found = select(HOST_TOKENS.c.token_id, HOST_TOKENS.c.scopes).where(its, valid_after(now))
        with autocommit(self._engine) as connection:
            return {row.token_id: frozenset(row.scopes.split(",")) for row in connection.execute(found)}

    def see(self, token_ids: Collection[str], now: float) -> None:
        """Write the last use of tokens."""
        rows = [_see(token_id=token_id, now=now) for token_id in sorted(token_ids)]
        if rows:
            with writing(self._engine) as connection:
                connection.execute(rows[0][0], [row for _, row in rows])

    def verify(self, token: str, scope: Scope, now: float) -> HostToken | None:
        """Return the token's row; `None` if it is wrong, revoked or without the scope."""
        match = _TOKEN.fullmatch(token)
        if match is None:
            return None
        with autocommit(self._engine) as connection:
            row = connection.execute(*_by_id(token_id=match[1])).one_or_none()
            if row is None or not hmac.compare_digest(str(row.token_hash).encode(), _hash(token).encode()):
                return None
            for found in readable([row], _to_token):
                if not found.is_valid(now) or scope not in found.scopes:
                    return None
                if found.last_seen_at is None or abs(now - found.last_seen_at) >= SEEN_EVERY_S:
                    connection.execute(*_see(token_id=found.token_id, now=now))
                return found
        return None


_SHOWN: Final = tuple(column for column in HOST_TOKENS.columns if column is not HOST_TOKENS.c.token_hash)


def _to_token(row: Row[Any]) -> HostToken:
    return converted(row, HOST_TOKENS, _convert)


def _convert(row: Row[Any]) -> HostToken:
    queues = None if row.queues is None else tuple(map(str, list(row.queues)))
    return made_from(row, HostToken, scopes=tuple(row.scopes.split(",")), queues=queues)


def _hash(token: str) -> str:
    """SHA-256 is enough: the secret has 256 random bits."""
    return hashlib.sha256(token.encode()).hexdigest()


def _newest_of(host: str) -> ColumnElement[bool]:
    """The token whose end is unknown."""
    return and_(HOST_TOKENS.c.host == host, HOST_TOKENS.c.revoked_at.is_(None))


def valid_after(at: float) -> ColumnElement[bool]:
    """The tokens that are valid after this time."""
    return or_(HOST_TOKENS.c.revoked_at.is_(None), HOST_TOKENS.c.revoked_at > at)


def _end(connection: Connection, host: str, at: float) -> bool:
    """Let no token of a host be valid after `at`; False if none was."""
    ended = update(HOST_TOKENS).where(HOST_TOKENS.c.host == host, valid_after(at)).values(revoked_at=at)
    return connection.execute(ended).rowcount > 0


def _issue(
    connection: Connection, host: str, scopes: Collection[str], queues: Collection[str] | None, now: float
) -> str:
    """Make a token. Delete ended ones of this host, and those of hosts that were revoked long ago."""
    old = or_(HOST_TOKENS.c.host == host, HOST_TOKENS.c.revoked_at < now - KEPT_S)
    connection.execute(delete(HOST_TOKENS).where(HOST_TOKENS.c.revoked_at <= now, old))
    token_id = secrets.token_hex(8)
    token = f"{PREFIX}{token_id}_{secrets.token_hex(32)}"
    row = {"token_id": token_id, "token_hash": _hash(token), "host": host, "scopes": ",".join(sorted(scopes))}
    its_queues = None if queues is None else sorted(set(queues))
    connection.execute(insert(HOST_TOKENS).values(**row, queues=its_queues, created_at=now))
    return token


@Prepared
def _by_id(**its: ColumnElement[Any]) -> Executable:
    return select(HOST_TOKENS).where(HOST_TOKENS.c.token_id == its["token_id"])


@Prepared
def _see(**its: ColumnElement[Any]) -> Executable:
    return update(HOST_TOKENS).where(HOST_TOKENS.c.token_id == its["token_id"]).values(last_seen_at=its["now"])
