"""What a host's gateway asks the central one for all its slots together.

Heartbeats and renewals are answered at once, and sent every `SYNC_S`. A lease at the queue is longer
than its worker's, by a margin. A renewal is accepted only while the last one that the queue confirmed is younger than
the margin. So a worker that cannot renew stops itself before its lease at the queue ends.
"""

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, TypeVar
from uuid import uuid4

import structlog
from pydantic import BaseModel

from gpuwarden.clock import boottime_s
from gpuwarden.gateway.operations import (
    LEASE_AT_QUEUE_MAX_S,
    LEAST_MARGIN_S,
    MARGIN_S,
    SLOTS_MAX,
    BeatOf,
    Claim,
    ClaimOf,
    CompleteAndClaim,
    Heartbeat,
    OnJob,
    Operation,
    Owns,
    QuarantineOf,
    Register,
    Renew,
    RenewalOf,
    Sync,
    Wait,
    Watch,
)
from gpuwarden.gateway.upstream import WATCHED_BY, Answer, Upstream, failed
from gpuwarden.gateway.waiters import Waiters
from gpuwarden.gateway.wire import BODY_MAX_BYTES, WAIT_MAX_S
from gpuwarden.job import LEASE_S

SYNC_S: Final = 10.0
"""Interval of messages with heartbeats and renewals, seconds. A sixth of a lease, if that is less."""

IDLE_SYNC_S: Final = 30.0
"""Interval of messages without a worker, seconds, by which the host is heard."""

SPARE_S: Final = 2.0
"""The part of a margin in which no renewal is accepted, seconds: a worker checks its lease each second."""

WATCH_S: Final = 10.0
"""Length of a request that waits for lost claims, seconds."""

SEEN_S: Final = 20.0
"""How long a claim counts as owned after the last word of the queue, seconds: twice `WATCH_S`, for a slow host."""

FORGET_S: Final = 3 * LEASE_S
"""How long a slot without a lease is kept after its last word, seconds: names of workers may not come back."""

LEAST_S: Final = 0.2
"""Least time between two messages, seconds."""

GATHER_S: Final = 0.25
"""How long new claims are collected, seconds, before a request for them."""

WATCHES_MAX: Final = 4
"""Most open requests for lost claims: one, and those that another central gateway has not ended yet."""

ASKS_MAX: Final = 256
"""Most queues for whose jobs a host asks at once. A central gateway takes 1000 requests of a host."""

ANSWER_S: Final = 2.0
"""How long a heartbeat or renewal waits for the queue where too little is known, seconds."""

IDLE_CLAIM_S: Final = 150.0
"""How long after a claim without a job, seconds, a claim without a wake is answered here."""

LOOK_S: Final = 1.0
"""How long a request waits for a job after its last worker is gone, seconds."""

RETRY_S: Final = 1.0

log: Final = structlog.get_logger("gateway")


@dataclass
class _Held:
    """A claim. Times are of `boottime_s`, when the request was sent that the queue confirmed."""

    claim: ClaimOf
    lease_s: float
    leased_s: float
    seen_s: float
    due: bool = False
    """The worker has renewed since."""
    lost: bool = False
    watched_by: str | None = None
    """Name of the `Watch` that includes it."""

    def may_renew(self) -> bool:
        return boottime_s() - self.leased_s < _at_queue(self.lease_s) - self.lease_s - SPARE_S


@dataclass
class _Slot:
    """The current incarnation of a worker."""

    incarnation: str
    seen_s: float
    beat: BeatOf | None = None
    """To be sent."""
    over: bool = False
    held: _Held | None = None
    empty_s: float = -math.inf
    """When the last claim without a job was sent."""
    woken_s: float = -math.inf
    """When it was last woken: a claim of before, which may be answered later, has not seen that job."""
    quarantine: Answer | None = None
    """Since that claim."""

    @property
    def known_s(self) -> float:
        """When it was last heard, or the end of its lease."""
        held = self.held
        return self.seen_s if held is None else max(self.seen_s, held.leased_s + _at_queue(held.lease_s))

    def let_go(self, claim: ClaimOf) -> None:
        if self.held is not None and self.held.claim == claim:
            self.held = None
            if self.beat is not None:
                self.beat = self.beat.model_copy(update={"model": None})


