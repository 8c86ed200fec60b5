"""A worker's lease: renew it, watch the claim, and end the process once the job is lost."""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import structlog

from gpuwarden import clock
from gpuwarden.db.errors import DatabaseError
from gpuwarden.gateway.client import GatewayStore
from gpuwarden.job import EXIT_DISOWNED
from gpuwarden.queue import Job
from gpuwarden.reporter import Reporter
from gpuwarden.worker.commands import Commands
from gpuwarden.worker.settings import Settings

if TYPE_CHECKING:
    from gpuwarden.queue import JobStore

OWNERSHIP_S: Final = 1.0
"""Interval between checks of the claim, seconds."""

TRIP_S: Final = 1.0
"""How long a worker that lost its job asks why, seconds."""

DISOWNED: Final = "this worker no longer owns its job"

log: Final = structlog.get_logger("worker")


class Lease:
    """The lease of the current job, and the worker's row."""

    def __init__(
        self,
        settings: Settings,
        *,
        store: "JobStore | GatewayStore",
        reporter: Reporter,
        loaded: Callable[[], str | None],
        commands: Commands | None = None,
    ) -> None:
        self._settings = settings
        self._store = store
        self._reporter = reporter
        self._loaded = loaded
        self._commands = commands
        # Send time of the last accepted renewal, CLOCK_BOOTTIME.
        self._renewed_s = 0.0

    def claiming(self) -> None:
        """Start the time of a lease, before the claim is sent."""
        self._renewed_s = clock.boottime_s()

    def start(self, job: Job, over: threading.Event) -> threading.Thread:
        """Renew the lease in a thread until `over` is set. Returns the thread."""
        keeper = threading.Thread(target=self._keep, args=(job, over), name="gpuwarden-lease", daemon=True)
        keeper.start()
        if self._store.shared:
            bound = log.bind(worker=self._settings.name, job_id=job.job_id, attempt=job.attempt)
            threading.Thread(target=self._time, args=(bound, over), name="gpuwarden-lease-time", daemon=True).start()
        return keeper

    def _keep(self, job: Job, over: threading.Event) -> None:
        """Renew the lease and watch the claim. Database errors do not stop the job."""
        bound = log.bind(worker=self._settings.name, job_id=job.job_id, attempt=job.attempt)
        incarnation = self._reporter.incarnation
        next_renewal_s = 0.0
        while not over.wait(OWNERSHIP_S):
            try:
                now_s = time.monotonic()
                if now_s >= next_renewal_s:
                    owned = self._renew(job)
                    # Set after success: a failed renewal is retried at the next check.
                    next_renewal_s = now_s + self._settings.heartbeat_s
                else:
                    owned = self._store.claims.owns(job.job_id, attempt=job.attempt, incarnation=incarnation)
            except DatabaseError as error:
                bound.warning("queue does not answer; job continues", reason=str(error))
                if self._commands is not None and not self._store.shared:
                    self._commands.renewed()  # no other host can have the job
                continue
            except Exception:  # noqa: BLE001 - logged; without this thread the lease would end
                bound.exception("unexpected error; job continues")
                continue
            if not owned and not over.is_set():
                self._end_command()
                stop_at_once(bound, DISOWNED, self.exit_code())

    def exit_code(self) -> int:
        """Exit code for a lost job, by its condition if the queue answers at once."""
        codes = [EXIT_DISOWNED]

        def ask() -> None:
            host, name, incarnation = self._settings.host, self._settings.name, self._reporter.incarnation
            with suppress(Exception):  # no error may keep the worker from its end
                condition = self._store.claims.retired_for(host=host, worker=name, incarnation=incarnation)
                if condition is not None:
                    codes.append(condition.exit_code)

        asking = threading.Thread(target=ask, name="gpuwarden-trip", daemon=True)
        asking.start()
        asking.join(TRIP_S)
        return codes[-1]

    def _renew(self, job: Job) -> bool:
        sent_s = clock.boottime_s()
        owned = self._store.claims.renew(
            job.job_id,
            attempt=job.attempt,
            incarnation=self._reporter.incarnation,
            now=self._store.now(),
            lease_s=self._settings.lease_s,
        )
        if owned:
            self._renewed_s = sent_s
            if self._commands is not None:
                self._commands.renewed()
        return owned and self.see(model=job.model or job.job_class)

    def _time(self, bound: structlog.typing.FilteringBoundLogger, over: threading.Event) -> None:
        """End the process after a lease without renewal. Does not use the database, which could block."""
        while not over.wait(OWNERSHIP_S):
            if clock.boottime_s() - self._renewed_s >= self._settings.lease_s and not over.is_set():
                self._end_command()
                stop_at_once(bound, f"the lease could not be renewed for {self._settings.lease_s:g} s")

    def _end_command(self) -> None:
        """End the job's command, which would outlive this process."""
        if self._commands is not None:
            with suppress(Exception):  # no error may keep the worker from its end
                self._commands.request_end()

    def see(self, *, model: str | None, completed: bool = False) -> bool:
        """Refresh the worker's row; False if this incarnation is over. Ignores database errors."""
        with suppress(DatabaseError):
            return self.heartbeat(model=model, completed=completed)
        return True

    def heartbeat(self, *, model: str | None, completed: bool = False) -> bool:
        """Refresh the worker's row; False if this incarnation is over."""
        now = self._store.now()
        return self._store.claims.heartbeat(
            host=self._settings.host,
            worker=self._settings.name,
            queue=self._settings.queue,
            incarnation=self._reporter.incarnation,
            model=model,
            now=now,
            loaded=self._loaded(),
            completed_at=now if completed else None,
        )


def stop_at_once(bound: structlog.typing.FilteringBoundLogger, reason: str, exit_code: int = EXIT_DISOWNED) -> None:
    """End the process without another instruction of the job, which may have a new owner."""
    bound.error("stopping at once", reason=reason, exit_code=exit_code)
    os._exit(exit_code)
