"""A real hang is fixed during a flood of forged alerts, almost as fast as without it."""

import json
import threading
from pathlib import Path
from typing import Final

import pytest

from bench.chain import COMPLETED, SILENCE_S, SLOTS, play_stall
from deploy.standalone.docker_socket import NoEngine
from remediator.ledger.inbox import UNKNOWN_MAX
from testbed.stage import HOST, Stage, stage
from tests.remediator.builders import sent
from tests.waiting import eventually

pytestmark = [pytest.mark.needs_parts, pytest.mark.nightly]

FORGED: Final = 20_000
A_CALL: Final = 500
SLOWER_MAX: Final = 1.5
"""Times the duration without a flood."""


def flood(scene: Stage) -> None:
    token = scene.chain.token_file.read_text(encoding="ascii")
    for first in range(0, FORGED, A_CALL):
        forged = [
            sent(
                f"{each:016x}", host=HOST, worker=f"forged-{each}", alertname=f"Forged{each}", job_id=f"{10**6 + each}"
            )
            for each in range(first, first + A_CALL)
        ]
        answer = scene.chain.http.post(
            f"{scene.chain.remediator_url}/api/v1/alerts",
            content=json.dumps({"version": "4", "status": "firing", "alerts": forged}),
            headers={"Authorization": f"Bearer {token}"},
            timeout=30.0,
        )
        assert answer.status_code == 202


def test_real_hang_is_fixed_during_a_flood_of_forged_alerts(tmp_path: Path) -> None:
    with stage(tmp_path / "stage", NoEngine(reason="processes"), SLOTS, armed=True, stop_grace_s=2.0) as scene:
        scene.start_workers()
        quiet_s = play_stall(scene, timeout_s=SILENCE_S)[COMPLETED] - SILENCE_S
        sender = threading.Thread(target=flood, args=(scene,))
        sender.start()
        flooded_s = play_stall(scene, timeout_s=SILENCE_S)[COMPLETED] - SILENCE_S
        sender.join()
        after_s = play_stall(scene, timeout_s=SILENCE_S)[COMPLETED] - SILENCE_S
        print(f"fixed after {quiet_s:.1f} s, during the flood {flooded_s:.1f} s, after it {after_s:.1f} s")

        def taken() -> bool:
            return not scene.ledger.inbox.new_targets(HOST)

        eventually(taken, "every alert is taken", within_s=60)
        assert len(scene.ledger.episodes.list_open()) == UNKNOWN_MAX
        assert max(flooded_s, after_s) <= SLOWER_MAX * quiet_s
