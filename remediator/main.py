"""`gpuwarden remediator serve|execute`: settings in, parts wired, a clean end on SIGTERM."""

import argparse
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import Final

import structlog
import uvicorn
from pydantic import ValidationError
from pydantic_settings import CliApp

from gpuwarden import __version__, logs
from gpuwarden.errors import GpuwardenError
from gpuwarden.queue import JobStore
from gpuwarden.reporter import host_key
from gpuwarden.settings import complaints
from gpuwarden.stores import existing
from remediator import tls
from remediator.actuators import Actuator
from remediator.actuators.docker import DockerActuator
from remediator.actuators.process import ProcessActuator
from remediator.actuators.systemd import SystemdActuator
from remediator.app import create_app
from remediator.capture import Captor, find_py_spy
from remediator.credentials import Credentials
from remediator.execute import Executor, ExecutorLock, Hands, Pace
from remediator.ledger import Ledger
from remediator.plan import Limits
from remediator.policy import PolicyFile
from remediator.prometheus import Prometheus
from remediator.queue_metrics import QueueCollector
from remediator.queues.builtin import BuiltinQueue
from remediator.safety import Safeguards
from remediator.settings import ExecuteSettings, ServeSettings
from remediator.silences import Silences
from remediator.witness import Witness

log: Final = structlog.get_logger("remediator")


def command(argv: list[str]) -> int:
    """`gpuwarden remediator`."""
    parser = argparse.ArgumentParser(
        prog="gpuwarden remediator",
        description="Receive alerts (serve) and act on them (execute): two processes that share one ledger.",
        epilog="`gpuwarden remediator serve --help` and `… execute --help` say more.",
    )
    parser.add_argument("role", choices=("serve", "execute"), help="which of the two this process is")
    role = parser.parse_args(argv[:1]).role
    try:
        wanted: ServeSettings | ExecuteSettings = (
            CliApp.run(ServeSettings, cli_args=argv[1:])
            if role == "serve"
            else CliApp.run(ExecuteSettings, cli_args=argv[1:])
        )
    except ValidationError as error:
        for line in complaints(error, ServeSettings if role == "serve" else ExecuteSettings):
            print(f"gpuwarden remediator {role}: error: {line}", file=sys.stderr)
        return 2
    if isinstance(wanted, ServeSettings):
        serve(wanted)
    else:
        execute(wanted)
    return 0


def serve(settings: ServeSettings) -> None:
    """Answer Alertmanager until SIGTERM or SIGINT.

    Raises:
        GpuwardenError: it cannot start, and why.
    """
    logs.configure(level=settings.log_level)
    host = host_key(settings.dir)
    credentials = Credentials(token_file=settings.token_file, basic_auth_file=settings.basic_auth_file)
    encrypted = tls.options(
        cert_file=settings.tls_cert_file,
        key_file=settings.tls_key_file,
        client_ca_file=settings.tls_client_ca_file,
    )
    with ExitStack() as parts:
        ledger = parts.enter_context(closing(Ledger.open(settings.ledger, host=host)))
        queue = None
        if settings.queue is not None:
            queue = parts.enter_context(closing(QueueCollector(partial(existing, settings.queue))))
        app = create_app(
            ledger=ledger,
            host=host,
            credentials=credentials,
            body_max_bytes=settings.body_max_bytes,
            alerts_max=settings.alerts_max,
            alertmanagers=settings.alertmanager,
            queue=queue,
        )
        server = _Server(
            uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=5, **encrypted)
        )
        with _listening(settings.listen, settings.port) as listener:
            port = listener.getsockname()[1]
            scheme = "https" if encrypted else "http"
            log.info(
                "remediator ready", host=host, listen=settings.listen, port=port, scheme=scheme, version=__version__
            )
            server.run(sockets=[listener])
    log.info("remediator stopped")


