"""`gpuwarden gateway`: `host` has a socket for each worker's folder, `central` serves hosts with tokens."""

import argparse
import asyncio
import gc
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import structlog
from fastapi import Request
from prometheus_client import CollectorRegistry, disable_created_metrics, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from gpuwarden import logs
from gpuwarden.db.errors import NoAnswerError
from gpuwarden.errors import GpuwardenError
from gpuwarden.files import raise_file_limit
from gpuwarden.format import Help, Parser
from gpuwarden.gateway import CENTRAL_PORT, HOST_PORT, metrics
from gpuwarden.gateway.app import REPORT_S, SLOT_BOUNDS, Caller, Counted, create_app
from gpuwarden.gateway.batching import Batching
from gpuwarden.gateway.job_watcher import JobWatcher
from gpuwarden.gateway.operations import HOST_OPERATIONS, OPERATIONS
from gpuwarden.gateway.ownership import Ownership
from gpuwarden.gateway.sockets import Sockets
from gpuwarden.gateway.upstream import CentralUpstream, DatabaseUpstream, LogLimit, Upstream
from gpuwarden.gateway.wire import PREFIX
from gpuwarden.http.check_request import CheckRequest
from gpuwarden.http.serving import Server, SocketServer, bind
from gpuwarden.http.web_config import WebConfig
from gpuwarden.queue.open import add_store, created
from gpuwarden.reporter import host_key, state_directory
from gpuwarden.state_file import is_text

if TYPE_CHECKING:
    from gpuwarden.queue import JobStore

LOOK_S: Final = 1.0
"""Interval between looks for new folders, seconds."""

RETRY_S: Final = 1.0

SOCKET_CONNECTIONS_MAX: Final = 256
"""Most open connections of one socket. A worker uses three, and a folder may have `POOL_MAX` workers."""

CENTRAL_CONNECTIONS_MAX: Final = 7000
"""Most open connections of hosts. A host has one for each queue with idle workers, and a few more."""

KEEP_ALIVE_S: Final = 75
"""How long an idle connection of a host is kept, seconds: longer than the host keeps it."""

GC_THRESHOLDS: Final = (700, 10, 200)
"""Python's, but 20 times fewer full collections: with 5,000 workers one takes 0.2 s, in which nothing is answered."""

THREADS: Final = 12
"""Most operations at once."""

CONNECTIONS: Final = THREADS + 4
"""Connections to the database: also for checks of tokens, and to count jobs."""

QUEUES_ENV: Final = "GPUWARDEN_GATEWAY_HOST_QUEUES"

CALLER: Final = "gpuwarden.caller"
"""Key of a socket's caller in a request's scope."""

log: Final = structlog.get_logger("gateway")


