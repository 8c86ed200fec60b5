"""What a host's gateway asks the central one for all its slots together."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import pytest

from gpuwarden.gateway import batching
from gpuwarden.gateway.batching import Batching
from gpuwarden.gateway.operations import (
    BeatOf,
    Claim,
    Complete,
    CompleteAndClaim,
    FinishItem,
    Heartbeat,
    Operation,
    Owns,
    QuarantineOf,
    Register,
    Renew,
    Sync,
    Wait,
    Watch,
)
from gpuwarden.gateway.upstream import Answer, failed


def done(result: Any) -> Answer:
    return Answer(status=200, content={"result": result}, outcome="done")


CLAIMED: Final = {"attempt": 1, "model": None, "job_class": "gpu"}


class Central:
    """A central gateway. A test answers its waits, and sets what else it says."""

    def __init__(self) -> None:
        self.waits: list[asyncio.Future[bool]] = []
        self.watches: list[tuple[Watch, asyncio.Future[list[list[int]]]]] = []
        self.syncs: list[Sync] = []
        self.singles: list[Operation] = []
        self.over: list[list[str]] = []
        self.lost: list[list[int]] = []
        self.draining: list[list[str]] = []
        self.empty = False
        self.watching = False
        """New claims join the open watch."""
        self.away = False
        self.broken = False
        self.most = 0
        self.held = asyncio.Event()  # cleared: answers to claims wait
        self.held.set()

    @property
    def open(self) -> list["asyncio.Future[bool]"]:
        return [each for each in self.waits if not each.done()]

    async def carry_out(self, operation: Operation, **_: Any) -> Answer:
        if isinstance(operation, Wait):
            self.waits.append(asyncio.get_running_loop().create_future())
            self.most = max(self.most, len(self.open))
            return done(await self.waits[-1])
        if self.away:
            return failed(503, "queue", "away")
        if isinstance(operation, Watch):
            if self.broken:
                self.broken = False
                raise RuntimeError("broken")
            for _watch, older in self.watches:
                if not older.done():
                    older.set_result([])
            self.watches.append((operation, asyncio.get_running_loop().create_future()))
            return done(await self.watches[-1][1])
        if isinstance(operation, Sync):
            self.syncs.append(operation)
            return done({"over": self.over, "lost": self.lost, "draining": self.draining})
        self.singles.append(operation)
        if self.empty and isinstance(operation, Claim | QuarantineOf):
            await self.held.wait()
            return done(None)
        if isinstance(operation, Claim):
            return self.claimed({"job_id": int(operation.worker[1:]), **CLAIMED})
        if isinstance(operation, CompleteAndClaim):
            following = None if self.empty else {"job_id": operation.job_id + 100, **CLAIMED}
            return self.claimed({"done": True, "job": following, "idle": self.empty})
        return done(True)

    def claimed(self, result: Any) -> Answer:
        watched_by = self.watches[-1][0].name if self.watching and self.watches else None
        return Answer(status=200, content={"result": result, "watched_by": watched_by}, outcome="done")

    async def close(self) -> None:
        pass


async def until(holds: Callable[[], Any], what: str) -> None:
    end_s = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end_s, what
        await asyncio.sleep(0.01)


def wait(host: Batching, worker: str) -> "asyncio.Task[Answer]":
    its = Wait(worker=worker, queue="gpu", timeout_s=20)
    return asyncio.create_task(host.carry_out(its, host="box1", request_id=""))


def played(play: Callable[[Batching, Central], Awaitable[None]]) -> Central:
    central = Central()

    async def run() -> None:
        host = Batching(central, "box1")
        host.start()
        await play(host, central)
        await host.close()

    asyncio.run(run())
    return central


def test_waiting_workers_of_a_host_are_one_request_and_each_job_wakes_one() -> None:
    async def play(host: Batching, central: Central) -> None:
        workers = [wait(host, f"w{n}") for n in range(8)]
        for n in range(8):
            await until(lambda: central.open, "the host asks")
            central.open[0].set_result(True)
            await until(lambda n=n: sum(each.done() for each in workers) == n + 1, "one more is woken")  # type: ignore[misc]
        await asyncio.sleep(0.05)

    central = played(play)

    assert (len(central.waits), central.most) == (8, 1)


def test_host_without_a_waiting_worker_asks_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "LOOK_S", 0.01)

    async def play(host: Batching, central: Central) -> None:
        worker = wait(host, "w1")
        await until(lambda: central.open, "the host asks")
        worker.cancel()
        await until(lambda: not central.open, "the host hangs up")

    assert played(play).waits[0].cancelled()


def test_wake_that_finds_no_worker_is_the_next_ones() -> None:
    async def play(host: Batching, central: Central) -> None:
        gone = wait(host, "w1")
        await until(lambda: central.open, "the host asks")
        gone.cancel()
        central.open[0].set_result(True)
        await asyncio.sleep(0.05)
        comes = wait(host, "w2")
        assert (await comes).content == {"result": True}

    assert len(played(play).waits) == 1


def test_worker_that_hangs_up_as_it_is_woken_passes_the_wake_on() -> None:
    async def play(host: Batching, central: Central) -> None:
        gone, waits = wait(host, "w1"), wait(host, "w2")
        await until(lambda: central.open, "the host asks")
        host._waiters.wake_one("gpu")
        gone.cancel()
        assert (await waits).content == {"result": True}

    played(play)


def test_worker_that_claims_makes_room_for_the_next_wake() -> None:
    async def play(host: Batching, central: Central) -> None:
        workers = [wait(host, f"w{n}") for n in range(3)]
        await until(lambda: central.open, "the host asks")
        host._waiters.wake({"gpu": 1})
        host._waiters.wake({"gpu": 1})  # counted before the first has claimed
        await asyncio.sleep(0.02)
        assert sum(each.done() for each in workers) == 1
        claim = Claim(worker="w0", queue="gpu", incarnation="i", lease_s=600)
        await host.carry_out(claim, host="box1", request_id="")
        host._waiters.wake({"gpu": 1})
        await until(lambda: sum(each.done() for each in workers) == 2, "the next is woken")

    played(play)


class Worker:
    """A worker of the host. It holds job N, if it is named `wN`."""

    def __init__(self, host: Batching, number: int) -> None:
        self._host = host
        self.its = {"worker": f"w{number}", "incarnation": f"i{number}"}
        self.claim = {**self.its, "job_id": number, "attempt": 1}

    async def say(self, operation: Operation) -> Any:
        """The result, or the status of a refusal."""
        answer = await self._host.carry_out(operation, host="box1", request_id="")
        return answer.content["result"] if answer.status == 200 else answer.status

    async def start(self, lease_s: float = 600) -> None:
        await self.say(Register(queue="gpu", **self.its))
        await self.say(Claim(queue="gpu", lease_s=lease_s, **self.its))

    async def renew(self, lease_s: float = 600) -> Any:
        return await self.say(Renew(lease_s=lease_s, **self.claim))

    async def beat(self, **more: Any) -> Any:
        return await self.say(Heartbeat(queue="gpu", **self.its, **more))

    async def owns(self) -> Any:
        return await self.say(Owns(**self.claim))


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages are sent soon."""
    for name, value in {
        "SPARE_S": 0,
        "LEAST_MARGIN_S": 0,
        "SYNC_S": 0.3,
        "LEAST_S": 0.01,
        "GATHER_S": 0.01,
        "RETRY_S": 0.05,
        "ANSWER_S": 0.3,
    }.items():
        monkeypatch.setattr(batching, name, value)


