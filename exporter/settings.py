"""The exporter's settings, as options or environment variables (GPUWARDEN_EXPORTER_…)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, CliImplicitFlag, NoDecode, SettingsConfigDict

from exporter.model.thresholds import Thresholds
from exporter.model.timeouts import PhaseTimeouts
from gpuwarden.errors import GpuwardenError
from gpuwarden.fields import made_from
from gpuwarden.http.address import checked_address
from gpuwarden.kube.budget import RESOURCE, BudgetSources
from gpuwarden.reporter import state_directory
from gpuwarden.settings import engine, namespaces, services, split, unknown_names

PREFIX: Final = "GPUWARDEN_EXPORTER_"
"""Prefix of the environment variables."""

KIB: Final = 2**10
MIB: Final = 2**20


class Settings(BaseSettings):
    """Publish this host's workers, containers and GPUs to Prometheus."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        cli_prog_name="gpuwarden exporter",
        cli_kebab_case=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
    )

    runtime_dir: Path = Field(
        default_factory=state_directory,
        description="folder of the state files and the host key; also set by $GPUWARDEN_RUNTIME_DIR",
    )
    listen: str = Field(
        default="127.0.0.1",
        description="address to listen on: 0.0.0.0 for IPv4, :: for IPv4 and IPv6. /evidence answers loopback only",
    )
    # Not 9100 to 9999, where Prometheus' list of default ports is full. Below 30000, where Kubernetes (node ports) and
    # Linux (ephemeral ports) begin to assign.
    port: int = Field(default=29835, ge=0, le=65535, description="port to listen on; 0 selects a free one")
    web_config_file: Path | None = Field(
        default=None,
        description="Prometheus web configuration file with TLS, passwords and tokens; reloaded when it changes "
        "(docs/how-to/secure.md)",
    )
    sample_interval_s: float = Field(default=1.0, gt=0, le=2, description="seconds between two samples of the host")
    log_level: str = Field(
        default="info",
        pattern="^(debug|info|warning|error)$",
        description="lowest level to log: debug, info, warning or error",
    )

    push: str | None = Field(
        default=None,
        description="address of a central gateway that gets the metrics, for a host that cannot be scraped "
        "(docs/how-to/unscraped-hosts.md)",
    )
    token_file: Path | None = Field(
        default=None, description="file with this host's token, for --push; `gpuwarden host enrol` makes one"
    )
    ca_file: Path | None = Field(
        default=None,
        description="authorities that signed the certificate of --push; default: those of the system",
    )
    push_interval_s: float = Field(default=10.0, ge=1, le=30, description="seconds between two reports to --push")
    push_tasks: CliImplicitFlag[bool] = Field(
        default=True, description="report the tasks of --task-dir to --push; --no-push-tasks leaves them out"
    )

    docker: str = Field(
        default="auto",
        description="Docker's socket; 'none' disables it; 'auto' uses /var/run/docker.sock when it or a Docker "
        "container appears",
    )
    podman: str = Field(
        default="none",
        description="Podman's socket, such as unix:///run/podman/podman.sock (`systemctl enable --now podman.socket`); "
        "'none' disables it",
    )
    systemd_unit: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(),
        description="systemd services that use GPUs, such as 'gpu-worker@*.service', comma-separated or repeated; "
        "each counts as one container",
    )
    task_dir: Annotated[tuple[Path, ...], NoDecode] = Field(
        default=(),
        description="folders with task files of other runners, comma-separated or repeated (docs/reference/formats.md)",
    )

    pods: Literal["auto", "off", "logs", "api"] = Field(
        default="auto",
        description="source of pods: 'api', 'logs' (/var/log/containers, without budgets), 'off', or 'auto': 'api' "
        "with --node-name, else 'logs' (docs/how-to/containers.md)",
    )
    kubeconfig: Path | None = Field(
        default=None,
        description="file with the address and the credentials of the Kubernetes API; default: $KUBECONFIG, or the "
        "pod's service account",
    )
    node_name: str = Field(default="", description="this node's name in Kubernetes; required with --pods api")
    pod_resources: str = Field(
        default="auto",
        description="the kubelet's socket with the GPUs of pods; 'none' disables it; 'auto' uses "
        "/var/lib/kubelet/pod-resources/kubelet.sock when it appears",
    )
    budget_resource: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(RESOURCE,),
        description="resources with a pod's VRAM budget, whole MiB; the first that it has counts; HAMi has "
        "nvidia.com/gpumem",
    )
    budget_annotation: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(),
        description="annotations of pods with the budget, after --budget-resource; KAI has gpu-memory",
    )

    pod_namespaces: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(),
        description="namespaces whose pods may be evicted, comma-separated or repeated; same for the executor; needs "
        "--pods api",
    )

    demand_gate_namespaces: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(),
        description="namespaces whose Deployments may be tenants on demand; same for the executor; needs --pods api "
        "(docs/how-to/share-gpu-memory.md)",
    )

    nvml: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="read NVIDIA GPUs: 'auto' if the driver's library can be loaded; 'on' fails without it "
        "(docs/reference/gpus.md)",
    )
    nvml_timeout_s: float = Field(
        default=10.0,
        ge=0.1,
        le=60,
        description="seconds for one read of the NVIDIA GPUs, until its process is killed",
    )
    amd: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="read AMD GPUs from the kernel: 'auto' if there are any at the start; 'on' fails without one "
        "(docs/reference/gpus.md)",
    )
    intel: Literal["auto", "on", "off"] = Field(
        default="auto", description="read Intel GPUs from the kernel, as --amd (docs/reference/gpus.md)"
    )
    kernel_timeout_s: float = Field(
        default=10.0,
        ge=0.1,
        le=60,
        description="seconds for one read of the AMD and Intel GPUs, until its process is killed",
    )
    simulate_gpu: Path | None = Field(
        default=None,
        description="read GPUs from this file instead of a driver; marked as simulated (docs/how-to/simulate-gpus.md)",
    )

    gpu_idle_ratio: float = Field(
        default=Thresholds.gpu_idle_ratio, ge=0, lt=1, description="a GPU is idle up to this utilisation"
    )
    gpu_saturated_ratio: float = Field(
        default=Thresholds.gpu_saturated_ratio,
        gt=0,
        le=1,
        description="a GPU is saturated from this utilisation on; above --gpu-idle-ratio",
    )
    ram_idle_mib: int = Field(
        default=Thresholds.ram_idle_bytes // MIB, ge=0, description="RAM is idle up to this change, MiB"
    )
    io_idle_kib_per_s: float = Field(
        default=Thresholds.io_idle_bytes_per_s / KIB,
        ge=0,
        description="I/O of a container is idle up to this rate, KiB per second over 10 s",
    )
    page_faults_idle_per_s: float = Field(
        default=Thresholds.page_faults_idle_per_s,
        ge=0,
        description="page faults of a container are idle up to this rate, per second over 10 s",
    )
    cpu_idle_ratio: float = Field(
        default=Thresholds.cpu_idle_ratio,
        ge=0,
        description="CPU time of a container is idle up to this share of one CPU over 10 s",
    )

    dead_after_s: float = Field(
        default=Thresholds.dead_after_s,
        gt=0,
        le=3600,
        description="a worker with a job is dead after this many seconds without heartbeat and CPU time, or without "
        "its process",
    )
    health_window_s: float = Field(
        default=Thresholds.health_window_s,
        gt=0,
        le=86400,
        description="seconds without activity of its container until a GPU job is unhealthy",
    )
    health_grace_s: float = Field(
        default=Thresholds.health_grace_s,
        ge=0,
        le=86400,
        description="seconds from an attempt's start for its load and first step",
    )
    load_timeout_s: float = Field(
        default=PhaseTimeouts.load_s,
        ge=0,
        le=86400,
        description="seconds without activity in the phase load, if longer than the job's stall timeout; a job may "
        "set another value",
    )
    eval_timeout_s: float = Field(
        default=PhaseTimeouts.eval_s, ge=0, le=86400, description="as --load-timeout-s, in the phase eval, seconds"
    )
    checkpoint_timeout_s: float = Field(
        default=PhaseTimeouts.checkpoint_s,
        ge=0,
        le=86400,
        description="as --load-timeout-s, in the phase checkpoint, seconds",
    )
    save_timeout_s: float = Field(
        default=PhaseTimeouts.save_s, ge=0, le=86400, description="as --load-timeout-s, in the phase save, seconds"
    )
    busy_timeout_s: float = Field(
        default=PhaseTimeouts.busy_s,
        ge=0,
        le=86400,
        description="heavy I/O or computing is activity for this time without a step, seconds; the job may set it; "
        "0: off",
    )
    stuck_min_s: float = Field(
        default=PhaseTimeouts.stuck_min_s,
        gt=0,
        le=86400,
        description="minimum seconds without a step until a job with earlier steps is stuck "
        "(docs/reference/conditions.md)",
    )
    stuck_factor: float = Field(
        default=PhaseTimeouts.stuck_factor,
        ge=0,
        le=1000,
        description="a job is stuck only after this many times its longest step or phase: 1 to 1000; 0 disables it",
    )

    vram_floor_mib: int = Field(
        default=Thresholds.vram_floor_bytes // MIB,
        ge=0,
        description="minimum free memory of a GPU, MiB. Below it the container most over budget is reported; 0 "
        "disables it (docs/how-to/share-gpu-memory.md)",
    )
    vram_tie_mib: int = Field(
        default=Thresholds.vram_tie_bytes // MIB,
        ge=0,
        description="two containers are equally over their VRAM budgets up to this difference, MiB",
    )
    vram_return_s: float = Field(
        default=Thresholds.vram_return_s,
        ge=0,
        le=600,
        description="maximum time for the driver to free the memory of ended processes, seconds; 0 disables it "
        "(docs/how-to/share-gpu-memory.md)",
    )

    demand_gate_after_s: float = Field(
        default=Thresholds.demand_gate_after_s,
        ge=0,
        le=86400,
        description="seconds with room, or with too little free memory, until a tenant on demand is scaled",
    )
    demand_gate_idle_s: float = Field(
        default=Thresholds.demand_gate_idle_s,
        gt=0,
        le=86400,
        description="seconds without GPU use until a tenant on demand is not in use",
    )
    demand_gate_min_s: float = Field(
        default=Thresholds.demand_gate_min_s,
        ge=0,
        le=86400,
        description="seconds that a tenant on demand stays on or off at least, also after a person scaled it",
    )

    probe_interval_s: float = Field(
        default=5.0, ge=1, le=60, description="seconds between two probes of a server with a probe URL"
    )
    probe_timeout_s: float = Field(
        default=3.0,
        ge=0.5,
        le=30,
        description="timeout of one probe of a server with a probe URL, seconds (docs/how-to/probe-servers.md)",
    )
    state_dir: Path | None = Field(
        default=None,
        description="folder that only the exporter may write. Keeps across restarts which servers have answered "
        "(docs/how-to/probe-servers.md)",
    )

    not_ready_s: float = Field(
        default=Thresholds.not_ready_s,
        gt=0,
        le=86400,
        description="seconds until a server that never answered a probe is reported; longer than the slowest load",
    )
    server_page_after_ratio: float = Field(
        default=Thresholds.server_page_after_ratio,
        ge=1,
        le=10_000,
        description="a server is reported after this many times the time for which its probes may fail",
    )
    slow_ratio: float = Field(
        default=Thresholds.slow_ratio,
        gt=1,
        le=1000,
        description="a job is reported when each step takes this many times its mean; above 1",
    )
    gpu_lost_s: float = Field(
        default=Thresholds.gpu_lost_s,
        ge=0,
        le=86400,
        description="seconds until a lost GPU is reported; the remediator has its own --gpu-lost-s",
    )
    xids_fatal: Annotated[tuple[Annotated[int, Field(ge=1, le=65535)], ...], NoDecode] = Field(
        default=Thresholds.xids_fatal,
        description="XIDs (NVIDIA error numbers) that are reported, comma-separated: those that need a reset; empty "
        "for none",
    )

    def thresholds(self) -> Thresholds:
        """The limits: settings of the same name, and converted ones."""
        return made_from(
            self,
            Thresholds,
            ram_idle_bytes=self.ram_idle_mib * MIB,
            io_idle_bytes_per_s=self.io_idle_kib_per_s * KIB,
            vram_floor_bytes=self.vram_floor_mib * MIB,
            vram_tie_bytes=self.vram_tie_mib * MIB,
            timeouts=PhaseTimeouts(
                load_s=self.load_timeout_s,
                eval_s=self.eval_timeout_s,
                checkpoint_s=self.checkpoint_timeout_s,
                save_s=self.save_timeout_s,
                busy_s=self.busy_timeout_s,
                stuck_min_s=self.stuck_min_s,
                stuck_factor=self.stuck_factor,
            ),
        )

    @field_validator("systemd_unit", mode="before")
    @classmethod
    def _split_units(cls, found: Any) -> Any:
        return services(found)

    @field_validator("budget_resource", "budget_annotation", mode="before")
    @classmethod
    def _split_budgets(cls, found: Any) -> Any:
        return split(found)

    @property
    def budget_sources(self) -> BudgetSources:
        """Where pods declare their VRAM budget."""
        return BudgetSources(resources=self.budget_resource, annotations=self.budget_annotation)

    @field_validator("pod_namespaces", "demand_gate_namespaces", mode="before")
    @classmethod
    def _split_namespaces(cls, found: Any) -> Any:
        return namespaces(found)

    @field_validator("docker", "podman")
    @classmethod
    def _check_engine(cls, found: str, about: ValidationInfo) -> str:
        return engine(found, words=("none", "auto") if about.field_name == "docker" else ("none",))

    @field_validator("task_dir", "xids_fatal", mode="before")
    @classmethod
    def _split(cls, found: Any) -> Any:
        return split(found)

    @field_validator("xids_fatal")
    @classmethod
    def _drop_duplicates(cls, found: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(found))

    @model_validator(mode="after")
    def _check_push(self) -> Self:
        if (self.push is None) != (self.token_file is None):
            raise ValueError("--push and --token-file go together: `gpuwarden host enrol HOST` makes a token")
        if self.push is not None:
            try:
                checked_address(self.push)
            except GpuwardenError as error:
                raise ValueError(f"--push: {error}") from None
        return self

    @model_validator(mode="after")
    def _check_pods(self) -> Self:
        if self.pods == "api" and not self.node_name:
            raise ValueError("--pods api needs --node-name: in a pod, set it to spec.nodeName by the downward API")
        if self.demand_gate_namespaces and (self.pods not in ("auto", "api") or not self.node_name):
            raise ValueError("--demand-gate-namespaces needs --pods api and --node-name")
        return self

    @model_validator(mode="after")
    def _check_stuck(self) -> Self:
        if 0 < self.stuck_factor < 1:
            raise ValueError(
                f"--stuck-factor {self.stuck_factor:g} is less than a step: use 1 or more, or 0 to disable it"
            )
        if self.gpu_saturated_ratio <= self.gpu_idle_ratio:
            raise ValueError(
                f"--gpu-saturated-ratio {self.gpu_saturated_ratio:g} is not above --gpu-idle-ratio "
                f"{self.gpu_idle_ratio:g}: use a greater value"
            )
        return self

    @model_validator(mode="after")
    def _check_gpu_source(self) -> Self:
        for option in ("nvml", "amd", "intel"):
            if getattr(self, option) == "on" and self.simulate_gpu is not None:
                raise ValueError(f"--{option} on conflicts with --simulate-gpu: remove one")
        return self


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Variables with our prefix that name no setting."""
    known = {f"{PREFIX}{name.upper()}" for name in Settings.model_fields}
    return unknown_names(environment, known, prefix=PREFIX)
