"""The remediator's settings: name, default and help in one place. Options, or GPUWARDEN_REMEDIATOR_… in the env."""

from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

import httpx
from pydantic import BeforeValidator, Field, field_validator, model_validator
from pydantic_settings import BaseSettings, CliImplicitFlag, NoDecode, SettingsConfigDict

from gpuwarden.job import AVOID_S, WATCHDOG_RETRIES_MAX
from gpuwarden.reporter import state_directory
from gpuwarden.settings import engine, services, split
from remediator.alert import ALERTS_MAX
from remediator.remedies.wrangle import ACTIVATION, MIGRATIONS_MAX, PATIENCE_S

STOP_MARGIN_S: Final = 15.0
"""What settle_bound_s must leave beyond stop_grace_s, seconds."""


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
"""Separated by commas, or each with an option of its own."""


def _check_addresses(urls: tuple[str, ...], *, option: str, example: str) -> None:
    for number, each in enumerate(urls, start=1):
        try:
            url = httpx.URL(each)
        except httpx.InvalidURL:
            url = httpx.URL()
        if url.scheme not in ("http", "https") or not url.host:
            # It is not repeated, for it may have a password in it.
            raise ValueError(f"{option} wants URLs, as {example}: number {number} is none")


class _Common(BaseSettings):
    dir: Path = Field(
        default_factory=state_directory, description="where this host's key lies; $GPUWARDEN_DIR sets it too"
    )
    ledger: str = Field(
        description="the ledger's database URL: sqlite:////var/lib/gpuwarden/ledger.db on one box, "
        "postgresql://user@server/database where hosts share one"
    )
    node_lost_after_s: float = Field(
        default=180.0,
        ge=10,
        le=480,
        description="a host of which nobody has heard for this long is lost, and its jobs are held for it, seconds; "
        "the same for `serve`, which tells the rule, and `execute`, which decides; where they differ the longest; "
        "at least two minutes less than the leases of jobs (600 s), which otherwise give them away before that",
    )
    wrangle_activation: int = Field(
        default=ACTIVATION,
        ge=0,
        le=999_999,
        description="so many items of a run that asked for wrangling may fail on a worker before anything is judged, a "
        "count: one more is what the rule fires at; the same for `serve`, which tells the rule, and `execute`, which "
        "decides; where they differ the greatest",
    )
    log_level: str = Field(
        default="info",
        pattern="^(debug|info|warning|error)$",
        description="least severe level logged: debug, info, warning or error",
    )

    @model_validator(mode="after")
    def _alertmanagers_have_addresses(self) -> Self:
        _check_addresses(getattr(self, "alertmanager", ()), option="--alertmanager", example="http://127.0.0.1:9093")
        return self


