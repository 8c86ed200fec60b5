"""`gpuwarden exporter`: connect settings, threads and pages, and stop on SIGTERM."""

import fcntl
import gc
import os
import signal
import stat
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import structlog
from prometheus_client import GC_COLLECTOR, PLATFORM_COLLECTOR, PROCESS_COLLECTOR, CollectorRegistry
from pydantic import ValidationError

from exporter.collectors.registry import SnapshotCollector
from exporter.http.push import Push
from exporter.http.server import create_app
from exporter.model.gpu import DRM_SOURCE, NVIDIA_SOURCE, GpuReadings
from exporter.sampler import Sampler
from exporter.settings import Settings, unknown_variables
from exporter.sources.containers import kubelet
from exporter.sources.containers.deployments import Deployments
from exporter.sources.containers.discovery import EngineRegistry, PendingEngine
from exporter.sources.containers.kubernetes import LOGS, Api, Pods
from exporter.sources.containers.poller import Listener
from exporter.sources.containers.systemd import Units
from exporter.sources.gpu import simulated
from exporter.sources.gpu.drm import gpus as drm
from exporter.sources.gpu.isolated.process import Driver
from exporter.sources.gpu.isolated.supervisor import IsolatedDriver
from exporter.sources.gpu.nvml import library, presence
from exporter.sources.servers.http_probe import Prober
from exporter.sources.servers.monitor import Servers
from exporter.sources.tasks import Tasks
from exporter.state.answered_servers import AnsweredFile
from gpuwarden import __version__, logs
from gpuwarden.errors import GpuwardenError
from gpuwarden.files import raise_file_limit
from gpuwarden.format import show
from gpuwarden.http.serving import Server, bind
from gpuwarden.http.web_config import WebConfig
from gpuwarden.kube import api as kube
from gpuwarden.reporter import host_key
from gpuwarden.settings import complaints, read_settings

log: Final = structlog.get_logger("exporter")

DOCKER_SOCKET: Final = Path("/var/run/docker.sock")
"""Docker's default socket."""

GC_THRESHOLD: Final = 20_000
"""New objects before Python's garbage collector runs. A sample of a full host leaves thousands, without cycles; a lower
value costs a tenth of the sample."""


def command(argv: list[str]) -> int:
    """`gpuwarden exporter`."""
    try:
        settings = read_settings(Settings, argv)
    except ValidationError as error:
        for line in complaints(error, Settings):
            show(f"gpuwarden exporter: error: {line}", file=sys.stderr)
        return 2
    logs.configure(level=settings.log_level)
    for name in unknown_variables(os.environ):
        log.warning("unknown environment variable ignored", variable=name)
    serve(settings)
    return 0


