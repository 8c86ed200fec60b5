"""`gpuwarden remediator serve`: build the webhook from settings, run it, stop on SIGTERM."""

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import Final

import structlog
from prometheus_client.registry import Collector

from gpuwarden import __version__, logs
from gpuwarden.http.serving import Server, bind
from gpuwarden.http.web_config import WebConfig
from gpuwarden.kube import api as kube_api
from gpuwarden.queue.open import existing
from gpuwarden.reporter import host_key
from remediator.ledger.ledger import Ledger
from remediator.metrics.pending_pods import PendingPodsCollector
from remediator.metrics.queue import QueueCollector
from remediator.settings.settings import ServeSettings
from remediator.webhook.app import create_app

log: Final = structlog.get_logger("remediator")

END_S: Final = 8.0
"""Timeout of the shutdown, seconds: an unreachable database would block it forever."""


def serve(settings: ServeSettings) -> None:
    """Serve the webhook until SIGTERM or SIGINT.

    Raises:
        GpuwardenError: it cannot start; the message says why.
    """
    logs.configure(level=settings.log_level)
    host = host_key(settings.runtime_dir)
    web = WebConfig(settings.web_config_file, credentials_required=True)
    with ExitStack() as parts:
        end = parts.enter_context(_exit_timer())
        ledger = parts.enter_context(closing(Ledger.open(settings.ledger, host=host)))
        collectors: list[Collector] = []
        open_queue = None
        if settings.queue_db is not None:
            if not settings.allow_shared_role:
                ledger.refuse_role_of(settings.queue_db)
            open_queue = partial(existing, settings.queue_db)
            collectors.append(parts.enter_context(closing(QueueCollector(open_queue, host=host))))
        if settings.notify_file is not None:
            from remediator.notify.notifier import Notifier  # noqa: PLC0415 - most hosts notify nobody

            collectors.append(parts.enter_context(Notifier(ledger, settings.notify_file, queue=open_queue)))
        pending_pods = _pending_pods(settings)
        if pending_pods is not None:
            parts.enter_context(closing(pending_pods)).start()
            collectors.append(pending_pods)
        app = create_app(
            ledger=ledger,
            host=host,
            web=web,
            body_max_bytes=settings.body_max_bytes,
            alerts_max=settings.alerts_max,
            alertmanagers=settings.alertmanager,
            collectors=collectors,
            wrangle_activation=settings.wrangle_activation,
            executor_down_s=settings.executor_down_s,
            intent_overdue_s=settings.intent_overdue_s,
        )
        with bind(settings.listen, settings.port) as listener:

            def ready() -> None:
                log.info("remediator ready", host=host, listen=settings.listen, port=listener.getsockname()[1],
                         web=web.describe(), version=__version__)  # fmt: skip

            gc.collect()
            gc.freeze()  # collecting these objects again would delay a call by 60 ms
            Server(app, web, at_start=ready, at_end=end.start).run(sockets=[listener])
    log.info("remediator stopped")


def _pending_pods(settings: ServeSettings) -> PendingPodsCollector | None:
    if not settings.pending_pods:
        return None
    api = kube_api.connect()
    from remediator.clients.nodes import Nodes  # noqa: PLC0415 - slow to import

    nodes = Nodes(api, settings.budget_resource)
    return PendingPodsCollector(nodes.pending_pods, pending_s=settings.pod_pending_s)


@contextmanager
def _exit_timer() -> Iterator[threading.Timer]:
    """A timer that exits the process after `END_S`, to be started by a signal.

    Nothing is lost: Alertmanager repeats calls without 202.
    """
    before = set(threading.enumerate())
    end = threading.Timer(END_S, _exit_now)
    end.daemon = True
    yield end
    if end.ident is not None:
        # Threads that wait for a database. Python would wait for them at exit.
        for thread in set(threading.enumerate()) - before - {end}:
            if not thread.daemon:
                thread.join()
    end.cancel()


def _exit_now() -> None:
    log.warning("remediator stopped", reason=f"no answer from a database within {END_S:g} s; open calls are resent")
    os._exit(0)  # a requested stop is not a failure
