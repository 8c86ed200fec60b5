"""A private systemd leaves no trace."""

import subprocess
import sys
from pathlib import Path

import pytest

from deploy.standalone.stack import CHECKOUT
from testbed.private_systemd import NoSystemd, private_systemd
from tests.waiting import eventually

HOLD = """
import sys, time
from pathlib import Path
from testbed.private_systemd import Systemd, private_systemd

with private_systemd(Path(sys.argv[1])) as found:
    assert isinstance(found, Systemd), found
    print(found.pid, flush=True)
    time.sleep(600)
"""
SLEEPER = "[Unit]\nDefaultDependencies=no\n[Service]\nExecStart=/bin/sleep 600\n"

pytestmark = [pytest.mark.needs_systemd, pytest.mark.nightly]


def test_private_systemd_leaves_no_process_and_no_cgroup(tmp_path: Path) -> None:
    with private_systemd(tmp_path) as found:
        if isinstance(found, NoSystemd):
            pytest.skip(found.reason)
        found.write("w.service", SLEEPER)
        subprocess.run([*found.enter, "systemctl", "start", "w.service"], check=True, timeout=30)
        groups = [path.parent for path in Path("/sys/fs/cgroup").glob("**/w.service/cgroup.procs")]
        pids = [int(line) for group in groups for line in (group / "cgroup.procs").read_text().split()]

    assert pids
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in (found.pid, *pids)), "its processes are gone")
    assert not any(group.exists() for group in groups)


def test_private_systemd_ends_with_a_killed_caller(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        cwd=CHECKOUT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout
    assert holder.stderr
    line = holder.stdout.readline()
    if not line and "NoSystemd" in (reason := holder.stderr.read()):
        holder.communicate()
        pytest.skip(reason)

    holder.kill()
    holder.communicate()

    eventually(lambda: not Path(f"/proc/{int(line)}").exists(), "its systemd is gone", within_s=30)
    with private_systemd(tmp_path):
        left = list(Path("/sys/fs/cgroup").glob(f"**/gpuwarden-systemd-{holder.pid}"))
    assert left == []
