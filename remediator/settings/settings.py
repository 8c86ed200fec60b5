"""The remediator's settings: name, default and help. Set as options or as GPUWARDEN_REMEDIATOR_… variables."""

import os
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

import httpx
from pydantic import BeforeValidator, Field, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    CliImplicitFlag,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from gpuwarden.job import AVOID_S, WATCHDOG_RETRIES_MAX
from gpuwarden.reporter import state_directory
from gpuwarden.settings import engine, namespaces, services, split
from remediator.payload import ALERTS_MAX
from remediator.pending_pods import PENDING_S
from remediator.remedies.wrangle import ACTIVATION, MIGRATIONS_MAX, TIMEOUT_S
from remediator.seats import NODE_LABELS, RESERVE_MIB, RESOURCE

STOP_MARGIN_S: Final = 15.0
"""Minimum difference of settle_timeout_s and stop_grace_s, seconds."""


def _config(program: str) -> SettingsConfigDict:
    return SettingsConfigDict(
        env_prefix="GPUWARDEN_REMEDIATOR_",
        cli_prog_name=program,
        cli_kebab_case=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        extra="forbid",
    )


_Urls = Annotated[tuple[str, ...], NoDecode, BeforeValidator(split)]
"""Separated by commas, or in repeated options."""


def _check_addresses(urls: tuple[str, ...], *, option: str, example: str) -> None:
    for number, each in enumerate(urls, start=1):
        try:
            url = httpx.URL(each)
        except httpx.InvalidURL:
            url = httpx.URL()
        if url.scheme not in ("http", "https") or not url.host:
            # The URL is not repeated: it may contain a password.
            raise ValueError(f"{option}: URL {number} is invalid; expected one as {example}")


