"""Two hosts as stages with containers, and one queue and ledger in PostgreSQL. One of them is made silent.

A suspended process behaves like one that is cut off: it does not answer, and continues later.
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml

from testbed.demo.job_body import Script
from testbed.docker_engine import Engine
from testbed.gpu_simulator import Slot
from testbed.stage import Stage, stage
from testbed.workers import Database, DockerFleet, WorkerOptions
from tests.waiting import eventually

NEVER_S: Final = 3600.0
LOST_AFTER_S: Final = 10.0
PROGRAMS: Final = ("execute", "serve")
"""The parts of a host's remediator."""

LONG: Final = Script(picture="long", load_s=0.5, load_mib=8, steps=100, step_s=0.25)
FINE: Final = Script(picture="fine", load_s=0.2, load_mib=4, steps=2, step_s=0.1)


@dataclass(frozen=True, kw_only=True)
class Host:
    """One host, and its containers as the engine sees them."""

    stage: Stage
    fleet: DockerFleet


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """Both hosts. The left one becomes silent."""

    left: Host
    right: Host

    def until(self, holds: Callable[[], object], what: str, within_s: float = 120) -> None:
        """Wait for a condition; on failure print the log of the right executor."""
        ledger = self.right.stage.ledger

        def log() -> str:
            accounts = [str(ledger.reports.get(each.episode_id)) for each in ledger.reports.newest()]
            logs = [self.left.fleet.logs(slot.worker) for slot in self.left.stage.slots]
            return "\n".join([*accounts, self.right.stage.chain.log_tail("execute"), *logs])

        eventually(holds, what, within_s=within_s, log=log)


@contextmanager
def host(work: Path, engine: Engine, database: Database, slots: list[Slot], queues: dict[str, str]) -> Iterator[Host]:
    with stage(
        work,
        engine,
        slots,
        host=work.name,
        database=database,
        data=work.parent / "data",
        armed=True,
        dead_after_s=NEVER_S,
        host_lost_after_s=LOST_AFTER_S,
        sweep_interval_s=1.0,
        queues=queues,
        options=WorkerOptions(heartbeat_s=1.0),
    ) as scene:
        assert isinstance(scene.fleet, DockerFleet)
        yield Host(stage=scene, fleet=scene.fleet)


def add_scrape_target(watcher: Stage, other: Stage) -> None:
    """Make one host's Prometheus scrape the exporter of another."""
    file = watcher.chain.plan.work / "prometheus.yml"
    config = yaml.safe_load(file.read_text())
    address, its_host = other.chain.exporter_url.removeprefix("http://"), other.chain.plan.host
    config["scrape_configs"][0]["static_configs"].append({"targets": [address], "labels": {"host": its_host}})
    file.write_text(yaml.safe_dump(config))
    watcher.chain.signal("prometheus", signal.SIGHUP)
