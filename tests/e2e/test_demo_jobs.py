"""The three jobs of the demo, through real Prometheus, Alertmanager and Docker, as each part reports them."""

import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from dashboards.queries import queries
from deploy.standalone.stack import CHECKOUT
from gpuwarden.job import FINAL
from remediator.ledger.journal import Entry
from remediator.ledger.reports import EpisodeHistory
from testbed.demo import verdict
from testbed.demo.job_body import Script
from testbed.demo.main import JOBS, SILENCE_S
from testbed.demo.verdict import Case, Link
from testbed.docker_engine import Engine
from testbed.gpu_simulator import Slot
from testbed.stage import HOST, Stage, stage, with_action
from testbed.workers import DockerFleet
from tests.waiting import eventually

pytestmark = [pytest.mark.needs_docker, pytest.mark.needs_parts]

CAPTURE_RANGE_S = 60.0
SLOTS = tuple(Slot(worker=f"gpuwarden-demo-job-{name}", gpus=(f"GPU-sim-{name}",)) for name in "abc")


@dataclass(frozen=True, kw_only=True)
class Played:
    """The stage after the last job has ended. It still runs."""

    scene: Stage
    cases: list[Case]
    links: list[Link]

    def of(self, title: str) -> Case:
        return next(case for case in self.cases if case.title == title)


@pytest.fixture(scope="module")
def played(work: Path, engine: Engine) -> Iterator[Played]:
    with stage(work, engine, SLOTS, armed=True, capture_range_s=CAPTURE_RANGE_S) as scene:
        before = scene.start_workers()
        ready = "count(count by (container) (gpuwarden_container_gpu_memory_bytes >= 0))"
        eventually(
            lambda: [each["value"][1] for each in scene.chain.query(ready)] == [str(len(SLOTS))],
            within_s=60,
            what="the GPU memory of every worker is published before its job loads",
        )
        cases = [
            Case(
                job_id=scene.submit(script, now=time.time(), stall_timeout_s=SILENCE_S, run_id=f"run-{title}"),
                title=title,
                script=script,
                restarted=is_restarted,
                stall_timeout_s=SILENCE_S,
            )
            for title, script, is_restarted in JOBS
        ]
        eventually(
            lambda: all(job.state in FINAL for job in scene.store.jobs()) and not scene.ledger.episodes.list_open(),
            within_s=150,
            what="every job ended",
            log=lambda: scene.chain.log_tail("execute"),
        )
        yield Played(scene=scene, cases=cases, links=list(verdict.check_links(scene, cases, before)))


@pytest.mark.behaviour("A2")
@pytest.mark.behaviour("A16")
def test_job_that_stalls_in_its_loop_is_fixed_and_finished(played: Played) -> None:
    title = "hangs at step 5"

    assert _broken(played, title) == []


@pytest.mark.behaviour("A3")
def test_job_that_stalls_before_its_first_step_is_fixed(played: Played) -> None:
    title = "hangs after its load"

    assert _broken(played, title) == []
    messages = [entry.message for entry in _entries(played, title) if entry.step == "begin"]
    assert "phase step, step 0" in messages[0]


@pytest.mark.behaviour("A4")
def test_slow_step_with_a_busy_gpu_is_logged_and_not_restarted(played: Played) -> None:
    title = "slow, GPU busy"

    assert _broken(played, title) == []
    log = [json.loads(line) for line in played.scene.chain.log("exporter").splitlines() if line.startswith("{")]
    job_id = played.of(title).job_id
    lines = [
        line for line in log if line["event"] == "job silent, not reported as stalled" and line["job_id"] == job_id
    ]
    assert lines
    assert "GPU was busy" in lines[0]["reason"]


@pytest.mark.behaviour("A9")
def test_requeue_raises_the_priority_counts_a_retry_and_writes_no_event(played: Played) -> None:
    job = played.scene.store.job(played.of("hangs at step 5").job_id)

    assert (job.priority, job.watchdog_retries, job.attempt) == (10, 1, 2)
    assert played.scene.store.outbox.events_of(job.job_id) == ["completed", "run_completed"]
    assert played.scene.store.runs.state("run-hangs at step 5") == "completed"


@pytest.mark.behaviour("A11")
def test_fenced_worker_ends_before_its_job_is_requeued(played: Played) -> None:
    for title in ("hangs at step 5", "hangs after its load"):
        steps = [f"{entry.act} {entry.what}" for entry in _entries(played, title)]

        assert steps.index("did fence") < steps.index("saw free: dead") < steps.index("did requeue")
        assert steps.count("did requeue") == 1


