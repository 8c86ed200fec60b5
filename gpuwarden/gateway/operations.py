"""The operations of workers and of their hosts, checked and carried out for the slot whose socket it used.

The gateway's clock counts. An operation on a job applies only to the attempt that this slot has claimed.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final

from pydantic import BaseModel, ConfigDict, Field

from gpuwarden.gateway.wire import WAIT_MAX_S
from gpuwarden.queue import Slot
from gpuwarden.queue.models import COUNT_MAX, Beat, Renewal, SlotClaim, Success
from gpuwarden.state_file import JOB_ID_MAX, SECONDS_MAX, TEXT_MAX

if TYPE_CHECKING:
    from gpuwarden.queue import JobStore

GPUS_MAX: Final = 64

SLOTS_MAX: Final = 512
"""Most slots in one request of a host."""

LEASE_MAX_S: Final = 86400.0
"""Longest lease, seconds."""

MARGIN_S: Final = 30.0
"""How much longer a host's gateway makes a lease at the queue, seconds. Half of a lease, if that is less."""

LEAST_MARGIN_S: Final = 5.0
"""The margin of the shortest leases, seconds."""

LEASE_AT_QUEUE_MAX_S: Final = LEASE_MAX_S + MARGIN_S

REASON_MAX: Final = 64 * 1024
"""Most characters of a reason."""

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")]
Text = Annotated[str, Field(min_length=1, max_length=TEXT_MAX, pattern=r"^[^\x00]+$")]
"""Without NUL, which PostgreSQL refuses: a sync would fail for all slots."""
Reason = Annotated[str, Field(max_length=REASON_MAX, pattern=r"^[^\x00]*$")]
JobNumber = Annotated[int, Field(ge=0, le=JOB_ID_MAX)]
Attempt = Annotated[int, Field(ge=0, lt=COUNT_MAX)]
Seconds = Annotated[float, Field(ge=0, lt=SECONDS_MAX)]
Lease = Annotated[float, Field(gt=0, le=LEASE_AT_QUEUE_MAX_S)]


class NotHeldError(Exception):
    """This slot does not hold the attempt. `result` is the answer."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result


class Operation(BaseModel):
    """A request of a worker."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)
    path: ClassVar[str]
    settles: ClassVar[bool] = False
    """Whether a repeated request gets the first answer. A gateway keeps many, so they must be small."""
    waits: ClassVar[bool] = False
    """Whether the answer comes later."""
    worker: Name

    def run(self, store: "JobStore", host: str) -> Any:
        """Carry it out; returns a JSON value, or a value for `to_wire`."""
        raise NotImplementedError


class Register(Operation):
    """Start an incarnation; see `Claims.register`."""

    path = "register"
    queue: Text
    incarnation: Text
    gpus: Annotated[list[Text], Field(max_length=GPUS_MAX)] = []

    def run(self, store: "JobStore", host: str) -> Any:  # noqa: D102
        its = {"host": host, "worker": self.worker, "incarnation": self.incarnation}
        return store.claims.register(self.queue, **its, now=store.now(), gpus=self.gpus)


class Claim(Operation):
    """Claim the next job."""

    path = "claim"
    queue: Text
    incarnation: Text
    lease_s: Lease
    loaded: Text | None = None

    def run(self, store: "JobStore", host: str) -> Any:  # noqa: D102
        its = {"host": host, "worker": self.worker, "incarnation": self.incarnation}
        return store.claims.claim(self.queue, **its, now=store.now(), lease_s=self.lease_s, loaded=self.loaded)


class Wait(Operation):
    """Wait until there may be a job to claim. The upstream answers it."""

    path = "wait"
    waits = True
    queue: Text
    timeout_s: Annotated[float, Field(ge=0, le=WAIT_MAX_S)]


class BeatOf(BaseModel):
    """A heartbeat of a worker of the host."""

    worker: Name
    queue: Text
    incarnation: Text
    model: Text | None = None
    loaded: Text | None = None
    completed: bool = False


class Heartbeat(BeatOf, Operation):
    """Refresh the worker's row."""

    path = "heartbeat"

    def run(self, store: "JobStore", host: str) -> Any:  # noqa: D102
        now = store.now()
        return store.claims.heartbeat(
            host=host,
            worker=self.worker,
            queue=self.queue,
            incarnation=self.incarnation,
            model=self.model,
            now=now,
            loaded=self.loaded,
            completed_at=now if self.completed else None,
        )


class RetiredFor(Operation):
    """The condition for which the incarnation lost its job."""

    path = "retired-for"
    incarnation: Text

    def run(self, store: "JobStore", host: str) -> Any:  # noqa: D102
        return store.claims.retired_for(host=host, worker=self.worker, incarnation=self.incarnation)


class OthersCompleted(Operation):
    """Whether another worker of the queue has completed a job lately."""

    path = "others-completed"
    queue: Text
    within_s: Seconds

    def run(self, store: "JobStore", host: str) -> Any:  # noqa: D102
        since = store.now() - self.within_s
        return store.claims.others_completed(self.queue, host=host, worker=self.worker, since=since)