def execute(settings: ExecuteSettings) -> None:
    """Work the open episodes until SIGTERM or SIGINT.

    Raises:
        GpuwardenError: it cannot start, and why.
    """
    logs.configure(level=settings.log_level)
    host = host_key(settings.dir)
    with ExitStack() as parts:
        ledger = parts.enter_context(closing(Ledger.open(settings.ledger, host=host)))
        lock = parts.enter_context(closing(ExecutorLock(ledger, host=host)))
        store = parts.enter_context(closing(JobStore.open(settings.queue)))
        if ledger.shared and not store.shared:
            raise GpuwardenError(
                "the ledger is shared by hosts and the queue is this host's own: job 7 here would be taken for job 7 "
                "there. Give --queue the PostgreSQL URL too, or each host a ledger of its own"
            )
        witness = parts.enter_context(closing(Witness(settings.exporter)))
        actuators: dict[str, Actuator] = {
            kind: DockerActuator(base_url, kind=kind) for kind, base_url in _engines(settings).items()
        }
        if settings.systemd_unit:
            actuators["systemd"] = SystemdActuator(settings.systemd_unit)
        if settings.processes is not None:
            actuators["process"] = ProcessActuator(settings.processes)
        silences = None
        if settings.alertmanager:
            silences = parts.enter_context(closing(Silences(settings.alertmanager, host=host)))
        prometheus = None
        if settings.prometheus:
            its = Prometheus(settings.prometheus, fresh_s=settings.prometheus_fresh_s)
            prometheus = parts.enter_context(closing(its))
        hands = Hands(
            witness=witness,
            queue=BuiltinQueue(store),
            actuators=actuators,
            captor=_captor(settings),
            silences=silences,
            prometheus=prometheus,
            policy=None if settings.policy is None else PolicyFile(settings.policy, asks=bool(settings.prometheus)),
        )
        executor = Executor(ledger, host=host, hands=hands, pace=_pace(settings), lock=lock)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: executor.close())
        if settings.armed:
            ledger.arm_at_first(host=host, who=f"the executor of {host}, started with --armed", now=ledger.now())
        log.info("executor ready", host=host, hands=sorted(actuators), version=__version__)
        executor.run()
    log.info("executor stopped")


def _engines(settings: ExecuteSettings) -> dict[str, str]:
    """The sockets of this host's engines, by kind."""
    named = {"docker": settings.docker, "podman": settings.podman}
    return {kind: base_url for kind, base_url in named.items() if base_url != "none"}


def _captor(settings: ExecuteSettings) -> Captor | None:
    if not settings.capture_s:
        return None
    py_spy = find_py_spy()
    if py_spy is None:
        log.info("no Python stacks are kept before a stop", hint="pip install 'gpuwarden[evidence]'")
    return Captor(
        for_s=settings.capture_s,
        max_bytes=settings.capture_max_bytes,
        engines=_engines(settings),
        job_logs=settings.job_logs,
        py_spy=py_spy,
    )


def _pace(settings: ExecuteSettings) -> Pace:
    return Pace(
        limits=Limits(
            evidence_fresh_s=settings.evidence_fresh_s,
            settle_bound_s=settings.settle_bound_s,
            free_bound_s=settings.free_bound_s,
            retries_max=settings.retries_max,
            avoid_s=settings.avoid_s,
        ),
        safeguards=Safeguards(
            cooldown_s=settings.cooldown_s,
            storm_targets=settings.storm_targets,
            storm_share=settings.storm_share,
            storm_window_s=settings.storm_window_s,
            storm_frees=settings.storm_frees,
            unknown_holds=settings.silences_unknown == "hold",
        ),
        look_again_s=settings.look_again_s,
        tend_s=settings.tend_s,
        stop_grace_s=settings.stop_grace_s,
        summary_hour=settings.summary_hour,
        keep_s=settings.keep_days * 86400.0,
        prometheus_policy=settings.second_opinion,
    )


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn does it, but a signal that was obeyed is not raised once more: being told to end is no failure."""
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _listening(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        server = socket.create_server((address, port), family=family, backlog=2048)
        # Made anew from its descriptor, it knows that it is TCP: asyncio turns Nagle's delay off for such sockets only,
        # and with it on every answer waits 40 ms for the client's acknowledgement.
        return socket.socket(fileno=server.detach())
    except OSError as error:
        because = (error.strerror or str(error)).partition(" (while")[0]  # Python says the address once more there
        raise GpuwardenError(
            f"cannot listen on {address}:{port} ({because}): stop what listens there, or give another --port"
        ) from None
