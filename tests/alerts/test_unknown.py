"""What came to be unknown while Prometheus was down: nobody is accused by the last that was known of it.

A series that is left out meanwhile is repeated for five minutes, so that what an acting rule compares is NaN instead.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from deploy import parts
from exporter import reference
from tests.alerts.judging import run
from tests.alerts.mutants import ALERTS
from tests.alerts.test_intervals import LIMIT_S, SLOT, TENANT, WEDGES

NAN: Final = {name for name, when in reference.ABSENT.items() if "NaN" in when}
"""The series that are told as NaN while they are unknown."""

BEFORE: Final = 4
DOWN: Final = 2
"""So many scrapes, 15 s apart, before Prometheus is down, and so many that it misses."""

PHASES: Final = {
    "GpuwardenJobStalled": ("gpuwarden_container_work_still_seconds", TENANT),
    "GpuwardenJobUnhealthy": ("gpuwarden_container_work_still_seconds", TENANT),
    "GpuwardenJobGpuLost": ("gpuwarden_container_work_still_seconds", TENANT),
    "GpuwardenSharedJobStalled": ("gpuwarden_worker_work_still_seconds", SLOT),
}
"""What else is asked in a save."""


def operands() -> Iterator[tuple[str, str]]:
    """Each condition that compares durations, with each series of those that it compares."""
    for alert, wedge in WEDGES.items():
        names = [name for name, *_ in (*wedge.grow, *wedge.stay)]
        if alert in PHASES:
            names.append(PHASES[alert][0])
        yield from ((alert, name) for name in names if name in NAN)


def scene(alert: str, unknown: str, afterwards: str) -> dict[str, Any]:
    """A wedge in every respect, whose identity is told once Prometheus is back; of one series that is told then."""
    wedge = WEDGES[alert]
    long_s = float(4 * LIMIT_S)
    told = [*((*each, long_s) for each in wedge.grow), *wedge.stay]
    if alert in PHASES:
        told += [(*PHASES[alert], long_s), ("gpuwarden_job_phase", SLOT + ', phase="save"', 1.0)]
    series = []
    for name, labels, value in told:
        before, after = (f"{value:g}x{BEFORE - 1}", f"{value:g}x9")
        if name.endswith("_info"):
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
    tests = [scene(alert, unknown, afterwards) for afterwards in ("NaN+0x9", "_x10", f"{4 * LIMIT_S}x9")]
    file = tmp_path / "a.test.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(rules)], "evaluation_interval": "15s", "tests": tests}))

    done = run(promtool, "test", "rules", file)

    assert done.returncode == 0, done.stdout + done.stderr
