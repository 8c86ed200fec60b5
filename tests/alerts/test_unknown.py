"""What came to be unknown while Prometheus was down: nobody is accused by the last that was known of it.

A series that is left out meanwhile is repeated for five minutes, so that what an acting rule compares is NaN instead.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from deploy import parts
from exporter import reference
from tests.alerts.test_intervals import JOB, LIMIT_S, TENANT, WEDGES
from tools.mutation.judging import run
from tools.mutation.rules import ALERTS, files

NAN: Final = {name for name, when in reference.ABSENT.items() if "NaN" in when}
"""The series that are told as NaN while they are unknown."""

BEFORE: Final = 4
DOWN: Final = 2
"""So many scrapes, 15 s apart, before Prometheus is down, and so many that it misses."""

IDENTITIES: Final = (JOB[0], "gpuwarden_gang_rank_overdue_attempt", "gpuwarden_container_info", "gpuwarden_server_info")

AS_IT_IS: Final = {
    **dict.fromkeys(IDENTITIES, "it is told with what it is of, and the newest of several counts"),
    "gpuwarden_exporter_info": "it is told by whoever answers",
    "gpuwarden_gang_overdue_ranks": "it is told with its rank",
    "gpuwarden_gang_rank_attempt": "likewise; and of a rank the highest attempt counts",
    "gpuwarden_job_elapsed_seconds": "a repeat does not grow, and after the reboot that ends it all begins anew",
    "gpuwarden_worker_heartbeat_age_seconds": "likewise",
    "gpuwarden_job_health_grace_seconds": "it asks for more time, and is nothing without the window",
    "gpuwarden_worker_heartbeat_other_boot": "it is told of each worker",
    "gpuwarden_worker_dead_after_seconds": "likewise",
    "gpuwarden_worker_dead_seconds": "a repeat does not grow, and of a worker that lives again it is told that it does",
    "gpuwarden_worker_alive": "while it is unknown so is the process whose CPU time is asked for",
    "gpuwarden_container_gpu_memory_over_budget_bytes": "a repeat is older than its target's last scrape",
    "gpuwarden_container_recyclable": "it is of the container, for as long as that runs",
    "gpuwarden_server_silence_allowed_seconds": "likewise",
    "gpuwarden_gpu_memory_floor_bytes": "it is told of each GPU that has more memory",
    "gpuwarden_gpu_memory_tie_bytes": "it is told of each GPU",
}
"""What else acting rules ask of an exporter, and why a repeat of it, where it is told no more, accuses nobody."""


def operands() -> Iterator[tuple[str, str]]:
    """Each condition that compares durations, with each series of those that it compares."""
    for alert, wedge in WEDGES.items():
        names = [name for name, *_ in (*wedge.grow, *wedge.stay)]
        yield from ((alert, name) for name in names if name in NAN)
    yield from (("GpuwardenVramVictim", name) for name, *_ in VRAM if name in NAN)


VRAM: Final = (
    ("gpuwarden_container_info", TENANT + ', incarnation="i"', 1.0),
    ("gpuwarden_container_gpu_memory_over_budget_bytes", TENANT + ', gpu="g"', 1e9),
    ("gpuwarden_container_recyclable", TENANT, 1.0),
    ("gpuwarden_gpu_memory_free_bytes", 'host="a", gpu="g"', 1e9),
    ("gpuwarden_gpu_memory_returning_bytes", 'host="a", gpu="g"', 0.0),
    ("gpuwarden_gpu_memory_floor_bytes", 'host="a", gpu="g"', 2e9),
    ("gpuwarden_gpu_memory_tie_bytes", 'host="a", gpu="g"', 1e8),
)
"""One that is over its budget on a GPU that is short of memory."""


def scene(alert: str, unknown: str, afterwards: str) -> dict[str, Any]:
    """A wedge in every respect, whose identity is told once Prometheus is back; of one series that is told then."""
    long_s = float(4 * LIMIT_S)
    told = list(VRAM)
    if alert in WEDGES:
        told = [*((*each, long_s) for each in WEDGES[alert].grow), *WEDGES[alert].stay]
    series = []
    for name, labels, value in told:
        before, after = (f"{value:g}x{BEFORE - 1}", f"{value:g}x9")
        if name in IDENTITIES:
            before = f"_x{BEFORE}"
        if name == unknown:
            after = afterwards
        series.append({"series": f"{name}{{{labels}}}", "values": f"{before} _x{DOWN} {after}"})
    at_s = 15 * (BEFORE + DOWN)
    fires = f'count(ALERTS{{alertname="{alert}", alertstate="firing"}})'
    expected = [] if afterwards.startswith("NaN") else [{"value": 1}]
    return {
        "name": f"{alert} {unknown} {afterwards}",
        "interval": "15s",
        "input_series": series,
        "promql_expr_test": [{"expr": fires, "eval_time": f"{at_s}s", "exp_samples": expected}],
    }


@pytest.mark.needs_parts
@pytest.mark.parametrize(("alert", "unknown"), list(operands()))
def test_what_became_unknown_while_prometheus_was_down_accuses_nobody_and_would_if_it_were_left_out(
    alert: str, unknown: str, tmp_path: Path
) -> None:
    try:
        promtool = parts.find("promtool")
    except parts.PartMissing as missing:
        pytest.skip(str(missing))
    (rules,) = (file for file in ALERTS.glob("*.rules.yaml") if f"alert: {alert}\n" in file.read_text())
    tests = [scene(alert, unknown, afterwards) for afterwards in ("NaN+0x9", "_x10")]
    file = tmp_path / "a.test.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(rules)], "evaluation_interval": "15s", "tests": tests}))

    done = run(promtool, "test", "rules", file)

    assert done.returncode == 0, done.stdout + done.stderr


def test_of_all_that_acting_rules_ask_of_an_exporter_it_is_nan_while_unknown_or_known_why_not() -> None:
    rules = [
        rule for file in files() for group in yaml.safe_load(file.read_text())["groups"] for rule in group["rules"]
    ]
    records = {rule["record"]: rule["expr"] for rule in rules if "record" in rule}
    acting = [rule["expr"] for rule in rules if "remedy" in rule.get("labels", {}) or rule.get("alert") in WEDGES]
    for expr in acting:  # and what these ask of records, and those of others
        acting += [its for record, its in records.items() if record in expr and its not in acting]
    asked = {name for expr in acting for name in re.findall(r"\bgpuwarden_\w+", expr)} & reference.ABSENT.keys()

    assert asked - NAN == AS_IT_IS.keys()
    assert asked & NAN == {name for _, name in operands()}
