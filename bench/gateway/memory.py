"""Memory of a real host's gateway and of real workers: with a central gateway, with a database, and direct access."""

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from bench.cost import resident_mib
from bench.figures import Figure, Place, figure, progress, wait_until
from bench.gateway.program import READY_S, gateway, running
from deploy.standalone import ports
from gpuwarden.gateway.wire import SOCKET_NAME
from gpuwarden.job import State
from gpuwarden.queue import JobStore, Submission
from testbed.postgres import NoPostgres, postgres

CENTRAL: Final = "with --central"
BODY: Final = "def load(job, report):\n    return lambda: None\n"


@dataclass(kw_only=True)
class Host:
    """A simulated host. `gateway` is the pid of its gateway, if it has one."""

    runtime: Path
    gateway: int | None = None
    workers: list[int] = field(default_factory=list)


def measure(place: Place) -> Iterator[Figure]:
    """Measure with PostgreSQL."""
    folder = place.folder / "gateway-memory"
    folder.mkdir()
    with postgres(folder / "server") as server:
        if isinstance(server, NoPostgres):
            progress(f"gateway-memory skipped: {server.reason}")
            return
        server.create("memory")
        yield from measure_memory(server.url("memory"), folder / "hosts")


def measure_memory(
    url: str, folder: Path, *, workers: int = 8, jobs: int = 500, rest_s: float = 10.0
) -> Iterator[Figure]:
    """Measure after `jobs` have run.

    Args:
        url: of an empty database.
        folder: a new one, for state files and logs.
        workers: of each host.
        jobs: for all workers.
        rest_s: time after the last job, seconds.
    """
    progress(f"gateway, memory with {workers} workers on each host")
    folder.mkdir()
    (folder / "body.py").write_text(BODY, encoding="ascii")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(folder), *sys.path))}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installation has bytecode
    with ExitStack() as stack:
        store = JobStore.open(url)
        stack.callback(store.close)
        token = folder / "token"
        token.write_text(store.host_tokens.enrol("box0", now=store.now()) + "\n", encoding="ascii")
        central, *own = ports.free_ports(3)
        stack.enter_context(gateway(["central", "--queue-db", url], folder / "log", central, environment))
        ways: dict[str, Sequence[str]] = {
            CENTRAL: ["--central", f"http://127.0.0.1:{central}", "--token-file", str(token)],
            "with a database": ["--queue-db", url],
        }
        hosts = [Host(runtime=_runtime(folder, number, workers)) for number in range(3)]
        for host, way, port in zip(hosts, ways.values(), own, strict=False):
            its = ["host", *way, "--runtime-dir", str(host.runtime)]
            host.gateway = stack.enter_context(gateway(its, host.runtime / "log", port, environment))
            wait_until(partial(_has_sockets, host.runtime), within_s=READY_S, what="all sockets are there")
        for host in hosts:
            its = ["worker", "run", "body:load", "--logs", "none", "--runtime-dir", str(host.runtime)]
            its += ["--queue-db", url if host.gateway is None else "gateway", "--name"]
            for each in sorted(host.runtime.glob("w*")):
                host.workers.append(stack.enter_context(running([*its, each.name], host.runtime / "log", environment)))
        wait_until(
            lambda: len(store.admin.workers(now=store.now())) == workers * len(hosts),
            within_s=READY_S,
            what="all workers are registered",
        )
        for _ in range(jobs):
            store.runs.submit(Submission(queue="gpu"), now=store.now())
        wait_until(lambda: not store.jobs(states=_OPEN), within_s=READY_S + jobs, what="all jobs have ended")
        time.sleep(rest_s)
        for host, way in zip(hosts, [*ways, "with direct access"], strict=True):
            if host.gateway is not None:
                yield figure(
                    "gateway-memory", f"host's gateway {way}: memory (RSS)", "MiB", [resident_mib(host.gateway)]
                )
            yield figure(
                "gateway-memory",
                f"worker of a host {way}: memory (RSS)",
                "MiB",
                [resident_mib(pid) for pid in host.workers],
            )


_OPEN: Final = frozenset({State.QUEUED, State.RUNNING})


def _has_sockets(runtime: Path) -> bool:
    return all((each / SOCKET_NAME).is_socket() for each in runtime.glob("w*"))


def _runtime(folder: Path, number: int, workers: int) -> Path:
    runtime = folder / f"run-{number}"
    for each in range(workers):
        (runtime / f"w{each}").mkdir(parents=True)
    (runtime / "host").write_text(f"box{number}\n", encoding="ascii")
    return runtime
