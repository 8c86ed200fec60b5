"""`gpuwarden remediator serve`: settings in, parts wired, a clean end on SIGTERM."""

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import Final

import structlog

from gpuwarden import __version__, logs
from gpuwarden.http.serving import Server, bind
from gpuwarden.http.web_config import WebConfig
from gpuwarden.queue.open import existing
from gpuwarden.reporter import host_key
from remediator.ledger.ledger import Ledger
from remediator.metrics.queue import QueueCollector
from remediator.settings.settings import ServeSettings
from remediator.webhook.app import create_app

log: Final = structlog.get_logger("remediator")

END_S: Final = 8.0
"""How long the end may take in all, seconds: a database that has gone silent would be waited for without a bound."""


def serve(settings: ServeSettings) -> None:
    """Answer Alertmanager until SIGTERM or SIGINT.

    Raises:
        GpuwardenError: it cannot start, and why.
    """
    logs.configure(level=settings.log_level)
    host = host_key(settings.dir)
    web = WebConfig(settings.web_config_file, credentials_required=True)
    with ExitStack() as parts:
        end = parts.enter_context(_end_in_time())
        ledger = parts.enter_context(closing(Ledger.open(settings.ledger, host=host)))
        queue = None
        if settings.queue is not None:
            queue = parts.enter_context(closing(QueueCollector(partial(existing, settings.queue), host=host)))
        app = create_app(
            ledger=ledger,
            host=host,
            web=web,
            body_max_bytes=settings.body_max_bytes,
            alerts_max=settings.alerts_max,
            alertmanagers=settings.alertmanager,
            queue=queue,
            node_lost_after_s=settings.node_lost_after_s,
            wrangle_activation=settings.wrangle_activation,
            executor_silent_s=settings.executor_silent_s,
            intent_overdue_s=settings.intent_overdue_s,
        )
        with bind(settings.listen, settings.port) as listener:

            def ready() -> None:
                log.info("remediator ready", host=host, listen=settings.listen, port=listener.getsockname()[1],
                         web=web.describe(), version=__version__)  # fmt: skip

            gc.collect()
            gc.freeze()  # what is there now stays: to look through all of it again would hold up a call for 60 ms
            Server(app, web, at_start=ready, at_end=end.start).run(sockets=[listener])
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
