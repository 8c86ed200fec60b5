"""Two Prometheus and two Alertmanagers, killed, their data lost, against one real remediator: one wedge, one free.

Each Prometheus tells both Alertmanagers, under a replica label of its own that nobody drops. A pause holds the episode
open meanwhile, so that all of it is told about one wedge.
"""

import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest
import yaml
from sqlalchemy import select

from deploy.standalone import debian_packages, package_data
from deploy.standalone.config_files import alertmanager_config, prometheus_config
from gpuwarden.db.transactions import reading
from gpuwarden.job import JobId, State
from remediator.ledger.schema import ALERTS, INTENTS
from remediator.plan import Kind
from remediator.remedies.guards import Act, Order
from testbed.demo.job_body import Script
from testbed.docker_engine import Engine
from testbed.gpu_simulator import Slot
from testbed.stage import FAST, HOST, Stage, stage
from testbed.workers import DockerFleet
from tests.e2e.running import free_ports
from tests.e2e.wedges import TETHER
from tests.waiting import eventually

pytestmark = [pytest.mark.needs_docker, pytest.mark.needs_parts, pytest.mark.nightly]

WORKER: Final = "gpuwarden-pairs"
WEDGE: Final = Script(
    picture="pairs", load_s=0.2, load_mib=1, steps=3, step_s=0.2, wedge_attempts=1, wedge_after_step=1
)
PAIRS: Final = ("a", "b")


@dataclass(frozen=True, kw_only=True)
class Told:
    """One alert as it came, and the replica that it was told under."""

    replica: str
    rule: str
    firing: bool
    starts_at: str