@pytest.mark.usefixtures("soon")
def test_heartbeats_and_renewals_of_a_host_are_one_message() -> None:
    async def play(host: Batching, central: Central) -> None:
        workers = [Worker(host, n) for n in range(8)]
        for each in workers:
            await each.start()
        central.singles.clear()
        for each in workers:
            assert await each.renew() is True
            assert await each.beat(model="m") is True
            assert await each.owns() is True
        await until(lambda: central.syncs, "it is sent")
        await asyncio.sleep(0.5)  # no worker has said more

    central = played(play)

    assert central.singles == []
    (sync,) = central.syncs
    assert (
        {each.worker for each in sync.beats} == {each.worker for each in sync.renewals} == {f"w{n}" for n in range(8)}
    )


@pytest.mark.usefixtures("soon")
def test_lease_at_the_queue_is_longer_by_a_margin() -> None:
    async def play(host: Batching, central: Central) -> None:
        await Worker(host, 1).start(lease_s=600)
        await Worker(host, 2).start(lease_s=10)
        for each in (Worker(host, 1), Worker(host, 2)):
            await each.renew(lease_s=600 if each.its["worker"] == "w1" else 10)
        await until(lambda: central.syncs, "it is sent")

    central = played(play)

    assert [each.lease_s for each in central.singles if isinstance(each, Claim)] == [630, 15]
    assert {each.worker: each.lease_s for each in central.syncs[0].renewals} == {"w1": 630, "w2": 15}


