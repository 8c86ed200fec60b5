"""Two Prometheus and two Alertmanagers are killed and lose their data: one stall still causes one restart.

Each Prometheus sends to both Alertmanagers, with its own replica label, which is not dropped. A pause keeps the episode
open, so that all alerts belong to one stall.
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
from tests.e2e.stalled_workers import DIE_WITH_PARENT
from tests.waiting import eventually

pytestmark = [pytest.mark.needs_docker, pytest.mark.needs_parts, pytest.mark.nightly]

WORKER: Final = "gpuwarden-pairs"
STALL: Final = Script(
    picture="pairs", load_s=0.2, load_mib=1, steps=3, step_s=0.2, wedge_attempts=1, wedge_after_step=1
)
PAIRS: Final = ("a", "b")


@dataclass(frozen=True, kw_only=True)
class ReceivedAlert:
    """One alert as received, with its replica."""

    replica: str
    rule: str
    firing: bool
    starts_at: str


@dataclass(kw_only=True)
class Pairs:
    """Both pairs. A part is named after its kind and replica, such as `prometheus-a`."""

    scene: Stage
    work: Path
    ports: dict[str, int]
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str) -> None:
        """Start one part with the data that it has, if any."""
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
            config_values = yaml.safe_load(text)
            config_values["global"]["external_labels"] = {"replica": replica}
            targets = [f"127.0.0.1:{self.ports[f'alertmanager-{each}']}" for each in PAIRS]
            config_values["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"] = targets
            config.write_text(yaml.safe_dump(config_values))
            options = [f"--storage.tsdb.path={folder}", "--rules.alert.resend-delay=1s"]
        else:
            webhook = f"{chain.remediator_url}/api/v1/alerts"
            config.write_text(alertmanager_config(webhook=webhook, token_file=chain.token_file, intervals=FAST))
            options = [f"--storage.path={folder}", "--cluster.listen-address="]
        argv = [str(debian_packages.find(kind)), f"--config.file={config}", listen, *options]
        with (self.work / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                [*DIE_WITH_PARENT, *argv],
                env=debian_packages.env_for_parts(), cwd=self.work, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def kill(self, name: str, *, data_lost: bool = False) -> None:
        """Kill a part, as a crash does."""
        process = self.running.pop(name)
        process.kill()
        process.wait()
        if data_lost:
            shutil.rmtree(self.work / name)

    def received(self) -> list[ReceivedAlert]:
        """The alerts about the worker that the executor has processed, in order."""
        columns = (ALERTS.c.labels, ALERTS.c.firing, ALERTS.c.starts_at)
        taken = select(*columns).where(ALERTS.c.state != "new").order_by(ALERTS.c.alert_id)
        with reading(self.scene.ledger._engine) as connection:
            rows = [row for row in connection.execute(taken) if row.labels.get("worker") == WORKER]
        return [
            ReceivedAlert(
                replica=row.labels["replica"], rule=row.labels["alertname"], firing=row.firing, starts_at=row.starts_at
            )
            for row in rows
        ]

    def firing(self) -> set[tuple[str, str]]:
        """Replica and rule of each alert that fires, by the last received state."""
        newest = {(each.replica, each.rule): each.firing for each in self.received()}
        return {name for name, firing in newest.items() if firing}

    def restart_stages(self) -> list[str]:
        """The stages of all restarts in the ledger."""
        with reading(self.scene.ledger._engine) as connection:
            return list(connection.scalars(select(INTENTS.c.stage).where(INTENTS.c.kind == Kind.FREE)))

    def log(self) -> str:
        """The end of every log."""
        ends = [path.read_text(errors="replace")[-1500:] for path in sorted(self.work.glob("*.log"))]
        return "\n".join([f"{self.received()}", self.scene.chain.log_tail("execute"), *ends])


@pytest.fixture(scope="module")
def pairs(work: Path, engine: Engine) -> Iterator[Pairs]:
    with stage(work, engine, [Slot(worker=WORKER, gpus=("GPU-pairs",))], armed=True, stop_grace_s=1.0) as scene:
        for part in ("prometheus", "alertmanager"):
            scene.chain.kill(part)  # two of each replace them
        names = [f"{kind}-{each}" for kind in ("alertmanager", "prometheus") for each in PAIRS]
        folder = work / "pairs"
        folder.mkdir()
        found = Pairs(scene=scene, work=folder, ports=free_ports(names))
        try:
            for name in names:
                found.start(name)
            yield found
        finally:
            for name in list(found.running):
                found.kill(name)


def test_one_stall_causes_one_restart(pairs: Pairs) -> None:
    scene = pairs.scene
    assert isinstance(scene.fleet, DockerFleet)
    scene.ledger.orders.give(_order(scene, Act.PAUSE))
    scene.start_workers()
    incarnation = scene.fleet.incarnation(WORKER)
    job_id = scene.submit(STALL, now=time.time(), stall_timeout_s=3)

    eventually(
        lambda: {replica for replica, _ in pairs.firing()} == set(PAIRS),
        "both replicas have sent alerts",
        within_s=90,
        log=pairs.log,
    )
    before = {each.starts_at for each in pairs.received()}
    for kind in ("prometheus", "alertmanager"):
        pairs.kill(f"{kind}-a", data_lost=True)
        pairs.start(f"{kind}-a")
    eventually(
        lambda: any(each.replica == "a" and each.firing and each.starts_at not in before for each in pairs.received()),
        "the alert fires again with another startsAt",
        within_s=90,
        log=pairs.log,
    )
    for each in PAIRS:
        pairs.kill(f"prometheus-{each}")
    eventually(lambda: not pairs.firing(), "all alerts are resolved", within_s=90, log=pairs.log)
    resolved_at = scene.ledger.now()
    eventually(lambda: scene.ledger.executors.last_beats()[HOST] > resolved_at + 2, "the executor has checked since")

    (episode,) = scene.ledger.episodes.list_open()
    assert (episode.worker, episode.free, scene.ledger.reports.newest()[0].closed_at) == (WORKER, None, None)
    assert (scene.store.job(job_id).state, scene.store.job(job_id).attempt) == (State.RUNNING, 1)
    assert scene.fleet.incarnation(WORKER) == incarnation

    for each in PAIRS:
        shutil.rmtree(pairs.work / f"prometheus-{each}")
        pairs.start(f"prometheus-{each}")
    scene.ledger.orders.give(_order(scene, Act.RESUME))
    eventually(lambda: _is_fixed(scene, job_id), "the job is fixed", within_s=90, log=pairs.log)
    job = scene.store.job(job_id)
    assert (job.attempt, job.watchdog_retries, job.reclaims) == (2, 1, 0)
    history = scene.fleet.history(WORKER)
    assert [event for event in history if event in ("start", "die", "restart")] == ["start", "die", "start"], history
    assert pairs.restart_stages() == ["done"]
    assert [each.outcome for each in scene.ledger.reports.newest()].count("fixed") == 1


def _is_fixed(scene: Stage, job_id: JobId) -> bool:
    return scene.store.job(job_id).state is State.COMPLETED and not scene.ledger.episodes.list_open()


def _order(scene: Stage, act: Act) -> Order:
    now = scene.ledger.now()
    until = now + 3600 if act is Act.PAUSE else None
    return Order(act=act, at=now, until=until, who="an operator", reason="the test")
