"""Workers in services of systemd are detected and restarted, and their jobs requeued."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.standalone.stack import CHECKOUT
from testbed.private_systemd import NoSystemd, private_systemd
from tests.e2e.engines.systemd_workers import STALLED, UNMANAGED

pytestmark = [pytest.mark.needs_systemd, pytest.mark.needs_parts, pytest.mark.slow]


def test_stalled_worker_in_a_service_is_restarted_once(tmp_path: Path) -> None:
    (work := tmp_path / "stage").mkdir()
    with private_systemd(tmp_path) as systemd:
        if isinstance(systemd, NoSystemd):
            pytest.skip(systemd.reason)

        done = subprocess.run(
            [*systemd.enter, sys.executable, "-m", "tests.e2e.engines.systemd_workers", str(work)],
            cwd=CHECKOUT,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    stalled, unmanaged = results[STALLED], results[UNMANAGED]
    assert (stalled["kind"], stalled["container"]) == ("systemd", f"{STALLED}.service")
    assert stalled["same_incarnation_seen"]
    assert stalled["ram_bytes"] > 2**20
    assert (stalled["restarted"], stalled["lives"], stalled["attempt"]) == (True, 2, 2)
    # Control: stalled as long, in a service that is not managed.
    assert unmanaged["kind"] == "process"
    assert unmanaged["step_beat_age_s"] > 3
    assert (unmanaged["restarted"], unmanaged["lives"], unmanaged["attempt"]) == (False, 1, 1)