class Batching:
    """An upstream that sends what the slots of a host say together.

    Args:
        upstream: the central gateway.
        host: this host.
    """

    def __init__(self, upstream: Upstream, host: str) -> None:
        self._upstream, self._host = upstream, host
        self._waiters = Waiters()
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._slots: dict[str, _Slot] = {}
        self._sync_s = math.inf
        self._planned = asyncio.Event()
        self._synced: list[asyncio.Future[None]] = []
        self._unwatched = asyncio.Event()
        self._watches: list[asyncio.Task[None]] = []
        self._watch_name = ""
        """Of the last one."""
        self._closed = False
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start to send. Call it in the event loop."""
        self._plan(IDLE_SYNC_S)
        self._tasks = [asyncio.create_task(_repeat(step)) for step in (self._keep_syncing, self._keep_watching)]

    async def carry_out(self, operation: Operation, *, host: str, request_id: str) -> Answer:  # noqa: ARG002
        """See `Upstream`."""
        if isinstance(operation, Wait):
            return await self._wait(operation)
        if isinstance(operation, Heartbeat | Renew | Owns):
            slot = self._slots.get(operation.worker)
            if slot is not None and slot.incarnation == operation.incarnation:
                if isinstance(operation, Heartbeat):
                    return await self._beat(slot, operation)
                if slot.held is not None and slot.held.claim == _claim_of(operation):
                    return await self._renew(slot.held, operation) if isinstance(operation, Renew) else _owns(slot.held)
        if isinstance(operation, Claim | QuarantineOf):
            known = self._known_idle(operation)
            if known is not None:
                return known
        return await self._pass_on(operation, request_id)

    async def close(self) -> None:
        """Send the last heartbeats and renewals, and stop."""
        self._waiters.close()
        if not self._closed:
            self._closed = True
            tasks = [*self._tasks, *self._watches, *self._asking.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            with suppress(TimeoutError):
                async with asyncio.timeout(ANSWER_S):
                    await self._sync()
        await self._upstream.close()

    async def _wait(self, operation: Wait) -> Answer:
        if operation.queue not in self._asking and len(self._asking) < ASKS_MAX:
            self._asking[operation.queue] = asyncio.create_task(self._ask(operation))
        is_woken = await self._waiters.wait(operation.queue, operation.timeout_s)
        slot = self._slots.get(operation.worker)
        if is_woken and slot is not None:
            slot.woken_s = boottime_s()
        return _done(is_woken)

    def _known_idle(self, operation: Claim | QuarantineOf) -> Answer | None:
        """The answer for an idle worker that nothing has woken since its last claim; `None`: ask."""
        slot = self._slots.get(operation.worker)
        if slot is None or slot.empty_s <= slot.woken_s or boottime_s() - slot.empty_s >= IDLE_CLAIM_S:
            return None
        if isinstance(operation, QuarantineOf):
            return slot.quarantine
        waits = operation.queue in self._asking and slot.incarnation == operation.incarnation
        return _done(None) if waits and not slot.over else None

    async def _ask(self, operation: Wait) -> None:
        """Ask for jobs while workers of the queue wait."""
        queue, longest = operation.queue, operation.model_copy(update={"timeout_s": WAIT_MAX_S})
        try:
            while queue in self._waiters.counts():
                asking = asyncio.ensure_future(self._upstream.carry_out(longest, host=self._host, request_id=""))
                try:
                    while not asking.done() and queue in self._waiters.counts():
                        await asyncio.wait([asking], timeout=LOOK_S)
                finally:
                    asking.cancel()  # no worker waits any more: the job is another host's
                if not asking.done():
                    continue
                answer = asking.result()
                if answer.status != 200:
                    await _pause()
                elif _result(answer):
                    self._waiters.wake_one(queue)
        finally:
            del self._asking[queue]

    async def _pass_on(self, operation: Operation, request_id: str) -> Answer:
        """Pass one operation on, and remember the answer."""
        sent, sent_s = operation, boottime_s()
        if isinstance(operation, Claim | CompleteAndClaim | Renew):
            sent = operation.model_copy(update={"lease_s": _at_queue(operation.lease_s)})
        answer = await self._upstream.carry_out(sent, host=self._host, request_id=request_id)
        if isinstance(operation, Claim):
            self._waiters.claimed(operation.queue)
        if isinstance(operation, Claim | CompleteAndClaim | QuarantineOf):
            self._note_claim(operation, answer, sent_s)
        else:
            self._note(operation, answer, sent_s)
        return answer

    def _note(self, operation: Operation, answer: Answer, sent_s: float) -> None:
        found = _result(answer)
        if isinstance(operation, Register):
            self._slots.pop(operation.worker, None)
            if answer.status == 200:
                self._slot_of(operation.worker, operation.incarnation, sent_s)
        elif isinstance(operation, Heartbeat) and found is True:
            self._slot_of(operation.worker, operation.incarnation, sent_s).beat = None  # an older one
        elif isinstance(operation, Renew) and found is True:
            self._hold(operation, _claim_of(operation), sent_s)
            self._unwatched.set()
        elif isinstance(operation, OnJob) and operation.ends and found is True and operation.worker in self._slots:
            self._slots[operation.worker].let_go(_claim_of(operation))

    def _note_claim(self, operation: Claim | CompleteAndClaim | QuarantineOf, answer: Answer, sent_s: float) -> None:
        if answer.status != 200:
            return
        found = _result(answer)
        if isinstance(operation, CompleteAndClaim):
            if found is None or not found["done"]:
                return
            if operation.worker in self._slots:
                self._slots[operation.worker].let_go(_claim_of(operation))
            found, is_idle = found["job"], found["idle"]
        else:
            is_idle = found is None
        if isinstance(operation, QuarantineOf) or is_idle:
            self._note_idle(operation, answer, sent_s)
        elif found is not None:
            self._note_job(operation, found, answer, sent_s)

    def _note_job(
        self, operation: Claim | CompleteAndClaim, job: Mapping[str, Any], answer: Answer, sent_s: float
    ) -> None:
        its = {"worker": operation.worker, "incarnation": operation.incarnation}
        slot = self._hold(operation, ClaimOf(job_id=job["job_id"], attempt=job["attempt"], **its), sent_s)
        if slot.beat is not None:  # of before the claim, which has written the model
            slot.beat = slot.beat.model_copy(update={"model": job["model"] or job["job_class"]})
        if slot.held is not None:
            slot.held.watched_by = answer.content.get(WATCHED_BY)
            if slot.held.watched_by != self._watch_name:
                self._unwatched.set()

    def _note_idle(self, operation: Claim | CompleteAndClaim | QuarantineOf, answer: Answer, sent_s: float) -> None:
        slot = self._slots.get(operation.worker)
        if slot is None:
            return
        if isinstance(operation, QuarantineOf):
            slot.quarantine = answer
        elif slot.incarnation == operation.incarnation:
            slot.empty_s = sent_s
            if isinstance(operation, Claim):  # a worker that had a job was in no quarantine
                slot.quarantine = None

    def _slot_of(self, worker: str, incarnation: str, seen_s: float) -> _Slot:
        slot = self._slots.get(worker)
        if slot is None or slot.incarnation != incarnation:
            slot = self._slots[worker] = _Slot(incarnation, seen_s)
        slot.seen_s = max(slot.seen_s, seen_s)
        return slot

    def _hold(self, operation: Claim | CompleteAndClaim | Renew, claim: ClaimOf, sent_s: float) -> _Slot:
        slot = self._slot_of(operation.worker, operation.incarnation, sent_s)
        slot.held = _Held(claim, operation.lease_s, leased_s=sent_s, seen_s=sent_s)
        return slot

    async def _beat(self, slot: _Slot, operation: Heartbeat) -> Answer:
        completed = operation.completed or (slot.beat is not None and slot.beat.completed)
        slot.beat = BeatOf(**operation.model_dump(exclude={"completed"}), completed=completed)
        self._plan(self._interval_s(slot))
        if not slot.over and boottime_s() - slot.seen_s >= MARGIN_S:
            await self._sync_now()
        if not slot.over and boottime_s() - slot.seen_s >= MARGIN_S:
            return _unknown("worker")
        return _done(not slot.over)

    async def _renew(self, held: _Held, operation: Renew) -> Answer:
        held.due = True
        if operation.lease_s != held.lease_s:  # the queue has the old one: not confirmed before a sync
            held.lease_s, held.leased_s = operation.lease_s, 0.0
        self._plan(_interval_of(held))
        if not held.lost and not held.may_renew():
            await self._sync_now()
        if not held.lost and not held.may_renew():
            return _unknown("claim")
        return _done(not held.lost)

    def _interval_s(self, slot: _Slot) -> float:
        return SYNC_S if slot.held is None else _interval_of(slot.held)

    def _plan(self, within_s: float) -> None:
        """Sync within this time. The first of a batch decides."""
        at_s = boottime_s() + within_s * (1 + random.random() / 10)  # noqa: S311 - no secret
        if at_s < self._sync_s:
            self._sync_s = at_s
            self._planned.set()

    async def _sync_now(self) -> None:
        """Sync, and wait for the answer for a moment."""
        synced: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._synced.append(synced)
        self._plan(0.0)
        with suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                await synced

    async def _keep_syncing(self) -> None:
        self._planned.clear()
        left_s = self._sync_s - boottime_s()
        if left_s > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(None if math.isinf(left_s) else left_s):
                    await self._planned.wait()
            return
        self._sync_s = math.inf
        synced, self._synced = self._synced, []
        is_done = await self._sync(idle=True)
        for each in synced:
            if not each.done():
                each.set_result(None)
        self._plan(IDLE_SYNC_S)
        if not is_done:
            await _pause()
            self._plan(0.0)
        await asyncio.sleep(LEAST_S)

    async def _sync(self, *, idle: bool = False) -> bool:
        """Send heartbeats and renewals, or `idle` an empty message; False if there was no answer."""
        before_s = boottime_s() - FORGET_S
        self._slots = {worker: slot for worker, slot in self._slots.items() if slot.known_s >= before_s}
        due = [
            (slot, slot.beat, slot.held if slot.held is not None and slot.held.due and not slot.held.lost else None)
            for slot in self._slots.values()
            if not slot.over
        ]
        is_done = True
        parts = list(_parts([each for each in due if each[1] is not None or each[2] is not None], _size_of_due))
        for some in parts or ([[]] if idle else []):
            is_done = await self._sync_some(some) and is_done
        return is_done

    async def _sync_some(self, some: "list[_Due]") -> bool:
        sent_s = boottime_s()
        renewals = [
            RenewalOf(**held.claim.model_dump(), lease_s=_at_queue(held.lease_s))
            for *_, held in some
            if held is not None
        ]
        sync = Sync(beats=[beat for _, beat, _ in some if beat is not None], renewals=renewals)
        leases = [None if held is None else held.lease_s for *_, held in some]
        for *_, held in some:
            if held is not None:
                held.due = False
        found = _result(await self._upstream.carry_out(sync, host=self._host, request_id=""))
        if found is None:
            for *_, held in some:
                if held is not None:
                    held.due = True
            return False
        over, lost, draining = ({tuple(each) for each in found[name]} for name in ("over", "lost", "draining"))
        for (slot, beat, held), lease_s in zip(some, leases, strict=True):
            if beat is not None:
                slot.over = (beat.worker, beat.incarnation) in over
                slot.seen_s = slot.seen_s if slot.over else sent_s
                if (beat.worker, beat.incarnation) in draining:
                    slot.woken_s = boottime_s()  # its next claim ends it
                slot.beat = None if slot.beat is beat else slot.beat
            if held is not None:
                held.lost = held.lost or (held.claim.job_id, held.claim.attempt) in lost
                if not held.lost:
                    held.seen_s = max(held.seen_s, sent_s)
                    held.leased_s = sent_s if held.lease_s == lease_s else held.leased_s
        return True

    async def _keep_watching(self) -> None:
        """Keep a request open that is answered once a claim is lost."""
        await self._unwatched.wait()
        await asyncio.sleep(GATHER_S)
        self._unwatched.clear()
        held = [slot.held for slot in self._slots.values() if slot.held is not None and not slot.held.lost]
        if held:
            self._watches = [each for each in self._watches if not each.done()]
            for each in self._watches[: 1 - WATCHES_MAX]:
                each.cancel()
            self._watches.append(asyncio.create_task(self._watch(next(_parts(held, lambda each: _size(each.claim))))))

    def _note_watched(self, name: str, lost: set[tuple[int, ...]]) -> None:
        """Note the answer of a request. A newer request, which may have ended it before a read, has its claims."""
        now_s = boottime_s()
        for held in (slot.held for slot in self._slots.values()):
            if held is not None and (held.claim.job_id, held.claim.attempt) in lost:
                held.lost = True
            elif held is not None and held.watched_by == name:
                held.seen_s = now_s

    async def _watch(self, held: list[_Held]) -> None:
        self._watch_name = uuid4().hex
        for each in held:
            each.watched_by = self._watch_name
        watch = Watch(name=self._watch_name, claims=[each.claim for each in held], timeout_s=WATCH_S)
        try:
            found = _result(await self._upstream.carry_out(watch, host=self._host, request_id=""))
            if found is None:
                await _pause()
            else:
                self._note_watched(watch.name, {tuple(each) for each in found})
        except Exception:  # without the next watch, losses are learned late
            log.exception("unexpected error; trying again")
            await _pause()
        if self._watches and self._watches[-1] is asyncio.current_task():
            self._unwatched.set()


_Due = tuple[_Slot, BeatOf | None, _Held | None]
T = TypeVar("T")


def _parts(items: Iterable[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    """Parts that fit a request."""
    part: list[T] = []
    total = 0
    for item in items:
        if part and (len(part) >= SLOTS_MAX or total + size(item) > BODY_MAX_BYTES / 2):
            yield part
            part, total = [], 0
        part.append(item)
        total += size(item)
    if part:
        yield part


def _size_of_due(due: _Due) -> int:
    _, beat, held = due
    return sum(_size(each) for each in (beat, None if held is None else held.claim) if each is not None)


def _size(value: BaseModel) -> int:
    return len(value.model_dump_json().encode()) + 64


async def _repeat(step: Callable[[], Awaitable[None]]) -> None:
    while True:
        try:
            await step()
        except Exception:  # without this, no lease of the host is renewed
            log.exception("unexpected error; trying again")
            await _pause()


async def _pause() -> None:
    await asyncio.sleep(RETRY_S * (0.5 + random.random()))  # noqa: S311 - no secret


def _claim_of(operation: OnJob) -> ClaimOf:
    return ClaimOf(
        worker=operation.worker,
        job_id=operation.job_id,
        attempt=operation.attempt,
        incarnation=operation.incarnation,
    )


def _owns(held: _Held) -> Answer:
    if not held.lost and boottime_s() - held.seen_s >= SEEN_S:
        return _unknown("claim")
    return _done(not held.lost)


def _interval_of(held: _Held) -> float:
    return min(SYNC_S, held.lease_s / 6)


def _at_queue(lease_s: float) -> float:
    """A lease at the queue, seconds."""
    return min(lease_s + min(MARGIN_S, max(LEAST_MARGIN_S, lease_s / 2)), LEASE_AT_QUEUE_MAX_S)


def _done(result: Any) -> Answer:
    return Answer(status=200, content={"result": result}, outcome="done")


def _unknown(what: str) -> Answer:
    return failed(503, "queue", f"the central gateway has confirmed nothing about this {what} lately")


def _result(answer: Answer) -> Any:
    return answer.content.get("result") if answer.status == 200 and isinstance(answer.content, dict) else None
