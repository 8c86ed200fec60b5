"""Asks this host's own exporter, over loopback, what it sees of a worker now. The real gate before anything is done."""

from typing import Final

import httpx

from gpuwarden import facts
from gpuwarden.errors import GpuwardenError
from gpuwarden.facts import WorkerFacts

TIMEOUT_S: Final = 3.0
"""How long the exporter may take to answer, seconds."""

WORKER_SERIES: Final = "gpuwarden_worker_info{"
"""How each line of the exporter's page begins that tells a worker."""


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
        """How many workers of this host the exporter sees, dead ones included.

        Raises:
            WitnessError: no answer, or one that cannot be read.
        """
        try:
            answer = self._client.get(f"{self._url}/metrics")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise WitnessError(f"the exporter at {self._url} does not answer: {error}") from None
        if answer.status_code != httpx.codes.OK:
            raise WitnessError(f"the exporter at {self._url} says {answer.status_code}: {answer.text.strip()[:200]}")
        return sum(line.startswith(WORKER_SERIES) for line in answer.text.splitlines())

    def about(self, worker: str, *, host: str) -> WorkerFacts:
        """The facts about one worker of this host.

        Raises:
            WorkerUnseenError: no such worker is seen.
            WitnessError: no answer, or one that cannot be read or speaks of another host.
        """
        try:
            answer = self._client.get(f"{self._url}/evidence", params={"worker": worker})
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise WitnessError(f"the exporter at {self._url} does not answer: {error}") from None
        if answer.status_code == httpx.codes.NOT_FOUND:
            raise WorkerUnseenError(f"the exporter at {self._url} sees no worker {worker!r} on this host")
        if answer.status_code != httpx.codes.OK:
            raise WitnessError(f"the exporter at {self._url} says {answer.status_code}: {answer.text.strip()[:200]}")
        try:
            found = facts.parse(answer.text)
        except facts.FactsError as error:
            raise WitnessError(str(error)) from None
        if found.host != host or found.worker != worker:
            raise WitnessError(f"the exporter speaks of {found.host}/{found.worker}; {host}/{worker} was asked for")
        return found
