"""The demonstration's three stories, through real Prometheus, Alertmanager and Docker, as each part tells them."""

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

CURVES_S = 60.0
SLOTS = tuple(Slot(worker=f"gpuwarden-story-{name}", gpus=(f"GPU-sim-{name}",)) for name in "abc")


@dataclass(frozen=True, kw_only=True)
class Played:
    """The stage after the last job ended, still running."""

    scene: Stage
    cases: list[Case]
    links: list[Link]

    def of(self, title: str) -> Case:
        return next(case for case in self.cases if case.title == title)


@pytest.fixture(scope="module")
def played(work: Path, engine: Engine) -> Iterator[Played]:
    with stage(work, engine, SLOTS, armed=True, capture_range_s=CURVES_S) as scene:
        before = scene.start_workers()
        told = "count(count by (container) (gpuwarden_container_gpu_memory_bytes >= 0))"
        eventually(
            lambda: [each["value"][1] for each in scene.chain.query(told)] == [str(len(SLOTS))],
            within_s=60,
            what="every worker's GPU memory is told before its job loads",
        )
        cases = [
            Case(
                job_id=scene.submit(script, now=time.time(), stall_timeout_s=SILENCE_S, run_id=f"run-{title}"),
                title=title,
                script=script,
                restarted=mended,
                stall_timeout_s=SILENCE_S,
            )
            for title, script, mended in JOBS
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
def test_a_job_that_wedges_in_its_loop_is_mended_and_finished_by_its_second_attempt(played: Played) -> None:
    title = "hangs at step 5"

    assert _broken(played, title) == []


@pytest.mark.behaviour("A3")
def test_a_job_that_wedges_after_its_load_and_before_its_first_step_is_mended_too(played: Played) -> None:
    title = "hangs after its load"

    assert _broken(played, title) == []
    figures = [entry.message for entry in _entries(played, title) if entry.step == "begin"]
    assert "phase step, step 0" in figures[0]


@pytest.mark.behaviour("A4")
def test_a_slow_step_with_a_busy_gpu_is_suspected_in_sight_and_left_alone(played: Played) -> None:
    title = "slow, GPU busy"

    assert _broken(played, title) == []
    log = [json.loads(line) for line in played.scene.chain.log("exporter").splitlines() if line.startswith("{")]
    job_id = played.of(title).job_id
    lines = [
        line for line in log if line["event"] == "job silent, not reported as stalled" and line["job_id"] == job_id
    ]
    assert lines
    assert "GPU was busy" in lines[0]["because"]


@pytest.mark.behaviour("A9")
def test_a_requeue_bumps_the_priority_counts_a_retry_and_writes_no_event(played: Played) -> None:
    job = played.scene.store.job(played.of("hangs at step 5").job_id)

    assert (job.priority, job.watchdog_retries, job.attempt) == (10, 1, 2)
    assert played.scene.store.outbox.dispatch_events(job.job_id) == ["completed", "run_completed"]
    assert played.scene.store.runs.state("run-hangs at step 5") == "completed"


@pytest.mark.behaviour("A11")
def test_a_fenced_worker_ends_before_its_job_is_queued_again(played: Played) -> None:
    for title in ("hangs at step 5", "hangs after its load"):
        steps = [f"{entry.act} {entry.what}" for entry in _entries(played, title)]

        assert steps.index("did fence") < steps.index("saw free: dead") < steps.index("did requeue")
        assert steps.count("did requeue") == 1


@pytest.mark.parametrize(("title", "holds_the_lock"), [("hangs at step 5", True), ("hangs after its load", False)])
def test_a_wedged_workers_stacks_and_last_lines_are_kept(played: Played, title: str, holds_the_lock: bool) -> None:
    (kept,) = played.scene.ledger.captures.of_episode(_episode(played, title).episode_id)

    assert kept.document["cut_short"] is None
    (process,) = kept.document["processes"]
    main = process["seen"][0]
    assert (main["tid"], main["state"], main["python"]["name"]) == (process["pid"], "S", "MainThread")
    assert "futex" in main["wchan"]
    assert main["python"]["frames"][0]["function"] == "wedge"
    assert main["python"]["owns_gil"] is holds_the_lock
    assert kept.document["notes"] == []
    assert kept.document["facts"]["gpu_idle_s"] > 0
    (log,) = kept.document["logs"]
    assert log["source"] == "the container's log"
    assert log["lines"]


def test_the_curves_around_the_trip_show_what_happened_to_a_worker_that_wedged(played: Played) -> None:
    (kept,) = played.scene.ledger.captures.of_episode(_episode(played, "hangs at step 5").episode_id)
    values = {each["metric"]: each["values"] for each in kept.document["curves"]}
    beat, gpu, gpu_memory, ram = (
        [value for value in values[f"gpuwarden_{name}"] if value is not None]
        for name in ("job_step_beat_age_seconds", "container_gpu_utilization_ratio", "container_gpu_memory_bytes",
                     "container_memory_bytes")
    )  # fmt: skip
    last = slice(-3, None)  # points a second apart, half of the silence that was waited for

    assert (values["gpuwarden_job_step_beat_age_seconds"][0], min(beat) < 2.0) == (None, True)
    assert (beat[last], beat[-1] > SILENCE_S - 2.0) == (sorted(beat[last]), True)
    assert (set(gpu[last]), gpu_memory[0], min(gpu_memory[last]) > 0.0) == ({0.0}, 0.0, True)
    assert max(ram[last]) - min(ram[last]) < 4 * 2**20 < max(ram) - min(ram)


def test_the_same_container_is_started_again_not_another_one(played: Played) -> None:
    fleet = played.scene.fleet
    assert isinstance(fleet, DockerFleet)

    for story in played.scene.ledger.reports.newest():
        container = fleet.container(story.worker)
        assert container.attrs["State"]["Running"]
        assert container.attrs["RestartCount"] == 0


def test_alertmanager_delivered_every_notification(played: Played) -> None:
    page = played.scene.chain.http.get(f"{played.scene.chain.alertmanager_url}/metrics").text

    failed = [line for line in page.splitlines() if line.startswith("alertmanager_notifications_failed_total{")]
    assert [line for line in failed if 'integration="webhook"' in line and not line.endswith(" 0")] == []
    sent = [
        line for line in page.splitlines() if line.startswith('alertmanager_notifications_total{integration="webhook"')
    ]
    assert float(sent[0].split()[-1]) >= 2


def test_every_query_of_the_overview_dashboard_answers_with_data(played: Played) -> None:
    """On the demonstration's own Prometheus, while one more job runs and one waits: all panels have something."""
    scene = played.scene
    waits = Script(picture="fifth", load_s=0.5, load_mib=4, steps=2, step_s=0.2)
    scene.submit(waits, now=time.time(), stall_timeout_s=60, queue="served-by-nobody")
    scene.submit(
        Script(picture="fourth", load_s=0.5, load_mib=4, steps=2000, step_s=0.2), now=time.time(), stall_timeout_s=60
    )
    eventually(
        lambda: bool(scene.chain.query("gpuwarden_job_step_mean_seconds")), within_s=60, what="two steps were done"
    )
    dashboard = json.loads((CHECKOUT / "dashboards" / "overview.json").read_text(encoding="utf-8"))
    # No server runs here: that panel is asked where some do, in test_servers.py. Nor does an engine of a GPU do more
    # than its SMs, or a worker share its container, which is told only where it is so: tests/dashboards.
    asked = [
        query
        for query in queries(dashboard, host=HOST, rate_interval="30s")
        if "Server probe" not in query.panel_title and not re.search("busiest_engine|in_shared_container", query.expr)
    ]
    assert len(asked) > 20

    def unanswered() -> list[str]:
        return [f"{query.panel_title}: {query.expr}" for query in asked if not scene.chain.query(query.expr)]

    deadline_s = time.monotonic() + 60
    while (left := unanswered()) and time.monotonic() < deadline_s:
        time.sleep(0.5)
    assert left == []


def _broken(played: Played, title: str) -> list[Link]:
    links = [link for link in played.links if title in link.job]
    assert len(links) >= 6
    return [link for link in links if not link.ok]


def _episode(played: Played, title: str) -> EpisodeHistory:
    job_id = played.of(title).job_id
    return next(story for story in with_action(played.scene.ledger.reports.newest()) if story.job_id == job_id)


def _entries(played: Played, title: str) -> tuple[Entry, ...]:
    story = played.scene.ledger.reports.get(_episode(played, title).episode_id)
    assert story is not None
    return story.entries