class CommonSettings(BaseSettings):
    """Settings of both processes."""

    model_config = _config("gpuwarden remediator")

    runtime_dir: Path = Field(
        default_factory=state_directory,
        description="folder with the file `host`, which holds this host's name; also set by $GPUWARDEN_RUNTIME_DIR",
    )
    ledger: str = Field(
        description="database URL of the ledger: sqlite:////var/lib/gpuwarden/ledger.db for one host, "
        "postgresql://user@server/database for several"
    )
    allow_shared_role: CliImplicitFlag[bool] = Field(
        default=False,
        description="start although the queue's PostgreSQL role may write the ledger; every worker can then arm hosts "
        "(docs/how-to/secure.md)",
    )
    wrangle_activation: int = Field(
        default=ACTIVATION,
        ge=0,
        le=999_999,
        description="failed items of a run that a worker may have before gpuwarden judges both; same for `serve` and "
        "`execute`",
    )
    budget_resource: str = Field(
        default=RESOURCE,
        pattern=r"^[a-z0-9.-]+/[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="extended resource of the seats, whole MiB; same for the exporter",
    )
    log_level: str = Field(
        default="info",
        pattern="^(debug|info|warning|error)$",
        description="minimum log level: debug, info, warning or error",
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Workers and the remediator share $GPUWARDEN_QUEUE_DB; the option and the prefixed variable come first."""
        shared = os.environ.get("GPUWARDEN_QUEUE_DB")
        return init_settings, env_settings, InitSettingsSource(settings_cls, {"queue_db": shared} if shared else {})

    @model_validator(mode="after")
    def _check_alertmanager_urls(self) -> Self:
        _check_addresses(getattr(self, "alertmanager", ()), option="--alertmanager", example="http://127.0.0.1:9093")
        return self


class ServeSettings(CommonSettings):
    """Receive alerts from Alertmanager and store them. Takes no action."""

    model_config = _config("gpuwarden remediator serve")

    listen: str = Field(
        default="127.0.0.1", description="address to listen on; 0.0.0.0 is all IPv4 addresses, :: all addresses"
    )
    port: int = Field(default=9836, ge=0, le=65535, description="port to listen on; 0 for a free one")
    web_config_file: Path = Field(
        description="Prometheus web configuration file with TLS and the credentials of Alertmanager; reloaded when it "
        "changes (docs/how-to/secure.md)",
    )
    body_max_bytes: int = Field(default=4 * 2**20, ge=1024, description="maximum size of a webhook body, bytes")
    alerts_max: int = Field(
        default=ALERTS_MAX, ge=1, description="maximum alerts in a webhook body; larger bodies are refused"
    )
    executor_down_s: float = Field(
        default=60.0,
        ge=5,
        le=86400,
        description="an alert fires if an executor has no heartbeat for this long, seconds",
    )
    intent_overdue_s: float = Field(
        default=900.0,
        ge=5,
        le=604800,
        description="an alert fires if a restart or settle takes longer, seconds; above grace period, "
        "settle_timeout_s and twice restart_timeout_s together",
    )
    alertmanager: _Urls = Field(
        default=(),
        description="URLs of the Alertmanagers, comma-separated or repeated: queried for alerts that a call left out "
        "(`max_alerts`)",
    )
    queue_db: str | None = Field(
        default=None,
        description="database URL of the job queue, for its metrics at /metrics; also set by $GPUWARDEN_QUEUE_DB",
    )
    pending_pods: CliImplicitFlag[bool] = Field(
        default=False,
        description="publish the pods of the Kubernetes cluster that wait for GPU memory; needs `list` of pods",
    )
    pod_pending_s: float = Field(
        default=PENDING_S,
        ge=5,
        le=604800,
        description="an alert fires if a pod waits for GPU memory for this long, seconds",
    )
    notify_file: Path | None = Field(
        default=None,
        description="TOML file with the mail server and the addresses of people to notify; reloaded when it changes "
        "(docs/how-to/notifications.md)",
    )


class ExecuteSettings(CommonSettings):
    """Process open episodes and act on this host's containers. A lock allows one executor per host."""

    model_config = _config("gpuwarden remediator execute")

    armed: CliImplicitFlag[bool] = Field(
        default=False,
        description="arm every remedy on this host if it has no arming order yet; later use `gpuwarden arm` "
        "(docs/how-to/go-live.md)",
    )
    policy: Path | None = Field(
        default=None,
        description="TOML file with settings of single remedies; reloaded within a second of a change "
        "(docs/reference/remedies.md)",
    )
    host_lost_after_s: float = Field(
        default=180.0,
        ge=10,
        le=480,
        description="seconds without contact until a silent host's job is lost, at least 120 below the job lease",
    )
    retention_days: int = Field(
        default=90,
        ge=0,
        le=36500,
        description="days to keep closed episodes and refused alerts; 0: no limit. On a shared ledger the smallest "
        "value applies",
    )
    queue_db: str = Field(
        description="database URL of the job queue: sqlite:////var/lib/gpuwarden/queue.db for one host, "
        "postgresql://user@server/database for several; also set by $GPUWARDEN_QUEUE_DB",
    )
    exporter: str = Field(default="http://127.0.0.1:29835", description="URL of this host's exporter")
    exporter_ca_file: Path | None = Field(
        default=None,
        description="PEM file of the authorities that sign the exporter's certificate; default: the system's",
    )
    exporter_server_name: str | None = Field(
        default=None, description="name in the exporter's certificate, if it differs from the URL"
    )
    exporter_cert_file: Path | None = Field(
        default=None, description="PEM client certificate, if the exporter requires one"
    )
    exporter_key_file: Path | None = Field(
        default=None, description="PEM key of the client certificate, without a password"
    )
    exporter_basic_auth_file: Path | None = Field(
        default=None,
        description="file with one line `user:password` for the exporter; read for every request",
    )
    prometheus: _Urls = Field(
        default=(),
        description="URLs of Prometheus servers that scrape this host, comma-separated or repeated: a capture saves "
        "their metric history",
    )
    alertmanager: _Urls = Field(
        default=(),
        description="URLs of the Alertmanagers, comma-separated or repeated: queried before an action; silenced "
        "actions wait",
    )
    silences_unknown: Literal["act", "hold"] = Field(
        default="act",
        description="what to do while an Alertmanager cannot be queried for silences: act, or hold all actions",
    )
    docker: str = Field(default="unix:///var/run/docker.sock", description="Docker's socket; 'none' without Docker")
    podman: str = Field(
        default="none",
        description="Podman's socket, such as unix:///run/podman/podman.sock (`systemctl enable --now podman.socket`); "
        "'none' without Podman",
    )
    systemd_unit: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(),
        description="systemd services of workers, such as 'gpu-worker@*.service', comma-separated or repeated; other "
        "services are never touched",
    )
    node_name: str = Field(
        default="",
        description="this node's name in Kubernetes; empty outside of Kubernetes (docs/how-to/kubernetes.md)",
    )
    seats: Literal["off", "dry-run", "on"] = Field(
        default="dry-run",
        description="advertise the node's GPU memory to the scheduler: 'on', 'off', or 'dry-run', which logs what it "
        "would advertise; needs --node-name",
    )
    seats_reserve_mib: int = Field(
        default=RESERVE_MIB, ge=0, description="memory of each GPU that pods may not declare, MiB"
    )
    seats_node_labels: Annotated[tuple[str, ...], NoDecode, BeforeValidator(split)] = Field(
        default=NODE_LABELS,
        description="labels of nodes with a GPU, comma-separated or repeated; a node needs one of them",
    )
    seats_several_gpus: CliImplicitFlag[bool] = Field(
        default=False,
        description="advertise the sum of several GPUs; two pods may then meet on one GPU without room for both",
    )
    task_dir: Annotated[tuple[Path, ...], NoDecode, BeforeValidator(split)] = Field(
        default=(),
        description="folders with task files of other runners, comma-separated or repeated; `gpuwarden host end-task` "
        "can end these tasks (docs/how-to/unscraped-hosts.md)",
    )
    gateway: str | None = Field(
        default=None,
        description="address of a central gateway that has these orders; default: they are read from --queue-db",
    )
    token_file: Path | None = Field(
        default=None, description="file with this host's token, for --gateway; `gpuwarden host enrol` makes one"
    )
    ca_file: Path | None = Field(
        default=None,
        description="authorities that signed the certificate of --gateway; default: those of the system",
    )
    pod_namespaces: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(),
        description="namespaces whose pods may be evicted, comma-separated or repeated; same for the exporter; needs "
        "--node-name (docs/how-to/evict-pods.md)",
    )
    demand_gate_namespaces: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(),
        description="namespaces whose Deployments may be tenants on demand; same for the exporter "
        "(docs/how-to/share-gpu-memory.md)",
    )
    evict: Literal["evict", "delete"] = Field(
        default="evict",
        description="how a pod is ended: 'evict' waits for PodDisruptionBudgets, 'delete' ignores them",
    )
    pod_ready_timeout_s: float = Field(
        default=600.0,
        gt=0,
        le=86400,
        description="time for the controller of an evicted pod to have another one ready, seconds; after that, an "
        "alert fires",
    )
    interval_s: float = Field(
        default=1.0,
        gt=0,
        le=5,  # each tick writes a heartbeat; after 15 s other hosts count us as dead
        description="time between checks of an open episode, seconds",
    )
    sweep_interval_s: float = Field(
        default=5.0, gt=0, le=600, description="time between checks for expired leases and old queue events, seconds"
    )
    stop_grace_s: float = Field(default=10.0, ge=0, le=600, description="time between SIGTERM and SIGKILL, seconds")
    evidence_fresh_s: float = Field(
        default=5.0,
        gt=0,
        le=60,
        description="maximum age of an exporter sample, seconds; with an older one gpuwarden does not act",
    )
    settle_timeout_s: float = Field(
        default=60.0,
        gt=0,
        le=86400,
        description="time until a fenced job is requeued or failed even if its process exit is unconfirmed, seconds",
    )
    restart_timeout_s: float = Field(
        default=120.0,
        gt=0,
        le=86400,
        description="a restart without progress for this long is abandoned, and an alert fires, seconds",
    )
    gpu_lost_s: float = Field(
        default=60.0,
        gt=0,
        le=86400,
        description="a GPU that has been lost for this long is quarantined, seconds; until then its processes count "
        "as alive",
    )
    retries_max: int = Field(
        default=WATCHDOG_RETRIES_MAX,
        ge=0,
        description="number of times that gpuwarden requeues a job before it fails the job",
    )
    requeue_avoid_gpu_s: float = Field(
        default=AVOID_S,
        ge=0,
        le=86400,
        description="a requeued job avoids its old GPUs for this long, if other workers can run it, seconds",
    )

    cooldown_s: float = Field(
        default=300.0,
        ge=0,
        le=86400,
        description="minimum time between two restarts of a container, seconds; 0 is off; none after a crash",
    )
    vram_cooldown_s: float = Field(
        default=120.0,
        ge=0,
        le=86400,
        description="minimum time between two evictions for the memory of one GPU, seconds; 0 turns it off",
    )
    breaker_targets: int = Field(
        default=3,
        ge=1,
        description="containers that may need a restart within the window, or breaker_share of workers if more; one "
        "more opens the breaker",
    )
    breaker_share: float = Field(
        default=0.25,
        ge=0,
        le=1,
        description="share of all workers that may need a restart within the window, a ratio from 0 to 1",
    )
    breaker_window_s: float = Field(default=600.0, gt=0, le=86400, description="window of the circuit breaker, seconds")
    breaker_restarts: int = Field(
        default=6,
        ge=1,
        description="restarts allowed within an hour, or the number of workers if more; beyond that the circuit "
        "breaker opens",
    )
    wrangle_migrations_max: int = Field(
        default=MIGRATIONS_MAX,
        ge=0,
        le=999_999,
        description="moves of a run without a finished item to another worker; after that, the run is blocked",
    )
    wrangle_timeout_s: float = Field(
        default=TIMEOUT_S,
        ge=0,
        le=604800,
        description="a worker that runs a job for this long without an item result does not count as failing, seconds",
    )

    capture_s: float = Field(
        default=5.0,
        ge=0,
        le=60,
        description="time limit of a capture of stacks and logs before a stop, seconds; 0 turns captures off",
    )
    capture_max_bytes: int = Field(
        default=256 * 2**10, ge=16 * 2**10, le=16 * 2**20, description="maximum size of a capture, bytes"
    )
    capture_range_s: float = Field(
        default=900.0,
        ge=0,
        le=86400,
        description="metric history in a capture, before and after the alert, seconds; 0 saves none; needs "
        "--prometheus",
    )
    job_logs: Path | None = Field(
        default=None,
        description="folder of the job logs (`gpuwarden worker run --logs`), for captures; default: the container's "
        "log",
    )

    @model_validator(mode="after")
    def _check_prometheus_urls(self) -> Self:
        _check_addresses(self.prometheus, option="--prometheus", example="http://127.0.0.1:9090")
        return self

    @property
    def seats_on(self) -> bool:
        """Whether the executor advertises the GPU memory of its node."""
        return bool(self.node_name) and self.seats == "on"

    @field_validator("docker", "podman")
    @classmethod
    def _check_engine(cls, found: str) -> str:
        return engine(found, words=("none",))

    @model_validator(mode="after")
    def _check_gateway(self) -> Self:
        if (self.gateway is None) != (self.token_file is None):
            raise ValueError("--gateway and --token-file go together: `gpuwarden host enrol HOST` makes a token")
        if self.gateway is not None and not self.task_dir:
            raise ValueError("--gateway needs --task-dir: its orders are to end tasks")
        return self

    @field_validator("pod_namespaces", "demand_gate_namespaces", mode="before")
    @classmethod
    def _split_namespaces(cls, found: Any) -> Any:
        return namespaces(found)

    @field_validator("systemd_unit", mode="before")
    @classmethod
    def _split_units(cls, found: Any) -> Any:
        return services(found)

    @model_validator(mode="after")
    def _check_exporter_tls(self) -> Self:
        if (self.exporter_cert_file is None) != (self.exporter_key_file is None):
            raise ValueError("set both --exporter-cert-file and --exporter-key-file, or neither")
        by_tls = (self.exporter_ca_file, self.exporter_server_name, self.exporter_cert_file)
        if any(by_tls) and not self.exporter.startswith("https://"):
            raise ValueError("--exporter-ca-file, -server-name and -cert-file need --exporter https://127.0.0.1:PORT")
        return self

    @model_validator(mode="after")
    def _check_node_name(self) -> Self:
        if self.pod_namespaces and not self.node_name:
            raise ValueError("--pod-namespaces needs --node-name: only pods of this node are evicted")
        return self

    @model_validator(mode="after")
    def _check_timeouts(self) -> Self:
        """A settle must wait for the stop's grace period and for the exporter to see the exit."""
        if not self.stop_grace_s + STOP_MARGIN_S <= self.settle_timeout_s <= self.restart_timeout_s:
            raise ValueError(
                f"stop_grace_s ({self.stop_grace_s:g}) + {STOP_MARGIN_S:g} s must not exceed settle_timeout_s "
                f"({self.settle_timeout_s:g}), and that must not exceed restart_timeout_s ({self.restart_timeout_s:g})"
            )
        return self
