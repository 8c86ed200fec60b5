"""`gpuwarden remediator serve|execute`: settings in, parts wired, a clean end on SIGTERM."""

import argparse
import signal
from pathlib import Path
from typing import Final

import structlog
import uvicorn
from pydantic_settings import CliApp

from gpuwarden import __version__, logs
from gpuwarden.errors import GpuwardenError
from gpuwarden.jobstore import JobStore
from gpuwarden.reporter import host_key
from remediator.actuators import Actuator
from remediator.actuators.docker import DockerActuator
from remediator.actuators.process import ProcessActuator
from remediator.app import create_app
from remediator.execute import Executor, Hands, Pace, take_lock
from remediator.ledger import Ledger
from remediator.plan import Limits
from remediator.queues.builtin import BuiltinQueue
from remediator.settings import ExecuteSettings, ServeSettings
from remediator.witness import Witness

log: Final = structlog.get_logger("remediator")

TOKEN_MIN: Final = 16
"""The shortest bearer token accepted, characters."""


def command(argv: list[str]) -> int:
    """`gpuwarden remediator`."""
    parser = argparse.ArgumentParser(
        prog="gpuwarden remediator",
        description="Receive alerts (serve) and act on them (execute): two processes that share one ledger.",
        epilog="`gpuwarden remediator serve --help` and `… execute --help` say more.",
    )
    parser.add_argument("role", choices=("serve", "execute"), help="which of the two this process is")
    role = parser.parse_args(argv[:1]).role
    if role == "serve":
        serve(CliApp.run(ServeSettings, cli_args=argv[1:]))
    else:
        execute(CliApp.run(ExecuteSettings, cli_args=argv[1:]))
    return 0


def serve(settings: ServeSettings) -> None:
    """Answer Alertmanager until SIGTERM or SIGINT.

    Raises:
        GpuwardenError: it cannot start, and why.
    """
    logs.configure(level=settings.log_level)
    host = host_key(settings.dir)
    token = _token(settings.token_file)
    ledger = Ledger.open(settings.ledger)
    app = create_app(ledger=ledger, host=host, token=token, body_max_bytes=settings.body_max_bytes)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            host=settings.listen,
            port=settings.port,
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=5,
        )
    )
    log.info("remediator ready", host=host, listen=settings.listen, port=settings.port, version=__version__)
    try:
        server.run()
    except SystemExit as end:  # uvicorn's way of saying that it could not bind; it has logged nothing of use
        if not server.started and end.code:
            raise GpuwardenError(
                f"cannot listen on {settings.listen}:{settings.port}: is it in use? Give another --port"
            ) from None
        raise
    finally:
        ledger.close()
        log.info("remediator stopped")


def execute(settings: ExecuteSettings) -> None:
    """Work the open episodes until SIGTERM or SIGINT.

    Raises:
        GpuwardenError: it cannot start, and why.
    """
    logs.configure(level=settings.log_level)
    host = host_key(settings.dir)
    ledger = Ledger.open(settings.ledger)
    lock = take_lock(settings.ledger)
    store = JobStore.open(settings.queue)
    witness = Witness(settings.exporter)
    actuators: dict[str, Actuator] = {}
    if settings.docker != "none":
        actuators["docker"] = DockerActuator(settings.docker)
    if settings.processes is not None:
        actuators["process"] = ProcessActuator(settings.processes)
    executor = Executor(
        ledger,
        host=host,
        hands=Hands(witness=witness, queue=BuiltinQueue(store), actuators=actuators),
        pace=Pace(
            armed=settings.armed,
            limits=Limits(
                evidence_fresh_s=settings.evidence_fresh_s,
                settle_bound_s=settings.settle_bound_s,
                free_bound_s=settings.free_bound_s,
                retries_max=settings.retries_max,
            ),
            look_again_s=settings.look_again_s,
            tend_s=settings.tend_s,
            stop_grace_s=settings.stop_grace_s,
        ),
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: executor.close())
    log.info("executor ready", host=host, armed=settings.armed, hands=sorted(actuators), version=__version__)
    if not settings.armed:
        log.warning("dry run: everything is recorded and nothing is done; --armed makes it act")
    try:
        executor.run()
    finally:
        witness.close()
        store.close()
        ledger.close()
        lock.close()
        log.info("executor stopped")


def _token(path: Path) -> str:
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise GpuwardenError(
            f"the token file {path} cannot be read ({error}): make one with `openssl rand -hex 24`, mode 0600"
        ) from None
    if len(token) < TOKEN_MIN:
        raise GpuwardenError(f"the token in {path} has {len(token)} characters; {TOKEN_MIN} or more are wanted")
    return token
