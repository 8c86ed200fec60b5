"""Where a gateway takes its answers from: the queue's database, or a central gateway."""

import json
import time
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import httpx
import structlog
from anyio import CapacityLimiter, to_thread

from gpuwarden.db.errors import NoAnswerError
from gpuwarden.errors import GpuwardenError
from gpuwarden.files import ReloadingFile
from gpuwarden.format import error_text
from gpuwarden.gateway.job_watcher import JobWatcher
from gpuwarden.gateway.operations import Claim, CompleteAndClaim, NotHeldError, OnJob, Operation, Owns, Wait, Watch
from gpuwarden.gateway.ownership import Ownership
from gpuwarden.gateway.wire import ERRORS, HOST, PREFIX, REQUEST_ID, WAIT_MAX_S, to_wire
from gpuwarden.http.address import checked_address, tls_context
from gpuwarden.queue.models import Completion, SlotClaim

if TYPE_CHECKING:
    from gpuwarden.queue import JobStore

WATCHED_BY: Final = "watched_by"
"""Field of a claim's answer: the name of the host's `Watch` that includes it."""

NOT_HELD: Final = "job"
"""Reason of an operation without effect, on a job that its slot does not hold."""

ANSWER_S: Final = 10.0
"""Longest wait for the central gateway's answer, seconds."""

CONNECT_S: Final = 5.0

KEEP_ALIVE_S: Final = 60.0
"""How long an idle connection is kept, seconds: a host sends something every 10 s, and a TLS handshake is dear."""

LOG_S: Final = 10.0
"""Least time between two log lines about the same failure, seconds."""

log: Final = structlog.get_logger("gateway")


class LogLimit:
    """Limits log lines to one in `every_s` seconds."""

    def __init__(self, every_s: float) -> None:
        self._every_s, self._next_s = every_s, 0.0

    def is_due(self) -> bool:
        """Whether a line may be written now."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return False
        self._next_s = now_s + self._every_s
        return True


_failures: Final[dict[str, LogLimit]] = defaultdict(partial(LogLimit, LOG_S))


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An answer to a worker. `outcome` is a metric label."""

    status: int
    content: Any
    outcome: str


class Upstream(Protocol):
    """Carries out operations of a host's workers."""

    async def carry_out(self, operation: Operation, *, host: str, request_id: str) -> Answer:
        """Carry it out. Never raises."""

    async def close(self) -> None:
        """Release what it holds."""


class DatabaseUpstream:
    """Carries operations out in the queue's database.

    Args:
        store: the queue.
        watcher: the workers that wait for jobs.
        ownership: which claims are still owned.
        threads: most operations at once.
    """

    def __init__(self, store: "JobStore", watcher: JobWatcher, ownership: Ownership, *, threads: int) -> None:
        self._store, self._watcher, self._ownership = store, watcher, ownership
        self._limiter = CapacityLimiter(threads)

    async def carry_out(self, operation: Operation, *, host: str, request_id: str) -> Answer:  # noqa: ARG002
        """See `Upstream`."""
        found: Any = None
        try:
            if isinstance(operation, Wait):
                found = await self._watcher.wait(operation.queue, operation.timeout_s)
            elif isinstance(operation, Owns):
                found = await self._ownership.owns(operation.of(host))
                if found is False:
                    return _not_held(found)
            elif isinstance(operation, Watch):
                claims = [claim.of(host) for claim in operation.claims]
                lost = await self._ownership.lost(host, claims, operation.timeout_s, name=operation.name)
                found = None if lost is None else [[claim.job_id, claim.attempt] for claim in lost]
            else:
                found = await to_thread.run_sync(operation.run, self._store, host, limiter=self._limiter)
        except NotHeldError as error:
            return _not_held(error.result)
        except NoAnswerError as error:
            return _unanswered(str(error))
        except tuple(ERRORS.values()) as error:
            return failed(409, type(error).__name__, str(error))
        except Exception as error:  # noqa: BLE001 - a worker gets an answer to each request
            _log_seldom("operation failed", error_text(error), operation=operation.path, exc_info=True)
            return failed(500, "queue", error_text(error))
        finally:
            if isinstance(operation, Claim):
                self._watcher.claimed(operation.queue, found=found is not None)
        if found is None and isinstance(operation, Owns | Watch):
            return _unanswered("the claims of workers could not be read")
        more = self._watching(operation, found, host)
        return Answer(status=200, content={"result": to_wire(found), **more}, outcome="done")

    def _watching(self, operation: Operation, found: Any, host: str) -> dict[str, str | None]:
        """Watch a claimed job for its host, and no longer a settled one."""
        is_done = found.done if isinstance(found, Completion) else found
        if isinstance(operation, OnJob) and operation.ends and is_done:
            self._ownership.drop(
                SlotClaim(operation.job_id, operation.attempt, operation.incarnation, host, operation.worker)
            )
        job = found.job if isinstance(found, Completion) else found
        if not isinstance(operation, Claim | CompleteAndClaim) or job is None:
            return {}
        claim = SlotClaim(job.job_id, job.attempt, operation.incarnation, host, operation.worker)
        return {WATCHED_BY: self._ownership.add(claim)}

    async def close(self) -> None:
        """Answer all who wait."""
        self._watcher.close()
        await self._ownership.close()


