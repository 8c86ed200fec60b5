"""Tokens that a central gateway knows, without a read of the database for each."""

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest
from sqlalchemy import event

from gpuwarden.db.errors import NoAnswerError
from gpuwarden.gateway import central
from gpuwarden.gateway.app import RefusedError
from gpuwarden.gateway.central import CHECKS_MAX, Hosts
from gpuwarden.queue import JobStore
from gpuwarden.queue.hosts.tokens import HostToken, HostTokens, Scope

EVERY = [f"box{n}" for n in range(20)]


@pytest.fixture
def tokens(store: JobStore) -> list[str]:
    return [store.host_tokens.enrol(host, now=store.now()) for host in EVERY]


def played(store: JobStore, play: Callable[[Hosts], Awaitable[None]]) -> None:
    async def run() -> None:
        await play(Hosts(store))

    asyncio.run(run())


async def hosts_of(hosts: Hosts, tokens: list[str]) -> list[str]:
    return await asyncio.gather(*(hosts.host_of(each, Scope.QUEUE) for each in tokens))


def test_known_tokens_are_checked_by_one_read(
    store: JobStore, tokens: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    statements: list[str] = []

    async def play(hosts: Hosts) -> None:
        assert await hosts_of(hosts, tokens) == EVERY
        monkeypatch.setattr(central, "TRUSTED_S", 0)
        event.listen(store._engine, "before_cursor_execute", lambda *its: statements.append(its[2].split()[0]))
        assert await hosts_of(hosts, tokens) == EVERY

    monkeypatch.setattr(central, "TRUSTED_S", 600)
    played(store, play)

    assert statements.count("SELECT") == 1


def test_revoked_token_is_refused_and_others_are_not(
    store: JobStore, tokens: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(central, "TRUSTED_S", 0)

    async def play(hosts: Hosts) -> None:
        assert await hosts_of(hosts, tokens) == EVERY
        store.host_tokens.revoke("box3", now=store.now())
        with pytest.raises(RefusedError, match="wrong, revoked"):
            await hosts.host_of(tokens[3], Scope.QUEUE)
        assert await hosts_of(hosts, tokens[4:]) == EVERY[4:]

    played(store, play)


def test_last_use_of_known_tokens_is_written(
    store: JobStore, tokens: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(central, "TRUSTED_S", 0)
    monkeypatch.setattr(central, "SEEN_EVERY_S", 0)
    before = store.now()

    async def play(hosts: Hosts) -> None:
        await hosts_of(hosts, tokens[:2])
        store.host_tokens.see([each.token_id for each in store.host_tokens.rows()], 5.0)
        await hosts_of(hosts, tokens[:2])

    played(store, play)

    seen = {row.host: row.last_seen_at or 0 for row in store.host_tokens.rows()}
    assert [seen[host] >= before for host in EVERY[:3]] == [True, True, False]


def test_database_that_is_away_refuses_no_token_for_good(
    store: JobStore, tokens: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(central, "TRUSTED_S", 0)

    def away(*_: object) -> None:
        raise NoAnswerError("away")

    async def play(hosts: Hosts) -> None:
        assert await hosts_of(hosts, tokens[:1]) == EVERY[:1]
        with monkeypatch.context() as patched:
            patched.setattr(HostTokens, "valid", away)
            with pytest.raises(RefusedError, match="away") as refused:
                await hosts.host_of(tokens[0], Scope.QUEUE)
        assert refused.value.status == 503
        assert await hosts_of(hosts, tokens[:1]) == EVERY[:1]

    played(store, play)


def test_flood_of_unknown_tokens_is_refused_and_delays_no_known_host(
    store: JobStore, tokens: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    verify, answers = HostTokens.verify, threading.Event()

    def slow(self: HostTokens, token: str, scope: Scope, now: float) -> HostToken | None:
        assert answers.wait(60)
        return verify(self, token, scope, now)

    async def play(hosts: Hosts) -> None:
        assert await hosts_of(hosts, tokens) == EVERY
        monkeypatch.setattr(HostTokens, "verify", slow)
        monkeypatch.setattr(central, "TRUSTED_S", 0)
        flood = [asyncio.create_task(hosts.host_of(f"wrong{number}", Scope.QUEUE)) for number in range(300)]
        try:
            async with asyncio.timeout(30):
                assert await hosts_of(hosts, tokens) == EVERY
        finally:
            answers.set()
        refused = await asyncio.gather(*flood, return_exceptions=True)
        statuses = [each.status for each in refused if isinstance(each, RefusedError)]
        assert (statuses.count(401), statuses.count(503)) == (CHECKS_MAX, 300 - CHECKS_MAX)
        with pytest.raises(RefusedError, match="the token is wrong"):
            await hosts.host_of("wrong", Scope.QUEUE)

    monkeypatch.setattr(central, "TRUSTED_S", 600)
    played(store, play)
