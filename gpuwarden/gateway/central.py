"""The central gateway: hosts with tokens, over HTTPS."""

import asyncio
import hashlib
import time
from dataclasses import dataclass
from typing import Final

from anyio import CapacityLimiter, to_thread
from fastapi import Request

from gpuwarden.db.errors import DatabaseError
from gpuwarden.gateway.app import HOST_BOUNDS, Caller, RefusedError
from gpuwarden.gateway.wire import HOST
from gpuwarden.queue import JobStore
from gpuwarden.queue.hosts.tokens import SEEN_EVERY_S, HostToken
from gpuwarden.queue.hosts.tokens import Scope as HostScope

TRUSTED_S: Final = 5.0
"""How long a read of the valid tokens counts, seconds. A revoked one ends after this time."""

REREAD_SHARE: Final = 0.8
"""The share of this time after which the next read begins. Requests wait only for a late one."""

THREADS: Final = 2
"""Most checks of tokens at once."""

CHECKS_MAX: Final = 256
"""Most checks of tokens that run or wait."""

TOKENS_MAX: Final = 20_000
"""Most tokens that are remembered."""


@dataclass(frozen=True, kw_only=True)
class _Known:
    """A token that was checked at this time."""

    at_s: float
    host: str
    token_id: str
    queues: frozenset[str] | None
    """The only queues that it allows. `None`: all."""


class Hosts:
    """Recognises hosts by their tokens. An unknown token costs one read of the database, and known ones a read for all.

    Args:
        store: the queue with the hashes of the tokens.
    """

    def __init__(self, store: JobStore) -> None:
        self._store = store
        self._checks, self._reads = CapacityLimiter(THREADS), CapacityLimiter(1)
        self._checking = 0
        self._known: dict[tuple[bytes, HostScope], _Known] = {}
        self._read_s = 0.0
        self._reading: asyncio.Task[None] | None = None
        self._used: set[str] = set()
        self._seen_s = time.monotonic()
        self._callers: dict[tuple[str, frozenset[str] | None], Caller] = {}

    async def caller_of(self, request: Request) -> Caller:
        """See `Callers`."""
        known = await self._known_of(bearer(request), HostScope.QUEUE)
        host, its = known.host, (known.host, known.queues)
        check_host(request, host)
        if its not in self._callers:
            self._callers[its] = Caller(
                name=host, host=host, may_be=lambda _: True, bounds=HOST_BOUNDS, queues=known.queues
            )
        return self._callers[its]

    async def host_of(self, token: str, scope: HostScope) -> str:
        """The host of a token.

        Raises:
            RefusedError: the token is not valid for this scope.
        """
        return (await self._known_of(token, scope)).host

    async def _known_of(self, token: str, scope: HostScope) -> _Known:
        if not token or not token.isascii():
            raise RefusedError(401, "token", "no token: send Authorization: Bearer TOKEN of `gpuwarden host enrol`")
        key, now_s = (hashlib.sha256(token.encode()).digest(), scope), time.monotonic()
        known = self._known.get(key)
        if known is not None:
            age_s = now_s - max(known.at_s, self._read_s)
            if age_s >= TRUSTED_S * REREAD_SHARE and self._reading is None:
                self._reading = asyncio.create_task(self._read())
                self._reading.add_done_callback(_retrieve)
            if age_s >= TRUSTED_S and self._reading is not None:
                await asyncio.shield(self._reading)
                known = self._known.get(key)
        if known is None:
            known = await self._checked(key, token, now_s)
        self._used.add(known.token_id)
        return known

    async def _checked(self, key: tuple[bytes, HostScope], token: str, now_s: float) -> _Known:
        """Check an unknown token."""
        scope = key[1]
        if self._checking >= CHECKS_MAX:
            raise RefusedError(503, "busy", "too many tokens are being checked: try again")
        its = await self._verified(token, scope)
        if its is None:
            raise RefusedError(401, "token", f"the token is wrong, revoked, or not for the {scope}")
        if len(self._known) >= TOKENS_MAX:
            self._known.clear()
        queues = None if its.queues is None else frozenset(its.queues)
        self._known[key] = found = _Known(at_s=now_s, host=its.host, token_id=its.token_id, queues=queues)
        return found

    async def _read(self) -> None:
        """Read which of the known tokens are still valid, for all of them."""
        began_s = time.monotonic()
        try:
            token_ids = {known.token_id for known in self._known.values()}
            valid = await to_thread.run_sync(self._valid, token_ids, limiter=self._reads)
        except DatabaseError as error:
            raise RefusedError(503, "database", str(error)) from None
        finally:
            self._reading = None
        for key, known in list(self._known.items()):
            if known.at_s < began_s and key[1] not in valid.get(known.token_id, ()):
                del self._known[key]
        self._read_s = began_s

    def _valid(self, token_ids: set[str]) -> dict[str, frozenset[str]]:
        tokens, now = self._store.host_tokens, self._store.now()
        if time.monotonic() - self._seen_s >= SEEN_EVERY_S:
            used, self._used, self._seen_s = self._used, set(), time.monotonic()
            tokens.see(used, now)
        return tokens.valid(token_ids, now)

    async def _verified(self, token: str, scope: HostScope) -> HostToken | None:
        self._checking += 1
        try:
            return await to_thread.run_sync(self._ask, token, scope, limiter=self._checks)
        except DatabaseError as error:
            raise RefusedError(503, "database", str(error)) from None
        finally:
            self._checking -= 1

    def _ask(self, token: str, scope: HostScope) -> HostToken | None:
        return self._store.host_tokens.verify(token, scope, self._store.now())


def _retrieve(read: "asyncio.Task[None]") -> None:
    """Retrieve the error of a read that no request waits for. The next request tries again."""
    if not read.cancelled():
        read.exception()


def check_host(request: Request, host: str) -> None:
    """Refuse a request whose header names another host than its token's.

    Raises:
        RefusedError: it does.
    """
    claimed = request.headers.get(HOST, host)
    if claimed != host:
        raise RefusedError(403, "host", f"host {claimed[:80]!a} has the token of {host!r}: use its own")


def bearer(request: Request) -> str:
    """The token in a request's header, or ""."""
    kind, _, token = request.headers.get("Authorization", "").partition(" ")
    return token if kind.lower() == "bearer" else ""
