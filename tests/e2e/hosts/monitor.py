"""`python -m tests.e2e.hosts.monitor JSON`: the programs that watch hosts, until SIGTERM. Prints Prometheus's address.

They run in one network namespace: Prometheus, Alertmanager, and a remediator with its own exporter. Prometheus also
scrapes `hosts`, an address for each host key, and the central gateway with the reports of the others.
"""

import json
import signal
import sys
from pathlib import Path
from typing import Any, Final

import yaml

from deploy.standalone.config_files import Intervals
from deploy.standalone.stack import PORTS, Chain, Plan
from testbed.stage import EXECUTE

HOST: Final = "monitor"
READY: Final = "ready at "


def main(given: str) -> None:
    """Run all of it."""
    asked = json.loads(given)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    plan = Plan(
        work=Path(asked["work"]),
        host=HOST,
        docker=None,
        simulate_gpu=None,
        armed=True,
        intervals=Intervals(scrape_s=asked["scrape_s"]),
        execute={**EXECUTE, "sweep_interval_s": 1},
        host_lost_after_s=asked["lost_after_s"],
        database=asked["database"],
        ports=PORTS,
    )
    with Chain(plan) as chain:
        _add_targets(plan.work / "prometheus.yml", asked)
        chain.signal("prometheus", signal.SIGHUP)
        print(READY + chain.prometheus_url, flush=True)
        while True:
            signal.pause()


def _add_targets(file: Path, asked: dict[str, Any]) -> None:
    config = yaml.safe_load(file.read_text())
    config["scrape_configs"][0]["static_configs"] += [
        {"targets": [address], "labels": {"host": host}} for host, address in asked["hosts"].items()
    ]
    gateway = {
        "honor_labels": True,
        "scheme": "https",
        "tls_config": {"ca_file": asked["ca_file"]},
        "static_configs": [{"targets": [asked["central"]]}],
    }
    config["scrape_configs"] += [
        {"job_name": f"gpuwarden-{page}", "metrics_path": f"/{page}", **gateway} for page in ("reports", "metrics")
    ]
    file.write_text(yaml.safe_dump(config))


if __name__ == "__main__":
    main(sys.argv[1])