def serve(settings: Settings) -> None:
    """Publish until SIGTERM or SIGINT.

    Raises:
        GpuwardenError: it cannot start.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a SIGHUP before its handler is set would end the process
    if not settings.runtime_dir.is_dir():
        raise GpuwardenError(
            f"{settings.runtime_dir} does not exist: create it, with this host's name in {settings.runtime_dir}/host"
        )
    if settings.state_dir is not None:
        _lock_state_dir(settings.state_dir)
    host = host_key(settings.runtime_dir)
    web = WebConfig(settings.web_config_file)
    thresholds = settings.thresholds()
    gpus = _gpu_source(settings)
    kernel_gpus = _drm_source(settings)
    sources = {NVIDIA_SOURCE: gpus, DRM_SOURCE: kernel_gpus}
    engines = EngineRegistry(configured_engines(settings), pending_engines(settings))
    raise_file_limit()
    servers = Servers(
        Prober(interval_s=settings.probe_interval_s, answer_s=settings.probe_timeout_s),
        kept=AnsweredFile(settings.state_dir) if settings.state_dir else None,
    )
    sampler = Sampler(
        host=host,
        directory=settings.runtime_dir,
        containers=engines,
        gpus=gpus.read,
        drm=kernel_gpus.read,
        thresholds=thresholds,
        interval_s=settings.sample_interval_s,
        servers=servers,
        units=Units(settings.systemd_unit),
        tasks=Tasks(settings.task_dir) if settings.task_dir else None,
        drivers={name: each.driver for name, each in sources.items() if each.driver is not None},
        nvidia=presence.NvidiaHost(),
        met=engines.met,
    )
    registry = CollectorRegistry()
    registry.register(SnapshotCollector(sampler.latest, host=host, thresholds=thresholds))
    for collector in (PROCESS_COLLECTOR, PLATFORM_COLLECTOR, GC_COLLECTOR):
        registry.register(collector)
    push = _push(settings, registry)
    listener = bind(settings.listen, settings.port)

    def ready() -> None:
        log.info("exporter ready", host=host, listen=settings.listen, port=listener.getsockname()[1],
                 version=__version__, web=web.describe())  # fmt: skip

    server = Server(create_app(registry, sampler.latest, host=host, web=web), web, at_start=ready)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, server.handle_exit)
    for source in sources.values():
        source.tell()
    engines.start()
    gc.collect()
    gc.freeze()  # these objects stay: a full collection would delay a scrape by tens of milliseconds
    gc.set_threshold(GC_THRESHOLD)
    sampler.start()
    if push is not None:
        push.start()
    try:
        server.run(sockets=[listener])
    finally:
        if push is not None:
            push.close()
        sampler.close()
        for source in sources.values():
            if source.driver is not None:
                source.driver.close()
        servers.close()
        engines.close()
        listener.close()
        log.info("exporter stopped")


def _push(settings: Settings, registry: CollectorRegistry) -> Push | None:
    if settings.push is None or settings.token_file is None:
        return None
    return Push(
        settings.push,
        settings.token_file,
        ca_file=settings.ca_file,
        families=registry.collect,
        interval_s=settings.push_interval_s,
        tasks=settings.push_tasks,
    )


def _lock_state_dir(folder: Path) -> None:
    """Lock --state-dir until this process ends. Other errors are reported when the folder is used.

    Raises:
        GpuwardenError: another exporter holds the lock.
    """
    with suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise GpuwardenError(
                f"another exporter runs with --state-dir {folder}: stop it, or use another folder"
            ) from None


def configured_engines(settings: Settings) -> dict[str, Listener]:
    """The engines in the settings, by kind.

    Raises:
        GpuwardenError: a setting is invalid.
    """
    urls = {"docker": settings.docker, "podman": settings.podman}
    asked = {kind: _engine(settings, kind, url) for kind, url in urls.items() if url not in ("none", "auto")}
    if settings.pods in ("api", "logs") or (settings.pods == "auto" and settings.node_name):
        asked["kubernetes"] = make_pods(settings)
    return asked


def pending_engines(settings: Settings) -> dict[str, PendingEngine]:
    """Engines to connect to when they appear, by kind."""
    sought = {}
    if settings.docker == "auto":
        make = partial(_engine, settings, "docker", f"unix://{DOCKER_SOCKET}")
        sought["docker"] = PendingEngine(mark=DOCKER_SOCKET, is_it=stat.S_ISSOCK, make=make)
    if settings.pods == "auto" and not settings.node_name:
        sought["kubernetes"] = PendingEngine(mark=LOGS, is_it=stat.S_ISDIR, make=partial(make_pods, settings))
    return sought


def _engine(settings: Settings, kind: str, base_url: str) -> Listener:
    # Docker's client takes a fifth of the memory, so it is loaded only with an engine.
    from exporter.sources.containers.docker import EngineContainers  # noqa: PLC0415

    return EngineContainers(base_url, settings.runtime_dir, kind=kind)


def make_pods(settings: Settings) -> Pods:
    """The source of this node's pods.

    Raises:
        GpuwardenError: a setting is invalid.
    """
    api = deployments = None
    if settings.pods == "api" or (settings.pods == "auto" and settings.node_name):
        client = kube.connect(settings.kubeconfig)
        namespaces = settings.pod_namespaces
        api = Api(client, node=settings.node_name, budgets=settings.budget_sources, namespaces=namespaces)
        if gated := settings.demand_gate_namespaces:
            deployments = Deployments(client, node=settings.node_name, namespaces=gated)
    wanted = settings.pod_resources != "auto"
    named = None if settings.pod_resources == "none" else Path(settings.pod_resources)
    socket = named if wanted else kubelet.SOCKET
    return Pods(api=api, pod_resources=socket, pod_resources_wanted=wanted, deployments=deployments)


@dataclass(frozen=True, kw_only=True)
class _GpuSource:
    """A source of GPUs, `None` without any, its log line, and its driver."""

    read: Callable[[], GpuReadings] | None
    tell: Callable[[], None]
    driver: IsolatedDriver | None = None


def _gpu_source(settings: Settings) -> _GpuSource:
    if settings.simulate_gpu is not None:
        return _GpuSource(
            read=partial(simulated.read, settings.simulate_gpu),
            tell=partial(log.warning, "reading simulated GPUs", file=str(settings.simulate_gpu)),
        )
    message = "--nvml off"
    if settings.nvml != "off":
        try:
            library.load()
        except library.LibraryMissingError as error:
            if settings.nvml == "on":
                raise
            message = str(error)
        else:
            tell = partial(log.info, "reading GPUs from the NVIDIA driver", library=library.LIBRARY)
            driver = IsolatedDriver(library.DRIVER, answer_s=settings.nvml_timeout_s)
            return _GpuSource(read=driver.read, tell=tell, driver=driver)
    return _GpuSource(read=None, tell=partial(log.info, "no NVIDIA GPUs are read", reason=message))


def _drm_source(settings: Settings) -> _GpuSource:
    """AMD and Intel GPUs, if any.

    Raises:
        GpuwardenError: a required GPU is missing.
    """
    asked = {"amd": (settings.amd, drm.AMD), "intel": (settings.intel, drm.INTEL)}
    wanted = [drivers for mode, drivers in asked.values() if mode != "off"]
    if not wanted or settings.simulate_gpu is not None:
        return _GpuSource(read=None, tell=lambda: None)
    drivers = frozenset[str]().union(*wanted)
    found = drm.DrmGpus(drivers).drivers_found()
    for option, (mode, its) in asked.items():
        if mode == "on" and found.isdisjoint(its):
            names = " or ".join(sorted(its))
            raise GpuwardenError(
                f"no GPU of the kernel driver {names} in /sys/class/drm: load the driver, make /sys visible to the "
                f"exporter, or set --{option} off"
            )
    if not found:
        return _GpuSource(read=None, tell=lambda: None)
    tell = partial(log.info, "reading GPUs from the kernel", drivers=sorted(found))
    driver = IsolatedDriver(
        Driver(who=drm.WHO, program=drm.CHILD, arguments=tuple(sorted(drivers)), gpu=drm.GPU_OF_NUMBER),
        answer_s=settings.kernel_timeout_s,
    )
    return _GpuSource(read=driver.read, tell=tell, driver=driver)
