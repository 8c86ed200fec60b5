"""Asks this host's own exporter, over loopback, what it sees of a worker or a server now.

The real gate before anything is done.
"""

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
"""How long the exporter may take to answer, seconds."""

PASSWORD_FILE_MAX: Final = 4096
"""The most that is read of a file with user and password, characters."""

_WATCHED: Final = frozenset({"gpuwarden_worker_alive", "gpuwarden_server_info", "gpuwarden_container_recyclable"})
"""The series of 1 for each worker that lives, for each server, and for each tenant that may be recycled."""


class WitnessError(GpuwardenError):
    """The exporter gave no usable answer; so nothing is known, and nothing is done."""


class WorkerUnseenError(WitnessError):
    """The exporter answered from a fresh look at the host, and sees no such worker."""


@dataclass(frozen=True, kw_only=True)
class Access:
    """What an exporter wants that has a web configuration (docs/exporter-web.md).

    Args:
        ca_file: the authorities, in PEM, one of which has signed its certificate; `None` for those of the system.
        server_name: the name in that certificate, where it is not the address that is asked.
        cert_file: our own certificate, with its key in `key_file`, where it wants one.
        key_file: see there; PEM, not encrypted.
        basic_auth_file: one line `user:password`, read with every question, so that it can be changed.
    """

    ca_file: Path | None = None
    server_name: str | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    basic_auth_file: Path | None = None


class Witness:
    """A client of one exporter's `/evidence`. Safe to share between threads.

    The files of `access` are looked at with each question, so that a renewed certificate is taken up without a restart.
    What cannot be used then leaves in force what was, and is said once.

    Raises:
        GpuwardenError: a file of `access` cannot be used, and why.
    """

    def __init__(self, exporter_url: str, access: Access | None = None) -> None:
        self._url = exporter_url.rstrip("/")
        self._access = access or Access()
        self._renewing = threading.Lock()
        files = (self._access.ca_file, self._access.cert_file, self._access.key_file)
        self._client = ReloadingFile(filter(None, files), partial(client, self._access, timeout_s=TIMEOUT_S))
        self._before: httpx.Client | None = None
        self._refused = ""

    def close(self) -> None:
        """Let go of the connections."""
        for each in (self._client.value, self._before):
            if each is not None:
                each.close()

    def workers(self) -> int:
        """How many containers with a live worker, a server, or a VRAM budget to answer for the exporter sees.

        A tenant can write as many workers' files as it likes, and counts once for each container it has.

        Raises:
            WitnessError: no answer, or one that cannot be read.
        """
        answer = self._get("/metrics")
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
        answer = self._get("/evidence", {"worker": worker})
        if answer.status_code == httpx.codes.NOT_FOUND:
            raise WorkerUnseenError(f"the exporter at {self._url} sees no worker {worker!r} on this host")
        found = self._read(answer, evidence.parse)
        if found.host != host or found.worker != worker:
            raise WitnessError(f"the exporter speaks of {found.host}/{found.worker}; {host}/{worker} was asked for")
        return found

    def about_server(self, container: str, *, host: str) -> ServerFacts:
        """The facts about one container of this host, whether it runs or not.

        Raises:
            WitnessError: no answer, or one that cannot be read or speaks of another host.
        """
        found = self._read(self._get("/evidence", {"container": container}), evidence.parse_server)
        if found.host != host or found.container != container:
            spoken = f"{found.host}/{found.container}"
            raise WitnessError(f"the exporter speaks of {spoken}; {host}/{container} was asked for")
        return found

    def _get(self, page: str, about: dict[str, str] | None = None) -> httpx.Response:
        try:
            return self._renewed().get(f"{self._url}{page}", params=about)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise WitnessError(f"the exporter at {self._url} does not answer: {error}") from None

    def _renewed(self) -> httpx.Client:
        """A client with the certificates as they are in the files now, or as they were when they last would do."""
        with self._renewing:
            before = self._client.value
            try:
                if not self._client.reload():
                    return before
            except GpuwardenError as error:
                if str(error) != self._refused:
                    log.warning("renewed certificates are not taken; those before stay", because=str(error))
                self._refused = str(error)
                return before
            if self._before is not None:
                self._before.close()
            # Not closed before the next renewal: another thread may be asking by it.
            self._before, self._refused = before, ""
            log.info("renewed certificates are in force", exporter=self._url)
            return self._client.value

    def _read(self, answer: httpx.Response, parse: Callable[[str], _Facts]) -> _Facts:
        if answer.status_code != httpx.codes.OK:
            raise WitnessError(f"the exporter at {self._url} says {answer.status_code}: {answer.text.strip()[:200]}")
        try:
            return parse(answer.text)
        except evidence.FactsError as error:
            raise WitnessError(str(error)) from None


def client(access: Access, *, timeout_s: float) -> httpx.Client:
    """One that asks an exporter as it wants to be asked, and nobody else.

    Raises:
        GpuwardenError: a file of `access` cannot be used, and why.
    """

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
    """User and password from a file, as it is with each question."""

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
            raise WitnessError(f"the exporter's basic auth file {self._path} cannot be read: {error}") from None
        user, colon, password = line.partition(":")
        if not (user and colon and password) or "\n" in line:
            raise WitnessError(f"the exporter's basic auth file {self._path} wants one line `user:password`")
        return user, password


def _tls(access: Access) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=access.ca_file)
        if access.cert_file is not None:
            context.load_cert_chain(access.cert_file, access.key_file, _encrypted)
    except OSError as error:
        named = ", ".join(str(each) for each in (access.ca_file, access.cert_file, access.key_file) if each)
        raise GpuwardenError(f"the exporter cannot be asked by TLS with {named}: {error}; PEM is wanted") from None
    return context


def _encrypted() -> Any:
    raise GpuwardenError("the key of --exporter-key-file is encrypted: write it without a password (`openssl pkey`)")