def command(argv: list[str]) -> int:
    """`gpuwarden gateway`."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    logs.configure(level=arguments.log_level)
    disable_created_metrics()  # type: ignore[no-untyped-call]
    return arguments.act(parser, arguments)  # type: ignore[no-any-return]


def _host(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    if arguments.central and arguments.token_file is None:
        parser.error("--central needs --token-file: `gpuwarden host enrol HOST` makes a token")
    directory: Path = arguments.runtime_dir or state_directory()
    if not directory.is_dir():
        raise GpuwardenError(f"{directory} does not exist: create it, with this host's name in {directory}/host")
    host = host_key(directory)
    limits = _limits(parser, arguments.queues)
    web = WebConfig(arguments.web_config_file)
    raise_file_limit()
    with ExitStack() as held:
        listener = bind(arguments.listen, arguments.port)
        registry = CollectorRegistry()
        store = None
        if not arguments.central:
            store = _opened(arguments.queue_db)
            held.callback(store.close)

        async def serve() -> None:
            upstream: Upstream
            if store is None:
                central = CentralUpstream(arguments.central, arguments.token_file, ca_file=arguments.ca_file)
                upstream = batching = Batching(central, host)
                batching.start()
            else:
                upstream = _database(store, registry)
            app = create_app(_AtSocket(), upstream, Counted(registry))
            sockets = Sockets(directory)
            metrics.SOCKETS.gauge(registry, lambda: len(sockets.bound))
            ready = _ready(web, listener, host=host, role="host")
            server = Server(_pages(registry, web), web, at_start=ready, at_end=_ending(upstream))
            keeping = asyncio.create_task(_keep(sockets, app, host, limits))
            keeping.add_done_callback(lambda _: server.stop())
            try:
                await _run(server, listener)
            finally:
                await upstream.close()
                keeping.cancel()
                with suppress(asyncio.CancelledError):
                    await keeping

        asyncio.run(serve())
    return 0


def _central(_: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    # A host's gateway uses neither, nor their SQLAlchemy.
    from gpuwarden.gateway import reports as host_reports  # noqa: PLC0415
    from gpuwarden.gateway.central import Hosts  # noqa: PLC0415
    from gpuwarden.gateway.host_watch import HostWatch  # noqa: PLC0415

    web = WebConfig(arguments.web_config_file)
    listener = bind(arguments.listen, arguments.port)
    raise_file_limit()
    store = _opened(arguments.queue_db)

    async def serve() -> None:
        registry = CollectorRegistry()
        upstream = _database(store, registry)
        hosts, counted = Hosts(store), Counted(registry)
        operations = create_app(hosts, upstream, counted, {**OPERATIONS, **HOST_OPERATIONS})
        reports = host_reports.Reports(store, hosts, counted)
        reports.add_to(operations)
        pages = _pages(registry, web, Route("/reports", reports.page))
        app = _by_path((PREFIX, host_reports.PREFIX), operations, pages)
        ready = _ready(web, listener, role="central")
        server = Server(
            app,
            web,
            at_start=ready,
            at_end=_ending(upstream),
            connections_max=CENTRAL_CONNECTIONS_MAX,
            keep_alive_s=KEEP_ALIVE_S,
        )
        watching = asyncio.create_task(HostWatch(store, after_s=arguments.host_lost_after_s).run())
        gc.set_threshold(*GC_THRESHOLDS)
        try:
            await _run(server, listener)
        finally:
            watching.cancel()
            await upstream.close()

    try:
        asyncio.run(serve())
    finally:
        store.close()
    return 0


class _AtSocket:
    """Recognises a slot by the socket that it used."""

    async def caller_of(self, request: Request) -> Caller:
        """See `Callers`."""
        caller: Caller = request.scope[CALLER]
        return caller


def _opened(url: str) -> "JobStore":
    """Open the queue, and wait for it."""
    logged = False
    while True:
        try:
            return created(url, connections=CONNECTIONS)
        except NoAnswerError as error:
            if not logged:
                log.warning("queue does not answer; asking again", reason=str(error))
                logged = True
            time.sleep(RETRY_S)


def _database(store: "JobStore", registry: CollectorRegistry) -> DatabaseUpstream:
    """Answers from a database. Call it in the event loop."""
    watcher = JobWatcher(store)
    watcher.start()
    metrics.WAITING.gauge(registry, lambda: watcher.count)
    ownership = Ownership(store.batches.owned)
    ownership.start()
    return DatabaseUpstream(store, watcher, ownership, threads=THREADS)


def _ready(web: WebConfig, listener: socket.socket, **its: Any) -> partial[None]:
    return partial(log.info, "gateway ready", **its, port=listener.getsockname()[1], web=web.describe())


def _ending(upstream: Upstream) -> Callable[[], None]:
    """Answer those who wait at the first stop signal. Call it in the event loop."""
    loop, closing = asyncio.get_running_loop(), set[asyncio.Task[None]]()

    def close() -> None:
        loop.call_soon_threadsafe(lambda: closing.add(loop.create_task(upstream.close())))

    return close


async def _run(server: Server, listener: socket.socket) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, server.handle_exit)
    gc.collect()
    gc.freeze()  # a full collection then takes no time for modules: 0.1 to 0.4 s in which nothing is answered
    await server.serve(sockets=[listener])


def _by_path(prefixes: tuple[str, ...], operations: ASGIApp, pages: ASGIApp) -> ASGIApp:
    """Operations authenticate by token, pages by the web configuration."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        asks = path.startswith(prefixes) or path == "/openapi.json"
        await (operations if asks else pages)(scope, receive, send)

    return answer


async def _keep(sockets: Sockets, app: ASGIApp, host: str, limits: "list[_Limit]") -> None:
    """Serve a socket in each folder, and follow new and removed folders."""
    servers: dict[str, SocketServer] = {}
    starting: set[asyncio.Task[None]] = set()
    replaced = LogLimit(REPORT_S)

    def created(folder: str) -> SocketServer:
        may_be, queues = partial(sockets.may_be, folder), queues_of(folder, limits)
        caller = Caller(name=folder, host=host, may_be=may_be, bounds=SLOT_BOUNDS, queues=queues)

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            await app({**scope, CALLER: caller}, receive, send)

        return SocketServer(answer, connections_max=SOCKET_CONNECTIONS_MAX)

    def opened(folder: str, listener: socket.socket) -> None:
        if folder not in servers:  # a replaced socket keeps its bounds: its worker may have removed it
            servers[folder] = created(folder)
            log.info("socket opened", folder=folder)
        elif replaced.is_due():
            log.warning("a socket was removed or replaced, or its folder has another owner: made again", folder=folder)
        start = asyncio.create_task(servers[folder].start(listener))
        starting.add(start)
        start.add_done_callback(starting.discard)

    def closed(folder: str) -> None:
        servers[folder].close()

    logged = ""
    try:
        while True:
            try:
                sockets.look(opened=opened, closed=closed)
                for folder in servers.keys() - sockets.folders:
                    del servers[folder]
                    log.info("socket closed", folder=folder)
                logged = ""
            except OSError as error:
                if logged != str(error):
                    logged = str(error)
                    log.warning("folders not read", reason=logged)
            await asyncio.sleep(LOOK_S)
    finally:
        for server in servers.values():
            server.close()
        sockets.close()


