"""`gpuwarden remediator execute`: build the executor from settings, run it, stop on SIGTERM."""

import signal
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Final

import structlog

from gpuwarden import __version__, logs
from gpuwarden.db.engine import connect, is_shared
from gpuwarden.errors import GpuwardenError
from gpuwarden.fields import made_from
from gpuwarden.kube import api as kube_api
from gpuwarden.kube import pods
from gpuwarden.reporter import host_key
from gpuwarden.supervisor import files
from remediator.actuators import Actuator
from remediator.actuators.docker import DockerActuator
from remediator.actuators.process import ORPHANS, OrphanActuator, ProcessActuator
from remediator.actuators.systemd import SystemdActuator
from remediator.actuators.task_group import TaskGroups
from remediator.capture.capture import CaptureRunner, find_py_spy
from remediator.clients.alertmanager import Silences
from remediator.clients.exporter import ExporterClient
from remediator.clients.exporter_access import ExporterAuth
from remediator.clients.job_queue_sql import BuiltinQueue
from remediator.clients.prometheus_range import Curves
from remediator.clients.task_orders import GatewayOrders, OrderSource, QueueOrders
from remediator.executor.executor import Clients, Executor, LoopSettings
from remediator.executor.lock import ExecutorLock
from remediator.executor.task_orders import TaskOrdersLoop
from remediator.ledger.ledger import Ledger
from remediator.plan import Limits
from remediator.remedies.guards import SafetyLimits
from remediator.seats import Rules
from remediator.settings.policy_file import PolicyFile
from remediator.settings.settings import ExecuteSettings

if TYPE_CHECKING:
    from remediator.clients.nodes import Nodes
    from remediator.executor.seats import SeatKeeper

log: Final = structlog.get_logger("remediator")


def execute(settings: ExecuteSettings) -> None:
    """Process open episodes until SIGTERM or SIGINT.

    Raises:
        GpuwardenError: the executor cannot start; the message says why.
    """
    logs.configure(level=settings.log_level)
    host = host_key(settings.runtime_dir)
    with ExitStack() as parts:
        ledger = parts.enter_context(closing(Ledger.open(settings.ledger, host=host)))
        lock = parts.enter_context(closing(ExecutorLock(ledger, host=host)))
        queue = parts.enter_context(closing(BuiltinQueue.open(settings.queue_db)))
        if ledger.shared and not is_shared(connect(settings.queue_db)):
            raise GpuwardenError(
                "the ledger is shared but the queue is local, so job ids would mix: "
                "set --queue-db to a PostgreSQL URL, or give each host its own --ledger"
            )
        if not settings.allow_shared_role:
            ledger.refuse_role_of(settings.queue_db)
        exporter = parts.enter_context(closing(ExporterClient(settings.exporter, _access(settings))))
        actuators: dict[str, Actuator] = {
            kind: DockerActuator(base_url, kind=kind) for kind, base_url in _engines(settings).items()
        }
        if settings.systemd_unit:
            actuators["systemd"] = SystemdActuator(settings.systemd_unit)
        if settings.pod_namespaces:
            actuators[pods.KIND] = _pods(settings)
        if settings.demand_gate_namespaces:
            actuators["deployment"] = _deployments(settings)
        actuators["process"] = ProcessActuator(settings.runtime_dir)
        actuators[ORPHANS] = OrphanActuator()
        silences = None
        if settings.alertmanager:
            silences = parts.enter_context(closing(Silences(settings.alertmanager)))
        curves = None
        if settings.prometheus and settings.capture_range_s:
            curves = parts.enter_context(closing(Curves(settings.prometheus, around_s=settings.capture_range_s)))
        clients = Clients(
            exporter=exporter,
            queue=queue,
            actuators=actuators,
            capture_runner=_capture_runner(settings, curves),
            silences=silences,
            node=_node(settings),
            seats=_seat_keeper(settings, exporter, lock),
            policy=None if settings.policy is None else PolicyFile(settings.policy),
        )
        executor = Executor(ledger, host=host, clients=clients, settings=_loop_settings(settings), lock=lock)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: executor.close())
        if settings.armed:
            ledger.orders.arm_by_default(
                host=host, who=f"the executor of {host}, started with --armed", now=ledger.now()
            )
        log.info("executor ready", host=host, actuators=sorted(actuators), version=__version__)
        parts.callback(files.remove_executor, settings.runtime_dir)
        if clients.seats is not None:
            parts.enter_context(closing(clients.seats)).start()
        if settings.task_dir:
            parts.enter_context(closing(_task_orders(settings, queue, host))).start()
        executor.run()
    log.info("executor stopped")