@pytest.mark.usefixtures("soon")
def test_renewal_counts_only_while_the_last_confirmed_one_is_younger_than_the_margin() -> None:
    async def play(host: Batching, central: Central) -> None:
        worker = Worker(host, 1)
        await worker.start(lease_s=2)  # the margin is 1 s
        central.away = True
        accepted_s = began_s = time.monotonic()
        while await worker.renew(lease_s=2) is True:
            accepted_s = time.monotonic()
            await asyncio.sleep(0.02)
        assert accepted_s - began_s <= 1
        assert await worker.renew(lease_s=2) == 503
        central.away = False
        assert await worker.renew(lease_s=2) is True

    played(play)


def test_short_lease_can_be_renewed() -> None:
    async def play(host: Batching, central: Central) -> None:
        worker = Worker(host, 1)
        await worker.start(lease_s=3)
        assert await worker.renew(lease_s=3) is True
        assert not central.syncs

    assert [each.lease_s for each in played(play).singles if isinstance(each, Claim)] == [8]


@pytest.mark.usefixtures("soon")
def test_other_lease_counts_once_the_queue_has_it() -> None:
    async def play(host: Batching, central: Central) -> None:
        worker = Worker(host, 1)
        await worker.start(lease_s=10)
        central.away = True
        assert await worker.renew(lease_s=600) == 503
        central.away = False
        assert await worker.renew(lease_s=600) is True
        assert central.syncs[-1].renewals[0].lease_s == 630

    played(play)


@pytest.mark.usefixtures("soon")
def test_worker_that_says_nothing_is_not_renewed() -> None:
    async def play(host: Batching, central: Central) -> None:
        silent, speaks = Worker(host, 1), Worker(host, 2)
        await silent.start()
        await speaks.start()
        for _ in range(2):
            sent = len(central.syncs)
            await speaks.renew()
            await until(lambda sent=sent: len(central.syncs) > sent, "it is sent")  # type: ignore[misc]

    assert {each.worker for sync in played(play).syncs for each in sync.renewals} == {"w2"}


@pytest.mark.usefixtures("soon")
def test_worker_that_is_not_heard_again_is_forgotten_after_its_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "FORGET_S", 0.5)

    async def play(host: Batching, _: Central) -> None:
        gone, ended, leased, idle = (Worker(host, number) for number in range(4))
        await gone.say(Register(queue="gpu", **gone.its))
        await ended.start(lease_s=0.1)
        await leased.start()
        await idle.say(Register(queue="gpu", **idle.its))

        async def is_known() -> list[bool]:
            await idle.beat()
            return [each.its["worker"] in host._slots for each in (gone, ended, leased, idle)]

        assert await is_known() == [True] * 4
        for _turn in range(12):
            await asyncio.sleep(0.1)
            known = await is_known()

        assert known == [False, False, True, True]

    played(play)


@pytest.mark.usefixtures("soon")
def test_completed_job_is_sent_once_with_the_newest_heartbeat() -> None:
    async def play(host: Batching, central: Central) -> None:
        worker = Worker(host, 1)
        await worker.start()
        central.away = True
        await worker.beat(completed=True)
        await worker.beat(model="next")
        await asyncio.sleep(0.4)
        central.away = False
        await until(lambda: central.syncs, "it is sent")
        await worker.beat(model="next")
        await until(lambda: len(central.syncs) == 2, "the next one is sent")

    sent = [each for sync in played(play).syncs for each in sync.beats]
    assert [(each.completed, each.model) for each in sent] == [(True, "next"), (False, "next")]


@pytest.mark.usefixtures("soon")
def test_claim_and_incarnation_that_a_message_names_are_over() -> None:
    async def play(host: Batching, central: Central) -> None:
        lost, stays = Worker(host, 1), Worker(host, 2)
        await lost.start()
        await stays.start()
        central.lost, central.over = [[1, 1]], [["w1", "i1"]]
        for each in (lost, stays):
            await each.renew()
            await each.beat()
        await until(lambda: central.syncs, "it is sent")
        await asyncio.sleep(0.05)
        assert [await lost.renew(), await lost.beat(), await lost.owns()] == [False] * 3
        assert [await stays.renew(), await stays.beat(), await stays.owns()] == [True] * 3

    played(play)