def _pages(registry: CollectorRegistry, web: WebConfig, *others: Route) -> Starlette:
    """`/metrics`, `/-/healthy` and other pages."""

    async def metrics(_: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    async def healthy(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    routes = [Route("/metrics", metrics), Route("/-/healthy", healthy), *others]
    return Starlette(routes=routes, middleware=[Middleware(CheckRequest, web=web)])


_Limit = tuple[str, str]
"""A pattern of folders, and a queue that they may use."""


def queues_of(folder: str, limits: list[_Limit]) -> frozenset[str] | None:
    """The only queues that a folder may use. `None`: all, as there are no limits."""
    return frozenset(queue for pattern, queue in limits if fnmatchcase(folder, pattern)) if limits else None


def _limits(parser: argparse.ArgumentParser, given: list[_Limit] | None) -> list[_Limit]:
    its = os.environ.get(QUEUES_ENV)
    try:
        return [_limit(each) for each in its.split(",")] if given is None and its else given or []
    except argparse.ArgumentTypeError as error:
        parser.error(f"${QUEUES_ENV}: {error}")


def _limit(text: str) -> _Limit:
    pattern, _, queue = text.partition("=")
    if not pattern or not is_text(queue):
        raise argparse.ArgumentTypeError(f"{text[:80]!a} is invalid: use FOLDER=QUEUE, as *=gpu for all folders")
    return pattern, queue


def _lost_after_s(text: str) -> float:
    found = float(text)
    if not 30 <= found <= 480:  # a host with jobs may be heard every 21 s only: a heartbeat waits 10 s for others
        raise argparse.ArgumentTypeError(f"{text!a} is invalid: use seconds from 30 to 480")
    return found


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="gpuwarden gateway", description="Give workers the queue without a database.", formatter_class=Help
    )
    roles = parser.add_subparsers(required=True)
    host = roles.add_parser(
        "host",
        help="make a socket in each worker's folder of this host",
        description="Make a socket in each worker's folder. Workers reach the queue through it, and need no database, "
        "password or network.",
        epilog="A worker finds the socket, or waits for it with --queue-db gateway.",
        formatter_class=Help,
    )
    host.add_argument("--runtime-dir", type=Path, help="folder of state files, with a folder per worker; default: "
                      "$GPUWARDEN_RUNTIME_DIR, else /run/gpuwarden")  # fmt: skip
    host.add_argument("--central", metavar="URL", default=os.environ.get("GPUWARDEN_GATEWAY"),
                      help="address of a central gateway, instead of a database; default: "
                      "$GPUWARDEN_GATEWAY")  # fmt: skip
    host.add_argument("--token-file", type=Path, help="file with this host's token, for --central")
    host.add_argument("--ca-file", type=Path, help="authorities that signed the certificate of --central; default: "
                      "those of the system")  # fmt: skip
    host.add_argument("--queue", dest="queues", action="append", type=_limit, metavar="FOLDER=QUEUE",
                      help="queue that the workers of a folder may use; a folder may be a pattern, as w*; repeatable. "
                      "Folders without one then use none. Default: all folders use all queues; or "
                      f"${QUEUES_ENV}, with commas")  # fmt: skip
    central = roles.add_parser(
        "central",
        help="serve the gateways of hosts with tokens",
        description="Serve the gateways of hosts. A host has a token of `gpuwarden host enrol`, and can act for its "
        "own workers only.",
        epilog="Give it TLS by --web-config-file, or by a reverse proxy on the same host.",
        formatter_class=Help,
    )
    central.add_argument("--host-lost-after-s", type=_lost_after_s, default=180.0, metavar="SECONDS",
                         help="time after which a silent host with jobs is lost, seconds from 30 to 480")  # fmt: skip
    for each, act, what, port in (
        (host, _host, "/metrics and /-/healthy", HOST_PORT),
        (central, _central, "the hosts' requests, /reports, /metrics and /-/healthy", CENTRAL_PORT),
    ):
        add_store(each)
        name = "GPUWARDEN_GATEWAY_" + ("HOST" if each is host else "CENTRAL")
        listen, its_port, web = (f"{name}_{option}" for option in ("LISTEN", "PORT", "WEB_CONFIG_FILE"))
        each.add_argument("--listen", default=os.environ.get(listen, "127.0.0.1"),
                          help=f"address of {what}; or ${listen}")  # fmt: skip
        each.add_argument("--port", type=int, default=os.environ.get(its_port, port),
                          help=f"port to listen on; 0 selects a free one; or ${its_port}")  # fmt: skip
        each.add_argument("--web-config-file", type=Path, default=os.environ.get(web),
                          help=f"TLS; passwords and tokens of /metrics; or ${web}")  # fmt: skip
        each.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"],
                          help="verbosity")  # fmt: skip
        each.set_defaults(act=act)
    return parser
