"""Workers in services of systemd are seen, freed, requeued and started again through the whole chain."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.standalone.stack import CHECKOUT
from testbed.private_systemd import NoSystemd, private_systemd
from tests.e2e.engines.systemd_workers import UNMANAGED, WEDGED

pytestmark = [pytest.mark.needs_systemd, pytest.mark.needs_parts, pytest.mark.slow]


def test_a_wedged_worker_in_a_service_is_restarted_once_and_its_job_finished(tmp_path: Path) -> None:
    (work := tmp_path / "stage").mkdir()
    with private_systemd(tmp_path) as systemd:
        if isinstance(systemd, NoSystemd):
            pytest.skip(systemd.because)

        done = subprocess.run(
            [*systemd.enter, sys.executable, "-m", "tests.e2e.engines.systemd_workers", str(work)],
            cwd=CHECKOUT,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    wedged, unmanaged = told[WEDGED], told[UNMANAGED]
    assert (wedged["kind"], wedged["container"]) == ("systemd", f"{WEDGED}.service")
    assert wedged["same_incarnation_seen"]
    assert wedged["ram_bytes"] > 2**20
    assert (wedged["restarted"], wedged["lives"], wedged["attempt"]) == (True, 2, 2)
    # The control: silent for as long, and in a service that nobody opted in.
    assert unmanaged["kind"] == "process"
    assert unmanaged["step_beat_age_s"] > 3
    assert (unmanaged["restarted"], unmanaged["lives"], unmanaged["attempt"]) == (False, 1, 1)