@pytest.mark.usefixtures("soon")
def test_lost_claim_is_known_at_once_and_new_claims_are_watched() -> None:
    async def play(host: Batching, central: Central) -> None:
        first, second = Worker(host, 1), Worker(host, 2)
        await first.start()
        await until(lambda: central.watches, "it is watched")
        await second.start()
        await until(lambda: len(central.watches[-1][0].claims) == 2, "the second too")
        assert [await first.owns(), await second.owns()] == [True, True]
        central.watches[-1][1].set_result([[1, 1]])
        await asyncio.sleep(0.05)
        assert [await first.owns(), await first.renew(), await second.owns()] == [False, False, True]
        await until(lambda: [each.worker for each in central.watches[-1][0].claims] == ["w2"], "one is left")

    played(play)


@pytest.mark.usefixtures("soon")
def test_claim_that_the_open_watch_includes_needs_no_other() -> None:
    async def play(host: Batching, central: Central) -> None:
        first, second = Worker(host, 1), Worker(host, 2)
        await first.start()
        await until(lambda: central.watches, "it is watched")
        central.watching = True
        await second.start()
        await asyncio.sleep(0.1)
        assert len(central.watches) == 1
        central.watches[0][1].set_result([[2, 1]])
        await asyncio.sleep(0.05)
        assert [await first.owns(), await second.owns()] == [True, False]
        assert [each.worker for each in central.watches[-1][0].claims] == ["w1"]

    played(play)


@pytest.mark.usefixtures("soon")
def test_next_job_of_a_completion_is_held_instead() -> None:
    async def play(host: Batching, central: Central) -> None:
        worker = Worker(host, 1)
        await worker.start()
        await worker.renew()
        await worker.beat(model="one")
        await worker.say(CompleteAndClaim(queue="gpu", lease_s=600, **worker.claim))
        worker.claim["job_id"] = 101
        assert [await worker.owns(), await worker.renew()] == [True, True]
        await until(lambda: central.syncs and central.watches, "both are sent")
        central.empty = True
        await worker.say(CompleteAndClaim(queue="gpu", lease_s=600, **worker.claim))
        await worker.beat()
        sent = len(central.syncs)
        await until(lambda: len(central.syncs) > sent, "it is sent")

    central = played(play)

    assert [each.lease_s for each in central.singles if isinstance(each, CompleteAndClaim)] == [630, 630]
    assert [(each.job_id, each.lease_s) for each in central.syncs[0].renewals] == [(101, 630)]
    assert central.syncs[0].beats[0].model == "gpu"
    assert [each.job_id for each in central.watches[-1][0].claims] == [101]
    assert not central.syncs[-1].renewals


@pytest.mark.usefixtures("soon")
def test_finished_item_leaves_the_claim() -> None:
    async def play(host: Batching, central: Central) -> None:
        worker = Worker(host, 1)
        await worker.start()
        await worker.say(FinishItem(item="a", **worker.claim))
        assert await worker.renew() is True
        assert [type(each) for each in central.singles] == [Register, Claim, FinishItem]

    played(play)


@pytest.mark.usefixtures("soon")
def test_claim_without_a_word_of_the_queue_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "SEEN_S", 0.2)

    async def play(host: Batching, central: Central) -> None:
        worker = Worker(host, 1)
        await worker.start()
        central.away = True
        assert await worker.owns() is True
        await asyncio.sleep(0.3)
        assert await worker.owns() == 503

    played(play)


@pytest.mark.usefixtures("soon")
def test_host_gateway_that_was_restarted_asks_for_each_claim_once() -> None:
    async def play(host: Batching, central: Central) -> None:
        worker = Worker(host, 1)
        for _ in range(3):
            assert [await worker.renew(), await worker.beat(), await worker.owns()] == [True] * 3
        assert [type(each) for each in central.singles] == [Renew]

    played(play)


@pytest.mark.usefixtures("soon")
def test_settled_claim_is_neither_renewed_nor_watched() -> None:
    async def play(host: Batching, central: Central) -> None:
        worker, other = Worker(host, 1), Worker(host, 2)
        await worker.start()
        await worker.renew()
        await worker.say(Complete(**worker.claim))
        await other.start()
        await other.renew()
        await until(lambda: central.syncs and central.watches, "both are sent")

    central = played(play)

    assert [each.worker for each in central.syncs[0].renewals] == ["w2"]
    assert [each.worker for each in central.watches[-1][0].claims] == ["w2"]


