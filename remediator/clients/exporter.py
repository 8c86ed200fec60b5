"""Client of this host's exporter: the current evidence about a worker or a container, checked before any action."""

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

import httpx
import structlog
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from gpuwarden import evidence
from gpuwarden.errors import GpuwardenError
from gpuwarden.evidence import OnDemandFacts, ServerFacts, WorkerFacts
from gpuwarden.files import ReloadingFile
from remediator.clients.exporter_access import ExporterAuth, ExporterError, connect

log: Final = structlog.get_logger("remediator")

_Facts = TypeVar("_Facts", WorkerFacts, ServerFacts, OnDemandFacts)

TIMEOUT_S: Final = 3.0
"""Timeout of a request, seconds."""

_GPU_SOURCES: Final = frozenset({"source_gpu", "source_drm"})
_FAILED: Final = ("gpuwarden_collector_success", 0.0)

_WATCHED: Final = frozenset({"gpuwarden_worker_alive", "gpuwarden_server_info", "gpuwarden_container_recyclable"})


@dataclass(frozen=True, kw_only=True)
class GpuHealth:
    """A GPU as the exporter shows it now. `xids` are the fatal ones since the exporter started."""

    listed: bool
    lost_s: float
    xids: tuple[str, ...]
    sample_age_s: float


class WorkerUnseenError(ExporterError):
    """The exporter's current sample has no such worker."""


@dataclass(frozen=True, kw_only=True)
class Targets:
    """What a host has: the number of containers with a live worker, a server or a VRAM budget, and all names."""

    containers: int
    names: frozenset[str]


