"""Asks this host's own exporter, over loopback, what it sees of a worker or a server now.

The real gate before anything is done.
"""

from collections.abc import Callable
from typing import Final, TypeVar

import httpx
from prometheus_client.parser import text_string_to_metric_families

from gpuwarden import facts
from gpuwarden.errors import GpuwardenError
from gpuwarden.facts import ServerFacts, WorkerFacts

_Facts = TypeVar("_Facts", WorkerFacts, ServerFacts)

TIMEOUT_S: Final = 3.0
"""How long the exporter may take to answer, seconds."""

_WATCHED: Final = frozenset({"gpuwarden_worker_alive", "gpuwarden_server_info", "gpuwarden_container_recyclable"})
"""The series of 1 for each worker that lives, for each server, and for each tenant that may be recycled."""


class WitnessError(GpuwardenError):
    """The exporter gave no usable answer; so nothing is known, and nothing is done."""


class WorkerUnseenError(WitnessError):
    """The exporter answered from a fresh look at the host, and sees no such worker."""


class Witness:
    """A client of one exporter's `/evidence`. Safe to share between threads."""

    def __init__(self, exporter_url: str) -> None:
        self._url = exporter_url.rstrip("/")
        self._client = httpx.Client(timeout=TIMEOUT_S, trust_env=False)

    def close(self) -> None:
        """Let go of the connections."""
        self._client.close()

    def workers(self) -> int:
        """How many containers with a live worker, a server, or a VRAM budget to answer for the exporter sees.

        A tenant can write as many workers' files as it likes, and counts once for each container it has.

        Raises:
            WitnessError: no answer, or one that cannot be read.
        """
        try:
            answer = self._client.get(f"{self._url}/metrics")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise WitnessError(f"the exporter at {self._url} does not answer: {error}") from None
        if answer.status_code != httpx.codes.OK:
            raise WitnessError(f"the exporter at {self._url} says {answer.status_code}: {answer.text.strip()[:200]}")
        try:
            families = list(text_string_to_metric_families(answer.text))
        except ValueError as error:
            raise WitnessError(f"the exporter at {self._url} gives no page of metrics: {error}") from None
        samples = [sample for family in families for sample in family.samples]
        return len(
            {
                sample.labels.get("container") or sample.labels.get("worker")
                for sample in samples
                if sample.name in _WATCHED and sample.value == 1
            }
        )

    def about(self, worker: str, *, host: str) -> WorkerFacts:
        """The facts about one worker of this host.

        Raises:
            WorkerUnseenError: no such worker is seen.
            WitnessError: no answer, or one that cannot be read or speaks of another host.
        """
        answer = self._ask({"worker": worker})
        if answer.status_code == httpx.codes.NOT_FOUND:
            raise WorkerUnseenError(f"the exporter at {self._url} sees no worker {worker!r} on this host")
        found = self._read(answer, facts.parse)
        if found.host != host or found.worker != worker:
            raise WitnessError(f"the exporter speaks of {found.host}/{found.worker}; {host}/{worker} was asked for")
        return found

    def about_server(self, container: str, *, host: str) -> ServerFacts:
        """The facts about one container of this host, whether it runs or not.

        Raises:
            WitnessError: no answer, or one that cannot be read or speaks of another host.
        """
        found = self._read(self._ask({"container": container}), facts.parse_server)
        if found.host != host or found.container != container:
            spoken = f"{found.host}/{found.container}"
            raise WitnessError(f"the exporter speaks of {spoken}; {host}/{container} was asked for")
        return found

    def _ask(self, about: dict[str, str]) -> httpx.Response:
        try:
            return self._client.get(f"{self._url}/evidence", params=about)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise WitnessError(f"the exporter at {self._url} does not answer: {error}") from None

    def _read(self, answer: httpx.Response, parse: Callable[[str], _Facts]) -> _Facts:
        if answer.status_code != httpx.codes.OK:
            raise WitnessError(f"the exporter at {self._url} says {answer.status_code}: {answer.text.strip()[:200]}")
        try:
            return parse(answer.text)
        except facts.FactsError as error:
            raise WitnessError(str(error)) from None
