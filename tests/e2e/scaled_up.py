"""`gpuwarden up` for jobs of seconds: `python -m tests.e2e.scaled_up` and its arguments. Nothing else is different."""

import argparse
import sys
from dataclasses import replace
from typing import Final

from deploy.standalone import up
from deploy.standalone.docker_socket import Engine, NoEngine
from deploy.standalone.stack import Plan
from testbed.stage import FAST

STOP_GRACE_S: Final = 4.0
"""A test that acts in the middle of a stop may come seconds late."""

planned = up._plan


def scaled(arguments: argparse.Namespace, engine: Engine | NoEngine) -> Plan:
    """The plan, with every second counting for more, and no safeguard against a worker that wedges many times."""
    plan = planned(arguments, engine)
    scaled_ones = {
        "stop_grace_s": STOP_GRACE_S,
        "cooldown_s": 0,
        "breaker_targets": 1000,
        "breaker_restarts": 1000,
        "sweep_interval_s": 1,
    }
    return replace(
        plan, intervals=FAST, execute={**plan.execute, **scaled_ones, "sweep_interval_s": 1}, ram_idle_mib=24
    )


if __name__ == "__main__":
    up._plan = scaled
    sys.exit(up.command())
