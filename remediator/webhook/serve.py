"""`gpuwarden remediator serve`: settings in, parts wired, a clean end on SIGTERM."""

import gc
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from types import FrameType
from typing import Final

import structlog
import uvicorn

from gpuwarden import __version__, logs
from gpuwarden.errors import GpuwardenError
from gpuwarden.http.serving import hint as bind_hint
from gpuwarden.queue.open import existing
from gpuwarden.reporter import host_key
from remediator import tls
from remediator.ledger.ledger import Ledger
from remediator.metrics.queue import QueueCollector
from remediator.settings.settings import ServeSettings
from remediator.webhook.app import create_app
from remediator.webhook.auth import Credentials

log: Final = structlog.get_logger("remediator")

GRACEFUL_S: Final = 5
"""How long calls that are being answered when the end is asked for may take, seconds."""

END_S: Final = 8.0
"""How long the end may take in all, seconds: a database that has gone silent would be waited for without a bound."""


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
        end = parts.enter_context(_end_in_time())
        ledger = parts.enter_context(closing(Ledger.open(settings.ledger, host=host)))
        queue = None
        if settings.queue is not None:
            queue = parts.enter_context(closing(QueueCollector(partial(existing, settings.queue), host=host)))
        app = create_app(
            ledger=ledger,
            host=host,
            credentials=credentials,
            body_max_bytes=settings.body_max_bytes,
            alerts_max=settings.alerts_max,
            alertmanagers=settings.alertmanager,
            queue=queue,
            node_lost_after_s=settings.node_lost_after_s,
            wrangle_activation=settings.wrangle_activation,
            executor_silent_s=settings.executor_silent_s,
            intent_overdue_s=settings.intent_overdue_s,
        )
        server = _Server(
            uvicorn.Config(
                # Named, for uvicorn takes what is installed: httptools reads headers without any bound.
                app,
                http="h11",
                loop="asyncio",
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=GRACEFUL_S,
                **encrypted,
            ),
            end,
        )
        with _listening(settings.listen, settings.port) as listener:
            port = listener.getsockname()[1]
            scheme = "https" if encrypted else "http"
            log.info(
                "remediator ready", host=host, listen=settings.listen, port=port, scheme=scheme, version=__version__
            )
            gc.collect()
            gc.freeze()  # what is there now stays: to look through all of it again would hold up a call for 60 ms
            server.run(sockets=[listener])
    log.info("remediator stopped")


@contextmanager
def _end_in_time() -> Iterator[threading.Timer]:
    """What ends this process `END_S` after it is started, whatever its threads wait for; to be started by a signal.

    Nothing is lost by that: what was answered with 202 is durable by then, and all else is sent again.
    """
    before = set(threading.enumerate())
    end = threading.Timer(END_S, _end_now)
    end.daemon = True
    yield end
    if end.ident is not None:
        # Those that wait for a database: at its exit, Python waits for them however long that takes.
        for thread in set(threading.enumerate()) - before - {end}:
            if not thread.daemon:
                thread.join()
    end.cancel()


def _end_now() -> None:
    log.warning("remediator stopped", because=f"a database was not waited for that was silent for {END_S:g} s")
    os._exit(0)  # being told to end is no failure


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, end: threading.Timer) -> None:
        super().__init__(config)
        self._end = end

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """At the first signal the time begins in which all must be over."""
        if self._end.ident is None:
            self._end.start()
        super().handle_exit(sig, frame)

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
    ipv6 = ":" in address
    family = socket.AF_INET6 if ipv6 else socket.AF_INET
    where = f"[{address}]:{port}" if ipv6 else f"{address}:{port}"
    try:
        server = socket.create_server(
            (address, port), family=family, backlog=2048, dualstack_ipv6=ipv6 and socket.has_dualstack_ipv6()
        )
        # Made anew from its descriptor, it knows that it is TCP: asyncio turns Nagle's delay off for such sockets only,
        # and with it on every answer waits 40 ms for the client's acknowledgement.
        return socket.socket(fileno=server.detach())
    except OSError as error:
        because = (error.strerror or str(error)).partition(" (while")[0]  # Python says the address once more there
        hint = bind_hint(error) or "stop what listens there, or give another --port"
        raise GpuwardenError(f"cannot listen on {where} ({because}): {hint}") from None