class ExporterClient:
    """Client of one exporter's `/evidence`. Safe to share between threads.

    Certificates are reloaded when their files change. An invalid file is logged once, and the old one stays in use.

    Raises:
        GpuwardenError: a file of `access` is invalid.
    """

    def __init__(self, exporter_url: str, access: ExporterAuth | None = None) -> None:
        self._url = exporter_url.rstrip("/")
        self._access = access or ExporterAuth()
        self._renewing = threading.Lock()
        files = (self._access.ca_file, self._access.cert_file, self._access.key_file)
        self._client = ReloadingFile(filter(None, files), partial(connect, self._access, timeout_s=TIMEOUT_S))
        self._before: httpx.Client | None = None
        self._refused = ""

    def close(self) -> None:
        """Close the connections."""
        for each in (self._client.value, self._before):
            if each is not None:
                each.close()

    def list_targets(self) -> Targets:
        """List what the host has. Raises ExporterError."""
        samples = self._samples()
        watched = {
            sample.labels.get("container") or sample.labels.get("worker")
            for sample in samples
            if sample.name in _WATCHED and sample.value == 1
        }
        labels = ("worker", "container", "gpu", "tenant")
        names = {sample.labels.get(name, "") for sample in samples for name in labels}
        return Targets(containers=len(watched), names=frozenset(names - {""}))

    def gpu_sizes(self) -> dict[str, int | None]:
        """The memory of each GPU by UUID, bytes; `None` if it is unknown or the GPU is lost.

        MIG instances count instead of their GPU, whose memory they share.

        Raises:
            ExporterError: no usable answer, or the GPUs cannot be listed.
        """
        sizes: dict[str, int | None] = {}
        lost, split = set(), set()
        samples = self._samples()
        self._check_listed(samples)
        for sample in samples:
            gpu = sample.labels.get("gpu", "")
            if sample.name == "gpuwarden_gpu_info":
                sizes.setdefault(gpu, None)
            elif sample.name == "gpuwarden_gpu_mig_info":
                split.add(sample.labels["parent"])
            elif sample.name == "gpuwarden_gpu_memory_size_bytes":
                sizes[gpu] = int(sample.value)
            elif sample.name == "gpuwarden_gpu_lost_seconds" and sample.value > 0:
                lost.add(gpu)
        return {gpu: None if gpu in lost else sizes.get(gpu) for gpu in (sizes.keys() - split) | lost}

    def gpu_health(self, gpu: str) -> GpuHealth:
        """The faults of one GPU.

        Raises:
            ExporterError: no usable answer, or the GPUs cannot be listed.
        """
        samples = self._samples()
        self._check_listed(samples)
        fatal = {each.labels["xid"] for each in samples if each.name == "gpuwarden_gpu_xid_fatal_info"}
        its = [each for each in samples if each.labels.get("gpu") == gpu]
        xids = {each.labels["xid"] for each in its if each.name == "gpuwarden_gpu_xid_errors_total" and each.value > 0}
        return GpuHealth(
            listed=any(each.name == "gpuwarden_gpu_info" for each in its),
            lost_s=next((each.value for each in its if each.name == "gpuwarden_gpu_lost_seconds"), 0.0),
            xids=tuple(sorted(xids & fatal, key=int)),
            sample_age_s=next(
                (each.value for each in samples if each.name == "gpuwarden_sample_age_seconds"), math.inf
            ),
        )

    def _check_listed(self, samples: Sequence[Sample]) -> None:
        for each in samples:
            if each.labels.get("collector") in _GPU_SOURCES and (each.name, each.value) == _FAILED:
                raise ExporterError(f"the exporter at {self._url} cannot list the GPUs: see its log")

    def worker_evidence(self, worker: str, *, host: str) -> WorkerFacts:
        """Return the evidence about one worker of this host.

        Raises:
            WorkerUnseenError: the exporter does not list the worker.
            ExporterError: no usable answer, or one about another host.
        """
        answer = self._get("/evidence", {"worker": worker})
        if answer.status_code == httpx.codes.NOT_FOUND:
            raise WorkerUnseenError(f"the exporter at {self._url} lists no worker {worker!r} on this host")
        found = self._read(answer, evidence.parse)
        if found.host != host or found.worker != worker:
            raise ExporterError(f"the exporter returned {found.host}/{found.worker} for {host}/{worker}")
        return found

    def container_evidence(self, container: str, *, host: str) -> ServerFacts:
        """Return the evidence about one container of this host, running or not.

        Raises:
            ExporterError: no usable answer, or one about another host.
        """
        found = self._read(self._get("/evidence", {"container": container}), evidence.parse_server)
        if found.host != host or found.container != container:
            found_name = f"{found.host}/{found.container}"
            raise ExporterError(f"the exporter returned {found_name} for {host}/{container}")
        return found

    def on_demand_evidence(self, tenant: str, *, host: str) -> OnDemandFacts:
        """Return the evidence about one tenant on demand of this host.

        Raises:
            ExporterError: no usable answer, or one about another host.
        """
        answer = self._get("/evidence", {"tenant": tenant})
        if answer.status_code == httpx.codes.NOT_FOUND:
            raise ExporterError(f"the exporter at {self._url} lists no tenant on demand {tenant!r} on this host")
        found = self._read(answer, evidence.parse_on_demand)
        if found.host != host or found.tenant != tenant:
            raise ExporterError(f"the exporter returned {found.host}/{found.tenant} for {host}/{tenant}")
        return found

    def _samples(self) -> list[Sample]:
        answer = self._get("/metrics")
        if answer.status_code != httpx.codes.OK:
            raise ExporterError(
                f"the exporter at {self._url} returned {answer.status_code}: {answer.text.strip()[:200]}"
            )
        try:
            families = list(text_string_to_metric_families(answer.text))
        except ValueError as error:
            raise ExporterError(f"the exporter at {self._url} returned an invalid metrics page: {error}") from None
        return [sample for family in families for sample in family.samples]

    def _get(self, page: str, about: dict[str, str] | None = None) -> httpx.Response:
        try:
            return self._renewed().get(f"{self._url}{page}", params=about)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ExporterError(f"the exporter at {self._url} is unreachable: {error}") from None

    def _renewed(self) -> httpx.Client:

        with self._renewing:
            before = self._client.value
            try:
                if not self._client.reload():
                    return before
            except GpuwardenError as error:
                if str(error) != self._refused:
                    log.warning("certificate reload failed, old certificates in use", reason=str(error))
                self._refused = str(error)
                return before
            if self._before is not None:
                self._before.close()
            # Closed at the next renewal: another thread may use it now.
            self._before, self._refused = before, ""
            log.info("certificates reloaded", exporter=self._url)
            return self._client.value

    def _read(self, answer: httpx.Response, parse: Callable[[str], _Facts]) -> _Facts:
        if answer.status_code != httpx.codes.OK:
            raise ExporterError(
                f"the exporter at {self._url} returned {answer.status_code}: {answer.text.strip()[:200]}"
            )
        try:
            return parse(answer.text)
        except evidence.FactsError as error:
            raise ExporterError(str(error)) from None
