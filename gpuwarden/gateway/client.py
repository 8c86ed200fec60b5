"""The queue of a worker, through the socket of its folder. Synchronous, for several threads.

A request is repeated with the same id while the gateway does not answer, for `ANSWER_S`. Then it raises
`NoAnswerError`, as a database does.
"""

import http.client
import json
import os
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from gpuwarden.db.errors import DatabaseError, NoAnswerError
from gpuwarden.gateway import wire
from gpuwarden.job import LEASE_S, Condition, ItemState, JobId
from gpuwarden.queue.models import Completion, Item, Job, Quarantine, Result, Slot, Success

ANSWER_S: Final = 5.0
"""How long a request is repeated, seconds: a writer waits so long for a database."""

TIMEOUT_S: Final = 15.0
"""Longest wait for one answer, seconds."""

AGAIN_S: Final = 0.2
"""Time between repeated requests, seconds."""


def socket_in(folder: Path) -> bool:
    """Whether a gateway made a socket in this worker's folder."""
    return (folder / wire.SOCKET_NAME).is_socket()


class GatewayStore:
    """What a worker uses of a queue. It has the parts of a `JobStore` that a worker may use.

    Args:
        folder: the worker's folder with the socket.
        worker: its name.
        queue: its queue.
    """

    shared: Final = True
    """The queue can go on without this worker's host."""

    idle_claim_s: Final = wire.WAIT_MAX_S
    """Interval between claims while idle, without a wake, seconds."""

    def __init__(self, folder: Path, *, worker: str, queue: str) -> None:
        self._requests, self._queue = _Requests(folder, worker), queue
        self.claims = GatewayClaims(self._requests)
        self.items = GatewayItems(self._requests)
        self.gpu_quarantine = GatewayQuarantine(self._requests)

    def now(self) -> float:
        """This host's clock, Unix seconds. The gateway uses its own."""
        return time.time()

    def changes(self) -> "GatewayChanges":
        """A wait for jobs of the worker's queue, for one thread."""
        return GatewayChanges(self._requests, self._queue)

    def inputs(self, job: Job) -> dict[JobId, Result]:
        """Results of the jobs that this job needs."""
        return {JobId(int(key)): result for key, result in self._requests.ask("inputs", **_claim_of(job)).items()}

    def ranks(self, job: Job) -> list[Job]:
        """The ranks of this job's gang, in order."""
        return [wire.job_of(each) for each in self._requests.ask("ranks", **_claim_of(job))]

    def item_counts(self, job: Job) -> Counter[ItemState]:
        """Number of items of the job's run by state."""
        found = self._requests.ask("items/counts", **_claim_of(job))
        return Counter({ItemState(state): count for state, count in found.items()})

    def close(self) -> None:
        """Close this thread's connection."""
        self._requests.close()


