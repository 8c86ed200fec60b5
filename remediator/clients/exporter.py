"""Client of this host's exporter: the current evidence about a worker or a container, checked before any action."""

import ssl
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import httpx
import structlog
from prometheus_client.parser import text_string_to_metric_families

from gpuwarden import evidence
from gpuwarden.errors import GpuwardenError
from gpuwarden.evidence import ServerFacts, WorkerFacts
from gpuwarden.files import ReloadingFile

log: Final = structlog.get_logger("remediator")

_Facts = TypeVar("_Facts", WorkerFacts, ServerFacts)

TIMEOUT_S: Final = 3.0
"""Timeout of a request, seconds."""

PASSWORD_FILE_MAX: Final = 4096

_WATCHED: Final = frozenset({"gpuwarden_worker_alive", "gpuwarden_server_info", "gpuwarden_container_recyclable"})


class ExporterError(GpuwardenError):
    """The exporter gave no usable answer."""


class WorkerUnseenError(ExporterError):
    """The exporter's current sample has no such worker."""


@dataclass(frozen=True, kw_only=True)
class ExporterAuth:
    """TLS and authentication for an exporter with a web configuration (docs/how-to/secure.md). Files are PEM.

    Args:
        ca_file: trusted authorities; `None` for the system's.
        server_name: name in the exporter's certificate, if not the address.
        cert_file: client certificate.
        key_file: its key, without a password.
        basic_auth_file: one line `user:password`, read for every request.
    """

    ca_file: Path | None = None
    server_name: str | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    basic_auth_file: Path | None = None


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
        self._client = ReloadingFile(filter(None, files), partial(client, self._access, timeout_s=TIMEOUT_S))
        self._before: httpx.Client | None = None
        self._refused = ""

    def close(self) -> None:
        """Close the connections."""
        for each in (self._client.value, self._before):
            if each is not None:
                each.close()

    def count_containers(self) -> int:
        """Count the containers with a live worker, a server or a VRAM budget. Raises ExporterError."""
        answer = self._get("/metrics")
        if answer.status_code != httpx.codes.OK:
            raise ExporterError(
                f"the exporter at {self._url} returned {answer.status_code}: {answer.text.strip()[:200]}"
            )
        try:
            families = list(text_string_to_metric_families(answer.text))
        except ValueError as error:
            raise ExporterError(f"the exporter at {self._url} returned an invalid metrics page: {error}") from None
        samples = [sample for family in families for sample in family.samples]
        return len(
            {
                sample.labels.get("container") or sample.labels.get("worker")
                for sample in samples
                if sample.name in _WATCHED and sample.value == 1
            }
        )

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


def client(access: ExporterAuth, *, timeout_s: float) -> httpx.Client:
    """Build an HTTP client for one exporter. Raises GpuwardenError if a file of `access` is invalid."""

    def by_name(request: httpx.Request) -> None:
        request.extensions["sni_hostname"] = access.server_name

    return httpx.Client(
        timeout=timeout_s,
        trust_env=False,
        verify=_tls(access),
        auth=None if access.basic_auth_file is None else _BasicAuth(access.basic_auth_file),
        event_hooks={"request": [] if access.server_name is None else [by_name]},
    )


class _BasicAuth(httpx.Auth):
    """User and password from a file, read for every request."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read()

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        user, password = self._read()
        yield from httpx.BasicAuth(user, password).auth_flow(request)

    def _read(self) -> tuple[str, str]:
        try:
            with self._path.open(encoding="utf-8") as file:
                line = file.read(PASSWORD_FILE_MAX).strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ExporterError(f"the exporter's basic auth file {self._path} cannot be read: {error}") from None
        user, colon, password = line.partition(":")
        if not (user and colon and password) or "\n" in line:
            raise ExporterError(f"the exporter's basic auth file {self._path} must have one line `user:password`")
        return user, password


def _tls(access: ExporterAuth) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=access.ca_file)
        if access.cert_file is not None:
            context.load_cert_chain(access.cert_file, access.key_file, _encrypted)
    except OSError as error:
        named = ", ".join(str(each) for each in (access.ca_file, access.cert_file, access.key_file) if each)
        raise GpuwardenError(f"invalid TLS files for the exporter, PEM expected: {named}: {error}") from None
    return context


def _encrypted() -> Any:
    raise GpuwardenError("the key of --exporter-key-file is encrypted: remove its password with `openssl pkey`")