class ServeSettings(_Common):
    """Receive alerts from Alertmanager and make them durable; acts on nothing itself."""

    model_config = _config("gpuwarden remediator serve")

    listen: str = Field(default="127.0.0.1", description="address to listen on; 0.0.0.0 is all of IPv4, :: all of both")
    port: int = Field(default=9836, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    web_config_file: Path = Field(
        description="what Alertmanager must show, and TLS: a Prometheus web configuration file with bearer_token_file "
        "or basic_auth_users; read again when it changes (docs/exporter-web.md)",
    )
    body_max_bytes: int = Field(default=4 * 2**20, ge=1024, description="largest webhook body accepted, bytes")
    alerts_max: int = Field(
        default=ALERTS_MAX, ge=1, description="most alerts accepted in one webhook body; one with more is refused whole"
    )
    executor_silent_s: float = Field(
        default=60.0,
        ge=5,
        le=86400,
        description="people are told of an executor that has shown no life for longer than this, seconds: it does once "
        "a second",
    )
    intent_overdue_s: float = Field(
        default=900.0,
        ge=5,
        le=604800,
        description="people are told of a free or a settle that has been owed for longer than this, seconds: longer "
        "than the grace of a warning, settle_bound_s and twice free_bound_s of `execute` together",
    )
    alertmanager: _Urls = Field(
        default=(),
        description="URLs of the Alertmanagers, separated by commas or each with an option of its own; they are then "
        "asked for the alerts that a call left out (`max_alerts`)",
    )
    queue: str | None = Field(
        default=None,
        description="the job queue's database URL; with it /metrics tells of the queue too, which it only reads",
    )


class ExecuteSettings(_Common):
    """Look at every open episode, decide, and act on this host's own containers. One per host, under a lock."""

    model_config = _config("gpuwarden remediator execute")

    armed: CliImplicitFlag[bool] = Field(
        default=False,
        description="arm every remedy on this host if nobody has armed or disarmed anything of it yet; otherwise "
        "`gpuwarden arm` and `gpuwarden disarm` alone say, whatever is given here. What is not armed is a dry run, "
        "which only records",
    )
    queue: str = Field(
        description="the job queue's database URL: sqlite:////var/lib/gpuwarden/queue.db on one box, "
        "postgresql://user@server/database where hosts share one"
    )
    exporter: str = Field(default="http://127.0.0.1:29835", description="this host's own exporter")
    exporter_ca_file: Path | None = Field(
        default=None,
        description="authorities in PEM, one of which has signed the exporter's certificate, where it serves HTTPS; "
        "those of the system when not given",
    )
    exporter_server_name: str | None = Field(
        default=None, description="the name in the exporter's certificate, where it is not the one in its URL"
    )
    exporter_cert_file: Path | None = Field(
        default=None, description="our own certificate in PEM, where the exporter wants one of its callers"
    )
    exporter_key_file: Path | None = Field(default=None, description="that certificate's key in PEM, not encrypted")
    exporter_basic_auth_file: Path | None = Field(
        default=None,
        description="file with one line `user:password`, where the exporter wants them; read with every question",
    )
    prometheus: _Urls = Field(
        default=(),
        description="URLs of Prometheus servers that scrape this host, separated by commas or each with an option of "
        "its own; before a stop the executor asks them for the curves that it keeps",
    )
    policy: Path | None = Field(
        default=None,
        description="TOML file with what is particular to a remedy, such as what becomes of a job whose process was "
        "not seen dead; read anew within a second of a change (docs/policy.md)",
    )
    docker: str = Field(
        default="unix:///var/run/docker.sock", description="the Docker daemon's socket; 'none' where there is none"
    )
    podman: str = Field(
        default="none",
        description="Podman's socket, such as unix:///run/podman/podman.sock (systemctl enable --now podman.socket); "
        "'none' where there is none",
    )
    systemd_unit: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(),
        description="names of the systemd services that workers run in, such as 'gpu-worker@*.service', separated by "
        "commas or each with an option of its own; no other service is ever touched",
    )
    processes: Path | None = Field(default=None, description="TOML file of supervised workers that run in no container")
    look_again_s: float = Field(
        default=1.0,
        gt=0,
        le=5,  # each look is a sign of life, and another host takes its lack for 15 s for our end
        description="time between looks at an open episode, seconds",
    )
    tend_s: float = Field(default=5.0, gt=0, le=600, description="time between sweeps of leases and events, seconds")
    stop_grace_s: float = Field(default=10.0, ge=0, le=600, description="between SIGTERM and SIGKILL, seconds")
    evidence_fresh_s: float = Field(default=5.0, gt=0, le=60, description="older evidence confirms nothing, seconds")
    settle_bound_s: float = Field(
        default=60.0,
        gt=0,
        le=86400,
        description="a fenced job is settled this long after, even if its process was not seen dead, seconds",
    )
    free_bound_s: float = Field(
        default=120.0,
        gt=0,
        le=86400,
        description="after this long without progress a free is given up and a person told, seconds",
    )
    gpu_lost_s: float = Field(
        default=60.0,
        gt=0,
        le=86400,
        description="a GPU that has been lost for less than this long is not put out of use for it, and what was "
        "on it is not taken for dead, seconds",
    )
    retries_max: int = Field(
        default=WATCHDOG_RETRIES_MAX, ge=0, description="trips that requeue a job; the next one fails it"
    )
    avoid_s: float = Field(
        default=AVOID_S,
        ge=0,
        le=86400,
        description="a requeued job stays away from the GPUs it was taken from for this long, if others can run it, "
        "seconds",
    )

    capture_s: float = Field(
        default=5.0,
        ge=0,
        le=60,
        description="how long it may take to keep what the processes are doing before they are stopped, seconds; 0 "
        "keeps nothing",
    )
    capture_max_bytes: int = Field(
        default=256 * 2**10, ge=16 * 2**10, le=16 * 2**20, description="how much of that is kept of one stop, bytes"
    )
    curves_s: float = Field(
        default=900.0,
        ge=0,
        le=86400,
        description="how far before the trip, and how far after it at most, the curves of beat age, GPU and RAM reach "
        "that are kept too, as prometheus has them, seconds; 0 keeps none",
    )
    job_logs: Path | None = Field(
        default=None,
        description="the folder, on this host, in which workers keep their jobs' logs (`gpuwarden worker --logs`): the "
        "last lines are kept too. Where there is none, those of the container's log are",
    )

    cooldown_s: float = Field(
        default=300.0,
        ge=0,
        le=86400,
        description="a container is not freed again within this time after its last free, seconds; 0 is no cool-down",
    )
    vram_cooldown_s: float = Field(
        default=120.0,
        ge=0,
        le=86400,
        description="after a container was freed on a GPU, nobody else goes for that GPU's memory within this time, "
        "seconds; longer than Prometheus may lag behind; 0 is no cool-down",
    )
    storm_targets: int = Field(
        default=3,
        ge=1,
        description="more distinct containers to be freed within the window than this, or than storm_share of the "
        "workers where that is more, latch the brake",
    )
    storm_share: float = Field(
        default=0.25, ge=0, le=1, description="the share of all workers that may wedge within the window, a ratio"
    )
    storm_window_s: float = Field(
        default=600.0, gt=0, le=86400, description="the window in which a storm is counted, seconds"
    )
    storm_frees: int = Field(
        default=6,
        ge=1,
        description="more frees to be begun within an hour than this, or than there are workers where that is more, "
        "latch the brake too: of whichever containers, one that is freed again and again counts each time",
    )
    wrangle_migrations_max: int = Field(
        default=MIGRATIONS_MAX,
        ge=0,
        le=999_999,
        description="so often a run of which nobody finishes an item is moved to another worker before the run is "
        "blocked, a count",
    )
    wrangle_patience_s: float = Field(
        default=PATIENCE_S,
        ge=0,
        le=604800,
        description="who has run a job of a run for so long and neither finished nor failed an item does not fail, "
        "seconds",
    )
    alertmanager: _Urls = Field(
        default=(),
        description="URLs of the Alertmanagers, separated by commas or each with an option of its own; they are then "
        "asked right before anything is begun, and what they silence waits until they do not",
    )
    silences_unknown: Literal["act", "hold"] = Field(
        default="act",
        description="what becomes of a wedge while one of them does not tell what it silences: act, for this host's "
        "own evidence is what decides, or hold",
    )
    keep_days: int = Field(
        default=90,
        ge=0,
        le=36500,
        description="a closed episode is kept for this long, with its alerts, its account and what was captured (the "
        "newest 1000 at most), and so is a refused alert (the newest 10,000); an accepted one that no executor took up "
        "for so long is abandoned, days; 0 sets no time. On a shared ledger the shortest of its executors' holds",
    )

    @model_validator(mode="after")
    def _prometheus_has_addresses(self) -> Self:
        _check_addresses(self.prometheus, option="--prometheus", example="http://127.0.0.1:9090")
        return self

    @field_validator("docker", "podman")
    @classmethod
    def _an_engine_listens_there(cls, found: str) -> str:
        return engine(found, words=("none",))

    @field_validator("systemd_unit", mode="before")
    @classmethod
    def _each_unit(cls, found: Any) -> Any:
        return services(found)

    @model_validator(mode="after")
    def _the_exporter_can_be_asked_so(self) -> Self:
        if (self.exporter_cert_file is None) != (self.exporter_key_file is None):
            raise ValueError("--exporter-cert-file and --exporter-key-file are wanted together, or neither")
        by_tls = (self.exporter_ca_file, self.exporter_server_name, self.exporter_cert_file)
        if any(by_tls) and not self.exporter.startswith("https://"):
            raise ValueError("--exporter-ca-file, -server-name and -cert-file want --exporter https://127.0.0.1:PORT")
        return self

    @model_validator(mode="after")
    def _patience_outlasts_the_grace(self) -> Self:
        """A stop takes its grace, and the exporter a look or two to see the death; only then may patience end."""
        if not self.stop_grace_s + STOP_MARGIN_S <= self.settle_bound_s <= self.free_bound_s:
            raise ValueError(
                f"stop_grace_s ({self.stop_grace_s:g}) and {STOP_MARGIN_S:g} s more must fit into settle_bound_s "
                f"({self.settle_bound_s:g}), and that into free_bound_s ({self.free_bound_s:g})"
            )
        return self
