"""Programs of a chain end with the process that started them; Prometheus publishes the health of its rules."""

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from deploy.standalone import debian_packages
from deploy.standalone.config_files import Intervals
from deploy.standalone.stack import CHECKOUT, Chain, Plan
from testbed.check_release import FOREIGN_SERIES
from tests.waiting import eventually

FORK = """\
import os, sys, time
from deploy.standalone.stack import _end_with_parent
tether, parent = _end_with_parent(), os.getpid()
if os.fork():
    os.wait() if sys.argv[1] == "lives" else os._exit(0)
else:
    while sys.argv[1] == "dies" and os.getppid() == parent:
        time.sleep(0.01)
    os.execv(tether[0], [*tether, "touch", sys.argv[2]])
"""
"""A child which reaches its tether when its parent has died, or lives."""


@pytest.mark.parametrize(("parent", "begins"), [("lives", True), ("dies", False)])
def test_program_of_a_killed_chain_does_not_start(tmp_path: Path, parent: str, begins: bool) -> None:
    made = tmp_path / "made"

    # Both processes hold the output open.
    subprocess.run([sys.executable, "-c", FORK, parent, str(made)], cwd=CHECKOUT, check=True, stdout=subprocess.PIPE)

    assert made.exists() is begins


@pytest.mark.needs_parts
def test_prometheus_publishes_the_health_of_its_rules(tmp_path: Path) -> None:
    try:
        debian_packages.find("prometheus")
    except debian_packages.PartMissing as missing:
        pytest.skip(str(missing))
    chain = Chain(Plan(work=tmp_path, host="a", docker=None, simulate_gpu=None, intervals=Intervals(scrape_s=1)))
    wanted = FOREIGN_SERIES - {"up", "ALERTS"}

    def published() -> set[str]:
        with suppress(httpx.HTTPError):
            ours = chain.query('{__name__=~"prometheus_rule_.+", rule_group=~".*;gpuwarden_.*"}')
            return {each["metric"]["__name__"] for each in ours} & wanted
        return set()

    try:
        chain.start("prometheus")
        assert "    interval: 1s\n" in (tmp_path / "rules" / "stall.rules.yaml").read_text()
        eventually(
            lambda: published() == wanted,
            f"{wanted} are published",
            within_s=60,
            log=lambda: chain.log_tail("prometheus"),
        )
    finally:
        chain.stop("prometheus")
        chain.http.close()
