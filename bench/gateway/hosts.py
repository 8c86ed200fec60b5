"""Simulated workers, which ask what real ones ask, through the product's own code of a host's gateway or directly."""

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Any, Final
from uuid import uuid4

from bench.gateway.connections import Connections
from bench.gateway.direct import Direct
from bench.gateway.rows import MODEL, HostRow, Slot
from gpuwarden.gateway import operations
from gpuwarden.gateway.batching import Batching
from gpuwarden.gateway.client import AGAIN_S, GatewayStore
from gpuwarden.gateway.upstream import Upstream
from gpuwarden.gateway.wire import WAIT_MAX_S
from gpuwarden.job import HEARTBEAT_S, LEASE_S
from gpuwarden.queue import JobStore
from gpuwarden.worker.lease import OWNERSHIP_S

HOLD_S: Final = 2.0
"""How long a short job takes, seconds."""


class LostError(Exception):
    """A worker has lost its job."""


@dataclass(kw_only=True)
class Seen:
    """What the workers see. Times are milliseconds, except `lost_at`: Unix seconds by job."""

    woken: int = 0
    claims_ms: list[float] = field(default_factory=list)
    """Durations of the claims that got a job."""
    started_ms: list[float] = field(default_factory=list)
    """From the submission of a job to the answer of its claim."""
    heartbeats: int = 0
    repeated: int = 0
    """Requests that the gateway did not answer at once, and that were repeated."""
    lost_at: dict[int, float] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)

    def take(self) -> "Seen":
        """All since the last call."""
        found = Seen(**{each.name: getattr(self, each.name) for each in fields(self)})
        for name, empty in vars(Seen()).items():
            setattr(self, name, empty)
        return found