class CentralUpstream:
    """Passes operations on to a central gateway.

    Args:
        url: the address of the central gateway.
        token_file: file with this host's token. A changed file is read again.
        ca_file: authorities that signed the central gateway's certificate; default: those of the system.

    Raises:
        GpuwardenError: the address or a file is invalid.
    """

    def __init__(self, url: str, token_file: Path, *, ca_file: Path | None) -> None:
        self._url = checked_address(url)
        context = tls_context(ca_file)
        try:
            self._token = ReloadingFile([token_file], lambda: token_file.read_text(encoding="ascii").strip())
        except (OSError, ValueError) as error:
            raise GpuwardenError(f"cannot read {token_file}: {error}") from None
        self._client = httpx.AsyncClient(
            verify=context,
            timeout=httpx.Timeout(ANSWER_S, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=20, keepalive_expiry=KEEP_ALIVE_S),
            trust_env=False,
        )

    async def carry_out(self, operation: Operation, *, host: str, request_id: str) -> Answer:
        """See `Upstream`."""
        try:
            self._token.reload()
        except (OSError, ValueError, GpuwardenError) as error:
            _log_seldom("token file not read, old token in use", str(error))
        headers = {"Authorization": f"Bearer {self._token.value}", "Content-Type": "application/json", HOST: host}
        timeout = httpx.Timeout(WAIT_MAX_S + ANSWER_S if operation.waits else ANSWER_S, connect=CONNECT_S)
        try:
            answer = await self._client.post(
                f"{self._url}{PREFIX}{operation.path}",
                content=operation.model_dump_json(),
                headers=headers | ({REQUEST_ID: request_id} if request_id else {}),
                timeout=timeout,
            )
            content = answer.json()
        except (httpx.HTTPError, ValueError, RuntimeError) as error:  # the last: this gateway ends
            return _unanswered(f"central gateway {self._url}: {error or type(error).__name__}")
        if answer.status_code in (502, 504):  # of a proxy
            return _unanswered(f"central gateway {self._url}: status {answer.status_code}")
        if answer.status_code == 404:
            reason = _reason(content)
            _log_seldom("the central gateway does not know an operation; use the same release", reason)
            return failed(503, "queue", f"the central gateway does not know this operation: {reason}")
        if answer.status_code in (401, 403):
            reason = _reason(content)
            _log_seldom("the central gateway refuses this host", reason)
            return failed(503, "refused", f"the central gateway refuses this host: {reason}")
        return Answer(status=answer.status_code, content=content, outcome=_outcome(answer.status_code, content))

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()


def failed(status: int, kind: str, reason: str) -> Answer:
    """An answer with an error."""
    return Answer(status=status, content={"error": {"kind": kind, "reason": reason}}, outcome=kind)


def _not_held(result: Any) -> Answer:
    return Answer(status=200, content={"result": to_wire(result), "refused": NOT_HELD}, outcome=NOT_HELD)


def _log_seldom(event: str, reason: str, **more: Any) -> None:
    """Log each event at most once in `LOG_S`: workers repeat their requests."""
    if _failures[event].is_due():
        log.warning(event, reason=reason, **more)


def _unanswered(reason: str) -> Answer:
    _log_seldom("the queue does not answer", reason)
    return failed(503, "queue", reason)


def _reason(content: Any) -> str:
    try:
        return str(content["error"]["reason"])
    except (KeyError, TypeError):
        return json.dumps(content)[:200]


def _outcome(status: int, content: Any) -> str:
    if status == 200:
        return "done"
    kind = content.get("error", {}).get("kind") if isinstance(content, dict) else None
    return str(kind) if kind in ERRORS else "queue"
