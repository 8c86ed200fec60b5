"""Which claims are still owned, without a query for each."""

import asyncio
from collections.abc import Awaitable, Callable, Collection

import pytest

from gpuwarden.db.errors import NoAnswerError
from gpuwarden.gateway import ownership
from gpuwarden.gateway.ownership import Ownership
from gpuwarden.queue.models import SlotClaim

CLAIMS = [SlotClaim(n, 1, f"i{n}", "box1", f"w{n}") for n in range(50)]


class Queue:
    """A queue that owns some claims, and can be away."""

    def __init__(self) -> None:
        self.owned = set(CLAIMS)
        self.away = False
        self.reads: list[set[SlotClaim]] = []

    def read(self, claims: Collection[SlotClaim]) -> set[SlotClaim]:
        self.reads.append(set(claims))
        if self.away:
            raise NoAnswerError("away")
        return self.owned & set(claims)


def played(play: Callable[[Ownership, Queue], Awaitable[None]]) -> Queue:
    queue = Queue()

    async def run() -> None:
        watched = Ownership(queue.read)
        watched.start()
        await play(watched, queue)
        await watched.close()

    asyncio.run(run())
    return queue


async def all_of(watched: Ownership) -> list[bool | None]:
    return list(await asyncio.gather(*(watched.owns(each) for each in CLAIMS)))


def test_claims_of_all_workers_are_one_read() -> None:
    async def play(watched: Ownership, _: Queue) -> None:
        for _again in range(20):
            assert await all_of(watched) == [True] * 50

    assert 1 <= len(played(play).reads) <= 3


def test_lost_claim_is_known_after_two_reads() -> None:
    async def play(watched: Ownership, queue: Queue) -> None:
        assert await watched.owns(CLAIMS[0])
        queue.owned.discard(CLAIMS[0])
        reads = len(queue.reads)
        while owned := await watched.owns(CLAIMS[0]):
            assert len(queue.reads) - reads <= 2
            await asyncio.sleep(0.01)
        assert owned is False
        assert await watched.owns(CLAIMS[1])

    played(play)


def test_reads_are_frequent_enough_for_a_loss_to_be_known_within_two_seconds() -> None:
    assert ownership.LOOK_S + ownership.LEAST_S < 2


def test_queue_that_does_not_answer_owns_nothing_and_denies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "ANSWER_S", 0.3)
    monkeypatch.setattr(ownership, "TRUSTED_S", 0.2)

    async def play(watched: Ownership, queue: Queue) -> None:
        assert await watched.owns(CLAIMS[0])
        queue.away = True
        await asyncio.sleep(0.25)
        assert await watched.owns(CLAIMS[0]) is None
        queue.away = False
        assert await watched.owns(CLAIMS[0])

    played(play)


def test_nothing_is_read_once_no_worker_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "ASKED_S", 0.1)

    async def play(watched: Ownership, queue: Queue) -> None:
        assert await watched.owns(CLAIMS[0])
        await asyncio.sleep(1.8)
        assert len(queue.reads) == 1

    played(play)


def test_host_is_answered_once_one_of_its_claims_is_lost() -> None:
    async def play(watched: Ownership, queue: Queue) -> None:
        hosts = [asyncio.create_task(watched.lost(f"box{n}", CLAIMS[n : n + 10], 20)) for n in (0, 10, 20, 30, 40)]
        await asyncio.sleep(0.3)
        queue.owned.discard(CLAIMS[25])
        assert await hosts[2] == [CLAIMS[25]]
        assert not any(each.done() for each in hosts[:2] + hosts[3:])
        newer = asyncio.create_task(watched.lost("box0", CLAIMS[:3], 0.1))
        assert (await hosts[0], await newer) == ([], [])
        for each in hosts:
            each.cancel()

    assert len(played(play).reads) <= 6


def test_new_claim_joins_the_open_question_until_it_is_settled() -> None:
    async def play(watched: Ownership, queue: Queue) -> None:
        assert watched.add(CLAIMS[3]) is None
        asks = asyncio.create_task(watched.lost("box1", CLAIMS[:2], 20, name="one"))
        await asyncio.sleep(0.3)
        assert [watched.add(each) for each in CLAIMS[2:5]] == ["one"] * 3
        watched.drop(CLAIMS[2])
        queue.owned -= {CLAIMS[2]}
        await asyncio.sleep(1)
        assert not asks.done()
        queue.owned -= {CLAIMS[3]}
        assert await asks == [CLAIMS[3]]
        assert set(CLAIMS[:2]) < queue.reads[-1] <= set(CLAIMS[:5])

    played(play)


def test_question_is_answered_although_one_of_its_claims_was_settled() -> None:
    async def play(watched: Ownership, queue: Queue) -> None:
        asks = asyncio.create_task(watched.lost("box1", CLAIMS[:2], 2))
        await asyncio.sleep(0.3)
        watched.drop(CLAIMS[1])
        queue.owned -= {CLAIMS[1]}
        assert await asks == []

    played(play)


def test_new_questions_cause_no_further_read() -> None:
    async def play(watched: Ownership, _: Queue) -> None:
        asks = [asyncio.create_task(watched.lost(f"box{n}", CLAIMS[n : n + 1], 20)) for n in range(1)]
        await asyncio.sleep(0.05)
        for n in range(1, 20):
            asks.append(asyncio.create_task(watched.lost(f"box{n}", CLAIMS[n : n + 1], 20)))
            await asyncio.sleep(0.05)
        for each in asks:
            each.cancel()

    assert len(played(play).reads) <= 3


def test_host_gets_no_answer_while_the_queue_cannot_be_read() -> None:
    async def play(watched: Ownership, queue: Queue) -> None:
        queue.away = True
        assert await watched.lost("box1", CLAIMS, 0.3) is None

    played(play)


def test_another_slots_claim_is_not_owned() -> None:
    async def play(watched: Ownership, _: Queue) -> None:
        assert await watched.owns(CLAIMS[0]._replace(host="box2")) is False
        assert await watched.owns(CLAIMS[0]._replace(worker="w1")) is False
        assert await watched.owns(CLAIMS[0]._replace(incarnation="i1")) is False

    played(play)
