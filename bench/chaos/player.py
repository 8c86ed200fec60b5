"""Run workers and a sweeper, submit jobs, and cause failures, all from one seed.

Dead processes are restarted. At least one worker is killed at work. Then the failures end, the queue drains, and
`judge` checks the result.
"""

import os
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psycopg

from bench.chaos.body import LOG_VARIABLE
from bench.chaos.log import effects_of
from bench.chaos.processes import LEASE_S, QUEUE, Process, gateways, sweeper, workers
from deploy.standalone.stack import CHECKOUT
from gpuwarden.db.errors import DatabaseError
from gpuwarden.job import FINAL, JobClass, JobId, State
from gpuwarden.queue import JobStore, Submission
from testbed.postgres import Postgres

TICK_S: Final = 0.05
OPEN_MAX: Final = 30
"""Limit of open jobs."""

DOWN_EVERY_S: Final = 10.0
"""Interval of server outages."""

DRAIN_S: Final = 90.0
AT_WORK: Final = "worker killed at work"
"""Counts workers that certainly had an unfinished job."""


@dataclass(frozen=True, kw_only=True)
class Stop:
    """A pause of a process by SIGSTOP, monotonic seconds."""

    pid: int
    from_s: float
    to_s: float


@dataclass(kw_only=True)
class Played:
    """Actions, and where `judge` finds their result."""

    seed: int
    url: str
    log: Path
    counts: Counter[str] = field(default_factory=Counter)
    stops: list[Stop] = field(default_factory=list)
    submitted: list[JobId] = field(default_factory=list)
    seen: list[int] = field(default_factory=list)
    """Positions of the consumed events, in order."""
    ends: Counter[int] = field(default_factory=Counter)
    """Ended workers by exit code."""
    drained: bool = False


def play(
    url: str,
    folder: Path,
    *,
    seconds: float,
    seed: int,
    server: Postgres | None = None,
    through_gateways: bool = False,
) -> Played:
    """Cause failures, also of `server` if given, and drain the queue."""
    player = _Player(url, folder, seconds=seconds, seed=seed, server=server, through_gateways=through_gateways)
    with player.processes():
        player.play()
        player.hit_one_at_work()
        player.drain()
    return player.played