@pytest.mark.parametrize(("title", "with_gil"), [("hangs at step 5", True), ("hangs after its load", False)])
def test_stacks_and_log_lines_of_a_stalled_worker_are_captured(played: Played, title: str, with_gil: bool) -> None:
    (capture,) = played.scene.ledger.captures.of_episode(_episode(played, title).episode_id)

    assert capture.document["cut_short"] is None
    (process,) = capture.document["processes"]
    main = process["seen"][0]
    assert (main["tid"], main["state"], main["python"]["name"]) == (process["pid"], "S", "MainThread")
    assert "futex" in main["wchan"]
    assert main["python"]["frames"][0]["function"] == "wedge"
    assert main["python"]["owns_gil"] is with_gil
    assert capture.document["notes"] == []
    assert capture.document["facts"]["gpu_idle_s"] > 0
    (log,) = capture.document["logs"]
    assert log["source"] == "the container's log"
    assert log["lines"]


def test_metric_history_shows_the_stall(played: Played) -> None:
    (capture,) = played.scene.ledger.captures.of_episode(_episode(played, "hangs at step 5").episode_id)
    values = {each["metric"]: each["values"] for each in capture.document["curves"]}
    beat, gpu, gpu_memory, ram = (
        [value for value in values[f"gpuwarden_{name}"] if value is not None]
        for name in ("job_step_beat_age_seconds", "container_gpu_utilization_ratio", "container_gpu_memory_bytes",
                     "container_memory_bytes")
    )  # fmt: skip
    last = slice(-3, None)  # one point a second: half of the stall timeout

    assert (values["gpuwarden_job_step_beat_age_seconds"][0], min(beat) < 2.0) == (None, True)
    assert (beat[last], beat[-1] > SILENCE_S - 2.0) == (sorted(beat[last]), True)
    assert (set(gpu[last]), gpu_memory[0], min(gpu_memory[last]) > 0.0) == ({0.0}, 0.0, True)
    assert max(ram[last]) - min(ram[last]) < 4 * 2**20 < max(ram) - min(ram)


def test_same_container_is_started_again(played: Played) -> None:
    fleet = played.scene.fleet
    assert isinstance(fleet, DockerFleet)

    for episode in played.scene.ledger.reports.newest():
        container = fleet.container(episode.worker)
        assert container.attrs["State"]["Running"]
        assert container.attrs["RestartCount"] == 0


def test_alertmanager_delivers_every_notification(played: Played) -> None:
    page = played.scene.chain.http.get(f"{played.scene.chain.alertmanager_url}/metrics").text

    failed = [line for line in page.splitlines() if line.startswith("alertmanager_notifications_failed_total{")]
    assert [line for line in failed if 'integration="webhook"' in line and not line.endswith(" 0")] == []
    sent = [
        line for line in page.splitlines() if line.startswith('alertmanager_notifications_total{integration="webhook"')
    ]
    assert float(sent[0].split()[-1]) >= 2


def test_every_query_of_the_overview_dashboard_has_data(played: Played) -> None:
    """While one more job runs and one waits, all panels have data."""
    scene = played.scene
    waiting = Script(picture="fifth", load_s=0.5, load_mib=4, steps=2, step_s=0.2)
    scene.submit(waiting, now=time.time(), stall_timeout_s=60, queue="without-worker")
    scene.submit(
        Script(picture="fourth", load_s=0.5, load_mib=4, steps=2000, step_s=0.2), now=time.time(), stall_timeout_s=60
    )
    eventually(
        lambda: bool(scene.chain.query("gpuwarden_job_step_mean_seconds")), within_s=60, what="two steps were done"
    )
    dashboard = json.loads((CHECKOUT / "dashboards" / "overview.json").read_text(encoding="utf-8"))
    # Other tests cover servers (test_servers.py), Pending pods (tests/e2e/kubernetes) and engines (tests/dashboards).
    expected = [
        query
        for query in queries(dashboard, host=HOST, rate_interval="30s")
        if "Server probe" not in query.panel_title
        and not re.search("busiest_engine|in_shared_container|pending_pods", query.expr)
    ]
    assert len(expected) > 20

    def find_unanswered() -> list[str]:
        return [f"{query.panel_title}: {query.expr}" for query in expected if not scene.chain.query(query.expr)]

    deadline_s = time.monotonic() + 60
    while (left := find_unanswered()) and time.monotonic() < deadline_s:
        time.sleep(0.5)
    assert left == []


def _broken(played: Played, title: str) -> list[Link]:
    links = [link for link in played.links if title in link.job]
    assert len(links) >= 6
    return [link for link in links if not link.ok]


def _episode(played: Played, title: str) -> EpisodeHistory:
    job_id = played.of(title).job_id
    return next(episode for episode in with_action(played.scene.ledger.reports.newest()) if episode.job_id == job_id)


def _entries(played: Played, title: str) -> tuple[Entry, ...]:
    episode = played.scene.ledger.reports.get(_episode(played, title).episode_id)
    assert episode is not None
    return episode.entries
