"""Bad input of every kind to the running pipeline: it is refused or recorded, counted in a metric, and does no harm."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import func, select

from gpuwarden.db.transactions import reading
from gpuwarden.job import State
from remediator.ledger.schema import ALERTS
from testbed.demo.job_body import Script
from testbed.docker_engine import Engine
from testbed.gpu_simulator import Slot
from testbed.stage import HOST, Stage, stage, with_action
from testbed.workers import DockerFleet
from tests.e2e import hostile
from tests.remediator import builders as build
from tests.waiting import answered, eventually

pytestmark = [pytest.mark.needs_docker, pytest.mark.needs_parts, pytest.mark.slow]

MANAGED, UNMANAGED = "gpuwarden-bad-managed", "gpuwarden-bad-unmanaged"
# Without the GIL: a worker that stalls with it might also hold the lock of the queue.
STALL = Script(
    picture="wedge",
    load_s=0.5,
    load_mib=8,
    steps=4,
    step_s=0.2,
    wedge_attempts=1,
    wedge_after_step=2,
    wedge_with_gil=False,
)


@pytest.fixture(scope="module")
def scene(work: Path, engine: Engine) -> Iterator[Stage]:
    slots = [Slot(worker=worker, gpus=(f"GPU-{worker}",)) for worker in (MANAGED, UNMANAGED)]
    queues = {MANAGED: "managed", UNMANAGED: "unmanaged"}
    with stage(work, engine, slots, armed=True, stop_grace_s=1.0, unmanaged=[UNMANAGED], queues=queues) as scene:
        scene.start_workers()
        yield scene


def test_stalled_worker_in_an_unmanaged_container_is_refused(scene: Stage) -> None:
    before = scene.fleet.incarnation(UNMANAGED)
    job_id = scene.submit(STALL, now=time.time(), stall_timeout_s=4, queue="unmanaged")

    eventually(
        lambda: any(
            episode.worker == UNMANAGED and episode.closed_at for episode in with_action(scene.ledger.reports.newest())
        ),
        within_s=90,
        what="the episode is closed",
        log=lambda: scene.chain.log_tail("execute"),
    )
    episode = next(episode for episode in with_action(scene.ledger.reports.newest()) if episode.worker == UNMANAGED)
    assert episode.outcome == "refused"
    assert "is not managed" in (episode.message or "")
    assert scene.fleet.incarnation(UNMANAGED) == before
    assert scene.store.job(job_id).state is State.RUNNING
    eventually(
        lambda: bool(scene.chain.query('gpuwarden_remediator_episodes_total{outcome="refused"} > 0')),
        within_s=30,
        what="the refusal is counted in a metric",
    )


def test_stalled_worker_in_a_managed_container_is_fixed_next_to_a_torn_state_file(  # the control
    scene: Stage,
) -> None:
    folder = scene.chain.directory / "torn"
    folder.mkdir()
    (folder / "torn.worker.json").write_text('{"format": 1, "worker": "torn", "incarn', encoding="utf-8")
    job_id = scene.submit(STALL, now=time.time(), stall_timeout_s=4, queue="managed")

    eventually(
        lambda: bool(scene.chain.query('gpuwarden_statefiles_invalid{reason="not_json"} == 1')),
        within_s=30,
        what="the torn file is counted in a metric",
    )
    eventually(
        lambda: scene.store.job(job_id).state is State.COMPLETED,
        within_s=90,
        what="the job is fixed",
        log=lambda: scene.chain.log_tail("execute"),
    )
    assert "invalid state files" in scene.chain.log("exporter")


@pytest.mark.parametrize(
    ("labels", "reason"),
    [
        pytest.param({"remedy": "restart_worker", "condition": "stall", "worker": MANAGED}, "no_host", id="no-host"),
        pytest.param(
            {"remedy": "restart_worker", "condition": "stall", "worker": MANAGED, "host": "elsewhere"},
            "other_host",
            id="other-host",
        ),
        pytest.param(
            {"remedy": "reboot_everything", "condition": "stall", "worker": MANAGED, "host": HOST},
            "unknown_remedy",
            id="unknown-remedy",
        ),
    ],
)
def test_bad_alert_from_alertmanager_is_refused(scene: Stage, labels: dict[str, str], reason: str) -> None:
    before = scene.fleet.incarnation(MANAGED)
    answer = scene.chain.http.post(
        f"{scene.chain.alertmanager_url}/api/v2/alerts", json=[{"labels": {"alertname": f"Bad_{reason}", **labels}}]
    )
    assert answer.status_code == 200

    eventually(
        lambda: reason in {found[1] for found in scene.ledger.inbox.refused()},
        within_s=30,
        what="the refusal is recorded",
    )
    eventually(
        lambda: bool(
            scene.chain.query(f'gpuwarden_remediator_alerts_total{{outcome="refused",reason="{reason}"}} > 0')
        ),
        within_s=30,
        what="the refusal is counted in a metric",
    )
    assert scene.fleet.incarnation(MANAGED) == before


def test_alert_without_local_evidence_has_no_effect(scene: Stage) -> None:
    """Any client can post an alert to Alertmanager. Only the evidence of the exporter decides."""
    before = scene.fleet.incarnation(MANAGED)
    job_id = scene.submit(
        Script(picture="healthy", load_s=0.5, load_mib=8, steps=120, step_s=0.2),  # runs longer than the check
        now=time.time(),
        stall_timeout_s=60,
        queue="managed",
    )
    eventually(lambda: scene.armed(MANAGED), within_s=30, what="the job is monitored")
    facts = answered(lambda: scene.witness.worker_evidence(MANAGED, host=HOST))
    forged = {
        "alertname": "Forged", "remedy": "restart_worker", "condition": "stall", "host": HOST, "worker": MANAGED,
        "job_id": str(job_id), "attempt": str(facts.attempt), "incarnation": facts.worker_incarnation,
    }  # fmt: skip
    scene.chain.http.post(f"{scene.chain.alertmanager_url}/api/v2/alerts", json=[{"labels": forged}])

    eventually(
        lambda: any("not confirmed on this host" in text for text in _messages(scene, job_id)),
        within_s=30,
        what="the missing confirmation is recorded",
    )
    eventually(lambda: scene.store.job(job_id).state is State.COMPLETED, within_s=90, what="the job completes")
    assert scene.store.job(job_id).attempt == 1
    assert scene.fleet.incarnation(MANAGED) == before
    eventually(lambda: not scene.ledger.episodes.list_open(), within_s=60, what="the episode is closed")


def _messages(scene: Stage, job_id: int) -> list[str]:
    episodes = [
        scene.ledger.reports.get(episode.episode_id)
        for episode in scene.ledger.reports.newest()
        if episode.job_id == job_id
    ]
    return [entry.message for episode in episodes if episode for entry in episode.entries]


def test_hostile_labels_are_refused_or_recorded_without_effect(scene: Stage, tmp_path: Path) -> None:
    """Through the webhook to an armed executor, which processes every episode that they open."""
    canary = tmp_path / "owned"
    before = _incarnations(scene)
    seen_before = {episode.episode_id for episode in scene.ledger.reports.newest(last=1000)}
    payloads = [*hostile.alerts(HOST, canary), _alerts_with_wrong_containers(scene)]

    calls = [(json.dumps({"alerts": each}).encode(), len(each)) for each in payloads]
    calls += [(body, 1) for body in hostile.bodies(HOST).values()]
    for body, alerts in calls:
        answer = _call_webhook(scene, body)
        assert answer.status_code == 202, answer.text
        counts = answer.json()
        assert counts["accepted"] + counts["refused"] == alerts
    for each in payloads:
        resolved = [{**alert, "status": "resolved"} if isinstance(alert, dict) else alert for alert in each]
        assert _call_webhook(scene, json.dumps({"alerts": resolved}).encode()).status_code == 202
    for body in hostile.bodies(HOST).values():
        assert _call_webhook(scene, body.replace(b'"status": "firing"', b'"status": "resolved"')).status_code == 202

    eventually(
        lambda: not _is_pending(scene),
        within_s=60,
        what="every alert is processed",
        log=lambda: scene.chain.log_tail("execute"),
    )
    new = [each for each in scene.ledger.reports.newest(last=1000) if each.episode_id not in seen_before]
    episodes = [episode for each in new if (episode := scene.ledger.reports.get(each.episode_id)) is not None]
    assert len(episodes) > 10
    assert {entry.act for episode in episodes for entry in episode.entries} <= {"saw", "decided"}
    assert not {entry.step for episode in episodes for entry in episode.entries} & {"begin", "stop", "start"}
    assert not canary.exists()
    assert _incarnations(scene) == before
    assert scene.chain.ended() == {}
    for part in ("serve", "execute"):
        lines = scene.chain.log(part).splitlines()
        assert all(isinstance(json.loads(line), dict) for line in lines), part
        assert max(map(len, lines)) < 16_000


def _incarnations(scene: Stage) -> list[tuple[str, list[str]]]:
    assert isinstance(scene.fleet, DockerFleet)
    return [(scene.fleet.incarnation(worker), scene.fleet.history(worker)) for worker in (MANAGED, UNMANAGED)]


def _alerts_with_wrong_containers(scene: Stage) -> list[dict[str, Any]]:
    """Alerts with an existing container that does not belong to the worker or to the host."""
    assert isinstance(scene.fleet, DockerFleet)
    handles = [str(scene.fleet.container(worker).id) for worker in (MANAGED, UNMANAGED)]
    return [
        build.sent(f"{place}-{number}", **{"host": host, "worker": MANAGED, place: value})
        for host in (HOST, "elsewhere", f"{HOST},elsewhere")
        for number, value in enumerate((UNMANAGED, *handles))
        for place in ("container", "container_id", "incarnation", "worker")
    ]


def _call_webhook(scene: Stage, body: bytes) -> httpx.Response:
    token = scene.chain.token_file.read_text(encoding="ascii").strip()
    headers = {"Authorization": f"Bearer {token}"}
    return scene.chain.http.post(f"{scene.chain.remediator_url}/api/v1/alerts", content=body, headers=headers)


def _is_pending(scene: Stage) -> bool:
    with reading(scene.ledger._engine) as connection:
        new = connection.scalar(select(func.count()).where(ALERTS.c.state == "new"))
    return bool(new) or bool(scene.ledger.episodes.list_open())