@pytest.mark.usefixtures("soon")
def test_many_slots_are_sent_in_parts_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "BODY_MAX_BYTES", 4000)

    async def play(host: Batching, central: Central) -> None:
        for number in range(40):
            worker = Worker(host, number)
            await worker.start()
            await worker.renew()
            await worker.beat()
        await until(lambda: sum(len(each.renewals) for each in central.syncs) == 40, "all are sent")

    central = played(play)

    assert len(central.syncs) > 1
    assert max(len(each.model_dump_json()) for each in central.syncs) < 4000


@pytest.mark.usefixtures("soon")
def test_what_is_due_is_sent_before_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "SYNC_S", 600)

    async def play(host: Batching, _: Central) -> None:
        worker = Worker(host, 1)
        await worker.start()
        await worker.beat(completed=True)

    (sync,) = played(play).syncs
    assert sync.beats == [BeatOf(worker="w1", queue="gpu", incarnation="i1", completed=True)]


@pytest.mark.usefixtures("soon")
def test_idle_worker_claims_at_the_queue_once_it_is_woken_or_drained() -> None:
    async def play(host: Batching, central: Central) -> None:
        central.empty = True
        worker, waits = Worker(host, 1), wait(host, "w1")
        await until(lambda: central.open, "the host asks")
        await worker.start()

        async def asked() -> list[type]:
            central.singles.clear()
            assert await worker.say(Claim(queue="gpu", lease_s=600, **worker.its)) is None
            assert await worker.say(QuarantineOf(worker="w1")) is None
            return [type(each) for each in central.singles]

        assert await worker.say(QuarantineOf(worker="w1")) is None
        assert await asked() == []
        host._waiters.wake_one("gpu")
        await waits
        again = wait(host, "w1")
        await asyncio.sleep(0.05)
        assert await asked() == [Claim, QuarantineOf]
        assert await asked() == []
        central.draining = [["w1", "i1"]]
        await worker.beat()
        await until(lambda: central.syncs, "it is sent")
        await asyncio.sleep(0.05)
        assert await asked() == [Claim, QuarantineOf]
        await worker.say(CompleteAndClaim(queue="gpu", lease_s=600, **worker.claim))
        assert await asked() == []
        again.cancel()
        await worker.say(Register(queue="gpu", **worker.its))
        assert await asked() == [Claim, QuarantineOf]

    played(play)


def test_wake_during_a_claim_that_finds_no_job_is_not_lost() -> None:
    async def play(host: Batching, central: Central) -> None:
        central.empty = True
        worker, waits = Worker(host, 1), wait(host, "w1")
        await worker.say(Register(queue="gpu", **worker.its))
        await until(lambda: central.open, "the host asks")
        claiming = asyncio.create_task(worker.say(Claim(queue="gpu", lease_s=600, **worker.its)))
        central.held.clear()
        await until(lambda: any(isinstance(each, Claim) for each in central.singles), "it claims")
        central.open[0].set_result(True)
        await waits
        central.held.set()
        assert await claiming is None
        again, central.empty = wait(host, "w1"), False
        await asyncio.sleep(0.05)
        assert await worker.say(Claim(queue="gpu", lease_s=600, **worker.its)) is not None
        again.cancel()

    played(play)


def test_workers_that_name_many_queues_do_not_fill_their_hosts_requests() -> None:
    async def play(host: Batching, _: Central) -> None:
        waits = [Wait(worker="w1", queue=f"q{n}", timeout_s=20) for n in range(1000)]
        asking = [asyncio.create_task(host.carry_out(each, host="box1", request_id="")) for each in waits]
        await asyncio.sleep(0.05)
        for each in asking:
            each.cancel()

    assert played(play).most <= batching.ASKS_MAX


@pytest.mark.usefixtures("soon")
def test_unexpected_error_does_not_end_the_watch(capsys: pytest.CaptureFixture[str]) -> None:
    async def play(host: Batching, central: Central) -> None:
        central.broken = True
        worker = Worker(host, 1)
        await worker.start()
        await until(lambda: not central.broken, "the host asks")
        await until(lambda: central.watches, "it asks again")

    played(play)

    assert "unexpected error" in capsys.readouterr().out
