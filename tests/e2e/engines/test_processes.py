"""A stalled worker is restarted also where workers are supervised processes, without Docker."""

import time
from pathlib import Path

import pytest

from gpuwarden.job import State
from testbed.demo.job_body import Script
from testbed.docker_engine import NoEngine
from testbed.gpu_simulator import Slot
from testbed.stage import stage, with_action
from tests.waiting import eventually

pytestmark = [pytest.mark.needs_parts, pytest.mark.slow]

WORKER = "gpuwarden-process-a"


@pytest.mark.parametrize("with_gil", [True, False], ids=["gil-held", "gil-free"])
def test_stalled_process_is_restarted_and_its_job_finished(tmp_path: Path, with_gil: bool) -> None:
    script = Script(
        picture="first",
        load_s=0.3,
        load_mib=4,
        steps=4,
        step_s=0.2,
        wedge_attempts=1,
        wedge_after_step=2,
        wedge_with_gil=with_gil,
    )
    with stage(
        tmp_path, NoEngine(reason="a test"), [Slot(worker=WORKER, gpus=("GPU-sim-0",))], armed=True, stop_grace_s=1.0
    ) as scene:
        job_id = scene.submit(script, now=time.time(), stall_timeout_s=3)
        before = scene.start_workers()

        eventually(
            lambda: scene.store.job(job_id).state is State.COMPLETED and not scene.ledger.episodes.list_open(),
            within_s=90,
            what="the job is fixed",
            log=lambda: scene.chain.log_tail("execute"),
        )
        assert scene.store.job(job_id).attempt == 2
        assert scene.fleet.incarnation(WORKER) != before[WORKER]
        (episode,) = with_action(scene.ledger.reports.newest())
        assert episode.outcome == "fixed"
        (capture,) = scene.ledger.captures.of_episode(episode.episode_id)
        main = capture.document["processes"][0]["seen"][0]
        assert main["python"]["frames"][0]["function"] == "wedge"
        assert main["python"]["owns_gil"] is with_gil
        assert [log["source"].rpartition(".")[2] for log in capture.document["logs"]] == ["log"]