@dataclass(kw_only=True)
class Pairs:
    """Both pairs; each part is called after its kind and its replica, `prometheus-a`."""

    scene: Stage
    work: Path
    ports: dict[str, int]
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str) -> None:
        """Start one part with what it has kept, if anything."""
        kind, replica = name.split("-")
        folder, config = self.work / name, self.work / f"{name}.yml"
        chain, listen = self.scene.chain, f"--web.listen-address=127.0.0.1:{self.ports[name]}"
        if kind == "prometheus":
            text = prometheus_config(
                host=HOST,
                exporter=chain.exporter_url.removeprefix("http://"),
                remediator=chain.remediator_url.removeprefix("http://"),
                alertmanager="",
                prometheus=listen.partition("=")[2],
                rules=package_data.rules(),
                intervals=FAST,
            )
            told = yaml.safe_load(text)
            told["global"]["external_labels"] = {"replica": replica}
            targets = [f"127.0.0.1:{self.ports[f'alertmanager-{each}']}" for each in PAIRS]
            told["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"] = targets
            config.write_text(yaml.safe_dump(told))
            options = [f"--storage.tsdb.path={folder}", "--rules.alert.resend-delay=1s"]
        else:
            webhook = f"{chain.remediator_url}/api/v1/alerts"
            config.write_text(alertmanager_config(webhook=webhook, token_file=chain.token_file, intervals=FAST))
            options = [f"--storage.path={folder}", "--cluster.listen-address="]
        argv = [str(debian_packages.find(kind)), f"--config.file={config}", listen, *options]
        with (self.work / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                [*TETHER, *argv],
                env=debian_packages.env_for_parts(), cwd=self.work, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def kill(self, name: str, *, data_lost: bool = False) -> None:
        """As a crash would."""
        process = self.running.pop(name)
        process.kill()
        process.wait()
        if data_lost:
            shutil.rmtree(self.work / name)

    def told(self) -> list[Told]:
        """What the remediator was told about the worker, in order, as far as it was taken up."""
        columns = (ALERTS.c.labels, ALERTS.c.firing, ALERTS.c.starts_at)
        taken = select(*columns).where(ALERTS.c.state != "new").order_by(ALERTS.c.alert_id)
        with reading(self.scene.ledger._engine) as connection:
            rows = [row for row in connection.execute(taken) if row.labels.get("worker") == WORKER]
        return [
            Told(
                replica=row.labels["replica"], rule=row.labels["alertname"], firing=row.firing, starts_at=row.starts_at
            )
            for row in rows
        ]

    def firing(self) -> set[tuple[str, str]]:
        """By replica and rule, what fires by what was told last."""
        newest = {(each.replica, each.rule): each.firing for each in self.told()}
        return {name for name, firing in newest.items() if firing}

    def frees(self) -> list[str]:
        """The stages of all frees there ever were."""
        with reading(self.scene.ledger._engine) as connection:
            return list(connection.scalars(select(INTENTS.c.stage).where(INTENTS.c.kind == Kind.FREE)))

    def log(self) -> str:
        """The end of what everybody has logged."""
        ends = [path.read_text(errors="replace")[-1500:] for path in sorted(self.work.glob("*.log"))]
        return "\n".join([f"{self.told()}", self.scene.chain.log_tail("execute"), *ends])


@pytest.fixture(scope="module")
def pairs(work: Path, engine: Engine) -> Iterator[Pairs]:
    with stage(work, engine, [Slot(worker=WORKER, gpus=("GPU-pairs",))], armed=True, stop_grace_s=1.0) as scene:
        for part in ("prometheus", "alertmanager"):
            scene.chain.kill(part)  # in their place come two of each
        names = [f"{kind}-{each}" for kind in ("alertmanager", "prometheus") for each in PAIRS]
        folder = work / "pairs"
        folder.mkdir()
        its = Pairs(scene=scene, work=folder, ports=free_ports(names))
        try:
            for name in names:
                its.start(name)
            yield its
        finally:
            for name in list(its.running):
                its.kill(name)


def test_one_wedge_is_freed_once_whatever_dies(pairs: Pairs) -> None:
    scene = pairs.scene
    assert isinstance(scene.fleet, DockerFleet)
    scene.ledger.orders.give(_order(scene, Act.PAUSE))
    scene.start_workers()
    life = scene.fleet.incarnation(WORKER)
    job_id = scene.submit(WEDGE, now=time.time(), stall_timeout_s=3)

    eventually(
        lambda: {replica for replica, _ in pairs.firing()} == set(PAIRS), "both tell", within_s=90, log=pairs.log
    )
    before = {each.starts_at for each in pairs.told()}
    for kind in ("prometheus", "alertmanager"):
        pairs.kill(f"{kind}-a", data_lost=True)
        pairs.start(f"{kind}-a")
    eventually(
        lambda: any(each.replica == "a" and each.firing and each.starts_at not in before for each in pairs.told()),
        "it fires anew, with another startsAt",
        within_s=90,
        log=pairs.log,
    )
    for each in PAIRS:
        pairs.kill(f"prometheus-{each}")
    eventually(lambda: not pairs.firing(), "all of it is told to be over", within_s=90, log=pairs.log)
    over_at = scene.ledger.now()
    eventually(lambda: scene.ledger.executors.last_beats()[HOST] > over_at + 2, "it was looked at since")

    (episode,) = scene.ledger.episodes.list_open()
    assert (episode.worker, episode.free, scene.ledger.reports.newest()[0].closed_at) == (WORKER, None, None)
    assert (scene.store.job(job_id).state, scene.store.job(job_id).attempt) == (State.RUNNING, 1)
    assert scene.fleet.incarnation(WORKER) == life

    for each in PAIRS:
        shutil.rmtree(pairs.work / f"prometheus-{each}")
        pairs.start(f"prometheus-{each}")
    scene.ledger.orders.give(_order(scene, Act.RESUME))
    eventually(lambda: _is_mended(scene, job_id), "it is mended", within_s=90, log=pairs.log)
    job = scene.store.job(job_id)
    assert (job.attempt, job.watchdog_retries, job.reclaims) == (2, 1, 0)
    history = scene.fleet.history(WORKER)
    assert [event for event in history if event in ("start", "die", "restart")] == ["start", "die", "start"], history
    assert pairs.frees() == ["done"]
    assert [story.outcome for story in scene.ledger.reports.newest()].count("mended") == 1


def _is_mended(scene: Stage, job_id: JobId) -> bool:
    return scene.store.job(job_id).state is State.COMPLETED and not scene.ledger.episodes.list_open()


def _order(scene: Stage, act: Act) -> Order:
    now = scene.ledger.now()
    until = now + 3600 if act is Act.PAUSE else None
    return Order(act=act, at=now, until=until, who="a person", because="the test")