class GatewayClaims:
    """The operations on jobs. Their `now` is not sent: the gateway's clock counts."""

    def __init__(self, requests: "_Requests") -> None:
        self._requests = requests

    def register(
        self,
        queue: str,
        *,
        host: str,  # noqa: ARG002 - the socket is the host's
        worker: str,  # noqa: ARG002 - the socket's
        incarnation: str,
        now: float,  # noqa: ARG002
        gpus: Sequence[str] = (),
    ) -> list[JobId]:
        """See `Claims.register`."""
        return [
            JobId(each) for each in self._requests.ask("register", queue=queue, incarnation=incarnation, gpus=[*gpus])
        ]

    def claim(
        self,
        queue: str,
        *,
        host: str,  # noqa: ARG002
        worker: str,  # noqa: ARG002
        incarnation: str,
        now: float,  # noqa: ARG002
        lease_s: float = LEASE_S,
        loaded: str | None = None,
    ) -> Job | None:
        """See `Claims.claim`."""
        found = self._requests.ask("claim", queue=queue, incarnation=incarnation, lease_s=lease_s, loaded=loaded)
        return None if found is None else wire.job_of(found)

    def heartbeat(
        self,
        *,
        host: str,  # noqa: ARG002
        worker: str,  # noqa: ARG002
        queue: str,
        incarnation: str,
        model: str | None,
        now: float,  # noqa: ARG002
        loaded: str | None = None,
        completed_at: float | None = None,
    ) -> bool:
        """See `Claims.heartbeat`."""
        its = {"queue": queue, "incarnation": incarnation, "model": model, "loaded": loaded}
        return bool(self._requests.ask("heartbeat", **its, completed=completed_at is not None))

    def renew(self, job_id: int, *, attempt: int, incarnation: str, now: float, lease_s: float = LEASE_S) -> bool:  # noqa: ARG002
        """See `Claims.renew`."""
        return self._on_job("renew", job_id, attempt, incarnation, lease_s=lease_s)

    def owns(self, job_id: int, *, attempt: int, incarnation: str) -> bool:
        """See `Claims.owns`."""
        return self._on_job("owns", job_id, attempt, incarnation)

    def complete(
        self,
        job_id: int,
        *,
        attempt: int,
        incarnation: str,
        now: float,  # noqa: ARG002
        result: Result = None,
        reason: str | None = None,
    ) -> bool:
        """See `Claims.complete`."""
        return self._on_job("complete", job_id, attempt, incarnation, result=result, reason=reason)

    def complete_and_claim(
        self,
        success: Success,
        *,
        queue: str,
        host: str,  # noqa: ARG002
        worker: str,  # noqa: ARG002
        incarnation: str,
        now: float,  # noqa: ARG002
        lease_s: float = LEASE_S,
        loaded: str | None = None,
    ) -> Completion:
        """See `Claims.complete_and_claim`."""
        its = {"queue": queue, "incarnation": incarnation, "lease_s": lease_s, "loaded": loaded}
        found = self._requests.ask("complete-and-claim", **success._asdict(), **its)
        if found is None:
            return Completion(done=False)
        job = None if found["job"] is None else wire.job_of(found["job"])
        return Completion(done=found["done"], job=job, idle=found["idle"])

    def fail_by_worker(
        self,
        job_id: int,
        *,
        attempt: int,
        incarnation: str,
        reason: str,
        now: float,  # noqa: ARG002
        traceback: str | None = None,
    ) -> bool:
        """See `Claims.fail_by_worker`."""
        return self._on_job("fail", job_id, attempt, incarnation, reason=reason, traceback=traceback)

    def retry(
        self,
        job_id: int,
        *,
        attempt: int,
        incarnation: str,
        reason: str,
        now: float,  # noqa: ARG002
        traceback: str | None = None,
    ) -> bool:
        """See `Claims.retry`."""
        return self._on_job("retry", job_id, attempt, incarnation, reason=reason, traceback=traceback)

    def release(self, job_id: int, *, attempt: int, incarnation: str, now: float) -> bool:  # noqa: ARG002
        """See `Claims.release`."""
        return self._on_job("release", job_id, attempt, incarnation)

    def give_back(
        self,
        job_id: int,
        *,
        attempt: int,
        incarnation: str,
        slot: Slot,
        reason: str,
        now: float,  # noqa: ARG002
        traceback: str | None = None,
    ) -> bool:
        """See `Claims.give_back`."""
        left = {"reason": reason, "traceback": traceback, "gpus": [*slot.gpus]}
        return self._on_job("give-back", job_id, attempt, incarnation, **left)

    def is_settled(
        self, job_id: int, *, attempt: int, reason: str | None, given_back: bool, retried_after: int | None
    ) -> bool:
        """See `Claims.is_settled`."""
        its = {"job_id": job_id, "attempt": attempt, "reason": reason}
        return bool(self._requests.ask("is-settled", **its, given_back=given_back, retried_after=retried_after))

    def others_completed(self, queue: str, *, host: str, worker: str, since: float) -> bool:  # noqa: ARG002
        """See `Claims.others_completed`."""
        return bool(self._requests.ask("others-completed", queue=queue, within_s=max(0.0, time.time() - since)))

    def retired_for(self, *, host: str, worker: str, incarnation: str) -> Condition | None:  # noqa: ARG002
        """See `Claims.retired_for`."""
        found = self._requests.ask("retired-for", incarnation=incarnation)
        return None if found is None else Condition(found)

    def _on_job(self, path: str, job_id: int, attempt: int, incarnation: str, **others: Any) -> bool:
        claim = {"job_id": job_id, "attempt": attempt, "incarnation": incarnation}
        return bool(self._requests.ask(path, **claim, **others))


class GatewayItems:
    """The operations on items."""

    def __init__(self, requests: "_Requests") -> None:
        self._requests = requests

    def take(self, job_id: int, *, attempt: int, incarnation: str, now: float) -> Item | None:  # noqa: ARG002
        """See `Items.take`."""
        found = self._requests.ask("items/take", job_id=job_id, attempt=attempt, incarnation=incarnation)
        return None if found is None else wire.item_of(found)

    def finish(
        self,
        job_id: int,
        *,
        attempt: int,
        incarnation: str,
        item: str,
        now: float,  # noqa: ARG002
        result: Result = None,
    ) -> bool:
        """See `Items.finish`."""
        claim = {"job_id": job_id, "attempt": attempt, "incarnation": incarnation}
        return bool(self._requests.ask("items/finish", **claim, item=item, result=result))

    def fail(self, job_id: int, *, attempt: int, incarnation: str, item: str, reason: str, now: float) -> bool:  # noqa: ARG002
        """See `Items.fail`."""
        claim = {"job_id": job_id, "attempt": attempt, "incarnation": incarnation}
        return bool(self._requests.ask("items/fail", **claim, item=item, reason=reason))