class QuarantineOf(Operation):
    """The quarantine that keeps this worker from claims."""

    path = "quarantine"

    def run(self, store: "JobStore", host: str) -> Any:  # noqa: D102
        return store.gpu_quarantine.quarantine_of(host=host, worker=self.worker)


class ClaimOf(BaseModel):
    """A claim of a worker of the host."""

    worker: Name
    job_id: JobNumber
    attempt: Attempt
    incarnation: Text

    def of(self, host: str) -> SlotClaim:
        """The claim, with its host."""
        return SlotClaim(self.job_id, self.attempt, self.incarnation, host, self.worker)


class OnJob(ClaimOf, Operation):
    """An operation on a claimed job. It has no effect if this slot does not hold that attempt."""

    refused: ClassVar[Any] = False
    ends: ClassVar[bool] = False
    """Whether the slot no longer holds the attempt after success."""

    @property
    def claim(self) -> dict[str, Any]:
        """The attempt."""
        return {"attempt": self.attempt, "incarnation": self.incarnation}

    def run(self, store: "JobStore", host: str) -> Any:  # noqa: D102
        self.check_held(store, host)
        return self.on_job(store, host)

    def check_held(self, store: "JobStore", host: str) -> None:
        """Raise NotHeldError if this slot does not hold the attempt."""
        if not store.claims.is_of(self.job_id, **self.claim, host=host, worker=self.worker):
            raise NotHeldError(self.refused)

    def on_job(self, store: "JobStore", host: str) -> Any:
        """Carry it out. An attempt never moves to another slot."""
        raise NotImplementedError


class IsSettled(Operation):
    """Whether the queue has the result of an attempt, from a commit whose answer was lost."""

    path = "is-settled"
    job_id: JobNumber
    attempt: Attempt
    reason: Reason | None = None
    given_back: bool = False
    retried_after: Attempt | None = None

    def run(self, store: "JobStore", host: str) -> Any:  # noqa: ARG002, D102
        how: dict[str, Any] = {"given_back": self.given_back, "retried_after": self.retried_after}
        return store.claims.is_settled(self.job_id, attempt=self.attempt, reason=self.reason, **how)


class Renew(OnJob):
    """Extend the lease."""

    path = "renew"
    lease_s: Lease

    def on_job(self, store: "JobStore", host: str) -> Any:  # noqa: ARG002, D102
        return store.claims.renew(self.job_id, **self.claim, now=store.now(), lease_s=self.lease_s)


class Owns(OnJob):
    """Whether the attempt still owns its job. A gateway reads it for many at once."""

    path = "owns"

    def on_job(self, store: "JobStore", host: str) -> Any:  # noqa: ARG002, D102
        return store.claims.owns(self.job_id, **self.claim)


class Complete(OnJob):
    """Complete the job."""

    path = "complete"
    settles = ends = True
    result: Any = None
    reason: Reason | None = None

    def run(self, store: "JobStore", host: str) -> Any:  # noqa: D102
        is_done = self._complete(store, of=(host, self.worker))  # one statement checks the slot too
        if not is_done:
            self.check_held(store, host)
        return is_done

    def on_job(self, store: "JobStore", host: str) -> Any:  # noqa: ARG002, D102
        return self._complete(store)

    def _complete(self, store: "JobStore", **how: Any) -> bool:
        left = {"result": self.result, "reason": self.reason}
        return store.claims.complete(self.job_id, **self.claim, now=store.now(), **left, **how)


class CompleteAndClaim(OnJob):
    """Complete the job, and claim the next one.

    The answer has a payload, so none is kept. After a lost answer `IsSettled` confirms the result, and the next claim
    returns the same job.
    """

    path = "complete-and-claim"
    ends = True
    refused = None
    queue: Text
    lease_s: Lease
    loaded: Text | None = None
    result: Any = None
    reason: Reason | None = None
    in_run: bool = False

    def run(self, store: "JobStore", host: str) -> Any:  # noqa: D102
        found = self.on_job(store, host)  # it checks the slot too
        if not found.done:
            self.check_held(store, host)
        return found

    def on_job(self, store: "JobStore", host: str) -> Any:  # noqa: D102
        return store.claims.complete_and_claim(
            Success(self.job_id, self.attempt, self.result, self.reason, self.in_run),
            queue=self.queue,
            host=host,
            worker=self.worker,
            incarnation=self.incarnation,
            now=store.now(),
            lease_s=self.lease_s,
            loaded=self.loaded,
        )


class Fail(OnJob):
    """Fail the job."""

    path = "fail"
    settles = ends = True
    reason: Reason
    traceback: Reason | None = None

    def on_job(self, store: "JobStore", host: str) -> Any:  # noqa: ARG002, D102
        left: dict[str, Any] = {"reason": self.reason, "traceback": self.traceback}
        return store.claims.fail_by_worker(self.job_id, **self.claim, **left, now=store.now())


class Retry(OnJob):
    """Queue the job again after an exception."""

    path = "retry"
    settles = ends = True
    reason: Reason
    traceback: Reason | None = None

    def on_job(self, store: "JobStore", host: str) -> Any:  # noqa: ARG002, D102
        left: dict[str, Any] = {"reason": self.reason, "traceback": self.traceback}
        return store.claims.retry(self.job_id, **self.claim, **left, now=store.now())


