"""The central gateway: hosts with tokens, over HTTPS."""

import hashlib
import time
from typing import Final

from anyio import CapacityLimiter, to_thread
from fastapi import Request

from gpuwarden.db.errors import DatabaseError
from gpuwarden.gateway.app import HOST_BOUNDS, Caller, RefusedError
from gpuwarden.gateway.wire import HOST
from gpuwarden.queue import JobStore
from gpuwarden.queue.hosts.tokens import Scope as HostScope

TRUSTED_S: Final = 5.0
"""How long a token counts as valid without a look into the database, seconds. A revoked one ends after this time."""

THREADS: Final = 2
"""Most checks of tokens at once."""

CHECKS_MAX: Final = 256
"""Most checks of tokens that run or wait."""

TOKENS_MAX: Final = 20_000
"""Most tokens that are remembered."""


class Hosts:
    """Recognises hosts by their tokens. An invalid token costs one read of the database.

    Args:
        store: the queue with the hashes of the tokens.
    """

    def __init__(self, store: JobStore) -> None:
        self._store = store
        self._limiter = CapacityLimiter(THREADS)
        self._checking = 0
        self._known: dict[tuple[bytes, HostScope], tuple[float, str]] = {}
        self._callers: dict[str, Caller] = {}

    async def caller_of(self, request: Request) -> Caller:
        """See `Callers`."""
        host = await self.host_of(bearer(request), HostScope.QUEUE)
        claimed = request.headers.get(HOST, host)
        if claimed != host:
            raise RefusedError(403, "host", f"host {claimed[:80]!a} has the token of {host!r}: use its own")
        if host not in self._callers:
            self._callers[host] = Caller(name=host, host=host, may_be=lambda _: True, bounds=HOST_BOUNDS)
        return self._callers[host]

    async def host_of(self, token: str, scope: HostScope) -> str:
        """The host of a token.

        Raises:
            RefusedError: the token is not valid for this scope.
        """
        if not token or not token.isascii():
            raise RefusedError(401, "token", "no token: send Authorization: Bearer TOKEN of `gpuwarden host enrol`")
        key, now_s = (hashlib.sha256(token.encode()).digest(), scope), time.monotonic()
        known_s, host = self._known.get(key, (0.0, ""))
        if not host or now_s - known_s >= TRUSTED_S:
            if self._checking >= CHECKS_MAX:
                raise RefusedError(503, "busy", "too many tokens are being checked: try again")
            found = await self._verified(token, scope)
            if found is None:
                self._known.pop(key, None)
                raise RefusedError(401, "token", f"the token is wrong, revoked, or not for the {scope}")
            host = found
            if len(self._known) >= TOKENS_MAX:
                self._known.clear()
            self._known[key] = now_s, host
        return host

    async def _verified(self, token: str, scope: HostScope) -> str | None:
        self._checking += 1
        try:
            return await to_thread.run_sync(self._ask, token, scope, limiter=self._limiter)
        except DatabaseError as error:
            raise RefusedError(503, "queue", str(error)) from None
        finally:
            self._checking -= 1

    def _ask(self, token: str, scope: HostScope) -> str | None:
        return self._store.host_tokens.verify(token, scope, self._store.now())


def bearer(request: Request) -> str:
    """The token in a request's header, or ""."""
    kind, _, token = request.headers.get("Authorization", "").partition(" ")
    return token if kind.lower() == "bearer" else ""