class _Player:
    def __init__(
        self, url: str, folder: Path, *, seconds: float, seed: int, server: Postgres | None, through_gateways: bool
    ) -> None:
        self.played = Played(seed=seed, url=url, log=folder / "effects.log")
        self._folder = folder
        self._seconds = seconds
        self._server = server
        self._random = random.Random(seed)  # noqa: S311 - not a secret
        self._store = JobStore.open(url)
        self._run = self._made = 0
        self._steps: dict[int, int] = {}
        """Number of steps of each job without a run."""
        self._server_back_at_s: float | None = None
        self._workers = workers(folder, url, through_gateways=through_gateways)
        self._gateways = gateways(folder, url, self._store) if through_gateways else []
        self._others = [sweeper(url), *self._gateways]

    # --- phases

    def play(self) -> None:
        self._await_gateways()
        begun_s = time.monotonic()
        harms: list[tuple[float, Callable[[], None]]] = [
            (2.5, self._kill_worker),
            (5.0, self._kill_at_work),
            (2.5, lambda: self._stop_worker(0.2, 2.0)),
            (5.0, lambda: self._stop_worker(LEASE_S + 2.0, 2 * LEASE_S + 2.0)),
            (8.0, lambda: self._kill(self._others[0], "sweeper killed")),
            (0.4, self._submit),
            (0.7, self._consume),
        ]
        if self._server is not None:
            harms.append((0.8, self._drop_connections))
        if self._gateways:
            harms += [(6.0, lambda: self._kill_gateway("host")), (6.0, lambda: self._kill_gateway("central"))]
        due = [(begun_s + self._random.uniform(0.0, every_s), every_s, act) for every_s, act in harms]
        times = max(4, int(self._seconds / DOWN_EVERY_S)) if self._server is not None else 0
        down = [begun_s + self._seconds * (n + 1) / (times + 1) for n in range(times)]
        while (now_s := time.monotonic()) < begun_s + self._seconds:
            self._restart_processes(now_s)
            if down and now_s >= down[0] and self._server_back_at_s is None:
                down.pop(0)
                self._take_server_down(cleanly=len(down) % 2 == 1)
            for number, (at_s, every_s, act) in enumerate(due):
                if now_s >= at_s:
                    due[number] = (now_s + self._random.expovariate(1 / every_s), every_s, act)
                    act()
            time.sleep(TICK_S)

    def hit_one_at_work(self) -> None:
        """Kill a worker at work if none was. On a slow machine every earlier kill may miss."""
        self._end_outages()
        give_up_s = time.monotonic() + DRAIN_S
        while not self.played.counts[AT_WORK] and time.monotonic() < give_up_s:
            self._restart_processes(time.monotonic())
            self._submit()
            self._kill_at_work()
            time.sleep(TICK_S)

    def drain(self) -> None:
        """Wait until every job has ended and every event is consumed."""
        self._end_outages()
        give_up_s = time.monotonic() + DRAIN_S
        while not self.played.drained and time.monotonic() < give_up_s:
            self._restart_processes(time.monotonic())
            self._consume()
            with suppress(DatabaseError):
                self.played.drained = not self._store.jobs(states=frozenset(State) - FINAL) and self._is_all_consumed()
            time.sleep(4 * TICK_S)

    def _end_outages(self) -> None:
        self._server_back_at_s = self._server_back_at_s and 0.0
        for each in self._workers:
            each.resume_at_s = 0.0

    def _is_all_consumed(self) -> bool:
        # In this order: the sweep of a run's last event writes one more event.
        return self._store.sweeps.consume_events(now=self._store.now()) == 0 and not self._store.outbox.events("player")

    # --- processes

    @contextmanager
    def processes(self) -> Iterator[None]:
        try:
            yield
        finally:
            for each in (*self._workers, *self._others):
                if each.popen is not None:
                    each.popen.kill()
                    each.popen.wait()
            self._store.close()

    def _restart_processes(self, now_s: float) -> None:
        """Start dead processes and continue stopped ones when they are due."""
        if self._server is not None and self._server_back_at_s is not None and now_s >= self._server_back_at_s:
            self._server.start()
            self._server_back_at_s = None
        for each in (*self._workers, *self._others):
            if each.stopped_at_s is not None and now_s >= each.resume_at_s:
                self._resume(each)
            if each.popen is not None and (code := each.popen.poll()) is not None:
                self._record_exit(each, code, now_s)
            if each.popen is None and now_s >= each.start_at_s:
                each.popen = self._start(each)

    def _start(self, each: Process) -> subprocess.Popen[bytes]:
        setpriv = shutil.which("setpriv", path=os.defpath)  # ends it with this process
        tether = [setpriv, "--pdeathsig", "KILL", "--"] if setpriv else []
        with (self._folder / f"{each.name}.log").open("ab") as log:
            return subprocess.Popen(
                [*tether, *each.command],
                cwd=CHECKOUT,
                env={**os.environ, LOG_VARIABLE: str(self.played.log)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _record_exit(self, each: Process, code: int, now_s: float) -> None:
        self._record_stop(each)
        each.popen = None
        each.start_at_s = now_s + self._random.choice((0.0, 0.0, 0.5, 2 * LEASE_S))
        if each not in self._others:
            self.played.ends[code] += 1

    def _resume(self, each: Process) -> None:
        if each.popen is not None:
            each.popen.send_signal(signal.SIGCONT)
        self._record_stop(each)

    def _record_stop(self, each: Process) -> None:
        if each.popen is not None and each.stopped_at_s is not None:
            self.played.stops.append(Stop(pid=each.popen.pid, from_s=each.stopped_at_s, to_s=time.monotonic()))
        each.stopped_at_s = None

    # --- failures

    def _kill_worker(self) -> None:
        if those := [each for each in self._workers if each.popen is not None]:
            self._kill(self._random.choice(those))

    def _kill_at_work(self) -> None:
        """Kill a worker at work; it counts in `AT_WORK` unless its job ended first."""
        if those := [each for each in self._workers if self._is_at_work(each)]:
            each = self._random.choice(those)
            self._kill(each)
            if each.popen is not None:
                each.popen.wait()
            self.played.counts[AT_WORK] += self._is_at_work(each)

    def _is_at_work(self, each: Process) -> bool:
        """Whether its last effect is a step other than the last of a job."""
        pid = each.popen.pid if each.popen is not None else None
        effects = [effect for effect in effects_of(self.played.log) if effect.pid == pid]
        return bool(effects) and effects[-1].step < self._steps.get(effects[-1].job, 0)

    def _await_gateways(self) -> None:
        give_up_s = time.monotonic() + DRAIN_S
        while not all(each.is_listening for each in self._gateways) and time.monotonic() < give_up_s:
            self._restart_processes(time.monotonic())
            time.sleep(TICK_S)

    def _kill_gateway(self, kind: str) -> None:
        """Kill one that serves: on a slow machine the others may still start."""
        if those := [each for each in self._gateways if each.name.startswith(kind) and each.is_listening]:
            self._kill(self._random.choice(those), f"{kind} gateway killed")

    def _kill(self, each: Process, what: str = "worker killed") -> None:
        if each.popen is not None:
            each.popen.kill()
            self.played.counts[what] += 1

    def _stop_worker(self, least_s: float, most_s: float) -> None:
        if those := [each for each in self._workers if each.is_running]:
            each = self._random.choice(those)
            for_s = self._random.uniform(least_s, most_s)
            if each.popen is not None:
                each.popen.send_signal(signal.SIGSTOP)
            each.stopped_at_s = time.monotonic()
            each.resume_at_s = each.stopped_at_s + for_s
            self.played.counts["stopped longer than a lease" if for_s > LEASE_S else "stopped for a while"] += 1

    def _take_server_down(self, *, cleanly: bool) -> None:
        if self._server is None:
            return
        if cleanly:
            self._server.stop()
        else:
            self._server.kill()
        self.played.counts["server stopped" if cleanly else "server killed"] += 1
        self._server_back_at_s = time.monotonic() + self._random.choice((0.0, 0.5, LEASE_S + 1.0))

    def _drop_connections(self) -> None:
        if self._server_back_at_s is not None:
            return
        database = self.played.url.rpartition("/")[2]
        many = self._random.choice((1, 2, 5, 10))
        drop = (
            "SELECT pg_terminate_backend(pid) FROM (SELECT pid FROM pg_stat_activity WHERE datname = %s"
            " AND pid <> pg_backend_pid() ORDER BY random() LIMIT %s) AS chosen"
        )
        with suppress(psycopg.OperationalError), closing(_connect(self.played.url)) as connection:
            self.played.counts["connection dropped"] += len(connection.execute(drop, (database, many)).fetchall())

    # --- jobs and events

    def _submit(self) -> None:
        """Submit a job, or a run of three jobs; the last depends on the others. One job in nine fails."""
        try:
            if len(self._store.jobs(states=frozenset(State) - FINAL)) >= OPEN_MAX:
                return
            now = self._store.now()
            if self._random.random() < 0.6:
                job = self._job()
                ids = [self._store.runs.submit(job, now=now)]
                self._steps[ids[0]] = job.payload["steps"]
            else:
                self._run += 1
                jobs = {name: self._job() for name in ("first", "second", "last")}
                needs = {"last": ["first", "second"]}
                ids = list(self._store.runs.submit_run(f"run {self._run}", jobs, needs=needs, now=now).values())
        except DatabaseError:
            self.played.counts["submission unanswered"] += 1  # it may have succeeded
        else:
            self.played.submitted += ids

    def _job(self) -> Submission:
        self._made += 1
        long = self._random.random() < 0.15
        payload = {
            "steps": self._random.randint(1, 5),
            "step_s": self._random.uniform(0.8, 1.6) if long else self._random.uniform(0.02, 0.3),
            "fails": self._made % 9 == 3,
        }
        return Submission(queue=QUEUE, job_class=JobClass.CPU, payload=payload)

    def _consume(self) -> None:
        with suppress(DatabaseError):
            if events := self._store.outbox.events("player", limit=self._random.randint(1, 10)):
                self.played.seen += [each.position for each in events]
                self._store.outbox.acknowledge("player", self._random.choice(events), now=self._store.now())


def _connect(url: str) -> psycopg.Connection:
    return psycopg.connect(url.replace("postgresql+psycopg:", "postgresql:"), autocommit=True, connect_timeout=5)