class Release(OnJob):
    """Queue the job of a worker that stops."""

    path = "release"
    settles = ends = True

    def on_job(self, store: "JobStore", host: str) -> Any:  # noqa: ARG002, D102
        return store.claims.release(self.job_id, **self.claim, now=store.now())


class GiveBack(OnJob):
    """Queue the job of a worker that cannot go on."""

    path = "give-back"
    settles = ends = True
    reason: Reason
    traceback: Reason | None = None
    gpus: Annotated[list[Text], Field(max_length=GPUS_MAX)] = []

    def on_job(self, store: "JobStore", host: str) -> Any:  # noqa: D102
        slot = Slot(host=host, worker=self.worker, gpus=tuple(self.gpus))
        left: dict[str, Any] = {"reason": self.reason, "traceback": self.traceback}
        return store.claims.give_back(self.job_id, **self.claim, slot=slot, **left, now=store.now())


class Inputs(OnJob):
    """Results of the jobs that the job needs."""

    path = "inputs"
    refused = {}

    def on_job(self, store: "JobStore", host: str) -> Any:  # noqa: ARG002, D102
        return store.runs.inputs(self.job_id)


class Ranks(OnJob):
    """The ranks of the job's gang."""

    path = "ranks"
    refused = []

    def on_job(self, store: "JobStore", host: str) -> Any:  # noqa: ARG002, D102
        ranks = store.ranks(store.job(self.job_id))
        return [replace(each, claimed_by=None, payload={}) for each in ranks]  # what proves a claim is its owner's


class TakeItem(OnJob):
    """Take the next item of the job's run."""

    path = "items/take"
    refused = None

    def on_job(self, store: "JobStore", host: str) -> Any:  # noqa: ARG002, D102
        return store.items.take(self.job_id, **self.claim, now=store.now())


class FinishItem(OnJob):
    """Mark an item as done."""

    path = "items/finish"
    settles = True
    item: Text
    result: Any = None

    def on_job(self, store: "JobStore", host: str) -> Any:  # noqa: ARG002, D102
        return store.items.finish(self.job_id, **self.claim, item=self.item, now=store.now(), result=self.result)


class FailItem(OnJob):
    """Report a failed item."""

    path = "items/fail"
    settles = True
    item: Text
    reason: Reason

    def on_job(self, store: "JobStore", host: str) -> Any:  # noqa: ARG002, D102
        return store.items.fail(self.job_id, **self.claim, item=self.item, reason=self.reason, now=store.now())


class CountItems(OnJob):
    """Number of items of the job's run by state."""

    path = "items/counts"
    refused = {}

    def on_job(self, store: "JobStore", host: str) -> Any:  # noqa: ARG002, D102
        return store.item_counts(store.job(self.job_id))


class RenewalOf(ClaimOf):
    """A lease to extend."""

    lease_s: Lease


class HostOperation(Operation):
    """A request of a host's gateway, for the slots of that host."""

    worker: Name = "all"


class Sync(HostOperation):
    """Heartbeats and renewals of a host. The answer has incarnations that are over or draining, and lost claims."""

    path = "sync"
    beats: Annotated[list[BeatOf], Field(max_length=SLOTS_MAX)] = []
    renewals: Annotated[list[RenewalOf], Field(max_length=SLOTS_MAX)] = []

    def run(self, store: "JobStore", host: str) -> Any:  # noqa: D102
        beats = [Beat(**each.model_dump()) for each in self.beats]
        renewals = [Renewal(each.of(host), each.lease_s) for each in self.renewals]
        found = store.batches.sync(host, beats, renewals, now=store.now())
        names = {
            name: [[beat.worker, beat.incarnation] for beat in getattr(found, name)] for name in ("over", "draining")
        }
        return {**names, "lost": [[claim.job_id, claim.attempt] for claim in found.lost]}


class Watch(HostOperation):
    """Wait until claims of the host are lost; returns job and attempt of each.

    The upstream answers it. A host's newer request ends the older one. The answer of a claim has the name of the open
    request that includes it.
    """

    path = "watch"
    waits = True
    name: Text
    claims: Annotated[list[ClaimOf], Field(max_length=SLOTS_MAX)]
    timeout_s: Annotated[float, Field(ge=0, le=WAIT_MAX_S)]


OPERATIONS: Final[Mapping[str, type[Operation]]] = {
    each.path: each
    for each in (
        *(Register, Claim, Wait, Heartbeat, RetiredFor, OthersCompleted, QuarantineOf, IsSettled),
        *(Renew, Owns, Complete, CompleteAndClaim, Fail, Retry, Release, GiveBack, Inputs, Ranks),
        *(TakeItem, FinishItem, FailItem, CountItems),
    )
}

HOST_OPERATIONS: Final[Mapping[str, type[Operation]]] = {each.path: each for each in (Sync, Watch)}
"""Operations of hosts. A slot's socket does not offer them."""
