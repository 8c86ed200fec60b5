"""The exporter's settings: name, default and help in one place. Options, or GPUWARDEN_EXPORTER_… in the environment."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from exporter.model.thresholds import Thresholds
from exporter.model.timeouts import PhaseTimeouts
from gpuwarden.fields import made_from
from gpuwarden.reporter import state_directory
from gpuwarden.settings import engine, services, split

PREFIX: Final = "GPUWARDEN_EXPORTER_"
"""The prefix of every environment variable that sets one of these."""

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

    dir: Path = Field(
        default_factory=state_directory,
        description="where state files and the host key lie; $GPUWARDEN_DIR sets it too",
    )
    listen: str = Field(
        default="127.0.0.1",
        description="address to listen on; 0.0.0.0 is all of IPv4, :: all of both; /evidence answers loopback only",
    )
    # Outside of 9100 to 9999: each port of that range is some exporter's in Prometheus' list of default ports, and 9835
    # a GPU exporter's. Below 30000, where Kubernetes (node ports) and Linux (ephemeral ones) begin to hand them out.
    port: int = Field(default=29835, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    web_config_file: Path | None = Field(
        default=None,
        description="TLS, passwords and tokens for the pages: a Prometheus web configuration file; read again when it "
        "changes, and SIGHUP logs what of it is in force (docs/exporter-web.md)",
    )
    docker: str = Field(
        default="auto",
        description="the Docker daemon's socket; 'none' asks none, 'auto' the one at /var/run/docker.sock from when it "
        "is there, or a container of Docker's is",
    )
    podman: str = Field(
        default="none",
        description="Podman's socket, such as unix:///run/podman/podman.sock (systemctl enable --now podman.socket); "
        "'none' where there is none",
    )
    pods: Literal["auto", "off", "logs", "api"] = Field(
        default="auto",
        description="read the containers of this Kubernetes node's pods: 'api' asks --kubernetes-api, 'logs' goes by "
        "the links in /var/log/containers alone, without budgets; 'auto' is 'api' with a --node-name, else 'logs' from "
        "when that folder is there; docs/containers.md",
    )
    kubernetes_api: str = Field(
        default="in-cluster",
        description="URL of the Kubernetes API; 'in-cluster' is where $KUBERNETES_SERVICE_HOST says, with the account "
        "of the exporter's pod",
    )
    node_name: str = Field(default="", description="this node's name in Kubernetes; wanted with --pods api")
    pod_resources: str = Field(
        default="auto",
        description="the kubelet's socket that tells which GPUs each container of a pod was given; 'none' goes "
        "without, 'auto' asks the one at /var/lib/kubelet/pod-resources/kubelet.sock from when it is there",
    )
    budget_resource: str = Field(
        default="gpuwarden/vram-mib",
        min_length=3,
        description="the extended resource in whose limit a pod's container declares its VRAM budget, whole MiB",
    )
    systemd_unit: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(),
        description="names of the systemd services that workers run in, or anything else that uses GPUs, such as "
        "'gpu-worker@*.service' and 'ollama.service', separated by commas or each with an option of its own; each is "
        "then one container",
    )
    task_dir: Annotated[tuple[Path, ...], NoDecode] = Field(
        default=(),
        description="folders with the task files of other runners, such as /home/farm/.gputasker/running_tasks, "
        "separated by commas or each with an option of its own (docs/tasks.md)",
    )
    nvml: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="ask the NVIDIA driver for GPUs: 'auto' where its library can be loaded, 'on' ends without it; "
        "docs/nvidia.md",
    )
    nvml_answer_s: float = Field(
        default=10.0,
        ge=0.1,
        le=60,
        description="how long one look at NVIDIA's GPUs may take before the process that asks the driver is killed, "
        "seconds",
    )
    amd: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="read AMD's GPUs from the kernel: 'auto' where there are any at the start, 'on' ends without one; "
        "docs/amd-intel.md",
    )
    intel: Literal["auto", "on", "off"] = Field(
        default="auto", description="read Intel's GPUs from the kernel, as --amd AMD's; docs/amd-intel.md"
    )
    kernel_answer_s: float = Field(
        default=10.0,
        ge=0.1,
        le=60,
        description="how long one look at AMD's and Intel's GPUs may take before the process that reads them is "
        "killed, seconds",
    )
    simulate_gpu: Path | None = Field(
        default=None,
        description="read GPUs from this file instead of a driver; everything says so (docs/simulated-gpu.md)",
    )
    sample_interval_s: float = Field(default=1.0, gt=0, le=2, description="time between two looks at the host, seconds")
    idle_ratio: float = Field(
        default=Thresholds.idle_ratio, ge=0, lt=1, description="a GPU at or under this share of its time is idle"
    )
    ram_delta_mib: int = Field(
        default=Thresholds.ram_delta_bytes // MIB, ge=0, description="RAM that moved by no more than this is still, MiB"
    )
    io_still_kib_per_s: float = Field(
        default=Thresholds.io_still_bytes_per_s / KIB,
        ge=0,
        description="a container whose processes read and write no more than this does no I/O, KiB a second over 10 s",
    )
    faults_still_per_s: float = Field(
        default=Thresholds.faults_still_per_s,
        ge=0,
        description="a container with no more page faults than this touches no new memory, a second over 10 s",
    )
    cpu_still_ratio: float = Field(
        default=Thresholds.cpu_still_ratio,
        ge=0,
        description="a container that uses no more than this share of one CPU over 10 s is still",
    )
    dead_after_s: float = Field(
        default=Thresholds.dead_after_s,
        gt=0,
        le=3600,
        description="a worker that owns a job is dead after this long without heartbeat and CPU time, or without its "
        "process, seconds; three heartbeats of the slowest worker or more, and longer than one takes to come back "
        "by itself",
    )
    health_window_s: float = Field(
        default=Thresholds.health_window_s,
        gt=0,
        le=86400,
        description="a GPU job whose container shows no sign of life for this long is wedged, seconds",
    )
    health_grace_s: float = Field(
        default=Thresholds.health_grace_s,
        ge=0,
        le=86400,
        description="time from an attempt's start that is left to its load and first step, seconds",
    )
    load_patience_s: float = Field(
        default=PhaseTimeouts.load_s,
        ge=0,
        le=86400,
        description="a job that loads, evaluates, writes a checkpoint or saves may show no sign of life for this long, "
        "or as long as it may in its steps where that is longer, unless the job itself says how long in that phase; "
        "seconds. This one is for the phase load",
    )
    eval_patience_s: float = Field(
        default=PhaseTimeouts.eval_s, ge=0, le=86400, description="as --load-patience-s, in the phase eval, seconds"
    )
    checkpoint_patience_s: float = Field(
        default=PhaseTimeouts.checkpoint_s,
        ge=0,
        le=86400,
        description="as --load-patience-s, in the phase checkpoint, seconds",
    )
    save_patience_s: float = Field(
        default=PhaseTimeouts.save_s, ge=0, le=86400, description="as --load-patience-s, in the phase save, seconds"
    )
    stuck_floor_s: float = Field(
        default=PhaseTimeouts.stuck_floor_s,
        gt=0,
        le=86400,
        description="a job that has steps behind it and takes none for this long is stuck, seconds, where its "
        "container does no I/O, touches no new memory and holds its RAM, and its GPU is pegged, or is unknown and its "
        "processes use no CPU time",
    )
    stuck_steps: float = Field(
        default=PhaseTimeouts.stuck_steps,
        ge=0,
        le=1000,
        description="nor is a job stuck sooner than after so many times the longest step it has taken in the attempt, "
        "or in another phase than step its longest earlier stay there, 1 to 1000; with 0 none ever is",
    )
    pegged_ratio: float = Field(
        default=Thresholds.pegged_ratio,
        gt=0,
        le=1,
        description="a GPU at or over this share of its time is pegged, as by a collective that waits for ever; more "
        "than --idle-ratio",
    )
    vram_floor_mib: int = Field(
        default=Thresholds.vram_floor_bytes // MIB,
        ge=0,
        description="a GPU with less free memory than this has too little, MiB: the container most over its budget is "
        "then in question (docs/vram.md); 0 is never",
    )
    vram_tie_mib: int = Field(
        default=Thresholds.vram_tie_bytes // MIB,
        ge=0,
        description="two containers over their VRAM budgets by amounts this close are level, MiB",
    )
    vram_return_s: float = Field(
        default=Thresholds.vram_return_s,
        ge=0,
        le=600,
        description="for how long at most what processes held of a GPU's memory that have ended is taken to be on its "
        "way back while the driver counts it as in use still, seconds (docs/vram.md); 0 is not at all",
    )
    gpu_lost_s: float = Field(
        default=Thresholds.gpu_lost_s,
        ge=0,
        le=86400,
        description="people are told of a GPU that has been lost for this long, seconds; when one is put out of use "
        "is the remediator's --gpu-lost-s",
    )
    probe_interval_s: float = Field(
        default=5.0, ge=1, le=60, description="time between two askings of a server with a probe URL, seconds"
    )
    probe_answer_s: float = Field(
        default=3.0,
        ge=0.5,
        le=30,
        description="how long a server with a probe URL may take for one answer, seconds (docs/servers.md)",
    )
    state_dir: Path | None = Field(
        default=None,
        description="a folder of the exporter's own, which nobody else may write, best one in memory: there it keeps "
        "which servers have answered, for when it is started anew; nothing is kept without it (docs/servers.md)",
    )
    never_answered_s: float = Field(
        default=Thresholds.never_answered_s,
        gt=0,
        le=86400,
        description="people are told of a server that has been asked for this long, and has never answered, seconds; "
        "longer than the slowest one loads",
    )
    server_silent_times: float = Field(
        default=Thresholds.server_silent_times,
        ge=1,
        le=10_000,
        description="people are told of a server that has answered before once it leaves its probe unanswered for so "
        "many times the silence that its owner allows, whatever its GPUs do",
    )
    slowed_ratio: float = Field(
        default=Thresholds.slowed_ratio,
        gt=1,
        le=1000,
        description="people are told of a job once each of its steps takes so many times as long as its own mean; more "
        "than 1",
    )
    xids_fatal: Annotated[tuple[Annotated[int, Field(ge=1, le=65535)], ...], NoDecode] = Field(
        default=Thresholds.xids_fatal,
        description="people are told of these errors of an NVIDIA GPU, its driver's numbers (XID) separated by commas: "
        "what a card does not get over without a reset; none where it is empty",
    )
    log_level: str = Field(
        default="info",
        pattern="^(debug|info|warning|error)$",
        description="least severe level logged: debug, info, warning or error",
    )

    def thresholds(self) -> Thresholds:
        """What these settings make of the limits: those of the same name pass, the others are given by hand."""
        return made_from(
            self,
            Thresholds,
            ram_delta_bytes=self.ram_delta_mib * MIB,
            io_still_bytes_per_s=self.io_still_kib_per_s * KIB,
            vram_floor_bytes=self.vram_floor_mib * MIB,
            vram_tie_bytes=self.vram_tie_mib * MIB,
            timeouts=PhaseTimeouts(
                load_s=self.load_patience_s,
                eval_s=self.eval_patience_s,
                checkpoint_s=self.checkpoint_patience_s,
                save_s=self.save_patience_s,
                stuck_floor_s=self.stuck_floor_s,
                stuck_steps=self.stuck_steps,
            ),
        )

    @field_validator("systemd_unit", mode="before")
    @classmethod
    def _each_unit(cls, found: Any) -> Any:
        return services(found)

    @field_validator("docker", "podman")
    @classmethod
    def _an_engine_listens_there(cls, found: str, about: ValidationInfo) -> str:
        return engine(found, words=("none", "auto") if about.field_name == "docker" else ("none",))

    @field_validator("task_dir", "xids_fatal", mode="before")
    @classmethod
    def _each_of_them(cls, found: Any) -> Any:
        return split(found)

    @field_validator("xids_fatal")
    @classmethod
    def _each_once(cls, found: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(found))

    @model_validator(mode="after")
    def _pods_of_one_node(self) -> Self:
        if self.pods == "api" and not self.node_name:
            raise ValueError("--pods api needs --node-name: in a pod, give it spec.nodeName by the downward API")
        return self

    @model_validator(mode="after")
    def _stuck_is_no_usual_step(self) -> Self:
        if 0 < self.stuck_steps < 1:
            raise ValueError(f"--stuck-steps {self.stuck_steps:g} is less than a step: give 1 or more, or 0 for never")
        if self.pegged_ratio <= self.idle_ratio:
            found = f"--pegged-ratio {self.pegged_ratio:g} is not above --idle-ratio {self.idle_ratio:g}"
            raise ValueError(f"{found}: what is pegged cannot be idle; give a greater one")
        return self

    @model_validator(mode="after")
    def _one_gpu_source(self) -> Self:
        for option in ("nvml", "amd", "intel"):
            if getattr(self, option) == "on" and self.simulate_gpu is not None:
                raise ValueError(f"--{option} on and --simulate-gpu cannot both be: GPUs are simulated, or none is")
        return self


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """The variables with our prefix that name no setting, as a misspelt one does.

    Kubernetes sets such variables itself in a pod beside a Service named after the exporter: they are left out.
    """
    known = {f"{PREFIX}{name.upper()}" for name in Settings.model_fields}
    return sorted(
        name
        for name, value in environment.items()
        if name.upper().startswith(PREFIX) and name.upper() not in known
        if not _OF_A_SERVICE.search(name) and not value.startswith("tcp://")
    )


_OF_A_SERVICE: Final = re.compile(r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$")