class Host:
    """One simulated host.

    Args:
        row: its name, token and workers.
        way: the port of its central gateway, or the URL of the database that its workers use.
        seen: where it counts.
    """

    def __init__(self, row: HostRow, way: int | str, seen: Seen) -> None:
        self._seen = seen
        self._upstreams: list[Upstream]
        if isinstance(way, int):
            gateway = Batching(Connections(row.name, way, row.token), row.name)
            self._upstreams, idle_claim_s = [gateway], GatewayStore.idle_claim_s
            self._workers = [Worker(slot, gateway, idle_claim_s, seen) for slot in row.slots]
        else:
            self._upstreams, idle_claim_s = [Direct(way) for _ in row.slots], JobStore.idle_claim_s
            each = zip(row.slots, self._upstreams, strict=True)
            self._workers = [Worker(slot, upstream, idle_claim_s, seen) for slot, upstream in each]
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, after_s: float) -> None:
        """Begin after a time, which spreads the hosts over the interval of heartbeats."""
        for each in self._upstreams:
            if isinstance(each, Batching):
                each.start()
        self._tasks = [asyncio.ensure_future(self._run(each, after_s)) for each in self._workers]

    async def stop(self) -> None:
        """Close the connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for each in self._upstreams:
            await each.close()

    async def _run(self, worker: "Worker", after_s: float) -> None:
        try:
            await asyncio.sleep(after_s)
            await worker.run()
        except Exception as error:  # noqa: BLE001 - the measurement reports it
            self._seen.errors.append(repr(error))


class Worker:
    """One simulated worker."""

    def __init__(self, slot: Slot, upstream: Upstream, idle_claim_s: float, seen: Seen) -> None:
        self._slot, self._upstream, self._idle_claim_s, self._seen = slot, upstream, idle_claim_s, seen
        self._beat_due_s = self._claim_due_s = self._quarantine_due_s = 0.0
        self._its = {"worker": slot.worker, "queue": slot.queue, "incarnation": slot.incarnation}

    async def run(self) -> None:
        """Run its job until it is lost, or wait for jobs."""
        if self._slot.job_id is None:
            await self._idle()
        with suppress(LostError):
            await self._keep_lease(self._slot.job_id or 0, attempt=1)

    async def _idle(self) -> None:
        """Wait for jobs, as `gpuwarden.worker.worker.Worker` does."""
        waiting: asyncio.Future[Any] | None = None
        changed = False
        try:
            while True:
                now_s = time.monotonic()
                if now_s >= self._beat_due_s:
                    await self._beat()
                    self._beat_due_s = now_s + HEARTBEAT_S
                if changed or now_s >= self._claim_due_s:
                    changed, self._claim_due_s = False, now_s + self._idle_claim_s
                    job = await self._claim()
                    while job is not None:
                        job = await self._work(job)
                if now_s >= self._quarantine_due_s:
                    self._quarantine_due_s = now_s + self._idle_claim_s
                    await self._ask(operations.QuarantineOf(worker=self._slot.worker))
                waiting = waiting or asyncio.ensure_future(
                    self._ask(operations.Wait(**self._its, timeout_s=WAIT_MAX_S))
                )
                await asyncio.wait([waiting], timeout=max(0.0, self._due_s() - time.monotonic()))
                if waiting.done():
                    changed, waiting = bool(waiting.result()), None
                    self._seen.woken += changed
        finally:
            if waiting is not None:
                waiting.cancel()

    def _due_s(self) -> float:
        return min(self._beat_due_s, self._claim_due_s, self._quarantine_due_s)

    async def _claim(self) -> Any:
        began_s = time.perf_counter()
        job = await self._ask(operations.Claim(**self._its, lease_s=LEASE_S))
        return self._claimed(job, began_s)

    def _claimed(self, job: Any, began_s: float) -> Any:
        if job is not None:
            self._seen.claims_ms.append((time.perf_counter() - began_s) * 1000)
            self._seen.started_ms.append((time.time() - job["queued_at"]) * 1000)
        return job

    async def _work(self, job: Any) -> Any:
        """Run a job and complete it; returns the next one, as a real worker claims it."""
        keeping = asyncio.ensure_future(self._keep_lease(job["job_id"], job["attempt"]))
        await asyncio.sleep(HOLD_S)
        keeping.cancel()
        with suppress(asyncio.CancelledError):
            await keeping
        this = {"job_id": job["job_id"], "attempt": job["attempt"]}
        self._claim_due_s = 0.0
        began_s = time.perf_counter()
        if time.monotonic() >= self._beat_due_s:
            incarnation = self._slot.incarnation
            done = await self._ask(operations.Complete(worker=self._slot.worker, incarnation=incarnation, **this))
            found = None
        else:
            success = await self._ask(operations.CompleteAndClaim(**self._its, **this, lease_s=LEASE_S))
            done = success is not None and success["done"]
            found = self._claimed(success["job"], began_s) if done else None
            if done and success["idle"]:
                self._claim_due_s = time.monotonic() + self._idle_claim_s
        if not done:
            raise LostError(f"job {job['job_id']} was not completed")
        if found is None and not self._claim_due_s:
            await self._ask(operations.Heartbeat(**self._its, completed=True))
        return found

    async def _keep_lease(self, job_id: int, attempt: int) -> None:
        """Renew the lease and watch the claim, as `gpuwarden.worker.lease.Lease` does."""
        this = {
            "worker": self._slot.worker,
            "incarnation": self._slot.incarnation,
            "job_id": job_id,
            "attempt": attempt,
        }
        next_renewal_s = 0.0
        while True:
            await asyncio.sleep(OWNERSHIP_S)
            now_s = time.monotonic()
            if now_s >= next_renewal_s:
                owned = await self._ask(operations.Renew(**this, lease_s=LEASE_S)) and await self._beat(MODEL)
                next_renewal_s = now_s + HEARTBEAT_S
            else:
                owned = await self._ask(operations.Owns(**this))
            if not owned:
                self._seen.lost_at[job_id] = time.time()
                raise LostError(f"job {job_id} is lost")

    async def _beat(self, model: str | None = None) -> bool:
        self._seen.heartbeats += 1
        return bool(await self._ask(operations.Heartbeat(**self._its, model=model)))

    async def _ask(self, operation: operations.Operation) -> Any:
        """Ask, and repeat the request as a worker's client does."""
        request_id = uuid4().hex if operation.settles else ""
        while True:
            answer = await self._upstream.carry_out(operation, host=self._slot.host, request_id=request_id)
            if answer.status == 200:
                return answer.content["result"]
            if answer.status not in (429, 503):
                raise RuntimeError(f"{self._slot.worker}: {operation.path} got {answer}")
            self._seen.repeated += 1
            await asyncio.sleep(AGAIN_S)