def _task_orders(settings: ExecuteSettings, queue: BuiltinQueue, host: str) -> TaskOrdersLoop:
    source: OrderSource = QueueOrders(queue=queue, host=host)
    if settings.gateway is not None and settings.token_file is not None:
        source = GatewayOrders(settings.gateway, settings.token_file, ca_file=settings.ca_file)
    return TaskOrdersLoop(source, TaskGroups(settings.task_dir, grace_s=settings.stop_grace_s))


def _access(settings: ExecuteSettings) -> ExporterAuth:
    return ExporterAuth(
        ca_file=settings.exporter_ca_file,
        server_name=settings.exporter_server_name,
        cert_file=settings.exporter_cert_file,
        key_file=settings.exporter_key_file,
        basic_auth_file=settings.exporter_basic_auth_file,
    )


def _engines(settings: ExecuteSettings) -> dict[str, str]:
    """Sockets of the container engines, by kind."""
    named = {"docker": settings.docker, "podman": settings.podman}
    return {kind: base_url for kind, base_url in named.items() if base_url != "none"}


def _seat_keeper(settings: ExecuteSettings, exporter: ExporterClient, lock: ExecutorLock) -> "SeatKeeper | None":
    if not settings.node_name or settings.seats == "off":
        return None
    acts, api = settings.seats_on, kube_api.connect()
    from remediator.clients.nodes import Nodes  # noqa: PLC0415 - slow to import
    from remediator.executor.seats import SeatKeeper  # noqa: PLC0415

    return SeatKeeper(
        settings.node_name,
        nodes=Nodes(api, settings.budget_resource),
        exporter=exporter,
        rules=Rules(
            resource=settings.budget_resource,
            node_labels=settings.seats_node_labels,
            reserve_mib=settings.seats_reserve_mib,
            several_gpus=settings.seats_several_gpus,
        ),
        may_act=lambda: acts and not lock.lost,
    )


def _node(settings: ExecuteSettings) -> "tuple[Nodes, str] | None":
    if not settings.node_name:
        return None
    api = kube_api.connect()
    from remediator.clients.nodes import Nodes  # noqa: PLC0415 - slow to import

    return Nodes(api, settings.budget_resource), settings.node_name


def _pods(settings: ExecuteSettings) -> Actuator:
    connection = kube_api.connect()
    from remediator.actuators.kubernetes import KubernetesActuator  # noqa: PLC0415 - slow to import

    return KubernetesActuator(
        connection, node=settings.node_name, namespaces=settings.pod_namespaces, by=settings.evict
    )


def _deployments(settings: ExecuteSettings) -> Actuator:
    connection = kube_api.connect()
    from remediator.actuators.deployments import DeploymentActuator  # noqa: PLC0415 - slow to import

    return DeploymentActuator(connection, namespaces=settings.demand_gate_namespaces)


def _capture_runner(settings: ExecuteSettings, curves: Curves | None) -> CaptureRunner | None:
    if not settings.capture_s:
        return None
    py_spy = find_py_spy()
    if py_spy is None:
        log.info("py-spy not found, captures have no Python stacks", hint="pip install py-spy")
    return CaptureRunner(
        for_s=settings.capture_s,
        max_bytes=settings.capture_max_bytes,
        engines=_engines(settings),
        job_logs=settings.job_logs,
        py_spy=py_spy,
        curves=curves,
    )


def _loop_settings(settings: ExecuteSettings) -> LoopSettings:
    return LoopSettings(
        limits=made_from(settings, Limits, wrangle_timeout_s=settings.wrangle_timeout_s),
        safety_limits=made_from(settings, SafetyLimits, unknown_holds=settings.silences_unknown == "hold"),
        interval_s=settings.interval_s,
        sweep_interval_s=settings.sweep_interval_s,
        stop_grace_s=settings.stop_grace_s,
        keep_s=settings.retention_days * 86400.0,
        runtime_dir=settings.runtime_dir,
        seats_on=settings.seats_on,
    )