class GatewayQuarantine:
    """The worker's quarantine."""

    def __init__(self, requests: "_Requests") -> None:
        self._requests = requests

    def quarantine_of(self, *, host: str, worker: str) -> Quarantine | None:  # noqa: ARG002
        """See `GpuQuarantine.quarantine_of`."""
        found = self._requests.ask("quarantine")
        return None if found is None else wire.quarantine_of(found)


class GatewayChanges:
    """A request that the gateway answers when there may be a job, on a separate connection."""

    def __init__(self, requests: "_Requests", queue: str) -> None:
        self._requests, self._queue = requests, queue
        self._connection: _Connection | None = None

    def any(self) -> bool:
        """See `Changes`."""
        return self.wait(0)

    def wait(self, timeout_s: float) -> bool:
        """True once there may be a job, False after `timeout_s`.

        Raises:
            NoAnswerError: the gateway does not answer.
        """
        try:
            if self._connection is None:
                self._connection = self._requests.connection()
                self._requests.send(self._connection, "wait", {"queue": self._queue, "timeout_s": wire.WAIT_MAX_S})
            answered = select.poll()  # select() takes no number over 1023
            answered.register(self._connection.sock, select.POLLIN)
            if not answered.poll(timeout_s * 1000):
                return False
            connection, self._connection = self._connection, None
            found = self._requests.read(connection)
            connection.close()
        except (OSError, http.client.HTTPException, _Again) as error:
            self.close()
            raise self._requests.no_answer(error) from None
        return bool(found)

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class _Again(Exception):  # noqa: N818 - not an error: the request is repeated
    """The gateway asks to repeat the request."""


class _Connection(http.client.HTTPConnection):
    def __init__(self, folder: Path) -> None:
        super().__init__("localhost", timeout=TIMEOUT_S)
        self._folder = folder

    def connect(self) -> None:
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.sock.settimeout(self.timeout)
            self.sock.connect(wire.reachable(folder))
        except BaseException:
            self.close()
            raise
        finally:
            os.close(folder)


class _Requests:
    """Requests through the socket, with a connection per thread."""

    def __init__(self, folder: Path, worker: str) -> None:
        self._folder, self._worker = folder, worker
        self._own = threading.local()

    def connection(self) -> _Connection:
        return _Connection(self._folder)

    def ask(self, path: str, **its: Any) -> Any:
        """Ask, and repeat the request until the gateway answers.

        Raises:
            NoAnswerError: there was no answer in time.
            DatabaseError: the gateway refused the request.
            GpuwardenError: the queue's error, of `wire.ERRORS`.
        """
        request_id, give_up_s = uuid4().hex, time.monotonic() + ANSWER_S
        while True:
            connection: _Connection = getattr(self._own, "connection", None) or self.connection()
            self._own.connection, reused = connection, connection.sock is not None
            try:
                self.send(connection, path, its, request_id)
                return self.read(connection)
            except (OSError, http.client.HTTPException, _Again) as error:
                connection.close()
                if time.monotonic() >= give_up_s:
                    raise self.no_answer(error) from None
                if isinstance(error, _Again) or not reused:  # the gateway closes idle connections
                    time.sleep(AGAIN_S)

    def send(self, connection: _Connection, path: str, its: Mapping[str, Any], request_id: str = "") -> None:
        headers = {"Content-Type": "application/json"} | ({wire.REQUEST_ID: request_id} if request_id else {})
        connection.request("POST", wire.PREFIX + path, json.dumps({"worker": self._worker, **its}), headers)

    def read(self, connection: _Connection) -> Any:
        answer = connection.getresponse()
        status, text = answer.status, answer.read()
        if status == 503 or status == 429:  # noqa: PLR1714
            raise _Again(_reason(text))
        try:
            found = json.loads(text)
            if status == 200:
                return found["result"]
            kind, reason = found["error"]["kind"], found["error"]["reason"]
        except (ValueError, KeyError, TypeError):
            raise DatabaseError(
                f"the gateway's answer is not understood (status {status}): use the same release"
            ) from None
        raise wire.ERRORS.get(kind, DatabaseError)(f"gateway: {reason}")

    def no_answer(self, error: Exception) -> NoAnswerError:
        where = self._folder / wire.SOCKET_NAME
        return NoAnswerError(f"the gateway at {where} does not answer: {error or type(error).__name__}")

    def close(self) -> None:
        with suppress(AttributeError):
            self._own.connection.close()
            del self._own.connection


def _claim_of(job: Job) -> dict[str, Any]:
    return {"job_id": job.job_id, "attempt": job.attempt, "incarnation": job.claimed_by}


def _reason(text: bytes) -> str:
    try:
        return str(json.loads(text)["error"]["reason"])
    except (ValueError, KeyError, TypeError):
        return "no reason given"
