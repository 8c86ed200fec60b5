"""Orders to end tasks of this host (D7)."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

import httpx
import structlog

from gpuwarden.errors import GpuwardenError
from gpuwarden.files import ReloadingFile
from gpuwarden.http.address import checked_address, tls_context
from gpuwarden.queue.hosts.task_orders import TAKEN_MAX, TaskResult
from remediator.clients.job_queue_sql import BuiltinQueue

PATH: Final = "/api/v1/report_ended_tasks/"

TIMEOUT_S: Final = 10.0
"""Time limit of a request, seconds."""

ANSWER_MAX_BYTES: Final = 64 * 1024

_NO_MESSAGE: Final = "the gateway refused the message: see the log of the executor"

_KNOWN: Final = frozenset({"result", "end_tasks"})

log: Final = structlog.get_logger("executor")


class TaskOrdersError(GpuwardenError):
    """Orders were not read; the message says why."""


class OrderSource(Protocol):
    """Where this host's orders come from."""

    def exchange(self, results: Sequence[TaskResult]) -> list[int]:
        """Report results, and return the ids of the tasks to end.

        Raises:
            GpuwardenError: it does not answer. The results may have been stored.
        """

    def close(self) -> None:
        """Close every connection."""


@dataclass(frozen=True, kw_only=True)
class QueueOrders:
    """Orders from the queue's database."""

    queue: BuiltinQueue
    host: str

    def exchange(self, results: Sequence[TaskResult]) -> list[int]:
        """See `OrderSource`."""
        return self.queue.exchange_task_orders(self.host, results)

    def close(self) -> None:
        """The queue's owner closes it."""


class GatewayOrders:
    """Orders from a central gateway.

    It names ids of tasks. All else in its answer is ignored and counted.

    Args:
        url: its address.
        token_file: file with the token. A changed file is read again.
        ca_file: authorities that signed its certificate; default: those of the system.

    Raises:
        GpuwardenError: the address or a file is invalid.
    """

    def __init__(self, url: str, token_file: Path, *, ca_file: Path | None) -> None:
        self._url = checked_address(url) + PATH
        try:
            self._token = ReloadingFile([token_file], lambda: token_file.read_text(encoding="ascii").strip())
        except (OSError, ValueError) as error:
            raise GpuwardenError(f"cannot read the token of --gateway: {error}") from None
        self._client = httpx.Client(verify=tls_context(ca_file), timeout=TIMEOUT_S, trust_env=False)
        self.ignored = 0
        """Parts of answers that were ignored."""

    def exchange(self, results: Sequence[TaskResult]) -> list[int]:
        """See `OrderSource`."""
        status, content = self._send(results)
        if results and status in (httpx.codes.UNPROCESSABLE_ENTITY, httpx.codes.REQUEST_ENTITY_TOO_LARGE):
            log.warning("results of orders refused: sending them without their messages", answer=str(content)[:200])
            status, content = self._send([replace(each, message=_NO_MESSAGE) for each in results])
        if status != httpx.codes.OK:
            raise TaskOrdersError(f"{self._url} returned {status}: {str(content)[:200]}")
        return self._checked(content)

    def close(self) -> None:
        """See `OrderSource`."""
        self._client.close()

    def _send(self, results: Sequence[TaskResult]) -> tuple[int, Any]:
        """Status and content of the answer."""
        ended = [{"running_log_id": each.task_id, "outcome": each.outcome, "message": each.message} for each in results]
        try:
            self._token.reload()
            headers = {"Authorization": f"Bearer {self._token.value}", "Accept-Encoding": "identity"}
            with self._client.stream("POST", self._url, json={"ended": ended}, headers=headers) as answer:
                body = _whole(answer)
                return answer.status_code, httpx.Response(200, content=body).json()
        except (httpx.HTTPError, OSError, ValueError) as error:
            raise TaskOrdersError(f"{self._url}: {error or type(error).__name__}") from None

    def _checked(self, content: Any) -> list[int]:
        """The ids of tasks in an answer."""
        if not isinstance(content, Mapping):
            raise TaskOrdersError(f"{self._url} returned no JSON object")
        ordered = content.get("end_tasks", [])
        if not isinstance(ordered, list):
            ordered = [ordered]
        valid = [each for each in ordered[:TAKEN_MAX] if type(each) is int and 0 <= each < 2**63]
        ignored = len(content.keys() - _KNOWN) + len(ordered) - len(valid)
        if ignored:
            self.ignored += ignored
            log.warning("parts of an answer ignored: an order is the id of a task", ignored=self.ignored)
        return list(dict.fromkeys(valid))


def _whole(answer: httpx.Response) -> bytes:
    """The body, within its limits of time and size."""
    until_s, body = time.monotonic() + TIMEOUT_S, bytearray()
    for part in answer.iter_raw():
        body += part
        if len(body) > ANSWER_MAX_BYTES:
            raise TaskOrdersError(f"the answer is larger than {ANSWER_MAX_BYTES} bytes")
        if time.monotonic() > until_s:
            raise TaskOrdersError(f"no whole answer within {TIMEOUT_S:g} s")
    return bytes(body)
