"""`gpuwarden up` with short intervals for short jobs: `python -m tests.e2e.scaled_up` and the arguments of `up`."""

import argparse
import sys
from dataclasses import replace
from typing import Final

from deploy.standalone import up
from deploy.standalone.docker_socket import Engine, NoEngine
from deploy.standalone.stack import Plan
from testbed.stage import FAST

STOP_GRACE_S: Final = 4.0
"""A test that acts during a stop may be seconds late."""

make_plan = up._plan


def make_scaled_plan(arguments: argparse.Namespace, engine: Engine | NoEngine) -> Plan:
    """The plan with short intervals, and without limits on the number of restarts."""
    plan = make_plan(arguments, engine)
    scaled = {
        "stop_grace_s": STOP_GRACE_S,
        "cooldown_s": 0,
        "breaker_targets": 1000,
        "breaker_restarts": 1000,
        "sweep_interval_s": 1,
    }
    return replace(plan, intervals=FAST, execute={**plan.execute, **scaled, "sweep_interval_s": 1}, ram_idle_mib=24)


if __name__ == "__main__":
    up._plan = make_scaled_plan
    sys.exit(up.command())
